"""Inputs: which of the values that are given to a trace are read.

A jitted function is traced once and called often, and each call takes time for each array that is passed, read or not.
So while the function is traced, its Variables keep their values in :class:`Input` cells instead of plain ones. If the
value of an Input was never read, neither the value nor its shape or dtype can have influenced the trace. So the
compiled function need not take it. For a later trace that reads it, it is *absent*, and this trace is abandoned.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from .cells import Cell, TracedCell
from .closures import absent_input
from .tracing import TraceRef, current_trace
from .variables import Variable

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "<absent>", "__slots__": ()})()  # a leaf that was not passed


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
                raise absent_input()
            self.read = True
        return self.content

    @value.setter
    def value(self, value: Any) -> None:
        self.content = value


class LentInput(Input):
    """The Input of a live Variable that a trace has borrowed, for the thread of that trace alone.

    Every other thread reads and writes the cell that the Variable has outside of the trace.
    """

    __slots__ = ("outside", "thread", "within")

    def __init__(self, given: Any, outside: Cell):
        self.given = self.content = given
        self.read, self.within = False, current_trace()
        self.outside, self.thread = outside, get_ident()

    @property
    def value(self) -> Any:  # type: ignore[override]
        return super().value if get_ident() == self.thread else self.outside.value

    @value.setter
    def value(self, value: Any) -> None:
        if get_ident() == self.thread:
            self.content = value
        else:
            self.outside.value = value

    @property
    def trace(self) -> TraceRef:  # type: ignore[override]
        return self.within if get_ident() == self.thread else self.outside.trace


def lend(variable: Variable, value: Any) -> None:
    """Give a live Variable another value, for the running trace alone."""
    object.__setattr__(variable, "_cell", LentInput(value, variable._cell))


def peek(cell: Cell) -> Any:
    """The value of a cell, without noting that it is read."""
    return cell.content if isinstance(cell, Input) else cell.value


def is_read(cell: Cell) -> bool:
    """Whether the value that a cell was given has been read; a plain cell does not know, and counts as read."""
    return not isinstance(cell, Input) or cell.read
