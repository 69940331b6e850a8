"""Escapes: static values that refer to a trace do not leave it."""

import copy
import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx


class Dense(nnx.Module):
    """Keeps its initializer, which is called when it is made, and its activation."""

    def __init__(self, width, rngs):
        scale = jnp.sqrt(width)
        self.init = lambda key, shape: jax.random.normal(key, shape) / scale
        self.activation = lambda x: self.double(x)
        self.kernel = nnx.Param(self.init(rngs.params(), (width, width)))

    def double(self, x):
        return 2 * x

    def __call__(self, x):
        return x @ self.kernel


MAKERS = {
    "jit": lambda: nnx.jit(lambda: Dense(2, nnx.Rngs(0)))(),
    "eval_shape": lambda: nnx.eval_shape(lambda: Dense(2, nnx.Rngs(0))),
    "vmap": lambda: nnx.vmap(lambda rngs: Dense(2, rngs))(nnx.Rngs(0).fork(split=3)),
    "in a List": lambda: nnx.jit(lambda: nnx.List([Dense(2, nnx.Rngs(0))]))()[0],
    "in two traces": lambda: nnx.jit(lambda: nnx.vmap(lambda rngs: Dense(2, rngs))(nnx.Rngs(0).fork(split=3)))(),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_made_in_a_trace_may_keep_its_initializers(name):
    """It has its weights; the functions that have ended with the trace say so, with their path, if they are called."""
    layer = MAKERS[name]()
    assert layer.kernel.shape[-2:] == (2, 2)
    assert layer.double(1) == 2
    with pytest.raises(nnx.TraceContextError, match=r"<lambda> at .*\.activation refers to .* has ended") as error:
        layer.activation(jnp.ones(2))
    assert "a method of the class" in str(error.value)


def test_the_values_are_those_of_an_eager_constructor():
    """The initializer has run before it ended."""
    np.testing.assert_allclose(MAKERS["jit"]().kernel, Dense(2, nnx.Rngs(0)).kernel, rtol=1e-6)


def test_models_made_in_different_traces_have_one_structure():
    """So a function is compiled once for both, and they are mapped over together."""
    a, b = MAKERS["eval_shape"](), MAKERS["eval_shape"]()
    assert nnx.graphdef(a) == nnx.graphdef(b)
    first, second = MAKERS["jit"](), MAKERS["jit"]()
    jax.tree.map(jnp.add, first, second)
    traces = []

    @nnx.jit
    def call(layer, x):
        traces.append(1)
        return layer(x)

    for layer in (first, second):
        call(layer, jnp.ones((1, 2)))
    assert len(traces) == 1


def test_what_a_function_refers_to_is_not_kept_alive():
    """The tracers, and with them the trace, go when it ends."""
    seen = []

    @nnx.jit
    def make():
        layer = Dense(2, nnx.Rngs(0))
        seen.append(weakref.ref(layer.init))
        return layer

    layer = make()
    gc.collect()
    assert seen[0]() is None
    assert layer.kernel.shape == (2, 2)


def test_a_function_that_refers_to_nothing_of_the_trace_comes_out_as_it_is():
    """Also next to one that does, and if both refer to one object."""
    shared = {"width": 2}

    def make():
        layer = Dense(shared["width"], nnx.Rngs(0))
        layer.width = lambda: shared["width"]
        x = jnp.sqrt(2.0)
        layer.first, layer.second = (lambda: (x, shared)), (lambda: (shared, x))
        return layer

    layer = nnx.jit(make)()
    assert layer.width() == 2
    for f in (layer.first, layer.second, layer.init):
        with pytest.raises(nnx.TraceContextError):
            f()


def test_an_object_of_the_caller_gets_no_such_function():
    """There it is an error, and the object is as before."""
    layer = Dense(2, nnx.Rngs(0))

    @nnx.jit
    def attach(layer):
        x = layer.kernel * 1
        layer.extra = lambda: x

    with pytest.raises(nnx.TraceContextError, match="extra"):
        attach(layer)
    assert not hasattr(layer, "extra")


class Opaque:
    """An object that is static, and has attributes."""


def test_another_static_value_of_a_new_object_is_an_error():
    """It is data, and would be read."""

    @nnx.jit
    def make():
        layer = Dense(2, nnx.Rngs(0))
        layer.setting = Opaque()
        layer.setting.scale = jnp.sqrt(2.0)
        return layer

    with pytest.raises(nnx.TraceContextError, match="setting"):
        make()


@dataclasses.dataclass(frozen=True)
class Config:
    """Of a chain: the layers, which it takes from here, and other settings."""

    layers: list
    named: dict
    scale: float = 2.0


class Chain(nnx.Module):
    def __init__(self, rngs):
        layer = nnx.Linear(2, 2, rngs=rngs)
        self.config = Config([layer, jnp.tanh], {"first": layer})
        self.layers = nnx.List(self.config.layers[:1])

    def __call__(self, x):
        return self.layers[0](x) * self.config.scale


CHAINS = {
    "jit": lambda: nnx.jit(lambda: Chain(nnx.Rngs(0)))(),
    "eval_shape": lambda: nnx.eval_shape(lambda: Chain(nnx.Rngs(0))),
    "vmap": lambda: nnx.vmap(lambda rngs: Chain(rngs))(nnx.Rngs(0).fork(split=3)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_model_made_in_a_trace_may_keep_a_configuration_with_its_layers(name):
    """The settings are there, and the layers as attributes; those in the configuration say that they have ended."""
    chain = CHAINS[name]()
    assert chain.layers[0].kernel.shape[-2:] == (2, 2)
    assert (type(chain.config), chain.config.scale, chain.config.layers[1]) == (Config, 2.0, jnp.tanh)
    ended = chain.config.layers[0]
    assert ended == chain.config.named["first"]
    with pytest.raises(nnx.TraceContextError, match=r"Linear at .*config refers to .* has ended.*\n.*an attribute"):
        ended(jnp.ones(2))
    with pytest.raises(AttributeError, match="has ended"):
        ended.kernel
    assert not hasattr(ended, "__jax_array__")
    assert nnx.graphdef(chain) == nnx.graphdef(CHAINS[name]()) == nnx.graphdef(copy.deepcopy(chain))


def test_a_chain_made_in_a_trace_computes_what_another_does():
    """The configuration of the one made eagerly is as it was: the value of a static attribute is not written to."""
    eager, x = Chain(nnx.Rngs(0)), jnp.ones((1, 2))
    nnx.jit(lambda model: model)(eager)
    assert eager.config.layers[0] is eager.layers[0]
    np.testing.assert_allclose(CHAINS["jit"]()(x), eager(x), rtol=1e-6)


def test_a_module_that_is_nowhere_else_is_an_error():
    """Its weights would be lost."""

    def make():
        return nnx.Dict(config=nnx.static(Config([nnx.Linear(2, 2, rngs=nnx.Rngs(0))], {})))

    with pytest.raises(nnx.TraceContextError, match=r"static value at .*config"):
        nnx.jit(make)()


def test_a_configuration_with_one_list_in_two_places():
    """Its copy has one list in two places."""

    def make():
        model = Chain(nnx.Rngs(0))
        model.config = Config([*model.layers], {"all": None})
        model.config.named["all"] = model.config.layers
        return model

    config = nnx.jit(make)().config
    assert config.named["all"] is config.layers


def test_a_function_that_refers_to_a_name_without_a_value():
    """It may be given one later; there is nothing in it to look at."""

    def attach(m, late):
        m.function = lambda: later
        if late:
            later = 1

    m = nnx.Module()
    nnx.jit(attach, static_argnums=1)(m, False)
    with pytest.raises(NameError):
        m.function()


def test_a_function_that_refers_to_a_captured_module():
    """The Module is the caller's own, and holds its own values again when the trace has ended."""
    layer, m = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Module()
    x = jnp.ones((1, 2))

    @nnx.jit
    def attach(m, x):
        m.function = lambda x: layer(x)
        return layer(x)

    for _ in range(2):
        out = attach(m, x)
        np.testing.assert_allclose(m.function(x), out, rtol=1e-6)
