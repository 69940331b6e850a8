"""The live table of an object: the layout of the graph below it, and where to gather the leaves from.

Packing a model walks all of it, and a training loop packs the same model at every step. So the root of each graph that
is packed keeps a :class:`LiveTable`, in ``_nnx_table``. This file has only the data:

- tables.py makes tables, and says when they may be used again;
- patching.py brings one up to date after a small change, without walking everything;
- packing.py packs a pytree of objects from the tables of these.

A table does not refer to its root, so a dropped model is freed at once. Copies and pickles of a model have no table.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any

from .cells import Cell
from .editable import Compared, Guard
from .foreign import Flattened
from .layout import Layout
from .objects import HasAttributes, attributes_of
from .stamps import Stamp
from .tracing import at_top_level

CHECK_ALWAYS = bool(os.environ.get("NNXLIB_CHECK"))
_USES_IN_A_TRACE = 8  # before the first check of a table made in a trace: its objects are soon gone

_serials = itertools.count()


class LiveTable:
    """The table of one live object, the *root*: its layout, and where its leaves are."""

    __slots__ = (
        "array_rows", "arrays", "cells", "compared", "guard", "index", "layout", "next_check", "objects", "serial",
        "sharing", "shortcuts", "snapshot", "stamp", "until_check", "variant", "variants",
    )  # fmt: skip

    layout: Layout
    stamp: Stamp  # invalid once an object that the table describes has changed its structure
    compared: list[Compared]  # the static values and pytrees that can be changed without telling the stamp
    guard: Stamp | Guard  # the stamp, or one that also looks at these
    objects: list[Any]  # by row; None in place of the root
    index: dict[int, int]  # id of an object -> its row
    cells: list[Cell]  # of all Variables, in row order
    # (row of a node, container, key, None) for each array in a field of the node; with a Flattened for a pytree there.
    arrays: list[tuple[int, Any, Any, Flattened | None]]
    array_rows: list[int]  # the row of the node that holds each array; a pytree may have several
    snapshot: list[Any] | None  # the leaves, if `stamp` and `compared` do not reveal every change: it is used only once
    next_check: int  # the number of the use at which the table is next compared with the object
    until_check: int  # how many uses are left up to that one
    serial: int  # unique, never reused
    sharing: dict[tuple[int, ...], Any]  # by the serials of several tables: what their objects share, see packing.py
    shortcuts: dict[Any, Any]  # what a call reads and writes, by its CallSite or Shortcut, see dispatch.py
    variant: Variant | None  # the present one; None until the table is patched
    variants: list[Variant]  # all of them

    def __init__(self, layout: Layout, stamp: Stamp, objects: list[Any], index: dict[int, int], cells: list[Cell]):
        self.layout, self.stamp, self.index, self.cells = layout, stamp, index, cells
        self.guard = stamp
        self.objects = [None, *objects[1:]]
        self.compared, self.arrays, self.array_rows, self.snapshot = [], [], [], None
        self.next_check = self.until_check = 1 if at_top_level() or CHECK_ALWAYS else _USES_IN_A_TRACE
        self.serial, self.sharing, self.shortcuts = next(_serials), {}, {}
        self.variant, self.variants = None, []

    @property
    def reliable(self) -> bool:
        """Whether it tells of every change, and so can be used again."""
        return self.snapshot is None

    def leaves(self) -> list[Any]:
        """The leaves, as ``pack`` would collect them."""
        if self.snapshot is not None:
            return self.snapshot
        values = [cell.value for cell in self.cells]
        return values + self.array_values() if self.arrays else values

    def array_values(self) -> list[Any]:
        """The arrays that nodes hold."""
        found = []
        for _, container, key, tree in self.arrays:
            if tree is None:
                found.append(container[key])
            else:
                found += tree.arrays()
        return found

    def objects_with(self, root: Any) -> list[Any]:
        """The objects by row."""
        objects = self.objects.copy()
        objects[0] = root
        return objects

    def put_off_check(self) -> None:
        """Let as many uses as there have been come before the next check; none with NNXLIB_CHECK."""
        self.until_check = 1 if CHECK_ALWAYS else self.next_check
        self.next_check += self.until_check

    def forget_exchanged(self) -> None:
        """Forget what was noted of the objects so far, some of which were exchanged for others.

        It may be wrong, and would keep the arrays of the former ones alive.
        """
        self.serial, self.sharing = next(_serials), {}
        for variant in self.variants:
            variant.transitions = []
            variant.shortcuts.clear()


class PendingTable:
    """In place of the table of an object that was just built: all that is needed to make the table without a walk."""

    __slots__ = ("layout", "objects", "stamp")

    until_check = 1  # so no shortcut uses it

    def __init__(self, layout: Layout, objects: list[Any], stamp: Stamp):
        self.layout, self.objects, self.stamp = layout, objects, stamp


class Variant:
    """A layout that a table has had, its shortcuts, and the transitions from it to other variants.

    It refers weakly to the layout, which lives as long as the functions compiled for it; and to other variants, so that
    toggling a flag back and forth makes no reference cycle, which would keep a dropped model alive.
    """

    __slots__ = ("__weakref__", "layout", "shortcuts", "transitions")

    def __init__(self, layout: Layout, shortcuts: dict[Any, Any]):
        self.layout, self.shortcuts = weakref.ref(layout), shortcuts
        self.transitions: list[tuple[Any, weakref.ref[Variant]]] = []  # by what the changed nodes hold, see patching.py


def container_of(node: Any, name: Any) -> Any:
    """The container of a field of a node: the dict of its attributes, or the node itself."""
    return attributes_of(node) if isinstance(node, HasAttributes) and name in attributes_of(node) else node
