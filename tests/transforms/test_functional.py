"""`nnx.functional`: a Module class as pure functions over a dict of variables, as Linen has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib import errors


class Head(nnx.Module):
    def __init__(self, features=3, *, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.blocks = [nnx.Linear(4, 4, rngs=rngs) for _ in range(2)]
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, features, rngs=rngs)
        self.scale = jnp.arange(1.0, 1.0 + features)

    def __call__(self, x, *, train=False):
        x = self.norm(x, use_running_average=not train)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        self.sow(nnx.Intermediate, "hidden", x)
        return self.out(self.dropout(x, deterministic=not train)) * self.scale

    def encode(self, x):
        return self.blocks[0](x)


X = jax.random.normal(jax.random.key(7), (5, 4))
KEY = jax.random.key(1)


@pytest.fixture
def model():
    return nnx.functional(Head, features=3)


@pytest.fixture
def variables(model):
    return model.init(0)


def without(tree, *path):
    """A copy of nested dicts that lacks what is at a path."""
    key, *below = path
    return {k: without(v, *below) if k == key else v for k, v in tree.items() if k != key or below}


def with_value(tree, value, *path):
    key, *below = path
    return {**tree, key: with_value(tree.get(key, {}), value, *below) if below else value}


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


# --- init, lazy_init, bind ------------------------------------------------------------------------------------------


def test_init_has_the_variables_that_the_constructor_makes(model, variables):
    """By the names of the collections and the paths of the Module, with the values of the same seed."""
    head = Head(rngs=nnx.Rngs(0))
    assert set(variables) == {"arrays", "batch_stats", "params"}
    assert_equal(variables["params"], nnx.to_pure_dict(nnx.state(head, nnx.Param)))
    assert_equal(variables["batch_stats"], nnx.to_pure_dict(nnx.state(head, nnx.BatchStat)))
    assert variables["params"]["blocks"][1]["kernel"].shape == (4, 4)
    assert variables["arrays"]["scale"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("rngs", [0, jax.random.key(0), jax.random.PRNGKey(0), nnx.Rngs(0), {"default": 0}], ids=repr)
def test_init_takes_seeds_keys_and_rngs(model, variables, rngs):
    if isinstance(rngs, nnx.Rngs):
        rngs = nnx.Rngs(0)
    assert_equal(model.init(rngs), variables)


def test_a_stream_that_is_not_there_falls_back_to_params():
    class Noisy(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(rngs.params())
            self.noise = nnx.Param(rngs.noise())

    made = nnx.functional(Noisy).init({"params": 0})["params"]
    assert made["w"] == jax.random.fold_in(jax.random.key(0), 0)
    assert made["noise"] == jax.random.fold_in(jax.random.key(0), 1)


def test_init_with_inputs_adds_what_the_call_makes_and_keeps_the_rest(model, variables):
    """A first call may make Variables; statistics stay those of the constructor, Intermediates are left out."""

    class Scaled(nnx.Module):
        def __init__(self):
            self.calls = nnx.BatchStat(jnp.zeros(()))
            self.scale = None

        def __call__(self, x):
            self.calls.value += 1
            if self.scale is None:
                self.scale = nnx.Cache(jnp.abs(x).max())
            return x / self.scale

    assert_equal(model.init(0, X, train=True), variables)
    scaled = nnx.functional(Scaled)
    made = scaled.init(None, X)
    assert made["cache"]["scale"] == jnp.abs(X).max()
    assert made["batch_stats"]["calls"] == 0
    assert_equal(scaled.apply(made, 2 * X, mutable="batch_stats")[0], 2 * X / made["cache"]["scale"])


def test_lazy_init_computes_what_init_computes_without_the_call(model, variables):
    huge = jax.ShapeDtypeStruct((10**12, 4), jnp.float32)
    assert_equal(model.lazy_init(0, huge), variables)
    assert_equal(model.lazy_init(0, X), variables)
    a, b = nnx.Rngs(0), nnx.Rngs(0)
    assert_equal(model.lazy_init(a, huge), model.init(b))
    assert a() == b()


def test_lazy_init_refuses_what_depends_on_the_input():
    class Scaled(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.scale = None

        def __call__(self, x):
            self.scale = nnx.Param(jnp.abs(x).max())
            return self.linear(x) / self.scale

    with pytest.raises(errors.LazyInitError, match=r"\n  params: scale\nCall init, with arrays"):
        nnx.functional(Scaled).lazy_init(0, jax.ShapeDtypeStruct((5, 4), jnp.float32))
    assert nnx.functional(Scaled).lazy_init(0, X)["params"]["scale"] == jnp.abs(X).max()


def test_bind_and_unbind(model, variables):
    """A Module like any other, whose changes are in the dict that it gives back and nowhere else."""
    head = model.bind(variables)
    assert isinstance(head, Head)
    assert_equal(head(X), Head(rngs=nnx.Rngs(0))(X))
    head.out.bias[...] = jnp.ones(3)
    assert (model.unbind(head)["params"]["out"]["bias"] == 1).all()
    assert (variables["params"]["out"]["bias"] == 0).all()


def test_modules_among_the_arguments_stay_as_they_are():
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    model = nnx.functional(nnx.Sequential, norm)
    variables = model.init(0, X)
    _, updates = model.apply(variables, X, mutable=True)
    assert (norm.mean.value == 0).all()
    assert (updates["batch_stats"]["layers"][0]["mean"] != 0).all()


def test_a_function_that_makes_a_module():
    model = nnx.functional(lambda width, rngs: nnx.Linear(4, width, rngs=rngs), 2)
    assert model.apply(model.init(0), X).shape == (5, 2)
    assert nnx.functional(functools.partial(Head, 2)).init(0)["params"]["out"]["bias"].shape == (2,)


# --- apply ----------------------------------------------------------------------------------------------------------


def test_apply_is_the_call_of_the_module(model, variables):
    assert_equal(model.apply(variables, X), Head(rngs=nnx.Rngs(0))(X))
    assert_equal(model.apply(variables, X, method="encode"), model.apply(variables, X, method=Head.encode))


@pytest.mark.parametrize(
    ("mutable", "collections"),
    [
        ("batch_stats", ["batch_stats"]),
        (["batch_stats", "intermediates"], ["batch_stats", "intermediates"]),
        (nnx.BatchStat, ["batch_stats"]),
        ((nnx.BatchStat, "params"), ["batch_stats", "params"]),
        (nnx.Not(nnx.Param), ["arrays", "batch_stats", "intermediates"]),
        (nnx.Not("params"), ["arrays", "batch_stats", "intermediates"]),
        (nnx.Not(["params", "arrays"]), ["batch_stats", "intermediates"]),
        (nnx.OfType(nnx.BatchStat) | "params", ["batch_stats", "params"]),
        (nnx.All("batch_stats", ...), ["batch_stats"]),
        ({"batch_stats", "params"}, ["batch_stats", "params"]),
        (True, ["arrays", "batch_stats", "intermediates", "params"]),
    ],
    ids=range(11),
)
def test_apply_returns_the_mutable_collections(model, variables, mutable, collections):
    """The statistics that a Module has after the call; a collection whole, also what is as before."""
    head = Head(rngs=nnx.Rngs(0))
    head(X, train=True)
    y, updates = model.apply(variables, X, train=True, rngs=KEY, mutable=mutable)
    assert y.shape == (5, 3)
    assert sorted(updates) == collections
    assert_equal(updates["batch_stats"], nnx.to_pure_dict(nnx.state(head, nnx.BatchStat)))
    if "params" in updates:
        assert_equal(updates["params"], variables["params"])
    if "intermediates" in updates:
        assert updates["intermediates"]["hidden"][0].shape == (5, 4)


def test_nothing_mutable_but_said_so(model, variables):
    """As in Linen, `mutable=[]` gives a pair, `mutable=False` the output alone."""
    y, updates = model.apply(variables, X, mutable=[])
    assert updates == {}
    assert y.shape == (5, 3)


def test_apply_is_pure_under_every_transform(model, variables):
    def loss(params, rest, x, key):
        y, updates = model.apply(
            {**rest, "params": params}, x, train=True, rngs={"dropout": key}, mutable="batch_stats"
        )
        return (y**2).mean(), updates

    rest = without(variables, "params")
    step = jax.value_and_grad(loss, has_aux=True)
    eager, jitted = step(variables["params"], rest, X, KEY), jax.jit(step)(variables["params"], rest, X, KEY)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), eager, jitted)
    stacked = jax.vmap(model.init)(jax.random.split(KEY, 3))
    assert jax.vmap(model.apply, in_axes=(0, None))(stacked, X).shape == (3, 5, 3)
    assert jax.eval_shape(model.init, KEY)["params"]["out"]["kernel"].shape == (4, 3)


def test_variables_that_the_constructor_does_not_make_are_attached():
    """Such as the cache that another call has made."""
    model = nnx.functional(nnx.MultiHeadAttention, 2, 4, decode=True)
    variables = model.init(0, (1, 3, 4), method=nnx.MultiHeadAttention.init_cache)
    for n in range(3):
        _, updates = model.apply(variables, jnp.ones((1, 1, 4)), mutable="cache")
        variables = {**variables, **updates}
        assert variables["cache"]["cache_index"] == n + 1


def test_keys_of_checkpoints_may_be_strings(model, variables):
    blocks = {str(n): block for n, block in variables["params"]["blocks"].items()}
    assert_equal(model.apply(with_value(variables, blocks, "params", "blocks"), X), model.apply(variables, X))


def test_variables_may_be_in_variables(model, variables):
    head = Head(rngs=nnx.Rngs(0))
    given = {**variables, "params": nnx.state(head, nnx.Param)}
    assert_equal(model.apply(given, X), model.apply(variables, X))


# --- random keys ----------------------------------------------------------------------------------------------------


class Noise(nnx.Module):
    def __init__(self, names, *, rngs):
        for name in names:
            setattr(self, name, nnx.Dropout(0.5, rngs=rngs))

    def __call__(self, x):
        return {name: getattr(self, name)(x) for name in vars(self) if name != "_nnx"}


def draws(names, **options):
    model = nnx.functional(Noise, names)
    method = lambda m, x: {name: getattr(m, name)(x) for name in names}
    return model.apply(model.init(0), jnp.ones(64), method=method, **options)


def test_a_key_belongs_to_a_path():
    """Not to how many layers come before, and another for each layer; the same key gives the same numbers."""
    few, more = draws(["b"], rngs={"dropout": KEY}), draws(["a", "b"], rngs={"dropout": KEY})
    assert_equal(few["b"], more["b"])
    assert (more["a"] != more["b"]).any()
    assert_equal(more, draws(["a", "b"], rngs={"dropout": KEY, "other": 0}))
    assert (few["b"] != draws(["b"], rngs={"dropout": jax.random.key(2)})["b"]).any()


def test_an_rngs_goes_on():
    """The streams of an Rngs are drawn from, so that each call has other keys."""
    rngs = nnx.Rngs(dropout=0)
    first, second = draws(["a"], rngs=rngs), draws(["a"], rngs=rngs)
    assert (first["a"] != second["a"]).any()
    assert rngs.dropout.count.value == 2


@pytest.mark.parametrize("rngs", [{"dropout": 3}, {"default": 3}, {"params": 3}, 3, nnx.Rngs(3)], ids=repr)
def test_streams_that_stand_in(rngs):
    assert set(draws(["a"], rngs=rngs)["a"].tolist()) == {0.0, 2.0}


def test_streams_that_are_split_into_lanes():
    make = lambda rngs: nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))(rngs.split(3))
    model = nnx.functional(make)
    call = lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(m, x)
    y = model.apply(model.init(0), jnp.ones(64), rngs={"dropout": KEY}, method=call)
    assert (y[0] != y[1]).any()
    assert (y[1] != y[2]).any()


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(error, match, model, variables, *args, **kwargs):
    """`apply` raises this."""
    with pytest.raises(error, match=match):
        model.apply(variables, *(args or (X,)), **kwargs)


@pytest.mark.parametrize("given", [None, [1], jnp.ones(2), 3], ids=lambda x: type(x).__name__)
def test_not_a_variable_dict(model, given):
    refused(errors.InvalidVariablesError, r"a dict of collections, \{'params'.*got ", model, given)


def test_a_state_is_no_variable_dict(model):
    state = nnx.state(Head(rngs=nnx.Rngs(0)))
    refused(errors.InvalidVariablesError, r"got State.*model.unbind\(module\)", model, state)


def test_a_collection_in_place_of_the_variables(model, variables):
    refused(errors.InvalidVariablesError, r"Pass \{'params': \{'blocks': \.\.\.\}\}", model, variables["params"])
    refused(errors.InvalidVariablesError, "'params' is a dict of variables by name, got int", model, {"params": 1})


def test_a_collection_within_itself(model, variables):
    refused(errors.NestedCollectionError, "'params' holds 'params' once more", model, {"params": variables})


def test_two_variables_at_one_path(model, variables):
    """Neither is silently left out: in two collections, and under the int and the string of a checkpoint."""
    kernel = {"out": {"kernel": X}}
    match = "(?s)out.kernel is in 'batch_stats' and in 'params'.*rename one"
    swapped = {"batch_stats": {**variables["batch_stats"], **kernel}, "params": variables["params"]}
    refused(errors.PathError, match, model, swapped)
    new = {"cache": {"memory": X}, "intermediates": {"memory": X}}
    refused(errors.PathError, "memory is in 'cache' and in 'intermediates'", model, {**variables, **new})
    blocks = variables["params"]["blocks"]
    doubled = {**variables["params"], "blocks": {**blocks, "0": blocks[0]}}
    refused(errors.PathError, r"blocks\[0\].* is in 'params' and in 'params'", model, {**variables, "params": doubled})


def test_a_collection_of_no_known_name(model, variables):
    refused(
        errors.VariableNameError, "'batch_stat'; known names: .*'batch_stats'", model, {**variables, "batch_stat": {}}
    )
    for mutable in ["batch_stat"], nnx.Not("batch_stat"):
        refused(errors.VariableNameError, "'batch_stat'; known names", model, variables, mutable=mutable)


def test_a_missing_collection(model, variables):
    match = (
        r"given are 'params', 'arrays':\n  batch_stats: norm.mean float32\[4\]\n  batch_stats: norm.var float32\[4\]"
    )
    refused(errors.MissingCollectionError, match, model, without(variables, "batch_stats"))


def test_a_missing_variable(model, variables):
    given = without(without(variables, "params", "out", "bias"), "params", "blocks", 1, "kernel")
    match = r"missing:\n  params: blocks\[1\].kernel float32\[4, 4\]\n  params: out.bias float32\[3\]\nPass all"
    refused(errors.MissingVariableError, match, model, given)


def test_a_variable_of_another_shape(model):
    given = nnx.functional(Head, features=2).init(0)
    match = r"params: out.kernel expected float32\[4, 3\], got float32\[4, 2\]\n(.|\n)*\nThese are variables of"
    refused(errors.VariableShapeError, match, model, given)


def test_a_variable_in_another_collection(model, variables):
    given = with_value(without(variables, "params", "out", "bias"), jnp.ones(3), "batch_stats", "out", "bias")
    refused(errors.StateMismatchError, "params: out.bias is in batch_stats", model, given)


def test_a_variable_without_a_place(model, variables):
    for path in (("out", "offset", "x"), ("blocks", 2), ("nowhere",)):
        given = with_value(variables, jnp.ones(2), "params", *path)
        if path == ("nowhere",):
            assert model.bind(given).nowhere.shape == (2,)
        else:
            text = errors.format_path(path).replace("[", r"\[")
            refused(errors.StateMismatchError, rf"no place .*\n  params: {text} float32\[2\]", model, given)


@pytest.mark.parametrize("rngs", [3.5, "a", {"dropout": "a"}, {"dropout": jnp.ones(2)}], ids=repr)
def test_an_invalid_rng(model, variables, rngs):
    refused(errors.InvalidRngError, "Invalid rng value", model, variables, rngs=rngs)
    with pytest.raises(errors.InvalidRngError, match="Invalid rng value"):
        model.init(rngs)


@pytest.mark.parametrize("rngs", [None, {}, {"noise": 0}], ids=repr)
def test_a_missing_rng_stream(model, variables, rngs):
    match = r"random stream dropout.rngs, but got no key for it: pass rngs=\{'dropout': key\}"
    refused(errors.MissingStreamError, match, model, variables, X, train=True, rngs=rngs, mutable=True)


def test_writing_to_an_immutable_collection(model, variables):
    match = (
        r"\(mutable=\['params'\]\):\n  batch_stats: norm.mean float32\[4\] was changed\n"
        r"  batch_stats: norm.var float32\[4\] was changed\nPass mutable=\['batch_stats'\]"
    )
    options = {"train": True, "rngs": KEY}
    refused(errors.ImmutableCollectionError, match, model, variables, X, **options, mutable=["params"])
    refused(errors.ImmutableCollectionError, r"mutable=False", model, variables, X, **options)


def test_making_a_variable_that_is_not_mutable(model, variables):
    def method(head, x):
        head.memory = nnx.Cache(x)

    refused(errors.ImmutableCollectionError, "cache: memory float32.* was made", model, variables, X, method=method)


def test_the_module_of_a_call_that_has_ended(model, variables):
    """It raises, read or written; not so what the call returned, be it the Module itself."""
    kept = []
    model.apply(variables, X, method=lambda head, x: kept.append(head))
    with pytest.raises(errors.ClosedModuleError, match="a call of `apply`, which has ended"):
        kept[0](X)
    with pytest.raises(errors.ClosedModuleError, match=r"use `module = model.bind.variables.`"):
        kept[0].out.bias.value = jnp.ones(3)
    head = model.apply(variables, X, method=lambda head, x: head)
    assert_equal(head(X), model.apply(variables, X))
    kernel = model.apply(variables, X, method=lambda head, x: head.out.kernel)
    assert_equal(kernel.value, variables["params"]["out"]["kernel"])


@pytest.mark.parametrize("made", [nnx.Linear(1, 1, rngs=nnx.Rngs(0)), 3, None], ids=lambda x: type(x).__name__)
def test_what_is_no_class(made):
    with pytest.raises(errors.ArgumentError, match=r"takes a class and its arguments, .* got "):
        nnx.functional(made)


def test_rngs_are_not_given_to_functional():
    with pytest.raises(errors.ArgumentError, match="give them to init"):
        nnx.functional(Head, rngs=nnx.Rngs(0))


def test_a_call_that_is_refused_changes_nothing(model, variables):
    before = jax.tree.map(np.asarray, variables)
    refused(errors.ImmutableCollectionError, "mean", model, variables, X, train=True, rngs=KEY)
    refused(errors.LayerInputError, r"\[..., 4\]", model, variables, X[:, :2], method="encode")
    assert_equal(jax.tree.map(np.asarray, variables), before)
    assert_equal(model.apply(variables, X), Head(rngs=nnx.Rngs(0))(X))


def test_a_class_without_a_constructor_is_made_without_streams():
    class Identity(nnx.Module):
        def __call__(self, x):
            return x

    model = nnx.functional(Identity)
    assert model.init(jax.random.key(0)) == {}
    assert model.apply({}, 3) == 3


def test_a_variable_that_a_call_puts_into_a_dict_may_be_passed_to_the_next_call():
    class Counting(nnx.Module):
        def __init__(self):
            self.parts = nnx.Dict(w=nnx.Param(jnp.ones(2)))

        def __call__(self, x):
            if "seen" not in self.parts:
                self.parts["seen"] = nnx.Cache(jnp.zeros(2))
            self.parts["seen"].value += x
            return x

    model = nnx.functional(Counting)
    _, updates = model.apply(model.init(), 1.0, mutable="cache")
    _, updates = model.apply({**model.init(), **updates}, 1.0, mutable="cache")
    assert updates["cache"]["parts"]["seen"].tolist() == [2.0, 2.0]
