import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.nn.dtypes import LayerInputError, canonicalize_dtype, promote_dtype

VALUES = st.sampled_from(
    [jnp.ones(2, dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.bool_)]
    + [1, 2.5, True, np.ones(2), np.float32(1), None, nnx.Param(jnp.ones(2, jnp.bfloat16))]
)


@given(st.lists(VALUES, min_size=1, max_size=4), st.sampled_from([None, jnp.float32, "bfloat16"]), st.booleans())
def test_all_arrays_come_out_in_the_dtype_of_jax_promotion(values, dtype, inexact):
    """The common dtype is that of jnp.result_type, a floating one if asked for; values, and None, are kept."""
    given_values = [v for v in values if v is not None]
    if dtype is None and not given_values:
        with pytest.raises(ValueError, match="at least one"):
            promote_dtype(values)
        return
    expected = jnp.result_type(*map(jnp.asarray, given_values)) if dtype is None else jnp.dtype(dtype)
    if inexact and not jnp.issubdtype(expected, jnp.inexact):
        expected = jnp.dtype("float32")
    promoted = promote_dtype(tuple(values), dtype=dtype, inexact=inexact)
    assert [p is None for p in promoted] == [v is None for v in values]
    for old, new in zip(values, promoted, strict=True):
        if old is not None:
            assert (new.dtype, new.weak_type) == (expected, False)
            np.testing.assert_array_equal(np.asarray(new), np.asarray(jnp.asarray(old).astype(expected)))


def test_arrays_of_the_right_dtype_are_passed_through():
    """Nothing is copied or converted when the dtypes agree already."""
    x, y = jnp.ones(2), jnp.zeros(3)
    assert all(a is b for a, b in zip(promote_dtype((x, None, y)), (x, None, y), strict=True))
    assert promote_dtype((x, y), dtype="float32")[0] is x
    assert promote_dtype((x, jnp.ones(2, jnp.bfloat16)))[0] is x


def test_complex_arrays_stay_complex():
    """A complex array makes all complex; it is not cast to a real dtype without JAX's warning."""
    x, y = promote_dtype((jnp.ones(2), jnp.ones(2, jnp.complex64)))
    assert (x.dtype, y.dtype) == (jnp.complex64, jnp.complex64)
    with pytest.warns(np.exceptions.ComplexWarning):
        promote_dtype((y,), dtype=jnp.float32)


def test_integer_dtypes_are_refused_unless_asked_for():
    """Layers compute in floating dtypes; a lookup table may hold integers."""
    with pytest.raises(ValueError, match="must be inexact"):
        promote_dtype((jnp.ones(2),), dtype=jnp.int32)
    with pytest.raises(ValueError, match="must be inexact"):
        canonicalize_dtype(jnp.ones(2), dtype=int)
    assert promote_dtype((jnp.ones(2),), dtype=jnp.int32, inexact=False)[0].dtype == jnp.int32


def test_traced_arrays_are_converted_by_one_operation():
    """Where something is traced, an array of another dtype costs one conversion and the others nothing."""
    jaxpr = jax.make_jaxpr(lambda x, y: promote_dtype((x, y)))(jnp.ones(2), jnp.ones(2, jnp.bfloat16))
    assert [str(equation.primitive) for equation in jaxpr.jaxpr.eqns] == ["convert_element_type"]


HALF = {
    "linear": lambda **options: nnx.Linear(8, 8, **options),
    "conv": lambda **options: nnx.Conv(8, 8, 3, **options),
    "layer norm": lambda **options: nnx.LayerNorm(8, **options),
    "RMS norm": lambda **options: nnx.RMSNorm(8, **options),
    "batch norm": lambda **options: nnx.BatchNorm(8, **options),
    "group norm": lambda **options: nnx.GroupNorm(8, num_groups=2, **options),
    "weight norm": lambda **options: nnx.WeightNorm(nnx.Linear(8, 8, **options), **options),
    "attention": lambda **options: nnx.MultiHeadAttention(2, 8, normalize_qk=True, decode=False, **options),
    "LSTM": lambda **options: nnx.RNN(nnx.LSTMCell(8, 8, **options)),
    "GRU": lambda **options: nnx.RNN(nnx.GRUCell(8, 8, **options)),
}


@pytest.mark.parametrize("make", HALF.values(), ids=HALF)
def test_a_layer_with_a_dtype_computes_in_it_where_promotion_is_forbidden(make):
    """``jax_numpy_dtype_promotion="strict"`` is for code that has not said what it computes in."""
    layer = make(dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 3, 8), jnp.bfloat16)
    for call in (lambda: layer(x), lambda: nnx.jit(lambda layer, x: layer(x))(layer, x)):
        expected = call()
        with jax.numpy_dtype_promotion("strict"):
            y = call()
        assert y.dtype == expected.dtype
        assert (y == expected).all()


def test_parameters_of_another_dtype_than_the_inputs_are_refused_where_promotion_is_forbidden():
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="no available implicit dtype promotion"):
        layer(jnp.ones((2, 8), jnp.bfloat16))


NO_ARRAYS = {
    "str": "text",
    "{'a': float": {"a": jnp.ones(2)},
    "class Linear": nnx.Linear,
    "object": np.ones((1, 2), object),
    "float32.* without a value .a jax.ShapeDtypeStruct.*nnx.update": jax.ShapeDtypeStruct((1, 2), jnp.float32),
}


@pytest.mark.parametrize("shown", NO_ARRAYS)
def test_what_is_no_array_is_an_error_that_names_it(shown):
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(LayerInputError, match=f"Layers compute with arrays and numbers, but got {shown}") as caught:
        layer(NO_ARRAYS[shown])
    assert any("Linear 2->3" in note for note in caught.value.__notes__)
