"""An Optimizer does with a Module what its transformation does with a plain pytree, whatever the transformation."""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core.errors import StateMismatchError

optax = pytest.importorskip("optax")

TARGETS = {"kernel": jnp.arange(8.0).reshape(2, 4) / 8, "bias": jnp.array([1.0, -1.0])}


class Layer(nnx.Module):
    def __init__(self):
        self.kernel, self.bias = nnx.Param(jnp.ones((2, 4))), nnx.Param(jnp.array([0.5, 0.5]))


class Net(nnx.Module):
    def __init__(self):
        self.layers = [Layer()]


def loss(layer):
    """Of a layer, or of a dict of its values."""
    kernel, bias = (
        (layer.kernel.value, layer.bias.value) if isinstance(layer, Layer) else (layer["kernel"], layer["bias"])
    )
    return jnp.sum((kernel - TARGETS["kernel"]) ** 4) + jnp.sum((bias - TARGETS["bias"]) ** 2)


def matrices(params):
    return jax.tree.map(lambda x: x.ndim == 2, params)


def ranks(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", params)


def scheduled(learning_rate):
    return optax.inject_hyperparams(optax.adam)(learning_rate=learning_rate)


TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.01, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.1, mask=matrices),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(0.1),
    "lion": lambda: optax.lion(0.1),
    "novograd": lambda: optax.novograd(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, centered=True, momentum=0.5),
    "sm3": lambda: optax.sm3(0.1),
    "noise": lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5)),
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.trace(0.9), optax.scale(-0.1)),
    "masked": lambda: optax.masked(optax.adam(0.1), matrices),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.adam(0.1), "vector": optax.sgd(0.1)}, ranks),
    "frozen": lambda: optax.multi_transform({"matrix": optax.adam(0.1), "vector": optax.set_to_zero()}, ranks),
    "injected": lambda: scheduled(0.1),
    "injected schedule": lambda: scheduled(optax.linear_schedule(0.1, 0.0, 4)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "low precision": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "named": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(0.1))),
    "in a dict": lambda: optax.GradientTransformation(
        lambda params: ({"momentum": [params]}, {}), lambda g, s, p=None: (g, ({"momentum": [g]}, {}))
    ),
}
WITH_VALUE = {
    "plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1)),
    "polyak": lambda: optax.polyak_sgd(0.1),
}


def by_optax(tx, steps=4, extra=lambda value, grads: {}):
    """The parameters and the leaves of the state after some steps on a plain dict of arrays."""
    params: Any = {"layers": {0: {"kernel": jnp.ones((2, 4)), "bias": jnp.array([0.5, 0.5])}}}
    state = tx.init(params)
    for _ in range(steps):
        value, grads = jax.value_and_grad(lambda p: loss(p["layers"][0]))(params)
        updates, state = tx.update(grads, state, params, **extra(value, grads))
        params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
    return params, jax.tree.leaves(state)


def by_optimizer(tx, steps=4, extra=lambda value, grads: {}, transform=lambda f: f):
    model = Net()
    optimizer = nnx.Optimizer(model, tx)

    @transform
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(lambda model: loss(model.layers[0]))(model)
        optimizer.update(model, grads, **extra(value, grads))

    for _ in range(steps):
        step(model, optimizer)
    return nnx.to_pure_dict(nnx.state(model)), jax.tree.leaves(nnx.pure(optimizer.opt_state))


def assert_same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_any_transformation(name):
    """The parameters, and each leaf of the state with its dtype, after four steps."""
    assert_same(by_optimizer(TRANSFORMATIONS[name]()), by_optax(TRANSFORMATIONS[name]()))


@pytest.mark.parametrize("name", WITH_VALUE)
def test_transformations_that_take_the_value(name):
    """Further arguments of the update are passed on."""
    extra = lambda value, grads: {"value": value}
    assert_same(by_optimizer(WITH_VALUE[name](), extra=extra), by_optax(WITH_VALUE[name](), extra=extra))


def test_lbfgs_searches_along_a_line():
    """Value, gradient and the function of the parameters are passed on; compiled, it finds the minimum."""
    tx = optax.lbfgs()
    model = Net()
    optimizer = nnx.Optimizer(model, tx)

    @nnx.jit
    def step(model, optimizer):
        graphdef, params = nnx.split(model)
        value_fn = lambda params: loss(nnx.merge(graphdef, params).layers[0])
        value, grads = nnx.value_and_grad(lambda model: loss(model.layers[0]))(model)
        optimizer.update(model, grads, value=value, grad=grads, value_fn=value_fn)
        return value

    values = [step(model, optimizer).item() for _ in range(4)]

    @jax.jit
    def plain_step(params, state):
        value_fn = lambda params: loss(params["layers"][0])
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=value_fn)
        return value, jax.tree.map(jnp.add, params, updates), state

    params = {"layers": {0: {"kernel": jnp.ones((2, 4)), "bias": jnp.array([0.5, 0.5])}}}
    state, expected = tx.init(params), []
    for _ in range(4):
        value, params, state = plain_step(params, state)
        expected.append(value.item())
    np.testing.assert_allclose(values, expected, rtol=1e-4)
    assert values[-1] < 0.05 * values[0]
    assert_same(nnx.to_pure_dict(nnx.state(model)), params)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_the_state_is_the_pytree_that_the_transformation_made(name):
    """Of the very same types, so that what works on the states of optax works on it; also after a jitted step."""
    tx, model = TRANSFORMATIONS[name](), Net()
    made = tx.init(nnx.state(model))
    optimizer = nnx.Optimizer(model, tx)
    for _ in range(2):
        assert jax.tree.structure(nnx.pure(optimizer.opt_state)) == jax.tree.structure(nnx.pure(made))
        doubled = optax.tree_utils.tree_map_params(tx, lambda x: x * 2, optimizer.opt_state)
        assert jax.tree.structure(doubled) == jax.tree.structure(optimizer.opt_state)
        optimizer.opt_state = doubled
        nnx.jit(lambda model, optimizer: optimizer.update(model, nnx.state(model)) and None)(model, optimizer)


@nnx.dataclass
class Moments(nnx.Pytree):
    trace: Any = nnx.data()
    count: jax.Array = nnx.data()


def momentum_in_an_object(decay):
    """As `optax.trace`, with a state that is no tuple but an `nnx.Pytree`."""

    def update(updates, state, params=None):
        assert not isinstance(state.count, nnx.Variable)
        trace = jax.tree.map(lambda g, t: g + decay * t, updates, state.trace)
        return trace, Moments(trace, state.count + 1)

    return optax.GradientTransformation(lambda p: Moments(jax.tree.map(jnp.zeros_like, p), jnp.array(0)), update)


def test_a_state_that_is_an_object():
    """It is a pytree like any other: the transformation is given plain values in it."""
    layers = Layer(), Layer()
    transformations = momentum_in_an_object(0.9), optax.trace(0.9)
    optimizers = [nnx.Optimizer(x, optax.chain(tx, optax.scale(-0.1))) for x, tx in zip(layers, transformations)]
    step = nnx.jit(lambda layer, optimizer: optimizer.update(layer, nnx.grad(loss)(layer)) and None)
    for _ in range(3):
        for layer, optimizer in zip(layers, optimizers):
            step(layer, optimizer)
    np.testing.assert_allclose(layers[0].kernel, layers[1].kernel)
    np.testing.assert_allclose(optimizers[0].opt_state[0].trace["bias"], optimizers[1].opt_state[0].trace["bias"])
    assert optimizers[0].opt_state[0].count == 3


def test_what_optax_finds_in_a_state_and_sets():
    """By name; what is set is assigned as a whole, and takes effect in a step that was compiled before."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip(1.0), scheduled(0.1)))

    @nnx.jit
    def step(model, optimizer):
        return optimizer.update(model, nnx.state(model))["layers"][0]["bias"]

    assert step(model, optimizer).any()
    rate = optax.tree_utils.tree_get(optimizer.opt_state, "learning_rate")
    assert rate is optimizer.opt_state[1].hyperparams["learning_rate"]
    ((path, mu),) = optax.tree_utils.tree_get_all_with_path(optimizer.opt_state, "mu")
    assert jax.tree_util.keystr(path).endswith(".mu")
    assert type(mu) is nnx.State
    assert mu.layers[0].bias.shape == (2,)
    optimizer.opt_state = optax.tree_utils.tree_set(optimizer.opt_state, learning_rate=0.0)
    assert type(optimizer.opt_state[1].hyperparams["learning_rate"]) is nnx.OptArray
    assert not step(model, optimizer).any()
    optimizer.opt_state[1].hyperparams["learning_rate"] = 0.1
    assert step(model, optimizer).any()


def test_a_moment_may_be_exchanged_in_place():
    """It is an item of a State, which a step that was compiled before reads anew."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.5))
    step = nnx.jit(lambda model, optimizer: optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model))))
    for _ in range(2):
        step(model, optimizer)
    optimizer.opt_state[0].trace.layers[0]["bias"] = nnx.OptVariable(jnp.full(2, 2.0))
    assert step(model, optimizer)["layers"][0]["bias"].tolist() == pytest.approx([-0.1, -0.1])


def test_what_is_masked_has_no_state():
    """Moments are kept of the matrix alone, at its path; the vector is left as the gradient that it got."""
    optimizer = nnx.Optimizer(Net(), optax.masked(optax.adam(0.1), matrices))
    kept = nnx.to_flat_state(nnx.state(optimizer, nnx.OptVariable))
    assert [path[-3:] for path, x in kept if jax.tree.leaves(x)] == [("layers", 0, "kernel")] * 2


LABELLED = {
    "multi_transform": lambda at: optax.multi_transform(
        {"matrix": optax.adam(0.1), "vector": optax.sgd(0.1)}, at(ranks)
    ),
    "masked": lambda at: optax.chain(optax.masked(optax.adam(0.1), at(matrices)), optax.add_decayed_weights(0.1)),
    "with the value": lambda at: optax.chain(optax.masked(optax.adam(0.1), at(matrices)), optax.polyak_sgd(0.1)),
}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_that_are_variables(name):
    """Made of a State by ``jax.tree.map``, they do what a function of the same labels does."""
    value = lambda value, grads: {"value": value} if name == "with the value" else {}
    labels = LABELLED[name](lambda function: function(nnx.state(Net(), nnx.Param)))
    expected = by_optimizer(LABELLED[name](lambda function: function), extra=value)
    assert_same(by_optimizer(labels, extra=value), expected)
    assert_same(by_optimizer(labels, extra=value, transform=nnx.jit), expected)  # no label becomes a tracer


def test_arguments_that_a_transformation_lacks_are_an_error_with_the_remedy():
    """A line search has to evaluate the loss, for a State and not for a Module."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.lbfgs())
    grads = nnx.state(model, nnx.Param)
    search = {"value": jnp.ones(()), "grad": grads, "value_fn": lambda model: model(jnp.ones((1, 2)))}
    for extra in ({}, search):
        with pytest.raises(TypeError) as error:
            optimizer.update(model, grads, **extra)
        assert "value_fn=loss_of" in "".join(error.value.__notes__)
    assert optimizer.step == 0


def test_labels_of_another_structure_are_an_error_with_the_remedy():
    labels = nnx.to_pure_dict(ranks(nnx.state(Net(), nnx.Param)))
    txs = {"matrix": optax.adam(0.1), "vector": optax.sgd(0.1)}
    with pytest.raises(ValueError) as error:
        nnx.Optimizer(Net(), optax.multi_transform(txs, labels))
    assert "put a dict that you have into one: nnx.State(labels)" in "".join(error.value.__notes__)
    model = Net()
    nnx.Optimizer(model, optax.multi_transform(txs, nnx.State(labels))).update(model, nnx.state(model, nnx.Param))


def test_an_injected_learning_rate_is_a_variable():
    """It is set from outside, also between calls of a compiled step, which is not compiled again."""
    model, traces = Net(), []
    optimizer = nnx.Optimizer(model, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        grads = nnx.grad(lambda model: loss(model.layers[0]))(model)
        return optimizer.update(model, grads)["layers"][0]["bias"]

    first = step(model, optimizer)
    optimizer.opt_state.hyperparams["learning_rate"].value = jnp.zeros((), jnp.float32)
    second = step(model, optimizer)
    assert first.any()
    assert not second.any()
    assert len(traces) == 1


# --- after a change of the model --------------------------------------------------------------------------------------


def grown(model):
    nnx.add_lora(model, 2, rngs=nnx.Rngs(0))


def shrunk(model):
    del model.layers[1]


def exchanged(model):
    model.layers[1] = nnx.Linear(3, 7, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (grown, r"mu\.layers\[0\]\.lora\.lora_a: missing, expected OptVariable \(float32\[2, 2\]\)"),
        (shrunk, r"mu\.layers\[1\]\.kernel: unexpected float32\[3, 1\]"),
        (exchanged, r"mu\.layers\[1\]\.bias: expected shape \(7,\), got \(1,\)"),
    ],
)
def test_a_state_of_other_parameters_is_refused(change, message):
    """A model that was changed after the optimizer was made needs a new one; the paths say what does not fit."""
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.adam(0.1))
    change(model)
    before = nnx.to_pure_dict(nnx.state((model, optimizer)))
    grads = nnx.grad(lambda model: model(jnp.ones(2)).sum())(model)
    with pytest.raises(StateMismatchError, match=rf"{message}(?s:.)*make a new one: nnx\.Optimizer"):
        optimizer.update(model, grads)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, nnx.to_pure_dict(nnx.state((model, optimizer)))))


@pytest.mark.parametrize("jitted", [False, True])
def test_gradients_of_examples(jitted):
    """They have an axis in front, which the transformation of differentially private training reduces."""
    private = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=jax.random.key(0))
    model, tx = Net(), optax.chain(private, optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx)
    scales = jnp.array([1.0, 2.0, 3.0])

    def step(model, optimizer):
        example = lambda model, scale: scale * loss(model.layers[0])
        optimizer.update(model, nnx.vmap(nnx.grad(example), in_axes=(None, 0))(model, scales))

    (nnx.jit(step) if jitted else step)(model, optimizer)
    params = {"kernel": jnp.ones((2, 4)), "bias": jnp.array([0.5, 0.5])}
    grads = jax.vmap(jax.grad(lambda p, scale: scale * loss(p)), in_axes=(None, 0))(params, scales)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(model.layers[0].bias.value, params["bias"] + updates["bias"], rtol=1e-5)


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1), optax.sgd(0.1, momentum=0.9)])
def test_gradients_of_examples_for_a_transformation_that_does_not_reduce_them(tx):
    """The error is that of gradients that do not fit, and names the paths."""
    model = Net()
    optimizer = nnx.Optimizer(model, tx)
    grads = jax.tree.map(lambda x: jnp.stack([x, x]), nnx.state(model))
    with pytest.raises(StateMismatchError, match=r"bias: expected shape \(2,\), got \(2, 2\)\n(?s:.)*nnx.grad returns"):
        optimizer.update(model, grads)
    assert model.layers[0].kernel.shape == (2, 4)
    assert optimizer.step.value == 0


def test_other_errors_of_a_transformation_are_left_alone():
    """A missing argument is not the fault of the state."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.polyak_sgd(0.1))
    grads = nnx.grad(lambda model: loss(model.layers[0]))(model)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'value'"):
        optimizer.update(model, grads)


# --- without optax ----------------------------------------------------------------------------------------------------


class Momentum(NamedTuple):
    """A transformation that needs no library."""

    rate: float = 0.1

    def init(self, params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, grads, state, params=None):
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
        return jax.tree.map(lambda m: -self.rate * m, state), state


def test_training_needs_no_optax(monkeypatch):
    """Optimizer, TrainState, EMA and metrics with a transformation of one's own, where optax cannot be imported."""
    monkeypatch.setitem(sys.modules, "optax", None)
    model = Net()
    optimizer, average, mean = nnx.Optimizer(model, Momentum()), nnx.EMA(model, 0.5), nnx.metrics.Average("loss")
    graphdef, params = nnx.split(model)
    functional = nnx.TrainState.create(graphdef, params=params, tx=Momentum())

    @nnx.jit
    def step(model, optimizer, average, mean):
        value, grads = nnx.value_and_grad(lambda model: loss(model.layers[0]))(model)
        optimizer.update(model, grads)
        average.update(model)
        mean.update(loss=value)
        return grads

    for _ in range(2):
        functional = functional.apply_gradients(step(model, optimizer, average, mean))
    assert_same(nnx.pure(functional.params), nnx.pure(nnx.state(model)))
    assert (optimizer.step.value, functional.step) == (2, 2)
    assert jnp.isfinite(mean.compute())
