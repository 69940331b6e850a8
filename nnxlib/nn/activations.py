"""Activation functions: those of :mod:`jax.nn`, and ``jax.numpy.tanh``, under one roof; and the layer PReLU.

JAX compiles all of them except ``relu``, which is slow in eager code. Here it is a step (see ``core/formulas.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import celu as celu
from jax.nn import elu as elu
from jax.nn import gelu as gelu
from jax.nn import glu as glu
from jax.nn import hard_sigmoid as hard_sigmoid
from jax.nn import hard_silu as hard_silu
from jax.nn import hard_swish as hard_swish
from jax.nn import hard_tanh as hard_tanh
from jax.nn import identity as identity
from jax.nn import leaky_relu as leaky_relu
from jax.nn import log_sigmoid as log_sigmoid
from jax.nn import log_softmax as log_softmax
from jax.nn import logsumexp as logsumexp
from jax.nn import one_hot as one_hot
from jax.nn import relu6 as relu6
from jax.nn import selu as selu
from jax.nn import sigmoid as sigmoid
from jax.nn import silu as silu
from jax.nn import soft_sign as soft_sign
from jax.nn import softmax as softmax
from jax.nn import softplus as softplus
from jax.nn import standardize as standardize
from jax.nn import swish as swish
from jax.numpy import tanh as tanh

from ..core.formulas import as_one, broadcasts, step
from ..core.module import Module
from ..core.variables import Param
from .dtypes import Array, Dtype, input_error, promote_dtype
from .settings import NO_METADATA, Metadata


@step()
def relu(x: Array) -> Array:
    """The rectified linear unit, ``max(x, 0)``, with the derivative 0 at 0: :func:`jax.nn.relu`.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.relu(jnp.array([-1.0, 2.0]))
    Array([0., 2.], dtype=float32)
    """
    return as_one(jax.nn.relu, x)


class PReLU(Module):
    """A rectifier with a learned slope for negative inputs: ``where(x >= 0, x, negative_slope * x)``.

    He et al., "Delving deep into rectifiers", https://arxiv.org/abs/1502.01852.

    Args:
      negative_slope_init: the initial slope; a number, or an array with one for each feature.
      dtype: what to compute in (default: the dtype of the input, float32 for integers).
      param_dtype: what the slope is stored in.
      promote_dtype: what brings ``(inputs, slope)`` to one dtype.
      negative_slope_metadata: metadata of the Param.

    Attributes: ``negative_slope``, a Param.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.PReLU(0.25)(jnp.array([-4.0, 2.0]))
    Array([-1.,  2.], dtype=float32)
    """

    negative_slope: Param[Array]

    def __init__(
        self,
        negative_slope_init: float | Array = 0.01,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        promote_dtype: Callable[..., Any] = promote_dtype,
        negative_slope_metadata: Metadata = NO_METADATA,
    ):
        self.negative_slope = Param(jnp.asarray(negative_slope_init, param_dtype), **negative_slope_metadata)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def _nnx_sizes(self) -> str:
        return str(list(self.negative_slope.shape))

    def __call__(self, inputs: Array) -> Array:
        """Rectify an array of any shape that the slope broadcasts to.

        Raises:
          LayerInputError: if the slope does not broadcast to the shape of the input.
        """
        x = inputs if hasattr(inputs, "dtype") else jnp.asarray(inputs)
        dtype = x.dtype if self.dtype is None and jnp.issubdtype(x.dtype, jnp.inexact) else self.dtype
        x, slope = self.promote_dtype((x, self.negative_slope.get_value()), dtype=dtype)
        if not broadcasts(slope.shape, x.shape):
            raise input_error(self, f"inputs that a slope of shape {list(slope.shape)} broadcasts to", inputs)
        return _leaky(x, slope)


@step()
def _leaky(x: Array, slope: Array) -> Array:
    return jnp.where(x >= 0, x, slope * x)
