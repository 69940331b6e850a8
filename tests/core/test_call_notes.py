"""Notes on errors: each call that an error leaves, with path, layer and inputs; and what helps."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core import call_paths
from tests.core.called import INSIDE, Layer, Net

X = jnp.ones((1, 2))


def notes(call):
    with pytest.raises(Exception) as caught:  # which error it is, is not the point
        call()
    return [note for note in caught.value.__notes__ if note.startswith("in ")]


def test_notes_name_path_class_and_input():
    """One note per call that the error leaves, from the inside out."""

    class Failing(Layer):
        def __call__(self, x, y=None, *, z=1):
            raise ValueError("no")

    net = Net()
    net.block.layers[1] = Failing()
    assert notes(lambda: nnx.jit(lambda m, x: m(x))(net, X)) == [
        "in block.layers[1] (Failing, w float32[2]), input float32[1, 2]",
        "in block (Block), input float32[1, 2]",
        "in <root> (Net), input float32[1, 2]",
    ]
    found = notes(lambda: nnx.jit(lambda m, x: m.layers[1](x, None))(net.block, X))
    assert found == ["in layers[1] (Failing, w float32[2]), input float32[1, 2], None"]


def test_notes_of_methods_and_super():
    """A method is named; an error that goes through super() has one note for it."""

    class Failing(Layer):
        def __call__(self, x):
            return super().__call__(x) + jnp.ones(7)

        def run(self, x):
            return self(x)

    assert notes(lambda: nnx.jit(lambda m, x: m.run(x))(Failing(), X)) == [
        "in <root> (Failing, w float32[2]), input float32[1, 2]",
        "in <root>.run (Failing, w float32[2]), input float32[1, 2]",
    ]


@pytest.mark.parametrize("inside", [name for name in INSIDE if name != "grad in jit in remat"])
def test_notes_inside_transforms(inside):
    """The path in the whole model, once for each call."""

    class Outer(nnx.Module):
        def __init__(self):
            self.net = Net()

        def __call__(self, x):
            return INSIDE[inside](lambda m, x: m(x), self.net.block, x)

    outer = Outer()
    outer.net.block.layers[1].w.value = jnp.ones(3)
    found = [note.rpartition("[")[0] for note in notes(lambda: nnx.jit(lambda m, x: m(x))(outer, X))]
    assert found == [
        "in net.block.layers[1] (Layer, w float32[3]), input float32",
        "in net.block (Block), input float32",
        "in <root> (Outer), input float32",
    ]


def test_notes_in_eager_code():
    """The same notes as under a transform: the running calls are found on the stack of Python."""

    class Failing(Layer):
        def __call__(self, x):
            return super().__call__(x) + jnp.ones(7)

    net = Net()
    net.block.layers[1] = Failing()
    expected = [
        "in block.layers[1] (Failing, w float32[2]), input float32[1, 2]",
        "in block (Block), input float32[1, 2]",
        "in <root> (Net), input float32[1, 2]",
    ]
    assert notes(lambda: net(X)) == expected
    assert notes(lambda: jax.eval_shape(net, X)) == expected, "also under raw JAX"


def test_notes_of_many_levels_take_one_walk(monkeypatch):
    """A chain of Modules is searched for paths once, however many levels the error leaves; also when raised again."""

    class Chain(nnx.Module):
        def __init__(self, below):
            self.below = below

        def __call__(self, x):
            if self.below is None:
                raise ZeroDivisionError
            try:
                return self.below(x)
            except ValueError:
                return x

    model = Chain(None)
    for _ in range(20):
        model = Chain(model)
    walks = []
    walk = call_paths._Paths._walk
    monkeypatch.setattr(call_paths._Paths, "_walk", lambda self: (walks.append(1), walk(self)))
    with pytest.raises(ZeroDivisionError) as found:
        model(X)
    expected = [f"in {'.'.join(['below'] * i) or '<root>'} (Chain), input float32[1, 2]" for i in range(20, -1, -1)]
    assert (found.value.__notes__, len(walks)) == (expected, 1)
    assert not vars(found.value).keys() - {"__notes__"}

    class Again(nnx.Module):
        def __call__(self, error):
            raise error

    class Keeps(nnx.Module):
        def __init__(self):
            self.inner = Again()

        def __call__(self, error):
            try:
                self.inner(error)
            except KeyError as caught:
                self.caught = nnx.static(caught)

    error, keeps = KeyError("k"), Keeps()
    keeps(error)
    with pytest.raises(KeyError):
        nnx.List([Again()])[0](error)
    assert [note[:20] for note in error.__notes__] == ["in inner (Again), in", "in <root> (Again), i"]


def test_notes_say_the_sizes_of_a_layer():
    """Features in and out of the library's layers; up to four of the Variables of another Module."""
    rngs = nnx.Rngs(0)
    for layer, x, text in (
        (nnx.Linear(4, 2, rngs=rngs), jnp.ones((1, 3)), "<root> (Linear 4->2), input float32[1, 3]"),
        (nnx.LinearGeneral((2, 3), (4,), axis=(-2, -1), rngs=rngs), X, "(LinearGeneral (2, 3)->(4,)), input"),
        (
            nnx.Conv(3, 8, (3, 3), rngs=rngs),
            jnp.ones((1, 5, 5, 2)),
            "(Conv 3->8 kernel (3, 3)), input float32[1, 5, 5, 2]",
        ),
        (nnx.Embed(10, 4, rngs=rngs), jnp.ones(2), "(Embed 10x4), input float32[2]"),
        (nnx.BatchNorm(5, rngs=rngs), X, "(BatchNorm 5), input float32[1, 2]"),
    ):
        assert text in notes(lambda layer=layer, x=x: layer(x))[0]


def test_notes_say_what_containers_hold():
    """Batches are dicts, and cells carry tuples: their shapes are told as well."""

    class Loss(nnx.Module):
        def __call__(self, batch, carry, *rest, weights=None):
            raise ValueError("no")

    with pytest.raises(ValueError) as caught:
        Loss()({"x": X, "more": [X, "a"]}, (X, None), list(range(9)), weights={})
    assert caught.value.__notes__ == [
        "in <root> (Loss), input {'x': float32[1, 2], 'more': [float32[1, 2], str]}, (float32[1, 2], None), "
        "[int, int, int, int, int, int, int, int, ... and 1 more], weights={}"
    ]


def test_notes_show_numbers():
    """They are mostly settings, such as a mode."""

    class Loss(nnx.Module):
        def __call__(self, x, scale, train):
            raise ValueError("no")

    assert notes(lambda: Loss()(X, 0.5, train=True)) == ["in <root> (Loss), input float32[1, 2], 0.5, train=True"]


def test_a_note_says_that_jax_lax_takes_no_variables():
    """Once, although the error leaves two Modules."""

    class Raw(Layer):
        def __call__(self, x):
            return jax.lax.add(self.w, x)

    net = nnx.Sequential(Raw())
    with pytest.raises(Exception, match="__jax_array__") as caught:
        net(X[0])
    assert [note for note in caught.value.__notes__ if "pass variable.value" in note] == caught.value.__notes__[1:2]


def test_notes_say_that_a_layer_has_no_values():
    layer = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError) as caught:
        layer(jnp.ones((1, 2)))
    assert any("shapes without values (kernel, bias)" in note for note in caught.value.__notes__)


def test_notes_say_where_a_layer_takes_the_sharding_of_its_output():
    """JAX asks for it where it is ambiguous, in words about its own functions."""
    with jax.set_mesh(jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        rows = nnx.with_partitioning(nnx.initializers.normal(), ("d", None))
        table, ids = nnx.Embed(4, 2, embedding_init=rows, rngs=nnx.Rngs(0)), jnp.array([0, 1])
        with pytest.raises(Exception, match="out_sharding") as caught:
            table(ids)
        assert any("layer(x, out_sharding=jax.P(...))" in note for note in caught.value.__notes__)
        assert table(ids, out_sharding=jax.P()).shape == (2, 2)


def test_notes_never_take_the_place_of_the_error():
    class Incomplete(nnx.Linear):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((2, 3)))

    with pytest.raises(AttributeError, match="no attribute") as info:
        Incomplete()(X)
    assert any("Incomplete, kernel float32[2, 3]" in note for note in info.value.__notes__)


def test_a_note_asks_where_an_input_that_is_none_comes_from():
    """Mostly from a function without a ``return``."""
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(AttributeError, match="NoneType") as caught:
        nnx.Sequential(layer, lambda x: None, layer)(X)
    assert [note for note in caught.value.__notes__ if "return" in note] == [
        "an input is None: is an argument of the call missing, or a `return` where it was made?"
    ]


@pytest.mark.parametrize("wrong", [[[1.0, 2.0]], (1.0, 2.0), "text"], ids=repr)
def test_a_note_says_that_an_array_is_wanted(wrong):
    with pytest.raises(AttributeError) as caught:
        nnx.LayerNorm(2, rngs=nnx.Rngs(0))(wrong)
    assert any(
        f"takes an array here, and was given a {type(wrong).__name__}" in note for note in caught.value.__notes__
    )


def test_a_note_says_what_an_axis_name_is():
    with pytest.raises(NameError, match="batch") as caught:
        nnx.BatchNorm(2, axis_name="batch", rngs=nnx.Rngs(0))(X)
    assert any("nnx.vmap(..., axis_name=...)" in note for note in caught.value.__notes__)


def test_a_note_asks_for_the_constructor_of_the_base():
    class Wide(nnx.Linear):
        def __init__(self, rngs):
            self.factor = 2

    with pytest.raises(AttributeError) as caught:
        Wide(nnx.Rngs(0))(X)
    said = "the constructor of Wide replaces that of Linear: does it call super().__init__(...)?"
    assert said in caught.value.__notes__

    class Own(nnx.Module):
        def __init__(self):
            pass

        def __call__(self, x):
            return self.layer(x)

    with pytest.raises(AttributeError) as caught:
        Own()(X)
    assert not any("super" in note for note in caught.value.__notes__)


SIGNATURES = {
    "unknown": (lambda: nnx.Linear(2, 3, key=0), "in_features, out_features, rngs=...; optional: use_bias, dtype, "),
    "missing": (lambda: nnx.LayerNorm(), "num_features, rngs=...; optional: epsilon, "),
    "too many": (lambda: nnx.Dropout(0.5, 1, rngs=nnx.Rngs(0)), "rate; optional: broadcast_dims, "),
    "inherited": (lambda: nnx.GRUCell(input_size=2, rngs=nnx.Rngs(0)), "in_features, hidden_features, rngs=..."),
    "call": (lambda: nnx.Dropout(0.5)(X, seed=0), "inputs; optional: deterministic, rngs"),
    "any keyword": (lambda: nnx.MultiMetric(nnx.metrics.Average()), "**metrics"),
    "any argument": (lambda: nnx.merge(nnx.graphdef(nnx.Dropout(0.5))), "graphdef, *states; optional: copy"),
}


@pytest.mark.parametrize(("call", "taken"), SIGNATURES.values(), ids=SIGNATURES)
def test_a_note_says_what_is_taken(call, taken):
    """By a layer or its call, if Python refuses the arguments: names differ from one library to another."""
    with pytest.raises(TypeError) as caught:
        call()
    assert len([note for note in caught.value.__notes__ if note.startswith(f"it takes {taken}")]) == 1


def test_what_is_taken_is_not_said_of_other_functions():
    def scale(x, factor):
        return x * factor

    class Own(nnx.Linear):
        def __call__(self, x):
            return scale(super().__call__(x))

    for call in (lambda: Own(2, 3, rngs=nnx.Rngs(0))(X), lambda: nnx.jit(scale)(X)):
        with pytest.raises(TypeError, match="scale") as caught:
            call()
        assert not any("it takes" in note for note in getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("name", ["train", "training"])
def test_a_note_says_how_the_mode_is_set(name):
    with pytest.raises(TypeError) as caught:
        nnx.BatchNorm(2, rngs=nnx.Rngs(0))(X, **{name: True})
    assert any(note.startswith(f"{name} is set for a whole model, by model.train()") for note in caught.value.__notes__)


@pytest.mark.parametrize("name", ["setup", "build"])
def test_a_note_says_that_only_the_constructor_makes_layers(name):
    def make(self):
        self.layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    kind = type("Late", (nnx.Module,), {name: make, "__call__": lambda self, x: self.layer(x)})
    with pytest.raises(AttributeError) as caught:
        kind()(X)
    assert f"nnxlib calls no {name}(): make layers in __init__, or call self.{name}() there" in caught.value.__notes__
    made = kind()
    make(made)
    with pytest.raises(ValueError, match="takes inputs") as caught:
        made(jnp.ones((1, 5)))
    assert not any("nnxlib calls no" in note for note in caught.value.__notes__)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class NotShown(Exception):
    def __str__(self):
        raise RuntimeError("it has no text")


@pytest.mark.parametrize("error", [Frozen(1), NotShown()])
def test_an_error_that_takes_no_notes_is_raised_as_it_is(error):
    """An error that cannot be noted, or whose traceback cannot be set as an attribute, is not replaced by another."""

    class Failing(Layer):
        def __call__(self, x):
            raise error

    with pytest.raises(type(error)) as caught:
        Failing()(X)
    assert caught.value is error
