"""What importing a library costs on top of JAX.

The idea: a script, a worker and a notebook that starts again pay for each import. So a new interpreter imports JAX with
`jax.numpy`, and then the library, which is timed: that is what a program pays that uses JAX anyway. The baseline is the
import of JAX itself. The contenders take turns. Byte code is written before the first sample, to a folder of its own.

    python -m benchmarks.imports [--quick] [--results FOLDER]
"""

import importlib.util
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from .timing import Report, Table, main

BASELINE = "jax, jax.numpy"
STATEMENTS: Mapping[str, tuple[str, str]] = {  # what is imported before, and what is timed
    BASELINE: ("pass", "import jax, jax.numpy"),
    "nnxlib": ("import jax, jax.numpy", "import nnxlib"),
    "equinox": ("import jax, jax.numpy", "import equinox"),
    "flax": ("import jax, jax.numpy", "from flax import nnx"),
}
ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = "{}\nimport time; start = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"


def seconds(label: str, folder: str) -> float:
    """The time of one import, in a new interpreter that keeps its byte code in ``folder``."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", SCRIPT.format(*STATEMENTS[label])]
    environment = {**kept, "PYTHONPYCACHEPREFIX": folder}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    return float(done.stdout)


def run(rounds: int) -> Report:
    labels = [label for label in STATEMENTS if importlib.util.find_spec(label.partition(",")[0])]
    samples: dict[str, list[float]] = {label: [] for label in labels}
    with tempfile.TemporaryDirectory() as folder:
        for n in range(rounds + 1):
            for label in labels:
                taken = seconds(label, folder)
                if n > 0:  # the first one has compiled the files
                    samples[label].append(taken)
    times = Table("Importing on top of JAX: milliseconds", ["median", "fastest"], labels)
    ratios = Table("Importing on top of JAX: ratio to importing JAX", ["medians"], labels)
    medians = {label: statistics.median(samples[label]) for label in labels}
    times.add("median", {label: f"{1e3 * medians[label]:.0f}" for label in labels})
    times.add("fastest", {label: f"{1e3 * min(samples[label]):.0f}" for label in labels})
    ratios.add("medians", {label: f"{medians[label] / medians[BASELINE]:.3f}" for label in labels})
    return Report([times, ratios], [f"Not installed: {label}." for label in STATEMENTS if label not in labels])


if __name__ == "__main__":
    main(
        lambda options: run(3 if options.quick else 21),
        description=str(__doc__).splitlines()[0],
        packages=["jax", "jaxlib", "nnxlib", "flax", "equinox", "numpy"],
    )
