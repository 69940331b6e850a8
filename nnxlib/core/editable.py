"""Editable values: static values that can be changed in place, and how a change is found.

A list of settings, a set of words or a configuration object is part of the program. It reports no change, so it is
asked at each call whether it is what it was. To freeze it again and compare the keys (static.py) takes long if there
is much in it. So an :class:`Editable` notes which containers are in the value, and which objects each of them holds. As
long as these are the very same, and can be changed in no other way, so is the value. If they are not, or if that cannot
be known, as for what is in a NumPy array, the value is frozen.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from .annotations import NamedTuple
from .errors import StaticValueError
from .identity import Identified
from .stamps import Stamp
from .static import ATOMS, MUTABLE_CONTAINERS, RULES, Const, has_hash, state_of

_Reader = Callable[[Any], list[Any]]  # of what a container holds


class Compared(Protocol):
    """What can be changed without telling a stamp, so that it is compared with what it was: an Editable, or foreign."""

    def is_unchanged(self) -> bool: ...


class Editable:
    """A static value that can be changed in place, and what it was."""

    __slots__ = ("_const", "_held", "value")

    def __init__(self, value: Any, const: Const):
        self.value, self._const = value, const
        self._held: list[_Held] | None = None  # by the containers in it; None until it is first asked, or if not known

    def is_unchanged(self) -> bool:
        """Whether the value equals what it was, as a static value."""
        if _is_held_still(self._held):
            return True
        held = _held_in(self.value)
        try:
            same = Const.of(self.value) == self._const
        except StaticValueError:  # the walk will say where
            return False
        self._held = held if same and _is_held_still(held) else None  # another thread may have edited it in between
        return same


def have_changed(values: Iterable[Compared]) -> bool:
    """Whether any of these values is not what it was."""
    return not all(x.is_unchanged() for x in values)


class Guard:
    """A stamp for a description with values that are compared: valid while the stamp is, and they are unchanged."""

    __slots__ = ("_compared", "_stamp")

    def __init__(self, stamp: Stamp, compared: Sequence[Compared]):
        self._stamp, self._compared = stamp, compared

    @property
    def valid(self) -> int:
        """The edition of the stamp; False if anything has changed."""
        for x in self._compared:  # as `have_changed`, which is two calls more
            if not x.is_unchanged():
                return False
        return self._stamp.valid


class _Held(NamedTuple):
    """The items that a container held."""

    container: Any
    read: _Reader
    items: list[Any]


def _is_held_still(held: list[_Held] | None) -> bool:
    """Whether all containers hold the very same objects; False if it is not known what they held."""
    return held is not None and all(_are_same(x.read(x.container), x.items) for x in held)


def _are_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _held_in(value: Any) -> list[_Held] | None:
    """What each container in a value holds; None if there is something else of which static.py sees more than its id.

    What static.py compares by its own ``==`` is taken for unchangeable only if that is the identity of the object.
    """
    found: list[_Held] = []
    seen: set[int] = set()
    stack = [value]
    while stack:
        x = stack.pop()
        kind = type(x)
        if kind in _SIMPLE or isinstance(x, _UNCHANGEABLE) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, (tuple, frozenset)):
            stack += x
            continue
        read = _READERS.get(kind)
        if read is None:
            if kind in RULES or isinstance(x, (*MUTABLE_CONTAINERS, Mapping, Sequence)):
                return None
            if isinstance(x, Identified) or _has_identity(kind):
                continue
            if has_hash(x) and not hasattr(kind, "__dataclass_fields__"):
                return None
            read = _attributes
        items = read(x)
        found.append(_Held(x, read, items))
        stack += items
    return found


def _has_identity(kind: type) -> bool:
    """Whether the objects of a class are equal to themselves only."""
    own = kind.__hash__, kind.__eq__
    return own == (object.__hash__, object.__eq__) and not hasattr(kind, "__dataclass_fields__")


def _attributes(x: Any) -> list[Any]:
    state = state_of(x)
    return [type(x), *state, *state.values()]


def _of_function(x: types.FunctionType) -> list[Any]:
    """The parts by which a function is compared; none of one with a closure or attributes, compared by identity."""
    return [] if x.__closure__ or x.__dict__ else [x.__code__, x.__defaults__, x.__kwdefaults__]


def _of_dict(x: Any) -> list[Any]:
    return [*x, *x.values()]


_SIMPLE = ATOMS | {float, complex, slice, range, types.CodeType, types.BuiltinFunctionType}

# For static.py these are their own keys.
_UNCHANGEABLE = (
    *(type, enum.Enum, np.number, np.bool_, np.character, np.datetime64, np.dtype, jax.Array),
    *(jax.sharding.PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.AbstractMesh),
)

_READERS: dict[type, _Reader] = {
    list: list,
    deque: list,
    set: list,
    dict: _of_dict,
    OrderedDict: _of_dict,
    Counter: _of_dict,
    types.MappingProxyType: _of_dict,
    defaultdict: lambda x: [x.default_factory, *x, *x.values()],
    types.FunctionType: _of_function,
    functools.partial: lambda x: [x.func, x.args, x.keywords],
}
