"""What layers share: default initializers, drawing parameters, metadata, immutable settings, biases, a message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core.errors import ArgumentError, UsageError, accepts, describe
from ..core.formulas import broadcasts, step
from ..core.metadata import VariableMetadata
from ..core.rngs import Rngs, RngStream
from ..core.variables import Param
from . import initializers
from .dtypes import Array

default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros

Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})


def key_of(rngs: Rngs) -> Array:
    """The next key of the stream ``params``.

    Raises:
      TypeError: if a seed, a key or nothing was given in place of Rngs.
    """
    if not (isinstance(rngs, Rngs) or hasattr(rngs, "params")):
        raise ArgumentError(
            f"rngs has to be nnx.Rngs, from which a layer draws its parameters, but got {describe(rngs)}. Write "
            "rngs=nnx.Rngs(seed), or nnx.Rngs(key) for a key of jax.random."
        )
    return rngs.params()


def next_key(rngs: Any, name: str) -> Array:
    """The next key of a stream, or of the one with this name in Rngs; a key is returned as it is.

    Raises:
      TypeError: for anything else.
    """
    stream = rngs[name] if isinstance(rngs, Rngs) else rngs
    if isinstance(stream, RngStream):
        return stream()
    if not hasattr(stream, "dtype"):
        raise ArgumentError(f"rngs has to be an Rngs, a stream or a key, but got {describe(rngs)}: nnx.Rngs(seed).")
    return stream


def drawn(init: Any, rngs: Rngs, shape: Sequence[int], dtype: Any) -> Any:
    """What an initializer gives for a parameter, with the next key of the stream ``params``.

    Raises:
      TypeError: if ``init`` is not an initializer, such as a function that makes one, or the shape is impossible.
      ValueError: if the initializer fails for a dtype that is not floating.
    """
    key = key_of(rngs)
    if not callable(init):
        hint = "For given values write lambda key, shape, dtype: values."
        raise ArgumentError(_NO_INITIALIZER.format(shape=shape, found=describe(init), hint=hint))
    try:
        value = init(key, shape, dtype)
    except Exception as error:  # for a negative size XLA raises one of its own
        problem = _problem(init, shape, dtype)
        if problem is not None:
            raise problem from (error if isinstance(problem, UsageError) else None)
        if isinstance(error, ValueError):  # as by one that scales with the number of inputs, for a bias, with one axis
            error.add_note(f"An initializer raised this for a parameter of shape {tuple(shape)}.")
        if not isinstance(error, TypeError) or accepts(init, key, shape, dtype):
            raise
    else:
        if not isinstance(value.raw_value if isinstance(value, VariableMetadata) else value, FunctionType):
            return value
    name = getattr(init, "__name__", describe(init))
    hint = f"If {name} makes one, write {name}()."
    raise ArgumentError(_NO_INITIALIZER.format(shape=shape, found=f"the function {name}", hint=hint))


def _problem(init: Any, shape: Sequence[int], dtype: Any) -> Exception | None:
    """Why no parameter of this shape and dtype can be made; None if that is not known."""
    if sizes := [n for n in shape if not isinstance(n, int | np.integer) and not hasattr(n, "dtype")]:
        message = _NO_SIZE.format(shape=tuple(shape), size=sizes[0], kind=type(sizes[0]).__name__)
        return ArgumentError(message + _QUOTIENT if isinstance(sizes[0], float) else message)
    if any(isinstance(n, int | np.integer) and n < 0 for n in shape):
        return ArgumentError(f"A parameter cannot have the shape {tuple(shape)}: a size is negative.")
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        return ArgumentError(f"param_dtype has to be a dtype, such as jnp.bfloat16 or 'bfloat16', but got {dtype!r}.")
    if not jnp.issubdtype(found, jnp.inexact):
        name = getattr(init, "__qualname__", describe(init)).partition(".")[0]
        return UsageError(
            f"The initializer {name} of a parameter of shape {tuple(shape)} fails for param_dtype={found}: most draw "
            "floating numbers. Parameters are floating, and dtype= says what to compute in."
        )
    return None


def check_sizes(**sizes: Any) -> None:
    """Check the sizes with which a layer computes before it draws parameters; fractions are left to what follows.

    Raises:
      TypeError: naming the one that is no number.
    """
    for name, size in sizes.items():
        if not isinstance(size, int | float | np.number) and not hasattr(size, "dtype"):
            raise ArgumentError(f"{name} is an integer, but got {size!r}, which is a {type(size).__name__}.")


def is_size(x: Any) -> bool:
    """Whether this is a positive integer, which may be symbolic."""
    try:
        return not isinstance(x, float | np.floating) and bool(x > 0)
    except (TypeError, ValueError):  # of text and None, and of an array of several
        return False


_NO_SIZE = "A parameter cannot have the shape {shape}: sizes are integers, but {size} is a {kind}."
_QUOTIENT = " A quotient of sizes is an integer if it is written d // 2."
_NO_INITIALIZER = """\
A parameter of shape {shape} needs an initializer, a function (key, shape, dtype) -> array, but {found} is none. \
{hint}"""


def value_or_none(param: Param[Array] | None) -> Array | None:
    """The value of a parameter, None if the layer has none."""
    return None if param is None else param[...]


@step()
def add_bias(y: Array, bias: Array) -> Array:
    """Add a bias to the last axes.

    Raises:
      ValueError: if it does not broadcast to them: one that was left as it was when the kernel was replaced.
    """
    if not broadcasts(bias.shape, getattr(y, "shape", bias.shape)):  # a quantiser may have an object of its own
        raise UsageError(f"The bias {describe(bias)} does not fit the output {describe(y)} of its layer.")
    return y + aligned(bias, y.ndim)


def aligned(x: Array, ndim: int) -> Array:
    """Give an array leading axes of size 1; done by hand, since a user may have made rank promotion an error."""
    return jnp.reshape(x, (1,) * (ndim - x.ndim) + x.shape)


def as_tuple(x: int | Sequence[int]) -> tuple[int, ...]:
    """A size or an axis, or several, as a tuple."""
    return (x,) if isinstance(x, int | float | np.number) else tuple(x)  # a float is refused where it is used


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None: a function of the user's may know no others."""
    return {name: option for name, option in options.items() if option is not None}


def frozen(x: Any) -> Any:
    """A setting with lists made tuples, and dicts immutable: a list or dict as an attribute would be a node."""
    if isinstance(x, Mapping):
        return FrozenDict({key: frozen(value) for key, value in x.items()}) if x else _EMPTY
    return tuple([frozen(item) for item in x]) if isinstance(x, list | tuple) else x


class FrozenDict(Mapping):
    """An immutable mapping of hashable values.

    >>> sizes = FrozenDict({0: 2})
    >>> sizes[0], sizes == {0: 2}, hash(sizes) == hash(FrozenDict({0: 2}))
    (2, True, True)
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[Any, Any]):
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


_EMPTY = FrozenDict({})  # one for all layers, which are then described faster

NO_MODE = """\
No `{0}` argument was provided to {1}. Consider one of the following options:

1. Pass `{0}` to the constructor: nnx.{1}(..., {0}=False)
2. Pass it to the call: layer(x, {0}=False)
3. Set it on the whole model: model.train() or model.eval()"""
