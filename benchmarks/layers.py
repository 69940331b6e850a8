"""What the layers cost in Python, beside flax.nnx: to call, to trace, and to construct.

The idea: inputs and parameters are of a few numbers, so the time of a call is that of the Python around it and of the
operations it dispatches. Three kinds of work for each layer, the same in both libraries:

- `call`: call the layer eagerly;
- `trace`: trace a function that calls the layer `REPEATS` times, as `jax.jit` does before it compiles; what it takes to
  get the layer into the trace is paid once, and divided by as many;
- `construct`: make the layer, with an `Rngs` of its own.

The data: a `Row` says how to make a layer in either library, on what to call it, and how. The last rows are models.

    python -m benchmarks.layers [--quick] [--results FOLDER]
"""

import contextlib
import importlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .timing import QUICK, Call, Effort, Measurement, Report, Table, agree, main, measure

REPEATS = 8
WIDTH = 4
OURS, THEIRS = "nnxlib", "flax.nnx"


class Row(NamedTuple):
    """How to make a layer with the names of a library, the shape of an input of ones, and how to call it."""

    make: Callable[[Any, Any], Any]
    shape: tuple[int, ...] = (2, WIDTH)
    call: Callable[[Any, jax.Array], jax.Array] = lambda layer, x: layer(x)
    dtype: Any = jnp.float32


class _Pool:
    """A pooling function as a layer without state."""

    def __init__(self, pool: Callable) -> None:
        self.pool = pool

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.pool(x, (2, 2))


def attend_to_itself(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x, decode=False)


def step(cell: Any, x: jax.Array) -> jax.Array:
    """One step of a cell, with the input as the carry."""
    return cell(x, x)[1]


def step_of_lstm(cell: Any, x: jax.Array) -> jax.Array:
    return cell((x, x), x)[1]


def attention(nnx: Any, rngs: Any, width: int) -> Any:
    return nnx.MultiHeadAttention(2, width, rngs=rngs)


IMAGE = (1, 4, 4, WIDTH)
SEQUENCE = (2, 3, WIDTH)

LAYERS: Mapping[str, Row] = {
    "Linear": Row(lambda nnx, rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs)),
    "LinearGeneral": Row(lambda nnx, rngs: nnx.LinearGeneral((WIDTH,), (2, 2), rngs=rngs)),
    "Einsum": Row(lambda nnx, rngs: nnx.Einsum("na,ab->nb", (WIDTH, WIDTH), (WIDTH,), rngs=rngs)),
    "Embed": Row(lambda nnx, rngs: nnx.Embed(8, WIDTH, rngs=rngs), (2,), dtype=jnp.int32),
    "Conv": Row(lambda nnx, rngs: nnx.Conv(WIDTH, WIDTH, (3, 3), rngs=rngs), IMAGE),
    "ConvTranspose": Row(lambda nnx, rngs: nnx.ConvTranspose(WIDTH, WIDTH, (3, 3), rngs=rngs), IMAGE),
    "BatchNorm, training": Row(lambda nnx, rngs: nnx.BatchNorm(WIDTH, rngs=rngs)),
    "BatchNorm, evaluation": Row(lambda nnx, rngs: nnx.BatchNorm(WIDTH, use_running_average=True, rngs=rngs)),
    "LayerNorm": Row(lambda nnx, rngs: nnx.LayerNorm(WIDTH, rngs=rngs)),
    "RMSNorm": Row(lambda nnx, rngs: nnx.RMSNorm(WIDTH, rngs=rngs)),
    "GroupNorm": Row(lambda nnx, rngs: nnx.GroupNorm(WIDTH, 2, rngs=rngs), IMAGE),
    "InstanceNorm": Row(lambda nnx, rngs: nnx.InstanceNorm(WIDTH, rngs=rngs), IMAGE),
    "SpectralNorm(Linear)": Row(lambda nnx, rngs: nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)),
    "WeightNorm(Linear)": Row(lambda nnx, rngs: nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)),
    "Dropout": Row(lambda nnx, rngs: nnx.Dropout(0.5, rngs=rngs)),
    "PReLU": Row(lambda nnx, rngs: nnx.PReLU()),
    "MultiHeadAttention": Row(lambda nnx, rngs: attention(nnx, rngs, WIDTH), SEQUENCE, attend_to_itself),
    "SimpleCell": Row(lambda nnx, rngs: nnx.SimpleCell(WIDTH, WIDTH, rngs=rngs), call=step),
    "LSTMCell": Row(lambda nnx, rngs: nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs), call=step_of_lstm),
    "OptimizedLSTMCell": Row(lambda nnx, rngs: nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs), call=step_of_lstm),
    "GRUCell": Row(lambda nnx, rngs: nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), call=step),
    "RNN(GRUCell)": Row(lambda nnx, rngs: nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)), SEQUENCE),
    "LoRA": Row(lambda nnx, rngs: nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)),
    "LoRALinear": Row(lambda nnx, rngs: nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)),
    "Sequential(Linear, relu, Linear)": Row(
        lambda nnx, rngs: nnx.Sequential(
            nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.relu, nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        )
    ),
    "avg_pool": Row(lambda nnx, rngs: _Pool(nnx.avg_pool), IMAGE),
    "max_pool": Row(lambda nnx, rngs: _Pool(nnx.max_pool), IMAGE),
}


def transformer(nnx: Any, rngs: Any, layers: int) -> Any:
    """Return a pre-norm decoder: an embedding, blocks of attention and a two-layer perceptron, and an output layer."""

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
            self.attention = attention(nnx, rngs, WIDTH)
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            x = x + self.attention(self.norms[0](x), mask=mask, decode=False)
            return x + self.down(nnx.gelu(self.up(self.norms[1](x))))

    class Transformer(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(8, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block() for _ in range(layers)])
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, 8, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            mask = nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    return Transformer()


def convolutional(nnx: Any, rngs: Any, layers: int) -> Any:
    """Return a chain of convolutions, each with BatchNorm."""
    blocks = [
        (nnx.Conv(WIDTH, WIDTH, (3, 3), rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs), nnx.relu) for _ in range(layers)
    ]
    return nnx.Sequential(*[part for block in blocks for part in block])


MODELS: Mapping[str, Row] = {
    "transformer, 12 layers": Row(lambda nnx, rngs: transformer(nnx, rngs, 12), (2, 3), dtype=jnp.int32),
    "Conv and BatchNorm, 16 times": Row(lambda nnx, rngs: convolutional(nnx, rngs, 16), IMAGE),
}

# --- the three kinds of work --------------------------------------------------------------------------------------


def construct(nnx: ModuleType, row: Row) -> Call:
    def work() -> jax.Array:
        layer = row.make(nnx, nnx.Rngs(0))
        leaves = () if isinstance(layer, _Pool) else jax.tree.leaves(nnx.state(layer, nnx.Param))
        return leaves[0] if leaves else x

    x = jnp.ones(())
    return work


def call(nnx: ModuleType, row: Row) -> Call:
    layer, x = row.make(nnx, nnx.Rngs(0)), jnp.ones(row.shape, row.dtype)
    return lambda: row.call(layer, x)


def trace(nnx: ModuleType, row: Row) -> Call:
    layer, x = row.make(nnx, nnx.Rngs(0)), jnp.ones(row.shape, row.dtype)
    done = jnp.ones(())
    graphdef, state = (None, None) if isinstance(layer, _Pool) else nnx.split(layer)

    def work() -> jax.Array:
        def repeated(state: Any, x: jax.Array) -> list[jax.Array]:  # a new function: JAX keeps traces by function
            own = layer if graphdef is None else nnx.merge(graphdef, state)
            return [row.call(own, x) for _ in range(REPEATS)]

        jax.eval_shape(repeated, state, x)
        return done

    return work


WORK: Mapping[str, tuple[Callable[[ModuleType, Row], Call], int]] = {
    "call": (call, 1),
    "trace": (trace, REPEATS),
    "construct": (construct, 1),
}

# --- the comparison -----------------------------------------------------------------------------------------------

MEASURED: Mapping[str, Callable[[Measurement, Measurement | None, int], str]] = {
    "Time, ratio of nnxlib to flax.nnx (medians)": lambda own, other, n: (
        "-" if other is None else f"{own.over(other):.2f}"
    ),
    "Microseconds, nnxlib / flax.nnx (medians)": lambda own, other, n: _pair(own, other, lambda m: m.seconds * 1e6 / n),
    "Python and C functions called, nnxlib / flax.nnx": lambda own, other, n: _pair(own, other, lambda m: m.calls / n),
}


def _pair(own: Measurement, other: Measurement | None, of: Callable[[Measurement], float]) -> str:
    return " / ".join("-" if m is None else f"{of(m):,.0f}" for m in (own, other))


def load() -> dict[str, ModuleType]:
    """Return the libraries that are installed, nnxlib first."""
    found = {OURS: importlib.import_module(OURS)}
    with contextlib.suppress(ModuleNotFoundError):
        found[THEIRS] = importlib.import_module(THEIRS)
    return found


def run(rows: Mapping[str, Row], effort: Effort) -> Report:
    """Measure each kind of work on each row and put the results in tables."""
    libraries = load()
    cells: dict[str, dict[str, dict[str, str]]] = {title: {kind: {} for kind in WORK} for title in MEASURED}
    spreads: list[float] = []
    for label, row in rows.items():
        print(f"{label} ...", file=sys.stderr, flush=True)
        for kind, (prepare, repeats) in WORK.items():
            group = {name: prepare(library, row) for name, library in libraries.items()}
            agree(group)
            found = measure(group, effort)
            spreads += [measurement.spread for measurement in found.values()]
            for title, show in MEASURED.items():
                cells[title][kind][label] = show(found[OURS], found.get(THEIRS), repeats)
    tables = [Table(title, list(WORK), list(rows), dict(columns)) for title, columns in cells.items()]
    remarks = [f"Interquartile range of a cell's samples: {statistics.median(spreads):.0%} of their median, typically."]
    return Report(tables, remarks + ([] if THEIRS in libraries else [f"Not installed: {THEIRS}."]))


QUICK_ROWS: Sequence[str] = ("Linear", "LayerNorm", "Dropout", "GRUCell")


if __name__ == "__main__":
    main(
        lambda options: (
            run({name: LAYERS[name] for name in QUICK_ROWS}, QUICK)
            if options.quick
            else run({**LAYERS, **MODELS}, Effort())
        ),
        description=str(__doc__).splitlines()[0],
        packages=["jax", "jaxlib", "nnxlib", "flax", "numpy"],
    )
