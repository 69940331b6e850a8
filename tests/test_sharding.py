"""Names of axes, PartitionSpecs and shardings; what needs several devices is in eight_devices_sharding.py."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

import nnxlib as nnx
from nnxlib.core import errors


def test_on_eight_devices(run_on_eight_devices):
    """The tests in eight_devices_sharding.py pass where there are eight devices."""
    run_on_eight_devices(pathlib.Path(__file__).with_name("eight_devices_sharding.py"))


def spec(names, rules=None, **metadata):
    """The PartitionSpec of a Param with these names, as a tuple."""
    v = nnx.Param(jnp.ones((4, 4)), out_sharding=names, **metadata)
    if rules is None:
        return tuple(nnx.get_partition_spec(v).value)
    with nnx.logical_axis_rules(rules):
        return tuple(nnx.get_partition_spec(v).value)


def test_specs_of_a_tree():
    """Each array becomes a PartitionSpec in its place; what is no array None; types and metadata stay."""
    tree = {
        "named": nnx.Param(jnp.ones((2, 3)), out_sharding=("in", None), note="kept"),
        "plain": nnx.BatchStat(jnp.ones(3)),
        "number": nnx.Param(3.0),
        "pytree": nnx.Param({"a": jnp.ones(3), "b": 1}),
        "shape": nnx.Param(jax.ShapeDtypeStruct((3,), "float32")),
        "array": np.ones(3),
        "int": 1,
    }
    specs = nnx.get_partition_spec(tree)
    assert specs["named"].value == PartitionSpec("in", None)
    assert specs["named"].get_metadata() == tree["named"].get_metadata()
    assert type(specs["plain"]) is nnx.BatchStat
    assert specs["plain"].value == specs["shape"].value == specs["array"] == PartitionSpec()
    assert specs["number"].value is None
    assert specs["pytree"].value is None
    assert specs["int"] is None


def test_specs_of_a_module_keep_its_sharing():
    """A Module gives a Module, with shared Variables still shared, and the argument is not touched."""
    model = nnx.Dict(a=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    model.b = model.a
    specs = nnx.get_partition_spec(model)
    assert specs.a is specs.b
    assert specs.a.kernel.value == PartitionSpec()
    assert model.a.kernel.shape == (2, 3)
    assert jax.tree.structure(specs) == jax.tree.structure(model)


def test_rules_translate():
    """Names without a rule are mesh axes; None is no axis; several mesh axes may share one array axis."""
    assert spec(("embed", "data")) == ("embed", "data")
    assert spec(("embed", "mlp"), [("embed", "data"), ("mlp", None)]) == ("data", None)
    assert spec(("embed", "model"), [("embed", "data")]) == ("data", "model")
    assert spec(("embed", None), [("embed", ("data", "model"))]) == (("data", "model"), None)
    assert spec((("embed", "mlp"), None), [("embed", "data"), ("mlp", "model")]) == (("data", "model"), None)
    assert spec(PartitionSpec("embed"), [("embed", ["data"])]) == ("data",)
    assert spec([PartitionSpec.UNCONSTRAINED, "embed"], [("embed", "data")]) == (PartitionSpec.UNCONSTRAINED, "data")


def test_rules_that_come_first_have_priority():
    """A mesh axis is used once; a rule whose axis is taken is passed over."""
    assert spec(("embed", "mlp"), [("mlp", "model"), ("embed", "model"), ("embed", "data")]) == ("data", "model")
    assert spec(("embed", "embed"), [("embed", "data"), ("embed", "model")]) == ("data", "model")
    assert spec(("embed", "mlp"), [("embed", "data"), ("mlp", "data")]) == ("data", None)
    assert spec(("embed", "data"), [("embed", "data")]) == (None, "data")


def test_rules_in_rules():
    """Inner rules replace outer ones, which are back afterwards, also after an error; own rules come first."""
    with nnx.logical_axis_rules([("embed", "data")]):
        with nnx.logical_axis_rules([("mlp", "model")]):
            assert spec(("embed", "mlp")) == ("embed", "model")
        with pytest.raises(KeyError), nnx.logical_axis_rules([]):
            raise KeyError
        assert spec(("embed", "mlp")) == ("data", "mlp")
        assert spec(("embed", "mlp"), sharding_rules=[("embed", "own")]) == ("own", "mlp")


def test_named_shardings():
    """The same with the shardings of a mesh."""
    mesh = jax.make_mesh((1,), ("model",))
    tree = {"a": nnx.Param(jnp.ones((2, 3)), out_sharding=(None, "model")), "b": jnp.ones(3), "c": 1}
    shardings = nnx.get_named_sharding(tree, mesh)
    assert shardings["a"].value == NamedSharding(mesh, PartitionSpec(None, "model"))
    assert shardings["b"] == NamedSharding(mesh, PartitionSpec())
    assert shardings["c"] is None


def test_names_that_the_mesh_does_not_have():
    """All of them are listed with their paths; rules help."""
    mesh = jax.make_mesh((1,), ("model",))
    x = jnp.ones((2, 3))
    tree = nnx.Dict(
        a=nnx.Param(x, out_sharding=("embed", "model")),
        b=nnx.Dict(c=nnx.Param(x, out_sharding=("model", "model"))),
    )
    with pytest.raises(errors.PlacementError) as caught:
        nnx.get_named_sharding(tree, mesh)
    for text in ("{'model': 1}", "a: no axis 'embed'", "b.c: ('model', 'model') would use", "logical_axis_rules"):
        assert text in str(caught.value)
    with nnx.logical_axis_rules([("embed", None)]):
        assert nnx.get_named_sharding(tree.a, mesh).value.spec == PartitionSpec(None, "model")


def test_annotated_layers_without_a_mesh():
    """Nothing happens but that the names are kept."""
    init = nnx.with_partitioning(nnx.initializers.ones, ("data", "model"))
    model = nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(0))
    assert model.kernel.sharding_names == ("data", "model")
    assert nnx.jit(model)(jnp.ones(2)).tolist() == [2.0, 2.0, 2.0]


def test_axes_by_hand():
    """add_axis and remove_axis name the axes of a tree in place."""
    tree = {"a": nnx.Param(jnp.ones((2, 3)), out_sharding=("in", "out")), "b": nnx.Param(1.0), "c": jnp.ones(2)}
    assert nnx.spmd.add_axis(tree, 1, {nnx.PARTITION_NAME: "layers"}) is tree
    assert tree["a"].sharding_names == ("in", "layers", "out")
    tree["a"].value = tree["a"].value[0]
    nnx.spmd.remove_axis(tree, 0, {})
    assert tree["a"].sharding_names == ("layers", "out")  # there was another name too many: one goes at a time


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
def test_shapes_under_a_mesh_have_shardings_over_its_devices(kind):
    """What restores a checkpoint needs to know them; within a trace there are none to know."""
    mesh = jax.make_mesh((1,), ("model",), axis_types=(kind,))
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
    make = lambda: nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(0))
    without = nnx.eval_shape(make)
    with jax.set_mesh(mesh):
        abstract = nnx.eval_shape(make)
        jax.jit(lambda: nnx.eval_shape(make) and None)()
        late = nnx.as_abstract(without)
    for model in abstract, late:
        assert model.kernel.value.sharding == NamedSharding(mesh, PartitionSpec(None, "model"))
    for shape in jax.tree.leaves(nnx.state(abstract)):
        assert shape.sharding is None or shape.sharding.mesh == mesh


@pytest.mark.parametrize("in_format", [False, True])
@pytest.mark.parametrize("name", [None, "layers", "data"])
def test_a_sharding_in_place_of_names_follows_the_axes(name, in_format):
    """vmap stacks the axis, and scan takes it away; the spec gets the name of the axis if the mesh has it."""
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    annotation = Format(Layout((1, 0)), sharding) if in_format else sharding
    init = nnx.with_partitioning(nnx.initializers.ones, annotation)
    metadata = {nnx.PARTITION_NAME: name}

    @nnx.vmap(transform_metadata=metadata)
    def make(key):
        return nnx.Linear(4, 4, kernel_init=init, rngs=nnx.Rngs(key))

    seen = []

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=metadata)
    def forward(x, layer):
        seen.append(layer.kernel.sharding_names.spec)
        return layer(x)

    stack = make(jax.random.split(jax.random.key(0), 3))
    forward(jnp.ones(4), stack)
    assert set(seen) == {PartitionSpec(None, "model")}
    expected = PartitionSpec("data" if name == "data" else None, None, "model")
    assert stack.kernel.sharding_names == NamedSharding(mesh, expected)
    assert nnx.get_partition_spec(nnx.state(stack)).kernel.value == expected


def test_a_stacked_axis_that_code_names_by_hand():
    """Names that got a None in front where vmap had named the axis already: the surplus is left out."""

    @nnx.vmap
    def make(key):
        init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
        return nnx.Linear(2, 4, kernel_init=init, rngs=nnx.Rngs(key))

    model = make(jax.random.split(jax.random.key(0), 3))
    model.kernel.set_metadata("out_sharding", (None, *model.kernel.out_sharding))
    mesh = jax.make_mesh((1,), ("model",))
    assert nnx.get_partition_spec(nnx.state(model)).kernel.value == PartitionSpec(None, None, "model")
    shardings = nnx.get_named_sharding(nnx.state(model), mesh)
    assert jax.device_put(nnx.state(model), shardings).kernel.value.sharding.spec == PartitionSpec(None, None, "model")
    assert nnx.Param(jnp.ones(4), out_sharding=(None, "model"), mesh=mesh).sharding.spec == PartitionSpec("model")
    with pytest.raises(errors.PlacementError, match="it has 1 axes, and 2 names"):
        nnx.Param(jnp.ones(4), out_sharding=("model", None), mesh=mesh)


def test_the_module_path_of_flax():
    """`from nnxlib.spmd import ...` works, with the same objects."""
    from nnxlib.spmd import get_partition_spec, get_var_pspec, with_partitioning

    assert get_partition_spec is nnx.get_partition_spec
    assert with_partitioning is nnx.with_partitioning
    assert get_var_pspec(nnx.Param(jnp.ones(2))) == PartitionSpec()
    assert nnx.spmd.PARTITION_NAME == nnx.PARTITION_NAME


def test_what_is_no_mesh_is_refused():
    with pytest.raises(TypeError, match=r"get_named_sharding takes a mesh, such as of jax.make_mesh, but got str"):
        nnx.get_named_sharding(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), "data")


def test_a_shape_is_given_the_sharding_that_it_names_whatever_mesh_is_set():
    meshes = [jax.make_mesh((1,), (name,), axis_types=(jax.sharding.AxisType.Auto,)) for name in ("model", "data")]
    sharding = NamedSharding(meshes[0], PartitionSpec("model"))
    for mesh in meshes:
        with jax.set_mesh(mesh):
            v = nnx.Param(jax.ShapeDtypeStruct((4,), "float32"), out_sharding=sharding)
        assert v.value.sharding == sharding
