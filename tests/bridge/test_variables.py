"""Variables and collections, one in terms of the other."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import nnxlib as nnx

pytest.importorskip("flax.linen", reason="flax is not installed (it is not, where it would change the version of JAX)")

from flax import linen as nn
from flax.core import meta

bridge = nnx.bridge


@dataclasses.dataclass
class Quantised(meta.AxisMetadata):
    """A box of the user's own."""

    value: jax.Array
    bits: int

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return dataclasses.replace(self, value=val)

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self


@pytest.mark.parametrize(
    ("box", "metadata"),
    [
        (nn.Partitioned(1.0, names=("in",)), {"out_sharding": ("in",), "mesh": None}),
        (
            nn.LogicallyPartitioned(1.0, names=("in",), rules=(("in", "x"),)),
            {"out_sharding": ("in",), "mesh": None, "sharding_rules": (("in", "x"),)},
        ),
        (Quantised(1.0, bits=4), {"bits": 4}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_boxes_of_linen_are_metadata(box, metadata):
    """Each field under its name here, and the same box again from the Variable, whatever else is on it."""
    variable = bridge.variables.to_nnx_var("params", box)
    assert type(variable) is nnx.Param
    assert variable.get_metadata() == {**metadata, "linen_meta_type": type(box)}
    variable.set_metadata(note="mine")
    assert bridge.variables.to_linen_var(variable) == box


@pytest.mark.parametrize(
    "box",
    [
        nn.Partitioned(jnp.ones(3), names=("in",)),
        Quantised(jnp.ones(3), bits=4),
        bridge.NNXMeta(nnx.Param, jnp.ones(3), {}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_box_of_linen_in_place_of_an_array_is_refused(box):
    """As in a checkpoint of partitioned parameters: no layer computes with a box, though it is a pytree of an array."""
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    given = {"kernel": jnp.ones((2, 3)), "bias": box}
    name = type(box).__name__
    message = f"(?s)bias: expected float32.3., got {name}.*linen.meta.unbox takes the values out of {name}"
    with pytest.raises(nnx.errors.StateMismatchError, match=message):
        nnx.update(layer, given)
    with pytest.raises(nnx.errors.StateMismatchError, match=message):
        nnx.merge(nnx.graphdef(layer), given)
    nnx.update(layer, meta.unbox(given))
    assert (layer.bias == 1).all()
    held = nnx.Dict(bias=nnx.Param(box))  # where a box was before, there may be one
    nnx.update(held, nnx.state(held))
    assert type(nnx.merge(*nnx.split(held)).bias.value) is type(box)


def test_nnx_meta_is_the_variable():
    """Type, value and metadata there and back; only a Variable without metadata is bare."""
    variable = nnx.BatchStat(jnp.ones(2), sharding=("a",), note=1)
    box = bridge.variables.to_linen_var(variable)
    assert isinstance(box, bridge.NNXMeta)
    again = box.to_nnx_variable()
    assert (type(again), again.get_metadata()) == (type(variable), variable.get_metadata())
    assert box.get_partition_spec() == P("a")
    assert bridge.variables.to_linen_var(nnx.Param(2.0)) == 2.0
    with pytest.raises(nnx.errors.StateMismatchError, match="A BatchStat is found in the collection 'params'"):
        bridge.variables.to_nnx_var("params", box)


def test_nnx_meta_is_a_pytree_that_jit_takes():
    """The metadata is static and compared by value, and lists in it are no hindrance."""
    box = bridge.NNXMeta(nnx.Param, jnp.ones(2), {"out_sharding": ("a",), "notes": [1]})
    doubled = jax.jit(lambda box: jax.tree.map(lambda x: 2 * x, box))(box)
    assert doubled.metadata == box.metadata
    assert doubled.unbox().sum() == 4


@pytest.mark.parametrize("index", [0, 1, 2, -1])
def test_axes_are_named_and_removed(index):
    """At any place, also from the end; hooks run."""
    seen = []
    metadata = {"out_sharding": ("a", "b"), "on_add_axis": lambda v, index, name: seen.append((index, name))}
    box = bridge.NNXMeta(nnx.Param, jnp.ones((2, 3)), metadata)
    wide = box.add_axis(index, {nnx.PARTITION_NAME: "new"})
    expected = ["a", "b"]
    expected.insert(index % 3, "new")
    assert wide.metadata["out_sharding"] == tuple(expected)
    assert seen == [(index, "new")]
    assert wide.remove_axis(index, {}).metadata["out_sharding"] == ("a", "b")


@pytest.mark.parametrize("names", [("a", None), P("a", None)], ids=["tuple", "spec"])
def test_all_metadata_that_name_axes_follow_them(names):
    """Those that name the shards of the optimizer, too, and others that the transform was given a name for."""
    box = bridge.NNXMeta(
        nnx.Param, jnp.ones((2, 3)), {"out_sharding": names, "optimizer_sharding": names, "nick": ("x", "y")}
    )
    wide = box.add_axis(0, {nnx.PARTITION_NAME: "new", "nick": "z"})
    kind = type(names)
    assert wide.metadata == {
        "out_sharding": ("new", *names) if kind is tuple else P("new", *names),
        "optimizer_sharding": (None, *names) if kind is tuple else P(None, *names),
        "nick": ("z", "x", "y"),
    }
    assert wide.remove_axis(0, {nnx.PARTITION_NAME: "new", "nick": "z"}).metadata == box.metadata


def test_a_leaf_above_a_leaf_is_refused():
    """A value in one collection where another has a level."""
    with pytest.raises(nnx.errors.PathError, match="'a' in the collections 'params' and 'cache'"):
        bridge.variables.linen_vars_to_nnx_attrs({"params": {"a": 1}, "cache": {"a": {"b": 2}}})
    with pytest.raises(nnx.errors.PathError, match="'a' in the collections"):
        bridge.variables.linen_vars_to_nnx_attrs({"cache": {"a": {"b": 2}}, "params": {"a": 1}})


def test_a_collection_that_is_no_mapping_is_refused():
    """Say the variables of a Linen module where all of its collections are asked for."""
    with pytest.raises(TypeError, match="Expected a mapping"):
        bridge.variables.linen_vars_to_nnx_attrs({"kernel": jnp.ones(2)})


def test_what_is_no_variable_is_refused():
    """Only Variables have collections."""
    with pytest.raises(TypeError, match=r"but a\.b is 3"):
        bridge.variables.nnx_attrs_to_linen_vars({"a": {"b": 3}})


def test_functional():
    """A class as init and apply; apply needs the structure that init finds."""
    functional = bridge.functional(nnx.BatchNorm)(2)
    with pytest.raises(ValueError, match=r"functional\.init"):
        functional.apply({})
    state = functional.init(rngs=nnx.Rngs(0))
    _, (_, state) = functional.apply(state)(jnp.ones((4, 2)))
    assert (state["mean"].value > 0).all()
    assert list(bridge.functional(nnx.PReLU)().init()) == ["negative_slope"]  # a class that takes no rngs
