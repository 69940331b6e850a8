"""Marks: what is compared of the values to which a jitted function refers, to notice that a Module has come.

Of most values that is the type. A tuple has the same type whatever is in it. So of a tuple of constants the mark is the
tuple itself; of another it is a :class:`TupleMark`, which does not keep alive the models in it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from .annotations import NamedTuple

CONSTANTS = jax.Array, np.ndarray, np.generic, str, bytes, int, float, complex, type(None)


def is_constant_type(kind: type) -> bool:
    """Whether values of this type are constants of a compiled function, as in JAX: numbers, text, arrays and None."""
    return issubclass(kind, CONSTANTS)


def is_fixed(kind: type) -> bool:
    """Whether values of this type are containers whose members never change: tuples, named ones too, and frozensets."""
    return issubclass(kind, tuple | frozenset) and not kind.__dictoffset__


def are_constants(values: Iterable[Any]) -> bool:
    """Whether all values are constants, or tuples or frozensets of constants.

    It calls no Python function for each: a history of ten thousand losses is looked through whenever one is added.
    """
    values = [*values]
    kinds = {*map(type, values)}
    while fixed := {*filter(is_fixed, kinds)}:
        held = {id(x): x for x in values if type(x) in fixed}  # each once: a tuple may hold another many times
        values = [*itertools.chain.from_iterable(held.values())]
        kinds = {*kinds - fixed, *map(type, values)}
    return all(map(is_constant_type, kinds))


class TupleMark(NamedTuple):
    """The mark of a tuple or frozenset of which some members are no constants."""

    kind: type
    members: list[Any]  # of each its TupleMark; of a constant the type; a weak reference to others, if there can be one


def mark_of(x: Any) -> Any:
    """The mark of a value."""
    if not is_fixed(type(x)):
        return type(x)
    return x if are_constants([x]) else _mark_in_tuple(x)


def _mark_in_tuple(x: Any) -> Any:
    if is_fixed(type(x)):
        return TupleMark(type(x), [*map(_mark_in_tuple, x)])
    try:
        return type(x) if is_constant_type(type(x)) else weakref.ref(x)  # the same reference for the same object
    except TypeError:  # a list, say
        return x


def are_same(mark: Any, other: Any) -> bool:
    """Whether two marks are the same."""
    if type(mark) is not TupleMark or type(other) is not TupleMark:
        return mark is other
    same = mark.kind is other.kind and len(mark.members) == len(other.members)
    return same and all(map(are_same, mark.members, other.members))
