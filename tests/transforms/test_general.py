"""nnx.make_jaxpr, nnx.named_call, and jax.export of a jitted function."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx

from .models import Counting

X = jnp.array([2.0, 3.0])


def apply(m, x):
    return m(x)


# --- make_jaxpr -----------------------------------------------------------------------------------------------------


def test_make_jaxpr_is_that_of_jax():
    """The equations are those of the same function on arrays; the inputs are the leaves; nothing is changed."""
    m = Counting()
    jaxpr = nnx.make_jaxpr(apply)(m, X)
    expected = jax.make_jaxpr(lambda calls, w, x: (calls + 1, w * x))(m.calls.value, m.w.value, X)
    assert type(jaxpr) is type(expected)
    assert str(jaxpr) == str(expected)
    assert m.calls == 0
    assert isinstance(m.w.value, jax.Array)


def test_make_jaxpr_forms():
    """Modules, methods and partials; as a decorator; static arguments; keyword arguments; under another trace."""
    m = Counting()
    expected = str(nnx.make_jaxpr(apply)(m, X))
    assert str(nnx.make_jaxpr(m)(X)) == expected
    assert str(nnx.make_jaxpr(functools.partial(apply, m))(X)) == expected
    assert str(nnx.make_jaxpr(static_argnums=2)(lambda m, x, on: m(x) if on else x)(m, X, True)) == expected
    assert str(nnx.make_jaxpr(apply)(m, x=jax.ShapeDtypeStruct((2,), jnp.float32))) == expected
    jax.jit(lambda: (nnx.make_jaxpr(apply)(m, X), ())[1])()
    assert m.calls == 0


def test_make_jaxpr_return_shape():
    """The output has abstract arrays; a Module in it is a new one, abstract as well."""
    m = Counting()
    jaxpr, (y, out) = nnx.make_jaxpr(lambda m, x: (m(x), m), return_shape=True)(m, X)
    assert y == jax.ShapeDtypeStruct((2,), jnp.float32)
    assert out is not m
    assert out.w.value == jax.ShapeDtypeStruct((2,), jnp.float32)
    assert out.calls.value.shape == ()
    assert m.calls == 0


# --- named_call -----------------------------------------------------------------------------------------------------


def test_named_call():
    """The label is in the compiled program; the function works on the very objects."""
    m = Counting()
    f = nnx.named_call(apply, name="my_label")
    assert f(m, X).tolist() == [2.0, 6.0]
    assert m.calls == 1
    assert "my_label" in nnx.jit(f).lower(m, X).compile().as_text()

    @nnx.named_call
    def by_its_name(m):
        return 2 * m.w

    assert "by_its_name" in nnx.jit(by_its_name).lower(m).compile().as_text()


# --- export ---------------------------------------------------------------------------------------------------------


def test_export_of_a_jitted_function():
    """``jax.export`` takes a jitted function of Modules; what it gives is called with the leaves."""
    m = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    exported = jax.export.export(nnx.jit(apply))(m, X)
    leaves = exported.call(*jax.tree.leaves(nnx.state(m)), X)
    np.testing.assert_allclose(leaves[-1], m(X), rtol=1e-6)


def test_what_an_exported_function_takes_and_returns():
    """The values of Variables come first, those of each argument in the order of its State; the output comes last."""
    norm, linear = nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    linear.offset = jnp.arange(2.0)  # an array that is an attribute comes after all Variables
    f = lambda x, linear, norm: norm(linear(x) + linear.offset)
    exported = jax.export.export(nnx.jit(f))(X, linear, norm)
    values = jax.tree.leaves([nnx.state(m, nnx.Variable) for m in (linear, norm)])
    mean, var, out = exported.call(*values, linear.offset, X)
    np.testing.assert_allclose(out, f(X, linear, norm), rtol=1e-5)
    np.testing.assert_allclose(mean, norm.mean.value, rtol=1e-5)
    np.testing.assert_allclose(var, norm.var.value, rtol=1e-5)


@pytest.mark.parametrize("recurrent", [False, True], ids=["scan", "RNN"])
def test_export_of_a_loop_over_any_number_of_steps(recurrent):
    """A symbolic size may be the length of a scan, and of the sequences of a recurrent layer."""
    if recurrent:
        apply = nnx.RNN(nnx.GRUCell(3, 3, rngs=nnx.Rngs(0)), time_major=True)
    else:
        sums = nnx.scan(lambda total, x: (total + x, total + x))
        apply = lambda xs: sums(jnp.zeros_like(xs[0]), xs)[1]
    shape = jax.export.symbolic_shape("steps, batch, 3")
    exported = jax.export.export(jax.jit(lambda xs: apply(xs)))(jax.ShapeDtypeStruct(shape, jnp.float32))
    for steps in (1, 4):
        xs = jnp.linspace(-1, 1, steps * 6).reshape(steps, 2, 3)
        np.testing.assert_allclose(exported.call(xs), apply(xs), rtol=1e-5)
