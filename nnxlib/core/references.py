"""References: what a function refers to, and the ways that lead there.

A jitted function finds out which objects it captures while it is traced. At later calls it must know, without a trace,
whether it would still capture the same ones. So it keeps the *ways* that lead from the function to these objects, and
follows them at each call: through closures, plain containers, plain objects and their classes, weak references,
thread-local and context variables, and other functions. Each step of a way is one look-up (look_ups.py).

A place may hold None or a number when the function is traced, and a Module later. So the ways to such places are
followed, too, if code of the function names them: each is an *end*, see conditions.py.

From the globals of its functions, half of a program can be reached. So the globals that functions of other files read
are searched last, and only if something that is sought has not been found; but Modules and None in them are found at
once. If it is still missing, code may have reached it by text, as in ``globals()["model"]``, or by the ``__getattr__``
of a module.
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
from .look_ups import BY_NAME, BY_SYNTAX, LookUp, is_of_library, weak_key
from .objects import Node
from .tracing import current_trace

Reference = Callable[[], Any]  # to a value that a look-up has found before

_MOST = 1000  # values to find: a function may refer to half of a program
_MOST_TO_FIND = 30_000  # look-ups in a search, of a few microseconds each
_MOST_ELSEWHERE = 100  # functions of other files whose globals are searched

MAPPINGS = dict, types.MappingProxyType  # the latter is a view of a dict, which may be edited
MUTABLE_CONTAINERS = list, deque, set, *MAPPINGS
_CONSTANTS = jax.Array, np.ndarray, np.generic, str, bytes, int, float, complex, type(None)
_LEADS_NOWHERE = *_CONSTANTS, type, types.ModuleType
# Code may reach what is in these without naming it.
_TRANSPARENT = (
    dict, types.MappingProxyType, types.FunctionType, types.MethodType, functools.partial, staticmethod, classmethod
)  # fmt: skip
_BY_ANY_NAME = "getattr", "hasattr", "vars", "dir", "__dict__"  # code with one of these names may read any attribute
_DEFAULTS = "__defaults__", "__kwdefaults__"
_OVER_ALL = "vars", "dir", "__dict__"  # code with one of these names may go over all attributes of an object
# The attributes with which a function, a UserDict or weak dict, a ChainMap, and a member of an Enum wrap something.
_WRAPPED = "__wrapped__", "data", "maps", "_value_"


class Step(NamedTuple):
    """One step of a way."""

    look_up: LookUp
    before: Reference  # to what the look-up has found before
    is_root: bool = False  # whether this is an object that the function captures


class Way(NamedTuple):
    """A way from a function to a value: the last look-up, and the way to the holder in which it is made."""

    value: Any
    look_up: LookUp
    before: Way | None  # None for the function itself

    def back(self) -> Iterator[tuple[Way, Any]]:
        """(the way up to a step, the holder in which the step is made) for each step, the last first."""
        way = self
        while way.before is not None:
            yield way, way.before.value
            way = way.before

    def steps(self, known: set[int]) -> Iterator[Step]:
        """Its steps, the last first.

        Among them: that a container has the same length, and an object the same dict of attributes. ``known`` has the
        ids of the ways, containers and such dicts whose steps were yielded before, by other ways.
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
        """Whether code names the value itself: as a variable in a closure, a default, a global or an attribute."""
        if self.before is None:
            return False
        if type(self.before.value) is types.FunctionType:
            return self.look_up.kind in (look_ups.in_closure, look_ups.entry, look_ups.absent, look_ups.inside)
        of = self.before.look_up
        return (of.kind is look_ups.attribute and of.key in _DEFAULTS) or _is_by_name(self.look_up, self.before.value)

    def is_looked_along(self, names: Collection[str], along: Collection[int] = ()) -> bool:
        """Whether code with these names may go along the way: no attribute on it has another name.

        ``along`` has the ids of values that the code may reach along another way.
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
        """What is looked up at each step, the last first; it stays the same if the way leads to another value.

        It contains the code of each function on the way, and the class of each other value, since others may do
        something else with what they hold. And it says which members a container has besides constants, since the
        function may go over all of them. ``shapes`` has this, by the ids of containers, as known from other ways.
        """
        found: list[Hashable] = []
        for way, holder in self.back():
            if isinstance(holder, MUTABLE_CONTAINERS) and id(holder) not in shapes:
                shapes[id(holder)] = _shape(holder)
            kind = holder.__code__ if type(holder) is types.FunctionType else type(holder)
            found += [way.look_up.address, weak_key(kind), shapes.get(id(holder))]
        return tuple(found)


def _is_by_name(look_up: LookUp, holder: Any) -> bool:
    """Whether code that makes a look-up in this holder has to name its key."""
    return look_up.kind in BY_NAME and not issubclass(type(holder), _TRANSPARENT) and look_up.key not in _WRAPPED


class Reached(NamedTuple):
    """What can be reached from a function."""

    ways: list[Way]  # the shortest one to each value, then all others to Modules and Variables
    ends: list[Way]  # all ways to constants
    names: set[str]  # in the code of functions among the values
    alternatives: Sequence[Way] = ()  # other ways to values, such as containers, through which objects are reached

    def looked_along(self, ways: Iterable[Way]) -> list[Way]:
        """Those of some ways along which the function may go."""
        along = {id(way.value) for way in self.alternatives}
        return [way for way in ways if way.is_looked_along(self.names, along)]

    def ways_to_objects(self) -> list[Way]:
        """The ways to Modules and Variables that the function may use: it names each attribute on the way."""
        found = [way for way in self.ways if issubclass(type(way.value), Identified) and not is_left_over(way.value)]
        return self.looked_along(found)

    def used_unnoticed(self) -> list[Any]:
        """The Modules that it may use unnoticed by a trace, which does not notice that a flag is read.

        These are the ones that it names, and those of which it may read an attribute.
        """
        ways = [way for way in self.ways_to_objects() if isinstance(way.value, Node)]
        return [way.value for way in ways if way.is_named or _is_read(way.value, self.names)]


def _namespace_of(f: Any) -> dict[str, Any] | None:
    """The globals of a function, or of the innermost one that it wraps; of an object, those of its ``__call__``."""
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
    """Search for everything that can be reached from a function.

    In a large program it finds the nearest values. It goes on while some that are sought are missing, up to a limit:
    from a test file all tests can be reached, and a search there takes a tenth of a second or two.

    Args:
      function: where the ways begin.
      sought: what has to be found.
      running: code that ran when the function was called; its globals count as the function's own.
      given: what also counts as the function's own, such as its static arguments.
      names: those in the code that an earlier search found, which this one may not reach.
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
        # The names in the code visited so far; and those of which methods have been searched for in all objects.
        self.names = {*names, *[name for code in self.running for name in look_ups.names_in(code.code)]}
        self.looked_for = set[str]()
        self.unnamed = list[Way]()  # to objects whose methods the syntax of Python calls, yet to be searched
        self.visited = set[int]()  # the code of functions, by id
        self.elsewhere = deque[Way]()  # to functions of other files
        self.found, self.others, self.ends = dict[int, Way](), list[Way](), list[Way]()
        self.alternatives = dict[Hashable, Way]()  # by place: ways to values that were found on another way

    def run(self) -> Reached:
        self.visit_all()
        for code, namespace in reversed(self.running):
            if id(code) not in self.visited:
                self.go_on(self.start, look_ups.globals_in(code, namespace))
                self.visit_all()
        self.visit_elsewhere()
        if self.missing:
            self.look_ups_left = max(self.look_ups_left, _MOST)  # allow a few, even if none is left
            namespaces = [self.namespace or {}, *[code.namespace for code in self.running]]
            for namespace in {id(x): x for x in namespaces}.values():
                self.go_on(self.start, look_ups.globals_by_text(self.names, namespace))
            self.visit_all()
            self.visit_elsewhere()
        ways = [*self.found.values(), *self.others]
        return Reached(ways, self.ends, self.names, self.alternatives_to_objects(ways))

    def alternatives_to_objects(self, ways: Sequence[Way]) -> list[Way]:
        """Those of the alternatives through which objects are reached, and along which the function may go."""
        objects = [way for way in ways if issubclass(type(way.value), Identified)]
        leading = {id(holder) for way in objects for _, holder in way.back()} if self.alternatives else ()
        found, along = list[Way](), set[int]()
        for way in self.alternatives.values():
            if id(way.value) in leading and way.is_looked_along(self.names, along):
                found.append(way)
                along.add(id(way.value))
        return found

    def visit_all(self) -> None:
        while self.queue and (self.missing or len(self.found) < _MOST):
            self.visit(self.queue.popleft())
            if not self.queue:
                self.look_for_methods()

    def visit_elsewhere(self) -> None:
        """As long as something is missing, go on to the globals of functions of other files, some found meanwhile."""
        while self.missing and self.elsewhere and self.elsewhere_left:
            self.elsewhere_left -= 1
            way = self.elsewhere.popleft()
            self.go_on(way, look_ups.globals_of(way.value))
            self.visit_all()

    def look_for_methods(self) -> None:
        """Go on to methods that are named by code visited later than their objects, and to those that no code names."""
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
                    self.alternatives[place] = way
        elif way.look_up.found() is value:  # not if a look-up finds another value each time
            self.found[id(value)] = way
            self.missing.discard(id(value))
            if type(value) is types.FunctionType:
                self.enter(way, value)
            self.go_on(way, look_ups.look_ups_in(value, self.names))
            if look_ups.has_unnamed_methods(type(value)):
                self.unnamed.append(way)

    def enter(self, way: Way, function: types.FunctionType) -> None:
        """Go on to the globals of a function; not of a library, whose use of a Module the trace notices."""
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
        """Go on from the end of a way with these look-ups; with none if they cannot be made."""
        with contextlib.suppress(Exception):  # a weak proxy to what is gone, or an unusual error of a __getattr__
            for look_up in itertools.islice(further, self.look_ups_left):
                self.look_ups_left -= 1
                self.queue.append(Way(look_up.found(), look_up, way))


def _place(look_up: LookUp) -> Hashable:
    """A key that is equal for two look-ups of the same key in the same holder."""
    kind, holder, key = look_up
    return kind, holder.address if kind is look_ups.inside else id(holder), key


def is_constant_type(kind: type) -> bool:
    """Whether values of this type are constants of a compiled function, as in JAX: numbers, text, arrays and None."""
    return issubclass(kind, _CONSTANTS)


def is_left_over(x: Any) -> bool:
    """Whether this is a Module or Variable of a trace that has ended, which no function can use."""
    if current_trace() is not None or not issubclass(type(x), Identified):
        return False
    return x._nnx_trace is not None and not is_lent_elsewhere(x._nnx_trace)


def _is_kept_by_library(way: Way) -> bool:
    """Whether a way ends in the closure or the defaults of a function of a library, where no Module will come."""
    holder = None if way.before is None else way.before.value
    return type(holder) is types.FunctionType and is_of_library(holder.__globals__)


def _is_read(x: Node, names: set[str]) -> bool:
    """Whether code with these names may use a Module in other ways than calling its methods, which a trace notices."""
    if isinstance(x, list | dict) or not (names.isdisjoint(x._nnx_contents()) and names.isdisjoint(_BY_ANY_NAME)):
        return True
    named = {*names, *BY_SYNTAX}
    in_classes = [vars(cls)[name] for cls in type(x).__mro__[:-1] for name in vars(cls).keys() & named]
    return not all(map(is_observed, in_classes))


def _shape(container: Any) -> Hashable:
    """How many members of a container are no constants; of a dict with simple keys, their keys in order."""
    if not isinstance(container, MAPPINGS):
        return sum(not is_constant_type(type(x)) for x in list(container))
    items = list(container.items())
    keys = [key for key, x in items if not (is_constant_type(type(key)) and is_constant_type(type(x)))]
    return tuple(keys) if are_simple(keys) else len(keys)


def are_simple(keys: Iterable[Any]) -> bool:
    """Whether all keys are text, integers or tuples of these, which can be kept and compared."""
    return all(type(key) in (str, int) or (type(key) is tuple and are_simple(key)) for key in keys)


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
