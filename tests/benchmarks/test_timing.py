"""The measuring code that the benchmarks share."""

import argparse
import doctest
import gc
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import timing


def test_examples_in_docstrings_run() -> None:
    """The examples give what they say."""
    assert doctest.testmod(timing).failed == 0


def test_measure_tells_slow_from_fast() -> None:
    """A call that sleeps for longer has the larger median, and at least the time it slept."""
    array = jnp.ones(())

    def sleeping(seconds: float) -> timing.Call:
        return lambda: (time.sleep(seconds), array)[1]

    found = timing.measure({"fast": sleeping(0.0005), "slow": sleeping(0.004)}, timing.Effort(rounds=3, turn=0.005))
    assert found["slow"].seconds >= 0.004
    assert 0.0005 <= found["fast"].seconds < found["slow"].seconds


def test_measure_leaves_the_collector_on() -> None:
    """Sampling turns the garbage collector off, and on again also when a call raises."""

    def broken() -> jax.Array:
        assert not gc.isenabled()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        timing.measure({"broken": broken}, timing.QUICK)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_collector_seconds_bills_garbage_to_its_maker() -> None:
    """A call that leaves many cycles pays for collections, a call that leaves nothing does not."""
    array = jnp.ones(())

    def littering() -> jax.Array:
        for _ in range(5000):
            cycle: list = []
            cycle.append(cycle)
        return array

    assert timing.collector_seconds(lambda: array, 0.02) < timing.collector_seconds(littering, 0.02)


def test_count_calls_counts_python_and_c_functions() -> None:
    """Python functions and built-in ones count alike, and the profiler is gone afterwards."""

    array = jnp.ones(())

    def inner() -> jax.Array:
        len("ab")
        return array

    assert timing.count_calls(inner) == 2
    assert timing.count_calls(lambda: (inner(), inner())[1]) == 5
    assert sys.getprofile() is None


def test_main_writes_results(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line prints the tables, and keeps them with a picture when asked to."""
    table = timing.Table("Times", ["small"], ["raw", "slow", "none"], {"small": {"raw": "1.0", "slow": "1,000.0"}})
    arguments = ["--quick", "--sizes", "100", "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    asked = []

    def run(options: argparse.Namespace) -> timing.Report:
        asked.append((options.quick, options.sizes))
        return timing.Report([table], ["A remark."])

    timing.main(run, "About.", ["jax", "no-such"], sizes=[10, 100])
    printed = capsys.readouterr().out
    assert asked == [(True, [100])]
    assert "no-such not installed" in printed
    assert "A remark." in printed
    assert table.terminal() in printed
    assert table.markdown() in (tmp_path / "results" / "benchmark.md").read_text()
    picture = xml.etree.ElementTree.parse(tmp_path / "results" / "benchmark.svg").getroot()
    assert picture.tag.endswith("svg")


def test_a_call_is_prepared_outside_of_the_time() -> None:
    """What prepares a call runs before each, and its time is not counted."""
    prepared, array = [], jnp.ones(())

    def prepare() -> None:
        prepared.append(1)
        time.sleep(0.002)

    call = timing.Prepared(lambda: array, prepare)
    measured = timing.measure({"call": call}, timing.Effort(rounds=2, turn=0.005))
    assert len(prepared) >= 4
    assert measured["call"].seconds < 0.001
