"""ToNNX: Linen modules as Modules, their variables as Variables, in every transform, and what is refused."""

import copy

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx

pytest.importorskip("flax.linen", reason="flax is not installed (it is not, where it would change the version of JAX)")

import flax.errors
from flax import linen as nn

from tests.bridge.linen_models import Block

bridge = nnx.bridge
X = jnp.arange(6.0).reshape(2, 3)


def block():
    return bridge.ToNNX(Block(), rngs=nnx.Rngs(0, dropout=1)).lazy_init(X)


class Named(nn.Module):
    """One parameter, under a name of one's choice."""

    param_name: str

    @nn.compact
    def __call__(self, x):
        return x + self.param(self.param_name, nn.initializers.ones, (3,))


def test_collections_become_types():
    """params are Params, batch_stats BatchStats, a collection without a type gets one of its name."""
    model = block()
    found = {"/".join(path): type(v).__name__ for path, v in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState)))}
    assert found == {
        "BatchNorm_0/bias": "Param",
        "BatchNorm_0/mean": "BatchStat",
        "BatchNorm_0/scale": "Param",
        "BatchNorm_0/var": "BatchStat",
        "Dense_0/bias": "Param",
        "Dense_0/kernel": "Param",
        "count": "calls",
    }
    assert nnx.variable_type_from_name("calls") is type(model.count)


def test_a_call_writes_what_is_mutable_into_the_same_variables():
    """Identity and metadata of a Variable outlive a call, and what is not mutable is not written."""
    model = block()
    mean, kernel, count = model.BatchNorm_0["mean"], model.Dense_0["kernel"], model.count
    mean.set_metadata(note="mine")
    model(X, mutable=["batch_stats"])
    assert model.BatchNorm_0["mean"] is mean
    assert mean.note == "mine"
    assert (mean.value != 0).any()
    assert count.value == 0
    model(X, mutable=True)
    assert model.Dense_0["kernel"] is kernel
    assert count.value == 1
    assert isinstance(model.hidden, nnx.Intermediate)
    assert len(model.hidden.value) == 1


def test_streams_are_forked_and_advance_at_each_call():
    """Each ToNNX has streams of its own; a call draws one key from each, or from those that it is given."""
    rngs = nnx.Rngs(dropout=0)
    a, b = (bridge.ToNNX(nn.Dropout(0.5, deterministic=False), rngs=rngs) for _ in range(2))
    x = jnp.ones(64)
    first, second = a(x), a(x)
    assert (first != second).any()
    assert (first != b(x)).any()
    assert a.rngs.dropout.count.value == 2
    assert (a(x, rngs=nnx.Rngs(dropout=3)) == b(x, rngs=nnx.Rngs(dropout=3))).all()
    assert a.rngs.dropout.count.value == 2
    nnx.reseed(a, dropout=0)
    again = a(x)
    nnx.reseed(a, dropout=0)
    assert (again == a(x)).all()


def test_methods_by_name():
    """`method=` and plain attribute access reach the other methods of the Linen class, also for lazy_init."""
    model = block()
    assert (model.double(X) == model(X, method="double")).all()
    assert (model.double(X) == model(X, method=Block.double)).all()
    assert bridge.lazy_init(model.double, X).func.__self__ is model
    with pytest.raises(AttributeError, match="ToNNX of a Block has no attribute 'triple'"):
        model.triple

    class Activated(nn.Module):
        size = 3
        function: object = nn.relu

        def __call__(self, x):
            return self.function(x)

        def __add__(self, other):
            return self

    model = bridge.ToNNX(Activated())
    assert (model(X) == X).all()
    for name in ("size", "function", "__add__"):  # a number, a field, and what Python itself asks for
        assert not hasattr(model, name)


def test_reading_under_raw_jax_works():
    """A call that neither draws nor writes is legal under any trace; one that draws names the stream."""
    model = bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0)).lazy_init(X)
    assert (jax.jit(lambda x: model(x))(X) == model(X)).all()
    assert jax.grad(lambda x: model(x).sum())(X).shape == X.shape
    noisy = bridge.ToNNX(nn.Dropout(0.5, deterministic=False), rngs=nnx.Rngs(dropout=0))
    with pytest.raises(nnx.TraceContextError, match=r"noisy\.to_nnx__rngs\.dropout\.count"):
        jax.jit(lambda x: noisy(x))(X)
    nnx.jit(lambda x: noisy(x))(X)  # what it refers to is an input of nnx.jit, and comes out
    assert noisy.rngs.dropout.count.value == 1


@pytest.mark.parametrize("name", ["module", "rngs", "lazy_init", "train"])
def test_variables_may_have_any_name(name):
    """Linen's names hide ours: a parameter called `module` is `model.module`, and the model goes on working."""
    model = bridge.lazy_init(bridge.ToNNX(Named(name), rngs=nnx.Rngs(0)), X)
    assert isinstance(getattr(model, name), nnx.Param)
    assert (model(X) == X + 1).all()


class Outer(nnx.Module):
    """Linen modules within a Module, one of them in a list."""

    def __init__(self, rngs):
        self.inner = bridge.ToNNX(nn.Dense(3), rngs=rngs)
        self.layers = [bridge.ToNNX(nn.Dense(3), rngs=rngs)]

    def __call__(self, x):
        return self.layers[0](self.inner(x))

    def encode(self, x):
        return self.inner(x)


def test_lazy_init_reaches_each_part_that_is_called():
    """In Modules and lists, and through a method of the Module; a second time makes other parameters."""
    model = Outer(nnx.Rngs(0))
    assert bridge.lazy_init(model.encode, X).__self__ is model
    assert model.inner.kernel.shape == (3, 3)
    assert not hasattr(model.layers[0], "kernel")
    kernel = model.inner.kernel
    assert bridge.lazy_init(model, X) is model
    assert model.layers[0].kernel.shape == (3, 3)
    assert (model.inner.kernel.value != kernel.value).any()


def test_every_transform_takes_it():
    """jit, grad, split and merge, clone: as for a Module, with statistics that come out."""
    model = block()
    before = model.BatchNorm_0["mean"].value
    nnx.jit(lambda model, x: model(x, mutable=["batch_stats"]))(model, X)
    assert (model.BatchNorm_0["mean"].value != before).any()
    grads = nnx.grad(lambda model, x: (model(x, mutable=["batch_stats"]) ** 2).sum())(model, X)
    assert grads.Dense_0["kernel"].shape == (3, 4)
    merged = nnx.merge(*nnx.split(model))
    assert (nnx.clone(model)(X, mutable=True) == merged(X, mutable=True)).all()


def test_vmap_makes_and_scan_runs_a_stack():
    """Parameters made under vmap are stacked, and scan goes through them."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def create(rngs):
        return bridge.ToNNX(nn.Dense(3), rngs=rngs).lazy_init(X)

    stack = create(nnx.Rngs(0))
    assert stack.kernel.shape == (3, 3, 3)
    y = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, stack)
    expected = X
    for kernel in stack.kernel.value:
        expected = expected @ kernel
    assert jnp.allclose(y, expected, atol=1e-5)


def test_the_same_structure_is_not_traced_again():
    """Two models of equal Linen modules share what is compiled; initialising and calling do not."""
    traces = []

    @nnx.jit
    def forward(model, x):
        traces.append(1)
        return model(x)

    models = [bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(seed)).lazy_init(X) for seed in range(2)]
    for model in models * 2:
        forward(model, X)
    assert len(traces) == 1

    class Jitted(nnx.Module):
        def __init__(self):
            self.noise = bridge.ToNNX(Noise(), rngs=nnx.Rngs(0))

        def __call__(self, x):
            return nnx.jit(lambda noise, x: noise(x))(self.noise, x)

    class Noise(nn.Module):
        def __call__(self, x):
            return x if self.is_initializing() else x + 1

    model = bridge.lazy_init(Jitted(), X)
    assert (model(X) == X + 1).all()


def test_a_failing_call_changes_nothing():
    """What raises in Linen, while initialising too, leaves the Variables as they were and no tracer behind."""

    class Fails(nn.Module):
        @nn.compact
        def __call__(self, x, fail):
            y = nn.BatchNorm(use_running_average=False)(x)
            if fail:
                raise RuntimeError("on purpose")
            return y

    model = bridge.ToNNX(Fails(), rngs=nnx.Rngs(0))
    with pytest.raises(RuntimeError, match="on purpose"):
        nnx.jit(lambda model, x: model.lazy_init(x, True) and None)(model, X)
    assert not jax.tree.leaves(nnx.state(model, nnx.Param))
    with pytest.raises(flax.errors.ScopeCollectionNotFound):
        model(X, False)
    model.lazy_init(X, False)
    mean = model.BatchNorm_0["mean"].value
    with pytest.raises(RuntimeError, match="on purpose"):
        nnx.jit(lambda model, x: model(x, True, mutable=["batch_stats"]))(model, X)
    assert model.BatchNorm_0["mean"].value is mean
    with pytest.raises(nnx.TraceContextError, match="BatchStat"):
        jax.jit(lambda x: model(x, False, mutable=["batch_stats"]))(X)
    assert model.BatchNorm_0["mean"].value is mean


def test_axis_names_become_metadata_and_go_back():
    """Linen's boxes are metadata here, and boxes again where Linen and its transforms look at them."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            init = nn.with_partitioning(nn.initializers.ones, ("in", "out"))
            return x @ self.param("w", init, (3, 3)), None

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
            return nn.scan(Layer, **options, metadata_params={nn.PARTITION_NAME: "layers"})(name="stack")(x, None)[0]

    model = bridge.ToNNX(Layers(), rngs=nnx.Rngs(0)).lazy_init(X)
    assert model.stack["w"].sharding_names == ("layers", "in", "out")
    assert (model(X, mutable=True) == X @ jnp.ones((3, 3)) @ jnp.ones((3, 3))).all()
    assert model.stack["w"].sharding_names == ("layers", "in", "out")
    assert nnx.get_partition_spec(nnx.state(model))["stack"]["w"].value == jax.P("layers", "in", "out")


def test_users_types_stay():
    """A kind of Param in the place of a Param is a parameter to Linen, and shared weights stay shared."""

    class Frozen(nnx.Param):
        pass

    model = bridge.ToNNX(nn.Sequential([nn.Dense(3), nn.Dense(3)]), rngs=nnx.Rngs(0)).lazy_init(X)
    model.layers_0["kernel"] = model.layers_1["kernel"] = shared = Frozen(2 * jnp.eye(3))
    assert (model(X, mutable=True) == 4 * X).all()
    assert model.layers_1["kernel"] is model.layers_0["kernel"] is shared


def test_copies_and_hooks():
    """A copy shares the Linen module and nothing else; a class's hooks see a value when it is made, and not again."""

    @nnx.register_variable_name("bridge_test_counts", overwrite=True)
    class Counted(nnx.Variable):
        def on_create_value(self, value):
            return value + 10

    class Counts(nn.Module):
        table: np.ndarray

        @nn.compact
        def __call__(self, x):
            n = self.variable("bridge_test_counts", "n", lambda: jnp.zeros(()))
            n.value += 1
            return x

    model = bridge.ToNNX(Counts(np.arange(3.0)), rngs=nnx.Rngs(0)).lazy_init(X)
    other = bridge.ToNNX(Counts(np.arange(3.0)), rngs=nnx.Rngs(0)).lazy_init(X)
    for _ in range(2):
        nnx.jit(lambda model: model(X, mutable=True))(model)
        nnx.jit(lambda model: model(X, mutable=True))(other)
    assert type(model.n) is Counted
    assert model.n.value == other.n.value == 13
    twin = copy.deepcopy(model)
    twin(X, mutable=True)
    assert (twin.n.value, model.n.value) == (14, 13)
    assert twin.module is model.module


def test_a_key_given_to_a_call_is_the_one_that_linen_gets():
    """As in flax.nnx: the parameters are those of Linen's init, and a call that draws nothing traces no operation."""
    dense = nn.Dense(3)
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        model = bridge.ToNNX(dense, rngs=nnx.Rngs(0)).lazy_init(X, rngs=key)
        assert jnp.array_equal(model.kernel[...], dense.init(key, X)["params"]["kernel"])
        assert "random" not in str(jax.make_jaxpr(lambda x, key=key, model=model: model(x, rngs=key))(X))


def test_a_wrapper_is_written_with_its_linen_module_and_is_pickled():
    model = bridge.lazy_init(bridge.ToNNX(nn.Dense(4, kernel_init=nn.initializers.ones), rngs=nnx.Rngs(0)), X)
    assert "features = 4" in repr(model)
    loaded = cloudpickle.loads(cloudpickle.dumps(model))
    assert nnx.graphdef(loaded) == nnx.graphdef(model)
    assert (loaded(X) == model(X)).all()


def test_the_streams_of_a_call_may_be_a_dict():
    model = bridge.ToNNX(nn.Dropout(0.5, deterministic=False))
    key = jax.random.key(1)
    expected = model(jnp.ones(50), rngs=nnx.Rngs(dropout=key))
    assert (model(jnp.ones(50), rngs={"dropout": key}) == expected).all()


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_call_before_lazy_init_says_so():
    """A note on Linen's error shows the call that is missing, and nothing has been made."""
    model = bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0))
    with pytest.raises(flax.errors.ScopeCollectionNotFound) as caught:
        model(X)
    notes = "\n".join(caught.value.__notes__)
    assert "module Dense lacks variables" in notes
    assert "lazy_init(model, x)" in notes


def test_one_name_in_two_collections_is_refused():
    """Both collections are named, and the model is as before."""

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.variable("batch_stats", "w", jnp.zeros, ())
            return x + self.param("w", nn.initializers.ones, ())

    model = bridge.ToNNX(Twice(), rngs=nnx.Rngs(0))
    with pytest.raises(nnx.errors.PathError, match=r"'w' in the collections '(params|batch_stats)' and"):
        model.lazy_init(X)
    assert not hasattr(model, "w")
    with pytest.raises(nnx.errors.PathError, match="a name that ToNNX needs"):
        bridge.ToNNX(Named("to_nnx__rngs"), rngs=nnx.Rngs(0)).lazy_init(X)


def test_linens_own_errors_get_a_remedy():
    """A collection that is not mutable, and a key that is missing: Linen's error with a note of ours."""
    with pytest.raises(flax.errors.ModifyScopeVariableError) as immutable:
        block()(X)
    assert "mutable=['batch_stats']" in "".join(immutable.value.__notes__)
    with pytest.raises(flax.errors.InvalidRngError) as keyless:
        bridge.ToNNX(nn.Dropout(0.5, deterministic=False))(X)
    assert "has no keys" in "".join(keyless.value.__notes__)
    with pytest.raises(flax.errors.InvalidRngError) as keyless:
        bridge.ToNNX(nn.Dense(3)).lazy_init(X)
    assert "has no keys" in "".join(keyless.value.__notes__)


def test_a_linen_module_that_is_not_wrapped_gets_a_remedy():
    """Called by a Module that holds it as it is."""

    class Model(nnx.Module):
        def __init__(self, linen):
            self.linen = linen

        def __call__(self, x):
            return self.linen(x)

    with pytest.raises(flax.errors.CallCompactUnboundModuleError) as bare:
        Model(nn.Dense(3))(X)
    assert "nnx.bridge.ToNNX(module, rngs=rngs)" in "".join(bare.value.__notes__)
    wrapped = bridge.lazy_init(Model(bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0))), X)
    assert wrapped(X).shape == (*X.shape[:-1], 3)


def test_arguments_of_the_wrong_kind():
    """A class, a Module of ours, a lambda."""
    with pytest.raises(TypeError, match="got the class Dense"):
        bridge.ToNNX(nn.Dense)
    with pytest.raises(TypeError, match="got a Linear"):
        bridge.ToNNX(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="a Module or a method of one"):
        bridge.lazy_init(lambda x: x, X)
