"""``eval_shape``: run a function of Modules on shapes only.

The output is built anew, with shapes for leaves: what is passed in and returned comes out as another object. What the
function did to its arguments is never committed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..core.closures import all_borrowed, call_borrowing
from ..core.errors import TraceContextError
from ..core.escapes import without_escapes
from ..core.graph import Delta, Packed, build, commit, diff, pack
from ..core.identity import Identified
from ..core.inputs import lend
from ..core.look_ups import Jitted
from ..core.packing import pack_live
from ..core.placement import devices_at_hand, on_devices, using_eager_sharding
from ..core.references import search
from ..core.rows import VariableRow
from ..core.tracing import abandon_trace, boundary, with_room
from .axes import place_new
from .callables import resolve
from .leaf_checks import check_returned, explain_untraced
from .lift import Arguments, Outcome, cross, own_pytrees
from .naming import named

R = TypeVar("R")


@boundary
def eval_shape(f: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call ``f`` on abstract arrays; the output has ``jax.ShapeDtypeStruct`` in place of arrays.

    Nothing is computed and no live object is changed: Modules in the output are new ones, also in place of those that
    were passed in. A Module made by ``f`` takes no memory; a checkpoint can be restored into it. ``f`` may also call a
    live Module that it captures, for example to find the size of its output.

    Args:
      f: a function, a Module class, a callable Module, a bound method or a partial.
      *args: arrays, ``jax.ShapeDtypeStruct``, and Modules with either.
      **kwargs: the same.

    >>> import nnxlib as nnx
    >>> abstract = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> abstract.kernel.value
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    >>> norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    >>> nnx.eval_shape(lambda x: norm(x).reshape(4, -1), jax.ShapeDtypeStruct((8, 3), 'float32')).shape
    (4, 6)
    """
    if isinstance(f, Jitted):  # which may have shardings for the output
        return f.eval_shape(*args, **kwargs)
    function, bound, bound_kwargs = resolve(f)
    return eval_packed(function, pack_live(Arguments((*bound, *args), {**bound_kwargs, **kwargs})))


def eval_packed(f: Callable, packed: Packed) -> Any:
    """:func:`eval_shape` for arguments that have been packed.

    Changes of the arguments are only checked, as by any transform, and then discarded. If ``f`` writes to live objects
    that it captures, it is traced again while it borrows them, and these changes are discarded, too.
    """
    layout, captured = packed.layout, _NOTHING

    def pure(leaves: list[Any]) -> tuple[list[Any], Outcome]:
        def run() -> tuple[list[Any], Outcome]:
            own, _ = own_pytrees(captured.leaves)
            for i, leaf in zip(captured.layout.variables, own, strict=False):
                lend(captured.objects[i], leaf)
            build(captured.layout, own, dict(enumerate(captured.objects)))  # nodes hold copies of what can be edited
            out, after = cross(f, layout, leaves, part=lambda out: None)
            check_returned(after)
            # The output is described by itself, so that objects of the caller's in it become new ones.
            after = without_escapes(diff(_NOTHING.layout, (), (), out), _NOTHING.layout, all_borrowed())
            check_returned(after)
            return after.leaves, Outcome(after.delta)

        try:
            return call_borrowing(captured.objects, run, wait=True)
        except BaseException:
            abandon_trace()  # also if it is made again
            raise

    pure = named(pure, f, layout.leaf_paths, ())
    try:
        leaves, outcome = with_room(jax.eval_shape, pure, packed.leaves)
    except (TypeError, OverflowError) as error:
        explain_untraced(error, layout, packed.leaves)
        raise
    except TraceContextError:
        captured = pack([chain.value for chain in search(f).chains if issubclass(type(chain.value), Identified)])
        if not captured.objects:
            raise
        leaves, outcome = with_room(jax.eval_shape, pure, packed.leaves)
    shapes = place_new(outcome.delta, leaves, 0)  # JAX forgets the shardings that values were constrained to
    return commit(_NOTHING.layout, outcome.delta, _on_devices(outcome.delta, shapes), ())


def _on_devices(delta: Delta, shapes: list[Any]) -> list[Any]:
    """The shapes with shardings over devices, as if they were made eagerly; also of Variables that name no axes.

    A checkpoint that was written on other devices can only be restored to shapes that all have a sharding.
    """
    mesh = devices_at_hand() if using_eager_sharding() else None
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    variables = sum(isinstance(row, VariableRow) for _, row in delta.rows)  # their values come first
    defaults = [whole] * variables + [None] * (len(shapes) - variables)
    return [jax.tree.map(functools.partial(_placed, default), x) for x, default in zip(shapes, defaults)]


def _placed(default: NamedSharding | None, x: Any) -> Any:
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return x.update(sharding=on_devices(sharding))
    return x.update(sharding=default) if default and isinstance(x, jax.ShapeDtypeStruct) and sharding is None else x


_NOTHING = pack(())
