"""Which trace of JAX is running, under the name that flax.nnx has for it."""

from ..core.trace_state import TraceState as TraceState
from ..core.tracing import current_trace as current_jax_trace  # noqa: F401
