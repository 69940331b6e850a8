"""A program as users write them, for type checkers: it is checked with the package and never run."""

from __future__ import annotations

from typing import assert_type

import jax
import jax.numpy as jnp

import nnxlib as nnx


class Block(nnx.Module):
    def __init__(self, features: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(features, features, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(features))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        return self.scale * self.linear(x) + x @ self.linear.kernel - x / self.scale


class Model(nnx.Module):
    def __init__(self, depth: int, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(4, rngs=rngs) for _ in range(depth)])

    @nnx.jit
    def encode(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def arithmetic(v: nnx.Param[jax.Array], x: jax.Array) -> None:
    """An operator on a Variable gives what it gives on the value; an operator in place gives the Variable."""
    assert_type(v + 1, jax.Array)
    assert_type(1 - v, jax.Array)
    assert_type(x * v, jax.Array)
    assert_type(v @ v, jax.Array)
    assert_type(-v, jax.Array)
    assert_type(v < x, jax.Array)
    assert_type(float(v), float)
    v *= 2
    assert_type(v, nnx.Param[jax.Array])


def calls(model: Model, x: jax.Array) -> tuple[Model, jax.Array]:
    """What is jitted, split and merged can be used as the class of the model; a copy has it."""
    assert_type(nnx.clone(model), Model)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return nnx.merge(graphdef, params, rest), model.encode(x)
