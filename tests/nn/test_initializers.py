import logging
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls

LAYERS = {
    "Linear": lambda rngs: nnx.Linear(7, 11, rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(5, 7, (3, 3), kernel_init=nnx.initializers.he_normal(), rngs=rngs),
    "Embed": lambda rngs: nnx.Embed(13, 5, rngs=rngs),
    "BatchNorm": lambda rngs: nnx.BatchNorm(17, rngs=rngs),
    "Dropout": lambda rngs: nnx.Dropout(0.5, rngs=rngs),
}


@pytest.mark.parametrize("name", ["zeros", "ones"])
@pytest.mark.parametrize("dtype", [jnp.float32, "bfloat16", jnp.int32, np.dtype("float16")], ids=str)
def test_constants_are_those_of_jax(name, dtype):
    """Our `zeros` and `ones` give the arrays of jax.nn.initializers, each time a new one."""
    ours, theirs = getattr(nnx.initializers, name), getattr(jax.nn.initializers, name)
    first, second = ours(None, (2, 3), dtype), ours(None, [2, 3], dtype)
    assert (first.dtype, first.weak_type) == (theirs(None, (2, 3), dtype).dtype, False)
    np.testing.assert_array_equal(first, theirs(None, (2, 3), dtype))
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()


def test_a_number_is_the_shape_of_a_vector():
    """The constants take a size in place of a shape, as those of JAX do; what is no size is refused."""
    assert nnx.initializers.ones(None, 3).tolist() == [1, 1, 1]
    assert nnx.initializers.zeros(None, np.int64(2)).tolist() == [0, 0]
    with pytest.raises(TypeError, match="integer"):
        nnx.initializers.zeros(None, 2.5)


def test_constants_take_a_sharding():
    """Keyword arguments go to the initializer of JAX."""
    x = nnx.initializers.ones(None, (2,), jnp.float32, out_sharding=None)
    np.testing.assert_array_equal(x, [1.0, 1.0])


def test_what_makes_initializers_can_be_pickled():
    """Pickle finds each in our module, also those that JAX makes; a configuration may hold one."""
    for name in ("normal", "orthogonal", "delta_orthogonal", "uniform", "variance_scaling", "lecun_normal", "constant"):
        make = getattr(nnx.initializers, name)
        assert pickle.loads(pickle.dumps(make)) is make


@pytest.mark.parametrize("name", ["lecun_normal", "he_uniform", "truncated_normal", "uniform", "normal", "orthogonal"])
def test_initializers_can_be_sent_by_cloudpickle(name):
    """A class of ``__main__`` that names one is sent with it; also after it was used."""
    init, key = getattr(nnx.initializers, name)(), jax.random.key(0)
    expected = init(key, (3, 2))
    assert (cloudpickle.loads(cloudpickle.dumps(init))(key, (3, 2)) == expected).all()


FACTORIES = [
    *[(name, {}) for name in dir(jax.nn.initializers) if name.endswith(("_normal", "_uniform")) and name[0] != "_"],
    ("lecun_normal", {"in_axis": (0,), "out_axis": -1, "batch_axis": 1}),
    ("he_uniform", {"in_axis": -1, "out_axis": 0}),
    ("normal", {"stddev": 0.02}),
    ("uniform", {"scale": 1 / 3}),
    ("truncated_normal", {"stddev": 0.1, "lower": -1, "upper": 3.0}),
    ("variance_scaling", {"scale": 1 / 3, "mode": "fan_out", "distribution": "normal"}),
    ("variance_scaling", {"scale": 2, "mode": "fan_avg", "distribution": "uniform"}),
    ("variance_scaling", {"scale": 1.0, "mode": "fan_in", "distribution": "normal", "out_axis": 0}),
]


@pytest.mark.parametrize(("name", "settings"), FACTORIES, ids=str)
def test_random_ones_are_those_of_jax(name, settings):
    """The same bits for the same key, eagerly and in a program."""
    ours, theirs = (getattr(m, name)(**settings) for m in (nnx.initializers, jax.nn.initializers))
    cases = [((1, 1), None), ((16, 16), "float32"), ((3, 3, 5, 7), jnp.bfloat16), ([48, 3], None), ((2, 1), "float16")]
    for n, (shape, dtype) in enumerate(cases):
        key = jax.random.key(n)
        a, b = ours(key, shape, dtype), theirs(key, shape, dtype)
        assert (a.dtype, a.weak_type, a.shape) == (b.dtype, b.weak_type, b.shape)
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(*(jax.jit(f, static_argnums=1)(key, (4, 4)) for f in (ours, theirs)))
    if name not in ("truncated_normal", "uniform"):
        np.testing.assert_array_equal(*(f(key, (4, 4), jnp.complex64) for f in (ours, theirs)))


def test_a_random_one_is_a_program_for_any_scale(caplog):
    """It is drawn by few calls, where JAX makes several hundred; another scale compiles nothing."""
    key, shape = jax.random.key(0), (6, 7)
    nnx.initializers.lecun_normal()(key, shape)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        init = nnx.initializers.he_normal()
        init(key, shape)
    assert [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()] == []
    assert count_calls(lambda: init(key, shape)) < 60


def test_what_is_left_to_jax():
    """A scale that is an array, another kind of shape, and mistakes."""
    key, scale = jax.random.key(0), jnp.float32(0.5)
    for m in (nnx.initializers, jax.nn.initializers):
        assert m.uniform(scale)(key, (2, 3)).shape == (2, 3)
        assert jax.jit(lambda s, m=m: m.variance_scaling(s, "fan_in", "uniform")(key, (2, 3)))(scale).shape == (2, 3)
        assert m.uniform()(key, (np.int64(2), 3)).shape == (2, 3)
        assert m.lecun_normal()(key, (2, 3), jnp.float32, out_sharding=None).shape == (2, 3)
        with pytest.raises(ValueError, match="2D"):
            m.lecun_normal()(key, (3,))
        with pytest.raises(ValueError, match="invalid mode"):
            m.variance_scaling(1.0, "fan", "normal")(key, (2, 3))
        with pytest.raises(ValueError, match="invalid distribution"):
            m.variance_scaling(1.0, "fan_in", "cauchy")(key, (2, 3))
        with pytest.raises(ValueError, match="dtype"):
            m.uniform()(key, (2, 3), jnp.int32)
        with pytest.warns(UserWarning, match="float64"):
            m.uniform()(key, (2, 3), "float64")


def test_the_same_arguments_give_the_same_initializer():
    """So a model that keeps one has the structure of the model before; a list of axes, and an array, are no key."""
    m = nnx.initializers
    assert m.he_normal() is m.he_normal()
    assert m.uniform(1.0) is m.uniform(1.0)
    assert m.normal(stddev=0.02) is m.normal(stddev=0.02)
    assert m.orthogonal() is m.orthogonal()
    assert [np.signbit(m.constant(x)(None, ())) for x in (0.0, -0.0)] == [False, True]
    assert m.uniform(1.0) is not m.uniform(1)
    assert m.he_normal(-2) is not m.he_normal(-3)
    by_list = m.variance_scaling(1.0, "fan_in", "uniform", [-2], -1), m.uniform(jnp.array(0.5))
    for init in by_list:
        assert init(jax.random.key(0), (3, 3)).shape == (3, 3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scle'"):
        m.uniform(scle=1.0)

    class Keeps(nnx.Module):
        def __init__(self):
            self.init = m.lecun_normal()
            self.weight = nnx.Param(self.init(jax.random.key(0), (2, 2)))

    traces = []
    total = nnx.jit(lambda model: (traces.append(1), model.weight.sum())[1])
    total(Keeps()), total(Keeps())
    assert len(traces) == 1
    assert count_calls(m.lecun_normal) < 6


def test_every_initializer_of_jax_is_here():
    """The namespace has all of jax.nn.initializers, and the two that flax users know besides."""
    missing = [n for n in dir(jax.nn.initializers) if not n.startswith("_") and not hasattr(nnx.initializers, n)]
    assert missing == []
    assert nnx.initializers.zeros_init() is nnx.initializers.zeros
    assert nnx.initializers.ones_init() is nnx.initializers.ones


@pytest.mark.parametrize("name", LAYERS)
def test_a_second_layer_of_the_same_shape_compiles_nothing(name, caplog):
    """Each initializer is compiled once per shape and dtype, however many layers are made."""
    make = LAYERS[name]
    rngs = nnx.Rngs(0)
    make(rngs)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        make(rngs)
        make(nnx.Rngs(1))
    assert [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()] == []


def test_zeros_take_the_sharding_of_a_result():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        made = nnx.initializers.zeros(None, (2,), jnp.float32, out_sharding=jax.P("data"))
    assert made.sharding.spec == jax.P("data")


DRAWING = ["lecun_normal", "glorot_uniform", "truncated_normal", "uniform", "normal"]
KEYS = {
    "typed": lambda: jax.random.key(3),
    "raw": lambda: jax.random.PRNGKey(3),
    "rbg": lambda: jax.random.key(3, impl="rbg"),
    "raw rbg": lambda: jax.random.key_data(jax.random.key(3, impl="unsafe_rbg")),
}


@pytest.mark.parametrize("partitionable", [True, False])
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("name", DRAWING)
def test_numbers_of_any_shape_are_those_of_jax_to_the_last_bit(name, kind, partitionable):
    """However they are drawn; also for keys of an implementation that fills an array in an order of its own."""
    key = KEYS[kind]()
    ours, theirs = (getattr(lib.initializers, name)(*[0.7] * (name == "normal")) for lib in (nnx, jax.nn))
    default = jax.config.jax_default_prng_impl
    with jax.threefry_partitionable(partitionable):
        try:
            jax.config.update("jax_default_prng_impl", "unsafe_rbg" if kind == "raw rbg" else default)
            for shape in (3, 3, 5, 7), (2, 9, 5), (1, 1, 1), (4, 1, 3), (13, 21):
                np.testing.assert_array_equal(ours(key, shape), theirs(key, shape, jnp.float32), str(shape))
        finally:
            jax.config.update("jax_default_prng_impl", default)


@pytest.mark.parametrize("name", ["lecun_normal", "glorot_uniform", "normal"])
def test_eager_code_draws_the_kernel_of_a_convolution_as_a_vector(name, monkeypatch):
    """XLA takes fifteen times as long for four axes. But in a program for several devices it can only shard these."""
    shapes, shape_of = [], nnx.nn.initializers._drawn_shape
    monkeypatch.setattr(nnx.nn.initializers, "_drawn_shape", lambda *args: shapes.append(shape_of(*args)) or shapes[-1])
    init, key = getattr(nnx.initializers, name)(), jax.random.key(0)
    draw = lambda key: init(key, (3, 3, 5, 11))
    for call in draw, jax.jit(draw), lambda key: jax.vmap(draw)(jax.random.split(key, 2)):
        jax.clear_caches()
        call(key)
    assert shapes == [(495,), (3, 3, 5, 11), (495,)]


@pytest.mark.parametrize("name", DRAWING)
def test_what_is_no_key_gets_the_message_of_jax(name):
    with pytest.raises(TypeError, match="key"):
        getattr(nnx.initializers, name)()(None, (3, 3, 5, 8))
