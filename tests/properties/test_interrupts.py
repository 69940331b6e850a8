"""Ctrl-C may arrive at any time: what it interrupts has been done or not, and every later call is right.

Python looks out for an interrupt where a function is entered, after it has called another, and where a loop goes round.
Each test runs something again and again, and interrupts it at another of these places each time.
"""

import _thread
import dis
import functools
import pathlib
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import core as jax_core

import nnxlib as nnx
from nnxlib.core import calls, closures, stamps
from tests.properties.compare import assert_no_tracer, assert_same

if sys.version_info < (3, 12):
    pytest.skip("sys.monitoring is new in Python 3.12", allow_module_level=True)

# The interrupt may meet a callback of the collector, which Python does not let it leave.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# --- interrupting ---------------------------------------------------------------------------------------------------

LIBRARY = str(pathlib.Path(nnx.__file__).parent)
TOOL = 4  # any number that is free
monitoring = sys.monitoring


class Interrupt(BaseException):
    """As KeyboardInterrupt, which pytest takes for its own."""


KEPT = []  # the last one, with its traceback, as a notebook keeps it


class Pending:
    """When the last reference to it is gone, there is a Ctrl-C that Python has not handled yet."""

    __del__ = staticmethod(_thread.interrupt_main)


@functools.cache
def places(code):
    """The offsets of the instructions of the library that look out for an interrupt, or enter a function that does."""
    if not code.co_filename.startswith(LIBRARY):
        return frozenset()
    kinds = "CALL", "JUMP_BACKWARD", "BEFORE_WITH", "LOAD_SPECIAL"
    return frozenset([x.offset for x in dis.get_instructions(code) if x.opname.startswith(kinds)])


def passed(f, last=-1, names=None):
    """Call `f`; returns how many places it passes (in functions of these names). It is interrupted at number `last`."""
    count = 0

    def reach(code, offset):
        nonlocal count
        if offset not in places(code) or (names is not None and code.co_name not in names):
            return monitoring.DISABLE
        count += 1
        if count == last + 1:
            monitoring.set_events(TOOL, 0)
            _ = Pending()  # until this function, which is not to be interrupted itself, has returned
        return None

    def handle(*_):
        raise Interrupt

    former = signal.signal(signal.SIGINT, handle)
    monitoring.use_tool_id(TOOL, "interrupts")
    monitoring.register_callback(TOOL, monitoring.events.INSTRUCTION, reach)
    monitoring.restart_events()
    try:
        try:
            monitoring.set_events(TOOL, monitoring.events.INSTRUCTION)
            f()
        finally:
            monitoring.set_events(TOOL, 0)
        for _ in range(2):  # where it goes round, Python looks out
            pass
    except Interrupt as error:
        KEPT[:] = [error]
    finally:
        monitoring.free_tool_id(TOOL)
        signal.signal(signal.SIGINT, former)
    return count


def spread(count, most):
    """Up to `most` numbers below `count`; all of them if there are no more."""
    return range(0, count, -(-count // most))


def is_free(lock):
    """Whether another thread can take a lock."""
    found = []

    def take():
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def assert_idle():
    """No lock is held, and nothing is left of a trace."""
    for lock in (stamps.stamping, closures.Loans.lock):
        assert is_free(lock)
    left = [*closures.Watch.all, *closures.Loans.now[1], *vars(closures._thread).values()]
    assert not any([*left, calls._active.listener, *calls.following])


# --- writes ---------------------------------------------------------------------------------------------------------


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.rate = 2


class OtherLayer(Layer):
    pass


class Watching(nnx.Module):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        super().__setattr__("count", value)


class Net(nnx.Module):
    def __init__(self):
        self.scale = 1
        self.array = jnp.ones(2)
        self.declared = nnx.static(1)
        self.first = Layer()
        self.tagged = nnx.Param(jnp.ones(1), tag="t")
        self.layers = [Layer(), nnx.static(1), jnp.ones(1)]
        self.heads = {"a": Layer(), "b": nnx.static(1)}
        self.watching = Watching()
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


seen = nnx.jit(lambda m: nnx.clone(m))


def known_net():
    """A model that has been called and flattened, so that its structure is known."""
    m = Net()
    for _ in range(2):
        seen(m)
    jax.tree.flatten(m)
    return m


def assert_seen(m):
    """What is known of the structure of a model is as it is now."""
    assert_same(seen(m), m)
    assert nnx.graphdef(m) == nnx.graphdef(nnx.clone(m))
    assert jax.tree.structure(m) == jax.tree.structure(nnx.clone(m))
    assert_idle()


def state_of(m):
    """What tells two states of a model apart: its structure and its values."""
    graphdef, _, state = nnx.split(m, nnx.RngState, ...)
    return graphdef, jax.tree.map(lambda x: np.asarray(x).tolist(), nnx.to_pure_dict(state))


@nnx.jit
def rewrite(m):
    m.scale, m.array, m.first.w.value = m.scale + 1, m.array + 1, m.first.w + 1
    m.layers.reverse()
    m.tagged.set_metadata(tag="u")


# What is done at once: all of it, or nothing.
WRITES = {
    "static": lambda m: setattr(m, "scale", 3),
    "new attribute": lambda m: setattr(m, "added", jnp.ones(1)),
    "array": lambda m: setattr(m, "array", jnp.zeros(2)),
    "Variable": lambda m: setattr(m, "tagged", nnx.Param(jnp.zeros(1), tag="t")),
    "Module": lambda m: setattr(m, "first", OtherLayer()),
    "list": lambda m: setattr(m, "layers", [Layer(), 2]),
    "declaration": lambda m: setattr(m, "scale", nnx.static(3)),
    "deletion": lambda m: delattr(m, "declared"),
    "vars": lambda m: vars(m).update(scale=3),
    "class of a Module": lambda m: setattr(m.first, "__class__", OtherLayer),
    "class of a Variable": lambda m: setattr(m.tagged, "__class__", nnx.Cache),
    "metadata": lambda m: m.tagged.set_metadata(tag="u"),
    "no metadata": lambda m: m.tagged.del_metadata("tag"),
    "list append": lambda m: m.layers.append(nnx.static(3)),
    "list insert": lambda m: m.layers.insert(0, Layer()),
    "list extend": lambda m: m.layers.extend([Layer(), 3]),
    "list item": lambda m: m.layers.__setitem__(0, nnx.static(3)),
    "list slice": lambda m: m.layers.__setitem__(slice(0, 2), [Layer(), 3, 4]),
    "list pop": lambda m: m.layers.pop(0),
    "list delete": lambda m: m.layers.__delitem__(1),
    "list sort": lambda m: m.layers.sort(key=lambda x: isinstance(x, int)),
    "list *=": lambda m: m.layers.__imul__(2),
    "dict item": lambda m: m.heads.__setitem__("a", nnx.static(3)),
    "dict attribute": lambda m: setattr(m.heads, "c", Layer()),
    "dict delete": lambda m: m.heads.__delitem__("b"),
    "dict setdefault": lambda m: m.heads.setdefault("c", 3),
    "eval": lambda m: m.drop.eval(),
    "update": lambda m: nnx.update(m, {"first": {"w": jnp.zeros(2)}, "tagged": jnp.zeros(1)}),
    "jit": rewrite,
}


def assert_made_or_not(make, write):
    """From the last place where it may be interrupted, back to those where nothing has been written yet."""
    before = state_of(make())
    for _ in range(2):  # the second time, all is compiled
        m = make()
        count, after = passed(functools.partial(write, m)), state_of(m)
    made = []
    for at in range(count - 1, -1, -1 - count // 100):
        m = make()
        passed(functools.partial(write, m), at)
        assert state_of(m) in (before, after)
        made.append(state_of(m) == after)
        assert_seen(m)
        if len(made) > 5 and True not in made[-6:]:
            break
    assert made[0]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_that_is_interrupted_is_made_or_not(write):
    assert_made_or_not(known_net, write)


SGD = optax.sgd(0.1, momentum=0.9)


def measured(metric):
    metric.update(values=jnp.ones(2))
    return metric


UPDATES = {  # of what belongs together, also where it is called eagerly
    "parameters, moments and the count of steps": (
        lambda layer: nnx.Optimizer(layer, SGD),
        lambda m: m[1].update(m[0], {"w": jnp.ones(2)}),
    ),
    "averages": (
        lambda layer: nnx.EMA(Net(), 0.5, only=nnx.Param),
        lambda m: m[1].update(jax.tree.map(lambda x: 3 * x, m[1].params)),
    ),
    "total and count": (lambda layer: nnx.metrics.Average(), lambda m: m[1].update(values=jnp.ones(2))),
    "moments and count": (lambda layer: nnx.metrics.Welford(), lambda m: m[1].update(values=jnp.ones(2))),
    "a reset": (lambda layer: measured(nnx.metrics.Welford()), lambda m: m[1].reset()),
}


@pytest.mark.parametrize(("made_for", "write"), UPDATES.values(), ids=UPDATES)
def test_an_update_that_is_interrupted_is_made_or_not(made_for, write):
    def make():
        layer = Layer()
        return nnx.List([layer, made_for(layer)])

    assert_made_or_not(make, write)


# What is done step by step: an interrupt may leave some of it undone.
STEPS = {
    "own __setattr__": lambda m: setattr(m.watching, "scale", 3),
    "dict update": lambda m: m.heads.update(a=1, b=2, c=3),
    "pop": lambda m: nnx.pop(m, nnx.Param),
    "set_attributes": lambda m: m.set_attributes(rate=5),
    "fork": lambda m: m.drop.rngs.fork(),
    "split_rngs": lambda m: nnx.restore_rngs(nnx.split_rngs(m, splits=2)),
    "merge": lambda m: nnx.merge(*nnx.split(m)),
    "write and call": lambda m: (setattr(m, "scale", 3), seen(m), setattr(m, "scale", 1), seen(m)),
    "exchange and call": lambda m: (setattr(m, "tagged", nnx.Param(jnp.zeros(1), tag="t")), seen(m)),
    "write and flatten": lambda m: (setattr(m, "scale", 3), jax.tree.flatten(m)),
}


@pytest.mark.parametrize("run", STEPS.values(), ids=STEPS)
def test_what_was_interrupted_is_seen_as_it_is(run):
    for _ in range(2):
        count = passed(functools.partial(run, known_net()))
    for at in spread(count, 16):
        m = known_net()
        passed(functools.partial(run, m), at)
        assert_seen(m)


# --- a full stack ---------------------------------------------------------------------------------------------------


def with_frames(count, f):
    """Call `f` where the stack has room for so many more frames of Python; returns whether these were enough."""
    frame, depth, limit = sys._getframe(), 0, sys.getrecursionlimit()
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    try:
        sys.setrecursionlimit(depth + 1 + count)
        f()
        return True
    except RecursionError:
        return False
    except ValueError as error:  # of JAX, whose cache found no room to compare two keys
        if "RecursionError" not in str(error):
            raise
        return False
    finally:
        sys.setrecursionlimit(limit)
        if not jax_core.trace_state_clean():  # JAX 0.9 stays in its own trace if there is no room to leave it
            jax_core.trace_ctx.set_trace(jax_core.eval_trace)
            jax_core.trace_ctx.set_axis_env(jax_core.top_axis_env)


def each_stack(make, run):
    """Run something with room for no frame, for one, and so on until it succeeds; yields each time what it ran on."""
    succeeds, count = False, 0
    while not succeeds:
        x = make()
        succeeds = with_frames(count, functools.partial(run, x))
        yield x
        count += 1


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_that_finds_no_room_on_the_stack_is_not_made(write):
    """Where there is room for the write, there is room for the note of it, too."""
    before = state_of(known_net())
    found = []
    for m in each_stack(known_net, write):
        found.append(state_of(m))
        assert_seen(m)
    assert found[:-1] == [before] * (len(found) - 1)
    assert found[-1] != before


# --- traces ---------------------------------------------------------------------------------------------------------


class Counting(nnx.Module):
    def __init__(self):
        self.w, self.calls = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls.value += 1
        return self.w * x


X = jnp.ones(2)
called = nnx.jit(lambda m: m(X))

# What leaves something for the time of a trace, and has to take it away again.
TRACES = {
    "jit": lambda m: nnx.jit(lambda m: m(X))(m),
    "captured": lambda m: nnx.jit(lambda x: m(x))(X),
    "remat": lambda m: nnx.remat(lambda m: m(X))(m),
    "cond": lambda m: nnx.cond(True, lambda m: m(X), lambda m: 2 * m(X), m),
    "loop in jit": lambda m: nnx.jit(lambda m: nnx.fori_loop(0, 2, lambda _, c: (c[0], c[0](c[1])), (m, X)))(m),
    "eval_shape": lambda m: nnx.eval_shape(lambda: m(X)),
    "capture": lambda m: nnx.capture(lambda m: m(X), nnx.Intermediate)(m),
    "tabulate": lambda m: nnx.tabulate(m, X),
    "donated": lambda m: nnx.jit(lambda m: m(X), donate_argnums=0)(m),
}
TRACING = {"call_watched", "call_lending", "call_borrowing", "call_listening", "call_recording"}


@pytest.mark.parametrize("run", TRACES.values(), ids=TRACES)
def test_an_interrupted_trace_leaves_nothing(run):
    """Not even where it begins or ends, while the traceback is kept, which keeps what was running."""
    for names, most in ((TRACING, 60), (None, 4)):
        for _ in range(2):
            count = passed(functools.partial(run, Counting()), names=names)
        for at in spread(count, most):
            m = Counting()
            passed(functools.partial(run, m), at, names)
            assert_idle()
            assert_no_tracer(m)
            np.testing.assert_array_equal(called(m), X)


@pytest.mark.parametrize("run", TRACES.values(), ids=TRACES)
def test_a_trace_that_finds_no_room_on_the_stack_leaves_nothing(run):
    """What it has lent is taken back, however little room there is."""
    for m in each_stack(Counting, run):
        assert_idle()
        assert_no_tracer(m)
        np.testing.assert_array_equal(called(m), X)


def test_an_interrupt_is_not_taken_for_an_abandoned_trace():
    """A trace that has captured something is made again, but not if Ctrl-C has ended it."""
    traces, registry = [], {"layer": Counting()}

    @nnx.jit
    def call(x):
        out = registry["LAYER".lower()](x)
        traces.append(1)
        if len(traces) == 1:
            raise Interrupt
        return out

    with pytest.raises(Interrupt):
        call(X)
    np.testing.assert_array_equal(call(X), X)
