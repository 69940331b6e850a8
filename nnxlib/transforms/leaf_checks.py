"""Checks of leaves: JAX must be able to trace what goes into a function and to return what comes out, and some leaves
must keep their types, in an iteration or from one branch to another.

JAX's own errors name a position among hundreds of arrays. These name the path, and say what to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import all_leaves

from ..core.errors import ArgumentError, IntegerRangeError, OutputError, describe, format_path, listed, place_of
from ..core.graph import After
from ..core.layout import Layout
from ..core.reprs import static_repr
from ..core.static import has_hash
from ..core.tracing import AbstractValue, Tracer, varying_axes


def check_returned(after: After) -> None:
    """Check that JAX can return each leaf that is to come back from a trace.

    Raises:
      OutputError: naming the path, in the arguments or in the output.
    """
    for k, leaf in enumerate(after.leaves):
        if isinstance(leaf, Tracer):  # as nearly all are
            continue
        try:
            jax.tree.map(jax.typeof, leaf)
        except (TypeError, OverflowError):
            kind = IntegerRangeError if isinstance(leaf, int) else OutputError
            raise kind(
                f"{place_of(after.leaf_paths[k])} is set to a {type(leaf).__name__} ({leaf!r:.80}), which cannot come "
                "out of a compiled function. Return arrays, and keep other values in static attributes or outside."
                + (_OF_ARRAYS if dataclasses.is_dataclass(leaf) else "")
            ) from None


def is_traceable(leaf: Any) -> bool:
    """Whether JAX can trace a leaf, or it is a pytree."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):  # as nearly all are
        return True
    if not all_leaves([leaf]):  # before JAX is asked, whose error would have the text of all arrays in it
        return True
    try:
        jax.typeof(leaf)
    except (TypeError, OverflowError):  # the latter of an int
        return False
    return True


def is_literal(leaf: Any) -> bool:
    """Whether a value says what to do: a bool, integers in a tuple, or what cannot be traced (text, a sharding).

    In a captured Variable it is a literal, see literals.py.
    """
    kind = type(leaf)
    return kind is bool or (issubclass(kind, tuple) and is_integer(leaf)) or (not is_traceable(leaf) and has_hash(leaf))


def is_integer(leaf: Any) -> bool:
    """Whether a value is an integer, or a tuple of integers, such as a shape."""
    if isinstance(leaf, tuple):
        return bool(leaf) and all(map(is_integer, leaf))
    return isinstance(leaf, int | np.integer | np.bool_)


def check_traceable(layout: Layout, leaves: Sequence[Any]) -> None:
    """Check that JAX can trace each leaf of the arguments, except literals in what is captured (literals.py).

    Raises:
      ArgumentError: naming the argument, and what to do.
    """
    if all(isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for leaf in leaves):  # as they nearly always are
        return
    places = [_UNTRACEABLE_VALUE] * len(layout.variables) + [_UNTRACEABLE] * (len(leaves) - len(layout.variables))
    for path, leaf, message in reversed([*zip(layout.leaf_paths, leaves, places, strict=True)]):
        if not is_traceable(leaf) and not (path[:1] == ("captured",) and is_literal(leaf)):
            said = message.format(name=format_path(path), kind=type(leaf).__name__, value=leaf)
            if isinstance(leaf, int):
                raise IntegerRangeError(said + _TOO_LARGE)
            raise ArgumentError(said + (_OF_ARRAYS if dataclasses.is_dataclass(leaf) else ""))


def explain_untraced(error: Exception, layout: Layout, leaves: Sequence[Any]) -> None:
    """Say which of the arguments are why JAX has raised an error, if any are.

    Raises:
      ArgumentError: in place of the error, as :func:`check_traceable`.
    """
    check_traceable(layout, leaves)
    note_abstract(error, layout, leaves)
    if isinstance(error, _CONCRETE):
        for path, leaf in zip(layout.leaf_paths, leaves, strict=True):
            if type(leaf) in (bool, int) and format_path(path) in str(error):
                error.add_note(f"{format_path(path)} is {leaf}, which JAX traces as it does an array. {_BIND}")


def note_abstract(error: Exception, layout: Layout, leaves: Sequence[Any]) -> None:
    """Note on an error which leaves are shapes without values: the error may only speak of tracers made of them."""
    abstract = [
        f"{format_path(path)}: {describe(leaf)}"
        for path, leaf in zip(layout.leaf_paths, leaves, strict=True)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if abstract:
        error.add_note(listed(_ABSTRACT, abstract))


_ABSTRACT = """\
These are shapes without values, as made by nnx.eval_shape: give them values by nnx.update(model, state), or ask for \
shapes only by nnx.eval_shape(function, model, ...):"""

_CONCRETE = jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError

_BIND = """\
If it is part of the program, bind it beforehand with functools.partial or a closure; or, for nnx.jit, declare it \
static: static_argnums=... or static_argnames=..."""

_UNTRACEABLE = "{name} is a {kind} ({value!r:.80}), which JAX cannot trace. " + _BIND

_OF_ARRAYS = """ \
If it holds arrays, register the dataclass (jax.tree_util.register_dataclass), or make it an nnx.Pytree, with \
@nnx.dataclass."""

_TOO_LARGE = " JAX's integers have 32 bits, or 64 with jax.enable_x64(True)."

_UNTRACEABLE_VALUE = """\
The Variable {name} holds a {kind} ({value!r:.80}), which JAX cannot trace: Variables are for arrays. Keep it in an \
attribute of its own, `module.name = value`, which is a part of the program."""


def type_of(leaf: Any) -> Any:
    """The ``jax.typeof`` of a leaf, or of each in a pytree: shape, dtype, and sharding. A type is its own type."""
    return jax.tree.map(lambda x: x if isinstance(x, AbstractValue) else jax.typeof(x), leaf)


BECAME = "{} became {}"


def type_changes(values: Sequence[Any], types: Sequence[Any], paths: Sequence[tuple], said: str = BECAME) -> list[str]:
    """A line for each value that is not of its type."""
    return [
        f"{place_of(path)}: {said.format(_text(value), _text(type_))}"
        for value, type_, path in zip(map(type_of, values), map(type_of, types), paths, strict=True)
        if jax.tree.structure(value) != jax.tree.structure(type_)
        or any(map(_differ, jax.tree.leaves(value), jax.tree.leaves(type_)))
    ]


def _differ(a: Any, b: Any) -> bool:
    """Whether two types differ, also in their sharding over explicit axes, or in the axes over which arrays vary."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return True
    anywhere = a.sharding.mesh.empty or b.sharding.mesh.empty
    return not anywhere and (a.sharding.spec, varying_axes(a)) != (b.sharding.spec, varying_axes(b))


def _text(type_: Any) -> str:
    axes = sorted(varying_axes(type_)) if isinstance(type_, AbstractValue) else []
    varying = f" that varies over {', '.join(map(repr, axes))} (jax.lax.pcast)" if axes else ""
    return static_repr(type_) + varying
