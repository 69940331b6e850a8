import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.core.errors import EmptySelectionError, PrefixError
from nnxlib.nn.dtypes import LayerInputError
from nnxlib.nn.recurrent import flip_sequences, modified_orthogonal
from nnxlib.transforms.body_checks import BodyError

normal = jax.nn.initializers.normal(1.0)
few = settings(max_examples=10)
CELLS = ["SimpleCell", "LSTMCell", "OptimizedLSTMCell", "GRUCell"]


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make(name, **kwargs):
    return getattr(nnx, name)(3, 4, bias_init=normal, **kwargs, rngs=nnx.Rngs(0))


# --- the formulas, in float64 ---


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def linear(layer, x):
    y = x @ np.asarray(layer.kernel.value, np.float64)
    return y if layer.bias is None else y + np.asarray(layer.bias.value, np.float64)


def simple(cell, h, x):
    h = np.tanh(linear(cell.dense_i, x) + linear(cell.dense_h, h) + (h if cell.residual else 0))
    return h, h


def remember(c, i, f, g, o):
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(c)
    return (c, h), h


def lstm(cell, carry, x):
    c, h = carry
    pairs = (cell.ii, cell.hi), (cell.if_, cell.hf), (cell.ig, cell.hg), (cell.io, cell.ho)
    return remember(c, *(linear(a, x) + linear(b, h) for a, b in pairs))


def optimized_lstm(cell, carry, x):
    c, h = carry
    return remember(c, *np.split(linear(cell.dense_i, x) + linear(cell.dense_h, h), 4, -1))


def gru(cell, h, x):
    i, k = np.split(linear(cell.dense_i, x), 3, -1), np.split(linear(cell.dense_h, h), 3, -1)
    r, z = sigmoid(i[0] + k[0]), sigmoid(i[1] + k[1])
    h = (1 - z) * np.tanh(i[2] + r * k[2]) + z * h
    return h, h


STEP = {"SimpleCell": simple, "LSTMCell": lstm, "OptimizedLSTMCell": optimized_lstm, "GRUCell": gru}


def run(step, cell, carry, xs, length, reverse, keep_order):
    """One sequence, step by step: the carry after its last step, and the outputs up to its length."""
    order = range(length)[::-1] if reverse else range(length)
    outputs = []
    for t in order:
        carry, y = step(cell, carry, xs[t])
        outputs.append(y)
    if reverse and keep_order:
        outputs.reverse()
    return carry, outputs


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), a, b)


@pytest.mark.parametrize("name", CELLS)
def test_a_step_is_the_formula(name):
    """With any number of batch axes, and a carry that is not zero."""
    cell = make(name)
    for batch in [(), (2, 3)]:
        carry = cell.initialize_carry((*batch, 3), nnx.Rngs(1), normal)
        x = array(*batch, 3)
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (carry, x))
        close(cell(carry, x), STEP[name](cell, *wide))


@pytest.mark.parametrize("name", CELLS)
def test_a_carry_may_lack_batch_axes(name):
    """Or have 1 in their place: it is the same for all."""
    cell, x = make(name), array(2, 5, 3)
    carry = cell.initialize_carry((3,), nnx.Rngs(1), normal)
    whole = jax.tree.map(lambda h: jnp.broadcast_to(h, (2, 5, 4)), carry)
    for axes in [(), (5,), (1, 1), (2, 1)]:
        given = jax.tree.map(lambda h, axes=axes: jnp.broadcast_to(h, (*axes, 4)), carry)
        close(cell(given, x), cell(whole, x))


GATES = {"LSTMCell": ("i", "f", "g", "o")}  # of those with a map for each
WIDTH = {"SimpleCell": 4, "LSTMCell": 4, "OptimizedLSTMCell": 16, "GRUCell": 12}


@pytest.mark.parametrize("name", CELLS)
def test_the_parameters_of_a_cell(name):
    """Their names, shapes and metadata; there is a stream only if it is to be kept."""
    metadata = {f"{kind}_metadata": {"role": kind} for kind in ("kernel", "recurrent_kernel", "bias")}
    cell, n = make(name, **metadata), WIDTH[name]
    expected = {}
    for gate in GATES.get(name, ("",)):
        of_input = {"": "dense_i", "f": "if_"}.get(gate, f"i{gate}")
        of_carry = f"h{gate}" if gate else "dense_h"
        expected[of_input, "kernel"], expected[of_carry, "kernel"] = ((3, n), "kernel"), ((4, n), "recurrent_kernel")
        expected[of_carry if "LSTM" in name else of_input, "bias"] = (n,), "bias"
    assert {path: (v.shape, v.role) for path, v in nnx.state(cell).flat_state()} == expected
    assert cell.rngs is None
    assert isinstance(make(name, keep_rngs=True).rngs, nnx.RngStream)


@pytest.mark.parametrize("name", CELLS)
def test_a_pruned_cell_has_the_sizes_of_its_kernels(name):
    """It begins with a carry of that size, and computes what a cell does that was made so small."""
    cell, small = make(name), getattr(nnx, name)(2, 3, rngs=nnx.Rngs(1))
    for (_, layer), (_, own) in zip(nnx.iter_modules(cell), nnx.iter_modules(small), strict=True):
        if isinstance(layer, nnx.Linear):
            layer.kernel.value = own.kernel.value
            if layer.bias is not None:
                layer.bias.value = own.bias.value
    x = array(2, 5, 2)
    for rnn, own in ((nnx.RNN, nnx.RNN), (lambda c: nnx.RNN(c, return_carry=True, reverse=True),) * 2):
        jax.tree.map(np.testing.assert_array_equal, rnn(cell)(x), own(small)(x))
    with pytest.raises(LayerInputError, match=rf"{name} 3->4\) takes inputs of shape \[\.\.\., 2\]"):
        cell(cell.initialize_carry((2, 2)), x[:, 0, :1])


def test_a_map_of_the_users_own_says_nothing_of_the_size_of_a_carry():
    """Its kernel may be packed; then what was declared counts."""

    class Packed(nnx.Linear):
        def __call__(self, inputs, out_sharding=None):
            return inputs @ jnp.concatenate([self.kernel.value] * 2)

    cell = make("GRUCell")
    cell.dense_h = Packed(2, 12, rngs=nnx.Rngs(0))
    assert nnx.RNN(cell)(array(2, 5, 3)).shape == (2, 5, 4)


def test_a_residual_cell_adds_its_state_inside_of_the_activation():
    cell = make("SimpleCell", residual=True)
    h, x = array(2, 4), array(2, 3)
    close(cell(h, x), simple(cell, np.asarray(h, np.float64), np.asarray(x, np.float64)))


def test_activations_may_be_layers():
    """A PReLU as activation is a part of the cell, and learns with it."""
    cell = make("GRUCell", activation_fn=nnx.PReLU(0.5), gate_fn=nnx.relu)
    grads = nnx.grad(lambda cell: cell(array(2, 4), array(2, 3))[1].sum())(cell)
    assert jnp.abs(grads["activation_fn"]["negative_slope"].value) > 0


@few
@given(
    st.sampled_from(CELLS),
    st.sampled_from([(), (2,), (2, 1)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_sequence_is_a_loop(name, batch, time_major, reverse, keep_order, with_lengths, given_carry):
    """In any order and layout, each by itself: its outputs, and the carry at its end, or at that of the inputs."""
    cell = make(name)
    times, n = 4, int(np.prod(batch, dtype=int))
    rng = np.random.default_rng(n)
    lengths = rng.integers(0, times + 3, batch) if with_lengths else None
    x = array(*batch, times, 3)
    carry = cell.initialize_carry((*batch, 3), nnx.Rngs(1), normal) if given_carry else None
    rnn = nnx.RNN(cell, time_major=time_major, reverse=reverse, return_carry=True)
    inputs = jnp.moveaxis(x, -2, 0) if time_major else x
    last, y = rnn(inputs, initial_carry=carry, seq_lengths=lengths, keep_order=keep_order)
    y = jnp.moveaxis(y, 0, -2) if time_major else y
    assert y.shape == (*batch, times, 4)
    begin = cell.initialize_carry((*batch, 3)) if carry is None else carry
    for i in np.ndindex(batch):
        length = times if lengths is None else min(int(lengths[i]), times)
        at_i = lambda tree, i=i: jax.tree.map(lambda a: np.asarray(a[i], np.float64), tree)
        expected = run(STEP[name], cell, at_i(begin), at_i(x), length, reverse, keep_order)
        close((at_i(last), list(y[i][:length])), expected)


def test_flip_sequences():
    """Up to its length each sequence is reversed; the padding stays behind."""
    x = jnp.arange(10).reshape(2, 5)
    assert flip_sequences(x, None, 1, False).tolist() == [[4, 3, 2, 1, 0], [9, 8, 7, 6, 5]]
    assert flip_sequences(x, jnp.array([3, 0]), 1, False).tolist() == [[2, 1, 0, 4, 3], [9, 8, 7, 6, 5]]
    assert flip_sequences(x.T, jnp.array([3, 0]), 1, True).T.tolist() == [[2, 1, 0, 4, 3], [9, 8, 7, 6, 5]]
    assert flip_sequences(x, jnp.array([7, 5]), 1, False).tolist() == [[4, 3, 2, 1, 0], [9, 8, 7, 6, 5]]
    assert flip_sequences(x, jnp.array([-2, 0]), 1, False).tolist() == [[4, 3, 2, 1, 0], [9, 8, 7, 6, 5]]
    assert flip_sequences(x[:, :0], jnp.array([0, 0]), 1, False).shape == (2, 0)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32", "int64", "float32"])
def test_lengths_of_any_dtype(dtype):
    """Those that do not hold the number of steps, or no number below zero, do not wrap around."""
    rnn = nnx.RNN(nnx.SimpleCell(1, 2, rngs=nnx.Rngs(0)), reverse=True, return_carry=True)
    x, lengths = jax.random.normal(jax.random.key(0), (3, 300, 1)), [0, 100, 127]
    np.testing.assert_array_equal(flip_sequences(x, np.array(lengths, dtype), 1, False)[1, 99], x[1, 0])
    given, expected = rnn(x, seq_lengths=np.array(lengths, dtype)), rnn(x, seq_lengths=jnp.array(lengths))
    jax.tree.map(np.testing.assert_array_equal, given, expected)


@pytest.mark.parametrize("name", CELLS)
def test_gradients_through_time(name):
    """Reverse-mode gradients of all parameters agree with the loop written out."""
    cell, x = make(name), array(2, 3, 3)

    def looped(cell, x):
        carry, ys = cell.initialize_carry((2, 3)), []
        for t in range(3):
            carry, y = cell(carry, x[:, t])
            ys.append(y)
        return jnp.sum(jnp.sin(jnp.stack(ys, 1)))

    scanned = nnx.grad(lambda cell, x: jnp.sum(jnp.sin(nnx.RNN(cell)(x))))(cell, x)
    close(nnx.to_pure_dict(scanned), nnx.to_pure_dict(nnx.grad(looped)(cell, x)))


# --- carries, dtypes, streams ---


def test_a_carry_of_zeros_draws_no_key():
    """So an RNN with its default settings can be called wherever it can be read: under raw jax, too."""
    rnn = nnx.RNN(make("LSTMCell"))
    x = array(2, 3, 3)
    y = rnn(x)
    assert int(rnn.rngs.count.value) == 0
    np.testing.assert_allclose(jax.jit(lambda x: rnn(x))(x), y, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(rnn)(x), y, rtol=1e-6)
    assert jax.eval_shape(rnn, x).shape == y.shape
    assert jax.grad(lambda x: rnn(x).sum())(x).shape == x.shape
    assert jax.lax.map(rnn, x[None]).shape == (1, *y.shape)


def test_where_a_random_carry_is_drawn_from():
    """The call's rngs, else the RNN's stream, else the cell's; a new key for each vector and call."""
    cell = make("GRUCell", carry_init=normal, keep_rngs=True)
    x = jnp.zeros((2, 0, 3))

    def begin(rnn, **kwargs):
        return rnn(x, return_carry=True, **kwargs)[0]

    own = nnx.RNN(cell)
    assert own.rngs.tag == "carry"
    assert not jnp.array_equal(begin(own), begin(own))
    assert int(own.rngs.count.value) == 2
    assert int(cell.rngs.count.value) == 0
    without = nnx.RNN(cell, rngs=False)
    assert without.rngs is None
    begin(without)
    assert int(cell.rngs.count.value) == 1
    rngs = nnx.Rngs(0, carry=1)
    expected = normal(nnx.RngStream(1, tag="carry").fork()(), (2, 4), jnp.float32)
    np.testing.assert_array_equal(begin(own, rngs=rngs), expected)
    assert [int(rngs[name].count.value) for name in ("carry", "default")] == [1, 0]
    expected = normal(nnx.RngStream(1, tag="carry")(), (2, 4), jnp.float32)
    np.testing.assert_array_equal(begin(own, rngs=nnx.RngStream(1, tag="carry")), expected)
    c, h = make("LSTMCell", carry_init=normal).initialize_carry((2, 3), nnx.Rngs(0))
    assert not jnp.array_equal(c, h)
    forked = nnx.RNN(cell, rngs=nnx.RngStream(1, tag="carry"))
    assert not jnp.array_equal(begin(forked), expected)


@pytest.mark.parametrize("base", [nnx.LSTMCell, nnx.GRUCell])
def test_a_subclass_may_draw_its_carry_itself(base):
    """Its `initialize_carry` gets the stream, though the class that it is derived from begins with zeros."""

    class Noisy(base):
        def initialize_carry(self, input_shape, rngs=None, carry_init=None):
            zeros = super().initialize_carry(input_shape, carry_init=carry_init)
            return jax.tree.map(lambda x: x + jax.random.normal(rngs(), x.shape), zeros)

    rnn, x = nnx.RNN(Noisy(3, 4, rngs=nnx.Rngs(0))), jnp.zeros((2, 0, 3))
    both = nnx.Bidirectional(nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))), rnn)
    for call in (rnn, both):
        first, second = (jax.tree.leaves(call(x, return_carry=True)[0])[-1] for _ in range(2))
        assert first.any()
        assert not jnp.array_equal(first, second)


def test_without_a_stream_a_random_carry_is_refused():
    cell = make("GRUCell", carry_init=normal)
    with pytest.raises(ValueError, match="RNGs must be provided to initialize the cell carry of GRUCell 3->4"):
        cell.initialize_carry((2, 3))
    with pytest.raises(ValueError, match="rngs must be an Rngs, an RngStream, True or False, but got int"):
        nnx.RNN(cell, rngs=5)


@pytest.mark.parametrize("name", CELLS)
def test_mixed_precision(name):
    """Any mixture of dtypes runs; the carry keeps the one that it begins with."""
    for dtype, param_dtype, input_dtype, output_dtype in [
        (None, jnp.bfloat16, jnp.float32, jnp.float32),
        (None, jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
        (None, jnp.float32, jnp.int32, jnp.float32),
        (jnp.bfloat16, jnp.float32, jnp.float32, jnp.bfloat16 if name == "SimpleCell" else jnp.float32),
        (jnp.float32, jnp.bfloat16, jnp.bfloat16, jnp.float32),
    ]:
        rnn = nnx.RNN(make(name, dtype=dtype, param_dtype=param_dtype), return_carry=True)
        carry, y = jax.eval_shape(rnn, jnp.ones((2, 3, 3), input_dtype))
        assert {a.dtype for a in jax.tree.leaves(carry)} == {jnp.dtype(param_dtype)}
        assert y.dtype == output_dtype
    assert jnp.isfinite(rnn(array(2, 3, 3).astype(jnp.bfloat16))[1]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_orthogonal_in_low_precision(dtype):
    with jax.numpy_dtype_promotion("strict"):
        q = modified_orthogonal(jax.random.key(0), (4, 4), dtype)
    exact = jax.nn.initializers.orthogonal()(jax.random.key(0), (4, 4))
    np.testing.assert_array_equal(q, exact.astype(dtype))
    np.testing.assert_array_equal(modified_orthogonal(jax.random.key(0), (4, 4)), exact)


# --- cells of the user's ---


class Noisy(nnx.RNNCellBase):
    """A cell with dropout, a stream of noise, and a count of its steps."""

    num_feature_axes = 1

    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.noise = rngs.noise.fork()
        self.steps = nnx.BatchStat(jnp.array(0))

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return jnp.zeros(input_shape)

    def __call__(self, carry, inputs):
        self.steps.value += 1
        return carry, jnp.stack([self.dropout(inputs), inputs * jax.random.uniform(self.noise())], -1)


def noisy():
    return Noisy(nnx.Rngs(0, dropout=1, noise=2))


def same_at_each_time(y):
    return [bool((y[..., i] == y[:, :1, :, i]).all()) for i in range(2)]


def test_the_state_of_a_cell_is_carried():
    """By default every Variable is handed on, so that each step draws other keys."""
    cell = noisy()
    y = nnx.RNN(cell)(jnp.ones((2, 5, 8)))
    assert int(cell.steps.value) == 5
    assert int(cell.noise.count.value) == 5
    assert same_at_each_time(y) == [False, False]


@pytest.mark.parametrize(
    ("only", "same"),
    [("dropout", [True, False]), (["dropout", "noise"], [True, True]), (nnx.RngStream, [True, True])],
    ids=["tag", "tags", "type"],
)
def test_broadcast_rngs_repeat_at_each_step(only, same):
    """Streams that the filter takes give each step of a call the same keys, and the next call others."""
    cell, x = noisy(), jnp.ones((2, 5, 8))
    rnn = nnx.RNN(cell, broadcast_rngs=only)
    first, second = rnn(x), rnn(x)
    assert same_at_each_time(first) == same_at_each_time(second) == same
    assert not (first[..., 0] == second[..., 0]).all()
    assert int(cell.dropout.rngs.count.value) == 2
    assert int(cell.noise.count.value) == (2 if same[1] else 10)
    assert int(cell.steps.value) == 10


def test_broadcast_rngs_that_take_no_stream():
    with pytest.raises(EmptySelectionError, match=r"broadcast_rngs='drop' takes no random stream of the Noisy"):
        nnx.RNN(noisy(), broadcast_rngs="drop")(jnp.ones((2, 3, 4)))


def test_state_axes():
    """Also as a plain mapping; what is passed whole may not change, and the error says what did."""
    cell = noisy()
    cell.eval()
    axes = {nnx.BatchStat: nnx.Carry, nnx.RngState: nnx.Carry, ...: None}
    nnx.RNN(cell, state_axes=axes)(jnp.ones((2, 3, 4)))
    assert int(cell.steps.value) == 3
    with pytest.raises(PrefixError, match=r"steps"):
        nnx.RNN(cell, state_axes={...: None})(jnp.ones((2, 3, 4)))
    assert int(cell.steps.value) == 3


class Image(nnx.RNNCellBase):
    """A cell with two feature axes, whose carry is a dict."""

    num_feature_axes = 2

    def __init__(self):
        self.weight = nnx.Param(jnp.array(2.0))

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return {"sum": jnp.zeros(input_shape[:-2])}

    def __call__(self, carry, inputs):
        total = carry["sum"] + inputs.sum((-1, -2)) * self.weight
        return {"sum": total}, inputs * total[..., None, None]


def test_cells_with_several_feature_axes():
    """`num_feature_axes` tells the batch axes, and so where the time axis is."""
    x = array(2, 5, 3, 3)
    carry, y = nnx.RNN(Image(), return_carry=True)(x, seq_lengths=[2, 5])
    total = 2 * np.cumsum(np.asarray(x).sum((-1, -2)), 1)
    close(y, x * total[..., None, None])
    close(carry["sum"], np.array([total[0, 1], total[1, 4]]))


def test_the_base_class_says_what_is_missing():
    class Empty(nnx.RNNCellBase):
        pass

    for name, call in {
        "initialize_carry": lambda: Empty().initialize_carry((1,)),
        "__call__": lambda: Empty()(0, 0),
        "num_feature_axes": lambda: Empty().num_feature_axes,
    }.items():
        with pytest.raises(NotImplementedError, match=f"Empty is an RNNCellBase without {name}"):
            call()


# --- under transforms ---


def test_an_rnn_compiles_once():
    """Eager calls of one structure reuse the program; other lengths in the batch do not make another."""
    traces = []

    class Counting(nnx.GRUCell):
        def __call__(self, carry, inputs):
            traces.append(0)
            return super().__call__(carry, inputs)

    rnn = nnx.RNN(Counting(3, 4, rngs=nnx.Rngs(0)), return_carry=True)
    for lengths in ([1, 2], [3, 0]):
        rnn(array(2, 3, 3), seq_lengths=jnp.array(lengths))
    other = nnx.RNN(Counting(3, 4, rngs=nnx.Rngs(1)), return_carry=True)
    other(array(2, 3, 3), seq_lengths=jnp.array([1, 1]))
    assert len(traces) == 1


def test_a_traced_length_and_unroll():
    """`seq_lengths` may be traced, and `unroll` changes nothing but the program."""
    rnn = nnx.RNN(make("LSTMCell"), return_carry=True)
    unrolled = nnx.RNN(rnn.cell, unroll=3, return_carry=True)
    x, lengths = array(2, 5, 3), jnp.array([2, 4])
    expected = rnn(x, seq_lengths=lengths)
    close(nnx.jit(lambda m, x, n: m(x, seq_lengths=n))(rnn, x, lengths), expected)
    close(unrolled(x, seq_lengths=lengths), expected)


def test_to_unroll_all_is_not_to_unroll_one():
    """Though True == 1: each has its own program."""
    cell, x = make("GRUCell"), array(2, 5, 3)
    texts = [str(jax.make_jaxpr(nnx.RNN(cell, unroll=unroll))(x)) for unroll in (1, True, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_bidirectional():
    """Both directions in the order of the input, each with its carry, merged along the last axis or as told."""
    rngs = nnx.Rngs(0)
    forward, backward = (nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs)) for _ in range(2))
    both = nnx.Bidirectional(forward, backward)
    x, lengths = array(2, 5, 3), jnp.array([3, 5])
    carries = (jnp.ones((2, 4)), -jnp.ones((2, 4)))
    for kwargs in ({}, {"seq_lengths": lengths}):
        (a, b), y = both(x, return_carry=True, initial_carry=carries, **kwargs)
        c, u = forward(x, initial_carry=carries[0], return_carry=True, **kwargs)
        settings = {"return_carry": True, "reverse": True, "keep_order": True}
        d, v = backward(x, initial_carry=carries[1], **settings, **kwargs)
        close((a, b, y), (c, d, jnp.concatenate([u, v], -1)))
    added = nnx.Bidirectional(forward, backward, merge_fn=jnp.add, time_major=True, return_carry=True)
    close(added(jnp.swapaxes(x, 0, 1))[1], jnp.swapaxes(forward(x) + backward(x, reverse=True, keep_order=True), 0, 1))
    assert both(x, reverse=True, keep_order=False).shape == (2, 5, 8)


def test_bidirectional_draws_a_carry_for_each_direction():
    rnn = lambda: nnx.RNN(make("GRUCell", carry_init=normal))
    for rngs in (True, nnx.Rngs(0)):
        a, b = nnx.Bidirectional(rnn(), rnn(), return_carry=True, rngs=rngs)(jnp.zeros((2, 0, 3)))[0]
        assert not jnp.array_equal(a, b)
    both, nothing = nnx.Bidirectional(rnn(), rnn(), return_carry=True, rngs=False), jnp.zeros((2, 0, 3))
    of_rngs, of_stream = both(nothing, rngs=nnx.Rngs(3))[0], both(nothing, rngs=nnx.Rngs(3).carry)[0]
    assert jnp.array_equal(of_rngs[1], of_stream[1])
    zeros = lambda: nnx.RNN(make("GRUCell"))
    for pair in ((rnn(), zeros()), (zeros(), rnn())):
        both = nnx.Bidirectional(*pair, return_carry=True, rngs=nnx.Rngs(0))
        first, second = both(nothing)[0], both(nothing)[0]
        changed = [not jnp.array_equal(*carries) for carries in zip(first, second, strict=True)]
        assert changed == [rnn.cell.carry_init is not None for rnn in pair]
        assert both.rngs.count.value == 4, "the stream of both is used, for zeros, too, and not that of the RNN"


# --- errors ---


def test_a_call_or_a_carry_of_the_users_own_may_draw():
    """So it is given the stream, though its cell is one that begins with zeros."""

    class Noisy(nnx.RNN):
        def __call__(self, inputs, *, rngs=None, **kwargs):
            return super().__call__(inputs + rngs.normal(inputs.shape), **kwargs)

    make = lambda kind: kind(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)))
    noisy, x = nnx.Bidirectional(make(nnx.RNN), make(Noisy)), array(2, 5, 3)
    first, second = noisy(x), noisy(x)
    np.testing.assert_array_equal(first[..., :4], second[..., :4])
    assert not jnp.array_equal(first[..., 4:], second[..., 4:])
    drawing = make(nnx.RNN)
    drawing.cell.initialize_carry = lambda shape, rngs: rngs.normal((shape[0], 4))
    assert not jnp.array_equal(drawing(x), drawing(x))


def test_bidirectional_of_cells_says_to_wrap_them():
    rnn, cell = nnx.RNN(make("GRUCell")), make("GRUCell")
    for pair in ((cell, rnn), (rnn, cell)):
        with pytest.raises(TypeError, match=r"got a GRUCell; wrap it: nnx\.RNN\(cell\)"):
            nnx.Bidirectional(*pair)


def test_a_class_of_cells_is_no_cell():
    """It is refused when the RNN is made, not when it is called."""
    with pytest.raises(TypeError, match="RNN takes a cell, got the class LSTMCell"):
        nnx.RNN(nnx.LSTMCell)


def test_wrong_shapes_name_the_layer():
    """The path, the declared sizes, and what came instead; of the input, the carry and the lengths."""

    class Net(nnx.Module):
        def __init__(self):
            self.rnn = nnx.RNN(make("LSTMCell"))

        def __call__(self, x, **kwargs):
            return self.rnn(x, **kwargs)

    net, cell, x = Net(), make("GRUCell"), array(2, 5, 3)
    with pytest.raises(LayerInputError, match=r"cell \(GRUCell 3->4\) takes inputs of shape \[\.\.\., 3\].*2, 5\]"):
        cell(jnp.zeros((2, 4)), array(2, 5))
    with pytest.raises(LayerInputError, match=r"takes a carry of \[2, 4\] with inputs of \[2, 3\], but got .*\[2, 5\]"):
        cell(jnp.zeros((2, 5)), array(2, 3))
    with pytest.raises(LayerInputError, match=r"takes a carry of \[2, 4\] with inputs of \[2, 3\], but got .*\[3, 4\]"):
        cell(jnp.zeros((3, 4)), array(2, 3))
    for carry in (jnp.zeros((2, 4)), (jnp.zeros((2, 4)),)):
        with pytest.raises(LayerInputError, match=r"LSTMCell 3->4\) takes a carry \(c, h\), but got"):
            net(x, initial_carry=carry)
    with pytest.raises(LayerInputError, match=r"LSTMCell 3->4\) takes inputs of shape \[\.\.\., 3\]"):
        net(array(2, 5, 7))
    with pytest.raises(LayerInputError, match=r"net.rnn \(RNN of LSTMCell 3->4\) takes inputs of shape \[\*batch, "):
        net(array(3))
    with pytest.raises(LayerInputError, match=r"inputs of shape \[time, \*batch"):
        net(array(3), time_major=True)
    with pytest.raises(LayerInputError, match=r"net.rnn .* takes seq_lengths of shape \[2\].*int32\[3\]"):
        net(x, seq_lengths=jnp.array([1, 2, 3]))


def test_carries_that_do_not_fit():
    """A carry that changes its shape or structure, or has no value for each sequence."""

    class Growing(nnx.RNNCellBase):
        num_feature_axes = 1

        def initialize_carry(self, input_shape, rngs=None, carry_init=None):
            return {"sum": jnp.zeros(input_shape)}

        def __call__(self, carry, inputs):
            return {"sum": jnp.concatenate([carry["sum"], carry["sum"]])}, inputs

    class Renaming(Growing):
        def __call__(self, carry, inputs):
            return {"total": carry["sum"]}, inputs

    class Counting(Growing):
        def initialize_carry(self, input_shape, rngs=None, carry_init=None):
            return jnp.array(0)

        def __call__(self, carry, inputs):
            return carry + 1, inputs

    with pytest.raises(BodyError, match="must keep the types"):
        nnx.RNN(Growing())(array(2, 2, 3))
    with pytest.raises(BodyError, match="must come out with the structure"):
        nnx.RNN(Renaming())(array(2, 2, 3))
    assert nnx.RNN(Counting(), return_carry=True)(array(2, 5, 3))[0] == 5
    assert nnx.RNN(Counting())(array(2, 5, 3), seq_lengths=[1, 2]).shape == (2, 5, 3)
    with pytest.raises(ValueError, match=r"With seq_lengths of shape \[2\].*has the shape \[\]"):
        nnx.RNN(Counting(), return_carry=True)(array(2, 5, 3), seq_lengths=[1, 2])


def test_a_carry_of_zeros_needs_no_stream_that_can_be_written():
    """Keys are used up as if they were drawn; in a trace that the stream does not belong to, none are."""
    cell, rngs = nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)), nnx.Rngs(0)
    carry = jax.jit(lambda: cell.initialize_carry((2, 3), rngs))()
    assert rngs.default.count.value == 0
    assert all((x == 0).all() for x in (*carry, *cell.initialize_carry((2, 3), rngs)))
    assert rngs.default.count.value == 2


def test_sequences_that_are_no_jax_arrays():
    net, x = nnx.RNN(make("GRUCell")), array(2, 5, 3)
    for inputs in [np.asarray(x), nnx.Variable(x)]:
        np.testing.assert_array_equal(net(inputs), net(x))


def test_a_layer_that_is_no_cell():
    with pytest.raises(TypeError, match=r"^RNN takes a cell such as nnx\.LSTMCell, got Linear"):
        nnx.RNN(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))(jnp.ones((1, 2, 3)))


def test_what_is_no_carry_and_no_shape_is_refused():
    cell = nnx.GRUCell(2, 4, rngs=nnx.Rngs(0))
    with pytest.raises(LayerInputError, match=r"GRUCell 2->4.* takes a carry of arrays \[3, 4\], but got tuple"):
        cell((jnp.ones((3, 4)), jnp.ones((3, 4))), jnp.ones((3, 2)))
    for wrong, shown in (3, "int"), (jnp.ones((3, 2)), r"float32\[3, 2\]"):
        with pytest.raises(TypeError, match=rf"takes the shape of an input, \(\*batch, 2\), but got {shown}"):
            cell.initialize_carry(wrong)
