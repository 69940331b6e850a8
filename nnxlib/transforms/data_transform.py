"""The hook of ``scan`` that sees the Variables inside the body: for annotations, such as shardings of the slices.

The values that the hook returns take the place of those that the loop hands to the body, and nothing else: a Variable
that the body leaves alone is not written because the hook has touched it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import PrefixError, format_path, listed
from ..core.graph import Layout, VariableRow
from ..core.state import State, from_flat_state, to_flat_state
from ..core.variables import Variable, make_variable
from .body_checks import type_changes

DataTransform = Callable[[Any, State], Any]


def transformed_data(
    hook: DataTransform, layout: Layout, labels: Sequence[Any]
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function of leaves that gives those of the Variables, by label, to the hook.

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
            given = from_flat_state([(paths[k], _variable(layout, k, leaves[k])) for k in positions])
            returned = dict(to_flat_state(hook(label, given)))
            if returned.keys() != {paths[k] for k in positions}:
                lost = [format_path(paths[k]) for k in positions if paths[k] not in returned]
                new = [format_path(path) for path in returned if path not in {paths[k] for k in positions}]
                raise PrefixError(f"data_transform must return the paths it is given; lost: {lost}, new: {new}.")
            for k in positions:
                value = returned[paths[k]]
                found[k] = value.get_raw_value() if isinstance(value, Variable) else value
            before, after = [leaves[k] for k in positions], [found[k] for k in positions]
            changes = type_changes(before, after, [layout.leaf_paths[k] for k in positions])
            if changes:
                raise PrefixError(listed("data_transform must keep shapes and dtypes:", changes))
        return found

    return enter


def _variable(layout: Layout, k: int, value: Any) -> Variable:
    row = layout.rows[layout.variables[k]]
    assert isinstance(row, VariableRow)
    return make_variable(row.type, value, row.metadata.fresh())
