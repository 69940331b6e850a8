"""Chains of look-ups: how a function reaches a value to which it refers.

A function refers to what is in its closure and its globals, and to what these hold in turn. A :class:`Chain` is the
last look-up on the way to a value (look_ups.py), and the chain to the *holder* in which it is made. For a function that
computes ``trainer.models["average"](x)``, and with names in place of holders::

    the function  <-  look up "trainer"  <-  look up "models"  <-  look up "average"

Three questions are asked of a chain (what for is in docs/how_it_works.md, "Closures"):

- Does it still lead to the same value? Each of its :meth:`~Chain.steps` can be made again.
- Is what is now found on another chain at the same place? Then both have the same :meth:`~Chain.address`.
- May code with certain names follow it (:meth:`~Chain.may_be_followed`)?
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

from . import look_ups
from .annotations import NamedTuple
from .fingerprints import are_constants
from .look_ups import BY_NAME, BY_SYNTAX, OF_CLASS, LookUp, weak_key

Reference = Callable[[], Any]  # to a value that a look-up has found before

MAPPINGS = dict, types.MappingProxyType  # the latter is a view of a dict, which may be edited
MUTABLE_CONTAINERS = list, deque, set, *MAPPINGS
# Code may reach what is in these without naming it.
_TRANSPARENT = (
    dict, types.MappingProxyType, types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial,
    staticmethod, classmethod, property,
)  # fmt: skip
_DEFAULTS = "__defaults__", "__kwdefaults__"
OVER_ALL = "vars", "dir", "__dict__"  # code with one of these names may go over all attributes of an object
# The attributes with which a function, a UserDict or weak dict, a ChainMap, and a member of an Enum wrap something.
_WRAPPED = "__wrapped__", "data", "maps", "_value_"


class Step(NamedTuple):
    """A look-up of a chain, to be made again, and what it has to find."""

    look_up: LookUp
    before: Reference  # to what the look-up has found before
    is_root: bool = False  # whether this is an object that the function captures


class Chain(NamedTuple):
    """A chain from a function to a value: the last look-up, and the chain to the holder in which it is made."""

    value: Any  # what the look-up has found
    look_up: LookUp
    before: Chain | None  # None for the function itself

    def further(self, look_up: LookUp) -> Chain:
        """The chain that goes on with a look-up in its value."""
        if look_up.kind is look_ups.item and look_up.holder is self.value and issubclass(type(self.value), tuple):
            look_up = LookUp(look_ups.in_tuple, self.look_up, look_up.key)
        return Chain(look_up.found(), look_up, self)

    def back(self) -> Iterator[tuple[Chain, Any]]:
        """(the chain up to a look-up, the holder in which this is made) for each look-up, the last first."""
        chain = self
        while chain.before is not None:
            yield chain, chain.before.value
            chain = chain.before

    def steps(self, known: set[int]) -> Iterator[Step]:
        """Its look-ups, the last first; also: a container has the same length, an object the same dict of attributes.

        ``known`` has the ids of the chains, containers and such dicts whose steps were yielded before, by other chains.
        """
        for chain, holder in self.back():
            if id(chain) in known:
                return
            known.add(id(chain))
            if not issubclass(type(chain.value), tuple):  # its members are looked up through it
                yield Step(chain.look_up, _reference(chain.value))
            if isinstance(holder, MUTABLE_CONTAINERS) and id(holder) not in known:
                known.add(id(holder))
                yield Step(LookUp(look_ups.has_length, holder, len(holder)), lambda: True)
            if chain.look_up.kind is look_ups.own:
                yield from same_attributes(holder, known)

    @property
    def is_named(self) -> bool:
        """Whether code names the value itself: as a variable in a closure, a default, a global or an attribute."""
        if self.before is None:
            return False
        if type(self.before.value) is types.FunctionType:
            return self.look_up.kind in (look_ups.in_closure, look_ups.entry, look_ups.inside)
        of = self.before.look_up
        return (of.kind is look_ups.attribute and of.key in _DEFAULTS) or _is_by_name(self.look_up, self.before.value)

    def may_be_followed(self, names: Collection[str], along: Collection[int] = ()) -> bool:
        """Whether code with these names may follow the chain: no attribute on it has another name.

        ``along`` has the ids of values that the code may reach along another chain.
        """
        over_all = any(name in names for name in OVER_ALL)
        for chain, holder in self.back():
            kind, _, key = chain.look_up
            if id(chain.value) in along:
                return True
            if not _is_by_name(chain.look_up, holder) or (over_all and kind is look_ups.own):
                continue
            if key not in names and key not in BY_SYNTAX and key not in OF_CLASS:
                return False
        return True

    def address(self, shapes: dict[int, Hashable]) -> tuple[Hashable, ...]:
        """The key of each look-up, the last first; it stays the same if the chain leads to another value.

        It contains the code of each function on the chain, and the class of each other value, since others may do
        something else with what they hold. And it says which members a container has besides constants, since the
        function may go over all of them. ``shapes`` has this, by the ids of containers, as known from other chains.
        """
        found: list[Hashable] = []
        for chain, holder in self.back():
            if isinstance(holder, MUTABLE_CONTAINERS) and id(holder) not in shapes:
                shapes[id(holder)] = _shape(holder)
            kind = holder.__code__ if type(holder) is types.FunctionType else type(holder)
            found += [chain.look_up.address, weak_key(kind), shapes.get(id(holder))]
        return tuple(found)


def _is_by_name(look_up: LookUp, holder: Any) -> bool:
    """Whether code that makes a look-up in this holder has to name its key."""
    return look_up.kind in BY_NAME and not issubclass(type(holder), _TRANSPARENT) and look_up.key not in _WRAPPED


def _shape(container: Any) -> Hashable:
    """The number of members of a container that are no constants; of a dict with simple keys, their keys in order."""
    if not isinstance(container, MAPPINGS):
        return sum(not are_constants([x]) for x in list(container))
    items = list(container.items())
    keys = [key for key, x in items if not are_constants([key, x])]
    return tuple(keys) if are_simple(keys) else len(keys)


def are_simple(keys: Iterable[Any]) -> bool:
    """Whether all keys are text, bytes, integers, None, members of an Enum or tuples of these, which can be kept."""
    return all(
        type(key) in _SIMPLE or isinstance(key, enum.Enum) or (type(key) is tuple and are_simple(key)) for key in keys
    )


_SIMPLE = str, int, bytes, bool, type(None)  # no float, since a NaN does not equal itself


def same_attributes(x: Any, known: set[int]) -> Iterator[Step]:
    """The steps to the class of an object and to the dict of its attributes, unless this is ``known``.

    Either may be replaced by another one.
    """
    cls, attributes = type(x), x.__dict__
    if id(attributes) not in known:
        known.add(id(attributes))
        yield Step(LookUp(look_ups.attribute, x, "__class__"), lambda: cls)
        yield Step(LookUp(look_ups.attribute, x, "__dict__"), lambda: attributes)


def _reference(value: Any) -> Reference:
    """A weak reference, so that no step keeps a model alive; a strong one to containers, which allow no other."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
