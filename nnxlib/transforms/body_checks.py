"""Checks of bodies: what the body of a loop or a branch may not change, and the messages.

All branches must make the same changes of structure. The body of a loop may only change values, and put objects in the
places of others of the same structure; and it must keep the types of what it carries. Each message names the path of
the attribute, and what it was and became.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..core.annotations import NamedTuple
from ..core.calls import recorded_types
from ..core.errors import BodyError, format_path, listed
from ..core.graphdef import describe_spec, differing_pytrees
from ..core.layout import Layout
from ..core.recordings import is_appended_to, is_recorded
from ..core.rows import SAME, NodeRow, Ref, Row, Spec, Tree, VariableRow, same_treedef
from .body import Body, structural_rows
from .leaf_checks import BECAME, type_changes


def refuse_structural(changes: Sequence[Change], what: str) -> None:
    """Raise :class:`BodyError` if there are any changes."""
    if changes:
        head = f"The {what} may change values, but not the structure of the objects that it is given:"
        lines = [f"{format_path(change.path)}: {change.said}" for change in changes]
        hint = _RECORDING if any(change.recorded for change in changes) else ""
        raise BodyError(listed(head, lines, _SET_UP + hint))


class Change(NamedTuple):
    """A change that a body made to the structure of an object."""

    row: int  # of the object
    path: tuple
    said: str  # in the message
    added: bool  # whether it only added an attribute
    recorded: Recording | None = None  # if that is a recording

    @property
    def is_taken_out(self) -> bool:
        """Whether it is a recording that the ``nnx.capture`` around it takes out."""
        return self.recorded is not None and self.recorded.kind in recorded_types()


class Recording(NamedTuple):
    """A recording that a body has made."""

    node: int  # its row
    name: str  # of the attribute
    kind: type  # of the Variable
    appends: bool
    row: int  # of the Variable


def structural_changes(layout: Layout, body: Body, replaced: Mapping[int, int] = MappingProxyType({})) -> list[Change]:
    """The changes that a body made to the objects it was given, apart from values and ``replaced`` objects."""
    changes: list[Change] = []
    new = {i: row.type for i, row in body.delta.rows if i >= len(layout.rows)}
    for i, row in structural_rows(layout, body).items():
        if i in new:
            continue
        old, path = layout.rows[i], layout.paths[i]
        if isinstance(old, VariableRow) or old.type is not row.type:
            changes.append(Change(i, path, "its type or metadata", added=False))
        elif isinstance(row, NodeRow):
            recorded = _recordings(i, row, new)
            describe = functools.partial(_describe_field, layout)
            found = _field_changes(i, path, old, _with_old(row, replaced), describe)
            changes += [x._replace(recorded=recorded.get(x.path[-1])) if x.added else x for x in found]
    return changes


def _recordings(node: int, row: NodeRow, new: Mapping[int, type]) -> dict[Any, Recording]:
    """The new recordings in a node, by name."""
    marks = row.marks.value
    names = {name: spec.index for name, spec in row.fields if isinstance(spec, Ref) and is_recorded(marks, name)}
    recorded = {name: i for name, i in names.items() if i in new}
    return {name: Recording(node, name, new[i], is_appended_to(marks, name), i) for name, i in recorded.items()}


_SET_UP = """\
Set attributes up before (a Variable of the final shape instead of None), and assign to `variable.value` inside."""

_RECORDING = """
What sow and perturb record in such a body comes out of an nnx.capture around the call; with capture_noop=True they do \
nothing outside of one."""


def _describe_field(layout: Layout, spec: Spec | None) -> str:
    if not isinstance(spec, Ref):
        return describe_spec(spec, layout)
    if spec.index >= len(layout.rows):
        return "a new object"
    return f"the {layout.rows[spec.index].type.__name__} {format_path(layout.paths[spec.index])}"


def _field_changes(
    i: int, path: tuple, old: NodeRow, row: NodeRow, describe: Callable[[Spec | None], str]
) -> list[Change]:
    before, after = dict(old.fields), dict(row.fields)
    changes = []
    for name in {**before, **after}:
        a, b = before.get(name), after.get(name)
        if b is SAME or a == b:
            continue
        was, now = describe(a), describe(b)
        changes.append(Change(i, (*path, name), f"{was} became {now}", added=a is None))
    if not changes and (old.names != row.names or old.marks != row.marks):
        changes.append(Change(i, path, "the order of its attributes, or what was declared about them", added=False))
    return changes


def _with_old(row: NodeRow, replaced: Mapping[int, int]) -> NodeRow:
    """A row that refers to the old objects in place of those that replace them."""

    def translated(spec: Spec) -> Spec:
        if isinstance(spec, Ref):
            return Ref(replaced.get(spec.index, spec.index))
        return spec._replace(children=tuple(map(translated, spec.children))) if isinstance(spec, Tree) else spec

    return row._replace(fields=tuple([(name, translated(spec)) for name, spec in row.fields]))


def successors(
    layout: Layout, body: Body, pairs: Sequence[tuple[Spec, Spec]], is_free: Callable[[int], bool] = lambda row: False
) -> dict[int, int] | None:
    """The new objects that a body leaves in place of those it was given: row of the new one -> row of the old one.

    A loop can go on with new objects if they have the structure of the old ones, and no old one is used any longer.
    None if the structure differs, or if an object is both replaced and kept.

    The ``pairs`` are the specs of all that each iteration is given, and of what the next one is given in its place. The
    structure of an object ``is_free``, given by its row, if each iteration has another one.
    """
    new, n = dict(body.delta.rows), len(layout.rows)
    found: dict[int, int] = {}
    stack = list(pairs)
    while stack:
        a, b = stack.pop()
        if isinstance(a, Ref) and isinstance(b, Ref):
            if b.index not in found:
                found[b.index] = a.index
                old = layout.rows[a.index]
                if a == b:
                    below = _kept_fields(old, old if is_free(a.index) else new.get(a.index, old))
                else:
                    below = _replaced_fields(old, new[b.index]) if b.index >= n else None
                if below is None:
                    return None
                stack += below
            elif found[b.index] != a.index:
                return None
        elif isinstance(a, Tree) and isinstance(b, Tree):
            if not same_treedef(a.treedef, b.treedef):
                return None
            stack += zip(a.children, b.children, strict=True)
        elif a != b:
            return None
    if len(set(found.values())) < len(found):
        return None
    return {j: i for j, i in found.items() if j != i}


def _kept_fields(old: Row, new: Row) -> list[tuple[Spec, Spec]]:
    """The specs in a kept object that lead to others, before and after; `structural_changes` finds all else."""
    if not (isinstance(old, NodeRow) and isinstance(new, NodeRow)):
        return []
    after = dict(new.fields)
    pairs = [(spec, spec if after[name] is SAME else after[name]) for name, spec in old.fields if name in after]
    return [(spec, now) for spec, now in pairs if isinstance(now, Ref | Tree)]


def _replaced_fields(old: Row, new: Row) -> list[tuple[Spec, Spec]] | None:
    """The fields of an object and of the one in its place; None if that has another structure."""
    if not (isinstance(old, NodeRow) and isinstance(new, NodeRow)):
        return [] if old == new else None
    if old._replace(fields=()) != new._replace(fields=()):  # their class, names and marks
        return None
    after = dict(new.fields)
    return [(spec, after[name]) for name, spec in old.fields]


def refuse_written(layout: Layout, body: Body, replaced: Mapping[int, int], what: str) -> None:
    """Raise :class:`BodyError` if a body has changed objects that it replaces: the changes would be lost."""
    written = {owner[0] for owner in body.owners}.intersection(replaced.values())
    if written:
        paths = ", ".join(format_path(layout.paths[i]) for i in sorted(written))
        raise BodyError(
            f"The {what} changes {paths}, and puts another object in its place, so that the change would be lost. "
            "Keep the object that was changed, or leave it alone."
        )


def check_same_output(
    layout: Layout, expected: Spec, found: Spec, what: str, hint: str, root: str = "", said: str = BECAME
) -> None:
    """Raise :class:`BodyError` unless two outputs, at the path ``root``, have one structure and the same objects."""
    if expected == found:
        return
    lines = []
    if isinstance(expected, Tree) and isinstance(found, Tree):
        if expected.paths == found.paths and not same_treedef(expected.treedef, found.treedef):
            differing = differing_pytrees(expected.treedef, found.treedef, expected.paths)
            lines = [f"{format_path(path, root)}: {said.format(a, b)}" for path, a, b in differing]
        else:
            before, after = (dict(zip(tree.paths, tree.children, strict=True)) for tree in (expected, found))
            lines = what_became(layout, before, after, root, said)
    raise BodyError(listed(what, lines or what_became(layout, {(): expected}, {(): found}, root, said), hint))


def what_became(
    layout: Layout, before: Mapping[tuple, Spec], after: Mapping[tuple, Spec], root: str, said: str = BECAME
) -> list[str]:
    """A line for each place, below ``root``, that held something else before than after."""
    places = [(path, before.get(path), after.get(path)) for path in {**before, **after}]
    describe = functools.partial(_describe_field, layout)
    return [f"{format_path(path, root)}: {said.format(describe(a), describe(b))}" for path, a, b in places if a != b]


RETURN_ALIKE = """\
Return the same pytree, with the same objects in the same places, changed in place, or new ones of the same structure \
that take their places, which have the same attributes, set in the same order, and the same static values."""


def retyped(leaves: Sequence[Any], positions: Sequence[int], types: Sequence[Any]) -> list[Any] | None:
    """``leaves`` with weakly typed ones at ``positions`` cast to the dtype that comes out; None if there are none.

    As in ``jax.lax``: a loop that adds floats may start from the Python number 0, and one that adds bfloat16 from 0.0.
    """
    found = list(leaves)
    for k, type_ in zip(positions, types, strict=True):
        if jtu.tree_structure(found[k]) == jtu.tree_structure(type_):
            found[k] = jax.tree.map(_retyped, found[k], type_)
    arrays = zip(jtu.tree_leaves(found), jtu.tree_leaves(list(leaves)), strict=True)  # a pytree is made anew
    return None if all(a is b for a, b in arrays) else found


def _retyped(x: Any, type_: Any) -> Any:
    now = jax.typeof(x)
    yields = now.weak_type and now.dtype != type_.dtype and jnp.result_type(x, type_.dtype) == type_.dtype
    return jnp.asarray(x, type_.dtype) if yields else x


def check_types(values: Sequence[Any], types: Sequence[Any], paths: Sequence[tuple], what: str) -> None:
    """Check that a body returns what it carries with the types that went in.

    Raises:
      BodyError: naming the paths, and both types.
    """
    changes = type_changes(values, types, paths)
    if changes:
        head = f"The {what} must keep the types of what it carries:"
        advice = "Cast, reshape or reshard inside, or start with the type that comes out."
        raise BodyError(listed(head, changes, advice))
