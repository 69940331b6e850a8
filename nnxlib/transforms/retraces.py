"""Retraces: how often a jitted function was traced, and why it was traced again.

A jitted function is traced once for each structure of its arguments (a :class:`~nnxlib.core.layout.Layout`: classes,
static values, sharing, the metadata of Variables) and each set of shapes and dtypes of the arrays that it reads. Each
trace leaves a note of these in the :class:`Traces` of the function. To *explain* the last trace, its note is compared
with the earlier note that is most similar: what differs between the two is why the function had to be traced again.

A function that is traced at every call is slower than an eager one. When several calls in a row were each traced for
the same reason, a :class:`~nnxlib.core.errors.RetraceWarning` says so.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ..core.annotations import NamedTuple
from ..core.differences import Difference, as_change
from ..core.errors import RetraceWarning, format_path, listed
from ..core.graphdef import ANOTHER, structural_differences
from ..core.inputs import ABSENT
from ..core.layout import Layout
from ..core.reprs import static_repr
from ..core.rows import children
from ..core.tracing import AbstractValue, Tracer, UserLine

_KEPT = 32  # how many notes
_SHOWN = 4  # how many arrays of one Variable are listed
_IN_A_ROW = 8  # how many traced calls cause a warning


class _Note(NamedTuple):
    """A note of one trace: the structure and the types that it was made for."""

    call: int  # the number of the call
    layout: Layout
    types: dict[tuple, list[Any]]  # of the arrays that the trace was given, by the path of the leaf; or a literal


class Traces:
    """The notes of one jitted function; also stands for it where a reference to the function would keep it alive."""

    def __init__(self, name: str):
        self.name = name
        self.calls = 0
        self.count = 0
        self._notes: deque[_Note] = deque(maxlen=_KEPT)
        self._in_a_row = 0
        self._reason: list[tuple] = []

    def note(self, layout: Layout, leaves: Sequence[Any], literals: Mapping[int, Any]) -> None:
        """Note that a trace has succeeded; warn if the last calls were all traced, and for the same reason."""
        types = {
            path: [jax.typeof(leaf)] if isinstance(leaf, Tracer) else list(map(jax.typeof, jax.tree.leaves(leaf)))
            for k, (path, leaf) in enumerate(zip(layout.leaf_paths, leaves, strict=True))
            if leaf is not ABSENT and k not in literals
        }
        types |= {layout.leaf_paths[k]: [value] for k, value in literals.items()}
        previous = self._notes[-1] if self._notes else None
        self._notes.append(_Note(self.calls, layout, types))
        self.count += 1
        found = [] if previous is None else _differences(previous, self._notes[-1])
        reason = [x.path[:-1] if x.kind == "added" else x.path for x in found]  # an item has another key each time
        follows = previous is not None and self.calls - previous.call <= 1
        self._in_a_row = self._in_a_row + 1 if follows and reason and reason == self._reason else 1
        self._reason = reason
        if self._in_a_row == _IN_A_ROW and previous is not None:
            UserLine().warn(self._each_call(found, previous), RetraceWarning)

    def _each_call(self, found: Sequence[Difference], previous: _Note) -> str:
        """The warning of differences that make each call trace anew, with a remedy for each kind."""
        last = self._notes[-1]
        longer = {path for path, types in last.types.items() if len(types) > len(previous.types.get(path, ()))}
        grown = [x for x in found if x.kind == "added" or x.path in longer]
        values = [x for x in found if any(not isinstance(t, AbstractValue) for t in last.types.get(x.path, ()))]
        arrays = [x for x in found if x.path in last.types and x not in grown + values]
        others = [x for x in found if x not in grown + values + arrays]
        alike = [x for x in others if x.after.startswith(ANOTHER)]
        kept = len(others) > len(alike)
        needed = [(_GROWS, grown), (_COMPUTE, values), (_PAD, arrays), (_ONCE, alike), (_KEEP, kept)]
        remedy = " ".join([text for text, of in needed if of])
        return listed(_EACH_CALL.format(name=self.name, count=_IN_A_ROW), list(map(_line, found)), remedy)

    def explain(self) -> str:
        """Say how often the function was traced, and what made the last trace necessary."""
        if not self._notes:
            return f"{self.name} has not been traced yet."
        last, *earlier = reversed(self._notes)
        times = "once" if self.count == 1 else f"{self.count} times"
        calls = "once" if self.calls == 1 else f"{self.calls} times"
        text = f"{self.name} has been called {calls} and traced {times}"
        if not earlier:
            return f"{text}, in call {last.call}."
        found, nearest = min(
            ((_differences(note, last), note) for note in earlier), key=lambda pair: (len(pair[0]), -pair[1].call)
        )
        head = f"{text}, last in call {last.call}. What differs from the trace in call {nearest.call}:"
        return listed(head, list(map(_line, found)) or [_NOTHING])


_line = functools.partial(as_change, root="the arguments")

_NOTHING = """\
nothing in the arguments: a setting of JAX (its configuration, the mesh, the default device), the sharding of an \
argument, or what the function captures."""

_EACH_CALL = "{name} was traced and compiled anew in each of its last {count} calls, each time because of"
_ONCE = """\
What only looks the same, such as what optax.adam or another function that makes functions returns each time, is \
another program: make it once, and use it in each call."""
_KEEP = "Keep what changes from call to call in an array or a Variable, which are not part of the program."
_GROWS = """\
What grows is another program each time: take it out after each call (nnx.pop(model, nnx.Intermediate) for what sow \
has recorded; with capture_noop=True it records only in an nnx.capture), keep it outside of the call, or write into an \
array of a fixed size."""
_COMPUTE = """\
A bool, text, or a number in an `if` or a shape is part of the program, also in a Variable. To compute with it \
instead, keep an array, and write jnp.where or nnx.cond in place of `if`."""
_PAD = "Give inputs a common shape (pad them) and dtype."


def _text(types: Sequence[Any]) -> str:
    texts = [_text_of(t) if isinstance(t, AbstractValue) else static_repr(t) for t in types]  # others are literals
    return ", ".join(texts) if len(texts) <= _SHOWN else f"{len(texts)} arrays"


def _text_of(type_: Any) -> str:
    return type_.str_short(short_dtypes=False) + (" (weakly typed)" if getattr(type_, "weak_type", False) else "")


def _differences(a: _Note, b: _Note) -> list[Difference]:
    if a.layout is b.layout:
        found = []
    elif _given(a.layout) != _given(b.layout):
        found = [Difference((), "type", _given(a.layout), _given(b.layout))]
    else:
        found = list(structural_differences(a.layout, b.layout))
    changed = {difference.path for difference in found}
    for path, types in b.types.items():
        if path not in changed and a.types.get(path, types) != types:
            old, new = _text(a.types[path]), _text(types)
            found += [Difference(path, "type", old, new)] if old != new else []
    return found


def _given(layout: Layout) -> str:
    """The leaves and objects that were passed, by the names of the arguments."""
    return ", ".join(format_path(path) for path, _ in children(layout.root)) or "none"
