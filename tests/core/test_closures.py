"""Closures (promise 6): what a jitted function refers to is seen as it is now, and its changes come out."""

import collections
import copy
import functools
import gc
import itertools
import queue
import threading
import time
import types
import weakref
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlib as nnx
from nnxlib.core.conditions import Conditions
from nnxlib.core.errors import ArgumentError
from nnxlib.core.graph import pack
from nnxlib.core.tables import table_of
from nnxlib.transforms.closure_inputs import Captures

X = jnp.ones((1, 2))


class Layer(nnx.Module):
    def __init__(self, value=1.0):
        self.w = nnx.Param(jnp.full((2, 2), value))
        self.calls = nnx.BatchStat(jnp.array(0))
        self.scale = 2

    def __call__(self, x):
        self.calls += 1
        return x @ self.w * self.scale


def expected(layer, x=X):
    return x @ layer.w.value * layer.scale


def check(f, layer, times=1):
    """The call gives what the present weights give, counts, and leaves no trace on the layer."""
    before = int(layer.calls)
    np.testing.assert_allclose(f(X), times * expected(layer))
    assert int(layer.calls) == before + times
    assert layer._nnx_trace is None
    assert layer.w._nnx_trace is None
    assert not isinstance(layer.w.value, jax.core.Tracer)


def forms(layer):
    default = lambda x, m=layer: m(x)
    holder = {"deep": [layer]}
    return {
        "closure": nnx.jit(lambda x: layer(x)),
        "default": nnx.jit(default),
        "container": nnx.jit(lambda x: holder["deep"][0](x)),
        "bound method": nnx.jit(layer.__call__),
        "module": nnx.jit(layer),
        "partial": nnx.jit(functools.partial(lambda m, x: m(x), layer)),
        "inner jit": nnx.jit(lambda x: nnx.jit(lambda x: layer(x))(x)),
        "donating": nnx.jit(lambda x: layer(x)),
    }


@pytest.mark.parametrize("form", list(forms(Layer())))
def test_every_change_of_a_captured_module_is_seen(form):
    """Values, static attributes, structure and sharing: each call computes with the module as it is."""
    layer = Layer()
    f = forms(layer)[form]
    for _ in range(3):
        check(f, layer)
    layer.w.value = layer.w.value * 3
    check(f, layer)
    layer.scale = 5
    check(f, layer)
    layer.w = nnx.Param(jnp.zeros((2, 2)))
    check(f, layer)
    layer.extra = [nnx.Param(jnp.ones(1)), layer]
    check(f, layer)
    del layer.extra
    check(f, layer)


@pytest.mark.parametrize(("kind", "count"), [("named", 1), ("an attribute", 1), ("held in a list", 2)])
def test_how_often_a_closure_is_traced(kind, count):
    """Once if it names what it captures; a trace that finds out is made again; and never again after that."""
    layer, traces = Layer(), []
    held, trainer = [layer], types.SimpleNamespace(layer=layer)
    f = {
        "named": lambda x: (traces.append(1), layer(x))[1],
        "an attribute": lambda x: (traces.append(1), trainer.layer(x))[1],
        "held in a list": lambda x: (traces.append(1), held[0](x))[1],
    }[kind]
    f = nnx.jit(f)
    for _ in range(4):
        f(X)
        layer.w.value += 1
    assert len(traces) == count


HOLDERS = {
    "partial": lambda layer: functools.partial(lambda x, held: held(x), held=layer),
    "closure": lambda layer: lambda x: layer(x),
    "default": lambda layer: lambda x, held=layer: held(x),
    "partial of a partial": lambda layer: functools.partial(functools.partial(lambda held, x: held[0](x), (layer,))),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_module_held_by_a_function_in_an_attribute_costs_no_trace(kind):
    """It is captured before the first trace, like one that the function names; its changes are seen and come out."""
    layer, traces = Layer(), []
    model = nnx.Dict(function=HOLDERS[kind](layer), w=nnx.Param(jnp.ones(2)))

    @nnx.jit
    def f(model, x):
        traces.append(1)
        return model.function(x) * model.w

    for times in range(1, 4):
        np.testing.assert_allclose(f(model, X), expected(layer))
        assert int(layer.calls) == times
        layer.w.value += 1
    assert len(traces) == 1
    layer.scale = 5
    np.testing.assert_allclose(f(model, X), expected(layer))
    assert len(traces) == 2


def test_a_mask_of_variables_costs_no_trace():
    """One that ``jax.tree.map`` makes of a State, in the closure of a function of optax."""
    model, traces = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), []
    mask = jax.tree.map(lambda x: x.ndim == 2, nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(model, optax.masked(optax.sgd(0.5), mask), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))

    kernel = model.kernel.value
    for _ in range(2):
        step(model, optimizer)
    np.testing.assert_allclose(model.kernel, kernel - 1)
    assert (model.bias == 2).all()  # not masked: the gradient itself is added
    assert len(traces) == 1


def test_a_setting_of_a_module_held_by_an_attribute_is_seen():
    """Also if only the setting is read, which a trace does not notice."""
    rope = nnx.RoPE()
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    layer = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))
    x, traces = jax.random.normal(jax.random.key(0), (1, 3, 8)), []
    f = nnx.jit(lambda layer: (traces.append(1), layer(x))[1])
    for theta in (10000.0, 10000.0, 3.0):
        rope.theta = theta
        np.testing.assert_allclose(f(layer), layer(x), rtol=1e-5)
    assert len(traces) == 2


@pytest.mark.filterwarnings("ignore::nnxlib.core.errors.RetraceWarning")
def test_modules_that_functions_of_former_arguments_hold_are_let_go(monkeypatch):
    """Each model holds one of its own, which is captured anew; what is known of a few is kept."""
    monkeypatch.setattr("nnxlib.transforms.closure_inputs.KEPT", 4)
    f, held = nnx.jit(lambda layer, x: layer.activation(x)), []
    for n in range(60):
        layer, other = Layer(), Layer()
        layer.activation, other.flag = functools.partial(lambda x, other: x * other.flag, other=other), n
        assert f(layer, 1.0) == n
        held.append(weakref.ref(other))
    del layer, other
    gc.collect()
    assert sum(reference() is not None for reference in held) <= 40


@pytest.mark.parametrize("named", [True, False], ids=["named too", "held alone"])
@pytest.mark.parametrize("kind", ["dict", "list", "deque", "object in a dict"])
def test_data_beside_a_captured_module_costs_no_trace(kind, named):
    """A dict or list that holds a Module grows by the losses of each step, or the object that holds it is exchanged."""
    layer, traces = Layer(), []
    held = {
        "dict": {"layer": layer},
        "list": [layer],
        "deque": collections.deque([layer]),
        "object in a dict": {"layer": types.SimpleNamespace(layer=layer)},
    }[kind]

    def read():
        found = held["layer" if isinstance(held, dict) else 0]
        return found.layer if kind == "object in a dict" else found

    def grow(loss):
        if kind == "object in a dict":
            held.update(layer=types.SimpleNamespace(layer=layer, loss=loss))
        elif kind == "dict":
            held[len(held)] = loss
        else:
            held.append(loss)

    naming, holding = (
        (lambda x: (traces.append(1), layer(x), read()(x))[2]),
        (lambda x: (traces.append(1), read()(x))[1]),
    )
    f = nnx.jit(naming if named else holding)
    for loss in (0.5, jnp.ones(()), np.float32(1)):
        f(X)
        grow(loss)
        layer.w.value += 1
    np.testing.assert_array_equal(f(X), layer(X))
    assert len(traces) == (1 if named or kind == "object in a dict" else 2)


def test_a_module_beside_a_captured_module_is_seen():
    """Also if the function would have found the first by its name, and the second comes in the place of a number."""
    first, second = Layer(1.0), Layer(2.0)
    held = {"first": first, "second": 3.0}

    @nnx.jit
    def f(x):
        return first(x) + sum(layer(x) for layer in held.values() if isinstance(layer, Layer))

    one = first(X)
    np.testing.assert_array_equal(f(X), 2 * one)
    held["third"] = 4.0
    np.testing.assert_array_equal(f(X), 2 * one)
    held["fourth"] = second
    np.testing.assert_array_equal(f(X), 2 * one + second(X))


SWAPS = {
    "in a dict": lambda held, layer: held["layers"].update(first=layer),
    "in an object": lambda held, layer: setattr(held["object"], "layer", layer),
    "with the dict": lambda held, layer: held.update(layers={"first": layer}),
    "with the object": lambda held, layer: held.update(object=types.SimpleNamespace(layer=layer)),
}


@pytest.mark.parametrize("kind", SWAPS)
def test_another_module_at_the_same_place_costs_no_trace(kind):
    """The function is not traced to find out that it captures this one, too."""
    held, traces = {"layers": {"first": Layer(1.0)}, "object": types.SimpleNamespace(layer=Layer(1.0))}, []
    in_dict = lambda x: (traces.append(1), held["layers"]["first"](x))[1]
    in_object = lambda x: (traces.append(1), held["object"].layer(x))[1]
    f = nnx.jit(in_dict if "dict" in kind else in_object)
    f(X)
    before = len(traces)
    for value in (2.0, 3.0, 1.0):
        other = Layer(value)
        SWAPS[kind](held, other)
        np.testing.assert_array_equal(f(X), expected(other))
        assert other.calls == 1
    assert len(traces) == before


def test_a_module_that_comes_and_goes_costs_one_trace():
    layer, traces = Layer(), []
    held = {"layer": layer}
    f = nnx.jit(lambda x: (traces.append(1), held["layer"](x))[1])
    f(X)
    held["another"] = Layer()
    f(X)
    before = len(traces)
    for _ in range(3):
        del held["another"]
        f(X)
        held["another"] = Layer()
        f(X)
    assert len(traces) == before
    assert layer.calls == 8


def test_a_change_of_a_module_beside_a_captured_module_costs_no_trace():
    """The function does not read it; that a transform can do anything to a Module does not count."""
    grad, traces = nnx.grad, []
    held = {"read": Layer(), "beside": Layer()}
    f = nnx.jit(lambda x: (traces.append(1), held["read"](x), grad(jnp.sum)(x))[1])
    f(X)
    before = len(traces)
    held["beside"].setting = 1
    f(X)
    assert len(traces) == before


def test_a_module_that_becomes_a_key_beside_another():
    """The values of the dict are numbers."""
    first, second = Layer(1.0), Layer(2.0)
    rates = {first: 0.5}
    f = nnx.jit(lambda x: first(x) + sum(rate * layer(x) for layer, rate in rates.items()))
    np.testing.assert_array_equal(f(X), 1.5 * first(X))
    rates[second] = 1.0
    np.testing.assert_array_equal(f(X), 1.5 * first(X) + second(X))


def test_a_function_without_closures_is_traced_once():
    layer, traces = Layer(), []
    f = nnx.jit(lambda layer, x: (traces.append(1), layer(x))[1])
    for _ in range(4):
        f(layer, X)
    assert len(traces) == 1


def test_a_variable_by_itself():
    """A captured Variable is read and written like a captured Module."""
    total = nnx.Variable(jnp.array(1.0))

    @nnx.jit
    def add(x):
        total.value += x
        return total.value

    assert [add(2.0).item(), add(2.0).item()] == [3, 5]
    total.value = jnp.array(10.0)
    assert add(1.0).item() == 11 == total.value.item()


class Switched(nnx.Module):
    def __init__(self, value):
        self.switch, self.gain = nnx.Variable(value), nnx.Param(jnp.array(2.0))

    def __call__(self, x):
        return x * self.gain if self.switch.value in (True, "on") else -x


@pytest.mark.parametrize(("on", "off"), [(True, False), ("on", "off")])
@pytest.mark.parametrize("kind", ["Variables", "Module", "inner jit"])
def test_a_captured_bool_or_text_is_a_constant_of_the_trace(kind, on, off):
    """What to do can depend on it, as in eager code; it is seen as it is now, and each value is compiled once."""
    module, traces = Switched(on), []
    switch, gain = module.switch, module.gain

    @nnx.jit
    def f(x):
        traces.append(1)
        if kind == "Variables":
            return x * gain if switch.value in (True, "on") else -x
        return module(x)

    called = nnx.jit(lambda x: f(x)) if kind == "inner jit" else f
    called(1.0)
    traces.clear()
    for _ in range(3):
        assert [called(1.0), *called(jnp.ones(2))] == [gain.value] * 3
        gain.value *= 2
        switch.value = off
        assert [called(1.0), *called(jnp.ones(2))] == [-1] * 3
        switch.value = on
    assert len(traces) == 3  # the two shapes with `off`, and arrays with `on`
    assert switch.value is on
    assert called.lower(1.0).compile()(1.0) == gain.value
    switch.value = off
    assert [*called(jnp.ones(3))] == [-1] * 3


@pytest.mark.parametrize("kept", [True, False], ids=["the former one lives", "it is gone"])
@pytest.mark.parametrize(("on", "off"), [(True, False), ("on", "off")])
def test_another_variable_takes_the_place_of_one_with_a_constant(on, off, kept):
    """The model has the same structure then. It is seen at once, and whenever its value changes."""
    module, former = Switched(on), []
    f = nnx.jit(lambda x: module(x))

    def replace(value):
        former[:] = [module.switch] if kept else []
        module.switch = nnx.Variable(value)

    assert [f(1.0) for _ in range(4)] == [2] * 4
    compiled = f.lower(1.0).compile()
    replace(off)
    with pytest.raises(ArgumentError, match="other objects"):
        compiled(1.0)
    assert [f(1.0) for _ in range(4)] == [-1] * 4
    replace(off)
    assert [f(1.0) for _ in range(4)] == [-1] * 4
    module.switch.value = on
    assert [f(1.0) for _ in range(2)] == [2] * 2
    replace(on)
    assert f(1.0) == compiled(1.0) == 2


def test_variables_take_turns_to_hold_a_constant():
    """Which of them does is part of what a program is kept for."""
    first, second = nnx.Variable(True), nnx.Variable(jnp.array(1.0))

    @nnx.jit
    def f():
        return [jnp.asarray(10.0 if v.value is True else v.value) for v in (first, second)]

    for _ in range(3):
        assert f() == [10, 1]
    first.value, second.value = second.value, first.value
    assert f() == [1, 10]


@pytest.mark.parametrize("before", [None, jnp.array(1.0)], ids=["None", "array"])
def test_text_comes_where_there_was_none(before):
    setting = nnx.Variable(before)
    f = nnx.jit(lambda x: x * 2 if setting.value == "on" else -x)
    assert [f(1.0), f(1.0)] == [-1, -1]
    setting.value = "on"
    assert [f(1.0), f(1.0)] == [2, 2]


def test_a_captured_bool_of_a_trace_beside_a_module_from_outside():
    """No kept program serves both. The call came to no end, since each try began anew."""
    scaled = Layer()

    @jax.jit
    def outer(x):
        module = Switched(True)
        return nnx.jit(lambda x: module(x) * scaled.scale if module.switch.value else x)(x)

    assert outer(1.0) == 4


PROGRAM = {
    "sharding": lambda x, i: [jax.sharding.SingleDeviceSharding(jax.devices()[0]), jax.typeof(x).sharding][i],
    "dtype": lambda x, i: [jnp.dtype("int32"), jnp.dtype("float32")][i],
    "type": lambda x, i: [jnp.int32, jnp.float32][i],
    "function": lambda x, i: [jnp.sin, jnp.cos][i],
}


@pytest.mark.parametrize("make", PROGRAM.values(), ids=PROGRAM)
def test_what_cannot_be_traced_is_a_constant(make):
    """``jax.tree.map`` and ``get_named_sharding`` make States of such values, for a function to apply leaf by leaf."""
    params = nnx.state(nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2))))
    settings, seen = params.map(lambda path, v: v.replace(make(v.value, 0))), []
    f = nnx.jit(lambda params: jax.tree.map(lambda p, setting: seen.append(setting) or p, params, settings))
    for i in (0, 0, 1, 1, 0):
        settings["b"].value = make(params["b"].value, i)
        assert f(params)["a"].value.tolist() == [1, 1]
    assert seen[-4:] == [make(params["b"].value, i) for i in (0, 0, 0, 1)]  # a and b, in each of two traces


def test_a_captured_state_of_shardings_constrains():
    mesh = jax.make_mesh((1,), ("x",))
    with jax.set_mesh(mesh):
        params = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": ("x", None)}))
        shardings = nnx.get_named_sharding(params, mesh)
        constrained = nnx.jit(lambda params: jax.lax.with_sharding_constraint(params, shardings))(params)
    assert constrained["kernel"].sharding.is_equivalent_to(shardings["kernel"].value, 2)


NEEDED = {
    "if": lambda n: 1.0 if n > 2 else 0.0,
    "range": lambda n: float(len(range(n))),
    "shape": lambda n: jnp.ones(n).sum(),
}


@pytest.mark.parametrize("needs", NEEDED.values(), ids=NEEDED)
@pytest.mark.parametrize("kind", [int, np.int32])
def test_an_integer_is_a_constant_if_its_value_is_needed(needs, kind):
    """As in eager code, and in flax.nnx, where it stays what it was in the first trace."""
    count = nnx.Variable(kind(3))
    f = nnx.jit(lambda x: x * needs(count.get_value()))
    compiled = f.lower(1.0).compile()
    for n in (3, 3, 2, 3):
        count.value = kind(n)
        assert f(1.0) == needs(n)
        assert n != 3 or compiled(1.0) == needs(n)


def test_an_integer_is_an_input_if_its_value_is_not_needed():
    count, traces = nnx.Variable(0), []
    f = nnx.jit(lambda x: traces.append(1) or x * count)
    for n in range(4):
        count.value = n
        assert f(2.0) == 2 * n
    assert len(traces) == 2  # abandoned, kept


def test_integers_in_a_tuple_are_constants():
    """``jax.tree.map`` makes States of shapes and axes."""
    params = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    shapes, traces = jax.tree.map(jnp.shape, params), []

    @nnx.jit
    def restored(flat):
        traces.append(1)
        return jax.tree.map(
            lambda x, v: x.reshape(v.get_value()), flat, shapes, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )

    flat = nnx.pure(jax.tree.map(jnp.ravel, params))
    for _ in range(2):
        assert restored(flat)["kernel"].shape == (2, 3)
    shapes["kernel"].value = 3, 2
    assert restored(flat)["kernel"].shape == (3, 2)
    assert len(traces) == 3


def test_an_error_that_no_integer_is_the_cause_of():
    count = nnx.Variable(3)
    with pytest.raises(TypeError, match="unsupported operand"):
        nnx.jit(lambda x: (x * count) + "text")(1.0)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"args\[0\]"):
        nnx.jit(lambda x: x * count if x > 0 else x)(1.0)
    assert count.value == 3


def test_an_integer_is_still_an_input_after_a_call_that_fails_for_another_reason():
    count, traces = nnx.Variable(0), []
    f = nnx.jit(lambda x: traces.append(1) or x @ jnp.ones(2) * count)
    assert f(jnp.ones(2)) == 0
    with pytest.raises(TypeError, match="contracting dimensions"):
        f(jnp.ones(3))
    traces.clear()
    for n in range(4):
        count.value = n
        assert f(jnp.ones(2)) == 2 * n
    assert not traces


def test_a_function_that_fails_for_another_reason_is_traced_again_only_for_a_captured_integer():
    w, traces = nnx.Param(jnp.ones(2)), []

    @nnx.jit
    def f(n):
        traces.append(1)
        w.get_value().reshape("no shape")

    with pytest.raises(TypeError):
        f(3)
    assert len(traces) == 2  # abandoned, failed


def test_what_cannot_be_compared_is_no_constant():
    setting = nnx.Variable({1, 2})
    with pytest.raises(ArgumentError, match=r"The Variable captured\[0\] holds a set"):
        nnx.jit(lambda x: x * len(setting.value))(1.0)


def test_a_trace_for_another_captured_bool_is_explained():
    module = Switched(True)
    f = nnx.jit(lambda x: module(x))
    f(1.0)
    module.switch.value = False
    f(1.0)
    assert "captured[0].switch: True became False" in f.explain()


def test_a_captured_bool_that_the_function_writes():
    """It is an array from then on."""
    done, traces = nnx.Variable(False), []

    @nnx.jit
    def update(x):
        traces.append(1)
        done.value = done.value | (x > 1)

    for x, expected in [(0.0, False), (2.0, True), (0.0, True), (0.0, True)]:
        update(x)
        assert isinstance(done.value, jax.Array)
        assert done.value == expected
    assert len(traces) == 3  # abandoned, of a constant, of an array
    done.value = False
    update(0.0)
    assert not done.value


READS = {
    "value": lambda v: v.value,
    "item": lambda v: v[...],
    "get_value": lambda v: v.get_value(),
    "raw_value": lambda v: v.raw_value,
    "get_raw_value": lambda v: v.get_raw_value(),
    "array": lambda v: jnp.asarray(v),
    "operator": lambda v: v * 1,
    "method": lambda v: v.sum(),
    "copy": lambda v: v.copy().value,
    "replace": lambda v: v.replace(layer=1).value,
    "pure": lambda v: nnx.pure(v),
    "state": lambda v: nnx.state(v).value,
    "clone": lambda v: nnx.clone(v).value,
    "leaves": lambda v: jax.tree.leaves(v)[0],
    "copy_from": lambda v: (new := nnx.Variable(0.0), new.copy_from(v))[0].value,
    "deepcopy": lambda v: copy.deepcopy(v).value,
    "another Variable": lambda v: nnx.Variable(v).value,
    "assigned": lambda v: (new := nnx.Variable(0.0), setattr(new, "value", v))[0].value,
    "assigned as it is": lambda v: (new := nnx.Variable(0.0), new.set_raw_value(v))[0].value,
    "raw JAX": lambda v: jax.jit(lambda v: v.value)(v),
    "pickle": lambda v: v.__reduce__()[2][0],
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("held", [False, True], ids=["named", "held in a list"])
def test_every_way_to_read_a_variable_is_seen(read, held):
    """Whichever way a function reads a captured Variable, the next call has its present value."""
    v = nnx.Variable(jnp.array(1.0))
    container = [v]
    f = nnx.jit((lambda x: x * READS[read](container[0])) if held else (lambda x: x * READS[read](v)))
    assert f(2.0).item() == 2
    v.value = jnp.array(5.0)
    assert f(2.0).item() == 10


@pytest.mark.parametrize(
    "read",
    [
        lambda v: v.factor,
        lambda v: v.get_metadata("factor"),
        lambda v: v.get_metadata()["factor"],
        lambda v: 3.0 if v.has_metadata("more") else 1.0,
    ],
    ids=["attribute", "get_metadata", "all", "has_metadata"],
)
def test_metadata_of_a_captured_variable_are_seen(read):
    """Also by a function that does not read its value."""
    holder = [nnx.Variable(jnp.array(1.0), factor=1.0)]
    f = nnx.jit(lambda x: x * read(holder[0]))
    assert f(2.0).item() == 2
    holder[0].set_metadata(factor=3.0, more=True)
    assert f(2.0).item() == 6


@pytest.mark.parametrize("described", [False, True], ids=["unknown", "described before"])
@pytest.mark.parametrize(
    "read",
    [
        lambda m: nnx.state(m)["w"].value,
        lambda m: nnx.split(m)[1]["w"].value,
        lambda m: nnx.clone(m).w.value,
        lambda m: nnx.flatten(m)[1][1][1].value,
        lambda m: nnx.jit(lambda m: m.w.value)(m),
        lambda m: jax.tree.leaves(m)[1],
        lambda m: nnx.unpack(m)._state["w"].value,
        lambda m: jax.grad(lambda m: (m.w**2).sum() / 2, allow_int=True)(m).w.value,
        lambda m: jax.tree.map(lambda x: x, m).w.value,
        lambda m: copy.deepcopy(m).w.value,
    ],
    ids=["state", "split", "clone", "flatten", "jit", "leaves", "unpack", "grad", "map", "deepcopy"],
)
def test_a_captured_module_taken_apart_has_its_present_values(read, described):
    """Also if it was described before, outside of the trace."""
    layer = Layer()
    holder = [layer]
    if described:
        nnx.state(layer)
        nnx.jit(lambda m: m(X))(layer)
    f = nnx.jit(lambda x: x @ read(holder[0]))
    np.testing.assert_array_equal(f(X), X @ layer.w.value)
    layer.w.value *= 3
    np.testing.assert_array_equal(f(X), X @ layer.w.value)


def updated(graphdef, state):
    model = nnx.merge(graphdef, jax.tree.map(jnp.zeros_like, state))
    nnx.update(model, state)
    return model


@pytest.mark.parametrize("looked_into", [False, True], ids=["as split", "looked into"])
@pytest.mark.parametrize(
    "made",
    [
        nnx.merge,
        updated,
        lambda graphdef, state: nnx.merge(graphdef, state.flat_state()),
        lambda graphdef, state: nnx.merge(graphdef, dict(state)),
        lambda graphdef, state: nnx.merge(graphdef, jax.tree.leaves(state)),
        lambda graphdef, state: lambda x: nnx.call((graphdef, state))(x)[0],
    ],
    ids=["merge", "update", "flat", "dict", "list", "call"],
)
def test_a_captured_state_is_an_input(made, looked_into):
    """Its Variables are live objects: their present values are seen, and so are others in their place."""
    layer = Layer()
    graphdef, state = nnx.split(layer)
    if looked_into:
        assert state["w"].shape == (2, 2)
    f = nnx.jit(lambda x: made(graphdef, state)(x))
    np.testing.assert_array_equal(f(X), expected(layer))
    state["w"].value = layer.w.value = layer.w.value * 3
    np.testing.assert_array_equal(f(X), expected(layer))
    state["w"] = layer.w = nnx.Param(jnp.zeros((2, 2)))
    np.testing.assert_array_equal(f(X), expected(layer))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_captured_module_has_its_present_settings(copied):
    """Static attributes, too, of a Module that is neither called nor read otherwise."""
    holder = [Layer()]
    f = nnx.jit(lambda x: x * copied(holder[0]).scale)
    assert f(1.0).item() == 2
    holder[0].scale = 3
    assert f(1.0).item() == 3


@pytest.mark.parametrize("holds", [True, False])
def test_each_trace_is_given_more_of_what_is_captured(monkeypatch, holds):
    """So there is a last one, even if something that the function refers to changes whenever it is looked up."""
    if not holds:
        monkeypatch.setattr(Conditions, "find_or_raise", property(lambda self: lambda: None))
    hidden, layer, traces = functools.cache(Layer), Layer(3.0), 0  # no way leads into the cache
    layers = [hidden(1.0), hidden(2.0), layer]

    @nnx.jit
    def f(x):
        nonlocal traces
        traces += 1
        assert traces < 20
        return hidden(1.0)(x) + hidden(2.0)(x) + layer(x)

    for calls in range(1, 4):
        np.testing.assert_allclose(f(X), sum(map(expected, layers)))
        assert [x.calls.item() for x in layers] == [calls] * 3
        assert all(x._nnx_trace is None for x in layers)
        layers[1].w *= 2.0
    assert traces == (3 if holds else 9)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, nnx.jit, nnx.vmap])
def test_a_setting_that_is_first_read_in_another_trace(transform):
    """There its Module is a constant, or captured by the function around; each later call sees what it is then."""
    layer = Layer()
    f = nnx.jit(lambda x: x * layer.scale)
    for layer.scale in (2, 3, 4):
        assert transform(lambda x: f(x))(jnp.ones(1)) == layer.scale
        assert f(jnp.ones(1)) == layer.scale


@pytest.mark.parametrize("looked_into", [False, True])
def test_a_model_that_is_merged_from_a_captured_state(looked_into):
    """Also if no way leads to the State, and nobody has looked into it before the trace."""
    hidden = functools.cache(lambda: nnx.split(Layer()))
    graphdef, state = hidden()
    if looked_into:
        assert len(state) == 2
    f = nnx.jit(lambda x: nnx.merge(*hidden())(x))
    for value in 1.0, 2.0, 3.0:
        np.testing.assert_array_equal(f(X), expected(nnx.merge(graphdef, state)))
        state["w"].value = jnp.full((2, 2), value)


class Configured(Layer):
    def __init__(self):
        super().__init__()
        self.config = {"rate": 2.0, "sizes": [1, 2]}

    def __call__(self, x):
        return super().__call__(x) * self.config["rate"]


doubled = lambda model: jax.tree.map(lambda v: v * 2, model)
AS_PYTREES = {
    "map": lambda model, x: doubled(model)(x),
    "raw jit": lambda model, x: jax.jit(lambda model, x: 2 * doubled(model).w.sum() * x)(model, x),
    "raw grad": lambda model, x: (
        jax.grad(lambda model: model.w.sum() * model.config["rate"], allow_int=True)(model).w * x
    ),
    "in vmap": lambda model, x: nnx.vmap(lambda model, x: doubled(model).w.sum() * x, in_axes=(None, 0))(model, x),
    "in jit": lambda model, x: (doubled(model), nnx.jit(lambda model, x: doubled(model).w.sum() * x)(model, x))[1],
}


@pytest.mark.parametrize("way", AS_PYTREES)
@pytest.mark.parametrize("captured", [False, True])
def test_settings_that_a_treedef_has_copied_before_are_not_captured(way, captured):
    """A dict of settings is static there; the treedef has a copy of its own, and gives each model another one."""
    model, traces = Configured(), 0
    expected = AS_PYTREES[way](model, X)  # outside of a trace, where the copy is made

    def run(model, x):
        nonlocal traces
        traces += 1
        return AS_PYTREES[way](model, x)

    jitted = nnx.jit(lambda x: run(model, x)) if captured else functools.partial(nnx.jit(run), model)
    for _ in range(2):
        assert jnp.array_equal(jitted(X), expected)
    assert traces == 1
    model.config["rate"] = 3.0
    assert jnp.array_equal(jitted(X), AS_PYTREES[way](model, X))


def test_a_list_that_is_a_static_argument_is_not_captured():
    """Each trace gets a copy."""
    traces = 0

    def run(sizes, x):
        nonlocal traces
        traces += 1
        return x * sizes[1]

    jitted, sizes = nnx.jit(run, static_argnums=0), nnx.List([1.0, 2.0])
    assert jitted(sizes, 3.0) == jitted(nnx.List([1.0, 2.0]), 3.0) == 6.0
    sizes[1] = 4.0
    assert jitted(sizes, 3.0) == 12.0
    assert traces == 3


@pytest.mark.parametrize("transform", [nnx.jit, lambda f: nnx.jit(nnx.remat(f)), nnx.remat])
def test_a_list_or_dict_in_a_static_tuple_is_not_captured(transform):
    """Each trace gets a copy, with what is in it; the live one stays as it is."""
    model = nnx.Module()
    model.sizes = nnx.static(("sizes", [1.0, {"last": 2.0}]))
    run = transform(lambda model, x: x * model.sizes[1][0] * model.sizes[1][1]["last"])
    assert run(model, 3.0) == run(model, 3.0) == 6.0
    assert model.sizes == ("sizes", [1.0, {"last": 2.0}])
    model.sizes[1][1]["last"] = 4.0
    assert run(model, 3.0) == 12.0
    layer = nnx.Module()
    layer.size = 5.0
    model.sizes[1][1]["layer"] = layer  # a Module is the same in each copy
    run = transform(lambda model, x: x * model.sizes[1][0] * model.sizes[1][1]["layer"].size)
    assert run(model, 3.0) == run(model, 3.0) == 15.0
    layer.size = 6.0
    assert run(model, 3.0) == 18.0
    assert model.sizes == ("sizes", [1.0, {"last": 4.0, "layer": layer}])


@pytest.mark.parametrize(
    "listed",
    [nnx.iter_graph, nnx.iter_modules, nnx.iter_children, nnx.find_duplicates, nnx.state, jax.tree.leaves],
)
@pytest.mark.parametrize("hidden", [False, True])
def test_what_a_captured_module_holds_is_listed_as_it_is(listed, hidden):
    """Also by a function that then does nothing with it, of a Module that a list or a cache holds."""
    holder, cached = [nnx.Sequential(Layer())], functools.cache(lambda: nnx.Sequential(Layer()))
    held = cached if hidden else lambda: holder[0]
    assert len(held()) == 1
    count = nnx.jit(lambda: len(list(listed(held()))))
    for change in (
        lambda m: None,
        lambda m: setattr(m, "head", Layer()),
        lambda m: setattr(m, "tail", m.head),
        lambda m: delattr(m, "head"),
    ):
        change(held())
        assert count() == len(list(listed(held())))


class Holder:
    """An object that is compared by identity, whatever it holds."""

    def __init__(self, layer):
        self.layer = layer


class Owner(nnx.Module):
    """An argument that leads to Layers besides its data: by a plain object, a function, its class, a global."""

    def __init__(self, layer):
        self.holder = holder = Holder(layer)
        self.function = lambda x: holder.layer(x)

    def in_object(self, x):
        return self.holder.layer(x)

    def setting_in_object(self, x):
        return self.holder.layer.scale * x

    def in_function(self, x):
        return self.function(x)

    def in_class(self, x):
        return self.layer_of_class(x)

    def in_global(self, x):
        return LAYER_OF_OWNERS(x)


LAYER_OF_OWNERS = None
PUT = {
    "in_object": lambda owner, layer: setattr(owner.holder, "layer", layer),
    "setting_in_object": lambda owner, layer: setattr(owner.holder, "layer", layer),
    "in_function": lambda owner, layer: setattr(owner.holder, "layer", layer),
    "in_class": lambda owner, layer: setattr(Owner, "layer_of_class", layer),
    "in_global": lambda owner, layer: globals().update(LAYER_OF_OWNERS=layer),
}


@pytest.mark.parametrize("named", [False, True], ids=["not named", "named"])
@pytest.mark.parametrize("way", PUT)
def test_an_argument_leads_to_what_is_captured_already(way, named):
    """By the function itself, or by an earlier argument: another Module may take its place there, too."""
    layer, cls = Layer(1.0), type("Owner", (Owner,), {"run": getattr(Owner, way)})
    owners = [cls(layer), cls(layer)]
    PUT[way](owners[0], layer)
    run = (lambda owner, x: owner.run(x) + layer(x)) if named else (lambda owner, x: owner.run(x))
    f = nnx.jit(run)
    for k, owner in enumerate((*owners, *owners)):
        np.testing.assert_array_equal(f(owner, X), run(owner, X))
        if k > 0:
            other = Layer(k + 1.0)
            other.scale = k + 2
            PUT[way](owners[1], other)


class ReadsSetting(nnx.Module):
    def run(self, x):
        return x * LAYER_OF_OWNERS.scale


def test_a_method_of_an_argument_reads_a_setting_of_what_is_captured_already():
    """Another Module in its place is seen, though the first is still captured by the function itself."""
    layer, owner = Layer(), ReadsSetting()
    f = nnx.jit(lambda owner, x: owner.run(x) + layer(x))
    for other in layer, Layer(2.0), layer:
        globals().update(LAYER_OF_OWNERS=other)
        for other.scale in 3, 4:
            np.testing.assert_array_equal(f(owner, X), X * other.scale + expected(layer))


def test_a_compiled_partial_in_the_class_of_an_argument():
    """It has no code of its own that might refer to a Module."""

    class Doubles(nnx.Module):
        double = staticmethod(jax.jit(functools.partial(jnp.multiply, 2.0)))

    assert nnx.jit(lambda m, x: m.double(x))(Doubles(), 1.0) == 2.0


def test_an_argument_that_is_captured_too():
    """The same object as argument and in the closure is one object inside."""
    layer = Layer()
    seen = []

    @nnx.jit
    def f(m, x):
        seen.append(m is layer)
        return m(x) + layer(x)

    check(lambda x: f(layer, x), layer, times=2)
    assert seen[-1]
    other = Layer(7.0)
    np.testing.assert_allclose(f(other, X), expected(other) + expected(layer))
    assert (int(other.calls), int(layer.calls)) == (1, 3)


def test_captured_and_passed_objects_that_share():
    """A Variable shared between an argument and a captured module is one Variable inside."""
    layer, other = Layer(), Layer()
    other.w = layer.w

    @nnx.jit
    def f(m):
        m.w.value = m.w.value + 1
        return layer.w.value

    np.testing.assert_array_equal(f(other), jnp.full((2, 2), 2.0))
    np.testing.assert_array_equal(layer.w.value, jnp.full((2, 2), 2.0))
    assert other.w is layer.w


def test_a_captured_object_among_very_many_that_is_exchanged():
    """The way to it is known also where the function refers to thousands of values, and the former one lives on."""
    models = former = [nnx.Dict(w=nnx.Param(float(i))) for i in range(1200)]
    graphdef, state = nnx.split(nnx.List(models))
    x = jnp.ones(())
    of_list = nnx.jit(lambda x: models[1100].w * x)
    of_state = nnx.jit(lambda x: nnx.merge(graphdef, state)[1100].w * x)
    of_rest = nnx.jit(lambda x: models[1100].w * x + models[3].w)
    assert [f(x).item() for f in (of_list, of_state, of_rest)] == [1100, 1100, 1103]
    models = [*former[:1100], nnx.Dict(w=nnx.Param(5.0)), *former[1101:]]
    former_state, state = state, nnx.state(nnx.List(models))
    assert [f(x).item() for f in (of_list, of_state, of_rest)] == [5, 5, 8]
    assert len(former_state) == len(former)


def test_a_global_that_is_rebound():
    """When the name refers to another module, that one is used, also while the first is alive."""
    first, second = Layer(1.0), Layer(2.0)
    layer = first
    f = nnx.jit(lambda x: layer(x))
    check(f, first)
    layer = second
    check(f, second)
    layer = first
    check(f, first)


def test_structure_changed_inside():
    """Attributes attached to and deleted from a captured module inside are so afterwards."""
    layer = Layer()

    @nnx.jit
    def f():
        layer.extra = nnx.Param(layer.w.value + 1)
        layer.tied = layer.extra
        del layer.scale

    f()
    assert layer.tied is layer.extra
    assert not hasattr(layer, "scale")
    assert layer.extra.value.tolist() == [[2, 2], [2, 2]]


def test_an_array_attribute_of_a_captured_module():
    """A model that was called as an argument, then captured, then called again: its table still reads its arrays."""
    layer = Layer()
    layer.array, layer.list = jnp.ones(()), nnx.List([1])
    layer.list.array = jnp.ones(())
    whole = nnx.Dict(layer=layer)
    total = nnx.jit(lambda whole: whole.layer.w.sum() * whole.layer.array * whole.layer.list.array)
    total(whole)
    nnx.jit(lambda: layer(X))()
    for k in range(3):
        layer.array, layer.list.array = jnp.array(k + 1.0), jnp.array(k + 2.0)
        assert total(whole) == 4 * (k + 1) * (k + 2)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failing_call_leaves_captured_objects_as_they_were(error):
    """Whatever was written before an exception, first call or later, is undone: same values, same attributes."""
    layer = Layer()

    @nnx.jit
    def f(x, fail):
        y = layer(x)
        layer.debris = y
        layer.w.value = layer.w.value * 2
        if fail.shape:
            raise error("halfway")
        return y

    value, calls = layer.w.value, layer.calls.value
    for _ in range(2):
        with pytest.raises(error, match="halfway"):
            f(X, jnp.ones(1))
        assert layer.w.value is value
        assert layer.calls.value is calls
        assert list(vars(layer)) == ["w", "calls", "scale"]
        assert layer._nnx_trace is None
    f(X, jnp.array(0))
    assert layer.w.value.tolist() == [[2, 2], [2, 2]]


def test_gradients_of_a_captured_module():
    """nnx.grad inside, of a captured module as its argument, and jax.grad of a function that reads one."""
    layer = Layer()

    @nnx.jit
    def step():
        grads = nnx.grad(lambda m: m(X).sum())(layer)
        layer.w.value = layer.w.value - grads.w.value
        return jax.grad(lambda x: (x * layer.w.value).sum())(jnp.ones((2, 2)))

    assert step().tolist() == [[-1, -1], [-1, -1]]
    assert step().tolist() == [[-3, -3], [-3, -3]]
    assert int(layer.calls) == 2


def test_split_inside_of_a_captured_module():
    """split and state of a captured module inside see present values."""
    layer = Layer()
    f = nnx.jit(lambda: nnx.merge(*nnx.split(layer)).w.value.sum())
    assert f().item() == 4
    layer.w.value *= 2
    assert f().item() == 8


def test_nested_jits():
    """A captured module is found through jitted functions called from jitted functions, each kept and called alone."""
    layer = Layer()
    inner = nnx.jit(lambda x: layer(x))
    outer = nnx.jit(lambda x: inner(x) + inner(x) + layer(x))
    check(inner, layer)
    check(outer, layer, times=3)
    layer.w.value *= 2
    check(outer, layer, times=3)
    check(inner, layer)


def test_code_that_ran_when_an_inner_function_was_traced():
    """It counts as code of the outer one, which calls the compiled inner one: what it refers to is looked up there."""
    namespace = {"layer": Layer()}
    exec("def apply(x): return layer(x)", namespace)
    hidden = itertools.repeat(namespace.pop("apply"))
    inner, traces = nnx.jit(lambda x: next(hidden)(x)), []
    outer = nnx.jit(lambda x: (traces.append(1), inner(x))[1])
    check(inner, namespace["layer"])
    check(outer, namespace["layer"])
    before = len(traces)
    namespace["layer"] = Layer(3.0)
    check(outer, namespace["layer"])
    check(outer, namespace["layer"])
    assert len(traces) <= before + 1


def test_under_raw_jax():
    """Under raw jax.jit a captured module may be read; a write is refused, and leaves it concrete."""
    layer = Layer()
    read = nnx.jit(lambda x: x @ layer.w.value)
    np.testing.assert_allclose(jax.jit(read)(X), X @ layer.w.value)
    layer.w.value *= 2
    np.testing.assert_allclose(jax.jit(lambda x: read(x))(X), X @ layer.w.value)
    with pytest.raises(nnx.TraceContextError, match="calls"):
        jax.jit(nnx.jit(lambda x: layer(x)))(X)
    assert int(layer.calls) == 0


@pytest.mark.parametrize(
    ("raw", "own"),
    [
        (lambda f: jax.checkpoint(f)(X), lambda f: nnx.remat(f)(X)),
        (lambda f: jax.lax.cond(True, f, f, X), lambda f: nnx.cond(True, f, f, X)),
        (lambda f: jax.jit(f)(X), lambda f: nnx.jit(f)(X)),
    ],
    ids=["remat", "cond", "jit"],
)
def test_a_captured_module_as_the_function_of_a_raw_transform(raw, own):
    """JAX keeps the trace, with tracers of the first call; the error says what to use, which sees all changes."""
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    calls = {
        "raw": nnx.jit(lambda: raw(layer)),
        "own": nnx.jit(lambda: own(layer)),
        "new function": nnx.jit(lambda: raw(lambda x: layer(x))),
    }
    for call in calls.values():
        np.testing.assert_allclose(call(), layer(X), rtol=1e-6)
    layer.kernel.value *= 2
    layer.note = "changed"
    expected = layer(X)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        calls.pop("raw")()
    assert any("use nnx.remat, nnx.cond, nnx.switch or nnx.jit" in note for note in caught.value.__notes__)
    for call in calls.values():
        np.testing.assert_allclose(call(), expected, rtol=1e-6)


def test_without_jit():
    """Under jax.disable_jit a closure is what it is in Python."""
    layer = Layer()
    f = nnx.jit(lambda x: layer(x))
    with jax.disable_jit():
        check(f, layer)


def test_ahead_of_time():
    """A lowered and compiled function takes captured modules as they are at the call."""
    layer = Layer()
    compiled = nnx.jit(lambda x: layer(x)).lower(X).compile()
    check(compiled, layer)
    layer.w.value *= 2
    check(compiled, layer)


def test_a_captured_module_is_freed():
    """A jitted function holds captured modules no longer than its own closure does."""
    layers = [Layer()]
    f = nnx.jit(lambda x: layers[0](x))
    f(X)
    f(X)
    reference = weakref.ref(layers.pop())
    gc.collect()
    assert reference() is None
    layers.append(Layer(3.0))
    check(f, layers[0])


def test_weights_are_inputs_and_not_constants():
    """Nothing of a captured module is baked into the program."""
    layer = Layer(12345.0)
    f = nnx.jit(lambda x: x @ layer.w.value)
    assert "12345" not in f.lower(X).as_text()


def test_another_thread_is_not_watched():
    """Reads in one thread are not taken for captures of what another thread traces."""
    layer, bystander = Layer(), Layer()
    started, done = threading.Event(), threading.Event()

    def read():
        started.wait(10)
        bystander(X)
        done.set()

    thread = threading.Thread(target=read)
    thread.start()

    @nnx.jit
    def f(x):
        started.set()
        assert done.wait(10)
        return layer(x)

    f(X)
    thread.join()
    assert [x is layer for x in f._captures.now()[0]] == [True]
    assert int(bystander.calls) == 1


DESCRIPTIONS = {
    "state": nnx.state,
    "split": nnx.split,
    "clone": nnx.clone,
    "leaves": jax.tree.leaves,
    "jit": lambda layer: nnx.jit(lambda layer: layer.w.sum())(layer),
    "of a Variable": lambda layer: nnx.jit(lambda w: w.sum())(layer.w),
}


@pytest.mark.parametrize("toggles", [False, True], ids=["as it is", "with another flag"])
@pytest.mark.parametrize("describe", DESCRIPTIONS.values(), ids=DESCRIPTIONS.keys())
def test_what_is_described_inside_is_not_kept_outside(describe, toggles):
    """A captured model that is taken apart inside, also where the trace fails, is described anew outside."""
    layer = Layer()

    def f(x):
        scale = layer.scale
        if toggles:
            layer.scale = 7
        describe(layer)
        if x.shape != X.shape:
            raise RuntimeError
        layer.scale = scale
        return layer(x)

    jitted = nnx.jit(f)
    for k in range(6):
        layer.w.value = jnp.full((2, 2), float(k))
        result = expected(layer)
        if k == 3:
            with pytest.raises(RuntimeError):
                jitted(jnp.ones((3, 2)))
        assert jnp.array_equal(jitted(X), result)
        assert jnp.array_equal(nnx.jit(lambda layer: layer(X))(layer), result)
        for leaf in jax.tree.leaves((layer, nnx.state(layer))):
            assert not isinstance(leaf, jax.core.Tracer)
        assert table_of(layer).layout is pack(layer).layout


def test_a_function_may_be_called_while_it_is_searched(monkeypatch):
    """As a signal handler or a destructor may do, which run in the same thread, between any two steps."""
    model, x, searches, search = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones(2), [], Captures._search
    call = nnx.jit(lambda x: model(x))

    def interrupted(*args):
        searches.append(args)
        if len(searches) == 2:  # what the trace has noticed
            call(x)
        return search(*args)

    monkeypatch.setattr(Captures, "_search", interrupted)
    thread = threading.Thread(target=call, args=(x,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert len(searches) > 2
    model.bias += 1
    assert (call(x) == model(x)).all()


def test_what_another_thread_describes_meanwhile_is_not_kept():
    """A model around a captured layer, looked at by another thread while the layer is lent to a trace."""
    layer = Layer()
    whole = nnx.Dict(layer=layer)

    def f(x):
        thread = threading.Thread(target=lambda: nnx.jit(lambda m: 0)(whole))
        thread.start()
        thread.join()
        return layer(x)

    nnx.jit(f)(X)
    total = nnx.jit(lambda whole: whole.layer.w.sum())
    for k in range(3):
        layer.w.value = jnp.full((2, 2), float(k))
        layer.scale = k
        assert total(whole) == 4 * k
        assert table_of(whole).layout is pack(whole).layout


class Arrays(nnx.Module):
    """Arrays outside of Variables, which a trace replaces in the object itself."""

    def __init__(self):
        self.mean, self.pair = jnp.zeros(2), (jnp.ones(2), 3)
        self.items, self.scale = nnx.List([jnp.ones(2)]), 2

    def total(self):
        return (self.mean + self.pair[0] + self.items[0]) * self.scale * len(self.items)


_total = nnx.jit(lambda model: model.total())
MEANWHILE = {
    "a call that is compiled": lambda model: _total(model),
    "a first call": lambda model: nnx.jit(lambda model: model.total())(model),
    "of a part": lambda model: 2 * (nnx.jit(lambda items: items[0])(model.items) + 1),
    "a model around it": lambda model: nnx.jit(lambda whole: whole.model.total())(nnx.Dict(model=model)),
    "a State": lambda model: sum(jax.tree.leaves(nnx.state(model))) * 2,
    "a copy": lambda model: nnx.clone(model).total(),
    "a merged copy": lambda model: nnx.merge(*nnx.split(model)).total(),
    "deepcopy": lambda model: copy.deepcopy(model).total(),
    "the state for pickle": lambda model: (model.__getstate__()[0]["mean"] + 2) * model.__getstate__()[0]["scale"],
    "a gradient": lambda model: nnx.grad(lambda model, x: (model.total() * x).sum(), argnums=1)(model, jnp.ones(2)),
}


@pytest.mark.parametrize("use", MEANWHILE.values(), ids=MEANWHILE)
def test_arrays_of_a_model_that_another_thread_traces(use):
    """They are as they were outside of the trace, and so are settings and lists; what was seen is not kept."""
    model, seen = Arrays(), []
    for _ in range(5):
        _total(model)

    def f(x):
        model.mean, model.scale = model.mean + x, 7
        model.items.append(x)
        thread = threading.Thread(target=lambda: seen.append(use(model)))
        thread.start()
        thread.join()
        return model.total()

    jitted = nnx.jit(f)
    assert jitted(jnp.ones(2)).tolist() == [42, 42]
    assert [x.tolist() for x in seen] == [[4, 4]]
    for k in range(3):
        model.mean, model.scale = jnp.full(2, k), k
        assert _total(model).tolist() == model.total().tolist() == [(k + 2) * k * 2] * 2
        assert table_of(model).layout is pack(model).layout


@pytest.mark.parametrize("jit", [nnx.jit, lambda f: lambda x: nnx.cond(True, f, f, x)], ids=["jit", "cond"])
def test_a_trace_that_was_given_up_keeps_no_weights(jit):
    """A layer in a dict is found while the function is traced; the constants of that first trace are not kept."""
    held, gone = {"layer": Layer()}, []
    f = jit(lambda x: x @ held["layer"].w + held["layer"].scale)
    for value in range(3):
        gone.append(weakref.ref(held["layer"].w.value))
        f(X)
        held["layer"].w.value = jnp.full((2, 2), float(value))
        gc.collect()
        assert gone[-1]() is None
        held["layer"] = Layer(value)


def test_a_failed_trace_keeps_no_weights():
    """Neither do those of a call that fails, and the next one is right."""
    held, fail = {"layer": Layer()}, [True]

    @nnx.jit
    def f(x):
        y = jnp.sin(held["layer"].w) @ x.T
        if fail[0]:
            raise RuntimeError
        return y

    with pytest.raises(RuntimeError):
        f(X)
    before = weakref.ref(held["layer"].w.value)
    held["layer"].w.value = jnp.zeros((2, 2))
    gc.collect()
    assert before() is None
    fail[0] = False
    assert not f(X).any()


# --- traces of several threads ---


class Slow(Layer):
    """A layer whose call changes nothing, and leaves another thread the time to come in between."""

    def __call__(self, x):
        time.sleep(0.1)
        return expected(self, x)


def in_threads(*functions):
    """Call functions in threads that start one after the other, and return what they return."""
    with futures.ThreadPoolExecutor(len(functions)) as pool:
        running = []
        for f in functions:
            running.append(pool.submit(f))
            time.sleep(0.03)
        return [x.result(timeout=60) for x in running]


def test_threads_that_trace_closures_over_one_model():
    """Calls with other shapes at the same time: each is right, and the model holds what it held."""
    layer = Slow()
    value = layer.w.value
    jitted = nnx.jit(lambda x: layer(x))
    shapes = (1, 2, 3, 1)
    results = in_threads(*[lambda n=n: jitted(jnp.ones((n, 2))) for n in shapes])
    for n, result in zip(shapes, results, strict=True):
        np.testing.assert_allclose(result, layer(jnp.ones((n, 2))))
    assert layer.w.value is value
    layer.w.value = 2 * value
    np.testing.assert_allclose(jitted(jnp.ones((2, 2))), layer(jnp.ones((2, 2))))


def test_threads_that_trace_functions_of_each_other():
    """A jitted closure inside of another, and inside of what JAX compiles, traced by several threads at once."""
    layer, other = Slow(), Slow()
    inner = nnx.jit(lambda x: layer(x))
    outer = nnx.jit(lambda x: inner(other(x)) + inner(x))
    raw = jax.jit(lambda x: inner(x) * 2)
    results = in_threads(*[lambda f=f: f(X) for f in (outer, inner, raw) * 2])
    for f, result in zip((outer, inner, raw) * 2, results, strict=True):
        np.testing.assert_allclose(result, f(X))
    for leaf in jax.tree.leaves((layer, other)):
        assert not isinstance(leaf, jax.core.Tracer)


def test_a_variable_that_is_another_one_in_each_trace():
    """There is an error, and not one trace after the other."""
    made = queue.SimpleQueue()
    for _ in range(20):
        made.put(nnx.Param(2.0))
    namespace = {"take": made.get_nowait}  # and no more, so that the searches are short
    exec("def scale(x): return take() * x", namespace)
    with pytest.raises(nnx.TraceContextError, match=r"\(Param\) .* others in each trace"):
        nnx.jit(namespace["scale"])(X)


class SlowWithSetter(Slow):
    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)


def test_a_thread_sets_what_a_setter_of_the_class_writes_directly_while_another_traces():
    """It waits until the object is given back, so that what it sets is not undone then."""
    layer = SlowWithSetter()
    jitted = nnx.jit(lambda x: layer(x))
    in_threads(lambda: jitted(X), lambda: setattr(layer, "scale", 5))
    assert layer.scale == 5
    np.testing.assert_allclose(jitted(X), layer(X))


def test_a_thread_uses_a_model_while_another_traces_it():
    """Values, States and copies are arrays, an eager call is one; what is written stays, attributes too."""
    layer = Slow()
    jitted = nnx.jit(lambda x: layer(x))

    def use():
        seen = layer.w.value, nnx.state(layer), nnx.clone(layer), nnx.jit(lambda layer: layer.w + 1)(layer), layer(X)
        layer.w.value = jnp.full((2, 2), 3.0)
        layer.scale = 5
        return seen

    _, seen = in_threads(lambda: jitted(X), use)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(seen))
    assert layer.scale == 5
    assert (layer.w.value == 3.0).all()
    np.testing.assert_allclose(jitted(X), layer(X))


def test_a_thread_changes_structure_while_another_traces_the_model():
    """What a jitted function attaches to a model that is lent to another thread arrives when that has given it back."""
    layer = Slow()

    def attach(layer):
        layer.extra = nnx.Param(layer.w * 2)

    in_threads(lambda: nnx.jit(lambda x: layer(x))(X), lambda: nnx.jit(attach)(layer))
    np.testing.assert_allclose(layer.extra, 2 * layer.w)


def test_shapes_of_a_closure_that_writes_while_another_thread_traces_it():
    """eval_shape borrows as well, and waits."""
    layer = Slow()

    def count(x):
        layer.calls += 1
        return layer(x)

    _, shape = in_threads(lambda: nnx.jit(count)(X), lambda: nnx.eval_shape(count, X))
    assert shape.shape == layer(X).shape
    assert layer.calls == 1


class Negated(Layer):
    def __call__(self, x):
        return -super().__call__(x)


def test_the_class_of_a_captured_module_is_set():
    """When the function has returned, and not if it fails."""
    layer = Layer()

    def change(fails):
        layer.__class__ = Negated
        if fails:
            raise RuntimeError("halfway")

    jitted = nnx.jit(change, static_argnums=0)
    with pytest.raises(RuntimeError, match="halfway"):
        jitted(True)
    assert type(layer) is Layer
    jitted(False)
    assert type(layer) is Negated
    np.testing.assert_allclose(nnx.jit(lambda x: layer(x))(X), -expected(layer))


def test_the_class_of_a_captured_variable_is_set():
    """As that of a Module."""
    v = nnx.Param(jnp.array(1.0))

    def change(fails):
        v.__class__ = nnx.BatchStat
        v.value += 1
        if fails:
            raise RuntimeError("halfway")

    jitted = nnx.jit(change, static_argnums=0)
    with pytest.raises(RuntimeError, match="halfway"):
        jitted(True)
    assert (type(v), v.item()) == (nnx.Param, 1)
    jitted(False)
    assert (type(v), v.item()) == (nnx.BatchStat, 2)


@pytest.mark.parametrize("holder", ["another", "new"])
def test_a_borrowed_variable_in_a_model_of_another_thread(holder):
    """That thread finds its value as it was, so does the one that had borrowed it, and no tracer is left behind."""
    layer, other = Layer(), nnx.List([nnx.Param(jnp.zeros((2, 2)))])
    models = []

    def describe():
        if holder == "another":
            table_of(other)
            other[0] = layer.w
        models.append(other if holder == "another" else nnx.List([layer.w]))
        assert not isinstance(table_of(models[-1]).leaves()[0], jax.core.Tracer)

    def f(x):
        y = layer(x)
        thread.start()
        thread.join(1)  # a thread that changes an object waits until the trace has ended
        return y

    thread = threading.Thread(target=describe)
    nnx.jit(f)(X)
    thread.join(30)
    assert len(models) == 1
    for model in models:
        assert model._nnx_table is None or not isinstance(model._nnx_table.leaves()[0], jax.core.Tracer)
        for _ in range(3):
            assert nnx.jit(lambda m: m[0].sum())(model) == 4.0


def test_a_module_made_in_a_trace_around_two_jitted_functions():
    """The inner one captures it, the outer one calls that; both see its present value, at each call."""

    def run(value):
        layer = nnx.List([nnx.Param(value)])
        inner = nnx.jit(lambda x: layer[0] * x)
        outer = nnx.jit(lambda x: inner(x) + 1)
        found = []
        for k in range(3):
            layer[0].value = value * 10**k
            found.append(outer(2.0))
        return jnp.stack(found)

    for value, expected in zip(jnp.arange(3.0), jax.vmap(run)(jnp.arange(3.0)), strict=True):
        np.testing.assert_allclose(expected, 1 + 2 * value * jnp.array([1, 10, 100]))


def test_what_eval_has_put_aside_may_be_changed_in_place():
    """It comes back by train(), also inside a jitted function."""
    layer, held = Layer(), bytearray(b"a")
    layer.deterministic = held
    layer.eval()

    def length(layer):
        layer = nnx.clone(layer)
        layer.train()
        return jnp.array(len(layer.deterministic))

    jitted = nnx.jit(length)
    for _ in range(8):
        assert jitted(layer) == length(layer) == len(held)
        held.append(1)


@pytest.mark.parametrize("way", ["returned", "attached"])
def test_a_module_that_a_function_only_hands_on(way):
    """It is neither called nor read, and reached through a plain list: what comes out is that Module, as it is now."""
    held = [Layer()]

    @nnx.jit
    def hand_on(holder):
        if way == "returned":
            return held[0]
        holder["layer"] = held[0]
        return None

    for _ in range(3):
        holder = nnx.Dict()
        out = hand_on(holder)
        assert (out if way == "returned" else holder["layer"]) is held[0]
        held[0].w.value *= 2
    held[0] = Layer(5.0)
    assert hand_on(nnx.Dict()) is (held[0] if way == "returned" else None)
