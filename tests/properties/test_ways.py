"""A jitted function sees the Modules to which plain Python leads, by whatever it is written in.

Drawn programs hide Modules behind chains of plain objects, and write the code that reaches them: attributes, items,
methods, properties, patterns, functions, classes. What the code then uses of a Module may be a setting alone, which no
trace notices. After changes of the Modules, and of what leads to them, outputs and Modules must be what plain Python
makes of them. A call that writes nothing, made again at once, is not traced again.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import itertools
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlib as nnx

from .strategies import examples


class Part(nnx.Module):
    def __init__(self, number: int):
        self.factor = float(number)


class Layer(nnx.Module):
    def __init__(self, number: int):
        self.weight = nnx.Param(jnp.float32(number), tag=float(number))
        self.factor, self.part, self.maybe = float(number), Part(number), None
        self.numbers, self.array, self.pair = [1.0], jnp.float32(number), (jnp.float32(1), float(number))

    def __call__(self, x: Any) -> Any:
        return self.weight * x

    @property
    def doubled(self) -> float:
        return 2 * self.factor


class Turned(Layer):
    def __call__(self, x: Any) -> Any:
        return 1 - self.weight * x


# --- what holds a Module, or another holder -------------------------------------------------------------------------

Holder = tuple[Any, str, Callable[[Any], Any] | None]  # it, the code that gets what it holds, and how to exchange that


def with_attribute(kind: Callable[[], Any], name: str = "held", code: str = "{}.held") -> Callable[[Any], Holder]:
    def make(held: Any) -> Holder:
        made = kind()
        setattr(made, name, held)
        return made, code, functools.partial(setattr, made, name)

    return make


def with_item(kind: Callable[[], Any], key: Any, code: str) -> Callable[[Any], Holder]:
    def make(held: Any) -> Holder:
        made = kind()
        made[key] = held
        return made, code, functools.partial(made.__setitem__, key)

    return make


def instances(base: type = object, **members: Any) -> Callable[[], Any]:
    return type("Plain", (base,), members)


class Inherited:
    def get(self) -> Any:
        return self.held  # type: ignore[attr-defined]


class Inheriting(Inherited):
    def get(self) -> Any:
        return super().get()


class Slotted:
    __slots__ = ("held",)


@dataclasses.dataclass
class Record:
    held: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    held: Any


class Entered:
    def __enter__(self) -> Any:
        return self.held  # type: ignore[attr-defined]

    def __exit__(self, *error: Any) -> None:
        pass


class Its:
    def __get__(self, holder: Any, cls: type | None = None) -> Any:
        return vars(holder)["kept"]


def closure(held: Any) -> Holder:
    def get() -> Any:
        return held

    def exchange(other: Any) -> None:
        nonlocal held
        held = other

    return get, "{}()", exchange


def default(held: Any) -> Holder:
    def get(held: Any = held) -> Any:
        return held

    return get, "{}()", lambda other: setattr(get, "__defaults__", (other,))


def of_a_class(held: Any) -> Holder:
    cls = type("Plain", (), {"held": held, "get": classmethod(lambda cls: cls.held)})
    return cls, "{}.get()", functools.partial(setattr, cls, "held")


def bound(held: Any) -> Holder:
    made = Inheriting()
    made.held = held
    return made.get, "{}()", functools.partial(setattr, made, "held")


def in_context(held: Any) -> Holder:
    variable = contextvars.ContextVar[Any]("held")
    variable.set(held)
    return variable, "{}.get()", variable.set


def referred_to(held: Any) -> Holder:
    if not isinstance(held, nnx.Module):
        return closure(held)
    made = [weakref.ref(held)]
    return made, "{}[0]()", lambda other: made.__setitem__(0, weakref.ref(other))


HOLDERS: list[Callable[[Any], Holder]] = [
    with_attribute(instances()),
    with_attribute(types.SimpleNamespace, code='getattr({}, "held")'),
    with_attribute(instances(), code='vars({})["held"]'),
    with_attribute(instances(), code="matched({})"),
    with_attribute(Slotted),
    with_attribute(Record),
    with_attribute(Inheriting, code="{}.get()"),
    with_attribute(instances(get=lambda self: self.ask(), ask=lambda self: self.held), code="{}.get()"),
    with_attribute(instances(its=property(lambda self: self.held)), code="{}.its"),
    with_attribute(instances(its=Its()), "kept", "{}.its"),
    with_attribute(instances(__getitem__=lambda self, k: self.held), code="{}[0]"),
    with_attribute(instances(__iter__=lambda self: iter([self.held])), code="next(iter({}))"),
    with_attribute(instances(__getattr__=lambda self, name: self.__dict__["kept"]), "kept", "{}.unknown"),
    with_attribute(Entered, code="entered({})"),
    with_attribute(instances(dict)),
    with_attribute(instances(tuple)),
    with_attribute(instances(list, get=lambda self: self.held), code="{}.get()"),
    with_attribute(lambda: lambda: None),
    with_item(dict, "held", '{}["held"]'),
    with_item(instances(dict), 0, "{}[0]"),
    with_item(collections.UserDict, "held", '{}["held"]'),
    with_item(lambda: [None, 1.0], 0, "{}[0]"),
    with_item(lambda: collections.deque([None]), 0, "{}[0]"),
    lambda held: ((held, 1.0), "{}[0]", None),
    lambda held: (Frozen(held), "{}.held", None),
    lambda held: (functools.partial(lambda x: x, held), "{}()", None),
    closure,
    default,
    of_a_class,
    bound,
    in_context,
    referred_to,
]

# --- the code of functions ------------------------------------------------------------------------------------------

READ = (  # of a Module m, and another one
    "{m}(x)",
    "{m}.factor * x",
    "{m}.doubled * x",
    'getattr({m}, "factor") * x',
    "{m}.part.factor * x",
    "{m}.weight.value * x",
    "{m}.weight.tag * x",
    "(x if {m}.maybe is None else {m}.maybe * x)",
    '({m}.more if hasattr({m}, "more") else {m}.factor) * x',
    "len({m}.numbers) * x",
    "sum({m}.numbers) * x",
    "{m}.array * x",
    "{m}.pair[0] * {m}.pair[1] * x",
    "(x if isinstance({m}, Turned) else {m}.factor)",
    "({m}.factor if {m} is {other} else x)",
)
WRITTEN = (
    "{m}.weight.value = {m}.weight.value + x",
    "{m}.weight = nnx.Param({m}.weight.value + 1, tag=3.0)",
    "{m}.factor = {m}.factor + 1.0",
    "{m}.maybe = 2.0 if {m}.maybe is None else None",
    "{m}.numbers.append(2.0)",
    "{m}.array = {m}.array + 1",
    "pass",
    "pass",
)
FORMS = (  # of a function
    """
def f(x):
    {write}
    return {read}
""",
    """
def called(x):
    {write}
    return {read}

def f(x):
    return called(x)
""",
    """
class Plain:
    def __call__(self, x):
        return self.run(x)

    def run(self, x):
        {write}
        return {read}

f = Plain()
""",
    """
def make({names}):
    def f(x):
        {write}
        return {read}
    return f

f = make({names})
""",
)
HELPERS = """
def matched(holder):
    match holder:
        case object(held=held):
            return held

def entered(holder):
    with holder as held:
        return held
"""

CHANGES: tuple[Callable[[Layer, Layer, int], Any], ...] = (
    lambda m, n, k: setattr(m, "factor", float(k)),
    lambda m, n, k: vars(m).update(factor=float(k)),
    lambda m, n, k: setattr(m.part, "factor", float(k)),
    lambda m, n, k: setattr(m, "part", Part(k)),
    lambda m, n, k: setattr(m, "part", n.part),
    lambda m, n, k: setattr(m, "maybe", None if m.maybe else float(k)),
    lambda m, n, k: setattr(m, "more", float(k)),
    lambda m, n, k: m.numbers.append(float(k)),
    lambda m, n, k: setattr(m, "numbers", n.numbers),
    lambda m, n, k: setattr(m, "array", jnp.float32(k)),
    lambda m, n, k: setattr(m, "pair", (jnp.float32(k), float(k))),
    lambda m, n, k: setattr(m.weight, "value", jnp.float32(k)),
    lambda m, n, k: setattr(m, "weight", nnx.Param(jnp.float32(k), tag=float(k))),
    lambda m, n, k: setattr(m, "weight", n.weight),
    lambda m, n, k: m.weight.set_metadata(tag=float(k)),
    lambda m, n, k: setattr(m, "__class__", Turned if type(m) is Layer else Layer),
)

index = st.integers(0, 7)
chains = st.lists(st.lists(st.sampled_from(range(len(HOLDERS))), max_size=3), min_size=2, max_size=3)
codes = st.tuples(
    st.sampled_from(FORMS), st.sampled_from(WRITTEN), st.lists(st.sampled_from(READ), min_size=1, max_size=2), index
)
steps = st.one_of(
    st.tuples(st.just("call"), index, index, index),
    st.tuples(st.just("call"), index, index, index),
    st.tuples(st.sampled_from(range(len(CHANGES))), index, index, index),
    st.tuples(st.just("exchange"), index, index, index),
)


class World:
    """Modules, what leads to them, and functions that go there."""

    def __init__(self, chains: list[list[int]], codes: list[tuple], wrap: Callable[[Callable], Callable]):
        self.layers = [Layer(k + 1) for k in range(3)]
        self.exchanges: list[tuple[Callable, list[int]]] = []  # how to exchange a Module, or the first holder of one
        namespace: dict[str, Any] = {"nnx": nnx, "Turned": Turned, "object": object, "__name__": "drawn"}
        exec(HELPERS, namespace)
        ways = []
        for k, chain in enumerate(chains):
            held: Any = self.layers[k % 2]
            codes_of_chain = []
            for depth, number in enumerate(chain):
                held, code, exchange = HOLDERS[number](held)
                codes_of_chain.append(code)
                if exchange is not None:
                    self.exchanges.append((exchange, chain[:depth]))
            namespace[f"root{k}"] = held
            ways.append(functools.reduce(lambda inner, code: code.format(inner), reversed(codes_of_chain), f"root{k}"))
        self.functions = []
        for form, write, read, first in codes:
            pairs = itertools.cycle(ways[first % len(ways) :] + ways[: first % len(ways)])
            wanted = [code.format(m=next(pairs), other=ways[0]) for code in (write, *read)]
            names = ", ".join([f"root{k}" for k in range(len(chains))])
            exec(form.format(write=wanted[0], read=" + ".join(wanted[1:]), names=names), namespace)
            self.functions.append(wrap(namespace["f"]))

    def run(self, step: tuple) -> Any:
        kind, i, j, k = step
        if kind == "call":
            return self.functions[i % len(self.functions)](jnp.float32(j + 1))
        m, n = self.layers[i % 3], self.layers[j % 3]
        if kind != "exchange":
            CHANGES[kind](m, n, k + 1)
        elif self.exchanges:
            exchange, chain = self.exchanges[k % len(self.exchanges)]
            exchange(functools.reduce(lambda held, number: HOLDERS[number](held)[0], chain, m))
        return None

    def state(self) -> tuple[Any, list[Any]]:
        graphdef, values = nnx.split(nnx.List(self.layers))
        return graphdef, [np.asarray(x) for x in nnx.to_flat_state(values).leaves]


def traces(jitted: Any) -> str:
    """How often a jitted function was traced, in words."""
    return re.findall(r"traced (once|\d+ times)", jitted.explain())[0]


@pytest.mark.filterwarnings("ignore::nnxlib.core.errors.RetraceWarning")  # a setting may be changed at each call
@examples(60)
@given(chains, st.lists(codes, min_size=1, max_size=2), st.lists(steps, min_size=6, max_size=12))
def test_a_function_sees_what_plain_python_leads_to(chains: list, codes: list, program: list[tuple]) -> None:
    """Outputs, values, and which object is where; and a call that writes nothing is not traced again when repeated."""
    plain, jitted = World(chains, codes, lambda f: f), World(chains, codes, nnx.jit)
    for step in program:
        expected, found = plain.run(step), jitted.run(step)
        if step[0] == "call":
            np.testing.assert_allclose(found, expected, rtol=1e-5)
            if all(write == "pass" for _, write, *_ in codes):
                function = jitted.functions[step[1] % len(codes)]
                before = traces(function)
                np.testing.assert_allclose(jitted.run(step), found)
                assert traces(function) == before
        (structure, values), (now, found) = plain.state(), jitted.state()
        assert structure == now
        np.testing.assert_allclose(found, values, rtol=1e-5)
