"""Which trace is running: the one file that touches what differs between JAX versions.

A *trace* is JAX's record of a function while it runs on tracers. An object remembers the trace it was made under
(``None`` at top level, else a weak reference, so that no live object keeps a trace alive), and may only be written
while that very trace is current: anything else would let a tracer outlive its trace.
"""

from __future__ import annotations

import weakref

import jax

# jax.extend.core.get_opaque_trace_state answers the same question, but allocates an object a call and compares in
# Python (0.6 us against 0.07 us); every attribute write of every Module asks it.
from jax._src import core as _core

# The mesh of a `with mesh:` block; JAX deprecates the block, but offers no other way to see its mesh.
from jax._src.mesh import thread_resources as _thread_resources
from jax.core import Tracer as Tracer

# The same function as jax.extend.core's, whose import takes 25 ms: it loads Pallas.
jaxpr_as_fun = _core.jaxpr_as_fun

TraceRef = weakref.ref | None

_context = _core.trace_ctx
_eval_trace = _core.eval_trace


def current_trace() -> TraceRef:
    """Return a weak reference to the running trace, ``None`` at top level; the same object for the same trace."""
    trace = _context.trace
    return None if trace is _eval_trace or trace is None else trace._weakref


def at_top_level() -> bool:
    """Whether no JAX transformation is running in this thread."""
    trace = _context.trace
    return trace is _eval_trace or trace is None


def in_current_trace(value: object) -> bool:
    """Whether ``value`` is a tracer of the running trace itself, not of one around it."""
    return isinstance(value, Tracer) and value._trace is _context.trace


def current_mesh() -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """The mesh of the context: of a ``shard_map``, ``jax.set_mesh`` or a ``with mesh:`` block; None without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = _thread_resources.env.physical_mesh
    return None if mesh.empty else mesh
