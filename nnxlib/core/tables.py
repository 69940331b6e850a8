"""Live tables: the table of an object, kept on the object, which makes repeated calls cheap.

Packing a model walks all of it, and a training loop packs the same model at every step. So the root of each packed
graph keeps a :class:`LiveTable`: its interned layout, and where to gather the leaves from. It is used again only if it
is certain that no structure has changed since it was made:

1. The table is valid if both hold: ``table.stamp.valid`` is true, so no object that the table describes has changed its
   structure (stamps.py); and static values that can be changed in place, such as a mutable configuration object, equal
   the copies made of them. (Each is compared once per call, however many Modules refer to it.)
2. If the stamp is invalid because some nodes have changed, only these nodes are described again. If nothing in them has
   changed but static values, or objects that were replaced by others of the very same structure, the table is
   *patched*. Layouts are interned, so toggling a flag and toggling it back leads to the first layout, and so to the
   first compiled function. Such transitions are remembered (:class:`Variant`): when the nodes hold the very same values
   as after an earlier transition, not even they are described.
3. Otherwise the object is walked again.

Dicts, lists and States in a pytree that is an attribute are not nodes; foreign.py finds their changes. A graph with
parts that can change unnoticed (such as arrays in the slots of a class) is walked at every call. As a guard against
writes that bypass every check (``object.__setattr__`` from outside), uses number 1, 2, 4, 8, ... of a table (8, 16, ...
if it was made in a trace) walk anyway, and raise :class:`~nnxlib.core.errors.StaleLayoutError` if the table does not
describe the object. With the environment variable ``NNXLIB_CHECK`` set, every use does.

An object that a transform has built, or a part of it, needs no walk at first: its layout follows from that of the
whole, if all below is as it was built (:func:`_built`). That of a pytree follows from those of the objects in it
(:func:`pack_live`).

A table does not refer to its root, so a dropped model is freed at once. Copies and pickles of a model have no table.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast, final

import jax.tree_util as jtu

from . import errors
from .calls import built_here, note_paths
from .cells import Cell
from .closures import Watch, notice
from .data import is_bound_method, is_node
from .foreign import Flattened
from .graph import Packed, build, pack
from .graphdef import differences_listed
from .held import held_in
from .layout import KEPT, Layout, keep
from .making import NO_METADATA
from .missing import MISSING
from .objects import HasAttributes, Node, Pytree, attributes_of
from .rows import LEAF, ROOT, NodeRow, Ref, Row, Tree, count_leaves
from .stamps import Stamp, gone, stamping, with_stamp
from .static import Const, same_items
from .tracing import at_top_level
from .variables import Variable
from .walk import Walk

CHECK_ALWAYS = bool(os.environ.get("NNXLIB_CHECK"))
_USES_IN_A_TRACE = 8  # before the first check of a table made in a trace: its objects are soon gone

_serials = itertools.count()


# --- the table of an object -----------------------------------------------------------------------------------------


class LiveTable:
    """The table of one live object, the *root*: its layout, and where its leaves are."""

    __slots__ = (
        "array_rows", "arrays", "cells", "index", "layout", "mutable", "next_check", "objects", "reliable",
        "serial", "sharing", "shortcuts", "snapshot", "stamp", "until_check", "variant", "variants",
    )  # fmt: skip

    layout: Layout
    stamp: Stamp
    mutable: list[tuple[Any, Const]]  # the static values that can be changed in place, and what they were
    reliable: bool  # whether `stamp` and `mutable` reveal every change; if not, the table is used only once
    objects: list[Any]  # by row; None in place of the root
    index: dict[int, int]  # id of an object -> its row
    cells: list[Cell]  # of all Variables, in row order
    # (container, key, None) for each array in a field of a node; with a Flattened for a pytree there that has arrays.
    arrays: list[tuple[Any, Any, Flattened | None]]
    array_rows: list[int]  # the row of the node that holds each of these arrays
    snapshot: list[Any] | None  # the leaves, if the table is not reliable
    next_check: int  # the number of the use at which the table is next compared with the object
    until_check: int  # how many uses are left up to that one
    serial: int  # unique, never reused
    sharing: dict[tuple[int, ...], tuple[Sharing, ...]]  # by the serials of several tables, see sharing_of
    shortcuts: dict[Any, Any]  # by the CallSite: the cells that a call reads and writes, see dispatch.py
    variant: Variant | None  # the present one; None until the table is patched
    variants: list[Variant]  # all of them

    def __init__(self, layout: Layout, stamp: Stamp, objects: list[Any], index: dict[int, int], cells: list[Cell]):
        self.layout, self.stamp, self.index, self.cells = layout, stamp, index, cells
        self.objects = [None, *objects[1:]]
        self.reliable, self.mutable, self.arrays, self.array_rows, self.snapshot = True, [], [], [], None
        self.next_check = self.until_check = 1 if at_top_level() or CHECK_ALWAYS else _USES_IN_A_TRACE
        self.serial, self.sharing, self.shortcuts = next(_serials), {}, {}
        self.variant, self.variants = None, []

    def leaves(self) -> list[Any]:
        """The leaves, as ``pack`` would collect them."""
        if self.snapshot is not None:
            return self.snapshot
        values = [cell.value for cell in self.cells]
        return values + self.array_values() if self.arrays else values

    def array_values(self) -> list[Any]:
        """The arrays that nodes hold."""
        found = []
        for container, key, tree in self.arrays:
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


class PendingTable:
    """What is known about an object that was just built: enough to make its table without a walk."""

    __slots__ = ("layout", "objects", "stamp")

    until_check = 1  # so no shortcut uses it

    def __init__(self, layout: Layout, objects: list[Any], stamp: Stamp):
        self.layout, self.objects, self.stamp = layout, objects, stamp


def build_described(layout: Layout, leaves: Sequence[Any]) -> Any:
    """:func:`~nnxlib.core.graph.build` an object whose first table needs no walk."""
    stamp = Stamp()
    root, objects = build(layout, leaves, stamp=stamp)
    if is_node(root) and layout.blueprint.reliable:
        objects[0] = None
        object.__setattr__(root, "_nnx_table", PendingTable(layout, objects, stamp))
    return root


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
    if table is None or (table.mutable and have_changed(table.mutable)):
        return _make(root)
    if not (table.stamp.valid or patched(table, root)):
        return _make(root)
    table.until_check -= 1
    return table if table.until_check > 0 else _checked(table, root)


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
    return pending if whole.blueprint.are_as_built(objects, rows) else None


def _attach(pending: PendingTable) -> None:
    """Attach its stamp to each object; a function of its own for the same reason as :func:`_find_arrays`."""
    stamp = weakref.ref(pending.stamp)
    for x in pending.objects:
        object.__setattr__(x, "_nnx_stamps", with_stamp(x._nnx_stamps, stamp))


def have_changed(mutable: Iterable[tuple[Any, Const]]) -> bool:
    """Whether any of these static values, which can be changed in place, is not what it was."""
    try:
        return not all(const == Const.of(value) for value, const in mutable)
    except errors.StaticValueError:  # the walk will say where
        return True


def _complete(root: Any, pending: PendingTable) -> LiveTable:
    with stamping:
        if root._nnx_table not in (None, pending):  # another thread was first
            return table_of(root)
        objects = [root, *pending.objects[1:]]
        cells = [objects[i]._cell for i in pending.layout.variables]
        index = dict(zip(map(id, objects), range(len(objects)), strict=True))
        table = _kept(LiveTable(pending.layout, pending.stamp, objects, index, cells), root)
    return table if table.stamp.valid or patched(table, root) else _make(root)


def _make(root: Any) -> LiveTable:
    stamp = Stamp()
    walk = Walk(stamp=stamp)
    with stamping:
        spec = walk.run(root)
        rows = walk.all_rows()
        layout = Layout(rows, spec)
        table = LiveTable(layout, stamp, walk.objects, walk.index, [walk.cells[i] for i in layout.variables])
        table.reliable, table.mutable = walk.reliable, list(walk.mutable.values())
        _find_arrays(table, walk, rows, root)
        walk.foreign.watch(stamp)
    table.snapshot = None if table.reliable else walk.leaves()
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
        if any(_holder(x, name) is x for name, _ in fields) and (isinstance(x, Pytree) or x is root):
            table.reliable = False  # a write to a slot goes unnoticed; and for items the table would refer to its root
        for name, field in fields if table.reliable else ():
            container = _holder(x, name)
            tree = Flattened(container, name, field, table.index) if isinstance(field, Tree) else None
            if tree is not None:
                walk.foreign.flattened.append(tree)
            if count := count_leaves(field):
                table.arrays.append((container, name, tree))
                table.array_rows += [i] * count


def _holder(node: Any, name: Any) -> Any:
    """What holds a field of a node: the dict of its attributes, or the node itself."""
    return attributes_of(node) if isinstance(node, HasAttributes) and name in attributes_of(node) else node


def _kept(table: LiveTable, root: Any) -> LiveTable:
    """The table, kept on its root if it can be used again; not while another thread has lent cells of it to a trace."""
    has_lent = at_top_level() and not {Cell}.issuperset(map(type, table.cells))
    object.__setattr__(root, "_nnx_table", table if table.reliable and not has_lent else None)
    return table


def _checked(table: LiveTable, root: Any) -> LiveTable:
    """Walk the object anyway, and compare; returns its table: a new one, if another thread has changed the object.

    Raises:
      StaleLayoutError: if the object was changed in a way that its table has not noticed.
    """
    stamp = table.stamp
    edition = stamp.edition  # before the walk
    packed = pack(root)
    table.until_check = 1 if CHECK_ALWAYS else table.next_check
    table.next_check += table.until_check
    same = packed.layout is table.layout and all(map(operator.is_, packed.objects[1:], table.objects[1:]))
    if same:
        return table
    changes = differences_listed(table.layout, packed.layout)
    time.sleep(_UNTIL_TOLD)
    if stamp.valid != edition or have_changed(table.mutable):
        return table_of(root)
    object.__setattr__(root, "_nnx_table", None)
    raise errors.StaleLayoutError(
        errors.listed(_STALE.format(kind=type(root).__name__), changes or [_EXCHANGED], _REMEDY)
    )


_UNTIL_TOLD = 0.05  # seconds until another thread that has changed an object has surely invalidated the stamp


_STALE = """\
The structure of this {kind} was changed behind nnxlib's back, so earlier calls may have used what it was before:"""

_EXCHANGED = "an object was exchanged for another one of the same structure"

_REMEDY = """\
Attributes are to be set with `setattr` (or through `vars(module)`), not with `object.__setattr__`. A static value \
that has a hash is to be replaced by another one, not edited. The next call sees the object as it is now."""


# --- patching a table -----------------------------------------------------------------------------------------------


class Variant:
    """A layout that a table has had, its shortcuts, and the transitions from it to other variants.

    It refers weakly to the layout, which lives as long as the functions compiled for it; and to other variants, so that
    toggling a flag back and forth makes no reference cycle, which would keep a dropped model alive.
    """

    __slots__ = ("__weakref__", "layout", "shortcuts", "transitions")

    def __init__(self, layout: Layout, shortcuts: dict[Any, Any]):
        self.layout, self.shortcuts = weakref.ref(layout), shortcuts
        self.transitions: list[tuple[Contents, weakref.ref[Variant]]] = []  # by what the changed nodes hold then

    def after(self, contents: Contents) -> tuple[Variant, Layout] | None:
        """The variant, and its layout, to which an earlier transition with the very same contents led."""
        for known, reference in self.transitions:
            if _are_same(known, contents):
                variant = reference()
                layout = variant and variant.layout()
                return (variant, layout) if variant and layout else None
        return None


Contents = dict[int, tuple[dict, tuple, list]]  # row of a node -> its marks, (its class, *names of fields), values


def _contents(table: LiveTable, nodes: Iterable[Node]) -> Contents:
    """What some nodes of a table hold now."""
    held = {table.index[id(x)]: (x, x._nnx_contents()) for x in nodes}
    return {i: (x._nnx_marks or NO_METADATA, (type(x), *items), [*items.values()]) for i, (x, items) in held.items()}


def _are_same(a: Contents, b: Contents) -> bool:
    return a.keys() == b.keys() and all(_is_same(a[i], b[i]) for i in a)


def _is_same(a: tuple[dict, tuple, list], b: tuple[dict, tuple, list]) -> bool:
    return a[1] == b[1] and all(map(operator.is_, a[2], b[2])) and same_items(a[0], b[0])


def patched(table: LiveTable, root: Any) -> bool:
    """Bring a table with an invalid stamp up to date; False if it has to be made anew."""
    with stamping:
        return bool(table.stamp.valid) or _patch(table, root)  # if it is valid, another thread was first


def _patch(table: LiveTable, root: Any) -> bool:
    """:func:`patched` with the lock held; a function of its own for the same reason as :func:`_find_arrays`."""
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
    if found := before.after(contents):
        return found
    exchanged = _adopt_objects(table, changed)
    objects = table.objects_with(root)
    others = [x for x in changed if not _is_described(table, objects, x)]
    rows = _rows_with_other_statics(table, root, others) if others else ()
    if rows is None:
        return None
    layout = table.layout.with_rows(rows) if rows else table.layout
    variant = _variant_of(table, layout, {})
    keeps_arrays = exchanged or any(type(spec) not in (Ref, Const) for _, row in rows for _, spec in row.fields)
    if not keeps_arrays and _are_same(contents, _contents(table, changed)):  # another thread may be changing a node
        before.transitions = [*before.transitions[-_TRANSITIONS:], (contents, weakref.ref(variant))]
    return variant, layout


_TRANSITIONS = 7  # how many each variant remembers, besides the newest


def _variant_of(table: LiveTable, layout: Layout, shortcuts: dict[Any, Any]) -> Variant:
    """The variant with this layout; a new one, with these shortcuts, if the table has not had it."""
    table.variants = [variant for variant in table.variants[-KEPT:] if variant.layout() is not None]
    found = next((variant for variant in table.variants if variant.layout() is layout), None)
    if found is None:
        found = Variant(layout, shortcuts)
        table.variants.append(found)
    return found


def _adopt_objects(table: LiveTable, changed: Iterable[Node]) -> bool:
    """Take into a table the objects that nodes now hold in place of others with the same rows.

    Returns whether there are any. An object that is, or was, in several places is not taken: the structure differs.
    """
    adopted = False
    for x in changed:
        if id(x) not in table.index:  # it was in an object that has been replaced
            continue
        row, held = cast(NodeRow, table.layout.rows[table.index[id(x)]]), x._nnx_contents()
        for i, new in [(spec.index, held.get(name)) for name, spec in row.fields if type(spec) is Ref]:
            if new is not table.objects[i] and is_node(new) and id(new) not in table.index:
                adopted = _adopt(table, i, new) or adopted
    if adopted:  # what is kept about the former ones may be wrong, and would keep their arrays alive
        table.serial, table.sharing = next(_serials), {}
        for variant in table.variants:
            variant.transitions = []
            variant.shortcuts.clear()
    return adopted


def _adopt(table: LiveTable, i: int, new: Any) -> bool:
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
        for k, j in enumerate(table.array_rows):
            if j in places:
                _, name, tree = table.arrays[k]
                table.arrays[k] = _holder(objects[j], name), name, tree
    return True


def _is_described(table: LiveTable, objects: Sequence[Any], x: Node) -> bool:
    """Whether a node holds the very objects and static values that are in its row, or has no row any more."""
    i = table.index.get(id(x))
    if i is None:
        return True
    row = cast(NodeRow, table.layout.rows[i])
    specs = map(dict(row.fields).__getitem__, row.names)
    values = [objects[s.index] if type(s) is Ref else s.value if type(s) is Const else MISSING for s in specs]
    return _is_same(_contents(table, [x])[i], (row.marks.value, (row.type, *row.names), values))


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
    return rows if all(_links(cast(NodeRow, before[i])) == _links(row) for i, row in rows) else None


def _links(row: NodeRow) -> list[tuple[Any, Any]]:
    return [field for field in row.fields if type(field[1]) is not Const]


# --- pytrees of objects, such as the arguments of a call -----------------------------------------------------------


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
    for root in roots if Watch.all else ():
        notice(root)
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


class Sharing(NamedTuple):
    """What one of several objects shares with those before it, and what is its own. Static."""

    shared: tuple[tuple[int, tuple[int, int]], ...]  # (row, (the number of an earlier object, the row there))
    cells: Sequence[int]  # the numbers of its own cells
    arrays: Sequence[int]  # the numbers of its own arrays


@final
class VariableGroup:
    """In place of a table for each: Variables that are arguments by themselves, such as those of a State.

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
        """There are none."""
        return []


Tables = Sequence[LiveTable | VariableGroup]  # of objects in arguments, in order; a group is without root (None)


def sharing_of(roots: Sequence[Any], tables: Tables) -> tuple[Sharing, ...]:
    """What several objects share, given their tables; empty if nothing. Computed once for tables that are kept."""
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
