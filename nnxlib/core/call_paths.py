"""Call paths: the path of each Module whose method is running, the same as in ``nnx.state`` of the whole model.

While a function is traced, a :class:`Listener` knows the paths of the objects in the trace, and which calls are
running. The tracing code makes it (calls.py), and whatever needs a path asks it: a name scope (scopes.py), the note on
an error (call_notes.py), a table of layers.

A path starts at the outermost Module that is running or, inside a transform that was not called by a Module, at the
argument of the transform. An object that can be reached by several paths has the first of them, as in ``nnx.state``.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from .errors import Path
from .finding import reachable
from .objects import Node
from .stamps import Stamp, stamping, with_stamp


class _Paths:
    """The first path to each object below some roots, which are searched again if something may have been attached."""

    __slots__ = ("_attached", "_roots", "_stamp", "known")

    def __init__(self, roots: Sequence[Any], paths: Sequence[Path]):
        self._roots = roots
        self.known = {id(x): path for x, path in zip(roots, paths, strict=True)}
        self._attached: list[Any] = []  # kept alive, so that no id is reused
        self._stamp: Stamp | None = None

    def find(self, x: Any) -> Path | None:
        path = self.known.get(id(x))
        if path is None and not (self._stamp and self._stamp.valid):
            self._walk()
            path = self.known.get(id(x))
        return path

    def _walk(self) -> None:
        self._stamp = Stamp()
        with stamping:
            self._visit(weakref.ref(self._stamp))

    def _visit(self, reference: weakref.ref[Stamp]) -> None:
        seen = set[int]()
        for root in self._roots:
            for path, node in reachable(root, seen, self.known):
                if isinstance(node, Node):
                    object.__setattr__(node, "_nnx_stamps", with_stamp(node._nnx_stamps, reference))
                if id(node) not in self.known:
                    self.known[id(node)] = path
                    self._attached.append(node)


class Collector:
    """What an ``nnx.capture`` takes out: Variables of these types. Counts how many recordings are made meanwhile."""

    __slots__ = ("_numbers", "built", "count", "numbered", "splits", "types")

    def __init__(self, types: tuple[type, ...]):
        self.types, self.count = types, 0
        self.built: dict[int, Any] = {}  # by id of a live object, the object that the capture has built from it
        self.splits: list[tuple[Any, Sequence[Any]]] = []  # GraphDefs, and the objects that were split
        self.numbered: list[Any] = []  # nodes of which copies have recorded something, see `number_of`
        self._numbers: dict[int, int] = {}

    def number_of(self, node: Any) -> int:
        """A number for a node, by which a transform can name it."""
        if id(node) not in self._numbers:
            self._numbers[id(node)] = len(self.numbered)
            self.numbered.append(node)
        return self._numbers[id(node)]


class Listener:
    """The calls of Modules in one trace: the paths of the objects, and the stack of running calls.

    A transform inside of another has its own listener. Its objects keep the paths that they have outside: what is
    packed while a listener is active is noted in ``packed``, where ``listener_for`` (calls.py) finds it.

    Args:
      objects: the objects of the trace, which outlive the listener.
      paths: their paths, or a function that finds these, called when a path is first asked for.
      on_call: called with the module, path, method name, args and kwargs of each call; may return a function, which is
        called with the output.
    """

    def __init__(
        self,
        objects: Sequence[Any],
        paths: Sequence[Path] | Callable[[], Sequence[Path]],
        on_call: Callable[[Any, Path, str, tuple, dict], Callable[[Any], object] | None] | None = None,
    ):
        self.objects, self._paths = objects, paths
        self._new: tuple[Any, Path, _Paths] | None = None  # a model made in the trace, its path, the paths below it
        self.stack: list[tuple[Any, str]] = []
        self.on_call = on_call
        self.packed: dict[Any, Sequence[Any]] = {}  # by layout, the objects that were last packed with it
        self.outer: Listener | None = None  # of the enclosing trace: knows the objects captured by this one
        # The outer path of the Module in whose call this trace began; None if it did not begin in one.
        self.base: Callable[[], Path | None] = lambda: None
        self.collector: Collector | None = None  # of an enclosing `nnx.capture`
        self.copies: list[tuple[Any, Any]] = []  # in a capture: nodes that record for others, and these
        self.carrier: Any = None  # in a capture: takes what copies of outer nodes have recorded (recordings.py)
        self.layout: Any = None  # from which the objects were built, if they were

    @functools.cached_property
    def rows(self) -> dict[int, int]:
        """The row of each object in the layout from which it was built, by its id; empty if they were not."""
        return {id(x): row for row, x in enumerate(self.objects)} if self.layout is not None else {}

    @functools.cached_property
    def _own(self) -> _Paths:
        return _Paths(self.objects, self._paths() if callable(self._paths) else self._paths)

    def leave(self) -> None:
        """Note that the innermost call has ended. A model made in the trace is not kept alive after its call."""
        module = self.stack.pop()[0]
        if self._new is not None and self._new[0] is module and not (self.stack and self.stack[-1][0] is module):
            self._new = None

    def current(self) -> Path | None:
        """The path of the Module whose method is running; None if none is."""
        return self.path_of(self.stack[-1][0]) if self.stack else self.base()

    def path_of(self, module: Any) -> Path:
        """The path of a Module; if it is part of nothing known here, its class name below the path of its caller."""
        path = self.find(module)
        if path is not None:
            return path
        callers = list(itertools.takewhile(lambda caller: caller is not module, [caller for caller, _ in self.stack]))
        return _path_below(self.path_of(callers[-1]) if callers else self.base(), module)

    def find(self, x: Any) -> Path | None:
        """The path of a node, if it is part of something known here."""
        path = self._find_known(x)
        if path is None and self.stack:
            path = self._find_below_new(x)
        return path

    def _find_known(self, x: Any) -> Path | None:
        path = self._own.find(x)
        return self.outer.find(x) if path is None and self.outer is not None else path

    def _find_below_new(self, x: Any) -> Path | None:
        """Look below the outermost caller that is part of nothing known here: a model made or merged in this trace."""
        outside = self.base()
        for caller, _ in self.stack:
            path = self._find_known(caller)
            if path is None:
                start = _path_below(outside, caller)
                if self._new is None or self._new[0] is not caller or self._new[1] != start:
                    self._new = caller, start, _Paths([caller], [start])
                return self._new[2].find(x)
            outside = path
        return None


def _path_below(outside: Path | None, module: Any) -> Path:
    """The path of a Module that is no part of its caller: its class name, below the path of the caller, if any."""
    return () if outside is None else (*outside, type(module).__name__)
