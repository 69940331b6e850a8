"""What a step costs that touches few of many Variables, or none, for all kinds of call.

The idea: the price of a step should follow what the step touches, not how large the model is. A model of many layers
is passed, and the step reads one Variable and changes another. There are two yardsticks: *exact* is `jax.jit` on just
these two arrays, the least that JAX can charge, and *all* is `jax.jit` on all arrays of the model, what it charges
those who pass the whole tree.

Two tables. The first compares libraries, for a step that touches few and one that touches none. The second is nnxlib
alone, beside *exact* called alike: with the model in a dict, as a keyword, on a method, a bound method or a
closure, with models taking turns, while other Modules are built and changed, with a Variable assigned, with a Variable
or a layer replaced, with arrays in a tuple or settings that can be edited in an attribute, with a Python attribute
toggled in between, and from several threads.

    python -m benchmarks.few [--quick] [--results FOLDER]
"""

import threading
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import nnxlib

from .dispatch import ADAPTERS as LIBRARIES
from .dispatch import Equinox, ObjectGraph, by_jit, changed, small
from .timing import QUICK, Call, Effort, Prepared, Report, Table, agree, main, measure

SIZES = (100, 1000, 5000)
EXACT, ALL = "raw jax.jit, exact", "raw jax.jit, all"
LABELS = [label for label in LIBRARIES if label.startswith(("nnxlib, nnx.jit", "flax, nnx.jit", "flax, jit_partial"))]


# --- the step, in each library ------------------------------------------------------------------------------------


def few(model: Any) -> jax.Array:
    """Read one Variable and change another."""
    layer = model.layers[1]
    layer.bias[...] = changed(layer.bias[...])
    return layer.kernel[...].sum()


def none(model: Any) -> jax.Array:
    return jnp.zeros(())


def few_of_arrays(kernel: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same with arrays: what is read of one, and what the other becomes."""
    return kernel.sum(), changed(bias)


RAW_STEP = jax.jit(few_of_arrays)


class Exact:
    """A jitted step on the two arrays that it reads or changes, which the caller keeps."""

    def __init__(self, step: Callable = RAW_STEP) -> None:
        self.kernel, self.bias = small(), small()
        self.step = step

    def __call__(self) -> jax.Array:
        result, self.bias = self.step(self.kernel, self.bias)
        return result


def exact_none() -> Call:
    return jax.jit(lambda: jnp.zeros(()))


def all_few(variables: int) -> Call:
    arrays = [small() for _ in range(variables)]

    @jax.jit
    def step(arrays: list) -> tuple:
        return arrays[2].sum(), [*arrays[:3], changed(arrays[3]), *arrays[4:]]

    def call() -> jax.Array:
        nonlocal arrays
        result, arrays = step(arrays)
        return result

    return call


def all_none(variables: int) -> Call:
    return partial(jax.jit(lambda arrays: jnp.zeros(())), [small() for _ in range(variables)])


def equinox_few(variables: int) -> Call:
    import equinox as eqx

    model = Equinox(lambda eqx: eqx.filter_jit).pairs(variables)

    @eqx.filter_jit
    def step(model: Any) -> tuple:
        layer = model.layers[1]
        return layer.kernel.sum(), eqx.tree_at(lambda m: m.layers[1].bias, model, changed(layer.bias))

    def call() -> jax.Array:
        nonlocal model
        result, model = step(model)
        return result

    return call


def libraries(kind: str, variables: int) -> tuple[dict[str, Call], list[str]]:
    """The step in each library that is installed, and remarks about the others."""
    step = {"few": few, "none": none}[kind]
    found: dict[str, Call] = {
        EXACT: Exact() if kind == "few" else exact_none(),
        ALL: all_few(variables) if kind == "few" else all_none(variables),
    }
    remarks = []
    makers: dict[str, Callable[[], Call]] = {label: partial(_graph, label, step, variables) for label in LABELS}
    if kind == "few":
        makers["equinox, filter_jit"] = partial(equinox_few, variables)
    for label, make in makers.items():
        try:
            found[label] = make()
        except ModuleNotFoundError:
            remarks.append(f"Not installed: {label}.")
    return found, remarks


def _graph(label: str, step: Callable, variables: int) -> Call:
    adapter = LIBRARIES[label]()
    assert isinstance(adapter, ObjectGraph)
    return adapter.bind(adapter.nnx, step, [adapter.pairs(variables)])


# --- the kinds of call --------------------------------------------------------------------------------------------


def model_of(variables: int) -> Any:
    return ObjectGraph("nnxlib", by_jit).pairs(variables)


DELAYED = "raw behind 200 empty iterations"  # not nnxlib: what any Python costs that takes as long as `nnx.jit` does


def kinds_of_call(variables: int) -> Mapping[str, tuple[Call, Call]]:
    """For each kind of call: nnxlib, and `exact` called alike."""
    step, x = nnxlib.jit(few), jnp.zeros(())

    def with_array() -> tuple[Call, Call]:
        jitted = nnxlib.jit(lambda model, x: few(model) + x)
        raw = jax.jit(lambda x, kernel, bias: (kernel.sum() + x, changed(bias)))
        return partial(jitted, model_of(variables), x), Exact(partial(raw, x))

    def in_containers() -> tuple[Call, Call]:
        jitted = nnxlib.jit(lambda models, more: few(models["model"]) + more[0])
        raw = jax.jit(lambda models, more: (models["model"][0].sum() + more[0], changed(models["model"][1])))
        call = partial(jitted, {"model": model_of(variables)}, (x,))
        return call, Exact(lambda kernel, bias: raw({"model": (kernel, bias)}, (x,)))

    def as_keyword() -> tuple[Call, Call]:
        jitted = nnxlib.jit(lambda *, model: few(model))
        exact = Exact(lambda kernel, bias: RAW_STEP(kernel=kernel, bias=bias))
        return partial(jitted, model=model_of(variables)), exact

    def on_method() -> tuple[Call, Call]:
        model = stepping(variables)
        return lambda: model.jitted(), Exact()

    def on_bound_method() -> tuple[Call, Call]:
        return nnxlib.jit(stepping(variables).step), Exact()

    def on_closure() -> tuple[Call, Call]:
        model = model_of(variables)
        return nnxlib.jit(lambda: few(model)), Exact()

    def alternately() -> tuple[Call, Call]:
        models = [model_of(variables), model_of(variables)]
        exacts = [Exact(), Exact()]
        return _alternating([partial(step, model) for model in models]), _alternating(exacts)

    def others_change() -> tuple[Call, Call]:
        model, other = model_of(variables), model_of(10)
        step(other)

        def prepare() -> None:
            made = model_of(10)
            other.layers.append(made)
            other.layers.pop()
            made.flag = True

        return Prepared(partial(step, model), prepare), Prepared(Exact(), prepare)

    def assigned() -> tuple[Call, Call]:
        model, value = model_of(variables), small()

        def prepare() -> None:
            model.layers[1].bias.value = value

        exact = Exact()
        return Prepared(partial(step, model), prepare), Prepared(exact, lambda: setattr(exact, "bias", value))

    def replaced() -> tuple[Call, Call]:
        model, value = model_of(variables), small()

        def prepare() -> None:
            model.layers[1].bias = nnxlib.Param(value)

        exact = Exact()
        return Prepared(partial(step, model), prepare), Prepared(exact, lambda: setattr(exact, "bias", value))

    def layer_replaced() -> tuple[Call, Call]:
        model, exact = model_of(variables), Exact()

        def prepare() -> None:
            model.layers[1] = nnxlib.clone(model.layers[1])

        return Prepared(partial(step, model), prepare), Prepared(exact, lambda: setattr(exact, "bias", small()))

    def with_pytree() -> tuple[Call, Call]:
        model = model_of(variables)
        model.moments = (x, x)
        raw = jax.jit(lambda moments, kernel, bias: (kernel.sum() + moments[0], changed(bias)))
        jitted = nnxlib.jit(lambda model: few(model) + model.moments[0])
        return partial(jitted, model), Exact(partial(raw, model.moments))

    def with_settings() -> tuple[Call, Call]:
        model = model_of(variables)
        model.settings = types.SimpleNamespace(rate=0.5, sizes=[1, 2])  # compared at each call
        return partial(step, model), Exact()

    def toggled() -> tuple[Call, Call]:
        model = model_of(variables)
        model.flag, count = True, 0

        def prepare() -> None:
            nonlocal count
            count += 1
            if count % 10 == 0:
                model.flag = not model.flag

        return Prepared(partial(step, model), prepare), Exact()

    def from_threads() -> tuple[Call, Call]:
        models = [model_of(variables) for _ in range(4)]
        return _in_threads([partial(step, model) for model in models]), _in_threads([Exact() for _ in range(4)])

    def delayed() -> tuple[Call, Call]:
        return _delayed(Exact()), Exact()

    def delayed_in_threads() -> tuple[Call, Call]:
        calls = [_delayed(Exact()) for _ in range(4)]
        return _in_threads(calls), _in_threads([Exact() for _ in range(4)])

    def donated() -> tuple[Call, Call]:
        jitted = nnxlib.jit(few, donate_argnums=0)
        return partial(jitted, model_of(variables)), Exact(jax.jit(few_of_arrays, donate_argnums=1))

    return {
        "as an argument": (partial(step, model_of(variables)), Exact()),
        "with an array": with_array(),
        "in a dict, and a tuple": in_containers(),
        "as a keyword": as_keyword(),
        "a method": on_method(),
        "a bound method": on_bound_method(),
        "a closure": on_closure(),
        "two models alternately": alternately(),
        "other Modules built, changed": others_change(),
        "a Variable assigned before": assigned(),
        "a Variable replaced before": replaced(),
        "a layer replaced before": layer_replaced(),
        "arrays in a tuple beside": with_pytree(),
        "settings that can be edited": with_settings(),
        "an attribute toggled each ten": toggled(),
        "from four threads": from_threads(),
        DELAYED: delayed(),
        f"{DELAYED}, from four threads": delayed_in_threads(),
        "donated": donated(),
    }


def stepping(variables: int) -> Any:
    """A model with the step as a method, jitted and not."""
    model = model_of(variables)
    model.__class__ = type("Stepping", (type(model),), {"jitted": nnxlib.jit(few), "step": few})
    return model


def _alternating(calls: list[Call]) -> Call:
    turn = 0

    def call() -> jax.Array:
        nonlocal turn
        turn = (turn + 1) % len(calls)
        return calls[turn]()

    return call


def _delayed(call: Call) -> Call:
    """A call with 1.3 us of Python in front."""
    nothing = range(200)

    def delayed() -> jax.Array:
        for _ in nothing:
            pass
        return call()

    return delayed


def _in_threads(calls: list[Call], times: int = 50) -> Call:
    """One call that makes fifty calls of each in a thread of its own."""

    def work(call: Call) -> None:
        for _ in range(times):
            call()

    def run() -> jax.Array:
        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return calls[0]()

    return run


# --- the comparison -----------------------------------------------------------------------------------------------


def run(sizes: Sequence[int], effort: Effort) -> Report:
    """Measure both tables."""
    cases = [(kind, size) for kind in ("few", "none") for size in sizes]
    columns = [f"touches {kind} of {size:,}" for kind, size in cases]
    rows = [EXACT, ALL, *LABELS, "equinox, filter_jit"]
    compared = Table("A step that touches little: ratio to exact (medians)", columns, rows)
    microseconds = Table("Microseconds per step (median)", columns, rows)
    remarks: set[str] = set()
    for (kind, size), column in zip(cases, columns, strict=True):
        group, missing = libraries(kind, size)
        remarks.update(missing)
        agree(group)
        measured = measure(group, effort)
        exact = measured[EXACT]
        compared.add(column, {label: f"{own.over(exact):.2f}" for label, own in measured.items()})
        microseconds.add(column, {label: f"{1e6 * own.seconds:,.1f}" for label, own in measured.items()})
    names = list(kinds_of_call(4))
    alone = Table("nnxlib, touches few, by kind of call: ratio to exact", [f"{n:,}" for n in sizes], names)
    calls = Table("Python and C functions called per step", [f"{n:,}" for n in sizes], names)
    for size in sizes:
        ratios, counts = {}, {}
        for name, (own, exact_call) in kinds_of_call(size).items():
            for _ in range(20):  # past the checks of the first uses
                own(), exact_call()
            measured = measure({"own": own, "exact": exact_call}, effort)
            ratios[name] = f"{measured['own'].over(measured['exact']):.2f}"
            counts[name] = f"{measured['own'].calls:,}"
        alone.add(f"{size:,}", ratios)
        calls.add(f"{size:,}", counts)
    return Report([compared, microseconds, alone, calls], sorted(remarks))


if __name__ == "__main__":
    main(
        lambda options: run(SIZES[:1], QUICK) if options.quick else run(options.sizes, Effort()),
        description=str(__doc__).splitlines()[0],
        packages=["jax", "jaxlib", "nnxlib", "flax", "equinox", "numpy"],
        sizes=SIZES,
    )
