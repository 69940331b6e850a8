"""Packing from live tables: a pytree of objects is packed without a walk through them, and keeps none alive."""

import gc
import weakref

import jax.numpy as jnp
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.tables import table_of

from .nets import Layer

ACTS = {"a plain function": lambda m: jnp.tanh, "one that refers to it": lambda m: lambda x: x * m.n}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_pytree_of_objects_keeps_none_of_them(act):
    """Nothing that is cached for it keeps one of them, though a function in it refers to that one."""
    a, b = Layer(), Layer()
    b.act = act(b)
    for _ in range(3):
        nnx.split((a, b))
        nnx.grad(lambda pair: pair[1].act(pair[0].w.sum()))((a, b))
    ref = weakref.ref(b)
    del b
    gc.collect()
    assert ref() is None
    assert a.w.tolist() == [1, 1]


def test_a_pytree_of_objects_costs_the_same_whatever_their_size(unchecked):
    """To split, read and update two models; a change of one of them is seen."""
    counts = []
    for size in (10, 500):
        pair = {"a": nnx.List([Layer() for _ in range(size)]), "b": [nnx.List([Layer() for _ in range(size)]), 1.0]}
        graphdef, state = nnx.split(pair)
        calls = [lambda: nnx.split(pair), lambda: nnx.state(pair, nnx.Param), lambda: nnx.graphdef(pair)]  # noqa: B023
        for call in calls:
            call()
        counts.append([min(count_calls(call) for _ in range(5)) for call in calls])
        pair["b"][0][3].n = 2
        assert nnx.graphdef(pair) != graphdef
        nnx.update(pair, state)
    assert counts[0] == counts[1]


def test_many_objects_in_a_pytree_take_linear_time(unchecked):
    """Whether they share parts is not asked pair by pair, when it is asked for the first time."""
    counts = []
    for size in (100, 400):
        layers = [Layer() for _ in range(size)]
        nnx.split(layers)

        def split_anew(layers=layers):
            table_of(layers[0]).sharing.clear()
            nnx.split(layers)

        counts.append(min(count_calls(split_anew) for _ in range(3)))
    assert counts[1] < 5 * counts[0]
