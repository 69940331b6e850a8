"""Functions of arrays alone: the transforms of nnxlib give what those of JAX give, whose place they take in code."""

import functools
import inspect
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors

X = jnp.array([1.0, 2.0])
ZERO = np.zeros((), jax.dtypes.float0)


def both(x):
    return jnp.sin(x), jnp.floor(x).astype(int)


def with_rule(transforms, f, rule, **options):
    made = (transforms if callable(transforms) else transforms.custom_jvp)(f, **options)
    made.defjvp(rule)
    return made


def with_backward(transforms, f, forward, backward, rules=None, **options):
    """With a rule as JAX has it, given the gradient of the output alone."""
    made = transforms.custom_vjp(f, **options)
    ours = lambda *args: backward(*args[:-1], args[-1][1])
    made.defvjp(forward, backward if transforms is jax else ours, **(rules or {}))
    return made


def with_symbols(transforms):
    """Gradients of rules that are told which tangents are zero, and what they were told."""
    told, is_zero = [], lambda x: type(x) is jax.custom_derivatives.SymbolicZero

    def forward(x, y):
        told.append([x.perturbed, y.perturbed])
        return (x.value * y.value, y.value), y.value

    def backward(y, gradients):
        told.append([*map(is_zero, gradients)])
        return gradients[0] * y, gradients[1]

    def rule(primals, tangents):
        told.append([*map(is_zero, tangents)])
        return primals[0] * primals[1], tangents[0]

    symbols = {"symbolic_zeros": True}
    f = with_backward(transforms, lambda x, y: (x * y, y), forward, backward, symbols)
    g = transforms.custom_jvp(lambda x, y: x * y)
    g.defjvp(rule, **symbols)
    out = [transforms.grad(lambda x, y: f(x, y)[0])(2.0, 3.0), transforms.grad(lambda x: f(x, 1.0)[0])(2.0)]
    return *out, transforms.grad(g)(2.0, 3.0), jax.jit(jax.vmap(transforms.grad(g)))(X, X), told


class Own(list):
    """A pytree that refuses to be made of None."""


def own(_, parts):
    assert None not in parts
    return Own(parts)


jax.tree_util.register_pytree_node(Own, lambda x: (x, None), own)


def barriers(transforms, **options):
    """How many arrays are kept from the compiler, with the gradient."""
    f = transforms.grad(transforms.remat(lambda x, d: jnp.sin(jnp.sin(x) * d["y"]).sum(), **options))
    text = jax.jit(f).lower(X, {"y": X}).as_text()
    return f(X, {"y": X}), re.findall("optimization_barrier .*", text)


def traced(transforms, *args, **kwargs):
    """Which arguments of a jitted function are traced."""
    seen = []
    f = lambda x, y: seen.extend(isinstance(a, jax.core.Tracer) for a in (x, y))
    transforms.jit(f, static_argnums=1, static_argnames="x")(*args, **kwargs)
    return seen


def exported(transforms, *args, **kwargs):
    made = jax.export.export(transforms.jit(lambda d, y=1.0: {"a": d["q"] * y, "b": (d["q"], None)}))(*args, **kwargs)
    return made.call(*args, **kwargs)


def linearized(transforms, f, x, *tangents):
    out, push = transforms.linearize(f, x)
    return out, push(*tangents)


def of_lax(transforms):
    return jax.lax if transforms is jax else transforms


def compiled(transforms):
    step = transforms.jit(lambda d, n, *, by: {"a": d["q"] * by * n, "b": (d["q"], None)}, static_argnums=1)
    return step.lower({"q": X}, 2, by=3.0)


EXPRESSIONS = {
    "jvp, an integer output": lambda t: t.jvp(both, (X,), (X,)),
    "jvp, other outputs": lambda t: t.jvp(lambda x: (x, 3, True, None), (X,), (X,)),
    "jvp, an integer argument": lambda t: t.jvp(lambda x, n: (x * n, n), (X, 2), (X, ZERO)),
    "jvp, a key": lambda t: t.jvp(lambda x: (x, jax.random.key(0)), (X,), (X,))[1],
    "jvp, float64 of NumPy": lambda t: t.jvp(jnp.sin, (X,), (np.ones(2),)),
    "jvp as a rule of JAX": lambda t: jax.jvp(with_rule(jax, both, lambda *args: t.jvp(both, *args)), (X,), (X,)),
    "vjp, float64 of NumPy": lambda t: t.vjp(jnp.sin, X)[1](np.ones(2)),
    "vjp, weak": lambda t: t.vjp(jnp.sin, 2.0)[1](1.0),
    "linearize, float64 of NumPy": lambda t: linearized(t, jnp.sin, X, np.ones(2)),
    "linearize, weak": lambda t: linearized(t, jnp.sin, 2.0, 1.0),
    "linearize, an integer output": lambda t: linearized(t, both, X, X),
    "jacfwd, text": lambda t: t.jacfwd(lambda x, s: x * len(s))(X, "two"),
    "jacrev, text by name": lambda t: t.jacrev(lambda x, s: x * len(s))(X, s="two"),
    "hessian, a function": lambda t: t.hessian(lambda x, f: f(x))(2.0, jnp.sin),
    "custom_jvp, an integer": lambda t: t.grad(
        with_rule(t, lambda x, n: x * n, lambda p, dots: (p[0] * p[1], dots[0] * (dots[1].dtype == ZERO.dtype)))
    )(2.0, 3),
    "custom_jvp, nondiff_argnames": lambda t: t.grad(
        with_rule(t, lambda x, n: x, lambda n, p, dots: (p[0], dots[0] * n), nondiff_argnames=["n"])
    )(2.0, 3),
    "custom_vjp, nondiff_argnames": lambda t: t.grad(
        with_backward(t, lambda f, x: f(x), lambda f, x: (f(x), x), lambda f, x, g: (g * f(x),), nondiff_argnames="f"),
        argnums=1,
    )(jnp.sin, 2.0),
    "custom_vjp, an integer output": lambda t: t.grad(
        lambda x: with_backward(t, both, lambda x: (both(x), None), lambda _, g: (g[0] * (g[1].dtype == ZERO.dtype),))(
            x
        )[0]
    )(2.0),
    "custom_vjp, optimize_remat": lambda t: jax.jit(
        t.value_and_grad(
            with_backward(t, jnp.sin, lambda x: (jnp.sin(x), x), lambda x, g: (g * x,), {"optimize_remat": True})
        )
    )(2.0),
    "options of grad by position": lambda t: t.grad(lambda x, y: (x * y * y, 3), (0, 1), True)(2.0, 3.0),
    "options of value_and_grad by position": lambda t: t.value_and_grad(lambda x, y: x * y, 1)(2.0, 3.0),
    "options of vmap by position": lambda t: t.vmap(lambda x, y: (x * y, x), (0, None), (1, 0))(X, X),
    "options of jacfwd by position": lambda t: t.jacfwd(lambda x, y: x * y, 1)(X, X),
    "options of jacrev by position": lambda t: t.jacrev(lambda x, y: x * y, (0, 1))(X, X),
    "options of hessian by position": lambda t: t.hessian(lambda x, y: (x * y * y).sum(), 1)(X, X),
    "options of make_jaxpr by position": lambda t: str(t.make_jaxpr(lambda x, n: x * n, 1)(X, 2)),
    "options of custom_jvp by position": lambda t: t.grad(
        with_rule(lambda f: t.custom_jvp(f, (1,)), lambda x, n: x, lambda n, p, dots: (p[0], dots[0] * n))
    )(2.0, 3),
    "options of pmap by position": lambda t: t.pmap(lambda x: jax.lax.psum(x, "i"), "i")(X[:1]),
    "cond, an operand by name": lambda t: of_lax(t).cond(True, lambda x: 2 * x, lambda x: x, operand=X),
    "cond, None by name": lambda t: of_lax(t).cond(False, lambda _: X, lambda _: 2 * X, operand=None),
    "cond, an operand for each branch": lambda t: of_lax(t).cond(X[0] > 0, X, lambda x: 2 * x, (X, 1), lambda x: x[0]),
    "switch, an operand by name": lambda t: of_lax(t).switch(1, [lambda x: x, lambda x: 2 * x], operand=X),
    "cond, a weak type and an array": lambda t: of_lax(t).cond(X[0] > 0, lambda: jnp.float32(1), lambda: 2.0),
    "switch, an array and a weak type": lambda t: of_lax(t).switch(1, [lambda: jnp.float32(1), lambda: 2.0]),
    "custom_jvp of a partial": lambda t: t.grad(
        with_rule(t, functools.partial(lambda x, y, by: x * y * by, by=2.0), lambda p, dots: (p[0], dots[0] * p[1]))
    )(2.0, 3.0),
    "custom_vjp, a gradient of another width": lambda t: t.grad(
        with_backward(t, jnp.sin, lambda x: (x, None), lambda _, g: (g.astype(jnp.bfloat16),))
    )(jnp.float32(2)),
    "custom_vjp, a list of its own class": lambda t: t.grad(
        with_backward(t, lambda x: x[0], lambda x: (x[0], None), lambda _, g: (Own([g]),))
    )(Own([2.0])),
    "symbolic_zeros": with_symbols,
    "remat, prevent_cse of each argument": lambda t: [
        barriers(t, prevent_cse=cse) for cse in (True, (True, False), (False, {"y": True}), [False, False], False)
    ],
    "static_argnums and static_argnames": lambda t: [traced(t, 1, y=2), traced(t, 1, 2), traced(t, x=1, y=2)],
    "export": lambda t: exported(t, {"q": X}, 2.0),
    "export, by name": lambda t: exported(t, {"q": X}, y=2.0),
    "attributes": lambda t: [(w.__wrapped__.__name__, w.kept) for w in (getattr(t, n)(kept) for n in TRANSFORMS)],
    "__wrapped__": lambda t: [getattr(t, name)(kept).__wrapped__ is kept for name in TRANSFORMS],
}
TRANSFORMS = ["jit", "grad", "value_and_grad", "vmap", "checkpoint", "jacfwd", "jacrev", "named_call"]


def kept(x):
    return x


kept.kept = 3


def described(x):
    """Type, dtype and values of the leaves, and the structure."""
    return jax.tree.structure(x), [
        (x.aval if isinstance(x, jax.Array) else type(x), np.shape(x), None if x.dtype == ZERO.dtype else data(x))
        if isinstance(x, jax.Array | np.ndarray)
        else x
        for x in jax.tree.leaves(x)
    ]


def data(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tolist()


@pytest.mark.parametrize("case", EXPRESSIONS)
def test_values_are_those_of_jax(case):
    """Also their dtypes and weak types, and float0 for tangents of integers."""
    assert described(EXPRESSIONS[case](nnx)) == described(EXPRESSIONS[case](jax))


@pytest.mark.parametrize("name", ["args_info", "in_avals", "in_tree", "out_info", "out_tree"])
def test_a_lowered_function_describes_arguments_and_output(name):
    """As pytrees, and without what is static."""
    assert str(getattr(compiled(nnx), name)) == str(getattr(compiled(jax), name))


@pytest.mark.parametrize("name", ["input_formats", "input_shardings", "output_formats", "output_shardings"])
def test_a_compiled_function_describes_arguments_and_output(name):
    assert str(getattr(compiled(nnx).compile(), name)) == str(getattr(compiled(jax).compile(), name))


def test_a_traced_function_describes_its_output():
    ours, theirs = (t.jit(lambda x: {"a": (x, None), "b": 2 * x}).trace(X) for t in (nnx, jax))
    assert getattr(ours, "out_avals", None) == getattr(theirs, "out_avals", None)


def test_outputs_with_shardings_are_described_in_their_order():
    """They come back by sharding."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    jitted = nnx.jit(lambda x: {"a": x, "b": x[0], "c": x[:1]}, out_shardings={"a": None, "b": place, "c": None})
    assert {name: x.shape for name, x in jitted.lower(X).out_info.items()} == {"a": (2,), "b": (), "c": (1,)}


def test_a_module_that_is_made_is_described():
    info = nnx.jit(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key))).lower(jax.random.key(0)).out_info
    assert info.kernel.shape == (2, 3)


WRONG = {
    "another shape": lambda t: t.vjp(jnp.sin, X)[1](1.0),
    "another structure": lambda t: t.vjp(jnp.sin, X)[1]((X,)),
    "complex": lambda t: t.vjp(jnp.sin, 2.0)[1](1j),
    "no such argument": lambda t: t.grad(jnp.sin, argnums=1)(2.0),
    "in_axes that are none": lambda t: t.vmap(jnp.sin, in_axes="a"),
    "operands by position and by name": lambda t: of_lax(t).cond(True, lambda x: x, lambda x: x, X, operand=X),
    "a static array": lambda t: t.jit(lambda x: x, static_argnums=0)(X),
    "static and donated": lambda t: t.jit(lambda x: x, static_argnums=0, donate_argnums=0),
    "an integer that is too large": lambda t: t.jit(lambda x: x)({"a": 2**100}),
    "a carry that is too large": lambda t: of_lax(t).while_loop(lambda x: False, lambda x: x, 2**100),
    "a result that is too large": lambda t: t.jit(lambda x: 2**100)(1),
    "the name of *args": lambda t: t.jit(lambda x, *args: x, static_argnames="args"),
    "static and donated, by name": lambda t: t.jit(lambda x: x, static_argnums=0, donate_argnames="x"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_also_those_of_jax(case):
    """So that `except ValueError` and `except TypeError` that were written for JAX keep working."""
    with pytest.raises(Exception) as raised:
        WRONG[case](jax)
    kind = next(kind for kind in raised.type.__mro__ if kind.__module__ == "builtins")
    with pytest.raises(kind) as ours:
        WRONG[case](nnx)
    assert isinstance(ours.value, nnx.errors.NnxError)


def test_a_gradient_given_for_integers_is_ignored():
    """Of an output that is an array, or in a Module."""
    zeros = lambda out: jax.tree.map(jnp.zeros_like, out)
    out, pull = nnx.vjp(both, X)
    assert pull(zeros(out))[0].tolist() == [0, 0]
    counter = nnx.vjp(lambda x: nnx.Dict(x=nnx.Param(x), calls=nnx.Variable(jnp.array(0))), X)
    assert counter[1](zeros(nnx.state(counter[0])))[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    "argument", [X, np.ones(2), nnx.Dict(x=nnx.Param(X)), {"a": X}], ids=["jax", "numpy", "node", "dict"]
)
def test_an_argument_of_the_function_in_place_of_an_option(argument):
    """It is refused at once."""
    for transform in nnx.grad, nnx.vmap, nnx.jit, nnx.jacfwd:
        with pytest.raises(errors.ArgumentError, match=r"returns a function, which takes the arguments: write nnx\."):
            transform(lambda x: x, argument)


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_an_error_in_a_function_with_a_rule_names_that_function(kind):
    """Not a function of nnxlib."""

    def decides(x):
        return x if x > 0 else -x

    made = getattr(nnx, kind)(decides)
    made.defjvp(decides) if kind == "custom_jvp" else made.defvjp(decides, decides)
    with pytest.raises(jax.errors.TracerBoolConversionError, match="while tracing the function decides at"):
        jax.jit(made)(2.0)


def test_any_name_of_an_argument():
    """Also one that a function of nnxlib has for an argument of its own."""
    f = lambda self, f, fun, args, kwargs: self * f * fun * args * kwargs
    named = dict.fromkeys(["self", "f", "fun", "args", "kwargs"], X)
    transforms = (
        nnx.jit,
        nnx.vmap,
        nnx.remat,
        nnx.named_call,
        nnx.lift(jax.jit),
        lambda f: nnx.jit(f).lower(**named).compile(),
    )
    for transform in transforms:
        assert transform(f)(**named).tolist() == [1, 32]
    assert nnx.jit(f).eval_shape(**named) == nnx.jit(f).trace(**named).out_info


def test_signature_and_attributes_of_wrapped_functions():
    """Private attributes of a function stay its own: nnxlib keeps programs there, which belong to one function."""

    def f(x, *, y=1):
        return x

    f.public, f._private, f.lower = 1, 2, 3
    for made in nnx.vmap(f), nnx.jit(f):
        assert str(inspect.signature(made)) == "(x, *, y=1)"
        assert made.public == 1
        assert not hasattr(made, "_private")
    assert isinstance(made.lower, types.MethodType)
