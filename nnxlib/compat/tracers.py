"""Which trace of JAX is running, under the name that flax.nnx has for it."""

from __future__ import annotations

from ..core.tracing import TraceRef
from ..core.tracing import current_trace as current_jax_trace


class TraceState:
    """The trace that was running when this was made; equal to another one of the same trace.

    >>> state = nnx.tracers.TraceState()
    >>> state.is_valid(), jax.eval_shape(lambda: state.is_valid() or jnp.zeros(3)).shape
    (True, (3,))
    """

    __slots__ = ("_trace",)

    def __init__(self):
        self._trace = current_jax_trace()

    @property
    def jax_trace(self) -> TraceRef:
        """A weak reference to the trace; None where nothing was traced."""
        return self._trace

    def is_valid(self) -> bool:
        """Whether that trace is the running one."""
        return self._trace is current_jax_trace()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceState) and self._trace is other._trace

    def __hash__(self) -> int:
        return hash(self._trace)

    def __repr__(self) -> str:
        return f"TraceState(jax_trace={self._trace!r})"
