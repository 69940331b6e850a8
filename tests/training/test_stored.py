from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.core.errors import StateMismatchError
from nnxlib.core.traversals import path_key
from nnxlib.training.stored import StateDict, matched, restore, store, without_aliases

leaves = st.integers(0, 9).map(np.int32) | st.integers(0, 9).map(nnx.Param)
keys = st.sampled_from(["a", "b", "mu"])
states = st.recursive(
    st.dictionaries(keys, leaves, min_size=1, max_size=2),
    lambda inner: st.dictionaries(keys, leaves | inner, min_size=1, max_size=2),
    max_leaves=4,
).map(nnx.State)
trees = st.recursive(
    leaves | states | st.none(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(keys, inner, max_size=2)
        | st.dictionaries(keys, inner, max_size=2).map(OrderedDict)
        | st.tuples(inner, inner).map(lambda pair: jax.tree_util.Partial(max, *pair))
    ),
    max_leaves=8,
)


def described(tree):
    """The structure of a pytree, and its leaves."""
    values, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return structure, [x.get_value() if isinstance(x, nnx.Variable) else x for x in values]


@settings(max_examples=24)
@given(trees)
def test_restore_undoes_store(tree):
    """For every nesting of tuples, lists, dicts, States and foreign pytrees; also when stored twice."""
    stored = store(tree, lambda leaf: leaf if isinstance(leaf, nnx.Variable) else nnx.Variable(leaf))
    assert described(restore(stored)) == described(tree)
    assert described(restore(store(stored, lambda variable: variable))) == described(tree)


@settings(max_examples=16)
@given(trees)
def test_storing_keeps_the_paths(tree):
    """A Variable has the path in nnx.state that its leaf has in the pytree."""
    holder = nnx.Dict(x=store((tree,), lambda leaf: leaf if isinstance(leaf, nnx.Variable) else nnx.Variable(leaf)))
    found = jax.tree_util.tree_flatten_with_path((tree,), is_leaf=lambda x: isinstance(x, nnx.Variable))[0]
    expected = {("x", *map(path_key, path)) for path, _ in found}
    assert set(nnx.state(holder).flat_state().paths) == expected


def test_levels_of_a_state_are_nodes():
    """Each level is a StateDict, which reports its changes; items are attributes."""
    stored = store(nnx.State({"a": {0: nnx.Param(1.0)}}), lambda variable: variable)
    assert (type(stored), type(stored.a), stored.a[0].value) == (StateDict, StateDict, 1.0)


def test_key_paths_are_those_of_a_state():
    """JAX writes the path of a moment in a stored state as in the State that the transformation made."""
    mu = nnx.State({"a": {"b": {0: nnx.Param(1.0)}}})
    keyed = [jax.tree_util.tree_flatten_with_path(x)[0] for x in (mu, store(mu, lambda variable: variable))]
    assert [jax.tree_util.keystr(path) for path, _ in keyed[1]] == ["['a']['b'][0].value"]
    assert [path for path, _ in keyed[1]] == [path for path, _ in keyed[0]]


def test_pure_gives_the_containers_back():
    """`as_pure` of an optimizer's state has the structure that optax made, so moments fit gradients and masks."""
    params = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    tree = (params, OrderedDict(b=[nnx.Param(1.0)], a=nnx.State({"x": {"y": nnx.Param(2.0)}})))
    stored = store(tree, lambda variable: nnx.OptVariable(variable.get_value()))
    assert type(stored[0]) is StateDict
    assert jax.tree.structure(nnx.as_pure(stored)[0]) == jax.tree.structure(nnx.as_pure(params))
    assert type(nnx.as_pure(stored)[1]) is OrderedDict
    assert type(nnx.as_pure(stored)[1]["a"]) is nnx.State
    assert jax.tree.map(jnp.add, nnx.as_pure(stored)[0], nnx.as_pure(params)).kernel.shape == (2, 3)
    assert type(nnx.as_pure(nnx.Dict(x=stored)).x[0]) is StateDict  # within an object it stays a node


def test_buffers_in_two_places_are_copied():
    """Arrays that are among the others or come twice are copied, once for each further place."""
    shared, own = jnp.ones(2), jnp.ones(3)
    first, second, third = without_aliases([shared, (own, own), 3], [shared])
    assert first is not shared
    assert second[0] is own
    assert second[1] is not own
    assert third == 3


def test_only_the_first_twenty_problems_are_listed():
    """And how many more there are."""
    expected = {("layers", i): nnx.Param(jnp.ones(2)) for i in range(25)}
    with pytest.raises(StateMismatchError, match=r"layers\[19\]: missing, .*\n  ... and 5 more\nPass another.$"):
        matched({}, expected, (), "This does not fit.", "Pass another.")
