"""Drawn object graphs and sequences of operations on them: after each operation all that can be seen is the same.

Trees of Modules, Lists and Dicts have shared parts, static values, arrays as attributes, and Variables of
several types with metadata and hooks. Random streams are drawn from, split and forked.
"""

import copy
import pickle
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")

import flax.nnx

from nnxlib.compat import flax as compat

from .drawn import Note, assert_same
from .results import facts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

VALUES = [np.float32(1.5), np.arange(2.0), np.ones((2, 3)), np.zeros(0), np.arange(3)]
NAMES = ["a", "b", "layer", "z", "Big"]


class Classes:
    """The classes of the drawn graphs, as a user of a library would write them."""

    def __init__(self, lib):
        class Node(lib.Module):
            pass

        class Hooked(lib.Variable):
            def on_get_value(self, value):
                return value * 1

            def on_set_value(self, value):
                return value + 1

        class Weight(lib.Param):
            pass

        self.node = Node
        self.variables = [lib.Param, lib.Param, Weight, lib.BatchStat, lib.Intermediate, lib.Variable, Hooked]


def graph(lib, draw, sharing=True):
    """A Module with up to three levels below it."""
    classes, made = Classes(lib), []

    def value():
        return jnp.asarray(draw.choice(VALUES), draw.choice([jnp.float32, jnp.float32, jnp.bfloat16, jnp.int32]))

    def variable():
        metadata = {name: draw.choice(["a", "b"]) for name in ("tag", "note") if draw.random() < 0.2}
        return draw.choice(classes.variables)(value(), **metadata)

    def data(depth):
        kind = draw.random()
        if made and sharing and kind < 0.15:
            return draw.choice(made)
        made.append(variable() if depth == 0 or kind < 0.5 else node(depth - 1))
        return made[-1]

    def child(depth):
        kind = draw.random()
        if kind < 0.7:
            return data(depth)
        return value() if kind < 0.8 else draw.choice([1, "name", None, (1, 2), 2.5, True])

    def node(depth):
        kind = draw.random()
        if kind < 0.15:
            return draw.choice([
                lambda: lib.Linear(1, 2, rngs=lib.Rngs(draw.randrange(3))),
                lambda: lib.Dropout(0.5, rngs=lib.Rngs(draw.randrange(3))),
                lambda: lib.BatchNorm(2, rngs=lib.Rngs(0)),
                lambda: lib.Rngs(draw.randrange(3), dropout=5),
            ])()  # fmt: skip
        names = draw.sample(NAMES, draw.randint(1, 3))
        if kind < 0.3:
            return lib.List([data(depth) for _ in names])
        if kind < 0.45:
            return lib.Dict({name: data(depth) for name in names})
        return with_attributes(names, depth)

    def with_attributes(names, depth):
        result = classes.node()
        for name in names:
            setattr(result, name, child(depth))
        return result

    return with_attributes(draw.sample(NAMES, 3), 2)


def filters(lib, draw):
    drawn = draw.choices(
        [
            lib.Param, lib.BatchStat, "a", lib.PathContains("a"), lib.PathContains(0), lib.Not(lib.Param),
            [lib.Cache, "b"], lib.All(lib.Param, lib.PathContains("b")), lib.Any(lib.Intermediate, "a"), jax.Array,
            lib.OfType(lib.Variable), lib.WithTag("b"), lambda path, x: len(path) > 1, True, None,
            lambda path, x: isinstance(x, lib.Param),
        ],
        k=draw.randint(1, 2),
    )  # fmt: skip
    return drawn + [...] * (draw.random() < 0.7)


def doubled(x):
    return x * 2 if jnp.issubdtype(jnp.result_type(x), jnp.number) else x


def step(lib, draw, m, note):
    """One operation; returns the model to go on with."""
    name = draw.choice(sorted(OPERATIONS))
    made = note(name, lambda: OPERATIONS[name](lib, draw, m))
    return made if isinstance(made, lib.Module) else m


def written(lib, draw, m):
    lib.update(m, jax.tree.map(doubled, lib.state(m, *filters(lib, draw)[:1])))


def written_pure(lib, draw, m):
    state = lib.state(m, lib.Param)
    lib.replace_by_pure_dict(state, jax.tree.map(doubled, lib.to_pure_dict(state)))
    lib.update(m, state)
    return state


def merged(lib, draw, m):
    graphdef, *states = lib.split(m, lib.Param, lib.BatchStat, ...)
    return lib.merge(graphdef, *draw.sample(states, 3), copy=True)


def attributes(lib, draw, m):
    m.extra, m.array, m.variable = 3, jnp.ones(2), lib.Param(jnp.zeros(2))
    if draw.random() < 0.5:
        del m.array
    if draw.random() < 0.5:
        m.sub = lib.Dict(part=m.variable)
    m.set_attributes(rate=0.3, raise_if_not_found=draw.random() < 0.5)


def modes(lib, draw, m):
    m.eval()
    evaluated = facts(lib, m)
    m.train()
    return evaluated, lib.view(m, deterministic=True, raise_if_not_found=False)


def of_a_variable(lib, draw, m):
    found = [x for _, x in lib.iter_graph(m) if isinstance(x, lib.Variable) and not isinstance(x, lib.RngState)]
    v = draw.choice([x for x in found if x.ndim])
    v.set_value(v.get_value() * 2)
    v[...] = v[...] + 1
    v.set_metadata("mark", 1)
    operators = [v + 1, 2 - v, v * v, -v, abs(v), v / 2, v**2, v.shape, v.dtype, v.at[0].set(5), v.T, v.sum(), len(v)]
    return operators, v.copy(), v.replace(jnp.ones(3)), v.has_metadata("tag"), v.type.__name__


def of_a_state(lib, draw, m):
    state = lib.state(m)
    flat = lib.to_flat_state(state)
    return [
        list(state), state.split(*filters(lib, draw), ...), state.filter(*filters(lib, draw)),
        lib.from_flat_state(flat),
        state - lib.state(m, lib.Param), lib.merge_state(lib.state(m, lib.Param), lib.state(m, lib.Not(lib.Param))),
        lib.map_state(lambda path, x: x.copy() if isinstance(x, lib.Variable) else x, state), state.to_pure_dict(),
        pickle.loads(pickle.dumps(lib.to_pure_dict(lib.state(m, lib.Param)))),
        [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)],
    ]  # fmt: skip


def sown(lib, draw, m):
    name = draw.choice(["h", "a"])
    m.sow(lib.Intermediate, name, jnp.ones(2))
    m.sow(lib.Intermediate, name, jnp.zeros(2))
    return m.perturb("delta", jnp.ones(2)), lib.pop(m, lib.Perturbation)


def jitted(lib, draw, m):
    @lib.jit
    def change(m):
        for _, x in lib.iter_graph(m):
            if isinstance(x, lib.Param):
                x.set_value(x.get_value() * 2)
        m.attached, m.number = lib.Cache(jnp.ones(2)), 3
        return m

    return change(m)


OPERATIONS = {
    "state": lambda lib, draw, m: lib.state(m, *filters(lib, draw)),
    "split": lambda lib, draw, m: lib.split(m, *filters(lib, draw))[1:],
    "merge": merged,
    "merge missing": lambda lib, draw, m: lib.merge(lib.graphdef(m), lib.state(m, lib.BatchStat)),
    "update": written,
    "update by a pure dict": written_pure,
    "clone": lambda lib, draw, m: lib.clone(m),
    "deepcopy": lambda lib, draw, m: copy.deepcopy(m),
    "graphdef": lambda lib, draw, m: [
        lib.graphdef(m) == lib.split(m, lib.Param, ...)[0],
        hash(lib.graphdef(m)) == hash(lib.graphdef(m)),
        lib.graphdef(lib.clone(m)) == lib.graphdef(m),
    ],
    "iter_graph": lambda lib, draw, m: [
        (path, type(x).__name__) for path, x in lib.iter_graph(m) if isinstance(x, lib.Variable | lib.Linear)
    ],
    "attributes": attributes,
    "modes": modes,
    "metadata": lambda lib, draw, m: lib.set_metadata(m, only=filters(lib, draw)[0], mark=1),
    "variable": of_a_variable,
    "state methods": of_a_state,
    "sow": sown,
    "jit": jitted,
    "eval_shape": lambda lib, draw, m: lib.state(lib.eval_shape(lambda m: m, m)),
}


def operations(lib, draw: random.Random, note: Note) -> None:
    m = note("graph", lambda: graph(lib, draw))
    for _ in range(5):
        m = step(lib, random.Random(draw.random()), m, note)
        note("after", lambda m=m: m)


@pytest.mark.parametrize("seed", range(16))
def test_operations(seed):
    assert_same(operations, f"graph {seed}", flax.nnx)


def operations_of_trees(lib, draw: random.Random, note: Note) -> None:
    """Without sharing, as in tree mode."""
    m = note("graph", lambda: graph(lib, draw, sharing=False))
    for options in ({"graph": False}, {}):
        note("state", lambda options=options: lib.state(m, *filters(lib, draw), **options))
        note("merge", lambda options=options: lib.merge(*lib.split(m, lib.Param, ..., **options)))
        note("clone", lambda options=options: lib.clone(m, **options))
    note("shared", lambda: lib.state(lib.List([m, m]), graph=False))
    note("jit", lambda: lib.jit(lambda m: m.set_attributes(more=1, raise_if_not_found=False), graph=False)(m))
    note("after", lambda: m)


@pytest.mark.parametrize("seed", range(6))
def test_operations_of_trees(seed):
    assert_same(operations_of_trees, f"tree {seed}", flax.nnx, compat)


# --- random streams ---------------------------------------------------------------------------------------------------


def streams(lib, draw: random.Random, note: Note) -> None:
    """Keys and counts of every stream after each way of using them."""
    named = {
        name: k * 100 + draw.randrange(100) for k, name in enumerate(draw.sample(["params", "dropout", "noise"], 2))
    }
    rngs = draw.choice([lib.Rngs(draw.randrange(3), **named), lib.Rngs(jax.random.key(7), **named)])

    class Model(lib.Module):
        def __init__(self):
            self.drop, self.other = lib.Dropout(0.5, rngs=rngs), lib.Dropout(0.5, rngs=rngs.fork())
            self.rngs = rngs

    x = jnp.ones((4, 2))
    call = lambda m, x: m.drop(x) + m.other(x) * m.rngs.noise.uniform(())
    whole = lib.StateAxes({lib.RngState: 0, ...: None})

    def inside(m, **options):
        with lib.split_rngs(m, **options):
            return jax.tree.map(lambda x: x, lib.state(m, lib.RngState))  # flax.nnx puts the Variables back afterwards

    def carried(m):
        axes = lib.StateAxes({lib.RngCount: lib.Carry, ...: None})
        return lib.scan(call, in_axes=(axes, lib.Carry), out_axes=lib.Carry, length=3)(m, x)

    ways = {
        "draw": lambda m: [rngs(), rngs.params(), rngs["dropout"](), rngs.other(), rngs.noise.normal((2,))],
        "fork": lambda m: rngs.fork(split=draw.choice([2, {"params": 2}, {"dropout": (2, 2), ...: 3}])),
        "stream": lambda m: [rngs.params.fork(), rngs.noise.split(3), rngs.dropout.split((2, 2))],
        "reseed": lambda m: lib.reseed(m, default=draw.randrange(9)),
        "split_rngs": lambda m: inside(m, splits=draw.choice([2, (2, 3)]), only=draw.choice(["params", ...])),
        "squeeze": lambda m: inside(m, splits=1, squeeze=True),
        "backups": lambda m: lib.restore_rngs(lib.split_rngs(m, splits=2)),
        "clone": lambda m: lib.clone(rngs).params(),
        "jit": lambda m: lib.jit(call)(m, x),
        "grad": lambda m: lib.grad(lambda x, m: lib.remat(call)(m, x).sum())(x, m),
        "cond": lambda m: lib.cond(draw.random() < 0.5, call, lambda m, x: x, m, x),
        "fori_loop": lambda m: lib.fori_loop(0, 3, lambda i, c: (c[0], call(*c)), (m, x))[1],
        "vmap": lambda m: lib.split_rngs(splits=4)(lib.vmap(call, in_axes=(whole, 0)))(m, x),
        "scan": carried,
        "stack": lambda m: lib.split_rngs(splits=3)(lib.vmap(lambda rngs: lib.Linear(2, 2, rngs=rngs)))(rngs),
        "call": lambda m: [m.drop(x, rngs=lib.Rngs(3)), m.drop(x, rngs=rngs), m.drop(x, rngs=rngs.params)],
    }
    for _ in range(4):
        m, way = Model(), draw.choice(sorted(ways))
        note(way, lambda way=way, m=m: ways[way](m))
        note("streams", lambda m=m: lib.state(m))


@pytest.mark.parametrize("seed", range(16))
def test_streams(seed):
    assert_same(streams, f"streams {seed}", flax.nnx)
