import jax.nn
import jax.numpy as jnp

import nnxlib as nnx

NAMES = """celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid log_softmax
logsumexp one_hot relu relu6 selu sigmoid silu soft_sign softmax softplus standardize swish""".split()


def test_activations_are_those_of_jax():
    """Every name is the very function of JAX, so that custom derivatives and names in profiles are JAX's own."""
    assert [name for name in NAMES if getattr(nnx, name) is not getattr(jax.nn, name)] == []
    assert nnx.tanh is jnp.tanh
