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
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from ..core.graph import LEAF, Layout, StaticArgument, Tree, commit, value_of
from ..core.inputs import AbsentInput
from ..core.objects import is_node
from ..core.records import Numbers, Record, record_of
from ..core.variables import write_cells
from .lift import Outcome
from .plan import Compiled, Groups, Plan
from .prefixes import join_lanes

_LEAF_TYPES: set[type] = {int, float, complex, bool, np.ndarray}  # more are added as they are met


# The key of the site, the objects among the arguments, their records, the other leaves, and what the objects share.
Found = tuple[tuple, list[Any], list[Record], list[Any], tuple]


def objects_in(roots: list[Any], records: list[Record]) -> list[Any]:
    """All objects by row."""
    found = [y for x, record in zip(roots, records, strict=True) for y in record.rows(x)]
    return list({id(y): y for y in found}.values())


def look(args: tuple, kwargs: dict[str, Any], captured: tuple = ()) -> Found | None:
    """Find the objects among the arguments, and their records; None if one has none to rely on."""
    if kwargs:
        names = tuple(sorted(kwargs))
        flat: Sequence[Any] = [*args, *[kwargs[name] for name in names], *captured]
        key: list[Any] = [(len(args), names, len(captured))]
    else:
        flat, key = ((*args, *captured), [(len(args), len(captured))]) if captured else (args, [len(args)])
    roots: list[Any] = []
    records: list[Record] = []
    plain: list[Any] = []
    nested = False
    while True:
        for x in flat:
            kind = type(x)
            if kind in _LEAF_TYPES:
                key.append(None)
                plain.append(x)
            elif is_node(x):
                record = record_of(x)
                if record.snapshot is not None:
                    return None
                roots.append(x)
                records.append(record)
                key.append(record.layout)
            elif kind is StaticArgument:
                key.append(x.frozen())
            elif not nested:  # a container: all arguments are flattened, and looked at again
                break
            elif kind is types.MethodType:  # may be bound to a Module
                return None
            else:
                if isinstance(x, jax.Array | np.generic):
                    _LEAF_TYPES.add(kind)
                key.append(None)
                plain.append(x)
        else:
            break
        flat, treedef = jtu.tree_flatten((args, kwargs, captured), is_leaf=is_node)
        nested, key = True, [treedef]
        roots, records, plain = [], [], []
    shared: tuple = ()
    if len(records) > 1:
        shared = _sharing(roots, records)
        key.append(shared)
    return tuple(key), roots, records, plain, shared


def _sharing(roots: list[Any], records: list[Record]) -> tuple:
    """What objects have in common, as static data: empty if nothing, else an entry (shared rows, Variables and arrays
    that are not in an earlier object) for each. Computed once for the same records.
    """
    first = records[0]
    serials = tuple([record.serial for record in records])
    found = first.pairs.get(serials)
    if found is None:
        if len(first.pairs) >= 64:  # entries of objects that are gone
            first.pairs.clear()
        found = first.pairs[serials] = _find_sharing(roots, records)
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

Picks = list[Numbers | None]  # of each record, which of its cells; None for all


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
        return [None if len(found) == n else Numbers(found) for found, n in zip(chosen, self.sizes, strict=True)]


class _Lane(NamedTuple):
    """What goes into one lane."""

    cells: Picks
    arrays: list[tuple[int, int]]  # the arrays that nodes hold: which record, and which of its arrays
    plain: list[int] | None  # which of the plain leaves; None for all

    def gather(self, records: list[Record], plain: list[Any]) -> list[Any]:
        picked = [x.cells if numbers is None else x.pick(numbers) for x, numbers in zip(records, self.cells)]
        leaves = [cell.value for cells in picked for cell in cells]
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
        self.compiled = compiled
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


class _Writes:
    """Where the leaves go that a trace returns: into the cells of each lane, and the others into the output."""

    def __init__(self, outcome: Outcome, places: _Places, lanes: int):
        self.outcome = outcome
        positions = [places.row[i] for i in outcome.delta.values]
        lane_of = outcome.lane_of or (0,) * len(positions)
        by_lane = [[p for p, n in zip(positions, lane_of, strict=False) if n == lane] for lane in range(lanes)]
        self.lanes = [places.picks(found) for found in by_lane]
        self.counts = [len(found) for found in by_lane]
        root = outcome.delta.root
        self.treedef = root.treedef if isinstance(root, Tree) and all(x is LEAF for x in root.children) else None

    def rest(self, groups: Groups) -> list[Any]:
        """The leaves of the output."""
        if len(groups) == 1:
            return groups[0][self.counts[0] :]
        lane_of = self.outcome.lane_of[sum(self.counts) :]
        return list(join_lanes([group[n:] for group, n in zip(groups, self.counts, strict=True)], lane_of))

    def write(self, records: list[Record], groups: Groups) -> None:
        for picks, count, group in zip(self.lanes, self.counts, groups):
            if count:
                picked = [x.cells if numbers is None else x.pick(numbers) for x, numbers in zip(records, picks)]
                write_cells(picked[0] if len(picked) == 1 else list(chain.from_iterable(picked)), group)


class Site:
    """A call of one structure."""

    __slots__ = ("_places", "_reads", "_writes", "plan")

    def __init__(self, plan: Plan, shared: tuple, records: Sequence[Record]):
        self.plan = plan
        self._places = _Places(plan.crossing.layout, shared, records)
        self._reads: _Reads | None = None  # of the plan's compiled function
        self._writes: _Writes | None = None  # of its last outcome

    def call(self, found: Found) -> Any:
        """Call the compiled function, and write what it changed.

        Raises:
          AbsentInput: if it is not known yet what to pass, or for these arguments the function reads more.
        """
        _, roots, records, plain, _ = found
        compiled, reads = self.plan.compiled, self._reads
        if compiled is None:
            raise AbsentInput
        if reads is None or reads.compiled is not compiled:
            reads = self._reads = _Reads(compiled, self._places)
        groups, outcome = compiled.jitted(*[lane.gather(records, plain) for lane in reads.lanes])
        delta = outcome.delta
        if delta.rows:
            layout = self.plan.crossing.layout
            return commit(layout, delta, join_lanes(groups, outcome.lane_of), objects_in(roots, records))
        writes = self._writes
        if writes is None or writes.outcome is not outcome:
            writes = self._writes = _Writes(outcome, self._places, compiled.count)
        rest = writes.rest(groups)
        if delta.root is LEAF:
            out = rest[0]
        elif writes.treedef is not None:
            out = writes.treedef.unflatten(rest)
        else:
            out = value_of(delta.root, objects_in(roots, records) if outcome.returns_objects else (), iter(rest))
        if delta.values:  # the output comes first: what can fail must fail before anything is written
            writes.write(records, groups)
        return out
