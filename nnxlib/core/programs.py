"""Programs: how arithmetic is run with as few dispatches, and as few operations to trace, as possible.

A *step* is a function compiled once per shape and dtype. Called eagerly it is one dispatch, 4 us, where a single
``jax.numpy`` or ``jax.lax`` function may take 10 to 80 us of Python. Where something else is traced it is inlined, so
that a jaxpr holds operations and no calls.

A *formula* is a function made of steps. Called eagerly it runs step by step. Where something else is traced, all of it
is inlined at once from one cached trace: a LayerNorm then takes 0.1 ms to trace instead of 0.5 ms.

A step never holds a product and a sum of its result: XLA contracts ``a * b + c`` within one program to a fused
multiply-add, and an eager result would differ in the last bit from the same formula evaluated one operation at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from .tracing import at_top_level

P = ParamSpec("P")
R = TypeVar("R")

# "inline while tracing": since JAX 0.12 True means "inline while lowering", which leaves the calls in the jaxpr
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)


def step(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a step of a function; the arguments named in ``static`` are hashable settings."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        return jax.jit(function, static_argnames=static, inline=INLINE)

    return decorate


def formula(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a formula of a function that calls steps; the arguments named in ``static`` are hashable settings."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        inlined = jax.jit(function, static_argnames=static, inline=INLINE)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(*args, **kwargs) if at_top_level() else inlined(*args, **kwargs)

        return run

    return decorate
