"""What went wrong elsewhere: reading a live model under any transform leaves it concrete, whatever its forward does."""

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.errors import TraceContextError
from tests.properties.compare import Snapshot

X = jnp.ones((2, 4))
DEPTH = 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return x + nnx.tanh(self.norm(self.linear(x)))


class Backbone(nnx.Module):
    """Stacked by vmap, run by scan, each block recomputed in the backward pass."""

    def __init__(self):
        self.blocks = nnx.vmap(lambda rngs: Block(rngs))(nnx.Rngs(0).split(DEPTH))
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        run = nnx.scan(nnx.remat(lambda x, block: block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(x, self.blocks))


RAW = {
    "eval_shape": lambda f: jax.eval_shape(f, jax.ShapeDtypeStruct(X.shape, X.dtype)),
    "jit": lambda f: jax.jit(f)(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: f(x).sum()))(X),
    "linearize": lambda f: jax.linearize(f, X),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(X),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, X[None]),
    "map": lambda f: jax.lax.map(f, X[None]),
    "cond": lambda f: jax.lax.cond(True, f, f, X),
}


@pytest.mark.parametrize("name", RAW)
def test_a_stacked_model_stays_concrete_under_raw_jax(name):
    """In evaluation nothing is written: values have the right shape, and every leaf is the array that it was."""
    model = Backbone()
    model.eval()
    before = Snapshot(model)
    out = RAW[name](model)
    before.assert_unchanged()
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(nnx.state(model)))
    if name == "eval_shape":
        assert out.shape == (2, 2)
    if name == "jit":
        assert jnp.allclose(out, model(X), atol=1e-6)


@pytest.mark.parametrize("name", RAW)
def test_a_forward_that_updates_statistics_is_refused_and_names_them(name):
    """In training it would write BatchNorm's statistics from inside a trace of raw JAX."""
    model = Backbone()
    before = Snapshot(model)
    with pytest.raises(TraceContextError, match=r"BatchStat at .*blocks\.norm\.(mean|var)"):
        RAW[name](model)
    before.assert_unchanged()


def test_nnx_eval_shape_of_a_forward_that_updates_changes_nothing():
    model = Backbone()
    before = Snapshot(model)
    out = nnx.eval_shape(lambda model, x: model(x), model, X)
    assert out.shape == (2, 2)
    before.assert_unchanged()


def test_the_statistics_of_each_layer_come_out():
    """BatchNorm inside remat inside scan inside jit inside grad: equal to the plain loop over the layers."""
    model, plain = Backbone(), Backbone()
    nnx.jit(lambda model, x: nnx.grad(lambda model: model(x).sum())(model))(model, X + jnp.arange(4.0))
    x = X + jnp.arange(4.0)
    for i in range(DEPTH):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], plain.blocks)
        x = block(x)
        assert jnp.allclose(block.norm.mean.value, model.blocks.norm.mean[i], atol=1e-6)
        assert jnp.allclose(block.norm.var.value, model.blocks.norm.var[i], atol=1e-6)
