"""docs/notebooks: each notebook is a valid file that runs from top to bottom, as Jupyter would run it, and says so.

Jupyter is not needed: the cells are run here, and the value of a last expression is what the notebook would show.
"""

import ast
import contextlib
import io
import json
import pathlib
import re
import sys
import types
from typing import NamedTuple

import pytest
import treescope

NOTEBOOKS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "notebooks"


class Ran(NamedTuple):
    source: str
    printed: str
    value: object
    stored: list


def run_cell(source, name, namespace):
    """Run one cell; returns what it prints and the value of its last expression."""
    tree = ast.parse(source, name)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, name, "exec"), namespace)
        value = eval(compile(last, name, "eval"), namespace) if last is not None else None
    return printed.getvalue(), value


@pytest.fixture(scope="module")
def displayed():
    """What the notebook hands to Treescope."""
    return []


@pytest.fixture(scope="module")
def ran(displayed):
    """The cells of look_inside.ipynb, run in a process that looks like a notebook."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    pytest.importorskip("optax", reason="the notebook trains with optax")
    shell = types.SimpleNamespace(kernel=object())
    namespace, found = {"__name__": "__main__"}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
        patch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=lambda data, raw: None))
        patch.setattr(treescope, "display", lambda x, **kwargs: displayed.append(x))
        for cell in json.loads((NOTEBOOKS / "look_inside.ipynb").read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                found.append(Ran(source, *run_cell(source, cell["id"], namespace), cell["outputs"]))
    return found


def the_cell(ran, text):
    (found,) = [cell for cell in ran if text in cell.source]
    return found


def test_it_finds_the_dead_layer_and_mends_it(ran):
    """Chance before, far above it after, and the layer that is named is the one with the bad initializer."""
    before, after = [
        int(re.search(r"held-out accuracy (\d+)%", cell.printed)[1]) for cell in ran if "accuracy" in cell.printed
    ]
    assert before < 20
    assert after > 85
    assert [x.path for x in the_cell(ran, "nnx.diff").value] == [("head", "bias")]
    living = re.findall(r"layers\[(\d)\] +(\d+)%", the_cell(ran, "def living").printed)
    assert [int(share) > 50 for _, share in living] == [True, True, True, False, False]
    assert "-4.0 to -4.0" in the_cell(ran, "nnx.display").printed
    assert the_cell(ran, "class LogNet").printed.strip() == "not finite: ['', 'log', 'out']"
    assert re.match(r"in layers\[0\] \(Linear.*\), input float32\[1297, 63\]", the_cell(ran, "error.__notes__").printed)


def test_it_shows_tables_trees_and_pictures(ran, displayed):
    """Each in the form in which a notebook shows it; the stored picture is the one that is drawn now."""
    assert "layers/3" in the_cell(ran, "nnx.tabulate").value._repr_html_()
    assert [type(x).__name__ for x in displayed] == ["Linear"]
    drawn = the_cell(ran, "nnx.draw")
    assert "".join(drawn.stored[0]["data"]["image/svg+xml"]) == drawn.value._repr_svg_()


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_valid_and_small(path):
    """Of nbformat 4.5: cells with ids, sources and outputs in lists of lines; the first cell says how to run it."""
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | (
            {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        )
        assert all(isinstance(line, str) for line in cell["source"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        assert all(output["output_type"] in ("stream", "execute_result") for output in cell.get("outputs", ()))
    assert "To run it" in "".join(cells[0]["source"])
    assert len(text) < 60_000
