"""Cells: where Variables keep their values.

A Variable keeps the same cell, except while a trace borrows it. A call of a compiled function reads and writes its
cells in two loops, or for up to 128 cells in straight-line code, which takes a few nanoseconds for each. Going through
the Variables, whose attributes are computed, would take much longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from .tracing import TraceRef, current_trace


class Cell:
    """The cell of a Variable that was made at top level."""

    __slots__ = ("value",)
    value: Any  # set after the cell is made, since an ``__init__`` would take twice the time
    trace: TraceRef = None  # the one that has made or borrowed the Variable: no other may write it


class TracedCell(Cell):
    """The cell of a Variable that was made, or borrowed, by a trace."""

    __slots__ = ("trace",)

    def __init__(self, value: Any, trace: TraceRef):
        self.value, self.trace = value, trace


def new_cell(value: Any) -> Cell:
    """Make a cell of the running trace."""
    return cell_of(value, current_trace())


def cell_of(value: Any, trace: TraceRef) -> Cell:
    """Make a cell of a trace; of the top level, if that is None."""
    cell = Cell() if trace is None else TracedCell(value, trace)
    cell.value = value
    return cell


def write_cells(cells: Sequence[Cell], values: Sequence[Any]) -> None:
    """Write the first of these values to the cells; to all of them, even if interrupted."""
    try:
        for cell, cell.value in zip(cells, values):  # noqa: B007  (the assignment is the loop; `strict` takes longer)
            pass
    except BaseException:
        for cell, value in zip(cells, values, strict=False):
            cell.value = value
        raise


_UNROLLED = 128  # up to this many cells the loop is unrolled, which takes a third of the time


def reader(cells: Sequence[Cell], items: Sequence[tuple[Any, Any]] = ()) -> Callable[[Callable[..., Any]], Any]:
    """A function that calls another with the values of cells and with items: ``f(c0.value, c1.value, d0[k0], ...)``.

    Each item is given by a container and a key.
    """
    if len(cells) > _UNROLLED or items:
        return lambda f: f(*[cell.value for cell in cells], *[container[key] for container, key in items])
    return _new_reader(len(cells))(*cells)


def writer(cells: Sequence[Cell]) -> Callable[[Sequence[Any]], None]:
    """A function that writes the first of some values to these cells: ``c0.value = v[0]; c1.value = v[1]; ...``.

    It writes all of them: Python handles no interrupt within such straight-line code.
    """
    if len(cells) > _UNROLLED:
        return lambda values: write_cells(cells, values)
    return _new_writer(len(cells))(*cells)


@functools.cache
def _new_reader(count: int) -> Callable[..., Callable[[Callable[..., Any]], Any]]:
    names = [f"c{k}" for k in range(count)]
    values = ", ".join([f"{name}.value" for name in names])
    return eval(f"lambda {', '.join(names)}: lambda f: f({values})")


@functools.cache
def _new_writer(count: int) -> Callable[..., Callable[[Sequence[Any]], None]]:
    names = [f"c{k}" for k in range(count)]
    assignments = "; ".join([f"c{k}.value = v[{k}]" for k in range(count)]) or "pass"
    scope: dict[str, Any] = {}
    exec(f"def bind({', '.join(names)}):\n  def write(v): {assignments}\n  return write", scope)
    return scope["bind"]
