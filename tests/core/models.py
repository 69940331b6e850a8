"""Small Modules that several tests of the core share, and what is seen of one."""

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


def paths(state):
    return [path for path, _ in state.flat_state()]


def snapshot(node):
    """Every object and value in a graph, by path; two equal snapshots mean that nothing has changed."""
    return [(path, x, x.raw_value if isinstance(x, nnx.Variable) else None) for path, x in nnx.iter_graph(node)]


def same(a, b):
    return len(a) == len(b) and all(p == q and x is y and v is w for (p, x, v), (q, y, w) in zip(a, b))
