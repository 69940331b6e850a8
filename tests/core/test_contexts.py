"""Contexts: sharing between several splits, and an update through a plain JAX transformation."""

import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.contexts import LinkedGraphDef
from nnxlib.core.errors import NonExhaustiveFiltersError, StateMismatchError
from nnxlib.core.graph import pack
from nnxlib.core.rows import NodeRow, Ref, VariableRow
from nnxlib.core.tables import table_of


class Pair(nnx.Module):
    def __init__(self, a=1.0, b=2.0):
        self.a = a if isinstance(a, nnx.Variable) else nnx.Param(jnp.asarray(a))
        self.b = b if isinstance(b, nnx.Variable) else nnx.BatchStat(jnp.asarray(b))


class Mixed(nnx.Module):
    """Has a list, a static set, an array that is a plain attribute, and a tuple with a Module in it."""

    def __init__(self):
        self.sizes = [1, 2]
        self.options = {"relu"}
        self.table = jnp.arange(3.0)
        self.pairs = (Pair(), jnp.array(5.0))
        self.scale = nnx.Param(jnp.array(1.0))


def inside_of(change, tag="test"):
    """The inner half of an update: steps 2 and 3 around ``change``."""

    def inside(graphdef, *states):
        with nnx.merge_context(tag, inner=True) as ctx:
            node = ctx.merge(graphdef, *states)
        change(node)
        with nnx.split_context(tag) as ctx:
            return ctx.split(node)

    return inside


@nnx.update_context("test")
def update(inside, node):
    """The outer half of an update: steps 1 and 4."""
    with nnx.split_context("test") as ctx:
        split = ctx.split(node)
    graphdef, state = inside(*split)
    with nnx.merge_context("test", inner=False) as ctx:
        return ctx.merge(graphdef, state)


# --- splits without an update ---


def test_an_object_of_two_splits_is_one_object_again():
    """Variables, nodes, arrays held by nodes and whole graphs are shared after the merge if they were before."""
    mixed, pair = Mixed(), Pair()
    pair.mixed = mixed
    with nnx.split_context() as ctx:
        splits = [ctx.split(x) for x in (mixed, pair, [mixed.pairs[0], pair, jnp.array(7.0)], pair, mixed.scale)]
    assert [len(nnx.to_flat_state(state)) for _, state in splits[:4]] == [5, 2, 1, 0]
    with nnx.merge_context() as ctx:
        new_mixed, new_pair, (inner, again, seven), third, scale = [ctx.merge(*split) for split in splits]
    assert new_mixed is not mixed
    assert new_pair.mixed is new_mixed
    assert new_pair.mixed.table is new_mixed.table
    assert inner is new_mixed.pairs[0]
    assert again is third is new_pair
    assert scale is new_mixed.scale
    assert seven == 7.0
    assert nnx.graphdef(new_pair) == nnx.graphdef(pair)


def test_what_was_split_before_is_a_reference():
    """Among the nodes of the second GraphDef."""
    pair = Pair()
    with nnx.split_context() as ctx:
        (first, _), (second, state) = ctx.split(nnx.List([pair])), ctx.split(pair)
    assert [type(x) for x in first.nodes] == [NodeRow, NodeRow, VariableRow, VariableRow]
    assert (second.nodes, state) == ((Ref(1), Ref(2), Ref(3)), {})


def test_merging_in_a_context_does_not_take_back_what_was_done_to_a_shared_object():
    """An object that two splits share is made by the first merge; the second finds it as it is by then."""
    pair = Pair()
    with nnx.split_context() as ctx:
        first, second = ctx.split(pair), ctx.split((pair, Pair()))
    with nnx.merge_context() as ctx:
        new = ctx.merge(*first)
        new.mark, new.a = "set", nnx.Param(9.0)
        again, _ = ctx.merge(*second)
    assert again is new
    assert (new.mark, new.a.value) == ("set", 9.0)


def test_the_first_split_merges_with_nnx_merge_and_a_later_one_names_what_is_missing():
    """A State that holds all leaves is complete by itself; one that does not says which of them are elsewhere."""
    pair = Pair()
    with nnx.split_context() as ctx:
        first, second = ctx.split(pair), ctx.split((pair.b, Pair(3.0)))
    assert nnx.merge(*first).b == 2.0
    missing = pytest.raises(StateMismatchError, match=r"BatchStat at \[0\] are in the State .* split before")
    with nnx.merge_context() as ctx, missing:
        ctx.merge(*second)
    with pytest.raises(StateMismatchError, match=r"\[0\]: missing"):
        nnx.merge(*second)


def test_equal_graphs_with_equal_sharing_have_equal_graphdefs():
    """LinkedGraphDefs compare by structure and by numbers, also after pickling, and differ from plain ones."""

    def defs(share):
        pair = Pair()
        with nnx.split_context() as ctx:
            return [ctx.split(x)[0] for x in (pair, Pair(pair.a if share else 5.0))]

    assert defs(True) == defs(True)
    assert hash(defs(True)[1]) == hash(defs(True)[1])
    assert defs(True)[0] == defs(False)[0]
    assert defs(True)[1] != defs(False)[1]
    assert defs(True)[0] != nnx.graphdef(Pair())
    assert nnx.graphdef(Pair()) != defs(True)[0]
    for graphdef in defs(True):
        for copied in (pickle.loads(pickle.dumps(graphdef)), copy.deepcopy(graphdef)):
            assert copied == graphdef
            assert type(copied) is LinkedGraphDef
            assert copied.own_paths == graphdef.own_paths
    assert jax.tree.leaves(defs(True)) == []


def test_the_owner_of_each_leaf():
    """Variables come first, then the arrays of nodes, then those of the pytree."""
    packed = pack((Mixed(), jnp.array(8.0)))
    owners = [packed.layout.rows[i].type.__name__ if i >= 0 else None for i, _ in packed.layout.owners]
    assert owners == ["Param", "BatchStat", "Param", "Mixed", "Mixed", None]


def test_filters_and_paths_go_to_the_states():
    """``split`` and ``flatten`` take filters; a list without paths cannot be filtered."""
    with nnx.split_context() as ctx:
        _, params, rest = ctx.split(Pair(), nnx.Param, ...)
        _, only = ctx.split(Pair(), ...)
        _, flat = ctx.flatten(Pair(), ...)
        assert (list(params), list(rest), list(only), list(flat.paths)) == (["a"], ["b"], ["a", "b"], [("a",), ("b",)])
        with pytest.raises(NonExhaustiveFiltersError):
            ctx.split(Pair(), nnx.Param)
        with pytest.raises(ValueError, match="cannot be filtered"):
            ctx.flatten(Pair(), nnx.Param, with_paths=False)


def test_a_split_that_is_refused_has_split_nothing():
    """The next one has all leaves, and merges."""
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    for name in "split", "flatten":
        with nnx.split_context() as ctx:
            split = getattr(ctx, name)
            with pytest.raises(ValueError, match="non-empty remainder"):
                split(model, nnx.Param)
            graphdef, *states = split(model, nnx.Param, ...)
        assert [len(state) for state in states] == [2, 2]
        with nnx.merge_context() as ctx:
            assert not nnx.diff(model, ctx.merge(graphdef, *states))


def test_a_variable_by_itself_is_split_by_filters():
    """As by nnx.split: it is the State of the filter that takes it."""
    with nnx.split_context() as ctx:
        graphdef, params, rest = ctx.split(nnx.Param(jnp.array(1.0)), nnx.Param, ...)
    assert (type(params), list(rest)) == (nnx.Param, [])
    with nnx.merge_context() as ctx:
        assert ctx.merge(graphdef, params, rest) == 1.0


def test_values_without_paths_are_in_the_order_of_paths():
    """``unflatten`` puts a list of values where ``flatten`` took them from, with and without shared leaves."""
    pair = Pair()
    with nnx.split_context() as ctx:
        first, second = ctx.flatten(pair, with_paths=False), ctx.flatten([Pair(3.0, pair.b)], with_paths=False)
        graphdef, flat = ctx.flatten(Pair(4.0))
    assert (first[1], second[1], flat.paths) == ([1.0, 2.0], [3.0], (("a",), ("b",)))
    with nnx.merge_context() as ctx:
        new, (other,) = ctx.unflatten(*first), ctx.unflatten(*second)
        assert ctx.unflatten(graphdef, flat).a == 4.0
    assert (new.a, other.a) == (1.0, 3.0)
    assert other.b is new.b


def test_what_nnx_split_has_split_is_made_anew():
    """A plain GraphDef has no numbers, so it never stands for an object of the context."""
    pair = Pair()
    with nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            ctx.split(pair)
        with nnx.merge_context("test", inner=False) as ctx:
            assert ctx.merge(*nnx.split(pair)) is not pair


# --- updates ---


def change_everything(m):
    m.scale[...] += 1.0
    m.table = m.table * 2
    m.sizes.append(3)
    m.added = {"k": nnx.Param(m.scale.value * 10)}
    m.pairs[0].a, m.pairs[0].b = m.pairs[0].b, m.pairs[0].a
    m.pairs = (m.pairs[0], m.pairs[1] + 1)
    m.scale.set_metadata(tag="seen")
    m.me = m


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f, jax.checkpoint], ids=["jit", "none", "remat"])
def test_every_kind_of_change_comes_back_to_the_same_objects(transform):
    """Values, arrays, static values, new and swapped objects, metadata, cycles; what was there keeps its identity."""
    m = Mixed()
    pair, scale, variables = m.pairs[0], m.scale, (m.pairs[0].a, m.pairs[0].b)
    assert update(transform(inside_of(change_everything)), m) is m
    assert m.scale is scale
    assert scale == 2.0
    assert scale.get_metadata("tag") == "seen"
    assert m.table.tolist() == [0.0, 2.0, 4.0]
    assert m.sizes == [1, 2, 3]
    assert m.added["k"] == 20.0
    assert m.pairs[0] is pair
    assert m.pairs[1] == 6.0
    assert (pair.b, pair.a) == variables
    assert m.me is m
    m.added["k"].set_value(0.0)  # a new object belongs to the caller


def test_what_did_not_change_is_not_touched():
    """Without a transformation, unchanged values keep their very array, static values their very object."""
    m = Mixed()
    table, sizes, options, value = m.table, m.sizes, m.options, m.pairs[0].a.value
    stamp = table_of(m).stamp
    update(inside_of(lambda m: m.scale.set_value(jnp.array(3.0))), m)
    assert m.scale == 3.0
    assert stamp.valid  # so a compiled function finds its layout
    update(inside_of(lambda m: setattr(m, "note", "seen")), m)
    assert m.note == "seen"
    assert m.table is table
    assert m.sizes is sizes
    assert m.options is options
    assert m.pairs[0].a.value is value


def test_an_array_that_is_an_attribute_is_written_by_itself():
    """A node that gets another array where it held one, and nothing else."""
    m = Mixed()
    stamp = table_of(m).stamp
    update(jax.jit(inside_of(lambda m: setattr(m, "table", m.table + 1))), m)
    assert m.table.tolist() == [1.0, 2.0, 3.0]
    assert stamp.valid


def test_a_class_is_changed_in_place():
    """The class of an object is part of its structure."""

    class Renamed(Pair):
        pass

    pair = Pair()
    update(jax.jit(inside_of(lambda m: setattr(m, "__class__", Renamed))), pair)
    assert type(pair) is Renamed


def test_one_compiled_function_serves_objects_of_one_structure():
    """New objects are told from those of the caller, however many the update holds besides."""
    traces = []

    def change(m):
        traces.append(1)
        m.new = Pair(m.a.value * 10)

    inside = jax.jit(inside_of(change))
    for count in range(4):
        pair, others = Pair(float(count)), [Pair() for _ in range(count)]
        with nnx.update_context("test"):
            with nnx.split_context("test") as ctx:
                split = ctx.split(pair)
                ctx.split(others)
            split = inside(*split)
            with nnx.merge_context("test", inner=False) as ctx:
                assert ctx.merge(*split) is pair
        assert pair.new.a == count * 10
        assert pair.new not in others
        assert all(not hasattr(other, "new") for other in others)
    assert len(traces) == 1


def test_an_inner_function_can_be_applied_twice():
    """The outcome of an inner split can be merged inside again; the objects keep their numbers, new ones too."""

    def change(m):
        m.a[...] *= 3.0
        m.parts = [*getattr(m, "parts", []), Pair(m.a.value)]

    inside = jax.jit(inside_of(change))
    pair = Pair()
    with nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            split = ctx.split(pair)
        split = inside(*inside(*split))
        with nnx.merge_context("test", inner=False) as ctx:
            assert ctx.merge(*split) is pair
    assert [part.a.value.item() for part in pair.parts] == [3.0, 9.0]


def test_states_may_be_mapped_over_and_changed_on_the_way():
    """What is merged is what is written: batched leaves come back batched, and a State may be edited outside."""

    def inside(graphdef, state, by):
        with nnx.merge_context("test", inner=True) as ctx:
            m = ctx.merge(graphdef, state)
        m.a[...] += by
        m.new = nnx.Param(by)
        with nnx.split_context("test") as ctx:
            return ctx.split(m)

    pair = Pair()
    with nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            graphdef, state = ctx.split(pair)
        mapped = jax.vmap(inside, in_axes=(None, None, 0), out_axes=(None, 0))
        graphdef, state = mapped(graphdef, state, jnp.arange(3.0))
        state["b"] = state["b"].replace(jnp.zeros(3))
        with nnx.merge_context("test", inner=False) as ctx:
            ctx.merge(graphdef, state)
    assert pair.a.value.tolist() == [1.0, 2.0, 3.0]
    assert pair.b.value.tolist() == [0.0] * 3
    assert pair.new.value.tolist() == [0.0, 1.0, 2.0]


def test_updates_nest_one_in_the_other():
    """An update inside of the transformation of another, with the same tag."""

    def change(m):
        m.a[...] += 1.0
        m.inner = Pair()
        update(jax.jit(inside_of(lambda inner: inner.a.set_value(inner.a.value + 10.0))), m.inner)

    pair = Pair()
    update(jax.jit(inside_of(change)), pair)
    assert (pair.a, pair.inner.a) == (2.0, 11.0)


# --- refusals ---


@pytest.mark.parametrize("where", ["inside", "between", "outside"])
def test_a_failing_update_changes_nothing(where):
    """An exception inside, a State that does not fit, and one that is incomplete leave every object as it was."""
    m = Mixed()
    before = pack(m)

    def change(m):
        change_everything(m)
        if where == "inside":
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError if where == "inside" else StateMismatchError), nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            split = ctx.split(m)
        graphdef, state = jax.jit(inside_of(change))(*split)
        if where == "between":
            del state["scale"]
        else:
            state["more"] = nnx.Param(jnp.ones(7))
        with nnx.merge_context("test", inner=False) as ctx:
            ctx.merge(graphdef, state)
    after = pack(m)
    assert after.layout is before.layout
    assert all(x is y for x, y in zip(after.leaves, before.leaves, strict=True))
    assert all(x is y for x, y in zip(after.objects, before.objects, strict=True))
    with pytest.raises(ValueError, match="No update context"):
        nnx.current_update_context("test")
    assert update(jax.jit(inside_of(lambda m: None)), m) is m


def test_an_update_can_be_tried_again_after_a_failure():
    """A trace that failed halfway is forgotten by the next split outside, within one update context."""
    pair = Pair()

    def fails(m):
        raise RuntimeError("halfway")

    with nnx.update_context("test"):
        for change in (fails, lambda m: m.a.set_value(m.a.value + 1.0)):
            with nnx.split_context("test") as ctx:
                split = ctx.split(pair)
            try:
                split = jax.jit(inside_of(change))(*split)
            except RuntimeError:
                continue
            with nnx.merge_context("test", inner=False) as ctx:
                assert ctx.merge(*split) is pair
    assert pair.a == 2.0


def test_objects_of_an_outer_trace_are_refused_before_anything_is_written():
    """An update whose outer half runs inside raw JAX, on objects from outside, names the object and writes nothing."""
    m = Mixed()
    value = m.pairs[0].a.value

    def change(m):
        m.pairs[0].a[...] += 1.0
        m.scale[...] += 1.0

    with pytest.raises(nnx.TraceContextError, match=r"pairs\[0\]\.a"):
        jax.jit(lambda x: update(inside_of(change), m).scale * x)(1.0)
    assert m.pairs[0].a.value is value
    assert m.scale == 1.0

    def move(m):
        m.moved, m.pairs = m.pairs[0], None
        m.moved.a[...] += 1.0

    with pytest.raises(nnx.TraceContextError, match=r"moved\.a"):
        jax.jit(lambda x: update(inside_of(move), m).scale * x)(1.0)
    assert m.pairs[0].a.value is value
    assert not hasattr(m, "moved")


def test_an_update_of_an_inner_trace_can_be_abandoned():
    """An outer half that failed inside of a trace does not stand in the way of one at top level."""
    pair = Pair()
    with nnx.update_context("test"):

        def abandoned(x):
            with nnx.split_context("test") as ctx:
                ctx.split(Pair(x))
            raise RuntimeError("abandoned")

        with pytest.raises(RuntimeError, match="abandoned"):
            jax.jit(abandoned)(1.0)
        with nnx.split_context("test") as ctx:
            split = ctx.split(pair)
        split = jax.jit(inside_of(lambda m: m.a.set_value(m.a.value + 1.0)))(*split)
        with nnx.merge_context("test", inner=False) as ctx:
            assert ctx.merge(*split) is pair
    assert pair.a == 2.0


def test_a_second_split_inside_is_refused():
    """A split inside that has no merge before it would take the stand-ins for objects of the caller."""

    def inside(graphdef, state):
        split = inside_of(lambda m: None)(graphdef, state)
        with nnx.split_context("test"):
            return split

    with pytest.raises(ValueError, match=r"update 'test' has nothing to split.*single block"):
        update(jax.jit(inside), Pair())


def test_contexts_are_found_by_tag_in_their_own_thread():
    """Tags are any hashable values; another thread has no update of this one."""
    found = []

    def look():
        try:
            nnx.current_update_context(("tag", 1))
        except ValueError as error:
            found.append(str(error))

    with nnx.update_context(("tag", 1)) as outer, nnx.update_context("other"):
        assert nnx.current_update_context(("tag", 1)) is outer
        assert repr(outer) == "UpdateContext(('tag', 1))"
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(found) == 1
    assert "No update context found for tag ('tag', 1)" in found[0]


def test_a_merge_of_an_update_says_on_which_side_it_is():
    """``inner`` is required together with a tag."""
    with nnx.update_context("test"), pytest.raises(ValueError, match="inner=True"), nnx.merge_context("test"):
        pass


def test_an_update_keeps_no_object_alive():
    """After the update, and inside after the split, contexts hold neither objects nor tracers."""
    pair = Pair()
    with nnx.update_context("test") as update:
        with nnx.split_context("test") as ctx:
            split = ctx.split(pair)
        with jax.checking_leaks():
            split = jax.jit(inside_of(lambda m: None))(*split)
        assert update.inner is None
        with nnx.merge_context("test", inner=False) as ctx:
            ctx.merge(*split)
        assert update.outer is None
        with nnx.split_context("test") as ctx:
            ctx.split(pair)
    assert update.outer is None
