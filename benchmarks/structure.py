"""What it costs to take a model apart and to put it together, beside `jax.tree` on a dict of the same arrays.

The idea: `jax.tree.flatten` and `jax.tree.unflatten` of nested dicts run in C++, and a library of models cannot visit
its arrays much faster. So each operation on a model of `n` Variables is given as a multiple of both together, on dicts
nested in the same way; flattening, of that alone.

The data: `operations` gives for each operation a call by contender. The model is a list of layers, each with two arrays
of four numbers and two static attributes; or a transformer of each library's own layers, which have many classes, many
static attributes, and random streams (in Equinox arrays like those of a stream).

    python -m benchmarks.structure [--quick] [--results FOLDER]
"""

import collections
import contextlib
import gc
import importlib
import statistics
import sys
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .timing import QUICK, Call, Effort, Measurement, Prepared, Report, Table, agree, main, measure

SIZES: Sequence[int] = (100, 1000, 5000)
BLOCKS, QUICK_BLOCKS = 24, 2
BASE, OURS, THEIRS, EQUINOX = "jax.tree", "nnxlib", "flax.nnx", "equinox"
CONTENDERS: Sequence[str] = (BASE, OURS, THEIRS, EQUINOX)

# --- the models -----------------------------------------------------------------------------------------------------


def arrays(layers: int) -> dict[str, Any]:
    return {"layers": {i: {"bias": jnp.zeros(4), "kernel": jnp.ones(4)} for i in range(layers)}}


def of_nnx(nnx: ModuleType, layers: int) -> Any:
    """A model of nnxlib or flax.nnx."""

    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.kernel, self.bias = nnx.Param(jnp.ones(4)), nnx.BatchStat(jnp.zeros(4))
            self.features, self.activation = 4, jax.nn.relu

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([Layer() for _ in range(layers)])

    return Net()


def of_equinox(eqx: ModuleType, layers: int) -> Any:
    class Layer(eqx.Module):
        bias: jax.Array
        kernel: jax.Array
        features: int = eqx.field(static=True)
        activation: Callable = eqx.field(static=True)

    class Net(eqx.Module):
        layers: list

    return Net([Layer(jnp.zeros(4), jnp.ones(4), 4, jax.nn.relu) for _ in range(layers)])


# The transformer. Each block holds an array of its own, for `of_state` and `of_model`.

WIDTH, HEADS = 16, 4


def transformer_arrays(layers: int) -> dict[str, Any]:
    def linear(rows: int, columns: int) -> dict[str, jax.Array]:
        return {"kernel": jnp.zeros((rows, columns)), "bias": jnp.zeros(columns)}

    def block() -> dict[str, Any]:
        return {
            "bias": jnp.zeros(4),
            "norm1": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
            "heads": {name: linear(WIDTH, WIDTH) for name in ("query", "key", "value", "out")},
            "norm2": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
            "up": linear(WIDTH, 4 * WIDTH),
            "down": linear(4 * WIDTH, WIDTH),
            "dropout": {"rngs": {"key": jax.random.key(0), "count": jnp.zeros((), jnp.uint32)}},
        }

    return {"layers": {i: block() for i in range(layers)}}


def transformer_of_nnx(nnx: ModuleType, layers: int) -> Any:
    rngs = nnx.Rngs(0)

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.bias = nnx.BatchStat(jnp.zeros(4))
            self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
            self.heads = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    class Transformer(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([Block() for _ in range(layers)])

    return Transformer()


def transformer_of_equinox(eqx: ModuleType, layers: int) -> Any:
    class Block(eqx.Module):
        bias: jax.Array
        norm1: Any
        heads: Any
        norm2: Any
        up: Any
        down: Any
        dropout: Any
        key: jax.Array
        count: jax.Array

        def __init__(self) -> None:
            self.bias, self.key, self.count = jnp.zeros(4), jax.random.key(0), jnp.zeros((), jnp.uint32)
            self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
            biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
            self.heads = eqx.nn.MultiheadAttention(HEADS, WIDTH, **biases, key=self.key)
            self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=self.key)
            self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=self.key)
            self.dropout = eqx.nn.Dropout(0.1)

    class Transformer(eqx.Module):
        layers: list

    return Transformer([Block() for _ in range(layers)])


class Model(NamedTuple):
    """How to make a model with a number of layers."""

    arrays: Callable[[int], dict[str, Any]]
    of_nnx: Callable[[ModuleType, int], Any]
    of_equinox: Callable[[ModuleType, int], Any]


PLAIN = Model(arrays, of_nnx, of_equinox)
TRANSFORMER = Model(transformer_arrays, transformer_of_nnx, transformer_of_equinox)


# --- the operations, as calls that return the bias of the first layer -----------------------------------------------


def of_state(state: Any) -> jax.Array:
    return state["layers"][0]["bias"][...]


def of_model(model: Any) -> jax.Array:
    return model.layers[0].bias[...]


def flatten(tree: Any) -> Call:
    return lambda: jax.tree.flatten(tree)[0][0]


def flatten_and_unflatten(tree: Any) -> Call:
    def call() -> jax.Array:
        leaves, treedef = jax.tree.flatten(tree)
        return of_state(treedef.unflatten(leaves))

    return call


def operations(libraries: Mapping[str, ModuleType], layers: int, model: Model = PLAIN) -> dict[str, dict[str, Call]]:
    """The operations on a model with so many layers, by name and contender."""
    tree = model.arrays(layers)
    found: dict[str, dict[str, Call]] = {name: {BASE: flatten_and_unflatten(tree)} for name in OPERATIONS}
    for name in ("flatten a State", "flatten a Module"):
        found[name][BASE] = flatten(tree)
    found["clone"][BASE] = lambda: of_state(jax.tree.map(lambda x: x.copy(), tree))
    for label, library in libraries.items():
        for name, call in (of_tree if label == EQUINOX else of_graph)(library, layers, model).items():
            found[name][label] = call
    return found


def of_graph(nnx: ModuleType, layers: int, kind: Model = PLAIN) -> dict[str, Call]:
    """The operations of nnxlib and flax.nnx, which share one programming interface."""
    model = kind.of_nnx(nnx, layers)
    graphdef, state = nnx.split(model)
    _, params, rest = nnx.split(model, nnx.Param, ...)
    halves = kind.of_nnx(nnx, layers - layers // 2), kind.of_nnx(nnx, layers // 2)
    stripped, seen = kind.of_nnx(nnx, layers), [nnx.Intermediate(jnp.zeros(4)) for _ in range(layers)]

    def update() -> jax.Array:
        nnx.update(model, state)
        return of_model(model)

    def see() -> None:
        for layer, variable in zip(stripped.layers, seen, strict=True):
            layer.seen = variable

    def pop() -> jax.Array:
        return nnx.pop(stripped, nnx.Intermediate)["layers"][0]["seen"][...]

    def visit() -> jax.Array:
        collections.deque(nnx.iter_graph(model), maxlen=0)
        return of_model(model)

    return {
        "split": lambda: of_state(nnx.split(model)[1]),
        "split into Params and the rest": lambda: of_state(nnx.split(model, nnx.Param, ...)[2]),
        "split two models of half the size": lambda: of_state(nnx.split(halves)[1][0]),
        "merge": lambda: of_model(nnx.merge(graphdef, state)),
        "merge of Params and the rest": lambda: of_model(nnx.merge(graphdef, params, rest)),
        "split, merge, state of the new model": lambda: of_state(nnx.state(nnx.merge(*nnx.split(model)))),
        "state": lambda: of_state(nnx.state(model)),
        "update": update,
        "clone": lambda: of_model(nnx.clone(model)),
        "pop a Variable of each layer": Prepared(pop, see),
        "iter_graph": visit,
        "list arrays with paths": lambda: jax.tree_util.tree_leaves_with_path(model)[0][1],
        "flatten a State": lambda: jax.tree.flatten(state)[0][0],
        "flatten a Module": lambda: jax.tree.flatten(model)[0][0],
    }


def of_tree(eqx: ModuleType, layers: int, kind: Model = PLAIN) -> dict[str, Call]:
    """What comes nearest in Equinox, where a model is a pytree."""
    model = kind.of_equinox(eqx, layers)
    params, static = eqx.partition(model, eqx.is_array)
    halves = kind.of_equinox(eqx, layers - layers // 2), kind.of_equinox(eqx, layers // 2)

    def round_trip() -> jax.Array:
        return of_model(eqx.filter(eqx.combine(*eqx.partition(model, eqx.is_array)), eqx.is_array))

    return {
        "split": lambda: of_model(eqx.partition(model, eqx.is_array)[0]),
        "split two models of half the size": lambda: of_model(eqx.partition(halves, eqx.is_array)[0][0]),
        "merge": lambda: of_model(eqx.combine(params, static)),
        "split, merge, state of the new model": round_trip,
        "state": lambda: of_model(eqx.filter(model, eqx.is_array)),
        "clone": lambda: of_model(jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, model)),
        "list arrays with paths": lambda: jax.tree_util.tree_leaves_with_path(model)[0][1],
        "flatten a Module": flatten(model),
    }


OPERATIONS: Sequence[str] = (
    "split",
    "split into Params and the rest",
    "split two models of half the size",
    "merge",
    "merge of Params and the rest",
    "split, merge, state of the new model",
    "state",
    "update",
    "clone",
    "pop a Variable of each layer",
    "iter_graph",
    "list arrays with paths",
    "flatten a State",
    "flatten a Module",
)


# --- memory ---------------------------------------------------------------------------------------------------------


def peak(act: Callable[[], Any]) -> int:
    """The most bytes of Python objects that a call holds at a time, after the first ones, at which nnxlib checks."""
    for _ in range(5):
        act()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        act()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def round_trips(libraries: Mapping[str, ModuleType], variables: int) -> dict[str, Callable[[], Any]]:
    """Take a model apart and make another one of the parts."""
    layers = variables // 2
    tree = arrays(layers)
    found: dict[str, Callable[[], Any]] = {BASE: lambda: jax.tree.map(lambda x: x, tree)}
    for label in (OURS, THEIRS):
        if label in libraries:
            nnx = libraries[label]
            model = of_nnx(nnx, layers)
            found[label] = lambda nnx=nnx, model=model: nnx.merge(*nnx.split(model))
    if EQUINOX in libraries:
        eqx = libraries[EQUINOX]
        module = of_equinox(eqx, layers)
        found[EQUINOX] = lambda: eqx.combine(*eqx.partition(module, eqx.is_array))
    return found


# --- the comparison -------------------------------------------------------------------------------------------------


def load() -> dict[str, ModuleType]:
    """The libraries that are installed."""
    found = {}
    for name in (OURS, THEIRS, EQUINOX):
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = importlib.import_module(name)
    return found


def run(sizes: Sequence[int], blocks: int, effort: Effort, names: Sequence[str] = OPERATIONS) -> Report:
    """Measure each operation at each size, and on a transformer, and put the results in tables."""
    libraries = load()
    tables, spreads = [], []
    in_a_block = len(jax.tree.leaves(transformer_arrays(1)))
    models = [(f"{size:,} Variables", size, size // 2, PLAIN) for size in sizes]
    transformer = f"{in_a_block * blocks} Variables of a transformer"
    for title, size, layers, model in [*models, (transformer, in_a_block * blocks, blocks, TRANSFORMER)]:
        times = Table(f"Time with {title}, ratio to jax.tree (medians)", CONTENDERS, names)
        calls = Table(f"Functions called for each of {title}", CONTENDERS, names)
        groups = operations(libraries, layers, model)
        measured: dict[str, dict[str, Measurement]] = {}
        for name in names:
            print(f"{name}, {title} ...", file=sys.stderr, flush=True)
            agree(groups[name])
            measured[name] = measure(groups[name], effort)
            spreads += [found.spread for found in measured[name].values()]
        for label in CONTENDERS:
            found = {name: group[label] for name, group in measured.items() if label in group}
            base = {name: measured[name][BASE] for name in found}
            times.add(label, {n: _time(label, m, base[n]) for n, m in found.items()})
            calls.add(label, {n: f"{m.calls / size:.1f}" for n, m in found.items()})
        tables += [times, calls]
    memory = Table(
        "Peak memory of split and merge, bytes for each Variable", [f"{size:,}" for size in sizes], CONTENDERS
    )
    for size in sizes:
        peaks = {label: peak(act) / size for label, act in round_trips(libraries, size).items()}
        memory.add(f"{size:,}", {label: f"{value:,.0f}" for label, value in peaks.items()})
    missing = [name for name in (THEIRS, EQUINOX) if name not in libraries]
    remarks = [
        "jax.tree: microseconds of flatten and unflatten; of flatten alone in the rows that flatten; of a copy of each "
        "array in the row clone.",
        f"Interquartile range of a cell's samples: {statistics.median(spreads):.0%} of their median, typically.",
    ]
    return Report([*tables, memory], remarks + [f"Not installed: {name}." for name in missing])


def _time(label: str, own: Measurement, base: Measurement) -> str:
    return f"{own.seconds * 1e6:,.0f} us" if label == BASE else f"{own.over(base):.1f}"


if __name__ == "__main__":
    main(
        lambda options: run(SIZES[:1], QUICK_BLOCKS, QUICK) if options.quick else run(options.sizes, BLOCKS, Effort()),
        description=str(__doc__).splitlines()[0],
        packages=["jax", "jaxlib", "nnxlib", "flax", "equinox", "numpy"],
        sizes=SIZES,
    )
