"""Steps and formulas: the arithmetic of layers, with as few dispatches, and as little to trace, as possible.

A *step* is a function that is compiled once per shape and dtype. An eager call is one dispatch, where a single
``jax.numpy`` or ``jax.lax`` function may run many times longer in Python. In a trace it is inlined, so that a jaxpr has
its operations and no call.

A *formula* is a function made of steps. An eager call runs step by step. In a trace it is inlined as a whole, from one
cached trace, so that a LayerNorm is traced five times as fast.

A step never has both a product and a sum that the product enters, unless with a barrier in between. In one program XLA
contracts ``a * b + c`` to a fused multiply-add, and an eager result would differ in the last bit from the same formula
evaluated one operation at a time.

While a step or formula is traced, ``jit`` is disabled: the steps of a formula, and what JAX has jitted, are traced
along with it, not each by itself, for which JAX makes hundreds of calls. So a formula may give its steps values that
are known in a trace, and these compute with ``jax.numpy`` or ``lax``, not by the operators of NumPy. Random numbers are
an operation of their own nevertheless (:func:`as_one`), since twenty would be inlined for each layer, and so is JAX's
``relu``, which exporters look for.

Within a step dtypes are promoted by JAX's standard rules, also where the user has forbidden it for code of their own: a
layer has said what it computes in.

A *product* is a step made of ``lax.dot_general`` or ``lax.conv_general_dilated``. Quantisers replace the code of these
two while a model runs, but a compiled product would keep the code with which it was traced. So while their code is
replaced, products and formulas are plain functions.

Exporters replace functions of ``jax.numpy`` by primitives of their own while they trace a model, which nothing else can
run. A trace that is kept must not have these. So a step is traced with the functions that JAX had when nnxlib was
imported. The user's own code is to have what the exporter has put there, so its traces are not kept meanwhile
(transforms/program.py). Softmax is the one function that an exported model should have as a whole, since runtimes look
for it to find attention. So a product may use it, too, and while an exporter has replaced it, products and formulas are
plain functions in a trace.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .tracing import at_top_level, runs_eagerly

P = ParamSpec("P")
R = TypeVar("R")

# "inline while tracing": since JAX 0.12 True means "inline while lowering", which leaves the calls in the jaxpr
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)

_FUNCTIONS_OF_JAX = [(vars(module), dict(vars(module))) for module in (jnp, jax.nn, jax.random)]


def _replaced() -> list[tuple[dict[str, Any], str, Any, Any]]:
    """What is replaced in JAX's modules: where, the name, what JAX has under it, and what is there instead."""
    return [
        (names, key, own, names[key])
        for names, imported in _FUNCTIONS_OF_JAX
        if names != imported
        for key, own in imported.items()
        if names[key] is not own
    ]


def functions_are_replaced() -> bool:
    """Whether a quantiser has replaced functions of JAX, or an exporter, which traces; then no trace is to be kept.

    To look for what an exporter has replaced takes 15 us: a tenth of an eager loop, a thirtieth of one that is traced.
    """
    return products_are_replaced() or (not at_top_level() and bool(_replaced()))


@contextlib.contextmanager
def _as_imported() -> Iterator[None]:
    """Within the block, JAX's modules have the functions that they had when nnxlib was imported."""
    replaced = _replaced()
    for names, key, own, _ in replaced:
        names[key] = own
    try:
        yield
    finally:
        for names, key, _, other in replaced:
            names[key] = other


def as_one(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that JAX has jitted, within a step, as one operation of the program."""
    with jax.disable_jit(False):
        return function(*args, **kwargs)


def step(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a step of a function; the arguments named in ``static`` are hashable settings."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            with _as_imported(), jax.numpy_dtype_promotion("standard"), jax.disable_jit():
                return function(*args, **kwargs)

        return jax.jit(traced, static_argnames=static, inline=INLINE)

    return decorate


@step("shape", "dtype")
def _filled(value: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:  # one program for zeros and ones
    return jnp.full(shape, value, dtype)


def full(value: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of this number: from a compiled program in eager code; in a trace by ``lax.full``, faster there."""
    return _filled(value, shape, dtype) if runs_eagerly() else lax.full(shape, value, dtype)


def as_array(x: Any) -> jax.Array:
    """An array as it is, anything else by ``jax.numpy.asarray``, which takes long even for an array."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


@step()
def add(x: Any, y: Any) -> jax.Array:
    return x + y


@step()
def multiply(x: Any, y: Any) -> jax.Array:
    return x * y


@step("shape")
def reshape(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.reshape(x, shape)


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether an array of one shape broadcasts to another shape."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))


@step()
def copied(x: jax.Array) -> jax.Array:
    """An array with a buffer of its own; the method ``copy`` of an array takes five times as long."""
    return jnp.copy(x)


def product(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a product of a function; the arguments named in ``static`` are hashable settings."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        compiled = step(*static)(function)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return (function if _parts_are_replaced() else compiled)(*args, **kwargs)

        return run

    return decorate


_DOT, _CONV = lax.dot_general, lax.conv_general_dilated
_DOT_CODE, _CONV_CODE = _DOT.__code__, _CONV.__code__


def products_are_replaced() -> bool:
    """Whether a quantiser has replaced the code of JAX's products."""
    return _DOT.__code__ is not _DOT_CODE or _CONV.__code__ is not _CONV_CODE


_SOFTMAX = jax.nn.softmax


def _parts_are_replaced() -> bool:
    """Whether a quantiser or an exporter has replaced parts of products and formulas, which then run uncompiled."""
    return products_are_replaced() or (jax.nn.softmax is not _SOFTMAX and not at_top_level())


def formula(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a formula of a function that calls steps; the arguments named in ``static`` are hashable settings."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        inlined = step(*static)(function)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return (function if at_top_level() or _parts_are_replaced() else inlined)(*args, **kwargs)

        return run

    return decorate
