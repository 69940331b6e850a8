"""Errors: their classes, and how paths, values and places are written in them."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from nnxlib.core.errors import NnxError, describe, format_path, listed

CLASSES = [x for x in vars(errors).values() if inspect.isclass(x) and issubclass(x, NnxError) and x is not NnxError]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda x: x.__name__)
def test_each_error_is_documented_and_also_a_built_in_one(kind):
    """`except ValueError` (TypeError, RuntimeError) keeps working, and each class says what it stands for."""
    assert issubclass(kind, ValueError | TypeError | RuntimeError | LookupError)
    assert kind.__doc__


@pytest.mark.parametrize(
    ("path", "root", "text"),
    [
        (("layers", 0, "kernel"), "model", "model.layers[0].kernel"),
        (("layers", 0, "kernel"), "", "layers[0].kernel"),
        ((0, "a b", "c"), "", "[0]['a b'].c"),
        ((0,), "args", "args[0]"),
        ((), "", "<root>"),
        ((), "model", "model"),
        (("class", "1"), "", "class['1']"),
        ((None, 2.5, ("t", 1)), "m", "m[None][2.5][('t', 1)]"),
    ],
)
def test_paths_are_written_as_one_would_type_them(path, root, text):
    """Identifiers as attributes, anything else as items."""
    assert format_path(path, root) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (jnp.zeros((2, 3)), "float32[2, 3]"),
        (np.zeros((), "int8"), "int8[]"),
        (jax.ShapeDtypeStruct((1,), jnp.bfloat16), "bfloat16[1]"),
        (nnx.Param(jnp.zeros(2)), "float32[2]"),
        (None, "None"),
        ("text", "str"),
        ([1], "list"),
    ],
)
def test_values_are_described_by_dtype_and_shape(value, text):
    """Anything that has no shape by its type."""
    assert describe(value) == text


def test_tracers_are_described_without_their_trace():
    """A tracer looks like the array that it stands for."""
    seen = []
    jax.jit(lambda x: seen.append(describe(x)) or x)(jnp.ones((2, 3)))
    assert seen == ["float32[2, 3]"]


def test_long_messages_are_cut():
    """Thousands of problems are counted, not written out, whichever comparison found them."""
    lines = listed("head", [f"p{i}" for i in range(1000)], "tail").splitlines()
    assert (lines[:2], lines[-2:]) == (["head", "  p0"], ["  ... and 980 more", "tail"])
    model = nnx.List([nnx.Param(jnp.ones(())) for _ in range(100)])
    with pytest.raises(nnx.errors.NnxError, match="and 80 more") as found:
        nnx.fori_loop(0, 2, lambda i, m: jax.tree.map(lambda x: jnp.ones(2), m), model)
    assert len(str(found.value).splitlines()) < 30


def test_a_nearly_known_name_is_suggested():
    """In every error about a name that something does not have."""
    model = nnx.Sequential(nnx.Dropout(0.5))
    layer = nnx.Dict(inner=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    state = nnx.State({"inner": {"kernl": nnx.Param(jnp.ones((2, 3)))}})
    calls = {
        "'deterministic'": lambda: model.set_attributes(determinstic=True),
        "'rate'": lambda: model.set_attributes(rte=0.1),
        "'mode'": lambda: nnx.jit(lambda m, mode: m, static_argnames="mod"),
        "'kernel'": lambda: nnx.update(layer, state),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"Did you mean {name}\?$"):
            call()
    with pytest.raises(ValueError, match=r"Did you mean 'deterministic'\?$"):
        nnx.view(model, determinstic=True)
    with pytest.raises(KeyError) as caught:
        nnx.state(layer)["iner"]
    assert caught.value.__notes__[0].endswith("Did you mean 'inner'?")


def test_an_unknown_name_is_left_alone():
    with pytest.raises(ValueError, match=r"set those that exist\.$"):
        nnx.Dict().set_attributes(entirely_different=1)


def test_a_function_without_a_signature_may_take_anything():
    assert errors.accepts(min, 1)
    assert not errors.accepts(len, 1, 2)
