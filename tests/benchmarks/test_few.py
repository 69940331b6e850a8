"""The benchmark of steps that touch little: all kinds of call give the same numbers, and the tables are filled."""

import math

import numpy as np
import pytest

from benchmarks import few
from benchmarks.timing import Effort, agree


@pytest.mark.parametrize("kind", few.kinds_of_call(4))
def test_each_kind_of_call_does_the_work(kind: str) -> None:
    """The sum of the kernel comes out, at each of several calls, by nnxlib and by raw JAX."""
    own, exact = few.kinds_of_call(4)[kind]
    agree({"exact": exact, "own": own})


def test_the_step_changes_one_variable() -> None:
    """The bias of the second layer, and no other."""
    model = few.model_of(4)
    few.few(model)
    changed = [[float(v[0]) for v in (layer.kernel, layer.bias)] for layer in model.layers]
    np.testing.assert_array_equal(changed, [[1.0, 1.0], [1.0, 0.0]])


def test_a_quick_run_fills_the_tables() -> None:
    compared, microseconds, alone, calls = few.run((4,), Effort(rounds=1, turn=0.0, warm=0.0)).tables
    for table in (compared, microseconds):
        for cells in table.cells.values():
            assert {few.EXACT, few.ALL, few.LABELS[0]} <= set(cells)
    for table in (compared, microseconds, alone, calls):
        values = [float(text.replace(",", "")) for cells in table.cells.values() for text in cells.values()]
        assert all(0 <= value < math.inf for value in values)  # a ratio is 0.00 if the machine stalls in one of both
