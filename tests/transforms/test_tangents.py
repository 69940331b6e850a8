"""Tangents: from a list of values to the pytree with States, and back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.core import errors
from nnxlib.core.graph import pack
from nnxlib.core.missing import MISSING
from nnxlib.transforms.leaf_checks import type_of
from nnxlib.transforms.tangents import Tangents, by_argument, is_inexact, zeros_like

X = jnp.array([5.0, 6.0])


class Node(nnx.Module):
    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


arrays = st.sampled_from([1.0, 2, True, 1j]).map(jnp.array)
leaves = arrays | arrays.map(nnx.Param) | arrays.map(nnx.BatchStat)
modules = st.recursive(
    st.dictionaries(st.sampled_from("abc"), leaves, max_size=3).map(lambda d: Node(**d)),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner | leaves, max_size=3).map(lambda d: Node(**d)),
    max_leaves=4,
)
trees = st.recursive(
    modules | leaves, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner), max_leaves=4
)


@settings(max_examples=20, deadline=None)
@given(trees)
def test_unfold_is_the_inverse_of_fold(tree):
    """For any pytree: what is folded unfolds to the values it was made of, as arrays and in Variables."""
    layout, values, _ = pack((tree,))
    tangents = Tangents.of_leaves(layout, values)
    expected = dict(zip(tangents.positions, tangents.take(values), strict=True))
    for made in (tangents.take(values), tangents.as_variables(tangents.take(values))):
        found = tangents.unfold(tangents.fold(made), values, "tangent")
        assert found.keys() == expected.keys()
        assert all(found[k] is expected[k] for k in found)


def test_fold_with_sharing_and_cycles():
    """A shared leaf is under its first path only; what is met again has an empty State."""
    shared = nnx.Param(jnp.array(1.0))
    a = Node(w=shared, z=shared)
    a.me = a
    layout, values, _ = pack([a, a, shared])
    tangents = Tangents.of_leaves(layout, values)
    assert tangents.fold([5.0]) == [nnx.State({"w": 5.0}), nnx.State({}), nnx.State({})]
    assert type(tangents.fold(tangents.as_variables([5.0]))[0].w) is nnx.Param


def test_what_is_left_out():
    """None, and entries that a State does not have, give no value; ``filled`` makes zeros of them."""
    tree = (Node(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones((), jnp.bfloat16))), jnp.ones(3))
    layout, values, _ = pack(tree)
    tangents = Tangents.of_leaves(layout, values)
    assert tangents.unfold((None, None), values, "tangent") == {}
    found = tangents.unfold((nnx.State({"b": 2}), None), values, "tangent")
    assert [(x.shape, x.dtype) for x in tangents.filled(found, values)] == [(x.shape, x.dtype) for x in values]
    assert [float(x.sum()) for x in tangents.filled(found, values)] == [0.0, 2.0, 0.0]


def test_values_of_other_types():
    """Dicts, Modules and Variables stand for what they hold; what has no tangent may be given as float0."""
    m = Node(a=nnx.Param(jnp.ones(2)), n=nnx.Variable(jnp.array(3)))
    layout, values, _ = pack((m,))
    tangents = Tangents.of_leaves(layout, values)
    float0 = np.zeros((), jax.dtypes.float0)
    for given_ in ({"a": X}, nnx.State({"a": nnx.Param(X), "n": float0}), Node(a=X)):
        (found,) = tangents.unfold((given_,), values, "tangent").values()
        assert found is X
    with pytest.raises(errors.ArgumentError, match=r"given for \[0\].n, but that leaf \(int32\[\]\) is not"):
        tangents.unfold((m,), values, "tangent")


def test_by_argument():
    """Numbers may be negative, and are shifted; one that is not there, or there twice, is an error."""
    chosen = nnx.DiffState(0, nnx.Param)
    assert by_argument([1, chosen], 2, shift=3) == {4: MISSING, 3: nnx.Param}
    assert by_argument([-1, nnx.DiffState(0, None)], 3) == {2: MISSING, 0: None}
    with pytest.raises(errors.PrefixError, match="argnums has 2, but the function was called with 2"):
        by_argument([2], 2)
    with pytest.raises(errors.PrefixError, match=r"has argument -2 twice; join the filters"):
        by_argument([chosen, -2], 2)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [(1.0, True), (1, False), (True, False), (1j, True), (jnp.ones(2, int), False), (jax.random.key(0), False)]
    + [(np.array(["a"]), False), (np.array([None]), False)]
    + [(nnx.Param({"a": 1.0, "b": 2}), True), (nnx.Param(3), False), ("text", False), (np.float16(1), True)],
)
def test_is_inexact(leaf, expected):
    """Floating and complex numbers, alone or among others in one Variable."""
    assert is_inexact(leaf) is expected


def test_zeros_like():
    """Of a leaf, or of its type; those of integers are float0."""
    leaf = {"a": jnp.ones(2), "b": jnp.ones(3, int)}
    for x in (leaf, type_of(leaf)):
        zeros = zeros_like(x)
        assert zeros["a"].tolist() == [0.0, 0.0]
        assert zeros["b"].dtype == jax.dtypes.float0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    """A pytree that checks what it is made of, as a class with types that are checked at run time does."""

    x: jax.Array
    ids: jax.Array

    def __post_init__(self):
        assert self.x.ndim == self.ids.ndim + 1


def loss_of(model, batch):
    return jnp.mean(model(batch.x) ** 2 * batch.ids[:, None])


def with_rule(custom):
    """``loss_of`` with a rule, which takes the batch and does not differentiate it."""
    f = custom(loss_of, nondiff_argnums=(1,))
    if custom is nnx.custom_vjp:
        f.defvjp(lambda model, batch: (loss_of(model, batch), None), lambda batch, _, g: (g[0][0],))
    else:
        f.defjvp(lambda batch, primals, tangents: (loss_of(*primals, batch), loss_of(*primals, batch)))
    return f


NOT_REBUILT = {
    "grad": lambda model, batch: nnx.grad(loss_of)(model, batch),
    "aux": lambda model, batch: nnx.value_and_grad(lambda *a: (loss_of(*a), a[1]), has_aux=True)(model, batch),
    "DiffState": lambda model, batch: nnx.grad(loss_of, argnums=nnx.DiffState(0, nnx.Param))(model, batch),
    "by name": lambda model, batch: nnx.jit(nnx.grad(loss_of))(model=model, batch=batch),
    "vjp": lambda model, batch: nnx.vjp(loss_of, model, batch, argnums=0)[1](1.0),
    "jacrev": lambda model, batch: nnx.jacrev(loss_of)(model, batch),
    "jacfwd": lambda model, batch: nnx.jacfwd(loss_of)(model, batch),
    "custom_vjp": lambda model, batch: nnx.grad(with_rule(nnx.custom_vjp))(model, batch),
    "custom_jvp": lambda model, batch: with_rule(nnx.custom_jvp)(model, batch),
}


@pytest.mark.parametrize("name", NOT_REBUILT)
def test_arguments_without_tangents_are_not_rebuilt(name):
    """As in JAX: no object of their classes is made that has something else than arrays."""
    model, batch = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), Batch(jnp.ones((4, 2)), jnp.arange(4))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(NOT_REBUILT[name](model, batch)))
