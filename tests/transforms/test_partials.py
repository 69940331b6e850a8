"""Partials: bound Modules are seen as they are at each call, and changes come back to them."""

import inspect

import jax.numpy as jnp
import pytest

import nnxlib as nnx


class Scale(nnx.Module):
    def __init__(self, by=1.0):
        self.by = nnx.Param(jnp.asarray(by))
        self.double = False


def step(model, x, *, offset=0.0):
    model.by[...] += 1.0
    return model.by.value * x * (2 if model.double else 1) + offset


BINDERS = {"cached_partial": lambda f, *args: nnx.cached_partial(nnx.jit(f), *args), "jit_partial": nnx.jit_partial}


@pytest.fixture(params=list(BINDERS))
def bind(request):
    return BINDERS[request.param]


def test_values_come_back_and_present_ones_are_seen(bind):
    """Each call starts from what the Module holds then, whoever set it."""
    model = Scale()
    by = model.by
    call = bind(step, model)
    assert call(3.0) == 6.0
    model.by.value = jnp.array(9.0)
    assert call(1.0, offset=5.0) == 15.0
    assert model.by is by
    assert by == 10.0


def test_structure_may_change_inside_and_outside(bind):
    """A flag set outside is seen at the next call; an attribute set inside appears on the Module."""
    model = Scale()
    call = bind(step, model)
    assert call(1.0) == 2.0
    model.double = True
    assert call(1.0) == 6.0
    model.by = nnx.Param(jnp.array(0.0))
    assert call(1.0) == 2.0

    def grow(model):
        model.parts = [*getattr(model, "parts", []), Scale()]
        return model

    grown = bind(grow, model)
    assert grown() is model
    assert grown() is model
    assert len(model.parts) == 2


def test_a_bound_module_may_share_with_another_argument(bind):
    """What is bound and what is passed are one graph."""
    a, b = Scale(), Scale()
    b.by = a.by

    def both(a, b):
        a.by[...] += 1.0
        b.by[...] *= 10.0

    bind(both, a)(b)
    assert a.by is b.by
    assert a.by == 20.0


def test_a_bound_function_compiles_once_for_many_values(bind):
    """The bound arguments are arguments: another value in them is not another program."""
    traces = []

    def f(model, x):
        traces.append(1)
        return step(model, x)

    model = Scale()
    call = bind(f, model)
    for x in (1.0, 2.0, 3.0):
        call(x)
    assert len(traces) == 1


def test_options_count_from_the_first_argument_of_the_function():
    """``static_argnums`` and ``donate_argnums`` are those of the function that is compiled; names work too."""

    def chosen(a, b, x, flag):
        b.by[...] = a.by.value
        return x if flag else -x

    for options in ({"static_argnums": 3}, {"static_argnames": "flag"}):
        call = nnx.jit_partial(chosen, Scale(), Scale(), donate_argnums=1, **options)
        assert (call(2.0, True), call(2.0, False), call(2.0, flag=True)) == (2.0, -2.0, 2.0)


def test_jit_partial_has_the_stages_of_jit():
    """``lower``, ``trace``, ``eval_shape``, ``clear_cache`` and ``__wrapped__`` take the bound arguments along."""
    model, offset = Scale(), jnp.ones(3)
    call = nnx.jit_partial(step, model)
    assert call.__wrapped__ is step
    assert call.eval_shape(jnp.ones(3)).shape == (3,)
    assert call.eval_shape(1.0, offset=offset).shape == (3,)
    assert "f32[3]" in str(call.trace(1.0, offset=offset).jaxpr)
    compiled = call.lower(2.0).compile()
    assert model.by == 1.0
    assert compiled(2.0) == 4.0
    assert call.lower(2.0).compile()(2.0) == 6.0
    assert call.lower(2.0, offset=offset).compile()(2.0, offset=offset).tolist() == [9.0] * 3


def test_jit_partial_forgets_what_it_has_compiled_when_told_to():
    traces = []
    call = nnx.jit_partial(lambda model: traces.append(1), Scale())
    for expected in (1, 2):
        call()
        call()
        assert len(traces) == expected
        call.clear_cache()


def test_a_failing_call_changes_nothing(bind):
    """As for any jitted function."""

    def fails(model):
        model.by[...] += 1.0
        model.debris = 1
        raise RuntimeError("halfway")

    model = Scale()
    value = model.by.value
    with pytest.raises(RuntimeError, match="halfway"):
        bind(fails, model)()
    assert model.by.value is value
    assert not hasattr(model, "debris")


def test_a_partial_can_be_transformed_and_need_not_be_of_a_jitted_function():
    """``cached_partial`` takes any function; the result goes through other transforms, bound Modules included."""
    model = Scale(3.0)
    assert nnx.cached_partial(step, model)(1.0) == 4.0
    assert nnx.jit(nnx.cached_partial(step, model))(1.0) == 5.0
    assert nnx.jit(nnx.jit_partial(step, model))(1.0) == 6.0
    assert model.by == 6.0


def test_what_is_left_to_pass_may_be_passed_by_name(bind):
    """The signature is that of the further arguments, so a transform finds the place of each."""
    model = Scale(3.0)
    call = bind(lambda model, x: (model.by.value * x).sum(), model)
    assert str(inspect.signature(call)) == "(x)"
    assert nnx.grad(call)(x=2.0) == 3.0
    assert nnx.vmap(call, in_axes=(0,))(x=jnp.arange(2.0)).tolist() == [0.0, 3.0]
