import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx

LAYERS = {
    "Linear": lambda rngs: nnx.Linear(7, 11, rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(5, 7, (3, 3), kernel_init=nnx.initializers.he_normal(), rngs=rngs),
    "Embed": lambda rngs: nnx.Embed(13, 5, rngs=rngs),
    "BatchNorm": lambda rngs: nnx.BatchNorm(17, rngs=rngs),
    "Dropout": lambda rngs: nnx.Dropout(0.5, rngs=rngs),
}


@pytest.mark.parametrize("name", ["zeros", "ones"])
@pytest.mark.parametrize("dtype", [jnp.float32, "bfloat16", jnp.int32, np.dtype("float16")], ids=str)
def test_constants_are_those_of_jax(name, dtype):
    """Our `zeros` and `ones` give the arrays of jax.nn.initializers, each time a new one."""
    ours, theirs = getattr(nnx.initializers, name), getattr(jax.nn.initializers, name)
    first, second = ours(None, (2, 3), dtype), ours(None, [2, 3], dtype)
    assert (first.dtype, first.weak_type) == (theirs(None, (2, 3), dtype).dtype, False)
    np.testing.assert_array_equal(first, theirs(None, (2, 3), dtype))
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()


def test_a_number_is_the_shape_of_a_vector():
    """The constants take a size in place of a shape, as those of JAX do; what is no size is refused."""
    assert nnx.initializers.ones(None, 3).tolist() == [1, 1, 1]
    assert nnx.initializers.zeros(None, np.int64(2)).tolist() == [0, 0]
    with pytest.raises(TypeError, match="integer"):
        nnx.initializers.zeros(None, 2.5)


def test_constants_take_a_sharding():
    """Keyword arguments go to the initializer of JAX."""
    x = nnx.initializers.ones(None, (2,), jnp.float32, out_sharding=None)
    np.testing.assert_array_equal(x, [1.0, 1.0])


def test_every_initializer_of_jax_is_here():
    """The namespace has all of jax.nn.initializers, and the two that flax users know besides."""
    missing = [n for n in dir(jax.nn.initializers) if not n.startswith("_") and not hasattr(nnx.initializers, n)]
    assert missing == []
    assert nnx.initializers.zeros_init() is nnx.initializers.zeros
    assert nnx.initializers.ones_init() is nnx.initializers.ones


@pytest.mark.parametrize("name", LAYERS)
def test_a_second_layer_of_the_same_shape_compiles_nothing(name, caplog):
    """Each initializer is compiled once per shape and dtype, however many layers are made."""
    make = LAYERS[name]
    rngs = nnx.Rngs(0)
    make(rngs)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        make(rngs)
        make(nnx.Rngs(1))
    assert [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()] == []
