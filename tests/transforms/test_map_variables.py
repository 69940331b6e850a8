"""nnx.map_variables: the function sees transformed values, the model holds stored ones, always."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from tests.properties.compare import Snapshot, assert_no_tracer

from .models import RAW, Layer, Norm, Pair, X


def twice(state):
    return jax.tree.map(lambda x: 2 * x, state)


def half(state):
    return jax.tree.map(lambda x: x / 2, state)


def run(model, x):
    return model(x)


class Decorated(Layer):
    @nnx.map_variables(filter=nnx.Param, trans_in=twice)
    def doubled(self, x):
        return self(x)


WAYS = {
    "function": lambda m: nnx.map_variables(run, nnx.Param, twice)(m, X),
    "by default the Params": lambda m: nnx.map_variables(run, trans_in=twice)(m, X),
    "decorated method": lambda m: m.doubled(X),
    "Module": lambda m: nnx.map_variables(m, nnx.Param, twice)(X),
    "bound method": lambda m: nnx.map_variables(m.__call__, nnx.Param, twice)(X),
    "partial": lambda m: nnx.map_variables(functools.partial(run, x=X), nnx.Param, twice)(m),
    "keyword": lambda m: nnx.map_variables(run, nnx.Param, twice)(model=m, x=X),
    "path filter": lambda m: nnx.map_variables(run, nnx.filterlib.PathIn(("w",)), twice)(m, X),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_use_runs_on_the_transformed_weights_and_keeps_the_stored_ones(way):
    model = Decorated()
    stored = model.w.value
    np.testing.assert_allclose(WAYS[way](model), jnp.sin(2 * stored * X), rtol=1e-6)
    assert model.w.value is stored
    assert model.calls.value == 1  # what is not mapped is written as ever


def test_gradients_flow_through_the_transformation():
    def loss(model, x):
        return nnx.map_variables(run, nnx.Param, twice)(model, x).sum()

    model = Layer()
    grads = nnx.grad(loss)(model, X)
    np.testing.assert_allclose(grads.w.value, 2 * X * jnp.cos(2 * model.w * X), rtol=1e-6)
    assert_no_tracer(model)


def test_what_is_written_is_stored_through_trans_out():
    """Only what changed: the other mapped Variable keeps the very array it had."""

    def add(m):
        m.a.w.value += 1
        return m.a.w

    m = Pair()
    other, tied = m.b.w.value, m.a.w
    out = nnx.map_variables(add, nnx.Param, twice, half)(m)
    assert out is tied is m.tied
    np.testing.assert_allclose(tied.value, 1.5)
    assert m.b.w.value is other


def test_trans_out_may_store_in_another_mapped_variable():
    """A tied pair: the second is seen as the transpose of the first, and a change of it is one of the first."""

    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Param(jnp.arange(6.0).reshape(2, 3))
            self.head = nnx.Param(jnp.zeros((3, 2)))

    def tie(state):
        state["head"].value = state["embed"].value.T
        return state

    def untie(state):
        return nnx.State({"embed": state["head"].value.T, "head": jnp.zeros((3, 2))})

    @nnx.map_variables(filter=nnx.Param, trans_in=tie, trans_out=untie)
    def scale(m):
        m.head.value *= 2
        return m.head.value

    m = Tied()
    np.testing.assert_array_equal(scale(m), 2 * jnp.arange(6.0).reshape(2, 3).T)
    np.testing.assert_array_equal(m.embed.value, 2 * jnp.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(m.head.value, jnp.zeros((3, 2)))


def test_stored_values_may_have_another_dtype_shape_and_structure():
    """Quantised weights: an int8 array and a scale, in one Variable."""

    def dequantise(state):
        return nnx.map_state(lambda path, v: v.replace(v.value["q"] * v.value["scale"]), state)

    layer = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
    kernel = layer.kernel.value
    scale = jnp.abs(kernel).max() / 127
    layer.kernel.value = {"q": jnp.round(kernel / scale).astype(jnp.int8), "scale": scale}
    before = Snapshot(layer)
    y = nnx.map_variables(layer, nnx.Param, dequantise)(jnp.ones((1, 2)))
    np.testing.assert_allclose(y, jnp.ones((1, 2)) @ kernel, atol=0.02)
    before.assert_unchanged()


def test_metadata_alone_may_change_without_trans_out():
    def rename(m):
        m.w.set_metadata(name="renamed")

    m = Layer()
    stored = m.w.value
    nnx.map_variables(rename, nnx.Param, twice)(m)
    assert m.w.name == "renamed"
    assert m.w.value is stored


def test_each_argument_has_a_state_of_its_own():
    seen = []

    def look(state):
        seen.append(nnx.to_flat_state(state).paths if isinstance(state, nnx.State) else type(state))
        return twice(state)

    def f(pair, v, x):
        return pair.a.w.value + v.value + x

    m, v = Pair(), nnx.Param(jnp.ones(3))
    np.testing.assert_array_equal(nnx.map_variables(f, nnx.Param, look)(m, v, X), 2 + 2 + X)
    assert seen == [(("a", "w"), ("b", "w")), nnx.Param]


def write(m):
    m.a.w.value += 1


def fail(m):
    m.a.w.value += 1
    m.a.calls.value += 1
    m.new = nnx.Param(m.b.w.value)
    raise KeyError("failed")


def lose(state):
    return nnx.State({"a": state["a"]})


def rename(state):
    return nnx.State({"a": {"v": state["a"]["w"]}})


FAILURES = {
    "write without trans_out": (write, nnx.Param, twice, None, ValueError, r"changes args\[0\]\.a\.w, .*no trans_out"),
    "the function": (fail, nnx.Param, twice, half, KeyError, "failed"),
    "nothing mapped": (write, nnx.BatchStat, twice, half, errors.EmptySelectionError, "maps nothing"),
    "lost in": (
        write,
        nnx.Param,
        lose,
        half,
        errors.StateMismatchError,
        r"trans_in has to .*\n  args\[0\]\.b\.w: missing",
    ),
    "other path in": (
        write,
        nnx.Param,
        rename,
        half,
        errors.StateMismatchError,
        r"args\[0\]\.a\.v: unexpected .*\n  args\[0\]\.a\.w: missing",
    ),
    "lost out": (
        write,
        nnx.Param,
        twice,
        lambda s: nnx.State({}),
        errors.StateMismatchError,
        r"trans_out has to .*\n  args\[0\]\.a\.w: missing, expected Param",
    ),
    "other path out": (
        write,
        nnx.Param,
        twice,
        rename,
        errors.StateMismatchError,
        r"trans_out has to .*\n  args\[0\]\.a\.v: unexpected",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_changes_nothing(case):
    f, filter_, trans_in, trans_out, error, message = FAILURES[case]
    m = Pair()
    before = Snapshot(m)
    with pytest.raises(error, match=message):
        nnx.map_variables(f, filter_, trans_in, trans_out)(m)
    before.assert_unchanged()


def test_a_missing_trans_in_is_an_error():
    with pytest.raises(errors.ArgumentError, match="needs trans_in"):
        nnx.map_variables(run, nnx.Param)


@pytest.mark.parametrize("raw", RAW)
def test_a_read_only_forward_under_raw_jax_leaves_the_live_model_as_it_was(raw):
    m = Norm()
    m.training = False
    before = Snapshot(m)
    RAW[raw](lambda x: nnx.map_variables(m, nnx.Param, twice)(x))
    before.assert_unchanged()


def test_inside_jit_and_scan_no_tracer_leaks():
    def step(m, x):
        y = nnx.map_variables(run, nnx.Param, twice)(m, x)
        return nnx.map_variables(write_all, nnx.Param, twice, half)(m) + y

    def write_all(m):
        m.w.value += 2
        return m.w.value

    axes = nnx.StateAxes({...: nnx.Carry})
    m = Layer()
    with jax.checking_leaks():
        nnx.jit(nnx.scan(step, in_axes=(axes, 0), out_axes=0))(m, jnp.stack([X, X]))
    np.testing.assert_allclose(m.w.value, 4.0)
    assert m.calls.value == 2
    assert_no_tracer(m)


class Lazy(nnx.Module):
    """Makes its parameter at the first call."""

    def __call__(self, x):
        if not hasattr(self, "w"):
            self.w = nnx.Param(jnp.full(3, 4.0))
        return self.w * x


def test_what_the_function_makes_is_stored_through_trans_out():
    m = Lazy()
    mapped = nnx.map_variables(run, nnx.Param, twice, half)
    np.testing.assert_array_equal(mapped(m, X), 4 * X)
    np.testing.assert_array_equal(m.w.value, 2.0)
    np.testing.assert_array_equal(mapped(m, X), 4 * X)
    fresh = Lazy()
    before = Snapshot(fresh)
    with pytest.raises(ValueError, match=r"changes args\[0\]\.w, .*no trans_out"):
        nnx.map_variables(run, nnx.Param, twice)(fresh, X)
    before.assert_unchanged()


@pytest.mark.parametrize("tied", [False, True])
def test_what_takes_the_place_of_a_variable_and_what_was_there_are_two(tied):
    """Both have the same path; the former one may be held elsewhere, and still gets what is its own."""

    def replace(model):
        model.w = nnx.Param(model.w + 5)
        model.weight[0] = 7.0

    model, eager = Layer(), Layer()
    for m in (model, eager):
        m.weight = m.w if tied else nnx.Param(X)
    former = model.w
    replace(eager)
    nnx.map_variables(replace, nnx.Variable, lambda state: state, lambda state: state)(model)
    np.testing.assert_array_equal(model.w, eager.w)
    np.testing.assert_array_equal(model.weight, eager.weight)
    np.testing.assert_array_equal(former, model.weight if tied else Layer().w)


@pytest.mark.parametrize(("first", "second"), [(nnx.Param, nnx.Dict), (nnx.Dict, nnx.Param)])
def test_a_variable_takes_the_place_of_a_node_with_variables_or_the_reverse(first, second):
    """The path of one begins with that of the other."""
    make = lambda kind, value: nnx.Param(value) if kind is nnx.Param else nnx.Dict(x=nnx.Param(value))
    param = lambda held: held if isinstance(held, nnx.Param) else held["x"]
    m = nnx.Dict(w=make(first, X))
    former = m.w

    def replace(m):
        param(m.w).value += 2.0
        m.w = make(second, X + 4.0)

    nnx.map_variables(replace, nnx.Param, twice, half)(m)
    assert type(m.w) is second
    np.testing.assert_array_equal(param(m.w), (X + 4.0) / 2)
    np.testing.assert_array_equal(param(former), X + 1.0)


@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit])
def test_a_variable_that_keeps_its_value_in_a_reference(outer):
    """The function sees a transformed value; what it writes is stored in the reference, which stays."""

    def add(m):
        m.w.value = m.w + 1.0
        return m.w.value

    m = nnx.Dict(w=nnx.Param(X, ref=True))
    ref = m.w.get_raw_value()
    np.testing.assert_array_equal(outer(nnx.map_variables(lambda m: m.w.value, nnx.Param, twice))(m), 2 * X)
    with pytest.raises(errors.ReadOnlyError, match=r"changes args\[0\]\.w"):
        outer(nnx.map_variables(add, nnx.Param, twice))(m)
    np.testing.assert_array_equal(ref[...], X)
    np.testing.assert_array_equal(outer(nnx.map_variables(add, nnx.Param, twice, half))(m), 2 * X + 1)
    np.testing.assert_array_equal(ref[...], X + 0.5)
    assert m.w.get_raw_value() is ref


def test_a_class_stores_transformed_parameters_from_the_beginning():
    """Linen's `init=True` is `__init__` among the methods."""
    cls = nnx.map_variables(nnx.Linear, nnx.Param, twice, half, methods=["__init__", "__call__"])
    m, plain = cls(3, 2, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(m.kernel.value, plain.kernel.value / 2)
    np.testing.assert_allclose(m(X), plain(X), rtol=1e-6)
