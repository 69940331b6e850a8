"""nnx.eval_shape: shapes without computing, and no live object changed."""

import contextlib
import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from tests.properties.compare import Snapshot, assert_same, objects_in

SPEC = jax.ShapeDtypeStruct((4, 2), jnp.float32)


class Net(nnx.Module):
    def __init__(self, features=3, *, rngs):
        self.linear = nnx.Linear(2, features, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tied, self.array, self.flag = self.linear, jnp.zeros(2), "x"

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def make():
    return Net(rngs=nnx.Rngs(0))


def is_abstract(x):
    return all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(x))


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(tree))


@pytest.mark.parametrize(
    "f",
    [
        make,
        lambda: make(),
        functools.partial(Net, 3, rngs=nnx.Rngs(0)),
        functools.partial(make),
        lambda: nnx.jit(make)(),
        lambda: nnx.clone(make()),
    ],
    ids=["function", "lambda", "partial of a class", "partial", "jitted inside", "clone"],
)
def test_abstract_models(f):
    """A Module made inside has the shapes and dtypes of a concrete one, its structure and sharing, and no array."""
    model, concrete = nnx.eval_shape(f), make()
    assert is_abstract(model)
    assert shapes(model) == shapes(concrete)
    assert model.tied is model.linear
    assert (model.flag, model.dropout.rate) == ("x", 0.5)


def test_the_same_function_sees_what_has_changed():
    """Unlike `jax.eval_shape`, which answers from a cache."""
    config = types.SimpleNamespace(width=2)

    def make():
        return nnx.Linear(1, config.width, rngs=nnx.Rngs(0))

    for config.width in (2, 3):
        assert nnx.eval_shape(make).kernel.shape == (1, config.width)


def test_what_an_abstract_model_is_for():
    """A checkpoint is restored into it: merge with a concrete state, or update, gives the model."""
    model, x = make(), jnp.ones((4, 2))
    model.eval()
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: (m := make(), m.eval())[0]))
    np.testing.assert_array_equal(nnx.merge(graphdef, nnx.state(model))(x), model(x))
    abstract = nnx.eval_shape(make)
    nnx.update(abstract, nnx.state(model))
    abstract.eval()
    np.testing.assert_array_equal(abstract(x), model(x))


def test_nothing_is_computed():
    """A model that would need terabytes takes no memory."""
    model = nnx.eval_shape(lambda: nnx.Linear(10**6, 10**6, rngs=nnx.Rngs(0)))
    assert model.kernel.shape == (10**6, 10**6)


def test_live_models_are_left_alone():
    """A forward that updates statistics and draws keys: the output has its shapes, the model is as it was."""
    model, same = make(), make()
    values = [x.value for x in objects_in(model) if isinstance(x, nnx.Variable)]
    for call in (model, model.__call__, functools.partial(nnx.jit(lambda m, x: m(x)), model)):
        assert nnx.eval_shape(call, SPEC) == jax.ShapeDtypeStruct((4, 3), jnp.float32)
    assert_same(model, same)
    now = [x.value for x in objects_in(model) if isinstance(x, nnx.Variable)]
    assert all(a is b for a, b in zip(values, now, strict=True))


@pytest.mark.parametrize(
    "args",
    [(SPEC,), (jnp.ones((4, 2)),), (np.ones((4, 2), np.float32),)],
    ids=["ShapeDtypeStruct", "jax.Array", "ndarray"],
)
def test_arguments(args):
    """Abstract and concrete arguments, positional and by keyword; models of either kind."""
    for model in (make(), nnx.eval_shape(make)):
        assert nnx.eval_shape(model, *args).shape == (4, 3)
        assert nnx.eval_shape(lambda m, *, x: m(x), model, x=args[0]).shape == (4, 3)
        assert nnx.eval_shape(model.__call__, *args).shape == (4, 3)
        assert nnx.eval_shape(functools.partial(Net.__call__, model), *args).shape == (4, 3)


def test_outputs():
    """What was passed in comes back as a new abstract object with the changes; other values as they are."""
    model = make()

    def f(m, x):
        m.extra = nnx.Cache(x)
        m.linear.kernel.value = jnp.ones((5, 5))
        return {"m": m, "part": m.linear, "x": x, "n": 1, "none": None}

    out = nnx.eval_shape(f, model, SPEC)
    assert out["m"] is not model
    assert out["part"] is out["m"].linear
    assert (out["m"].extra.value, out["x"], out["none"]) == (SPEC, SPEC, None)
    assert out["m"].linear.kernel.value == jax.ShapeDtypeStruct((5, 5), jnp.float32)
    assert out["n"].shape == ()
    assert is_abstract(out)
    assert_same(model, make())


def test_under_raw_jax():
    """`jax.eval_shape` of a model that only reads leaves it concrete; of one that writes is refused by name."""
    model = make()
    model.eval()
    assert jax.eval_shape(model, SPEC).shape == (4, 3)
    assert all(
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(nnx.state(model))
    )
    model.train()
    with pytest.raises(errors.TraceContextError, match=r"mean|count"):
        jax.eval_shape(lambda x: model(x), SPEC)  # of `model` itself, jax would remember the call above
    assert_same(nnx.state(model), nnx.state(make()))
    assert nnx.eval_shape(model, SPEC).shape == (4, 3)


def test_inside_other_transforms():
    """eval_shape inside jit gives shapes, and leaves the model of the trace alone."""
    model = make()

    @nnx.jit
    def f(m, x):
        return jnp.zeros(nnx.eval_shape(m, x).shape)

    assert f(model, jnp.ones((4, 2))).shape == (4, 3)
    assert_same(model, make())


def test_live_objects_that_the_function_refers_to():
    """They may be called, and written to, as far as shapes go; a layer can be sized by those before it."""
    model = make()
    assert nnx.eval_shape(lambda x: model(x), SPEC).shape == (4, 3)
    assert nnx.jit(lambda x: model(x)).eval_shape(SPEC).shape == (4, 3)
    assert nnx.eval_shape(nnx.jit(lambda x: model(x)), SPEC).shape == (4, 3)
    assert jax.jit(lambda x: jnp.zeros(nnx.eval_shape(lambda x: model(x), x).shape))(jnp.ones((4, 2))).shape == (4, 3)
    assert_same(model, make())

    class Sized(nnx.Module):
        def __init__(self, rngs):
            self.body = Net(rngs=rngs)
            self.head = nnx.Linear(nnx.eval_shape(lambda x: self.body(x), SPEC).shape[-1], 5, rngs=rngs)

    sized = Sized(nnx.Rngs(0))
    assert sized.head.kernel.shape == (3, 5)
    assert sized.body.norm.mean.value.sum() == 0

    def rebuilds(x):
        model.note, model.linear = "inside", nnx.Linear(2, 4, rngs=nnx.Rngs(0))
        return model.linear(x), model

    out, abstract = nnx.eval_shape(rebuilds, SPEC)
    assert (out.shape, abstract.note, is_abstract(abstract)) == ((4, 4), "inside", True)
    assert_same(model, make())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("evaluate", [nnx.eval_shape, lambda f, x: nnx.jit(f).eval_shape(x)])
def test_what_a_live_object_holds_is_not_edited_in_place(evaluate, fails):
    """A dict in a Variable, and a configuration: the function edits copies, and no tracer stays in a live one."""

    class Recording(nnx.Module):
        def __init__(self):
            self.seen, self.count = nnx.Variable({"all": [jnp.zeros(())]}), nnx.Variable(jnp.zeros(()))
            self.config = types.SimpleNamespace(calls=0)

        def __call__(self, x):
            self.count.value += 1  # first, so that the object is found to be written to
            self.seen.value["all"].append(x.sum())
            self.config.calls += 1
            if fails:
                raise ZeroDivisionError
            return self

    model = Recording()
    before = Snapshot(model)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        abstract = evaluate(lambda x: model(x), SPEC)
        assert (len(abstract.seen.value["all"]), abstract.config.calls) == (2, 1)
    before.assert_unchanged()


def test_failures_change_nothing():
    """An exception, with the notes of the layer it comes from."""
    model = make()
    with pytest.raises(ValueError, match="shape") as caught:
        nnx.eval_shape(model, jax.ShapeDtypeStruct((4, 7), jnp.float32))
    assert caught.value.__notes__[0].startswith("in linear (Linear 2->3), input float32[4, 7]")
    with pytest.raises(errors.OutputError, match="<output> is set to a str"):
        nnx.eval_shape(lambda m: "text", model)
    assert_same(model, make())


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_trace_has_read_is_freed(fails, disabled):
    """Neither a trace that fails nor one that is made again, to write, keeps an array of a live object alive."""
    model = make()
    scale = nnx.Variable(jnp.ones(2))
    array = weakref.ref(scale.value)

    def call(x):
        x, read = model(x), scale.value  # after the first write to a statistic
        if fails:
            raise ZeroDivisionError
        return x + read.sum()

    def read_first(x):
        return call(x + scale.value.sum())

    def outer(x):  # its own trace goes on
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            nnx.eval_shape(read_first, x)
        return x + 1

    with jax.disable_jit(disabled):
        np.testing.assert_array_equal(jax.grad(lambda x: outer(x).sum())(jnp.ones((4, 2))), jnp.ones((4, 2)))
    np.testing.assert_array_equal(jax.jit(outer)(jnp.ones((4, 2))), jnp.full((4, 2), 2.0))
    scale.value = jnp.zeros(2)
    gc.collect()
    assert array() is None


@pytest.mark.parametrize("way", [nnx.eval_shape, lambda f: nnx.jit(f).eval_shape()])
def test_shapes_have_the_shardings_that_names_of_axes_ask_for(way):
    """Variables without names have a copy on each device, as if made eagerly; other outputs ask for nothing."""
    init = nnx.with_partitioning(nnx.initializers.zeros, (None, "model"))
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        layer, x = way(lambda: (nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(0)), jnp.ones(2)))
    assert layer.kernel.value.sharding.spec == jax.sharding.PartitionSpec(None, "model")
    assert layer.bias.value.sharding == jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert (x.sharding, x.shape) == (None, (2,))


def test_an_output_with_objects_of_the_arguments_and_new_ones_keeps_what_they_share():
    """Also if the arguments have changed: the live objects have not."""
    model = make()

    def f(model, x):
        model.extra = nnx.Variable(x)
        return {"a": model, "b": nnx.List([model, model.extra])}

    out = nnx.eval_shape(f, model, SPEC)
    assert out["b"][0] is out["a"]
    assert out["b"][1] is out["a"].extra
    assert out["a"] is not model
    assert not hasattr(model, "extra")
    assert out["a"].extra.value == SPEC


def test_a_jitted_function_gives_shapes_with_its_out_shardings():
    """As in JAX: a checkpoint that is restored into the shapes is then where the function would put it."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    by_type = nnx.StateSharding({nnx.Param: place, ...: None})
    jitted = nnx.jit(lambda rngs: nnx.BatchNorm(3, rngs=rngs), out_shardings=by_type)
    for norm in nnx.eval_shape(jitted, nnx.Rngs(0)), jitted.eval_shape(nnx.Rngs(0)):
        assert norm.scale.value == jax.ShapeDtypeStruct((3,), jnp.float32, sharding=place)
        assert norm.mean.value == jax.ShapeDtypeStruct((3,), jnp.float32)


def test_the_out_info_of_a_stage_is_the_output():
    """With new Modules in place of those that were passed in, as they are after the call."""

    def step(model, x):
        out = model(x)
        model.scale.value = jnp.ones((3, 2))
        return model, out, model

    model = nnx.RMSNorm(2, rngs=nnx.Rngs(0))
    kernel = model.scale.value
    traced = nnx.jit(step).trace(model, jnp.ones((3, 2)))
    for stage in traced, traced.lower(), traced.lower().compile():
        new, out, same = stage.out_info
        assert new is same is not model
        assert new.scale.shape == out.shape == (3, 2)
    assert model.scale.value is kernel
