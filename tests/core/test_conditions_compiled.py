"""The code that makes all look-ups of a jitted function: it says yes only if all is as it was."""

import gc
import types
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.core.conditions import Conditions
from nnxlib.core.references import Reached, search

from .test_conditions import PLACES, Settings, conditions_of


def conditions_for(f, *roots):
    """The conditions that each of these objects is found on the first chain to it, as a jitted function has them."""
    chains = {id(chain.value): chain for chain in reversed(search(f).chains)}
    return Conditions(Reached([], [], set()), roots=[(weakref.ref(root), [chains[id(root)]]) for root in roots])


DATA = 3, 2.5, "other", None, np.ones(2), jnp.ones(3)
OBJECTS = nnx.Dict(), nnx.Param(1.0), Settings(), types.SimpleNamespace()


@pytest.mark.parametrize("kind", PLACES)
@given(st.lists(st.sampled_from(DATA + OBJECTS), max_size=6))
@settings(max_examples=25, deadline=None)
def test_a_constant_may_take_the_place_of_another_and_nothing_else(kind, values):
    """Also of one that has come meanwhile, whose type is noted."""
    f, set_to = PLACES[kind]()
    conditions = conditions_of(f)
    assert conditions.find() == ()
    for value in values:
        set_to(value)
        found = conditions.find()
        assert found == (None if any(value is x for x in OBJECTS) else ())
        assert conditions.find() == found


def in_namespace(source, **names):
    """A function made from source, whose globals are these."""
    namespace = {"__name__": "elsewhere", **names}
    exec(f"def f(): return {source}", namespace)
    return namespace["f"], namespace


def test_names_that_the_code_itself_might_use():
    """Globals that hide builtins, or have a name that is no identifier in ASCII, or one like those in the code."""
    names = {"type": 1, "len": 2.0, "map": None, "_nnx_0": 3, "größe": "x", "compile_conditions": b"y"}
    f, namespace = in_namespace(", ".join(names), **names)
    conditions = conditions_of(f)
    assert len(conditions.ends) == len(names)
    assert conditions.find() == ()
    for name, value in names.items():
        namespace[name] = nnx.Dict()
        assert conditions.find() is None, name
        namespace[name] = value
        assert conditions.find() == ()


def test_a_global_that_is_gone():
    """Also if there is a builtin function of that name."""
    for name in ("rate", "sum"):
        f, namespace = in_namespace(name, **{name: 1.0})
        conditions = conditions_of(f)
        assert conditions.find() == ()
        del namespace[name]
        assert conditions.find() is None


def test_roots_in_their_order():
    first, second, held = nnx.Dict(), nnx.Dict(), {"a": [nnx.Dict()]}
    f = lambda: (second, held["a"][0], first)
    roots = first, held["a"][0], second
    conditions = conditions_for(f, *roots)
    found = conditions.find()
    assert found is not None
    assert len(found) == 3
    assert all(x is root for x, root in zip(found, roots, strict=True))
    held["a"].append(nnx.Dict())
    assert conditions.find() is None
    held["a"].pop()
    assert conditions.find() == roots
    held["a"] = [held["a"][0]]
    assert conditions.find() is None


def test_a_root_that_is_exchanged_or_gone():
    model = nnx.Dict()
    f = lambda: model
    conditions = conditions_for(f, model)
    assert conditions.find() == (model,)
    reference, model = weakref.ref(model), nnx.Dict()
    gc.collect()
    assert reference() is None  # the code keeps no model alive
    assert conditions.find() is None
    model = None
    assert conditions.find() is None


def test_a_jitted_function_that_names_numbers_calls_no_look_up():
    """It runs one compiled function, however many they are."""
    f, namespace = in_namespace("x0 + x1 + x2 + x3", **{f"x{k}": 1.0 for k in range(4)})
    step = nnx.jit(f)
    assert [step().item() for _ in range(3)] == [4.0] * 3
    known, called = step._captures.known, []
    assert known is not None
    compiled = known.conditions.find_or_raise
    known.conditions.find_or_raise = lambda: called.append(1) or compiled()
    assert step().item() == 4.0
    assert called == [1]
    assert step._captures.known is known
