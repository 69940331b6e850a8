"""SpectralNorm, WeightNorm and PReLU beside flax.nnx: state, output, statistics and gradients of a first call.

flax.nnx overwrites the weight that it normalises, so what is compared there is what the first call does; what later
calls do is compared after putting the weight back.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")

from flax import nnx as flax

from .results import scales_are_learned

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

normal = jax.nn.initializers.normal(1.0)
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


def array(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def assert_close(ours, theirs, tolerance=None):
    def one(a, b):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        t = TOLERANCE[str(a.dtype)] if tolerance is None else tolerance
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=t, atol=t)

    jax.tree.map(one, ours, theirs)


def state(lib, module):
    """Values of all Variables by path, with the names of their types."""
    return {(path, type(v).__name__): v.get_value() for path, v in lib.to_flat_state(lib.state(module))}


def layers(lib, kind, param_dtype=jnp.float32):
    settings = {"bias_init": normal, "param_dtype": param_dtype, "rngs": lib.Rngs(1)}
    if kind == "linear":
        return lib.Linear(3, 4, **settings), array(2, 3)
    if kind == "conv":
        return lib.Conv(3, 4, (2, 2), **settings), array(1, 3, 3, 3)
    rngs = lib.Rngs(1)
    return lib.Sequential(lib.Linear(3, 4, rngs=rngs), jnp.tanh, lib.Linear(4, 2, rngs=rngs)), array(2, 3)


KINDS = st.sampled_from(["linear", "conv", "sequential"])


with_learned_scales = pytest.mark.skipif(
    not scales_are_learned(), reason="the scales of WeightNorm are no Params there"
)


def check(name, kind, kwargs, param_dtype=jnp.float32, tolerance=None):
    def run(lib):
        layer, x = layers(lib, kind, param_dtype)
        wrapped = getattr(lib, name)(layer, **kwargs, rngs=lib.Rngs(2))
        before = state(lib, wrapped)
        loss = lambda m: jnp.sum(jnp.sin(m(x).astype(jnp.float32)))
        grads = lib.to_pure_dict(lib.grad(loss)(lib.clone(wrapped)))
        y = wrapped(x)
        after = {key: value for key, value in state(lib, wrapped).items() if key[1] == "BatchStat"}
        return before, after, y, grads

    (before, after, y, grads), (their_before, their_after, their_y, their_grads) = run(nnx), run(flax)
    assert before.keys() == their_before.keys()
    jax.tree.map(np.testing.assert_array_equal, before, their_before)
    assert_close((after, y), (their_after, their_y), tolerance)
    assert_close(grads, their_grads, tolerance and 4 * tolerance)


@settings(max_examples=6)
@given(
    KINDS,
    st.fixed_dictionaries(
        {},
        optional={"n_steps": st.integers(1, 3), "epsilon": st.just(1e-3), "update_stats": st.booleans()},
    ),
)
def test_spectral_norm(kind, kwargs):
    check("SpectralNorm", kind, kwargs)


@with_learned_scales
@settings(max_examples=6)
@given(
    KINDS,
    st.fixed_dictionaries(
        {},
        optional={
            "feature_axes": st.sampled_from([-1, 0, None, (0, 1), (-2, -1)]),
            "use_scale": st.booleans(),
            "epsilon": st.just(1e-3),
        },
    ),
)
def test_weight_norm(kind, kwargs):
    check("WeightNorm", kind, kwargs)


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SpectralNorm", {}),
        ("SpectralNorm", {"n_steps": 5}),
        pytest.param("WeightNorm", {}, marks=with_learned_scales),
        pytest.param("WeightNorm", {"feature_axes": None}, marks=with_learned_scales),
    ],
)
def test_eager_numbers_are_the_same_to_the_bit(kind, name, kwargs):
    def run(lib):
        layer, x = layers(lib, kind)
        return getattr(lib, name)(layer, **kwargs, rngs=lib.Rngs(2))(x)

    np.testing.assert_array_equal(run(nnx), run(flax))


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")  # there
@pytest.mark.parametrize("name", ["SpectralNorm", pytest.param("WeightNorm", marks=with_learned_scales)])
def test_low_precision(name):
    """Norms are computed in float32 here, in bfloat16 there, so they agree to the precision of bfloat16."""
    check(name, "linear", {}, jnp.bfloat16, 3e-2)
    check(name, "linear", {"dtype": jnp.bfloat16}, jnp.float32, 3e-2)


@with_learned_scales
def test_filters():
    """`variable_filter` by path and by type; Params that it leaves are used as they are."""
    for make in (lambda lib: lib.PathContains("bias"), lambda lib: lib.Param):

        def run(lib, make=make):
            layer, x = layers(lib, "linear")
            wrapped = lib.WeightNorm(layer, variable_filter=make(lib), rngs=lib.Rngs(0))
            return state(lib, wrapped), wrapped(x)

        (ours, y), (theirs, their_y) = run(nnx), run(flax)
        assert ours.keys() == theirs.keys()
        assert_close(y, their_y)


def test_statistics_go_on_from_call_to_call():
    """With the weight put back after each call of theirs: power iteration, stored or not."""
    x = array(2, 3)

    def run(lib):
        layer, _ = layers(lib, "linear")
        wrapped, found = lib.SpectralNorm(layer, rngs=lib.Rngs(2)), []
        for call in (
            lambda: wrapped(x),
            lambda: wrapped(x, update_stats=False),
            lambda: wrapped(x),
            wrapped.eval,
            lambda: wrapped(x),
            lambda: wrapped(x, True),
            wrapped.train,
            lambda: wrapped(x),
        ):
            kernel = layer.kernel.get_value()
            y = call()
            layer.kernel.set_value(kernel)
            found += [wrapped.use_running_average, y, wrapped.batch_stats[("kernel", "sigma")].get_value()]
        return [jnp.asarray(v) for v in found if v is not None]

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, run(nnx), run(flax))


def test_the_weight_stays_on_purpose():
    """Calling a layer does not change its Params; flax.nnx leaves the normalised weight in place of them."""
    for name in ("SpectralNorm", "WeightNorm"):

        def kept(lib, name=name):
            layer, x = layers(lib, "linear")
            before = np.asarray(layer.kernel.get_value())
            getattr(lib, name)(layer, rngs=lib.Rngs(0))(x)
            return np.array_equal(layer.kernel.get_value(), before)

        assert kept(nnx)
        assert not kept(flax)


@settings(max_examples=12)
@given(
    st.sampled_from([None, jnp.bfloat16]),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.sampled_from([0.01, 0.3]),
)
def test_prelu(dtype, param_dtype, input_dtype, slope):
    x = array(2, 3).astype(input_dtype)

    def run(lib):
        metadata = {"negative_slope_metadata": {"role": "slope"}}
        layer = lib.PReLU(slope, dtype=dtype, param_dtype=param_dtype, **metadata)
        assert layer.negative_slope.role == "slope"
        grads = lib.grad(lambda m, x: jnp.sum(m(x).astype(jnp.float32)), argnums=(0, 1))(layer, x)
        return state(lib, layer), layer(x), lib.to_pure_dict(grads[0]), grads[1]

    assert_close(run(nnx), run(flax), 1e-2 if jnp.bfloat16 in (dtype, param_dtype, input_dtype) else 1e-6)


def test_prelu_of_integers_differs_on_purpose():
    """The slope is not rounded to an integer."""
    x = jnp.array([-100, 100])
    assert nnx.PReLU(0.25)(x).tolist() == [-25.0, 100.0]
    assert flax.PReLU(0.25)(x).tolist() == [0, 100]
