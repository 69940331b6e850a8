"""Normalisation: BatchNorm, LayerNorm, RMSNorm, GroupNorm, InstanceNorm.

All of them compute ``y = (x - mean) / sqrt(var + epsilon) * scale + bias`` and differ in the axes over which mean and
variance are taken. Statistics are computed in float32 at least, whatever the dtype of the input, and the result is cast
at the end. Where no element counts, because a mask excludes all of them or there are none, the result is NaN: there is
nothing to normalise by. But running statistics stay as they are there, and derivatives are 0.

The arithmetic is three formulas: :func:`moments` or :func:`mean_square`, then :func:`normalize`. They are made of
compiled steps of a few operations: so an eager call is fast, and rounds as it would operation by operation
(core/formulas.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..core.errors import LayerInputError, UsageError, describe
from ..core.formulas import broadcasts, formula, reshape, step
from ..core.module import Module
from ..core.rngs import Rngs
from ..core.variables import BatchStat, Param
from . import initializers
from .dtypes import Array, Dtype, at_least_float32, convert, input_error, misfit, promote_dtype
from .initializers import Initializer
from .settings import NO_METADATA, NO_MODE, Metadata, as_tuple, check_sizes, drawn, frozen, value_or_none

Axes = int | Sequence[int]


def _absolute(axes: Axes, ndim: int) -> tuple[int, ...]:
    """Axes counted from the front, each once; those that do not exist are left as they are."""
    return tuple(dict.fromkeys([a + ndim if a < 0 else a for a in as_tuple(axes)]))


@step()
def squared(x: Array) -> Array:
    """The square of each number; for a complex one, of its magnitude."""
    return lax.square(lax.real(x)) + lax.square(lax.imag(x)) if jnp.iscomplexobj(x) else lax.square(x)


@step("axes")
def _square_distance(x: Array, mean: Array, axes: tuple[int, ...]) -> Array:
    return squared(x - jnp.expand_dims(mean, axes))


@step()
def _fast_variance(mean_of_square: Array, square_of_mean: Array) -> Array:
    return jnp.maximum(0.0, mean_of_square - square_of_mean)


@step("axes")
def _mean(x: Array, mask: Array | None, axes: tuple[int, ...]) -> Array:
    if mask is None:
        return jnp.mean(x, axes)
    mask = jnp.broadcast_to(mask, x.shape)
    return jnp.sum(x, axes, where=mask) / _at_least_one(jnp.sum(mask, axes, dtype=x.real.dtype))


def _at_least_one(count: Array) -> Array:
    return jnp.maximum(count, 1)  # a sum of no elements is 0, and so is their mean


@step("axes", "axis_name", "groups")
def _means_over_shards(
    values: list[Array], mask: Array | None, axes: tuple[int, ...], axis_name: str, groups: Any
) -> list[Array]:
    if mask is None:
        return [*lax.pmean(jnp.stack([jnp.mean(v, axes) for v in values]), axis_name, axis_index_groups=groups)]
    mask = jnp.broadcast_to(mask, values[0].shape)  # shards may hold different numbers of elements that count
    sums = [jnp.sum(v, axes, where=mask) for v in values]
    sums, count = lax.psum((sums, jnp.sum(mask, axes, dtype=sums[-1].dtype)), axis_name, axis_index_groups=groups)
    return [s / _at_least_one(count) for s in sums]


def _means(values: list[Array], mask: Array | None, axes: tuple[int, ...], axis_name: Any, groups: Any) -> list[Array]:
    """The mean of each array over ``axes``, and over the shards of a mapped axis if there is one."""
    if axis_name is None:
        return [_mean(v, mask, axes) for v in values]
    return _means_over_shards(values, mask, axes, axis_name, groups)


@step("axes", "axis_name", "groups")
def _any(x: Array, mask: Array, axes: tuple[int, ...], axis_name: Any, groups: Any) -> Array:
    """Whether any element counts, over ``axes`` and over the shards of a mapped axis if there is one."""
    valid = jnp.any(jnp.broadcast_to(mask, x.shape), axes)
    return valid if axis_name is None else lax.psum(valid.astype(jnp.int32), axis_name, axis_index_groups=groups) > 0


def _checked(mask: Array | None, x: Array) -> Array | None:
    """The mask; one that excludes everything for an array without elements."""
    if mask is not None and not broadcasts(jnp.shape(mask), x.shape):
        raise LayerInputError(f"The mask has to broadcast to the inputs, {describe(x)}, but is {describe(mask)}.")
    return mask if x.size else jnp.zeros((1,) * x.ndim, bool)


@formula("axes", "axis_name", "axis_index_groups", "use_fast_variance")
def moments(
    x: Array,
    mask: Array | None,
    *,
    axes: tuple[int, ...],
    axis_name: str | None = None,
    axis_index_groups: Any = None,
    use_fast_variance: bool = True,
) -> tuple[Array, Array, Array | None]:
    """Return mean and variance of ``x`` over ``axes``, in float32 at least, and where these are valid.

    They are valid where an element counts, else 0. Without a mask the third result is None: all are valid.

    Args:
      x: array.
      mask: booleans that broadcast to ``x``; elements where it is false do not count.
      axes: axes to reduce.
      axis_name: name of a mapped axis (``vmap``, ``pmap``, ``shard_map``) to average over as well.
      axis_index_groups: groups of indices of that axis that are averaged separately.
      use_fast_variance: as in :class:`BatchNorm`.
    """
    mask = _checked(mask, x)
    x = convert(x, at_least_float32(x.dtype))
    over = (axes, axis_name, axis_index_groups)
    valid = None if mask is None else _any(x, mask, *over)
    if use_fast_variance:
        mean, mean_of_square = _means([x, squared(x)], mask, *over)
        return mean, _fast_variance(mean_of_square, squared(mean)), valid
    (mean,) = _means([x], mask, *over)
    return mean, _means([_square_distance(x, mean, axes)], mask, *over)[0], valid


@formula("axes", "axis_name", "axis_index_groups")
def mean_square(
    x: Array, mask: Array | None, *, axes: tuple[int, ...], axis_name: str | None = None, axis_index_groups: Any = None
) -> tuple[Array, Array | None]:
    """Return the mean of ``x**2`` over ``axes``, and where it is valid; see :func:`moments`."""
    mask = _checked(mask, x)
    x = convert(x, at_least_float32(x.dtype))
    over = (axes, axis_name, axis_index_groups)
    return _means([squared(x)], mask, *over)[0], None if mask is None else _any(x, mask, *over)


_rsqrt = step()(lax.rsqrt)


@step("shape")
def _reshaped_sum(x: Array, epsilon: Any, shape: tuple[int, ...]) -> Array:
    return jnp.reshape(x, shape) + epsilon


@step("shape")
def _reshaped_product(factor: Array, scale: Array, shape: tuple[int, ...]) -> Array:
    return factor * jnp.reshape(scale, shape)


@step("shape", "dtype")
def _scaled(x: Array, mean: Array | None, factor: Array, shape: Any, dtype: Any) -> Array:
    return jnp.asarray((x if mean is None else x - jnp.reshape(mean, shape)) * factor, dtype)


@step("feature_shape", "dtype")
def _shifted(y: Array, bias: Array, feature_shape: Any, dtype: Any) -> Array:
    return jnp.asarray(y + jnp.reshape(bias, feature_shape), dtype)


@step("shape")
def _nan_unless(valid: Array, y: Array, shape: Any) -> Array:
    return jnp.where(jnp.reshape(valid, shape), y, jnp.nan)  # its derivatives are 0 where it is NaN


@formula("axes", "feature_axes")
def normalize(
    x: Array,
    mean: Array | None,
    var: Array,
    valid: Array | None,
    scale: Array | None,
    bias: Array | None,
    *,
    axes: tuple[int, ...],
    feature_axes: tuple[int, ...],
    epsilon: float,
) -> Array:
    """Return ``(x - mean) * rsqrt(var + epsilon) * scale + bias`` in the dtype of ``x``; NaN unless ``valid``.

    ``mean``, ``var`` and ``valid`` lack the axes ``axes`` of ``x``; ``scale`` and ``bias`` have only its axes
    ``feature_axes``.
    """
    shape = tuple([1 if axis in axes else size for axis, size in enumerate(x.shape)])
    feature_shape = tuple([size if axis in feature_axes else 1 for axis, size in enumerate(x.shape)])
    factor = _rsqrt(_reshaped_sum(var, epsilon, shape))
    if scale is not None:
        factor = _reshaped_product(factor, scale, feature_shape)
    if bias is None:
        y = _scaled(x, mean, factor, shape, x.dtype)
    else:
        y = _shifted(_scaled(x, mean, factor, shape, None), bias, feature_shape, x.dtype)
    return y if valid is None else _nan_unless(valid, y, shape)


def _reduction_axes(layer: Any, x: Any) -> tuple[int, ...]:
    """The axes that a layer reduces, counted from the front."""
    ndim = len(x.shape)
    axes = _absolute(layer.reduction_axes, ndim)
    for axis in axes:
        if not 0 <= axis < ndim:
            listed = ", ".join(map(str, as_tuple(layer.reduction_axes)))
            raise input_error(layer, f"inputs with the axes that it reduces (reduction_axes: {listed})", x)
    return axes


def _feature_axes(layer: Any, x: Any, axes: Axes, **parameters: Array | None) -> tuple[int, ...]:
    """The axes counted from the front, checked to hold as many elements as each parameter that there is.

    The number of features that the layer declares does not decide: code prunes channels by replacing the parameters,
    and in a ``shard_map`` a parameter is only a part.
    """
    shape = x.shape
    absolute = _absolute(axes, len(shape))
    size = math.prod([shape[a] if 0 <= a < len(shape) else -1 for a in absolute])
    for name, parameter in parameters.items():
        if parameter is not None and math.prod(parameter.shape) != size:
            listed = ", ".join(map(str, as_tuple(axes)))
            unlike = misfit(name, parameter, layer.num_features) or f" (as its {name} has)"
            raise input_error(layer, f"inputs with {parameter.size} features on axis {listed}{unlike}", x)
    return absolute


def _moments_settings(layer: Any) -> dict[str, Any]:
    """The settings of a layer that :func:`moments` takes."""
    return {
        "axis_name": layer.axis_name,
        "axis_index_groups": layer.axis_index_groups,
        "use_fast_variance": layer.use_fast_variance,
    }


def _sizes(layer: Any) -> str:
    return str(layer.num_features)


class BatchNorm(Module):
    """Normalise each feature over the batch, with running statistics for evaluation.

    While training (``use_running_average=False``) the statistics of the batch are used, and the running ones move by
    ``running = momentum * running + (1 - momentum) * batch``. ``model.eval()`` switches to the running statistics,
    ``model.train()`` back; a layer whose ``use_running_average=True`` was set by the user stays frozen.
    Ioffe & Szegedy, "Batch normalization", https://arxiv.org/abs/1502.03167.

    Args:
      num_features: size of the feature axis, or the product of the sizes of several.
      use_running_average: whether to normalise by the running statistics and leave them alone; if ``None``, each call
        says.
      axis: the feature axis, or axes.
      momentum: weight of the past in the running statistics.
      epsilon: added to the variance.
      dtype: dtype of the result (default: inferred from input and parameters).
      param_dtype: what scale and bias are stored in. The running statistics are float32; the mean is complex if this or
        ``dtype`` is.
      use_bias: whether to add a bias.
      use_scale: whether to multiply by a scale.
      bias_init, scale_init: initializers.
      axis_name: name of a mapped axis over which the batch is spread, to take statistics over the whole batch.
      axis_index_groups: groups of indices of that axis that take statistics separately; JAX has them for ``pmap`` only.
      use_fast_variance: whether to compute the variance as ``E[x**2] - E[x]**2``, clipped at 0: in one pass over the
        data, but less exact where the mean is large against the deviation.
      promote_dtype: what brings ``(x, mean, var, scale, bias)`` to one dtype.
      rngs: the stream ``params`` gives one key for the scale and one for the bias.
      bias_metadata, scale_metadata: metadata of the Params.

    Attributes: ``mean``, ``var`` (BatchStat), ``scale``, ``bias`` (Param or ``None``), all of shape ``[num_features]``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[1., 2.], [3., 6.]])).round(2)
    Array([[-1., -1.],
           [ 1.,  1.]], dtype=float32)
    >>> layer.mean.value, layer.var.value
    (Array([1., 2.], dtype=float32), Array([1. , 2.5], dtype=float32))
    """

    mean: BatchStat[Array]
    var: BatchStat[Array]
    scale: Param[Array] | None
    bias: Param[Array] | None

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: Axes = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Callable[..., Any] = promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        check_sizes(num_features=num_features)
        shape = (num_features,)
        is_complex = any(jnp.issubdtype(d, jnp.complexfloating) for d in (dtype, param_dtype) if d is not None)
        self.mean = BatchStat(initializers.zeros(None, shape, jnp.complex64 if is_complex else jnp.float32))
        self.var = BatchStat(initializers.ones(None, shape, jnp.float32))
        self.scale = Param(drawn(scale_init, rngs, shape, param_dtype), **scale_metadata) if use_scale else None
        self.bias = Param(drawn(bias_init, rngs, shape, param_dtype), **bias_metadata) if use_bias else None
        self.num_features = num_features
        self.use_running_average = use_running_average
        self.axis = frozen(axis)
        self.momentum = momentum
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.axis_name = axis_name
        self.axis_index_groups = frozen(axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    _nnx_sizes = _sizes

    def __call__(self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None) -> Array:
        """Normalise ``x``, an array of any shape whose axis ``axis`` has the size ``num_features``.

        Args:
          x: the input.
          use_running_average: overrides the attribute.
          mask: booleans that broadcast to ``x``; elements where it is false do not count in the statistics.

        Raises:
          LayerInputError: if the feature axis has another size.
          ValueError: if neither the call nor the attribute says which statistics to use.
        """
        use_running = self.use_running_average if use_running_average is None else use_running_average
        if use_running is None:
            raise UsageError(NO_MODE.format("use_running_average", "BatchNorm"))
        running_mean, running_var = self.mean.get_value(), self.var.get_value()
        scale, bias = value_or_none(self.scale), value_or_none(self.bias)
        statistics = {"mean": running_mean, "var": running_var}
        feature_axes = _feature_axes(self, x, self.axis, scale=scale, bias=bias, **statistics)
        axes = tuple([a for a in range(x.ndim) if a not in feature_axes])
        x, mean, var, scale, bias = self.promote_dtype((x, running_mean, running_var, scale, bias), dtype=self.dtype)
        valid = None
        moved = []
        if not use_running:
            mean, var, valid = moments(x, mask, axes=axes, **_moments_settings(self))
            for statistic, running, batch in (self.mean, running_mean, mean), (self.var, running_var, var):
                moved.append((statistic, _moved(running, batch, self.momentum, 1 - self.momentum, valid)))
        y = normalize(x, mean, var, valid, scale, bias, axes=axes, feature_axes=feature_axes, epsilon=self.epsilon)
        for statistic, value in moved:  # written last: a call that fails leaves the statistics as they were
            statistic.set_value(value)
        return y

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set what :func:`nnxlib.view` may set on this layer."""
        if use_running_average is not None:
            self.use_running_average = use_running_average


@step()
def _products(running: Array, batch: Array, momentum: Any, rest: Any) -> tuple[Array, Array]:
    return momentum * running, rest * jnp.reshape(batch, running.shape)


@step("dtype")
def _sum(products: tuple[Array, Array], dtype: Any) -> Array:
    return lax.stop_gradient(products[0] + products[1]).astype(dtype)


@step()
def _where(valid: Array, moved: Array, running: Array) -> Array:
    return jnp.where(jnp.reshape(valid, running.shape), moved, running)


@formula()
def _moved(running: Array, batch: Array, momentum: Any, rest: Any, valid: Array | None) -> Array:
    """The running statistic, one step further towards that of the batch; unchanged where this is not valid."""
    moved = _sum(_products(running, batch, momentum, rest), running.dtype)
    return moved if valid is None else _where(valid, moved, running)


class LayerNorm(Module):
    """Normalise each example over its features.

    Ba, Kiros & Hinton, "Layer normalization", https://arxiv.org/abs/1607.06450.

    Args:
      num_features: size of the feature axis, or the product of the sizes of several.
      epsilon: added to the variance.
      dtype: dtype of the result (default: inferred from input and parameters).
      param_dtype: what scale and bias are stored in.
      use_bias: whether to add a bias.
      use_scale: whether to multiply by a scale.
      bias_init, scale_init: initializers.
      reduction_axes: axes over which mean and variance are taken.
      feature_axes: axes that scale and bias have.
      axis_name: name of a mapped axis over which the features are spread.
      axis_index_groups: groups of indices of that axis that take statistics separately.
      use_fast_variance: as in :class:`BatchNorm`.
      promote_dtype: what brings ``(x, scale, bias)`` to one dtype.
      rngs: the stream ``params`` gives one key for the scale and one for the bias.
      bias_metadata, scale_metadata: metadata of the Params.

    Attributes: ``scale``, ``bias`` of shape ``[num_features]`` or ``None``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.LayerNorm(2, rngs=nnx.Rngs(0))(jnp.array([[1., 3.], [5., 5.]])).round(2)
    Array([[-1.,  1.],
           [ 0.,  0.]], dtype=float32)
    """

    scale: Param[Array] | None
    bias: Param[Array] | None

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Callable[..., Any] = promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        shape = (num_features,)
        self.scale = Param(drawn(scale_init, rngs, shape, param_dtype), **scale_metadata) if use_scale else None
        self.bias = Param(drawn(bias_init, rngs, shape, param_dtype), **bias_metadata) if use_bias else None
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = frozen(reduction_axes)
        self.feature_axes = frozen(feature_axes)
        self.axis_name = axis_name
        self.axis_index_groups = frozen(axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    _nnx_sizes = _sizes

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalise ``x``, an array of any shape whose axis ``feature_axes`` has the size ``num_features``.

        Elements where ``mask`` (booleans that broadcast to ``x``) is false do not count in the statistics.

        Raises:
          LayerInputError: if the feature axis has another size.
        """
        scale, bias = value_or_none(self.scale), value_or_none(self.bias)
        feature_axes = _feature_axes(self, x, self.feature_axes, scale=scale, bias=bias)
        axes = _reduction_axes(self, x)
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        mean, var, valid = moments(x, mask, axes=axes, **_moments_settings(self))
        return normalize(x, mean, var, valid, scale, bias, axes=axes, feature_axes=feature_axes, epsilon=self.epsilon)


class RMSNorm(Module):
    """Divide each example by the root of its mean square.

    Zhang & Sennrich, "Root mean square layer normalization", https://arxiv.org/abs/1910.07467.

    Arguments as :class:`LayerNorm`, without a bias; ``use_fast_variance`` has no effect, since no mean is subtracted.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> y = nnx.RMSNorm(2, rngs=nnx.Rngs(0))(jnp.array([[1., 7.]]))
    >>> jnp.mean(y**2).round(2)
    Array(1., dtype=float32)
    """

    scale: Param[Array] | None

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Callable[..., Any] = promote_dtype,
        rngs: Rngs,
        scale_metadata: Metadata = NO_METADATA,
    ):
        shape = (num_features,)
        self.scale = Param(drawn(scale_init, rngs, shape, param_dtype), **scale_metadata) if use_scale else None
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_scale = use_scale
        self.reduction_axes = frozen(reduction_axes)
        self.feature_axes = frozen(feature_axes)
        self.axis_name = axis_name
        self.axis_index_groups = frozen(axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    _nnx_sizes = _sizes

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Normalise ``x``; see :meth:`LayerNorm.__call__`."""
        scale = value_or_none(self.scale)
        feature_axes = _feature_axes(self, x, self.feature_axes, scale=scale)
        axes = _reduction_axes(self, x)
        x, scale = self.promote_dtype((x, scale), dtype=self.dtype)
        over = {"axes": axes, "axis_name": self.axis_name, "axis_index_groups": self.axis_index_groups}
        var, valid = mean_square(x, mask, **over)
        return normalize(x, None, var, valid, scale, None, axes=axes, feature_axes=feature_axes, epsilon=self.epsilon)


class GroupNorm(Module):
    """Normalise groups of features of each example over the group and over space.

    Wu & He, "Group normalization", https://arxiv.org/abs/1803.08494.

    Args:
      num_features: size of the feature axis, the last one.
      num_groups: number of groups, 32 by default.
      group_size: size of a group, instead of ``num_groups`` (then ``None``).
      reduction_axes: axes over which mean and variance are taken, the feature axis included, within its groups; by
        default all but the first, the batch.

    The other arguments are those of :class:`LayerNorm`.

    Attributes: ``scale``, ``bias`` of shape ``[num_features]`` or ``None``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))(jnp.array([[1., 3., 10., 30.]])).round(2)
    Array([[-1.,  1., -1.,  1.]], dtype=float32)

    Raises:
      ValueError: if not exactly one of ``num_groups`` and ``group_size`` is given, or the groups do not divide the
        features.
    """

    scale: Param[Array] | None
    bias: Param[Array] | None

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes | None = None,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Callable[..., Any] = promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        if (num_groups is None) == (group_size is None):
            raise UsageError(
                "Either `num_groups` or `group_size` should be specified. If `group_size` is to be specified, pass "
                "`num_groups=None` as argument to override the default `num_groups` value of 32."
            )
        check_sizes(num_features=num_features, num_groups=num_groups or 0, group_size=group_size or 0)
        if group_size is not None:
            if group_size < 1 or num_features % group_size:
                raise UsageError(
                    f"Number of features ({num_features}) is not multiple of the group size ({group_size})."
                )
            num_groups = num_features // group_size
        if num_groups is None or num_groups <= 0 or num_features % num_groups:
            raise UsageError(
                f"Number of groups ({num_groups}) does not divide the number of channels ({num_features})."
            )
        self.feature_axis = -1
        self.num_groups = num_groups
        self.group_size = num_features // num_groups
        shape = (num_features,)
        self.scale = Param(drawn(scale_init, rngs, shape, param_dtype), **scale_metadata) if use_scale else None
        self.bias = Param(drawn(bias_init, rngs, shape, param_dtype), **bias_metadata) if use_bias else None
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = frozen(reduction_axes)
        self.axis_name = axis_name
        self.axis_index_groups = frozen(axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def _nnx_sizes(self) -> str:
        return f"{self.num_groups}x{self.group_size}"

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalise ``x`` of shape ``[batch, *spatial, num_features]``.

        Elements where ``mask`` (booleans that broadcast to ``x``) is false do not count in the statistics.

        Raises:
          LayerInputError: if the last axis has another size, or there is no axis before it.
          ValueError: if ``reduction_axes`` does not include the feature axis.
        """
        scale, bias = value_or_none(self.scale), value_or_none(self.bias)
        features = self.num_groups * self.group_size
        parameters = ("scale", scale), ("bias", bias)
        unlike = [misfit(name, p, features) for name, p in parameters if p is not None and p.size != features]
        if x.ndim < 2 or x.shape[-1] != features or unlike:
            hint = unlike[0] + _SET_GROUPS if unlike else ""
            raise input_error(self, f"inputs of shape [batch, *spatial, {features}]{hint}", x)
        feature_axis = x.ndim - 1
        axes = tuple(range(1, x.ndim)) if self.reduction_axes is None else _reduction_axes(self, x)
        if feature_axis not in axes:
            raise UsageError(f"reduction_axes {self.reduction_axes} of GroupNorm must include the feature axis, -1.")
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        others = tuple([a for a in axes if a != feature_axis])
        mean, var, valid = _group_moments(x, mask, groups=self.num_groups, axes=others, **_moments_settings(self))
        return normalize(
            x, mean, var, valid, scale, bias, axes=others, feature_axes=(feature_axis,), epsilon=self.epsilon
        )


_SET_GROUPS = ": set its num_groups and group_size to those that it has now"


@formula("groups", "axes", "axis_name", "axis_index_groups", "use_fast_variance")
def _group_moments(
    x: Array, mask: Array | None, *, groups: int, axes: tuple[int, ...], **options: Any
) -> tuple[Array, Array, Array | None]:
    """Moments over ``axes`` and within groups of the last axis, with one entry for each feature."""
    size = x.shape[-1] // groups
    grouped = (*x.shape[:-1], groups, size)
    mask = _checked(mask, x)
    if mask is not None:
        mask = reshape(jnp.broadcast_to(mask, x.shape), grouped)
    mean, var, valid = moments(reshape(x, grouped), mask, axes=(*axes, x.ndim), **options)
    return _repeat(mean, size), _repeat(var, size), None if valid is None else _repeat(valid, size)


@step("times")
def _repeat(x: Array, times: int) -> Array:
    return jnp.repeat(x, times, axis=-1)


class InstanceNorm(Module):
    """Normalise each feature of each example over space.

    Ulyanov, Vedaldi & Lempitsky, "Instance normalization", https://arxiv.org/abs/1607.08022.

    Arguments as :class:`LayerNorm`, but the statistics are taken over all axes except the first, the batch, and
    ``feature_axes``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.InstanceNorm(1, rngs=nnx.Rngs(0))(jnp.array([[[1.], [3.]], [[4.], [8.]]])).round(2).ravel()
    Array([-1.,  1., -1.,  1.], dtype=float32)
    """

    scale: Param[Array] | None
    bias: Param[Array] | None

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Callable[..., Any] = promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        shape = (num_features,)
        self.scale = Param(drawn(scale_init, rngs, shape, param_dtype), **scale_metadata) if use_scale else None
        self.bias = Param(drawn(bias_init, rngs, shape, param_dtype), **bias_metadata) if use_bias else None
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.feature_axes = frozen(feature_axes)
        self.axis_name = axis_name
        self.axis_index_groups = frozen(axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    _nnx_sizes = _sizes

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalise ``x`` of shape ``[batch, *spatial, num_features]``; see :meth:`LayerNorm.__call__`.

        Raises:
          LayerInputError: if the feature axis has another size.
          ValueError: if ``feature_axes`` includes the first axis.
        """
        scale, bias = value_or_none(self.scale), value_or_none(self.bias)
        feature_axes = _feature_axes(self, x, self.feature_axes, scale=scale, bias=bias)
        if 0 in feature_axes:
            raise UsageError(
                "The channel axes cannot include the leading dimension as this is assumed to be the batch axis."
            )
        axes = tuple([a for a in range(1, x.ndim) if a not in feature_axes])
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        mean, var, valid = moments(x, mask, axes=axes, **_moments_settings(self))
        return normalize(x, mean, var, valid, scale, bias, axes=axes, feature_axes=feature_axes, epsilon=self.epsilon)
