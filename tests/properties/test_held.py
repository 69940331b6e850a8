"""A jitted function sees the Modules that its arguments hold besides data, which it may also find in other ways.

A few layers are held in many places: by plain objects and functions in attributes of two arguments, by their class, and
by what the function itself refers to. Drawn programs call functions that use these places, and put other layers there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlib as nnx

from .strategies import examples
from .test_captures import Layer


class Holder:
    """Compared by identity, whatever it holds."""

    def __init__(self, layer: Layer):
        self.layer, self.layers = layer, [layer]
        self.inner: Holder | None = None


class World:
    def __init__(self, wrap: Callable[[Callable], Callable]):
        self.layers = layers = [Layer(2.0**i) for i in range(3)]
        self.outside = outside = Holder(layers[0])
        named = layers[0]

        class Owner(nnx.Module):
            layer_of_class = layers[0]

            def __init__(self) -> None:
                self.own, self.holder, self.direct = Layer(3.0), Holder(layers[0]), layers[1]
                self.holder.inner = holder = Holder(layers[0])
                self.function = lambda x: holder.layer(x)

            def in_method(self, x: Any) -> Any:
                return outside.layer(x) + named.factor

        def set_named(owner: Owner, layer: Layer) -> None:
            nonlocal named
            named = layer

        self.cls, self.owners = Owner, [Owner(), Owner()]
        self.functions: list[Callable] = [
            wrap(f)
            for f in (
                lambda owner, x: owner.holder.layer(x),
                lambda owner, x: owner.holder.layer.factor * x + named(x),
                lambda owner, x: owner.holder.layers[0](x) + owner.own(x),
                lambda owner, x: owner.holder.inner.layer(x) - outside.layer(x),
                lambda owner, x: owner.holder.inner.layers[0].weight * x,
                lambda owner, x: owner.function(x) + named.factor,
                lambda owner, x: owner.layer_of_class(x) + outside.layers[0].factor,
                lambda owner, x: owner.in_method(x) + owner.direct(x),
                lambda owner, x: sum(layer(x) for layer in outside.layers) + owner.holder.layer.weight,
            )
        ]
        self.places: list[Callable] = [
            lambda owner, layer: setattr(owner.holder, "layer", layer),
            lambda owner, layer: owner.holder.layers.__setitem__(0, layer),
            lambda owner, layer: setattr(owner.holder.inner, "layer", layer),
            lambda owner, layer: setattr(owner.holder.inner, "layers", [layer]),
            lambda owner, layer: setattr(owner.holder, "inner", Holder(layer)),
            lambda owner, layer: setattr(owner, "holder", self.owners[0].holder),
            lambda owner, layer: setattr(Owner, "layer_of_class", layer),
            lambda owner, layer: setattr(owner, "direct", layer),
            lambda owner, layer: setattr(outside, "layer", layer),
            lambda owner, layer: outside.layers.append(layer) if len(outside.layers) < 3 else outside.layers.pop(0),
            lambda owner, layer: setattr(layer, "factor", layer.factor + 1),
            lambda owner, layer: setattr(layer.weight, "value", layer.weight + 1),
            lambda owner, layer: setattr(layer, "weight", nnx.Param(layer.weight + 1)),
            set_named,
        ]


number = st.integers(0, 13)
steps = st.tuples(number, number, st.integers(0, 1), st.integers(0, 2))


@pytest.mark.filterwarnings("ignore::nnxlib.core.errors.RetraceWarning")  # each step may change what is held
@examples(40)
@given(st.lists(number, min_size=2, max_size=3), st.lists(steps, min_size=4, max_size=12))
def test_a_function_sees_what_its_arguments_hold_now(chosen: list[int], program: list[tuple]) -> None:
    """A few functions, each called for both arguments after each change: outputs, and the layers afterwards."""
    worlds = plain, jitted = World(lambda f: f), World(nnx.jit)
    for place, function, owner, layer in program:
        for k in range(2):
            outputs = []
            for world in worlds:
                f = world.functions[chosen[function % len(chosen)] % len(world.functions)]
                outputs.append(f(world.owners[k], jnp.float32(layer + 1)))
            np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5)
            for expected, found in zip(plain.layers, jitted.layers, strict=True):
                assert (found.calls.value, found.weight.value) == (expected.calls.value, expected.weight.value)
        for world in worlds:
            world.places[place](world.owners[owner], world.layers[layer])
