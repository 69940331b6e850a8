"""Programs: what is kept with a function for its next eager call, and what is not."""

import jax.numpy as jnp
import pytest

import nnxlib as nnx

from .models import Layer

X = jnp.float32(1)
model = Layer()
model.flag = 2.0


def flagged(x):
    return x * model.flag  # asks for nothing but a plain attribute


def same(x):
    return x


def flagged_by_name(x, named=model):
    return x * named.flag


def closing_over(other):
    return lambda x: x * other.flag


FUNCTIONS = {"global": flagged, "default": flagged_by_name, "closure": closing_over(model)}
EAGER = {
    "cond": lambda f: nnx.cond(True, f, flagged_by_name, X),
    "other branch": lambda f: nnx.cond(False, same, f, X),
    "switch": lambda f: nnx.switch(0, [f, same], X),
    "scan": lambda f: nnx.scan(f, in_axes=nnx.Carry, out_axes=nnx.Carry, length=1)(X),
    "while_loop": lambda f: nnx.while_loop(lambda x: x < 1.5, f, X),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", EAGER)
def test_a_flag_of_a_module_that_a_function_names_is_seen_at_each_call(name, function):
    """Though nothing of the Module is noticed while the function is traced."""
    for model.flag in (2.0, 3.0, 2.0):
        assert EAGER[name](FUNCTIONS[function]) == model.flag


def test_a_function_that_names_no_module_is_traced_once():
    """However often it is called."""
    traces = []

    def f(x):
        traces.append(1)
        return x + 1

    for _ in range(3):
        assert nnx.cond(True, f, same, X) == 2
    assert len(traces) == 1
