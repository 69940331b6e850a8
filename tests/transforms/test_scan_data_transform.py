"""The hook `data_transform` of scan: sees the Variables inside the body, by label, and only values pass through it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from tests.properties.compare import Snapshot

from .models import Norm, X, stacked

AXES = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None})


def layer(x, norm, m):
    return norm(m(x))


def looped(hook, transform=nnx.scan, **options):
    return transform(layer, in_axes=(nnx.Carry, AXES, 0), out_axes=nnx.Carry, data_transform=hook, **options)


@pytest.mark.parametrize("options", [{}, {"transform": nnx.remat_scan, "lengths": (2, 2)}], ids=["scan", "remat_scan"])
def test_the_hook_sees_the_slices_by_label_and_paths_below_the_arguments(options):
    seen = {}

    def look(label, state):
        seen[label] = {path: (type(v), v.shape) for path, v in nnx.to_flat_state(state)}
        return state

    norm, plain, m = Norm(), Norm(), stacked()
    y = looped(look, **options)(X, norm, m)
    np.testing.assert_allclose(y, looped(None)(X, plain, m), rtol=1e-6)
    np.testing.assert_allclose(norm.mean.value, plain.mean.value, rtol=1e-6)
    assert seen == {
        nnx.Carry: {(1, "count"): (nnx.BatchStat, ()), (1, "mean"): (nnx.BatchStat, (3,))},
        None: {(1, "scale"): (nnx.Param, (3,))},
        0: {(2, "bias"): (nnx.Param, (3,)), (2, "kernel"): (nnx.Param, (3, 3))},
    }


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "disable_jit"])
def test_what_the_hook_returns_is_what_the_body_sees_and_is_not_written(jitted):
    """Doubled kernels: the output changes, the model does not."""

    def double(label, state):
        return jax.tree.map(lambda x: 2 * x, state) if label == 0 else state

    norm, m, twice = Norm(), stacked(), stacked()
    norm.training = False
    for v in (twice.kernel, twice.bias):
        v.value *= 2
    before = Snapshot(norm, m)
    with jax.disable_jit(not jitted):
        np.testing.assert_allclose(looped(double)(X, norm, m), looped(None)(X, norm, twice), rtol=1e-6)
    before.assert_unchanged()


def test_a_sharding_constraint_stands_inside_the_loop():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P())

    def constrain(label, state):
        return jax.lax.with_sharding_constraint(state, sharding) if label == 0 else state

    norm, m = Norm(), stacked()
    norm.training = False
    jaxpr = jax.make_jaxpr(lambda x: looped(constrain)(x, norm, m))(X)
    (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    inside = [eqn.primitive.name for eqn in loop.params["jaxpr"].eqns]
    assert inside.count("sharding_constraint") == 2  # kernel and bias
    assert "sharding_constraint" not in [eqn.primitive.name for eqn in jaxpr.eqns]


def lose(label, state):
    return nnx.State({}) if label == 0 else state


def widen(label, state):
    return jax.tree.map(lambda x: jnp.stack([x, x]), state) if label == 0 else state


FAILURES = {
    "lost": (
        lose,
        r"\[2\]\.bias: missing, expected float32\[3\]\n  \[2\]\.kernel: missing(?s:.)*as jax\.tree\.map does",
    ),
    "shape": (widen, r"  \[2\]\.bias: expected shape \(3,\), got \(2, 3\)"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_hook_that_breaks_the_contract_is_an_error_and_nothing_changes(case):
    hook, message = FAILURES[case]
    norm, m = Norm(), stacked()
    before = Snapshot(norm, m)
    with pytest.raises(errors.PrefixError, match=message):
        looped(hook)(X, norm, m)
    before.assert_unchanged()
