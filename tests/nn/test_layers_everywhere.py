"""Every layer works in bfloat16 and float64, under each transform, and as a plain pytree.

A row of the table is a layer: how to make one from a stream of keys, how to call it, and the shape of an input. What is
checked of each is below; it is the same for all. A layer is called as `call(layer, x)`, which returns an array.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.nn.dtypes import promote_dtype


class Row(NamedTuple):
    """How to make a layer of given dtypes, an input of ones for it, and how to call it."""

    make: Callable[..., Any]
    shape: tuple[int, ...] = (2, 3)
    call: Callable[[Any, Any], Any] = lambda layer, x: layer(x)
    low: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    integer: bool = False


def step(cell, x):
    """One step of a cell from a carry of zeros."""
    return cell(cell.initialize_carry(x.shape), x)[1]


LAYERS = {
    "Linear": Row(lambda rngs, **kw: nnx.Linear(3, 3, rngs=rngs, **kw)),
    "LinearGeneral": Row(lambda rngs, **kw: nnx.LinearGeneral((3,), (3,), rngs=rngs, **kw)),
    "Einsum": Row(lambda rngs, **kw: nnx.Einsum("na,ab->nb", (3, 3), (3,), rngs=rngs, **kw)),
    "Embed": Row(lambda rngs, **kw: nnx.Embed(4, 3, rngs=rngs, **kw), (2,), integer=True),
    "Conv": Row(lambda rngs, **kw: nnx.Conv(3, 3, (2,), rngs=rngs, **kw), (2, 4, 3)),
    "ConvTranspose": Row(lambda rngs, **kw: nnx.ConvTranspose(3, 3, (2,), rngs=rngs, **kw), (2, 4, 3)),
    "BatchNorm": Row(lambda rngs, **kw: nnx.BatchNorm(3, rngs=rngs, **kw)),
    "LayerNorm": Row(lambda rngs, **kw: nnx.LayerNorm(3, rngs=rngs, **kw)),
    "RMSNorm": Row(lambda rngs, **kw: nnx.RMSNorm(3, rngs=rngs, **kw)),
    "GroupNorm": Row(lambda rngs, **kw: nnx.GroupNorm(4, 2, rngs=rngs, **kw), (2, 4)),
    "InstanceNorm": Row(lambda rngs, **kw: nnx.InstanceNorm(3, rngs=rngs, **kw), (2, 4, 3)),
    "SpectralNorm": Row(lambda rngs, **kw: nnx.SpectralNorm(nnx.Linear(3, 3, rngs=rngs, **kw), rngs=rngs, **kw)),
    "WeightNorm": Row(lambda rngs, **kw: nnx.WeightNorm(nnx.Linear(3, 3, rngs=rngs, **kw), rngs=rngs, **kw)),
    "Dropout": Row(lambda rngs: nnx.Dropout(0.5, rngs=rngs), low={}),
    "PReLU": Row(lambda rngs, **kw: nnx.PReLU(**kw)),
    "MultiHeadAttention": Row(  # 8 features in a head: normalised, 2 are always 1 and -1, and their gradient noise
        lambda rngs, **kw: nnx.MultiHeadAttention(
            2, 4, 16, decode=False, deterministic=False, normalize_qk=True, rngs=rngs, **kw
        ),
        (2, 3, 4),
    ),
    "LoRA": Row(lambda rngs, **kw: nnx.LoRA(3, 2, 3, base_module=nnx.Linear(3, 3, rngs=rngs, **kw), rngs=rngs, **kw)),
    "LoRALinear": Row(
        lambda rngs, **kw: nnx.LoRALinear(3, 3, lora_rank=2, rngs=rngs, **kw),
        low=dict.fromkeys(["dtype", "param_dtype", "lora_dtype", "lora_param_dtype"], jnp.bfloat16),
    ),
    "SimpleCell": Row(lambda rngs, **kw: nnx.SimpleCell(3, 3, rngs=rngs, **kw), call=step),
    "LSTMCell": Row(lambda rngs, **kw: nnx.LSTMCell(3, 3, rngs=rngs, **kw), call=step),
    "OptimizedLSTMCell": Row(lambda rngs, **kw: nnx.OptimizedLSTMCell(3, 3, rngs=rngs, **kw), call=step),
    "GRUCell": Row(lambda rngs, **kw: nnx.GRUCell(3, 3, rngs=rngs, **kw), call=step),
    "RNN": Row(lambda rngs, **kw: nnx.RNN(nnx.GRUCell(3, 3, rngs=rngs, **kw)), (2, 4, 3)),
    "Bidirectional": Row(
        lambda rngs, **kw: nnx.Bidirectional(
            *[nnx.RNN(nnx.GRUCell(3, 3, rngs=rngs, **kw)) for _ in range(2)], merge_fn=jnp.add
        ),
        (2, 4, 3),
    ),
}

every_layer = pytest.mark.parametrize("name", LAYERS)


def inputs(row, dtype=jnp.float32):
    values = np.random.default_rng(0).integers(0, 4, row.shape) if row.integer else None
    return jnp.asarray(np.random.default_rng(0).normal(size=row.shape) if values is None else values, dtype)


def given(name):
    """The row, two layers alike, and an input."""
    row = LAYERS[name]
    return row, row.make(nnx.Rngs(0)), row.make(nnx.Rngs(0)), inputs(row, jnp.int32 if row.integer else jnp.float32)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, b)


def values(module):
    """Every leaf of a module, by path."""
    shown = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return {path: shown(v.get_value()) for path, v in nnx.state(module).flat_state()}


@every_layer
def test_bfloat16(name):
    """Stored and computed in bfloat16, a layer gives bfloat16; the numbers are roughly those of the same in float32."""
    row, layer, _, x = given(name)
    low = row.make(nnx.Rngs(0), **row.low)
    learned = nnx.state(low, nnx.Any(nnx.Param, nnx.BatchStat))
    nnx.update(layer, jax.tree.map(lambda value: value.astype(jnp.float32), learned))
    y = row.call(low, x if row.integer else x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float32), row.call(layer, x), rtol=0.1, atol=0.1)


@every_layer
def test_float64(name):
    """Stored and computed in float64, with nothing in between that is narrower: differences give the derivative."""
    row = LAYERS[name]
    with jax.enable_x64(True):
        settings = dict.fromkeys(row.low, jnp.float64)
        call = lambda x: row.call(row.make(nnx.Rngs(0), **settings), x)
        x = inputs(row, jnp.int64 if row.integer else jnp.float64)
        y = call(x)
        assert y.dtype == jnp.float64
        if not row.integer:
            change = 1e-6 * jnp.asarray(np.random.default_rng(1).normal(size=x.shape))
            _, expected = jax.jvp(call, (x,), (change,))
            np.testing.assert_allclose((call(x + change) - call(x - change)) / 2, expected, rtol=1e-4, atol=1e-12)


@every_layer
def test_a_promote_dtype_of_the_users_takes_the_place_of_ours(name):
    """Under each name that the layer has for one."""
    row, layer, _, x = given(name)
    expected = row.call(layer, x)
    for parameter in inspect.signature(type(layer)).parameters:
        if parameter.endswith("promote_dtype"):
            calls = []

            def promote(values, calls=calls, **options):
                calls.append(len(values))
                return promote_dtype(values, **options)

            close(row.call(row.make(nnx.Rngs(0), **{parameter: promote}), x), expected)
            assert calls


@every_layer
def test_an_eager_call_runs_compiled_steps_alone(name):
    """JAX evaluates no operation by itself, which takes ten microseconds and more: each is in a step (formulas.py)."""
    row, layer, _, x = given(name)
    row.call(layer, x)
    bound = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "bind" and frame.f_globals["__name__"].startswith("jax."):
            bound.append(str(frame.f_locals["self"]))

    sys.setprofile(note)
    try:
        row.call(layer, x)
    finally:
        sys.setprofile(None)
    assert bound == []


@every_layer
def test_jit(name):
    """Compiled, eagerly, and compiled by plain JAX as a pytree: one output, and the same state afterwards."""
    row, layer, other, x = given(name)
    raw = jax.jit(row.call)(layer, x)
    before = values(layer)
    close(raw, row.call(other, x))
    close(values(layer), before)
    close(nnx.jit(row.call)(layer, x), raw)
    close(values(layer), values(other))


@every_layer
def test_grad_and_remat(name):
    """Gradients with and without recomputation are the same; the state moves on as in one call."""
    row, layer, other, x = given(name)
    loss = lambda call: lambda layer, x: jnp.sum(jnp.sin(call(layer, x)))
    if nnx.state(layer, nnx.Param):
        expected = nnx.grad(loss(row.call))(layer, x)
        close(nnx.to_pure_dict(nnx.grad(loss(nnx.remat(row.call)))(other, x)), nnx.to_pure_dict(expected))
        assert not any(jnp.isnan(g.get_value()).any() for _, g in expected.flat_state())
    else:
        close(nnx.remat(row.call)(layer, x), row.call(other, x))
    close(values(layer), values(other))


@every_layer
def test_vmap(name):
    """An ensemble: made over keys, called over its members; the same as each member by itself."""
    row, _, _, x = given(name)
    keys = jax.random.split(jax.random.key(0), 2)
    ensemble = nnx.vmap(lambda key: row.make(nnx.Rngs(key)))(keys)
    y = nnx.vmap(row.call, in_axes=(0, None))(ensemble, x)
    members = [row.make(nnx.Rngs(key)) for key in keys]
    close(y, jnp.stack([row.call(member, x) for member in members]))
    close(values(ensemble), {path: jnp.stack([values(m)[path] for m in members]) for path in values(members[0])})


@every_layer
def test_scan(name):
    """A stack: the layers one after the other, from arrays with an axis of layers."""
    row, _, _, x = given(name)
    stack = nnx.vmap(lambda key: row.make(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 2))
    layers = [row.make(nnx.Rngs(key)) for key in jax.random.split(jax.random.key(0), 2)]
    if row.integer:  # its output is no input
        _, y = nnx.scan(lambda x, layer: (x, row.call(layer, x)), in_axes=(nnx.Carry, 0))(x, stack)
        close(y, jnp.stack([row.call(layer, x) for layer in layers]))
    else:
        y = nnx.scan(lambda x, layer: row.call(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, stack)
        close(y, row.call(layers[1], row.call(layers[0], x)))
    close(values(stack), {path: jnp.stack([values(m)[path] for m in layers]) for path in values(layers[0])})


@every_layer
def test_eval_shape(name):
    """The shapes of a layer and of its output, without computing; of a live layer it leaves all as it is."""
    row, layer, other, x = given(name)
    abstract = nnx.eval_shape(lambda: row.make(nnx.Rngs(0)))
    shapes = lambda module: {path: (v.shape, v.dtype) for path, v in nnx.state(module).flat_state()}
    assert shapes(abstract) == shapes(layer)
    y = row.call(layer, x)
    before = values(other)
    for out in (nnx.eval_shape(row.call, abstract, x), jax.eval_shape(lambda layer, x: row.call(layer, x), other, x)):
        assert (out.shape, out.dtype) == (y.shape, y.dtype)
    close(values(other), before)


@every_layer
def test_split_and_merge(name):
    """Taken apart and put together, a layer is the same; evaluation mode and back too."""
    row, layer, other, x = given(name)
    merged = nnx.merge(*nnx.split(layer))
    close(row.call(merged, x), row.call(other, x))
    layer.eval()
    again = row.call(layer, x)
    close(row.call(layer, x), again)
    layer.train()
    assert nnx.graphdef(layer) == nnx.graphdef(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: nnx.Linear(4, 4, **options),
        lambda **options: nnx.Linear(4, 4, use_bias=False, **options),
        lambda **options: nnx.LinearGeneral(4, (2, 2), **options),
        lambda **options: nnx.Einsum("abc,cd->abd", (4, 4), (4,), **options),
        lambda **options: nnx.Conv(4, 4, 3, **options),
        lambda **options: nnx.ConvTranspose(4, 4, 3, **options),
        lambda **options: nnx.MultiHeadAttention(2, 4, **options),
    ],
)
def test_the_precision_of_a_layer_is_that_of_each_of_its_products(make):
    """It is in the program; on a CPU the numbers would not tell."""
    layer = make(precision="highest", rngs=nnx.Rngs(0))
    program = str(jax.make_jaxpr(lambda x: layer(x))(jnp.ones((1, 3, 4))))
    products = program.count("dot_general[") + program.count("conv_general_dilated[")
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products > 0
