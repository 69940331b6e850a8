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


# Python and C functions that an eager call of a layer, and its construction, call: a tenth to a quarter above what they
# were when this was written, with Python 3.11 and JAX 0.8 or with 3.13 and 0.12, whichever took more.
MOST = {
    "Linear": (40, 1_380),
    "LinearGeneral": (66, 1_620),
    "Einsum": (690, 1_530),
    "Embed": (52, 1_430),
    "Conv": (80, 1_710),
    "ConvTranspose": (58, 1_590),
    "BatchNorm, training": (121, 1_640),
    "BatchNorm, evaluation": (79, 1_640),
    "LayerNorm": (85, 1_430),
    "RMSNorm": (72, 1_280),
    "GroupNorm": (92, 1_450),
    "InstanceNorm": (80, 1_400),
    "SpectralNorm(Linear)": (360, 2_280),
    "WeightNorm(Linear)": (340, 2_100),
    "Dropout": (67, 1_310),
    "PReLU": (37, 1_120),
    "MultiHeadAttention": (380, 4_930),
    "SimpleCell": (113, 2_800),
    "LSTMCell": (307, 7_730),
    "OptimizedLSTMCell": (109, 2_990),
    "GRUCell": (101, 2_990),
    "RNN(GRUCell)": (650, 3_900),
    "LoRA": (24, 1_280),
    "LoRALinear": (67, 1_920),
    "Sequential(Linear, relu, Linear)": (94, 2_220),
    "avg_pool": (180, 393),
    "max_pool": (118, 393),
}


@pytest.mark.parametrize("name", layers.LAYERS)
def test_no_layer_calls_more_python_than_it_should(name: str, unchecked) -> None:
    """A bound on the functions that an eager call enters, and a construction, whatever the machine."""
    nnx, row, counts = layers.load()[layers.OURS], layers.LAYERS[name], []
    for kind in layers.call, layers.construct:
        work = kind(nnx, row)
        for _ in range(10):  # after the 8th no check of what is remembered is due
            work()
        counts.append(count_calls(work))
    assert counts[0] <= MOST[name][0]
    assert counts[1] <= MOST[name][1]


@pytest.mark.parametrize("model", [layers.transformer, layers.convolutional])
def test_models_can_be_traced(model) -> None:
    """The models of the table, with one layer, give an output of the shape of their input, or one of logits."""
    row = layers.MODELS["transformer, 12 layers" if model is layers.transformer else "Conv and BatchNorm, 16 times"]
    nnx = layers.load()[layers.OURS]
    out = nnx.eval_shape(lambda x: row.call(model(nnx, nnx.Rngs(0), 1), x), jax.ShapeDtypeStruct(row.shape, row.dtype))
    assert out.shape == (row.shape if model is layers.convolutional else (*row.shape, 8))
