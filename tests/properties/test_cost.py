"""What every transform and operation costs: calls in proportion to the model, nothing held afterwards, few traces.

One table of each; a regression in one of these shows in no result.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlib as nnx

from .compare import assert_freed
from .test_matrix import ABSTRACT, EAGER, LOOPS

X = jnp.ones((2, 2))
ERRORS_ARE_CYCLIC = jax.__version_info__ < (0, 9)  # JAX 0.8 leaves them, and their frames, in a reference cycle
TRANSFORMS: dict[str, Callable[[Callable], Callable]] = {**EAGER, **LOOPS, **ABSTRACT}
TRANSFORMS |= {
    "jit of a closure": lambda f: lambda *args: nnx.jit(lambda: f(*args))(),
    "jit of a partial": lambda f: lambda m, *args: nnx.jit(functools.partial(f, m))(*args),
    "jit with donation": lambda f: nnx.jit(f, donate_argnums=0),
    "jit with a static argument": lambda f: functools.partial(nnx.jit(lambda _, *args: f(*args), static_argnums=0), 1),
    "compile": lambda f: lambda *args: nnx.jit(f).lower(*args).compile()(*args),
    "cached_partial": lambda f: lambda m, *args: nnx.cached_partial(nnx.jit(f), m)(*args),
    "capture": lambda f: lambda *args: nnx.capture(f, nnx.Intermediate)(*args),
    "raw jit": lambda f: lambda m, other, x: jax.jit(lambda m, other, x: f(m, other, x)[-1])(m, other, x),
    "raw grad": lambda f: lambda *args: jax.grad(lambda x: f(*args[:2], x)[-1].sum())(args[2]),
    "raw vmap of a closure": lambda f: lambda m, other, x: jax.vmap(lambda x: f(m, other, x)[-1])(x),
}


def _stepped(m: Any) -> None:
    optimizer = nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param)
    optimizer.update(m, nnx.grad(lambda m: m.first.w.value.sum())(m))


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "split": nnx.split,
    "split by filters": lambda m: nnx.split(m, nnx.Param, ...),
    "merge": lambda m: nnx.merge(*nnx.split(m)),
    "state": nnx.state,
    "graphdef": nnx.graphdef,
    "update": lambda m: nnx.update(m, nnx.state(m)),
    "clone": nnx.clone,
    "pop": lambda m: nnx.pop(m, nnx.BatchStat),
    "iter_graph": lambda m: list(nnx.iter_graph(m)),
    "iter_modules": lambda m: list(nnx.iter_modules(m)),
    "map": lambda m: nnx.map(lambda path, x: x, m),
    "recursive_map": lambda m: nnx.recursive_map(lambda path, x: x, m),
    "view": nnx.view,
    "find_duplicates": nnx.find_duplicates,
    "from_tree": lambda m: nnx.from_tree(nnx.to_tree(m)),
    "to_pure_dict": lambda m: nnx.to_pure_dict(nnx.state(m)),
    "diff": lambda m: nnx.diff(m, nnx.clone(m)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(nnx.split(m))),
    "eval": lambda m: m.eval(),
    "repr": repr,
    "tree_map": lambda m: jax.tree.map(lambda x: x, m),
    "tree_map, twice": lambda m: jax.tree.map(lambda x: x, jax.tree.map(lambda x: x, m)),
    "tree_flatten_with_path": jax.tree_util.tree_flatten_with_path,
    "tree_structure": lambda m: jax.tree.structure(m) == jax.tree.structure(nnx.clone(m)),
    "Optimizer": _stepped,
}


class Part(nnx.Module):
    """A part of a chain, which refers to the next one twice: there are 2**n ways to the last of n parts."""

    def __init__(self, shared: nnx.Variable, setting: Any):
        self.w, self.stat, self.shared = nnx.Param(X + 1), nnx.BatchStat(X + 1), shared
        self.setting, self.name = setting, "part"


class Model(nnx.Module):
    pass


def chain(size: int, cyclic: bool = True, **settings: Any) -> Any:
    shared, setting = nnx.Param(X + 1), types.SimpleNamespace(sizes=[1, 2], **settings)
    parts = [Part(shared, setting) for _ in range(size)]
    for part, following in itertools.pairwise(parts):
        part.next = part.again = following
    root: Any = Model()
    root.parts, root.first, root.array = parts, parts[0], X + 1
    if cyclic:
        parts[-1].root = root
    return root


def read(m: Any, other: Any, x: Any) -> Any:
    return (x * m.first.w + m.array,)


def write(m: Any, other: Any, x: Any) -> Any:
    m.first.stat.value = m.first.stat + x
    return read(m, other, x)


def fail(m: Any, other: Any, x: Any) -> Any:
    write(m, other, x)
    raise ZeroDivisionError


# --- calls in proportion to the model -------------------------------------------------------------------------------

SIZES = 5, 10, 20
_tests = itertools.count()


class TooMany(BaseException):
    """Ends what would not end by itself."""


def count_calls(f: Callable[[], Any], most: float) -> int:
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")
        if count > most:
            raise TooMany

    enabled = gc.isenabled()
    gc.disable()  # JAX has the collector call Python
    sys.setprofile(profile)
    try:
        f()
    finally:
        sys.setprofile(None)
        if enabled:
            gc.enable()
    return count


def assert_linear(call: Callable[[Any], Any]) -> None:
    """Fail if the calls of Python and C functions grow faster than the model, in the first call or the second."""
    call(chain(3))  # JAX prepares operations when they are first used
    # Of a structure of their own: some of them would find what an earlier test has prepared for a model like it.
    test = next(_tests)
    models = [chain(size, test=test) for size in SIZES]
    for time in ("first", "second"):
        counts: list[int] = []
        for model in models:
            most = 10 * counts[-1] if counts else 1e6
            counts.append(count_calls(functools.partial(call, model), most))
        small, middle, large = counts
        allowed = 2 * (middle - small) * 1.5 + 0.2 * small  # of something quadratic it is 4 times the difference
        assert large - middle <= allowed, f"{counts} calls for {SIZES} parts, {time} time"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"repr"}))  # which folds what is deep, so is bounded
def test_operations_are_linear(name: str) -> None:
    assert_linear(OPERATIONS[name])


SLOW = {"shard_map", "jit of a closure"}  # to be called eagerly, and under a profile


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", sorted(TRANSFORMS.keys() - SLOW))
def test_transforms_are_linear(name: str) -> None:
    transformed = TRANSFORMS[name](read)
    assert_linear(lambda m: transformed(m, nnx.Dict(), X))


STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "changes values": lambda m, optimizer: None,
    "returns a part": lambda m, optimizer: (m.first, optimizer.step),
    "returns a new object": lambda m, optimizer: nnx.Variable(jnp.ones(2)),
    "returns a recording": lambda m, optimizer: (m.sow(nnx.Intermediate, "x", X), nnx.pop(m, nnx.Intermediate)),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", sorted(STEPS))
def test_a_compiled_step_makes_no_more_calls_for_a_larger_model(name: str) -> None:
    @nnx.jit
    def step(m: Any, optimizer: Any) -> Any:
        m.first.kernel += 1.0
        optimizer.step += 1
        return STEPS[name](m, optimizer)

    counts = []
    for size in SIZES:
        m = Model()
        m.parts = [nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(size)]
        m.first = m.parts[0]
        call = functools.partial(step, m, nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param))
        for _ in range(3):
            call()
        counts.append(min(count_calls(call, 1e6) for _ in range(3)))  # since some calls check
    assert counts == counts[:1] * 3


# --- freed at once --------------------------------------------------------------------------------------------------


def assert_model_freed(call: Callable[[Any], Any], *, cyclic: bool = False) -> None:
    def use() -> weakref.ref:  # Python up to 3.12 keeps copies of the locals of a frame that an error has looked into
        model = chain(3, cyclic=False)
        call(model)
        return weakref.ref(model.first)

    assert_freed(use, cyclic=cyclic)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_hold_nothing(name: str) -> None:
    assert_model_freed(OPERATIONS[name])


@pytest.mark.parametrize("f", [write, fail], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_hold_nothing(name: str, f: Callable) -> None:
    """Of their arguments, whether they return or raise."""
    transformed = TRANSFORMS[name](read if f is write and name.startswith("raw") else f)

    def call(m: Any) -> None:
        try:
            transformed(m, nnx.Dict(), X)
        except (ZeroDivisionError, nnx.errors.TraceContextError):
            assert f is fail

    assert_model_freed(call, cyclic=f is fail and ERRORS_ARE_CYCLIC)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transformed_function_goes_with_what_it_closes_over(name: str) -> None:
    """Though what was compiled of it may be kept on it."""

    def call(m: Any) -> None:
        TRANSFORMS[name](lambda m_, other, x: (x * m.first.w,))(chain(1, cyclic=False), nnx.Dict(), X)

    assert_model_freed(call)


class Settings:
    """A plain object, whose attributes a trace looks at."""

    scale = 2.0


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transformed_function_goes_with_a_plain_object_that_it_closes_over(name: str) -> None:
    def use() -> weakref.ref:
        settings = Settings()
        TRANSFORMS[name](lambda m, other, x: (x * settings.scale,))(chain(1, cyclic=False), nnx.Dict(), X)
        return weakref.ref(settings)

    assert_freed(use)


# --- traces ---------------------------------------------------------------------------------------------------------


def _scan_raw(f: Callable) -> Callable:
    def step(carry: Any, _: None) -> Any:
        return f(carry), None

    return lambda carry: jax.lax.scan(step, carry, None, length=2)[0]


NNX = types.SimpleNamespace(**{name: getattr(nnx, name) for name in (
    "jit", "grad", "vjp", "jvp", "linearize", "jacrev", "remat", "cond", "switch", "while_loop", "fori_loop",
    "custom_vjp", "shard_map",
)}, scan=lambda f: nnx.scan(f, in_axes=nnx.Carry, out_axes=nnx.Carry, length=2))  # fmt: skip
RAW = types.SimpleNamespace(**{**vars(jax), **vars(jax.lax)} | {"remat": jax.checkpoint, "scan": _scan_raw})


def _total(f: Callable) -> Callable:
    return lambda carry: sum(x.sum() for x in jax.tree.leaves(f(carry)))


def _custom(lib: Any, f: Callable) -> Callable:
    custom = lib.custom_vjp(f)
    custom.defvjp(lambda carry: (f(carry), None), lambda residual, g: (None,))
    return custom


# By name, a transform of either library, of a function from a carry to one.
TRACED: dict[str, Callable[[Any, Callable], Callable]] = {
    "jit": lambda lib, f: lib.jit(f),
    "grad": lambda lib, f: lib.grad(_total(f)),
    "vjp": lambda lib, f: lambda carry: lib.vjp(f, carry)[0],
    "linearize": lambda lib, f: lambda carry: lib.linearize(f, carry)[0],
    "jacrev": lambda lib, f: lib.jacrev(_total(f)),
    "remat": lambda lib, f: lib.remat(f),
    "cond": lambda lib, f: lambda carry: lib.cond(jnp.bool_(True), f, f, carry),
    "switch": lambda lib, f: lambda carry: lib.switch(jnp.int32(1), [f, f], carry),
    "while_loop": lambda lib, f: functools.partial(lib.while_loop, _is_small, f),
    "fori_loop": lambda lib, f: functools.partial(lib.fori_loop, 0, 2, lambda i, carry: f(carry)),
    "scan": lambda lib, f: lib.scan(f),
    "custom_vjp": _custom,
    "shard_map": lambda lib, f: lib.shard_map(
        f, mesh=jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), in_specs=jax.P(), out_specs=jax.P()
    ),
    "grad of remat": lambda lib, f: lib.grad(_total(lib.remat(f))),
    "scan of remat": lambda lib, f: lib.scan(lib.remat(f)),
    "grad of scan": lambda lib, f: lib.grad(_total(lib.scan(f))),
    "jit of jit": lambda lib, f: lib.jit(lib.jit(f)),
}
AROUND: dict[str, Callable[[Any, Callable], Callable]] = {
    "alone": lambda lib, f: f,
    "in jit": lambda lib, f: lib.jit(lambda carry: f(carry)),
    "in remat": lambda lib, f: lib.remat(lambda carry: f(carry)),
    "several in jit": lambda lib, f: lib.jit(lambda carry: [f(carry), f(carry)]),
}


def _is_small(carry: Any) -> Any:
    return jax.tree.leaves(carry[1])[0].sum() < 0


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", TRACED)
def test_a_function_is_traced_no_more_often_than_by_jax(name: str, around: str) -> None:
    """In each of three calls; with a Module for nnxlib where JAX has a dict."""
    found = []
    for lib, carry in ((NNX, (nnx.Dict(w=nnx.Param(X)), X)), (RAW, ({"w": X}, X))):
        runs = []

        def f(carry: Any, runs: list = runs) -> Any:
            runs.append(1)
            return carry[0], carry[1] * carry[0]["w"]

        call, counts = AROUND[around](lib, TRACED[name](lib, f)), []
        for _ in range(3):
            runs.clear()
            call(carry)
            counts.append(len(runs))
        found.append(counts)
    ours, raw = found
    assert all(a <= b for a, b in zip(ours, raw, strict=True)), f"{ours} traces, where JAX makes {raw}"
