"""Packing from live tables: a pytree of objects, such as the arguments of a call, without a walk through them.

Each object in the pytree has its table (tables.py). If no two of them share a part, the layout of the pytree is joined
from theirs, and its leaves are gathered one table after the other (:func:`pack_live`).

A jitted call does not need the layout of its arguments, but what these have in common, as part of the key of its
compiled function: :class:`Sharing`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import jax.tree_util as jtu

from .annotations import NamedTuple
from .calls import built_here, note_paths
from .cells import Cell
from .closures import notice_all
from .data import is_bound_method, is_node
from .graph import Packed, pack
from .held_by_arguments import held_in
from .layout import keep
from .live_table import LiveTable
from .objects import Node
from .rows import ROOT
from .tables import table_of
from .tracing import at_top_level
from .variables import Variable
from .walk import Walk


def pack_live(tree: Any) -> Packed:
    """:func:`~nnxlib.core.graph.pack` a pytree from the tables of the nodes in it, without a walk through them.

    They are walked after all if two of them share a part, or if there are Variables beside them.
    """
    try:
        leaves = jtu.tree_leaves(tree, is_leaf=is_node)
    except (TypeError, ValueError):
        return pack(tree)  # which says in which dict the keys cannot be sorted
    roots = [x for x in leaves if is_node(x)]
    tables = () if any(map(is_bound_method, leaves)) else _tables_of(roots)
    if not tables or sharing_of(roots, tables):
        return pack(tree)
    objects, index = list[Any](), dict[int, int]()
    for root, table in zip(roots, tables, strict=True):
        index[id(root)] = len(objects)
        objects += table.objects_with(root)
    walk = Walk(objects, index=index)
    spec = walk.run(tree)
    first, *rest = [table.layout for table in tables]
    layout = first.around(spec, *rest)
    if layout not in first.kept and not held_in(layout):
        keep(first.kept, layout, None)
    notice_all(roots)
    note_paths(layout, walk.objects)
    found = [(table.leaves(), len(table.cells)) for table in tables]
    values = [x for leaves, count in found for x in leaves[:count]]
    arrays = [x for leaves, count in found for x in leaves[count:]]
    return Packed(layout, values + arrays + walk.arrays[ROOT], walk.objects)


def _tables_of(roots: Sequence[Any]) -> Sequence[LiveTable]:
    """The table of each root; none where a walk is faster: for several Variables, and mostly in a trace."""
    if len(roots) > 1 and not all(isinstance(x, Node) for x in roots):
        return ()
    if any(type(x) in weakref.ProxyTypes for x in roots):
        return ()
    if not at_top_level() and any(x._nnx_table is None and not _is_built(x) for x in roots):
        return ()  # most objects in a trace are packed once
    return [*map(table_of, roots)]


def _is_built(x: Any) -> bool:
    """Whether the table of an object in a trace can probably be made without a walk."""
    found = built_here(x)
    return found is not None and found[0].part(found[2])[0].blueprint.reliable


# --- what several objects share ---------------------------------------------------------------------------------------


class Sharing(NamedTuple):
    """The parts that one of several objects shares with those before it, and the parts of its own. Static."""

    shared: tuple[tuple[int, tuple[int, int]], ...]  # (row, (the number of an earlier object, the row there))
    cells: Sequence[int]  # the numbers of its own cells
    arrays: Sequence[int]  # the numbers of its own arrays


@final
class VariableGroup:
    """Variables that are arguments by themselves, such as those of a State; it takes the place of a table for each.

    They are often new at each call, as gradients are, and a table takes longer than to read a Variable. So a group is
    made for one call.
    """

    __slots__ = ("cells", "objects")

    array_rows = ()  # there are no arrays besides those in the cells

    def __init__(self) -> None:
        self.objects, self.cells = list[Variable](), list[Cell]()

    def objects_with(self, root: Any) -> list[Any]:
        """The Variables; there is no root."""
        return self.objects

    def array_values(self) -> list[Any]:
        """None: a Variable holds no arrays besides its value."""
        return []


Tables = Sequence[LiveTable | VariableGroup]  # of objects in arguments, in order; a group is without root (None)


def sharing_of(roots: Sequence[Any], tables: Tables) -> tuple[Sharing, ...]:
    """The :class:`Sharing` of each of several objects, given their tables; empty if they share nothing.

    Computed once for tables that are kept.
    """
    kept = [table for table in tables if type(table) is LiveTable]
    if len(kept) < len(tables):
        alone = [x for table in tables if type(table) is VariableGroup for x in table.objects]
        ids = set(map(id, alone))
        if len(ids) < len(alone) or not all(table.index.keys().isdisjoint(ids) for table in kept):
            return _find_sharing(roots, tables)
    if len(kept) < 2:
        return ()
    known = kept[0].sharing
    serials = tuple([-len(table.cells) if type(table) is VariableGroup else table.serial for table in tables])
    found = known.get(serials)
    if found is None:
        share = len(set().union(*[table.index for table in kept])) < sum([len(table.index) for table in kept])
        found = keep(known, serials, _find_sharing(roots, tables) if share else ())
    return found


def _find_sharing(roots: Sequence[Any], tables: Tables) -> tuple[Sharing, ...]:
    first: dict[int, tuple[int, int]] = {}  # id of an object -> the number of a table, and the row there
    found = []
    for k, (x, table) in enumerate(zip(roots, tables, strict=True)):
        places = [(row, first.setdefault(id(y), (k, row))) for row, y in enumerate(table.objects_with(x))]
        shared = {row: place for row, place in places if place != (k, row)}
        rows = range(len(table.cells)) if type(table) is VariableGroup else table.layout.variables
        cells = tuple([j for j, row in enumerate(rows) if row not in shared])
        arrays = tuple([j for j, row in enumerate(table.array_rows) if row not in shared])
        found.append(Sharing(tuple(shared.items()), cells, arrays))
    return tuple(found) if any(x.shared for x in found) else ()
