"""Static values: keys that are equal when the program is the same, and constants that nobody can edit."""

import array
import collections.abc
import copy
import dataclasses
import functools
import pickle
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.errors import StaticValueError
from nnxlib.core.static import Const, same_items


@dataclasses.dataclass
class Open:
    n: int
    names: list


@dataclasses.dataclass(frozen=True)
class Closed:
    n: int


@dataclasses.dataclass(unsafe_hash=True)
class Hashed:
    n: int


@dataclasses.dataclass(eq=False)
class ByIdentity:
    n: int


@dataclasses.dataclass(frozen=True, eq=False)
class Holder:
    """Compared by identity, whatever it holds."""

    x: object


@dataclasses.dataclass(frozen=True)
class Labelled:
    n: int
    label: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, unsafe_hash=True)
class ClosedHashed:
    n: int


@dataclasses.dataclass
class OwnHash:
    n: int

    def __hash__(self):
        return hash(self.n)


@dataclasses.dataclass(frozen=True)
class HashedInPart:
    """Its hash leaves out a list, so it has one."""

    n: int
    names: list = dataclasses.field(hash=False)


class Plain:
    pass


class Named(nnx.Module):
    """A Module whose ``==`` looks at its name only."""

    def __init__(self, name):
        self.name, self.scale = name, nnx.Param(jnp.ones(1))

    def __eq__(self, other):
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self):
        return hash(self.name)


class Unhashable:
    __hash__ = None

    def __init__(self, n):
        self.n = n


class Slots:
    """No hash, and attributes in slots besides a ``__dict__``."""

    __slots__ = ("__dict__", "rate")

    def __init__(self, rate):
        self.rate = rate

    def __eq__(self, other):
        return self.rate == other.rate


class OnlySlots:
    """As ``attrs.define`` makes them: no hash, and attributes in slots."""

    __slots__ = ("rate",)

    __init__, __eq__ = Slots.__init__, Slots.__eq__


class Slotless:
    """No hash, and no attributes."""

    __slots__ = ()
    __hash__ = None


@dataclasses.dataclass(slots=True)
class Stateless:
    """As the noise of AQT: no hash, nothing to compare."""


def relu(x):
    return max(x, 0)


SAME = {
    "list": lambda: [1, {"a": [2]}],
    "dict": lambda: {"a": 1, "b": {}},
    "set": lambda: {1, 2, "a"},
    "nan": lambda: float("nan"),
    "array": lambda: np.arange(3),
    "array of objects": lambda: np.array([1, "a", None], dtype=object),
    "NumPy scalar": lambda: np.float32("nan"),
    "lambda": lambda: lambda x: x + 1,
    "partial": lambda: functools.partial(relu, [1]),
    "mutable dataclass": lambda: Open(1, ["a"]),
    "frozen dataclass": lambda: Closed(1),
    "namespace": lambda: types.SimpleNamespace(a=[1]),
    "object without a hash": lambda: Unhashable(1),
    "bytearray": lambda: bytearray(b"ab"),
    "slice": lambda: slice(1, None, 2),
    "deque": lambda: deque([1, 2], maxlen=3),
    "ordered dict": lambda: OrderedDict(b=1, a=2),
    "dict with a factory": lambda: defaultdict(list, a=[1]),
    "dtype": lambda: np.dtype("float32"),
    "partition spec": lambda: jax.sharding.PartitionSpec("a", None),
    "record array": lambda: np.rec.array([(1, 2.0)]),
    "masked array": lambda: np.ma.array([1, 2], mask=[0, 1]),
    "row of an array": lambda: np.zeros(2, [("a", "i4")])[0],
    "object without attributes": lambda: Stateless(),
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME.keys())
def test_equal_values_have_equal_keys(make):
    """Two values made alike freeze to equal, hashable keys, and their constants are equal."""
    a, b = make(), make()
    assert Const.of(a).key == Const.of(b).key
    assert Const.of(a) == Const.of(b)
    assert hash(Const.of(a)) == hash(Const.of(b))


def closure(n):
    return lambda x: x + n


def with_default(n):
    return lambda x, n=n: x


def with_keyword(n):
    return lambda x, *, n=n: x


def with_attribute(n):
    f = lambda x: x
    f.n = n
    return f


DIFFERENT = {
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "zeros": (0.0, -0.0),
    "complex zeros": (complex(0.0, 0.0), complex(-0.0, 0.0)),
    "zeros in a tuple": ((1, (0.0,)), (1, (-0.0,))),
    "NumPy zeros": (np.float32(0.0), np.float32(-0.0)),
    "NumPy and Python": (np.float64(1.0), 1.0),
    "list and tuple": ([1], (1,)),
    "ranges of the same numbers": (range(0, 3, 2), range(0, 4, 2)),
    "factories of dicts": (defaultdict(int), defaultdict(float)),
    "order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "key type": ({1: "a"}, {True: "a"}),
    "array dtype": (np.zeros(2, "int32"), np.zeros(2, "float32")),
    "array shape": (np.zeros((2, 1)), np.zeros((1, 2))),
    "array values": (np.array([1, 2]), np.array([2, 1])),
    "array dtype of JAX": (np.zeros(2, jnp.int4), np.zeros(2, jnp.uint4)),
    "array field": (np.zeros(2, [("a", "i4")]), np.zeros(2, [("b", "i4")])),
    "record array": (np.rec.array([(1, 2.0)]), np.rec.array([(1, 3.0)])),
    "array of a subclass": (np.zeros(2).view(np.recarray), np.zeros(2)),
    "masked array": (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
    "masked value": (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 3], mask=[0, 1])),
    "unset slot": (OnlySlots(1), object.__new__(OnlySlots)),
    "objects without attributes": (Stateless(), Slotless()),
    "lambda": (lambda x: x + 1, lambda x: x + 2),
    "default": (with_default(1), with_default(2)),
    "keyword default": (with_keyword(1), with_keyword(True)),
    "closure": (closure(1), closure(1)),
    "function with attributes": (with_attribute(1), with_attribute(1)),
    "dataclass by identity": (ByIdentity(1), ByIdentity(1)),
    "partial": (functools.partial(relu, 1), functools.partial(relu, 2)),
    "partial keyword": (functools.partial(relu, x=1), functools.partial(relu, x=True)),
    "partial of an array": (functools.partial(relu, jnp.ones(1)), functools.partial(relu, jnp.ones(1))),
    "default that is an array": (with_default(jnp.ones(1)), with_default(jnp.ones(1))),
    "default that can be edited": (with_default([1]), with_default([1])),
    "equal Modules": ((Named("a"),), (Named("a"),)),
    "dataclass": (Open(1, []), Open(1, [1])),
    "frozen dataclass": (Closed(1), Closed(True)),
    "objects": (Plain(), Plain()),
    "classes": (Open, Closed),
}


@pytest.mark.parametrize(("a", "b"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_values_of_other_programs_have_other_keys(a, b):
    """Exact types, signs, order, code: what Python takes for equal may still be another program."""
    assert Const.of(a).key != Const.of(b).key
    assert Const.of(a) != Const.of(b)


def test_a_field_that_is_not_compared():
    """A frozen dataclass says itself what makes no difference."""
    assert Const.of(Labelled(1, "a")) == Const.of(Labelled(1, "b")) != Const.of(Labelled(True, "a"))


def test_keys_that_differ_by_a_function_of_another_module():
    """Equal code over other globals is another function."""
    source = "f = lambda x: x + n"
    one, two = {"n": 1}, {"n": 2}
    exec(source, one)
    exec(source, two)
    assert Const.of(one["f"]) != Const.of(two["f"])
    assert Const.of(one["f"]) == Const.of(one["f"])


@pytest.mark.parametrize(
    "source", ["f = lambda x: x + n", "f = lambda x: (lambda y: y + n)(x)", "def f(x, k=1): return h(x) if k else f(x)"]
)
def test_keys_that_differ_by_what_a_function_named_when_it_was_first_used(source):
    """A cell of a notebook is run again, with another number or helper; if both are as they were, nothing differs."""
    namespace = {"n": 1.5, "h": len}
    cell = compile(source, "cell", "exec")

    def run():
        exec(cell, namespace)
        return namespace["f"]

    first, key = run(), Const.of(namespace["f"]).key
    assert ("def" in source) or Const.of(run()).key == key
    namespace.update(n=2.5, h=abs)
    assert Const.of(run()).key != key == Const.of(first).key


def test_a_frozen_function_keeps_nothing_alive_that_it_names():
    namespace = {"n": jnp.ones(1)}
    exec("f = lambda x: x + n", namespace)
    key, n = Const.of(namespace["f"]).key, weakref.ref(namespace["n"])
    namespace["n"] = None
    assert n() is None
    assert Const.of(namespace["f"]).key == key


def test_mutability_is_found_at_any_depth():
    """Only what can be edited in place is copied and compared again."""
    for value in (1, "a", (1, ("b", None)), relu, Closed(1), ClosedHashed(1), frozenset([1]), np.float32(1)):
        assert not Const.of(value).mutable
    for value in (
        [1],
        (1, [2]),
        {"a": 1},
        np.zeros(1),
        Open(1, []),
        Hashed(1),
        OwnHash(1),
        HashedInPart(1, []),
        types.SimpleNamespace(),
        {1},
        functools.partial(relu, []),
        with_default([]),
    ):
        assert Const.of(value).mutable


@pytest.mark.parametrize(
    ("make", "edit"),
    [(lambda: OwnHash(1), lambda x: setattr(x, "n", 2)), (lambda: HashedInPart(1, []), lambda x: x.names.append("a"))],
    ids=["own hash", "hash of a part"],
)
def test_a_dataclass_with_a_hash_that_can_be_edited(make, edit):
    """It is compared by its fields, and the constant holds a copy."""
    value = make()
    const = Const.of(value)
    assert const == Const.of(make()) == Const.of(const.fresh())
    edit(value)
    assert const != Const.of(value)
    assert const.fresh() == make()


@pytest.mark.parametrize(
    ("value", "edit"),
    [
        (ByIdentity(1), lambda x: setattr(x, "n", 2)),
        (ByIdentity([1]), lambda x: x.n.append(2)),
        (Holder([1]), lambda x: x.x.append(2)),
    ],
    ids=["field", "list", "list in a frozen one"],
)
def test_a_dataclass_by_identity_that_is_edited(value, edit):
    """It stays the same object, and each call sees what its fields hold now."""
    model = nnx.Dict(config=nnx.static(value))
    read = nnx.jit(lambda model: (model.config is value, jnp.array(next(iter(vars(model.config).values())))))
    found = [read(model)]
    edit(value)
    found.append(read(model))
    assert nnx.clone(model).config is value
    assert all(same for same, _ in found)
    assert [x.tolist() for _, x in found] in ([1, 2], [[1], [1, 2]])


def test_a_constant_is_not_edited_with_its_value():
    """A Const holds a copy, and gives out further ones."""
    value = {"a": [1]}
    const = Const.of(value)
    value["a"].append(2)
    assert const.fresh() == {"a": [1]}
    const.fresh()["a"].append(3)
    assert const.fresh() == {"a": [1]}
    assert const != Const.of(value)


FLAT = {
    "list": list,
    "set": set,
    "deque": lambda items: deque(items, maxlen=2000),
    "dict": lambda items: dict.fromkeys(items, 0.5),
    "in an object": lambda items: types.SimpleNamespace(names=[*items], both=({"a": [*items]}, {*items})),
}


@pytest.mark.parametrize("make", FLAT.values(), ids=FLAT)
def test_containers_that_hold_nothing_mutable_are_copied_at_once(make):
    """Not item by item; the copies are equal, and are others."""
    small, large = Const.of(make(range(10))), Const.of(make(range(1000)))
    assert count_calls(large.fresh) == count_calls(small.fresh)
    assert large.fresh() == make(range(1000))
    assert large.fresh() is not large.fresh()


def test_a_container_in_two_places_is_one_in_a_copy():
    shared, nested = [1, 2], [[3], "a"]
    fresh = Const.of([shared, {"again": shared}, nested]).fresh()
    assert fresh == [[1, 2], {"again": [1, 2]}, [[3], "a"]]
    assert fresh[0] is fresh[1]["again"]
    assert fresh[0] is not shared
    assert fresh[2][0] is not nested[0]


def test_copies_share_the_parts_that_are_compared_by_identity():
    """A function, mesh or object inside a list is the very same in each copy."""
    plain, inner, holder = Plain(), closure(1), Holder(1)
    fresh = Const.of([plain, {"f": inner}, jnp.tanh, holder]).fresh()
    assert (fresh[0] is plain, fresh[1]["f"] is inner, fresh[2] is jnp.tanh, fresh[3] is holder) == (True,) * 4
    partial = Const.of(functools.partial(relu, plain, [inner])).fresh()
    assert (partial.args[0] is plain, partial.args[1][0] is inner) == (True, True)


def test_immutable_values_are_not_copied():
    """fresh() of a hashable value is the value."""
    value = (1, Plain())
    assert Const.of(value).fresh() is value


def test_arrays_are_refused():
    """A JAX array cannot be static; the message names its place and the ways out."""
    with pytest.raises(StaticValueError, match=r"float32\[2\] at layers\[0\]\.table .*nnx\.static.*NumPy"):
        Const.of([jnp.ones(2)], ("layers", 0, "table"))
    for opaque in deque([1]), Open(1, []):  # in these there may be one, but not beside them
        with pytest.raises(StaticValueError, match="declared static"):
            Const.of([opaque, jnp.ones(2)])


@pytest.mark.parametrize("base", [int, float, Exception, zip, memoryview])
def test_objects_that_cannot_be_compared_are_refused(base):
    """No hash, and attributes are not all that there is: the message names type, place and remedy."""
    if base is memoryview:  # no class can inherit from it
        value = memoryview(bytearray(b"a"))
    else:
        value = type("Hidden", (base,), {"__hash__": None})()
    with pytest.raises(StaticValueError, match=rf"at a\.b of type {type(value).__name__} .*__eq__ and __hash__"):
        Const.of([value], ("a", "b"))


class Listing(collections.abc.Sequence):
    """A list with no hash, and a reference to the configuration that it is a part of."""

    def __init__(self, *items):
        self.items, self.parent = list(items), {"child": self}

    def __getitem__(self, index):
        return self.items[index]

    def __len__(self):
        return len(self.items)

    def __eq__(self, other):
        return self.items == other.items


@dataclasses.dataclass
class Derived:
    """A mutable dataclass, which has no hash, with an attribute that is no field."""

    size: int

    def __post_init__(self):
        self.half = self.size // 2

    @functools.cached_property
    def double(self):
        return self.size * 2


class Restored:
    """As a configuration of ml_collections: a copy has its attributes in another order, and not all of them."""

    __hash__ = None

    def __init__(self, size):
        self.kind, self.size, self.sort = int, size, False

    def __setstate__(self, state):
        self.size, self.kind, self.sort = state["size"], state["kind"], True


class Items(collections.abc.Mapping):
    """A dict with no hash, and a reference to the configuration that it is a part of."""

    def __init__(self, **items):
        self.items_, self.parent = items, {"child": self}

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class Configuration(Items, collections.abc.MutableMapping):
    """As a dict of OmegaConf: its hash is that of what it holds now, and some items cannot be read."""

    def __getitem__(self, key):
        if self.items_[key] == "???":
            raise ValueError("missing")
        return super().__getitem__(key)

    def __setitem__(self, key, value):
        self.items_[key] = value

    def __delitem__(self, key):
        del self.items_[key]

    def __repr__(self):
        return repr(self.items_)

    def __hash__(self):
        return hash(tuple(self.items_.values()))  # the same for -1 and -2

    def __eq__(self, other):
        return isinstance(other, Configuration) and self.items_ == other.items_


class Unshown(Configuration):
    """With the repr of every object, which has an address that no copy has."""

    __repr__ = object.__repr__
    __hash__ = Configuration.__hash__


def change_half(value):
    value.half = 3


def change_slot(value):
    value.rate = 3


def change_dict(value):
    value.extra = 3


UNHASHABLE = {
    "slots": (lambda: OnlySlots(2), change_slot),
    "slots beside attributes": (lambda: Slots(2), change_slot),
    "slots and attributes": (lambda: Slots(2), change_dict),
    "dataclass": (lambda: Derived(2), change_half),
    "restored": (lambda: Restored(2), lambda value: setattr(value, "size", 3)),
    "mapping": (lambda: Items(a=1, b=[2]), lambda value: value["b"].append(3)),
    "mapping with a hash": (lambda: Configuration(a="???", b=-1), lambda value: value.update(b=-2)),
    "mapping with a hash, not shown": (lambda: Unshown(a=1), lambda value: value.update(a=2)),
    "sequence": (lambda: Listing(1, [2]), lambda value: value.items[1].append(3)),
    "array": (lambda: array.array("i", [1, 2]), lambda value: value.append(3)),
}


@pytest.mark.parametrize("kind", UNHASHABLE)
def test_objects_without_a_hash_are_compared_by_what_they_hold(kind):
    """By slots as well as attributes; a sequence by its items, whatever else it refers to."""
    make, change = UNHASHABLE[kind]
    value = make()
    const = Const.of(value)
    assert const.mutable
    assert const == Const.of(make()) == Const.of(const.fresh())
    change(value)
    assert const != Const.of(value)
    assert Const.of(array.array("i", [1])) != Const.of(array.array("I", [1]))


@pytest.mark.parametrize("hash_", [id, object.__hash__, lambda x: hash(id(x))], ids=["id", "object", "hash of id"])
def test_a_mapping_that_is_hashed_by_identity_stays_the_same_object(hash_):
    config = type("ByIdentity", (Configuration,), {"__hash__": lambda self: hash_(self)})(a=1)
    model = nnx.Dict(config=nnx.static(config))
    same = nnx.jit(lambda model: model.config is config)
    assert same(model)
    assert same(model)
    assert model.config is config


OPAQUE = {
    "a dataclass": (Derived, lambda config, array: setattr(config, "size", array)),
    "a dataclass, besides its fields": (Derived, lambda config, array: setattr(config, "table", array)),
    "a namespace": (lambda size: types.SimpleNamespace(), lambda space, array: setattr(space, "size", array)),
    "a deque": (lambda size: deque([size]), lambda queue, array: queue.__setitem__(0, array)),
    "a dict in a dataclass": (Derived, lambda config, array: setattr(config, "size", {"a": [array]})),
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_an_object_that_jax_does_not_look_into_may_hold_an_array(kind):
    """It is compared by identity, so another one is another program."""
    make, put = OPAQUE[kind]
    config, table = make(2), jnp.ones(2)
    put(config, table)
    before = Const.of(config)
    assert Const.of(config) == before
    again = before.fresh()
    assert again is not config
    assert Const.of(again) == before
    put(config, jnp.ones(2))
    assert Const.of(config) != before


@pytest.mark.parametrize("kind", [kind for kind in OPAQUE if "besides" not in kind])
def test_such_an_array_cannot_be_computed_while_tracing(kind):
    """The message names the place and the type that hides it from JAX."""
    make, put = OPAQUE[kind]

    @jax.jit
    def f(x):
        config = make(2)
        put(config, x)
        return Const.of(config, ("a", "b"))

    with pytest.raises(StaticValueError, match=rf"float32\[2\] in the {type(make(2)).__name__} at a\.b .*a list, a"):
        f(jnp.ones(2))


def test_what_a_cached_property_keeps_is_not_compared():
    """An object is the same program before and after somebody has asked for such a property."""
    used = Derived(2)
    assert used.double == 4
    assert Const.of(used) == Const.of(Derived(2))


def test_values_that_contain_themselves_are_refused():
    """Recursion ends in an error that names the place."""
    value = [1]
    value.append(value)
    with pytest.raises(StaticValueError, match=r"at a contains itself"):
        Const.of(value, ("a",))
    assert issubclass(StaticValueError, TypeError)


CONSTANTS = [1, [1, {"a": 2}], Closed(2), relu, np.arange(2), Open(1, ["a"]), (0.0, -0.0)]


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("value", CONSTANTS, ids=lambda x: getattr(x, "__name__", repr(x)))
def test_constants_can_be_copied_and_pickled(value, copier):
    """The copy is equal, with an equal hash."""
    const = Const.of(value)
    assert (copier(const) == const, hash(copier(const)) == hash(const)) == (True, True)


def test_mappings_of_items():
    """of_items freezes metadata; same_items compares two mappings where == would fail on an array."""
    assert Const.of_items({"a": [1]}) == Const.of_items({"a": [1]})
    assert Const.of_items({"a": 1}) != Const.of_items({"a": True})
    assert same_items({"a": np.arange(2)}, {"a": np.arange(2)})
    assert not same_items({"a": np.arange(2)}, {"a": np.arange(3)})
    assert repr(Const.of([1])) == "[1]"


METADATA_ARRAYS = {
    "array": lambda: jnp.arange(3.0),
    "random key": lambda: jax.random.key(0),
    "in an object": lambda: Open(1, [jnp.ones(2)]),
    "argument of a partial": lambda: functools.partial(relu, jnp.ones(())),
}


@pytest.mark.parametrize("make", METADATA_ARRAYS.values(), ids=METADATA_ARRAYS)
def test_arrays_in_metadata_are_known_in_a_trace(make):
    """Copies of the object that are made there have them, too, and inner transformations take it."""
    layer = nnx.Dict(w=nnx.Param(jnp.ones(2), held=make()))

    @nnx.jit
    def f(layer):
        copies = nnx.clone(layer), copy.deepcopy(layer), nnx.merge(*nnx.split(layer))
        return [nnx.grad(lambda m: m.w.sum())(m).w.value for m in copies], copies[1]

    grads, made = f(layer)
    np.testing.assert_array_equal(grads, np.ones((3, 2)))
    assert same_items(made.w.get_metadata(), layer.w.get_metadata())


@pytest.mark.parametrize("make", METADATA_ARRAYS.values(), ids=METADATA_ARRAYS)
def test_arrays_in_metadata_are_compared_by_value(make):
    """Equal ones have equal keys, also after a copy or a pickle."""
    const = Const.of_items({"a": make()})
    for other in Const.of_items({"a": make()}), copy.deepcopy(const), pickle.loads(pickle.dumps(const)):
        assert (other == const, hash(other) == hash(const)) == (True, True)


def test_copies_of_metadata_for_a_trace_share_the_arrays():
    """A copy of an array would be a tracer there; the dict itself may be edited."""
    bounds = {"low": jnp.full(2, -7.5)}
    const = Const.of_items({"bounds": bounds})

    def f(x):
        found = const.fresh()["bounds"]
        assert found is not bounds
        assert found["low"] is bounds["low"]
        return x

    jax.jit(f)(1.0)
    layer = nnx.Dict(w=nnx.Param(jnp.ones(2), bounds=bounds))
    clip = nnx.jit(lambda layer: jnp.clip(layer.w, layer.w.bounds["low"], 0.5))
    for model in layer, nnx.clone(layer):
        assert (clip(model) == 0.5).all()
    assert clip._cache_size() == 1


OTHER_ARRAYS = {
    "value": jnp.zeros(2),
    "shape": jnp.ones((2, 1)),
    "dtype": jnp.ones(2, jnp.int32),
    "weak type": jnp.broadcast_to(jnp.asarray(1.0), (2,)) * 1.0,
    "NumPy": np.ones(2, np.float32),
    "key": jax.random.key(0),
}


@pytest.mark.parametrize("other", OTHER_ARRAYS.values(), ids=OTHER_ARRAYS)
def test_arrays_in_metadata_of_other_programs_have_other_keys(other):
    assert not same_items({"a": jnp.ones(2)}, {"a": other})


def test_a_deleted_array_in_metadata_is_equal_to_itself_only():
    """It cannot be read."""
    gone, other = jnp.ones(2), jnp.ones(2)
    gone.delete()
    assert same_items({"a": gone}, {"a": gone})
    assert not same_items({"a": gone}, {"a": other})


def test_tracers_in_metadata_are_refused():
    """They are known in one trace only; the message names the place and the ways out."""

    def f(x):
        with pytest.raises(StaticValueError, match=r"p\.metadata holds float32\[2\].*NumPy.*attribute"):
            Const.of_items({"bound": x}, ("p", "metadata"))
        return x

    jax.jit(f)(jnp.ones(2))


def test_a_dataclass_with_a_hash_and_fields_that_cannot_be_compared():
    holder = Holder(jnp.ones(1))
    assert Const.of(holder) == Const.of(holder) != Const.of(Holder(jnp.ones(1)))


class Owned(dict):
    """A dict that refers to an object, which reports its changes."""

    def __init__(self, owner, items):
        super().__init__(items)
        self.owner = owner


class Owner:
    def __init__(self):
        self.lock = threading.Lock()


def test_what_the_attributes_of_a_dict_refer_to_is_not_copied():
    """It is not compared either. A lock in it could not be copied."""
    owner = Owner()
    value = Owned(owner, {"sizes": [1, 2]})
    const = Const.of(value)
    assert const == Const.of(Owned(Owner(), {"sizes": [1, 2]})) != Const.of(Owned(owner, {"sizes": [1]}))
    copied = const.fresh()
    assert type(copied) is Owned
    assert copied.owner is owner
    copied["sizes"].append(3)
    assert value == {"sizes": [1, 2]}


class OwnDict(dict):
    """A configuration whose attributes are its items; ``copy.deepcopy`` makes one without the attributes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class LookedUp(dict):
    """Another; ``copy.deepcopy`` looks its methods up among the items, and fails."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Slotted(dict):
    """One without attributes of its own."""

    __slots__ = ()
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Ordered(OrderedDict):
    __getattr__ = OrderedDict.__getitem__


@pytest.mark.parametrize("kind", [OwnDict, LookedUp, Slotted, Ordered])
def test_a_dict_whose_attributes_are_its_items_is_copied(kind):
    """Nested, shared, and beside anything else; a copy is independent, and a copy of a copy is one, too."""
    inner = kind(rate=1.0, sizes=[1], items=2)
    value = [kind(second=inner, first=inner, shape=(2, 3), dtype="f4"), types.SimpleNamespace(inner=inner)]
    const = Const.of(value)
    inner["sizes"].append(2)
    assert const != Const.of(value)
    for fresh in (const.fresh(), const.fresh()):
        outer, namespace = fresh
        assert type(outer) is type(outer.first) is kind
        assert outer.first is outer.second is outer["first"] is namespace.inner
        assert list(outer) == ["second", "first", "shape", "dtype"]
        assert (outer.first.rate, outer.first.sizes) == (1.0, [1])
        assert Const.of(fresh) == const
        outer.first["rate"] = 2.0
        assert outer.first.rate == 2.0


@pytest.mark.parametrize("kind", [OwnDict, LookedUp, Slotted, Ordered])
def test_changes_of_a_dict_whose_attributes_are_its_items_are_seen(kind):
    class Net(nnx.Module):
        def __init__(self, config):
            self.config, self.w = config, nnx.Param(jnp.float32(1))

        def __call__(self):
            return self.config.inner.rate * self.w

    net = Net(kind(inner=kind(rate=1.0), items=[], keys=1))
    jitted = nnx.jit(net)
    for rate in (2.0, 3.0, 2.0):
        net.config["inner"]["rate"] = rate
        assert jitted() == net() == nnx.clone(net)() == nnx.merge(*nnx.split(net))() == rate
        assert nnx.grad(lambda net: net())(net).w.value == rate
    assert "config" in jitted.explain()
    assert "config" in repr(nnx.graphdef(net))


class Frozen(dict):
    """A configuration that refuses to be edited, by which ``copy.deepcopy`` would fill its copy."""

    def __setitem__(self, key, value):
        raise TypeError("Frozen is immutable")


class FrozenOrdered(OrderedDict):
    """Another, as some pipelines keep it: once made; its items are attributes, too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        vars(self).update(self, frozen=True)

    def __setitem__(self, key, value):
        if vars(self).get("frozen"):
            raise TypeError("FrozenOrdered is immutable")
        super().__setitem__(key, value)


class Named(OrderedDict):
    """One whose constructor wants a name; deepcopy calls it without."""

    def __init__(self, name, items):
        super().__init__(items)
        self.name = name


class Counted(defaultdict):
    """One that counts what is set, and makes what is missing."""

    count = 0

    def __setitem__(self, key, value):
        self.count += 1
        super().__setitem__(key, value)


@pytest.mark.parametrize(
    "make", [Frozen, FrozenOrdered, functools.partial(Named, "config"), functools.partial(Counted, list)]
)
def test_a_dict_is_copied_whatever_its_methods_do(make):
    items = {"size": 2, "sizes": [1]}

    class Net(nnx.Module):
        def __init__(self):
            self.config, self.w = make(items), nnx.Param(jnp.float32(3))

        def __call__(self):
            return self.w * self.config["size"] * len(self.config["sizes"])

    net = Net()
    copied = nnx.merge(*nnx.split(net)), nnx.clone(net)
    items["sizes"].append(2)
    assert nnx.jit(net)() == net() == 12
    assert [nnx.jit(model)() for model in copied] == [6, 6]
    for config in (model.config for model in copied):
        assert type(config) is type(net.config)
        assert list(config.items()) == [("size", 2), ("sizes", [1])]
        assert vars(config) == {**vars(net.config), **({"sizes": [1]} if "sizes" in vars(net.config) else {})}
    assert [model.config["more"] for model in copied if hasattr(net.config, "default_factory")] in ([], [[], []])


class FrozenList(list):
    """A list that refuses to be edited, once made."""

    def __init__(self, items, unit):
        super().__init__(items)
        self.unit = unit

    def append(self, item):
        raise TypeError("FrozenList is immutable")

    extend = __setitem__ = append


def test_a_list_is_copied_whatever_its_methods_do():
    class Net(nnx.Module):
        def __init__(self):
            self.sizes, self.w = FrozenList([2, [1]], "m"), nnx.Param(jnp.float32(3))

        def __call__(self):
            return self.w * self.sizes[0] * len(self.sizes[1])

    net = Net()
    copied = nnx.merge(*nnx.split(net)), nnx.clone(net)
    net.sizes[1].append(2)
    assert nnx.jit(net)() == net() == 12
    assert [nnx.jit(model)() for model in copied] == [6, 6]
    assert [(type(model.sizes), model.sizes, model.sizes.unit) for model in copied] == [(FrozenList, [2, [1]], "m")] * 2


def test_a_view_of_a_dict_is_copied_with_its_items():
    """Else a second model with an equal view would be given that of the first, whose dict may have changed since."""

    class Net(nnx.Module):
        def __init__(self, rates):
            self.w, self.config = nnx.Param(jnp.float32(1)), types.MappingProxyType(rates)

        def __call__(self):
            return self.config["rate"] * self.w * self.config["all"][0]

    rates = {"rate": 1.0, "all": [2.0]}
    first = Net(rates)
    taken_apart = nnx.split(first)
    jitted = nnx.jit(first)
    assert jitted() == 2.0
    rates["rate"] = 4.0
    rates["all"][0] = 3.0
    assert jitted() == first() == 12.0
    second = Net({"rate": 1.0, "all": [2.0]})
    assert nnx.jit(second)() == nnx.merge(*taken_apart)() == nnx.clone(second)() == second() == 2.0
    assert first.config["rate"] == 4.0
