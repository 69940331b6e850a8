"""nnx.diff: what differs between two models, States or GraphDefs, as entries and as a table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.core.errors import ArgumentError


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.activation, self.rate = nnx.relu, 0.5
        self.counts = jnp.arange(3)


class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.layers = [Layer(rngs), Layer(rngs)]
        self.tied = self.layers[0].linear
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def changed(change):
    before, after = Net(), Net()
    change(after)
    return nnx.diff(before, after)


CHANGES = {
    "value": (lambda m: m.layers[1].linear.bias.set_value(jnp.array([0, 0.25, -0.5])), ("layers", 1, "linear", "bias")),
    "shape": (lambda m: setattr(m.layers[1], "counts", jnp.arange(4)), ("layers", 1, "counts")),
    "dtype": (lambda m: setattr(m.layers[1], "counts", jnp.arange(3.0)), ("layers", 1, "counts")),
    "metadata": (lambda m: m.layers[1].linear.bias.set_metadata(tag="x"), ("layers", 1, "linear", "bias")),
    "static": (lambda m: setattr(m.layers[1], "rate", 0.25), ("layers", 1, "rate")),
    "type": (lambda m: setattr(m.layers[1], "linear", nnx.Dropout(0.1)), ("layers", 1, "linear")),
    "added": (lambda m: setattr(m.layers[1], "extra", nnx.Param(1.0)), ("layers", 1, "extra")),
    "removed": (lambda m: delattr(m, "dropout"), ("dropout",)),
    "sharing": (lambda m: setattr(m, "tied", nnx.clone(m.tied)), ("tied",)),
    "declaration": (lambda m: m.eval(), ("dropout",)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_each_kind_of_change_is_found_at_its_path(kind):
    """Two equal models, one of them changed: an entry of the kind at the path, and none of another kind."""
    change, path = CHANGES[kind]
    found = changed(change)
    assert (path, kind) in [(x.path, x.kind) for x in found]
    assert {x.kind for x in found} <= {kind, "static"}
    assert found
    assert len(found) == len(list(found))


def test_equal_things_have_no_differences():
    """Models, States, flat States, pure dicts and GraphDefs: the result is false, empty and says so."""
    for make in (Net, lambda: nnx.state(Net()), lambda: nnx.state(Net()).flat_state(), lambda: nnx.graphdef(Net()),
                 lambda: nnx.to_pure_dict(nnx.state(Net())), lambda: nnx.unpack(Net()), lambda: (Net(), jnp.ones(2)),
                 lambda: {"a": Net()}, lambda: nnx.Param(1.0)):  # fmt: skip
        found = nnx.diff(make(), make())
        assert not found
        assert (list(found), str(found), found._repr_html_()) == ([], "no differences", "<p>no differences</p>")


def test_the_table():
    """Aligned text, one line an entry, in the order of the paths; the same in HTML, escaped."""
    before, after = Net(), Net()
    after.layers[1].activation = nnx.gelu
    after.layers[1].linear.bias.value = jnp.array([0, 0.25, -0.5])
    after.layers[1].linear.kernel.value = jnp.ones((2, 4), jnp.bfloat16)
    after.layers[0].rate = "<b>"
    found = nnx.diff(before, after)
    assert str(found) == (
        "path                     kind    before       after\n"
        "layers[0].rate           static  0.5 (float)  '<b>' (str)\n"
        "layers[1].activation     static  relu         gelu\n"
        "layers[1].linear.bias    value   float32[3]   2 of 3 differ, by 0.5 at [2] at most\n"
        "layers[1].linear.kernel  shape   (2, 3)       (2, 4)\n"
        "layers[1].linear.kernel  dtype   float32      bfloat16"
    )
    text = found._repr_html_()
    assert text.count("<tr>") == 6
    assert "&lt;b&gt;" in text
    assert "http" not in text
    assert isinstance(found[1:], nnx.Diff)
    assert found[1:][0] == found[1] == nnx.Difference(("layers", 1, "activation"), "static", "relu", "gelu")
    assert (found == nnx.diff(before, after), hash(found) == hash(nnx.diff(before, after))) == (True, True)


def test_many_differences_are_cut_short():
    before, after = nnx.List(range(300)), nnx.List(range(1, 301))
    found = nnx.diff(nnx.Dict(x=before, v=nnx.Param(1)), nnx.Dict(x=after, v=nnx.Param(1)))
    assert len(found) == 300
    assert str(found).endswith("... and 100 more")
    assert "… and 100 more" in nnx.draw(found).svg
    assert [x.path[1] for x in found] == list(range(300)), "ints in the order of ints"


def test_tolerances():
    """As numpy.isclose: atol + rtol * |after|; NaNs in one place are equal, infinities by their sign."""
    a = nnx.State({"x": jnp.array([1.0, 100.0, jnp.nan, jnp.inf])})
    b = nnx.State({"x": jnp.array([1.1, 101.0, jnp.nan, jnp.inf])})
    assert nnx.diff(a, b)[0].after == "2 of 4 differ, by 1 at [1] at most"
    assert nnx.diff(a, b, atol=0.2)[0].after == "1 of 4 differ, by 1 at [1] at most"
    assert not nnx.diff(a, b, rtol=0.01, atol=0.1)
    c = nnx.State({"x": jnp.array([1.0, 100.0, 0.0, -jnp.inf])})
    assert nnx.diff(a, c)[0].after == "2 of 4 differ, nan and 0 at [2]"
    assert nnx.diff(a, c, rtol=0.01)[0].after == "2 of 4 differ, nan and 0 at [2]", "no number is near an infinity"


def test_states():
    """Leaves that are there on one side only, other types and metadata; bare values against Variables."""
    a = nnx.State({"p": nnx.Param(jnp.ones(2), tag="a"), "gone": nnx.Param(1.0), "q": nnx.Param(2.0), "n": 3})
    b = nnx.State(
        {"p": nnx.Param(jnp.ones(2), tag="b"), "new": {1: nnx.Cache(jnp.ones(3))}, "q": nnx.Cache(2.5), "n": 4}
    )
    assert [tuple(x) for x in nnx.diff(a, b)] == [
        (("gone",), "removed", "Param (float)", "nothing"),
        (("n",), "value", "3", "4"),
        (("new", 1), "added", "nothing", "Cache (float32[3])"),
        (("p",), "metadata", "tag='a'", "tag='b'"),
        (("q",), "type", "Param", "Cache"),
        (("q",), "value", "2.0", "2.5"),
    ]
    assert not nnx.diff(Net(), nnx.state(Net())), "a model is compared with a State as its State"
    assert not nnx.diff(nnx.to_pure_dict(nnx.state(Net())), nnx.state(Net()))


def test_graphdefs():
    """In structure and shapes, with another one or with a model."""
    model = Net()
    graphdef = nnx.graphdef(model)
    model.layers[0].linear.bias.value = jnp.ones(5)
    model.layers[1].rate = 0.1
    expected = [(("layers", 0, "linear", "bias"), "shape"), (("layers", 1, "rate"), "static")]
    assert [(x.path, x.kind) for x in nnx.diff(graphdef, model)] == expected
    assert [(x.path, x.kind) for x in nnx.diff(graphdef, nnx.graphdef(model))] == expected
    assert [(x.path, x.kind) for x in nnx.diff(graphdef, nnx.unpack(model))] == expected


def test_what_is_not_concrete_has_no_values():
    """Abstract, traced and deleted arrays, alone or against concrete ones: shapes and dtypes, and nothing raises."""
    model, abstract = Net(), nnx.eval_shape(Net)
    for a, b in ((model, abstract), (abstract, model), (abstract, abstract)):
        assert not nnx.diff([a, nnx.eval_shape(nnx.Rngs, 0)], [b, nnx.Rngs(0)])
    abstract.layers[0].linear.bias.value = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert [x.kind for x in nnx.diff(model, abstract)] == ["shape"]
    deleted = Net()
    for _, leaf in nnx.iter_graph(deleted):
        if isinstance(leaf, nnx.Param):
            leaf.value.delete()
    assert not nnx.diff(model, deleted)
    seen = []

    @nnx.jit
    def inside(m, other):
        m.layers[0].linear.bias.value = jnp.ones(7)
        seen.append(nnx.diff(m, other))
        return 0

    inside(Net(), model)
    assert [(x.kind, x.before, x.after) for x in seen[0]] == [("shape", "(7,)", "(3,)")]


def test_values_of_all_kinds():
    """Small floats, complex numbers, bools, keys, strings, pytrees in a Variable, and what cannot be compared."""

    class Odd:
        def __eq__(self, other):
            raise ValueError

        __hash__ = None

    cases = (
        (jnp.ones(2, jnp.bfloat16), jnp.zeros(2, jnp.bfloat16), "2 of 2 differ, by 1 at [0] at most"),
        (jnp.ones(2, jnp.complex64), 1j * jnp.ones(2), "2 of 2 differ, by 1.41 at [0] at most"),
        (jnp.array([True, False]), jnp.array([True, True]), "1 of 2 differ, by 1 at [1] at most"),
        (jax.random.key(0), jax.random.key(1), "another key"),
        (jnp.float32(1), jnp.float32(2), "float32[] 2.0"),
        (np.int32(1), np.int32(3), "int32[] 3"),
        (np.array([2**62, 0]), np.array([2**62 + 1, 0]), "1 of 2 differ, by 1 at [0] at most"),
        (np.array([-(2**63)]), np.array([2**63 - 1]), "1 of 1 differ, by 1.84e+19 at [0] at most"),
        (np.array([-128], np.int8), np.array([127], np.int8), "1 of 1 differ, by 255 at [0] at most"),
        ("a", "b", "'b'"),
    )
    for x, y, text in cases:
        (found,) = nnx.diff(nnx.State({"v": nnx.Param(x)}), nnx.State({"v": nnx.Param(y)}))
        assert (found.kind, found.after) == ("value", text)
    pytree = nnx.diff(nnx.Param({"a": jnp.ones(2), "b": (1, 2)}), nnx.Param({"a": jnp.zeros(2), "b": (1, 3)}))
    assert [(x.path, x.kind) for x in pytree] == [(("a",), "value"), (("b", 1), "value")]
    assert [x.kind for x in nnx.diff(nnx.Param({"a": 1}), nnx.Param({"b": 1}))] == ["type"]
    assert [x.kind for x in nnx.diff(nnx.State({"a": None}), nnx.State({"a": jnp.ones(2)}))] == ["type"]
    nnx.diff(nnx.State({"v": nnx.Param(Odd())}), nnx.State({"v": nnx.Param(Odd())}))


@pytest.mark.parametrize(
    ("dtype", "items", "others"),
    [("U4", ["cat", "dog"], ["cat", "ape"]), (object, [1, None], [1, "a"]), ("i4,f4", [(1, 2.0)] * 2, [(1, 3.0)] * 2)],
)
def test_arrays_that_are_not_of_numbers_are_compared_as_a_whole(dtype, items, others):
    """Text, objects and records, as NumPy has them."""
    model, other = (nnx.Dict(names=nnx.data(np.array(x, dtype))) for x in (items, others))
    assert not nnx.diff(model, nnx.clone(model))
    (found,) = nnx.diff(model, other)
    assert (found.kind, found.after) == ("value", repr(other.names))


def test_keys_from_outside_of_a_trace_are_compared_in_it():
    """As other concrete arrays are."""
    ours, theirs = nnx.RngStream(0, tag="a"), nnx.RngStream(1, tag="a")
    found = []
    jax.eval_shape(lambda: found.extend(nnx.diff(ours, theirs)))
    assert found == list(nnx.diff(ours, theirs)) != []


def test_what_cannot_be_compared():
    """Things without Modules or arrays, and a State with a GraphDef: errors that say so."""
    with pytest.raises(
        ArgumentError, match=r"compares Modules, States and GraphDefs, and there is nothing .* in a str"
    ):
        nnx.diff("a", "b")
    with pytest.raises(ArgumentError, match="a State has no structure"):
        nnx.diff(nnx.graphdef(Net()), nnx.state(Net()))


@settings(max_examples=16)
@given(
    st.lists(st.sampled_from(sorted(set(CHANGES) - {"declaration", "removed", "type"})), max_size=3), st.integers(0, 1)
)
def test_no_difference_if_and_only_if_equal(names, seed):
    """Whatever is changed: a copy with the same changes has no difference, and the two sides mirror one another."""
    a, b, c = Net(seed), Net(seed), Net(seed)
    for name in names:
        for model in (b, c):
            CHANGES[name][0](model)
    assert not nnx.diff(b, c)
    there, back = nnx.diff(a, b), nnx.diff(b, a)
    assert bool(there) == bool(back) == bool(names)
    mirror = {"added": "removed", "removed": "added"}
    assert [(x.path, mirror.get(x.kind, x.kind)) for x in there] == [(x.path, x.kind) for x in back]


def test_what_is_written_alike_is_another():
    """Functions are told by where they are defined, never by address; two made in one place are said to be two."""
    made = [nnx.Dict(act=lambda x: x + i) for i in range(2)]  # noqa: B023
    (found,) = nnx.diff(*made)
    assert (found.before, found.after) == (
        f"<lambda> (test_diff.py:{made[0]['act'].__code__.co_firstlineno})",
        "another function",
    )
    (found,) = nnx.diff([{"a": nnx.Param(1.0)}], [(nnx.Param(1.0), None)])
    assert (found.path, found.before, found.after) == ((0,), "pytree {'a': *}", "pytree (*, None)")


def test_static_values_whose_comparison_fails_differ():
    """Somebody else's `==` must not hide the rest."""

    class Tag:
        __hash__ = object.__hash__

        def __eq__(self, other):
            raise RuntimeError

    a, b = (nnx.Dict(w=nnx.Param(jnp.ones(2), tag=Tag())) for _ in range(2))
    assert [x.kind for x in nnx.diff(a, b)] == ["metadata"]
