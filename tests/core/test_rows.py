"""Rows and specs, the data of the table."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core.graph import pack
from nnxlib.core.rows import LEAF, SAME, Const, Ref, own_leaf_paths, parts, touched_rows


def test_marks_in_a_table_print_and_pickle():
    """The marks in a table have readable reprs and keep their identity through pickle."""
    assert (repr(LEAF), repr(SAME), pickle.loads(pickle.dumps((LEAF, SAME)))) == ("*", "same", (LEAF, SAME))
    assert pickle.loads(pickle.dumps(LEAF)) is LEAF


def test_touched_rows_keep_whole_fields():
    """A field with one touched leaf is replaced with all its leaves; other fields, and other nodes, stay."""
    inner = nnx.Dict(x=jnp.ones(1))
    layout = pack(nnx.Dict(a=jnp.ones(1), b=(jnp.ones(2), jnp.ones(3)), c="static", d=inner)).layout
    found = touched_rows(layout.rows, {(0, 2)})
    assert list(found) == [0]
    assert [name for name, spec in found[0].fields if spec is not SAME] == ["b"]
    assert touched_rows(layout.rows, set()) == {}


def test_parts_of_a_row_are_those_of_the_pytrees_in_its_fields():
    """The parts of a row and of its fields are leaves, objects and static values, with their paths, at any depth."""
    inner = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    row = pack(nnx.Dict(a=jnp.ones(1), b=(jnp.ones(2), (inner.__call__, 3)), c="static")).layout.rows[0]
    found = [(path, type(spec)) for path, spec in parts(row, ("m",)) if spec is not LEAF]
    assert found == [(("m", "b", 1, 0), Ref), (("m", "b", 1, 1), Const), (("m", "c"), Const)]
    assert own_leaf_paths(row) == [("a",), ("b", 0)]
    assert (own_leaf_paths(LEAF, ("x",)), own_leaf_paths(Ref(0))) == ([("x",)], [])


@jax.tree_util.register_pytree_node_class
class Grid:
    """A user's pytree with metadata that JAX neither hashes nor, for arrays, compares."""

    def __init__(self, values, metadata):
        self.values, self.metadata = values, metadata

    def tree_flatten(self):
        return (self.values,), self.metadata

    @classmethod
    def tree_unflatten(cls, metadata, children):
        return cls(*children, metadata)


class Model(nnx.Module):
    def __init__(self, grid):
        self.grid = grid
        self.w = nnx.Param(jnp.ones(3))

    def __call__(self, x):
        return self.w * self.grid.values * self.grid.metadata.sum() * x


class Incomparable:
    def __eq__(self, other):
        raise RuntimeError("compared")

    __hash__ = object.__hash__


def spec_of(metadata):
    return pack((Grid(jnp.ones(2), metadata), 1.0)).layout.root


def test_trees_whose_metadata_do_not_compare_as_a_bool():
    """Arrays are equal by what is in them, and what cannot be compared is equal to itself only."""
    one = np.arange(3)
    assert spec_of(one) == spec_of(one) == spec_of(np.arange(3)) != spec_of(np.arange(3) + 1)
    assert spec_of(one) != spec_of(np.arange(3.0))
    assert spec_of(one) != spec_of({"a": 1}) != spec_of([1])
    assert spec_of({"a": one}) == spec_of({"a": np.arange(3)}) != spec_of({"b": one})
    unlike, array = Incomparable(), jnp.arange(3)
    assert spec_of(unlike) == spec_of(unlike) != spec_of(Incomparable()) != spec_of(one)
    assert spec_of(array) == spec_of(array)
    assert hash(spec_of(one)) == hash(spec_of(np.arange(3)))


USES = {
    "split": lambda m, x: nnx.merge(*nnx.split(m))(x),
    "clone": lambda m, x: nnx.clone(m)(x),
    "grad": lambda m, x: nnx.grad(lambda m: m(x).sum())(m)["w"].value,
    "jit": lambda m, x: jitted(m, x),
    "update": lambda m, x: nnx.update(m, nnx.state(m)) or m(x),
    "vmap of its grid": lambda m, x: nnx.vmap(lambda g, m: m(x) * g.values, in_axes=(0, None))(m.grid, m)[0],
    "cond on its grid": lambda m, x: nnx.cond(True, lambda m, g: (m(x), g), lambda m, g: (x, g), m, m.grid)[0],
    "loop on its grid": lambda m, x: nnx.fori_loop(0, 2, lambda i, c: c, (m, m.grid))[0](x),
}
jitted = nnx.jit(lambda m, x: m(x))


@pytest.mark.parametrize("name", USES)
def test_models_with_arrays_in_the_metadata_of_a_pytree(name):
    """Several at a time; each with its own."""
    models = [Model(Grid(jnp.ones(3), np.array([i, 0]))) for i in (1, 2, 1)]
    one, two, other = map(nnx.graphdef, models)
    for model, i in zip(models, (1, 2, 1), strict=True):
        np.testing.assert_array_equal(USES[name](model, jnp.ones(3)), i * jnp.ones(3))
    assert one == other != two
