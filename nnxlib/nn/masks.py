"""Masks for attention: arrays that are true, or not zero, where a query may look at a key.

A mask has shape ``[..., heads, q_length, kv_length]``; those that are made here have one head, which stands for all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core.errors import ArgumentError, UsageError, describe
from ..core.formulas import as_array, step
from .dtypes import Array, Dtype, broadcast_together


def make_attention_mask(
    query_input: Array,
    key_input: Array,
    pairwise_fn: Callable[..., Any] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: Dtype = jnp.float32,
) -> Array:
    """Make a mask from one number for each query and one for each key.

    Args:
      query_input: ``[..., q_length]``.
      key_input: ``[..., kv_length]``.
      pairwise_fn: whether query and key may meet, given their numbers; broadcasts. With the product, and 1 for tokens
        and 0 for padding, tokens look at tokens.
      extra_batch_dims: number of axes of size 1 to put in front.
      dtype: of the mask.

    Returns:
      ``[..., 1, q_length, kv_length]``; the axis of size 1 is that of the heads.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.make_attention_mask(jnp.array([1, 1, 0]), jnp.array([1, 0]), dtype=bool)[0]
    Array([[ True, False],
           [ True, False],
           [False, False]], dtype=bool)

    Raises:
      ValueError: if an input has no axis, or their batch axes do not broadcast to each other.
    """
    query_input, key_input = as_array(query_input), as_array(key_input)
    fit = broadcast_together(query_input.shape[:-1], key_input.shape[:-1])
    if not (query_input.ndim and key_input.ndim and fit):
        raise UsageError(
            "make_attention_mask takes inputs [..., q_length] and [..., kv_length] whose batch axes fit each other, "
            f"but got {describe(query_input)} and {describe(key_input)}."
        )
    mask = pairwise_fn(*_facing(query_input, key_input))
    return _for_heads(mask, extra_batch_dims=extra_batch_dims, dtype=dtype)


@step()
def _facing(queries: Array, keys: Array) -> tuple[Array, Array]:
    return queries[..., :, None], keys[..., None, :]


@step("extra_batch_dims", "dtype")
def _for_heads(mask: Array, extra_batch_dims: int, dtype: Dtype) -> Array:
    shape = (*(1,) * extra_batch_dims, *mask.shape[:-2], 1, *mask.shape[-2:])
    return jnp.reshape(mask, shape).astype(dtype)


def make_causal_mask(x: Array, extra_batch_dims: int = 0, dtype: Dtype = jnp.float32) -> Array:
    """Make a mask by which each position looks at itself and those before it.

    Args:
      x: an array of shape ``[..., length]``; its values do not matter.
      extra_batch_dims: number of axes of size 1 to put in front.
      dtype: of the mask.

    Returns:
      ``[..., 1, length, length]``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.make_causal_mask(jnp.ones(3), dtype=int)
    Array([[[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]]], dtype=int32)

    Raises:
      TypeError: if ``x`` has no axis.
    """
    shape = np.shape(x)
    if not shape:
        raise ArgumentError(
            "make_causal_mask takes an array of shape [..., length], whose values do not matter, but got "
            f"{describe(x)}. For a given length write nnx.make_causal_mask(jnp.ones((1, length)))."
        )
    positions = _positions(shape)
    return make_attention_mask(positions, positions, jnp.greater_equal, extra_batch_dims, dtype)


@step("shape")
def _positions(shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(jnp.arange(shape[-1]), shape)


def combine_masks(*masks: Array | None, dtype: Dtype = jnp.float32) -> Array | None:
    """Return the mask that allows what all masks allow; ``None`` allows everything.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.combine_masks(jnp.array([[1, 0], [1, 1]]), None, jnp.array([[1, 1], [0, 1]]), dtype=int)
    Array([[1, 0],
           [0, 1]], dtype=int32)
    >>> nnx.combine_masks(None, None) is None
    True

    Raises:
      ValueError: if the masks differ in their number of axes, or do not broadcast to each other.
    """
    if any(isinstance(mask, list | tuple) for mask in masks):
        raise ArgumentError("combine_masks takes each mask as an argument of its own: nnx.combine_masks(*masks).")
    arrays = [as_array(mask) for mask in masks if mask is not None]
    if not arrays:
        return None
    shapes = [mask.shape for mask in arrays]
    if not all(len(a) == len(b) and broadcast_together(a, b) for a, b in itertools.combinations(shapes, 2)):
        raise UsageError(
            f"combine_masks takes masks with the same number of axes that broadcast to each other, but got {shapes}."
        )
    return _where_all_allow(arrays, dtype=dtype)


@step("dtype")
def _where_all_allow(masks: list[Array], dtype: Dtype) -> Array:
    return functools.reduce(jnp.logical_and, masks).astype(dtype)
