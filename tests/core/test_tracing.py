"""Which trace is running, and whose frames are shown, on every supported version of JAX."""

import contextlib
import gc
import inspect
import pathlib
import resource
import threading
import traceback
import weakref

import jax
import jax.extend
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.jet import jet
from jax.interpreters import mlir

import nnxlib as nnx
import nnxlib.compat.flax
from nnxlib.core.errors import ArgumentError
from nnxlib.core.tracing import EAGER as EAGER_TRACE
from nnxlib.core.tracing import Tracer, at_top_level, current_trace, in_current_trace, running_trace, runs_eagerly
from tests.properties.test_matrix import EAGER, LOOPS

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
    "jet": lambda f: jet(f, (1.0,), ((1.0,),)),
}


AT_ONCE = ("grad", "vmap", "jvp", "vjp", "linearize")  # without a program: each operation computes at once


@pytest.mark.parametrize("name", TRANSFORMS)
def test_operations_run_eagerly_unless_a_program_is_made(name):
    """Whatever transforms them, and in whatever order."""
    seen = []

    def f(x):
        seen.append(runs_eagerly())
        return x * 1.0

    def transformed(x):
        TRANSFORMS[name](lambda x: f(x))  # a new one: JAX keeps traces by function
        return x

    assert runs_eagerly()
    transformed(1.0)
    assert set(seen) == {name in AT_ONCE}
    seen.clear()
    jax.jit(transformed)(1.0)
    jax.grad(jax.jit(transformed))(1.0)
    assert set(seen) == {False}
    assert runs_eagerly()


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


# --- frames ---------------------------------------------------------------------------------------------------------


class Failing(nnx.Module):
    def __init__(self):
        self.layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(0))]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def forward(model, other, x):
    return (model(x).sum(-1),)


def train_step(model, x):
    return nnx.grad(lambda model: model(x).sum())(model)


def raised(f, *args):
    with pytest.raises(Exception) as caught:  # which error it is, is not the point
        f(*args)
    return caught.value


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


LIBRARY = str(pathlib.Path(nnx.__file__).parent)
X = jnp.ones((4, 4, 4))


@pytest.mark.parametrize("name", [*EAGER, *LOOPS])
def test_frames_of_the_library_are_hidden(name):
    """An error in a user's function, under any transform: the user's frames, and the last is where it was raised."""
    model = nnx.vmap(lambda key: Failing(), axis_size=4)(None) if name in ("vmap", "scan over an axis") else Failing()
    error = raised({**EAGER, **LOOPS}[name](forward), model, nnx.Dict(), X)
    assert not [file for file in files(error) if file.startswith(LIBRARY)]
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-2:] == ["forward", "__call__"]
    assert any("layers[1] (Linear 3->4), input float32[" in note for note in error.__notes__)


def test_the_traceback_of_a_training_step():
    """What the user reads holds no file of nnxlib, and no frame of JAX; nor does that of an eager call."""
    for f in (nnx.jit(train_step), train_step, lambda model, x: model(x)):
        error = raised(f, Failing(), X)
        text = "".join(traceback.format_exception(error))
        assert LIBRARY not in text
        assert str(pathlib.Path(jax.__file__).parent) not in text
        assert "x = layer(x)" in text
        assert "in layers[1] (Linear 3->4), input float32[4, 4, 4]" in text


WITHOUT_A_TRANSFORM = {
    "Linear": lambda m: nnx.Linear(2, 3, rngs=0),
    "a float": lambda m: nnx.Linear(2, 1.5, rngs=nnx.Rngs(0)),
    "MultiHeadAttention": lambda m: nnx.MultiHeadAttention(3, 5, rngs=nnx.Rngs(0)),
    "Rngs": lambda m: nnx.Rngs("a"),
    "Optimizer": lambda m: nnx.Optimizer(m, None),
    "EMA": lambda m: nnx.EMA(m, 2.0),
    "max_pool": lambda m: nnx.max_pool(jnp.ones(3), (2, 2)),
    "metrics": lambda m: nnx.metrics.Average().update(other=1),
    "MultiMetric": lambda m: nnx.MultiMetric(loss=nnx.metrics.Average("loss")).update(other=1),
    "tabulate": lambda m: nnx.tabulate(m, jnp.ones(7)),
    "add_lora": lambda m: nnx.add_lora(m, 2, filter=nnx.PathContains("absent"), rngs=nnx.Rngs(0)),
    "path_of": lambda m: nnx.path_of(m, nnx.Param(1)),
    "split": lambda m: nnx.split(m, nnx.BatchStat),
    "split of compat": lambda m: nnxlib.compat.flax.split(m, nnx.BatchStat),
}


@pytest.mark.parametrize("name", WITHOUT_A_TRANSFORM)
def test_frames_of_the_library_are_hidden_in_constructors_and_helpers(name):
    """The last frame is the user's own call."""
    error = raised(WITHOUT_A_TRANSFORM[name], nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert not [file for file in files(error) if file.startswith(LIBRARY)]


@pytest.mark.parametrize("name", ["lower", "trace", "eval_shape"])
def test_frames_of_the_library_are_hidden_ahead_of_time(name):
    error = raised(getattr(nnx.jit(forward), name), Failing(), nnx.Dict(), X)
    assert not [file for file in files(error) if file.startswith(LIBRARY)]


def test_constructors_keep_their_signature():
    assert list(inspect.signature(nnx.Linear).parameters)[:3] == ["in_features", "out_features", "use_bias"]
    with pytest.raises(TypeError, match=r"Linear\.__init__\(\) missing 1 required keyword-only argument: 'rngs'"):
        nnx.Linear(2, 3)


def test_operators_of_arrays_are_no_frames_of_the_user():
    """Of a jitted and of an eager function: JAX takes their file for the user's own."""
    for f in (nnx.jit(lambda layer, x: x + layer(x)), lambda seq, x: seq(x)):
        error = raised(f, nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), lambda x: x + jnp.ones(5)), X)
        assert {pathlib.Path(file).name for file in files(error)} == {"test_tracing.py"}


def test_what_ends_a_trace_of_the_engine_is_not_shown():
    """A closure is traced twice, and a shape that makes a function read more again: the user sees their own error."""
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def grows(layer, x):
        if len(x) > 2:
            x = layer(x)
            raise ValueError("too long")
        return x

    jitted = nnx.jit(grows)
    jitted(layer, jnp.ones((2, 2)))
    jitted(layer, jnp.ones((2, 2)))
    for error in (
        raised(jitted, layer, jnp.ones((3, 2))),
        raised(nnx.jit(lambda x: grows(layer, x)), jnp.ones((3, 2))),
    ):
        assert "".join(traceback.format_exception(error)).count("Traceback") == 1


def test_errors_of_the_library_itself():
    """They end where the user called it."""
    error = raised(nnx.jit(lambda x: x), "text")
    assert isinstance(error, ArgumentError)
    assert {pathlib.Path(file).name for file in files(error)} == {"test_tracing.py"}
    error = raised(lambda: nnx.scan(lambda x: x, in_axes=(nnx.Carry,), out_axes=0))
    assert {pathlib.Path(file).name for file in files(error)} == {"test_tracing.py"}


def test_the_switch_of_jax_shows_all_frames():
    """`jax_traceback_filtering`: "off" shows the library's frames, "tracebackhide" marks them."""
    before = jax.config.jax_traceback_filtering
    try:
        jax.config.update("jax_traceback_filtering", "off")
        shown = files(raised(nnx.jit(train_step), Failing(), X))
        for part in ("jit.py", "calls.py", "grad.py", "linear.py"):
            assert any(file.startswith(LIBRARY) and file.endswith(part) for file in shown)
        jax.config.update("jax_traceback_filtering", "tracebackhide")
        error = raised(train_step, Failing(), X)
        hidden = [f.f_locals.get("__tracebackhide__") for f, _ in traceback.walk_tb(error.__traceback__)]
        library = [f.f_code.co_filename.startswith(LIBRARY) for f, _ in traceback.walk_tb(error.__traceback__)]
        assert all(hide for hide, is_ours in zip(hidden, library, strict=True) if is_ours)
        assert not hidden[0]
        jax.config.update("jax_traceback_filtering", "remove_frames")
        assert not [file for file in files(raised(nnx.jit(train_step), Failing(), X)) if file.startswith(LIBRARY)]
    finally:
        jax.config.update("jax_traceback_filtering", before)


def test_operations_have_the_line_of_the_user():
    """As those of jax.numpy do: the source of an operation of a layer is the call of the layer."""
    model = Failing()
    model.layers.pop()
    text = nnx.jit(lambda m, x: m(x)).lower(model, X).as_text(debug_info=True)
    assert "test_tracing.py" in text
    assert "linear.py" not in text


REFUSED = {
    "update": lambda m: nnx.update(m, {"none": jnp.ones(2)}),
    "merge": lambda m: nnx.merge(nnx.graphdef(m), {}),
    "split": lambda m: nnx.split(m, nnx.BatchStat),
    "pop": lambda m: nnx.pop(m, lambda path, x: 1 / 0),
    "map": lambda m: nnx.map(lambda path, x: 1 / 0, m),
    "an optimizer": lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param).update(m, {}),
    "an average": lambda m: nnx.EMA(m, 0.9).update({}),
}


@pytest.mark.parametrize("act", REFUSED.values(), ids=REFUSED)
def test_errors_of_plain_functions_end_in_the_line_of_the_user(act):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises((nnx.errors.NnxError, ZeroDivisionError)) as caught:
        act(model)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert {frame.filename for frame in frames} == {__file__}


def calls_at_all_depths(x):
    """Return ``x``, and note the most page faults of 1,000 calls of a function, at any of 300 depths of the stack."""

    def faults():
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    def function(a=0, b=0, c=0, d=0, e=0, f=0, g=0, h=0, i=0, j=0, k=0, l=0, m=0, n=0, o=0, p=0):
        pass  # with a frame that is larger than that of `most_from`, so it meets the end of each piece

    def most_from(depth):
        before = faults()
        for _ in range(1000):
            function()
        here = faults() - before
        return max(here, most_from(depth - 1)) if depth else here

    MOST.append(most_from(300))
    return x


MOST: list[int] = []


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="only Linux counts the page faults of a thread")
@pytest.mark.parametrize(
    "run",
    [
        lambda f: nnx.jit(f)(1.0),
        lambda f: nnx.jit(f).lower(1.0),
        lambda f: nnx.eval_shape(f, 1.0),
        lambda f: nnx.eval_shape(lambda: nnx.Param(f(jnp.ones(2)))),
        lambda f: nnx.scan(lambda c, x: (c, f(x)))(0.0, jnp.ones(2)),
        lambda f: nnx.cond(True, f, lambda x: x, 1.0),
        lambda f: nnx.fori_loop(0, 3, lambda i, x: f(x), 1.0),
        lambda f: nnx.grad(f)(1.0),
    ],
    ids=["jit", "lower", "eval_shape", "eval_shape of a Module", "scan", "cond", "fori_loop", "grad"],
)
def test_a_trace_takes_no_memory_for_frames_again_and_again(run):
    """Up to Python 3.13 it did where a piece of the memory for frames ends: 1,000 faults for as many calls."""
    MOST.clear()
    run(calls_at_all_depths)
    assert MOST
    assert max(MOST) < 100


@pytest.mark.parametrize("kind", [nnx.Param, nnx.List, nnx.Dict])
def test_a_constructor_that_is_called_again_is_a_write(kind):
    """So it leaves no tracer in an object from outside of the trace, and the object is as it was."""
    x = jnp.ones(2)
    make = {nnx.Param: lambda x: x, nnx.List: lambda x: [x], nnx.Dict: lambda x: {"a": x}}[kind]
    live = kind(make(x))
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda x: live.__init__(make(x)))(x)
    assert jax.tree.leaves(live)[0] is x
    live.__init__(make(2 * x))
    assert jax.tree.leaves(live)[0].tolist() == [2, 2]


def test_a_model_that_the_rule_of_a_primitive_unflattens_is_not_captured():
    """Such a rule runs between traces; with parameters that are new in each trace, JAX calls it in each."""
    primitive = jax.extend.core.Primitive("apply")
    eager = []

    def apply(*leaves, tree, tag):
        model, x = jax.tree.unflatten(tree, leaves)
        return model(x)

    @primitive.def_abstract_eval
    def types(*leaves, tree, tag):
        eager.append(running_trace() is EAGER_TRACE)
        model, x = jax.tree.unflatten(tree, leaves)
        out = jax.eval_shape(lambda model, x: model(x), model, x)
        return jax.core.ShapedArray(out.shape, out.dtype)

    mlir.register_lowering(primitive, mlir.lower_fun(apply, multiple_results=False))

    @nnx.jit
    def run(model, x):
        leaves, tree = jax.tree.flatten((model, x))
        return primitive.bind(*leaves, tree=tree, tag=object())

    model, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    try:
        out = run(model, x)
    except nnx.errors.TraceContextError:
        if eager[0]:
            pytest.skip("this version of JAX calls the rule as if nothing were traced")
        raise
    assert jnp.allclose(out, model(x))
