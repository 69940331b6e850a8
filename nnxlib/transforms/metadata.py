"""``transform_metadata``: a name for the axis that a transform around a function stacks; see axes.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.filters import Filter
from ..core.missing import MISSING
from .axes import PARTITION_NAME, AxisName, axis_name_in
from .classes import lifts_classes
from .prefixes import StateAxes
from .scan import Carry
from .vmap import mapped


@lifts_classes()
def transform_metadata(
    f: Callable = MISSING, *, in_axes: Any = 0, out_axes: Any = 0, partition: str | None = None
) -> Callable:
    """Return ``f`` with a name for the axis that a transform around it stacks.

    ``nnx.vmap`` and ``nnx.scan`` move the names themselves; this gives the new axis a name where they were not told
    one, or under a raw JAX transform.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      in_axes: the axes of the transform around, as for :func:`vmap` and :func:`scan`: their names are dropped on the
        way in, where they still are. What is carried keeps its names.
      out_axes: the same for the output: new Variables, and those whose metadata changed, get the name there.
      partition: the name.

    >>> import nnxlib as nnx, jax
    >>> init = nnx.with_partitioning(nnx.initializers.ones, ('in', 'out'))
    >>> @nnx.vmap
    ... @nnx.transform_metadata(partition='layers')
    ... def make(key):
    ...   return nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(key))
    >>> make(jax.random.split(jax.random.key(0), 5)).kernel.sharding_names
    ('layers', 'in', 'out')
    """
    name = AxisName(partition)
    return mapped(f, lambda pure, crossing: pure, in_axes, out_axes, "transform_metadata", name, others=(Carry,))


@lifts_classes()
def add_metadata_axis(
    f: Callable = MISSING,
    *,
    variable_axes: Mapping[Filter, int],
    metadata_params: Mapping[str, Any] = {PARTITION_NAME: None},
) -> Callable:
    """Return ``f`` with :func:`transform_metadata` for some kinds of Variables; Linen's transform of this name.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      variable_axes: from filters to the axis that a transform around stacks.
      metadata_params: ``{nnx.PARTITION_NAME: name}`` of that axis.

    >>> import nnxlib as nnx, jax
    >>> init = nnx.with_partitioning(nnx.initializers.ones, ('in', 'out'))
    >>> make = nnx.add_metadata_axis(
    ...   lambda key: nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(key)),
    ...   variable_axes={nnx.Param: 0}, metadata_params={nnx.PARTITION_NAME: 'layers'})
    >>> make(jax.random.key(0)).kernel.sharding_names
    ('layers', 'in', 'out')
    """
    axes = StateAxes({**variable_axes, ...: None})
    return mapped(f, lambda pure, crossing: pure, axes, axes, "add_metadata_axis", axis_name_in(metadata_params))
