"""Libraries that reach behind flax.nnx: a layer and a variable of their own that are nnx's as well, as Keras has them.

Keras itself, where it is installed, trains a model as with flax.nnx.
"""

import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib import pytreelib, tracers

SCOPE = {}  # the values that weights have, by id, in a stateless call


class Weight:
    """The variable of a library: it says of itself what nnx does not know."""

    def __init__(self, shape, trainable=True):
        self._shape, self._trainable, self._value = shape, trainable, None
        self._name = "weight"

    @property
    def value(self):
        if id(self) in SCOPE:
            return SCOPE[id(self)]
        return jnp.zeros(self._shape) if self._value is None else self._value

    @property
    def shape(self):
        return self._shape

    def initialize(self):
        self._value = jnp.ones(self._shape)


class NnxWeight(Weight, nnx.Variable):
    def __init__(self, shape, **settings):
        nnx.Variable.__init__(self, jnp.zeros(shape), mutable=True)
        Weight.__init__(self, shape, **settings)
        give_to(self)

    @property
    def _value(self):
        return self._raw_value

    @_value.setter
    def _value(self, value):
        object.__setattr__(self, "_raw_value", value)


def set_and_mirror(self, name, value):
    """Keeps each attribute in the metadata, too, so that it outlives a copy."""
    if name not in ("_raw_value", "_value"):
        self._var_metadata[name] = value
    object.__setattr__(self, name, value)


NnxWeight.__setattr__ = set_and_mirror

ENCLOSING = []  # the traces around shape inferences


def give_to(x):
    """Let what is made in a shape inference belong to the trace around it."""
    if ENCLOSING:
        object.__setattr__(x._trace_state, "_jax_trace", ENCLOSING[0])


class Tracked(list):
    """A list that tells its owner."""

    def __init__(self, owner, items=()):
        super().__init__(items)
        self.owner = owner


class Operation:
    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        vars(self)["_pytree__state"] = pytreelib.PytreeState()
        self._config = args, kwargs
        return self


class Base(nnx.Module):
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(pytree=False, **kwargs)

    def __init__(self):
        super().__init__()
        give_to(self)

    def _check_valid_context(self, error_msg):
        if not ENCLOSING:
            super()._check_valid_context(error_msg)


class Layer(Base, Operation):
    def __init__(self, units):
        super().__init__()
        weights = []  # the function that appends keeps the list, too
        self.units, self.weights, self.add = units, weights, weights.append
        self.nodes = Tracked(self)

    def __setattr__(self, name, value):
        if name in ("called", "losses"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def build(self, n):
        self.kernel = NnxWeight((n, self.units))
        self.add(self.kernel)

    def __call__(self, x):
        if not self.weights:
            self.build(x.shape[-1])
        self.called = True
        return x @ self.kernel.value


class Trainer:
    """Stands in front of the Layer among the bases of a model."""

    def fit_step(self, x):
        return jax.value_and_grad(lambda w: self.stateless(w, x))([w.value for w in self.all_weights()])


class Model(Trainer, Layer):
    def __init__(self, *layers):
        super().__init__(0)
        self.layers = list(layers)

    def all_weights(self):
        return [w for layer in self.layers for w in layer.weights]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def stateless(self, values, x):
        SCOPE.update(zip(map(id, self.all_weights()), values, strict=True))
        try:
            return self(x).sum()
        finally:
            SCOPE.clear()


@pytest.fixture(autouse=True)
def no_traced_value_is_left():
    """Nor anything of a call that failed."""
    yield
    SCOPE.clear()
    ENCLOSING.clear()


def built():
    """A model whose weights were made while a shape was inferred, and got their values afterwards."""
    model = Model(Layer(3), Layer(1))
    ENCLOSING.append(tracers.current_jax_trace())
    try:
        jax.eval_shape(model, jnp.ones((4, 2)))
    finally:
        ENCLOSING.pop()
    for w in model.all_weights():
        w.initialize()
    return model


def test_a_variable_of_a_library_is_a_variable():
    """Its own attributes and metadata come through copies, splits and transforms."""
    model = built()
    state = nnx.state(model)
    assert {w.shape for w in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))} == {(2, 3), (3, 1)}
    merged = nnx.merge(*nnx.split(model))
    (first, second) = merged.all_weights()
    assert (type(first), first._name, first._trainable, first.shape) == (NnxWeight, "weight", True, (2, 3))
    assert second is merged.layers[1].kernel
    x = jnp.ones((4, 2))
    assert merged(x).tolist() == model(x).tolist() == [[6.0]] * 4


def test_a_layer_of_a_library_is_trained():
    """By a step of nnx over the objects, and by one of its own that refers to the model."""
    model, x = built(), jnp.ones((4, 2))

    @nnx.jit
    def step(model, x):
        loss, grads = nnx.value_and_grad(lambda model: model(x).sum(), argnums=nnx.DiffState(0, NnxWeight))(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, NnxWeight), grads))
        return loss

    assert step(model, x) == 24
    assert step(model, x) < 24
    own = nnx.jit(lambda x: model.fit_step(x))
    for n in range(3):
        model.kept = {"step": [jnp.ones(n + 1)], "of": Tracked(model, [jnp.ones(2)])}  # not for nnx to look at
        loss, grads = own(x)
        assert jnp.allclose(loss, model(x).sum())
        assert [g.shape for g in grads] == [(2, 3), (3, 1)]
        model.layers[0].kernel._value = model.layers[0].kernel.value / 2
    assert own._cache_size() == 1


def test_a_model_keeps_traced_losses_for_a_moment():
    """It writes them around ours in its own __setattr__, as Keras does where a layer adds a loss, and clears them."""
    model = built()

    def loss(w, x):
        model.losses = [0.5 * (w[0] ** 2).sum()]
        try:
            return model.stateless(w, x) + sum(model.losses)
        finally:
            model.losses.clear()

    step = nnx.jit(lambda x: jax.grad(loss)([w.value for w in model.all_weights()], x))
    for _ in range(2):
        assert step(jnp.ones((4, 2)))[0].tolist() == [[5.0] * 3] * 2  # the kernel itself, and 4
    assert model.losses == []
    assert step._cache_size() == 1
    with pytest.raises(nnx.TraceContextError, match="'other'"):
        jax.jit(lambda x: setattr(model, "other", x))(1.0)


IN_PLACE = """
import importlib, sys
import flax
from nnxlib.compat import flax as nnx

flax.nnx = sys.modules["flax.nnx"] = nnx
"""

MODULES = """
import flax.nnx.nn.dtypes
from flax.nnx import bridge, filterlib, graphlib
from flax.nnx.nn import dtypes, linear
from flax.nnx.training.optimizer import Optimizer
from flax.nnx.transforms.transforms import _resolve_bound_callable

import nnxlib

assert linear.Linear is nnx.Linear is nnxlib.Linear and Optimizer is nnxlib.Optimizer
assert flax.nnx.nn.dtypes is dtypes and nnx.RMSNorm(2, rngs=nnx.Rngs(0)).promote_dtype is dtypes.promote_dtype
for name, module in [*sys.modules.items()]:
    if name.startswith("flax.nnx."):
        assert module is importlib.import_module(name.replace("flax.nnx", "nnxlib", 1)), name
assert not importlib.util.find_spec("flax.nnx.nn.no_such_module")
try:
    import flax.nnx.no_such_module
except ModuleNotFoundError as error:
    assert "flax.nnx.no_such_module" in str(error)
"""

KERAS = """
import keras
import numpy as np

keras.utils.set_random_seed(0)
x = np.random.randn(32, 4).astype("float32")
layers = [keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile("adam", "mse")
losses = model.fit(x, x[:, :1], epochs=3, verbose=0).history["loss"]
assert losses[-1] < losses[0]
regular = keras.Sequential([keras.layers.Dense(1, activity_regularizer="l2")])
regular.compile("sgd", "mse")
assert np.isfinite(regular.fit(x, x[:, :1], verbose=0).history["loss"]).all()
assert isinstance(layers[0], nnx.Module)
merged = nnx.merge(*nnx.split(layers[0]))
assert np.allclose(merged(x), layers[0](x))
"""


@pytest.mark.skipif(not importlib.util.find_spec("keras"), reason="needs Keras")
def test_keras_trains_with_nnxlib_in_place_of_flax_nnx():
    environment = {**os.environ, "KERAS_BACKEND": "jax", "KERAS_NNX_ENABLED": "true"}
    run(IN_PLACE + KERAS, env=environment)


@pytest.mark.skipif(not importlib.util.find_spec("flax"), reason="flax is not installed")
def test_modules_of_flax_nnx_are_those_of_nnxlib():
    """Not copies, which would have Modules and Variables of their own. Where flax.nnx is itself, it stays so."""
    run(IN_PLACE + MODULES)
    run("import nnxlib, flax.nnx.nn.linear\nassert flax.nnx.nn.linear.Linear.__module__ == 'flax.nnx.nn.linear'")


def run(program, **options):
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert ran.returncode == 0, ran.stderr


def test_a_traced_value_is_not_put_into_a_live_variable():
    """Not under the private name either. Other values are: a library puts them there while it infers shapes."""
    weight = NnxWeight((2,))
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda x: setattr(weight, "_value", x))(jnp.ones(2))
    one = jnp.ones(2)
    jax.eval_shape(lambda: setattr(weight, "_value", one))
    assert weight._raw_value is one


def test_a_value_is_put_back_under_any_trace():
    """As libraries do that stage the moments of an optimizer in other memory, and roll that back if it fails."""
    param, one = nnx.Param(jnp.zeros(2)), jnp.ones(2)
    with pytest.raises(nnx.TraceContextError):
        jax.eval_shape(lambda: nnx.Variable.set_raw_value(param, one))
    jax.eval_shape(lambda: nnx.Variable.set_raw_value(param, one, _unsafe_bypass_check=True))
    assert param.get_raw_value() is one
    with pytest.raises(nnx.TraceContextError):  # a tracer would leak
        jax.jit(lambda x: param.set_raw_value(x, _unsafe_bypass_check=True))(one)


def test_a_state_is_made_of_levels_that_need_no_copy():
    """Said by a private keyword, by code that divides the parameters of an adversarial model among two optimizers."""
    params = nnx.state(nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 1, rngs=nnx.Rngs(1))))
    levels = params.to_pure_dict()["layers"]
    for copy in (True, False):
        state = nnx.State({"layers": {0: levels[0]}}, _copy=copy)
        assert jax.tree.leaves(state) == jax.tree.leaves(levels[0])
        both = nnx.merge_state(state, nnx.State({"layers": {1: levels[1]}}, _copy=copy))
        assert both.to_pure_dict() == {"layers": levels}


def test_a_flat_state_keeps_its_paths_and_leaves_under_the_names_of_flax():
    """Read by code that goes through both in step: shards weights by rule, loads a part of them, lists LoRA modules."""
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    for flat in (state.flat_state(), nnx.FlatState(state.flat_state(), sort=False), nnx.to_flat_state(state)[:2]):
        assert flat._keys == flat.paths == (("bias",), ("kernel",))
        assert flat._values[1] is flat["kernel",]
    for path, leaf in zip(flat._keys, flat._values):
        if path[-1] == "kernel":
            leaf.value = jnp.ones((2, 3))
    assert (state.kernel == 1).all()


def test_a_bound_method_is_taken_apart():
    """For a transform that treats the Module otherwise than the other arguments; other callables stay whole."""
    from nnxlib.transforms.transforms import _resolve_bound_callable

    cell = nnx.GRUCell(2, 3, rngs=nnx.Rngs(0))
    function, module, is_bound = _resolve_bound_callable(cell.__call__)
    assert (function, module, is_bound) == (nnx.GRUCell.__call__, cell, True)
    scan = nnx.scan(function, in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    assert scan(module, jnp.zeros((1, 3)), jnp.ones((4, 1, 2)))[1].shape == (4, 1, 3)
    for whole in (jnp.sin, cell, "text".upper):
        assert _resolve_bound_callable(whole) == (whole, None, False)
