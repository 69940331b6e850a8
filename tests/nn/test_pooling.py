import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx


def windows(x, window, strides, pads, fill):
    """Each output element with the elements of its window: pairs (position, array)."""
    batch = x.ndim - len(window) - 1
    x = np.pad(x, [(0, 0)] * batch + list(pads) + [(0, 0)], constant_values=fill)
    sizes = [(n - w) // s + 1 for n, w, s in zip(x.shape[batch:-1], window, strides, strict=True)]
    for position in itertools.product(*map(range, sizes)):
        cut = [slice(p * s, p * s + w) for p, s, w in zip(position, strides, window, strict=True)]
        yield position, x[(Ellipsis, *cut, slice(None))], sizes


def reference(x, window, strides, pads, fill, reduce):
    spatial = tuple(range(-len(window) - 1, -1))
    cells = list(windows(x, window, strides, pads, fill))
    out = np.stack([reduce(cell, spatial) for _, cell, _ in cells], axis=-2)
    return out.reshape(*x.shape[: x.ndim - len(window) - 1], *cells[0][2], x.shape[-1])


@st.composite
def cases(draw):
    rank = draw(st.integers(1, 2))
    per_axis = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))
    batch = draw(st.sampled_from([(), (2,), (2, 2)]))
    pads = tuple((draw(st.integers(0, 1)), draw(st.integers(0, 1))) for _ in range(rank))
    dtype = draw(st.sampled_from([np.float32, np.int32, np.uint8, np.int8]))
    return (*batch, *per_axis(3, 5), 2), per_axis(2, 3), per_axis(1, 2), pads, dtype


@settings(max_examples=8)
@given(cases())
def test_pools_against_sliding_windows(case):
    """Maximum, minimum and average of each window, for floats and integers of all kinds."""
    shape, window, strides, pads, dtype = case
    x = np.random.default_rng(sum(shape)).integers(0, 100, shape).astype(dtype)
    wide = np.asarray(x, np.float64)
    low, high = (-np.inf, np.inf) if dtype == np.float32 else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    args = (jnp.asarray(x), window, strides, pads)
    np.testing.assert_array_equal(nnx.max_pool(*args), reference(wide, window, strides, pads, low, np.max))
    np.testing.assert_array_equal(nnx.min_pool(*args), reference(wide, window, strides, pads, high, np.min))
    np.testing.assert_allclose(nnx.avg_pool(*args), reference(wide, window, strides, pads, 0, np.mean), rtol=1e-5)
    expected = reference(wide, window, strides, pads, np.nan, np.nanmean)
    np.testing.assert_allclose(nnx.avg_pool(*args, count_include_pad=False), expected, rtol=1e-5)
    assert nnx.max_pool(*args).dtype == nnx.min_pool(*args).dtype == dtype


def test_named_paddings():
    """`'SAME'` keeps the size at stride 1, `'VALID'` takes whole windows only."""
    x = jnp.arange(5.0).reshape(1, 5, 1)
    assert nnx.max_pool(x, (3,), padding="SAME").ravel().tolist() == [1, 2, 3, 4, 4]
    assert nnx.min_pool(x, (3,), padding="SAME").ravel().tolist() == [0, 0, 1, 2, 3]
    assert nnx.avg_pool(x, (2,), (2,)).ravel().tolist() == [0.5, 2.5]
    assert nnx.max_pool(x > 2, (2,)).ravel().tolist() == [False, False, True, True]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_averages_keep_the_dtype_of_floats(dtype):
    """In bfloat16 the result is bfloat16, however padding counts; in float8, which JAX does not promote, float8."""
    x = jnp.ones((1, 4, 1), dtype)
    for count in (True, False):
        assert nnx.avg_pool(x, (2,), padding="SAME", count_include_pad=count).dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32, jnp.int16, jnp.bool_])
def test_averages_of_large_integers_do_not_overflow(dtype):
    """The mean of a window full of the largest value is that value."""
    largest = True if dtype == jnp.bool_ else jnp.iinfo(dtype).max
    x = jnp.full((1, 4, 4, 1), largest, dtype)
    for count in (True, False):
        np.testing.assert_allclose(nnx.avg_pool(x, (2, 2), count_include_pad=count), float(largest), rtol=1e-6)


def test_window_shape_may_be_read_only_once():
    """An average over a window that an iterator gives is divided by its size, too."""
    x = jnp.arange(4.0).reshape(1, 4, 1)
    assert nnx.avg_pool(x, iter((2,)), (2,)).ravel().tolist() == [0.5, 2.5]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("count", [True, False])
def test_averages_of_large_windows_are_those_of_float32(dtype, count):
    """Summed in bfloat16, 256 + 1 is 256, and the average of all pixels of an image has nothing to do with it."""
    x = jnp.asarray(np.random.default_rng(0).uniform(2, 4, (1, 32, 32, 1)), dtype)
    x = x.at[..., 0, 0, 0].set(60000.0)  # the sum overflows in float16
    mean = lambda x: nnx.avg_pool(x, (32, 32), count_include_pad=count)[0, 0, 0, 0]
    assert mean(x) == jax.jit(mean)(x) == jnp.mean(x.astype(jnp.float32)).astype(dtype)
    assert jnp.array_equal(jax.grad(mean)(x), jnp.full(x.shape, 2.0**-10, dtype))


def test_pool_reduces_by_any_function():
    """`pool` is the general form: here the product of each window."""
    x = jnp.arange(1.0, 5.0).reshape(1, 4, 1)
    assert nnx.pool(x, 1.0, jax.lax.mul, (2,), None, "VALID").ravel().tolist() == [2, 6, 12]


def test_gradients_go_to_the_largest_element():
    """Pools can be differentiated, also where they are traced."""
    x = jnp.array([1.0, 3.0, 2.0, 4.0]).reshape(1, 4, 1)
    grad = jax.jit(jax.grad(lambda x: nnx.max_pool(x, (2,), (2,)).sum()))(x)
    assert grad.ravel().tolist() == [0, 1, 0, 1]
    grad = jax.grad(lambda x: nnx.avg_pool(x, (2,), (2,)).sum())(x)
    assert grad.ravel().tolist() == [0.5] * 4


def test_windows_that_do_not_fit_are_refused():
    """Too few axes, and strides or paddings of another length."""
    x = jnp.ones((4, 4, 1))
    with pytest.raises(ValueError, match=r"window of shape \(2, 2, 2\) needs inputs"):
        nnx.max_pool(x, (2, 2, 2))
    with pytest.raises(ValueError, match=r"strides has to be one positive number, or 2 of them, .*but is \(1,\)"):
        nnx.max_pool(x, (2, 2), strides=(1,))
    with pytest.raises(ValueError, match=r"Invalid padding format: \(\(1, 1\),\), .*a sequence of len 2"):
        nnx.avg_pool(x, (2, 2), padding=((1, 1),))
    for window in (2, None, "22"):
        with pytest.raises(TypeError, match=f"window_shape has a size for each spatial axis, .*but is {window!r}"):
            nnx.avg_pool(x, window)
    for padding in (None, 1.5, "CIRCULAR"):
        with pytest.raises(ValueError, match=f"Invalid padding format: {padding!r}, .*SAME, VALID, SAME_LOWER, an"):
            nnx.max_pool(x, (2, 2), padding=padding)
    for window in ((0, 2), (2.0, 2), (None, 2), ["a", "b"]):
        with pytest.raises(ValueError, match=r"window_shape has to be one positive number, or 2 of them, .*but is \("):
            nnx.max_pool(x, window)
    for strides in ((-1, 1), 0, (1.0, 2), (None, 1), 1.5, object()):
        with pytest.raises(ValueError, match=f"strides has to be one positive .*but is {re.escape(str(strides))}"):
            nnx.min_pool(x, (2, 2), strides)


def test_a_window_may_have_a_symbolic_size():
    """Pooling over all that there is, in a function that is exported for images of any size."""
    shape = jax.export.symbolic_shape("b, h, w, 3")
    total = jax.jit(lambda x: nnx.max_pool(x, x.shape[1:3], x.shape[1:3]))
    exported = jax.export.export(total)(jax.ShapeDtypeStruct(shape, jnp.float32))
    assert exported.call(jnp.ones((2, 4, 5, 3))).shape == (2, 1, 1, 3)


def test_numbers_stand_for_all_spatial_axes():
    """For strides and padding, as the arguments of a Conv; a number in a sequence pads both ends of its axis."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 6, 3)))
    for pool in (nnx.max_pool, nnx.min_pool, nnx.avg_pool):
        spelt_out = pool(x, (2, 3), (2, 2), ((1, 1), (1, 1)))
        assert jnp.array_equal(pool(x, (2, 3), 2, 1), spelt_out)
        assert jnp.array_equal(pool(x, (2, 3), np.int64(2), [1, (1, 1)]), spelt_out)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_average_under_strict_promotion(dtype):
    """The number of elements takes the dtype of their sum."""
    with jax.numpy_dtype_promotion("strict"):
        averages = nnx.avg_pool(jnp.ones((1, 4, 2), dtype), (2,))
    assert averages.dtype == dtype
    assert (averages == 1).all()


def test_a_padding_of_no_name_and_windows_without_size_are_refused():
    x = jnp.ones((1, 4, 4, 2))
    for pool in nnx.max_pool, nnx.min_pool, nnx.avg_pool:
        with pytest.raises(ValueError, match=r"Invalid padding format: 'smae', .*one of SAME, VALID, SAME_LOWER"):
            pool(x, (2, 2), padding="smae")
        with pytest.raises(ValueError, match=r"one for each spatial axis, but is \(0, 2\)"):
            pool(x, (0, 2))
        assert pool(x, (2, 2), padding="same").shape == (1, 4, 4, 2)
