"""The benchmark of importing: what is timed is the library alone, and the table is filled."""

from benchmarks import imports


def test_a_run_fills_the_tables() -> None:
    times, ratios = imports.run(1).tables
    assert set(times.cells) == {"median", "fastest"}
    assert ratios.cells["medians"][imports.BASELINE] == "1.000"
    assert 0 < float(ratios.cells["medians"]["nnxlib"]) < 1
