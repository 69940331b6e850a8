"""Random object graphs, as recipes: plain data from which any number of equal copies are made.

A copy that `make` builds from a recipe owes nothing to deepcopy, clone or merge, which are under test themselves. The
recipes are small integers all through (an index is taken modulo what there is), so that hypothesis shrinks them well
and prints them in full.

What occurs: sharing and cycles, also between arguments; Modules, a Pytree with slots, one with declared data and
static attributes, a dataclass; List and Dict (with int and str keys), tuples, registered dataclasses and bound methods
as attributes, in each other; every type of Variable, holding arrays, Python scalars, None, PRNG keys and pytrees, with
metadata and hooks; arrays of JAX and NumPy as plain attributes; static values of many kinds; None; empty Modules.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

import nnxlib as nnx


def examples(count: int) -> hypothesis.settings:
    """Settings for a third of that many examples, ten times as many under `HYPOTHESIS_PROFILE=explore`."""
    scale = hypothesis.settings.default.max_examples / 100
    return hypothesis.settings(
        max_examples=max(1, int(count * scale)), suppress_health_check=list(hypothesis.HealthCheck)
    )


# --- the classes ----------------------------------------------------------------------------------------------------


class Block(nnx.Module):
    """A Module with any attributes."""

    def double(self, x: Any) -> Any:
        return 2 * x


class Branch(Block):
    """What a Block becomes when its class is changed."""


class Moded(nnx.Module):
    """A Module that follows train() and eval()."""

    def __init__(self) -> None:
        self.deterministic = False


class Declared(nnx.Pytree):
    """A Pytree whose declarations overrule the values of its attributes."""

    steps: nnx.Data[Any]
    shape: nnx.Static[Any]

    def __init__(self) -> None:
        self.steps = 0
        self.shape = (2, 3)
        self.counted = nnx.data(1)
        self.fixed = nnx.static((4, "same"))


class Slotted(nnx.Pytree):
    """A Pytree with an attribute that is no entry of its `__dict__`."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.slot = jnp.float32(3)


@nnx.dataclass
class Record(nnx.Module):
    """A dataclass, whose `==` compares attributes."""

    a: Any = None
    b: Any = 1.5


class Empty(nnx.Module):
    """A Module without attributes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    """A pytree that nnxlib does not know."""

    left: Any
    right: Any


NODES: list[Callable[[], Any]] = [Block, nnx.List, nnx.Dict, Branch, Moded, Declared, Slotted, Record, Empty]
NAMES = ("a", "b", "c", "d")
KEYS = ("a", 0, "b", 10, 2, "x y")

# --- Variables ------------------------------------------------------------------------------------------------------


class Memory(nnx.Variable):
    """A Variable of the user's own, with a hook as a method."""

    def on_get_value(self, value: Any) -> Any:
        return value


def keep(variable: nnx.Variable, value: Any) -> Any:
    return value


VARIABLES = (nnx.Param, nnx.BatchStat, nnx.Cache, nnx.Variable, nnx.Intermediate, nnx.RngCount, nnx.RngKey, Memory)
FLOATS: list[Callable[[int], Any]] = [lambda i: jnp.float32(i), lambda i: jnp.arange(2, dtype=jnp.float32) + i]
VALUES: list[Callable[[int], Any]] = [
    *FLOATS,
    lambda i: jnp.int32(i),
    lambda i: float(i),
    lambda i: (jnp.float32(i), jnp.arange(2)),
    lambda i: {"m": jnp.float32(i), "n": [jnp.float32(1), None]},
    lambda i: None,
    lambda i: np.float32([i, 1]),
]
METADATA: list[Callable[[], dict[str, Any]]] = [
    dict,
    dict,
    lambda: {"tag": "frozen"},
    lambda: {"sharding": (None, "model"), "scale": -0.0},
    lambda: {"on_set_value": keep, "sizes": [1, 2]},
]


def make_variable(kind: int, value: int, metadata: int) -> nnx.Variable:
    cls = VARIABLES[kind % len(VARIABLES)]
    made: Any
    if cls is nnx.RngKey:
        made = jax.random.key(value)
    elif cls is nnx.RngCount:
        made = jnp.uint32(value)
    else:
        choices = FLOATS if cls is nnx.Param else VALUES
        made = choices[value % len(choices)](value)
    return cls(made, **METADATA[metadata % len(METADATA)]())


# --- static values --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    """A static value that can be changed in place and has no hash."""

    rate: float = 0.1
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: Any = 0.1


class Color(enum.Enum):
    RED = 1


class Opaque:
    """A static value that is equal only to itself."""

    def __reduce__(self) -> str:
        return "OPAQUE"


def scaled(by: float) -> Callable[[Any], Any]:
    return lambda x: x * by


OPAQUE, CLOSURE = Opaque(), scaled(2.0)

# Called for each copy: the values are equal, and where it is possible not identical.
STATIC: list[Callable[[], Any]] = [
    lambda: 7,
    lambda: None,
    lambda: "".join(["re", "lu"]),
    lambda: float("nan"),
    lambda: -0.0,
    lambda: 0.0,
    lambda: True,
    lambda: 1 + 2.5j,
    lambda: (1, (2.0, None)),
    lambda: frozenset({1, "a"}),
    lambda: {3, 4},
    lambda: b"bytes",
    lambda: range(3),
    lambda: slice(0, 2),
    lambda: lambda x: x + 1,
    lambda: CLOSURE,
    lambda: jnp.tanh,
    lambda: functools.partial(jnp.clip, min=0.0),
    lambda: functools.partial(Config, sizes=[3]),
    Config,
    lambda: Config(float("nan")),
    Frozen,
    lambda: Frozen(-0.0),
    lambda: Color.RED,
    lambda: Config,
    lambda: OPAQUE,
    lambda: np.float32(2),
    lambda: np.float64("nan"),
    lambda: np.dtype("float32"),
    lambda: np.array(["x", "y"]),
    lambda: types.SimpleNamespace(item=OPAQUE, numbers=[1]),
    lambda: collections.OrderedDict(a=1),
    lambda: jax.sharding.PartitionSpec("x", None),
]


# --- recipes --------------------------------------------------------------------------------------------------------

Field = tuple[Any, ...]  # ("node", i) | ("variable", i) | ("array", i) | ("static", i) | ... | ("tuple", fields)


@dataclasses.dataclass(frozen=True)
class Graph:
    """A recipe: Variables as (kind, value, metadata), nodes as (kind, fields), and which nodes are the arguments."""

    variables: tuple[tuple[int, int, int], ...]
    nodes: tuple[tuple[int, tuple[Field, ...]], ...]
    roots: tuple[int, ...]


_index = st.integers(0, 7)
_simple = st.one_of(
    st.tuples(st.just("variable"), _index),
    st.tuples(st.just("node"), _index),
    st.tuples(st.just("array"), _index),
    st.tuples(st.just("static"), st.integers(0, len(STATIC) - 1)),
    st.tuples(st.just("variable"), _index),
    st.tuples(st.just("node"), _index),
    st.tuples(st.just("static"), st.just(STATIC.index(Config))),
    st.tuples(st.just("method"), _index),
    st.tuples(st.just("numpy"), _index),
)
_fields = st.recursive(
    _simple,
    lambda inner: st.tuples(st.sampled_from(["list", "tuple", "dict", "pair"]), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=4,
)


def graphs(arguments: int = 1, largest: int = 5) -> st.SearchStrategy[Graph]:
    """Recipes of graphs with that many arguments; the first is a Block, the others may be any node, also the same."""
    variable = st.tuples(st.integers(0, len(VARIABLES) - 1), _index, st.integers(0, len(METADATA) - 1))
    fields = st.lists(_fields, min_size=2, max_size=5).map(tuple)  # left alone, hypothesis prefers next to nothing
    node = st.tuples(st.integers(0, len(NODES) - 1), fields)
    first = st.tuples(st.just(0), fields)
    others = st.lists(node, min_size=largest // 2, max_size=largest - 1)
    return st.builds(
        Graph,
        variables=st.lists(variable, min_size=3, max_size=6).map(tuple),
        nodes=st.builds(lambda first, rest: (first, *rest), first, others),
        roots=st.tuples(st.just(0), *[_index] * (arguments - 1)),
    )


def make(graph: Graph) -> tuple[Any, ...]:
    """Build the objects of a recipe; returns the arguments."""
    variables = [make_variable(*v) for v in graph.variables]
    nodes = [NODES[kind]() for kind, _ in graph.nodes]
    for node, (_, fields) in zip(nodes, graph.nodes, strict=True):
        for place, field in enumerate(fields):
            put(node, place, _value(field, nodes, variables))
    return tuple([nodes[i % len(nodes)] for i in graph.roots])


def put(node: Any, place: int, value: Any) -> None:
    """Set the attribute or item number `place` of a node, whatever its class."""
    if isinstance(node, nnx.List):
        node.append(value)
    elif isinstance(node, nnx.Dict):
        node[KEYS[place % len(KEYS)]] = value
    else:
        setattr(node, NAMES[place % len(NAMES)], value)


def _value(field: Field, nodes: list[Any], variables: list[nnx.Variable], keys: tuple[Any, ...] = KEYS) -> Any:
    kind, argument = field
    if kind in ("list", "tuple", "dict", "pair"):
        inner = ("a", "b", "c") if kind == "pair" else keys  # JAX cannot flatten a plain dict with mixed keys
        items = [_value(x, nodes, variables, inner) for x in argument]
        return {
            "list": lambda: items,
            "tuple": lambda: tuple(items),
            "dict": lambda: dict(zip(keys, items, strict=False)),
            "pair": lambda: Pair(*([*items, jnp.float32(1), jnp.float32(2)][:2])),
        }[kind]()
    if kind == "method":
        node = nodes[argument % len(nodes)]
        return node.double if isinstance(node, Block) else node
    return {
        "variable": lambda: variables[argument % len(variables)],
        "node": lambda: nodes[argument % len(nodes)],
        "array": lambda: FLOATS[argument % 2](argument),
        "numpy": lambda: np.full(2, argument, np.float32),
        "static": lambda: STATIC[argument](),
    }[kind]()
