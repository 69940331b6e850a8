"""Calls of Modules: which methods are running, and under which paths.

Every public method of a Module class, and ``__call__``, is wrapped once, when the class is defined. In eager code the
wrapper finds that a thread-local field is ``None``, and calls the method directly. While a transform traces, the field
holds a :class:`Listener`, which knows the paths of the objects inside the trace. Then the wrapper

- puts the operations of the call under a name scope, the path of the Module, which shows in jaxprs, HLO and profiles;
- tells whoever follows the calls (``nnx.capture(..., method_outputs=...)``, ``nnx.tabulate``).

An exception gets a note from each call that it leaves, in eager code too: path, layer, sizes and inputs.

Eager calls are not recorded anywhere, since they are frames on Python's stack. Whoever needs a path (an error, a trace
that begins, ``nnx.current_path``) finds the running Modules in the frames of the wrappers (:func:`_from_frames`). So
paths cost an eager call nothing.

A path starts at the outermost Module that is running or, inside a transform that was not called by a Module, at the
argument of the transform. An object that can be reached by several paths has the first of them, as in ``nnx.state``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import jax

from .closures import Watch, notice
from .data import is_node
from .errors import describe, describe_nested, format_path
from .finding import reachable
from .stamps import Stamp, stamping, with_stamp
from .tracing import hide_frames, is_deleted, runs_eagerly

Path = tuple[Any, ...]


class _Paths:
    """The first path to each object below some roots; found again when something has been attached there."""

    __slots__ = ("_attached", "_roots", "_stamp", "known")

    def __init__(self, roots: Sequence[Any], paths: Sequence[Path]):
        self._roots = roots
        self.known = {id(x): path for x, path in zip(roots, paths, strict=True)}
        self._attached: list[Any] = []  # kept alive, so that no id is reused
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
                    if hasattr(type(node), "_nnx_stamps"):  # of the type: a Variable would ask its value
                        object.__setattr__(node, "_nnx_stamps", with_stamp(node._nnx_stamps, reference))
                    if id(node) not in self.known:
                        self.known[id(node)] = path
                        self._attached.append(node)


class Listener:
    """The calls of Modules in one trace: the paths of the objects, and the stack of running calls.

    A transform inside of a transform has a listener of its own. Its objects keep the paths that they have outside: what
    is packed while a listener is active is noted in ``entered``, where :func:`inside` finds it.

    Args:
      objects: of the trace; they outlive the listener.
      paths: of these, or a function that finds them, called when a path is first asked for.
      on_call: called with module, path, method name, args and kwargs of each call; may return a function, which is
        then called with the output.
      recorded: the types of Variables that an enclosing ``nnx.capture`` takes out; None outside of one.
    """

    __slots__ = ("_new", "_own", "base", "entered", "on_call", "outer", "recorded", "stack")

    def __init__(
        self,
        objects: Sequence[Any],
        paths: Sequence[Path] | Callable[[], Sequence[Path]],
        on_call: Callable[[Any, Path, str, tuple, dict], Callable[[Any], object] | None] | None = None,
        recorded: tuple[type, ...] | None = None,
    ):
        self._own: _Paths | Callable[[], _Paths] = lambda: _Paths(objects, paths() if callable(paths) else paths)
        self._new: tuple[Any, Path, _Paths] | None = None  # a model made in the trace, its path, those below it
        self.stack: list[tuple[Any, str]] = []
        self.on_call = on_call
        self.entered: dict[Any, Sequence[Path | None]] = {}  # layout -> the paths of what was last packed with it
        self.outer: Listener | None = None  # of the trace around this one: it knows the objects that this one captures
        self.base: Callable[[], Path] | None = None  # the path of the Module, outside, in whose call this trace began
        self.recorded = recorded

    def current(self) -> Path | None:
        """The path of the Module whose method is running; None if none is."""
        return self.path_of(self.stack[-1][0]) if self.stack else self.base() if self.base is not None else None

    def path_of(self, module: Any) -> Path:
        """The path of a Module; if it is part of nothing known here, its class name below the path of its caller."""
        path = self.find(module)
        if path is not None:
            return path
        callers = list(itertools.takewhile(lambda caller: caller is not module, [caller for caller, _ in self.stack]))
        outside = self.path_of(callers[-1]) if callers else self.base() if self.base is not None else None
        return () if outside is None else (*outside, type(module).__name__)

    def find(self, x: Any) -> Path | None:
        """The path of a node, if it is part of something that is known here."""
        path = self._find_known(x)
        if path is None and self.stack:
            path = self._find_below_new(x)
        return path

    def _find_known(self, x: Any) -> Path | None:
        if not isinstance(self._own, _Paths):
            self._own = self._own()
        path = self._own.find(x)
        return self.outer.find(x) if path is None and self.outer is not None else path

    def _find_below_new(self, x: Any) -> Path | None:
        """Look below the outermost caller that is part of nothing known here: a model made or merged in this trace."""
        outside = self.base() if self.base is not None else None
        for caller, _ in self.stack:
            path = self._find_known(caller)
            if path is None:
                start = () if outside is None else (*outside, type(caller).__name__)
                if self._new is None or self._new[0] is not caller or self._new[1] != start:
                    self._new = caller, start, _Paths([caller], [start])
                return self._new[2].find(x)
            outside = path
        return None


class ObjectList(list):
    """The objects of a packed table, by row: a list that can be referred to weakly."""

    __slots__ = ("__weakref__",)


class _Active(threading.local):
    listener: Listener | None = None
    runs: int = 1  # see runs()

    def __init__(self) -> None:
        # By layout, what was last packed with it in eager code.
        self.packed: weakref.WeakValueDictionary[Any, ObjectList] = weakref.WeakValueDictionary()

    def __reduce__(self) -> str:  # a class pickled by value brings its methods, and these refer to this object
        return "_active"


_active = _Active()


def _from_frames() -> Listener | None:
    """A listener with the eager calls that are running in this thread; None if there are none."""
    stack = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CODE and frame.f_locals["listener"] is None and is_node(frame.f_locals["self"]):
            stack.append((frame.f_locals["self"], frame.f_locals["name"]))
        frame = frame.f_back
    if not stack:
        return None
    listener = Listener([stack[-1][0]], [()])
    listener.stack = stack[::-1]
    return listener


def running() -> Listener | None:
    """The listener that knows which method of which Module is running, if any is."""
    return _active.listener or _from_frames()


def entering(layout: Any, objects: Sequence[Any]) -> None:
    """Note the paths of objects that have been packed: they may be about to enter a transform."""
    listener = _active.listener
    if listener is not None:
        listener.entered[layout] = list(map(listener.find, objects))
    elif isinstance(objects, ObjectList):
        _active.packed[layout] = objects


def inside(layout: Any, objects: Sequence[Any], depth: int = 2) -> Listener:
    """A listener for the objects that a transform built from a layout; their paths are those that they have outside.

    An object without one has its path in the layout, less the first ``depth`` keys (``args[0]``).
    """

    def own() -> Sequence[Path]:
        return [path[depth:] for path in layout.paths]

    outer = running()
    if outer is None:
        return Listener(objects, own)
    found: Callable[[], Sequence[Path | None] | None] = functools.partial(outer.entered.get, layout)
    if _active.listener is None:
        packed = _active.packed.get(layout)
        reference = None if packed is None else weakref.ref(packed)

        def found() -> Sequence[Path | None] | None:
            live = None if reference is None else reference()
            return None if live is None else list(map(outer.find, live))

    def known() -> Sequence[Path]:
        there = found()
        return own() if there is None else [q if p is None else p for p, q in zip(there, own(), strict=True)]

    listener = Listener(objects, known)
    listener.outer = outer
    if outer.stack or outer.base is not None:
        here = outer.stack[-1][0] if outer.stack else None
        listener.base = outer.base if here is None else functools.partial(outer.path_of, here)
    return listener


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Make ``listener`` the active one of this thread within the block."""
    outer = _active.listener
    if listener is not None and outer is not None and listener.recorded is None:
        listener.on_call, listener.recorded = outer.on_call, outer.recorded
    try:  # an interrupt may arrive at any time
        _active.listener = listener
        if listener is not None and followed():
            following.append(listener)
        yield
    finally:
        _active.listener = outer
        if listener in following:
            following.remove(listener)


@contextmanager
def recording(listener: Listener, kinds: tuple[type, ...], on_call: Callable | None) -> Iterator[None]:
    """Within the block, the active listener has these for ``recorded`` and ``on_call``."""
    outer = listener.recorded, listener.on_call
    listener.recorded, listener.on_call = kinds, on_call
    try:
        with listening(listener):
            yield
    finally:
        listener.recorded, listener.on_call = outer


def repeated(f: Callable, times: int | None) -> Callable:
    """``f``, for a transform that traces it once and runs it ``times`` times."""

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
    """How often the code that is being traced will run: more than once in the body of a ``scan`` or ``vmap``."""
    return _active.runs


following: list[Listener] = []  # in all threads; while there are none, :func:`followed` need not be asked


def recorded_types() -> tuple[type, ...] | None:
    """The types of Variables that the enclosing ``nnx.capture`` takes out; None outside of one."""
    listener = _active.listener
    return None if listener is None else listener.recorded


def listened() -> bool:
    """Whether this thread has an active listener: a transform is tracing, or the calls are being followed."""
    return _active.listener is not None


def followed() -> bool:
    """Whether the calls in this thread are followed, or what they sow is recorded: then they must not be cached."""
    listener = _active.listener
    return listener is not None and (listener.on_call is not None or listener.recorded is not None)


def observed(method: Callable, name: str) -> Callable:
    """Wrap a method of a Module class."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _active.listener
        if listener is not None:
            return _follow(listener, method, name, self, args, kwargs)
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # costs nothing unless raised
            _add_note_eagerly(error, self, name, args, kwargs)
            hide_frames(error)
            raise

    return wrapper


_CODE: Any = observed(lambda self: None, "").__code__  # type: ignore[attr-defined]


def _follow(listener: Listener, method: Callable, name: str, self: Any, args: tuple, kwargs: dict) -> Any:
    if not is_node(self):  # `Layer.__call__(x, ...)` may lend a method to any object
        return method(self, *args, **kwargs)
    if Watch.count:
        notice(self, self._nnx_trace)
    stack = listener.stack
    follow = None if stack and stack[-1][0] is self and stack[-1][1] == name else listener.on_call
    scope = "" if not _names.shown or runs_eagerly() else _scope(listener, self, name)
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

    The names appear in jaxprs, in lowered and compiled programs, and so in profiles. They are given while a function is
    traced, and change neither results nor the need to compile: a function keeps the names it was traced with.

    Args:
      value: whether they do, in this thread; initially True.

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
    """What a call adds to the name scope around it."""
    stack = listener.stack
    if stack and stack[-1][0] is module:  # super().__call__, or another method of the same Module: the same path
        return ""
    path, outer = listener.path_of(module), listener.current()
    below = path if outer is None or path[: len(outer)] != outer else path[len(outer) :]
    scope = "/".join(map(str, below)) or ("" if path == outer else type(module).__name__)
    return scope if name == "__call__" else f"{scope}.{name}"


# --- notes on errors ------------------------------------------------------------------------------------------------


_CALLS = "_nnx_calls"  # the attribute of an error that keeps a listener with the eager calls that it has yet to leave


def _add_note_eagerly(error: Exception, module: Any, name: str, args: tuple, kwargs: dict) -> None:
    """Note that an error leaves an eager call; the frames and the model are searched once for all levels."""
    if not is_node(module):
        return
    listener: Listener | None = vars(error).pop(_CALLS, None)
    if listener is None or listener.stack[-1][0] is not module or listener.stack[-1][1] != name:  # raised elsewhere
        listener = _from_frames()
    _add_note(error, listener, args, kwargs)
    if listener is not None and len(listener.stack) > 1:
        listener.stack.pop()
        vars(error)[_CALLS] = listener


def _add_note(error: Exception, listener: Listener | None, args: tuple, kwargs: dict) -> None:
    """Note that an error leaves the innermost of the running calls."""
    if listener is None:
        return
    module, name = listener.stack[-1]
    if listener.stack[-2:-1] == [(module, name)]:  # called by super(): the caller adds the same note
        return
    method = "" if name == "__call__" else f".{name}"
    named = [f"{key}={_shown(value)}" for key, value in kwargs.items()]
    inputs = ", ".join([*map(_shown, args), *named])
    where = f"{format_path(listener.path_of(module))}{method} ({_sized(module)})"
    error.add_note(f"in {where}, input {inputs}" if inputs else f"in {where}")
    if abstract := [str(key) for key, x in module._nnx_children() if isinstance(_value(x), jax.ShapeDtypeStruct)]:
        error.add_note(_ABSTRACT.format(names=", ".join(abstract[:_MOST])))
    if deleted := [str(key) for key, x in module._nnx_children() if is_deleted(_value(x))]:
        error.add_note(_DELETED.format(names=", ".join(deleted[:_MOST])))
    if "out_sharding" in str(error) and "out_sharding" in inspect.signature(getattr(type(module), name)).parameters:
        error.add_note(_OUT_SHARDING)
    if "__jax_array__()" in str(error) and _PASS_THE_VALUE not in error.__notes__:
        error.add_note(_PASS_THE_VALUE)


def _shown(x: Any) -> str:
    """An input for a note: numbers by value, for they are mostly settings."""
    return repr(x) if isinstance(x, bool | int | float) else describe_nested(x)


def _value(x: Any) -> Any:
    return x._value if hasattr(type(x), "get_raw_value") else x


_ABSTRACT = """\
it has shapes without values ({names}), as made by nnx.eval_shape: give them values by nnx.update(model, state), or \
ask for shapes only by nnx.eval_shape(function, model, ...)"""

_DELETED = """\
its arrays {names} have been deleted, as what is donated to a compiled function is: nnx.split and nnx.state share the \
arrays of a model, nnx.clone(model) copies them"""


_PASS_THE_VALUE = "a Variable was passed to a function of jax.lax, which takes arrays alone: pass variable.value"
_OUT_SHARDING = "the sharding of its output can be given in the call: layer(x, out_sharding=jax.P(...))"


def _sized(module: Any) -> str:
    """A layer with its sizes: ``Linear 4->2``; any other Module with the Variables that it holds."""
    name, sizes = type(module).__name__, getattr(type(module), "_nnx_sizes", None)
    with suppress(AttributeError):  # of a layer that lacks attributes, which may be why there is an error
        if sizes is not None:
            return f"{name} {sizes(module)}"
    held = [(key, x) for key, x in module._nnx_children() if hasattr(type(x), "get_raw_value")]
    return ", ".join([name, *(f"{key} {describe(x._value)}" for key, x in held[:_MOST])])


_MOST = 4  # names to list
