"""The chains from a function to what it refers to, and whether they still lead there."""

import collections
import contextvars
import dis
import functools
import inspect
import operator
import sys
import tarfile
import threading
import types
import typing
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.conditions import Conditions
from nnxlib.core.look_ups import _loaded_in, names_by_text
from nnxlib.core.references import Reached, search

GLOBAL = nnx.Dict(w=nnx.Param(jnp.ones(2)))


def names_a_global(x, default=(1, 2), *, named=GLOBAL):
    return GLOBAL.w * x


@pytest.mark.parametrize("module", [inspect, typing, tarfile, types], ids=lambda module: module.__name__)
def test_what_code_reads_and_imports_is_what_dis_shows(module):
    """The instructions are read directly, which takes a hundredth of the calls; on each version of Python alike."""

    def all_code(code):
        return [code, *[x for inner in code.co_consts if isinstance(inner, types.CodeType) for x in all_code(inner)]]

    code = compile(inspect.getsource(module), module.__file__, "exec")  # more than 256 names: extended arguments
    shown = [x for each in all_code(code) for x in dis.get_instructions(each)]
    is_global = lambda name: name.startswith("LOAD_") and name.endswith(("_GLOBAL", "_NAME", "_GLOBALS"))
    read, imported = _loaded_in(code)
    assert read == {x.argval for x in shown if is_global(x.opname)}
    assert imported == {x.argval for x in shown if x.opname == "IMPORT_NAME"}


def test_a_function_names_its_closure_its_defaults_and_globals():
    local = nnx.Dict()
    held = types.ModuleType("held")
    held.inner, held.other = nnx.Dict(), nnx.Dict()  # type: ignore[attr-defined]
    by_default, by_keyword = nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    functions = lambda: (local, GLOBAL), names_a_global, lambda: held.inner, lambda x=by_default, *, y=by_keyword: x
    found = [search(f).used_unnoticed() for f in functions]
    assert [set(map(id, x)) for x in found] == [
        {id(local), id(GLOBAL)},
        {id(GLOBAL)},
        {id(held.inner)},
        {id(by_default), id(by_keyword)},
    ]


class Slotted:
    __slots__ = ("m",)


class Settings:
    m = None


module = types.ModuleType("settings")
module.inner = types.ModuleType("settings.inner")  # type: ignore[attr-defined]
elsewhere = types.ModuleType("elsewhere")  # a file with functions of its own
exec("m = None\ndef get(): return m\ndef wrap(f): return lambda: f()", vars(elsewhere))
sys.modules["elsewhere"] = elsewhere
held: dict = {}


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

    def get(self):
        return held["m"]

    @property
    def present(self):
        return held["m"]


class Meta(type):
    m = None


class OfMeta(metaclass=Meta):
    pass


def imports():
    from elsewhere import m  # type: ignore[import-not-found]

    return m


def chains():
    """For each kind of chain: a function, and a change after which it leads to another object."""
    old, new = nnx.Dict(), nnx.Dict()
    listed, named, plain, tupled = [old], {"m": old}, types.SimpleNamespace(m=old), ({"m": [old]},)
    trainer = Trainer(old)
    bound = functools.partial(lambda m: m, old)
    queue, slotted = collections.deque([old]), Slotted()
    slotted.m = Settings.m = module.m = module.inner.m = Base.m = Meta.m = elsewhere.m = held["m"] = old  # type: ignore
    instance, own = Derived(), Derived()
    weak, context, thread = weakref.WeakValueDictionary(m=old), contextvars.ContextVar("context"), threading.local()
    thread.m = old
    context.set(old)
    by_default = contextvars.ContextVar("by_default", default=old)
    as_set, weak_set, as_key, proxy = {old}, weakref.WeakSet([old]), {old: 1}, types.MappingProxyType(named)
    wrapped = elsewhere.wrap(lambda: listed[0])  # type: ignore[attr-defined]

    mapped = jax.vmap(lambda x: listed[0])

    @functools.wraps(names_a_global)
    def wrapper():
        return listed[0]

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
        "default of a context variable": (old, lambda: by_default.get(), lambda: by_default.set(new)),
        "set": (old, lambda: as_set, lambda: as_set.add(new)),
        "weak set": (old, lambda: list(weak_set), lambda: weak_set.add(new)),
        "key of a dict": (old, lambda: list(as_key), lambda: (as_key.clear(), as_key.update({new: 1}))),
        "proxy of a dict": (old, lambda: proxy["m"], lambda: named.update(m=new)),
        "metaclass": (old, lambda: OfMeta.m, lambda: setattr(Meta, "m", new)),
        "module in a module": (old, lambda: module.inner.m, lambda: setattr(module.inner, "m", new)),
        "import in a function": (old, imports, lambda: setattr(elsewhere, "m", new)),
        "function of another file": (old, elsewhere.get, lambda: setattr(elsewhere, "m", new)),
        "called function of another file": (old, lambda: elsewhere.get(), lambda: setattr(elsewhere, "m", new)),
        "wrapped by another file": (old, lambda: wrapped(), lambda: listed.__setitem__(0, new)),
        "wrapper": (old, wrapper, lambda: listed.__setitem__(0, new)),
        "mapped": (old, lambda: mapped(1.0), lambda: listed.__setitem__(0, new)),
        "global of a method": (old, lambda: trainer.get(), lambda: held.update(m=new)),
        "global of a property": (old, lambda: trainer.present, lambda: held.update(m=new)),
        "weak dict": (old, lambda: weak["m"], lambda: weak.update(m=new)),
        "context variable": (old, lambda: context.get(), lambda: context.set(new)),
        "thread local": (old, lambda: thread.m, lambda: setattr(thread, "m", new)),
    }


@pytest.mark.parametrize("kind", chains())
def test_a_way_is_followed_again(kind):
    old, function, change = chains()[kind]
    to_old = [chain for chain in search(function, [old]).chains if chain.value is old]
    assert to_old
    conditions = Conditions(Reached([], [], set()), roots=[(weakref.ref(old), to_old)])
    assert conditions.find() == (old,)
    if change is not None:
        change()
        assert conditions.find() is None


def test_each_step_is_taken_once_however_many_ways_it_is_on():
    """Ten Variables of one level are ten steps, with one to the level, and two to see that both are as long."""
    state = nnx.State({"level": {str(i): nnx.Param(i) for i in range(10)}})
    variables = list(map(id, state["level"].values()))
    known = set()
    steps = [
        step for chain in search(lambda: state).chains if id(chain.value) in variables for step in chain.steps(known)
    ]
    assert [step.look_up.found() for step in steps][:2] == [state["level"]["0"], True]
    assert len(steps) == 10 + 1 + 2 + 2  # and the closure, and the mapping of the State


def test_what_is_sought_is_found_however_much_else_there_is():
    """Without an end that depends on what comes first."""
    held, models = [[object()] for _ in range(2000)], [nnx.Dict()]
    assert not [chain for chain in search(lambda: (held, [models])).chains if chain.value is models[0]]
    assert [chain for chain in search(lambda: (held, [models]), models).chains if chain.value is models[0]]


def test_a_search_ends_where_very_much_can_be_reached():
    """Of what is sought but nowhere to be found: it would be looked for in half of a program."""
    held = [[object()] for _ in range(40_000)]
    assert 10_000 < len(search(lambda: held, [object()]).chains) < 40_000

    functions = [f"def f{i}(): return f{i + 1}" for i in range(1000)]
    namespace: dict = {"__name__": "another_file"}
    exec("\n".join([*functions, "f1000 = None"]), namespace)
    of_others = [chain for chain in search(namespace["f0"].__call__, [object()]).chains if callable(chain.value)]
    assert len(of_others) < 200


def test_methods_of_what_python_has_itself_lead_nowhere():
    words = ["a", b"b"]
    assert not [
        chain for chain in search(lambda: [word.join([]) for word in words]).chains if chain.value is vars(str)["join"]
    ]


def test_a_function_that_jax_has_jitted_leads_to_what_it_wraps_alone():
    model = nnx.Dict()
    jitted = jax.jit(lambda x: (model, x))
    found = [chain.value for chain in search(lambda: jitted).chains]
    assert any(x is model for x in found)
    assert len(found) <= 10


def test_globals_of_libraries_are_not_looked_into():
    assert len(search(lambda: (jax.jit, jnp.sum, nnx.grad), [object()]).chains) < 100


class Failing:
    """Has no attributes: asking for any is an error, of another kind than `getattr` knows."""

    __slots__ = ()

    def __getattr__(self, name):
        raise KeyError(name)


class Unbound:
    @property
    def __dict__(self):
        raise RuntimeError("outside of the context")


class Copying(dict):
    """Gives another object each time."""

    def get(self, key):
        return [self[key]]


class Guarded:
    secret = 1

    def __init__(self, model):
        self.model = model

    def __getattribute__(self, name):
        if name == "secret":
            raise RuntimeError("not yet")
        return super().__getattribute__(name)


def dead_proxy():
    return weakref.proxy(Settings())


@pytest.mark.parametrize("kind", [Failing, Unbound, dead_proxy, lambda: Copying(m={}), lambda: Guarded({})])
def test_what_cannot_be_looked_into_is_passed_over(kind):
    """Whatever else a function refers to, its Module is found, by all who ask for it."""
    other, model = kind(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def f(x):
        return model(x) if other is not None else None

    assert [chain for chain in search(f).chains if chain.value is model]
    for jitted in nnx.jit(f), functools.partial(nnx.eval_shape, f), nnx.capture(f, nnx.Intermediate):
        assert jax.tree.leaves(jitted(jnp.ones(2)))[0].shape == (2,)


def test_a_name_without_a_value():
    """A function may name what is only defined under a condition, in its closure."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def make(averages):
        if averages:
            average = lambda x: x

        return nnx.jit(lambda x: average(model(x)) if averages else model(x))

    np.testing.assert_array_equal(make(False)(jnp.ones(2)), make(True)(jnp.ones(2)))


def test_nodes_are_not_looked_into():
    inner = nnx.Dict()
    outer = nnx.Dict(inner=inner)
    assert not [chain for chain in search(lambda: outer).chains if chain.value is inner]


def test_cycles_end():
    held = []
    held.append(held)
    assert len(search(lambda: held).chains) < 20


def test_a_cache_may_shrink_while_it_is_looked_into():
    """As one with weak references does when garbage is collected in between."""

    class Shrinking(dict):
        @property
        def get(self):
            if len(self) > 2:
                self.popitem()
            return super().get

    held = [1]
    cache = Shrinking(a=1, b=held, c=2, d=3)
    assert any(chain.value is held for chain in search(lambda: cache).chains)


def test_a_signature_leads_to_its_defaults_and_not_to_the_classes_of_python():
    scanned = nnx.scan(lambda total, x: (total + x, x), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))

    def function(x):
        return scanned(x, x)

    assert count_calls(lambda: search(function)) < 6_000  # 17,000 with all that the kinds of parameters refer to

    def other(x, model=None):
        return other.__signature__.parameters["model"].default  # type: ignore[attr-defined]

    held = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    signature = inspect.signature(other)
    parameters = [p.replace(default=held) if p.name == "model" else p for p in signature.parameters.values()]
    other.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    assert search(other).used_unnoticed() == [held]


def test_what_is_a_librarys_own_is_not_looked_into():
    scanned = nnx.scan(lambda total, x: (total + x, x), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))

    def function(x):
        return scanned(x, x)

    assert count_calls(lambda: search(function)) < 2_000  # 4,400 with its axes, its options and jax.lax.scan


def test_a_mesh_is_not_looked_into():
    mesh, spec = jax.make_mesh((1,), ("d",)), jax.sharding.PartitionSpec("d")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    mapped = nnx.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)
    function = lambda x: (mapped(x), mesh, spec, sharding)
    assert count_calls(lambda: search(function)) < 2_500  # 8,500 with their attributes


def test_what_the_class_of_a_module_has_from_a_library_is_not_looked_into():
    """Nor what its metaclass does to make classes."""

    class Model(nnx.Module):
        pass

    function = lambda: Model()
    assert (
        count_calls(lambda: search(function)) < 1_200
    )  # 3,700 with the attributes of nnx.Module, 4,800 with `__new__` of ABCMeta


def test_what_a_user_gives_to_a_library_is_looked_into():
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))

    class Settings:
        held = model

    Pair = collections.namedtuple("Pair", "a b")
    inner = lambda x: x * model.w.value
    given = {
        "a function": jax.vmap(inner),
        "a wrapped function": nnx.remat(inner),
        "a partial": jax.jit(functools.partial(jax.tree.map, inner)),
        "a class": functools.partial(jax.tree.map, lambda x, cls=Settings: x * cls.held.w.value),
        "a named tuple": Pair(jax.nn.relu, inner),
        "a tuple with a class": (1, Settings),
    }
    for name, held in given.items():
        assert search(lambda held=held: held, names={"held", "w"}).used_unnoticed() == [model], name


def test_a_function_with_the_name_of_one_of_jax_is_looked_into():
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))

    @functools.wraps(jax.nn.relu)
    def relu(x):
        return x * model.w.value

    assert search(relu).used_unnoticed() == [model]
    assert search(nnx.remat(relu)).used_unnoticed() == [model]


def test_a_tuple_that_holds_another_many_times_is_looked_into_once():
    nested: tuple = (1,)
    for _ in range(40):
        nested = nested, nested
    assert count_calls(lambda: search(lambda: nested)) < 1_000


def test_a_wrapped_function_of_a_module_that_cannot_be_imported_is_looked_into(monkeypatch):
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    function = lambda x: x * model.w.value
    function.__module__ = "blocked"
    monkeypatch.setitem(sys.modules, "blocked", None)  # type: ignore[arg-type]
    assert search(nnx.remat(function)).used_unnoticed() == [model]


def test_names_by_text():
    """Text is taken apart at its dots, and a getter at those of its names; but not a whole book."""
    assert names_by_text("a.b") == names_by_text(operator.attrgetter("a.b")) == ["a", "b"]
    assert names_by_text(("a", 1, "b c")) == names_by_text(operator.itemgetter("a", 1)) == ["a"]
    assert names_by_text(operator.methodcaller("f", "a", k=1)) == ["f", "a"]
    assert names_by_text("To be. Or not. " * 1000) == names_by_text(3) == []
