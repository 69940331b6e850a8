"""Inputs: which of the values that a trace is given it reads.

A jitted function is traced once and called often, and each call takes time for each array that is passed, read or not.
So while the function is traced, its Variables keep their values in :class:`Input` cells instead of plain ones. If the
value of an Input was never read, neither that value nor its shape or dtype can have influenced the trace. Then the
compiled function need not take it. A later trace that does read it finds it *absent*, and is abandoned.
"""

from __future__ import annotations

from typing import Any

from .tracing import current_trace
from .variables import Cell, TracedCell


class AbsentInput(BaseException):
    """Raised through JAX to end a trace that reads a value it was not given; never reaches the user."""


class _Absent:
    """In place of a leaf that was not passed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<absent>"


ABSENT: Any = _Absent()


class Input(TracedCell):
    """A cell that remembers the value it was given, and notes whether that was read."""

    __slots__ = ("content", "given", "read")

    def __init__(self, given: Any):
        self.given = self.content = given
        self.read, self.trace = False, current_trace()

    @property
    def value(self) -> Any:  # type: ignore[override]
        """The present value; reading the given one is noted."""
        if self.content is self.given:
            if self.given is ABSENT:
                raise AbsentInput
            self.read = True
        return self.content

    @value.setter
    def value(self, value: Any) -> None:
        self.content = value


def peek(cell: Cell) -> Any:
    """The value of a cell, without noting that it is read."""
    return cell.content if type(cell) is Input else cell.value


def is_read(cell: Cell) -> bool:
    """Whether the value that a cell was given has been read; a plain cell does not know, and counts as read."""
    return type(cell) is not Input or cell.read
