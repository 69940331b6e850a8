"""Nested mappings as flat ones, and back."""

import copy
import operator
import pickle

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnxlib.core.errors import PathError
from nnxlib.core.state import from_flat_state
from nnxlib.core.traversals import (
    IntKey,
    empty_node,
    flatten_mapping,
    flatten_to_sequence,
    insert,
    sort_key,
    sorted_by_path,
    sorted_keys,
    unflatten_mapping,
)

keys = st.integers(0, 3) | st.sampled_from("abc")
nested = st.recursive(
    st.dictionaries(keys, st.floats(0, 1), max_size=3), lambda level: st.dictionaries(keys, level, max_size=3)
)


@given(nested)
def test_unflatten_inverts_flatten(xs):
    """Flattening with empty nodes and unflattening gives the same nested mapping, keys mixed or not."""
    assert unflatten_mapping(flatten_mapping(xs, keep_empty_nodes=True)) == xs


@given(nested)
def test_the_order_is_that_of_the_mapping(xs):
    """Leaves come depth first, in the order in which each level lists its keys."""

    def leaves(level):
        return [leaf for x in level.values() for leaf in (leaves(x) if isinstance(x, dict) else [x])]

    assert list(flatten_mapping(xs).values()) == leaves(xs)


def test_flatten_mapping_variants():
    """Empty levels, separators and whole levels are as asked for."""
    xs = {"b": {"c": 1, "d": {}}, "a": 2}
    assert flatten_mapping(xs) == {("b", "c"): 1, ("a",): 2}
    assert flatten_mapping(xs, keep_empty_nodes=True)["b", "d"] is empty_node
    assert flatten_mapping(xs, sep="/") == {"b/c": 1, "a": 2}
    assert flatten_mapping({"a": {0: 1}}, sep=".") == {"a.0": 1}
    assert flatten_mapping(xs, is_leaf=lambda path, x: path == ("b",)) == {("b",): xs["b"], ("a",): 2}
    assert flatten_mapping(xs, is_leaf=lambda path, x: True) == {(): xs}
    assert flatten_mapping({}, keep_empty_nodes=True) == {}
    assert flatten_to_sequence(xs) == [(("b", "c"), 1), (("a",), 2)]


def test_a_separator_that_gives_two_leaves_one_name_is_an_error():
    """Neither is lost: in a State, a list has the key 0 where a checkpoint may have "0"."""
    with pytest.raises(PathError, match=r"^With sep='/', \('a/b',\) and \('a', 'b'\) have the same name\. Choose"):
        flatten_mapping({"a/b": 1, "a": {"b": 2}}, sep="/")
    with pytest.raises(PathError, match=r"\(0,\) and \('0',\) have the same name"):
        flatten_mapping({0: 1, "0": 2}, sep="/")
    assert flatten_mapping({"a/b": 1, "a": {"b": 2}}, sep=".") == {"a/b": 1, "a.b": 2}


def test_is_leaf_is_asked_of_mappings_only():
    """A leaf is a leaf: `is_leaf` sees each level with its path, and nothing else."""
    seen = []
    flatten_mapping({"a": {"b": 1}, "c": 2}, is_leaf=lambda path, x: seen.append(path))
    assert seen == [(), ("a",)]


def test_unflatten_mapping_takes_pairs_and_separators():
    """Pairs do as well as a mapping, and `sep` splits names into keys."""
    assert unflatten_mapping([(("a", "b"), 1), (("c",), 2)]) == {"a": {"b": 1}, "c": 2}
    assert unflatten_mapping({"a/b": 1, "c": 2}, sep="/") == {"a": {"b": 1}, "c": 2}


@pytest.mark.parametrize("paths", [[("a", "b"), ("a",)], [("a",), ("a", "b")], [("a",), ("a", "b", "c")]])
def test_a_path_below_a_leaf_is_an_error(paths):
    """A leaf and a level at one path is an error in either order, which names the path."""
    with pytest.raises(PathError, match=r"^a is given a value, but also values below it"):
        unflatten_mapping([(path, 1) for path in paths])


@pytest.mark.parametrize("make", [unflatten_mapping, from_flat_state])
def test_text_is_no_path(make):
    """It would be taken for a path of its letters."""
    with pytest.raises(PathError, match=r"not text: write \('a\.b/c',\) or \('a', 'b', 'c'\)\.$"):
        make({"a.b/c": 1})
    with pytest.raises(PathError, match="not text"):
        make([(("a",), 1), ("bias", 2)])
    with pytest.raises(PathError, match="not text"):
        make([("a", empty_node), ("ab", 2)])
    assert make({"a": 1}) == {"a": 1}


def test_a_leaf_that_is_a_dict_is_never_written_into():
    """A mapping given as a leaf stays a leaf: paths below it clash with it, and it is not changed."""
    leaf = {}
    with pytest.raises(PathError):
        unflatten_mapping([(("a",), leaf), (("a", "b"), 1)])
    with pytest.raises(PathError):
        unflatten_mapping([(("a", "b"), 1), (("a",), leaf)])
    found = unflatten_mapping([(("a",), leaf), (("a",), {"c": 1}), (("b", "a"), leaf)])
    assert found == {"a": {"c": 1}, "b": {"a": {}}}
    assert leaf == {}


def test_the_error_names_the_leaf_however_deep_it_is():
    """Not the path below it."""
    with pytest.raises(PathError, match=r"^a\.b is given a value, but also values below it"):
        unflatten_mapping([(("a", "b"), 1), (("a", "b", "c", "d"), 1)])


def test_the_empty_path_is_an_error():
    """A leaf needs at least one key."""
    with pytest.raises(PathError, match="empty"):
        unflatten_mapping({(): 1})


def test_only_mappings_are_flattened():
    """Anything else is refused, by its type."""
    with pytest.raises(TypeError, match="got int"):
        flatten_mapping(5)


def test_depth_is_not_limited():
    """A chain of 3,000 levels is flattened and unflattened without recursion."""
    xs = 1.0
    for _ in range(3000):
        xs = {"next": xs}
    (path,) = flatten_mapping(xs)
    assert len(path) == 3000
    level = unflatten_mapping({path: 1.0})
    for _ in range(3000):
        level = level["next"]
    assert level == 1.0


def test_the_empty_node_is_one_pytree_without_leaves():
    """It survives copying and pickling as the same object, and JAX sees no leaf in it."""
    assert copy.deepcopy(empty_node) is pickle.loads(pickle.dumps(empty_node)) is empty_node
    assert jax.tree.leaves(empty_node) == []
    assert repr(empty_node) == "empty_node"


# --- keys ---


@given(st.lists(keys, unique=True))
def test_keys_have_one_order(level):
    """By `sort_key`, as JAX sorts them, and as stored: ints before strings, each kind by value."""
    expected = sorted(k for k in level if isinstance(k, int)) + sorted(k for k in level if isinstance(k, str))
    assert tuple(sorted(level, key=sort_key)) == sorted_keys(dict.fromkeys(level)) == tuple(expected)
    stored = {}
    for key in level:
        insert(stored, key, 0)
    assert sorted(stored) == [key.key for (key,), _ in jax.tree_util.tree_leaves_with_path(stored)] == expected
    assert list(stored) == level


def test_paths_sort_key_by_key():
    """`sorted_by_path` compares ints as numbers and puts them before strings at every depth."""
    paths = [("a", "x"), ("a", 10), ("a", 2, "y"), (3,)]
    assert sorted_by_path(paths) == [(3,), ("a", 2, "y"), ("a", 10), ("a", "x")]


def test_only_mixed_levels_pay():
    """Ints stay plain ints in a level of ints, and become `IntKey` once the first string comes."""
    level = {}
    insert(level, 1, "x")
    assert type(next(iter(level))) is int
    insert(level, "a", "y")
    insert(level, 2, "z")
    assert [type(key) for key in level] == [IntKey, str, IntKey]
    assert level == {1: "x", "a": "y", 2: "z"}


def test_an_int_key_is_an_int():
    """It equals, hashes, prints and pickles as the int it is, so the same treedef results."""
    key = IntKey(7)
    assert (key, hash(key), repr(key), f"{key}") == (7, hash(7), "7", "7")
    assert type(pickle.loads(pickle.dumps(key))) is IntKey
    assert [operator.lt(key, "a"), operator.gt("a", key), key > 6, key < 8] == [True] * 4
    assert [operator.gt(key, "a"), operator.lt("a", key), key > 7, key < 7] == [False] * 4
    assert jax.tree.structure({key: 0}) == jax.tree.structure({7: 0})
