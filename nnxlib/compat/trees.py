"""What the tree mode of flax.nnx refuses: a Variable with two paths, a cycle, and what is not a pytree."""

from __future__ import annotations

from typing import Any

import jax
import jax.tree_util as jtu

from ..core.errors import AliasingError, format_path
from ..core.iteration import find_duplicates, iter_graph
from ..core.objects import Node
from ..core.variables import Variable

OF_GRAPHS = {  # the functions that take a graph, and the number of that argument
    **dict.fromkeys("as_abstract clone flatten graphdef iter_children iter_graph iter_modules reseed".split(), 0),
    **dict.fromkeys("split state unpack view view_info with_attributes".split(), 0),
    **dict.fromkeys(["map", "recursive_map"], 1),
}


def check_tree(node: Any) -> None:
    """Check that a pytree has each Variable once, no cycle, and no Module that JAX does not flatten.

    Raises:
      AliasingError: naming the paths of what is shared.
      ValueError: naming the path of what is not a pytree.
    """
    found = dict(iter_graph(node))
    variables = [path for path, x in found.items() if isinstance(x, Variable)]
    for first, *more in find_duplicates(node):
        if any(path[: len(first)] == first for path in (*variables, *more)):
            paths = ", ".join(map(format_path, (first, *more)))
            raise AliasingError(
                f"{type(found[first]).__name__} found at paths {paths}: a tree does not support shared references or "
                "cycles. Pass graph=True."
            )
    paths_of_refs: dict[int, tuple] = {}
    for path, x in found.items():
        if isinstance(x, jax.Ref) and paths_of_refs.setdefault(id(x), path) is not path:
            paths = ", ".join(map(format_path, (paths_of_refs[id(x)], path)))
            raise AliasingError(f"A jax.Ref found at paths {paths}: a tree has each Ref once.")
        if isinstance(x, Node) and jtu.all_leaves([x]):
            raise ValueError(
                f"{type(x).__name__} was made with pytree=False, so no tree can hold it. Found at path "
                f"{format_path(path)}; pass graph=True."
            )
