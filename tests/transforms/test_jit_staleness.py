"""A jitted function sees its arguments as they are now: each test calls, changes something, calls again.

The jitted function returns a copy of what it was given, so that its output shows what the compiled program knows of the
model: structure, static values, sharing, types, metadata, values. That must be the live model at each call.
"""

import collections
import concurrent.futures
import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import importlib
import itertools
import operator
import pickle
import sys
import threading
import types
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import identity, stamps
from nnxlib.core.errors import ArgumentError, StaleLayoutError
from nnxlib.core.tables import table_of
from nnxlib.transforms import closure_inputs, dispatch, jit
from tests.properties.compare import assert_no_tracer, assert_same


@dataclasses.dataclass
class Config:
    rate: float = 0.5
    sizes: list = dataclasses.field(default_factory=lambda: [1, 2])


@dataclasses.dataclass(unsafe_hash=True)
class HashedConfig:
    rate: float = 0.5


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    rate: float = 0.5


class PlainConfig:
    rate = 0.5


class Tags(set):
    """A subclass of a built-in type; its instances have attributes."""


class Queue(collections.deque):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    left: object
    right: object


class Layer(nnx.Module):
    def __init__(self, value=1.0):
        self.w = nnx.Param(jnp.full(2, value))

    def __call__(self, x):
        return self.w * x


class OtherLayer(Layer):
    def __call__(self, x):
        return -self.w * x


class Slotted(nnx.Module):
    __slots__ = ("slot",)

    def __init__(self):
        self.slot = 1
        self.plain = 1


class Watching(nnx.Module):
    """Has a `__setattr__` of its own, which goes past that of the library for some names."""

    def __init__(self):
        self.scale, self.hidden = 1, 1

    def __setattr__(self, name, value):
        if name == "hidden":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value * 2 if isinstance(value, int) else value)


class Net(nnx.Module):
    """Everything that a Module can hold and whose changes are noted when they are made: the short way of a call."""

    def __init__(self):
        self.scale = 2
        self.empty = None
        self.first, self.second = Layer(1.0), Layer(2.0)
        self.tied = self.first
        self.layers = [Layer(3.0), Layer(4.0)]
        self.heads = {"a": Layer(5.0), "b": {"deep": [Layer(6.0), 7]}}
        self.options = {"depth": [1, {"x": 1}]}
        self.array = jnp.arange(2.0)
        self.table = np.arange(2.0, dtype=np.float32)
        self.pairs = (Layer(7.0), (Layer(8.0), None))
        self.counted = nnx.data(1)
        self.slotted, self.watching = Slotted(), Watching()
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        self.tree = nnx.Variable({"a": jnp.zeros(1)})
        self.tagged = nnx.Param(jnp.ones(1), tag="t")


class FullNet(Net):
    """What can be changed in place, unseen, and is compared at every call."""

    def __init__(self):
        super().__init__()
        self.arrays = (jnp.zeros(2), 3)
        self.nested = (Layer(7.0), [1, jnp.ones(1)])
        self.tags = {"x", "y"}
        self.special_tags, self.queue = Tags("x"), Queue("x")
        self.config = Config()
        self.hashed = HashedConfig()
        self.space = types.SimpleNamespace(a=1)
        self.function = functools.partial(max, [1, 2])
        self.pair = Pair(jnp.ones(1), nnx.Param(jnp.ones(1), tag="t"))


class WalkedNet(FullNet):
    """The rest: what cannot be compared by itself, so that every call must walk the whole."""

    def __init__(self):
        super().__init__()
        self.listed = nnx.Param(jnp.ones(1), names=["a"])


def look():
    """A jitted function that returns what it sees of its argument."""
    return nnx.jit(lambda m: nnx.clone(m))


def set_type(variable, kind):
    variable.__class__ = kind


CHANGES = {
    "setattr": lambda m: setattr(m, "scale", 3),
    "setattr to an equal value of another type": lambda m: setattr(m, "scale", 2.0),
    "setattr of a new name": lambda m: setattr(m, "added", 1),
    "delattr": lambda m: delattr(m, "scale"),
    "vars": lambda m: vars(m).__setitem__("scale", 3),
    "vars update": lambda m: m.__dict__.update(scale=3, added=4),
    "vars pop": lambda m: vars(m).pop("scale"),
    "vars with a Module": lambda m: m.__dict__.__setitem__("first", Layer(9.0)),
    "None becomes an array": lambda m: setattr(m, "empty", jnp.ones(1)),
    "None becomes a Module": lambda m: setattr(m, "empty", Layer()),
    "None becomes a Variable": lambda m: setattr(m, "empty", nnx.Cache(1.0)),
    "submodule replaced by an equal one": lambda m: setattr(m, "first", Layer(1.0)),
    "submodule of another class": lambda m: setattr(m, "second", OtherLayer()),
    "submodules swapped": lambda m: m.set_attributes(first=m.second, second=m.first),
    "attribute of a submodule": lambda m: setattr(m.second, "name", "x"),
    "class of a submodule": lambda m: setattr(m.second, "__class__", OtherLayer),
    "class of the root": lambda m: setattr(m, "__class__", type("Other", (Net,), {})),
    "sharing introduced": lambda m: setattr(m, "second", m.first),
    "sharing of a Variable introduced": lambda m: setattr(m.second, "w", m.first.w),
    "sharing removed": lambda m: setattr(m, "tied", Layer(1.0)),
    "cycle introduced": lambda m: setattr(m.second, "parent", m),
    "list append": lambda m: m.layers.append(Layer()),
    "list insert": lambda m: m.layers.insert(0, 1),
    "list item": lambda m: m.layers.__setitem__(0, Layer()),
    "list slice": lambda m: m.layers.__setitem__(slice(0, 1), [Layer(), 2]),
    "list delete": lambda m: m.layers.__delitem__(0),
    "list pop": lambda m: m.layers.pop(),
    "list extend": lambda m: m.layers.extend([1, 2]),
    "list +=": lambda m: m.layers.__iadd__([1]),
    "list *=": lambda m: m.layers.__imul__(2),
    "list reverse": lambda m: m.layers.reverse(),
    "list sort": lambda m: m.layers.sort(key=lambda layer: -layer.w[0]),
    "list clear": lambda m: m.layers.clear(),
    "list remove": lambda m: m.layers.remove(m.layers[0]),
    "dict item": lambda m: m.heads.__setitem__("a", Layer()),
    "dict new item": lambda m: m.heads.__setitem__(3, Layer()),
    "dict attribute": lambda m: setattr(m.heads, "c", 1),
    "dict delete": lambda m: m.heads.__delitem__("a"),
    "dict pop": lambda m: m.heads.pop("a"),
    "dict popitem": lambda m: m.heads.popitem(),
    "dict update": lambda m: m.heads.update(a=1),
    "dict |=": lambda m: m.heads.__ior__({"z": 1}),
    "dict setdefault": lambda m: m.heads.setdefault("z", 1),
    "dict clear": lambda m: m.heads.clear(),
    "list in a dict in a dict": lambda m: m.heads["b"]["deep"].append(Layer()),
    "static item of such a list": lambda m: m.heads["b"]["deep"].__setitem__(1, 8),
    "static list in a dict": lambda m: m.options["depth"].append(2),
    "static dict in a list in a dict": lambda m: m.options["depth"][1].update(x=2),
    "array replaced": lambda m: setattr(m, "array", jnp.ones(2)),
    "array of another shape": lambda m: setattr(m, "array", jnp.ones((3, 1))),
    "array of another dtype": lambda m: setattr(m, "array", jnp.arange(2)),
    "array becomes static": lambda m: setattr(m, "array", "none"),
    "array becomes a Variable": lambda m: setattr(m, "array", nnx.Param(m.array)),
    "array becomes NumPy": lambda m: setattr(m, "array", np.ones(2, np.float32)),
    "NumPy array in place": lambda m: m.table.__setitem__(0, 7.0),
    "declared data": lambda m: setattr(m, "counted", 5),
    "declaration": lambda m: setattr(m, "counted", nnx.static(1)),
    "slot": lambda m: setattr(m.slotted, "slot", 2),
    "slot becomes an array": lambda m: setattr(m.slotted, "slot", jnp.ones(1)),
    "slot becomes a Module": lambda m: setattr(m.slotted, "slot", Layer()),
    "slot deleted": lambda m: delattr(m.slotted, "slot"),
    "own __setattr__": lambda m: setattr(m.watching, "scale", 5),
    "own __setattr__ past the library's": lambda m: setattr(m.watching, "hidden", 5),
    "eval": lambda m: m.eval(),
    "value": lambda m: setattr(m.first.w, "value", jnp.zeros(2)),
    "value of another shape": lambda m: setattr(m.first.w, "value", jnp.zeros((3, 1))),
    "value of another dtype": lambda m: setattr(m.first.w, "value", jnp.zeros(2, jnp.bfloat16)),
    "value becomes a number": lambda m: setattr(m.first.w, "value", 1.5),
    "value becomes a pytree": lambda m: setattr(m.first.w, "value", (jnp.zeros(2), jnp.ones(1))),
    "value that is a pytree, in place": lambda m: m.tree.value.__setitem__("b", jnp.ones(2)),
    "Variable replaced": lambda m: setattr(m.first, "w", nnx.Param(jnp.zeros(2))),
    "Variable of another type": lambda m: setattr(m.first, "w", nnx.BatchStat(jnp.ones(2))),
    "type of a Variable": lambda m: set_type(m.first.w, nnx.BatchStat),
    "metadata": lambda m: m.first.w.set_metadata(layer="first"),
    "metadata removed": lambda m: m.tagged.del_metadata("tag"),
    "state of an object": lambda m: m.second.__setstate__(({"w": m.second.w, "name": "x"}, None)),
    "state of a List": lambda m: m.layers.__setstate__(({"name": "x"}, None)),
    "state of a Dict": lambda m: m.heads.__setstate__({("a",): True}),
    "state of a Variable": lambda m: m.tagged.__setstate__((m.tagged.get_raw_value(), {"tag": "s"})),
    "Variable made again": lambda m: m.tagged.__init__(jnp.zeros(2), tag="s"),
    "List made again": lambda m: m.layers.__init__([Layer(), 1]),
    "Dict made again": lambda m: m.heads.__init__(a=1, c=Layer()),
    "popped": lambda m: nnx.pop(m, nnx.BatchStat),
    "updated": lambda m: nnx.update(m, {"first": {"w": jnp.zeros(2)}}),
    "tuple replaced": lambda m: setattr(m, "pairs", (Layer(), 1)),
    "Module in a nested tuple": lambda m: setattr(m.pairs[1][0], "name", "x"),
    "tuple gets an array": lambda m: setattr(m, "pairs", (jnp.ones(1), m.pairs[0])),
}
UNSEEN_CHANGES = {
    "tuple of arrays replaced": lambda m: setattr(m, "arrays", (jnp.ones(2), 3)),
    "static item of such a tuple": lambda m: setattr(m, "arrays", (m.arrays[0], 4)),
    "list in a tuple": lambda m: m.nested[1].append(2),
    "array in a list in a tuple": lambda m: m.nested[1].__setitem__(1, jnp.zeros(3)),
    "Module in a tuple": lambda m: setattr(m.nested[0], "name", "x"),
    "set in place": lambda m: m.tags.add("z"),
    "subclass of set, in place": lambda m: m.special_tags.add("z"),
    "attribute of such a set": lambda m: setattr(m.special_tags, "name", "z"),
    "subclass of deque, in place": lambda m: m.queue.append("z"),
    "dataclass in place": lambda m: setattr(m.config, "rate", 0.1),
    "list in a dataclass in place": lambda m: m.config.sizes.append(3),
    "dataclass with a hash, in place": lambda m: setattr(m.hashed, "rate", 0.1),
    "namespace in place": lambda m: setattr(m.space, "a", 2),
    "argument of a partial in place": lambda m: m.function.args[0].append(3),
    "array in a registered dataclass": lambda m: setattr(m.pair, "left", jnp.zeros(3)),
    "Variable in a registered dataclass": lambda m: setattr(m.pair, "right", nnx.Param(jnp.zeros(3))),
}
WALKED_CHANGES = {"metadata in place": lambda m: m.listed.names.append("b")}
CASES = [
    *[(Net, name) for name in CHANGES],
    *[(FullNet, name) for name in UNSEEN_CHANGES],
    *[(WalkedNet, name) for name in WALKED_CHANGES],
]
CHANGES |= UNSEEN_CHANGES | WALKED_CHANGES
CONCRETE = {"NumPy array in place", "value that is a pytree, in place", "list sort", "class of the root"}
TRACEABLE = [case for case in CASES if case[1] not in CONCRETE]


@pytest.fixture(scope="module")
def seen():
    """One jitted function for all: what it compiled for one model must not show in another."""
    return look()


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_a_change_is_seen(kind, change, seen):
    """After a change of any kind, the compiled function sees the object as it is."""
    m = kind()
    assert_same(seen(m), m)
    assert table_of(m).reliable == (kind is not WalkedNet)
    CHANGES[change](m)
    assert_same(seen(m), m)
    assert_same(seen(m), m)


@pytest.mark.parametrize(("kind", "change"), TRACEABLE)
def test_a_change_inside_is_seen_by_the_next_call(kind, change):
    """The same change, made by a jitted function, leaves what the eager function leaves, and the next call sees it."""
    m, eager = kind(), kind()
    jitted = nnx.jit(lambda m: CHANGES[change](m) and None)
    nnx.jit(lambda m: m.array + 1)(m)  # the structure as it is before is known
    jitted(m)
    CHANGES[change](eager)
    assert_same(m, eager)
    assert_same(nnx.jit(lambda m: nnx.clone(m))(m), eager)


def test_settings_with_one_hash():
    """Python gives -1 and -2 the same hash; programs of them are two."""
    jitted = nnx.jit(lambda m: m.w * m.scale)
    for scale in (-1, -2, -1.0, -2.0):
        m = Layer()
        m.scale = scale
        np.testing.assert_array_equal(jitted(m), m.w * scale)
    settings = nnx.jit(lambda m: m.w * m.scales[0])
    for scales in ((-1,), (-2,), [-1], [-2]):
        m = Layer()
        m.scales = nnx.static(scales)
        np.testing.assert_array_equal(settings(m), m.w * scales[0])


def test_a_dataclass_is_all_its_attributes():
    """Of two models, and of one before and after, a configuration may differ in an attribute that is no field."""
    net, other, jitted = Net(), Net(), nnx.jit(lambda m: m.array * m.config.factor)
    for m, factor in (net, 2.0), (other, 3.0):
        m.config = Config()
        m.config.factor = factor
        np.testing.assert_array_equal(jitted(m), m.array * factor)
    net.config.factor = 4.0
    np.testing.assert_array_equal(jitted(net), net.array * 4)


class Scaled:
    """A callable object, which is no Module, and asks a Module for nothing but a setting."""

    def __init__(self, config):
        self.config = config

    def __call__(self, x):
        return x * self.config.rate


@pytest.mark.parametrize("jitted", [lambda f: nnx.jit(f), lambda f: nnx.jit(lambda x: f(x))], ids=["itself", "closure"])
def test_a_setting_that_a_callable_object_reads_is_seen(jitted):
    """The function does not name the method that is called."""
    config = nnx.Module()
    f = jitted(Scaled(config))
    for config.rate in (2.0, 3.0, 2.0):
        assert f(1.0) == config.rate


asked = types.SimpleNamespace(model=Layer())


class Asking:
    """A callable object whose method refers to a global of its file."""

    def __call__(self, x):
        return x * asked.model.rate


@pytest.mark.parametrize("jitted", [lambda f: nnx.jit(f), lambda f: nnx.jit(lambda x: f(x))], ids=["itself", "closure"])
def test_the_globals_of_a_callable_object_are_those_of_its_method(jitted):
    """They are looked into as those of a function are."""
    f = jitted(Asking())
    for asked.model.rate in (2.0, 3.0, 2.0):
        assert f(1.0) == asked.model.rate


@pytest.mark.parametrize("hold", [lambda layer: functools.partial(Layer.__call__, layer), lambda layer: {layer}])
def test_the_class_of_a_module_in_a_static_value_is_set(hold):
    """It is no part of the value, which holds the same Module, so it is no edit behind the back of the library."""
    m, layer = Net(), Layer()
    m.call = nnx.static(hold(layer))
    f = nnx.jit(lambda m, x: next(iter(m.call))(x) if isinstance(m.call, set) else m.call.args[0](x))
    assert f(m, 2.0).tolist() == [2.0, 2.0]
    layer.__class__ = OtherLayer
    for _ in range(3):
        assert f(m, 2.0).tolist() == [-2.0, -2.0]


@pytest.mark.xfail(reason="an object that is hashed by identity is compared by identity: JAX does the same")
def test_a_plain_object_changed_in_place_is_seen():
    """An attribute of a static object that has neither __eq__ nor __hash__ of its own."""
    m, jitted = Net(), nnx.jit(lambda m: m.array * m.plain.rate)
    m.plain = PlainConfig()
    jitted(m)
    m.plain.rate = 3.0
    np.testing.assert_array_equal(jitted(m), m.array * 3)


TWO = {
    "a shared part": lambda a, b: setattr(b, "second", a.first),
    "a shared Variable": lambda a, b: setattr(b.second, "w", a.first.w),
    "one in the other": lambda a, b: setattr(a, "empty", b),
    "a shared List": lambda a, b: setattr(b, "layers", a.layers),
}


@pytest.mark.parametrize("change", TWO)
def test_sharing_between_two_arguments(change):
    """Sharing introduced between two arguments is seen by the next call, and so is its end."""
    a, b = Net(), Net()
    jitted = nnx.jit(lambda a, b: nnx.clone((a, b)))
    assert_same(jitted(a, b), (a, b))
    before = vars(a).copy(), vars(b).copy()
    TWO[change](a, b)
    assert_same(jitted(a, b), (a, b))
    if change != "a shared Variable":
        vars(a).update(before[0])
        vars(b).update(before[1])
    else:
        b.second.w = nnx.Param(jnp.ones(2))
    assert_same(jitted(a, b), (a, b))


def test_a_write_by_another_thread(seen):
    """A change made by another thread between two calls is seen."""
    m = Net()
    seen(m)
    for change in (lambda: m.layers.append(Layer()), lambda: setattr(m, "scale", 9)):
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()
        assert_same(seen(m), m)


def test_a_write_by_another_thread_while_the_first_call_looks(monkeypatch):
    """A change in the middle of a first call does not file its program under the structure before or after."""
    m, seen, pack = Net(), look(), jit.pack

    def interrupted(arguments):
        m.scale = 3
        return pack(arguments)

    monkeypatch.setattr(jit, "pack", interrupted)
    seen(m)
    monkeypatch.undo()
    m.scale = 2
    assert_same(seen(m), m)
    m.scale = 3
    assert_same(seen(m), m)


def in_another_thread(f):
    thread = threading.Thread(target=f)
    thread.start()
    thread.join()


def test_a_call_by_another_thread_in_the_middle_of_a_write(monkeypatch, unchecked):
    """It may see the old or the new structure; the change after it is seen by all."""
    m, jitted = Layer(), nnx.jit(lambda m: m.scale * m.w)
    for k in (1, 2, 1, 2, 1, 2):  # so that these are known, and the next check is far
        m.scale = k
        jitted(m)

    def ended(held, x):
        stamps.invalidate(held, x)
        in_another_thread(lambda: jitted(m))

    monkeypatch.setattr(identity, "invalidate", ended)
    m.scale = 3
    monkeypatch.undo()
    m.scale = 1
    np.testing.assert_array_equal(jitted(m), m.w)


def test_a_change_of_one_part_while_a_call_patches_another(monkeypatch, unchecked):
    """The note of a change is not lost when the list that it is written to is just being read."""
    m, jitted = nnx.List([Layer(), Layer()]), nnx.jit(lambda m: m[0].scale * m[1].scale * m[0].w)
    m[0].scale = m[1].scale = 1
    for _ in range(5):  # the next check is far
        jitted(m)
    m[0].scale = 2

    def reference(x):
        made = weakref.ref(x)
        in_another_thread(lambda: jitted(m))
        return made

    monkeypatch.setattr(stamps, "weakref", types.SimpleNamespace(ref=reference))
    m[1].scale = 3
    monkeypatch.undo()
    np.testing.assert_array_equal(jitted(m), 6 * m[0].w)


def test_a_change_by_another_thread_while_a_call_runs(monkeypatch, unchecked):
    """The program of a call is not kept for the structure that another thread has given the object, and called with."""
    m, jitted = Layer(), nnx.jit(lambda m: m.scale * m.w)
    m.scale = 1
    jitted(m)
    only_writes_cells = dispatch._only_writes_cells

    def interrupted(*args):
        in_another_thread(lambda: (setattr(m, "scale", 2), table_of(m)))
        return only_writes_cells(*args)

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_only_writes_cells", interrupted)
        jitted(m)  # by an entry, and from now on by a shortcut
    for _ in range(3):
        np.testing.assert_array_equal(jitted(m), 2 * m.w)


def test_another_thread_exchanges_a_variable_while_a_call_runs(monkeypatch, unchecked):
    """What two arguments share is part of the key, too: the sharing that a call began with is not kept."""
    a, b = Layer(), Layer()

    @nnx.jit
    def double(a, b):
        a.w *= 2
        b.w *= 2

    double(a, b)
    only_writes_cells, shared = dispatch._only_writes_cells, nnx.Param(jnp.ones(2))

    def interrupted(*args):
        in_another_thread(lambda: (setattr(a, "w", shared), setattr(b, "w", shared), table_of(a), table_of(b)))
        return only_writes_cells(*args)

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_only_writes_cells", interrupted)
        double(a, b)
    before = shared[...]
    for k in (1, 2, 3):
        double(a, b)
        np.testing.assert_array_equal(shared[...], before * 4**k)


class _Interrupted(list):
    """The changes that a stamp was told of; while one is being added, another thread calls."""

    call = None

    def append(self, x):
        if self.call is not None:
            in_another_thread(self.call)
        super().append(x)


def test_a_change_of_one_part_while_the_change_of_another_is_noted(unchecked):
    """Free-threaded Python may come in between the list and its `append`."""
    m, jitted = nnx.List([Layer(), Layer()]), nnx.jit(lambda m: m[0].scale * m[1].scale * m[0].w)
    m[0].scale = m[1].scale = 1
    jitted(m)
    jitted(m)
    table = table_of(m)
    table.until_check = 100
    changed = table.stamp.changed = _Interrupted()
    m[0].scale = 2
    changed.call = lambda: jitted(m)
    m[1].scale = 3
    changed.call = None
    np.testing.assert_array_equal(jitted(m), 6 * m[0].w)


def test_a_first_call_by_another_thread_while_a_change_is_noted(monkeypatch, unchecked):
    """The stamp that it attaches is not removed with those that were told of the change."""
    m, jitted = Layer(), nnx.jit(lambda m: m.scale * m.w)
    m.scale = 1
    table_of(m)
    threads = []

    def interrupted(x, name, value):
        first = threading.Thread(target=lambda: (object.__setattr__(m, "_nnx_table", None), jitted(m)))
        first.start()
        first.join(0.5)  # it waits for the lock
        threads.append(first)
        object.__setattr__(x, name, value)

    monkeypatch.setattr(identity, "_set", interrupted)
    m.scale = 2
    monkeypatch.undo()
    threads[-1].join()
    jitted(m)
    m.scale = 3
    np.testing.assert_array_equal(jitted(m), 3 * m.w)


def test_a_change_that_is_noted_while_another_thread_has_borrowed_the_object(monkeypatch, unchecked):
    """The stamps of the object, which it does not have meanwhile, are told when it is given back."""
    m, jitted = Layer(), nnx.jit(lambda m: m.scale * m.w)
    for m.scale in (1, 2, 1, 2, 1):
        jitted(m)
    table_of(m).until_check = 100
    written, borrowed = threading.Event(), threading.Event()

    def slowly():
        m.w[...]
        if m._nnx_trace is not None:
            borrowed.set()
            written.wait()  # until the change is noted
        return m.scale * m.w

    def changed(node):  # between the write and the note of it another thread traces
        monkeypatch.undo()
        thread.start()
        borrowed.wait(5)
        node._nnx_changed()
        written.set()

    thread = threading.Thread(target=nnx.jit(slowly))
    monkeypatch.setattr(Layer, "_nnx_changed", changed)
    m.scale = 2
    thread.join()
    np.testing.assert_array_equal(jitted(m), 2 * m.w)


# --- interrupts -----------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """As KeyboardInterrupt, which pytest takes for its own."""


def interrupted(f, at, names):
    """Call `f`, and interrupt it at line number `at` of those that run in the library's functions of these names.

    Returns whether there was such a line.
    """
    left, outer = [at], sys.gettrace()

    def in_frame(frame, event, _):
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                raise Interrupt
        return in_frame

    def in_call(frame, *_):
        library = frame.f_globals.get("__name__", "").startswith("nnxlib.")
        return in_frame if library and frame.f_code.co_name in names else None

    sys.settrace(in_call)
    try:
        f()
    except Interrupt:
        return True
    finally:
        sys.settrace(outer)
    return False


COMMITTING = {"write", "write_cells", "_restructure_node", "_restructure_variable", "_nnx_fill", "_nnx_changed"}
RESTORING = {"_restore", "_nnx_restore", "_nnx_fill", "invalidate"}


@pytest.mark.parametrize("is_captured", [False, True], ids=["argument", "captured"])
@pytest.mark.parametrize("names", [COMMITTING, RESTORING], ids=["committing", "restoring"])
def test_an_interrupt_leaves_no_half_of_a_change(is_captured, names):
    """Wherever it arrives while live objects are written, they are as before the call or as after it."""

    def change(m):
        m.first, m.second = m.second, m.first
        m.scale, m.array, m.first.w.value = m.scale + 1, m.array + 1, m.first.w + 1
        m.layers.append(Layer())
        m.tagged.set_metadata(tag=m.scale)

    after = Net()
    change(after)
    for at in range(3, 1000, 9):
        m = Net()
        jitted = nnx.jit((lambda m=m: change(m)) if is_captured else change)
        call = jitted if is_captured else functools.partial(jitted, m)
        if not interrupted(call, at, names):
            assert_same(m, after)
            break
        assert_no_tracer(m)
        assert_same(m, Net() if m.scale == 2 else after)
        assert_same(nnx.clone(m), m)
    assert at > 12 or (names is RESTORING and not is_captured)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, nnx.clone, lambda m: nnx.merge(*nnx.split(m)), lambda m: pickle.loads(pickle.dumps(m)), copy.copy],
    ids=["deepcopy", "clone", "merge", "pickle", "copy"],
)
@pytest.mark.parametrize("kind", [Net, FullNet, WalkedNet])
def test_copies_and_originals_go_their_own_ways(kind, copied, seen):
    """A copy of a model that has been called is called as what it is, and a change of one is no change of the other."""
    m = kind()
    seen(m)
    other = copied(m)
    assert_same(seen(other), other)
    other.scale = 7
    assert_same(seen(m), m)
    assert_same(seen(other), other)
    m.scale = 8
    m.empty = Layer()
    assert_same(seen(other), other)
    assert_same(seen(m), m)


def test_a_variable_argument_changes():
    """A Variable that is itself an argument: metadata, type and value are those of the present."""
    v, seen = nnx.Param(jnp.ones(2)), look()
    for change in (
        lambda: v.set_metadata(a=1),
        lambda: v.set_metadata(a=[1]),
        lambda: v.a.append(2),
        lambda: set_type(v, nnx.Cache),
        lambda: setattr(v, "value", jnp.zeros(3)),
    ):
        change()
        assert_same(seen(v), v)


def test_changes_at_every_number_of_calls():
    """However often a model was called before, a change is seen: the checks of a cached layout come at 1, 2, 4..."""
    m, jitted = Layer(), nnx.jit(lambda m: m.scale * m.w)
    for calls in range(12):
        m.scale = float(calls)
        for _ in range(calls):
            np.testing.assert_array_equal(jitted(m), m.scale * m.w)


def test_array_attributes_are_read_at_each_call():
    """Arrays held by nodes, lists and dicts are gathered anew at each call, also when the jitted code wrote them."""

    class Holder(nnx.Module):
        def __init__(self):
            self.a, self.list, self.dict = jnp.ones(2), [jnp.ones(1)], {"k": jnp.ones(1)}

    m = Holder()

    @nnx.jit
    def step(m):
        m.a = m.a + 1
        m.list[0] = m.list[0] * 2
        m.dict["k"] = m.dict["k"] * 3

    for _ in range(3):
        step(m)
    assert (m.a.tolist(), m.list[0].tolist(), m.dict["k"].tolist()) == ([4, 4], [8], [27])
    m.a, m.list[0], m.dict["k"] = jnp.zeros(2), jnp.zeros(1), jnp.zeros(1)
    step(m)
    assert (m.a.tolist(), m.list[0].tolist(), m.dict["k"].tolist()) == ([1, 1], [0], [0])


def test_a_write_around_every_check_is_noticed():
    """`object.__setattr__` from outside is found out by the check of a cached layout; the next call is right."""
    m, jitted = Layer(), nnx.jit(lambda m: m.scale * m.w)
    m.scale = 1.0
    jitted(m)
    object.__setattr__(m, "scale", 2.0)
    with pytest.raises(StaleLayoutError, match="setattr"):
        jitted(m)
    np.testing.assert_array_equal(jitted(m), 2 * m.w)


class HashedByRate:
    def __init__(self, rate):
        self.rate = rate

    def __eq__(self, other):
        return isinstance(other, HashedByRate) and self.rate == other.rate

    def __hash__(self):
        return hash(self.rate)


def test_an_edit_of_what_has_a_hash_is_noticed():
    """An edit that Python itself does not show is found out by the check of a cached layout; the next call is right."""
    set_rate = {
        HashedByRate: lambda x, rate: setattr(x, "rate", rate),
        lambda rate: functools.partial(jnp.multiply, x2=rate): lambda x, rate: x.keywords.update(x2=rate),
    }
    for make, edit in set_rate.items():
        m, jitted = Layer(), nnx.jit(lambda m: m.held.keywords["x2"] if hasattr(m.held, "keywords") else m.held.rate)
        m.held = make(2.0)
        assert jitted(m) == 2.0
        edit(m.held, 3.0)
        with pytest.raises(StaleLayoutError, match=r"held: .*\n.*has a hash is to be replaced by another"):
            jitted(m)
        assert jitted(m) == 3.0
        m.held = make(4.0)
        assert jitted(m) == 4.0


def autoreload(old, new, *instances):
    """What IPython's ``%autoreload`` does when a class was edited."""
    for name, method in vars(new).items():
        for attribute in ("__code__", "__defaults__", "__doc__", "__closure__", "__globals__", "__dict__"):
            with contextlib.suppress(AttributeError, TypeError):
                setattr(vars(old)[name], attribute, getattr(method, attribute))
    for x in instances:
        object.__setattr__(x, "__class__", new)


def edited_classes():
    """Two versions of a class."""

    def version(factor):
        class Scaled(Layer):
            def __call__(self, x):
                return factor * self.w * x

        return Scaled

    return version(2.0), version(3.0)


@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("inner", [False, True])
def test_a_class_that_autoreload_has_edited(calls, inner):
    """The class of an object is exchanged behind nnxlib's back: after `clear_cache`, calls run the new code."""
    old, new = edited_classes()
    m, jitted = old(), nnx.jit(lambda m, x: nnx.value_and_grad(lambda m: m(x).sum())(m)[0])
    root = nnx.Sequential(m) if inner else m
    for _ in range(calls):
        assert jitted(root, 1.0) == 4.0
    autoreload(old, new, m)
    jitted.clear_cache()
    assert [float(jitted(root, 1.0)) for _ in range(20)] == [6.0] * 20
    assert type(nnx.clone(m)) is new


def added():  # a global, to which an edited method refers
    return 10.0


def test_a_method_that_autoreload_has_edited_alone():
    """IPython 9 compiles the method, without its class, and puts its code and closure into what the class has."""

    class Scaled(Layer):
        def __call__(self, x):
            return self.w * x

    def edited(self, x):
        return self.w * x + added()

    m, jitted = Scaled(), nnx.jit(lambda m, x: m(x))
    closure = nnx.jit(lambda x: m(x))
    assert jitted(m, 1.0).tolist() == closure(1.0).tolist() == [1.0, 1.0]
    old = vars(Scaled)["__call__"]  # what IPython writes to it past Python's checks makes it this function
    type.__setattr__(Scaled, "__call__", types.FunctionType(edited.__code__, old.__globals__, old.__name__))
    jitted.clear_cache(), closure.clear_cache()
    for w in (2.0, 3.0):
        m.w.value = jnp.full(2, w)
        assert m(1.0).tolist() == jitted(m, 1.0).tolist() == closure(1.0).tolist() == [w + 10, w + 10]


def test_a_class_with_a_method_that_autoreload_had_edited_alone():
    """IPython's `%autoreload` then edits the class, and fails unless the method has as many cells as its successor."""

    def version(factor):
        class Scaled(Layer):
            def __call__(self, x):
                return super().__repr__() and x * self.w * factor

        return Scaled

    def edited(self, x):
        return x * self.w * 10.0

    old = version(1.0)
    method = vars(old)["__call__"]
    free = dict(zip(method.__code__.co_freevars, method.__closure__))
    assert free["__class__"].cell_contents is old  # IPython takes this cell for the `super()` of an edited method
    type.__setattr__(old, "__call__", types.FunctionType(edited.__code__, method.__globals__))
    m, new = old(), version(2.0)
    assert m(1.0).tolist() == [10.0, 10.0]
    autoreload(old, new, m)
    assert m(1.0).tolist() == nnx.jit(lambda m: m(1.0))(m).tolist() == [2.0, 2.0]


def test_a_base_class_that_autoreload_has_edited():
    """A class elsewhere, whose base class was edited, has the new methods, as any Python class has."""
    old, new = edited_classes()

    class Derived(old):
        pass

    m, jitted = Derived(), nnx.jit(lambda m, x: m(x))
    assert jitted(m, 1.0).tolist() == m(1.0).tolist() == [2.0, 2.0]
    autoreload(old, new)
    assert m(1.0).tolist() == [3.0, 3.0]
    jitted.clear_cache()
    assert jitted(m, 1.0).tolist() == [3.0, 3.0]


def test_jax_forgets_all_programs_at_once():
    """``jax.clear_caches()`` does for all jitted functions what their ``clear_cache()`` does."""
    old, new = edited_classes()
    m = old()
    jitted, closure, branch = nnx.jit(lambda m, x: m(x)), nnx.jit(lambda x: m(x)), lambda m, x: m(x)
    calls = [lambda: jitted(m, 1.0), lambda: closure(1.0), lambda: nnx.cond(jnp.array(True), branch, branch, m, 1.0)]
    assert [call().tolist() for call in calls for _ in range(3)] == [[2.0, 2.0]] * 9
    autoreload(old, new)
    jax.clear_caches()
    assert [call().tolist() for call in calls for _ in range(3)] == [[3.0, 3.0]] * 9


def test_explain_tells_classes_of_one_name_apart():
    old, new = edited_classes()
    jitted = nnx.jit(lambda m, x: m(x))
    jitted(old(), 1.0)
    jitted(new(), 1.0)
    assert "args[0]: Scaled became another class Scaled" in str(jitted.explain())


# --- closures -------------------------------------------------------------------------------------------------------


def test_a_closure_sees_what_its_names_refer_to_now():
    """A Module in a closure, as a global, as a default: changed, written, and replaced by another."""
    model, eager = Layer(), Layer()
    jitted = nnx.jit(lambda x: model(x))
    for change in (
        lambda m: setattr(m.w, "value", jnp.zeros(2)),
        lambda m: setattr(m, "w", nnx.Param(jnp.full(2, 3.0))),
        lambda m: setattr(m, "__class__", OtherLayer),
    ):
        np.testing.assert_array_equal(jitted(1.0), eager(1.0))
        change(model)
        change(eager)
        np.testing.assert_array_equal(jitted(1.0), eager(1.0))
    model = Layer(5.0)
    np.testing.assert_array_equal(jitted(1.0), model(1.0))


def test_functions_of_the_same_code_with_other_attributes():
    def scaling(by):
        def scale():
            pass

        scale.by = by
        return scale

    m, jitted = Layer(), nnx.jit(lambda m: m.scaling.by * m.w)
    for by in (1, 2):
        m.scaling = scaling(by)
        np.testing.assert_array_equal(jitted(m), by * m.w)


class Uncomparable:
    """Hashed by identity, and compared item by item, as tensors are."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        raise ValueError("the truth value is ambiguous")


def test_functions_of_the_same_code_with_defaults_that_are_edited():
    """An edit of a list that is a default of one function is none of another one."""

    def function():
        return lambda x, factors=[2.0]: x * factors[0]

    first, second, jitted = Layer(), Layer(), nnx.jit(lambda m, x: m.f(x))
    first.f, second.f = function(), function()
    assert jitted(first, 1.0) == 2.0
    first.f.__defaults__[0][0] = 3.0
    assert jitted(first, 1.0) == 3.0
    assert jitted(second, 1.0) == 2.0
    assert jitted(second, jnp.ones(2)).tolist() == [2.0, 2.0]
    assert jitted(first, jnp.ones(2)).tolist() == [3.0, 3.0]


def test_a_static_value_that_cannot_be_compared_is_replaced_inside():
    m, other, jitted = Layer(), Uncomparable(), nnx.jit(lambda m: setattr(m, "table", other))
    m.table = Uncomparable()
    jitted(m)
    assert m.table is other


@pytest.mark.parametrize("holder", ["dict", "object"])
def test_a_closure_through_a_plain_container(holder):
    """A Module that a closure reaches through a dict or a plain object, replaced there while the old one lives on."""
    first, second = Layer(1.0), Layer(2.0)
    held = {"m": first} if holder == "dict" else types.SimpleNamespace(m=first)
    jitted = nnx.jit((lambda x: held["m"](x)) if holder == "dict" else (lambda x: held.m(x)))
    np.testing.assert_array_equal(jitted(1.0), first(1.0))
    if holder == "dict":
        held["m"] = second
    else:
        held.m = second
    np.testing.assert_array_equal(jitted(1.0), second(1.0))


class Experiment:
    model = None

    @classmethod
    def run(cls, x):
        return cls.model(x)


def test_a_closure_through_a_class():
    """A Module that is an attribute of a class, read from an object or the class, replaced in either of them."""
    first, second, third = Layer(1.0), Layer(2.0), Layer(3.0)
    Experiment.model, experiment = first, Experiment()
    by_object, by_class = nnx.jit(lambda x: experiment.model(x)), nnx.jit(Experiment.run)
    for jitted in (by_object, by_class):
        np.testing.assert_array_equal(jitted(1.0), first(1.0))
    Experiment.model = second
    for jitted in (by_object, by_class):
        np.testing.assert_array_equal(jitted(1.0), second(1.0))
    experiment.model = third
    np.testing.assert_array_equal(by_object(1.0), third(1.0))
    np.testing.assert_array_equal(by_class(1.0), second(1.0))
    reads_a_setting = nnx.jit(lambda: jnp.array(Experiment.model.setting))
    for second.setting in (1, 2):
        assert reads_a_setting() == second.setting


def test_a_closure_over_what_a_class_hides():
    """It is found by ``super()``."""

    class Shown:
        layer = Layer(1.0)

    class Hides(Shown):
        layer = Layer(-1.0)

        def shown(self):
            return super().layer

    held = Hides()
    jitted = nnx.jit(lambda x: held.shown()(x))
    for value in 1.0, 2.0, 3.0:
        Shown.layer, former = Layer(value), Shown.layer
        np.testing.assert_array_equal(jitted(1.0), Shown.layer(1.0))
        assert former is not Shown.layer


def test_a_closure_over_what_each_thread_has_for_itself():
    """A Module in a threading.local: a call of another thread uses the one that is there."""
    local, seen = threading.local(), []
    jitted = nnx.jit(lambda x: local.model(x))

    def use(value):
        local.model = Layer(value)
        seen.append((jitted(1.0), jitted(1.0), local.model(1.0)))

    use(1.0)
    thread = threading.Thread(target=use, args=(2.0,))
    thread.start()
    thread.join()
    seen.append((jitted(1.0), local.model(1.0)))
    for found, *others in seen:
        for other in others:
            np.testing.assert_array_equal(found, other)


def test_a_closure_over_what_another_context_lacks():
    """A way that leads nowhere in the context of a call is no error: the function may have another one."""
    variable, first, second = contextvars.ContextVar("variable"), Layer(1.0), Layer(2.0)
    jitted = nnx.jit(lambda x: variable.get(second)(x))
    variable.set(first)
    np.testing.assert_array_equal(jitted(1.0), first(1.0))
    np.testing.assert_array_equal(contextvars.Context().run(jitted, 1.0), second(1.0))


def test_a_closure_over_weak_references():
    """A Module behind a weak reference, a weak dict or a proxy: its present weights, and the one that is there now."""
    model, other = Layer(1.0), Layer(2.0)
    reference, cache, proxy = weakref.ref(model), weakref.WeakValueDictionary(m=model), weakref.proxy(model)
    for jitted in map(nnx.jit, (lambda x: reference()(x), lambda x: cache["m"](x), lambda x: proxy(x))):
        np.testing.assert_array_equal(jitted(1.0), model(1.0))
        model.w.value *= 2
        np.testing.assert_array_equal(jitted(1.0), model(1.0))
    jitted = nnx.jit(lambda x: cache["m"](x))
    np.testing.assert_array_equal(jitted(1.0), model(1.0))
    cache["m"] = other
    np.testing.assert_array_equal(jitted(1.0), other(1.0))


def test_a_closure_with_several_ways_to_a_module():
    """The way that the function goes need not be the shortest."""
    trainer = types.SimpleNamespace(models=[Layer(1.0), Layer(2.0)], state=types.SimpleNamespace())
    trainer.state.model = trainer.models[0]
    jitted = nnx.jit(lambda x: trainer.state.model(x))
    for model in trainer.models:
        trainer.state.model = model
        np.testing.assert_array_equal(jitted(1.0), trainer.state.model(1.0))


TWICE = {
    "namespace": (lambda m: types.SimpleNamespace(m=m), lambda held: held.m),
    "dict": (lambda m: {"m": m}, lambda held: held["m"]),
    "list": (lambda m: [m], lambda held: held[0]),
    "function": (lambda m: lambda: m, lambda held: held()),
}


@pytest.mark.parametrize("kind", TWICE)
@pytest.mark.parametrize("use", [lambda m, x: m(x), lambda m, x: x * m.rate], ids=["call", "setting"])
def test_a_closure_over_a_container_that_is_found_twice(kind, use):
    """The function goes along the second way, where another container is put."""
    make, get = TWICE[kind]
    first = make(Layer(1.0))
    trainer = types.SimpleNamespace(best=first, current=first)
    jitted = nnx.jit(lambda x: use(get(trainer.current), x))
    for value in 1.0, 2.0, 3.0:
        for held in first, make(Layer(value)):
            trainer.current = held
            get(held).rate = value
            np.testing.assert_array_equal(jitted(1.0), use(get(held), 1.0))


def test_a_closure_over_a_plain_list_that_grows():
    """A Module appended to a plain list that the function iterates over."""
    layers = [Layer(1.0)]
    jitted = nnx.jit(lambda x: sum(layer(x) for layer in layers))
    jitted(1.0)
    layers.append(Layer(2.0))
    np.testing.assert_array_equal(jitted(1.0), jnp.full(2, 3.0))


def test_a_function_comes_and_goes_in_a_plain_list_beside_a_module():
    """What was compiled for the list as it was serves again."""
    layers, traces, double = [Layer(1.0)], [], lambda x: 2 * x

    @nnx.jit
    def folded(x):
        traces.append(1)
        for layer in layers:
            x = layer(x)
        return x

    folded(1.0)
    traces.clear()
    for _ in range(2):
        layers.append(double)
        np.testing.assert_array_equal(folded(1.0), jnp.full(2, 2.0))
        layers.pop()
        np.testing.assert_array_equal(folded(1.0), jnp.full(2, 1.0))
    assert len(traces) == 2  # abandoned, kept


class Key(enum.Enum):
    FIRST = 1
    SECOND = 2


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, lambda items: collections.UserDict(dict(items))])
@pytest.mark.parametrize(
    "keys",
    ["ab", range(2), [("a", 0), ("a", 1)], Key, [None, b"a"]],
    ids=["text", "integers", "tuples", "enum", "others"],
)
def test_a_closure_over_a_dict_that_is_put_in_another_order(kind, keys):
    """The function goes over its values; numbers in it may come, go and move, as before."""
    first, second = keys
    layers, traces = kind([(first, Layer(1.0)), ("rate", 2.0), (second, Layer(2.0))]), []

    @nnx.jit
    def folded(x):
        traces.append(1)
        for layer in layers.values():
            x = layer(x) + 1 if isinstance(layer, Layer) else x
        return x

    for _ in range(2):
        np.testing.assert_array_equal(folded(1.0), jnp.full(2, 5.0))
        layers[first] = layers.pop(first)
        np.testing.assert_array_equal(folded(1.0), jnp.full(2, 4.0))
        layers[second] = layers.pop(second)
    layers["rate"] = layers.pop("rate")
    np.testing.assert_array_equal(folded(1.0), jnp.full(2, 5.0))
    layers["step"] = 1
    np.testing.assert_array_equal(folded(1.0), jnp.full(2, 5.0))
    assert len(traces) == 2


def test_a_closure_over_a_view_of_a_dict_that_grows():
    """A read-only view, which shows what is done to the dict elsewhere."""
    registry = {"a": Layer(1.0)}
    layers = types.MappingProxyType(registry)
    jitted = nnx.jit(lambda x, layers=layers: sum(layer(x) for layer in layers.values()))
    np.testing.assert_array_equal(jitted(1.0), jnp.full(2, 1.0))
    registry["b"] = Layer(2.0)
    np.testing.assert_array_equal(jitted(1.0), jnp.full(2, 3.0))
    del registry["a"]
    np.testing.assert_array_equal(jitted(1.0), jnp.full(2, 2.0))


def nothing_yet():
    """Places without a Module: what a function makes of what is there, and how a Module comes, and goes."""
    cell = None
    plain, slotted, listed, keyed, several = PlainTrainer(), SlottedTrainer(), [], {}, [2.0]
    user, weak, context = (
        collections.UserDict(),
        weakref.WeakValueDictionary(),
        contextvars.ContextVar("m", default=None),
    )

    def to_cell(m):
        nonlocal cell
        cell = m

    def to_list(m):
        listed[:] = [] if m is None else [m]

    def to_late(m):
        vars(plain).pop("late", None)
        if m is not None:
            plain.late = m

    def to_weak(m):
        weak.clear()
        if m is not None:
            weak["m"] = m

    def by_default(x, held=several):
        return x if isinstance(held[0], float) else held[0](x)

    return {
        "cell of a closure": (lambda x: use(cell, x), to_cell),
        "global": (lambda x: use(GLOBAL_LAYER, x), lambda m: globals().update(GLOBAL_LAYER=m)),
        "global of another function": (lambda x: use_global(x), lambda m: globals().update(GLOBAL_LAYER=m)),
        "attribute": (lambda x: use(plain.model, x), lambda m: setattr(plain, "model", m)),
        "attribute in a method": (plain.loss, lambda m: setattr(plain, "model", m)),
        "attribute that is absent": (lambda x: use(plain.late, x) if hasattr(plain, "late") else x, to_late),
        "attribute with a default": (lambda x: use(getattr(plain, "late", None), x), to_late),
        "slot": (lambda x: use(slotted.model, x), lambda m: setattr(slotted, "model", m)),
        "attribute of a class": (lambda x: use(PlainTrainer.best, x), lambda m: setattr(PlainTrainer, "best", m)),
        "the same by an object": (lambda x: use(plain.best, x), lambda m: setattr(PlainTrainer, "best", m)),
        "empty list": (lambda x: sum((layer(x) for layer in listed), x), to_list),
        "another list": (
            lambda x: sum((m(x) for m in plain.models), x),
            lambda m: setattr(plain, "models", [m] if m else []),
        ),
        "empty dict": (lambda x: use(keyed.get("m"), x), lambda m: keyed.update(m=m)),
        "number in a list": (by_default, lambda m: several.__setitem__(0, m or 2.0)),
        "user dict": (lambda x: use(user.get("m"), x), lambda m: user.update(m=m)),
        "weak dict": (lambda x: use(weak.get("m"), x), to_weak),
        "context variable": (lambda x: use(context.get(), x), lambda m: context.set(m)),
    }


class PlainTrainer:
    best = None

    def __init__(self):
        self.model, self.models = None, []

    def loss(self, x):
        return use(self.model, x)


class SlottedTrainer:
    __slots__ = ("model",)

    def __init__(self):
        self.model = None


GLOBAL_LAYER = None


def use(m, x):
    return x if m is None else m(x)


def use_global(x):
    return use(GLOBAL_LAYER, x)


PAIR: tuple = (None, 1)


class WithRate(NamedTuple):
    model: Any
    rate: float = 0.5


def no_tuple_yet():
    """Places with a tuple, or frozenset, without a Module, where one with a Module comes."""
    cell: tuple = (None, "text")
    plain, listed, keyed = PlainTrainer(), [(0.5, None)], {"m": (None,), "n": 1}

    def to_cell(m):
        nonlocal cell
        cell = (m, "text")

    def to_first(m):
        PlainTrainer.best = None if m is None else (m, m)  # type: ignore[assignment]

    def all_of(held, x):
        return sum((m(x) for m in held if m is not None), x)

    return {
        "tuple in a closure": (lambda x: use(cell[0], x), to_cell),
        "tuple in globals": (lambda x: use(PAIR[0], x), lambda m: globals().update(PAIR=(m, 1))),
        "tuple in a tuple": (
            lambda x: use(PAIR[0] and PAIR[0][0], x),
            lambda m: globals().update(PAIR=((m, (2,)), 1)),
        ),
        "named tuple": (lambda x: use(plain.model.model, x), lambda m: setattr(plain, "model", WithRate(m))),
        "tuple with a function": (
            lambda x: use(plain.models[0], x),
            lambda m: setattr(plain, "models", (m, jax.nn.relu)),
        ),
        "tuple with a list": (
            lambda x: all_of(plain.models[1], x),
            lambda m: setattr(plain, "models", (jax.nn.relu, [m] if m else [])),
        ),
        "empty tuple": (lambda x: all_of(plain.models, x), lambda m: setattr(plain, "models", (m,) if m else ())),
        "frozenset": (lambda x: all_of(plain.models, x), lambda m: setattr(plain, "models", frozenset([m]))),
        "tuple in a list": (lambda x: use(listed[0][1], x), lambda m: listed.__setitem__(0, (0.5, m))),
        "tuple in a dict": (lambda x: use(keyed["m"][0], x), lambda m: keyed.update(m=(m,))),
        "tuple for None in a class": (lambda x: all_of(PlainTrainer.best or (), x), to_first),
    }


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another Module"])
@pytest.mark.parametrize("place", [*nothing_yet(), *no_tuple_yet()])
def test_a_module_that_comes_where_there_was_none(place, beside):
    """It is used at the next call, as in plain Python, and so are its new weights, until it goes again."""
    f, put = {**nothing_yet(), **no_tuple_yet()}[place]
    other = Layer(10.0)
    g = (lambda x: f(x) + other(x)) if beside else f
    jitted = nnx.jit(g)
    first, second = Layer(3.0), Layer(4.0)
    put(None)
    for m in (None, first, None, second, first):
        put(m)
        for value in (5.0, 6.0):
            first.w.value = jnp.full(2, value)
            np.testing.assert_array_equal(jitted(1.0), g(1.0))
    put(None)


@pytest.mark.parametrize("kind", [list, collections.deque, dict])
def test_a_tuple_that_was_added_later_is_replaced(kind):
    """A container that grows by tuples of numbers needs no new trace; one with a Module in the place of any does."""
    held: Any = kind({0: (0.5, None)} if kind is dict else [(0.5, None)])
    traces = []

    def f(x):
        traces.append(None)
        return sum((m(x) for _, m in (held.values() if kind is dict else held) if m is not None), x)

    def put(k, x):
        if kind is dict or k < len(held):
            held[k] = x
        else:
            held.append(x)

    jitted = nnx.jit(f)
    for k in range(4):
        put(k, (0.25, None))
        assert jitted(1.0) == 1.0
    assert len(traces) == 1
    for k in (3, 0):
        put(k, (0.5, Layer(3.0)))
        np.testing.assert_array_equal(jitted(1.0), f(1.0))
        put(k, (0.5, None))
        assert jitted(1.0) == 1.0


@pytest.mark.parametrize("use_of", ["model", "number"])
@pytest.mark.parametrize("place", ["global", "attribute", "list", "dict", "tuple"])
def test_a_model_in_a_tuple_is_freed_at_once(place, use_of):
    """A tuple allows no weak reference, so a jitted function refers to none with a model in it."""
    plain, listed, keyed = PlainTrainer(), [None], {"m": None}

    def put(pair):
        globals().update(PAIR=(0.5, pair))
        plain.model = listed[0] = keyed["m"] = pair

    pair_at = {
        "global": lambda: PAIR[1],
        "attribute": lambda: plain.model,
        "list": lambda: listed[0],
        "dict": lambda: keyed["m"],
        "tuple": lambda: PAIR[-1],
    }[place]
    model = Layer(3.0)
    put((model, 2.0))
    jitted = nnx.jit(lambda x: pair_at()[0](x) if use_of == "model" else pair_at()[1] * x)
    for _ in range(3):
        jitted(1.0)
    reference, model = weakref.ref(model), None  # type: ignore[assignment]
    put(None)
    assert reference() is None


def test_another_tuple_of_constants_is_no_new_trace():
    """A tuple of numbers is a constant, as a number is."""
    pair: Any = (2.0, (1, "text"))
    traces = []

    @nnx.jit
    def f(x):
        traces.append(None)
        return x * pair[0]

    for pair in ((2.0, (1, "text")), (3.0, ()), 1.0, (jnp.ones(()), np.float32(1.0))):  # noqa: B007
        assert f(1.0) == 2.0
    assert len(traces) == 1


def test_a_variable_that_comes_where_there_was_a_number():
    scale = 2.0
    jitted = nnx.jit(lambda x: x * scale)
    assert jitted(1.0) == 2.0
    scale = nnx.Param(jnp.array(3.0))
    assert jitted(1.0) == 3.0
    scale.value = 4.0
    assert jitted(1.0) == 4.0


@pytest.mark.parametrize("by", [nnx.jit, lambda f: lambda x: nnx.cond(True, f, f, x)], ids=["jit", "cond"])
def test_a_global_that_is_yet_to_come(by):
    def f(x):
        try:
            return x * yet_to_come.w
        except NameError:
            return x

    kept = by(f)
    try:
        for model in (None, Layer(2.0), Layer(3.0)):
            if model is not None:
                globals()["yet_to_come"] = model
            for _ in range(3):
                np.testing.assert_array_equal(kept(jnp.ones(2)), f(jnp.ones(2)))
    finally:
        globals().pop("yet_to_come", None)


def test_numbers_are_constants_of_a_trace():
    """Another number costs no trace, and no search of what the function refers to."""
    held, jitted = {"count": 0, "text": "a"}, nnx.jit(lambda x: x + held["count"])
    assert jitted(1.0) == 1.0
    before = jitted._captures.known
    held.update(count=1.0, text=None, more=[])
    del held["more"]
    assert jitted(1.0) == 1.0
    assert jitted._captures.known is before


@pytest.mark.parametrize("read", [lambda m: m.scale, lambda m: m.doubled, lambda m: getattr(m, "scale")])  # noqa: B009
@pytest.mark.parametrize("used", [False, True], ids=["settings alone", "called too"])
def test_a_setting_of_a_module_that_is_held_in_a_container(read, used):
    """A trace does not notice that it is read."""

    class Scaled(Layer):
        scale = 1.0

        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        @property
        def doubled(self):
            return 2 * self.scale

    held = {"a": Layer(2.0), "b": Scaled(1.0)}
    f = (lambda x: held["a"](x) * read(held["b"])) if used else (lambda x: x * read(held["b"]))
    jitted = nnx.jit(f)

    def changed():
        yield
        held["b"].scale = 2.0
        yield
        held["b"] = Scaled(3.0)
        yield
        held["b"].scale = 4.0
        yield

    for _ in changed():
        np.testing.assert_array_equal(jitted(1.0), f(1.0))


READ_ATTRIBUTES = {  # what is read of a Module in a dict without calling it, and what changes it
    "array": (lambda m: m.mask, lambda m: setattr(m, "mask", m.mask + 1)),
    "NumPy": (lambda m: m.mask, lambda m: setattr(m, "mask", np.asarray(m.mask) + 1)),
    "in a List": (lambda m: m.masks[0], lambda m: m.masks.__setitem__(0, m.masks[0] + 1)),
    "of a part": (lambda m: m.inner.setting, lambda m: setattr(m.inner, "setting", m.inner.setting + 1)),
    "of a part in a List": (lambda m: m.parts[0].setting, lambda m: setattr(m.parts[0], "setting", 5)),
    "number of parts": (lambda m: len(m.parts), lambda m: m.parts.append(Layer())),
    "part gone": (lambda m: 1 if m.inner is None else 2, lambda m: setattr(m, "inner", None)),
    "Variable gone": (lambda m: 1 if m.w is None else 2, lambda m: setattr(m, "w", None)),
    "a name that no code spells": (lambda m: getattr(m, f"rate_{0}"), lambda m: setattr(m, "rate_0", 2)),
    "no attribute yet": (lambda m: 1 if hasattr(m, "special") else 2, lambda m: setattr(m, "special", 1)),
    "a default in place of one": (lambda m: getattr(m, "special", 1), lambda m: setattr(m, "special", 2)),
    "all attributes": (lambda m: len(vars(m)), lambda m: setattr(m, "special", 1)),
    "of its class": (lambda m: m.default, lambda m: setattr(m, "default", 2)),
    "by a descriptor": (lambda m: m.described, lambda m: setattr(m, "rate_0", 2)),
    "by a private method": (lambda m: m._rate(), lambda m: setattr(m, "rate_0", 2)),
    "by a static method": (lambda m: m.rate_of(m), lambda m: setattr(m, "rate_0", 2)),
    "by an index": (lambda m: m[0], lambda m: setattr(m, "rate_0", 2)),
}


class Described:
    def __get__(self, x, cls=None):
        return self if x is None else x.rate_0


class Readable(Layer):
    """Can be read in many ways; code that does so need not name the attribute."""

    default, described = 1, Described()

    def __init__(self):
        super().__init__()
        self.rate_0 = 1

    def _rate(self):
        return self.rate_0

    @staticmethod
    def rate_of(m):
        return m.rate_0

    def __getitem__(self, index):
        return self.rate_0


@pytest.mark.parametrize(("read", "change"), READ_ATTRIBUTES.values(), ids=READ_ATTRIBUTES)
@pytest.mark.parametrize("hold", [lambda m: {"m": m}, lambda m: types.SimpleNamespace(m=m)], ids=["dict", "object"])
@pytest.mark.parametrize("by", [nnx.jit, lambda f: lambda: nnx.cond(True, f, f)], ids=["jit", "cond"])
def test_an_attribute_of_a_module_that_is_held_elsewhere(read, change, hold, by):
    """A trace does not notice that it is read."""
    model, inner = Readable(), Layer()
    inner.setting, model.mask, model.masks, model.parts, model.inner = 1, jnp.zeros(2), [jnp.zeros(2)], [Layer()], inner
    model.parts[0].setting = 1
    held = hold(model)
    find = (lambda: held["m"]) if isinstance(held, dict) else (lambda: held.m)
    f = lambda: jnp.asarray(read(find()), jnp.float32)
    kept = by(f)
    np.testing.assert_array_equal(kept(), f())
    before = f()
    change(model)
    np.testing.assert_array_equal(kept(), f())
    assert not np.array_equal(kept(), before)


def keeper(base=object, **methods):
    """A plain object that holds a Module, whose class has no methods but these."""
    made = type("Keeper", (base,), methods)()
    made.model = Layer()
    made.model.scale = 1.0
    return made


def entered(held):
    with held as model:
        return model.scale


def with_static_method():
    held = keeper()
    type(held).its = staticmethod(lambda: held.model.scale)
    return lambda: held.its()


def with_items():
    made = type("Registry", (), {"__class_getitem__": lambda cls, k: cls.model, "model": Layer()})
    made.model.scale = 1.0
    return lambda: made[0].scale


def matched(held):
    match held:
        case object(model=model):
            return model.scale


class Descriptor:
    def __get__(self, held, cls=None):
        return vars(held)["model"].scale


# What leads to the Module, without naming a global or an attribute that it is; a function of no arguments.
LEADING = {
    "a method of a method": lambda: keeper(go=lambda self: self.ask(), ask=lambda self: self.model.scale).go,
    "[]": lambda: (lambda held: lambda: held[0].scale)(keeper(__getitem__=lambda self, k: self.model)),
    "[] of a class": with_items,
    "for": lambda: (lambda held: lambda: sum(m.scale for m in held))(keeper(__iter__=lambda self: iter([self.model]))),
    "an operator": lambda: (lambda held: lambda: held * 2)(keeper(__mul__=lambda self, x: self.model.scale * x)),
    "an unknown attribute": lambda: (lambda held: lambda: held.its)(
        keeper(__getattr__=lambda self, name: self.__dict__["model"].scale)
    ),
    "with": lambda: (lambda held: lambda: entered(held))(
        keeper(__enter__=lambda self: self.model, __exit__=lambda self, *error: None)
    ),
    "case": lambda: (lambda held: lambda: matched(held))(keeper()),
    "a descriptor": lambda: (lambda held: lambda: held.its)(keeper(its=Descriptor())),
    "a static method": with_static_method,
    "an attribute of a dict": lambda: (lambda held: lambda: held.model.scale)(keeper(dict)),
    "a method of a list": lambda: (lambda held: lambda: held.its())(keeper(list, its=lambda self: self.model.scale)),
    "an attribute of a tuple": lambda: (lambda held: lambda: held.model.scale)(keeper(tuple)),
}


def held_by(f):
    """The plain object that a function refers to."""
    return f.__self__ if isinstance(f, types.MethodType) else f.__closure__[0].cell_contents


@pytest.mark.parametrize("make", LEADING.values(), ids=LEADING)
@pytest.mark.parametrize("by", [nnx.jit, lambda f: nnx.jit(lambda: f()), lambda f: lambda: nnx.cond(True, f, f)])
def test_a_setting_of_a_module_that_a_plain_object_leads_to(make, by):
    """Python calls methods that no code names, or names them in code that is found after the object."""
    f = make()
    held, kept = held_by(f), by(f)
    former = held.model
    assert kept() == f()
    held.model.scale = 2.0
    assert kept() == f()
    held.model = Layer()
    held.model.scale = 3.0
    assert kept() == f()
    held.model = former
    assert kept() == f()


@pytest.mark.parametrize("by", [nnx.jit, lambda f: lambda m: nnx.cond(True, f, f, m)], ids=["jit", "cond"])
def test_a_setting_of_a_module_in_the_class_of_an_argument(by):
    """All objects of the class share it; a trace does not notice that its settings are read."""

    class Sharing(Layer):
        shared = Layer()

        def __call__(self, x):
            return self.shared.scale * x

    former, model = Sharing.shared, Sharing()
    f = lambda m: m(1.0)
    kept = by(f)
    for Sharing.shared.scale in (1.0, 2.0):
        assert kept(model) == f(model)
    Sharing.shared = Layer()
    Sharing.shared.scale = 3.0
    assert kept(model) == f(model)
    Sharing.shared = former
    assert kept(model) == f(model)


@pytest.mark.parametrize("by", [nnx.jit, lambda f: lambda: nnx.cond(True, f, f)], ids=["jit", "cond"])
def test_an_attribute_that_a_module_gets_is_seen(by):
    """Also by what a function calls that names the Module; the attribute is not there in the first trace."""
    model = Layer()
    ask = lambda: model.more if hasattr(model, "more") else 1.0
    f = lambda: ask()
    kept = by(f)
    assert kept() == 1
    for model.more in (2.0, 3.0):
        assert kept() == model.more
    del model.more
    assert kept() == 1


def test_a_module_comes_to_an_attribute_of_a_container():
    """An instance of a subclass of dict may have attributes besides its items."""
    for base in (dict, list, tuple, set):
        held = keeper(base)
        held.model = None
        f = lambda x, held=held: x if held.model is None else held.model(x)
        jitted = nnx.jit(f)
        assert jitted(1.0) == f(1.0)
        held.model = Layer(2.0)
        np.testing.assert_array_equal(jitted(1.0), f(1.0))


@pytest.mark.parametrize("first", [None, Layer(1.0)], ids=["None", "Module"])
def test_the_attributes_of_a_plain_object_are_another_dict(first):
    """As a ``__setstate__`` may leave it."""
    holder = PlainTrainer()
    holder.model = first
    f = lambda x: x if holder.model is None else holder.model(x)
    jitted = nnx.jit(f)
    for _ in range(3):
        np.testing.assert_array_equal(jitted(1.0), f(1.0))
    holder.__dict__ = {"model": Layer(2.0)}
    np.testing.assert_array_equal(jitted(1.0), f(1.0))


def test_each_thread_has_attributes_of_its_own():
    """None in one of them."""
    local = threading.local()
    local.model = None
    jitted = nnx.jit(lambda x: x if local.model is None else local.model(x))
    assert jitted(1.0) == 1.0

    def elsewhere(model):
        local.model = model
        return jitted(jnp.ones(2))

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        for model in (Layer(2.0), None, Layer(3.0)):
            expected = 1.0 if model is None else model.w.value
            np.testing.assert_array_equal(thread.submit(elsewhere, model).result(), expected * jnp.ones(2))
            assert jitted(1.0) == 1.0


class StaticTrainer:
    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return x if self.model is None else self.model(x) * getattr(self.model, "scale", 1)


def by_static_argument(trainer):
    jitted = nnx.jit(StaticTrainer.__call__, static_argnums=0)
    return lambda x: jitted(trainer, x)


def by_static_name(trainer):
    jitted = nnx.jit(lambda x, *, trainer: trainer(x), static_argnames="trainer")
    return lambda x: jitted(x, trainer=trainer)


def by_static_function(trainer):
    jitted, f = nnx.jit(lambda f, x: f(x), static_argnums=0), lambda x: trainer(x)
    return lambda x: jitted(f, x)


def by_partial(trainer):
    return nnx.jit(functools.partial(StaticTrainer.__call__, trainer))


def by_stage(trainer):
    jitted = nnx.jit(StaticTrainer.__call__, static_argnums=0)
    return lambda x: jitted.lower(trainer, x).compile()(x)


@pytest.mark.parametrize("jitted", [by_static_argument, by_static_name, by_static_function, by_partial, by_stage])
def test_a_static_argument_that_is_compared_by_identity_holds_another_module(jitted):
    """While the former one still lives."""
    first, second = Layer(1.0), Layer(2.0)
    trainer, other = StaticTrainer(None), StaticTrainer(second)
    f, g = jitted(trainer), jitted(other)
    for trainer.model in (None, first, second, Layer(3.0), None, first):
        np.testing.assert_array_equal(f(jnp.ones(2)), trainer(jnp.ones(2)))
        np.testing.assert_array_equal(g(jnp.ones(2)), other(jnp.ones(2)))
    first.scale = 5
    np.testing.assert_array_equal(f(jnp.ones(2)), 5 * first.w)


def held_below():
    """Models that hold a Module in what is not data; with what has it, and under which name."""
    plain, hooked = StaticTrainer(Layer(1.0)), StaticTrainer(Layer(1.0))
    by_plain, by_closure, by_method, by_partial, by_class, by_hook, by_part = [Layer() for _ in range(7)]
    by_plain.used = plain
    by_closure.used = lambda x: plain.model(x)
    by_part.used = lambda x: x * plain.model.w
    by_method.used = types.MethodType(StaticTrainer.__call__, plain)
    by_partial.used = functools.partial(lambda trainer, x: trainer(x), plain)
    kind = type("Using", (Layer,), {"model": Layer(1.0), "used": lambda self, x: self.model(x)})
    by_class.__class__ = kind
    by_hook.w.set_metadata(on_get_value=lambda v, x: hooked.model(x))
    by_hook.used = types.MethodType(lambda self, x: self.w.value, by_hook)
    return {
        "plain object": (by_plain, plain),
        "function": (by_closure, plain),
        "function of a part": (by_part, plain),
        "method": (by_method, plain),
        "partial": (by_partial, plain),
        "class": (by_class, kind),
        "hook": (by_hook, hooked),
    }


@pytest.mark.parametrize("by", ["argument", "closure", "dict"])
@pytest.mark.parametrize("place", held_below())
def test_a_module_is_replaced_in_what_an_argument_holds(place, by):
    """It is no part of the argument, so it is captured; it is another one while the former still lives."""
    (m, holder), held = held_below()[place], {}
    held["m"] = m
    functions = {
        "argument": lambda m, x: m.used(x),
        "closure": lambda _, x: m.used(x),
        "dict": lambda _, x: held["m"].used(x),
    }
    jitted, argument = nnx.jit(functions[by]), m if by == "argument" else None
    former, x = [], jnp.ones(2)
    for _ in range(3):
        for model in (Layer(2.0), Layer(3.0), *former[:1]):
            holder.model = model
            for _ in range(2):
                np.testing.assert_array_equal(jitted(argument, x), m.used(x))
            former.append(model)


@dataclasses.dataclass
class Held:
    model: object


@dataclasses.dataclass(slots=True)
class HeldInSlot:
    model: object


class Rated:
    """A plain object, hashed by identity, with a method."""

    def __init__(self, model):
        self.model = model

    def rate(self):
        return self.model.scale


class WithHolder(Layer):
    def read(self):
        return self.holder.model.scale


READ_IN_HOLDER = {
    "function": lambda m: m.holder.model.scale,
    "method": lambda m: m.read(),
    "method of the object": lambda m: m.holder.rate() if hasattr(m.holder, "rate") else m.read(),
}


@pytest.mark.parametrize("f", READ_IN_HOLDER.values(), ids=READ_IN_HOLDER)
@pytest.mark.parametrize("hold", [Rated, lambda model: types.SimpleNamespace(model=model), Held, HeldInSlot])
@pytest.mark.parametrize("by", [nnx.jit, lambda f: lambda m: nnx.cond(True, f, f, m)], ids=["jit", "cond"])
def test_a_setting_of_a_module_in_an_object_that_an_argument_holds(hold, f, by):
    """A trace does not notice that it is read."""
    m, kept = WithHolder(), by(f)

    def other(scale):
        model = Layer()
        model.scale = scale
        return model

    former = other(1.0)
    m.holder = hold(former)
    for _ in range(2):
        assert kept(m) == f(m)
    former.scale = 2.0
    assert kept(m) == f(m)
    for model in other(3.0), former:
        m.holder.model = model
        assert kept(m) == f(m)
        model.scale = 4.0
        assert kept(m) == f(m)
    m.holder = hold(other(5.0))
    assert kept(m) == f(m)


WITHIN = {
    "remat": lambda f: lambda m, x: nnx.remat(lambda m, x: f(m, x))(m, x),
    "grad": lambda f: lambda m, x: nnx.grad(lambda x, m: (x.sum(), f(m, x)), has_aux=True)(x, m)[1],
    "vmap": lambda f: lambda m, x: nnx.vmap(lambda m, x: f(m, x), in_axes=(None, 0))(m, x[None])[0],
    "cond": lambda f: lambda m, x: nnx.cond(True, lambda m, x: f(m, x), lambda m, x: f(m, x), m, x),
}


@pytest.mark.parametrize("outer", [nnx.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("read", ["scale", "call"])
@pytest.mark.parametrize("hold", ["function", "object", "class"])
def test_a_jitted_function_within_a_transform_sees_what_its_argument_holds(hold, read, within, outer):
    """The Module belongs to another trace than the one that runs, so it can be read, which is all that is done here."""

    class Owner(nnx.Module):
        def __init__(self):
            self.holder = types.SimpleNamespace(model=held) if hold == "object" else None
            self.function = (lambda: held) if hold == "function" else None

        def held(self):
            return self.holder.model if hold == "object" else self.function() if hold == "function" else self.of_class

    held = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    held.scale = 2.0
    if hold == "class":
        Owner.of_class = held
    owner, x = Owner(), jnp.ones(2)
    f = lambda m, x: x * m.held().scale if read == "scale" else m.held()(x) * m.held().scale
    jitted = nnx.jit(f)
    whole = outer(within(jitted))
    for scale in 2.0, 3.0, 2.0:
        held.scale = scale
        for y in x, x, 2 * x, jnp.ones((1, 2)):
            np.testing.assert_allclose(whole(owner, y), f(owner, y), rtol=1e-6)
        held.kernel *= 2.0
        np.testing.assert_allclose(jitted(owner, x), f(owner, x), rtol=1e-6)


def test_a_class_that_notes_its_objects_in_calls():
    """In a trace it notes copies, which belong to that trace: another one must not take them as inputs."""

    class Noted(Layer):
        last = None

        def __call__(self, x):
            Noted.last = self
            return self.scale * super().__call__(x)

    m, x = Noted(), jnp.ones(2)
    m.scale = 1.0
    jitted = nnx.jit(nnx.jit(lambda m, x: m(x)))
    for scale in 1.0, 2.0, 1.0:
        m.scale = scale
        for y in x, jnp.ones((1, 2)):
            np.testing.assert_array_equal(jitted(m, y), m(y))


RATED: Any = None

FUNCTIONS_OF_HOLDER = {
    "method": lambda holder: holder.rate,
    "partial of a method": lambda holder: functools.partial(holder.rate),
    "partial": lambda holder: functools.partial(Rated.rate, holder),
    "partial with a list": lambda holder: functools.partial(lambda functions: functions[0](), [holder.rate]),
    "default argument": lambda holder: lambda held=holder: held.rate(),
    "closure": lambda holder: lambda: holder.model.scale,
    "global": lambda holder: lambda: RATED.model.scale,
    "method of a global": lambda holder: lambda: RATED.rate(),
}


@pytest.mark.parametrize("make", FUNCTIONS_OF_HOLDER.values(), ids=FUNCTIONS_OF_HOLDER)
@pytest.mark.parametrize("by", ["attribute", "static argument", "attribute in cond"])
def test_a_setting_of_a_module_to_which_a_function_leads_that_an_argument_holds(make, by, monkeypatch):
    """By a plain object, to which the function is bound or refers. A trace does not notice that the setting is read."""

    def of_scale(scale):
        model = Layer()
        model.scale = scale
        return model

    m, former = Layer(), of_scale(1.0)
    holder = Rated(former)
    monkeypatch.setitem(globals(), "RATED", holder)
    m.function = function = make(holder)
    read = lambda m: m.function() + 0 * m.w.value.sum()
    jitted, called = nnx.jit(read), nnx.jit(lambda function, x: function() * x, static_argnums=0)
    kept = {
        "attribute": lambda: jitted(m),
        "static argument": lambda: called(function, 1.0),
        "attribute in cond": lambda: nnx.cond(True, read, read, m),
    }[by]
    for _ in range(2):
        assert kept() == 1.0
    former.scale = 2.0
    assert kept() == 2.0
    for model in of_scale(3.0), former:
        holder.model = model
        assert kept() == model.scale
        model.scale += 4.0
        assert kept() == model.scale


HOLDERS_BY_VALUE = {
    "list": (lambda m: [m], lambda held: held[0]),
    "dict": (lambda m: {"m": m}, lambda held: held["m"]),
    "deque": (lambda m: collections.deque([m]), lambda held: held[0]),
    "set": (lambda m: {m}, lambda held: next(iter(held))),
    "namespace": (lambda m: types.SimpleNamespace(m=m), lambda held: held.m),
    "dataclass": (Config, lambda held: held.rate),
    "partial": (lambda m: functools.partial(lambda m: m, m), lambda held: held()),
    "method": (lambda m: m.read, lambda held: held.__self__),
}


class Scale(nnx.Module):
    def __init__(self, scale):
        self.scale = scale

    def read(self):
        return self.scale


@pytest.mark.parametrize("kind", HOLDERS_BY_VALUE)
@pytest.mark.parametrize("bound", [False, True], ids=["static", "bound"])
def test_a_setting_of_a_module_in_a_static_argument_that_is_compared_by_value(kind, bound):
    """A trace does not notice that it is read."""
    make, get = HOLDERS_BY_VALUE[kind]
    f, scale = lambda held, x: x * get(held).scale, Scale(1.0)
    held = make(scale)
    jitted = nnx.jit(functools.partial(f, held)) if bound else functools.partial(nnx.jit(f, static_argnums=0), held)
    for value in 1.0, 2.0, 3.0:
        scale.scale = value
        assert jitted(1.0) == value


def test_static_values_are_not_looked_into_if_they_are_compared_by_value():
    """Another one that is equal is the same argument, and needs no search."""
    held = nnx.jit(lambda config, x: x * config.rate, static_argnums=0)
    for _ in range(3):
        held(FrozenConfig(0.5), 1.0)
    assert not held._captures_given
    assert held._cache_size() == 1


def test_a_closure_over_modules_that_share_a_variable():
    """All that the function uses of the second is what it shares with the first."""
    first, second = Layer(1.0), Layer(2.0)
    second.w = first.w
    held = {"a": first, "b": second}
    f = lambda x: held["a"](x) + 10 * held["b"].w
    jitted = nnx.jit(f)

    def changed():
        yield
        held["b"] = Layer(3.0)
        yield
        held["b"] = second
        yield
        second.w = nnx.Param(jnp.full(2, 4.0))
        yield

    for _ in changed():
        np.testing.assert_array_equal(jitted(1.0), f(1.0))


def test_programs_for_places_that_are_gone_are_dropped(monkeypatch):
    """A list of Modules that grows at each step."""
    monkeypatch.setattr(closure_inputs, "KEPT", 3)
    layers = [Layer(1.0)]
    jitted = nnx.jit(lambda x: layers[0](x))
    for _ in range(8):
        jitted(1.0)
        layers.append(Layer(2.0))
    assert len(jitted._plans) <= 4
    assert len(jitted._dispatch._entries) <= 4


def test_what_is_compared_at_each_call_is_kept_alive_by_none():
    """A list of Modules that the function does not read, and objects with them."""
    models, trainer = [Layer(), Layer()], PlainTrainer()
    trainer.models = [Layer()]
    references = [weakref.ref(m) for m in (*models, *trainer.models)]
    jitted = nnx.jit(lambda x: x * len(models) * len(trainer.models))
    jitted(1.0)
    models.clear()
    trainer.models.clear()
    assert not any(reference() for reference in references)


def held_by_places():
    """What holds Modules under two keys, how a function reads them, and how one is replaced."""
    a, b = Layer(1.0), Layer(2.0)
    held = {"a": a, "b": b}
    listed = [a, b]
    tied = {"a": a, "b": a}
    variables = {"a": a.w, "b": a.w}
    apart = types.SimpleNamespace(a=a, b=b)
    first, second = [a], [b]

    def swapped():
        nonlocal first, second
        first, second = [b], [Layer(3.0)]

    class Reading(nnx.Module):
        @property
        def model(self):
            return held[self.key]

    def read(key, x):
        reading = Reading()
        reading.key = key
        return reading.model.w * x

    return {
        "dict": (lambda key, x: held[key](x), lambda: held.update(b=Layer(3.0))),
        "list": (lambda key, x: listed["ab".index(key)](x), lambda: listed.append(Layer(3.0))),
        "one Module under two keys": (lambda key, x: tied[key](x), lambda: tied.update(b=Layer(3.0))),
        "one Variable under two keys": (lambda key, x: variables[key] * x, lambda: variables.update(b=Layer(3.0).w)),
        "attributes": (lambda key, x: getattr(apart, key)(x), lambda: setattr(apart, "b", Layer(3.0))),
        "cells of a closure": (lambda key, x: (first if key == "a" else second)[0](x), swapped),
        "property": (read, lambda: held.update(b=Layer(3.0))),
    }


@pytest.mark.parametrize("first", "ab")
@pytest.mark.parametrize("kind", held_by_places())
def test_a_closure_that_finds_other_modules_at_first(kind, first):
    """Those that it finds again may be others of the same structure than it captured at first, or in another order."""
    f, change = held_by_places()[kind]
    jitted = nnx.jit(f, static_argnums=0)
    for key in "ab":
        np.testing.assert_array_equal(jitted(key, 1.0), f(key, 1.0))
    change()
    for key in (first, *"ab"):
        np.testing.assert_array_equal(jitted(key, 1.0), f(key, 1.0))


def test_a_closure_over_a_list_that_holds_a_module_twice():
    """As often as the list holds it, also where the function was compiled for fewer."""
    layers = [Layer(1.0), Layer(2.0)]
    jitted = nnx.jit(lambda x: sum(layer(x) for layer in layers))
    for k in (None, 1, 0, 0):
        layers += [] if k is None else [layers[k]]
        np.testing.assert_array_equal(jitted(1.0), sum(layer(1.0) for layer in layers))


def test_a_closure_over_modules_that_are_parts_of_each_other():
    """What the function refers to by itself may be replaced there, or in the Module that holds it, or in both."""
    whole, part = Layer(1.0), Layer(2.0)
    whole.part = part
    held = [whole, part]

    def f(x):
        return held[0](x) + 10 * held[0].part(x) + 100 * held[1](x)

    def changed():
        whole.part = Layer(3.0)
        yield
        held[1] = Layer(4.0)
        yield
        whole.part = held[1]
        yield
        held[1] = part
        yield
        held[0] = Layer(5.0)
        held[0].part = part
        yield

    jitted = nnx.jit(f)
    np.testing.assert_array_equal(jitted(1.0), f(1.0))
    for _ in changed():
        np.testing.assert_array_equal(jitted(1.0), f(1.0))


def test_a_closure_over_a_part_of_several_modules():
    """The function uses the part alone, and only one of the Modules leads to it."""
    part = Layer(1.0)
    holders = types.SimpleNamespace(a=Layer(2.0), b=Layer(3.0))
    holders.a.part = holders.b.part = part
    functions = {name: nnx.jit(lambda x, name=name: getattr(holders, name).part(x)) for name in "ab"}
    for name, other in itertools.product("ab", "ab"):
        np.testing.assert_array_equal(functions[name](1.0), getattr(holders, name).part(1.0))
        getattr(holders, other).part = Layer(4.0 + ord(other))
        np.testing.assert_array_equal(functions[name](1.0), getattr(holders, name).part(1.0))


class NotComparable:
    def __eq__(self, other):
        raise TypeError

    def __hash__(self):
        return 1


@pytest.mark.parametrize("key", [NotComparable, lambda: (NotComparable(), 1), lambda: float("nan")])
def test_a_closure_over_a_dict_with_keys_that_cannot_be_compared(key):
    """Another key of the same hash takes the place of the first, which lives on."""
    held = {key(): Layer(1.0)}
    jitted = nnx.jit(lambda x: next(iter(held.values()))(x))
    for value in (1.0, 2.0, 3.0):
        former = dict(held)
        held.clear()
        held[key()] = Layer(value)
        np.testing.assert_array_equal(jitted(1.0), jnp.full(2, value))
        del former


def test_a_stage_refuses_other_modules_than_it_was_compiled_for():
    """The function has found others of the same structure since."""
    held = {"a": Layer(1.0), "b": Layer(2.0)}
    jitted = nnx.jit(lambda key, x: held[key](x), static_argnums=0)
    compiled = jitted.lower("a", 1.0).compile()
    np.testing.assert_array_equal(compiled(1.0), jnp.full(2, 1.0))
    held["a"], held["c"] = Layer(3.0), Layer(4.0)
    jitted("b", 1.0)
    with pytest.raises(ArgumentError, match="refers to other objects"):
        compiled(1.0)


@pytest.mark.parametrize("is_known", [False, True], ids=["", "known since"])
def test_a_stage_refuses_a_module_where_there_was_none(is_known):
    """Whether or not the jitted function has captured it since."""
    held = {"m": None}
    jitted = nnx.jit(lambda x: use(held["m"], x))
    compiled = jitted.lower(1.0).compile()
    assert compiled(2.0) == 2.0
    held["m"] = Layer(3.0)
    if is_known:
        jitted(2.0)
    with pytest.raises(ArgumentError, match="refers to other objects"):
        compiled(2.0)
    held["m"] = None
    assert compiled(2.0) == 2.0


@pytest.mark.parametrize("key", ["a", None])
def test_a_stage_whose_function_has_captured_more_since(key):
    """By a call with another static argument: what the stage itself was compiled for is where it was."""
    held = {"a": Layer(1.0), "b": Layer(2.0)}
    jitted = nnx.jit(lambda key, x: held[key](x) if key else x + jnp.zeros(2), static_argnums=0)
    compiled = jitted.lower(key, 1.0).compile()
    jitted("b", 1.0)
    np.testing.assert_array_equal(compiled(1.0), jnp.ones(2))
    held["a"].w *= 3.0
    np.testing.assert_array_equal(compiled(1.0), jnp.full(2, 3.0 if key else 1.0))
    held["a"] = None
    with pytest.raises(ArgumentError, match="refers to other objects"):
        compiled(1.0)


class Teacher:
    """Where its Module is, only the code that runs knows."""

    @property
    def model(self):
        return Experiment.model

    def __call__(self, x):
        return Experiment.model(x)

    @nnx.jit
    def jitted(self, x):
        return Experiment.model(x)


class Student(Layer):
    def __call__(self, x):
        return super().__call__(x) + Experiment.model(x)


def test_a_closure_of_what_a_function_calls():
    """A Module that is a global of what a function calls: of an argument, an object, a jitted function."""
    student, teacher = Student(), Teacher()
    hidden = types.SimpleNamespace(models=iter([teacher] * 9))
    first, second = Layer(1.0), Layer(2.0)
    Experiment.model = first
    inner = nnx.jit(lambda x: teacher(x))
    inner(1.0)
    by_method = nnx.jit(lambda x: Teacher.jitted(student, x))
    called = {
        lambda x: student(x) - student.w: nnx.jit(lambda x: student(x) - student.w),
        lambda x: student(x): functools.partial(nnx.jit(lambda m, x: m(x)), student),
        lambda x: Experiment.model(x): nnx.jit(lambda x: next(hidden.models)(x)),
        lambda x: Experiment.model(2 * x): nnx.jit(lambda x: teacher.model(2 * x)),
        lambda x: Experiment.model(3 * x): nnx.jit(lambda x: inner(3 * x)),
        lambda x: Experiment.model(4 * x): nnx.jit(lambda x: by_method(4 * x)),
    }
    for Experiment.model in (first, second, first):
        for eager, jitted in called.items():
            np.testing.assert_array_equal(jitted(1.0), eager(1.0))


def test_a_setting_that_a_wrapper_reads():
    model = Layer()

    def scaled(f):
        @functools.wraps(f)
        def wrapper(x):
            return f(x) * model.setting

        return wrapper

    @nnx.jit
    @scaled
    def f(x):
        return x

    for model.setting in (1.0, 2.0):
        assert f(1.0) == model.setting


class Doubling:
    """A plain object that holds a Module."""

    factor = nnx.Param(jnp.array(1.0))

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return 2 * self.layer(x) * self.factor


class Tripling(Doubling):
    factor = nnx.Param(jnp.array(10.0))

    def __call__(self, x):
        return 3 * self.layer(x) * self.factor


def test_a_plain_object_of_another_class():
    """It does something else with the same Module, and leads to another Variable."""
    plain = Doubling(Layer())
    jitted = [nnx.jit(lambda x: plain(x)), nnx.jit(plain)]
    for plain.__class__ in (Doubling, Tripling, Doubling):
        for f in jitted:
            np.testing.assert_array_equal(f(1.0), plain(1.0))


def test_a_function_that_leads_to_a_module_is_replaced():
    """By one with other code, which does something else with that Module; one with the same code needs no trace."""
    layer, traced = Layer(), []
    functions = {}

    @nnx.jit
    def f(x):
        traced.append(x)
        return functions["f"](x)

    for factor in (2, 2, 3, 2, 3):
        functions["f"] = (lambda x: 2 * layer(x)) if factor == 2 else (lambda x: 3 * layer(x))
        np.testing.assert_array_equal(f(1.0), factor * layer(1.0))
    assert len(traced) == 2


def test_a_callable_module_of_another_class():
    """A jitted Module does what its class does now; what was bound to one of its methods goes on with that."""
    layer = Layer()
    jitted = nnx.jit(layer), nnx.jit(functools.partial(layer, x=2.0)), nnx.jit(layer, static_argnums=0)
    bound = nnx.jit(layer.__call__)
    for layer.__class__ in (Layer, OtherLayer, Layer):
        for f, args in zip(jitted, ((2.0,), (), (2.0,)), strict=True):
            np.testing.assert_array_equal(f(*args), layer(2.0))
        np.testing.assert_array_equal(bound(2.0), layer.w * 2.0)
    assert [f._cache_size() for f in (*jitted, bound)] == [2, 2, 2, 2]
    layer.__class__ = Net
    for _ in range(2):
        with pytest.raises(ArgumentError, match="A Net cannot be called"):
            jitted[0](2.0)


class Settings(nnx.Module):
    def __init__(self, scale):
        self.scale = scale


SETTINGS = Settings(1.0)


def scaled_by_settings(x):
    return x * SETTINGS.scale


class ReadsInMethod(nnx.Module):
    def __call__(self, x):
        return x * SETTINGS.scale


class ReadsInFunction(nnx.Module):
    def __call__(self, x):
        return scaled_by_settings(x)


class ReadsInProperty(nnx.Module):
    scale = property(lambda self: SETTINGS.scale)

    def __call__(self, x):
        return x * self.scale


class ReadsInStaticMethod(nnx.Module):
    @staticmethod
    def scale():
        return SETTINGS.scale

    def __call__(self, x):
        return x * self.scale()


class Inherits(ReadsInMethod):
    pass


class ReadsInPart(nnx.Module):
    def __init__(self):
        self.part = ReadsInMethod()

    def __call__(self, x):
        return self.part(x)


READ_SETTINGS = ReadsInMethod, ReadsInFunction, ReadsInProperty, ReadsInStaticMethod, Inherits, ReadsInPart


@pytest.mark.parametrize("kind", READ_SETTINGS)
@pytest.mark.parametrize("by", [nnx.jit, nnx.remat, lambda f: lambda *args: nnx.cond(True, f, f, *args)])
def test_a_setting_of_a_module_that_a_method_of_an_argument_reads(kind, by, monkeypatch):
    """A trace does not notice that it is read, and the function itself does not name it."""
    model, f = kind(), lambda m, x: m(x)
    kept = by(f)
    for settings in (Settings(1.0), Settings(4.0)):
        monkeypatch.setitem(globals(), "SETTINGS", settings)
        for _ in range(3):
            np.testing.assert_array_equal(kept(model, 1.0), settings.scale)
            settings.scale += 1.0


class Opens:
    """What code reaches by ``async with`` and ``async for``."""

    async def __aenter__(self):
        return SETTINGS

    async def __aexit__(self, *_):
        pass

    def __aiter__(self):
        self.left = 1
        return self

    async def __anext__(self):
        self.left -= 1
        if self.left < 0:
            raise StopAsyncIteration
        return SETTINGS


def result_of(coroutine):
    """What a coroutine returns that waits for nothing."""
    with pytest.raises(StopIteration) as info:
        coroutine.send(None)
    return info.value.value


class Made:
    def __new__(cls):
        return SETTINGS


async def opened():
    async with Opens() as settings:
        return settings.scale


async def iterated():
    return sum([settings.scale async for settings in Opens()])


def in_partial():
    held = functools.partial(print)
    return lambda: held.settings.scale, lambda settings: setattr(held, "settings", settings)


def in_enum():
    held = []
    show = lambda settings: held.__setitem__(slice(None), [enum.Enum("Kind", {"A": settings})])
    return lambda: held[0].A.value.scale, show


def behind_proxy():
    held = {}
    kept = []  # a proxy keeps nothing alive
    show = lambda settings: held.update(settings=weakref.proxy(kept.append(settings) or settings))
    return lambda: held["settings"].scale, show


def in_property():
    found = None

    class Owner:
        @property
        def settings(self):
            return found

    def show(settings):
        nonlocal found
        found = settings

    return lambda: Owner().settings.scale, show


def among_all_attributes():
    held = types.SimpleNamespace()
    return lambda: sum(x.scale for x in vars(held).values()), lambda settings: setattr(held, "settings", settings)


def by_method_of_a_dict():
    held = {}
    find = held.get
    return lambda: find("x").scale, lambda settings: held.update(x=settings)


def by_method_of_a_context_variable():
    variable = contextvars.ContextVar("variable")
    find = variable.get
    return lambda: find().scale, variable.set


def in_singleton():
    class Single:
        one = None

        def __new__(cls):
            cls.one = cls.one or super().__new__(cls)
            return cls.one

    return lambda: Single().settings.scale, lambda settings: setattr(Single(), "settings", settings)


def by_dotted_name():
    held = types.SimpleNamespace(inner=types.SimpleNamespace())
    read = lambda: operator.attrgetter("inner.settings")(held).scale
    return read, lambda settings: setattr(held.inner, "settings", settings)


UNSPELLED = "unspelled"


class Keeper:
    def show(self):
        return self.unspelled


def by_name(read):
    """``read(held)`` reads the Module in an attribute of ``held`` that it does not spell."""

    def place():
        held = Keeper()
        return lambda: read(held).scale, lambda settings: vars(held).update(unspelled=settings)

    return place


def by_name_in_closure():
    name = "unspelled"
    return by_name(lambda held: getattr(held, name))()


def by_attrgetter():
    get = operator.attrgetter("unspelled")
    return by_name(lambda held: get(held))()


def by_methodcaller():
    call = operator.methodcaller("show")
    return by_name(lambda held: call(held))()


def by_partial():
    held = Keeper()
    get = functools.partial(getattr, held, "unspelled")
    return lambda: get().scale, lambda settings: vars(held).update(unspelled=settings)


def as_settings(read):
    return lambda: (read, lambda settings: globals().update(SETTINGS=settings))


UNUSUAL = {
    "a partial": in_partial,
    "an enum": in_enum,
    "a proxy": behind_proxy,
    "a property": in_property,
    "vars": among_all_attributes,
    "a method of a dict": by_method_of_a_dict,
    "a method of a context variable": by_method_of_a_context_variable,
    "a singleton": in_singleton,
    "a dotted name": by_dotted_name,
    "a name in a global": by_name(lambda held: getattr(held, UNSPELLED)),
    "a name in a closure": by_name_in_closure,
    "a name in a default": by_name(lambda held, name="unspelled": getattr(held, name)),
    "a name in a tuple": by_name(lambda held: [getattr(held, name) for name in ("unspelled",)].pop()),
    "attrgetter": by_attrgetter,
    "methodcaller": by_methodcaller,
    "a partial of getattr": by_partial,
    "what makes an object": as_settings(lambda: Made().scale),
    "async with": as_settings(lambda: result_of(opened())),
    "async for": as_settings(lambda: result_of(iterated())),
}


@pytest.mark.parametrize("place", UNUSUAL)
def test_a_setting_of_a_module_that_is_reached_in_an_unusual_way(place, monkeypatch):
    """So is another Module there."""
    monkeypatch.setitem(globals(), "SETTINGS", SETTINGS)  # which is put back
    read, show = UNUSUAL[place]()
    jitted = nnx.jit(lambda x: x * read())
    for settings in (Settings(1.0), Settings(4.0)):
        show(settings)
        for _ in range(3):
            np.testing.assert_array_equal(jitted(1.0), settings.scale)
            settings.scale += 1.0


@pytest.mark.parametrize(
    "make", [lambda x: {x}, lambda x: {x: 1}, lambda x: frozenset([x])], ids=["set", "key", "frozenset"]
)
def test_a_plain_object_that_is_a_member_of_a_set_or_a_key(make):
    """Another Module in it is seen."""
    held = PlainConfig()
    held.layer = Layer(1.0)
    collection = make(held)
    jitted = nnx.jit(lambda x: sum(one.layer(x) for one in collection))
    for value in 1.0, 2.0, 3.0:
        held.layer, former = Layer(value), held.layer
        np.testing.assert_array_equal(jitted(1.0), held.layer(1.0))
        assert former is not held.layer


@pytest.mark.parametrize("make", [lambda x: {x: 1}, lambda x: {(x,): 1}, lambda x: {(): 1, ((), (x,)): 1}])
@pytest.mark.parametrize("kind", [dict, set])
def test_a_module_in_a_member_of_a_set_or_a_key(make, kind):
    """Also in a tuple: another one is seen, and another setting."""

    def module_in(x):
        return x if isinstance(x, Layer) else next((m for part in x if (m := module_in(part))), None)

    collection = kind(make(Layer(1.0)))
    jitted = nnx.jit(lambda x: x * module_in(collection).scale)
    for value in 1.0, 2.0:
        collection.clear()
        collection.update(make(layer := Layer(value)))
        for layer.scale in value, 3 * value:
            assert jitted(1.0) == layer.scale


def test_another_attribute_is_gone_over():
    """By code that goes over all attributes of an object."""
    held = types.SimpleNamespace(first=Layer(1.0))
    jitted = nnx.jit(lambda x: sum(layer(x) for layer in vars(held).values()))
    np.testing.assert_array_equal(jitted(1.0), [1, 1])
    held.second = Layer(2.0)
    np.testing.assert_array_equal(jitted(1.0), [3, 3])


@pytest.mark.parametrize("make", [lambda: nnx.Module(), lambda: nnx.Dict(a=1)])
def test_attributes_that_code_of_other_files_looks_through(make):
    """By ``vars``, behind two functions of other files; also if it finds neither a Variable nor a method to call."""
    first, second, third = (types.ModuleType(name) for name in ("first", "second", "third"))
    exec("def f(held): return len(vars(held[0]))", vars(third))
    second.f = third.f
    exec("def g(held): return f(held)", vars(second))
    first.g = second.g
    exec("def h(held): return g(held)", vars(first))
    h, m = first.h, make()
    held = [m]
    jitted = nnx.jit(lambda: h(held))
    assert jitted() == len(vars(m))
    m.flag = 3
    assert jitted() == len(vars(m))
    m.w = nnx.Param(jnp.ones(2))
    assert jitted() == len(vars(m))


LAYER, LAZILY = Layer(1.0), types.ModuleType("lazily")
BY_TEXT = {
    "globals": lambda: globals()["LAYER"],
    "eval": lambda: eval("LAYER"),
    "modules": lambda: sys.modules[__name__].LAYER,
    "imported": lambda: importlib.import_module("lazily").LAYER,
    "lazily": lambda: LAZILY.LAZY_LAYER,
}


@pytest.mark.parametrize("way", BY_TEXT)
def test_a_global_that_is_reached_by_text(way, monkeypatch):
    """Another Module in its place is seen, with its weights; also in a module that makes its attributes lazily."""
    lazily = types.ModuleType("lazily")
    exec("held = {}\ndef __getattr__(name): return held[name]", vars(lazily))
    monkeypatch.setitem(sys.modules, "lazily", lazily)
    monkeypatch.setitem(globals(), "LAZILY", lazily)
    find = BY_TEXT[way]
    jitted = nnx.jit(lambda x: find()(x) * find().scale)
    for layer in (Layer(1.0), Layer(2.0)):
        monkeypatch.setitem(globals(), "LAYER", layer)
        lazily.LAYER = lazily.held["LAZY_LAYER"] = layer
        for layer.scale in 2.0, 3.0:
            np.testing.assert_array_equal(jitted(1.0), layer(1.0) * layer.scale)
            layer.w.value *= 2


def test_what_a_trace_leaves_in_a_list_does_not_count():
    """The function cannot use a Module of a trace that has ended, so one more of these is no reason to trace again."""
    left = []

    @nnx.jit
    def f(model):
        left.append(model)
        return model(1.0)

    for value in (1.0, 2.0, 3.0):
        model = Layer()
        model.w.value = jnp.full(2, value)
        np.testing.assert_array_equal(f(model), model(1.0))
    assert len(left) == 1


def test_a_closure_over_a_weak_method():
    """Asking for it makes another method each time."""
    model = Layer()
    method = weakref.WeakMethod(model.__call__)
    jitted = nnx.jit(lambda x: method()(x))
    for value in (1.0, 2.0):
        model.w.value = jnp.full(2, value)
        np.testing.assert_array_equal(jitted(1.0), model(1.0))


def test_no_tracer_is_seen_by_another_thread():
    """Promise 1: another thread that reads a captured model during a trace finds arrays."""
    model, seen = Layer(), []

    def f(x):
        thread = threading.Thread(target=lambda: seen.append(model.w.get_raw_value()))
        thread.start()
        thread.join()
        return model(x)

    nnx.jit(f)(1.0)
    assert not any(isinstance(value, jax.core.Tracer) for value in seen)


def test_a_search_that_ends_before_it_gets_to_all_code_knows_the_names_in_it():
    """A trainer with very many records, of which each step adds one, traces its step once."""

    class Box:
        def __init__(self, **items):
            self.__dict__.update(items)

    def loss(model, x):
        """The search gets to this last; it names the attributes by which the trainer has the model."""
        return (x.model, x.step) if model is None else model(x).sum()

    class Trainer(Box):
        def train_step(self, model, x):
            traces.append(x)
            return self.inner.inner.inner.inner.losses["loss"](model, x)

    traces, x = [], jnp.ones(2)
    innermost = Box(records=[Box() for _ in range(950)], losses={"loss": loss})
    trainer = Trainer(model=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), current=None)
    trainer.inner = Box(inner=Box(inner=Box(inner=innermost)))
    trainer.step = functools.partial(nnx.jit(trainer.train_step), trainer.model)
    for k in range(40):
        trainer.current = Box() if k % 2 else None
        innermost.records.append(Box(loss=trainer.step(x)))
    assert len(traces) == 1


@pytest.mark.parametrize("by", [nnx.jit, nnx.remat, jax.jit, lambda f: lambda m, x: nnx.cond(True, f, f, m, x)])
@pytest.mark.parametrize("anew", [True, False], ids=["model", "attribute"])
def test_a_cell_of_a_notebook_that_is_run_again(anew, by):
    """The function in it is written as before, but is another one, and so is the number or the helper that it names."""
    cell = """
rate = {rate}
def helper(x): return x * {rate}
def act(x): return helper(x) + rate
"""
    notebook = {}
    called, x, m = by(lambda m, x: m.act(m(x))), jnp.ones(2), Layer()
    for rate in 1.0, 2.0, 3.0:
        exec(cell.format(rate=rate), notebook)
        m = Layer() if anew else m
        m.act = notebook["act"]
        for _ in range(2):
            np.testing.assert_array_equal(called(m, x)[0], rate * 2)
