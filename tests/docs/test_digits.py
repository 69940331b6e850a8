"""docs/examples/digits.py, the demo: a short run of its functions on a part of the digits."""

import jax
import numpy as np
import pytest

matplotlib_image = pytest.importorskip("matplotlib.image", reason="the demo draws with matplotlib")
pytest.importorskip("sklearn", reason="the demo's digits come with scikit-learn")


@pytest.fixture(scope="module")
def digits(load_example):
    return load_example("digits.py")


@pytest.fixture(scope="module")
def data(digits):
    """A part of the digits: 512 to train on, 128 held out."""
    images, held_images, labels, held_labels = digits.load()
    return images[:512], held_images[:128], labels[:512], held_labels[:128]


@pytest.fixture(scope="module")
def trained(digits, data):
    return digits.train(data, epochs=6)


def test_data_are_the_whole_set_of_digits(digits):
    """Two thirds of the 1,797 images are for training, with values in 0..1 and labels 0..9."""
    images, held_images, labels, held_labels = digits.load()
    assert images.shape == (1198, 8, 8, 1)
    assert held_images.shape == (599, 8, 8, 1)
    assert (images.min(), images.max()) == (0, 1)
    assert set(labels) == set(held_labels) == set(range(10))


def test_training_learns(trained):
    """A few epochs on a part of the digits take the held-out accuracy from chance to far above it."""
    model, history = trained
    assert history["train loss"][-1] < 0.5 < history["train loss"][0]
    assert history["held-out accuracy"][-1] > 0.8
    assert {len(values) for values in history.values()} == {6}


def test_restored_model_predicts_the_same(digits, data, trained, tmp_path):
    """A model restored from its file is another object with the same predictions, bit for bit."""
    model, _ = trained
    digits.save(model, tmp_path / "digits.npz")
    restored = digits.restore(tmp_path / "digits.npz")
    restored.eval()
    model.eval()
    assert restored is not model
    np.testing.assert_array_equal(digits.predict(restored, data[1]), digits.predict(model, data[1]))


def test_restored_model_trains_on_alike(digits, data, trained, tmp_path):
    """The random keys are saved too: the restored model drops out what the original would."""
    model, _ = trained
    digits.save(model, tmp_path / "digits.npz")
    restored = digits.restore(tmp_path / "digits.npz")
    restored.train()
    model.train()
    np.testing.assert_array_equal(restored(data[1]), model(data[1]))


def test_pictures_are_drawn(digits, trained, tmp_path):
    """The learning curve has lines in both colours, and the sheet shows each misread digit, and only those."""
    _, history = trained
    digits.draw_curves(history, tmp_path / "curve.png")
    curve = matplotlib_image.imread(tmp_path / "curve.png")[..., :3]
    blue = (curve[..., 2] - curve[..., 0]) > 0.3
    assert blue[:, : curve.shape[1] // 2].sum() > 500
    assert blue[:, curve.shape[1] // 2 :].sum() > 500

    labels = np.arange(10)
    images = np.ones((10, 8, 8, 1), np.float32)
    ink = []
    for wrong in (0, 1, 8):
        read = np.where(labels < wrong, (labels + 1) % 10, labels)
        digits.draw_misread(5 * jax.nn.one_hot(read, 10), images, labels, tmp_path / "misread.png")
        sheet = matplotlib_image.imread(tmp_path / "misread.png")[..., :3]
        ink.append((sheet.max(axis=-1) < 0.1).sum())
    assert ink[1] - ink[0] > 10_000
    assert ink[2] - ink[0] == pytest.approx(8 * (ink[1] - ink[0]), rel=0.1)
