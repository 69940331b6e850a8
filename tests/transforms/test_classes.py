"""Transforms of classes: subclasses whose named methods are lifted, made once, readable and picklable."""

import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from tests.properties.compare import Snapshot, assert_no_tracer, assert_same

from .models import Layer, X

TRANSFORMS = ["jit", "vmap", "pmap", "scan", "remat_scan", "remat", "checkpoint", "grad", "value_and_grad", "jacfwd"]
TRANSFORMS += ["jacrev", "hessian", "shard_map", "make_jaxpr", "checkify", "named_call", "map_variables"]
TRANSFORMS += ["transform_metadata", "add_metadata_axis"]


class Coder(nnx.Module):
    """Encodes and decodes."""

    def __init__(self, features=3, *, rngs):
        self.inside = nnx.Linear(features, 2, rngs=rngs)
        self.outside = nnx.Linear(2, features, rngs=rngs)
        self.calls = nnx.Cache(jnp.zeros((), jnp.int32))
        self.features = features

    def encode(self, x):
        self.calls.value += 1
        return jnp.tanh(self.inside(x))

    def decode(self, z):
        return self.outside(z)

    def __call__(self, x):
        return self.decode(self.encode(x))

    @staticmethod
    def helper():
        return 1


def coder(cls=Coder, **kwargs):
    return cls(3, rngs=nnx.Rngs(0), **kwargs)


@nnx.remat(policy=jax.checkpoint_policies.everything_saveable)
class Decorated(Coder):
    pass


class Derived(nnx.remat(Coder)):
    def decode(self, z):
        return 2 * super().decode(z)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_takes_a_class(name):
    transform = getattr(nnx, name)
    options = {
        "remat_scan": {"lengths": (2,)},
        "map_variables": {"trans_in": lambda s: s},
        "add_metadata_axis": {"variable_axes": {nnx.Param: 0}},
        "shard_map": {"mesh": jax.make_mesh((1,), "x"), "in_specs": jax.P(), "out_specs": jax.P()},
    }.get(name, {})
    cls = transform(Coder, methods="decode", **options)
    assert issubclass(cls, Coder)
    assert cls.__name__.endswith("Coder")
    assert cls.decode is not Coder.decode
    assert cls.encode is Coder.encode
    assert "methods" in inspect.signature(transform).parameters


def test_the_methods_that_are_not_named_stay():
    cls = nnx.remat(Coder, methods=["decode"])
    m, plain = coder(cls), coder()
    np.testing.assert_allclose(m(X), plain(X), rtol=1e-6)
    assert m.calls.value == 1
    assert cls.encode is Coder.encode
    assert is_checkpointed(m.decode, jnp.ones(2))


def is_checkpointed(f, *args):
    return "prevent_cse=True" in str(jax.make_jaxpr(f)(*args))


def test_by_default_remat_lifts_the_call():
    m, plain = coder(nnx.remat(Coder)), coder()
    np.testing.assert_allclose(m(X), plain(X), rtol=1e-6)
    grads, expected = (nnx.grad(lambda m: m(X).sum())(x) for x in (m, plain))
    jax.tree.map(np.testing.assert_allclose, grads, expected)
    assert m.calls.value == plain.calls.value == 2
    layer = nnx.remat(nnx.Linear)(3, 2, rngs=nnx.Rngs(0))
    assert is_checkpointed(layer, X)
    assert_no_tracer(m)


def test_without_methods_a_class_is_its_constructor_to_other_transforms():
    rngs = nnx.Rngs(0)
    assert type(nnx.jit(lambda rngs: coder())(rngs)) is Coder
    assert type(nnx.vmap(Layer)(jnp.ones(4))) is Layer


def test_each_method_may_have_options_of_its_own():
    cls = nnx.vmap(Coder, methods={"encode": {"in_axes": (None, 0)}, "decode": {"in_axes": (None, 1)}}, out_axes=1)
    m, plain = coder(cls), coder()
    xs, zs = jnp.ones((5, 3)), jnp.ones((2, 5))
    decoded = nnx.vmap(Coder.decode, in_axes=(None, 1), out_axes=1)(plain, zs)
    np.testing.assert_allclose(m.decode(zs), decoded)
    encoded = nnx.vmap(Coder.encode, in_axes=(None, 0), out_axes=1)(plain, xs)
    np.testing.assert_allclose(m.encode(xs), encoded)
    assert encoded.shape == (2, 5)
    assert m.calls.value == plain.calls.value == 1


def test_an_ensemble_is_constructed_and_called_through_the_class():
    """`__init__` under vmap: parameters are stacked, as by Linen's `variable_axes` and `split_rngs`."""
    axes = nnx.StateAxes({nnx.Cache: None, ...: 0})
    methods = {"__init__": {"in_axes": (axes, None)}, "encode": {"in_axes": (0, None)}, "decode": {"in_axes": 0}}
    m = nnx.vmap(Coder, methods=methods)(3, rngs=nnx.Rngs(0).split(5))
    assert isinstance(m, Coder)
    assert (m.inside.kernel.shape, m.calls.shape, m.features) == ((5, 3, 2), (), 3)
    expected = nnx.vmap(lambda rngs: Coder(3, rngs=rngs).inside)(nnx.Rngs(0).split(5))
    np.testing.assert_allclose(m.inside.kernel.value, expected.kernel.value, rtol=1e-6)
    m.calls.value = jnp.zeros(5)
    assert m(X).shape == (5, 3)
    assert m.calls.value.tolist() == [1] * 5


def test_a_constructor_under_jit():
    cls = nnx.jit(Coder, methods=["__init__", "__call__"])
    m = coder(cls)
    assert m.features == 3
    np.testing.assert_allclose(m(X), coder()(X), rtol=1e-6)


def test_a_gradient_method():
    class Model(Layer):
        def loss(self, x):
            return self(x).sum()

    m = nnx.grad(Model, methods="loss")()
    np.testing.assert_allclose(m.loss(X).w.value, X * jnp.cos(2 * X), rtol=1e-6)
    assert m.calls.value == 1


def test_a_partial_of_a_class():
    made = nnx.remat(functools.partial(functools.partial(Coder, 4), rngs=nnx.Rngs(0)))
    m = made()
    assert isinstance(m, Coder)
    assert m.features == 4
    assert type(m) is nnx.remat(Coder)


def test_the_class_is_made_once_and_is_readable():
    cls = nnx.remat(Coder, prevent_cse=False)
    assert cls is nnx.remat(Coder, prevent_cse=False, methods="__call__")
    assert cls is not nnx.remat(Coder)
    assert (cls.__name__, cls.__module__, cls.__doc__) == ("RematCoder", __name__, "Encodes and decodes.")
    assert repr(coder(cls)).startswith("RematCoder(")
    assert nnx.remat_scan(Coder, methods="encode", lengths=(2,)).__name__ == "RematScanCoder"


CLASSES = {
    "lifted": lambda: nnx.remat(Coder),
    "decorated": lambda: Decorated,
    "derived": lambda: Derived,
    "twice": lambda: nnx.jit(nnx.remat(Coder), methods="encode"),
    "with options": lambda: nnx.vmap(Coder, methods={"decode": {"in_axes": (None, 0)}}),
}


@pytest.mark.parametrize("case", CLASSES)
def test_instances_are_modules_like_any_other(case):
    """They are pickled, cloned, split, merged, flattened by JAX, and pass through transforms."""
    cls = CLASSES[case]()
    m = coder(cls)
    assert_same(pickle.loads(pickle.dumps(m)), m)
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert_same(nnx.clone(m), m)
    assert_same(nnx.merge(*nnx.split(m)), m)
    assert_same(jax.tree.map(lambda x: x, m), m)
    assert nnx.jit(lambda m: m)(m) is m


def test_a_class_that_jax_does_not_flatten_stays_so():
    class Opaque(nnx.Module, pytree=False):
        def __call__(self, x):
            return x

    m = nnx.remat(Opaque)()
    assert jax.tree.leaves(m) == [m]


def test_a_lifted_class_can_be_derived_from():
    np.testing.assert_allclose(coder(Derived)(X), 2 * (coder()(X)), rtol=1e-6)


@pytest.mark.parametrize(
    ("f", "methods", "message"),
    [
        (Coder, "missing", "Coder has no method 'missing'"),
        (Coder, ["helper"], "Coder has no method 'helper'"),
        (len, "__call__", r"methods='__call__' is for a class of Modules, but got <built-in function len>"),
    ],
)
def test_what_cannot_be_lifted_is_an_error(f, methods, message):
    with pytest.raises(errors.ArgumentError, match=message):
        nnx.remat(f, methods=methods)


def test_a_failing_method_changes_nothing():
    class Failing(Coder):
        def __call__(self, x):
            super().__call__(x)
            self.new = nnx.Param(x)
            raise KeyError("failed")

    for transform in (nnx.remat, functools.partial(nnx.jit, methods="__call__")):
        m = coder(transform(Failing))
        before = Snapshot(m)
        with pytest.raises(KeyError, match="failed"):
            m(X)
        before.assert_unchanged()


def test_options_that_differ_make_classes_that_differ():
    a, b = (nnx.remat(Coder, policy=jax.checkpoint_policies.save_only_these_names(name)) for name in "ab")
    assert a is not b


def test_a_transform_as_a_decorator_with_methods():
    @nnx.jit(methods=["encode", "decode"])
    class Jitted(Coder):
        pass

    @nnx.vmap(methods={"loss": {"in_axes": (None, 0)}})
    class Losses(Layer):
        def loss(self, x):
            return self.read(x).sum()

    assert Jitted.__name__ == "JitJitted"
    np.testing.assert_allclose(coder(Jitted)(X), coder()(X), rtol=1e-6)
    assert Losses().loss(jnp.stack([X, X])).shape == (2,)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_methods_are_documented(name):
    """As the last of the arguments; `grad` refers to `value_and_grad`."""
    described = inspect.cleandoc(getattr(nnx, name).__doc__).partition("\nArgs:\n")[2].partition("\n\n")[0]
    assert name == "grad" or described.count("\n  methods: for a Module class in place of a function") == 1


@pytest.mark.parametrize("name", ["grad", "jit", "remat", "scan", "vmap"])
def test_arguments_beside_the_function_are_told_where_they_go(name):
    """As in jax.lax.scan(f, init, xs)."""
    with pytest.raises(errors.ArgumentError, match=rf"nnx.{name}\(\w+\) returns a function, .*options, by name: \w+, "):
        getattr(nnx, name)(lambda layer, x: layer(x), Layer(), X)


def test_options_that_cannot_be_compared_make_another_class_each_time():
    names = {"weights": jnp.ones(2)}
    made = [nnx.vmap(Layer, methods="__call__", in_axes=(None, 0), transform_metadata=names) for _ in range(2)]
    assert made[0] is not made[1]
    assert all(issubclass(cls, Layer) for cls in made)
