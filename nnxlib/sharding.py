"""Sharding: from the names of axes to PartitionSpecs, shardings and sharded shapes of a whole model.

A Variable names the axes of its value (``out_sharding=``, ``nnx.with_partitioning``). The functions here read the names
of all Variables of a model, a State or any pytree, translated by the :func:`logical_axis_rules` around the call, and
give a copy in which each value is a PartitionSpec, a sharding, or a shape with its sharding. Metadata and structure
stay, so the copy is the prefix that ``jax.lax.with_sharding_constraint``, ``jax.device_put`` or ``in_shardings=``
expects. core/placement.py tells when Variables are sharded by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .core.errors import ArgumentError, PlacementError, describe, format_path, listed
from .core.graphdef import GraphDef
from .core.metadata import with_partitioning as with_partitioning
from .core.ops import map as map_leaves
from .core.ops import split
from .core.placement import Rules as Rules
from .core.placement import fitted, mesh_axes_in, problem_with, sharded, spec_of
from .core.placement import logical_axis_rules as logical_axis_rules
from .core.placement import use_eager_sharding as use_eager_sharding
from .core.placement import using_eager_sharding as using_eager_sharding
from .core.state import State
from .core.tracing import boundary
from .core.variables import Variable
from .transforms.abstract import eval_shape
from .transforms.axes import PARTITION_NAME as PARTITION_NAME
from .transforms.axes import axis_name_in

A = TypeVar("A")


def get_var_pspec(variable: Variable) -> PartitionSpec | None:
    """Return the PartitionSpec of one Variable.

    Without names it is ``PartitionSpec()`` for what has a shape, and None for other values, such as pytrees.

    >>> import nnxlib as nnx
    >>> v = nnx.Param(jnp.ones((2, 3)), out_sharding=(None, 'model'))
    >>> nnx.spmd.get_var_pspec(v) == jax.sharding.PartitionSpec(None, 'model')
    True
    """
    spec, value = spec_of(variable.get_metadata()), variable.get_raw_value()
    if spec is None:
        return _replicated(value)
    return fitted(spec, value.ndim) if hasattr(value, "ndim") else spec


def _replicated(x: Any) -> PartitionSpec | None:
    return PartitionSpec() if hasattr(x, "shape") else None


@boundary
def get_partition_spec(tree: A) -> A:
    """Return a copy of a tree with a PartitionSpec in place of each array, and None in place of other leaves.

    Args:
      tree: a State, a Module, or any pytree of Variables and arrays; without names an array is not sharded.

    >>> import nnxlib as nnx
    >>> init = nnx.with_partitioning(nnx.initializers.ones, (None, 'model'))
    >>> model = nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(0))
    >>> specs = nnx.get_partition_spec(nnx.state(model))
    >>> tuple(specs.kernel.value), tuple(specs.bias.value)
    ((None, 'model'), ())
    """
    return map_leaves(lambda path, x: get_var_pspec(x) if isinstance(x, Variable) else _replicated(x), tree)


@boundary
def get_named_sharding(tree: A, mesh: Mesh) -> A:
    """Return a copy of a tree with a NamedSharding in place of each array, and None in place of other leaves.

    Args:
      tree: a State, a Module, or any pytree of Variables and arrays; without names an array is replicated.
      mesh: the mesh; one in the metadata of a Variable is not looked at.

    >>> import nnxlib as nnx
    >>> v = nnx.Param(jnp.ones((2, 3)), out_sharding=(None, 'model'))
    >>> nnx.get_named_sharding({'kernel': v}, jax.make_mesh((1,), ('model',)))['kernel'].value.spec[1]
    'model'

    Raises:
      ArgumentError: if it is no mesh.
      PlacementError: if the mesh has no axis of a name, or would be used twice for one array; lists the paths.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ArgumentError(f"get_named_sharding takes a mesh, such as of jax.make_mesh, but got {describe(mesh)}.")
    problems: list[str] = []

    def shard(path: tuple, x: Any) -> Any:
        spec = get_var_pspec(x) if isinstance(x, Variable) else _replicated(x)
        found = [problem for s in jax.tree.leaves(spec) if (problem := _problem(s, mesh)) is not None]
        problems.extend(f"{format_path(path)}: {problem}" for problem in found)
        return None if found else jax.tree.map(lambda s: NamedSharding(mesh, s), spec)

    shardings = map_leaves(shard, tree)
    if problems:
        raise PlacementError(listed(_DOES_NOT_FIT.format(axes=dict(mesh.shape)), problems, _LOGICAL_NAMES))
    return shardings


def _problem(spec: PartitionSpec, mesh: Mesh) -> str | None:
    unknown = [repr(name) for name in mesh_axes_in(spec) if name not in mesh.axis_names]
    return f"no axis {', '.join(unknown)}" if unknown else problem_with(spec)


_DOES_NOT_FIT = "The names of the axes of these Variables do not fit the mesh {axes}:"
_LOGICAL_NAMES = (
    "If they are logical names, say what they stand for: with nnx.logical_axis_rules([(name, mesh_axis_or_None), ...])."
)


@boundary
def as_abstract(tree: A) -> A:
    """Return a copy of a tree whose shapes (``jax.ShapeDtypeStruct``) have the sharding that their Variables name.

    It is what a checkpoint is restored into. Concrete arrays, shapes that have a sharding, and Variables whose names no
    mesh at hand knows, are left as they are.

    Args:
      tree: a Module, a State or a pytree of Variables, such as :func:`eval_shape` returns.

    >>> import nnxlib as nnx
    >>> make = lambda: nnx.Param(jnp.ones((2, 3)), out_sharding=(None, 'model'))
    >>> with nnx.use_eager_sharding(False):
    ...   shape = nnx.eval_shape(make)
    >>> with jax.set_mesh(jax.make_mesh((1,), ('model',))):
    ...   nnx.as_abstract(shape).value.sharding.spec[1]
    'model'
    """
    return map_leaves(lambda path, x: _abstract(x) if isinstance(x, Variable) else x, tree)


def _abstract(variable: Variable) -> Any:
    value: Any = variable.get_raw_value()
    is_shape = isinstance(value, jax.ShapeDtypeStruct)
    return sharded(value, variable.get_metadata(), type(variable)) if is_shape else value


abstract_with_sharding = as_abstract


@boundary
def get_abstract_model(init_fn: Callable[[], A], mesh: Mesh) -> tuple[GraphDef[A], State]:
    """Return the GraphDef and the State of a model that is not computed: shapes with shardings.

    Args:
      init_fn: makes the model.
      mesh: the mesh of the shardings; Variables without names are replicated.

    >>> import nnxlib as nnx
    >>> mesh = jax.make_mesh((1,), ('model',))
    >>> graphdef, state = nnx.get_abstract_model(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), mesh)
    >>> state.kernel.shape, state.kernel.sharding.mesh == mesh
    ((2, 3), True)

    Raises:
      PlacementError: if the mesh has no axis of a name.
    """
    with use_eager_sharding(False):
        graphdef, state = split(eval_shape(init_fn))
    shardings = get_named_sharding(state, mesh)
    return graphdef, jax.tree.map(lambda x, sharding: x.update(sharding=sharding), state, shardings)


# --- axes that transforms stack and strip, by hand ------------------------------------------------------------------


def add_axis(tree: A, index: int, transform_metadata: Mapping[str, Any]) -> A:
    """Name a new axis of all Variables in a tree, in place: ``transform_metadata={nnx.PARTITION_NAME: name}``.

    >>> import nnxlib as nnx
    >>> v = nnx.Param(jnp.ones((2, 3)), out_sharding=('in', 'out'))
    >>> nnx.spmd.add_axis([v], 0, {nnx.PARTITION_NAME: 'layers'})[0].sharding_names
    ('layers', 'in', 'out')
    """
    return _moved(axis_name_in(transform_metadata).added_to, tree, index)


def remove_axis(tree: A, index: int, transform_metadata: Mapping[str, Any]) -> A:
    """Drop the name of an axis of all Variables in a tree, in place; the inverse of ``add_axis``.

    >>> import nnxlib as nnx
    >>> v = nnx.Param(jnp.ones(3), out_sharding=('layers', 'out'))
    >>> nnx.spmd.remove_axis([v], 0, {nnx.PARTITION_NAME: 'layers'})[0].sharding_names
    ('out',)
    """
    return _moved(axis_name_in(transform_metadata).removed_from, tree, index)


def _moved(move: Callable[[Variable, int], None], tree: A, index: int) -> A:
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Variable)):
        if isinstance(x, Variable):
            move(x, index)
    return tree
