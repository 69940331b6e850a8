import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core.errors import EmptySelectionError, StateMismatchError
from nnxlib.core.tables import table_of


class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.layers = [nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)]
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.steps = nnx.Variable(jnp.array(0))
        self.tied = self.layers[0].bias
        self.table = jnp.ones(2)

    def __call__(self, x):
        self.steps.value += 1
        return self.dropout(self.norm(self.layers[1](self.layers[0](x))))


def values(node, *filters):
    return {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(nnx.variables(node, *filters))}


def moved(model, by=1.0):
    nnx.update(model, jax.tree.map(lambda x: x + by, nnx.state(model, nnx.Param)))


def test_the_average_follows_the_formula():
    """decay^n of the start, and (1 - decay) decay^k of what was k updates ago."""
    model, start = Net(), values(Net(), nnx.Param)
    ema = nnx.EMA(model, 0.75, only=nnx.Param)
    for _ in range(3):
        moved(model)
        ema.update(model)
    gain = sum(0.25 * 0.75**k * (3 - k) for k in range(3))
    for path, average in values(ema.params).items():
        np.testing.assert_allclose(average, start[path] + gain, rtol=1e-6)


def test_the_averages_have_types_paths_and_metadata_of_their_variables():
    """Below ``params``, with buffers of their own."""
    model = nnx.Dict(w=nnx.Param(jnp.ones(2), layer="a"), stats=nnx.Dict(mean=nnx.BatchStat(jnp.ones(2))))
    ema = nnx.EMA(model, 0.9)
    assert (type(ema.params.w), type(ema.params.stats.mean), ema.params.w.layer) == (nnx.Param, nnx.BatchStat, "a")
    assert list(dict(nnx.to_flat_state(nnx.state(ema)))) == [("params", "stats", "mean"), ("params", "w")]
    nnx.jit(lambda model: None, donate_argnums=0)(model)
    assert ema.params.w.value.tolist() == [1, 1]


def test_counts_and_keys_take_the_newest_value():
    """A whole model is averaged, random streams and step counts included."""
    model = Net()
    del model.table
    ema = nnx.EMA(model, 0.9)
    model(jnp.ones((4, 2)))
    ema.update(model)
    assert ema.params.steps.value == 1
    assert ema.params.dropout.rngs.count.value == model.dropout.rngs.count.value == 1
    np.testing.assert_allclose(ema.params.norm.mean.value, 0.1 * model.norm.mean.value, rtol=1e-5)


@pytest.mark.parametrize("promotion", ["standard", "strict"])
@pytest.mark.parametrize(("dtype", "size"), [(jnp.bfloat16, 1000), (jnp.float8_e4m3fn, 256), (jnp.float8_e5m2, 1024)])
def test_low_precision_averages_are_computed_in_float32(dtype, size, promotion):
    """In bfloat16 arithmetic a decay of 0.999 would be 1; the average keeps its dtype. JAX does not promote float8."""
    model = nnx.Dict(w=nnx.Param(jnp.zeros(1, dtype)))
    ema = nnx.EMA(model, 1 - 1 / size)
    model.w.value = jnp.full(1, size, dtype)
    with jax.numpy_dtype_promotion(promotion):
        ema.update(model)
    assert ema.params.w.dtype == dtype
    np.testing.assert_allclose(np.float32(ema.params.w.value), 1.0, rtol=0.01)


def test_the_average_of_what_is_kept_in_a_ref():
    """It is in a jax.Ref of its own, which the update writes."""
    model = nnx.Dict(w=nnx.Param(jnp.zeros(2), ref=True))
    ema = nnx.EMA(model, 0.75)
    model.w.value += 4
    ema.update(model)
    assert (ema.params.w.tolist(), model.w.tolist()) == ([1, 1], [4, 4])


def test_apply_to_shares_its_variables():
    """The averages are those of the EMA, the rest and the shared ones are those of the model, the nodes are new."""
    model = Net()
    ema = nnx.EMA(model, 0.9, only=nnx.Param)
    smooth = ema.apply_to(model)
    assert type(smooth) is Net
    assert smooth.layers[1].kernel is ema.params.layers[1].kernel
    assert smooth.tied is smooth.layers[0].bias is ema.params["layers"][0]["bias"]
    assert smooth.norm.mean is model.norm.mean
    assert smooth is not model
    assert smooth.layers[0] is not model.layers[0]
    assert model.tied is model.layers[0].bias
    moved(model)
    ema.update(model)  # later updates show
    np.testing.assert_allclose(smooth.norm.bias.value, 0.1, rtol=1e-6)


def test_a_state_can_be_averaged():
    """Made and updated from States, without the model."""
    model = Net()
    ema = nnx.EMA(nnx.state(model, nnx.Param), 0.5)
    moved(model)
    ema.update(nnx.state(model, nnx.Param))
    np.testing.assert_allclose(ema.apply_to(model).norm.bias.value, 0.5)


def test_a_jitted_update_compiles_once():
    """The layout of an EMA is kept; the decay is part of the program."""
    traces = []

    @nnx.jit(donate_argnums=0)
    def update(ema, model):
        traces.append(1)
        ema.update(model)

    model = Net()
    ema, eager = nnx.EMA(model, 0.9, only=nnx.Param), nnx.EMA(model, 0.9, only=[nnx.Param])
    for _ in range(3):
        moved(model)
        update(ema, model)
        eager.update(model)
    assert len(traces) == 1
    assert table_of(ema).reliable
    for path, average in values(eager).items():
        np.testing.assert_allclose(values(ema)[path], average, rtol=1e-6, atol=1e-6)


def test_the_averages_of_an_ensemble():
    """Made and updated under nnx.vmap, each member has the averages that it would have alone."""
    make = nnx.vmap(lambda w: (nnx.Dict(w=nnx.Param(w)), nnx.EMA(nnx.Dict(w=nnx.Param(w)), 0.5)))
    model, ema = make(jnp.arange(3.0))
    model.w.value += 1
    nnx.vmap(lambda ema, model: ema.update(model))(ema, model)
    assert ema.params.w.value.tolist() == [0.5, 1.5, 2.5]
    assert ema.apply_to(model).w is ema.params.w


def test_values_that_do_not_fit():
    """Missing, unexpected and wrongly shaped ones are named, and nothing is changed."""
    ema = nnx.EMA(nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2))), 0.5)
    other = nnx.Dict(a=nnx.Param(jnp.zeros(3)), c=nnx.Param(jnp.zeros(2)))
    with pytest.raises(StateMismatchError) as caught:
        ema.update(other)
    for line in (
        "a: expected shape (2,), got (3,)", "b: missing, expected Param (float32[2])", "c: unexpected float32[2]",
    ):  # fmt: skip
        assert f"\n  {line}\n" in str(caught.value)
    assert "Pass the model that the averages are of" in str(caught.value)
    assert ema.params.a.value.tolist() == [1, 1]
    with pytest.raises(StateMismatchError, match=r"This Dict does not fit the EMA.\n  a: expected shape"):
        ema.apply_to(other)


def test_an_update_from_another_trace_writes_nothing():
    """Closed over by a plain jax.jit, an EMA refuses."""
    model = Net()
    ema = nnx.EMA(model, 0.5, only=nnx.Param)
    before = values(ema)
    with pytest.raises(nnx.TraceContextError, match="Param"):
        jax.jit(lambda x: (ema.update(model), x)[1])(1.0)
    assert all(np.array_equal(value, before[path]) for path, value in values(ema).items())


def test_nothing_to_average():
    """A filter that selects nothing is an error, as is an array outside of a Variable; both say what to do."""
    with pytest.raises(EmptySelectionError, match="only=Cache selects nothing in this Net"):
        nnx.EMA(Net(), 0.9, only=nnx.Cache)
    with pytest.raises(TypeError, match=r"table is float32\[2\] outside of a Variable.*only=nnx.Param"):
        nnx.EMA(Net(), 0.9)


def test_the_averages_can_be_written_into_a_model():
    model, other = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    nnx.update(other, nnx.EMA(model, 0.9).params)
    assert (other.kernel == model.kernel).all()


def test_a_decay_that_is_none():
    """A number outside of 0 to 1, and a model in its place."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"is between 0 and 1, but got 1\.5"):
        nnx.EMA(model, decay=1.5)
    with pytest.raises(TypeError, match=r"the model first: nnx\.EMA\(model, decay\), but got decay=Linear"):
        nnx.EMA(0.999, model)


def test_a_decay_that_is_text_is_refused():
    with pytest.raises(TypeError, match="The decay of an EMA is a number between 0 and 1, but got 'a'"):
        nnx.EMA(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "a")
