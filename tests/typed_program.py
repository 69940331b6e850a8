"""A program as users write them, for type checkers (pyright, mypy, pyrefly): it is checked and never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true, reportMissingTypeArgument=true, reportUnknownParameterType=true

from __future__ import annotations

from typing import Any, assert_type

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

    @nnx.jit(static_argnames="times")
    def repeat(self, x: jax.Array, times: int) -> jax.Array:
        return x * times

    @nnx.vmap(in_axes=(None, 0))
    def each(self, x: jax.Array) -> jax.Array:
        return self.encode(x)

    @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def fold(self, carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry + x, x


@nnx.dataclass
class Scaled(nnx.Module):
    linear: nnx.Linear
    scale: nnx.Param[jax.Array] = nnx.data(default_factory=lambda: nnx.Param(jnp.ones(2)))
    steps: int = nnx.static(default=0)


def any_module(body: nnx.Module, layers: list[nnx.Module], x: jax.Array) -> jax.Array:
    """What is annotated as a Module may be called; a class of Modules keeps the signature of its own method."""
    for layer in layers:
        x = layer(x, mask=None)
    Block(2, rngs=nnx.Rngs(0))(x, mask=None)  # type: ignore
    return body(x)


def attributes(linear: nnx.Linear, heads: nnx.Dict[nnx.Linear]) -> None:
    """A field of a dataclass has its type, and what is declared data or static the type of its value."""
    scaled = Scaled(linear, steps=2)
    assert_type(scaled.scale.value, jax.Array)
    assert_type(scaled.steps, int)
    assert_type(nnx.data([linear]), list[nnx.Linear])
    assert_type(nnx.static(0.5), float)
    assert_type(heads["policy"].kernel, nnx.Param[jax.Array])
    for layer in nnx.List([linear]):
        assert_type(layer, nnx.Linear)
    Scaled(steps=2)  # type: ignore


def without_arguments(state: nnx.State, weight: nnx.Param, layers: nnx.List) -> nnx.GraphDef:
    """A generic class without arguments is one of Any, for a strict checker, too."""
    assert_type(weight.value, Any)
    assert_type(layers[0], Any)
    return nnx.graphdef(weight)


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


def values(model: Model) -> None:
    """A Variable has the attributes of its array, and a List the items that it was made of."""
    linear = model.blocks[0].linear
    assert_type(model.blocks, nnx.List[Block])
    assert_type(model.blocks[1:], nnx.List[Block])
    assert_type(nnx.Dict(first=linear), nnx.Dict[nnx.Linear])
    assert_type(nnx.Dict({"first": linear}), nnx.Dict[nnx.Linear])
    assert_type(linear.kernel.value, jax.Array)
    assert_type(linear.kernel[0], jax.Array)
    assert_type(linear.kernel.shape, tuple[int, ...])
    linear.kernel.value = 0.0  # what can be written is more than what is read


@nnx.jit
def forward(model: Model, x: jax.Array) -> jax.Array:
    return model.encode(x)


@nnx.jit(static_argnames="times", donate_argnums=0)
def repeated(x: jax.Array, model: Model, *, times: int) -> jax.Array:
    for _ in range(times):
        x = model.encode(x)
    return x


@nnx.split_rngs(splits=5)
@nnx.vmap
def stack(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(2, 2, rngs=rngs)


@nnx.remat
def block(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


def loss(model: Model, x: jax.Array) -> jax.Array:
    return model.encode(x).sum()


def transforms(model: Model, x: jax.Array) -> None:
    """A transform returns a function of the same arguments; that of `jit` has its methods."""
    assert_type(forward(model, x), jax.Array)
    assert_type(repeated(x, model, times=3), jax.Array)
    assert_type(model.encode(x), jax.Array)
    assert_type(Model.encode(model, x), jax.Array)
    assert_type(model.repeat(x, times=2), jax.Array)
    assert_type(model.each(x), jax.Array)
    assert_type(model.fold(x, x), tuple[jax.Array, jax.Array])
    assert_type(forward.explain(), str)
    assert_type(forward.eval_shape(model, x), jax.Array)
    assert_type(block(model.blocks[0], x), jax.Array)
    assert_type(nnx.vmap(loss, in_axes=(None, 0))(model, x), jax.Array)
    assert_type(nnx.value_and_grad(loss)(model, x)[0], jax.Array)
    assert_type(nnx.eval_shape(lambda: Model(2, rngs=nnx.Rngs(0))), Model)
    assert_type(stack(nnx.Rngs(0)), nnx.Linear)
    assert_type(nnx.cond(True, loss, loss, model, x), jax.Array)


def mistakes(model: Model, x: jax.Array) -> None:
    """A checker that has to ignore nothing here would tell: it knows the arguments of what was transformed."""
    forward(model)  # type: ignore
    forward(x, model)  # type: ignore
    block(model, x)  # type: ignore
    model.encode(model)  # type: ignore
    model.each()  # type: ignore
    nnx.vmap(loss, axes=0)  # type: ignore


def states(model: Model) -> Model:
    """What is split is merged to the class of the model; a copy has it."""
    assert_type(nnx.clone(model), Model)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    assert_type(graphdef, nnx.GraphDef[Model])
    assert_type(params, nnx.State[Any, Any])
    assert_type(nnx.state(model), nnx.State[Any, Any])
    assert_type(nnx.pop(model, nnx.Intermediate), nnx.State[Any, Any])
    assert_type(nnx.filter_state(nnx.state(model), nnx.Param), nnx.State[Any, Any])
    params, stats = nnx.state(model, nnx.Param, nnx.BatchStat)
    assert_type(stats, nnx.State[Any, Any])
    return nnx.merge(graphdef, params, rest)
