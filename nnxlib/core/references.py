"""References: what a function refers to by its closure, its defaults and its globals, and what these hold in turn.

A jitted function finds out which objects it captures while it is traced. At later calls it must know, without a trace,
whether it would still capture the same ones. So it keeps the *ways* that lead from the function to these objects, and
follows them at each call: through closures, plain containers, plain objects and their classes, weak references, what a
thread or a context has for itself, and other functions. Each step of a way is one look-up.

A place that the function looks at may also hold None or a number when it is traced, and a Module later. So the ways to
such places are followed, too, if code of the function names them: each is an *end*, see conditions.py.

From the globals of its functions half of a program can be reached. So those that functions of other files read are
looked into last, and only if something that is sought has not been found; but Modules and None are found at once.
"""

from __future__ import annotations

import contextvars
import dis
import functools
import inspect
import itertools
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .closures import Reader, is_lent_elsewhere
from .graphdef import GraphDef
from .objects import Node
from .tracing import current_trace
from .variables import Variable

Find = Callable[[], Any]

_MOST = 1000  # values to visit: a function may refer to half of a program
_MOST_TO_FIND = 30_000  # look-ups, as long as some that are sought are not found; each takes a few microseconds
_MOST_ELSEWHERE = 100  # functions of other files, the globals of which are then looked into

CONTAINERS = list, dict, deque, set
_TRANSPARENT = dict, types.MappingProxyType, types.FunctionType, types.MethodType, functools.partial
_WRAPPED = "__wrapped__", "data", "maps"  # attributes with what a function, a UserDict or weak dict, a ChainMap wraps
_CONSTANTS = jax.Array, np.ndarray, np.generic, str, bytes, int, float, complex, type(None)
# The types of most of what a class holds; to ask more of it would take a tenth of a search.
_METHODS = {types.FunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType}
_LIBRARIES = "jax", "jaxlib", "numpy", __name__.partition(".")[0]  # their globals are no Modules
_PROGRAMS = "_nnx_programs"  # an attribute of a function, see transforms/program.py
_GLOBAL = ("_GLOBAL", "_NAME", "_GLOBALS")  # endings of the instructions that read globals; a class body has _NAME


class Jitted:
    """Base class of what ``nnx.jit`` makes of a function, which it has as ``__wrapped__``; see :func:`is_jitted`."""

    __wrapped__: Callable


def is_jitted(x: Any) -> bool:
    """Whether this is a function that ``nnx.jit`` or ``jax.jit`` has compiled: what it does is what it wraps does."""
    return isinstance(x, Jitted) or type(x).__module__.startswith("jaxlib.")


class Found(NamedTuple):
    """What can be reached from a function."""

    ways: list[Way]  # the shortest one to each value, then all others to Modules and Variables
    ends: list[Way]  # all ways to constants
    names: set[str]  # in the code of the functions among them

    def objects(self) -> list[Way]:
        """The ways to Modules and Variables that the function may look at: it names each attribute on the way."""
        found = [way for way in self.ways if issubclass(type(way.value), Node | Variable) and not is_left(way.value)]
        return [way for way in found if way.is_looked_along(self.names)]

    def with_settings(self) -> list[Any]:
        """Those of these objects of which the function may read a setting."""
        return [way.value for way in self.objects() if _has_setting(way.value, self.names)]


class LookUp(NamedTuple):
    """How a value is looked up: ``find()`` gives what is there now, and the rest says where that is.

    The kinds are an "attribute" of an object, an "entry" of a mapping, which may be the attributes of an object or the
    globals of a function, an "item" of a sequence, a "member" of a set or a key of a dict, by its number, the contents
    of a "cell" in a closure, the value of a weak "reference" or in a "context", what a "class" holds under a name, what
    is "inside" a module or class that another look-up finds, and the "length" of a container.
    """

    find: Find
    kind: str
    holder: Any  # where it is looked up; of an "inside" the other look-up
    key: Any = None  # the name, key or number

    @property
    def place(self) -> Hashable:
        """What is looked up, whatever the holder is."""
        if self.kind == "inside":
            return self.holder.place, self.key
        if self.kind == "class":
            return self.kind, _weakly(self.holder), self.key
        if self.kind != "entry":
            return self.kind, self.key
        module = self.holder.get("__name__") if type(self.holder) is dict else None  # if these are its globals
        return self.kind, module if type(module) is str else None, _weakly(self.key)

    def refers_to(self, functions: Collection[Any]) -> bool:
        """Whether it keeps one of these functions alive, or the attributes of one."""
        return any(x is f or x is f.__dict__ for f in functions for x in (self.holder, self.key))


class Way(NamedTuple):
    """A way from a function to a value: how the value is looked up, and the way to what it is looked up in."""

    value: Any
    look_up: LookUp
    before: Way | None

    def steps(self, known: set[int]) -> Iterator[tuple[LookUp, Find]]:
        """For each step its look-up, and a reference to what that has found. A container must also keep its length.

        ``known`` are the ids of the ways and containers whose steps are known already, from other ways.
        """
        way: Way = self
        while way.before is not None and id(way) not in known:
            known.add(id(way))
            holder = way.before.value
            yield way.look_up, _reference(way.value)
            if isinstance(holder, CONTAINERS) and id(holder) not in known:
                known.add(id(holder))
                is_as_long = functools.partial(_is_as_long, holder, len(holder))
                yield LookUp(is_as_long, "length", holder, len(holder)), _true
            way = way.before

    def is_looked_along(self, names: Collection[str]) -> bool:
        """Whether code with these names may go along the way: it leads over no attribute of another name."""
        way: Way = self
        while way.before is not None:
            if not way._is_named(names):
                return False
            way = way.before
        return True

    def places(self, widths: dict[int, int]) -> tuple[Hashable, ...]:
        """What is looked up at each step, from the last one on: the same if the way now leads to another value.

        With how many members each container has besides constants: the function may go over all of them.
        ``widths`` has these numbers, by the ids of containers, as far as they are known from other ways.
        """
        way: Way = self
        found: list[Hashable] = []
        while way.before is not None:
            holder = way.before.value
            if isinstance(holder, CONTAINERS) and id(holder) not in widths:
                widths[id(holder)] = _width(holder)
            found += [way.look_up.place, widths.get(id(holder))]
            way = way.before
        return tuple(found)

    def _is_named(self, names: Collection[str]) -> bool:
        """Whether code with these names may make the last look-up: of an attribute if it has the name."""
        _, kind, _, key = self.look_up
        if kind in ("item", "member", "reference", "context"):
            return True
        assert self.before is not None
        return issubclass(type(self.before.value), _TRANSPARENT) or key in _WRAPPED or key in names


def is_constant(kind: type) -> bool:
    """Whether a compiled function has values of this type, numbers, text, arrays and None, as constants."""
    return issubclass(kind, _CONSTANTS)


def is_left(x: Any) -> bool:
    """Whether this is a Module or Variable of a trace that has ended, of which no function can compute anything."""
    if current_trace() is not None or not issubclass(type(x), Node | Variable):
        return False
    return x._nnx_trace is not None and not is_lent_elsewhere(x._nnx_trace)


def _width(container: Any) -> int:
    """How many members of a container are no constants."""
    members = list(container.items()) if isinstance(container, dict) else [(member,) for member in list(container)]
    return sum(not all(is_constant(type(x)) for x in member) for member in members)


def _weakly(key: Any) -> Any:
    """A weak reference, which is equal to another one if the keys are; or what does not allow one, such as text."""
    try:
        return weakref.ref(key)
    except TypeError:
        return key


def _is_as_long(container: Any, length: int) -> bool:
    return len(container) == length


def _true() -> bool:
    return True


def _reference(value: Any) -> Find:
    """A weak reference, so that no way keeps a model alive; containers do not allow one, so they are held."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def named_in(function: Callable) -> list[Any]:
    """What a function, and those that it wraps, refer to directly: by closures, defaults, globals."""
    found: list[Any] = []
    while function is not None:
        if isinstance(function, types.FunctionType):
            found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            found += [found_by(look_up) for look_up in (*_cells_of(function), *_names_of(function))]
        elif not hasattr(function, "__wrapped__"):  # a method, or an object with one
            inner = getattr(function, "__func__", None) or inspect.getattr_static(type(function), "__call__", None)
            function = inner if isinstance(inner, types.FunctionType) else None  # type: ignore[assignment]
            continue
        function = getattr(function, "__wrapped__", None)  # type: ignore[assignment]
    return found


def ways_from(function: Callable) -> list[Way]:
    """The ways from a function: the shortest one to each value, then all others to Modules and Variables."""
    return search(function).ways


def search(function: Callable, sought: Collection[Any] = (), readers: Iterable[Reader] = ()) -> Found:
    """Search for all that can be reached from a function.

    Of a program with very many values it finds the nearest ones. It goes on if some that are sought are not among them,
    but not without end: from a test file all tests can be reached, and a search there takes a tenth of a second or two.

    Args:
      function: where the ways begin.
      sought: what has to be found.
      readers: code that was seen to run when the function was called, the globals of which count as the function's own.
    """
    inner = inspect.unwrap(function)
    namespace = getattr(inner, "__globals__", getattr(getattr(inner, "__func__", None), "__globals__", None))
    start = Way(function, LookUp(lambda: function, "start", None), None)
    queue = deque([start])  # the ways that are yet to be visited, the shortest first
    ran = [reader for reader in readers if not is_of_library(reader.namespace)]
    names = {name for reader in ran for name in _names_in(reader.code)}  # of the code visited so far
    visited = set[int]()  # the code of functions, by id
    elsewhere = list[Way]()  # to functions of other files
    found, others, ends = dict[int, Way](), list[Way](), list[Way]()
    missing = set(map(id, sought))
    look_ups_left = iter(range(_MOST_TO_FIND))

    def go_on(way: Way, look_ups: Iterable[LookUp]) -> None:
        queue.extend([further for further, _ in zip(_ways_on(way, look_ups), look_ups_left)])

    def visit(way: Way) -> None:
        if is_constant(type(way.value)) and not _is_kept_by_library(way):
            ends.append(way)
        if id(way.value) in found:
            if issubclass(type(way.value), Node | Variable):  # isinstance would ask a proxy, perhaps to what is gone
                others.append(way)
        elif found_by(way.look_up) is way.value:  # a look-up that finds another value each time leads nowhere
            found[id(way.value)] = way
            missing.discard(id(way.value))
            if type(way.value) is types.FunctionType:
                names.update(_names_in(way.value.__code__))
                if way.value.__globals__ is namespace:
                    visited.add(id(way.value.__code__))
                    go_on(way, _names_of(way.value))
                elif not is_of_library(way.value.__globals__):
                    elsewhere.append(way)
                    go_on(way, _objects_of(way.value))
            go_on(way, _look_ups(way.value, names))

    def visit_all() -> None:
        while queue and (missing or len(found) < _MOST):
            visit(queue.popleft())

    visit_all()
    for code, seen_from in reversed(ran):
        if id(code) not in visited:
            go_on(start, _globals_of(code, seen_from))
            visit_all()
    for way in itertools.islice(elsewhere, _MOST_ELSEWHERE):  # which become more
        if missing:
            go_on(way, _names_of(way.value))
            visit_all()
    return Found([*found.values(), *others], ends, names)


def _ways_on(way: Way, look_ups: Iterable[LookUp]) -> Iterator[Way]:
    """The ways that go on from another one; none through an object that cannot be looked into."""
    try:
        for look_up in look_ups:
            yield Way(found_by(look_up), look_up, way)
    except Exception:  # such as a weak proxy to what is gone, or __getattr__ with other errors than AttributeError
        return


def found_by(look_up: LookUp) -> Any:
    """What a look-up finds; None if it fails."""
    try:
        return look_up.find()
    except Exception:  # of a property, or a class's own __getattribute__ or get
        return None


def _look_ups(x: Any, names: Collection[str]) -> Iterator[LookUp]:
    """How to look up what is in ``x``; nothing for nodes, which are looked into elsewhere, arrays and text.

    Of the methods and properties of its class only those of these names.
    """
    if isinstance(x, types.FunctionType):
        yield from _cells_of(x)
        yield from [_attribute(x, name) for name in ("__defaults__", "__kwdefaults__")]
        yield from [_entry(x.__dict__, name) for name in list(x.__dict__) if name != _PROGRAMS]
    elif isinstance(x, types.MethodType):
        yield from [_attribute(x, name) for name in ("__self__", "__func__")]
    elif isinstance(x, functools.partial):
        yield from [_attribute(x, name) for name in ("func", "args", "keywords")]
    elif isinstance(x, Node | Variable | GraphDef | jax.Array | np.ndarray | types.ModuleType | str | float | None):
        return
    elif isinstance(x, list | tuple | deque):
        yield from (LookUp(functools.partial(_item, x, k), "item", x, k) for k in range(len(x)))
    elif isinstance(x, dict | types.MappingProxyType):
        keys = list(x)  # a copy: a collection of garbage may shrink a cache
        yield from (_entry(x, key) for key in keys)
        yield from _members(x, keys)
    elif isinstance(x, set | frozenset):
        yield from _members(x, list(x))
    elif isinstance(x, weakref.ref):
        yield LookUp(x, "reference", x)
    elif isinstance(x, contextvars.ContextVar):
        yield LookUp(x.get, "context", x)
    elif isinstance(x, threading.local):  # each thread has attributes of its own
        yield from [_attribute(x, name, None) for name in list(x.__dict__)]
    elif is_jitted(x):  # all else there is ours, or JAX's own, but for what users have attached
        yield _attribute(x, "__wrapped__", None)
        attached = [name for name in getattr(x, "__dict__", ()) if not name.startswith("_")]
        yield from [_attribute(x, name, None) for name in attached]
    else:
        attributes: Any = getattr(x, "__dict__", None)
        if type(attributes) is dict:
            yield from [_entry(attributes, name) for name in list(attributes)]
        classes = type(x).__mro__
        if isinstance(x, type):
            classes = *x.__mro__, *classes[:-2]  # these are type and object
        for cls in classes:
            has_methods = "__module__" in vars(cls)  # that are written in Python; those of str lead nowhere
            for name, y in vars(cls).copy().items():
                if type(y) not in _METHODS and _is_read_from(x, name, y) and name != "__dict__":
                    yield _attribute(x, name, None)
                elif has_methods and (name in names or (name == "__call__" and not isinstance(x, type))):
                    yield LookUp(functools.partial(_in_class, cls, name), "class", cls, name)


def _members(x: Any, members: list[Any]) -> Iterator[LookUp]:
    """How to look up the Modules and Variables among the members of a set or the keys of a dict, which may be weak."""
    for k, member in enumerate(members):
        if issubclass(type(member), Node | Variable | weakref.ref):
            yield LookUp(functools.partial(_nth, x, k), "member", x, k)


def _attribute(x: Any, name: str, *default: Any) -> LookUp:
    return LookUp(functools.partial(getattr, x, name, *default), "attribute", x, name)


def _entry(mapping: Any, key: Any) -> LookUp:
    return LookUp(functools.partial(mapping.get, key), "entry", mapping, key)


def _is_read_from(x: Any, name: str, y: Any) -> bool:
    """Whether an attribute of ``x`` is what its class holds under a name, or what a slot does; no method is."""
    is_value = not hasattr(type(y), "__get__") and not name.startswith("__")
    return is_value or (isinstance(y, types.MemberDescriptorType) and not isinstance(x, type))


def _cells_of(function: types.FunctionType) -> Iterator[LookUp]:
    """How to look up what is in the closure of a function."""
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
        yield LookUp(functools.partial(getattr, cell, "cell_contents"), "cell", cell, name)


def _names_of(function: types.FunctionType) -> Iterator[LookUp]:
    """How to look up the globals that a function reads."""
    return _globals_of(function.__code__, function.__globals__, _cells_of(function))


def _objects_of(function: types.FunctionType) -> list[LookUp]:
    """How to look up those globals that a function reads and that are Modules, Variables or None now."""
    namespace, kinds = function.__globals__, (Node, Variable, type(None))
    named = [
        name for name in _names_in(function.__code__) & namespace.keys() if issubclass(type(namespace[name]), kinds)
    ]
    read = _loaded_in(function.__code__)[0].intersection(named) if named else ()
    return [_entry(namespace, name) for name in sorted(read)]


def _globals_of(code: types.CodeType, namespace: dict[str, Any], others: Iterable[LookUp] = ()) -> Iterator[LookUp]:
    """How to look up the globals that some code names, and the modules that it imports.

    Of a module or class among these, or among the ``others``, also the attributes that the code names.
    """
    read, imported = _loaded_in(code)
    names = _names_in(code)
    look_ups = [_entry(namespace, name) for name in sorted(read & namespace.keys())]
    look_ups += [_entry(sys.modules, name) for name in sorted(imported)]
    yield from look_ups
    stack, seen = [*look_ups, *others], set[int]()
    while stack:
        look_up = stack.pop()
        x = found_by(look_up)
        if issubclass(type(x), types.ModuleType | type) and not is_of_library(vars(x)) and id(x) not in seen:
            seen.add(id(x))
            named = sorted(names & vars(x).keys())
            inside = [LookUp(functools.partial(_inside, look_up.find, name), "inside", look_up, name) for name in named]
            yield from inside
            stack += inside


@functools.lru_cache(maxsize=1000)
def _loaded_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that some code, and the functions in it, read as globals; and those of the modules that it imports."""
    instructions = list(dis.get_instructions(code))
    read = [x.argval for x in instructions if x.opname.startswith("LOAD_") and x.opname.endswith(_GLOBAL)]
    imported = [x.argval for x in instructions if x.opname == "IMPORT_NAME"]
    inner = [_loaded_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(read).union(*[x for x, _ in inner]), frozenset(imported).union(*[x for _, x in inner])


@functools.lru_cache(maxsize=1000)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """All names in some code, and the functions in it: of globals, attributes and imports, and for `getattr`."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    texts = [const for const in code.co_consts if isinstance(const, str) and const.isidentifier()]
    return frozenset(code.co_names).union(texts, *inner)


def is_of_library(namespace: Mapping[str, Any]) -> bool:
    """Whether a function with these globals, or a class or module with these attributes, is from a library."""
    return str(namespace.get("__module__", namespace.get("__name__"))).partition(".")[0] in _LIBRARIES


def _is_kept_by_library(way: Way) -> bool:
    """Whether a way ends in what a function of a library has in its closure or defaults: no Module comes there."""
    holder = None if way.before is None else way.before.value
    return type(holder) is types.FunctionType and is_of_library(holder.__globals__)


def _has_setting(x: Any, names: set[str]) -> bool:
    """Whether code with these names may read a setting of a Module: an attribute that is no state, or a property."""
    if not isinstance(x, Node):
        return False
    held = x._nnx_contents()
    settings = [name for name in held if not isinstance(held[name], Node | Variable | jax.Array)]
    return not names.isdisjoint(settings) or any(isinstance(getattr(type(x), name, None), property) for name in names)


def _inside(find: Find, name: str) -> Any:
    return getattr(find(), "__dict__", {}).get(name)


def _in_class(cls: type, name: str) -> Any:
    return vars(cls).get(name)


def _item(sequence: Any, index: int) -> Any:
    return sequence[index] if index < len(sequence) else None


def _nth(collection: Any, index: int) -> Any:
    return next(itertools.islice(collection, index, None), None)
