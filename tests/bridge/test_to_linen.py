"""ToLinen: Modules as Linen modules, at the top, nested, under Linen's transforms, and what is refused."""

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx

pytest.importorskip("flax.linen", reason="flax is not installed (it is not, where it would change the version of JAX)")

from flax import linen as nn

bridge = nnx.bridge
X = jnp.arange(6.0).reshape(2, 3)
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class Block(nnx.Module):
    """A list of layers, statistics, dropout, and a second method."""

    def __init__(self, size, *, rngs):
        self.layers = [nnx.Linear(size, size, rngs=rngs)]
        self.norm = nnx.BatchNorm(size, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        y = self.layers[0](x)
        self.sow(nnx.Intermediate, "hidden", y)
        return self.dropout(self.norm(y))

    def encode(self, x):
        return self.layers[0](x)


def test_init_hands_out_what_the_constructor_made():
    """Collections by type, paths as here, statistics as they begin, and no random streams."""
    variables = bridge.to_linen(Block, 3).init(KEYS, X)
    assert jax.tree.map(jnp.shape, variables) == {
        "params": {"layers": {0: {"bias": (3,), "kernel": (3, 3)}}, "norm": {"bias": (3,), "scale": (3,)}},
        "batch_stats": {"norm": {"mean": (3,), "var": (3,)}},
    }
    assert (variables["batch_stats"]["norm"]["mean"] == 0).all()


def test_numbers_and_names_in_one_dict():
    """JAX can sort the keys of the variables, which are numbers and strings."""

    class Experts(nnx.Module):
        def __init__(self, rngs):
            self.parts = {"shared": nnx.Linear(3, 3, rngs=rngs), 0: nnx.Linear(3, 3, rngs=rngs)}

        def __call__(self, x):
            return self.parts[0](self.parts["shared"](x))

    model = bridge.to_linen(Experts)
    variables = jax.jit(model.init)(KEYS, X)
    assert {*variables["params"]["parts"]} == {0, "shared"}
    zeros = jax.tree.map(jnp.zeros_like, variables)
    assert (model.apply(zeros, X) == 0).all()
    assert (model.apply(variables, X) != 0).any()


def test_apply_computes_as_the_module_does():
    """With the same weights, and hands out what is mutable, as Linen's modules do."""
    model = bridge.to_linen(Block, 3)
    variables = model.init(KEYS, X)
    y, updates = model.apply(variables, X, rngs=KEYS, mutable=["batch_stats", "intermediates"])
    assert updates.keys() == {"batch_stats", "intermediates"}
    assert (updates["batch_stats"]["norm"]["mean"] != 0).any()
    assert (updates["intermediates"]["hidden"][0] == model.apply(variables, X, nnx_method="encode")).all()
    assert (y == model.apply(variables, X, rngs=KEYS)).all()
    assert (y != model.apply(variables, X, rngs={"dropout": jax.random.key(2)})).any()


def test_methods():
    """By `nnx_method`, by Linen's `method`, and on a bound module."""
    model = bridge.to_linen(Block, 3)
    variables = model.init(KEYS, X)
    y = model.apply(variables, X, nnx_method="encode")
    assert (y == model.apply(variables, X, nnx_method=Block.encode)).all()
    assert (y == model.apply(variables, X, method="encode")).all()
    assert (y == model.bind(variables).encode(X)).all()
    with pytest.raises(AttributeError, match="decode"):
        model.decode


def test_nested_in_linen_and_called_twice():
    """Names and paths are Linen's; a module that is called twice has one set of parameters, those of its first call."""

    class Model(nn.Module):
        def setup(self):
            self.inner = bridge.to_linen(nnx.Linear, 3, 3)
            self.out = nn.Dense(2)

        def __call__(self, x):
            return self.out(self.inner(self.inner(x)))

    class Once(Model):
        def __call__(self, x):
            return self.out(self.inner(x))

    y, variables = Model().init_with_output(jax.random.key(0), X)
    once = Once().init(jax.random.key(0), X)
    jax.tree.map(lambda a, b: None if (a == b).all() else pytest.fail("other parameters"), variables, once)
    assert (y == Model().apply(variables, X)).all()


def test_linen_transforms_and_jit():
    """nn.scan over nn.remat stacks parameters and statistics; jax.jit gives the same."""

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.remat(bridge.ToLinen)(Block, args=(3,), name="block")(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes, splits = {"params": 0, "batch_stats": 0}, {"params": True, "dropout": True}
            return nn.scan(Body, variable_axes=axes, split_rngs=splits, length=2)(name="body")(x, None)[0]

    variables = jax.jit(Model().init)(KEYS, X)
    assert variables["params"]["body"]["block"]["layers"][0]["kernel"].shape == (2, 3, 3)

    def loss(params):
        y, updates = Model().apply({**variables, "params": params}, X, rngs=KEYS, mutable=["batch_stats"])
        return (y**2).sum(), updates

    (_, updates), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])
    assert updates["batch_stats"]["body"]["block"]["norm"]["mean"].shape == (2, 3)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, variables["params"])


class Named(nnx.Module):
    """A weight with names for its axes, and one with a note."""

    def __init__(self, *, rngs):
        init = nnx.with_partitioning(nnx.initializers.ones, ("in", "out"))
        self.w = nnx.Param(init(rngs.params(), (3, 3)))
        self.bias = nnx.Param(jnp.zeros(3), note="small")

    def __call__(self, x):
        return x @ self.w + self.bias


def test_metadata_travels_in_boxes():
    """Names follow the axes that Linen's transforms add; boxed, unboxed and foreign boxes all fit back in."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": None, "axis_size": 2}
            return nn.vmap(bridge.ToLinen, **options, metadata_params={nn.PARTITION_NAME: "models"})(Named, name="m")(x)

    variables = Model().init(jax.random.key(0), X)
    assert nn.get_partition_spec(variables)["params"]["m"]["w"] == jax.P("models", "in", "out")
    assert variables["params"]["m"]["bias"].metadata == {"note": "small"}
    assert (jax.jit(Model().apply)(variables, X) == Model().apply(nn.unbox(variables), X)).all()

    model, notes = bridge.to_linen(Named), []
    params = model.init(KEYS, X)["params"]
    params["bias"] = params["bias"].replace(metadata={"note": "large"})
    model.apply({"params": params}, X, nnx_method=lambda module, x: notes.append(module.bias.note))
    assert notes == ["large"]  # as given, not as made

    boxed = bridge.to_linen(Named, metadata_fn=lambda v: nn.Partitioned(v.get_value(), names=(None,) * v.ndim))
    variables, updates = boxed.init(jax.random.key(0), X), boxed.apply(boxed.init(KEYS, X), X, mutable=["params"])[1]
    assert all(isinstance(tree["params"]["w"], nn.Partitioned) for tree in (variables, updates))
    bare = bridge.to_linen(Named, metadata_fn=None).init(jax.random.key(0), X)
    assert isinstance(bare["params"]["w"], jax.Array)


def test_a_stream_that_is_missing_comes_from_params_at_init():
    """As in Linen: a bare key is enough to initialise; a call draws from the streams it is given."""
    model = bridge.to_linen(Block, 3)
    variables = model.init(jax.random.key(0), X)
    assert (variables["params"]["layers"][0]["kernel"] == model.init(KEYS, X)["params"]["layers"][0]["kernel"]).all()
    with pytest.warns(UserWarning, match="no key for: the same keys at each call"):
        y = model.apply(variables, X)
    assert y.shape == X.shape
    model.apply(variables, X, nnx_method="encode")  # draws nothing
    with pytest.raises(AttributeError, match="No RngStream named 'params'"):
        bridge.to_linen(nnx.Linear, 3, 3).init({"dropout": jax.random.key(0)}, X)
    drawn = bridge.to_linen(lambda rngs: nnx.Dict(drawn=nnx.Param(rngs.noise())), metadata_fn=None)
    keep = lambda module: module.drawn.value
    a, b, c = (
        drawn.init_with_output({"params": jax.random.key(0), **given}, nnx_method=keep)[0]
        for given in ({}, {"default": jax.random.key(1)}, {"default": jax.random.key(1), "dropout": jax.random.key(2)})
    )
    assert a != b == c  # `default`, if it is given, answers for a name that is not


class Late(nnx.Module):
    """State made in the first call, an array that is an attribute, and a part that is itself of Linen."""

    def __init__(self, *, rngs):
        self.dense = bridge.ToNNX(nn.Dense(3), rngs=rngs)
        self.cache = None
        self.scale = jnp.ones(())

    def __call__(self, x):
        if self.cache is None:
            self.cache = nnx.Cache(jnp.zeros(()))
        self.cache.value += 1
        self.scale = self.scale + 1
        return self.dense(x) * self.scale


def test_late_state_arrays_and_parts_of_linen():
    """What a call makes is handed out and taken back; arrays have a collection; a ToNNX within is initialised."""
    model = bridge.to_linen(Late)
    variables = model.init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, variables["params"]) == {"dense": {"bias": (3,), "kernel": (3, 3)}}
    mutable = ["cache", "arrays"]
    _, updates = model.apply(variables, X, mutable=mutable)
    _, updates = model.apply({**variables, **updates}, X, mutable=mutable)
    assert updates == {"cache": {"cache": 2.0}, "arrays": {"scale": 3.0}}


def test_skip_rng_and_classes():
    """A constructor without rngs; a class made of a class, with some of its arguments."""

    class Add(nnx.Module):
        def __init__(self):
            self.constant = nnx.Variable(jnp.array(1.0))

        def __call__(self, x):
            return x + self.constant

    y, variables = bridge.ToLinen(Add, skip_rng=True).init_with_output(jax.random.key(0), X)
    assert (y == X + 1).all()
    assert variables == {"Variable": {"constant": 1.0}}

    Dense = bridge.to_linen_class(nnx.Linear, use_bias=False)
    assert issubclass(Dense, bridge.ToLinen)
    for model in (Dense(3, out_features=2), Dense(args=(3, 2), name="inner"), Dense(3, 2).clone()):
        assert jax.tree.map(jnp.shape, model.init(jax.random.key(0), X)) == {"params": {"kernel": (3, 2)}}


def test_a_class_made_of_a_class_is_lifted_and_derived_from():
    """What Linen's transforms make of it, and subclasses, take the arguments of the Module, too."""
    Dense = bridge.to_linen_class(nnx.Linear, use_bias=False)
    kernel = Dense(3, 3).init(jax.random.key(0), X)["params"]["kernel"]

    class Scaled(Dense):
        factor: float = 1.0

        def __call__(self, x):
            return self.factor * super().__call__(x)

    for make in Scaled, nn.remat(Dense), nn.remat(Scaled):
        made = make(3, out_features=3).init(jax.random.key(0), X)
        assert (made["params"]["kernel"] == kernel).all()
    assert (Scaled(3, 3, factor=2.0).apply(made, X) == 2 * Dense(3, 3).apply(made, X)).all()

    lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    heads = nn.vmap(Dense, in_axes=None, axis_size=2, **lifted)(in_features=3, out_features=3)
    assert heads.init(jax.random.key(0), X)["params"]["kernel"].shape == (2, 3, 3)

    class Step(Dense):
        def __call__(self, x, _):
            return super().__call__(x), None

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(nn.remat(Step), length=2, **lifted)(in_features=3, out_features=3, name="layers")
            return layers(x, None)[0]

    y, stacked = Layers().init_with_output(jax.random.key(0), X)
    first, second = stacked["params"]["layers"]["kernel"]
    assert jnp.allclose(y, X @ first @ second, atol=1e-6)


def test_modules_among_the_arguments_are_not_written():
    """A Module that is an argument of the constructor keeps its weights, also under jit."""
    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    kernel = linear.kernel.value
    model = bridge.to_linen(nnx.Sequential, linear, nnx.relu, skip_rng=True)
    variables = model.init(jax.random.key(0), X)
    doubled = jax.tree.map(lambda x: 2 * x, variables)
    assert (jax.jit(model.apply)(doubled, X) == 2 * model.apply(variables, X)).all()
    assert linear.kernel.value is kernel


def test_variables_that_do_not_fit_are_listed():
    """Missing, of another shape, of another collection: each with its path; nothing is made up."""
    model = bridge.to_linen(nnx.Linear, 3, 2, name="inner")
    good = model.init(jax.random.key(0), X)
    with pytest.raises(
        nnx.errors.StateMismatchError, match=r"params: kernel: expected float32\[3, 2\], got float32\[5, 2\]"
    ):
        model.apply({"params": {**good["params"], "kernel": jnp.ones((5, 2))}}, X)
    with pytest.raises(nnx.errors.StateMismatchError, match=r"params: bias is missing, float32\[2\]"):
        model.apply({"params": {"kernel": good["params"]["kernel"]}}, X)
    with pytest.raises(nnx.errors.StateMismatchError, match="cache: bias is in the Module of the collection params"):
        model.apply({"params": {"kernel": good["params"]["kernel"]}, "cache": {"bias": jnp.ones(2)}}, X)
    restored = bridge.to_linen(Block, 3).init(KEYS, X)
    restored["params"]["layers"] = {str(key): x for key, x in restored["params"]["layers"].items()}
    bridge.to_linen(Block, 3).apply(restored, X, nnx_method="encode")  # a checkpoint has strings for ints


def test_an_instance_is_refused():
    """ToLinen makes the Module itself."""
    with pytest.raises(TypeError, match=r"to_linen\(Linear, ...\)"):
        bridge.to_linen(nnx.Linear(3, 2, rngs=nnx.Rngs(0))).init(jax.random.key(0), X)


def test_the_linen_module_that_runs_and_its_keys():
    """As a Module inside of it finds them; outside there are none."""
    found = []

    class Inner(nnx.Module):
        def __init__(self, rngs):
            self.rngs = nnx.Rngs(nnx.bridge.wrappers.linen_rngs_dict(nnx.bridge.wrappers.current_linen_module(), True))

        def __call__(self):
            found.append(nnx.bridge.wrappers.current_linen_module())
            return sorted(self.rngs)

    model = nnx.bridge.ToLinen(Inner)
    assert model.apply({}, rngs={"dropout": jax.random.key(0)}) == ["default", "dropout"]
    assert isinstance(found[0], nnx.bridge.ToLinen)
    assert nnx.bridge.wrappers.current_linen_module() is None
    with pytest.raises(ValueError, match="draws from the streams of a run, but this ToLinen is not running"):
        nnx.bridge.wrappers.linen_rngs_dict(model)


def test_to_linen_has_a_hash():
    """As a Linen module has, whatever sequence and mapping its arguments are given in."""

    class Sized(nnx.Module):
        def __init__(self, config, *, rngs):
            assert type(config) is dict  # as it was given
            assert type(config["layer"]) is dict
            self.linear = nnx.Linear(2, config["layer"]["size"], rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    apply = jax.jit(lambda model, variables, x: model.apply(variables, x), static_argnums=0)
    models = [bridge.ToLinen(Sized, [], {"config": {"layer": {"size": size}}}) for size in (3, 3, 4)]
    models.append(bridge.to_linen(Sized, config={"layer": {"size": 3}}))
    for model in models:
        variables = model.init(jax.random.key(0), jnp.ones((1, 2)))
        assert apply(model, variables, jnp.ones((5, 2))).shape == (5, model.kwargs["config"]["layer"]["size"])
    assert apply._cache_size() == 2
