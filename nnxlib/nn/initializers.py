"""Initializers: functions ``(key, shape, dtype) -> array``, those of :mod:`jax.nn.initializers`.

The constants and the scaled random ones are our own, with the same values, to the last bit. Those of JAX spend most of
their time in Python. Ours draw and scale by steps (see core/formulas.py), which serve any scale, so they are up to five
times as fast; in a trace as well, since all layers of one shape share a trace. What is out of the ordinary, such as a
scale that is an array, is left to JAX; so are normal numbers, since how JAX rounds these depends on its version.

In eager code random numbers are drawn as a vector, and then get their shape. XLA compiles this in 0.15 s of a
processor, whatever the shape; the kernel of a convolution takes up to 2.7 s if it is drawn as it is.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers as jax_initializers
from jax.nn.initializers import Initializer as JaxInitializer
from jax.nn.initializers import constant as constant

from ..core.formulas import as_one, formula, full, multiply, reshape, step
from ..core.layout import keep
from ..core.tracing import is_key, runs_eagerly

Initializer = JaxInitializer | Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])


def _sizes(shape: Any) -> tuple[int, ...]:
    """The sizes in a shape; a number is the shape of a vector, as it is for :func:`jax.numpy.zeros`."""
    try:
        return tuple(shape)
    except TypeError:
        return (operator.index(shape),)


def zeros(key: Any, shape: Any, dtype: Any = jnp.float_, **kwargs: Any) -> jax.Array:
    """Return an array of zeros; the key is not used.

    >>> import nnxlib as nnx
    >>> nnx.initializers.zeros(None, (2,))
    Array([0., 0.], dtype=float32)
    """
    if kwargs:  # such as out_sharding
        return jax_initializers.zeros(key, shape, dtype, **kwargs)
    return full(0, _sizes(shape), jax.dtypes.canonicalize_dtype(dtype))


def ones(key: Any, shape: Any, dtype: Any = jnp.float_, **kwargs: Any) -> jax.Array:
    """Return an array of ones; the key is not used.

    >>> import nnxlib as nnx
    >>> nnx.initializers.ones(None, (2,), 'bfloat16')
    Array([1, 1], dtype=bfloat16)
    """
    if kwargs:
        return jax_initializers.ones(key, shape, dtype, **kwargs)
    return full(1, _sizes(shape), jax.dtypes.canonicalize_dtype(dtype))


def zeros_init() -> Initializer:
    """Return ``zeros``, in the calling style of the other initializers: ``zeros_init()(key, shape, dtype)``."""
    return zeros


def ones_init() -> Initializer:
    """Return ``ones``, in the calling style of the other initializers: ``ones_init()(key, shape, dtype)``."""
    return ones


# --- random numbers with a scale --------------------------------------------------------------------------------------

Axes = int | Sequence[int]
Factors = Sequence[Any] | None  # a scale, and the bounds of what is scaled; None where that is left to JAX


def _drawn_shape(key: Any, shape: tuple[int, ...], eager: bool) -> tuple[int, ...]:
    """The shape in which to draw random numbers: one axis, in eager code, where these are the same ones.

    Threefry makes a number from the key and from its place in the flattened array. In a program for several devices XLA
    would not shard a vector along the axes of the array.
    """
    threefry = jax.random.key_impl(key) == "threefry2x32" if is_key(key) else np.shape(key) == (2,)
    return (math.prod(shape),) if eager and threefry else shape


@step("shape", "dtype", "eager")
def _unscaled_uniform(key: Any, low: Any, high: Any, shape: Any, dtype: Any, eager: bool) -> jax.Array:
    return as_one(jax.random.uniform, key, _drawn_shape(key, shape, eager), dtype, low, high).reshape(shape)


@step("shape", "dtype", "eager")
def _unscaled_truncated(key: Any, lower: Any, upper: Any, shape: Any, dtype: Any, eager: bool) -> jax.Array:
    sizes = _drawn_shape(key, shape, eager)
    return as_one(jax.random.truncated_normal, key, lower, upper, sizes, dtype).reshape(shape)


@formula("shape", "dtype", "eager")
def _uniform(key: Any, scale: Any, low: Any, high: Any, shape: Any, dtype: Any, eager: bool) -> jax.Array:
    return multiply(_unscaled_uniform(key, low, high, shape=shape, dtype=dtype, eager=eager), scale)


@formula("shape", "dtype", "eager")
def _truncated_normal(key: Any, scale: Any, lower: Any, upper: Any, shape: Any, dtype: Any, eager: bool) -> jax.Array:
    return multiply(_unscaled_truncated(key, lower, upper, shape=shape, dtype=dtype, eager=eager), scale)


def _arithmetic(eager: bool) -> ModuleType:
    """What gives the square roots that JAX has here: those of a GPU differ from those of a CPU in the last bit.

    In a program XLA computes them, as it does all constants, on the CPU.
    """
    if not eager or jax.default_backend() == "cpu":
        return np
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return np if getattr(device, "platform", device) == "cpu" else jnp


def _drawn_by(
    draw: Callable[..., Any], factors: Callable[[tuple[int, ...], Any, Any], Factors], of_jax: Any, dtype: Any
) -> Initializer:
    """An initializer that calls ``draw`` where ``of_jax`` gives the same numbers, and elsewhere ``of_jax``."""
    known: dict[Any, Factors] = {}  # not a cached function, which cloudpickle cannot send

    def factors_of(shape: tuple[int, ...], dtype: Any, xp: Any) -> Factors:
        try:
            return known[shape, dtype, xp]
        except KeyError:
            found = factors(shape, dtype, xp) if jnp.issubdtype(dtype, np.floating) else None
            return keep(known, (shape, dtype, xp), found and (np.asarray(found[0], dtype), *found[1:]))

    def init(key: Any, shape: Any, dtype: Any = dtype, **kwargs: Any) -> jax.Array:
        dtype = jax.dtypes.canonicalize_dtype(jnp.float_) if dtype is None else dtype
        if not kwargs and isinstance(shape, tuple | list) and all(type(n) is int and n >= 0 for n in shape):
            sizes, kind = tuple(shape), np.dtype(dtype)
            is_there = kind.itemsize <= 4 or jax.dtypes.canonicalize_dtype(kind) == kind
            eager = runs_eagerly()
            found = factors_of(sizes, kind, _arithmetic(eager)) if is_there else None
            if found is not None:
                return draw(key, *found, shape=sizes, dtype=kind, eager=eager)
        return of_jax(key, shape, dtype, **kwargs)

    init.__qualname__ = of_jax.__qualname__  # which messages show
    return init


def _made_once(make: F, doc: str | None = None) -> F:
    """``make``, with the same initializer each time for the same arguments; ``doc`` describes a function of JAX.

    So models that keep their initializers are of equal structure, and what an initializer knows of shapes is kept.
    """
    known = functools.lru_cache(typed=True)(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Initializer:
        try:
            return known(*args, **kwargs)
        except TypeError:  # an argument without a hash, such as an array; or an error of `make`, which raises it again
            return make(*args, **kwargs)

    made.__module__ = __name__  # where pickle finds it; `make` may be a function of JAX
    made.__doc__ = doc or make.__doc__
    return cast(F, made)


# Not `constant`: 0.0 and -0.0 are equal arguments, but give different initializers.
@_made_once
def normal(stddev: Any = 1e-2, dtype: Any = None) -> Initializer:
    """Return an initializer of normal numbers with mean 0 and the standard deviation ``stddev``.

    >>> import nnxlib as nnx, jax
    >>> print(f"{nnx.initializers.normal(5.0)(jax.random.key(0), (100, 100)).std():.0f}")
    5
    """
    of_jax: Any = jax_initializers.normal(stddev, dtype)

    def init(key: Any, shape: Any, dtype: Any = dtype, **kwargs: Any) -> jax.Array:
        if kwargs or not isinstance(shape, tuple) or len(shape) < 3:  # for a matrix, XLA needs hardly more time
            return of_jax(key, shape, dtype, **kwargs)
        return reshape(of_jax(key, _drawn_shape(key, shape, runs_eagerly()), dtype), shape=shape)

    init.__qualname__ = of_jax.__qualname__
    return init


orthogonal = _made_once(
    jax_initializers.orthogonal,
    """Return an initializer of matrices with orthogonal columns, or rows where these are fewer, of norm ``scale``.

    Saxe, McClelland & Ganguli, "Exact solutions to the nonlinear dynamics of learning", https://arxiv.org/abs/1312.6120.

    Args:
      scale: the norm of a column.
      column_axis: the axis of the shape that counts the columns; all others together are the rows.
      dtype: of the array, where the call gives none.

    >>> import nnxlib as nnx, jax
    >>> q = nnx.initializers.orthogonal()(jax.random.key(0), (3, 2))
    >>> bool(jnp.allclose(q.T @ q, jnp.eye(2), atol=1e-6))
    True
    """,
)
delta_orthogonal = _made_once(
    jax_initializers.delta_orthogonal,
    """Return an initializer of kernels of convolutions that are orthogonal at the centre and zero elsewhere.

    Xiao et al., "Dynamical isometry and a mean field theory of CNNs", https://arxiv.org/abs/1806.05393. The shape is
    ``[*kernel_size, in_features, out_features]``, with one to three spatial axes, and no more features in than out.

    Args:
      scale: the norm of a column.
      column_axis: the axis of the shape that counts the columns.
      dtype: of the array, where the call gives none.

    >>> import nnxlib as nnx, jax
    >>> kernel = nnx.initializers.delta_orthogonal()(jax.random.key(0), (3, 2, 2))
    >>> bool(jnp.allclose(kernel[1] @ kernel[1].T, jnp.eye(2), atol=1e-6)), int(jnp.count_nonzero(kernel))
    (True, 4)
    """,
)


def _given(*values: Any) -> Callable[[Any, Any, Any], Factors]:
    """Factors that are the same for all shapes and dtypes."""
    known = all(isinstance(x, int | float) for x in values)
    return lambda shape, dtype, xp: values if known else None


@_made_once
def uniform(scale: Any = 1e-2, dtype: Any = None) -> Initializer:
    """Return an initializer of numbers between 0 and ``scale``; see :func:`jax.nn.initializers.uniform`.

    >>> import nnxlib as nnx, jax
    >>> print(f"{nnx.initializers.uniform(5.0)(jax.random.key(0), (100, 100)).max():.1f}")
    5.0
    """
    return _drawn_by(_uniform, _given(scale, 0.0, 1.0), jax_initializers.uniform(scale), dtype)


@_made_once
def truncated_normal(stddev: Any = 1e-2, dtype: Any = None, lower: Any = -2.0, upper: Any = 2.0) -> Initializer:
    """Return an initializer of normal numbers between bounds; see :func:`jax.nn.initializers.truncated_normal`.

    Args:
      stddev: the standard deviation before truncation.
      dtype: of the array, where the call gives none.
      lower: the lower bound, in units of ``stddev``.
      upper: the upper bound, in the same units.

    >>> import nnxlib as nnx, jax
    >>> print(f"{nnx.initializers.truncated_normal(5.0)(jax.random.key(0), (100, 100)).max():.1f}")
    10.0
    """
    of_jax = jax_initializers.truncated_normal(stddev, lower=lower, upper=upper)
    return _drawn_by(_truncated_normal, _given(stddev, lower, upper), of_jax, dtype)


@_made_once
def variance_scaling(
    scale: Any,
    mode: str,
    distribution: str,
    in_axis: Axes = -2,
    out_axis: Axes = -1,
    batch_axis: Axes = (),
    dtype: Any = None,
) -> Initializer:
    """Return an initializer whose variance is ``scale / fan``; see :func:`jax.nn.initializers.variance_scaling`.

    Args:
      scale: a number; 1 keeps the variance of what a linear map is applied to.
      mode: what the fan is: ``'fan_in'``, the number of inputs of an output; ``'fan_out'``, the number of outputs of an
        input; ``'fan_avg'``, the mean of the two; or another one that JAX knows.
      distribution: ``'truncated_normal'``, ``'uniform'`` or ``'normal'``.
      in_axis: the axis, or axes, of the shape that count the inputs.
      out_axis: the axis, or axes, that count the outputs. All others multiply both, as the window of a convolution.
      batch_axis: the axis, or axes, that count independent arrays.
      dtype: of the array, where the call gives none.

    >>> import nnxlib as nnx, jax
    >>> init = nnx.initializers.variance_scaling(1.0, 'fan_in', 'normal')
    >>> print(f"{init(jax.random.key(0), (100, 50)).std():.2f}")
    0.10
    """
    make: Callable[..., Any] = jax_initializers.variance_scaling  # type checkers accept only some strings as modes
    given = {} if dtype is None else {"dtype": dtype}
    of_jax = make(scale, mode, distribution, in_axis, out_axis, batch_axis, **given)
    if mode not in _FANS or distribution not in _OF_VARIANCE or not isinstance(scale, int | float):
        return of_jax
    draw, of_variance = _OF_VARIANCE[distribution]

    def factors(shape: tuple[int, ...], dtype: Any, xp: Any) -> Factors:
        if len(shape) < 2:
            return None
        sizes = [math.prod([shape[i] for i in _axes(axis)]) for axis in (in_axis, out_axis, batch_axis)]
        field = math.prod(shape) / math.prod(sizes) if all(sizes) else 0
        fan = _FANS[mode](sizes[0] * field, sizes[1] * field)
        return of_variance(xp.asarray(scale / fan if fan else 0, dtype), xp)

    return _drawn_by(draw, factors, of_jax, dtype)


def _axes(axis: Axes) -> Sequence[int]:
    return (axis,) if isinstance(axis, int) else axis


_FANS: dict[str, Callable[[float, float], float]] = {
    "fan_in": lambda fan_in, fan_out: fan_in,
    "fan_out": lambda fan_in, fan_out: fan_out,
    "fan_avg": lambda fan_in, fan_out: (fan_in + fan_out) / 2,
}

_STDDEV = 0.87962566103423978  # of normal numbers that are truncated at -2 and 2

# How to draw, and the factors for a given variance; they are computed in its dtype.
_OF_VARIANCE: dict[str, tuple[Callable[..., Any], Any]] = {
    "truncated_normal": (_truncated_normal, lambda v, xp: (xp.sqrt(v) / xp.asarray(_STDDEV, v.dtype), -2, 2)),
    "uniform": (_uniform, lambda v, xp: (xp.sqrt(3 * v), -1, 1.0)),
}


def _scaled(name: str, scale: float, mode: str, distribution: str, source: str) -> Callable[..., Initializer]:
    def make(in_axis: Axes = -2, out_axis: Axes = -1, batch_axis: Axes = (), dtype: Any = None) -> Initializer:
        return variance_scaling(scale, mode, distribution, in_axis, out_axis, batch_axis, dtype)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"""Return ``variance_scaling({scale}, {mode!r}, {distribution!r})``.

    {source}

    >>> import nnxlib as nnx, jax
    >>> array = nnx.initializers.{name}()(jax.random.key(0), (200, 600))
    >>> print(f"{{array.var() * 400:.1f}}")
    {scale * 400 / {"fan_in": 200, "fan_avg": 400}[mode]:.1f}
    """
    return make


_GLOROT = 'Glorot & Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010.'
_HE = 'He et al., "Delving deep into rectifiers", https://arxiv.org/abs/1502.01852.'
_LECUN = 'LeCun et al., "Efficient backprop", in Neural networks: tricks of the trade, 1998.'

glorot_normal = _scaled("glorot_normal", 1.0, "fan_avg", "truncated_normal", _GLOROT)
glorot_uniform = _scaled("glorot_uniform", 1.0, "fan_avg", "uniform", _GLOROT)
he_normal = _scaled("he_normal", 2.0, "fan_in", "truncated_normal", _HE)
he_uniform = _scaled("he_uniform", 2.0, "fan_in", "uniform", _HE)
lecun_normal = _scaled("lecun_normal", 1.0, "fan_in", "truncated_normal", _LECUN)
lecun_uniform = _scaled("lecun_uniform", 1.0, "fan_in", "uniform", _LECUN)
kaiming_normal, kaiming_uniform = he_normal, he_uniform
xavier_normal, xavier_uniform = glorot_normal, glorot_uniform
