"""Training as under flax.nnx: the same steps from the same start, the same optimizer state, metrics and averages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")
pytest.importorskip("optax")

import optax
from flax import nnx as flax_nnx

from .results import same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def make_net(lib):
    """Two layers, a bfloat16 scale, metadata, a shared Variable, a running mean."""

    class Layer(lib.Module):
        def __init__(self, key, fan_in, fan_out):
            self.kernel = lib.Param(jax.random.normal(key, (fan_in, fan_out)) / fan_in, layer="dense")
            self.bias = lib.Param(jnp.zeros(fan_out))

        def __call__(self, x):
            return x @ self.kernel[...] + self.bias[...]

    class Net(lib.Module):
        def __init__(self):
            keys = jax.random.split(jax.random.key(0), 2)
            self.layers = lib.List([Layer(keys[0], 3, 5), Layer(keys[1], 5, 2)])
            self.scale = lib.Param(jnp.ones((), jnp.bfloat16))
            self.mean = lib.BatchStat(jnp.zeros(5))
            self.first_bias = self.layers[0].bias

        def __call__(self, x):
            x = jax.nn.tanh(self.layers[0](x))
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(axis=0)
            return (self.layers[1](x) + self.first_bias[...].sum()) * self.scale[...]

    return Net()


X = jax.random.normal(jax.random.key(1), (7, 3))
Y = jax.random.normal(jax.random.key(2), (7, 2))


def loss_of(model):
    return jnp.mean((model(X) - Y) ** 2)


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim == 2, params)


def by_rank(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "other", params)


TRANSFORMATIONS = {
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=is_matrix),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)),
    "masked": lambda: optax.masked(optax.adam(1e-2), is_matrix),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "other": optax.sgd(0.1, momentum=0.5)}, by_rank
    ),
    "frozen": lambda: optax.multi_transform({"matrix": optax.adam(1e-2), "other": optax.set_to_zero()}, by_rank),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-1, 5)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("adam", optax.adam(1e-2))),
    "bfloat16 moments": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
}


def described(lib, node):
    """Path -> type, metadata, dtype and value of each Variable; a masked one by its value's type."""
    found = {}
    for path, variable in lib.to_flat_state(lib.state(node)):
        metadata = {k: v for k, v in variable.get_metadata().items() if k not in ("hijax", "ref", "eager_sharding")}
        value = variable.get_value()
        if hasattr(value, "dtype"):
            found[path] = type(variable).__name__, metadata, str(value.dtype), np.asarray(value, np.float64)
    return found


def assert_same(ours, theirs, **tolerance):
    assert list(ours) == list(theirs)
    for path in theirs:
        assert ours[path][:3] == theirs[path][:3], path
        np.testing.assert_allclose(ours[path][3], theirs[path][3], err_msg=str(path), **tolerance)


def trained(lib, make_tx, *, jitted, steps=4):
    model = make_net(lib)
    optimizer = lib.Optimizer(model, make_tx(), wrt=lib.Param)
    start = described(lib, optimizer)

    def train_step(model, optimizer):
        loss, grads = lib.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    step = lib.jit(train_step) if jitted else train_step
    losses = [float(step(model, optimizer)) for _ in range(steps)]
    return start, losses, described(lib, model), described(lib, optimizer)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_same_steps(name, jitted):
    """Losses, parameters and every Variable of the optimizer (path, type, metadata, dtype, value) after four steps."""
    ours = trained(nnxlib, TRANSFORMATIONS[name], jitted=jitted)
    theirs = trained(flax_nnx, TRANSFORMATIONS[name], jitted=jitted)
    assert_same(ours[0], theirs[0], rtol=0)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)
    assert_same(ours[2], theirs[2], rtol=2e-5, atol=1e-7)
    assert_same(ours[3], theirs[3], rtol=2e-5, atol=1e-7)


def seen_from_outside(lib, make_tx):
    """The types in the state of an optimizer by path, the paths of JAX, and what optax makes of it."""
    model, tx, types = make_net(lib), make_tx(), {}
    optimizer = lib.Optimizer(model, tx, wrt=lib.Param)
    lib.jit(lambda model, optimizer: optimizer.update(model, lib.state(model, lib.Param)) and None)(model, optimizer)

    def note(tree, path):
        types[path] = type(tree).__name__
        items = list(tree.items()) if hasattr(tree, "items") else enumerate(tree) if isinstance(tree, tuple) else ()
        for key, item in () if isinstance(tree, lib.Variable) else items:
            note(item, (*path, str(key)))

    note(optimizer.opt_state, ())
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(optimizer.opt_state)]
    doubled = optax.tree_utils.tree_map_params(tx, lambda x: x * 2, optimizer.opt_state)
    found = optax.tree_utils.tree_get_all_with_path(optimizer.opt_state, "learning_rate")
    same = jax.tree.structure(doubled) == jax.tree.structure(optimizer.opt_state)
    return types, paths, same, [(jax.tree_util.keystr(path), type(x).__name__) for path, x in found]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_same_state_from_outside(name):
    """Named tuples, dicts and States stand where flax.nnx has them, so the functions of optax for states work."""
    ours, theirs = (seen_from_outside(lib, TRANSFORMATIONS[name]) for lib in (nnxlib, flax_nnx))
    assert ours == theirs
    assert ours[2]


def test_same_steps_bit_for_bit_when_eager():
    """Without compilation the parameters after Adam are the same bits."""
    ours, theirs = (trained(lib, TRANSFORMATIONS["adam"], jitted=False)[2] for lib in (nnxlib, flax_nnx))
    assert_same(ours, theirs, rtol=0)


def learning_rate_changed(lib):
    optimizer = lib.ModelAndOptimizer(make_net(lib), optax.inject_hyperparams(optax.adam)(learning_rate=1e-2))
    for step in range(3):
        optimizer.opt_state.hyperparams["learning_rate"].value = jnp.asarray(0.1 / (step + 1))
        updates = optimizer.update(lib.grad(loss_of)(optimizer.model))
    return {**described(lib, optimizer), "updates": lib.to_pure_dict(updates)}


def lbfgs(lib):
    model = make_net(lib)
    optimizer = lib.Optimizer(model, optax.lbfgs(), wrt=lib.Param)

    @lib.jit
    def train_step(model, optimizer):
        graphdef, _, rest = lib.split(model, lib.Param, ...)
        loss, grads = lib.value_and_grad(loss_of)(model)
        optimizer.update(
            model,
            grads,
            grad=grads,
            value=loss,
            value_fn=lambda params: loss_of(lib.merge(graphdef, params, rest, copy=True)),
        )

    for _ in range(3):
        train_step(model, optimizer)
    return described(lib, optimizer) | described(lib, model)


def more_gradients_than_trained(lib):
    model = make_net(lib)
    optimizer = lib.Optimizer(model, optax.sgd(0.1), wrt=lib.PathContains("kernel"))
    updates = optimizer.update(model, lib.grad(loss_of)(model))
    return {**described(lib, model), "updates": lib.to_pure_dict(updates)}


def everything_trained(lib):
    model = make_net(lib)
    optimizer = lib.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=...)
    optimizer.update(model, lib.grad(loss_of, argnums=lib.DiffState(0, ...))(model))
    return described(lib, model) | described(lib, optimizer)


def only_state(lib):
    return lib.to_pure_dict(
        lib.state(lib.Optimizer(make_net(lib), optax.adam(0.1), wrt=lib.Param), lib.optimizer.OptArray)
    )


def attributes(lib):
    model, tx = make_net(lib), optax.sgd(0.1)
    optimizer = lib.ModelAndOptimizer(model, tx)
    assert optimizer.model is model
    assert optimizer.tx is tx
    return [optimizer.wrt is lib.Param, optimizer.opt_state, str(optimizer.step.dtype)]


def restored(lib):
    optimizer = lib.Optimizer(make_net(lib), optax.adam(0.1), wrt=lib.Param)
    other = lib.Optimizer(make_net(lib), optax.adam(0.1), wrt=lib.Param)
    other.update(model := make_net(lib), lib.grad(loss_of)(model))
    lib.update(optimizer, lib.state(other, lib.optimizer.OptState))
    return described(lib, optimizer)


def opt_state_of(lib):
    wrapped = lib.optimizer.to_opt_state({"a": (jnp.ones(2), lib.Param(jnp.zeros(2), x=1)), "b": None})
    return [
        (type(v).__name__, np.asarray(v.get_value()))
        for v in jax.tree.leaves(wrapped, is_leaf=lambda v: isinstance(v, lib.Variable))
    ]


# --- EMA ------------------------------------------------------------------------------------------------------------


def averaged(lib):
    model = make_net(lib)
    model.scale.value = model.scale.value.astype(jnp.float32)
    ema = lib.EMA(model, decay=0.9, only=(lib.Param, lib.BatchStat))
    smooth = ema.apply_to(model)
    step = lib.jit(lambda ema, model: ema.update(model))
    for _ in range(3):
        lib.update(model, jax.tree.map(lambda x: x + 1.0, lib.state(model)))
        step(ema, model)
    assert smooth.layers[0].kernel is ema.params.layers[0].kernel
    assert smooth.first_bias is smooth.layers[0].bias
    return described(lib, ema) | described(lib, smooth)


def averaged_state(lib):
    model = make_net(lib)
    ema = lib.EMA(lib.state(model, lib.BatchStat), 0.5)
    model.mean.value += 1.0
    ema.update(lib.state(model, lib.BatchStat))
    smooth = ema.apply_to(model)
    assert smooth.mean is ema.params["mean"]
    assert smooth.scale is model.scale
    return [ema.decay, ema.filter, described(lib, ema)]


# --- TrainState -----------------------------------------------------------------------------------------------------


def train_state(lib):
    class TrainState(lib.TrainState):
        stats: lib.State
        tag: str = dataclasses.field(metadata={"pytree_node": False})

    graphdef, params, stats = lib.split(make_net(lib), lib.Param, ...)
    start = TrainState.create(graphdef, params=params, tx=optax.adam(1e-2), stats=stats, tag="x")

    @jax.jit
    def train_step(state):
        def loss(params):
            y, (_, new) = state.apply(params, jax.tree.map(jnp.copy, state.stats))(X)
            return jnp.mean((y - Y) ** 2), lib.filter_state(new, lib.BatchStat)

        grads, stats = jax.grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads, stats=stats)

    state = start
    for _ in range(3):
        state = train_step(state)
    later = state.replace(step=7)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    return [start.step, state.step, later.step, later.tag, paths, jax.tree.leaves(state)]


# --- metrics --------------------------------------------------------------------------------------------------------

LOGITS = jax.random.normal(jax.random.key(3), (4, 6, 3))
LABELS = jax.random.randint(jax.random.key(4), (4, 6), 0, 3)
CHOSEN = jax.random.bernoulli(jax.random.key(5), 0.6, (4, 6))


def state_of(lib, metric):
    return [
        (p, type(v).__name__, str(v.dtype), v.shape, np.asarray(v.get_value()))
        for p, v in lib.to_flat_state(lib.state(metric))
    ]


def average(lib):
    metric, found = lib.metrics.Average("loss"), []
    for values in (2, 2.5, jnp.arange(3), LOGITS, LOGITS > 0, jnp.float32(3)):
        metric.update(loss=values, other=1)
        found += [metric.compute(), state_of(lib, metric)]
    metric.update(loss=LOGITS[..., 0], mask=CHOSEN)
    found += [metric.compute(), state_of(lib, metric)]
    metric.reset()
    return [*found, metric.compute(), state_of(lib, metric)]


def accuracy(lib):
    found = []
    metric = lib.metrics.Accuracy()
    for arguments in ({}, {"mask": CHOSEN}, {"values": 3}):
        metric.update(logits=LOGITS, labels=LABELS, **arguments)
        found += [metric.compute(), state_of(lib, metric)]
    binary = lib.metrics.Accuracy(threshold=0.5)
    logits = LOGITS[..., 0].at[0, 0].set(0.5)  # at the threshold: yes
    for label in (LABELS > 0).astype(jnp.int32), (LABELS > 1).astype(jnp.int32):
        binary.update(logits=logits, labels=label)
        found += [binary.compute(), state_of(lib, binary)]
    return [*found, binary.threshold]


def welford(lib):
    metric, found = lib.metrics.Welford("loss"), []
    found += [*jax.tree.leaves(metric.compute())]
    for values in (LOGITS, 3.0, 100 + LOGITS, jnp.arange(3)):
        metric.update(loss=values, other=1)
        found += [*jax.tree.leaves(metric.compute()), state_of(lib, metric)]
    metric.reset()
    replaced = metric.compute().replace(mean=1.0)
    return [*found, state_of(lib, metric), replaced.mean, type(replaced).__name__]


def several(lib):
    metrics = lib.MultiMetric(accuracy=lib.metrics.Accuracy(), loss=lib.metrics.Average(), spread=lib.metrics.Welford())
    step = lib.jit(lambda metrics: metrics.update(logits=LOGITS, labels=LABELS, values=LOGITS[..., 0]))
    for _ in range(2):
        step(metrics)
    found = [
        state_of(lib, metrics),
        list(metrics.compute()),
        jax.tree.leaves(metrics.compute()),
        metrics.loss.compute(),
    ]
    found += [lib.to_pure_dict(state) for state in metrics.split(lib.PathContains("loss"), ...)[1:]]
    metrics.reset()
    return [*found, state_of(lib, metrics)]


SCENARIOS = [
    learning_rate_changed, lbfgs, more_gradients_than_trained, everything_trained, only_state, attributes, restored,
    opt_state_of, averaged, averaged_state, train_state, average, accuracy, welford, several,
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_same_results(scenario):
    """What the scenario returns, to seven digits."""
    same(scenario, dict.fromkeys(("float32", "float64"), 5e-7))


@pytest.mark.parametrize("name", ["adam", "masked", "inject_hyperparams", "named_chain"])
def test_a_checkpoint_of_flax_is_restored(name, tmp_path):
    """Model and optimizer, saved by orbax, with a target and without one; training goes on alike."""
    ocp = pytest.importorskip("orbax.checkpoint")

    def start(lib):
        model = make_net(lib)
        return model, lib.Optimizer(model, TRANSFORMATIONS[name](), wrt=lib.Param)

    def step(lib, model, optimizer):
        optimizer.update(model, lib.grad(loss_of)(model))
        return described(lib, (model, optimizer))

    model, optimizer = start(flax_nnx)
    step(flax_nnx, model, optimizer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", {"m": flax_nnx.state(model), "o": flax_nnx.state(optimizer)})
    expected = step(flax_nnx, model, optimizer)
    for targeted in (True, False):
        model, optimizer = start(nnxlib)
        target = {"m": nnxlib.state(model), "o": nnxlib.state(optimizer)}
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "1", *([target] if targeted else []))
        nnxlib.update(model, restored["m"])
        nnxlib.update(optimizer, restored["o"])
        assert_same(step(nnxlib, model, optimizer), expected, rtol=1e-3, atol=1e-4)  # a gradient in bfloat16
