"""``shard_map``: run a function of Modules on each device, on its part of each array."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from ..core.errors import PrefixError, format_path, listed
from ..core.missing import MISSING, is_missing
from ..core.packing import pack_live
from ..core.placement import settle
from ..core.recordings import recorded_anew
from ..core.tracing import at_top_level, current_mesh
from ..core.variables import plain_value
from .callables import by_position, explained, resolve
from .classes import lifts_classes
from .labels import label_arguments, lanes_of
from .leaf_checks import type_of
from .lift import Arguments, Crossing, finish, tracing_all
from .naming import named
from .prefixes import PrefixMapping, call_entries, check_labels


@lifts_classes()
def shard_map(
    f: Callable = MISSING,
    *,
    mesh: Any = None,
    in_specs: Any = MISSING,
    out_specs: Any,
    axis_names: Collection[Hashable] = frozenset(),
    check_vma: bool = True,
) -> Callable:
    """Run a function on each device of a mesh, on its part of each array; ``jax.shard_map`` with state.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator. What is bound to it
        is replicated.
      mesh: the mesh; that of the context if None.
      in_specs: a pytree prefix of the positional arguments with a ``PartitionSpec`` at each leaf, or
        :class:`StateSharding` for a Module. The Variables of an argument are left sharded as they went in. Keyword
        arguments that have no position are replicated. If it is left out, all arrays are taken as they are sharded,
        those of bound and keyword arguments, too; for axes of the type ``Explicit``, which are part of their types.
      out_specs: the same for the output.
      axis_names: the axes of the mesh that are mapped over by hand; all by default.
      check_vma: whether to check that what is replicated does not vary over devices.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> apply = nnx.shard_map(
    ...   lambda layer, x: layer(x), mesh=mesh, in_specs=(jax.P(), jax.P('data')), out_specs=jax.P('data'))
    >>> apply(layer, jnp.ones((4, 2))).shape
    (4, 3)

    Raises:
      PrefixError: if ``in_specs`` or ``out_specs`` does not fit, or ``in_specs`` is left out over other axes.
      ValueError: by JAX, if a spec does not fit an array, or a value in a replicated place varies; names its path.
    """
    options: dict[str, Any] = {"mesh": mesh, "axis_names": set(axis_names), "check_vma": check_vma}
    function, bound, bound_kwargs = resolve(f)

    inferred = is_missing(in_specs)

    for name, specs in ("in_specs", None if inferred else in_specs), ("out_specs", out_specs):
        check_labels(specs, name, lambda spec: isinstance(spec, jax.sharding.PartitionSpec), _TAKES)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_position(f, args, kwargs)
        arguments = Arguments((*bound, *args), {**bound_kwargs, **kwargs})
        others = _AsTheyAre(current_mesh() if mesh is None else mesh, axis_names) if inferred else _REPLICATED
        entries = call_entries(others if inferred else in_specs, arguments, len(bound), "in_specs", others)
        with recorded_anew(arguments):
            packed = pack_live(arguments)
            labels, leaf_labels = label_arguments(packed, entries)
            crossing = Crossing(packed.layout, *lanes_of(leaf_labels, entries, out_specs), labels, out_specs)
            specs = tuple([_as_spec(label) for label in crossing.lanes])
            pure = crossing.purify(function)
            transform = functools.partial(jax.shard_map, in_specs=specs, out_specs=(specs, _REPLICATED), **options)
            call = explained(pure, transform, functools.partial(_explain, pure, crossing, specs, options))
            out = finish(packed, tracing_all(call, crossing)(*crossing.split(packed.leaves)))
        if at_top_level() and _names_devices(mesh, axis_names):
            cells = [packed.objects[i]._cell for i in packed.layout.variables]
            settle(cells, list(map(_as_spec, leaf_labels[: len(cells)])), mesh)
        return out

    return wrapped


class _AsTheyAre(PrefixMapping):
    """A spec for each array: how it is sharded along the axes that are mapped over."""

    def __init__(self, mesh: Any, axis_names: Collection[Hashable]):
        super().__init__({})
        types = {} if mesh is None else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        by_hand = [name for name, type_ in types.items() if type_ is AxisType.Manual]  # of a shard_map around this one
        self._names = self._key = frozenset(axis_names or types).difference(by_hand)
        others = [name for name in self._names if types.get(name) is not AxisType.Explicit]
        if others:
            raise PrefixError(_NO_SPECS.format(names=", ".join(map(repr, sorted(others, key=str)))))

    def map_prefix(self, path: tuple, leaf: Any) -> Any:
        types = jax.tree.leaves(type_of(plain_value(leaf)))
        return jax.sharding.PartitionSpec(*map(self._along, types[0].sharding.spec if types else ()))

    def _along(self, names: Any) -> Any:
        """The names of one axis of an array that are mapped over."""
        several = names if isinstance(names, tuple) else (names,)
        kept = tuple([name for name in several if name in self._names])
        return kept if len(kept) > 1 else kept[0] if kept else None


_NO_SPECS = """\
shard_map needs in_specs over {names}: only over axes of the type Explicit does an array have a spec of its own."""

_REPLICATED = jax.sharding.PartitionSpec()


def _as_spec(label: Any) -> Any:
    return _REPLICATED if label is None else label


_TAKES = "shard_map takes a jax.sharding.PartitionSpec, None or nnx.StateSharding of these"


def _names_devices(mesh: Any, axis_names: Collection[Hashable]) -> bool:
    """Whether a spec says on which devices an array is.

    Not if the mesh was given without devices, or if it has axes that are not mapped over by hand, of which specs say
    nothing.
    """
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return False
    mesh = mesh or current_mesh()
    return not axis_names or mesh is None or set(axis_names).issuperset(mesh.axis_names)


# --- messages -------------------------------------------------------------------------------------------------------


def _explain(pure: Callable, crossing: Crossing, specs: tuple, options: dict[str, Any], groups: Sequence[Any]) -> None:
    """Raise what JAX says when it knows the leaves by their names."""
    paths = crossing.split([format_path(path) for path in crossing.layout.leaf_paths])
    misplaced = _misplaced(paths, groups, specs)
    groups = tuple(map(_by_name, paths, groups))

    def by_name(*groups: Any) -> Any:
        returned, outcome = pure(*(list(group.values()) for group in groups))
        return tuple(map(_by_name, map(outcome.names, range(len(specs))), returned)), outcome

    by_name = named(by_name, inspect.unwrap(pure))
    unchecked = jax.shard_map(
        by_name, in_specs=specs, out_specs=(specs, _REPLICATED), **{**options, "check_vma": False}
    )
    try:
        shapes, _ = jax.eval_shape(unchecked, *groups)
    except ValueError as error:
        explicit = "match the specs of the input" in str(error)  # JAX gives the shape of the array, not its name
        raise ValueError(f"{error}\n\n{listed(_MISPLACED, misplaced, _RESHARD)}" if explicit else str(error)) from None
    of_leaves = tuple([OrderedDict.fromkeys(group, spec) for group, spec in zip(shapes, specs, strict=True)])
    try:
        jax.eval_shape(jax.shard_map(by_name, in_specs=specs, out_specs=(of_leaves, _REPLICATED), **options), *groups)
    except ValueError as error:  # not without the check, so something that is to be replicated varies
        raise ValueError(f"{error}\n\n{_VARIES}") from None


_MISPLACED = "Over explicit axes, the spec is to be the sharding that an array has:"

_RESHARD = """\
Give these their own spec (for a Module with nnx.StateSharding, such as {filter: spec, ...: spec}), or move them \
first, by jax.reshard(array, spec)."""


def _misplaced(paths: Sequence[Sequence[str]], groups: Sequence[Sequence[Any]], specs: Sequence[Any]) -> list[str]:
    """The leaves that are sharded in another way than their spec says, if the mesh is of explicit axes."""
    found = []
    for names, leaves, spec in zip(paths, groups, specs, strict=True):
        for name, leaf in zip(names, leaves, strict=True):
            for type_ in map(jax.typeof, jax.tree.leaves(leaf)):
                own = type_.sharding.spec
                if tuple(own) != (*spec, *[None] * (len(own) - len(spec))):
                    found.append(f"{name}: {own}, but its spec is {spec}")
    return found


_VARIES = """\
Reduce what differs between devices (jax.lax.pmean; axis_name=... of a BatchNorm), or give it a spec: in out_specs, \
or, for what a Module holds, by nnx.StateSharding in in_specs, since it comes back as it goes in; or do not change it \
(model.eval()). With check_vma=False, each device would go on with a value of its own."""


def _by_name(names: Sequence[str], group: Sequence[Any]) -> OrderedDict[str, Any]:
    """The leaves by name, which JAX shows in its messages; those of one name are numbered."""
    unique = [name if names.count(name) == 1 else f"{name}{k}" for k, name in enumerate(names)]
    return OrderedDict(zip(unique, group, strict=True))
