"""Differences between two models or States, found by path, and their texts.

A :class:`Difference` is a place at which the two differ. ``nnx.diff`` shows them as a table. An error shows them as
changes or, if the first of the two is what was expected, as misfits:

    kind       as a change                      as a misfit
    removed    b: float32[3] became nothing     b: missing, expected float32[3]
    added      b: nothing became float32[3]     b: unexpected float32[3]
    shape      b: (3,) became (2,)              b: expected shape (3,), got (2,)

Structures are compared in ``graphdef.py``, the leaves of States here. Each operation decides which differences count:
it passes a function that compares two values, and ignores other differences.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.tree_util import all_leaves, tree_flatten_with_path

from .annotations import NamedTuple
from .errors import Path, StateMismatchError, describe, did_you_mean, format_path, listed
from .rows import same_treedef
from .traversals import path_key, sorted_by_path, with_ints
from .variable_names import is_defined_again
from .variables import Variable, stored_value

Aval = tuple[tuple[int, ...], Any] | None  # the shape and dtype of an array; None for anything else


class Difference(NamedTuple):
    """One place where two things differ: ``kind`` says in what, ``before`` and ``after`` are as shown to a user.

    >>> import nnxlib as nnx
    >>> list(nnx.diff(nnx.Dropout(0.5), nnx.Dropout(0.1)))
    [Difference(path=('rate',), kind='static', before='0.5 (float)', after='0.1 (float)')]
    """

    path: tuple
    kind: str
    before: str
    after: str


Comparison = Callable[[Path, Any, Any], Iterable[Difference]]

# --- in words -------------------------------------------------------------------------------------------------------


def as_change(found: Difference, root: str = "<root>") -> str:
    """Write a difference as what something was and has become; ``root`` is written for an empty path."""
    return f"{format_path(found.path) if found.path else root}: {found.before} became {found.after}"


def as_misfit(found: Difference) -> str:
    """Write a difference as what was expected and what was given.

    >>> as_misfit(Difference(('bias',), 'shape', '(3,)', '(2,)'))
    'bias: expected shape (3,), got (2,)'
    """
    path, kind, expected, given = found
    if kind == "removed":
        said = f"missing, expected {expected}"
    elif kind == "added":
        said = f"unexpected {given}"
    else:
        said = f"expected {'' if kind == 'type' else f'{kind} '}{expected}, got {given}"
    return f"{format_path(path)}: {said}"


def refuse(found: Sequence[Difference], head: str, remedy: str, error: type[Exception] = StateMismatchError) -> None:
    """Raise an error that lists these misfits, if there are any."""
    if found:
        raise error(listed(head, list(map(as_misfit, found)), remedy))


def path_hint(unknown: Sequence[Path], known: Sequence[Path]) -> str:
    """What may have been meant by unknown paths: a near name, a path that was written as one key, or what is there."""
    top: dict[str, Any] = {}  # the keys that are there, with those below each
    for path in known:
        functools.reduce(lambda level, key: level.setdefault(str(key), {}), path, top)
    there = ""
    for path in map(with_ints, unknown):
        names, n = top, 0
        while n < len(path) and str(path[n]) in names:
            names, n = names[str(path[n])], n + 1
        key = str(path[n]) if n < len(path) else ""
        if near := did_you_mean([key], names):
            return near
        for sep in "./":
            if sep in key and key.split(sep)[0] in names:
                return f" Each level has its own key: nnx.traversals.unflatten_mapping(state, sep={sep!r}) nests them."
        found = ", ".join([*names][:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        if found and not there:
            there = f" {format_path(path[:n]) if n else 'It'} has: {found}."
    return there


_SHOWN = 8


def _describe_leaf(x: Any) -> str:
    return f"{type(x).__name__} ({describe(x._nnx_value)})" if isinstance(x, Variable) else describe(x)


# --- comparing ------------------------------------------------------------------------------------------------------


def aval_of(value: Any) -> Aval:
    """The shape and dtype of an array, None for anything else."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return (tuple(shape), dtype) if isinstance(shape, tuple) and dtype is not None else None


def array_differences(path: Path, x: Any, y: Any) -> list[Difference]:
    """The differences of two values in shape and dtype; in type, if one is an array and the other is not."""
    p, q = aval_of(x), aval_of(y)
    if p == q:
        return []
    if p is None or q is None:
        return [Difference(path, "type", describe(x), describe(y))]
    pairs = zip(("shape", "dtype"), p, q, strict=True)
    return [Difference(path, kind, str(before), str(after)) for kind, before, after in pairs if before != after]


def misfits(path: Path, expected: Any, given: Any) -> list[Difference]:
    """As :func:`array_differences`, but a Python number is an array without axes, of any dtype."""
    found = array_differences(path, expected, given)
    with_a_number = found and not _NUMBERS.isdisjoint((type(expected), type(given)))
    return [] if with_a_number and getattr(expected, "shape", ()) == getattr(given, "shape", ()) else found


_NUMBERS = frozenset({bool, int, float, complex})
ANY_VALUE = type("any value", (), {"__doc__": "Stands, under its name, for what is not known: everything fits it."})()


def leaf_differences(
    before: Mapping[Path, Any], after: Mapping[Path, Any], compare: Comparison = misfits
) -> list[Difference]:
    """Compare the leaves of two States by path, the arrays in them by ``compare``; metadata are left out."""
    found: list[Difference] = []
    for path, x in before.items():
        if path not in after:
            found.append(Difference(path, "removed", _describe_leaf(x), "nothing"))
            continue
        y = after[path]
        if isinstance(x, Variable):
            if isinstance(y, Variable) and not is_defined_again(type(x), type(y)):
                found.append(Difference(path, "type", type(x).__name__, type(y).__name__))
            x = x._nnx_value
        y = stored_value(y)
        if x is not ANY_VALUE:
            whole = all_leaves((x, y)) or aval_of(x) or aval_of(y)
            found += compare(path, x, y) if whole else _pytree_differences(path, x, y, compare)
    found += [Difference(p, "added", "nothing", _describe_leaf(y)) for p, y in after.items() if p not in before]
    return sorted_by_path(found, operator.attrgetter("path"))


def _pytree_differences(path: Path, x: Any, y: Any, compare: Comparison) -> list[Difference]:
    (keyed, treedef), (others, other) = map(tree_flatten_with_path, (x, y))
    if not same_treedef(treedef, other):
        return [Difference(path, "type", _describe_tree(x, treedef), _describe_tree(y, other))]
    pairs = zip(keyed, others, strict=True)
    return [d for (keys, p), (_, q) in pairs for d in compare((*path, *map(path_key, keys)), p, q)]


def _describe_tree(x: Any, treedef: Any) -> str:
    return str(treedef) if treedef.num_leaves and not all_leaves([x]) else describe(x)
