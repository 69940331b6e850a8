"""Weights of PyTorch, loaded by the recipes of docs/from_pytorch.md, give PyTorch's numbers.

``pytorch.npz`` has, for each layer, what PyTorch 2.2 gave on a CPU, 2.14 for ``GRU``: its ``state_dict``, an input, and
the output.
"""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx

STORED = dict(np.load(pathlib.Path(__file__).with_name("pytorch.npz")))


def stored(name, kind):
    """What is stored about a layer: its weights, or what they are after a call in training."""
    return {key.split("/")[2]: value for key, value in STORED.items() if key.startswith(f"{name}/{kind}/")}


def loaded(module, **values):
    for name, value in values.items():
        *path, last = name.split(".")
        owner = module
        for key in path:
            owner = getattr(owner, key)
        assert getattr(owner, last).shape == value.shape
        getattr(owner, last).value = jnp.asarray(value)
    return module


RNGS = nnx.Rngs(0)


def linear(w):
    return loaded(nnx.Linear(6, 4, rngs=RNGS), kernel=w["weight"].T, bias=w["bias"])


def conv(*sizes, **options):
    def make(w):
        kernel = np.moveaxis(w["weight"], (0, 1), (-1, -2))
        return loaded(nnx.Conv(*sizes, rngs=RNGS, **options), kernel=kernel, bias=w["bias"])

    return make


def conv_transpose(w):
    k, p, q = 3, 1, 1
    layer = nnx.ConvTranspose(
        4, 6, (k, k), 2, padding=[(k - 1 - p, k - 1 - p + q)] * 2, transpose_kernel=True, rngs=RNGS
    )
    return loaded(layer, kernel=w["weight"].transpose(2, 3, 1, 0), bias=w["bias"])


def batch_norm(w, **options):
    layer = nnx.BatchNorm(4, momentum=0.9, rngs=RNGS, **options)
    return loaded(layer, scale=w["weight"], bias=w["bias"], mean=w["running_mean"], var=w["running_var"])


def norm(kind, *sizes):
    return lambda w: loaded(kind(*sizes, epsilon=1e-5, rngs=RNGS), scale=w["weight"], bias=w["bias"])


def instance_norm(w):
    return loaded(nnx.InstanceNorm(4, epsilon=1e-5, rngs=RNGS), scale=w["weight"], bias=w["bias"])


def lstm(w, suffix=""):
    cell = loaded(
        nnx.OptimizedLSTMCell(6, 3, rngs=RNGS),
        **{
            "dense_i.kernel": w[f"weight_ih_l0{suffix}"].T,
            "dense_h.kernel": w[f"weight_hh_l0{suffix}"].T,
            "dense_h.bias": w[f"bias_ih_l0{suffix}"] + w[f"bias_hh_l0{suffix}"],
        },
    )
    return nnx.RNN(cell)


def rnn(w):
    cell = loaded(
        nnx.SimpleCell(6, 3, rngs=RNGS),
        **{
            "dense_i.kernel": w["weight_ih_l0"].T,
            "dense_h.kernel": w["weight_hh_l0"].T,
            "dense_i.bias": w["bias_ih_l0"] + w["bias_hh_l0"],
        },
    )
    return nnx.RNN(cell)


def gru(w):
    cell = nnx.GRUCell(6, 3, rngs=RNGS)
    cell.dense_h = nnx.Linear(3, 9, rngs=RNGS)
    cell = loaded(
        cell,
        **{
            "dense_i.kernel": w["weight_ih_l0"].T,
            "dense_i.bias": w["bias_ih_l0"],
            "dense_h.kernel": w["weight_hh_l0"].T,
            "dense_h.bias": w["bias_hh_l0"],
        },
    )
    return nnx.RNN(cell)


def attention(w):
    e, h = 6, 2
    parts = zip(np.split(w["in_proj_weight"], 3), np.split(w["in_proj_bias"], 3), strict=True)
    values = {}
    for name, (weight, bias) in zip(("query", "key", "value"), parts, strict=True):
        values |= {f"{name}.kernel": weight.T.reshape(e, h, -1), f"{name}.bias": bias.reshape(h, -1)}
    values |= {"out.kernel": w["out_proj.weight"].T.reshape(h, -1, e), "out.bias": w["out_proj.bias"]}
    return loaded(nnx.MultiHeadAttention(h, e, decode=False, rngs=RNGS), **values)


LAYERS = {
    "Linear": linear,
    "Conv1d": conv(6, 4, 3, padding=1),
    "Conv2d": conv(4, 6, (3, 3), padding="VALID"),
    "Conv2d, grouped": conv(4, 6, (3, 5), strides=2, padding=(1, 2), feature_group_count=2, kernel_dilation=(2, 1)),
    "ConvTranspose2d": conv_transpose,
    "BatchNorm2d": lambda w: batch_norm(w, use_running_average=True),
    "BatchNorm2d, training": batch_norm,
    "LayerNorm": norm(nnx.LayerNorm, 6),
    "GroupNorm": norm(nnx.GroupNorm, 4, 2),
    "InstanceNorm2d": instance_norm,
    "Embedding": lambda w: loaded(nnx.Embed(7, 3, rngs=RNGS), embedding=w["weight"]),
    "LSTM": lstm,
    "LSTM, bidirectional": lambda w: nnx.Bidirectional(lstm(w), lstm(w, "_reverse")),
    "RNN": rnn,
    "GRU": gru,
    "MultiheadAttention": attention,
    "GELU": lambda w: lambda x: nnx.gelu(x, approximate=False),
    "PReLU": lambda w: nnx.PReLU(negative_slope_init=w["weight"].item()),
    "MaxPool2d": lambda w: lambda x: nnx.max_pool(x, (2, 2), (2, 2)),
    "AvgPool2d": lambda w: lambda x: nnx.avg_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1))),
}
CHANNELS_FIRST = ("Conv", "BatchNorm", "GroupNorm", "InstanceNorm", "MaxPool", "AvgPool")


@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_pytorch_give_its_numbers(name):
    """In float32, to a few units in the last place of the largest terms."""
    x, expected = STORED[f"{name}/input"], STORED[f"{name}/output"]
    layer = LAYERS[name](stored(name, "weights"))
    if name.startswith(CHANNELS_FIRST):
        y = jnp.moveaxis(layer(jnp.moveaxis(x, 1, -1)), -1, 1)
    else:
        y = layer(jnp.asarray(x))
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=2e-6)


def test_running_statistics_move_as_in_pytorch():
    """But the variance is that of the batch, where PyTorch stores the unbiased estimate."""
    name = "BatchNorm2d, training"
    x, after = STORED[f"{name}/input"], stored(name, "after")
    layer = batch_norm(stored(name, "weights"))
    layer(jnp.moveaxis(x, 1, -1))
    n = x[:, 0].size
    np.testing.assert_allclose(layer.mean.value, after["running_mean"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(0.9 + (layer.var.value - 0.9) * n / (n - 1), after["running_var"], rtol=1e-5)


def test_every_stored_layer_is_compared():
    assert {key.split("/")[0] for key in STORED} == set(LAYERS)
