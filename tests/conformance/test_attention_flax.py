"""Attention and LoRA, made from the same arguments and the same seed under flax.nnx and under nnxlib, are the same.

Compared are paths, types, shapes, dtypes and values of all Variables, settings, outputs, the Variables after the call,
and the gradients with respect to parameters and inputs, over generated configurations.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.nn import attention as our_attention
from nnxlib.nn import lora as our_lora

flax = pytest.importorskip("flax.nnx")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TOLERANCE = {"float32": 5e-6, "bfloat16": 4e-2, "float16": 5e-3}
HAS_ROPE = hasattr(flax, "RoPE")  # flax 0.12.8 has none, and attention takes no input_positions
# No shrinking: each example compiles both libraries anew.
few = settings(max_examples=5, phases=[Phase.generate])
fewer = settings(few, max_examples=3)
normal = jax.nn.initializers.normal(1.0)


def array(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def assert_close(ours, theirs, tolerance=None):
    """Equal but for rounding, relative to the largest element; by default that of the dtype."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    if jnp.issubdtype(ours.dtype, jnp.inexact):
        tolerance = TOLERANCE[str(ours.dtype)] if tolerance is None else tolerance
        expected = np.float64(theirs)
        np.testing.assert_allclose(np.float64(ours), expected, rtol=0, atol=tolerance * max(1, np.abs(expected).max()))
    else:
        np.testing.assert_array_equal(ours, theirs)


def leaves(lib, model):
    """Path -> (type, value) of each Variable."""
    return {path: (type(v).__name__, v.get_value()) for path, v in lib.to_flat_state(lib.state(model))}


def assert_same_variables(ours, theirs, compare):
    mine, yours = leaves(nnx, ours), leaves(flax, theirs)
    assert list(mine) == list(yours)
    for path, (kind, value) in mine.items():
        assert kind == yours[path][0], path
        jax.tree.map(compare, value, yours[path][1])


def exactly(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(jax.random.key_data(a) if a.dtype == jax.random.key(0).dtype else a, _raw(b))


def _raw(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def gradients(lib, model, call, x, wrt):
    def loss(model, x):
        return jnp.sum(jnp.sin(call(lib, model, x).astype(jnp.float32)))

    grads = lib.jit(lib.grad(loss, argnums=(lib.DiffState(0, wrt(lib)), 1)))(model, x)
    return {path: v.get_value() for path, v in lib.to_flat_state(grads[0])} | {"inputs": grads[1]}


def check(make, call, x, wrt=lambda lib: lib.Param, calls=2, rough=None):
    """Make the layer in both libraries and compare all that can be seen of it."""
    ours, theirs = make(nnx), make(flax)
    assert_same_variables(ours, theirs, exactly)
    for _ in range(calls):
        assert_close(call(nnx, ours, x), call(flax, theirs, x), rough)
    assert_same_variables(ours, theirs, lambda a, b: assert_close(_raw(a), _raw(b)))
    mine, yours = gradients(nnx, ours, call, x, wrt), gradients(flax, theirs, call, x, wrt)
    assert list(mine) == list(yours)
    for path in mine:
        if rough is None:
            assert_close(mine[path], yours[path], 5e-5)
        else:  # single elements of a gradient in bfloat16 are far off in both
            difference, size = (np.linalg.norm(np.float64(x)) for x in (mine[path] - yours[path], yours[path]))
            assert difference < 0.1 * size + 0.05, path


def rounding(kwargs, *dtypes):
    """The tolerance for a result that has been bfloat16 on its way."""
    return TOLERANCE["bfloat16"] if jnp.bfloat16 in (*dtypes, *kwargs.values()) else None


def settings_of(**options):
    """Keyword arguments: each option is absent or one of the given values."""
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in options.items()})


# --- the functions ----------------------------------------------------------------------------------------------------

SHAPES = st.sampled_from([
    ((2, 3, 4, 6), (2, 5, 4, 6)),
    ((2, 4, 4, 6), (2, 4, 2, 6)),  # grouped queries
    ((3, 2, 4), (3, 2, 4)),
    ((1, 2, 2, 4, 2), (1, 2, 2, 1, 2)),
])  # fmt: skip
OPTIONS = settings_of(
    is_causal=[True],
    dtype=[jnp.bfloat16, "float32"],
    precision=["highest"],
    dropout=[(0.4, True), (0.4, False), (0.7, True)],
    bias=[True],
    mask=["float", "bool", "nothing allowed"],
)


def arguments(shapes, options, dtype):
    """The arguments of a call, from what has been drawn."""
    (*batch, q_length, heads, _), key_shape = shapes
    weights = (*(1 for _ in batch), heads, q_length, key_shape[-3])
    kwargs = dict(options)
    rate, broadcast = kwargs.pop("dropout", (0.0, True))
    kwargs |= {"dropout_rate": rate, "broadcast_dropout": broadcast, "dropout_rng": jax.random.key(7)}
    if "bias" in kwargs:
        kwargs["bias"] = array(*weights, seed=3)
    if "mask" in kwargs:
        kind = kwargs["mask"]
        mask = array(*weights, seed=4) > (9 if kind == "nothing allowed" else 0)
        kwargs["mask"] = mask.astype(jnp.float32) if kind == "float" else mask
    return [array(*shapes[0], dtype=dtype), *(array(*key_shape, seed=i, dtype=dtype) for i in (1, 2))], kwargs


@few
@given(SHAPES, OPTIONS, st.sampled_from([jnp.float32, jnp.float32, jnp.bfloat16]))
def test_dot_product_attention(shapes, options, dtype):
    args, kwargs = arguments(shapes, options, dtype)
    assert_close(nnx.dot_product_attention(*args, **kwargs), flax.dot_product_attention(*args, **kwargs))
    ours = our_attention.dot_product_attention_weights(*args[:2], **kwargs)
    assert_close(ours, flax.nn.attention.dot_product_attention_weights(*args[:2], **kwargs))


def test_masks():
    """The functions that make and combine masks give the same arrays."""
    for lib_name in ("make_attention_mask", "make_causal_mask", "combine_masks"):
        ours, theirs = getattr(nnx, lib_name), getattr(flax, lib_name)
        x, y = jnp.array([[1, 1, 0], [2, 0, 1]]), jnp.array([[1, 0], [3, 1]])
        calls = {
            "make_attention_mask": [((x, y), {}), ((x, y, jnp.greater, 2, bool), {}), ((x[0], y[0]), {"dtype": int})],
            "make_causal_mask": [((x,), {}), ((x[0], 1, bool), {}), ((x,), {"extra_batch_dims": 2})],
            "combine_masks": [
                ((None, None), {}),
                ((x > 0, None, x), {}),
                ((x[:, :1] > 0, x), {"dtype": bool}),
                ((x,), {}),
            ],
        }
        for args, kwargs in calls[lib_name]:
            jax.tree.map(assert_close, ours(*args, **kwargs), theirs(*args, **kwargs))


@pytest.mark.skipif(not HAS_ROPE, reason="this flax has no RoPE")
@fewer
@given(
    st.sampled_from([(), (10.0,), (10000.0, 6, 8)]),
    st.sampled_from([(5, 6), (2, 4, 6), (1, 2, 3, 6)]),
    st.booleans(),
)
def test_rope(args, shape, with_positions):
    """The same rotation, and the same table."""
    x = array(*shape)
    positions = jnp.arange(shape[-2]) * 3 + 100 if with_positions else None
    ours, theirs = nnx.RoPE(*args), flax.RoPE(*args)
    assert_same_variables(ours, theirs, exactly)
    assert_close(ours(x, positions), theirs(x, positions))
    q, k = array(2, 5, 2, 6), array(2, 5, 2, 6, seed=1)
    assert_close(
        nnx.dot_product_attention_with_rope(q, k, k, rope=ours, is_causal=True),
        flax.dot_product_attention_with_rope(q, k, k, rope=theirs, is_causal=True),
    )


# --- the layer --------------------------------------------------------------------------------------------------------

CONFIGURATIONS = settings_of(
    qkv_features=[8, 16],
    out_features=[5],
    num_kv_heads=[1, 2],
    in_kv_features=[3],
    dtype=[jnp.bfloat16, "float32"],
    param_dtype=[jnp.bfloat16],
    use_bias=[False],
    normalize_qk=[True],
    out_kernel_init=[jax.nn.initializers.ones],
    out_bias_init=[jax.nn.initializers.ones],
    dropout_rate=[0.3],
    broadcast_dropout=[False],
    deterministic=[True],
    precision=["highest"],
)


@few
@given(CONFIGURATIONS, st.booleans(), st.booleans(), st.sampled_from([(2,), (), (1, 2)]))
def test_multi_head_attention(kwargs, is_causal, with_mask, batch):
    """Self-attention, or cross-attention where the keys have features of their own; with dropout call by call."""
    kwargs = {"deterministic": False, "bias_init": normal, **kwargs}
    kv = array(*batch, 5, kwargs["in_kv_features"]) if "in_kv_features" in kwargs else None
    mask = array(*(1 for _ in batch), 1, 4, 4 if kv is None else 5) > -0.5 if with_mask else None

    def make(lib):
        return lib.MultiHeadAttention(4, 8, **kwargs, decode=False, rngs=lib.Rngs(0, dropout=1))

    def call(lib, layer, x):
        return layer(x, kv, mask=mask, is_causal=is_causal)

    check(make, call, array(*batch, 4, 8), rough=rounding(kwargs))


def test_constructor_calls_and_signatures():
    """Parameters and defaults that flax.nnx has are ours, by name and place."""
    names = (
        "MultiHeadAttention", "RoPE", "LoRA", "LoRALinear", "dot_product_attention", "dot_product_attention_with_rope",
        "make_attention_mask", "make_causal_mask", "combine_masks",
    )  # fmt: skip
    for name in filter(functools.partial(hasattr, flax), names):
        for method in ("__init__", "__call__", "init_cache", "set_view"):
            ours, theirs = getattr(nnx, name), getattr(flax, name)
            if inspect.isclass(ours):
                if not hasattr(theirs, method):
                    continue
                ours, theirs = getattr(ours, method), getattr(theirs, method)
            mine, yours = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
            shared = [(p.name, p.kind) for p in mine.values() if HAS_ROPE or p.name in yours]
            assert shared == [(p.name, p.kind) for p in yours.values()], name
            for key, parameter in yours.items():
                assert callable(parameter.default) or _plain(mine[key].default) == _plain(parameter.default), (
                    name,
                    key,
                )


def _plain(default):
    return dict(default) if hasattr(default, "keys") else default


def test_settings_are_attributes():
    """The plain attributes have the same names and values."""

    def facts(lib):
        kwargs = {"dropout_rate": 0.5, "normalize_qk": True, "keep_rngs": False, "precision": "high"}
        layer = lib.MultiHeadAttention(4, 8, 16, num_kv_heads=2, **kwargs, rngs=lib.Rngs(0))
        found = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        return {name: value for name, value in found.items() if not callable(value)} | {"names": sorted(found)}

    assert facts(nnx) == facts(flax)


def test_the_dropout_stream():
    """Forked from the same stream with the same tag and count; a stream given to the call is used instead."""

    def facts(lib):
        out = []
        for rngs in (lib.Rngs(0), lib.Rngs(0, dropout=1)):
            layer = lib.MultiHeadAttention(2, 4, dropout_rate=0.5, deterministic=False, decode=False, rngs=rngs)
            x = array(2, 3, 4)
            out += [layer.rngs.tag, int(layer.rngs.count.get_value()), np.round(layer(x), 4).tolist()]
            out += [np.round(layer(x, rngs=lib.Rngs(5)), 4).tolist(), int(layer.rngs.count.get_value())]
            out += [np.round(layer(x, rngs=lib.RngStream(5, tag="a")), 4).tolist(), layer(x, deterministic=True).shape]
        return out

    assert facts(nnx) == facts(flax)


def test_custom_products_and_promotions_of_the_layer():
    """What each of them changes shows in the output, so each is used in the same places."""

    def run(lib):
        def promote(scale):
            return lambda arrays, **_: tuple([None if a is None else scale * jnp.asarray(a) for a in arrays])

        def product(scale):
            return lambda *args, **kwargs: scale * jax.lax.dot_general(*args, **kwargs)

        outputs = []
        for options in (
            {"qkv_dot_general": product(2.0), "out_dot_general": product(3.0)},
            {"qkv_dot_general_cls": lambda: product(2.0), "out_dot_general_cls": lambda: product(3.0)},
            {"qkv_promote_dtype": promote(2.0)},
            {"out_promote_dtype": promote(3.0)},
            {"ln_promote_dtype": promote(0.5), "normalize_qk": True},
        ):
            layer = lib.MultiHeadAttention(2, 4, 8, decode=False, rngs=lib.Rngs(0), **options)
            x = array(2, 3, 4)
            outputs.append(layer(x, inputs_k=2 * x, inputs_v=3 * x))
        return outputs

    for ours, theirs in zip(run(nnx), run(flax), strict=True):
        assert_close(ours, theirs)


def test_attention_fn_is_called_alike():
    """A custom function sees the same keyword arguments; metadata and custom products reach the parameters."""
    seen = []

    def run(lib):
        def record(*args, **kwargs):
            kwargs.pop("input_positions", None)
            arrays = {name: (x.shape, x.dtype) for name, x in kwargs.items() if isinstance(x, jax.Array)}
            plain = {name: x for name, x in kwargs.items() if not isinstance(x, jax.Array | lib.Module)}
            seen.append(([x.shape for x in args], arrays, plain, "module" in kwargs))
            return lib.dot_product_attention(*args, **kwargs)

        seen.clear()
        products = {"qkv_dot_general": jax.lax.dot_general, "out_dot_general_cls": lambda: jax.lax.dot_general}
        layer = lib.MultiHeadAttention(
            2, 4, attention_fn=record, precision="high", dropout_rate=0.5, dtype="float32", **products,
            kernel_metadata={"role": "k"}, bias_metadata={"role": "b"}, out_kernel_metadata={"role": "ok"},
            out_bias_metadata={"role": "ob"}, query_ln_scale_metadata={"role": "q"}, normalize_qk=True,
            key_ln_scale_metadata={"role": "kl"}, rngs=lib.Rngs(0),
        )  # fmt: skip
        x = array(2, 3, 4)
        layer(x, decode=False, deterministic=True, mask=jnp.ones((1, 1, 3, 3)), is_causal=True)
        layer(x, decode=False, deterministic=False, sow_weights=True)
        if HAS_ROPE:
            layer(x, decode=False, deterministic=True, input_positions=jnp.arange(3))
        layer.init_cache(x.shape)
        layer(x[:, :1], decode=True, deterministic=True, is_causal=HAS_ROPE)
        layer(x[:, :1], decode=True, deterministic=True, mask=jnp.ones((2, 2, 1, 3)))
        roles = {path: v.role for path, v in lib.to_flat_state(lib.state(layer, lib.Param))}
        return list(seen), roles

    assert run(nnx) == run(flax)


@fewer
@given(settings_of(num_kv_heads=[2], normalize_qk=[True], dtype=[jnp.bfloat16], param_dtype=[jnp.bfloat16]))
def test_decoding(kwargs):
    """Token by token: the same caches, index and outputs."""
    x = array(2, 4, 8)

    def run(lib):
        layer = lib.MultiHeadAttention(4, 8, **kwargs, decode=True, rngs=lib.Rngs(0))
        layer.init_cache(x.shape, dtype=kwargs.get("dtype", jnp.float32))
        outputs = [layer(x[:, i : i + 1]) for i in range(3)]
        return outputs, leaves(lib, layer)

    (ours, our_state), (theirs, their_state) = run(nnx), run(flax)
    jax.tree.map(assert_close, ours, theirs)
    assert list(our_state) == list(their_state)
    for path, (kind, value) in our_state.items():
        assert kind == their_state[path][0]
        assert_close(value, their_state[path][1])


def test_recorded_weights():
    """Under the same name, as often, of the same values."""

    def run(lib):
        layer = lib.MultiHeadAttention(4, 8, num_kv_heads=2, decode=False, rngs=lib.Rngs(0))
        for _ in range(2):
            layer(array(2, 3, 8), sow_weights=True)
        return lib.to_pure_dict(lib.pop(layer, lib.Intermediate))

    jax.tree.map(assert_close, run(nnx), run(flax))


# --- LoRA -------------------------------------------------------------------------------------------------------------

LORA = settings_of(
    dtype=[jnp.bfloat16, "float32"], param_dtype=[jnp.bfloat16], a_initializer=[normal], base=["Linear", "function"]
)


@fewer
@given(LORA, st.sampled_from([(3,), (2, 3), (4, 2, 3)]), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_lora(kwargs, shape, dtype):
    def make(lib):
        options = {"b_initializer": normal, **kwargs}
        base = options.pop("base", None)
        if base == "Linear":
            options["base_module"] = lib.Linear(3, 4, rngs=lib.Rngs(1))
        elif base == "function":
            options["base_module"] = _first_four
        return lib.LoRA(3, 2, 4, **options, rngs=lib.Rngs(0))

    x, wrt = array(*shape, dtype=dtype), lambda lib: lib.LoRAParam
    check(make, lambda lib, layer, x: layer(x), x, wrt=wrt, calls=1, rough=rounding(kwargs, dtype))


def _first_four(x):
    return jnp.concatenate([x, x], axis=-1)[..., :4]


@fewer
@given(settings_of(dtype=[jnp.bfloat16], lora_dtype=[jnp.bfloat16], lora_param_dtype=[jnp.bfloat16], use_bias=[False]))
def test_lora_linear(kwargs):
    """The adaptation computes in the dtype of the layer; in flax.nnx, only if this is its ``lora_dtype``, too."""
    kwargs = {"lora_dtype": kwargs.get("dtype"), **kwargs}

    def make(lib):
        return lib.LoRALinear(3, 4, lora_rank=2, b_initializer=normal, **kwargs, rngs=lib.Rngs(0))

    wrt = lambda lib: lib.LoRAParam
    check(make, lambda lib, layer, x: layer(x), array(2, 3), wrt=wrt, calls=1, rough=rounding(kwargs))


def test_lora_settings_and_metadata():
    """Attributes, types of the parameters and their metadata."""

    def facts(lib):
        layer = lib.LoRA(
            3, 2, 4, lora_param_type=lib.Param, a_metadata={"role": "a"}, b_metadata={"role": "b"}, rngs=lib.Rngs(0)
        )
        names = sorted(name for name in vars(layer) if not name.startswith("_"))
        kinds = [type(layer.lora_a).__name__, type(layer.lora_b).__name__, layer.lora_a.role, layer.lora_b.role]
        linear = lib.LoRALinear(3, 4, lora_rank=2, rngs=lib.Rngs(0))
        return names, kinds, sorted(name for name in vars(linear) if not name.startswith("_")), linear.lora.in_features

    assert facts(nnx) == facts(flax)
    assert [kind.__name__ for kind in nnx.LoRAParam.__mro__[:3]] == [k.__name__ for k in flax.LoRAParam.__mro__[:3]]


def test_module_contents():
    """`nn.attention` and `nn.lora` have the public names that flax.nnx defines there."""
    for ours, theirs in ((our_attention, flax.nn.attention), (our_lora, flax.nn.lora)):
        public = [
            n for n, v in vars(theirs).items() if getattr(v, "__module__", None) == theirs.__name__ and n[0] != "_"
        ]
        assert [name for name in public if not hasattr(ours, name)] == []


# --- where we differ --------------------------------------------------------------------------------------------------


def test_differences_on_purpose():
    """What flax.nnx refuses, or gets wrong, and nnxlib does."""
    x = array(2, 4, 8)

    def layer(lib, **kwargs):
        return lib.MultiHeadAttention(2, 8, rngs=lib.Rngs(0), **kwargs)

    assert layer(nnx)(x).shape == x.shape  # without `decode` a layer without a cache does not decode
    with pytest.raises(ValueError, match="decode"):
        layer(flax)(x)

    for lib, takes_chunks in ((nnx, True), (flax, False)):
        decoder = layer(lib, decode=True)
        decoder.init_cache(x.shape)
        if takes_chunks:
            assert_close(decoder(x[:, :3]), layer(lib, decode=False)(x[:, :3], is_causal=True))
        else:
            with pytest.raises(ValueError, match="shape error"):
                decoder(x[:, :3])


@pytest.mark.skipif(not HAS_ROPE, reason="this flax has no RoPE")
def test_differences_of_rope_on_purpose():
    """With RoPE, decoding equals the whole forward here; bfloat16 stays bfloat16."""
    x = array(2, 4, 8)

    def decoded_with_rope(lib):
        rope = functools.partial(lib.dot_product_attention_with_rope, rope=lib.RoPE())
        decoder = lib.MultiHeadAttention(2, 8, attention_fn=rope, decode=True, rngs=lib.Rngs(0))
        decoder.init_cache(x.shape)
        parts = [decoder(x[:, i : i + 1]) for i in range(4)]
        return jnp.abs(jnp.concatenate(parts, axis=1) - decoder(x, decode=False, is_causal=True)).max()

    assert decoded_with_rope(nnx) < 1e-5
    assert decoded_with_rope(flax) > 0.1

    assert nnx.RoPE()(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert flax.RoPE()(x.astype(jnp.bfloat16)).dtype == jnp.float32
