"""Module and compact: parameters and parts made where they are used, in runs of init and apply."""

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx

pytest.importorskip("flax.linen", reason="flax is not installed (it is not, where it would change the version of JAX)")

from flax import linen as nn

bridge = nnx.bridge
X = jnp.arange(6.0).reshape(2, 3)


class Dense(bridge.Module):
    """One parameter, made in the call."""

    features: int = 3

    @bridge.compact
    def __call__(self, x):
        return x @ self.param("w", nnx.initializers.lecun_normal(), (x.shape[-1], self.features))


class Compact(bridge.Module):
    """Parts of each kind, named and unnamed, and a counter."""

    @bridge.compact
    def __call__(self, x):
        x = Dense(4)(Dense(4, name="first")(x))
        x = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(4, 3, rngs=rngs))(x)
        x = bridge.linen_in_bridge_mdl(nn.BatchNorm(use_running_average=False), name="norm")(x)
        self.variable("counts", "calls", jnp.zeros, ()).value += 1
        assert bridge.current_module() is self
        return x


class Setup(bridge.Module):
    """Parts in attributes and lists, one of them given, and a second method."""

    given: Dense

    def setup(self):
        self.layers = [Dense(4), bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(4, 3, rngs=rngs))]
        self.scale = self.param("scale", nnx.initializers.ones, ())

    def __call__(self, x):
        return self.encode(self.given(x)) * self.scale

    def encode(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_compact_methods_name_their_parts():
    """By class and number, or as they say; the description stays one."""
    model = Compact()
    variables = model.init(0, X)
    assert jax.tree.map(jnp.shape, variables["params"]) == {
        "first": {"w": (3, 4)},
        "Dense_0": {"w": (4, 4)},
        "Linear_0": {"bias": (3,), "kernel": (4, 3)},
        "norm": {"bias": (3,), "scale": (3,)},
    }
    assert not jax.tree.leaves(nnx.state(model))


def test_apply_uses_what_it_is_given_and_returns_what_is_mutable():
    """Numbers come from the variables; those that change come back, and go in again."""
    model = Compact()
    y, variables = model.init_with_output(0, X)
    doubled = {**variables, "params": jax.tree.map(lambda x: 2 * x, variables["params"])}
    z, updates = jax.jit(lambda v: model.apply(v, X, mutable=["counts", "batch_stats"]))(doubled)
    assert (jnp.abs(y - z) > 0.1).any()
    assert updates.keys() == {"counts", "batch_stats"}
    assert updates["counts"]["calls"] == 2
    assert model.apply({**variables, **updates}, X, mutable=True)[1]["counts"]["calls"] == 3


def test_setup_and_methods():
    """Parts of `setup` have the names of their attributes, in lists too; any method can be run."""
    model = Setup(Dense(3))
    y, variables = model.init_with_output({"params": jax.random.key(0)}, X)
    assert variables["params"].keys() == {"given", "layers", "scale"}
    assert (model.apply(variables, X) == y).all()
    assert (model.apply(variables, X, method="encode") == model.apply(variables, X, method=Setup.encode)).all()


def test_a_part_in_a_field_is_set_up_once_it_is_run():
    """A `setup` makes parameters, so that of a given part waits for the run, whatever attributes are set before."""
    part = Setup(Dense(3))

    class Outer(bridge.Module):
        inner: Setup

        @bridge.compact
        def __call__(self, x):
            return self.inner(x)

    model = Outer(part)
    model.inner = part
    y, variables = model.init_with_output(0, X)
    assert variables["params"]["inner"].keys() == {"given", "layers", "scale"}
    assert (model.apply(variables, X) == y).all()
    assert not hasattr(part, "layers")


def test_keys_and_what_a_run_knows():
    """make_rng draws from the streams of the run; is_initializing and variables tell of it."""
    seen = []

    class Model(bridge.Module):
        @bridge.compact
        def __call__(self):
            self.param("w", nnx.initializers.ones, ())
            seen.append((self.is_initializing(), self.variables["params"]["w"]))
            return self.make_rng("noise")

    keys = {"params": jax.random.key(0), "noise": jax.random.key(0)}
    key, variables = Model().init_with_output(keys)
    assert key == nnx.Rngs(noise=jax.random.key(0)).noise()
    assert Model().apply(variables, rngs=nnx.Rngs(noise=1)) == nnx.Rngs(1)()
    assert seen == [(True, 1), (False, 1)]
    assert bridge.current_context() is None
    assert not Model().is_initializing()


def test_constructors_of_the_users_own():
    """A class with an __init__, and one that inherits it, are no dataclasses, and are named all the same."""

    class Own(bridge.Module):
        def __init__(self, n):
            self.n = n

        @bridge.compact
        def __call__(self, x):
            return Dense(self.n)(x)

    class Child(Own):
        pass

    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return Child(2, name="a")(Child(4)(x))

    assert Model().init(0, X)["params"].keys() == {"a", "Child_0"}


class Names(bridge.Module):
    """Parts with a name in `setup`, under other attributes, too."""

    def setup(self):
        self.layers = [Dense(3, name=f"layer_{i}") for i in range(2)]
        self.first = Dense(3, name="zero")
        self.linear = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 3, rngs=rngs), name="unused")

    def __call__(self, x):
        assert self.first is self.zero
        for layer in (*self.layers, self.zero, self.linear):
            x = layer(x)
        return x


def test_a_name_in_setup_comes_before_that_of_the_attribute():
    """The variables stand there, and are found there."""
    y, variables = Names().init_with_output(0, X)
    assert variables["params"].keys() == {"layer_0", "layer_1", "zero", "linear"}
    assert jnp.array_equal(Names().apply(variables, X), y)
    assert not jnp.array_equal(Names().apply(jax.tree.map(lambda x: 2 * x, variables), X), y)


def test_a_name_may_be_a_field():
    """It names the part, and the part knows it; a part without a parent stays by itself."""

    class Named(bridge.Module):
        name: str

    class Model(bridge.Module):
        @bridge.compact
        def __call__(self):
            named = Named(name="a")
            assert (self.a is named, named.name) == (True, "a")
            alone = Dense(parent=None)
            assert (alone.scope, named.scope) == (None, self.scope)
            with pytest.raises(ValueError, match="parent is None"):
                Dense(parent=self)
            self.later = alone
            return alone(X)

    assert Model().init(0)["params"].keys() == {"later"}
    assert Named("b").name == "b"


def test_a_seed_is_for_all_names():
    """One stream serves whatever is drawn, as of Rngs(seed)."""

    class Draws(bridge.Module):
        @bridge.compact
        def __call__(self):
            return self.make_rng("params"), self.make_rng("dropout"), self.make_rng()

    rngs = nnx.Rngs(3)
    expected = rngs.params(), rngs.dropout(), rngs()
    for seed in 3, jax.random.key(3):
        assert Draws().apply({}, rngs=seed) == expected
        assert Draws().init_with_output(seed)[0] == expected


def test_partitioning_is_boxed_as_in_linen():
    """The names of axes stand in Linen's own box, and come back from it."""
    init = bridge.with_partitioning(nnx.initializers.ones, ("in", "out"))

    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            w = self.param("w", init, (3, 2))
            assert w.sharding_names == ("in", "out")
            return x @ w

    variables = Model().init(0, X)
    assert isinstance(variables["params"]["w"], nn.Partitioned)
    assert nn.get_partition_spec(variables)["params"]["w"] == jax.sharding.PartitionSpec("in", "out")
    assert jnp.array_equal(Model().apply(variables, X), X @ jnp.ones((3, 2)))


def test_a_plain_method_that_is_run_may_make_parameters():
    """And is the current Module; parts of others are made in `setup` or a compact method."""

    class Plain(bridge.Module):
        def __call__(self):
            assert bridge.current_module() is self
            assert not bridge.current_context().in_compact
            return self.param("w", nnx.initializers.ones, ())

    class Outer(bridge.Module):
        def setup(self):
            self.part = Plain()

        def __call__(self):
            assert bridge.current_module() is self
            return self.part.param("v", nnx.initializers.ones, ())

        def lost(self):
            return bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(2, 2, rngs=rngs))

    assert Plain().init(0) == {"params": {"w": 1.0}}
    assert Outer().init(0) == {"params": {"part": {"v": 1.0}}}
    with pytest.raises(ValueError, match="nnx_in_bridge_mdl is called in `setup`"):
        Outer().init(0, method="lost")


def test_what_is_refused():
    """Calls outside a run, missing parameters, a parameter under two names, parts outside a Module."""
    with pytest.raises(ValueError, match=r"A Dense can make 'w' only in its `setup`"):
        Dense()(X)
    with pytest.raises(ValueError, match="A Dense can draw a key only"):
        Dense().make_rng()
    with pytest.raises(nnx.errors.StateMismatchError, match="lack the parameter 'w' of a Dense"):
        Dense().apply({}, X)
    with pytest.raises(ValueError, match="linen_in_bridge_mdl is called in `setup`"):
        bridge.linen_in_bridge_mdl(nn.Dense(3))

    class Twice(bridge.Module):
        def setup(self):
            self.a = self.param("b", nnx.initializers.ones, ())

        def __call__(self):
            return self.a

    with pytest.raises(ValueError, match=r"'b' is assigned to self\.a"):
        Twice().init(0)


def test_parts_made_by_a_constructor_need_their_parameters():
    """What the constructor draws is for `init`; `apply` does not use it where one is missing or does not fit."""

    class Compact(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 3, rngs=rngs), name="part")(x)

    class Tied(bridge.Module):
        def setup(self):
            self.part = self.again = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 3, rngs=rngs))
            self.set_attr_priority("part", bridge.AttrPriority.HIGH)

        def __call__(self, x):
            return self.again(x)

    for model in Compact(), Tied():
        params = model.init(0, X)["params"]["part"]
        assert jnp.allclose(model.apply({"params": {"part": params}}, X), X @ params["kernel"])
        for given in {}, {"params": {"part": {"kernel": params["kernel"]}}}:
            with pytest.raises(nnx.errors.StateMismatchError, match=r"part\.bias: missing, expected float32\[3\]"):
                model.apply(given, X)
        with pytest.raises(nnx.errors.StateMismatchError, match=r"part\.bias: expected shape \(3,\), got \(1,\)"):
            model.apply({"params": {"part": {**params, "bias": jnp.ones(1)}}}, X)


class Shared(bridge.Module):
    """One part under two names."""

    priorities: dict

    def setup(self):
        self.last = Dense(3)
        for name, priority in self.priorities.items():
            self.set_attr_priority(name, priority)
        self.first = self.last

    def __call__(self, x):
        return self.first(x)


@pytest.mark.parametrize(
    ("priorities", "name"),
    [
        ({}, "first"),
        ({"last": bridge.AttrPriority.HIGH}, "last"),
        ({"last": bridge.AttrPriority.DEFAULT}, "first"),
        ({"first": bridge.AttrPriority.LOW}, "last"),
        ({"last": 3, "first": 2}, "first"),
    ],
    ids=str,
)
def test_a_priority_chooses_among_the_names_of_a_part(priorities, name):
    """The variables stand under one of the names, and are found there again, at any depth."""

    class Outer(bridge.Module):
        def setup(self):
            self.parts = [Shared(priorities)]

        def __call__(self, x):
            return self.parts[0](x)

    for model, path in ((Shared(priorities), (name,)), (Outer(), ("parts", 0, name))):
        y, variables = model.init_with_output(0, X)
        [(found, _)] = jax.tree_util.tree_leaves_with_path(variables)
        assert nnx.graphlib.jax_to_nnx_path(found) == ("params", *path, "w")
        assert jnp.array_equal(model.apply(variables, X), y)


def test_the_stack_has_what_is_running():
    """None first, so that the last entry is the current one; after an error, too."""
    context = bridge.module.MODULE_CONTEXT
    seen = []

    class Failing(bridge.Module):
        def setup(self):
            seen.append([None if entry is None else type(entry.module) for entry in context.module_stack])

        @bridge.compact
        def __call__(self, x):
            seen.append([None if entry is None else entry.in_compact for entry in context.module_stack])
            raise ArithmeticError

    assert bridge.module.has_setup(Failing())
    assert not bridge.module.has_setup(Dense())
    with pytest.raises(ArithmeticError):
        Failing().init(0, X)
    assert seen == [[None, Failing], [None, False, True]]
    assert context.module_stack == (None,)
    assert bridge.current_context() is None


def test_a_parameter_of_another_shape_than_declared_is_refused():
    """It would go unnoticed where the product of another size makes sense as well."""
    variables = Dense().init(0, X)
    wide = {"params": {"w": jnp.ones((3, 5))}}
    message = r"'w' of a Dense .* \(3, 3\), but the variables have \(3, 5\)"
    with pytest.raises(nnx.errors.StateMismatchError, match=message):
        Dense().apply(wide, X)
    assert Dense().apply(variables, X).shape == (2, 3)


@pytest.mark.parametrize("kind", [Compact, Names])
def test_a_part_that_is_called_twice_makes_its_own_parts_once(kind):
    """As in Linen: the second call has the variables of the first, and what the first has written to them."""

    class Block(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return kind(name="inner")(x)

    class Twice(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            block = Block(name="block")
            return block(block(x))

    variables = Twice().init(0, X)
    own = {collection: tree["block"]["inner"] for collection, tree in variables.items()}
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, kind().init(0, X))
    y, once = kind().apply(own, X, mutable=True)
    y, twice = kind().apply({**own, **once}, y, mutable=True)
    z, updates = Twice().apply(variables, X, mutable=True)
    assert jnp.allclose(y, z)
    found = {collection: tree["block"]["inner"] for collection, tree in updates.items()}
    assert jax.tree.all(jax.tree.map(jnp.allclose, found, twice))


def test_compact_methods_that_call_each_other_number_their_parts_together():
    """So do those of a class and its base: `init` makes all of them, and `apply` finds them."""

    class Base(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return self.decode(Dense(4)(x))

        @bridge.compact
        def decode(self, x):
            return Dense(2)(x)

    class Child(Base):
        @bridge.compact
        def __call__(self, x):
            return super().__call__(Dense(5)(x))

    y, variables = Child().init_with_output(0, X)
    assert jax.tree.map(jnp.shape, variables["params"]) == {
        "Dense_0": {"w": (3, 5)},
        "Dense_1": {"w": (5, 4)},
        "Dense_2": {"w": (4, 2)},
    }
    assert jnp.array_equal(Child().apply(variables, X), y)


def test_a_name_is_for_one_thing():
    """Two parts, a part and a parameter, parameters of two collections, parts of two methods: one would be lost."""

    class Model(bridge.Module):
        def part(self):
            return Dense(3, name="a")(X)

        def param_a(self):
            return self.param("a", nnx.initializers.ones, ())

        def variable_a(self):
            return self.variable("cache", "a", jnp.zeros, ())

        def linen_a(self):
            return bridge.linen_in_bridge_mdl(nn.Dense(3), name="a")(X)

        @bridge.compact
        def both(self, first, second):
            first(self)
            second(self)

        @bridge.compact
        def one(self, make):
            make(self)

        @bridge.compact
        def other(self, make):
            make(self)

        def apart(self, make):
            self.one(make)
            self.other(make)

        def again(self, make):
            self.one(make)
            self.one(make)

    makes = {"Dense": Model.part, "Param": Model.param_a, "Cache": Model.variable_a, "ToNNX": Model.linen_a}
    for kind, first in makes.items():
        for second in makes.values():
            if first is second and kind in ("Param", "Cache"):
                continue
            with pytest.raises(nnx.errors.PathError, match=rf"The name 'a' is in use in a Model, for a {kind}\."):
                Model().init(0, first, second, method="both")
    with pytest.raises(nnx.errors.PathError, match="is in use in a Model, for a Dense"):
        Model().init(0, Model.part, method="apart")
    assert Model().init(0, Model.part, method="again")["params"].keys() == {"a"}


@pytest.mark.parametrize("setting", [2, {"rate": 2}, Dense, None])
def test_a_setting_keeps_its_name(setting):
    """A parameter or part of the name of a field would take its place, other than in Linen; only None holds nothing."""

    class Model(bridge.Module):
        a: object

        @bridge.compact
        def __call__(self, make):
            return make(self)

    makes = [lambda self: self.param("a", nnx.initializers.ones, ()), lambda self: Dense(3, name="a")(X)]
    for make in makes:
        variables = Model(None).init(0, make)
        assert variables["params"].keys() == {"a"}
        Model(None).apply(variables, make)
        if setting is not None:
            with pytest.raises(nnx.errors.PathError, match="'a' is in use in a Model, for a"):
                Model(setting).init(0, make)
        if setting in (2, Dense):
            with pytest.raises(nnx.errors.PathError, match="'a' is in use in a Model, for a"):
                Model(setting).apply(variables, make)


def test_a_parameter_that_another_call_declares_with_another_shape_is_refused():
    """In `init`, too: it is one parameter."""

    class Twice(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            dense = Dense(5)
            return dense(dense(x))

    with pytest.raises(
        nnx.errors.StateMismatchError, match=r"'w' of a Dense .* \(5, 5\), but the variables have \(3, 5\)"
    ):
        Twice().init(0, X)
