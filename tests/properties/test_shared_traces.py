"""Programs that call the same functions again and again within one trace, and change the layers in between.

Calls within a trace share the trace of an equal call (transforms/program.py). Drawn programs of calls and changes of
every kind must do under ``nnx.jit``, through the transforms, what they do as plain Python.
"""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import nnxlib as nnx


class Block(nnx.Module):
    def __init__(self, seed):
        self.weight = nnx.Param(jnp.float32(0.5 + seed))
        self.calls = nnx.Variable(jnp.int32(0))
        self.rngs = nnx.Rngs(seed)
        self.flag = 1.0
        self.inner = None


def apply(block, x):
    block.calls += 1
    y = x * block.weight * block.flag + jax.random.uniform(block.rngs())
    if block.inner is not None:
        y = y + block.inner.weight.mean()
    if isinstance(block.weight, nnx.BatchStat):
        block.weight.value = block.weight.value * 0.5
    return y.mean().astype(jnp.float32)


def skip(block, x):
    block.calls += 0
    jax.random.uniform(block.rngs())
    return x


def on_carry(carry):
    return carry[0], apply(*carry)


def on_index(_, carry):
    return on_carry(carry)


def checkpointed_twice(block, x):
    return nnx.remat(apply)(block, nnx.remat(apply)(block, x))


CALLS = {
    "remat": (nnx.remat(apply), apply),
    "remat, twice": (checkpointed_twice, lambda block, x: apply(block, apply(block, x))),
    "remat, within remat": (nnx.remat(checkpointed_twice), lambda block, x: apply(block, apply(block, x))),
    "scan": (
        lambda block, x: nnx.scan(on_carry, in_axes=nnx.Carry, out_axes=nnx.Carry, length=1)((block, x))[1],
        apply,
    ),
    "cond": (lambda block, x: nnx.cond(x > 0, apply, skip, block, x), lambda b, x: (apply if x > 0 else skip)(b, x)),
    "fori_loop": (lambda block, x: nnx.fori_loop(0, 1, on_index, (block, x))[1], apply),
    "jit": (nnx.jit(apply), apply),
}


def _set(name, value):
    return lambda blocks, i, j: setattr(blocks[i], name, value)


def _replace(make):
    return lambda blocks, i, j: setattr(blocks[i], "weight", make(blocks[i].weight.value))


CHANGES = {
    "flag": _set("flag", 2.0),
    "flag back": _set("flag", 1.0),
    "attribute": _set("extra", "text"),
    "statistic": _replace(nnx.BatchStat),
    "parameter": _replace(nnx.Param),
    "metadata": lambda blocks, i, j: blocks[i].weight.set_metadata(tag=j),
    "rounded": _replace(lambda x: nnx.Param(x.astype(jnp.float16).astype(jnp.float32))),
    "shape": _replace(lambda x: nnx.Param(jnp.broadcast_to(x.mean(), (2,)))),
    "scalar": _replace(lambda x: nnx.Param(x.mean())),
    "shared Variable": lambda blocks, i, j: setattr(blocks[i], "weight", blocks[j].weight),
    "shared Module": lambda blocks, i, j: setattr(blocks[i], "inner", blocks[j] if i != j else None),
    "streams": lambda blocks, i, j: setattr(blocks[i], "rngs", blocks[j].rngs),
    "value": lambda blocks, i, j: setattr(blocks[i].weight, "value", blocks[i].weight.value * 0.9),
}

number = st.integers(0, 2)
steps = st.one_of(
    st.tuples(st.just("call"), st.sampled_from(sorted(CALLS)), number, number),
    st.tuples(st.just("change"), st.sampled_from(sorted(CHANGES)), number, number),
)


def interpret(program, blocks, x, through):
    for kind, name, i, j in program:
        if kind == "call":
            x = CALLS[name][not through](blocks[i], x)
        else:
            CHANGES[name](blocks, i, j)
    return x


def contents(blocks):
    state = nnx.state(blocks, nnx.Not(nnx.RngKey))
    return nnx.graphdef(blocks), [np.asarray(x) for x in jax.tree.leaves(nnx.to_pure_dict(state))]


@given(st.lists(steps, min_size=4, max_size=12), st.sampled_from([1.0, -1.0]))
def test_a_drawn_program_does_in_a_trace_what_it_does_in_python(program, sign):
    """The same output, the same values and the same structure, also when it runs again on what it has left."""
    plain, traced = (nnx.List([Block(i) for i in range(3)]) for _ in range(2))
    step = nnx.jit(lambda blocks, x: interpret(program, blocks, x, True))
    for _ in range(2):
        expected = interpret(program, plain, jnp.float32(sign), False)
        got = step(traced, jnp.float32(sign))
        np.testing.assert_allclose(got, expected, rtol=1e-4)
        (structure, values), (other, others) = contents(plain), contents(traced)
        assert structure == other
        for a, b in zip(values, others, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4)
