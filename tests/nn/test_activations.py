import copy
import pickle

import jax
import jax.nn
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.nn.dtypes import LayerInputError

NAMES = """celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid log_softmax
logsumexp one_hot relu relu6 selu sigmoid silu soft_sign softmax softplus standardize swish""".split()


def test_activations_are_those_of_jax():
    """Every name is the very function of JAX, except relu, which JAX does not compile."""
    assert [name for name in NAMES if getattr(nnx, name) is not getattr(jax.nn, name)] == ["relu"]
    assert nnx.tanh is jnp.tanh


def test_relu_is_that_of_jax_in_one_dispatch():
    """The same values, derivatives (0 at 0), types and operations, with the custom derivative; and as cheap to copy."""
    for x in (jnp.array([-1.0, 0.0, 2.0]), jnp.array([-3, 4], "int8"), jnp.array([-1, 2], "bfloat16"), -1.5, 3):
        ours, theirs = nnx.relu(x), jax.nn.relu(x)
        np.testing.assert_array_equal(ours, theirs)
        assert jax.typeof(ours) == jax.typeof(theirs)
    x = jnp.array([-1.0, 0.0, 2.0])
    for transform in (jax.grad, jax.hessian):
        np.testing.assert_array_equal(*[transform(lambda x, f=f: f(x).sum())(x) for f in (nnx.relu, jax.nn.relu)])
    assert str(jax.make_jaxpr(nnx.relu)(x)) == str(jax.make_jaxpr(jax.nn.relu)(x))
    assert nnx.relu(nnx.Param(x)).tolist() == [0, 0, 2]
    assert pickle.loads(pickle.dumps(nnx.relu)) is copy.deepcopy(nnx.relu) is nnx.relu
    assert count_calls(lambda: nnx.relu(x)) == 1  # that of JAX makes 2,000


def test_a_prelu_runs_in_one_dispatch():
    """Comparison, product and choice are one program; each by itself would make as many calls as the whole does."""
    layer, x = nnx.PReLU(), jnp.ones((2, 3))
    layer(x)
    assert count_calls(lambda: layer(x)) < 50


def test_prelu():
    """`where(x >= 0, x, slope * x)`, with one slope or one for each feature, which is learned."""
    x = jnp.array([[-2.0, -2.0, 3.0]])
    np.testing.assert_allclose(nnx.PReLU(0.5)(x), [[-1.0, -1.0, 3.0]])
    layer = nnx.PReLU(jnp.array([0.5, 0.25, 2.0]))
    np.testing.assert_allclose(layer(x), [[-1.0, -0.5, 3.0]])
    gradient = nnx.grad(lambda m: m(x).sum())(layer)["negative_slope"].value
    np.testing.assert_allclose(gradient, [-2.0, -2.0, 0.0])


@pytest.mark.parametrize(
    ("dtype", "input_dtype", "expected"),
    [
        (None, "bfloat16", "bfloat16"),
        (None, "float32", "float32"),
        (None, "int32", "float32"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_prelu_dtypes(dtype, input_dtype, expected):
    """The dtype of the input is kept, if it is a floating one and no other is asked for; the slope is float32."""
    layer = nnx.PReLU(0.25, dtype=dtype)
    y = layer(jnp.array([-4, 4], input_dtype))
    assert (layer.negative_slope.dtype, y.dtype) == (jnp.float32, jnp.dtype(expected))
    assert y.tolist() == [-1.0, 4.0]
    assert layer(-4.0).tolist() == -1.0


def test_prelu_of_a_wrong_shape():
    layers = nnx.List([nnx.PReLU(jnp.zeros(3))])
    for x in (jnp.zeros((2, 4)), jnp.zeros(())):
        with pytest.raises(LayerInputError, match=r"layers\[0\] \(PReLU \[3\]\) takes inputs that a slope"):
            layers[0](x)
