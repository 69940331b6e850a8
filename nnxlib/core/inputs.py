"""Inputs: the values that a trace is given, and which of them it asked for.

A jitted function is traced once and called often, and JAX charges each call for each array that is passed, read or not.
So while a function is traced its Variables keep their values in :class:`Input` s instead of plain cells. An Input whose
value was never asked for cannot have influenced the trace: neither the value nor its shape or dtype. Such a Variable
need not be passed to the compiled function; a later trace that does ask for it finds it *absent*, and is given up.
"""

from __future__ import annotations

from typing import Any

from .tracing import current_trace
from .variables import Cell, TracedCell


class AbsentInput(BaseException):
    """Raised through JAX to end a trace that asks for a value it was not given; never reaches the user."""


class _Absent:
    """In place of a leaf that was not passed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<absent>"


ABSENT: Any = _Absent()


class Input(TracedCell):
    """A cell that knows what it was given, and notes whether that was read."""

    __slots__ = ("content", "given", "read")

    def __init__(self, given: Any):
        self.given = self.content = given
        self.read, self.trace = False, current_trace()

    @property
    def value(self) -> Any:  # type: ignore[override]
        """What the cell holds now; reading it is noted."""
        if self.content is self.given:
            if self.given is ABSENT:
                raise AbsentInput
            self.read = True
        return self.content

    @value.setter
    def value(self, value: Any) -> None:
        self.content = value


def peek(cell: Cell) -> Any:
    """What a cell holds, without reading it."""
    return cell.content if type(cell) is Input else cell.value


def is_read(cell: Cell) -> bool:
    """Whether the value that a cell was given was asked for; of a plain cell, it is to be supposed."""
    return type(cell) is not Input or cell.read
