"""Train a small Vision Transformer on real handwritten digits.

An image becomes a sequence of patches, and a transformer reads it (Dosovitskiy et al., "An image is worth 16x16 words",
https://arxiv.org/abs/2010.11929). The blocks of the transformer are stored as one block with a leading axis, which
nnx.vmap makes and nnx.scan applies, so that they are compiled once, however many they are. The data are the 1,797
images of 8 x 8 pixels that scikit-learn carries in its package, so nothing is downloaded. Run it, and look into the
folder it names:

    pip install "nnxlib[demo]"
    python vit.py --out vit_output
"""

import argparse
import pathlib
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


# ---- The model. ----


class Block(nnx.Module):
    """Attention between all patches, then two linear layers; each adds to its input [N, patches, features]."""

    def __init__(self, features: int, heads: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, features, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(features, rngs=rngs)
        self.linear1 = nnx.Linear(features, 4 * features, rngs=rngs)
        self.linear2 = nnx.Linear(4 * features, features, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.linear2(nnx.gelu(self.linear1(self.norm2(x)))))


class VisionTransformer(nnx.Module):
    """Images [N, 8, 8, 1] in, one score for each of the ten digits out."""

    def __init__(self, rngs: nnx.Rngs, features: int = 64, heads: int = 4, depth: int = 3):
        self.patches = nnx.Conv(1, features, kernel_size=(2, 2), strides=(2, 2), rngs=rngs)
        self.positions = nnx.Param(0.5 * jax.random.normal(rngs.params(), (16, features)))

        @nnx.split_rngs(splits=depth)
        @nnx.vmap
        def make_blocks(rngs):  # each block with its own keys; nnx.Stack makes and applies blocks in one line
            return Block(features, heads, rngs)

        self.blocks = make_blocks(rngs)
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.scores = nnx.Linear(features, 10, rngs=rngs)

    def __call__(self, images):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply_blocks(block, x):
            return block(x)

        x = self.patches(images)  # [N, 4, 4, features]
        x = x.reshape(len(x), 16, -1) + self.positions[...]
        x = apply_blocks(self.blocks, x)
        return self.scores(self.norm(x).mean(axis=1))


# ---- Training. ----


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(model, optimizer, images, labels):
    def loss_fn(model):
        return cross_entropy(model(images), labels)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def predict(model, images):
    return model(images)


def new_training(steps, **sizes):
    """A fresh model and its optimizer, for training in this many steps."""
    model = VisionTransformer(rngs=nnx.Rngs(0), **sizes)
    rate = optax.warmup_cosine_decay_schedule(0, 3e-3, steps // 10, steps)
    return model, nnx.Optimizer(model, optax.adamw(rate, weight_decay=0.05), wrt=nnx.Param)


def batches(images, labels, epoch):
    """The training set in a new random order, in batches of one size, each image moved by up to a pixel."""
    random = np.random.default_rng(epoch)
    order = random.permutation(len(images))
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        chosen = order[start : start + BATCH]
        down, right = random.integers(3, size=(2, BATCH, 1, 1))
        moved = padded[chosen[:, None, None], down + np.arange(8)[:, None], right + np.arange(8)]
        yield moved, labels[chosen]


def train(data, epochs, **sizes):
    """Train a model on `(train images, held-out images, train labels, held-out labels)`; return it and its history."""
    images, held_images, labels, held_labels = data
    model, optimizer = new_training(epochs * (len(images) // BATCH), **sizes)
    history = {"train loss": [], "held-out loss": [], "held-out accuracy": []}
    begin = time.perf_counter()
    for epoch in range(1, epochs + 1):
        model.train()  # dropout is on
        losses = [train_step(model, optimizer, *batch) for batch in batches(images, labels, epoch)]
        model.eval()  # dropout is off
        logits = predict(model, held_images)
        history["train loss"].append(float(np.mean(losses)))
        history["held-out loss"].append(float(cross_entropy(logits, held_labels)))
        history["held-out accuracy"].append(float(jnp.mean(jnp.argmax(logits, axis=-1) == held_labels)))
        if epoch % max(1, epochs // 15) == 0:
            print(
                f"epoch {epoch:2d}/{epochs}  loss {history['train loss'][-1]:.4f}  "
                f"held-out {history['held-out loss'][-1]:.4f}, {history['held-out accuracy'][-1]:6.1%}  "
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


# ---- Picture. ----


def draw_curves(history, path):
    """Draw the losses and the held-out accuracy after each epoch."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    epochs = range(1, len(history["train loss"]) + 1)
    loss.plot(epochs, history["train loss"], color="gray", label="training, moved and with Dropout")
    loss.plot(epochs, history["held-out loss"], color="tab:blue", label="held out")
    loss.set(xlabel="epoch", title="loss", yscale="log")
    loss.legend(frameon=False)
    accuracy.plot(epochs, history["held-out accuracy"], color="tab:blue")
    accuracy.set(xlabel="epoch", title="held-out accuracy")
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
    accuracy = history["held-out accuracy"][-1]
    print(f"held-out accuracy {accuracy:.2%}; see learning_curve.png in {out}/")
    if accuracy < 0.95:
        sys.exit("the held-out accuracy is below the 95% that this model reaches")


def main():
    parser = argparse.ArgumentParser(description="Train a small Vision Transformer on handwritten digits.")
    parser.add_argument("--out", type=pathlib.Path, default="vit_output", help="folder for the picture")
    parser.add_argument("--epochs", type=int, default=32)
    arguments = parser.parse_args()
    run(arguments.out, arguments.epochs)


if __name__ == "__main__":
    main()
