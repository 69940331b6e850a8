import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlib as nnx
from nnxlib.nn.dtypes import LayerInputError

normal = jax.nn.initializers.normal(1.0)


def array(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


class Tied(nnx.Module):
    """One Linear at two places, a plain head, and attention."""

    def __init__(self, rngs):
        shared = nnx.Linear(8, 8, rngs=rngs)
        self.blocks = [shared, shared]
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, use_bias=False, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.tanh(block(x))
        return self.head(self.attention(x))


# --- LoRA and LoRALinear ----------------------------------------------------------------------------------------------


def test_lora_is_a_product_of_low_rank():
    """Against float64, by itself and around a base, for any number of batch axes."""
    base = nnx.Linear(3, 4, rngs=nnx.Rngs(1))
    for batch in ((), (2,), (2, 5)):
        x = array(*batch, 3)
        layer = nnx.LoRA(3, 2, 4, b_initializer=normal, rngs=nnx.Rngs(0))
        expected = np.float64(x) @ np.float64(layer.lora_a.value) @ np.float64(layer.lora_b.value)
        np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
        layer.base_module = base
        np.testing.assert_allclose(layer(x), expected + np.float64(base(x)), rtol=1e-5, atol=1e-5)


def test_nothing_changes_at_first():
    """B starts as zero; arguments of the call reach the base."""
    x = array(2, 3)
    linear = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(linear(x), nnx.Linear(3, 4, rngs=nnx.Rngs(0))(x))
    double = nnx.LoRA(3, 2, 3, base_module=lambda x, times: x * times, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(double(x, times=2), 2 * x)


def test_wrong_inputs_and_bases_are_refused():
    """With the layer's path, its sizes and the input; a base must be callable and fit."""
    model = nnx.List([nnx.LoRA(3, 2, 4, rngs=nnx.Rngs(0))])
    with pytest.raises(LayerInputError, match=r"model\[0\] \(LoRA 3->2->4\) takes .*\[\.\.\., 3\].* float32\[2, 5\]"):
        model[0](jnp.ones((2, 5)))
    with pytest.raises(LayerInputError, match=r"LoRALinear 3->4.*float32\[2, 5\]"):
        nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))(jnp.ones((2, 5)))
    with pytest.raises(ValueError, match="must be a layer or function, but is a int"):
        nnx.LoRA(3, 2, 4, base_module=3, rngs=nnx.Rngs(0))(jnp.ones(3))
    with pytest.raises(ValueError, match="must be a layer or function, but is a class Linear"):
        nnx.LoRA(3, 2, 4, base_module=nnx.Linear, rngs=nnx.Rngs(0))(jnp.ones(3))
    with pytest.raises(ValueError, match=r"adds float32\[4\] to the output of its base, which is float32\[3\]"):
        nnx.LoRA(3, 2, 4, base_module=lambda x: x, rngs=nnx.Rngs(0))(jnp.ones(3))


def test_only_the_adaptation_is_trained():
    """One filter for gradients and optimizer; the base stays as it is, bit by bit."""
    model = Tied(nnx.Rngs(0))
    nnx.add_lora(model, 2, filter=..., rngs=nnx.Rngs(1))
    x, y = array(4, 5, 8), array(4, 5, 3)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))))
    optimizer = nnx.Optimizer(model, optax.adam(0.03), wrt=nnx.LoRAParam)
    loss = lambda model: jnp.mean((model(x) - y) ** 2)

    @nnx.jit
    def train_step(model, optimizer):
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return value

    losses = [float(train_step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    after = nnx.to_pure_dict(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))))
    jax.tree.map(np.testing.assert_array_equal, before, after)


# --- add_lora and merge_lora ------------------------------------------------------------------------------------------


def test_add_lora_keeps_outputs_identities_and_paths():
    """Shared layers are adapted once and stay shared; the paths and values of the base are those of before."""
    model = Tied(nnx.Rngs(0))
    x, layers, state = array(2, 5, 8), list(model.blocks), nnx.state(model)
    expected = model(x)
    assert nnx.add_lora(model, 2, rngs=nnx.Rngs(1)) == [("blocks", 0), ("head",)]
    np.testing.assert_array_equal(model(x), expected)
    assert model.blocks[0] is model.blocks[1] is layers[0]
    assert [type(layer) for layer in (model.blocks[0], model.head)] == [nnx.LoRALinear] * 2
    assert type(model.attention.query) is nnx.LinearGeneral
    kept = nnx.to_flat_state(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))))
    assert [path for path, _ in kept] == [path for path, _ in nnx.to_flat_state(state)]
    nnx.update(model, state, strict=False)


def stacked():
    return nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))


def test_a_stack_of_layers_is_adapted_in_vmap():
    """Each layer has a LoRA of its own, as if it were adapted before it is stacked; merging takes the stack whole."""
    keys = jax.random.split(jax.random.key(1), 3)
    stack = stacked()
    nnx.vmap(lambda layer, key: adapt(layer, nnx.Rngs(key)))(stack, keys)
    assert type(stack) is nnx.LoRALinear
    assert stack.lora.lora_a.shape == (3, 4, 2)
    forward = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    x = jnp.ones((2, 4))
    expected = x
    for base, key in zip(jax.random.split(jax.random.key(0), 3), keys, strict=True):
        layer = nnx.Linear(4, 4, rngs=nnx.Rngs(base))
        adapt(layer, nnx.Rngs(key))
        expected = layer(expected)
    np.testing.assert_allclose(forward(x, stack), expected, rtol=1e-5)
    nnx.merge_lora(stack)
    assert type(stack) is nnx.Linear
    np.testing.assert_allclose(forward(x, stack), expected, rtol=1e-5)


def adapt(layer, rngs):
    nnx.add_lora(layer, 2, b_initializer=normal, rngs=rngs)


@pytest.mark.parametrize("filter", [..., nnx.LinearGeneral, nnx.PathContains("query"), [nnx.Linear, nnx.LinearGeneral]])
def test_merge_lora_undoes_add_lora_but_for_the_change(filter):
    """After a change of A and B the merged model computes the same, from its old classes and structure."""
    model = Tied(nnx.Rngs(0))
    x, graphdef, plain = array(2, 5, 8), nnx.graphdef(model), model(array(2, 5, 8))
    paths = nnx.add_lora(model, 2, filter=filter, b_initializer=normal, rngs=nnx.Rngs(1))
    changed = model(x)
    assert not np.allclose(changed, plain, atol=1e-2)
    assert nnx.merge_lora(model) == paths
    np.testing.assert_allclose(model(x), changed, rtol=1e-5, atol=1e-5)
    assert nnx.graphdef(model) == graphdef
    assert nnx.merge_lora(model) == []


def test_general_layers_are_adapted_as_matrices():
    """The product has the shape of the kernel as a matrix, whatever axes are contracted."""
    for arguments, shape in (
        ((3, (2, 5)), (4, 3)),
        (((2, 3), 4, (0, 2)), (2, 6, 3)),
        (((2, 3), (4, 2), (-2, -1)), (2, 3)),
    ):
        n_in, n_out, *axis = arguments
        layer = nnx.LinearGeneral(n_in, n_out, **({"axis": axis[0]} if axis else {}), rngs=nnx.Rngs(0))
        nnx.add_lora(layer, 2, filter=..., b_initializer=normal, rngs=nnx.Rngs(1))
        adapted = layer(array(*shape))
        nnx.merge_lora(layer)
        np.testing.assert_allclose(adapted, layer(array(*shape)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [nnx.Linear, nnx.LinearGeneral])
def test_a_pruned_layer_is_adapted_as_it_is_now(kind):
    """The sizes are those of its kernel, not those that it was made with."""
    layer = kind(4, 6, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel.value = layer.kernel.value[:3, :5]
    plain = layer(array(2, 3))
    nnx.add_lora(layer, 2, filter=..., rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(layer(array(2, 3)), plain)
    layer.lora.lora_b.value = array(2, 5)
    adapted = layer(array(2, 3))
    nnx.merge_lora(layer)
    np.testing.assert_allclose(layer(array(2, 3)), adapted, rtol=1e-5, atol=1e-5)


def test_a_pruned_wrapper_is_merged_as_it_is_now():
    """The sizes are those of its parameters, not those that it was made with; a stack of wrappers has one more axis."""
    lora = nnx.LoRA(4, 2, 6, base_module=nnx.Linear(4, 6, rngs=nnx.Rngs(0)), b_initializer=normal, rngs=nnx.Rngs(1))
    for variable, kept in ((lora.base_module.kernel, 1), (lora.base_module.bias, 0), (lora.lora_b, 1)):
        variable.value = jnp.take(variable.value, jnp.arange(5), kept)
    model = nnx.List([lora])
    adapted = model[0](array(2, 4))
    nnx.merge_lora(model)
    np.testing.assert_allclose(model[0](array(2, 4)), adapted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", [nnx.Linear, nnx.LinearGeneral])
def test_the_call_of_the_layer_below_may_be_one_that_takes_no_sharding(monkeypatch, base):
    """Exporters replace the call of Linear by a function of one argument; a sharding is passed on if there is one."""
    layer, call = base(3, 4, rngs=nnx.Rngs(0)), base.__call__
    nnx.add_lora(layer, 2, filter=base, rngs=nnx.Rngs(1))
    x = array(2, 3)
    before = layer(x)
    monkeypatch.setattr(base, "__call__", lambda self, inputs: 2 * call(self, inputs))
    np.testing.assert_allclose(layer(x), 2 * before)
    with pytest.raises(TypeError, match="out_sharding"):
        layer(x, out_sharding=jax.sharding.PartitionSpec())


def test_dtypes_are_those_of_the_layer():
    """A model in bfloat16 stays in bfloat16; the sum of a merge is made in float32."""
    layer = nnx.Linear(8, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    nnx.add_lora(layer, 2, b_initializer=normal, rngs=nnx.Rngs(1))
    assert (layer.lora.lora_a.dtype, layer(jnp.ones(8, jnp.bfloat16)).dtype) == (jnp.bfloat16, jnp.bfloat16)
    a, b, kernel = (np.float64(v.value) for v in (layer.lora.lora_a, layer.lora.lora_b, layer.kernel))
    nnx.merge_lora(layer)
    np.testing.assert_array_equal(layer.kernel.value, jnp.asarray(kernel + a @ b, jnp.bfloat16))

    layer = nnx.Linear(8, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    nnx.add_lora(layer, 2, param_dtype=jnp.float16, lora_param_type=nnx.Param, rngs=nnx.Rngs(1))
    assert (layer.lora.lora_a.dtype, layer(jnp.ones(8)).dtype, type(layer.lora.lora_b)) == (
        jnp.float16,
        jnp.bfloat16,
        nnx.Param,
    )


def test_settings_of_the_adaptation_reach_it():
    """Of a LoRALinear, each under its own name; and the initializers of `add_lora`."""
    layer = nnx.LoRALinear(
        3,
        4,
        lora_rank=2,
        lora_param_dtype=jnp.float16,
        lora_param_type=nnx.Cache,
        a_initializer=nnx.initializers.ones,
        b_initializer=nnx.initializers.constant(2.0),
        a_metadata={"role": "a"},
        b_metadata={"role": "b"},
        rngs=nnx.Rngs(0),
    )
    plain = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    nnx.add_lora(
        plain, 2, a_initializer=nnx.initializers.ones, b_initializer=nnx.initializers.constant(2.0), rngs=nnx.Rngs(0)
    )
    for name, value in (("lora_a", 1.0), ("lora_b", 2.0)):
        param = getattr(layer.lora, name)
        assert (type(param), param.dtype, param.role) == (nnx.Cache, jnp.float16, name[-1])
        assert (param == value).all()
        assert (getattr(plain.lora, name) == value).all()
    assert layer.kernel.dtype == jnp.float32


def test_the_dtype_of_a_layer_is_that_of_its_adaptation_too():
    """So a LoRALinear that computes in bfloat16 does not turn the rest of the model to float32."""
    sizes = {"in_features": 3, "out_features": 4, "lora_rank": 2, "dtype": jnp.bfloat16}
    assert nnx.LoRALinear(**sizes, rngs=nnx.Rngs(0))(jnp.ones(3)).dtype == jnp.bfloat16
    assert nnx.LoRALinear(**sizes, lora_dtype=jnp.float32, rngs=nnx.Rngs(0))(jnp.ones(3)).dtype == jnp.float32


def test_merge_lora_replaces_wrappers():
    """A LoRA around a Linear gives its place to it, in attributes and items, in a list in both; one alone stays."""

    def wrap(seed):
        base = nnx.Linear(3, 3, rngs=nnx.Rngs(seed))
        return base, nnx.LoRA(3, 2, 3, base_module=base, b_initializer=normal, rngs=nnx.Rngs(seed))

    (first, a), (second, b) = wrap(0), wrap(1)
    alone = nnx.LoRA(3, 2, 3, rngs=nnx.Rngs(0))
    model = nnx.Dict(one=a, more=[b, a], alone=alone, inside=nnx.Sequential())
    model["more"].last = model["inside"].first = b
    x = array(2, 3)
    expected = [a(x), b(x)]
    assert nnx.merge_lora(model) == [("inside", "first"), ("more", 1)]
    assert model["one"] is model["more"][1] is first
    assert model["alone"] is alone
    assert model["more"][0] is model["more"].last is model["inside"].first is second
    for layer, y in zip((first, second), expected):
        np.testing.assert_allclose(layer(x), y, atol=1e-5)


def test_what_cannot_be_adapted_or_merged_is_refused_and_nothing_changes():
    """Each error has the path, the reason and what to do."""

    class Scaled(nnx.Linear):
        def __call__(self, inputs, out_sharding=None):
            return 2 * super().__call__(inputs, out_sharding)

    rngs = nnx.Rngs(0)
    model = nnx.List([nnx.Linear(2, 2, rngs=rngs), Scaled(2, 2, rngs=rngs)])
    with pytest.raises(
        ValueError, match=r"Cannot add a LoRA to \[1\] \(Scaled\): .*nnx\.LoRA\(\.\.\., base_module=layer"
    ):
        nnx.add_lora(model, 2, rngs=rngs)
    assert type(model[0]) is nnx.Linear
    model.pop()
    shapes = []

    def fails_for_the_second(key, shape, dtype):
        shapes.append(shape)
        return jnp.zeros(shape, dtype) if len(shapes) == 1 else 1 / 0

    model.append(nnx.Linear(2, 2, rngs=rngs))
    with pytest.raises(ZeroDivisionError):
        nnx.add_lora(model, 2, a_initializer=fails_for_the_second, rngs=rngs)
    assert [type(layer) for layer in model] == [nnx.Linear, nnx.Linear]
    model.pop()
    nnx.add_lora(model, 2, rngs=rngs)
    with pytest.raises(ValueError, match=r"\[0\] \(LoRALinear\): it has one; merge it first"):
        nnx.add_lora(model, 2, rngs=rngs)
    batched = nnx.LinearGeneral(2, 2, batch_axis={0: 3}, rngs=rngs)
    with pytest.raises(ValueError, match=r"<root> \(LinearGeneral\): it has batch axes"):
        nnx.add_lora(batched, 2, filter=..., rngs=rngs)
    with pytest.raises(ValueError, match=r"OfType\(Conv\) selects no layer.*Linear.* of this List: \[0\] \(LoRA"):
        nnx.add_lora(model, 2, filter=nnx.Conv, rngs=rngs)
    stack = stacked()
    with pytest.raises(ValueError, match=r"its kernel is float32\[3, 4, 4\], so it is a stack of layers"):
        nnx.add_lora(stack, 2, filter=..., rngs=rngs)
    model = nnx.List([nnx.LoRALinear(2, 2, lora_rank=1, rngs=rngs) for _ in range(2)])
    model[1].kernel.value = jnp.ones((3, 3))
    kernel = model[0].kernel.value
    with pytest.raises(TypeError, match="reshape"):
        nnx.merge_lora(model)
    assert type(model[0]) is nnx.LoRALinear
    assert model[0].kernel.value is kernel
    assert type(stack) is nnx.Linear

    def merge(base, hold=lambda wrapper: nnx.List([wrapper]), sizes=(2, 1, 2)):
        nnx.merge_lora(hold(nnx.LoRA(*sizes, base_module=base, rngs=rngs)))

    linear = nnx.Linear(2, 2, rngs=rngs)
    kernel = linear.kernel.value
    for arguments, message in [
        ((nnx.relu,), r"at \[0\]: it is around a .*only the kernel of a Linear"),
        ((linear, lambda w: nnx.List([w]), (2, 1, 3)), r"sizes 2->1->3, but the kernel .* float32\[2, 2\]"),
        ((linear, lambda w: nnx.List([w, linear])), "others use its Linear without it"),
        ((linear, lambda w: w), "it is the model itself"),
    ]:
        with pytest.raises(ValueError, match=message):
            merge(*arguments)
    tied = nnx.List([linear, nnx.Linear(2, 2, rngs=rngs)])
    tied[1].kernel = linear.kernel
    nnx.add_lora(tied, 1, rngs=rngs)
    with pytest.raises(ValueError, match=r"at \[0\]: others use its kernel without it"):
        nnx.merge_lora(tied)
    assert (linear.kernel.value is kernel, type(linear)) == (True, nnx.LoRALinear)


def test_adapted_models_go_through_transforms():
    """jit, vmap over an ensemble, remat, eval_shape, clone and raw JAX see LoRA layers as any other."""
    x = array(5, 8)
    model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    call = nnx.jit(lambda model, x: model(x))
    np.testing.assert_allclose(call(model, x), model(x), atol=1e-6)
    nnx.add_lora(model, 2, b_initializer=normal, rngs=nnx.Rngs(1))  # the compiled function notices
    np.testing.assert_allclose(call(model, x), model(x), atol=1e-6)
    np.testing.assert_allclose(nnx.remat(lambda model, x: model(x))(model, x), model(x), atol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda model, x: model(x))(model, x), model(x), atol=1e-6)
    np.testing.assert_array_equal(nnx.clone(model)(x), model(x))

    @nnx.vmap
    def ensemble(key):
        return nnx.LoRALinear(8, 3, lora_rank=2, rngs=nnx.Rngs(key))

    stacked = ensemble(jax.random.split(jax.random.key(0), 4))
    assert stacked.lora.lora_a.shape == (4, 8, 2)
    assert nnx.vmap(lambda model, x: model(x), in_axes=(0, None))(stacked, x).shape == (4, 5, 3)

    def build():
        model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
        nnx.add_lora(model, 2, rngs=nnx.Rngs(1))
        return model

    abstract = nnx.eval_shape(build)
    assert (type(abstract), abstract.lora.lora_b.shape) == (nnx.LoRALinear, (2, 3))
    merged = nnx.jit(lambda model: nnx.merge_lora(model))
    expected = model(x)
    assert merged(model) == [()]
    assert type(model) is nnx.Linear
    np.testing.assert_allclose(model(x), expected, atol=1e-5)


def test_subclasses_are_merged_unless_they_have_a_forward_of_their_own():
    """They become the plain classes; one that may compute something else is refused, and nothing is changed."""

    class RankTwo(nnx.LoRALinear):
        def __init__(self, n_in, n_out, rngs):
            super().__init__(n_in, n_out, lora_rank=2, b_initializer=normal, rngs=rngs)

    class Named(nnx.LoRA):
        name = "adapter"

    class Doubled(RankTwo):
        def __call__(self, x, out_sharding=None):
            return 2 * super().__call__(x, out_sharding)

    rngs, x = nnx.Rngs(0), array(4, 3)
    base = nnx.Linear(3, 3, rngs=rngs)
    around = Named(3, 2, 3, base_module=base, b_initializer=normal, rngs=rngs)
    model = nnx.List([RankTwo(3, 3, rngs), around, Doubled(3, 3, rngs)])
    expected = [layer(x) for layer in model]
    kernel = model[0].kernel.value
    with pytest.raises(ValueError, match=r"at \[2\]: Doubled has a __call__ of its own.*than LoRALinear; leave it out"):
        nnx.merge_lora(model)
    assert (type(model[0]), model[0].kernel.value is kernel, model[1] is around) == (RankTwo, True, True)
    assert nnx.merge_lora(model, filter=nnx.Not(Doubled)) == [(0,), (1,)]
    assert (type(model[0]), hasattr(model[0], "lora"), model[1] is base) == (nnx.Linear, False, True)
    for layer, y in zip(model, expected, strict=True):
        np.testing.assert_allclose(layer(x), y, atol=1e-5)
    with pytest.raises(ValueError, match=r"\[2\] \(Doubled\): it has one; merge it first"):
        nnx.add_lora(model, 2, filter=Doubled, rngs=rngs)


def test_a_lora_that_computes_something_else_is_not_merged():
    """One with a forward of its own, which a layer was given in place of the one that it made."""

    class Scaled(nnx.LoRA):
        def __call__(self, x):
            return 2 * super().__call__(x)

    layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    layer.lora = Scaled(3, 2, 4, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match=r"Scaled has a __call__ of its own.*than LoRA; leave it out of the filter"):
        nnx.merge_lora(layer)
    assert type(layer) is nnx.LoRALinear
