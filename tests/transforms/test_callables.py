"""What a transform may be given as a function is taken apart into a function and its arguments."""

import functools

import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from nnxlib.core.static import StaticArgument
from nnxlib.transforms.callables import resolve


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return self.w * x

    def method(self, x, by):
        return by * self(x)


def shown(f):
    """What resolve finds, with static values unwrapped."""
    function, args, kwargs = resolve(f)
    show = lambda x: ("static", x.value) if isinstance(x, StaticArgument) else x
    return function, tuple(map(show, args)), {k: show(v) for k, v in kwargs.items()}


def test_resolve():
    """Partials, bound methods and callable Modules come apart; what holds data is an argument, the rest is static."""
    layer, f = Layer(), lambda *args, **kwargs: None
    assert shown(f) == (f, (), {})
    assert shown(Layer) == (Layer, (), {})
    assert shown(layer.method) == (Layer.method, (layer,), {})
    assert shown(layer) == (Layer.__call__, (layer,), {})
    assert shown(functools.partial(layer.method, by=2)) == (Layer.method, (layer,), {"by": ("static", 2)})
    nested = functools.partial(functools.partial(f, 1, k=layer), layer, k="later", n=[layer])
    assert shown(nested) == (f, (("static", 1), layer), {"k": ("static", "later"), "n": [layer]})


def test_methods_of_other_objects_stay_as_they_are():
    """A method bound to something that is no node is a function like any other."""
    method = "x".join
    assert shown(method) == (method, (), {})


def test_a_node_that_cannot_be_called():
    """It says so, and what to do."""
    with pytest.raises(errors.ArgumentError, match=r"A Dict cannot be called; give its class a method __call__"):
        resolve(nnx.Dict(a=1))
