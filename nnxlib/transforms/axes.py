"""Axis names: metadata that follows the axes that transforms strip and stack.

A Variable may have names for the axes of its value (``sharding=('in', 'out')``). ``vmap`` and ``scan`` pass slices to a
function, which have one axis less, and stack what comes back. The names follow: at every level there is one for each
axis of the value. The name of the stacked axis is given by ``transform_metadata={nnx.PARTITION_NAME: name}``; it is
None by default. If other metadata name the axes, too, ``transform_metadata`` has a name under their key as well. The
changes are made by :meth:`Variable.remove_axis`, :meth:`Variable.add_axis` and their hooks.

Both are changes of static tables: the function runs on a layout without the axes (:func:`strip_axes`), and the rows in
its Delta get them back (:func:`stack_axes`), those of the caller's Variables under the names that they had. If the
stacked axis has a name, new Variables are then placed once more (:func:`place_stacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..core.annotations import NamedTuple
from ..core.calls import recorded_types
from ..core.graph import After, Delta, variable_of
from ..core.layout import Layout
from ..core.metadata import name_axis, name_of_axis, unname_axis
from ..core.placement import placed, placed_stack
from ..core.rows import Row, VariableRow
from ..core.variables import Perturbation, Variable

PARTITION_NAME = "partition_name"
NO_AXIS_NAMES: Mapping[str, Any] = MappingProxyType({})


class AxisName(NamedTuple):
    """The name of the axis that a transform stacks."""

    partition: str | None = None  # in the sharding of a Variable
    others: tuple[tuple[str, Any], ...] = (("optimizer_sharding", None),)  # in other metadata: (key, name)

    def added_to(self, variable: Variable, index: int) -> None:
        """Name the axis along which a Variable is about to be stacked."""
        variable.add_axis(index, self.partition)
        for key, name in self.others:
            name_axis(variable, key, index, name)

    def removed_from(self, variable: Variable, index: int) -> None:
        """Drop the name of the axis along which a slice of a Variable was taken."""
        variable.remove_axis(index, self.partition)
        for key, _ in self.others:
            unname_axis(variable, key, index)

    def in_row(self, row: Row | None, value: Any, index: Any) -> AxisName:
        """The names that the axis has in a Variable of the caller, if ``row`` is that of one; ``value`` is a slice."""
        if not isinstance(index, int) or not isinstance(row, VariableRow):
            return self
        variable = variable_of(row, value)
        partition = name_of_axis(variable, "out_sharding", index, self.partition)
        return AxisName(partition, tuple((key, name_of_axis(variable, key, index, name)) for key, name in self.others))


def axis_name_in(transform_metadata: Mapping[str, Any]) -> AxisName:
    """The name of the stacked axis, as given by ``transform_metadata``."""
    others = dict(AxisName().others) | {key: x for key, x in transform_metadata.items() if key != PARTITION_NAME}
    return AxisName(transform_metadata.get(PARTITION_NAME), tuple(others.items()))


def strip_axes(layout: Layout, leaves: Sequence[Any], labels: Sequence[Any], name: AxisName) -> Layout:
    """The layout that the function sees when it gets slices of the leaves whose label is an axis."""
    rows: list[Row] = list(layout.rows)
    for i, leaf, label in zip(layout.variables, leaves, labels, strict=False):
        rows[i] = _moved(rows[i], leaf, label, name.removed_from)
    return layout if rows == list(layout.rows) else Layout(tuple(rows), layout.root)


def stack_axes(after: After, labels: Sequence[Any], layout: Layout, name: AxisName) -> tuple[After, Sequence[Any]]:
    """The result of a function that ran on slices, as it is once the leaves with an axis are stacked; and the labels.

    The function was given objects of the ``layout``. What it has recorded for an ``nnx.capture`` is stacked, too.
    """
    labels = _with_recorded(after, labels, layout)
    rows = dict(after.delta.rows)
    for (i, _), leaf, label in zip(after.owners, after.leaves, labels, strict=True):
        if i in rows:
            former = layout.rows[i] if i < len(layout.rows) else None
            rows[i] = _moved(rows[i], leaf, label, name.in_row(former, leaf, label).added_to)
    return after._replace(delta=after.delta._replace(rows=tuple(rows.items()))), labels


def _with_recorded(after: After, labels: Sequence[Any], layout: Layout) -> Sequence[Any]:
    """The labels, with axis 0 for what slices have recorded in objects that are passed whole, within ``nnx.capture``.

    A perturbation is left alone: a stacked one would be added as a whole in each slice.
    """
    kinds = [kind for kind in recorded_types() if not issubclass(kind, Perturbation)]
    if not kinds:
        return labels
    new = [i >= len(layout.rows) and after.rows[i].type in kinds for i, _ in after.owners]
    return [0 if is_new and not isinstance(label, int) else label for is_new, label in zip(new, labels, strict=True)]


def _moved(row: Row, value: Any, label: Any, move: Callable[[Variable, int], None]) -> Row:
    """The row of a Variable after ``move`` has added or removed the name of an axis; its value is the slice."""
    if not isinstance(label, int) or not isinstance(row, VariableRow):
        return row
    if not row.metadata.value and (row.type.add_axis, row.type.remove_axis) == _BY_METADATA:
        return row
    variable = variable_of(row, value)
    move(variable, label)
    return row._replace(metadata=variable._metadata.const(("metadata",)))


_BY_METADATA = (Variable.add_axis, Variable.remove_axis)  # which leave a Variable without metadata as it is


def place_new(delta: Delta, leaves: Sequence[Any], first: int, place: Callable = placed) -> list[Any]:
    """The leaves of a Delta; those of new Variables, whose rows begin at ``first``, sharded as their names say."""
    variables = [(i, row) for i, row in delta.rows if isinstance(row, VariableRow)]
    found = list(leaves)
    for k, (i, row) in enumerate(variables, len(delta.values)):
        if i >= first and row.metadata.value:
            found[k] = place(found[k], row.metadata.value, row.type)
    return found


def place_stacks(delta: Delta, leaves: Sequence[Any], first: int, name: AxisName) -> Sequence[Any]:
    """:func:`place_new`, once the axis has been stacked: within a slice, nothing can be sharded along it."""
    return leaves if name.partition is None else place_new(delta, leaves, first, placed_stack)
