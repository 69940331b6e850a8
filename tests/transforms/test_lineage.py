"""What went wrong elsewhere: reading a live model under any transform leaves it concrete, whatever its forward does;
and the path that a call reports is the path of its Variables, whatever transforms it goes through.
"""

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.errors import TraceContextError
from tests.properties.compare import Snapshot
from tests.properties.test_matrix import CONTEXTS, EAGER, EVERYTHING, LOOPS, SHAPE

X = jnp.ones((2, 4))
DEPTH = 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return x + nnx.tanh(self.norm(self.linear(x)))


class Backbone(nnx.Module):
    """Stacked by vmap, run by scan, each block recomputed in the backward pass."""

    def __init__(self):
        self.blocks = nnx.vmap(lambda rngs: Block(rngs))(nnx.Rngs(0).split(DEPTH))
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        run = nnx.scan(nnx.remat(lambda x, block: block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(x, self.blocks))


RAW = {
    "eval_shape": lambda f: jax.eval_shape(f, jax.ShapeDtypeStruct(X.shape, X.dtype)),
    "jit": lambda f: jax.jit(f)(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: f(x).sum()))(X),
    "linearize": lambda f: jax.linearize(f, X),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(X),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, X[None]),
    "map": lambda f: jax.lax.map(f, X[None]),
    "cond": lambda f: jax.lax.cond(True, f, f, X),
}


@pytest.mark.parametrize("name", RAW)
def test_a_stacked_model_stays_concrete_under_raw_jax(name):
    """In evaluation nothing is written: values have the right shape, and every leaf is the array that it was."""
    model = Backbone()
    model.eval()
    before = Snapshot(model)
    out = RAW[name](model)
    before.assert_unchanged()
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(nnx.state(model)))
    if name == "eval_shape":
        assert out.shape == (2, 2)
    if name == "jit":
        assert jnp.allclose(out, model(X), atol=1e-6)


@pytest.mark.parametrize("name", RAW)
def test_a_forward_that_updates_statistics_is_refused_and_names_them(name):
    """In training it would write BatchNorm's statistics from inside a trace of raw JAX."""
    model = Backbone()
    before = Snapshot(model)
    with pytest.raises(TraceContextError, match=r"BatchStat at .*blocks\.norm\.(mean|var)"):
        RAW[name](model)
    before.assert_unchanged()


def test_nnx_eval_shape_of_a_forward_that_updates_changes_nothing():
    model = Backbone()
    before = Snapshot(model)
    out = nnx.eval_shape(lambda model, x: model(x), model, X)
    assert out.shape == (2, 2)
    before.assert_unchanged()


def test_the_statistics_of_each_layer_come_out():
    """BatchNorm inside remat inside scan inside jit inside grad: equal to the plain loop over the layers."""
    model, plain = Backbone(), Backbone()
    nnx.jit(lambda model, x: nnx.grad(lambda model: model(x).sum())(model))(model, X + jnp.arange(4.0))
    x = X + jnp.arange(4.0)
    for i in range(DEPTH):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], plain.blocks)
        x = block(x)
        assert jnp.allclose(block.norm.mean.value, model.blocks.norm.mean[i], atol=1e-6)
        assert jnp.allclose(block.norm.var.value, model.blocks.norm.var[i], atol=1e-6)


# --- paths ----------------------------------------------------------------------------------------------------------

SEEN: list[tuple[tuple, tuple | None]] = []  # of each call of a Leaf: where it is stored, and where it says it is


class Leaf(nnx.Module):
    def __init__(self, where=()):
        self.w, self.where = nnx.Param(jnp.ones(SHAPE)), where

    def __call__(self, x):
        SEEN.append((self.where, nnx.current_path()))
        return x * self.w.value.sum()


class Branch(nnx.Module):  # its submodules are made in the constructor
    def __init__(self, leaf):
        self.conv, self.stack, self.by_name = Leaf(), [Leaf(), leaf], {"a": (Leaf(), 1.0)}

    def __call__(self, x):
        for leaf in (self.conv, *self.stack, self.by_name["a"][0]):
            x = leaf(x)
        return self.again(x)

    def again(self, x):
        return self.conv(x)


class Inline(nnx.Module):  # it makes its submodules when it is called, and calls them twice
    def __call__(self, x):
        if not hasattr(self, "made"):
            self.made, self.list = Leaf((*nnx.current_path(), "made")), []
            self.list.append(Leaf((*nnx.current_path(), "list", 0)))
        return self.list[0](self.made(self.list[0](self.made(x))))


class Root(nnx.Module):
    """Calls its parts under a transform, as arguments and closed over, twice each."""

    def __init__(self):
        shared = Leaf()
        self.left, self.right, self.far, self.inline = Branch(shared), Branch(shared), Branch(Leaf()), Inline()
        self.a_first = shared
        self.transform, self.may_attach, self.may_close_over = None, False, True

    def __call__(self, x):
        def f(left, right, x):
            y = left(left(x)) + right(x)
            if self.may_close_over:
                self.far(x)
            return (y.sum(-1),)

        self.transform(f)(self.left, self.right, x)
        if self.may_attach:
            self.transform(lambda inline, right, x: (inline(inline(right(x))).sum(-1),))(self.inline, self.right, x)
        return self.far(self.right(x))


class Outer(nnx.Module):
    def __init__(self):
        self.roots = [Root()]
        for _, leaf in nnx.iter_graph(self):
            if isinstance(leaf, Leaf):
                leaf.where = next(p[:-1] for p, v in nnx.iter_graph(self) if v is leaf.w)

    def __call__(self, x):
        return self.roots[0](x)


OTHERS = {
    "map_variables": lambda f: nnx.map_variables(f, nnx.Param, lambda state: state, lambda state: state),
    "capture": lambda f: lambda *args: nnx.capture(f, nnx.Intermediate)(*args)[0],
    "named_call": nnx.named_call,
    "split_rngs": nnx.split_rngs(splits=2, only="nothing"),
    "remat of jit of remat": lambda f: nnx.remat(nnx.jit(nnx.remat(f))),
}


NESTINGS = ["eager", "in jit", "in grad", "in scan", "in jit of vmap"]
ALL = [*EAGER, *LOOPS, *OTHERS]
# Each transform in the first context, and in one of the others; under HYPOTHESIS_PROFILE=explore in all.
PAIRS = [(name, c) for k, name in enumerate(ALL) for n, c in enumerate(NESTINGS) if EVERYTHING or n in (0, 1 + k % 4)]


@pytest.mark.parametrize(("name", "context"), PAIRS)
def test_the_path_of_a_call_is_the_path_of_its_variables(name, context):
    """Called twice, shared, an argument or closed over, made in the constructor or inline: where `nnx.state` has it."""
    outer, loop = Outer(), name in LOOPS or "scan" in name or "scan" in context
    root = outer.roots[0]
    root.transform, root.may_attach = {**EAGER, **LOOPS, **OTHERS}[name], not loop
    root.may_close_over = not name.startswith("custom_")  # in JAX, too, its rules may not refer to other tracers
    stored = {path[:-1] for path, _ in nnx.state(outer).flat_state()}
    SEEN.clear()
    if context == "eager":
        outer(jnp.ones(SHAPE))
    else:
        CONTEXTS[context](lambda outer, other, x: (outer(x).sum(-1),))(outer, nnx.Dict(), jnp.ones(SHAPE))
    wrong = {pair for pair in SEEN if pair[0] != pair[1]}
    assert not wrong
    made = set() if loop else {("roots", 0, "inline", "made"), ("roots", 0, "inline", "list", 0)}
    assert {where for where, _ in SEEN} == stored | made
    assert ("roots", 0, "a_first") in stored, "the shared one has its first path"


class Recording(nnx.Module):
    """Reports the path of each of its calls."""

    def __call__(self, x):
        SEEN.append(nnx.current_path())
        return x


class Conv(Recording):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(()))


def seen(call):
    SEEN.clear()
    call()
    return list(SEEN)


def test_the_path_under_scan_and_vmap_is_the_stored_one():
    """With no decoration in it, as often as the body is traced."""

    class Scanned(nnx.Module):
        def __init__(self):
            self.layers = nnx.vmap(lambda key: nnx.List([Conv()]), out_axes=0, axis_size=3)(None)

        def __call__(self, x):
            x = nnx.scan(lambda x, layers: layers[0](x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
            return nnx.vmap(lambda layers, x: layers[0](x), in_axes=(0, None))(self.layers, x)

    model = Scanned()
    for call in (lambda: model(X), lambda: nnx.jit(model)(X), lambda: nnx.eval_shape(model, X)):
        assert set(seen(call)) == {("layers", 0)}
    assert [path for path, _ in nnx.state(model).flat_state()] == [("layers", 0, "kernel")]


def test_a_block_called_twice_with_submodules_of_the_constructor():
    """Both calls report `block` and `block/conv`, and never an empty path."""

    class WithConv(Recording):
        def __init__(self):
            self.conv = Conv()

        def __call__(self, x):
            return self.conv(super().__call__(x))

    class Twice(nnx.Module):
        def __init__(self):
            self.block = WithConv()

        def __call__(self, x):
            return self.block(self.block(x))

    assert seen(lambda: nnx.jit(Twice())(X)) == [("block",), ("block", "conv")] * 2
    assert seen(lambda: Twice()(X)) == [("block",), ("block", "conv")] * 2


def test_a_block_called_twice_with_submodules_made_inline_by_a_container():
    """Likewise, from the first call on: what has been attached is known by its path."""

    class Container(Recording):
        def __call__(self, x):
            super().__call__(x)
            if not hasattr(self, "convs"):
                self.convs = [Conv()]
            return self.convs[0](x)

    class Twice(nnx.Module):
        def __init__(self):
            self.block = Container()

        def __call__(self, x):
            return self.block(self.block(x))

    expected = [("block",), ("block", "convs", 0)] * 2
    assert seen(lambda: nnx.jit(Twice())(X)) == expected
    assert seen(lambda: Twice()(X)) == expected
    assert seen(lambda: nnx.jit(lambda x: Twice()(x))(X)) == expected, "a model that is made in the trace"
    graphdef, state = nnx.split(Twice())
    assert seen(lambda: jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)) == expected
