"""How nodes are written."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import nnxlib as nnx
from nnxlib.core.records import record_of
from nnxlib.core.reprs import node_repr, static_repr


class Layer(nnx.Module):
    def __init__(self, n=2):
        self.w = nnx.Param(jnp.zeros((n, 100)))
        self.act, self.n = nnx.relu, n


def test_attributes_one_a_line_in_their_order():
    """Nested, with arrays as dtype and shape, functions by name, strings quoted."""
    m = Layer()
    m.layers, m.heads, m.pair, m.table = [Layer(3), None], {"a": 1}, (jnp.ones(3), "x"), np.zeros(2)
    assert (
        repr(m)
        == """Layer(
  w=Param(float32[2, 100]),
  act=relu,
  n=2,
  layers=List([
    Layer(
      w=Param(float32[3, 100]),
      act=relu,
      n=3,
    ),
    None,
  ]),
  heads=Dict({
    'a': 1,
  }),
  pair=(float32[3], 'x'),
  table=float64[2],
)"""
    )


def test_an_object_that_occurs_again_is_its_first_path():
    """Sharing and cycles are visible, and end."""
    m = nnx.Dict(a=Layer())
    m.b, m.me = m.a, m
    text = node_repr(m)
    assert "'b': <Layer at a>" in text
    assert "'me': <Dict at <root>>" in text


def test_tracers_and_abstract_values():
    """A model in a trace, or made by eval_shape, is written as the arrays it stands for."""
    seen = []
    nnx.jit(lambda m: seen.append(repr(m)))(Layer())
    assert "w=Param(float32[2, 100])" in seen[0]
    assert "w=Param(float32[2, 100])" in repr(nnx.eval_shape(Layer))


def test_deep_and_wide_models_are_folded():
    """1,000 levels and 10,000 items are written in a screen or two."""
    m = Layer()
    for _ in range(1000):
        m = nnx.Dict(next=m)
    assert "...}" in node_repr(m)
    wide = nnx.Dict(x=[nnx.Param(float(i)) for i in range(10_000)])
    assert node_repr(wide).count("\n") < 100
    assert "... and" in node_repr(wide)


def test_a_repr_that_raises_does_not_hide_the_model():
    """A strange attribute is shown by its class."""

    class Strange:
        def __repr__(self):
            raise RuntimeError("no")

    m = Layer()
    m.odd = Strange()
    assert "odd=<Strange, whose repr raises RuntimeError>" in repr(m)


def test_half_made_objects():
    """An object whose __new__ was bypassed, or whose __init__ has not run, has a repr for the debugger."""
    assert repr(Layer.__new__(Layer)) == "Layer()"
    assert "not initialised" in repr(object.__new__(Layer))


def test_static_values():
    """Functions and classes by name, tuples item by item, long texts cut."""
    assert static_repr((nnx.relu, jnp.float32, 1, ("a",))) == "(relu, float32, 1, ('a',))"
    assert len(static_repr("x" * 1000)) < 250
    assert "partial" in static_repr(functools.partial(max, 1))
    assert static_repr(np.zeros((2, 3))) == "float64[2, 3]"


def test_writing_does_not_change_the_recursion_limit_or_the_model():
    """repr has no side effects."""
    m, limit = Layer(), sys.getrecursionlimit()
    stamp = record_of(m).stamp
    repr(m)
    assert (sys.getrecursionlimit(), stamp.valid, jax.tree.leaves(m)[0] is m.w.value) == (limit, True, True)
