"""``remat``: recompute in the backward pass instead of keeping intermediate values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import ArgumentError
from ..core.graph import StaticArgument
from ..core.variables import MISSING
from .lift import lift


def remat(
    f: Callable = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: Callable[..., bool] | None = None,
) -> Callable:
    """Return ``f`` with its intermediate values recomputed when it is differentiated; ``jax.checkpoint`` with state.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      prevent_cse: whether to keep the compiler from undoing it; not needed inside a scan.
      static_argnums: numbers of arguments that are part of the program.
      policy: which values to keep all the same, of ``jax.checkpoint_policies``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> loss = nnx.remat(lambda layer, x: jnp.sin(layer(x)).sum())
    >>> nnx.grad(loss)(layer, jnp.ones((1, 2))).kernel.shape
    (2, 3)
    """
    if f is MISSING:
        return functools.partial(remat, prevent_cse=prevent_cse, static_argnums=static_argnums, policy=policy)

    def checkpointed(pure: Callable) -> Callable:
        raw = jax.checkpoint(pure, prevent_cse=prevent_cse, policy=policy)
        return lambda leaves: _as_arrays(raw(leaves))

    crossing = lift(checkpointed)(f)
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if any(not -len(args) <= n < len(args) for n in static):
            raise ArgumentError(f"{static_argnums=} does not fit a call with {len(args)} positional arguments.")
        chosen = {n % len(args) for n in static}
        return crossing(*(StaticArgument(x, (n,)) if n in chosen else x for n, x in enumerate(args)), **kwargs)

    return wrapped


def _as_arrays(out: Any) -> Any:
    # Called eagerly, jax.checkpoint hands out constants as literals of its own, which have no method `at`.
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), out)


checkpoint = remat
