"""Arguments chosen by number or name: static ones, and those that are donated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors

from .jitted import Net, X
from .models import counted


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 2},
        {"static_argnums": (2,)},
        {"static_argnums": [-2]},
        {"static_argnums": (-2,)},
        {"static_argnames": "mode"},
        {"static_argnames": ("mode",)},
    ],
)
def test_static_arguments(options):
    """By number from either end or by name, passed by position or by keyword, one program for each value."""

    def f(m, x, mode, y=1.0):
        assert not isinstance(mode, jax.core.Tracer)
        return m(x) * y if mode == "on" else x

    f = counted(f)
    jitted, model = nnx.jit(f, **options), Net()
    for _ in range(2):
        assert jitted(model, X, "on").tolist() == [4, 4]
        assert jitted(model, X, "off").tolist() == [1, 1]
        assert jitted(model, X, mode="on").tolist() == [4, 4]
    assert f.count <= 4
    assert int(model.layers[0].calls) == 4


@pytest.mark.parametrize("given", ["m", (0, "m"), nnx.Param, 1.5])
@pytest.mark.parametrize(
    ("transform", "option"),
    [
        (nnx.jit, "static_argnums"),
        (nnx.jit, "donate_argnums"),
        (nnx.remat, "static_argnums"),
        (nnx.make_jaxpr, "static_argnums"),
    ],
)
def test_numbers_of_arguments_are_numbers(transform, option, given):
    with pytest.raises(errors.ArgumentError, match=f"{option} takes numbers of arguments, such as 0 or .*, not "):
        transform(lambda m: m, **{option: given})
    assert transform(lambda m, n: m, **{option: np.int64(0)})(1, 2) is not None


@pytest.mark.parametrize("given", [0, ("n", 0), nnx.Param, 1.5])
@pytest.mark.parametrize("option", ["static_argnames", "donate_argnames"])
def test_names_of_arguments_are_text(option, given):
    """Also if the function takes any name: a number there is not the number of an argument."""
    with pytest.raises(errors.ArgumentError, match=f"{option} takes names of arguments, such as 'n' or .*, not "):
        nnx.jit(lambda *args, **kwargs: args, **{option: given})


def test_static_arguments_of_a_bound_method():
    """Numbers count the arguments of the call, as with jax.jit of a bound method."""
    model = Net()
    method = nnx.jit(lambda self, x, n: x * n if type(n) is int else None, static_argnums=2)
    assert method.__get__(model)(X, 3).tolist() == [3, 3]

    class WithMode(Net):
        def run(self, x, mode):
            return self(x) if mode == "on" else x

    bound = WithMode().run
    for options in ({"static_argnums": 1}, {"static_argnums": -1}, {"static_argnames": "mode"}):
        assert nnx.jit(bound, **options)(X, "off").tolist() == [1, 1]
        assert nnx.jit(bound, **options)(X, mode="on").tolist() == [4, 4]


def test_static_arguments_from_the_end_of_var_positional():
    """Negative numbers of a function with *args count from the end of the call."""
    jitted = nnx.jit(lambda *args: args[0] * len(args[-1]), static_argnums=-1)
    assert jitted(X, "abc").tolist() == [3, 3]
    assert jitted(X, X, "ab").tolist() == [2, 2]


def make_function(default):
    return lambda x, factor=default: factor * x


@pytest.mark.parametrize(
    ("a", "same", "other"),
    [
        ([1, {"k": 2}], [1, {"k": 2}], [1, {"k": 3}]),
        ({"a": [1]}, {"a": [1]}, {"a": [2]}),
        ({1, 2}, {2, 1}, {1}),
        (np.ones(2), np.ones(2), np.zeros(2)),
        (1, 1, True),
        (1.0, 1.0, 1),
        (0.0, 0.0, -0.0),
        (functools.partial(max, [1]), functools.partial(max, [1]), functools.partial(max, [2])),
        (make_function(1), make_function(1), make_function(2)),
        (slice(1, 2), slice(1, 2), slice(1, 3)),
        (jnp.float32, jnp.float32, jnp.float16),
    ],
    ids=lambda x: type(x).__name__,
)
def test_static_arguments_compare_by_value(a, same, other):
    """Unhashable ones too: an equal value is no new program, another one (of another type, another zero) is."""
    f = counted(lambda m, static, x: m(x))
    jitted, model = nnx.jit(f, static_argnums=1), Net()
    for static in (a, same, a, same):
        jitted(model, static, X)
    assert f.count == 1
    jitted(model, other, X)
    assert f.count == 2


def test_static_argument_changed_in_place():
    """The value at the time of the call counts; what the function does to its copy stays inside."""
    seen = []

    def f(m, static):
        seen.append(list(static))
        static.append("inside")
        return m.scale

    jitted, static = nnx.jit(f, static_argnums=1), ["a"]
    jitted(Net(), static)
    static.append("b")
    jitted(Net(), static)
    assert seen == [["a"], ["a", "b"]]
    assert static == ["a", "b"]


def test_static_argument_without_equality():
    """An array declared static is refused, naming the argument."""
    with pytest.raises(errors.StaticValueError, match=r"float32\[.*\] at args\[1\] is"):
        nnx.jit(lambda m, n: n, static_argnums=1)(Net(), X)
    with pytest.raises(errors.StaticValueError, match=r"float32\[.*\] at kwargs.n is"):
        nnx.jit(lambda m, *, n: n, static_argnames="n")(Net(), n=X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"static_argnums": 2}, "static_argnums has 2, but f takes 2 positional"),
        ({"static_argnums": -3}, "static_argnums has -3, but f takes 2 positional"),
        ({"donate_argnums": 5}, "donate_argnums has 5"),
        ({"static_argnames": "z"}, r"static_argnames has \['z'\], but f takes \['m', 'x'\]"),
        ({"donate_argnames": ("x", "q")}, r"donate_argnames has \['q'\]"),
    ],
)
def test_arguments_that_the_function_does_not_have(options, message):
    """Wrong numbers and names are refused when the function is wrapped, saying what there is."""

    def f(m, x):
        return x

    with pytest.raises(errors.PrefixError, match=message):
        nnx.jit(f, **options)
