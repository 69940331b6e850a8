"""The crossing of a jitted function, which finds out what each trace of the function uses.

The trace *borrows* the objects that the function captures (core/closures.py), and is abandoned if it turns out to
capture others. The Variables keep their values in cells that note whether they are read (core/inputs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..core.closures import AbsentInput, borrowable, call_watched
from ..core.graph import After
from ..core.inputs import Input, is_read
from ..core.layout import Layout
from .closure_inputs import captured_rows
from .lift import Crossing, Returned, cross
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
        """
        leaves = [self.literals.get(k, leaf) for k, leaf in enumerate(leaves)] if self.literals else leaves
        found = super().run(f, leaves, forced)
        self.traces.note(self.layout, leaves, self.literals)
        return found

    def _cross(self, f: Callable, layout: Layout, leaves: Sequence[Any], forced: Collection[int]) -> tuple[Any, After]:
        return call_watched(lambda: cross(f, layout, leaves, forced, loan=self._loan(), cell=Input))

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
