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
