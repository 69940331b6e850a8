"""Drawn layers: any combination of arguments, legal or not, called in any way, is the same in flax.nnx."""

import random

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")

import flax.nnx

from .drawn import Note, array, assert_same, some

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning", "ignore:Casting complex"
)

INITS = [jax.nn.initializers.normal(1.0), jax.nn.initializers.constant(0.5)]
METADATA = [{"role": "k"}, {"note": (1, 2), "tag": "z"}]
DTYPES = {"dtype": [jnp.bfloat16, "float32", jnp.int32, jnp.complex64], "param_dtype": [jnp.bfloat16, jnp.float16]}
BIAS = {"use_bias": [False], "bias_init": INITS, "bias_metadata": METADATA}
KERNEL = {"kernel_init": INITS, "kernel_metadata": METADATA, "preferred_element_type": [jnp.float16, jnp.float32]}
SCALE = {"use_scale": [False], "scale_init": INITS, "scale_metadata": METADATA}
NORM = {**DTYPES, **SCALE, "epsilon": [1e-3, 0.5], "use_fast_variance": [False]}
WINDOW = {
    "strides": [2, (1, 2), [2, 1]],
    "kernel_dilation": [2, (2, 1)],
    "padding": ["VALID", 1, "CIRCULAR", "BAD", (0, 1)],
}
INPUTS = [jnp.float32] * 4 + [jnp.bfloat16, jnp.int32, jnp.complex64]


def batch(draw):
    return draw.choice([(), (2,), (2, 3), (0,), (1, 2)])


def linear(draw):
    sizes = draw.randint(1, 3), draw.randint(1, 3)
    return sizes, some(draw, 0.2, **DTYPES, **KERNEL, **BIAS), (*batch(draw), sizes[0] + (draw.random() < 0.1))


def linear_general(draw):
    shape = tuple([draw.randint(1, 3) for _ in range(draw.randint(2, 4))])
    axes = draw.sample(range(len(shape)), draw.randint(1, 2))
    kwargs = some(draw, 0.2, **DTYPES, **KERNEL, **BIAS)
    kwargs["axis"] = tuple([a - draw.choice([0, len(shape)]) for a in axes])
    rest = [a for a in range(len(shape)) if a not in axes]
    if rest and draw.random() < 0.4:
        kwargs["batch_axis"] = {rest[0]: shape[rest[0]]}
    return (tuple([shape[a] for a in axes]), draw.choice([2, (2, 3)])), kwargs, shape


def einsum(draw):
    args, shape = draw.choice([
        (("nta,hab->nthb", (2, 3, 4), (2, 4)), (5, 6, 3)),
        (("...a,ab->...b", (3, 4), (4,)), (2, 3)),
        (("bna,bac->bnc", (2, 3, 4)), (2, 5, 3)),
        (("ab,bc->ac->d", (3, 4), (4,)), (2, 3)),
    ])  # fmt: skip
    return args, some(draw, 0.2, **DTYPES, **KERNEL, bias_metadata=METADATA), shape


def embed(draw):
    kwargs = some(draw, 0.2, **DTYPES, embedding_init=INITS, embedding_metadata=METADATA)
    return (4, draw.randint(1, 3)), kwargs, (*batch(draw), 2)


def conv(draw):
    kwargs = some(draw, 0.2, **DTYPES, **KERNEL, **BIAS, **WINDOW, input_dilation=[2], feature_group_count=[2])
    return (2, 4, draw.choice([(2, 3), (1, 1)])), kwargs, (*batch(draw), 5, 6, 2)


def conv_transpose(draw):
    kwargs = some(draw, 0.2, **DTYPES, **KERNEL, **BIAS, transpose_kernel=[True, False])
    kwargs |= some(draw, 0.3, **(WINDOW | {"padding": ["VALID", 1, "CIRCULAR", (0, 1)]}))
    return (2, 4, draw.choice([(2, 3), (1, 1)])), kwargs, (*batch(draw), 5, 4, 2)


def batch_norm(draw):
    kwargs = some(draw, 0.2, **NORM, **BIAS, momentum=[0.5, 0.0], use_running_average=[True])
    kwargs.pop("dtype", None)  # a complex mean stays complex only here
    return (3,), kwargs, (*batch(draw), 2, 3)


def layer_norm(draw):
    kwargs = some(draw, 0.2, **NORM, **BIAS, reduction_axes=[-2, (-1, -2), 0], feature_axes=[(-1,), -2])
    return (3,), kwargs, draw.choice([(2, 3), (4, 2, 3), (2, 3, 3)])


def group_norm(draw):
    kwargs = some(draw, 0.2, **NORM, **BIAS, group_size=[2])
    return (6,), kwargs | {"num_groups": draw.choice([1, 2, 4, 6, None])}, (2, draw.randint(1, 3), 6)


def lora(draw):
    kwargs = some(draw, 0.3, **DTYPES, a_initializer=INITS, b_initializer=INITS, a_metadata=METADATA)
    return (3, draw.randint(1, 3), 2), kwargs, (*batch(draw), 3)


def attention(draw):
    kwargs = some(
        draw, 0.15, param_dtype=[jnp.bfloat16], dropout_rate=[0.5], broadcast_dropout=[False], normalize_qk=[True],
        qkv_features=[8, 3], out_features=[5], num_kv_heads=[1, 3], use_bias=[False], kernel_metadata=METADATA,
        out_kernel_metadata=METADATA, bias_metadata=METADATA, key_ln_scale_metadata=METADATA, out_bias_init=INITS,
    )  # fmt: skip
    return (2, 4), kwargs | {"decode": False, "deterministic": draw.random() < 0.5}, (*draw.choice([(), (2,)]), 3, 4)


DRAWN = {
    "Linear": linear, "LinearGeneral": linear_general, "Einsum": einsum, "Embed": embed, "Conv": conv,
    "ConvTranspose": conv_transpose, "BatchNorm": batch_norm, "LayerNorm": layer_norm, "InstanceNorm": layer_norm,
    "GroupNorm": group_norm, "LoRA": lora, "MultiHeadAttention": attention,
}  # fmt: skip


def program_of(name):
    """Make the layer; call it plainly, under jit, mapped over a stack, in a scan, abstractly, or differentiate it."""

    def program(lib, draw: random.Random, note: Note) -> None:
        args, kwargs, shape = DRAWN[name](draw)
        if name == "InstanceNorm":
            kwargs.pop("reduction_axes", None)
        x = jnp.arange(4) if name == "Embed" else array(draw, shape, draw.choice(INPUTS))
        make = lambda rngs: getattr(lib, name)(*args, **kwargs, rngs=rngs)
        call = lambda m, x: m(x)
        layer = note("layer", lambda: make(lib.Rngs(params=1, dropout=draw.randrange(3))))
        if layer is None:
            return
        way = draw.choice(["plain", "jit", "vmap", "scan", "eval_shape", "grad", "grad"])
        if way in ("vmap", "scan"):
            keys = jax.random.split(jax.random.key(0), 2)
            layer = note("stack", lambda: lib.vmap(lambda key: make(lib.Rngs(key)))(keys))
        note(way, {
            "plain": lambda: (call(layer, x), call(layer, x)),
            "jit": lambda: lib.jit(call)(layer, x),
            "vmap": lambda: lib.vmap(call, in_axes=(0, None))(layer, x),
            "scan": lambda: lib.scan(lambda x, m: (x, m(x)), in_axes=(lib.Carry, 0), out_axes=(lib.Carry, 0))(x, layer),
            "eval_shape": lambda: lib.eval_shape(call, layer, x),
            "grad": lambda: lib.grad(lambda m, x: jnp.sin(abs(m(x).astype(jnp.complex64))).sum())(layer, x),
        }[way])  # fmt: skip
        note("state", lambda: lib.state(layer))

    return program


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("seed", range(2))
def test_layers(name, seed):
    assert_same(program_of(name), f"{name} {seed}", flax.nnx)
