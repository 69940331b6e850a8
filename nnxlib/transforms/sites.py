"""Sites: the short way of a jitted call, when nothing structural has changed since an earlier one.

Each object among the arguments keeps a :class:`~nnxlib.core.records.Record`. The interned layouts of the records and
the shape of the arguments make the key of a :class:`Site`, which knows the plan, and which cells of the records the
compiled function reads and writes. So a call is: find the site; gather one flat list of arrays for each lane; go
through JAX's own C++ dispatch; write the cells that changed. Nothing here grows with the model but the two loops over
the cells that the function touches.

A site refers to no object: what it picks of a record is kept on the record, which goes when the model does.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from ..core.captures import lending
from ..core.graph import LEAF, Layout, StaticArgument, Tree, commit, value_of
from ..core.inputs import AbsentInput
from ..core.objects import Node, is_node
from ..core.records import Numbers, Record, record_of
from ..core.variables import Cell, Variable, write_cells
from .lift import Outcome
from .plan import Compiled, Groups, Plan
from .prefixes import join_lanes

_LEAF_TYPES: set[type] = {int, float, complex, bool, np.ndarray}  # more are added as they are met
_OBJECTS = (Node, Variable)


Found = tuple[tuple, list[Record], list[Any]]  # the key of the site, the records of the objects, the other leaves


def look(args: tuple, kwargs: dict[str, Any], captured: tuple = ()) -> Found | None:
    """Find the objects among the arguments, and their records; None if one has none to rely on."""
    key: list[Any]
    records: list[Record] = []
    plain: list[Any] = []
    if kwargs:
        names = tuple(sorted(kwargs))
        key = [(len(args), names)]
        known = _look(args, key, records, plain) and _look([kwargs[name] for name in names], key, records, plain)
    else:
        key = [len(args)]
        known = _look(args, key, records, plain)
    if captured:
        key.append(len(captured))
        known = known and _look(captured, key, records, plain)
    if not known:
        return None
    if len(records) > 1:
        key.append(_sharing((args, kwargs, captured), records))
    return tuple(key), records, plain


def _look(flat: Iterable[Any], key: list[Any], records: list[Record], plain: list[Any]) -> bool:
    for x in flat:
        kind = type(x)
        if kind in _LEAF_TYPES:
            key.append(None)
            plain.append(x)
        elif isinstance(x, _OBJECTS):
            record = record_of(x)
            if record.snapshot is not None:
                return False
            key.append(record.layout)
            records.append(record)
        elif kind is StaticArgument:
            key.append(x.frozen())
        elif kind is types.MethodType:  # may be bound to a Module
            return False
        else:
            leaves, treedef = jtu.tree_flatten(x, is_leaf=is_node)
            if len(leaves) == 1 and leaves[0] is x:
                if isinstance(x, jax.Array | np.generic):
                    _LEAF_TYPES.add(kind)
                key.append(None)
                plain.append(x)
            else:
                key.append(treedef)
                if not _look(leaves, key, records, plain):
                    return False
    return True


def objects_in(arguments: tuple, records: list[Record]) -> list[Any]:
    """All objects in the arguments, by row."""
    found = [y for x, record in zip(_roots(arguments), records, strict=True) for y in record.rows(x)]
    return list({id(y): y for y in found}.values())


def _roots(arguments: tuple) -> list[Any]:
    return [x for x in jtu.tree_leaves(arguments, is_leaf=is_node) if isinstance(x, _OBJECTS)]


def _sharing(arguments: tuple, records: list[Record]) -> tuple:
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


def _cells(picks: Picks, records: list[Record]) -> list[Cell]:
    if len(picks) == 1:
        k, numbers = picks[0]
        return records[k].picked.get(numbers) or records[k].pick(numbers)
    return [cell for k, numbers in picks for cell in records[k].picked.get(numbers) or records[k].pick(numbers)]


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
        leaves = [cell.value for cell in _cells(self.cells, records)]
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


class _Writes:
    """Where the leaves go that a trace returns: into the cells of each lane, and the others into the output."""

    def __init__(self, outcome: Outcome, places: _Places, lanes: int):
        self.outcome = outcome
        self.delta = outcome.delta
        positions = [places.row[i] for i in self.delta.values]
        lane_of = outcome.lane_of or (0,) * len(positions)
        by_lane = [[p for p, n in zip(positions, lane_of, strict=False) if n == lane] for lane in range(lanes)]
        self.lanes = [places.picks(found) for found in by_lane]
        self.only = self.lanes[0] if lanes == 1 else None
        self.counts = [len(found) for found in by_lane]
        self.root = root = self.delta.root
        self.treedef = root.treedef if isinstance(root, Tree) and all(x is LEAF for x in root.children) else None

    def finish(self, arguments: tuple, records: list[Record], groups: Groups) -> Any:
        """Write the cells, and return the output, which comes first: what can fail must fail before anything is."""
        if self.only is not None:
            (group,), n = groups, self.counts[0]
            if self.root is LEAF:
                out = group[n]
            else:
                out = self._output(arguments, records, group[n:])
            if n:
                write_cells(_cells(self.only, records), group)
            return out
        groups_left = [group[n:] for group, n in zip(groups, self.counts, strict=True)]
        rest = join_lanes(groups_left, self.outcome.lane_of[sum(self.counts) :])
        out = self._output(arguments, records, rest)
        for picks, group in zip(self.lanes, groups, strict=True):
            write_cells(_cells(picks, records), group)
        return out

    def _output(self, arguments: tuple, records: list[Record], leaves: Sequence[Any]) -> Any:
        if self.treedef is not None:
            return self.treedef.unflatten(leaves)
        objects = objects_in(arguments, records) if self.outcome.returns_objects else ()
        return value_of(self.root, objects, iter(leaves))


class Site:
    """A call of one structure."""

    __slots__ = ("_places", "_reads", "_writes", "plan")

    def __init__(self, plan: Plan, key: tuple, records: Sequence[Record]):
        self.plan = plan
        shared = key[-1] if len(records) > 1 else ()
        self._places = _Places(plan.crossing.layout, shared, records)
        self._reads: _Reads | None = None  # of the plan's compiled function
        self._writes: _Writes | None = None  # of its last outcome

    def call(self, arguments: tuple, records: list[Record], plain: list[Any]) -> Any:
        """Call the compiled function with what was found in the arguments, and write what it changed.

        Raises:
          AbsentInput: if it is not known yet what to pass, or for these arguments the function reads more.
        """
        compiled, reads = self.plan.compiled, self._reads
        if reads is None or reads.compiled is not compiled:
            if compiled is None:
                raise AbsentInput
            reads = self._reads = _Reads(compiled, self._places)
        if reads.only is not None:
            groups, outcome = reads.jitted(reads.only.gather(records, plain))
        else:
            groups, outcome = reads.jitted(*[lane.gather(records, plain) for lane in reads.lanes])
        writes = self._writes
        if writes is None or writes.outcome is not outcome:
            if outcome.delta.rows:
                layout = self.plan.crossing.layout
                leaves = join_lanes(groups, outcome.lane_of)
                return commit(layout, outcome.delta, leaves, objects_in(arguments, records))
            writes = self._writes = _Writes(outcome, self._places, len(reads.lanes))
        return writes.finish(arguments, records, groups)

    def call_lending(self, arguments: tuple, records: list[Record], plain: list[Any]) -> Any:
        """:meth:`call` for a function that captures objects, which a trace borrows."""
        with lending(self.plan.crossing, lambda: self.plan.loan(objects_in(arguments, records))):
            return self.call(arguments, records, plain)
