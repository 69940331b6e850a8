import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.core.errors import EmptySelectionError, TraceContextError

normal = jax.nn.initializers.normal(1.0)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def rngs():
    return nnx.Rngs(0)


def linear(n_in=3, n_out=4, **kwargs):
    return nnx.Linear(n_in, n_out, bias_init=normal, rngs=rngs(), **kwargs)


def close(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def raw_values(module):
    """The very objects that a module's Params hold."""
    return [v.get_raw_value() for _, v in nnx.iter_graph(module) if isinstance(v, nnx.Param)]


def same_objects(before, after):
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


# --- the formulas ---


def power_iteration(weight, u, n_steps):
    matrix = np.asarray(weight, np.float64).reshape(-1, weight.shape[-1])
    for _ in range(n_steps):
        v = u @ matrix.T
        v = v / np.linalg.norm(v)
        u = v @ matrix
        u = u / np.linalg.norm(u)
    return u, (v @ matrix @ u.T).item()


@pytest.mark.parametrize("n_steps", [1, 3])
def test_spectral_norm_against_its_formula(n_steps):
    """The weight divided by sigma of the power iteration, which goes on from call to call."""
    layer = nnx.SpectralNorm(linear(), n_steps=n_steps, rngs=rngs())
    kernel, bias = layer.layer_instance.kernel.value, layer.layer_instance.bias.value
    u, x = np.asarray(layer.batch_stats["kernel", "u"].value, np.float64), array(2, 3)
    for _ in range(2):
        u, sigma = power_iteration(kernel, u, n_steps)
        close(layer(x), x @ kernel / sigma + bias)
        close(layer.batch_stats["kernel", "u"].value, u)
        close(layer.batch_stats["kernel", "sigma"].value, sigma)


def test_spectral_norm_converges_to_the_largest_singular_value():
    """Of a convolution too, whose kernel counts as a matrix with the output channels as columns."""
    conv = nnx.Conv(2, 3, (2, 2), rngs=rngs())
    layer = nnx.SpectralNorm(conv, n_steps=50, rngs=rngs())
    layer(array(1, 4, 4, 2))
    expected = np.linalg.svd(np.asarray(conv.kernel.value).reshape(-1, 3), compute_uv=False)[0]
    close(layer.batch_stats["kernel", "sigma"].value, expected)


def test_when_statistics_are_stored():
    """In training, unless the call says otherwise; never in evaluation, unless the call says so."""

    def moves(layer, **kwargs):
        before = layer.batch_stats["kernel", "u"].value
        y = layer(array(2, 3), **kwargs)
        return layer.batch_stats["kernel", "u"].value is not before, y

    layer = nnx.SpectralNorm(linear(), rngs=rngs())
    assert not moves(layer, update_stats=False)[0]
    assert moves(layer)[0]
    layer.eval()
    (moved, first), (_, second) = moves(layer), moves(layer)
    assert not moved
    np.testing.assert_array_equal(first, second)
    assert moves(layer, update_stats=True)[0]
    layer.train()
    assert moves(layer)[0]
    frozen = nnx.SpectralNorm(linear(), update_stats=False, rngs=rngs())
    frozen.train()
    assert not moves(frozen)[0]


def test_spectral_norm_of_a_weight_without_columns():
    """There is nothing to divide."""
    assert nnx.SpectralNorm(Holder((3, 0)), rngs=rngs())(0.0).shape == (3, 0)


CASES = [((3, 4), -1), ((3, 4), 0), ((3, 4), (0, 1)), ((3, 4), (1, 0)), ((3, 4), (1, -1)), ((3, 4), None)]
CASES += [((2, 3, 4), (-2, -1)), ((2, 3, 4), (-1, 0)), ((2, 3), [1])]


@settings(max_examples=20)
@given(st.sampled_from(CASES), st.booleans())
def test_weight_norm_against_its_formula(case, use_scale):
    """Norm 1 over the axes that are no feature axes, times the scale, whose axes are in the order of the weight's."""
    shape, axes = case
    layer = Holder(shape)
    wrapped = nnx.WeightNorm(layer, feature_axes=axes, use_scale=use_scale, scale_init=normal, rngs=rngs())
    weight = np.asarray(layer.kernel.value, np.float64)
    kept = sorted({a % len(shape) for a in ([] if axes is None else np.atleast_1d(axes))})
    summed = tuple(a for a in range(len(shape)) if a not in kept)
    expected = weight / np.sqrt((weight**2).sum(summed, keepdims=True))
    if use_scale:
        scale = np.asarray(wrapped.scales["kernel",].value, np.float64)
        assert scale.shape == tuple(shape[a] for a in kept)
        expected *= np.expand_dims(scale, summed)
    else:
        assert not wrapped.scales
    close(wrapped(0.0), expected)


class Holder(nnx.Module):
    """A layer that returns its weight."""

    def __init__(self, shape, dtype=jnp.float32):
        self.kernel = nnx.Param(array(*shape).astype(dtype))

    def __call__(self, x, *, add=0.0):
        return self.kernel.value + x + add


WRAPPERS = {
    "spectral": lambda layer, **kwargs: nnx.SpectralNorm(layer, rngs=rngs(), **kwargs),
    "weight": lambda layer, **kwargs: nnx.WeightNorm(layer, rngs=rngs(), **kwargs),
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


# --- the Params are never written ---


class Failing(Holder):
    def __call__(self, x):
        super().__call__(x)
        raise RuntimeError("in the layer")


@each_wrapper
def test_params_are_never_written(wrap):
    """Not by calls, compiled or not, nor by one that fails: they hold the very arrays they held."""
    layer = wrap(linear())
    before, x = raw_values(layer), array(2, 3)
    layer(x)
    nnx.jit(lambda m, x: m(x))(layer, x)
    nnx.grad(lambda m: m(x).sum())(layer)
    assert same_objects(before, raw_values(layer))
    failing = wrap(Failing((3, 3)))
    before = [v.get_raw_value() for _, v in nnx.iter_graph(failing) if isinstance(v, nnx.Variable)]
    for call in (lambda: failing(0.0), lambda: nnx.jit(lambda m: m(0.0))(failing)):
        with pytest.raises(RuntimeError, match="in the layer"):
            call()
        after = [v.get_raw_value() for _, v in nnx.iter_graph(failing) if isinstance(v, nnx.Variable)]
        assert same_objects(before, after)


@each_wrapper
def test_live_params_hold_no_normalised_weight_during_the_call(wrap):
    """Who looks at the live layer while it is called, as another thread may, sees its own weight."""
    seen = []

    class Looking(Holder):
        def __call__(self, x):
            seen.append((self.kernel.value, live.kernel.value))
            return super().__call__(x)

    live = Looking((3, 3))
    wrapped, weight = wrap(live), live.kernel.value
    wrapped(0.0)
    ((used, held),) = seen
    assert held is weight
    assert not np.allclose(used, weight)


@each_wrapper
def test_what_else_the_layer_changes_is_kept(wrap):
    """Statistics, streams, recordings and plain attributes of the wrapped layer are its own."""

    class Net(nnx.Module):
        def __init__(self):
            self.linear, self.norm = linear(), nnx.BatchNorm(4, rngs=rngs())
            self.dropout = nnx.Dropout(0.5, rngs=rngs())
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            x = self.norm(self.linear(x))
            self.sow(nnx.Intermediate, "hidden", x)
            return self.dropout(x)

    net = Net()
    wrapped = wrap(net)
    wrapped(array(5, 3))
    wrapped(array(5, 3))
    assert net.calls == 2
    assert len(net.hidden.value) == 2
    assert int(net.dropout.rngs.count.value) == 2
    assert not (net.norm.var.value == 1).all()


@each_wrapper
def test_gradients_reach_the_params_through_the_normalisation(wrap):
    """Scaling a weight changes nothing, so the gradient is orthogonal to it; and it is that of finite differences."""
    layer, x = wrap(linear(use_bias=False)), array(2, 3)
    layer.eval()
    if isinstance(layer, nnx.SpectralNorm):
        layer.n_steps = 50
    kernel = layer.layer_instance.kernel
    loss = lambda m: jnp.sum(jnp.sin(m(x)))
    gradient = nnx.grad(loss)(layer)["layer_instance"]["kernel"].value
    assert abs(jnp.vdot(gradient, kernel.value)) < 1e-3
    direction, middle, values = array(3, 4, seed=1), kernel.value, []
    for sign in (1, -1):
        kernel.value = middle + sign * 1e-2 * direction
        values.append(loss(layer))
    close(jnp.vdot(gradient, direction), (values[0] - values[1]) / 2e-2, 2e-2)


# --- which weights ---


def test_wrapping_twice():
    """The outer one normalises what the inner one starts from; both keep their statistics."""
    x, inner = array(2, 3), linear(use_bias=False)
    twice = nnx.SpectralNorm(nnx.WeightNorm(inner, rngs=rngs()), rngs=rngs())
    weight = inner.kernel.value
    close(twice(x), x @ (weight / jnp.linalg.norm(weight, axis=0)), 1e-4)
    other_way = nnx.WeightNorm(nnx.SpectralNorm(inner, n_steps=20, rngs=rngs()), use_scale=False, rngs=rngs())
    unit = weight / jnp.linalg.norm(weight, axis=0)
    close(other_way(x), x @ unit / np.linalg.norm(unit, 2), 1e-4)
    assert inner.kernel.value is weight
    assert ("layer_instance", "kernel", "u") in twice.batch_stats
    assert ("kernel", "u") in other_way.layer_instance.batch_stats


@each_wrapper
def test_tied_weights_are_normalised_once(wrap):
    """Under the first path, with one statistic or scale; both uses see the same weight."""
    shared = linear(3, 3, use_bias=False)
    tied, apart = wrap(nnx.Sequential(shared, shared)), wrap(linear(3, 3, use_bias=False))
    x = array(2, 3)
    once = apart(x)
    kept = tied.batch_stats if isinstance(tied, nnx.SpectralNorm) else tied.scales
    path_of_kernel = ("layers", 0, "kernel")
    assert {path[:3] for path in kept} == {path_of_kernel}
    if isinstance(apart, nnx.SpectralNorm):
        apart.batch_stats["kernel", "u"].value = wrap(linear(3, 3)).batch_stats["kernel", "u"].value
    close(tied(x), apart(once))
    grads = nnx.grad(lambda m: m(x).sum())(tied)
    assert [path for path, _ in grads.flat_state() if path[-1] == "kernel"] == [
        ("layer_instance", "layers", 0, "kernel")
    ]


def test_which_weights_are_normalised():
    """SpectralNorm: Params of two axes or more. WeightNorm: what the filter takes, by default kernels."""

    class Mixed(nnx.Module):
        def __init__(self):
            self.matrix, self.vector = nnx.Param(array(3, 3)), nnx.Param(array(3))
            self.kernel, self.table = nnx.Param(array(3, 3)), nnx.BatchStat(array(3, 3))

        def __call__(self, x):
            return {name: v.value for name, v in vars(self).items() if isinstance(v, nnx.Variable)}

    changed = lambda wrapped, layer: {n for n, v in wrapped(0.0).items() if v is not getattr(layer, n).value}
    layer = Mixed()
    assert changed(nnx.SpectralNorm(layer, rngs=rngs()), layer) == {"matrix", "kernel"}
    for filter_, names in {
        nnx.PathContains("kernel"): {"kernel"},
        nnx.Param: {"matrix", "vector", "kernel"},
        nnx.Not(nnx.PathContains("matrix")): {"vector", "kernel"},
    }.items():
        assert changed(nnx.WeightNorm(layer, variable_filter=filter_, rngs=rngs()), layer) == names
    several = nnx.WeightNorm(
        layer, variable_filter=[nnx.PathContains("kernel"), nnx.PathContains("matrix")], rngs=rngs()
    )
    assert changed(several, layer) == {"matrix", "kernel"}


def test_dtypes():
    """Norms are computed in float32 at least; a weight keeps its dtype unless another is asked for."""
    for dtype in (jnp.float32, jnp.bfloat16):
        layer = Holder((3, 3), dtype)
        exact = layer.kernel.value.astype(jnp.float32)
        exact = exact / jnp.linalg.norm(exact, axis=0)
        for asked, out in ((None, dtype), (jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.float32)):
            spectral = nnx.SpectralNorm(layer, dtype=asked, param_dtype=jnp.bfloat16, rngs=rngs())
            weight = nnx.WeightNorm(layer, dtype=asked, param_dtype=dtype, rngs=rngs())
            zero = jnp.zeros((), out)
            assert spectral(zero).dtype == weight(zero).dtype == out
            assert {v.dtype for v in spectral.batch_stats.values()} == {jnp.dtype(jnp.bfloat16)}
            close(weight(zero), exact.astype(out))
    complex_ = Holder((3, 3))
    complex_.kernel.value = array(3, 3) + 1j * array(3, 3, seed=1)
    close(jnp.linalg.norm(nnx.WeightNorm(complex_, rngs=rngs())(0.0), axis=0), jnp.ones(3))


def test_a_weight_of_zeros_stays_finite():
    for wrap in WRAPPERS.values():
        layer = linear(kernel_init=jax.nn.initializers.zeros, use_bias=False)
        assert (wrap(layer)(array(2, 3)) == 0).all()


def test_keys_that_are_drawn():
    """One of `params` for each vector u and for each scale that an initializer draws; none for scales of one."""
    for make, count in (
        (lambda r: nnx.SpectralNorm(linear(), rngs=r), 1),
        (lambda r: nnx.WeightNorm(linear(), rngs=r), 0),
        (lambda r: nnx.WeightNorm(linear(), scale_init=normal, rngs=r), 1),
    ):
        streams = nnx.Rngs(0)
        make(streams)
        assert int(streams.default.count.value) == count


@each_wrapper
def test_arguments_are_passed_on(wrap):
    layer = Holder((3, 3))
    assert jnp.allclose(wrap(layer)(0.0, add=2.0), wrap(layer)(2.0))


def test_positional_arguments_of_weight_norm():
    class Two(Holder):
        def __call__(self, x, y):
            return self.kernel.value + x - y

    wrapped = nnx.WeightNorm(Two((3, 3)), rngs=rngs())
    close(wrapped(1.0, 1.0), wrapped(0.0, 0.0))


# --- elsewhere ---


@each_wrapper
def test_in_evaluation_a_live_layer_is_read_under_raw_jax(wrap):
    """Without statistics to store, a wrapped layer can be called wherever it can be read."""
    layer, x = wrap(linear()), array(2, 3)
    layer.eval()
    expected = layer(x)
    close(jax.jit(lambda x: layer(x))(x), expected)
    close(jax.vmap(lambda x: layer(x))(x), expected)
    assert jax.eval_shape(layer, x).shape == expected.shape
    layer.train()
    if isinstance(layer, nnx.SpectralNorm):
        with pytest.raises(TraceContextError, match="batch_stats"):
            jax.jit(lambda x: layer(x))(x)
    close(nnx.jit(lambda x: layer(x))(x), expected, 0.5)


@each_wrapper
def test_copies(wrap):
    layer, x = wrap(linear()), array(2, 3)
    layer.eval()
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), nnx.clone(layer)):
        np.testing.assert_array_equal(copied(x), layer(x))


# --- errors ---


def test_nothing_to_normalise():
    """A filter, or a layer, that leaves nothing is an error that lists what there is."""
    norm = nnx.LayerNorm(3, rngs=rngs())
    there = r"LayerNorm.*scale \(float32\[3\]\)"
    with pytest.raises(EmptySelectionError, match=f"SpectralNorm finds nothing to normalise in {there}"):
        nnx.SpectralNorm(norm, rngs=rngs())
    with pytest.raises(TypeError, match="a layer, but got the class Linear; make one of it"):
        nnx.SpectralNorm(nnx.Linear, rngs=rngs())
    with pytest.raises(EmptySelectionError, match=f"WeightNorm finds nothing to normalise in {there}"):
        nnx.WeightNorm(norm, rngs=rngs())
    with pytest.raises(EmptySelectionError, match="which are: none"):
        nnx.WeightNorm(nnx.Dropout(0.5), rngs=rngs())


def test_weights_that_do_not_fit():
    conv = nnx.Conv(2, 3, (2, 2), rngs=rngs())
    with pytest.raises(ValueError, match=r"SpectralNorm: Conv.kernel is 4D but error_on_non_matrix is True"):
        nnx.SpectralNorm(conv, error_on_non_matrix=True, rngs=rngs())
    with pytest.raises(ValueError, match=r"real weights, but Holder.kernel is int32\[3, 3\]"):
        nnx.SpectralNorm(Holder((3, 3), jnp.int32), rngs=rngs())
    with pytest.raises(ValueError, match="one power iteration at least, but n_steps is 0"):
        nnx.SpectralNorm(linear(), n_steps=0, rngs=rngs())
    with pytest.raises(ValueError, match=r"WeightNorm: Linear.kernel has 2 axes, and so not all of feature_axes=2"):
        nnx.WeightNorm(linear(), feature_axes=2, rngs=rngs())
    with pytest.raises(ValueError, match=r"WeightNorm: Linear.bias has 1 axes.*feature_axes=\(0, 1\)"):
        nnx.WeightNorm(linear(), feature_axes=(0, 1), variable_filter=nnx.PathContains("bias"), rngs=rngs())


@each_wrapper
def test_a_weight_that_came_later(wrap):
    """Has no scale or singular value yet: the error says to wrap the layer again."""
    layer = nnx.Sequential(linear(3, 3))
    wrapped = wrap(layer)
    layer.layers.append(linear(3, 3))
    message = r"Norm has no (scale|singular value) for layers\[1\].kernel: Sequential did not have this Param"
    with pytest.raises(ValueError, match=message):
        wrapped(array(2, 3))


@each_wrapper
def test_a_weight_that_was_replaced_by_one_of_another_shape(wrap):
    """What the wrapper keeps about it does not fit, even if it is of the same size."""
    wrapped = wrap(nnx.Linear(3, 4, rngs=rngs()))
    wrapped.layer_instance.kernel.value = array(3, 2)
    with pytest.raises(ValueError, match=r"Norm: Linear\.kernel is float32\[3, 2\].* Wrap the layer again"):
        wrapped(array(2, 3))
    whole = nnx.WeightNorm(nnx.Linear(3, 4, use_bias=False, rngs=rngs()), feature_axes=(0, 1), rngs=rngs())
    whole.layer_instance.kernel.value = array(4, 3)
    with pytest.raises(ValueError, match="Wrap the layer again"):
        whole(array(2, 4))


@each_wrapper
def test_paths_below_a_wrapper_are_those_of_the_state(wrap):
    """Eagerly and compiled, with the wrapper inside another Module."""
    seen = []

    class Inner(nnx.Module):
        def __init__(self):
            self.linear = linear()

        def __call__(self, x):
            seen.append(nnx.current_path())
            return self.linear(x)

    outer = nnx.Sequential(wrap(Inner()))
    for f in (outer, nnx.jit(outer)):
        f(array(2, 3))
    assert set(seen) == {("layers", 0, "layer_instance")}


@each_wrapper
def test_wrong_shapes_name_the_wrapped_layer(wrap):
    layer = wrap(linear())
    with pytest.raises(
        ValueError,
        match=r"Norm.layer_instance \(Linear 3->4\) takes inputs of shape \[\.\.\., 3\], but got float32\[2, 5\]",
    ):
        layer(array(2, 5))


@each_wrapper
def test_calls_that_change_more_than_values(wrap):
    """Eagerly the wrapper is compared only where something changed: new attributes, arrays, dicts, nodes returned."""

    class Odd(nnx.Module):
        def __init__(self):
            self.linear, self.table = linear(), nnx.Variable({"calls": 0})
            self.last = None

        def __call__(self, x, what):
            if what == "attribute":
                self.last = x
            elif what == "dict":
                self.table.value["calls"] += 1
            elif what == "swap":
                self.table = nnx.BatchStat(x)
            elif what == "self":
                return self
            return self.linear(x)

    layer, x = wrap(Odd()), array(2, 3)
    odd, before = layer.layer_instance, raw_values(layer)
    layer(x, what="dict")
    assert odd.table.value == {"calls": 1}
    layer(x, what="attribute")
    assert odd.last is x
    assert layer(x, what="self") is odd
    layer(2 * x, what="attribute")  # another array in the place of one
    np.testing.assert_array_equal(odd.last, 2 * x)
    layer(x, what="swap")
    assert type(odd.table) is nnx.BatchStat
    layer(x, what="")
    assert same_objects(before, raw_values(layer))


@pytest.mark.parametrize("wrap", [nnx.SpectralNorm, nnx.WeightNorm])
def test_what_a_layer_returns_of_itself_is_what_it_holds(wrap):
    """A part, or a method of it, and not that of the copy with normalised weights."""

    class Showing(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

        def __call__(self, x, other):
            return self.linear, self.linear.__call__, other

    layer = wrap(Showing(), rngs=nnx.Rngs(1))
    other = nnx.Dict(w=nnx.Param(1.0))
    for passed in (0, other):
        part, method, back = layer(jnp.ones(3), other=passed)
        assert part is method.__self__ is layer.layer_instance.linear
        assert back is passed
