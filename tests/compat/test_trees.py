"""Transforms in tree mode, and without graph updates."""

import functools

import jax
import jax.numpy as jnp
import pytest

from nnxlib.compat import flax as nnx


class Pair(nnx.Module):
    def __init__(self, x, y, calls=0):
        self.x, self.y, self.calls = x, y, calls


def pair(x=2.0, y=3.0):
    return Pair(nnx.Param(jnp.array(x)), nnx.Param(jnp.array(y)))


MODES = [{"graph": False}, {"graph_updates": False}, {"graph": False, "graph_updates": False}]
without_updates = pytest.mark.parametrize("mode", MODES, ids=str)


@without_updates
def test_values_come_out_and_structure_does_not(mode):
    """Of jit, remat, grad, vmap and cond alike."""

    def change(m):
        m.x[...] += 1.0
        m.calls += 1
        m.x, m.y = m.y, m.x
        m.more = nnx.Param(jnp.ones(2))
        return m.x * m.y

    m = pair()
    x, y = m.x, m.y
    assert nnx.jit(change, **mode)(m) == 9.0
    assert nnx.jit(**mode)(change)(m) == 12.0
    assert nnx.remat(change, **mode)(m) == 15.0
    assert nnx.cond(True, change, lambda m: m.x * m.y, m, **mode) == 18.0
    assert nnx.vmap(change, in_axes=None, out_axes=None, axis_size=2, **mode)(m) == 21.0
    assert nnx.grad(change, **mode)(m).x == 3.0
    assert (m.x is x, m.y is y, m.calls, hasattr(m, "more"), x.value) == (True, True, 0, False, 8.0)
    nnx.jit(change)(m)
    assert (m.x is y, m.calls, hasattr(m, "more")) == (True, 1, True)


@without_updates
def test_structure_does_not_come_out_of_a_partial(mode):
    def step(scale, m):
        m.x.value = scale * m.x
        m.calls += 1
        return m.x * 1

    double = functools.partial(step, 2.0)
    for call in (
        lambda m: nnx.jit(double, **mode)(m),
        lambda m: nnx.remat(functools.partial(double), **mode)(m),
        lambda m: nnx.cond(True, double, functools.partial(step, 3.0), m, **mode),
        lambda m: nnx.switch(0, [double, functools.partial(step, 3.0)], m, **mode),
    ):
        m = pair()
        assert (call(m), m.x, m.calls) == (4.0, 4.0, 0)


@without_updates
def test_metadata_comes_out(mode):
    """A Variable comes out whole, also if only its metadata has changed."""
    for transform in (nnx.jit, nnx.remat, nnx.grad):
        m = pair()
        transform(lambda m: m.x.set_metadata("seen", 1) or m.x * m.y, **mode)(m)
        assert (m.x.get_metadata("seen"), m.y.has_metadata("seen")) == (1, False)


def test_what_is_compiled_for_a_function_is_found_again():
    """A branch that is passed again and again is not traced again."""
    traces = []

    def branch(m):
        traces.append(m)
        return m.x * 2.0

    m = pair()
    for _ in range(3):
        nnx.cond(jnp.array(True), branch, branch, m, graph_updates=False)
    for _ in range(3):
        nnx.jit(branch, graph_updates=False)(m)
    assert len(traces) <= 2 + 3


@without_updates
def test_what_is_sown_is_captured(mode):
    def sowing(m):
        m.sow(nnx.Intermediate, "seen", m.x * 1.0)
        return m.y * 1.0

    run = lambda m: nnx.jit(sowing, **mode)(m)
    out, seen = nnx.capture(run, nnx.Intermediate)(pair())
    assert (out, seen["seen"][0]) == (3.0, 2.0)


@without_updates
def test_a_variable_that_comes_out_is_refused(mode):
    m = pair()
    with pytest.raises(ValueError, match=r"Duplicate Param found at paths args\[0\].x, out.*Variable aliasing"):
        nnx.jit(lambda m: m.x, **mode)(m)
    assert isinstance(nnx.jit(lambda m: nnx.clone(m), **mode)(m), Pair)


@without_updates
def test_a_new_variable_may_be_attached_and_returned(mode):
    """What it is attached to stays as it was, so there is one way by which it comes out."""

    def attach(m):
        m.more = nnx.Param(m.x * 2.0)
        return m.more

    m = pair()
    assert nnx.jit(attach, **mode)(m) == 4.0
    assert not hasattr(m, "more")
    empty = Pair(1, 2)
    made = nnx.jit(lambda m: setattr(m, "more", nnx.Param(jnp.ones(()))) or m, **mode)(empty)
    assert (made is empty, made.more == 1.0, hasattr(empty, "more")) == (False, True, False)


def test_a_new_variable_that_is_returned_twice_is_refused_in_tree_mode():
    make = lambda x: [nnx.Param(x)] * 2
    a, b = nnx.jit(make, graph_updates=False)(1.0)
    assert a is b
    with pytest.raises(ValueError, match=r"Duplicate Param found at paths out\[0\], out\[1\]"):
        nnx.jit(make, graph=False)(1.0)


def test_a_variable_that_goes_in_twice_is_refused_in_tree_mode():
    v = nnx.Param(jnp.array(1.0))
    add = lambda a, b: a.x + b.x
    a, b = Pair(v, 1), Pair(v, 2)
    assert nnx.jit(add, graph_updates=False)(a, b) == nnx.cond(True, add, add, a, b, graph_updates=False) == 2.0
    for call in (
        lambda: nnx.jit(add, graph=False)(a, b),
        lambda: nnx.jit_partial(add, a, b, graph=False),
        lambda: nnx.vmap(add, in_axes=None, axis_size=2, graph=False)(a, b),
        lambda: nnx.eval_shape(add, a, b, graph_updates=False),
        lambda: nnx.cond(True, add, add, a, b, graph=False),
    ):
        with pytest.raises(ValueError, match=r"Duplicate Param found at paths .*args\[\d\].x, "):
            call()


@without_updates
def test_prefixes_by_filter_are_refused(mode):
    with pytest.raises(ValueError, match="`in_axes` cannot contain `StateAxes` objects"):
        nnx.vmap(lambda m: m, in_axes=(nnx.StateAxes({...: 0}),), **mode)
    with pytest.raises(ValueError, match="`argnums` cannot contain `DiffState` objects"):
        nnx.grad(lambda m: m, argnums=nnx.DiffState(0, ...), **mode)


@without_updates
def test_derivatives_of_pytrees_are_like_them(mode):
    """Also of dicts and tuples with Variables, what they share is shared in the gradient."""
    p, q = nnx.Param(jnp.array(2.0)), nnx.BatchStat(jnp.array(3.0))
    grads = nnx.grad(lambda d: d["a"][0] * d["a"][1] * d["c"], **mode)({"a": [p, q], "c": jnp.array(4.0)})
    assert (type(grads["a"][0]), type(grads["a"][1])) == (nnx.Param, nnx.BatchStat)
    assert [float(x) for x in jax.tree.leaves(grads)] == [12.0, 8.0, 6.0]
    tied = nnx.grad(lambda d: d["a"] * d["b"], graph_updates=False)({"a": p, "b": p})
    assert tied["a"] is tied["b"]
    assert tied["a"] == 4.0
    out, pull_back = nnx.vjp(lambda m, x: m.x * x, pair(), 5.0, **mode)
    of_m, of_x = jax.jit(lambda pull, g: pull(g))(pull_back, jnp.array(1.0))
    assert (out, type(of_m), of_m.x, of_m.y, of_x) == (10.0, Pair, 5.0, 0.0, 2.0)
    out, along = nnx.jvp(lambda m: nnx.clone(m), (pair(),), (pair(1.0, 0.5),), **mode)
    assert (type(along), along.x, along.y) == (Pair, 1.0, 0.5)


@without_updates
def test_a_module_without_parameters_may_be_differentiated(mode):
    """It gets a Module without parameters: a layer that only scales, say, beside an array."""
    plain = Pair(nnx.Variable(jnp.array(2)), 3.0)
    grads, of_x = nnx.grad(lambda m, x: m.y * x, argnums=(0, 1), **mode)(plain, 1.0)
    assert (type(grads), grads.x, grads.y, of_x) == (Pair, 0, 3.0, 3.0)


@without_updates
def test_rules_take_and_give_modules(mode):
    """The gradient of the output alone, and of what the function changed if the rule takes a further argument."""

    @nnx.custom_vjp(nondiff_argnums=1, **mode)
    def f(m, scale):
        m.y[...] += 1.0
        m.calls += 1
        return scale * m.x * m.y, nnx.clone(m)

    def forward(m, scale):
        return f(m, scale), m

    def backward(scale, m, gradient):
        of_product, of_clone = gradient
        assert isinstance(of_clone, Pair)
        grads = nnx.clone(m)
        grads.x[...], grads.y[...] = 100.0 * scale * of_product, 10.0 * of_clone.y
        return (grads,)

    f.defvjp(forward, backward)
    loss = lambda m: (lambda out: out[0] + 7.0 * out[1].y)(f(m, 2))
    m = pair()
    grads = nnx.grad(loss, **mode)(m)
    assert (type(grads), grads.x, grads.y, m.y.value, m.calls) == (Pair, 200.0, 70.0, 4.0, 0)

    def backward_of_changes(scale, m, gradient, changes):
        (changed,) = changes
        assert changed.x is None
        assert type(changed.y) is nnx.Param
        grads = nnx.clone(m)
        grads.x[...], grads.y[...] = 0.0, changed.y
        return (grads,)

    f.defvjp(forward, backward_of_changes)
    assert nnx.grad(lambda m: f(m, 2)[0] + 5.0 * m.y, **mode)(m).y == 5.0


def test_a_rule_gets_gradients_of_all_leaves():
    """In graph mode, so that a rule can pass them on to ``jax.vjp`` of a function that returns the State."""

    class Counting(nnx.Module):
        def __init__(self):
            self.x, self.seen = nnx.Param(jnp.array(2.0)), nnx.BatchStat(jnp.array(0.0))
            self.calls, self.rngs = nnx.BatchStat(jnp.array(0)), nnx.Rngs(0)

        def __call__(self, a):
            self.calls[...] += 1
            self.seen[...] += a
            return self.x * a

    f = nnx.custom_vjp(lambda m, a: m(a))

    def forward(m, a):
        graphdef, state = nnx.split(m)
        return f(m, a), (graphdef, state, a)

    def backward(residuals, gradients):
        graphdef, state, a = residuals
        (of_m, _), of_output = gradients

        def again(state, a):
            m = nnx.merge(graphdef, state, copy=True)
            return m(a), nnx.state(m)

        return jax.vjp(again, state, a)[1]((of_output, of_m))

    f.defvjp(forward, backward)
    m = Counting()
    of_m, of_a = nnx.grad(lambda m, a: f(m, a) + 10.0 * m.seen, argnums=(0, 1))(m, jnp.array(3.0))
    assert (of_m["x"], of_a, m.calls) == (3.0, 12.0, 1)


def test_variables_of_a_shared_module_are_shared():
    m = nnx.Dict(x=nnx.Dict(w=nnx.Param(1.0)))
    with pytest.raises(nnx.errors.AliasingError, match=r"Duplicate Param found at paths args\[0\]\.x\.w, out\.w"):
        nnx.vmap(lambda m: m.x, in_axes=None, out_axes=None, axis_size=2, graph_updates=False)(m)
    shared = nnx.Dict(size=3)
    assert nnx.jit(lambda m: 1, graph=False)(nnx.Dict(a=shared, b=shared)) == 1
