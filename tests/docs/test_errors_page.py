"""docs/errors.md has every error class of the library: caused once, and mended. That it runs, test_docs.py tests."""

import importlib
import pathlib
import pkgutil
import re

import nnxlib
from nnxlib.core.errors import NnxError

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "errors.md").read_text()


def error_classes(base=NnxError):
    for module in pkgutil.walk_packages(nnxlib.__path__, "nnxlib."):
        if ".bridge" not in module.name:
            importlib.import_module(module.name)
    found = set()
    for kind in base.__subclasses__():
        if kind.__module__.startswith("nnxlib."):
            found |= {kind.__name__} | error_classes(kind)
    return found


def test_every_error_is_on_the_page():
    """A section of its own for each class, and none for a class that there is not."""
    assert set(re.findall(r"^## `(\w+)`$", PAGE, re.MULTILINE)) == error_classes()


def test_every_error_can_be_caught_by_its_name():
    assert error_classes() <= vars(nnxlib.errors).keys()


def test_every_error_is_caused_and_mended():
    """Each section shows the message of its class, and goes on to something that is not refused."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    for section in sections:
        name = re.match(r"`(\w+)`\n", section)
        if name is not None:
            assert f"\n{name[1]}: " in section, f"{name[1]} is not caused"
            mended = section.split(f"\n{name[1]}: ")[-1]
            assert re.search(r"^>>> (?!refused)", mended, re.MULTILINE), f"{name[1]} is not mended"
