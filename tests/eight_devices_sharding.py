"""Variables that are sharded where they are made; run by test_sharding.py in a process that has eight CPU devices."""

import importlib.metadata
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import nnxlib as nnx
from nnxlib.core import errors

AUTO, EXPLICIT, MIXED = (
    jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    for types in ((AxisType.Auto,) * 2, (AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Auto))
)
ONES = jnp.ones((8, 8))
BOTH = PartitionSpec("data", "model")
# JAX deprecates the `with mesh:` block, which is still in much published code.
pytestmark = pytest.mark.filterwarnings("ignore:`with mesh:DeprecationWarning")

CONTEXTS = {
    "auto": lambda: jax.set_mesh(AUTO),
    "explicit": lambda: jax.set_mesh(EXPLICIT),
    "mixed": lambda: jax.set_mesh(MIXED),
    "with mesh": lambda: AUTO,
}


@pytest.fixture(params=CONTEXTS)
def mesh(request):
    """A mesh context of each kind."""
    with CONTEXTS[request.param]():
        yield {"explicit": EXPLICIT, "mixed": MIXED}.get(request.param, AUTO)


def param(*names, x=ONES, **metadata):
    return nnx.Param(x, out_sharding=names, **metadata)


def dense():
    init = nnx.with_partitioning(nnx.initializers.ones, ("data", "model"))
    return nnx.Linear(8, 8, kernel_init=init, rngs=nnx.Rngs(0))


def is_placed(variable, spec, mesh=AUTO):
    return variable.value.sharding.is_equivalent_to(NamedSharding(mesh, spec), variable.ndim)


def test_eight_devices():
    """The process has them."""
    assert jax.device_count() == 8


def test_placed_where_it_is_made(mesh):
    """Names, tuples of names, short and given as a PartitionSpec, of arrays, keys and numpy arrays."""
    assert is_placed(param("data", "model"), BOTH, mesh)
    assert is_placed(param(("data", "model")), PartitionSpec(("data", "model")), mesh)
    assert is_placed(nnx.Param(ONES, sharding=PartitionSpec(None, "data")), PartitionSpec(None, "data"), mesh)
    assert is_placed(nnx.Param(np.ones(8), out_sharding="model"), PartitionSpec("model"), mesh)
    assert is_placed(param("data", x=jax.random.split(jax.random.key(0), 8)), PartitionSpec("data"), mesh)
    assert is_placed(param(None, None), PartitionSpec(), mesh)
    assert is_placed(param(["data", "model"]), PartitionSpec(("data", "model")), mesh)
    assert is_placed(param(None, "model", x=jnp.ones((8, 8, 8))), PartitionSpec(None, "model"), mesh)
    np.testing.assert_array_equal(param("data", "model").value, ONES)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT])
def test_a_sharding_in_place_of_names(mesh):
    """With a mesh of its own; a Format says how the array lies in memory, too."""
    sharding = NamedSharding(mesh, PartitionSpec("data", None))
    assert is_placed(nnx.Param(ONES, out_sharding=sharding), sharding.spec, mesh)
    for order in (0, 1), (1, 0):
        asked = Format(Layout(major_to_minor=order), sharding)
        v = nnx.Param(ONES, out_sharding=asked)
        assert is_placed(v, sharding.spec, mesh)
        assert v.value.format.layout.major_to_minor == order
        assert v.sharding_names == asked
        assert nnx.get_partition_spec(v).value == sharding.spec
        with jax.set_mesh(mesh):
            assert is_placed(jax.jit(lambda asked=asked: nnx.Param(ONES, out_sharding=asked))(), sharding.spec, mesh)


def test_placed_in_a_trace(mesh):
    """Under nnx.jit and raw jax.jit the placement is part of the program."""
    for jit in (nnx.jit, jax.jit):
        kernel = jit(lambda: param("data", "model"))()
        assert is_placed(kernel, BOTH, mesh)
        np.testing.assert_array_equal(kernel, ONES)


def test_a_jitted_construction_never_holds_an_unsharded_copy():
    """What the compiler plans for each device, temporaries and all, is less than one whole kernel."""
    size = 512
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))

    def make():
        return nnx.Linear(size, size, kernel_init=init, rngs=nnx.Rngs(0))

    with jax.set_mesh(jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))):
        jitted = nnx.jit(make)
        planned = jitted.lower().compile().memory_analysis()
        kernel = jitted().kernel.value
        abstract = nnx.eval_shape(make).kernel.value
    whole = 4 * size * size
    assert planned.output_size_in_bytes < whole / 4
    assert planned.temp_size_in_bytes + planned.output_size_in_bytes < whole
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(size, size // 8)}
    assert abstract.sharding.spec == PartitionSpec(None, "model")


def test_placed_under_vmap():
    """The axis that vmap stacks is not sharded, and the names of the others follow."""
    for mesh in (AUTO, EXPLICIT):
        with jax.set_mesh(mesh):
            layers = nnx.vmap(lambda i: param("data", "model", x=ONES * i))(jnp.arange(3.0))
        assert layers.sharding_names == (None, "data", "model")
        assert is_placed(layers, PartitionSpec(None, "data", "model"), mesh)


STACKING = {
    "vmap": lambda make: nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "data"}),
    "scan": lambda make: nnx.scan(make, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "data"}),
    "Stack": lambda make: lambda keys: nnx.Stack(lambda rngs: make(rngs()), 4, partition="data", rngs=nnx.Rngs(0)),
    "layers": lambda make: lambda keys: nnx.Stack.from_layers([make(key) for key in keys], partition="data"),
}


@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit, jax.jit], ids=["eager", "nnx.jit", "jax.jit"])
@pytest.mark.parametrize("stacking", STACKING)
def test_a_stacked_axis_with_a_name_is_sharded(stacking, jit):
    """Parameters and moments, as eval_shape says; also in a function that was compiled without a mesh before."""
    optax = pytest.importorskip("optax")
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    make = STACKING[stacking](lambda key: nnx.Linear(8, 8, kernel_init=init, rngs=nnx.Rngs(key)))
    find = lambda made: getattr(made, "layers", made)
    made, keys = jit(make), jax.random.split(jax.random.key(0), 4)
    expected = np.asarray(find(made(keys)).kernel)
    with jax.set_mesh(AUTO):
        model, abstract = made(keys), nnx.eval_shape(make, keys)
        kernel = find(model).kernel
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        (moment,) = [x for x in jax.tree.leaves(optimizer.opt_state[0].mu) if x.ndim == 3]
    np.testing.assert_allclose(kernel, expected, rtol=1e-6)
    assert kernel.sharding_names == ("data", None, "model")
    assert is_placed(kernel, PartitionSpec("data", None, "model"))
    assert moment.sharding.is_equivalent_to(kernel.value.sharding, 3)
    assert find(abstract).kernel.value.sharding.spec == PartitionSpec("data", None, "model")


def test_a_stacked_axis_over_explicit_axes_stays_whole():
    """There a loop over it would be an error of JAX."""
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
    make = nnx.vmap(
        lambda key: nnx.Linear(8, 8, kernel_init=init, rngs=nnx.Rngs(key)),
        transform_metadata={nnx.PARTITION_NAME: "data"},
    )
    keys = jax.random.split(jax.random.key(0), 2)
    with jax.set_mesh(EXPLICIT):
        layers = make(keys)
        forward = nnx.scan(lambda x, layer: layer(x, out_sharding=jax.P()), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        assert forward(ONES, layers).shape == (8, 8)
        abstract = nnx.eval_shape(make, keys)
    assert layers.kernel.sharding_names == ("data", None, "model")
    for made in layers, abstract:
        assert made.kernel.value.sharding.spec == PartitionSpec(None, None, "model")


def test_names_that_the_mesh_does_not_know_shard_nothing(mesh):
    """All of them logical: as if there were no mesh. Some of them: the others still shard."""
    assert is_placed(param("data", "mlp"), PartitionSpec("data"), mesh)
    assert param("embed", "mlp").value.is_fully_replicated
    assert nnx.jit(lambda: param("embed", "mlp"))().value.is_fully_replicated


def test_no_mesh_no_sharding():
    """Without a mesh the annotation is kept, and nothing is sharded."""
    v = param("data", "model")
    assert v.sharding_names == ("data", "model")
    assert len(v.value.devices()) == 1


def test_a_mesh_of_its_own():
    """A mesh in the metadata, or a whole NamedSharding, needs no context."""
    assert is_placed(param("data", "model", mesh=AUTO), BOTH)
    assert is_placed(jax.jit(lambda: param("data", "model", mesh=AUTO))(), BOTH)
    assert is_placed(nnx.Param(ONES, out_sharding=NamedSharding(AUTO, BOTH)), BOTH)


def test_rules(mesh):
    """Logical names are translated by the rules around, or by the Variable's own."""
    rules = [("embed", "data"), ("mlp", "model")]
    with nnx.logical_axis_rules(rules):
        assert is_placed(param("embed", "mlp"), BOTH, mesh)
    assert is_placed(param("embed", "mlp", sharding_rules=rules), BOTH, mesh)


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_a_compiled_function_follows_the_rules(jit):
    """Under other rules, or without the switch, it is traced anew, and under those before it is not."""
    traces = []

    @jit
    def make(x):
        traces.append(1)
        return nnx.Param(x, out_sharding=("embed", "mlp")).value

    with jax.set_mesh(AUTO):
        for _ in range(2):
            with nnx.logical_axis_rules([("embed", "data"), ("mlp", ["model"])]):
                assert make(ONES).sharding.spec == BOTH
            with nnx.logical_axis_rules([("embed", "model")]):
                assert make(ONES).sharding.spec == jax.P("model")
                with nnx.use_eager_sharding(False):
                    assert make(ONES).is_fully_replicated
    assert len(traces) == 3


def test_the_switch():
    """Off for a block, for one Variable, for good; other threads have their own."""
    with jax.set_mesh(AUTO):
        with nnx.use_eager_sharding(False):
            assert not nnx.using_eager_sharding()
            assert param("data", "model").value.is_fully_replicated
            assert is_placed(param("data", "model", eager_sharding=True), BOTH)
        assert param("data", "model", eager_sharding=False).value.is_fully_replicated
        nnx.use_eager_sharding(False)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(nnx.using_eager_sharding()))
        thread.start()
        thread.join()
        assert (seen, nnx.using_eager_sharding()) == ([True], False)
        nnx.use_eager_sharding(True)
        assert nnx.using_eager_sharding()


def test_what_is_not_an_array_stays():
    """Numbers and pytrees in a Variable are not placed."""
    with jax.set_mesh(AUTO):
        assert nnx.Param(1.0, out_sharding=()).value == 1.0
        assert nnx.Param({"a": ONES}, out_sharding=("data",)).value["a"] is ONES


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        (("data", None, None), (8, 8), r"Param \(float32\[8, 8\]\).*it has 2 axes, and 3 names"),
        (("data", "data"), (8, 8), "would use a mesh axis twice"),
        ((None, "model"), (8, 3), r"{'data': 2, 'model': 4}: the mesh does not divide axis 1 of size 3 by 4"),
    ],
    ids=["too many", "twice", "uneven"],
)
def test_what_does_not_fit(mesh, names, shape, message):
    """The error says what and why, and how to go on."""
    with pytest.raises(errors.PlacementError, match=message):
        nnx.Param(jnp.ones(shape), out_sharding=names)
    with nnx.use_eager_sharding(False):
        nnx.Param(jnp.ones(shape), out_sharding=names)


def test_a_compiled_program_may_shard_unevenly():
    """JAX pads there; so a shape by itself is not refused."""
    make = lambda: param(None, "model", x=jnp.ones((8, 3)))
    with jax.set_mesh(AUTO):
        np.testing.assert_array_equal(jax.jit(make)().value, jnp.ones((8, 3)))
        assert nnx.eval_shape(make).value.sharding.spec == PartitionSpec(None, "model")


def test_an_axis_that_is_left_to_the_compiler():
    """Of an array that is made eagerly there is nothing to choose: it is not sharded along that axis."""
    make = lambda: nnx.Param(ONES, out_sharding=PartitionSpec(PartitionSpec.UNCONSTRAINED, "model"))
    with jax.set_mesh(AUTO):
        assert is_placed(make(), PartitionSpec(None, "model"))
        assert is_placed(jax.jit(make)(), PartitionSpec(None, "model"))


def test_inside_shard_map():
    """Axes that are manual there shard nothing."""
    made = jax.shard_map(lambda: param("data", "model").value, mesh=AUTO, in_specs=(), out_specs=PartitionSpec("data"))
    assert made().shape == (16, 8)


def test_the_published_pattern():
    """Make, constrain and return a sharded model under jit, with eager sharding and without."""

    for eager in (True, False):

        @nnx.jit
        def create():
            model = dense()
            state = nnx.state(model)
            pspecs = nnx.get_partition_spec(state)
            sharded = jax.lax.with_sharding_constraint(state, pspecs)
            nnx.update(model, sharded)
            return model

        with nnx.use_eager_sharding(eager), AUTO:
            model = create()
        assert is_placed(model.kernel, BOTH)
        assert is_placed(model.bias, PartitionSpec())


def test_device_put_by_named_shardings():
    """get_named_sharding gives what jax.device_put takes."""
    state = nnx.state(dense())
    placed = jax.device_put(state, nnx.get_named_sharding(state, AUTO))
    assert is_placed(placed.kernel, BOTH)
    assert is_placed(placed.bias, PartitionSpec())


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "x", [np.zeros((8, 8)), jnp.zeros((8, 8)), 0.0, jnp.zeros(8, "bfloat16")], ids=["numpy", "jax", "number", "row"]
)
def test_a_whole_write_by_index_stays_where_the_array_is(mesh, x):
    """As a write of a part; weights are loaded in this way. A value that is assigned takes its own place with it."""
    v = nnx.Param(jax.device_put(ONES, NamedSharding(mesh, BOTH)))
    before = v.sharding
    v[...] = x
    assert (v.sharding, v.dtype, v.shape) == (before, jnp.float32, (8, 8))
    assert not v.any()
    v[...] = jax.device_put(ONES, jax.devices()[3])
    assert v.sharding == before
    v.value = jax.device_put(ONES, jax.devices()[3])
    assert v.sharding.device_set == {jax.devices()[3]}


def test_a_whole_write_by_index_takes_an_array_without_a_place_along():
    """One that JAX was free to put anywhere."""
    v = nnx.Param(ONES)
    v[...] = jax.device_put(ONES, NamedSharding(AUTO, BOTH))
    assert is_placed(v, BOTH)


def test_the_optimizer_follows():
    """Moments are sharded as the parameters are."""
    optax = pytest.importorskip("optax")
    with jax.set_mesh(AUTO):
        optimizer = nnx.Optimizer(dense(), optax.adam(1e-3))
    assert is_placed(optimizer.opt_state[0].mu.kernel, BOTH)


def test_abstract_models(mesh):
    """eval_shape gives shapes with shardings under a mesh; as_abstract adds them later."""
    abstract = nnx.eval_shape(dense)
    assert tuple(abstract.kernel.value.sharding.spec) == ("data", "model")
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(dense)
        assert tuple(getattr(abstract.kernel.value.sharding, "spec", ())) in ((), (None, None))
    if mesh is AUTO:
        for tree in (abstract, nnx.state(abstract), {"a": nnx.state(abstract)}):
            kernel, bias = sorted(jax.tree.leaves(nnx.as_abstract(tree)), key=lambda x: -x.ndim)
            assert tuple(kernel.sharding.spec) == ("data", "model")
            assert bias.sharding is None


def test_as_abstract_leaves_the_rest():
    """Concrete arrays, unknown names, and everything without a mesh."""
    with nnx.use_eager_sharding(False):
        abstract, unknown = nnx.eval_shape(dense), nnx.eval_shape(lambda: param("embed"))
    assert nnx.as_abstract(abstract).kernel.value.sharding is None
    with jax.set_mesh(AUTO), nnx.use_eager_sharding(False):
        assert nnx.as_abstract(unknown).value.sharding is None
        concrete = param("data", "model")
        assert nnx.as_abstract(concrete).value is concrete.value


def test_get_abstract_model():
    """A GraphDef, and a State of shapes with shardings of the given mesh."""
    graphdef, state = nnx.get_abstract_model(dense, AUTO)
    assert state.kernel.value.sharding == NamedSharding(AUTO, BOTH)
    assert state.bias.value.sharding == NamedSharding(AUTO, PartitionSpec())
    assert isinstance(nnx.merge(graphdef, state), nnx.Linear)
    with pytest.raises(errors.PlacementError, match="kernel: no axis 'model'"):
        nnx.get_abstract_model(dense, jax.make_mesh((8,), ("data",)))


@pytest.mark.skipif(importlib.metadata.version("treescope") == "0.1.9", reason="it cannot draw arrays of JAX 0.8")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Treescope looks at all names of numpy
def test_treescope_shows_how_arrays_are_sharded():
    """Which device holds which part of an array, by itself and in a Variable, beside the names of the Variable."""

    def shown(x):
        with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
            page = treescope.render_to_html(x, compressed=False)
        return re.findall(r"Sharded across 8 CPU devices|axis \d: 8/\d|(?:data|model)(?=&#x27;)", page)

    devices = ["Sharded across 8 CPU devices"]
    array = jax.device_put(ONES, NamedSharding(AUTO, BOTH))
    assert {*shown(array)} == {*devices, "axis 0: 8/2", "axis 1: 8/4"}
    with jax.set_mesh(AUTO):
        layer = nnx.Dict(kernel=param(None, "model"), bias=param("model", "data"))
    kernel = {*devices, "axis 0: 8/1", "axis 1: 8/4", "model"}
    assert {*shown(layer["kernel"])} == kernel
    assert {*shown(layer)} == kernel | {"axis 0: 8/4", "axis 1: 8/2", "data"}
    assert {*shown(param("data", "model"))} == {"data", "model"}  # no mesh: names alone
