"""Settings and fixtures that all tests share. The tests run on the CPU; JAX reads its settings when first imported."""

import gc
import importlib.metadata
import itertools
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable

import hypothesis
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The programs are small and many: compiling them is most of what the tests do. So it is done with less care, and once.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Python 3.14 compresses the programs differently, and its free-threaded build again, so each build keeps its own.
build = f"{sys.implementation.cache_tag}{sys.abiflags}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "xla" / build))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Without MLIR, XLA compiles a small program in half the time. The setting is gone in 0.11, and an unknown one is fatal.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"

# The first call of a jitted function compiles, so a deadline per example would measure XLA. The same examples are drawn
# at every run, so that a failure is about the change at hand; `HYPOTHESIS_PROFILE=explore` looks for new ones.
hypothesis.settings.register_profile("repeatable", max_examples=16, deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library does for the user, without the walks that NNXLIB_CHECK adds: for tests that count."""
    monkeypatch.setattr("nnxlib.core.live_table.CHECK_ALWAYS", False)


_modules = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Spare the garbage collector what earlier modules left in JAX's caches: some tests collect at every example.

    A compiled program takes a megabyte, and with gigabytes of them JAX needs twice as long for the next one. So they
    are forgotten now and then; after each module would take longer again.
    """
    if next(_modules) % 10 == 0:
        import jax  # once its settings are made

        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def run_on_eight_devices() -> Callable[[pathlib.Path], None]:
    """Return `run(path)`: the tests in that file pass on eight CPU devices, in a process of its own."""

    def run(path: pathlib.Path) -> None:
        environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def load_example() -> Callable[[str, str], types.ModuleType]:
    """Return `load(name, library_import)`: the module docs/examples/`name`, its import of nnxlib replaced by that line.

    `load("digits.py", "from flax import nnx")` is the same script under flax.nnx.
    """

    def load(name: str, library_import: str = "import nnxlib as nnx") -> types.ModuleType:
        path = ROOT / "docs" / "examples" / name
        source = path.read_text()
        assert source.count("\nimport nnxlib as nnx\n") == 1, f"{path} should say `import nnxlib as nnx` once"
        source = source.replace("\nimport nnxlib as nnx\n", f"\n{library_import}\n")
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        exec(compile(source, str(path), "exec"), module.__dict__)
        return module

    return load
