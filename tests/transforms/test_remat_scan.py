"""nnx.remat_scan: what nnx.scan computes, state included, in memory that grows with the square root of the length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from tests.properties.compare import Snapshot, assert_no_tracer

from .models import RAW, Layer, Norm, X, counted, stacked

ALL = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None})


def layer(x, m):
    return jnp.tanh(m(x))


def both(**options):
    return nnx.scan(layer, out_axes=nnx.Carry), nnx.remat_scan(layer, **options)


@pytest.mark.parametrize("lengths", [(12,), (3, 4), [2, 3, 2], (1, 12), (12, 1)])
def test_value_and_gradient_are_those_of_scan(lengths):
    plain, nested = both(lengths=lengths)
    model, x = stacked(12), jnp.ones((2, 3))
    np.testing.assert_array_equal(nested(x, model), plain(x, model))
    expected, found = (nnx.grad(lambda m, x, f=f: f(x, m).sum())(model, x) for f in (plain, nested))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_carried_and_stacked_state_and_outputs_are_those_of_scan(reverse):
    def step(m, x):
        m.seen = nnx.Cache(x)
        return m(x)

    options = {"in_axes": (ALL_AXES, 0), "out_axes": 0, "reverse": reverse}
    xs = jnp.arange(18.0).reshape(6, 3)
    a, b = Norm(), Norm()
    expected = nnx.scan(step, **options)(a, xs)
    np.testing.assert_allclose(nnx.remat_scan(step, lengths=(2, 3), **options)(b, xs), expected, rtol=1e-6)
    np.testing.assert_array_equal(b.seen.value, a.seen.value)
    np.testing.assert_allclose(b.mean.value, a.mean.value, rtol=1e-6)
    assert b.count.value == 6
    assert_no_tracer(b)


ALL_AXES = nnx.StateAxes({nnx.BatchStat: nnx.Carry, nnx.Cache: 0, ...: None})


def test_one_module_applied_again_and_again():
    m = Norm()
    m.training = False
    x = X
    for _ in range(6):
        x = m(x)
    np.testing.assert_allclose(nnx.remat_scan(m, lengths=(2, 3), in_axes=nnx.Carry)(X), x, rtol=1e-6)


def test_as_a_decorator_of_a_method():
    class Model(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.array(0.5))
            self.norm = Norm()

        @nnx.remat_scan(lengths=(2, 2), in_axes=(ALL, nnx.Carry))
        def __call__(self, x):
            return self.norm(self.scale * x)

    m = Model()
    assert m(X).shape == (3,)
    assert m.norm.count.value == 4


def memory(f, *args):
    return jax.jit(jax.grad(f)).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_square_root_of_the_length():
    """Of the backward pass of 100 layers with large activations: far less than one per layer."""
    model, x = stacked(100, 8), jnp.ones((2048, 8))

    def loss(forward):
        return lambda model, x: forward(x, model).sum()

    def bytes_of(forward):
        return memory(loss(forward), model, x)

    plain, nested = both(lengths=(10, 10))
    one = x.size * x.dtype.itemsize
    assert bytes_of(plain) > 100 * one
    assert bytes_of(nested) < 35 * one


def test_the_policy_decides_what_is_computed_again():
    def sines(policy):
        f = nnx.remat_scan(lambda x, m: jnp.sin(m(x)), lengths=(2, 2), policy=policy)
        return str(jax.make_jaxpr(jax.grad(lambda x: f(x, stacked(4)).sum()))(jnp.ones((1, 3)))).count(" sin ")

    assert sines(None) > sines(jax.checkpoint_policies.everything_saveable)


def test_python_runs_the_body_once_and_never_again_for_the_same_structure():
    f = counted(layer)
    forward = nnx.remat_scan(f, lengths=(2, 2))
    for _ in range(2):
        forward(jnp.ones((2, 3)), stacked())
    assert f.count == 1


def fail(x, m):
    m.new = nnx.Param(x)
    m.kernel.value += 1
    raise KeyError("failed")


FAILURES = {
    "no lengths": ({}, layer, errors.ArgumentError, r"needs the lengths of its levels, .* got <missing>"),
    "a length of zero": ({"lengths": (4, 0)}, layer, errors.ArgumentError, r"got \(4, 0\)"),
    "a length that is no int": ({"lengths": (2.0, True)}, layer, errors.ArgumentError, r"got \(2\.0, True\)"),
    "a policy that is no function": (
        {"lengths": (2, 2), "policy": "dots_saveable"},
        layer,
        errors.ArgumentError,
        r"A policy is a function, .* got 'dots_saveable'",
    ),
    "another length": ({"lengths": (2, 3)}, layer, errors.PrefixError, r"different sizes: 6 \(length\), 4 \(args"),
    "the body": ({"lengths": (2, 2)}, fail, KeyError, "failed"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_changes_nothing(case):
    options, f, error, message = FAILURES[case]
    m = stacked()
    before = Snapshot(m)
    with pytest.raises(error, match=message):
        nnx.remat_scan(f, **options)(jnp.ones((2, 3)), m)
    before.assert_unchanged()


@pytest.mark.parametrize("raw", RAW)
def test_a_read_only_forward_under_raw_jax_leaves_the_live_model_as_it_was(raw):
    m = nnx.vmap(Layer)(jnp.array([1.0, 2.0, 3.0, 4.0]))
    before = Snapshot(m)
    RAW[raw](lambda x: nnx.remat_scan(lambda x, m: m.read(x), lengths=(2, 2))(x, m))
    before.assert_unchanged()


@pytest.mark.parametrize(("unroll", "unrolled"), [(1, False), (False, False), (2, True), (True, True)])
def test_the_compiler_may_not_merge_what_is_computed_again_where_the_loop_is_unrolled(unroll, unrolled):
    """With unroll=True it could, and would keep what each iteration computed."""
    run = nnx.remat_scan(lambda c, x: (c * x, None), lengths=(4,), unroll=unroll, out_axes=(nnx.Carry, 0))
    (loop,) = jax.make_jaxpr(run)(1.0, jnp.arange(4.0)).eqns[-1:]
    (checkpoint,) = loop.params["jaxpr"].eqns
    assert checkpoint.params["prevent_cse"] is unrolled
