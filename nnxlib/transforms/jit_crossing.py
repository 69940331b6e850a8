"""The crossing of a jitted function, which finds out what each trace of the function uses.

The trace *borrows* the objects that the function captures (core/closures.py), and is abandoned if it turns out to
capture others. The Variables keep their values in cells that note whether they are read (core/inputs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.closures import AbsentInput, borrowable, call_watched
from ..core.errors import PlacementError, describe, listed
from ..core.graph import After
from ..core.inputs import Input, is_read
from ..core.layout import Layout
from ..core.tracing import current_mesh
from .closure_inputs import captured_rows
from .lift import Crossing, Outcome, Returned, cross
from .retraces import Traces


class JitCrossing(Crossing):
    """A :class:`Crossing` whose traces are watched, and noted in ``traces``; it takes ``lanes`` as any other does.

    The ``literals`` (literals.py), given by position, stand for leaves that are not passed to :meth:`run`.
    """

    def __init__(self, layout: Layout, traces: Traces, literals: Mapping[int, Any], *lanes: Any):
        super().__init__(layout, *lanes)
        self.traces, self.literals, self._captured = traces, literals, captured_rows(layout)

    def run(self, f: Callable, leaves: Sequence[Any], forced: Collection[int] = ()) -> Returned:
        """As in any :class:`Crossing`.

        Raises:
          CapturedObjects: if the function captures objects that it is not lent.
          AbsentInput: if it reads a leaf that it was not given; or if nothing is lent, because no trace was expected.
          PlacementError: if a sharding does not fit what comes back.
        """
        leaves = [self.literals.get(k, leaf) for k, leaf in enumerate(leaves)] if self.literals else leaves
        found = super().run(f, leaves, forced)
        self.traces.note(self.layout, leaves, self.literals)
        if self.labels is not None:
            _check_shardings([label.sharding for label in self.lanes], *found)
        return found

    def _cross(self, f: Callable, leaves: Sequence[Any], forced: Collection[int]) -> tuple[Any, After]:
        return call_watched(lambda: cross(f, self.layout, leaves, forced, loan=self._loan(), cell=Input))

    def _loan(self) -> dict[int, Any]:
        """The captured objects, by row, for a trace to borrow."""
        objects = borrowable(self.traces) if self._captured else ()
        if self._captured and not objects:
            raise AbsentInput
        return {i: objects[i] for i in self._captured}

    def _read(self, after: After) -> list[int]:
        """The positions of the leaves that were read; leaves outside of Variables always count."""
        variables, cells = self.layout.variables, after.walk.cells
        read = [k for k, i in enumerate(variables) if k not in self.literals and is_read(cells[i])]
        return read + [*range(len(variables), len(self.layout.leaf_paths))]


def _check_shardings(shardings: Sequence[Any], groups: Sequence[Sequence[Any]], outcome: Outcome) -> None:
    """Refuse shardings that do not fit the leaves of their lanes; JAX would only say where in a list these are."""
    mesh, unfit = current_mesh(), []
    for lane, (given, leaves) in enumerate(zip(shardings, groups, strict=True)):
        sharding = jax.NamedSharding(mesh, given) if mesh and isinstance(given, jax.P) else given
        if not isinstance(sharding, jax.sharding.Sharding):
            continue
        for name, leaf in zip(outcome.names(lane), leaves, strict=True):
            try:
                for x in jax.tree.leaves(leaf):
                    sharding.shard_shape(jnp.shape(x))
            except (ValueError, IndexError):  # the latter if it has too few axes
                unfit.append(f"{name}: {describe(leaf)}, but the sharding is {sharding}")
    if unfit:
        raise PlacementError(listed(_UNFIT, unfit, _SHARD))


_UNFIT = "These cannot come out of the jitted function with the sharding that in_shardings or out_shardings gives them:"

_SHARD = """\
The size of an axis has to be a multiple of the number of its shards. Give them a sharding of their own; in a Module, \
by nnx.StateSharding, such as {filter: sharding, ...: None}."""
