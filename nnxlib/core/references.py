"""What a function refers to: its closure, its defaults, the globals that it names, and what these hold.

A jitted function finds out what it captures while it is traced. Whether it would capture the same objects today it must
know without being traced. So the ways that lead from the function to an object are kept and followed again at each
call: through closures, plain containers, plain objects and functions of the same file, each step one look-up.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from .objects import Node, is_bound_method
from .variables import Variable

LookUp = Callable[[], Any]

_MOST = 1000  # things that are looked at: a function may lead to half of a program


class Way(NamedTuple):
    """The last step of a way from a function to a value, and the way to what the value is looked up in."""

    value: Any
    look_up: LookUp
    before: Way | None

    def steps(self) -> Iterator[tuple[LookUp, LookUp]]:
        """What each step looks up, and what it found; containers on the way are to be as long as they were."""
        way: Way = self
        while way.before is not None:
            holder = way.before.value
            yield way.look_up, _reference(way.value)
            if isinstance(holder, list | dict | deque):
                yield functools.partial(_is_as_long, holder, len(holder)), _true
            way = way.before


def _is_as_long(container: Any, length: int) -> bool:
    return len(container) == length


def _true() -> bool:
    return True


def _reference(value: Any) -> LookUp:
    """A weak reference: no way keeps a model alive. Containers know none, and are held by the function anyway."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def named_in(function: Callable) -> list[Any]:
    """What a function names itself: in its closure, as a default, as a global."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):
        return []
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*defaults, *(look_up() for look_up in _names_of(function))]


def ways_from(function: Callable) -> list[Way]:
    """Ways to what a function refers to: the shortest to each value, then the others to each Module."""
    start = inspect.unwrap(function, stop=is_bound_method)  # the Module is bound to what would be unwrapped
    inner = inspect.unwrap(start)
    namespace = getattr(inner, "__globals__", getattr(getattr(inner, "__func__", None), "__globals__", None))
    queue, found, others = deque([Way(start, lambda: start, None)]), dict[int, Way](), list[Way]()
    while queue and len(found) < _MOST:
        way = queue.popleft()
        if id(way.value) not in found:
            found[id(way.value)] = way
            queue.extend(Way(look_up(), look_up, way) for look_up in _look_ups(way.value, namespace))
        elif isinstance(way.value, Node):
            others.append(way)
    return [*found.values(), *others]


def _look_ups(x: Any, namespace: Any) -> Iterable[LookUp]:
    """How to look up what is in ``x``; nodes are looked into elsewhere, and arrays have nothing in them."""
    if isinstance(x, types.FunctionType):
        defaults = [functools.partial(getattr, x, name) for name in ("__defaults__", "__kwdefaults__")]
        return [*defaults, *_names_of(x)] if x.__globals__ is namespace else ()
    if isinstance(x, types.MethodType):
        return [functools.partial(getattr, x, name) for name in ("__self__", "__func__")]
    if isinstance(x, functools.partial):
        return [functools.partial(getattr, x, name) for name in ("func", "args", "keywords")]
    if isinstance(x, list | tuple | deque) and not isinstance(x, Node):
        return [functools.partial(_item, x, k) for k in range(len(x))]
    if isinstance(x, dict) and not isinstance(x, Node):
        return [functools.partial(x.get, key) for key in x]
    if isinstance(x, Node | Variable | jax.Array | np.ndarray | type | types.ModuleType):
        return ()
    attributes = getattr(x, "__dict__", None)
    found = [functools.partial(attributes.get, name) for name in attributes] if type(attributes) is dict else []
    members = [name for cls in type(x).__mro__ for name, y in vars(cls).items() if inspect.ismemberdescriptor(y)]
    return found + [functools.partial(getattr, x, name, None) for name in members if name != "__dict__"]


def _names_of(function: types.FunctionType) -> Iterator[LookUp]:
    """How to look up what stands in the closure of a function, and the globals that its code names.

    Of a module or class among them, what stands in it under a name that the code has too.
    """
    for cell in function.__closure__ or ():
        yield functools.partial(getattr, cell, "cell_contents", None)  # None: it is empty
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    namespace = function.__globals__
    for name in sorted(names & namespace.keys()):
        yield functools.partial(namespace.get, name)
        if isinstance(namespace[name], types.ModuleType | type):
            for inner in sorted(names & vars(namespace[name]).keys()):
                yield functools.partial(_inside, namespace, name, inner)


def _inside(namespace: Any, name: str, inner: str) -> Any:
    return getattr(namespace.get(name), "__dict__", {}).get(inner)


def _item(sequence: Any, index: int) -> Any:
    return sequence[index] if index < len(sequence) else None
