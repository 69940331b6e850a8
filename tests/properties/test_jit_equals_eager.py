"""A transformed program does to the caller's objects exactly what the program does eagerly.

The comparison is over the arguments, what was returned, and every object that the caller had before, all as one graph:
so it also says that the caller's objects keep their identity (one that came back as another object, or was left with
its old contents, would not correspond any more), and that what was detached or moved is where it should be.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import nnxlib as nnx

from .compare import assert_no_tracer, assert_same, objects_in
from .programs import is_number, programs, run, total
from .strategies import Block, Graph, examples, graphs, make


class Copy:
    """The arguments of one run and all objects in them, also those that a program detaches."""

    def __init__(self, graph: Graph):
        self.args: tuple[Any, ...] = make(graph)
        self.objects = objects_in(self.args)

    def with_pytrees(self) -> Copy:
        """Pass the last object in a dict, beside Variables of all objects, one of which is an argument itself."""
        variables = [x for x in self.objects if isinstance(x, nnx.Variable)]
        self.args = (*self.args[:-1], {"a": self.args[-1], "b": (variables[:2], jnp.float32(4), None)}, *variables[1:2])
        return self

    def call(self, f: Callable) -> Any:
        """Call `f` on the arguments; returns everything that the caller can see afterwards."""
        out = f(*self.args)
        return self.args, out, self.objects


def traced(program: tuple, seen: list[int]) -> Callable:
    def f(*args: Any) -> Any:
        seen.append(1)
        return run(program, args)

    return f


# --- jit ------------------------------------------------------------------------------------------------------------


@examples(150)
@given(graphs(arguments=2), programs())
def test_jit(graph: Graph, program: tuple) -> None:
    """One call, then a second and third model of equal structure: each as eager, and traced once."""
    for copy in (Copy, lambda graph: Copy(graph).with_pytrees()):
        seen: list[int] = []
        f = nnx.jit(traced(program, seen))
        expected = copy(graph).call(lambda *args: run(program, args))
        for _ in range(3):
            found = copy(graph).call(f)
            assert_same(expected, found)
            assert_no_tracer(found)
            assert len(seen) == 1


@examples(100)
@given(graphs(arguments=2), programs(longest=4), programs(longest=3))
def test_jit_is_never_stale(graph: Graph, program: tuple, edits: tuple) -> None:
    """The same objects again, as the call left them, and again after eager edits: always what eager does."""
    f = nnx.jit(lambda *args: run(program, args))
    eager, jitted = Copy(graph), Copy(graph)

    def both(g: Callable, h: Callable) -> None:
        expected, found = eager.call(g), jitted.call(h)
        assert_same(expected, found)
        eager.objects += objects_in(expected)  # also those that are new now are known to the caller
        jitted.objects += objects_in(found)

    for _ in range(2):
        both(lambda *args: run(program, args), f)
    both(lambda *args: run(edits, args), lambda *args: run(edits, args))
    both(lambda *args: run(program, args), f)


@examples(40)
@given(graphs(arguments=2), programs(), programs(longest=3))
def test_jit_in_jit(graph: Graph, program: tuple, inner: tuple) -> None:
    """A jitted function that calls another one, on objects of its own and between other edits."""

    def f(call: Callable) -> Callable:
        def g(*args: Any) -> Any:
            first = run(program, args)
            return first, call(*args), call(*args)

        return g

    expected = Copy(graph).call(f(lambda *args: run(inner, args)))
    jitted = nnx.jit(f(nnx.jit(lambda *args: run(inner, args))))
    assert_same(expected, Copy(graph).call(jitted))
    assert_same(expected, Copy(graph).call(jitted))


@examples(60)
@given(graphs(arguments=2), programs(), programs(longest=3))
def test_closures(graph: Graph, program: tuple, edits: tuple) -> None:
    """Objects that a jitted function was not passed but refers to: seen as they are now, and written, at every call."""
    eager, jitted = Copy(graph), Copy(graph)
    a, b = jitted.args
    f = nnx.jit(lambda: run(program, (a, b)))
    for _ in range(2):
        expected, found = eager.call(lambda *args: run(program, args)), jitted.call(lambda *args: f())
        assert_same(expected, found)
        assert_no_tracer(found)
        assert_same(eager.call(lambda *args: run(edits, args)), jitted.call(lambda *args: run(edits, args)))


def test_a_closure_over_a_plain_object() -> None:
    """A Module that is reached through an object that nnxlib does not know, and is exchanged there."""
    holder, old, new = types.SimpleNamespace(), Block(), Block()
    old.a, new.a = nnx.Param(jnp.float32(1)), nnx.Param(jnp.float32(2))
    f = nnx.jit(lambda: holder.model.a.value)
    for model in (old, new):
        holder.model = model
        assert f() == model.a.value


def test_a_closure_that_reads_a_flag_only() -> None:
    """A function that depends on nothing but a static attribute of a captured Module."""
    model = Block()
    f = nnx.jit(lambda: jnp.float32(model.a))
    for model.a in (1, 2):
        assert f() == model.a


@examples(60)
@given(graphs(arguments=2), programs())
def test_disabled_jit(graph: Graph, program: tuple) -> None:
    """Under `jax.disable_jit()`, as a debugger wants it, the same happens without a trace."""
    with jax.disable_jit():
        found = Copy(graph).call(nnx.jit(lambda *args: run(program, args)))
    assert_same(Copy(graph).call(lambda *args: run(program, args)), found)


VALUES_ONLY = ("shift_value", "set_all_in_place", "add_in_place", "set_item", "shift_attribute")


@examples(40)
@given(graphs(arguments=2), programs(longest=4, names=VALUES_ONLY))
def test_new_values_are_not_traced_again(graph: Graph, program: tuple) -> None:
    """A program that only changes values is traced once, and once more where numbers and NumPy arrays became arrays."""
    seen: list[int] = []
    f = nnx.jit(traced(program, seen))
    eager, jitted = Copy(graph), Copy(graph)
    for _ in range(2):
        eager.call(lambda *args: run(program, args)), jitted.call(f)
    traces = len(seen)
    for _ in range(3):
        expected, found = eager.call(lambda *args: run(program, args)), jitted.call(f)
        assert_same(expected, found)
        assert_same(eager.call(lambda *args: run(program, args)), jitted.call(lambda *args: run(program, args)))
    assert len(seen) == traces <= 2


@examples(40)
@given(graphs(arguments=2))
def test_what_was_undone_is_not_traced_again(graph: Graph) -> None:
    """After an edit that is taken back, the function that was compiled before is found again."""
    seen: list[int] = []
    f = nnx.jit(traced((), seen))
    args = make(graph)
    f(*args)
    for value in (1, "other", 1, "other"):
        args[0].toggled = value
        f(*args)
    assert len(seen) == 3
    del args[0].toggled
    f(*args)
    assert len(seen) == 3


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # those that a program throws away
@examples(40)
@given(graphs(arguments=2), programs())
def test_donation(graph: Graph, program: tuple) -> None:
    """Donated arguments end up with valid values, changed or not."""
    f = nnx.jit(lambda *args: run(program, args), donate_argnums=(0, 1))
    assert_same(Copy(graph).call(lambda *args: run(program, args)), Copy(graph).call(f))


@examples(40)
@given(graphs(arguments=2), programs())
def test_stages(graph: Graph, program: tuple) -> None:
    """A function that was lowered and compiled ahead of time, for one model, does the same to another."""
    f = nnx.jit(lambda *args: run(program, args))
    compiled = f.lower(*Copy(graph).args).compile()
    assert_same(Copy(graph).call(lambda *args: run(program, args)), Copy(graph).call(compiled))


# --- grad -----------------------------------------------------------------------------------------------------------


def loss_and_rest(program: tuple) -> Callable:
    """A program that returns a loss that depends on all numbers there are when it is done."""

    def f(*args: Any) -> Any:
        out = run(program, args)
        values = [v.get_raw_value() for v in objects_in(args, out) if isinstance(v, nnx.Variable)]
        return total([jnp.sin(x) if is_number(x) else x for x in jax.tree.leaves(values)]), out

    return f


GRADS = {
    "grad": lambda f: nnx.grad(f, has_aux=True, argnums=(0, 1)),
    "value_and_grad": lambda f: nnx.value_and_grad(f, has_aux=True, argnums=(0, 1)),
    "grad in jit": lambda f: nnx.jit(nnx.grad(f, has_aux=True, argnums=(0, 1))),
    "jit in grad": lambda f: nnx.grad(nnx.jit(f), has_aux=True, argnums=(0, 1)),
}


@pytest.mark.parametrize("name", GRADS)
@examples(40)
@given(graphs(arguments=2), programs(longest=4))
def test_grad(name: str, graph: Graph, program: tuple) -> None:
    """Differentiating a program runs it once on the caller's objects, and gives a gradient for each Param."""
    f = loss_and_rest(program)
    args, (loss, out), objects = Copy(graph).call(f)
    params = sum(type(x) is nnx.Param for x in objects_in(make(graph)))
    found_args, result, found_objects = Copy(graph).call(GRADS[name](f))
    if name == "value_and_grad":
        (value, aux), grads = result
        assert jnp.allclose(value, loss)
    else:
        grads, aux = result
    assert_same((args, out, objects), (found_args, aux, found_objects))
    assert_no_tracer(found_args, result)
    assert len(jax.tree.leaves(grads)) == params


# --- transforms that run a function once ----------------------------------------------------------------------------

ONCE = {
    "remat": nnx.remat,
    "remat in jit": lambda f: nnx.jit(nnx.remat(f)),
    "cond": lambda f: lambda *args: nnx.cond(jnp.bool_(True), f, f, *args),
    "switch in jit": lambda f: nnx.jit(lambda *args: nnx.switch(1, [f, f], *args)),
}


@pytest.mark.parametrize("name", ONCE)
@examples(20)
@given(graphs(arguments=2), programs())
def test_other_transforms(name: str, graph: Graph, program: tuple) -> None:
    """What jit keeps, the engine keeps for every transform: structure may change wherever the function runs once."""
    expected = Copy(graph).call(lambda *args: run(program, args))
    assert_same(expected, Copy(graph).call(ONCE[name](lambda *args: run(program, args))))
