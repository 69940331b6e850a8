"""Pooling: reduce windows that slide over the spatial axes, channels last.

Inputs have the shape ``[*batch, *spatial, channels]``; ``window_shape`` has one size for each spatial axis, so any
number of batch axes, none included, is understood from the number of axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.errors import ArgumentError, UsageError
from ..core.formulas import step
from ..core.tracing import boundary
from .conv import Padding, canonicalize_padding, per_axis
from .dtypes import Array, at_least_float32, is_inexact


@boundary
def pool(
    inputs: Array,
    init: Any,
    reduce_fn: Callable[[Any, Any], Any],
    window_shape: Sequence[int],
    strides: int | Sequence[int] | None,
    padding: Padding,
) -> Array:
    """Reduce each window of ``inputs`` by ``reduce_fn``, starting from ``init``.

    Args:
      inputs: array of shape ``[*batch, *spatial, channels]``.
      init: the neutral element of the reduction.
      reduce_fn: an associative function of two elements, such as ``jax.lax.add``.
      window_shape: size of the window along each spatial axis.
      strides: step between windows along each spatial axis (default 1), or one for all.
      padding: ``'SAME'``, ``'VALID'``, or for each spatial axis a pair (before, after) or a number for both, or one
        number for all.

    Returns:
      Array of shape ``[*batch, *spatial', channels]``.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> nnx.pool(jnp.arange(4.).reshape(1, 4, 1), 0., jax.lax.add, (2,), None, 'VALID').ravel()
    Array([1., 3., 5.], dtype=float32)

    Raises:
      TypeError: if ``window_shape`` is not a sequence: its length says how many axes are spatial.
      ValueError: if window, strides or padding do not fit the input.
    """
    window, strides, padding = _window(inputs.shape, window_shape, strides, padding)
    return lax.reduce_window(inputs, init, reduce_fn, window, strides, padding)


def _window(
    shape: tuple[int, ...], window_shape: Sequence[int], strides: int | Sequence[int] | None, padding: Padding
) -> tuple[tuple[int, ...], tuple[int, ...], str | tuple[tuple[int, int], ...]]:
    """Spell window, strides and padding out for all axes."""
    if isinstance(window_shape, str) or not isinstance(window_shape, Iterable):
        raise ArgumentError(
            f"window_shape has a size for each spatial axis, such as (2, 2) for images, but is {window_shape!r}."
        )
    spatial = tuple(window_shape)
    batch, rank = len(shape) - len(spatial) - 1, len(spatial)
    if batch < 0:
        raise UsageError(
            f"A window of shape {spatial} needs inputs of shape [*batch, *spatial, channels], got {shape}."
        )
    ones = (1,) * batch
    window = (*ones, *per_axis("window_shape", spatial, rank), 1)
    steps = (*ones, *per_axis("strides", strides, rank), 1)
    padding = canonicalize_padding(padding, rank, _NAMED)
    return window, steps, padding if isinstance(padding, str) else (*[(0, 0)] * batch, *padding, (0, 0))


_NAMED = ("SAME", "VALID", "SAME_LOWER")


@step("window", "strides", "padding")
def _sum_pool(x: Array, window: Any, strides: Any, padding: Any) -> Array:
    """Sums that do not overflow, as those of integers would, and are not rounded at each element, as in bfloat16."""
    wide = at_least_float32(x.dtype)
    return lax.reduce_window(x.astype(wide), np.zeros((), wide)[()], lax.add, window, strides, padding)


@step("window", "strides", "padding")
def _max_pool(x: Array, window: Any, strides: Any, padding: Any) -> Array:
    return lax.reduce_window(x, _bound(x.dtype, -1), lax.max, window, strides, padding)


@step("window", "strides", "padding")
def _min_pool(x: Array, window: Any, strides: Any, padding: Any) -> Array:
    return lax.reduce_window(x, _bound(x.dtype, 1), lax.min, window, strides, padding)


def _bound(dtype: Any, sign: int) -> Any:
    """The largest value of a dtype, or the smallest if ``sign`` is negative; infinite where that exists."""
    if dtype == np.bool_:
        return np.bool_(sign > 0)
    if is_inexact(dtype):
        return np.asarray(sign * np.inf, dtype)[()]
    return np.asarray(jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min, dtype)[()]


@boundary
def avg_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> Array:
    """Average each window; arguments as in :func:`pool`.

    With ``count_include_pad`` the zeros of the padding count as elements of a window, without it they do not. Sums are
    computed in float32 at least; the result has the dtype of ``inputs``, float32 for integers.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.avg_pool(jnp.arange(4.).reshape(1, 4, 1), (2,), strides=(2,)).ravel()
    Array([0.5, 2.5], dtype=float32)
    """
    inputs = jnp.asarray(inputs)
    window = _window(inputs.shape, window_shape, strides, padding)
    counts = math.prod(window[0]) if count_include_pad else _sum_pool(jnp.ones_like(inputs), *window)
    means = _sum_pool(inputs, *window) / counts
    return means.astype(inputs.dtype) if is_inexact(inputs.dtype) else means


@boundary
def max_pool(
    inputs: Array, window_shape: Sequence[int], strides: int | Sequence[int] | None = None, padding: Padding = "VALID"
) -> Array:
    """Take the largest element of each window; arguments as in :func:`pool`.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.max_pool(jnp.arange(4.).reshape(1, 4, 1), (2,), strides=(2,)).ravel()
    Array([1., 3.], dtype=float32)
    """
    inputs = jnp.asarray(inputs)
    return _max_pool(inputs, *_window(inputs.shape, window_shape, strides, padding))


@boundary
def min_pool(
    inputs: Array, window_shape: Sequence[int], strides: int | Sequence[int] | None = None, padding: Padding = "VALID"
) -> Array:
    """Take the smallest element of each window; arguments as in :func:`pool`.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.min_pool(jnp.arange(4.).reshape(1, 4, 1), (2,), strides=(2,)).ravel()
    Array([0., 2.], dtype=float32)
    """
    inputs = jnp.asarray(inputs)
    return _min_pool(inputs, *_window(inputs.shape, window_shape, strides, padding))
