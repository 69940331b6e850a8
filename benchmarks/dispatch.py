"""What a jitted step costs beyond raw `jax.jit`, by library and by number of Variables.

The idea: with arrays of four numbers there is nothing to compute, so the time of a step is the time it takes to hand
the model to XLA and to take it back. Two kinds of step, the same in every library:

- `read`: add up all Variables, change nothing;
- `update`: add up all Variables, then change each of them; also with the arrays that go in donated.

A third, `train`, is one Adam step of a deep narrow MLP with dropout, and normalisation by running statistics. It takes
long to compile, so `benchmarks.train` measures it.

The data: an `Adapter` per library and form of use makes a `Call` for each kind of step and size. The baseline is
`jax.jit` over a flat list of arrays, the least that JAX can charge. flax.nnx and nnxlib share one adapter, for they
share one programming interface.

    python -m benchmarks.dispatch [--quick] [--results FOLDER]
"""

import importlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from .timing import (
    QUICK,
    Call,
    Effort,
    Measurement,
    Report,
    Table,
    agree,
    collector_seconds,
    in_new_process,
    main,
    measure,
)

Case = tuple[str, int]  # kind of step, number of Variables
SIZES = (10, 100, 1000, 5000)
READ_AND_UPDATE = ("read", "update", "update, donated")
QUICK_CASES: Sequence[Case] = [("read", 10), ("update", 10), ("read", 100), ("update", 100)]
WATCHED: Sequence[Case] = [("update", 1000)]  # where the garbage collector is watched as well
# On a busy machine raw JAX beside itself, updating 1,000, was 0.86 to 1.42 in ten rounds, 0.96 to 1.18 in twenty, and
# 1.01 to 1.05 in forty.
THOROUGH = Effort(rounds=30)
WIDTH = 4
LEARNING_RATE = 1e-3
DROPPED = 0.1


def cases(kinds: Sequence[str], sizes: Sequence[int]) -> Sequence[Case]:
    """Each kind of step at each size."""
    return [(kind, size) for kind in kinds for size in sizes]


class NotOffered(Exception):
    """The library, used in this way, has no such step."""


class Adapter(Protocol):
    """One way to use one library: a method per kind of step builds a model of that size and returns a jitted call.

    If `donated`, the arrays that the step replaces are donated.
    """

    def read(self, variables: int) -> Call: ...
    def update(self, variables: int, donated: bool = False) -> Call: ...
    def train(self, variables: int, donated: bool = False) -> Call: ...


KINDS: Mapping[str, Callable[[Adapter, int], Call]] = {
    "read": lambda adapter, variables: adapter.read(variables),
    "update": lambda adapter, variables: adapter.update(variables),
    "update, donated": lambda adapter, variables: adapter.update(variables, donated=True),
    "train": lambda adapter, variables: adapter.train(variables),
    "train, donated": lambda adapter, variables: adapter.train(variables, donated=True),
}


# --- the work, shared by all ----------------------------------------------------------------------


def changed(value: Any) -> jax.Array:
    """Return another value, in such a way that repeating it neither grows nor shrinks."""
    return 1 - value


def block(x: jax.Array, kernel: Any, bias: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a normalised layer's output, and the mean and variance that it saw."""
    hidden = x @ kernel
    mean, variance = hidden.mean(0), hidden.var(0)
    return jnp.tanh((hidden - mean) * jax.lax.rsqrt(variance + 1e-5) + bias), mean, variance


def moved(running: Any, seen: jax.Array) -> jax.Array:
    """Return a running statistic moved towards what was seen."""
    return 0.9 * running + 0.1 * seen


def layers_for(variables: int) -> int:
    """Return how many layers of four Variables, beside the key and the count of a random stream, make so many."""
    return (variables - 2) // 4


def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return the inputs with a tenth of them dropped."""
    return jnp.where(jax.random.bernoulli(key, 1 - DROPPED, x.shape), x / (1 - DROPPED), 0)


def squared_error(output: jax.Array, target: jax.Array) -> jax.Array:
    return ((output - target) ** 2).mean()


def small() -> jax.Array:
    return jnp.ones(WIDTH)


def jit_carried(step: Callable, donated: bool) -> Callable:
    """Compile a `step(given, carry)`, whose carry may be donated."""
    return jax.jit(step, donate_argnums=1 if donated else ())


def batch() -> tuple[jax.Array, jax.Array]:
    """Return inputs and targets."""
    x = jax.random.normal(jax.random.key(0), (8, WIDTH))
    return x, jnp.sin(x)


def carried(step: Callable, given: Any, carry: Any) -> Call:
    """Return a call of `step(given, carry) -> (loss, carry)` that keeps the carry for the next call."""

    def call() -> jax.Array:
        nonlocal carry
        loss, carry = step(given, carry)
        return loss

    return call


# --- the libraries --------------------------------------------------------------------------------


class Raw:
    """`jax.jit` over a flat list of arrays."""

    def read(self, variables: int) -> Call:
        arrays = [small() for _ in range(variables)]
        return partial(jax.jit(sum), arrays)

    def update(self, variables: int, donated: bool = False) -> Call:
        def step(given: None, arrays: list) -> tuple:
            return sum(arrays), [changed(array) for array in arrays]

        return carried(jit_carried(step, donated), None, [small() for _ in range(variables)])

    def train(self, variables: int, donated: bool = False) -> Call:
        layers = layers_for(variables)
        optimizer = optax.adam(LEARNING_RATE)
        parameters = [(jnp.eye(WIDTH), small()) for _ in range(layers)]
        statistics = [(small(), small()) for _ in range(layers)]
        count = jnp.zeros((), jnp.uint32)
        leaves, structure = jax.tree.flatten((parameters, statistics, count, optimizer.init(parameters)))

        def loss_and_statistics(parameters: list, statistics: list, x: jax.Array, target: jax.Array) -> tuple:
            after = []
            for (kernel, bias), (mean, variance) in zip(parameters, statistics, strict=True):
                x, seen_mean, seen_variance = block(x, kernel, bias)
                after.append((moved(mean, seen_mean), moved(variance, seen_variance)))
            return squared_error(x, target), after

        def step(given: tuple, leaves: list) -> tuple:
            key, x, target = given
            parameters, statistics, count, moments = structure.unflatten(leaves)
            x = dropped(x, jax.random.fold_in(key, count))
            differentiate = jax.value_and_grad(loss_and_statistics, has_aux=True)
            (loss, statistics), gradients = differentiate(parameters, statistics, x, target)
            updates, moments = optimizer.update(gradients, moments)
            parameters = jax.tree.map(jnp.add, parameters, updates)
            return loss, jax.tree.leaves((parameters, statistics, count + 1, moments))

        return carried(jit_carried(step, donated), (jax.random.key(0), *batch()), leaves)


class ObjectGraph:
    """flax.nnx and nnxlib: Modules whose Variables change in place.

    `bind(nnx, step, objects, donated)` says how a step over objects becomes a jitted function of the other arguments
    alone; `bind_reader` does so for a step that changes nothing, where that is written in another way.
    """

    def __init__(self, library: str, bind: Callable, bind_reader: Callable | None = None) -> None:
        self.nnx = importlib.import_module(library)
        self.bind = bind
        self.bind_reader = bind_reader or bind

    def read(self, variables: int) -> Call:
        return self.bind_reader(self.nnx, total, [self.pairs(variables)])

    def update(self, variables: int, donated: bool = False) -> Call:
        def step(model: Any) -> jax.Array:
            result = total(model)
            for variable in variables_of(model):
                variable[...] = changed(variable[...])
            return result

        return self.bind(self.nnx, step, [self.pairs(variables)], donated=donated)

    def train(self, variables: int, donated: bool = False) -> Call:
        nnx = self.nnx
        model = self.perceptron(layers_for(variables))
        optimizer = nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.Param)

        def loss_of(model: Any, x: jax.Array, target: jax.Array) -> jax.Array:
            return squared_error(model(x), target)

        def step(model: Any, optimizer: Any, x: jax.Array, target: jax.Array) -> jax.Array:
            loss, gradients = nnx.value_and_grad(loss_of)(model, x, target)
            optimizer.update(model, gradients)
            return loss

        return partial(self.bind(nnx, step, [model, optimizer], donated=donated), *batch())

    def pairs(self, variables: int) -> Any:
        """Return a model of layers with a kernel and a bias each."""
        nnx = self.nnx

        class Layer(nnx.Module):
            def __init__(self) -> None:
                self.kernel = nnx.Param(small())
                self.bias = nnx.Param(small())

        class Model(nnx.Module):
            def __init__(self) -> None:
                self.layers = nnx.List([Layer() for _ in range(variables // 2)])

        return Model()

    def perceptron(self, layers: int) -> Any:
        """Return a model of layers with a kernel, a bias, a running mean and a running variance each."""
        nnx = self.nnx

        class Layer(nnx.Module):
            def __init__(self) -> None:
                self.kernel = nnx.Param(jnp.eye(WIDTH))
                self.bias = nnx.Param(small())
                self.mean = nnx.BatchStat(small())
                self.variance = nnx.BatchStat(small())

            def __call__(self, x: jax.Array) -> jax.Array:
                y, mean, variance = block(x, self.kernel[...], self.bias[...])
                self.mean[...] = moved(self.mean[...], mean)
                self.variance[...] = moved(self.variance[...], variance)
                return y

        class Perceptron(nnx.Module):
            def __init__(self) -> None:
                self.layers = nnx.List([Layer() for _ in range(layers)])
                self.rngs = nnx.Rngs(dropout=0)

            def __call__(self, x: jax.Array) -> jax.Array:
                x = dropped(x, self.rngs.dropout())
                for layer in self.layers:
                    x = layer(x)
                return x

        return Perceptron()


def variables_of(model: Any) -> Iterator[Any]:
    for layer in model.layers:
        yield layer.kernel
        yield layer.bias


def total(model: Any) -> jax.Array:
    return sum((variable[...] for variable in variables_of(model)), jnp.zeros(WIDTH))


def by_jit(nnx: ModuleType, step: Callable, objects: list, donated: bool = False, **options: Any) -> Callable:
    """The form of the guides: objects are arguments of `nnx.jit`."""
    return partial(nnx.jit(step, donate_argnums=donate(objects, donated), **options), *objects)


def donate(objects: list, donated: bool) -> tuple[int, ...]:
    return tuple(range(len(objects))) if donated else ()


def by_cached_partial(nnx: ModuleType, step: Callable, objects: list, donated: bool = False) -> Callable:
    return nnx.cached_partial(nnx.jit(step, donate_argnums=donate(objects, donated)), *objects)


def by_jit_partial(nnx: ModuleType, step: Callable, objects: list, donated: bool = False) -> Callable:
    if donated:
        raise NotOffered  # its positions are those of the other arguments
    return nnx.jit_partial(step, *objects, graph=False)


def by_split_merge(library: str, form: Callable | None = None, jit: Callable = jax.jit) -> ObjectGraph:
    """The functional form: `split` once, `merge` inside a jitted function, and the caller keeps the state.

    The state is passed in a `form(nnx, state)`. A step that changes nothing returns no state.
    """
    formed = form or (lambda nnx, state: state)

    def bind(nnx: ModuleType, step: Callable, objects: list, donated: bool = False) -> Callable:
        graphdef, state = nnx.split(objects)
        state = formed(nnx, state)

        @partial(jit, donate_argnums=1 if donated else ())
        def pure_step(graphdef: Any, state: Any, *arguments: Any) -> tuple:
            objects = nnx.merge(graphdef, state)
            loss = step(*objects, *arguments)
            return loss, formed(nnx, nnx.state(objects))

        def call(*arguments: Any) -> jax.Array:
            nonlocal state
            loss, state = pure_step(graphdef, state, *arguments)
            return loss

        return call

    def bind_reader(nnx: ModuleType, step: Callable, objects: list) -> Callable:
        graphdef, state = nnx.split(objects)

        @jit
        def pure_step(graphdef: Any, state: Any, *arguments: Any) -> jax.Array:
            return step(*nnx.merge(graphdef, state), *arguments)

        return partial(pure_step, graphdef, formed(nnx, state))

    return ObjectGraph(library, bind, bind_reader)


def by_split_merge_in_nnx_jit(library: str) -> ObjectGraph:
    return by_split_merge(library, jit=importlib.import_module(library).jit)


def arrays_only(nnx: ModuleType, state: Any) -> Any:
    """The state with each Variable replaced by its array, which JAX flattens faster."""
    return nnx.as_pure(state)


class Equinox:
    """Modules that are immutable pytrees: a step returns the new model.

    `jit(eqx, step, donated)` compiles a `step(given, carry)`, by `filter_jit` or `jax.jit`.
    """

    def __init__(self, jit: Callable[[Any, Callable, bool], Callable]) -> None:
        self.eqx = importlib.import_module("equinox")
        self.jit = partial(jit, self.eqx)

    def read(self, variables: int) -> Call:
        return partial(self.jit(lambda given, model: self.total(model), False), None, self.pairs(variables))

    def update(self, variables: int, donated: bool = False) -> Call:
        def step(given: None, model: Any) -> tuple:
            return self.total(model), jax.tree.map(changed, model)

        return carried(self.jit(step, donated), None, self.pairs(variables))

    def train(self, variables: int, donated: bool = False) -> Call:
        eqx = self.eqx
        layers = layers_for(variables)
        optimizer = optax.adam(LEARNING_RATE)
        model = self.model(jnp.eye(WIDTH), layers)
        statistics = [(small(), small()) for _ in range(layers)]
        count = jnp.zeros((), jnp.uint32)
        moments = optimizer.init(model)

        def loss_and_statistics(model: Any, statistics: list, x: jax.Array, target: jax.Array) -> tuple:
            after = []
            for layer, (mean, variance) in zip(model.layers, statistics, strict=True):
                x, seen_mean, seen_variance = block(x, layer.kernel, layer.bias)
                after.append((moved(mean, seen_mean), moved(variance, seen_variance)))
            return squared_error(x, target), after

        def step(given: tuple, carry: tuple) -> tuple:
            key, x, target = given
            model, statistics, count, moments = carry
            x = dropped(x, jax.random.fold_in(key, count))
            differentiate = eqx.filter_value_and_grad(loss_and_statistics, has_aux=True)
            (loss, statistics), gradients = differentiate(model, statistics, x, target)
            updates, moments = optimizer.update(gradients, moments, model)
            return loss, (eqx.apply_updates(model, updates), statistics, count + 1, moments)

        return carried(self.jit(step, donated), (jax.random.key(0), *batch()), (model, statistics, count, moments))

    def pairs(self, variables: int) -> Any:
        return self.model(small(), variables // 2)

    def model(self, kernel: jax.Array, layers: int) -> Any:
        """Return a model of layers with a kernel and a bias each."""
        eqx = self.eqx

        class Layer(eqx.Module):
            kernel: jax.Array
            bias: jax.Array

        class Model(eqx.Module):
            layers: list

        return Model([Layer(jnp.copy(kernel), small()) for _ in range(layers)])

    @staticmethod
    def total(model: Any) -> jax.Array:
        return sum((leaf for layer in model.layers for leaf in (layer.kernel, layer.bias)), jnp.zeros(WIDTH))


def by_filter_jit(eqx: Any, step: Callable, donated: bool) -> Callable:
    return eqx.filter_jit(step, donate="all-except-first" if donated else "none")


BASELINE = "raw jax.jit"
CONTROL = "raw jax.jit, once more"  # how far two ratios may be apart by chance
ADAPTERS: Mapping[str, Callable[[], Adapter]] = {
    BASELINE: Raw,
    CONTROL: Raw,
    "nnxlib, nnx.jit": lambda: ObjectGraph("nnxlib", by_jit),
    "nnxlib, split/merge in jax.jit": lambda: by_split_merge("nnxlib"),
    "nnxlib, split/merge in nnx.jit": lambda: by_split_merge_in_nnx_jit("nnxlib"),
    "nnxlib, split/merge, pure state": lambda: by_split_merge("nnxlib", arrays_only),
    "flax, nnx.jit (default)": lambda: ObjectGraph("flax.nnx", by_jit),
    "flax, nnx.jit graph=False": lambda: ObjectGraph("flax.nnx", partial(by_jit, graph=False)),
    "flax, cached_partial": lambda: ObjectGraph("flax.nnx", by_cached_partial),
    "flax, jit_partial graph=False": lambda: ObjectGraph("flax.nnx", by_jit_partial),
    "flax, split/merge in jax.jit": lambda: by_split_merge("flax.nnx"),
    "flax, split/merge in nnx.jit": lambda: by_split_merge_in_nnx_jit("flax.nnx"),
    "flax, split/merge, pure state": lambda: by_split_merge("flax.nnx", arrays_only),
    "equinox, filter_jit": lambda: Equinox(by_filter_jit),
    "equinox, jax.jit": lambda: Equinox(lambda eqx, step, donated: jit_carried(step, donated)),
}


# --- the comparison -------------------------------------------------------------------------------


def load() -> tuple[dict[str, Adapter], list[str]]:
    """Return the adapters whose library is installed, and the labels of the others."""
    found, missing = {}, []
    for label, make in ADAPTERS.items():
        try:
            found[label] = make()
        except ModuleNotFoundError:
            missing.append(label)
    return found, missing


def warm(case: Case, adapters: Mapping[str, Adapter]) -> tuple[dict[str, Call], dict[str, str]]:
    """Build and compile one kind of step at one size in each library: the calls that work, and why others failed."""
    kind, variables = case
    group, failures = {}, {}
    for label, adapter in adapters.items():
        try:
            call = KINDS[kind](adapter, variables)
            call()
        except NotOffered:
            continue
        except Exception as error:  # a form that this release of a library lacks is a cell of the table, not its end
            failures[label] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            group[label] = call
    agree(group)
    return group, failures


def measured(
    case: Case, labels: Sequence[str], effort: Effort, watched: bool
) -> tuple[dict[str, Measurement], dict[str, str], dict[str, float]]:
    """Measure one case: each contender, why others failed, and the seconds of the garbage collector if `watched`."""
    adapters, _ = load()
    group, failures = warm(case, {label: adapters[label] for label in labels})
    measurements = measure(group, effort)
    collected = {label: collector_seconds(call, effort.watch) for label, call in group.items()} if watched else {}
    return measurements, failures, collected


def name(case: Case) -> str:
    kind, variables = case
    return f"{kind} {variables:,}"


MEASURED: Mapping[str, Callable[[Measurement, Measurement], str]] = {
    "Ratio to raw jax.jit (medians)": lambda own, raw: f"{own.over(raw):.2f}",
    "Microseconds per step (median)": lambda own, raw: f"{own.seconds * 1e6:,.1f}",
    "Python and C functions called per step": lambda own, raw: f"{own.calls:,}",
}
COLLECTED = "Ratio to raw jax.jit, the time of the garbage collector added"


def run(cases: Sequence[Case], effort: Effort, measured_in: Callable[[Case, str], bool] = lambda *_: True) -> Report:
    """Measure all cases and put them in tables; `measured_in(case, label)` says which contenders a case has.

    Each case has a process of its own.
    """
    adapters, missing = load()
    tables = {title: Table(title, [name(case) for case in cases], list(ADAPTERS)) for title in MEASURED}
    watched = [case for case in cases if case in WATCHED]
    collected = Table(COLLECTED, [name(case) for case in watched], list(ADAPTERS))
    reasons: dict[str, list[str]] = {}
    spreads: list[tuple[float, str]] = []
    for case in cases:
        print(f"{name(case)} ...", file=sys.stderr, flush=True)
        labels = [label for label in adapters if measured_in(case, label)]
        measurements, failures, collecting = in_new_process(measured, case, labels, effort, case in watched)
        raw = measurements[BASELINE]
        for title, table in tables.items():
            table.add(name(case), {label: MEASURED[title](own, raw) for label, own in measurements.items()})
        if case in watched:
            total_seconds = {
                label: own.over(raw) * raw.seconds + collecting[label] for label, own in measurements.items()
            }
            raw_seconds = total_seconds[BASELINE]
            collected.add(name(case), {label: f"{own / raw_seconds:.2f}" for label, own in total_seconds.items()})
        for label, reason in failures.items():
            reasons.setdefault(f"{label}: {reason}", []).append(name(case))
        spreads += [(own.spread, f"{label}, {name(case)}") for label, own in measurements.items()]
    remarks = [f"Not installed: {label}." for label in missing]
    remarks += [f"Failed, {reason} (in {', '.join(columns)})." for reason, columns in reasons.items()]
    typical, (widest, where) = statistics.median(spread for spread, _ in spreads), max(spreads)
    remarks.append(
        f"Interquartile range of a cell's samples: {typical:.0%} of their median, {widest:.0%} in the widest ({where})."
    )
    return Report([*tables.values(), *([collected] if watched else [])], remarks)


if __name__ == "__main__":
    main(
        lambda options: (
            run(QUICK_CASES, QUICK) if options.quick else run(cases(READ_AND_UPDATE, options.sizes), THOROUGH)
        ),
        description=str(__doc__).splitlines()[0],
        packages=["jax", "jaxlib", "nnxlib", "flax", "equinox", "optax", "numpy"],
        sizes=SIZES,
    )
