"""Stacking: when the leaves of a State may have more or fewer axes than those of the object.

A State may come out of a mapped function, or be a slice of a stack of models, so a transformation has added or removed
axes. Such leaves are accepted where this cannot be a mistake:

    how the leaves of the State differ from those of the object             in merge   in update
    none is an array any more: a function gave labels, say, in their place  yes        no
    all of a *kind* have gained, or lost, the same adjacent axes            yes        if all of the kind are given
    several have gained the same first axis, and no other shape differs     yes        no

A kind is a type of Variable, or bare arrays. The functions return the avals (shapes and dtypes) that the leaves must
have in order to fit (fitting.py): those of the object, or the given ones where these are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .differences import Aval
from .graphdef import avals_of


def avals_once_mapped(kinds: Sequence[Any], before: Sequence[Aval], values: Sequence[Any]) -> list[Aval]:
    """The avals that the leaves must have for ``merge``, given all of their values."""
    after = avals_of(values)
    if all(new is None and x is not None for x, old, new in zip(values, before, after, strict=True) if old is not None):
        return [None] * len(before)
    before = _some_stacked(before, after)  # first, since it counts leaves: those of a whole kind are among the several
    return _some_stacked(_stacked(kinds, before, after), after)


def avals_of_whole_kinds(kinds: Sequence[Any], before: Mapping[int, Aval], after: Sequence[Aval]) -> Mapping[int, Aval]:
    """The avals that the given leaves must have for ``update``, by position; ``kinds`` are those of all leaves."""
    missing = {kind for k, kind in enumerate(kinds) if k not in before}
    stacked = _stacked([kinds[k] for k in before], [*before.values()], after)
    return {k: old if kinds[k] in missing else aval for (k, old), aval in zip(before.items(), stacked, strict=True)}


def _stacked(kinds: Sequence[Any], before: Sequence[Aval], after: Sequence[Aval]) -> list[Aval]:
    """The avals that leaves must have if all leaves of a kind may have gained or lost the same axes."""
    changes: dict[Any, set] = {}
    for kind, old, new in zip(kinds, before, after, strict=True):
        if old is not None and new is not None:
            change = _stacking(old[0], new[0])
            changes[kind] = changes.get(kind, change) & change
    stacked = {kind for kind, found in changes.items() if found}
    return [
        (new[0], old[1]) if old and new and kind in stacked else old
        for kind, old, new in zip(kinds, before, after, strict=True)
    ]


def _stacking(old: tuple[int, ...], new: tuple[int, ...]) -> set[tuple[bool, int, tuple[int, ...]]]:
    """How adjacent axes may have been added to a shape, or removed: all possible (whether removed, where, sizes)."""
    long, short = (old, new) if len(old) > len(new) else (new, old)
    n = len(long) - len(short)
    places = [k for k in range(len(short) + 1) if n and long[:k] + long[k + n :] == short]
    return {(long is old, k - end, long[k : k + n]) for k in places for end in (0, len(long))}


def _some_stacked(before: Sequence[Aval], after: Sequence[Aval]) -> list[Aval]:
    """The avals that leaves must have if a function may have been mapped over some of them, such as those of a filter.

    Then several leaves have other shapes, all with the same new first axis; axes of length 1 do not count.
    """
    pairs = zip(before, after, strict=True)
    others = [(old[0], new[0]) for old, new in pairs if old and new and old[0] != new[0]]
    lengths = {new[:1] for _, new in others}
    mapped = len(lengths) == 1 < len(others) and lengths != {(1,)}
    if not mapped or any(_without_ones(old) != _without_ones(new[1:]) for old, new in others):
        return list(before)
    return [(new[0], old[1]) if old and new else old for old, new in zip(before, after, strict=True)]


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n != 1]
