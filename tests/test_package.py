"""The package as a whole: what importing it loads and costs, what its files import from each other, what is shipped."""

import ast
import dis
import importlib.metadata
import importlib.resources
import os
import pathlib
import re
import subprocess
import sys
import types
from typing import Any

import pytest

import nnxlib

PACKAGE = pathlib.Path(nnxlib.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
RUNTIME = {"jax", "jaxlib", "numpy", "treescope", "typing_extensions"}
LAYERS = ["core", "transforms", "nn", "training", "inspection"]


def run_python(code: str, **environment: str) -> str:
    """Run `code` in a fresh interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(imports: str) -> set[str]:
    """The modules outside the standard library that a fresh interpreter has loaded after `imports`."""
    loaded = run_python(
        f"import sys; before = set(sys.modules); {imports}; print(*(set(sys.modules) - before))"
    ).split()
    return {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names}


def test_importing_nnxlib_loads_no_library_besides_jax_and_numpy():
    """`import nnxlib` loads nothing that `import jax, numpy, typing_extensions` does not: no optax, no treescope."""
    libraries = {name.partition(".")[0] for name in loaded_by("import nnxlib")}
    expected = {name.partition(".")[0] for name in loaded_by("import jax, jax.numpy, numpy, typing_extensions")}
    assert "nnxlib" in libraries
    assert libraries - expected == {"nnxlib"}


def test_what_is_compiled_stays_so_when_nnxlib_is_imported_and_used():
    """A setting that JAX knows of would change what it keeps programs by: there is none until one is set."""
    code = """
import jax, jax.numpy as jnp
f, traces = jax.jit(lambda x: traces.append(x) or x + 1), []
f(1.0)
import nnxlib as nnx
rngs = nnx.Rngs(0)
model = nnx.Sequential(nnx.Linear(2, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
nnx.Param(jnp.ones(2), out_sharding=("model",))
nnx.jit(nnx.value_and_grad(lambda model: model(jnp.ones((2, 2))).sum()))(nnx.merge(*nnx.split(model)))
f(1.0)
print(len(traces))
"""
    assert run_python(code) == "1\n"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("set_graph_mode", "from nnxlib.compat.flax"),
        ("with_vars", "from nnxlib.compat.flax"),
        ("Scan", "use nnx.scan"),
        ("Conv2d", "use nnx.Conv"),
        ("compact", "use a constructor"),
        ("make_rng", "rngs.dropout()"),
        ("save_checkpoint", "docs/training.md"),
        ("filter_jit", "use nnx.jit"),
        ("tree_at", "use an assignment"),
        ("partition", "use nnx.split and nnx.merge"),
        ("SelfAttention", "use nnx.MultiHeadAttention"),
        ("next_rng_key", "rngs.dropout()"),
        ("no_grad", "use nothing"),
        ("Identity", "nnx.identity"),
        ("LSTM", "use nnx.RNN(nnx.LSTMCell(...))"),
        ("ReLU", "use the function nnx.relu"),
        ("MSELoss", "use a loss of optax"),
        ("fork", "use nnx.fork_rngs or nnx.split_rngs"),
        ("set_mode", "use nnx.view"),
        ("using_refs", "give Variables ref=True"),
        ("to_refs", "give Variables ref=True"),
        ("use_hijax", "compile with nnx.jit"),
        ("as_immutable_vars", "leave it out"),
        ("to_arrays", "leave it out"),
        ("freeze", "compile with nnx.jit"),
        ("mutable", "compile with nnx.jit"),
        ("mutable_array", "use jax.new_ref"),
        ("MutableArray", "use jax.Ref"),
        ("use_mutable_arrays", "give Variables ref=True"),
        ("array_ref", "use jax.new_ref"),
        ("is_array_ref", "isinstance(x, jax.Ref)"),
        ("as_pytree_vars", "leave it out"),
        ("is_data_type", "use nnx.is_data"),
        ("eval_mode", "model.eval()"),
        ("ForkStates", "use nnx.fork_rngs or nnx.split_rngs"),
        ("to_hijax", "compile with nnx.jit"),
        ("to_lojax", "compile with nnx.jit"),
        ("register_variable_name_type_pair", "use nnx.register_variable_name"),
        ("with_sharding_constraint", "jax.lax.with_sharding_constraint"),
    ],
)
def test_a_name_of_another_version_of_nnx_says_what_to_use(name, remedy):
    assert not hasattr(nnxlib, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}': .*{re.escape(remedy)}"):
        getattr(nnxlib, name)


def test_a_misspelt_name_is_suggested():
    """By Python, which looks for it in the object that the error names."""
    with pytest.raises(AttributeError) as caught:
        nnxlib.Lineer
    assert (caught.value.name, caught.value.obj) == ("Lineer", nnxlib)


def test_importing_nnxlib_starts_no_device():
    """`import nnxlib` computes nothing: it works where the only platform allowed does not exist."""
    run_python("import nnxlib", JAX_PLATFORMS="no_such_platform")


def imported_for_types() -> dict[str, str]:
    """Name -> module, of what `nnxlib/__init__.py` imports for type checkers only: it is imported when asked for."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    found = {str(each.asname): f"nnxlib.{node.module or ''}".rstrip(".") for node in imports for each in node.names}
    for node in block.body:
        if isinstance(node, ast.Assign):  # graph = graphlib
            name, other = ast.unparse(node).split(" = ")
            found[name] = found[other]
    return found


def test_what_few_programs_use_is_imported_when_it_is_asked_for():
    """Each such name is listed and starred, and is what type checkers take it for; `import nnxlib` loads none."""
    loaded, later = loaded_by("import nnxlib"), imported_for_types()
    assert {"tabulate", "diff", "graphlib", "bridge"} <= set(later) <= set(dir(nnxlib))
    assert set(later) == {*nnxlib._LATER, *nnxlib._MODULES}
    assert not [name for name in loaded if name.startswith(("nnxlib.inspection", "nnxlib.compat.", "nnxlib.bridge"))]
    starred: dict = {}
    exec("from nnxlib import *", starred)
    assert {"Module", "jit", "tabulate"} <= set(starred)
    assert "bridge" not in starred  # which needs flax
    for name in set(later) - {"bridge", "wrappers"}:
        parent, found = importlib.import_module(later[name]), getattr(nnxlib, name)
        assert found is starred[name] if name in starred else isinstance(found, types.ModuleType)
        assert getattr(parent, name, found) is found


def test_importing_nnxlib_costs_little_on_top_of_jax():
    """`import nnxlib` makes at most a tenth of the calls that `import jax` makes (counted, so free of noise)."""
    code = """
import sys
def count(statement):
    calls = 0
    def tick(frame, event, argument):
        nonlocal calls
        calls += event == "call"
    sys.setprofile(tick)
    try:
        exec(statement)
    finally:
        sys.setprofile(None)
    return calls
print(count("import jax, jax.numpy"), count("import nnxlib"))
"""
    run_python("import nnxlib")  # the byte code is cached before the count
    of_jax, of_nnxlib = map(int, run_python(code).split())
    assert of_nnxlib < of_jax / 10, f"import jax makes {of_jax} calls, import nnxlib {of_nnxlib} more"


@pytest.fixture
def distribution() -> importlib.metadata.Distribution:
    """nnxlib as pip knows it."""
    try:
        return importlib.metadata.distribution("nnxlib")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nnxlib is on the path but not installed; `make test` installs it")


def test_runtime_requirements_are_exactly_five(distribution):
    """What `pip install nnxlib` brings is jax, jaxlib, numpy, treescope and typing_extensions."""
    required = [line for line in distribution.requires or [] if "extra ==" not in line]
    assert {re.split(r"[<>=!~ ;\[]", line)[0].replace("-", "_") for line in required} == RUNTIME


def test_version_is_that_of_the_distribution(distribution):
    """`nnxlib.__version__` is the version that pip shows."""
    assert nnxlib.__version__ == distribution.version


def test_type_marker_is_shipped():
    """The installed package carries `py.typed`, so that type checkers read its annotations."""
    assert importlib.resources.files("nnxlib").joinpath("py.typed").is_file()


def imported_modules(path: pathlib.Path) -> list[tuple[str, int]]:
    """Each module that the file imports, absolute, with its line; imports of names count as their module's."""
    inside = ("nnxlib", *path.relative_to(PACKAGE).with_suffix("").parts)
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(inside[: len(inside) - node.level]) if node.level else ""
            module = ".".join(part for part in (start, node.module) if part)
            # `from .. import core` imports nnxlib.core, not the package above.
            found += [(module if node.module else f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def layer_of(module: str) -> int | None:
    """The height of a module's layer: 0 for core; the files at the top of the package lie above all folders."""
    if module in ABOVE_ALL:
        return len(LAYERS) + 1
    parts = module.split(".")
    if parts[0] != "nnxlib":
        return None
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else len(LAYERS)


ABOVE_ALL = ("nnxlib.compat.flax", "nnxlib.compat.trees")  # a second namespace, made of the first


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    """A file imports from its own layer and those below it, never the top-level `nnxlib`."""
    here = layer_of(".".join(("nnxlib", *path.relative_to(PACKAGE).with_suffix("").parts)))
    for module, line in imported_modules(path):
        there = layer_of(module)
        assert module != "nnxlib" or here > len(LAYERS), f"line {line} imports the top-level package"
        assert there is None or there <= here, f"line {line} imports {module}, which lies above this file"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_tracing_reaches_into_jax(path):
    """`jax._src`, which changes without notice, is imported in core/tracing.py only."""
    private = [line for module, line in imported_modules(path) if module.startswith("jax._src")]
    assert not private or path == PACKAGE / "core" / "tracing.py", f"lines {private} import jax._src"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_file_asks_python_for_annotations(path):
    """Elsewhere a name that is not there would be an error from Python 3.14 on."""
    asked = re.search(r"inspect\.(signature\(|get_annotations)|get_type_hints|__annotations__", path.read_text())
    assert not asked or path == PACKAGE / "core" / "annotations.py", f"{asked[0]}: see core/annotations.py"


def test_the_bridge_is_imported_when_it_is_asked_for():
    """`nnxlib.bridge` without an import of its own; without flax, an error that says what to install."""
    code = """
import sys
import nnxlib
assert "nnxlib.bridge" not in sys.modules and "flax" not in sys.modules
sys.modules["flax"] = None  # as if it were not installed
for statement in ("nnxlib.bridge", "import nnxlib.bridge", "from nnxlib import bridge"):
    try:
        exec(statement)
    except ImportError as error:
        assert "pip install 'nnxlib[bridge]'" in str(error), error
    else:
        raise AssertionError(statement)
assert not hasattr(nnxlib, "bridges")
"""
    run_python(code)


def unprotected_jumps(code):
    """The lines of jumps back to the start of a loop in a `with` or `try` block that its end does not cover.

    CPython handles interrupts at such a jump. If the last statement of the loop is an `if`, or the loop is a
    comprehension with one (from 3.14 on, also that of `any` or `all`), the compiler leaves its jump out of the table of
    handlers: Ctrl-C then skips the end. (That of a `try` with `except` does not matter, unless it is for a
    BaseException.)
    """
    handlers: list[Any] = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    instructions = list(dis.get_instructions(code))
    begun = {x.offset: instructions[k : k + 5] for k, x in enumerate(instructions)}

    def handlers_of(offset):
        """What the handlers around an instruction begin with, from the innermost on."""
        seen = set()  # one that begins with a loop may be its own
        while found := {x.target for x in handlers if x.start <= offset < x.end} - seen:
            (offset,) = found
            seen.add(offset)
            yield {x.opname for x in begun[offset]}, {x.argval for x in begun[offset]}, begun[offset][0].opname

    def is_within(offset):
        return any(
            first == "PUSH_EXC_INFO" and ("CHECK_EXC_MATCH" not in operations or "BaseException" in names)
            for operations, names, first in handlers_of(offset)
        )

    for jump in instructions:
        if jump.opname.startswith("JUMP_BACKWARD") and is_within(jump.argval) and not any(handlers_of(jump.offset)):
            yield code.co_firstlineno if jump.positions is None else jump.positions.lineno


def codes_in(code):
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes_in(const)


def compiled(source, name="<test>"):
    return list(codes_in(compile(source, name, "exec")))


def test_an_interrupt_in_a_loop_does_not_skip_the_end_of_a_with_block():
    """A lock would be held for ever, or a captured Module keep its tracers."""
    probes = [
        "with lock:\n  for x in y:\n    if x:\n      f(x)\n  g()",
        "with lock:\n  g()\n  z = [x for x in y if f(x)]",
        "try:\n  g()\n  z = [x for x in y if f(x)]\nfinally:\n  h()",
        "try:\n  g()\n  z = [x for x in y if f(x)]\nexcept BaseException:\n  h()",
    ]
    if sys.version_info >= (3, 14):  # the loops of `any` and `all` are in the code around them
        probes.append("try:\n  g()\n  z = any(f(x) for x in y)\nfinally:\n  h()")
    for probe in probes if (3, 12) <= sys.version_info < (3, 15) else ():  # 3.15.2 covers these jumps
        assert [*unprotected_jumps(compiled(probe)[0])] == [3], probe
    found = [
        f"{path.name}:{line}, in {code.co_name}"
        for path in SOURCES
        for code in compiled(path.read_text(), str(path))
        for line in unprotected_jumps(code)
    ]
    assert not found, "move these loops to functions of their own"
