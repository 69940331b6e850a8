"""The benchmark of tracing: the models compute the same, and the tables are filled."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import compile as tracing


def test_the_step_has_the_same_arrays() -> None:
    """Both are lowered, and take about as many."""
    raw = tracing.raw(1, tracing.LOOP)().args_info
    own = tracing.by_modules("nnxlib", 1, tracing.LOOP)().args_info
    assert abs(len(jax.tree.leaves(raw)) - len(jax.tree.leaves(own))) <= 3  # Adam's count, the optimizer's step


def test_raw_attention_is_causal_attention() -> None:
    x = jax.random.normal(jax.random.key(0), (2, tracing.LENGTH, tracing.WIDTH))
    parameters = tracing.raw_parameters(1, False)["blocks"][0]["attention"]
    y = tracing.raw_attention(parameters, x)
    z = tracing.raw_attention(parameters, x.at[:, -1].set(0.0))
    np.testing.assert_allclose(y[:, :-1], z[:, :-1], rtol=1e-5)
    assert not jnp.allclose(y[:, -1], z[:, -1])


def test_a_run_fills_the_tables() -> None:
    ratios, times = tracing.run([(1, tracing.SCANNED)], 1).tables
    assert set(ratios.cells["1 layers, scanned"]) >= {tracing.BASELINE, "nnxlib"}
    assert all(float(text) > 0 for text in ratios.cells["1 layers, scanned"].values())
    assert set(times.cells) == set(ratios.cells)


def test_layers_that_are_computed_again_are() -> None:
    """In both programs."""
    for make in (tracing.raw, lambda layers, how: tracing.by_modules("nnxlib", layers, how)):
        plain, again = (make(2, how)().as_text().count("tanh") for how in (tracing.LOOP, tracing.REMAT))
        assert 0 < plain < again
