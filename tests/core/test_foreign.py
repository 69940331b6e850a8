"""Foreign pytrees: what is in them is seen, and costs no walk of the model."""

import dataclasses
import types
import weakref
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.errors import StaticValueError
from nnxlib.core.graph import pack
from nnxlib.core.tables import table_of


class Pair(NamedTuple):
    left: Any
    right: Any


def variable(value=1.0):
    return nnx.Param(jnp.asarray(value))


def held(container):
    """A model with a container in a named tuple, which stays what it is."""
    model = nnx.Module()
    model.pair = Pair(container, {"settings": [1, 2]})
    assert model.pair.left is container
    return model


CONTAINERS = {
    "dict": lambda: {"a": variable(), "b": variable()},
    "nested dict": lambda: {"a": {"c": variable()}, "b": variable()},
    "ordered": lambda: OrderedDict(b=variable(), a=variable()),
    "default": lambda: defaultdict(list, a=variable(), b=variable()),
    "list": lambda: [variable(), variable()],
    "State": lambda: nnx.State({"a": {"c": variable()}, "b": variable()}),
    "State in a list": lambda: [nnx.State({"a": variable()})],
    "dict in a State": lambda: nnx.State({"a": ({"x": variable()},)}),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_model_with_foreign_containers_is_walked_once(name):
    model = held(CONTAINERS[name]())
    table = table_of(model)
    assert table.reliable
    for x in jax.tree.leaves(model.pair, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        if isinstance(x, nnx.Variable):
            x.value = x.value + 1
    assert table_of(model) is table


def exchange_view(container):
    container["a"]["c"] = variable(5.0)


CHANGES = {
    "an item": ("dict", lambda x: x.update(a=variable(5.0))),
    "an item below": ("nested dict", lambda x: x["a"].update(c=variable(5.0))),
    "a new item": ("dict", lambda x: x.update(c=variable(5.0))),
    "a name": ("dict", lambda x: x.update(c=x.pop("b"))),
    "one less": ("dict", lambda x: x.popitem()),
    "of a list": ("list", lambda x: x.append(variable(5.0))),
    "in a list": ("list", lambda x: x.__setitem__(0, variable(5.0))),
    "ordered": ("ordered", lambda x: x.update(c=variable(5.0))),
    "of a State": ("State", lambda x: setattr(x, "b", variable(5.0))),
    "of a view of a State": ("State", exchange_view),
    "deleted of a State": ("State", lambda x: delattr(x, "b")),
    "of a State in a list": ("State in a list", lambda x: x[0].update(a=variable(5.0))),
    "of a dict in a State": ("dict in a State", lambda x: x["a"][0].update(x=variable(5.0))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_foreign_container_is_seen(name):
    """By a jitted function that was compiled before, also if the change leaves the structure as it was."""

    def values(model):
        return [x.value for x in jax.tree.leaves(model.pair.left, is_leaf=lambda x: isinstance(x, nnx.Variable))]

    jitted = nnx.jit(values)
    container, change = CHANGES[name]
    model = held(CONTAINERS[container]())
    for _ in range(3):
        jitted(model)
    change(model.pair.left)
    for _ in range(3):
        assert jitted(model) == values(model)


def test_writing_another_state_does_not_walk_the_model_again():
    model, other = held(CONTAINERS["State"]()), nnx.State({"a": 1})
    table = table_of(model)
    other.a = 2
    assert table_of(model) is table
    assert table.stamp.valid
    model.pair.left.b = variable(2.0)
    assert table_of(model) is not table


def test_a_static_attribute_beside_a_foreign_container():
    """It may be toggled; what the container holds is still seen."""
    model = held(CONTAINERS["dict"]())
    first = table_of(model).layout
    for _ in range(2):
        model.flag = True
        assert table_of(model).layout is not first
        del model.flag
        assert table_of(model).layout is first
    model.pair.left["c"] = variable()
    assert table_of(model).layout is not first


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    x: Any


def test_a_change_of_another_mutable_pytree_is_seen():
    """What is in a dataclass is compared at each call, as that is flattened."""
    model = held(Box(variable()))
    table = table_of(model)
    double = nnx.jit(lambda model: model.pair.left.x * 2)
    double(model)
    assert table_of(model) is table
    model.pair.left.x = variable(4.0)
    assert double(model) == 8.0
    model.pair.left.x = 3
    assert double(model) == 6


def array(value=1.0):
    return jnp.asarray(value)


ARRAYS = {
    "tuple": lambda: (array(), array(2.0)),
    "named tuple": lambda: Pair(array(), array(2.0)),
    "with a static value": lambda: (array(), "x", None, array(2.0)),
    "dict": lambda: nnx.data({"a": array(), "b": array(2.0)}),
    "list in a dict": lambda: nnx.data({"a": [array()], "b": array(2.0)}),
    "list": lambda: nnx.data([array(), array(2.0)]),
    "dataclass": lambda: nnx.data(Box((array(), array(2.0)))),
    "State": lambda: nnx.State({"a": {"c": array()}, "b": array(2.0)}),
    "beside a Variable": lambda: (array(), variable(), array(2.0)),
    "optimizer state": lambda: nnx.data(optax.adam(0.1).init(array())),
}


def with_arrays(name, size=1):
    model = nnx.Module()
    model.before, model.arrays = jnp.ones(1), ARRAYS[name]()
    model.layers = nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(0)) for _ in range(size)])
    return model


def is_variable(x):
    return isinstance(x, nnx.Variable)


def arrays_of(model):
    leaves = jax.tree.leaves(model.arrays, is_leaf=is_variable)
    return [x for x in leaves if isinstance(x, jax.Array)]


@pytest.mark.parametrize("name", ARRAYS)
def test_a_model_with_arrays_in_a_pytree_is_walked_once(name):
    """Its arrays are those that it holds now, also after a jitted function has set them."""
    model = with_arrays(name)
    table = table_of(model)
    assert table.reliable

    @nnx.jit
    def add(model):
        total = sum(arrays_of(model))
        model.arrays = jax.tree.map(
            lambda x: x + 1 if isinstance(x, jax.Array) else x, model.arrays, is_leaf=is_variable
        )
        return total

    expected = sum(arrays_of(model))
    for _ in range(6):
        assert add(model) == expected
        assert table_of(model) is table
        assert all(a is b for a, b in zip(table.leaves(), pack(model).leaves, strict=True))
        expected += len(arrays_of(model))
    assert add._cache_size() == 1


@pytest.mark.parametrize("name", ARRAYS)
def test_calls_with_arrays_in_a_pytree_do_not_depend_on_the_size_of_the_model(name, unchecked):
    """Nothing is walked."""
    counts = []
    for size in (3, 300):
        model, read = with_arrays(name, size), nnx.jit(lambda model: sum(arrays_of(model)))
        for _ in range(20):
            read(model)
        counts.append(count_calls(lambda model=model, read=read: read(model)))
    assert counts[0] == counts[1]


ARRAY_CHANGES = {
    "an item": ("dict", lambda m: m.arrays.update(a=array(7.0))),
    "of another shape": ("dict", lambda m: m.arrays.update(a=jnp.full(3, 7.0))),
    "of another dtype": ("dict", lambda m: m.arrays.update(a=jnp.array(7))),
    "a static value": ("dict", lambda m: m.arrays.update(a=7.0)),
    "a Variable": ("dict", lambda m: m.arrays.update(a=variable(7.0))),
    "a new item": ("dict", lambda m: m.arrays.update(c=array(7.0))),
    "an item less": ("dict", lambda m: m.arrays.pop("b")),
    "another name": ("dict", lambda m: m.arrays.update(c=m.arrays.pop("b"))),
    "another container": ("tuple", lambda m: setattr(m, "arrays", nnx.data([array(3.0), array(4.0)]))),
    "another tuple": ("tuple", lambda m: setattr(m, "arrays", (array(3.0), array(4.0)))),
    "a longer tuple": ("tuple", lambda m: setattr(m, "arrays", (array(3.0), array(4.0), array(5.0)))),
    "another class": ("tuple", lambda m: setattr(m, "arrays", Pair(array(3.0), array(4.0)))),
    "no arrays": ("tuple", lambda m: setattr(m, "arrays", ("x", "y"))),
    "a static value beside": ("with a static value", lambda m: setattr(m, "arrays", (array(), "y", None, array(2.0)))),
    "below": ("list in a dict", lambda m: m.arrays["a"].__setitem__(0, array(7.0))),
    "one more below": ("list in a dict", lambda m: m.arrays["a"].append(array(7.0))),
    "in a dataclass": ("dataclass", lambda m: setattr(m.arrays, "x", (array(7.0), array(8.0)))),
    "otherwise in a dataclass": ("dataclass", lambda m: setattr(m.arrays, "x", [array(7.0), "z"])),
    "in a State": ("State", lambda m: setattr(m.arrays, "b", array(7.0))),
    "the Variable": ("beside a Variable", lambda m: setattr(m, "arrays", (array(), variable(9.0), array(2.0)))),
    "through vars": ("tuple", lambda m: vars(m.layers[0]).update(x=m.arrays)),
    "shared": ("tuple", lambda m: setattr(m.layers[0], "x", m.arrays)),
    "deleted": ("tuple", lambda m: (delattr(m, "arrays"), setattr(m, "arrays", ()))),
}


@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("name", ARRAY_CHANGES)
def test_a_change_of_arrays_in_a_pytree_is_seen(name, written):
    """Call, change, call again and compare with eager; also if the function has put another pytree in its place."""

    def values(model):
        leaves = jax.tree.leaves((model.arrays, vars(model.layers[0]).get("x")))
        if written and leaves:
            model.arrays = jax.tree.map(lambda x: x * 2 if isinstance(x, jax.Array) else x, model.arrays)
        return [len(x) if isinstance(x, str) else x for x in leaves]

    jitted = nnx.jit(values)
    container, change = ARRAY_CHANGES[name]
    model, plain = with_arrays(container), with_arrays(container)
    for edit in (lambda m: None, change, change if "less" not in name and "name" not in name else lambda m: None):
        edit(model)
        edit(plain)
        for _ in range(3):
            found, expected = jitted(model), values(plain)
            assert len(found) == len(expected)
            assert all(map(np.array_equal, found, expected))
            assert table_of(model).layout is pack(model).layout


def test_a_pytree_that_cannot_be_flattened_any_more_is_an_error():
    """That of JAX, at each call, until it is mended."""
    model = with_arrays("dict")
    jitted = nnx.jit(lambda model: model.arrays["b"])
    for _ in range(3):
        jitted(model)
    model.arrays[1] = array(3.0)  # JAX cannot sort the keys
    for _ in range(2):
        with pytest.raises(ValueError, match="keys"):
            jitted(model)
    del model.arrays[1]
    assert jitted(model) == 2.0


class Bare(Exception):
    __hash__ = None  # type: ignore[assignment]


def test_a_static_value_that_cannot_be_compared_any_more_is_an_error_by_path():
    model = nnx.Module()
    model.box = Box((array(), types.SimpleNamespace(a=1)))
    read = nnx.jit(lambda model: model.box.x[0])
    for _ in range(5):  # the next use is not one at which the model is walked anyway
        read(model)
    model.box.x = (array(), types.SimpleNamespace(a=Bare()))
    with pytest.raises(StaticValueError, match=r"box"):
        read(model)


def test_a_model_with_arrays_in_a_pytree_is_freed_at_once():
    model = with_arrays("beside a Variable")
    model.me = (model, array())
    nnx.jit(lambda m: m.arrays[0])(model)
    reference = weakref.ref(model)
    model.me = None
    del model
    assert reference() is None


def test_raw_jax_sees_a_change_too():
    model = held(CONTAINERS["dict"]())
    assert len(jax.tree.leaves(model)) == 2
    model.pair.left["c"] = variable()
    assert len(jax.tree.leaves(model)) == 3
    model.pair.left["c"] = model.pair.left["a"]
    assert len(jax.tree.leaves(model)) == 2
