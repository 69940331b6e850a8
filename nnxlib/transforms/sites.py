"""Sites: the short way of a jitted call, when nothing structural has changed since an earlier one.

Each object among the arguments keeps a :class:`~nnxlib.core.records.Record`. The interned layouts of the records and
the shape of the arguments make the key of a :class:`Site`, which knows the plan, and which cells of the records the
compiled function reads and writes. So a call is: find the site; gather one flat list of arrays for each lane; go
through JAX's own C++ dispatch; write the cells that changed. Nothing here grows with the model but the two loops over
the cells that the function touches.

A site refers to no object: what it picks of a record is kept on the record, which goes when the model does.

The most frequent call, of one object and plain arrays, has a :class:`Shortcut` on the record, in which all this has
been looked up.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Sequence
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


Found = tuple[tuple, list[Record], list[Any]]  # the key of the site, the records of the objects, the other leaves


def spread(args: tuple, kwargs: dict[str, Any], captured: tuple) -> tuple[tuple, Any]:
    """All arguments in a row, in the order in which they are packed; and how they were given."""
    names = tuple(sorted(kwargs))
    return (*args, *[kwargs[name] for name in names], *captured), (len(args), names)


def look(flat: Sequence[Any], key: list[Any], inside: tuple[list[Record], list[Any]] | None = None) -> Found | None:
    """Find the objects among arguments in a row, and their records; None if one has none to rely on.

    ``key`` is how the arguments are given; what they are is appended. ``inside`` is what was found so far, if they are
    the leaves of a container.
    """
    records, plain = ([], []) if inside is None else inside
    for x in flat:
        kind = type(x)
        if kind in _LEAF_TYPES:
            key.append(None)
            plain.append(x)
        elif isinstance(x, OBJECTS):
            record = x._nnx_record
            if record is None or record.mutable or record.unchecked == 1 or not record.stamp.valid:
                record = record_of(x)
                if record.snapshot is not None:
                    return None
            else:
                record.unchecked -= 1
            key.append(record.layout)
            records.append(record)
        elif kind is StaticArgument:
            key.append(x.frozen())
        elif kind is types.MethodType:  # may be bound to a Module
            return None
        else:
            structure, leaves = _open(x)
            if structure is None:
                plain.append(x)
            key.append(structure)
            if leaves and look(leaves, key, (records, plain)) is None:
                return None
    if inside is None and len(records) > 1:
        key.append(_sharing(flat, records))
    return tuple(key), records, plain


def _open(x: Any) -> tuple[Any, Sequence[Any]]:
    """The structure of a container, and what is in it; None for a leaf."""
    kind = type(x)
    if kind is tuple or kind is list:
        return (kind, len(x)), x
    if kind is dict:
        names = tuple(sorted(x))
        return (kind, names), [x[name] for name in names]
    leaves, treedef = jtu.tree_flatten(x, is_leaf=is_node)
    if len(leaves) != 1 or leaves[0] is not x:
        return treedef, leaves
    if isinstance(x, jax.Array | np.generic):
        _LEAF_TYPES.add(kind)
    return None, ()


def objects_in(arguments: Sequence[Any]) -> list[Any]:
    """All objects in the arguments, by row."""
    found = [y for x in _roots(arguments) for y in record_of(x).rows(x)]
    return list({id(y): y for y in found}.values())


def _roots(arguments: Sequence[Any]) -> list[Any]:
    return [x for x in jtu.tree_leaves(list(arguments), is_leaf=is_node) if isinstance(x, OBJECTS)]


def _sharing(arguments: Sequence[Any], records: list[Record]) -> tuple:
    """What objects have in common, as static data: empty if nothing, else an entry (shared rows, Variables and arrays
    that are not in an earlier object) for each. Computed once for the same records.
    """
    first = records[0]
    serials = tuple([record.serial for record in records])
    found = first.pairs.get(serials)
    if found is None:
        if len(first.pairs) >= 64:  # entries of objects that are gone
            first.pairs.clear()
        found = first.pairs[serials] = _find_sharing(_roots(arguments), records)
    return found


def _find_sharing(roots: list[Any], records: list[Record]) -> tuple:
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
        self.only = self.lanes[0] if compiled.count == 1 else None


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
        self.lanes = [places.picks(found) for found in by_lane]
        self.one_lane = lanes == 1
        self.counts = [len(found) for found in by_lane]
        self.others: list[tuple[int, int]] = []  # of each leaf of the output: its lane, and which leaf of it
        for lane in outcome.lane_of[len(positions) :]:
            self.others.append((lane, self.counts[lane] + [n for n, _ in self.others].count(lane)))
        self.root = outcome.delta.root
        self.output = _output_of(self.root)

    def rest(self, groups: Groups) -> Sequence[Any]:
        """The leaves of the output, with several lanes."""
        return [groups[lane][k] for lane, k in self.others]


class Site:
    """A call of one structure."""

    __slots__ = ("__weakref__", "_all_writes", "_of_one", "_places", "_reads", "_writes", "plan")

    def __init__(self, plan: Plan, key: tuple, records: Sequence[Record]):
        self.plan = plan
        self._of_one = len(records) == 1
        shared = () if self._of_one or not records else key[-1]
        self._places = _Places(plan.crossing.layout, shared, records)
        self._reads: _Reads | None = None  # of the plan's compiled function
        self._writes: _Writes | None = None  # of its last outcome
        self._all_writes: dict[Outcome, _Writes] = {}

    def call(self, arguments: Sequence[Any], found: Found, function: object) -> Any:
        """Call the compiled function with what was found in the arguments, and write what it changed.

        Raises:
          AbsentInput: if it is not known yet what to pass, or for these arguments the function reads more.
        """
        key, records, plain = found
        compiled, reads = self.plan.compiled, self._reads
        if reads is None or reads.compiled is not compiled:
            if compiled is None:
                raise AbsentInput
            reads = self._reads = _Reads(compiled, self._places)
        if reads.only is not None:
            groups, outcome = reads.jitted(reads.only.gather(records, plain))
        else:
            groups, outcome = reads.jitted(*[lane.gather(records, plain) for lane in reads.lanes])
        if self._of_one and len(plain) == len(arguments) - 1 and isinstance(arguments[0], OBJECTS):
            self._shorten(key[0], reads, outcome, records[0], function)
        return self.finish(arguments, records, groups, outcome)

    def finish(self, arguments: Sequence[Any], records: list[Record], groups: Groups, outcome: Outcome) -> Any:
        """Write what was returned, and return the output."""
        writes = self._writes
        if writes is None or writes.outcome is not outcome:
            if outcome.delta.rows:
                layout = self.plan.crossing.layout
                leaves = join_lanes(groups, outcome.lane_of)
                return commit(layout, outcome.delta, leaves, objects_in(arguments))
            writes = self._writes = self._writes_of(outcome, len(groups))
        rest = groups[0][writes.counts[0] :] if writes.one_lane else writes.rest(groups)
        if outcome.returns_objects:
            out = value_of(writes.root, objects_in(arguments), iter(rest))
        else:
            out = writes.output(rest)
        for picks, group in zip(writes.lanes, groups, strict=True):  # last: what can fail must fail before
            if picks:
                write_cells(_cells(picks, records), group)
        return out

    def _writes_of(self, outcome: Outcome, lanes: int) -> _Writes:
        found = self._all_writes.get(outcome)
        if found is None:
            found = self._all_writes[outcome] = _Writes(outcome, self._places, lanes)
        return found

    def _shorten(self, shape: Any, reads: _Reads, outcome: Outcome, record: Record, function: object) -> None:
        """Leave a shortcut with the record, if there can be one."""
        if record.arrays or record.mutable or outcome.delta.rows or outcome.returns_objects:
            return
        if len(record.shortcuts) >= KEPT:  # of functions that are gone
            record.shortcuts.clear()
        writes = self._writes_of(outcome, len(reads.lanes))
        record.shortcuts[function] = Shortcut(shape, self, reads, writes, record)


class Shortcut:
    """A call of one object and plain arrays, with its very cells.

    It is kept on the record of the object, and gone with it. To the function it refers weakly: one that is dropped is
    not kept by the models that it was called with.
    """

    __slots__ = ("_count", "_inputs", "_only", "_outputs", "_plain", "_reads", "_site", "_writes", "shape")

    def __init__(self, shape: Any, site: Site, reads: _Reads, writes: _Writes, record: Record):
        self.shape = shape  # how the arguments are given
        self._site, self._reads, self._writes = weakref.ref(site), weakref.ref(reads), writes
        self._inputs = [list(chain.from_iterable(_cells(lane.cells, [record]))) for lane in reads.lanes]
        self._plain = [lane.plain for lane in reads.lanes]
        self._only = self._inputs[0] if len(reads.lanes) == 1 else None
        self._count = writes.counts[0]
        self._outputs = [_cells(picks, [record]) for picks in writes.lanes] if any(writes.counts) else []

    def call(self, arguments: Sequence[Any], record: Record) -> Any:
        """The output; :data:`ELSEWHERE` if this is not the way of this call."""
        reads = self._reads()
        if reads is None:
            return ELSEWHERE
        plain = arguments[1:]
        for x in plain:
            if type(x) not in _LEAF_TYPES:
                return ELSEWHERE
        only = self._only
        if only is not None:
            leaves = [cell.value for cell in only]
            if plain:
                leaves += plain
            groups, outcome = reads.jitted(leaves)
        else:
            groups, outcome = reads.jitted(
                *[
                    [*[cell.value for cell in cells], *[plain[k] for k in picks or ()]]
                    for cells, picks in zip(self._inputs, self._plain)
                ]
            )
        writes = self._writes
        if outcome is not writes.outcome:
            site = self._site()
            assert site is not None  # it has the reads
            return site.finish(arguments, [record], groups, outcome)
        if only is not None:
            (group,), n = groups, self._count
            out = writes.output(group[n:] if n else group)
        else:
            out = writes.output(writes.rest(groups))
        if self._outputs:
            for lists, group in zip(self._outputs, groups):
                write_cells(lists, group)
        return out


class _Elsewhere:
    __slots__ = ()


ELSEWHERE = _Elsewhere()
