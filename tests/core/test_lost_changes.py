"""Lost changes: a warning where a function changes a copy of a model, and nothing ever reads what it has changed."""

import warnings
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlib as nnx
from nnxlib.compat import flax as compat

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
    return [x for x in caught if "nothing has read" in str(x.message) or "neither read nor returned" in str(x.message)]


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


def copied(model, optimizer):
    return update(*nnx.merge(*nnx.split((model, optimizer))))


LOST_IN_NNX = {
    "a copy": nnx.jit(copied),
    "a copy in a scan": lambda *both: nnx.jit(
        lambda *both: nnx.scan(lambda carry, _: (carry, copied(*both)), length=2)(jnp.zeros(()), None)
    )(*both),
    "a State that is passed": lambda *both: nnx.jit(merged, static_argnums=0)(*nnx.split(both)),
    "a copy, and the optimizer itself": nnx.jit(
        lambda model, optimizer: update(nnx.merge(*nnx.split(model)), optimizer)
    ),
    "a clone": nnx.jit(lambda *both: update(*nnx.clone(both))),
}


@pytest.mark.parametrize("name", LOST_IN_NNX)
def test_an_update_of_a_copy_is_a_warning_under_nnx_too(name):
    """There the model itself would have been changed."""
    model, optimizer = made()
    (found,) = lost(LOST_IN_NNX[name], model, optimizer)
    assert "in update that is a copy, such as nnx.merge makes" in str(found.message)
    assert found.filename == __file__
    assert (model.w.value == 1).all()


def fails(model, optimizer):
    update(model, optimizer)
    raise KeyError


def failing(model, optimizer):
    with pytest.raises(KeyError):
        jax.jit(fails)(model, optimizer)


def returns_state(model, optimizer):
    copy = nnx.merge(*nnx.split((model, optimizer)))
    return update(*copy), nnx.state(copy)


def updates_the_model(model, optimizer):
    copy = nnx.merge(*nnx.split((model, optimizer)))
    loss = update(*copy)
    nnx.update((model, optimizer), nnx.state(copy))
    return loss


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
    "a copy whose State is returned": nnx.jit(returns_state),
    "a copy that the model is updated with": nnx.jit(updates_the_model),
    "an optimizer that is made for one step": nnx.jit(
        lambda model, optimizer: update(model, nnx.Optimizer(model, optax.adam(0.1)))
    ),
    "a model in the body of a scan": nnx.jit(
        lambda *both: nnx.scan(lambda both, _: (both, update(*both)), length=2)(both, None)[1]
    ),
    "a model in the body of a while_loop": nnx.jit(
        lambda *both: nnx.fori_loop(0, 2, lambda i, both: (update(*both), both)[1], both) and None
    ),
    "a remat in a jit": nnx.jit(lambda *both: nnx.remat(update)(*both)),
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


def test_a_watched_cell_may_be_written_unread():
    def step(model, optimizer):
        update(model, optimizer)
        model.w.value = 3 * jnp.ones((2, 1))
        return model

    assert (jax.jit(step)(*made()).w.value == 3).all()


# --- draws ------------------------------------------------------------------------------------------------------------


class Dropouts(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(2))
        self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.second(self.first(x * self.scale))

    @nnx.jit
    def split_and_merged(self, x):
        return nnx.merge(*nnx.split(self))(x)


def merges(model):
    return nnx.merge(*nnx.split(model))(X).sum()


def in_grad(transform):
    def step(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        return transform(lambda params: nnx.merge(graphdef, params, rest)(X).sum())(params)

    return nnx.jit(step)


def in_scan(model):
    graphdef, state = nnx.split(model)
    return jax.lax.scan(lambda carry, _: (carry, nnx.merge(graphdef, state)(X)), 0, length=2)[1]


def draws_twice(model):
    copy = nnx.merge(*nnx.split(model))
    return copy(X) + copy(X)


def keeps_the_rest(model):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    copy = nnx.merge(graphdef, params, rest)
    out = copy(X)
    nnx.update(model, nnx.state(copy, nnx.Param))
    return out


def compat_in_grad(model):
    graphdef, params, rest = compat.split(model, nnx.Param, ...)
    return jax.grad(lambda params: compat.merge(graphdef, params, rest)(X).sum())(params)


LOST_DRAWS = {
    "jit": nnx.jit(merges),
    "jit of a closure": lambda model: nnx.jit(lambda: merges(model))(),
    "a jitted method": lambda model: model.split_and_merged(X),
    "jax.grad in jit": in_grad(jax.grad),
    "nnx.grad in jit": in_grad(nnx.grad),
    "grad": nnx.grad(merges),
    "scan in jit": nnx.jit(in_scan),
    "a remat in a copy": nnx.jit(lambda model: nnx.remat(lambda copy: copy(X))(nnx.merge(*nnx.split(model)))),
    "two draws": nnx.jit(draws_twice),
    "the parameters alone are read": nnx.jit(keeps_the_rest),
    "a State that is passed": lambda model: nnx.jit(lambda state: nnx.merge(nnx.graphdef(model), state)(X))(
        nnx.state(model)
    ),
    "compat, in jax.grad": nnx.jit(compat_in_grad),
}


@pytest.mark.parametrize("name", LOST_DRAWS)
def test_draws_of_a_copy_that_nothing_reads_are_a_warning(name):
    """There is one for all streams; it names the function that merges, and points to the line."""
    model = Dropouts(nnx.Rngs(0))
    (found,) = lost(LOST_DRAWS[name], model)
    assert "draws random numbers. It is a copy" in str(found.message)
    assert found.filename == __file__
    assert model.first.rngs.count.value == model.second.rngs.count.value == 0


@pytest.mark.parametrize("name", ["update", "draws"])
def test_one_line_warns_once(name):
    """However often it is traced, unless the user asks for more; and filters by module find it."""

    def step():
        if name == "update":
            jax.jit(lambda *both: update(*both))(*made())
        else:
            nnx.jit(lambda model: merges(model))(Dropouts(nnx.Rngs(0)))

    assert len(lost(step)) == len(lost(step)) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        step()
        step()
    assert len(caught) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("ignore", module=__name__)
        step()
    assert not caught


def test_the_next_call_does_draw_the_same():
    model, f = Dropouts(nnx.Rngs(0)), nnx.jit(lambda model: nnx.merge(*nnx.split(model))(X))
    with pytest.warns(UserWarning, match="unless the model gets a new seed, the next call draws the same numbers"):
        first = f(model)
    assert (f(model) == first).all()
    nnx.reseed(model, default=1)
    assert not (f(model) == first).all()


def test_a_copy_draws_as_the_model_would():
    """One number after the other; and after an update the model goes on from there."""

    @nnx.jit
    def draws(model):
        copy = nnx.merge(*nnx.split(model))
        keys = copy.first.rngs(), copy.first.rngs()
        nnx.update(model, nnx.state(copy, nnx.RngState))
        return *keys, model.first.rngs()

    ours, same = Dropouts(nnx.Rngs(0)), Dropouts(nnx.Rngs(0)).first
    assert draws(ours) == tuple(same.rngs() for _ in range(3))
    assert ours.first.rngs.count.value == 3


def updates(model):
    copy = nnx.merge(*nnx.split(model))
    out = copy(X)
    nnx.update(model, nnx.state(copy, nnx.RngState))
    return out


def returns_from_grad(model):
    def loss(params):
        copy = nnx.merge(graphdef, params, rest)
        return copy(X).sum(), nnx.state(copy, nnx.Not(nnx.Param))

    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    _, new = jax.grad(loss, has_aux=True)(params)
    nnx.update(model, new)


def evaluates(model):
    copy = nnx.merge(*nnx.split(model))
    copy.eval()
    return copy(X)


def is_given_streams(model):
    copy = nnx.merge(*nnx.split(model))
    return copy.first(X, rngs=nnx.Rngs(0))


def reseeds(model, key):
    copy = nnx.merge(*nnx.split(model))
    nnx.reseed(copy, default=key)
    return copy(X)


def made_here(key):
    return merges(Dropouts(nnx.Rngs(key)))


def raises(model):
    def step(model):
        copy = nnx.merge(*nnx.split(model))
        return copy(X) + copy.nothing

    with pytest.raises(AttributeError):
        nnx.jit(step)(model)


KEPT_DRAWS = {
    "the model is updated": nnx.jit(updates),
    "updated with what grad returns": nnx.jit(returns_from_grad),
    "the copy is returned": nnx.jit(lambda model: (copy := nnx.merge(*nnx.split(model)), copy(X))),
    "evaluation": nnx.jit(evaluates),
    "other streams": nnx.jit(is_given_streams),
    "a new seed": lambda model: nnx.jit(reseeds)(model, jax.random.key(0)),
    "a model made here": lambda model: nnx.jit(made_here)(jax.random.key(0)),
    "raw jax": lambda model: jax.jit(lambda state: nnx.merge(nnx.graphdef(model), state)(X))(nnx.state(model)),
    "eager": merges,
    "shapes alone": lambda model: nnx.jit(lambda model: [jax.eval_shape(lambda: merges(model)), None][1])(model),
    "a step that fails": raises,
    "compat, which shares": nnx.jit(lambda model: compat.merge(*compat.split(model))(X)),
}


@pytest.mark.parametrize("name", KEPT_DRAWS)
def test_draws_that_are_read_are_none(name):
    assert not lost(KEPT_DRAWS[name], Dropouts(nnx.Rngs(0)))


def test_a_merged_model_is_gone_when_its_last_call_has_ended():
    """What knows the paths of running calls does not hold it: nor the arrays that it was made of."""

    @nnx.jit
    def step(model):
        copy = nnx.merge(*nnx.split(model))
        copy.eval()
        copy(X)
        gone = weakref.ref(copy)
        del copy
        return gone() is None

    assert step(Dropouts(nnx.Rngs(0)))
