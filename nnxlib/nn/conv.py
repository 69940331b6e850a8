"""Convolutions: Conv and ConvTranspose, channels last.

Inputs have the shape ``[*batch, *spatial, channels]`` with any number of batch axes, none included. Kernels have the
shape ``[*kernel_size, channels in / groups, channels out]``. The operation is a cross-correlation (the kernel is not
flipped), as in every deep-learning library; see Dumoulin & Visin, "A guide to convolution arithmetic for deep
learning", https://arxiv.org/abs/1603.07285, for paddings, strides and dilations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.errors import UsageError
from ..core.formulas import multiply, product, step
from ..core.module import Module
from ..core.rngs import Rngs
from ..core.variables import Param
from .dtypes import Array, Dtype, input_error, misfit, promote_dtype
from .initializers import Initializer
from .settings import (
    NO_METADATA,
    Metadata,
    add_bias,
    as_tuple,
    check_sizes,
    default_bias_init,
    default_kernel_init,
    drawn,
    frozen,
    given,
    is_size,
    value_or_none,
)

Padding = str | int | Sequence[int | tuple[int, int]]
Sizes = int | Sequence[int] | None

_NAMED = ("SAME", "SAME_LOWER", "VALID", "CIRCULAR", "REFLECT", "CAUSAL")

_conv_general_dilated = product(
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
    "precision",
    "preferred_element_type",
    "out_sharding",
)(lax.conv_general_dilated)
_conv_transpose = product(
    "strides",
    "padding",
    "rhs_dilation",
    "dimension_numbers",
    "transpose_kernel",
    "precision",
    "preferred_element_type",
)(lax.conv_transpose)


def canonicalize_padding(
    padding: Padding, rank: int, names: Sequence[str] = _NAMED
) -> str | tuple[tuple[int, int], ...]:
    """Spell a padding out: one of the names, in capitals, or a pair (before, after) for each spatial axis.

    >>> from nnxlib.nn.conv import canonicalize_padding
    >>> canonicalize_padding('same', 2), canonicalize_padding(1, 2), canonicalize_padding([(1, 2), 3], 2)
    ('SAME', ((1, 1), (1, 1)), ((1, 2), (3, 3)))

    Raises:
      ValueError: for anything else.
    """
    if isinstance(padding, str) and padding.upper() in names:
        return padding.upper()
    if isinstance(padding, int | np.integer):
        return ((int(padding), int(padding)),) * rank
    if isinstance(padding, Sequence) and len(padding) == rank:
        pairs: list[Any] = [(p, p) if isinstance(p, int | np.integer) else p for p in padding]
        if all(isinstance(pair, Iterable) for pair in pairs) and {len(tuple(pair)) for pair in pairs} <= {2}:
            return tuple(map(tuple, pairs))
    raise UsageError(
        f"Invalid padding format: {padding!r}, should be one of {', '.join(names)}, an int, or a sequence of len "
        f"{rank} where each element is an int or pair of ints."
    )


def per_axis(name: str, x: Any, rank: int) -> tuple[int, ...]:
    """The setting of this name for each spatial axis, given as one number, or one for each, or None for 1."""
    if x is None:
        return (1,) * rank
    sizes = tuple(x) if hasattr(x, "__iter__") else (x,) * rank
    if len(sizes) != rank or not all(map(is_size, sizes)):
        raise UsageError(
            f"{name} has to be one positive number, or {rank} of them, one for each spatial axis, but is {x}."
        )
    return sizes


def _extents(kernel_size: int | Sequence[int]) -> tuple[int, ...]:
    """The extent of a kernel along each spatial axis; what is no integer is refused with the shape of the kernel."""
    sizes = None if kernel_size is None else as_tuple(kernel_size)
    if sizes is None or any(isinstance(size, int | np.integer) and size < 1 for size in sizes):
        raise UsageError(
            f"kernel_size is a positive integer for each spatial axis, such as (3, 3) for images, but is {kernel_size}."
        )
    return sizes


@functools.cache
def _dimension_numbers(ndim: int) -> lax.ConvDimensionNumbers:
    """Batch first and channels last for inputs and outputs; channels in and out last for kernels."""
    spatial = tuple(range(1, ndim - 1))
    data = (0, ndim - 1, *spatial)
    return lax.ConvDimensionNumbers(data, (ndim - 1, ndim - 2, *[s - 1 for s in spatial]), data)


def _conv_dimension_numbers(input_shape: tuple[int, ...]) -> lax.ConvDimensionNumbers:
    """A name that flax.nnx has, for code that computes a convolution itself."""
    return _dimension_numbers(len(input_shape))


def _with_one_batch_axis(
    layer: Any, inputs: Array, kernel: Array, rank: int, channels: int, channels_last: bool = True
) -> tuple[Array, tuple[int, ...]]:
    """The input with its batch axes merged into one, and what they were."""
    shape = inputs.shape
    if len(shape) <= rank or (channels_last and (shape[-1] != channels or len(kernel.shape) != rank + 2)):
        groups = getattr(layer, "feature_group_count", 1)
        apart = f" in {groups} groups, its feature_group_count" if groups != 1 else ""
        takes = f"inputs of shape [*batch, {'*, ' * rank}{channels}] ({rank} spatial axes, {channels} channels{apart})"
        raise input_error(layer, takes + misfit("kernel", kernel, *layer.kernel_shape), inputs)
    batch = shape[: len(shape) - rank - 1]
    if len(batch) != 1:
        inputs = jnp.reshape(inputs, (math.prod(batch), *shape[len(batch) :]))
    return inputs, batch


def _masked(layer: Any, kernel: Array) -> Array:
    if layer.mask is None:
        return kernel
    if layer.mask.shape != kernel.shape:
        raise UsageError(
            f"Mask needs to have the same shape as weights. Shapes are: {layer.mask.shape}, {kernel.shape}"
        )
    return multiply(kernel, jnp.asarray(layer.mask))


def _bias(layer: Any) -> Array | None:
    """What is added to the channels; a subclass that adds it elsewhere sets ``use_bias`` to False around the call."""
    return value_or_none(layer.bias) if layer.use_bias else None


def _sizes(layer: Any) -> str:
    return f"{layer.in_features}->{layer.out_features} kernel {layer.kernel_size}"


class Conv(Module):
    """A convolution over any number of spatial axes.

    Args:
      in_features: number of channels of the input.
      out_features: number of channels of the output.
      kernel_size: extent of the kernel along each spatial axis; an int for one spatial axis.
      strides: step between windows, one int or one for each axis.
      padding: ``'SAME'``, ``'SAME_LOWER'``, ``'VALID'``, ``'CIRCULAR'`` (periodic), ``'REFLECT'`` (mirrored, without
        the edge), ``'CAUSAL'`` (one axis: an output sees its own and earlier positions), an int, or for each axis an
        int or a pair (before, after).
      input_dilation: spacing of the input's elements, as for a transposed convolution.
      kernel_dilation: spacing of the kernel's elements (atrous convolution).
      feature_group_count: number of groups of channels that are convolved separately.
      use_bias: whether to add a bias to each channel.
      mask: an array of the kernel's shape, by which the kernel is multiplied.
      dtype: what to compute in (default: inferred from input and parameters).
      param_dtype: what parameters are stored in.
      precision: as in :func:`jax.lax.conv_general_dilated`.
      kernel_init, bias_init: initializers.
      conv_general_dilated: what convolves; called as :func:`jax.lax.conv_general_dilated`. It may have another order of
        axes: the size of the last one is not checked then.
      promote_dtype: what brings ``(inputs, kernel, bias)`` to one dtype.
      preferred_element_type: dtype of the accumulator and the result.
      rngs: the stream ``params`` gives one key for the kernel and one for the bias.
      kernel_metadata, bias_metadata: metadata of the Params.

    Attributes: ``kernel`` of shape ``[*kernel_size, in_features // feature_group_count, out_features]``, ``bias`` of
    shape ``[out_features]`` or ``None``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Conv(3, 8, kernel_size=(5, 5), strides=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((16, 28, 28, 3))).shape, layer.kernel.shape
    ((16, 14, 14, 8), (5, 5, 3, 8))

    Raises:
      ValueError: if the groups do not divide the channels.
    """

    kernel: Param[Array]
    bias: Param[Array] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: Sizes = 1,
        *,
        padding: Padding = "SAME",
        input_dilation: Sizes = 1,
        kernel_dilation: Sizes = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        conv_general_dilated: Callable[..., Array] = lax.conv_general_dilated,
        promote_dtype: Callable[..., Any] = promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        check_sizes(in_features=in_features, out_features=out_features, feature_group_count=feature_group_count)
        kernel_size = _extents(kernel_size)
        if feature_group_count < 1 or in_features % feature_group_count or out_features % feature_group_count:
            raise UsageError(
                f"feature_group_count={feature_group_count} has to divide in_features={in_features} and "
                f"out_features={out_features}."
            )
        self.kernel_shape = (*kernel_size, in_features // feature_group_count, out_features)
        self.kernel = Param(drawn(kernel_init, rngs, self.kernel_shape, param_dtype), **kernel_metadata)
        self.bias = Param(drawn(bias_init, rngs, (out_features,), param_dtype), **bias_metadata) if use_bias else None
        self.in_features = in_features
        self.out_features = out_features
        self.kernel_size = kernel_size
        self.strides = frozen(strides)
        self.padding = frozen(padding)
        self.input_dilation = frozen(input_dilation)
        self.kernel_dilation = frozen(kernel_dilation)
        self.feature_group_count = feature_group_count
        self.use_bias = use_bias
        self.mask = mask
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = frozen(precision)
        self.conv_general_dilated = conv_general_dilated
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    _nnx_sizes = _sizes

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Map ``inputs`` of shape ``[*batch, *spatial, in_features]`` to ``[*batch, *spatial', out_features]``.

        Raises:
          LayerInputError: if the input has too few axes, or not ``in_features`` channels.
          ValueError: for a padding that is not one, or ``'CAUSAL'`` with several spatial axes.
        """
        kernel, rank = self.kernel[...], len(self.kernel_size)
        convolve, channels = self.conv_general_dilated, kernel.shape[-2] * self.feature_group_count
        x, batch = _with_one_batch_axis(self, inputs, kernel, rank, channels, convolve is lax.conv_general_dilated)
        kernel_dilation = per_axis("kernel_dilation", self.kernel_dilation, rank)
        x, padding = _pad(x, canonicalize_padding(self.padding, rank), kernel.shape[:rank], kernel_dilation)
        x, kernel, bias = self.promote_dtype((x, _masked(self, kernel), _bias(self)), dtype=self.dtype)
        kwargs = given(out_sharding=out_sharding, preferred_element_type=self.preferred_element_type)
        y = (_conv_general_dilated if convolve is lax.conv_general_dilated else convolve)(
            x,
            kernel,
            per_axis("strides", self.strides, rank),
            padding,
            lhs_dilation=per_axis("input_dilation", self.input_dilation, rank),
            rhs_dilation=kernel_dilation,
            dimension_numbers=_dimension_numbers(rank + 2),
            feature_group_count=self.feature_group_count,
            precision=self.precision,
            **kwargs,
        )
        if bias is not None:
            y = add_bias(y, bias)
        return y if len(batch) == 1 else jnp.reshape(y, batch + y.shape[1:])


def _pad(
    x: Array, padding: str | tuple[tuple[int, int], ...], kernel_size: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Array, str | tuple[tuple[int, int], ...]]:
    """Apply the paddings that XLA does not have, and return what is left for it to do."""
    if padding not in ("CIRCULAR", "REFLECT", "CAUSAL"):
        return x, padding
    extents = [(k - 1) * d for k, d in zip(kernel_size, dilation, strict=True)]
    if padding == "CAUSAL":
        if len(extents) != 1:
            raise UsageError("Causal padding is only implemented for 1D convolutions.")
        return jnp.pad(x, ((0, 0), (extents[0], 0), (0, 0))), "VALID"
    widths = [(0, 0), *[(extent // 2, extent - extent // 2) for extent in extents], (0, 0)]
    return jnp.pad(x, widths, mode="wrap" if padding == "CIRCULAR" else "reflect"), "VALID"


class ConvTranspose(Module):
    """A transposed convolution: the gradient of a convolution with respect to its input, used to upsample.

    Args:
      in_features: number of channels of the input.
      out_features: number of channels of the output.
      kernel_size: extent of the kernel along each spatial axis; an int for one spatial axis.
      strides: factor by which each spatial axis grows, one int or one for each axis (default 1).
      padding: ``'SAME'``, ``'VALID'``, ``'CIRCULAR'`` (periodic), without strides also ``'SAME_LOWER'``, an int, or for
        each axis an int or a pair; explicit numbers pad the dilated input.
      kernel_dilation: spacing of the kernel's elements.
      mask: an array of the kernel's shape, by which the kernel is multiplied.
      transpose_kernel: whether to flip the kernel and exchange its channel axes, so that the layer is the transpose of
        the Conv with the same kernel.

    The other arguments are those of :class:`Conv`.

    Attributes: ``kernel`` of shape ``[*kernel_size, in_features, out_features]``, with the last two exchanged if
    ``transpose_kernel``; ``bias`` of shape ``[out_features]`` or ``None``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.ConvTranspose(3, 8, kernel_size=(4, 4), strides=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((16, 7, 7, 3))).shape
    (16, 14, 14, 8)
    """

    kernel: Param[Array]
    bias: Param[Array] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: Sizes = None,
        *,
        padding: Padding = "SAME",
        kernel_dilation: Sizes = None,
        use_bias: bool = True,
        mask: Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: Callable[..., Any] = promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        channels = (out_features, in_features) if transpose_kernel else (in_features, out_features)
        self.kernel_size = _extents(kernel_size)
        self.kernel_shape = (*self.kernel_size, *channels)
        self.kernel = Param(drawn(kernel_init, rngs, self.kernel_shape, param_dtype), **kernel_metadata)
        self.bias = Param(drawn(bias_init, rngs, (out_features,), param_dtype), **bias_metadata) if use_bias else None
        self.in_features = in_features
        self.out_features = out_features
        self.strides = frozen(strides)
        self.padding = frozen(padding)
        self.kernel_dilation = frozen(kernel_dilation)
        self.use_bias = use_bias
        self.mask = mask
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = frozen(precision)
        self.transpose_kernel = transpose_kernel
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    _nnx_sizes = _sizes

    def __call__(self, inputs: Array) -> Array:
        """Map ``inputs`` of shape ``[*batch, *spatial, in_features]`` to ``[*batch, *spatial', out_features]``.

        With ``'SAME'``, ``'SAME_LOWER'`` and ``'CIRCULAR'`` padding ``spatial'`` is ``spatial * strides``.

        Raises:
          LayerInputError: if the input has too few axes, or not ``in_features`` channels.
          ValueError: for a padding that a transposed convolution does not have.
        """
        kernel, rank = self.kernel[...], len(self.kernel_size)
        channels = kernel.shape[-1 if self.transpose_kernel else -2]
        x, batch = _with_one_batch_axis(self, inputs, kernel, rank, channels)
        spatial, strides = x.shape[1:-1], per_axis("strides", self.strides, rank)
        padding = canonicalize_padding(self.padding, rank)
        if padding in ("CAUSAL", "REFLECT") or (padding == "SAME_LOWER" and max(strides) > 1):
            where = " with strides" if padding == "SAME_LOWER" else ""
            raise UsageError(
                f"A transposed convolution{where} has no {padding} padding; use SAME, VALID, CIRCULAR or numbers."
            )
        x, kernel, bias = self.promote_dtype((x, _masked(self, kernel), _bias(self)), dtype=self.dtype)
        kwargs = given(preferred_element_type=self.preferred_element_type)
        y = _conv_transpose(
            x,
            kernel,
            strides=strides,
            padding="VALID" if padding == "CIRCULAR" else padding,
            rhs_dilation=per_axis("kernel_dilation", self.kernel_dilation, rank),
            transpose_kernel=self.transpose_kernel,
            precision=self.precision,
            **kwargs,
        )
        if padding == "CIRCULAR":
            periods = tuple([n * s for n, s in zip(spatial, strides, strict=True)])
            y = _wrap(y, periods, self.transpose_kernel)
        if bias is not None:
            y = add_bias(y, bias)
        return y if len(batch) == 1 else jnp.reshape(y, batch + y.shape[1:])


@step("periods", "transpose_kernel")
def _wrap(y: Array, periods: tuple[int, ...], transpose_kernel: bool) -> Array:
    """Fold each spatial axis onto one period, adding what overlaps, with the kernel's centre at its position."""
    for axis, period in enumerate(periods, start=1):
        # Pad to an odd number of periods, so that the middle one stays in place.
        excess = (period - y.shape[axis]) % (2 * period)
        before = excess // 2 if transpose_kernel else (excess + 1) // 2
        widths = [(0, 0)] * y.ndim
        widths[axis] = (before, excess - before)
        y = jnp.pad(y, widths)
        count = y.shape[axis] // period  # -1 would not do for an empty batch
        y = jnp.sum(jnp.reshape(y, (*y.shape[:axis], count, period, *y.shape[axis + 1 :])), axis=axis)
    return y
