"""What the layers with weights share, where it has a say of its own: what gives them keys, and their parameters."""

import functools

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core import errors

LAYERS = {
    "Linear": lambda rngs: nnx.Linear(2, 3, rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(2, 3, 3, rngs=rngs),
    "Embed": lambda rngs: nnx.Embed(2, 3, rngs=rngs),
    "LayerNorm": lambda rngs: nnx.LayerNorm(2, rngs=rngs),
    "LoRA": lambda rngs: nnx.LoRA(2, 1, 3, rngs=rngs),
}
NOT_RNGS = {"a seed": 0, "a key": jax.random.key(0), "an old key": jnp.zeros(2, jnp.uint32), "nothing": None}


@pytest.mark.parametrize("given", NOT_RNGS)
@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_no_rngs_is_an_error_with_the_remedy(layer, given):
    with pytest.raises(TypeError, match=r"rngs has to be nnx\.Rngs, .*, but got .*\. Write rngs=nnx\.Rngs\(seed\)"):
        LAYERS[layer](NOT_RNGS[given])


MAKERS = {
    "returns an initializer": nnx.initializers.lecun_normal,
    "takes other arguments": nnx.initializers.normal,
    "takes none": nnx.initializers.ones_init,
    "a partial": functools.partial(nnx.initializers.normal, 0.1),
    "annotated": nnx.with_partitioning(nnx.initializers.lecun_normal, (None, "model")),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_function_that_makes_an_initializer_is_to_be_called(maker):
    """A frequent slip, which otherwise leaves a parameter that is a function."""
    with pytest.raises(TypeError, match=r"shape \(2, 3\) needs an initializer, .* If (\w+) makes one, write \1\(\)"):
        nnx.Linear(2, 3, kernel_init=MAKERS[maker], rngs=nnx.Rngs(0))


@pytest.mark.parametrize("given", [0.0, None, jnp.ones((2, 3))], ids=["a number", "nothing", "an array"])
def test_what_is_no_initializer(given):
    with pytest.raises(TypeError, match=r"needs an initializer, .* is none. For given values write lambda key, shape"):
        nnx.Conv(2, 3, 3, kernel_init=given, rngs=nnx.Rngs(0))


def test_what_an_initializer_raises_comes_out():
    """A TypeError of its own is left as it is."""

    def init(key, shape, dtype):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        nnx.Embed(2, 3, embedding_init=init, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: nnx.Linear(2, 3 / 2, rngs=rngs),
        lambda rngs: nnx.LinearGeneral(2, 1.5, rngs=rngs),
        lambda rngs: nnx.Embed(1.5, 2, rngs=rngs),
        lambda rngs: nnx.Linear(1.5, 2, kernel_init=nnx.initializers.zeros_init(), rngs=rngs),
    ],
)
def test_a_size_that_is_no_integer(make):
    """Mostly a quotient; the shape is named and the size that is wrong."""
    with pytest.raises(
        TypeError, match=r"^A parameter cannot have the shape \(.*1\.5.*\): .* but 1\.5 is a float\. .* d // 2"
    ):
        make(nnx.Rngs(0))


def test_a_size_that_is_a_tuple():
    """That is LinearGeneral's to take."""
    with pytest.raises(TypeError, match=r"shape \(\(2,\), 3\): sizes are integers, but \(2,\) is a tuple\.$"):
        nnx.Linear((2,), 3, rngs=nnx.Rngs(0))


TUPLES = {
    "in_features": lambda x: nnx.Conv(x, 4, (3,), rngs=nnx.Rngs(0)),
    "out_features": lambda x: nnx.Conv(4, x, (3,), rngs=nnx.Rngs(0)),
    "feature_group_count": lambda x: nnx.Conv(4, 4, (3,), feature_group_count=x, rngs=nnx.Rngs(0)),
    "num_features": lambda x: nnx.GroupNorm(x, rngs=nnx.Rngs(0)),
    "num_groups": lambda x: nnx.GroupNorm(4, x, rngs=nnx.Rngs(0)),
    "group_size": lambda x: nnx.GroupNorm(4, None, x, rngs=nnx.Rngs(0)),
    "num_features ": lambda x: nnx.BatchNorm(x, rngs=nnx.Rngs(0)),
    "num_heads": lambda x: nnx.MultiHeadAttention(x, 4, rngs=nnx.Rngs(0)),
    "num_kv_heads": lambda x: nnx.MultiHeadAttention(2, 4, num_kv_heads=x, rngs=nnx.Rngs(0)),
    "qkv_features": lambda x: nnx.MultiHeadAttention(2, x, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", TUPLES)
def test_a_size_with_which_a_layer_computes(name):
    """Such as a shape in place of its last size: Python's error named neither (a question asked of flax, 4295)."""
    with pytest.raises(TypeError, match=rf"^{name.strip()} is an integer, but got \(3,\), which is a tuple\.$"):
        TUPLES[name]((3,))


NEGATIVE = {
    "Linear": lambda: nnx.Linear(-2, 3, rngs=nnx.Rngs(0)),
    "a bias": lambda: nnx.Linear(2, -3, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0)),
    "Embed": lambda: nnx.Embed(3, -1, rngs=nnx.Rngs(0)),
    "LoRA": lambda: nnx.LoRA(2, -1, 3, rngs=nnx.Rngs(0)),
    "LayerNorm": lambda: nnx.LayerNorm(-1, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("make", NEGATIVE)
def test_a_negative_size(make):
    with pytest.raises(errors.ArgumentError, match=r"cannot have the shape \(.*-.*\): a size is negative\.$"):
        NEGATIVE[make]()


def test_a_dtype_that_is_none():
    with pytest.raises(errors.ArgumentError, match=r"param_dtype has to be a dtype, .* but got 'flaot32'"):
        nnx.Linear(2, 3, param_dtype="flaot32", rngs=nnx.Rngs(0))


def test_integer_parameters_cannot_be_drawn():
    with pytest.raises(
        errors.UsageError, match=r"variance_scaling of a parameter of shape \(2, 3\) .*=int8.* floating"
    ):
        nnx.Linear(2, 3, param_dtype="int8", rngs=nnx.Rngs(0))
    assert (
        nnx.Linear(2, 3, param_dtype="int8", kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0)).kernel.dtype == "int8"
    )


def test_an_initializer_for_a_parameter_with_too_few_axes():
    """That the bias is meant is not in the message of JAX."""
    with pytest.raises(ValueError, match="1-dimensional weights") as raised:
        nnx.Linear(3, 4, bias_init=nnx.initializers.lecun_uniform(), rngs=nnx.Rngs(0))
    assert raised.value.__notes__ == ["An initializer raised this for a parameter of shape (4,)."]
