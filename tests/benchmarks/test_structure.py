"""The benchmark of structural operations: all do the same work, and ours takes few calls for each Variable."""

import math

import jax
import pytest

from benchmarks import structure
from benchmarks.timing import Effort, Report, count_calls

SMALL, LARGE = 40, 400
# Calls of Python and C functions for each Variable, about a third above what they were when this was written.
MOST = {
    "split": 0.1,
    "split into Params and the rest": 0.1,
    "split two models of half the size": 0.1,
    "merge": 1.3,
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


# The same for a transformer: its layers hold some attributes for each Variable, and one of 19 Variables is a key.
MOST_OF_TRANSFORMER = MOST | {
    "split": 0.9,
    "split into Params and the rest": 0.9,
    "split two models of half the size": 1,
    "merge": 2.5,
    "merge of Params and the rest": 5,
    "split, merge, state of the new model": 3.3,
    "update": 3,
    "clone": 160,
    "pop a Variable of each layer": 48,
    "iter_graph": 42,
    "list arrays with paths": 2.6,
    "flatten a Module": 2.6,
}


@pytest.fixture(scope="module", params=[structure.PLAIN, structure.TRANSFORMER], ids=["plain", "transformer"])
def ours(request) -> tuple[dict[str, float], dict[int, dict[str, structure.Call]]]:
    """The most calls for each operation; and the operations, by number of Variables."""
    nnx, model = structure.load()[structure.OURS], request.param
    in_a_layer = len(jax.tree.leaves(model.arrays(1)))
    layers = (SMALL // in_a_layer, LARGE // in_a_layer)
    most = MOST if model is structure.PLAIN else MOST_OF_TRANSFORMER
    return most, {in_a_layer * count: structure.of_graph(nnx, count, model) for count in layers}


@pytest.mark.parametrize("name", structure.OPERATIONS)
def test_operations_are_linear_and_take_few_calls(ours, name: str, unchecked) -> None:
    """Ten times as many Variables take ten times as many calls, and at most so many for each."""
    most, operations = ours
    counts = {}
    for size, calls in operations.items():
        for _ in range(3):  # the layouts are known then, and no check of a table is due
            calls[name]()
        counts[size] = count_calls(calls[name])
    small, large = counts
    added = (counts[large] - counts[small]) / (large - small)
    assert added <= most[name]
    assert counts[small] <= small * added + 500


def test_taking_apart_and_putting_together_holds_little(unchecked) -> None:
    """So many bytes for each Variable at a time: itself, its part of the dict of a node, and a few lists of values.

    They are 279 in Python 3.13, 348 in 3.14, 384 in 3.11, and 417 in 3.15.
    """
    nnx = structure.load()[structure.OURS]
    act = structure.round_trips({structure.OURS: nnx}, LARGE)[structure.OURS]
    assert structure.peak(act) <= 430 * LARGE


@pytest.fixture(scope="module")
def report() -> Report:
    return structure.run([4], 1, Effort(rounds=1, turn=0.0, warm=0.0), ["split", "flatten a Module"])


def test_a_quick_run_fills_every_table(report: Report) -> None:
    """There is a table of times and one of calls for each model, and one of memory, with numbers in each."""
    *timed, memory = report.tables
    assert len(timed) == 4
    for times, calls in (timed[:2], timed[2:]):
        assert list(times.columns) == list(calls.columns) == list(structure.CONTENDERS)
        assert times.cells[structure.BASE]["split"].endswith(" us")
        for cells in (times.cells[structure.OURS], calls.cells[structure.OURS], memory.cells["4"]):
            assert all(0 <= float(text.replace(",", "")) < math.inf for text in cells.values())


@pytest.mark.parametrize("model", [structure.PLAIN, structure.TRANSFORMER], ids=["plain", "transformer"])
def test_all_contenders_do_the_same(model: structure.Model) -> None:
    """Each operation returns the same numbers in every library that is installed, on as many arrays."""
    groups = structure.operations(structure.load(), 2, model)
    count = len(jax.tree.leaves(model.arrays(2)))
    for label, library in structure.load().items():
        made = (model.of_equinox if label == structure.EQUINOX else model.of_nnx)(library, 2)
        assert len([x for x in jax.tree.leaves(made) if isinstance(x, jax.Array)]) == count
    assert list(groups) == list(structure.OPERATIONS)
    for group in groups.values():
        structure.agree(group, steps=2)
