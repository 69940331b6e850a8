"""Calls of Modules: which methods are running in this thread, and who is told about them.

Every public method of a Module class, and ``__call__``, is wrapped once, when the class is defined (:func:`observed`).
In eager code the wrapper finds that a thread-local field is ``None``, and calls the method directly. While a transform
traces, the field holds a :class:`~nnxlib.core.call_paths.Listener`, which knows the paths of the objects inside the
trace. Then the wrapper

- puts the operations of the call under a name scope, the path of the Module (scopes.py);
- tells whoever follows the calls (``nnx.capture(..., method_outputs=...)``, ``nnx.tabulate``).

An exception gets a note from each call that it leaves, in eager code too (call_notes.py).

Eager calls are not recorded, since they are frames on Python's stack. Whatever needs a path there (an error, the start
of a trace, ``nnx.current_path``) finds the running Modules in the frames of the wrappers (:func:`_from_frames`). So
paths cost an eager call nothing.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import jax

from .call_notes import add_note
from .call_paths import Collector, Listener
from .closures import Watch, notice
from .data import is_node
from .errors import Path
from .scopes import scope_of_call, use_name_scopes
from .tracing import hide_frames, runs_eagerly

R = TypeVar("R")


class _Active(threading.local):
    listener: Listener | None = None
    runs: int = 1  # see runs()

    def __init__(self) -> None:
        # By layout, the objects that were last packed with it in eager code.
        self.packed: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

    def __reduce__(self) -> str:  # a class pickled by value brings its methods, and these refer to this object
        return "_active"


_active = _Active()

# --- the wrapper -----------------------------------------------------------------------------------------------------


def observed(method: Callable, name: str) -> Callable:
    """Wrap a method of a Module class.

    IPython's ``%autoreload`` edits functions in place. It may give the wrapper the attributes of a new wrapper, so this
    looks its method up. Or it may give it the code of the edited method, without a wrapper: then the wrapper becomes
    this method. So it has the globals of its method, and the cell for its ``super()``, and finds what it needs of this
    file in its closure.

    It names no parameter, not even ``self``: beartype checks the arguments of a method behind such a wrapper only.
    """
    active, follow, leave = _active, _follow, _leave  # not this module, which dill would copy, and read back over it
    itself: list[Any] = []  # not in a cell: dill, and so datasets.map, would follow that without end
    __class__ = None

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        method, listener = itself[0].__wrapped__, active.listener
        if listener is not None:
            return follow(listener, method, name, args, kwargs)
        try:
            return method(*args, **kwargs)
        except Exception as error:  # costs nothing unless raised
            leave(error, name, args, kwargs)
            raise
            _ = __class__  # never runs: it makes this a free variable

    namespace = getattr(method, "__globals__", wrapper.__globals__)
    cells, own = _cells(wrapper), _cells(method)
    closure = tuple({**cells, "__class__": own.get("__class__", cells["__class__"])}.values())
    itself.append(types.FunctionType(wrapper.__code__, namespace, name, None, closure))
    return functools.update_wrapper(itself[0], method)


def _cells(function: Any) -> dict[str, types.CellType]:
    """The closure of a function, by name; empty for another callable."""
    closure = getattr(function, "__closure__", None)
    return dict(zip(function.__code__.co_freevars, closure)) if closure else {}


def _module_in(args: tuple) -> Any:
    """The Module whose method is called with these arguments; None if there is none.

    Python code may apply a method to any object, by ``Layer.__call__(x, ...)``.
    """
    return args[0] if args and is_node(args[0]) else None


def _follow(listener: Listener, method: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    self = _module_in(args)
    if self is None:
        return method(*args, **kwargs)
    if Watch.all and self._nnx_is_captured:
        notice(self)
    stack = listener.stack
    follow = None if stack and stack[-1][0] is self and stack[-1][1] == name else listener.on_call
    scope = "" if runs_eagerly() or not use_name_scopes.current_value() else scope_of_call(listener, self, name)
    finish = None if follow is None else follow(self, listener.path_of(self), name, args[1:], kwargs)
    stack.append((self, name))
    try:
        with jax.named_scope(scope) if scope else _NOTHING:
            out = method(*args, **kwargs)
    except Exception as error:
        add_note(error, listener, args[1:], kwargs)
        hide_frames(error)
        raise
    finally:
        listener.leave()
    if finish is not None:
        finish(out)
    return out


_NOTHING = nullcontext()

# --- calls in eager code ---------------------------------------------------------------------------------------------


def _from_frames() -> Listener | None:
    """A listener with the eager calls that are running in this thread; None if there are none."""
    calls, frame = [], sys._getframe(1)
    while frame is not None:  # traceback.walk_stack would find the number of each line, too
        if is_wrapper(frame.f_code):
            calls.append(frame.f_locals)
        frame = frame.f_back
    eager = [(_module_in(call["args"]), call["name"]) for call in calls if call["listener"] is None]
    stack = [(module, name) for module, name in eager if module is not None]
    if not stack:
        return None
    listener = Listener([stack[-1][0]], [()])
    listener.stack = stack[::-1]
    return listener


def current_listener() -> Listener | None:
    """The listener that knows which method of which Module is running, if any is."""
    return _active.listener or _from_frames()


_CALLS = "_nnx_calls"  # the attribute of an error for a listener with the eager calls that it has yet to leave


def _leave(error: Exception, name: str, args: tuple, kwargs: dict) -> None:
    """Add a note to an error that leaves an eager call; frames and model are searched once for all levels."""
    module = _module_in(args)
    listener: Listener | None = vars(error).pop(_CALLS, None)
    if listener is None or listener.stack[-1][0] is not module or listener.stack[-1][1] != name:  # raised elsewhere
        listener = _from_frames()
    if module is not None and listener is not None:
        add_note(error, listener, args[1:], kwargs)
        if len(listener.stack) > 1:
            listener.stack.pop()
            vars(error)[_CALLS] = listener
    hide_frames(error)


_WRAPPER: Any = observed(lambda self: None, "").__code__  # type: ignore[attr-defined]


def is_wrapper(code: types.CodeType) -> bool:
    """Whether this is the code of a wrapper, or a copy of it: cloudpickle brings one, line_profiler appends to it."""
    return code.co_name == _WRAPPER.co_name and code.co_freevars == _WRAPPER.co_freevars


def is_observed(method: Any) -> bool:
    """Whether this is a method whose calls are noticed."""
    return isinstance(method, types.FunctionType) and is_wrapper(method.__code__)


# --- who listens -----------------------------------------------------------------------------------------------------


def call_listening(listener: Listener | None, f: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Call ``f`` while ``listener`` is the active one of this thread. (Why no context manager: see closures.py.)"""
    outer = _active.listener
    if listener is not None and outer is not None and listener.collector is None:
        listener.on_call, listener.collector = outer.on_call, outer.collector
    try:  # an interrupt may arrive at any time
        _active.listener = listener
        if listener is not None and followed():
            following.append(listener)
        return f(*args, **kwargs)
    finally:
        _active.listener = outer
        if listener in following:
            following.remove(listener)


def call_recording(
    listener: Listener, collector: Collector, on_call: Callable | None, f: Callable[..., R], *args: Any
) -> R:
    """Call ``f`` while the active listener has this ``collector`` and ``on_call``."""
    outer = listener.collector, listener.on_call
    try:
        listener.collector, listener.on_call = collector, on_call
        return call_listening(listener, f, *args)
    finally:
        listener.collector, listener.on_call = outer


following: list[Listener] = []  # in all threads; while it is empty, :func:`followed` is False


def followed() -> bool:
    """Whether the calls in this thread are followed, or what they sow is captured: then they must not be cached."""
    listener = _active.listener
    return listener is not None and (listener.on_call is not None or listener.collector is not None)


def listened() -> bool:
    """Whether this thread has an active listener: a transform is tracing, or the calls are being followed."""
    return _active.listener is not None


def objects_of_traces() -> Iterator[Any]:
    """The objects that the transforms that are tracing in this thread have brought into their traces."""
    listener = _active.listener
    while listener is not None:
        yield from listener.objects
        listener = listener.outer


# --- within nnx.capture ----------------------------------------------------------------------------------------------


def current_collector() -> Collector | None:
    """The Collector of the enclosing ``nnx.capture``; None outside of one."""
    listener = _active.listener
    return None if listener is None else listener.collector


def recorded_types() -> tuple[type, ...]:
    """The types of Variables that the enclosing ``nnx.capture`` takes out; none outside of one."""
    collector = current_collector()
    return () if collector is None else collector.types


def recorder_for(x: Any) -> Any:
    """The object in which to record for ``x``: within a capture, the one that it has built from ``x``, if any."""
    collector = current_collector()
    return x if collector is None else collector.built.get(id(x), x)


def note_copies(originals: Sequence[Any], copies: Sequence[Any]) -> None:
    """Within a capture, note objects that are copies of others: what nodes among them record goes to the originals."""
    listener = _active.listener
    if listener is not None and listener.collector is not None:
        listener.copies += [(copy, x) for copy, x in zip(copies, originals, strict=True) if copy is not x]


def note_split(graphdef: Any, objects: Sequence[Any]) -> None:
    """Within a capture, note the objects that were split into a GraphDef."""
    collector = current_collector()
    if collector is not None:
        collector.splits.append((graphdef, objects))


def split_into(graphdef: Any) -> Sequence[Any] | None:
    """Within a capture, the objects that were last split into this very GraphDef, or else into an equal one."""
    collector = current_collector()
    found = [] if collector is None else collector.splits[::-1]
    same = [objects for x, objects in found if x is graphdef] or [objects for x, objects in found if x == graphdef]
    return same[0] if same else None


# --- what transforms tell of themselves ------------------------------------------------------------------------------


def note_paths(layout: Any, objects: Sequence[Any]) -> None:
    """Remember packed objects by their layout, so that a transform of them can find the paths that they have here."""
    (_active.listener or _active).packed[layout] = objects


def listener_for(layout: Any, objects: Sequence[Any], depth: int = 2) -> Listener:
    """A listener for the objects that a transform built from a layout, with the paths that they have outside.

    An object that has none there has its path in the layout, less the first ``depth`` keys (``args[0]``).
    """
    outer, packed = current_listener(), (_active.listener or _active).packed.get(layout)
    live = None if packed is None else weakref.ref(packed)

    def known() -> Sequence[Path]:
        own = [path[depth:] for path in layout.paths]
        outside = () if outer is None or live is None else list(map(outer.find, live() or ()))
        return [q if p is None else p for p, q in zip(outside or own, own, strict=True)]

    listener = Listener(objects, known)
    listener.layout = layout
    if outer is not None:
        listener.outer = outer
        listener.base = functools.partial(outer.path_of, outer.stack[-1][0]) if outer.stack else outer.base
    return listener


def built_here(x: Any) -> tuple[Any, Sequence[Any], int] | None:
    """The layout from which the innermost transform has built an object, all objects of it, and the row of this one.

    None for any other object. The objects may have changed since they were built, which the caller has to check.
    """
    listener = _active.listener
    row = None if listener is None else listener.rows.get(id(x))
    return None if listener is None or row is None else (listener.layout, listener.objects, row)


def repeated(f: Callable, times: int | None) -> Callable:
    """``f``, for a transform that traces it once and runs it ``times`` times; None if that is not known."""

    @functools.wraps(f, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        outer = _active.runs
        _active.runs = outer * (times or 1)
        try:
            return f(*args, **kwargs)
        finally:
            _active.runs = outer

    return call


def runs() -> int:
    """The number of times that the code being traced will run: more than one in the body of a ``scan`` or ``vmap``."""
    return _active.runs
