"""Sites: the short way of a jitted call, when nothing structural has changed since an earlier one.

Each object among the arguments keeps a :class:`~nnxlib.core.records.Record`. The interned layouts of the records and
the form of the arguments make the key of a :class:`Site`, which knows the plan, and which cells of the records the
compiled function reads and writes. So a call is: find the site; gather one flat list of arrays for each lane; go
through JAX's own C++ dispatch; write the cells that changed. Nothing here grows with the model but the two loops over
the cells that the function touches.

A site refers to no object: what it picks of a record is kept on the record, which goes when the model does.

The most frequent call, of one object and plain arrays, has a :class:`Shortcut` on the record, in which all this has
been looked up. It is found by the :class:`Form` in which the arguments are given.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from ..core.graph import LEAF, Layout, Spec, StaticArgument, Tree, commit, value_of
from ..core.inputs import AbsentInput
from ..core.objects import Node, is_node
from ..core.records import KEPT, Numbers, Record, record_of
from ..core.variables import Cell, Variable, write_cells
from .lift import Outcome
from .plan import Compiled, Groups, Plan
from .prefixes import join_lanes

_LEAF_TYPES: set[type] = {int, float, complex, bool, np.ndarray}  # more are added as they are met
OBJECTS = (Node, Variable)


# What was found of a call: the key of its site, the leaves, the records of the objects among them, the other leaves.
Found = tuple[tuple, Sequence[Any], list[Record], list[Any]]


def with_names(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, tuple]:
    """All arguments in the order in which they are packed, and how they are given."""
    if len(kwargs) > 1:
        kwargs = dict(sorted(kwargs.items()))
    return (*args, *kwargs.values()), (len(args), *kwargs)


def unfold(values: Iterable[Any], leaves: list[Any], keys: list[Hashable]) -> None:
    """Add the leaves and objects in the values to ``leaves``, and what each value is to ``keys``: None for a leaf."""
    for x in values:
        kind = type(x)
        if kind is dict:
            if len(x) > 1:
                x = dict(sorted(x.items()))
            keys.append((kind, *x))
            unfold(x.values(), leaves, keys)
        elif kind is tuple or kind is list:
            keys.append((kind, len(x)))
            unfold(x, leaves, keys)
        elif kind in _LEAF_TYPES or isinstance(x, OBJECTS):
            keys.append(None)
            leaves.append(x)
        elif kind is StaticArgument:
            keys.append(x.frozen())
        else:
            found, treedef = jtu.tree_flatten(x, is_leaf=is_node)
            if len(found) == 1 and found[0] is x:
                keys.append(None)
                leaves.append(x)
            else:
                keys.append(treedef)
                unfold(found, leaves, keys)


def look(leaves: Sequence[Any], form: Hashable) -> Found | None:
    """Find the objects among the leaves of a call, and their records.

    None if an object has none to rely on, or something is no leaf.
    """
    key: list[Hashable] = [form]
    records, plain = [], []
    for x in leaves:
        if type(x) in _LEAF_TYPES:
            key.append(None)
            plain.append(x)
        elif isinstance(x, OBJECTS):
            record = x._nnx_record
            if record is None or record.mutable or not record.is_quiet():
                record = record_of(x)
                if record.snapshot is not None:
                    return None
            key.append(record.layout)
            records.append(record)
        elif _is_leaf(x):
            key.append(None)
            plain.append(x)
        else:
            return None
    if len(records) > 1:
        key.append(_sharing(leaves, records))
    return tuple(key), leaves, records, plain


def _is_leaf(x: Any) -> bool:
    if isinstance(x, jax.Array | np.generic):
        _LEAF_TYPES.add(type(x))
        return True
    return jtu.all_leaves([x]) and not isinstance(x, types.MethodType)  # which may be bound to a Module


def objects_in(leaves: Sequence[Any]) -> list[Any]:
    """All objects in the leaves, by row."""
    found = [y for x in leaves if isinstance(x, OBJECTS) for y in record_of(x).rows(x)]
    return list({id(y): y for y in found}.values())


def _sharing(leaves: Sequence[Any], records: list[Record]) -> tuple:
    """What objects have in common, as static data: empty if nothing, else an entry (shared rows, Variables and arrays
    that are not in an earlier object) for each. Computed once for the same records.
    """
    first = records[0]
    serials = tuple([record.serial for record in records])
    found = first.pairs.get(serials)
    if found is None:
        if len(first.pairs) >= KEPT:  # entries of objects that are gone
            first.pairs.clear()
        found = first.pairs[serials] = _find_sharing([x for x in leaves if isinstance(x, OBJECTS)], records)
    return found


def _find_sharing(roots: Sequence[Any], records: Sequence[Record]) -> tuple:
    place: dict[int, tuple[int, int]] = {}
    entries, any_shared = [], False
    for k, (x, record) in enumerate(zip(roots, records, strict=True)):
        shared = {}
        for row, y in enumerate(record.rows(x)):
            first = place.setdefault(id(y), (k, row))
            if first != (k, row):
                shared[row] = first
        any_shared = any_shared or bool(shared)
        variables = tuple([j for j, row in enumerate(record.layout.variables) if row not in shared])
        arrays = tuple([j for j, row in enumerate(record.array_rows) if row not in shared])
        entries.append((tuple(shared.items()), variables, arrays))
    return tuple(entries) if any_shared else ()


# --- what a compiled function reads and writes ----------------------------------------------------------------------

Picks = list[tuple[int, Numbers | None]]  # which cells of which record; None for all


def _cells(picks: Picks, records: list[Record]) -> list[list[Cell]]:
    return [records[k].picked.get(numbers) or records[k].pick(numbers) for k, numbers in picks]


class _Places:
    """The places of the leaves of a layout: which record, and which of its cells or arrays; or a plain one."""

    def __init__(self, layout: Layout, shared: tuple, records: Sequence[Record]):
        everything = [(range(len(record.cells)), range(len(record.arrays))) for record in records]
        kept = [(cells, arrays) for _, cells, arrays in shared] or everything
        self.sizes = [len(record.cells) for record in records]
        self.cells = [(k, j) for k, (cells, _) in enumerate(kept) for j in cells]
        self.arrays = [(k, j) for k, (_, arrays) in enumerate(kept) for j in arrays]
        self.row = dict(zip(layout.variables, range(len(self.cells)), strict=True))

    def picks(self, positions: Sequence[int]) -> Picks:
        """The cells of the Variables at these positions."""
        chosen: list[list[int]] = [[] for _ in self.sizes]
        for position in positions:
            k, j = self.cells[position]
            chosen[k].append(j)
        return [
            (k, None if len(found) == n else Numbers(found))
            for k, (found, n) in enumerate(zip(chosen, self.sizes, strict=True))
            if found
        ]


class _Lane(NamedTuple):
    """What goes into one lane."""

    cells: Picks
    arrays: list[tuple[int, int]]  # the arrays that nodes hold: which record, and which of its arrays
    plain: list[int] | None  # which of the plain leaves; None for all

    def gather(self, records: list[Record], plain: list[Any]) -> list[Any]:
        leaves = [cell.value for cells in _cells(self.cells, records) for cell in cells]
        if self.arrays:
            for k, j in self.arrays:
                container, name = records[k].arrays[j]
                leaves.append(container[name])
        if plain:
            leaves += plain if self.plain is None else [plain[i] for i in self.plain]
        return leaves


class _Reads:
    """Where the leaves come from that a compiled function takes."""

    def __init__(self, compiled: Compiled, places: _Places):
        self.compiled, self.jitted = compiled, compiled.jitted
        first_array = len(places.cells)
        first_plain = first_array + len(places.arrays)
        self.lanes = []
        for lane in range(compiled.count):
            lane_of = compiled.lane_of or [0] * len(compiled.inputs)
            positions = [p for p, n in zip(compiled.inputs, lane_of, strict=True) if n == lane]
            plain = [p - first_plain for p in positions if p >= first_plain]
            arrays = [places.arrays[p - first_array] for p in positions if first_array <= p < first_plain]
            picks = places.picks([p for p in positions if p < first_array])
            self.lanes.append(_Lane(picks, arrays, None if compiled.count == 1 else plain))


def _output_of(root: Spec) -> Callable[[Sequence[Any]], Any]:
    """The function that makes an output without objects of its leaves."""
    if root is LEAF:
        return operator.itemgetter(0)
    if isinstance(root, Tree) and all(x is LEAF for x in root.children):
        return root.treedef.unflatten
    return lambda leaves: value_of(root, (), iter(leaves))


class _Writes:
    """Where the leaves go that a trace returns: into the cells of each lane, and the others into the output."""

    def __init__(self, outcome: Outcome, places: _Places, lanes: int):
        self.outcome = outcome
        positions = [places.row[i] for i in outcome.delta.values]
        lane_of = outcome.lane_of or (0,) * len(positions)
        by_lane = [[p for p, n in zip(positions, lane_of, strict=False) if n == lane] for lane in range(lanes)]
        self.picks = [pick for found in by_lane for pick in places.picks(found)]
        self.one_lane = lanes == 1
        self.counts = [len(found) for found in by_lane]
        self.others: list[tuple[int, int]] = []  # of each leaf of the output: its lane, and which leaf of it
        for lane in outcome.lane_of[len(positions) :]:
            self.others.append((lane, self.counts[lane] + [n for n, _ in self.others].count(lane)))
        used = [lane for lane, count in enumerate(self.counts) if count]
        self.values_in = used[0] if len(used) == 1 else None  # the lane that all values for cells are in
        self.root = outcome.delta.root
        self.output = _output_of(self.root)

    def parts(self, groups: Groups) -> tuple[Sequence[Any], Sequence[Any]]:
        """The values for the cells, and perhaps more; and the leaves of the output."""
        if self.one_lane:
            return groups[0], groups[0][self.counts[0] :]
        rest = [groups[lane][k] for lane, k in self.others]
        if self.values_in is not None:
            return groups[self.values_in], rest
        return [value for group, count in zip(groups, self.counts, strict=True) for value in group[:count]], rest


class Site:
    """A call of one structure."""

    __slots__ = ("__weakref__", "_all_writes", "_places", "_reads", "_writes", "of_one", "plan")

    def __init__(self, plan: Plan, key: tuple, records: Sequence[Record]):
        self.plan = plan
        self.of_one = len(records) == 1  # whether it is of one object
        shared = () if self.of_one or not records else key[-1]
        self._places = _Places(plan.crossing.layout, shared, records)
        self._reads: _Reads | None = None  # of the plan's compiled function
        self._writes: _Writes | None = None  # of its last outcome
        self._all_writes: dict[Outcome, _Writes] = {}

    def call(self, found: Found, form: Form | None) -> Any:
        """Call the compiled function with what was found, and write what it changed.

        In calls of one object, the form of the arguments gets a shortcut.

        Raises:
          AbsentInput: if it is not known yet what to pass, or for these arguments the function reads more.
        """
        _, leaves, records, plain = found
        compiled, reads = self.plan.compiled, self._reads
        if reads is None or reads.compiled is not compiled:
            if compiled is None:
                raise AbsentInput
            reads = self._reads = _Reads(compiled, self._places)
        groups, outcome = reads.jitted(*[lane.gather(records, plain) for lane in reads.lanes])
        if form is not None:
            self._shorten(form, leaves, reads, outcome, records[0])
        return self.finish(leaves, records, groups, outcome)

    def finish(self, leaves: Sequence[Any], records: list[Record], groups: Groups, outcome: Outcome) -> Any:
        """Write what was returned, and return the output."""
        writes = self._writes
        if writes is None or writes.outcome is not outcome:
            if outcome.delta.rows:
                layout = self.plan.crossing.layout
                returned = join_lanes(groups, outcome.lane_of)
                return commit(layout, outcome.delta, returned, objects_in(leaves))
            writes = self._writes = self._writes_of(outcome, len(groups))
        values, rest = writes.parts(groups)
        if outcome.returns_objects:
            out = value_of(writes.root, objects_in(leaves), iter(rest))
        else:
            out = writes.output(rest)
        if writes.picks:  # last: what can fail must fail before
            write_cells([*chain(*_cells(writes.picks, records))], values)
        return out

    def _writes_of(self, outcome: Outcome, lanes: int) -> _Writes:
        found = self._all_writes.get(outcome)
        if found is None:
            found = self._all_writes[outcome] = _Writes(outcome, self._places, lanes)
        return found

    def _shorten(self, form: Form, leaves: Sequence[Any], reads: _Reads, outcome: Outcome, record: Record) -> None:
        """Leave a shortcut with the record, if there can be one."""
        if record.arrays or record.mutable or outcome.delta.rows or outcome.returns_objects:
            return
        form.place = next(k for k, x in enumerate(leaves) if isinstance(x, OBJECTS))
        if len(record.shortcuts) >= KEPT:  # of functions that are gone
            record.shortcuts.clear()
        record.shortcuts[form] = Shortcut(self, reads, self._writes_of(outcome, len(reads.lanes)), record)


class Shortcut:
    """A call of one object and plain arrays, with its very cells.

    It is kept on the record of the object, and gone with it. To the function it refers weakly: one that is dropped is
    not kept by the models that it was called with.
    """

    __slots__ = ("inputs", "lanes", "only", "outcome", "outputs", "reads", "site", "writes")

    def __init__(self, site: Site, reads: _Reads, writes: _Writes, record: Record):
        self.site, self.reads, self.writes, self.outcome = weakref.ref(site), weakref.ref(reads), writes, writes.outcome
        self.lanes = [([*chain(*_cells(lane.cells, [record]))], lane.plain) for lane in reads.lanes]
        self.only = writes.one_lane
        self.inputs = self.lanes[0][0]  # of the only lane
        self.outputs = [*chain(*_cells(writes.picks, [record]))]


class Form:
    """How a function is given its arguments: the key to the shortcuts of such calls, on the record of the object."""

    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place = 0  # of the object among the leaves, in the last call

    def call(self, leaves: Sequence[Any]) -> Any:
        """Call by the shortcut; :data:`ELSEWHERE` if this is not the way of this call.

        Raises:
          AbsentInput, CapturedObjects: if for these shapes the function reads more than it did before.
        """
        place = self.place
        try:
            record = leaves[place]._nnx_record
        except (AttributeError, IndexError):
            return ELSEWHERE
        if record is None or record.unchecked == 1 or not record.stamp.valid:
            return ELSEWHERE
        shortcut = record.shortcuts.get(self)
        if shortcut is None:
            return ELSEWHERE
        reads = shortcut.reads()
        if reads is None:
            return ELSEWHERE
        plain = None
        if len(leaves) > 1:
            plain = [*leaves[:place], *leaves[place + 1 :]] if place else leaves[1:]
            for x in plain:
                if type(x) not in _LEAF_TYPES:
                    return ELSEWHERE
        record.unchecked -= 1
        if shortcut.only:
            inputs = [cell.value for cell in shortcut.inputs]
            if plain:
                inputs += plain
            groups, outcome = reads.jitted(inputs)
        else:
            lanes = [[cell.value for cell in cells] for cells, _ in shortcut.lanes]
            if plain:
                for inputs, (_, picks) in zip(lanes, shortcut.lanes):
                    inputs += [plain[k] for k in picks]
            groups, outcome = reads.jitted(*lanes)
        if outcome is not shortcut.outcome:
            site = shortcut.site()
            assert site is not None  # it has the reads
            return site.finish(leaves, [record], groups, outcome)
        writes, cells = shortcut.writes, shortcut.outputs
        if shortcut.only:
            values = groups[0]
            out = writes.output(values[len(cells) :] if cells else values)
        else:
            values, rest = writes.parts(groups)
            out = writes.output(rest)
        if len(cells) == 1:
            cells[0].value = values[0]
        elif cells:
            write_cells(cells, values)
        return out


class _Elsewhere:
    __slots__ = ()


ELSEWHERE = _Elsewhere()
