"""The engine: crossing as a pure function, what is checked on the way out, and nnx.lift."""

import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from nnxlib.core.graph import commit, pack
from nnxlib.transforms.lift import Arguments, Crossing, Outcome, cross
from tests.properties.compare import assert_same, objects_in


class Layer(nnx.Module):
    def __init__(self, value=1.0):
        self.w = nnx.Param(jnp.full(2, value))
        self.calls = nnx.Cache(0)

    def __call__(self, x):
        self.calls.value += 1
        return self.w * x

    def method(self, x, by):
        return by * self(x)


X = jnp.ones(2)


# --- crossing -------------------------------------------------------------------------------------------------------


def test_cross_works_on_fresh_objects():
    """The function sees equal objects of the same pattern, never the live ones; those stay as they are."""
    layer = Layer()
    packed, seen = pack(Arguments((layer, [layer]), {"w": layer.w})), []

    def f(a, b, w):
        assert b[0] is a
        assert w is a.w
        seen.extend(objects_in(a))
        a.w.value, a.extra = a.w + 1, 1
        return a, b

    fresh, after = cross(f, packed.layout, packed.leaves)
    assert fresh[0] is fresh[1][0] is seen[0]
    assert not set(map(id, seen)) & set(map(id, objects_in(layer)))
    assert_same(layer, Layer())
    out = commit(packed.layout, after.delta, after.leaves, packed.objects)
    assert out[0] is out[1][0] is layer
    assert (layer.extra, layer.w.value.tolist()) == (1, [2, 2])


def test_a_part_of_the_output_is_packed():
    """The output is returned as it is; of the chosen part of it, commit makes what the caller sees."""
    packed = pack(Arguments((Layer(),), {}))
    out, after = cross(lambda m: (3.0, m), packed.layout, packed.leaves, part=lambda out: out[1])
    assert out[0] == 3.0
    assert commit(packed.layout, after.delta, after.leaves, packed.objects) is packed.objects[0]


def test_the_pure_function():
    """Groups of leaves in, groups of leaves and an Outcome out; only what changed comes back; it is pure."""
    layer = Layer()
    packed = pack(Arguments((layer, X), {}))
    pure = Crossing(packed.layout).purify(lambda m, x: m(x))
    for _ in range(2):
        (leaves,), outcome = pure(packed.leaves)
        assert [np.asarray(x).tolist() for x in leaves] == [1, [1, 1]]
        assert repr(outcome) == "Outcome(1 values and 0 objects changed)"
    assert_same(layer, Layer())


def test_forced_leaves_come_back():
    """Leaves that are asked for come back unchanged too."""
    packed = pack(Arguments((Layer(),), {}))
    (leaves,), _ = Crossing(packed.layout).run(lambda m: None, packed.leaves, forced=range(len(packed.leaves)))
    assert len(leaves) == 2
    assert all(a is b for a, b in zip(leaves, packed.leaves, strict=True))


def test_outcomes_compare_by_value():
    """JAX compares them between traces, branches and iterations: equal changes are equal, and hash alike."""

    def outcome(f, layer):
        packed = pack(Arguments((layer, X), {}))
        return Crossing(packed.layout).purify(f)(packed.leaves)[1]

    one, two = outcome(lambda m, x: m(x), Layer()), outcome(lambda m, x: m(x) + 1, Layer(2.0))
    other = outcome(lambda m, x: (m(x), setattr(m, "extra", 1)), Layer())
    assert one == two
    assert hash(one) == hash(two)
    assert one != other
    assert one != "Outcome"
    assert jax.tree.structure(one) == jax.tree.structure(two)


def test_jax_sees_the_name_of_the_user_s_function():
    """Programs are named after the function, or the class of a callable."""

    def my_step(m, x):
        return m(x)

    assert "my_step" in nnx.jit(my_step).lower(Layer(), X).as_text()
    assert "jit___call" in nnx.jit(Layer()).lower(X).as_text()


# --- what comes out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda m: "text", r"^<output> is set to a str \('text'\)"),
        (lambda m: {"a": [1.0, "text"]}, r"^<output>\.a\[1\] is set to a str"),
        (lambda m: {"a": m, "b": print}, r"^<output>\.b is set to a builtin_function_or_method"),
        (lambda m: setattr(m.w, "value", "text"), r"^args\[0\]\.w is set to a str"),
        (lambda m: setattr(m.w, "value", {"k": "text"}), r"^args\[0\]\.w is set to a dict"),
        (lambda m: setattr(m, "new", nnx.Param("text")), r"^args\[0\]\.new is set to a str"),
        (lambda m: nnx.Param("text"), r"^<output> is set to a str"),
        (lambda m: setattr(m, "new", nnx.data("text")), r"^args\[0\] is set to a str|^args\[0\]\.new is set to a str"),
    ],
)
@pytest.mark.parametrize("transform", ["jit", "eval_shape", "nested"])
def test_values_that_cannot_come_out(f, message, transform):
    """The error names the path in the output or in the arguments, and nothing is changed."""
    layer = Layer()
    call = {
        "jit": lambda: nnx.jit(f)(layer),
        "eval_shape": lambda: nnx.eval_shape(f, layer),
        "nested": lambda: nnx.grad(lambda x: nnx.jit(f)(layer) or x)(1.0),
    }
    with pytest.raises(errors.OutputError, match=message):
        call[transform]()
    assert_same(layer, Layer())


# --- nnx.lift -------------------------------------------------------------------------------------------------------


def test_lift_makes_transforms_of_modules():
    """Any JAX transform of a function of a pytree: values and structure come out, on the caller's objects."""
    for jax_transform in (jax.jit, jax.checkpoint, lambda f: f, lambda f: jax.jit(jax.checkpoint(f))):
        layer, eager = Layer(), Layer()

        def f(m, x, *, by):
            m.seen = nnx.Cache(m(x) * by)
            return m, m.seen

        lifted = nnx.lift(jax_transform)(f)
        for _ in range(2):
            out, seen = lifted(layer, X, by=2.0)
            f(eager, X, by=2.0)
            assert out is layer
            assert seen is layer.seen
            assert_same(layer, eager)
        with pytest.raises(TypeError, match="by"):
            lifted(layer, X)
        assert_same(layer, eager)


def test_lift_of_methods_and_partials():
    """Bound methods, callable Modules and partials, as with every transform; names and signatures are kept."""
    layer = Layer()
    assert nnx.lift(jax.jit)(layer)(X).tolist() == [1, 1]
    assert nnx.lift(jax.jit)(layer.method)(X, 3.0).tolist() == [3, 3]
    assert nnx.lift(jax.jit)(functools.partial(layer.method, by=2))(X).tolist() == [2, 2]
    assert int(layer.calls) == 3
    assert nnx.lift(jax.jit)(layer.method).__name__ == "method"
    assert list(inspect.signature(nnx.lift(jax.jit)(Layer.method)).parameters) == ["self", "x", "by"]


def test_lift_with_more_than_the_output():
    """`result` takes apart what a transformed function returns besides the output; finish writes the changes."""
    layer = Layer()

    def with_tangent(pure):
        return lambda leaves: (jax.jit(pure)(leaves), "more")

    lifted = nnx.lift(with_tangent, result=lambda raw, finish: (finish(raw[0]), raw[1]))
    out, more = lifted(lambda m, x: m(x))(layer, X)
    assert (out.tolist(), more, int(layer.calls)) == ([1, 1], "more", 1)


def test_an_outcome_is_not_data():
    """Outcomes are static in output pytrees: JAX hands them through, and they hold no arrays."""
    packed = pack(Arguments((Layer(), X), {}))
    _, outcome = jax.jit(Crossing(packed.layout).purify(lambda m, x: m(x)))(packed.leaves)
    assert isinstance(outcome, Outcome)
    assert jax.tree.leaves(outcome) == []
    assert pickle.loads(pickle.dumps(outcome.delta)) == outcome.delta
