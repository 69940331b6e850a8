"""Identity: what nodes and Variables have in common, as objects that the library knows by their identity.

Each belongs to a trace, carries the stamps of what describes it, and can be restored to what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .stamps import Stamps, invalidate, stamping
from .trace_state import TraceState
from .tracing import TraceRef

A = TypeVar("A")
I = TypeVar("I", bound="Identified")

_set = object.__setattr__


class Identified:
    """Base class of what has an identity in the object graph: Variables and nodes.

    It belongs to the trace under which it was made. A trace that has captured it may borrow it (closures.py): what it
    is and holds is saved before that, and restored afterwards.
    """

    __slots__ = ()

    _nnx_stamps: Stamps  # of the cached layouts that describe it
    _nnx_table: Any  # of what is below it, if it was packed as a root (tables.py)
    _nnx_saved: tuple[str, ...]  # its slots

    _trace_state = property(TraceState, lambda self, state: self._nnx_give(state.jax_trace))

    def _nnx_children(self) -> Iterator[tuple[Any, Any]]:
        """Yield each (key, value) that it holds, static ones too, in insertion order; nothing for a Variable."""
        return iter(())

    def _nnx_contents(self) -> dict[Any, Any]:
        """A new dict of what :meth:`_nnx_children` yields."""
        return dict(self._nnx_children())

    def _nnx_fill(self, items: dict[Any, Any]) -> None:
        """Replace the whole contents, without checks: for a node that no user has seen yet, and for commit."""

    def _nnx_changed(self) -> None:
        """Invalidate its stamps, since its structure has changed, and (usually) remove them."""
        if stamps := self._nnx_stamps:
            invalidate(stamps, self)
            _lose(self, stamps)

    def _nnx_join(self, trace: TraceRef) -> None:
        """Begin to belong to a trace, in which changes must not invalidate what describes the object outside.

        A Variable gets a cell of the trace from the borrower; until then other threads read the present one.
        """
        _set(self, "_nnx_stamps", ())
        _set(self, "_nnx_table", None)

    def _nnx_save(self) -> tuple:
        return type(self), self._nnx_contents(), {name: getattr(self, name) for name in self._nnx_saved}

    def _nnx_restore(self, state: tuple) -> None:
        kind, items, slots = state
        if type(self) is not kind:
            _set(self, "__class__", kind)
        self._nnx_fill(items)
        seen_inside = self._nnx_stamps  # from other threads that described the object as the trace had changed it
        for name, value in slots.items():
            _set(self, name, value)
        invalidate(seen_inside, self)


def _lose(x: Identified, stamps: Stamps) -> None:
    """Remove stamps that have been invalidated; not while another thread adds a stamp, which could be lost."""
    (acquired,) = map(stamping.acquire, (False,))  # Python handles no interrupt between a step and `=`
    try:
        if acquired and x._nnx_stamps is stamps:  # else another thread has added a stamp, which is still valid
            _set(x, "_nnx_stamps", ())
    finally:
        if acquired:
            stamping.release()


def change(x: Any, write: Callable[..., A], *args: Any) -> A:
    """Call ``write(*args)``, which changes the structure of a node or Variable, and invalidate its stamps.

    They are invalidated after the write, since another thread may describe the object until then; and once more if an
    exception, such as an interrupt, arrives in between. They are also invalidated before the write, which shows that
    the stack has room for doing so afterwards.
    """
    x._nnx_changed()
    try:
        found = write(*args)
        x._nnx_changed()
        return found
    except BaseException:  # it may also have written before it failed
        x._nnx_changed()
        raise


def with_slots_of(other: Any, new: I) -> I:
    """A new Variable or node, with the slots of another one."""
    for name in new._nnx_saved:
        _set(new, name, getattr(other, name))
    return new
