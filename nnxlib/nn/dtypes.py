"""What a layer does with its inputs before it computes: bring them to one dtype, and check their shapes.

A layer computes in its ``dtype`` if it was given one, else in the smallest floating dtype that holds its inputs and its
parameters (JAX's promotion rules); parameters are stored in ``param_dtype`` whatever the layer computes in.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.calls import current_listener
from ..core.errors import LayerInputError, UsageError, describe, describe_nested, format_path
from ..core.finding import locate
from ..core.formulas import step

Dtype = Any  # whatever jnp.dtype takes: 'bfloat16', jnp.bfloat16, np.dtype('float32')
Array = jax.Array


def input_error(layer: Any, takes: str, inputs: Any) -> LayerInputError:
    """Say which layer, with its declared sizes and its path where it can be found, got which input.

    The path is the one of the call, as in the notes on errors; it begins with a variable of the user's code if one
    leads to the layer.
    """
    listener = current_listener()
    called = format_path(path) if listener is not None and (path := listener.path_of(layer)) else ""
    reached = locate(layer, skip=3)
    where = reached if reached and reached.endswith(called) else called
    name = f"{type(layer).__name__} {layer._nnx_sizes()}"
    return LayerInputError(f"{f'{where} ({name})' if where else name} takes {takes}, but got {describe(inputs)}.")


def misfit(name: str, parameter: Array, *declared: int) -> str:
    """What an error adds if a parameter does not have the shape that the layer declared; else nothing."""
    if parameter.shape == declared:
        return ""
    stacked = parameter.ndim > len(declared) and declared == parameter.shape[-len(declared) :]
    hint = ": it is a stack of layers, which nnx.vmap and nnx.scan can call" if stacked else ""
    return f" (its {name} is {describe(parameter)}, not {list(declared)} as declared{hint})"


def broadcast_together(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether arrays of two shapes broadcast to one another."""
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b)))


def canonicalize_dtype(*args: Any, dtype: Dtype | None = None, inexact: bool = True) -> Dtype:
    """Return the dtype that a computation on ``args`` should use.

    Args:
      *args: arrays, scalars or ``None`` (ignored).
      dtype: returned as it is if given.
      inexact: whether the result must be a floating or complex dtype; integers and booleans become float32.

    >>> import jax.numpy as jnp
    >>> from nnxlib.nn.dtypes import canonicalize_dtype
    >>> canonicalize_dtype(jnp.ones(2, jnp.bfloat16), 1.0), canonicalize_dtype(jnp.arange(3), None)
    (dtype(bfloat16), dtype('float32'))

    Raises:
      ValueError: if ``dtype`` is an integer dtype and ``inexact`` is set, or if there is nothing to go by.
    """
    if dtype is None:
        found = jnp.result_type(*[_as_array(x) for x in args if x is not None])
        return jnp.promote_types(jnp.float32, found) if inexact and not is_inexact(found) else found
    if inexact and not is_inexact(jnp.dtype(dtype)):
        raise UsageError(f"Dtype must be inexact (floating or complex): {dtype}")
    return dtype


def promote_dtype(args: Sequence[Any], /, *, dtype: Dtype | None = None, inexact: bool = True) -> tuple[Any, ...]:
    """Bring arrays to one dtype: ``dtype`` if given, else what ``canonicalize_dtype`` finds; ``None`` stays.

    Arrays that have the dtype already are returned as they are.

    >>> import jax.numpy as jnp
    >>> from nnxlib.nn.dtypes import promote_dtype
    >>> x, kernel, bias = promote_dtype((jnp.ones(2, int), jnp.ones(2, jnp.bfloat16), None))
    >>> x.dtype, kernel.dtype, bias
    (dtype(bfloat16), dtype(bfloat16), None)

    Raises:
      ValueError: as :func:`canonicalize_dtype`.
    """
    target = None if dtype is None else _canonical(dtype)
    # In the common case nothing has to be done, and `jnp.asarray` of each array would take ten times as long.
    for x in args:
        if x is not None:
            if not isinstance(x, jax.Array) or x.weak_type or (target is not None and x.dtype != target):
                break
            target = x.dtype
    else:
        if target is not None and (not inexact or is_inexact(target)):
            return tuple(args)
    target = _canonical(canonicalize_dtype(*args, dtype=dtype, inexact=inexact))
    return tuple([None if x is None else convert(x, target) for x in args])


def convert(x: Any, dtype: np.dtype) -> Array:
    """Make an array of ``dtype``; one that has it is returned as it is."""
    if isinstance(x, jax.Array):
        return x if x.dtype == dtype and not x.weak_type else _convert_array(x, dtype)
    return _as_array(x, dtype)


def _as_array(x: Any, dtype: np.dtype | None = None) -> Array:
    try:
        return jnp.asarray(x, dtype)
    except (TypeError, ValueError) as error:
        hint = _NO_VALUES if isinstance(x, jax.ShapeDtypeStruct) else ""
        raise LayerInputError(f"Layers compute with arrays and numbers, but got {describe_nested(x)}{hint}.") from error


_NO_VALUES = """\
 without a value (a jax.ShapeDtypeStruct, as nnx.eval_shape returns it): give the model values with nnx.update, or \
call it in nnx.eval_shape"""


_convert_array = step("new_dtype")(lax.convert_element_type)


@functools.cache
def at_least_float32(dtype: np.dtype) -> np.dtype:
    """The dtype in which a sum of many values of ``dtype`` is computed."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:  # JAX does not promote float8 and float4
        return np.dtype(jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


@functools.cache
def is_inexact(dtype: np.dtype) -> bool:
    """Whether a dtype is floating or complex."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _canonical(dtype: Dtype) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(dtype)
