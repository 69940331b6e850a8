"""nnx.grad and nnx.value_and_grad: which leaves, what comes back, what changes on the way, errors."""

import dataclasses
import functools
import inspect
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from tests.properties.compare import assert_same, objects_in

X = jnp.array([2.0, 3.0])


class Layer(nnx.Module):
    def __init__(self, value=1.0):
        self.w = nnx.Param(jnp.full(2, value))
        self.b = nnx.Param(jnp.zeros(2), tag="bias")
        self.stat = nnx.BatchStat(jnp.ones(2))
        self.calls = nnx.Cache(jnp.zeros((), jnp.int32))
        self.array = jnp.ones(2)

    def __call__(self, x):
        self.calls += 1
        self.stat.value = jax.lax.stop_gradient(0.5 * self.stat + x)
        return self.w * x * self.array + self.b

    def loss(self, x, by=1.0):
        return by * self(x).sum()


def loss(m, x):
    return m(x).sum()


def shown(grads):
    """Gradients as built-in types: Variables as (type name, list)."""
    show = lambda g: (
        (type(g).__name__, np.asarray(g.value).tolist()) if isinstance(g, nnx.Variable) else np.asarray(g).tolist()
    )
    return jax.tree.map(show, _plain(grads), is_leaf=lambda x: isinstance(x, nnx.Variable))


def _plain(x):
    if isinstance(x, nnx.State):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    return type(x)(map(_plain, x)) if type(x) in (tuple, list) else x


W = {"w": ("Param", [2, 3]), "b": ("Param", [1, 1])}


# --- which leaves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [
        (0, W),
        (1, [1, 1]),
        (-1, [1, 1]),
        (-2, W),
        ((0, 1), (W, [1, 1])),
        ((1, 0), ([1, 1], W)),
        ([0], (W,)),
        (nnx.DiffState(0, "bias"), {"b": W["b"]}),
        (nnx.DiffState(-2, nnx.PathContains("w")), {"w": W["w"]}),
        (nnx.DiffState(0, nnx.All(nnx.Param, nnx.Not("bias"))), {"w": W["w"]}),
        (nnx.DiffState(0, (nnx.PathContains("b"), nnx.PathContains("w"))), W),
        (nnx.DiffState(0, nnx.PathContains("array")), {"array": [2, 3]}),
        (nnx.DiffState(0, nnx.BatchStat), {"stat": ("BatchStat", [0, 0])}),
        (nnx.DiffState(1, ...), [1, 1]),
        ((nnx.DiffState(0, "bias"), 1), ({"b": W["b"]}, [1, 1])),
    ],
)
def test_argnums(argnums, expected):
    """Numbers from either end, DiffStates, one or several: a State for a Module, an array for an array, in order."""
    assert shown(nnx.grad(loss, argnums=argnums)(Layer(), X)) == expected
    value, grads = nnx.value_and_grad(loss, argnums=argnums)(Layer(), X)
    assert (value.item(), shown(grads)) == (5.0, expected)


def test_a_number_of_numpy_chooses_one_argument():
    """It is no sequence, so the gradient is not in a tuple."""
    f = lambda x, y: (x * y).sum()
    for argnums in (np.int64(1), np.int32(-1)):
        assert nnx.grad(f, argnums=argnums)(jnp.arange(3.0), jnp.ones(3)).tolist() == [0.0, 1.0, 2.0]


def test_gradients_are_states_of_variables_of_the_same_type_and_metadata():
    """A gradient carries the type and metadata of its Variable, so that an optimizer and filters can use it."""
    grads = nnx.grad(loss)(Layer(), X)
    assert isinstance(grads, nnx.State)
    assert (type(grads.b), grads.b.tag, list(nnx.filter_state(grads, "bias"))) == (nnx.Param, "bias", ["b"])


def test_filters_by_path_in_a_pytree_of_modules():
    """They see paths from the argument down, as those of ``state`` and of an optimizer do."""
    models = {"a": Layer(), "b": Layer(2.0)}
    only = nnx.All(nnx.Param, lambda path, x: path[0] == "b")
    grads = nnx.grad(lambda m: loss(m["a"], X) + loss(m["b"], X), argnums=nnx.DiffState(0, only))(models)
    assert shown(grads) == {"a": {}, "b": W}
    assert set(nnx.state(models, only)) == {"b"}


def test_modules_inside_pytrees():
    """A differentiated argument that is a pytree gives the same pytree, with a State in place of each Module."""
    tree = {"m": Layer(), "x": X, "deep": (nnx.Param(X), [Layer(2.0)], None)}
    grads = nnx.grad(lambda t: (t["m"](t["x"]) * t["deep"][1][0](t["deep"][0])).sum())(tree)
    assert set(grads) == {"m", "x", "deep"}
    assert shown(grads["m"]) == {"w": ("Param", [8, 18]), "b": ("Param", [4, 6])}
    assert shown(grads["deep"]) == (("Param", [4, 6]), [{"w": ("Param", [4, 9]), "b": ("Param", [2, 3])}], None)


def test_variables_and_states_as_arguments():
    """A Variable of any type is differentiated, and a State leaf by leaf."""
    assert shown(nnx.grad(lambda v: (v * X).sum())(nnx.BatchStat(X))) == ("BatchStat", [2, 3])
    state = nnx.state(Layer(), nnx.Param)
    assert shown(nnx.grad(lambda s: (s["w"] * X + s.b).sum())(state)) == W
    graphdef, params, rest = nnx.split(Layer(), nnx.Param, ...)
    assert shown(nnx.grad(lambda p: loss(nnx.merge(graphdef, p, rest), X))(params)) == W


def test_keyword_arguments_are_not_differentiated():
    """Modules passed by keyword are not, but their changes come out."""
    layer, other = Layer(), Layer(3.0)
    grads = nnx.grad(lambda m, *, other, x: (m(x) * other(x)).sum())(layer, other=other, x=X)
    assert shown(grads)["b"] == ("Param", [6, 9])
    assert (int(layer.calls), int(other.calls)) == (1, 1)


def test_shared_modules_and_variables():
    """A shared Variable is one leaf: its gradient is the sum over its uses, under its first path."""
    layer = Layer()
    tied = nnx.List([layer, layer])
    grads = nnx.grad(lambda ms, x: ms[1](ms[0](x)).sum())(tied, X)
    assert list(grads) == [0]
    raw = jax.grad(lambda w, b: (w * (w * X + b) + b).sum(), (0, 1))(jnp.ones(2), jnp.zeros(2))
    np.testing.assert_array_equal(grads[0].w, raw[0])
    np.testing.assert_array_equal(grads[0].b, raw[1])
    first, second = nnx.grad(lambda a, b: (a.w + 2 * b.w).sum(), argnums=(0, 1))(layer, layer)
    assert shown(first)["w"] == ("Param", [3, 3])
    assert dict(second) == {}


def test_a_module_shared_with_an_argument_that_is_not_differentiated():
    """Differentiating one path and not the other is an error that names both."""
    layer = Layer()
    with pytest.raises(errors.AliasingError, match=r"args\[0\]\.\w+.*args\[1\]\.\w+.*Give both the same prefix"):
        nnx.grad(lambda a, b: loss(a, X))(layer, layer)
    with pytest.raises(errors.AliasingError, match=r"args\[0\]\.w: differentiated, but args\[1\]\[0\]\.w: rest"):
        nnx.grad(lambda a, b: loss(a, X), argnums=nnx.DiffState(0, nnx.PathContains("w")))(layer, nnx.List([layer]))
    assert_same(layer, Layer())


def test_cycles():
    """A model that refers to itself has one State, by first paths."""
    layer = Layer()
    layer.me = layer
    assert shown(nnx.grad(lambda m, x: m.me.me(x).sum())(layer, X)) == W


def test_frozen_parts_cost_nothing():
    """What is not differentiated reaches the function as it is, not as a tracer."""
    seen = []
    nnx.grad(lambda m, x: seen.append((m.w.value, m.stat.value, x)) or loss(m, x))(Layer(), X)
    assert [isinstance(v, jax.core.Tracer) for v in seen[0]] == [True, False, False]


# --- forms ----------------------------------------------------------------------------------------------------------


def test_decorators_and_callables():
    """With and without parentheses, on functions, methods, partials, bound methods and callable Modules."""

    @nnx.grad
    def plain(m, x):
        return loss(m, x)

    @nnx.grad(argnums=1)
    def second(m, x):
        return loss(m, x)

    @nnx.value_and_grad(has_aux=True)
    def both(m, x):
        return loss(m, x), x

    class Trained(Layer):
        @nnx.grad
        def decorated(self, x):
            return self.loss(x)

    layer = Trained()
    assert shown(plain(layer, X)) == shown(layer.decorated(X)) == shown(Trained.decorated(layer, X)) == W
    assert shown(second(layer, X)) == [1, 1]
    assert shown(both(layer, X)[1]) == W
    assert shown(nnx.grad(Layer.loss)(layer, X)) == W
    assert shown(nnx.grad(functools.partial(Layer.loss, by=2.0))(layer, X))["b"] == ("Param", [2, 2])
    assert int(layer.calls) == 7


def test_bound_methods_and_callable_modules():
    """Of a bound method the arguments of the call are numbered, as in jax.grad; `self` is written all the same."""

    class Scalar(Layer):
        def __call__(self, x):
            return super().__call__(x).sum()

    layer = Scalar()
    assert shown(nnx.grad(layer)(X)) == shown(nnx.grad(layer.__call__)(X)) == [1, 1]
    assert shown(nnx.grad(functools.partial(lambda m, x: m(x), layer))(X)) == [1, 1]
    assert int(layer.calls) == 3
    with pytest.raises(errors.PrefixError, match="argnums has 1, but the function was called with 1 positional"):
        nnx.grad(layer, argnums=1)(X)


@pytest.mark.parametrize(
    "argnums", [0, 1, (0, 1), -1, nnx.DiffState(0, "bias")], ids=["0", "1", "both", "last", "bias"]
)
def test_arguments_passed_by_name_have_the_position_of_their_parameter(argnums):
    """argnums means the same parameters, whether the call names them or not; the rest may be named, too."""

    def loss(m, x, *, by=1.0):
        return m.loss(x, by)

    expected = nnx.grad(loss, argnums=argnums)(Layer(), X, by=2.0)
    layer = Layer()
    assert_same(nnx.grad(loss, argnums=argnums)(x=X, m=layer, by=2.0), expected)
    assert_same(nnx.grad(loss, argnums=argnums)(Layer(), by=2.0, x=X), expected)
    assert int(layer.calls) == 1


def test_names_and_signatures():
    """The wrappers look like what they wrap."""
    for wrapped in (nnx.grad(loss), nnx.value_and_grad(loss), nnx.grad(loss, has_aux=True)):
        assert wrapped.__name__ == "loss"
        assert str(inspect.signature(wrapped)) == "(m, x)"


# --- values, aux, changes -------------------------------------------------------------------------------------------


def test_aux():
    """has_aux: grad gives (grads, aux), value_and_grad ((value, aux), grads); aux may hold Modules and any value."""
    layer = Layer()

    def f(m, x):
        m.new = Layer(5.0)
        return loss(m, x), {"m": m, "new": m.new, "text": "any", "y": 2 * x, "none": None}

    (value, aux), grads = nnx.value_and_grad(f, has_aux=True)(layer, X)
    assert (value.item(), aux["text"], aux["none"], aux["y"].tolist()) == (5.0, "any", None, [4, 6])
    assert aux["m"] is layer
    assert aux["new"] is layer.new
    assert shown(grads) == W
    other, aux = nnx.grad(f, has_aux=True)(layer, X)
    assert shown(other)["w"] == W["w"]
    assert aux["new"] is layer.new


def test_aux_of_a_class_that_jax_does_not_know():
    """It comes out as it is, so a tracer in it does, too; that is a warning, with what to do."""

    @dataclasses.dataclass
    class Out:
        y: Any

    held, registered = Out(X), jax.tree_util.register_dataclass(dataclasses.make_dataclass("Registered", ["y"]))
    for run in (lambda f: nnx.grad(f, has_aux=True)(Layer()), lambda f: nnx.vjp(f, Layer())):
        run(lambda m: (loss(m, X), held))
        run(lambda m: (loss(m, X), registered(m(X))))
        with pytest.warns(UserWarning, match=r"<output>.* is set to a Out, .*register_dataclass"):
            run(lambda m: (loss(m, X), Out(m(X))))
    with pytest.raises(errors.OutputError, match="register_dataclass"):
        nnx.jit(lambda m: Out(m(X)))(Layer())


def test_the_same_numbers_as_jax():
    """Value and gradients are those of jax.value_and_grad of the same computation."""
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(3, 1, rngs=nnx.Rngs(1)))
    x = jax.random.normal(jax.random.key(0), (5, 2))
    value, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)

    def raw(params):
        (k0, b0), (k1, b1) = params
        return ((jnp.tanh(x @ k0 + b0) @ k1 + b1) ** 2).mean()

    layers = [model.layers[0], model.layers[2]]
    expected, raw_grads = jax.value_and_grad(raw)([(m.kernel.value, m.bias.value) for m in layers])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for i, (kernel, bias) in zip((0, 2), raw_grads, strict=True):
        np.testing.assert_allclose(grads.layers[i].kernel, kernel, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(grads.layers[i].bias, bias, rtol=1e-5, atol=1e-7)


def test_changes_come_out():
    """Statistics, new and deleted attributes, swapped parts: as after an eager call, on the caller's objects."""

    def f(m, other, x):
        m.layers[0], m.layers[1] = m.layers[1], m.layers[0]
        other.extra, m.array = m.layers[0], x
        del m.static
        return m.layers[0](x).sum() + other(x).sum()

    def make():
        model = nnx.Dict(layers=[Layer(), Layer(2.0)], static="s")
        return model, Layer(3.0)

    (model, other), eager = make(), make()
    before = objects_in(model, other)
    nnx.grad(f)(model, other, X)
    f(*eager, X)
    assert_same((model, other), eager)
    assert {id(x) for x in objects_in(model, other)} == set(map(id, before))


def test_batch_norm_statistics_and_dropout_counts():
    """What BatchNorm and Dropout update inside comes out once per call."""
    rngs, is_number = nnx.Rngs(0), nnx.Not(nnx.RngKey)
    model = nnx.Sequential(nnx.BatchNorm(2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    eager = nnx.clone(model)
    x = jax.random.normal(jax.random.key(0), (8, 2))
    for _ in range(2):
        nnx.grad(lambda m: m(x).sum())(model)
        eager(x)
    for a, b in zip(
        jax.tree.leaves(nnx.state(model, is_number)), jax.tree.leaves(nnx.state(eager, is_number)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert model.layers[0].mean.value.any()


def test_values_that_did_not_change_are_not_touched():
    """Parameters keep the very arrays they had."""
    layer = Layer()
    w, stat = layer.w.value, layer.stat.value
    nnx.grad(loss)(layer, X)
    assert layer.w.value is w
    assert layer.stat.value is not stat


def test_a_change_of_what_is_differentiated():
    """A parameter written inside: the gradient is with respect to what went in, the new value comes out, concrete."""
    layer = Layer()

    def f(m, x):
        m.w *= 3
        return (m.w * x).sum()

    assert shown(nnx.grad(f)(layer, X))["w"] == ("Param", [6, 9])
    assert layer.w.value.tolist() == [3, 3]
    assert not isinstance(layer.w.value, jax.core.Tracer)


def test_a_loss_that_is_a_variable():
    """A Variable of a scalar is a scalar."""
    layer = Layer()

    def f(m, x):
        m.last = nnx.Cache(loss(m, x))
        return m.last

    value, grads = nnx.value_and_grad(f)(layer, X)
    assert (value.item(), layer.last.value.item(), shown(grads)) == (5.0, 5.0, W)


def test_options_of_jax():
    """holomorphic and allow_int as in jax.grad."""
    v = nnx.Param(jnp.array(1.0 + 2j))
    assert nnx.grad(lambda v: v**2, holomorphic=True)(v).value.item() == 2 + 4j
    grads = nnx.grad(lambda m: (m.w * m.calls).sum(), argnums=nnx.DiffState(0, ...), allow_int=True)(Layer())
    assert grads.calls.dtype == jax.dtypes.float0


# --- combinations ---------------------------------------------------------------------------------------------------


def test_under_jit():
    """A training step as everyone writes it: jit around value_and_grad with a Module, twice, as eager."""

    def step(m, x):
        value, grads = nnx.value_and_grad(loss)(m, x)
        for v, g in ((m.w, grads.w), (m.b, grads.b)):
            v -= 0.1 * g
        return value

    model, eager, jitted = Layer(), Layer(), nnx.jit(step)
    for _ in range(3):
        np.testing.assert_allclose(jitted(model, X), step(eager, X), rtol=1e-6)
        for v, w in zip(jax.tree.leaves(model), jax.tree.leaves(eager), strict=True):
            np.testing.assert_allclose(v, w, rtol=1e-6)


def test_grad_of_grad_and_of_jit():
    """Second derivatives, grad over jit, jit over grad over jit."""
    v = nnx.Param(jnp.array(2.0))
    assert nnx.grad(lambda v: nnx.grad(lambda v: v**3)(v) * 1.0)(v).value.item() == 12
    jitted = nnx.jit(lambda m, x: loss(m, x))
    for wrap in (lambda f: f, nnx.jit):
        layer = Layer()
        assert shown(wrap(nnx.grad(jitted))(layer, X)) == W
        assert int(layer.calls) == 1


def test_a_live_model_in_a_closure():
    """A closed-over Module is a constant when read; a write to it is refused, naming the path."""
    layer = Layer()
    assert nnx.grad(lambda x: (layer.w * x).sum())(X).tolist() == [1, 1]
    assert_same(layer, Layer())
    with pytest.raises(errors.TraceContextError, match=r"layer\.calls"):
        nnx.grad(lambda x: layer(x).sum())(X)
    with pytest.raises(errors.TraceContextError, match=r"layer\.calls"):
        jax.grad(lambda x: nnx.grad(lambda m, x: m(x).sum(), argnums=1)(layer, x).sum())(X)
    assert_same(layer, Layer())


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argnums", "message"),
    [
        (2, "argnums has 2, but the function was called with 2 positional arguments"),
        (-3, "argnums has -3"),
        ((0, nnx.DiffState(5, ...)), "argnums has 5"),
        ((0, nnx.DiffState(0, ...)), r"argument 0 twice; join the filters: DiffState\(0, \(a, b\)\)"),
        ((0, -2), "argument -2 twice"),
        (nnx.DiffState(0, nnx.PathContains("nothing")), r"DiffState\(0, .*nothing.*\) selects no leaf of argument 0"),
        (nnx.DiffState(1, nnx.Param), "selects no leaf of argument 1"),
        ((0, nnx.DiffState(1, False)), "selects no leaf of argument 1"),
        (nnx.DiffState(0, None), r"DiffState\(0, None\) selects no leaf of argument 0"),
    ],
)
def test_wrong_argnums(argnums, message):
    """What argnums names that is not there, and filters that select nothing, are errors that say so."""
    layer = Layer()
    with pytest.raises(errors.PrefixError, match=message):
        nnx.grad(loss, argnums=argnums)(layer, X)
    assert_same(layer, Layer())


@pytest.mark.parametrize(
    ("argnums", "shown"), [("x", "'x'"), (nnx.Param, ".*Param"), (None, "None"), ((0, "x"), "'x'")]
)
def test_argnums_are_numbers(argnums, shown):
    """A name, or a filter without its argument, is refused in words."""
    with pytest.raises(errors.ArgumentError, match=f"argnums takes numbers of arguments, or DiffState.* not {shown}"):
        nnx.grad(loss, argnums=argnums)(Layer(), X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: nnx.grad(loss, argnums=1)(m, jnp.array([1, 2])),
            r"Cannot differentiate args\[1\]: its dtype is int32.*",
        ),
        (lambda m: nnx.grad(lambda x: x * 1.0)(3), r"args\[0\]: its dtype is int32"),
        (lambda m: nnx.grad(lambda x: x * 1.0)(True), r"args\[0\]: its dtype is bool"),
        (
            lambda m: nnx.grad(lambda m: m["a"]["x"].sum())({"a": nnx.Param({"n": jnp.arange(2), "x": X})}),
            r"args\[0\]\.a: its dtype is int32.*DiffState",
        ),
        (
            lambda m: nnx.grad(loss, argnums=nnx.DiffState(0, ...))(m, X),
            r"args\[0\]\.calls: its dtype is int32.*DiffState",
        ),
        (
            lambda m: nnx.grad(loss, holomorphic=True)(m, X),
            r"args\[0\]\.b: its dtype is float32, and holomorphic=True is for complex numbers\. .*filter\)\.$",
        ),
        (lambda m: nnx.grad(loss, argnums=1)(m, "x"), r"args\[1\]: it is a str \('x'\), not an array.*argnums"),
        (
            lambda m: nnx.grad(loss, argnums=1, allow_int=True)(m, ["x"]),
            r"args\[1\]\[0\]: it is a str \('x'\), not an array",
        ),
        (lambda m: nnx.value_and_grad(lambda p: 1.0)(nnx.Param("x")), r"args\[0\]: it is a str \('x'\), not an array"),
        *[
            (
                lambda m, derivative=derivative: derivative([nnx.Param(X, ref=True)]),
                r"args\[0\]\[0\]: its value is in a jax\.Ref.* without ref=True.*DiffState",
            )
            for derivative in [
                nnx.grad(lambda m: m[0].sum()),
                nnx.jacrev(lambda m: m[0].sum()),
                functools.partial(nnx.vjp, lambda m: m[0].sum()),
            ]
        ],
    ],
)
def test_leaves_that_cannot_be_differentiated(call, message):
    """The error names the leaf and its dtype or type, and says how to choose others; nothing changes."""
    layer = Layer()
    with pytest.raises(errors.ArgumentError, match=message):
        call(layer)
    assert_same(layer, Layer())


@pytest.mark.parametrize(
    ("f", "options", "message"),
    [
        (lambda m, x: m(x), {}, "scalar-output"),
        (lambda m, x: (m(x).sum(), x), {}, "scalar-output"),
        (lambda m, x: None, {}, "scalar-output|scalar"),
        (lambda m, x: m(x).sum(), {"has_aux": True}, r"has_aux=True.*pair \(loss, aux\).*float32\[\]"),
        (lambda m, x: (m(x).sum(), x, x), {"has_aux": True}, r"has_aux=True.*returned \(float32\[\], float32\["),
        (lambda m, x: (m(x), x), {"has_aux": True}, "scalar-output"),
    ],
)
def test_losses_that_are_no_scalars(f, options, message):
    """Arrays, pairs without has_aux, no pair with it: an error, and the model is as before."""
    layer = Layer()
    for transform in (nnx.grad, nnx.value_and_grad):
        with pytest.raises(TypeError, match=message):
            transform(f, **options)(layer, X)
        assert_same(layer, Layer())


def test_other_arguments_may_be_anything():
    """As in jax.grad: an array of strings in a batch, an object."""
    batch = {"x": X, "names": np.array(["a", "b"]), "kind": object()}
    grads, aux = nnx.grad(lambda m, batch: (m(batch["x"]).sum(), batch["names"][0]), has_aux=True)(Layer(), batch)
    assert shown(grads) == W
    assert aux == "a"


def test_a_failing_function_changes_nothing():
    """An exception after changes of every kind leaves identities and values."""

    def f(m, x):
        m.w.value, m.extra = x, x
        del m.b
        m(x)

    layer = Layer()
    objects, values = objects_in(layer), [v.value for v in objects_in(layer)[1:]]
    with pytest.raises(AttributeError, match="'b'") as caught:
        nnx.grad(f)(layer, X)
    assert any("in <root> (Layer, " in note for note in caught.value.__notes__)
    assert_same(layer, Layer())
    assert all(a is b for a, b in zip(objects_in(layer), objects, strict=True))
    assert all(a.value is b for a, b in zip(objects[1:], values, strict=True))


def test_a_dropped_model_is_freed():
    """Neither the wrapper nor the gradients keep the model."""
    layer, gradient = Layer(), nnx.grad(loss)
    grads = gradient(layer, X)
    refs = [weakref.ref(layer), weakref.ref(layer.w)]
    del layer
    assert [r() for r in refs] == [None, None]
    assert shown(grads) == W


@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad])
def test_a_pair_without_has_aux(transform):
    """The error of JAX, and what to add."""
    with pytest.raises(TypeError, match="scalar-output") as caught:
        transform(lambda x: (x.sum(), 1))(jnp.ones(2))
    assert "If the function returns (loss, aux), pass has_aux=True." in caught.value.__notes__
    with pytest.raises(TypeError, match="scalar-output") as caught:
        transform(lambda x: x)(jnp.ones(2))
    assert not any("has_aux" in note for note in getattr(caught.value, "__notes__", ()))


def test_a_number_of_an_argument_that_there_is_not():
    with pytest.raises(ValueError, match=r"argnums has 2, but .* with 2 positional arguments\. Arguments are numbered"):
        nnx.grad(lambda x, y: x, argnums=2)(1.0, 1.0)
    with pytest.raises(ValueError, match=r"^DiffState\(0, BatchStat\) selects no leaf of argument 0"):
        nnx.grad(lambda m: 1.0, argnums=nnx.DiffState(0, nnx.BatchStat))(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
