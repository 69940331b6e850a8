"""A call that fails changes nothing: every object holds the very things it held, and the next call works.

"Nothing" is meant by identity (`is`): values, attributes, items, metadata, static values, marks. A failure may come at
every step of a program and after its last one, from whatever it raises, and from JAX itself: while it traces, lowers,
compiles or runs the function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import nnxlib as nnx

from .compare import Snapshot, assert_no_tracer, assert_same, objects_in
from .programs import programs, run
from .strategies import Block, Config, Graph, Opaque, examples, graphs, make
from .test_jit_equals_eager import Copy, loss_and_rest


class Stop(Exception):
    """Raised by the tests themselves."""


class Bomb:
    """Interrupts a program before step `number`, once."""

    def __init__(self, number: int, error: type[BaseException]):
        self.number, self.error = number, error

    def __call__(self, step: int) -> None:
        if step == self.number:
            self.number = -1
            raise self.error


def loss(run: Callable) -> Callable:
    return lambda *args: (jnp.float32(0), run(*args))


TRANSFORMS: dict[str, Callable[[Callable], Callable]] = {
    "jit": nnx.jit,
    "jit in jit": lambda f: nnx.jit(lambda *args: nnx.jit(f)(*args)),
    "donated": lambda f: nnx.jit(f, donate_argnums=(0, 1)),
    "grad": lambda f: nnx.grad(loss(f), has_aux=True, argnums=(0, 1)),
    "grad in jit": lambda f: nnx.jit(nnx.value_and_grad(loss(f), has_aux=True, argnums=(0, 1))),
    "jit in grad": lambda f: nnx.value_and_grad(nnx.jit(loss(f)), has_aux=True, argnums=(0, 1)),
    "eval_shape": lambda f: lambda *args: nnx.eval_shape(f, *args),
    "lower": lambda f: nnx.jit(f).lower,
    "raw jit": lambda f: lambda *args: jax.jit(lambda: f(*jax.tree.map(lambda x: x, args)))(),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@examples(25)
@given(graphs(arguments=2), programs())
def test_an_exception_at_every_step(name: str, graph: Graph, program: tuple) -> None:
    """Whichever step raises, `Exception` or `KeyboardInterrupt`, the caller's objects are as they were."""
    args = make(graph)
    before = Snapshot(args)
    for number in range(len(program) + 1):
        for error in (Stop, KeyboardInterrupt):
            bomb = Bomb(number, error)
            with pytest.raises(error):
                TRANSFORMS[name](lambda *args: run(program, args, bomb))(*args)  # noqa: B023  # called at once
            before.assert_unchanged()


@examples(40)
@given(graphs(arguments=2), programs())
def test_the_same_function_works_after_it_failed(graph: Graph, program: tuple) -> None:
    """A jitted function that raised at its first call runs at the next one, on the same objects, as eager does."""
    bomb = Bomb(len(program), Stop)
    f = nnx.jit(lambda *args: run(program, args, bomb))
    copy = Copy(graph)
    with pytest.raises(Stop):
        f(*copy.args)
    assert_same(Copy(graph).call(lambda *args: run(program, args)), copy.call(f))


@examples(40)
@given(graphs(arguments=2), programs())
def test_a_failed_call_between_two_good_ones(graph: Graph, program: tuple) -> None:
    """A call that fails since its arguments have another structure leaves the compiled function as good as before."""
    f = nnx.jit(lambda *args, fail=False: (run(program, args), 1 / 0 if fail else None), static_argnames="fail")
    expected = Copy(graph).call(lambda *args: (run(program, args), None))
    for _ in range(2):
        assert_same(expected, Copy(graph).call(f))
        args = make(graph)
        before = Snapshot(args)
        with pytest.raises(ZeroDivisionError):
            f(*args, fail=True)
        before.assert_unchanged()


# --- failures of JAX ------------------------------------------------------------------------------------------------


def not_an_array(*args: Any) -> Any:
    return object()


def wrong_shapes(*args: Any) -> Any:
    return jnp.ones(2) + jnp.ones(3)


def array_as_bool(*args: Any) -> Any:
    values = [v.get_raw_value() for v in objects_in(args) if isinstance(v, nnx.Param)]
    return 1 if values and values[0].sum() > 0 else wrong_shapes()


def static_array(*args: Any) -> Any:
    args[0].bad = nnx.static(jnp.ones(2))


def unhashable(*args: Any) -> Any:
    class Odd(Exception):  # which holds more than attributes
        __hash__ = None  # type: ignore[assignment]

    args[0].bad = Odd()


def unlowerable(*args: Any) -> Any:
    return jax.jit(lambda x: x, compiler_options={"no such option": 1})(jnp.ones(2))


def raises(x: Any) -> Any:
    raise Stop


def run_time(*args: Any) -> Any:
    return jax.pure_callback(raises, jax.ShapeDtypeStruct((), "float32"), jnp.float32(1))


FAILURES = {
    not_an_array: TypeError,
    wrong_shapes: TypeError,
    array_as_bool: (jax.errors.ConcretizationTypeError, TypeError),
    static_array: TypeError,
    unhashable: TypeError,
    unlowerable: Exception,
    run_time: Exception,
}


@pytest.mark.parametrize("failure", FAILURES)
@examples(15)
@given(graphs(arguments=2), programs(longest=4))
def test_what_jax_refuses(failure: Callable, graph: Graph, program: tuple) -> None:
    """Outputs, operations, static values, compiler options and callbacks that JAX or the library refuses."""
    args = make(graph)
    before = Snapshot(args)
    for transform in (nnx.jit, lambda f: nnx.jit(lambda *args: nnx.jit(f)(*args))):
        with pytest.raises(FAILURES[failure]):
            jax.block_until_ready(transform(lambda *args: (run(program, args), failure(*args)))(*args))
        before.assert_unchanged()


def test_a_callback_that_raises_in_a_compiled_function() -> None:
    """A function that has run well fails at run time at a later call: values stay, and the call after it is right."""
    fail = [False]

    def check(x: Any) -> Any:
        if fail[0]:
            raise Stop("at run time")
        return x

    @nnx.jit
    def f(m: Any) -> None:
        m.a += 1
        m.b = jax.pure_callback(check, jax.ShapeDtypeStruct((), "float32"), m.b)

    m = Block()
    m.a, m.b = nnx.Param(jnp.float32(1)), jnp.float32(5)
    for expected in (2, 3, 4):
        f(m)
        fail[0] = True
        before = Snapshot(m)
        with pytest.raises(Exception, match="at run time"):
            f(m)
        before.assert_unchanged()
        fail[0] = False
        assert m.a.value == expected


def test_nans_found_by_jax() -> None:
    """With jax_debug_nans a step that makes a nan raises, and the model is the one from before the step."""

    @nnx.jit
    def f(m: Any) -> None:
        m.a.value = jnp.log(m.a.value - 2)

    m = Block()
    m.a = nnx.Param(jnp.float32(1))
    before = Snapshot(m)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        f(m)
    before.assert_unchanged()


def test_an_interrupt_while_jax_runs_python_code() -> None:
    """A KeyboardInterrupt out of a compiled function's callback, and out of a hook, changes nothing."""

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    m = Block()
    m.a, m.b = nnx.Param(jnp.float32(1)), nnx.Param(jnp.float32(1), on_set_value=interrupted)
    before = Snapshot(m)

    @nnx.jit
    def f(m: Any) -> None:
        m.a += 1
        m.b.value = m.a.value

    with pytest.raises(KeyboardInterrupt):
        f(m)
    before.assert_unchanged()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Positive:
    """A pytree that refuses negative numbers."""

    x: Any

    def __post_init__(self) -> None:
        if type(self.x) is not object and not isinstance(self.x, jax.core.Tracer) and self.x < 0:
            raise Stop


DERIVATIVES = {
    "grad": lambda f, m: nnx.grad(lambda m, p: f(m, p.x).x, argnums=(0, 1))(m, Positive(jnp.float32(1))),
    "jvp": lambda f, m: nnx.jvp(lambda m: f(m, m.w.value), (m,), ({"w": jnp.float32(1)},)),
    "jacrev": lambda f, m: nnx.jacrev(f, argnums=1)(m, jnp.float32(1)),
    "jacfwd": lambda f, m: nnx.jacfwd(f, argnums=1)(m, jnp.float32(1)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_derivative_that_is_refused_by_its_class(name: str) -> None:
    """The derivative of a pytree is one of the same class, which may refuse it."""
    m = Block()
    m.w, m.calls = nnx.Param(jnp.float32(1)), nnx.Variable(jnp.int32(0))

    def f(m: Any, x: Any) -> Positive:
        m.calls.value += 1
        return Positive(2 - x)

    before = Snapshot(m)
    with pytest.raises(Stop):
        DERIVATIVES[name](f, m)
    before.assert_unchanged()


# --- tracers --------------------------------------------------------------------------------------------------------


@examples(30)
@given(graphs(arguments=2), programs(longest=4))
def test_nothing_is_left_of_a_trace(graph: Graph, program: tuple) -> None:
    """Under `jax.checking_leaks()` a call leaves no tracer alive, and none can be reached from any object."""
    copy = Copy(graph)
    with jax.checking_leaks():
        nnx.jit(lambda *args: run(program, args))(*copy.args)
        nnx.eval_shape(lambda *args: run(program, args), *copy.args)
        found = copy.call(nnx.jit(loss_and_rest(program)))
    assert_no_tracer(found)


# --- static values that hide something of the trace -----------------------------------------------------------------


def in_a_closure(m: Any) -> None:
    x = m.w * 2
    m.a = lambda y: y * x


def itself_in_a_closure(m: Any) -> None:
    m.a = lambda y: y * m.w


def in_a_default(m: Any) -> None:
    def f(y: Any, x: Any = m.w.value) -> Any:
        return x * y

    m.a = f


def in_a_partial(m: Any) -> None:
    m.a = functools.partial(jnp.add, m.w.value)


def module_in_a_partial(m: Any) -> None:
    m.a = functools.partial(read_w, m)


def in_a_hook(m: Any) -> None:
    x = m.w.value
    m.w.set_metadata(on_get_value=lambda variable, value: value + x)


def in_an_opaque_object(m: Any) -> None:
    m.a = Opaque()
    m.a.cache = {"x": [m.w.value]}


def in_a_method_of_an_opaque_object(m: Any) -> None:
    held = Opaque()
    held.x = m.w.value
    m.a = held.__reduce__


def in_a_dataclass(m: Any) -> None:
    m.a.rate = m.w.value


def in_a_new_module(m: Any) -> None:
    m.new = Block()
    m.new.scale = nnx.Param(m.w * 1)
    m.new.act = Opaque()
    m.new.act.scale = m.new.scale


def read_w(m: Any, y: Any) -> Any:
    return m.w * y


HIDING = [
    in_a_closure,
    itself_in_a_closure,
    in_a_default,
    in_a_partial,
    module_in_a_partial,
    in_a_hook,
    in_an_opaque_object,
    in_a_method_of_an_opaque_object,
    in_a_dataclass,
    in_a_new_module,
]


@pytest.mark.parametrize("transform", ["jit", "grad", "eval_shape", "grad in jit"])
@pytest.mark.parametrize("hide", HIDING)
def test_a_static_value_cannot_carry_a_tracer_out(hide: Callable, transform: str) -> None:
    """Whatever a static value refers to, a tracer in it is an error that says where, and the model is as before."""
    m = Block()
    m.w, m.a = nnx.Param(jnp.ones(2)), Config()

    def f(m: Any) -> Any:
        hide(m)
        return m.w.sum()

    call = {
        "jit": nnx.jit(f),
        "grad": nnx.grad(f),
        "eval_shape": lambda m: nnx.eval_shape(f, m),
        "grad in jit": nnx.jit(nnx.grad(f)),
    }[transform]
    before = Snapshot(m)
    with pytest.raises((nnx.TraceContextError, TypeError), match=r"args\[0\]\.(a|w|new\.act)"):
        call(m)
    before.assert_unchanged()
    assert_no_tracer(m)


def test_static_values_that_hide_nothing_of_the_trace() -> None:
    """Closures over concrete values, live models, and tracers of an outer trace go in and out as they are."""
    other = Block()
    other.w = nnx.Param(jnp.ones(2))
    scale = jnp.float32(2)

    def attach(m: Any) -> None:
        m.a, m.b = lambda y: y * scale, functools.partial(read_w, other)

    m = Block()
    nnx.jit(attach)(m)
    assert m.a(1.0) == 2
    assert m.b.args[0] is other

    @jax.jit
    def outer(x: Any) -> Any:
        inner = Block()
        inner.w, inner.a = nnx.Param(x), lambda y: y * x
        nnx.jit(lambda m: m.w.set_value(m.a(m.w)))(inner)
        return inner.w.value

    assert outer(3.0) == 9


# --- dicts and lists in Variables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [nnx.jit, nnx.grad, lambda f: nnx.jit(nnx.grad(f))])
def test_a_dict_in_a_variable_is_edited_as_a_whole_or_not_at_all(transform: Callable) -> None:
    """A pytree in a Variable that a function edits in place: its changes come out, and a failed call makes none."""
    m = Block()
    m.w, m.v = nnx.Param(jnp.float32(1)), nnx.Variable({"a": [jnp.float32(1)], "b": jnp.float32(0)})
    held = m.v.value

    def f(m: Any, fail: bool) -> Any:
        m.v.value["a"].append(m.w * 2)
        m.v.value["b"] += m.w
        if fail:
            raise Stop
        return m.w.value

    before = Snapshot(m)
    with pytest.raises(Stop):
        transform(lambda m: f(m, True))(m)
    before.assert_unchanged()
    assert held == {"a": [1], "b": 0}
    for count in (2, 3):
        transform(lambda m: f(m, False))(m)
        assert len(m.v.value["a"]) == count
        assert m.v.value["b"] == count - 1
        assert_no_tracer(m)


@pytest.mark.parametrize("transform", [nnx.jit, nnx.grad])
def test_an_item_of_a_dict_in_a_variable_is_replaced_in_place(transform: Callable) -> None:
    """The structure stays; what is in it does not."""
    m = Block()
    m.w, m.v = nnx.Param(jnp.float32(1)), nnx.Variable({"a": jnp.float32(1)})

    def f(m: Any) -> Any:
        m.v.value["a"] = m.w * 2
        return m.w.value

    transform(f)(m)
    assert m.v.value == {"a": 2}
