"""Lost updates: a warning where an optimizer changes a copy of a model, and nothing ever reads what it has changed.

``jax.jit`` and the other transformations of raw JAX give a function copies of the Modules that it is passed. If the
function updates them and does not return them, nothing is trained, and nothing else tells. An update that is computed
and never read has no other use. So under such a transformation the cells of the Variables that an update has written
note whether they are read; when the last one is gone unread, a warning points to the update.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from ..core.cells import Cell, TracedCell
from ..core.finding import reachable
from ..core.tracing import EAGER, current_trace, enclosing_transform, is_users, running_trace
from ..core.variables import Variable

_NOTHING_RUNS = "jax.eval_shape", "jax.make_jaxpr"  # what a function changes there is not meant to be kept
_value: Any = Cell.__dict__["value"]


class _Update:
    """One update: where it was called, how many of the cells that it wrote are left, and whether any has been read."""

    __slots__ = ("file", "function", "left", "line", "read", "transform")

    def __init__(self, left: int, transform: str):
        frame = sys._getframe(1)
        while frame.f_back is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        self.file, self.line, self.function = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        self.left, self.read, self.transform = left, False, transform

    def warn(self) -> None:
        raw = "jax.jit" if self.transform == "jax" else self.transform
        text = _LOST.format(function=self.function, raw=raw, name=raw.rpartition(".")[2])
        warnings.warn_explicit(text, UserWarning, self.file, self.line)


class _Unread(TracedCell):
    """A cell whose value has not been read since an update has written it; once read, it is an ordinary one."""

    __slots__ = ()

    @property
    def value(self) -> Any:  # type: ignore[override]
        update = _updates.pop(id(self), None)
        if update is not None:
            update.read = True
        self.__class__ = TracedCell  # type: ignore[assignment]
        return _value.__get__(self)

    @value.setter
    def value(self, value: Any) -> None:
        _value.__set__(self, value)

    def __del__(self) -> None:
        update = _updates.pop(id(self), None)
        if update is not None:
            update.left -= 1
            if update.left == 0 and not update.read and current_trace() is self.trace:  # else the function has failed
                update.warn()


_updates: dict[int, _Update] = {}  # by the ids of cells


def watch_update(model: Any, values: Sequence[Any], others: Sequence[Variable]) -> None:
    """Warn when everything that an update has written just now is gone without having been read.

    Args:
      model: the model that was updated.
      values: its new values.
      others: the other Variables that the update has written: the state of the optimizer.
    """
    if running_trace() is EAGER:
        return
    transform = enclosing_transform()[0]
    if transform in (None, "nnx", *_NOTHING_RUNS):
        return
    ids = set(map(id, values))
    written = [x for _, x in reachable(model, set()) if isinstance(x, Variable) and id(x._nnx_value) in ids]
    if written:  # nothing is found if the values are kept in a jax.Ref, which comes out of the transformation
        cells = [x._cell for x in (*written, *others) if type(x._cell) is TracedCell]
        update = _Update(len(cells), transform)
        for cell in cells:
            cell.__class__ = _Unread
            _updates[id(cell)] = update


_LOST = """\
An optimizer updates a model in {function}, which runs under {raw}. That gives {function} copies of the Modules that \
it is passed, and what was changed here was neither read nor returned, so nothing is trained. Use nnx.{name}, which \
changes the Modules themselves, or return them."""
