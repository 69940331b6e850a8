"""Patching: a live table is brought up to date after a small change, without walking all that it describes.

The stamp of the table knows which objects have changed. If all of these are nodes, only they are described again. If
nothing in them has changed but static values, or objects that were replaced by others of the very same structure, the
table gets the layout with their new rows, and new cells for the objects that have come. If not, it is made anew.

Layouts are interned, so toggling a flag and toggling it back leads to the first layout, and so to the first compiled
function. Such transitions are remembered (:class:`~nnxlib.core.live_table.Variant`): when the nodes hold the very same
values as after an earlier transition, not even they are described.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from .cells import Cell
from .data import is_node
from .editable import have_changed
from .layout import KEPT, Layout
from .live_table import LiveTable, Variant, container_of
from .metadata import NO_METADATA
from .missing import MISSING
from .objects import Node
from .rows import NodeRow, Ref
from .stamps import gone, stamping, with_stamp
from .static import Const, holds_same, same_items
from .walk import Walk

_TRANSITIONS = 7  # how many each variant remembers, besides the newest


Contents = dict[int, tuple[type, dict, dict]]  # row of a node -> its class, its marks, and what it holds


def patched(table: LiveTable, root: Any) -> bool:
    """Bring a table with an invalid stamp up to date; False if it has to be made anew."""
    with stamping:
        if have_changed(table.compared):
            return False
        return bool(table.stamp.valid) or _patch(table, root)  # if it is valid, another thread was first


def _patch(table: LiveTable, root: Any) -> bool:
    """:func:`patched` with the lock held.

    A function, since an interrupt in a loop within the `with` block of the caller could skip the end of the block.
    """
    stamp = table.stamp
    stamp.changed.insert(0, gone)  # removed if all goes well; if not, the table is made anew
    changed = stamp.changed[1:]  # the list stays: another thread may be about to append to it
    objects = {id(x): x for x in [reference() for reference in changed]}
    nodes = [x for x in objects.values() if isinstance(x, Node)]
    if len(nodes) < len(objects):  # a Variable has changed, or an object is gone
        return False
    found = _variant_now(table, root, [x for x in nodes if id(x) in table.index])  # others have left the graph
    if found is None:
        return False
    table.variant, table.layout = found
    table.shortcuts = table.variant.shortcuts
    del stamp.changed[: 1 + len(changed)]
    stamp.renew()
    if stamp.changed:  # by another thread in the meantime; a later change invalidates the stamp by itself
        stamp.valid = False
    return bool(stamp.valid)


def _variant_now(table: LiveTable, root: Any, changed: Sequence[Node]) -> tuple[Variant, Layout] | None:
    """The variant and layout of a table once some nodes have changed; None if it cannot be patched."""
    stamp = weakref.ref(table.stamp)
    for x in changed:
        object.__setattr__(x, "_nnx_stamps", with_stamp(x._nnx_stamps, stamp))
    before = table.variant or _variant_of(table, table.layout, table.shortcuts)
    contents = _contents(table, changed)
    if found := _after(before, contents):
        return found
    exchanged = _exchange_objects(table, changed)
    objects = table.objects_with(root)
    others = [x for x in changed if id(x) in table.index and not _is_described(table.layout, objects, table.index, x)]
    rows = _rows_with_other_statics(table, root, others) if others else ()
    if rows is None:
        return None
    layout = table.layout.with_rows(rows) if rows else table.layout
    variant = _variant_of(table, layout, {})
    keeps_arrays = exchanged or any(type(spec) not in (Ref, Const) for _, row in rows for _, spec in row.fields)
    if not keeps_arrays and _are_same(contents, _contents(table, changed)):  # another thread may be changing a node
        before.transitions = [*before.transitions[-_TRANSITIONS:], (contents, weakref.ref(variant))]
    return variant, layout


def _variant_of(table: LiveTable, layout: Layout, shortcuts: dict[Any, Any]) -> Variant:
    """The variant with this layout; a new one, with these shortcuts, if the table has not had it."""
    table.variants = [variant for variant in table.variants[-KEPT:] if variant.layout() is not None]
    found = next((variant for variant in table.variants if variant.layout() is layout), None)
    if found is None:
        found = Variant(layout, shortcuts)
        table.variants.append(found)
    return found


def _contents(table: LiveTable, nodes: Iterable[Node]) -> Contents:
    """The present contents of some nodes of a table."""
    return {table.index[id(x)]: (type(x), x._nnx_marks or NO_METADATA, x._nnx_contents()) for x in nodes}


def _are_same(a: Contents, b: Contents) -> bool:
    """Whether some nodes hold the very same values as some others."""
    return a.keys() == b.keys() and all(
        kind is b[i][0] and same_items(marks, b[i][1]) and holds_same(held, b[i][2])
        for i, (kind, marks, held) in a.items()
    )


def _after(variant: Variant, contents: Contents) -> tuple[Variant, Layout] | None:
    """The variant, and its layout, to which an earlier transition with the very same contents led."""
    for known, reference in variant.transitions:
        if _are_same(known, contents):
            found = reference()
            layout = found and found.layout()
            return (found, layout) if found and layout else None
    return None


def _exchange_objects(table: LiveTable, changed: Iterable[Node]) -> bool:
    """Take into a table the objects that nodes now hold in place of others with the same rows.

    Returns whether there are any. An object that is, or was, in several places is not taken: the structure differs.
    """
    exchanged = False
    for x in changed:
        if id(x) not in table.index:  # it was in an object that has been replaced
            continue
        row, held = cast(NodeRow, table.layout.rows[table.index[id(x)]]), x._nnx_contents()
        for i, new in [(spec.index, held.get(name)) for name, spec in row.fields if type(spec) is Ref]:
            if new is not table.objects[i] and is_node(new) and id(new) not in table.index:
                exchanged = _exchange(table, i, new) or exchanged
    if exchanged:
        table.forget_exchanged()
    return exchanged


def _exchange(table: LiveTable, i: int, new: Any) -> bool:
    """Take an object, and those below it, into a table in place of that of row ``i``; False unless their rows agree.

    The objects below one to which nothing else refers have the rows after it, in the order of a walk.
    """
    layout, objects = table.layout, table.objects
    walk, fits = Walk(objects[:i], table.stamp, table.index), False
    try:
        walk.run(new, layout.paths[i])
        found = walk.objects[i:]
        places = range(i, i + len(found))
        fits = (
            tuple([walk.rows[j] for j in places]) == layout.rows[i : places.stop]
            and layout.shared.isdisjoint(places)
            and walk.reliable
            and not (walk.mutable or walk.foreign or walk.unwatched)
            and {Cell}.issuperset(map(type, walk.cells.values()))
        )
    finally:
        for x in walk.objects[i:] if not fits else ():
            del table.index[id(x)]
    if not fits:
        return False
    for j, x in zip(places, found, strict=True):
        del table.index[id(objects[j])]
        objects[j] = x
        if j in walk.cells:
            table.cells[bisect.bisect_left(layout.variables, j)] = walk.cells[j]
    if any(walk.arrays.values()):
        for k, (j, _, name, tree) in enumerate(table.arrays):
            if j in places:
                table.arrays[k] = j, container_of(objects[j], name), name, tree
    return True


def _is_described(layout: Layout, objects: Sequence[Any], index: Mapping[int, int], x: Node) -> bool:
    """Whether a node holds the very objects and static values of its row, as after an exchange of objects.

    This is asked of a List of a thousand layers in a fraction of the time in which it is described.
    """
    row = cast(NodeRow, layout.rows[index[id(x)]])
    specs = map(dict(row.fields).__getitem__, row.names)
    values = [objects[s.index] if type(s) is Ref else s.value if type(s) is Const else MISSING for s in specs]
    of_row = dict(zip(row.names, values, strict=True))
    marks = x._nnx_marks or NO_METADATA
    return type(x) is row.type and same_items(marks, row.marks.value) and holds_same(x._nnx_contents(), of_row)


def _rows_with_other_statics(
    table: LiveTable, root: Any, changed: Iterable[Node]
) -> tuple[tuple[int, NodeRow], ...] | None:
    """The rows of some nodes as they are now; None if anything but static values has changed in them."""
    before = table.layout.rows
    walk = Walk(table.objects_with(root), table.stamp, table.index)
    try:
        for x in changed:
            walk.revisit(table.index[id(x)], ())
    finally:
        for x in walk.objects[len(before) :]:  # new ones, which the walk has numbered
            del table.index[id(x)]
    if len(walk.objects) > len(before) or walk.mutable or walk.foreign or not walk.reliable:
        return None
    rows = cast(tuple[tuple[int, NodeRow], ...], tuple(sorted(walk.rows.items())))
    return rows if all(_data_fields(cast(NodeRow, before[i])) == _data_fields(row) for i, row in rows) else None


def _data_fields(row: NodeRow) -> list[tuple[Any, Any]]:
    return [field for field in row.fields if type(field[1]) is not Const]
