"""Sequential: what is handed from one layer to the next, and what is refused."""

import collections

import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.errors import ArgumentError


def test_sequential_passes_tuples_and_dicts_on():
    """A tuple becomes arguments, a dict keyword arguments; without layers the input comes out."""
    model = nnx.Sequential(lambda x: (x, x), lambda a, b: a + b, lambda x: {"a": x, "b": 1}, lambda a, b: a * 10 + b)
    assert (model(3), nnx.Sequential()(3), nnx.Sequential()(3, 4)) == (61, 3, (3, 4))
    assert nnx.Sequential(lambda *, x: x + 1)(x=3) == 4
    assert (nnx.Sequential()(), nnx.Sequential()(x=3)) == (None, {"x": 3})
    with pytest.raises(ArgumentError, match=r"layers\[1\] is the class Dropout; make a layer of it first"):
        nnx.Sequential(jnp.float32, nnx.Dropout)(0.5)  # a class that converts is a function; a Module has no input yet


def test_an_unpacked_tuple_is_explained():
    """A named tuple, such as a graph, comes apart between two layers."""
    graph = collections.namedtuple("Graph", ["nodes", "edges"])(1, 2)
    with pytest.raises(TypeError) as caught:
        nnx.Sequential(lambda graph: graph, lambda graph: graph)(graph)
    assert "layers[0] returned a Graph, whose 2 items nnx.Sequential passes" in caught.value.__notes__[0]

    def fails(nodes, edges):
        raise TypeError("of its own")

    with pytest.raises(TypeError) as caught:
        nnx.Sequential(lambda graph: graph, fails)(graph)
    assert not any("whose 2 items" in note for note in caught.value.__notes__)


def test_sequential_hands_keywords_to_those_that_take_them():
    """Each layer gets the keyword arguments of the call that it names and that are still free; `**` takes them all."""
    model = nnx.Sequential(
        jnp.sin, nnx.Dropout(0.5), lambda x, scale: (x, scale), lambda a, b, **rest: (a, b, sorted(rest))
    )
    assert model(0.0, scale=2, b=5, a=7, deterministic=True) == (0.0, 2, ["deterministic", "scale"])
    double = nnx.Sequential(lambda x, *, by=1: x * by, lambda x, *, by=1: x * by)
    assert (double(2, by=3), double(x=2, by=3), double(2, other=3)) == (18, 18, 2)
    assert nnx.Sequential(double, double, nnx.jit(lambda x, by: x * by))(1, by=2) == 32
    assert nnx.Sequential(lambda x, /, y=0: x + y, lambda *a, **k: (a, k))(1, x=3, y=2) == ((3,), {"x": 3, "y": 2})


def test_sequential_refuses_a_keyword_that_comes_twice():
    """From the call and in the dict that the layer before returned; and one in a dict that is not taken."""
    model = nnx.Sequential(lambda x: {"x": x, "by": 2}, lambda x, by=1: x * by)
    assert model(3) == 6
    with pytest.raises(TypeError, match=r"arguments \['by'\] in Sequential\[1\].*Sequential\[0\] returned"):
        model(3, by=4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'by'"):
        nnx.Sequential(lambda x: {"x": x, "by": 2}, lambda x: x)(3)


def test_sequential_as_a_sequence():
    """Length, items, slices and iteration; layers may be added."""
    a, b = nnx.Dropout(0.5), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    model = nnx.Sequential(a, b, jnp.tanh)
    assert (len(model), model[0] is a, list(model)[1] is b, type(model[1:]), len(model[1:])) == (
        3,
        True,
        True,
        nnx.Sequential,
        2,
    )
    model.layers.append(nnx.relu)
    assert nnx.jit(lambda m: len(m))(model) == 4


def test_sequential_with_something_that_cannot_be_called():
    """The error names the item."""
    with pytest.raises(TypeError, match=r"Sequential\.layers\[1\] is a int"):
        nnx.Sequential(jnp.tanh, 3)(1.0)
    with pytest.raises(TypeError, match=r"layers\[0\] is a List, .* nnx\.Sequential\(\*layers\)"):
        nnx.Sequential([jnp.tanh, jnp.cos])(1.0)


def test_a_subclass_of_a_library_module():
    """A subclass of Sequential with attributes of its own."""

    class Scaled(nnx.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.scale = nnx.Param(jnp.array(2.0))

        def __call__(self, x):
            return super().__call__(x) * self.scale

    assert nnx.jit(lambda m, x: m(x))(Scaled(lambda x: x + 1), 1.0).item() == 4
