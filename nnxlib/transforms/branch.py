"""``cond`` and ``switch``: one of several functions of Modules, chosen at run time.

Within an ``nnx.capture`` branches may record different things. All of them come out, as zeros if the chosen branch has
not recorded them: the branches are traced once more, and zeros are added to each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..core.errors import OUTPUT, ArgumentError, BodyError, UsageError, describe, format_path, listed
from ..core.graph import After, Delta
from ..core.layout import Layout
from ..core.missing import MISSING, is_missing
from ..core.packing import pack_live
from ..core.recordings import fill_up
from ..core.rows import ROOT, NodeRow, Owner, count_leaves, touched_rows
from ..core.tracing import boundary
from .body import Body, as_scalar, own_states, structural_rows, trace_body, zeros
from .body_checks import check_same_output, structural_changes
from .callables import resolve
from .leaf_checks import type_changes, type_of
from .lift import Arguments, Outcome
from .naming import named
from .program import call_program, weakly

R = TypeVar("R")


@boundary
def cond(
    pred: Any, true_fun: Callable[..., R], false_fun: Callable[..., R], *operands: Any, operand: Any = MISSING
) -> R:
    """Apply ``true_fun`` or ``false_fun`` to the operands; ``jax.lax.cond`` with state.

    As there, ``cond(pred, x, f, y, g)`` is ``f(x)`` or ``g(y)``.

    Args:
      pred: a scalar, taken as a truth value.
      true_fun: applied if it is true. What it changes in the operands appears on the objects that were passed in.
      false_fun: applied if not; its output must have the same structure.
      *operands: arrays and Modules.
      operand: a single one by name, as in ``jax.lax.cond``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> counter = nnx.Variable(jnp.array(0))
    >>> def count(v): v.value += 1
    >>> nnx.cond(True, count, lambda v: None, counter)
    >>> int(counter)
    1

    Raises:
      TypeError: if ``pred`` is not a boolean or a real number.
      BodyError: if the outputs, or the structure of the operands afterwards, differ between the two.
    """
    if len(operands) == 2 and callable(operands[1]) and not callable(true_fun):  # (pred, x, f, y, g), as JAX allows
        true_fun, false_fun = functools.partial(false_fun, true_fun), functools.partial(*reversed(operands))
        operands = ()
    number = as_scalar(pred, "The predicate of nnx.cond")
    if not any(jnp.issubdtype(number.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        raise ArgumentError(f"The predicate of nnx.cond must be a boolean or a real number, got {describe(number)}.")
    return _apply_one(jnp.asarray(number, bool), (false_fun, true_fun), _all_operands(operands, operand))


@boundary
def switch(index: Any, branches: Sequence[Callable[..., R]], *operands: Any, operand: Any = MISSING) -> R:
    """Apply the function number ``index`` to the operands; ``jax.lax.switch`` with state.

    Args:
      index: an integer scalar, clamped to the number of branches.
      branches: functions of the operands; their outputs must have the same structure. Each may change values of its
        own choice; a structural change must be the same in all.
      *operands: arrays and Modules.
      operand: a single one by name, as in ``jax.lax.switch``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.switch(1, [lambda x: x + 1, lambda x: x * 10], jnp.array(2.0)).item()
    20.0

    Raises:
      TypeError: if ``index`` is not an integer, or there is one function in place of a list of them.
      BodyError: if the outputs, or the structure of the operands afterwards, differ between branches.
    """
    if not isinstance(branches, Iterable):
        raise ArgumentError(
            f"nnx.switch takes a list of functions, nnx.switch(index, [f, g], *operands), but got {describe(branches)}."
        )
    branches = tuple(branches)
    if not branches:
        raise UsageError("nnx.switch needs at least one branch.")
    number = as_scalar(index, "The index of nnx.switch")
    if not jnp.issubdtype(number.dtype, jnp.integer):
        raise ArgumentError(f"The index of nnx.switch must be an integer, got {describe(number)}.")
    return _apply_one(number, branches, _all_operands(operands, operand))


def _all_operands(operands: tuple, operand: Any) -> tuple:
    if is_missing(operand):
        return operands
    if operands:
        raise ArgumentError("Pass operands by position, or a single one by its name, operand=..., but not both.")
    return (operand,)


def _apply_one(number: jax.Array, branches: Sequence[Callable[..., R]], operands: Sequence[Any]) -> R:
    """Apply the branch of a number to the operands; of two branches, a boolean chooses the second if it is true."""
    resolved = [resolve(f) for f in branches]
    count = len(operands)
    arguments = Arguments((*operands, *((args, kwargs) for _, args, kwargs in resolved)), {})
    functions = tuple([weakly(f) for f, _, _ in resolved])
    numbers: dict[int, int] = {}  # of functions to which nothing is bound, by id: one that comes again is traced once
    first = [k if any(bound) else numbers.setdefault(id(f), k) for k, (f, *bound) in enumerate(resolved)]

    def run(layout: Layout, leaves: list[Any]) -> Any:
        *leaves, chosen = leaves
        calls = _once_each(lambda k: _branch(functions[k], count, k), first)
        all_arrays = functools.partial(_with_all_arrays, layout)
        traced = functools.partial(trace_body, layout=layout, leaves=leaves, adjust=all_arrays)
        bodies = _once_each(traced, calls)
        recorded = _recorded(layout, bodies)
        if recorded:
            bodies = _once_each(lambda call: traced(_recording_all(call, recorded)), calls)
        runs, delta = _aligned(layout, leaves, bodies)
        if chosen.dtype == bool:  # without the clamp of a switch, which is a kernel of its own
            return jax.lax.cond(chosen, *reversed(runs), leaves), Outcome(delta)
        return jax.lax.switch(chosen, runs, leaves), Outcome(delta)

    return call_program(functions, ("switch",), run, arguments, number)


def _once_each(function: Callable[[Any], R], items: Sequence[Any]) -> list[R]:
    """``function`` of each item, called once for equal items."""
    found = {item: function(item) for item in dict.fromkeys(items)}
    return [found[item] for item in items]


def _branch(f: Callable, count: int, k: int) -> Callable:
    """Branch number ``k`` on the operands and what was bound to each branch."""

    def call(*args: Any) -> Any:
        bound, bound_kwargs = args[count + k]
        return own_states(f(*bound, *args[:count], **bound_kwargs))

    return named(call, f)


def _with_all_arrays(layout: Layout, after: After, out: Any) -> tuple[After, tuple]:
    """The result of a branch, with all arrays of each node whose structure has changed.

    So branches that change a node in the same way, but other arrays in it, have the same rows.
    """
    rows = dict(after.delta.rows)
    for i, row in rows.items():
        now = after.rows[i]
        if i < len(layout.rows) and isinstance(row, NodeRow) and isinstance(now, NodeRow) and now != layout.rows[i]:
            pairs = zip(row.fields, now.fields, strict=True)
            fields = [field if count_leaves(field[1]) else changed for changed, field in pairs]
            rows[i] = row._replace(fields=tuple(fields))
    return After.of(after.walk, after.rows, after.delta._replace(rows=tuple(rows.items()))), ()


def _recorded(layout: Layout, bodies: Sequence[Body]) -> dict[tuple, Any]:
    """The recordings of the branches for a capture, each with its longest type; empty if all record the same."""
    found: list[dict[tuple, Any]] = []
    for body in bodies:
        types = dict(zip(body.owners, body.types, strict=True))
        made = [x.recorded for x in structural_changes(layout, body) if x.recorded is not None and x.is_taken_out]
        found.append({x[:-1]: types[x.row, 0] for x in made})
    longest: dict[tuple, Any] = {}
    for what, type_ in (item for recorded in found for item in recorded.items()):
        if what not in longest or _length(type_) > _length(longest[what]):
            longest[what] = type_
    lengths = [[(what, _length(type_)) for what, type_ in x.items()] for x in found]  # in the order of recording
    return {} if all(x == lengths[0] for x in lengths) else longest


def _length(type_: Any) -> int:
    return len(jax.tree.leaves(type_))


def _recording_all(call: Callable, recorded: dict[tuple, Any]) -> Callable:
    """A branch that records what any branch records, zeros where it would not record anything itself."""

    def run(*args: Any) -> Any:
        objects = pack_live(Arguments(args, {})).objects
        out = call(*args)
        for (node, name, kind, appends), type_ in recorded.items():
            fill_up(objects[node], name, kind, zeros(type_), appends)
        return out

    return run


def _aligned(layout: Layout, inputs: list[Any], bodies: list[Body]) -> tuple[list[Callable], Delta]:
    """The branches as functions that all return the same leaves, those that any of them changes; and their Delta."""
    first, *others = bodies
    for k, body in enumerate(others, 1):
        _check_structures(layout, first, body, k)
    delta, owners = _joint_delta(layout, bodies)
    sources = [_sources(body, owners, layout) for body in bodies]
    types = [list(map(type_of, _taken(source, body.types, inputs))) for body, source in zip(bodies, sources)]
    paths = _taken(sources[0], first.leaf_paths, layout.leaf_paths)
    for k, other in enumerate(types[1:], 1):
        changes = type_changes(types[0], other, paths, _IN_BRANCHES.format(k=k))
        if changes:
            raise BodyError(listed(_TYPES.format(k=k), changes, _CAST))
    return list(map(_running, bodies, sources)), delta


def _joint_delta(layout: Layout, bodies: Sequence[Body]) -> tuple[Delta, list[Owner]]:
    """A Delta with the leaves that any of the branches changes, and the owners of these.

    New objects, structural changes and the output are those of the first branch; they are alike in all.
    """
    first = bodies[0]
    structural = structural_rows(layout, first)
    others = {ROOT, *structural}
    touched = {owner for body in bodies for owner in body.owners if owner[0] not in others}
    rows = structural | touched_rows(layout.rows, touched)
    values = tuple([i for i in layout.variables if (i, 0) in touched])
    delta = Delta(values, tuple(sorted(rows.items())), first.delta.root)
    return delta, delta.owners(dict(enumerate(layout.rows)) | structural)


_TYPES = "Branch 0 and branch {k} (for cond: false_fun and true_fun) end with different types:"
_IN_BRANCHES = "{{}} in branch 0, {{}} in branch {k}"
_CAST = "Cast, reshape or reshard in one of them; what a branch leaves alone has the type that came in."


def _check_structures(layout: Layout, first: Body, other: Body, k: int) -> None:
    """Raise :class:`BodyError` unless branch ``k`` returns, and leaves objects with, the structure of branch 0."""
    check_same_output(
        layout,
        first.delta.root,
        other.delta.root,
        f"Branch 0 and branch {k} (for cond: false and true) return different structures:",
        "Return the same pytree, with the same objects in the same places, from every branch, or nothing at all.",
        OUTPUT,
        _IN_BRANCHES.format(k=k),
    )
    if structural_rows(layout, first) == structural_rows(layout, other):
        return
    changes = [structural_changes(layout, body) for body in (first, other)]
    lines = [
        f"branch {number}: {format_path(change.path)}: {change.said}"
        for number, own, others in ((0, *changes), (k, *reversed(changes)))
        for change in own
        if change not in others
    ]
    raise BodyError(listed(_STRUCTURES.format(k=k), lines or ["what they attach is not alike"], _ALIKE))


_STRUCTURES = "Branch 0 and branch {k} (for cond: false and true) leave objects with different structures:"
_ALIKE = "Let all branches attach, delete and replace the same attributes, or do it before."


def _sources(body: Body, owners: Sequence[Owner], layout: Layout) -> list[int]:
    """The place of each leaf in a list of those that a branch returns, followed by those that it was given."""
    place = {owner: k for k, owner in enumerate(body.owners)}
    return [place[x] if x in place else len(place) + layout.owner_positions[x] for x in owners]


def _taken(source: Sequence[int], returned: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    found = (*returned, *given)
    return [found[k] for k in source]


def _running(body: Body, source: Sequence[int]) -> Callable:
    """A branch as a function of leaves; no partial, whose signature JAX needs longer to find."""
    return lambda leaves: _taken(source, body.run(leaves), leaves)
