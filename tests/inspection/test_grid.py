"""Tables and tracebacks as pictures: each cell in its place, and what stands out in a traceback."""

import traceback
import xml.etree.ElementTree

import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.inspection.grid import draw_table

SVG = "{http://www.w3.org/2000/svg}"


class Net(nnx.Module):
    def __init__(self):
        self.layers = [nnx.Linear(2, 3, rngs=nnx.Rngs(0))]

    def __call__(self, x):
        return self.layers[0](x)


def lines(picture):
    """(x, y, class, text) of each line of text."""
    page = xml.etree.ElementTree.fromstring(picture.svg)
    texts = list(page.iter(f"{SVG}text"))
    return [(float(t.get("x")), float(t.get("y")), t.get("class"), "".join(t.itertext())) for t in texts]


def marked(picture, kind):
    page = xml.etree.ElementTree.fromstring(picture.svg)
    return [x.text for x in page.iter(f"{SVG}tspan") if x.get("class") == kind]


def raised(f, *args):
    with pytest.raises(Exception) as caught:  # which error it is, is not the point
        f(*args)
    return caught.value


def test_cells_stand_in_columns():
    """A line for each line of a cell, columns beside each other, the header bold, numbers at the right; escaped."""
    rows = [["path", "n"], ["a<b", "1"], ["c", "10\n2"]]
    picture = draw_table("t", rows, {(1, 0): "name"}, right=[1], title="Title", footer="below")
    found = {text: (x, y, kind) for x, y, kind, text in lines(picture)}
    assert list(found) == ["Title", "path", "n", "a<b", "1", "c", "10", "2", "below"]
    assert len({found[text][0] for text in ("Title", "path", "a<b", "c", "below")}) == 1
    assert len({found[text][0] for text in ("n", "1", "10", "2")}) == 1
    assert [found[text][2] for text in ("Title", "path", "a<b", "1", "below")] == ["type", "type", "name", None, "dim"]
    ys = [found[text][1] for text in ("Title", "path", "a<b", "c", "2", "below")]
    assert ys == sorted(set(ys))
    assert found["c"][1] == found["10"][1]
    assert ys[-1] < picture.height


def test_tables_of_the_library():
    """What tabulate and diff return is drawn with the same cells that a notebook shows."""
    model = Net()
    table = nnx.tabulate(model, jnp.ones((1, 2)), compute_flops=True)
    cells = {line for x in xml.etree.ElementTree.fromstring(table.html).itertext() for line in x.split("\n") if line}
    assert {text for *_, text in lines(nnx.draw(table))} == cells
    assert nnx.draw(nnx.tabulate(model, jnp.ones((1, 2)), columns=["outputs"])).svg.count("name") == 0
    other = Net()
    other.layers[0].bias[1] = 0.5
    other.extra = nnx.Param(1.0)
    found = nnx.diff(model, other)
    page = "".join(xml.etree.ElementTree.fromstring(found._repr_html_()).itertext())
    shown = [(kind, text) for *_, kind, text in lines(nnx.draw(found))]
    assert "".join(text for _, text in shown) == page
    assert ("good", "added") in shown
    assert ("bad", "removed") in [(x[2], x[3]) for x in lines(nnx.draw(nnx.diff(other, model)))]
    assert [text for *_, text in lines(nnx.draw(nnx.diff(model, model)))] == ["no differences"]
    many = nnx.diff({"x": jnp.ones(1)} | {str(i): jnp.ones(1) for i in range(250)}, {"x": jnp.ones(1)})
    assert lines(nnx.draw(many))[-1][3] == "… and 50 more"


def test_a_traceback():
    """All that Python prints but for the marks; what was raised and the paths of the notes stand out."""
    error = raised(nnx.jit(Net()), jnp.ones((1, 3)))
    picture = nnx.draw(error)
    shown = " ".join(text.strip() for *_, text in lines(picture))
    for line in traceback.format_exception(error):
        for part in line.splitlines():
            assert not part.strip(" ~^") or part.strip() in shown
    assert "^^" not in shown
    assert marked(picture, "bad") == ["nnxlib.core.errors.LayerInputError"]
    assert marked(picture, "name") == ["layers[0]", "<root>"]
    grey = [text for *_, kind, text in lines(picture) if kind == "dim"]
    assert grey[0] == "Traceback (most recent call last):"
    assert all(text.lstrip().startswith(("File", "Trace", "---", "For simplicity", "JAX_TRACEBACK")) for text in grey)
    assert picture.name == "LayerInputError"
    assert all(16 + 7.3 * len(text) < picture.width for *_, text in lines(picture))


def test_a_chain_of_errors():
    """Those that led to an error are there, too; lines that are too long are wrapped, and any text is valid XML."""

    def fail():
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("a\x00b <c> " + "word " * 40 + "\n  second line") from error

    picture = nnx.draw(raised(fail))
    assert marked(picture, "bad") == ["KeyError", "RuntimeError"]
    shown = [text for *_, text in lines(picture)]
    assert "The above exception was the direct cause of the following exception:" in shown
    assert "  second line" in shown
    assert max(map(len, shown)) <= 112
    assert any("a\ufffdb <c> word" in text for text in shown)


def test_an_error_that_was_never_raised():
    """Its name and what it says."""
    assert [text for *_, text in lines(nnx.draw(ValueError("no")))] == ["ValueError: no"]
    assert marked(nnx.draw(StopIteration()), "bad") == ["StopIteration"]
