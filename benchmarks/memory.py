"""What memory a step takes: a train step, a step that only reads, and the gradient of a stack of layers.

The numbers are the compiler's own (`memory_analysis` of the compiled program). They belong to a version of XLA and to a
platform, not to a machine; only the time of the step that reads is measured.

- A train step: Adam on an MLP of four layers, 512 wide, with and without donation. `planned` is what the program takes
  at its peak: arguments, outputs that do not reuse an argument, and temporaries.
- A step that reads one row of a layer of 36 MB. What it need not return it should not copy.
- The gradient of `nnx.Stack`: as a loop, with `remat`, and with nested `remat` (`remat_scan`); its temporary memory is
  given in multiples of one activation of the stack.

    python -m benchmarks.memory [--quick] [--results FOLDER]
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import nnxlib as nnx

from .timing import QUICK, Call, Effort, Report, Table, main, measure

RAW = "raw JAX"
MEGABYTE = 1e6
Memory = Any  # jaxlib's CompiledMemoryStats
Remat = bool | tuple[int, ...]

# --- a train step -------------------------------------------------------------------------------------------------

LAYERS, WIDE, ROWS = 4, 512, 64
OPTIMIZER = optax.adam(1e-3)


def squared_error(output: jax.Array) -> jax.Array:
    return (output**2).mean()


def train_raw(donated: bool) -> Memory:
    parameters = [{"kernel": jnp.eye(WIDE), "bias": jnp.zeros(WIDE)} for _ in range(LAYERS)]

    def loss_of(parameters: list, x: jax.Array) -> jax.Array:
        for layer in parameters:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return squared_error(x)

    def step(parameters: list, moments: Any, x: jax.Array) -> tuple:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, x)
        updates, moments = OPTIMIZER.update(gradients, moments)
        return loss, optax.apply_updates(parameters, updates), moments

    jitted = jax.jit(step, donate_argnums=(0, 1) if donated else ())
    return jitted.lower(parameters, OPTIMIZER.init(parameters), batch()).compile().memory_analysis()


def train_objects(library: str, donated: bool) -> Memory:
    nnx = importlib.import_module(library)

    class Perceptron(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(WIDE, WIDE, rngs=nnx.Rngs(0)) for _ in range(LAYERS)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: squared_error(model(x)))(model)
        optimizer.update(model, gradients)
        return loss

    model = Perceptron()
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    jitted = nnx.jit(step, donate_argnums=(0, 1) if donated else ())
    return jitted.lower(model, optimizer, batch()).compile().memory_analysis()


def train_equinox(donated: bool) -> Memory:
    eqx = importlib.import_module("equinox")

    class Linear(eqx.Module):  # the library's own keeps a transposed kernel, which makes another program
        kernel: jax.Array
        bias: jax.Array

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.kernel + self.bias

    model = [Linear(jnp.eye(WIDE), jnp.zeros(WIDE)) for _ in range(LAYERS)]

    def loss_of(model: list, x: jax.Array) -> jax.Array:
        for layer in model:
            x = jnp.tanh(layer(x))
        return squared_error(x)

    def step(x: jax.Array, model: list, moments: Any) -> tuple:
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, x)
        updates, moments = OPTIMIZER.update(gradients, moments, model)
        return loss, eqx.apply_updates(model, updates), moments

    jitted = eqx.filter_jit(step, donate="all-except-first" if donated else "none")
    moments = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    return jitted.lower(batch(), model, moments).compile().compiled.memory_analysis()


def batch() -> jax.Array:
    return jnp.ones((ROWS, WIDE))


TRAIN: Mapping[str, Callable[[bool], Memory]] = {
    RAW: train_raw,
    "nnxlib, nnx.jit": partial(train_objects, "nnxlib"),
    "flax, nnx.jit": partial(train_objects, "flax.nnx"),
    "equinox, filter_jit": train_equinox,
}


def megabytes(memory: Memory) -> float:
    """Return what a program takes at its peak."""
    taken = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return (taken + memory.temp_size_in_bytes) / MEGABYTE


def train_table() -> Table:
    columns = {"planned, MB": False, "planned with donation, MB": True}
    made = Table("A train step", list(columns), list(TRAIN))
    for column, donated in columns.items():
        made.add(column, {label: f"{megabytes(of(donated)):.2f}" for label, of in installed(TRAIN).items()})
    return made


# --- a step that only reads -----------------------------------------------------------------------------------------

SIDE = 3000  # a kernel of 36 MB


def read_raw() -> tuple[Call, Memory]:
    kernel = jnp.ones((SIDE, SIDE))
    step = jax.jit(lambda kernel: kernel[0].sum())
    return partial(step, kernel), step.lower(kernel).compile().memory_analysis()


def read_objects(library: str) -> tuple[Call, Memory]:
    nnx = importlib.import_module(library)

    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.kernel = nnx.Param(jnp.ones((SIDE, SIDE)))

    layer, step = Layer(), nnx.jit(lambda layer: layer.kernel[0].sum())
    return partial(step, layer), step.lower(layer).compile().memory_analysis()


def read_equinox() -> tuple[Call, Memory]:
    eqx = importlib.import_module("equinox")

    class Layer(eqx.Module):
        kernel: jax.Array

    layer, step = Layer(jnp.ones((SIDE, SIDE))), eqx.filter_jit(lambda layer: layer.kernel[0].sum())
    return partial(step, layer), step.lower(layer).compile().compiled.memory_analysis()


READ: Mapping[str, Callable[[], tuple[Call, Memory]]] = {
    RAW: read_raw,
    "nnxlib, nnx.jit": partial(read_objects, "nnxlib"),
    "flax, nnx.jit": partial(read_objects, "flax.nnx"),
    "equinox, filter_jit": read_equinox,
}


def read_table(effort: Effort) -> Table:
    made = Table("Reading a row of a layer of 36 MB", ["returned, MB", "microseconds"], list(READ))
    calls = {label: of() for label, of in installed(READ).items()}
    measured = measure({label: call for label, (call, _) in calls.items()}, effort)
    made.add("returned, MB", {k: f"{of.output_size_in_bytes / MEGABYTE:.2f}" for k, (_, of) in calls.items()})
    made.add("microseconds", {label: f"{own.seconds * 1e6:,.1f}" for label, own in measured.items()})
    return made


# --- the gradient of a stack ----------------------------------------------------------------------------------------

DEPTHS = (16, 64, 256)
BATCH, WIDTH = 1024, 16


class Block(nnx.Module):
    """A residual layer; its inner activation is as large as its output."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x))


def ways(depth: int) -> dict[str, Remat]:
    """The ways to compute the gradient, by name."""
    root = math.isqrt(depth)
    return {"loop": False, "remat": True, "remat_scan": (root, depth // root)}


def activations_kept(depth: int, remat: Remat) -> float:
    """The temporary memory of the gradient of a stack, in activations.

    >>> activations_kept(16, (4, 4)) < activations_kept(16, True) < activations_kept(16, False)
    True
    """
    graphdef, params = nnx.split(nnx.Stack(Block, depth, remat=remat, rngs=nnx.Rngs(0)))

    def loss(params: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(x).sum()

    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    analysis = jax.jit(jax.grad(loss)).lower(params, x).compile().memory_analysis()
    assert analysis is not None, "this platform does not say how much memory a program needs"
    return analysis.temp_size_in_bytes / (BATCH * WIDTH * 4)


def stack_table(depths: Sequence[int] = DEPTHS) -> Table:
    made = Table("Activations kept by the gradient of a stack, by depth", [str(n) for n in depths], list(ways(1)))
    for depth in depths:
        made.add(str(depth), {name: f"{activations_kept(depth, remat):.0f}" for name, remat in ways(depth).items()})
    return made


# --- all ------------------------------------------------------------------------------------------------------------


def installed(contenders: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contenders whose library is installed."""
    missing = {name for name in ("flax", "equinox") if importlib.util.find_spec(name) is None}
    return {label: of for label, of in contenders.items() if label.partition(",")[0] not in missing}


def run(depths: Sequence[int], effort: Effort) -> Report:
    return Report([train_table(), read_table(effort), stack_table(depths)])


if __name__ == "__main__":
    main(
        lambda options: run(DEPTHS[:1], QUICK) if options.quick else run(DEPTHS, Effort()),
        description=str(__doc__).splitlines()[0],
        packages=["jax", "jaxlib", "nnxlib", "flax", "equinox", "optax", "numpy"],
    )
