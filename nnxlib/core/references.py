"""References: what a function refers to by its closure, its defaults and its globals, and what these hold in turn.

A jitted function finds out which objects it captures while it is traced. At later calls it must know, without a trace,
whether it would still capture the same ones. So it keeps the *ways* that lead from the function to these objects, and
follows them at each call: through closures, plain containers, plain objects and their classes, weak references, what a
thread or a context has for itself, and functions of the same file. Each step of a way is one look-up.
"""

from __future__ import annotations

import contextvars
import dis
import functools
import inspect
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from .data import is_bound_method
from .graphdef import GraphDef
from .objects import Node
from .variables import Variable

LookUp = Callable[[], Any]

_MOST = 1000  # values to visit: a function may refer to half of a program
_MOST_TO_FIND = 100_000  # as long as some that are sought are not found; each takes a microsecond or two


class Way(NamedTuple):
    """A way from a function to a value: how the value is looked up, and the way to what it is looked up in."""

    value: Any
    look_up: LookUp
    before: Way | None

    def steps(self, known: set[int]) -> Iterator[tuple[LookUp, LookUp]]:
        """For each step its look-up, and a reference to what that has found. A container must also keep its length.

        ``known`` are the ids of the ways and containers whose steps are known already, from other ways.
        """
        way: Way = self
        while way.before is not None and id(way) not in known:
            known.add(id(way))
            holder = way.before.value
            yield way.look_up, _reference(way.value)
            if isinstance(holder, list | dict | deque) and id(holder) not in known:
                known.add(id(holder))
                yield functools.partial(_is_as_long, holder, len(holder)), _true
            way = way.before


def _is_as_long(container: Any, length: int) -> bool:
    return len(container) == length


def _true() -> bool:
    return True


def _reference(value: Any) -> LookUp:
    """A weak reference, so that no way keeps a model alive; containers do not allow one, so they are held."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def named_in(function: Callable) -> list[Any]:
    """What a function refers to directly: by its closure, its defaults, its globals."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):
        return []
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*defaults, *(look_up() for look_up in _names_of(function))]


def ways_from(function: Callable, sought: Collection[Any] = ()) -> list[Way]:
    """The ways from a function: the shortest one to each value, then all others to Modules.

    Of a program with very many values it gives the nearest ones, and goes on until it has found those that are sought.
    """
    start = inspect.unwrap(function, stop=is_bound_method)  # unwrapping a bound method would lose its Module
    inner = inspect.unwrap(start)
    namespace = getattr(inner, "__globals__", getattr(getattr(inner, "__func__", None), "__globals__", None))
    queue, found, others = deque([Way(start, lambda: start, None)]), dict[int, Way](), list[Way]()
    missing = set(map(id, sought))
    while queue and len(found) < (_MOST_TO_FIND if missing else _MOST):
        way = queue.popleft()
        if id(way.value) not in found:
            found[id(way.value)] = way
            missing.discard(id(way.value))
            queue.extend(Way(look_up(), look_up, way) for look_up in _look_ups(way.value, namespace))
        elif isinstance(way.value, Node):
            others.append(way)
    return [*found.values(), *others]


def _look_ups(x: Any, namespace: Any) -> Iterable[LookUp]:
    """How to look up what is in ``x``; nothing for nodes, which are looked into elsewhere, and for arrays."""
    if isinstance(x, types.FunctionType):
        defaults = [functools.partial(getattr, x, name) for name in ("__defaults__", "__kwdefaults__")]
        own = [functools.partial(x.__dict__.get, name) for name in list(x.__dict__)]
        return [*defaults, *_names_of(x), *own] if x.__globals__ is namespace else ()
    if isinstance(x, types.MethodType):
        return [functools.partial(getattr, x, name) for name in ("__self__", "__func__")]
    if isinstance(x, functools.partial):
        return [functools.partial(getattr, x, name) for name in ("func", "args", "keywords")]
    if isinstance(x, list | tuple | deque) and not isinstance(x, Node):
        return [functools.partial(_item, x, k) for k in range(len(x))]
    if isinstance(x, dict) and not isinstance(x, Node):
        return [functools.partial(x.get, key) for key in list(x)]  # a copy: a collection of garbage may shrink a cache
    if isinstance(x, Node | Variable | GraphDef | jax.Array | np.ndarray | types.ModuleType):
        return ()
    if isinstance(x, weakref.ref):
        return [x]
    if isinstance(x, contextvars.ContextVar):
        return [functools.partial(x.get, None)]
    if isinstance(x, threading.local):  # each thread has attributes of its own
        return [functools.partial(getattr, x, name, None) for name in list(x.__dict__)]
    attributes = getattr(x, "__dict__", None)
    found = [functools.partial(attributes.get, name) for name in list(attributes)] if type(attributes) is dict else []
    classes = x.__mro__ if isinstance(x, type) else type(x).__mro__
    members = [name for cls in classes for name, y in vars(cls).copy().items() if _is_read_from(x, name, y)]
    return found + [functools.partial(getattr, x, name, None) for name in members if name != "__dict__"]


def _is_read_from(x: Any, name: str, y: Any) -> bool:
    """Whether an attribute of ``x`` is what its class holds under a name, or what a slot does; no method is."""
    is_value = not hasattr(type(y), "__get__") and not name.startswith("__")
    return is_value or (inspect.ismemberdescriptor(y) and not isinstance(x, type))


def _names_of(function: types.FunctionType) -> Iterator[LookUp]:
    """How to look up what is in the closure of a function, and the globals that its code names.

    Of a module or class among these globals also the attributes that the code names.
    """
    for cell in function.__closure__ or ():
        yield functools.partial(getattr, cell, "cell_contents", None)  # None: it is empty
    read, names = _names_in(function.__code__)
    namespace = function.__globals__
    for name in sorted(read & namespace.keys()):
        yield functools.partial(namespace.get, name)
        if isinstance(namespace[name], types.ModuleType | type):
            for inner in sorted(names & vars(namespace[name]).keys()):
                yield functools.partial(_inside, namespace, name, inner)


@functools.lru_cache(maxsize=1000)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that some code, and the functions defined in it, read as globals; and all names, also of attributes."""
    read = {x.argval for x in dis.get_instructions(code) if x.opname.startswith("LOAD_") and x.opname.endswith(_GLOBAL)}
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(read).union(*[x[0] for x in inner]), frozenset(code.co_names).union(*[x[1] for x in inner])


_GLOBAL = ("_GLOBAL", "_NAME", "_GLOBALS")  # endings of the instructions; a class body reads them by name


def _inside(namespace: Any, name: str, inner: str) -> Any:
    return getattr(namespace.get(name), "__dict__", {}).get(inner)


def _item(sequence: Any, index: int) -> Any:
    return sequence[index] if index < len(sequence) else None
