import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.jet import jet

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.errors import ArgumentError
from nnxlib.nn.dtypes import LayerInputError

normal = jax.nn.initializers.normal(1.0)


def array(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


# --- Linear -----------------------------------------------------------------------------------------------------------


def test_taylor_coefficients_of_an_mlp():
    """`jet` has rules for some operations only; eager and compiled, it gives the derivatives along a line."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(2, 8, rngs=rngs), jnp.tanh, nnx.Linear(8, 1, rngs=rngs))
    x, v = jnp.array([0.3, -0.2]), jnp.array([1.0, 2.0])
    along = lambda t: model(x + t * v)[0]
    first, second = jax.grad(along), jax.grad(jax.grad(along))
    for transform in (jet, jax.jit(jet, static_argnums=0)):
        value, (d1, d2) = transform(model, (x,), ((v, jnp.zeros(2)),))
        np.testing.assert_allclose([value[0], d1[0], d2[0]], [along(0.0), first(0.0), second(0.0)], rtol=1e-5)


@settings(max_examples=8)
@given(st.lists(st.integers(1, 3), max_size=3), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_linear_is_a_matrix_product_of_the_last_axis(batch, n_in, n_out, use_bias):
    """Against float64, for any number of batch axes."""
    layer = nnx.Linear(n_in, n_out, use_bias=use_bias, bias_init=normal, rngs=nnx.Rngs(0))
    x = array(*batch, n_in)
    expected = np.asarray(x, np.float64) @ np.asarray(layer.kernel.value, np.float64)
    expected += np.asarray(layer.bias.value, np.float64) if use_bias else 0.0
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_parameters_and_settings_are_attributes():
    """The constructor's arguments are attributes; a missing bias is None, and takes no key."""
    rngs = nnx.Rngs(0)
    layer = nnx.Linear(2, 3, use_bias=False, dtype=jnp.bfloat16, precision="high", rngs=rngs)
    assert (layer.in_features, layer.out_features, layer.use_bias, layer.bias) == (2, 3, False, None)
    assert (layer.dtype, layer.param_dtype, layer.precision) == (jnp.bfloat16, jnp.float32, "high")
    assert int(rngs.default.count.value) == 1
    assert (layer.kernel.dtype, layer(jnp.ones(2)).dtype) == (jnp.float32, jnp.bfloat16)


def test_the_dtypes_of_accumulation_and_storage():
    """`param_dtype` is what is stored, `preferred_element_type` what comes out of the product."""
    layer = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, preferred_element_type=jnp.float32, rngs=nnx.Rngs(0))
    assert (layer.kernel.dtype, layer.bias.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert layer(jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32


def test_wrong_input_names_the_layer_its_sizes_and_the_input():
    """The error says where the layer is in the caller's model, what it takes, and what it got; nothing else changes."""
    model = nnx.Sequential(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(LayerInputError) as caught:
        model(jnp.ones((1, 3)))
    assert str(caught.value) == ("model.layers[0] (Linear 4->2) takes inputs of shape [..., 4], but got float32[1, 3].")
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(LayerInputError, match=r"float32\[\]"):
        model(jnp.float32(1))


def test_axes_in_a_message_are_plain_numbers():
    """Also if they were computed by NumPy."""
    layer = nnx.LinearGeneral((2, 3), 4, axis=tuple(np.arange(1, 3)), rngs=nnx.Rngs(0))
    with pytest.raises(LayerInputError, match=r"sizes \{1: 2, 2: 3\} \(axis: size\)"):
        layer(jnp.ones((1, 3, 3)))


@pytest.mark.parametrize(
    "second", [jnp.ones((2, 3)), np.ones(2), True, nnx.Param(jnp.ones(2))], ids=lambda x: type(x).__name__
)
def test_a_second_input_is_refused(second):
    """It would be taken for out_sharding, and JAX would find that it cannot be hashed."""
    for layer in nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.LinearGeneral(3, (2, 2), rngs=nnx.Rngs(0)):
        with pytest.raises(
            ArgumentError, match=f"{type(layer).__name__} takes one input; what follows it is out_sharding"
        ):
            layer(jnp.ones((2, 3)), second)


def test_a_kernel_of_another_shape_is_told_from_a_wrong_input():
    """A transposed kernel: the input is as declared, the kernel is not."""
    model = nnx.Sequential(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    model.layers[0].kernel.value = model.layers[0].kernel.T
    with pytest.raises(LayerInputError, match=r"its kernel is float32\[2, 4\], not \[4, 2\] as declared"):
        model(jnp.ones((1, 4)))


def test_the_path_in_the_message_is_that_of_the_note():
    """Also where the layer has another name in the body of a transform."""
    model = nnx.Sequential(nnx.Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2, rngs=nnx.Rngs(0)))
    with pytest.raises(LayerInputError, match=r"layers\[0\]\.layers \(Linear 4->4\) takes") as caught:
        model(jnp.ones((1, 3)))
    assert "in layers[0].layers (Linear 4->4), input float32[1, 3]" in caught.value.__notes__


def test_a_replaced_kernel_counts_not_the_declared_sizes():
    """After surgery on the kernel, inputs that fit it are taken."""
    layer = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    layer.kernel.value = jnp.ones((3, 2))
    assert layer(jnp.ones((1, 3))).tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("name", ["Linear", "LinearGeneral", "LoRA", "Embed"])
def test_a_stack_is_no_layer(name):
    """Even if it has as many layers as an input has features; nor is it a table to look up in."""
    make = {
        "Linear": lambda key: nnx.Linear(4, 2, rngs=nnx.Rngs(key)),
        "LinearGeneral": lambda key: nnx.LinearGeneral(4, (2, 2), rngs=nnx.Rngs(key)),
        "LoRA": lambda key: nnx.LoRA(4, 2, 4, rngs=nnx.Rngs(key)),
        "Embed": lambda key: nnx.Embed(4, 3, rngs=nnx.Rngs(key)),
    }[name]
    stack = nnx.vmap(make)(jax.random.split(jax.random.key(0), 4))
    x = jnp.arange(2) if name == "Embed" else jnp.ones((2, 4))
    calls = [stack, stack.attend] if name == "Embed" else [stack]
    for call in calls:
        with pytest.raises(LayerInputError, match=r"its \w+ is float32\[4, 4, .* as declared: it is a stack of layers"):
            call(x)
    assert nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack, x).shape[:2] == (4, 2)


@pytest.mark.parametrize("batch_axis", [{}, {0: 2}])
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
def test_a_bias_that_does_not_fit_is_refused(batch_axis, wrap):
    """It would make outputs of one head that two heads had, by broadcasting, after the kernel was pruned."""
    layer = nnx.LinearGeneral(3, (2, 4), batch_axis=batch_axis, rngs=nnx.Rngs(0))
    layer.kernel.value = layer.kernel.value[..., :1, :]
    with pytest.raises(ValueError, match=r"bias float32\[.*2, 4\] does not fit the output float32\[2, .*1, 4\]"):
        wrap(lambda layer, x: layer(x))(layer, jnp.ones((2, 5, 3)))
    layer.bias.value = layer.bias.value[..., :1, :]
    assert layer(jnp.ones((2, 5, 3))).shape == (2, 5, 1, 4)


def test_an_equation_may_be_set_later():
    """With spaces, as in the constructor."""
    layer = nnx.Einsum("ab,bc->ac", (3, 4), (4,), rngs=nnx.Rngs(0))
    expected = layer(jnp.ones((2, 3)))
    layer.einsum_str = "a b, b c -> a c"
    np.testing.assert_array_equal(layer(jnp.ones((2, 3))), expected)


def test_lists_numpy_arrays_and_variables_are_inputs():
    """Whatever JAX takes for an array is one."""
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    expected = layer(jnp.array([1.0, 2.0]))
    for x in ([1.0, 2.0], np.array([1.0, 2.0]), nnx.Param(jnp.array([1.0, 2.0])), np.array([1, 2])):
        np.testing.assert_array_equal(layer(x), expected)


def test_custom_operations_are_used():
    """A `dot_general` and a `promote_dtype` of the user's replace ours."""
    double = lambda *args, **kwargs: 2 * jax.lax.dot_general(*args, **kwargs)
    halve = lambda args, dtype: tuple(None if a is None else a / 2 for a in args)
    layer = nnx.Linear(2, 3, use_bias=False, dot_general=double, promote_dtype=halve, rngs=nnx.Rngs(0))
    x = array(4, 2)
    np.testing.assert_allclose(layer(x), x @ layer.kernel.value / 2, rtol=1e-6)


def test_a_custom_dot_general_may_take_inputs_of_another_size():
    """Such as packed ones, which it unpacks."""
    unpacked = lambda x, kernel, *args, **kwargs: jax.lax.dot_general(jnp.repeat(x, 2, -1), kernel, *args, **kwargs)
    layer = nnx.Linear(4, 3, use_bias=False, dot_general=unpacked, rngs=nnx.Rngs(0))
    x = array(4, 2)
    np.testing.assert_allclose(layer(x), jnp.repeat(x, 2, -1) @ layer.kernel.value, rtol=1e-6)


@pytest.mark.parametrize("promotion", ["strict", "standard"])
def test_strict_promotion_and_rank_settings_are_respected(promotion):
    """Layers neither promote dtypes nor ranks behind the user's back."""
    layers = [
        nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
        nnx.LinearGeneral(3, (2, 2), rngs=nnx.Rngs(0)),
        nnx.Einsum("...a,ab->...b", (3, 2), (2,), rngs=nnx.Rngs(0)),
        nnx.LayerNorm(3, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
    ]
    with jax.numpy_dtype_promotion(promotion), jax.numpy_rank_promotion("raise"):
        for layer in layers:
            assert layer(jnp.ones((4, 3))).shape[0] == 4


def test_a_call_runs_few_python_functions():
    """Eagerly a Linear costs little more than `x @ w + b` (flax.nnx: about 760 calls); so does making one."""
    rngs, x = nnx.Rngs(0), jnp.ones((2, 4))
    make = functools.partial(nnx.Linear, 4, 3, rngs=rngs)
    draw = lambda: jax.nn.initializers.lecun_normal()(rngs(), (4, 3), jnp.float32)
    call = functools.partial(make(), x)
    call(), draw()  # compile
    assert count_calls(call) <= 40
    assert count_calls(make) <= 1.6 * count_calls(draw) + 250


def test_tracing_a_layer_gives_only_its_operations():
    """The jaxpr of a Linear is a product, a reshape and a sum."""
    layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    jaxpr = jax.make_jaxpr(layer)(jnp.ones((2, 4)))
    assert [str(equation.primitive) for equation in jaxpr.jaxpr.eqns] == ["dot_general", "reshape", "add"]


def test_layers_work_in_transformations():
    """jit, vmap over an ensemble of layers, grad and eval_shape give what the eager layer gives."""
    x = array(5, 3)
    layer = nnx.Linear(3, 2, bias_init=normal, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(nnx.jit(lambda layer, x: layer(x))(layer, x), layer(x), rtol=1e-6)
    grads = nnx.grad(lambda layer, x: layer(x).sum())(layer, x)
    np.testing.assert_allclose(grads["bias"].value, [5.0, 5.0])
    graphdef, state = nnx.split(layer)
    ensemble = jax.tree.map(lambda v: jnp.stack([v, 2 * v]), state)
    out = jax.vmap(lambda state: nnx.merge(graphdef, state)(x))(ensemble)
    np.testing.assert_allclose(out, jnp.stack([layer(x), 2 * layer(x)]), rtol=1e-5)
    assert nnx.eval_shape(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0))).kernel.shape == (3, 2)


# --- LinearGeneral ----------------------------------------------------------------------------------------------------


def test_sizes_of_batch_axes_are_no_node():
    """They are an immutable mapping, so the graph of the layer has the layer, its kernel and its bias."""
    layer = nnx.LinearGeneral(3, 4, batch_axis={0: 2}, rngs=nnx.Rngs(0))
    assert (layer.batch_axis, len(nnx.graphdef(layer).nodes)) == ({0: 2}, 3)
    again = pickle.loads(pickle.dumps(layer))
    assert nnx.graphdef(again) == nnx.graphdef(layer) != nnx.graphdef(nnx.LinearGeneral(3, 4, rngs=nnx.Rngs(0)))


def test_linear_general_against_einsum():
    """Contracted axes anywhere, batch axes with kernels of their own: as the einsum says, in float64."""
    layer = nnx.LinearGeneral((2, 3), (4, 5), axis=(1, -1), bias_init=normal, rngs=nnx.Rngs(0))
    x = array(6, 2, 7, 3)
    expected = np.einsum("natb,abcd->ntcd", np.float64(x), np.float64(layer.kernel.value)) + np.asarray(
        layer.bias.value
    )
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)

    layer = nnx.LinearGeneral(3, (4, 5), batch_axis={0: 2}, bias_init=normal, rngs=nnx.Rngs(0))
    x = array(2, 7, 3)
    expected = np.einsum("bta,bacd->btcd", np.float64(x), np.float64(layer.kernel.value))
    np.testing.assert_allclose(layer(x), expected + np.asarray(layer.bias.value)[:, None], rtol=1e-5, atol=1e-5)


def test_linear_general_initializers_see_the_fans():
    """They get (inputs, outputs) as two axes, so that the variance is that of the equivalent Linear."""
    seen = []

    def record(key, shape, dtype):
        seen.append(shape)
        return jnp.zeros(shape, dtype)

    layer = nnx.LinearGeneral(
        (2, 3), (4, 5), axis=(-2, -1), batch_axis={0: 7}, kernel_init=record, bias_init=record, rngs=nnx.Rngs(0)
    )
    assert seen == [(42, 20), (140,)]
    assert (layer.kernel.shape, layer.bias.shape) == ((7, 2, 3, 4, 5), (7, 4, 5))


def test_linear_general_is_made_in_the_shape_that_metadata_is_about():
    """Hooks and names of axes meet the kernel that the layer has, not the matrix that was drawn."""
    mesh, seen = jax.make_mesh((1, 1), ("data", "model")), []
    note = lambda variable, value: seen.append(value.shape) or value
    with jax.set_mesh(mesh):
        layer = nnx.LinearGeneral(
            6,
            (2, 4),
            kernel_init=nnx.with_partitioning(normal, ("data", None, "model"), on_create_value=note),
            bias_metadata={"out_sharding": ("data", "model")},
            rngs=nnx.Rngs(0),
        )
    assert seen == [(6, 2, 4)]
    assert layer.kernel.value.sharding.spec == jax.sharding.PartitionSpec("data", None, "model")
    assert layer.bias.value.sharding.spec == jax.sharding.PartitionSpec("data", "model")


def test_linear_general_says_which_sizes_it_takes():
    """Wrong or missing axes, lengths that differ and batch axes that do not lead are refused."""
    layer = nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), rngs=nnx.Rngs(0))
    for x in (jnp.ones((5, 2, 2)), jnp.ones(3)):
        with pytest.raises(LayerInputError, match=r"\(2, 3\)->\(4,\).* \{-2: 2, -1: 3\}.*float32"):
            layer(x)
    with pytest.raises(ValueError, match="same length"):
        nnx.LinearGeneral((2, 3), 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="consecutive leading axes"):
        nnx.LinearGeneral(2, 4, batch_axis={1: 5}, rngs=nnx.Rngs(0))


def test_making_a_linear_general_is_a_few_compiled_steps():
    """Its parameters are drawn flat and put into their shape, which took a hundred calls for each."""
    rngs = nnx.Rngs(0)
    make = lambda: nnx.LinearGeneral(8, (2, 4), rngs=rngs)
    make()
    assert count_calls(make) < 350


# --- Einsum -----------------------------------------------------------------------------------------------------------


def test_einsum_with_bias_against_numpy():
    """The bias meets the output axes that the kernel has, in the order of the output."""
    layer = nnx.Einsum("na, abc -> ncb", (3, 4, 5), (5, 4), bias_init=normal, rngs=nnx.Rngs(0))
    x = array(2, 3)
    expected = np.einsum("na,abc->ncb", np.float64(x), np.float64(layer.kernel.value)) + np.asarray(layer.bias.value)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_einsum_sums_over_axes_that_the_output_leaves_out():
    """Those that the kernel has in place of its dots have no part in the bias."""
    layer = nnx.Einsum("na,ab...->nb", (3, 4, 5), 4, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    x = array(2, 3)
    np.testing.assert_allclose(layer(x), x @ layer.kernel.value.sum(-1) + 1, rtol=1e-5, atol=1e-5)


def test_einsum_takes_a_single_size():
    """As Linear does: a number for a shape of one axis."""
    layer = nnx.Einsum("na,ab->nb", (3, 4), 4, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    assert layer.bias.value.tolist() == [1.0] * 4
    assert nnx.Einsum("na,a->n", 3, rngs=nnx.Rngs(0), kernel_init=normal).kernel.shape == (3,)


def test_einsum_takes_its_equation_from_the_call():
    """Without one in the constructor each call gives it; without either the error says so."""
    layer = nnx.Einsum(None, (3, 4), rngs=nnx.Rngs(0))
    x = array(2, 3)
    np.testing.assert_allclose(layer(x, "na,ab->nb"), x @ layer.kernel.value, rtol=1e-5)
    with pytest.raises(ValueError, match="no equation"):
        layer(x)


def test_einsum_refuses_what_does_not_fit():
    """Equations without an arrow or with one operand, biases and inputs of other sizes."""
    for equation in ("ab->a", "a,b,c->abc"):
        with pytest.raises(ValueError, match="exactly two operands"):
            nnx.Einsum(equation, (3, 4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match='include "->"'):
        nnx.Einsum("na,ab", (3, 4), rngs=nnx.Rngs(0))
    with pytest.raises(LayerInputError, match=r"'na,ab->nb'.*float32\[2, 4\]"):
        nnx.Einsum("na,ab->nb", (3, 4), rngs=nnx.Rngs(0))(jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"write bias_shape=\(4,\)"):
        nnx.Einsum("na,ab->nb", (3, 4), (3,), rngs=nnx.Rngs(0))(jnp.ones((2, 3)))


# --- Embed ------------------------------------------------------------------------------------------------------------


def test_embed_looks_rows_up():
    """Any shape of indices; negative ones count from the end; those out of range give NaN."""
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    table = np.asarray(layer.embedding.value)
    indices = np.array([[0, 4], [2, -1]])
    np.testing.assert_array_equal(layer(jnp.asarray(indices)), table[indices])
    np.testing.assert_array_equal(layer([1, 2]), table[[1, 2]])
    assert np.isnan(layer(jnp.array([5]))).all()


def test_a_table_of_one_row_is_broadcast():
    """Whatever the index: there is nothing to look up."""
    layer = nnx.Embed(1, 3, rngs=nnx.Rngs(0))
    for shape in ((), (2,), (2, 4)):
        out = layer(jnp.full(shape, 7))
        np.testing.assert_array_equal(out, np.broadcast_to(layer.embedding.value[0], (*shape, 3)))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_a_table_are_summed_in_its_own_dtype(rows, dtype):
    """Over all places where a vector stands; in bfloat16, 256 + 1 is 256."""
    layer = nnx.Embed(rows, 3, dtype=dtype, rngs=nnx.Rngs(0))
    indices = jnp.zeros(5000, int)
    assert jnp.array_equal(layer(indices[:2]), jnp.tile(layer.embedding.value[0].astype(dtype), (2, 1)))
    gradient = nnx.grad(lambda layer: layer(indices).astype(jnp.float32).sum())
    for run in (gradient, nnx.jit(gradient)):
        assert run(layer)["embedding"].value[0].tolist() == [5000.0] * 3


@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.int8])
def test_a_table_is_cast_to_a_wider_dtype_before_it_is_looked_up(param_dtype):
    """So gradients are summed in that, and an integer out of range gives NaN."""
    ones = lambda key, shape, dtype: jnp.ones(shape, dtype)
    layer = nnx.Embed(5, 3, dtype=jnp.float32, param_dtype=param_dtype, embedding_init=ones, rngs=nnx.Rngs(0))
    assert layer(jnp.array([1, 5])).tolist()[0] == [1.0] * 3
    assert jnp.isnan(layer(jnp.array([5]))).all()
    if param_dtype == jnp.bfloat16:
        grads = nnx.grad(lambda layer: layer(jnp.zeros(5120, int)).sum())(layer)
        assert grads["embedding"].value[0].tolist() == [5120.0] * 3


@pytest.mark.parametrize("rows", [1, 5])
def test_embed_has_the_sharding_that_is_asked_for(rows):
    """Of its output, on a mesh with explicit axes; also where there is nothing to look up."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        layer = nnx.Embed(rows, 3, rngs=nnx.Rngs(0))
        out = layer(jnp.array([0, 0]), out_sharding=jax.P("data", None))
        beyond = layer(jnp.array([rows, -1]), out_sharding=jax.P("data", None))
    assert jax.typeof(out).sharding.spec == jax.P("data", None)
    np.testing.assert_array_equal(out, np.asarray(layer.embedding.value)[[0, 0]])
    assert np.isnan(beyond).any(1).tolist() == [rows > 1, False]  # out of range is NaN, as it is without a sharding


def test_attend_is_the_tied_output_layer():
    """Scores are inner products with each row, and the gradient of both uses reaches the one table."""
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    query = array(2, 3)
    np.testing.assert_allclose(layer.attend(query), query @ layer.embedding.value.T, rtol=1e-5)
    grads = nnx.grad(lambda layer: layer.attend(layer(jnp.array([1]))).sum())(layer)
    row = layer.embedding.value
    expected = jnp.tile(row[1], (5, 1)).at[1].add(row.sum(0))
    np.testing.assert_allclose(grads["embedding"].value, expected, rtol=1e-5)


def test_embed_looks_up_in_the_table_that_it_has():
    """A table of one vector that was replaced by one of two gave the first for all indices."""
    layer = nnx.Embed(1, 2, rngs=nnx.Rngs(0))
    layer.embedding = nnx.Param(jnp.arange(4.0).reshape(2, 2))
    assert layer(jnp.array([0, 1])).tolist() == [[0, 1], [2, 3]]


def test_embed_refuses_what_it_cannot_look_up():
    """Floating indices, and queries of another size."""
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    with pytest.raises(LayerInputError, match=r"Embed 5x3.*integer.*float32\[2\]"):
        layer(jnp.ones(2))
    with pytest.raises(LayerInputError, match=r"\[\.\.\., 3\].*float32\[2\]"):
        layer.attend(jnp.ones(2))


def test_a_weight_is_whatever_is_read_by_indexing():
    """In place of a Variable a layer takes an array, or an object that gives one for `[...]` as a quantised weight."""

    class Halved(nnx.Pytree):
        def __init__(self, array):
            self.array = array

        def __getitem__(self, index):
            return self.array[index] / 2

    layer, x = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    expected, kernel = layer(x), layer.kernel[...]
    layer.kernel = kernel
    np.testing.assert_array_equal(layer(x), expected)
    layer.kernel = Halved(kernel)
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(layer, x), expected / 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_product_and_sum_are_rounded_one_by_one(dtype):
    """An eager call is one program, and has the bits of the two operations by themselves."""
    for seed in range(20):
        rows, width, features = np.random.RandomState(seed).randint(1, 40, 3)
        init = nnx.initializers.normal(1.0)
        layer = nnx.Linear(width, features, bias_init=init, param_dtype=dtype, rngs=nnx.Rngs(seed))
        x = jax.random.normal(jax.random.key(seed), (rows, width), dtype)
        expected = jnp.add(lax.dot(x, layer.kernel.value), layer.bias.value)
        assert layer(x).tobytes() == expected.tobytes()


def test_a_stack_that_is_called_like_a_layer_is_told_what_can_call_it():
    stack = nnx.vmap(lambda rngs: nnx.Linear(2, 3, rngs=rngs))(nnx.Rngs(0).split(4))
    with pytest.raises(nnx.errors.NnxError, match=r"it is a stack of layers, which nnx\.vmap and nnx\.scan can call"):
        stack(jnp.ones((1, 2)))
