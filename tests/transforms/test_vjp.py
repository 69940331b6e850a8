"""nnx.vjp, nnx.jvp and nnx.linearize: values, State in and out, what changes on the way, errors."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors

X = jnp.array([2.0, 3.0])


class Net(nnx.Module):
    """A weight, a statistic, a counter, a key, an array: `w * stat * array * x`."""

    def __init__(self):
        self.w = nnx.Param(jnp.array([1.0, 2.0]))
        self.stat = nnx.BatchStat(jnp.array([3.0, 4.0]))
        self.calls = nnx.Variable(jnp.array(0))
        self.array = jnp.array([1.0, 0.5])
        self.rngs = nnx.Rngs(0)

    def __call__(self, x):
        self.calls += 1
        return self.w * self.stat * self.array * x


def apply(m, x):
    return m(x)


def as_lists(tree):
    """The tree with lists for arrays; Variables are taken off."""
    return jax.tree.map(lambda x: np.asarray(x).tolist(), nnx.to_pure_dict(tree))


def snapshot(m):
    """The value of each Variable and attribute, by identity."""
    return [(path, id(x), id(x._nnx_value) if isinstance(x, nnx.Variable) else 0) for path, x in nnx.iter_graph(m)]


# --- vjp ------------------------------------------------------------------------------------------------------------


def test_vjp_pulls_back():
    """Gradients are a State with each leaf of floating type, in a Variable of its type; the output is the eager one."""
    m = Net()
    y, pull_back = nnx.vjp(apply, m, X)
    grads, dx = pull_back(jnp.array([1.0, 10.0]))
    assert y.tolist() == [6.0, 12.0]
    assert m.calls == 1
    assert as_lists(grads) == {"array": [6.0, 240.0], "stat": [2.0, 30.0], "w": [6.0, 60.0]}
    assert type(grads.w) is nnx.Param
    assert type(grads.stat) is nnx.BatchStat
    assert dx.tolist() == [3.0, 40.0]
    assert pull_back(jnp.zeros(2))[1].tolist() == [0.0, 0.0]
    assert m.calls == 1


FORMS = {
    "call": lambda m: nnx.vjp(apply, m, X)[1](jnp.ones(2))[-1],
    "decorator": lambda m: nnx.vjp(apply)(m, X)[1](jnp.ones(2))[-1],
    "options": lambda m: nnx.vjp(has_aux=False)(apply, m, X)[1](jnp.ones(2))[-1],
    "Module": lambda m: nnx.vjp(m, X)[1](jnp.ones(2))[-1],
    "bound method": lambda m: nnx.vjp(m.__call__, X)[1](jnp.ones(2))[-1],
    "partial": lambda m: nnx.vjp(functools.partial(apply, m), X)[1](jnp.ones(2))[-1],
    "closure": lambda m: nnx.linearize(lambda x: m.w * m.stat * m.array * x, X)[1](jnp.ones(2)),
    "jvp": lambda m: nnx.jvp(m, (X,), (jnp.ones(2),))[1],
    "jvp decorator": lambda m: nnx.jvp(apply)((m, X), (nnx.State({}), jnp.ones(2)))[1],
    "linearize": lambda m: nnx.linearize(m, X)[1](jnp.ones(2)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    """Functions, Modules, bound methods and partials; as a call and as a decorator."""
    m = Net()
    assert FORMS[form](m).tolist() == [3.0, 4.0]
    assert m.calls == (form != "closure")


def test_vjp_as_a_method_decorator():
    """A method that was decorated in the class binds its instance."""

    class Sub(Net):
        @nnx.vjp
        def pulled(self, x):
            return self(x)

    grads, _ = Sub().pulled(X)[1](jnp.ones(2))
    assert as_lists(grads)["w"] == [6.0, 6.0]


def test_vjp_has_aux():
    """The aux value comes out as a third, and may be the Module itself."""
    m = Net()
    y, pull_back, aux = nnx.vjp(lambda m, x: (m(x), (m, "text", m.calls.value)), m, X, has_aux=True)
    assert aux[0] is m
    assert aux[1:] == ("text", 1)
    assert pull_back(y)[1].tolist() == [18.0, 48.0]
    with pytest.raises(errors.ArgumentError, match="must return a pair"):
        nnx.vjp(apply, m, X, has_aux=True)


def test_vjp_argnums():
    """Only what was chosen is differentiated: an argument, or the leaves that a filter takes."""
    m = Net()
    (dx,) = nnx.vjp(apply, m, X, argnums=1)[1](jnp.ones(2))
    assert dx.tolist() == [3.0, 4.0]
    (grads,) = nnx.vjp(apply, m, X, argnums=nnx.DiffState(0, nnx.Param))[1](jnp.ones(2))
    assert list(grads) == ["w"]
    dx, grads = nnx.vjp(apply, m, X, argnums=(1, nnx.DiffState(0, nnx.BatchStat)))[1](jnp.ones(2))
    assert dx.shape == (2,)
    assert list(grads) == ["stat"]
    with pytest.raises(errors.PrefixError, match="selects no leaf of argument 0"):
        nnx.vjp(apply, m, X, argnums=nnx.DiffState(0, nnx.Cache))


def test_vjp_of_an_output_with_a_module():
    """The gradient of an output that holds a Module is a State; what it leaves out is zero; identity is kept."""
    m = Net()
    out, pull_back = nnx.vjp(lambda m, x: {"y": m(x), "m": m, "new": nnx.Param(2 * x)}, m, X)
    assert out["m"] is m
    assert out["new"].value.tolist() == [4.0, 6.0]
    grads, dx = pull_back({"y": jnp.ones(2), "m": nnx.State({"w": jnp.array([1.0, 5.0])}), "new": nnx.Param(X)})
    assert as_lists(grads)["w"] == [7.0, 11.0]
    assert dx.tolist() == [7.0, 10.0]
    assert as_lists(pull_back({"y": jnp.ones(2), "m": None, "new": None})[0])["w"] == [6.0, 6.0]


def test_vjp_of_integers_and_variables():
    """As in JAX an integer argument has a gradient of type float0; a bare Variable has its gradient in a Variable."""
    v = nnx.Param(X)
    _, pull_back = nnx.vjp(lambda v, n: (v * n, n), v, 3)
    gradient, of_n = pull_back((jnp.ones(2), None))
    assert type(gradient) is nnx.Param
    assert gradient.value.tolist() == [3.0, 3.0]
    assert of_n.dtype == jax.dtypes.float0


def test_vjp_of_shared_and_nested():
    """A shared Variable has one gradient, the sum, under its first path; arguments may be nested."""

    class Tied(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(jnp.array(3.0))
            self.z = self.a
            self.me = self

    m = Tied()
    ((grads, dx),) = nnx.vjp(lambda t: t[0].a * t[0].z * t[1], (m, jnp.array(2.0)))[1](1.0)
    assert as_lists(grads) == {"a": 12.0}
    assert dx == 9.0


def test_structure_may_change():
    """What is attached, deleted and swapped inside is so outside; nothing of the trace is left on the object."""
    m = Net()
    other = m.rngs

    def f(m, x):
        y = m(x)
        m.hidden = nnx.Intermediate(y)
        del m.array
        m.first, m.rngs = m.rngs, None
        return y.sum()

    for run in (lambda: nnx.vjp(f, m, X), lambda: nnx.linearize(lambda m, x: m.w.sum(), m, X)):
        run()
    assert m.hidden.value.tolist() == [6.0, 12.0]
    assert not hasattr(m, "array")
    assert m.first is other
    assert m.rngs is None


def test_vjp_function_is_a_pytree():
    """The function can leave a jit, and be mapped over gradients."""
    m = Net()
    y, pull_back = nnx.jit(lambda m, x: nnx.vjp(apply, m, x))(m, X)
    assert as_lists(pull_back(jnp.ones(2))[0])["w"] == [6.0, 6.0]
    assert m.calls == 1
    rows = jax.vmap(pull_back)(jnp.eye(2))
    np.testing.assert_array_equal(rows[0].w.value, [[6.0, 0.0], [0.0, 6.0]])


# --- jvp ------------------------------------------------------------------------------------------------------------


def test_jvp_along_a_state():
    """The State may leave Variables out; they stay where they are."""
    m = Net()
    y, tangent = nnx.jvp(apply, (m, X), (nnx.State({"w": jnp.array([1.0, 0.0])}), jnp.array([0.0, 1.0])))
    assert y.tolist() == [6.0, 12.0]
    assert tangent.tolist() == [6.0, 4.0]
    assert m.calls == 1
    _, tangent, aux = nnx.jvp(lambda m, x: (m(x), "aux"), (m, X), (nnx.state(m, nnx.Param), 0 * X), has_aux=True)
    assert tangent.tolist() == [6.0, 12.0]
    assert aux == "aux"


def test_jvp_takes_tuples():
    m = Net()
    with pytest.raises(errors.ArgumentError, match=r"nnx.jvp\(f, \(x,\), \(tangent,\)\); primals is Net"):
        nnx.jvp(lambda m: m(X), m, nnx.state(m))
    with pytest.raises(errors.ArgumentError, match="tangents is State"):
        nnx.jvp(lambda m: m(X), (m,), nnx.state(m))
    for given, missing in ({"primals": (X,)}, "tangents"), ({"tangents": (X,)}, "primals"):
        with pytest.raises(errors.ArgumentError, match=f"{missing} is Missing"):
            nnx.jvp(jnp.sin, **given)


ABSTRACT = {
    "grad": lambda f, m: nnx.grad(f)(m),
    "vjp": lambda f, m: nnx.vjp(f, m),
    "linearize": lambda f, m: nnx.linearize(f, m),
}


@pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason="the error of JAX names them there")
@pytest.mark.parametrize("transform", ABSTRACT)
def test_shapes_without_values_are_noted_by_path(transform):
    """The error of JAX speaks of the tracers that were made of them."""
    m = nnx.eval_shape(Net)
    with pytest.raises(TypeError) as caught:
        ABSTRACT[transform](lambda m: jnp.sum(m.w.value * X), m)
    assert any("shapes without values" in note and "args[0].w: float32" in note for note in caught.value.__notes__)


def test_jvp_along_a_module():
    """A Module serves as a tangent too, if what it holds has one."""
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    _, a = nnx.jvp(lambda m: m(X), (layer,), (nnx.clone(layer),))
    _, b = nnx.jvp(lambda m: m(X), (layer,), (nnx.state(layer),))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(a, layer(X), rtol=1e-6)


def test_jvp_of_an_output_with_a_module():
    """Its tangent is a State, in which there is also how what was changed moves."""

    def f(m, x):
        m.stat.value = m.w * x
        return m

    m = Net()
    out, tangent = nnx.jvp(f, (m, X), (nnx.State({"w": jnp.ones(2)}), 0 * X))
    assert out is m
    assert m.stat.value.tolist() == [2.0, 6.0]
    assert as_lists(tangent) == {"array": [0.0, 0.0], "stat": [2.0, 3.0], "w": [1.0, 1.0]}


def test_linearize_once_push_often():
    """The function runs once; what is left out of a tangent is zero."""
    m = Net()
    y, push, aux = nnx.linearize(lambda m, x: (m(x), m), m, X, has_aux=True)
    assert aux is m
    assert m.calls == 1
    assert push(nnx.State({"w": jnp.ones(2)}), X).tolist() == [12.0, 18.0]
    assert push(None, X).tolist() == y.tolist()
    assert m.calls == 1
    push = nnx.linearize(apply, m, X, argnums=nnx.DiffState(0, nnx.Param))[1]
    assert push(nnx.State({"w": jnp.ones(2)})).tolist() == [6.0, 6.0]


def test_consistent_with_each_other():
    """⟨u, J v⟩ = ⟨Jᵀ u, v⟩ for a Linear layer, with jvp and linearize for J and vjp for Jᵀ."""
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    f = lambda m, x: jnp.tanh(m(x))
    keys = iter(jax.random.split(jax.random.key(0), 9))
    random = lambda tree: jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), tree)
    v, u = random((nnx.state(layer), X)), random(jnp.zeros(3))
    _, jv = nnx.jvp(f, (layer, X), v)
    pulled = nnx.vjp(f, layer, X)[1](u)
    products = jax.tree.map(jnp.vdot, pulled, v)
    np.testing.assert_allclose(jnp.vdot(u, jv), sum(jax.tree.leaves(products)), rtol=1e-5)
    np.testing.assert_allclose(nnx.linearize(f, layer, X)[1](*v), jv, rtol=1e-6)


# --- nesting --------------------------------------------------------------------------------------------------------

NESTED = {
    "jit": lambda f, m: nnx.jit(f)(m),
    "remat": lambda f, m: nnx.remat(f)(m),
    "grad": lambda f, m: nnx.grad(lambda m: (f(m).sum(), f(m)), has_aux=True)(m)[1],
    "vmap": lambda f, m: nnx.vmap(f, in_axes=None, axis_size=1, out_axes=0)(m)[0],
    "vjp": lambda f, m: nnx.vjp(f, m)[0],
    "jvp": lambda f, m: nnx.jvp(f, (m,), (None,))[0],
}
INNER = {
    "vjp": lambda m: nnx.vjp(read, m, X)[1](jnp.ones(2))[1],
    "jvp": lambda m: nnx.jvp(read, (m, X), (None, jnp.ones(2)))[1],
    "linearize": lambda m: nnx.linearize(read, m, X)[1](None, jnp.ones(2)),
}


def read(m, x):
    return m.w * m.stat * x


@pytest.mark.parametrize("outer", NESTED)
@pytest.mark.parametrize("inner", INNER)
def test_nested(outer, inner):
    """Within every other transform the derivative is the same, and no tracer is left."""
    m = Net()
    with jax.checking_leaks():
        assert NESTED[outer](INNER[inner], m).tolist() == [3.0, 8.0]
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(m))


def test_second_derivatives():
    """The gradient of a vjp, and the vjp of a gradient."""
    m = Net()
    cube = lambda m: (m.w**3).sum()
    first = lambda m: nnx.vjp(cube, m)[1](1.0)[0].w.value.sum()
    assert as_lists(nnx.grad(first)(m)) == {"w": [6.0, 12.0]}
    y, pull_back = nnx.vjp(lambda m: nnx.grad(cube)(m), m)
    assert as_lists(pull_back(nnx.State({"w": jnp.ones(2)}))[0])["w"] == [6.0, 12.0]


# --- errors ---------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    pass


def fails(m, x):
    m.calls += 1
    m.w = nnx.Param(x)
    m.debris = x * 2
    raise Interrupted


RUN = {
    "vjp": lambda f, m: nnx.vjp(f, m, X),
    "jvp": lambda f, m: nnx.jvp(f, (m, X), (None, X)),
    "linearize": lambda f, m: nnx.linearize(f, m, X),
}


@pytest.mark.parametrize("name", RUN)
def test_failing_changes_nothing(name):
    """After an exception, also an interrupt, each object is as it was."""
    m = Net()
    before = snapshot(m)
    with pytest.raises(Interrupted):
        RUN[name](fails, m)
    assert snapshot(m) == before


@pytest.mark.parametrize("name", RUN)
def test_write_across_traces(name):
    """Under raw JAX a live Module can be read; a write is refused, naming the Variable, and changes nothing."""
    m = Net()
    before = snapshot(m)
    with pytest.raises(errors.TraceContextError, match="calls"):
        jax.jit(lambda: RUN[name](apply, m)[0])()
    assert snapshot(m) == before
    np.testing.assert_array_equal(jax.jit(lambda: RUN[name](read, m)[0])(), [6.0, 24.0])


WRONG = {
    "shape": (
        lambda m: nnx.jvp(apply, (m, X), (nnx.State({"w": jnp.ones(3)}), X)),
        r"args\[0\].w must be float32\[2\]",
    ),
    "dtype": (lambda m: nnx.jvp(apply, (m, X), (None, jnp.ones(2, int))), r"args\[1\] must be float32\[2\]"),
    "integer": (lambda m: nnx.jvp(apply, (m, X), (nnx.state(m), X)), r"args\[0\].calls, but that leaf \(int32\[\]\)"),
    "unknown": (lambda m: nnx.jvp(apply, (m, X), (nnx.State({"v": X}), X)), r"args\[0\].v, but there is no such leaf"),
    "no State": (lambda m: nnx.jvp(apply, (m, X), (X, X)), r"Module at args\[0\] must be a State"),
    "count": (lambda m: nnx.jvp(apply, (m, X), (X,)), "one tangent for each argument: 1 for 2"),
    "push count": (lambda m: nnx.linearize(apply, m, X)[1](X), "one tangent for each argument: 1 for 2"),
    "gradient": (lambda m: nnx.vjp(apply, m, X)[1](jnp.ones(3)), r"gradient of <output> must be float32\[2\]"),
    "gradient in a Module": (
        lambda m: nnx.vjp(lambda m: [m], m)[1]([nnx.State({"w": jnp.ones(3)})]),
        r"gradient of <output>\[0\].w must be",
    ),
    "structure": (lambda m: nnx.vjp(lambda m: (m.w, m.w), m)[1](X), "gradient must be a pytree like the value"),
    "argument": (lambda m: nnx.vjp(lambda m, s: m.w, m, "text"), r"args\[1\] is a str \('text'\), which JAX cannot"),
}


@pytest.mark.parametrize("case", WRONG)
def test_messages(case):
    """What is wrong, and at which path."""
    run, message = WRONG[case]
    with pytest.raises(errors.ArgumentError, match=message):
        run(Net())


def test_jvp_of_a_function_that_is_given_later():
    assert [float(x) for x in nnx.jvp(jnp.sin)((0.0,), (2.0,))] == [0, 2]
    assert nnx.jvp(has_aux=True)(lambda x: (2 * x, "aux"))((1.0,), (1.0,)) == (2, 2, "aux")


# --- what JAX 0.12 has added ----------------------------------------------------------------------------------------

of_new_jax = pytest.mark.skipif("in_nzs" not in inspect.signature(jax.vjp).parameters, reason="JAX has no in_nzs")


def two(w, b, x):
    return jnp.sin(x * w), 2 * b


class Two(nnx.Module):
    def __init__(self):
        self.w, self.b, self.calls = nnx.Param(X + 1), nnx.Param(X + 2), nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls += 1
        return two(self.w, self.b, x)


NON_ZERO = {
    "Module": (False, (False, False, True)),
    "filters": (nnx.StateAxes({nnx.PathContains("b"): False, ...: True}), (True, False, True)),
    "all": (True, (True, True, True)),
}


@of_new_jax
@pytest.mark.parametrize("case", NON_ZERO)
def test_what_has_a_tangent(case):
    """As in JAX, the gradient of what is marked False is zero, and out_nzs has what that means for the output."""
    ours, theirs = NON_ZERO[case]
    m, ones = Two(), (jnp.ones(2), jnp.ones(2))
    _, pull = jax.vjp(two, m.w.value, m.b.value, X, in_nzs=theirs)
    _, pull_back = nnx.vjp(Two.__call__, m, X, in_nzs=(ours, True))
    grads, dx = pull_back(ones)
    assert jax.tree.map(np.array_equal, (grads.w.value, grads.b.value, dx), pull(ones)) == (True, True, True)
    assert pull_back.out_nzs == tuple(pull.out_nzs)
    _, push = jax.linearize(two, m.w.value, m.b.value, X, in_nzs=theirs)
    _, push_forward = nnx.linearize(Two.__call__, m, X, in_nzs=(ours, True))
    given = nnx.state(m, nnx.Param), X
    assert jax.tree.map(np.array_equal, push_forward(*given), push(m.w.value, m.b.value, X)) == (True, True)
    assert push_forward.out_nzs == tuple(push.out_nzs)
    assert m.calls == 2


@of_new_jax
def test_arguments_that_are_not_kept():
    """They are put back before the call: Modules, States or arrays; also after the pull-back has left a jit."""
    m, ones = Two(), (jnp.ones(2), jnp.ones(2))
    _, expected = nnx.vjp(Two.__call__, m, X)
    _, pull_back = nnx.jit(lambda m, x: nnx.vjp(Two.__call__, m, x, saveable_args=False))(m, X)
    kept, x = pull_back.args_res
    assert [type(y).__name__ for y in (kept.w.value, kept.b.value, x)] == ["NotSaveable", "NotNeeded", "NotSaveable"]
    assert not jax.tree.leaves(pull_back.args_res)
    with pytest.raises(ValueError, match="restor"):
        pull_back(ones)
    with pytest.raises(errors.ArgumentError, match="one value for each argument: 1 for 2"):
        pull_back.args_res = (m,)
    with pytest.raises(errors.ArgumentError, match=r"argument of args\[1\] must be float32\[2\]"):
        pull_back.args_res = (m, X[:1])
    for given in m, nnx.state(m):
        pull_back.args_res = given, X
        assert jax.tree.all(jax.tree.map(np.array_equal, pull_back(ones), expected(ones)))


@of_new_jax
def test_prefixes_of_bools():
    with pytest.raises(errors.PrefixError, match="takes True, False or"):
        nnx.vjp(apply, Net(), X, in_nzs=(0, True))
    with pytest.raises(errors.PrefixError, match="in_nzs"):
        nnx.vjp(apply, Net(), X, in_nzs=(True, True, True))


@pytest.mark.parametrize(
    ("transform", "option"), [("vjp", "in_nzs"), ("vjp", "saveable_args"), ("linearize", "in_nzs")]
)
def test_options_of_a_newer_jax(transform, option):
    if option in inspect.signature(getattr(jax, transform)).parameters:
        pytest.skip("JAX has it")
    with pytest.raises(TypeError, match=f"{transform}.. got an unexpected keyword argument '{option}'"):
        getattr(nnx, transform)(apply, Net(), X, **{option: False})


@pytest.mark.parametrize("jitted", [True, False])
def test_forward_and_backward(jitted):
    """The two passes of vjp, compiled once each; changes come out of the first."""
    traced = []

    def f(m, x, factor=1.0):
        traced.append("f")
        return factor * m(x), m.calls.value

    forward, backward = nnx.fwd_and_bwd(f, (0, 1), has_aux=True, jitted=jitted)
    m = Net()
    for calls in 1, 2, 3:
        y, residuals, aux = forward(m, X, factor=2.0)
        assert y.tolist() == [12.0, 24.0]
        assert m.calls == aux == calls
        grads, dx = backward(residuals, jnp.array([1.0, 10.0]))
        assert as_lists(grads) == {"array": [12.0, 480.0], "stat": [4.0, 60.0], "w": [12.0, 120.0]}
        assert dx.tolist() == [6.0, 80.0]
    if jitted:
        assert len(traced) <= 2  # the second for fewer inputs
        assert len(backward._plans) == 1
    forward, backward = nnx.fwd_and_bwd(m, 0, jitted=jitted)
    assert backward(forward(X)[1], jnp.ones(2)).tolist() == [3.0, 4.0]
