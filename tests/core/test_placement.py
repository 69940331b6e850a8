"""Where a Variable is placed; more, with several devices, is in ../test_sharding.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import nnxlib as nnx
from nnxlib.core import placement
from nnxlib.core.errors import ArgumentError
from nnxlib.core.tracing import current_mesh

MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.filterwarnings("ignore:`with mesh:DeprecationWarning")  # deprecated, and in much published code
def test_the_mesh_of_the_context():
    """That of set_mesh comes before that of a `with mesh:` block; both are seen inside jit."""
    other = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    assert current_mesh() is None
    with MESH:
        assert current_mesh().axis_names == ("data",)
        assert jax.jit(lambda: jnp.zeros(len(current_mesh().axis_names)))().shape == (1,)
    with jax.set_mesh(other):
        assert current_mesh().axis_names == ("model",)
    assert current_mesh() is None


def test_targets():
    """The part of a spec that a mesh knows; none without names, without a mesh, or if it knows none of them."""

    def target_of(metadata):
        return placement.target_of(metadata, placement.spec_of(metadata))

    assert target_of({"out_sharding": ("data", "mlp"), "mesh": MESH}) == (MESH, PartitionSpec("data", None))
    assert target_of({"out_sharding": (None,), "mesh": MESH}) == (MESH, PartitionSpec(None))
    assert target_of({"out_sharding": ("embed", "mlp"), "mesh": MESH}) is None
    free = PartitionSpec(PartitionSpec.UNCONSTRAINED, "data")
    assert target_of({"out_sharding": free, "mesh": MESH}) == (MESH, free)
    assert target_of({"out_sharding": ("data",)}) is None
    assert target_of({"mesh": MESH}) is None
    assert target_of({"out_sharding": (), "mesh": MESH}) is None
    assert target_of({"out_sharding": NamedSharding(MESH, PartitionSpec())}) == (MESH, PartitionSpec())


def test_an_empty_mesh_is_none():
    """It is what JAX has where no mesh is set, and code passes it on."""
    empty = jax.sharding.Mesh(np.empty((), object), ())
    for names in (None,), ("data",):
        kernel = nnx.Param(jnp.ones(2), out_sharding=names, mesh=empty)
        assert kernel.value.sharding == jnp.ones(2).sharding
        with jax.set_mesh(MESH):
            kernel = nnx.Param(jnp.ones(2), out_sharding=names, mesh=empty)
        assert kernel.value.sharding == NamedSharding(MESH, PartitionSpec(*names))


def test_shapes():
    """A Variable with a shape in it gets the sharding, unless the shape has one."""
    spec = NamedSharding(MESH, PartitionSpec())
    for before, after in ((None, NamedSharding(MESH, PartitionSpec("data"))), (spec, spec)):
        shape = jax.ShapeDtypeStruct((2,), "float32", sharding=before)
        assert nnx.Param(shape, out_sharding=("data",), mesh=MESH).value.sharding == after
    with pytest.raises(nnx.errors.PlacementError, match="it has 1 axes, and 2 names"):
        nnx.Param(jax.ShapeDtypeStruct((2,), "float32"), out_sharding=("data", None), mesh=MESH)


def test_other_variables_are_not_looked_at(monkeypatch):
    """Only a Variable that names its axes pays for placement."""
    monkeypatch.setattr("nnxlib.core.variables.placed", None)
    assert nnx.Param(jnp.ones(2), layer="first").layer == "first"


def test_a_mesh_in_the_metadata_has_to_have_the_names():
    """It was asked for, so a name that it does not have is a mistake; one in rules is translated first."""
    said = (
        r"Cannot shard a Param \(float32\[2, 3\]\) with the axes \(None, 'dta'\) .*it has no axis 'dta', but 'data'\."
    )
    with pytest.raises(nnx.errors.PlacementError, match=said):
        nnx.Param(jnp.ones((2, 3)), out_sharding=(None, "dta"), mesh=MESH)
    with pytest.raises(nnx.errors.PlacementError, match=r"it has no axis 'mlp'\."):
        nnx.Param(jnp.ones((2, 3)), out_sharding=("data", "mlp"), mesh=MESH)
    with nnx.logical_axis_rules([("mlp", "data"), ("embed", None)]):
        kernel = nnx.Param(jnp.ones((2, 3)), out_sharding=("embed", "mlp"), mesh=MESH)
    assert kernel.value.sharding == NamedSharding(MESH, PartitionSpec(None, "data"))


def test_a_name_that_the_mesh_of_the_context_nearly_has_causes_a_warning(recwarn):
    """It is ignored as any other name that the mesh does not have, but that is hardly what was meant."""
    with jax.set_mesh(MESH):
        nnx.Param(jnp.ones((2, 3)), out_sharding=("embed", "mlp"))
        assert not recwarn
        with pytest.warns(UserWarning, match="it has no axis 'dta', but 'data'") as caught:
            kernel = nnx.Param(jnp.ones((2, 3)), out_sharding=("dta", "mlp"))
    assert kernel.value.sharding.is_fully_replicated
    assert caught[0].filename == __file__


@pytest.mark.parametrize("names", [3, jnp.ones])
def test_names_of_axes_that_are_no_names(names):
    with pytest.raises(ArgumentError, match=r"The names of axes .* such as \('embed', None\).*, but got"):
        nnx.Param(jnp.ones((2, 3)), sharding=names)


@pytest.mark.parametrize("rules", [{"embed": "model"}, [("embed",)], ["embed"], "embed"])
def test_rules_that_are_no_pairs(rules):
    with pytest.raises(ArgumentError, match="The rules are pairs of a logical name and a mesh axis"):
        nnx.logical_axis_rules(rules).__enter__()
    with nnx.logical_axis_rules(iter([["embed", "model"]])):  # a list is a pair, too
        assert nnx.get_partition_spec(nnx.Param(jnp.ones(2), sharding=("embed",))).value == jax.P("model")
