"""The body of control flow: a function of Modules, traced once, as a function of leaves.

``cond``, ``while_loop`` and ``scan`` need to know what a function changes *before* they can build the operation: which
Variables have to be carried, which rows every branch must return. So a body is traced to a jaxpr first, on the shapes
of the leaves; its Delta is read off, and the operation is built from the jaxpr. User code runs once.

A *program* is the whole operation as a function of leaves. Called eagerly it goes through ``jax.jit``, kept with the
function it was made from: so a loop called again at top level neither traces nor compiles again, as with ``jax.lax``.
A body that refers to a Module outside of it is traced at each call: the Module may have changed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..core.captures import CapturedObjects, watching
from ..core.errors import NnxError, format_path
from ..core.graph import (
    SAME,
    After,
    Delta,
    Layout,
    NodeRow,
    Packed,
    Ref,
    Row,
    Spec,
    Tree,
    VariableRow,
    commit,
    count_leaves,
)
from ..core.graphdef import describe_spec
from ..core.tracing import at_top_level, jaxpr_as_fun
from .lift import cross, place_of


class BodyError(NnxError, TypeError, ValueError):
    """The body of a loop or a branch that changes something it may not change."""


Owner = tuple[int, int]


class Body(NamedTuple):
    """A traced function: ``run(leaves)`` gives the leaves of ``delta``, in the order that ``commit`` takes them."""

    run: Callable[[Sequence[Any]], list[Any]]
    delta: Delta
    owners: tuple[Owner, ...]  # of each leaf: its row (-1: the output) and which leaf of that row
    paths: tuple[tuple, ...]  # of each leaf
    labels: tuple[Any, ...]  # of each leaf, if asked for
    types: list[Any]  # of each leaf: its jax.ShapeDtypeStruct, or a pytree of them


def type_of(value: Any) -> Any:
    """The ``jax.ShapeDtypeStruct`` of an array, or a pytree of them."""
    return jax.tree.map(lambda x: _struct(jax.typeof(x)), value)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


@jtu.register_static
class _Traced:
    """What tracing found, on its way out of ``jax.make_jaxpr``."""

    def __init__(self, *found: Any):
        self.found = found


def trace_body(
    function: Callable,
    layout: Layout,
    leaves: Sequence[Any],
    label: Callable[[After, Any], Sequence[Any]] | None = None,
) -> Body:
    """Trace a function of the objects of a layout; ``leaves`` are arrays or their shapes.

    ``label(after, output)`` gives the labels of the leaves that come back.
    """

    def pure(leaves: Sequence[Any]) -> tuple[list[Any], _Traced]:
        out, after = cross(function, layout, leaves, (), lambda out: (out, out))
        labels = () if label is None else tuple(label(after, out))
        return after.leaves, _Traced(after.delta, tuple(after.owners), after.paths, labels)

    closed, (shapes, traced) = jax.make_jaxpr(pure, return_shape=True)(list(leaves))
    structure = jtu.tree_structure(shapes)
    evaluate = jaxpr_as_fun(closed)

    def run(leaves: Sequence[Any]) -> list[Any]:
        return structure.unflatten(evaluate(*jtu.tree_leaves(list(leaves))))

    delta, owners, paths, labels = traced.found
    return Body(run, delta, owners, paths, labels, structure.unflatten(map(_struct, closed.out_avals)))


# --- positions: the leaves of a layout, by row ----------------------------------------------------------------------


def positions_of(layout: Layout) -> dict[Owner, int]:
    """(row, which leaf of it) -> position among the leaves; row -1 has those of the pytree itself."""
    found = {(i, 0): k for k, i in enumerate(layout.variables)}
    for i, row in enumerate(layout.rows):
        if isinstance(row, NodeRow):
            for k in range(sum(count_leaves(spec) for _, spec in row.fields)):
                found[i, k] = len(found)
    for k in range(count_leaves(layout.root)):
        found[-1, k] = len(found)
    return found


def refuse_structure(layout: Layout, body: Body, what: str) -> None:
    """Raise :class:`BodyError` if a body changed anything but values."""
    refuse(structural_changes(layout, body), what)


def refuse(changes: Sequence[Change], what: str) -> None:
    """Raise :class:`BodyError` if there are any changes."""
    if changes:
        lines = [f"  {format_path(path)}: {said}" for path, said, _ in changes]
        raise BodyError(_STRUCTURE.format(what=what, changes="\n".join(lines)))


class Change(NamedTuple):
    """What a body did to the structure of an object, and whether it only added something."""

    path: tuple
    said: str
    added: bool


def structural_changes(layout: Layout, body: Body) -> list[Change]:
    """What a body changed in the objects it was given, but for values."""
    changes: list[Change] = []
    for i, row in structural_rows(layout, body).items():
        if i >= len(layout.rows):
            continue
        old, path = layout.rows[i], layout.paths[i]
        if isinstance(old, VariableRow) or old.type is not row.type:
            changes.append(Change(path, "its type or metadata", added=False))
        elif isinstance(row, NodeRow) and isinstance(old, NodeRow):
            changes += _field_changes(path, old, row, functools.partial(_describe_field, layout))
    return changes


_STRUCTURE = """\
The {what} may change values, but not the structure of the objects that it is given:
{changes}
Set attributes up before (a Variable of the final shape instead of None), and assign to `variable.value` inside."""


def _describe_field(layout: Layout, spec: Spec | None) -> str:
    if not isinstance(spec, Ref):
        return "nothing" if spec is None else describe_spec(spec)
    if spec.index >= len(layout.rows):
        return "a new object"
    return f"the {layout.rows[spec.index].type.__name__} {format_path(layout.paths[spec.index])}"


def _field_changes(path: tuple, old: NodeRow, row: NodeRow, describe: Callable[[Spec | None], str]) -> list[Change]:
    before, after = dict(old.fields), dict(row.fields)
    changes = []
    for name in {**before, **after}:
        a, b = before.get(name), after.get(name)
        if b is SAME or (a is not None and a == b):
            continue
        was, now = describe(a), describe(b)
        changes.append(Change((*path, name), f"{was} became {now}", added=a is None))
    if not changes and (old.names != row.names or old.marks != row.marks):
        changes.append(Change(path, "the order of its attributes, or what was declared about them", added=False))
    return changes


def check_same_output(expected: Spec, found: Spec, what: str, hint: str) -> None:
    """Raise :class:`BodyError` unless two outputs have the same structure and refer to the same objects."""
    if expected == found:
        return
    if isinstance(expected, Tree) and isinstance(found, Tree) and expected.treedef == found.treedef:
        pairs = zip(expected.paths, expected.children, found.children, strict=True)
        lines = [
            f"  {format_path(path)}: {describe_spec(a)} became {describe_spec(b)}" for path, a, b in pairs if a != b
        ]
    else:
        lines = [f"  {describe_spec(expected)} became {describe_spec(found)}"]
    raise BodyError(f"{what}\n" + "\n".join(lines) + f"\n{hint}")


def widened(leaves: Sequence[Any], positions: Sequence[int], types: Sequence[Any]) -> list[Any] | None:
    """``leaves`` with the weakly typed ones at ``positions`` cast to the dtype that comes out; None if all have it.

    As in ``jax.lax``: a loop that adds floats may start from the Python number 0.
    """
    found = list(leaves)
    for k, type_ in zip(positions, types, strict=True):
        if jtu.tree_structure(found[k]) == jtu.tree_structure(type_):
            found[k] = jax.tree.map(_widened, found[k], type_)
    return None if all(a is b for a, b in zip(found, leaves, strict=True)) else found


def _widened(x: Any, type_: Any) -> Any:
    now = jax.typeof(x)
    wider = now.weak_type and now.dtype != type_.dtype and jnp.promote_types(now.dtype, type_.dtype) == type_.dtype
    return jnp.asarray(x, type_.dtype) if wider else x


def check_types(values: Sequence[Any], types: Sequence[Any], paths: Sequence[tuple], what: str) -> None:
    """Check that a body returns what it carries with the shape and dtype that went in.

    Raises:
      BodyError: naming the paths, and both types.
    """
    changes = type_changes(values, types, paths)
    if changes:
        raise BodyError(
            f"The {what} must keep the shape and dtype of what it carries:\n"
            + "\n".join(changes)
            + "\nCast or reshape inside, or start with the type that comes out."
        )


def type_changes(values: Sequence[Any], types: Sequence[Any], paths: Sequence[tuple]) -> list[str]:
    """A line for each value that has another type than expected."""
    return [
        f"  {place_of(path)}: {_types(value)} became {_types(type_)}"
        for value, type_, path in zip(values, types, paths, strict=True)
        if _signature(value) != _signature(type_)
    ]


def _signature(value: Any) -> tuple[Any, Any]:
    leaves, structure = jtu.tree_flatten(value)
    return structure, [(jnp.shape(x), jax.typeof(x).dtype) for x in leaves]


def _types(value: Any) -> str:
    structure, types_ = _signature(value)
    names = [f"{dtype}{list(shape)}" for shape, dtype in types_]
    return names[0] if jtu.treedef_is_leaf(structure) else f"{structure} with {', '.join(names)}"


# --- programs -------------------------------------------------------------------------------------------------------


class Program:
    """An operation on leaves, jitted for calls at top level."""

    __slots__ = ("captures", "function", "jitted")

    def __init__(self, function: Callable):
        self.function, self.jitted = function, jax.jit(_watched(function))
        self.captures = False  # whether it was found to use live objects that it is not given

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if at_top_level() and not self.captures:
            try:
                return self.jitted(list(leaves))
            except CapturedObjects:
                self.captures = True
        return self.function(list(leaves))


def _watched(function: Callable) -> Callable:
    def watched(leaves: list[Any]) -> Any:
        with watching():
            return function(leaves)

    return watched


class _Programs(dict):
    """The programs of a function, by key; not pickled with it."""

    def __reduce__(self) -> tuple:
        return _Programs, ()


_KEPT = 64  # programs per function: with a lambda for the other branch each call makes another key


def program_of(functions: tuple[Callable, ...], key: tuple, make: Callable[[], Program]) -> Program:
    """The program made for functions under ``key``, kept on the first of them, so that it goes when that goes.

    Only for plain functions: what another callable does may change.
    """
    if not all(isinstance(f, types.FunctionType) for f in functions):
        return make()
    programs = functions[0].__dict__.setdefault("_nnx_programs", _Programs())
    key = (functions, *key)  # functools.wraps hands the programs on to the wrapper
    program = programs.get(key)
    if program is None:
        if len(programs) >= _KEPT:
            del programs[next(iter(programs))]
        program = programs[key] = make()
    return program


@jtu.register_static
class Result:
    """The Delta of a program, static in its output."""

    __slots__ = ("delta",)

    def __init__(self, delta: Delta):
        self.delta = delta

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and self.delta == other.delta

    def __hash__(self) -> int:
        return hash(self.delta)


def run_program(program: Program, packed: Packed, *extra: Any) -> Any:
    """Run a program, which returns (leaves, Result), on the packed leaves and ``extra`` ones; commit."""
    leaves, result = program([*packed.leaves, *extra])
    return commit(packed.layout, result.delta, leaves, packed.objects)


def delta_of(layout: Layout, touched: Collection[Owner], body: Body | None, root: Spec) -> tuple[Delta, list[Owner]]:
    """The Delta that replaces the touched leaves and makes the structural changes of a body; and whose leaves it takes.

    The owners are in the order in which ``commit`` takes the leaves, without those of the output.
    """
    structural = {} if body is None else structural_rows(layout, body)
    touched = {owner for owner in touched if owner[0] not in structural}
    rows: dict[int, Row] = dict(structural)
    for i, row in enumerate(layout.rows):
        if isinstance(row, NodeRow) and i not in structural:
            fields, used = [], 0
            for name, spec in row.fields:
                own = {(i, used + k) for k in range(count_leaves(spec))}
                used += len(own)
                fields.append((name, SAME if touched.isdisjoint(own) else spec))
                touched |= own if fields[-1][1] is not SAME else set()
            if any(spec is not SAME for _, spec in fields):
                rows[i] = row._replace(fields=tuple(fields))
    values = [i for i in layout.variables if (i, 0) in touched]
    owners = [(i, 0) for i in values]
    owners += [(i, 0) for i in sorted(rows) if isinstance(rows[i], VariableRow)]
    for i in sorted(rows):
        if i in structural and isinstance(rows[i], NodeRow) and body is not None:
            owners += [owner for owner in body.owners if owner[0] == i]
        elif isinstance(rows[i], NodeRow):
            owners += sorted(owner for owner in touched if owner[0] == i)
    return Delta(tuple(values), tuple(sorted(rows.items())), root), owners


def structural_rows(layout: Layout, body: Body) -> dict[int, Row]:
    """The rows of a body's Delta that are new, or change more than the arrays that a node holds."""
    found = {}
    for i, row in body.delta.rows:
        old = layout.rows[i] if i < len(layout.rows) else None
        if not (isinstance(old, NodeRow) and isinstance(row, NodeRow) and _only_arrays(old, row)):
            found[i] = row
    return found


def _only_arrays(old: NodeRow, row: NodeRow) -> bool:
    before = dict(old.fields)
    same_fields = all(spec is SAME or spec == before.get(name) for name, spec in row.fields)
    return same_fields and old.type is row.type and old.names == row.names and old.marks == row.marks
