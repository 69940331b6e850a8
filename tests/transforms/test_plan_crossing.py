"""The crossing of a jitted function: what a trace has read, that it is noted, and that nothing captured is lent."""

import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.closures import AbsentInput
from nnxlib.core.graph import pack
from nnxlib.transforms.lift import Arguments
from nnxlib.transforms.plan import JitCrossing
from nnxlib.transforms.retraces import Traces


def crossing_of(*args, captured=()):
    packed = pack(Arguments(args, {}, captured))
    return JitCrossing(packed.layout, Traces("f"), {}), packed


def test_an_outcome_says_which_leaves_were_read():
    """Of Variables those whose value was asked for; plain arrays always count."""
    crossing, packed = crossing_of(nnx.Dict(a=nnx.Param(1.0), b=nnx.Param(2.0), c=nnx.Param(3.0)), jnp.ones(2))

    def f(d, x):
        d.c.value = d.b + 1.0
        return jnp.sum(x)

    (leaves,), outcome = crossing.run(f, packed.leaves)
    assert [packed.layout.leaf_paths[k][-1] for k in outcome.read] == ["b", 1]
    assert [float(x) for x in leaves] == [3.0, 2.0]


def test_only_a_trace_that_succeeds_is_noted():
    crossing, packed = crossing_of(nnx.Param(1.0))
    with pytest.raises(ZeroDivisionError):
        crossing.run(lambda v: 1 / 0, packed.leaves)
    assert crossing.traces.count == 0
    crossing.run(lambda v: None, packed.leaves)
    assert crossing.traces.count == 1


def test_captured_objects_have_to_be_lent():
    crossing, packed = crossing_of(captured=(nnx.Param(1.0),))
    with pytest.raises(AbsentInput):
        crossing.run(lambda: None, packed.leaves)
