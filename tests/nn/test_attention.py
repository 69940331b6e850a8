import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.nn.attention import dot_product_attention_weights
from nnxlib.nn.dtypes import LayerInputError

normal = jax.nn.initializers.normal(1.0)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def make(num_heads=2, in_features=8, seed=0, **kwargs):
    return nnx.MultiHeadAttention(num_heads, in_features, bias_init=normal, rngs=nnx.Rngs(seed), **kwargs)


def reference(query, key, value, bias=None, mask=None, is_causal=False):
    """Attention in float64 NumPy, one head of one example at a time."""
    query, key, value = (np.float64(x) for x in (query, key, value))
    *batch, q_length, heads, depth = query.shape
    kv_length, kv_heads = key.shape[-3:-1]
    full = (*batch, heads, q_length, kv_length)
    bias = np.broadcast_to(0.0 if bias is None else np.float64(bias), full)
    mask = np.broadcast_to(True if mask is None else np.asarray(mask) != 0, full)
    out = np.zeros((*batch, q_length, heads, value.shape[-1]))
    for index in np.ndindex(*batch):
        for head in range(heads):
            group = head // (heads // kv_heads)
            for i in range(q_length):
                allowed = mask[(*index, head, i)] & (np.arange(kv_length) <= i if is_causal else True)
                scores = key[index][:, group] @ query[index][i, head] / np.sqrt(depth) + bias[(*index, head, i)]
                scores = scores if allowed.any() else np.zeros(kv_length)
                weights = np.where(allowed | ~allowed.any(), np.exp(scores - scores.max()), 0)
                out[index][i, head] = weights / weights.sum() @ value[index][:, group]
    return out


def projected(layer, x, name):
    """A linear map of the layer in float64."""
    linear = getattr(layer, name)
    kernel, bias = np.float64(linear.kernel.value), np.float64(linear.bias.value)
    return np.tensordot(np.float64(x), kernel, 2 if name == "out" else 1) + bias


# --- dot_product_attention --------------------------------------------------------------------------------------------

BATCHES = st.sampled_from([(), (2,), (2, 1)])
HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])


@settings(max_examples=12)
@given(BATCHES, HEADS, st.sampled_from([(3, 3), (2, 5), (4, 1)]), st.booleans(), st.booleans(), st.integers(0, 3))
def test_attention_against_numpy(batch, heads, lengths, is_causal, with_bias, kind):
    """Any batch axes, grouped queries, bias, masks of few axes or all, in float64; rows without a key are means."""
    query = array(*batch, lengths[0], heads[0], 4)
    key, value = array(*batch, lengths[1], heads[1], 4, seed=1), array(*batch, lengths[1], heads[1], 3, seed=2)
    bias = array(heads[0], *lengths, seed=3) if with_bias else None
    random = array(*batch, heads[0], *lengths, seed=4) > 0.3
    mask = [None, random, random[..., :1, :, :].astype(jnp.float32), random.reshape(-1, lengths[1])[0]][kind]
    out = nnx.dot_product_attention(query, key, value, bias, mask, is_causal=is_causal)
    np.testing.assert_allclose(out, reference(query, key, value, bias, mask, is_causal), rtol=1e-5, atol=1e-5)
    weights = dot_product_attention_weights(query, key, bias, mask, is_causal=is_causal)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)


def test_fully_masked_rows_are_finite_and_leave_others_alone():
    """The mean of the values, finite gradients, in each dtype; other rows and their gradients do not notice."""
    query, key, value = (array(3, 2, 4, seed=i) for i in range(3))
    mask = jnp.array([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    attend = functools.partial(nnx.dot_product_attention, mask=mask)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        args = [x.astype(dtype) for x in (query, key, value)]
        np.testing.assert_allclose(np.float32(attend(*args)[1]), np.float32(value).mean(0), atol=2e-2)
        for grad in jax.grad(lambda *args: attend(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2))(*args):
            assert jnp.isfinite(grad.astype(jnp.float32)).all()
    assert (jax.grad(lambda q: attend(q, key, value)[1].sum())(query)[1] == 0).all()


def test_padding_has_no_influence():
    """What keys and values hold at masked places changes nothing."""
    query, key, value = (array(2, 4, 2, 4, seed=i) for i in range(3))
    mask = nnx.make_attention_mask(jnp.ones((2, 4)), jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]]))
    out = nnx.dot_product_attention(query, key, value, mask=mask)
    padded = jnp.array([[0, 0, 0, 1], [0, 0, 1, 1]])[..., None, None] * 1e4
    np.testing.assert_array_equal(nnx.dot_product_attention(query, key + padded, value - padded, mask=mask), out)


def test_low_precision_keeps_scores_and_softmax_in_float32():
    """In bfloat16 the error is that of rounding inputs and output, also where scores are large."""
    query, key, value = (array(64, 1, 64, seed=i).astype(jnp.bfloat16) for i in range(3))
    out = nnx.dot_product_attention(4 * query, 4 * key, value)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(out), reference(4 * query, 4 * key, value), atol=3e-2)


def test_dropout_of_weights():
    """Scaled weights sum to 1 on average, are shared by heads and examples on demand, and need a key and a rate."""
    rng = jax.random.key(0)
    for batch, broadcast in itertools.product([(), (1, 2), (2,)], [True, False]):
        query = key = array(*batch, 20, 3, 4)
        plain = dot_product_attention_weights(query, key)
        weights = dot_product_attention_weights(query, key, None, None, broadcast, rng, 0.4)
        kept = np.asarray(weights != 0)
        assert abs(kept.mean() - 0.6) < 0.05
        assert (kept == kept.reshape(-1, 20, 20)[0]).all() == broadcast
        np.testing.assert_allclose(weights, np.where(kept, plain / 0.6, 0), rtol=1e-5)
        by_default = dot_product_attention_weights(query, key, dropout_rng=rng, dropout_rate=0.4)
        assert not broadcast or jnp.array_equal(by_default, weights)
    for off in ({"deterministic": True, "dropout_rate": 0.4}, {"dropout_rate": 0.0}):
        np.testing.assert_array_equal(dot_product_attention_weights(query, key, dropout_rng=rng, **off), plain)
    with pytest.raises(ValueError, match=r"required for .* dropout_rate=0\.4.*dropout_rng=rngs\.dropout\(\)"):
        nnx.dot_product_attention(query, key, key, dropout_rate=0.4)
    for rate in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"in the range \[0, 1\), but got"):
            nnx.dot_product_attention(query, key, key, dropout_rate=rate, dropout_rng=rng)


def test_shapes_that_do_not_fit_are_refused():
    """The error gives all three shapes, and says which rule they break."""
    x = jnp.ones((2, 3, 4, 8))
    for shapes, message in [
        (((4, 8), (4, 8), (4, 8)), r"same rank, 3 or more"),
        (((2, 3, 4, 8), (3, 4, 8), (3, 4, 8)), r"query float32\[2, 3, 4, 8\], key float32\[3, 4, 8\]"),
        (((2, 3, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8)), "batch dims"),
        (((2, 3, 4, 8), (2, 3, 4, 7), (2, 3, 4, 7)), "depths must match, but are 8 and 7"),
        (((2, 3, 4, 8), (2, 5, 4, 8), (2, 6, 4, 8)), "lengths must match, and their numbers of heads"),
        (((2, 3, 4, 8), (2, 3, 3, 8), (2, 3, 3, 8)), "4 heads of the query must be a multiple of the 3 heads"),
    ]:
        with pytest.raises(ValueError, match=message):
            nnx.dot_product_attention(*map(jnp.ones, shapes))
    with pytest.raises(ValueError, match="depths must match, but are 8 and 7"):
        dot_product_attention_weights(x, x[..., :7])
    for name in ("mask", "bias"):
        with pytest.raises(ValueError, match=rf"The {name} of .* \[2, 4, 3, 3\], but got float32\[2, 1, 3, 4\]"):
            nnx.dot_product_attention(x, x, x, **{name: jnp.ones((2, 1, 3, 4))})


# --- masks ------------------------------------------------------------------------------------------------------------


def test_masks_say_which_pairs_may_meet():
    """Padding, causality and their combination, entry by entry."""
    tokens = np.array([[1, 1, 0], [1, 0, 0]])
    padding, causal = nnx.make_attention_mask(tokens, tokens, dtype=bool), nnx.make_causal_mask(tokens, dtype=bool)
    both = nnx.combine_masks(padding, None, causal, dtype=bool)
    for b, i, j in np.ndindex(2, 3, 3):
        assert padding[b, 0, i, j] == bool(tokens[b, i] and tokens[b, j])
        assert causal[b, 0, i, j] == (j <= i)
        assert both[b, 0, i, j] == (padding[b, 0, i, j] and causal[b, 0, i, j])
    assert nnx.make_causal_mask(jnp.ones((2, 3)), extra_batch_dims=2).shape == (1, 1, 2, 1, 3, 3)


def test_masks_are_made_by_compiled_steps():
    """An indexing alone would make two hundred calls, and the mask of a sequence took twelve hundred."""
    tokens = jnp.ones((2, 3))
    causal = nnx.make_causal_mask(tokens)
    calls = {
        lambda: nnx.make_causal_mask(tokens): 150,
        lambda: nnx.make_attention_mask(tokens, tokens): 150,
        lambda: nnx.combine_masks(causal, None, causal): 40,
    }
    for call, most in calls.items():
        call()
        assert count_calls(call) < most


def test_masks_that_do_not_fit_are_refused():
    """Other numbers of axes, or sizes."""
    for shapes in (((2, 2), (2, 2, 2)), ((2, 2), (3, 3))):
        with pytest.raises(ValueError, match=r"same number of axes that broadcast .* but got \[\(2, 2\)"):
            nnx.combine_masks(*map(jnp.ones, shapes))
    with pytest.raises(TypeError, match=r"each mask as an argument of its own: nnx\.combine_masks\(\*masks\)"):
        nnx.combine_masks([jnp.ones((2, 2)), jnp.ones((2, 2))])


# --- RoPE -------------------------------------------------------------------------------------------------------------


def test_rope_is_a_rotation_of_pairs():
    """Feature i and i + size / 2, as a complex number, times exp(i position theta^(-2 i / size)), in float64."""
    x, positions = array(2, 3, 5, 6), np.array([0, 1, 7, 100, 3])
    rates = 50.0 ** (-np.arange(3) / 3)
    turned = (np.float64(x[..., :3]) + 1j * np.float64(x[..., 3:])) * np.exp(1j * positions[:, None] * rates)
    out = nnx.RoPE(theta=50.0)(x, positions)
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], -1), atol=2e-5)
    each = np.broadcast_to(positions, (2, 3, 5))
    np.testing.assert_array_equal(nnx.RoPE(theta=50.0)(x, each), out)


def test_rope_has_the_precision_of_its_input():
    """With numbers of 64 bits, at positions that have no angle in float32, with and without a table."""
    rates, positions = 1e4 ** (-np.arange(3) / 3), np.arange(5) + 1_000_000
    with jax.enable_x64(True):
        x = jnp.asarray(array(2, 5, 6), jnp.float64)

        def expected(positions):
            turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * positions[:, None] * rates)
            return np.concatenate([turned.real, turned.imag], -1)

        np.testing.assert_allclose(nnx.RoPE()(x, positions), expected(positions), rtol=1e-8)
        for rope in nnx.RoPE(), nnx.RoPE(1e4, 6, 5):
            np.testing.assert_allclose(rope(x), expected(np.arange(5)), rtol=1e-12)
            assert rope(x.astype(jnp.float32)).dtype == jnp.float32


def test_rope_makes_scores_depend_on_the_difference_of_positions():
    """Moving all positions by 50 changes no output; moving only the keys does."""
    query, key = array(2, 4, 2, 8), array(2, 4, 2, 8, seed=1)
    attend = functools.partial(nnx.dot_product_attention_with_rope, query, key, key, rope=nnx.RoPE())
    np.testing.assert_allclose(attend(), attend(input_positions=jnp.arange(4) + 50), atol=1e-4)
    other = jnp.broadcast_to(jnp.array([0, 2, 4, 6]), (2, 4))
    assert not np.allclose(attend(), attend(input_positions=other), atol=1e-3)
    assert nnx.dot_product_attention_with_rope(query, key[:, :3], key[:, :3], rope=nnx.RoPE()).shape == (2, 4, 2, 8)


def test_attention_rotates_by_what_it_is_given():
    """A RoPE whose class has a call of its own, and any other function, are called; with positions of each example."""

    class Slower(nnx.RoPE):
        def __call__(self, x, input_positions=None):
            positions = jnp.arange(x.shape[-2]) if input_positions is None else input_positions
            return super().__call__(x, positions / 2)

    attend = functools.partial(nnx.dot_product_attention_with_rope, array(2, 4, 2, 8), array(2, 4, 1, 8, seed=1))
    value, plain = array(2, 4, 1, 3), nnx.RoPE()
    for positions in (None, np.arange(4) + 1, np.arange(8).reshape(2, 4)):
        half = np.arange(4) / 2 if positions is None else positions / 2
        expected = attend(value, rope=plain, input_positions=half)
        for rope in (Slower(), lambda *args: Slower()(*args)):
            np.testing.assert_allclose(attend(value, rope=rope, input_positions=positions), expected, atol=1e-5)


def test_rope_tables_give_what_is_computed():
    """For sequences up to the length of the table; the dtype is that of the input."""
    table, free = nnx.RoPE(100.0, 6, 9), nnx.RoPE(100.0)
    for length in (1, 5, 9):
        np.testing.assert_array_equal(table(array(2, length, 6)), free(array(2, length, 6)))
    assert free(jnp.ones((2, 6), jnp.bfloat16)).dtype == jnp.bfloat16
    assert free(jnp.ones((2, 6), int)).dtype == jnp.float32
    assert [type(v) for _, v in nnx.to_flat_state(nnx.state(table))] == [nnx.Variable, nnx.Variable]


def test_rope_says_what_it_takes():
    """Odd sizes, inputs beyond the table, and positions of another length."""
    for sizes in ((3, 5), (0, 5), (4, 0)):
        with pytest.raises(ValueError, match="must be positive and even"):
            nnx.RoPE(1e4, *sizes)
    with pytest.raises(ValueError, match="both `embedding_size` and `max_seq_len` or none"):
        nnx.RoPE(1e4, 4)
    with pytest.raises(LayerInputError, match=r"RoPE theta=10000 takes .*size is even, but got float32\[2, 3\]"):
        nnx.RoPE()(jnp.ones((2, 3)))
    for shape in ((6, 4), (5, 6)):
        with pytest.raises(LayerInputError, match=r"RoPE theta=10000, 5x4 takes .* up to 5 positions and 4 features"):
            nnx.RoPE(1e4, 4, 5)(jnp.ones(shape))
    for positions in (jnp.arange(4), jnp.ones((3, 5)), 2):
        with pytest.raises(LayerInputError, match=r"positions that broadcast to \[2, 5\]"):
            nnx.RoPE()(jnp.ones((2, 5, 4)), positions)


# --- MultiHeadAttention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs", [{}, {"num_heads": 1}, {"num_kv_heads": 1, "qkv_features": 12, "out_features": 5, "in_kv_features": 3}]
)
def test_the_layer_against_numpy(kwargs):
    """Self-attention and cross-attention with masks, from the parameters, in float64."""
    layer = make(**kwargs)
    x, y = array(2, 4, 8), array(2, 5, layer.in_kv_features)
    mask = array(2, 1, 4, 5) > 0
    expected = reference(*(projected(layer, *a) for a in ((x, "query"), (y, "key"), (y, "value"))), mask=mask)
    np.testing.assert_allclose(layer(x, y, mask=mask), projected(layer, expected, "out"), rtol=1e-4, atol=1e-4)
    if not kwargs:
        qkv = [projected(layer, x, name) for name in ("query", "key", "value")]
        expected = projected(layer, reference(*qkv, is_causal=True), "out")
        np.testing.assert_allclose(layer(x, is_causal=True), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(layer(x, mask=nnx.make_causal_mask(x[..., 0])), layer(x, is_causal=True))


def test_defaults_of_inputs():
    """Keys are the queries, values the keys; values without keys are refused."""
    layer, x, y = make(), array(2, 3, 8), array(2, 4, 8)
    np.testing.assert_array_equal(layer(x), layer(x, x, x))
    np.testing.assert_array_equal(layer(x, y), layer(x, y, y))
    np.testing.assert_array_equal(layer(x.tolist()), layer(x))
    with pytest.raises(ValueError, match="`inputs_k` cannot be None"):
        layer(x, None, y)


def test_normalized_queries_and_keys():
    """With `normalize_qk` the scale of queries and keys does not matter; values count as they are."""
    layer, x = make(normalize_qk=True, use_bias=False), array(2, 3, 8)
    np.testing.assert_allclose(layer(10 * x, x), layer(x), atol=1e-4)
    assert not np.allclose(layer(x, x, 10 * x), layer(x), atol=1e-2)
    both, layer.key_ln = layer(x), None  # each by itself
    assert not np.allclose(layer(x), both, atol=1e-2)
    np.testing.assert_allclose(layer(10 * x, x), layer(x), atol=1e-4)


def test_the_map_to_the_output_has_the_metadata_of_the_others():
    """Unless it is given its own: as the initializers."""

    def roles(**kwargs):
        layer = make(kernel_metadata={"role": "k"}, bias_metadata={"role": "b"}, **kwargs)
        return {v.role for v in (layer.query.kernel, layer.query.bias)}, layer.out.kernel.role, layer.out.bias.role

    assert roles() == ({"k", "b"}, "k", "b")
    own = {"out_kernel_metadata": {"role": "ok"}, "out_bias_metadata": {"role": "ob"}}
    assert roles(**own) == ({"k", "b"}, "ok", "ob")


def test_the_map_to_the_output_may_have_initializers_of_its_own():
    ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
    layer = nnx.MultiHeadAttention(2, 8, kernel_init=zeros, bias_init=ones, rngs=nnx.Rngs(0))
    assert [(float(x.kernel.sum()), float(x.bias.sum())) for x in (layer.query, layer.out)] == [(0, 8), (0, 8)]
    settings = {"out_kernel_init": ones, "out_bias_init": zeros}
    layer = nnx.MultiHeadAttention(2, 8, kernel_init=zeros, bias_init=ones, **settings, rngs=nnx.Rngs(0))
    assert [(float(x.kernel.sum()), float(x.bias.sum())) for x in (layer.query, layer.out)] == [(0, 8), (64, 0)]


def test_dropout_and_modes():
    """train and eval switch it; masks differ call by call; streams and keys given to the call are used."""
    layer, x = make(dropout_rate=0.5), array(2, 3, 8)
    with pytest.raises(ValueError, match="No `deterministic` argument"):
        layer(x)
    layer.train()
    first, second = layer(x), layer(x)
    assert not np.allclose(first, second)
    assert int(layer.rngs.count.value) == 2
    key = nnx.Rngs(7).fork().dropout()
    np.testing.assert_array_equal(layer(x, rngs=key), layer(x, rngs=key))
    np.testing.assert_array_equal(layer(x, rngs=nnx.Rngs(dropout=3)), layer(x, rngs=nnx.RngStream(3, tag="dropout")))
    layer.eval()
    plain = make()(x)
    np.testing.assert_array_equal(layer(x), plain)
    assert int(layer.rngs.count.value) == 2
    np.testing.assert_array_equal(nnx.view(layer, deterministic=True)(x), plain)
    bare = make(dropout_rate=0.5, keep_rngs=False, deterministic=False)
    assert bare.rngs is None
    with pytest.raises(ValueError, match=r"no stream to draw from.*attention\(x, rngs=rngs\)|keep_rngs=True"):
        bare(x)
    assert bare(x, rngs=nnx.Rngs(0)).shape == x.shape
    with pytest.raises(TypeError, match=r"an Rngs, a stream or a key, but got int: nnx.Rngs\(seed\)"):
        bare(x, rngs=0)


def test_weights_are_recorded_on_demand():
    """One tuple per layer, with an entry per call; attention is what the weights say."""
    layer, x = make(num_heads=4, num_kv_heads=2), array(2, 3, 8)
    out = layer(x, sow_weights=True, is_causal=True)
    (weights,) = nnx.pop(layer, nnx.Intermediate)["attention_weights"].value
    assert weights.shape == (2, 4, 3, 3)
    assert (jnp.triu(weights, 1) == 0).all()
    values = np.repeat(projected(layer, x, "value"), 2, axis=-2)
    expected = projected(layer, np.einsum("bnts,bsnd->btnd", np.float64(weights), values), "out")
    np.testing.assert_allclose(out, expected, atol=1e-4)


def test_recorded_weights_are_those_before_dropout():
    """So they sum to 1 over the keys, in the dtype of the computation, as under flax.nnx and Linen."""
    for dtype in (jnp.float32, jnp.bfloat16):
        layer, x = make(dropout_rate=0.5, dtype=dtype), array(2, 3, 8)
        dropped = layer(x, sow_weights=True, deterministic=False)
        (weights,) = nnx.pop(layer, nnx.Intermediate)["attention_weights"].value
        plain = layer(x, sow_weights=True, deterministic=True)
        (expected,) = nnx.pop(layer, nnx.Intermediate)["attention_weights"].value
        assert (dropped != plain).any()
        assert weights.dtype == dtype
        np.testing.assert_array_equal(weights, expected)


def test_wrong_inputs_name_the_layer_its_sizes_and_the_input():
    """With the path in the caller's model, also when it is one of the linear maps that refuses."""
    model = nnx.List([make(num_kv_heads=1, in_kv_features=3)])
    layer, x, y = model[0], jnp.ones((2, 4, 8)), jnp.ones((2, 5, 3))
    name = r"model\[0\] \(MultiHeadAttention 8 and 3->8, 2 heads of 4, 1 of keys\) takes "
    for args, kwargs, message in [
        ((x[0, 0],), {}, rf"{name}inputs_q of shape \[\.\.\., length, 8\], but got float32\[8\]"),
        ((x, y[:1]), {}, rf"{name}inputs_k of shape \[2, length, 3\], since .*2, 4, 8\], but got float32\[1, 5, 3\]"),
        ((x, y, y[:, :4]), {}, rf"{name}inputs_v of shape \[2, 5, 3\], since .*but got float32\[2, 4, 3\]"),
        (
            (x, y),
            {"mask": jnp.ones((2, 1, 4, 4))},
            rf"{name}a mask .* \(here \[2, 2, 4, 5\]\), but got float32\[2, 1, 4, 4\]",
        ),
        ((x[..., :7], y), {}, r"model\[0\]\.query \(LinearGeneral \(8,\)->\(2, 4\)\).*float32\[2, 4, 7\]"),
        ((x, x), {}, r"model\[0\]\.key \(LinearGeneral \(3,\)->\(1, 4\)\).*float32\[2, 4, 8\]"),
    ]:
        with pytest.raises(LayerInputError, match=message):
            layer(*args, **kwargs)


def test_constructors_refuse_sizes_that_do_not_divide():
    """Heads and features, heads of keys and of queries; and rates that are no probability."""
    for kwargs, message in [
        ({"num_heads": 3}, r"\(8\) must be divisible by 'num_heads' heads \(3\): choose another qkv_features"),
        ({"num_heads": 0}, "have to be positive, got 0, 0"),
        ({"num_heads": 0, "num_kv_heads": 2}, "have to be positive, got 0, 2"),
        ({"num_kv_heads": 0}, "num_kv_heads have to be positive"),
        ({"num_heads": 4, "num_kv_heads": 3}, r"num_heads \(4\) must be divisible by num_kv_heads \(3\)"),
        ({"dropout_rate": 1.0}, r"in the range \[0, 1\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(**kwargs)


def test_any_module_may_take_the_place_of_a_projection():
    """It need not know the settings of a LinearGeneral; one that takes them by name is given what the call is given."""

    class Plain(nnx.Module):
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            return self.inner(x)

    class Named(Plain):
        def __call__(self, x, **kwargs):
            return self.inner(x, **kwargs)

    layer, x = make(), array(1, 3, 8)
    before = layer(x)
    layer.query, layer.out = Plain(layer.query), Plain(layer.out)
    assert jnp.array_equal(layer(x), before)
    layer.out = Named(layer.out.inner)
    with jax.set_mesh(jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        assert jnp.array_equal(layer(x, out_sharding=jax.P()), before)


def test_strict_promotion_and_rank_settings_are_respected():
    """Neither dtypes nor ranks are promoted behind the user's back."""
    rope = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for kwargs in ({}, {"attention_fn": rope}, {"dropout_rate": 0.5, "deterministic": False, "normalize_qk": True}):
            layer, x = make(**kwargs), jnp.ones((2, 3, 8))
            layer(x, mask=jnp.ones((3, 3), bool), is_causal=True)
            layer.init_cache(x.shape)
            layer(x[:, :2], decode=True, mask=jnp.ones((2, 3)))


# --- decoding ---------------------------------------------------------------------------------------------------------


def decoded(layer, x, cuts, call=lambda layer, part, **kwargs: layer(part, **kwargs), **kwargs):
    """Decode the parts of ``x`` between the cuts, one after the other."""
    parts = [x[:, a:b] for a, b in zip((0, *cuts), (*cuts, x.shape[1]))]
    return jnp.concatenate([call(layer, part, **kwargs) for part in parts], axis=1)


@settings(max_examples=10)
@given(
    st.sets(st.integers(1, 5)).map(sorted),
    st.sampled_from([{}, {"num_kv_heads": 1}, {"normalize_qk": True}, {"attention_fn": True}]),
    st.integers(0, 2),
)
def test_decoding_in_any_parts_equals_the_whole(cuts, kwargs, spare):
    """Prompts and tokens in any order, with and without room to spare, with RoPE: the causal forward."""
    if "attention_fn" in kwargs:
        kwargs = {"attention_fn": functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())}
    layer, x = make(decode=True, **kwargs), array(2, 6, 8)
    layer.init_cache((2, 6 + spare, 8))
    np.testing.assert_allclose(decoded(layer, x, cuts), layer(x, decode=False, is_causal=True), atol=1e-5)
    assert int(layer.cache_index.value) == 6


def test_one_sequence_needs_no_batch_axis():
    """As a batch of one gives, decoding too."""
    layer, x = make(), array(5, 8)
    whole = layer(x, is_causal=True)
    np.testing.assert_allclose(whole, layer(x[None], is_causal=True)[0], atol=1e-6)
    layer.init_cache(x.shape)
    np.testing.assert_allclose(
        jnp.concatenate([layer(x[:3], decode=True), layer(x[3:], decode=True)]), whole, atol=1e-6
    )


def test_decoding_with_the_heads_that_a_layer_has_now():
    """As when the heads of keys and values are averaged; a cache that was made for more is refused."""
    layer, x = make(4), array(2, 5, 8)
    layer.init_cache(x.shape)
    for part in (layer.key, layer.value):
        part.kernel.value, part.bias.value = part.kernel.value[:, :1], part.bias.value[:1]
    with pytest.raises(ValueError, match=r"are float32\[2, 5, 4, 2\] and .* now float32\[2, 5, 1, 2\] .* init_cache"):
        layer(x, decode=True)
    layer.init_cache(x.shape)
    assert layer.cached_key.shape == layer.cached_value.shape == (2, 5, 1, 2)
    np.testing.assert_allclose(
        decoded(layer, x, (2, 3), decode=True), layer(x, is_causal=True, decode=False), atol=1e-5
    )


def test_the_cache_of_a_map_of_the_users_own_has_the_declared_heads():
    """The kernel of a subclass with a forward of its own may be packed, and say nothing of them."""

    class Packed(nnx.LinearGeneral):
        def __call__(self, inputs, out_sharding=None):
            return jnp.einsum("...a,ahd->...hd", inputs, jnp.concatenate([self.kernel.value] * 2, axis=-1))

    layer, x = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0)), jnp.ones((1, 3, 8))
    layer.key = Packed(8, (2, 2), rngs=nnx.Rngs(1))
    layer.init_cache(x.shape)
    np.testing.assert_allclose(layer(x, decode=True), layer(x, decode=False, is_causal=True), rtol=1e-5)


def test_decoding_by_a_wrapped_function():
    """What wraps a function that takes positions is given them, too: another function in its name, or a partial."""
    rope = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())

    @functools.wraps(rope.func)
    def counted(*args, **kwargs):
        return rope(*args, **kwargs)

    layer, x = make(decode=True, attention_fn=functools.partial(counted)), array(2, 6, 8)
    layer.init_cache(x.shape)
    np.testing.assert_allclose(decoded(layer, x, (2, 3)), layer(x, decode=False, is_causal=True), atol=1e-5)


def test_decoding_with_a_mask_of_padding():
    """Left-padded prompts: places of the cache that the mask leaves out are never looked at."""
    layer, x = make(decode=True), array(2, 5, 8)
    seen = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])[:, None, None, :]
    layer.init_cache(x.shape)
    out = decoded(layer, x, (3, 4), mask=seen)
    np.testing.assert_allclose(out[1:], layer(x[1:], decode=False, is_causal=True), atol=1e-5)
    np.testing.assert_allclose(out[:1, 2:], layer(x[:1, 2:], decode=False, is_causal=True), atol=1e-5)
    with pytest.raises(LayerInputError, match=r"\(here \[2, 2, 1, 5\]\), but got float32\[2, 1, 1, 4\]"):
        layer.init_cache(x.shape)
        layer(x[:, :1], mask=jnp.ones((2, 1, 1, 4)))


def test_a_full_cache_is_an_error_where_it_is_known():
    """Eagerly, and for a prompt that can never fit also under jit; the cache is as before."""
    layer, x = make(decode=True), array(2, 5, 8)
    layer.init_cache((2, 4, 8))
    layer(x[:, :3])
    before = layer.cached_key.value
    with pytest.raises(LayerInputError, match=r"up to 4 tokens in its cache, of which 3 are used.*float32\[2, 2, 8\]"):
        layer(x[:, :2])
    assert layer.cached_key.value is before
    layer(x[:, 3:4])
    with pytest.raises(LayerInputError, match="of which 4 are used"):
        layer(x[:, 4:])
    with pytest.raises(LayerInputError, match=r"up to 4 tokens .*float32\[2, 5, 8\]"):
        nnx.jit(lambda layer, x: layer(x))(layer, x)


def test_a_full_cache_gives_nan_where_it_cannot_be_known():
    """Under jit nothing wrong looks right: NaN, at this call and after it, until init_cache."""
    layer, x = make(decode=True), array(2, 4, 8)
    layer.init_cache((2, 3, 8))
    step = nnx.jit(lambda layer, x: layer(x))
    outs = [step(layer, x[:, i % 4 : i % 4 + 1]) for i in range(5)]
    assert [bool(jnp.isnan(out).all()) for out in outs] == [False, False, False, True, True]
    assert not any(bool(jnp.isnan(out).any()) for out in outs[:3])
    layer.init_cache((2, 3, 8))
    np.testing.assert_allclose(step(layer, x[:, :1]), outs[0], atol=1e-6)


def test_decoding_is_refused_where_it_cannot_work():
    """Without a cache, without a word on decoding, and with inputs that do not fit the cache or each other."""
    layer, x = make(), array(2, 3, 8)
    with pytest.raises(ValueError, match=r"cache not initialized.*\n?.*init_cache\(\("):
        layer(x, decode=True)
    with pytest.raises(ValueError, match="takes a shape"):
        layer.init_cache((8,))
    layer.init_cache((2, 4, 8))
    with pytest.raises(ValueError, match=r"No `decode` argument.*has a cache"):
        layer(x)
    assert layer(x, decode=False).shape == x.shape
    for args in ((x[:1],), (x, x[:, :2])):
        with pytest.raises(LayerInputError, match=r"\[2, length, 8\] while decoding.*cache is float32\[2, 4, 2, 4\]"):
            layer(*args, decode=True)


def test_a_layer_whose_caches_were_popped_is_one_without_a_cache():
    """It is called as before, and says what to do when it is to decode."""
    layer, x = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 3, 8))
    before = layer(x)
    layer.init_cache(x.shape)
    layer(x, decode=True)
    assert set(nnx.pop(layer, nnx.Cache)) == {"cached_key", "cached_value", "cache_index"}
    assert (layer(x) == before).all()
    assert (nnx.jit(nnx.clone(layer))(x) == nnx.jit(layer)(x)).all()
    with pytest.raises(ValueError, match=r"cache not initialized.*\n?.*init_cache\(\("):
        layer(x, decode=True)
    layer.init_cache(x.shape)
    assert layer(x, decode=True).shape == x.shape


def test_a_call_that_fails_at_its_end_leaves_the_cache_as_it_was():
    """So it can be made again: the tokens are not in the cache twice."""
    layer = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache((1, 3, 4))
    with pytest.raises(TypeError, match="what follows it is out_sharding"):
        layer(jnp.ones((1, 1, 4)), out_sharding=True)
    assert layer.cache_index.value == 0
    assert not layer.cached_key.value.any()


def test_a_view_that_is_refused_sets_nothing():
    layer = nnx.MultiHeadAttention(2, 4, deterministic=False, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError):
        layer.set_view(deterministic=True, decode=True, batch_size=3, max_length=2.5)
    assert (layer.deterministic, layer.decode, layer.cached_key) == (False, False, None)


def test_caches_in_low_precision_and_views():
    """A cache in bfloat16 serves a float32 layer; `view` makes a cache for the model it returns."""
    layer, x = make(), array(2, 4, 8)
    layer.init_cache(x.shape, jnp.bfloat16)
    out = decoded(layer, x, (2, 3), decode=True)
    assert (layer.cached_value.dtype, out.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(out, layer(x, decode=False, is_causal=True), atol=0.1)

    model = nnx.Sequential(make(dtype=jnp.bfloat16))
    decoder = nnx.view(model, decode=True, batch_size=2, max_length=4)
    assert (decoder[0].cached_key.shape, decoder[0].cached_key.dtype) == ((2, 4, 2, 4), jnp.bfloat16)
    assert (model[0].cached_key, decoder[0].query.kernel is model[0].query.kernel) == (None, True)
    assert decoder(x[:, :2]).shape == (2, 2, 8)
    with pytest.raises(ValueError, match="both `batch_size` and `max_length`, but got 2 and None"):
        nnx.view(model, batch_size=2)


@pytest.mark.parametrize("kind", ["function", "partial", "wrapped", "Module", "object", "method"])
def test_positions_are_passed_on(kind):
    """Those given to the call, and, while decoding, those in the cache to a function that has a parameter for them."""
    seen = []

    def attend(query, key, value, *, input_positions=None, **kwargs):
        seen.append(input_positions)
        return nnx.dot_product_attention(query, key, value, **kwargs)

    class Attend(nnx.Module):
        def __call__(self, query, key, value, *, input_positions=None, **kwargs):
            return attend(query, key, value, input_positions=input_positions, **kwargs)

    class Plain:
        __call__ = Attend.__call__

    attention_fn = {
        "function": attend,
        "partial": functools.partial(attend, broadcast_dropout=True),
        "wrapped": functools.wraps(attend)(lambda *args, **kwargs: attend(*args, **kwargs)),
        "Module": Attend(),
        "object": Plain(),
        "method": Plain().__call__,
    }[kind]
    layer, x = make(attention_fn=attention_fn), array(2, 3, 8)
    layer(x)
    layer(x, input_positions=jnp.array([4, 5, 6]))
    layer.init_cache((2, 5, 8))
    layer(x, decode=True)
    layer(x[:, :1], decode=True)
    layer(x[:, :1], decode=True, input_positions=jnp.array([9]))
    assert [None if p is None else p.tolist() for p in seen] == [None, [4, 5, 6], [0, 1, 2], [3], [9]]


# --- in transforms ----------------------------------------------------------------------------------------------------


def test_jit_remat_and_raw_jax():
    """The compiled layer gives what the eager one gives; caches are written back; gradients agree under remat."""
    layer, x = make(decode=True), array(2, 4, 8)
    whole = layer(x, decode=False, is_causal=True)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, part: layer(part))
    np.testing.assert_allclose(decoded(layer, x, (2, 3), step), whole, atol=1e-5)
    assert int(layer.cache_index.value) == 4

    plain = make()
    np.testing.assert_allclose(jax.jit(lambda layer, x: layer(x, is_causal=True))(plain, x), whole, atol=1e-5)
    loss = lambda layer, x: (layer(x) ** 2).sum()
    grads, again = nnx.grad(loss)(plain, x), nnx.grad(nnx.remat(loss))(plain, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), grads, again)


def test_ensembles_and_stacks():
    """vmap over layers with caches of their own; scan over a stack of layers, each of which decodes."""
    x = array(2, 3, 8)

    @nnx.vmap
    def build(key):
        layer = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(key))
        layer.init_cache(x.shape)
        return layer

    keys = jax.random.split(jax.random.key(0), 3)
    layers = build(keys)
    assert (layers.query.kernel.shape, layers.cached_key.shape) == ((3, 8, 2, 4), (3, 2, 3, 2, 4))
    call = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
    outs = jnp.concatenate([call(layers, x[:, :2]), call(layers, x[:, 2:])], axis=2)
    assert layers.cache_index.value.tolist() == [3, 3, 3]
    singles = [nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(key)) for key in keys]
    for out, single in zip(outs, singles):
        np.testing.assert_allclose(out, single(x, is_causal=True), atol=1e-5)

    stack = build(keys)
    forward = nnx.scan(lambda x, layer: x + layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    out = jnp.concatenate([forward(x[:, :2], stack), forward(x[:, 2:], stack)], axis=1)
    expected = x
    for single in singles:
        expected = expected + single(expected, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_abstract_layers_and_pytrees():
    """eval_shape allocates nothing; a layer is a pytree of its arrays, with and without a cache and a table."""
    rope = nnx.RoPE(1e4, 4, 6)

    def build():
        layer = make(attention_fn=functools.partial(nnx.dot_product_attention_with_rope, rope=rope))
        layer.init_cache((2, 6, 8))
        return layer

    abstract = nnx.eval_shape(build)
    assert isinstance(abstract.cached_key.value, jax.ShapeDtypeStruct)
    layer, x = build(), array(2, 3, 8)
    doubled = jax.tree.map(lambda a: a, layer)
    np.testing.assert_array_equal(doubled(x, decode=True), layer(x, decode=True))
    np.testing.assert_allclose(
        nnx.jit(lambda layer, x: layer(x, decode=False))(layer, x), layer(x, decode=False), atol=1e-5
    )
    graphdef, state = nnx.split(layer)
    np.testing.assert_array_equal(nnx.merge(graphdef, state)(x, decode=False), layer(x, decode=False))


def test_eager_calls_run_few_python_functions():
    """Eager attention runs in a handful of compiled steps (flax.nnx: some thousands of calls)."""
    layer, x = make(), array(2, 3, 8)
    heads = x.reshape(2, 3, 2, 4)
    for call, most in (lambda: nnx.dot_product_attention(heads, heads, heads), 120), (lambda: layer(x), 400):
        call()  # compiles
        assert count_calls(call) <= most


def test_a_length_or_an_array_in_place_of_a_shape_is_refused():
    for wrong, shown in (5, "int"), (None, "None"):
        with pytest.raises(
            TypeError, match=rf"make_causal_mask takes an array .*, but got {shown}.*ones\(\(1, length\)\)"
        ):
            nnx.make_causal_mask(wrong)
    layer = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
    for wrong, shown in (8, "int"), (jnp.ones((3, 5, 4)), r"float32\[3, 5, 4\]"):
        with pytest.raises(TypeError, match=rf"init_cache takes a shape .*, but got {shown}"):
            layer.init_cache(wrong)
    assert layer.cached_key is None


def test_inputs_of_masks_that_do_not_fit_are_refused():
    for a, b in ((2, 3), (3, 4)), ((), (3,)):
        with pytest.raises(ValueError, match=r"make_attention_mask takes inputs .* batch axes fit each other, but got"):
            nnx.make_attention_mask(jnp.ones(a), jnp.ones(b))
    assert nnx.make_attention_mask(jnp.ones((2, 1, 3)), jnp.ones((2, 4))).shape == (2, 2, 1, 3, 4)
