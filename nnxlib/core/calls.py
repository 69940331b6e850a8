"""The calls of Modules that are running: one thin wrapper around each method, asleep unless something listens.

Every public method of a Module class, and ``__call__``, is wrapped once when the class is made. The wrapper looks at
one thread-local field. It is ``None`` in eager code, and the method is called directly. While a transform traces, the
field holds a :class:`Listener`, which knows the paths of the objects inside the trace, and the wrapper

- puts the operations of the call under a name scope, the path of the Module, which shows in jaxprs, HLO and profiles;
- tells whoever follows the calls (``nnx.capture(..., method_outputs=...)``, ``nnx.tabulate``).

An exception that leaves the call gets one note per level, in eager code too: path, layer, sizes and inputs.

Eager calls leave no record, and need none: they are frames on the stack of Python. Whoever asks for a path (an error, a
trace that begins, ``nnx.current_path``) finds the Modules that are running in the frames of the wrappers
(:func:`_from_frames`). So an eager call pays nothing for its path.

A path starts at the outermost Module that is running or, inside a transform that no Module has called, at the argument
of the transform; it is the first path there, as in ``nnx.state``.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax

from .captures import Watch, notice
from .errors import describe, describe_nested, format_path, reachable
from .stamps import Stamp, stamping, with_stamp
from .tracing import at_top_level, hide_frames

Path = tuple[Any, ...]


class _Paths:
    """The first paths of all that is below some roots; looked for again when something has been attached there."""

    __slots__ = ("_held", "_roots", "_stamp", "known")

    def __init__(self, roots: Sequence[Any], paths: Sequence[Path]):
        self._roots = roots
        self.known = {id(x): path for x, path in zip(roots, paths, strict=True)}
        self._held: list[Any] = []  # what was attached, so that no id is used again
        self._stamp: Stamp | None = None

    def find(self, x: Any) -> Path | None:
        path = self.known.get(id(x))
        if path is None and not (self._stamp and self._stamp.valid):
            self._walk()
            path = self.known.get(id(x))
        return path

    def _walk(self) -> None:
        self._stamp, seen = Stamp(), set[int]()
        reference = weakref.ref(self._stamp)
        with stamping:
            for root in self._roots:
                for path, node in reachable(root, seen, self.known):
                    if hasattr(type(node), "_nnx_stamps"):  # a Variable would look for it in its value
                        object.__setattr__(node, "_nnx_stamps", with_stamp(node._nnx_stamps, reference))
                    if id(node) not in self.known:
                        self.known[id(node)] = path
                        self._held.append(node)


class Listener:
    """Who is called in one trace: paths by object, and the stack of the calls that are running.

    A transform inside of a transform has a listener of its own, whose objects are known by their paths outside: what
    is packed while a listener is active is noted in ``entered``, and :func:`inside` looks there.

    Args:
      objects: those of the trace; they outlive the listener.
      paths: of these, or what finds them when first asked for.
      on_call: takes module, path, method, args, kwargs; may return what takes the output.
    """

    __slots__ = ("_fresh", "_own", "base", "captured", "entered", "on_call", "outer", "stack")

    def __init__(
        self,
        objects: Sequence[Any],
        paths: Sequence[Path] | Callable[[], Sequence[Path]],
        on_call: Callable[[Any, Path, str, tuple, dict], Callable[[Any], object] | None] | None = None,
        captured: tuple[type, ...] | None = None,
    ):
        self._own: _Paths | Callable[[], _Paths] = lambda: _Paths(objects, paths() if callable(paths) else paths)
        self._fresh: tuple[Any, Path, _Paths] | None = None  # a model made in the trace, and where it is called
        self.stack: list[tuple[Any, str]] = []
        self.on_call = on_call
        self.entered: dict[Any, Sequence[Path | None]] = {}  # layout -> the paths of what was last packed with it
        self.outer: Listener | None = None  # of the trace around this one: it knows what this one captures
        self.base: Callable[[], Path] | None = None  # the path of the call outside that this trace is part of
        self.captured = captured  # the types of Variables that an enclosing nnx.capture takes out, if there is one

    def current(self) -> Path | None:
        """The path of the Module whose method is running; None if there is none."""
        return self.path_of(self.stack[-1][0]) if self.stack else self.base() if self.base is not None else None

    def path_of(self, module: Any) -> Path:
        """The path of a Module; of one that is nobody's part, the name of its class below whoever calls it."""
        path = self.find(module)
        if path is not None:
            return path
        callers = [caller for caller, _ in self.stack if caller is not module]
        outside = self.path_of(callers[-1]) if callers else self.base() if self.base is not None else None
        return () if outside is None else (*outside, type(module).__name__)

    def find(self, x: Any) -> Path | None:
        """The path of a node, if it is part of something that is known here."""
        path = self._attached(x)
        if path is None and self.stack:
            path = self._below_fresh(x)
        return path

    def _attached(self, x: Any) -> Path | None:
        if not isinstance(self._own, _Paths):
            self._own = self._own()
        path = self._own.find(x)
        return self.outer.find(x) if path is None and self.outer is not None else path

    def _below_fresh(self, x: Any) -> Path | None:
        """Below the outermost caller that is nobody's part: a model that was made, or merged, in this trace."""
        outside = self.base() if self.base is not None else None
        for caller, _ in self.stack:
            path = self._attached(caller)
            if path is None:
                start = () if outside is None else (*outside, type(caller).__name__)
                if self._fresh is None or self._fresh[0] is not caller or self._fresh[1] != start:
                    self._fresh = caller, start, _Paths([caller], [start])
                return self._fresh[2].find(x)
            outside = path
        return None


class Rows(list):
    """The objects of a packed table; a list that can be referred to weakly."""

    __slots__ = ("__weakref__",)


class _Active(threading.local):
    listener: Listener | None = None
    runs: int = 1  # for how many runs what is traced now stands

    def __init__(self) -> None:
        self.packed: weakref.WeakValueDictionary[Any, Rows] = weakref.WeakValueDictionary()  # by layout, in eager code

    def __reduce__(self) -> str:  # classes that are pickled by value bring their methods, and those this
        return "_active"


_active = _Active()


def _from_frames() -> Listener | None:
    """A listener that has heard of the eager calls that are running in this thread; None if there are none."""
    stack = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CODE and frame.f_locals["listener"] is None:
            stack.append((frame.f_locals["self"], frame.f_locals["name"]))
        frame = frame.f_back
    if not stack:
        return None
    listener = Listener([stack[-1][0]], [()])
    listener.stack = stack[::-1]
    return listener


def running() -> Listener | None:
    """The listener that knows the Module whose method is running, if there is one."""
    return _active.listener or _from_frames()


def entering(layout: Any, objects: Sequence[Any]) -> None:
    """Note the paths of objects that have been packed, and may be on their way into a transform."""
    listener = _active.listener
    if listener is not None:
        listener.entered[layout] = list(map(listener.find, objects))
    elif isinstance(objects, Rows):
        _active.packed[layout] = objects


def inside(layout: Any, objects: Sequence[Any], paths: Sequence[Path]) -> Listener:
    """A listener for objects made from a layout; ``paths`` are used for those that have none outside."""
    outer = running()
    if outer is None:
        return Listener(objects, paths)
    found: Callable[[], Sequence[Path | None] | None] = functools.partial(outer.entered.get, layout)
    if _active.listener is None:
        packed = _active.packed.get(layout)
        reference = None if packed is None else weakref.ref(packed)

        def found() -> Sequence[Path | None] | None:
            live = None if reference is None else reference()
            return None if live is None else list(map(outer.find, live))

    def known() -> Sequence[Path]:
        there = found()
        return paths if there is None else [q if p is None else p for p, q in zip(there, paths, strict=True)]

    listener = Listener(objects, known)
    listener.outer = outer
    if outer.stack or outer.base is not None:
        here = outer.stack[-1][0] if outer.stack else None
        listener.base = outer.base if here is None else functools.partial(outer.path_of, here)
    return listener


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Let ``listener`` follow the calls made in this thread within the block."""
    outer = _active.listener
    if listener is not None and outer is not None and listener.captured is None:
        listener.on_call, listener.captured = outer.on_call, outer.captured
    _active.listener = listener
    is_followed = followed()
    Followers.add(is_followed)
    try:
        yield
    finally:
        Followers.add(-is_followed)
        _active.listener = outer


def repeated(f: Callable, times: int | None) -> Callable:
    """``f``, whose one trace stands for so many runs."""

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
    """For how many runs what is traced now stands: more than 1 in the body of a ``scan``, or of what is mapped."""
    return _active.runs


class Followers:
    """How many there are, in all threads; while it is 0, nobody need ask :func:`followed`."""

    count = 0
    _lock = threading.Lock()

    @classmethod
    def add(cls, number: int) -> None:
        with cls._lock:
            cls.count += number


def captured_types() -> tuple[type, ...] | None:
    """The types of Variables that the ``nnx.capture`` around this call takes out; None outside of one."""
    listener = _active.listener
    return None if listener is None else listener.captured


def listened() -> bool:
    """Whether there is a listener in this thread: something is being traced, or somebody follows the calls."""
    return _active.listener is not None


def followed() -> bool:
    """Whether somebody in this thread follows the calls, or records what they sow: compiled, they would not run."""
    listener = _active.listener
    return listener is not None and (listener.on_call is not None or listener.captured is not None)


def observed(method: Callable, name: str) -> Callable:
    """Wrap a method of a Module class."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _active.listener
        if listener is not None:
            return _follow(listener, method, name, self, args, kwargs)
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # costs nothing as long as there is none
            _add_note_once_found(error, self, name, args, kwargs)
            hide_frames(error)
            raise

    wrapper._nnx_observed = True  # type: ignore[attr-defined]
    return wrapper


_CODE: Any = observed(lambda self: None, "").__code__  # type: ignore[attr-defined]


def _follow(listener: Listener, method: Callable, name: str, self: Any, args: tuple, kwargs: dict) -> Any:
    if Watch.count:
        notice(self, self._nnx_trace)
    stack = listener.stack
    follow = None if stack and stack[-1][0] is self and stack[-1][1] == name else listener.on_call
    scope = "" if not _names.shown or at_top_level() else _scope(listener, self, name)
    finish = None if follow is None else follow(self, listener.path_of(self), name, args, kwargs)
    stack.append((self, name))
    try:
        with jax.named_scope(scope) if scope else _NOTHING:
            out = method(self, *args, **kwargs)
    except Exception as error:
        _add_note(error, listener, args, kwargs)
        hide_frames(error)
        raise
    finally:
        stack.pop()
    if finish is not None:
        finish(out)
    return out


_NOTHING = nullcontext()

# --- name scopes ----------------------------------------------------------------------------------------------------


class _Names(threading.local):
    shown = True


_names = _Names()


class use_name_scopes:
    """Set whether operations carry the path of the Module that makes them; as a context manager, for a block.

    The names are in jaxprs, in lowered and compiled programs, and so in profiles. They are given while a function is
    traced, and change neither results nor what is compiled again: a function keeps the names it was traced with.

    Args:
      value: whether they do; True by default, in each thread.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> model, x = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), jnp.ones((1, 2))
    >>> lowered = lambda: nnx.jit(lambda model, x: model(x)).lower(model, x).as_text(debug_info=True)
    >>> 'Sequential/layers/0' in lowered()
    True
    >>> with nnx.use_name_scopes(False):
    ...   'Sequential/layers/0' in lowered()
    False
    """

    def __init__(self, value: bool, /):
        self._before = _names.shown
        _names.shown = bool(value)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        _names.shown = self._before


def _scope(listener: Listener, module: Any, name: str) -> str:
    """What a call adds to the scope that it is made in."""
    stack = listener.stack
    if stack and stack[-1][0] is module:  # super().__call__, or another method of the same Module: the same path
        return ""
    path, outer = listener.path_of(module), listener.current()
    below = path if outer is None or path[: len(outer)] != outer else path[len(outer) :]
    scope = "/".join(map(str, below)) or ("" if path == outer else type(module).__name__)
    return scope if name == "__call__" else f"{scope}.{name}"


# --- notes on errors ------------------------------------------------------------------------------------------------


_CALLS = "_nnx_calls"  # an error on its way through eager calls has a listener with those that it has not left yet


def _add_note_once_found(error: Exception, module: Any, name: str, args: tuple, kwargs: dict) -> None:
    """Say that an error leaves an eager call; the frames and the model are looked through once for all levels."""
    listener: Listener | None = vars(error).pop(_CALLS, None)
    if listener is None or listener.stack[-1][0] is not module or listener.stack[-1][1] != name:  # raised elsewhere
        listener = _from_frames()
    _add_note(error, listener, args, kwargs)
    if listener is not None and len(listener.stack) > 1:
        listener.stack.pop()
        vars(error)[_CALLS] = listener


def _add_note(error: Exception, listener: Listener | None, args: tuple, kwargs: dict) -> None:
    """Say that an error leaves the innermost of the running calls."""
    if listener is None:
        return
    module, name = listener.stack[-1]
    if listener.stack[-2:-1] == [(module, name)]:  # of super(): its caller says the same
        return
    method = "" if name == "__call__" else f".{name}"
    named = [f"{key}={describe_nested(value)}" for key, value in kwargs.items()]
    inputs = ", ".join([*map(describe_nested, args), *named])
    where = f"{format_path(listener.path_of(module))}{method} ({_sized(module)})"
    error.add_note(f"in {where}, input {inputs}" if inputs else f"in {where}")
    if abstract := [str(key) for key, x in module._nnx_children() if isinstance(_held(x), jax.ShapeDtypeStruct)]:
        error.add_note(_ABSTRACT.format(names=", ".join(abstract[:_MOST])))


def _held(x: Any) -> Any:
    return x._value if hasattr(type(x), "get_raw_value") else x


_ABSTRACT = """\
it has shapes without values ({names}), as nnx.eval_shape makes them: give them values by nnx.update(model, state), or \
ask for shapes only by nnx.eval_shape(function, model, ...)"""


def _sized(module: Any) -> str:
    """A layer with its sizes, as it tells them: ``Linear 4->2``; another Module with the Variables that it holds."""
    name, sizes = type(module).__name__, getattr(type(module), "_nnx_sizes", None)
    if sizes is not None:
        return f"{name} {sizes(module)}"
    held = [(key, x) for key, x in module._nnx_children() if hasattr(type(x), "get_raw_value")]
    return ", ".join([name, *(f"{key} {describe(x._value)}" for key, x in held[:_MOST])])


_MOST = 4  # Variables that are listed
