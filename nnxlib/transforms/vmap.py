"""``vmap`` and ``pmap``: map a function of Modules over an axis, with an axis for each kind of leaf.

The leaves with one axis form a lane. Names of axes in metadata are dropped on the way in, put back on the way out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax

from ..core.calls import recorded_types, repeated
from ..core.errors import PrefixError
from ..core.graph import After, Packed
from ..core.missing import MISSING
from ..core.packing import pack_live
from ..core.recordings import give_on, recorded_anew, with_carrier
from .axes import NO_AXIS_NAMES, AxisName, axis_name_in, place_stacks, stack_axes, strip_axes
from .callables import by_position, check_options, resolve, static_arguments
from .classes import lifts_classes
from .labels import Labels, join_lanes, label_arguments, lanes_of, mapped_size, split_lanes
from .lift import Arguments, Crossing, Returned, cross, finish, tracing_all
from .prefixes import call_entries, check_axes, labels_in, prefix_key
from .program import Program, program_of, watched, weakly
from .vmap_checks import checked, refuse_explicit, summed


@lifts_classes()
def vmap(
    f: Callable = MISSING,
    in_axes: int | Sequence[Any] | None = 0,
    out_axes: Any = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable | tuple[Hashable, ...] | None = None,
    *,
    sum_match: bool = False,
    transform_metadata: Mapping[str, Any] = NO_AXIS_NAMES,
) -> Callable:
    """Map a function over an axis of its arguments, Modules among them; ``jax.vmap`` with state.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      in_axes: for each positional argument the axis to map over, None to pass it whole, or for a Module
        :class:`StateAxes`. An argument passed by name has the entry of its position in a sequence; if there is none,
        or ``in_axes`` is one axis for all, it has axis 0, as in JAX. What changes in an argument comes back with the
        same axis.
      out_axes: the same for the output.
      axis_name: a name for the axis, for collectives inside.
      axis_size: the size of the axis, needed if no argument has one.
      spmd_axis_name: as in ``jax.vmap``.
      sum_match: whether output with the axis None is the sum over the axis, if it depends on it, in place of an error;
        as in JAX 0.12. What changes in an argument that is passed whole must not depend on it in any case.
      transform_metadata: ``{nnx.PARTITION_NAME: name}``: the name of this axis for Variables that have names for their
        axes; new ones are sharded along it if the mesh has it. A further entry is the name of the axis in that
        metadata; ``optimizer_sharding`` needs none to follow.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> make = nnx.vmap(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key)))
    >>> ensemble = make(jax.random.split(jax.random.key(0), 5))
    >>> ensemble.kernel.shape
    (5, 2, 3)
    >>> nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(ensemble, jnp.ones((1, 2))).shape
    (5, 1, 3)

    Raises:
      PrefixError: if ``in_axes`` or ``out_axes`` does not fit, or if something that is passed whole (axis None) gets a
        value that depends on the mapped axis; names its path.
      AliasingError: if a shared object is given two axes.
      PlacementError: if arrays are sharded differently along the axis, over mesh axes of the type ``Explicit``; names
        their paths.
    """
    options: dict[str, Any] = {"axis_name": axis_name, "axis_size": axis_size, "spmd_axis_name": spmd_axis_name}
    summing = {"sum_match": True} if sum_match else {}
    check_options(summing, jax.vmap)

    def over(pure: Callable, crossing: MappedCrossing) -> Callable:
        lanes = crossing.lanes
        transform = lambda fun, out, **others: jax.vmap(fun, in_axes=lanes, out_axes=out, **options, **others)
        refuse = lambda groups: refuse_explicit(crossing, groups)
        run = checked(pure, lanes, functools.partial(transform, **summing), refuse)
        return _placing(summed(pure, lanes, transform, run) if summing and None in lanes else run, crossing)

    size = lambda packed, labels: mapped_size(packed, labels, "vmap", "axis_size", axis_size)
    return mapped(f, over, in_axes, out_axes, "vmap", axis_name_in(transform_metadata), size)


@lifts_classes()
def pmap(
    f: Callable = MISSING,
    axis_name: Hashable | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    static_broadcasted_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    transform_metadata: Mapping[str, Any] = NO_AXIS_NAMES,
) -> Callable:
    """Map a function over devices, with Modules; ``jax.pmap`` with state. JAX recommends ``shard_map`` instead.

    It is compiled once for each structure of the arguments, unless it refers to a Module that it was not passed.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      axis_name: a name for the axis, for collectives inside.
      in_axes: as in :func:`vmap`, but not negative.
      out_axes: the same for the output. What has the axis None is that of one device, as in JAX, also if it differs.
      devices: the devices to run on.
      backend: as in ``jax.pmap``.
      axis_size: the size of the axis, needed if no argument has one.
      static_broadcasted_argnums: numbers of arguments that are part of the program; their ``in_axes`` must be None.
      donate_argnums: accepted, without effect: nothing is deleted.
      transform_metadata: as in :func:`vmap`.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> layer, n = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jax.device_count()
    >>> nnx.pmap(lambda layer, x: layer(x), in_axes=(None, 0))(layer, jnp.ones((n, 4, 2))).shape == (n, 4, 3)
    True
    """
    options: dict[str, Any] = {"axis_name": axis_name, "devices": devices, "backend": backend, "axis_size": axis_size}

    function, axis = weakly(resolve(f)[0]), axis_name_in(transform_metadata)
    settings = (axis_name, axis, axis_size, backend, None if devices is None else tuple(devices))

    def over(pure: Callable, crossing: MappedCrossing) -> Callable:
        # An axis for each leaf: JAX does not take (0, None) for a prefix of ([x], []).
        axes = crossing.split([crossing.lanes[lane] for lane in crossing.lane_of])
        transform = lambda fun, out: jax.pmap(fun, in_axes=axes, out_axes=out, **options)
        prefixes = (*prefix_key(in_axes), *prefix_key(out_axes))
        key = ("pmap", crossing.lanes, crossing.lane_of, *prefixes, *settings)
        make = lambda: _compiled_once(pure, crossing.lanes, transform)
        program = program_of((function,), crossing.layout, key, make)
        return _placing(tracing_all(lambda *groups: program(groups), crossing), crossing)

    def size(packed: Packed, labels: Sequence[Any]) -> int | None:
        found = mapped_size(packed, labels, "pmap", "axis_size", axis_size)
        available = len(devices) if devices is not None else jax.local_device_count(backend)
        if found is not None and found > available:
            raise PrefixError(
                f"pmap needs a device for each of the {found} slices of the mapped axis, and there are {available}. "
                "nnx.vmap maps over an axis of any size; jax.pmap is superseded by nnx.jit with shardings."
            )
        return found

    call = mapped(f, over, in_axes, out_axes, "pmap", axis, size)
    if any(isinstance(axis, int) and axis < 0 for axis in labels_in((in_axes, out_axes))):  # JAX returns other shapes
        raise PrefixError(f"pmap takes no negative axes, but got in_axes={in_axes!r} and out_axes={out_axes!r}.")
    return static_arguments(call, static_broadcasted_argnums)


def mapped(
    f: Callable,
    over: Callable,
    in_axes: Any,
    out_axes: Any,
    what: str,
    axis: AxisName,
    size: Callable[[Packed, Sequence[Any]], int | None] = lambda packed, labels: None,
    others: Sequence[Any] = (),
) -> Callable:
    """``f`` under a JAX transformation that maps it over an axis.

    Args:
      f: the user's function.
      over: ``over(pure, crossing)`` applies the JAX transformation to the pure function of a crossing.
      in_axes: as in :func:`vmap`.
      out_axes: as in :func:`vmap`.
      what: the name of the transform, for messages.
      axis: the name of the axis, in the metadata of Variables.
      size: ``size(packed, labels)`` is how often the function runs for each trace of it; None if that is not known.
      others: labels that are allowed besides an axis and None.
    """
    function, bound, bound_kwargs = resolve(f)
    check_axes(in_axes, "in_axes", what, *others)
    check_axes(out_axes, "out_axes", what, *others)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if isinstance(in_axes, tuple | list) and len(in_axes) > len(args):  # some are of arguments passed by name
            args, kwargs = by_position(f, args, kwargs)
        arguments = with_carrier(Arguments((*bound, *args), {**bound_kwargs, **kwargs}))
        # What was bound to f is passed whole.
        entries = call_entries(in_axes, arguments, len(bound), "in_axes", None, dict.fromkeys(kwargs, 0))
        with recorded_anew(arguments):
            packed = pack_live(arguments)
            labels, leaf_labels = label_arguments(packed, entries)
            recorded = [0] if recorded_types() else []  # what slices sow is stacked
            lanes = lanes_of(leaf_labels, entries, out_axes, recorded)
            crossing = MappedCrossing(axis, packed.layout, *lanes, labels, out_axes)
            # Weakly, since pmap keeps programs on the function.
            pure = crossing.purify(repeated(weakly(function), size(packed, leaf_labels)))
            out = finish(packed, over(pure, crossing)(*crossing.split(packed.leaves)))
        give_on(arguments)
        return out

    return wrapped


class MappedCrossing(Crossing):
    """A :class:`Crossing` whose labels are axes: the function runs on slices, and what comes back is stacked.

    ``axis_name`` is the name of the axis, in the metadata of Variables (axes.py).
    """

    out_option = "out_axes"

    def __init__(self, axis_name: AxisName, *args: Any):
        super().__init__(*args)
        self.axis_name = axis_name

    def _cross(self, f: Callable, leaves: Sequence[Any], forced: Collection[int]) -> tuple[Any, After]:
        axes = [self.lanes[lane] for lane in self.lane_of]
        return cross(f, strip_axes(self.layout, leaves, axes, self.axis_name), leaves, forced)

    def _labelled(self, labels: Labels, after: After, out: Any) -> tuple[After, Sequence[Any]]:
        return stack_axes(*super()._labelled(labels, after, out), self.layout, self.axis_name)


def _placing(run: Callable, crossing: MappedCrossing) -> Callable:
    """``run``, with new Variables also sharded along the stacked axis."""

    def placing(*groups: Sequence[Any]) -> Returned:
        made, outcome = run(*groups)
        leaves = join_lanes(made, outcome.lane_of)
        leaves = place_stacks(outcome.delta, leaves, len(crossing.layout.rows), crossing.axis_name)
        return split_lanes(leaves, outcome.lane_of, len(crossing.lanes)), outcome

    return run if crossing.axis_name.partition is None else placing


def _compiled_once(pure: Callable, lanes: tuple, transform: Callable) -> Program:
    """The program ``transform(pure, out_axes)`` of one list of leaves per lane, for a transform that compiles."""
    kept: list[Callable] = []

    def compiled(groups: Any) -> Any:
        call = kept.pop() if kept else checked(watched(pure), lanes, transform)
        out = call(*groups)
        kept[:] = [call]  # not if it fails: JAX 0.8 does not trace a function again whose trace has failed
        return out

    return Program(lambda groups: checked(pure, lanes, transform)(*groups), compiled)
