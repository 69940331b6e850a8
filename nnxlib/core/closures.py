"""Closures: live objects that a traced function captures, that is, uses without taking them as arguments.

``nnx.jit(lambda x: model(x))`` traces a function that refers to a live model. If the weights became constants of the
trace, later calls would not see them change. So a jitted function finds out what it captures, and takes that as
further inputs. Many files take part in this: docs/how_it_works.md has a table of them, at the end of "Closures". Two
steps are made here:

1. While it traces, it *watches*. When the function reads a Variable, or calls, packs, copies, lists, writes or looks
   through (``vars``) a Module, that was made outside of the trace, the object is *noticed*. A trace that noticed some
   is abandoned (:class:`CapturedObjects`).
2. The next trace *borrows* these objects. While it runs, the live objects themselves hold the tracers of the new inputs
   and belong to the trace, so the function may read and write them through any reference it has. Afterwards, also
   when the trace fails, they are exactly as before. What changed is in the Delta, and is committed as for an argument.

Reading a plain attribute is not noticed. So if code may read one, its Module counts as captured before the first trace
(references.py, held_by_arguments.py). A function without closures pays one test of :attr:`Watch.all` per read, and only
while something is being traced.

One thread at a time borrows. A trace that would borrow while another thread does is abandoned (:class:`Occupied`), and
made again later. It must not wait inside the trace, since JAX makes a thread wait for what another one is tracing.
Other threads see the values of a borrowed Variable as they were (:class:`~nnxlib.core.inputs.LentInput`), and also the
content of a borrowed node, where they pack, copy or pickle it (:func:`contents_and_marks`).
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from .annotations import NamedTuple
from .finding import reachable
from .tracing import TraceRef, abandon_trace, current_trace, ensure_stack, with_room

R = TypeVar("R")


class RunningCode(NamedTuple):
    """Code that was running when an object was noticed, and its globals."""

    code: types.CodeType
    namespace: dict[str, Any]


Running = Mapping[int, RunningCode]  # by the id of the code


def running_in(functions: Iterable[types.FunctionType]) -> Running:
    """The code of these functions, as if it were running."""
    return {id(f.__code__): RunningCode(f.__code__, f.__globals__) for f in functions}


class CapturedObjects(BaseException):
    """Raised through JAX to end a trace that has captured objects; never reaches the user."""

    def __init__(self, roots: Sequence[Any], running: Running = MappingProxyType({})):
        super().__init__(f"{len(roots)} captured objects")
        self.roots, self.running = list(roots), running


class Occupied(CapturedObjects):
    """Raised through JAX to end a trace that would borrow while another thread does; never reaches the user."""


class AbsentInput(BaseException):
    """Raised through JAX to end a trace that reads a value it was not given (inputs.py); never reaches the user."""


class _Thread(threading.local):
    watch: Watch | None = None
    loan: tuple[object, Sequence[Any]] | None = None
    borrowed: tuple[Any, ...] = ()  # the live objects that running traces have borrowed
    caller: TraceRef = None  # the trace from which the innermost jitted function was called


_thread = _Thread()


# --- watching -------------------------------------------------------------------------------------------------------


class Watch:
    """The objects that one trace has captured so far: made outside of it, with everything below them."""

    all: ClassVar[list[Watch]] = []  # those of all threads

    def __init__(self, outer: Watch | None, frame: types.FrameType):
        self.outer, self.frame = outer, frame  # the frame that watches
        self.running = dict[int, RunningCode]()
        self.outside: list[TraceRef] = [None, _thread.caller, *(outer.outside if outer else ())]
        self.roots: list[Any] = []  # what is captured, without the objects below others
        self.covered: dict[int, Any] = {}  # by id; keeps the objects alive, so that no id is reused
        self.lacks_input = False  # whether the trace reads a value that it was not given

    def notice(self, x: Any) -> None:
        if id(x) in self.covered:
            return
        trace = x._nnx_trace
        if trace in self.outside or is_lent_elsewhere(trace):
            below = {id(node): node for _, node in reachable(x, set())}
            self.roots = [*(root for root in self.roots if id(root) not in below), x]
            self.covered |= below
            self._note_frames(sys._getframe(2))

    def report(self) -> None:
        """Abandon the trace, and raise an error, if objects were captured or an input is lacking."""
        if self.roots or self.lacks_input:
            abandon_trace()
        if self.roots:
            raise CapturedObjects(self.roots, self.running) from None
        if self.lacks_input:
            raise AbsentInput from None

    def _note_frames(self, frame: types.FrameType | None) -> None:
        """Note the code that runs now, up to the frame that watches, with this watch and those around it."""
        running, watch = dict[int, RunningCode](), self
        while frame is not None and watch is not None:
            if frame is watch.frame:
                watch.running |= running
                watch = watch.outer
            else:
                running[id(frame.f_code)] = RunningCode(frame.f_code, frame.f_globals)
                frame = frame.f_back


def notice(x: Any) -> None:
    """Tell the innermost watch of this thread that an object is used; where time counts, ask ``Watch.all`` before."""
    if _thread.watch is not None:
        _thread.watch.notice(x)


def is_captured(x: Any) -> bool:
    """Whether the running trace has noticed an object, so will be made again with it as an input."""
    return _thread.watch is not None and id(x) in _thread.watch.covered


def is_watched() -> bool:
    """Whether this thread runs a trace that is made again when it is abandoned."""
    return _thread.watch is not None


def notice_all(objects: Iterable[Any]) -> None:
    """Tell the innermost watch of this thread, if there is one, that these objects are used."""
    if Watch.all:
        for x in objects:
            notice(x)


def absent_input() -> AbsentInput:
    """The error to raise where a value is read that was not given.

    User code may catch it. So the outermost watch of this thread, that of the call which did not pass the value, raises
    it again.
    """
    watch = _thread.watch
    while watch is not None and watch.outer is not None:
        watch = watch.outer
    if watch is not None:
        watch.lacks_input = True
    return AbsentInput()


def note_running(running: Running) -> None:
    """Note code that ran when a jitted function that is called now was traced."""
    watch = _thread.watch
    while watch is not None:
        watch.running |= running
        watch = watch.outer


# This, `call_lending` and `call_borrowing` are no context managers: Python may handle an interrupt when it enters an
# `__exit__`, which then undoes nothing. In a `finally` clause it handles interrupts only after calls.
def call_watched(f: Callable[..., R], /, *args: Any) -> R:
    """Call ``f``, and watch for captured objects, unless it runs in the trace of its caller (under jax.disable_jit).

    Raises:
      CapturedObjects: when the function returns or fails, if it has captured some.
      AbsentInput: the same, if it has read a value that it was not given.
    """
    if current_trace() is _thread.caller:
        return f(*args)
    watch = Watch(_thread.watch, sys._getframe(1))
    try:
        _thread.watch = watch
        Watch.all.append(watch)
        out = f(*args)
    except BaseException as error:
        abandon_trace()
        if isinstance(error, Exception | CapturedObjects | AbsentInput):  # an interrupt is handed on
            watch.report()
        raise
    else:
        watch.report()
        return out
    finally:
        _thread.watch = watch.outer
        if watch in Watch.all:
            Watch.all.remove(watch)


def call_unwatched(f: Callable[..., R], /, *args: Any) -> R:
    """Call ``f``, which uses only objects of the library itself, without the watch of this thread."""
    watch = _thread.watch
    try:
        _thread.watch = None
        return f(*args)
    finally:
        _thread.watch = watch


# --- lending and borrowing ------------------------------------------------------------------------------------------


def call_lending(lender: object, objects: Sequence[Any], f: Callable[..., R], *args: Any) -> R:
    """Call ``f``; a trace for ``lender`` may meanwhile borrow these objects, given by row."""
    outer = _thread.loan, _thread.caller
    try:
        _thread.loan, _thread.caller = (lender, objects), current_trace()
        return with_room(f, *args)
    finally:
        _thread.loan, _thread.caller = outer


def borrowable(lender: object) -> Sequence[Any]:
    """The objects, by row, that a trace for ``lender`` may borrow now; none if another one is lending."""
    loan = _thread.loan
    return loan[1] if loan is not None and loan[0] is lender else ()


class Loans:
    """The objects that are borrowed now, in all threads."""

    lock = threading.RLock()  # held by the thread that borrows
    now: tuple[int, tuple[TraceRef, ...]] = 0, ()  # that thread, and its traces that have borrowed
    saved: Mapping[int, tuple] = MappingProxyType({})  # by the ids of objects, what they are outside of these traces


def is_lent_elsewhere(trace: TraceRef) -> bool:
    """Whether objects that belong to ``trace`` are live ones that a trace of another thread has borrowed."""
    thread, traces = Loans.now
    return trace in traces and thread != threading.get_ident()


def is_live(trace: TraceRef) -> bool:
    """Whether objects that belong to ``trace`` are live ones, of top level, also while a trace has borrowed them."""
    return trace is None or trace in Loans.now[1]


def contents_and_marks(node: Any) -> tuple[Any, Any]:
    """The contents and marks of a node; those outside of the trace, if another thread has borrowed it."""
    if node._nnx_trace is not None and is_lent_elsewhere(node._nnx_trace):
        saved = Loans.saved.get(id(node))
        if saved is not None:  # else it was given back in the meantime
            return saved[1], saved[2]["_nnx_marks"]
    return node._nnx_contents(), node._nnx_marks


def wait_for_loans() -> None:
    """Wait until no other thread borrows."""
    with Loans.lock:
        pass


def call_borrowing(objects: Sequence[Any], f: Callable[..., R], *args: Any, wait: bool = False) -> R:
    """Call ``f`` while live objects belong to the running trace; afterwards they are exactly as before.

    Raises:
      Occupied: if another thread borrows, unless this one is to ``wait``.
    """
    if not objects:
        return f(*args)
    (acquired,) = map(Loans.lock.acquire, (wait,))  # Python handles no interrupt between a step and `=`
    if not acquired:
        raise Occupied(())
    try:
        ensure_stack()  # for `_restore`
        saved = [x._nnx_save() for x in objects]
        trace, outer, lent, before = current_trace(), _thread.borrowed, Loans.now, Loans.saved
        try:
            Loans.saved = {**dict(zip(map(id, objects), saved, strict=True)), **before}
            _thread.borrowed = (*outer, *objects)
            Loans.now = threading.get_ident(), (*lent[1], trace)
            for x in objects:
                x._nnx_join(trace)
            return f(*args)
        finally:
            try:
                _restore(objects, saved)
            except BaseException:  # an interrupt
                _restore(objects, saved)
                raise
            finally:
                _thread.borrowed, Loans.now, Loans.saved = outer, lent, before
    finally:
        Loans.lock.release()


def _restore(objects: Sequence[Any], saved: Sequence[tuple]) -> None:
    for x, state in zip(objects, saved, strict=True):
        x._nnx_restore(state)
    if len(sys._current_frames()) > 1:  # another thread may have written before `saved`, and noted it before now
        for x in objects:
            x._nnx_changed()


def all_borrowed() -> tuple[Any, ...]:
    """The live objects that all running traces of this thread have borrowed."""
    return _thread.borrowed
