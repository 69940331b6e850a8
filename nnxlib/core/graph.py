"""The object graph as a flat table, and its four verbs: pack, build, diff, commit.

``pack`` turns a pytree of arguments into a table with one *row* for each Variable and each node (Module, List, Dict)
found in it. Rows are numbered in the order of the first visit, depth first. Edges are row numbers, so sharing and
cycles need no special case::

    model = Net(); model.tied = model.embed          row 0  Net    embed -> 1, scale = 0.5, tied -> 1
                                                     row 1  Embed  kernel -> 2
                                                     row 2  Param

The static half of the table is a :class:`~nnxlib.core.layout.Layout`: the rows (rows.py says what is in them), and the
*root*, the pytree around the objects. The other half is a list of *leaves* (layout.py says in which order). ``build``
makes fresh objects from the two.

After a function has run on those objects, ``diff`` packs them again **without renumbering**: an object that existed
before keeps its row, new objects get higher numbers. So "row < n" means "an object that the caller owns". The
difference between the two tables, a :class:`Delta`, says everything that happened: which Variables hold another value
(by identity), which rows are new or have other fields, and what the function returned::

    model.embed.kernel.value = x             values  2
    model.new = Embed()                      rows    0  Net    embed, scale, tied: SAME, new -> 3
    return model.new                                 3  Embed  kernel -> 4
                                                     4  Param
                                             root    -> 3
                                             leaves  x, and the value of row 4

A Delta is static, too; its leaves stand beside it, in an order that :meth:`Delta.owners` defines.

``commit`` replays a Delta on the *live* objects, those of the caller. It is the only place where a transform writes to
live objects, and it checks everything that can fail before the first write.

Two things that they need are in files of their own: the walk that writes a row for each object (walk.py), and what is
prepared once for each layout to make building fast (blueprint.py).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

from . import errors
from .annotations import NamedTuple
from .calls import note_paths
from .cells import Cell, new_cell, write_cells
from .closures import is_lent_elsewhere, notice_all, wait_for_loans
from .finding import locate
from .inputs import is_read, peek
from .layout import Layout
from .making import make_variable, make_variables
from .metadata import NO_METADATA
from .objects import Node, new_node
from .rows import (
    ROOT,
    SAME,
    NodeRow,
    Owner,
    Row,
    Spec,
    VariableRow,
    count_leaves,
    leaves_by_field,
    only_arrays_change,
    own_leaf_paths,
    value_of,
)
from .stamps import Stamp
from .tracing import current_trace, ensure_stack
from .values import as_stored
from .variables import Variable
from .walk import Walk

# --- pack -----------------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """The result of :func:`pack`."""

    layout: Layout
    leaves: list[Any]
    objects: list[Any]  # by row


def pack(tree: Any) -> Packed:
    """Number the objects in a pytree, describe each by a row, and collect the leaves.

    Raises:
      StaticValueError: for a static value that cannot be compared; names its path.
      PathError: if the keys of a dict have no order.
    """
    walk = Walk()
    root = walk.run(tree)
    notice_all(walk.objects)  # for a trace that watches which objects from outside of it are used (closures.py)
    layout = Layout(walk.all_rows(), root)
    note_paths(layout, walk.objects)  # for the calls inside of a transform, if these are its arguments (calls.py)
    return Packed(layout, walk.leaves(), walk.objects)


def by_path(packed: Packed) -> Iterator[tuple[errors.Path, Any]]:
    """(first path, Variable or array) of each leaf of what was packed."""
    layout, leaves, objects = packed
    variables = [objects[i] for i in layout.variables]
    return zip(layout.leaf_paths, variables + leaves[len(variables) :], strict=True)


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
      given: by row, objects to use in place of fresh ones; a node among them is emptied and filled again.
      cell: makes the cells of the Variables.
      stamp: attached to the fresh objects: a change of their structure invalidates it.
    """
    # First Variables and empty nodes; then the contents of the nodes, which may refer to any of them.
    objects = layout.blueprint.make(leaves, cell, () if stamp is None else (weakref.ref(stamp),))
    for i, x in (given or {}).items():
        objects[i] = x
        if isinstance(x, Node):
            x._nnx_fill({})  # emptied, to be filled below like a fresh one
    remaining = iter(leaves[len(layout.variables) :])
    layout.blueprint.fill(objects, remaining)
    return value_of(layout.root, objects, remaining), objects


# --- diff -----------------------------------------------------------------------------------------------------------


class Delta(NamedTuple):
    """What a function did to the objects of a layout, and what it returned. Static: the new values are leaves."""

    values: tuple[int, ...]  # the rows of Variables that got another value
    rows: tuple[tuple[int, Row], ...]  # new rows, and rows that have changed otherwise, with SAME in unchanged fields
    root: Spec  # of the output

    def owners(self, rows: Mapping[int, Row] | Sequence[Row]) -> list[Owner]:
        """The owner of each of its leaves, in the order in which :func:`commit` takes them.

        First come the values of Variables, those of ``values`` and then those of ``rows``; then the arrays in changed
        fields of nodes; then the leaves of the output. ``rows`` are those after the function, without ``SAME``.
        """
        found = [(i, 0) for i in self.values]
        found += [(i, 0) for i, row in self.rows if type(row) is VariableRow]
        for i, row in self.rows:
            if type(row) is NodeRow:
                fields = zip(row.fields, leaves_by_field(cast(NodeRow, rows[i])), strict=True)
                found += [(i, k) for (_, spec), own in fields if spec is not SAME for k in own]
        return found + [(ROOT, k) for k in range(count_leaves(self.root))]


class After(NamedTuple):
    """The table after a call, and its difference from the table before."""

    rows: Sequence[Row]  # of every object, old and new
    delta: Delta
    owners: list[Owner]  # of the leaves of the Delta
    leaves: list[Any]  # the same leaves
    walk: Walk

    @property
    def leaf_paths(self) -> tuple[tuple, ...]:
        """The path of each leaf of the Delta; that of a leaf of the output begins with ``<output>``."""
        paths, variables = self.walk.paths, self.walk.cells
        nodes = {row for row, _ in self.owners} - variables.keys() - {ROOT}
        held = {row: own_leaf_paths(cast(NodeRow, self.rows[row]), paths[row]) for row in nodes}
        held[ROOT] = own_leaf_paths(self.delta.root, (errors.OUTPUT,))
        return tuple([paths[row] if row in variables else held[row][k] for row, k in self.owners])

    @classmethod
    def of(cls, walk: Walk, rows: Sequence[Row], delta: Delta) -> After:
        """Make one from a walk and its Delta. The leaves are what JAX can return: in place of a jax.Ref, its value."""

        def leaf(row: int, k: int) -> Any:
            if row not in walk.cells:
                return walk.arrays[row][k]
            value = walk.cells[row].value
            return as_stored(value, NO_METADATA) if "ref" in cast(VariableRow, rows[row]).metadata.value else value

        owners = delta.owners(rows)
        return cls(rows, delta, owners, [leaf(*owner) for owner in owners], walk)


def diff(
    layout: Layout, before: Sequence[Any], objects: Sequence[Any], out: Any, forced: Collection[int] = ()
) -> After:
    """Compare ``objects``, built from ``layout`` and the leaves ``before``, with what they are now.

    ``out`` is what the function returned. A leaf counts as changed if another object is now in its place. The value of
    a Variable also counts as changed if its position is in ``forced`` and it was read. (It is donated, and so has to
    come back; or it is a pytree that was edited in place.)
    """
    # The table as it is now. The walk knows the old objects, which so keep their numbers. An object that is as it was
    # built keeps its row without a visit, since visits take most of the time.
    walk = Walk(objects)
    as_built = layout.blueprint.as_built(walk.objects, range(len(layout.rows)))
    walk.take_rows(layout, as_built)
    for i, path in enumerate(layout.paths):
        if i not in as_built:
            walk.revisit(i, path)
    root = walk.run(out, (errors.OUTPUT,))
    notice_all(walk.objects[len(objects) :])  # the function may have returned or attached objects from outside

    # Where it differs from the table before: in values of Variables, and in rows.
    values: list[int] = []
    rows: dict[int, Row] = {}
    for position, i in enumerate(layout.variables):
        now = walk.rows[i]
        if now is not layout.rows[i] and now != layout.rows[i]:
            rows[i] = now
        elif peek(walk.cells[i]) is not before[position] or (position in forced and is_read(walk.cells[i])):
            values.append(i)
    arrays = iter(before[len(layout.variables) :])  # those of nodes, row by row
    for i, row in enumerate(layout.rows):
        now = walk.rows[i]
        if type(row) is VariableRow or now is row:  # a node that is as it was built, and so holds no arrays
            continue
        if changed := changed_row(row, arrays, cast(NodeRow, now), iter(walk.arrays[i])):
            rows[i] = changed
    rows |= {i: walk.rows[i] for i in range(len(layout.rows), len(walk.objects))}  # those of new objects

    delta = Delta(tuple(values), tuple(sorted(rows.items())), root)
    return After.of(walk, walk.all_rows(), delta)


def changed_row(old: NodeRow, old_arrays: Iterator[Any], new: NodeRow, arrays: Iterator[Any]) -> NodeRow | None:
    """The new row of a node with ``SAME`` in unchanged fields, those with an equal spec and the very same arrays.

    None if nothing has changed. The iterators yield the arrays that the node held, and those that it holds now.
    """
    before, now = _contents_by_field(old, old_arrays), _contents_by_field(new, arrays)
    fields = tuple([(name, SAME if before.get(name) == held else held[0]) for name, held in now.items()])
    unchanged = new.head == old.head and all(spec is SAME for _, spec in fields)
    return None if unchanged else new._replace(fields=fields)


def _contents_by_field(row: NodeRow, arrays: Iterator[Any]) -> dict[Any, tuple[Spec, list[int]]]:
    """The contents of each field, by name: its spec, and the ids of its arrays, the next ones of ``arrays``."""
    return {name: (spec, [id(next(arrays)) for _ in range(count_leaves(spec))]) for name, spec in row.fields}


# --- commit ---------------------------------------------------------------------------------------------------------


def commit(layout: Layout, delta: Delta, leaves: Sequence[Any], live: Sequence[Any]) -> Any:
    """Write a Delta to the live objects, and return the output of the function.

    ``leaves`` are in the order of :meth:`Delta.owners`.

    Raises:
      TraceContextError: if a live object that is to change belongs to another trace; then nothing has been written.
    """
    check_commit(layout, delta, live)
    n, remaining = len(layout.rows), iter(leaves)
    restructured = [(i, row) for i, row in delta.rows if i < n and type(row) is VariableRow]
    cells = [live[i]._cell for i in (*delta.values, *[i for i, _ in restructured])]
    # The leaves are taken in their order: those of old Variables, of new ones, of nodes, of the output.
    values = list(itertools.islice(remaining, len(delta.values)))
    values += [_stored(row, next(remaining)) for _, row in restructured]
    objects = [*live, *_new_objects([row for i, row in delta.rows if i >= n], remaining)]
    nodes = [(i, row, _contents(objects[i], row, objects, remaining)) for i, row in delta.rows if type(row) is NodeRow]
    metadata = [row.metadata.fresh() for _, row in restructured]
    out = value_of(delta.root, objects, remaining)

    def write() -> None:
        write_cells(cells, values)
        for (i, row), items in zip(restructured, metadata, strict=True):
            _restructure_variable(objects[i], row, items)
        for i, row, contents in nodes:
            _restructure_node(objects[i], row, contents, i >= n or not only_arrays_change(layout.rows[i], row))

    even_if_interrupted(write)  # it cannot fail
    return out


def even_if_interrupted(write: Callable[[], None]) -> None:
    """Call a function, and call it again if it is interrupted; a second call must not change the result."""
    ensure_stack()
    try:
        write()
    except BaseException:
        with contextlib.suppress(Exception):  # if it has failed, it fails again
            write()
        raise


def _new_objects(rows: Sequence[Row], leaves: Iterator[Any]) -> list[Any]:
    """The objects of new rows: Variables, with the next of the leaves as their values, and nodes, still empty."""
    added = [row for row in rows if type(row) is VariableRow]
    values = list(map(_stored, added, leaves))
    made = iter(make_variables([row.type for row in added], values, [row.metadata.fresh() for row in added]))
    return [next(made) if type(row) is VariableRow else new_node(row.type, row.marks.value) for row in rows]


def _stored(row: VariableRow, value: Any) -> Any:
    """A value, as a Variable with this row stores it."""
    metadata = row.metadata.value
    return as_stored(value, metadata) if "ref" in metadata else value


def variable_of(row: VariableRow, value: Any) -> Variable:
    """A Variable of the running trace, as a row says, with this value."""
    return make_variable(row.type, value, row.metadata.fresh())


def _contents(node: Any, row: NodeRow, objects: Sequence[Any], leaves: Iterator[Any]) -> dict[Any, Any]:
    """The new contents of a live node; an unchanged field keeps the very object that it holds."""
    held = node._nnx_contents()
    values = {name: held[name] if spec is SAME else value_of(spec, objects, leaves) for name, spec in row.fields}
    return {name: values[name] for name in row.names}


def _restructure_node(node: Any, row: NodeRow, contents: dict[Any, Any], structural: bool) -> None:
    """Give a node the class and contents of its row; and the marks, if the change is ``structural``."""
    if type(node) is not row.type:
        object.__setattr__(node, "__class__", row.type)
    node._nnx_fill(contents)
    if structural:
        object.__setattr__(node, "_nnx_marks", dict(row.marks.value) or None)
        node._nnx_changed()


def _restructure_variable(variable: Variable, row: VariableRow, metadata: Any) -> None:
    """Give a live Variable the class of its new row, and this metadata, a copy of that in the row."""
    if type(variable) is not row.type:
        object.__setattr__(variable, "__class__", row.type)
    object.__setattr__(variable, "_metadata", metadata)
    variable._nnx_changed()


def check_commit(layout: Layout, delta: Delta, live: Sequence[Any]) -> None:
    """Raise :class:`TraceContextError` if a live object that ``delta`` changes belongs to another trace."""
    trace, n = current_trace(), len(layout.rows)
    for i in delta.values:
        if live[i]._cell.trace is not trace:
            raise _refusal(layout, live[i], i, "the new value")
    for i, row in delta.rows:
        if i < n and trace is None and is_lent_elsewhere(live[i]._nnx_trace):
            wait_for_loans()  # until the trace of another thread gives the object back (closures.py)
        if i < n and live[i]._nnx_trace is not trace:
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
    """Name what a row of a Delta would change in an object, for a message."""
    if type(row) is VariableRow:
        return "the metadata"
    names = [name for name, spec in row.fields if spec is not SAME]
    return f"attribute {', '.join(map(repr, names))}" if names else "the attributes"
