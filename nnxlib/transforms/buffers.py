"""Notes on errors about donated arrays, which name the arrays.

JAX only gives the shape of an array that was deleted, and the number in a flat list of one that is donated twice. Here
the paths of the arguments are known.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import format_path, listed
from ..core.graph import pack
from ..core.tracing import Tracer
from .lift import Arguments


def note_buffers(error: RuntimeError, arguments: Arguments) -> None:
    """Note which arrays were deleted by an earlier donation, or which are the same array, donated twice."""
    text = str(error)
    if "donate the same buffer twice" not in text and "deleted" not in text:
        return
    with contextlib.suppress(Exception):  # an explanation that fails must not hide the error
        _note_arrays(error, arguments)


def _note_arrays(error: RuntimeError, arguments: Arguments) -> None:
    packed = pack(arguments)
    leaves = zip(packed.layout.leaf_paths, packed.leaves, strict=True)
    arrays = [(format_path(path), x) for path, x in leaves if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
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

_TWICE = "These are one array each, and are to be donated (donate_argnums); memory can be reused only once:"

_COPY = """\
nnx.split, nnx.state and nnx.merge share the arrays of the model that they are given. nnx.clone(model) copies them; \
for a State, jax.tree.map(jnp.copy, state)."""
