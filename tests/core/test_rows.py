"""Rows and specs, the data of the table."""

import pickle

import jax.numpy as jnp

import nnxlib as nnx
from nnxlib.core.graph import pack
from nnxlib.core.rows import LEAF, SAME, touched_rows


def test_marks_in_a_table_print_and_pickle():
    """The marks in a table have readable reprs and keep their identity through pickle."""
    assert (repr(LEAF), repr(SAME), pickle.loads(pickle.dumps((LEAF, SAME)))) == ("*", "same", (LEAF, SAME))
    assert pickle.loads(pickle.dumps(LEAF)) is LEAF


def test_touched_rows_keep_whole_fields():
    """A field with one touched leaf is replaced with all its leaves; other fields, and other nodes, stay."""
    inner = nnx.Dict(x=jnp.ones(1))
    layout = pack(nnx.Dict(a=jnp.ones(1), b=(jnp.ones(2), jnp.ones(3)), c="static", d=inner)).layout
    found, owners = touched_rows(layout.rows, {(0, 2)})
    assert list(found) == [0]
    assert [name for name, spec in found[0].fields if spec is not SAME] == ["b"]
    assert owners == [(0, 1), (0, 2)]
    assert touched_rows(layout.rows, set()) == ({}, [])
