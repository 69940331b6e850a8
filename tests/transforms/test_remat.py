"""nnx.remat: recomputes in the backward pass, changes nothing else, and loses no state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from tests.properties.compare import Snapshot, assert_no_tracer

from .models import RAW, Layer, Norm, Pair, X


class Decorated(Layer):
    @nnx.remat
    def bare(self, x):
        return self(x)

    @nnx.remat(prevent_cse=False)
    def with_options(self, x):
        return self(x)

    @nnx.remat(static_argnums=2)
    def repeated(self, x, times):
        for _ in range(times):
            x = self(x)
        return x

    @nnx.remat(static_argnames="times")
    def named(self, x, *, times):
        return self.repeated(x, times)


class DecoratedCall(nnx.Module):
    def __init__(self):
        self.inner = Layer()

    @nnx.remat
    def __call__(self, x):
        return self.inner(x)


class Holder(nnx.Module):
    """Checkpoints one of its own methods when called, the way published models do."""

    def __init__(self):
        self.inner = Layer()

    def block(self, x):
        return self.inner(x)

    def __call__(self, x):
        return nnx.remat(self.block.__func__)(self, x)


def run(model, x):
    return model(x)


WAYS = {
    "function": lambda: (nnx.remat(run), Layer()),
    "empty parentheses": lambda: (nnx.remat()(run), Layer()),
    "options first": lambda: (nnx.remat(prevent_cse=False)(run), Layer()),
    "checkpoint": lambda: (nnx.checkpoint(run), Layer()),
    "unbound method": lambda: (nnx.remat(Layer.__call__), Layer()),
    "bound method": lambda: ((lambda m, x: nnx.remat(m.__call__)(x)), Layer()),
    "Module": lambda: ((lambda m, x: nnx.remat(m)(x)), Layer()),
    "partial": lambda: ((lambda m, x: nnx.remat(functools.partial(run, m))(x)), Layer()),
    "partial by keyword": lambda: ((lambda m, x: nnx.remat(functools.partial(run, x=x))(m)), Layer()),
    "keyword": lambda: ((lambda m, x: nnx.remat(run)(m, x=x)), Layer()),
    "decorated method": lambda: (lambda m, x: m.bare(x), Decorated()),
    "decorated method with options": lambda: (lambda m, x: m.with_options(x), Decorated()),
    "decorated __call__": lambda: (run, DecoratedCall()),
    "function of a bound method": lambda: (run, Holder()),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_use_gives_the_value_the_gradient_and_the_state_of_a_plain_call(way):
    f, model = WAYS[way]()
    layer = model if isinstance(model, Layer) else model.inner
    np.testing.assert_allclose(f(model, X), Layer()(X), rtol=1e-6)
    assert layer.calls.value == 1
    grads = nnx.grad(lambda m, x: f(m, x).sum())(model, X)
    expected = nnx.grad(lambda m, x: m(x).sum())(Layer(), X)
    np.testing.assert_allclose(jax.tree.leaves(grads)[0], expected.w.value, rtol=1e-6)
    assert layer.calls.value == 2


def sines(policy, prevent_cse=True):
    def f(model, x):
        return jnp.sin(jnp.sin(model.w * x)).sum()

    model, options = Layer(), {"policy": policy, "prevent_cse": prevent_cse}
    return str(jax.make_jaxpr(lambda x: nnx.grad(nnx.remat(f, **options))(model, x).w.value)(X))


def test_the_policy_decides_what_is_computed_again():
    again = sines(None).count(" sin ")
    assert again > sines(jax.checkpoint_policies.everything_saveable).count(" sin ")
    assert again == sines(jax.checkpoint_policies.nothing_saveable).count(" sin ")


@pytest.mark.parametrize("make", [nnx.remat, functools.partial(nnx.remat_scan, lengths=(2, 3))])
def test_a_policy_that_is_not_a_function_is_refused_at_once(make):
    with pytest.raises(errors.ArgumentError, match=r"A policy is a function.* got 'dots_saveable'"):
        make(lambda x: x, policy="dots_saveable")


def test_prevent_cse_reaches_jax():
    assert "prevent_cse=False" in sines(None, prevent_cse=False)
    assert "prevent_cse=True" in sines(None)


def test_static_arguments_are_python_values_inside():
    model = Decorated()
    assert model.repeated(X, 3).shape == (3,)
    assert model.calls.value == 3
    f = nnx.remat(lambda m, x, flag: m(x) if flag else x, static_argnums=(-1,))
    np.testing.assert_array_equal(f(model, X, False), X)
    np.testing.assert_array_equal(f(model, flag=False, x=X), X)
    assert model.named(X, times=2).shape == (3,)
    g = nnx.remat(lambda m, x, flag: m(x) if flag else x, static_argnames=["flag"])
    np.testing.assert_array_equal(g(model, X, False), X)
    with pytest.raises(errors.PrefixError, match=r"static_argnames has \['flags'\]"):
        nnx.remat(lambda m, flag: m, static_argnames="flags")


def test_prevent_cse_of_some_arguments():
    """Each leaf of a Module has that of its argument; what was bound to the function is kept from the compiler."""
    model, f = Layer(), lambda m, x: jnp.sin(m(x)).sum()
    expected = nnx.grad(f)(nnx.clone(model), X)
    for cse in (True, False), [False, False]:
        found = nnx.grad(nnx.remat(f, prevent_cse=cse))(model, X)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    bound = nnx.remat(functools.partial(f, model), prevent_cse=(False,))
    np.testing.assert_array_equal(bound(X), f(nnx.clone(model), X))
    with pytest.raises(errors.PrefixError, match=r"prevent_cse=.* has 'yes'; it takes booleans"):
        nnx.remat(f, prevent_cse=("yes", False))
    with pytest.raises(errors.PrefixError, match="there are 2 values"):
        nnx.remat(f, prevent_cse=(True,))(model, X)


def test_a_static_argument_may_be_left_out():
    """One with a default, of a function as of a method; given by name it is static as well."""

    class Switched(Layer):
        @nnx.remat(static_argnums=2)
        def run(self, x, flag=False):
            return x if flag else 2 * x

    f = nnx.remat(lambda m, x, flag=False: x if flag else 2 * x, static_argnums=2)
    for call in (functools.partial(f, Layer()), Switched().run):
        np.testing.assert_array_equal(call(X), 2 * X)
        np.testing.assert_array_equal(call(X, flag=True), X)


def test_a_static_argument_that_the_call_does_not_have_is_an_error():
    with pytest.raises(errors.PrefixError, match="static_argnums has 5, but run takes 2 positional arguments"):
        nnx.remat(run, static_argnums=5)


def test_an_array_among_static_arguments_is_an_argument():
    """As jax.checkpoint takes it: an attention mask beside a flag, also one that is traced, and with a gradient."""
    f = nnx.remat(lambda m, x, mask=None, flag=True: m(x if mask is None else x * mask), static_argnums=(2, 3))
    expected = Layer()(2 * X)
    np.testing.assert_array_equal(f(Layer(), X, 2 * jnp.ones_like(X), False), expected)
    np.testing.assert_array_equal(f(Layer(), X, mask=2 * jnp.ones_like(X)), expected)
    gradient = lambda f: jax.jit(jax.grad(lambda mask: f(Layer(), X, mask, False).sum()))(jnp.ones_like(X))
    np.testing.assert_array_equal(gradient(f), gradient(lambda m, x, mask, flag: m(x * mask)))


def test_structure_changes_come_out():
    """What is attached, deleted and swapped inside has happened to the objects that were passed in."""

    def f(m, x):
        m.new = nnx.Cache(x)
        del m.tied
        m.a, m.b = m.b, m.a
        return m.a

    m = Pair()
    a, b = m.a, m.b
    out = nnx.remat(f)(m, X)
    assert out is b
    assert m.a is b
    assert m.b is a
    assert m.me is m
    assert not hasattr(m, "tied")
    np.testing.assert_array_equal(m.new.value, X)


def test_shared_and_cyclic_objects_keep_their_identity_across_arguments():
    def f(m, v):
        assert m.me is m
        assert m.tied is m.a.w
        assert v is m.tied
        v.value = v.value + 1
        return m.tied

    m = Pair()
    assert nnx.remat(f)(m, m.a.w) is m.a.w
    np.testing.assert_array_equal(m.a.w.value, [2, 2, 2])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_body_changes_nothing(error):
    def f(m, x):
        y = m(x)
        m.new = nnx.Param(y)
        raise error

    m = Pair()
    before = Snapshot(m)
    with pytest.raises(error):
        nnx.remat(f)(m, X)
    before.assert_unchanged()


@pytest.mark.parametrize("raw", RAW)
def test_a_read_only_forward_under_raw_jax_leaves_the_live_model_as_it_was(raw):
    m = Norm()
    m.training = False
    before = Snapshot(m)
    RAW[raw](lambda x: nnx.remat(run)(m, x))
    before.assert_unchanged()


def test_a_write_under_raw_jax_is_refused_by_path_and_writes_nothing():
    m = Norm()
    before = Snapshot(m)
    with pytest.raises(errors.TraceContextError, match=r"which is m\.count"):
        jax.jit(lambda x: nnx.remat(run)(m, x))(X)
    before.assert_unchanged()


def test_no_tracer_leaks():
    m = Norm()
    with jax.checking_leaks():
        nnx.jit(nnx.grad(nnx.remat(lambda m, x: m(x).sum())))(m, X)
    assert m.count.value == 1


def test_statistics_inside_grad_inside_remat_inside_scan_inside_jit():
    """A counter goes through four transforms, and the statistics equal those of the plain loop."""

    def loss(m, x):
        return m(x).sum()

    def step(m, x):
        return nnx.remat(nnx.grad(loss))(m, x).scale.value

    @nnx.jit
    def train(m, xs):
        axes = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None})
        return nnx.scan(step, in_axes=(axes, 0), out_axes=0)(m, xs)

    xs = jnp.stack([X, 2 * X, 3 * X])
    m, plain = Norm(), Norm()
    grads = train(m, xs)
    expected = jnp.stack([nnx.grad(loss)(plain, x).scale.value for x in xs])
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(m.mean.value, plain.mean.value, rtol=1e-6)
    assert m.count.value == 3
    assert_no_tracer(m)


def test_constants_come_out_as_arrays():
    """`jax.checkpoint` called eagerly hands out literals of its own for constants."""
    v = nnx.Variable(jnp.ones(2))

    @nnx.remat
    def reset(v):
        v[...] = jnp.zeros(2)
        return 0.0

    assert isinstance(reset(v), jax.Array)
    assert isinstance(v.get_raw_value(), jax.Array)
    assert jnp.array_equal(v.at[0].set(1.0), jnp.array([1.0, 0.0]))


def test_a_nan_is_found_in_eager_code():
    """With the layer that made it."""
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.constant(jnp.nan))
    for _ in range(2):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan") as caught:
            nnx.remat(layer)(jnp.ones((1, 2)))
        assert any("dot_general. In Linear" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("call", [lambda f, m: f(m, "a"), lambda f, m: f(m, name="a")], ids=["args[1]", "kwargs.name"])
def test_an_argument_that_cannot_be_traced_is_an_error_that_says_what_to_do(call, request):
    where = request.node.callspec.id.replace("[", r"\[").replace("]", r"\]")
    f = nnx.remat(lambda m, name: m(X) if name == "a" else X)
    with pytest.raises(
        errors.ArgumentError, match=rf"{where} is a str \('a'\), which JAX cannot trace.*static_argnums"
    ):
        call(f, Layer())
    assert nnx.remat(lambda m, name: m(X), static_argnums=1)(Layer(), "a").shape == X.shape
