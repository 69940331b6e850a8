"""The benchmark of eager use: all do the same work, and ours calls few functions more than raw JAX."""

import math

import pytest

from benchmarks import eager
from benchmarks.timing import Effort, Report, agree, count_calls

# Calls of Python and C functions beside those of raw JAX; what compiles is left out, for it takes seconds.
MOST = {
    "forward, MLP": 1.1,
    "forward, attention": 1.1,
    "grad of the MLP": 1.3,
    "eval_shape, a new function": 1.8,
    "construction": 0.4,
    "abstract construction": 1.0,
}


@pytest.mark.parametrize("name", MOST)
def test_the_work_is_the_same_and_takes_few_calls_more(name: str) -> None:
    """All libraries compute the numbers of raw JAX, and nnxlib calls at most so many functions more."""
    group = eager.WORK[name](eager.load())
    agree(group, steps=2)
    assert count_calls(group[eager.OURS]) <= MOST[name] * count_calls(group[eager.BASE])


@pytest.fixture(scope="module")
def report() -> Report:
    return eager.run(Effort(rounds=1, turn=0.0, warm=0.0), ["forward, MLP", "construction"])


def test_a_quick_run_fills_every_table(report: Report) -> None:
    """There is a table of times and one of calls, with numbers, which are 0.00 if the machine stalls."""
    times, calls = report.tables
    assert times.cells[eager.BASE]["construction"].endswith(" us")
    for table in (times, calls):
        assert all(0 <= float(text.replace(",", "")) < math.inf for text in table.cells[eager.OURS].values())
