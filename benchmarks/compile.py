"""What it costs to trace and lower a training step, beside the same step in raw JAX over dicts.

The idea: a program is traced and lowered before it runs, at every start of a training script, and a library that wraps
each layer makes that longer. So one Adam step of a decoder-only transformer is traced and lowered, never compiled or
run, for several numbers of layers: with the layers in a Python loop, the same with each of them computed again in the
backward pass (`jax.checkpoint`, `nnx.remat`), and stacked in a scan. The baseline holds its parameters in nested dicts
and calls `jax.numpy`; the arithmetic is the same.

Nothing may be left from an earlier trace, so each sample makes a new function of the step, and JAX's caches of traces
are cleared before it (`jax.clear_caches`); XLA is not called.

    python -m benchmarks.compile [--quick] [--results FOLDER]
"""

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .timing import Report, Table, main, ratio_of_rounds

VOCABULARY, LENGTH, WIDTH, HEADS, BATCH = 64, 16, 32, 4, 2
LOOP, REMAT, SCANNED = "", ", remat", ", scanned"  # how the layers are applied
CASES = [(layers, how) for how in (LOOP, REMAT, SCANNED) for layers in (2, 12, 48)]
QUICK_CASES = [(2, how) for how in (LOOP, REMAT, SCANNED)]
ADAM = optax.adam(1e-3)
Tokens = jax.Array


def tokens() -> Tokens:
    return jnp.zeros((BATCH, LENGTH), jnp.int32)


def loss_of(logits: jax.Array, targets: Tokens) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets[:, 1:]).mean()


# --- raw JAX ------------------------------------------------------------------------------------------------------


def raw_parameters(layers: int, stacked: bool) -> dict[str, Any]:
    def matrix(rows: int, columns: int) -> jax.Array:
        return jnp.full((rows, columns), 0.02)

    def linear(rows: int, columns: int) -> dict[str, jax.Array]:
        return {"kernel": matrix(rows, columns), "bias": jnp.zeros(columns)}

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    def block() -> dict[str, Any]:
        heads = {
            name: {
                "kernel": jnp.full((WIDTH, HEADS, WIDTH // HEADS), 0.02),
                "bias": jnp.zeros((HEADS, WIDTH // HEADS)),
            }
            for name in ("query", "key", "value")
        }
        out = {"kernel": jnp.full((HEADS, WIDTH // HEADS, WIDTH), 0.02), "bias": jnp.zeros(WIDTH)}
        return {
            "norm1": norm(),
            "attention": {**heads, "out": out},
            "norm2": norm(),
            "up": linear(WIDTH, 4 * WIDTH),
            "down": linear(4 * WIDTH, WIDTH),
        }

    blocks: Any = [block() for _ in range(layers)]
    if stacked:
        blocks = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
    return {
        "embed": matrix(VOCABULARY, WIDTH),
        "position": matrix(LENGTH, WIDTH),
        "blocks": blocks,
        "norm": norm(),
        "head": linear(WIDTH, VOCABULARY),
    }


def raw_linear(p: Mapping, x: jax.Array) -> jax.Array:
    return x @ p["kernel"] + p["bias"]


def raw_norm(p: Mapping, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean))
    return (x - mean) * (jax.lax.rsqrt(variance + 1e-6) * p["scale"]) + p["bias"]


def raw_attention(p: Mapping, x: jax.Array) -> jax.Array:
    query, key, value = (
        jnp.einsum("bte,ehd->bthd", x, p[name]["kernel"]) + p[name]["bias"] for name in ("query", "key", "value")
    )
    weights = jnp.einsum("bqhd,bkhd->bhqk", query / jnp.sqrt(query.shape[-1]), key)
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, weights, jnp.finfo(weights.dtype).min))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return jnp.einsum("bthd,hde->bte", mixed, p["out"]["kernel"]) + p["out"]["bias"]


def raw_block(p: Mapping, x: jax.Array) -> jax.Array:
    x = x + raw_attention(p["attention"], raw_norm(p["norm1"], x))
    return x + raw_linear(p["down"], jax.nn.gelu(raw_linear(p["up"], raw_norm(p["norm2"], x))))


raw_remat_block = jax.checkpoint(raw_block)


def raw_forward(p: Mapping, x: Tokens, how: str) -> jax.Array:
    h = p["embed"][x] + p["position"]
    if how == SCANNED:
        h, _ = jax.lax.scan(lambda h, block: (raw_block(block, h), None), h, p["blocks"])
    else:
        for block in p["blocks"]:
            h = raw_remat_block(block, h) if how == REMAT else raw_block(block, h)
    return raw_linear(p["head"], raw_norm(p["norm"], h))


def raw(layers: int, how: str) -> Callable[[], object]:
    parameters = raw_parameters(layers, how == SCANNED)
    moments, x = ADAM.init(parameters), tokens()

    def lower() -> object:
        def step(parameters: Any, moments: Any, x: Tokens) -> tuple:
            def loss(p: Any) -> jax.Array:
                return loss_of(raw_forward(p, x, how), x)

            value, gradients = jax.value_and_grad(loss)(parameters)
            updates, moments = ADAM.update(gradients, moments)
            return value, optax.apply_updates(parameters, updates), moments

        return jax.jit(step).lower(parameters, moments, x)

    return lower


# --- nnxlib and flax ----------------------------------------------------------------------------------------------


def by_modules(library: str, layers: int, how: str) -> Callable[[], object]:
    nnx: ModuleType = importlib.import_module(library)

    class Block(nnx.Module):
        def __init__(self, *, rngs: Any) -> None:
            self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nnx.make_causal_mask(x[..., 0])
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

        if how == REMAT:
            __call__ = nnx.remat(__call__)

    class Transformer(nnx.Module):
        def __init__(self, *, rngs: Any) -> None:
            self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.position = nnx.Param(jnp.full((LENGTH, WIDTH), 0.02))
            if how == SCANNED:
                make = nnx.vmap(lambda rngs: Block(rngs=rngs), in_axes=0, out_axes=0)
                self.blocks = make(rngs.split(layers))
            else:
                self.blocks = nnx.List([Block(rngs=rngs) for _ in range(layers)])
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

        def __call__(self, x: Tokens) -> jax.Array:
            h = self.embed(x) + self.position[...]
            if how == SCANNED:
                h = nnx.scan(lambda h, block: block(h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(h, self.blocks)
            else:
                for block in self.blocks:
                    h = block(h)
            return self.head(self.norm(h))

    model = Transformer(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    x = tokens()

    def lower() -> object:
        def step(model: Any, optimizer: Any, x: Tokens) -> jax.Array:
            value, gradients = nnx.value_and_grad(lambda model: loss_of(model(x), x))(model)
            optimizer.update(model, gradients)
            return value

        return nnx.jit(step).lower(model, optimizer, x)

    return lower


BASELINE = "raw JAX over dicts"
ADAPTERS: Mapping[str, Callable[[int, str], Callable[[], object]]] = {
    BASELINE: raw,
    "nnxlib": partial(by_modules, "nnxlib"),
    "flax": partial(by_modules, "flax.nnx"),
}


def seconds(lower: Callable[[], object]) -> float:
    """Return the time of one trace and lowering that starts with empty caches."""
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    lower()
    return time.perf_counter() - start


def run(cases: list[tuple[int, str]], rounds: int) -> Report:
    """Measure all cases in turns and put the medians in tables."""
    columns = [f"{layers} layers{how}" for layers, how in cases]
    ratios = Table("Tracing and lowering a training step: ratio to raw JAX (medians)", columns, list(ADAPTERS))
    times = Table("Tracing and lowering a training step: milliseconds (median)", columns, list(ADAPTERS))
    remarks = []
    for case, column in zip(cases, columns, strict=True):
        calls = {}
        for label, make in ADAPTERS.items():
            try:
                calls[label] = make(*case)
                calls[label]()
            except ModuleNotFoundError:
                remarks.append(f"Not installed: {label}.")
        gc.disable()
        samples: dict[str, list[float]] = {label: [] for label in calls}
        for _ in range(rounds):
            for label, lower in calls.items():
                samples[label].append(seconds(lower))
        gc.enable()
        base = samples[BASELINE]
        ratios.add(column, {label: f"{ratio_of_rounds(own, base):.2f}" for label, own in samples.items()})
        times.add(column, {label: f"{1e3 * statistics.median(own):,.0f}" for label, own in samples.items()})
    return Report([ratios, times], sorted(set(remarks)))


if __name__ == "__main__":
    main(
        lambda options: run(QUICK_CASES, 3) if options.quick else run(CASES, 11),
        description=str(__doc__).splitlines()[0],
        packages=["jax", "jaxlib", "nnxlib", "flax", "optax", "numpy"],
    )
