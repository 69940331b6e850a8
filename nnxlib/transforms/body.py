"""Bodies: what control flow needs to know about a function before it can build an operation from it.

``cond``, ``while_loop`` and ``scan`` must know which Variables have to be carried, and which rows every branch must
return. So a body is first traced to a jaxpr, on the shapes of the leaves. Its Delta is taken from the trace and checked
(body_checks.py), and the operation is built from the jaxpr (program.py). User code runs once; under ``jax.disable_jit``
it runs again in each iteration, where it sees values, as a debugger wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..core.annotations import NamedTuple
from ..core.data import is_node
from ..core.errors import ArgumentError, describe
from ..core.graph import After, Delta
from ..core.layout import Layout
from ..core.rows import Owner, Row, only_arrays_change
from ..core.state import State
from ..core.tracing import jaxpr_as_fun, zeros_of
from .leaf_checks import check_returned
from .lift import cross
from .naming import named


class Body(NamedTuple):
    """A traced function: ``run(leaves)`` gives the leaves of ``delta``, in the order in which ``commit`` takes them."""

    run: Callable[[Sequence[Any]], list[Any]]
    delta: Delta
    owners: tuple[Owner, ...]  # of each leaf
    leaf_paths: tuple[tuple, ...]
    labels: Sequence[Any]  # of each leaf; empty if there are none
    types: list[Any]  # of each leaf, see `type_of` in leaf_checks.py
    has_effects: bool  # such as reading a jax.Ref, or printing


def zeros(type_: Any) -> Any:
    """Zeros of a type, or a pytree of them."""
    return jax.tree.map(zeros_of, type_)


def trace_body(
    function: Callable,
    layout: Layout,
    leaves: Sequence[Any],
    adjust: Callable[[After, Any], tuple[After, Sequence[Any]]] = lambda after, out: (after, ()),
    enter: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
) -> Body:
    """Trace a function of the objects of a layout, whose leaves may also be shapes and dtypes.

    ``adjust(after, output)`` gives what is to come back in place of what the trace has found, and the labels of these
    leaves, ``enter(leaves)`` the leaves that the function sees in place of the given ones.

    Raises:
      OutputError: if the function returns, or sets, what JAX cannot return; names the path.
    """

    def call(seen: Sequence[Any]) -> tuple[After, Sequence[Any]]:
        out, after = cross(function, layout, seen)
        after, labels = adjust(after, out)
        check_returned(after)
        return after, labels

    traced: list[Any] = []  # what the trace has found

    def pure(leaves: Sequence[Any]) -> list[Any]:
        after, labels = call(leaves if enter is None else enter(leaves))
        traced[:] = after.delta, tuple(after.owners), after.leaf_paths, labels
        return after.leaves

    pure = named(pure, function, layout.leaf_paths, (0,) * len(leaves))
    closed, shapes = jax.make_jaxpr(pure, return_shape=True)(list(leaves))
    structure = jtu.tree_structure(shapes)
    evaluate = jaxpr_as_fun(closed)

    def run(leaves: Sequence[Any]) -> list[Any]:
        if jax.config.jax_disable_jit:
            seen = leaves if enter is None else enter(leaves)
            after, _ = call(seen)
            found = dict(zip(after.owners, after.leaves, strict=True))  # a branch may leave what another one changes
            return [found[x] if x in found else seen[layout.owner_positions[x]] for x in owners]
        return structure.unflatten(evaluate(*jtu.tree_leaves(list(leaves))))

    delta, owners, paths, labels = traced
    return Body(run, delta, owners, paths, labels, structure.unflatten(closed.out_avals), bool(closed.effects))


def own_states(out: Any) -> Any:
    """An output with copies of its States: as values, these may be arguments, or be returned twice, without sharing."""

    def copied(x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf, x) if isinstance(x, State) else x

    return jax.tree.map(copied, out, is_leaf=lambda x: isinstance(x, State) or is_node(x))


def structural_rows(layout: Layout, body: Body) -> dict[int, Row]:
    """The rows of a body's Delta that are new, or differ from the old ones by more than the arrays in a node."""
    n = len(layout.rows)
    return {i: row for i, row in body.delta.rows if i >= n or not only_arrays_change(layout.rows[i], row)}


# --- options of control flow -----------------------------------------------------------------------------------------


def as_unroll(unroll: Any) -> Any:
    """The option ``unroll`` of a loop as a number of Python, which has a hash; it may be an array, as in JAX."""
    return unroll.item() if hasattr(unroll, "item") else unroll


def as_scalar(value: Any, what: str) -> jax.Array:
    """A scalar, such as the number of a branch, as an array.

    Raises:
      ArgumentError: if it is no scalar; ``what`` begins the message.
    """
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{what} must be a scalar, got {describe(value)}.") from error
    if array.shape:
        raise ArgumentError(f"{what} must be a scalar, got {describe(array)}.")
    return array
