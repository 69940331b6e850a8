"""The dispatch benchmark: every library does the same work, and the tables are filled with sensible numbers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import dispatch
from benchmarks.timing import Effort, Report

CASES = [("read", 4), ("update", 4)]
WATCHED = ("update", 4)
RATIO, MICROSECONDS, CALLED = dispatch.MEASURED


def expected_labels() -> set[str]:
    """The rows that must be filled: all that are installed, but flax, whose releases differ in the forms they have."""
    installed, _ = dispatch.load()
    return {label for label in installed if not label.startswith("flax")}


@pytest.fixture(scope="module")
def report() -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "WATCHED", [WATCHED])
        return dispatch.run(CASES, Effort(rounds=1, turn=0.0, watch=0.0, warm=0.0))


def test_a_quick_run_fills_every_table(report: Report) -> None:
    """There is a table for each thing measured, and a row in each for every library that is installed."""
    assert [table.title for table in report.tables] == [RATIO, MICROSECONDS, CALLED, dispatch.COLLECTED]
    for table in report.tables:
        for column in table.columns:
            assert set(table.cells[column]) >= expected_labels()


def test_ratios_are_finite_and_the_baseline_is_one(report: Report) -> None:
    """Ratios are finite numbers (0.00 if the machine stalls in the baseline), and raw jax.jit has 1."""
    ratio, *_, collected = report.tables
    for table in (ratio, collected):
        for cells in table.cells.values():
            assert cells[dispatch.BASELINE] == "1.00"
            assert all(0 <= float(text) < math.inf for text in cells.values())


@pytest.mark.parametrize("kind", ["train", "train, donated"])
def test_each_adapter_trains_the_same_model(kind: str) -> None:
    """The losses of the train step agree between all installed libraries, and fall, though what is dropped differs."""
    installed, _ = dispatch.load()
    group, _ = dispatch.warm((kind, 10), installed)
    assert set(group) >= expected_labels()
    losses = np.array([group[dispatch.BASELINE]() for _ in range(300)])
    assert losses[-100:].mean() < losses[:100].mean()


def test_a_case_is_measured_with_the_contenders_asked_for() -> None:
    """Those of a case that takes long to compile are fewer; in the others nothing changes."""

    def measured_in(case: dispatch.Case, label: str) -> bool:
        return case[1] < 4 or label in (dispatch.BASELINE, dispatch.CONTROL)

    ratio, *_ = dispatch.run([("read", 2), ("read", 4)], Effort(rounds=1, turn=0.0, warm=0.0), measured_in).tables
    assert set(ratio.cells["read 4"]) == {dispatch.BASELINE, dispatch.CONTROL}
    assert set(ratio.cells["read 2"]) >= expected_labels()


def test_update_changes_every_variable() -> None:
    """The update step of the baseline turns ones into zeros and back, so its sum tells how often it ran."""
    call = dispatch.Raw().update(6)
    np.testing.assert_array_equal([call()[0] for _ in range(3)], [6.0, 0.0, 6.0])


def test_a_form_that_fails_is_reported_and_the_others_are_measured() -> None:
    """A library whose step raises is left out of the group, with the reason."""

    class Broken(dispatch.Raw):
        def read(self, variables: int) -> dispatch.Call:
            raise AttributeError("no such form")

    group, failures = dispatch.warm(("read", 2), {dispatch.BASELINE: dispatch.Raw(), "broken": Broken()})
    assert list(group) == [dispatch.BASELINE]
    assert failures == {"broken": "AttributeError: no such form"}


def test_a_library_that_does_other_work_is_refused() -> None:
    """Times of steps that compute different numbers are never compared."""

    class Lazy(dispatch.Raw):
        def update(self, variables: int, donated: bool = False) -> dispatch.Call:
            return lambda: jnp.zeros(4)

    with pytest.raises(AssertionError, match=r"'lazy' does other work than 'raw jax.jit'"):
        dispatch.warm(("update", 2), {dispatch.BASELINE: dispatch.Raw(), "lazy": Lazy()})
