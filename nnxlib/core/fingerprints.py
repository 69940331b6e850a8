"""Fingerprints: what is kept of a value to which a jitted function refers, to notice that a Module has taken its place.

The fingerprint of most values is their type. A tuple has the same type whatever it holds, so the fingerprint of a tuple
of constants is the tuple itself. That of any other tuple is a :class:`TupleFingerprint`, which does not keep alive the
Modules in the tuple.
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


class TupleFingerprint(NamedTuple):
    """The fingerprint of a tuple or frozenset in which some members are no constants.

    For each member it has the TupleFingerprint of a tuple, the type of a constant, or a weak reference to anything else
    (the value itself, if it allows no weak reference).
    """

    kind: type
    members: list[Any]

    def __eq__(self, other: object) -> bool:
        """Members are compared by identity: for weak references, ``==`` would compare the Modules by value."""
        if type(other) is not TupleFingerprint or (self.kind, len(self.members)) != (other.kind, len(other.members)):
            return False
        pairs = zip(self.members, other.members, strict=True)
        return all(x is y or (type(x) is TupleFingerprint and x == y) for x, y in pairs)


def fingerprint_of(x: Any) -> Any:
    """The fingerprint of a value."""
    if not is_fixed(type(x)):
        return type(x)
    return x if are_constants([x]) else _fingerprint_of_member(x)


def _fingerprint_of_member(x: Any) -> Any:
    if is_fixed(type(x)):
        return TupleFingerprint(type(x), [*map(_fingerprint_of_member, x)])
    try:
        return type(x) if is_constant_type(type(x)) else weakref.ref(x)  # the same reference for the same object
    except TypeError:  # a list, say
        return x
