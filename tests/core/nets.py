"""Small Modules whose tables several tests look at."""

import jax.numpy as jnp

import nnxlib as nnx
from nnxlib.core.tables import table_of


def layout_of(x):
    return table_of(x).layout


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.n = 1


class Net(nnx.Module):
    def __init__(self):
        self.layers = [Layer(), Layer()]
        self.scale = jnp.ones(())
        self.act = jnp.tanh


class Slotted(nnx.Module):
    """Declares slots, and has a pytree with an array in one."""

    __slots__ = ("pair",)

    def __init__(self):
        self.pair = (jnp.ones(1), 1)


def param(value=2.0):
    return nnx.Param(jnp.full(2, value))
