"""Rotary positions: queries and keys are turned by angles that grow with their positions.

What is turned is an array whose last axis holds features, in two halves: feature ``i`` of both halves is a point in a
plane. The sines and cosines are those of whole positions from 0, computed once or for each call, or of any given ones.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core.errors import UsageError
from ..core.formulas import as_array, broadcasts, formula, step
from ..core.module import Module
from ..core.variables import Variable
from .dtypes import Array, at_least_float32, input_error, promote_dtype
from .settings import aligned


@step()  # theta is an operand, and the quotient another step: XLA rounds a power of a constant differently
def _periods(theta: Any, exponents: Any) -> Array:
    return jnp.power(theta, exponents)


@step()
def _sin_and_cos_of_quotient(positions: Array, periods: Array) -> tuple[Array, Array]:
    angles = positions[..., None].astype(periods.dtype) / aligned(periods, positions.ndim + 1)
    return jnp.sin(angles), jnp.cos(angles)


@formula("theta", "half", "dtype")
def _sin_and_cos(positions: Any, *, theta: float, half: int, dtype: Any) -> tuple[Array, Array]:
    """Sine and cosine of ``position * theta ** (-i / half)``: ``[..., length, half]``."""
    periods = _periods(theta, np.arange(half, dtype=dtype) / np.asarray(half, dtype))
    return _sin_and_cos_of_quotient(positions, periods)


@step("shape")
def _four_products(x: Array, sin: Array, cos: Array, shape: tuple[int, ...]) -> tuple[Array, ...]:
    sin, cos = jnp.reshape(sin, shape), jnp.reshape(cos, shape)
    first, second = jnp.split(x.astype(sin.dtype), 2, axis=-1)
    return first * cos, second * sin, second * cos, first * sin


@step("dtype")
def _two_sums(a: Array, b: Array, c: Array, d: Array, dtype: Any) -> Array:
    return jnp.concatenate([a - b, c + d], axis=-1).astype(dtype)


@formula("shape")
def _rotate(x: Array, sin: Array, cos: Array, *, shape: tuple[int, ...]) -> Array:
    a, b, c, d = _four_products(x, sin, cos, shape)
    return _two_sums(a, b, c, d, x.dtype)


class RoPE(Module):
    """Rotary position embedding: turn pairs of features by an angle that grows with the position.

    Features ``i`` and ``i + size / 2`` are the coordinates of a point that is turned by ``position * theta ** (-2 i /
    size)``. So the product of a query and a key depends on their positions only by the difference.
    Su et al., "RoFormer: enhanced transformer with rotary position embedding", https://arxiv.org/abs/2104.09864.

    Args:
      theta: base of the frequencies.
      embedding_size: number of features, even; with ``max_seq_len`` the sines and cosines of the positions from 0 are
        computed once.
      max_seq_len: number of positions in the table. Given together with ``embedding_size``, or not at all.

    Attributes: ``cached_sin`` and ``cached_cos``, Variables of shape ``[max_seq_len, embedding_size / 2]`` or ``None``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> x = jnp.ones((3, 2))  # length, features
    >>> nnx.RoPE()(x, jnp.pi / 2 * jnp.arange(3)).round()
    Array([[ 1.,  1.],
           [-1.,  1.],
           [-1., -1.]], dtype=float32)

    Raises:
      ValueError: if only one of the sizes is given, or a size is not positive, or ``embedding_size`` is odd.
    """

    cached_sin: Variable[Array] | None
    cached_cos: Variable[Array] | None

    def __init__(self, theta: float = 10000.0, embedding_size: int | None = None, max_seq_len: int | None = None):
        self.theta = float(theta)
        self.cached_sin = self.cached_cos = None
        if (embedding_size is None) != (max_seq_len is None):
            raise UsageError(
                "The table of RoPE has two sizes: give both `embedding_size` and `max_seq_len` or none of them, but "
                f"got {embedding_size} and {max_seq_len}."
            )
        if embedding_size is not None and max_seq_len is not None:
            if embedding_size < 2 or embedding_size % 2 or max_seq_len < 1:
                raise UsageError(
                    "`embedding_size` must be positive and even, and `max_seq_len` positive, but got "
                    f"{embedding_size} and {max_seq_len}."
                )
            dtype = jnp.result_type(float)  # float64 if JAX has these
            sin, cos = _sin_and_cos(np.arange(max_seq_len), theta=self.theta, half=embedding_size // 2, dtype=dtype)
            self.cached_sin, self.cached_cos = Variable(sin), Variable(cos)

    def _nnx_sizes(self) -> str:
        if self.cached_sin is None:
            return f"theta={self.theta:g}"
        length, half = self.cached_sin.shape
        return f"theta={self.theta:g}, {length}x{2 * half}"

    def __call__(self, x: Array, input_positions: Array | None = None) -> Array:
        """Rotate ``x`` of shape ``[..., length, size]``; the result has the same shape and floating dtype.

        Angles are computed in float32 at least, and so are sums.

        Args:
          x: the size must be even.
          input_positions: integers or floats ``[..., length]`` that broadcast to the axes of ``x`` before the last; by
            default 0, 1, 2 and so on, from the table if there is one.

        Raises:
          LayerInputError: if the size is odd or not that of the table, the sequence is longer than the table, or the
            positions do not fit.
        """
        return self._turn(x, input_positions, axis=-2)

    def _turn(self, x: Array, positions: Array | None, axis: int) -> Array:
        """Rotate the last axis of ``x`` by positions along ``axis``; axes between the two share a position."""
        (x,) = promote_dtype((x,))
        if x.ndim < -axis or x.shape[-1] == 0 or x.shape[-1] % 2:
            raise input_error(self, "inputs of shape [..., length, size], where size is even", x)
        half, before = x.shape[-1] // 2, x.shape[: axis + 1 or None]
        if positions is None:
            sin, cos = self._sin_and_cos_from_zero(x, before[-1])
        else:
            positions = as_array(positions)
            if not broadcasts(positions.shape, before) or positions.shape[-1:] != before[-1:]:
                raise input_error(self, f"positions that broadcast to {list(before)}, of full length", positions)
            sin, cos = _sin_and_cos(positions, theta=self.theta, half=half, dtype=at_least_float32(x.dtype))
        rows = (1,) * (len(before) - sin.ndim + 1) + sin.shape[:-1]
        return _rotate(x, sin, cos, shape=(*rows, *(1,) * (-axis - 2), half))

    def _sin_and_cos_from_zero(self, x: Array, length: int) -> tuple[Array, Array]:
        half = x.shape[-1] // 2
        if self.cached_sin is None or self.cached_cos is None:
            return _sin_and_cos(np.arange(length), theta=self.theta, half=half, dtype=at_least_float32(x.dtype))
        rows, columns = self.cached_sin.shape
        if half != columns or length > rows:
            raise input_error(self, f"inputs of up to {rows} positions and {2 * columns} features", x)
        sin, cos = self.cached_sin.get_value(), self.cached_cos.get_value()
        return (sin, cos) if length == rows else (sin[:length], cos[:length])
