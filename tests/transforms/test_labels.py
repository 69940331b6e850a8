"""Labels and lanes: which label falls on which leaf, and lists of leaves by lane."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.core.errors import AliasingError
from nnxlib.core.graph import diff, pack
from nnxlib.transforms.labels import join_lanes, label_arguments, labels_after, lane_numbers, split_lanes
from nnxlib.transforms.lift import Arguments
from nnxlib.transforms.prefixes import PrefixMapping, broadcast_prefix

from .kinds import Net

# --- labels of leaves -----------------------------------------------------------------------------------------------


def labels_of(entries, *args, **kwargs):
    """Path -> label, of every leaf of packed arguments."""
    packed = pack(Arguments(args, kwargs))
    _, labels = label_arguments(packed, entries)
    assert len(labels) == len(packed.leaves)
    paths = [".".join(map(str, path[1:])) for path in packed.layout.leaf_paths]
    return dict(zip(paths, labels, strict=True))


def test_each_leaf_gets_the_label_of_its_entry():
    """Variables, arrays of nodes and plain leaves, in the order of the leaves."""
    assert labels_of(["m", "x", "kw"], Net(), 1.0, k=Net()) == {
        "0.a": "m", "0.stat": "m", "0.array": "m", "1": "x", "k.a": "kw", "k.stat": "kw", "k.array": "kw",
    }  # fmt: skip


def test_filters_see_the_path_from_the_argument_down_and_the_leaf():
    """A path filter does not see the number of the argument; a type filter sees the Variable, or the array."""
    seen = []
    by_path = PrefixMapping([(lambda path, x: seen.append((path, type(x).__name__)), 0), (nnx.Param, 1), (..., 2)])
    assert labels_of([by_path], Net()) == {"0.a": 1, "0.stat": 2, "0.array": 2}
    assert sorted(seen) == [(("a",), "Param"), (("array",), "ArrayImpl"), (("stat",), "BatchStat")]


def test_arrays_in_tuples_lists_and_dataclasses():
    """Arrays that a node holds inside pytrees, each with its own path."""
    net = Net()
    net.pair = (jnp.ones(1), {"k": jnp.ones(1)})
    by_path = PrefixMapping({nnx.PathContains("k"): 1, nnx.PathContains("pair"): 2, ...: 3})
    found = labels_of([by_path], net)
    assert (found["0.pair.0"], found["0.pair.1.k"], found["0.a"]) == (2, 1, 3)


def test_shared_objects_with_one_prefix():
    """The same entry, or mappings that agree leaf by leaf, are fine along any number of paths; so are cycles."""
    net, agreeing = Net(), PrefixMapping({nnx.Param: 0, nnx.BatchStat: 1, ...: 2})
    net.self = net
    assert labels_of([0, 0], net, net)["0.a"] == 0
    labels_of([agreeing, PrefixMapping({nnx.Cache: 5, nnx.Param: 0, nnx.BatchStat: 1, ...: 2})], net, [net])


def test_shared_objects_with_two_prefixes():
    """The error names the Variable, both paths and both labels."""
    net = Net()
    with pytest.raises(
        AliasingError,
        match=r"Inconsistent aliasing.*are one Net: .*args\[0\]\.array: 0, but args\[1\]\.x\.array: 1\. Give both",
    ):
        labels_of([0, 1], net, {"x": net})
    with pytest.raises(AliasingError, match=r"are one BatchStat: .*args\[0\]\.stat: 1, but args\[1\]: 0"):
        labels_of([PrefixMapping({nnx.Param: 0, ...: 1}), 0], net, net.stat)


def test_shared_objects_deep_below_shared_nodes():
    """What hangs below a shared node is compared too, with the paths of the filters."""
    inner = nnx.List([Net()])
    a, b = nnx.Dict(inner=inner), nnx.Dict(inner=inner)
    with pytest.raises(AliasingError, match=r"args\[0\]\.inner\[0\]\.stat: 0, but args\[1\]\.inner\[0\]\.stat: 1"):
        labels_of([PrefixMapping({...: 0}), PrefixMapping({nnx.BatchStat: 1, ...: 0})], a, b)


class Holder(nnx.Module):
    def __init__(self, **attributes):
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("shared", "path"),
    [
        (Holder(array=jnp.ones(1)), r"\.array"),
        (Holder(pair=(jnp.ones(1), 2)), r"\.pair\[0\]"),
        (Holder(pair=(1, nnx.Param(jnp.ones(1)))), r"\.pair\[1\]"),
        (nnx.List([1, jnp.ones(1)]), r"\[1\]"),
    ],
    ids=["array", "array in a tuple", "Variable in a tuple", "array in a list"],
)
def test_arrays_of_shared_nodes(shared, path):
    """Arrays that a shared node holds, and what stands in its tuples, are compared like Variables."""
    with pytest.raises(AliasingError, match=rf"args\[0\]{path}: 0, but args\[1\]{path}: 1"):
        labels_of([0, 1], shared, shared)
    labels_of([0, 0], shared, shared)


def test_cycles_with_filters_that_look_at_paths():
    """A cycle under a mapping ends."""
    net = Net()
    net.child = Holder(parent=net, array=jnp.ones(1))
    labels_of([PrefixMapping({nnx.PathContains("a"): 0, ...: 0})], net)


@pytest.mark.parametrize(("name", "label"), [("a", 1), ("b", 0), ("odd", 0)])
def test_three_paths_to_one_object(name, label):
    """If a mapping looks at paths, the first path in an argument decides, as it does in a State."""
    net, by_path = Net(), PrefixMapping({nnx.PathContains(name): 1, ...: 0})
    assert labels_of([by_path], nnx.Dict(a=net, b=net, odd=net))["0.a.a"] == label


def test_two_arguments_under_a_mapping_that_looks_at_paths():
    """It is asked along the path in each argument."""
    net, by_path = Net(), PrefixMapping({nnx.PathContains("odd"): 1, ...: 0})
    with pytest.raises(AliasingError, match=r"args\[0\]\.a.*: 0, but args\[1\]\.odd.*: 1"):
        labels_of([by_path, by_path], nnx.Dict(a=net), nnx.Dict(odd=net))
    labels_of([by_path, by_path], nnx.Dict(a=net), nnx.Dict(a=net, odd=net))
    labels_of([by_path, by_path], *[nnx.Dict(a=net, odd=net)] * 2)
    by_name = PrefixMapping({nnx.PathContains("array"): 1, ...: 0})
    assert labels_of([by_name, by_name], nnx.Dict(a=net), nnx.Dict(odd=net))["0.a.array"] == 1


def test_new_objects_get_labels_from_what_holds_them():
    """What a function attaches inherits from the argument it is attached to; what it returns, from the out prefix."""
    a, b = Net(), Net()
    packed = pack(Arguments((a, b), {}))
    mapping = PrefixMapping({nnx.Param: "p", ...: "rest"})
    labels, _ = label_arguments(packed, [mapping, "b"])
    a.new, b.new, free = nnx.Param(jnp.ones(1)), nnx.List([nnx.Param(jnp.ones(1)), jnp.ones(1)]), Net()
    a.stat.value = jnp.ones(1)
    out = {"free": free, "x": jnp.ones(1)}
    after = diff(packed.layout, packed.leaves, packed.objects, out)
    found = labels_after(labels, after, broadcast_prefix({"free": "f", "x": "x"}, out, "out"))
    by_leaf = {id(leaf): label for leaf, label in zip(after.leaves, found, strict=True)}
    assert by_leaf[id(a.stat.value)] == "rest"
    assert by_leaf[id(a.new.value)] == "p"
    assert by_leaf[id(b.new[1])] == "b"
    assert by_leaf[id(free.a.value)] == by_leaf[id(free.array)] == "f"
    assert by_leaf[id(out["x"])] == "x"


@pytest.mark.parametrize("transform", [nnx.vmap, functools.partial(nnx.scan, out_axes=0)])
def test_filters_that_look_at_shapes(transform):
    """They are asked once, before the call: what takes the place of a value, which is a slice inside, has its label."""
    axes = nnx.StateAxes({(lambda path, x: x.ndim == 2): 0, ...: None})

    def step(m):
        m.array, m.pair, m.a.value = m.array + 1.0, (m.pair[0] * 2.0, "a"), m.a + 1.0
        m.new = nnx.Param(jnp.zeros((4, 4)))

    net = Holder(array=jnp.ones((3, 2)), pair=(jnp.ones((3, 2)), "a"), a=nnx.Param(jnp.ones((3, 2))))
    transform(step, in_axes=(axes,))(net)
    assert (net.array == 2).all()
    assert (net.pair[0] == net.a).all()
    assert (net.array.shape, net.pair[1], net.new.shape) == ((3, 2), "a", (3, 4, 4))


def test_an_argument_that_comes_back_in_two_places():
    """What is returned, or attached to another argument, keeps its label; it cannot get a second one."""
    with pytest.raises(AliasingError, match=r"args\[0\]\.\w+: 0, but <output>[.\w]*: 1\. Give both"):
        nnx.vmap(lambda m: m, in_axes=0, out_axes=1)(nnx.Dict(a=nnx.Param(jnp.ones(2))))
    a, b = (nnx.Dict(a=nnx.Param(jnp.ones(2))) for _ in range(2))
    agreeing = nnx.StateAxes({nnx.BatchStat: 0, ...: 0}), nnx.StateAxes({nnx.Param: 0, ...: 0})

    @nnx.vmap(in_axes=agreeing)
    def attach(a, b):
        a.other, b.new = b, nnx.Dict(x=nnx.Param(b.a + 1.0))

    attach(a, b)
    assert a.other is b
    assert b.new.x.shape == (2,)


# --- lanes ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=12))
def test_split_and_join(lane_of):
    """Joining what was split gives the leaves back in order, for any assignment of lanes."""
    leaves = list(range(len(lane_of)))
    groups = split_lanes(leaves, lane_of, 4)
    assert [len(g) for g in groups] == [lane_of.count(k) for k in range(4)]
    assert list(join_lanes(groups, lane_of)) == leaves


def test_one_lane():
    """With a single lane no assignment is needed, and none is made."""
    assert split_lanes((1, 2), (), 1) == ([1, 2],)
    assert join_lanes(([1, 2],), ()) == [1, 2]
    assert lane_numbers(["b", "a", "b"], ("a", "b")) == (1, 0, 1)


def by_type(sharding):
    return nnx.StateSharding({nnx.Param: sharding, ...: None}), None


def replicated():
    return jax.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P())


def test_what_one_trace_attaches_gets_no_label_in_another():
    """For another shape the same function attaches an object with another label, in the same place."""

    @functools.partial(nnx.jit, in_shardings=by_type(replicated()))
    def attach(model, x):
        model.new = nnx.Cache(x) if x.ndim == 1 else nnx.Param(x)

    for x, kind in ((jnp.ones(1), nnx.Cache), (jnp.ones((1, 1)), nnx.Param)) * 2:
        model = nnx.Dict(w=nnx.Param(jnp.zeros(1)))
        attach(model, x)
        assert type(model.new) is kind
        assert model.new.shape == x.shape


OPTIONS = {
    "one sharding": lambda: {"in_shardings": (replicated(), None)},
    "shardings by filter": lambda: {"in_shardings": by_type(replicated())},
    "donated": lambda: {"donate_argnums": 0},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_captured_module_that_holds_an_argument_gives_no_label(options):
    """Only arguments have shardings and are donated; what is captured, too, is treated as the argument is."""
    model = nnx.Dict(w=nnx.Param(jnp.ones(3)), count=nnx.Variable(jnp.array(0)))
    trainer = nnx.Dict(model=model, steps=nnx.Variable(jnp.array(0)))

    @functools.partial(nnx.jit, **OPTIONS[options]())
    def step(model, x):
        trainer.steps += 1
        model.count += 1
        return model.w * x + trainer.model.w

    for count in (1, 2):
        assert jnp.array_equal(step(model, 2.0), jnp.full(3, 3.0))
        assert (model.count.value, trainer.steps.value) == (count, count)
    assert trainer.model is model


def test_a_function_with_shardings_keeps_no_model_alive():
    total = nnx.jit(lambda model, x: model["w"].sum() + x, in_shardings=by_type(replicated()))
    model = nnx.Dict(w=nnx.Param(jnp.zeros(1)))
    for _ in range(3):
        total(model, 1.0)
    references = weakref.ref(model), weakref.ref(model["w"])
    del model
    gc.collect()
    assert [reference() for reference in references] == [None, None]
