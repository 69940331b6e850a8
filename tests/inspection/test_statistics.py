"""nnx.statistics: numbers as NumPy has them, paths, what has no values, and the table as text and as a picture."""

import re
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

import nnxlib as nnx
from nnxlib.core.errors import ArgumentError

SVG = "{http://www.w3.org/2000/svg}"


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.linear(x))


def only(x):
    (found,) = nnx.statistics(x)
    return found


FLOATS = st.floats(width=32) | st.sampled_from([0.0, float("nan"), float("inf"), 1.0, 2.0**-140])


@settings(max_examples=40, deadline=None)
@given(arrays(np.float32, array_shapes(max_side=5), elements=FLOATS))
@example(np.array([np.nan, -np.inf], np.float32))
def test_numbers_are_those_of_numpy(x):
    """Of the finite elements; each one that is not zero is in a bin, which holds it."""
    found, finite = only(x), x[np.isfinite(x)].astype(np.float64)
    assert (found.size, found.array) == (x.size, f"float32[{', '.join(map(str, x.shape))}]")
    assert (found.zeros, found.nans, found.infs) == ((x == 0).sum(), np.isnan(x).sum(), np.isinf(x).sum())
    assert found.is_finite == np.isfinite(x).all()
    measured = found.mean, found.std, found.min, found.max
    if finite.size:
        np.testing.assert_allclose(measured, [finite.mean(), finite.std(), finite.min(), finite.max()], rtol=1e-6)
    else:
        assert measured == (None,) * 4
    bins = {
        (sign, i): ((sign * finite >= 2.0 ** (i / 16)) & (sign * finite < 2.0 ** ((i + 1) / 16))).sum()
        for sign, i in found.bins
    }
    assert found.bins == bins
    assert sum(bins.values()) == (finite != 0).sum()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int32", "uint8", "int4", "bool"])
def test_types(dtype):
    """Small floats, integers and truth values are numbers."""
    found = only(jnp.array([0, 1, 1, 1]).astype(dtype))
    assert (found.mean, found.min, found.max, found.zeros) == (0.75, 0, 1, 1)


def test_complex_numbers():
    """By their magnitude."""
    assert only(jnp.array([3 + 4j, -5])).min == only(jnp.array([3 + 4j, -5])).max == 5


def test_large_arrays_are_looked_at_in_pieces(monkeypatch):
    """With the same result."""
    x = np.random.default_rng(0).normal(size=(30, 7))
    whole = only(x)
    monkeypatch.setitem(nnx.statistics.__globals__, "_CHUNK", 16)
    pieces = only(x)
    assert pieces.bins == whole.bins
    np.testing.assert_allclose([pieces.mean, pieces.std], [whole.mean, whole.std])


def test_paths_of_what_is_captured():
    """The recording of one call is the array; several calls, and the layers of a stack taken apart, have a key each."""
    layer, x = Layer(nnx.Rngs(0)), jnp.ones((2, 4))
    _, outputs = nnx.capture(lambda layer, x: layer(layer(x)), method_outputs=nnx.Intermediate)(layer, x)
    found = nnx.statistics(outputs)
    paths = [(*path, i) for path in [("__call__",), ("linear", "__call__")] for i in (0, 1)]
    assert [x.path for x in found] == paths
    assert {x.type for x in found} == {"Intermediate"}
    assert found[0].zeros == (outputs["__call__"].value[0] == 0).sum()
    stack = nnx.Stack(Layer, 3, rngs=nnx.Rngs(0))
    _, outputs = nnx.capture(stack, method_outputs=nnx.Intermediate, only=Layer)(x)
    assert [(x.path, x.array) for x in nnx.statistics(outputs)] == [(("layers", "__call__"), "float32[3, 2, 4]")]
    apart = nnx.statistics(jax.tree.map(list, outputs))
    assert [(x.path, x.array) for x in apart] == [(("layers", "__call__", i), "float32[2, 4]") for i in range(3)]


def test_what_it_takes():
    """Modules, States of both forms and pytrees, in the order of the paths, but for random streams."""
    model = nnx.Sequential(Layer(nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    paths = [("layers", 0, "linear", "bias"), ("layers", 0, "linear", "kernel")]
    state = nnx.state(model)
    for tree in (model, state, state.flat_state(), nnx.to_pure_dict(nnx.state(model, nnx.Param))):
        assert [x.path for x in nnx.statistics(tree)] == paths
    assert nnx.statistics(model) == nnx.statistics(state)
    found = nnx.statistics({"model": model, "keys": jax.random.split(jax.random.key(0), 2), "x": np.ones(2)})
    assert [(x.path[0], x.type) for x in found] == [("model", "Param"), ("model", "Param"), ("x", "Array")]
    mixed = {"n": jnp.arange(2), "x": jnp.ones(2)}
    gradients = jax.grad(lambda tree: tree["x"].sum(), allow_int=True)(mixed)  # that of "n" has no values
    assert [x.path for x in nnx.statistics(gradients)] == [("x",)]
    assert [x.kind for x in nnx.diff(gradients, mixed)] == ["dtype"]
    assert [x.path for x in nnx.statistics([nnx.Param(1.0), jnp.ones(1)])] == [(1,)]
    odd = {"a": np.array(["text"]), "b": np.array([object()]), "c": np.ones(2, bool), "d": jnp.ones(2, "float8_e4m3fn")}
    assert [x.path for x in nnx.statistics(odd)] == [("c",), ("d",)]
    with pytest.raises(ArgumentError, match=r"nnx.statistics is of arrays, and there are none in a Dropout"):
        nnx.statistics(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


def test_what_has_no_values():
    """Abstract, traced, deleted and empty arrays have an entry, a line and a row without numbers."""
    layer = Layer(nnx.Rngs(0))
    traced = []
    jax.jit(lambda x: traced.append(nnx.statistics(x)))(jnp.ones((2, 3)))
    deleted = jnp.ones(3) + 1
    deleted.delete()
    for found in (nnx.statistics(nnx.eval_shape(lambda: layer)), *traced, nnx.statistics([deleted, jnp.ones((0, 2))])):
        assert {x.mean for x in found} == {None}
        assert all(x.is_finite and not x.zeros for x in found)
        assert "mean" not in repr(found)
        assert nnx.draw(found).svg.count('<path class="type-') == 0
    assert nnx.statistics(nnx.eval_shape(lambda: layer))[1].size == 16


def test_the_table():
    """A column for what there is; a sequence, which is as long as it is, but shown up to a number of rows."""
    x = jnp.array([0.0, jnp.nan, jnp.inf, 1.0])
    assert repr(nnx.statistics({"x": x, "y": jnp.ones(3)})).splitlines() == [
        "path  array       mean  std  min  max  zeros    not finite",
        "x     float32[4]   0.5  0.5    0    1    25%  1 NaN, 1 inf",
        "y     float32[3]     1    0    1    1",
    ]
    many = nnx.statistics([np.ones(1)] * 250)
    assert len(many) == 250
    assert len(many[:3]) == len({*many[:3]}) == 3
    assert repr(many).endswith("\n[199]  float64[1]     1    0    1    1\n... and 50 more")
    assert "… and 50 more" in nnx.draw(many).svg
    assert nnx.draw(many).svg.count('<path class="type-') == 200
    assert "more" not in nnx.draw(nnx.statistics([np.ones(1)] * 200)).svg


def drawn(tree):
    found = nnx.statistics(tree)
    return found, xml.etree.ElementTree.fromstring(nnx.draw(found).svg)


def histograms(page):
    """Of each: the bottom, and the columns as (x, height)."""
    for path in page.iter(f"{SVG}path"):
        if path.get("class").startswith("type-"):
            start, bottom, rest = re.fullmatch(r"M(\d+) (\d+)(.*)z", path.get("d")).groups()
            height, columns, x = 0, [], int(start)
            for end, step in re.findall(r"H(\d+)v(-?\d+)", rest):
                columns += [(left, height) for left in range(x, int(end), 3)]
                x, height = int(end), height - int(step)
            assert height == 0
            yield int(bottom), columns


def test_histograms():
    """In the row of their array, on one axis: what is larger lies further out, and what is constant in one place."""
    rng = np.random.default_rng(0)
    normal, wide, constant, dead = rng.normal(size=4000), 100 * rng.normal(size=4000), np.full(5, -2.0), np.zeros(4)
    found, page = drawn({"a": normal, "b": wide, "c": constant, "d": dead, "e": np.maximum(normal, 0)})
    (_, a), (_, b), (_, c), (_, e) = shown = list(histograms(page))
    rows = [
        float(x.get("d").split()[1].partition("H")[0])
        for x in page.iter(f"{SVG}path")
        if "H" in x.get("d") and x.get("class") == "rule"
    ]
    tops = dict(zip("abcde", rows))
    for name, (bottom, _) in zip("abce", shown):
        assert tops[name] < bottom - 20 < bottom < tops[name] + 26
    (zero,) = [float(x.get("d")[1:].split()[0]) for x in page.iter(f"{SVG}path") if "V" in x.get("d")]

    def reach(columns):
        return max(abs(x - zero) for x, height in columns if height)

    assert reach(a) < reach(b) / 2
    assert sum(height > 0 for _, height in c) <= 2
    assert all(x < zero for x, height in c if height)
    assert all(x > zero - 4 for x, height in e if height)
    assert max(height for _, height in a) == 20
    middle = [height for x, height in a if abs(x - zero) < 6]
    assert min(middle) > 14  # one peak
    width = float(page.get("width"))
    assert all(0 < x < width for columns in (a, b) for x, _ in columns)
    numbers = [float(x.text) for x in page.iter(f"{SVG}text") if x.get("text-anchor") == "middle"]
    assert numbers == sorted(numbers)
    assert 0.0 in numbers
    assert len(numbers) >= 3


def test_histograms_of_any_range():
    """Of the largest and the smallest numbers, beside each other or alone."""
    for values in ([1e300, -1.7e308, 3.0], [5e-324, 1e308], [5e-324], [-1e-300], [1e38, 1e-38]):
        _, page = drawn(np.array(values))
        ((_, columns),) = histograms(page)
        assert 1 <= sum(height > 0 for _, height in columns) <= 8


def test_what_stands_out():
    """The path of what is not finite is red, and so is how much; the share of zeros is bold where it is all."""
    found, page = drawn({"bad": np.array([1.0, np.nan]), "dead": np.zeros(3), "odd <name>": np.ones(2)})
    classes = {x.text: x.get("class") for x in page.iter(f"{SVG}text")}
    assert classes["bad"] == classes["1 NaN"] == "bad"
    assert classes["dead"] == classes["['odd <name>']"] == "name"
    assert classes["100%"] == "type"
    assert found._repr_svg_() in found._repr_html_()
    assert found._repr_svg_() == nnx.draw(found).svg
