"""Live tables, made and checked: the table of an object is used again as long as nothing in its structure has changed.

live_table.py says what a table holds. :func:`table_of` returns one that describes an object as it is now:

1. The table that the object keeps, if ``table.guard.valid`` is true. Then no object that the table describes has
   changed its structure (stamps.py); and static values that can be changed in place, such as a mutable configuration
   object, are what they were (editable.py). (Each is compared once per call, however many Modules refer to it.)
2. If only an object has changed, the same table, patched, if the change was small (patching.py).
3. Otherwise a new one, made by a walk. But an object that a transform has built, or a part of it, needs no walk at
   first: its layout follows from that of the whole, if all below is as it was built (:func:`_built`).

Dicts, lists and States in a pytree that is an attribute are not nodes; foreign.py finds their changes. A graph with
parts that can change unnoticed (such as arrays in the slots of a class) is walked at every call. As a guard against
writes that bypass every check (``object.__setattr__`` from outside), uses number 1, 2, 4, 8, ... of a table (8, 16, ...
if it was made in a trace) walk anyway, and raise :class:`~nnxlib.core.errors.StaleLayoutError` if the table does not
describe the object, or warn if it only lacks attributes. With the environment variable ``NNXLIB_CHECK`` set, every
use does.
"""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Sequence
from typing import Any

from . import errors
from .calls import built_here
from .cells import Cell
from .data import is_node
from .editable import Guard
from .foreign import Flattened
from .graph import build, pack
from .graphdef import as_change, structural_differences
from .layout import Layout
from .live_table import LiveTable, PendingTable, container_of
from .objects import Pytree
from .patching import patched
from .rows import LEAF, NodeRow, Row, Tree, count_leaves
from .stamps import Stamp, stamping, with_stamp
from .tracing import UserLine, at_top_level
from .walk import Walk


def table_of(root: Any) -> LiveTable:
    """Return a table that describes a live node or Variable as it is now.

    Raises:
      StaleLayoutError: if the object was changed in a way that its table has not noticed.
    """
    table: Any = root._nnx_table
    if table is None:
        table = _built(root)
    if type(table) is PendingTable:
        return _complete(root, table)
    if table is None or not (table.guard.valid or patched(table, root)):
        return _make(root)
    table.until_check -= 1
    return table if table.until_check > 0 else _checked(table, root)


def build_described(layout: Layout, leaves: Sequence[Any]) -> Any:
    """:func:`~nnxlib.core.graph.build` an object whose first table needs no walk."""
    stamp = Stamp()
    root, objects = build(layout, leaves, stamp=stamp)
    if is_node(root) and layout.blueprint.reliable:
        objects[0] = None
        object.__setattr__(root, "_nnx_table", PendingTable(layout, objects, stamp))
    return root


def _built(root: Any) -> PendingTable | None:
    """The table of an object that the running transform has built, if all below is as it was built."""
    found = None if at_top_level() else built_here(root)
    if found is None:
        return None
    whole, objects, row = found
    layout, rows = whole.part(row)
    if not layout.blueprint.reliable:
        return None
    pending = PendingTable(layout, [objects[i] for i in rows], Stamp())
    with stamping:
        _attach(pending)
    return pending if len(whole.blueprint.as_built(objects, rows)) == len(rows) else None


def _attach(pending: PendingTable) -> None:
    """Attach its stamp to each object; a function of its own for the same reason as :func:`_find_arrays`."""
    stamp = weakref.ref(pending.stamp)
    for x in pending.objects:
        object.__setattr__(x, "_nnx_stamps", with_stamp(x._nnx_stamps, stamp))


def _complete(root: Any, pending: PendingTable) -> LiveTable:
    """The table of an object that was just built."""
    with stamping:
        if root._nnx_table not in (None, pending):  # another thread was first
            return table_of(root)
        objects = [root, *pending.objects[1:]]
        cells = [objects[i]._cell for i in pending.layout.variables]
        index = dict(zip(map(id, objects), range(len(objects)), strict=True))
        table = _kept(LiveTable(pending.layout, pending.stamp, objects, index, cells), root)
    return table if table.stamp.valid or patched(table, root) else _make(root)


def _make(root: Any) -> LiveTable:
    """A table made by a walk."""
    stamp = Stamp()
    walk = Walk(stamp=stamp)
    with stamping:
        spec = walk.run(root)
        rows = walk.all_rows()
        layout = Layout(rows, spec)
        table = LiveTable(layout, stamp, walk.objects, walk.index, [walk.cells[i] for i in layout.variables])
        _find_arrays(table, walk, rows, root)
        table.compared = [*walk.mutable.values(), *walk.foreign.watch(stamp)]
        if table.compared:
            table.guard = Guard(stamp, table.compared)
    table.snapshot = None if walk.reliable else walk.leaves()
    return _kept(table, root)


def _find_arrays(table: LiveTable, walk: Walk, rows: Sequence[Row], root: Any) -> None:
    """Note where nodes hold arrays, and which pytrees are to be flattened at each call.

    A function, since an interrupt in a loop within the `with` block of the caller could skip the end of the block.
    """
    for i, row in enumerate(rows):
        held = row.fields if type(row) is NodeRow else ()
        fields = [(name, field) for name, field in held if field is LEAF or (i, name) in walk.unwatched]
        if not fields:
            continue
        x = walk.objects[i]
        if any(container_of(x, name) is x for name, _ in fields) and (isinstance(x, Pytree) or x is root):
            walk.reliable = False  # a write to a slot goes unnoticed; and for items the table would refer to its root
        for name, field in fields if walk.reliable else ():
            container = container_of(x, name)
            tree = Flattened(container, name, field, table.index) if isinstance(field, Tree) else None
            if tree is not None:
                walk.foreign.flattened.append(tree)
            if count := count_leaves(field):
                table.arrays.append((i, container, name, tree))
                table.array_rows += [i] * count


def _kept(table: LiveTable, root: Any) -> LiveTable:
    """The table, kept on its root if it can be used again; not while another thread has lent cells of it to a trace."""
    has_lent = at_top_level() and not {Cell}.issuperset(map(type, table.cells))
    object.__setattr__(root, "_nnx_table", table if table.reliable and not has_lent else None)
    return table


def _checked(table: LiveTable, root: Any) -> LiveTable:
    """Walk the object anyway, and compare; returns its table: a new one, if another thread has changed the object.

    Raises:
      StaleLayoutError: if the object was changed in a way that its table has not noticed, other than by an addition.
    """
    edition = table.stamp.edition  # before the walk
    packed = pack(root)
    table.put_off_check()
    same = packed.layout is table.layout and all(map(operator.is_, packed.objects[1:], table.objects[1:]))
    if same:
        return table
    if any(type(x) is not row.type for x, row in zip([root, *table.objects[1:]], table.layout.rows, strict=True)):
        return _make(root)  # %autoreload has given an object the edited class
    found = list(structural_differences(table.layout, packed.layout))
    time.sleep(_UNTIL_TOLD)
    if table.guard.valid != edition:
        return table_of(root)
    object.__setattr__(root, "_nnx_table", None)
    for x in root, *table.objects[1:]:
        x._nnx_changed()  # for whatever else describes it, such as its shape as a pytree
    said = errors.listed(_STALE.format(kind=type(root).__name__), list(map(as_change, found)) or [_EXCHANGED], _REMEDY)
    if {difference.kind for difference in found} != {"added"}:
        raise errors.StaleLayoutError(said)
    UserLine().warn(said)  # a cache, most likely, without which earlier calls were right
    return _make(root)


_UNTIL_TOLD = 0.05  # seconds until another thread that has changed an object has surely invalidated the stamp


_STALE = """\
The structure of this {kind} was changed behind nnxlib's back, so earlier calls may have used what it was before:"""

_EXCHANGED = "an object was exchanged for another one of the same structure"

_REMEDY = """\
Attributes are to be set with `setattr` (or through `vars(module)`), not with `object.__setattr__`. A static value \
that has a hash is to be replaced by another one, not edited; `%autoreload` edits functions in place. The next call \
sees the object as it is now."""
