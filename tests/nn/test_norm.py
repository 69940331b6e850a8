import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.nn import normalization
from nnxlib.nn.dtypes import LayerInputError

normal = jax.nn.initializers.normal(1.0)


def array(*shape, mean=1.0, scale=2.0):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(mean, scale, shape), jnp.float32)


def reference(x, axes, epsilon, layer, feature_axis=-1, use_mean=True, mask=None):
    """The formula in float64."""
    x = np.asarray(x, np.float64)
    where = np.ones(x.shape, bool) if mask is None else np.broadcast_to(mask, x.shape)
    mean = x.mean(axes, keepdims=True, where=where) if use_mean else 0.0
    variance = ((x - mean) ** 2).mean(axes, keepdims=True, where=where)
    y = (x - mean) / np.sqrt(variance + epsilon)
    shape = [1] * x.ndim
    shape[feature_axis] = -1
    for name, combine in (("scale", np.multiply), ("bias", np.add)):
        param = getattr(layer, name, None)
        y = y if param is None else combine(y, np.asarray(param.value, np.float64).reshape(shape))
    return y


OPTIONS = st.fixed_dictionaries(
    {"use_fast_variance": st.booleans(), "epsilon": st.sampled_from([1e-6, 1e-2]), "use_scale": st.booleans()}
)
BIAS = st.booleans()
rngs = lambda: nnx.Rngs(0)


def close(y, expected):
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=10)
@given(st.sampled_from([((8, 3), -1), ((4, 3, 5), 1), ((2, 3, 4, 5), -3)]), OPTIONS, BIAS, st.booleans())
def test_batch_norm_against_its_formula(case, options, use_bias, masked):
    """Statistics over all axes but the feature axis, of the elements that the mask leaves."""
    shape, axis = case
    layer = nnx.BatchNorm(3, axis=axis, use_bias=use_bias, bias_init=normal, scale_init=normal, rngs=rngs(), **options)
    x = array(*shape)
    mask = np.random.default_rng(0).random(shape) > 0.3 if masked else None
    axes = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
    close(layer(x, mask=mask), reference(x, axes, options["epsilon"], layer, axis, mask=mask))


@settings(max_examples=10)
@given(st.sampled_from([((4, 3), -1), ((4, 5, 3), (-2, -1)), ((3,), -1)]), OPTIONS, BIAS)
def test_layer_and_rms_norm_against_their_formulas(case, options, use_bias):
    """Statistics of each example over the reduction axes; RMSNorm takes the mean to be 0."""
    shape, axes = case
    x = array(*shape)
    layer = nnx.LayerNorm(
        3, reduction_axes=axes, use_bias=use_bias, bias_init=normal, scale_init=normal, rngs=rngs(), **options
    )
    close(layer(x), reference(x, axes, options["epsilon"], layer))
    layer = nnx.RMSNorm(3, reduction_axes=axes, scale_init=normal, rngs=rngs(), **options)
    close(layer(x), reference(x, axes, options["epsilon"], layer, use_mean=False))


@settings(max_examples=10)
@given(st.sampled_from([(4, 6), (4, 5, 6), (2, 3, 4, 6)]), st.sampled_from([1, 2, 3, 6]), OPTIONS, st.booleans())
def test_group_norm_against_its_formula(shape, groups, options, masked):
    """Statistics over space and within each group; one group and no space is LayerNorm, one feature InstanceNorm."""
    layer = nnx.GroupNorm(6, groups, bias_init=normal, scale_init=normal, rngs=rngs(), **options)
    x = array(*shape)
    mask = np.random.default_rng(0).random((*shape[:-1], 1)) > -1.0 if masked else None
    grouped = np.asarray(x).reshape(*shape[:-1], groups, 6 // groups)
    axes = (*range(1, grouped.ndim - 2), grouped.ndim - 1)
    plain = nnx.GroupNorm(6, groups, use_bias=False, use_scale=False, epsilon=options["epsilon"], rngs=rngs())
    expected = reference(grouped, axes, options["epsilon"], plain).reshape(shape)
    close(plain(x), expected)
    scale = 1.0 if layer.scale is None else np.asarray(layer.scale.value)
    close(layer(x, mask=mask), expected * scale + np.asarray(layer.bias.value))


@pytest.mark.parametrize("axes", [(-1,), (1, -1), (1, 2, -1)])
def test_group_norm_over_chosen_spatial_axes(axes):
    """Spatial axes that are left out have statistics of their own."""
    layer = nnx.GroupNorm(4, 2, reduction_axes=axes, use_bias=False, use_scale=False, rngs=rngs())
    x = array(2, 3, 5, 4)
    grouped = np.asarray(x).reshape(2, 3, 5, 2, 2)
    expected = reference(grouped, tuple(4 if a == -1 else a for a in axes), 1e-6, layer).reshape(x.shape)
    close(layer(x), expected)


@settings(max_examples=10)
@given(st.sampled_from([((4, 5, 3), -1), ((4, 3, 5), 1), ((2, 3, 4, 3), -1)]), OPTIONS)
def test_instance_norm_against_its_formula(case, options):
    """Statistics over space, of each feature of each example."""
    shape, axis = case
    layer = nnx.InstanceNorm(3, feature_axes=axis, bias_init=normal, scale_init=normal, rngs=rngs(), **options)
    x = array(*shape)
    axes = tuple(a for a in range(1, x.ndim) if a != axis % x.ndim)
    close(layer(x), reference(x, axes, options["epsilon"], layer, axis))


def test_several_feature_axes_share_one_parameter_vector():
    """`feature_axes=(-2, -1)` takes scale and bias of the product of their sizes."""
    layer = nnx.LayerNorm(6, feature_axes=(-2, -1), reduction_axes=(-2, -1), scale_init=normal, rngs=rngs())
    x = array(4, 2, 3)
    close(layer(x), reference(x, (1, 2), 1e-6, None) * np.asarray(layer.scale.value).reshape(2, 3))
    batch_norm = nnx.BatchNorm(6, axis=(1, 2), momentum=0.0, rngs=rngs())
    batch_norm(x)
    close(batch_norm.mean.value, np.asarray(x).mean(0).ravel())


# --- running statistics -----------------------------------------------------------------------------------------------


def test_running_statistics_follow_the_batches():
    """They move by momentum towards the statistics of each batch, and are then used for evaluation."""
    layer = nnx.BatchNorm(3, momentum=0.9, rngs=rngs())
    mean, variance = np.zeros(3), np.ones(3)
    for seed in range(3):
        x = array(8, 3, mean=seed)
        layer(x)
        mean = 0.9 * mean + 0.1 * np.asarray(x).mean(0)
        variance = 0.9 * variance + 0.1 * np.asarray(x).var(0)
    close(layer.mean.value, mean)
    close(layer.var.value, variance)
    before = (layer.mean.value, layer.var.value)
    layer.eval()
    close(layer(x), (np.asarray(x) - mean) / np.sqrt(variance + 1e-5))
    assert layer.mean.value is before[0]
    assert layer.var.value is before[1]


def test_train_and_eval_switch_the_mode_and_leave_frozen_layers_alone():
    """A layer that the user froze stays frozen through train(), eval() and train()."""
    model = nnx.Sequential(nnx.BatchNorm(3, rngs=rngs()), nnx.BatchNorm(3, use_running_average=True, rngs=rngs()))
    modes = lambda: [layer.use_running_average for layer in model.layers]
    assert modes() == [False, True]
    model.train()
    assert modes() == [False, True]
    model.eval()
    assert modes() == [True, True]
    model.train()
    assert modes() == [False, True]
    model(array(8, 3))
    assert not np.allclose(model[0].var.value, 1.0)
    np.testing.assert_array_equal(model[1].var.value, np.ones(3))


def test_the_call_overrides_the_attribute():
    """`use_running_average` of the call counts for that call; without either the error shows the three ways."""
    layer = nnx.BatchNorm(3, use_running_average=None, rngs=rngs())
    x = array(8, 3)
    np.testing.assert_allclose(layer(x, use_running_average=True), x / np.sqrt(1 + 1e-5), rtol=1e-6)
    assert abs(layer(x, use_running_average=False).mean()) < 1e-5
    assert layer.use_running_average is None
    with pytest.raises(ValueError, match=r"(?s)No `use_running_average` argument.*nnx.BatchNorm\(.*model.eval\(\)"):
        layer(x)


def test_statistics_are_updated_in_lifted_transforms_and_carry_no_gradient():
    """Under jit and grad the new statistics come out; their gradient is stopped."""
    x = array(8, 3)
    eager, jitted = nnx.BatchNorm(3, rngs=rngs()), nnx.BatchNorm(3, rngs=rngs())
    eager(x)

    def loss(layer, x):
        return (layer(x) ** 3).sum()

    nnx.jit(nnx.grad(loss))(jitted, x)
    close(jitted.mean.value, eager.mean.value)
    close(jitted.var.value, eager.var.value)

    def statistic(x):
        layer = nnx.BatchNorm(3, rngs=rngs())
        layer(x)
        return layer.mean.value.sum()

    assert not jax.grad(statistic)(x).any()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("counts", [None, [6, 1, 3, 2], [0, 0, 4, 0]])
def test_shards_take_the_statistics_of_the_whole_batch(fast, counts):
    """With `axis_name` each shard sees the statistics of all, weighted by how many elements count in each."""
    x, masked = array(4, 6, 3), counts is not None
    mask = np.arange(6)[None, :, None] < np.array(counts or [6] * 4)[:, None, None]
    layer = nnx.BatchNorm(3, axis_name="shards", use_fast_variance=fast, momentum=0.0, rngs=rngs())
    graphdef, state = nnx.split(layer)

    def run(state, x, mask):
        layer = nnx.merge(graphdef, state)
        return layer(x, mask=mask if masked else None), layer.mean.value, layer.var.value

    y, mean, var = jax.vmap(run, in_axes=(None, 0, 0), axis_name="shards")(state, x, mask)
    whole = nnx.BatchNorm(3, momentum=0.0, use_fast_variance=fast, rngs=rngs())
    expected = whole(x.reshape(24, 3), mask=mask.reshape(24, 1) if masked else None)
    close(y, expected.reshape(x.shape))
    close(mean, np.tile(whole.mean.value, (4, 1)))
    close(var, np.tile(whole.var.value, (4, 1)))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
def test_an_example_of_which_nothing_counts_leaves_the_gradients_finite(name, fast):
    """A batch is filled up with empty examples, which the loss leaves out; 0 / 0 would be in all derivatives."""
    layer = MAKERS[name](use_fast_variance=fast)
    x, mask = array(2, 6, 4), jnp.array([True, False])[:, None, None]
    y = layer(x, mask=mask)
    assert jnp.isfinite(y[0]).all()
    assert jnp.isnan(y[1]).all()
    gradient = nnx.grad(lambda layer: jnp.sum(jnp.where(mask, layer(x, mask=mask), 0.0)))(layer)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradient))
    alone = nnx.grad(lambda layer: jnp.sum(layer(x[:1])))(layer)
    jax.tree.map(close, gradient, alone)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("axis_name", [None, "shards"])
def test_running_statistics_stay_where_nothing_counts(fast, axis_name):
    """For a batch that the mask excludes, for a feature that it excludes, and for a batch of size 0."""
    layer = nnx.BatchNorm(3, use_fast_variance=fast, axis_name=axis_name, rngs=rngs())
    layer.mean.value, layer.var.value = mean, var = array(3), array(3) ** 2
    graphdef, state = nnx.split(layer)

    def run(x, mask):
        layer = nnx.merge(graphdef, state)
        return layer(x, mask=mask), layer.mean.value == mean, layer.var.value == var

    batch, no, yes = array(2, 5, 3), [False] * 3, [True] * 3
    cases = (batch, no, yes), (batch, [True, False, True], [False, True, False]), (batch[:, :0], yes, yes)
    for x, counts, kept in cases:
        mask = jnp.broadcast_to(jnp.array(counts), x.shape)
        y, same_mean, same_var = jax.vmap(run, axis_name="shards")(x, mask)
        assert jnp.isnan(y[..., np.array(kept)]).all()
        assert jnp.isfinite(y[..., ~np.array(kept)]).all()
        assert same_mean.tolist() == same_var.tolist() == [kept, kept]
    _, *same = jax.vmap(lambda x: run(x, None), axis_name="shards")(batch[:, :0])
    assert all(s.all() for s in same)


# --- dtypes, errors, copies -------------------------------------------------------------------------------------------

MAKERS = {
    "BatchNorm": lambda **kw: nnx.BatchNorm(4, rngs=rngs(), **kw),
    "LayerNorm": lambda **kw: nnx.LayerNorm(4, rngs=rngs(), **kw),
    "RMSNorm": lambda **kw: nnx.RMSNorm(4, rngs=rngs(), **kw),
    "GroupNorm": lambda **kw: nnx.GroupNorm(4, 2, rngs=rngs(), **kw),
    "InstanceNorm": lambda **kw: nnx.InstanceNorm(4, rngs=rngs(), **kw),
}


@pytest.mark.parametrize("name", MAKERS)
def test_statistics_of_low_precision_inputs_are_taken_in_float32(name):
    """In bfloat16, where 256 + 1 is 256, the result is the float32 one rounded once; so it is for float16 overflow."""
    x = array(64, 3, 4, mean=3.0)
    layer = MAKERS[name](dtype=jnp.bfloat16)
    y = layer(x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    exact = MAKERS[name]()(x.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2e-2, atol=2e-2)
    large = (1000 * x).astype(jnp.float16)
    exact = MAKERS[name]()(large.astype(jnp.float32))
    np.testing.assert_allclose(MAKERS[name](dtype=jnp.float16)(large).astype(jnp.float32), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm"])
def test_the_fast_variance_is_less_exact_and_never_negative(name):
    """The other one is exact also where the mean is large against the deviation."""
    x = array(8, 6, 4, mean=1000.0, scale=0.1)
    wide = np.asarray(x, np.float64)
    axes = {"BatchNorm": (0, 1), "LayerNorm": -1, "GroupNorm": (1, 3), "InstanceNorm": 1}[name]
    wide = wide.reshape(8, 6, 2, 2) if name == "GroupNorm" else wide
    exact = ((wide - wide.mean(axes, keepdims=True)) / wide.std(axes, keepdims=True)).reshape(x.shape)
    error = lambda fast: np.abs(MAKERS[name](use_fast_variance=fast, epsilon=1e-9)(x) - exact).max()
    assert error(False) < 0.01 < error(True)
    assert not np.isnan(error(True))


@pytest.mark.parametrize("name", MAKERS)
def test_the_variance_of_complex_numbers_is_that_of_their_magnitude(name):
    x = array(8, 6, 4) + 1j * array(8, 6, 4)[::-1]
    axes = {"BatchNorm": (0, 1), "LayerNorm": -1, "RMSNorm": -1, "GroupNorm": (1, 3), "InstanceNorm": 1}[name]
    wide = np.asarray(x).reshape(8, 6, 2, 2) if name == "GroupNorm" else np.asarray(x)
    centred = wide if name == "RMSNorm" else wide - wide.mean(axes, keepdims=True)
    expected = centred / np.sqrt((np.abs(centred) ** 2).mean(axes, keepdims=True))
    for fast in (False, True):
        close(MAKERS[name](use_fast_variance=fast, dtype=jnp.complex64)(x), expected.reshape(x.shape))


@pytest.mark.parametrize("name", MAKERS)
def test_wrong_input_names_the_layer_its_sizes_and_the_input(name):
    """Another number of features is refused, also by a bare array."""
    layer = MAKERS[name]()
    with pytest.raises(LayerInputError, match=rf"layer \({name} (4|2x2)\) takes inputs .*float32\[2, 3, 5\]"):
        layer(jnp.ones((2, 3, 5)))
    with pytest.raises(LayerInputError, match=r"float32\[\]"):
        layer(jnp.float32(0))


@pytest.mark.parametrize("kind", [nnx.LayerNorm, nnx.InstanceNorm])
def test_features_are_counted_if_there_is_a_scale_or_a_bias(kind):
    """Either would be broadcast to another number of them; without both there is nothing to fit."""
    for options in ({"use_bias": False}, {"use_scale": False}):
        with pytest.raises(LayerInputError, match="features on axis -1"):
            kind(4, **options, rngs=nnx.Rngs(0))(jnp.ones((2, 3, 1)))
    assert kind(4, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))(jnp.ones((2, 3, 7))).shape == (2, 3, 7)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "GroupNorm"])
def test_replaced_parameters_count_not_the_declared_features(name):
    """Channels are pruned by replacing the parameters; an input that does not fit them is told how they differ."""
    layer, x = MAKERS[name](), jax.random.normal(jax.random.key(0), (2, 3, 4))
    kept = jnp.array([0, 2])
    for _, variable in nnx.iter_graph(layer):
        if isinstance(variable, nnx.Variable):
            variable.value = variable[kept]
    pruned = type(layer)(2, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(x[..., kept]), pruned(x[..., kept]))
    with pytest.raises(LayerInputError, match=r"inputs with 2 .*its scale is float32\[2\], not \[4\] as declared"):
        layer(x)


def test_groups_of_pruned_features_have_to_be_said():
    """There may be fewer, or smaller ones; a bias that was forgotten is named, too."""
    layer, x = nnx.GroupNorm(8, 4, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, 3, 4))
    layer.scale.value = jnp.ones(4)
    for inputs in (x, jnp.ones((2, 3, 8))):
        with pytest.raises(LayerInputError, match=r"its scale is float32\[4\], not \[8\] as declared\): set its num_g"):
            layer(inputs)
    layer.num_groups = 2
    with pytest.raises(LayerInputError, match=r"its bias is float32\[8\], not \[4\]"):
        layer(x)
    layer.bias.value = jnp.zeros(4)
    np.testing.assert_array_equal(layer(x), nnx.GroupNorm(4, 2, rngs=nnx.Rngs(0))(x))


@pytest.mark.parametrize("name", ["bias", "var"])
def test_batch_norm_that_fails_leaves_its_statistics_as_they_were(name):
    """Here one parameter of a layer was pruned, and another one was forgotten."""
    layer = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    setattr(layer, name, type(getattr(layer, name))(jnp.ones(3)))
    with pytest.raises(LayerInputError, match=rf"its {name} is float32\[3\], not \[4\] as declared"):
        layer(jnp.full((2, 4), 3.0))
    assert not layer.mean.value.any()
    assert (layer.var.value == 1).all()


def test_groups_that_do_not_fit_are_refused():
    """Exactly one of number and size, dividing the features; reduction axes with the feature axis, not the batch."""
    for kwargs in ({"num_groups": None}, {"num_groups": 2, "group_size": 2}):
        with pytest.raises(ValueError, match="Either `num_groups` or `group_size`"):
            nnx.GroupNorm(4, **kwargs, rngs=rngs())
    for kwargs in ({}, {"num_groups": 3}, {"num_groups": -1}, {"num_groups": 0}):
        with pytest.raises(ValueError, match="does not divide"):
            nnx.GroupNorm(4, **kwargs, rngs=rngs())
    for group_size in (3, 0, -2):
        with pytest.raises(ValueError, match=f"not multiple of the group size .{group_size}"):
            nnx.GroupNorm(4, None, group_size, rngs=rngs())
    assert nnx.GroupNorm(4, None, 2, rngs=rngs()).num_groups == 2
    with pytest.raises(ValueError, match="must include the feature axis"):
        nnx.GroupNorm(4, 2, reduction_axes=(1,), rngs=rngs())(jnp.ones((2, 3, 4)))
    with pytest.raises(ValueError, match="batch axis"):
        nnx.InstanceNorm(4, feature_axes=0, rngs=rngs())(jnp.ones((4, 3)))


@pytest.mark.parametrize("name", MAKERS)
def test_a_trace_holds_few_operations_and_no_calls(name):
    """The jaxpr is flat, and a traced call runs a fraction of the Python of writing the formula in jax.numpy."""
    layer = MAKERS[name]()
    if name == "BatchNorm":
        layer.eval()
    equations = jax.make_jaxpr(layer)(jnp.ones((2, 3, 4))).jaxpr.eqns
    assert not {str(e.primitive) for e in equations} & {"jit", "pjit", "closed_call"}
    assert len(equations) <= 24


def test_copies_of_layers_work():
    """Settings given as lists or mappings survive pickling, deep copies and cloning."""
    for layer, x in (
        (nnx.LinearGeneral([2, 3], [4], axis=[-2, -1], batch_axis={0: 5}, rngs=rngs()), jnp.ones((5, 2, 3))),
        (nnx.Conv(2, 3, [3], strides=[2], padding=[[1, 1]], rngs=rngs()), jnp.ones((5, 2))),
        (nnx.BatchNorm(2, axis=[-1], axis_index_groups=[[0]], rngs=rngs()), array(4, 2)),
        (nnx.LayerNorm(2, reduction_axes=[-1], feature_axes=[-1], rngs=rngs()), array(4, 2)),
    ):
        assert [name for name, value in vars(layer).items() if isinstance(value, nnx.List)] == []
        expected = layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), nnx.clone(layer)):
            np.testing.assert_array_equal(other(x), expected)


def test_an_axis_that_is_named_twice_counts_once():
    """-1 and 2 are one axis of three."""
    x = array(2, 3, 4)
    np.testing.assert_array_equal(
        nnx.LayerNorm(4, reduction_axes=(-1, 2), rngs=rngs())(x), nnx.LayerNorm(4, rngs=rngs())(x)
    )


def test_running_mean_of_complex_numbers():
    """A BatchNorm that is made for complex numbers evaluates by the mean that it has seen, imaginary part and all."""
    x = (array(8, 3) + 1j * (array(8, 3) + 2)).astype(jnp.complex64)
    for settings_ in ({"dtype": jnp.complex64}, {"param_dtype": jnp.complex64}):
        layer = nnx.BatchNorm(3, momentum=0.0, rngs=rngs(), **settings_)
        trained = layer(x)
        np.testing.assert_allclose(layer(x, use_running_average=True), trained, atol=1e-5)
        np.testing.assert_allclose(layer.mean[...], x.mean(0), atol=1e-5)


NORMS = {
    "BatchNorm": lambda **kw: nnx.BatchNorm(2, rngs=nnx.Rngs(0), **kw),
    "LayerNorm": lambda **kw: nnx.LayerNorm(2, rngs=nnx.Rngs(0), **kw),
    "RMSNorm": lambda **kw: nnx.RMSNorm(2, rngs=nnx.Rngs(0), **kw),
    "GroupNorm": lambda **kw: nnx.GroupNorm(2, 2, rngs=nnx.Rngs(0), **kw),
    "InstanceNorm": lambda **kw: nnx.InstanceNorm(2, rngs=nnx.Rngs(0), **kw),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_mask_that_does_not_fit_is_refused(name):
    norm = NORMS[name]()
    before = nnx.state(norm)
    with pytest.raises(
        LayerInputError, match=r"The mask has to broadcast to .* float32\[4, 3, 2\], but is bool\[3, 3, 2\]"
    ):
        norm(jnp.ones((4, 3, 2)), mask=jnp.ones((3, 3, 2), bool))
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, before, nnx.state(norm)))
    norm(jnp.ones((4, 3, 2)), mask=jnp.ones((1, 3, 1), bool))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm"])
def test_axes_to_reduce_that_are_not_there_are_refused(name):
    norm = NORMS[name](reduction_axes=(1, 5))
    with pytest.raises(LayerInputError, match=rf"{name} .*reduction_axes: 1, 5.*float32\[4, 3, 2\]"):
        norm(jnp.ones((4, 3, 2)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fast", [True, False])
def test_published_layers_are_made_of_the_functions_that_the_layers_use(masked, fast):
    """Such as batch renormalisation, which imports them from flax.nnx's module, under its names."""
    layer, x = nnx.BatchNorm(5, use_fast_variance=fast, rngs=nnx.Rngs(0)), array(3, 4, 5)
    mask = np.random.default_rng(0).random((3, 4, 1)) < 0.7 if masked else None
    features = normalization._canonicalize_axes(x.ndim, layer.axis)
    axes = tuple(a for a in range(x.ndim) if a not in features)
    mean, var = normalization._compute_stats(x, axes, None, use_fast_variance=fast, mask=mask)
    scale, bias = layer.scale.value, layer.bias.value
    y = normalization._normalize(x, mean, var, scale, bias, axes, features, None, layer.epsilon)
    np.testing.assert_array_equal(y, layer(x, mask=mask))
    np.testing.assert_allclose(layer.mean.value, 0.01 * mean, rtol=1e-5)


NO_METADATA = normalization.MappingProxyType({})


class PublishedBatchNorm(nnx.Module):
    """As EasyDeL has it: with what flax.nnx's module on normalisation itself imports, too."""

    def __init__(
        self,
        features: int,
        promote_dtype: normalization.PromoteDtypeFn = normalization.dtypes.promote_dtype,
        metadata=NO_METADATA,
    ):
        self.mean, self.scale = nnx.BatchStat(jnp.zeros(features)), nnx.Param(jnp.ones(features), **metadata)
        self.use_running_average, self.promote_dtype = False, promote_dtype

    def __call__(self, x, use_running_average=None):
        if normalization.first_from(use_running_average, self.use_running_average, error_msg="say which"):
            return x - self.mean
        x, scale = self.promote_dtype((x, self.scale[...]), dtype=jnp.float32)
        mean, var = normalization._compute_stats(x, (0,), None)
        if self.mean._can_update:
            self.mean[...] = mean
        return normalization._normalize(x, mean, var, scale, None, (0,), (1,), None, 1e-5)


def test_published_layers_find_what_the_module_of_flax_nnx_imports():
    layer, x = PublishedBatchNorm(4), array(3, 4)
    y = jax.jit(layer)(x)  # raw JAX: the layer belongs to no trace
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-6)
    assert (layer.mean == 0).all()
    nnx.jit(layer)(x)
    np.testing.assert_allclose(layer.mean, x.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(layer(x, use_running_average=True), x - layer.mean)


def test_functions_for_published_layers_compute_in_float32_at_least():
    x = jnp.ones((3, 4), jnp.bfloat16)
    for dtype, found in (None, jnp.bfloat16), (jnp.float32, jnp.float32), (jnp.bfloat16, jnp.bfloat16):
        mean, var = normalization._compute_stats(x, -1, dtype)
        assert (mean.dtype, var.dtype, mean.shape) == (jnp.float32, jnp.float32, (3,))
        assert normalization._normalize(x, mean, var, None, None, -1, (1,), dtype, 1e-5).dtype == found
    wide = jnp.ones(4)
    for scale, bias in (wide, None), (None, wide), (wide.astype(jnp.bfloat16), wide):  # the widest of all counts
        assert normalization._normalize(x, mean, var, scale, bias, -1, 1, None, 1e-5).dtype == jnp.float32
    assert normalization._canonicalize_axes(4, (-1, 1, 3)) == (1, 3)
    mean, var = normalization._compute_stats(2 * x, 0, None, use_mean=False)
    assert (mean == 0).all()
    assert (var == 4).all()
    for value in normalization._compute_stats(x, 1, None, mask=jnp.zeros((3, 1), bool)):
        assert jnp.isnan(value).all()
