"""Iterating over a graph: what is where, and what is reached by several paths."""

import numpy as np

import nnxlib as nnx

from .models import Layer, Net


def test_iter_graph():
    """Everything with its path: children before parents, sorted, objects once at their first path."""
    m = nnx.Dict(b=nnx.Param(1.0), a=[nnx.Param(2.0), 3, (nnx.Param(4.0), "x")])
    m.c = m.a
    m.self = m
    found = list(nnx.iter_graph(m))
    assert [path for path, _ in found] == [("a", 0), ("a", 1), ("a", 2, 0), ("a", 2, 1), ("a", 2), ("a",), ("b",), ()]
    assert found[0][1] is m.a[0]
    assert found[-1][1] is m


def test_iter_graph_of_pytrees():
    """A list of Modules is walked like a Module that holds them."""
    a = Layer()
    assert [path for path, _ in nnx.iter_graph([a, {"x": a}])] == [(0, "mean"), (0, "w"), (0,), ()]


def test_iter_graph_of_states_and_bound_methods():
    """The Variables in a State that a Module holds are found, and the Modules of methods, of each."""
    a, b = Layer(), Layer()
    m = nnx.Dict(ema=nnx.state(nnx.Dict(x=a)), f=a.__call__, g=b.__call__)
    found = [path for path, x in nnx.iter_graph(m) if isinstance(x, nnx.Variable)]
    assert found == [path for path, _ in nnx.to_flat_state(nnx.state(m))]
    doubled = nnx.recursive_map(lambda path, x: x.copy(x * 2) if isinstance(x, nnx.Variable) else x, m)
    np.testing.assert_array_equal(doubled.ema["x"]["w"].value, 2 * a.w.value)


def test_iter_graph_while_the_graph_is_edited():
    """Of a node that was not entered yet, what it holds by then is found; of one that was, what it held before."""
    m = nnx.Dict(a=[nnx.Param(0.0), nnx.Param(1.0)], b=[], c=nnx.Param(2.0))
    found = []
    for path, x in nnx.iter_graph(m):
        found.append(path)
        if isinstance(x, nnx.Variable) and path[0] == "a":
            m.a[path[1]] = None  # the Variable is gone, and its memory free for the next
            m.b.append(nnx.Param(3.0))
        del x
    assert found == [("a", 0), ("a", 1), ("a",), ("b", 0), ("b", 1), ("b",), ("c",), ()]


def test_iter_children():
    """Nodes and Variables that are attributes, with their names; shared ones each time, those in a tuple not."""
    m = Net()
    m.again = m.first
    assert [key for key, _ in nnx.iter_children(m)] == ["again", "first", "layers"]


def test_settings_are_no_children():
    """A plain list or dict, which flax.nnx keeps as it is; nor are they Modules. One with data is both."""
    m = Net()
    m.settings, m.sizes, m.held = {"rate": 0.1}, [1, [2]], {"parts": [nnx.Param(1.0)]}
    assert [key for key, _ in nnx.iter_children(m)] == ["first", "held", "layers"]
    assert [key for key, _ in m.iter_children()] == ["first", "held", "layers"]
    assert not any(path[0] in ("settings", "sizes") for path, _ in nnx.iter_modules(m) if path)


def test_find_duplicates():
    """Paths of what is reached more than once, the first first; `only` chooses."""
    m = Net()
    assert nnx.find_duplicates(m) == []
    m.again, m.layers[0].w = m.layers, m.first.w
    assert nnx.find_duplicates(m) == [[("again",), ("layers",)], [("again", 0, "w"), ("first", "w")]]
    assert nnx.find_duplicates(m, only=nnx.Param) == [[("again", 0, "w"), ("first", "w")]]
    shared = nnx.BatchStat(1.0)
    thrice = nnx.Dict(a=shared, b=shared, c=shared)
    assert nnx.find_duplicates(thrice, only=nnx.Param) == []
    assert nnx.find_duplicates(thrice, only=nnx.BatchStat) == [[("a",), ("b",), ("c",)]]
    m.self = m
    assert nnx.find_duplicates(m)[0] == [(), ("self",)]
    m = nnx.Dict(ema=nnx.State({"x": shared}), f=m.first.__call__, g={"ema": nnx.State({"x": shared}), "f": m.first.w})
    assert nnx.find_duplicates(m) == [[("ema", "x"), ("g", "ema", "x")], [("f", "w"), ("g", "f")]]
