"""Lost changes: a warning where a function changes a copy of a model, and nothing ever reads what it has changed.

Nothing else would tell of these two mistakes:

- *Lost updates.* ``jax.jit`` and the other transformations of raw JAX give a function copies of the Modules that it is
  passed. Under ``nnx.jit`` a function changes the Modules themselves, but what ``nnx.merge`` makes of their State is a
  copy, too. If an optimizer updates a copy, and that is not returned, nothing is trained.
- *Lost draws.* If a copy that ``nnx.merge`` has made draws random numbers under ``nnx.jit``, and the model is not
  updated with its State, the next call draws the same numbers.

What nothing reads has no effect. So under a transformation the cells of these Variables note whether they are read
after they were written. When they are gone unread, a warning points to the update, or to the merge. (If their trace is
no longer running then, the function has failed, and there is no warning.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .calls import objects_of_traces
from .cells import Cell, TracedCell
from .finding import reachable
from .inputs import peek
from .rngs import RngStream
from .tracing import EAGER, NOTHING_RUNS, UserLine, current_trace, enclosing_transform, running_trace
from .variables import RngKey, Variable

_value: Any = Cell.__dict__["value"]


class _Watched(TracedCell):
    """A cell that tells its watch, an :class:`_Update` or a :class:`_Copy`, when it is read or written, and is gone."""

    __slots__ = ()

    @property
    def value(self) -> Any:  # type: ignore[override]
        _watches[id(self)].read(self)
        return _value.__get__(self)

    @value.setter
    def value(self, value: Any) -> None:
        _watches[id(self)].wrote(self)
        _value.__set__(self, value)

    def __del__(self) -> None:
        _watches.pop(id(self)).gone(self)


_watches: dict[int, _Update | _Copy] = {}  # by the ids of cells


# --- updates ----------------------------------------------------------------------------------------------------------


class _Update:
    """One update: where it was called, and how many of the cells that it wrote are left or have been read."""

    __slots__ = ("left", "line", "transform")

    def __init__(self, left: int, transform: str):
        self.line, self.left, self.transform = UserLine(), left, transform

    def read(self, cell: _Watched) -> None:  # once read, it is an ordinary one
        del _watches[id(cell)]
        cell.__class__ = TracedCell  # type: ignore[assignment]

    def wrote(self, cell: _Watched) -> None:
        pass

    def gone(self, cell: _Watched) -> None:
        self.left -= 1
        if self.left == 0 and current_trace() is cell.trace:
            self.warn()

    def warn(self) -> None:
        if self.transform == "nnx":
            text = _LOST_UPDATE_OF_COPY.format(function=self.line.function)
        else:
            raw = "jax.jit" if self.transform == "jax" else self.transform
            text = _LOST_UPDATE.format(function=self.line.function, raw=raw, name=raw.rpartition(".")[2])
        self.line.warn(text)


def watch_update(model: Any, values: Sequence[Any], others: Sequence[Variable]) -> None:
    """Warn when everything that an update has written just now is gone without having been read.

    It has written these new values of the model, and ``others``, the state of the optimizer.
    """
    if running_trace() is EAGER:
        return
    transform = enclosing_transform()[0]
    if transform in (None, *NOTHING_RUNS):
        return
    ids = set(map(id, values))
    cells: list[Cell] = []
    for _, x in reachable(model, set()):
        if isinstance(x, Variable) and id(peek(x._cell)) in ids:
            if type(x._cell) is not TracedCell:  # `nnx.jit` has brought it into the trace, and knows that it is written
                return
            cells.append(x._cell)
    if cells:  # none is found if the values are kept in a jax.Ref, which comes out of the transformation
        cells += [x._cell for x in others if type(x._cell) is TracedCell]
        update = _Update(len(cells), transform)
        for cell in cells:
            cell.__class__ = _Watched
            _watches[id(cell)] = update


_LOST_UPDATE = """\
An optimizer updates a model in {function}, which runs under {raw}. That gives {function} copies of the Modules that \
it is passed, and what was changed here was neither read nor returned, so nothing is trained. Use nnx.{name}, which \
changes the Modules themselves, or return them."""

_LOST_UPDATE_OF_COPY = """\
An optimizer updates a model in {function} that is a copy, such as nnx.merge makes, or that was made there. What was \
changed was neither read nor returned, so nothing is trained. Update the model that is passed to {function}; or return \
nnx.state(copy), and pass that to nnx.update(model, ...)."""


# --- draws ------------------------------------------------------------------------------------------------------------


class _Copy:
    """One copy of a model: where it was merged, and the ids of the counts that were written and have yet to be read.

    ``keys`` has for each count, by its id, the cell of the key of its stream, and that key.
    """

    __slots__ = ("keys", "line", "unread")

    def __init__(self) -> None:
        self.line, self.unread, self.keys = UserLine(), set[int](), dict[int, tuple[Cell, Any]]()

    def read(self, count: _Watched) -> None:
        self.unread.discard(id(count))

    def wrote(self, count: _Watched) -> None:
        self.unread.add(id(count))

    def gone(self, count: _Watched) -> None:
        cell, key = self.keys.pop(id(count))
        if id(count) in self.unread and cell.value is key and current_trace() is count.trace:
            self.unread.clear()  # one warning for all of its streams
            self.line.warn(_LOST_DRAWS.format(function=self.line.function))


def watch_draws(model: Any) -> None:
    """Warn when a stream of a model that was merged just now has drawn numbers and is gone, and nothing knows of it.

    Only if it is a copy of a stream that a transform of nnxlib has brought into the running trace, and was not given
    another key: any other may have its seed from an argument.
    """
    streams = [x for _, x in reachable(model, set()) if isinstance(x, RngStream)]
    if streams and enclosing_transform()[0] not in NOTHING_RUNS:
        live = {id(peek(x._cell)) for x in objects_of_traces() if isinstance(x, RngKey)}
        copy = _Copy()
        for count, key in [(x.count._cell, x.key._cell) for x in streams]:
            if id(key.value) in live and type(count) is TracedCell:
                count.__class__ = _Watched
                _watches[id(count)], copy.keys[id(count)] = copy, (key, key.value)


_LOST_DRAWS = """\
A model that nnx.merge makes in {function} draws random numbers. It is a copy, and nothing has read how many it has \
drawn, so unless the model gets a new seed, the next call draws the same numbers. Return \
nnx.state(copy, nnx.RngState) from where the copy is used, and pass it to nnx.update(model, ...). Or use the model \
itself, with nnx.grad or nnx.scan in place of jax.grad or jax.lax.scan."""
