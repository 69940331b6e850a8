"""``eval_shape``: run a function of Modules on shapes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..core.graph import Packed, build, commit, count_leaves, pack, value_of
from ..core.ops import iter_graph
from ..core.placement import placed, using_eager_sharding
from ..core.tracing import boundary
from ..core.variables import Variable
from .lift import Arguments, Crossing, resolve


@boundary
def eval_shape(f: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call ``f`` on abstract arrays; the output has ``jax.ShapeDtypeStruct`` in place of arrays.

    Nothing is computed and no live object is changed: Modules in the output are new ones, also those that were passed
    in. A Module made by ``f`` costs no memory, and is what a checkpoint is restored into.

    Args:
      f: a function, a Module class, a callable Module, a bound method or a partial.
      *args: arrays, ``jax.ShapeDtypeStruct``, and Modules with either.
      **kwargs: the same.

    >>> import nnxlib as nnx
    >>> abstract = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> abstract.kernel.value
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    function, bound, bound_kwargs = resolve(f)
    out = eval_packed(function, pack(Arguments((*bound, *args), {**bound_kwargs, **kwargs})))
    if using_eager_sharding():  # JAX forgets the sharding that a shape was constrained to
        for _, x in iter_graph(out):
            if isinstance(x, Variable) and isinstance(x.get_raw_value(), jax.ShapeDtypeStruct):
                x.set_raw_value(placed(x.get_raw_value(), x.get_metadata(), type(x)))
    return out


def eval_packed(f: Callable, packed: Packed) -> Any:
    """:func:`eval_shape` for arguments that have been packed."""
    (leaves,), outcome = jax.eval_shape(Crossing(packed.layout).pure(f), packed.leaves)
    root = outcome.delta.root
    if not outcome.returns_objects:
        return value_of(root, (), iter(leaves[len(leaves) - count_leaves(root) :]))
    shapes = jax.eval_shape(lambda leaves: leaves, packed.leaves) if packed.leaves else []
    _, shells = build(packed.layout, shapes)
    return commit(packed.layout, outcome.delta, leaves, shells)
