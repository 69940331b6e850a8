"""``make_jaxpr`` and ``named_call``: JAX's own, for functions of Modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..core.graph import build, commit
from ..core.missing import MISSING
from ..core.packing import pack_live
from .callables import check_options, name_of, resolve, static_arguments
from .classes import lifts_classes
from .lift import Arguments, Crossing
from .signatures import as_operator


@as_operator
@lifts_classes()
def make_jaxpr(
    f: Callable = MISSING, static_argnums: int | Sequence[int] = (), *, return_shape: bool = False, **options: Any
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
    check_options(options, jax.make_jaxpr)
    function, bound, bound_kwargs = resolve(f)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        layout, leaves, _ = pack_live(Arguments((*bound, *args), {**bound_kwargs, **kwargs}))
        pure = Crossing(layout).purify(function)
        jaxpr, (groups, outcome) = jax.make_jaxpr(pure, return_shape=True, **options)(leaves)
        if not return_shape:
            return jaxpr
        _, shells = build(layout, [jax.eval_shape(lambda x: x, leaf) for leaf in leaves])
        return jaxpr, commit(layout, outcome.delta, groups[0], shells)

    return static_arguments(wrapped, static_argnums)


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
    label = name or name_of(f)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(label):
            return f(*args, **kwargs)

    return wrapped


def __getattr__(name: str) -> Any:
    if name in ("merge_inputs", "split_inputs"):  # flax.nnx has them in this file; few programs use them
        from . import extract

        return getattr(extract, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
