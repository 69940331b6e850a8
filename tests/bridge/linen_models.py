"""Linen modules that the tests of the bridge share."""

import jax.numpy as jnp
from flax import linen as nn


class Block(nn.Module):
    """Three collections, two random streams, a recorded value, other methods."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(4)(x)
        self.sow("intermediates", "hidden", y)
        y = nn.BatchNorm(use_running_average=False)(y)
        calls = self.variable("calls", "count", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing() and self.is_mutable_collection("calls"):
            calls.value += 1
        return nn.Dropout(0.5, deterministic=False)(y)

    def double(self, x):
        return 2 * x

    def keys(self):
        return self.make_rng("params"), self.make_rng("dropout")
