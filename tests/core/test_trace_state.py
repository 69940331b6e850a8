"""The trace that an object belongs to, and whether it is being initialised, as views."""

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib import pytreelib, tracers


class Layer(nnx.Module):
    def __init__(self):
        self.w, self.parts = nnx.Param(jnp.ones(2)), [nnx.Variable(0)]

    def __call__(self, x):
        return x * self.w


def made_in_a_trace():
    """A Layer, made while a shape was inferred, whose values are known."""
    kept = []
    with jax.ensure_compile_time_eval():
        one = jnp.ones(2)

    def infer(x):
        kept.append(Layer())
        kept[0].w.value = one
        return kept[0](x)

    jax.eval_shape(infer, 1.0)
    return kept[0]


def test_an_object_is_given_to_another_trace():
    """What was made in a shape inference can be written after it, by code and by transforms."""
    layer = made_in_a_trace()
    with pytest.raises(nnx.TraceContextError):
        layer.w.value = jnp.zeros(2)
    with pytest.raises(nnx.TraceContextError):
        layer.scale = 2
    for x in (layer, layer.parts, layer.w, layer.parts[0]):
        assert not x._trace_state.is_valid()
        x._trace_state._jax_trace = tracers.current_jax_trace()
        assert x._trace_state.is_valid()
    layer.scale = 2
    layer.parts.append(3)

    @nnx.jit
    def step(layer):
        layer.w *= layer.scale
        layer.parts[0].value = 7

    step(layer)
    assert (layer.w.value.tolist(), layer.parts[0].value) == ([2, 2], 7)


def test_an_object_takes_over_a_trace_state():
    """``object.__setattr__`` with another one, as published code has it; it may name an inner trace, too."""
    layer = made_in_a_trace()
    object.__setattr__(layer, "_trace_state", tracers.TraceState())
    object.__setattr__(layer.w, "_trace_state", tracers.TraceState())
    layer.w.value = jnp.zeros(2)
    layer.name = "a"
    read = nnx.jit(lambda layer: layer(1.0))
    assert read(layer).tolist() == [0, 0]

    def inner(x):
        layer.w._trace_state = tracers.TraceState()
        with pytest.raises(nnx.TraceContextError):  # the Layer itself belongs to the outer one
            layer.name = "b"
        layer.w.value = layer.w.value + 1
        layer.w.value = jnp.asarray([5.0, 5.0])
        return x

    with jax.ensure_compile_time_eval():
        outer = tracers.TraceState()
    jax.eval_shape(inner, 1.0)
    layer.w._trace_state = outer
    layer.w.value = jnp.full(2, 3.0)
    assert read(layer).tolist() == [3, 3]


def test_a_variable_says_whether_the_running_trace_may_write_it():
    plain, ref = nnx.Variable(1.0), nnx.Variable(1.0, ref=True)
    seen = []
    jax.make_jaxpr(lambda: seen.append((plain._can_update, ref._can_update, nnx.Variable(2.0)._can_update)))()
    assert seen == [(False, True, True)]
    assert plain._can_update


def test_a_trace_state_without_an_object_can_be_given_another_trace():
    state = tracers.TraceState()
    seen = []
    jax.eval_shape(lambda: seen.append(tracers.current_jax_trace()) or jnp.ones(1))
    state._jax_trace = seen[0]
    assert not state.is_valid()
    assert state != tracers.TraceState()


class Lazy(nnx.Module):
    """Makes its weight in the first call, which somebody else announces."""

    def __call__(self, x):
        if self._pytree__state.initializing:
            self.w = nnx.Param(jnp.ones(x.shape))
        return x * self.w


def test_a_node_is_told_that_it_is_initialised():
    """A jitted function tells apart whether it is, and an object that is not has nothing of it."""
    model, x = nnx.Sequential(Lazy(), Lazy()), jnp.full(2, 3.0)
    run = nnx.jit(lambda model, x: model(x))
    for initializing in (True, False):
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Pytree):
                node._pytree__state._initializing = initializing
        assert run(model, x).tolist() == [3, 3]
    assert set(vars(model.layers[0])) == {"w"}
    assert not model._pytree__state.initializing
    assert model._pytree__state.trace_state == tracers.TraceState()


def test_a_new_pytree_state_is_no_attribute():
    """Code that makes an object sets one in ``vars()``; the object says the same of itself."""
    layer, other = Layer(), Layer()
    vars(layer)["_pytree__state"] = pytreelib.PytreeState()
    assert nnx.graphdef(layer) == nnx.graphdef(other)
    state = pytreelib.PytreeState(initializing=True)
    assert (state.initializing, state._trace_state.is_valid()) == (True, True)
    state._initializing = False
    assert state == pytreelib.PytreeState() == layer._pytree__state
    assert hash(state) == hash(pytreelib.PytreeState())
    assert repr(state) == "PytreeState(initializing=False)"


def test_which_attributes_are_data():
    """By the name that flax.nnx has for it; properties are no attributes."""

    class Scaled(nnx.Pytree):
        kind: nnx.Static[str]
        limit: nnx.Data[int]
        double = property(lambda self: 2 * self.scale, lambda self, x: setattr(self, "scale", x / 2))

        def __init__(self):
            self.double = jnp.ones(2)
            self.kind, self.limit, self.power, self.hidden = "a", 1, 2, nnx.static([3])

    found = Scaled()._pytree__nodes
    assert found == {"scale": True, "kind": False, "limit": True, "power": False, "hidden": False}
