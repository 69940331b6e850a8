"""A live model under raw JAX: reading is always legal, writing raises, and either leaves it as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import nnxlib as nnx

from .compare import Snapshot, items, objects_in
from .programs import STEPS, Step, is_number, programs, run, total
from .strategies import Block, Graph, Pair, examples, graphs, make


def read(model: Any, x: Any) -> Any:
    """Read every Variable and array of a model."""
    values = [v.value for v in objects_in(model) if isinstance(v, nnx.Variable)]
    arrays = [a for a in jax.tree.leaves(model) if is_number(a)]
    return x * total(values) + total(arrays)


def square(model: Any, x: Any) -> Any:
    return sum([jnp.sum(v.value**2) * x for v in objects_in(model) if type(v) is nnx.Param], x * 0)


def forward(model: Any, x: Any) -> Any:
    """Read a model eagerly, in a jitted function, in a gradient, in a jitted gradient, and through a merged copy."""
    out = read(model, x) + nnx.jit(read)(model, x)
    grads = (nnx.grad(square)(model, x), nnx.jit(nnx.grad(square))(model, x))
    return out + total(grads) + read(nnx.merge(*nnx.split(model)), x)


X = jnp.arange(3, dtype=jnp.float32)

RAW: dict[str, Callable[[Callable], Any]] = {
    "eval_shape": lambda f: jax.eval_shape(f, X[0]),
    "jit": lambda f: jax.jit(f)(X[0]),
    "vmap": lambda f: jax.vmap(f)(X),
    "grad": lambda f: jax.grad(f)(X[0]),
    "jacfwd": lambda f: jax.jacfwd(f)(X[0]),
    "scan": lambda f: jax.lax.scan(lambda carry, x: (carry + f(x), x), jnp.float32(0), X),
    "map": lambda f: jax.lax.map(f, X),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(X[0]),
    "cond": lambda f: jax.lax.cond(X[0] > 0, f, lambda x: x, X[0]),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(X[0]),
    "vmap of grad in jit": lambda f: jax.jit(jax.vmap(jax.grad(f)))(X),
}


@pytest.mark.parametrize("name", RAW)
@examples(12)
@given(graphs(largest=3))
def test_reading_is_legal_everywhere(name: str, graph: Graph) -> None:
    """A forward that reads everything, with jit and grad of nnxlib inside, leaves each leaf the very same object."""
    (model,) = make(graph)
    before = Snapshot(model)
    RAW[name](lambda x: forward(model, x))
    before.assert_unchanged()


@examples(20)
@given(graphs(largest=3))
def test_reading_gives_what_it_gives_eagerly(graph: Graph) -> None:
    """The value under raw jit, vmap and scan is the eager one, also after the model has changed."""
    (model,) = make(graph)
    expected = [forward(model, x) for x in X]
    assert jnp.allclose(jax.vmap(lambda x: forward(model, x))(X), jnp.stack(expected))
    assert jnp.allclose(jax.lax.map(lambda x: forward(model, x), X), jnp.stack(expected))


@examples(4)
@given(graphs(largest=3))
def test_no_leaks_seen_by_jax(graph: Graph) -> None:
    """The same under `jax.checking_leaks()`."""
    (model,) = make(graph)
    before = Snapshot(model)
    with jax.checking_leaks():
        for name in ("jit", "vmap", "grad", "scan", "make_jaxpr"):
            RAW[name](lambda x: forward(model, x))
    before.assert_unchanged()


def edit_a_pair(args: Any, number: int) -> None:
    """Set a field of a dataclass that nnxlib does not know: to a setting, an array, or a Variable from elsewhere."""
    variables = [x for x in objects_in(args) if isinstance(x, nnx.Variable)]
    pairs = [pair for node in objects_in(args) for _, pair in items(node) or () if isinstance(pair, Pair)]
    if pairs:
        new = [1, None, jnp.float32(number), *variables[:2]]
        setattr(pairs[number % len(pairs)], ("left", "right")[number % 2], new[number % len(new)])


def flattened(args: Any) -> list[tuple[Any, Any]]:
    """The leaves of each node with their keys, and how it is put together."""
    return [jax.tree_util.tree_flatten_with_path(x) for x in objects_in(args)]


@examples(60)
@given(graphs(largest=4), programs())
def test_flattening_is_never_stale(graph: Graph, program: tuple[Step, ...]) -> None:
    """A graph that was flattened before each edit, from every node, flattens in the end as one that never was."""
    warm, cold = make(graph), make(graph)

    def warmed(step: int) -> None:
        flattened(warm)
        edit_a_pair(warm, step)

    run(program, warm, warmed)
    run(program, cold, lambda step: edit_a_pair(cold, step))
    for (leaves, treedef), (expected, structure) in zip(flattened(warm), flattened(cold), strict=True):
        assert treedef == structure
        assert list(map(_text, leaves)) == list(map(_text, expected))


def _text(leaf: Any) -> str:
    """What a leaf shows, without the address of a function."""
    return re.sub(" at 0x[0-9a-f]+", "", str(leaf))


# Edits that go past every object of the library: of a dataclass that is a static value, or of a dict in a Variable.
FOREIGN = ("edit_static", "edit_pytree")


@pytest.mark.parametrize("name", ["eval_shape", "jit", "vmap", "grad", "scan", "make_jaxpr"])
@examples(60)
@given(graphs(), programs(longest=3, names=tuple(n for n in STEPS if n not in FOREIGN)))
def test_writing_is_refused(name: str, graph: Graph, program: tuple[Step, ...]) -> None:
    """A program that would change the model raises, and has changed nothing; one that only reads passes."""
    (model,), (eager,) = make(graph), make(graph)
    before, changed = Snapshot(model), Snapshot(eager)
    run(program, (eager,))
    try:
        RAW[name](lambda x: (run(program, (model,)), x)[1])
    except nnx.TraceContextError:
        pass
    else:
        assert not changed.changes()
    before.assert_unchanged()


@pytest.mark.parametrize("name", ["eval_shape", "jit", "vmap", "grad", "scan", "make_jaxpr"])
@examples(30)
@given(graphs(), programs(longest=3))
def test_writing_in_a_jitted_function_is_refused(name: str, graph: Graph, program: tuple[Step, ...]) -> None:
    """The same when the change is made inside `nnx.jit`: it works in there, and is refused before it comes out."""
    (model,), (eager,) = make(graph), make(graph)
    before, changed = Snapshot(model), Snapshot(eager)
    run(program, (eager,))
    try:
        RAW[name](lambda x: (nnx.jit(lambda m: run(program, (m,)))(model), x)[1])
    except nnx.TraceContextError:
        pass
    else:
        assert not changed.changes()
    before.assert_unchanged()


def model() -> Any:
    m = Block()
    m.layers = [Block()]
    m.layers[0].w, m.layers[0].x, m.layers[0].none = nnx.Param(jnp.ones(2)), jnp.ones(2), None
    m.layers[0].table = {"a": nnx.Cache(jnp.ones(2))}
    return m


def set_variable(m: Any, x: Any) -> None:
    m.layers[0].w.value = x


def add_in_place(m: Any, x: Any) -> None:
    m.layers[0].w += x


def set_item(m: Any, x: Any) -> None:
    m.layers[0].w[0] = x


def set_metadata(m: Any, x: Any) -> None:
    m.layers[0].w.set_metadata(tag="new")


def set_array(m: Any, x: Any) -> None:
    m.layers[0].x = x


def set_none(m: Any, x: Any) -> None:
    m.layers[0].none = x


def append(m: Any, x: Any) -> None:
    m.layers.append(x)


def set_key(m: Any, x: Any) -> None:
    m.layers[0].table["b"] = x


def delete(m: Any, x: Any) -> None:
    del m.layers[0].w


WRITES = {
    set_variable: "layers[0].w",
    add_in_place: "layers[0].w",
    set_item: "layers[0].w",
    set_metadata: "layers[0].w",
    set_array: "layers[0]",
    set_none: "layers[0]",
    append: "layers",
    set_key: "layers[0].table",
    delete: "layers[0]",
}


@pytest.mark.parametrize("inside", ["directly", "in nnx.jit", "in nnx.grad"])
@pytest.mark.parametrize("name", ["jit", "vmap", "grad", "scan"])
@pytest.mark.parametrize("write", WRITES)
def test_a_refused_write_is_named(write: Callable, name: str, inside: str) -> None:
    """The error gives the path by which the caller reaches the object, for each kind of write; nothing is changed."""
    live = model()
    before = Snapshot(live)

    def f(x: Any) -> Any:
        if inside == "directly":
            write(live, x)
        elif inside == "in nnx.jit":
            nnx.jit(write)(live, x)
        else:
            nnx.grad(lambda m: (write(m, x), jnp.sum(m.layers[0].x) * 0.0)[1], argnums=nnx.DiffState(0, ...))(live)
        return x

    with pytest.raises(nnx.TraceContextError) as error:
        RAW[name](f)
    assert f"live.{WRITES[write]}" in str(error.value)
    before.assert_unchanged()
