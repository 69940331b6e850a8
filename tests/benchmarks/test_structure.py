"""The benchmark of structural operations: all do the same work, and ours takes few calls for each Variable."""

import math

import pytest

from benchmarks import structure
from benchmarks.timing import Effort, Report, count_calls

SMALL, LARGE = 40, 400
# Calls of Python and C functions for each Variable, about a third above what they were when this was written.
MOST = {
    "split": 0.1,
    "split into Params and the rest": 0.1,
    "merge": 0.1,
    "merge of Params and the rest": 7,
    "split, merge, state of the new model": 8,
    "state": 0.1,
    "update": 1,
    "clone": 150,  # most of them in JAX, which copies the arrays
    "pop a Variable of each layer": 45,
    "iter_graph": 18,
    "list arrays with paths": 2,
    "flatten a State": 1.5,
    "flatten a Module": 2,
}


@pytest.fixture(scope="module")
def ours() -> dict[int, dict[str, structure.Call]]:
    nnx = structure.load()[structure.OURS]
    return {size: structure.of_graph(nnx, size // 2) for size in (SMALL, LARGE)}


@pytest.mark.parametrize("name", structure.OPERATIONS)
def test_operations_are_linear_and_take_few_calls(ours, name: str, unchecked) -> None:
    """Ten times as many Variables take ten times as many calls, and at most so many for each."""
    counts = {}
    for size, calls in ours.items():
        for _ in range(3):  # the layouts are known then, and no check of a table is due
            calls[name]()
        counts[size] = count_calls(calls[name])
    added = (counts[LARGE] - counts[SMALL]) / (LARGE - SMALL)
    assert added <= MOST[name]
    assert counts[SMALL] <= SMALL * added + 500


def test_taking_apart_and_putting_together_holds_little(unchecked) -> None:
    """So many bytes for each Variable at a time: itself, its part of the dict of a node, and a few lists of values."""
    nnx = structure.load()[structure.OURS]
    act = structure.round_trips({structure.OURS: nnx}, LARGE)[structure.OURS]
    assert structure.peak(act) <= 320 * LARGE


@pytest.fixture(scope="module")
def report() -> Report:
    return structure.run([4], Effort(rounds=1, turn=0.0), ["split", "flatten a Module"])


def test_a_quick_run_fills_every_table(report: Report) -> None:
    """There is a table of times and one of calls for the size, and one of memory, with numbers in each."""
    times, calls, memory = report.tables
    assert list(times.columns) == list(calls.columns) == list(structure.CONTENDERS)
    assert times.cells[structure.BASE]["split"].endswith(" us")
    for cells in (times.cells[structure.OURS], calls.cells[structure.OURS], memory.cells["4"]):
        assert all(0 <= float(text.replace(",", "")) < math.inf for text in cells.values())


def test_all_contenders_do_the_same() -> None:
    """Each operation returns the same numbers in every library that is installed."""
    groups = structure.operations(structure.load(), 4)
    assert list(groups) == list(structure.OPERATIONS)
    for group in groups.values():
        structure.agree(group, steps=2)
