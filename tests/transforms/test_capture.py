"""nnx.capture: what sow, perturb and method_outputs record comes out, and the Module is as it was."""

import contextlib
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.compat import flax as compat
from nnxlib.core import errors
from nnxlib.transforms.body_checks import BodyError
from tests.properties.compare import assert_same

X = jnp.array([1.0, 2.0])


class Layer(nnx.Module):
    def __init__(self, value):
        self.w = nnx.Param(jnp.full(2, value))
        self.calls = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls += 1
        x = self.perturb("delta", self.w * x)
        self.sow(nnx.Intermediate, "out", x)
        self.sow(nnx.Cache, "total", x.sum(), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
        return x

    def helper(self, x):
        return 2 * self(x)


class Net(nnx.Module):
    def __init__(self):
        self.layers = [Layer(2.0), Layer(3.0)]
        self.tied = self.layers[0]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        self.sow(nnx.Intermediate, "result", x)
        return self.tied(x)


def plain(state):
    """A State as nested dicts of lists."""
    return jax.tree.map(lambda x: np.asarray(x).tolist(), nnx.to_pure_dict(state))


RECORDED = {
    "layers": {0: {"out": ([2, 4], [12, 24])}, 1: {"out": ([6, 12],)}},
    "result": ([6, 12],),
}


FORMS = {
    "callable Module": lambda m: nnx.capture(m, nnx.Intermediate),
    "bound method": lambda m: nnx.capture(m.__call__, nnx.Intermediate),
    "function": lambda m: functools.partial(nnx.capture(lambda m, x: m(x), nnx.Intermediate), m),
    "by keyword": lambda m: lambda x: nnx.capture(lambda x, *, m: m(x), nnx.Intermediate)(x, m=m),
    "decorator": lambda m: functools.partial(nnx.capture(nnx.Intermediate)(lambda m, x: m(x)), m),
    "partial": lambda m: nnx.capture(functools.partial(Net.__call__, m), nnx.Intermediate),
    "partial by keyword": lambda m: (
        lambda x: nnx.capture(functools.partial(lambda m, x: m(x), x=x), nnx.Intermediate)(m)
    ),
    "jitted": lambda m: nnx.jit(nnx.capture(m, nnx.Intermediate)),
    "of a jitted function": lambda m: functools.partial(nnx.capture(nnx.jit(lambda m, x: m(x)), nnx.Intermediate), m),
    "of a jitted Module": lambda m: nnx.capture(nnx.jit(m), nnx.Intermediate),
    "of a jitted method": lambda m: nnx.capture(nnx.jit(m.__call__), nnx.Intermediate),
    "of a jitted partial": lambda m: nnx.capture(nnx.jit(functools.partial(Net.__call__, m)), nnx.Intermediate),
    "of jit_partial": lambda m: nnx.capture(nnx.jit_partial(lambda m, x: m(x), m), nnx.Intermediate),
    "of a remat in a jit": lambda m: nnx.capture(nnx.jit(nnx.remat(m)), nnx.Intermediate),
    "of a closure": lambda m: nnx.capture(lambda x: m(x), nnx.Intermediate),
    "of a jitted closure": lambda m: nnx.capture(nnx.jit(lambda x: m.layers and m(x)), nnx.Intermediate),
    "jitted, of a jitted Module": lambda m: nnx.jit(nnx.capture(nnx.jit(m), nnx.Intermediate)),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_sow_records(form):
    """The output and the recorded State, by path; the Module has its other changes and no recordings, at each call."""
    model = Net()
    captured = FORMS[form](model)
    for calls in (1, 2):
        out, recorded = captured(X)
        assert out.tolist() == [12, 24]
        assert isinstance(recorded, nnx.State)
        assert plain(recorded) == RECORDED
        assert (int(model.layers[0].calls), int(model.layers[1].calls)) == (2 * calls, calls)
        assert not nnx.state(model, nnx.Intermediate)


DECORATORS = {
    "two types": ((nnx.Intermediate, nnx.Cache), {}),
    "outputs alone": ((), {"method_outputs": nnx.Cache}),
    "outputs and a choice": ((nnx.Intermediate,), {"method_outputs": nnx.Cache, "only": Layer}),
    "init": ((nnx.Perturbation,), {"init": nnx.State({"layers": {0: {"delta": nnx.Perturbation(X)}}})}),
    "init alone": ((), {"init": nnx.State({"layers": {0: {"delta": nnx.Perturbation(X)}}})}),
}


@pytest.mark.parametrize("case", DECORATORS)
def test_a_decorator_with_options_does_what_a_call_does(case):
    kinds, options = DECORATORS[case]
    forward = lambda m, x: m(x)
    found = nnx.capture(*kinds, **options)(forward)(Net(), X)
    expected = nnx.capture(forward, *kinds, **options)(Net(), X)
    assert_same(found, expected)


def test_only_the_types_asked_for_are_recorded():
    """What is sown under another type is not recorded at all within a capture."""
    model = Net()
    _, recorded = nnx.capture(model, nnx.Cache)(X)
    assert plain(recorded) == {"layers": {0: {"total": 6 + 36}, 1: {"total": 18}}}
    assert not nnx.state(model, nnx.Intermediate)
    _, intermediates, caches = nnx.capture(model, nnx.Intermediate, nnx.Cache)(X)
    assert plain(intermediates) == RECORDED
    assert plain(caches) == plain(recorded)


def test_a_state_for_each_type():
    """Each recording is in the State of the first type that takes it, subtypes in that of their base."""

    class Special(nnx.Intermediate):
        pass

    class Both(nnx.Module):
        def __call__(self, x):
            self.sow(Special, "special", x)
            self.sow(nnx.Intermediate, "plain", x)
            return x

    found = lambda *kinds: [sorted(state) for state in nnx.capture(Both(), *kinds)(X)[1:]]
    assert found(nnx.Intermediate, Special) == [["plain", "special"], []]
    assert found(Special, nnx.Intermediate) == [["special"], ["plain"]]
    assert found(nnx.Intermediate) == [["plain"]]
    assert found(nnx.Variable) == [[]]


def test_what_was_recorded_before_stays():
    """Recordings made outside of a capture are not in its State, and are kept."""
    model, sown = Net(), lambda path, x: type(x) is nnx.Intermediate
    model(X)
    before = plain(nnx.state(model, sown))
    assert before == RECORDED
    layout = nnx.graphdef(model)
    _, recorded = nnx.capture(model, nnx.Intermediate)(X)
    assert plain(recorded) == RECORDED
    assert plain(nnx.state(model, sown)) == before
    assert nnx.graphdef(model) == layout


def test_variables_that_the_user_has_set_are_no_recordings():
    """Only what sow and perturb have made is taken out; the user's own Variables of the type are there, and written."""

    class Mixed(nnx.Module):
        def __init__(self):
            self.own = nnx.Intermediate(jnp.zeros(()))

        def __call__(self, x):
            self.own += 1
            self.set = nnx.Intermediate(x)
            self.sow(nnx.Intermediate, "sown", x)
            return x

    for wrap in (lambda f: f, nnx.jit):
        model = Mixed()
        _, recorded = wrap(nnx.capture(model, nnx.Intermediate))(X)
        assert plain(recorded) == {"sown": ([1, 2],)}
        assert (model.own.value.item(), model.set.value.tolist(), hasattr(model, "sown")) == (1, [1, 2], False)


def test_an_attribute_after_a_recording_of_the_name():
    """What is known of a recording goes when it is popped: an attribute of that name is the user's own."""
    model = Layer(1.0)
    model(X)
    nnx.pop(model, nnx.Intermediate)
    model.total.value = 0.0
    graphdef = nnx.graphdef(model)
    model.out = nnx.Intermediate(X)
    _, recorded = nnx.capture(lambda m: None, nnx.Intermediate)(model)
    assert plain(recorded) == {}
    del model.out
    assert nnx.graphdef(model) == graphdef


def test_without_capture_sow_keeps_recording():
    """Outside of a capture sow appends, and pop takes the recordings out."""
    model = Net()
    model(X)
    model(X)
    assert len(model.result.value) == 2
    assert len(nnx.pop(model, nnx.Intermediate).result.value) == 2


def test_outputs_of_methods():
    """method_outputs records what each call returned, under the name of the method."""
    _, recorded = nnx.capture(Net(), method_outputs=nnx.Intermediate)(X)
    assert plain(recorded) == {
        "__call__": ([12, 24],),
        "layers": {
            0: {"__call__": ([2, 4], [12, 24]), "out": ([2, 4], [12, 24])},
            1: {"__call__": ([6, 12],), "out": ([6, 12],)},
        },
        "result": ([6, 12],),
    }
    _, recorded = nnx.capture(Layer(2.0).helper, method_outputs=nnx.Intermediate)(X)
    assert set(recorded) == {"helper", "__call__", "out"}
    _, intermediates, outputs = nnx.capture(Layer(2.0), nnx.Intermediate, method_outputs=nnx.Cache)(X)
    assert (set(intermediates), set(outputs)) == ({"out"}, {"__call__", "total"})


def test_perturbations():
    """Gradients of intermediate values: perturbations from one capture are the input of the next."""
    model = Net()
    _, deltas = nnx.capture(model, nnx.Perturbation)(X)
    assert plain(deltas) == {"layers": {0: {"delta": [0, 0]}, 1: {"delta": [0, 0]}}}

    def loss(deltas, m, x):
        out, _, recorded = nnx.capture(m, nnx.Perturbation, nnx.Intermediate, init=deltas)(x)
        return (out**2).sum(), recorded

    grads, recorded = nnx.grad(loss, has_aux=True)(deltas, model, X)
    # out = 2 * (3 * (2 * x + d0) + d1) + d0, and d out / d d0 = 7, d out / d d1 = 2
    np.testing.assert_array_equal(grads.layers[0].delta, 2 * 12 * X * 7)
    np.testing.assert_array_equal(grads.layers[1].delta, 2 * 12 * X * 2)
    assert recorded.result.value[0].tolist() == [6, 12]
    assert not nnx.state(model, nnx.Intermediate)
    assert set(vars(model)) == {"layers", "tied"}


def test_under_raw_jax():
    """Recordings of a live model under raw transforms, when it has nothing else to write."""

    class Quiet(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.full(2, 2.0))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "h", self.w * x)
            return x.sum()

    model, before = Quiet(), Quiet()
    captured = nnx.capture(model, nnx.Intermediate)
    grads, recorded = jax.grad(captured, has_aux=True)(X)
    assert grads.tolist() == [1, 1]
    assert recorded.h.value[0].tolist() == [2, 4]
    assert jax.vmap(captured)(jnp.ones((3, 2)))[1].h.value[0].shape == (3, 2)
    assert jax.jit(captured)(X)[1].h.value[0].tolist() == [2, 4]
    assert_same(model, before)


def test_a_failure_changes_nothing():
    """A forward that raises after sowing leaves no recording."""
    model = Net()
    with pytest.raises(TypeError, match=r"add|multiply|shapes"):
        nnx.capture(lambda m, x: m(x) + m(jnp.ones(3)), nnx.Intermediate)(model, X)
    assert_same(model, Net())
    with pytest.raises(errors.TraceContextError, match="calls"):
        jax.jit(nnx.capture(model, nnx.Intermediate))(X)
    assert_same(model, Net())
    with pytest.raises(TypeError, match=r"add|multiply|shapes"):
        nnx.capture(lambda x: model(x) + model(jnp.ones(3)), nnx.Intermediate)(X)  # a Module that it refers to
    assert_same(model, Net())


class Jitted(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(2.0))

    @nnx.jit
    def __call__(self, x):
        return self.w * x

    @nnx.jit
    def twice(self, x):
        return 2 * self(x)


@nnx.jit
def a_function(model, x):
    return model.inner(x)


def test_the_outputs_of_jitted_methods_are_recorded():
    """A method that is jitted in its class is one; a jitted function of a Module is none."""
    model = nnx.Module()
    model.inner = Jitted()

    def outputs(f):
        return plain(nnx.capture(f, nnx.Intermediate, method_outputs=nnx.Intermediate)(model, X)[1])

    assert outputs(lambda model, x: model.inner(x)) == {"inner": {"__call__": ([2, 4],)}}
    assert outputs(lambda model, x: model.inner.twice(x)) == {"inner": {"__call__": ([2, 4],), "twice": ([4, 8],)}}
    assert outputs(a_function) == {"inner": {"__call__": ([2, 4],)}}
    assert outputs(lambda model, x: nnx.jit(lambda: model.inner(x))()) == {"inner": {"__call__": ([2, 4],)}}


def test_a_capture_waits_for_another_thread():
    """While that traces a function which refers to the same Module, the Module holds tracers."""
    model, traces = Record(), threading.Event()

    @nnx.jit
    def slow(x):
        y = model.w * x
        traces.set()
        time.sleep(0.3)
        return y

    with ThreadPoolExecutor() as threads:
        other = threads.submit(slow, X)
        traces.wait()
        _, recorded = nnx.capture(lambda x: model(x), nnx.Intermediate)(X)
        assert other.result().tolist() == [1, 2]
    assert plain(recorded) == {"h": ([1, 2],)}


def test_wrong_uses():
    """No types, no Module: errors that say what to write."""
    with pytest.raises(TypeError, match=r"nnx\.capture\(model, nnx\.Intermediate\)"):
        nnx.capture(Net())
    with pytest.raises(errors.ArgumentError, match=r"a Module among the arguments.*refers to none"):
        nnx.capture(lambda x: x, nnx.Intermediate)(X)
    with pytest.raises(errors.ArgumentError, match=r"a Module among the arguments.*refers to none"):
        nnx.capture(Net, nnx.Intermediate)()  # the class in place of a Module
    a, b = Net(), Layer(1.0)
    with pytest.raises(errors.ArgumentError, match=r"refers to several \(Net, Layer\)"):
        nnx.capture(nnx.jit(lambda x: a(b(x))), nnx.Intermediate)(X)
    a.b, a.layers[0].parent = b, a
    nnx.capture(nnx.jit(lambda x: a(b(x))), nnx.Intermediate)(X)  # a part of the other, as is the other of its part


def test_structural_changes_come_out():
    """What the function attaches, besides recordings, is on the live Module; what it returns is the live Module."""
    model = Net()

    def f(m, x):
        m(x)
        m.extra = Layer(1.0)
        return m, m.extra

    (out, extra), recorded = nnx.capture(f, nnx.Intermediate)(model, X)
    assert out is model
    assert model.extra is extra
    assert plain(recorded) == RECORDED
    assert not hasattr(model, "result")


# --- what has been left out, and where it runs ----------------------------------------------------------------------


class Record(nnx.Module):
    traced = 0

    def __init__(self, key=0):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        Record.traced += 1
        self.sow(nnx.Intermediate, "h", x)
        return 2 * self.w * x


def step(x, layer):
    return layer(x)


HOW = {
    "scan": lambda m, x: nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, m.stacked),
    "scan of one": lambda m, x: nnx.scan(step, in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=3)(x, m.one),
    "scan, carried": lambda m, x: nnx.scan(
        lambda c: (c[0], c[0](c[1])), in_axes=(nnx.Carry,), out_axes=nnx.Carry, length=3
    )((m.one, x))[1],
    "vmap": lambda m, x: nnx.vmap(step, in_axes=(None, 0))(x, m.stacked),
    "vmap of one": lambda m, x: nnx.vmap(step, in_axes=(0, None))(jnp.stack([x, 2 * x, 4 * x]), m.one),
    "remat": lambda m, x: nnx.remat(step)(x, m.one),
    "cond": lambda m, x: nnx.cond(x.sum() > 0, step, step, x, m.one),
    "jit": lambda m, x: jitted_step(x, m.one),
    "grad": lambda m, x: nnx.grad(lambda x, m: m(x).sum())(x, m.one),
}
jitted_step = nnx.jit(step)


class How(nnx.Module):
    def __init__(self, how):
        self.stacked, self.one, self.how = nnx.vmap(Record)(jnp.arange(3)), Record(), how

    def __call__(self, x):
        return HOW[self.how](self, x)


RECORDED_BY = {
    "scan": ("stacked", [[1, 2], [2, 4], [4, 8]]),
    "scan of one": ("one", [[1, 2], [2, 4], [4, 8]]),
    "scan, carried": ("one", [[1, 2], [2, 4], [4, 8]]),
    "vmap": ("stacked", [[1, 2], [1, 2], [1, 2]]),
    "vmap of one": ("one", [[1, 2], [2, 4], [4, 8]]),
    "remat": ("one", [1, 2]),
    "cond": ("one", [1, 2]),
    "jit": ("one", [1, 2]),
    "grad": ("one", [1, 2]),
}


@pytest.mark.parametrize("how", RECORDED_BY)
def test_stacked_under_scan_and_vmap(how):
    """Sown values and outputs: with an axis for each loop and map, of stacked Modules and of one that is shared."""
    model, (place, expected) = How(how), RECORDED_BY[how]
    captured = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Cache, only=Record)
    for call in (captured, captured, nnx.jit(captured)):
        _, sown, outputs = call(X)
        assert plain(sown) == {place: {"h": (expected,)}}
        assert plain(outputs) == {place: {"__call__": ((2 * np.asarray(expected)).tolist(),)}}
    assert not nnx.state(model, nnx.Intermediate)


def test_a_filter_chooses_the_modules():
    """By type, path and any predicate, from the captured Module down, also where the capture is in another Module."""
    model = Net()

    def paths(m, only):
        return [path for path, _ in nnx.capture(m, method_outputs=nnx.Cache, only=only)(X)[1].flat_state()
                if path[-1] == "__call__"]  # fmt: skip

    first, second, root = ("layers", 0, "__call__"), ("layers", 1, "__call__"), ("__call__",)
    assert paths(model, ...) == [root, first, second]
    assert paths(model, Layer) == [first, second]
    assert paths(model, nnx.PathContains(1)) == [second]
    assert paths(model, lambda path, m: path == ()) == [root]
    assert paths(model, nnx.Not(Layer)) == [root]
    assert paths(model, (nnx.PathContains(0), Net)) == [root, first]

    class Captures(nnx.Module):
        def __init__(self):
            self.net = Net()

        def __call__(self, x):
            return nnx.capture(self.net, method_outputs=nnx.Cache, only=lambda path, m: path == ("layers", 1))(x)[1]

    for call in (Captures(), nnx.jit(Captures())):
        assert [path for path, _ in call(X).flat_state() if path[-1] == "__call__"] == [second]


def test_a_jitted_capture_is_traced_once():
    """The structure of what is recorded is that of the calls: no retrace, whatever was recorded before."""
    model = How("scan")
    captured = nnx.jit(nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Cache))
    captured(X)
    before = Record.traced
    shapes = [jax.tree.map(jnp.shape, captured(X + i)[1:]) for i in range(3)]
    assert Record.traced == before
    assert shapes[0] == shapes[1] == shapes[2]


def test_compiled_functions_neither_hide_nor_keep_recordings():
    """A function that was compiled outside of a capture records within one, and does not after it."""

    class Quiet(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "h", x, capture_noop=True)
            return x

    scanned = nnx.scan(step, in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=1)
    for call in (nnx.jit(lambda m, x: m(x)), lambda m, x: scanned(x, m)):
        model = Quiet()
        for _ in range(2):
            call(model, X)
            assert not hasattr(model, "h")
            _, recorded = nnx.capture(call, nnx.Intermediate)(model, X)
            assert list(recorded) == ["h"]


# --- where the structure of what is recorded is not that of the calls -----------------------------------------------


class Steps(nnx.Module):
    """A step that is called outside of a loop, and in it."""

    def __init__(self, loop):
        self.one, self.loop = Record(), loop

    def __call__(self, x):
        return LOOPS[self.loop](self.one, self.one(x))


LOOPS = {
    "while_loop": lambda m, x: nnx.while_loop(lambda c: c[1].sum() < 20, lambda c: (c[0], c[0](c[1])), (m, x))[1],
    "fori_loop": lambda m, x: nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (m, x))[1],
    "scan": lambda m, x: nnx.scan(step, in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2)(x, m),
    "vmap": lambda m, x: nnx.vmap(step, in_axes=(0, None))(jnp.stack([x, 2 * x]), m),
    "cond": lambda m, x: nnx.cond(x.sum() > 0, lambda m, x: m(m(x)), lambda m, x: x, m, x),
    "cond, not taken": lambda m, x: nnx.cond(x.sum() < 0, lambda m, x: m(m(x)), lambda m, x: m(x), m, x),
    "no iteration": lambda m, x: nnx.fori_loop(2, 2, lambda i, c: (c[0], c[0](c[1])), (m, x))[1],
}
AFTER_THE_FIRST = {
    "while_loop": [[4, 8]],
    "fori_loop": [[4, 8]],
    "scan": [[[2, 4], [4, 8]]],
    "vmap": [[[2, 4], [4, 8]]],
    "cond": [[2, 4], [4, 8]],
    "cond, not taken": [[2, 4], [0, 0]],
    "no iteration": [[0, 0]],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_module_called_outside_of_a_loop_and_in_it(loop):
    """What the loop records follows; of a loop that is not scan the last iteration, zeros where nothing was run."""
    model, expected = Steps(loop), ([1, 2], *AFTER_THE_FIRST[loop])
    captured = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Cache, only=Record)
    for call in (captured, nnx.jit(captured)):
        _, sown, outputs = call(X)
        assert plain(sown) == {"one": {"h": expected}}
        assert list(plain(outputs)["one"]) == ["__call__"]
        assert len(plain(outputs)["one"]["__call__"]) == len(expected)
    assert set(vars(model.one)) == {"w"}


def test_a_branch_that_records_less_often_is_filled_up_in_any_order():
    """And branches that record the same are traced once."""
    traces = []

    def record(count, m, x):
        traces.append(count)
        for k in range(count):
            m.sow(nnx.Intermediate, "seen", x + k)

    def recorded(k, *counts):
        branches = [functools.partial(record, count) for count in counts]
        run = lambda m, x: nnx.switch(k, branches, m, x)
        return nnx.capture(run, nnx.Intermediate)(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), 1.0)[1].seen.value

    for counts in ((2, 1, 0), (0, 1, 2), (1, 2, 0)):
        for k, count in enumerate(counts):
            assert recorded(k, *counts) == (1.0, 2.0)[:count] + (0.0,) * (2 - count)
    traces.clear()
    assert recorded(0, 1, 1) == (1.0,)
    assert len(traces) == 2


def test_zeros_in_place_of_a_recorded_key():
    """They are a key as well."""

    def record(m, x):
        m.sow(nnx.Intermediate, "key", jax.random.key(7))
        return x

    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    branch = lambda m, x: nnx.cond(False, record, lambda m, x: x, m, x)
    (found,) = nnx.capture(branch, nnx.Intermediate)(layer, 1.0)[1].key.value
    assert (jax.random.key_data(found) == 0).all()


def test_branches_that_record_in_another_order():
    """And different things of different modules; a condition of a loop records nothing."""

    def a(m, x):
        m.sow(nnx.Intermediate, "first", x)
        m.sow(nnx.Intermediate, "second", 2 * x)
        return m.layers[0](x)

    def b(m, x):
        m.sow(nnx.Intermediate, "second", 3 * x)
        m.sow(nnx.Intermediate, "first", 4 * x)
        return m.layers[1](x)

    def f(m, k, x):
        nnx.while_loop(lambda c: c[0].layers[0](c[1]).sum() < 0, lambda c: c, (m, x))
        return nnx.switch(k, [a, b, lambda m, x: x], m, x)

    model = nnx.Sequential(Record(), Record())
    captured = nnx.jit(nnx.capture(f, nnx.Intermediate))
    none = ([0, 0],)
    for k, first, second, h in ((0, 1, 2, ([1, 2], none[0])), (1, 4, 3, (none[0], [1, 2])), (2, 0, 0, none * 2)):
        recorded = plain(captured(model, k, X)[1])
        assert recorded["layers"] == {i: {"h": (h[i],)} for i in (0, 1)}
        assert (recorded["first"], recorded["second"]) == (([first, 2 * first],), ([second, 2 * second],))


TAKES_THE_PLACE = {
    "fori_loop": lambda f, m: nnx.fori_loop(0, 2, lambda i, m: (f(m), m)[1], m),
    "cond": lambda f, m: nnx.cond(True, f, lambda m: None, m),
}


@pytest.mark.parametrize("loop", TAKES_THE_PLACE)
def test_a_recording_in_the_place_of_an_attribute_is_refused_in_control_flow(loop):
    """The attribute would be gone."""

    def replace(m):
        del m.w
        m.sow(nnx.Intermediate, "w", X)

    model = Record()
    with pytest.raises(BodyError, match=r"args\[0\]\.w: the Param args\[0\]\.w became a new object"):
        nnx.capture(functools.partial(TAKES_THE_PLACE[loop], replace), nnx.Intermediate)(model)
    assert set(vars(model)) == {"w"}


def test_a_loop_keeps_what_is_reduced():
    """Recordings with a reduction of their own are carried, if they were made before."""

    class Total(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "total", x.sum(), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
            return x + 1

    model = Total()
    f = lambda m, x: LOOPS["fori_loop"](m, m(x))
    assert plain(nnx.capture(f, nnx.Intermediate)(model, X)[1]) == {"total": 3 + 5 + 7}


def test_gradients_of_what_a_loop_perturbs():
    """A perturbation is the same in each iteration, so its gradient is the sum over all."""

    class Perturbed(nnx.Module):
        def __call__(self, x):
            return 2 * self.perturb("d", x)

    model = Perturbed()
    _, deltas = nnx.capture(LOOPS["fori_loop"], nnx.Perturbation)(model, X)
    loss = lambda deltas: nnx.capture(LOOPS["fori_loop"], nnx.Perturbation, init=deltas)(model, X)[0].sum()
    assert plain(nnx.grad(loss)(deltas)) == {"d": [2 + 4, 2 + 4]}


@pytest.mark.parametrize("loop", ["while_loop", "fori_loop"])
def test_loops_record_only_for_a_capture(loop):
    """Outside of one the error has the path and says so; so it does for a Module that the body refers to."""
    model = Steps(loop)
    with pytest.raises(BodyError, match=r"\[0\]\.h: nothing became(.|\n)*nnx\.capture around the call"):
        LOOPS[loop](model.one, X)
    assert set(vars(model.one)) == {"w"}


def test_a_loop_over_a_module_that_its_body_refers_to():
    """Nothing can be recorded there: the error has the path, and the remedy."""
    model = Steps("fori_loop")
    with pytest.raises(errors.TraceContextError, match=r"record 'h' .* at model\.one (.|\n)*as a further argument"):
        nnx.capture(lambda model, x: nnx.fori_loop(0, 2, lambda i, x: model.one(x), x), nnx.Intermediate)(model, X)


def test_gradients_of_stacked_intermediates():
    """The perturbation of a scanned layer has its axis, and so has its gradient."""

    class Perturbed(nnx.Module):
        def __init__(self, key):
            self.w = nnx.Param(jnp.full(2, 2.0))

        def __call__(self, x):
            return self.perturb("d", self.w * x)

    class Scanned(nnx.Module):
        def __init__(self):
            self.layers = nnx.vmap(Perturbed)(jnp.arange(3))

        def __call__(self, x):
            return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    model = Scanned()
    _, deltas = nnx.capture(model, nnx.Perturbation)(X)

    def loss(deltas):
        return nnx.capture(model, nnx.Perturbation, init=deltas)(X)[0].sum()

    for grads in (nnx.grad(loss)(deltas), nnx.jit(nnx.grad(loss))(deltas)):
        assert np.asarray(grads.layers.d.value).tolist() == [[4, 4], [2, 2], [1, 1]]

    class Shared(Scanned):
        def __call__(self, x):
            one = nnx.scan(step, in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2)
            return one(x, self.one)

    shared = Shared()
    shared.one = Perturbed(0)
    with pytest.raises(errors.PrefixError, match=r"args\[1\]\.d"):
        nnx.capture(shared, nnx.Perturbation)(X)


def test_modules_that_are_not_looked_into_keep_nothing():
    """Another argument, or a Module that the model only refers to, also when the call fails."""
    other, far = Layer(2.0), Layer(3.0)

    class Refers(nnx.Module):
        def __call__(self, x, other, fail):
            x = other(far(x))
            return x.reshape(7) if fail else x

    run = nnx.capture(Refers(), method_outputs=nnx.Intermediate)
    other(X)
    before = nnx.state(other, nnx.Intermediate).flat_state()
    assert [path for path, _ in run(X, other, False)[1].flat_state()] == [("__call__",)]
    with pytest.raises(TypeError):
        run(X, other, True)
    assert_same(nnx.state(other, nnx.Intermediate).flat_state(), before)
    assert not [p for p, _ in nnx.state(far, nnx.Intermediate).flat_state() if p[-1].endswith("()")]


def test_a_choice_of_modules_that_takes_none():
    with pytest.raises(errors.EmptySelectionError, match=r"(?s)takes none .*<root> \(Net\)\n  layers\[0\] \(Layer\)"):
        nnx.capture(Net(), method_outputs=nnx.Intermediate, only=nnx.Conv)(X)


def test_a_function_that_calls_no_module_records_nothing():
    out, recorded = nnx.capture(lambda m, x: 2 * x, method_outputs=nnx.Intermediate, only=Layer)(Net(), X)
    assert (out.tolist(), plain(recorded)) == ([2, 4], {})


def test_an_error_is_not_hidden_by_a_choice_that_took_none():
    """What was wrong first is what the user is told."""

    class Failing(Net):
        def __call__(self, x):
            self.layers[0](x)
            raise RuntimeError("of the model")

    with pytest.raises(RuntimeError, match="of the model"):
        nnx.capture(Failing(), method_outputs=nnx.Intermediate, only=nnx.BatchNorm)(X)


def test_a_function_that_refers_to_a_model_and_to_a_part_of_it():
    """The model is meant, whichever it names first."""
    model = Net()
    for part, whole in ((model.layers[0], model), (model, model.layers[0])):
        _, recorded = nnx.capture(lambda x, a=part, b=whole: a(x) + b(x), nnx.Intermediate)(X)
        assert sorted(recorded) == ["layers", "result"]


def test_init_for_another_model():
    state = nnx.State({"head": {"delta": nnx.Perturbation(X)}})
    with pytest.raises(errors.PathError, match=r"has a Perturbation at head\.delta, and Net has no head"):
        nnx.capture(Net(), nnx.Perturbation, init=state)(X)


class Named(nnx.Module):
    """Records under the names of its methods."""

    def features(self, x):
        self.sow(nnx.Intermediate, "features", 2 * x)
        return self.perturb("features_gradient", x)

    def features_gradient(self):
        return None

    def __call__(self, x):
        x = self.features(x)
        return self.features(x)


def test_a_recording_hides_no_method():
    """Within a capture; outside of one it would, so that is an error."""
    model = Named()
    out, zeros, recorded = nnx.capture(model, nnx.Perturbation, nnx.Intermediate)(1.0)
    assert (out, recorded["features"].value, zeros["features_gradient"].value) == (1.0, (2.0, 2.0), 0.0)
    grad = jax.grad(lambda zeros: nnx.capture(model, init=zeros)(1.0))(zeros)
    assert grad["features_gradient"].value == 2.0
    assert vars(model) == {}
    with pytest.raises(ValueError, match="Expected the attribute 'features' of Named to be a Variable, got a function"):
        model(1.0)
    out, both = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(1.0)
    assert both["features"].value == (2.0, 1.0, 2.0, 1.0)


class Averaged(nnx.Module):
    """Records under the names of its attributes: a statistic, a parameter, an array, a number, and a place for one."""

    def __init__(self):
        self.mean = nnx.Variable(jnp.zeros(2))
        self.w = nnx.Param(jnp.full(2, 3.0))
        self.x, self.size, self.seen = jnp.ones(2), 2, nnx.Intermediate(())

    def __call__(self, x):
        self.mean[...] += x
        for name in ("mean", "x", "size", "seen"):
            self.sow(nnx.Intermediate, name, x)
        return self.perturb("w", self.w * x)


@pytest.mark.parametrize("form", [lambda f: f, nnx.jit, nnx.remat], ids=["eager", "jit", "remat"])
def test_a_recording_replaces_no_attribute(form):
    """Within a capture, recordings and attributes of one name are apart; outside of one that is an error."""
    model = Averaged()
    out, zeros, recorded = form(lambda m, x: nnx.capture(m, nnx.Perturbation, nnx.Intermediate)(x))(model, X)
    assert out.tolist() == [3.0, 6.0]
    assert plain(zeros) == {"w": [0.0, 0.0]}
    assert plain(recorded) == dict.fromkeys(("mean", "seen", "size", "x"), ([1.0, 2.0],))
    assert plain(nnx.state(model)) == {"mean": [1.0, 2.0], "seen": (), "w": [3.0, 3.0], "x": [1.0, 1.0]}
    grad = nnx.grad(lambda zeros, m: nnx.capture(m, nnx.Perturbation, init=zeros)(X)[0].sum())(zeros, model)
    assert plain(grad) == {"w": [1.0, 1.0]}
    assert set(vars(model)) == {"mean", "w", "x", "size", "seen"}
    with pytest.raises(ValueError, match="Expected the attribute 'mean' of Averaged to be of type Intermediate"):
        model(X)


def test_a_recording_replaces_no_attribute_of_a_scanned_module():
    """The recordings of the iterations are stacked beside the attribute."""
    model = Averaged()

    def forward(model, xs):
        return nnx.scan(lambda m, x: (m, m(x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, xs)[1]

    _, recorded = nnx.capture(forward, nnx.Intermediate)(model, jnp.stack([X, 2 * X]))
    assert plain(recorded)["mean"] == ([[1.0, 2.0], [2.0, 4.0]],)
    assert model.mean.value.tolist() == [3.0, 6.0]


class Perturbed(nnx.Module):
    def __call__(self, x):
        x = self.perturb("delta", x)
        self.sow(nnx.Intermediate, "seen", x)
        return 2 * x


def test_examples_have_perturbations_of_their_own():
    """Captured within a vmap, or of copies that a vmap makes by merge."""

    class Probed(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.arange(3.0))

        def __call__(self, x):
            return self.perturb("delta", x) @ self.w

    model, batch = Probed(), jnp.ones((4, 3))
    _, zeros = nnx.vmap(nnx.capture(model, nnx.Perturbation))(batch)
    assert zeros["delta"].shape == (4, 3)
    loss = lambda model, zeros, x: nnx.capture(model, nnx.Perturbation, init=zeros)(x)[0]
    grads = nnx.vmap(nnx.grad(loss, argnums=1), in_axes=(None, 0, 0))(model, zeros, batch)
    assert jnp.array_equal(grads["delta"], jnp.broadcast_to(jnp.arange(3.0), (4, 3)))

    def of_copies(model, batch):
        graphdef, state = nnx.split(model)
        return nnx.vmap(lambda state, x: nnx.merge(graphdef, state)(x), in_axes=(None, 0))(state, batch)

    out, zeros = nnx.jit(nnx.capture(of_copies, nnx.Perturbation))(model, batch)
    assert (out.shape, zeros["delta"].shape, set(vars(model))) == ((4,), (4, 3), {"w"})


class Pair(nnx.Module):
    def __init__(self):
        self.a, self.b = Sown(), Sown()

    def __call__(self, x):
        return self.b(self.a(x))


class Sown(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(2.0))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return self.w * x


def merged_in(transform):
    """A call of a copy of the model, made by merge in the function that ``transform(function)(state, x)`` runs."""

    def call(model, x):
        graphdef, state = nnx.split(model)
        return transform(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)

    return call


def merged_twice(model, x):
    copies = [nnx.merge(*nnx.split(model)) for _ in range(2)]
    return [copy(k * x) for k, copy in enumerate(copies, 1)]


def merged_parts(model, x):
    a, b = nnx.split(model.a), nnx.split(model.b)  # two equal GraphDefs
    return nnx.merge(*b)(nnx.merge(*a)(x))


def nested(call):
    over_rows = nnx.vmap(call, in_axes=(None, 0))
    return nnx.vmap(over_rows, in_axes=(None, 0))


X3 = jnp.arange(3.0)
ONCE = {("a", "seen"): (X3,), ("b", "seen"): (2 * X3,)}
COPIES = {
    "in the function": (lambda m, x: nnx.merge(*nnx.split(m))(x), ONCE),
    "of a copy": (lambda m, x: nnx.merge(*nnx.split(nnx.merge(*nnx.split(m))))(x), ONCE),
    "of a view": (lambda m, x: nnx.merge(*nnx.split(nnx.view(m)))(x), ONCE),
    "several": (merged_twice, {path: (x, 2 * x) for path, (x,) in ONCE.items()}),
    "of parts of equal structure": (merged_parts, ONCE),
    "by graphdef": (lambda m, x: nnx.merge(nnx.graphdef(m), nnx.state(m))(x), ONCE),
    "after the model itself": (
        lambda m, x: (m(x), nnx.merge(*nnx.split(m))(x)),
        {k: (*v, *v) for k, v in ONCE.items()},
    ),
    "jit": (merged_in(nnx.jit), ONCE),
    "remat": (merged_in(nnx.remat), ONCE),
    "lift": (merged_in(nnx.lift(jax.checkpoint)), ONCE),
    "grad": (merged_in(lambda f: nnx.grad(lambda state, x: f(state, x).sum())), ONCE),
    "vjp": (merged_in(lambda f: lambda state, x: nnx.vjp(f, state, x)[0]), ONCE),
    "vmap": (merged_in(lambda f: nnx.vmap(f, in_axes=(None, 0))), ONCE),
    "vmap over keys": (lambda m, x: nnx.vmap(lambda x: nnx.merge(*nnx.split(m))(x))(x), ONCE),
    "vmap of a jit": (merged_in(lambda f: nnx.vmap(nnx.jit(f), in_axes=(None, 0))), ONCE),
    "vmap of a grad": (merged_in(lambda f: nnx.vmap(nnx.grad(f), in_axes=(None, 0))), ONCE),
    "vmap of a vmap": (
        lambda m, x: merged_in(nested)(m, jnp.stack([x, x])),
        {path: (jnp.stack([x, x]),) for path, (x,) in ONCE.items()},
    ),
    "scan": (
        lambda m, x: merged_in(lambda f: lambda state, x: nnx.scan(lambda c, x: (c, f(state, x)))(jnp.zeros(()), x))(
            m, x
        ),
        ONCE,
    ),
}


@pytest.mark.parametrize("case", COPIES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jitted"])
def test_copies_made_by_merge_record_in_the_captured_model(case, compiled):
    """In a transform, too: as what the model itself would record there."""
    call, expected = COPIES[case]
    model = Pair()
    captured = nnx.capture(call, nnx.Intermediate)
    _, recorded = (nnx.jit(captured) if compiled else captured)(model, X3)
    found = dict(recorded.flat_state())
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        assert jax.tree.map(jnp.shape, found[path].value) == jax.tree.map(jnp.shape, values)
        assert jax.tree.all(jax.tree.map(jnp.allclose, found[path].value, values))
    assert set(vars(model)) == {"a", "b"}
    assert set(vars(model.a)) == {"w"}


@pytest.mark.parametrize(
    "call",
    [
        lambda live, x: live(x),
        lambda live, x: nnx.view(live)(x),
        lambda live, x: nnx.merge(*nnx.split(live))(x),
        merged_in(lambda f: nnx.vmap(f, in_axes=(None, 0))),
    ],
)
def test_a_method_that_refers_to_its_object_by_another_name(call):
    """The live object: what it records, or a copy of it, is that of the captured one; it is left as it was."""

    class Live(Pair):
        def other(self, x):
            return call(live, x)

    live = Live()
    for _ in range(2):
        _, recorded = nnx.capture(live.other, nnx.Intermediate)(X3)
        assert [value.tolist() for value in recorded.b.seen.value] == [[0.0, 2.0, 4.0]]
        assert set(vars(live.a)) == {"w"}


def test_copies_with_the_variables_of_the_model():
    """As code for flax.nnx makes them, where a State has the Variables of the model."""

    def call(model, x):
        graphdef, state = compat.split(model)
        return nnx.vmap(lambda state, x: compat.merge(graphdef, state)(x), in_axes=(None, 0))(state, x)

    _, recorded = nnx.capture(call, nnx.Intermediate)(Pair(), X3)
    assert recorded.a.seen.value[0].shape == (3,)


def test_what_other_modules_record_is_dropped_with_a_warning():
    """Such as a copy of what was split before, or one in a transform of raw JAX, or in a shard_map."""
    model = Pair()
    graphdef, state = nnx.split(model)
    before = nnx.capture(lambda model, x: nnx.merge(graphdef, state)(x), nnx.Intermediate)

    @nnx.capture(nnx.Intermediate)
    def raw(model, x):
        graphdef, state = nnx.split(model)
        return jax.vmap(lambda x: nnx.merge(graphdef, state)(x))(x)

    mesh, spec = jax.sharding.Mesh(jax.devices()[:1], ("x",)), jax.sharding.PartitionSpec("x")
    in_shards = functools.partial(nnx.shard_map, mesh=mesh, in_specs=(None, spec), out_specs=spec)
    for captured in before, raw, nnx.capture(merged_in(in_shards), nnx.Intermediate):
        with pytest.warns(UserWarning, match=r"found nothing in the Pair: .* split before the capture") as caught:
            out, recorded = captured(model, X3)
        assert [warning.filename for warning in caught] == [__file__]
        assert (out.shape, list(recorded)) == ((3,), [])


def test_a_transform_that_fails_records_nothing():
    model, seen = Pair(), []

    @nnx.capture(nnx.Intermediate)
    def call(model, x):
        def failing(x):
            nnx.merge(*nnx.split(model))(x)
            raise KeyError

        with contextlib.suppress(KeyError):
            nnx.vmap(failing)(x)
        seen.append(model.a.__captures__)
        return model(x)

    _, recorded = call(model, X3)
    assert [x.value for x in seen[0]] == [{}]
    assert len(recorded.a.seen.value) == 1


def test_what_is_recorded_so_far():
    """``__captures__``: for each type a Variable with a dict by name; there is none outside of a capture."""

    class Probe(nnx.Module):
        def __call__(self, x):
            found = [self.__captures__]
            x = self.perturb("delta", x)
            self.sow(nnx.Intermediate, "seen", x)
            return [*found, self.__captures__]

    model, kinds = Probe(), (nnx.Perturbation, nnx.Intermediate)  # of the second type, the first is a subclass
    assert not hasattr(model, "__captures__")
    (before, after), zeros, _ = nnx.capture(model, *kinds)(1.0)
    assert [(type(x), x.value) for x in before] == [(kind, {}) for kind in kinds]
    assert [(type(x), x.value) for x in after] == [(kinds[0], {"delta": 0.0}), (kinds[1], {"seen": (1.0,)})]
    (before, _), _ = nnx.capture(model, nnx.Intermediate, init=zeros)(1.0)
    assert [(type(x), x.value) for x in before] == [(kinds[1], {}), (kinds[0], {"delta": 0.0})]
    assert not hasattr(model, "__captures__")


@pytest.mark.parametrize("kinds", [(), (nnx.Intermediate,), (nnx.Perturbation,), (nnx.Perturbation, nnx.Intermediate)])
def test_init_for_a_model_that_has_recorded_before(kinds):
    """Outside of a capture, as an eager call does; what it has stays as it is, also under differentiation."""
    model = Perturbed()
    model(jnp.float32(1.0))
    before = model.delta.value, model.seen.value

    def out(deltas):
        returned = nnx.capture(model, *kinds, init=deltas)(jnp.float32(1.0))
        return returned[0] if kinds else returned

    deltas = nnx.State({"delta": nnx.Perturbation(jnp.float32(3.0))})
    for _ in range(2):
        assert out(deltas) == 8.0
        assert jax.grad(out)(deltas)["delta"].value == 2.0
    assert (model.delta.value, model.seen.value) == before


@pytest.mark.parametrize("wrong", [3, "intermediates", lambda path, x: True, nnx.Linear, jnp.ones((1, 2))])
def test_what_is_no_type_of_variable_is_refused(wrong):
    with pytest.raises(TypeError, match=r"nnx.capture takes types of Variable, such as nnx.Intermediate, but got"):
        nnx.capture(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), wrong)


class Viewed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return self.dropout(self.linear(self.perturb("delta", x)))


def off(model):
    return nnx.view(model, deterministic=True)


@pytest.mark.parametrize(
    ("call", "sizes"),
    [
        (lambda model, x: off(model)(x), [3]),
        (lambda model, x: nnx.with_attributes(model, deterministic=True)(x), [3]),
        (lambda model, x: off(off(model))(x), [3]),
        (lambda model, x: nnx.jit(lambda model, x: off(model)(x))(model, x), [3]),
        (lambda model, x: nnx.jit(lambda view, x: view(x))(off(model), x), [3]),
        (lambda model, x: nnx.grad(lambda model: off(model)(x).sum())(model), [3]),
        (lambda model, x: nnx.vmap(lambda model, x: off(model)(x), in_axes=(None, 0))(model, x), [3]),
        (lambda model, x: (model(x), off(model)(2 * x)), [3, 6]),
        (lambda model, x: (off(model)(2 * x), model(x)), [3, 6]),
        (lambda model, x: (model(x), nnx.jit(lambda view, x: view(2 * x))(off(model), x)), [3, 6]),
    ],
)
def test_views_record_in_the_captured_model(call, sizes):
    """As in flax.nnx: views that the function makes, in it or in a transform; after it they hold no recordings."""
    model, views = Viewed(nnx.Rngs(0)), []
    made = nnx.view

    def noted(*args, **kwargs):
        views.append(made(*args, **kwargs))
        return views[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnx, "view", noted)
        _, recorded = nnx.capture(call, nnx.Intermediate)(model, jnp.ones((3, 1)) * jnp.ones(2))
    assert list(recorded) == ["seen"]
    assert sorted(int(x[:, 0].sum()) for x in recorded.seen.value) == sizes
    assert not any({"seen", "delta"} & set(vars(x)) for x in (model, *views))


def test_views_take_the_perturbations_of_the_captured_model():
    model, x = Viewed(nnx.Rngs(0)), jnp.ones((3, 2))
    call = lambda model, x: off(model)(x).sum()
    _, zeros = nnx.capture(call, nnx.Perturbation)(model, x)
    grads = nnx.grad(lambda zeros: nnx.capture(call, nnx.Perturbation, init=zeros)(model, x)[0])(zeros)
    assert jnp.allclose(grads.delta, model.linear.kernel.sum(1))
