"""Each keyword of each layer, by itself, does what it does in flax.nnx; and each value here makes a difference there.

What is compared is the State of a layer with its metadata, what a call returns and leaves behind, and settings in its
jaxpr, since precision changes no number on a CPU. So a keyword that is ignored, or passed to the wrong place, is found.
A keyword without a row is an error.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nnxlib as nnx

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")

from flax import nnx as flax

from .results import ROUNDING, assert_alike, facts, scales_are_learned

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

X = jnp.asarray(np.random.default_rng(0).normal(1.0, 2.0, (2, 6, 6, 4)), jnp.float32)
SEQUENCES = X[:, :, 0]
LENGTHS = jnp.array([2, 5])
THREE, NORMAL = jax.nn.initializers.constant(3.0), jax.nn.initializers.normal(1.0)
METADATA = {"role": "x", "number": 3}
MASK = jnp.broadcast_to(jnp.arange(6)[:, None] < 4, X.shape)


def promoted(args: Any, dtype: Any = None, inexact: bool = True) -> tuple:
    return tuple([None if x is None else jnp.asarray(x, jnp.float16) for x in args])


def doubled(f: Callable) -> Callable:
    return lambda *args, **kwargs: 2 * f(*args, **kwargs)


def attended(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
    return query + value


class Row(NamedTuple):
    """How to make a layer, how to call it, and for each keyword a value that is not the default."""

    make: Callable[..., Any]
    keywords: dict[str, Any]
    call: Callable[..., Any] = lambda lib, layer, **kwargs: layer(X, **kwargs)
    call_keywords: dict[str, Any] = {}


class Of:
    """A value that each library has its own of."""

    def __init__(self, value: Callable[[Any], Any]):
        self.value = value


class With:
    """A value that shows beside other keywords only."""

    def __init__(self, value: Any, **others: Any):
        self.value, self.others = value, others


def keywords_of(name: str, value: Any, lib: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """All keywords to give, and those without this one."""
    others = value.others if isinstance(value, With) else {}
    value = value.value if isinstance(value, With) else value
    return {**others, name: value.value(lib) if isinstance(value, Of) else value}, others


OVER_SHARDS = {"axis_name": "shards", "axis_index_groups": With([[0, 1], [2, 3]], axis_name="shards")}
TYPES = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "promote_dtype": promoted}
BIAS = {"use_bias": False, "bias_init": NORMAL, "bias_metadata": METADATA}
SCALE = {"use_scale": False, "scale_init": NORMAL, "scale_metadata": METADATA}
KERNEL = {
    **TYPES,
    **BIAS,
    "precision": "highest",
    "kernel_init": NORMAL,
    "kernel_metadata": METADATA,
    "preferred_element_type": With(jnp.float32, dtype=jnp.bfloat16),
}
WINDOW = {"strides": (2, 1), "padding": ((1, 2), (0, 1)), "kernel_dilation": (2, 1), "mask": Of(lambda lib: MASK4)}
MASK4 = np.random.default_rng(1).integers(0, 2, (3, 3, 4, 4)).astype(np.float32)
NORM = {**TYPES, **SCALE, "epsilon": 0.5, **OVER_SHARDS}
MEANS = {**BIAS, "use_fast_variance": With(False, epsilon=0.0)}
CELL = {
    **TYPES,
    "param_dtype": With(jnp.bfloat16, recurrent_kernel_init=NORMAL),  # there, QR is not computed in float32
    "carry_init": THREE,
    "activation_fn": jnp.sin,
    "kernel_init": NORMAL,
    "recurrent_kernel_init": NORMAL,
    "bias_init": NORMAL,
    "keep_rngs": True,
    "kernel_metadata": METADATA,
    "recurrent_kernel_metadata": METADATA,
    "bias_metadata": METADATA,
}


def two_steps(lib: Any, cell: Any) -> Any:
    carry, y = cell(cell.initialize_carry((2, 4), lib.Rngs(5)), X[:, 0, 0])
    return y, cell(carry, X[:, 1, 0])


def rnn(lib: Any, seed: int = 0, **kwargs: Any) -> Any:
    return lib.RNN(lib.GRUCell(4, 3, carry_init=NORMAL, rngs=lib.Rngs(seed)), **kwargs)


def a_layer(name: str, *args: Any, **given: Any) -> Callable[..., Any]:
    def make(lib: Any, **kwargs: Any) -> Any:
        return getattr(lib, name)(*args, **{"rngs": lib.Rngs(3, dropout=4), **given, **kwargs})

    return make


def around(name: str, **given: Any) -> Callable[..., Any]:
    return lambda lib, **kwargs: a_layer(name, lib.Linear(4, 3, rngs=lib.Rngs(1)), **given)(lib, **kwargs)


def attend(lib: Any, layer: Any, **kwargs: Any) -> Any:
    inputs = X[:, 0]
    if layer.in_kv_features != 4:
        kwargs["inputs_k"] = X[:, 1, :, jnp.arange(layer.in_kv_features) % 4].transpose(1, 2, 0)
    if layer.dropout_rate and layer.rngs is None:
        kwargs["rngs"] = lib.Rngs(9)
    if layer.decode:
        layer.init_cache(inputs.shape)
        inputs = inputs[:, :1]
    return layer(inputs, **kwargs)


ROWS = {
    "Linear": Row(a_layer("Linear", 4, 4), {**KERNEL, "dot_general": doubled(lax.dot_general)}),
    "LinearGeneral": Row(
        a_layer("LinearGeneral", (6, 4), (3, 2), axis=(1, -1)),
        {
            **KERNEL,
            "axis": (2, -1),
            "batch_axis": With({0: 2}, axis=(1, -1)),
            "dot_general": doubled(lax.dot_general),
            "dot_general_cls": lambda: doubled(lax.dot_general),
        },
    ),
    "Einsum": Row(
        a_layer("Einsum", "...a,ab->...b", (4, 4), bias_shape=(4,)),
        {**{k: v for k, v in KERNEL.items() if k != "use_bias"}, "einsum_op": doubled(jnp.einsum), "bias_shape": None},
        call_keywords={"einsum_str": "...a,ba->...b"},
    ),
    "Embed": Row(
        a_layer("Embed", 5, 4),
        {**TYPES, "embedding_init": THREE, "embedding_metadata": METADATA},
        lambda lib, layer: (layer(jnp.arange(4)), layer.attend(X)),
    ),
    "Conv": Row(
        a_layer("Conv", 4, 4, (3, 3)),
        {
            **KERNEL,
            **WINDOW,
            "input_dilation": With((1, 2), padding=1),
            "feature_group_count": 2,
            "conv_general_dilated": doubled(lax.conv_general_dilated),
        },
    ),
    "ConvTranspose": Row(a_layer("ConvTranspose", 4, 4, (3, 3)), {**KERNEL, **WINDOW, "transpose_kernel": True}),
    "BatchNorm": Row(
        a_layer("BatchNorm", num_features=4),
        {**NORM, **MEANS, "use_running_average": True, "axis": With(1, num_features=6), "momentum": 0.5},
        call_keywords={"use_running_average": True, "mask": MASK},
    ),
    "LayerNorm": Row(
        a_layer("LayerNorm", num_features=4),
        {
            **NORM,
            **MEANS,
            "reduction_axes": (1, -1),
            "feature_axes": With((1, -1), num_features=24, reduction_axes=(1, -1)),
        },
        call_keywords={"mask": MASK},
    ),
    "RMSNorm": Row(
        a_layer("RMSNorm", num_features=4),
        {**NORM, "reduction_axes": (1, -1), "feature_axes": With((1, -1), num_features=24, reduction_axes=(1, -1))},
        call_keywords={"mask": MASK},
    ),
    "GroupNorm": Row(
        a_layer("GroupNorm", 4, num_groups=2),
        {**NORM, **MEANS, "num_groups": 4, "group_size": With(1, num_groups=None)},
        call_keywords={"mask": MASK},
    ),
    "InstanceNorm": Row(
        a_layer("InstanceNorm", num_features=4),
        {**NORM, **MEANS, "feature_axes": With((1, -1), num_features=24)},
        call_keywords={"mask": MASK},
    ),
    "Dropout": Row(
        a_layer("Dropout", 0.5),
        {
            "broadcast_dims": (0, 1),
            "deterministic": True,
            "rng_collection": "params",
            "rngs": Of(lambda lib: lib.Rngs(9)),
        },
        call_keywords={"deterministic": True, "rngs": Of(lambda lib: lib.Rngs(7))},
    ),
    "PReLU": Row(
        lambda lib, **kwargs: lib.PReLU(**kwargs),
        {
            "negative_slope_init": 0.3,
            "dtype": jnp.bfloat16,
            "param_dtype": jnp.bfloat16,
            "negative_slope_metadata": METADATA,
        },
    ),
    "SpectralNorm": Row(
        around("SpectralNorm"),
        {
            "n_steps": 3,
            "epsilon": 0.5,
            "dtype": jnp.bfloat16,
            "param_dtype": jnp.bfloat16,
            "update_stats": False,
        },
        call_keywords={"update_stats": False},
    ),
    "WeightNorm": Row(
        around("WeightNorm", feature_axes=0),
        {
            "feature_axes": -1,
            "use_scale": False,
            "epsilon": 0.5,
            "dtype": jnp.bfloat16,
            "variable_filter": Of(lambda lib: lib.PathContains("bias")),
        },
    ),
    "LoRA": Row(
        a_layer("LoRA", 4, 2, 4, b_initializer=NORMAL),
        {
            **TYPES,
            "base_module": jnp.sin,
            "a_initializer": NORMAL,
            "b_initializer": THREE,
            "lora_param_type": Of(lambda lib: lib.BatchStat),
            "a_metadata": METADATA,
            "b_metadata": METADATA,
        },
    ),
    "LoRALinear": Row(
        a_layer("LoRALinear", 4, 4, lora_rank=2, b_initializer=NORMAL),
        {
            "lora_dtype": jnp.bfloat16,
            "lora_param_dtype": jnp.bfloat16,
            "lora_promote_dtype": promoted,
            "a_initializer": NORMAL,
            "b_initializer": THREE,
            "lora_param_type": Of(lambda lib: lib.BatchStat),
            "a_metadata": METADATA,
            "b_metadata": METADATA,
            **{k: v for k, v in KERNEL.items() if k not in ("dtype", "preferred_element_type")},
        },
    ),
    "SimpleCell": Row(a_layer("SimpleCell", 4, 3), {**CELL, "residual": True}, two_steps),
    **{
        name: Row(a_layer(name, 4, 3), {**CELL, "gate_fn": jnp.sin}, two_steps)
        for name in ("LSTMCell", "OptimizedLSTMCell", "GRUCell")
    },
    "RNN": Row(
        rnn,
        {
            "time_major": True,
            "return_carry": True,
            "reverse": True,
            "keep_order": With(True, reverse=True),
            "unroll": 3,
            "rngs": Of(lambda lib: lib.Rngs(6)),
        },
        lambda lib, layer, **kwargs: layer(SEQUENCES, **kwargs),
        {
            "initial_carry": jnp.ones((2, 3)),
            "seq_lengths": With(LENGTHS, return_carry=True),
            "return_carry": True,
            "time_major": True,
            "reverse": True,
            "keep_order": With(True, reverse=True),
            "rngs": Of(lambda lib: lib.Rngs(6)),
        },
    ),
    "Bidirectional": Row(
        lambda lib, **kwargs: lib.Bidirectional(rnn(lib), rnn(lib, 1), **kwargs),
        {
            "merge_fn": jnp.add,
            "time_major": True,
            "return_carry": True,
            "rngs": Of(lambda lib: lib.Rngs(6)),
        },
        lambda lib, layer, **kwargs: layer(SEQUENCES, **kwargs),
        {
            "initial_carry": (jnp.ones((2, 3)), jnp.zeros((2, 3))),
            "seq_lengths": LENGTHS,
            "return_carry": True,
            "time_major": True,
            "rngs": Of(lambda lib: lib.Rngs(6)),
        },
    ),
    "MultiHeadAttention": Row(
        a_layer("MultiHeadAttention", 2, 4, decode=False, deterministic=False, bias_init=NORMAL),
        {
            "qkv_features": 8,
            "out_features": 5,
            "num_kv_heads": 1,
            "in_kv_features": 6,
            "dtype": jnp.bfloat16,
            "param_dtype": jnp.bfloat16,
            "broadcast_dropout": With(False, dropout_rate=0.5),
            "dropout_rate": 0.5,
            "deterministic": With(True, dropout_rate=0.5),
            "precision": "highest",
            "kernel_init": NORMAL,
            "out_kernel_init": THREE,
            "bias_init": THREE,
            "out_bias_init": THREE,
            "use_bias": False,
            "attention_fn": attended,
            "decode": True,
            "normalize_qk": True,
            "qkv_promote_dtype": promoted,
            "out_promote_dtype": promoted,
            "ln_promote_dtype": With(promoted, normalize_qk=True),
            "qkv_dot_general": doubled(lax.dot_general),
            "out_dot_general": doubled(lax.dot_general),
            "qkv_dot_general_cls": lambda: doubled(lax.dot_general),
            "out_dot_general_cls": lambda: doubled(lax.dot_general),
            "keep_rngs": With(False, dropout_rate=0.5),
            "kernel_metadata": METADATA,
            "out_kernel_metadata": METADATA,
            "bias_metadata": METADATA,
            "out_bias_metadata": METADATA,
            "query_ln_scale_metadata": With(METADATA, normalize_qk=True),
            "key_ln_scale_metadata": With(METADATA, normalize_qk=True),
        },
        attend,
        {
            "inputs_k": X[:, 1],
            "inputs_v": With(X[:, 2], inputs_k=X[:, 1]),
            "mask": jnp.tri(6, k=1),
            "is_causal": True,
            "sow_weights": True,
        },
    ),
    "MultiHeadAttention, dropping": Row(
        a_layer("MultiHeadAttention", 2, 4, decode=False, deterministic=False, dropout_rate=0.5),
        {},
        attend,
        {"deterministic": True, "rngs": Of(lambda lib: lib.Rngs(9))},
    ),
    "MultiHeadAttention, decoding": Row(
        a_layer("MultiHeadAttention", 2, 4, decode=True), {}, attend, {"decode": False}
    ),
}


# Keywords without a row, and why.
SHARDING = "test_the_sharding_of_an_output in test_layers_flax.py"
ELSEWHERE = {
    "out_sharding": SHARDING,
    "qkv_sharding": SHARDING,
    ("RMSNorm", "use_fast_variance"): "no effect",
    ("GroupNorm", "reduction_axes"): "other numbers on purpose, see tests/nn/test_norm.py",
    ("Dropout", "axis_name"): "flax.nnx has none, see tests/nn/test_stochastic.py",
    ("PReLU", "promote_dtype"): "flax.nnx promotes otherwise, see tests/nn/test_layers_everywhere.py",
    ("WeightNorm", "promote_dtype"): "flax.nnx promotes otherwise, see tests/nn/test_layers_everywhere.py",
    ("WeightNorm", "scale_init"): "flax.nnx calls it without a dtype, see tests/nn/test_reparametrised.py",
    ("WeightNorm", "param_dtype"): "flax.nnx calls scale_init without it, see tests/nn/test_reparametrised.py",
    ("SpectralNorm", "error_on_non_matrix"): "see tests/nn/test_reparametrised.py",
    ("RNN", "state_axes"): "see tests/nn/test_recurrent.py",
    ("RNN", "broadcast_rngs"): "see tests/nn/test_recurrent.py",
    ("Bidirectional", "reverse"): "no effect",
    ("Bidirectional", "keep_order"): "no effect",
    ("MultiHeadAttention", "input_positions"): "see test_attention_flax.py",
}


def test_no_keyword_is_left_out():
    for name in ROWS:
        kind = name.partition(",")[0]
        rows = [row for other, row in ROWS.items() if other.partition(",")[0] == kind]
        for method, field in (
            (getattr(nnx, kind).__init__, "keywords"),
            (getattr(nnx, kind).__call__, "call_keywords"),
        ):
            parameters = inspect.signature(method).parameters.values()
            optional = {p.name for p in parameters if p.default is not p.empty}
            left_out = optional.difference(*(getattr(row, field) for row in rows))
            assert not {x for x in left_out if x not in ELSEWHERE and (kind, x) not in ELSEWHERE}, name


def settings_in(jaxpr: Any) -> set[str]:
    """The precision of products, the shards of sums, and how loops are unrolled, in a jaxpr and in those within."""
    found = set()
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in ("dot_general", "conv_general_dilated") and "HIGHEST" in str(params["precision"]):
            found.add("highest precision")
        if name.startswith("psum"):
            found.add(f"sum over {params['axes']} {params['axis_index_groups']}")
        if name == "scan":
            found.add(f"unroll={params['unroll']}")
        for inner in jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found |= settings_in(inner) if hasattr(inner, "eqns") else set()
    return found


IN_JAXPR = {"precision", "axis_name", "axis_index_groups", "unroll"}


def seen(lib: Any, row: Row, given: Any, called: Any, in_jaxpr: bool) -> list:
    """What can be seen of a layer and of a call; of the settings in its jaxpr, if they are what matters."""
    layer = row.make(lib, **given())
    graphdef, state = lib.split(layer)
    before, out, settings = facts(lib, state), None, set()
    if in_jaxpr:
        run = lambda state: row.call(lib, lib.merge(graphdef, state), **called())
        settings = settings_in(jax.make_jaxpr(run, axis_env=[("shards", 4)])(state).jaxpr)
    else:
        out = row.call(lib, layer, **called())
    after = lib.state(layer, lib.Not(lib.Param))  # there, the Params that are normalised are written
    return [facts(lib, out), before, facts(lib, after), sorted(settings)]


def cases() -> list:
    found = []
    for name, row in ROWS.items():
        found += [pytest.param(name, keyword, False, id=f"{name}-{keyword}") for keyword in row.keywords]
        found += [pytest.param(name, keyword, True, id=f"{name}-call-{keyword}") for keyword in row.call_keywords]
    return found


@functools.cache
def of_defaults(name: str, in_jaxpr: bool) -> list:
    return seen(flax, ROWS[name], dict, dict, in_jaxpr)


@pytest.mark.parametrize(("name", "keyword", "in_call"), cases())
def test_a_keyword(name, keyword, in_call):
    kind = getattr(flax, name.partition(",")[0])
    known = inspect.signature(kind.__call__ if in_call else kind.__init__).parameters
    if keyword not in known and "kwargs" not in known:
        pytest.skip("this flax does not have it")
    if name == "WeightNorm" and not scales_are_learned():
        pytest.skip("the scales of WeightNorm are no Params there")
    row, in_jaxpr = ROWS[name], keyword in IN_JAXPR
    value = (row.call_keywords if in_call else row.keywords)[keyword]

    def run(lib: Any, which: int) -> list:
        chosen = lambda: keywords_of(keyword, value, lib)[which]
        return seen(lib, row, *((dict, chosen) if in_call else (chosen, dict)), in_jaxpr)

    theirs = run(flax, 0)
    assert_alike(run(nnx, 0), theirs, keyword, ROUNDING)
    try:
        without = run(flax, 1) if isinstance(value, With) else of_defaults(name, in_jaxpr)
    except (TypeError, ValueError) as error:
        without = error
    with pytest.raises(AssertionError):  # else this value would not show what the keyword does
        assert_alike(theirs, without, keyword, {})
