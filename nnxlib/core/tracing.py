"""Traces of JAX: which one is running; and everything else that depends on JAX's internals or its version.

A *trace* is JAX's record of a function while it runs on tracers. An object remembers the trace under which it was made:
``None`` at top level, else a weak reference, so that no live object keeps a trace alive. It may be written only while
this trace is running, since otherwise a tracer could outlive its trace.

The other sections, which are here because they depend on JAX's internals, are about arrays and meshes, about jaxprs and
the name scopes of their equations, and about stack frames: which ones tracebacks show, to which one a warning points,
and the memory for them.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

import jax

# jax.extend.core.get_opaque_trace_state answers the same question, but allocates an object at each call and compares in
# Python, which takes nine times as long; every attribute write of every Module asks it.
from jax._src import core as _core

# JAX hides its own frames from the tracebacks that users see, and has no public way for a library to join in.
from jax._src import source_info_util as _source_info
from jax._src import traceback_util as _frames

# The traces of derivatives and of vmap, which pass each operation, transformed, to the enclosing trace.
from jax._src.interpreters.ad import JVPTrace, LinearizeTrace
from jax._src.interpreters.batching import BatchTrace

# The mesh of ``jax.set_mesh`` with its devices, for JAX 0.8, which has no public way to see them. And the mesh of a
# `with mesh:` block; JAX deprecates the block, but offers no other way to see its mesh.
from jax._src.mesh import get_concrete_mesh as _get_concrete_mesh
from jax._src.mesh import thread_resources as _thread_resources
from jax.core import AbstractValue as AbstractValue
from jax.core import Tracer as Tracer
from jax.interpreters import ad, partial_eval

from .errors import note_signature, note_switches

TraceRef = weakref.ref | None
P = ParamSpec("P")
R = TypeVar("R")

EAGER = _core.eval_trace  # the trace that runs while nothing is traced
_attribute, _holder = "trace", _core.trace_ctx
if hasattr(_core, "trace_state_strong_ref"):  # since JAX 0.12, where ``trace_ctx.trace`` is a function of Python
    _attribute, _holder = "value", _core.trace_state_strong_ref
_property = getattr(type(_holder), _attribute, None)
running_trace: Callable[[], Any] = functools.partial(operator.attrgetter(_attribute), _holder)
if isinstance(_property, property) and _property.fget is not None:  # the same, in two thirds of the time
    running_trace = types.MethodType(_property.fget, _holder)

_BETWEEN = weakref.ref(weakref)  # what it refers to does not matter


def current_trace() -> TraceRef:
    """Return a weak reference to the running trace, always the same one; ``None`` at top level.

    Between traces, as in the rule that says which types a primitive returns, JAX runs none. A model that such a rule
    unflattens is no live model from top level; so a reference of its own, ``_BETWEEN``, stands for the trace.
    """
    trace = running_trace()
    return None if trace is EAGER else _BETWEEN if trace is None else trace._weakref


def at_top_level() -> bool:
    """Whether no JAX transformation is running in this thread."""
    trace = running_trace()
    return trace is EAGER or trace is None


def runs_eagerly() -> bool:
    """Whether operations compute at once, as they also do in an eager ``jax.grad`` or ``jax.vmap``.

    False under a transformation that is not known to take every operation, such as ``jax.experimental.jet``.
    """
    trace = running_trace()
    while isinstance(trace, _TRANSFORMING):
        trace = trace.parent_trace
    return trace is EAGER or trace is None


_TRANSFORMING = (JVPTrace, LinearizeTrace, BatchTrace)


def abandon_trace() -> None:
    """Drop the constants of the running trace, which has failed: JAX would keep them forever."""
    if not at_top_level():
        running_trace().invalidate()


def in_current_trace(value: object) -> bool:
    """Whether ``value`` is a tracer of the running trace itself, not of an enclosing one."""
    return isinstance(value, Tracer) and value._trace is running_trace()


# --- arrays and meshes ----------------------------------------------------------------------------------------------


def is_deleted(value: object) -> bool:
    """Whether ``value`` is an array whose buffer is gone, such as a donated one, or a tracer of one."""
    while isinstance(value, Tracer):
        value = getattr(value, "primal", getattr(value, "val", None))  # in a `jax.grad`; in a `jax.vmap`
    return isinstance(value, jax.Array) and value.is_deleted()


def is_readable(x: jax.Array) -> bool:
    """Whether this process can read a whole concrete array: not if it was donated, or has parts in other processes."""
    return not x.is_deleted() and (x.is_fully_addressable or x.is_fully_replicated)


def is_key(x: Any) -> bool:
    """Whether this is an array of random keys."""
    return hasattr(x, "dtype") and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def bits_of(key: jax.Array) -> jax.Array:
    """The data of a random key that is no tracer; in a trace, `jax.random.key_data` would make a tracer of it."""
    with jax.ensure_compile_time_eval():
        return jax.random.key_data(key)


def current_mesh() -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """The mesh of the context: of a ``shard_map``, ``jax.set_mesh`` or a ``with mesh:`` block; None without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = _thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


# The mesh of ``jax.set_mesh``, with its devices; to be called at top level only.
concrete_mesh: Callable[[], jax.sharding.Mesh] = getattr(jax.sharding, "get_mesh", _get_concrete_mesh)


def resharded(x: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
    """A traced array with a sharding over explicit axes of a mesh."""
    reshard = jax.sharding.reshard
    if jax.__version_info__ < (0, 10):  # where an eager `vmap` refuses it, unless it is compiled
        return jax.jit(reshard, static_argnums=1)(x, sharding)
    return reshard(x, sharding)


def varying_as(x: jax.Array, other: jax.Array) -> jax.Array:
    """``x``, marked as varying over the axes of a ``shard_map`` over which ``other`` varies."""
    axes = tuple(varying_axes(jax.typeof(other)) - varying_axes(jax.typeof(x)))
    if not axes:
        return x
    lax: Any = jax.lax
    return lax.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, axes)


def zeros_of(type_: Any) -> jax.Array:
    """Zeros of a type from ``jax.typeof``: with its sharding, and varying over the same axes."""
    if jax.numpy.issubdtype(type_.dtype, jax.dtypes.prng_key):  # of which JAX would make zero tangents
        return jax.numpy.zeros(type_.shape, type_.dtype)
    return ad.zeros_like_aval(type_)


def slice_type(x: Any, axis: int) -> AbstractValue:
    """The type of a slice of an array along an axis, as a loop over it sees one: with its sharding and weak type."""
    type_ = jax.typeof(x)
    return _core.mapped_aval(type_.shape[axis], axis % type_.ndim, type_)


def varying_axes(type_: Any) -> frozenset[str]:
    """The axes of a ``shard_map`` over which arrays of a type from ``jax.typeof`` vary."""
    return type_.vma if hasattr(type_, "vma") else type_.manual_axis_type.varying


# --- jaxprs ---------------------------------------------------------------------------------------------------------

# The same function as in jax.extend.core, whose import is slow, since it loads Pallas.
jaxpr_as_fun = _core.jaxpr_as_fun


def evaluate(closed: Any, *args: Any) -> list[Any]:
    """Call a closed jaxpr; unlike what :func:`jaxpr_as_fun` returns, with JAX's checks for NaNs, if these are on."""
    return list(_core.eval_jaxpr(getattr(closed, "jaxpr", closed), closed.consts, *args))


def inputs_needed(closed: Any, outputs: Collection[int]) -> list[bool]:
    """For each input of a closed jaxpr, whether some of these outputs depend on it."""
    jaxpr = getattr(closed, "jaxpr", closed)
    return partial_eval.dce_jaxpr(jaxpr, [n in outputs for n in range(len(jaxpr.outvars))])[1]


_SCOPE = "<name scope>"  # the file name of the frame that has the name scope of an equation


def named_equations(closed: Any, change: Callable[[dict[str, Any], Any], dict[str, Any]]) -> Any:
    """A closed jaxpr in which the traceback of each equation shows its name scope, and the line of the user's code.

    ``change(params, traceback)`` gives the new parameters of an equation.
    """

    def in_jaxpr(jaxpr: Any, outer: tuple[str, ...]) -> Any:
        equations = []
        for eqn in jaxpr.eqns:
            scope = (*outer, *filter(None, [str(eqn.source_info.name_stack)]))
            line = _source_info.summarize(eqn.source_info)
            told = _traceback_telling(", ".join(filter(None, ["/".join(scope), line])) if scope else "")
            params = {name: in_value(value, scope) for name, value in eqn.params.items()}
            info = eqn.source_info.replace(traceback=told)
            equations.append(eqn.replace(params=change(params, told), source_info=info))
        return jaxpr.replace(eqns=equations)

    def in_value(value: Any, scope: tuple[str, ...]) -> Any:
        if hasattr(value, "eqns"):
            inner = getattr(value, "jaxpr", value)  # since JAX 0.12 every jaxpr is a closed one
            return in_jaxpr(value, scope) if inner is value else value.replace(jaxpr=in_jaxpr(inner, scope))
        return type(value)(in_value(x, scope) for x in value) if type(value) in (tuple, list) else value

    return in_value(closed, ())


def _traceback_telling(text: str) -> Any:
    code = _traceback_here.__code__.replace(co_name=text, co_qualname=text, co_filename=_SCOPE)
    return types.FunctionType(code, globals())()


def _traceback_here() -> Any:
    with _source_info.user_context(None):
        return _source_info.current().traceback


def scope_of(traceback_info: Any) -> str | None:
    """The name scope, and the line, that the traceback of an equation shows, if :func:`named_equations` made it."""
    frames = getattr(traceback_info, "frames", ())
    return next((frame.function_name for frame in frames if frame.file_name == _SCOPE), None)


# --- frames ---------------------------------------------------------------------------------------------------------

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")

_frames.register_exclusion(_PACKAGE)
_source_info.register_exclusion(_PACKAGE)  # so the operations of a layer show the line of the user's code that calls it

_JAX = os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), "")


@functools.cache  # JAX searches its list of exclusions for each frame
def is_users(file: str) -> bool:
    """Whether a file belongs neither to nnxlib nor to JAX (which does not hide all of its own from tracebacks)."""
    return _frames.include_filename(file) and not file.startswith(_JAX)


class UserLine:
    """The line of the user's code that is running, for a warning, which may come later."""

    __slots__ = ("_at", "function")

    def __init__(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        self.function, names = frame.f_code.co_name, frame.f_globals
        registry = names.setdefault("__warningregistry__", {})  # by which a warning comes once for each line
        self._at = frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry

    def warn(self, text: str, category: type[Warning] = UserWarning) -> None:
        warnings.warn_explicit(text, category, *self._at)


_LIFTING = os.path.join(_PACKAGE, "transforms", "")
_INSTALLED = f"{os.sep}site-packages{os.sep}"


def enclosing_transform() -> tuple[str | None, list[str]]:
    """The innermost transform around the code: ``"nnx"`` for one of nnxlib, else its name, such as ``"jax.lax.scan"``.

    ``"jax"`` if it is one of JAX whose name cannot be found, None if there is none. Also the names of the installed
    packages through which the user's code calls the transform. It searches the frames, which is slow: only for error
    messages.
    """
    frame, names = sys._getframe(1), []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_JAX) and not file.endswith("tree_util.py"):
            # the qualified name of a returned function, as in ``jax.grad(f)(x)``, begins with what made it
            names.append(frame.f_code.co_qualname.partition(".")[0].lstrip("_"))
        elif names:
            break
        elif file.startswith(_LIFTING):
            return "nnx", []
        frame = frame.f_back
    packages = dict[str, None]()
    while frame is not None and _INSTALLED in frame.f_code.co_filename:
        if not frame.f_code.co_filename.startswith((_JAX, _PACKAGE)):
            packages[frame.f_globals.get("__name__", "").partition(".")[0]] = None
        frame = frame.f_back
    places = {"jax.": jax, "jax.lax.": jax.lax}
    known = [place + name for name in names if name in _TRANSFORMS for place in places if hasattr(places[place], name)]
    return (known[-1] if known else "jax" if names else None), list(packages)[::-1]


_TRANSFORMS = """
    grad value_and_grad vmap pmap scan while_loop fori_loop cond switch checkpoint vjp jvp linearize jacfwd jacrev
    hessian eval_shape make_jaxpr shard_map
""".split()
NOTHING_RUNS = "jax.eval_shape", "jax.make_jaxpr"  # what a function changes there is not meant to be kept


def is_own(module: str) -> bool:
    """Whether a module, by its name, belongs to nnxlib."""
    return module.startswith(_OWN)


_OWN = __name__.partition(".")[0] + "."


def with_room(f: Callable[..., R], /, *args: Any) -> R:
    """Call ``f`` with half a megabyte reserved for the frames of Python functions; for traces, which nest deeply.

    CPython allocates memory for frames in chunks of 16 KiB, and up to 3.13 frees a chunk as soon as no frame is in it.
    So a loop that happens to run at the end of a chunk allocates and frees one for each function that it calls, and a
    trace may take a fifth longer. But a frame that needs more gets a chunk of the next power of two, and the frames of
    the functions that it calls use the rest of that.
    """
    return f(*args)


with_room.__code__ = with_room.__code__.replace(co_stacksize=2**16)  # words, which remain untouched


def ensure_stack(frames: int = 16) -> None:
    """Raise a RecursionError if there is no room on the stack for so many frames; before what must not be half done."""
    if frames:
        ensure_stack(frames - 1)


def hide_frames(error: BaseException) -> None:
    """Remove the frames of nnxlib and JAX from the traceback of an error that is about to reach the user.

    JAX's own switch decides: with ``jax_traceback_filtering`` set to ``off``, all frames stay.
    """
    mode = _frames._filtering_mode()
    if mode == "off":
        return
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen and not isinstance(found, _frames.UnfilteredStackTrace):
        seen.add(id(found))
        frames = list(traceback.walk_tb(found.__traceback__))
        kept = None
        for frame, line in reversed(frames):
            if is_users(frame.f_code.co_filename):
                kept = types.TracebackType(kept, frame, frame.f_lasti, line)
            elif mode == "tracebackhide":
                frame.f_locals["__tracebackhide__"] = True
        if mode != "tracebackhide":
            found.with_traceback(kept)  # sets no attribute, which the error may refuse: a frozen dataclass, say
        if is_own(type(found.__context__).__module__) and not isinstance(found.__context__, Exception):
            found.__context__ = None  # it only abandoned a trace (CapturedObjects, AbsentInput)
        found = found.__cause__ or found.__context__


def boundary(f: Callable[P, R]) -> Callable[P, R]:
    """``f``, with the frames of nnxlib hidden in errors that leave it, and a note if the arguments do not fit it."""

    @functools.wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return f(*args, **kwargs)
        except Exception as error:
            note_signature(error, f)
            note_switches(error, kwargs)
            hide_frames(error)
            raise

    return call
