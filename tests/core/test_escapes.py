"""Escapes: static values that refer to a trace do not leave it."""

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
