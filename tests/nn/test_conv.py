import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.nn import linear
from nnxlib.nn.conv import canonicalize_padding
from nnxlib.nn.dtypes import LayerInputError

normal = jax.nn.initializers.normal(1.0)


def array(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def spread(x, axes_and_steps):
    """Put zeros between the elements of x along the axes."""
    for axis, by in axes_and_steps:
        shape = list(x.shape)
        shape[axis] = (x.shape[axis] - 1) * by + 1
        wide = np.zeros(shape)
        wide[(slice(None),) * axis + (slice(None, None, by),)] = x
        x = wide
    return x


def correlate(x, kernel, strides, pads, mode, dilation, groups):
    """The definition, in float64: pad, slide the dilated kernel, multiply and sum, group by group."""
    rank = len(strides)
    x = np.pad(np.asarray(x, np.float64), [(0, 0), *pads, (0, 0)], mode=mode)
    kernel = spread(np.asarray(kernel, np.float64), enumerate(dilation))
    size = kernel.shape[:rank]
    out_sizes = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:-1], size, strides, strict=True)]
    out = np.zeros((x.shape[0], *out_sizes, kernel.shape[-1]))
    per_in, per_out = x.shape[-1] // groups, kernel.shape[-1] // groups
    for position in itertools.product(*map(range, out_sizes)):
        corner = [p * s for p, s in zip(position, strides, strict=True)]
        window = x[(slice(None), *[slice(c, c + k) for c, k in zip(corner, size, strict=True)])]
        for g in range(groups):
            inputs, outputs = slice(g * per_in, (g + 1) * per_in), slice(g * per_out, (g + 1) * per_out)
            axes = list(range(1, rank + 2))
            out[(slice(None), *position, outputs)] = np.tensordot(
                window[..., inputs], kernel[..., outputs], (axes, list(range(rank + 1)))
            )
    return out


def pads_of(padding, sizes, kernel, strides, dilation):
    """What each padding means, as numbers before and after and a mode of numpy.pad."""
    extents = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    if padding == "SAME":
        totals = [max(0, (-(-n // s) - 1) * s + e + 1 - n) for n, s, e in zip(sizes, strides, extents, strict=True)]
        return [(t // 2, t - t // 2) for t in totals], "constant"
    if padding in ("CIRCULAR", "REFLECT"):
        mode = "wrap" if padding == "CIRCULAR" else "reflect"
        return [(e // 2, e - e // 2) for e in extents], mode
    if padding == "CAUSAL":
        return [(e, 0) for e in extents], "constant"
    return [(0, 0)] * len(sizes) if padding == "VALID" else padding, "constant"


@st.composite
def cases(draw):
    rank = draw(st.integers(1, 2))
    per_axis = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))
    paddings = ["SAME", "VALID", "CIRCULAR", "REFLECT", [(1, 2)] * rank] + ["CAUSAL"] * (rank == 1)
    return {
        "sizes": per_axis(5, 6),
        "kernel": per_axis(1, 3),
        "strides": per_axis(1, 3),
        "dilation": per_axis(1, 2),
        "groups": draw(st.sampled_from([1, 2])),
        "padding": draw(st.sampled_from(paddings)),
        "use_bias": draw(st.booleans()),
        "masked": draw(st.booleans()),
    }


@settings(max_examples=10)
@given(cases())
def test_conv_against_its_definition(case):
    """Any rank, padding, stride, dilation, grouping and mask: the sums of the definition in float64."""
    kernel, strides, dilation, groups = case["kernel"], case["strides"], case["dilation"], case["groups"]
    shape = (*kernel, 4 // groups, 6)
    mask = jnp.asarray(np.random.default_rng(0).integers(0, 2, shape), jnp.float32) if case["masked"] else None
    layer = nnx.Conv(
        4, 6, kernel, strides, padding=case["padding"], kernel_dilation=dilation, feature_group_count=groups,
        use_bias=case["use_bias"], bias_init=normal, mask=mask, rngs=nnx.Rngs(0),
    )  # fmt: skip
    x = array(2, *case["sizes"], 4)
    weights = layer.kernel.value * (1.0 if mask is None else mask)
    pads, mode = pads_of(case["padding"], case["sizes"], kernel, strides, dilation)
    expected = correlate(x, weights, strides, pads, mode, dilation, groups)
    expected += np.asarray(layer.bias.value) if case["use_bias"] else 0.0
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_input_dilation_puts_zeros_between_the_elements():
    """`input_dilation=2` is the convolution of the spread input."""
    layer = nnx.Conv(2, 3, 3, padding=1, input_dilation=2, use_bias=False, rngs=nnx.Rngs(0))
    x = array(2, 5, 2)
    expected = correlate(spread(np.asarray(x), [(1, 2)]), layer.kernel.value, (1,), [(1, 1)], "constant", (1,), 1)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [nnx.Conv, nnx.ConvTranspose])
def test_use_bias_is_read_at_the_call(make):
    """A layer that adds biases of its own, as one of an ensemble does, switches it off around the convolution."""

    class Ensemble(make):
        def __init__(self, *args, members, **kwargs):
            super().__init__(*args, **kwargs)
            self.bias.value = jnp.stack([self.bias.value * k for k in range(members)])

        def __call__(self, inputs):
            self.use_bias = False
            try:
                y = super().__call__(inputs)
            finally:
                self.use_bias = True
            return jnp.reshape(y, (len(self.bias), -1, *y.shape[1:])) + self.bias[:, None, None, :]

    single = make(2, 4, 3, bias_init=normal, rngs=nnx.Rngs(0))
    ensemble = Ensemble(2, 4, 3, members=3, bias_init=normal, rngs=nnx.Rngs(0))
    x = array(2, 5, 2)
    expected = jnp.stack([single(x) + (k - 1) * single.bias for k in range(3)])
    np.testing.assert_allclose(nnx.jit(ensemble)(jnp.tile(x, (3, 1, 1))), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [nnx.Conv, nnx.ConvTranspose])
@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,), (2, 0)])
def test_any_number_of_batch_axes(make, padding, batch):
    """No batch axis, several, and empty ones give the stacked results of single examples."""
    layer = make(2, 4, (3, 2), padding=padding, bias_init=normal, rngs=nnx.Rngs(0))
    x = array(*batch, 5, 6, 2)
    y = layer(x)
    assert y.shape == (*batch, 5, 6, 4)
    for index in np.ndindex(*batch):
        np.testing.assert_allclose(y[index], layer(x[index]), rtol=1e-5, atol=1e-5)


def test_causal_convolutions_do_not_look_ahead():
    """An output depends on inputs at its own and earlier positions only."""
    layer = nnx.Conv(1, 1, 3, padding="CAUSAL", kernel_dilation=2, rngs=nnx.Rngs(0))
    jacobian = jax.jacobian(lambda x: layer(x[:, None])[:, 0])(array(8))
    assert np.all(np.triu(jacobian, 1) == 0)
    assert np.all(np.diag(jacobian) != 0)
    with pytest.raises(ValueError, match="1D"):
        nnx.Conv(1, 1, (3, 3), padding="CAUSAL", rngs=nnx.Rngs(0))(jnp.ones((4, 4, 1)))


@pytest.mark.parametrize(
    ("make", "strides"), [(nnx.Conv, 1), (nnx.ConvTranspose, 1), (nnx.ConvTranspose, 2), (nnx.ConvTranspose, 3)]
)
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 7])
def test_circular_padding_commutes_with_rotation(make, strides, kernel):
    """Rotating the input by one rotates the output by one stride."""
    layer = make(2, 3, kernel, strides, padding="CIRCULAR", rngs=nnx.Rngs(0))
    x = array(2, 5, 2)
    rotated = jnp.roll(layer(x), strides, 1)
    np.testing.assert_allclose(layer(jnp.roll(x, 1, 1)), rotated, rtol=1e-5, atol=1e-5)
    assert layer(x).shape == (2, 5 * strides, 3)


@pytest.mark.parametrize(("kernel", "strides", "dilation"), [(3, 1, 1), (3, 2, 1), (2, 2, 1), (2, 3, 2), (4, 3, 1)])
def test_conv_transpose_is_the_adjoint_of_conv(kernel, strides, dilation):
    """With `transpose_kernel` and the same kernel: <conv(x), y> = <x, conv_transpose(y)>."""
    forward = nnx.Conv(
        2, 3, kernel, strides, padding="VALID", kernel_dilation=dilation, use_bias=False, rngs=nnx.Rngs(0)
    )
    backward = nnx.ConvTranspose(
        3, 2, kernel, strides, padding="VALID", kernel_dilation=dilation, use_bias=False, transpose_kernel=True,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    assert backward.kernel.shape == forward.kernel.shape
    backward.kernel.value = forward.kernel.value
    x = array(1, 3 * strides + (kernel - 1) * dilation + 1, 2)
    y = array(1, 4, 3)
    assert forward(x).shape == y.shape
    np.testing.assert_allclose(jnp.vdot(forward(x), y), jnp.vdot(x, backward(y)[:, : x.shape[1]]), rtol=1e-4)


def test_same_padding_multiplies_the_size_by_the_stride():
    """The upsampling layer of a decoder."""
    layer = nnx.ConvTranspose(2, 3, (4, 3), strides=(2, 3), rngs=nnx.Rngs(0))
    assert layer(jnp.ones((1, 5, 4, 2))).shape == (1, 10, 12, 3)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_same_lower_padding_without_strides(kernel):
    """A transposed convolution without strides is a convolution, also with this padding; with strides it has none."""
    x = array(1, 6, 2)
    forward = nnx.Conv(2, 3, kernel, padding="SAME_LOWER", rngs=nnx.Rngs(0))
    transposed = nnx.ConvTranspose(2, 3, kernel, padding="SAME_LOWER", rngs=nnx.Rngs(0))
    np.testing.assert_allclose(transposed(x), forward(x), rtol=1e-6)
    with pytest.raises(ValueError, match="with strides has no SAME_LOWER padding; use SAME, VALID"):
        nnx.ConvTranspose(2, 3, kernel, strides=2, padding="SAME_LOWER", rngs=nnx.Rngs(0))(x)


def test_conv_transpose_masks_and_dtypes():
    """The mask multiplies the kernel; the settings of precision reach the product."""
    layer = nnx.ConvTranspose(
        2, 3, 3, mask=jnp.zeros((3, 2, 3)), bias_init=normal, dtype=jnp.bfloat16, preferred_element_type=jnp.float32,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    y = layer(jnp.ones((1, 5, 2)))
    assert y.dtype == jnp.float32
    expected = np.broadcast_to(np.asarray(layer.bias.value.astype(jnp.bfloat16), np.float32), y.shape)
    np.testing.assert_array_equal(y, expected)


def test_paddings_are_spelled_out():
    """Names in any case, one number, one per axis, and pairs; anything else is refused with the forms there are."""
    assert canonicalize_padding("valid", 1) == "VALID"
    assert canonicalize_padding(np.int64(2), 2) == ((2, 2), (2, 2))
    assert canonicalize_padding([1, (0, 2)], 2) == ((1, 1), (0, 2))
    for wrong in ("FULL", (1, 2, 3), [(1, 2, 3), 1], [None, 1], None, 1.5):
        with pytest.raises(ValueError, match=r"Invalid padding format.*SAME"):
            canonicalize_padding(wrong, 2)
    for padding in ("CAUSAL", "REFLECT"):
        with pytest.raises(ValueError, match=f"no {padding} padding"):
            nnx.ConvTranspose(1, 1, 3, padding=padding, rngs=nnx.Rngs(0))(jnp.ones((4, 1)))


@pytest.mark.parametrize("make", [nnx.Conv, nnx.ConvTranspose])
def test_wrong_input_names_the_layer_its_sizes_and_the_input(make):
    """Too few axes and other channels are refused; so are a mask, strides and dilations that do not fit."""
    layer = make(3, 4, (3, 3), rngs=nnx.Rngs(0))
    for x in (jnp.ones((5, 3)), jnp.ones((2, 5, 5, 2))):
        with pytest.raises(LayerInputError, match=rf"{make.__name__} 3->4 kernel \(3, 3\).*3 channels.*float32\["):
            layer(x)
    with pytest.raises(ValueError, match="Mask needs to have the same shape"):
        make(3, 4, (3, 3), mask=jnp.ones((3, 3)), rngs=nnx.Rngs(0))(jnp.ones((5, 5, 3)))
    with pytest.raises(ValueError, match="one for each spatial axis"):
        make(3, 4, (3, 3), strides=(1, 2, 3), rngs=nnx.Rngs(0))(jnp.ones((5, 5, 3)))


@pytest.mark.parametrize("channels", [(5, 4), (4, 5)])
def test_groups_that_do_not_divide_the_channels(channels):
    with pytest.raises(ValueError, match=r"feature_group_count=2 has to divide in_features=\d and out_features=\d"):
        nnx.Conv(*channels, 3, feature_group_count=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="feature_group_count=0 has to divide"):
        nnx.Conv(*channels, 3, feature_group_count=0, rngs=nnx.Rngs(0))


def test_groups_see_their_own_channels():
    """With as many groups as channels each output channel depends on one input channel (a depthwise convolution)."""
    layer = nnx.Conv(3, 3, 3, feature_group_count=3, rngs=nnx.Rngs(0))
    assert layer.kernel.shape == (3, 1, 3)
    jacobian = jax.jacobian(lambda x: layer(x).sum(0))(array(5, 3)).sum(1)
    assert np.count_nonzero(jacobian) == 3
    with pytest.raises(LayerInputError, match="3 channels"):
        layer(jnp.ones((5, 1)))


@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR", "REFLECT", "CAUSAL", "VALID"])
def test_padding_is_for_the_kernel_that_the_layer_has_now(padding):
    """Not for the extent that was declared: a kernel may have been cropped."""
    make = lambda size: nnx.Conv(2, 3, size, padding=padding, kernel_dilation=2, rngs=nnx.Rngs(0))
    cropped, small, x = make(5), make(3), array(9, 2)
    cropped.kernel.value = small.kernel.value
    np.testing.assert_array_equal(cropped(x), small(x))


def test_kernels_that_do_not_fit_the_layer_are_told_from_a_wrong_input():
    """A stack of them; fewer channels in groups that were not counted anew; a bias that was left as it was."""
    layer = nnx.Conv(4, 4, 3, feature_group_count=4, rngs=nnx.Rngs(0))
    kernel = layer.kernel.value
    layer.kernel.value = jnp.stack([kernel, kernel])
    with pytest.raises(LayerInputError, match=r"its kernel is float32\[2, 3, 1, 4\].*a stack of layers"):
        layer(array(9, 4))
    layer.kernel.value = kernel[..., :2]
    with pytest.raises(LayerInputError, match=r"4 channels in 4 groups, its feature_group_count\) \(its kernel is"):
        layer(array(9, 2))
    layer.feature_group_count = 2
    with pytest.raises(ValueError, match=r"bias float32\[4\] does not fit the output float32\[1, 9, 2\]"):
        layer(array(9, 2))
    layer.bias.value = jnp.zeros(2)
    assert layer(array(9, 2)).shape == (9, 2)


def test_custom_convolutions_are_used():
    """A `conv_general_dilated` of the user's replaces ours."""
    twice = lambda *args, **kwargs: 2 * jax.lax.conv_general_dilated(*args, **kwargs)
    plain = nnx.Conv(2, 3, 3, use_bias=False, rngs=nnx.Rngs(0))
    custom = nnx.Conv(2, 3, 3, use_bias=False, conv_general_dilated=twice, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(custom(array(4, 2)), 2 * plain(array(4, 2)), rtol=1e-6)


def test_a_custom_convolution_may_have_channels_first():
    def channels_first(x, kernel, *args, dimension_numbers, **kwargs):
        return jax.lax.conv_general_dilated(x, kernel, *args, dimension_numbers=("NCW", "WIO", "NCW"), **kwargs)

    plain = nnx.Conv(2, 3, 3, rngs=nnx.Rngs(0))
    custom = nnx.Conv(2, 3, 3, use_bias=False, conv_general_dilated=channels_first, rngs=nnx.Rngs(0))
    for x in (array(5, 2), array(4, 5, 2)):
        found = custom(jnp.swapaxes(x, -1, -2))
        np.testing.assert_allclose(jnp.swapaxes(found, -1, -2), plain(x), rtol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_published_code_computes_a_convolution_with_the_axes_that_the_layer_uses(rank):
    """It takes them from the module of linear layers, under the name that they have in flax.nnx."""
    layer, x = nnx.Conv(2, 3, (3,) * rank, use_bias=False, rngs=nnx.Rngs(0)), array(1, *(6,) * rank, 2)
    padding = linear.canonicalize_padding(layer.padding, rank)
    numbers = linear._conv_dimension_numbers(x.shape)
    y = jax.lax.conv_general_dilated(x, layer.kernel[...], (1,) * rank, padding, dimension_numbers=numbers)
    np.testing.assert_array_equal(layer(x), y)


@pytest.mark.parametrize("layer", [nnx.Conv, nnx.ConvTranspose])
@pytest.mark.parametrize(
    "setting",
    [
        {"strides": 0},
        {"strides": (2,)},
        {"kernel_dilation": (1, 2, 3)},
        {"strides": (1, -1)},
        {"strides": 1.5},
        {"strides": (None, 1)},
        {"kernel_dilation": (1.0, 2)},
    ],
)
def test_a_setting_that_does_not_fit_the_spatial_axes_is_named(layer, setting):
    conv = layer(2, 3, (3, 3), **setting, rngs=nnx.Rngs(0))
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name} has to be one positive number, or 2 of them, .*, but is"):
        conv(jnp.ones((1, 5, 5, 2)))


@pytest.mark.parametrize("layer", [nnx.Conv, nnx.ConvTranspose])
@pytest.mark.parametrize("size", [None, 0, (3, 0), np.int64(0)])
def test_a_kernel_without_extent_is_refused(layer, size):
    with pytest.raises(ValueError, match=r"kernel_size is a positive integer for each spatial axis, .*but is"):
        layer(2, 3, size, rngs=nnx.Rngs(0))
