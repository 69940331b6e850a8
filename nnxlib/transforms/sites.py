"""Call sites: the fast path of a jitted call, taken if no structure has changed since an earlier call.

Each object among the arguments keeps a :class:`~nnxlib.core.records.Record`. The *form* of the arguments (how many
there are, their names, the containers around them) and the interned layouts of the records are the key of a
:class:`Site`. It knows the plan, and which cells of the records the compiled function reads and writes. So a call has
four steps: find the site, gather one flat list of arrays, call JAX's C++ dispatch, write the cells that changed. Only
the two loops over cells take time in proportion to a size: that of what the function touches, not of the model.

The most frequent calls, with objects and plain arrays and no change of structure, have a :class:`Shortcut`, which skips
the search for the site. Each record keeps its :class:`Part` of it, to be found by the :class:`Form`.

A site refers to no object. The cells that it selects are kept on the record, which goes when the model does.
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

_LEAF_TYPES: set[type] = {int, float, complex, bool, np.ndarray}  # more are added when they are first met
# Two ways to flatten arguments: the first only knows tuples, lists and dicts, and takes half the time of the second,
# which knows all pytrees except nodes and Variables.
_containers = type(jtu.default_registry)(
    enable_none=True, enable_tuple=True, enable_namedtuple=True, enable_list=True, enable_dict=True
)
FLATTEN = _containers.flatten, functools.partial(jtu.tree_flatten, is_leaf=is_node)

# What is found of a call: the key of its site, its leaves (objects are leaves, too), the records of the objects, and
# the other leaves, which are called plain.
Found = tuple[tuple, Sequence[Any], list[Record], list[Any]]


def with_names(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, tuple]:
    """All arguments in the order in which they are packed, and their form."""
    if len(kwargs) > 1:
        kwargs = dict(sorted(kwargs.items()))
    return (*args, *kwargs.values()), (len(args), *kwargs)


def unfold(row: Sequence[Any], form: Hashable, flatten: Callable, has_static: bool) -> tuple[list[Any], tuple]:
    """The leaves of the arguments, and their form with the containers around them and the static arguments."""
    leaves, treedef = flatten(row)
    if not has_static:
        return leaves, (form, treedef)
    static = [x.frozen() for x in leaves if type(x) is StaticArgument]
    return [x for x in leaves if type(x) is not StaticArgument], (form, treedef, *static)


def in_order(leaves: Sequence[Any], arguments: Any) -> bool:
    """Whether leaves are in the order in which they are packed; a class registered with JAX may have its own order."""
    packed = [x for x in FLATTEN[1](arguments)[0] if type(x) is not StaticArgument]
    return len(leaves) == len(packed) and all(map(operator.is_, leaves, packed))


def look(leaves: Sequence[Any], form: Hashable) -> Found | None:
    """Find the objects among the leaves of a call, and their records.

    None if a record is not reliable, or if one of the leaves is a container.
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
    return jtu.all_leaves([x]) and not isinstance(x, types.MethodType)  # a method may be bound to a Module


def objects_in(leaves: Sequence[Any]) -> list[Any]:
    """All objects in the leaves, by row."""
    found = [y for x in leaves if is_node(x) for y in record_of(x).objects_with(x)]
    return list({id(y): y for y in found}.values())


def _sharing(leaves: Sequence[Any], records: list[Record]) -> tuple:
    """What the objects of several records share: empty if nothing, else for each record its rows that are also in an
    earlier record, and the numbers of its Variables and arrays that are not. Static; computed once for these records.
    """
    first = records[0]
    serials = tuple([record.serial for record in records])
    found = first.sharing.get(serials)
    if found is None:
        if len(first.sharing) >= KEPT:  # probably with objects that are gone
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

Picks = list[tuple[int, CellNumbers | None]]  # the number of a record, and which of its cells; None for all


def _cells(picks: Picks, records: Sequence[Record]) -> list[list[Cell]]:
    return [records[k].picked.get(numbers) or records[k].pick(numbers) for k, numbers in picks]


class _Places:
    """Where the leaves of a layout are found: in which record, and in which of its cells or arrays."""

    def __init__(self, layout: Layout, shared: tuple, records: Sequence[Record]):
        everything = [(range(len(record.cells)), range(len(record.arrays))) for record in records]
        kept = [(cells, arrays) for _, cells, arrays in shared] or everything
        self.sizes = [len(record.cells) for record in records]
        self.cells = [(k, j) for k, (cells, _) in enumerate(kept) for j in cells]
        self.arrays = [(k, j) for k, (_, arrays) in enumerate(kept) for j in arrays]
        self.row = dict(zip(layout.variables, range(len(self.cells)), strict=True))

    def picks(self, positions: Sequence[int]) -> Picks:
        """Where to find the cells of the Variables at these positions."""
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
    """Where the inputs of a compiled function come from: cells, arrays in nodes, and all plain leaves."""

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
    """A function from the leaves that came back to the output, which has no objects; its leaves begin at ``start``."""
    if root is LEAF:
        return operator.itemgetter(start)
    if isinstance(root, Tree) and all(x is LEAF for x in root.children):
        unflatten = root.treedef.unflatten
        return lambda leaves: unflatten(leaves[start:])
    return lambda leaves: value_of(root, (), iter(leaves[start:]))


class _Writes:
    """Where the leaves that come back go: the first into cells, the others into the output."""

    def __init__(self, outcome: Outcome, places: _Places):
        delta = outcome.delta
        self.outcome, self.root, self.start = outcome, delta.root, len(delta.values)
        self.cells = places.picks([places.row[i] for i in delta.values])
        self.output = _output_of(delta.root, self.start)


class Site:
    """Calls with arguments of one structure."""

    __slots__ = ("__weakref__", "_all_writes", "_places", "_reads", "_writes", "plan")

    def __init__(self, plan: Plan, key: tuple, records: Sequence[Record]):
        self.plan = plan
        shared = key[-1] if len(records) > 1 else ()
        self._places = _Places(plan.crossing.layout, shared, records)
        self._reads: _Reads | None = None  # of the plan's compiled function
        self._writes: _Writes | None = None  # of its last outcome
        self._all_writes: dict[Outcome, _Writes] = {}

    def call(self, found: Found, forms: dict[Hashable, Form]) -> Any:
        """Call the compiled function with what was found, and write what it changed; make a shortcut for next time.

        Raises:
          AbsentInput: if the inputs are not known yet, or the function reads more of these arguments than before.
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
        out = self.finish(leaves, records, compiled, returned)
        if self.plan.places:
            self.plan.settle([records[k].cells[j] for k, j in self._places.cells])
        return out

    def finish(
        self, arguments: Sequence[Any], records: Sequence[Record], compiled: Compiled, returned: Sequence[Any]
    ) -> Any:
        """Write the changes that a compiled function returned, and return the user's output."""
        leaves, outcome, writes = compiled.leaves_of(returned), compiled.outcome_of(returned), self._writes
        if writes is None or writes.outcome is not outcome:
            if outcome.delta.rows:
                return commit(self.plan.crossing.layout, outcome.delta, leaves, objects_in(arguments))
            writes = self._writes = self._writes_of(outcome)
        if outcome.returns_objects:
            out = value_of(writes.root, objects_in(arguments), iter(leaves[writes.start :]))
        else:
            out = writes.output(leaves)
        if writes.cells:  # last, after everything that can fail
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
        """Make a shortcut, and keep its parts on the records."""
        places = [k for k, x in enumerate(leaves) if is_node(x)]
        form.place = places[0]
        plain = [k for k in range(len(leaves)) if k not in places]
        writes = self._writes_of(outcome)
        shortcut = Shortcut(self, reads, writes, places[1:], plain)
        for k, (place, record) in enumerate(zip(places, records, strict=True)):
            inputs, outputs = (
                [*chain(*_cells([x for x in picks if x[0] == k], records))] for picks in (reads.cells, writes.cells)
            )
            if len(record.shortcuts) >= KEPT:  # probably of functions that are gone
                record.shortcuts.clear()
            record.shortcuts[form] = Part(shortcut, place, inputs, outputs)


class Shortcut:
    """A call with some objects and plain leaves that only changes values of Variables.

    It refers to the function weakly, so that a model does not keep a function alive that it was passed to.
    """

    __slots__ = ("compiled", "others", "output", "plain", "site")

    def __init__(self, site: Site, reads: _Reads, writes: _Writes, others: list[int], plain: list[int]):
        self.site, self.compiled = weakref.ref(site), weakref.ref(reads.compiled)
        self.others, self.plain = others, plain  # the places, among the leaves, of the later objects; of plain leaves
        self.output = writes.output


class Part:
    """The cells of one object that a shortcut reads and writes. Kept on the record of the object, and nowhere else."""

    __slots__ = ("inputs", "outputs", "place", "read", "shortcut", "write")

    def __init__(self, shortcut: Shortcut, place: int, inputs: list[Cell], outputs: list[Cell]):
        self.shortcut, self.place = shortcut, place  # of the object among the leaves
        self.inputs, self.outputs = inputs, outputs
        self.read, self.write = reader(inputs), writer(outputs)  # used if the object is the only one


class Form:
    """The form of the arguments of one function; by it, the records of the objects keep the shortcuts of such calls."""

    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place = 0  # of the first object among the leaves, when a shortcut was last made

    def call(self, leaves: Sequence[Any]) -> Any:
        """Call by the shortcut; :data:`NO_SHORTCUT` if there is none for this call.

        Raises:
          AbsentInput, CapturedObjects: if the function reads more for these shapes than it did before.
        """
        place = self.place
        try:
            record = leaves[place]._nnx_record
            if not record.stamp.valid and not refreshed(record):
                return NO_SHORTCUT
            part = record.shortcuts.get(self)
        except AttributeError:  # not an object, or without a record
            return NO_SHORTCUT
        if part is None or part.place != place or record.unchecked == 1:
            return NO_SHORTCUT
        shortcut = part.shortcut
        compiled = shortcut.compiled()
        if compiled is None:
            return NO_SHORTCUT
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
                    return NO_SHORTCUT
                part = other.shortcuts.get(self)
                if part is None or part.shortcut is not shortcut or part.place != place:
                    return NO_SHORTCUT
                other.unchecked -= 1
                others.append(other)
                inputs += [cell.value for cell in part.inputs]
                cells = cells + part.outputs
            for k in shortcut.plain:
                x = leaves[k]
                if type(x) not in _LEAF_TYPES:
                    return NO_SHORTCUT
                inputs.append(x)
            returned = compiled.jitted(*inputs)
        if type(returned) is not tuple:  # a trace with another outcome
            site = shortcut.site()
            assert site is not None  # its plan refers to `compiled`
            return site.finish(leaves, [record, *others], compiled, returned)
        out = shortcut.output(returned)
        if others:
            write_cells(cells, returned)
        elif cells:
            part.write(returned)
        return out


class _NoShortcut:
    __slots__ = ()


NO_SHORTCUT = _NoShortcut()
