"""Lost updates: a warning where raw JAX gives a training step copies, and nothing ever reads what it has changed."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlib as nnx

X = jnp.ones((3, 2))


def made(**metadata):
    model = nnx.Dict(w=nnx.Param(jnp.ones((2, 1)), **metadata))
    return model, nnx.Optimizer(model, optax.adam(0.1))


def update(model, optimizer, x=X):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((x @ model.w) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def lost(step, *args):
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*args)
    return [x for x in caught if "neither read nor returned" in str(x.message)]


def merged(graphdef, state):
    return update(*nnx.merge(graphdef, state))


def twice(model, optimizer):
    return update(model, optimizer) + update(model, optimizer)


LOST = {
    "jit": (lambda: jax.jit(update), made),
    "jit, twice": (lambda: jax.jit(twice), made),
    "vmap": (lambda: jax.vmap(update), lambda: nnx.vmap(lambda _: made())(jnp.arange(2))),
    "of a merged model": (lambda: jax.jit(merged, static_argnums=0), lambda: nnx.split(made())),
}


@pytest.mark.parametrize("name", LOST)
def test_an_update_that_nothing_reads_is_a_warning(name):
    """It names the function and the transformation; it points to the line of the update, once for each trace."""
    make, args = LOST[name]
    transform = "vmap" if name == "vmap" else "jit"
    (found,) = lost(make(), *args())
    assert f"in update, which runs under jax.{transform}." in str(found.message)
    assert f"Use nnx.{transform}," in str(found.message)
    assert found.filename == __file__


def fails(model, optimizer):
    update(model, optimizer)
    raise KeyError


def failing(model, optimizer):
    with pytest.raises(KeyError):
        jax.jit(fails)(model, optimizer)


def scanned(model, optimizer):
    def body(state, _):
        both = nnx.merge(graphdef, state)
        update(*both)
        return nnx.state(both), None

    graphdef, state = nnx.split((model, optimizer))
    return jax.lax.scan(body, state, length=2)


KEPT = {
    "nnx.jit": nnx.jit(update),
    "nnx.jit of a closure": lambda model, optimizer: nnx.jit(lambda: update(model, optimizer))(),
    "eager": update,
    "the model is returned": jax.jit(lambda model, optimizer: (update(model, optimizer), model)),
    "the optimizer is returned": jax.jit(lambda model, optimizer: (update(model, optimizer), optimizer)),
    "its state is returned": jax.jit(lambda model, optimizer: (update(model, optimizer), nnx.state(model))),
    "the model is called again": jax.jit(lambda model, optimizer: (update(model, optimizer), X @ model.w)),
    "raw JAX in nnx.jit": nnx.jit(lambda *both: jax.jit(lambda *both: (update(*both), both))(*both)),
    "a scan": scanned,
    "shapes alone": lambda model, optimizer: jax.eval_shape(update, model, optimizer),
    "a step that fails": failing,
}


@pytest.mark.parametrize("name", KEPT)
def test_an_update_that_is_read_is_none(name):
    assert not lost(KEPT[name], *made())


def test_a_model_in_refs_is_trained():
    """JAX carries out what is written to a Ref."""
    model, optimizer = made(ref=True)
    grads = {"w": jnp.ones((2, 1))}
    assert not lost(jax.jit(lambda *args: args[1].update(args[0], grads) and None), model, optimizer)
    assert (model.w.value < 1).all()


def test_a_watched_cell_is_an_ordinary_one_once_it_is_read():
    """The result is that of the same step under nnx.jit."""

    def step(model, optimizer):
        update(model, optimizer)
        model.w.value = model.w.value * 2
        return model, optimizer

    model, optimizer = jax.jit(step)(*made())
    other, its_optimizer = made()
    nnx.jit(lambda *both: step(*both) and None)(other, its_optimizer)
    assert (model.w.value == other.w.value).all()
    assert optimizer.step.value == its_optimizer.step.value == 1
