"""Train a small convolutional net on real handwritten digits, save it, and restore it in a new process.

The data are the 1,797 images of 8 x 8 pixels that scikit-learn carries in its package (from the UCI repository), so
nothing is downloaded. Run it, and look into the folder it names:

    pip install "nnxlib[demo]"
    python digits.py --out demo_output
"""

import argparse
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlib as nnx

BATCH = 64


# ---- The model: plain Python objects. The constructor makes the layers, __call__ uses them. ----


class DigitNet(nnx.Module):
    """Two convolutions and two linear layers: images [N, 8, 8, 1] in, one score for each of the ten digits out."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, rngs=rngs)
        self.linear1 = nnx.Linear(4 * 4 * 64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.linear2 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm1(self.conv1(images)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nnx.relu(self.linear1(x.reshape(len(x), -1)))
        return self.linear2(self.dropout(x))


# ---- Training. The jitted step changes weights, moments, batch statistics, random keys and metrics in place. ----


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(model, optimizer, metrics, images, labels):
    def loss_fn(model):
        logits = model(images)
        return cross_entropy(logits, labels), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=logits, labels=labels)
    return loss


@nnx.jit
def predict(model, images):
    return model(images)


def new_training(steps):
    """A fresh model, its optimizer and its metrics, for training in this many steps."""
    model = DigitNet(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(optax.cosine_decay_schedule(3e-3, steps)), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, optimizer, metrics


def batches(images, labels, epoch):
    """The training set in a new random order, in batches of one size."""
    order = np.random.default_rng(epoch).permutation(len(images))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        chosen = order[start : start + BATCH]
        yield images[chosen], labels[chosen]


def train(data, epochs):
    """Train a model on `(train images, held-out images, train labels, held-out labels)`; return it and its history."""
    images, held_images, labels, held_labels = data
    model, optimizer, metrics = new_training(epochs * (len(images) // BATCH))
    history = {"train loss": [], "train accuracy": [], "held-out loss": [], "held-out accuracy": []}
    begin = time.perf_counter()
    for epoch in range(epochs):
        model.train()  # Dropout drops, BatchNorm learns its statistics
        metrics.reset()
        for batch in batches(images, labels, epoch):
            train_step(model, optimizer, metrics, *batch)
        model.eval()  # Dropout passes everything on, BatchNorm keeps its statistics
        logits = predict(model, held_images)
        measured = metrics.compute()
        history["train loss"].append(float(measured["loss"]))
        history["train accuracy"].append(float(measured["accuracy"]))
        history["held-out loss"].append(float(cross_entropy(logits, held_labels)))
        history["held-out accuracy"].append(float(jnp.mean(jnp.argmax(logits, axis=-1) == held_labels)))
        print(
            f"epoch {epoch + 1:2d}/{epochs}  loss {history['train loss'][-1]:.4f}  "
            f"accuracy {history['train accuracy'][-1]:6.1%}  held-out {history['held-out accuracy'][-1]:6.1%}  "
            f"{time.perf_counter() - begin:5.1f} s",
            flush=True,
        )
    return model, history


def load():
    """The digits as float32 images [N, 8, 8, 1] in 0..1 and integer labels, a third of them held out."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    return train_test_split(images, labels, test_size=1 / 3, random_state=0, stratify=labels)


# ---- Saving and restoring. A model is a static part, which its class can make again, and a State of arrays. ----


def is_key(value):
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def save(model, path):
    """Write each array of the model under its path, such as `conv1/kernel`; random keys as their raw bits."""
    _, state = nnx.split(model)
    arrays = {}
    for at, variable in nnx.to_flat_state(state):
        array = variable.get_value()
        arrays["/".join(map(str, at))] = jax.random.key_data(array) if is_key(array) else array
    np.savez(path, **arrays)


def restore(path):
    """Make the model without computing anything, then merge its structure with the saved arrays."""
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: DigitNet(rngs=nnx.Rngs(0))))
    flat = []
    with np.load(path) as saved:
        for at, variable in nnx.to_flat_state(abstract):
            array = jnp.asarray(saved["/".join(map(str, at))])
            array = jax.random.wrap_key_data(array) if is_key(variable) else array
            flat.append((at, variable.replace(array)))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def check_restored(out):
    """Restore the saved model and require the same predictions as from the trained one, bit for bit."""
    _, held_images, _, _ = load()
    model = restore(out / "digits.npz")
    model.eval()
    logits = np.asarray(predict(model, held_images))
    np.testing.assert_array_equal(logits, np.load(out / "logits.npy"))
    print(f"restored in a new process: identical predictions on {len(logits)} held-out digits")


# ---- Pictures. ----


def draw_curves(history, path):
    """Draw loss and accuracy after each epoch, on the training set and on the held-out digits."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    epochs = range(1, len(history["train loss"]) + 1)
    for axis, measure in (loss, "loss"), (accuracy, "accuracy"):
        axis.plot(epochs, history[f"train {measure}"], "o-", markersize=3, color="gray", label="training, with Dropout")
        axis.plot(epochs, history[f"held-out {measure}"], "o-", markersize=3, color="tab:blue", label="held out")
        axis.set(xlabel="epoch", title=measure)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    loss.set_yscale("log")
    accuracy.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    figure.savefig(path, dpi=150)


def draw_misread(logits, images, labels, path):
    """Draw the held-out digits that the model gets wrong, the most confident mistake first."""
    chances = np.asarray(jax.nn.softmax(logits))
    read, chance = chances.argmax(axis=-1), chances.max(axis=-1)
    wrong = sorted(np.flatnonzero(read != labels), key=lambda i: -chance[i])
    rows = max(1, -(-len(wrong) // 6))
    figure = Figure(figsize=(9, 1.95 * rows + 0.4), layout="constrained")
    figure.suptitle(f"{len(wrong)} of {len(labels)} held-out digits are misread")
    axes = figure.subplots(rows, 6, squeeze=False).ravel()
    for axis in axes[len(wrong) :]:
        axis.set_visible(False)
    for axis, i in zip(axes, wrong):
        axis.set(xticks=[], yticks=[])
        axis.imshow(images[i, ..., 0], cmap="gray_r", vmin=0, vmax=1)
        axis.spines[:].set_color("lightgray")
        axis.set_title(f"a {labels[i]}, read as {read[i]}\n({chance[i]:.0%} sure)", fontsize=9)
    figure.savefig(path, dpi=150)


# ---- The whole run. ----


def run(out, epochs):
    """Train, draw, save, and have a new process restore the model and predict again."""
    out.mkdir(parents=True, exist_ok=True)
    data = load()
    model, history = train(data, epochs)
    _, held_images, _, held_labels = data
    logits = predict(model, held_images)
    draw_curves(history, out / "learning_curve.png")
    draw_misread(logits, held_images, held_labels, out / "misread.png")
    save(model, out / "digits.npz")
    np.save(out / "logits.npy", logits)
    subprocess.run([sys.executable, __file__, "--check-restored", "--out", out], check=True)
    accuracy = history["held-out accuracy"][-1]
    print(f"held-out accuracy {accuracy:.2%}; see learning_curve.png, misread.png and digits.npz in {out}/")
    if accuracy < 0.97:
        sys.exit("the held-out accuracy is below the 97% that this model reaches")


def main():
    parser = argparse.ArgumentParser(description="Train a small net on handwritten digits.")
    parser.add_argument("--out", type=pathlib.Path, default="demo_output", help="folder for the pictures and the model")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--check-restored", action="store_true", help="only restore the saved model and compare")
    arguments = parser.parse_args()
    if arguments.check_restored:
        check_restored(arguments.out)
    else:
        run(arguments.out, arguments.epochs)


if __name__ == "__main__":
    main()
