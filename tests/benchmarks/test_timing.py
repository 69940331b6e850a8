"""The measuring code that the benchmarks share."""

import doctest
import gc
import sys
import time
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


def test_main_writes_markdown(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line prints the tables, and keeps them in a file when asked to."""
    table = timing.Table("Times", ["small"], ["raw"], {"small": {"raw": "1.0"}})
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", "--markdown", str(tmp_path / "table.md")])
    quick = []
    timing.main(lambda flag: quick.append(flag) or timing.Report([table], ["A remark."]), "About.", ["jax", "no-such"])
    printed = capsys.readouterr().out
    assert quick == [True]
    assert "no-such not installed" in printed
    assert "A remark." in printed
    assert table.terminal() in printed
    assert table.markdown() in (tmp_path / "table.md").read_text()
