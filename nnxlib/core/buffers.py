"""Notes on errors about donated arrays, and about arrays on other devices or sharded otherwise, which name the arrays.

JAX only gives the shape of an array that was deleted or is sharded otherwise, and the number in a flat list of one that
is donated and passed once more; of arrays on different devices it names one of each. Here the paths of all arguments
are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .errors import format_path, listed
from .graph import Packed
from .tracing import Tracer


def note_buffers(error: RuntimeError | ValueError, arguments: Callable[[], Packed]) -> None:
    """Note which arrays an earlier donation has deleted, are passed twice, on other devices or sharded otherwise."""
    text = str(error)
    with contextlib.suppress(Exception):  # an explanation that fails must not hide the error
        if "donate" in text or "deleted" in text:
            _note_donated(error, _arrays(arguments()))
        elif text.startswith("Received incompatible devices"):
            _note_devices(error, _arrays(arguments()))
        elif text.startswith("Sharding passed to jit does not match"):
            _note_shardings(error, _arrays(arguments()))


def _arrays(packed: Packed) -> list[tuple[str, jax.Array]]:
    leaves = zip(packed.layout.leaf_paths, packed.leaves, strict=True)
    return [(format_path(path), x) for path, x in leaves if isinstance(x, jax.Array) and not isinstance(x, Tracer)]


def _note_devices(error: Exception, arrays: list[tuple[str, jax.Array]]) -> None:
    """Name those that are on fewer devices than others; where none was asked for, JAX moves the array itself."""
    placed = [(name, len(x.sharding.device_set)) for name, x in arrays if x.committed]
    most = max(number for _, number in placed)
    if few := [f"{name}: {number} of {most} devices" for name, number in placed if number < most]:
        error.add_note(listed(_DEVICES, few, _PLACE))


def _note_shardings(error: Exception, arrays: list[tuple[str, jax.Array]]) -> None:
    """Name those with the sharding in the message."""
    if sharded := [name for name, x in arrays if f"\narg sharding: {x.sharding} for" in str(error)]:
        error.add_note(listed(_SHARDED, sharded, _AS_THEY_ARE))


def _note_donated(error: Exception, arrays: list[tuple[str, jax.Array]]) -> None:
    if deleted := [name for name, x in arrays if x.is_deleted()]:
        error.add_note(listed(_DELETED, deleted, _COPY))
        return
    names: dict[Any, list[str]] = {}
    for name, x in arrays:
        names.setdefault(_buffer(x), []).append(name)
    if twice := [" and ".join(same) for same in names.values() if len(same) > 1]:
        error.add_note(listed(_TWICE, twice, _COPY))


def _buffer(x: jax.Array) -> int:
    """Equal for arrays that share their memory, as far as JAX tells."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or not x.addressable_shards:
        return id(x)
    return x.addressable_shards[0].data.unsafe_buffer_pointer()


_DELETED = """\
These arrays are gone: an earlier call, to which they were donated (donate_argnums) as a part of another object, has \
reused their memory:"""

_TWICE = """\
These are one array each. Where it is donated (donate_argnums), its memory is reused, so it can neither be used nor \
donated under another path:"""

_DEVICES = "These arrays are on fewer devices than the others, and were placed there:"

_SHARDED = "These arrays have that sharding, and are not to be moved, since they were placed there:"

_AS_THEY_ARE = """\
Leave their entry in in_shardings None, which takes them as they are, or place them as it says: nnx.update(model, \
jax.device_put(nnx.state(model), sharding))."""

_PLACE = """\
A call leaves what it only reads on the device where it was made, and a checkpoint puts it back there. Place the whole \
model (and likewise its optimizer): nnx.update(model, jax.device_put(nnx.state(model), jax.NamedSharding(mesh, \
jax.P())))."""

_COPY = """\
nnx.split, nnx.state and nnx.merge share the arrays of the model that they are given. nnx.clone(model) copies them; \
for a State, jax.tree.map(jnp.copy, state)."""
