"""Linear maps: Linear, LinearGeneral, Einsum, and the lookup table Embed.

All of them take leading batch axes of any number and map the axes that hold features.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.errors import ArgumentError, UsageError, describe
from ..core.formulas import formula, product, products_are_replaced, reshape, step
from ..core.metadata import VariableMetadata
from ..core.module import Module
from ..core.rngs import Rngs
from ..core.tracing import runs_eagerly
from ..core.variables import Param, Variable
from . import initializers
from .dtypes import Array, Dtype, convert, input_error, misfit, promote_dtype
from .initializers import Initializer
from .settings import (
    NO_METADATA,
    FrozenDict,
    Metadata,
    add_bias,
    as_tuple,
    default_bias_init,
    default_kernel_init,
    drawn,
    frozen,
    given,
    value_or_none,
)

if TYPE_CHECKING:
    from .conv import Conv as Conv
    from .conv import ConvTranspose as ConvTranspose
    from .conv import canonicalize_padding as canonicalize_padding

default_embed_init = initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)

_SETTINGS = ("dimension_numbers", "precision", "preferred_element_type", "out_sharding")

_dot_general = product(*_SETTINGS)(lax.dot_general)


@step(*_SETTINGS)
def _affine_eagerly(x: Array, kernel: Array, bias: Array, dimension_numbers: Any, **kwargs: Any) -> Array:
    """Product and sum in one dispatch; the barrier keeps XLA from rounding them once, as if they were one operation."""
    return add_bias(lax.optimization_barrier(lax.dot_general(x, kernel, dimension_numbers, **kwargs)), bias)


@formula(*_SETTINGS)
def _affine(x: Array, kernel: Array, bias: Array, dimension_numbers: Any, **kwargs: Any) -> Array:
    """Product and sum as parts of a program, inlined as a whole."""
    return add_bias(_dot_general(x, kernel, dimension_numbers, **kwargs), bias)


def contract(
    layer: Any, dot_general: Any, x: Array, kernel: Array, bias: Array | None, dimension_numbers: Any, out_sharding: Any
) -> Array:
    """``dot_general`` with the layer's precision and accumulator, and a bias added to the last axes.

    ``None`` stands for ``lax.dot_general``.

    Raises:
      ArgumentError: if ``out_sharding`` is an array or a flag: a layer takes one input.
    """
    if out_sharding is not None and isinstance(out_sharding, jax.Array | np.ndarray | Variable | bool):
        raise ArgumentError(
            f"{type(layer).__name__} takes one input; what follows it is out_sharding, how the output is sharded, but "
            f"got {describe(out_sharding)}."
        )
    kwargs = given(out_sharding=out_sharding, preferred_element_type=layer.preferred_element_type)
    if dot_general is None or dot_general is lax.dot_general:
        if bias is not None:
            # a quantiser follows arrays from one operation to the next, and does not know the barrier
            affine = _affine_eagerly if runs_eagerly() and not products_are_replaced() else _affine
            return affine(x, kernel, bias, dimension_numbers, precision=layer.precision, **kwargs)
        dot_general = _dot_general
    y = dot_general(x, kernel, dimension_numbers, precision=layer.precision, **kwargs)
    return y if bias is None else add_bias(y, bias)


class Linear(Module):
    """A linear map of the last axis: ``y = x @ kernel + bias``.

    Args:
      in_features: size of the last axis of the input.
      out_features: size of the last axis of the output.
      use_bias: whether to add a bias.
      dtype: what to compute in (default: inferred from input and parameters).
      param_dtype: what parameters are stored in.
      precision: as in :func:`jax.lax.dot_general`.
      kernel_init, bias_init: initializers.
      dot_general: a replacement for :func:`jax.lax.dot_general`; sizes of inputs are then not checked.
      promote_dtype: what brings ``(inputs, kernel, bias)`` to one dtype.
      preferred_element_type: dtype of the accumulator and the product.
      rngs: the stream ``params`` gives one key for the kernel and one for the bias.
      kernel_metadata, bias_metadata: metadata of the Params.

    Attributes: ``kernel`` of shape ``[in_features, out_features]``, ``bias`` of shape ``[out_features]`` or ``None``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 3))).shape, layer.kernel.shape, layer.bias.shape
    ((2, 5, 4), (3, 4), (4,))
    """

    kernel: Param[Array]
    bias: Param[Array] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        dot_general: Callable[..., Array] = lax.dot_general,
        promote_dtype: Callable[..., Any] = promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        self.kernel = Param(drawn(kernel_init, rngs, (in_features, out_features), param_dtype), **kernel_metadata)
        self.bias = Param(drawn(bias_init, rngs, (out_features,), param_dtype), **bias_metadata) if use_bias else None
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = frozen(precision)
        self.dot_general = dot_general
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def _nnx_sizes(self) -> str:
        return f"{self.in_features}->{self.out_features}"

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Map ``inputs`` of shape ``[..., in_features]`` to ``[..., out_features]``.

        Raises:
          LayerInputError: if the last axis of the input does not fit the kernel.
        """
        x, kernel, bias = self.promote_dtype((inputs, self.kernel[...], value_or_none(self.bias)), dtype=self.dtype)
        shape = x.shape
        if shape[-1:] != kernel.shape[:-1] and self.dot_general is lax.dot_general:
            unlike = misfit("kernel", kernel, self.in_features, self.out_features)
            size = kernel.shape[-2] if kernel.ndim > 1 else self.in_features
            raise input_error(self, f"inputs of shape [..., {size}]{unlike}", inputs)
        return contract(self, self.dot_general, x, kernel, bias, (((len(shape) - 1,), (0,)), ((), ())), out_sharding)


def kernel_shape(layer: Any) -> tuple[int, ...] | None:
    """The shape that the kernel of a linear layer has now; None for what computes in a way of its own."""
    own = isinstance(layer, Linear | LinearGeneral) and type(layer).__call__.__module__.startswith(f"{__package__}.")
    return layer.kernel[...].shape if own else None


class LinearGeneral(Module):
    """A linear map of several axes at once, with batch axes that have a kernel each.

    Args:
      in_features: sizes of the axes that are contracted.
      out_features: sizes of the axes that replace them, at the end of the output.
      axis: the axes that are contracted, of the sizes ``in_features`` in ascending order of axes.
      batch_axis: a mapping from axis to size, for the leading axes along which each index has its own kernel and bias.
      dot_general_cls: makes the ``dot_general``, anew at each call.

    The other arguments are those of :class:`Linear`.

    Attributes: ``kernel`` of shape ``[*batch, *in_features, *out_features]``, ``bias`` of shape
    ``[*batch, *out_features]`` or ``None``. The initializers see ``[prod(batch) * prod(in), prod(out)]`` and
    ``[prod(batch) * prod(out)]``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> heads = nnx.LinearGeneral((2, 3), (4, 5), axis=(1, -1), rngs=nnx.Rngs(0))
    >>> heads(jnp.ones((6, 2, 7, 3))).shape, heads.kernel.shape
    ((6, 7, 4, 5), (2, 3, 4, 5))

    Raises:
      ValueError: if ``axis`` and ``in_features`` differ in length, or batch axes are not the leading ones.
    """

    kernel: Param[Array]
    bias: Param[Array] | None

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = FrozenDict({}),
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        precision: Any = None,
        promote_dtype: Callable[..., Any] = promote_dtype,
        dot_general: Callable[..., Array] | None = None,
        dot_general_cls: Any = None,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        self.in_features, self.out_features = as_tuple(in_features), as_tuple(out_features)
        self.axis = as_tuple(axis)
        self.batch_axis = frozen(batch_axis)
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = frozen(precision)
        self.dot_general = dot_general
        self.dot_general_cls = dot_general_cls
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        if len(self.in_features) != len(self.axis):
            raise UsageError(f"in_features and axis must have the same length. Got {self.in_features} and {self.axis}.")
        if sorted(self.batch_axis) != list(range(len(self.batch_axis))):
            raise UsageError(
                f"batch_axis {tuple(self.batch_axis)} must be consecutive leading axes starting from 0; move them to "
                "the front of the input with jnp.moveaxis."
            )
        batch = tuple([self.batch_axis[a] for a in sorted(self.batch_axis)])
        kernel = drawn(
            kernel_init,
            rngs,
            (math.prod(batch) * math.prod(self.in_features), math.prod(self.out_features)),
            param_dtype,
        )
        self.kernel = reshaped(kernel, (*batch, *self.in_features, *self.out_features), kernel_metadata)
        self.bias = None
        if use_bias:
            bias = drawn(bias_init, rngs, (math.prod(batch) * math.prod(self.out_features),), param_dtype)
            self.bias = reshaped(bias, (*batch, *self.out_features), bias_metadata)

    def _nnx_sizes(self) -> str:
        return f"{self.in_features}->{self.out_features}"

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Contract the axes ``axis`` of ``inputs``; the result is ``[*batch, ..., *out_features]``.

        Raises:
          LayerInputError: if an axis of the input does not fit the kernel, or is missing.
        """
        x, kernel, bias = self.promote_dtype((inputs, self.kernel[...], value_or_none(self.bias)), dtype=self.dtype)
        n_batch, n_in = len(self.batch_axis), len(self.axis)
        axes = sorted([a % x.ndim if -x.ndim <= a < x.ndim else x.ndim for a in self.axis])
        contracted, n_out = (*range(n_batch), *axes), len(self.out_features)
        if x.ndim in axes or tuple([x.shape[a] for a in contracted]) != kernel.shape[: kernel.ndim - n_out]:
            sizes = dict(zip((*range(n_batch), *map(int, sorted(self.axis))), kernel.shape, strict=False))
            batch = [self.batch_axis[a] for a in range(n_batch)]
            unlike = misfit("kernel", kernel, *batch, *self.in_features, *self.out_features)
            raise input_error(self, f"inputs whose axes have the sizes {sizes} (axis: size){unlike}", inputs)
        batch = tuple(range(n_batch))
        dimensions = ((tuple(axes), tuple(range(n_batch, n_batch + n_in))), (batch, batch))
        dot_general = self.dot_general if self.dot_general_cls is None else self.dot_general_cls()
        if bias is None or not n_batch:
            return contract(self, dot_general, x, kernel, bias, dimensions, out_sharding)
        y = contract(self, dot_general, x, kernel, None, dimensions, out_sharding)
        between = (1,) * (y.ndim - bias.ndim)
        return add_bias(y, jnp.reshape(bias, bias.shape[:n_batch] + between + bias.shape[n_batch:]))


def reshaped(value: Any, shape: tuple[int, ...], metadata: Metadata) -> Param:
    """A Param with an initializer's value in this shape; its metadata, which may come with the value, is about that."""
    if isinstance(value, VariableMetadata):
        value, metadata = value.raw_value, value.all_metadata(metadata)
    return Param(reshape(value, shape=shape), **metadata)


class Einsum(Module):
    """An einsum with a learned second operand: ``einsum(einsum_str, inputs, kernel) + bias``.

    Args:
      einsum_str: the equation, with exactly two operands; ``None`` if each call gives it (then without a bias).
      kernel_shape: shape of the kernel.
      bias_shape: shape of the bias: the sizes of the output axes that the kernel has, in the order of the output;
        ``None`` for no bias.
      einsum_op: what computes the product; called as :func:`jax.numpy.einsum`.

    The other arguments are those of :class:`Linear`.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Einsum('nta,hab->nthb', (8, 2, 4), (8, 4), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((16, 11, 2))).shape
    (16, 11, 8, 4)

    Raises:
      ValueError: if the equation has no arrow or not exactly two operands.
    """

    kernel: Param[Array]
    bias: Param[Array] | None

    def __init__(
        self,
        einsum_str: str | None,
        kernel_shape: int | Sequence[int],
        bias_shape: int | Sequence[int] | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: Callable[..., Any] = promote_dtype,
        einsum_op: Callable[..., Array] = jnp.einsum,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        self.einsum_str = None if einsum_str is None else _checked_equation(einsum_str)
        self.kernel_shape = as_tuple(kernel_shape)
        self.bias_shape = None if bias_shape is None else as_tuple(bias_shape)
        self.kernel = Param(drawn(kernel_init, rngs, self.kernel_shape, param_dtype), **kernel_metadata)
        self.bias = None
        if self.bias_shape is not None:
            self.bias = Param(drawn(bias_init, rngs, self.bias_shape, param_dtype), **bias_metadata)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = frozen(precision)
        self.promote_dtype = promote_dtype
        self.einsum_op = einsum_op
        self.preferred_element_type = preferred_element_type

    def _nnx_sizes(self) -> str:
        return f"{self.einsum_str} kernel {self.kernel_shape}"

    def __call__(self, inputs: Array, einsum_str: str | None = None, out_sharding: Any = None) -> Array:
        """Return ``einsum(einsum_str, inputs, kernel) + bias``; ``einsum_str`` defaults to the layer's own.

        Raises:
          LayerInputError: if the input does not fit the equation and the kernel.
          ValueError: if neither the call nor the constructor gave an equation, or the bias does not fit it.
        """
        equation = self.einsum_str if einsum_str is None else einsum_str
        if equation is None:
            raise UsageError("Einsum has no equation: give einsum_str to the constructor or to the call.")
        equation = _checked_equation(equation)
        x, kernel, bias = self.promote_dtype((inputs, self.kernel[...], value_or_none(self.bias)), dtype=self.dtype)
        kwargs = given(out_sharding=out_sharding, preferred_element_type=self.preferred_element_type)
        try:
            y = self.einsum_op(equation, x, kernel, precision=self.precision, **kwargs)
        except (ValueError, TypeError) as error:
            raise input_error(self, f"inputs that fit the equation {equation!r}", inputs) from error
        if bias is None:
            return y
        shape = _axes_of_kernel(equation, kernel.shape, y.ndim)
        if math.prod(shape) != bias.size:
            wanted = tuple([size for size in shape if size != 1])
            raise UsageError(
                f"The bias of Einsum {equation!r} has shape {bias.shape}, but the axes of the output that the kernel "
                f"of shape {kernel.shape} has are of sizes {wanted}: write bias_shape={wanted}."
            )
        return _add_reshaped(y, bias, shape)


@step("shape")
def _add_reshaped(y: Array, bias: Array, shape: tuple[int, ...]) -> Array:
    return y + jnp.reshape(bias, shape)


def _checked_equation(equation: str) -> str:
    equation = equation.replace(" ", "")
    if "->" not in equation:
        raise UsageError(f'`einsum_str` equation must be explicit and include "->": {equation!r}')
    if equation.count(",") != 1:
        raise UsageError(
            "`einsum_str` equation must have exactly two operands and therefore, exactly one comma character, "
            f"instead of {equation.count(',')}: {equation!r}"
        )
    return equation


def _axes_of_kernel(equation: str, kernel_shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """The shape in which a bias meets the output: sizes for the axes that the kernel has, 1 for all others."""
    operands, output = equation.split("->")
    before, dots, after = operands.split(",")[1].partition("...")
    sizes = dict(zip(before, kernel_shape, strict=False))
    sizes |= dict(zip(reversed(after), reversed(kernel_shape), strict=False))
    shared = kernel_shape[len(before) : len(kernel_shape) - len(after)]
    before, dots, after = output.partition("...")
    free = ndim - len(before) - len(after) - len(shared)
    middle = (1,) * free + shared if dots else ()
    return (*[sizes.get(c, 1) for c in before], *middle, *[sizes.get(c, 1) for c in after])


class Embed(Module):
    """A table of vectors, looked up by integer.

    Args:
      num_embeddings: number of vectors.
      features: size of each vector.
      dtype: what the output is cast to (default: ``param_dtype``).
      param_dtype: what the table is stored in.
      embedding_init: initializer of the table.
      promote_dtype: what casts the vectors, and in :meth:`attend` the query too.
      rngs: the stream ``params`` gives one key.
      embedding_metadata: metadata of the Param.

    Attributes: ``embedding`` of shape ``[num_embeddings, features]``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> embed = nnx.Embed(10, 4, rngs=nnx.Rngs(0))
    >>> embed(jnp.array([[1, 2, 3]])).shape, embed.attend(jnp.ones((2, 4))).shape
    ((1, 3, 4), (2, 10))
    """

    embedding: Param[Array]

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        embedding_init: Initializer = default_embed_init,
        promote_dtype: Callable[..., Any] = promote_dtype,
        rngs: Rngs,
        embedding_metadata: Metadata = NO_METADATA,
    ):
        table = drawn(embedding_init, rngs, (num_embeddings, features), param_dtype)
        self.embedding = Param(table, **embedding_metadata)
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = self.embedding.dtype if dtype is None else dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def _nnx_sizes(self) -> str:
        return f"{self.num_embeddings}x{self.features}"

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Return the vectors ``[..., features]`` for integers of shape ``[...]``.

        An index out of range gives NaN, or the vector if there is only one.

        Raises:
          LayerInputError: if the input is not of an integer dtype.
        """
        indices = inputs if hasattr(inputs, "dtype") else jnp.asarray(inputs)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise input_error(self, "inputs of an integer dtype", indices)
        table = self._table(indices)
        # The gradient of a vector is summed over all places where it is looked up, in the dtype of the table; a sum of
        # ones in bfloat16 stops at 256. So a cast to a narrower dtype comes after the look-up, which is also less work.
        cast = functools.partial(self.promote_dtype, dtype=self.dtype, inexact=False)
        if _is_narrower(self.dtype, table.dtype):
            return cast((self._found(convert(table, table.dtype), indices, out_sharding),))[0]
        return self._found(cast((table,))[0], indices, out_sharding)

    def _table(self, inputs: Any) -> Array:
        table = self.embedding[...]
        if table.ndim != 2:
            unlike = misfit("embedding", table, self.num_embeddings, self.features)
            raise input_error(self, f"inputs if its embedding is a matrix{unlike}", inputs)
        return table

    def _found(self, table: Array, indices: Array, out_sharding: Any) -> Array:
        if table.shape[0] == 1:  # there is nothing to look up, and a gather of one row is slow
            found = jnp.broadcast_to(table[0], (*indices.shape, *table.shape[1:]))
            return found if out_sharding is None else jax.sharding.reshard(found, out_sharding)
        if out_sharding is None:
            return jnp.take(table, indices, axis=0)
        return table.at[indices].get(mode="fill", out_sharding=out_sharding)  # as `take` does, without a sharding

    def attend(self, query: Array, out_sharding: Any = None) -> Array:
        """Score ``query`` of shape ``[..., features]`` against each vector: ``[..., num_embeddings]`` inner products.

        For an output layer tied to the embedding.

        Raises:
          LayerInputError: if the last axis of the query does not fit.
        """
        x, table = self.promote_dtype((query, self._table(query)), dtype=self.dtype)
        if x.shape[-1:] != table.shape[-1:]:
            raise input_error(self, f"queries of shape [..., {table.shape[-1]}]", query)
        return jnp.dot(x, table.T, **given(out_sharding=out_sharding))


def _is_narrower(dtype: Dtype | None, other: np.dtype) -> bool:
    """Whether both are dtypes of floats, and the first one has fewer bits."""
    if dtype is None or not all(jnp.issubdtype(d, jnp.floating) for d in (dtype, other)):
        return False
    return np.dtype(dtype).itemsize < other.itemsize


def __getattr__(name: str) -> Any:
    # flax.nnx has them in this module
    if name in ("Conv", "ConvTranspose", "canonicalize_padding", "_conv_dimension_numbers"):
        return getattr(importlib.import_module(".conv", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
