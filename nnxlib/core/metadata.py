"""Metadata of Variables: as each keeps them, what initializers attach to a value, hooks, and names of axes.

An initializer wrapped by :func:`with_metadata` returns a :class:`VariableMetadata` instead of a value, and the Variable
made from it takes over the metadata. Names of axes are metadata under the key ``out_sharding``; where a transform
stacks a Variable or takes a slice of it, the names follow (:func:`name_axis`, :func:`unname_axis`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from . import errors
from .generics import A
from .static import Const
from .tracing import Tracer

F = TypeVar("F", bound=Callable)
Hooks = Callable | Sequence[Callable]

HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")


class Metadata(dict[str, Any]):
    """The metadata of a Variable: never edited, but replaced, so that Variables may share it.

    It is the static half of a Variable as a JAX pytree, so two are equal if JAX would trace the same program for both.
    """

    __slots__ = ("_key",)
    _key: Hashable  # of the Const, kept by `const`; not set if an entry can be changed in place

    def const(self, path: tuple = ()) -> Const:
        """Freeze it; as ``Const.of_items(self, path)``, but only once."""
        try:
            return Const(self, self._key, None, Const.of_items)
        except AttributeError:
            const = Const.of_items(self, path)
            if not const.mutable:
                self._key = const.key
            return const

    def static_half(self) -> Metadata | Const:
        """What JAX keeps: the metadata themselves, or what they are now if anything in them can be changed in place."""
        try:
            const = self.const()
        except errors.StaticValueError:  # of what is computed in a trace, say: an error only where JAX compares them
            return self
        return const if const.mutable else self

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Metadata and self.const() == other.const())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.const())

    def __reduce__(self) -> tuple:
        return Metadata, (dict(self),)


NO_METADATA = Metadata()
NO_METADATA.const()  # which keeps the key


class VariableMetadata(Generic[A]):
    """A value for a Variable, with the metadata and hooks that an initializer has attached to it.

    Args:
      raw_value: the value.
      on_set_value, on_get_value, on_create_value, on_add_axis, on_remove_axis: a hook, or a sequence of hooks.
      metadata: other metadata, by name.

    >>> import nnxlib as nnx
    >>> nnx.Param(nnx.VariableMetadata(1.0, metadata={'layer': 'first'}))
    Param(1.0, layer='first')
    """

    __slots__ = (*HOOKS, "metadata", "raw_value")

    def __init__(
        self,
        raw_value: A,
        on_set_value: Hooks = (),
        on_get_value: Hooks = (),
        on_create_value: Hooks = (),
        on_add_axis: Hooks = (),
        on_remove_axis: Hooks = (),
        metadata: Mapping[str, Any] | None = None,
    ):
        hooks = (on_get_value, on_set_value, on_create_value, on_add_axis, on_remove_axis)
        for name, given in zip(HOOKS, hooks, strict=True):
            setattr(self, name, as_hooks(given))
        self.raw_value, self.metadata = raw_value, dict(metadata or {})
        if isinstance(raw_value, VariableMetadata):  # of an initializer that was wrapped twice: the outer one wins
            self.raw_value, self.metadata = raw_value.raw_value, {**raw_value.metadata, **self.metadata}
            for name in HOOKS:
                setattr(self, name, getattr(self, name) or getattr(raw_value, name))

    def all_metadata(self, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Return the hooks and the metadata in one dict, with those that a Variable is given beside this value.

        As in flax.nnx, the hooks given there replace these, and these metadata replace those given there.
        """
        hooks = {name: getattr(self, name) for name in HOOKS if getattr(self, name)}
        return {**hooks, **given, **self.metadata}

    def __repr__(self) -> str:
        return f"VariableMetadata({self.raw_value!r}, {self.all_metadata()!r})"


def with_metadata(
    initializer: F,
    on_set_value: Hooks = (),
    on_get_value: Hooks = (),
    on_create_value: Hooks = (),
    on_add_axis: Hooks = (),
    on_remove_axis: Hooks = (),
    **metadata: Any,
) -> F:
    """Wrap an initializer so that the Variable made from its value gets ``metadata``, which may include hooks.

    >>> import nnxlib as nnx, jax
    >>> init = nnx.with_metadata(nnx.initializers.ones, layer='first')
    >>> nnx.Param(init(jax.random.key(0), (2, 3))).layer
    'first'
    """
    hooks = (on_set_value, on_get_value, on_create_value, on_add_axis, on_remove_axis)

    @functools.wraps(initializer)
    def wrapped(*args: Any, **kwargs: Any) -> VariableMetadata:
        return VariableMetadata(initializer(*args, **kwargs), *hooks, metadata)

    return wrapped  # type: ignore[return-value]  # still an initializer, but of a VariableMetadata


def with_partitioning(initializer: F, sharding: Any, mesh: Any = None, **metadata: Any) -> F:
    """Wrap an initializer so that the Variable made from its value has names for its axes.

    Args:
      initializer: makes the value.
      sharding: for each axis the name of a mesh axis, a logical name, a tuple of names, or None.
      mesh: the mesh that has these names; that of the context by default.
      **metadata: more metadata.

    >>> import nnxlib as nnx, jax
    >>> init = nnx.with_partitioning(nnx.initializers.ones, (None, 'model'))
    >>> nnx.Param(init(jax.random.key(0), (2, 3))).sharding_names
    (None, 'model')
    """
    if mesh is not None:
        metadata["mesh"] = mesh
    return with_metadata(initializer, out_sharding=sharding, **metadata)


def name_axis(variable: Any, key: str, index: int, name: Any) -> None:
    """Insert the name of a new axis of a Variable into its metadata ``key``, unless each axis has a name there."""
    _, names, ndim = _naming(variable, key)
    if names is not None and 0 <= ndim != len(names) - 1:
        insert_name(variable, key, index, name, ndim)


def unname_axis(variable: Any, key: str, index: int) -> None:
    """Drop the name of an axis of a Variable from its metadata ``key``, if there are more names than axes."""
    _, names, ndim = _naming(variable, key)
    if names is not None and 0 <= ndim < len(names):
        delete_name(variable, key, index)


def name_of_axis(variable: Any, key: str, index: int, default: Any) -> Any:
    """The name that :func:`unname_axis` drops; the default if it drops none."""
    _, names, ndim = _naming(variable, key)
    return names[index] if names is not None and 0 <= ndim < len(names) else default


def insert_name(variable: Any, key: str, index: int, name: Any, ndim: int = 0) -> None:
    """Insert a name into the metadata ``key`` of a Variable of ``ndim`` axes, if this names its axes."""
    found, names, _ = _naming(variable, key)
    if names is not None:
        names += [None] * (max(ndim, index) - len(names))
        known = not isinstance(found, NamedSharding) or name in found.mesh.axis_names
        names.insert(index % (len(names) + 1), name if known else None)
        variable.set_metadata(key, _same_kind(found, names))


def delete_name(variable: Any, key: str, index: int) -> None:
    """Delete a name from the metadata ``key`` of a Variable, if there is one at ``index``."""
    found, names, _ = _naming(variable, key)
    if names is not None:
        del names[index : index + 1 or None]
        variable.set_metadata(key, _same_kind(found, names))


def _naming(variable: Any, key: str) -> tuple[Any, list[Any] | None, int]:
    """What names the axes of a Variable, the names in it, and how many axes there are, -1 if there is no array.

    The names are None if they are something else.
    """
    found = variable.get_metadata().get(key)
    found = found.sharding if isinstance(found, Format) else found  # the layout in a Format is for the other shape
    names = found.spec if isinstance(found, NamedSharding) else found
    named = list(names) if isinstance(names, tuple | list | PartitionSpec) else None
    return found, named, getattr(variable.get_raw_value(), "ndim", -1)


def _same_kind(found: Any, names: list[Any]) -> Any:
    if isinstance(found, NamedSharding):
        return NamedSharding(found.mesh, PartitionSpec(*names), memory_kind=found.memory_kind)
    return PartitionSpec(*names) if isinstance(found, PartitionSpec) else type(found)(names)


def as_hooks(hooks: Any) -> tuple[Callable, ...]:
    """The hooks that a user has given as one function or a sequence."""
    if callable(hooks):
        return (hooks,)
    try:
        return tuple(hooks)
    except TypeError:
        raise errors.ArgumentError(
            f"A hook, such as on_set_value, is a function or a sequence of functions, but got {hooks!r:.80}."
        ) from None


def canonical(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata with the names of axes under the one key ``out_sharding``."""
    return {canonical_name(name): value for name, value in metadata.items()}


def canonical_name(name: str) -> str:
    return "out_sharding" if name in KEYS_OF_AXIS_NAMES else name


KEYS_OF_AXIS_NAMES = frozenset({"sharding", "sharding_names"})  # other names of "out_sharding"


class MetadataView(MutableMapping):
    """The metadata of a Variable as a mapping that can be edited; under any trace, if no traced value is set."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Any):
        self._variable = variable

    def __getitem__(self, name: str) -> Any:
        return self._variable.get_metadata()[canonical_name(name)]  # no hint if it is missing: ``in`` looks here, too

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, Tracer):
            self._variable.check_writable()
        self._variable._replace_metadata(canonical({**self, name: value}))

    def __delitem__(self, name: str) -> None:
        self._variable._replace_metadata({key: value for key, value in self.items() if key != canonical_name(name)})

    def __iter__(self) -> Iterator[str]:
        return iter(self._variable.get_metadata())

    def __len__(self) -> int:
        return len(self._variable._metadata)

    def __repr__(self) -> str:
        return repr(dict(self))
