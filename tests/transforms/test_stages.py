"""Stages: jitted functions of Modules, ahead of time."""

import copy
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core import errors
from tests.properties.compare import assert_same

from .jitted import Net, X, values
from .models import counted


def test_lower_and_compile():
    """`.lower(...).compile()(...)` runs, writes, takes other models of the structure, and traces once."""
    f = counted(lambda m, x, *, by=1.0: m(x) * by)
    model, eager = Net(), Net()
    compiled = nnx.jit(f).lower(model, X, by=2.0).compile()
    assert f.count == 1
    for _ in range(2):
        np.testing.assert_array_equal(compiled(model, X, by=2.0), 2 * eager(X))
        assert_same(model, eager)
    np.testing.assert_array_equal(compiled(Net(), X, by=3.0), 3 * Net()(X))
    assert f.count == 1
    assert "add" in compiled.as_text()


def test_lowering_changes_nothing():
    """lower, trace, eval_shape leave the model as it was, values and attributes."""
    model = Net()
    before = values(model)
    jitted = nnx.jit(lambda m, x: (setattr(m, "extra", m(x)), m(x))[1])
    jitted.lower(model, X)
    jitted.trace(model, X)
    jitted.eval_shape(model, X)
    assert_same(model, Net())
    assert all(v is w for v, w in zip(before, values(model), strict=True))


def test_trace():
    """`.trace(...)` has the jaxpr, and goes on to `.lower().compile()`."""
    traced = nnx.jit(lambda m, x: m(x)).trace(Net(), X)
    assert "mul" in str(traced.jaxpr)
    assert traced.lower().compile()(Net(), X).tolist() == [4, 4]


def test_stages_of_abstract_models():
    """A model of ShapeDtypeStructs is lowered; the program runs with a concrete one."""
    abstract = nnx.eval_shape(lambda: Net())
    compiled = nnx.jit(lambda m, x: m(x)).lower(abstract, jax.ShapeDtypeStruct((2,), jnp.float32)).compile()
    assert compiled(Net(), X).tolist() == [4, 4]


@pytest.mark.parametrize("stage", ["lower", "trace"])
def test_stages_of_what_has_a_shape_and_a_dtype(stage):
    """As in JAX; what has neither is an error by path."""
    spec = types.SimpleNamespace(shape=(2,), dtype=np.dtype("float32"))
    jitted = nnx.jit(lambda m, x: m(x["a"]))
    for given in spec, jax.core.ShapedArray((2,), jnp.float32):
        assert getattr(jitted, stage)(Net(), {"a": given}).out_info.shape == (2,)
    with pytest.raises(errors.ArgumentError, match=r"args\[1\]\.a is a SimpleNamespace"):
        getattr(nnx.jit(lambda m, x: m(x["a"])), stage)(Net(), {"a": types.SimpleNamespace(shape=(2,))})


def test_stages_with_static_arguments_donation_and_bound_methods():
    """Static arguments are left out of the call, as in JAX; donated Variables live on."""
    model = Net()
    compiled = nnx.jit(lambda m, x, n: m(x) * n, static_argnums=2, donate_argnums=0).lower(model, X, 3).compile()
    assert compiled(model, X).tolist() == [12, 12]
    assert int(model.layers[0].calls) == 1
    with pytest.raises(errors.ArgumentError, match="called without its static arguments"):
        compiled(model, X, 3)
    assert nnx.jit(model).lower(X).compile()(X).tolist() == [4, 4]


def power(model, exponent, x, *more, scale=1.0, mode="same"):
    return scale * model(x) ** exponent + sum(more) + (mode == "other")


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "without"),
    [
        ({"static_argnums": 1}, (2, X, 1.0), {"scale": 3.0}, (X, 1.0)),
        ({"static_argnums": (1, -1)}, (2, X, 4.0, 1), {}, (X, 4.0)),
        ({"static_argnames": ("exponent", "mode")}, (2, X), {"mode": "other"}, (X,)),
        ({"static_argnames": ("exponent", "mode")}, (), {"exponent": 2, "x": X, "mode": "other"}, ()),
    ],
)
def test_a_compiled_function_is_called_without_static_arguments(options, args, kwargs, without):
    """Wherever they stand, given by number or name; with bound arguments, too."""
    model, names = Net(), ("exponent", "mode") if "static_argnames" in options else ()
    expected, rest = power(Net(), *args, **kwargs), {k: v for k, v in kwargs.items() if k not in names}
    compiled = nnx.jit(power, **options).trace(model, *args, **kwargs).lower().compile()
    np.testing.assert_array_equal(compiled(model, *without, **rest), expected)
    bound = nnx.jit_partial(power, model, **options).lower(*args, **kwargs).compile()
    np.testing.assert_array_equal(bound(*without, **rest), expected)


def test_a_stage_of_a_partial_with_a_module_by_name():
    """The Module is passed at each call, with its present values."""
    model = Net()
    compiled = nnx.jit(functools.partial(lambda x, m: m(x), m=model)).lower(X).compile()
    for _ in range(2):
        np.testing.assert_array_equal(compiled(X), model(X))
        nnx.update(model, jax.tree.map(lambda x: 2 * x, nnx.state(model)))


def test_a_compiled_function_called_with_another_structure():
    """The error says where the structures differ, what it was compiled for and what it got; nothing is changed."""
    compiled, other = nnx.jit(lambda m, x: m(x)).lower(Net(), X).compile(), Net(3)
    with pytest.raises(errors.ArgumentError, match=r"(?s)differ in structure.*layers\[2\]: nothing became"):
        compiled(other, X)
    assert_same(other, Net(3))
    other = Net()
    other.scale = 3.0
    with pytest.raises(errors.ArgumentError, match=r"scale: 2\.0 \(float\) became 3\.0 \(float\)"):
        compiled(other, X)
    for args, kwargs, said in (
        ((Net(), X, X), {}, r"args\[2\]: nothing became array"),
        ((Net(),), {}, r"args\[1\]: array became nothing"),
        ((Net(),), {"x": X}, r"args\[1\]: array became nothing\n  kwargs\.x: nothing became array"),
        ((), {}, r"args\[0\]: Net .* became nothing\n  args\[1\]: array became nothing"),
        ((X, Net()), {}, r"args\[0\]: Net .* became array"),
    ):
        with pytest.raises(errors.ArgumentError, match=rf"differ in structure.*:\n  {said}"):
            compiled(*args, **kwargs)
    with pytest.raises(errors.ArgumentError, match=r"args\[1\]: float32\[2\] became float32\[3\]\nCall the jitted"):
        compiled(Net(), jnp.ones(3))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_compiled_function_finds_known_objects_without_a_walk(sharded, unchecked):
    """A call that is like the one before makes a few Python and C calls, however many Modules there are."""

    def step(layers, x):
        layers[0].bias += x.sum()
        return layers[0](x)

    found = []
    for size in (2, 40):
        options = {"in_shardings": (None, None)} if sharded else {}
        layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(size)])
        compiled = nnx.jit(step, **options).lower(layers, jnp.ones(2)).compile()
        call = functools.partial(compiled, layers, jnp.ones(2))
        for _ in range(9):
            call()
        found.append(count_calls(call))
        assert layers[0].bias.value.tolist() == [20, 20]
    assert sharded or (found[0] == found[1] < 25)


@pytest.mark.parametrize("raw", [jax.jit, jax.vmap], ids=lambda f: f.__name__)
def test_a_compiled_function_called_with_live_objects_under_raw_jax(raw):
    """It may read them, and not write to them; also if it has been called before."""

    def count(m, x):
        m.count += 1
        return m.w * x

    model = nnx.Dict(w=nnx.Param(X), count=nnx.Variable(jnp.array(0)))
    counting, reading = (nnx.jit(f).lower(model, X).compile() for f in (count, lambda m, x: m.w * x))
    for _ in range(3):
        counting(model, X), reading(model, X)
        np.testing.assert_array_equal(raw(lambda x: x + reading(model, X))(X[None])[0], X + X * X)
        before = model.count.value
        with pytest.raises(errors.TraceContextError, match=r"args\[0\]\.count, which is model\.count"):
            raw(lambda x: x + counting(model, X))(X)
        assert model.count.value is before


def test_a_compiled_function_after_a_change_of_structure():
    """Whatever earlier calls have left behind: another structure is refused, and the first one taken again."""
    model, eager = Net(), Net()
    compiled = nnx.jit(lambda m, x, n: m(x) * n, static_argnums=2).lower(model, X, 2).compile()
    for _ in range(4):
        np.testing.assert_array_equal(compiled(model, X), 2 * eager(X))
        model.extra = 1
        with pytest.raises(errors.ArgumentError, match="extra"):
            compiled(model, X)
        del model.extra
        with pytest.raises(errors.ArgumentError, match=r"float32\[2\] became float32\[3\]"):
            compiled(model, jnp.ones(3))
    assert_same(model, eager)


def test_a_stage_can_be_copied():
    """A copy calls the same program; nothing is asked without end of a copy that is being made."""
    model = Net()
    compiled = nnx.jit(lambda m, x: m(x)).lower(model, X).compile()
    np.testing.assert_array_equal(copy.copy(compiled)(model, X), compiled(model, X))


def test_a_stage_is_written_as_that_of_jax():
    assert repr(nnx.jit(lambda x: x).lower(X).compile()).startswith("Stage(<jax")


def test_a_stage_takes_all_leaves_also_if_some_are_donated():
    """So `args_info` lists them all."""
    read_one = lambda m, x: m.first.set_value(m.first * x)

    class Two(nnx.Module):
        def __init__(self):
            self.first, self.second = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(3))

    plain, donating = (nnx.jit(read_one, donate_argnums=d).lower(Two(), 2.0).args_info for d in ((), 0))
    assert [x.shape for x in jax.tree.leaves(plain)] == [x.shape for x in jax.tree.leaves(donating)] == [(2,), (3,), ()]
    assert [x.donated for x in jax.tree.leaves(donating)] == [True, False, False]


def test_a_stage_of_a_partial_that_has_bound_an_array_takes_it_too():
    lowered = nnx.jit(functools.partial(lambda a, x: a + x, jnp.ones(3))).lower(jnp.ones(3))
    assert lowered.in_tree.num_leaves == 2
    assert lowered.compile()(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("donated", [(), (0,)])
def test_lowering_again_asks_jax_for_its_trace_once(donated):
    """A stage made again costs the walk of the arguments, and what JAX's own stage costs, but no trace."""

    f = counted(lambda model, x: model(x))
    stepped, model = nnx.jit(f, donate_argnums=donated), Net()
    raw = jax.jit(lambda *leaves: leaves, donate_argnums=donated)
    leaves = [*jax.tree.leaves(nnx.state(model)), X]
    for _ in range(2):
        stepped.lower(model, X), raw.lower(*leaves)
    stage, of_jax = (count_calls(call) for call in (lambda: stepped.lower(model, X), lambda: raw.lower(*leaves)))
    assert f.count == 1
    assert stage < of_jax + 650
