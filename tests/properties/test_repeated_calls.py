"""Programs that call several jitted functions again and again, with other arguments, and change these in between.

What a call leaves for the next (tables, entries and shortcuts, what is captured, literals) may only be used where it
fits: each call must do what the same function does as plain Python.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlib as nnx

from .compare import assert_same
from .strategies import examples


class Layer(nnx.Module):
    def __init__(self, value: float):
        self.w, self.calls = nnx.Param(jnp.float32(value)), nnx.Variable(jnp.float32(0))
        self.enabled, self.flag, self.array = nnx.Variable(True), 1.0, jnp.float32(value)
        self.other: Any = None


class Doubled(Layer): ...


class Scaled:
    """A pytree around a layer, which has all attributes of the layer as its own."""

    def __init__(self, layer: Layer):
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


jax.tree_util.register_pytree_node(Scaled, lambda x: ((x.layer,), None), lambda _, children: Scaled(*children))


def value_of(x: Any) -> Any:
    if isinstance(x, Scaled):
        return 100 * value_of(x.layer)
    if not isinstance(x, Layer):
        return 7 * (x.value if isinstance(x, nnx.Variable) else jnp.sum(x))
    other = 0 if x.other is None else 5 * x.other.w.value
    return (1 + isinstance(x, Doubled)) * x.w.value * x.flag + 2 * x.array + other


class World:
    """Some layers, and functions that take them or refer to them."""

    def __init__(self, wrap: Callable):
        self.layers = [Layer(1.0), Layer(2.0), Doubled(1.0)]
        self.held = held = {"layer": self.layers[0], "list": [self.layers[1]]}

        def add(a: Any, x: Any) -> Any:
            a.calls.value = a.calls.value + jnp.sum(x)
            return a

        def both(a: Any, b: Any) -> Any:
            a.calls.value = a.calls.value + b.w.value
            b.calls.value = b.calls.value + 1
            return value_of(a) - value_of(b) + 10 * (a.w is b.w)

        def more(a: Any, x: Any) -> Any:
            if jnp.ndim(x):
                a.calls.value = a.calls.value + a.w.value
            return a.array * jnp.sum(x)

        def toggle(a: Any) -> Any:
            a.flag = 3.0 - a.flag
            return a.other

        def exchange(a: Any, b: Any) -> Any:
            a.other, b.other = b.other, a.other
            a.w = nnx.Param(a.w.value + 1)

        def captured(x: Any) -> Any:
            layer = held["layer"]
            layer.calls.value = layer.calls.value + 1
            return value_of(layer) * x if layer.enabled.value else sum(map(value_of, held["list"]))

        def static(name: Any, a: Any) -> Any:
            return value_of(a) + len(str(name))

        def several(*args: Any) -> Any:
            return sum((k + 1) * value_of(x) for k, x in enumerate(args))

        self.functions = {f.__name__: wrap(f) for f in (add, both, more, toggle, exchange, captured, several)}
        self.functions["static"] = wrap(static, static_argnums=0)
        self.functions["keywords"] = wrap(lambda *, x, a: add(a, x))

    def call(self, name: str, i: int, j: int) -> Any:
        f, a, b = self.functions[name], self.layers[i], self.layers[j]
        x = (2.0, jnp.float32(3), jnp.ones(2))[j]
        if name == "keywords":
            return f(a=a, x=x)
        if name == "several":
            return f((a, a.w, Scaled(a))[j], x)
        takes = {"both": (a, b), "exchange": (a, b), "toggle": (a,), "captured": (x,), "static": (("1", 1, True)[j], a)}
        return f(*takes.get(name, (a, x)))


def _copied(how: Callable) -> Callable:
    return lambda w, i, j: w.layers.__setitem__(i, how(w.layers[j]))


CHANGES: dict[str, Callable] = {
    "flag": lambda w, i, j: setattr(w.layers[i], "flag", float(1 + j % 2)),
    "value": lambda w, i, j: setattr(w.layers[i].w, "value", jnp.float32(j)),
    "parameter": lambda w, i, j: setattr(w.layers[i], "w", nnx.Param(jnp.float32(j))),
    "metadata": lambda w, i, j: w.layers[i].w.set_metadata(tag=j),
    "array": lambda w, i, j: setattr(w.layers[i], "array", jnp.float32(j)),
    "shared": lambda w, i, j: setattr(w.layers[i], "w", w.layers[j].w),
    "other": lambda w, i, j: setattr(w.layers[i], "other", (None, Layer(3.0), w.layers[j])[j]),
    "class": lambda w, i, j: setattr(w.layers[i], "__class__", (Layer, Doubled)[j % 2]),
    "literal": lambda w, i, j: setattr(w.layers[i].enabled, "value", bool(j % 2)),
    "variable of a literal": lambda w, i, j: setattr(w.layers[i], "enabled", nnx.Variable(bool(j % 2))),
    "held": lambda w, i, j: w.held.update(layer=w.layers[i]),
    "list": lambda w, i, j: w.held.update(list=[w.layers[i], w.layers[j]][: 1 + j % 2]),
    "clone": _copied(nnx.clone),
    "copy": _copied(copy.copy),
    "pickle": _copied(lambda x: pickle.loads(pickle.dumps(x))),
    "same": _copied(lambda x: x),
}
NAMES = sorted(World(lambda f, **_: f).functions)
number = st.integers(0, 2)
steps = st.tuples(st.booleans(), st.sampled_from(sorted(CHANGES)), number, number, number)


@pytest.mark.filterwarnings("ignore::nnxlib.core.errors.RetraceWarning")  # each step may change what is held
@examples(150)
@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2), st.lists(steps, min_size=5, max_size=15))
def test_each_call_finds_all_as_it_is(unchecked: None, names: list[str], program: list[tuple]) -> None:
    """Of a few functions; outputs and all layers afterwards: values, structure, sharing, identity."""
    plain, jitted = World(lambda f, **_: f), World(nnx.jit)
    for is_call, change, i, j, k in program:
        for _ in range(3 if is_call and k else 1):
            found = []
            for w in (plain, jitted):
                out = w.call(names[k % len(names)], i, j) if is_call else CHANGES[change](w, i, j)
                found.append((out, w.layers, [*w.held.values()]))
            assert_same(*found)
