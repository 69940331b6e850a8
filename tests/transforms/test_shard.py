"""nnx.shard_map; on eight CPU devices, in a process of its own."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx


def test_on_eight_devices(run_on_eight_devices):
    """The tests in eight_devices_shard.py pass where there are eight devices."""
    run_on_eight_devices(pathlib.Path(__file__).with_name("eight_devices_shard.py"))


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


def test_what_jax_cannot_trace_is_named_by_its_path():
    """An argument that is no array, and a model of shapes without values."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layer, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
    mapped = nnx.shard_map(lambda m, x, *mode: m(x), mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    with pytest.raises(nnx.errors.ArgumentError, match=r"args\[2\] is a str \('train'\), which JAX cannot trace"):
        mapped(layer, x, "train")
    abstract = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError) as caught:
        mapped(abstract, x)
    assert "shapes without values" in caught.value.__notes__[-1]
    assert "args[0].kernel: float32[2, 3]" in caught.value.__notes__[-1]
    assert (mapped(layer, x) == layer(x)).all()
