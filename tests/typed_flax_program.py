"""A program of flax.nnx users with its import changed, for type checkers: it is checked and never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import Any, assert_type

import jax
import jax.numpy as jnp

from nnxlib.compat import flax as nnx


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        self.scale = nnx.Param(jnp.ones(4))

    @nnx.jit(graph=False)
    def encode(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.scale * x


def loss(model: Model, x: jax.Array) -> jax.Array:
    return model.encode(x).sum()


@nnx.split_rngs(splits=2)
@nnx.vmap(in_axes=(0,), graph_updates=False)
def stack(rngs: nnx.Rngs) -> Model:
    return Model(rngs=rngs)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, graph=True)
def forward(model: Model, x: jax.Array) -> jax.Array:
    return model.encode(x)


def transforms(model: Model, x: jax.Array) -> None:
    """A transform takes the switches, and returns a function of the same arguments."""
    assert_type(model.encode(x), jax.Array)
    assert_type(forward(model, x), jax.Array)
    value, gradients = nnx.value_and_grad(loss, graph=False)(model, x)
    assert_type(gradients, Any)
    assert_type(nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param))(model, x), Any)
    assert_type(nnx.cond(True, loss, loss, model, x, graph=False), jax.Array)
    assert_type(nnx.eval_shape(lambda: Model(rngs=nnx.Rngs(0))), Model)
    with nnx.set_graph_mode(False):
        assert_type(nnx.set_graph_mode.current_value(), bool)


def states(model: Model) -> Model:
    """Functions of models take them, too; the names that have no switch are those of nnxlib."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ..., graph=False)
    assert_type(graphdef, nnx.GraphDef[Model])
    assert_type(params, nnx.State[Any, Any])
    assert_type(nnx.state(model, nnx.Param), nnx.State[Any, Any])
    assert_type(nnx.clone(model, graph=True), Model)
    assert_type(nnx.with_vars(model, ref=True), Model)
    for path, module in nnx.iter_modules(model, graph=True):
        assert_type(path, tuple[Any, ...])
        if isinstance(module, nnx.Linear):
            assert_type(module.kernel, nnx.Param[jax.Array])
    module_graphdef: nnx.graph.GraphDef[Model] = graphdef
    return nnx.merge(module_graphdef, params, rest)


def training(model: Model) -> None:
    optimizer = nnx.Optimizer(model, None, wrt=nnx.Param, graph=False)
    assert_type(optimizer, nnx.Optimizer[Model])
    assert_type(optimizer.step.value, jax.Array)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    assert_type(metrics.compute(), dict[str, Any])


def mistakes(model: Model, x: jax.Array) -> None:
    """What was transformed has its arguments, and what is not there is no name."""
    loss(x, model)  # type: ignore
    model.encode(model)  # type: ignore
    nnx.no_such_name  # type: ignore
