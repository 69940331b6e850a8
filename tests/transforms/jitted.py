"""Modules that are jitted, for the tests of nnx.jit."""

import jax.numpy as jnp

import nnxlib as nnx

X = jnp.ones(2)


class Layer(nnx.Module):
    """Scales, and counts its calls."""

    def __init__(self, value=1.0):
        self.w = nnx.Param(jnp.full(2, value, jnp.float32))
        self.calls = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls += 1
        return self.w * x

    def scaled(self, x, by=1.0, *, times=1):
        for _ in range(times):
            x = self(x)
        return by * x


class Net(nnx.Module):
    def __init__(self, depth=2):
        self.layers = [Layer(float(i + 1)) for i in range(depth)]
        self.scale = 2.0

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.scale * x


def values(model):
    return [v.value for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
