"""nnx.custom_vjp and nnx.custom_jvp: rules that see Modules and States, state that changes, errors."""

import copy
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors


class Net(nnx.Module):
    def __init__(self, x=1.0, y=2.0):
        self.x, self.y = nnx.Param(jnp.array(x)), nnx.Param(jnp.array(y))
        self.calls = nnx.Variable(jnp.array(0))
        self.rngs = nnx.Rngs(0)


A = jnp.array(3.0)


def product(m, a):
    m.calls += 1
    return jnp.sin(m.x) * m.y * a


def doubled(fun=product, **options):
    """``product`` with twice its gradient."""
    f = nnx.custom_vjp(fun, **options)

    def forward(m, a):
        return f(m, a), (jnp.cos(m.x), jnp.sin(m.x), m, a)

    def backward(residuals, gradients):
        cos, sin, m, a = residuals
        (of_m, of_a), of_out = gradients
        assert type(m) is Net
        assert type(of_m) is nnx.State
        assert of_a is None
        of_m.x.value += 2 * of_out * cos * m.y * a
        of_m.y.value += 2 * of_out * sin * a
        return of_m, 2 * of_out * sin * m.y

    f.defvjp(forward, backward)
    return f


EXPECTED = {"x": 2 * np.cos(1.0) * 6, "y": 2 * np.sin(1.0) * 3}


def assert_close(state, expected):
    found = nnx.to_pure_dict(state)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


OUTER = {
    "plain": lambda f: f,
    "jit": nnx.jit,
    "jit inside": lambda f: lambda m, a: nnx.jit(f)(m, a),
    "remat": nnx.remat,
}


# --- custom_vjp -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", OUTER)
def test_the_rule_is_used(outer):
    """The gradient is the rule's, the value and the state are the function's; also through jit and remat."""
    m, f = Net(), doubled()
    with jax.checking_leaks():
        value, (grads, of_a) = OUTER[outer](nnx.value_and_grad(OUTER[outer](f), argnums=(0, 1)))(m, A)
    assert_close(grads, EXPECTED)
    np.testing.assert_allclose((value, of_a), (np.sin(1.0) * 6, 4 * np.sin(1.0)), rtol=1e-6)
    assert m.calls == 1
    assert f(m, A) == value
    assert m.calls == 2


def test_under_vmap():
    """The rule is mapped like any function."""
    f = doubled()
    nets = nnx.vmap(Net)(jnp.array([1.0, 2.0]), jnp.array([2.0, 2.0]))
    grads = nnx.vmap(nnx.grad(f), in_axes=(0, None))(nets, A)
    np.testing.assert_allclose(grads.x.value, 12 * np.cos([1.0, 2.0]), rtol=1e-5)
    assert nets.calls.value.tolist() == [1, 1]


def test_other_derivatives_use_the_rule():
    """vjp and jacrev too."""
    grads, _ = nnx.vjp(doubled(), Net(), A)[1](1.0)
    assert_close(grads, {**EXPECTED})
    np.testing.assert_allclose(nnx.jacrev(doubled())(Net(), A).x, EXPECTED["x"], rtol=1e-6)


def test_on_methods():
    """As a decorator in the class, with or without options."""

    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.array(2.0))

        @nnx.custom_vjp
        def __call__(self, x):
            return self.w * x

        def forward(self, x):
            return self.w * x, (self, x)

        def backward(residuals, gradients):
            self, x = residuals
            return nnx.State({"w": 10 * x}), self.w.value

        __call__.defvjp(forward, backward)

    layer = Layer()
    grads, dx = nnx.grad(lambda m, x: m(x), argnums=(0, 1))(layer, A)
    assert_close(grads, {"w": 30.0})
    assert dx == 2.0
    assert layer(x=A) == 6.0


def test_bound_modules_come_first():
    """The custom function of a Module passes it to the rules as the first argument."""

    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.array(2.0))

        def __call__(self, x):
            return self.w * x

    f = nnx.custom_vjp(Layer())
    f.defvjp(lambda m, x: (m(x), x), lambda x, g: (None, 7 * g[1]))
    assert nnx.grad(f)(A) == 7.0
    assert f(A) == 6.0


def test_nondiff_argnums():
    """Static values, functions, arrays and Modules are passed to the backward rule first, and get no gradient."""

    @nnx.custom_vjp(nondiff_argnums=(0, 2, 3))
    def f(activation, m, scale, other):
        m.calls += 1
        return activation(m.x) * scale * other.y

    def forward(activation, m, scale, other):
        return f(activation, m, scale, other), activation(m.y)

    def backward(activation, scale, other, residual, gradients):
        assert activation is jnp.sin
        assert type(other) is Net
        (of_m,), of_out = gradients
        of_m.x.value = of_out * residual * scale
        return (of_m,)

    f.defvjp(forward, backward)
    m, other = Net(), Net()
    for run in (f, nnx.jit(f, static_argnums=0)):
        grads, of_scale, of_other = nnx.grad(run, argnums=(1, 2, 3))(jnp.sin, m, A, other)
        assert_close(grads, {"x": np.sin(2.0) * 3, "y": 0.0})
        assert_close(of_other, {"x": 0.0, "y": 0.0})
        assert of_scale == 0
    assert m.calls == 2


@pytest.mark.parametrize("keeps_all", [False, True])
def test_nondiff_leaves(keeps_all):
    """DiffState: the leaves that the filter takes are differentiated; the State given has all, and may be returned."""
    f = nnx.custom_vjp(product, nondiff_argnums=nnx.DiffState(0, nnx.PathContains("x")))

    def backward(residuals, gradients):
        (of_m, _), of_out = gradients
        assert list(of_m) == ["x", "y"]
        of_m["x"][...] = 5 * of_out
        return of_m if keeps_all else nnx.State({"x": of_m["x"]}), None

    f.defvjp(lambda m, a: (f(m, a), ()), backward)
    assert_close(nnx.grad(f)(Net(), A), {"x": 5.0, "y": 0.0})


@pytest.mark.parametrize("filter_", [False, None, nnx.Nothing()])
@pytest.mark.parametrize("returned", [None, 7.0])
def test_an_argument_of_which_nothing_is_differentiated(filter_, returned):
    """DiffState with a filter that selects nothing: no gradient, whatever the rule returns in its place."""
    f = nnx.custom_vjp(lambda m, sums: (m.x * 2, {"n": sums["n"] + m.x}), nondiff_argnums=(nnx.DiffState(1, filter_),))
    f.defvjp(
        lambda m, sums: (f(m, sums), sums),
        lambda sums, g: (jax.tree.map(lambda x: x + 5 * g[1][0], g[0][0]), returned and {"n": jnp.array(returned)}),
    )
    sums = {"n": A}
    assert f(Net(), sums)[1]["n"] == 4.0
    for loss in (lambda m, sums: f(m, sums)[0], nnx.jit(lambda m, sums: f(m, sums)[0])):
        of_m, of_sums = nnx.grad(loss, argnums=(0, 1))(Net(), sums)
        assert_close(of_m, {"x": 5.0, "y": 5.0})
        assert of_sums["n"] == 0.0


def test_none_for_a_part_of_an_argument():
    """A rule may return None in place of any pytree in an argument, and for the argument as a whole."""
    f = nnx.custom_vjp(lambda m, tree: m.x * tree["a"][0] * tree["b"])
    gradients = [None, {"a": None, "b": A}, {"a": (A, A), "b": None}]
    f.defvjp(lambda m, tree: (f(m, tree), ()), lambda _, g: (None, gradients.pop(0)))
    tree = {"a": (A, A), "b": A}
    for a, b in [(0.0, 0.0), (0.0, 3.0), (3.0, 0.0)]:
        of_tree = nnx.grad(f, argnums=1)(Net(), tree)
        assert of_tree["a"] == (a, a)
        assert of_tree["b"] == b


def test_a_class_that_refuses_none_in_an_argument():
    """The gradient of an array that is no Variable is None as the function leaves it; there is no object with it."""

    @jax.tree_util.register_pytree_node_class
    class Cell:
        def __init__(self, size):
            assert size is not None
            self.size = size

        def tree_flatten(self):
            return (self.size,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    seen = []

    def backward(sizes, g):
        seen.append(g[0])
        return nnx.State({"x": 2 * g[1]}), {"a": Cell(3 * g[1]), "b": (None, Cell(4 * g[1]))}

    f = nnx.custom_vjp(lambda m, tree: m.x * tree["a"].size * tree["b"][1].size)
    f.defvjp(lambda m, tree: (f(m, tree), None), backward)
    of_m, of_tree = nnx.grad(f, argnums=(0, 1))(Net(), {"a": Cell(A), "b": (A, Cell(A))})
    assert seen[0][1] == {"a": None, "b": (None, None)}
    assert_close(of_m, {"x": 2.0, "y": 0.0})
    assert (of_tree["a"].size, of_tree["b"][0], of_tree["b"][1].size) == (3.0, 0.0, 4.0)


def test_gradients_of_what_changed():
    """What the function writes has its gradient in that of the argument; what it leaves alone is used as it was."""

    def fun(m, a):
        m.y.value = m.x * a
        m.new = nnx.Param(m.x**2)
        return m, nnx.Param(a * m.x)

    f = nnx.custom_vjp(fun)
    seen = {}

    def backward(x, gradients):
        (of_m, _), (same, new) = gradients
        seen.update(m=nnx.to_pure_dict(of_m), same=same, new=new)
        return nnx.State({"x": of_m.x.value + A * of_m.y.value + 2 * x * of_m.new.value + A * new.value}), None

    f.defvjp(lambda m, a: (f(m, a), m.x.value), backward)

    def loss(m, a, fun):
        out, extra = fun(m, a)
        assert out is m
        return m.x * 100 + m.y * 10 + m.new + extra

    expected, ours = Net(), Net()
    assert_close(nnx.grad(loss)(ours, A, f), nnx.to_pure_dict(nnx.grad(loss)(expected, A, fun)))
    assert seen["m"] == {"x": 0.0, "y": 10.0, "new": 1.0}
    assert seen["same"] == nnx.State({})
    assert type(seen["new"]) is nnx.Param
    assert ours.y == 3.0
    assert ours.new == 1.0


def test_residuals_may_be_a_vjp():
    """The function that nnx.vjp returns is a pytree: the sign of the gradient, as a rule."""
    f = nnx.custom_vjp(product)

    def backward(pull_back, gradients):
        return jax.tree.map(jnp.sign, pull_back(gradients[1]))

    f.defvjp(lambda m, a: nnx.vjp(product, m, a), backward)
    for run in (nnx.grad(f, argnums=(0, 1)), nnx.jit(nnx.grad(nnx.jit(f), argnums=(0, 1)))):
        m = Net(y=-2.0)
        grads, of_a = run(m, A)
        assert_close(grads, {"x": -1.0, "y": 1.0})
        assert of_a == -1.0
        assert m.calls == 1


def test_shared_and_cyclic():
    """A shared Variable has one gradient, whatever the path the rule was written for."""
    m = nnx.Dict(a=nnx.Param(jnp.array(2.0)))
    m["z"], m["me"] = m["a"], m
    f = nnx.custom_vjp(lambda m: m["a"] * m["z"])
    f.defvjp(lambda m: (f(m), m), lambda m, g: (nnx.State({"a": 10 * m["z"].value * g[1]}),))
    assert_close(nnx.grad(f)(m), {"a": 20.0})


# --- custom_jvp -----------------------------------------------------------------------------------------------------


def tenfold(**options):
    """``product`` with ten times its tangent."""
    f = nnx.custom_jvp(product, **options)

    @f.defjvp
    def rule(primals, tangents):
        m, a = primals
        of_m, of_a = tangents
        assert type(m) is Net
        assert set(of_m) == {"x", "y"}
        along = jnp.cos(m.x) * m.y * a * of_m.x + jnp.sin(m.x) * (a * of_m.y + m.y * of_a)
        return f(m, a), 10 * along

    return f


@pytest.mark.parametrize("outer", OUTER)
def test_jvp_rule(outer):
    """It serves forward and reverse mode, also through jit and remat; the state changes once."""
    m = Net()
    f = OUTER[outer](tenfold())
    with jax.checking_leaks():
        _, tangent = nnx.jvp(f, (m, A), (nnx.State({"x": jnp.array(1.0)}), jnp.array(0.0)))
    np.testing.assert_allclose(tangent, 5 * EXPECTED["x"], rtol=1e-6)
    assert m.calls == 1
    grads = nnx.grad(f)(m, A)
    assert_close(grads, {name: 5 * value for name, value in EXPECTED.items()})
    assert m.calls == 2


def test_jvps():
    """A rule for each argument, summed; None for none."""
    f = nnx.custom_jvp(product)
    f.defjvps(lambda tangent, out, m, a: 7 * tangent.y.value, None)
    grads, of_a = nnx.grad(f, argnums=(0, 1))(Net(), A)
    assert_close(grads, {"x": 0.0, "y": 7.0})
    assert of_a == 0.0
    f.defjvps(lambda tangent, out, m, a: 7 * tangent.y.value, lambda tangent, out, m, a: out * tangent)
    np.testing.assert_allclose(nnx.grad(f, argnums=1)(Net(), A), np.sin(1.0) * 6, rtol=1e-6)
    f.defjvps(None, None)
    assert nnx.grad(f, argnums=1)(Net(), A) == 0.0


def test_jvps_of_a_bound_module():
    """It is the first of the arguments, and has a rule, too."""
    m = Net()
    f = nnx.custom_jvp(functools.partial(lambda m, a: m.x * a, m))
    f.defjvps(None, lambda tangent, out, m, a: 10 * m.x * tangent)
    assert nnx.grad(f)(A) == 10 * m.x


@pytest.mark.parametrize("bind", [lambda f: functools.partial(f, A), lambda f: functools.partial(f, b=A)])
def test_an_array_that_a_partial_has_bound_is_a_constant_as_in_jax(bind):
    """No argument of the rule: this one gives the first tangent that it gets, which was that of the bound array."""
    bound = bind(lambda a, b: a * b)
    f = nnx.custom_jvp(bound)
    f.defjvp(lambda primals, tangents: (f(*primals), 10 * tangents[0]))
    assert nnx.grad(f)(A) == jax.grad(f)(A) == 10
    f = nnx.custom_vjp(bound)
    f.defvjp(lambda x: (f(x), None), lambda _, gradients: (20 * gradients[1],))
    assert nnx.grad(f)(A) == jax.grad(f)(A) == 20


def test_jvp_of_an_output_with_a_module():
    """The tangent of a new Module in the output is a State; what it leaves out is zero."""
    f = nnx.custom_jvp(lambda m: Net(m.x.value, m.y.value))
    f.defjvp(lambda primals, tangents: (f(*primals), nnx.State({"x": 3 * tangents[0].x.value})))
    assert_close(nnx.grad(lambda m: f(m).x * f(m).y)(Net()), {"x": 6.0, "y": 0.0})


def test_jvp_nondiff_argnums():
    """Arguments that are not differentiated are passed to the rule first."""

    @nnx.custom_jvp(nondiff_argnums=0)
    def f(name, m):
        return m.x * len(name)

    f.defjvp(lambda name, primals, tangents: (f(name, *primals), tangents[0].x * 100 * len(name)))
    assert_close(nnx.grad(f, argnums=1)("ab", Net()), {"x": 200.0, "y": 0.0})
    with pytest.raises(errors.ArgumentError, match="use defjvp"):
        f.defjvps(None)


# --- errors ---------------------------------------------------------------------------------------------------------


def with_rule(forward, backward, **options):
    f = nnx.custom_vjp(product, **options)
    f.defvjp(forward, backward)
    return lambda: nnx.grad(f)(Net(), A)


def same(m, a):
    return product(m, a), ()


def returns_more(m, a):
    return (product(m, a), a), ()


def notes(note):
    def call(m, a):
        m.note = note
        return product(m, a)

    return call


def gives(value):
    return lambda residuals, gradients: value


def forgets(m, a):
    return jnp.sin(m.x) * m.y * a, ()


def in_jit(forward, fun=product):
    """Both the function and its forward rule are traced."""
    f = nnx.custom_vjp(fun)
    f.defvjp(forward, gives((None, None)))
    return lambda: nnx.grad(nnx.jit(f))(Net(), A)


def with_jvp(rule):
    f = nnx.custom_jvp(product)
    f.defjvp(rule)
    return lambda: nnx.grad(f)(Net(), A)


WRONG = {
    "no rule": (lambda: nnx.custom_vjp(product)(Net(), A), r"CustomVjp\(product\) has no rule yet"),
    "no jvp": (lambda: nnx.custom_jvp(product)(Net(), A), r"CustomJvp\(product\) has no rule yet"),
    "no pair": (with_rule(product, gives((None, None))), r"forward rule must return a pair \(output, residuals\)"),
    "count": (with_rule(same, gives((None,))), "each of the 2 arguments .* but it returned 1 values"),
    "no pair of three": (with_rule(lambda m, a: (product(m, a), (), ()), gives((None, None))), "must return a pair"),
    "no tuple": (with_rule(same, gives(nnx.State({}))), "each of the 2 arguments .* but it returned State"),
    "shape": (with_rule(same, gives((nnx.State({"x": jnp.ones(3)}), None))), r"args\[0\].x must be float32\[\]"),
    "no State": (with_rule(same, gives((A, None))), r"Module at args\[0\] must be a State"),
    "not an array": (with_rule(same, gives((None, (A,)))), r"args\[1\] must be float32\[\]"),
    "unknown": (with_rule(same, gives((nnx.State({"z": A}), None))), r"args\[0\].z, but there is no such leaf"),
    "other changes": (in_jit(forgets), r"they differ in args\[0\].calls"),
    "other output": (in_jit(returns_more), "they differ in the structure of the output"),
    "other value": (
        in_jit(lambda m, a: (notes("b")(m, a), ()), notes("a")),
        "they differ in the structure of a Module",
    ),
    "text": (lambda: doubled()(nnx.Dict(x=nnx.Param("text")), A), r"The Variable args\[0\].x holds a str"),
    "residual": (
        with_rule(lambda m, a: (product(m, a), (m, {"op": "add"})), gives((None, None))),
        r"residuals\[1\].op is a str",
    ),
    "jvp": (with_jvp(lambda p, t: (product(*p), jnp.ones(3))), r"tangent of <output> must be float32\[\]"),
    "jvp pair": (with_jvp(lambda p, t: product(*p)), r"must return a pair \(output, tangent\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_messages(case):
    """What is wrong, and at which path."""
    run, message = WRONG[case]
    with pytest.raises(errors.ArgumentError, match=message):
        run()


def test_symbolic_zeros_are_for_arrays():
    """Rules get Modules with arrays in them, and States of zeros; ``float0`` stays as it is."""
    told, symbolic = [], lambda x: type(x) is jax.custom_derivatives.SymbolicZero
    f, g = nnx.custom_vjp(lambda m, a, b: (product(m, a), b)), nnx.custom_jvp(product)

    def forward(m, a, b):
        told.append((a.perturbed, b.perturbed))
        return (product(m, a.value), b.value), (m, a.value)

    def backward(residuals, gradients):
        (m, a), ((of_m, *_), (of_out, of_b)) = residuals, gradients
        told.append((symbolic(of_out), symbolic(of_b), of_m.x.value.tolist()))
        return nnx.State({"x": of_out * a}), of_out * m.x.value, of_b

    def rule(primals, tangents):
        told.append((symbolic(tangents[1]), symbolic(tangents[0].y.value)))
        return product(*primals), tangents[0].x * 5.0

    f.defvjp(forward, backward, symbolic_zeros=True)
    g.defjvp(rule, symbolic_zeros=True)
    m = Net(2.0, 3.0)
    assert nnx.grad(lambda m: f(m, A, 1.0)[0])(m).x.value == A
    assert told == [(False, False), (False, True, 0.0)]
    assert nnx.grad(lambda m: g(m, A))(m).x.value == 5
    assert told[2:] == [(True, False)]
    assert m.calls == 2


def test_other_options_of_jax():
    """Of a version that has them; of another, they are refused as JAX refuses them."""
    f = nnx.custom_vjp(product)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batching'"):
        f.defvjp(same, gives((None, None)), batching=True)
    if "generic_batching" not in inspect.signature(jax.custom_vjp.defvjp).parameters:
        pytest.skip("JAX has no generic_batching")

    def gradient(custom, **options):
        scaled = custom(lambda x, y: (x * y, y))
        theirs = lambda _, g: (g[0], g[0] + g[1])
        ours = lambda residuals, g: theirs(residuals, g[1])
        scaled.defvjp(lambda x, y: ((x * y, y), None), theirs if custom is jax.custom_vjp else ours, **options)
        mapped = jax.vmap(scaled, in_axes=(0, None), out_axes=(0, None))
        return jax.grad(lambda y: sum(map(jnp.sum, mapped(jnp.ones(3), y))))(2.0)

    assert gradient(nnx.custom_vjp, generic_batching=True) == gradient(jax.custom_vjp, generic_batching=True) == 4
    for custom in nnx.custom_vjp, jax.custom_vjp:
        with pytest.raises(ValueError, match="generic_batching"):
            gradient(custom)


def test_text_in_an_output():
    """The message names its place."""
    with pytest.raises(errors.OutputError, match="<output> is set to a str"):
        doubled(lambda m, a: "text")(Net(), A)


def test_wrong_nondiff_argnums():
    """Arguments that are not there, and filters that select nothing."""
    with pytest.raises(errors.PrefixError, match="nondiff_argnums has 5"):
        doubled(nondiff_argnums=5)(Net(), A)
    with pytest.raises(errors.PrefixError, match="selects no leaf"):
        doubled(nondiff_argnums=nnx.DiffState(0, nnx.Cache))(Net(), A)


@pytest.mark.parametrize("place", ["fun", "forward", "backward"])
def test_failing_changes_nothing(place):
    """Wherever it raises, each Variable holds the very value it had."""

    def fail(m, a):
        m.calls += 1
        m.debris = m.x * 2
        raise RuntimeError

    def fail_backward(residuals, gradients):
        raise RuntimeError

    f = nnx.custom_vjp(fail if place == "fun" else product)
    f.defvjp(fail if place == "forward" else same, fail_backward)
    m = Net()
    before = m.calls.value
    with pytest.raises(RuntimeError):
        f(m, A) if place == "fun" else nnx.grad(f)(m, A)
    assert m.calls.value is before
    assert not hasattr(m, "debris")


def test_across_traces():
    """Under raw JAX a live Module can be read; a write is refused."""
    m = Net()
    with pytest.raises(errors.TraceContextError, match="calls"):
        jax.grad(lambda a: doubled()(m, a))(A)
    assert m.calls == 0
    read = nnx.custom_vjp(lambda m, a: m.y * a)
    read.defvjp(lambda m, a: (read(m, a), m), lambda m, g: (None, 10 * m.y.value))
    assert jax.grad(lambda a: read(m, a))(A) == 20.0
    assert jax.jit(lambda a: read(m, a))(A) == 6.0


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_what_is_differentiated_is_an_argument(kind):
    """Where a function refers to a Module that is differentiated, JAX speaks of a leak; a note says what to do."""

    def scaled(m):
        if kind == "vjp":
            f = nnx.custom_vjp(lambda x: x * m.x)
            f.defvjp(lambda x: (f(x), None), lambda _, gradients: (gradients[1] * m.x,))
        else:
            f = nnx.custom_jvp(lambda x: x * m.x)
            f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] * m.x))
        return f(A)

    assert scaled(Net()) == A
    with pytest.raises(jax.errors.UnexpectedTracerError) as error:
        nnx.grad(scaled)(Net())
    assert "pass it as an argument" in "\n".join(error.value.__notes__)


def test_a_rule_in_the_manner_of_jax_is_told_how_it_is_called():
    @nnx.custom_vjp
    def call(layer, x):
        return layer(x)

    call.defvjp(lambda layer, x: (layer(x), None), lambda residuals, g: (None, g))
    with pytest.raises(nnx.errors.ArgumentError) as caught:
        nnx.grad(lambda layer, x: call(layer, x).sum())(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2)))
    assert any("backward(residuals, (input_updates_g, output_g))" in note for note in caught.value.__notes__)


def test_the_gradient_of_a_numpy_array_has_the_dtype_that_it_has_in_jax():
    """Without 64 bits, a NumPy array of doubles is one of floats for JAX, also where no trace has seen it yet."""

    @nnx.custom_vjp
    def scaled(m, x):
        return m.x * x

    def backward(residuals, gradients):
        m, x = residuals
        (of_m, _), of_out = gradients
        of_m.x.value = (of_out * x).sum()
        return of_m, jnp.asarray(of_out * m.x)

    scaled.defvjp(lambda m, x: (scaled(m, x), (m, x)), backward)
    of_m = nnx.grad(lambda m: scaled(m, np.ones(3)).sum())(Net(2.0, 3.0))
    np.testing.assert_array_equal(of_m.x.value, 3.0)


def test_rules_get_all_arguments_by_position():
    """Those that were given by name, and the defaults of those that were left out."""
    seen = []
    f = nnx.custom_vjp(lambda x, scale=2.0, shift=0.0: x * scale + shift)
    f.defvjp(lambda *args: (f(*args), seen.append(len(args))), lambda residuals, g: (10.0 * g[1], None, 5.0 * g[1]))
    assert jax.grad(f)(3.0).item() == 10
    assert jax.grad(lambda x: f(scale=x, x=3.0))(1.0).item() == 0
    assert jax.grad(lambda x: f(1.0, shift=x))(1.0).item() == 5
    assert set(seen) == {3}


def rename(m):
    m["z"] = m.pop("a")


def move_a_part(m):
    m["part"]["in"] = m.pop("part2")


def insert(m):
    m["items"].insert(0, m.pop("a"))


def to_integers(m):
    m["a"].value = jnp.arange(2)


def take_an_array_away(m):
    del m["part"]["x"]


LEAVES = {"a", "part/x", "part/y", "part/w", "part2/w", "items/0"}
MOVES = {
    take_an_array_away: LEAVES - {"part/x"},
    rename: LEAVES - {"a"} | {"z"},
    move_a_part: LEAVES - {"part2/w"} | {"part/in/w"},
    insert: LEAVES - {"a"} | {"items/1"},
    to_integers: LEAVES - {"a"},
}


@pytest.mark.parametrize("move", MOVES)
def test_what_is_only_moved_has_a_gradient_at_its_new_path(move):
    """A rule gets the gradients of the arguments as the function leaves them."""
    make = lambda: nnx.Param(jnp.ones(2))
    part, part2 = nnx.Dict(x=jnp.ones(3), y=jnp.ones(4), w=make()), nnx.Dict(w=make())
    m = nnx.Dict(a=make(), part=part, part2=part2, items=nnx.List([make()]))

    def call(m):
        move(m)
        return m["part"]["w"].sum()

    def backward(residuals, gradients):
        (of_m,), _ = gradients
        assert {"/".join(map(str, path)) for path in nnx.to_flat_state(of_m).paths} == MOVES[move]
        return (None,)

    f = nnx.custom_vjp(call)
    f.defvjp(lambda m: (call(m), None), backward)
    nnx.grad(f)(m)


def test_a_part_that_is_changed_and_taken_away():
    """Its Variable does not come back, so there is no gradient of what the function has left in it."""

    class Holder(nnx.Module):
        def __init__(self):
            self.net, self.z = Net(), nnx.Param(jnp.array(5.0))

    def use_up(m, a):
        net = m.net
        net.x.value = net.x * 2
        del m.net
        return net.x * m.z * a

    f = nnx.custom_vjp(use_up)
    f.defvjp(
        lambda m, a: ((x := m.net.x.value), (f(m, a), x))[1],
        lambda x, g: (nnx.State({"net": {"x": nnx.Param(100 * g[1])}, "z": nnx.Param(2 * x * A * g[1])}), None),
    )
    m = Holder()
    grads = nnx.grad(f)(m, A)
    assert (grads.net.x.item(), grads.net.y.item(), grads.z.item()) == (100, 0, 6)
    assert not hasattr(m, "net")


def test_the_gradient_of_a_part_that_is_taken_away_is_not_that_of_the_last_argument():
    """It has no path after the call. An array that is an argument comes back in no output, so it has no gradient."""
    of_a = []

    def use_up(m, a):
        m.x *= a
        m.z.array = m.z.array * a
        del m.z

    def backward(residuals, gradients):
        of_a.append(gradients[0][1])
        return (None, None)

    f = nnx.custom_vjp(use_up)
    f.defvjp(lambda m, a: (use_up(m, a), None), backward)
    nnx.grad(lambda m: (f(m, A), m.x.sum())[1])(nnx.Dict(x=nnx.Param(A), z=nnx.Dict(array=A)))
    assert of_a == [None]


def test_a_part_that_holds_an_array_and_is_taken_away():
    """What comes back is found behind it, in another part and in the output."""

    class Part(nnx.Module):
        def __init__(self):
            self.array = jnp.array(2.0)

    def use_up(m, a):
        del m.first
        m.second.array = m.second.array * a
        return 10 * m.second.array

    f = nnx.custom_vjp(use_up, nondiff_argnums=nnx.DiffState(0, ...))

    def backward(residuals, gradients):
        (of_m, _), of_out = gradients
        return nnx.State({"second": {"array": of_m["second"]["array"] + 100 * of_out}}), None

    f.defvjp(lambda m, a: (f(m, a), ()), backward)

    def loss(m, a):
        return f(m, a) + 7 * m.second.array

    m = nnx.Dict(first=Part(), second=Part())
    grads = nnx.grad(loss, argnums=nnx.DiffState(0, ...))(m, A)
    assert jax.tree.leaves(grads) == [0, 107]
    assert list(m) == ["second"]


def test_a_keyword_only_argument_is_an_error():
    """Rules take their arguments by position. One that is left out keeps its default, as in JAX."""
    f = nnx.custom_vjp(lambda x, *, scale=3.0: x * scale)
    f.defvjp(lambda x: (x, None), lambda residuals, g: (10 * g[1],))
    for scaled in (f, functools.partial(f, scale=2.0)):
        with pytest.raises(errors.ArgumentError, match=r"no keyword-only arguments, but was given \['scale'\]"):
            scaled(1.0, scale=2.0)
    assert f(2.0) == 6.0
    assert nnx.grad(f)(2.0) == 10.0
    g = nnx.custom_jvp(lambda x, *, scale=3.0: x * scale)
    g.defjvp(lambda primals, tangents: (g(*primals), 10 * tangents[0]))
    assert g(2.0) == 6.0
    assert nnx.grad(g)(2.0) == 10.0


def test_none_for_a_part_of_nested_dicts():
    """The rule says that nothing in it has a gradient."""
    f = nnx.custom_vjp(lambda tree: tree["a"]["b"] * tree["a"]["c"] * tree["d"])
    f.defvjp(lambda tree: (f(tree), tree), lambda tree, g: ({"a": None, "d": 5 * g[1]},))
    grads = jax.grad(f)({"a": {"b": 2.0, "c": 3.0}, "d": 4.0})
    assert grads == {"a": {"b": 0.0, "c": 0.0}, "d": 5.0}


def test_a_gradient_in_another_container_is_an_error():
    f = nnx.custom_vjp(lambda pair: pair[0] * pair[1])
    f.defvjp(lambda pair: (f(pair), pair), lambda pair, g: ([g[1], g[1]],))
    with pytest.raises(errors.ArgumentError, match="must be a pytree like the value that it belongs to"):
        jax.grad(f)((2.0, 3.0))


def test_an_error_in_a_rule_says_what_it_is_given():
    """The gradient of the output is the second of a pair, in flax.nnx as well."""
    double = nnx.custom_vjp(lambda x: 2 * x)
    double.defvjp(lambda x: (2 * x, None), lambda residuals, g: (g @ jnp.ones((1, 1)),))
    with pytest.raises(TypeError) as caught:
        nnx.grad(lambda x: double(x).sum())(jnp.ones((1, 1)))
    assert any("backward(residuals, (input_updates_g, output_g))" in note for note in caught.value.__notes__)


def test_a_rule_that_passes_its_gradients_on_is_told_that_they_are_of_floating_leaves():
    """As published code does, to jax.vjp of a function that returns the State; so the model has no integers there."""
    f = nnx.custom_vjp(lambda m: m.x * 2)
    f.defvjp(lambda m: (f(m), nnx.state(m)), lambda state, gradients: jax.vjp(lambda s: s, state)[1](gradients[0][0]))
    with pytest.raises(ValueError, match="tree structure") as caught:
        nnx.grad(f)(nnx.Dict(x=nnx.Param(A), count=nnx.BatchStat(jnp.array(0))))
    assert any("only floating leaves" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("wrap", [nnx.custom_vjp, nnx.custom_jvp, nnx.jit])
def test_a_copy_is_the_function_itself_as_of_any_function(wrap):
    f = wrap(product)
    assert copy.copy(f) is f
    assert copy.deepcopy(f) is f


# --- rules that JAX 0.12 has added ----------------------------------------------------------------------------------


def ruled(method, log=None, **options):
    """``a * x`` of a Net, with a rule of that kind that doubles the gradients; and the rules that were called."""
    called = []
    f = nnx.custom_vjp(lambda m, a: m.x * a)

    def forward(m, a):
        called.append("forward")
        return f(m, a), (m, a)

    def recompute(residuals, m, a):
        called.append("recompute")
        assert type(residuals[0]) is Net
        return f(m, a), residuals

    def backward(residuals, gradients, *accums):
        called.append("backward")
        (m, a), (_, g) = residuals, gradients
        if accums:
            accums[0].x.value.accum(g * a)
            accums[0].x.value.accum(g * a)
            accums[1].accum(2 * g * m.x)
            return log
        found = nnx.State({"x": 2 * g * a}), 2 * g * m.x
        return (found, log and {**log, "m": m}) if "logs" in method else found

    getattr(f, method)(forward, *([recompute] if "remat" in method else []), backward, **options)
    return f, called


@pytest.mark.parametrize("method", ["defvjp_with_logs", "defvjp_with_accums", "defremat", "defremat_with_logs"])
def test_a_rule_that_jax_lacks(method):
    if hasattr(jax.custom_vjp, method):
        pytest.skip("JAX has such rules")
    with pytest.raises(AttributeError, match=method):
        ruled(method)


@pytest.mark.parametrize("method", ["defvjp_with_logs", "defvjp_with_accums"])
@pytest.mark.parametrize("outer", OUTER)
def test_rules_that_log_and_accumulate(method, outer):
    """Gradients and logs are those that raw JAX gives; plain calls drop the logs."""
    if not hasattr(jax.custom_vjp, method):
        pytest.skip("JAX has no such rules")
    f, called = ruled(method, {"text": jnp.array(7.0)})
    m, a = Net(), A
    y, pull_back = nnx.vjp(OUTER[outer](f), m, a)
    assert y == 3
    grads, da = pull_back(jnp.array(5.0))
    assert grads.x.value == 30
    assert da == 10
    (grads_again, _), logs = pull_back.with_logs(jnp.array(5.0))
    assert grads_again.x.value == 30
    assert logs["text"] == 7
    assert "logs" not in method or logs["m"].x.value == 1
    assert called[0] == "forward"
    assert called[-1] == "backward"
    assert jax.jit(lambda pull: pull(5.0))(pull_back.with_logs)[1]["text"] == 7
    assert nnx.grad(f)(m, a).x.value == 6


def test_a_rule_that_should_log():
    if not hasattr(jax.custom_vjp, "defvjp_with_logs"):
        pytest.skip("JAX has no such rules")
    f = nnx.custom_vjp(lambda m: 2 * m.x)
    f.defvjp_with_logs(lambda m: (f(m), None), lambda residuals, gradients: (None,))
    with pytest.raises(errors.ArgumentError, match=r"that logs must return a pair \(gradients, logs\)"):
        nnx.grad(f)(Net())
    with pytest.raises(TypeError, match="unexpected keyword argument 'batching'"):
        f.defvjp_with_logs(None, None, batching=True)


@pytest.mark.parametrize("method", ["defremat", "defremat_with_logs"])
def test_rules_for_remat(method):
    """The rule between the passes gets the residuals, Modules among them; a second rule of defvjp is for all else."""
    if not hasattr(jax.custom_vjp, method):
        pytest.skip("JAX has no such rules")
    f, called = ruled(method, {"text": jnp.array(7.0)})
    with pytest.raises(NotImplementedError, match="jax_custom_vjp3"):
        nnx.grad(f)(Net(), A)
    flags = {name: getattr(jax.config, name) for name in ("jax_custom_vjp3", "jax_remat3")}
    try:
        for name in flags:
            jax.config.update(name, True)
        _, pull_back = nnx.vjp(nnx.remat(f), Net(), A)
        (grads, da), logs = pull_back.with_logs(5.0)
        assert (grads.x.value, da) == (30, 10)
        assert called == ["forward", "recompute", "backward"]
        assert "logs" not in method or logs["text"] == 7
        f.defvjp(lambda m, a: (f(m, a), None), lambda _, gradients: (nnx.State({"x": 9.0}), None))
        assert nnx.grad(f)(Net(), A).x.value == 9
        assert nnx.grad(nnx.remat(f))(Net(), A).x.value == 6
    finally:
        for name, flag in flags.items():
            jax.config.update(name, flag)
