"""The object graph as a flat table: pack, build, diff, commit.

``pack`` turns a pytree of arguments into a table with one *row* for each Variable and each node (Module, List, Dict)
found in it. Rows are numbered in the order of the first visit, depth first. Edges are row numbers, so sharing and
cycles need no special case::

    model = Net(); model.tied = model.embed          row 0  Net    embed -> 1, scale = 0.5, tied -> 1
                                                     row 1  Embed  kernel -> 2
                                                     row 2  Param

The static half of the table is a :class:`~nnxlib.core.layout.Layout`: the rows (rows.py says what is in them), and the
*root*, the pytree around the objects. The other half is a list of *leaves*: the values of the Variables in row order,
then the arrays held directly by nodes, then the leaves of the pytree itself. ``build`` makes fresh objects from the
two.

After a function has run on those objects, ``diff`` packs them again **without renumbering**: an object that existed
before keeps its row, new objects get higher numbers. So "row < n" means "an object that the caller owns". The
difference between the two tables, a :class:`Delta`, says everything that happened: which Variables hold another value
(by identity), which rows are new or have other fields, and where objects are in the output of the function.

``commit`` replays a Delta on the *live* objects, those of the caller. It is the only place where a transform writes to
live objects, and it checks everything that can fail before the first write.

Two things that these verbs need are in files of their own: the walk that writes a row for each object (walk.py), and
what is prepared once for a layout so that building is fast (blueprint.py).
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, cast

from . import errors
from .blueprint import fresh
from .calls import entering
from .cells import Cell, new_cell, write_cells
from .closures import Watch, is_lent_elsewhere, notice, wait_for_loans
from .finding import locate
from .inputs import is_read, peek
from .layout import Layout
from .objects import Node, fill_all, new_node, new_nodes, structure_changed
from .rows import ROOT, SAME, NodeRow, Owner, Row, Spec, VariableRow, count_leaves, leaf_suffixes, value_of
from .stamps import Stamp
from .tracing import current_trace
from .variables import MISSING, NO_METADATA, Variable, as_stored, make_variable, make_variables
from .walk import Walk

# --- pack -----------------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """What :func:`pack` returns."""

    layout: Layout
    leaves: list[Any]
    objects: list[Any]  # by row


def pack(tree: Any) -> Packed:
    """Number the objects in a pytree, describe each by a row, and collect the leaves."""
    walk = Walk()
    root = walk.run(tree)
    _notice(walk.objects)
    layout = Layout(walk.all_rows(), root)
    entering(layout, walk.objects)  # a transform packs what it takes; so the calls inside it know their paths
    return Packed(layout, walk.leaves(range(len(layout.rows))), walk.objects)


def _notice(objects: Iterable[Any]) -> None:
    """Tell the running trace, if it looks out for objects from outside of it (closures.py), that these are used."""
    if Watch.count:
        for x in objects:
            notice(x, trace_of(x))


def trace_of(x: Any) -> Any:
    """The trace under which a node or Variable was made."""
    return x._cell.trace if isinstance(x, Variable) else x._nnx_trace


# --- build ----------------------------------------------------------------------------------------------------------


def build(
    layout: Layout,
    leaves: Sequence[Any],
    given: Mapping[int, Any] | None = None,
    cell: Callable[[Any], Cell] = new_cell,
    stamp: Stamp | None = None,
) -> tuple[Any, list[Any]]:
    """Make fresh objects of the running trace from a table; returns the pytree, and the objects by row.

    Args:
      layout: the static half of the table.
      leaves: the other half.
      given: objects to be used in place of fresh ones, by row; a node among them is filled anew.
      cell: makes the cells of the Variables.
      stamp: attached to the fresh objects: a change of their structure invalidates it.
    """
    blueprint = layout.blueprint
    stamps = () if stamp is None else (weakref.ref(stamp),)
    # First empty nodes, and Variables; then the contents of the nodes, which may refer to any of these.
    made = make_variables(blueprint.variable_types, leaves, fresh(blueprint.metadata), cell, stamps)
    for owner, kinds in blueprint.node_types.items():
        made += new_nodes(owner, kinds, stamps)
    for i, marks in blueprint.marks:
        object.__setattr__(made[i], "_nnx_marks", dict(marks))
    objects = [made[i] for i in blueprint.order]
    del made  # saves memory: it is as long as the model
    for i, x in (given or {}).items():
        objects[i] = x
        if isinstance(x, Node):
            x._nnx_fill({})  # emptied, to be filled below like a fresh one
    pool = objects  # extended for now, and cut back below: a copy of the list would be as long as the model
    pool += leaves[len(layout.variables) :]
    pool += [value_of(tree, objects, iter(leaves[start:stop])) for tree, start, stop in blueprint.trees]
    pool += fresh(blueprint.constants)
    for rows, names, places in blueprint.attributes:
        fill_all(map(objects.__getitem__, rows), names, map(pool.__getitem__, places))
    for i, places in blueprint.lists:
        list.extend(objects[i], map(pool.__getitem__, places))
    for i, names, places in blueprint.others:
        objects[i]._nnx_fill(dict(zip(names, [pool[k] for k in places], strict=True)))
    del pool[len(layout.rows) :]
    return value_of(layout.root, objects, iter(leaves[blueprint.held :])), objects


# --- diff -----------------------------------------------------------------------------------------------------------


class Delta(NamedTuple):
    """What a function did to the objects of a layout, and what it returned. Static: the new values are leaves."""

    values: tuple[int, ...]  # the rows of Variables that got another value
    rows: tuple[tuple[int, Row], ...]  # new rows, and rows that have changed otherwise
    root: Spec  # of the output


class After(NamedTuple):
    """The table after a call, and the difference to the table before."""

    rows: tuple[Row, ...]  # of every object, old and new
    root: Spec  # of the output
    delta: Delta
    leaves: list[Any]  # of the Delta, in the order in which ``commit`` takes them
    owners: list[Owner]  # of each of these leaves; ROOT stands for the output
    walk: Walk

    def values_of(self, row: int) -> Sequence[Any]:
        """What filters see of a row: the Variable itself, or the arrays that the node holds."""
        return (self.walk.objects[row],) if row in self.walk.cells else self.walk.arrays[row]

    @property
    def paths(self) -> tuple[tuple, ...]:
        """The path of each leaf of the Delta; that of a leaf of the output begins with ``<output>``."""

        @functools.cache
        def held_by(row: int) -> list[tuple]:
            """The paths of the leaves that a node, or the output, holds itself."""
            if row == ROOT:
                return [(errors.OUTPUT, *suffix) for suffix in leaf_suffixes(self.root)]
            fields = cast(NodeRow, self.rows[row]).at(self.walk.paths[row])
            return [(*path, *suffix) for path, spec in fields for suffix in leaf_suffixes(spec)]

        variables = self.walk.cells
        return tuple([self.walk.paths[row] if row in variables else held_by(row)[k] for row, k in self.owners])

    @property
    def output_leaves(self) -> list[Any]:
        """The leaves of the output itself, not those of objects in it."""
        return self.walk.arrays[ROOT]


def diff(
    layout: Layout,
    before: Sequence[Any],
    objects: Sequence[Any],
    out: Any,
    forced: Collection[int] = (),
    whole: bool = False,
) -> After:
    """Compare ``objects``, built from ``layout`` and the leaves ``before``, with what they are now.

    ``out`` is what the function returned. A leaf counts as changed if another object is now in its place. The value of
    a Variable also does if its position is in ``forced`` and it was read: if it is donated, it has to come back, and if
    it is a pytree, it may have been edited in place. With ``whole``, all arrays of a node count as changed if its
    structure has changed; so functions that change it in the same way have the same rows.
    """
    # The table as it is now, with the old numbers for the old objects.
    walk = Walk(objects)
    as_built = _as_built(layout, objects)
    walk.keep(layout, as_built)
    others = [i for i in range(len(layout.rows)) if i not in as_built]
    for i in others:
        walk.revisit(i, layout.paths[i])
    root = walk.run(out, (errors.OUTPUT,))
    _notice(walk.objects[len(objects) :])  # the function may have returned or attached objects from outside

    # What differs from the table before: values of Variables, and rows.
    values: list[int] = []
    rows: dict[int, Row] = {}
    for position, i in enumerate(layout.variables):
        if i not in as_built and walk.rows[i] != layout.rows[i]:
            rows[i] = walk.rows[i]
        elif peek(walk.cells[i]) is not before[position] or (position in forced and is_read(walk.cells[i])):
            values.append(i)
    returned: dict[int, list[int]] = {}  # which of the arrays that a changed node holds are leaves of the Delta
    arrays_before = iter(before[len(layout.variables) :])
    for i in others:  # which are all nodes that hold arrays, and more
        row = layout.rows[i]
        if type(row) is NodeRow:
            changed = _changed_fields(row, walk.rows[i], arrays_before, walk.arrays[i], whole)
            if changed is not None:
                rows[i], returned[i] = changed
    rows |= {i: walk.rows[i] for i in range(len(layout.rows), len(walk.objects))}  # those of new objects

    # The leaves that go with the Delta: those of Variables, those of nodes, those of the output.
    numbers = [*values, *sorted(rows)]
    owners = [(i, 0) for i in numbers if i in walk.cells]
    owners += [(i, k) for i in (*numbers, ROOT) for k in returned.get(i, range(len(walk.arrays.get(i, ()))))]
    leaves = [_leaving(walk.cells[i].value, walk.rows[i]) if i in walk.cells else walk.arrays[i][k] for i, k in owners]
    delta = Delta(tuple(values), tuple(sorted(rows.items())), root)
    return After(walk.all_rows(), root, delta, leaves, owners, walk)


def _leaving(value: Any, row: Row) -> Any:
    """The value of a Variable in a form that JAX can return: not a Ref, but what is in it."""
    return as_stored(value, NO_METADATA) if "ref" in cast(VariableRow, row).metadata.value else value


def _changed_fields(
    old: NodeRow, new: Row, arrays_before: Iterator[Any], arrays: list[Any], whole: bool
) -> tuple[NodeRow, list[int]] | None:
    """The new row of a node with ``SAME`` in unchanged fields, and which of its arrays the others hold; None if no
    field has changed. ``arrays_before`` yields the arrays that the node held, then those of later nodes.
    """
    assert isinstance(new, NodeRow)
    whole = whole and new != old
    held_before = {name: (spec, [next(arrays_before) for _ in range(count_leaves(spec))]) for name, spec in old.fields}
    fields, held, used = [], [], 0
    for name, spec in new.fields:
        now = range(used, used + count_leaves(spec))
        used = now.stop
        old_spec, old_arrays = held_before.get(name, (None, ()))
        same = spec == old_spec and all(arrays[k] is x for k, x in zip(now, old_arrays, strict=True))
        if same and not (whole and now):
            fields.append((name, SAME))
        else:
            fields.append((name, spec))
            held += now
    if new[:2] == old[:2] and new.marks == old.marks and all(spec is SAME for _, spec in fields):
        return None
    return NodeRow(new.type, new.names, tuple(fields), new.marks), held


def _as_built(layout: Layout, objects: Sequence[Any]) -> set[int]:
    """The rows of the objects made by ``build`` that hold, except for values of Variables, what they were given.

    To see this is faster than to describe them again. It is not seen of nodes that hold arrays, pytrees, or anything
    else that could have changed in place.
    """
    blueprint, rows = layout.blueprint, layout.rows
    pool = [*objects, *repeat(MISSING, blueprint.constant_start - len(rows)), *fresh(blueprint.constants)]
    found = {
        i
        for i, names, places in blueprint.contents
        if tuple(held := objects[i]._nnx_contents()) == names
        and all(map(operator.is_, held.values(), map(pool.__getitem__, places)))
        and type(objects[i]) is rows[i].type
        and _holds_same(objects[i]._nnx_marks or NO_METADATA, cast(NodeRow, rows[i]).marks.value)
    }
    for i, kind, metadata in zip(layout.variables, blueprint.variable_types, blueprint.metadata, strict=True):
        if type(objects[i]) is kind and _holds_same(objects[i]._metadata, metadata.value):
            found.add(i)
    return found


def _holds_same(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
    """Whether two mappings have the same keys in the same order, and the very same values."""
    return a is b or (tuple(a) == tuple(b) and all(map(operator.is_, a.values(), b.values())))


# --- commit ---------------------------------------------------------------------------------------------------------


def commit(layout: Layout, delta: Delta, leaves: Sequence[Any], live: Sequence[Any]) -> Any:
    """Write a Delta to the live objects, and return the output of the function.

    ``leaves`` are those of ``delta.values``, then of ``delta.rows`` (Variables first), then of the output.

    Raises:
      TraceContextError: if a live object that is to change belongs to another trace; then nothing has been written.
    """
    check_commit(layout, delta, live)
    n, remaining = len(layout.rows), iter(leaves)
    objects = [*live, *[_new_object(row) for i, row in delta.rows if i >= n]]
    targets = [objects[i] for i in delta.values]
    values = list(itertools.islice(remaining, len(targets)))
    variables = [(i, row) for i, row in delta.rows if type(row) is VariableRow]
    for i, row in variables:
        value, metadata = next(remaining), row.metadata.value
        targets.append(objects[i])
        values.append(as_stored(value, metadata) if "ref" in metadata else value)
    nodes = [(i, row, _contents(objects[i], row, objects, remaining)) for i, row in delta.rows if type(row) is NodeRow]
    out = value_of(delta.root, objects, remaining)
    cells = [target._cell for target in targets]

    def write() -> None:  # gives the same result if it is done twice
        write_cells(cells, values)
        for i, row in variables:
            if i < n:
                _restructure_variable(objects[i], row)
        for i, row, contents in nodes:
            _restructure_node(objects[i], layout.rows[i] if i < n else None, row, contents)

    try:
        write()  # which cannot fail
    except BaseException:  # but may be interrupted
        write()
        raise
    return out


def _new_object(row: Row) -> Any:
    """An empty object for a row."""
    return variable_of(row, None) if type(row) is VariableRow else new_node(row.type, row.marks.value)


def variable_of(row: VariableRow, value: Any) -> Variable:
    """A Variable of the running trace, as a row says, with this value."""
    return make_variable(row.type, value, row.metadata.fresh())


def check_commit(layout: Layout, delta: Delta, live: Sequence[Any]) -> None:
    """Raise :class:`TraceContextError` if a live object that ``delta`` changes belongs to another trace."""
    trace, n = current_trace(), len(layout.rows)
    for i in delta.values:
        if live[i]._cell.trace is not trace:
            raise _refusal(layout, live[i], i, "the new value")
    for i, row in delta.rows:
        if i < n and trace is None and is_lent_elsewhere(trace_of(live[i])):
            wait_for_loans()  # until the trace of another thread gives the object back (closures.py)
        if i < n and trace_of(live[i]) is not trace:
            raise _refusal(layout, live[i], i, _what_changed(row))


def _refusal(layout: Layout, node: Any, row: int, what: str) -> errors.TraceContextError:
    reached = locate(node, skip=4)  # from the caller of commit
    where = errors.format_path(layout.paths[row]) + (f", which is {reached}" if reached else "")
    return errors.TraceContextError(_REFUSED.format(what=what, kind=type(node).__name__, where=where))


_REFUSED = """\
Cannot write {what} of the {kind} at {where}: the object was made outside of the JAX transformation that is running, \
so a traced value would outlive its trace. Nothing has been written.
Pass the object as an argument to every transform around this one too, and use those of nnxlib (nnx.jit instead of \
jax.jit, nnx.scan instead of jax.lax.scan), or make the call read-only (for example `model.eval()`)."""


def _what_changed(row: Row) -> str:
    """What a row of a Delta is about to change in an object, for a message."""
    if type(row) is VariableRow:
        return "the metadata"
    names = [name for name, spec in row.fields if spec is not SAME]
    return f"attribute {', '.join(map(repr, names))}" if names else "the attributes"


def _contents(node: Any, row: NodeRow, objects: Sequence[Any], leaves: Iterator[Any]) -> dict[Any, Any]:
    """The new contents of a live node; an unchanged field keeps the very object that it holds."""
    held = node._nnx_contents()
    values = {name: held[name] if spec is SAME else value_of(spec, objects, leaves) for name, spec in row.fields}
    return {name: values[name] for name in row.names}


def _restructure_node(node: Any, before: Row | None, row: NodeRow, contents: dict[Any, Any]) -> None:
    """Give a node the class, contents and marks of its row; ``before`` is its old row, None for a new object."""
    if type(node) is not row.type:
        object.__setattr__(node, "__class__", row.type)
    node._nnx_fill(contents)
    if not _same_structure(before, row):
        object.__setattr__(node, "_nnx_marks", dict(row.marks.value) or None)
        structure_changed(node)


def _same_structure(before: Row | None, row: NodeRow) -> bool:
    """Whether a node with the row ``before`` gets nothing new but arrays where it held arrays."""
    if not isinstance(before, NodeRow) or row._replace(fields=before.fields) != before:
        return False
    specs = dict(before.fields)
    return all(spec is SAME or spec == specs[name] for name, spec in row.fields)


def _restructure_variable(variable: Variable, row: VariableRow) -> None:
    """Give a live Variable the class and metadata of its new row."""
    if type(variable) is not row.type:
        object.__setattr__(variable, "__class__", row.type)
    object.__setattr__(variable, "_metadata", row.metadata.fresh())
    variable._structure_changed()
