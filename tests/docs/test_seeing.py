"""docs/seeing.md and its pictures: the files in docs/pictures are what the code of the page makes now."""

import pathlib
import re
import xml.etree.ElementTree

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder in which the code of the page has run."""
    folder = tmp_path_factory.mktemp("seeing")
    blocks = re.findall(r"^```python\n(?!>>> )(.*?)^```$", (DOCS / "seeing.md").read_text(), re.MULTILINE | re.DOTALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec("\n".join(blocks), {"__name__": "__main__"})
    return folder


@pytest.mark.parametrize("name", ["transformer.svg", "experts.svg"])
def test_pictures_are_what_the_code_makes(made, name):
    """Where they differ, run the code of the page in docs/pictures."""
    text = (DOCS / "pictures" / name).read_text(encoding="utf-8")
    assert (made / name).read_text(encoding="utf-8") == text
    assert len(text) < 30_000
    xml.etree.ElementTree.fromstring(text)
    assert f"(pictures/{name})" in (DOCS / "seeing.md").read_text()


def test_no_picture_is_left_behind(made):
    """Each file in docs/pictures is made by the page."""
    assert {path.name for path in (DOCS / "pictures").iterdir()} == {path.name for path in made.iterdir()}
