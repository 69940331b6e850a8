"""Small Modules, and ways to call a function, that the tests of the transforms share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import nnxlib as nnx

X = jnp.array([1.0, 2.0, 3.0])


class Layer(nnx.Module):
    """Scales, and counts its calls."""

    def __init__(self, value: float = 2.0):
        self.w = nnx.Param(jnp.full(3, value, jnp.float32))
        self.calls = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls.value += 1
        return self.read(x)

    def read(self, x: Any) -> Any:
        return jnp.sin(self.w * x)


class Counting(nnx.Module):
    """Two weights, and a count of calls that is written in place."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.array([1.0, 2.0]))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return self.w * x


class Norm(nnx.Module):
    """Subtracts a running mean, which it updates while `training`; counts like BatchNorm."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.array([1.0, 0.5, 2.0]))
        self.mean = nnx.BatchStat(jnp.zeros(3))
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.training = True

    def __call__(self, x: Any) -> Any:
        if self.training:
            self.mean.value = 0.5 * self.mean.value + 0.5 * x
            self.count.value += 1
        return jnp.tanh(self.scale * x - self.mean)


class Pair(nnx.Module):
    """Two layers, a Variable that both paths reach, and a way back to itself."""

    def __init__(self) -> None:
        self.a, self.b = Layer(1.0), Layer(2.0)
        self.tied = self.a.w
        self.me = self

    def __call__(self, x: Any) -> Any:
        return self.b(self.a(x)) * self.tied


def stacked(depth: int = 4, width: int = 3) -> nnx.Module:
    """`depth` linear layers as one Module whose Variables have a first axis."""
    keys = jax.random.split(jax.random.key(0), depth)
    return nnx.vmap(lambda key: nnx.Linear(width, width, rngs=nnx.Rngs(key)))(keys)


def counted(f: Callable) -> Any:
    """`f`, with the number of times that Python ran it as an attribute."""

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        wrapper.count += 1
        return f(*args, **kwargs)

    wrapper.count = 0
    return wrapper


# Each calls a function of an array under a raw JAX transform.
RAW: dict[str, Callable[[Callable], Any]] = {
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: jax.vmap(f)(jnp.stack([X, X])),
    "eval_shape": lambda f: jax.eval_shape(f, X),
    "map": lambda f: jax.lax.map(f, jnp.stack([X, X])),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(x), None), X, jnp.stack([X, X])),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(X),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: f(x).sum()))(X),
}


class Parts(nnx.Module):
    """A part of each kind, to be replaced by another object of the same structure."""

    def __init__(self) -> None:
        self.total = nnx.Variable(jnp.zeros(3))
        self.layer, self.layers = Layer(1.0), (Layer(2.0), Layer(3.0))
        self.table = nnx.Dict(x=X)
        self.x = nnx.data(X)


def new_variable(m: Parts) -> None:
    m.total = nnx.Variable(m.total + X)


def new_variable_of_a_part(m: Parts) -> None:
    m.layers[1].w = nnx.Param(m.layers[1].w * 2)


def new_module(m: Parts) -> None:
    m.layer = nnx.clone(m.layer)
    m.layer(X)


def new_module_made_by_merge(m: Parts) -> None:
    graphdef, state = nnx.split(m.layer)
    m.layer = nnx.merge(graphdef, jax.tree.map(lambda x: x * 2, state))


def new_module_from_values(m: Parts) -> None:
    layer = Layer()
    layer.w.value = m.layer.w * 3
    m.layer = layer


def new_modules_in_a_tuple(m: Parts) -> None:
    m.layers = (m.layers[0], nnx.clone(m.layers[1]))
    m.layers[1](X)
    m.x = m.x + 1


def new_dict_of_arrays(m: Parts) -> None:
    m.table = nnx.Dict(x=m.table["x"] * m.x)
    m.x = m.x + 1


REPLACING = [
    new_variable,
    new_variable_of_a_part,
    new_module,
    new_module_made_by_merge,
    new_module_from_values,
    new_modules_in_a_tuple,
    new_dict_of_arrays,
]
