"""Where a Module is: current_path while it runs, path_of below another; both are the path in nnx.state."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.errors import ArgumentError, PathError

X = jnp.ones(2)


class Where(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        self.seen = nnx.current_path()
        return self.w * x


class Pair(nnx.Module):
    def __init__(self):
        self.b, self.items = Where(), [Where(), (Where(), {10: Where(), 9: Where()})]

    def __call__(self, x):
        return self.items[1][1][10](self.b(x))


# --- path_of --------------------------------------------------------------------------------------------------------


def test_path_of_is_the_path_in_the_state():
    """Of Modules, containers and Variables; of what is shared the first one, with int keys in the order of ints."""
    model = Pair()
    model.items[1][1][10] = model.items[1][1][9]
    model.a_first = model.b
    for path, leaf in nnx.state(model).flat_state():
        owner = model
        for key in path[:-1]:
            owner = getattr(owner, key) if isinstance(key, str) else owner[key]
        assert nnx.path_of(model, owner.w) == path
        assert nnx.path_of(model, owner) == path[:-1]
        assert isinstance(leaf, nnx.Param)
    assert nnx.path_of(model, model.b) == ("a_first",)
    assert nnx.path_of(model, model.items[1][1][10]) == ("items", 1, 1, 9)
    assert nnx.path_of(model, model.items) == ("items",)
    assert nnx.path_of(model, model) == ()
    assert nnx.path_of({"m": [model]}, model.items) == ("m", 0, "items")


def test_path_of_what_is_not_there():
    """An error that says that identity counts, and that an array has none."""
    model = Pair()
    with pytest.raises(PathError, match=r"This Where is not part of the Pair\..*identity"):
        nnx.path_of(model, Where())
    with pytest.raises(PathError, match="a clone"):
        nnx.path_of(model, nnx.clone(model).b)
    with pytest.raises(ArgumentError, match=r"looks for a Module, List, Dict or Variable; a .*Array.* by its value"):
        nnx.path_of(model, model.b.w.value)


# --- current_path ---------------------------------------------------------------------------------------------------


def test_outside_of_a_call_there_is_none():
    """Also in a transform that no Module has called, and in a Module's constructor."""
    found = []

    class Made(nnx.Module):
        def __init__(self):
            found.append(nnx.current_path())

    Made()
    nnx.jit(lambda x: found.append(nnx.current_path()))(X)
    assert found == [None, None]
    assert nnx.current_path() is None


def test_in_eager_code():
    """From the outermost Module that runs, through functions, raw JAX and private methods."""
    model = Pair()
    model(X)
    assert (model.b.seen, model.items[1][1][10].seen) == (("b",), ("items", 1, 1, 10))
    model.b(X)
    assert model.b.seen == ()
    found = []

    class Calls(nnx.Module):
        def __init__(self):
            self.part = Part()

        def __call__(self, x):
            def step(x):
                return self.part._private(self.part(x))

            return [jax.vmap(step)(x[None]) for _ in range(1)]

    class Part(nnx.Module):
        def __call__(self, x):
            return self._private(x)

        def _private(self, x):
            found.append(nnx.current_path())
            return x

    Calls()(X)
    assert found == [("part",), ()], "a private method is part of its caller"


def test_below_a_part_that_is_nobodys():
    """A Module that is not attached to anything has the name of its class, below its caller, and parts below that."""
    found = []

    class Reports(nnx.Module):
        def __call__(self, x):
            found.append(nnx.current_path())
            return x

    class Holder(nnx.Module):
        def __init__(self):
            self.parts = [Reports()]

        def __call__(self, x):
            return self.parts[0](x)

    class Caller(nnx.Module):
        def __call__(self, x):
            holder = Holder()
            holder(x)
            self.kept = holder
            return holder(x)

    nnx.jit(lambda d, x: d["caller"](x))({"caller": Caller()}, X)
    assert found == [("caller", "Holder", "parts", 0), ("caller", "kept", "parts", 0)]


def test_a_trace_that_begins_in_a_module():
    """What a Module jits, scans or differentiates by itself is called by its path in the whole."""

    class Trainer(nnx.Module):
        def __init__(self):
            self.model = Pair()

        def fit(self, x):
            nnx.jit(lambda m, x: m(x))(self.model, x)
            return nnx.grad(lambda m: nnx.remat(lambda m, x: m(x))(m, x).sum())(self.model)

    trainer = Trainer()
    trainer.fit(X)
    assert trainer.model.b.seen == ("model", "b")
    assert trainer.model.items[1][1][10].seen == ("model", "items", 1, 1, 10)


def test_nothing_is_kept():
    """Neither a call nor a transform in it holds the model: it is freed at once."""

    class Own(Pair):
        def __call__(self, x):
            return nnx.remat(lambda m, x: m(x))(self.b, super().__call__(x))

    model = Own()
    model(X)
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()
