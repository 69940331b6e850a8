"""Pytrees: plain mutable Python objects whose attributes nnxlib sees."""

import abc
import copy
import dataclasses
import dis
import functools
import gc
import pickle
import sys
import sysconfig
import threading
import types
import typing
import weakref
from collections import OrderedDict, namedtuple

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.tables import table_of


class Layer(nnx.Module):
    def __init__(self, n=2):
        self.w = nnx.Param(jnp.ones(n))
        self.n = n

    def __call__(self, x):
        return x * self.w


def tanh(x):
    return jnp.tanh(x)


class Net(nnx.Module):
    def __init__(self):
        self.first = Layer()
        self.layers = [Layer(), Layer()]
        self.scale = jnp.ones(())
        self.act = tanh


def state_paths(node):
    return [path for path, _ in nnx.state(node).flat_state()]


# --- values that hold nodes without being nodes ---


def test_foreign_containers_are_followed():
    """Attributes of OrderedDicts, named tuples and registered dataclasses that hold Modules change over time."""
    Pair = namedtuple("Pair", "a b")

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Box:
        inner: Layer

    m = nnx.Dict(od=OrderedDict(x=Layer()), pair=Pair(Layer(), [Layer()]), box=Box(Layer()))
    count = nnx.jit(lambda m: len(nnx.state(m).flat_state()))
    assert (count(m), type(m["od"]), type(m["pair"])) == (4, OrderedDict, Pair)
    m["od"]["y"] = Layer()
    m["pair"].b.append(Layer())
    assert count(m) == 6
    m["box"].inner.w.value = jnp.zeros(2)
    assert nnx.jit(lambda m: m["box"].inner.w.sum())(m).item() == 0
    assert state_paths(m)[0] == ("box", "inner", "w")


@dataclasses.dataclass
class Config:
    rngs: typing.Any
    n: int = 3


def test_a_dataclass_that_holds_an_rngs():
    """A plain dataclass with an Rngs in it gives another key at each call of a jitted function."""
    m = Layer()
    m.config = Config(nnx.Rngs(0))
    draw = nnx.jit(lambda m: jax.random.uniform(m.config.rngs.params()))
    assert draw(m).item() != draw(m).item()
    assert (m.config.rngs.params.count.value.item(), type(m.config), m.config.n) == (2, Config, 3)


class Holder:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


class ListOfOne(list):
    def __call__(self, x):
        return self[0](x)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda layer: functools.partial(lambda layer, x: layer(x), layer),
        lambda layer: lambda x: layer(x),
        Holder,
        lambda layer: ListOfOne([layer]),
    ],
    ids=["partial", "closure", "object", "subclass of list"],
)
def test_a_module_inside_a_static_value_is_never_stale(wrap):
    """A Module that a static attribute holds is seen with its present weights, like one in a closure."""
    m, inner = Layer(), Layer()
    m.f = wrap(inner)
    f = nnx.jit(lambda m: m.f(1.0).sum())
    assert f(m).item() == 2
    inner.w.value = jnp.zeros(2)
    assert f(m).item() == 0


def test_a_bound_method_of_a_module():
    """A bound method as an attribute keeps its Module in the graph: shared, and never stale."""
    m = Net()
    m.f = m.first.__call__
    m.g = Layer().__call__
    f = nnx.jit(lambda m: (m.f(1.0) + m.g(1.0)).sum())
    assert f(m).item() == 4
    m.first.w.value = jnp.zeros(2)
    m.g.__self__.w.value = jnp.zeros(2)
    assert f(m).item() == 0
    clone = nnx.clone(m)
    assert clone.f.__self__ is clone.first
    assert len(jax.tree.leaves(m)) == 5


def test_a_bound_method_of_a_variable():
    """It keeps its Variable in the graph, too: a copy reads its own, and there is a gradient."""
    m = Layer()
    m.read = m.w.get_value
    clone = nnx.clone(m)
    assert clone.read.__self__ is clone.w
    for grad in (nnx.grad, jax.grad):
        grads = grad(lambda m: (m.read() * m.w).sum())(m)
        assert [x.tolist() for x in jax.tree.leaves(grads)] == [[2, 2]]
    read = nnx.jit(lambda m: m.read().sum())
    assert read(m) == 2
    m.w.value = jnp.zeros(2)
    assert read(m) == 0


def test_a_node_inside_a_static_value_is_shared_and_not_copied():
    """What holds a Module without being a pytree is static: the very Module stays in it, through jit and merge."""
    m, inner = Layer(), Layer()
    m.config = Config(inner)
    assert nnx.jit(lambda m: m)(m).config.rngs is inner
    assert nnx.merge(*nnx.split(m)).config.rngs is inner
    nnx.jit(lambda m: setattr(m.config.rngs, "n", 3))(m)
    assert inner.n == 3


# --- plain attributes ---


def test_attributes_work_as_in_any_python_object():
    """Set, get, delete, hasattr, vars and dir."""
    m = Layer()
    m.extra = 1
    assert (m.extra, hasattr(m, "extra"), vars(m)["extra"]) == (1, True, 1)
    assert {"w", "n", "extra", "train"} <= set(dir(m))
    del m.extra
    assert not hasattr(m, "extra")
    with pytest.raises(AttributeError, match="extra"):
        del m.extra
    with pytest.raises(AttributeError, match="missing"):
        m.missing
    m.pair = pair = (1, "a")
    assert m.pair is pair
    m.pair = ([1], 2)
    assert type(m.pair[0]) is nnx.List


def test_none_and_then_a_module():
    """An attribute that was None may become a Module, a Variable or an array, and None again, under one jit."""
    m = Layer()
    m.proj = None
    count = nnx.jit(lambda m: 0 if m.proj is None else len(jax.tree.leaves(m.proj)))
    assert count(m) == 0
    for value, leaves in [(Layer(), 1), (nnx.Param(1.0), 1), (jnp.ones(2), 1), ([Layer(), Layer()], 2), (None, 0)]:
        m.proj = value
        assert count(m) == leaves


def test_private_attributes_are_attributes():
    """A leading underscore does not hide a Variable."""
    m = Layer()
    m._hidden = nnx.Param(1.0)
    assert state_paths(m) == [("_hidden",), ("w",)]


def test_modules_are_equal_and_hashed_by_identity():
    """Two Modules with equal contents are different, and may be keys."""
    a, b = Layer(), Layer()
    assert a != b
    assert {a: 1, b: 2}[a] == 1


def test_lists_and_dicts_become_nodes_on_assignment():
    """Plain containers at any depth become List and Dict; a list that occurs twice in one value stays one list."""
    m, shared = Layer(), [1]
    m.tree = {"a": [Layer(), ({"b": [nnx.Param(1.0)]},)], "s": [shared, shared]}
    assert (type(m.tree), type(m.tree["a"]), type(m.tree["a"][1]), type(m.tree["a"][1][0])) == (
        nnx.Dict,
        nnx.List,
        tuple,
        nnx.Dict,
    )
    assert isinstance(m.tree, dict)
    assert isinstance(m.tree["a"], list)
    assert m.tree["s"][0] is m.tree["s"][1]
    assert state_paths(m) == [("tree", "a", 0, "w"), ("tree", "a", 1, 0, "b", 0), ("w",)]


def test_a_list_of_arrays_alone_becomes_a_node_unless_it_is_declared_data():
    """An item that is set later is seen like any other; what is declared data stays a pytree of built-in containers."""
    m = Layer()
    m.buffers, m.batch = [jnp.zeros(1), jnp.ones(1)], nnx.data([jnp.zeros(1)])
    assert (type(m.buffers), type(m.batch)) == (nnx.List, list)
    m.buffers, m.batch = {"x": jnp.zeros(1)}, {"x": jnp.zeros(1)}
    assert (type(m.buffers), type(m.batch)) == (nnx.Dict, dict)


def test_structural_changes_are_noticed_and_values_are_not():
    """Replacing an array by an array is no change of structure; a static value, another type, a deletion are."""
    m = Net()

    def changes(action):
        stamp = table_of(m).stamp
        action()
        return not stamp.valid

    assert not changes(lambda: setattr(m, "scale", jnp.zeros(3)))
    assert not changes(lambda: setattr(m.first.w, "value", jnp.zeros(3)))
    assert changes(lambda: setattr(m, "act", jnp.sin))
    assert changes(lambda: setattr(m, "scale", 1.0))
    assert changes(lambda: setattr(m.layers[0], "n", 7))
    assert changes(lambda: m.layers.append(None))
    assert changes(lambda: delattr(m, "act"))
    assert changes(lambda: setattr(m, "first", Layer()))


def test_the_same_value_again_is_no_change():
    """`m.x = m.x` leaves what is known of the structure."""
    m = Net()
    stamp = table_of(m).stamp
    m.act, m.first, m.layers = m.act, m.first, m.layers
    assert stamp.valid


# --- traces ---

WRITES = {
    "array": lambda m, x: setattr(m.layers[1], "cache", x),
    "plain": lambda m, x: setattr(m.layers[1], "n", 5),
    "None to array": lambda m, x: setattr(m.layers[1], "nothing", x),
    "new": lambda m, x: setattr(m.layers[1], "new", 1),
    "module": lambda m, x: setattr(m.layers[1], "w", Layer()),
    "delete": lambda m, x: delattr(m.layers[1], "n"),
    "class": lambda m, x: setattr(m.layers[1], "__class__", Net),
    "vars": lambda m, x: vars(m.layers[1]).update(n=5),
}


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jax.make_jaxpr])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_from_another_trace_is_refused_and_changes_nothing(write, transform):
    """Under a raw JAX transform each way to write an attribute raises, naming attribute and path."""
    model = Net()
    model.layers[1].cache, model.layers[1].nothing = jnp.zeros(2), None
    before = dict(vars(model.layers[1]))

    def f(x):
        write(model, x)
        return x.sum()

    with pytest.raises(nnx.TraceContextError, match=r"(set|delete) attribute '\w+' of Layer at model\.layers\[1\]"):
        transform(f)(jnp.ones(2))
    after = vars(model.layers[1])
    assert type(model.layers[1]) is Layer
    assert after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())


def test_objects_made_inside_a_trace_may_be_written_there():
    """A Module made inside jax.jit belongs to that trace."""

    @jax.jit
    def f(x):
        m = Layer()
        m.w.value, m.x, m.n = m.w + x, x, 5
        m.more = [x]
        m.more.append(x)
        del m.n
        return m(x).sum() + m.more[1].sum()

    assert f(jnp.ones(2)).item() == 6


def test_reading_attributes_under_a_raw_transform_is_legal():
    """A closed-over Module is read, its forward run, and it stays concrete."""
    model = Net()
    f = lambda x: (model.act(model.first(x)) * model.scale).sum()
    assert jax.jit(f)(jnp.ones(2)).item() == pytest.approx(float(f(jnp.ones(2))))
    assert jax.grad(f)(jnp.ones(2)).shape == (2,)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(model))


def test_a_refused_write_names_the_path_from_self():
    """Inside a method the path starts at the class of `self`, or at the outermost variable that reaches it."""

    class Outer(nnx.Module):
        def __init__(self):
            self.inner = Layer()

        def run(self):
            return jax.jit(lambda x: setattr(self.inner, "n", x))(1.0)

    with pytest.raises(nnx.TraceContextError, match=r"of Layer at Outer\.inner"):
        Outer().run()


# --- classes ---


def test_a_descriptor_that_a_class_itself_has_no_value_of():
    """Making the class does not ask for it: the descriptor may raise any error."""

    class PerObject:
        def __init__(self):
            self.values = {}

        def __get__(self, node, cls=None):
            return self.values[id(node)]

        def __set__(self, node, value):
            self.values[id(node)] = value

    class Layer(nnx.Module):
        size = PerObject()

    layer = Layer()
    layer.size = 3
    assert layer.size == 3


@pytest.mark.parametrize("base", [nnx.Module, nnx.Pytree])
def test_abstract_methods_without_abc(base):
    """A node is refused as a subclass of abc.ABC is, while a method that is marked as abstract has no body."""

    class Layer(base):
        @property
        @abc.abstractmethod
        def size(self): ...

        @abc.abstractmethod
        def __call__(self, x): ...

    class Half(Layer):
        size = 3

    class Whole(Half):
        def __call__(self, x):
            return x

    with pytest.raises(TypeError, match=r"abstract class Layer .*__call__.*size"):
        Layer()
    with pytest.raises(TypeError, match=r"abstract class Half .*__call__"):
        Half()
    assert nnx.merge(*nnx.split(Whole()))(1) == 1


def test_abc_as_a_base():
    """abc.ABC works on either side; an abstract class cannot be made."""

    class Abstract(nnx.Module, abc.ABC):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(1))

        @abc.abstractmethod
        def run(self): ...

    class Concrete(Abstract):
        def run(self):
            return self.w.sum()

    with pytest.raises(TypeError, match="abstract"):
        Abstract()
    assert nnx.jit(lambda m: m.run())(Concrete()).item() == 1


def test_protocol_as_a_base():
    """A Protocol as a base class, before or after Module, does not clash."""

    @typing.runtime_checkable
    class Runs(typing.Protocol):
        def run(self) -> jax.Array: ...

    class After(nnx.Module, Runs):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(1))

        def run(self):
            return self.w.sum()

    class Before(Runs, nnx.Module):
        __init__, run = After.__init__, After.run

    for cls in (After, Before):
        m = cls()
        assert nnx.jit(lambda m: m.run())(m).item() == 1
        assert isinstance(m, Runs)


def test_metaclasses_derived_from_that_of_modules():
    """A library combines type(nnx.Module) with another metaclass, or gives a class all metaclasses of its bases."""

    @typing.runtime_checkable
    class Runs(typing.Protocol):
        def run(self) -> jax.Array: ...

    class Counting(type):
        made = 0

        def __new__(mcs, name, bases, namespace, **kwargs):
            Counting.made += 1
            return super().__new__(mcs, name, bases, namespace, **kwargs)

    class Plain:
        pass

    class Counted(metaclass=Counting):
        pass

    class OfAbc(type(nnx.Module), abc.ABCMeta):
        def __call__(cls, *args):
            made = super().__call__(*args)
            made.called = args
            return made

    class OfProtocol(type(nnx.Module), type(Runs)):
        pass

    class OfCounting(nnx.module.ModuleMeta, Counting):
        pass

    class OfBoth(*{type(base) for base in (Plain, nnx.Module) if type(base) is not type}):
        pass

    for base, meta in ((abc.ABC, OfAbc), (Runs, OfProtocol), (Counted, OfCounting), (Plain, OfBoth)):

        class Layer(nnx.Module, base, metaclass=meta):  # type: ignore[misc]
            def __init__(self, size):
                self.w = nnx.Param(jnp.ones(size))

            def run(self):
                return self.w.sum()

        layer = nnx.jit(lambda m: m)(Layer(2))
        assert type(layer) is Layer
        assert isinstance(layer, base)
        assert isinstance(layer, Runs)
        assert nnx.jit(Layer.run)(nnx.merge(*nnx.split(layer))) == 2
    assert Counting.made == 2  # Counted and one Layer


def test_virtual_subclasses():
    """A class that is registered with a Module class counts as one derived from it."""

    class Layer(nnx.Module):
        pass

    @Layer.register
    class Other:
        pass

    assert isinstance(Other(), Layer)
    assert issubclass(Other, nnx.Module)
    assert not isinstance(Other(), nnx.Linear)


def test_generic_as_a_base():
    """typing.Generic on either side, subscripted classes included."""
    T = typing.TypeVar("T")

    class After(nnx.Module, typing.Generic[T]):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(1))

    class Before(typing.Generic[T], nnx.Module):
        __init__ = After.__init__

    for cls in (After, After[int], Before, Before[int]):
        assert state_paths(cls()) == [("w",)]
        assert state_paths(nnx.jit(lambda m: m)(cls())) == [("w",)]


class Mixin:
    """A configuration mixin with a decorated __init__."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        init = cls.__init__

        @functools.wraps(init)
        def wrapped(self, *args, **kwargs):
            self.config = {"args": args}
            init(self, *args, **kwargs)

        cls.__init__ = wrapped

    @functools.cached_property
    def size(self):
        return 42


class MixinFirst(Mixin, nnx.Module):
    def __init__(self, n):
        self.w = nnx.Param(jnp.ones(n))


class MixinLast(nnx.Module, Mixin):
    def __init__(self, n):
        self.w = nnx.Param(jnp.ones(n))


@pytest.mark.parametrize("cls", [MixinFirst, MixinLast])
def test_plain_mixins(cls):
    """A plain class as the first or last base: attributes, jit, copies."""
    m = cls(3)
    assert (m.config["args"], state_paths(m), nnx.jit(lambda m: m.w.sum())(m).item()) == ((3,), [("w",)], 3)
    assert state_paths(pickle.loads(pickle.dumps(copy.deepcopy(m)))) == [("w",)]


@pytest.mark.parametrize("cls", [MixinFirst, MixinLast])
def test_writes_that_go_through_the_dict_of_a_module_with_mixins_are_seen(cls):
    """cached_property and vars(m) write into `__dict__`, also when a plain class comes first and owns it."""
    m = cls(3)
    names = nnx.jit(lambda m: len(vars(m)))
    assert names(m) == 2
    assert m.size == 42
    assert [int(names(m)) for _ in range(8)] == [3] * 8
    vars(m)["more"] = 1
    assert [int(names(m)) for _ in range(8)] == [4] * 8


def test_two_modules_as_bases():
    """Multiple inheritance from Modules with cooperative __init__."""

    class A(nnx.Module):
        def __init__(self):
            super().__init__()
            self.a = nnx.Param(1.0)

    class B(nnx.Module):
        def __init__(self):
            super().__init__()
            self.b = nnx.Param(1.0)

    class C(A, B):
        pass

    assert state_paths(C()) == [("a",), ("b",)]


class OwnSetattr(nnx.Module):
    """Records what is set, and writes around Module.__setattr__."""

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)
        object.__setattr__(self, "last", name)

    def __delattr__(self, name):
        object.__delattr__(self, name)
        object.__setattr__(self, "last", f"no {name}")


def test_a_class_may_define_its_own_setattr():
    """Changes made through a user's __setattr__ and __delattr__ are seen by a jitted function."""
    m = OwnSetattr()
    m.n = 1
    read = lambda: nnx.jit(lambda m: jnp.asarray(getattr(m, "n", 0)))(m).item()
    assert (read(), m.last) == (1, "n")
    m.n = 2
    assert read() == 2
    del m.n
    assert (read(), m.last) == (0, "no n")
    with pytest.raises(nnx.TraceContextError, match="attribute 'n' of OwnSetattr"):
        jax.jit(lambda x: setattr(m, "n", x))(1.0)


class StrictProperty(nnx.Module):
    """Checks a value after it was set, and a deletion after it was made."""

    def __init__(self):
        self._n = 0

    @property
    def n(self):
        return self._n

    @n.setter
    def n(self, value):
        object.__setattr__(self, "_n", value)
        if value < 0:
            raise ValueError(value)

    @n.deleter
    def n(self):
        object.__setattr__(self, "_n", 0)
        raise ValueError("n")


class Strict(nnx.Module):
    """The same in methods of its own."""

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)
        if name == "n" and value < 0:
            raise ValueError(value)

    def __delattr__(self, name):
        object.__delattr__(self, name)
        raise ValueError(name)


@pytest.mark.parametrize("kind", [Strict, StrictProperty])
def test_what_was_written_before_setting_failed_is_seen(kind):
    """By a jitted function that was called before."""
    m, read = kind(), nnx.jit(lambda m: jnp.asarray(getattr(m, "n", 0)))
    m.n = 1
    for _ in range(5):  # past the uses of a record that are checked
        assert read(m) == 1
    with pytest.raises(ValueError, match="-1"):
        m.n = -1
    assert read(m) == -1
    with pytest.raises(ValueError, match="n"):
        del m.n
    assert read(m) == 0


def test_own_setattr_with_super():
    """Calling super().__setattr__ adopts lists as usual."""

    class Loud(nnx.Module):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)

    m = Loud()
    m.layers = [Layer()]
    f = nnx.jit(lambda m: len(m.layers))
    assert (type(m.layers), f(m)) == (nnx.List, 1)
    m.layers.append(Layer())
    assert f(m) == 2


class Slotted(nnx.Module):
    __slots__ = ("name", "w")

    def __init__(self):
        self.w, self.name, self.other = nnx.Param(jnp.ones(2)), "a", 3


def test_slots():
    """Attributes in __slots__ of a subclass are attributes like the others."""
    m = Slotted()
    assert state_paths(m) == [("w",)]
    for made in (nnx.merge(*nnx.split(m)), nnx.clone(m), copy.deepcopy(m), pickle.loads(pickle.dumps(m)), copy.copy(m)):
        assert (made.name, made.other, made.w.value.tolist()) == ("a", 3, [1, 1])
    f = nnx.jit(lambda m: m.w.sum() + len(m.name))
    assert f(m).item() == 3
    m.name = "abc"
    m.w.value = jnp.zeros(2)
    assert f(m).item() == 3
    m.w = jnp.ones(2)
    assert f(m).item() == 5

    def write(m):
        m.w, m.name = m.w + 1, "b"
        del m.other

    nnx.jit(write)(m)
    assert (m.w.tolist(), m.name, hasattr(m, "other")) == ([2, 2], "b", False)


class Private(nnx.Module):
    __slots__ = ("__hidden",)

    def __init__(self):
        self.__hidden = nnx.Param(jnp.ones(2))

    def hidden(self):
        return self.__hidden


def test_private_slots():
    """One with two underscores is known under another name outside of its class."""
    m = Private()
    assert state_paths(m) == [("_Private__hidden",)]
    assert nnx.jit(lambda m: m.hidden().sum())(m) == 2
    assert nnx.clone(m).hidden() is not m.hidden()


def test_slots_of_a_dataclass():
    """With `slots=True` a decorator makes another class, whose slots are found anew."""

    @nnx.dataclass(slots=True)
    class Scale(nnx.Module):
        factor: nnx.Param
        name: str = "scale"

    m = Scale(nnx.Param(jnp.ones(2)))
    assert state_paths(m) == [("factor",)]
    assert (nnx.clone(m).name, copy.deepcopy(m).factor.value.tolist()) == ("scale", [1, 1])


def test_properties_and_descriptors():
    """A property reads and writes through to attributes, also inside jit; a read-only one stays so."""

    class Gauge(nnx.Module):
        def __init__(self):
            self._x = jnp.ones(())

        @property
        def x(self):
            return self._x

        @x.setter
        def x(self, value):
            self._x = value * 2

        @property
        def fixed(self):
            return 1

    m = Gauge()
    m.x = jnp.array(2.0)
    assert m.x.item() == 4
    nnx.jit(lambda m: setattr(m, "x", m.x))(m)
    assert (m.x.item(), list(vars(m))) == (8, ["_x"])
    with pytest.raises(AttributeError):
        m.fixed = 2


def test_a_setter_is_given_what_is_assigned():
    """A list is handed to it as it is, and becomes a node where the setter keeps it."""
    given = []

    class Gauge(nnx.Module):
        @property
        def sizes(self):
            return self._sizes

        @sizes.setter
        def sizes(self, value):
            given.append(value)
            self._sizes = value

    m, sizes = Gauge(), [1, 2]
    m.sizes = sizes
    assert (given[0] is sizes, type(m.sizes)) == (True, nnx.List)


def test_cached_property():
    """functools.cached_property computes once, and its value is an attribute that jit sees."""

    class Table(nnx.Module):
        def __init__(self):
            self.calls = 0

        @functools.cached_property
        def sizes(self):
            self.calls += 1
            return (1, 2)

    m = Table()
    f = nnx.jit(lambda m: len(m.sizes) + 10 * m.calls)
    assert (m.sizes, m.sizes, m.calls, f(m)) == ((1, 2), (1, 2), 1, 12)
    fresh = Table()
    assert (f(fresh), fresh.calls, fresh.sizes) == (12, 1, (1, 2))


class KeptUnderItsName:
    """A descriptor as Python's documentation shows it."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, x, owner=None):
        return x.__dict__[self.name]

    def __set__(self, x, value):
        x.__dict__[self.name] = value

    def __delete__(self, x):
        del x.__dict__[self.name]


class Kept(nnx.Module):
    sizes = KeptUnderItsName()

    def __init__(self):
        self.rate, self.sizes, self.counted = 1.0, [1, 2], nnx.data(3)

    rate = property(lambda self: self.__dict__["rate"], lambda self, x: vars(self).update(rate=x))
    counted = KeptUnderItsName()


def test_a_property_keeps_its_value_under_its_name():
    """In ``__dict__``, or ``vars(m)``: that is noted like any write, and does not call it again."""
    m = Kept()
    read = nnx.jit(lambda m: m.rate * sum(m.sizes) + m.counted)
    assert type(m.sizes) is nnx.List
    assert nnx.to_pure_dict(nnx.state(m)) == {"counted": 3}
    for _ in range(3):
        assert read(m) == 6.0
    m.rate = 2.0
    assert read(m) == 9.0
    m.sizes.append(3)
    assert read(m) == 15.0
    nnx.jit(lambda m: setattr(m, "sizes", [5]))(m)
    assert (read(m), nnx.clone(m).sizes) == (13.0, [5])
    with pytest.raises(nnx.TraceContextError, match="rate"):
        jax.jit(lambda x: setattr(m, "rate", x))(1.0)
    del m.sizes
    assert list(vars(m)) == ["rate", "counted"]


def test_writes_through_vars():
    """`vars(m)[...] = x`, `m.__dict__.update`, `pop` and `del` are seen by a jitted function."""
    m = Layer()
    names = nnx.jit(lambda m: len(vars(m)))
    assert names(m) == 2
    vars(m)["a"] = 1
    m.__dict__.update(b=2, c=[Layer()])
    assert (names(m), type(m.c)) == (5, nnx.List)
    assert vars(m).pop("a") == 1
    del m.__dict__["b"]
    assert (names(m), list(vars(m)), len(m.__dict__)) == (3, ["w", "n", "c"], 3)
    with pytest.raises(KeyError):
        del vars(m)["missing"]
    assert vars(m).copy() == {"w": m.w, "n": 2, "c": m.c}
    assert "n" in vars(m)


def test_all_attributes_set_at_once():
    """`m.__dict__ = {...}`, as in a `__setstate__`, sets and deletes attributes, which a jitted function sees."""
    m = Layer()
    m.gone, sizes = 1, nnx.jit(lambda m: len(vars(m)) * m.n)
    assert sizes(m) == 6
    m.__dict__ = {"w": m.w, "n": 5}
    assert (sizes(m), list(vars(m)), m.n) == (10, ["w", "n"], 5)
    m.__dict__ |= {"n": 7}
    assert sizes(m) == 14

    class Stored(Layer):
        def __getstate__(self):
            return dict(vars(self))

        def __setstate__(self, state):
            self.__dict__ = state

    assert copy.deepcopy(Stored()).n == 2


def test_all_attributes_set_at_once_behind_a_plain_class():
    """A plain class in front of Module has a `__dict__` of its own: what it is given is no attribute, and stays."""

    class Plain:
        pass

    class Mixed(Plain, Layer):
        pass

    m = Mixed()
    m.__dict__ = {"w": m.w, "n": 5}
    assert type(vars(m)) is dict

    @nnx.jit
    def captured():
        m.w += m.n
        return sum(vars(m)["w"])

    @nnx.jit
    def passed(m):
        return len(vars(m)) * m.n

    assert (passed(m), captured(), captured()) == (10, 12, 22)
    m.n = 7
    assert (passed(m), captured()) == (14, 36)
    assert not isinstance(m.w.value, jax.core.Tracer)


def test_own_equality_hash_and_truth():
    """The engine never asks a Module whether it is equal, true or how long it is."""

    class Hostile(nnx.Module):
        def __init__(self, sub=None):
            self.w, self.sub = nnx.Param(jnp.ones(2)), sub

        def __eq__(self, other):
            raise RuntimeError("eq")

        __hash__ = None

        def __bool__(self):
            raise RuntimeError("bool")

        def __len__(self):
            raise RuntimeError("len")

        def __call__(self, x):
            return x * self.w if self.sub is None else self.sub(x) * self.w

    m = Hostile(Hostile())
    m.again = m.sub

    def step(m, x):
        m.w.value = m(x)
        m.sub = Hostile()

    nnx.jit(step)(m, jnp.ones(2))
    copies = (nnx.clone(m), copy.deepcopy(m), nnx.merge(*nnx.split(m)))
    nnx.update(m, nnx.state(m))
    assert len(list(nnx.iter_graph(m))) > 4
    assert nnx.find_duplicates(copies[0]) == []
    assert len(jax.tree.leaves(m)) == 3


def test_an_init_that_raises_halfway():
    """The error comes through, and the class works afterwards; the half-made object is freed."""
    refs = []

    class Fragile(nnx.Module):
        def __init__(self, fail):
            refs.append(weakref.ref(self))
            self.a = nnx.Param(1.0)
            if fail:
                raise RuntimeError("halfway")
            self.b = nnx.Param(2.0)

    with pytest.raises(RuntimeError, match="halfway"):
        Fragile(True)
    gc.collect()
    assert refs[0]() is None
    assert state_paths(Fragile(False)) == [("a",), ("b",)]
    with pytest.raises(RuntimeError, match="halfway"):
        nnx.jit(lambda: Fragile(True))()


def test_a_module_with_pytree_false():
    """Raw JAX sees a leaf; nnxlib carries it like any Module; a subclass is a pytree again."""

    class Opaque(nnx.Module, pytree=False):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    class Open(Opaque):
        pass

    m = Opaque()
    assert jax.tree.leaves(m) == [m]
    assert len(jax.tree.leaves(Open())) == 1
    assert jax.tree.leaves(Open())[0] is not m

    def double(m):
        m.w *= 2

    nnx.jit(double)(m)
    assert (m.w.value.tolist(), state_paths(m)) == ([2, 2], [("w",)])


def test_class_can_be_changed():
    """`model.__class__ = Other` swaps the behaviour in place, outside and inside of jit, and is seen."""

    class Negative(Layer):
        def __call__(self, x):
            return -x * self.w

    net = Net()
    layer = net.first
    f = nnx.jit(lambda net, x: net.first(x).sum())
    assert f(net, 1.0).item() == 2
    layer.__class__ = Negative
    assert f(net, 1.0).item() == -2
    nnx.jit(lambda net: setattr(net.first, "__class__", Layer))(net)
    assert (type(net.first), net.first is layer, f(net, 1.0).item()) == (Layer, True, 2)


def test_arguments_without_an_init_are_refused():
    """A class whose @nnx.dataclass was forgotten does not swallow its arguments."""

    class Forgotten(nnx.Module):
        x: int

    for make in (lambda: Forgotten(1), lambda: Forgotten(x=1)):
        with pytest.raises(TypeError, match=r"Forgotten\(\) takes no arguments.*nnx\.dataclass"):
            make()


def test_a_constructor_may_take_any_keyword():
    """Also the names that methods give their first argument: a block takes the class of its layers as ``cls``."""

    class Block(nnx.Module):
        def __init__(self, cls):
            self.layer = cls(cls=int)

    class Setting(nnx.Module):
        def __init__(self, cls):
            self.kind = cls

    assert Block(cls=Setting).layer.kind is int
    held = nnx.Dict(cls=1, self=2)
    held.update(self=3)
    assert held == {"cls": 1, "self": 3}


def test_new_without_init():
    """`Class.__new__(Class)` gives an empty object that takes attributes."""
    m = Layer.__new__(Layer)
    m.w = nnx.Param(jnp.ones(1))
    assert (state_paths(m), repr(Layer.__new__(Layer))) == ([("w",)], "Layer()")


def test_a_base_class_whose_init_subclass_does_not_call_super():
    """Such as a mixin of another library that keeps a list of its subclasses."""

    class Registry:
        def __init_subclass__(cls):
            pass

    class Net(Registry, nnx.Module):
        def __init__(self):
            self.scale, self.w = 2.0, nnx.Param(jnp.ones(2))

        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

        def __call__(self, x):
            return self.w @ x

    class Derived(Net):
        pass

    net = Derived()
    assert [x.shape for x in jax.tree.leaves(net)] == [(2,)]
    scaled = nnx.jit(lambda net: net.w * net.scale)
    scaled(net)
    net.scale = 3.0
    assert scaled(net).tolist() == [3, 3]
    with pytest.raises(TypeError) as caught:
        net(jnp.ones(3))
    assert caught.value.__notes__[-1].startswith("in <root> (Derived")


def test_subclass_keyword_arguments_reach_init_subclass():
    """Class keywords of a user's own go to the user's __init_subclass__."""
    seen = {}

    class Base(nnx.Module):
        def __init_subclass__(cls, *, tag, **kwargs):
            super().__init_subclass__(**kwargs)
            seen[cls.__name__] = tag

    class Derived(Base, tag="x", pytree=False):
        pass

    assert seen == {"Derived": "x"}


def test_object_is_pytree():
    """`nnx.Object` is the older name of `nnx.Pytree`, and a plain Pytree works in jit."""

    class Point(nnx.Object):
        def __init__(self):
            self.x = jnp.ones(())

    assert nnx.Object is nnx.Pytree
    assert nnx.jit(lambda p: p.x * 2)(Point()).item() == 2


# --- dataclasses ---


@nnx.dataclass
class Scale(nnx.Module):
    factor: nnx.Param
    steps: nnx.Data[int] = 0
    sizes: list = nnx.static(default_factory=lambda: [1, 2])
    count: int = nnx.data(7)
    shift: typing.Any = nnx.data(default=None, kw_only=True)
    inner: typing.Any = None

    def __call__(self, x):
        return x * self.factor if self.inner is None else self.inner(x) * self.factor


def test_nnx_dataclass():
    """Fields, defaults, factories, keyword-only, declarations by annotation and by nnx.data / nnx.static."""
    m = Scale(nnx.Param(2.0), shift=3)
    assert (m.steps, m.sizes, m.count, m.shift, type(m.sizes)) == (0, [1, 2], 7, 3, nnx.List)
    assert state_paths(m) == [("count",), ("factor",), ("shift",), ("steps",)]
    assert m.sizes is not Scale(nnx.Param(1.0)).sizes
    assert {m: 1}[m] == 1
    assert repr(m).startswith("Scale(")
    assert [f.name for f in dataclasses.fields(m)][:2] == ["factor", "steps"]


def test_nnx_dataclass_with_options():
    """It takes the options of dataclasses.dataclass, with or without parentheses."""

    @nnx.dataclass(kw_only=True)
    class A(nnx.Pytree):
        x: jax.Array

    with pytest.raises(TypeError):
        A(jnp.ones(1))
    assert state_paths(A(x=jnp.ones(1))) == [("x",)]


def test_dataclasses_are_hashed_by_identity_unless_they_say_otherwise():
    """Also where the decorator has added an ``==`` of fields; a hash in the class is left alone."""

    @nnx.dataclass
    class A(nnx.Pytree):
        x: int

    @nnx.dataclass
    class B(nnx.Pytree):
        x: int

        def __hash__(self):
            return 7

    assert len({A(1), A(1)}) == 2
    assert hash(B(1)) == 7


def test_nested_dataclasses_of_one_class_under_jit():
    """A dataclass compares by fields; running one inside another of its class compares nothing."""
    m = Scale(nnx.Param(jnp.ones(2)), inner=Scale(nnx.Param(jnp.full(2, 3.0))))
    assert nnx.jit(lambda m, x: m(x))(m, 1.0).tolist() == [3, 3]


def test_plain_dataclasses():
    """dataclasses.dataclass over a Module works, with nnx.data fields; post_init may set more."""

    @dataclasses.dataclass
    class Plain(nnx.Module):
        w: nnx.Param
        steps: int = nnx.data(0)
        names: list = dataclasses.field(default_factory=list)
        inner: typing.Any = None

        def __post_init__(self):
            self.b = nnx.Param(jnp.zeros(2))

        def __call__(self, x):
            return (x if self.inner is None else self.inner(x)) * self.w + self.b

    m = Plain(nnx.Param(jnp.ones(2)), inner=Plain(nnx.Param(jnp.ones(2))))
    assert state_paths(m) == [("b",), ("inner", "b"), ("inner", "steps"), ("inner", "w"), ("steps",), ("w",)]
    assert nnx.jit(lambda m, x: m(x))(m, 1.0).tolist() == [1, 1]
    assert nnx.clone(m).names == []


# --- copies ---

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "cloudpickle": lambda m: cloudpickle.loads(cloudpickle.dumps(m)),
}


@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES.keys())
def test_deep_copies_and_pickles(copier):
    """Structure, values, sharing, cycles, declarations survive; nothing is shared with the original."""
    m = Net()
    m.tied, m.itself, m.steps = m.layers[0], m, nnx.data(3)
    m.first.config = {"a": [1]}
    m.eval()
    nnx.jit(lambda m: 0)(m)
    c = copier(m)
    assert (nnx.graphdef(c) == nnx.graphdef(m), nnx.state(c) == nnx.state(m)) == (True, True)
    assert c.itself is c
    assert c.tied is c.layers[0]
    theirs = {id(x) for _, x in nnx.iter_graph(m) if isinstance(x, nnx.Variable | nnx.Pytree | nnx.List | nnx.Dict)}
    assert not any(id(x) in theirs for _, x in nnx.iter_graph(c))
    c.first.config["a"].append(2)
    c.steps = 4
    assert (m.first.config["a"], m.steps, nnx.state(c).steps) == ([1], 3, 4)


def test_shallow_copy():
    """copy.copy makes another object with the same attributes, which are set apart from then on."""
    m = Net()
    c = copy.copy(m)
    assert (type(c), c.first is m.first, c.layers is m.layers) == (Net, True, True)
    c.extra = 1
    assert not hasattr(m, "extra")


def test_a_class_that_says_how_it_is_pickled_is_copied_so():
    """As by copy.copy of any object; a `__copy__` of its own comes first."""

    class Saved:
        def __getstate__(self):
            return {"w": "saved"}

    class Mixed(Saved, nnx.Module):
        def __init__(self):
            self.w = jnp.ones(2)

    class Own(nnx.Module):
        __getstate__ = Saved.__getstate__
        __init__ = Mixed.__init__

    class Sub(Own):
        pass

    class Copied(Own):
        def __copy__(self):
            return "copied"

    for kind in (Mixed, Own, Sub):
        assert copy.copy(kind()).w == copy.deepcopy(kind()).w == "saved"
    assert copy.copy(Copied()) == "copied"


def test_a_copy_takes_few_calls():
    net = Net()
    assert count_calls(lambda: copy.copy(net)) < 16  # 29 by way of what is pickled


def test_cloudpickle_of_a_local_class():
    """A class defined in a function travels by value, its calls work on the other side."""

    class Local(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            return x * self.w

    made = cloudpickle.loads(cloudpickle.dumps(Local()))
    assert made(2.0).tolist() == [2, 2]
    assert nnx.jit(lambda m, x: m(x))(made, 2.0).tolist() == [2, 2]


def test_a_deep_copy_has_the_structure_of_the_original():
    """A jitted function without a name is itself in the copy, so that the copy runs the compiled functions too."""
    m = Layer()
    m.act = jax.jit(lambda x: x + 1)
    assert nnx.graphdef(copy.deepcopy(m)) == nnx.graphdef(m)


def test_a_deep_copy_of_several_modules_keeps_what_they_share():
    """A Module copied twice within one plain list is copied once."""
    m = Net()
    a, b = copy.deepcopy([m, m.first])
    assert a.first is b


def test_a_deep_copy_needs_no_memo():
    """``model.__deepcopy__()`` copies like copy.deepcopy(model)."""
    m = Net()
    assert m.__deepcopy__().first is not m.first


class Locked(nnx.Module):
    """Leaves what cannot be copied out of its state."""

    def __init__(self):
        self.w, self.lock = nnx.Param(jnp.ones(2)), threading.Lock()

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = threading.Lock()


class Counted(nnx.Module):
    def __init__(self):
        self.copies = 0

    def __deepcopy__(self, memo):
        made = memo[id(self)] = Counted()
        made.copies = self.copies + 1
        return made


def test_classes_may_say_how_they_are_copied():
    """__getstate__, __setstate__ and __deepcopy__ of a user's class are used, also below other Modules."""
    m = nnx.Dict(locked=Locked(), counted=[Counted()])
    m.again, m.locked.parent = m.counted[0], m
    for c in (copy.deepcopy(m), pickle.loads(pickle.dumps(nnx.Dict(locked=Locked())))):
        assert c.locked.w.value.tolist() == [1, 1]
        assert c.locked.lock is not m.locked.lock
    c = copy.deepcopy(m)
    assert (c.again.copies, c.again is c.counted[0], c.locked.parent is c) == (1, True, True)
    assert copy.copy(m.locked).w is m.locked.w


class OnlyGetstate(nnx.Module):
    def __init__(self):
        self.w, self.cache = nnx.Param(jnp.ones(2)), [1]

    def __getstate__(self):
        return {**vars(self), "cache": None}


def test_a_getstate_without_setstate():
    """As for any Python object, a dict becomes the attributes."""
    for c in (copy.deepcopy(OnlyGetstate()), pickle.loads(pickle.dumps(OnlyGetstate())), copy.copy(OnlyGetstate())):
        assert (c.w.value.tolist(), c.cache) == ([1, 1], None)


# --- memory and threads ---


def test_a_dropped_model_is_freed_at_once():
    """Without the garbage collector, also after calls of jitted functions, split, copies and pickling."""

    def step(m):
        m.first.w += 1
        m.scale = m.scale * 2

    f = nnx.jit(step)
    gc.disable()
    try:
        m = Net()
        for _ in range(5):
            f(m)
        nnx.jit(lambda m: m)(m)
        nnx.value_and_grad(lambda m: m.first.w.sum())(m)
        nnx.merge(*nnx.split(m))
        nnx.update(m, nnx.state(m))
        copy.deepcopy(m)
        jax.tree.map(lambda x: x, m)
        refs = [weakref.ref(x) for x in (m, m.first, m.first.w, m.layers, m.layers[1])]
        del m
        assert [ref() for ref in refs] == [None] * 5
    finally:
        gc.enable()


def test_threads_that_each_train_their_own_model():
    """Models of one structure used by one jitted function in several threads do not disturb each other."""

    @nnx.jit
    def step(m, x):
        m.first.w += x
        m.steps = m.steps + 1
        m.layers.append(Layer())
        m.layers.pop(0)

    errors, models = [], []

    def work(k):
        try:
            m = Net()
            m.steps = jnp.zeros((), jnp.int32)
            models.append((k, m))
            for _ in range(20):
                step(m, float(k))
                m.act = jnp.sin if m.act is tanh else tanh
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(m.first.w.value.tolist() == [1 + 20 * k] * 2 and m.steps.item() == 20 for k, m in models)


def test_methods_are_plain_functions_to_introspection():
    """Wrapping methods keeps their signature, name and doc; static and class methods are left alone."""
    import inspect

    class Documented(nnx.Module):
        def run(self, x: int, *, flag: bool = True) -> int:
            """Run it."""

        @staticmethod
        def helper(x):
            return x

        @classmethod
        def make(cls):
            return cls()

    assert str(inspect.signature(Layer)) == "(n=2)"
    assert str(inspect.signature(Documented.run)) == "(self, x: int, *, flag: bool = True) -> int"
    assert (Documented.run.__doc__, Documented.helper(1), type(Documented.make())) == ("Run it.", 1, Documented)
    assert isinstance(Documented().run, types.MethodType)


def test_without_a_pytree_declarations_have_no_effect():
    """A number that is declared data stays a number in a trace, and out of States; what has arrays is data."""

    class Settings(nnx.Module, pytree=False):
        def __init__(self):
            self.rate, self.table = nnx.data(0.5), nnx.data(jnp.ones(2))

    class Traced(Settings):
        pass

    assert set(nnx.state(Settings())) == {"table"}
    assert set(nnx.state(Traced())) == {"rate", "table"}
    nnx.jit(lambda settings: settings.table * (2 if settings.rate == 0.5 else 3))(Settings())


def test_deepcopy_says_which_attribute_cannot_be_copied():
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    model.layers[0].lock = threading.Lock()
    with pytest.raises(TypeError, match="lock") as caught:
        copy.deepcopy(model)
    assert caught.value.__notes__ == ["in 'lock' of a Linear"]


class Recorded:
    """Keeps the arguments that an object was made with, as a base class beside Module may do."""

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        self.made_with, self.weight = (args, kwargs), jnp.ones(2)
        return self


class RecordedLayer(nnx.Module, Recorded):
    def __init__(self, n, scale=1.0):
        self.w = nnx.Param(jnp.full(n, scale))


class RecordedLoudly(RecordedLayer):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [RecordedLayer, RecordedLoudly])
def test_new_of_a_base_class_after_module_sets_attributes(kind):
    """It gets the arguments, as in Python, and the attributes that it sets are those of any Module."""
    m = kind(2, scale=3.0)
    assert m.made_with == ((2,), {"scale": 3.0})
    assert state_paths(m) == [("w",), ("weight",)]
    nnx.jit(lambda m: vars(m).update(weight=m.weight + 1))(m)
    assert m.weight.tolist() == [2, 2]


class Around(nnx.Module):
    """Writes around Module.__setattr__."""

    def __init__(self):
        self.calls, self.seen = 0, None

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)

    def __call__(self, x, seen=None):
        self.calls, self.seen = self.calls + 1, seen
        return x


def test_own_setattr_writes_under_another_trace_what_is_not_traced():
    """A class that writes around ours may note there what is known while tracing; a tracer would outlive its trace."""
    m = Around()
    jax.jit(m)(1.0)
    jax.grad(m)(1.0)
    assert m.calls == 2
    nnx.jit(lambda x: m(x))(1.0)  # captured: the function is traced twice, and has called it once
    assert m.calls == 3
    nnx.jit(jax.grad(lambda x: m(x)))(1.0)
    assert m.calls == 4
    for seen in (lambda x: x, lambda x: [1, {"x": x}], lambda x: nnx.Variable(x)):
        with pytest.raises(nnx.TraceContextError, match="'seen'"):
            jax.jit(lambda x, seen=seen: m(x, seen(x)))(1.0)
        assert m.seen is None


class Permissive(nnx.Module, pytree=False):
    """Writes while a shape is inferred, in an object that was made before."""

    inferring = False

    def __init__(self):
        self.log, self.w = [], nnx.Param(jnp.ones(2))

    def _check_valid_context(self, error_msg):
        if not Permissive.inferring:
            super()._check_valid_context(error_msg)

    def __call__(self, x):
        self.built = True
        return x * self.w


def test_a_class_may_allow_writes_under_another_trace(monkeypatch):
    """By _check_valid_context, which is asked where a write is about to be refused."""
    m = Permissive()
    with pytest.raises(nnx.TraceContextError, match="set attribute 'built' of Permissive at m"):
        jax.eval_shape(lambda x: m(x), 1.0)
    monkeypatch.setattr(Permissive, "inferring", True)
    assert jax.eval_shape(lambda x: m(x), 1.0).shape == (2,)
    assert m.built
    del m.built

    forward = nnx.jit(lambda x: m(x))  # captures the Param alone: the class knows what may be written
    assert forward(1.0).tolist() == [1, 1]
    assert m.built
    m.w *= 2
    m.lock = threading.Lock()
    m.held = {1: [jnp.ones(2)], "a": threading.Lock()}
    assert forward(1.0).tolist() == [2, 2]


def test_without_a_pytree_lists_and_dicts_stay_what_they_are():
    """So code that keeps the list, and appends to it, finds its items in the Module, as in flax.nnx."""
    layers, heads = [Layer()], {"a": Layer()}

    class Plain(nnx.Module, pytree=False):
        def __init__(self):
            self.layers, self.heads, self.pair = layers, heads, (1, [nnx.Param(jnp.ones(1))])

    m = Plain()
    assert m.layers is layers
    assert m.heads is heads
    count = nnx.jit(lambda m: len(m.layers) + len(m.heads))
    assert count(m) == 2
    layers.append(Layer())
    heads["b"] = Layer()
    assert count(m) == 4
    assert state_paths(m) == [
        *[("heads", key, "w") for key in "ab"],
        *[("layers", i, "w") for i in range(2)],
        ("pair", 1, 0),
    ]

    def grow(m):
        m.layers.append(Layer(3))
        m.layers[0].w *= 2

    nnx.jit(grow)(m)
    assert ([layer.w.shape for layer in m.layers], m.layers[0].w.value.tolist()) == ([(2,), (2,), (3,)], [2, 2])
    merged = nnx.merge(*nnx.split(m))
    assert (type(merged.layers), type(merged.heads), len(merged.layers)) == (list, dict, 3)
    assert merged.layers[0] is not m.layers[0]


def test_a_plain_dict_whose_keys_have_no_order_is_static():
    """JAX cannot flatten it; if it holds no data, it is a static value like others."""

    class Plain(nnx.Module, pytree=False):
        def __init__(self):
            self.first, self.second = Layer(), Layer()
            self.trainable = {self.first: True, self.second: False}

    m = Plain()
    scale = nnx.jit(lambda m, x: x * (2 if True in m.trainable.values() else 3))
    assert scale(m, 1.0) == 2
    m.trainable[m.first] = False
    assert scale(m, 1.0) == 3
    assert state_paths(m) == [("first", "w"), ("second", "w")]
    assert [value for path, value in nnx.iter_graph(m) if path == ("trainable",)] == [m.trainable]
    m.trainable[m.first] = jnp.ones(2)
    with pytest.raises(nnx.errors.PathError, match=r"(?s)at trainable, since its keys \[Layer\(.* cannot be sorted"):
        nnx.state(m)


@pytest.mark.skipif(sysconfig.get_config_var("Py_GIL_DISABLED") == 1, reason="3.13 specialises nothing without a GIL")
def test_attributes_are_read_by_a_specialised_instruction():
    """CPython has none for a dict that shares its keys with those of other objects, unless that is in the object."""

    def read(layer):
        for _ in range(100):
            layer.n

    layer = Layer()
    for _ in range(20):
        read(layer)
    names = [x.opname for x in dis.get_instructions(read, adaptive=True) if x.opname.startswith("LOAD_ATTR")]
    if sys.gettrace() is None:  # coverage
        assert names in (["LOAD_ATTR_WITH_HINT"], ["LOAD_ATTR_INSTANCE_VALUE"])
