"""Drawn nests of transforms around drawn functions, and programs that are wrong: what comes out, and what stays behind.

A function reads and writes a Module: values, statistics, random streams; it attaches, replaces and deletes. It is
wrapped in up to three transforms and called twice. The output, the State and the structure of the Module must be the
same as in flax.nnx, and the same programs must be refused.
"""

import random

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")

import flax.nnx

from .drawn import Note, assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

X = jnp.asarray([[1.0, 2.0], [3.0, 4.0]]) / 3


def make(lib, draw):
    class Part(lib.Module):
        def __init__(self, n):
            self.w, self.stat, self.n = lib.Param(jnp.full((2, 2), 0.5 + n)), lib.BatchStat(jnp.zeros(2)), n

    class Net(lib.Module):
        def __init__(self):
            self.w = lib.Param(jnp.asarray([[1.0, 2.0], [3.0, 4.0]]) / 4, role="w")
            self.b, self.cache = lib.Param(jnp.ones(2)), lib.Cache(jnp.zeros((2, 2)))
            self.stat, self.count = lib.BatchStat(jnp.zeros(2)), lib.Variable(jnp.array(0))
            self.drop = lib.Dropout(0.5, rngs=lib.Rngs(0))
            self.part, self.layers = Part(1), lib.List([Part(k) for k in range(draw.randint(1, 2))])
            self.flag, self.name = 0, "net"
            if draw.random() < 0.4:
                self.tied = self.part

    return Net()


# --- functions of a Module and an array -------------------------------------------------------------------------------


def layers(lib, m, x):
    for layer in m.layers:
        x = x @ layer.w * 0.3
    return x


def doing(change):
    """A statement that changes the Module, and leaves the array alone."""

    def statement(lib, m, x):
        change(lib, m, x)
        return x

    return statement


READS = {
    "linear": lambda lib, m, x: jnp.tanh(x @ m.w + m.b),
    "part": lambda lib, m, x: x @ m.part.w * 0.5,
    "layers": layers,
    "stat": lambda lib, m, x: x + m.stat + m.flag,
}
WRITES = {
    "average": doing(lambda lib, m, x: m.stat.set_value(m.stat.get_value() * 0.5 + x.mean(0))),
    "count": doing(lambda lib, m, x: m.count.set_value(m.count.get_value() + 1)),
    "cache": doing(lambda lib, m, x: m.cache.__setitem__(0, x[0])),
    "dropout": lambda lib, m, x: m.drop(x),
    "of a part": doing(lambda lib, m, x: m.part.stat.set_value(m.part.stat.get_value() + x.sum(0))),
    "decay": doing(lambda lib, m, x: m.b.set_value(m.b.get_value() * 0.9)),
}
RESTRUCTURES = {
    "flag": doing(lambda lib, m, x: setattr(m, "flag", 1)),
    "attach": doing(lambda lib, m, x: setattr(m, "new", lib.Cache(x))),
    "sow": doing(lambda lib, m, x: m.sow(lib.Intermediate, "h", x)),
    "swap": doing(lambda lib, m, x: setattr(m, "part", m.layers[0])),
    "delete": doing(lambda lib, m, x: vars(m).get("name") and delattr(m, "name")),
    "append": doing(lambda lib, m, x: m.layers.append(type(m.part)(7))),
    "eval": doing(lambda lib, m, x: m.eval()),
}


def function(lib, draw, restructures):
    """A function of up to five statements, and whether it changes the structure."""
    names = draw.choices(sorted(READS), k=2) + draw.choices(sorted(WRITES), k=draw.randint(0, 2))
    names += draw.choices(sorted(RESTRUCTURES), k=restructures)
    statements = [(READS | WRITES | RESTRUCTURES)[name] for name in draw.sample(names, len(names))]

    def f(m, x):
        for statement in statements:
            x = statement(lib, m, x)
        return x

    return f


# --- transforms of such functions, which are such functions -----------------------------------------------------------


def loss(f):
    return lambda m, x: jnp.sum(f(m, x) ** 2)


def differentiated(lib, draw, f):
    """One step along some of the gradients."""
    chosen = draw.choice([0, 1, (0, 1), lib.DiffState(0, lib.PathContains("b")), (lib.DiffState(0, lib.Param), 1)])

    def step(m, x):
        grads = lib.grad(loss(f), argnums=chosen)(m, x)
        return x - 0.01 * sum(jnp.sum(g) for g in jax.tree.leaves(grads))

    return step


def with_aux(lib, draw, f):
    def step(m, x):
        value_and_grad = lib.value_and_grad(lambda m, x: (loss(f)(m, x), (f(m, x), m.count.get_value())), has_aux=True)
        (value, (y, count)), grads = value_and_grad(m, x)
        return y + value + count + jnp.sum(grads["b"].get_value())

    return step


def mapped(lib, draw, f):
    whole = lib.StateAxes({lib.RngState: 0, ...: None})

    def over_x(m, x):
        return lib.vmap(f, in_axes=(None, 1), out_axes=1)(m, jnp.stack([x, x + 1], 1))[:, 0]

    def over_streams(m, x):
        with lib.split_rngs(m, splits=2):
            return lib.vmap(f, in_axes=(whole, 0))(m, jnp.stack([x, x]))[1]

    return draw.choice([over_x, over_streams])


def scanned(lib, draw, f):
    carried = lib.StateAxes({lib.Param: None, ...: lib.Carry})

    def pair(m, x):
        both = lib.scan(lambda c, i: ((c[0], f(*c)), i), in_axes=(lib.Carry, 0), out_axes=(lib.Carry, 0))
        return both((m, x), jnp.arange(2.0))[0][1]

    def by_filter(m, x):
        along = lib.scan(lambda m, x, i: f(m, x) + i, in_axes=(carried, lib.Carry, 0), out_axes=lib.Carry)
        return along(m, x, jnp.arange(2.0))

    return draw.choice([pair, by_filter])


def branched(lib, draw, f):
    other, index = function(lib, draw, 0), draw.randint(-1, 3)
    cond = lambda m, x: lib.cond(index > 0, f, other, m, x)
    switch = lambda m, x: lib.switch(jnp.array(index), [f, other, lambda m, x: -x], m, x)
    return draw.choice([cond, switch])


def looped(lib, draw, f):
    n = draw.randint(0, 3)
    fori = lambda m, x: lib.fori_loop(0, n, lambda i, c: (c[0], f(*c)), (m, x))[1]
    test, body = lambda c: c[2] < n, lambda c: (c[0], f(c[0], c[1]), c[2] + 1)
    return draw.choice([fori, lambda m, x: lib.while_loop(test, body, (m, x, 0))[1]])


def returned(lib, draw, f):
    """The Module and a part of it come back as themselves."""

    def again(m, x):
        same, part, y = lib.jit(lambda m, x: (lambda y: (m, m.part, y))(f(m, x)))(m, x)
        return y + 10.0 * (same is not m) + 20.0 * (part is not m.part)

    return again


TRANSFORMS = {
    "jit": lambda lib, draw, f: lib.jit(f, **draw.choice([{}, {"inline": True}, {"keep_unused": True}])),
    "jit of a tree": lambda lib, draw, f: (
        lambda m, x: lib.jit(lambda t: f(t["m"], t["x"][0]))({"m": m, "x": (x, None)})
    ),
    "remat": lambda lib, draw, f: lib.remat(f, **draw.choice([{}, {"prevent_cse": False}])),
    "eval_shape": lambda lib, draw, f: lambda m, x: x * lib.eval_shape(f, m, x).ndim,
    "grad": differentiated,
    "value_and_grad": with_aux,
    "vmap": mapped,
    "scan": scanned,
    "cond": branched,
    "loop": looped,
    "return": returned,
}


def nest(lib, draw: random.Random, note: Note) -> None:
    m = make(lib, draw)
    names = draw.choices(sorted(TRANSFORMS), k=draw.randint(1, 3))
    # A loop that changes the structure is refused more strictly here, and what it passes whole may not change.
    f = function(lib, draw, draw.random() < 0.3 and not {"scan", "loop", "cond", "vmap"} & set(names))
    for name in names:
        f = TRANSFORMS[name](lib, draw, f)
    for call in ("first", "second"):
        note(call, lambda: f(m, X))
        note(f"after the {call}", lambda: m)


@pytest.mark.parametrize("seed", range(20))
def test_nests(seed):
    assert_same(nest, f"nest {seed}", flax.nnx)


# --- programs that are wrong, or odd ----------------------------------------------------------------------------------


def odd(lib, draw: random.Random, note: Note) -> None:
    """Arguments that are the same, prefixes that do not fit, outputs that differ, choices that are none."""
    m = make(lib, draw)
    carry, f = lib.Carry, lambda m, x: x @ m.w
    stack = lib.vmap(lambda key: lib.Linear(2, 2, rngs=lib.Rngs(key)))(jax.random.split(jax.random.key(0), 2))
    by_filter = [lib.StateAxes({lib.Param: 0}), lib.StateAxes({"head": 0}), lib.StateAxes({lib.BatchStat: 0, ...: 0})]
    outputs = [lambda m, x: (x, x), lambda m, x: x.astype(jnp.float16), lambda m, x: x[0], lambda m, x: None]
    output = draw.choice(outputs)  # not in the body: the libraries trace it more or less often
    results = [
        lambda m, x: "text",
        lambda m, x: None,
        lambda m, x: (m, m.part),
        lambda m, x: m.w,
        lambda m, x: [1, 2.5],
    ]
    programs = {
        "aliases": lambda: lib.vmap(lambda a, b, x: x, in_axes=draw.choice([(0, None, 0), (None, 0, 0)]))(m, m.part, X),
        "in_axes": lambda: lib.vmap(f, in_axes=draw.choice([(None,), (None, 0, 0), None, (None, 2), (None, -3)]))(m, X),
        "out_axes": lambda: lib.vmap(lambda x: (x, x), out_axes=draw.choice([(0,), (0, 1), (0, None), 5, (0, 0, 0)]))(
            X
        ),
        "sizes": lambda: lib.vmap(lambda x, y: x + y)(jnp.ones(2), jnp.ones(3)),
        "stack": lambda: lib.vmap(lambda m, x: m(x), in_axes=(draw.choice(by_filter), None))(stack, X),
        "branches": lambda: lib.cond(True, lambda m, x: x, output, m, X),
        "choice": lambda: lib.cond(draw.choice([1, 0.0, jnp.ones(2), "no"]), f, f, m, X),
        "index": lambda: lib.switch(draw.choice([0, 7, -3, 1.0, jnp.ones(2)]), [f, lambda m, x: -x], m, X),
        "carry": lambda: lib.scan(lambda c, x: (output(m, c), x))(jnp.ones(2), X),
        "axes of scan": lambda: lib.scan(
            lambda c, x: (c, x),
            in_axes=draw.choice([(carry, 0), (carry, 1), (carry, 3), (carry, carry), (carry, None), (carry,)]),
            out_axes=draw.choice([(carry, 0), (carry, 1), (0, carry)]),
            length=draw.choice([None, 2, 3]),
        )(jnp.ones(2), X),
        "body": lambda: lib.fori_loop(0, 2, lambda i, x: output(m, x), X),
        "bounds": lambda: lib.fori_loop(*draw.choice([(0, 3), (3, 0), (0, 2.5)]), lambda i, x: x + i, 0.0),
        "not a loss": lambda: lib.grad(draw.choice([f, lambda m, x: (x.sum(), 1), lambda m, x: m, lambda m, x: 1]))(
            m, X
        ),
        "argnums": lambda: lib.grad(loss(f), argnums=draw.choice([(1, 0), (0, 0), "m", 1.0]))(m, X),
        "aux": lambda: lib.grad(lambda m, x: (f(m, x).sum(), {"m": m.part, "x": x, "n": None}), has_aux=True)(m, X),
        "integers": lambda: lib.grad(lambda x: x.sum(), allow_int=draw.random() < 0.5)(jnp.arange(3)),
        "static": lambda: lib.jit(lambda m, x, n: x * len(n), static_argnums=draw.choice([2, -1, 5]))(m, X, (1, 2)),
        "calls": lambda: lib.jit(lambda m, x, *, k=2: x * k)(*draw.choice([(m,), (m, X, 1), (m, X)])),
        "arguments": lambda: lib.jit(lambda m, x: 1)(m, draw.choice(["text", None, object(), len, {"k": X}, 2j])),
        "results": lambda: lib.jit(draw.choice(results))(m, X),
        "donation": lambda: lib.jit(f, donate_argnums=draw.choice([0, 1]))(m, X + 0),
        "abstract": lambda: lib.eval_shape(draw.choice([lambda m: m, lambda m: m.w, lambda m: {"a": 1}]), m),
    }
    for name in draw.sample(sorted(programs), 8):
        note(name, programs[name])
        note(f"after {name}", lambda: lib.state(m))


@pytest.mark.parametrize("seed", range(12))
def test_odd_programs(seed):
    assert_same(odd, f"odd {seed}", flax.nnx)
