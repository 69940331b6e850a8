"""Static values that can be changed in place: every change is found, and what has not changed is cheap."""

import collections
import dataclasses
import enum
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.editable import Editable, have_changed
from nnxlib.core.static import Const


@dataclasses.dataclass
class Config:
    sizes: list
    rate: float = 0.5
    other: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: float = 0.5
    sizes: list = dataclasses.field(default_factory=lambda: [1], hash=False)


class Slots:
    __slots__ = ("a", "b")
    __hash__ = None

    def __init__(self, a):
        self.a = a


class ByValue:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is ByValue and self.x == other.x

    def __hash__(self):
        return hash(self.x)


class SubList(list):
    pass


class Colour(enum.Enum):
    RED = 1


def function(x, y=(1, [2])):
    return x


def another(x, y=(1, [2])):
    return x + 1


def put(container, key, value):
    container[key] = value


def set_attribute(x, name, value):
    object.__setattr__(x, name, value)


# Each value, with edits; after some of them it is what it was.
VALUES = {
    "list": (
        lambda: [1, [2, "a"], (3, [4])],
        [lambda x: x[1].append(1), lambda x: x[1].pop(), lambda x: put(x, 0, True)],
    ),
    "in a tuple": (lambda: [1, (3, [4])], [lambda x: x[1][1].append(5), lambda x: x[1][1].clear()]),
    "set": (lambda: {1, "a"}, [lambda x: x.add(2), lambda x: x.discard(2), lambda x: x.discard("a")]),
    "deque": (lambda: collections.deque([1, 2], 3), [lambda x: x.rotate(), lambda x: x.rotate(), lambda x: x.pop()]),
    "dict": (
        lambda: {"a": 1, "b": [2]},
        [lambda x: put(x, "a", 1.0), lambda x: put(x, "b", [2]), lambda x: x.pop("a")],
    ),
    "order": (lambda: {"a": 1, "b": 2}, [lambda x: put(x, "a", x.pop("a"))]),
    "Counter": (lambda: collections.Counter("aab"), [lambda x: x.update("b"), lambda x: x.subtract("b")]),
    "defaultdict": (
        lambda: collections.defaultdict(list, a=[1]),
        [lambda x: x["b"], lambda x: x.pop("b"), lambda x: setattr(x, "default_factory", dict)],
    ),
    "dataclass": (
        lambda: Config([1, 2], other=Colour.RED),
        [
            lambda x: setattr(x, "rate", 0.25),
            lambda x: setattr(x, "rate", 0.5),
            lambda x: setattr(x, "more", 1),
            lambda x: delattr(x, "more"),
            lambda x: set_attribute(x, "__class__", type("Other", (Config,), {})),
        ],
    ),
    "frozen": (lambda: [Frozen()], [lambda x: x[0].sizes.append(2), lambda x: set_attribute(x[0], "rate", 1.0)]),
    "namespace": (lambda: types.SimpleNamespace(a=[1]), [lambda x: x.a.append(1), lambda x: setattr(x, "b", 1)]),
    "slots": (lambda: Slots([1]), [lambda x: x.a.append(1), lambda x: setattr(x, "b", None)]),
    "by value": (lambda: [ByValue(1)], [lambda x: setattr(x[0], "x", 2), lambda x: setattr(x[0], "x", 1)]),
    "subclass": (lambda: [SubList([1])], [lambda x: x[0].append(1), lambda x: setattr(x[0], "name", "a")]),
    "nnx.Dict": (
        lambda: [nnx.Dict(a=nnx.List([1]), b=nnx.Dict())],
        [lambda x: x[0].a.append(1), lambda x: x[0].a.pop(), lambda x: setattr(x[0].a, "c", 1)],
    ),
    "opaque": (
        lambda: Config([], other=nnx.Rngs(0)),
        [lambda x: setattr(x.other, "a", 1), lambda x: x.sizes.append(1)],
    ),
    "bytearray": (lambda: [bytearray(b"a")], [lambda x: x[0].append(1), lambda x: x[0].pop()]),
    "array": (lambda: Config([1], other=np.ones(2)), [lambda x: x.other.fill(0), lambda x: x.sizes.append(1)]),
    "row of an array": (
        lambda: [np.zeros(2, [("a", "i4")])[0]],
        [lambda x: put(x[0], "a", 1), lambda x: put(x[0], "a", 0)],
    ),
    "jax.Array": (lambda: Config([], other=jnp.ones(2)), [lambda x: setattr(x, "other", jnp.ones(2))]),
    "view": (
        lambda: Config([], other=types.MappingProxyType({"a": [1]})),
        [lambda x: x.other["a"].append(1), lambda x: x.other["a"].pop()],
    ),
    "function": (
        lambda: [types.FunctionType(function.__code__, globals(), "f", ((1, [2]),))],
        [
            lambda x: x[0].__defaults__[0][1].append(3),
            lambda x: x[0].__defaults__[0][1].pop(),
            lambda x: setattr(x[0], "__code__", another.__code__),
            lambda x: setattr(x[0], "note", 1),
        ],
    ),
    "partial": (
        lambda: [functools.partial(function, 1, y=[2])],
        [lambda x: x[0].keywords["y"].append(1), lambda x: put(x[0].keywords, "z", 1)],
    ),
    "functions in a dataclass": (
        lambda: Config([], other=jax.nn.gelu),
        [lambda x: x.sizes.append(function), lambda x: x.sizes.pop()],
    ),
}


@pytest.mark.parametrize(("make", "edits"), VALUES.values(), ids=VALUES)
def test_it_has_changed_if_its_key_has(make, edits):
    value = make()
    const = Const.of(value)
    editable = Editable(value, const)
    answers = set()
    for edit in (lambda x: None, *edits):
        edit(value)
        for _ in range(3):
            answers.add(found := editable.is_unchanged())
            assert found == (Const.of(value) == const)
    assert answers == {True, False}


def test_what_contains_itself_has_changed():
    value = [1]
    editable = Editable(value, Const.of(value))
    assert editable.is_unchanged()
    value.append(value)
    assert not editable.is_unchanged()
    assert have_changed([editable])
    assert not have_changed([])


@pytest.mark.parametrize("kind", [list, set, collections.deque, collections.Counter, dict.fromkeys])
def test_its_size_costs_no_calls(kind):
    counts = []
    for size in (10, 1000):
        value = Config([1], other=kind(map(str, range(size))))
        editable = Editable(value, Const.of(value))
        assert editable.is_unchanged()
        counts.append(count_calls(editable.is_unchanged))
    assert counts[0] == counts[1] < 30


def test_a_model_with_a_large_vocabulary(unchecked):
    """Its step costs as many calls as with a small one, and sees when a word is added."""

    class Model(nnx.Module):
        def __init__(self, words):
            self.words, self.scale = set(words), nnx.Param(jnp.ones(()))

        def __call__(self, x):
            return self.scale * x * len(self.words)

    counts = []
    for size in (10, 1000):
        model, call = Model(map(str, range(size))), nnx.jit(lambda m, x: m(x))
        for _ in range(9):
            assert call(model, 1.0) == size
        counts.append(count_calls(lambda: call(model, 1.0)))  # noqa: B023
        model.words.add("another")
        assert call(model, 1.0) == size + 1
    assert counts[0] == counts[1] < 60


def test_a_model_with_settings_that_can_be_edited_has_a_shortcut(unchecked):
    """They are compared at each call, together with edits of attributes and of what several models share."""

    class Model(nnx.Module):
        def __init__(self, config):
            self.config, self.scale, self.factor = config, nnx.Param(jnp.ones(())), 1

        def __call__(self, x):
            return self.scale * x * self.config.rate * self.factor * len(self.config.sizes)

    config = Config([1, 2])
    a, b, call = Model(config), Model(config), nnx.jit(lambda a, b, x: a(x) + 10 * b(x))
    traces = []

    def check(calls=4):
        for _ in range(calls):
            assert call(a, b, 1.0) == a(1.0) + 10 * b(1.0)
        traces.append(call._cache_size())

    check(9)
    assert a._nnx_table.shortcuts
    assert b._nnx_table.shortcuts
    assert count_calls(lambda: call(a, b, 1.0)) < 60
    for edit in (
        lambda: config.sizes.append(3),
        lambda: setattr(config, "rate", 0.25),
        lambda: setattr(a, "factor", 2),
        lambda: (setattr(b, "factor", 3), config.sizes.pop()),
        lambda: (setattr(b, "factor", 1), setattr(config, "rate", 0.5)),
        lambda: setattr(b, "config", Config([1])),
        lambda: b.config.sizes.append(2),
        lambda: setattr(a, "factor", 1),
    ):
        edit()
        check()
    assert traces[-1] == traces[-2]  # a structure that was known
