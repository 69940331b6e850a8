"""nnx.shard_map; on eight CPU devices, in a process of its own."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx


def test_on_eight_devices():
    """The tests in eight_devices_shard.py pass where there are eight devices."""
    path = pathlib.Path(__file__).with_name("eight_devices_shard.py")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_on_one_device():
    """A mesh of one device is a mesh."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    f = nnx.shard_map(lambda m, x: m(x), mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data"))
    assert (f(layer, jnp.ones((4, 2))) == layer(jnp.ones((4, 2)))).all()


def test_an_error_of_the_function_itself_is_left_alone():
    """Only JAX's own complaints are put into other words."""

    class Own(ValueError):
        pass

    calls = []

    def fail(layer, x):
        calls.append(1)
        raise Own("mine")

    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    mapped = nnx.shard_map(fail, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    with pytest.raises(Own, match="mine"):
        mapped(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones(2))
    assert len(calls) == 1
