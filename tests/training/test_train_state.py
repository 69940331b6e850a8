import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlib as nnx
from nnxlib import errors

X = jnp.arange(6.0).reshape(3, 2)


@dataclasses.dataclass(frozen=True)
class Momentum:
    """A transformation in ten lines, so that these tests need no optax."""

    rate: float

    def init(self, params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, grads, state, params=None):
        state = jax.tree.map(lambda m, g: 0.5 * m + g, state, grads)
        return jax.tree.map(lambda m: -self.rate * m, state), state


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.calls = nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.calls.value += 1
        return self.encode(x)

    def encode(self, x):
        return self.linear(x)


class StateWithStats(nnx.TrainState):
    stats: nnx.State
    name: str = dataclasses.field(metadata={"static": True})


def made(**kwargs):
    graphdef, params, stats = nnx.split(Net(), nnx.Param, ...)
    return StateWithStats.create(graphdef, params=params, tx=Momentum(0.1), stats=stats, name="run", **kwargs)


@jax.jit
def train_step(state):
    def loss(params):
        y, (_, new) = state.apply(params, "stats")(X)
        return jnp.mean(y**2), new.filter(nnx.BatchStat)

    grads, stats = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads, stats=stats)


def test_a_train_state_trains_as_an_optimizer_does():
    """The functional and the stateful style give the same parameters and statistics."""
    state = made()
    model = Net()
    optimizer = nnx.Optimizer(model, Momentum(0.1))
    for _ in range(3):
        state = train_step(state)
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(X) ** 2))(model))
    trained = nnx.merge(state.graphdef, state.params, state.stats)
    assert state.step == 3
    assert trained.calls.value == model.calls.value == 3
    np.testing.assert_allclose(trained.linear.kernel.value, model.linear.kernel.value, rtol=1e-6)


def test_a_step_changes_no_other_train_state():
    """``apply_gradients`` and ``replace`` return new ones; fields cannot be set."""
    state = made(step=5)
    before = jax.tree.leaves(state)
    later = state.apply_gradients(jax.tree.map(jnp.ones_like, state.params)).replace(name="other")
    assert (state.step, later.step, state.name, later.name) == (5, 6, "run", "other")
    assert all(a is b for a, b in zip(before, jax.tree.leaves(state)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 7


def test_a_train_state_is_a_pytree():
    """Its leaves are arrays with the path of their field; transformation and static fields are in the structure."""
    state = made()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    assert ".params['linear']['kernel'].value" in paths
    assert {".step", ".stats['calls'].value"} <= set(paths)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert jax.tree.structure(state) == jax.tree.structure(made())
    assert jax.tree.structure(state) != jax.tree.structure(state.replace(name="other"))


def test_apply_calls_a_method_on_states():
    """Given as States or by the names of fields; what the call changes is returned, the TrainState stays."""
    state = made()
    y, (_, new) = state.apply("params", "stats")(X)
    assert new["calls"].value == 1
    assert state.stats["calls"].value == 0
    encoded, _ = state.apply(state.params, state.stats).encode(X)
    np.testing.assert_array_equal(y, encoded)
    with pytest.raises(AttributeError, match="nope"):
        state.apply("nope")


def test_a_train_state_goes_through_nnx_jit_and_scan():
    """As an argument and as a result."""
    expected = train_step(train_step(made()))
    jitted = nnx.jit(train_step)(nnx.jit(train_step)(made()))
    scanned, _ = jax.lax.scan(lambda state, _: (train_step(state), None), made(step=jnp.array(0)), length=2)
    for found in jitted, scanned, copy.deepcopy(expected):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_fields_have_to_be_declared():
    """``create`` takes no others."""
    graphdef, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        nnx.TrainState.create(graphdef, params=params, tx=Momentum(0.1), foo=3)


def test_what_is_no_transformation_is_refused():
    graphdef, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"tx has to be a transformation .* adam .* Write TrainState.create\("):
        nnx.TrainState.create(graphdef, params=params, tx=optax.adam)


def test_gradients_that_do_not_fit_are_refused_by_path():
    graphdef, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    train_state = nnx.TrainState.create(graphdef, params=params, tx=optax.adam(0.1))
    with pytest.raises(
        errors.StateMismatchError, match=r"bias: missing, expected float32\[3\](.|\n)*train_state.params"
    ):
        train_state.apply_gradients({"kernel": jnp.ones((2, 3))})
    with pytest.raises(errors.StateMismatchError, match=r"bias: expected shape \(3,\), got \(1, 3\)"):
        train_state.apply_gradients(jax.tree.map(lambda x: x[None], params))  # would be broadcast
    for x in params.bias.value.sum(), params.bias.value[:1]:  # the sum with the parameter has the right shape
        with pytest.raises(errors.StateMismatchError, match=r"bias: expected shape \(3,\), got \(1?,?\)"):
            train_state.apply_gradients(params.map(lambda path, p, x=x: p.replace(x) if path == ("bias",) else p))
    assert train_state.apply_gradients(params).step == 1


def test_gradients_of_examples_are_for_a_transformation_that_reduces_them():
    """They have one axis more, of one length, in front; another transformation would let the parameters grow."""
    graphdef, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    reducing = optax.stateless(lambda grads, params: jax.tree.map(lambda x: -x.mean(0), grads))
    grads = jax.tree.map(lambda x: jnp.stack([x, 3 * x]), params)
    train_state = nnx.TrainState.create(graphdef, params=params, tx=reducing).apply_gradients(grads)
    np.testing.assert_allclose(train_state.params.kernel, -params.kernel, rtol=1e-6)
    with pytest.raises(errors.StateMismatchError, match=r"bias: expected shape \(3,\), got \(2, 3\)"):
        nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1)).apply_gradients(grads)


def test_gradients_of_another_structure_are_refused_by_path():
    graphdef, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    state = nnx.TrainState.create(graphdef, params=params, tx=optax.adam(1e-3))
    with pytest.raises(errors.StateMismatchError, match=r"a: unexpected int\n  bias: missing, expected float32\[3\]"):
        state.apply_gradients({"a": 1})
