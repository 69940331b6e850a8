"""The hook of ``scan`` that sees the Variables inside the body: for annotations, such as shardings of the slices.

The values that the hook returns take the place of those that the loop hands to the body, and nothing else: a Variable
that the body leaves alone is not written because the hook has touched it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.differences import leaf_differences, refuse
from ..core.errors import PrefixError
from ..core.graph import variable_of
from ..core.layout import Layout
from ..core.state import State, from_flat_state, to_flat_state
from ..core.variables import Variable

DataTransform = Callable[[Any, State], Any]


def transformed_data(
    hook: DataTransform, layout: Layout, labels: Sequence[Any]
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that passes the values of Variables, among all leaves, through the hook, label by label.

    Raises (when called):
      PrefixError: if the hook loses or adds a path, or changes a shape or dtype.
    """
    groups: dict[Any, list[int]] = {}
    for k in range(len(layout.variables)):
        groups.setdefault(labels[k], []).append(k)
    paths = [layout.paths[i][1:] for i in layout.variables]

    def enter(leaves: Sequence[Any]) -> list[Any]:
        found = list(leaves)
        for label, positions in groups.items():
            given = {paths[k]: leaves[k] for k in positions}
            items = [(paths[k], variable_of(layout.variable_row(k), leaves[k])) for k in positions]
            returned = dict(to_flat_state(hook(label, from_flat_state(items))))
            values = {p: x.get_raw_value() if isinstance(x, Variable) else x for p, x in returned.items()}
            refuse(leaf_differences(given, values), _OTHER_TYPES, _AS_TREE_MAP, PrefixError)
            for k in positions:
                found[k] = values[paths[k]]
        return found

    return enter


_OTHER_TYPES = "What data_transform returns does not fit what it is given; nothing was changed."
_AS_TREE_MAP = "Return a State with the same paths, shapes and dtypes, as jax.tree.map does."
