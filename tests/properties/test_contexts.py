"""A program in an update context, through plain JAX, does to the caller's objects exactly what it does eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from hypothesis import given

import nnxlib as nnx

from .compare import Snapshot, assert_no_tracer, assert_same, objects_in
from .programs import programs, run
from .strategies import Graph, examples, graphs, make


def updated(f: Callable, transform: Callable, one_by_one: bool) -> Callable:
    """``f`` by way of the four steps; what it detaches is split inside too, to be seen outside."""

    def inside(splits: list[tuple]) -> list[tuple]:
        with nnx.merge_context("test", inner=True) as ctx:
            args = [ctx.merge(*split) for split in splits]
        args = args if one_by_one else list(*args)
        known = objects_in(args)
        out = f(*args)
        with nnx.split_context("test") as ctx:
            return [ctx.split(x) for x in ([*args, known, out] if one_by_one else [(known, out)])]

    transformed = transform(inside)

    @nnx.update_context("test")
    def outside(*args: Any) -> Any:
        with nnx.split_context("test") as ctx:
            splits = [ctx.split(x) for x in (args if one_by_one else [list(args)])]
        splits = transformed(splits)
        with nnx.merge_context("test", inner=False) as ctx:
            last = [ctx.merge(*split) for split in splits][-1]
        return last if one_by_one else last[1]

    return outside


@pytest.mark.parametrize("one_by_one", [False, True])
@examples(40)
@given(graphs(arguments=2), programs())
def test_update_through_jit(one_by_one: bool, graph: Graph, program: tuple) -> None:
    """Split together and one by one: values, structure, sharing, identity, for two models and one program."""
    traces: list[int] = []

    def f(*args: Any) -> Any:
        traces.append(1)
        return run(program, args)

    eager = make(graph)
    known = objects_in(eager)
    expected = run(program, eager), eager, known
    call = updated(f, jax.jit, one_by_one)
    for _ in range(2):
        args = make(graph)
        known = objects_in(args)
        found = call(*args), args, known
        assert_same(expected, found)
        assert_no_tracer(found)
    assert len(traces) == 1


@examples(30)
@given(graphs(arguments=2), programs(longest=5))
def test_a_failing_update_changes_nothing(graph: Graph, program: tuple) -> None:
    """An exception at the end of the inner function leaves every object as it was."""

    def fails(*args: Any) -> Any:
        run(program, args)
        raise RuntimeError("at the end")

    args = make(graph)
    before = Snapshot(args)
    with pytest.raises(RuntimeError, match="at the end"):
        updated(fails, jax.jit, True)(*args)
    before.assert_unchanged()


@examples(40)
@given(graphs(arguments=3))
def test_split_and_merge_one_by_one(graph: Graph) -> None:
    """Split one by one in a context and merged again, any objects are what they were, sharing included."""
    args = make(graph)
    with nnx.split_context() as ctx:
        splits = [ctx.split(x) for x in args]
    with nnx.merge_context() as ctx:
        found = tuple(ctx.merge(*split) for split in splits)
    assert_same(args, found)
    assert_same(args, nnx.from_tree(nnx.to_tree(args)))
