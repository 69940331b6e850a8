"""Time several implementations of the same work side by side, and show the result as ratios.

The idea: a time in microseconds belongs to one machine at one moment, a ratio of two times taken in turn in one process
means something elsewhere. So everything here works on a *group* of calls that do the same work, by label:

- a `Call` does the work once and returns one array that is ready only when the work is done;
- `agree` refuses a group whose members do not compute the same numbers;
- `measure` gives each member of a group a `Measurement`, and `collector_seconds` what its garbage costs;
- `in_new_process` keeps one measurement from leaving its traces in the next;
- a `Table` holds the cells of one comparison and renders for the terminal and as Markdown;
- `main` is the command line that all benchmarks share.

The contract of `measure`: all members are warm before the first sample, each called for 0.3 s. They take turns, in a
new random order each round; a turn starts with a call that is not counted, so that none is billed for the cache misses
another left behind. Every sample is one call *and* the wait for its array, and comes a `PAUSE` after the one before, as
in a loop that fetches a batch between its steps: a call within a few microseconds of the last is handed over to XLA's
thread twice as fast, or not, by chance. A collection of garbage falls on whoever happens to run, so the collector is
off while sampling. A shared machine becomes twice as slow for seconds, and all of a sudden: so ratios are taken within
each round, and the median of these counts.
"""

import argparse
import concurrent.futures
import contextlib
import gc
import importlib
import importlib.metadata
import multiprocessing
import operator
import os
import pathlib
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np

# A donated train step of 10 Variables, raw jax.jit on two cores: 35 us without a pause, and at times 55; after a pause
# of 5 us 36 to 68, of 10 to 80 us 65 to 79.
PAUSE = 20e-6

T = TypeVar("T")
Call = Callable[[], jax.Array]


class Prepared:
    """A call that is prepared before, each time; preparing is neither timed nor counted."""

    def __init__(self, call: Call, prepare: Callable[[], None]):
        self.call, self.prepare = call, prepare

    def __call__(self) -> jax.Array:
        self.prepare()
        return self.call()


def _parts(call: Call) -> tuple[Callable[[], None], Call]:
    """What prepares a call, and what is measured of it."""
    return (call.prepare, call.call) if isinstance(call, Prepared) else (lambda: None, call)


@dataclass(frozen=True)
class Effort:
    """How long to measure: the number of rounds; the seconds of one turn, to watch the collector, and to warm up."""

    rounds: int = 15
    turn: float = 0.02  # five times shorter ones showed raw jax.jit over 1,000 arrays a quarter slower: cold caches
    watch: float = 1.5  # a full pass of the collector comes once a second or so
    warm: float = 0.3  # nnxlib checks the uses number 2, 4, 8... of what it remembers, which may take as long as a turn


QUICK = Effort(rounds=5, turn=0.001, watch=0.1, warm=0.001)


@dataclass(frozen=True)
class Measurement:
    """What one call costs.

    Attributes:
      seconds: the median of all samples.
      spread: their interquartile range, over the median.
      calls: the functions called.
      rounds: the median of each round, in seconds.
    """

    seconds: float
    spread: float
    calls: int
    rounds: Sequence[float]

    def over(self, other: "Measurement") -> float:
        """The :func:`ratio_of_rounds` to another member of the group.

        >>> slow_at_last = [1.0, 1.0, 3.0]
        >>> base = Measurement(1.0, 0.0, 1, slow_at_last)
        >>> Measurement(2.0, 0.0, 1, [2 * seconds for seconds in slow_at_last]).over(base)
        2.0
        """
        return ratio_of_rounds(self.rounds, other.rounds)


def ratio_of_rounds(own: Sequence[float], other: Sequence[float]) -> float:
    """The median of the ratios of two that took turns, round by round."""
    return statistics.median(map(operator.truediv, own, other))


def agree(group: Mapping[str, Call], steps: int = 3, tolerance: float = 1e-3) -> None:
    """Run each call of the group `steps` times and raise AssertionError if one gives other numbers than the first."""
    results = {label: [np.asarray(call()) for _ in range(steps)] for label, call in group.items()}
    (reference, expected), *others = results.items()
    for label, found in others:
        message = f"{label!r} does other work than {reference!r}"
        np.testing.assert_allclose(found, expected, rtol=tolerance, err_msg=message)


def measure(group: Mapping[str, Call], effort: Effort) -> dict[str, Measurement]:
    """Measure each call of a group, in turns, after it has been called for a while."""
    with _collector_off():
        for call in group.values():
            _turn(call, effort.warm)
        samples = _sample_in_turns(group, effort)
        counts = {label: _counted(call) for label, call in group.items()}
    return {label: _measurement(samples[label], counts[label]) for label in group}


def in_new_process(f: Callable[..., T], *args: Any) -> T:
    """Call a function of a module in a process of its own; what goes in and out is pickled.

    In a process that has measured other cases before, raw jax.jit over 1,000 arrays took 3.9 ms, in a new one 2.3 ms.
    """
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(f, *args).result()


def _measurement(rounds: Sequence[Sequence[float]], calls: int) -> Measurement:
    samples = [seconds for taken in rounds for seconds in taken]
    return Measurement(
        statistics.median(samples), _spread(samples), calls, [statistics.median(taken) for taken in rounds]
    )


def _sample_in_turns(group: Mapping[str, Call], effort: Effort) -> dict[str, list[list[float]]]:
    samples: dict[str, list[list[float]]] = {label: [] for label in group}
    order = list(group)
    shuffle = random.Random(0).shuffle
    for _ in range(effort.rounds):
        shuffle(order)
        for label in order:
            samples[label].append(_turn(group[label], effort.turn))
            gc.collect()
    return samples


def _turn(call: Call, seconds: float) -> list[float]:
    clock = time.perf_counter
    call().block_until_ready()
    samples = []
    prepare, call = _parts(call)
    end = clock() + seconds
    while not samples or clock() < end:
        prepare()
        _pause()
        start = clock()
        call().block_until_ready()
        samples.append(clock() - start)
    return samples


def _pause() -> None:
    end = time.perf_counter() + PAUSE
    while time.perf_counter() < end:
        pass


def _counted(call: Call) -> int:
    """The calls of one call; the fewer of two, for nnxlib checks the uses number 2, 4, 8... of what it remembers."""
    prepare, call = _parts(call)
    counts = []
    for _ in range(2):
        prepare()
        counts.append(count_calls(call))
    return min(counts)


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Turn automatic collection off; what is alive now is set aside, so that collecting by hand takes no time."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _spread(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    lower, median, upper = statistics.quantiles(samples, n=4)
    return (upper - lower) / median


def collector_seconds(call: Call, seconds: float) -> float:
    """Return the mean time per call that the garbage collector takes at Python's own settings, watched for `seconds`.

    Timed between the collector's callbacks: a median of whole calls would hide it, a mean would drown it in noise.
    """
    clock = time.perf_counter
    spent, started = 0.0, 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal spent, started
        if phase == "start":
            started = clock()
        else:
            spent += clock() - started

    gc.collect()
    gc.callbacks.append(note)
    count, end = 0, clock() + seconds
    try:
        while not count or clock() < end:
            call().block_until_ready()
            count += 1
    finally:
        gc.callbacks.remove(note)
    return spent / count


def count_calls(call: Call) -> int:
    """Count the Python and C functions that one call enters, itself included, as far as `sys.setprofile` sees them.

    The garbage collector is off meanwhile: JAX has it call Python.

    >>> count_calls(lambda: abs(-1) + len("ab"))
    3
    """
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    was_enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        if was_enabled:
            gc.enable()
    return count - 1  # the sys.setprofile that ends the count


@dataclass
class Table:
    """A title, columns, rows, and the texts of the cells by column and row; a missing cell shows as a dash.

    >>> table = Table("Times", ["small", "large"], ["raw", "ours"])
    >>> table.add("small", {"raw": "1.0", "ours": "1.1"})
    >>> print(table.markdown())
    **Times**
    <BLANKLINE>
    | | small | large |
    |---|---:|---:|
    | raw | 1.0 | - |
    | ours | 1.1 | - |
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def add(self, column: str, cells: Mapping[str, str]) -> None:
        """Fill a column with texts by row."""
        self.cells[column] = cells

    def lines(self) -> list[list[str]]:
        """Return the header and the rows as lists of text."""
        filled = [self.cells.get(column, {}) for column in self.columns]
        return [["", *self.columns]] + [[row, *(cells.get(row, "-") for cells in filled)] for row in self.rows]

    def terminal(self) -> str:
        """Return the table with aligned columns."""
        lines = self.lines()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = [
            "  ".join([label.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip() for label, *cells in lines
        ]
        return "\n".join([self.title, *aligned])

    def markdown(self) -> str:
        """Return the table as Markdown."""
        header, *body = ("| " + " | ".join(line) + " |" for line in self.lines())
        rule = "|---|" + "---:|" * len(self.columns)
        return "\n".join([f"**{self.title}**", "", header.replace("|  |", "| |", 1), rule, *body])


def environment(packages: Sequence[str]) -> list[str]:
    """Return lines that say which versions ran, and on what."""
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    device = jax.devices()[0]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return [
        f"Python {platform.python_version()}, {versions}",
        f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores, load {load}; "
        f"JAX on {device.platform} ({device.device_kind})",
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return getattr(importlib.import_module(package), "__version__", "from source")
    except ImportError:
        return "not installed"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


@dataclass(frozen=True)
class Report:
    """What a benchmark has to say: its tables, and remarks in plain sentences."""

    tables: Sequence[Table]
    remarks: Sequence[str] = ()


def main(
    run: Callable[[argparse.Namespace], Report], description: str, packages: Sequence[str], sizes: Sequence[int] = ()
) -> None:
    """Run a benchmark from the command line: `--quick` for a rough look, `--results FOLDER` to keep the tables.

    A folder gets a Markdown file of all tables, with versions and machine, and a picture of the first, named like the
    benchmark. A benchmark that measures several `sizes` of a model is told by `--sizes` which ones, if not all.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a few seconds: less work and fewer samples")
    parser.add_argument(
        "--results", type=pathlib.Path, metavar="FOLDER", help="write the tables and a picture to FOLDER"
    )
    if sizes:
        parser.add_argument(
            "--sizes", type=int, nargs="+", default=sizes, metavar="N", help="the numbers of Variables to measure"
        )
    options = parser.parse_args()
    start = time.perf_counter()
    about = environment(packages)
    report = run(options)
    remarks = [*report.remarks, f"Measured in {time.perf_counter() - start:.0f} s."]
    print("\n\n".join(["\n".join(about), *(table.terminal() for table in report.tables), "\n".join(remarks)]))
    if options.results:
        name = pathlib.Path(sys.argv[0]).stem
        text = "\n\n".join([*about, *(table.markdown() for table in report.tables), *remarks])
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / f"{name}.md").write_text(
            f"# {description}\n\n![{report.tables[0].title}]({name}.svg)\n\n{text}\n"
        )
        draw(report.tables[0], options.results / f"{name}.svg")


def draw(table: Table, path: pathlib.Path) -> None:
    """Draw the numbers of a table as bars on a logarithmic scale, a panel for each column, and save the picture."""
    import matplotlib.pyplot as plt  # only here: the other benchmarks do without it

    columns = [column for column in table.columns if column in table.cells]
    figure, axes = plt.subplots(
        1, len(columns), figsize=(2.6 + 1.5 * len(columns), 0.9 + 0.28 * len(table.rows)), sharey=True, squeeze=False
    )
    for axis, column in zip(axes[0], columns, strict=True):
        found = {row: text for row, text in table.cells[column].items() if text != "-"}
        values = [float(found[row].replace(",", "").split()[0]) if row in found else 0.0 for row in table.rows]
        colours = ["tab:blue" if row.startswith("nnxlib") else "0.7" for row in table.rows]
        axis.barh(range(len(table.rows)), values, color=colours)
        for k, row in enumerate(table.rows):
            axis.text(max(values[k], 1), k, f" {found.get(row, '-')}", va="center", fontsize=7)
        axis.set(xscale="log", xlim=(0.8, 20 * max(values)), xticks=[], yticks=range(len(table.rows)))
        axis.set_yticklabels(table.rows, fontsize=8)
        axis.set_title(column, fontsize=8)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.minorticks_off()
    axes[0][0].invert_yaxis()
    figure.suptitle(table.title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
