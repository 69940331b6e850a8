"""The pictures in the guides: the files in docs/pictures are what the code of the pages makes now."""

import doctest
import pathlib
import re
import xml.etree.ElementTree

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PICTURES = {"transformer.svg": "seeing.md", "experts.svg": "seeing.md", "paths.svg": "paths.md"}


def code_of(page):
    """The code of a page: its scripts, or its examples at a prompt if it has no others."""
    text = (DOCS / page).read_text()
    scripts = re.findall(r"^```python\n(?!>>> )(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return "\n".join(scripts) or "".join(x.source for x in doctest.DocTestParser().get_examples(text))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder in which the code of the pages has run."""
    folder = tmp_path_factory.mktemp("pictures")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for page in dict.fromkeys(PICTURES.values()):
            exec(code_of(page), {"__name__": "__main__"})
    return folder


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_the_code_makes(made, name):
    """Where they differ, run the code of the page in docs/pictures."""
    text = (DOCS / "pictures" / name).read_text(encoding="utf-8")
    assert (made / name).read_text(encoding="utf-8") == text
    assert len(text) < 30_000
    xml.etree.ElementTree.fromstring(text)
    assert f"(pictures/{name})" in (DOCS / PICTURES[name]).read_text()


def test_no_picture_is_left_behind(made):
    """Each file in docs/pictures is made by a page."""
    assert {path.name for path in (DOCS / "pictures").iterdir()} == {path.name for path in made.iterdir()}
