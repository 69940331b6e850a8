"""The paths of running calls, seen in name scopes: in every transform, of shared, new and rebuilt Modules."""

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from tests.core.called import INSIDE, Layer, Net, plain, scopes

X = jnp.ones((1, 2))


@pytest.fixture(autouse=True)
def own_programs():
    """The cache of compiled programs would hand out one with the names of another."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


def test_paths_start_at_the_argument():
    """Modules in containers of the arguments, by keyword and bound ones have the path from there."""
    for f, args, kwargs, expected in (
        (lambda t, x: t["m"][0](x), ({"m": [Layer()]}, X), {}, "m/0"),
        (lambda x, *, m: m(x), (X,), {"m": Layer()}, "Layer"),
        (Layer(), (X,), {}, "Layer"),
        (Net().block.layers[0], (X,), {}, "Layer"),
        (lambda ms, x: ms[1](x), (nnx.List([1, Layer()]), X), {}, "1"),
    ):
        assert scopes(f, *args, **kwargs)["sin"] == [expected]


def test_a_shared_module_has_its_first_path():
    """Wherever it is called from, a shared Module is called by its first path."""
    net = Net()
    net.tied, net.first = net.block.layers[1], Layer()
    net.a_first = net.first

    def f(m, x):
        return m.tied(m.first(m.block.layers[1](x)))

    assert scopes(f, net, X)["sin"] == ["block/layers/1", "a_first"]
    assert scopes(lambda a, b, x: b["k"](x), net, {"k": net.first}, X)["sin"] == ["a_first"]


def test_modules_made_inside():
    """A Module that is made in the trace is known by the attribute it is set to, and by its class before."""

    class Lazy(nnx.Module):
        def __call__(self, x):
            self.made = Layer()
            return self.made(x) + Layer()(2 * x)

    assert scopes(lambda m, x: m.lazy(x), nnx.Dict(lazy=Lazy()), X)["sin"] == ["lazy/made", "lazy/Layer"]


class Rebuilding(nnx.Module):
    """Calls its parts as new Modules, made of their states, as code does that scans over layers by itself."""

    def __init__(self, part):
        self.part = part

    def __call__(self, x):
        return nnx.merge(*nnx.split(self.part))(x)


def test_modules_rebuilt_within_modules_rebuilt_inside():
    """Each that is part of nothing known is named below its caller, however deep."""
    found = scopes(lambda x: Rebuilding(Rebuilding(Rebuilding(Layer())))(x), X)
    assert found["sin"] == ["Rebuilding/Rebuilding/Rebuilding/Layer"]


def test_a_module_called_twice():
    """The same path at each call."""
    assert scopes(lambda m, x: m.block(m.block(x)), Net(), X)["sin"] == [
        "block/layers/0", "block/layers/1", "block/heads/a"
    ]  # fmt: skip


@pytest.mark.parametrize("inside", INSIDE)
def test_paths_inside_transforms(inside):
    """Inside any transform, called by a Module on itself, a part, a part of a part: the path in the whole model."""

    class Outer(nnx.Module):
        def __init__(self, choose):
            self.net, self.choose = Net(), choose

        def __call__(self, x):
            return INSIDE[inside](lambda m, x: m(x), self.choose(self), x)

    for choose, expected in (
        (lambda m: m.net, {"model/net/block/layers/0", "model/net/block/layers/1", "model/net/block/heads/a"}),
        (lambda m: m.net.block.layers[1], {"model/net/block/layers/1"}),
    ):
        found = scopes(lambda d, x: d["model"](x), {"model": Outer(choose)}, X)
        assert {plain(s) for s in (*found.get("sin", ()), *found.get("cos", ()))} == expected


def test_paths_inside_a_transform_of_a_method():
    """A Module that transforms one of its own methods adds no level."""

    class Own(Layer):
        def __call__(self, x):
            return nnx.remat(Layer.__call__)(self, x)

    assert {plain(s) for s in scopes(lambda d, x: d["own"](x), {"own": Own()}, X)["sin"]} == {"own"}
