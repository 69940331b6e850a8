"""Blueprints: how ``build`` makes the objects of a layout with few Python calls.

Each trace builds a whole model, and so does each ``nnx.merge``. So what can be prepared is prepared once for a layout:
where the value of each field is found. All these values are in one list, the *pool*: first the objects by row, then
what fields hold besides objects.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from .cells import Cell
from .making import make_variables
from .metadata import NO_METADATA
from .missing import MISSING
from .objects import new_node
from .rows import LEAF, NodeRow, Ref, Row, Spec, VariableRow, value_of
from .stamps import Stamps
from .static import Const, holds_same


class Blueprint:
    """The plan by which the objects of a layout are made, given its rows, and which of these are Variables.

    Attributes:
      variable_types, metadata: of the Variables, in order.
      reliable: whether a stamp attached to the fresh objects reveals every change but that of a Variable's value.
    """

    def __init__(self, rows: Sequence[Row], variables: Sequence[int]):
        self._rows, self._variables = rows, variables
        nodes = [(i, row) for i, row in enumerate(rows) if type(row) is NodeRow]
        variable_rows = [cast(VariableRow, rows[i]) for i in variables]
        self.variable_types = [row.type for row in variable_rows]
        self.metadata = [row.metadata for row in variable_rows]
        self._nodes = [(i, row.type, row.marks.value) for i, row in nodes]

        # The pool after the objects: immutable values, and MISSING for what each build makes anew.
        self._after_objects: list[Any] = []
        self._made_anew: list[tuple[int, Spec]] = []  # its places in the pool, and specs
        known: dict[int, int] = {}  # the places of immutable values, by id

        def place_for(spec: Spec) -> int:
            """The place in the pool for the value of a field with this spec."""
            if type(spec) is Ref:
                return spec.index
            place = len(rows) + len(self._after_objects)
            if type(spec) is Const and not spec.mutable:
                if (first := known.setdefault(id(spec.value), place)) != place:
                    return first
                self._after_objects.append(spec.value)
            else:
                self._made_anew.append((place, spec))
                self._after_objects.append(MISSING)
            return place

        # For each node, by row, the names of its fields, and the places of their values.
        self._contents: dict[int, tuple[tuple, list[int]]] = {}
        for i, row in nodes:
            of_field = {name: place_for(spec) for name, spec in row.fields}
            self._contents[i] = row.names, [of_field[name] for name in row.names]
        lists = {i for i, row in nodes if issubclass(row.type, list) and row.names == tuple(range(len(row.names)))}
        self._lists = [(i, places) for i, (_, places) in self._contents.items() if i in lists]  # without attributes
        self._others = [(i, *found) for i, found in self._contents.items() if i not in lists]

        mutable = any(const.mutable for const in self.metadata)
        guarded = all(row.type._nnx_guarded and not row.marks.mutable for _, row in nodes)
        self.reliable = guarded and not (mutable or self._made_anew)

    def make(self, leaves: Sequence[Any], cell: Callable[[Any], Cell], stamps: Stamps) -> list[Any]:
        """The objects by row: Variables, whose values are the first leaves, and empty nodes."""
        made = make_variables(self.variable_types, leaves, fresh_values(self.metadata), cell, stamps)
        objects: list[Any] = [None] * len(self._rows)
        for i, kind, marks in self._nodes:
            objects[i] = new_node(kind, marks, None, stamps)
        for i, x in zip(self._variables, made, strict=False):
            objects[i] = x
        return objects

    def fill(self, objects: list[Any], leaves: Iterator[Any]) -> None:
        """Give the nodes among the objects their contents; ``leaves`` are those that nodes hold."""
        count = len(objects)
        objects += self._after_objects  # for a moment: a second list, of both, would take the most memory
        for place, spec in self._made_anew:
            objects[place] = next(leaves) if spec is LEAF else value_of(spec, objects, leaves)
        value_at = objects.__getitem__
        for i, places in self._lists:
            list.extend(objects[i], map(value_at, places))
        for i, names, places in self._others:
            node = objects[i]
            node._nnx_fill_new(node, dict(zip(names, map(value_at, places))))
        del objects[count:]

    def as_built(self, objects: Sequence[Any], rows: Iterable[int]) -> set[int]:
        """Those of the rows whose objects still hold what they were built with, apart from values of Variables.

        Nodes that hold arrays, pytrees, or static values that can change in place are never among them.
        """
        value_at = [*objects, *self._after_objects].__getitem__
        return {i for i in rows if self._is_as_built(i, objects[i], value_at)}

    def _is_as_built(self, i: int, x: Any, value_at: Callable[[int], Any]) -> bool:
        """Whether the object of a row is as it was built; ``value_at`` gives what is at a place in the pool."""
        row = self._rows[i]
        if type(x) is not row.type:
            return False
        if type(row) is VariableRow:
            return holds_same(x._metadata, row.metadata.value)
        (names, places), held = self._contents[i], x._nnx_contents()
        is_same = tuple(held) == names and all(map(operator.is_, held.values(), map(value_at, places)))
        return is_same and holds_same(x._nnx_marks or NO_METADATA, cast(NodeRow, row).marks.value)


def fresh_values(constants: list[Const]) -> list[Any]:
    """The values of constants; those that can change in place are copies."""
    return [const.value if const.uncopied is None else const.fresh() for const in constants]
