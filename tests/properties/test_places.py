"""A jitted function uses the Modules that are now at the places to which it refers, whatever was there before.

The places are a global, a cell of a closure, attributes of an object and of a class, and items of a list and of a dict.
At each there is None, a number, a Module, or a container, object or function that holds such values. A drawn program
puts other values there, or edits what is there in place, and calls jitted functions in between.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlib as nnx

from .strategies import examples


class Layer(nnx.Module):
    def __init__(self, weight: float):
        self.weight, self.offset = nnx.Param(jnp.float32(weight)), 1.0

    def __call__(self, x: Any) -> Any:
        return x * self.weight + self.offset


@dataclasses.dataclass(frozen=True)
class Frozen:
    held: Any


@dataclasses.dataclass(eq=False)
class Holder:
    held: Any

    def method(self, x: Any) -> Any:
        return through(self.held, x)


@dataclasses.dataclass(eq=False, slots=True)
class Slotted:
    held: Any


class Named(NamedTuple):
    held: Any
    rate: float = 0.5


class Registry:
    held: Any = None


HELD: Any = None
LISTS, DICTS = (list, collections.deque), (dict, types.MappingProxyType, collections.UserDict)
HOLDERS = (Frozen, Holder, Slotted, Named)


def through(held: Any, x: Any) -> Any:
    """``x`` after all Modules in a value, in order; numbers and text are left alone."""
    if isinstance(held, Layer | types.FunctionType | types.MethodType | functools.partial):
        return held(x)
    if isinstance(held, nnx.Variable):
        return x + held.value
    if isinstance(held, HOLDERS):
        return through(held.held, x)
    values = held.values() if isinstance(held, DICTS) else held if isinstance(held, (*LISTS, tuple)) else ()
    return functools.reduce(lambda y, value: through(value, y), values, x)


def closure_over(held: Any) -> Callable:
    return lambda x: through(held, x)


def drawn(draw: random.Random, layers: list[Layer], depth: int) -> Any:
    """A value."""
    if depth == 0 or draw.random() < 0.3:
        layer = draw.choice(layers)
        return draw.choice([None, layer, layer, layer.weight, 1, 2.5, "text", jnp.ones(2), np.float32(3), (), [], {}])
    one, *several = [drawn(draw, layers, depth - 1) for _ in range(draw.randint(1, 4))]
    keyed = {f"k{k}": value for k, value in enumerate(several)}
    kinds = [tuple(several), several, keyed, collections.deque(several), types.MappingProxyType(keyed)]
    kinds += [(one,), collections.UserDict(keyed), *[kind(one) for kind in HOLDERS], Holder(one).method]
    return draw.choice([*kinds, functools.partial(through, one), closure_over(one)])


def edit(draw: random.Random, held: Any, new: Callable[[], Any]) -> None:
    """Change something in a value in place, if it can be changed."""
    within: list[Any] = []
    if isinstance(held, LISTS):
        within, kind = [*held], draw.randint(0, 3)
        if kind == 0 or not held:
            held.append(new())
        elif kind == 1:
            held.pop()
        elif kind == 2:
            held[draw.randrange(len(held))] = new()
    elif isinstance(held, dict | collections.UserDict):
        within, kind = [*held.values()], draw.randint(0, 2)
        if kind == 0 or not held:
            held[f"k{draw.randint(0, 4)}"] = new()
        elif kind == 1:
            del held[draw.choice([*held])]
    elif isinstance(held, Holder | Slotted) and draw.random() < 0.5:
        held.held = new()
    elif isinstance(held, HOLDERS):
        within = [held.held]
    elif isinstance(held, tuple):
        within = [*held]
    elif isinstance(held, functools.partial):
        within = [*held.args]
    elif isinstance(held, types.MethodType):
        within = [held.__self__]
    if within:
        edit(draw, draw.choice(within), new)


def through_global(x: Any) -> Any:
    return through(HELD, x)


@pytest.mark.filterwarnings("ignore::nnxlib.core.errors.RetraceWarning")  # each step may change what is held
@examples(75)
@given(st.randoms(use_true_random=False))
def test_a_function_uses_what_is_at_each_place_now(draw: random.Random) -> None:
    """Each function gives what it gives in plain Python, after each change."""
    global HELD
    layers = [Layer(1.0 + k) for k in range(3)]

    def new(depth: int = 2) -> Any:
        return drawn(draw, layers, depth)

    HELD, Registry.held, cell = new(), new(), new()
    plain, listed, keyed = Holder(new()), [new()], {"a": new()}

    def set_cell(value: Any) -> None:
        nonlocal cell
        cell = value

    places: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (lambda: HELD, lambda value: globals().update(HELD=value)),
        (lambda: cell, set_cell),
        (lambda: plain.held, lambda value: setattr(plain, "held", value)),
        (lambda: listed[0], lambda value: listed.__setitem__(0, value)),
        (lambda: keyed["a"], lambda value: keyed.update(a=value)),
        (lambda: Registry.held, lambda value: setattr(Registry, "held", value)),
    ]
    functions = [
        lambda x: through(HELD, x),
        lambda x: through_global(x),
        lambda x: through(cell, x),
        lambda x: through(plain, x),
        lambda x: plain.method(x),
        lambda x: through(listed, x),
        lambda x: through(keyed["a"], x),
        lambda x: through(Registry.held, x),
    ]
    chosen = [(f, nnx.jit(f)) for f in draw.sample(functions, 3)]
    for step in range(8):
        for f, jitted in chosen:
            x = jnp.float32(step + 1)
            np.testing.assert_allclose(jitted(x), f(x), rtol=1e-5)
        look, put = draw.choice(places)
        kind, layer = draw.randint(0, 9), draw.choice(layers)
        if kind < 5:
            put(new())
        elif kind < 8:
            edit(draw, look(), lambda: new(1))
        elif kind == 8:
            layer.weight.value += 1
        else:
            layer.offset = 3.0 - layer.offset
