"""jit, grad, eval_shape and capture: the same script under flax.nnx and nnxlib gives the same results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")


from .results import ROUNDING, same

# flax warns of its own deprecated names.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

X = jax.random.normal(jax.random.key(0), (4, 2))


@functools.cache
def classes(nnx):
    """The Modules of the scripts, as a user of either library would write them."""

    class Block(nnx.Module):
        def __init__(self, din, dout, *, rngs):
            self.linear = nnx.Linear(din, dout, rngs=rngs)
            self.norm = nnx.BatchNorm(dout, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.calls = nnx.Cache(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            return nnx.relu(self.dropout(self.norm(self.linear(x))))

    class Net(nnx.Module):
        def __init__(self, *, rngs):
            self.first = Block(2, 3, rngs=rngs)
            self.second = nnx.Linear(3, 3, rngs=rngs)
            self.scale = 2.0

        def __call__(self, x, times=1):
            x = self.first(x)
            for _ in range(times):
                x = self.second(x)
            return self.scale * x

        @nnx.jit
        def jitted(self, x):
            return self(x)

        @nnx.jit(static_argnames="times")
        def jitted_static(self, x, times):
            return self(x, times=times)

        def loss(self, x):
            return (self(x) ** 2).mean()

    class Sown(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(2, 2, rngs=rngs)

        def __call__(self, x):
            x = self.perturb("delta", self.linear(x))
            self.sow(nnx.Intermediate, "hidden", x)
            self.sow(nnx.Intermediate, "sum", x.sum(), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
            return jnp.tanh(x).sum()

    class SownTwice(nnx.Module):
        def __init__(self, *, rngs):
            self.inner = Sown(rngs=rngs)

        def __call__(self, x):
            return self.inner(x) + self.inner(2 * x)

    return Block, Net, Sown, SownTwice


def net(nnx, seed=0):
    return classes(nnx)[1](rngs=nnx.Rngs(seed))


def sown(nnx, twice=False):
    return classes(nnx)[3 if twice else 2](rngs=nnx.Rngs(0))


# --- jit ------------------------------------------------------------------------------------------------------------

JIT = {
    "function": lambda nnx, m: nnx.jit(lambda m, x: m(x))(m, X),
    "by keyword": lambda nnx, m: nnx.jit(lambda m, x: m(x))(m, x=X),
    "unbound method": lambda nnx, m: nnx.jit(type(m).__call__)(m, X),
    "decorated method": lambda nnx, m: m.jitted(X),
    "decorated method with a static argument": lambda nnx, m: [m.jitted_static(X, times=n) for n in (1, 2, 1)],
    "static_argnums": lambda nnx, m: [nnx.jit(lambda m, x, n: m(x, n), static_argnums=2)(m, X, n) for n in (0, 2)],
    "static_argnames": lambda nnx, m: nnx.jit(lambda m, x, *, n: m(x, n), static_argnames=("n",))(m, X, n=2),
    "donation": lambda nnx, m: nnx.jit(lambda m, x: m(x), donate_argnums=0)(m, X + 0),
    "donate_argnames": lambda nnx, m: nnx.jit(lambda m, x: x + m(x).sum(), donate_argnames="x")(m, x=X + 0),
    "options": lambda nnx, m: nnx.jit(lambda m, x: m(x), keep_unused=True, inline=True)(m, X),
    "partial": lambda nnx, m: nnx.jit(functools.partial(lambda m, x, n: m(x, n), n=2))(m, X),
    "in a dict and a tuple": lambda nnx, m: nnx.jit(lambda t: t["m"](t["x"][0]))({"m": m, "x": (X, None)}),
    "the same Module twice": lambda nnx, m: nnx.jit(lambda a, b, x: a(x) + b(x))(m, m, X),
    "a Module and its part": lambda nnx, m: nnx.jit(lambda a, b, x: b(a(x)))(m, m.second, X),
    "Variables": lambda nnx, m: nnx.jit(lambda v, w: v * w)(m.first.linear.bias, m.second.bias),
    "a State": lambda nnx, m: nnx.jit(lambda s: jax.tree.map(lambda x: 2 * x, s))(nnx.state(m, nnx.Param)),
    "split and merge": lambda nnx, m: nnx.jit(lambda g, s, x: nnx.state(merged(nnx, g, s, x)))(
        *nnx.split(nnx.clone(m)), X
    ),
    "twice": lambda nnx, m: [f(m, X) for f in [nnx.jit(lambda m, x: m(x))] * 2],
    "train and eval": lambda nnx, m: [
        (getattr(m, mode)(), f(m, X))[1] for f in [nnx.jit(lambda m, x: m(x))] for mode in ("eval", "train", "eval")
    ],
    "attach": lambda nnx, m: nnx.jit(lambda m, x: setattr(m, "extra", nnx.Cache(x)))(m, X),
    "delete": lambda nnx, m: nnx.jit(lambda m: delattr(m, "second"))(m),
    "swap": lambda nnx, m: nnx.jit(lambda m: m.set_attributes(first=m.second, second=m.first))(m),
    "share": lambda nnx, m: nnx.jit(lambda m: setattr(m, "first", m.second))(m),
    "return the Module": lambda nnx, m: nnx.jit(lambda m, x: (m, m.first, m(x)))(m, X),
    "a Module made inside": lambda nnx, m: nnx.jit(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(1)))(),
    "an Rngs": lambda nnx, m: nnx.jit(lambda rngs: (rngs.params(), rngs.dropout()))(nnx.Rngs(0, dropout=1)),
    "jit of jit": lambda nnx, m: nnx.jit(lambda m, x: nnx.jit(lambda m, x: m(x))(m, x))(m, X),
    "eval_shape of jit": lambda nnx, m: jax.eval_shape(lambda x: nnx.jit(lambda x: 2 * x)(x), X),
}


def merged(nnx, graphdef, state, x):
    model = nnx.merge(graphdef, state)
    model(x)
    return model


@pytest.mark.parametrize("name", JIT)
def test_jit(name):
    """The output, and the whole state of the model afterwards."""

    def script(nnx):
        model = net(nnx)
        return JIT[name](nnx, model), model

    same(script, ROUNDING)


def test_identity():
    """Arguments that are returned are the same object, shared parts stay shared, attached ones are attached."""

    def script(nnx):
        model = net(nnx)
        first, kernel = model.first, model.first.linear.kernel

        def f(m):
            m.first, m.second = m.second, m.first
            m.tied = m.first
            return m, m.second

        out, second = nnx.jit(f)(model)
        return [
            out is model, second is first, model.second is first, model.tied is model.first,
            first.linear.kernel is kernel,
        ]  # fmt: skip

    same(script, ROUNDING)


def test_stages():
    """lower, compile, call."""

    def script(nnx):
        model = net(nnx)
        compiled = nnx.jit(lambda m, x: m(x)).lower(model, X).compile()
        by_name = nnx.jit(lambda m, x, n, *, k=1: m(x) * n + k, static_argnums=2, static_argnames="k")
        without_static = by_name.lower(model, X, 3, k=2).compile()
        return [compiled(model, X), compiled(model, X), without_static(model, X), model]

    same(script, ROUNDING)


def test_shardings():
    """in_shardings and out_shardings with a StateSharding, on one device."""

    def script(nnx):
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
        rows, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*a)) for a in (("data",), ()))
        model = net(nnx)
        state = nnx.StateSharding({nnx.Param: whole, ...: None})
        out = nnx.jit(lambda m, x: m(x), in_shardings=(state, rows), out_shardings=rows)(model, X)
        return out, str(out.sharding.spec), model

    same(script, ROUNDING)


# --- grad -----------------------------------------------------------------------------------------------------------


def loss(m, x, n=1):
    return (m(x, n) ** 2).mean()


GRAD = {
    "default": lambda nnx, m: nnx.grad(loss)(m, X),
    "value_and_grad": lambda nnx, m: nnx.value_and_grad(loss)(m, X),
    "decorator": lambda nnx, m: nnx.value_and_grad(argnums=0)(loss)(m, X),
    "method": lambda nnx, m: nnx.grad(type(m).loss)(m, X),
    "argnums=1": lambda nnx, m: nnx.grad(loss, argnums=1)(m, X),
    "argnums=(0, 1)": lambda nnx, m: nnx.grad(loss, argnums=(0, 1))(m, X),
    "argnums=(1, 0)": lambda nnx, m: nnx.value_and_grad(loss, argnums=(1, 0))(m, X),
    "two Modules": lambda nnx, m: nnx.grad(lambda a, b, x: loss(b, a.first.linear(x)[:, :2]), argnums=(0, 1))(
        m, net(nnx, 1), X
    ),
    "one of two Modules": lambda nnx, m: nnx.grad(lambda a, b: loss(a, X) + loss(b, X), argnums=1)(m, net(nnx, 1)),
    "DiffState by path": lambda nnx, m: nnx.grad(loss, argnums=nnx.DiffState(0, nnx.PathContains("kernel")))(m, X),
    "DiffState by type": lambda nnx, m: nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param))(m, X),
    "DiffState of everything": lambda nnx, m: nnx.grad(lambda m: m(X).sum(), argnums=nnx.DiffState(0, ...))(
        m.first.linear
    ),
    "DiffState of two types": lambda nnx, m: nnx.grad(
        lambda m: m.norm.scale.sum() + (m.norm.mean[...] ** 2).sum(),
        argnums=nnx.DiffState(0, (nnx.Param, nnx.BatchStat)),
    )(m.first),
    "DiffState and int": lambda nnx, m: nnx.value_and_grad(
        loss, argnums=(nnx.DiffState(0, nnx.PathContains("kernel")), 1)
    )(m, X),
    "two DiffStates": lambda nnx, m: nnx.grad(
        lambda a, b, x: loss(a, x) * loss(b, x),
        argnums=(nnx.DiffState(0, nnx.PathContains("bias")), nnx.DiffState(1, nnx.PathContains("kernel"))),
    )(m, net(nnx, 1), X),
    "has_aux": lambda nnx, m: nnx.grad(lambda m, x: (loss(m, x), {"y": 2 * x, "n": 3}), has_aux=True)(m, X),
    "value_and_grad has_aux": lambda nnx, m: nnx.value_and_grad(lambda m, x: (loss(m, x), (m, x)), has_aux=True)(m, X),
    "a keyword": lambda nnx, m: nnx.grad(loss)(m, x=X, n=2),
    "a Variable": lambda nnx, m: nnx.grad(lambda v: (v**2).sum())(m.first.linear.kernel),
    "a dict": lambda nnx, m: nnx.grad(lambda t: loss(t["m"], t["x"]))({"m": m, "x": X}),
    "a State": lambda nnx, m: nnx.grad(lambda s: squares(s))(nnx.state(m, nnx.Param)),
    "the same Module twice": lambda nnx, m: nnx.grad(lambda a, b: loss(a, X) + loss(b, 2 * X), argnums=(0, 1))(m, m),
    "tied parts": lambda nnx, m: tied_gradients(nnx, m),
    "under jit": lambda nnx, m: nnx.jit(nnx.value_and_grad(loss))(m, X),
    "of jit": lambda nnx, m: nnx.value_and_grad(nnx.jit(lambda m, x: loss(m, x)))(m, X),
    "of grad": lambda nnx, m: nnx.grad(lambda m, x: squares(nnx.grad(loss)(m, x)))(m, X),
    "a change of structure": lambda nnx, m: nnx.grad(lambda m: (setattr(m, "seen", nnx.Cache(X)), loss(m, X))[1])(m),
}  # fmt: skip


def squares(tree):
    return 0.01 * sum((x**2).sum() for x in jax.tree.leaves(tree))


def tied_gradients(nnx, m):
    m.first = m.second
    x = jax.random.normal(jax.random.key(1), (4, 3))
    return nnx.grad(lambda m: (m.first(x) * m.second(x)).sum())(m)


@pytest.mark.parametrize("name", GRAD)
def test_grad(name):
    """The gradients, and the state of the model afterwards: BatchNorm statistics, dropout counts, counters."""

    def script(nnx):
        model = net(nnx)
        return GRAD[name](nnx, model), model

    same(script, ROUNDING)


def test_training_steps():
    """Several steps of a jitted training loop with plain gradient descent."""

    def script(nnx):
        model = net(nnx)

        @nnx.jit
        def step(model, x):
            value, grads = nnx.value_and_grad(loss)(model, x)
            params = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
            return value

        return [step(model, X) for _ in range(3)], model

    same(script, ROUNDING)


# --- eval_shape -----------------------------------------------------------------------------------------------------


def test_eval_shape():
    """Abstract Modules and outputs; the live model as before."""

    def script(nnx):
        model = net(nnx)
        abstract = nnx.eval_shape(lambda: net(nnx))
        return [
            abstract,
            nnx.eval_shape(lambda m, x: m(x), model, X),
            nnx.eval_shape(lambda m, x: {"m": m, "y": m(x)}, model, X),
            nnx.eval_shape(lambda m, x: m(x), abstract, jax.ShapeDtypeStruct((7, 2), jnp.float32)),
            model,
        ]

    same(script, ROUNDING)


# --- capture --------------------------------------------------------------------------------------------------------

CAPTURE = {
    "sow": lambda nnx, m: nnx.capture(m, nnx.Intermediate)(X),
    "method": lambda nnx, m: nnx.capture(m.__call__, nnx.Intermediate)(X),
    "function": lambda nnx, m: nnx.capture(lambda m, x: m(x), nnx.Intermediate)(m, X),
    "decorator": lambda nnx, m: nnx.capture(nnx.Intermediate)(lambda m, x: m(x))(m, X),
    "perturb": lambda nnx, m: nnx.capture(m, nnx.Perturbation)(X),
    "both": lambda nnx, m: nnx.capture(m, nnx.Intermediate, nnx.Perturbation)(X),
    "method_outputs": lambda nnx, m: nnx.capture(m, nnx.Intermediate, method_outputs=nnx.Intermediate)(X),
    "init of another type": lambda nnx, m: nnx.capture(m, nnx.Intermediate, init=perturbed(nnx, m))(X),
    "nothing is recorded": lambda nnx, m: nnx.capture(m, nnx.Cache)(X),
    "recordings from before": lambda nnx, m: [m(X), nnx.capture(m, nnx.Intermediate)(X)],
    "twice": lambda nnx, m: [nnx.capture(m, nnx.Intermediate)(X) for _ in range(2)],
    "jitted": lambda nnx, m: nnx.jit(nnx.capture(lambda m, x: m(x), nnx.Intermediate))(m, X),
    "gradients of intermediates": lambda nnx, m: intermediate_gradients(nnx, m),
}


def perturbed(nnx, m):
    return jax.tree.map(lambda x: x + 0.5, nnx.capture(m, nnx.Perturbation)(X)[1])


def intermediate_gradients(nnx, m):
    deltas = perturbed(nnx, m)

    def f(deltas, m, x):
        out, *recorded = nnx.capture(m, nnx.Perturbation, nnx.Intermediate, init=deltas)(x)
        return out, recorded

    return nnx.grad(f, has_aux=True)(deltas, m, X)


@pytest.mark.parametrize("twice", [False, True], ids=["a Module", "a part called twice"])
@pytest.mark.parametrize("name", CAPTURE)
def test_capture(name, twice):
    """The output, the recordings, and the model afterwards."""

    def script(nnx):
        model = sown(nnx, twice)
        return CAPTURE[name](nnx, model), model

    same(script, ROUNDING)


@pytest.mark.parametrize("name", ["mean", "size", "place", "linear"])
def test_capture_beside_attributes(name):
    """What is recorded under the name of an attribute comes out, and the attribute stays."""

    def script(nnx):
        class Noted(nnx.Module):
            def __init__(self):
                self.mean, self.size, self.place = nnx.Variable(jnp.zeros(2)), 2, nnx.Intermediate(())
                self.bias = nnx.Param(jnp.ones(2))
                self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

            def __call__(self, x):
                self.mean[...] += x.mean(0)
                self.sow(nnx.Intermediate, name, x)
                return self.perturb("bias", self.linear(x))

        model = Noted()
        return nnx.capture(model, nnx.Intermediate)(X), nnx.capture(model, nnx.Perturbation)(X), model

    same(script, ROUNDING)
