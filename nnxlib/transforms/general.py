"""Transforms that are JAX's own behind ``lift``: ``make_jaxpr``, ``checkify``, ``named_call``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..core.graph import build, commit, pack
from ..core.variables import MISSING
from .classes import lifts_classes
from .lift import Arguments, Crossing, lift, resolve, static_arguments


@lifts_classes()
def make_jaxpr(
    f: Callable = MISSING,
    *,
    static_argnums: int | Sequence[int] = (),
    return_shape: bool = False,
    **options: Any,
) -> Callable:
    """Return a function that returns the jaxpr of ``f``; ``jax.make_jaxpr`` for Modules.

    Its inputs are the values of the Variables of the arguments, then the arrays that Modules hold, then the arrays
    among the arguments; its outputs are the values that ``f`` changes, then what it returns. Nothing is changed.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      static_argnums: numbers of arguments that are part of the program.
      return_shape: whether to return ``(jaxpr, output)``, with ``jax.ShapeDtypeStruct`` in place of arrays.
      **options: other options of the installed ``jax.make_jaxpr``, such as ``axis_env``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> jaxpr = nnx.make_jaxpr(lambda layer, x: layer(x))(layer, jnp.ones((1, 2)))
    >>> [variable.aval.shape for variable in jaxpr.jaxpr.invars]
    [(3,), (2, 3), (1, 2)]
    """
    if f is MISSING:
        return functools.partial(make_jaxpr, static_argnums=static_argnums, return_shape=return_shape, **options)
    function, bound, bound_kwargs = resolve(f)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        layout, leaves, _ = pack(Arguments((*bound, *args), {**bound_kwargs, **kwargs}))
        jaxpr, (groups, outcome) = jax.make_jaxpr(Crossing(layout).pure(function), return_shape=True, **options)(leaves)
        if not return_shape:
            return jaxpr
        _, shells = build(layout, [jax.eval_shape(lambda x: x, leaf) for leaf in leaves])
        return jaxpr, commit(layout, outcome.delta, groups[0], shells)

    return static_arguments(wrapped, static_argnums)


@lifts_classes()
def checkify(f: Callable = MISSING, errors: Any = None) -> Callable:
    """Return ``f`` with the checks in it returned as an error value; ``jax.experimental.checkify.checkify`` with state.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      errors: which checks to make, such as ``checkify.float_checks``; by default the user's own, ``user_checks``.

    Returns:
      A function that returns ``(error, output)``; ``error.throw()`` raises if a check has failed. What ``f`` changes in
      its arguments is changed also then, as the error is a value.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> from jax.experimental import checkify
    >>> def positive(layer, x):
    ...   checkify.check((x > 0).all(), 'not positive')
    ...   return layer(x)
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> error, y = nnx.checkify(positive)(layer, -jnp.ones((1, 2)))
    >>> error.get()
    'not positive (`check` failed)'
    """
    if f is MISSING:
        return functools.partial(checkify, errors=errors)
    from jax.experimental import checkify as jax_checkify  # here, as few programs want it

    errors = jax_checkify.user_checks if errors is None else errors
    return lift(lambda pure: jax_checkify.checkify(pure, errors), result=_error_and_output)(f)


def _error_and_output(raw: tuple[Any, Any], finish: Callable) -> tuple[Any, Any]:
    return raw[0], finish(raw[1])


@lifts_classes("__call__")
def named_call(f: Callable = MISSING, *, name: str | None = None) -> Callable:
    """Return ``f`` with its operations labelled in profiles and compiled programs; ``jax.named_call`` for Modules.

    Calls of Modules are labelled with their path without it.

    Args:
      f: a function, method or callable Module; may be left out, to be used as a decorator.
      name: the label; the name of ``f`` by default.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.named_call(layer, name='head')(jnp.ones((1, 2))).shape
    (1, 3)
    """
    if f is MISSING:
        return functools.partial(named_call, name=name)
    label = name or getattr(f, "__name__", type(f).__name__)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(label):
            return f(*args, **kwargs)

    return wrapped
