"""Sites: the short way of a jitted call, when nothing structural has changed since an earlier one.

Each object among the arguments keeps a :class:`~nnxlib.core.records.Record`. The interned layouts of the records and
the form of the arguments make the key of a :class:`Site`, which knows the plan, and which cells of the records the
compiled function reads and writes. So a call is: find the site; gather one flat list of arrays; go through JAX's own
C++ dispatch; write the cells that changed. Nothing here grows with the model but the two loops over the cells that the
function touches.

A site refers to no object: what it picks of a record is kept on the record, which goes when the model does.

The most frequent calls, of objects and plain arrays that change no structure, have a :class:`Shortcut`, in which all
this has been looked up. Each record keeps its :class:`Part` of it, found by the :class:`Form` in which the arguments
are given.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from ..core.graph import LEAF, Layout, Spec, StaticArgument, Tree, commit, value_of
from ..core.inputs import AbsentInput
from ..core.objects import is_node
from ..core.records import KEPT, CellNumbers, Record, record_of, refreshed
from ..core.variables import Cell, reader, write_cells, writer
from .lift import Outcome
from .plan import Compiled, Plan

_LEAF_TYPES: set[type] = {int, float, complex, bool, np.ndarray}  # more are added as they are met
# What takes arguments apart: the first only tuples, lists and dicts, in half the time of the other, which takes apart
# all that JAX does but for the objects.
_containers = type(jtu.default_registry)(
    enable_none=True, enable_tuple=True, enable_namedtuple=True, enable_list=True, enable_dict=True
)
FLATTEN = _containers.flatten, functools.partial(jtu.tree_flatten, is_leaf=is_node)

# What was found of a call: the key of its site, the leaves, the records of the objects among them, the other leaves.
Found = tuple[tuple, Sequence[Any], list[Record], list[Any]]


def with_names(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, tuple]:
    """All arguments in the order in which they are packed, and how they are given."""
    if len(kwargs) > 1:
        kwargs = dict(sorted(kwargs.items()))
    return (*args, *kwargs.values()), (len(args), *kwargs)


def unfold(row: Sequence[Any], form: Hashable, flatten: Callable, has_static: bool) -> tuple[list[Any], tuple]:
    """The leaves and objects in the arguments, and how they are given with what is in containers and what is static."""
    leaves, treedef = flatten(row)
    if not has_static:
        return leaves, (form, treedef)
    static = [x.frozen() for x in leaves if type(x) is StaticArgument]
    return [x for x in leaves if type(x) is not StaticArgument], (form, treedef, *static)


def in_order(leaves: Sequence[Any], arguments: Any) -> bool:
    """Whether leaves are in the order in which they are packed; a named tuple may be registered with one of its own."""
    packed = [x for x in FLATTEN[1](arguments)[0] if type(x) is not StaticArgument]
    return len(leaves) == len(packed) and all(map(operator.is_, leaves, packed))


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
        elif is_node(x):
            record = x._nnx_record
            if record is None or record.mutable or not record.try_use():
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
    found = [y for x in leaves if is_node(x) for y in record_of(x).objects_with(x)]
    return list({id(y): y for y in found}.values())


def _sharing(leaves: Sequence[Any], records: list[Record]) -> tuple:
    """What objects have in common, as static data: empty if nothing, else an entry (shared rows, Variables and arrays
    that are not in an earlier object) for each. Computed once for the same records.
    """
    first = records[0]
    serials = tuple([record.serial for record in records])
    found = first.sharing.get(serials)
    if found is None:
        if len(first.sharing) >= KEPT:  # entries of objects that are gone
            first.sharing.clear()
        found = first.sharing[serials] = _find_sharing([x for x in leaves if is_node(x)], records)
    return found


def _find_sharing(roots: Sequence[Any], records: Sequence[Record]) -> tuple:
    place: dict[int, tuple[int, int]] = {}
    entries, any_shared = [], False
    for k, (x, record) in enumerate(zip(roots, records, strict=True)):
        shared = {}
        for row, y in enumerate(record.objects_with(x)):
            first = place.setdefault(id(y), (k, row))
            if first != (k, row):
                shared[row] = first
        any_shared = any_shared or bool(shared)
        variables = tuple([j for j, row in enumerate(record.layout.variables) if row not in shared])
        arrays = tuple([j for j, row in enumerate(record.array_rows) if row not in shared])
        entries.append((tuple(shared.items()), variables, arrays))
    return tuple(entries) if any_shared else ()


# --- what a compiled function reads and writes ----------------------------------------------------------------------

Picks = list[tuple[int, CellNumbers | None]]  # which cells of which record; None for all


def _cells(picks: Picks, records: Sequence[Record]) -> list[list[Cell]]:
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
            (k, None if len(found) == n else CellNumbers(found))
            for k, (found, n) in enumerate(zip(chosen, self.sizes, strict=True))
            if found
        ]


class _Reads:
    """Where the leaves come from that a compiled function takes: cells, arrays in nodes, all of the plain leaves."""

    def __init__(self, compiled: Compiled, places: _Places):
        self.compiled, self.jitted = compiled, compiled.jitted
        first_array = len(places.cells)
        first_plain = first_array + len(places.arrays)
        self.cells = places.picks([k for k in compiled.inputs if k < first_array])
        self.arrays = [places.arrays[k - first_array] for k in compiled.inputs if first_array <= k < first_plain]

    def gather(self, records: list[Record], plain: list[Any]) -> list[Any]:
        leaves = [cell.value for cells in _cells(self.cells, records) for cell in cells]
        for k, j in self.arrays:
            container, name = records[k].arrays[j]
            leaves.append(container[name])
        return leaves + plain


def _output_of(root: Spec, start: int) -> Callable[[Sequence[Any]], Any]:
    """The function that makes an output without objects of the leaves that came back; its own start at a place."""
    if root is LEAF:
        return operator.itemgetter(start)
    if isinstance(root, Tree) and all(x is LEAF for x in root.children):
        unflatten = root.treedef.unflatten
        return lambda leaves: unflatten(leaves[start:])
    return lambda leaves: value_of(root, (), iter(leaves[start:]))


class _Writes:
    """Where what a trace returns goes: values into cells, and the other leaves into the output."""

    def __init__(self, outcome: Outcome, places: _Places):
        delta = outcome.delta
        self.outcome, self.root, self.start = outcome, delta.root, len(delta.values)
        self.cells = places.picks([places.row[i] for i in delta.values])
        self.output = _output_of(delta.root, self.start)


class Site:
    """A call of one structure."""

    __slots__ = ("__weakref__", "_all_writes", "_places", "_reads", "_writes", "plan")

    def __init__(self, plan: Plan, key: tuple, records: Sequence[Record]):
        self.plan = plan
        shared = key[-1] if len(records) > 1 else ()
        self._places = _Places(plan.crossing.layout, shared, records)
        self._reads: _Reads | None = None  # of the plan's compiled function
        self._writes: _Writes | None = None  # of its last outcome
        self._all_writes: dict[Outcome, _Writes] = {}

    def call(self, found: Found, forms: dict[Hashable, Form]) -> Any:
        """Call the compiled function with what was found, and write what it changed; leave a shortcut for next time.

        Raises:
          AbsentInput: if it is not known yet what to pass, or for these arguments the function reads more.
        """
        key, leaves, records, plain = found
        compiled, reads = self.plan.compiled, self._reads
        if compiled is None:
            raise AbsentInput
        if reads is None or reads.compiled is not compiled:
            reads = self._reads = _Reads(compiled, self._places)
        returned = reads.jitted(*reads.gather(records, plain))
        outcome = compiled.outcome_of(returned)
        if type(returned) is tuple and self._can_be_short(records, outcome):
            self._shorten(forms.setdefault(key[0], Form()), leaves, records, reads, outcome)
        return self.finish(leaves, records, compiled, returned)

    def finish(
        self, arguments: Sequence[Any], records: Sequence[Record], compiled: Compiled, returned: Sequence[Any]
    ) -> Any:
        """Write what a compiled function returned, and return the output."""
        leaves, outcome, writes = compiled.leaves_of(returned), compiled.outcome_of(returned), self._writes
        if writes is None or writes.outcome is not outcome:
            if outcome.delta.rows:
                return commit(self.plan.crossing.layout, outcome.delta, leaves, objects_in(arguments))
            writes = self._writes = self._writes_of(outcome)
        if outcome.returns_objects:
            out = value_of(writes.root, objects_in(arguments), iter(leaves[writes.start :]))
        else:
            out = writes.output(leaves)
        if writes.cells:  # last: what can fail must fail before
            write_cells([*chain(*_cells(writes.cells, records))], leaves)
        return out

    def _writes_of(self, outcome: Outcome) -> _Writes:
        found = self._all_writes.get(outcome)
        if found is None:
            found = self._all_writes[outcome] = _Writes(outcome, self._places)
        return found

    def _can_be_short(self, records: list[Record], outcome: Outcome) -> bool:
        if outcome.delta.rows or outcome.returns_objects or not records:
            return False
        return len({*records}) == len(records) and not any(record.arrays or record.mutable for record in records)

    def _shorten(
        self, form: Form, leaves: Sequence[Any], records: list[Record], reads: _Reads, outcome: Outcome
    ) -> None:
        """Leave a shortcut with the records."""
        places = [k for k, x in enumerate(leaves) if is_node(x)]
        form.place = places[0]
        plain = [k for k in range(len(leaves)) if k not in places]
        writes = self._writes_of(outcome)
        shortcut = Shortcut(self, reads, writes, places[1:], plain)
        for k, (place, record) in enumerate(zip(places, records, strict=True)):
            inputs, outputs = (
                [*chain(*_cells([x for x in picks if x[0] == k], records))] for picks in (reads.cells, writes.cells)
            )
            if len(record.shortcuts) >= KEPT:  # of functions that are gone
                record.shortcuts.clear()
            record.shortcuts[form] = Part(shortcut, place, inputs, outputs)


class Shortcut:
    """A call of some objects and plain arrays.

    To the function it refers weakly: one that is dropped is not kept by the models that it was called with.
    """

    __slots__ = ("compiled", "others", "output", "plain", "site")

    def __init__(self, site: Site, reads: _Reads, writes: _Writes, others: list[int], plain: list[int]):
        self.site, self.compiled = weakref.ref(site), weakref.ref(reads.compiled)
        self.others, self.plain = others, plain  # where among the leaves the objects are but for the first; the others
        self.output = writes.output


class Part:
    """What a shortcut reads and writes of one object: its very cells. Kept on the record of the object alone."""

    __slots__ = ("inputs", "outputs", "place", "read", "shortcut", "write")

    def __init__(self, shortcut: Shortcut, place: int, inputs: list[Cell], outputs: list[Cell]):
        self.shortcut, self.place = shortcut, place  # of the object among the leaves
        self.inputs, self.outputs = inputs, outputs
        self.read, self.write = reader(inputs), writer(outputs)  # where there is no other object


class Form:
    """How a function is given its arguments: the key to the shortcuts of such calls, on the records of the objects."""

    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place = 0  # of the first object among the leaves, in the last call

    def call(self, leaves: Sequence[Any]) -> Any:
        """Call by the shortcut; :data:`ELSEWHERE` if this is not the way of this call.

        Raises:
          AbsentInput, CapturedObjects: if for these shapes the function reads more than it did before.
        """
        place = self.place
        try:
            record = leaves[place]._nnx_record
            if not record.stamp.valid and not refreshed(record):
                return ELSEWHERE
            part = record.shortcuts.get(self)
        except AttributeError:  # no object, or nothing is kept about it
            return ELSEWHERE
        if part is None or part.place != place or record.unchecked == 1:
            return ELSEWHERE
        shortcut = part.shortcut
        compiled = shortcut.compiled()
        if compiled is None:
            return ELSEWHERE
        record.unchecked -= 1
        cells = part.outputs
        others: Sequence[Record] = ()
        if len(leaves) == 1:
            returned = part.read(compiled.jitted)
        else:
            inputs, others = [cell.value for cell in part.inputs], []
            for place in shortcut.others:
                other = getattr(leaves[place], "_nnx_record", None)
                if other is None or other.unchecked == 1 or not (other.stamp.valid or refreshed(other)):
                    return ELSEWHERE
                part = other.shortcuts.get(self)
                if part is None or part.shortcut is not shortcut or part.place != place:
                    return ELSEWHERE
                other.unchecked -= 1
                others.append(other)
                inputs += [cell.value for cell in part.inputs]
                cells = cells + part.outputs
            for k in shortcut.plain:
                x = leaves[k]
                if type(x) not in _LEAF_TYPES:
                    return ELSEWHERE
                inputs.append(x)
            returned = compiled.jitted(*inputs)
        if type(returned) is not tuple:  # of a trace that did something else
            site = shortcut.site()
            assert site is not None  # its plan has what is compiled
            return site.finish(leaves, [record, *others], compiled, returned)
        out = shortcut.output(returned)
        if others:
            write_cells(cells, returned)
        elif cells:
            part.write(returned)
        return out


class _Elsewhere:
    __slots__ = ()


ELSEWHERE = _Elsewhere()
