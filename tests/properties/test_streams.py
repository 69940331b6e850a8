"""No key comes twice, whatever transform it is drawn in."""

import contextlib
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx


class Source(nnx.Module):
    """Three streams, one of them reached under two names, and one that is a fork."""

    def __init__(self, impl):
        rngs = nnx.Rngs(jax.random.key(0, impl=impl), dropout=jax.random.key(1, impl=impl))
        self.rngs, self.alias = rngs, nnx.Rngs(rngs.dropout)
        self.fork = rngs.fork()

    def __call__(self):
        keys = [self.rngs.params(), self.rngs.dropout(), self.alias(), self.fork.dropout()]
        return jnp.stack([jax.random.key_data(key) for key in keys])


def draw(source):
    return source()


@nnx.jit
def broken(source):
    source()
    raise ZeroDivisionError


@jax.jit
def by_merge(graphdef, state):
    source = nnx.merge(graphdef, state)
    return source(), nnx.state(source)


def through_state(source):
    keys, state = by_merge(*nnx.split(source))
    nnx.update(source, state)
    return keys


def fails(source):
    with contextlib.suppress(ZeroDivisionError):
        broken(source)
    return []


SEEDS = count(10)


def reseeded(source):
    impl = jax.random.key_impl(source.rngs.dropout.key.value)
    nnx.reseed(source, dropout=jax.random.key(next(SEEDS), impl=impl))
    return source()


def with_forked(source):
    with nnx.fork_rngs(source):
        return source()


twice = nnx.scan(lambda source, _: (source, source()), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
ACTIONS = {
    "eagerly": draw,
    "jit": nnx.jit(draw),
    "jit in jit": nnx.jit(lambda source: jnp.stack([source(), nnx.jit(draw)(source)])),
    "grad": lambda s: nnx.grad(lambda x, s: (x, s()), has_aux=True)(1.0, s)[1],
    "remat": nnx.remat(draw),
    "cond": lambda s: nnx.cond(True, draw, lambda s: jnp.zeros_like(s()), s),
    "scan": lambda s: twice(s, jnp.arange(2))[1],
    "vmap over lanes": nnx.split_rngs(splits=2)(nnx.vmap(draw)),
    "lanes of a copy": nnx.with_rngs(split=2)(nnx.vmap(draw)),
    "a forked copy": lambda s: nnx.with_rngs(s, fork=...)(),
    "forked": with_forked,
    "split, merge and update": through_state,
    "reseeded": reseeded,
    "a failing call": fails,
    "eval_shape": lambda s: [nnx.eval_shape(draw, s)][:0],
}


@settings(max_examples=12)
@given(
    impl=st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]),
    program=st.lists(st.sampled_from(sorted(ACTIONS)), min_size=2, max_size=6),
)
def test_no_key_comes_twice(impl, program):
    """After any sequence of transforms that draw, put back, reseed, or fail."""
    source = Source(impl)
    words = source().shape[-1]
    keys = [np.asarray(ACTIONS[name](source)).reshape(-1, words) for name in [*program, "eagerly"]]
    drawn = np.concatenate([x for x in keys if x.size])
    assert len(np.unique(drawn, axis=0)) == len(drawn)
