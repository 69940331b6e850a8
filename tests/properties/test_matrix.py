"""The matrix: every transform, in every context, with every kind of change, and every way to end.

The function under test is always the same small program on two arguments, elementwise, so that what a transform over
an axis computes is what the plain function computes on the whole arrays. Each case calls it through a transform inside
a context and compares with the plain call on a copy; or lets it fail, and compares with what was there before.

`EAGER`: the plain function is called once; `LOOPS`: as often as the loop runs. Where the structure may not change, the
changes that do so must be refused, with an error that names the path, and nothing may have happened.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.errors import TraceContextError
from nnxlib.transforms.body_checks import BodyError

from .compare import Snapshot, assert_no_tracer, assert_same

SHAPE = (2, 2, 2)  # two axes to map over, one to compute on
TIMES = 2  # iterations of a loop, and the size of a mapped axis


class Part(nnx.Module):
    def __init__(self, value: float):
        self.w = nnx.Param(jnp.full(SHAPE, value))
        self.calls = nnx.BatchStat(jnp.full(SHAPE, 0.0))


class Model(nnx.Module):
    """Two parts, a spare one, a list, an array of its own, and an empty place."""

    def __init__(self) -> None:
        self.left, self.right, self.spare = Part(1.0), Part(2.0), Part(3.0)
        self.rest = [Part(4.0)]
        self.array = jnp.full(SHAPE, 5.0)
        self.place = None


# --- changes: what the function does --------------------------------------------------------------------------------


def value(m: Any, other: Any, x: Any) -> None:
    m.left.calls.value = m.left.calls + x
    m.rest[0].w *= 2.0
    m.array = m.array + 1.0


def attach(m: Any, other: Any, x: Any) -> None:
    m.seen = nnx.Intermediate(x * 2.0)
    m.place = Part.__new__(Part)
    m.place.w = nnx.Param(m.left.w + x)
    m.rest.append(nnx.Cache(x + 1.0))


def delete(m: Any, other: Any, x: Any) -> None:
    m.left.calls.value = m.spare.w * x
    del m.spare
    m.rest.pop()


def swap(m: Any, other: Any, x: Any) -> None:
    m.left, m.right = m.right, m.left
    m.left.w.value = m.left.w + x


def shared(m: Any, other: Any, x: Any) -> None:
    assert other.part is m.left, "what is shared between arguments is one object inside"
    other.part.w.value = other.part.w + x
    m.right.calls.value = m.left.w * 1.0


def cyclic(m: Any, other: Any, x: Any) -> None:
    assert m.left.top is m
    m.left.top.right.w.value = m.left.top.left.w + x


def closure(m: Any, other: Any, x: Any) -> None:
    """Reads of an object from outside are legal everywhere; `other.read` refers to it."""
    m.left.w.value = m.left.w + other.read().sum()


CHANGES = {f.__name__: f for f in (value, attach, delete, swap, shared, cyclic, closure)}
STRUCTURAL = {"attach", "delete", "swap"}
FAILURES = ("before", "middle", "end", "interrupted")


class Failure(Exception):
    """What the function raises."""


class Interrupt(BaseException):
    """What reaches a program from outside of it, like KeyboardInterrupt."""


def body(change: str, fail: str | None, m: Any, other: Any, x: Any) -> Any:
    """The function under test: a change, perhaps a failure, and an output with objects from inside and outside."""
    if fail == "before":
        raise Failure
    m.right.w.value = m.right.w + 1.0
    if fail == "middle":
        raise Failure
    CHANGES[change](m, other, x)
    if fail == "interrupted":
        raise Interrupt
    m.right.calls.value = m.right.calls + m.right.w
    if fail == "end":
        raise Failure
    return m.right, nnx.Cache(x * m.left.w), (x + m.right.w).sum(-1)


def arguments(change: str) -> tuple[Any, ...]:
    m, other = Model(), nnx.Dict(part=Part(6.0))
    if change == "shared":
        other.part = m.left
    if change == "cyclic":
        m.left.top = m
    if change == "closure":
        other.read = Outside(nnx.Param(jnp.ones(3)))
    return m, other, jnp.full(SHAPE, 0.5)


class Outside:
    """A function that refers to a Variable; equal for all Variables, so that it can be compared and copied."""

    def __init__(self, v: nnx.Variable):
        self.v = v

    def __call__(self) -> Any:
        return self.v.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outside)

    def __hash__(self) -> int:
        return 0

    def __deepcopy__(self, memo: Any) -> Outside:
        return self


# --- transforms: each makes a function of (m, other, x) from one ----------------------------------------------------

WHOLE = {"in_axes": (0, 0, 0), "out_axes": 0}


def _loss(f: Callable) -> Callable:
    def loss(m: Any, other: Any, x: Any) -> Any:
        out = f(m, other, x)
        return out[-1].sum(), out

    return loss


def _custom_vjp(f: Callable) -> Callable:
    lifted = nnx.custom_vjp(f)
    lifted.defvjp(lambda *args: (f(*args), None), lambda residual, g: (None, None, None))
    return lifted


def _custom_jvp(f: Callable) -> Callable:
    lifted = nnx.custom_jvp(f)
    lifted.defjvp(lambda primals, tangents: (f(*primals), None))
    return lifted


def _shard_map(f: Callable) -> Callable:
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    return nnx.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)


def _value_of(f: Callable) -> Callable:
    return lambda *args: nnx.value_and_grad(_loss(f), argnums=(0, 1), has_aux=True)(*args)[0][1]


EAGER: dict[str, Callable[[Callable], Callable]] = {
    "jit": nnx.jit,
    "grad": lambda f: lambda *args: nnx.grad(_loss(f), argnums=(0, 1), has_aux=True)(*args)[1],
    "value_and_grad": _value_of,
    "vjp": lambda f: lambda *args: nnx.vjp(_loss(f), *args, has_aux=True)[2],
    "jacrev": lambda f: lambda *args: nnx.jacrev(_loss(f), argnums=(0, 1), has_aux=True)(*args)[1],
    "jacfwd": lambda f: lambda *args: nnx.jacfwd(_loss(f), argnums=2, has_aux=True)(*args)[1],
    "linearize": lambda f: lambda m, other, x: nnx.linearize(_loss(f), m, other, x, has_aux=True)[2],
    "jvp": lambda f: lambda *args: nnx.jvp(_loss(f), args, (None, None, args[2]), has_aux=True)[2],
    "hessian": lambda f: lambda *args: nnx.hessian(_loss(f), argnums=2, has_aux=True)(*args)[1],
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "remat": nnx.remat,
    "checkify": lambda f: lambda *args: nnx.checkify(f)(*args)[1],
    "cond": lambda f: lambda *args: nnx.cond(jnp.bool_(True), f, f, *args),
    "switch": lambda f: lambda *args: nnx.switch(jnp.int32(1), [f, f], *args),
    "lift": nnx.lift(lambda pure: jax.checkpoint(pure, prevent_cse=False)),
    "vmap": lambda f: nnx.vmap(f, **WHOLE),
    "scan over an axis": lambda f: nnx.scan(f, **WHOLE),
    "shard_map": _shard_map,
    "transform_metadata": nnx.transform_metadata,
    "map_variables": lambda f: nnx.map_variables(f, nnx.BatchStat, lambda state: state, lambda state: state),
}


def _while(f: Callable) -> Callable:
    def run(m: Any, other: Any, x: Any) -> Any:
        def step(carry: Any) -> Any:
            i, m, other, x = carry
            f(m, other, x)
            return i + 1, m, other, x

        return nnx.while_loop(lambda carry: carry[0] < TIMES, step, (jnp.int32(0), m, other, x))[1:]

    return run


def _fori(f: Callable) -> Callable:
    def step(i: Any, carry: Any) -> Any:
        f(*carry)
        return carry

    return lambda *args: nnx.fori_loop(0, TIMES, step, args)


def _carry(f: Callable) -> Callable:
    def step(carry: Any) -> Any:
        f(*carry)
        return carry

    return lambda *args: nnx.scan(step, in_axes=(nnx.Carry,), out_axes=nnx.Carry, length=TIMES)(args)


def _remat_scan(f: Callable) -> Callable:
    def step(carry: Any) -> Any:
        f(*carry)
        return carry

    return lambda *args: nnx.remat_scan(step, lengths=(1, TIMES), in_axes=(nnx.Carry,), out_axes=nnx.Carry)(args)


LOOPS: dict[str, Callable[[Callable], Callable]] = {
    "while_loop": _while,
    "fori_loop": _fori,
    "scan with a Carry": _carry,
    "remat_scan": _remat_scan,
}


def plainly(name: str, f: Callable) -> Callable:
    """What a transform stands for, in plain Python."""
    if name not in LOOPS:
        return f

    def loop(*args: Any) -> Any:
        for _ in range(TIMES):
            f(*args)
        return args

    return loop


# --- contexts: where the transformed function is called -------------------------------------------------------------

CONTEXTS: dict[str, Callable[[Callable], Callable]] = {
    "at top level": lambda f: f,
    "in jit": nnx.jit,
    "in grad": lambda f: lambda *args: nnx.grad(_summed(f), argnums=(0, 1), has_aux=True)(*args)[1],
    "in vmap": lambda f: nnx.vmap(f, **WHOLE),
    "in remat": nnx.remat,
    "in scan": lambda f: nnx.scan(f, **WHOLE),
    "in cond": lambda f: lambda *args: nnx.cond(jnp.bool_(True), f, f, *args),
    "in jit of vmap": lambda f: nnx.jit(nnx.vmap(f, **WHOLE)),
}


def _summed(f: Callable) -> Callable:
    def loss(*args: Any) -> Any:
        out = f(*args)
        return args[2].sum(), out

    return loss


# --- the cases ------------------------------------------------------------------------------------------------------


def may_change_structure(name: str, change: str) -> bool:
    """Whether a change of structure is legal there: not in a loop, whose iterations have the same object."""
    return change not in STRUCTURAL or name not in LOOPS


def check(name: str, context: str, change: str, fail: str | None) -> None:
    transform, inside = {**EAGER, **LOOPS}[name], CONTEXTS[context]
    f = functools.partial(body, change, fail)
    args = arguments(change)
    before = Snapshot(*args)
    lifted = inside(transform(f))
    refused = not may_change_structure(name, change)
    expected: Any = {None: BodyError if refused else None, "interrupted": Interrupt}.get(fail, Failure)
    if expected is not None:
        with pytest.raises(expected):
            lifted(*args)
        before.assert_unchanged()
        assert_no_tracer(args)
        return
    out = lifted(*args)
    plain_args = arguments(change)
    plain_out = plainly(name, f)(*plain_args)
    assert_same((plain_args, plain_out), (args, out))
    assert_no_tracer(args, out)


CASES = list(itertools.product(CHANGES, (None, *FAILURES)))
EVERYTHING = hypothesis.settings().max_examples >= 1000  # under HYPOTHESIS_PROFILE=explore
SHARE = 1 if EVERYTHING else 24  # of the cases


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", [*EAGER, *LOOPS])
def test_every_change_and_every_end(name: str, context: str) -> None:
    """What returned equals plain Python, by structure, identity and value; what failed left everything as it was."""
    start = ([*EAGER, *LOOPS].index(name) + list(CONTEXTS).index(context)) % SHARE
    problems = []
    for change, fail in CASES[start::SHARE]:
        try:
            check(name, context, change, fail)
        except Exception as error:
            problems.append(f"{change}, {fail or 'returns'}: {type(error).__name__}: {error}")
    assert not problems, "\n".join(problems)


ABSTRACT: dict[str, Callable[[Callable], Callable]] = {
    "eval_shape": lambda f: functools.partial(nnx.eval_shape, f),
    "make_jaxpr": nnx.make_jaxpr,
    "lower": lambda f: nnx.jit(f).lower,
    "trace": lambda f: nnx.jit(f).trace,
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", ABSTRACT)
def test_what_only_looks_changes_nothing(name: str, context: str) -> None:
    """Whether the function returns or fails."""
    for change, fail in CASES:
        args = arguments(change)
        before = Snapshot(*args)
        f = ABSTRACT[name](functools.partial(body, change, fail))
        with contextlib.suppress(Failure, Interrupt):
            CONTEXTS[context](lambda *args, f=f: f(*args) and None)(*args)
        before.assert_unchanged()


UNTRACED = ("transform_metadata", "map_variables", "custom_vjp", "custom_jvp")  # when called eagerly


@pytest.mark.parametrize("name", [*EAGER, *LOOPS])
def test_a_write_to_what_is_captured(name: str) -> None:
    """nnx.jit takes it as if it had been passed; elsewhere the write is refused before it happens."""
    outside = Part(1.0)
    transform = {**EAGER, **LOOPS}[name]

    def write(m: Any, other: Any, x: Any) -> Any:
        m.left.w.value = m.left.w + 1.0
        outside.w.value = outside.w + 1.0
        return (x + 1.0,)

    args = arguments("value")
    before = Snapshot(outside, *args)
    if name in ("jit", *UNTRACED):
        transform(write)(*args)
        assert outside.w.value[0, 0, 0] == 2.0
        assert args[0].left.w.value[0, 0, 0] == 2.0
    else:
        with pytest.raises(TraceContextError):
            transform(write)(*args)
        before.assert_unchanged()
    nnx.jit(transform(lambda m, other, x: (x + outside.w,)))(*args)
    assert_no_tracer(outside, args)


@pytest.mark.parametrize("name", [*EAGER, *LOOPS])
def test_no_leaks_seen_by_jax(name: str) -> None:
    """The crossing holds on to no tracer, also where a function failed."""
    with jax.checking_leaks():
        for change, fail in (("value", None), ("cyclic", "end")):
            check(name, "in jit", change, fail)
