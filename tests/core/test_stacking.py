"""Which other shapes of a State are accepted: the table in core/stacking.py. (Examples of use are in test_ops.py.)"""

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.errors import StateMismatchError


def norm():
    return nnx.BatchNorm(3, rngs=nnx.Rngs(0))


def stacked(state):
    return jax.tree.map(lambda x: jnp.stack([x] * 2), state)


def merged(change, *filters):
    graphdef, *states = nnx.split(norm(), *filters)
    return nnx.merge(graphdef, change(states[0]), *states[1:])


def updated(change, *filters):
    model = norm()
    nnx.update(model, change(nnx.state(model, *filters)))
    return model


@pytest.mark.parametrize("bring", [merged, updated])
def test_a_kind_as_a_whole_may_gain_axes(bring):
    assert bring(stacked).scale.shape == (2, 3)
    filters = (nnx.Param, ...) if bring is merged else (nnx.Param,)
    model = bring(stacked, *filters)
    assert (model.scale.shape, model.mean.shape) == ((2, 3), (3,))


def test_some_of_a_kind_may_gain_a_first_axis_in_merge_alone():
    """One leaf by itself is a mistake; so is another new axis than the first."""
    graphdef, params, rest = nnx.split(nnx.Sequential(norm(), norm()), nnx.PathContains(0), ...)
    assert nnx.merge(graphdef, stacked(params), rest)[0].scale.shape == (2, 3)
    with pytest.raises(StateMismatchError, match=r"shape"):
        nnx.merge(graphdef, jax.tree.map(lambda x: jnp.stack([x] * 2, -1), params), rest)
    with pytest.raises(StateMismatchError, match=r"shape"):
        nnx.update(nnx.Sequential(norm(), norm()), stacked(params))
    with pytest.raises(StateMismatchError, match=r"scale: expected shape \(3,\), got \(2, 3\)"):
        merged(stacked, nnx.PathContains("scale"), ...)


def test_labels_in_place_of_all_arrays_in_merge_alone():
    labels = lambda state: jax.tree.map(lambda x: "label", state)
    assert merged(labels).scale.value == "label"
    for bring in (lambda change: merged(change, nnx.Param, ...), updated):
        with pytest.raises(StateMismatchError, match="scale"):
            bring(labels)
