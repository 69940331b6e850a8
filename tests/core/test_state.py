"""State and FlatState."""

import copy
import operator
import pickle
import re
from functools import reduce

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import treescope
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.timing import count_calls
from nnxlib.core.errors import ArgumentError, FilterOrderError, NonExhaustiveFiltersError, PathError, StateMismatchError
from nnxlib.core.filters import OfType, PathContains, PathIn
from nnxlib.core.state import (
    FlatState,
    State,
    create_path_filters,
    diff,
    filter_state,
    from_flat_state,
    map_state,
    merge_state,
    replace_by_pure_dict,
    restore_int_paths,
    split_state,
    to_flat_state,
    to_pure_dict,
)
from nnxlib.core.traversals import unflatten_mapping
from nnxlib.core.variables import BatchStat, Cache, Param, Variable

keys = st.integers(0, 12) | st.sampled_from(["a", "b", "c"])
leaves = st.builds(lambda kind, x: kind(x), st.sampled_from([Param, BatchStat]), st.floats(0, 1)) | st.floats(0, 1)
levels = st.recursive(
    st.dictionaries(keys, leaves, max_size=4), lambda level: st.dictionaries(keys, level | leaves, max_size=4)
)
without_empty = levels.map(lambda mapping: State(mapping).filter(...))


def model_state():
    return State(
        {
            "scale": Param(jnp.ones(3)),
            "norm": {"mean": BatchStat(jnp.zeros(3)), "bias": Param(jnp.zeros(3))},
            "layers": {i: {"kernel": Param(jnp.full((2, 2), float(i)))} for i in (0, 10, 2)},
        }
    )


def deep_state(depth=1000):
    mapping = {"kernel": Param(1.0)}
    for _ in range(depth):
        mapping = {"next": mapping, "bias": BatchStat(0.0)}
    return State(mapping)


# --- a mapping ---


def test_keys_and_attributes_reach_the_same_leaf():
    """Items and attributes read, write and delete the same entries, at every level."""
    state = model_state()
    assert state.layers[10].kernel is state["layers"][10]["kernel"]
    state.layers[10].bias = 1.0
    state["norm"]["extra"] = 2.0
    assert (state["layers"][10]["bias"], state.norm.extra) == (1.0, 2.0)
    del state.layers[10].bias
    del state["norm"]["extra"]
    assert "bias" not in state.layers[10]
    assert state == model_state()


def test_levels_are_views():
    """A level is a State that writes through to the one it was taken from."""
    state = model_state()
    norm = state.norm
    norm.bias = 5.0
    state["norm"]["mean"] = 6.0
    assert (state.norm.bias, norm.mean) == (5.0, 6.0)
    assert type(norm) is State


def test_a_state_is_a_snapshot():
    """Making or assigning a State copies the levels and keeps the leaves; what it was made of stays as it is."""
    source = {"a": {"b": Param(1.0)}}
    state = State(source)
    assert state.a.b is source["a"]["b"]
    state.a.c = 1
    other = State({"x": state.a})
    other["y"] = state
    other.x.d = other.y.a.d = 2
    assert list(source["a"]) == ["b"]
    assert list(state.a) == ["b", "c"]


def test_it_is_made_of_mappings_or_pairs():
    """Nested mappings of any kind, States among them, and pairs make the same State."""
    expected = State({"a": {"b": 1}, "c": 2})
    assert State([("a", State({"b": 1})), ("c", 2)]) == expected
    assert State(expected) == expected
    assert type(State({"a": State({"b": 1})}).raw_mapping["a"]) is dict


@pytest.mark.parametrize("other", [jnp.ones(2), (jnp.ones(3),), "ab", Param(jnp.ones(2))])
def test_it_is_made_of_nothing_else(other):
    with pytest.raises(
        ArgumentError, match=r"a mapping, or of \(key, value\) pairs, but got .*\. Of a model: nnx\.state\(model\)"
    ):
        State(other)


def test_it_iterates_like_a_dict():
    """Order of insertion, length, truth, containment and the methods of a mutable mapping."""
    state = model_state()
    assert list(state) == ["scale", "norm", "layers"]
    assert list(state.layers) == [0, 10, 2]
    assert len(state) == 3
    assert "norm" in state
    assert 10 in state.layers
    assert "zz" not in state
    assert [type(value) for value in state.values()] == [Param, State, State]
    assert state.get("zz", 5) == 5
    assert type(state.pop("scale")) is Param
    state.update({"new": {"x": 1}})
    assert state.new.x == 1
    assert state
    assert not State({})


def test_asking_for_a_key_that_may_be_missing_is_cheap():
    """Code that runs at each step asks by ``get``: no error is made, whose hint compares the key with all others."""
    state = State(wide(1000))
    assert count_calls(lambda: state.get("layer")) < 10


def test_missing_keys_and_attributes():
    """A missing key is a KeyError; it and a missing attribute name the keys there are, for reading and deleting."""
    state = model_state()
    with pytest.raises(KeyError, match="zz") as missing:
        state.norm["zz"]
    assert missing.value.args == ("zz",)
    assert missing.value.__notes__ == ["State has no key 'zz'; its keys begin with: 'mean', 'bias'."]
    with pytest.raises(KeyError) as missing:
        state["norm", "mean"]
    assert missing.value.__notes__[0].endswith("; a path is looked up in state.flat_state().")
    with pytest.raises(KeyError, match="zz"):
        del state["zz"]
    with pytest.raises(AttributeError, match="no key 'means'; its keys begin with: 'mean', 'bias'") as error:
        state.norm.means
    assert (error.value.name, error.value.obj) == ("means", state.norm)  # Python adds "Did you mean: 'mean'?"
    with pytest.raises(AttributeError, match="begin with: none"):
        del State({}).zz
    assert not hasattr(state, "zz")
    assert not hasattr(State.__new__(State), "zz")  # as a debugger may ask of one that is not made yet


def test_names_of_methods_are_keys_only():
    """A key may have the name of a method; the attribute is still the method."""
    state = State({})
    state["split"] = 1
    state.filter = 2
    assert (state["split"], state["filter"]) == (1, 2)
    assert callable(state.split)
    assert callable(state.filter)


def test_dunder_attributes_are_not_keys():
    """Libraries that mark objects do not add leaves: a parametrised State has only its own keys."""
    assert list(State[str, int]({"a": 1})) == ["a"]
    with pytest.raises(AttributeError, match="takes no attribute"):
        State({}).__mark__ = 1


def test_dir_lists_the_keys():
    """Names that can be typed are offered for completion."""
    assert {"norm", "split"} <= set(dir(State({"norm": 1, 3: 2})))


def test_raw_mapping_is_the_storage():
    """The nested dicts themselves, shared with the State."""
    state = model_state()
    assert type(state.raw_mapping["norm"]) is dict
    state.raw_mapping["norm"]["new"] = 1
    assert state.norm.new == 1


# --- comparing, copying, looking ---


def test_vars_are_the_levels():
    """As in flax.nnx: code that walks through the attributes of a State finds its leaves, and not nothing."""
    state = model_state()
    assert dict(vars(state)) == {"_mapping": state.raw_mapping}
    assert list(vars(state)["_mapping"]) == list(state)


def test_equality_is_by_path_type_and_value():
    """Same paths in any order, same types and metadata of Variables, equal arrays; nested mappings compare, too."""
    assert model_state() == model_state()
    assert State({"a": 1, "b": {"c": 2}}) == {"b": {"c": 2}, "a": 1}
    assert State({"a": jnp.ones(2)}) == State({"a": np.ones(2)})
    different = [
        {"a": Param(jnp.ones(2))},
        {"a": BatchStat(jnp.ones(2))},
        {"a": Param(jnp.zeros(2))},
        {"a": Param(jnp.ones(3))},
        {"a": Param(jnp.ones(2), tag="x")},
        {"a": jnp.ones(2)},
        {"b": Param(jnp.ones(2))},
        {"a": {}},
        {},
    ]
    for i, x in enumerate(different):
        for j, y in enumerate(different):
            assert (State(x) == State(y)) == (i == j)
    assert State({}) != 0
    with pytest.raises(TypeError, match="unhashable"):
        hash(State({}))


@given(levels)
def test_copies_and_pickles_are_equal_and_independent(mapping):
    """copy, deepcopy, pickle and cloudpickle keep keys, their order, empty levels and leaves."""
    state = State(mapping)
    twins = [copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    for twin in (*twins, cloudpickle.loads(cloudpickle.dumps(state))):
        assert twin == state
        assert repr(twin) == repr(state)
        twin["new"] = 1
        assert "new" not in state


def test_copy_shares_leaves_and_deepcopy_does_not():
    """A copy has its own levels; a deep copy also its own Variables, shared ones still shared."""
    shared = Param(jnp.ones(2))
    state = State({"a": {"b": shared}, "c": shared})
    shallow, deep = copy.copy(state), copy.deepcopy(state)
    shallow.a.x = 1
    assert "x" not in state.a
    assert shallow.a.b is shared
    assert deep.a.b is deep.c
    assert deep.a.b is not shared


def test_repr_shows_the_nesting():
    """A level is one line where it fits, else a line for each key; long leaves are aligned."""
    assert repr(State({})) == "State({})"
    assert repr(State({"a": {0: Param(1.0), 1: {}}, 2: "x"})) == "State({'a': {0: Param(1.0), 1: {}}, 2: 'x'})"
    assert repr(State({"x": jnp.eye(1).repeat(2, 0)})).count("\n") == 3
    state = State({"layers": {0: {"bias": 1.0}, 1: dict.fromkeys(("kernel", "bias"), "x" * 40)}, "x": jnp.ones((2, 2))})
    assert repr(state) == (
        "State({\n"
        "  'layers': {\n"
        "    0: {'bias': 1.0},\n"
        "    1: {\n"
        "      'kernel': 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx',\n"
        "      'bias': 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx',\n"
        "    },\n"
        "  },\n"
        "  'x': Array([[1., 1.],\n"
        "              [1., 1.]], dtype=float32),\n"
        "})"
    )


@pytest.mark.parametrize("n", range(60, 105))
def test_repr_fits_into_a_hundred_columns(n):
    """At every length of a level it is one line of at most 100 columns, or several."""
    lines = repr(State({"a": {"b": "x" * (n - 20), "c": 1}, "d": {}})).splitlines()
    assert all(len(line) <= 100 for line in lines)
    nested = repr(State({"long key to indent": {"a": {"b": "x" * (n - 40), "c": 1}}, "d": "x" * 80})).splitlines()
    assert all(len(line) <= 100 for line in nested)


@given(levels)
def test_the_repr_makes_an_equal_state(mapping):
    """`eval(repr(state)) == state`, for leaves of which that is true."""
    state = State(mapping)
    assert eval(repr(state), {"State": State, "Param": Param, "BatchStat": BatchStat}) == state


# treescope 0.1 touches names that newer releases of NumPy and JAX deprecate.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_treescope_shows_the_leaves():
    """Both kinds of State render as what makes them."""
    state = State({"layers": {0: {"bias": Param(1.0)}, "x": 2}})
    assert treescope.render_to_text(state) == "State({'layers': {0: {'bias': Param(value=1.0)}, 'x': 2}})"
    assert treescope.render_to_text(State({"a": 1}).flat_state()) == "FlatState([(('a',), 1)])"


# --- as a pytree ---


@given(levels)
def test_it_is_a_pytree_of_its_leaves(mapping):
    """Leaves come in the order of the FlatState, under a DictKey per level, and unflatten to an equal State."""
    state = State(mapping)
    found, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, Variable))
    flat = state.flat_state()
    assert [tuple(entry.key for entry in path) for path, _ in found] == list(flat.paths)
    assert all(leaf is expected for (_, leaf), expected in zip(found, flat.leaves))
    assert all(type(entry) is jax.tree_util.DictKey for path, _ in found for entry in path)
    assert treedef.unflatten([leaf for _, leaf in found]) == state


@given(levels)
def test_the_treedef_follows_from_the_content(mapping):
    """Neither the order of insertion, nor views, nor keys deleted on the way show in the structure."""
    state = State(mapping)
    other = State({})
    for key in reversed(list(mapping)):
        other[key] = mapping[key]
    other["extra"], other[99] = 1, 2
    del other.extra, other[99]
    assert jax.tree.structure(other) == jax.tree.structure(state)


def test_mixed_keys_in_one_level():
    """Ints and strings share a level, also when one of them is added through a view."""
    state = State({"a": {1: 1.0}})
    state.a.x = 2.0
    state.a[0] = 3.0
    state[7] = 4.0
    assert jax.tree.leaves(state) == [4.0, 3.0, 1.0, 2.0]
    assert jax.tree.map(lambda x: -x, state) == State({7: -4.0, "a": {0: -3.0, 1: -1.0, "x": -2.0}})
    assert state.flat_state().paths == ((7,), ("a", 0), ("a", 1), ("a", "x"))
    assert (state[7], state.a[0], 1 in state.a) == (4.0, 3.0, True)
    assert jax.jit(lambda s: s)(state) == state


def test_tree_map_over_values_and_over_variables():
    """`jax.tree.map` reaches the arrays; with `is_leaf` it reaches the Variables, and may put anything there."""
    state = model_state()
    doubled = jax.tree.map(lambda x: x * 2, state)
    assert type(doubled.norm.mean) is BatchStat
    np.testing.assert_array_equal(doubled.layers[10].kernel.value, np.full((2, 2), 20.0))
    kinds = jax.tree.map(type, state, is_leaf=lambda x: isinstance(x, Variable))
    assert kinds.norm == {"mean": BatchStat, "bias": Param}


def test_unflatten_accepts_anything():
    """JAX puts strings, None, objects and Nones into trees: none of them is looked at."""
    treedef = jax.tree.structure(State({"a": 1, "b": {"c": 2, "d": 3}}))
    thing = object()
    state = treedef.unflatten([thing, None, {"x": 1}])
    assert state.a is thing
    assert state.b.c is None
    assert state.b.d.x == 1
    nested = treedef.unflatten([State({"y": 1}), 2, 3])
    assert nested.flat_state().paths == (("a", "y"), ("b", "c"), ("b", "d"))
    assert jax.tree.leaves(nested) == [1, 2, 3]


def test_optax_takes_a_state():
    """An optimizer step on a State of Params gives a State of Params."""
    params = model_state().filter(Param)
    tx = optax.adam(0.1)
    grads = jax.grad(lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)))(params)
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert float(new.scale.value[0]) == pytest.approx(0.9, abs=1e-4)


def test_subclasses_are_pytrees():
    """A subclass flattens and unflattens as itself, and so are its levels."""

    class Special(State):
        pass

    state = Special({"a": {"b": 1}})
    assert type(jax.tree.map(lambda x: x + 1, state)) is Special
    assert type(state.a) is Special
    assert type(Special.from_flat_path({("a",): 1})) is Special
    assert type(Special.merge(state, {"c": 2})) is Special


def wide(n):
    return {i: {"kernel": 1.0, "bias": 2.0} for i in range(n // 2)}


def test_flattening_leaves_the_levels_to_jax():
    """However many levels and leaves there are, flattening and unflattening make the same few calls."""

    def calls(n):
        state = State({"layers": wide(n)})
        leaves, treedef = jax.tree.flatten(state)
        return count_calls(lambda: jax.tree.flatten(state)), count_calls(lambda: treedef.unflatten(leaves))

    assert calls(2000) == calls(10)
    assert max(calls(10)) < 10


@pytest.mark.parametrize(
    "f",
    [
        lambda state: State(state.raw_mapping),
        lambda state: from_flat_state(to_flat_state(state)),
        lambda state: state.split(PathContains("bias"), ...),
        lambda state: replace_by_pure_dict(state, state.to_pure_dict()),
    ],
)
def test_work_is_linear_in_the_leaves(f):
    """Twice the leaves take twice the calls."""
    small, large = State(wide(1000)), State(wide(2000))
    assert count_calls(lambda: f(large)) < 2.1 * count_calls(lambda: f(small))


# --- nested and flat ---


@given(without_empty)
def test_from_flat_state_inverts_to_flat_state(state):
    """A State without empty levels is its flat form, from a FlatState, pairs in any order, or a mapping."""
    flat = state.flat_state()
    assert from_flat_state(flat) == state
    assert from_flat_state(list(flat)[::-1]) == state
    assert from_flat_state(dict(flat)) == State.from_flat_path(flat) == flat.to_nested_state() == state
    assert type(from_flat_state(flat, cls=dict)) is dict


def test_from_flat_state_refuses_clashes():
    """A leaf that is also a level is an error that names the path; so is the empty path."""
    with pytest.raises(PathError, match=r"layers\[0\] is given a value"):
        from_flat_state([(("layers", 0), 1), (("layers", 0, "kernel"), 2)])
    with pytest.raises(PathError, match="empty"):
        from_flat_state({(): 1})


def test_to_flat_state_takes_mappings_only():
    """Any nested mapping will do; anything else is refused by its type."""
    assert to_flat_state({"b": {2: 1, "x": 2, 1: 3}}).paths == (("b", 1), ("b", 2), ("b", "x"))
    with pytest.raises(TypeError, match="got int"):
        to_flat_state(5)
    with pytest.raises(AttributeError, match=r"got Param\. Of a model: nnx.state\(model\)"):  # as in flax.nnx
        to_flat_state(Param(1.0))


def test_flat_state_is_a_sorted_sequence():
    """Pairs sorted by path, ints as numbers and before strings; indexing, slicing, containment."""
    flat = FlatState({("a", "x"): 0, ("a", 10): 1, ("a", 2): 2, (3,): 3})
    assert flat.paths == ((3,), ("a", 2), ("a", 10), ("a", "x"))
    assert flat.leaves == [3, 2, 1, 0]
    assert flat[0] == ((3,), 3)
    assert flat[1:3] == FlatState([(("a", 2), 2), (("a", 10), 1)], sort=True)
    assert (("a", 2), 2) in flat
    assert len(flat) == len(list(flat)) == 4
    assert dict(flat)["a", 10] == 1
    assert FlatState([(("b",), 1), (("a",), 2)], sort=False).paths == (("b",), ("a",))


def test_leaves_of_a_flat_state_can_be_replaced_by_path():
    """As in code that loads weights into `state.flat_state()`; the State that it was made of stays as it was."""
    state = State({"layers": {0: {"w": Param(jnp.zeros(2))}}, "b": Param(jnp.zeros(1))})
    flat = state.flat_state()
    flat["layers", 0, "w"] = flat["layers", 0, "w"].replace(jnp.ones(2))
    assert state["layers"][0]["w"].sum() == 0
    assert dict(flat)["layers", 0, "w"].sum() == 2
    assert len(flat) == 2
    state.update(unflatten_mapping(flat))
    assert state["layers"][0]["w"].sum() == 2
    with pytest.raises(KeyError):
        flat["layers", 1, "w"] = 0


def test_flat_state_is_looked_up_by_path():
    """As the dict by path that it was in earlier versions of flax.nnx; it still yields pairs, and so does dict(...)."""
    param = Param(1.0)
    flat = State({"a": {0: param}, "b": 2}).flat_state()
    assert flat["a", 0] is flat.get(("a", 0)) is param
    assert ("a", 0) in flat
    assert ("a",) not in flat
    assert (("a", 0), param) in flat
    assert (("a", 0), Param(2.0)) not in flat
    assert flat.get(("a",), 5) == 5
    assert flat.keys() - {("b",)} == {("a", 0)}
    assert flat.values() == flat.leaves
    assert list(flat.items()) == list(flat) == list(dict(flat).items())
    assert type(flat[0]) is tuple
    with pytest.raises(KeyError):
        flat["a",]


def test_flat_state_compares_copies_and_prints():
    """Equal paths and equal leaves; copies and pickles are equal; the repr lists one pair a line."""
    flat = model_state().flat_state()
    assert flat == model_state().flat_state()
    assert flat != FlatState([])
    assert flat != list(flat)
    assert FlatState({("a",): 1}) != FlatState({("a",): 2})
    assert copy.deepcopy(flat) == pickle.loads(pickle.dumps(flat)) == flat
    assert repr(FlatState([])) == "FlatState([])"
    assert repr(FlatState([(("a",), 1)])) == "FlatState([\n  (('a',), 1),\n])"


def test_flat_state_is_a_pytree_that_names_paths():
    """Its leaves are its leaves, under keys that are the paths."""
    flat = FlatState([(("a", 0), 1.0), (("b",), 2.0)])
    assert jax.tree.map(lambda x: x + 1, flat) == FlatState([(("a", 0), 2.0), (("b",), 3.0)])
    ((first,), _), _ = jax.tree_util.tree_leaves_with_path(flat)
    assert first.key == ("a", 0)


def test_pairs_of_a_flat_state_have_no_hash():
    """A set of them was a set of paths once, so code that selects leaves by it would silently select none."""
    flat = FlatState([(("a", 0), 1.0), (("b",), 2.0)])
    with pytest.raises(TypeError, match=r"for its paths write set\(flat.paths\)"):
        set(flat)
    assert dict(flat) == {("a", 0): 1.0, ("b",): 2.0}
    assert list(flat) == [(("a", 0), 1.0), (("b",), 2.0)]
    assert [*zip(*flat, strict=True)] == [(("a", 0), ("b",)), (1.0, 2.0)]
    assert jax.tree.leaves(list(flat)) == ["a", 0, 1.0, "b", 2.0]
    assert jax.tree.map(lambda x: x, list(flat)) == list(flat)


def test_flat_state_from_sorted_keys_values():
    """Paths and leaves are taken as they are, one for one."""
    flat = FlatState.from_sorted_keys_values((("a",), ("b",)), [1, 2])
    assert flat == FlatState([(("a",), 1), (("b",), 2)])
    with pytest.raises(ValueError, match="2 paths was given 1 leaves"):
        FlatState.from_sorted_keys_values((("a",), ("b",)), [1])


def test_flat_state_splits_filters_and_merges():
    """The same as of a State, in flat form; merging sorts, and of two leaves at one path the later stays."""
    flat = model_state().flat_state()
    params, rest = flat.split(Param, ...)
    assert (len(params), len(rest)) == (5, 1)
    assert flat.filter(BatchStat) == rest
    assert FlatState.merge(rest, params) == flat
    assert FlatState.merge({("b",): 1}, [(("a",), 2), (("b",), 3)]) == FlatState([(("a",), 2), (("b",), 3)])
    with pytest.raises(NonExhaustiveFiltersError, match=r"norm\.mean: BatchStat"):
        flat.split(Param)


# --- selecting and combining ---

filters = st.lists(st.sampled_from([Param, BatchStat, float, PathContains("a"), PathContains(0), None]), max_size=3)


@given(without_empty, filters)
def test_merge_inverts_split(state, filters):
    """What is split with `...` last is whole again when merged, in any order, each leaf the very same."""
    parts = state.split(*filters, ...)
    parts = parts if filters else (parts,)
    for order in (parts, parts[::-1]):
        merged = State.merge(*order)
        assert merged == state
        assert all(a is b for a, b in zip(merged.flat_state().leaves, state.flat_state().leaves))


@given(without_empty, filters)
def test_split_and_filter_agree(state, filters):
    """`filter` gives the same parts without the rest, and the functions are the methods."""
    parts = state.split(*filters, ...)
    if filters:
        selected = state.filter(*filters)
        assert (selected if len(filters) > 1 else (selected,)) == parts[:-1]
        assert filter_state(state, *filters) == selected
    assert split_state(state, *filters, ...) == parts


def test_one_filter_gives_one_state_several_a_tuple():
    """The result has the form of the question; what matches nothing gives an empty State."""
    state = model_state()
    assert type(state.filter(Param)) is State
    assert type(state.split(...)) is State
    params, caches = state.filter(Param, Cache)
    assert len(params.flat_state()) == 5
    assert caches == State({})
    with pytest.raises(TypeError, match="first"):
        state.filter()


def test_split_lists_what_is_left_over():
    """The error names the filters, the paths that are left with their types, and the remedy."""
    with pytest.raises(NonExhaustiveFiltersError) as error:
        model_state().split(BatchStat, PathContains("kernel"))
    assert str(error.value) == (
        "Non-exhaustive filters, got a non-empty remainder: none of OfType(BatchStat), "
        "PathContains('kernel', exact=True) takes these leaves:\n"
        "  norm.bias: Param\n"
        "  scale: Param\n"
        "Add `...` as the last filter to get them too, or use `filter` to leave them out."
    )
    with pytest.raises(NonExhaustiveFiltersError, match=r"\.\.\. and 10 more"):
        State(dict.fromkeys(range(30), 1)).split(str)
    with pytest.raises(FilterOrderError, match="be used as the last filters"):
        model_state().split(..., Param)


def test_merge_takes_the_later_leaf():
    """Of two leaves at one path the later counts; a leaf at the path of a level is an error, in either order."""
    assert merge_state({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"b": 4}) == {"a": {"x": 1, "y": 3}, "b": 4}
    assert merge_state({"a": 1}, {"a": {}}) == {"a": 1}
    assert type(merge_state({"a": 1}, cls=dict)) is dict
    for order in ([{"a": 1}, {"a": {"b": 2}}], [{"a": {"b": 2}}, {"a": 1}]):
        with pytest.raises(PathError, match=r"^a is given a value"):
            State.merge(*order)


def test_union_and_difference():
    """`a | b` merges, `a - b` leaves the paths that b does not have; a dict may stand on either side of `|`."""
    a, b = State({"x": 1, "y": {"z": 2, "w": 3}}), State({"y": {"z": 9}})
    assert a | b == a | {"y": {"z": 9}} == State({"x": 1, "y": {"z": 9, "w": 3}})
    assert {"y": {"z": 9}} | a == a
    assert a - b == a - {"y": {"z": 0}} == diff(a, b) == State({"x": 1, "y": {"w": 3}})
    assert a - a == State({})
    for operation in (operator.or_, operator.sub):
        with pytest.raises(TypeError, match="unsupported operand"):
            operation(a, 1)


def test_map_gives_path_and_leaf():
    """The function sees the path and the leaf of each, and its results stand in their place."""
    state = State({"a": {0: 1}, "b": 2})
    assert state.map(lambda path, x: (path, x)) == State({"a": {0: (("a", 0), 1)}, "b": (("b",), 2)})
    assert map_state(lambda path, x: x + 1, state) == {"a": {0: 2}, "b": 3}


def test_create_path_filters():
    """A State of axes becomes one path filter for each distinct value."""
    state = State({"a": Param(0), "b": {"c": Param(None), "d": Param(0)}})
    assert create_path_filters(state) == {PathIn(("a",), ("b", "d")): 0, PathIn(("b", "c")): None}


# --- pure dicts ---


def test_pure_dicts_round_trip():
    """A State is restored from its pure dict: values, types and metadata; hooks do not run."""
    state = State({"a": {0: Param(1.0, tag="x", on_get_value=lambda v, x: x + 100)}, "b": 2})
    pure = state.to_pure_dict()
    assert pure == to_pure_dict(state) == {"a": {0: 1.0}, "b": 2}
    assert type(pure["a"]) is dict
    other = State({"a": {0: Param(0.0, tag="y")}, "b": 0})
    variable = other.a[0]
    other.replace_by_pure_dict(pure)
    assert other.to_pure_dict() == pure
    assert (type(other.a[0]), other.a[0].tag) == (Param, "y")
    assert variable.value == 0.0  # a State is changed, not the Variables that others may hold
    assert state.to_pure_dict(lambda leaf: type(leaf)) == {"a": {0: Param}, "b": int}


def test_values_that_are_pytrees_round_trip():
    """A Variable may hold a dict: it stays whole."""
    state = State({"a": Param({"x": 1, "y": {"z": 2}})})
    state.replace_by_pure_dict({"a": {"x": 3, "y": {"z": 4}}})
    assert state.a.value == {"x": 3, "y": {"z": 4}}
    with pytest.raises(StateMismatchError, match=r"b\.x: unexpected int"):
        State({"b": Param(1.0)}).replace_by_pure_dict({"b": {"x": 1}})


def test_int_keys_are_found_under_their_names():
    """A file that knows only string keys restores int keys, in part or in whole, also from Variables."""
    state = model_state()
    state.replace_by_pure_dict({"layers": {"10": {"kernel": 7.0}, 2: {"kernel": Param(8.0)}}, "norm": {}})
    assert (state.layers[10].kernel.value, state.layers[2].kernel.value) == (7.0, 8.0)
    assert list(state.layers) == [0, 10, 2]
    mixed = State({0: 1, "0": 2})
    mixed.replace_by_pure_dict({"0": 3})
    assert mixed == State({0: 1, "0": 3})


def test_a_further_key_value_is_for_variables():
    """As in a checkpoint; what is no Variable has none."""
    state = State({"a": 1.0, "v": Param(2.0)})
    state.replace_by_pure_dict({"v": {"value": 3.0}})
    assert state.v.value == 3.0
    with pytest.raises(StateMismatchError, match=r"a\.value: unexpected float"):
        state.replace_by_pure_dict({"a": {"value": 3.0}})


def test_none_replaces_what_has_leaves():
    """In place of a value without leaves, which a checkpoint stores as None, it changes nothing."""
    state = State({"a": Param(1.0), "empty": Param(())})
    state.replace_by_pure_dict({"a": None, "empty": None})
    assert (state.a.value, state.empty.value) == (None, ())


def test_replace_fn_decides():
    """`replace_fn(leaf, value)` makes the new leaf."""
    state = State({"a": Param(1.0), "b": 2})
    replace_by_pure_dict(state, {"a": 5.0}, lambda leaf, value: (type(leaf), value))
    assert state == {"a": (Param, 5.0), "b": 2}


def test_unknown_paths_are_listed_and_nothing_is_replaced():
    """All of them at once, with the paths there are; the State is as before."""
    state = model_state()
    pure = {"scale": 0.0, "layers": {"1": {"kernel": 1.0}}, "norm": {"mean": {"x": 2}}, "extra": 3}
    with pytest.raises(StateMismatchError) as error:
        state.replace_by_pure_dict(pure)
    assert str(error.value).startswith(
        "The dict does not fit the State; nothing was replaced.\n"
        "  extra: unexpected int\n  layers['1'].kernel: unexpected float\n  norm.mean.x: unexpected int\n"
        "Remove or rename these. The State has leaves at:\n"
    )
    assert "\n  norm.mean\n" in str(error.value)
    assert state == model_state()
    with pytest.raises(StateMismatchError, match="norm: unexpected float"):
        state.replace_by_pure_dict({"norm": 1.0})


def test_restore_int_paths():
    """Only what Python writes for an int becomes one; empty levels stay."""
    pure = {"a": {"0": 1, "-3": 2, "01": 3, "1_0": 4, "x": 5, 7: 6}, "1": {}}
    assert restore_int_paths(pure) == {"a": {0: 1, -3: 2, "01": 3, "1_0": 4, "x": 5, 7: 6}, 1: {}}


# --- depth ---


def test_a_chain_of_a_thousand_levels():
    """Everything but JAX's own functions works at any depth, without recursion."""
    state = deep_state()
    params, stats = state.split(Param, ...)
    assert (len(params.flat_state()), len(stats.flat_state())) == (1, 1000)
    assert State.merge(params, stats) == state
    assert from_flat_state(to_flat_state(state)) == state
    assert state.map(lambda path, x: len(path)).bias == 1
    pure = state.to_pure_dict()
    state.replace_by_pure_dict(pure)
    assert state - params == stats
    deepest = ("next",) * 1000
    assert reduce(operator.getitem, deepest, restore_int_paths(pure)) == {"kernel": 1.0}
    assert re.search(r"'next': (State\()?\{\.\.\.\}\)?, +# \d+ folded", repr(state))
    for twin in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert twin == state
    assert OfType(Param)(deepest, reduce(operator.getitem, deepest, state).kernel)


def test_a_repr_asks_each_leaf_once():
    """However many levels are tried on one line."""

    class Leaf:
        asked = 0

        def __repr__(self):
            Leaf.asked += 1
            return "x" * 60

    levels = {"a": {"b": {i: {"kernel": Leaf(), "bias": Leaf()} for i in range(4)}}}
    assert repr(State(levels)).count("x" * 60) == Leaf.asked == 8


@pytest.mark.parametrize(
    ("work", "limit"),
    [
        (pickle.dumps, 260),  # 390 with a State for each level
        (copy.copy, 230),  # 290 by way of a flat dict
        (State, 230),  # 360 with a State for each level
        (lambda state: state == copy.copy(state), 550),  # 1090
    ],
    ids=["pickle", "copy", "construct", "compare"],
)
def test_levels_are_walked_without_a_state_for_each(work, limit):
    state = State({"layers": {k: {"bias": k, "kernel": k} for k in range(10)}})
    assert count_calls(lambda: work(state)) < limit
