"""What a transform may be given as a function is taken apart into a function and its arguments."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from nnxlib.core.static import StaticArgument
from nnxlib.transforms.callables import resolve


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return self.w * x

    def method(self, x, by):
        return by * self(x)


def shown(f):
    """What resolve finds, with static values unwrapped."""
    function, args, kwargs = resolve(f)
    show = lambda x: ("static", x.value) if isinstance(x, StaticArgument) else x
    return function, tuple(map(show, args)), {k: show(v) for k, v in kwargs.items()}


def test_resolve():
    """Partials, bound methods and callable Modules come apart; what holds data is an argument, the rest is static."""
    layer, f = Layer(), lambda *args, **kwargs: None
    assert shown(f) == (f, (), {})
    assert shown(Layer) == (Layer, (), {})
    assert shown(layer.method) == (Layer.method, (layer,), {})
    assert shown(layer) == (Layer.__call__, (layer,), {})
    assert shown(functools.partial(layer.method, by=2)) == (Layer.method, (layer,), {"by": ("static", 2)})
    nested = functools.partial(functools.partial(f, 1, k=layer), layer, k="later", n=[layer])
    assert shown(nested) == (f, (("static", 1), layer), {"k": ("static", "later"), "n": [layer]})


def test_methods_of_other_objects_stay_as_they_are():
    """A method bound to something that is no node is a function like any other."""
    method = "x".join
    assert shown(method) == (method, (), {})


def test_a_node_that_cannot_be_called():
    """It says so, and what to do."""
    with pytest.raises(errors.ArgumentError, match=r"A Dict cannot be called; give its class a method __call__"):
        resolve(nnx.Dict(a=1))


class Trainer(nnx.Module):
    """Its methods are given what it holds."""

    def __init__(self):
        self.layer, self.scale, self.calls = Layer(), 3.0, nnx.Variable(jnp.array(0))
        self.stack = nnx.vmap(lambda w: nnx.Dict(w=nnx.Param(w)))(jnp.array([[1.0, 2.0], [3.0, 4.0]]))

    def loss(self, layer, x):
        return (self.scale * layer(x) * self.layer(x)).sum()

    def one(self, part, x):
        return part["w"] * x + self.stack["w"].sum()

    def step(self, x, part):
        return part["w"] * x + self.stack["w"][0], self.scale

    def counted(self, layer, x):
        self.calls += 1
        return layer(x).sum()


@pytest.mark.parametrize("form", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("partial", [False, True], ids=["method", "partial"])
def test_what_is_bound_may_hold_an_argument_that_is_treated_otherwise(form, partial):
    """It is seen as by a closure then: whole and constant. JAX itself treats a bound method so."""

    def bound(name):
        return lambda t: functools.partial(getattr(Trainer, name), t) if partial else getattr(t, name)

    x, trainer = jnp.array([1.0, 2.0]), Trainer()
    value, grads = form(lambda t, x: nnx.value_and_grad(bound("loss")(t))(t.layer, x))(trainer, x)
    assert (value.item(), grads.w.value.tolist()) == (15.0, [3.0, 12.0])
    value, grads = form(lambda t, x: nnx.value_and_grad(bound("loss")(t))(layer=t.layer, x=x))(trainer, x)
    assert grads.w.value.tolist() == [3.0, 12.0]
    mapped = form(lambda t, x: nnx.vmap(bound("one")(t), in_axes=(0, None))(t.stack, x))(trainer, x)
    assert mapped.tolist() == [[11.0, 14.0], [13.0, 18.0]]
    scan = lambda f: nnx.scan(f, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    final, scales = form(lambda t, x: scan(bound("step")(t))(x, t.stack))(trainer, x)
    assert (final.tolist(), scales.tolist()) == ([7.0, 26.0], [3.0, 3.0])


def test_what_is_bound_is_written_unless_it_holds_an_argument_that_is_treated_otherwise():
    """A closure cannot be written to; nothing is lost."""
    x, trainer = jnp.ones(2), Trainer()
    nnx.grad(trainer.counted)(Layer(), x)
    assert trainer.calls.value.item() == 1
    with pytest.raises(errors.TraceContextError, match=r"calls"):
        nnx.grad(trainer.counted)(trainer.layer, x)
    assert trainer.calls.value.item() == 1
    assert nnx.remat(trainer.counted)(trainer.layer, x).item() == 2.0  # treated alike
    assert trainer.calls.value.item() == 2


def test_arguments_that_share_under_two_prefixes_are_refused_also_for_a_bound_method():
    """The error counts the arguments of the call."""

    class Two(nnx.Module):
        def f(self, a, b):
            return a["w"] + b["w"]

    part = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    with pytest.raises(errors.AliasingError, match=r"args\[0\]\.w: 0, but args\[1\]\.w: None"):
        nnx.vmap(Two().f, in_axes=(0, None))(part, part)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Settings:
    """A pytree whose leaves are an array, a Module, and what is no data."""

    scale: Any
    size: Any
    parts: Any

    def __post_init__(self):
        assert isinstance(self.size, int)  # also where it is rebuilt


def apply(*x, settings):
    layer, names = settings.parts["layer"], settings.parts["names"]
    if names[1]:
        layer.calls += jnp.ones(settings.size).sum()
    return settings.scale * layer(x[-1]) + len(names[0])


X = jnp.array([1.0, 2.0])
CALLS = {  # each calls a function of one argument once, on X
    "jit": lambda f: nnx.jit(f)(X),
    "jit within jit": lambda f: nnx.jit(lambda x: nnx.jit(f)(x))(X),
    "remat": lambda f: nnx.remat(f)(X),
    "checkify": lambda f: nnx.checkify(f)(X)[1],
    "vmap": lambda f: nnx.vmap(f, axis_size=1, in_axes=None)(X)[0],
    "scan": lambda f: nnx.scan(f, in_axes=nnx.Carry, out_axes=nnx.Carry, length=1)(X),
    "cond": lambda f: nnx.cond(True, f, f, X),
    "while": lambda f: nnx.while_loop(functools.partial(lambda end, x: x[0] < end, 2.0), f, X),
    "fori": lambda f: nnx.fori_loop(0, 1, f, X),
    "vjp": lambda f: nnx.vjp(f, X)[0],
    "jvp": lambda f: nnx.jvp(f, (X,), (X,))[0],
    "make_jaxpr": lambda f: nnx.make_jaxpr(f, return_shape=True)(X)[1],
    "eval_shape": lambda f: nnx.eval_shape(f, X),
}


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize("by", ["position", "name"])
def test_of_a_bound_pytree_only_the_data_is_traced(way, by):
    """Numbers and strings in it are part of the program, as in a closure; a Module in it is written."""
    layer = Layer()
    layer.calls = nnx.Variable(jnp.array(0.0))
    settings = Settings(jnp.array(3.0), 2, {"layer": layer, "names": ["ab", way != "scan"]})
    first = lambda settings, *x: apply(*x, settings=settings)
    bound = functools.partial(first, settings) if by == "position" else functools.partial(apply, settings=settings)
    out = CALLS[way](bound)
    assert out.shape == (2,)
    if way not in ("make_jaxpr", "eval_shape"):
        assert out.tolist() == [5.0, 8.0]
        assert layer.calls == (0.0 if way == "scan" else 2.0)  # scan refuses it


def test_settings_in_a_bound_pytree_are_seen_as_they_are_at_each_call():
    """A change of one is another program; arrays are read anew, and an error names them by their path."""
    settings = {"size": 2, "scale": jnp.array(3.0), "inner": [jnp.array(1.0), "ab"]}
    traced = []

    def f(settings, x):
        traced.append(settings["size"])
        return settings["scale"] * x + jnp.ones(settings["size"]) + settings["inner"][0]

    jitted = nnx.jit(functools.partial(f, settings))
    assert jitted(X).tolist() == jitted(X).tolist() == [5.0, 8.0]
    settings["scale"] = jnp.array(1.0)
    assert jitted(X).tolist() == [3.0, 4.0]
    assert traced == [2]
    settings["size"] = 1
    assert jitted(X).tolist() == [3.0, 4.0]
    assert traced == [2, 1]
    settings["inner"][1] = "abc"
    assert jitted(X).tolist() == [3.0, 4.0]
    assert traced == [2, 1, 1]
    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"argument args\[0\]\.inner\[0\]"):
        nnx.jit(functools.partial(lambda settings, x: jnp.ones(int(settings["inner"][0])), settings))(X)


@pytest.mark.parametrize(
    "transform", [nnx.jit, nnx.grad, nnx.vmap, nnx.scan, nnx.remat, nnx.eval_shape, lambda f: nnx.cond(True, f, f)]
)
def test_what_cannot_be_called(transform):
    """A value, mostly that of a function that was called too early."""
    with pytest.raises(
        TypeError, match=r"transform takes a function, but got float32\[2\]\. .* not nnx\.grad\(f\(x\)\)"
    ):
        transform(jnp.ones(2))


@pytest.mark.skipif(not hasattr(functools, "Placeholder"), reason="partials leave places from Python 3.14 on")
def test_a_partial_that_leaves_places():
    """A function that closes over what it holds: a step sees Modules as they are at each call, and changes them."""
    place, layer, x = functools.Placeholder, Layer(), jnp.ones(2)
    f = functools.partial(lambda x, layer, by: (by * layer(x)).sum(), place, layer)
    assert resolve(f) == (f, (), {})
    assert resolve(functools.partial(f, x, 3.0))[1][1] is layer  # now nothing is missing between its arguments
    assert f(x, 3.0) == nnx.jit(f)(x, 3.0) == nnx.remat(f)(x, 3.0) == nnx.value_and_grad(f)(x, 3.0)[0] == 6.0
    assert nnx.vmap(f, in_axes=(0, None))(x, 3.0).shape == (2,)
    assert nnx.jit(f, static_argnums=1)(x, 3.0) == 6.0

    def count(x, layer):
        layer.w[...] += x

    step = nnx.jit(functools.partial(count, place, layer))
    step(1.0)
    step(1.0)
    assert layer.w.tolist() == [3.0, 3.0]
    assert f(x, 1.0) == nnx.jit(f)(x, 1.0) == 6.0
