"""What must hold at the places of a function without a Module: types are compared, values are not."""

import collections
import dataclasses
import gc
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlib as nnx
from nnxlib.core.conditions import Conditions, Members
from nnxlib.core.references import search

place = None


def conditions_of(f, captured=(), functions=()):
    found = search(f)
    given = {id(x) for x in captured}
    others = [chain for chain in found.chains_to_objects() if id(chain.value) not in given]
    return Conditions(found, others, functions=functions)


class Settings:
    inner = None

    def __init__(self):
        self.scale = 1.0


def closure(x):
    def set_to(y):
        nonlocal x
        x = y

    return (lambda: x), set_to


def in_global():
    def set_to(y):
        global place
        place = y

    set_to(None)
    return (lambda: place), set_to


def in_attribute():
    settings = Settings()
    return (lambda: settings.scale), lambda y: setattr(settings, "scale", y)


def in_class():
    local = type("Local", (Settings,), {})
    return (lambda: local.inner), lambda y: setattr(local, "inner", y)


def in_list():
    held = [1.0, "text"]
    return (lambda: held[0]), lambda y: held.__setitem__(0, y)


def in_dict():
    held = {"a": {"b": None}}
    return (lambda: held["a"]["b"]), lambda y: held["a"].__setitem__("b", y)


def in_deque():
    held = collections.deque([None])
    return (lambda: held[0]), lambda y: held.__setitem__(0, y)


PLACES = {
    "closure": lambda: closure(2.0),
    "closure of None": lambda: closure(None),
    "global": in_global,
    "attribute": in_attribute,
    "class": in_class,
    "list": in_list,
    "dict": in_dict,
    "deque": in_deque,
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_module_at_a_place_without_one(kind):
    """Data may come in the place of other data, but no Module, and no Variable; if it goes again, they hold again."""
    f, set_to = PLACES[kind]()
    before = f()
    conditions = conditions_of(f)
    assert conditions
    assert conditions.find() is not None
    for data in (3, "other", None, np.ones(2), jnp.ones(3)):
        set_to(data)
        assert conditions.find() is not None
    for new in (nnx.Dict(), nnx.Param(1.0), Settings()):
        set_to(new)
        assert conditions.find() is None
    set_to(before)
    assert conditions.find() is not None


def test_the_holder_is_replaced():
    held = {"a": [None]}
    conditions = conditions_of(lambda: held["a"][0])
    held["a"] = [None]
    assert conditions.find() is None


def test_the_fields_of_a_frozen_dataclass_are_not_compared():
    """Only that it still is the same object."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        width: int = 3
        inner: object = None

    config = Config()
    conditions = conditions_of(lambda: config.width * config.inner)  # type: ignore[operator]
    assert not conditions.members
    assert not conditions.ends
    assert conditions.find() is not None
    config = Config(inner=nnx.Dict())
    assert conditions.find() is None


def test_places_that_the_code_does_not_name_are_not_looked_at():
    settings = Settings()
    conditions = conditions_of(lambda: settings.__class__)
    settings.scale = nnx.Dict()  # type: ignore[assignment]
    assert conditions.find() is None  # the attributes of an object that it may look at are compared together
    other = types.SimpleNamespace(settings=Settings())
    conditions = conditions_of(lambda: other.name)
    other.settings.scale = nnx.Dict()
    assert conditions.find() is not None


def test_a_wrapper_of_ours_adds_no_condition():
    """What it keeps beside the method, such as the name of that, is never replaced by a Module."""

    class Model(nnx.Module):
        def step(self):
            return 1.0

    assert not conditions_of(Model.step)


def test_a_place_that_fails():
    f, _ = closure(1.0)
    conditions = conditions_of(f)
    for cell in f.__closure__ or ():
        del cell.cell_contents
    assert conditions.find() is None


def test_a_module_that_code_imports_and_that_is_not_there_yet(monkeypatch):
    """As an import in a branch that was not taken; it would seem to have changed at each call."""

    def f():
        import not_imported_yet  # type: ignore[import-not-found]

        return not_imported_yet.model

    conditions = conditions_of(f)
    assert conditions.ends
    assert conditions.find() == ()
    module = types.ModuleType("not_imported_yet")
    module.__dict__["model"] = model = nnx.Dict()
    monkeypatch.setitem(sys.modules, "not_imported_yet", module)
    assert conditions.find() is None
    conditions = conditions_of(f, [model])
    assert conditions.find() == ()
    monkeypatch.delitem(sys.modules, "not_imported_yet")
    assert conditions.find() is None


def test_a_slot_that_is_not_set():
    """What the code says of it holds, too, so that nothing is searched anew; a Module may come there."""

    class Slotted:
        __slots__ = ("inner",)

    holder = Slotted()
    conditions = conditions_of(lambda: holder.inner)
    assert conditions.ends
    assert conditions.find() == ()
    holder.inner = nnx.Dict()
    assert conditions.find() is None


def test_they_need_not_refer_to_the_function():
    """Those that are kept on the function itself must not keep it alive, nor the containers in its defaults."""
    gone = []
    for given in (False, True):
        f = lambda x=[None]: x[0]
        conditions = conditions_of(f, functions=[f] if given else ())
        assert conditions
        gone.append((weakref.ref(f), conditions))
        del f
        gc.collect()
    assert [reference() is None for reference, _ in gone] == [False, True]


def test_members_of_which_there_are_many():
    """The types of few are compared, of many only the number."""
    few, many = [1.0] * 100, [1.0] * 101
    members = Members(few), Members(many)
    few[0] = many[0] = nnx.Dict()  # type: ignore[call-overload]
    assert not members[0].are_as_before()
    assert members[1].are_as_before()
    many.pop()
    assert not members[1].are_as_before()


def test_members_that_are_data_may_come_and_go():
    held = {"a": 1.0}
    members = Members(held)
    held["b"], held["c"] = "text", None  # type: ignore[assignment]
    assert members.are_as_before()
    assert members.types == [float, str, type(None)]
    held["d"] = nnx.Dict()  # type: ignore[assignment]
    assert not members.are_as_before()


@pytest.mark.parametrize("loss", [0.5, jnp.ones(()), (1, (0.5, "text"))], ids=["number", "array", "tuple"])
@pytest.mark.parametrize("kind", [list, collections.deque, dict])
def test_a_history_that_grows_calls_no_python_for_each_of_its_members(kind, loss):
    """A trainer appends to it in each step; with 4,000 losses in two lists each step took 1.2 ms."""
    held = kind()
    members, calls = Members(held), []
    for length in (200, 2000):
        held.update(dict.fromkeys(range(length), loss)) if kind is dict else held.extend([loss] * length)
        count = []
        sys.setprofile(lambda frame, event, arg, count=count: count.append(event))
        try:
            assert members.are_as_before()
        finally:
            sys.setprofile(None)
        calls.append(count.count("call"))
    # in Python 3.11 a comprehension is a call; the keys of a dict are not looked at if all are constants
    assert calls[0] == calls[1] < 30


@pytest.mark.parametrize(
    "held",
    [(1, "text"), (jax.nn.relu, 2), ((jax.nn.relu, [1]), (None, max))],
    ids=["constants", "with a function", "nested"],
)
def test_a_tuple_that_stays_is_compared_without_a_call_of_python(held):
    """Also one whose members are no constants: by the code of :mod:`nnxlib.core.conditions` itself."""
    conditions = Conditions(search(lambda: held))
    assert conditions.find() == ()
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        conditions.find()
    finally:
        sys.setprofile(None)
    assert calls.count("call") == 2  # `find` and the code itself


def test_a_module_in_a_tuple_that_is_added_is_seen():
    held = [(1, 0.5)]
    members = Members(held)
    held.append((2, (0.25, None)))  # type: ignore[arg-type]
    assert members.are_as_before()
    held.append((3, (0.25, nnx.Dict())))  # type: ignore[arg-type]
    assert not members.are_as_before()
    shared = ()
    for _ in range(100):
        shared = shared, shared  # type: ignore[assignment]
    held[-1] = shared  # type: ignore[call-overload]
    assert members.are_as_before()


def test_a_step_that_names_a_library_adds_no_condition():
    """Not even one whose module has a `__getattr__`, which refers to old names, as that of optax does."""
    library = types.ModuleType("library")
    exec("old = {'name': 1}\ndef __getattr__(name): return old[name]\ndef loss(x): return x", vars(library))
    assert not conditions_of(lambda x: library.loss(x))
    assert not conditions_of(lambda x: optax.l2_loss(x))
