"""docs/examples/gpt.py, vit.py and lstm.py: a short run of each, with a small model or on a part of the data."""

from itertools import pairwise

import jax
import numpy as np
import pytest

matplotlib_image = pytest.importorskip("matplotlib.image", reason="the examples draw with matplotlib")


def blue_pixels(path):
    """How much of a picture is drawn in the blue of the held-out curves."""
    picture = matplotlib_image.imread(path)[..., :3]
    return (picture[..., 2] - picture[..., 0] > 0.3).sum()


# --- gpt.py -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt(load_example):
    example = load_example("gpt.py")
    example.LENGTH, example.BATCH = 32, 8
    return example


@pytest.fixture(scope="module")
def text(gpt):
    """The docstrings of one module to train on, and of one held out."""
    seen = set()
    return ["\n\n\n".join(gpt.docstrings([module], seen)) for module in ("argparse", "calendar")]


@pytest.fixture(scope="module")
def pairs(gpt, text):
    return gpt.learn_pairs(text[0])


@pytest.fixture(scope="module")
def trained(gpt, text, pairs):
    tokens, held_tokens = [gpt.encode(part, pairs) for part in text]
    return gpt.train(tokens, held_tokens, steps=30, features=16, heads=2)


def test_gpt_texts_share_no_docstring(gpt):
    """There is much to learn from, and nothing of what is held out is in it."""
    seen = set()
    to_train = list(gpt.docstrings(gpt.MODULES, seen))
    held_out = list(gpt.docstrings(gpt.HELD_OUT, seen))
    assert sum(map(len, to_train)) > 300_000
    assert sum(map(len, held_out)) > 30_000
    assert len(set(to_train + held_out)) == len(to_train) + len(held_out)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5])
def test_gpt_joins_pairs_from_left_to_right(gpt, count):
    """Of overlapping pairs the first is joined, as str.replace does it."""
    text = "b" + "a" * count + "ba"
    for pair in "aa", "ab", "ba":
        joined = gpt.join(gpt.to_bytes(text), tuple(map(ord, pair)), ord("x"))
        assert bytes(joined.astype(np.uint8)).decode() == text.replace(pair, "x")


def test_gpt_tokens_are_the_text(gpt, text, pairs):
    """Tokens give the text back, are fewer than its bytes, and none leads out of a word."""
    tokens = gpt.encode(text[1], pairs)
    assert gpt.decode(tokens, pairs) == text[1].encode("ascii", "replace").decode()
    assert tokens.max() < gpt.VOCABULARY
    assert len(tokens) < 0.6 * len(text[1])
    assert not any(a.isalnum() and b.isspace() for name in gpt.spell(pairs) for a, b in pairwise(name))


def test_gpt_learns(gpt, trained):
    """A few steps bring the loss from above that of a guess to below it, on the held-out text too."""
    _, losses, held_losses = trained
    guess = np.log2(gpt.VOCABULARY)
    assert losses[:3].mean() > guess
    assert losses[-3:].mean() < guess - 0.3
    assert list(held_losses) == list(range(3, 31, 3))
    assert held_losses[30] < guess - 0.3


def test_gpt_writes_the_same_with_and_without_cache(gpt, trained, pairs):
    """Token by token, from a prompt of several tokens; the model itself gets no cache, and writes the same again."""
    model, *_ = trained
    prompt = gpt.encode("Return a list of ", pairs)
    assert len(prompt) > 1
    cached = gpt.write(model, prompt, count=20)
    assert cached.shape == (len(prompt) + 20,)
    np.testing.assert_array_equal(cached, gpt.write_without_cache(model, prompt, count=20))
    np.testing.assert_array_equal(cached, gpt.check_cache(model, prompt, count=20)[0])
    assert model.blocks[0].attention.cached_key is None


def test_gpt_temperature_draws(gpt, trained, pairs):
    """The same seed draws the same text, another seed another one."""
    model, *_ = trained
    prompt = gpt.encode("Return", pairs)
    first, again, other = [gpt.write(model, prompt, 20, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_gpt_draws_its_losses(gpt, trained, tmp_path):
    _, losses, held_losses = trained
    gpt.draw_losses(losses, held_losses, tmp_path / "losses.png")
    assert blue_pixels(tmp_path / "losses.png") > 500


# --- vit.py and lstm.py -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["vit.py", "lstm.py"])
def reader(load_example, request):
    """An example that reads digits."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    return load_example(request.param)


@pytest.fixture(scope="module")
def digits(reader):
    """A part of the digits: 512 to train on, 128 held out."""
    images, held_images, labels, held_labels = reader.load()
    assert (len(images), len(held_images)) == (1198, 599)
    assert (images.min(), images.max()) == (0, 1)
    return images[:512], held_images[:128], labels[:512], held_labels[:128]


@pytest.fixture(scope="module")
def history(reader, digits):
    _, history = reader.train(digits, epochs=12, features=16)
    return history


def test_digits_are_moved_by_up_to_a_pixel(reader, digits):
    """Each image of a batch is one of the nine shifts of a training image with that label."""
    images, _, labels, _ = digits
    moved, moved_labels = next(reader.batches(images, labels, 0))
    assert moved.shape == (64, *images.shape[1:])
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1)] + [(0, 0)] * (images.ndim - 3))
    shifts = [padded[:, i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
    for image, label in zip(moved[:8], moved_labels):
        assert any((shift == image).reshape(len(images), -1).all(axis=1)[labels == label].any() for shift in shifts)


def test_reader_learns(history):
    """A few epochs on a part of the digits lower both losses, and the accuracy rises above chance."""
    assert history["train loss"][-1] < history["train loss"][0] - 0.1
    assert history["held-out loss"][-1] < history["held-out loss"][0] - 0.1
    assert np.ravel(history["held-out accuracy"][-1])[-1] > 0.2
    assert {len(values) for values in history.values()} == {12}


def test_reader_draws_its_curves(reader, history, tmp_path):
    reader.draw_curves(history, tmp_path / "curves.png")
    assert blue_pixels(tmp_path / "curves.png") > 1000


def test_transformer_blocks_differ(load_example):
    """The blocks are stored as one with a leading axis, and each began with keys of its own."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    vit = load_example("vit.py")
    model, _ = vit.new_training(10, features=16)
    kernel = model.blocks.linear1.kernel[...]
    assert kernel.shape == (3, 16, 64)
    assert not np.allclose(kernel[0], kernel[1])
    assert len(np.unique(jax.random.key_data(model.blocks.dropout.rngs.key[...]), axis=0)) == 3


def test_lstm_reads_from_top_to_bottom(load_example):
    """What it says after four rows does not depend on the rows below."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    lstm = load_example("lstm.py")
    model, _ = lstm.new_training(10, features=16)
    model.eval()
    rows = lstm.load()[0][:2]
    below = rows.copy()
    below[:, 4:] = 0
    scores, blind = lstm.predict(model, rows), lstm.predict(model, below)
    np.testing.assert_array_equal(scores[:, :4], blind[:, :4])
    assert not np.allclose(scores[:, 4:], blind[:, 4:])
