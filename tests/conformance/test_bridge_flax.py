"""The bridge: the same scripts under flax.nnx and nnxlib give the same paths, collections, metadata and numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")

import flax.nnx
from flax import linen as nn

from tests.bridge.linen_models import Block

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # flax warns of its own deprecated names

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def plain(x):
    """Arrays and boxes in terms of built-in types, with the type and shape of each."""
    if isinstance(x, nn.Partitioned | flax.nnx.bridge.NNXMeta | nnxlib.bridge.NNXMeta):
        metadata = x.metadata if hasattr(x, "metadata") else {"out_sharding": x.names}
        settings = {"eager_sharding", "hijax", "ref"}  # which some versions of flax keep there
        kept = {name: entry for name, entry in metadata.items() if entry is not None and name not in settings}
        return type(x).__name__, plain(x.unbox()), kept
    if isinstance(x, dict):
        return {key: plain(item) for key, item in x.items()}
    if isinstance(x, list | tuple) and not isinstance(x, jax.P):
        return [plain(item) for item in x]
    if isinstance(x, jax.Array):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return str(x.dtype), np.asarray(x).tolist()
    return x


def contents(nnx, model):
    """Path, type and value of each Variable."""
    return {
        "/".join(map(str, path)): (type(v).__name__, plain(v.get_raw_value()))
        for path, v in nnx.to_flat_state(nnx.state(model))
    }


def same(script):
    assert script(nnxlib) == script(flax.nnx)


# --- Linen to NNX -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_rngs",
    [
        lambda nnx: nnx.Rngs(0),
        lambda nnx: nnx.Rngs(params=0, dropout=1),
        lambda nnx: nnx.Rngs(0, params=1),
        lambda nnx: jax.random.key(3),
    ],
    ids=["default", "params and dropout", "default and params", "key"],
)
def test_to_nnx_draws_the_same_keys(make_rngs):
    """At initialisation, at each call, and from the streams of a call."""

    def script(nnx):
        model = nnx.bridge.ToNNX(Block(), rngs=make_rngs(nnx)).lazy_init(X)
        made = contents(nnx, model)
        drawn = model.keys(), model(method="keys"), model(method="keys", rngs=nnx.Rngs(params=5, dropout=6))
        return made, plain(drawn), contents(nnx, model)

    same(script)


@pytest.mark.parametrize("mutable", [True, ["batch_stats"], "batch_stats", nn.DenyList("params")], ids=repr)
def test_to_nnx_changes_the_same_variables(mutable):
    """Two calls, with each form of `mutable`."""

    def script(nnx):
        model = nnx.bridge.ToNNX(Block(), rngs=nnx.Rngs(0, dropout=1)).lazy_init(X)
        return plain([model(X, mutable=mutable) for _ in range(2)]), contents(nnx, model)

    same(script)


def test_to_nnx_in_a_model_that_is_vmapped():
    """The example of flax's guide: a Linen module made and called under vmap, within a Module."""

    def script(nnx):
        class Model(nnx.Module):
            def __init__(self, rngs):
                self.dense = nnx.bridge.ToNNX(nn.Dense(5, use_bias=False), rngs=rngs)

            def __call__(self, x):
                @nnx.split_rngs(splits=4)
                @nnx.vmap(in_axes=(0, 0), axis_size=4)
                def call(dense, x):
                    return dense(x)

                return call(self.dense, x)

        model = nnx.bridge.lazy_init(Model(nnx.Rngs(0)), X)
        return contents(nnx, model), plain(model(X))

    same(script)


def test_to_nnx_in_training():
    """Jitted steps of an Optimizer, with statistics that are updated."""
    optax = pytest.importorskip("optax")

    def script(nnx):
        model = nnx.bridge.ToNNX(Block(), rngs=nnx.Rngs(0, dropout=1)).lazy_init(X)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            loss, grads = nnx.value_and_grad(lambda model: (model(X, mutable=["batch_stats"]) ** 2).sum())(model)
            optimizer.update(model, grads)
            return loss

        losses = [step(model, optimizer) for _ in range(2)]
        return plain(losses), contents(nnx, model)

    same(script)


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
def test_to_nnx_metadata(box):
    """Names of axes, as metadata and as PartitionSpecs; what goes in comes back."""

    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", box(nn.initializers.lecun_normal(), ("in", "out")), (3, 4))

    def script(nnx):
        with nnx.use_eager_sharding(False):  # flax wants a mesh for names
            model = nnx.bridge.ToNNX(Named(), rngs=nnx.Rngs(0)).lazy_init(X)
            y = model(X, mutable=True)
        metadata = model.w.get_metadata()
        names = {name: metadata[name] for name in ("out_sharding", "mesh", "sharding_rules") if name in metadata}
        back = type(nnx.bridge.variables.to_linen_var(model.w))
        return plain(y), names, metadata["linen_meta_type"], back, nnx.get_partition_spec(model.w).get_raw_value()

    same(script)


# --- NNX to Linen -----------------------------------------------------------------------------------------------------


def block(nnx):
    class Block(nnx.Module):
        def __init__(self, size, *, rngs):
            self.layers = nnx.List([nnx.Linear(size, size, rngs=rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(size, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.lora = nnx.LoRA(size, 2, size, rngs=rngs)
            self.noise = nnx.Param(rngs.params.normal((size,)), note="noise")

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            self.sow(nnx.Intermediate, "hidden", x)
            return self.dropout(self.norm(x + self.lora(x) + self.noise[...]))

        def encode(self, x):
            return self.layers[0](x)

    return Block


def run(nnx, model, mutable=False, **options):
    """What init and apply give, both plain."""
    y, variables = model.init_with_output(KEYS, X)
    return plain((y, variables, model.apply(variables, X, rngs=KEYS, mutable=mutable, **options)))


@pytest.mark.parametrize(
    ("mutable", "options"),
    [
        (False, {}),
        (True, {}),
        (["batch_stats", "intermediates"], {}),
        (False, {"nnx_method": "encode"}),
        (False, {"nnx_method": lambda block, x: block.encode(x)}),
    ],
    ids=["none", "all", "two", "method", "function"],
)
def test_to_linen(mutable, options):
    """Collections, paths, boxes and numbers at init and after apply."""
    same(lambda nnx: run(nnx, nnx.bridge.to_linen(block(nnx), 3), mutable, **options))


def nested(nnx):
    class Model(nn.Module):
        def setup(self):
            self.parts = [nnx.bridge.to_linen(block(nnx), 3), nnx.bridge.ToLinen(nnx.Linear, (3, 3)), nn.Dense(2)]

        @nn.compact
        def __call__(self, x):
            for part in self.parts:
                x = part(x)
            x = nnx.bridge.to_linen(nnx.Linear, 2, 3, use_bias=False)(x)
            return nnx.bridge.to_linen(nnx.Linear, 3, 2, name="last")(x)

    return Model()


def vmapped(nnx):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            lifted = nn.vmap(nnx.bridge.ToLinen, variable_axes={"params": 0}, split_rngs={"params": True})
            return lifted(nnx.Linear, args=(3, 5))(x)

    return Model()


def scanned(nnx):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.remat(nnx.bridge.ToLinen)(block(nnx), args=(3,), name="block")(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, "batch_stats": 0, "LoRAParam": 0}
            lifted = nn.scan(Body, variable_axes=axes, split_rngs={"params": True, "dropout": True}, length=2)
            return lifted()(x, None)[0]

    return Model()


def jitted(nnx):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.jit(nnx.bridge.ToLinen)(nnx.Linear, args=(3, 5), name="linear")(x)

    return Model()


@pytest.mark.parametrize("model", [nested, vmapped, scanned, jitted], ids=lambda model: model.__name__)
def test_to_linen_within_linen(model):
    """Names, keys and numbers in compact modules, in setup, and under Linen's transforms."""
    same(lambda nnx: run(nnx, model(nnx), mutable=["batch_stats"]))


def test_there_and_back():
    """A Linen model with a Module in it, as a Module."""

    def script(nnx):
        model = nnx.bridge.ToNNX(nested(nnx), rngs=nnx.Rngs(0, dropout=1)).lazy_init(X)
        return plain(model(X, mutable=["batch_stats"])), contents(nnx, model)

    same(script)


# --- Modules in the manner of Linen -----------------------------------------------------------------------------------


def test_compact_modules():
    """Names, keys and numbers of compact and setup Modules, with parts of both kinds."""

    def script(nnx):
        bridge = nnx.bridge

        class Dense(bridge.Module):
            features: int

            @bridge.compact
            def __call__(self, x):
                w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
                return x @ w[...] + self.param("b", nn.initializers.zeros_init(), (self.features,))[...]

        class Inner(bridge.Module):
            def setup(self):
                self.a, self.layers = Dense(4), [Dense(4), Dense(3)]

            def __call__(self, x):
                for layer in [self.a, *self.layers]:
                    x = layer(x)
                return x

        class Model(bridge.Module):
            @bridge.compact
            def __call__(self, x):
                x = Inner()(Dense(3, name="first")(x))
                x = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 4, rngs=rngs))(x)
                x = bridge.linen_in_bridge_mdl(nn.Dense(4))(x)
                x = bridge.linen_in_bridge_mdl(nn.BatchNorm(use_running_average=False), name="norm")(x)
                return x, self.make_rng("dropout")

        out, variables = Model().init_with_output(KEYS, X)
        again, after = Model().apply(variables, X, rngs=KEYS, mutable=True)
        return plain([out, variables, again, after, Dense(4).init(0, X), Dense(4).init(nnx.Rngs(1), X)])

    same(script)


def test_priorities_of_attributes():
    """A part under two names: its variables stand under the one of the first priority, then of the first name."""

    def script(nnx, names, priorities):
        class Dense(nnx.bridge.Module):
            @nnx.bridge.compact
            def __call__(self, x):
                return x @ self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 3))[...]

        class Model(nnx.bridge.Module):
            def setup(self):
                part = Dense()
                for name in names:
                    setattr(self, name, part)
                for name, priority in priorities.items():
                    self.set_attr_priority(name, nnx.bridge.AttrPriority(priority))

            def __call__(self, x):
                return getattr(self, names[0])(x)

        out, variables = Model().init_with_output(0, X)
        return plain([out, variables, Model().apply(variables, X)])

    for priorities in ({}, {"b": 0}, {"a": 100}, {"b": 20, "a": 0}, {"b": 50}):
        here, there = (script(nnx, ["b", "a"], priorities) for nnx in (nnxlib, flax.nnx))
        assert here == there


def test_names_in_setup():
    """A part with a name has its variables there, whatever attribute it becomes; a seed serves all streams."""

    def script(nnx):
        bridge = nnx.bridge

        class Dense(bridge.Module):
            @bridge.compact
            def __call__(self, x):
                init = bridge.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
                return x @ self.param("w", init, (3, 3))[...]

        class Model(bridge.Module):
            def setup(self):
                self.layers = [Dense(name="first"), Dense()]
                self.a = self.z = Dense(name="m")
                self.linear = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 3, rngs=rngs), name="unused")

            def __call__(self, x):
                for layer in [*self.layers, self.first, self.m, self.a, self.linear]:
                    x = layer(x)
                entry = bridge.current_context()
                return x, self.make_rng("dropout"), entry.module is self, entry.in_compact

        with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
            out, variables = Model().init_with_output(0, X)
            return plain([out, variables, Model().apply(variables, X, rngs=1, mutable=True)])

    same(script)


def test_keys_of_the_running_linen_module():
    """One key from each stream, another at each time."""

    def script(nnx):
        class Model(nn.Module):
            @nn.compact
            def __call__(self):
                assert nnx.bridge.wrappers.current_linen_module() is self
                return [nnx.bridge.wrappers.linen_rngs_dict(self, add_default=default) for default in (True, False)]

        return plain([Model().init_with_output(KEYS), Model().apply({}, rngs={"dropout": KEYS["dropout"]})])

    same(script)
