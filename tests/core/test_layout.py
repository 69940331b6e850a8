"""Layouts: the order of leaves, interning, and what follows from a layout."""

import gc
import pickle
import threading
import time
import types
import weakref

import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.graph import pack
from nnxlib.core.layout import Layout

from .tied import Embed, Net


def test_leaves_are_variables_then_arrays_then_those_of_the_pytree():
    """The order in which build takes them."""
    v, a, b = nnx.Param(1.0), jnp.ones(1), jnp.ones(2)
    packed = pack((b, nnx.Dict(a=a, v=v)))
    assert [x is y for x, y in zip(packed.leaves, (1.0, a, b), strict=True)] == [True] * 3
    assert packed.layout.leaf_paths == ((1, "v"), (1, "a"), (0,))


def test_equal_layouts_are_one_object():
    """Layouts are interned, so that `is` compares them, and go when nobody needs them."""
    layout = pack(Net()).layout
    assert pack(Net()).layout is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    other = Net()
    other.tied = Embed()
    assert pack(other).layout is not layout
    m = Net()
    m.odd = "only here"
    ref = weakref.ref(pack(m).layout)
    del m
    gc.collect()
    assert ref() is None


def test_trees_and_graphs_are_told_apart():
    """is_tree: nothing is reached twice."""
    m = Net()
    assert not pack(m).layout.is_tree
    m.tied = None
    assert pack(m).layout.is_tree
    m.pair = (m.embed, 1)
    assert not pack(m).layout.is_tree


class _Slow(weakref.WeakValueDictionary):
    """Its `setdefault` is several steps, as in Python's; here another thread comes in between."""

    def setdefault(self, key, default=None):
        found = self.get(key)
        if found is None:
            time.sleep(0.05)
            self[key] = found = default
        return found


def test_threads_that_make_equal_layouts_make_one(monkeypatch):
    """Otherwise one of two models of the same structure would seem to have been changed."""
    monkeypatch.setattr(Layout, "_interned", _Slow())
    layouts, models = [], [Net(), Net()]
    threads = [threading.Thread(target=lambda m=m: layouts.append(pack(m).layout)) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert layouts[0] is layouts[1]


@pytest.mark.parametrize(
    "hold",
    [
        lambda m: nnx.jit(m.scale_by),
        lambda m: nnx.jit(lambda x: m.w * x),
        lambda m: lambda x: m.w * x,
        lambda m: nnx.static(types.SimpleNamespace(model=m)),
    ],
    ids=["a jitted method", "a jitted closure", "a function", "a configuration"],
)
def test_a_model_with_an_attribute_that_refers_to_it_is_freed(hold):
    """The collector frees it as any reference cycle: what is known of its structure does not keep it alive."""

    class Scale(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(1.0)
            self.held = hold(self)

        def scale_by(self, x):
            return self.w * x

    def use():
        m = Scale()
        held = m.held if callable(m.held) else m.held.model.scale_by
        assert held(2.0) == nnx.jit(lambda m, x: m.w * x)(m, 2.0)
        return weakref.ref(m)

    reference = use()
    gc.collect()
    assert reference() is None
