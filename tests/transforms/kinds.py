"""A Module with one attribute of each kind, for the tests of prefixes and of labels."""

import jax.numpy as jnp

import nnxlib as nnx


class Net(nnx.Module):
    """Has a Param, another Variable, an array and a static value."""

    def __init__(self) -> None:
        self.a = nnx.Param(jnp.zeros(1))
        self.stat = nnx.BatchStat(jnp.zeros(1))
        self.array = jnp.zeros(2)
        self.static = "s"
