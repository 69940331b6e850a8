"""nnx.lift: any transformation of functions of arrays takes functions of Modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import nnxlib as nnx
from nnxlib.core import errors
from tests.properties.compare import Snapshot, assert_no_tracer

from .models import RAW, Layer, Norm, Pair, X


def twice(f):
    """A transformation that nobody has heard of: the mean of two calls."""

    def wrapped(*args):
        return jax.tree.map(
            lambda a, b: (a + b) / 2 if jnp.issubdtype(a.dtype, jnp.floating) else b, f(*args), f(*args)
        )

    return wrapped


TRANSFORMS = {
    "identity": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "named call": functools.partial(jax.named_call, name="block"),
    "written here": twice,
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_lifted_transformation_gives_the_value_and_the_state_of_a_plain_call(name):
    lifted = nnx.lift(TRANSFORMS[name])
    m, plain = Norm(), Norm()
    np.testing.assert_allclose(lifted(lambda m, x: m(x))(m, X), plain(X), rtol=1e-6)
    assert m.count.value == 1
    np.testing.assert_allclose(m.mean.value, plain.mean.value)


WAYS = {
    "function": lambda lifted, m: lifted(lambda m, x: m(x))(m, X),
    "keyword": lambda lifted, m: lifted(lambda m, x: m(x))(m, x=X),
    "unbound method": lambda lifted, m: lifted(Layer.__call__)(m, X),
    "bound method": lambda lifted, m: lifted(m.__call__)(X),
    "Module": lambda lifted, m: lifted(m)(X),
    "partial": lambda lifted, m: lifted(functools.partial(lambda x, m: m(x), m=m))(X),
    "static option": lambda lifted, m: lifted(
        functools.partial(lambda x, name, m: getattr(m, name)(x), name="__call__")
    )(X, m=m),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_callable_can_be_lifted(way):
    m = Layer()
    np.testing.assert_allclose(WAYS[way](nnx.lift(jax.jit), m), Layer()(X), rtol=1e-6)
    assert m.calls.value == 1


def test_a_lifted_transformation_is_a_decorator_for_functions_and_methods():
    recomputed = nnx.lift(jax.checkpoint)

    class Block(Layer):
        @recomputed
        def run(self, x):
            """Runs."""
            return self(x)

    m = Block()
    np.testing.assert_allclose(m.run(X), jnp.sin(2 * X), rtol=1e-6)
    assert m.calls.value == 1
    assert Block.run.__name__ == "run"
    assert Block.run.__doc__ == "Runs."


def test_an_outside_transformation_whose_result_is_more_than_the_output():
    """checkify from jax.experimental, by the `result` hook: `finish` gives the output and writes the state."""

    def checked(f):
        lifted = nnx.lift(checkify.checkify, result=lambda raw, finish: (raw[0], finish(raw[1])))
        return lifted(f)

    def f(m, x):
        checkify.check(jnp.all(x > 0), "x must be positive")
        return m(x)

    m = Layer()
    error, out = checked(f)(m, X)
    error.throw()
    np.testing.assert_allclose(out, jnp.sin(2 * X), rtol=1e-6)
    error, _ = checked(f)(m, -X)
    with pytest.raises(Exception, match="x must be positive"):
        error.throw()
    assert m.calls.value == 2


def test_structure_sharing_cycles_and_identity():
    def f(m, v):
        assert m.tied is v
        assert m.me is m
        m.new = nnx.Cache(X)
        del m.tied
        m.a, m.b = m.b, m.a
        return m, v, m.a, Layer(5.0)

    m = Pair()
    v, b = m.tied, m.b
    out = nnx.lift(jax.jit)(f)(m, v)
    assert out[0] is m
    assert out[1] is v
    assert out[2] is b
    assert m.a is b
    assert out[3].w.value[0] == 5
    assert m.new.value.shape == (3,)
    assert not hasattr(m, "tied")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["function", "transformation"])
def test_a_failure_changes_nothing(error, where):
    def f(m, x):
        m(x)
        m.new = nnx.Param(x)
        if where == "function":
            raise error

    def transformation(pure):
        def wrapped(*args):
            out = pure(*args)
            if where == "transformation":
                raise error
            return out

        return jax.jit(wrapped)

    m = Pair()
    before = Snapshot(m)
    with pytest.raises(error):
        nnx.lift(transformation)(f)(m, X)
    before.assert_unchanged()


@pytest.mark.parametrize("raw", RAW)
def test_a_read_only_function_under_raw_jax_leaves_the_live_model_as_it_was(raw):
    m = Layer()
    before = Snapshot(m)
    RAW[raw](lambda x: nnx.lift(jax.jit)(Layer.read)(m, x))
    before.assert_unchanged()


def test_a_write_under_raw_jax_is_refused_by_path():
    m = Layer()
    before = Snapshot(m)
    with pytest.raises(errors.TraceContextError, match=r"which is m\.calls"):
        jax.jit(lambda x: nnx.lift(jax.checkpoint)(m)(x))(X)
    before.assert_unchanged()


def test_an_output_that_is_no_array_is_an_error_by_path():
    with pytest.raises(errors.OutputError, match=r"<output>\.a is set to a str"):
        nnx.lift(jax.jit)(lambda m: {"a": "text"})(Layer())


def test_what_cannot_be_called_is_an_error():
    with pytest.raises(errors.ArgumentError, match="A List cannot be called"):
        nnx.lift(jax.jit)(nnx.List([]))


def test_no_tracer_leaks():
    m = Norm()
    with jax.checking_leaks():
        nnx.lift(jax.jit)(nnx.lift(jax.checkpoint)(Norm.__call__))(m, X)
    assert_no_tracer(m)
