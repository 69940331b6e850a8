"""Dispatch: from a jitted call to its compiled function without a walk through the model.

Calls with equal *keys* have the same plan; a key has the signature of the call and the layouts of the objects
(call_keys.py). A :class:`Dispatch`, which belongs to one jitted function, serves a call in one of two ways:

- By its key it finds a :class:`CacheEntry`: the plan, and the numbers of the cells that the compiled function reads and
  writes. The entry refers to no object, so it serves all objects of these layouts.
- For the very objects of an earlier call not even this key is needed. A :class:`Shortcut` has the entry, and the table
  of each of these objects has a :class:`Part` of the shortcut: the cells themselves. The first object has it under a
  :class:`CallSite`, which stands for the signature, and the others under the shortcut. (Compilers call this an inline
  cache; ``table.guard`` is its guard.) Shortcuts are only for calls that change nothing but values of Variables, and
  only if no pytree in an attribute holds arrays. Calls without objects need no guard but the types of the leaves.

A call that has no entry either is packed (jit.py), and an entry is added; a call that uses an entry adds a shortcut.
Only the loops over cells take time in proportion to a size: to what the function touches, not to the model.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import starmap
from typing import Any

from ..core.annotations import NamedTuple
from ..core.cells import Cell, reader, write_cells, writer
from ..core.closures import AbsentInput, CapturedObjects, Loans, is_lent_elsewhere, wait_for_loans
from ..core.data import is_node
from ..core.errors import NnxError
from ..core.graph import Delta, build, commit, pack
from ..core.layout import Layout, keep
from ..core.packing import Sharing, Tables, VariableGroup
from ..core.patching import patched
from ..core.rows import LEAF, NodeRow, Ref, Tree, VariableRow, parts, renumbered, value_of
from ..core.stamps import stamping
from ..core.static import StaticArgument
from .call_keys import LEAF_TYPES, KnownCall, flatten_containers, flatten_pytrees, known_call, unfolded
from .labels import join_lanes
from .leaf_checks import check_traceable
from .lift import Arguments, Outcome, Returned
from .literals import Literals, LiteralToken, literals_in, literals_of
from .plan import Compiled, Plan, Stopped, WithOutcome


class Miss(Exception):
    """Raised for a call that has to be packed; ``found`` is what :meth:`Dispatch.add` takes, None if it cannot."""

    def __init__(self, found: KnownCall | None):
        self.found = found


class Dispatch:
    """Serves the calls of one jitted function, which may have static arguments, wrapped as :class:`StaticArgument`.

    It is ``enabled`` if a plan depends on nothing but the key of its entry. If not, each call has to be packed.
    """

    def __init__(self, has_static: bool, enabled: bool):
        self._has_static, self._enabled = has_static, enabled
        # How to flatten arguments such as those so far; None if all of them were leaves.
        self._flatten: Callable | None = flatten_containers if has_static else None
        self._sites: dict[Hashable, CallSite] = {}
        self._entries: dict[Hashable, CacheEntry] = {}
        self._pure: dict[Hashable, CacheEntry] = {}  # by the signature of calls in which there are no objects

    def clear(self) -> None:
        """Forget all entries and shortcuts."""
        self._sites.clear()
        self._entries.clear()
        self._pure.clear()

    def call(self, args: tuple, kwargs: dict[str, Any], captured: tuple, token: object) -> Any:
        """Call the function, and write what it changes; returns its output.

        The ``token`` is that of the ``captured`` objects (closure_inputs.py).

        Raises:
          Miss: if the call has to be packed, perhaps because the function reads more for these shapes than before.
        """
        # The signature of the call: the leaves, or containers of leaves, and what they are for.
        leaves: Sequence[Any] = args
        signature: Hashable = len(args)
        if kwargs:
            names = sorted(kwargs)  # they are packed in this order
            leaves, signature = (*args, *[kwargs[name] for name in names]), (signature, *names)
        if token is not None:
            leaves, signature = (*leaves, *captured), (signature, token)
        returned = None
        try:
            if self._flatten is not None:
                leaves, signature = unfolded(leaves, signature, self._flatten, self._has_static)
            site = self._sites.get(signature)
            if site is None:
                entry = self._pure.get(signature)
                if entry is None or not LEAF_TYPES.issuperset(map(type, leaves)):
                    return self._call_entry(leaves, signature, captured, token)
                compiled, output = entry.pure
                returned = compiled.jitted(*leaves)
                return output(returned) if type(returned) is not WithOutcome else entry.finish((), (), returned)
            # The shortcut, written out for the first object: a function or a loop would take another 0.05 us each.
            try:
                first = site.first
                root = leaves[first]
                table = root._nnx_table
                if table.until_check < 2 or not (table.guard.valid or patched(table, root)):
                    raise LookupError
                part = table.shortcuts[site]
                shortcut, outputs = part.shortcut, part.outputs
                compiled = shortcut.compiled()
                jitted = compiled.jitted
                if part.index != first or type(root) is not part.kind:
                    raise LookupError
                table.until_check -= 1
                others, plain, alone = shortcut.arrangement
                if not alone or compiled.donates:  # else `part.read` takes the inputs itself
                    inputs = [cell.value for cell in part.inputs]
                    arrays = part.arrays
                    for index in others:
                        root = leaves[index]
                        table = root._nnx_table
                        if table.until_check < 2 or not (table.guard.valid or patched(table, root)):
                            raise LookupError
                        part = table.shortcuts[shortcut]
                        if part.index != index or type(root) is not part.kind:
                            raise LookupError
                        table.until_check -= 1
                        inputs += [cell.value for cell in part.inputs]
                        arrays = arrays + part.arrays
                        outputs = outputs + part.outputs
                    if arrays:
                        inputs += [container[key] for container, key in arrays]
                    for index in plain:
                        x = leaves[index]
                        if type(x) not in LEAF_TYPES:
                            raise LookupError
                        inputs.append(x)
            except (AttributeError, LookupError):  # not all is as it was in the call that made the shortcut
                pass
            else:
                if compiled.donates:
                    (returned,) = starmap(jitted, (inputs,))  # as in `Compiled.call`
                else:
                    returned = part.read(jitted) if alone else jitted(*inputs)
                if type(returned) is WithOutcome:  # one that is not the usual one
                    return shortcut.finish(leaves, first, returned)
                # What it changed is written last, after everything that can fail.
                out = shortcut.output(returned)
                if others:
                    write_cells(outputs, returned)
                elif outputs:
                    part.write(returned)
                return out
            return self._call_entry(leaves, signature, captured, token)  # not in the handler: user code may run
        except BaseException as error:
            if returned is None:
                if isinstance(error, AbsentInput):  # the shortcuts are to a function that reads too little
                    self._sites.pop(signature, None)
                _refuse(error, Arguments(args, kwargs, captured), token)
            elif compiled.donates:  # an interrupt, or an output that was refused: the arrays that went in are gone
                with contextlib.suppress(Exception):
                    shortcut.finish(leaves, first, compiled.without_output(returned))
            raise

    def _call_entry(self, leaves: Sequence[Any], signature: Hashable, captured: tuple, token: object) -> Any:
        if not self._enabled:
            raise Miss(None)
        if Loans.now[1] and any(is_lent_elsewhere(x._nnx_trace) for x in captured):
            wait_for_loans()
        found = known_call(leaves, signature)
        if found is None:  # a leaf is a container, or an object has to be walked at each call
            self._flatten = flatten_containers if self._flatten is None else flatten_pytrees
            raise Miss(None)
        entry = self._entries.get(found.key)
        if entry is not None and found.first is not None and entry.meets_again(found):
            found = known_call(leaves, signature, grouping=False) or found
            entry = self._entries.get(found.key)
        if entry is None:
            raise Miss(found)
        if type(token) is LiteralToken and not entry.has(token.literals, found.tables):
            raise Miss(None)
        out = entry.call(found, self._sites)
        if entry.pure is not None:
            self._pure[signature] = entry
        return out

    def add(self, found: KnownCall, arguments: Arguments, plan: Plan) -> None:
        """Add an entry for calls like this one, which was packed in the meantime and has this plan."""
        packed = [x for x in flatten_pytrees(arguments)[0] if type(x) is not StaticArgument]
        if len(packed) != len(found.leaves) or not all(map(operator.is_, packed, found.leaves)):
            self._flatten = flatten_pytrees  # a class registered with JAX has an order of its own
            return
        again = known_call(found.leaves, found.signature)
        if again is not None and again.key == found.key:  # no other thread has changed anything in between
            self._entries[found.key] = CacheEntry(plan, found)


def _refuse(error: BaseException, arguments: Arguments, token: object) -> None:
    """Replace an error of a compiled function by the one that it stands for, or by one that explains more; if any."""
    if isinstance(error, AbsentInput | CapturedObjects):
        raise Miss(None) from None
    if isinstance(error, Stopped):
        raise error.error from None
    if isinstance(error, TypeError | ValueError) and not isinstance(error, NnxError):
        packed = pack(arguments)
        if literals_in(packed.layout, packed.leaves) != literals_of(token):  # text where there was a number
            raise Miss(None) from None
        check_traceable(packed.layout, packed.leaves)


# --- entries --------------------------------------------------------------------------------------------------------

Numbers = list[tuple[int, list[int]]]  # (the number of a table, the numbers of some cells or arrays in it)


def _by_table(pairs: Iterable[tuple[int, int]]) -> Numbers:
    return [(k, [j for _, j in group]) for k, group in itertools.groupby(pairs, operator.itemgetter(0))]


def _of_each_table(numbers: Numbers, held: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """For each table, the cells or arrays with the given numbers, out of all that it has (``held``)."""
    found: list[list[Any]] = [[] for _ in held]
    for k, chosen in numbers:
        found[k] += [held[k][j] for j in chosen]
    return found


def _cells_at(numbers: Numbers, tables: Tables) -> list[Cell]:
    return [cells[j] for k, chosen in numbers for cells in (tables[k].cells,) for j in chosen]


class _Reads(NamedTuple):
    """The inputs of a compiled function: the values of cells, then arrays in nodes, then all plain leaves."""

    compiled: Compiled
    cells: Numbers
    arrays: Numbers

    def inputs(self, found: KnownCall) -> list[Any]:
        tables = found.tables
        inputs = [cells[j].value for k, chosen in self.cells for cells in (tables[k].cells,) for j in chosen]
        for k, chosen in self.arrays:
            values = tables[k].array_values()
            inputs += [values[j] for j in chosen]
        return inputs + found.plain


class _Writes(NamedTuple):
    """Where the leaves that come back go: the first into cells; from the rest ``output`` makes what the user gets.

    It is None if that takes more than leaves: if live objects are returned, or changed otherwise.
    """

    cells: Numbers
    output: Callable[[Sequence[Any]], Any] | None


_MANY = 64  # leaves: to describe so many Variables takes no longer than to look at their tables


class CacheEntry:
    """Serves the calls of one key: one signature, objects of certain layouts, and what these share."""

    __slots__ = ("__weakref__", "_arrays", "_cells", "_met", "_reads", "_shared", "_writes", "plan", "pure")

    def __init__(self, plan: Plan, found: KnownCall):
        whole = [Sharing((), range(len(table.cells)), range(len(table.array_rows))) for table in found.tables]
        self.plan = plan
        # (the number of a table, the number there) of the cell of each Variable in the plan's layout; of each array.
        self._cells = [(k, j) for k, own in enumerate(found.sharing or whole) for j in own.cells]
        self._arrays = [(k, j) for k, own in enumerate(found.sharing or whole) for j in own.arrays]
        # For each table, the rows of objects that it shares with those before it; empty if none does.
        self._shared = [{row for row, _ in own.shared} for own in found.sharing]
        self._reads: _Reads | None = None  # of the plan's compiled function
        self._writes: dict[Outcome, _Writes] = {}
        self._met: Callable[[], Any] = lambda: None  # the first of the grouped Variables in the last call
        self.pure: Any = None  # if no objects come in or out: the compiled function, and what makes the usual output

    def meets_again(self, found: KnownCall) -> bool:
        """Whether grouped Variables, if they are few, are those of the last call again: then tables will pay."""
        if len(found.leaves) > _MANY:
            return False
        last = self._met()
        self._met = weakref.ref(found.first)
        return found.first is last

    def has(self, literals: Literals, tables: Tables) -> bool:
        """Whether the Variables that hold these literals are in the tables; others may have taken their place."""
        cells = [tables[k].cells[j] for k, j in map(self._cells.__getitem__, literals.positions)]
        present = [getattr(reference(), "_cell", None) for reference in literals.variables]
        return all(map(operator.is_, cells, present))

    def call(self, found: KnownCall, sites: dict[Hashable, CallSite]) -> Any:
        """Call the compiled function with what was found, and write what it changed; keep a shortcut for next time.

        Raises:
          AbsentInput: if the inputs are not known yet, or the function reads more of these arguments than before.
        """
        compiled, reads, tables = self.plan.compiled, self._reads, found.tables
        if compiled is None:
            raise AbsentInput
        if reads is None or reads.compiled is not compiled:
            reads = self._reads = self._reads_of(compiled)

        def finish(returned: tuple[Any, ...]) -> Any:
            unpacked = _, outcome = compiled.unpacked(returned)
            writes = self._writes_of(outcome)
            if type(returned) is not WithOutcome and _only_writes_cells(outcome, writes, tables):
                if tables:
                    with stamping:
                        self._keep_shortcut(found, sites, reads, outcome)
                elif not compiled.donates:
                    self.pure = compiled, writes.output
            out = self.finish(found.roots, tables, unpacked)
            if self.plan.has_shardings:
                self.plan.settle([tables[k].cells[j] for k, j in self._cells])
            return out

        return compiled.call(reads.inputs(found), finish)

    def finish(self, roots: Sequence[Any], tables: Tables, returned: Returned) -> Any:
        """Write what came back from a call with these objects; returns the user's output."""
        groups, outcome = returned
        values = join_lanes(groups, outcome.lane_of)
        writes = self._writes_of(outcome)
        if writes.output is None:
            return commit(self.plan.crossing.layout, outcome.delta, values, self._objects_in(roots, tables))
        out = writes.output(values)
        if writes.cells:  # last, after everything that can fail
            write_cells(_cells_at(writes.cells, tables), values)
        return out

    def _objects_in(self, roots: Sequence[Any], tables: Tables) -> list[Any]:
        """All objects of a call, by row: those of the first table, and what is not shared of each other one."""
        found = [table.objects_with(root) for root, table in zip(roots, tables, strict=True)]
        if not self._shared:
            return [*itertools.chain.from_iterable(found)]
        rows = zip(found, self._shared, strict=True)
        return [y for objects, shared in rows for row, y in enumerate(objects) if row not in shared]

    def _keep_shortcut(
        self, found: KnownCall, sites: dict[Hashable, CallSite], reads: _Reads, outcome: Outcome
    ) -> None:
        """Keep a shortcut, with ``stamping`` held, since the shortcuts in a table are those of its present layout.

        The first call with these objects, which may be new at each call, only leaves a None in its place.
        """
        site = sites.setdefault(found.signature, CallSite())
        tables = found.live_tables
        new = [table for table in tables if site not in table.shortcuts]
        for table in new:
            keep(table.shortcuts, site, None)
        if new or not found.holds():
            return
        writes = self._writes_of(outcome)
        output = writes.output or _output_with(outcome.delta, self._objects_in(found.roots, found.tables))
        objects = [k for k, x in enumerate(found.leaves) if is_node(x)]
        plain = [k for k, x in enumerate(found.leaves) if not is_node(x)]
        site.first = objects[0]
        shortcut = Shortcut(self, reads.compiled, output, (objects[1:], plain, len(found.leaves) == 1))
        for index, table, inputs, arrays, outputs in zip(
            objects,
            tables,
            _of_each_table(reads.cells, [table.cells for table in tables]),
            _of_each_table(reads.arrays, [table.arrays for table in tables]),
            _of_each_table(writes.cells, [table.cells for table in tables]),
            strict=True,
        ):
            key, kind = site if index == site.first else shortcut, type(found.leaves[index])
            keep(table.shortcuts, key, Part(shortcut, index, kind, inputs, [array[1:3] for array in arrays], outputs))

    def _reads_of(self, compiled: Compiled) -> _Reads:
        both = [*self._cells, *self._arrays]
        chosen = [both[k] for k in compiled.inputs if k < len(both)]  # then come all plain leaves
        count = sum(k < len(self._cells) for k in compiled.inputs)
        return _Reads(compiled, _by_table(chosen[:count]), _by_table(chosen[count:]))

    def _writes_of(self, outcome: Outcome) -> _Writes:
        found = self._writes.get(outcome)
        if found is None:
            delta, layout = outcome.delta, self.plan.crossing.layout
            cells = _by_table(self._cells[layout.owner_positions[i, 0]] for i in delta.values)
            found = self._writes[outcome] = _Writes(cells, _output_of(delta, len(layout.rows)))
        return found


def _only_writes_cells(outcome: Outcome, writes: _Writes, tables: Tables) -> bool:
    """Whether a call can have a shortcut: it has no pytree to flatten, and changes only Variables."""
    for table in tables:
        if type(table) is VariableGroup or any(tree is not None for *_, tree in table.arrays):
            return False
    return len({*tables}) == len(tables) and (writes.output is not None or not outcome.delta.rows)


def _output_of(delta: Delta, first: int) -> Callable[[Sequence[Any]], Any] | None:
    """A function that makes an output from the leaves that come back. Those of the output are the last ones.

    None if live objects are in it, or have other rows. New objects have the rows from ``first`` on; if they keep their
    value in a ``jax.Ref``, commit makes it.
    """
    root, start = delta.root, len(delta.values)
    rows = [row for _, row in delta.rows]
    nodes = [row for row in rows if type(row) is NodeRow]
    refers_to = [spec.index for item in (*nodes, root) for _, spec in parts(item) if type(spec) is Ref]
    if rows or refers_to:
        is_new = min(first, *[i for i, _ in delta.rows], *refers_to) == first
        if not is_new or any(type(row) is VariableRow and "ref" in row.metadata.value for row in rows):
            return None
        number = lambda i: i - first
        layout = Layout(tuple([renumbered(row, number) for row in rows]), renumbered(root, number))
        return lambda leaves: build(layout, leaves[start:])[0]
    if root is LEAF:
        return operator.itemgetter(start)
    if isinstance(root, Tree) and all(x is LEAF for x in root.children):
        unflatten = root.treedef.unflatten
        return lambda leaves: unflatten(leaves[start:])
    return lambda leaves: value_of(root, (), iter(leaves[start:]))


def _output_with(delta: Delta, objects: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    """A function that makes the output from leaves, and from the objects in it, to which it refers weakly."""
    root, start = delta.root, len(delta.values)
    references = {spec.index: weakref.ref(objects[spec.index]) for _, spec in parts(root) if type(spec) is Ref}
    return lambda leaves: value_of(root, {i: find() for i, find in references.items()}, iter(leaves[start:]))


# --- shortcuts ------------------------------------------------------------------------------------------------------


# The numbers, among the leaves of a call, of the objects but for the first, and of the leaves that are no objects; and
# whether the first object is the only leaf.
Arrangement = tuple[list[int], list[int], bool]


class CallSite:
    """Stands for one signature of one function: live tables keep the shortcuts of such calls by it.

    It refers to nothing, so a model does not keep a function alive that it was passed to.
    """

    __slots__ = ("first",)

    def __init__(self) -> None:
        self.first = 0  # the number, among the leaves, of the first object in the call that made the last shortcut


class Shortcut:
    """A call with certain objects, the tables of which keep a :class:`Part` each. It refers to the function weakly.

    The others have a part for each: one optimizer may go with several models, or with one whose flag is toggled.
    """

    __slots__ = ("arrangement", "compiled", "entry", "output")

    def __init__(
        self, entry: CacheEntry, compiled: Compiled, output: Callable[[Sequence[Any]], Any], arrangement: Arrangement
    ):
        self.compiled: Callable[[], Any] = weakref.ref(compiled)
        self.entry: Callable[[], Any] = weakref.ref(entry)  # its plan refers to `compiled`
        self.output, self.arrangement = output, arrangement

    def finish(self, leaves: Sequence[Any], first: int, returned: WithOutcome) -> Any:
        """Write what a call with these leaves has returned, if its outcome is not the usual one."""
        roots = [leaves[k] for k in (first, *self.arrangement[0])]
        return self.entry().finish(roots, [root._nnx_table for root in roots], returned)


class Part:
    """The cells and arrays of one object that a shortcut reads and writes. Kept only on the table of the object."""

    __slots__ = ("arrays", "index", "inputs", "kind", "outputs", "read", "shortcut", "write")

    def __init__(
        self,
        shortcut: Shortcut,
        index: int,
        kind: type,
        inputs: list[Cell],
        arrays: list[tuple[Any, Any]],
        outputs: list[Cell],
    ):
        # Of the object among the leaves; its class, since another object may hand on what it is asked to this one.
        self.shortcut, self.index, self.kind = shortcut, index, kind
        self.inputs, self.outputs = inputs, outputs  # cells
        self.arrays = arrays  # (container, key) of each array that is read, besides the cells
        self.read, self.write = reader(inputs, arrays), writer(outputs)  # used if the object is the only one
