"""Values: what a Variable does with those that it holds, arrays and other pytrees: store, edit and copy them."""

from __future__ import annotations

import copy as copy_lib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .formulas import copied
from .operators import unwrapped
from .tracing import Tracer, at_top_level


def as_stored(value: Any, metadata: Mapping[str, Any]) -> Any:
    """A value as a Variable with this metadata stores it: in a new :class:`jax.Ref` if ``ref`` is set, else plain."""
    value = value[...] if isinstance(value, jax.Ref) else value
    return jax.new_ref(value) if metadata.get("ref") and not isinstance(value, jax.ShapeDtypeStruct) else value


def with_item(value: Any, index: Any, item: Any) -> Any:
    """A copy of ``value`` after ``value[index] = item``; the copy of a container is shallow."""
    if index is ... and not isinstance(value, jax.Array | np.ndarray):
        return item
    if index is ... and isinstance(value, jax.Array):
        fits = isinstance(item, jax.Array) and jax.typeof(item) == jax.typeof(value)
        return _moved(item if fits else jnp.broadcast_to(jnp.asarray(item, value.dtype), value.shape), value)
    if isinstance(value, jax.Array):
        return value.at[unwrapped(index)].set(item)
    new = copy_lib.copy(value)
    new[unwrapped(index)] = item
    return new


def _moved(new: jax.Array, old: jax.Array) -> jax.Array:
    """An array, where the one is that it replaces; JAX itself may have put that anywhere if it is not committed."""
    if isinstance(old, Tracer) or isinstance(new, Tracer) or not old.committed or new.sharding == old.sharding:
        return new
    return jax.device_put(new, old.sharding) if at_top_level() else new


def all_unshared(values: list[Any]) -> list[Any]:
    """:func:`unshared` of each value."""
    return values if jax.tree_util.all_leaves(values) else list(map(unshared, values))


def unshared(value: Any) -> Any:
    """A value with copies of the dicts and lists in it, so that editing these in place changes one Variable only."""
    kind = type(value)
    if kind is dict:
        return {key: unshared(item) for key, item in value.items()}
    return kind([unshared(item) for item in value]) if kind is list or kind is tuple else value


def deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a value; arrays are copied eight times as fast as by ``copy.deepcopy``."""
    if isinstance(value, jax.Array) and not isinstance(value, Tracer) and id(value) not in memo:
        memo[id(value)] = copied(value)
        memo.setdefault(id(memo), []).append(value)  # keeps it alive, as `deepcopy` does, so that its id is not reused
    return copy_lib.deepcopy(value, memo)
