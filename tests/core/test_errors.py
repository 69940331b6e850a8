"""Errors: their classes, and how paths, values and places are written in them."""

import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from nnxlib.core.errors import NnxError, describe, format_path, listed, locate, reachable

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


def make_model():
    return nnx.Dict(layers=[nnx.Dict(w=nnx.Param(1.0)), nnx.Dict(w=nnx.Param(2.0))])


def test_locate_starts_at_the_outermost_variable():
    """A local variable of a calling frame, and the path from there."""
    model = make_model()

    def inner(v):
        return locate(v)

    assert inner(model.layers[1].w) == "model.layers[1].w"


def test_locate_in_containers_and_by_class():
    """Objects in plain lists and dicts are found too; `self` is written as its class."""
    models = {"a": [make_model()]}
    assert locate(models["a"][0].layers[0].w) == "models.a[0].layers[0].w"  # and not the variables of pytest

    class Trainer(nnx.Pytree):
        def __init__(self):
            self.model = make_model()

        def run(self):
            return locate(self.model.layers[0].w)

    assert (lambda trainer: trainer.run())(Trainer()) == "trainer.model.layers[0].w"
    assert Trainer().run() == "Trainer.model.layers[0].w"


def test_long_messages_are_cut():
    """Thousands of problems are counted, not written out, whichever comparison found them."""
    lines = listed("head", [f"p{i}" for i in range(1000)], "tail").splitlines()
    assert (lines[:2], lines[-2:]) == (["head", "  p0"], ["  ... and 980 more", "tail"])
    model = nnx.List([nnx.Param(jnp.ones(())) for _ in range(100)])
    with pytest.raises(nnx.errors.NnxError, match="and 80 more") as found:
        nnx.fori_loop(0, 2, lambda i, m: jax.tree.map(lambda x: jnp.ones(2), m), model)
    assert len(str(found.value).splitlines()) < 30


def test_locate_what_nobody_refers_to():
    """None for an object that no frame reaches."""
    assert (lambda: locate(nnx.Param(1.0)))() is None


def test_locate_ends_in_cyclic_and_odd_frames():
    """Cycles of nodes and lists, and strange objects in frames, do not keep it from answering."""
    model = make_model()
    model.itself = model
    odd = [model]
    odd.append(odd)

    class Strange:
        def __getattr__(self, name):
            raise RuntimeError(name)

        __eq__ = __hash__ = None

    strange = Strange()
    target = nnx.Param(3.0)
    odd.append([target])
    assert locate(target) == "target"
    del strange


def test_locate_in_another_thread():
    """Only the frames of the running thread are looked at."""
    model = make_model()
    found = []

    def work(v):
        found.append(locate(v))

    thread = threading.Thread(target=work, args=(model.layers[0].w,))
    thread.start()
    thread.join()
    assert found == ["v"]


def test_reachable_gives_first_paths_in_order():
    """Each node and Variable once, parents first, keys in order."""
    model = make_model()
    model.again = model.layers
    assert [path for path, _ in reachable(model, set())] == [
        (),
        ("again",),
        ("again", 0),
        ("again", 0, "w"),
        ("again", 1),
        ("again", 1, "w"),
    ]
