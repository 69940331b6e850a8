"""The ways to iterate over a graph agree, on random graphs with containers of all kinds."""

from __future__ import annotations

import jax.numpy as jnp
from hypothesis import given

import nnxlib as nnx
from nnxlib.core.data import is_node
from nnxlib.core.iteration import iter_objects

from .strategies import Graph, examples, graphs, make


@examples(60)
@given(graphs())
def test_iter_objects_is_iter_graph_without_leaves(graph: Graph) -> None:
    """Nodes and Variables in the same order, with the same paths; also those in tuples, dicts and bound methods."""
    method = nnx.Linear(1, 1, rngs=nnx.Rngs(0)).__call__
    tree = (*make(graph), 1, (nnx.Param(0.0), {"y": [nnx.Param(1.0), jnp.ones(2)]}), (method, 2), [2.0], ())
    found = list(iter_objects(tree))
    expected = [(path, x) for path, x in nnx.iter_graph(tree) if is_node(x)]
    assert [path for path, _ in found] == [path for path, _ in expected]
    assert all(x is y for (_, x), (_, y) in zip(found, expected, strict=True))
