"""nnx.Stack: the layers of a plain Python loop, made in one line and applied by one compiled loop."""

import copy
import functools
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from tests.properties.compare import Snapshot, assert_no_tracer, assert_same

X = jnp.sin(jnp.arange(16.0)).reshape(4, 4)  # rows that differ, for BatchNorm
DEPTH = 6


class Block(nnx.Module):
    """Has parameters, batch statistics, dropout, and takes further arguments.

    The bias does not come just before the BatchNorm, where its gradient would be rounding alone.
    """

    def __init__(self, features=4, *, rngs):
        self.linear = nnx.Linear(features, features, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, shift=0.0, *, scale=1.0, plain=False):
        if plain:
            return x
        return x + scale * self.dropout(jnp.tanh(self.linear(self.norm(x)))) + shift


class WithAux(Block):
    def __call__(self, x):
        y = super().__call__(x)
        return y, y.mean(0)


class Sowing(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = self.linear(x)
        self.sow(nnx.Intermediate, "seen", x.sum())
        return x


def make(rngs):
    return Block(4, rngs=rngs)


def stack(make=make, depth=DEPTH, **options):
    return nnx.Stack(make, depth, rngs=nnx.Rngs(0), **options)


def plain_loop(layers, x, *args, **kwargs):
    for layer in layers:
        x = layer(x, *args, **kwargs)
    return x


def loss(forward, *args, **kwargs):
    return lambda model: (forward(model, X, *args, **kwargs) ** 2).sum()


OPTIONS = {
    "loop": {},
    "remat": {"remat": True},
    "nested remat": {"remat": (2, 3)},
    "unrolled": {"unroll": 2},
    "all unrolled": {"unroll": True},
    "unrolled remat": {"remat": True, "unroll": 3},
    "policy": {"remat": [3, 2], "policy": jax.checkpoint_policies.dots_saveable},
}


@functools.cache
def expected():
    """Of the Python loop: the gradients of each layer, the output of a second call, and the state afterwards."""
    layers = nnx.List(stack())
    grads = nnx.jit(nnx.grad(loss(plain_loop)))(layers)
    out = nnx.jit(plain_loop)(layers, X)
    return grads, out, [nnx.state(layer) for layer in layers]


@pytest.mark.parametrize("way", OPTIONS)
def test_output_gradient_and_state_are_those_of_the_python_loop_over_the_same_layers(way):
    m = stack(**OPTIONS[way])
    grads, out, states = expected()
    found = nnx.jit(nnx.grad(loss(lambda m, x: m(x))))(m)
    for i, g in grads.items():
        close(jax.tree.map(lambda x, i=i: x[i], found["layers"]), g)
    close(nnx.jit(lambda m, x: m(x))(m, X), out)
    for i, state in enumerate(states):
        close(nnx.state(m[i], nnx.Not(nnx.RngKey)), state.filter(nnx.Not(nnx.RngKey)))
    assert m.layers.dropout.rngs.count.value.tolist() == [2] * DEPTH


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), a, b)


def test_each_layer_has_parameters_and_keys_of_its_own():
    m = stack()
    for x in (m.layers.linear.kernel.value, jax.random.key_data(m.layers.dropout.rngs.key.value)):
        assert len(np.unique(np.asarray(x).reshape(DEPTH, -1), axis=0)) == DEPTH


def test_no_key_of_the_given_streams_is_used_twice():
    rngs = nnx.Rngs(0)
    a, b = (nnx.Stack(make, 2, rngs=rngs) for _ in range(2))
    keys = jnp.concatenate([a.layers.dropout.rngs.key.value, b.layers.dropout.rngs.key.value])
    assert len(np.unique(np.asarray(jax.random.key_data(keys)), axis=0)) == 4


def test_further_arguments_go_to_each_layer():
    """Arrays are broadcast, Python values stay Python values, so `if plain` works."""
    m = stack()
    m.eval()
    layers = list(m)
    close(m(X, X, scale=jnp.array(0.5)), plain_loop(layers, X, X, scale=0.5))
    close(m(X, 0.25, scale=2.0), plain_loop(layers, X, 0.25, scale=2.0))
    close(m(X, plain=True), X)
    close(nnx.jit(lambda m, x, s: m(x, scale=s))(m, X, 0.5), plain_loop(layers, X, scale=0.5))


def test_state_in_a_module_among_the_arguments_changes_as_in_the_python_loop():
    class Counting(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(rngs.normal((4,)))

        def __call__(self, x, counter, noise=None):
            counter.value += 1
            return x * self.w + counter.value + noise.normal((4,))

    m = nnx.Stack(lambda rngs: Counting(rngs=rngs), 3, rngs=nnx.Rngs(0))
    counter, other, noise = nnx.Cache(jnp.zeros(())), nnx.Cache(jnp.zeros(())), nnx.Rngs(1)
    close(m(X, counter, noise=noise), plain_loop(list(m), X, other, noise=nnx.Rngs(1)))
    assert counter.value == other.value == 3
    assert noise.default.count.value == 3


def test_what_the_layers_return_beside_is_stacked():
    m = stack(lambda rngs: WithAux(4, rngs=rngs), has_aux=True)
    layers, x, aux = list(m), X, []
    for layer in layers:
        x, y = layer(x)
        aux.append(y)
    found = m(X)
    close(found, (x, jnp.stack(aux)))


def test_recorded_values_are_stacked():
    m = stack(lambda rngs: Sowing(rngs=rngs), 3)
    _, recorded = nnx.capture(m, nnx.Intermediate)(X)
    (seen,) = recorded["layers"]["seen"].value
    assert seen.shape == (3,)


def test_a_carry_may_be_a_pytree_and_layers_may_have_no_parameters():
    class Swap(nnx.Module):
        def __call__(self, carry):
            return {"a": carry["b"], "b": carry["a"] + 1}

    m = nnx.Stack(Swap, 3)
    assert {k: int(v) for k, v in m({"a": jnp.array(0), "b": jnp.array(10)}).items()} == {"a": 11, "b": 2}
    assert len(m) == 3


def test_indices_and_slices():
    m = stack(remat=(2, 3))
    close(m[-1].linear.kernel.value, m.layers.linear.kernel.value[5])
    part = m[1:6:2]
    assert isinstance(part, nnx.Stack)
    assert (len(part), part.remat, m.remat) == (3, True, (2, 3))
    close(part(X), plain_loop([m[1], m[3], m[5]], X))
    assert len(m[4:2]) == 0
    close(m[:0](X), X)
    with pytest.raises(IndexError, match=r"no layer 6 in a Stack of 6"):
        m[6]
    with pytest.raises(TypeError, match="integer"):
        m["a"]


def test_a_layer_taken_out_is_a_copy_and_can_be_put_back():
    m = stack()
    kernels = m.layers.linear.kernel.value
    layer = m[2]
    layer.linear.kernel.value = jnp.zeros((4, 4))
    assert m.layers.linear.kernel.value is kernels
    variable = m.layers.linear.kernel
    m[2] = layer
    assert m.layers.linear.kernel is variable
    close(variable.value, kernels.at[2].set(0.0))
    assert_same(m[2], layer)


class Other(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Other(), r"(?s)  linear\.bias: missing.*  weight: unexpected"),
        (Block(3, rngs=nnx.Rngs(0)), r"linear\.bias: expected shape \(4,\), got \(3,\)(?s:.)*from_layers makes"),
    ],
    ids=["structure", "shape"],
)
def test_putting_in_what_is_not_a_layer_is_an_error_and_changes_nothing(layer, message):
    m = stack()
    before = Snapshot(m)
    with pytest.raises(errors.StateMismatchError, match=message):
        m[0] = layer
    before.assert_unchanged()


def test_a_stack_of_existing_layers():
    rngs = nnx.Rngs(0)
    layers = [make(rngs) for _ in range(3)]
    m = nnx.Stack.from_layers(layers, remat=True)
    for a, b in zip(m, layers, strict=True):
        assert_same(a, b)
    close(m(X), plain_loop(layers, X))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "at least one layer"),
        (
            [nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))],
            "layers 0 and 1 dif",
        ),
        (
            [nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(3))],
            r"layers 0 and 1 differ:\n  <root>: \(2,\) and \(3,\)\nMake",
        ),
        ([Other(), Other()], "Modules that can be called, not Other"),
    ],
    ids=["none", "structure", "shape", "not callable"],
)
def test_layers_that_differ_cannot_be_stacked(layers, message):
    with pytest.raises(errors.ArgumentError, match=message):
        nnx.Stack.from_layers(layers)


def test_axis_names_follow_the_axis_of_the_layers():
    init = nnx.with_partitioning(nnx.initializers.ones, ("in", "out"), optimizer_sharding=("first", "second"))

    def named(rngs):
        return nnx.Linear(2, 2, kernel_init=init, rngs=rngs)

    m = nnx.Stack(named, 3, rngs=nnx.Rngs(0), partition="layers")
    assert m.layers.kernel.sharding_names == ("layers", "in", "out")
    assert m.layers.kernel.optimizer_sharding == (None, "first", "second")
    assert m[0].kernel.sharding_names == ("in", "out")
    assert m[1:].layers.kernel.sharding_names == ("layers", "in", "out")
    again = nnx.Stack.from_layers(list(m), partition="layers")
    assert_same(again, m)
    assert m(jnp.ones((1, 2))).shape == (1, 2)


def test_numbers_of_numpy_are_numbers():
    """As the product of a shape is one."""
    m = stack(depth=np.prod([3, 2]), remat=(np.int64(3), 2))
    assert (type(m.depth), m.remat, len(list(m))) == (int, (3, 2), 6)
    assert m(X).shape == X.shape


def test_layers_that_keep_their_values_in_refs():
    """The stack of them does, too."""
    layers = [nnx.Linear(2, 2, kernel_metadata={"ref": True}, rngs=nnx.Rngs(i)) for i in range(3)]
    m, expected, x = nnx.Stack.from_layers(layers), nnx.Sequential(*layers), jnp.ones((1, 2))
    assert isinstance(m.layers.kernel.get_raw_value(), jax.Ref)
    assert jnp.allclose(m(x), expected(x))


@pytest.mark.parametrize(
    ("depth", "options", "message"),
    [
        (0, {}, "at least 1, but got 0"),
        (2.0, {}, "at least 1, but got 2.0"),
        (6, {"remat": (2, 2)}, r"remat=\(2, 2\) is for 4 layers, but the Stack has 6"),
        (6, {"remat": (6, 0)}, r"got \(6, 0\)"),
    ],
)
def test_bad_options_are_errors(depth, options, message):
    with pytest.raises(errors.ArgumentError, match=message):
        stack(depth=depth, **options)


def test_a_stack_of_one_layer_and_a_slice_keep_to_what_was_asked_for():
    for remat in (False, True):
        m = stack(depth=1, remat=remat)
        assert (len(m), m.remat, m[:1].remat, m(X).shape) == (1, remat, remat, X.shape)


def test_what_is_not_a_layer_is_an_error():
    with pytest.raises(errors.ArgumentError, match=r"Modules that can be called, not float32\[3, 2\]"):
        nnx.Stack(lambda: jnp.ones(2), 3)
    with pytest.raises(errors.ArgumentError, match="Modules that can be called, not Partial"):
        nnx.Stack(lambda: jax.tree_util.Partial(jnp.add, jnp.ones(2)), 3)


def test_a_layer_that_returns_another_shape_is_an_error_and_changes_nothing():
    m = stack(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
    before = Snapshot(m)
    with pytest.raises(TypeError, match=r"args\[0\]: float32\[4, 4\] became float32\[4, 3\]") as found:
        m(X)
    assert any("each returns what the next one takes" in note for note in found.value.__notes__)
    before.assert_unchanged()


@pytest.mark.parametrize("remat", [False, (2, 3)], ids=["scan", "remat_scan"])
def test_a_layer_that_fails_changes_nothing_and_the_error_names_it(remat):
    m = stack(remat=remat)
    before = Snapshot(m)
    with pytest.raises(ValueError, match="takes inputs with 4 features") as found:
        m(jnp.ones((2, 3)))
    assert any("layers.norm (BatchNorm" in note for note in found.value.__notes__)
    before.assert_unchanged()


def test_under_raw_jax_a_stack_in_evaluation_is_only_read():
    m = stack()
    m.eval()
    before = Snapshot(m)
    for transform in (jax.jit, jax.make_jaxpr, lambda f: lambda x: jax.eval_shape(f, x)):
        transform(m)(X)
    jax.grad(lambda x: m(x).sum())(X)
    before.assert_unchanged()


def test_inside_jit_no_tracer_leaks_and_python_runs_a_layer_once():
    calls = []

    class Counted(Block):
        def __call__(self, x):
            calls.append(1)
            return super().__call__(x)

    m = stack(lambda rngs: Counted(4, rngs=rngs))
    step = nnx.jit(nnx.grad(lambda m, x: m(x).sum()))
    with jax.checking_leaks():
        step(m, X)
    step(m, X)
    assert len(calls) == 1
    assert_no_tracer(m)


def test_stacks_of_stacks():
    m = nnx.Stack(lambda rngs: nnx.Stack(make, 2, rngs=rngs, remat=True), 3, rngs=nnx.Rngs(0))
    assert m.layers.layers.linear.kernel.shape == (3, 2, 4, 4)
    layers = [layer for inner in m for layer in inner]
    close(m(X), plain_loop(layers, X))


def test_it_is_a_module_like_any_other():
    m = stack()
    text = repr(m)
    assert text.startswith("Stack( ")
    assert "\n  depth=6,\n" in text
    assert "  layers=Block(" in text
    assert_same(pickle.loads(pickle.dumps(m)), m)
    assert_same(copy.deepcopy(m), m)
    assert_same(nnx.merge(*nnx.split(m)), m)
    m.eval()
    assert m.layers.dropout.deterministic is True
    assert set(nnx.state(m, nnx.Param).flat_state().paths) == {
        ("layers", "linear", "bias"),
        ("layers", "linear", "kernel"),
        ("layers", "norm", "bias"),
        ("layers", "norm", "scale"),
    }


def test_called_again_eagerly_it_is_not_traced_again_and_it_is_freed():
    calls = []

    class Counted(Block):
        def __call__(self, x):
            calls.append(1)
            return super().__call__(x)

    m = stack(lambda rngs: Counted(4, rngs=rngs), remat=(2, 3))
    for _ in range(3):
        m(X)
    assert len(calls) == 1
    layers = weakref.ref(m.layers)
    del m
    gc.collect()
    assert layers() is None


def test_each_layer_is_known_by_the_path_under_which_it_is_stored():
    """In the name scopes of the compiled program, and in messages, inside whatever transforms."""

    @nnx.jit
    def forward(model, x):
        return nnx.remat(lambda model, x: model.inner(x))(model, x)

    model = nnx.Dict(inner=stack(remat=(2, 3)))
    assert "layers/linear/dot_general" in forward.lower(model, X).as_text(debug_info=True)
    with pytest.raises(ValueError, match="takes inputs with 4 features") as found:
        forward(model, jnp.ones((2, 3)))
    assert found.value.__notes__[0].startswith("in inner.layers.norm (BatchNorm 4)")


def test_a_layer_in_place_of_what_makes_layers_is_refused():
    with pytest.raises(TypeError, match=r"what makes its layers, but got a Linear. .* nnx.Stack.from_layers\(layers\)"):
        nnx.Stack(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 3)


def test_a_layer_that_is_taken_out_keeps_its_reference():
    """With ref=True it is one in ``stack[i]`` and ``stack[i:j]``, too, so raw JAX carries writes out."""

    class Counting(nnx.Module):
        def __init__(self, rngs):
            self.calls = nnx.Variable(rngs.params.uniform(()), ref=True)

        def __call__(self, x):
            self.calls.value += 1
            return x

    layers = nnx.Stack(lambda rngs: Counting(rngs), 3, rngs=nnx.Rngs(0))
    before = layers.layers.calls.value
    for taken in layers[1], layers[:2].layers:
        first = taken.calls.value
        assert isinstance(taken.calls.get_raw_value(), jax.Ref)
        jax.jit(taken.__call__)(1.0)
        np.testing.assert_array_equal(taken.calls.value, first + 1)
    np.testing.assert_array_equal(layers.layers.calls.value, before)
