"""What is taken apart is put together again: equal in structure, pattern of identity, and value."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator

import cloudpickle
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import nnxlib as nnx
from nnxlib.core.graph import pack
from nnxlib.core.tables import table_of

from .compare import Snapshot, assert_no_tracer, assert_same, differences, is_array, is_object, objects_in
from .programs import programs, run, total
from .strategies import Graph, examples, graphs, make

COPIES = {
    "merge": lambda m: nnx.merge(*nnx.split(m)),
    "merge of filtered states": lambda m: nnx.merge(*nnx.split(m, nnx.Param, nnx.OfType(nnx.RngState), ...)),
    "merge of a pure dict": lambda m: nnx.merge(nnx.graphdef(m), nnx.state(m).flat_state()),
    "unflatten": lambda m: nnx.unflatten(*nnx.flatten(m)),
    "unflatten of leaves": lambda m: nnx.unflatten(*nnx.flatten(m, with_paths=False)),
    "unpack": lambda m: nnx.merge(nnx.unpack(m)),
    "clone": nnx.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "cloudpickle": lambda m: cloudpickle.loads(cloudpickle.dumps(m)),
    "jax.tree.map": lambda m: jax.tree.map(lambda x: x, m),
    "jax.tree.unflatten": lambda m: jax.tree.unflatten(*reversed(jax.tree.flatten(m))),
    "nnx.map": lambda m: nnx.map(lambda path, x: x, m),
}


def pickles(m: object) -> bool:
    try:
        pickle.dumps(m)
        return True
    except Exception:
        return False


@pytest.mark.parametrize("name", COPIES)
@examples(60)
@given(graphs(largest=6))
def test_a_copy_is_equal_and_shares_no_object(name: str, graph: Graph) -> None:
    """Every way of copying a graph keeps structure, sharing, cycles and values, and leaves the original as it was."""
    (model,) = make(graph)
    if name == "pickle" and not pickles(model):  # a lambda in it
        return
    before = Snapshot(model)
    made = COPIES[name](model)
    assert_same(model, made)
    assert not {id(x) for x in objects_in(model)} & {id(x) for x in objects_in(made)}
    before.assert_unchanged()


FILTERS = [
    nnx.Param,
    nnx.Not(nnx.Param),
    nnx.PathContains("a"),
    nnx.Any(nnx.BatchStat, "x"),
    (nnx.RngState, nnx.All("x")),
]


@examples(60)
@given(graphs(largest=6))
def test_filters_take_the_same_from_a_model_and_from_its_state(graph: Graph) -> None:
    """Also when what they take of a model of this structure is known from before."""
    for model in [nnx.Dict(m=m) for m in (*make(graph), *make(graph))]:
        state = nnx.state(model)
        for f in FILTERS:
            assert nnx.state(model, f) == state.filter(f)
        assert nnx.split(model, *FILTERS, ...)[1:] == state.split(*FILTERS, ...)


@examples(60)
@given(graphs(largest=6))
def test_pop_takes_what_the_filter_takes_and_nothing_else(graph: Graph) -> None:
    """What it returns is what `state` returns; all other objects stay where they were. Or nothing at all changes."""
    (model,) = make(graph)
    before, expected = Snapshot(model), nnx.state(nnx.Dict(m=model), nnx.Param)
    others = [x for x in objects_in(model) if not isinstance(x, nnx.Param)]
    try:
        popped = nnx.pop(nnx.Dict(m=model), nnx.Param)
    except ValueError:  # one is in a tuple
        before.assert_unchanged()
        return
    assert popped == expected
    left = objects_in(model)
    assert {id(x) for x in left if not isinstance(x, nnx.Param)} == {id(x) for x in others}


@examples(60)
@given(graphs(largest=6))
def test_iter_graph_finds_each_object_once_at_its_first_path(graph: Graph) -> None:
    """The objects and paths are those of a packed table."""
    (model,) = make(graph)
    found = [(id(x), path) for path, x in nnx.iter_graph(model) if is_object(x)]
    packed = pack(model)
    assert sorted(found) == sorted((id(x), path) for x, path in zip(packed.objects, packed.layout.paths, strict=True))


def ways(x: object, path: tuple = (), depth: int = 5) -> Iterator[tuple[tuple, nnx.Variable]]:
    """(path, Variable) by all ways of some length: shared objects are entered from each place that holds them."""
    if isinstance(x, nnx.Variable):
        yield path, x
    elif depth:
        for key, child in nnx.iter_children(x):
            yield from ways(child, (*path, *(key if isinstance(key, tuple) else (key,))), depth - 1)


@examples(60)
@given(graphs(largest=6))
def test_update_and_merge_find_a_variable_by_any_path(graph: Graph) -> None:
    """Also by several paths at once, if the value is the same; the other leaves stay."""
    (model,) = make(graph)
    model = nnx.Dict(m=model)
    graphdef, state = nnx.split(model)
    for path, variable in itertools.islice(ways(model), 30):
        value = variable.get_raw_value()
        if not is_array(value) or not jnp.issubdtype(value.dtype, jnp.floating):
            continue
        new = nnx.from_flat_state([(path, jnp.asarray(value) + 1)])
        (expected,) = make(graph)
        nnx.update(model, new)
        assert (variable.get_raw_value() == value + 1).all()
        variable.set_raw_value(value)
        assert_same(nnx.Dict(m=expected), model)
        again = nnx.from_flat_state([(path, jnp.array(value))])
        assert_same(model, nnx.merge(graphdef, state, again))


@examples(60)
@given(graphs(), programs())
def test_a_copy_lives_on_its_own(graph: Graph, program: tuple) -> None:
    """Editing a copy changes nothing in the original, and the copy takes every edit as the original would."""
    (model,), (expected,) = make(graph), make(graph)
    before = Snapshot(model)
    out = run(program, (expected,))
    for make_copy in (nnx.clone, copy.deepcopy, COPIES["merge"]):
        made = make_copy(model)
        assert_same((expected, out), (made, run(program, (made,))))
        before.assert_unchanged()


@examples(60)
@given(graphs(), programs())
def test_what_was_just_built_is_described_without_a_walk(graph: Graph, program: tuple) -> None:
    """The layout that a merged model is known to have is what a walk finds; edits before the first use count."""
    (model,) = make(graph)
    for edit in (False, True):
        for made in (nnx.clone(model), COPIES["merge"](model)):
            if edit:
                run(program, (made,))
            for _ in range(2):
                table, packed = table_of(made), pack(made)
                assert table.layout is packed.layout
                assert all(x is y for x, y in zip(table.objects_with(made), packed.objects, strict=True))
                assert all(x is y for x, y in zip(table.leaves(), packed.leaves, strict=True))


@examples(60)
@given(graphs())
def test_equal_recipes_have_equal_graphdefs(graph: Graph) -> None:
    """The static half compares and hashes by value, also after pickling, so that compiled functions are shared."""
    (a,), (b,) = make(graph), make(graph)
    graphdef = nnx.graphdef(a)
    assert graphdef == nnx.graphdef(b) == nnx.graphdef(nnx.clone(a)) == nnx.graphdef(copy.deepcopy(a))
    assert hash(graphdef) == hash(nnx.graphdef(b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    if pickles(graphdef):
        assert pickle.loads(pickle.dumps(graphdef)) == graphdef


@examples(60)
@given(graphs(), programs())
def test_update_writes_the_values_of_another_model(graph: Graph, program: tuple) -> None:
    """`update` with the state of a model of equal structure makes the values equal and keeps every object."""
    (a,), (b,) = make(graph), make(graph)
    for v in objects_in(b):
        if isinstance(v, nnx.Variable) and is_array(v.get_raw_value()) and v.dtype == "float32":
            v.value = v.value + 1
    objects = objects_in(a)
    nnx.update(a, nnx.state(b))
    assert_same(a, b)
    assert all(x is y for x, y in zip(objects, objects_in(a), strict=True))


@examples(60)
@given(graphs(largest=6))
def test_leaves_of_the_pytree_are_the_leaves_of_the_state(graph: Graph) -> None:
    """Raw JAX sees every leaf that `split` sees, a shared one once, and nothing else."""
    (model,) = make(graph)
    state = nnx.state(model)
    expected = jax.tree.leaves([x for _, x in state.flat_state()] if isinstance(state, nnx.State) else state)
    assert sorted(map(id, jax.tree.leaves(model))) == sorted(map(id, expected))
    assert len(jax.tree_util.tree_leaves_with_path(model)) == len(expected)


@examples(30)
@given(graphs())
def test_eval_shape_gives_the_same_graph_with_shapes(graph: Graph) -> None:
    """`eval_shape` returns an abstract model of the same structure, leaf for leaf, and touches nothing."""
    (model,) = make(graph)
    before = Snapshot(model)
    abstract = nnx.eval_shape(lambda m: m, model)
    before.assert_unchanged()
    assert_no_tracer(abstract)
    assert nnx.graphdef(abstract) == nnx.graphdef(model)
    for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(abstract), strict=True):
        assert isinstance(y, jax.ShapeDtypeStruct)
        assert not is_array(x) or x.shape == y.shape


@examples(30)
@given(graphs(largest=6))
def test_a_model_goes_through_raw_jit(graph: Graph) -> None:
    """`jax.jit` takes and returns any model as a pytree; tied parts are still tied in it."""
    (model,) = make(graph)

    @jax.jit
    def f(m):
        assert len(objects_in(m)) == len(objects_in(model))
        return m, total([x.get_raw_value() for x in objects_in(m) if isinstance(x, nnx.Variable)])

    made, _ = f(model)
    assert_same(model, made)
    assert_no_tracer(made)


@examples(100)
@given(graphs(), programs(longest=2))
def test_the_comparison_sees_every_edit(graph: Graph, program: tuple) -> None:
    """The helpers of these tests notice what a program changes: a snapshot and a comparison agree about it."""
    (model,), (same,) = make(graph), make(graph)
    assert not list(differences(model, same))
    before = Snapshot(model)
    run(program, (model,))
    if list(differences(model, same)):
        assert before.changes()


def test_a_tracer_is_found_wherever_it_hides() -> None:
    """The search for tracers looks into values, metadata, static attributes, closures, partials and slots."""
    import functools

    from .strategies import Block, Config, Pair, Slotted

    hiding_places = [
        lambda m, x: setattr(m, "a", lambda: x),
        lambda m, x: setattr(m, "a", functools.partial(print, x)),
        lambda m, x: setattr(m, "a", Config(x)),
        lambda m, x: setattr(m, "a", (Pair(1, [x]),)),
        lambda m, x: setattr(m, "a", [{"b": nnx.Param({"c": x})}]),
        lambda m, x: setattr(m, "a", nnx.Param(1.0, note=x)),
        lambda m, x: setattr(m, "slot", x),
        lambda m, x: setattr(m, "a", nnx.clone(m).double),
    ]

    @jax.jit
    def search(x):
        for kind in (Block, Slotted):
            for hide in hiding_places:
                if kind is Slotted and hide is hiding_places[-1]:
                    continue
                m = kind()
                m.b = x if hide is hiding_places[-1] else None
                hide(m, x)
                with pytest.raises(AssertionError, match="tracer"):
                    assert_no_tracer(m)
        return x

    search(1.0)
    assert is_object(nnx.Param(1))
