import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.rngs import as_key

IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg"]


def bits(key) -> bytes:
    return np.asarray(jax.random.key_data(key)).tobytes()


def same(a, b) -> bool:
    return bits(a) == bits(b)


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_nth_draw_folds_n_into_the_root(impl):
    """A draw is fold_in(root, count), whatever the implementation of the key."""
    root = jax.random.key(7, impl=impl)
    stream = nnx.RngStream(root, tag="noise")
    assert [bits(stream()) for _ in range(3)] == [bits(jax.random.fold_in(root, n)) for n in range(3)]
    assert jax.random.key_impl(stream()) == jax.random.key_impl(root)


def test_a_stream_is_a_key_and_a_count_with_its_tag():
    """`key` and `count` are RngKey and RngCount scalars that carry the tag; the count is uint32 and counts draws."""
    stream = nnx.RngStream(0, tag="noise")
    stream()
    assert (type(stream.key), type(stream.count)) == (nnx.RngKey, nnx.RngCount)
    assert (stream.tag, stream.key.tag, stream.count.tag) == ("noise",) * 3
    assert (stream.count.shape, stream.count.dtype, int(stream.count.value)) == ((), jnp.uint32, 1)


def test_split_gives_lanes_with_roots_of_their_own():
    """`split(k)` cuts the next key into k roots and starts their counts at 0."""
    stream = nnx.RngStream(0, tag="params")
    stream()
    lanes = stream.split(3)
    expected = jax.random.split(jax.random.fold_in(jax.random.key(0), 1), 3)
    assert same(lanes.key.value, expected)
    np.testing.assert_array_equal(lanes.count.value, np.zeros(3, np.uint32))
    assert (lanes.tag, int(stream.count.value)) == ("params", 2)
    assert stream.split((2, 4)).key.shape == stream.fork(split=(2, 4)).key.shape == (2, 4)


def test_broadcast_gives_lanes_that_draw_alike():
    """`broadcast(k)` repeats one new root, which the stream itself never draws from."""
    stream = nnx.RngStream(0, tag="params")
    lanes = stream.broadcast(3)
    root = jax.random.fold_in(jax.random.key(0), 0)
    assert [bits(k) for k in lanes.key.value] == [bits(root)] * 3
    assert not same(stream(), root)
    assert stream.broadcast((2, 2)).key.shape == (2, 2)


@pytest.mark.parametrize("act", [nnx.RngStream.__call__, nnx.RngStream.fork, lambda s: s.split(2)])
def test_a_split_stream_has_no_single_next_key(act):
    """Drawing from a stream of lanes says that it was split, and shows the vmap that draws from each lane."""
    with pytest.raises(ValueError, match=r"(?s)'params' is split into lanes of shape \(3,\).*nnx.vmap"):
        act(nnx.RngStream(0, tag="params").split(3))


def test_a_stream_without_a_key_says_how_to_get_one():
    """As in a model of shapes into which only parameters were restored."""
    model = nnx.eval_shape(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0)))
    with pytest.raises(nnx.errors.UsageError, match=r"'dropout' has no key, .*nnx\.reseed\(model, dropout=0\)"):
        model(jnp.ones(3))
    nnx.reseed(model, dropout=0)
    assert model(jnp.ones(3)).shape == (3,)


def test_a_refused_draw_consumes_nothing():
    """A draw inside a raw JAX transformation raises and leaves the stream where it was."""
    rngs = nnx.Rngs(0)
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda x: x + rngs.normal())(1.0)
    assert int(rngs.default.count.value) == 0
    assert same(rngs(), nnx.Rngs(0)())


def test_streams_draw_the_same_keys_traced_and_eagerly():
    """Draws, forks and splits of a merged Rngs inside jit give the keys, and the count, of eager ones."""

    def program(rngs):
        child = rngs.fork()
        return [rngs.params(), child.dropout(), rngs.dropout.split(2).key.value, child.fold_in("a", 1).params()]

    def traced(state):
        rngs = nnx.merge(graphdef, state)
        return program(rngs), nnx.state(rngs)

    graphdef, state = nnx.split(nnx.Rngs(0, dropout=1))
    rngs = nnx.Rngs(0, dropout=1)
    keys, after = jax.jit(traced)(state)
    assert [bits(k) for k in keys] == [bits(k) for k in program(rngs)]
    assert int(after["dropout"]["count"].value) == int(rngs.dropout.count.value) == 2


def test_snapshots_continue_like_the_original():
    """Deep copies, clones and pickles hold the same root and count."""
    rngs = nnx.Rngs(0, params=1)
    rngs.params()
    copies = [copy.deepcopy(rngs), nnx.clone(rngs), pickle.loads(pickle.dumps(rngs))]
    expected = bits(rngs.params())
    assert [bits(snapshot.params()) for snapshot in copies] == [expected] * 3


# --- making an Rngs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed",
    [
        3,
        np.int64(3),
        np.uint32(3),
        jnp.int32(3),
        jax.random.key(3),
        jax.random.PRNGKey(3),
        np.asarray(jax.random.PRNGKey(3)),
        nnx.RngKey(jax.random.key(3)),
        nnx.RngStream(3, tag="default"),
    ],
    ids=lambda seed: type(seed).__name__,
)
def test_whatever_names_a_key_makes_the_same_stream(seed):
    """Seeds, typed and raw keys, Variables and streams make the stream of that key."""
    assert same(nnx.Rngs(seed)(), jax.random.fold_in(jax.random.key(3), 0))


def test_constructor_forms_agree():
    """Keywords, a mapping, and both together name the same streams; the default comes last."""
    a, b = nnx.Rngs(0, params=1, dropout=2), nnx.Rngs({"params": 5, "default": 0}, params=1, dropout=2)
    assert list(a) == ["params", "dropout", "default"]
    assert set(a) == set(b)
    assert all(same(a[name](), b[name]()) for name in a)
    assert list(nnx.Rngs()) == []


def test_arrays_of_keys_make_split_streams():
    """A stream made from an array of keys is a stream of lanes; raw keys are read along their last axis."""
    keys = jax.random.split(jax.random.key(0), 3)
    assert same(nnx.Rngs(params=keys).params.key.value, keys)
    assert same(nnx.Rngs(params=jax.random.key_data(keys)).params.key.value, keys)
    assert nnx.Rngs(params=keys).params.count.shape == (3,)


@pytest.mark.parametrize("value", [1.5, "a", None, True, jnp.ones(2), np.float32(0)], ids=repr)
def test_what_is_not_a_key_is_refused(value):
    """Anything that is neither seed nor key nor stream is named in the error, which shows what is."""
    with pytest.raises(ValueError, match=r"Invalid rng value: .*nnx.Rngs\(0\)"):
        nnx.Rngs(params=value)


def test_a_raw_key_of_another_implementation_has_to_say_so():
    """Four words may be of two implementations; the error shows how to name one, and such a key is taken."""
    raw = jax.random.key_data(jax.random.key(3, impl="rbg"))
    with pytest.raises(ValueError, match=r"raw key of shape \(4,\).*'threefry2x32'.*wrap_key_data\(key, impl='rbg'\)"):
        nnx.Rngs(raw)
    key = jax.random.wrap_key_data(raw, impl="rbg")
    assert same(nnx.Rngs(key)(), jax.random.fold_in(key, 0))
    with jax.default_prng_impl("rbg"):
        assert same(nnx.Rngs(raw)(), nnx.Rngs(3)())


def test_a_seed_that_is_too_large_is_refused():
    """Seeds have 64 bits."""
    with pytest.raises(ValueError, match="64 bits at most, but got 18446744073709551616"):
        nnx.Rngs(2**64)


@pytest.mark.parametrize("act", [nnx.RngStream.split, nnx.RngStream.broadcast, lambda s, k: s.fork(split=k)])
def test_lanes_are_given_by_a_number_or_a_shape(act):
    """Numbers of NumPy count; anything else is refused before a key is used up."""
    stream = nnx.RngStream(0, tag="params")
    for k in (-1, 2.0, "ab", (2, -1)):
        with pytest.raises(ValueError, match="number or shape, such as 5 or"):
            act(stream, k)
    assert int(stream.count.value) == 0
    assert act(stream, np.int64(2)).key.shape == (2,)
    assert act(stream, [2, 3]).key.shape == (2, 3)


def test_stream_names_that_cannot_be_attributes_are_refused():
    """A name must be a string without a leading underscore."""
    with pytest.raises(ValueError, match="'_params'"):
        nnx.Rngs({"_params": 0})
    with pytest.raises(ValueError, match="got 3"):
        nnx.Rngs({3: 0})


def test_traced_seeds_and_keys_make_streams():
    """A seed or key that is only known at run time is as good."""
    expected = bits(nnx.Rngs(3)())
    assert bits(jax.jit(lambda seed: nnx.Rngs(seed)())(3)) == expected
    assert bits(jax.jit(lambda key: nnx.Rngs(key)())(jax.random.key(3))) == expected
    assert bits(jax.vmap(lambda seed: nnx.Rngs(seed)())(jnp.arange(4))[3]) == expected


# --- looking streams up -----------------------------------------------------------------------------------------------


def test_a_missing_stream_falls_back_to_the_default():
    """`rngs.name` and `rngs['name']` give the default stream, and share its count."""
    rngs = nnx.Rngs(0, params=1)
    assert rngs.dropout is rngs["noise"] is rngs.default
    assert rngs["params"] is rngs.params is not rngs.default
    expected = [bits(jax.random.fold_in(jax.random.key(0), n)) for n in range(3)]
    assert [bits(rngs.a()), bits(rngs.b()), bits(rngs())] == expected


def test_a_missing_stream_without_default_lists_those_that_exist():
    """The error names what was asked for and the streams there are, and how to add one."""
    rngs = nnx.Rngs(params=0, noise=1)
    for look_up, kind in ((lambda: rngs.dropout, AttributeError), (lambda: rngs["dropout"], KeyError)):
        with pytest.raises(kind, match=r"'dropout'.*'params', 'noise'.*nnx.Rngs\(dropout=seed\)"):
            look_up()
    with pytest.raises(AttributeError, match=r"^No RngStream named 'default' found in Rngs; the streams are: none\."):
        nnx.Rngs()()
    assert not hasattr(rngs, "dropout")


def test_an_rngs_is_a_collection_of_names():
    """Iteration, length, membership and items see the named streams only, and those attached later."""
    rngs = nnx.Rngs(0, params=1)
    assert (list(rngs), len(rngs), "params" in rngs, "dropout" in rngs) == (["params", "default"], 2, True, False)
    rngs.noise = nnx.RngStream(2, tag="noise")
    assert [(name, stream.tag) for name, stream in rngs.items()] == [(name, name) for name in rngs]
    assert "noise" in rngs


def test_filters_choose_what_is_split():
    """`split` and `fork(split=...)` take filters, the first match counts; the rest is passed through, or forked."""
    rngs = nnx.Rngs(params=0, dropout=1, noise=2)
    lanes = rngs.split({"params": 5, "noise": None, ...: (2, 3)})
    assert (lanes.params.key.shape, lanes.dropout.key.shape, lanes.noise is rngs.noise) == ((5,), (2, 3), True)
    forked = rngs.fork(split={"params": 5})
    assert (forked.params.key.shape, forked.dropout.key.shape) == ((5,), ())
    assert same(forked.dropout.key.value, jax.random.fold_in(jax.random.key(1), 1))
    assert rngs.fork(split=4).noise.key.shape == rngs.split(4).noise.key.shape == (4,)
    assert rngs.broadcast({"dropout": 2}).params is rngs.params
    assert rngs.split(k=4).noise.key.shape == rngs.broadcast(k=4).noise.key.shape == (4,)
    assert rngs.noise.split(k=4).key.shape == rngs.noise.broadcast(k=4).key.shape == (4,)
    assert rngs.broadcast(None).params is rngs.params
    assert list(rngs.split(2)) == list(rngs)


# --- samplers ---------------------------------------------------------------------------------------------------------

NO_SAMPLERS = {"clone", "fold_in", "key_data", "key_dtype", "key_impl", "split", "random_gamma_p"}


def samplers() -> list[str]:
    functions = {n: f for n, f in vars(jax.random).items() if n[0].islower() and callable(f) and n not in NO_SAMPLERS}
    return sorted(n for n, f in functions.items() if next(iter(inspect.signature(f).parameters)) == "key")


def test_every_sampler_of_jax_is_a_method():
    """Rngs and RngStream have a method for each function of jax.random that takes a key first."""
    assert len(samplers()) > 30
    assert [n for n in samplers() if not hasattr(nnx.Rngs, n) or not hasattr(nnx.RngStream, n)] == []


def test_every_initializer_of_jax_is_a_method():
    """Each initializer factory of jax.nn.initializers is one of a stream too, or is a sampler there."""
    made = [n for n in vars(jax.nn.initializers) if n[0].islower() and n not in ("zeros", "ones", "constant")]
    assert len(made) > 10
    assert [n for n in made if not hasattr(nnx.Rngs, n)] == []


def test_samplers_draw_from_the_stream():
    """A sampler is the function of jax.random with the next key; on an Rngs, of the default stream."""
    rngs, keys = nnx.Rngs(0, params=1), nnx.Rngs(0, params=1)
    np.testing.assert_array_equal(rngs.normal((2, 3)), jax.random.normal(keys(), (2, 3)))
    np.testing.assert_array_equal(rngs.uniform((4,), minval=2.0), jax.random.uniform(keys(), (4,), minval=2.0))
    np.testing.assert_array_equal(rngs.params.randint((2,), 0, 9), jax.random.randint(keys.params(), (2,), 0, 9))
    np.testing.assert_array_equal(rngs.permutation(5), jax.random.permutation(keys(), 5))


def test_initializers_draw_from_the_stream():
    """An initializer method gives a function of shape and dtype that draws a key at each call."""
    rngs, keys = nnx.Rngs(0), nnx.Rngs(0)
    init = rngs.lecun_normal()
    for dtype in (jnp.float32, jnp.bfloat16):
        expected = jax.nn.initializers.lecun_normal()(keys(), (3, 4), dtype)
        np.testing.assert_array_equal(init((3, 4), dtype), expected)
    assert init((3, 4)).dtype == jnp.float32
    assert rngs.params.variance_scaling(2.0, "fan_in", "normal")((5, 6)).shape == (5, 6)


# --- named streams ----------------------------------------------------------------------------------------------------


def test_fold_in_does_not_depend_on_what_was_drawn():
    """The same names give the same keys before and after other draws, forks and splits, which it does not disturb."""
    rngs = nnx.Rngs(0, params=1)
    before = bits(rngs.fold_in("encoder", 3).params())
    undisturbed = [bits(rngs.params()), bits(rngs.params())]
    rngs.fork(), rngs.split(2)
    assert bits(rngs.fold_in("encoder", 3).params()) == before
    fresh = nnx.Rngs(0, params=1)
    assert undisturbed == [bits(fresh.params()), bits(fresh.params())]


def test_fold_in_keeps_names_apart():
    """Names in another grouping, order, type or nesting are other streams."""
    names = [
        ("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), ("c", "ab"), (1,), ("1",), (-1,), (1, 1), (11,), ("",),
        ("", ""), ("absc",), (1, "1"), ("1", 1), ("i1",), (2**40,), ("é",),
    ]  # fmt: skip
    rngs = nnx.Rngs(0)
    keys = [rngs.fold_in(*name)() for name in names]
    keys += [rngs.fold_in("ab").fold_in("c")(), rngs.fold_in("c").fold_in("ab")(), rngs(), rngs.fork()()]
    assert len(set(map(bits, keys))) == len(keys)


@given(st.lists(st.lists(st.text(max_size=3) | st.integers(), min_size=1, max_size=3).map(tuple), unique_by=repr))
def test_fold_in_is_injective(names):
    """Different names never give the same key."""
    rngs = nnx.Rngs(0)
    names = list(dict.fromkeys(names))
    assert len({bits(rngs.fold_in(*name)()) for name in names}) == len(names)


def test_fold_in_works_lane_by_lane():
    """Each lane of a split stream folds the names into its own root."""
    lanes = nnx.RngStream(0, tag="params").split(3)
    folded = lanes.fold_in("a").key.value
    singly = [nnx.RngStream(root, tag="params").fold_in("a").key.value for root in lanes.key.value]
    assert [bits(k) for k in folded] == [bits(k) for k in singly]


@pytest.mark.parametrize("static", [(), (1.5,), ("a", None), (True,), (b"a",)], ids=repr)
def test_fold_in_takes_strings_and_ints(static):
    """Other names, or none, are refused."""
    with pytest.raises(TypeError, match="fold_in"):
        nnx.Rngs(0).fold_in(*static)


def test_fold_in_refuses_what_is_traced():
    """A number that is not known while tracing cannot name a stream; the error shows what to write instead."""
    with pytest.raises(TypeError, match=r"jax.random.fold_in\(rngs\(\), step\)"):
        jax.jit(lambda step: nnx.Rngs(0).fold_in(step)())(1)


# --- no key twice -----------------------------------------------------------------------------------------------------


def lane(stream: nnx.RngStream, index: int) -> nnx.RngStream:
    """One lane of a split stream, as a function under vmap sees it."""
    one = nnx.RngStream(stream.key.value.reshape(-1)[index], tag=stream.tag)
    one.count.value = stream.count.value.reshape(-1)[index]
    return one


class World:
    """Rngs and streams that came from one Rngs, and all keys that they have handed out."""

    def __init__(self, rngs: nnx.Rngs):
        self.rngs, self.streams, self.drawn, self.fresh = [rngs], [], [], 0

    def stream(self, i: int) -> nnx.RngStream:
        pool = [stream for rngs in self.rngs for _, stream in rngs.items()] + self.streams
        pool = [stream for stream in pool if stream.key.ndim == 0]
        return pool[i % len(pool)]

    def unsplit(self, i: int) -> nnx.Rngs:
        pool = [rngs for rngs in self.rngs if all(stream.key.ndim == 0 for _, stream in rngs.items())]
        return pool[i % len(pool)]

    def keep_lanes(self, stream: nnx.RngStream, distinct: bool) -> None:
        self.streams += [lane(stream, n) for n in range(stream.key.size if distinct else 1)]

    def keep(self, rngs: nnx.Rngs, before: nnx.Rngs, distinct: bool) -> None:
        for name, stream in rngs.items():
            if stream.key.ndim and stream is not before[name]:
                self.keep_lanes(stream, distinct)
        self.rngs.append(rngs)

    def do(self, action: str, i: int) -> None:
        rngs, stream, names = self.unsplit(i), self.stream(i), ("params", "dropout")
        match action:
            case "draw":
                self.drawn.append(stream())
            case "draw by name":
                self.drawn.append(rngs[names[i % 2]]())
            case "fork":
                self.streams.append(stream.fork())
            case "copy stream":
                self.streams.append(stream.copy())
            case "split":
                self.keep_lanes(stream.split(1 + i % 3), distinct=True)
            case "broadcast":
                self.keep_lanes(stream.broadcast(1 + i % 3), distinct=False)
            case "fold in":  # asking for a name again is asking for its keys again, so each is asked for once
                self.fresh += 1
                self.streams.append(stream.fold_in("name", self.fresh))
            case "fork all":
                self.rngs.append(rngs.fork())
            case "copy all":
                self.rngs.append(rngs.copy())
            case "split some":
                self.keep(rngs.split({names[i % 2]: 2}), rngs, distinct=True)
            case "split all":
                self.keep(rngs.split(2), rngs, distinct=True)
            case "fork and split some":
                self.keep(rngs.fork(split={names[i % 2]: 2, "noise": None}), rngs, distinct=True)
            case "broadcast some":
                self.keep(rngs.broadcast({names[i % 2]: 2}), rngs, distinct=False)
            case "hand over":
                self.rngs.append(nnx.Rngs(stream, dropout=rngs[names[i % 2]]))
            case "hand over all":
                self.rngs.append(nnx.Rngs(rngs))
            case "reseed":
                self.fresh += 1
                stream.key.value, stream.count.value = as_key(1000 + self.fresh), jnp.uint32(0)


ACTIONS = [
    "draw", "draw by name", "fork", "copy stream", "split", "broadcast", "fold in", "fork all", "copy all",
    "split some", "split all", "fork and split some", "broadcast some", "hand over", "hand over all", "reseed",
]  # fmt: skip
STARTS = {
    "one seed": lambda impl: nnx.Rngs(jax.random.key(0, impl=impl)),
    "two seeds": lambda impl: nnx.Rngs(params=jax.random.key(0, impl=impl), dropout=jax.random.key(1, impl=impl)),
    "equal seeds": lambda impl: nnx.Rngs(jax.random.key(0, impl=impl), params=0, dropout=0, noise=0),
}


@settings(max_examples=300)
@given(
    start=st.sampled_from(sorted(STARTS)),
    impl=st.sampled_from(IMPLEMENTATIONS),
    program=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), min_size=1, max_size=25),
)
def test_no_program_draws_one_key_twice(start, impl, program):
    """Whatever is drawn, forked, copied, split, broadcast, named, handed over or reseeded: each key comes once."""
    world = World(STARTS[start](impl))
    for action, i in program:
        world.do(action, i)
    for i in range(len(world.streams) + 3 * len(world.rngs)):  # every stream is drawn from in the end
        world.do("draw", i)
    assert len(set(map(bits, world.drawn))) == len(world.drawn)


def test_streams_of_equal_seeds_are_told_apart():
    """The first stream keeps the keys of the seed; the others are separate, the same for every way to name the seed."""
    key = jax.random.key(0)
    expected = None
    for params, dropout in ((0, 0), (key, key), (key, jax.random.key(0)), (0, key), (jax.random.PRNGKey(0), 0)):
        rngs = nnx.Rngs(params=params, dropout=dropout)
        assert same(rngs.params(), nnx.Rngs(0)())
        keys = bits(rngs.dropout())
        expected = expected or keys
        assert keys == expected != bits(nnx.Rngs(0)())


def test_equal_seeds_are_told_apart_while_tracing():
    """Inside jit, all seeds that are known, and what is given twice, with the same keys as outside."""
    expected = bits(nnx.Rngs(params=0, dropout=0).dropout())
    key, raw = jax.random.key(0), jax.random.PRNGKey(0)
    for params, dropout in ((0, 0), (np.int64(0), np.int64(0)), (key, 0), (raw, raw.copy()), (jnp.uint32(0), key)):
        draw = lambda _: nnx.Rngs(params=params, dropout=dropout).dropout()  # noqa: B023
        assert bits(jax.jit(draw)(0)) == expected
        assert bits(jax.vmap(draw)(jnp.zeros(1))[0]) == expected
    for seed in (0, key, raw):
        draw = lambda seed: nnx.Rngs(params=seed, dropout=seed).dropout()
        assert bits(jax.jit(draw)(seed)) == expected
        assert bits(jax.vmap(draw)(jnp.stack([seed]))[0]) == expected


@pytest.mark.parametrize("transform", [jax.jit, nnx.jit, jax.vmap, nnx.vmap])
def test_keys_from_outside_of_a_trace_make_streams(transform):
    """A function that closes over keys makes the same streams in a trace; equal keys are told apart there."""
    key, other = jax.random.key(0), jax.random.key(1)

    def draws(_):
        rngs = [nnx.Rngs(params=key, dropout=other), nnx.Rngs(params=key, dropout=1), nnx.Rngs(params=key, dropout=key)]
        return [stream() for r in rngs for stream in (r.params, r.dropout)]

    keys = draws(0)
    assert all(map(same, keys, [k.reshape(()) for k in transform(draws)(jnp.zeros(1))]))
    assert not same(keys[4], keys[5])


def test_a_stream_handed_over_under_another_name_shares_root_and_count():
    """`Rngs(stream)` draws on where the stream is, and the stream draws on from there."""
    stream = nnx.RngStream(0, tag="params")
    first = stream()
    rngs = nnx.Rngs(stream)
    assert (rngs.default.tag, rngs.default.count is stream.count) == ("default", True)
    assert len({bits(k) for k in (first, rngs(), stream(), rngs.dropout())}) == 4
    assert nnx.Rngs(params=stream).params is stream


@pytest.mark.parametrize(
    "ask", [lambda rngs: rngs.dropout, lambda rngs: rngs["dropout"], lambda rngs: nnx.Dropout(0.5, rngs=rngs)]
)
def test_a_missing_stream_is_one_error_however_it_is_asked_for(ask):
    """An AttributeError for ``hasattr``, a KeyError for ``in``-like code, and a message without quotes around it."""
    with pytest.raises(nnx.errors.MissingStreamError, match=r"^No RngStream named 'dropout'") as caught:
        ask(nnx.Rngs(params=0))
    assert isinstance(caught.value, AttributeError)
    assert isinstance(caught.value, KeyError)


def test_hasattr_of_a_missing_stream():
    assert not hasattr(nnx.Rngs(params=0), "dropout")


def test_small_seeds_are_told_apart_without_the_bits_of_their_keys():
    """The bits would have to be fetched from the device, for each stream."""
    one, three = (lambda: nnx.Rngs(params=0)), (lambda: nnx.Rngs(params=0, dropout=1, noise=2))
    one(), three()
    assert count_calls(three) < 3.2 * count_calls(one)
    rngs = nnx.Rngs(params=7, dropout=(1 << 32) + 7, noise=jax.random.key(7), other=7)
    assert len({bits(rngs[name]()) for name in rngs}) == 4


def test_splitting_compiles_nothing_that_jax_has_compiled():
    """A program of its own for each number of lanes would take a tenth of a second: more than it saves in a loop."""
    stream = nnx.RngStream(0, tag="params")
    nnx.RngStream(jax.random.split(stream(), 13), tag="params")
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        stream.split(13)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled
