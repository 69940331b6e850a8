"""Placement: a Variable with names for its axes is sharded when it is made, along the names that the mesh has.

The names (metadata ``out_sharding``) are names of mesh axes, or logical names that rules translate to these. The mesh
is the one in the metadata, else that of ``jax.set_mesh`` or ``with mesh:``. In place of names there may be a sharding,
which has its own mesh, or a ``Format``, which also gives the memory layout of an array that is made eagerly. Names that
the mesh of the context does not have are ignored, so the same model runs on one device, in a unit test without a mesh,
and under any mesh; if they look mistyped, there is a warning. A mesh in the metadata has to have them.

The rules, and whether Variables are sharded when they are made, are set per thread, and read when a Variable is made.
Once they have been set, JAX knows of them, and traces a compiled function again when they differ.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .errors import ArgumentError, PlacementError, describe
from .switches import Switch
from .tracing import UserLine, at_top_level, concrete_mesh, current_mesh, resharded

Rules = Sequence[tuple[str, str | Sequence[str] | None]]


_DEFAULT: tuple[bool | None, Rules] = (None, ())  # whether Variables are sharded when made, if set, and the rules
_context: Any = None  # has these for each thread; not made at import, since JAX then traces everything again
_making = threading.Lock()


def _settings() -> tuple[bool | None, Rules]:
    return _DEFAULT if _context is None else _context.value


def _set(eager: bool | None, rules: Rules) -> None:
    global _context
    with _making:
        if _context is None:
            _context = jax.make_user_context(_DEFAULT)
    _context((eager, rules)).__enter__()  # for good, which JAX has no function for


class use_eager_sharding(Switch):
    """Set whether Variables that name their axes are sharded when they are made; also for a block, or as a decorator.

    Args:
      value: whether they are; in a thread that has not set it as ``flax_always_shard_variable`` in ``flax.config``
        says, True by default.

    >>> import nnxlib as nnx
    >>> with nnx.use_eager_sharding(False):
    ...   nnx.using_eager_sharding()
    False
    >>> nnx.using_eager_sharding()
    True
    """

    _flag = "flax_always_shard_variable"

    @classmethod
    def _get(cls) -> bool | None:
        return _settings()[0]

    @classmethod
    def _put(cls, value: bool | None) -> None:
        _set(value, _settings()[1])


def using_eager_sharding() -> bool:
    """Return whether Variables that name their axes are sharded when they are made, in this thread.

    >>> import nnxlib as nnx
    >>> nnx.using_eager_sharding()
    True
    """
    return use_eager_sharding.current_value()


@contextmanager
def logical_axis_rules(rules: Rules):
    """Within the block, translate logical names of axes into names of mesh axes.

    Args:
      rules: pairs of a logical name and a mesh axis, several mesh axes, or None. Those that come first have priority:
        a mesh axis is used for one axis of an array only, so a rule whose mesh axis is taken is passed over, and a name
        without a rule left is not sharded. A name that no rule mentions is the name of a mesh axis itself.

    Rules within rules replace them. A Variable may have rules of its own, which come first: metadata
    ``sharding_rules``. Where there are none, those of ``flax.linen.logical_axis_rules`` hold, but what has been
    compiled under others is not traced again.

    >>> import nnxlib as nnx, jax
    >>> kernel = nnx.Param(jax.numpy.ones((2, 3)), out_sharding=('embed', 'mlp'))
    >>> with nnx.logical_axis_rules([('embed', None), ('mlp', 'model')]):
    ...   nnx.get_partition_spec(kernel).value == jax.sharding.PartitionSpec(None, 'model')
    True
    """
    eager, before = _settings()
    rules = rules if isinstance(rules, Mapping | str) else tuple(rules)
    if isinstance(rules, Mapping | str) or not all(isinstance(rule, tuple | list) and len(rule) == 2 for rule in rules):
        raise ArgumentError(
            "The rules are pairs of a logical name and a mesh axis, [('embed', None), ('mlp', 'model')], but got "
            f"{rules!r:.200}."
        )
    _set(eager, tuple([(name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in rules]))
    try:
        yield
    finally:
        _set(_settings()[0], before)


# --- from names to a sharding ---------------------------------------------------------------------------------------


def spec_of(metadata: Mapping[str, Any]) -> PartitionSpec | None:
    """The PartitionSpec of a Variable, with logical names translated; None if it does not name its axes."""
    names = _asked(metadata)
    if names is None:
        return None
    if isinstance(names, NamedSharding):
        return names.spec
    rules = (*(metadata.get("sharding_rules") or ()), *(_settings()[1] or _rules_of_linen()))
    if isinstance(names, PartitionSpec) and not rules:
        return names
    if not isinstance(names, str | tuple | list | PartitionSpec):
        raise ArgumentError(
            "The names of axes (out_sharding, sharding, sharding_names) are a name or None for each, such as "
            f"('embed', None), a PartitionSpec or a NamedSharding, but got {names!r:.200}."
        )
    return _translated([names] if isinstance(names, str) else names, rules)


def _rules_of_linen() -> Rules:
    """The rules set by ``flax.linen.logical_axis_rules``, which code that also uses Linen sets once for both."""
    linen = sys.modules.get("flax.core.spmd")  # not imported: if flax is not in use, nobody has set any
    return getattr(linen, "get_logical_axis_rules", tuple)()


def _asked(metadata: Mapping[str, Any]) -> Any:
    """The names of axes in the metadata, or the sharding in their place."""
    names = metadata.get("out_sharding")
    return names.sharding if isinstance(names, Format) else names


def _own_mesh(metadata: Mapping[str, Any]) -> Any:
    """The mesh in the metadata; None also for an empty one, which JAX has where no mesh is set."""
    mesh = metadata.get("mesh")
    return None if mesh is None or mesh.empty else mesh


def target_of(metadata: Mapping[str, Any], spec: PartitionSpec | None) -> tuple[Any, PartitionSpec] | None:
    """The mesh for a Variable, and the part of its spec that the mesh knows; None if there is none.

    Empty names (``sharding=()``) ask for nothing; a name None for each axis asks for a copy on each device.
    """
    names = _asked(metadata)
    mesh = names.mesh if isinstance(names, NamedSharding) else _own_mesh(metadata) or current_mesh()
    if spec is None or mesh is None or not (spec or isinstance(names, NamedSharding)):
        return None
    known = _within(spec, _axes(mesh, AxisType.Auto, AxisType.Explicit))
    return (mesh, known) if mesh_axes_in(known) or not mesh_axes_in(spec) else None


def fitted(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """The PartitionSpec for an array with this many axes: ``None`` in front is dropped if there are too many names.

    This is so where code has put ``None`` in front of the names after ``vmap``, since flax.nnx does not do it.
    """
    surplus = len(spec) - ndim
    return PartitionSpec(*spec[surplus:]) if surplus > 0 and not any(map(_parts, spec[:surplus])) else spec


def mesh_axes_in(spec: Iterable[Any]) -> list[str]:
    """The names of mesh axes in a PartitionSpec, or in some of its entries."""
    return [name for entry in spec for name in _parts(entry) if isinstance(name, str)]


def _parts(entry: Any) -> tuple:
    """What shards one axis of an array: names of mesh axes, or PartitionSpec.UNCONSTRAINED."""
    return () if entry is None else tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def _entry(parts: Sequence[Any]) -> Any:
    return tuple(parts) if len(parts) > 1 else parts[0] if parts else None


def _translated(names: Any, rules: Rules) -> PartitionSpec:
    logical = {name for name, _ in rules}
    found: dict[tuple[int, str], tuple] = {}
    used = {part for entry in names for part in _parts(entry) if part not in logical}
    for name, axes in rules:
        for i, entry in enumerate(names):
            if name in _parts(entry) and (i, name) not in found and used.isdisjoint(_parts(axes)):
                found[i, name] = _parts(axes)
                used.update(_parts(axes))

    def translated(i: int, part: Any) -> tuple:
        return found.get((i, part), ()) if part in logical else (part,)

    return PartitionSpec(
        *[_entry([axis for part in _parts(entry) for axis in translated(i, part)]) for i, entry in enumerate(names)]
    )


def _axes(mesh: Any, *types: AxisType) -> set[str]:
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind in types}


def _within(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The PartitionSpec with these mesh axes only."""
    return PartitionSpec(
        *[_entry([part for part in _parts(e) if part in axes or not isinstance(part, str)]) for e in spec]
    )


# --- placing --------------------------------------------------------------------------------------------------------


def placed(value: Any, metadata: Mapping[str, Any], kind: type) -> Any:
    """The value of a Variable of this kind that is being made, sharded if it is to be and can be.

    Raises:
      PlacementError: if the value does not fit the mesh.
    """
    return sharded(value, metadata, kind) if metadata.get("eager_sharding", using_eager_sharding()) else value


def placed_stack(value: Any, metadata: Mapping[str, Any], kind: type) -> Any:
    """:func:`placed`, for a stack of placed values. Not over explicit axes: JAX cannot loop over these."""
    target = target_of(metadata, spec_of(metadata))
    return value if target is None or _axes(target[0], AxisType.Explicit) else placed(value, metadata, kind)


def sharded(value: Any, metadata: Mapping[str, Any], kind: type) -> Any:
    """:func:`placed`, whatever the switch says; a ``jax.ShapeDtypeStruct`` gets a sharding if it has none."""
    if not isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return value
    asked = spec_of(metadata)
    _check_names(value, metadata, kind, asked)
    target = target_of(metadata, asked)
    if target is None:
        return value
    mesh, spec = target[0], fitted(target[1], value.ndim)
    if isinstance(value, jax.ShapeDtypeStruct):
        _check(value, mesh, spec, metadata["out_sharding"], kind, even=False)
        return value if value.sharding is not None else value.update(sharding=on_devices(NamedSharding(mesh, spec)))
    eager = at_top_level()
    _check(value, mesh, spec, metadata["out_sharding"], kind, even=eager)
    if eager:
        names = metadata["out_sharding"]
        spec = PartitionSpec(*[None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec])
        place: Any = NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else spec
        return jax.device_put(value, Format(names.layout, place) if isinstance(names, Format) else place)
    return _constrained(value, mesh, spec)


def on_devices(sharding: NamedSharding) -> NamedSharding:
    """A sharding, of which JAX only gives the axes of the mesh, over the devices of the mesh that is set.

    To restore a checkpoint to a shape takes devices. In a trace the sharding is left as it is.
    """
    mesh = devices_at_hand()
    if mesh is None or sharding.mesh != mesh.abstract_mesh:
        return sharding
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def devices_at_hand() -> Mesh | None:
    """The mesh of ``jax.set_mesh``, over which JAX places what is made eagerly; None without one, and in a trace."""
    mesh = concrete_mesh() if at_top_level() else None
    return None if mesh is None or mesh.empty else mesh


def settle(cells: Iterable[Any], shardings: Iterable[Any], mesh: Any = None) -> None:
    """Move the arrays in the cells of Variables to these shardings, except those that are there already.

    None leaves an array where it is. A PartitionSpec is for the mesh, by default that of the context.
    """
    mesh = mesh or current_mesh()
    for cell, sharding in zip(cells, shardings, strict=True):
        if sharding is None:
            continue
        if type(sharding) is PartitionSpec and isinstance(mesh, Mesh):
            sharding = _named(mesh, sharding)
        value = cell.value
        if getattr(value, "sharding", None) == sharding:  # nearly always: this runs at each call of a function
            continue
        if isinstance(sharding, PartitionSpec | jax.sharding.Sharding):
            moved = jax.tree.map(functools.partial(_moved, sharding, mesh), value)
            if cell.value is value:  # no other thread has assigned in between
                cell.value = moved


_named = functools.cache(NamedSharding)


def _moved(sharding: Any, mesh: Any, x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    own = x.sharding
    if isinstance(own, NamedSharding) and own.spec == sharding and own.mesh.abstract_mesh == mesh:
        return x
    if getattr(sharding, "is_fully_addressable", True):
        return jax.device_put(x, sharding)
    return _identity_onto(sharding)(x)


@functools.cache
def _identity_onto(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """Moves an array onto devices of several processes, where ``device_put`` compares all copies, and takes no keys."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def _constrained(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """A traced array with a sharding: explicit axes of a mesh are part of an array's type, automatic ones a hint."""
    explicit, automatic = _axes(mesh, AxisType.Explicit), _axes(mesh, AxisType.Auto)
    if explicit:
        x = resharded(x, NamedSharding(mesh, _within(spec, explicit)))
    if automatic:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _within(spec, automatic)))
    return x


def problem_with(spec: PartitionSpec) -> str | None:
    """What keeps a PartitionSpec from being the sharding of any array."""
    names = mesh_axes_in(spec)
    return f"{tuple(spec)} would use a mesh axis twice" if len(set(names)) < len(names) else None


def _check(value: Any, mesh: Any, spec: PartitionSpec, names: Any, kind: type, even: bool) -> None:
    problem = problem_with(spec)
    if len(spec) > value.ndim:
        problem = f"it has {value.ndim} axes, and {len(spec)} names"
    elif even:
        parts = [math.prod(mesh.shape[name] for name in mesh_axes_in((entry,))) for entry in spec]
        uneven = [f"axis {i} of size {size} by {n}" for i, (size, n) in enumerate(zip(value.shape, parts)) if size % n]
        problem = f"the mesh does not divide {', '.join(uneven)}" if uneven else problem
    if problem is not None:
        raise _does_not_fit(value, mesh, names, kind, problem)


def _check_names(value: Any, metadata: Mapping[str, Any], kind: type, spec: PartitionSpec | None) -> None:
    """Refuse names that a mesh in the metadata does not have; warn of those that the mesh of the context nearly has."""
    own, names = _own_mesh(metadata), _asked(metadata)
    mesh = own or current_mesh()
    if mesh is None or spec is None or isinstance(names, NamedSharding):
        return
    for name in mesh_axes_in(spec):
        if name not in mesh.axis_names:
            similar = get_close_matches(name, map(str, mesh.axis_names), 1, 0.8)
            problem = f"it has no axis {name!r}" + (f", but {similar[0]!r}" if similar else "")
            error = _does_not_fit(value, mesh, names, kind, problem)
            if own is not None:
                raise error
            if similar:
                UserLine().warn(f"{error}")


def _does_not_fit(value: Any, mesh: Any, names: Any, kind: type, problem: str) -> PlacementError:
    what = f"{kind.__name__} ({describe(value)})"
    return PlacementError(_DOES_NOT_FIT.format(what=what, names=names, mesh=dict(mesh.shape), problem=problem))


_DOES_NOT_FIT = """\
Cannot shard a {what} with the axes {names} over the mesh {mesh}: {problem}.
Name other axes (out_sharding=..., nnx.with_partitioning), translate them by nnx.logical_axis_rules, or leave it where \
it is: eager_sharding=False for one Variable, `with nnx.use_eager_sharding(False):` for all."""
