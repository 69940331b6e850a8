"""Which trace is running, on every supported version of JAX."""

import contextlib
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest

from nnxlib.core.tracing import Tracer, at_top_level, current_trace, in_current_trace

TRANSFORMS = {
    "jit": lambda f: jax.jit(f)(1.0),
    "grad": lambda f: jax.grad(f)(1.0),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "jvp": lambda f: jax.jvp(f, (1.0,), (1.0,)),
    "vjp": lambda f: jax.vjp(f, 1.0),
    "linearize": lambda f: jax.linearize(f, 1.0),
    "eval_shape": lambda f: jax.eval_shape(f, 1.0),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(1.0),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.ones(2)),
    "cond": lambda f: jax.lax.cond(True, f, lambda x: x, 1.0),
    "while_loop": lambda f: jax.lax.while_loop(lambda x: x < 2, lambda x: f(x) + 1, 1.0),
    "map": lambda f: jax.lax.map(f, jnp.ones(2)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(1.0),
}


def test_at_top_level():
    """No trace runs outside of transforms, nor in an eager operation."""
    assert current_trace() is None
    assert at_top_level()
    jnp.ones(2) + 1
    assert current_trace() is None


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_each_transform_is_a_trace(transform):
    """Inside there is one trace, the same whenever asked; afterwards it is gone."""
    seen = []

    def f(x):
        seen.append((current_trace() is current_trace(), current_trace() is None, at_top_level()))
        return x * 1.0

    transform(f)
    assert set(seen) == {(True, False, False)}
    assert (current_trace(), at_top_level()) == (None, True)


def test_nested_transforms_are_different_traces():
    """The trace changes on the way in and is the same again on the way out."""

    @jax.jit
    def f(x):
        outer = current_trace()
        inner = []
        jax.grad(lambda y: inner.append(current_trace()) or y)(x)
        jax.jit(lambda y: inner.append(current_trace()) or y)(x)
        assert all(trace is not outer for trace in inner)
        assert inner[0] is not inner[1]
        assert current_trace() is outer
        return x

    f(1.0)


def test_a_transform_that_raises_leaves_no_trace():
    """After an exception the thread is at top level again."""
    with contextlib.suppress(ZeroDivisionError):
        jax.jit(lambda x: 1 / 0)(1.0)
    assert current_trace() is None
    assert at_top_level()


def test_the_reference_does_not_keep_a_trace_alive():
    """What current_trace returns is weak: when the transform ends, it is dead."""
    kept = []
    jax.jit(lambda x: kept.append(current_trace()) or x)(1.0)
    gc.collect()
    assert isinstance(kept[0], weakref.ref)
    assert kept[0]() is None


def test_disable_jit_runs_at_top_level():
    """Under jax.disable_jit a jitted function is eager code."""
    seen = []
    with jax.disable_jit():
        jax.jit(lambda x: seen.append(current_trace()) or x)(1.0)
    assert seen == [None]


def test_each_thread_has_its_own():
    """A trace in one thread is not seen by another."""
    inside, done, seen = threading.Event(), threading.Event(), []

    def other():
        inside.wait(10)
        seen.append((current_trace(), at_top_level()))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def f(x):
        inside.set()
        assert done.wait(10)
        return x

    jax.jit(f)(1.0)
    thread.join()
    assert seen == [(None, True)]


def test_tracers_of_this_trace():
    """in_current_trace tells tracers of the running trace from arrays and from tracers around it."""

    @jax.jit
    def f(x):
        assert in_current_trace(x)
        assert isinstance(x, Tracer)
        assert not in_current_trace(jnp.ones)
        jax.grad(lambda y: [None for _ in [in_current_trace(x)] if not _] and y)(1.0)
        return x

    f(jnp.ones(()))
    assert not in_current_trace(jnp.ones(()))
    assert not in_current_trace("text")
