import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core.reseeding import StreamBackup, fork_rngs, reseed, restore_rngs, split_rngs, with_rngs


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)
        self.rngs = rngs
        self.alias = nnx.Rngs(rngs.params)  # the same root and count under another name


def model():
    return Model(nnx.Rngs(0, params=1, dropout=2))


def bits(key):
    return np.asarray(jax.random.key_data(key)).tobytes()


def facts(m):
    streams = (m.first.rngs, m.second.rngs, m.rngs.params, m.rngs.dropout, m.rngs.default, m.alias.default)
    return [(bits(s.key.value), s.key.shape, np.asarray(s.count.value).tolist()) for s in streams]


@pytest.mark.parametrize("act", [lambda m: split_rngs(m, splits=2), lambda m: fork_rngs(m)])
def test_streams_are_put_back_further_along(act):
    """After the block each stream has its root again, and one more key is used up."""
    m = model()
    before = facts(m)
    with act(m) as backups:
        assert len(backups) == 5  # a stream that is reached under two names is changed once
        assert all(a != b for a, b in zip(facts(m), before))
    for (root, shape, count), (old_root, old_shape, old_count) in zip(facts(m), before):
        assert (root, shape, count) == (old_root, old_shape, old_count + 1)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_no_key_comes_twice(impl):
    """Lanes, forks, reseeded streams and what is drawn afterwards: all keys differ."""
    m = Model(nnx.Rngs(jax.random.key(0, impl=impl), params=jax.random.key(1, impl=impl)))
    streams = [m.first.rngs, m.second.rngs, m.rngs.params, m.rngs.default]
    keys = [stream() for stream in streams]
    for act in (lambda: split_rngs(m, splits=2), lambda: fork_rngs(m), lambda: split_rngs(m, splits=2)):
        with act():
            for stream in streams:
                roots = stream.key.value.reshape(-1)
                keys += [jax.random.fold_in(root, n) for root in roots for n in range(2)]
        keys += [stream() for stream in streams]
    reseed(m, default=jax.random.key(7, impl=impl))
    keys += [stream() for stream in (m.first.rngs, m.second.rngs, m.rngs.default) for _ in range(2)]
    assert len({bits(k) for k in keys}) == len(keys)


def test_filters_choose_the_streams():
    """`only` of split_rngs, and the mapping of fork_rngs, of which the first match counts."""
    m = model()
    with split_rngs(m, splits=(2, 3), only=["params", nnx.PathContains("second")]):
        shapes = [shape for _, shape, _ in facts(m)]
        assert shapes == [(), (2, 3), (2, 3), (), (), (2, 3)]
    default = facts(m)[4]
    with fork_rngs(m, split={"params": None, "dropout": 4}):
        assert [shape for _, shape, _ in facts(m)] == [(4,), (4,), (), (4,), (), ()]
        assert facts(m)[4] == default
        assert int(m.rngs.params.count.value) == 0
    with fork_rngs(m, split=2):
        assert {shape for _, shape, _ in facts(m)} == {(2,)}


def test_as_decorators_they_serve_the_arguments_of_a_call():
    """Wherever in the arguments the streams are; they are put back also when the function raises."""

    @split_rngs(splits=2, only="params")
    @fork_rngs(split={"dropout": None})
    def function(first, *, second):
        """Look at the streams."""
        assert first["rngs"].params.key.shape == second.rngs.params.key.shape == (2,)
        assert int(second.first.rngs.count.value) == 0
        raise KeyError("looked")

    a, b = nnx.Rngs(params=0), model()
    b.first(jnp.ones(3))
    assert (function.__name__, function.__doc__) == ("function", "Look at the streams.")
    with pytest.raises(KeyError, match="looked"):
        function({"rngs": a}, second=b)
    assert (a.params.key.shape, int(a.params.count.value)) == ((), 1)
    assert (b.first.rngs.key.shape, int(b.first.rngs.count.value)) == ((), 2)


@pytest.mark.parametrize(
    "lift", [lambda f: split_rngs(f, splits=3), lambda f: fork_rngs(f, split=3), lambda f: with_rngs(f, split=3)]
)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_function_as_the_first_argument_is_decorated(lift, jitted):
    """As with transforms: `nnx.split_rngs(f, splits=3)` is the decorated function, not a split of nothing."""

    def make(rngs):
        return nnx.vmap(lambda rngs: nnx.Linear(2, 2, rngs=rngs))(rngs)

    rngs = nnx.Rngs(0)
    made = lift(nnx.jit(make) if jitted else make)(rngs)
    assert len(np.unique(np.asarray(made.kernel.value), axis=0)) == 3
    assert rngs.default.key.shape == ()


def test_what_is_called_as_a_function_but_holds_streams_is_split():
    """A Module with a `__call__`, whether or not it is a pytree; and an array, which holds none, is no function."""

    class Layer(nnx.Module, pytree=False):
        def __init__(self):
            self.rngs = nnx.Rngs(0)

        def __call__(self):
            return self.rngs()

    for layer in (Layer(), nnx.Dropout(0.5, rngs=nnx.Rngs(0))):
        with split_rngs(layer, splits=2) as backups:
            assert [stream.key.shape for stream, *_ in backups] == [(2,)]
    assert split_rngs(jnp.ones(2), splits=2) == []


def test_squeeze_leaves_the_axis_out():
    """One lane without its axis, for code that maps over an axis of any size."""
    rngs = nnx.Rngs(0)
    backups = split_rngs(rngs, splits=1, squeeze=True)
    assert rngs.default.key.shape == ()
    assert bits(rngs.default.key.value) == bits(nnx.Rngs(0).split(1).default.key.value[0])
    restore_rngs(backups)
    assert int(rngs.default.count.value) == 1
    assert split_rngs(lambda rngs: rngs.default.key.shape, splits=1, squeeze=True)(rngs) == ()
    with pytest.raises(ValueError, match="only supported for splits=1"):
        split_rngs(rngs, splits=2, squeeze=True)


def test_a_stream_that_is_split_already_stops_all():
    """The error names its path, and nothing is changed."""
    m = model()
    m.second.rngs = m.second.rngs.split(3)
    before = facts(m)
    for act in (lambda: split_rngs(m, splits=2), lambda: fork_rngs(m)):
        with pytest.raises(ValueError, match=r"second.rngs is split into lanes of shape \(3,\).*needs no other split"):
            act()
    assert facts(m) == before


@pytest.mark.parametrize("act", [lambda node: split_rngs(node, splits=2), fork_rngs])
def test_a_stream_without_a_value_stops_all(act):
    """Those before it keep their roots."""
    m = model()
    before = facts(m)
    with pytest.raises(nnx.errors.UsageError, match="has no key, only the shape of one"):
        act([m, nnx.eval_shape(model)])
    assert [x[:2] for x in facts(m)] == [x[:2] for x in before]


@pytest.mark.parametrize("wrong", ["x", -1, (2, 0.5)])
def test_what_is_no_number_of_lanes_is_refused_before_any_key_is_used(wrong):
    """Also if it is meant for the last of the streams."""
    m = model()
    before, shapes = facts(m), {"params": 2, "dropout": wrong}
    for act in (
        lambda: fork_rngs(m, split=shapes),
        lambda: with_rngs(m, split=shapes),
        lambda: with_rngs(m, split={"params": 2}, broadcast={"dropout": wrong}),
        lambda: m.rngs.split(shapes),
        lambda: m.rngs.fork(split=shapes),
    ):
        with pytest.raises(ValueError, match="The lanes of a stream are given by their number or shape"):
            act()
    assert facts(m) == before


def test_reseeding_makes_a_model_repeatable():
    """Streams of a tag start anew from the seed, each from a key of its own; others are left alone."""
    m, other = model(), Model(nnx.Rngs(9, params=8, dropout=7))
    m.first(jnp.ones(3))
    for each in (m, other):
        reseed(each, dropout=42)
    assert facts(m)[:2] == facts(other)[:2]
    assert facts(m)[3] == facts(other)[3]
    assert len({root for root, _, _ in facts(m)[:2]}) == 2
    assert facts(m)[2] != facts(other)[2]
    assert [count for _, _, count in facts(m)[:2]] == [0, 0]
    assert m.first.rngs.count.dtype == jnp.uint32


def test_reseeding_from_a_stream():
    """Each gets the next key of it."""
    streams = nnx.List([nnx.RngStream(k, tag="dropout") for k in range(2)])
    source, same = nnx.RngStream(5, tag="other"), nnx.RngStream(5, tag="other")
    reseed(streams, dropout=source)
    assert [bits(stream.key.value) for stream in streams] == [bits(same()) for _ in range(2)]
    assert source.count == 2


def test_reseeding_keeps_the_implementation_of_each_stream():
    """A seed becomes a key of the stream's implementation; a typed key brings its own; a raw one must fit."""
    kinds = [str(jax.random.key_impl(jax.random.key(0, impl=impl))) for impl in ("rbg", "threefry2x32")]
    rngs = nnx.Rngs(dropout=jax.random.key(0, impl="rbg"), params=0)
    other = nnx.List([rngs, nnx.Rngs(dropout=0)])
    reseed(other, dropout=42, params=1)
    keys = [rngs.dropout.key.value, rngs.params.key.value, other[1].dropout.key.value]
    assert [str(jax.random.key_impl(key)) for key in keys] == [kinds[0], kinds[1], kinds[1]]
    root = nnx.RngStream(jax.random.key(42, impl="rbg"), tag="dropout").fork().key.value
    assert bits(keys[0]) == bits(root)
    reseed(rngs, dropout=jax.random.key_data(jax.random.key(7, impl="rbg")))
    assert jax.random.key_impl(rngs.dropout.key.value) == jax.random.key_impl(root)
    with pytest.raises(ValueError, match=r"shape \(2,\) is none of the stream's implementation, 'rbg'"):
        reseed(rngs, dropout=jax.random.key_data(jax.random.key(7)))
    reseed(rngs, dropout=jax.random.key(7))
    assert jax.random.key_impl(rngs.dropout.key.value) == jax.random.key_impl(keys[1])


def test_reseeding_an_abstract_model():
    """The streams of a model of shapes get keys, of the implementation that the shape has, as those of a model do."""

    def make():
        return nnx.Dict(a=nnx.Dropout(0.5, rngs=nnx.Rngs(0)), b=nnx.Rngs(dropout=jax.random.key(0, impl="rbg")))

    model, abstract = make(), nnx.eval_shape(make)
    for node in (model, abstract):
        nnx.reseed(node, default=5, dropout=6)
    assert jax.random.key_impl(abstract.b.dropout.key.get_value()) == "rbg"
    for of_model, of_abstract in ((model.a.rngs, abstract.a.rngs), (model.b.dropout, abstract.b.dropout)):
        assert of_model() == of_abstract()


def test_reseeding_split_streams_needs_a_policy():
    """`'match_shape'` splits the new key into as many lanes; a function decides for every stream."""
    rngs = nnx.Rngs(params=0).split(3)
    with pytest.raises(ValueError, match=r"at params: it is split into lanes of shape \(3,\).*match_shape"):
        reseed(rngs, params=1)
    source = nnx.RngStream(1, tag="source")
    with pytest.raises(ValueError, match="split into lanes"):
        reseed(rngs, params=source)
    assert source.count == 0, "nothing was drawn from it"
    assert bits(rngs.params.key.value) == bits(nnx.Rngs(params=0).split(3).params.key.value)
    reseed(rngs, params=1, policy="match_shape")
    expected = jax.random.split(jax.random.fold_in(jax.random.key(1), 0), 3)
    assert bits(rngs.params.key.value) == bits(expected)
    seen = []

    def policy(path, key, shape):
        seen.append((path, shape))
        return jnp.broadcast_to(key, shape)

    reseed(rngs, params=1, policy=policy)
    assert seen == [(("params",), (3,))]
    assert rngs.params.count.shape == (3,)


def test_what_a_policy_returns_is_taken_as_a_key():
    """As in the constructor: a seed and a raw key become keys; anything else is refused, and no stream is reseeded."""
    rngs = nnx.Rngs(0, params=1)
    for given in 7, jax.random.PRNGKey(7):
        reseed(rngs, default=3, policy=lambda path, key, shape, given=given: given)
        assert rngs.default.key.value == jax.random.key(7)
        assert rngs.default.count.shape == ()
    given = iter([jax.random.key(8), None])
    before = nnx.state(rngs)
    with pytest.raises(ValueError, match="Invalid rng value: None"):
        reseed(rngs, default=5, params=5, policy=lambda path, key, shape: next(given))
    assert not nnx.diff(before, nnx.state(rngs))


def test_reseeding_nothing_is_a_warning():
    """A name that no stream has as its tag is reported with the tags that there are; the others are reseeded.

    As in flax.nnx, for code that reseeds any model that it is given by one name.
    """
    m, expected = Model(nnx.Rngs(0, params=1)), Model(nnx.Rngs(0, params=1))
    with pytest.warns(UserWarning, match=r"tag 'dropout'.*'default' \(4\).*looked up") as record:
        reseed(m, params=3, dropout=5)
    assert record[0].filename == __file__
    reseed(expected, params=3)
    assert not nnx.diff(nnx.state(m), nnx.state(expected))
    with pytest.warns(UserWarning, match=r"tag 'rng'.*the tags are: none\."):
        reseed(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), policy="match_shape", rng=jax.random.key(1))


def test_a_seed_that_is_no_key_changes_nothing():
    m = Model(nnx.Rngs(0, params=1))
    before = nnx.state(m)
    with pytest.raises(ValueError, match="Invalid rng value"):
        reseed(m, params=1.5)
    assert not nnx.diff(nnx.state(m), before)


def test_with_rngs_gives_a_copy_with_other_streams_around_the_same_variables():
    """Split comes before broadcast, and that before fork; what nothing takes is shared; the original counts on."""
    m = model()
    copy = with_rngs(
        m,
        split={"params": 2},
        broadcast={nnx.PathContains("first"): 3},
        fork=True,
        only=["params", "dropout", nnx.PathContains("first")],
    )
    assert copy is not m
    assert copy.rngs.default.key is m.rngs.default.key
    assert [shape for _, shape, _ in facts(copy)] == [(3,), (), (2,), (), (), (2,)]
    assert copy.alias.default.key is copy.rngs.params.key  # a stream under two names stays one
    assert [count for _, _, count in facts(m)] == [1, 1, 1, 3, 0, 1]
    broadcast = copy.first.rngs.key.value
    assert len({bits(key) for key in broadcast}) == 1
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert with_rngs([linear], split=2)[0].kernel is linear.kernel


def test_with_rngs_leaves_what_only_does_not_take():
    m = model()
    copy = with_rngs(m, split=2, only="dropout")
    assert [shape for _, shape, _ in facts(copy)] == [(2,), (2,), (), (2,), (), ()]
    assert copy.rngs.params.count is m.rngs.params.count


def test_with_rngs_as_a_decorator_gives_copies_to_the_function():
    @with_rngs(split=4)
    @nnx.vmap
    def make(rngs):
        """Make a layer."""
        return nnx.Linear(2, 3, rngs=rngs)

    rngs = nnx.Rngs(0)
    stacked = make(rngs)
    assert (make.__name__, make.__doc__) == ("make", "Make a layer.")
    assert stacked.kernel.shape == (4, 2, 3)
    assert rngs.default.key.shape == ()
    assert len(np.unique(np.asarray(stacked.kernel.value), axis=0)) == 4
    alike = with_rngs(broadcast=4)(lambda rngs: rngs.default.key.value)(rngs)
    assert alike.shape == (4,)
    assert len({bits(key) for key in alike}) == 1


@pytest.mark.parametrize("impl", ["threefry2x32", "unsafe_rbg"])
def test_no_key_of_with_rngs_comes_twice(impl):
    rngs = nnx.Rngs(jax.random.key(0, impl=impl), params=jax.random.key(1, impl=impl))
    keys = []
    for options in ({"split": 2}, {"fork": ...}, {"broadcast": {"params": 2}, "fork": ...}, {}):
        copy = with_rngs(rngs, **options)
        for stream in (copy.params, copy.default):
            roots = [stream.key.value] if options == {} else stream.key.value.reshape(-1)
            roots = roots[:1] if "broadcast" in options else roots
            keys += [stream()] if options == {} else [jax.random.fold_in(root, n) for root in roots for n in range(2)]
        keys += [rngs.params(), rngs.default()]
    assert len({bits(key) for key in keys}) == len(keys)


def test_with_rngs_refuses_a_split_stream_before_any_key_is_used():
    m = model()
    m.second.rngs = m.second.rngs.split(3)
    before = facts(m)
    with pytest.raises(ValueError, match=r"second.rngs is split into lanes of shape \(3,\)"):
        with_rngs(m, split=2)
    assert facts(m) == before
    assert with_rngs(m, split=2, only=nnx.PathContains("first")).second.rngs.key is m.second.rngs.key


def test_two_rules_for_one_stream_are_an_error():
    """Only `...` gives way; the error names the path and both rules, and nothing has been drawn."""
    m = model()
    before = facts(m)
    with pytest.raises(
        ValueError, match=r"at params is taken by multiple rules: split \(WithTag\('params'\)\) and fork"
    ):
        with_rngs(m.rngs, split={"params": 2}, fork=["params"])
    assert facts(m) == before


def test_a_filter_may_name_the_variables_of_a_stream():
    """`nnx.RngState` takes both Variables of each stream, so it takes the stream."""
    rngs = nnx.Rngs(params=0, dropout=1)
    with nnx.split_rngs(rngs, splits=2, only=nnx.RngState):
        assert rngs.params.key.shape == rngs.dropout.key.shape == (2,)
    with nnx.split_rngs(rngs, splits=2, only=nnx.RngKey):
        assert rngs.params.key.shape == ()


def test_streams_of_another_trace_are_refused_before_any_is_changed():
    """Those of the running trace come first, and neither lose a key nor are replaced."""
    outer = nnx.Rngs(0)
    calls = {
        "split": lambda node: nnx.split_rngs(node, splits=2),
        "fork": lambda node: nnx.fork_rngs(node),
        "with": lambda node: nnx.with_rngs(node, fork=...),
        "reseed": lambda node: nnx.reseed(node, default=5),
        "restore": lambda node: nnx.restore_rngs(
            [StreamBackup(rngs.default, jax.random.key(7), jnp.uint32(7)) for rngs in node]
        ),
    }

    def refused(x):
        for name, call in calls.items():
            own = nnx.Rngs(1)
            variables = own.default.key, own.default.count
            before = [x.get_raw_value() for x in variables]
            with pytest.raises(nnx.TraceContextError):
                call([own, outer])
            assert all(x.get_raw_value() is value for x, value in zip(variables, before, strict=True)), name
        return x

    jax.jit(refused)(1.0)
