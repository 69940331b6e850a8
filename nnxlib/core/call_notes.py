"""Notes on errors: each call of a Module that an error passes through adds a note with its path and its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jax

from .annotations import signature_of
from .call_paths import Listener
from .errors import NnxError, describe, describe_nested, format_path, note_signature
from .tracing import is_deleted, is_own
from .variables import Variable, stored_value


def add_note(error: Exception, listener: Listener, args: tuple, kwargs: dict) -> None:
    """Add a note to an error that leaves the innermost of the running calls, which has these arguments."""
    with suppress(Exception):  # if that fails, the error must not be hidden: a frozen dataclass takes no note
        _add_note(error, listener, args, kwargs)


def _add_note(error: Exception, listener: Listener, args: tuple, kwargs: dict) -> None:
    module, name = listener.stack[-1]
    if listener.stack[-2:-1] == [(module, name)]:  # called through super(): the caller adds the same note
        return
    method = "" if name == "__call__" else f".{name}"
    named = [f"{key}={_shown(value)}" for key, value in kwargs.items()]
    inputs = ", ".join([*map(_shown, args), *named])
    where = f"{format_path(listener.path_of(module))}{method} ({_sized(module)})"
    error.add_note(f"in {where}, input {inputs}" if inputs else f"in {where}")
    called = getattr(type(module), name)
    if is_own(called.__module__):
        note_signature(error, called)
    for hint in _hints(error, module, name, args):
        if hint not in error.__notes__:
            error.add_note(hint)


def _hints(error: Exception, module: Any, name: str, args: tuple) -> Iterator[str]:
    """What may be wrong with a failed call of a method, and what to write instead."""
    held = [(str(key), stored_value(x)) for key, x in module._nnx_children()]
    if abstract := [key for key, x in held if isinstance(x, jax.ShapeDtypeStruct)]:
        yield _ABSTRACT.format(names=", ".join(abstract[:_MOST]))
    if deleted := [key for key, x in held if is_deleted(x)]:
        yield _DELETED.format(names=", ".join(deleted[:_MOST]))
    called = getattr(type(module), name)
    needs_sharding = "out_sharding" in str(error) and not isinstance(error, NnxError)
    if needs_sharding and "out_sharding" in signature_of(called).parameters:
        yield _OUT_SHARDING
    if is_own(called.__module__) and str(error).startswith(called.__qualname__):
        yield from [_MODE.format(name=mode) for mode in _MODES if f"unexpected keyword argument '{mode}'" in str(error)]
    if isinstance(error, NameError) and "unbound axis name" in str(error):
        yield _AXIS_NAME
    if isinstance(error, AttributeError) and error.name and any(error.obj is x for x in args):
        if error.obj is None:
            yield _NOTHING
        elif error.name in ("shape", "ndim", "dtype"):
            yield _NO_ARRAY.format(found=type(error.obj).__name__)
    if isinstance(error, AttributeError) and error.obj is module:
        base, own = _owner(type(module), name), _owner(type(module), "__init__")
        if own is not base and issubclass(own, base) and "__init__" in vars(base):
            yield _NO_SUPER.format(own=own.__name__, base=base.__name__)
        for makes in ("setup", "build"):  # the methods that make layers in flax.linen and Keras
            if inspect.isfunction(getattr(type(module), makes, None)):
                yield _NOT_CALLED.format(name=makes)
    if "__jax_array__()" in str(error):
        yield _PASS_THE_VALUE
    if type(error).__name__ == "CallCompactUnboundModuleError":  # of flax.linen
        yield _OF_LINEN


def _owner(kind: type, method: str) -> type:
    """The class from which a class has a method."""
    return next(base for base in kind.__mro__ if method in vars(base))


def _shown(x: Any) -> str:
    """An input in a note: numbers by value, since they are mostly settings."""
    return repr(x) if isinstance(x, bool | int | float) else describe_nested(x)


def _sized(module: Any) -> str:
    """A layer with its sizes: ``Linear 4->2``; any other Module with the Variables that it holds."""
    name, sizes = type(module).__name__, getattr(type(module), "_nnx_sizes", None)
    with suppress(AttributeError):  # of a layer that lacks attributes, which may be why there is an error
        if sizes is not None:
            return f"{name} {sizes(module)}"
    held = [(key, x) for key, x in module._nnx_children() if isinstance(x, Variable)]
    return ", ".join([name, *(f"{key} {describe(x._nnx_value)}" for key, x in held[:_MOST])])


_MOST = 4  # names to list

_ABSTRACT = """\
it has shapes without values ({names}), as made by nnx.eval_shape: give them values by nnx.update(model, state), or \
ask for shapes only by nnx.eval_shape(function, model, ...)"""

_DELETED = """\
its arrays {names} have been deleted, as what is donated to a compiled function is: nnx.split and nnx.state share the \
arrays of a model, nnx.clone(model) copies them"""

_PASS_THE_VALUE = "a Variable was passed to a function of jax.lax, which takes arrays alone: pass variable.value"
_OF_LINEN = """\
a Linen module has no variables of its own: keep it as nnx.bridge.ToNNX(module, rngs=rngs), and make its variables by \
nnx.bridge.lazy_init(model, x)"""
_NOTHING = "an input is None: is an argument of the call missing, or a `return` where it was made?"
_NO_ARRAY = "it takes an array here, and was given a {found}: jax.numpy.asarray makes one of numbers"
_MODES = "train", "training", "is_training", "inference"
_MODE = "{name} is set for a whole model, by model.train() and model.eval(), and holds until it is set again"
_NOT_CALLED = "nnxlib calls no {name}(): make layers in __init__, or call self.{name}() there"
_NO_SUPER = "the constructor of {own} replaces that of {base}: does it call super().__init__(...)?"
_AXIS_NAME = """\
axis_name is the name of a mapped axis, which a transform around the call gives: nnx.vmap(..., axis_name=...), \
nnx.pmap, nnx.shard_map; without one, leave it out"""
_OUT_SHARDING = "the sharding of its output can be given in the call: layer(x, out_sharding=jax.P(...))"
