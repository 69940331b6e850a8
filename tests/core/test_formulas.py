import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import nnxlib as nnx
from nnxlib.core import formulas
from nnxlib.core.formulas import formula, step


@step("axis")
def total(x, axis):
    return jnp.sum(x, axis)


@step()
def square(x):
    return x * x


@formula("axis")
def sum_of_squares(x, axis):
    return total(square(x), axis)


def primitives(f, *args):
    return [str(equation.primitive) for equation in jax.make_jaxpr(f)(*args).jaxpr.eqns]


def test_steps_and_formulas_are_inlined():
    """The jaxpr of whatever calls them holds their operations and no calls, on every version of JAX."""
    x = jnp.ones((2, 3))
    assert primitives(lambda x: square(x), x) == ["mul"]
    assert primitives(lambda x: sum_of_squares(x, axis=1) + 1.0, x) == ["mul", "reduce_sum", "add"]
    assert primitives(jax.jit(lambda x: sum_of_squares(x, axis=0)), x)[0] in ("jit", "pjit")


def test_what_is_jitted_is_traced_along_with_a_step_or_formula():
    """Not by itself: JAX makes hundreds of calls for the first trace of a jitted function."""
    running = []

    @step()
    def clipped(x):
        running.append(jax.config.jax_disable_jit)
        return jnp.clip(x, 0, 1)

    @formula()
    def twice(x):
        return clipped(clipped(x))

    x = jnp.array([-1.0, 0.5, 2.0])
    found = primitives(twice, x)
    assert running == [True, True]
    assert not {"jit", "pjit"} & {*found}
    np.testing.assert_array_equal(twice(x), [0, 0.5, 1])


@pytest.mark.parametrize("name", ["initializer", "Dropout", "attention"])
def test_random_numbers_are_one_operation(name):
    """Those of JAX are twenty, which each layer of a model would have to inline."""
    key, x = jax.random.key(0), jnp.ones((2, 3, 2, 4))
    functions = {
        "initializer": lambda: nnx.initializers.lecun_normal()(key, (3, 4)),
        "Dropout": lambda: nnx.Dropout(0.5)(x, rngs=nnx.Rngs(dropout=key)),
        "attention": lambda: nnx.dot_product_attention(x, x, x, dropout_rate=0.5, dropout_rng=key),
    }
    found = primitives(functions[name])
    assert {"jit", "pjit"} & {*found}
    assert "random_bits" not in found


def test_a_formula_is_traced_once_per_shape():
    """The second trace with the same shapes does not run the Python function again."""
    runs = []

    @formula("axis")
    def counted(x, axis):
        runs.append(axis)
        return total(x, axis)

    for _ in range(3):
        jax.make_jaxpr(lambda x: counted(x, axis=0))(jnp.ones(3))
    assert runs == [0]
    jax.make_jaxpr(lambda x: counted(x, axis=0))(jnp.ones(4))
    assert runs == [0, 0]


def test_an_eager_formula_rounds_like_its_operations_one_by_one():
    """A product and a sum in different steps are not contracted: the result is that of jax.numpy, to the last bit."""

    @step()
    def times(x, y):
        return x * y

    @step()
    def plus(x, y):
        return x + y

    @formula()
    def affine(x, y, z):
        return plus(times(x, y), z)

    x, y, z = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1000)), jnp.float32)
    np.testing.assert_array_equal(affine(x, y, z), jnp.add(jnp.multiply(x, y), z))


def test_name_scopes_of_the_caller_are_kept():
    """Operations carry the scope they were called under, also when the trace was cached under another one."""

    def f(x):
        with jax.named_scope("first"):
            y = sum_of_squares(x, axis=1)
        with jax.named_scope("second"):
            return sum_of_squares(y[None], axis=1)

    text = jax.jit(f).lower(jnp.ones((3, 3))).as_text(debug_info=True)
    assert "first/mul" in text
    assert "second/mul" in text


def test_transformations_go_through():
    """Gradients, vmap and abstract evaluation of a formula are those of its operations."""
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(jax.grad(lambda x: sum_of_squares(x, axis=(0, 1)))(x), 2 * x)
    np.testing.assert_allclose(jax.vmap(lambda x: sum_of_squares(x, axis=0))(x), (x * x).sum(1))
    assert jax.eval_shape(lambda x: sum_of_squares(x, axis=1), x).shape == (2,)
    with jax.disable_jit():
        np.testing.assert_allclose(sum_of_squares(x, axis=1), (x * x).sum(1))


LAYERS = {
    "Linear": lambda rngs: nnx.Linear(2, 2, rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(2, 2, 3, rngs=rngs),
    "attention": lambda rngs: lambda x: nnx.dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_operation_of_jax_whose_code_is_replaced_runs_as_replaced(name):
    """Quantisers replace the code of JAX's products while a model runs; a program compiled before does not hide it."""

    def replacement(*args, **kwargs):
        raise RuntimeError("replaced")

    layer, x = LAYERS[name](nnx.Rngs(0)), jnp.ones((1, 4, 2, 2))
    operation = lax.conv_general_dilated if name == "Conv" else lax.dot_general
    before, code = layer(x), operation.__code__
    try:
        operation.__code__ = replacement.__code__
        for run in (layer, jax.jit(lambda x: layer(x))):
            with pytest.raises(RuntimeError, match="replaced"):
                run(x)
    finally:
        operation.__code__ = code
    np.testing.assert_array_equal(layer(x), before)


def test_the_bias_of_a_replaced_product_is_added_to_what_it_has_returned():
    """A quantiser that follows arrays finds the very one that its product has returned, where the bias is added."""

    class Marked:
        """An array that a quantiser follows."""

        def __init__(self, array):
            self.array, self.ndim = array, array.ndim

        def __add__(self, bias):
            return "added", self.array + bias

    layer, x, original = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)), lax.dot_general
    expected, code = layer(x), original.__code__
    product = types.FunctionType(code, original.__globals__, "product", original.__defaults__)
    product.__kwdefaults__ = original.__kwdefaults__
    original.__globals__["followed_product"] = lambda *args, **kwargs: Marked(product(*args, **kwargs))
    try:
        original.__code__ = (lambda *args, **kwargs: followed_product(*args, **kwargs)).__code__  # noqa: F821
        with jax.disable_jit():
            mark, y = layer(x)
    finally:
        original.__code__ = code
        del original.__globals__["followed_product"]
    assert mark == "added"
    np.testing.assert_array_equal(y, expected)


UNKNOWN = Primitive("unknown")  # an exporter's own, which nothing else can run
UNKNOWN.def_abstract_eval(lambda x: x)

EXPORTED = {
    "Conv": (lambda: nnx.Conv(2, 3, 3, rngs=nnx.Rngs(0)), {"reshape": jnp}),
    "LinearGeneral": (lambda: nnx.LinearGeneral(2, (3, 2), rngs=nnx.Rngs(0)), {"reshape": jnp}),
    "LayerNorm": (lambda: nnx.LayerNorm(2, rngs=nnx.Rngs(0)), {"reshape": jnp, "mean": jnp, "maximum": jnp}),
    "relu": (lambda: nnx.relu, {"relu": jax.nn}),
    "attention": (lambda: lambda x: nnx.dot_product_attention(x, x, x), {"softmax": jax.nn, "reshape": jnp}),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_what_an_exporter_puts_in_the_place_of_functions_of_jax_is_not_kept(name):
    """A model that was exported first can be called and compiled afterwards: no step has kept what nothing can run."""
    make, replaced = EXPORTED[name]
    layer = make()
    x = jnp.linspace(-1.0, 1.0, 7 * 19 * 2).reshape(7, 19, 2)  # a shape of its own, that no test has traced before
    with pytest.MonkeyPatch.context() as patch:
        for function, module in replaced.items():
            original = getattr(module, function)
            patch.setattr(module, function, lambda *a, original=original, **k: UNKNOWN.bind(original(*a, **k)))
        jax.make_jaxpr(lambda x: layer(x))(x)
    np.testing.assert_allclose(layer(x), jax.jit(lambda x: layer(x))(x), rtol=1e-5, atol=1e-6)


def test_an_exporter_finds_the_softmax_of_attention(monkeypatch):
    """The exported model has one softmax, in which a runtime recognises attention, even if the layer ran before."""
    layer, x = nnx.MultiHeadAttention(2, 6, rngs=nnx.Rngs(0)), jnp.ones((5, 23, 6))
    assert " exp" in str(jax.make_jaxpr(lambda x: layer(x, is_causal=True))(x))
    own = jax.nn.softmax
    monkeypatch.setattr(jax.nn, "softmax", lambda x, axis: UNKNOWN.bind(x))
    exported = str(jax.make_jaxpr(lambda x: layer(x, is_causal=True))(x))
    assert exported.count(" unknown ") == 1
    assert " exp" not in exported
    monkeypatch.setattr(jax.nn, "softmax", own)
    assert " unknown " not in str(jax.make_jaxpr(lambda x: layer(x, is_causal=True))(x))


def test_layers_that_are_first_imported_by_an_exporter_have_functions_of_jax():
    """Layers are imported when they are asked for, which may be while functions of jax.numpy are replaced."""
    code = """
import jax.numpy as jnp, nnxlib as nnx
own = jnp.add, jnp.multiply
jnp.add = jnp.multiply = lambda *args: 1 / 0
nnx.GRUCell
jnp.add, jnp.multiply = own
cell = nnx.GRUCell(2, 3, rngs=nnx.Rngs(0))
cell(cell.initialize_carry((1, 2), nnx.Rngs(0)), jnp.ones((1, 2)))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_functions_of_jax_stay_replaced_while_and_after_a_step_is_traced(monkeypatch):
    """A step puts them back for itself alone: code around it goes on with those that the exporter has put there."""
    calls = []
    monkeypatch.setattr(jnp, "sum", lambda x, axis: calls.append(axis) or x)
    own = jnp.sum
    jaxpr = jax.make_jaxpr(lambda x: jnp.sum(total(x, axis=1), axis=5))(jnp.ones((5, 23)))
    assert calls == [5]
    assert jnp.sum is own
    assert [str(e.primitive) for e in jaxpr.jaxpr.eqns] == ["reduce_sum"]


def test_zeros_and_ones_of_a_shape_are_one_program():
    """A program that is compiled takes a hundredth of a second; a new model has biases and scales of many shapes."""
    programs = formulas._filled._cache_size
    before = programs()
    zeros, ones = (formulas.full(value, (3, 17), jnp.bfloat16) for value in (0, 1))
    assert programs() == before + 1
    assert (zeros.dtype, ones.shape, (zeros + 1 == ones).all()) == (jnp.bfloat16, (3, 17), True)


@pytest.mark.parametrize("transform", [jax.eval_shape, jax.vmap, jax.grad])
def test_a_constant_is_the_same_in_a_transformation(transform):
    made = []

    def make(x):
        made.append(formulas.full(1, (2,), jnp.int32))
        return x.sum()

    transform(make, jnp.ones(3)) if transform is jax.eval_shape else transform(make)(jnp.ones(3))
    assert (made[0].shape, made[0].dtype, made[0].aval.weak_type) == ((2,), jnp.int32, False)


def test_a_constant_is_one_operation_in_a_trace():
    """To call a program takes twice as long there, since JAX looks for it anew in each trace."""
    jaxpr = jax.make_jaxpr(lambda: formulas.full(1, (2,), jnp.int32))()
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["broadcast_in_dim"]
