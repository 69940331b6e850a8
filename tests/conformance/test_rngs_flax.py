"""The same keys as flax.nnx from the same seed, for every way of drawing that both have."""

import jax
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import reseeding

flax = pytest.importorskip("flax.nnx")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def key_of(stream):
    return stream.key.get_value()


def draw(lib):
    rngs = lib.Rngs(0)
    return [rngs.params(), rngs.dropout(), rngs(), rngs["params"](), rngs.default()]


def draw_named(lib):
    rngs = lib.Rngs(0, params=1, dropout=2)
    return [rngs.params(), rngs.dropout(), rngs.other(), rngs.params(), rngs()]


def from_mapping(lib):
    rngs = lib.Rngs({"params": 3, "dropout": jax.random.key(4)}, noise=5)
    return [rngs.params(), rngs.dropout(), rngs.noise()]


def from_keys(lib):
    return [lib.Rngs(jax.random.key(7))(), lib.Rngs(params=jax.random.PRNGKey(8)).params()]


def params_of_equal_seeds(lib):
    """Parameters are drawn as in flax.nnx; the other streams are told apart, which are all the same there."""
    given = [
        {"params": 0, "dropout": 0},
        {"dropout": 0, "params": 0},
        {"dropout": 0, "default": 0},
        {"dropout": 1, "noise": 1, "params": 1, "default": 1},
    ]
    return [lib.Rngs(**seeds).params() for seeds in given]


def from_other_implementations(lib):
    rngs = lib.Rngs(jax.random.key(0, impl="rbg"))
    return [rngs.params(), rngs.fork()(), key_of(rngs.split(3).default)]


def from_fresh_stream(lib):
    return [lib.Rngs(lib.RngStream(5, tag="noise"))(), lib.Rngs(params=lib.RngStream(6, tag="params")).params()]


def streams(lib):
    stream = lib.RngStream(3, tag="noise")
    return [
        stream(),
        stream.fork()(),
        key_of(stream.split(4)),
        key_of(stream.split((2, 3))),
        key_of(stream.broadcast(2)),
    ]


def fork(lib):
    rngs = lib.Rngs(0, params=1)
    rngs.params()
    child = rngs.fork()
    return [child.params(), child(), rngs.params(), rngs(), rngs.params.fork()()]


def split(lib):
    rngs = lib.Rngs(0, params=1)
    lanes = rngs.split(3)
    return [key_of(lanes.params), key_of(lanes.default), rngs.params(), rngs()]


def split_some(lib):
    rngs = lib.Rngs(0, params=1, dropout=2)
    lanes = rngs.split({"params": 3, "dropout": (2, 2)})
    return [key_of(lanes.params), key_of(lanes.dropout), lanes()]


def fork_some(lib):
    rngs = lib.Rngs(0, params=1, dropout=2)
    rngs.params()
    lanes = rngs.fork(split={"params": 3, ...: 2})
    return [key_of(lanes.params), key_of(lanes.dropout), key_of(lanes.default), rngs()]


def broadcast(lib):
    rngs = lib.Rngs(0, params=1)
    lanes = rngs.broadcast({"params": 3, ...: (2, 2)})
    return [key_of(lanes.params), key_of(lanes.default), rngs.params(), rngs()]


PROGRAMS = [
    params_of_equal_seeds,
    draw, draw_named, from_mapping, from_keys, from_other_implementations, from_fresh_stream, streams, fork, split,
    split_some, fork_some, broadcast,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_same_keys(program):
    """The program draws the same keys, of the same implementation, under both libraries."""
    ours, theirs = program(nnx), program(flax)
    assert [jax.random.key_impl(k) for k in ours] == [jax.random.key_impl(k) for k in theirs]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(jax.random.key_data(a), jax.random.key_data(b))


def test_same_samples():
    """Samplers and initializers give the same numbers, on an Rngs and on a stream."""

    def program(lib):
        rngs = lib.Rngs(0, params=1)
        return [
            rngs.normal((2, 3)),
            rngs.params.uniform((4,), minval=1.0),
            rngs.bernoulli(0.3, (5,)),
            rngs.permutation(6),
            rngs.params.truncated_normal(-1.0, 1.0, (3,)),
            rngs.lecun_normal()((3, 4)),
            rngs.params.glorot_uniform()((3, 4), "bfloat16"),
            rngs.orthogonal(3),
        ]

    for a, b in zip(program(nnx), program(flax), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_same_attributes_of_a_stream():
    """Streams have the same tags, shapes and dtypes, by name and in the order of iteration."""

    def facts(lib):
        rngs = lib.Rngs(0, params=1, dropout=jax.random.split(jax.random.key(0), 3))
        return [
            (name, s.tag, s.key.tag, s.count.tag, s.key.shape, str(s.key.dtype), s.count.shape, str(s.count.dtype))
            for name, s in rngs.items()
        ] + [len(rngs), list(rngs), "params" in rngs, "noise" in rngs]

    assert facts(nnx) == facts(flax)


def test_streams_of_a_model_are_split_forked_and_reseeded_alike():
    """In place and as decorators: keys and counts of every stream, during and after, are those of flax.nnx."""

    def program(lib, tools):
        class Model(lib.Module):
            def __init__(self, rngs):
                self.b = lib.Dropout(0.5, rngs=rngs)
                self.a = lib.Dropout(0.5, rngs=rngs)
                self.rngs = rngs

        model = Model(lib.Rngs(0, dropout=1, noise=2))
        facts = []

        def look(model):
            for s in (model.a.rngs, model.b.rngs, model.rngs.dropout, model.rngs.default, model.rngs.noise):
                facts.append([jax.random.key_data(key_of(s)).tolist(), s.count.get_value().tolist()])

        tools.reseed(model, dropout=5, noise=jax.random.key(7))
        look(model)
        for act in (
            lambda: tools.split_rngs(model, splits=3, only="dropout"),
            lambda: tools.split_rngs(model, splits=(2, 2)),
            lambda: tools.split_rngs(model, splits=1, squeeze=True),
            lambda: tools.fork_rngs(model),
            lambda: tools.fork_rngs(model, split={"noise": 2, "dropout": None}),
        ):
            with act():
                look(model)
            look(model)
        tools.split_rngs(splits=2)(look)(model)
        look(model)
        return facts

    assert program(nnx, reseeding) == program(flax, flax)


def test_with_rngs_gives_the_same_streams():
    """In flax.nnx it needs `graph=False`."""

    def program(lib, **switches):
        facts = []
        for options in (
            {"split": 3},
            {"split": {"params": (2, 2)}, "fork": ...},
            {"split": {"params": 2}, "broadcast": 4},
            {"fork": "noise"},
            {"split": 2, "only": "params"},
            {"split": {"params": 2}, "broadcast": {"noise": 3}, "fork": ["dropout", ...]},
            {},
        ):
            rngs = lib.Rngs(params=0, dropout=1, noise=2)
            copy = lib.with_rngs(rngs, **options, **switches)
            for stream in (rngs.params, rngs.noise, copy.params, copy.dropout, copy.noise):
                key = jax.random.key_data(key_of(stream))
                facts.append((key.tolist(), stream.count.get_value().tolist(), stream.tag))
        return facts

    assert program(nnx) == program(flax, graph=False)


def test_same_kinds_of_errors():
    """What flax.nnx refuses by AttributeError, KeyError or ValueError is refused by the same class here."""
    for lib in (nnx, flax):
        with pytest.raises(AttributeError, match="'noise'"):
            lib.Rngs(params=0).noise
        with pytest.raises(KeyError, match="'noise'"):
            lib.Rngs(params=0)["noise"]
        with pytest.raises(ValueError, match="Invalid rng value"):
            lib.Rngs(1.5)


def test_where_flax_repeats_keys_we_do_not():
    """Streams passed through by split and broadcast, or handed over, start again in flax.nnx; here they go on."""

    def repeats(lib):
        rngs = lib.Rngs(params=1, dropout=2)
        stream = rngs.dropout
        drawn = [stream() for _ in range(2)]
        for other in (rngs.split({"params": 5}), rngs.broadcast({"params": 5}), lib.Rngs(dropout=stream)):
            drawn += [other.dropout() for _ in range(2)]
        return len(drawn) - len({jax.random.key_data(k).tobytes() for k in drawn})

    assert repeats(flax) == 6
    assert repeats(nnx) == 0
