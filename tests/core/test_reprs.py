"""How nodes are written."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnxlib as nnx
from nnxlib.core.reprs import node_repr, static_repr
from nnxlib.core.tables import table_of


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
        == """\
Layer(                           # Param: 500 (2.0 KB), Array: 5 (28 B)
  w=Param(float32[2, 100]),      # 200 (800 B)
  act=relu,
  layers=List([                  # Param: 300 (1.2 KB)
    Layer(                       # Param: 300 (1.2 KB)
      w=Param(float32[3, 100]),  # 300 (1.2 KB)
      act=relu, n=3,
    ),
    None,
  ]),
  heads=Dict({'a': 1}),
  pair=(float32[3], 'x'),        # 3 (12 B)
  table=float64[2],              # 2 (16 B)
)"""
    )


def test_arguments_that_were_left_out_are_left_out():
    """An attribute that equals the default of the argument of that name; but never data."""
    given, ones = object(), jnp.ones(2)

    class Many(nnx.Module):
        def __init__(self, size, act=nnx.relu, rate=0.5, on=True, of=1, tag=given, w=ones, pair=(ones, 1), x=None):
            self.size, self.act, self.rate, self.on, self.of, self.tag = size, act, rate, on, of, tag
            self.w, self.pair, self.x, self.none = w, pair, x, None

    lines = [line.partition("#")[0].strip() for line in repr(Many(3)).splitlines()]
    assert lines == ["Many(", "size=3,", "w=float32[2],", "pair=(float32[2], 1),", "none=None,", ")"]
    text = repr(Many(3, nnx.gelu, 0.25, 1, True, "a"))
    assert "size=3, act=gelu, rate=0.25, on=1, of=True, tag='a',\n" in text
    assert "out_features=1, dtype='bfloat16'," in repr(nnx.Linear(1, 1, dtype="bfloat16", rngs=nnx.Rngs(0)))


def test_an_optimizer_shows_its_state():
    """A pytree is written by the names of its fields, with the sizes of what it holds; functions have no addresses."""
    optimizer = nnx.Optimizer(nnx.Dict(w=nnx.Param(jnp.zeros(3))), optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    assert (
        repr(optimizer)
        == """\
Optimizer(                             # OptState: 1 (4 B), OptVariable: 3 (12 B)
  step=OptState(uint32[]),             # 1 (4 B)
  tx=GradientTransformationExtraArgs(init=init_fn, update=update_fn),
  opt_state=(                          # OptVariable: 3 (12 B)
    TraceState(                        # OptVariable: 3 (12 B)
      trace=State({                    # OptVariable: 3 (12 B)
        'w': OptVariable(float32[3]),  # 3 (12 B)
      }),
    ),
    EmptyState(),
  ),
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
    """1,000 levels, 10,000 items and 10,000 settings are written in a screen or two, with how many more there are."""
    m = Layer()
    for _ in range(1000):
        m = nnx.Dict(next=m)
    assert re.search(r"Dict\(\{\.\.\.\}\), +# \d+ folded, Param: 200 \(800 B\)\n", repr(m))
    wide = nnx.Dict(x=[nnx.Param(np.zeros(i)) for i in range(10_000)], y=list(range(10_000)))
    text = repr(wide)
    assert text.count("\n") < 100
    assert text.count("... and 9936 more") == 2


def test_equal_layers_are_written_once():
    """A model of 1,000 layers says how many are like the first; two, or different ones, are written out."""
    m = Layer()
    m.layers = [*(Layer() for _ in range(999)), Layer(3)]
    text = repr(m)
    assert text.count("Layer(") == 3
    assert "... 998 more like this one, to [998]" in text
    assert "# Param: 200,300 (801.2 KB)" in text.splitlines()[0]
    m.layers = m.layers[:2]
    assert repr(m).count("Layer(") == 3


def test_the_deepest_levels_of_a_huge_model_are_folded():
    """However many different parts there are, the lines are few, and a fold says how much is in it."""
    m = nnx.Dict({f"a{i}": nnx.Dict({f"b{j}": Layer(10 * i + j) for j in range(10)}) for i in range(10)})
    for x in (m, nnx.state(m), nnx.graphdef(m)):
        lines = repr(x).splitlines()
        assert 10 < len(lines) < 300
        assert "folded" in lines[3]
    assert "# 3 folded, Param: 1,100 (4.4 KB)" in repr(m)


def test_states_of_huge_models():
    """A State folds what is alike, a FlatState ends after a while; small ones are written in full."""
    m = nnx.Dict(layers=[Layer() for _ in range(1000)])
    text = repr(nnx.state(m))
    assert "... 999 more like this one, to [999]" in text
    assert text.count("\n") < 10
    flat = repr(nnx.state(m).flat_state())
    assert flat.endswith("  ... and 800 more\n])")


def test_lists_and_dicts_of_layers():
    """A container of Modules is written as part of a model, one of settings as Python writes it."""
    assert repr(nnx.List([Layer(), Layer(), Layer()])).startswith("List([ ")
    assert repr(nnx.Dict(a=[1, {"b": 2}])) == "{'a': [1, {'b': 2}]}"


def test_sizes():
    """By type of Variable, shared ones once, in multiples of 1,000; what has no size of its own has none."""
    m = nnx.Dict(a=nnx.Param(jnp.zeros((1000, 1000))), b=nnx.BatchStat({"x": jnp.zeros(3), "y": (jnp.ones(2), "n")}))
    m.c, m.key = m.a, nnx.Rngs(0)
    assert "# Param: 1,000,000 (4.0 MB), BatchStat: 5 (20 B)" in repr(m).splitlines()[0]
    assert "BatchStat({'x': float32[3], 'y': (float32[2], 'n')}),  # 5 (20 B)" in repr(m)
    assert "'c': <Param at a>" in repr(m)
    shape = jax.export.symbolic_shape("n, 3")
    assert "Param(float32[n, 3]),\n" in repr(nnx.Dict(x=nnx.Param(jax.ShapeDtypeStruct(shape, "float32"))))


def test_arrays_that_cannot_be_read():
    """A donated array is written as its shape; nothing is read from the device."""
    m = Layer(1)
    m.w.value = jnp.zeros(3)
    m.w.value.delete()
    assert "w=Param(float32[3])" in repr(m)


def test_sharding_is_shown():
    """The layout of a sharded array over a mesh, besides what its metadata ask for."""
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.NamedSharding(mesh, jax.P(None, "model"))
    m = nnx.Dict(w=nnx.Param(jax.device_put(jnp.zeros((2, 2)), sharding), out_sharding=(None, "model")))
    assert "float32[2, 2] over P" in repr(m)
    assert "out_sharding=(None, 'model')" in repr(m)


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
    assert static_repr(functools.partial(node_repr, 1)) == "functools.partial(node_repr, 1)"
    assert static_repr(np.zeros((2, 3))) == "float64[2, 3]"


def test_a_setting_that_is_longer_than_a_line():
    """It has a line for itself, the others one before and one after it."""
    m = nnx.Module()
    m.a, m.b, m.text, m.c = 1, 2, "x" * 150, 3
    assert repr(m).split("\n")[1:-1] == ["  a=1, b=2,", f"  text={m.text!r},", "  c=3,"]
    del m.a, m.b
    assert repr(m).split("\n")[1:-1] == [f"  text={m.text!r},", "  c=3,"]


def test_numbers_of_numpy_are_settings():
    """A size computed by NumPy is no array of the State, and is written as the number that it is."""
    layer = nnx.Linear(np.prod((2, 3)), np.int64(4), rngs=nnx.Rngs(0))
    assert "in_features=np.int64(6), out_features=np.int64(4)" in repr(layer)
    assert "Array" not in repr(layer)


def test_writing_does_not_change_the_recursion_limit_or_the_model():
    """repr has no side effects."""
    m, limit = Layer(), sys.getrecursionlimit()
    stamp = table_of(m).stamp
    repr(m)
    assert (sys.getrecursionlimit(), stamp.valid, jax.tree.leaves(m)[0] is m.w.value) == (limit, True, True)
