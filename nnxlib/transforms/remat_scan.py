"""``remat_scan``: a loop whose memory, when it is differentiated, grows with the square root of its length.

A plain loop of ``N`` iterations keeps what each of them computed. With checkpoints at two levels, ``N = a * b``, the
outer loop keeps ``a`` carries; going backward, one stretch of ``b`` iterations at a time is computed again and keeps
``b`` carries; and of these one iteration at a time is computed again in full. So it keeps ``a + b`` carries and one
iteration, at the price of two more forward passes; with ``k`` levels ``k * N**(1/k)`` carries and ``k`` more passes.

Griewank and Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26 (2000); Chen et al.,
"Training deep nets with sublinear memory cost", arXiv:1604.06174 (2016).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..core.errors import ArgumentError
from ..core.missing import MISSING
from .axes import NO_AXIS_NAMES
from .body import as_unroll
from .classes import lifts_classes
from .remat import check_policy
from .scan import Carry, DataTransform, looped


@lifts_classes()
def remat_scan(
    f: Callable = MISSING,
    *,
    lengths: Sequence[int] = MISSING,
    policy: Callable[..., bool] | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Any = (Carry, 0),
    out_axes: Any = Carry,
    transform_metadata: Mapping[str, Any] = NO_AXIS_NAMES,
    data_transform: DataTransform | None = None,
) -> Callable:
    """Loop a function ``prod(lengths)`` times, with nested checkpoints: :func:`scan` in little memory.

    The result is that of ``nnx.scan``, state included; only what is kept for the backward pass differs. For a stack of
    layers see :class:`Stack`, which does this with ``remat=lengths``.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      lengths: how many iterations there are at each level, outermost first. ``(10, 10)`` for 100 iterations keeps 20
        carries and one iteration.
      policy: which values to keep all the same, of ``jax.checkpoint_policies``; for each level.
      reverse: whether to go from the last slice to the first.
      unroll: how many iterations of the innermost level to put into one step of its compiled loop.
      in_axes: as in :func:`scan`. Something with an axis, such as a stacked Module, has ``prod(lengths)`` slices.
      out_axes: as in :func:`scan`.
      transform_metadata: as in :func:`scan`.
      data_transform: as in :func:`scan`.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> layers = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 6))
    >>> forward = nnx.remat_scan(lambda x, layer: jnp.tanh(layer(x)), lengths=(2, 3))
    >>> forward(jnp.ones((2, 4)), layers).shape
    (2, 4)

    The same layer six times:

    >>> layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    >>> nnx.remat_scan(layer, lengths=(2, 3), in_axes=nnx.Carry)(jnp.ones((2, 4))).shape
    (2, 4)

    Raises:
      ArgumentError: if a length is not a positive number, or the policy not a function.
      PrefixError: if an axis does not have ``prod(lengths)`` slices; and as in :func:`scan`.
    """
    check_policy(policy)
    lengths, unroll = check_lengths(lengths), as_unroll(unroll)
    loop = functools.partial(_nested, lengths=lengths, policy=policy, reverse=reverse, unroll=unroll)
    return looped(f, loop, math.prod(lengths), in_axes, out_axes, transform_metadata, data_transform)


def check_lengths(lengths: Any) -> tuple[int, ...]:
    """The lengths as a tuple.

    Raises:
      ArgumentError: unless they are positive numbers, at least one.
    """
    found = tuple(lengths) if isinstance(lengths, Sequence) else ()
    if not found or not all(map(is_length, found)):
        raise ArgumentError(f"remat_scan needs the lengths of its levels, such as lengths=(10, 10), got {lengths!r}.")
    return tuple(map(int, found))


def is_length(n: Any) -> bool:
    """Whether a loop can have so many iterations: a positive integer, of Python or of NumPy."""
    return isinstance(n, int | np.integer) and type(n) is not bool and int(n) > 0


def _nested(
    step: Callable,
    init: Any,
    xs: Any,
    *,
    length: int,
    lengths: tuple[int, ...],
    policy: Callable[..., bool] | None,
    reverse: bool,
    unroll: int | bool,
) -> tuple[Any, Any]:
    """``jax.lax.scan`` at each level, the body of each under ``jax.checkpoint``."""
    n, *inner = lengths
    options = {"policy": policy, "reverse": reverse, "unroll": unroll}
    if inner:
        rest = math.prod(inner)
        step = functools.partial(_nested, step, length=rest, lengths=tuple(inner), **options)
        xs = jax.tree.map(lambda x: x.reshape(n, rest, *x.shape[1:]), xs)
        unroll = 1
    # Inside of a loop the compiler cannot merge a computation with its repetition; in an unrolled one it could.
    body = jax.checkpoint(step, prevent_cse=unroll is True or unroll > 1, policy=policy)
    last, ys = jax.lax.scan(body, init, xs, length=n, reverse=reverse, unroll=unroll)
    return last, jax.tree.map(lambda y: y.reshape(length, *y.shape[2:]), ys) if inner else ys
