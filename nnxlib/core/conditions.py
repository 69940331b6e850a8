"""Conditions: what must hold at the places without a captured object, or else a function may now find one there.

A compiled function has the numbers, texts and arrays that it refers to as constants, and what is None at a place may be
a Module later. To trace again whenever any of these changes would be too often, and JAX does not do so. But if a Module
comes to such a place, the function has to be traced again. So of all places that the function may look at *types* are
compared at each call, where all these constants count as one type:

- The members of a container, and the attributes of a plain object, are compared at once (:class:`Members`).
- What stands alone is looked up: in a closure, in globals, in a class.

The functions, containers and objects on the ways to these places must be the same as before.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Iterable
from typing import Any

from .graphdef import GraphDef
from .objects import Node
from .references import CONTAINERS, Find, Found, LookUp, Way, is_constant, is_left, is_of_library
from .variables import Variable

_MOST_MEMBERS = 100  # of a container whose members are compared at each call; of a longer one only the length is
_NO_HOLDERS = Node, Variable, GraphDef, type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial

_FIXED = ()  # in place of the attributes of a frozen dataclass


class Conditions:
    """The conditions for one function. They refer to none of the ``functions``, so they can be kept on one of these.

    Args:
      found: what the function refers to.
      others: the ways to objects that are not captured.
      known: ids of ways and containers with which steps need not be taken, see :meth:`Way.steps`; gets more of them.
      functions: those to which the conditions must not refer.
    """

    __slots__ = ("ends", "members", "steps")

    steps: list[tuple[LookUp, Find]]  # a look-up, and a reference to what that has found
    ends: list[tuple[LookUp, types.CellType]]  # a look-up, and the type of what that has found
    members: list[Members]

    def __init__(self, found: Found, others: Iterable[Way], known: set[int], functions: Collection[Any] = ()):
        containers = _containers(found)
        alone = [way for way in [*found.ends, *others] if _is_alone(way) and way.is_looked_along(found.names)]
        known |= {id(way.value) for way, _ in containers}  # their lengths need not be compared
        ways = [way for way, _ in containers] + [way.before for way in alone if way.before is not None]
        steps = [step for way in ways for step in way.steps(known)]
        ends = [way for way in alone if not way.look_up.refers_to(functions)]
        self.steps = [step for step in steps if not step[0].refers_to(functions)]
        self.ends = [(way.look_up, types.CellType(type(way.value))) for way in ends]
        self.members = [Members(container) for _, container in containers if container is not _FIXED]

    def __bool__(self) -> bool:
        return bool(self.steps or self.ends or self.members)

    def hold(self) -> bool:
        """Whether each holder is at its place, and what is there is of the same type, or is another constant."""
        try:
            for look_up, before in self.steps:
                x = look_up.find()
                if x is None or x is not before():
                    return False
            for look_up, cell in self.ends:
                now, kind = type(look_up.find()), cell.cell_contents
                if now is not kind:
                    if not (is_constant(now) and is_constant(kind)):
                        return False
                    cell.cell_contents = now
            for members in self.members:
                if [*map(type, members.held)] != members.types and not members.are_as_before():
                    return False
        except Exception:  # of a look-up, or a container that another thread changes
            return False
        return True


class Members:
    """The members of a container, or the attributes of an object: their types must stay, but constants may come and go.

    It keeps none of them alive.
    """

    __slots__ = ("_container", "_count", "_others", "held", "types")

    held: Collection[Any]  # the members, if they are few: the types of others are not compared as long as their number
    types: list[type] | None  # is the same

    def __init__(self, container: Any):
        self._container = container
        self._note(self._others_now())

    def _note(self, others: list[type]) -> None:
        held = self._container
        self._others, self._count = others, len(held)
        if self._count > _MOST_MEMBERS:
            self.held, self.types = (), None
        else:
            self.held = held.values() if isinstance(held, dict) else held
            self.types = [*map(type, self.held)]

    def _others_now(self) -> list[type]:
        """The types of the members that are no constants, nor left there by a trace."""
        held = self._container
        members = [*held, *held.values()] if isinstance(held, dict) else [*held]
        return [type(x) for x in members if not (is_constant(type(x)) or is_left(x))]

    def are_as_before(self) -> bool:
        """To be asked if ``types`` are not those of what is ``held``."""
        if self.types is None and len(self._container) == self._count:
            return True
        others = self._others_now()
        if others != self._others:
            return False
        self._note(others)
        return True


def _containers(found: Found) -> list[tuple[Way, Any]]:
    """The ways to containers and plain objects that the function may look at, with what holds the members of each."""
    held = [(way, _held_by(way.value)) for way in found.ways]
    return [(way, members) for way, members in held if members is not None and way.is_looked_along(found.names)]


def _held_by(x: Any) -> Any:
    """The container that has the members of a container, or the attributes of an object; None for all else.

    It is ``_FIXED`` for an object whose attributes neither come nor go.
    """
    if issubclass(type(x), CONTAINERS):
        return x
    if issubclass(type(x), _NO_HOLDERS) or is_of_library(vars(type(x))):
        return None
    if _is_frozen(x):
        return _FIXED
    try:
        attributes = x.__dict__
    except Exception:  # of a weak proxy, or a class's own __getattr__
        return None
    return attributes.values() if type(attributes) is dict else None


def _is_frozen(x: Any) -> bool:
    """Whether this is an instance of a frozen dataclass."""
    return getattr(getattr(type(x), "__dataclass_params__", None), "frozen", False)


def _is_alone(way: Way) -> bool:
    """Whether what is at the end of a way may be replaced there, and is not compared with all that is beside it."""
    if way.before is None or not _finds(way.look_up, type(way.value)):
        return False
    holder, kind = way.before.value, way.look_up.kind
    if issubclass(type(holder), tuple | frozenset | types.MethodType | functools.partial) or _is_frozen(holder):
        return False
    if kind in ("reference", "context", "class"):
        return True
    if kind == "attribute":
        return not isinstance(holder, types.FunctionType)  # its defaults
    return _held_by(holder) is None


def _finds(look_up: LookUp, kind: type) -> bool:
    """Whether a look-up finds something of this very type; not if it fails."""
    try:
        return type(look_up.find()) is kind
    except Exception:
        return False
