"""JAX's own messages name the user's function, and the paths of what a value depends on."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.transforms.naming import named


def model():
    return nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)


def branch_on(f, *args, **kwargs):
    """The message of the error of a function that branches on a traced value."""
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        f(*args, **kwargs)
    return str(caught.value)


def on_input(model, x):
    return model(x) if x.sum() > 0 else x


def on_bias(model, x):
    return model(x) if model.layers[0].bias[0] > 0 else x


def here(f):
    return f"{f.__name__} at {__file__}:{f.__code__.co_firstlineno}"


@pytest.mark.parametrize("wrap", [nnx.jit, lambda f: nnx.jit(f, donate_argnums=0), lambda f: nnx.jit(nnx.remat(f))])
def test_a_jitted_function_is_named_by_its_own_source(wrap):
    assert here(on_input) in branch_on(wrap(on_input), model(), jnp.ones((1, 2)))


@pytest.mark.parametrize(("f", "path"), [(on_input, "args[1]"), (on_bias, "args[0].layers[0].bias")])
def test_what_a_jitted_value_depends_on_is_named_by_its_path(f, path):
    assert f"the argument {path}." in branch_on(nnx.jit(f), model(), jnp.ones((1, 2)))


def test_a_keyword_a_bound_argument_and_a_captured_model_have_paths():
    whole, x = model(), jnp.ones((1, 2))
    assert "the argument kwargs.x." in branch_on(nnx.jit(on_input), whole, x=x)
    assert "the argument args[1]." in branch_on(nnx.jit(functools.partial(on_input, whole)), x)
    assert "captured[0].layers[0].bias" in branch_on(nnx.jit(lambda x: on_bias(whole, x)), x)


def test_a_trace_with_few_inputs_names_the_right_ones():
    """A compiled function takes only what was read, so a position among its arguments is not one among the leaves."""

    @nnx.jit
    def f(model, x):
        if x.shape[0] > 1:
            return x if model.layers[0].kernel[0, 0] > 0 else -x
        return x + model.layers[0].kernel.sum()

    whole = model()
    f(whole, jnp.ones(1))
    assert "the argument args[0].layers[0].kernel." in branch_on(f, whole, jnp.ones(2))


def test_a_variable_that_holds_a_pytree_is_named_item_by_item():
    state = nnx.Dict(pair=nnx.Variable({"a": jnp.ones(()), "b": jnp.ones(())}))
    assert "the argument args[0].pair['b']." in branch_on(nnx.jit(lambda d: 1 if d.pair.value["b"] else 2), state)


@pytest.mark.parametrize(
    ("run", "path"),
    [
        (lambda body: nnx.scan(body)(jnp.ones(2), nnx.Dict(w=nnx.Param(jnp.ones((3, 2))))), "args[0]"),
        (lambda body: nnx.fori_loop(0, 3, lambda i, x: body(x, None)[0], jnp.ones(2)), "args[0]"),
        (lambda body: nnx.cond(True, lambda x: body(x, None)[0], lambda x: x, jnp.ones(2)), "args[0]"),
    ],
)
def test_bodies_of_control_flow(run, path):
    def body(x, layer):
        return (x if x.sum() > 0 else -x), None

    message = branch_on(run, body)
    assert f"at {__file__}:" in message
    assert f"the argument {path}." in message


@pytest.mark.parametrize(
    "wrap", [nnx.remat, nnx.checkify, nnx.make_jaxpr, lambda f: functools.partial(nnx.eval_shape, f)]
)
@pytest.mark.parametrize(("f", "path"), [(on_input, "args[1]"), (on_bias, "args[0].layers[0].bias")])
def test_transforms_that_take_the_leaves_as_a_list(wrap, f, path):
    message = branch_on(wrap(f), model(), jnp.ones((1, 2)))
    assert here(f) in message
    assert f"the argument {path}." in message


def test_a_setting_that_remat_was_not_told_is_static_is_named():
    message = branch_on(
        nnx.remat(lambda model, x, train: model(x) if train else x), model(), jnp.ones((1, 2)), train=True
    )
    assert "the argument kwargs.train." in message


def test_a_leak_says_where_it_came_from():
    leaked = []

    def leaks(model, x):
        leaked.append(x + 1)

    nnx.jit(leaks)(model(), jnp.ones(2))
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        leaked[0] + 1
    assert here(leaks) in str(caught.value)


def test_a_named_function_binds_what_it_takes():
    def pure(*leaves):
        return leaves

    assert named(pure, on_input, [("args", 0, "kernel"), ("args", 1)]) is pure
    assert list(inspect.signature(pure).parameters) == ["args[0].kernel", "args[1]"]
    assert inspect.signature(pure).bind(1, 2).args == (1, 2)
    assert inspect.unwrap(pure) is on_input
    assert pure.__name__ == pure.__qualname__ == "on_input"  # JAX says one or the other


def test_a_function_of_lanes_binds_leaves_to_their_paths():
    def pure(*groups):
        return groups

    named(pure, on_input, [("args", 0, "kernel"), ("args", 1), ("args", 0, "bias")], (0, 1, 0))
    bound = inspect.signature(pure).bind([1, 2], [3])
    assert bound.arguments == {"args[0].kernel": 1, "args[0].bias": 2, "args[1]": 3}
    assert list(inspect.signature(pure).parameters) == ["groups"]
