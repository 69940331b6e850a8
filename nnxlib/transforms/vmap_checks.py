"""Errors about mapped axes: which of the values that come back, or of the arrays that go in, JAX refuses.

JAX's own errors name a position in a flat list, if any. These name all the paths, and say what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from ..core.errors import OUTPUT, PlacementError, PrefixError, format_path, listed
from ..core.placement import mesh_axes_in
from .callables import explained
from .labels import join_lanes
from .lift import Crossing


def checked(
    pure: Callable, lanes: tuple, transform: Callable, also: Callable[[Sequence[Any]], None] = lambda groups: None
) -> Callable:
    """``transform(pure, out_axes)``, with errors that name the values that come back and that JAX refuses.

    If there are none, ``also(groups)`` may raise an error.
    """

    def explain(groups: Sequence[Sequence[Any]]) -> None:
        if without_axis := _without_axis(pure, lanes, transform, groups):
            raise PrefixError(listed("The axis in out_axes does not exist:", without_axis)) from None
        if None in lanes and (found := _mapped_leaves(pure, lanes, transform, groups)):
            raise PrefixError(listed(_MAPPED, found, _REDUCE)) from None
        also(groups)

    return explained(pure, lambda function: transform(function, (lanes, None)), explain)


def summed(pure: Callable, lanes: tuple, transform: Callable, run: Callable) -> Callable:
    """``run``, which sums what comes back in the lane None, but not what changes in an argument: that is an error."""
    lane = lanes.index(None)

    def of_arguments(*groups: Sequence[Any]) -> list[Any]:
        out, outcome = pure(*groups)
        pairs = zip(out[lane], outcome.names(lane), strict=True)
        return [x for x, name in pairs if not name.startswith(OUTPUT)]

    def summing(*groups: Sequence[Any]) -> Any:
        if _is_refused(transform(of_arguments, None), groups):  # if for another reason, `run` tells
            found = [x for x in _mapped_leaves(pure, lanes, transform, groups) if not x.startswith(OUTPUT)]
            if found:
                raise PrefixError(listed(_MAPPED, found, _REDUCE)) from None
        return run(*groups)

    return summing


def _traced(fun: Callable, groups: Sequence[Sequence[Any]]) -> Any:
    return jax.eval_shape(lambda: fun(*groups))  # what is passed whole may be anything, such as a function


def _is_refused(fun: Callable, groups: Sequence[Sequence[Any]]) -> bool:
    """Whether JAX raises a ValueError when it traces a function."""
    try:
        _traced(fun, groups)
    except ValueError:
        return True
    return False


def _without_axis(pure: Callable, lanes: tuple, transform: Callable, groups: Sequence[Sequence[Any]]) -> list[str]:
    """A line for each value that comes back with too few axes to be stacked along its label."""
    try:
        found, outcome = _traced(transform(pure, (0, None)), groups)
    except ValueError:  # it fails for another reason; the error of JAX is shown
        return []
    names = [outcome.names(k) for k in range(len(lanes))]
    return [
        f"{name}: it has {x.ndim} axes, so there is no axis {axis}"
        for axis, leaves, names_ in zip(lanes, found, names, strict=True)
        for leaf, name in zip(leaves, names_, strict=True)
        for x in jtu.tree_leaves(leaf)
        if axis is not None and not -x.ndim <= axis < x.ndim
    ]


def _mapped_leaves(pure: Callable, lanes: tuple, transform: Callable, groups: Sequence[Sequence[Any]]) -> list[str]:
    """The paths of the leaves in the lane None that depend on the mapped axis, found by trying one at a time."""
    lane, names = lanes.index(None), list[str]()

    def only(k: int | None) -> Callable:
        def fun(*groups: Sequence[Any]) -> Any:
            out, outcome = pure(*groups)
            names[:] = outcome.names(lane)
            return out[lane] if k is None else [out[lane][k]]

        return fun

    if _is_refused(transform(only(None), 0), groups):  # for another reason; the error of JAX is shown
        return []
    return [name for k, name in enumerate(list(names)) if _is_refused(transform(only(k), None), groups)]


def refuse_explicit(crossing: Crossing, groups: Sequence[Sequence[Any]]) -> None:
    """Say which arrays do not go with one whose mapped axis is sharded as a part of its type, if there is one."""
    places = zip(crossing.layout.leaf_paths, join_lanes(groups, crossing.lane_of), crossing.lane_of, strict=True)
    types = [
        (f"{format_path(path)}: {type_.str_short(short_dtypes=False)}", crossing.lanes[lane], type_.sharding.spec)
        for path, leaf, lane in places
        for type_ in map(jax.typeof, jtu.tree_leaves(leaf))
    ]
    sharded = [(name, spec[axis]) for name, axis, spec in types if axis is not None and spec[axis] is not None]
    if not sharded:
        return
    name, over = sharded[0]
    unlike = [f"{x}, at axis {axis}" for x, axis, spec in types if axis is not None and spec[axis] != over]
    axes = {*mesh_axes_in(jax.sharding.PartitionSpec(over))}
    unlike += [
        f"{x}, passed whole" for x, axis, spec in types if axis is None and axes.intersection(mesh_axes_in(spec))
    ]
    if unlike:
        raise PlacementError(listed(_SHARDED.format(name=name, over=over), unlike, _RESHARD)) from None


_SHARDED = "vmap is to map over an axis that is sharded explicitly, over {over!r}, in {name}. These do not go with it:"

_RESHARD = """\
Along its axis, all that is mapped needs the same sharding, and what is passed whole none over these axes of the mesh: \
jax.sharding.reshard(x, jax.P(...)). Or make the axis of the mesh automatic: \
jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto, ...))."""

_MAPPED = "These are passed whole (axis None), but get a value that depends on the mapped axis:"
_REDUCE = """\
Give them an axis (for a Module with nnx.StateAxes, such as {nnx.BatchStat: 0, ...: None}), reduce the value over the
axis first (jax.lax.pmean with an axis_name), or do not change them (`model.eval()`)."""
