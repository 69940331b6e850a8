"""References: what a function refers to, and the ways that lead there.

A jitted function finds out which objects it captures while it is traced. At later calls it must know, without a trace,
whether it would still capture the same ones. So it keeps the *ways* that lead from the function to these objects, and
follows them at each call: through closures, plain containers, plain objects and their classes, weak references, what a
thread or a context has for itself, and other functions. Each step of a way is one look-up (look_ups.py).

A place that the function looks at may also hold None or a number when it is traced, and a Module later. So the ways to
such places are followed, too, if code of the function names them: each is an *end*, see conditions.py.

From the globals of its functions half of a program can be reached. So those that functions of other files read are
looked into last, and only if something that is sought has not been found; but Modules and None are found at once. If it
is still missing, code may have reached it by text, as in ``globals()["model"]``, or by the ``__getattr__`` of a module.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from . import look_ups
from .calls import is_observed
from .closures import RunningCode, is_lent_elsewhere
from .identity import Identified
from .look_ups import BY_NAME, BY_SYNTAX, LookUp, is_of_library, weakly
from .objects import Node
from .tracing import current_trace

Reference = Callable[[], Any]  # to a value that a look-up has found before

_MOST = 1000  # values to find: a function may refer to half of a program
_MOST_TO_FIND = 30_000  # look-ups, as long as some that are sought are not found; each takes a few microseconds
_MOST_ELSEWHERE = 100  # functions of other files, the globals of which are then looked into

MAPPINGS = dict, types.MappingProxyType  # the latter shows a dict, which may be edited
MUTABLE_CONTAINERS = list, deque, set, *MAPPINGS
_CONSTANTS = jax.Array, np.ndarray, np.generic, str, bytes, int, float, complex, type(None)
_LEADS_NOWHERE = *_CONSTANTS, type, types.ModuleType
# What is in these is also found without being named.
_TRANSPARENT = (
    dict, types.MappingProxyType, types.FunctionType, types.MethodType, functools.partial, staticmethod, classmethod
)  # fmt: skip
_BY_ANY_NAME = "getattr", "hasattr", "vars", "dir", "__dict__"  # code with one of these names may read any attribute
_DEFAULTS = "__defaults__", "__kwdefaults__"
_OVER_ALL = "vars", "dir", "__dict__"  # code with one of these may go over all attributes of an object
# Attributes with what a function, a UserDict or weak dict, a ChainMap, a member of an Enum wraps.
_WRAPPED = "__wrapped__", "data", "maps", "_value_"


class Step(NamedTuple):
    """One step of a way."""

    look_up: LookUp
    before: Reference  # to what the look-up has found
    is_root: bool = False  # whether that is what the function captures


class Way(NamedTuple):
    """A way from a function to a value: how the value is looked up, and the way to what it is looked up in."""

    value: Any
    look_up: LookUp
    before: Way | None  # of the function itself

    def back(self) -> Iterator[tuple[Way, Any]]:
        """The ways that end with each step of this one, the last first; with the value in which the step is made."""
        way = self
        while way.before is not None:
            yield way, way.before.value
            way = way.before

    def steps(self, known: set[int]) -> Iterator[Step]:
        """Its steps, the last first.

        A container must also keep its length, and an object the dict of its attributes. ``known`` are the ids of the
        ways, containers and such dicts whose steps are known already, from other ways.
        """
        for way, holder in self.back():
            if id(way) in known:
                return
            known.add(id(way))
            yield Step(way.look_up, _reference(way.value))
            if isinstance(holder, MUTABLE_CONTAINERS) and id(holder) not in known:
                known.add(id(holder))
                yield Step(LookUp(look_ups.has_length, holder, len(holder)), lambda: True)
            if way.look_up.kind is look_ups.own:
                yield from same_attributes(holder, known)

    @property
    def is_named(self) -> bool:
        """Whether code names the value itself: a function, in its closure, defaults or globals, or as an attribute."""
        if self.before is None:
            return False
        if type(self.before.value) is types.FunctionType:
            return self.look_up.kind in (look_ups.in_closure, look_ups.entry, look_ups.absent, look_ups.inside)
        of = self.before.look_up
        return (of.kind is look_ups.attribute and of.key in _DEFAULTS) or _is_by_name(self.look_up, self.before.value)

    def is_looked_along(self, names: Collection[str], along: Collection[int] = ()) -> bool:
        """Whether code with these names may go along the way: it leads over no attribute of another name.

        ``along`` are the ids of values to which the code may go on another way.
        """
        over_all = any(name in names for name in _OVER_ALL)
        for way, holder in self.back():
            kind, _, key = way.look_up
            if id(way.value) in along:
                return True
            if not _is_by_name(way.look_up, holder) or (over_all and kind is look_ups.own):
                continue
            if key not in names and key not in BY_SYNTAX:
                return False
        return True

    def address(self, shapes: dict[int, Hashable]) -> tuple[Hashable, ...]:
        """What is looked up at each step, from the last one on; it stays the same if the way leads to another value.

        With the code of functions, and the classes of other values, on the way: others may do something else with it.
        And with what members each container has besides constants: the function may go over all of them. ``shapes``
        says that, by the ids of containers, as far as it is known from other ways.
        """
        found: list[Hashable] = []
        for way, holder in self.back():
            if isinstance(holder, MUTABLE_CONTAINERS) and id(holder) not in shapes:
                shapes[id(holder)] = _shape(holder)
            kind = holder.__code__ if type(holder) is types.FunctionType else type(holder)
            found += [way.look_up.address, weakly(kind), shapes.get(id(holder))]
        return tuple(found)


def _is_by_name(look_up: LookUp, holder: Any) -> bool:
    """Whether code that makes a look-up in a value, the holder, has to name its key."""
    return look_up.kind in BY_NAME and not issubclass(type(holder), _TRANSPARENT) and look_up.key not in _WRAPPED


class Reached(NamedTuple):
    """What can be reached from a function."""

    ways: list[Way]  # the shortest one to each value, then all others to Modules and Variables
    ends: list[Way]  # all ways to constants
    names: set[str]  # in the code of the functions among them
    again: Sequence[Way] = ()  # further ways that it may go to what leads to Modules and Variables, as to a container

    def looked_along(self, ways: Iterable[Way]) -> list[Way]:
        """Those of some ways that the function may go."""
        along = {id(way.value) for way in self.again}
        return [way for way in ways if way.is_looked_along(self.names, along)]

    def ways_to_objects(self) -> list[Way]:
        """The ways to Modules and Variables that the function may look at: it names each attribute on the way."""
        found = [way for way in self.ways if issubclass(type(way.value), Identified) and not is_left_over(way.value)]
        return self.looked_along(found)

    def used_unnoticed(self) -> list[Any]:
        """The Modules that it may use without a trace noticing it: a trace does not notice that a flag is read.

        They are those that it names, and those of which it may read an attribute.
        """
        ways = [way for way in self.ways_to_objects() if isinstance(way.value, Node)]
        return [way.value for way in ways if way.is_named or _is_read(way.value, self.names)]


def _namespace_of(f: Any) -> dict[str, Any] | None:
    """The globals of a function, of the innermost one that it wraps, or of the method by which an object is called."""
    namespace = None
    while f is not None:
        namespace = getattr(f, "__globals__", namespace)
        if isinstance(f, types.FunctionType) or hasattr(f, "__wrapped__"):
            f = getattr(f, "__wrapped__", None)
        else:
            f = getattr(f, "__func__", None) or inspect.getattr_static(type(f), "__call__", None)
            f = f if isinstance(f, types.FunctionType) else None
    return namespace


def search(
    function: Callable,
    sought: Collection[Any] = (),
    running: Iterable[RunningCode] = (),
    given: Sequence[Any] = (),
    names: Collection[str] = (),
) -> Reached:
    """Search for all that can be reached from a function.

    Of a program with very many values it finds the nearest ones. It goes on if some that are sought are not among them,
    but not without end: from a test file all tests can be reached, and a search there takes a tenth of a second or two.

    Args:
      function: where the ways begin.
      sought: what has to be found.
      running: code that ran when the function was called; its globals count as the function's own.
      given: what also counts as the function's own, such as its static arguments.
      names: those in code that was found by an earlier search, which this one may not get to.
    """
    return _Search(function, sought, running, given, names).run()


class _Search:
    """A search for what can be reached from a function, nearest first."""

    def __init__(
        self,
        function: Callable,
        sought: Collection[Any],
        running: Iterable[RunningCode],
        given: Sequence[Any],
        names: Collection[str],
    ):
        self.start = Way(function, LookUp(look_ups.itself, function), None)
        further = [Way(x, LookUp(look_ups.item, given, k), self.start) for k, x in enumerate(given)]
        self.queue = deque([self.start, *further])  # the ways that are yet to be visited, the shortest first
        self.look_ups_left, self.elsewhere_left = _MOST_TO_FIND, _MOST_ELSEWHERE
        self.missing = set(map(id, sought))
        self.namespace = _namespace_of(function)
        self.running = [code for code in running if not is_of_library(code.namespace)]
        # The names in the code visited so far; and those with which methods have been looked for in all objects.
        self.names = {*names, *[name for code in self.running for name in look_ups.names_in(code.code)]}
        self.looked_for = set[str]()
        self.unnamed = list[Way]()  # to objects with methods that are called without being named, not looked into yet
        self.visited = set[int]()  # the code of functions, by id
        self.elsewhere = deque[Way]()  # to functions of other files
        self.found, self.others, self.ends = dict[int, Way](), list[Way](), list[Way]()
        self.again = dict[Hashable, Way]()

    def run(self) -> Reached:
        self.visit_all()
        for code, namespace in reversed(self.running):
            if id(code) not in self.visited:
                self.go_on(self.start, look_ups.globals_in(code, namespace))
                self.visit_all()
        self.visit_elsewhere()
        if self.missing:
            self.look_ups_left = max(self.look_ups_left, _MOST)  # a few, even if all have been made
            namespaces = [self.namespace or {}, *[code.namespace for code in self.running]]
            for namespace in {id(x): x for x in namespaces}.values():
                self.go_on(self.start, look_ups.globals_by_text(self.names, namespace))
            self.visit_all()
            self.visit_elsewhere()
        ways = [*self.found.values(), *self.others]
        objects = [way for way in ways if issubclass(type(way.value), Identified)]
        leading = {id(holder) for way in objects for _, holder in way.back()} if self.again else ()
        again, along = list[Way](), set[int]()
        for way in self.again.values():
            if id(way.value) in leading and way.is_looked_along(self.names, along):
                again.append(way)
                along.add(id(way.value))
        return Reached(ways, self.ends, self.names, again)

    def visit_all(self) -> None:
        while self.queue and (self.missing or len(self.found) < _MOST):
            self.visit(self.queue.popleft())
            if not self.queue:
                self.look_for_methods()

    def visit_elsewhere(self) -> None:
        """Go on to the globals of functions of other files, which become more, as long as something is missing."""
        while self.missing and self.elsewhere and self.elsewhere_left:
            self.elsewhere_left -= 1
            way = self.elsewhere.popleft()
            self.go_on(way, look_ups.globals_of(way.value))
            self.visit_all()

    def look_for_methods(self) -> None:
        """Go on to methods that code names which was visited after the objects, and to those that no code names."""
        names = self.names - self.looked_for
        self.looked_for |= names
        for way in [*self.found.values()] if names else ():
            self.go_on(way, look_ups.methods_in(way.value, names))
        unnamed, self.unnamed = self.unnamed, []
        for way in unnamed:
            if way.is_looked_along(self.names):
                self.go_on(way, look_ups.methods_in(way.value, BY_SYNTAX))
            else:
                self.unnamed.append(way)

    def visit(self, way: Way) -> None:
        value = way.value
        if is_constant_type(type(value)) and not _is_kept_by_library(way):
            self.ends.append(way)
        if id(value) in self.found:
            if issubclass(type(value), Identified):  # isinstance would ask a proxy, perhaps to what is gone
                self.others.append(way)
            elif not issubclass(type(value), _LEADS_NOWHERE):
                place = _place(way.look_up)
                if place != _place(self.found[id(value)].look_up):
                    self.again[place] = way
        elif way.look_up.found() is value:  # a look-up that finds another value each time leads nowhere
            self.found[id(value)] = way
            self.missing.discard(id(value))
            if type(value) is types.FunctionType:
                self.enter(way, value)
            self.go_on(way, look_ups.look_ups_in(value, self.names))
            if look_ups.has_unnamed_methods(type(value)):
                self.unnamed.append(way)

    def enter(self, way: Way, function: types.FunctionType) -> None:
        """Go on to the globals of a function; to none of a library, which is noticed where it uses a Module."""
        is_own = function.__globals__ is self.namespace
        if not is_own and is_of_library(function.__globals__):
            return
        self.names |= look_ups.names_in(function.__code__)
        if is_own:
            self.visited.add(id(function.__code__))
            self.go_on(way, look_ups.globals_of(function))
        else:
            self.elsewhere.append(way)
            self.go_on(way, look_ups.objects_in_globals(function))

    def go_on(self, way: Way, further: Iterable[LookUp]) -> None:
        """Go on from a way with these look-ups; with none, if they are in an object that cannot be looked into."""
        with contextlib.suppress(Exception):  # a weak proxy to what is gone, or an unusual error of a __getattr__
            for look_up in itertools.islice(further, self.look_ups_left):
                self.look_ups_left -= 1
                self.queue.append(Way(look_up.found(), look_up, way))


def _place(look_up: LookUp) -> Hashable:
    """What is equal for two look-ups of the same key in the same holder."""
    kind, holder, key = look_up
    return kind, holder.address if kind is look_ups.inside else id(holder), key


def is_constant_type(kind: type) -> bool:
    """Whether values of this type, numbers, text, arrays and None, are constants of a compiled function, as in JAX."""
    return issubclass(kind, _CONSTANTS)


def is_left_over(x: Any) -> bool:
    """Whether this is a Module or Variable of a trace that has ended, of which no function can compute anything."""
    if current_trace() is not None or not issubclass(type(x), Identified):
        return False
    return x._nnx_trace is not None and not is_lent_elsewhere(x._nnx_trace)


def _is_kept_by_library(way: Way) -> bool:
    """Whether a way ends in what a function of a library has in its closure or defaults: no Module comes there."""
    holder = None if way.before is None else way.before.value
    return type(holder) is types.FunctionType and is_of_library(holder.__globals__)


def _is_read(x: Node, names: set[str]) -> bool:
    """Whether code with these names may use more of a Module than what a trace notices: calls of its methods."""
    if isinstance(x, list | dict) or not (names.isdisjoint(x._nnx_contents()) and names.isdisjoint(_BY_ANY_NAME)):
        return True
    named = {*names, *BY_SYNTAX}
    in_classes = [vars(cls)[name] for cls in type(x).__mro__[:-1] for name in vars(cls).keys() & named]
    return not all(map(is_observed, in_classes))


def _shape(container: Any) -> Hashable:
    """How many members of a container are no constants; of a dict with simple keys, which ones, in order."""
    if not isinstance(container, MAPPINGS):
        return sum(not is_constant_type(type(x)) for x in list(container))
    items = list(container.items())
    keys = [key for key, x in items if not (is_constant_type(type(key)) and is_constant_type(type(x)))]
    return tuple(keys) if are_simple(keys) else len(keys)


def are_simple(keys: Iterable[Any]) -> bool:
    """Whether all keys are text, integers or tuples of these, which can be kept and compared."""
    return all(type(key) in (str, int) or (type(key) is tuple and are_simple(key)) for key in keys)


def same_attributes(x: Any, known: set[int]) -> Iterator[Step]:
    """The steps that find the class of an object, and the dict of its attributes, unless it is ``known``.

    Either may be replaced by another one.
    """
    cls, attributes = type(x), x.__dict__
    if id(attributes) not in known:
        known.add(id(attributes))
        yield Step(LookUp(look_ups.attribute, x, "__class__"), lambda: cls)
        yield Step(LookUp(look_ups.attribute, x, "__dict__"), lambda: attributes)


def _reference(value: Any) -> Reference:
    """A weak reference, so that no way keeps a model alive; containers do not allow one, so they are held."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
