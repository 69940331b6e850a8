"""nnx.jacfwd, nnx.jacrev and nnx.hessian: the trees within trees that JAX gives, with States for Modules."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors

X = jnp.array([2.0, 3.0])
BOTH = {"jacfwd": (nnx.jacfwd, jax.jacfwd), "jacrev": (nnx.jacrev, jax.jacrev)}


class Net(nnx.Module):
    def __init__(self):
        self.w, self.b = nnx.Param(jnp.array([[1.0, 2.0], [3.0, 4.0]])), nnx.Param(jnp.array([0.5, 0.25]))
        self.stat = nnx.BatchStat(jnp.ones(2))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls += 1
        return jnp.tanh(x @ self.w + self.b) * self.stat


def apply(m, x):
    return m(x)


def raw(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) * p["stat"]


def params(m, *names):
    return {name: getattr(m, name).value for name in names or ("w", "b", "stat")}


def assert_close(a, b):
    """Equal as nested dicts of arrays."""
    a = nnx.to_pure_dict(a) if isinstance(a, nnx.State) else a
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.parametrize("name", BOTH)
def test_the_params_of_a_module(name):
    """A number stands for the Params; the leaves are arrays of shape (*output, *argument), as JAX gives them."""
    ours, theirs = BOTH[name]
    m = Net()
    jacobian = ours(apply)(m, X)
    assert isinstance(jacobian, nnx.State)
    assert isinstance(jacobian.w, jax.Array)
    assert_close(jacobian, theirs(lambda p: raw({**params(m), **p}, X))(params(m, "w", "b")))
    assert m.calls == 1


@pytest.mark.parametrize("name", BOTH)
def test_argnums_and_aux(name):
    """Several arguments give a tuple at each leaf of the output; filters choose leaves; aux comes beside it."""
    ours, theirs = BOTH[name]
    m = Net()
    argnums = (1, nnx.DiffState(0, nnx.BatchStat))
    jacobian, aux = ours(lambda m, x: ({"y": m(x)}, m), argnums=argnums, has_aux=True)(m, X)
    assert aux is m
    expected = theirs(lambda x, s: raw({**params(m), **s}, x), argnums=(0, 1))(X, params(m, "stat"))
    assert_close(jacobian["y"][0], expected[0])
    assert_close(jacobian["y"][1], expected[1])
    assert ours(apply, argnums=-1)(m, X).shape == (2, 2)


@pytest.mark.parametrize("name", BOTH)
def test_an_output_with_a_module(name):
    """A Module in the output has a State of what a leaf would have."""
    m = Net()

    def f(m, x):
        m.stat.value = m.b * x
        return m

    jacobian = BOTH[name][0](f, argnums=nnx.DiffState(0, nnx.PathContains("b")))(m, X)
    assert_close(jacobian.stat, {"b": jnp.diag(X)})
    assert_close(jacobian.b, {"b": jnp.eye(2)})
    assert "calls" not in jacobian
    assert m.stat.value.tolist() == [1.0, 0.75]


@pytest.mark.parametrize("transform", [nnx.jacfwd, nnx.jacrev, nnx.hessian])
def test_keyword_arguments(transform):
    """They reach the function, and are not differentiated."""
    f = lambda x, *, scale, m: (scale * m.b * x**3).sum()
    found = transform(f)(X, scale=2.0, m=Net())
    assert_close(found, getattr(jax, transform.__name__)(lambda x: f(x, scale=2.0, m=Net()))(X))


@pytest.mark.parametrize("transform", [nnx.jacfwd, nnx.jacrev, nnx.hessian])
def test_an_argument_passed_by_name_has_its_position(transform):
    """As in JAX and :func:`nnxlib.grad`; and a number of NumPy counts as one."""
    f = lambda x, y: (x**2 * y**3).sum()
    expected = getattr(jax, transform.__name__)(f, argnums=1)(X, X)
    assert_close(transform(f, argnums=1)(X, y=X), expected)
    assert_close(transform(f, argnums=np.int64(1))(X, X), expected)


def test_hessian():
    """A State with a State in each leaf, equal to that of JAX; state changes once."""
    m = Net()
    loss = lambda m, x: (m(x) ** 2).sum()
    second = nnx.hessian(loss)(m, X)
    assert m.calls == 1
    assert second.w.b.shape == (2, 2, 2)
    expected = jax.hessian(lambda p: (raw({**params(m), **p}, X) ** 2).sum())(params(m, "w", "b"))
    assert_close(second, expected)
    assert nnx.hessian(argnums=1)(loss)(m, X).shape == (2, 2)
    second, aux = nnx.hessian(lambda m, x: (loss(m, x), m), has_aux=True)(m, X)
    assert aux is m
    assert_close(second, expected)


@pytest.mark.parametrize("name", BOTH)
def test_forms(name):
    """A Module, a bound method, a method decorated in the class, a keyword argument."""
    ours, _ = BOTH[name]

    class Sub(Net):
        by_decorator = ours(apply)

    m = Sub()
    for jacobian in (ours(m)(X), ours(m.__call__)(X), ours(lambda x, m: m(x))(X, m=m)):
        assert jacobian.shape == (2, 2)
    assert m.by_decorator(X).w.shape == (2, 2, 2)


def test_holomorphic_and_integers():
    """Complex Params with holomorphic=True; integers with allow_int=True."""
    m = nnx.Dict(c=nnx.Param(jnp.array(1j)))
    assert nnx.jacrev(lambda m: m.c**2, holomorphic=True)(m).c == 2j
    assert nnx.jacfwd(lambda m: m.c**2, holomorphic=True)(m).c == 2j
    double = lambda n: 2.0 * n
    assert nnx.jacrev(double, allow_int=True)(3).dtype == jax.jacrev(double, allow_int=True)(3).dtype


@pytest.mark.parametrize("name", BOTH)
def test_nested_and_failing(name):
    """Inside jit and vmap it is the same; a function that raises changes nothing."""
    ours, _ = BOTH[name]
    m = Net()
    expected = ours(apply, argnums=1)(m, X)
    with jax.checking_leaks():
        np.testing.assert_allclose(nnx.jit(ours(apply, argnums=1))(m, X), expected, rtol=1e-6)
    read = nnx.vmap(ours(lambda m, x: x @ m.w, argnums=1), in_axes=(None, 0))(m, jnp.stack([X, X]))
    assert read.shape == (2, 2, 2)
    assert m.calls == 2

    def fails(m):
        m.calls += 1
        m.extra = m.w * 2
        raise RuntimeError

    with pytest.raises(RuntimeError):
        ours(fails)(m)
    assert m.calls == 2
    assert not hasattr(m, "extra")


@pytest.mark.parametrize("name", BOTH)
def test_messages(name):
    """What cannot be differentiated is named by its path, among the arguments and in the output."""
    ours, _ = BOTH[name]
    with pytest.raises(errors.ArgumentError, match=r"args\[0\].calls: its dtype is int32"):
        ours(apply, argnums=nnx.DiffState(0, ...))(Net(), X)
    with pytest.raises(errors.ArgumentError) as caught:
        ours(lambda n: 2.0 * n)(3)
    assert ("allow_int" in str(caught.value)) == ("allow_int" in inspect.signature(ours).parameters)
    with pytest.raises(errors.ArgumentError, match=r"<output>\[1\]: it is not of floating"):
        ours(lambda m: (m.w.sum(), m.calls.value))(Net())
    with pytest.raises(errors.ArgumentError, match=r"<output>: it is not of floating"):
        ours(lambda m: m.calls)(Net())
    with pytest.raises(errors.PrefixError, match="argnums has 2"):
        ours(apply, argnums=2)(Net(), X)
