"""Small Modules that several tests of the core share."""

import jax.numpy as jnp

import nnxlib as nnx


class Layer(nnx.Module):
    def __init__(self, n=2):
        self.w = nnx.Param(jnp.ones(n))
        self.mean = nnx.BatchStat(jnp.zeros(n))

    def __call__(self, x):
        self.mean.value = self.mean + x
        return x * self.w


class Net(nnx.Module):
    def __init__(self):
        self.first = Layer()
        self.layers = [Layer(), Layer(3)]
        self.scale = jnp.ones(())
        self.pair = (nnx.Param(jnp.zeros(1)), jnp.ones(1))
        self.name = "net"

    def run(self, x):
        return self.first(x) * self.scale
