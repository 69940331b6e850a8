"""Each layer, made from the same arguments and the same seed under flax.nnx and under nnxlib, is the same layer.

Compared are names, types, shapes, dtypes and values of all Variables, the output of two calls, the statistics after
them, and the gradients with respect to parameters and input, over generated configurations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx

flax = pytest.importorskip("flax.nnx")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3, "complex64": 2e-6}
few = settings(max_examples=4)


def array(*shape, dtype=jnp.float32):
    values = np.random.default_rng(len(shape) + sum(shape)).normal(1.0, 2.0, shape)
    return jnp.asarray(values * 3 if np.issubdtype(dtype, np.integer) else values, dtype)


def assert_close(ours, theirs, scale=1.0):
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    if jnp.issubdtype(ours.dtype, jnp.inexact):
        tolerance = scale * TOLERANCE[str(ours.dtype)]
        wide = np.complex128 if jnp.iscomplexobj(ours) else np.float64
        np.testing.assert_allclose(np.asarray(ours, wide), np.asarray(theirs, wide), rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(ours, theirs)


def variables(lib, module):
    return {name: v for name, v in vars(module).items() if isinstance(v, lib.Variable)}


def assert_same_variables(ours, theirs, compare):
    mine, yours = variables(nnx, ours), variables(flax, theirs)
    assert {n: type(v).__name__ for n, v in mine.items()} == {n: type(v).__name__ for n, v in yours.items()}
    for name in mine:
        compare(mine[name].get_value(), yours[name].get_value())


def gradients(lib, module, call, x):
    """d sum(sin(y)) / d parameters by name, and / d x."""

    def loss(module, x):
        return jnp.sum(jnp.sin(call(module, x).astype(jnp.float32)))

    learned = any(isinstance(v, lib.Param) for v in variables(lib, module).values())
    argnums = [lib.DiffState(0, lib.Param)] * learned + [1] * jnp.issubdtype(x.dtype, jnp.inexact)
    grads = lib.jit(lib.grad(loss, argnums=tuple(argnums)))(module, x) if argnums else ()
    by_params = lib.to_pure_dict(grads[0]) if learned else {}
    return {**by_params, **dict(enumerate(grads[learned:]))}


def check(name, args, kwargs, x, call=lambda layer, x: layer(x)):
    """Make the layer in both libraries and compare all that can be seen of it."""
    if name not in ("Embed", "RMSNorm", "Dropout"):
        kwargs = {"bias_init": jax.nn.initializers.normal(1.0), **kwargs}  # a bias of zeros would hide a wrong one
    ours = getattr(nnx, name)(*args, **kwargs, rngs=nnx.Rngs(3, dropout=4))
    theirs = getattr(flax, name)(*args, **kwargs, rngs=flax.Rngs(3, dropout=4))
    assert_same_variables(ours, theirs, np.testing.assert_array_equal)
    for _ in range(2):
        assert_close(call(ours, x), call(theirs, x))
        assert_same_variables(ours, theirs, assert_close)
    if name == "Dropout":
        return
    mine, yours = gradients(nnx, ours, call, x), gradients(flax, theirs, call, x)
    assert set(mine) == set(yours)
    for key in mine:
        assert_close(mine[key], yours[key], scale=20.0)


def settings_of(**options):
    """Keyword arguments: each option is absent or one of the given values."""
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in options.items()})


INPUT_DTYPES = st.sampled_from([jnp.float32, jnp.float32, jnp.bfloat16, jnp.int32])
PRECISION = {
    "dtype": [None, jnp.bfloat16, jnp.float16, "float32"],
    "param_dtype": [jnp.float32, jnp.bfloat16],
    "precision": ["highest", (jax.lax.Precision.HIGH, jax.lax.Precision.DEFAULT)],
    "preferred_element_type": [None, jnp.float32],
}
DTYPES = {"dtype": [None, jnp.bfloat16, jnp.float16, "float32"], "param_dtype": [jnp.float32, jnp.bfloat16]}
BIAS = {"use_bias": [True, False]}
SCALE = {"use_scale": [True, False]}
BATCHES = st.sampled_from([(), (3,), (2, 3)])


@few
@given(st.integers(1, 4), st.integers(1, 4), BATCHES, INPUT_DTYPES, settings_of(**PRECISION, **BIAS))
def test_linear(n_in, n_out, batch, dtype, kwargs):
    check("Linear", (n_in, n_out), kwargs, array(*batch, n_in, dtype=dtype))


GENERAL = [
    ((3, 4), {}, (2, 3)),
    ((3, (2, 5)), {}, (2, 3)),
    (((2, 3), 4), {"axis": (-2, -1)}, (5, 2, 3)),
    (((2, 3), (4, 5)), {"axis": (0, 2)}, (2, 6, 3)),
    (((2, 3), (4, 2)), {"axis": (0, -1)}, (2, 6, 3)),
    (((2, 3), 4), {"axis": (-1, -2)}, (5, 2, 3)),
    ((3, 4), {"batch_axis": {0: 2}}, (2, 5, 3)),
    (((2, 3), (4, 5)), {"axis": (-2, -1), "batch_axis": {0: 7}}, (7, 6, 2, 3)),
    ((3, (2, 5)), {"batch_axis": {0: 3, 1: 2}}, (3, 2, 4, 3)),
]


@few
@given(st.sampled_from(GENERAL), settings_of(**PRECISION, **BIAS))
def test_linear_general(case, kwargs):
    args, axes, shape = case
    check("LinearGeneral", args, {**axes, **kwargs}, array(*shape))


EQUATIONS = [
    ("nta,hab->nthb", (2, 3, 4), (2, 4), (5, 6, 3)),
    ("...a,ab->...b", (3, 4), (4,), (2, 5, 3)),
    ("a...b,bc->a...c", (3, 4), (4,), (2, 5, 6, 3)),
    ("bna,bac->bnc", (2, 3, 4), (2, 4), (2, 5, 3)),
    ("na,a...->n...", (3, 4), (4,), (2, 3)),
    ("na, abc -> ncb", (3, 4, 5), (5, 4), (2, 3)),
    ("nta,hab->nthb", (2, 3, 4), None, (5, 6, 3)),
]


@few
@given(st.sampled_from(EQUATIONS), settings_of(**PRECISION))
def test_einsum(case, kwargs):
    equation, kernel_shape, bias_shape, shape = case
    check("Einsum", (equation, kernel_shape, bias_shape), kwargs, array(*shape))


def test_einsum_with_the_equation_of_the_call():
    call = lambda layer, x: layer(x, "nta,hab->nhtb")
    check("Einsum", ("nta,hab->nthb", (2, 3, 4), None), {}, array(5, 6, 3), call)


@few
@given(st.integers(1, 4), st.integers(1, 4), BATCHES, settings_of(**DTYPES))
def test_embed(n, features, batch, kwargs):
    batch = batch or (1,) if n == 1 else batch  # flax.nnx cannot look a scalar up in a table of one row
    indices = jnp.asarray(np.random.default_rng(0).integers(-n, n, batch))
    check("Embed", (n, features), kwargs, indices)
    check("Embed", (n, features), kwargs, array(*batch, features), lambda layer, x: layer.attend(x))


def test_embed_gives_nan_out_of_range():
    for lib in (nnx, flax):
        out = lib.Embed(3, 2, rngs=lib.Rngs(0))(jnp.array([0, 3, -4]))
        np.testing.assert_array_equal(jnp.isnan(out).all(1), [False, True, True])


@st.composite
def convolutions(draw, transposed=False):
    rank = draw(st.integers(1, 2))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    sizes = st.none() | st.integers(1, 2) | st.tuples(*[st.integers(1, 3)] * rank)
    explicit = [1, [(1, 2)] * rank, [2, (0, 1)][:rank]]
    named = (
        ["SAME", "VALID", "CIRCULAR"] if transposed else ["SAME", "same", "SAME_LOWER", "VALID", "CIRCULAR", "REFLECT"]
    )
    kwargs = draw(settings_of(**PRECISION, **BIAS))
    kwargs |= {"strides": draw(sizes), "kernel_dilation": draw(sizes)}
    if transposed:
        kwargs |= {"padding": draw(st.sampled_from(named + explicit)), "transpose_kernel": draw(st.booleans())}
        groups = 1
    else:
        causal = ["CAUSAL"] if rank == 1 else []
        dilated = draw(st.booleans())
        padding = draw(st.sampled_from(explicit if dilated else named + explicit + causal))
        groups = draw(st.sampled_from([1, 2]))
        kwargs |= {"padding": padding, "feature_group_count": groups}
        if dilated:
            kwargs["input_dilation"] = 2
    n_in, n_out = 2, draw(st.sampled_from([2, 4]))
    if draw(st.booleans()):
        swapped = kwargs.get("transpose_kernel", False)
        channels = (n_out, n_in) if swapped else (n_in // groups, n_out)
        kwargs["mask"] = jnp.asarray(np.random.default_rng(1).integers(0, 2, (*kernel, *channels)), jnp.float32)
    x = array(*draw(BATCHES), *[draw(st.integers(4, 7)) for _ in range(rank)], n_in)
    return (n_in, n_out, kernel[0] if rank == 1 and draw(st.booleans()) else kernel), kwargs, x


@settings(max_examples=12)
@given(convolutions())
def test_conv(case):
    check("Conv", *case)


@settings(max_examples=12)
@given(convolutions(transposed=True))
def test_conv_transpose(case):
    check("ConvTranspose", *case)


NORM = {**DTYPES, "epsilon": [1e-3], "use_fast_variance": [True, False]}


def mask_for(x):
    """A random mask that leaves two elements or more of each row and column, so that their variance is not 0."""
    return jnp.asarray(np.random.default_rng(2).integers(0, 2, x.shape), bool).at[:, :2].set(True).at[:2].set(True)


@settings(max_examples=10)
@given(
    st.sampled_from([((4, 3), {}), ((4, 5, 3), {}), ((4, 3, 5), {"axis": 1}), ((2, 4, 3, 5), {"axis": -2})]),
    INPUT_DTYPES,
    st.sampled_from(["batch", "masked batch", "running", "batch by call", "running by call"]),
    settings_of(**NORM, **BIAS, **SCALE, momentum=[0.5, 0.9], scale_init=[jax.nn.initializers.normal(1.0)]),
)
def test_batch_norm(case, dtype, mode, kwargs):
    shape, axis = case
    x = array(*shape, dtype=dtype)
    call = {
        "masked batch": lambda layer, x: layer(x, mask=mask_for(x)),
        "batch by call": lambda layer, x: layer(x, use_running_average=False),
        "running by call": lambda layer, x: layer(x, use_running_average=True),
    }.get(mode, lambda layer, x: layer(x))
    if mode in ("running", "batch by call"):
        kwargs = {**kwargs, "use_running_average": True}
    check("BatchNorm", (3,), {**axis, **kwargs}, x, call)


@few
@given(
    st.sampled_from([
        ((4, 3), {}),
        ((4, 5, 3), {"reduction_axes": (-2, -1)}),
        ((4, 3, 5), {"reduction_axes": 1, "feature_axes": 1}),
        ((4, 3, 1), {"reduction_axes": (1, 2), "feature_axes": (1, 2)}),
        ((3,), {}),
    ]),
    st.booleans(),
    INPUT_DTYPES,
    settings_of(**NORM, **BIAS, **SCALE, scale_init=[jax.nn.initializers.normal(1.0)]),
)  # fmt: skip
def test_layer_norm(case, masked, dtype, kwargs):
    shape, axes = case
    x = array(*shape, dtype=dtype)
    masked = masked and x.ndim > 1
    check("LayerNorm", (3,), {**axes, **kwargs}, x, lambda layer, x: layer(x, mask=mask_for(x) if masked else None))


@few
@given(
    st.sampled_from([((4, 3), {}), ((4, 5, 3), {"reduction_axes": (-2, -1)}), ((3,), {})]),
    st.booleans(),
    INPUT_DTYPES,
    settings_of(**NORM, **SCALE, scale_init=[jax.nn.initializers.normal(1.0)]),
)
def test_rms_norm(case, masked, dtype, kwargs):
    shape, axes = case
    x = array(*shape, dtype=dtype)
    masked = masked and x.ndim > 1
    check("RMSNorm", (3,), {**axes, **kwargs}, x, lambda layer, x: layer(x, mask=mask_for(x) if masked else None))


@few
@given(
    st.sampled_from([{"num_groups": 2}, {"num_groups": 6}, {"num_groups": None, "group_size": 2}]),
    st.sampled_from([(4, 6), (4, 5, 6), (2, 3, 4, 6)]),
    st.booleans(),
    INPUT_DTYPES,
    settings_of(**NORM, **BIAS, **SCALE, scale_init=[jax.nn.initializers.normal(1.0)]),
)
def test_group_norm(groups, shape, masked, dtype, kwargs):
    x = array(*shape, dtype=dtype)
    call = lambda layer, x: layer(x, mask=jnp.ones(x.shape, bool) if masked else None)
    check("GroupNorm", (6,), {**groups, **kwargs}, x, call)


@few
@given(
    st.sampled_from([((4, 5, 3), {}), ((4, 3, 5), {"feature_axes": 1}), ((2, 3, 4, 3), {})]),
    INPUT_DTYPES,
    settings_of(**NORM, **BIAS, **SCALE, scale_init=[jax.nn.initializers.normal(1.0)]),
)
def test_instance_norm(case, dtype, kwargs):
    shape, axes = case
    check("InstanceNorm", (3,), {**axes, **kwargs}, array(*shape, dtype=dtype))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "RMSNorm"])
def test_norm_over_a_mapped_axis(name, fast):
    """With `axis_name`, statistics are those of all shards together."""
    x = array(4, 5, 3)

    def run(lib):
        layer = getattr(lib, name)(3, axis_name="shards", use_fast_variance=fast, rngs=lib.Rngs(0))
        graphdef, state = lib.split(layer)

        def call(state, x):
            merged = lib.merge(graphdef, state)
            y = merged(x)
            return y, {name: v.get_value() for name, v in variables(lib, merged).items()}

        return jax.vmap(call, in_axes=(None, 0), axis_name="shards")(state, x)

    jax.tree.map(assert_close, run(nnx), run(flax))


@few
@given(
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 1]),
    st.sampled_from([{}, {"broadcast_dims": (0,)}, {"broadcast_dims": (-1, 0)}]),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_dropout(rate, kwargs, dtype):
    """The same elements are dropped, call by call; the layer's stream is the same fork."""
    check("Dropout", (rate,), kwargs, array(4, 5, dtype=dtype))


def test_dropout_streams():
    """The stream is found, forked, named and counted alike, and one given to the call is used instead."""

    def facts(lib):
        out = []
        for rngs in (lib.Rngs(0), lib.Rngs(0, dropout=1), lib.RngStream(2, tag="noise")):
            layer = lib.Dropout(0.5, rngs=rngs)
            x = jnp.ones((3, 4))
            out += [layer.rngs.tag, int(layer.rngs.count.get_value()), layer(x).tolist()]
            out += [layer(x, rngs=lib.Rngs(5)).tolist(), layer(x, rngs=lib.RngStream(5, tag="a")).tolist()]
            out += [layer(x, rngs=jax.random.key(5)).tolist(), layer(x, deterministic=True).tolist()]
            out += [int(layer.rngs.count.get_value())]
        return out

    assert facts(nnx) == facts(flax)


POOLS = st.sampled_from([
    ((3, 5), (2,), None, "VALID"),
    ((2, 6, 3), (3,), (2,), "SAME"),
    ((2, 6, 5, 3), (2, 3), (1, 2), "SAME"),
    ((2, 6, 5, 3), (2, 3), None, ((1, 1), (0, 2))),
    ((2, 2, 6, 5, 3), (2, 2), (2, 2), "VALID"),
])  # fmt: skip


@few
@given(POOLS, st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int32]))
def test_pools(case, dtype):
    shape, *window = case
    x = array(*shape, dtype=dtype)
    for name in ("max_pool", "avg_pool"):
        assert_close(getattr(nnx, name)(x, *window), getattr(flax, name)(x, *window))
    if dtype is not jnp.int32:  # flax.nnx negates the input, which overflows at the padding
        assert_close(nnx.min_pool(x, *window), flax.min_pool(x, *window))
    average = nnx.avg_pool(x, *window, count_include_pad=False)
    assert_close(average, flax.avg_pool(x, *window, count_include_pad=False).astype(average.dtype))
    if dtype is not jnp.int32:
        ours = nnx.pool(x, jnp.asarray(0, dtype), jax.lax.add, *window)
        assert_close(ours, flax.pool(x, jnp.asarray(0, dtype), jax.lax.add, *window))


ACTIVATIONS = """celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid
log_softmax logsumexp one_hot relu relu6 selu sigmoid silu soft_sign softmax softplus standardize swish tanh""".split()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name):
    args = (jnp.arange(4), 4) if name == "one_hot" else (jnp.linspace(-3.0, 3.0, 8),)
    assert_close(getattr(nnx, name)(*args), getattr(flax, name)(*args))


INITIALIZERS = """delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform kaiming_normal kaiming_uniform
lecun_normal lecun_uniform normal orthogonal truncated_normal uniform xavier_normal xavier_uniform zeros_init
ones_init""".split()


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializer(name):
    shape = (3, 4, 5) if name == "delta_orthogonal" else (4, 5)
    for dtype in (jnp.float32, "float16") if "orthogonal" not in name else (jnp.float32,):
        ours, theirs = (getattr(lib.initializers, name)()(jax.random.key(0), shape, dtype) for lib in (nnx, flax))
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    args = (jax.random.key(0), shape)
    assert_close(getattr(nnx.initializers, name)()(*args), getattr(flax.initializers, name)()(*args))


def test_initializers_with_arguments():
    for make in (
        lambda i: i.constant(0.3),
        lambda i: i.variance_scaling(2.0, "fan_out", "uniform"),
        lambda i: i.zeros,
        lambda i: i.ones,
        lambda i: i.normal(0.1),
    ):
        args = (jax.random.key(0), (3, 4), jnp.bfloat16)
        np.testing.assert_array_equal(make(nnx.initializers)(*args), make(flax.initializers)(*args))


def test_a_model_draws_the_same_parameters_layer_by_layer():
    """Each constructor takes as many keys from the stream, so that layers made later start from the same values too."""

    def values(lib):
        rngs = lib.Rngs(0, dropout=1)
        layers = [
            lib.Linear(2, 3, rngs=rngs),
            lib.Linear(2, 3, use_bias=False, rngs=rngs),
            lib.Conv(2, 3, (2, 2), rngs=rngs),
            lib.ConvTranspose(2, 3, 2, use_bias=False, rngs=rngs),
            lib.BatchNorm(3, rngs=rngs),
            lib.BatchNorm(3, use_bias=False, use_scale=False, rngs=rngs),
            lib.LayerNorm(3, use_scale=False, rngs=rngs),
            lib.RMSNorm(3, rngs=rngs),
            lib.GroupNorm(4, 2, rngs=rngs),
            lib.InstanceNorm(3, rngs=rngs),
            lib.LinearGeneral(2, (2, 3), rngs=rngs),
            lib.Einsum("na,ab->nb", (2, 3), (3,), rngs=rngs),
            lib.Einsum("na,ab->nb", (2, 3), rngs=rngs),
            lib.Embed(3, 2, rngs=rngs),
            lib.Dropout(0.5, rngs=rngs),
            lib.Linear(2, 3, rngs=rngs),
        ]
        counts = [int(rngs.default.count.get_value()), int(rngs.dropout.count.get_value())]
        return [v.get_value() for layer in layers for v in variables(lib, layer).values()], counts

    (ours, our_counts), (theirs, their_counts) = values(nnx), values(flax)
    assert our_counts == their_counts
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_custom_operations_are_called_alike():
    """`dot_general`, `conv_general_dilated`, `einsum_op` and `promote_dtype` see what they see in flax.nnx."""
    seen = []

    def record(operation):
        def call(*args, **kwargs):
            settled = [a for a in args if not isinstance(a, jax.Array | list | tuple)]
            given = {k: v for k, v in kwargs.items() if v is not None and not isinstance(v, tuple)}
            seen.append((settled, given))
            return operation(*args, **kwargs)

        return call

    def run(lib):
        seen.clear()
        dtypes = {"preferred_element_type": jnp.float32, "precision": "highest"}
        promote = record(lib.nn.dtypes.promote_dtype)
        dot, convolve = record(jax.lax.dot_general), record(jax.lax.conv_general_dilated)
        rngs = lib.Rngs(0)
        x = jnp.ones((4, 2))
        lib.Linear(2, 3, dot_general=dot, promote_dtype=promote, **dtypes, rngs=rngs)(x)
        lib.LinearGeneral(2, 3, dot_general=dot, **dtypes, rngs=rngs)(x)
        lib.LinearGeneral(2, 3, dot_general_cls=lambda: dot, **dtypes, rngs=rngs)(x)
        lib.Einsum("na,ab->nb", (2, 3), einsum_op=record(jnp.einsum), **dtypes, rngs=rngs)(x)
        lib.Embed(3, 2, promote_dtype=promote, rngs=rngs)(jnp.array([1]))
        lib.BatchNorm(2, promote_dtype=promote, rngs=rngs)(x)
        lib.LayerNorm(2, promote_dtype=promote, dtype="bfloat16", rngs=rngs)(x)
        layer = lib.Conv(
            2, 3, (3,), strides=2, conv_general_dilated=convolve, promote_dtype=promote, **dtypes, rngs=rngs
        )
        layer(x)
        return [repr(call) for call in seen]

    ours, theirs = run(nnx), run(flax)
    assert len(ours) == 10
    drop = "'inexact'"  # which side names a default is no part of the contract
    assert [c for c in ours if drop not in c and "dimension" not in c] == [
        c for c in theirs if drop not in c and "dimension" not in c
    ]


SHARDED_CALLS = {
    "Linear": lambda lib, rngs, x, spec: lib.Linear(4, 3, rngs=rngs)(x, out_sharding=spec),
    "LinearGeneral": lambda lib, rngs, x, spec: lib.LinearGeneral(4, (3, 2), rngs=rngs)(x, out_sharding=spec),
    "Einsum": lambda lib, rngs, x, spec: lib.Einsum("abc,cd->abd", (4, 5), (5,), rngs=rngs)(x, out_sharding=spec),
    "Embed": lambda lib, rngs, x, spec: lib.Embed(5, 3, rngs=rngs)(jnp.arange(4), out_sharding=spec),
    "attend": lambda lib, rngs, x, spec: lib.Embed(5, 4, rngs=rngs).attend(x, out_sharding=spec),
    "Conv": lambda lib, rngs, x, spec: lib.Conv(4, 3, (2,), rngs=rngs)(x, out_sharding=spec),
    "LoRALinear": lambda lib, rngs, x, spec: lib.LoRALinear(4, 3, lora_rank=2, rngs=rngs)(x, out_sharding=spec),
    "MultiHeadAttention": lambda lib, rngs, x, spec: lib.MultiHeadAttention(2, 4, 8, decode=False, rngs=rngs)(
        x, out_sharding=spec, qkv_sharding=spec
    ),
}


@pytest.mark.parametrize("layer", SHARDED_CALLS)
def test_the_sharding_of_an_output(layer):
    """`out_sharding` of a call, under a mesh whose axes are part of the types of arrays."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        ours, theirs = [
            SHARDED_CALLS[layer](lib, lib.Rngs(0), jnp.ones((2, 3, 4)), jax.P("data")) for lib in (nnx, flax)
        ]
    assert jax.typeof(ours) == jax.typeof(theirs)
    assert jax.typeof(ours).sharding.spec[0] == "data"


def test_metadata_reaches_the_parameters():
    """`*_metadata` and metadata of wrapped initializers end up on the Variables."""

    def facts(lib):
        init = lib.with_metadata(jax.nn.initializers.ones, origin="init")
        rngs = lib.Rngs(0)
        linear = lib.Linear(
            2, 3, kernel_init=init, kernel_metadata={"role": "k"}, bias_metadata={"role": "b"}, rngs=rngs
        )
        general = lib.LinearGeneral(2, (3, 4), kernel_init=init, kernel_metadata={"role": "k"}, rngs=rngs)
        norm = lib.BatchNorm(3, scale_metadata={"role": "s"}, bias_metadata={"role": "b"}, rngs=rngs)
        embed = lib.Embed(3, 2, embedding_metadata={"role": "e"}, rngs=rngs)
        conv = lib.Conv(2, 3, 3, kernel_metadata={"role": "k"}, bias_metadata={"role": "b"}, rngs=rngs)
        found = [linear.kernel.origin, linear.kernel.role, linear.bias.role, general.kernel.origin, general.kernel.role]
        found += [general.kernel.shape, norm.scale.role, norm.bias.role, embed.embedding.role, conv.kernel.role]
        return [*found, conv.bias.role]

    assert facts(nnx) == facts(flax)


def test_group_norm_over_some_spatial_axes_differs_on_purpose():
    """With spatial axes left out of `reduction_axes`, flax.nnx repeats the statistics along the wrong axis."""
    x = array(2, 3, 3, 4)

    def run(lib):
        return lib.GroupNorm(4, 2, reduction_axes=(1, -1), use_bias=False, use_scale=False, rngs=lib.Rngs(0))(x)

    grouped = np.asarray(x, np.float64).reshape(2, 3, 3, 2, 2)
    centred = grouped - grouped.mean((1, 4), keepdims=True)
    expected = (centred / np.sqrt((centred**2).mean((1, 4), keepdims=True) + 1e-6)).reshape(x.shape)
    np.testing.assert_allclose(run(nnx), expected, atol=1e-5)
    assert not np.allclose(run(flax), expected, atol=1e-2)


# --- subclasses -----------------------------------------------------------------------------------------------------

ARGUMENTS = {
    "Linear": (2, 3),
    "LinearGeneral": (2, 3),
    "Einsum": ("ab,bc->ac", (2, 3), (3,)),
    "Embed": (3, 2),
    "Conv": (2, 3, (3,)),
    "ConvTranspose": (2, 3, (3,)),
    "BatchNorm": (3,),
    "LayerNorm": (3,),
    "RMSNorm": (3,),
    "GroupNorm": (4, 2),
    "InstanceNorm": (3,),
    "Dropout": (0.1,),
    "MultiHeadAttention": (2, 4),
    "LoRA": (2, 2, 2),
    "LSTMCell": (2, 3),
    "OptimizedLSTMCell": (2, 3),
    "GRUCell": (2, 3),
    "SimpleCell": (2, 3),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_subclass_with_a_constructor_of_its_own_sets_all_that_the_methods_need(name):
    """A layer has no attribute that flax.nnx's lacks, unless the class has a default for it."""
    ours, theirs = (getattr(lib, name)(*ARGUMENTS[name], rngs=lib.Rngs(0)) for lib in (nnx, flax))
    own = [attribute for attribute in vars(ours) if attribute not in vars(theirs)]
    assert [a for a in own if not a.startswith("_") and not hasattr(type(ours), a)] == []


SIZES = [(1, 3, 4), (2, 16, 16), (64, 33, 1), (1, 64, 64), (8, 1, 1), (32, 64, 100)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_eager_gradients_of_linear_have_the_same_bits(sizes, dtype):
    """Also for matrices with a single column, to whose products XLA adds a bias at once, if they are one operation."""
    batch, features, out = sizes
    x = jax.random.normal(jax.random.key(0), (batch, features))

    def both(lib):
        init = lib.initializers.normal()
        layer = lib.Linear(features, out, dtype=dtype, bias_init=init, rngs=lib.Rngs(1))
        value, grads = lib.value_and_grad(lambda layer, x: (layer(x) ** 2).mean(), argnums=(0, 1))(layer, x)
        return jax.tree.leaves((value, layer(x), jax.tree.leaves(grads)))

    for ours, theirs in zip(both(nnx), both(flax), strict=True):
        np.testing.assert_array_equal(ours, theirs)
