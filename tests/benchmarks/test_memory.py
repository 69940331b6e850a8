"""The benchmark of memory: a train step takes what raw JAX takes, a reading step returns nothing.

Nested remat grows with the square root of the depth."""

import pytest

from benchmarks import memory
from benchmarks.timing import Effort


@pytest.mark.parametrize("donated", [False, True])
def test_a_train_step_takes_the_memory_of_raw_jax(donated: bool) -> None:
    own, raw = (memory.megabytes(memory.TRAIN[label](donated)) for label in ("nnxlib, nnx.jit", memory.RAW))
    assert own <= raw + 0.001  # the optimizer's count of steps


def test_a_step_that_reads_a_layer_of_36_megabytes_returns_a_number() -> None:
    call, planned = memory.READ["nnxlib, nnx.jit"]()
    assert planned.output_size_in_bytes == call().nbytes == 4
    assert planned.temp_size_in_bytes < 100_000


def test_nested_remat_grows_with_the_square_root_of_the_depth() -> None:
    kept = {depth: memory.activations_kept(depth, memory.ways(depth)["remat_scan"]) for depth in (16, 64)}
    assert kept[64] < 2.2 * kept[16]
    assert kept[64] < memory.activations_kept(64, remat=True) / 2


def test_all_tables_are_filled() -> None:
    for table in memory.run((4,), Effort(rounds=1, turn=0.0, warm=0.0)).tables:
        header, *lines = table.lines()
        assert header == ["", *table.columns]
        rows = [row for row in table.rows if row in memory.installed(dict.fromkeys(table.rows))]
        assert all(float(text.replace(",", "")) >= 0 for row, *cells in lines if row in rows for text in cells)
