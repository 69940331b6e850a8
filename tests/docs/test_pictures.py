"""The pictures in the guides: each is made by the code of a page, and shown there.

That they are what the code makes now, test_docs.py tests where it runs the pages; the tracebacks, which have the file
of the code in them, are made here. To make all of them again: `python tests/docs/test_pictures.py`.
"""

import doctest
import linecache
import os
import pathlib
import re
import xml.etree.ElementTree

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
PICTURES = {name: page for page, text in PAGES.items() for name in re.findall(r'\.save\("(\w+\.svg)"\)', text)}


def run(page):
    """Run the code of a page up to its last picture, as a file whose lines stand in the tracebacks.

    The code is that of its scripts, or of its examples at a prompt if it has no others.
    """
    scripts = re.findall(r"^```python\n(?!>>> )(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)
    code = "\n".join(scripts) or "".join(x.source for x in doctest.DocTestParser().get_examples(PAGES[page]))
    code, name = re.match(r".*\.save\(.*?\n", code, re.DOTALL)[0], page.replace(".md", ".py")
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


def test_tracebacks_are_what_the_code_makes(tmp_path, monkeypatch):
    """Those of errors.md."""
    monkeypatch.chdir(tmp_path)
    run("errors.md")
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert made == {name: (DOCS / "pictures" / name).read_text(encoding="utf-8") for name in made}
    assert set(made) == {name for name, page in PICTURES.items() if page == "errors.md"}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_small_and_shown(name):
    """Each is valid XML, in the page that makes it."""
    text = (DOCS / "pictures" / name).read_text(encoding="utf-8")
    assert len(text) < 30_000
    xml.etree.ElementTree.fromstring(text)
    assert f"(pictures/{name})" in PAGES[PICTURES[name]]


def test_no_picture_is_left_behind():
    """Each file in docs/pictures is made by a page."""
    assert {path.name for path in (DOCS / "pictures").iterdir()} == set(PICTURES)


@pytest.mark.parametrize("page", ["capture.md", "diff.md", "errors.md", "paths.md", "seeing.md"])
def test_the_guides_to_what_one_has_have_pictures(page):
    """At least one each."""
    assert page in PICTURES.values()


if __name__ == "__main__":
    os.chdir(DOCS / "pictures")
    for page in sorted(set(PICTURES.values())):
        run(page)
