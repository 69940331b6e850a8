"""Objects are shown by Treescope in a notebook, as text elsewhere, and nothing is raised."""

import importlib.metadata
import sys
import types
import xml.etree.ElementTree

import jax.numpy as jnp
import pytest
import treescope

import nnxlib as nnx


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.tied = self.linear
        self.layers = [nnx.Param(jnp.zeros(2)), {"a": 1}]
        self.me = self


class Unprintable:
    def __repr__(self):
        raise KeyError("no")


@pytest.fixture
def page():
    """The HTML that a notebook shows, but for that of Treescope."""
    return []


@pytest.fixture
def notebook(monkeypatch, page):
    """A process that looks like a notebook; what Treescope was asked to show."""
    shown = []
    shell = types.SimpleNamespace(kernel=object())
    published = types.SimpleNamespace(display=lambda data, raw: page.append(data["text/html"]))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", published)

    def show(x, ignore_exceptions, autovisualize):
        assert ignore_exceptions
        assert autovisualize
        shown.append(x)

    monkeypatch.setattr(treescope, "display", show)
    return shown


def test_text_outside_of_notebooks(capsys):
    """Each argument on its own, as print does it."""
    nnx.display(nnx.Param(1), "text", 3)
    assert capsys.readouterr().out == "Param(1)\ntext\n3\n"
    nnx.display()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("shell", [None, object()], ids=["no shell", "a terminal"])
def test_text_in_a_terminal(monkeypatch, capsys, shell):
    """IPython without a kernel is no notebook."""
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    nnx.display(nnx.Param(1))
    assert capsys.readouterr().out == "Param(1)\n"


def test_trees_in_notebooks(notebook, capsys):
    """Each argument goes to Treescope."""
    model, state = Net(), nnx.State({})
    nnx.display(model, state)
    assert notebook == [model, state]
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Treescope looks at all names of numpy, also deprecated ones
def test_trees_follow_the_theme(notebook, page):
    """Each comes with a style, whose selectors are names that Treescope gives."""
    nnx.display(3)
    assert len(page) == len(notebook) == 1
    xml.etree.ElementTree.fromstring(page[0])
    assert "prefers-color-scheme:dark" in page[0]
    drawn = treescope.render_to_html(nnx.Param(1), compressed=False)
    for selector, text in (
        ("treescope-container{", "<treescope-container"),
        ("::part(treescope_root)", 'part="treescope_root"'),
    ):
        assert selector in page[0]
        assert text in drawn


def test_nothing_is_raised(notebook, monkeypatch, capsys):
    """Neither for an object that cannot be written nor where Treescope fails."""

    def fail(x, **kwargs):
        raise RuntimeError

    monkeypatch.setattr(treescope, "display", fail)
    nnx.display(nnx.Param(1), Unprintable(), nnx.Param(2))
    text = "Param(1)\n<Unprintable, which cannot be shown: KeyError>\nParam(2)\n"
    assert capsys.readouterr().out == text


def test_a_treescope_that_cannot_draw_arrays(notebook, monkeypatch):
    """An old one, with a new JAX, shows the tree without drawings."""

    def show(x, ignore_exceptions, autovisualize):
        if autovisualize:
            raise AttributeError("module 'jax.sharding' has no attribute 'PositionalSharding'")
        notebook.append(x)

    monkeypatch.setattr(treescope, "display", show)
    nnx.display(3)
    assert notebook == [3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_treescope_shows():
    """Modules, containers and States are trees with their names, also with sharing and cycles."""
    text = treescope.render_to_text(Net())
    for part in ("Net(", "linear=Linear(", "kernel=Param(", "layers=List([", "Dict({'a': 1})", "tied=Linear("):
        assert part in text
    assert "in_features=2" in text
    assert "tied" in text.split("# the same object as linear")[0].splitlines()[-1]


@pytest.mark.skipif(importlib.metadata.version("treescope") == "0.1.9", reason="it cannot draw arrays of JAX 0.8")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_arrays_are_drawn_in_notebooks():
    """Treescope's drawing of arrays works on what is in a Module, with a button to copy each path."""
    with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
        page = treescope.render_to_html(Net(), compressed=False)
    assert "arrayviz" in page
    assert "<root>" in page.replace("&lt;", "<").replace("&gt;", ">")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_trees_of_all_kinds_of_values():
    """Abstract, traced, deleted and missing values, shared Variables, and sizes: nothing is raised."""
    seen = []
    nnx.jit(lambda m: seen.append(treescope.render_to_text(m)))(Net())
    assert "kernel=Param(value=" in seen[0]
    abstract = nnx.eval_shape(Net)
    abstract.missing, abstract.w = None, abstract.linear.kernel
    text = treescope.render_to_text(abstract)
    assert "ShapeDtypeStruct" in text
    assert "w=Param(" in text.split("# the same object as linear.kernel")[0].splitlines()[-1]
    donated = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    donated.kernel.value.delete()
    assert "deleted" in treescope.render_to_text(donated, ignore_exceptions=True)
    assert "# Param: 9 (36 B)" in treescope.render_to_html(donated, compressed=False, ignore_exceptions=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_long_runs_of_layers_are_folded():
    """A thousand equal layers are a page, not a thousand; a few, and different ones, are all there."""
    model = nnx.Dict(layers=[nnx.Dict(w=nnx.Param(1.0)) for _ in range(1000)], last=[nnx.Param(1.0)] * 3)
    text = treescope.render_to_text(model)
    assert text.count("Dict({'w'") == 4
    assert "... 996 more like these, to [999]" in text
    assert text.count("Param(value=1.0)") == 7
    state = nnx.state(nnx.Dict(layers=[nnx.Dict(w=nnx.Param(float(i == 999))) for i in range(1000)]))
    text = treescope.render_to_text(state)
    assert text.count("{'w': Param(value=") == 5
    assert "... 995 more like these, to [998]" in text
    text = treescope.render_to_text(nnx.graphdef(model))
    assert text.count("Dict({'w'") == 4
    assert text.startswith("GraphDef(")
    assert (
        treescope.render_to_text(nnx.graphdef(nnx.Dict(a=nnx.Param(1.0), b=2)))
        == "GraphDef(Dict({'a': Param(), 'b': 2}))"
    )
    assert treescope.render_to_text(nnx.State({})) == "State({})"


def test_containers_of_models_are_written_as_models_are(capsys):
    """With sizes, and what is shared as its first path; not as what Python writes, one repr inside of another."""
    layer = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    nnx.display({"a": layer, "b": [layer]})
    assert capsys.readouterr().out.split("\n") == [
        "{                            # Param: 2 (8 B)",
        "  'a': Dict({                # Param: 2 (8 B)",
        "    'w': Param(float32[2]),  # 2 (8 B)",
        "  }),",
        "  'b': [",
        "    <Dict at a>,",
        "  ],",
        "}",
        "",
    ]
