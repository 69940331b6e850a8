"""Initializers: functions ``(key, shape, dtype) -> array``, those of :mod:`jax.nn.initializers`.

``zeros`` and ``ones`` are our own, with the same values: half of all parameters of a typical model start as a constant,
and a cached program makes one in a fifth of the time that ``jax.nn.initializers.zeros`` takes, most of it Python.
JAX compiles the random ones once per shape and dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import initializers as jax_initializers
from jax.nn.initializers import Initializer as JaxInitializer
from jax.nn.initializers import constant as constant
from jax.nn.initializers import delta_orthogonal as delta_orthogonal
from jax.nn.initializers import glorot_normal as glorot_normal
from jax.nn.initializers import glorot_uniform as glorot_uniform
from jax.nn.initializers import he_normal as he_normal
from jax.nn.initializers import he_uniform as he_uniform
from jax.nn.initializers import kaiming_normal as kaiming_normal
from jax.nn.initializers import kaiming_uniform as kaiming_uniform
from jax.nn.initializers import lecun_normal as lecun_normal
from jax.nn.initializers import lecun_uniform as lecun_uniform
from jax.nn.initializers import normal as normal
from jax.nn.initializers import orthogonal as orthogonal
from jax.nn.initializers import truncated_normal as truncated_normal
from jax.nn.initializers import uniform as uniform
from jax.nn.initializers import variance_scaling as variance_scaling
from jax.nn.initializers import xavier_normal as xavier_normal
from jax.nn.initializers import xavier_uniform as xavier_uniform

from ..core.formulas import full

Initializer = JaxInitializer | Callable[..., Any]


def _sizes(shape: Any) -> tuple[int, ...]:
    """The sizes in a shape; a number is the shape of a vector, as it is for :func:`jax.numpy.zeros`."""
    try:
        return tuple(shape)
    except TypeError:
        return (operator.index(shape),)


def zeros(key: Any, shape: Any, dtype: Any = jnp.float_, **kwargs: Any) -> jax.Array:
    """Return an array of zeros; the key is not looked at.

    >>> import nnxlib as nnx
    >>> nnx.initializers.zeros(None, (2,))
    Array([0., 0.], dtype=float32)
    """
    if kwargs:  # out_sharding
        return jax_initializers.zeros(key, shape, dtype, **kwargs)
    return full(0, _sizes(shape), jax.dtypes.canonicalize_dtype(dtype))


def ones(key: Any, shape: Any, dtype: Any = jnp.float_, **kwargs: Any) -> jax.Array:
    """Return an array of ones; the key is not looked at.

    >>> import nnxlib as nnx
    >>> nnx.initializers.ones(None, (2,), 'bfloat16')
    Array([1, 1], dtype=bfloat16)
    """
    if kwargs:
        return jax_initializers.ones(key, shape, dtype, **kwargs)
    return full(1, _sizes(shape), jax.dtypes.canonicalize_dtype(dtype))


def zeros_init() -> Initializer:
    """Return :func:`zeros`, in the calling style of the other initializers: ``zeros_init()(key, shape, dtype)``."""
    return zeros


def ones_init() -> Initializer:
    """Return :func:`ones`, in the calling style of the other initializers: ``ones_init()(key, shape, dtype)``."""
    return ones
