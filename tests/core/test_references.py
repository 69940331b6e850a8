"""The ways from a function to what it refers to, and whether they still lead there."""

import collections
import contextvars
import functools
import threading
import types
import weakref

import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.references import named_in, ways_from

GLOBAL = nnx.Dict(w=nnx.Param(jnp.ones(2)))


def names_a_global(x, default=(1, 2), *, named=GLOBAL):
    return GLOBAL.w * x


def test_a_function_names_its_closure_its_defaults_and_globals():
    local = nnx.Dict()
    found = named_in(lambda: (local, GLOBAL))
    assert any(x is local for x in found)
    assert any(x is GLOBAL for x in found)
    assert any(x is GLOBAL for x in named_in(names_a_global))
    assert named_in(functools.partial(names_a_global)) == []


class Slotted:
    __slots__ = ("m",)


class Settings:
    m = None


module = types.ModuleType("settings")


class Base:
    m = None

    @classmethod
    def step(cls):
        return cls.m


class Derived(Base):
    pass


class Trainer:
    def __init__(self, model):
        self.model = model

    def step(self):
        return self.model


def ways():
    """For each kind of way: a function, and a change after which it leads to another object."""
    old, new = nnx.Dict(), nnx.Dict()
    listed, named, plain, tupled = [old], {"m": old}, types.SimpleNamespace(m=old), ({"m": [old]},)
    trainer = Trainer(old)
    bound = functools.partial(lambda m: m, old)
    queue, slotted = collections.deque([old]), Slotted()
    slotted.m = Settings.m = module.m = Base.m = old  # type: ignore[attr-defined]
    instance, own = Derived(), Derived()
    weak, context, thread = weakref.WeakValueDictionary(m=old), contextvars.ContextVar("context"), threading.local()
    thread.m = old
    context.set(old)

    class Local:
        m = old

    def helper():
        return named["m"]

    def with_attribute():
        return with_attribute.m

    with_attribute.m = old  # type: ignore[attr-defined]

    return {
        "list": (old, lambda: listed[0], lambda: listed.__setitem__(0, new)),
        "list that grows": (old, lambda: listed, lambda: listed.append(new)),
        "list that shrinks": (old, lambda: listed, listed.clear),
        "dict": (old, lambda: named["m"], lambda: named.update(m=new)),
        "plain object": (old, lambda: plain.m, lambda: setattr(plain, "m", new)),
        "nested": (old, lambda: tupled, lambda: tupled[0]["m"].__setitem__(0, new)),
        "method": (old, trainer.step, lambda: setattr(trainer, "model", new)),
        "another function": (old, lambda: helper(), lambda: named.update(m=new)),
        "partial": (old, lambda: bound, None),
        "deque": (old, lambda: queue[-1], lambda: queue.append(new)),
        "slot": (old, lambda: slotted.m, lambda: setattr(slotted, "m", new)),
        "class": (old, lambda: Settings.m, lambda: setattr(Settings, "m", new)),
        "module": (old, lambda: module.m, lambda: setattr(module, "m", new)),
        "class in a closure": (old, lambda: Local.m, lambda: setattr(Local, "m", new)),
        "class method": (old, Base.step, lambda: setattr(Base, "m", new)),
        "class of an object": (old, lambda: instance.m, lambda: setattr(Base, "m", new)),
        "object in front of its class": (old, lambda: own.m, lambda: setattr(own, "m", new)),
        "attribute of a function": (old, with_attribute, lambda: setattr(with_attribute, "m", new)),
        "weak dict": (old, lambda: weak["m"], lambda: weak.update(m=new)),
        "context variable": (old, lambda: context.get(), lambda: context.set(new)),
        "thread local": (old, lambda: thread.m, lambda: setattr(thread, "m", new)),
    }


@pytest.mark.parametrize("kind", ways())
def test_a_way_is_followed_again(kind):
    old, function, change = ways()[kind]
    steps = [step for way in ways_from(function) if way.value is old for step in way.steps(set())]
    assert steps
    assert all(look_up() is before() for look_up, before in steps)
    if change is not None:
        change()
        assert not all(look_up() is before() for look_up, before in steps)


def test_each_step_is_taken_once_however_many_ways_it_is_on():
    """Ten Variables of one level are ten steps, with one to the level, and two to see that both are as long."""
    state = nnx.State({"level": {str(i): nnx.Param(i) for i in range(10)}})
    variables = list(map(id, state["level"].values()))
    known = set()
    steps = [step for way in ways_from(lambda: state) if id(way.value) in variables for step in way.steps(known)]
    assert [look_up() for look_up, _ in steps][:2] == [state["level"]["0"], True]
    assert len(steps) == 10 + 1 + 2 + 2  # and the closure, and the mapping of the State


def test_what_is_sought_is_found_however_much_else_there_is():
    """Without an end that depends on what comes first."""
    held, models = [[object()] for _ in range(2000)], [nnx.Dict()]
    assert not [way for way in ways_from(lambda: (held, [models])) if way.value is models[0]]
    assert [way for way in ways_from(lambda: (held, [models]), models) if way.value is models[0]]


def test_nodes_are_not_looked_into():
    inner = nnx.Dict()
    outer = nnx.Dict(inner=inner)
    assert not [way for way in ways_from(lambda: outer) if way.value is inner]


def test_cycles_end():
    held = []
    held.append(held)
    assert len(ways_from(lambda: held)) < 20


def test_a_cache_may_shrink_while_it_is_looked_into():
    """As one with weak references does when garbage is collected in between."""

    class Shrinking(dict):
        @property
        def get(self):
            self.popitem()
            return super().get

    held = [1]
    cache = Shrinking(a=held, b=2, c=3)
    assert any(way.value is cache for way in ways_from(lambda: cache))
