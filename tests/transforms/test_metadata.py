"""Axis names: they follow the axes that vmap and scan strip and stack, by default and under a name."""

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlib as nnx

KEYS = jax.random.split(jax.random.key(0), 3)
INIT = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"))
NAMED = {nnx.PARTITION_NAME: "layers"}


def make(key):
    return nnx.Linear(4, 4, kernel_init=INIT, rngs=nnx.Rngs(key))


def stacked(**options):
    return nnx.vmap(make, **options)(KEYS)


@pytest.mark.parametrize(("options", "name"), [({}, None), ({"transform_metadata": NAMED}, "layers")])
def test_a_new_axis_gets_a_name(options, name):
    model = stacked(**options)
    assert model.kernel.sharding_names == (name, "in", "out")
    assert model.bias.get_metadata() == {}


@pytest.mark.parametrize(("axis", "names"), [(0, "lio"), (1, "ilo"), (2, "iol"), (-1, "iol"), (-2, "ilo"), (-3, "lio")])
def test_the_name_stands_where_the_axis_is(axis, names):
    init = nnx.with_partitioning(nnx.initializers.ones, ("i", "o"))
    make = lambda key: nnx.Param(init(key, (4, 5)))
    v = nnx.vmap(make, out_axes=axis, transform_metadata={nnx.PARTITION_NAME: "l"})(KEYS)
    assert (v.sharding_names, v.shape[names.index("l")]) == (tuple(names), 3)
    seen = []
    nnx.vmap(lambda v: seen.append(v.sharding_names), in_axes=axis)(v)
    assert seen == [("i", "o")]
    assert v.sharding_names == tuple(names)


def layer_names(model, x):
    """Run a stack under scan; the names that the body saw."""
    seen = []

    def forward(x, layer):
        seen.append(layer.kernel.sharding_names)
        layer.kernel.value = layer.kernel * 0.5
        return layer(x)

    nnx.scan(forward, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)
    return seen[0]


@pytest.mark.parametrize("run", [nnx.vmap, nnx.scan], ids=["vmap", "scan"])
@pytest.mark.parametrize(
    "options", [{}, {"transform_metadata": NAMED}, {"transform_metadata": {nnx.PARTITION_NAME: "x"}}]
)
def test_a_stack_whose_metadata_change_keeps_the_name_that_its_axis_has(run, options):
    model = stacked(transform_metadata=NAMED)
    model.kernel.set_metadata(optimizer_sharding=("stack", "in", None))
    run(lambda layer: layer.kernel.set_metadata(note=1), in_axes=0, out_axes=0, **options)(model)
    metadata = model.kernel.get_metadata()
    assert metadata["note"] == 1
    assert metadata["out_sharding"] == ("layers", "in", "out")
    assert metadata["optimizer_sharding"] == ("stack", "in", None)


def test_names_follow_through_scan_and_back():
    model = stacked(transform_metadata=NAMED)
    assert layer_names(model, jnp.ones((1, 4))) == ("in", "out")
    assert model.kernel.sharding_names == ("layers", "in", "out")


def test_names_under_a_raw_transform():
    """The first axis, unless another is given, loses its name on the way in, and gets one on the way out."""
    model, seen = stacked(transform_metadata=NAMED), []

    @jax.vmap
    @nnx.transform_metadata(partition="layers")
    def forward(model):
        seen.append(model.kernel.sharding_names)
        return nnx.Param(model.kernel + 1, sharding=("in", "out"))

    assert forward(model).sharding_names == ("layers", "in", "out")
    assert seen == [("in", "out")]


def test_vmap_in_vmap():
    """Each level strips and stacks its own axis."""
    inner = lambda keys: nnx.vmap(make, transform_metadata=NAMED)(keys)
    model = nnx.vmap(inner, transform_metadata={nnx.PARTITION_NAME: "ensemble"})(
        jax.random.split(jax.random.key(0), (3, 2))
    )
    assert model.kernel.sharding_names == ("ensemble", "layers", "in", "out")
    seen = []
    nnx.vmap(lambda m: seen.append(m.kernel.sharding_names))(model)
    nnx.vmap(nnx.vmap(lambda m: seen.append(m.kernel.sharding_names)))(model)
    assert seen == [("layers", "in", "out"), ("in", "out")]


def test_variables_made_and_attached_inside():
    """What is new in a lane with an axis is stacked, and named; what is passed whole keeps its names."""
    model = stacked(transform_metadata=NAMED)

    def attach(model, whole, x):
        model.scale = nnx.Param(jnp.ones(4), sharding=("out",))
        assert whole.kernel.sharding_names == ("in", "out")
        return nnx.Intermediate(whole(x), sharding=("batch", "out"))

    whole = make(KEYS[0])
    axes = {"in_axes": (0, None, None), "transform_metadata": NAMED}
    out = nnx.vmap(attach, **axes)(model, whole, jnp.ones((2, 4)))
    assert model.scale.sharding_names == ("layers", "out")
    assert out.sharding_names == ("layers", "batch", "out")
    assert whole.kernel.sharding_names == ("in", "out")


def test_metadata_set_inside_keeps_the_name_of_the_axis():
    model = stacked(transform_metadata=NAMED)
    change = lambda m: m.kernel.set_metadata(sharding=(None, "model"), note=1)
    nnx.vmap(change, transform_metadata=NAMED)(model)
    assert (model.kernel.sharding_names, model.kernel.note) == (("layers", None, "model"), 1)


def test_a_stacked_annotated_model_goes_into_an_optimizer():
    model = stacked()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        def loss(model):
            y = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)
            return (y**2).sum()

        optimizer.update(model, nnx.grad(loss)(model))

    step(model, optimizer, jnp.ones((2, 4)))
    names = {path: v.sharding_names for path, v in nnx.to_flat_state(nnx.state(optimizer)) if "kernel" in path}
    assert len(names) == 2
    assert set(names.values()) == {(None, "in", "out")}


def test_hooks_see_the_slice_and_the_name():
    seen = []
    hook = lambda what: lambda v, index, name: seen.append((what, v.shape, index, name))
    make = lambda key: nnx.Param(jnp.ones(2), on_add_axis=hook("add"), on_remove_axis=hook("remove"))
    v = nnx.vmap(make, transform_metadata=NAMED)(KEYS)
    assert seen == [("add", (2,), 0, "layers")]
    nnx.vmap(lambda v: None, transform_metadata=NAMED)(v)
    assert seen[1:] == [("remove", (2,), 0, "layers")]


def test_names_that_do_not_count_the_axis_are_left_alone():
    """A Variable made stacked by hand, and annotated as one layer."""
    v = nnx.Param(jnp.ones((3, 4, 5)), sharding=("in", "out"))
    seen = []
    nnx.vmap(lambda v: seen.append(v.sharding_names))(v)
    assert seen == [("in", "out")]
    assert v.sharding_names == ("in", "out")


def test_transform_metadata_names_the_axis_of_another_transform():
    """Under nnx.vmap, which then has nothing left to name, and under jax.vmap."""
    named = nnx.transform_metadata(make, partition="layers")
    assert nnx.vmap(named)(KEYS).kernel.sharding_names == ("layers", "in", "out")
    assert jax.vmap(named)(KEYS).kernel.sharding_names == ("layers", "in", "out")
    model = nnx.vmap(named)(KEYS)
    seen = []

    @nnx.vmap
    @nnx.transform_metadata(partition="layers")
    def forward(model):
        seen.append(model.kernel.sharding_names)
        model.kernel.value = model.kernel + 1

    forward(model)
    assert seen == [("in", "out")]
    assert model.kernel.sharding_names == ("layers", "in", "out")


def test_transform_metadata_within_a_scan():
    """What is carried has no new axis, and keeps its names."""
    model, seen = stacked(transform_metadata=NAMED), []
    axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}

    @nnx.scan(**axes)
    @nnx.transform_metadata(**axes, partition="layers")
    def forward(model, x):
        seen.append((model.kernel.sharding_names, x.sharding_names))
        x.value = model(x.value)
        return x

    x = nnx.Variable(jnp.ones((1, 4)), sharding=("batch", "features"))
    assert forward(model, x) is x
    assert seen == [(("in", "out"), ("batch", "features"))]
    assert (model.kernel.sharding_names, x.sharding_names) == (("layers", "in", "out"), ("batch", "features"))


def test_add_metadata_axis_is_for_the_kinds_it_names():
    init = nnx.with_partitioning(nnx.initializers.ones, ("a",))

    def make(key):
        return nnx.Dict(p=nnx.Param(init(key, (2,))), s=nnx.BatchStat(init(key, (2,))))

    add = nnx.add_metadata_axis(make, variable_axes={nnx.Param: 0}, metadata_params=NAMED)
    made = add(KEYS[0])
    assert (made.p.sharding_names, made.s.sharding_names) == (("layers", "a"), ("a",))


def test_other_metadata_names_the_axis_under_its_own_key():
    """Beside the names that shard, or without them; where it is a tuple of names, and has the key."""
    kinds = {nnx.PARTITION_NAME: "layers", "logical": "depth", "absent": "depth", "note": "depth"}

    @nnx.vmap(out_axes=1, transform_metadata=kinds)
    def make(key):
        named = nnx.Param(jnp.ones((2, 3)), out_sharding=("in", "out"), logical=("embed", "mlp"), note="text")
        return named, nnx.Param(jnp.ones(2), logical=("embed",))

    both, other = make(KEYS)
    assert both.get_metadata() == {
        "out_sharding": ("in", "layers", "out"),
        "logical": ("embed", "depth", "mlp"),
        "note": "text",
    }
    assert other.get_metadata() == {"logical": ("embed", "depth")}

    seen = []
    nnx.vmap(lambda v: seen.append((v.sharding_names, v.logical)), in_axes=1, transform_metadata=kinds)(both)
    assert seen == [(("in", "out"), ("embed", "mlp"))]
    nnx.spmd.remove_axis([other], 1, {"logical": "depth"})  # a whole value, which has the axis still
    assert other.logical == ("embed", "depth")


@pytest.mark.parametrize("name", [None, "depth"])
def test_names_of_moments_follow_the_axes(name):
    """Whether or not transform_metadata has an entry for them: an optimizer of a stack reads them."""
    options = {"transform_metadata": {"optimizer_sharding": name}} if name else {}
    names = {"out_sharding": ("in", "out"), "optimizer_sharding": ("out", "in")}
    stack = nnx.vmap(lambda x: nnx.Param(x, **names), **options)(jnp.ones((4, 2, 3)))
    assert stack.get_metadata() == {"out_sharding": (None, "in", "out"), "optimizer_sharding": (name, "out", "in")}
    seen = []
    nnx.scan(lambda c, v: (c, seen.append(v.get_metadata())), in_axes=(nnx.Carry, 0), **options)(0.0, stack)
    assert seen[0] == names


def test_a_class_that_names_its_axes_itself():
    """Its methods are called, also without any metadata; nothing is named for what a loop did not change."""
    seen = []

    class Named(nnx.Param):
        def add_axis(self, axis_index, axis_name=None):
            seen.append(("add", self.shape, axis_index, axis_name))

        def remove_axis(self, axis_index, axis_name=None):
            seen.append(("remove", self.shape, axis_index, axis_name))

    made = nnx.vmap(lambda key: Named(jnp.ones(2)), transform_metadata=NAMED)(KEYS)
    nnx.vmap(lambda v: v.sum(), transform_metadata=NAMED)(made)
    assert seen == [("add", (2,), 0, "layers"), ("remove", (2,), 0, "layers")]


def test_names_of_values_that_are_not_there():
    """By hand, metadata can be moved for a value that has not the axes that it names."""
    v = nnx.Param(jnp.array(0.0), out_sharding=("in", "out"))

    @nnx.transform_metadata(in_axes=0, out_axes=1, partition="in")
    def f(v):
        assert v.sharding_names == ("out",)
        v[...] += 1
        return nnx.Param(jnp.array(1.0), out_sharding=("a", "b"))

    assert f(v).sharding_names == ("a", "in", "b")
    assert (v.sharding_names, v.value) == (("in", "out"), 1.0)


def test_a_second_call_does_not_trace_again():
    model, count = stacked(transform_metadata=NAMED), []

    @nnx.jit
    def forward(model, x):
        count.append(1)
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)

    for _ in range(3):
        forward(model, jnp.ones((1, 4)))
    assert len(count) == 1
