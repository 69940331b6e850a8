"""vjp, jvp, custom_vjp, checkify, make_jaxpr and shard_map: the same scripts under flax.nnx and nnxlib.

flax has no vjp, jvp or make_jaxpr in its default mode, so it runs them without updates. There the gradient of a Module
is a Module; ours is a State with those leaves of it that are of floating type.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import nnxlib

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")

import flax
import flax.nnx

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(not hasattr(flax.nnx, "jvp"), reason="this flax has no jvp"),
]

X = jnp.array([2.0, 3.0])
WITHOUT_UPDATES = {flax.nnx: {"graph": True, "graph_updates": False}, nnxlib: {}}


def make(nnx):
    """A Module of the library with a Param, a statistic and, unless all is to be differentiated, a counter."""

    class Net(nnx.Module):
        def __init__(self):
            self.x, self.y = nnx.Param(jnp.array([1.0, 2.0])), nnx.Param(jnp.array(3.0))
            self.stat = nnx.BatchStat(jnp.array(0.5))
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            self.stat[...] = self.stat[...] + 1.0
            return jnp.sin(self.x[...]) * self.y[...] * x

    return Net()


def plain(nnx, tree):
    """Nested dicts and lists of numbers; of Modules and States the leaves of floating type."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    if isinstance(tree, nnx.State):
        pure = nnx.to_pure_dict(tree)
        return {k: np.asarray(v).tolist() for k, v in pure.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
    if isinstance(tree, tuple | list):
        return [plain(nnx, x) for x in tree]
    return None if tree is None else np.asarray(tree).tolist()


def assert_same(script):
    ours, theirs = (plain(nnx, script(nnx)) for nnx in (nnxlib, flax.nnx))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


def vjp(nnx):
    m = make(nnx)
    y, pull_back = nnx.vjp(lambda m, x: m(x), m, X, **WITHOUT_UPDATES[nnx])
    return y, pull_back(jnp.array([1.0, 10.0])), m, m.calls[...]


def vjp_decorator(nnx):
    m = make(nnx)
    y, pull_back, aux = nnx.vjp(lambda m, x: (m(x), m.calls[...]), has_aux=True, **WITHOUT_UPDATES[nnx])(m, X)
    return y, pull_back(y), aux


def vjp_of_arrays(nnx):
    y, pull_back = nnx.vjp(lambda t: t[0] * t[1], (X, 2 * X), **WITHOUT_UPDATES[nnx])
    return y, pull_back(y)


def jvp(nnx):
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.ones)
    along = jax.tree.map(lambda x: 0.5 * jnp.ones_like(x), nnx.clone(layer))
    return nnx.jvp(lambda m, x: jnp.tanh(m(x)), (layer, X), (along, X), **WITHOUT_UPDATES[nnx])


def custom(nnx, use, **options):
    """A function with three times its gradient, the state of the model after ``use``."""

    @nnx.custom_vjp(**options)
    def f(m, a):
        m.calls[...] += 1
        return (jnp.sin(m.x[...]) * m.y[...] * a).sum()

    def forward(m, a):
        return f(m, a), (jnp.cos(m.x[...]), m, a)

    def backward(residuals, gradients):
        cos, m, a = residuals
        (of_m, of_a), of_out = gradients
        assert isinstance(of_m, nnx.State)
        assert of_a is None
        of_m["x"][...] = of_m["x"][...] + 3 * of_out * cos * m.y[...] * a
        return of_m, 3 * of_out * a

    f.defvjp(forward, backward)
    m = make(nnx)
    return use(nnx, f, m), m, m.calls[...]


def custom_vjp(nnx):
    return custom(nnx, lambda nnx, f, m: nnx.grad(f, argnums=(0, 1))(m, X))


def custom_vjp_in_jit(nnx):
    return custom(nnx, lambda nnx, f, m: nnx.jit(nnx.value_and_grad(f))(m, X))


def custom_vjp_not_differentiated(nnx):
    return custom(nnx, lambda nnx, f, m: f(m, X))


def custom_vjp_used_on(nnx):
    return custom(nnx, lambda nnx, f, m: nnx.grad(lambda m, a: f(m, a) + (m.x[...] ** 2).sum())(m, X))


def custom_vjp_nondiff(nnx):
    @nnx.custom_vjp(nondiff_argnums=(1,))
    def f(m, scale):
        return m.y[...] * scale

    def backward(scale, residuals, gradients):
        (of_m,), of_out = gradients
        of_m["y"][...] = 100 * scale * of_out
        return (of_m,)

    f.defvjp(lambda m, scale: (f(m, scale), ()), backward)
    return nnx.grad(f)(make(nnx), 2.0)


def custom_vjp_diff_state(nnx):
    x_only = nnx.DiffState(0, nnx.PathContains("x"))

    @nnx.custom_vjp(nondiff_argnums=(x_only,))
    def f(m):
        return (m.x[...] * m.y[...]).sum()

    f.defvjp(lambda m: (f(m), m), lambda m, g: (nnx.State({"x": nnx.Param(10 * m.x[...] * g[1])}),))
    return nnx.grad(f, argnums=x_only)(make(nnx))


def checked(nnx):
    def f(m, x):
        checkify.check((x > 0).all(), "not positive")
        return m(x)

    m = make(nnx)
    error, y = nnx.checkify(f)(m, X)
    failed, _ = nnx.checkify(f)(m, -X)
    assert error.get() is None
    assert "not positive" in failed.get()
    return y, m, m.calls[...]


def jaxpr(nnx):
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    traced = nnx.make_jaxpr(lambda m, x: m(x), **WITHOUT_UPDATES[nnx])(layer, X)
    return [len(traced.in_avals), *(a.shape for a in traced.in_avals)]


def shard_map(nnx):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = nnx.StateSharding({nnx.PathContains("x"): jax.P("d"), ...: jax.P()})
    f = nnx.shard_map(lambda m, x: m(x), mesh=mesh, in_specs=(specs, jax.P("d")), out_specs=jax.P("d"))
    m = make(nnx)
    return f(m, X), m, m.calls[...]


def path_filters_of_tied_weights(nnx):
    """A tied weight is where its first path leads, as in a State, whatever a filter says of the second."""
    embed = nnx.Embed(3, 2, rngs=nnx.Rngs(0))
    m = nnx.Dict(embed=embed, linear=nnx.Linear(2, 2, rngs=nnx.Rngs(1)), head=embed)
    loss = lambda m: m["head"].attend(m["linear"](m["embed"](jnp.array([0, 2])))).sum()
    filters = nnx.PathContains("embed"), nnx.PathContains("linear"), nnx.Not(nnx.PathContains("head"))
    grads = [nnx.grad(loss, argnums=nnx.DiffState(0, filter))(m) for filter in filters]
    return [[leaf[...] for _, leaf in nnx.to_flat_state(state)] for state in grads]


def path_axes_of_tied_weights(nnx):
    m = nnx.Dict(a=nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)), b=nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    m["b"].kernel = m["a"].kernel
    m["b"].bias.set_value(jnp.arange(6.0).reshape(3, 2))
    axes = nnx.StateAxes({nnx.PathContains("a"): None, ...: 0})
    y, m = nnx.vmap(lambda m, x: (m["b"](m["a"](x)), m), in_axes=(axes, None), out_axes=(0, axes))(m, X)
    return [y, *[leaf[...] for _, leaf in nnx.to_flat_state(nnx.state(m))]]


SCRIPTS = [
    vjp, vjp_decorator, vjp_of_arrays, jvp, custom_vjp, custom_vjp_in_jit, custom_vjp_not_differentiated,
    custom_vjp_used_on, custom_vjp_nondiff, custom_vjp_diff_state, checked, jaxpr, shard_map,
    path_filters_of_tied_weights, path_axes_of_tied_weights,
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_same_as_flax(script):
    """Values, gradients by path and the state left behind are the same."""
    assert_same(script)
