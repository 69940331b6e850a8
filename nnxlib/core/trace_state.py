"""The trace that an object belongs to, and whether it is being initialised, as views that can also be written.

flax.nnx keeps both in hidden objects, ``x._trace_state`` and ``node._pytree__state``. Libraries that build Modules in
a shape inference, of which only shapes come out, give what they have made to the trace around it: they write to these.
"""

from __future__ import annotations

from typing import Any

from .tracing import TraceRef, current_trace

_INITIALIZING = "_pytree__initializing"


class TraceState:
    """The trace that was running when this was made; two of the same trace are equal.

    As ``variable._trace_state`` it is the trace that the Variable or node belongs to, the only one that may write it.

    >>> state = nnx.tracers.TraceState()
    >>> state.is_valid(), jax.eval_shape(lambda: state.is_valid() or jnp.zeros(3)).shape
    (True, (3,))
    """

    __slots__ = ("_owner", "_trace")

    def __init__(self, owner: Any = None, /):
        self._owner, self._trace = owner, current_trace()

    @property
    def jax_trace(self) -> TraceRef:
        """A weak reference to the trace; None where nothing was traced."""
        return self._trace if self._owner is None else self._owner._nnx_trace

    def _give(self, trace: TraceRef) -> None:
        if self._owner is None:
            self._trace = trace
        else:
            self._owner._nnx_give(trace)

    _jax_trace = property(lambda self: self.jax_trace, _give)

    def is_valid(self) -> bool:
        """Whether that trace is the running one."""
        return self.jax_trace is current_trace()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceState) and self.jax_trace is other.jax_trace

    def __hash__(self) -> int:
        return hash(self.jax_trace)

    def __repr__(self) -> str:
        return f"TraceState(jax_trace={self.jax_trace!r})"


class PytreeState:
    """Whether a node is being initialised; without a node, what a new one starts with.

    A node that is being initialised has an attribute that says so, so that jitted functions are traced anew for it.
    """

    __slots__ = ("_initializing_", "_owner")

    def __init__(self, initializing: bool = False, owner: Any = None):
        self._owner, self._initializing_ = owner, initializing

    @property
    def initializing(self) -> bool:
        return self._initializing_ if self._owner is None else _INITIALIZING in self._owner._nnx_contents()

    def _initialize(self, initializing: bool) -> None:
        if self._owner is None:
            self._initializing_ = initializing
        elif initializing:
            setattr(self._owner, _INITIALIZING, True)
        elif self.initializing:
            delattr(self._owner, _INITIALIZING)

    _initializing = property(lambda self: self.initializing, _initialize)

    @property
    def trace_state(self) -> TraceState:
        return TraceState(self._owner)

    _trace_state = trace_state

    def __eq__(self, other: object) -> bool:  # a PytreeState may be an attribute, and so part of the structure
        return isinstance(other, PytreeState) and self.initializing == other.initializing

    def __hash__(self) -> int:
        return hash(PytreeState)

    def __repr__(self) -> str:
        return f"PytreeState(initializing={self.initializing})"
