"""Prefixes: labels by filter, and entries for nodes and leaves."""

import copy
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlib as nnx
from nnxlib.core.errors import ArgumentError, FilterOrderError, InvalidFilterError, PrefixError
from nnxlib.core.filters import PathIn
from nnxlib.transforms.prefixes import PrefixMapping, argument_entries, broadcast_prefix

from .kinds import Net

# --- mappings -------------------------------------------------------------------------------------------------------


def test_the_first_filter_that_takes_a_leaf_gives_its_label():
    """Filters are asked in order, as the mapping or the pairs list them."""
    for mapping in ({nnx.Param: 1, "a": 2, ...: 3}, [(nnx.Param, 1), ("a", 2), (..., 3)]):
        prefix = PrefixMapping(mapping)
        assert prefix.map_prefix(("x",), nnx.Param(1)) == 1
        assert prefix.map_prefix(("x",), nnx.Cache(1, tag="a")) == 2
        assert prefix.map_prefix(("x",), nnx.Cache(1)) == 3


def test_a_filter_that_would_never_be_asked_is_an_error():
    """As in `split`: what takes everything comes last."""
    for everything in (..., True):
        with pytest.raises(FilterOrderError, match="can only be used as the last filters"):
            nnx.StateAxes({everything: None, nnx.Param: 0})


def test_what_is_neither_a_mapping_nor_pairs_is_an_error():
    for wrong, shown in (([nnx.Param, 0], r"\[class Param, int\]"), (nnx.Param, "class Param"), (0, "int")):
        with pytest.raises(ArgumentError, match=f"StateAxes takes a dict of filters and labels, .* but got {shown}"):
            nnx.StateAxes(wrong)


def test_a_mapping_is_a_mapping():
    """It has the items it was made of, in order, and says so."""
    prefix = PrefixMapping({nnx.Param: 0, ...: None})
    assert list(prefix) == list(prefix.filters) == [nnx.Param, ...]
    assert (len(prefix), prefix[nnx.Param], prefix[...], prefix.labels) == (2, 0, None, (0, None))
    assert repr(prefix) == "PrefixMapping({Param: 0, ...: None})"
    with pytest.raises(KeyError):
        prefix[nnx.Cache]


def test_mappings_compare_by_what_they_do():
    """Equal filters and labels in the same order are equal, whatever form they were written in."""
    assert PrefixMapping({nnx.Param: 0, ...: 1}) == PrefixMapping([(nnx.OfType(nnx.Param), 0), (True, 1)])
    assert hash(PrefixMapping({nnx.Param: 0})) == hash(PrefixMapping([(nnx.Param, 0)]))
    assert PrefixMapping({nnx.Param: 0, "a": 1}) != PrefixMapping({"a": 1, nnx.Param: 0})
    assert PrefixMapping({nnx.Param: 0}) != PrefixMapping({nnx.Param: 1})
    assert PrefixMapping({nnx.Param: 0}) != nnx.StateSharding({nnx.Param: 0})


def test_a_leaf_that_no_filter_takes():
    """The error names the path, the type, and the last entry to add."""
    with pytest.raises(PrefixError, match=r"matched layers\[0\]\.w \(Cache\) in .*; add `\.\.\.: label` as"):
        PrefixMapping({nnx.Param: 0}).map_prefix(("layers", 0, "w"), nnx.Cache(1))


def test_a_filter_that_is_none():
    """Something that is no filter is refused when the mapping is made."""
    with pytest.raises(InvalidFilterError):
        PrefixMapping({3.5: 0})


def test_a_state_of_labels():
    """A State with a label in place of each leaf is a mapping from paths."""
    labels = nnx.state(nnx.Dict(a=nnx.Param(1.0), b=nnx.Dict(c=nnx.Param(2.0), d=nnx.Cache(0.0))))
    labels["a"], labels["b"]["c"], labels["b"]["d"] = 0, 1, None
    axes = nnx.StateAxes(labels)
    assert axes == nnx.StateAxes([(PathIn(("a",)), 0), (PathIn(("b", "c")), 1), (PathIn(("b", "d")), None)])
    assert (axes.axes, axes.map_prefix(("b", "c"), nnx.Param(0.0))) == ((0, 1, None), 1)

    @nnx.vmap(out_axes=axes, axis_size=3)
    def make():
        return nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Dict(c=nnx.Param(jnp.ones(2)), d=nnx.Cache(jnp.ones(2))))

    made = make()
    assert (made.a.shape, made.b.c.shape, made.b.d.shape) == ((3, 2), (2, 3), (2,))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert nnx.StateSharding({nnx.Param: sharding}).shardings == (sharding,)


def test_labels_may_be_exchanged():
    """By filter and by function, as they are."""
    by_function = nnx.prefix(Net(), lambda path, leaf: 0 if path[-1] == "a" else None)
    for prefix in (PrefixMapping({nnx.PathContains("a"): 0, ...: None}), by_function):
        other = prefix.relabelled(str)
        assert [other.map_prefix((name,), nnx.Param(1)) for name in ("a", "stat")] == ["0", "None"]
        assert other.labels == ("0", "None")


def test_filters_of_a_mapping_within_a_dict_see_paths_from_there():
    """Also where the labels become others: those of jit say what is donated, too."""
    sharding, seen = jax.sharding.SingleDeviceSharding(jax.devices()[0]), set()

    def takes(path, x):
        seen.add(path)
        return path == ("kernel",)

    mapping = nnx.StateSharding([(takes, sharding), (..., None)])
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    call = nnx.jit(lambda held: held["layer"](jnp.ones(2)), in_shardings=({"layer": mapping},))
    assert call({"layer": layer}).shape == (3,)
    assert seen == {("bias",), ("kernel",)}


@pytest.mark.parametrize("transform", [nnx.vmap, nnx.scan, nnx.transform_metadata])
def test_objects_are_no_prefixes(transform):
    """Found where the transform is made, and not where it is called."""
    with pytest.raises(PrefixError, match=r"in_axes has a Net in it\. Graph nodes are not allowed as prefixes: give"):
        transform(lambda m: None, in_axes=(Net(),), out_axes=0)
    with pytest.raises(PrefixError, match=r"out_axes has a Param in it\. Variables are not allowed as prefixes"):
        transform(lambda m: None, in_axes=0, out_axes=nnx.Param(0))


def test_a_state_of_shardings_is_no_prefix_by_itself():
    """Such as `get_named_sharding` returns; the error says what to put it in, and that fits a Module and its State."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    shardings = nnx.get_named_sharding(nnx.state(model), jax.make_mesh((1,), ("data",)))
    with pytest.raises(PrefixError, match=r"in_shardings has a Param in it.*nnx\.StateSharding\(state\)\.$"):
        nnx.jit(lambda m: m, in_shardings=(shardings,))
    total = nnx.jit(lambda m: m.kernel.sum(), in_shardings=(nnx.StateSharding(shardings),))
    assert total(model) == total(nnx.state(model))


FILTERS = {nnx.Param: 0, ...: None}


@pytest.mark.parametrize("transform", [nnx.vmap, nnx.scan, nnx.transform_metadata])
@pytest.mark.parametrize("name", ["in_axes", "out_axes"])
def test_a_dict_of_filters_is_no_prefix(transform, name):
    """It says how to write the labels by filter."""
    with pytest.raises(PrefixError, match=rf"^{name} has a dict of .* Write nnx\.StateAxes\(\{{Param: 0, \.\.\.: None"):
        transform(lambda m: None, **{"in_axes": 0, "out_axes": 0, name: (FILTERS, 0)})


@pytest.mark.parametrize("filters", [{nnx.Param: 0}, {"tag": 0, ...: None}, {nnx.PathContains("a"): 0}], ids=str)
def test_one_key_that_only_a_filter_can_be_is_enough(filters):
    with pytest.raises(PrefixError, match=r"in_axes has a dict of filters in it\. Write nnx\.StateAxes\("):
        nnx.vmap(lambda m: None, in_axes=(filters,))


@pytest.mark.parametrize("label", ["axis", 0.5, nnx.Carry], ids=repr)
def test_what_is_no_axis_is_refused(label):
    for axes in ((label,), (nnx.StateAxes({...: label}),), label):
        with pytest.raises(PrefixError, match=rf"has {label!r}; vmap takes an int, None or nnx\.StateAxes of these\."):
            nnx.vmap(lambda m: None, in_axes=axes)
    with pytest.raises(PrefixError, match=r"; scan takes an int, None, nnx\.Carry or nnx\.StateAxes of these\."):
        nnx.scan(lambda m: None, in_axes=("axis", nnx.Carry))


def test_a_dict_of_filters_is_no_sharding():
    with pytest.raises(
        PrefixError, match=r"in_shardings has a dict .* nnx\.StateSharding\(\{Param: 0, \.\.\.: None\}\)"
    ):
        nnx.jit(lambda m: None, in_shardings=(FILTERS,))


# --- broadcasting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (0, [0, 0, 0, 0]),
        (None, [None] * 4),
        ((0, 1), [0, 1, 1, 1]),
        ((0, (1, 2)), [0, 1, 2, 2]),
        ((None, (1, {"k": 3, "x": None})), [None, 1, 3, None]),
    ],
)
def test_labels_of_nodes_and_leaves(prefix, expected):
    """A label stands for all nodes and leaves below its place; None is a label too; a Module is one place."""
    assert broadcast_prefix(prefix, (Net(), (1.0, {"k": Net(), "x": 2.0})), "in_axes") == expected


def test_mappings_are_labels():
    """A mapping is not taken apart, although it is a mapping."""
    mapping = PrefixMapping({...: 0})
    assert broadcast_prefix((mapping, {"a": mapping}), (Net(), {"a": Net()}), "in_axes") == [mapping, mapping]


def test_the_prefix_of_the_arguments_may_be_a_list():
    assert argument_entries([0, None], (1.0, Net()), "in_axes") == [0, None]
    assert argument_entries([0, [None]], (1.0, [Net()]), "in_axes") == [0, None]


def test_a_prefix_that_does_not_fit_what_is_not_static():
    for args, count in (((), "0 positional arguments that are"), ((1.0,), "1 positional argument that is")):
        with pytest.raises(PrefixError, match=rf"^in_shardings=.* called with {count} not static\."):
            broadcast_prefix((None, None), args, "in_shardings")


def test_what_holds_no_leaf_needs_no_label():
    """None among the values takes no label, whatever the prefix says there."""
    assert broadcast_prefix((0, 1), (None, 1.0), "in_axes") == [1]
    assert broadcast_prefix(0, (None, ()), "in_axes") == []


@pytest.mark.parametrize(
    ("prefix", "problem"),
    [
        ((0, 1), "has 2 entries, but the function was called with 3 positional arguments"),
        ([0, 1, 2, 3], "has 4 entries, but the function was called with 3 positional arguments"),
        (
            [0, 1, 2],
            r"does not fit the values it describes: in_axes is \[0, 1, 2\], but the value there is \(Net, float",
        ),
        (
            (0, 1, {"other": 0}),
            r"does not fit the values .*: in_axes\[2\] is {'other': 0}, but the value there is {'k'",
        ),
        ({"k": 0}, r"does not fit the values it describes: in_axes is {'k': 0}, but the value there is \(Net, float, "),
        ((0, None, {"k": (0, 1)}), r"does not .*: in_axes\[2\]\.k is \(0, 1\), but the value there is float"),
        ((None, (0, 1), None), r"does not .*: in_axes\[1\] is \(0, 1\), but the value there is float"),
        (((0,), 1, None), r"does not .*: in_axes\[0\] is \(0,\), but the value there is Net"),
    ],
)
def test_a_prefix_that_does_not_fit(prefix, problem):
    """The error says what the prefix is called and what to write."""
    shown = re.escape(repr(prefix))
    with pytest.raises(PrefixError, match=rf"(?s)^in_axes={shown} {problem}.*\. Give one label for all"):
        broadcast_prefix(prefix, (Net(), 1.0, {"k": 1.0}), "in_axes")


def test_a_prefix_of_the_class_of_the_value_with_other_static_parts():
    """None in place of a label leaves no leaf there, which a class may note in what it gives JAX beside its leaves."""

    @dataclasses.dataclass
    class Pair:
        a: Any
        b: Any

    flatten = lambda pair: jax.tree.flatten([pair.a, pair.b])
    jax.tree_util.register_pytree_node(Pair, flatten, lambda kind, leaves: Pair(*jax.tree.unflatten(kind, leaves)))
    with pytest.raises(PrefixError, match=r"in_axes\[0\] is .*Pair\(a=0, b=None\), .* is Pair with other static parts"):
        nnx.vmap(lambda pair: pair.a + pair.b, in_axes=(Pair(0, None),))(Pair(jnp.ones(2), jnp.ones(())))


def test_a_prefix_that_does_not_fit_what_is_returned():
    """It is said how many values there are; an array is one, however long it is."""
    with pytest.raises(PrefixError, match=r"^out_axes=\[0\] has 1 entry, but there are 2 values\. Give"):
        broadcast_prefix([0], [1.0, 2.0], "out_axes")
    with pytest.raises(PrefixError, match=r"^out_axes=\(0, 0\) has 2 entries, but there is one value, float32\[2\]"):
        broadcast_prefix((0, 0), jnp.ones(2), "out_axes")
    with pytest.raises(
        PrefixError, match=r"^out_shardings or out_specs=\(None, None\) has 2 entries, but there is one"
    ):
        nnx.jit(lambda x: x, out_shardings=(None, None))(jnp.ones(2))
    with pytest.raises(PrefixError, match=r"^out_axes=\(0, 0\) has 2 entries, but there is one"):
        nnx.vmap(lambda x: x, out_axes=(0, 0))(jnp.ones(2))


@pytest.mark.parametrize("node", [nnx.Dict(a=nnx.Param(1.0)), (nnx.Param(1.0),)], ids=type)
def test_an_object_is_no_prefix(node):
    """Said where the transform is made."""
    for make in (
        lambda: nnx.jit(len, in_shardings=node),
        lambda: nnx.jit(len, out_shardings=node),
        lambda: nnx.grad(len, argnums=node),
    ):
        with pytest.raises(PrefixError, match=r"(shardings|argnums) has a .* (Graph nodes|Variables) are not allowed"):
            make()


# --- nnx.prefix ---


def test_prefix_labels_each_leaf_by_filter():
    m = nnx.Dict(w=nnx.Param(jnp.arange(3.0)), s=nnx.BatchStat(jnp.float32(2)))
    axes = nnx.prefix(m, {nnx.Param: 0, ...: None})
    assert jnp.array_equal(nnx.vmap(lambda m: m.w * m.s, in_axes=(axes,))(m), 2 * jnp.arange(3.0))


def test_prefix_stands_above_a_pytree():
    """A Module keeps its place in the tuple; the same one twice has the same axes."""
    m = nnx.vmap(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 4))
    axes = lambda path, x: 0 if "kernel" in path or "bias" in path else None
    first, second, _ = nnx.prefix((m, m, jnp.ones(2)), axes)

    @nnx.vmap(in_axes=(first, second, None))
    def forward(m1, m2, x):
        assert m1 is m2
        return m1(x) + m2(x)

    assert forward(m, m, jnp.ones(2)).shape == (4, 3)


def test_prefix_tells_its_labels():
    """By attribute and as a State, for looking at."""
    axes = nnx.prefix(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), {nnx.PathContains("bias"): None, nnx.Param: 0})
    assert (axes.kernel, axes.bias, axes.state, set(axes.labels)) == (0, None, {"kernel": 0, "bias": None}, {0, None})
    assert repr(axes) == "TreeState(State({'bias': None, 'kernel': 0}))"
    with pytest.raises(AttributeError, match="gain"):
        axes.gain


def test_prefixes_by_filter_are_equal_if_the_mappings_are():
    """A scan with a prefix that is made anew at each call was traced and compiled at each call."""
    net, count = Net(), []
    make = lambda label: nnx.prefix(net, {nnx.Param: label, ...: None})
    assert make(0) == make(0) != make(1)
    assert hash(make(0)) == hash(make(0))
    assert make(0) != nnx.StateAxes({nnx.Param: 0, ...: None})

    def body(total, net):
        count.append(1)
        return total + net.a.sum(), None

    net.a.value = jnp.ones((3, 2))
    for _ in range(3):
        assert nnx.scan(body, in_axes=(nnx.Carry, make(0)))(0.0, net)[0] == 6
    assert len(count) == 1


def test_a_prefix_may_be_made_of_another_one():
    axes = nnx.prefix(Net(), {nnx.Param: 0, ...: None})
    assert nnx.prefix(Net(), axes).state == axes.state
    assert nnx.prefix(Net(), nnx.StateAxes({nnx.Param: 0, ...: None})).state == axes.state


def test_prefixes_by_function_are_equal_if_the_function_is():
    label, net = lambda path, x: 0, Net()
    assert nnx.prefix(net, label) == nnx.prefix(net, label)
    assert nnx.prefix(net, label) != nnx.prefix(net, lambda path, x: 0)
    assert nnx.prefix(net, label) != nnx.StateAxes({...: 0})


def test_prefix_labels_numbers_like_arrays():
    """A Python number is a leaf of the arguments; text, too."""
    paths = nnx.prefix({"a": 1.0, "b": ("x", jnp.ones(2))}, lambda path, x: path)
    assert paths == {"a": ("a",), "b": (("b", 0), ("b", 1))}


def test_prefix_covers_every_leaf():
    with pytest.raises(PrefixError, match=r"No filter matched s \(BatchStat\)"):
        nnx.prefix(nnx.Dict(w=nnx.Param(1.0), s=nnx.BatchStat(2.0)), {nnx.Param: 0})


def test_a_label_that_only_something_attached_inside_gets():
    """No leaf of the arguments has the label None, nor the replicated sharding; what the function attaches does."""

    def attach(m):
        m.count = nnx.BatchStat(jnp.zeros(()))

    axes = nnx.StateAxes({nnx.BatchStat: None, ...: 0})
    m = nnx.Module()
    m.w = nnx.Param(jnp.ones((4, 2)))
    nnx.vmap(attach, in_axes=axes)(m)
    assert m.count.shape == ()
    del m.count
    replicated = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P())
    nnx.jit(attach, in_shardings=(nnx.StateSharding({nnx.BatchStat: replicated, ...: None}),))(m)
    assert m.count.sharding.is_equivalent_to(replicated, 0)


def test_a_state_of_labels_may_hold_them_in_variables():
    """As ``get_named_sharding`` and ``jax.tree.map`` over a State return them."""
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    shardings = jax.tree.map(lambda x: None, nnx.state(layer))
    assert nnx.StateSharding(shardings).shardings == (None, None)
    axes = nnx.StateAxes(nnx.state(layer).map(lambda path, v: v.replace(0)))
    assert axes.axes == (0, 0)


def test_a_state_of_named_shardings_is_a_prefix_for_jit():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "data"))
    layer = nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(0))
    prefix = nnx.StateSharding(nnx.get_named_sharding(nnx.state(layer), mesh))
    y = nnx.jit(lambda layer, x: layer(x), in_shardings=(prefix, None))(layer, jnp.ones((1, 2)))
    assert y.shape == (1, 3)


def make_pair(x):
    return x, {"layer": nnx.Linear(2, 3, rngs=nnx.Rngs(0))}


@pytest.mark.parametrize(
    "made",
    [
        lambda axes: nnx.vmap(make_pair, out_axes=(0, {"layer": axes}))(jnp.ones(4)),
        lambda axes: nnx.scan(make_pair, in_axes=0, out_axes=(0, {"layer": axes}))(jnp.ones(4)),
    ],
)
def test_mappings_see_paths_from_where_they_stand_in_an_output(made):
    """A State of labels fits the Module that it was made for, whatever is returned beside it."""
    labels = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))).map(lambda path, v: 1 if path == ("bias",) else 0)
    layer = made(nnx.StateAxes(labels))[1]["layer"]
    assert (layer.kernel.shape, layer.bias.shape) == ((4, 2, 3), (3, 4))


def test_mappings_see_paths_from_where_they_stand_in_an_argument():
    """And not from the argument, if that is a dict; a Variable itself has the empty path."""
    seen = []
    axes = nnx.StateAxes({(lambda path, x: seen.append(path)): None, ...: 0})
    args = {"m": nnx.Dict(w=nnx.Param(jnp.ones(3)))}, [nnx.Param(jnp.ones(3))], nnx.Dict(v=nnx.Param(jnp.ones(3)))
    nnx.vmap(lambda *args: None, in_axes=({"m": axes}, [axes], axes))(*args)
    assert set(seen) == {("w",), (), ("v",)}


def test_a_mapping_below_the_argument_is_like_the_one_that_was_written():
    """It looks the same, and is equal to one at the same depth."""
    axes, args = nnx.StateAxes({nnx.Param: 0, ...: None}), ({"m": Net()}, Net())
    first, second = (argument_entries(({"m": axes}, axes), args, "in_axes") for _ in range(2))
    assert first == second
    assert hash(first[0]) == hash(second[0])
    assert first[0] != first[1] == axes
    assert (repr(first[0]), first[0].labels) == (repr(axes), axes.labels)


def test_the_state_of_a_sharded_model_says_how_it_comes_in_and_out():
    """A step that takes and returns a model and its optimizer."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.adam(0.1), wrt=nnx.Param)
    both = tuple([nnx.StateSharding(nnx.get_named_sharding(nnx.state(x), mesh)) for x in (layer, optimizer)])

    @nnx.jit(in_shardings=(*both, None), out_shardings=(*both, None))
    def step(layer, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda layer: (layer(x) ** 2).mean())(layer)
        optimizer.update(layer, grads)
        return layer, optimizer, loss

    before = nnx.clone(layer)
    same, _, loss = step(layer, optimizer, jnp.ones((1, 2)))
    assert same is layer
    assert loss > 0
    assert (layer.kernel != before.kernel).all()


def test_a_prefix_of_a_pytree_asks_for_the_same_paths_again():
    """Those that the function has seen when the prefix was made, from the pytree down."""
    paths, args = [], ({"a": nnx.Dict(w=nnx.Param(jnp.ones(3)))}, jnp.ones(3))
    axes = nnx.prefix(args, lambda path, x: paths.append(path) or 0)
    assert set(paths) == {(0, "a", "w"), (1,)}
    paths.clear()
    nnx.vmap(lambda d, x: None, in_axes=axes)(*args)
    assert set(paths) == {(0, "a", "w")}  # the array has a label of its own
    out_axes = nnx.prefix(args, lambda path, x: {(0, "a", "w"): 1, (1,): 0}[path])
    d, x = nnx.vmap(lambda x: ({"a": nnx.Dict(w=nnx.Param(jnp.ones(2)))}, x), out_axes=out_axes)(jnp.ones(3))
    assert (d["a"].w.shape, x.shape) == ((2, 3), (3,))


def test_an_error_shows_the_prefix_as_it_was_written():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(nnx.errors.PrefixError, match=r"No filter matched bias \(Param\) in StateSharding\("):
        nnx.jit(lambda layer: None, in_shardings=(nnx.StateSharding({nnx.BatchStat: None}),))(layer)


def test_a_state_of_labels_can_be_copied():
    labels = nnx.prefix(Net(), {nnx.Param: 0, ...: None})
    for made in (copy.copy(labels), copy.deepcopy(labels)):
        assert made.labels == labels.labels


def test_a_state_of_shardings():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    replicated = jax.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P())
    total = nnx.jit(lambda layer: layer.kernel.sum(), in_shardings=(nnx.prefix(layer, {...: replicated}),))
    for _ in range(3):
        assert total(layer) == layer.kernel.sum()
    assert layer.kernel.value.sharding == replicated


def test_a_filter_that_looks_at_values_is_asked_at_each_call():
    """Equal models may have other lanes, so a call cannot be found by their structure alone."""
    replicated = jax.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P())
    asked = []

    def is_positive(path, x):
        asked.append(path)
        return bool(x.get_value().sum() > 0)

    layer = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    for shardings in (
        nnx.StateSharding({is_positive: replicated, ...: None}),
        nnx.prefix(layer, lambda path, x: replicated if is_positive(path, x) else None),
    ):
        total = nnx.jit(lambda layer: layer["w"].sum(), in_shardings=(shardings,))
        asked.clear()
        for k in range(1, 7):
            layer["w"].value = jnp.full(2, (-1.0) ** k)
            assert total(layer) == 2 * (-1.0) ** k
            assert len(asked) == k
        assert total._cache_size() == 2
