"""Random nests of transforms over a Module, beside the same nests of raw JAX over a dict; run by test_nests.py.

A function is a few statements on named values and an array `x`. Ours takes `(module, x)`, changes the Module, and
returns an array of the shape of `x`; the raw one takes `(dict, x)` and returns `(dict, array)`. So does each transform
of such a function, and they nest. All is elementwise, so that any axis can be mapped over, or split over devices.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import nnxlib as nnx

from .compare import Snapshot, assert_no_tracer

DEVICES = jax.device_count()
MESH = jax.make_mesh((DEVICES,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


class Count(nnx.Variable):
    pass


class Net(nnx.Module):
    """Two values of the shape of `x`, and a number."""

    def __init__(self, values):
        self.w, self.s, self.c = nnx.Param(values["w"]), nnx.BatchStat(values["s"]), Count(values["c"])
        self.weights = [self.w]  # the same Variable

    def __getitem__(self, name):
        return getattr(self, name).value

    def __setitem__(self, name, value):
        getattr(self, name).value = value


def start():
    draw = np.random.default_rng(0)
    w, s, x = (jnp.asarray(draw.uniform(0.5, 1.0, (2, 2, 8)), jnp.float32) for _ in range(3))
    return {"w": w, "s": s, "c": jnp.array(0)}, x


# --- functions --------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by the tests themselves."""


def changing(name, value):
    def statement(d, x):
        d[name] = value(d, x)
        return x

    return statement


STATEMENTS = {
    "weigh": lambda d, x: jnp.tanh(x * d["w"]),
    "shift": lambda d, x: x + 0.5 * d["s"],
    "scale": lambda d, x: x * (1 + 0.1 * d["c"]),
    "average": changing("s", lambda d, x: 0.5 * d["s"] + x),
    "decay": changing("w", lambda d, x: 0.9 * d["w"]),
    "exchange": changing("s", lambda d, x: d["w"] * 1.0),
    "count": changing("c", lambda d, x: d["c"] + 1),
}


class Nest:
    """What is drawn for a nest, and when its functions are to fail."""

    def __init__(self, seed):
        self.draw, self.left = random.Random(seed), -1

    def function(self):
        names = self.draw.choices(sorted(STATEMENTS), k=self.draw.randint(2, 4))

        def run(d, x):
            for name in names:
                x = STATEMENTS[name](d, x)
                if isinstance(d, Net):
                    self.left -= 1
                    if self.left == 0:
                        raise Stop
            return x

        def raw(d, x):
            d = dict(d)
            x = run(d, x)
            return d, x

        return run, raw


# --- transforms -------------------------------------------------------------------------------------------------------


def by_axis(axis, number):
    """The axes of a Module, and of a dict."""
    return nnx.StateAxes({Count: number, ...: axis}), {"w": axis, "s": axis, "c": number}


def shard_map(nest, f, g):
    check = nest.draw.random() < 0.7

    def is_whole(x):
        return x.ndim and x.shape[-1] == 8 and jax.sharding.get_abstract_mesh().empty

    def ours(m, x):
        spec = P(*[None] * (x.ndim - 1), "d")
        prefix = nnx.StateSharding({Count: P(), ...: spec})
        options = {"mesh": MESH, "in_specs": (prefix, spec), "out_specs": spec, "check_vma": check}
        return nnx.shard_map(f, **options)(m, x) if is_whole(x) else f(m, x)

    def raw(d, x):
        spec = P(*[None] * (x.ndim - 1), "d")
        specs = {"w": spec, "s": spec, "c": P()}, spec
        return (
            jax.shard_map(g, mesh=MESH, in_specs=specs, out_specs=specs, check_vma=check)(d, x)
            if is_whole(x)
            else g(d, x)
        )

    return ours, raw


def custom_vjp(nest, f, g):
    """The gradient three times as large; none from what the function leaves in its arguments."""
    ours, raw = nnx.custom_vjp(f), jax.custom_vjp(g)
    thrice = lambda tree: jax.tree.map(lambda v: v if v.dtype == jax.dtypes.float0 else 3 * v, tree)
    ours.defvjp(lambda m, x: nnx.vjp(f, m, x), lambda pull, gradients: thrice(pull(gradients[1])))
    nothing = lambda tree: jax.tree.map(lambda v: v if v.dtype == jax.dtypes.float0 else 0 * v, tree)
    raw.defvjp(
        lambda d, x: jax.vjp(g, d, x), lambda pull, gradients: thrice(pull((nothing(gradients[0]), gradients[1])))
    )
    return ours, raw


def zeros(tree):
    return jax.tree.map(
        lambda v: jnp.zeros_like(v) if v.dtype == jnp.float32 else np.zeros(v.shape, jax.dtypes.float0), tree
    )


def custom_jvp(nest, f, g):
    ours, raw = nnx.custom_jvp(f), jax.custom_jvp(g)

    @ours.defjvp
    def rule(primals, tangents):
        y, tangent = nnx.jvp(f, primals, tangents)
        return y, 2 * tangent

    @raw.defjvp
    def raw_rule(primals, tangents):
        (d, y), (_, tangent) = jax.jvp(g, primals, tangents)
        return (d, y), (zeros(d), 2 * tangent)

    return ours, raw


def while_loop(nest, f, g):
    n = nest.draw.randint(0, 2)
    test = lambda carry: carry[0] < n

    def ours(m, x):
        return nnx.while_loop(test, lambda carry: (carry[0] + 1, carry[1], f(*carry[1:])), (0, m, x))[2]

    def raw(d, x):
        return jax.lax.while_loop(test, lambda carry: (carry[0] + 1, *g(*carry[1:])), (0, d, x))[1:]

    return ours, raw


def fori_loop(nest, f, g):
    n, unroll = nest.draw.randint(1, 3), nest.draw.choice([None, 1, 2, True])
    ours = lambda m, x: nnx.fori_loop(0, n, lambda i, c: (c[0], f(c[0], c[1] + i)), (m, x), unroll=unroll)[1]
    raw = lambda d, x: jax.lax.fori_loop(0, n, lambda i, c: g(c[0], c[1] + i), (d, x), unroll=unroll)
    return ours, raw


def scan(nest, f, g):
    """Over an axis; the number is carried."""
    k, reverse = nest.draw.randint(-3, 2), nest.draw.random() < 0.5

    def ours(m, x):
        if not x.ndim:
            return f(m, x)
        axis = k % x.ndim - x.ndim * (k < 0)
        return nnx.scan(f, in_axes=(by_axis(axis, nnx.Carry)[0], axis), out_axes=axis, reverse=reverse)(m, x)

    def raw(d, x):
        if not x.ndim:
            return g(d, x)
        move = lambda *to: lambda v: jnp.moveaxis(v, *to)

        def body(c, slices):
            d, y = g({**slices[0], "c": c}, slices[1])
            return d.pop("c"), (d, y)

        xs = jax.tree.map(move(k % x.ndim, 0), ({"w": d["w"], "s": d["s"]}, x))
        c, ys = jax.lax.scan(body, d["c"], xs, reverse=reverse)
        d, y = jax.tree.map(move(0, k % x.ndim), ys)
        return {**d, "c": c}, y

    return ours, raw


def vmap(nest, f, g):
    k = nest.draw.randint(-3, 2)

    def axes(x):
        axis = k % x.ndim - x.ndim * (k < 0)
        return axis, *by_axis(axis, None)

    def ours(m, x):
        if not x.ndim:
            return f(m, x)
        axis, prefix, _ = axes(x)
        return nnx.vmap(f, in_axes=(prefix, axis), out_axes=axis)(m, x)

    def raw(d, x):
        if not x.ndim:
            return g(d, x)
        axis, _, tree = axes(x)
        return jax.vmap(g, in_axes=(tree, axis), out_axes=(tree, axis))(d, x)

    return ours, raw


def cond(nest, f, g):
    other, raw_other = nest.function()
    ours = lambda m, x: nnx.cond(m["c"] < 1, f, other, m, x)
    return ours, lambda d, x: jax.lax.cond(d["c"] < 1, g, raw_other, d, x)


def grad(nest, f, g):
    def ours(m, x):
        def loss(m, x):
            y = f(m, x)
            return jnp.sum(y**2), y

        (of_m, of_x), y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(m, x)
        return y + 0.1 * of_m.w + 0.1 * of_x

    def raw(d, x):
        def loss(w, x):
            changed, y = g({**d, "w": w}, x)
            return jnp.sum(y**2), (changed, y)

        (of_w, of_x), (d, y) = jax.grad(loss, argnums=(0, 1), has_aux=True)(d["w"], x)
        return d, y + 0.1 * of_w + 0.1 * of_x

    return ours, raw


def linearize(nest, f, g):
    def ours(m, x):
        y, push = nnx.linearize(f, m, x)
        return y + 0.1 * push(nnx.State({"w": x}), x)

    def raw(d, x):
        (changed, y), push = jax.linearize(g, d, x)
        return changed, y + 0.1 * push({**zeros(d), "w": x}, x)[1]

    return ours, raw


INNER = [shard_map, custom_vjp, custom_jvp, while_loop, fori_loop, scan, vmap]
OUTER = [
    *INNER,
    cond,
    grad,
    linearize,
    lambda nest, f, g: (nnx.jit(f), jax.jit(g)),
    lambda nest, f, g: (nnx.remat(f), jax.checkpoint(g)),
]


# --- the cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(14))
def test_a_nest_equals_that_of_raw_jax(seed):
    """Twice in a row: the output, and what is left in the Module; or both fail, and the Module is as it was."""
    nest = Nest(seed)
    ours, raw = nest.function()
    for transform in [INNER[seed % len(INNER)], *nest.draw.choices(OUTER, k=nest.draw.randint(1, 2))]:
        ours, raw = transform(nest, ours, raw)
    d, x = start()
    m = Net(d)
    before = Snapshot(m)
    nest.left = nest.draw.randint(1, 4)
    try:
        ours(m, x)
    except Stop:
        before.assert_unchanged()
        assert_no_tracer(m)
    except (ValueError, TypeError):
        pass  # is raised again below
    nest.left = -1
    m = Net(d)
    for _ in range(2):
        before = Snapshot(m)
        try:
            d, expected = raw(d, x)
        except (ValueError, TypeError):
            with pytest.raises((ValueError, TypeError)):
                ours(m, x)
            before.assert_unchanged()
            assert_no_tracer(m)
            return
        found = ours(m, x)
        for a, b in [(found, expected), *((m[name], d[name]) for name in d)]:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert m.weights[0] is m.w
        assert_no_tracer(m, found)
