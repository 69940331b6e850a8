"""The benchmark of layers: both libraries do the same work, and the tables are filled with sensible numbers."""

import math

import jax
import pytest

from benchmarks import layers
from benchmarks.timing import Effort, Report, count_calls

RATIO, MICROSECONDS, CALLED = layers.MEASURED
ROWS = {name: layers.LAYERS[name] for name in ("Linear", "Dropout", "avg_pool")}


@pytest.fixture(scope="module")
def report() -> Report:
    return layers.run(ROWS, Effort(rounds=1, turn=0.0, warm=0.0))


def test_a_quick_run_fills_every_table(report: Report) -> None:
    """There is a table for each thing measured, with each kind of work and each layer in it."""
    assert [table.title for table in report.tables] == [RATIO, MICROSECONDS, CALLED]
    for table in report.tables:
        assert table.columns == ["call", "trace", "construct"]
        assert all(set(table.cells[column]) == set(ROWS) for column in table.columns)


def test_the_numbers_are_positive(report: Report) -> None:
    """Times and calls are positive finite numbers. Ratios to flax may be 0.00, if the machine stalls."""
    ratio, *pairs = report.tables
    compared = layers.THEIRS in layers.load()
    for table in pairs:
        for text in (text for cells in table.cells.values() for text in cells.values()):
            own, other = text.replace(",", "").split(" / ")
            assert 0 < float(own) < math.inf
            assert (float(other) > 0) if compared else (other == "-")
    for text in (text for cells in ratio.cells.values() for text in cells.values()):
        assert (float(text) >= 0) if compared else (text == "-")


def test_no_layer_calls_more_python_than_it_should() -> None:
    """A bound on the functions that an eager call enters: 24 when it was set, whatever the machine."""
    work = layers.call(layers.load()[layers.OURS], layers.LAYERS["Linear"])
    work()
    assert count_calls(work) <= 60


@pytest.mark.parametrize("model", [layers.transformer, layers.convolutional])
def test_models_can_be_traced(model) -> None:
    """The models of the table, with one layer, give an output of the shape of their input, or one of logits."""
    row = layers.MODELS["transformer, 12 layers" if model is layers.transformer else "Conv and BatchNorm, 16 times"]
    nnx = layers.load()[layers.OURS]
    out = nnx.eval_shape(lambda x: row.call(model(nnx, nnx.Rngs(0), 1), x), jax.ShapeDtypeStruct(row.shape, row.dtype))
    assert out.shape == (row.shape if model is layers.convolutional else (*row.shape, 8))
