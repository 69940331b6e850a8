"""The documentation runs: every ```python block of every page, every doctest, and every public name has words to it."""

import doctest
import importlib
import importlib.util
import inspect
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGE = pathlib.Path(importlib.util.find_spec("nnxlib").origin).parent
MODULES = sorted(
    ".".join(("nnxlib", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
NEEDS_FLAX = re.compile(r"^\s*(>>> )?(from|import) (flax|orbax)\b|\b(checkpointer|ocp)\.|nnx(lib)?\.bridge", re.M)
WITHOUT_FLAX = importlib.util.find_spec("flax") is None
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_examples(text: str, name: str, path: str, line: int, namespace: dict) -> None:
    """Run a block of `>>>` examples and fail with doctest's report of what differed."""
    test = doctest.DocTestParser().get_doctest(text, namespace, name, path, line)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.append, clear_globs=False)
    namespace.update(test.globs)
    assert not report, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    """The ```python blocks of a page run from top to bottom, in one namespace, in an empty folder.

    The pictures that they save are those of the page; where they differ, see tests/docs/test_pictures.py.
    Those that need flax, or Orbax, which comes with it, are left out where it is not installed.
    """
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace: dict = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        code, line = block[1], text.count("\n", 0, block.start(1))
        if WITHOUT_FLAX and NEEDS_FLAX.search(code):
            continue
        if code.startswith(">>> "):
            # A name of its own: doctest looks up the source of an example, in a traceback, by name and number.
            run_examples(code, f"{page.name}:{line}", str(page), line, namespace)
        else:
            # Empty lines before the code give a traceback the line numbers of the page.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
    for made in tmp_path.glob("*.svg"):
        stored = ROOT / "docs" / "pictures" / made.name
        assert page.name == "errors.md" or made.read_text(encoding="utf-8") == stored.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MODULES)
def test_doctests_of_a_module_pass(name):
    """The examples in a module's docstrings give what they show; `nnx`, `jax`, `jnp` and `np` are at hand in them."""
    if WITHOUT_FLAX and name.startswith("nnxlib.bridge"):
        pytest.skip("flax is not installed")
    at_hand = {
        "nnx": importlib.import_module("nnxlib"),
        "jax": importlib.import_module("jax"),
        "jnp": importlib.import_module("jax.numpy"),
        "np": importlib.import_module("numpy"),
    }
    module = importlib.import_module(name)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    for test in doctest.DocTestFinder().find(module, extraglobs=at_hand):
        runner.run(test, out=report.append)
    assert not report, "".join(report)


def test_public_names_are_documented():
    """Each function and class that `nnxlib` exports has a docstring."""
    library = importlib.import_module("nnxlib")
    public = {name: value for name, value in vars(library).items() if not name.startswith("_")}
    bare = [
        name
        for name, value in public.items()
        if (inspect.isclass(value) or inspect.isroutine(value)) and not (inspect.getdoc(value) or "").strip()
    ]
    assert public
    assert not bare, f"without a docstring: {', '.join(bare)}"


@pytest.mark.parametrize("folder", ["core", "transforms"])
def test_the_map_has_each_file_once(folder):
    """`how_it_works.md` names each file of the folder in one place, and none that is not there."""
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8").partition("## The files")[2]
    part = page.partition(f"`{folder}/`, ")[2].partition("/`, ")[0]
    there = sorted(path.name for path in (ROOT / "nnxlib" / folder).glob("*.py") if path.name != "__init__.py")
    assert sorted(re.findall(r"`(\w+\.py)`", part)) == there
