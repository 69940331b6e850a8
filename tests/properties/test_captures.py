"""A jitted function sees the Modules that it refers to, wherever they are held now.

Drawn programs put Modules into plain lists, dicts and objects, in several places at once and into each other, and call
jitted functions that refer to these containers. Outputs and Modules must be what plain Python makes of them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import nnxlib as nnx


class Layer(nnx.Module):
    def __init__(self, value: float):
        self.weight = nnx.Param(jnp.float32(value))
        self.calls = nnx.Variable(jnp.float32(0))
        self.inner: Layer | None = None
        self.factor = 1.0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return self.weight * x


class Holders:
    """Plain containers of Modules and Variables, and functions that refer to these."""

    def __init__(self, wrap: Callable[..., Callable]):
        layers = [Layer(2.0**i) for i in range(3)]
        self.layers = layers
        self.listed = listed = [layers[0], layers[1]]
        self.keyed = keyed = {0: layers[0], 1: layers[1], 2: layers[2]}
        self.apart = apart = types.SimpleNamespace(first=layers[0], several=(layers[1],), maybe=None)
        self.variables = variables = [layer.weight for layer in layers[:2]]

        def of_all(k: int, x: Any) -> Any:
            return sum((layer(x) for layer in listed), x)

        def of_some(k: int, x: Any) -> Any:
            return listed[k % len(listed)](x)

        def of_key(k: int, x: Any) -> Any:
            return keyed[k](x)

        def of_inner(k: int, x: Any) -> Any:
            return (keyed[k].inner or listed[-1])(x) + keyed[0].weight

        def of_attributes(k: int, x: Any) -> Any:
            return apart.first(x) + sum(layer(x) for layer in apart.several)

        def of_variables(k: int, x: Any) -> Any:
            variables[k % 2].value = variables[k % 2] + x
            return variables[0] - variables[1]

        def exchange(k: int, x: Any) -> Any:
            keyed[k].inner, listed[0].inner = listed[0].inner, keyed[k].inner
            return x

        def of_what_may_be_there(k: int, x: Any) -> Any:
            return x if apart.maybe is None else apart.maybe(x)

        def of_settings(k: int, x: Any) -> Any:
            return keyed[k].factor * x

        def of_shared(k: int, x: Any) -> Any:
            return keyed[0](x) - keyed[1].weight

        several = of_what_may_be_there, of_settings, of_shared
        functions = (of_all, of_some, of_key, of_inner, of_attributes, of_variables, exchange, *several)
        self.functions = {f.__name__: wrap(f, static_argnums=0) for f in functions}


CHANGES: dict[str, Callable[[Holders, int, int], Any]] = {
    "append": lambda h, i, j: h.listed.append(h.layers[j]),
    "pop": lambda h, i, j: len(h.listed) > 1 and h.listed.pop(i % len(h.listed)),
    "item": lambda h, i, j: h.listed.__setitem__(0, h.layers[j]),
    "key": lambda h, i, j: h.keyed.update({i % 3: h.layers[j]}),
    "attribute": lambda h, i, j: setattr(h.apart, "first", h.layers[j]),
    "tuple": lambda h, i, j: setattr(h.apart, "several", (h.layers[i], h.layers[j])),
    "variable": lambda h, i, j: h.variables.__setitem__(i % 2, h.layers[j].weight),
    "there": lambda h, i, j: setattr(h.apart, "maybe", h.layers[j]),
    "not there": lambda h, i, j: setattr(h.apart, "maybe", None),
    "setting": lambda h, i, j: setattr(h.layers[i], "factor", float(j)),
    "another": lambda h, i, j: h.layers.__setitem__(j, Layer(float(i))),
    "inner": lambda h, i, j: setattr(h.layers[i], "inner", h.layers[j]),
    "no inner": lambda h, i, j: setattr(h.layers[i], "inner", None),
    "tied": lambda h, i, j: setattr(h.layers[i], "weight", h.layers[j].weight),
    "value": lambda h, i, j: setattr(h.layers[i].weight, "value", jnp.float32(j)),
}

NAMES = sorted(Holders(lambda f, **options: f).functions)

steps = st.one_of(
    st.tuples(st.just(True), st.sampled_from(NAMES), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just(False), st.sampled_from(sorted(CHANGES)), st.integers(0, 2), st.integers(0, 2)),
)


def state(holders: Holders) -> tuple[Any, list[Any]]:
    """The structure of all that is held, with what is shared, and the values."""
    held = [
        holders.layers,
        holders.listed,
        holders.keyed,
        holders.apart.first,
        holders.apart.several,
        holders.variables,
        holders.apart.maybe,
    ]
    graphdef, values = nnx.split(nnx.List(held))
    return graphdef, [np.asarray(x) for x in nnx.to_flat_state(values).leaves]


@given(st.lists(steps, min_size=20, max_size=40))
def test_a_function_sees_what_its_containers_hold_now(program: list[tuple[bool, str, int, int]]) -> None:
    """Outputs, values, and which object is where."""
    plain, jitted = Holders(lambda f, **options: f), Holders(nnx.jit)
    for is_call, name, i, j in program:
        if is_call:
            outputs = [holders.functions[name](i, jnp.float32(j)) for holders in (plain, jitted)]
            np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5)
            (structure, values), (found, now) = map(state, (plain, jitted))
            assert structure == found
            np.testing.assert_allclose(now, values, rtol=1e-5)
        else:
            CHANGES[name](plain, i, j)
            CHANGES[name](jitted, i, j)
