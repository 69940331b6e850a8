"""The same script with transforms under flax.nnx and nnxlib: the same numbers, shapes and states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")

from flax import nnx as flax

from .results import ROUNDING, same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

X = np.linspace(0.1, 1.2, 12, dtype=np.float32).reshape(4, 3)


def linear(lib, seed=0):
    return lib.Linear(3, 3, rngs=lib.Rngs(seed))


def make_stack(lib, depth=4, cls=None):
    @lib.vmap(in_axes=0, out_axes=0)
    def create(key):
        return (cls or lib.Linear)(3, 3, rngs=lib.Rngs(key))

    return create(jax.random.split(jax.random.key(0), depth))


def norm_class(lib):
    class Norm(lib.Module):
        def __init__(self, n, m, *, rngs):
            self.linear = lib.Linear(n, m, rngs=rngs)
            self.mean = lib.BatchStat(jnp.zeros(3))
            self.count = lib.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            x = self.linear(x)
            self.mean.value = 0.9 * self.mean.value + 0.1 * x.mean(tuple(range(x.ndim - 1)))
            self.count.value = self.count.value + 1
            return jnp.tanh(x - self.mean.value)

    return Norm


def norm(lib, seed=0):
    return norm_class(lib)(3, 3, rngs=lib.Rngs(seed))


def constructor_over_keys(lib):
    m = make_stack(lib)
    return m, None


def ensemble(lib):
    m = make_stack(lib)
    return m, lib.vmap(lambda m, x: m(x), in_axes=(0, None), out_axes=1)(m, X)


def statistics_by_state_axes(lib):
    m = make_stack(lib, cls=norm_class(lib))
    axes = lib.StateAxes({lib.BatchStat: 0, ...: 0})
    return m, lib.vmap(lambda m, x: m(x), in_axes=(axes, 0))(m, X)


def broadcast_params(lib):
    m = norm(lib)
    m.mean.value, m.count.value = jnp.zeros((4, 3)), jnp.zeros(4, jnp.int32)
    axes = lib.StateAxes({lib.Param: None, ...: 0})
    return m, lib.vmap(lambda m, x: m(x), in_axes=(axes, 0), out_axes=0)(m, X)


def pmean(lib):
    m = norm(lib)

    def f(m, x):
        y = m.linear(x)
        m.mean.value = jax.lax.pmean(y, "batch")
        return y - m.mean.value

    return m, lib.vmap(f, in_axes=(None, 0), axis_name="batch")(m, X)


def vmap_methods(lib):
    class M(lib.Module):
        def __init__(self):
            self.inner = linear(lib)

        @lib.vmap(in_axes=(None, 0))
        def __call__(self, x):
            return self.inner(x)

        @lib.vmap(in_axes=(None, 1, None), out_axes=1)
        def other(self, x, y):
            return x * y.sum()

    m = M()
    return m, (m(X), m.other(X, X))


def scan_stack(lib):
    m = make_stack(lib)

    @lib.scan(in_axes=(lib.Carry, 0), out_axes=lib.Carry)
    def forward(x, m):
        return m(x)

    return m, forward(X, m)


def scan_model_first(lib):
    m = make_stack(lib)

    def layer(m, x, mask, y):
        x = m(x) * mask + y
        return x, x.sum()

    f = lib.scan(layer, in_axes=(0, lib.Carry, None, 0), out_axes=(lib.Carry, 0))
    return m, f(m, X[0], jnp.array([1.0, 0.0, 1.0]), X)


def scan_statistics(lib):
    m = make_stack(lib, cls=norm_class(lib))
    f = lib.scan(lambda x, m: m(x), in_axes=(lib.Carry, 0), out_axes=lib.Carry)
    return m, (f(X, m), f(2 * X, m))


def scan_carry_by_state_axes(lib):
    m = norm(lib)
    axes = lib.StateAxes({(lib.BatchStat, "count"): lib.Carry, lib.Param: None, ...: lib.Carry})
    return m, lib.scan(lambda m, x: m(x), in_axes=(axes, 0), out_axes=0)(m, X)


def scan_all_carried(lib):
    m = norm(lib)

    @lib.scan(in_axes=(lib.StateAxes({...: lib.Carry}), 0), out_axes=0)
    def train(m, x):
        grads = lib.grad(lambda m: (m(x) ** 2).sum())(m)
        lib.update(m, jax.tree.map(lambda p, g: p - 0.1 * g, lib.state(m, lib.Param), grads))
        return m.count.value

    return m, train(m, X)


def scan_sow(lib):
    class Sower(lib.Module):
        def __init__(self):
            self.inner = linear(lib)

        def __call__(self, x):
            x = self.inner(x)
            self.sow(lib.Intermediate, "hidden", x)
            return x

    m = Sower()
    axes = lib.StateAxes({lib.Intermediate: 0, ...: lib.Carry})
    out = lib.scan(lambda m, x: m(x), in_axes=(axes, 0), out_axes=0)(m, X)
    hidden = lib.pop(m, lib.Intermediate)["hidden"]
    return m, (out, hidden.get_value() if hasattr(hidden, "get_value") else hidden)


def scan_method(lib):
    class M(lib.Module):
        def __init__(self):
            self.inner = norm(lib)

        @lib.scan(in_axes=(lib.StateAxes({...: lib.Carry}), lib.Carry, 0), out_axes=(lib.Carry, 0))
        def __call__(self, carry, x):
            carry = carry + self.inner(x)
            return carry, carry

    m = M()
    return m, m(jnp.zeros(3), X)


def scan_axes(lib):
    m = linear(lib)
    xs = X.reshape(2, 2, 3)
    out = lib.scan(lambda m, x: (m(x), x), in_axes=(None, 1), out_axes=(1, 0))(m, xs)
    return m, out


def scan_options(lib):
    m = linear(lib)
    out = lib.scan(lambda c, x: (c * 0.5 + x, c), reverse=True, unroll=2)(jnp.zeros(3), X)
    rolled = lib.scan(lambda c: (c * 2, c), length=3, in_axes=(lib.Carry,), out_axes=(lib.Carry, 0))(jnp.ones(()))
    return m, (out, rolled)


def scan_keyword(lib):
    m = linear(lib)
    return m, lib.scan(lambda c, x, m: (c + m(x), x), in_axes=(lib.Carry, 0, None))(jnp.zeros(3), x=X, m=m)


def scan_carry_holds_a_model(lib):
    m = norm(lib)
    (out, total), ys = lib.scan(lambda c, x: ((c[0], c[1] + c[0](x)), x))((m, jnp.zeros(3)), X)
    assert out is m
    return m, (total, ys)


def dropout_in_scan(lib):
    class Block(lib.Module):
        def __init__(self, n, m, *, rngs):
            self.linear = lib.Linear(n, m, rngs=rngs)
            self.dropout = lib.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.linear(x))

    m = make_stack(lib, cls=Block)
    f = lib.scan(lambda x, m: m(x), in_axes=(lib.Carry, 0), out_axes=lib.Carry)
    return m, (f(X, m), f(X, m))


def conditional(lib, taken):
    class Two(lib.Module):
        def __init__(self):
            self.a, self.b = norm(lib, 0), norm(lib, 1)

    m = Two()
    f = lib.jit(lambda m, p, x: lib.cond(p, lambda m, x: m.a(x), lambda m, x: m.b(x) * 2, m, x))
    return m, (f(m, jnp.array(taken), X), lib.cond(taken, lambda m, x: m.a(x), lambda m, x: x, m, X))


def switched(lib):
    ms = lib.List([norm(lib, seed) for seed in range(3)])
    f = lib.jit(lambda ms, i, x: lib.switch(i, [lambda ms, x, k=k: ms[k](x) for k in range(3)], ms, x))
    return ms, (f(ms, jnp.array(1), X), f(ms, jnp.array(9), X))


def whiled(lib):
    m = norm(lib)
    f = lambda m, x: lib.while_loop(lambda c: c[0].count.value < 3, lambda c: (c[0], c[0](c[1])), (m, x))[1]
    return m, (lib.jit(f)(m, X), f(m, X))


def fori(lib):
    m = norm(lib)
    f = lambda m, x: lib.fori_loop(0, 3, lambda i, c: (c[0], c[0](c[1]) + i), (m, x))[1]
    return m, (lib.jit(f)(m, X), f(m, X))


def rematerialized(lib):
    class M(lib.Module):
        def __init__(self):
            self.inner = norm(lib)

        def block(self, x):
            return self.inner(x)

        @lib.remat
        def bare(self, x):
            return self.inner(x)

        @lib.remat(static_argnums=(2,), prevent_cse=False)
        def static(self, x, times):
            for _ in range(times):
                x = self.inner(x)
            return x

        def __call__(self, x):
            return lib.remat(self.block.__func__)(self, x) + self.bare(x) + self.static(x, 2)

    m = M()
    loss, grads = lib.value_and_grad(lambda m: (m(X) ** 2).sum())(m)
    return m, (loss, {path: leaf.get_value() for path, leaf in lib.to_flat_state(grads)})


def everything_nested(lib):
    m = make_stack(lib, cls=norm_class(lib))

    @lib.jit
    def step(m, x):
        def loss(m):
            f = lib.scan(lib.remat(lambda x, m: m(x)), in_axes=(lib.Carry, 0), out_axes=lib.Carry)
            return (f(x, m) ** 2).sum()

        value, grads = lib.value_and_grad(loss)(m)
        lib.update(m, jax.tree.map(lambda p, g: p - 0.1 * g, lib.state(m, lib.Param), grads))
        return value

    return m, [step(m, X) for _ in range(3)]


SCRIPTS = [
    constructor_over_keys,
    ensemble,
    statistics_by_state_axes,
    broadcast_params,
    pmean,
    vmap_methods,
    scan_stack,
    scan_model_first,
    scan_statistics,
    scan_carry_by_state_axes,
    scan_all_carried,
    scan_sow,
    scan_method,
    scan_axes,
    scan_options,
    scan_keyword,
    scan_carry_holds_a_model,
    dropout_in_scan,
    lambda lib: conditional(lib, True),
    lambda lib: conditional(lib, False),
    switched,
    whiled,
    fori,
    rematerialized,
    everything_nested,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda f: f.__name__)
def test_the_output_and_the_state_afterwards_are_those_of_flax(script):
    same(script, ROUNDING)


def quantize(lib, layer, x):
    kernel = layer.kernel.value
    scale = jnp.abs(kernel).max(0) / 127
    layer.kernel = {"q": lib.Cache(jnp.round(kernel / scale).astype(jnp.int8)), "scale": lib.Param(scale)}
    if lib is flax:
        layer.kernel = lib.data(layer.kernel)


def prune(lib, layer, x):
    del layer.bias
    layer.is_pruned = True


def move(lib, layer, x):
    layer.bias, layer.mean = lib.BatchStat(x.mean(0)), layer.bias


@pytest.mark.parametrize("change", [quantize, prune, move])
def test_a_body_of_scan_may_change_the_structure_of_stacked_layers(change):
    def run(lib):
        stack = make_stack(lib)

        def step(x, layer):
            y = jnp.tanh(layer(x))
            change(lib, layer, x)
            return y

        out = lib.scan(step, in_axes=(lib.Carry, 0), out_axes=lib.Carry)(jnp.asarray(X), stack)
        return out, lib.state(stack), getattr(stack, "is_pruned", False)

    same(run, {"float32": 1e-6})
