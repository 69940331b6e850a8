"""Recurrent cells, RNN and Bidirectional, made from the same arguments and seed under flax.nnx and under nnxlib.

Compared are all Variables with their values, metadata and order of keys, outputs and carries, and the gradients with
respect to parameters and input, over generated configurations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx

flax = pytest.importorskip("flax.nnx")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:keep_rngs argument is deprecated"),
    pytest.mark.filterwarnings("ignore:carry_init is provided in __init__"),
]

normal = jax.nn.initializers.normal(1.0)
CELLS = ["SimpleCell", "LSTMCell", "OptimizedLSTMCell", "GRUCell"]
TOLERANCE = {"float32": 2e-6, "bfloat16": 3e-2, "float16": 4e-3}


def array(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def assert_close(ours, theirs, scale=1.0):
    def one(a, b):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        tolerance = scale * TOLERANCE[str(a.dtype)]
        wide = np.float64
        np.testing.assert_allclose(np.asarray(a, wide), np.asarray(b, wide), rtol=tolerance, atol=tolerance)

    jax.tree.map(one, ours, theirs)


def params(lib, module):
    return lib.to_pure_dict(lib.state(module, lib.Param))


def streams(lib, module):
    """Keys and counts of the random streams in a module."""
    flat = lib.to_flat_state(lib.state(module, lib.RngState))
    shown = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return {path: shown(x.get_value()).tolist() for path, x in flat}


CELL_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
        "param_dtype": st.sampled_from([jnp.float32, jnp.bfloat16]),
        "kernel_init": st.just(normal),
        "bias_init": st.just(normal),
        "keep_rngs": st.booleans(),
        "activation_fn": st.sampled_from([jax.nn.relu, jnp.tanh]),
        "gate_fn": st.sampled_from([jax.nn.hard_sigmoid]),
        "residual": st.booleans(),
    },
)


@settings(max_examples=10)
@given(st.sampled_from(CELLS), CELL_SETTINGS, st.sampled_from([jnp.float32, jnp.bfloat16]), st.sampled_from([(), (2,)]))
def test_cells(name, kwargs, input_dtype, batch):
    """Parameters, the initial carry, and one step with another carry."""
    kwargs = {"recurrent_kernel_init": jax.nn.initializers.lecun_normal(), **kwargs}  # orthogonal fails in bfloat16
    kwargs.pop("gate_fn" if name == "SimpleCell" else "residual", None)
    x = array(*batch, 3).astype(input_dtype)

    def facts(lib):
        rngs = lib.Rngs(3, carry=4)
        cell = getattr(lib, name)(3, 4, **kwargs, rngs=rngs)
        carry = cell.initialize_carry((*batch, 3), lib.Rngs(7), normal)
        made = params(lib, cell), carry, cell.initialize_carry((*batch, 3), lib.Rngs(7)), streams(lib, rngs)
        return made, cell.num_feature_axes, lib.jit(lambda cell, carry, x: cell(carry, x))(cell, carry, x)

    (made, axes, ours), (their_made, their_axes, theirs) = facts(nnx), facts(flax)
    jax.tree.map(np.testing.assert_array_equal, made, their_made)
    assert axes == their_axes
    assert_close(ours, theirs)


@pytest.mark.parametrize("name", CELLS)
def test_a_carry_of_zeros_uses_up_the_keys_of_a_drawn_one(name):
    """So what a hand-written loop draws next is the same."""

    def facts(lib):
        rngs, carry = lib.Rngs(7), lib.Rngs(0, carry=5)
        cell = getattr(lib, name)(3, 4, rngs=lib.Rngs(3))
        made = [cell.initialize_carry((2, 3), rngs=x) for x in (rngs, carry, rngs.default)]
        return made, streams(lib, rngs), streams(lib, carry)

    jax.tree.map(np.testing.assert_array_equal, facts(nnx), facts(flax))


def test_defaults_metadata_and_streams():
    """Default initializers, the metadata that was asked for, the streams that are kept, and what is drawn of them."""

    def facts(lib, name):
        metadata = {"kernel_metadata": {"a": 1}, "recurrent_kernel_metadata": {"a": 2}, "bias_metadata": {"a": 3}}
        rngs = lib.Rngs(0)
        cell = getattr(lib, name)(3, 4, **metadata, keep_rngs=True, carry_init=normal, rngs=rngs)
        marks = {path: v.get_metadata("a") for path, v in lib.to_flat_state(lib.state(cell, lib.Param))}
        drawn = [cell.initialize_carry((2, 3)), cell.initialize_carry((2, 3), lib.Rngs(carry=1))]
        return params(lib, cell), marks, drawn, streams(lib, cell), streams(lib, rngs)

    for name in CELLS:
        jax.tree.map(np.testing.assert_array_equal, facts(nnx, name), facts(flax, name))


@pytest.mark.parametrize("name", CELLS)
def test_recurrent_kernels_where_jax_has_float64(name):
    """An LSTMCell casts what is drawn in float64; the others draw in the dtype of the kernel."""
    with jax.enable_x64(True):
        for dtype in (jnp.float32, jnp.float64):
            ours = params(nnx, getattr(nnx, name)(3, 4, param_dtype=dtype, rngs=nnx.Rngs(0)))
            theirs = params(flax, getattr(flax, name)(3, 4, param_dtype=dtype, rngs=flax.Rngs(0)))
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def outputs_and_gradients(lib, module, call, x):
    """What a call returns, and d sum(sin) of it / d parameters and input; compiled as one program."""

    def loss(m, x):
        out = call(m, x)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out)), out

    (by_params, by_x), out = lib.jit(lib.grad(loss, argnums=(0, 1), has_aux=True))(module, x)
    return out, lib.to_pure_dict(by_params), by_x


BATCHES = {(): None, (2,): [3, 4], (3,): [1, 4, 2]}


@settings(max_examples=7)
@given(
    st.sampled_from(CELLS),
    st.sampled_from(list(BATCHES)),
    st.fixed_dictionaries({name: st.booleans() for name in ("reverse", "keep_order", "time_major", "return_carry")}),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_rnn(name, batch, options, with_lengths, given_carry, by_call):
    """Outputs, carries and gradients; options as attributes and in the call."""
    x = array(*batch, 4, 3)
    x = jnp.moveaxis(x, -2, 0) if options["time_major"] else x
    lengths = jnp.array(BATCHES[batch]) if with_lengths and batch else None

    def make(lib):
        cell = getattr(lib, name)(3, 4, bias_init=normal, rngs=lib.Rngs(0))
        carry = cell.initialize_carry((*batch, 3), lib.Rngs(1), normal) if given_carry else None
        settings = {"initial_carry": carry, "seq_lengths": lengths, **(options if by_call else {})}
        return lib.RNN(cell, **({} if by_call else options)), lambda rnn, x: rnn(x, **settings)

    (ours, call), (theirs, their_call) = make(nnx), make(flax)
    found = outputs_and_gradients(nnx, ours, call, x), outputs_and_gradients(flax, theirs, their_call, x)
    assert_close(*found, 20.0)


def test_random_carries():
    """Carries drawn from the stream of an RNN, of a Bidirectional, or of the call."""
    x = jnp.zeros((2, 1, 3))

    def facts(lib):
        make = lambda **kwargs: lib.RNN(
            lib.LSTMCell(3, 4, carry_init=normal, rngs=lib.Rngs(0)), return_carry=True, **kwargs
        )
        found = []
        for kwargs in ({}, {"rngs": lib.Rngs(5)}, {"rngs": lib.Rngs(5, carry=6)}):
            rnn = make(**kwargs)
            found += [rnn(x), rnn(x), rnn(x, rngs=lib.Rngs(8)), streams(lib, rnn)]
            both = lib.Bidirectional(make(), make(), return_carry=True, **kwargs)
            found += [both(x), both(x, rngs=lib.Rngs(8)), streams(lib, both)]
        both = lib.Bidirectional(make(), make(), return_carry=True, rngs=False)
        return [*found, both(x), streams(lib, both)]

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, facts(nnx), facts(flax))


@pytest.mark.parametrize("name", CELLS)
def test_a_layer_with_a_carry_of_zeros_uses_up_the_keys_of_the_call(name):
    """So a dropout that is given the same streams after an RNN, or a Bidirectional, has the same mask."""
    x = jnp.zeros((2, 1, 3))

    def facts(lib):
        make = lambda: lib.RNN(getattr(lib, name)(3, 4, rngs=lib.Rngs(0)))
        found = []
        for layer in (make(), lib.Bidirectional(make(), make())):
            rngs, carry = lib.Rngs(7), lib.Rngs(0, carry=5)
            for streams_of_call in (rngs, carry, rngs.default):
                layer(x, rngs=streams_of_call)
            found.append([streams(lib, rngs), streams(lib, carry)])
        return found

    jax.tree.map(np.testing.assert_array_equal, facts(nnx), facts(flax))


@pytest.mark.parametrize(("lengths", "time_major"), [(None, True), ([3, 4], False)], ids=["full", "padded"])
def test_bidirectional(lengths, time_major):
    x = array(4, 2, 3) if time_major else array(2, 4, 3)
    lengths = None if lengths is None else jnp.array(lengths)

    def make(lib):
        rngs = lib.Rngs(0)
        rnns = [lib.RNN(lib.GRUCell(3, 4, bias_init=normal, rngs=rngs)) for _ in range(2)]
        return lib.Bidirectional(*rnns, time_major=time_major)

    call = lambda m, x: m(x, seq_lengths=lengths, return_carry=True)
    assert_close(*[outputs_and_gradients(lib, make(lib), call, x) for lib in (nnx, flax)], 20.0)


def test_broadcast_streams_and_carried_state():
    """`broadcast_rngs` and the state of a cell: the same draws at each step, and the same counts afterwards."""
    x = jnp.ones((2, 3, 1))

    def facts(lib, only):
        class Noisy(lib.Module):
            num_feature_axes = 1

            def __init__(self, rngs):
                self.a, self.b, self.steps = rngs.a.fork(), rngs.b.fork(), lib.BatchStat(jnp.array(0))

            def initialize_carry(self, input_shape, rngs=None, carry_init=None):
                return jnp.zeros(input_shape)

            def __call__(self, carry, inputs):
                self.steps[...] = self.steps[...] + 1
                drawn = jnp.stack([jax.random.uniform(self.a()), jax.random.uniform(self.b())])
                return carry, inputs * drawn

        cell = Noisy(lib.Rngs(0, a=1, b=2))
        rnn = lib.RNN(cell, broadcast_rngs=only)
        return rnn(x), rnn(x), int(cell.steps.get_value()), streams(lib, cell)

    for only in (None, "a", ["a", "b"]):
        jax.tree.map(np.testing.assert_array_equal, facts(nnx, only), facts(flax, only))


@settings(max_examples=8)
@given(st.sampled_from([((2, 4), 1, False), ((4, 2), 1, True), ((2, 4, 3), 1, False), ((4,), 0, False)]), st.booleans())
def test_flip_sequences(case, with_lengths):
    shape, n_batch, time_major = case
    lengths = jnp.array([3, 1][: 2 * n_batch]) if with_lengths and n_batch else None
    args = (array(*shape), lengths, n_batch, time_major)
    ours, theirs = nnx.nn.recurrent.flip_sequences(*args), flax.nn.recurrent.flip_sequences(*args)
    np.testing.assert_array_equal(ours, theirs)


def test_helpers():
    for dtype in (jnp.float32, jnp.bfloat16):
        args = (jax.random.key(0), (4, 6), dtype)
        ours, theirs = nnx.nn.recurrent.modified_orthogonal(*args), flax.nn.recurrent.modified_orthogonal(*args)
        np.testing.assert_array_equal(ours, theirs)


def test_empty_sequences_and_batches_of_batches_differ_on_purpose():
    """A sequence of length 0 keeps its carry; with two batch axes each sequence has the carry of its own end."""
    make = lambda lib: lib.RNN(lib.GRUCell(3, 4, rngs=lib.Rngs(0)), return_carry=True)
    ours, theirs = make(nnx), make(flax)
    x = array(2, 4, 3)
    lengths = jnp.array([0, 3])
    carry, their_carry = ours(x, seq_lengths=lengths)[0], theirs(x, seq_lengths=lengths)[0]
    assert not carry[0].any()
    assert their_carry[0].any()
    np.testing.assert_allclose(carry[1], their_carry[1], rtol=1e-5)
    nested = ours(x[:, None], seq_lengths=lengths[:, None])[0]
    np.testing.assert_allclose(nested[:, 0], carry, rtol=1e-5)
    assert theirs(x[:, None], seq_lengths=lengths[:, None])[0].shape == (2, 2, 1, 4)
