"""Axis names: metadata that follows the axes which transforms strip and stack.

A Variable may name the axes of its value (``sharding=('in', 'out')``). A transform that hands slices to a function
strips an axis, and stacks it again when it is done; the names go with it, so at every level they are as many as the
value has axes. The name of the stacked axis is ``transform_metadata={nnx.PARTITION_NAME: name}`` of the transform, None
by default. What a Variable does about it is up to it: :meth:`Variable.remove_axis`, :meth:`Variable.add_axis` and their
hooks.

Both directions are changes of the static table: the function runs on the layout with axes stripped, and the rows that
it changed or made get them back in its Delta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..core.calls import captured_types
from ..core.errors import ArgumentError
from ..core.graph import After, Delta, Layout, Row, VariableRow
from ..core.static import Const
from ..core.variables import Perturbation, make_variable

PARTITION_NAME = "partition_name"
NO_METADATA: Mapping[str, Any] = MappingProxyType({})


def axis_name_in(transform_metadata: Mapping[str, Any]) -> str | None:
    """The name that a transform gives to the axis that it stacks."""
    unknown = set(transform_metadata) - {PARTITION_NAME}
    if unknown:
        raise ArgumentError(f"transform_metadata has {sorted(unknown)}; it takes {{nnx.PARTITION_NAME: name}}.")
    return transform_metadata.get(PARTITION_NAME)


def strip_axes(layout: Layout, leaves: Sequence[Any], labels: Sequence[Any], name: str | None) -> Layout:
    """The layout that the function sees, when it gets slices of the leaves that are labelled with an axis."""
    rows: list[Row] = list(layout.rows)
    for i, leaf, label in zip(layout.variables, leaves, labels, strict=False):
        rows[i] = _moved(rows[i], leaf, label, "remove_axis", name)
    return layout if rows == list(layout.rows) else Layout(tuple(rows), layout.root)


def stack_axes(after: After, labels: Sequence[Any], name: str | None) -> Delta:
    """The Delta of a function that ran on slices, once what it returned with an axis is stacked along it."""
    rows = dict(after.delta.rows)
    for (i, _), leaf, label in zip(after.owners, after.leaves, labels, strict=True):
        if i in rows:
            rows[i] = _moved(rows[i], leaf, label, "add_axis", name)
    return after.delta._replace(rows=tuple(rows.items()))


def _moved(row: Row, value: Any, label: Any, method: str, name: str | None) -> Row:
    """The row of a Variable after its ``remove_axis`` or ``add_axis``, which see the slice."""
    if not isinstance(label, int) or not isinstance(row, VariableRow) or not row.metadata.value:
        return row
    variable = make_variable(row.type, value, row.metadata.fresh())
    getattr(variable, method)(label, name)
    return row._replace(metadata=Const.of_items(variable.get_metadata(), ("metadata",)))


def stack_recorded(labels: Sequence[Any], layout: Layout, after: After) -> Sequence[Any]:
    """Within ``nnx.capture``: what each slice has recorded in an object that is passed whole is stacked, on axis 0.

    Not a perturbation: it would be added, stacked, in each slice.
    """
    kinds = [kind for kind in captured_types() or () if not issubclass(kind, Perturbation)]
    if not kinds:
        return labels
    new = [i >= len(layout.rows) and after.rows[i].type in kinds for i, _ in after.owners]
    return [0 if is_new and not isinstance(label, int) else label for is_new, label in zip(new, labels, strict=True)]
