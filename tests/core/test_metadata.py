"""What initializers attach to a value."""

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.metadata import HOOKS


def test_with_metadata_attaches_to_the_variable_made_from_an_initializer():
    """The boxed value carries metadata and hooks; explicit arguments of the constructor win."""
    hook = lambda v, x: x
    init = nnx.with_metadata(lambda key, shape: jnp.zeros(shape), sharding=("a",), layer=1, on_set_value=hook)
    v = nnx.Param(init(None, (2,)), layer=2)
    assert (v.shape, v.sharding_names, v.layer, v.get_metadata("on_set_value")) == ((2,), ("a",), 2, (hook,))


def test_hooks_may_be_given_by_position():
    """In the order of flax.nnx, to `with_metadata` and `VariableMetadata`: set, get, create, add and remove an axis."""
    hooks = [lambda v, x, k=k: x + k for k in range(3)] + [lambda v, index, name: None] * 2
    given = dict(zip(["on_set_value", "on_get_value", "on_create_value", "on_add_axis", "on_remove_axis"], hooks))
    v = nnx.Param(nnx.with_metadata(lambda: 1.0, *hooks, layer="first")())
    w = nnx.Param(nnx.VariableMetadata(1.0, *hooks, {"layer": "first"}))
    for variable in (v, w):
        assert variable.get_metadata() == {**{name: (hook,) for name, hook in given.items()}, "layer": "first"}
        assert (variable.get_raw_value(), variable.value) == (3.0, 4.0)


@pytest.mark.parametrize(
    "layer", [lambda **given: nnx.Linear(2, 3, **given), lambda **given: nnx.LinearGeneral(2, 3, **given)]
)
def test_an_initializer_may_be_wrapped_several_times(layer):
    """The Variable has the metadata and hooks of all; of the outer one, where two have the same name."""
    twice, plus_one = lambda v, x: 2 * x, lambda v, x: x + 1
    init = nnx.with_metadata(nnx.initializers.ones, decay=False, group=1, on_get_value=plus_one, on_set_value=plus_one)
    init = nnx.with_metadata(nnx.with_partitioning(init, (None, "model")), group=2, on_get_value=twice)
    kernel = layer(kernel_init=init, rngs=nnx.Rngs(0)).kernel
    assert (kernel.decay, kernel.group, kernel.sharding_names) == (False, 2, (None, "model"))
    assert (kernel.get_metadata("on_set_value"), kernel.value.tolist()) == ((plus_one,), [[2.0] * 3] * 2)


def test_variable_metadata_refuses_unknown_hooks():
    """VariableMetadata(value, metadata=..., hooks) names a hook that does not exist."""
    box = nnx.VariableMetadata(1.0, metadata={"a": 1}, on_get_value=lambda v, x: x + 1)
    assert (nnx.Param(box).value, nnx.Param(box).a) == (2.0, 1)
    with pytest.raises(TypeError, match="on_nothing"):
        nnx.VariableMetadata(1.0, on_nothing=len)
    assert len(HOOKS) == 5


def test_a_mesh_is_metadata_of_an_initializer():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"), mesh=mesh)
    assert nnx.Param(init(jax.random.key(0), (2, 3))).value.sharding.spec == jax.P(None, "model")


def test_what_an_initializer_returns_with_metadata_is_written():
    assert repr(nnx.VariableMetadata(1, metadata={"tag": "a"})) == "VariableMetadata(1, {'tag': 'a'})"
