"""The examples under nnxlib and, with only the import changed, under flax.nnx."""

import numpy as np
import pytest

flax_nnx = pytest.importorskip(
    "flax.nnx", reason="flax is not installed (it is not, where it would change the version of JAX)"
)
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
pytest.importorskip("matplotlib", reason="the examples draw with matplotlib")

STEPS = 5
has_rope = pytest.mark.skipif(not hasattr(flax_nnx, "RoPE"), reason="this flax has no rotary positions")


def train_gpt(gpt):
    """The losses of the first steps, and scores on a held-out text. (Decode with rotary positions flax cannot.)"""
    text, held_text = ["\n\n\n".join(gpt.docstrings([module], set())) for module in ("argparse", "calendar")]
    pairs = gpt.learn_pairs(text)
    model, optimizer = gpt.new_training(10 * STEPS, features=16, heads=2, depth=1, dropout=0.2)
    model.train()
    losses = [float(gpt.train_step(model, optimizer, x)) for x in gpt.batches(gpt.encode(text, pairs), STEPS)]
    model.eval()
    return losses, np.asarray(model(gpt.encode(held_text, pairs)[None, :32]))


def train_reader(reader):
    """The losses of the first steps, and what the network then says of some held-out digits."""
    images, held_images, labels, _ = reader.load()
    model, optimizer = reader.new_training(10 * STEPS, features=16)
    batches = (batch for _, batch in zip(range(STEPS), reader.batches(images, labels, 0)))
    model.train()
    losses = [float(reader.train_step(model, optimizer, *batch)) for batch in batches]
    model.eval()
    return losses, np.asarray(reader.predict(model, held_images[:32]))


@pytest.mark.parametrize(
    ("name", "train"),
    [pytest.param("gpt.py", train_gpt, marks=has_rope), ("vit.py", train_reader), ("lstm.py", train_reader)],
    ids=["gpt", "vit", "lstm"],
)
def test_losses_agree_step_by_step(load_example, name, train):
    """The same script under both libraries draws the same numbers: its losses and scores agree up to rounding."""
    losses, scores = train(load_example(name))
    flax_losses, flax_scores = train(load_example(name, "from flax import nnx"))
    np.testing.assert_allclose(losses, flax_losses, rtol=1e-4)
    np.testing.assert_allclose(scores, flax_scores, atol=1e-2)
