"""What eager use costs beside the same JAX calls on dicts: forwards, gradients, shapes, and making a model.

The idea: whoever debugs a model, or explores one in a notebook, calls it without `jax.jit`. The least that this can
cost is what the operations themselves take when they are called on bare arrays; so each row is a multiple of a program
in raw JAX that computes the same numbers from the same parameters, in dicts.

The data: a `Work` makes the four contenders of one row: raw JAX, nnxlib, flax.nnx, Equinox. For Equinox the layers are
written out, as its users do, with the same operations as raw JAX.

    python -m benchmarks.eager [--quick] [--results FOLDER]

With XLA_FLAGS=--xla_force_host_platform_device_count=8 the row `sharded construction` has eight devices.
"""

import contextlib
import dataclasses
import functools
import importlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .timing import QUICK, Call, Effort, Measurement, Report, Table, agree, main, measure

WIDTH, LAYERS, HEADS = 16, 4, 2
CONVOLUTIONS = [(3, 8), (16, 32)]  # features in, out; with windows of 3 by 3
BASE, OURS, THEIRS, EQUINOX = "raw JAX", "nnxlib", "flax.nnx", "equinox"
CONTENDERS: Sequence[str] = (BASE, OURS, THEIRS, EQUINOX)
FIRST = "first construction"
Params = Any  # nested dicts of arrays

# --- raw JAX --------------------------------------------------------------------------------------------------------


def mlp(params: Params, x: jax.Array) -> jax.Array:
    *hidden, last = params["layers"]
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


def attention(params: Params, x: jax.Array) -> jax.Array:
    """Self-attention with `HEADS` heads; x is [batch, time, features]."""
    q, k, v = (jnp.tensordot(x, params[n]["kernel"], 1) + params[n]["bias"] for n in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q / jnp.sqrt(q.shape[-1]), k)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return jnp.tensordot(mixed, params["out"]["kernel"], 2) + params["out"]["bias"]


def make_mlp(seed: int = 0) -> Params:
    """The parameters of the MLP by raw calls of initializers, with the keys that nnxlib draws."""
    key, layers = jax.random.key(seed), []
    init, zeros = jax.nn.initializers.lecun_normal(), jax.nn.initializers.zeros
    for i in range(LAYERS):
        kernel = init(jax.random.fold_in(key, 2 * i), (WIDTH, WIDTH), jnp.float32)
        bias = zeros(jax.random.fold_in(key, 2 * i + 1), (WIDTH,), jnp.float32)
        layers.append({"kernel": kernel, "bias": bias})
    return {"layers": layers}


def make_convolutions() -> Params:
    """The same for convolutions."""
    key, layers = jax.random.key(0), []
    init, zeros = jax.nn.initializers.lecun_normal(), jax.nn.initializers.zeros
    for i, (inputs, outputs) in enumerate(CONVOLUTIONS):
        kernel = init(jax.random.fold_in(key, 2 * i), (3, 3, inputs, outputs), jnp.float32)
        layers.append({"kernel": kernel, "bias": zeros(jax.random.fold_in(key, 2 * i + 1), (outputs,), jnp.float32)})
    return {"layers": layers}


def loss_of(forward: Callable) -> Callable:
    return lambda model, x: (forward(model, x) ** 2).mean()


def call_it(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


# --- the libraries --------------------------------------------------------------------------------------------------


class Graph:
    """nnxlib and flax.nnx, which share one programming interface."""

    def __init__(self, nnx: ModuleType) -> None:
        self.nnx = nnx

        class MLP(nnx.Module):
            def __init__(self, rngs: Any, **options: Any) -> None:
                self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs, **options) for _ in range(LAYERS)])

            def __call__(self, x: jax.Array) -> jax.Array:
                *hidden, last = self.layers
                for layer in hidden:
                    x = nnx.relu(layer(x))
                return last(x)

        class Attention(nnx.Module):
            def __init__(self, rngs: Any) -> None:
                self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)

            def __call__(self, x: jax.Array) -> jax.Array:
                return self.attention(x)

        class Convolutions(nnx.Module):
            def __init__(self, rngs: Any) -> None:
                self.layers = nnx.List([nnx.Conv(*sizes, (3, 3), rngs=rngs) for sizes in CONVOLUTIONS])

        self.mlp, self.attention, self.convolutions = MLP, Attention, Convolutions

    def grad(self, loss: Callable, model: Any, x: jax.Array) -> jax.Array:
        return self.nnx.grad(loss)(model, x).layers[0].kernel[...]

    def first(self, model: Any) -> Any:
        return model.layers[0].kernel[...]

    def jit(self, make: Callable) -> Any:
        return self.nnx.jit(make)()

    def make(self) -> Any:
        return self.mlp(self.nnx.Rngs(0))

    def make_convolutions(self) -> Any:
        return self.convolutions(self.nnx.Rngs(0))

    def make_sharded(self) -> Any:
        init = self.nnx.with_partitioning(self.nnx.initializers.lecun_normal(), (None, "model"))
        return self.mlp(self.nnx.Rngs(0), kernel_init=init)


class Tree:
    """Equinox: Modules that are pytrees, made of the parameters of raw JAX."""

    def __init__(self, eqx: ModuleType) -> None:
        self.eqx = eqx

        class Dense(eqx.Module):
            kernel: jax.Array
            bias: jax.Array

            def __call__(self, x: jax.Array, axes: int = 1) -> jax.Array:
                return jnp.tensordot(x, self.kernel, axes) + self.bias

        class Linear(Dense):
            def __call__(self, x: jax.Array) -> jax.Array:
                return x @ self.kernel + self.bias

        class MLP(eqx.Module):
            layers: list

            def __call__(self, x: jax.Array) -> jax.Array:
                *hidden, last = self.layers
                for layer in hidden:
                    x = jax.nn.relu(layer(x))
                return last(x)

        class Attention(eqx.Module):
            query: Dense
            key: Dense
            value: Dense
            out: Dense

            def __call__(self, x: jax.Array) -> jax.Array:
                q, k, v = self.query(x), self.key(x), self.value(x)
                scores = jnp.einsum("bqhd,bkhd->bhqk", q / jnp.sqrt(q.shape[-1]), k)
                return self.out(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v), 2)

        self.mlp = lambda params: MLP([Linear(**layer) for layer in params["layers"]])
        self.attention = lambda params: Attention(**{name: Dense(**layer) for name, layer in params.items()})

    def grad(self, loss: Callable, model: Any, x: jax.Array) -> jax.Array:
        return self.eqx.filter_grad(loss)(model, x).layers[0].kernel

    def first(self, model: Any) -> Any:
        return model.layers[0].kernel

    def jit(self, make: Callable) -> Any:
        return self.eqx.filter_jit(make)()

    def make(self) -> Any:
        return self.mlp(make_mlp())

    def make_convolutions(self) -> Any:
        return self.mlp(make_convolutions())

    def make_sharded(self) -> Any:
        return self.mlp(jax.tree.map(_sharded, make_mlp()))


def _sharded(x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(None, "model")) if x.ndim == 2 else x


def parameters_of(model: Any, names: Sequence[str]) -> Params:
    """The parameters of a model of nnxlib."""
    layers = {n: getattr(model, n) for n in names}
    return {n: {"kernel": layer.kernel[...], "bias": layer.bias[...]} for n, layer in layers.items()}


# --- the work -------------------------------------------------------------------------------------------------------

Group = Mapping[str, Call]


def forward_of_mlp(libraries: Mapping[str, Any]) -> Group:
    x = jnp.ones((2, WIDTH))
    return {BASE: functools.partial(mlp, make_mlp(), x)} | {
        label: functools.partial(library.make(), x) for label, library in libraries.items()
    }


def forward_of_attention(libraries: Mapping[str, Any]) -> Group:
    x = jnp.ones((2, 3, WIDTH)) * jnp.arange(3.0)[:, None]
    ours = libraries[OURS].attention(libraries[OURS].nnx.Rngs(0))
    params = parameters_of(ours.attention, ("query", "key", "value", "out"))
    group: dict[str, Call] = {BASE: functools.partial(attention, params, x)}
    for label, library in libraries.items():
        model = library.attention(params if label == EQUINOX else library.nnx.Rngs(0))
        group[label] = functools.partial(model, x)
    return group


def gradient(libraries: Mapping[str, Any]) -> Group:
    x, params = jnp.ones((2, WIDTH)), make_mlp()
    group: dict[str, Call] = {BASE: lambda: jax.grad(loss_of(mlp))(params, x)["layers"][0]["kernel"]}
    for label, library in libraries.items():
        group[label] = functools.partial(library.grad, loss_of(call_it), library.make(), x)
    return group


def _shapes(eval_shape: Callable, forward: Callable, model: Any, fresh: bool) -> Call:
    x, done = jnp.ones((2, WIDTH)), jnp.ones(())

    def call() -> jax.Array:
        function = (lambda model, x: forward(model, x)) if fresh else forward  # JAX keeps traces by function
        assert eval_shape(function, model, x).shape == x.shape
        return done

    return call


def shapes(libraries: Mapping[str, Any], fresh: bool) -> Group:
    group = {BASE: _shapes(jax.eval_shape, mlp, make_mlp(), fresh)}
    for label, library in libraries.items():
        eval_shape = library.eqx.filter_eval_shape if label == EQUINOX else library.nnx.eval_shape
        group[label] = _shapes(eval_shape, call_it, library.make(), fresh)
    return group


def construction(libraries: Mapping[str, Any]) -> Group:
    group: dict[str, Call] = {BASE: lambda: make_mlp()["layers"][0]["kernel"]}
    for label, library in libraries.items():
        group[label] = functools.partial(_made, library)
    return group


def _made(library: Any) -> jax.Array:
    return library.first(library.make())


def first_construction(libraries: Mapping[str, Any]) -> Group:
    """Two convolutions, where nothing has been compiled: as the first model that a program makes."""

    def first(make: Callable, of: Callable = lambda made: made.layers[0].kernel[...]) -> Call:
        def call() -> jax.Array:
            jax.clear_caches()
            return of(make())

        return call

    group = {BASE: first(make_convolutions, lambda params: params["layers"][0]["kernel"])}
    return group | {label: first(library.make_convolutions) for label, library in libraries.items()}


def jitted_construction(libraries: Mapping[str, Any]) -> Group:
    """Each call compiles anew, as the one call in a program does."""
    group: dict[str, Call] = {BASE: lambda: jax.jit(lambda: make_mlp())()["layers"][0]["kernel"]}
    for label, library in libraries.items():
        group[label] = functools.partial(_jitted, library, library.make)
    return group


def _jitted(library: Any, make: Callable) -> jax.Array:
    return library.first(library.jit(lambda: make()))


def abstract_construction(libraries: Mapping[str, Any]) -> Group:
    done = jnp.ones(())

    def call(eval_shape: Callable, make: Callable) -> jax.Array:
        eval_shape(lambda: make())
        return done

    group: dict[str, Call] = {BASE: functools.partial(call, jax.eval_shape, make_mlp)}
    for label, library in libraries.items():
        eval_shape = library.eqx.filter_eval_shape if label == EQUINOX else library.nnx.eval_shape
        group[label] = functools.partial(call, eval_shape, library.make)
    return group


def sharded_construction(libraries: Mapping[str, Any]) -> Group:
    """Kernels that are sharded by columns over all devices, in one jitted call."""
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())

    def in_mesh(call: Call) -> Call:
        def within() -> jax.Array:
            with jax.set_mesh(mesh):
                return jax.device_put(call(), whole)

        return within

    def raw() -> jax.Array:
        return jax.jit(lambda: jax.tree.map(_sharded, make_mlp()))()["layers"][0]["kernel"]

    group = {BASE: in_mesh(raw)}
    for label, library in libraries.items():
        group[label] = in_mesh(functools.partial(_jitted, library, library.make_sharded))
    return group


WORK: Mapping[str, Callable[[Mapping[str, Any]], Group]] = {
    "forward, MLP": forward_of_mlp,
    "forward, attention": forward_of_attention,
    "grad of the MLP": gradient,
    "eval_shape, a new function": functools.partial(shapes, fresh=True),
    "eval_shape, the same function": functools.partial(shapes, fresh=False),
    "construction": construction,
    "abstract construction": abstract_construction,
    "jitted construction": jitted_construction,
    "sharded construction": sharded_construction,
    FIRST: first_construction,
}


# --- the comparison -------------------------------------------------------------------------------------------------


def load() -> dict[str, Any]:
    """The libraries that are installed."""
    found: dict[str, Any] = {}
    for name in (OURS, THEIRS, EQUINOX):
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = (Tree if name == EQUINOX else Graph)(importlib.import_module(name))
    return found


def run(effort: Effort, names: Sequence[str] = tuple(WORK)) -> Report:
    """Measure each kind of work and put the results in tables."""
    libraries = load()
    measured: dict[str, dict[str, Measurement]] = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        group = WORK[name](libraries)
        agree(group)
        few = dataclasses.replace(effort, rounds=min(5, effort.rounds))
        measured[name] = measure(group, few if name == FIRST else effort)  # it takes seconds
    times = Table("Time, ratio to raw JAX (medians)", CONTENDERS, names)
    calls = Table("Python and C functions called", CONTENDERS, names)
    for label in CONTENDERS:
        found = {name: (group[label], group[BASE]) for name, group in measured.items() if label in group}
        times.add(label, {name: _time(label, own, base) for name, (own, base) in found.items()})
        calls.add(label, {name: f"{own.calls:,}" for name, (own, _) in found.items()})
    spread = statistics.median(m.spread for group in measured.values() for m in group.values())
    missing = [name for name in (THEIRS, EQUINOX) if name not in libraries]
    remarks = [f"Interquartile range of a cell's samples: {spread:.0%} of their median, typically."]
    return Report([times, calls], remarks + [f"Not installed: {name}." for name in missing])


def _time(label: str, own: Measurement, base: Measurement) -> str:
    return f"{own.seconds * 1e6:,.0f} us" if label == BASE else f"{own.over(base):.2f}"


if __name__ == "__main__":
    main(
        lambda options: run(QUICK) if options.quick else run(Effort()),
        description=str(__doc__).splitlines()[0],
        packages=["jax", "jaxlib", "nnxlib", "flax", "equinox", "numpy"],
    )
