"""The demo under nnxlib and, with only its import changed, under flax.nnx."""

import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")
pytest.importorskip("sklearn", reason="the demo's digits come with scikit-learn")
pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")

STEPS = 20


def train_and_predict(digits):
    """The loss of each of the first steps, the final metrics, and the predictions on the held-out digits."""
    images, held_images, labels, _ = digits.load()
    model, optimizer, metrics = digits.new_training(STEPS)
    batches = (batch for epoch in range(10) for batch in digits.batches(images[:256], labels[:256], epoch))
    losses = [float(digits.train_step(model, optimizer, metrics, *next(batches))) for _ in range(STEPS)]
    measured = {name: float(value) for name, value in metrics.compute().items()}
    model.eval()
    return losses, measured, np.asarray(digits.predict(model, held_images))


def test_losses_agree_step_by_step(load_example):
    """The same script under both libraries has the same losses and metrics, up to float32 rounding, and predicts alike.

    The logits of the evaluation are further apart than those of training: a bias before a BatchNorm has a gradient of
    rounding noise only, which Adam scales up to steps of full size; training does not see it, the running mean does.
    """
    losses, measured, logits = train_and_predict(load_example("digits.py"))
    flax_losses, flax_measured, flax_logits = train_and_predict(load_example("digits.py", "from flax import nnx"))
    assert losses[-1] < losses[0] / 2
    np.testing.assert_allclose(losses, flax_losses, rtol=1e-4)
    assert measured == pytest.approx(flax_measured, rel=1e-4)
    np.testing.assert_allclose(logits, flax_logits, atol=0.2)
    assert np.mean(logits.argmax(1) == flax_logits.argmax(1)) > 0.95
