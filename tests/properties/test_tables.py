"""Programs that change a model between jitted calls: each call finds it as it is.

A model keeps its table from call to call, which is patched or made anew after a change (core/tables.py). Drawn programs
of changes and jitted calls must do what they do as plain Python, on one model that is passed whole.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.core.graph import pack
from nnxlib.core.packing import pack_live
from nnxlib.core.tables import table_of

from .compare import objects_in
from .programs import programs, run
from .strategies import Graph, examples, graphs, make


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    x: Any


class Scale(nnx.Module):
    def __init__(self, seed):
        self.array = jnp.float32(1 + seed)


class Layer(nnx.Module):
    """Has a part of each kind; arrays also as attributes, in a tuple, in a dict with a list, and in a dataclass."""

    def __init__(self, seed):
        self.weight = nnx.Param(jnp.float32(1 + seed))
        self.total = nnx.Variable(jnp.float32(0))
        self.several = nnx.List([nnx.Cache(jnp.float32(seed))])
        self.flag = 1.0
        self.other = None
        self.pair = (jnp.float32(seed), "x")
        self.table = nnx.data({"a": jnp.float32(seed), "b": [jnp.float32(1)]})
        self.box = Box(jnp.float32(2))
        self.scale, self.array = Scale(seed), jnp.float32(2)


def read(layers, i, x):
    return layers[i].weight.value * x * layers[i].flag * layers[i].scale.array + layers[i].array


def add(layers, i, x):
    layers[i].total += read(layers, i, x)
    for v in layers[i].several:
        v.value = v + 1
    return layers[i].total.value


def attach(layers, i, x):
    layers[i].total = nnx.Variable(layers[i].total + x)
    layers[i].seen = nnx.Cache(x * layers[i].weight)
    return layers[i].seen.value


def replace(layers, i, x):
    layers[i].weight = nnx.Param(layers[i].weight * 0.5)
    return x


def read_pytrees(layers, i, x):
    layer = layers[i]
    return sum(jax.tree.leaves((layer.table, layer.pair[0], layer.box))) * x + len(layer.pair[1])


def set_pytrees(layers, i, x):
    layer = layers[i]
    layer.pair = (layer.pair[0] + x, layer.pair[1])
    layer.table["a"] = layer.table["a"] * x
    return layer.box.x


CALLS = {f.__name__: (f, nnx.jit(f, static_argnums=1)) for f in (read, add, attach, replace, read_pytrees, set_pytrees)}


def _tie(layers, i, j):
    layers[i].weight = layers[j].weight


def _turn(layers, i, j):
    layers[i].total, layers[j].total = layers[j].total, layers[i].total


CHANGES = {
    "parameter": lambda layers, i, j: setattr(layers[i], "weight", nnx.Param(jnp.float32(j))),
    "another type": lambda layers, i, j: setattr(layers[i], "weight", nnx.BatchStat(jnp.float32(j))),
    "with metadata": lambda layers, i, j: setattr(layers[i], "weight", nnx.Param(jnp.float32(j), tag=j)),
    "variable": lambda layers, i, j: setattr(layers[i], "total", nnx.Variable(jnp.float32(j))),
    "item": lambda layers, i, j: layers[i].several.__setitem__(0, nnx.Cache(jnp.float32(j))),
    "appended": lambda layers, i, j: layers[i].several.append(nnx.Cache(jnp.float32(j))),
    "popped": lambda layers, i, j: len(layers[i].several) > 1 and layers[i].several.pop(),
    "tied": _tie,
    "turned": _turn,
    "shared": lambda layers, i, j: setattr(layers[i], "other", layers[j].weight),
    "alone": lambda layers, i, j: setattr(layers[i], "other", None),
    "module": lambda layers, i, j: layers.__setitem__(i, Layer(j)),
    "a part": lambda layers, i, j: setattr(layers[i], "scale", Scale(j)),
    "a part of another structure": lambda layers, i, j: setattr(layers[i].scale, "n", j),
    "array": lambda layers, i, j: setattr(layers[i], "array", jnp.float32(j)),
    "flag": lambda layers, i, j: setattr(layers[i], "flag", float(j)),
    "value": lambda layers, i, j: setattr(layers[i].weight, "value", jnp.float32(j)),
    "through vars": lambda layers, i, j: vars(layers[i]).update(weight=nnx.Param(jnp.float32(j))),
    "several": lambda layers, i, j: [setattr(x, "weight", nnx.Param(jnp.float32(j))) for x in layers],
    "a tuple": lambda layers, i, j: setattr(layers[i], "pair", (jnp.float32(j), "xy"[:j])),
    "an item": lambda layers, i, j: layers[i].table.update(a=jnp.float32(j)),
    "an item of another shape": lambda layers, i, j: layers[i].table.update(a=jnp.full(j + 1, jnp.float32(j)).sum()),
    "a NumPy item": lambda layers, i, j: layers[i].table["b"].__setitem__(0, np.float32(j)),
    "a new item": lambda layers, i, j: layers[i].table["b"].append(jnp.float32(j)),
    "an item less": lambda layers, i, j: len(layers[i].table["b"]) > 1 and layers[i].table["b"].pop(),
    "in a dataclass": lambda layers, i, j: setattr(layers[i].box, "x", jnp.float32(j)),
    "a static item": lambda layers, i, j: layers[i].table.update(c=float(j)),
    "one for all": lambda layers, i, j: [setattr(x, "weight", v) for v in [nnx.Param(jnp.float32(j))] for x in layers],
}

number = st.integers(0, 2)
steps = st.one_of(
    st.tuples(st.just(True), st.sampled_from(sorted(CALLS)), number, number),
    st.tuples(st.just(False), st.sampled_from(sorted(CHANGES)), number, number),
)


@given(st.lists(steps, min_size=5, max_size=25))
def test_a_model_that_changes_between_calls_is_seen_as_it_is(program):
    """Outputs, values, structure, and the table itself."""
    plain, jitted = (nnx.List([Layer(i) for i in range(3)]) for _ in range(2))
    for is_call, name, i, j in program:
        if not is_call:
            CHANGES[name](plain, i, j)
            CHANGES[name](jitted, i, j)
            continue
        eager, compiled = CALLS[name]
        np.testing.assert_allclose(compiled(jitted, i, jnp.float32(j)), eager(plain, i, jnp.float32(j)), rtol=1e-5)
        table, packed = table_of(jitted), pack(jitted)
        assert table.layout is packed.layout
        assert all(a is b for a, b in zip(table.objects_with(jitted), packed.objects, strict=True))
        assert all(a is b for a, b in zip(table.leaves(), packed.leaves, strict=True))
        assert nnx.graphdef(plain) == nnx.graphdef(jitted)
        for a, b in zip(jax.tree.leaves(nnx.state(plain)), jax.tree.leaves(nnx.state(jitted)), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5)


PYTREES = {
    "tuple": lambda *roots: roots,
    "dict": lambda *roots: dict(zip("cab", roots)),
    "nested": lambda first, *rest: [{"b": first, "a": (jnp.ones(2), "static")}, (), [[*rest], 3.0]],
    "one twice": lambda *roots: [*roots, roots[0]],
    "one by itself": lambda *roots: roots[0],
    "beside a Variable": lambda *roots: (nnx.Param(jnp.ones(2)), roots),
}


@examples(100)
@given(st.lists(graphs(), max_size=3), graphs(2), programs(), st.sampled_from(sorted(PYTREES)))
def test_a_pytree_of_objects_is_described_as_a_walk_does(apart: list[Graph], tied: Graph, program: tuple, form: str):
    """Layout, leaves and objects, before and after edits, of objects that share parts or none."""
    roots = [x for graph in apart for x in make(graph)] or make(tied)
    for edit in (False, False, True):
        if edit:
            run(program, roots)
        tree = PYTREES[form](*roots)
        found, walked = pack_live(tree), pack(tree)
        assert found.layout is walked.layout
        assert all(x is y for x, y in zip(found.objects, walked.objects, strict=True))
        assert all(x is y for x, y in zip(found.leaves, walked.leaves, strict=True))


@examples(60)
@given(graphs(2), programs())
def test_a_part_of_what_a_trace_has_built_is_described_as_a_walk_does(graph: Graph, program: tuple) -> None:
    """Of each object that is passed: layout, leaves and objects, before and after edits in the trace."""

    def f(*roots):
        for edit in (False, True):
            if edit:
                run(program, roots)
            for x in objects_in(*roots):
                for _ in range(2):
                    found, walked = pack_live((x, 1.0)), pack((x, 1.0))
                    assert found.layout is walked.layout
                    assert all(x is y for x, y in zip(found.objects, walked.objects, strict=True))
                    assert all(x is y for x, y in zip(found.leaves, walked.leaves, strict=True))
        return jnp.float32(0)

    nnx.jit(f)(*make(graph))
