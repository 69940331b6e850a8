"""nnx.capture: what sow, perturb and method_outputs record comes out, and the Module is as it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
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
    "jitted": lambda m: nnx.jit(nnx.capture(m, nnx.Intermediate)),
    "of a jitted function": lambda m: functools.partial(nnx.capture(nnx.jit(lambda m, x: m(x)), nnx.Intermediate), m),
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


def test_wrong_uses():
    """No types, no Module: errors that say what to write."""
    with pytest.raises(TypeError, match=r"nnx\.capture\(model, nnx\.Intermediate\)"):
        nnx.capture(Net())
    with pytest.raises(TypeError, match="a Module among the arguments"):
        nnx.capture(lambda x: x, nnx.Intermediate)(X)


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
