"""Models across two processes; run by test_processes.py in both at once, each of which has two CPU devices.

An array is global if its devices are in both processes; then neither can read all of it, unless it is replicated.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import nnxlib as nnx

optax = pytest.importorskip("optax")

NUMBER = int(os.environ["PROCESS"])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(os.environ["COORDINATOR"], 2, NUMBER)
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS, COLUMNS, WHOLE = (NamedSharding(MESH, PartitionSpec(*axes)) for axes in (("data",), (None, "model"), ()))
X = np.random.RandomState(0).randn(8, 4).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        column = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        row = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", None))
        self.up = nnx.Linear(4, 8, kernel_init=column, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(8, 4, kernel_init=row, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def start():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def batch():
    return jax.make_array_from_callback(X.shape, ROWS, lambda index: X[index])


@functools.cache
def losses_of_one():
    model, optimizer = start()
    return [float(step(model, optimizer, X)) for _ in range(3)]


@pytest.mark.parametrize("way", ["jitted", "eager", "placed by in_shardings"])
def test_a_model_trains_as_in_one_process(way):
    """Made by a compiled function or eagerly, with names of axes or told by the step; the losses are those of one."""
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
    expected, train = losses_of_one(), step
    if way == "placed by in_shardings":
        train = nnx.jit(step.__wrapped__, in_shardings=(WHOLE, WHOLE, ROWS))
        model, optimizer = start()
    else:
        with jax.set_mesh(MESH):
            model, optimizer = nnx.jit(start)() if way == "jitted" else start()
        assert model.up.kernel.value.sharding.is_equivalent_to(COLUMNS, 2)
        assert optimizer.opt_state[0].mu.up.kernel.value.sharding.is_equivalent_to(COLUMNS, 2)
    losses = [float(train(model, optimizer, batch())) for _ in range(3)]
    assert all(not x.is_fully_addressable for x in jax.tree.leaves((nnx.state(model), nnx.state(optimizer))))
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert repr(nnx.clone(model)) == repr(model)


def test_what_a_call_moves_across_processes_stays_there():
    """Also random keys, which jax.device_put does not move: each call would otherwise move what it only reads."""
    model = Net(nnx.Rngs(0))
    model.eval()
    call = nnx.jit(lambda model, x: model(x), in_shardings=(WHOLE, ROWS))
    call(model, batch())
    moved = jax.tree.leaves(nnx.state(model))
    assert {x.sharding for x in moved} == {WHOLE}
    call(model, batch())
    assert all(x is y for x, y in zip(moved, jax.tree.leaves(nnx.state(model)), strict=True))


def test_diff_compares_the_parts_that_a_process_has():
    """A difference is seen by the process that has the part; what is replicated, by both."""
    with jax.set_mesh(MESH):
        make = nnx.jit(lambda: Net(nnx.Rngs(0)))
        model, other = make(), make()
    assert not nnx.diff(model, other)
    other.down.kernel[0, 0] += 0.5  # the rows of each process are its own
    other.down.bias.value = jax.device_put(np.full(4, 0.5, np.float32), WHOLE)
    nnx.reseed(other.dropout, default=1)
    found = {x.path[-1]: x.after for x in nnx.diff(model, other) if x.path[-1] != "kernel"}
    assert found == {"bias": "4 of 4 differ, by 0.5 at [0] at most", "key": "another key"}
    kernels = [{"kernel": x.down.kernel} for x in (model, other)]
    expected = ["1 of 16 in this process differ, by 0.5 at [0, 0] at most"] if NUMBER == 0 else []
    assert [x.after for x in nnx.diff(*kernels)] == expected


def test_statistics_of_what_is_replicated():
    """Each process can read it; an array whose parts are apart has an entry without numbers."""
    arrays = {
        "whole": jax.device_put(np.arange(4.0, dtype=np.float32), WHOLE),
        "rows": jax.make_array_from_callback(X.shape, ROWS, lambda index: X[index]),
    }
    rows, whole = nnx.statistics(arrays)
    assert (whole.mean, rows.mean, rows.size) == (1.5, None, 32)
