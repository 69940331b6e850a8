"""docs/reference has each public name once. That the pages are built without a warning, `make docs` checks."""

import importlib
import importlib.util
import inspect
import pathlib
import re
from collections import Counter

import pytest

import nnxlib
from tests.compat.test_names import NAMES as PATHS

PAGES = sorted((pathlib.Path(__file__).resolve().parents[2] / "docs" / "reference").glob("*.md"))
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
ENTRY = re.compile(r"^\.\. (?:auto\w+|py:data):: (?:nnxlib\.)?(\S+)$", re.MULTILINE)
NAMES = Counter(name for text in TEXTS.values() for name in ENTRY.findall(text))
WITHOUT_FLAX = importlib.util.find_spec("flax") is None

# Modules whose own functions and classes are public. Their helpers, of which flax.nnx has no counterpart, are not.
MODULES = {
    "errors": lambda x: inspect.isclass(x) and issubclass(x, Exception),
    "initializers": lambda x: inspect.isfunction(x) and x.__module__.endswith(".initializers"),
    "metrics": lambda x: inspect.isclass(x) and x.__module__ == "nnxlib.training.metrics",
    "bridge": lambda x: callable(x) and x.__module__.startswith("nnxlib.bridge"),
    "bridge.wrappers": callable,
    "bridge.interop": callable,
}


# What else is public of a module path: tests/compat/test_names.py lists it.
UNDER_PATHS = [f"{path}.{name}" for path, names in PATHS.items() for name in names.split() if name[0] != "="]


def found(name):
    x = nnxlib
    for part in name.split("."):
        if not hasattr(x, part):
            importlib.import_module(f"{x.__name__}.{part}")
        x = getattr(x, part)
    return x


def test_each_public_name_is_there_once():
    """Names of `nnxlib`, aliases too; and what its submodules define, by whatever name."""
    public = {name for name in nnxlib.__all__ if not inspect.ismodule(found(name))}
    assert public <= NAMES.keys()
    assert max(NAMES.values()) == 1


def test_functions_and_classes_of_module_paths_are_there():
    """Under one of their names."""
    listed = [found(name) for name in NAMES if not name.startswith("bridge.")]
    missing = [name for name in UNDER_PATHS if callable(x := found(name)) and not any(x is other for other in listed)]
    assert missing == []


@pytest.mark.parametrize("module", MODULES)
def test_the_names_of_a_module_are_there(module):
    if WITHOUT_FLAX and module.startswith("bridge"):
        pytest.skip("flax is not installed")
    listed = {id(found(name)) for name in NAMES if "bridge" in module or not name.startswith("bridge.")}
    names = {name: x for name, x in vars(found(module)).items() if MODULES[module](x) and not name.startswith("_")}
    assert names
    assert {name for name, x in names.items() if id(x) not in listed} == set()


@pytest.mark.parametrize("page", TEXTS)
def test_the_names_of_a_page_exist(page):
    """And an alias is one."""
    if WITHOUT_FLAX and page == "bridge.md":
        pytest.skip("flax is not installed")
    for name in ENTRY.findall(TEXTS[page]):
        found(name)
    for name, other in re.findall(r":: (?:nnxlib\.)?(\S+)\n\n   Alias of :any:`(?:nnxlib\.)?(.+)`", TEXTS[page]):
        assert found(name) is found(other)


@pytest.mark.parametrize("page", TEXTS)
def test_the_table_of_a_page_has_its_entries(page):
    """Those with a docstring, in their order."""
    table = re.search(r":nosignatures:\n\n((?:   \S+\n)+)", TEXTS[page])
    entries = re.findall(r"^\.\. auto\w+:: (?:nnxlib\.)?(\S+)$", TEXTS[page], re.MULTILINE)
    assert table is not None
    assert table[1].split() == entries
