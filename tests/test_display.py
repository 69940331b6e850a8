"""Objects are shown by Treescope in a notebook, as text elsewhere, and nothing is raised."""

import sys
import types

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
def notebook(monkeypatch):
    """A process that looks like a notebook; what Treescope was asked to show."""
    shown = []
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(treescope, "display", shown.append)
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


def test_nothing_is_raised(notebook, monkeypatch, capsys):
    """Neither for an object that cannot be written nor where Treescope fails."""

    def fail(x):
        raise RuntimeError

    monkeypatch.setattr(treescope, "display", fail)
    nnx.display(nnx.Param(1), Unprintable(), nnx.Param(2))
    text = "Param(1)\n<Unprintable, which cannot be shown: KeyError>\nParam(2)\n"
    assert capsys.readouterr().out == text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Treescope looks at all names of numpy, also deprecated ones
def test_what_treescope_shows():
    """Modules, containers and States are trees with their names, also with sharing and cycles."""
    text = treescope.render_to_text(Net())
    for part in ("Net(", "linear=Linear(", "kernel=Param(", "layers=List([", "Dict({'a': 1})", "tied=Linear("):
        assert part in text
    assert "in_features=2" in text
