"""Train an LSTM to read handwritten digits row by row, and to guess the digit after each row.

The network sees one row of eight pixels at a time, from top to bottom, and keeps in memory what it needs of the rows
before (Hochreiter & Schmidhuber, "Long short-term memory", 1997). The data are the 1,797 images of 8 x 8 pixels that
scikit-learn carries in its package, so nothing is downloaded. Run it, and look into the folder it names:

    pip install "nnxlib[demo]"
    python lstm.py --out lstm_output
"""

import argparse
import pathlib
import sys
import time

import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlib as nnx

BATCH = 64


# ---- The model. ----


class RowReader(nnx.Module):
    """Rows [N, 8, 8] in; after each row, one score for each of the ten digits out: [N, 8, 10]."""

    def __init__(self, rngs: nnx.Rngs, features: int = 128):
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(8, features, rngs=rngs))
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.scores = nnx.Linear(features, 10, rngs=rngs)

    def __call__(self, rows):
        return self.scores(self.dropout(self.rnn(rows)))


# ---- Training. ----


def cross_entropy(scores, labels):
    """Mean over images and rows: after each row the network is asked for the same digit."""
    labels = jnp.broadcast_to(labels[:, None], scores.shape[:2])
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


@nnx.jit
def train_step(model, optimizer, rows, labels):
    def loss_fn(model):
        return cross_entropy(model(rows), labels)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def predict(model, rows):
    return model(rows)


def new_training(steps, **sizes):
    """A fresh model and its optimizer, for training in this many steps."""
    model = RowReader(rngs=nnx.Rngs(0), **sizes)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-2, steps)))
    return model, nnx.Optimizer(model, adam, wrt=nnx.Param)


def batches(rows, labels, epoch):
    """The training set in a new random order, in batches of one size, each image moved by up to a pixel."""
    random = np.random.default_rng(epoch)
    order = random.permutation(len(rows))
    padded = np.pad(rows, ((0, 0), (1, 1), (1, 1)))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        chosen = order[start : start + BATCH]
        down, right = random.integers(3, size=(2, BATCH, 1, 1))
        moved = padded[chosen[:, None, None], down + np.arange(8)[:, None], right + np.arange(8)]
        yield moved, labels[chosen]


def train(data, epochs, **sizes):
    """Train a model on `(train rows, held-out rows, train labels, held-out labels)`; return it and its history.

    The held-out accuracy has one number for each row: the share of right answers after so many rows.
    """
    rows, held_rows, labels, held_labels = data
    model, optimizer = new_training(epochs * (len(rows) // BATCH), **sizes)
    history = {"train loss": [], "held-out loss": [], "held-out accuracy": []}
    begin = time.perf_counter()
    for epoch in range(1, epochs + 1):
        model.train()  # dropout is on
        losses = [train_step(model, optimizer, *batch) for batch in batches(rows, labels, epoch)]
        model.eval()  # dropout is off
        scores = predict(model, held_rows)
        right = np.asarray(scores.argmax(axis=-1)) == held_labels[:, None]
        history["train loss"].append(float(np.mean(losses)))
        history["held-out loss"].append(float(cross_entropy(scores, held_labels)))
        history["held-out accuracy"].append(right.mean(axis=0))
        if epoch % max(1, epochs // 15) == 0:
            print(
                f"epoch {epoch:2d}/{epochs}  loss {history['train loss'][-1]:.4f}  "
                f"held-out after 4 rows {right[:, 3].mean():6.1%}, after all {right[:, -1].mean():6.1%}  "
                f"{time.perf_counter() - begin:5.1f} s",
                flush=True,
            )
    return model, history


def load():
    """The digits as float32 rows [N, 8, 8] in 0..1 and integer labels, a third of them held out."""
    pixels, labels = load_digits(return_X_y=True)
    rows = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
    labels = labels.astype(np.int32)
    return train_test_split(rows, labels, test_size=1 / 3, random_state=0, stratify=labels)


# ---- Picture. ----


def draw_curves(history, path):
    """Draw the losses after each epoch, and the accuracy of the trained network after each row."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    epochs = range(1, len(history["train loss"]) + 1)
    loss.plot(epochs, history["train loss"], color="gray", label="training, moved and with Dropout")
    loss.plot(epochs, history["held-out loss"], color="tab:blue", label="held out")
    loss.set(xlabel="epoch", title="loss, mean over the rows", ylim=(0, None))
    loss.legend(frameon=False, loc="upper right")
    by_row = history["held-out accuracy"][-1]
    accuracy.plot(range(1, 9), by_row, "o-", markersize=3, color="tab:blue")
    for row, share in enumerate(by_row, 1):
        accuracy.annotate(f"{share:.0%}", (row, share), (0, 6), textcoords="offset points", ha="right", fontsize=8)
    accuracy.set(xlabel="rows read, of 8", title="held-out accuracy", xlim=(0.4, 8.4), ylim=(0, 1.1))
    accuracy.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axis in loss, accuracy:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# ---- The whole run. ----


def run(out, epochs):
    """Train, draw, and say how many of the held-out digits it gets right."""
    out.mkdir(parents=True, exist_ok=True)
    _, history = train(load(), epochs)
    draw_curves(history, out / "learning_curve.png")
    accuracy = history["held-out accuracy"][-1][-1]
    print(f"held-out accuracy after all rows {accuracy:.2%}; see learning_curve.png in {out}/")
    if accuracy < 0.95:
        sys.exit("the held-out accuracy is below the 95% that this model reaches")


def main():
    parser = argparse.ArgumentParser(description="Train an LSTM to read handwritten digits row by row.")
    parser.add_argument("--out", type=pathlib.Path, default="lstm_output", help="folder for the picture")
    parser.add_argument("--epochs", type=int, default=90)
    arguments = parser.parse_args()
    run(arguments.out, arguments.epochs)


if __name__ == "__main__":
    main()
