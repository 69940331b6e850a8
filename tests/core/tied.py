"""A model that holds one of its layers twice, which several tests of the core share."""

import jax.numpy as jnp

import nnxlib as nnx


class Embed(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(2))


class Net(nnx.Module):
    def __init__(self):
        self.embed = Embed()
        self.scale = 0.5
        self.tied = self.embed
        self.table = jnp.zeros(3)
