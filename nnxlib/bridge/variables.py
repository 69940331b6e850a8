"""One variable, written in two ways: a Variable here, a value in a collection there, boxed if it has metadata.

=====================================  ==============================================================
here                                   there
=====================================  ==============================================================
the type of a Variable                 the name of its collection, by the registry of names
the path of a Variable                 its path in the collection
its value                              the value, bare
its value and metadata                 the value in a *box*, an ``AxisMetadata``: :class:`NNXMeta`,
                                       or the Linen box that it came in (metadata ``linen_meta_type``)
=====================================  ==============================================================

Linen allows one path in two collections; a Module has one attribute of a name. So that is refused, and the error names
both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax.core import meta

from .. import sharding
from ..core import errors
from ..core.errors import Path
from ..core.making import make_variable
from ..core.metadata import NO_METADATA, Metadata, as_hooks, delete_name, insert_name
from ..core.metadata import with_partitioning as nnx_with_partitioning
from ..core.static import Const
from ..core.traversals import flatten_mapping, path_key, unflatten_mapping
from ..core.variable_names import variable_name_from_type, variable_type_from_name
from ..core.variables import Variable
from ..transforms.axes import axis_name_in

# The fields of Linen's boxes under the names that the metadata of a Variable has for them.
_METADATA_OF_FIELD = {"names": "out_sharding", "rules": "sharding_rules"}
_FIELD_OF_METADATA = {name: field for field, name in _METADATA_OF_FIELD.items()}
_OF_NO_ACCOUNT = {"eager_sharding", "hijax", "ref"}  # how a Variable was made, not what it means


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class NNXMeta(meta.AxisMetadata):
    """A Linen box with the type and the metadata of a Variable.

    >>> box = nnx.bridge.NNXMeta(nnx.Param, jnp.ones((2, 3)), {'out_sharding': ('in', 'out')})
    >>> box.unbox().shape, box.add_axis(0, {nnx.PARTITION_NAME: 'layers'}).metadata
    ((2, 3), {'out_sharding': ('layers', 'in', 'out')})
    """

    var_type: type[Variable]
    value: Any
    metadata: Mapping[str, Any]

    def replace(self, **changes: Any) -> NNXMeta:
        """Return a box with other fields."""
        return dataclasses.replace(self, **changes)

    def unbox(self) -> Any:
        """Return the bare value."""
        return self.value

    def replace_boxed(self, val: Any) -> NNXMeta:
        """Return a box of the same kind around another value."""
        return self.replace(value=val)

    def to_nnx_variable(self) -> Variable:
        """Return the Variable that this is."""
        return self.var_type(self.value, **self.metadata)

    def get_partition_spec(self) -> jax.sharding.PartitionSpec:
        """Return the PartitionSpec that the names of the axes and the rules give."""
        return sharding.get_partition_spec(self._variable()).get_raw_value()

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> NNXMeta:
        """Name the axis along which a Linen transform stacks the value, and run the ``on_add_axis`` hooks."""
        return self._with_axes(lambda v, key, name: insert_name(v, key, index, name), "on_add_axis", index, params)

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> NNXMeta:
        """Drop the name of the axis along which a Linen transform slices, and run the ``on_remove_axis`` hooks."""
        return self._with_axes(lambda v, key, name: delete_name(v, key, index), "on_remove_axis", index, params)

    def _with_axes(
        self, change: Callable[[Variable, str, Any], None], hook: str, index: int, params: Mapping
    ) -> NNXMeta:
        variable, name = self._variable(), axis_name_in(params)
        for key, of_axis in (("out_sharding", name.partition), *name.others):
            change(variable, key, of_axis)
        for run in as_hooks(self.metadata.get(hook, ())):
            run(variable, index, name.partition)
        return self.replace(value=variable.get_raw_value(), metadata=variable.get_metadata())

    def _variable(self) -> Variable:
        variable = make_variable(self.var_type, self.value)
        variable.set_metadata(**self.metadata)  # under its own name for the names of axes
        return variable

    def tree_flatten_with_keys(self) -> tuple[tuple, tuple]:
        return ((jax.tree_util.GetAttrKey("value"), self.value),), (self.var_type, Const.of_items(self.metadata))

    def tree_flatten(self) -> tuple[tuple, tuple]:
        return (self.value,), (self.var_type, Const.of_items(self.metadata))

    @classmethod
    def tree_unflatten(cls, static: tuple, children: Iterable[Any]) -> NNXMeta:
        return cls(static[0], next(iter(children)), static[1].fresh())


def with_partitioning(fn: Callable[..., Any], names: tuple[str | None, ...], mesh: Any = None) -> Callable[..., Any]:
    """:func:`nnxlib.with_partitioning`, for Variables that Linen is to see in its own box, ``nn.Partitioned``.

    >>> init = nnx.bridge.with_partitioning(nnx.initializers.ones, (None, 'model'))
    >>> param = nnx.Param(init(jax.random.key(0), (2, 3)))
    >>> param.sharding_names, type(nnx.bridge.variables.to_linen_var(param)).__name__
    ((None, 'model'), 'Partitioned')
    """
    return nnx_with_partitioning(fn, names, mesh, linen_meta_type=meta.Partitioned)


# --- one variable -----------------------------------------------------------------------------------------------------


def is_vanilla_variable(vs: Variable) -> bool:
    """Whether a Variable has no metadata, so that its bare value says it all."""
    return vs.get_metadata().keys() <= _OF_NO_ACCOUNT


def to_linen_var(vs: Variable) -> Any:
    """Return what Linen keeps of a Variable: its value, in a box if it has metadata.

    >>> nnx.bridge.variables.to_linen_var(nnx.Param(2.0))
    2.0
    >>> nnx.bridge.variables.to_linen_var(nnx.Param(2.0, layer='first'))
    NNXMeta(var_type=<class 'nnxlib.core.variables.Param'>, value=2.0, metadata={'layer': 'first'})
    """
    value, metadata = vs.get_raw_value(), vs.get_metadata()
    box = metadata.pop("linen_meta_type", None)
    if box is not None:
        fields = {_FIELD_OF_METADATA.get(name, name): entry for name, entry in metadata.items()}
        known = {field.name for field in dataclasses.fields(box)}
        return box(value, **{name: entry for name, entry in fields.items() if name in known})
    if is_vanilla_variable(vs):
        return value
    return NNXMeta(type(vs), value, {k: entry for k, entry in metadata.items() if k not in _OF_NO_ACCOUNT})


def unboxed(col: str, x: Any) -> tuple[type[Variable], Any, Metadata]:
    """The type, the value and the metadata that a value has in a collection; errors as of :func:`to_nnx_var`."""
    kind = variable_type_from_name(col, allow_register=True)
    if isinstance(x, NNXMeta):
        if x.var_type is not kind:
            raise errors.StateMismatchError(
                f"A {x.var_type.__name__} is found in the collection {col!r}, which is that of {kind.__name__}. "
                f"nnx.register_variable_name({col!r}, {x.var_type.__name__}) gives it to {x.var_type.__name__}."
            )
        return kind, x.value, x._variable()._metadata
    if isinstance(x, meta.AxisMetadata):
        fields = {_METADATA_OF_FIELD.get(name, name): entry for name, entry in vars(x).items()}
        return kind, fields.pop("value"), Metadata(fields, linen_meta_type=type(x))
    return kind, x, NO_METADATA


def to_nnx_var(col: str, x: Any) -> Variable:
    """Return a Variable of the type that belongs to a collection, with the metadata of the box if ``x`` is one.

    >>> nnx.bridge.variables.to_nnx_var('batch_stats', 2.0)
    BatchStat(2.0)

    Raises:
      StateMismatchError: if the box is of a Variable of another type.
    """
    kind, value, metadata = unboxed(col, x)
    return kind(value, **metadata)


# --- many -------------------------------------------------------------------------------------------------------------


def from_collections(collections: Mapping[str, Any]) -> dict[Path, tuple[str, Any]]:
    """The values of all collections by path, each with the name of its collection.

    Raises:
      PathError: if a path leads to a value in two collections, or to a value in one and to others below it in another.
      TypeError: if a collection is no mapping.
    """
    found: dict[Path, tuple[str, Any]] = {}
    for col, tree in collections.items():
        for path, x in flatten_mapping(tree).items():
            if path in found:
                raise errors.PathError(_TWICE.format(path="/".join(map(str, path)), a=found[path][0], b=col))
            found[path] = col, x
    below = {path[:n]: col for path, (col, _) in found.items() for n in range(1, len(path))}
    for path in found.keys() & below.keys():
        raise errors.PathError(_TWICE.format(path="/".join(map(str, path)), a=found[path][0], b=below[path]))
    return found


_TWICE = """\
The Linen module has {path!r} in the collections {a!r} and {b!r}, but a Module has one attribute of each name. Give \
one of them another name in the Linen module."""


def linen_vars_to_nnx_attrs(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Turn collections into nested dicts of Variables.

    >>> nnx.bridge.variables.linen_vars_to_nnx_attrs({'params': {'a': {'w': 1.0}}, 'batch_stats': {'a': {'mean': 0.0}}})
    {'a': {'w': Param(1.0), 'mean': BatchStat(0.0)}}
    """
    return unflatten_mapping({path: to_nnx_var(col, x) for path, (col, x) in from_collections(variables).items()})


def nnx_attrs_to_linen_vars(nnx_attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Turn nested dicts of Variables into collections.

    >>> nnx.bridge.variables.nnx_attrs_to_linen_vars({'a': {'w': nnx.Param(1.0), 'mean': nnx.BatchStat(0.0)}})
    {'params': {'a': {'w': 1.0}}, 'batch_stats': {'a': {'mean': 0.0}}}

    Raises:
      TypeError: if a leaf is not a Variable.
    """
    leaves = {}
    for path, variable in flatten_mapping(nnx_attrs).items():
        if not isinstance(variable, Variable):
            raise errors.ArgumentError(
                f"Linen has collections of Variables, but {errors.format_path(path)} is {variable!r}."
            )
        leaves[nearest_collection(type(variable)), *path] = to_linen_var(variable)
    return unflatten_mapping(leaves)


def get_col_name(keypath: Sequence[Any]) -> Any:
    """Return the collection that a JAX key path into Linen's variables leads through: its first key.

    >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({'params': {'kernel': 1.0}})
    >>> nnx.bridge.variables.get_col_name(path)
    'params'
    """
    return path_key(keypath[0])


def nearest_collection(kind: type[Variable]) -> str:
    """The name of the collection of a type, or of the nearest base that has one: a kind of Param is among params."""
    for base in kind.__mro__:
        if base is Variable:
            break
        try:
            return variable_name_from_type(base)
        except errors.VariableNameError:
            continue
    return variable_name_from_type(kind, allow_register=True)


def sort_variable_types(types: Iterable[type]) -> list[type]:
    """Types in an order in which each stands before its bases, as filters need it.

    >>> [kind.__name__ for kind in nnx.bridge.variables.sort_variable_types([nnx.Variable, nnx.Param, nnx.LoRAParam])]
    ['LoRAParam', 'Param', 'Variable']
    """
    return sorted(types, key=lambda kind: -len(kind.__mro__))
