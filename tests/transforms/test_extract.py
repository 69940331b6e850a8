"""Trees of States: what stands for a Module in a tree, and how it becomes one again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.errors import AliasingError, PrefixError
from nnxlib.transforms.general import merge_inputs, split_inputs


class Pair(nnx.Module):
    def __init__(self, a=1.0, b=2.0):
        self.a = a if isinstance(a, nnx.Variable) else nnx.Param(jnp.asarray(a))
        self.b = b if isinstance(b, nnx.Variable) else nnx.BatchStat(jnp.asarray(b))


def test_a_tree_has_the_leaves_of_each_object_once():
    """Modules, Lists and Variables at any depth are replaced, shared leaves occur once, other leaves stay."""
    pair = Pair()
    tree = nnx.to_tree({"m": pair, "v": pair.a, "l": nnx.List([Pair(3.0, pair.b)]), "x": (4.0, None, "text")})
    assert jax.tree.leaves(tree) == [3.0, 2.0, 1.0, 4.0, "text"]
    assert all(isinstance(tree[key], nnx.NodeStates) for key in "mvl")
    back = nnx.from_tree(tree)
    assert back["m"].b is back["l"][0].b
    assert back["m"].a is back["v"]
    assert back["x"] == (4.0, None, "text")
    assert back["m"] is not pair


def test_a_single_object_is_a_tree_too():
    """The root may be a Module or a Variable."""
    assert nnx.from_tree(nnx.to_tree(Pair(7.0))).a == 7.0
    assert nnx.from_tree(nnx.to_tree(nnx.Param(7.0))) == 7.0
    assert nnx.from_tree(nnx.to_tree(Pair(7.0), prefix=0)).a == 7.0


def test_a_class_that_takes_nothing_but_a_module():
    """It is made of a Module again, and of nothing else on the way."""

    @jax.tree_util.register_pytree_node_class
    class Holder:
        def __init__(self, part):
            assert isinstance(part, nnx.Module)
            self.part = part

        def tree_flatten(self):
            return (self.part,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            made = object.__new__(cls)
            (made.part,) = children
            assert isinstance(made.part, nnx.Module | nnx.NodeStates)
            return made

    assert nnx.from_tree(nnx.to_tree({"holder": Holder(Pair(7.0))}))["holder"].part.a == 7.0


def test_a_tree_carries_an_update_through_plain_jax():
    """With the tag of an update, changes come back to the objects that were in the tree."""
    a, b = Pair(), Pair()
    b.other = a

    @jax.jit
    def inside(tree):
        a, b, x = nnx.from_tree(tree, ctxtag="test", is_inner=True)
        a.a[...] += x
        b.new, b.other = b.other, None
        return nnx.to_tree((b, a, Pair(x)), ctxtag="test")

    with nnx.update_context("test"):
        tree = inside(nnx.to_tree((a, b, 10.0), ctxtag="test"))
        same_b, same_a, new = nnx.from_tree(tree, ctxtag="test", is_inner=False)
    assert same_a is a
    assert same_b is b
    assert b.new is a
    assert b.other is None
    assert (a.a, new.a) == (11.0, 10.0)


def test_a_shared_object_must_have_one_prefix():
    """Two labels for one Variable are refused, with both paths; mappings are compared by what they say of each leaf."""
    shared = nnx.Param(jnp.array(3.0))
    tree = (Pair(1.0, shared), {"k": Pair(shared, 2.0)})
    with pytest.raises(AliasingError, match=r"\[0\]\.b: 0, but \[1\]\.k\.a: 1"):
        nnx.to_tree(tree, prefix=(0, 1))
    with pytest.raises(AliasingError, match=r"\[0\]\.b: 0, but \[1\]\.k\.a: None"):
        nnx.to_tree(tree, prefix=(nnx.StateAxes({nnx.Param: 0, ...: None}), {"k": None}))
    with pytest.raises(PrefixError, match="prefix"):
        nnx.to_tree(tree, prefix=(0,))
    by_path = nnx.StateAxes({nnx.PathContains("a"): 0, nnx.PathContains("b"): 0})
    assert nnx.to_tree(tree, prefix=(0, by_path))[0].states
    assert nnx.to_tree(tree, prefix=(0, 1), check_aliasing=False)[1]["k"].states


def test_mappings_see_the_arrays_that_a_module_holds():
    """As values of their own, beside those of its Variables."""
    pair = Pair()
    pair.x, pair.y = jnp.ones(3), jnp.ones((2, 3))
    by_rank = nnx.StateAxes({(lambda path, x: x.ndim == 2): 1, ...: 0})
    by_path = nnx.StateAxes({nnx.PathContains("y"): 1, ...: 0})
    nnx.to_tree((pair, pair), prefix=(by_rank, by_path))
    with pytest.raises(AliasingError, match=r"\[0\]\.y: 1, but \[1\]\.y: 0"):
        nnx.to_tree((pair, pair), prefix=(by_rank, 0))


def test_mappings_see_paths_from_each_object_down():
    """A filter by path does not depend on where in the tree the object is."""
    first = nnx.StateAxes({(lambda path, x: path == ("a",)): 0, (lambda path, x: path == ("b",)): 1})
    pair = Pair()
    nnx.to_tree((pair, [[pair]]), prefix=first)
    with pytest.raises(AliasingError):
        nnx.to_tree((pair, [[pair.b]]), prefix=(first, 0))


def test_functions_decide_what_stands_for_an_object():
    """``split_fn`` and ``merge_fn`` get the context, the key path and the prefix, and may take other leaves too."""
    seen = []

    def split_fn(ctx, path, prefix, leaf):
        seen.append((jax.tree_util.keystr(path), prefix))
        return nnx.NodeStates.from_split(*ctx.split(leaf)) if isinstance(leaf, nnx.Module) else ("wrapped", leaf)

    tree = nnx.to_tree([Pair(), 5.0], prefix=[0, None], split_fn=split_fn, map_non_graph_nodes=True)
    assert seen == [("[0]", 0), ("[1]", None)]
    assert tree[1] == ("wrapped", 5.0)
    merged = nnx.from_tree(
        tree, prefix=8, merge_fn=lambda ctx, path, prefix, leaf: (jax.tree_util.keystr(path), prefix)
    )
    assert merged == [("[0]", 8), ("wrapped", 5.0)]
    with pytest.raises(PrefixError, match="prefix"):
        nnx.from_tree(tree, prefix=[0])
    with pytest.raises(ValueError, match="NodeStates at <root>, got a float"):
        nnx.from_tree(1.0, map_non_graph_nodes=True)
    with pytest.raises(ValueError, match=r"NodeStates at \[1\]\[0\], got a str"):
        nnx.from_tree(tree, map_non_graph_nodes=True)


def test_node_states_are_frozen_pytrees():
    """States are children, metadata and GraphDef are static, and without a GraphDef it is a prefix of one with it."""
    node = nnx.NodeStates.from_split(*nnx.split(Pair(), nnx.Param, ...), metadata="m")
    prefixes = nnx.NodeStates.from_prefixes([0, 1], metadata="m")
    mapped = jax.tree.map(lambda prefix, state: prefix, prefixes, node, is_leaf=lambda x: x is None)
    assert mapped.states == (0, 1)
    assert jax.tree.structure(node) == jax.tree.structure(jax.tree.map(lambda x: x + 1, node))
    assert jax.tree.structure(node) != jax.tree.structure(node.replace(metadata="n"))
    assert node.replace(states=(1,)).state == 1
    with pytest.raises(ValueError, match="one State, got 2"):
        node.state
    with pytest.raises(ValueError, match="No graphdef"):
        nnx.NodeStates.from_states(node.states[0]).graphdef
    assert nnx.NodeStates.from_states(*node.states).states == node.states
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.metadata = "n"
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(node)]
    assert [path.partition("]")[0] for path in paths] == [".states[0", ".states[1"]


# --- functions of objects behind plain JAX ---


class Counter(nnx.Module):
    def __init__(self, n=0):
        self.n = nnx.Variable(jnp.asarray(n))
        self.calls = 0


def test_a_transformation_of_plain_jax_takes_objects():
    """Values, structure and identity come out of it, also from its cache."""

    @split_inputs
    @jax.jit
    @merge_inputs
    def step(a, b, by):
        a.n += by
        b.calls += 1
        b.other = a
        return a, by

    a, b = Counter(), Counter()
    for k in (1, 2):
        out, by = step(a, b, k)
        assert (out is a, b.other is a, by, a.n.value, b.calls) == (True, True, k, [1, 3][k - 1], k)
    shared = Counter(5)
    assert step(shared, shared, 1)[0] is shared
    assert (shared.n.value, shared.other is shared) == (6, True)


def test_objects_that_change_places_keep_their_identity():
    """Also beside a new one."""

    @split_inputs
    @jax.jit
    @merge_inputs
    def turn(node):
        node["a"], node["b"] = Counter(7), node["a"]

    first = Counter(1)
    node = nnx.Dict(a=first, b=Counter(2))
    turn(node)
    assert node["b"] is first
    assert (node["a"].n.value, first.n.value) == (7, 1)


def test_branches_and_mapped_functions_take_objects():
    """What is wrapped may be several functions, in one that is wrapped itself."""

    @merge_inputs(ctxtag="inner")
    def up(counter, by):
        counter.n += by

    @merge_inputs(ctxtag="inner")
    def stay(counter, by):
        pass

    axes = (0, None)
    choose = split_inputs(ctxtag="inner")(jax.lax.cond)

    @split_inputs
    @functools.partial(jax.vmap, in_axes=axes, out_axes=(axes, 0))
    @merge_inputs
    def step(counter, by):
        choose(counter.n % 2 == 0, up, stay, counter, by)
        return counter.n.value

    counters = Counter([0, 1, 2])
    assert step(counters, 10).tolist() == counters.n.value.tolist() == [10, 1, 12]


def test_what_is_no_object_is_cleared():
    """Modules and Variables stay, None is in the place of the other leaves."""
    param = nnx.Param(1.0)
    assert nnx.extract.clear_non_graph_nodes((1, {"a": param, "b": jnp.ones(1)})) == (None, {"a": param, "b": None})
