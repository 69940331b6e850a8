"""Jitted functions that have a name are pickled as that name and copied as themselves."""

import copy
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx


@jax.jit
def jitted(x):
    return x + 1


@jax.custom_vjp
def custom(x):
    return x


ROUND_TRIPS = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": lambda x: cloudpickle.loads(cloudpickle.dumps(x)),
}


@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
@pytest.mark.parametrize(
    "function", [jax.nn.relu, jax.nn.silu, jax.nn.gelu, jnp.tanh, jnp.sin], ids=lambda f: f.__name__
)
def test_activations_come_back_as_themselves(function, round_trip):
    """relu is relu after copying and pickling, also inside a tuple."""
    assert round_trip((function, 1))[0] is function


@pytest.mark.parametrize("round_trip", [copy.deepcopy, ROUND_TRIPS["pickle"]])
def test_functions_of_a_user_come_back_as_themselves(round_trip):
    """A jitted or custom-derivative function of a module does too."""
    if __name__ not in __import__("sys").modules:
        pytest.skip("pytest imported this file without a name")
    assert round_trip(jitted) is jitted
    assert round_trip(custom) is custom


def test_local_functions_are_left_as_they_were():
    """A jitted lambda has no name to be found under: a copy of it still works, pickling it still fails."""
    f = jax.jit(lambda x: x + 1)
    assert copy.deepcopy(f)(1).item() == 2
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pickle.dumps(f)
    assert cloudpickle.loads(cloudpickle.dumps(f))(1).item() == 2


@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
def test_models_with_activations(round_trip):
    """A copied or pickled Sequential has the structure of the original, so it shares its compiled functions."""
    model = nnx.Sequential(lambda_free, nnx.relu, jnp.tanh)
    model.act, model.pair = nnx.silu, (nnx.relu, jnp.sin)
    assert nnx.graphdef(round_trip(model)) == nnx.graphdef(model)
    assert round_trip(nnx.graphdef(model)) == nnx.graphdef(model)


def test_functions_jitted_by_nnxlib_are_copied_as_themselves():
    """A Module that holds `nnx.jit(f)` has a copy of the same structure."""
    m = nnx.Dict(f=nnx.jit(lambda x: x + 1), w=nnx.Param(1.0))
    assert copy.deepcopy(m).f is m.f
    assert nnx.graphdef(copy.deepcopy(m)) == nnx.graphdef(m)


def lambda_free(x):
    return x
