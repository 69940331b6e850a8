import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
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


def test_other_pytrees_are_walked_each_time():
    """What is in a dataclass may be exchanged unnoticed."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Box:
        x: Any

    model = held(Box(variable()))
    assert not table_of(model).reliable
    double = nnx.jit(lambda model: model.pair.left.x * 2)
    double(model)
    model.pair.left.x = variable(4.0)
    assert double(model) == 8.0


def test_raw_jax_sees_a_change_too():
    model = held(CONTAINERS["dict"]())
    assert len(jax.tree.leaves(model)) == 2
    model.pair.left["c"] = variable()
    assert len(jax.tree.leaves(model)) == 3
    model.pair.left["c"] = model.pair.left["a"]
    assert len(jax.tree.leaves(model)) == 2
