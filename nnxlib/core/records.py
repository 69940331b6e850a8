"""The layout of a live object, kept on the object: what makes a call cheap.

Packing a model walks all of it; a training loop packs the same model at every step. So the root of each packed graph
keeps a :class:`Record`: its interned layout, and the Variables and arrays to gather the leaves from. A record is
reused only when nothing structural can have changed since it was made:

1. ``record.stamp.valid``: nothing structural that the record describes has changed (stamps.py), a single test.
2. Static values that can be changed in place (a mutable configuration object) equal the copies made of them. Each is
   compared once, however many Modules refer to it.
3. If only static values of some nodes have changed, only these nodes are looked at again, and the record is mended.
   Layouts are interned, so a flag that was toggled and toggled back leads to the same layout, and so to the same
   compiled functions. What led from one layout to another is remembered (:class:`Variant`): nodes that hold the very
   same things once more need not be described again.
4. Otherwise the object is walked again.

A graph with parts that can change unseen (an array inside a tuple or a foreign pytree) is walked at every call. As a
guard against writes that go around every check (``object.__setattr__`` from outside), uses number 2, 4, 8, ... of a
record, and all of them when the environment variable ``NNXLIB_CHECK`` is set, walk anyway and raise
:class:`~nnxlib.core.errors.StaleLayoutError` if the record does not describe the object any more.

A record does not refer to its root, so a dropped model is freed at once; copies and pickles of a model have none.
"""

from __future__ import annotations

import itertools
import operator
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax.tree_util as jtu

from . import errors
from .calls import Rows, entering
from .closures import Watch, notice
from .graph import KEPT, LEAF, Layout, NodeRow, Packed, Ref, Row, Walk, build, pack, trace_of
from .graphdef import differences_listed
from .objects import HasAttributes, Node, Pytree, attributes_of, is_bound_method, is_node
from .stamps import Stamp, stamping, with_stamp
from .static import Const, same_items
from .tracing import at_top_level
from .variables import NO_METADATA, Cell, Variable

CHECK_ALWAYS = bool(os.environ.get("NNXLIB_CHECK"))

_serials = itertools.count()


class Record:
    """A layout, and where the leaves of one live object with this layout are."""

    __slots__ = (
        "array_rows", "arrays", "cells", "exact", "index", "layout", "mutable", "nodes", "objects", "pairs", "picked",
        "serial", "shortcuts", "snapshot", "stamp", "unchecked", "used", "variables", "variant", "variants",
    )  # fmt: skip

    layout: Layout
    stamp: Stamp
    mutable: list[tuple[Any, Const]]  # the static values that can be changed in place, and what they were
    exact: bool  # whether stamp and mutable values tell of every change
    objects: list[Any]  # by row; None in place of the root
    index: dict[int, int]  # id of an object -> its row
    nodes: list[Node]  # those of the objects that are nodes
    variables: list[Variable]  # but for the root
    cells: list[Cell]  # of the variables, as long as none is on loan to a trace
    arrays: list[tuple[Any, Any]]  # (container, key) of each array held by a node
    array_rows: list[int]  # the row of that node
    snapshot: list[Any] | None  # the leaves, of a record that is not exact and so used once
    used: int  # how often, when it is next compared with what it describes
    unchecked: int  # how many more uses there are till then
    serial: int  # never reused
    pairs: dict[tuple[int, ...], Any]  # what was found out about this record together with others, by their serials
    picked: dict[Numbers | None, list[Cell]]  # some of the cells, by their numbers; under None all
    shortcuts: dict[Any, Any]  # by the form of a call: the cells that it reads and writes, see transforms/sites.py
    variant: Variant | None  # of the layout, once the record has been mended
    variants: list[Variant]

    def __init__(self, layout: Layout, stamp: Stamp, objects: list[Any], index: dict[int, int], cells: list[Cell]):
        self.layout, self.stamp, self.index, self.cells = layout, stamp, index, cells
        self.objects = [None, *objects[1:]]
        self.nodes = [x for x in self.objects[1:] if isinstance(x, Node)]
        self.variables = [objects[i] for i in layout.variables if i]
        self.exact, self.mutable, self.arrays, self.array_rows, self.snapshot = True, [], [], [], None
        self.used = self.unchecked = 1
        self.serial, self.pairs, self.picked, self.shortcuts = next(_serials), {}, {None: cells}, {}
        self.variant, self.variants = None, []

    def is_quiet(self) -> bool:
        """Count a use; False if it is time to check, or something may have changed."""
        if self.unchecked == 1 or not self.stamp.valid:
            return False
        self.unchecked -= 1
        return True

    def leaves(self, root: Any) -> list[Any]:
        """The leaves of the object, as ``pack`` would collect them."""
        if self.snapshot is not None:
            return self.snapshot
        values = [x._cell.value for x in ([root] if isinstance(root, Variable) else self.variables)]
        return values + [container[key] for container, key in self.arrays] if self.arrays else values

    def pick(self, numbers: Numbers | None) -> list[Cell]:
        """The cells with these numbers, in this order; all without numbers. What was picked is in ``picked``."""
        if numbers is None:
            return self.cells
        if len(self.picked) >= KEPT:  # of functions that are gone
            self.picked = {None: self.cells}
        found = self.picked[numbers] = [self.cells[k] for k in numbers.numbers]
        return found

    def rows(self, root: Any) -> list[Any]:
        """The objects by row."""
        return [root, *self.objects[1:]]


class Variant:
    """A layout that a record has had, its shortcuts, and what changes of static values led to which others.

    The layout is held weakly: it goes with the functions that were compiled for it. So are the other variants, which
    the record has: a flag that is toggled there and back makes no cycle, in which a dropped model would stay.
    """

    __slots__ = ("__weakref__", "layout", "shortcuts", "turns")

    def __init__(self, layout: Layout, shortcuts: dict[Any, Any]):
        self.layout, self.shortcuts = weakref.ref(layout), shortcuts
        # What the nodes that changed held afterwards.
        self.turns: list[tuple[Contents, weakref.ref[Variant]]] = []

    def after(self, contents: Contents) -> tuple[Variant, Layout] | None:
        """What the change led to that left nodes with the same contents as now, and its layout."""
        for known, reference in self.turns:
            if known.keys() == contents.keys() and all(_are_same(known[i], contents[i]) for i in known):
                variant = reference()
                layout = variant and variant.layout()
                return (variant, layout) if variant and layout else None
        return None


# By row: the marks of a node; its class, the names of its attributes, the values.
Contents = dict[int, tuple[dict, tuple]]


def _are_same(a: tuple[dict, tuple], b: tuple[dict, tuple]) -> bool:
    return len(a[1]) == len(b[1]) and all(map(operator.is_, a[1], b[1])) and same_items(a[0], b[0])


class Numbers:
    """Some of the cells of a record; compared by identity, which is quick."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Sequence[int]):
        self.numbers = numbers


class Fresh:
    """In place of the record of an object that was just built: what it takes to make one without a walk."""

    __slots__ = ("layout", "objects", "stamp")

    mutable = ()
    unchecked = 1  # never to be relied upon as it is

    def __init__(self, layout: Layout, objects: list[Any], stamp: Stamp):
        self.layout, self.objects, self.stamp = layout, objects, stamp

    def is_quiet(self) -> bool:
        return False


def build_described(layout: Layout, leaves: Sequence[Any]) -> Any:
    """:func:`~nnxlib.core.graph.build` an object that need not be walked to be described."""
    stamp = Stamp()
    root, objects = build(layout, leaves, stamp=stamp)
    if is_node(root) and layout.blueprint.exact:
        objects[0] = None
        object.__setattr__(root, "_nnx_record", Fresh(layout, objects, stamp))
    return root


def record_of(root: Any) -> Record:
    """Return a record that describes a live node or Variable as it is now."""
    record = root._nnx_record
    if type(record) is Fresh:
        return _describe(root, record)
    if record is None or (record.mutable and _has_changed(record)):
        return _make(root)
    if not record.stamp.valid and not _mend(record, root):
        return _make(root)
    record.unchecked -= 1
    if not record.unchecked:
        _check(record, root)
    return record


def _describe(root: Any, fresh: Fresh) -> Record:
    with stamping:
        if root._nnx_record is not fresh:  # another thread was quicker
            return record_of(root)
        if not fresh.stamp.valid:
            return _make(root)
        objects = [root, *fresh.objects[1:]]
        cells = [objects[i]._cell for i in fresh.layout.variables]
        index = dict(zip(map(id, objects), range(len(objects)), strict=True))
        return _kept(Record(fresh.layout, fresh.stamp, objects, index, cells), root)


def pack_call(arguments: tuple) -> Packed:
    """Pack what a function is called with; without a walk where that is one object, plain values and containers."""
    leaves = jtu.tree_leaves(arguments, is_leaf=is_node)
    roots = [x for x in leaves if is_node(x)]
    if len(roots) != 1 or any(map(is_bound_method, leaves)):
        return pack(arguments)
    (root,) = roots
    if root._nnx_record is None and not at_top_level():  # most objects in a trace are packed once
        return pack(arguments)
    record = record_of(root)
    if record.snapshot is not None:
        return pack(arguments)
    walk = Walk(index=record.index)
    walk.objects = Rows(record.rows(root))
    layout = record.layout.within(walk.run(arguments, True))
    if Watch.count:
        notice(root, trace_of(root))
    entering(layout, walk.objects)
    return Packed(layout, [*record.leaves(root), *walk.arrays[-1]], walk.objects)


def layout_of(root: Any) -> Layout:
    """Return the layout of a live node or Variable."""
    return record_of(root).layout


def _has_changed(record: Record) -> bool:
    try:
        return not all(const == Const.of(value) for value, const in record.mutable)
    except errors.StaticValueError:  # the walk will say where
        return True


def turned(record: Record | Fresh) -> bool:
    """Bring a record up to date after a change of static values, if it has met that change before."""
    return isinstance(record, Record) and record.variant is not None and _mend(record, None)


def _mend(record: Record, root: Any) -> bool:
    """Bring a record up to date after a change of static values; False if something else has changed.

    Without a root only if the record has met the change before.
    """
    stamp = record.stamp
    with stamping:
        if stamp.valid:  # another thread was quicker
            return True
        changed, stamp.changed = stamp.changed, []
        objects = {id(x): x for x in [reference() for reference in changed]}
        nodes = [x for x in objects.values() if isinstance(x, Node)]
        found = None
        try:
            if len(nodes) == len(objects):  # what is gone was taken out of the graph, and no Variable is static
                found = _variant_now(record, root, nodes)
        finally:
            if found is None:  # also where a static value cannot be compared
                stamp.changed += changed
        if found is None:
            return False
        record.variant, record.layout = found
        record.shortcuts = record.variant.shortcuts
        stamp.mended += 1
        stamp.valid = True
        if stamp.changed:  # meanwhile, by another thread; a later change ends the stamp again
            stamp.valid = False
        return stamp.valid


def _variant_now(record: Record, root: Any, changed: Iterable[Node]) -> tuple[Variant, Layout] | None:
    """What a record describes once some nodes have changed; None if more than static values is different in them."""
    if record.variant is None:
        record.variant = _variant_of(record, record.layout, record.shortcuts)
    before, contents = record.variant, {}
    stamp = weakref.ref(record.stamp)
    for x in changed:
        object.__setattr__(x, "_nnx_stamps", with_stamp(x._nnx_stamps, stamp))
        held = x._nnx_contents()
        contents[record.index[id(x)]] = x._nnx_marks or NO_METADATA, (type(x), *held, *held.values())
    found = before.after(contents)
    if found is not None or root is None:
        return found
    rows = _rows_with_other_statics(record, root, changed)
    if rows is None:
        return None
    layout = record.layout.with_rows(rows)
    variant = _variant_of(record, layout, {})
    specs = [spec for _, row in rows if isinstance(row, NodeRow) for _, spec in row.fields]
    if not record.stamp.changed and all(type(spec) in (Ref, Const) for spec in specs):  # arrays are not to be kept
        before.turns = [*before.turns[-_TURNS:], (contents, weakref.ref(variant))]
    return variant, layout


_TURNS = 7  # what is remembered of each variant, but for the last


def _variant_of(record: Record, layout: Layout, shortcuts: dict[Any, Any]) -> Variant:
    """The variant with this layout; a new one, with these shortcuts, where the record has not had it."""
    record.variants = [variant for variant in record.variants[-KEPT:] if variant.layout() is not None]
    found = next((variant for variant in record.variants if variant.layout() is layout), None)
    if found is None:
        found = Variant(layout, shortcuts)
        record.variants.append(found)
    return found


def _rows_with_other_statics(record: Record, root: Any, nodes: Iterable[Any]) -> tuple[tuple[int, Row], ...] | None:
    """The rows of some nodes as they are now; None if more than static values is different in them."""
    known = record.layout.rows
    walk = Walk((), record.stamp, record.index)
    walk.objects = record.rows(root)
    try:
        for x in nodes:
            walk.revisit(record.index[id(x)], ())
    finally:
        for x in walk.objects[len(known) :]:
            del record.index[id(x)]
    rows = tuple(sorted(walk.rows.items()))
    same = len(walk.objects) == len(known) and all(_same_but_statics(known[i], row) for i, row in rows)
    return rows if same and not walk.mutable and walk.exact else None


def _same_but_statics(old: Row, new: Row) -> bool:
    if not isinstance(old, NodeRow) or not isinstance(new, NodeRow) or old.type is not new.type:
        return False
    return _links(old) == _links(new)


def _links(row: NodeRow) -> list[tuple[Any, Any]]:
    return [field for field in row.fields if type(field[1]) is not Const]


def _make(root: Any) -> Record:
    stamp = Stamp()
    walk = Walk(stamp=stamp)
    with stamping:
        spec = walk.run(root, None)
    rows = tuple([walk.rows[i] for i in range(len(walk.objects))])
    layout = Layout(rows, spec)
    record = Record(layout, stamp, walk.objects, walk.index, [walk.cells[i] for i in layout.variables])
    record.exact, record.mutable = walk.exact, list(walk.mutable.values())
    for i, (x, row) in enumerate(zip(walk.objects, rows, strict=True)):
        if type(row) is NodeRow and any(field is LEAF for _, field in row.fields):
            names = [name for name, field in row.fields if field is LEAF]
            attributes = attributes_of(x) if isinstance(x, HasAttributes) else {}
            record.arrays += [(attributes if name in attributes else x, name) for name in names]
            record.array_rows += [i] * len(names)
            elsewhere = not attributes.keys() >= set(names)  # among items, or in slots
            record.exact = record.exact and not (elsewhere and (isinstance(x, Pytree) or x is root))
    record.snapshot = None if record.exact else walk.leaves(range(len(rows)))
    return _kept(record, root)


def _kept(record: Record, root: Any) -> Record:
    """The record, with its object for the next time if it can be used again."""
    lent = at_top_level() and not {Cell}.issuperset(map(type, record.cells))  # to a trace of another thread
    object.__setattr__(root, "_nnx_record", record if record.exact and not lent else None)
    return record


def _check(record: Record, root: Any) -> None:
    """Walk anyway, and compare.

    Raises:
      StaleLayoutError: if the object was changed in a way that its record has not noticed.
    """
    packed = pack(root)
    record.unchecked = 1 if CHECK_ALWAYS else record.used
    record.used += record.unchecked
    same = packed.layout is record.layout and all(map(operator.is_, packed.objects[1:], record.objects[1:]))
    if not same:
        object.__setattr__(root, "_nnx_record", None)
        changes = differences_listed(record.layout, packed.layout)
        raise errors.StaleLayoutError(
            errors.listed(_STALE.format(kind=type(root).__name__), changes or [_EXCHANGED], _REMEDY)
        )


_STALE = """\
The structure of this {kind} was changed behind nnxlib's back, so earlier calls may have used what it was before:"""

_EXCHANGED = "an object was exchanged for another one of the same structure"

_REMEDY = """\
Attributes are to be set with `setattr` (or through `vars(module)`), not with `object.__setattr__`. The next call sees \
the object as it is now."""
