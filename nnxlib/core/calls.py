"""The calls of Modules that are running: one thin wrapper around each method, asleep unless something listens.

Every public method of a Module class, and ``__call__``, is wrapped once when the class is made. The wrapper looks at
one thread-local field. It is ``None`` in eager code, and the method is called directly. While a transform traces, the
field holds a :class:`Listener`, which knows the paths of the objects inside the trace, and the wrapper

- puts the operations of the call under a name scope, the path of the Module, which shows in jaxprs, HLO and profiles;
- adds one note per level to an exception that leaves the call: path, class and inputs;
- tells whoever follows the calls (``nnx.capture(..., method_outputs=...)``, ``nnx.tabulate``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax

from .captures import Watch, notice
from .errors import describe, format_path


class Listener:
    """Who is called in one trace: paths by object, and the stack of the calls that are running.

    A transform inside of a transform has a listener of its own, whose objects are known by their paths outside: what
    is packed while a listener is active is noted in ``entered``, and :func:`inside` looks there.
    """

    __slots__ = ("base", "captured", "entered", "on_call", "outer", "paths", "stack")

    def __init__(
        self,
        objects: Sequence[Any],
        paths: Sequence[tuple],
        on_call: Callable[[Any, tuple, str, tuple, dict], Callable[[Any], None]] | None = None,
        captured: tuple[type, ...] | None = None,
    ):
        self.paths = {id(x): path for x, path in zip(objects, paths, strict=True)}  # the objects outlive the listener
        self.stack: list[tuple[Any, str]] = []
        self.on_call = on_call  # takes module, path, method, args, kwargs; returns what takes the output
        self.entered: dict[Any, Sequence[tuple | None]] = {}  # layout -> the paths of what was last packed with it
        self.outer: Listener | None = None  # of the trace around this one: it knows what this one captures
        self.base: tuple | None = None  # the path of the call outside that this trace is part of
        self.captured = captured  # the types of Variables that an enclosing nnx.capture takes out, if there is one

    def path_of(self, module: Any) -> tuple:
        """The path of a module; one that was made in this trace is looked up below the module that calls it."""
        found = self._known(module)
        return (type(module).__name__,) if found is None else found

    def _known(self, module: Any) -> tuple | None:
        if id(module) in self.paths:
            return self.paths[id(module)]
        for caller, _ in reversed(self.stack):
            for name, child in caller._nnx_children():
                if child is module:
                    return (*self.path_of(caller), name)
        return None if self.outer is None else self.outer._known(module)


class _Active(threading.local):
    listener: Listener | None = None

    def __reduce__(self) -> str:  # classes that are pickled by value bring their methods, and those this
        return "_active"


_active = _Active()


def entering(layout: Any, objects: Sequence[Any]) -> None:
    """Note the paths of objects that have been packed, and may be on their way into a transform."""
    listener = _active.listener
    if listener is not None:
        callers = [(caller, listener.path_of(caller)) for caller, _ in listener.stack]
        near = {id(child): (*path, name) for caller, path in callers for name, child in caller._nnx_children()}
        listener.entered[layout] = [listener.paths.get(id(x), near.get(id(x))) for x in objects]


def inside(layout: Any, objects: Sequence[Any], paths: Sequence[tuple]) -> Listener:
    """A listener for objects made from a layout; ``paths`` are used for those that have none outside."""
    outer = _active.listener
    if outer is None:
        return Listener(objects, paths)
    found = outer.entered.get(layout)
    if found is not None:
        paths = [path if there is None else there for path, there in zip(paths, found, strict=True)]
    listener = Listener(objects, paths)
    listener.outer = outer
    listener.base = outer.path_of(outer.stack[-1][0]) if outer.stack else outer.base
    return listener


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Let ``listener`` follow the calls made in this thread within the block."""
    outer = _active.listener
    if listener is not None and outer is not None and listener.captured is None:
        listener.on_call, listener.captured = outer.on_call, outer.captured
    _active.listener = listener
    try:
        yield
    finally:
        _active.listener = outer


def captured_types() -> tuple[type, ...] | None:
    """The types of Variables that the ``nnx.capture`` around this call takes out; None outside of one."""
    listener = _active.listener
    return None if listener is None else listener.captured


def listened() -> bool:
    """Whether there is a listener in this thread: something is being traced, or somebody follows the calls."""
    return _active.listener is not None


def followed() -> bool:
    """Whether somebody follows the calls made in this thread."""
    listener = _active.listener
    return listener is not None and listener.on_call is not None


def observed(method: Callable, name: str) -> Callable:
    """Wrap a method of a Module class."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _active.listener
        if listener is None:
            return method(self, *args, **kwargs)
        return _follow(listener, method, name, self, args, kwargs)

    wrapper._nnx_observed = True  # type: ignore[attr-defined]
    return wrapper


def _follow(listener: Listener, method: Callable, name: str, self: Any, args: tuple, kwargs: dict) -> Any:
    if Watch.count:
        notice(self, self._nnx_trace)
    stack = listener.stack
    if stack and stack[-1][0] is self:  # super().__call__, or another method of the same Module: the same path
        scope = ""
    else:
        path = listener.path_of(self)
        outer = listener.path_of(stack[-1][0]) if stack else listener.base or ()
        below = path[len(outer) :] if path[: len(outer)] == outer else path
        scope = "/".join(map(str, below)) or ("" if path == listener.base else type(self).__name__)
        if name != "__call__":
            scope = f"{scope}.{name}"
    is_super = bool(stack) and stack[-1][0] is self and stack[-1][1] == name  # a Module may define its own ==
    follow = None if is_super else listener.on_call
    finish = follow(self, listener.path_of(self), name, args, kwargs) if follow is not None else None
    stack.append((self, name))
    try:
        with jax.named_scope(scope) if scope else _NOTHING:
            out = method(self, *args, **kwargs)
    except Exception as error:
        if not is_super:
            _add_note(error, listener, self, name, args, kwargs)
        raise
    finally:
        stack.pop()
    if finish is not None:
        finish(out)
    return out


_NOTHING = nullcontext()


def _add_note(error: Exception, listener: Listener, module: Any, name: str, args: tuple, kwargs: dict) -> None:
    method = "" if name == "__call__" else f".{name}"
    inputs = ", ".join([*map(describe, args), *(f"{key}={describe(value)}" for key, value in kwargs.items())])
    where = f"{format_path(listener.path_of(module))}{method} ({type(module).__name__})"
    error.add_note(f"in {where}, input {inputs}" if inputs else f"in {where}")
