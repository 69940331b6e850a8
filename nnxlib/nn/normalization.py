"""The normalising layers, under the name that flax.nnx has for their module; and what its layers are made of.

The functions with names that begin with ``_`` are there for published layers, such as batch renormalisation, that
import them from flax.nnx; so are the names that flax.nnx itself imports there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType as MappingProxyType
from typing import Any

import jax.numpy as jnp

from ..core.module import first_from as first_from
from . import dtypes as dtypes
from .dtypes import Array, Dtype, at_least_float32, canonicalize_dtype
from .initializers import Initializer as Initializer
from .norm import Axes as Axes
from .norm import BatchNorm as BatchNorm
from .norm import GroupNorm as GroupNorm
from .norm import InstanceNorm as InstanceNorm
from .norm import LayerNorm as LayerNorm
from .norm import RMSNorm as RMSNorm
from .norm import mean_square, moments, normalize
from .reparametrised import SpectralNorm as SpectralNorm
from .reparametrised import WeightNorm as WeightNorm
from .settings import as_tuple, frozen

PromoteDtypeFn = Callable[..., Any]  # as `dtypes.promote_dtype`


def _canonicalize_axes(rank: int, axes: Axes) -> tuple[int, ...]:
    """Axes of an array of this rank, counted from the front, each once and in order."""
    return tuple(sorted({axis % rank if axis < 0 else axis for axis in as_tuple(axes)}))


def _compute_stats(
    x: Array,
    axes: Axes,
    dtype: Dtype | None,
    axis_name: str | None = None,
    axis_index_groups: Any = None,
    use_mean: bool = True,
    use_fast_variance: bool = True,
    mask: Array | None = None,
) -> tuple[Array, Array]:
    """Mean and variance of ``x`` over ``axes``, or 0 and the mean of its square; NaN where a mask excludes all of it.

    They are computed in ``dtype``, by default that of ``x``; in float32 at least.
    """
    x = jnp.asarray(x, None if dtype is None else at_least_float32(jnp.dtype(dtype)))
    over: dict[str, Any] = {"axes": _canonicalize_axes(x.ndim, axes), "axis_name": axis_name}
    over["axis_index_groups"] = frozen(axis_index_groups)
    if not use_mean:
        square, valid = mean_square(x, mask, **over)
        return jnp.zeros_like(square), _nan_unless(square, valid)
    mean, var, valid = moments(x, mask, use_fast_variance=use_fast_variance, **over)
    return _nan_unless(mean, valid), _nan_unless(var, valid)


def _nan_unless(x: Array, valid: Array | None) -> Array:
    return x if valid is None else jnp.where(valid, x, jnp.nan)


def _normalize(
    x: Array,
    mean: Array,
    var: Array,
    scale: Array | None,
    bias: Array | None,
    reduction_axes: Axes,
    feature_axes: Axes,
    dtype: Dtype | None,
    epsilon: float,
) -> Array:
    """``(x - mean) * rsqrt(var + epsilon) * scale + bias`` in ``dtype``, or that of ``x`` and the parameters."""
    found = canonicalize_dtype(x, scale, bias, dtype=dtype)
    x = jnp.asarray(x, jnp.promote_types(x.dtype, found))
    axes, features = _canonicalize_axes(x.ndim, reduction_axes), _canonicalize_axes(x.ndim, feature_axes)
    y = normalize(x, mean, var, None, scale, bias, axes=axes, feature_axes=features, epsilon=epsilon)
    return jnp.asarray(y, found)
