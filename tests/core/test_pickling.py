"""Jitted functions that have a name are pickled as that name and copied as themselves."""

import copy
import pickle
import subprocess
import sys

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core import calls


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
    if __name__ not in sys.modules:
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


@nnx.jit
def scaled(model, x):
    return 2 * model(x)


def test_functions_jitted_by_nnxlib_are_pickled():
    """By name, if they have one; others with what they were made of, which cloudpickle can send."""
    model, x = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones(2)
    assert pickle.loads(pickle.dumps(scaled)) is scaled
    assert copy.copy(scaled) is scaled
    captured, power = nnx.jit(lambda x: model(x)), nnx.jit(lambda x, n: x**n, static_argnums=1)
    captured(x)
    assert (cloudpickle.loads(cloudpickle.dumps(captured))(x) == model(x)).all()
    assert cloudpickle.loads(cloudpickle.dumps(power))(3, 2) == 9
    assert (pickle.loads(pickle.dumps(nnx.jit(model)))(x) == model(x)).all()


@nnx.custom_vjp
def rounded(x):
    return jnp.round(x)


rounded.defvjp(lambda x: (rounded(x), None), lambda residuals, gradients: (gradients[1],))


@nnx.custom_jvp
def squared(x):
    return x * x


squared.defjvps(lambda tangent, out, x: 10.0 * x * tangent)


@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
@pytest.mark.parametrize("function", [rounded, squared], ids=["vjp", "jvp"])
def test_functions_with_a_rule_come_back_as_themselves(function, round_trip):
    """So a copied or pickled model that holds one has the structure of the original."""
    if __name__ not in sys.modules:
        pytest.skip("pytest imported this file without a name")
    model = nnx.Dict(act=function, w=nnx.Param(1.0))
    assert round_trip(model).act is function
    assert nnx.graphdef(round_trip(model)) == nnx.graphdef(model)


def test_local_functions_with_a_rule_can_be_sent():
    """They are copied as themselves; cloudpickle takes them apart, as it does with local functions."""
    cubed = nnx.custom_jvp(lambda x: x**3)
    cubed.defjvps(lambda tangent, out, x: 10.0 * x * tangent)
    assert copy.deepcopy(cubed) is cubed
    assert jax.grad(cloudpickle.loads(cloudpickle.dumps(cubed)))(2.0) == 20.0


PROGRAM = """
import cloudpickle, jax, sys
import nnxlib as nnx

@jax.jit
def double(x):
    return 2 * x

class Net(nnx.Module):
    def __init__(self):
        self.act = double

    @nnx.jit
    def __call__(self, x):
        return self.act(x)

class Inner(nnx.Module):
    def __call__(self, x):
        return nnx.current_path() if x is None else x.shape

class Outer(nnx.Module):
    def __init__(self):
        self.inner = Inner()

    def __call__(self, x):
        return self.inner(x)

sys.stdout.buffer.write(cloudpickle.dumps((double, Net(), Outer())))
"""


def test_a_program_is_sent_to_another_process():
    """cloudpickle sends what __main__ defines by value, jitted functions and methods too."""
    sent = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True).stdout
    *doubles, outer = cloudpickle.loads(sent)
    for double in doubles:
        assert double(3.0) == 6
    assert calls.is_observed(type(outer).__call__)
    assert outer(None) == ("inner",)
    with pytest.raises(AttributeError) as caught:
        outer("text")
    assert caught.value.__notes__[0].startswith("in inner (Inner)")


def test_dill_follows_the_functions_of_a_module():
    """As `datasets.map` has it do for the hash of a function: to the end, although a wrapper refers to itself."""
    dill = pytest.importorskip("dill")

    class Doubling(nnx.Module):
        def __call__(self, x):
            return 2 * x

    before = dict(vars(calls))
    assert dill.loads(dill.dumps(Doubling(), recurse=True))(1) == 2
    assert all(vars(calls)[name] is value for name, value in before.items())


def lambda_free(x):
    return x
