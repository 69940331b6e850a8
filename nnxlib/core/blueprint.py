"""Blueprints: how ``build`` makes the objects of a layout with few Python calls.

Each trace builds a whole model, and so does each ``nnx.merge``. So what can be prepared is prepared once for a layout:
which objects are alike and can be made and filled together, and where the value of each field is found. All these
values are in one list, the *pool*: first the objects by row, then the leaves without those of Variables, the pytrees,
and the constants.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

from .objects import Pytree, slot_owner
from .rows import LEAF, NodeRow, Ref, Row, Spec, Tree, VariableRow, count_leaves
from .static import Const


class Blueprint:
    """How to make the objects of a layout, given its rows, which of them are Variables, and the number of leaves.

    Attributes:
      variable_types, metadata: of the Variables, in order.
      node_types: of the nodes, by the class that declares their slots, which makes all of them at once.
      order: the objects are made in another order, first the Variables; this gives the place there of each row.
      marks: for nodes with marks: the place in that order, and the marks.
      held: how many leaves are in objects; the other ones are in the pytree around them.
      constants: of all fields, an immutable one once, a mutable one for each use.
      trees: of all fields, each with the range of its leaves.
      attributes: for nodes whose attributes have the same names: their rows, the names, and the places in the pool of
        the values, those of the first node, then of the second, and so on.
      lists: for Lists without attributes: the row, and the places of the items.
      others: for each other node: the row, the names of the fields, and the places of their values.
      contents: for each node its row, the names and the places, to see later whether it holds something else.
      constant_start: where the constants begin in the pool.
      reliable: whether a stamp attached to the fresh objects reveals every change but that of a Variable's value.
    """

    def __init__(self, rows: Sequence[Row], variables: Sequence[int], leaf_count: int):
        nodes = [(i, row) for i, row in enumerate(rows) if type(row) is NodeRow]
        variable_rows = [cast(VariableRow, rows[i]) for i in variables]
        self.variable_types = [row.type for row in variable_rows]
        self.metadata = [row.metadata for row in variable_rows]
        by_owner: dict[type, list[int]] = {}
        for i, row in nodes:
            by_owner.setdefault(slot_owner(row.type), []).append(i)
        self.node_types = {owner: [rows[i].type for i in found] for owner, found in by_owner.items()}
        made = {i: k for k, i in enumerate((*variables, *itertools.chain(*by_owner.values())))}
        self.order = [made[i] for i in range(len(rows))]
        self.marks = [(made[i], row.marks.value) for i, row in nodes if row.marks.value]

        self.held = len(variables)
        self.trees: list[tuple[Tree, int, int]] = []
        self.constants: list[Const] = []
        self._constant_places: dict[int, int] = {}  # of immutable ones, by the id of the value
        self._leaf_start = len(rows) - len(variables)  # of leaf 0 in the pool, which lacks the values of Variables
        self._tree_start = self._leaf_start + leaf_count
        self.constant_start = self._tree_start + sum(type(spec) is Tree for _, row in nodes for _, spec in row.fields)
        groups: dict[tuple, tuple[list[int], list[int]]] = {}
        self.lists: list[tuple[int, list[int]]] = []
        self.others: list[tuple[int, tuple, list[int]]] = []
        self.contents: list[tuple[int, tuple, list[int]]] = []
        for i, row in nodes:
            kind, names = row.type, row.names
            of_field = {name: self._place(spec) for name, spec in row.fields}
            places = [of_field[name] for name in names]
            self.contents.append((i, names, places))
            if names and issubclass(kind, Pytree) and not kind._nnx_slot_names:
                found, theirs = groups.setdefault(names, ([], []))
                found.append(i)
                theirs += places
            elif issubclass(kind, list) and names == tuple(range(len(names))):
                self.lists.append((i, places))
            else:
                self.others.append((i, names, places))
        self.attributes = [(found, names, places) for names, (found, places) in groups.items()]

        mutable = any(const.mutable for const in (*self.constants, *self.metadata))
        guarded = all(row.type._nnx_guarded and not row.marks.mutable for _, row in nodes)
        self.reliable = guarded and not (mutable or self.trees or self.held > len(variables))

    def _place(self, spec: Spec) -> int:
        """Where in the pool the value of the next field is; constants and pytrees are added to it."""
        if type(spec) is Ref:
            return spec.index
        if type(spec) is Const:
            place = None if spec.mutable else self._constant_places.get(id(spec.value))
            if place is None:
                place = self._constant_places[id(spec.value)] = self.constant_start + len(self.constants)
                self.constants.append(spec)
            return place
        first = self.held
        self.held += count_leaves(spec)
        if spec is LEAF:
            return self._leaf_start + first
        self.trees.append((cast(Tree, spec), first, self.held))
        return self._tree_start + len(self.trees) - 1


def fresh(constants: list[Const]) -> list[Any]:
    """The values of constants; those that can change in place are copies."""
    return [const.value if const.parts is None else const.fresh() for const in constants]
