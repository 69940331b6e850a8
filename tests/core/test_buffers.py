"""Errors about donated arrays name their paths."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx


def notes(error):
    return "\n".join(error.value.__notes__)


def scale(model, target):
    model.kernel *= 2.0
    target.kernel *= 0.5


def test_one_array_donated_twice():
    """A target network that shares its arrays with the model is named, and both keep their values."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    target = nnx.merge(*nnx.split(model))
    step = nnx.jit(scale, donate_argnums=(0, 1))
    with pytest.raises(RuntimeError, match="twice") as error:
        step(model, target)
    assert "args[0].kernel and args[1].kernel" in notes(error)
    assert "nnx.clone" in notes(error)
    before = np.asarray(model.kernel[...])
    step(model, nnx.clone(target))
    np.testing.assert_allclose(model.kernel[...], 2 * before)


@pytest.mark.parametrize("donated", [0, 1])
def test_one_array_that_is_donated_and_only_read_elsewhere(donated):
    """A target network that shares its arrays with the model, of which one is trained."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    models = [model, nnx.merge(*nnx.split(model))]

    @nnx.jit(donate_argnums=donated)
    def step(*models):
        models[donated].kernel.value -= 0.1 * (models[donated].kernel - models[1 - donated].kernel + 1.0)

    with pytest.raises(RuntimeError, match="donate") as error:
        step(*models)
    assert "args[0].kernel and args[1].kernel" in notes(error)
    assert "nnx.clone" in notes(error)
    before = np.asarray(model.kernel[...])
    models[1] = nnx.clone(model)
    step(*models)
    np.testing.assert_allclose(models[donated].kernel[...], before - 0.1, rtol=1e-6)


def test_an_array_that_an_earlier_call_has_reused():
    """A State that was taken before its model was donated."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = nnx.state(model)

    def double(model):
        model.kernel *= 2.0

    nnx.jit(double, donate_argnums=0)(model)
    with pytest.raises(RuntimeError, match="deleted") as error:
        nnx.jit(lambda state: state["kernel"] + 1)(state)
    assert "args[0].kernel" in notes(error)
    assert "bias" not in notes(error)


LOOPS = {
    "scan": lambda layer, x: nnx.scan(lambda layer, x: (layer, layer(x)))(layer, x[None]),
    "cond": lambda layer, x: nnx.cond(True, lambda layer, x: layer(x), lambda layer, x: x, layer, x),
    "fori_loop": lambda layer, x: nnx.fori_loop(0, 2, lambda i, pair: (pair[0], pair[0](pair[1])), (layer, x)),
    "while_loop": lambda layer, x: nnx.while_loop(
        lambda state: state[2] < 2, lambda state: (state[0], state[0](state[1]), state[2] + 1), (layer, x, 0)
    ),
    "remat": lambda layer, x: nnx.remat(lambda layer, x: layer(x))(layer, x),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_eager_control_flow_names_them_too(loop):
    """Its program takes a list of leaves, which is all that JAX can speak of."""
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    loop(layer, jnp.ones((1, 2)))
    layer.bias[...].delete()
    with pytest.raises(RuntimeError, match="deleted") as error:
        loop(layer, jnp.ones((1, 2)))
    assert re.search(r"args\[0\]\S*\.bias", notes(error))
    assert "kernel" not in notes(error)


def test_a_captured_model_whose_arrays_are_gone():
    """Objects that a function refers to are among the arguments, too."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    jitted = nnx.jit(lambda x: model(x))
    jitted(jnp.ones((1, 2)))
    model.kernel[...].delete()
    with pytest.raises(RuntimeError, match="deleted") as error:
        jitted(jnp.ones((1, 2)))
    assert "captured[0].kernel" in notes(error)


def test_a_copy_of_a_model_whose_arrays_are_gone():
    model = nnx.Dict(layer=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    model.layer.kernel[...].delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted") as error:  # JAX 0.8: a ValueError
        nnx.clone(model)
    assert "layer.kernel" in notes(error)
    assert "bias" not in notes(error)


def test_other_errors_are_left_alone():
    """An error of the user's own that speaks of deleting, and keys among the arguments."""

    def fail(key):
        raise RuntimeError("the file was deleted")

    with pytest.raises(RuntimeError) as error:
        nnx.jit(fail)(jax.random.key(0))
    assert "donate" not in notes(error)
