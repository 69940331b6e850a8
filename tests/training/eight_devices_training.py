"""Training across devices; run by test_sharded.py in a process that has eight CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnxlib as nnx

optax = pytest.importorskip("optax")

MESH = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))
COLUMNS, ROWS, WHOLE = (NamedSharding(MESH, PartitionSpec(*axes)) for axes in ((None, "model"), ("data",), ()))
X = jax.random.normal(jax.random.key(0), (16, 4))


class Net(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(4, 8, param_dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(8, 1, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def sharded(model):
    """The first kernel has its columns on four devices, all else is on each device."""
    for path, variable in nnx.to_flat_state(nnx.variables(model)):
        place = COLUMNS if path == ("up", "kernel") else WHOLE
        nnx.update(model, nnx.from_flat_state([(path, jax.device_put(variable.get_value(), place))]))
    return model


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def is_on(variable, sharding):
    return variable.get_value().sharding.is_equivalent_to(sharding, variable.ndim)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_moments_are_where_their_parameter_is(dtype):
    """From the start, and after donating steps on a batch in shards; the numbers are those of one device."""
    assert jax.device_count() == 8
    model, alone = sharded(Net(dtype)), Net(dtype)
    optimizer, reference = (nnx.Optimizer(m, optax.adam(0.1)) for m in (model, alone))
    for n in range(3):
        for place in (model.up.kernel, *(moment.up.kernel for moment in optimizer.opt_state[0][1:])):
            assert is_on(place, COLUMNS), n
            assert place.dtype == dtype
        loss, expected = step(model, optimizer, jax.device_put(X, ROWS)), step(alone, reference, X)
        np.testing.assert_allclose(float(loss), float(expected), rtol=1e-5 if dtype == jnp.float32 else 0.05)


def test_names_of_axes_place_parameters_and_moments():
    """Named axes are metadata of the moments too; made within a mesh, by one compiled function, all are in place."""

    def make():
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        model = nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1))

    with jax.set_mesh(MESH):
        model, optimizer = nnx.jit(make)()
        eager_model, eager = make()
    for kernel in (model.kernel, optimizer.opt_state[0].mu.kernel, eager_model.kernel, eager.opt_state[0].mu.kernel):
        assert kernel.get_metadata("out_sharding") == (None, "model")
        assert is_on(kernel, COLUMNS)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("names", [None, ("data", None)])
def test_moments_may_be_in_other_shards_than_their_parameter(names, compiled):
    """What is read only once per step can be spread further; the names are metadata of the parameter."""
    kernel = {"optimizer_sharding": (None, "model"), **({"out_sharding": names} if names else {})}
    model = nnx.Linear(4, 8, kernel_metadata=kernel, rngs=nnx.Rngs(0))
    make = lambda model: nnx.Optimizer(model, optax.adam(1e-3))
    without_mesh = make(model).opt_state[0].mu
    assert without_mesh.kernel.get_metadata() == {"out_sharding": (None, "model")}
    with jax.set_mesh(MESH):
        model = nnx.Linear(4, 8, kernel_metadata=kernel, rngs=nnx.Rngs(0))
        optimizer = (nnx.jit(make) if compiled else make)(model)
        assert is_on(model.kernel, ROWS if names else WHOLE)
        for moments in optimizer.opt_state[0].mu, optimizer.opt_state[0].nu:
            assert is_on(moments.kernel, COLUMNS)
            assert moments.kernel.sharding_names == (None, "model")
        grads = nnx.grad(lambda model: model(X).sum())(model)
        optimizer.update(model, grads)
        assert is_on(model.kernel, ROWS if names else WHOLE)
        step = nnx.jit(lambda model, optimizer: optimizer.update(model, nnx.grad(lambda m: m(X).sum())(model)))
        step(model, optimizer)
    assert is_on(model.kernel, ROWS) or not names  # the update has come back to it from the shards of the moments
    assert is_on(optimizer.opt_state[0].mu.kernel, COLUMNS)
    assert model.kernel.get_metadata() == kernel


def test_a_parameter_without_names_does_not_move_to_the_shards_of_its_moments():
    """Over explicit axes these are part of its type, so a loop could not carry it."""

    def step(carry, x):
        model, optimizer = carry
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).sum())(model))
        return carry, None

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        kernel = {"optimizer_sharding": (None, "model")}
        model = nnx.Linear(4, 8, kernel_metadata=kernel, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3))
        before = jax.typeof(model.kernel.value)
        nnx.scan(step)((model, optimizer), jnp.ones((3, 2, 4)))
        assert jax.typeof(model.kernel.value) == before
        nnx.jit(step)((model, optimizer), jnp.ones((2, 4)))
        assert jax.typeof(model.kernel.value) == before
        assert jax.typeof(optimizer.opt_state[0].mu.kernel.value).sharding.spec == PartitionSpec(None, "model")
        assert int(optimizer.step.value) == 4


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_parameter_made_without_the_mesh_joins_its_moments(axis_type, compiled):
    """A model on one device is not put back there, where JAX would not take it together with its moments."""

    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: model(jnp.ones((2, 4))).sum())(model))

    model = nnx.Linear(4, 8, kernel_metadata={"optimizer_sharding": (None, "model")}, rngs=nnx.Rngs(0))
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)):
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3))
        for _ in range(2):
            (nnx.jit(step) if compiled else step)(model, optimizer)
    assert model.kernel.value.sharding.device_set == set(jax.devices())


def test_factored_moments_have_no_names():
    """What has another shape than its parameter does not take over the names of its axes."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    model = nnx.Linear(4, 8, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
    tx = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.trace(0.9))
    with jax.set_mesh(MESH):
        factored, momentum = nnx.jit(lambda model: nnx.Optimizer(model, tx))(model).opt_state
    assert [v.kernel.sharding_names for v in (factored.v_row, factored.v_col, factored.v)] == [None] * 3
    assert is_on(momentum.trace.kernel, COLUMNS)


def test_an_average_is_where_its_parameter_is():
    """An EMA of a model in shards is in shards, before and after a compiled update."""
    model = sharded(Net())
    average = nnx.EMA(model, 0.9)
    assert is_on(average.params.up.kernel, COLUMNS)
    nnx.jit(lambda average, model: average.update(model))(average, model)
    assert is_on(average.params.up.kernel, COLUMNS)


def test_metrics_of_a_batch_in_shards():
    """Compiled, the sums go over all devices; in shard_map, each device has a metric of its own, or gathers first."""
    values, mask = jnp.arange(16.0), jnp.arange(16) % 3 == 0
    expected = np.arange(16.0)[::3].mean()
    rows = NamedSharding(MESH, PartitionSpec("data"))

    metric = nnx.metrics.Average()
    nnx.jit(lambda m, x, mask: m.update(values=x, mask=mask))(
        metric, jax.device_put(values, rows), jax.device_put(mask, rows)
    )
    np.testing.assert_allclose(metric.compute(), expected)

    def gathered(metric, x, mask):
        metric.update(values=jax.lax.all_gather(x, "data"), mask=jax.lax.all_gather(mask, "data"))

    metric, data = nnx.metrics.Average(), PartitionSpec("data")
    specs = {"in_specs": (PartitionSpec(), data, data), "out_specs": PartitionSpec(), "check_vma": False}
    nnx.shard_map(gathered, mesh=MESH, **specs)(metric, values, mask)
    np.testing.assert_allclose(metric.compute(), expected)

    own = nnx.vmap(lambda _: nnx.metrics.Average())(jnp.arange(2))
    update = nnx.vmap(lambda m, x, mask: m.update(values=x, mask=mask))
    nnx.shard_map(update, mesh=MESH, in_specs=(data, data, data), out_specs=PartitionSpec())(
        own, values.reshape(2, 8), mask.reshape(2, 8)
    )
    np.testing.assert_allclose(own.total.value.sum() / own.count.value.sum(), expected)
    np.testing.assert_allclose(own.compute(), [np.mean([0, 3, 6]), np.mean([9, 12, 15])])


def test_dropout_on_each_device():
    """With `axis_name`, the masks of the devices differ although the layer is on each of them."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("row",))
    rows = PartitionSpec("row")
    for kwargs, masks in (({}, 1), ({"axis_name": "row"}, 8)):
        layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0), **kwargs)
        run = nnx.shard_map(lambda d, x: d(x), mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows)
        assert len(np.unique(np.asarray(run(layer, jnp.ones((8, 64)))), axis=0)) == masks
        assert int(layer.rngs.count.value) == 1


def test_dropout_of_inputs_with_explicit_axes():
    """The mask is laid out as the input is, and has the numbers that it has without a mesh."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x = jnp.ones((8, 4))
    expected = nnx.Dropout(0.5, rngs=nnx.Rngs(0))(x)
    with jax.set_mesh(mesh):
        y = nnx.Dropout(0.5, rngs=nnx.Rngs(0))(jax.device_put(x, PartitionSpec("data", "model")))
        assert jax.typeof(y).sharding.spec == PartitionSpec("data", "model")
    np.testing.assert_array_equal(y, expected)


def test_a_checkpoint_is_restored_onto_another_mesh(tmp_path):
    """Shapes made under that one have shardings over it, also those of Variables without names of axes."""
    ocp = pytest.importorskip("orbax.checkpoint")

    def start():
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        model = nnx.Sequential(nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
        return model, nnx.Optimizer(model, optax.adam(1e-3))

    with jax.set_mesh(MESH):
        saved = nnx.state(nnx.jit(start)())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", saved)
    two = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(two):
        model, optimizer = nnx.eval_shape(start)
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update((model, optimizer), checkpointer.restore(tmp_path / "1", nnx.state((model, optimizer))))
    assert {x.sharding.mesh for x in jax.tree.leaves(nnx.state((model, optimizer)))} == {two}
    assert optimizer.opt_state[0].mu.layers[0].kernel.value.sharding.spec == PartitionSpec(None, "model")
    assert np.isfinite(step(model, optimizer, X))
