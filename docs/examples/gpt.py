"""Train a small GPT on Python's own documentation, and let it write more.

The text is half a million bytes, the docstrings of modules of the standard library as this Python carries them, so
nothing is downloaded. Frequent pairs of bytes become tokens (Sennrich et al., https://arxiv.org/abs/1508.07909). The
model is a decoder with pre-norm blocks, rotary positions, and one matrix to embed tokens and to score them. It writes
with a cache of keys and values, and the script checks that it writes the same text without one. Run it, and look into
the folder it names:

    pip install "nnxlib[demo]"
    python gpt.py --out gpt_output
"""

import argparse
import functools
import importlib
import inspect
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import nnxlib as nnx

MODULES = """argparse asyncio collections csv datetime decimal email.message fractions functools heapq inspect itertools
    json logging os pathlib random re shutil socket statistics string subprocess tarfile threading unittest""".split()
HELD_OUT = "calendar configparser http.client zipfile".split()
BYTES = 128  # ASCII
VOCABULARY = 512
LENGTH, BATCH = 64, 16


# ---- The model. It knows nothing of decoding: attention keeps the cache, and the cache knows the positions. ----


class Block(nnx.Module):
    """Attention to earlier tokens, then two linear layers; each adds to its input [N, length, features]."""

    def __init__(self, features: int, heads: int, dropout: float, rngs: nnx.Rngs):
        attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
        self.norm1 = nnx.LayerNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, features, attention_fn=attend, dropout_rate=dropout, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(features, rngs=rngs)
        self.linear1 = nnx.Linear(features, 4 * features, rngs=rngs)
        self.linear2 = nnx.Linear(4 * features, features, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norm1(x), is_causal=True))
        return x + self.dropout(self.linear2(nnx.gelu(self.linear1(self.norm2(x)))))


class GPT(nnx.Module):
    """Tokens [N, length] in, a score for each possible next token [N, length, VOCABULARY] out."""

    def __init__(self, rngs: nnx.Rngs, features: int = 96, heads: int = 4, depth: int = 2, dropout: float = 0.05):
        self.embed = nnx.Embed(VOCABULARY, features, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.List([Block(features, heads, dropout, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(features, rngs=rngs)

    def __call__(self, tokens):
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))  # the same matrix


# ---- The text, and its tokens: bytes, and pairs of tokens. ----


def docstrings(modules, seen):
    """Docstrings of modules, and of their functions, classes and methods, each once: they are added to `seen`."""
    for module in map(importlib.import_module, modules):
        for owner in module, *vars(module).values():
            for x in owner, *(vars(owner).values() if inspect.isclass(owner) else ()):
                documented = inspect.ismodule(x) or inspect.isclass(x) or inspect.isroutine(x)
                doc = inspect.getdoc(x) if documented else None
                if doc and doc not in seen:
                    seen.add(doc)
                    yield doc


def load():
    """The text to train on, and a held-out text, from modules whose docstrings are not trained on."""
    seen = set()
    return ["\n\n\n".join(docstrings(modules, seen)) for modules in (MODULES, HELD_OUT)]


def to_bytes(text):
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)


def join(tokens, pair, new):
    """Replace each occurrence of a pair of tokens by the new token, from left to right."""
    at = np.flatnonzero((tokens[:-1] == pair[0]) & (tokens[1:] == pair[1]))
    run = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) > 1, at, 0))  # where overlapping pairs begin: aaaa
    at = at[(at - run) % 2 == 0]
    tokens = tokens.copy()
    tokens[at] = new
    return np.delete(tokens, at + 1)


def learn_pairs(text):
    """The pairs that become tokens: each time the most frequent one that does not lead from word to word."""
    tokens, pairs = to_bytes(text), []
    for new in range(BYTES, VOCABULARY):
        names = spell(pairs)
        ends_a_word = np.flatnonzero([name[-1].isalnum() for name in names])
        begins_with_space = np.flatnonzero([name[0].isspace() for name in names])
        counts = np.bincount(tokens[:-1] * VOCABULARY + tokens[1:], minlength=VOCABULARY**2).reshape(VOCABULARY, -1)
        counts[np.ix_(ends_a_word, begins_with_space)] = 0
        first, second = divmod(int(counts.argmax()), VOCABULARY)
        pairs.append((first, second))
        tokens = join(tokens, pairs[-1], new)
    return pairs


def spell(pairs):
    """The text that each token stands for."""
    names = [chr(byte) for byte in range(BYTES)]
    for first, second in pairs:
        names.append(names[first] + names[second])
    return names


def encode(text, pairs):
    tokens = to_bytes(text)
    for new, pair in enumerate(pairs, BYTES):
        tokens = join(tokens, pair, new)
    return tokens


def decode(tokens, pairs):
    names = spell(pairs)
    return "".join(names[token] for token in tokens)


# ---- Training. ----


def cross_entropy(model, windows):
    """Mean of `-log2 p(next token)` over all positions of the windows [N, length + 1]."""
    logits = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean() / jnp.log(2)


@nnx.jit
def train_step(model, optimizer, windows):
    loss, grads = nnx.value_and_grad(cross_entropy)(model, windows)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def evaluate(model, windows):
    return cross_entropy(model, windows)


def new_training(steps, **sizes):
    """A fresh model and its optimizer, for training in this many steps."""
    model = GPT(rngs=nnx.Rngs(0), **sizes)
    rate = optax.warmup_cosine_decay_schedule(0, 1e-2, steps // 20, steps)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.1))
    return model, nnx.Optimizer(model, adam, wrt=nnx.Param)


def batches(tokens, steps):
    """Windows from random places."""
    random = np.random.default_rng(0)
    for _ in range(steps):
        yield tokens[random.integers(len(tokens) - LENGTH, size=(BATCH, 1)) + np.arange(LENGTH + 1)]


def train(tokens, held_tokens, steps, **sizes):
    """Train a model; return it, the loss of each step, and the held-out loss after some, in bits for each token."""
    model, optimizer = new_training(steps, **sizes)
    held_windows = held_tokens[np.arange(0, len(held_tokens) - LENGTH, LENGTH)[:, None] + np.arange(LENGTH + 1)]
    losses, held_losses = [], {}
    begin = time.perf_counter()
    for step, windows in enumerate(batches(tokens, steps), 1):
        model.train()  # dropout is on, in attention too
        losses.append(train_step(model, optimizer, windows))
        if step == steps or step % max(1, steps // 10) == 0:
            model.eval()  # dropout is off
            held_losses[step] = float(evaluate(model, held_windows))
            print(
                f"step {step:4d}/{steps}  loss {np.mean(losses[-steps // 10 :]):.3f}  held-out {held_losses[step]:.3f} "
                f"bits/token  {time.perf_counter() - begin:5.1f} s",
                flush=True,
            )
    return model, np.array(losses), held_losses


# ---- Writing. ----


@nnx.jit
def next_token(model, tokens, last, key, temperature):
    """Draw what follows `tokens[:, last]`; at temperature 0, the most probable token."""
    logits = model(tokens)[:, last]
    return jnp.argmax(logits + temperature * jax.random.gumbel(key, logits.shape), axis=-1)


def write(model, prompt, count, temperature=0.0, seed=0):
    """Continue a prompt by `count` tokens: the model first reads the prompt, then one token at a time."""
    model = nnx.view(model, decode=True, batch_size=1, max_length=len(prompt) + count)  # its weights, and a new cache
    written = [prompt[None]]
    for key in jax.random.split(jax.random.key(seed), count):
        written.append(next_token(model, written[-1], -1, key, temperature)[:, None])
    return np.concatenate(written, axis=1)[0]


def write_without_cache(model, prompt, count):
    """What `write` writes at temperature 0, but the model reads the whole text again for each token."""
    tokens = np.zeros((1, len(prompt) + count), np.int32)  # of one size, so next_token is compiled once
    tokens[0, : len(prompt)] = prompt
    for last in range(len(prompt) - 1, tokens.size - 1):
        tokens[0, last + 1] = next_token(model, tokens, last, jax.random.key(0), 0.0)[0]
    return tokens[0]


def check_cache(model, prompt, count):
    """Require the same text with the cache and without it, token by token; return it and the seconds that each took."""
    texts, seconds = [], []
    for function in write, write_without_cache:
        function(model, prompt, count)  # compiles
        begin = time.perf_counter()
        texts.append(function(model, prompt, count))
        seconds.append(time.perf_counter() - begin)
    np.testing.assert_array_equal(*texts)
    return texts[0], seconds


# ---- Picture. ----


def draw_losses(losses, held_losses, path):
    """Draw the loss of each step, and the held-out loss after some."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.plot(range(1, len(losses) + 1), losses, color="gray", linewidth=0.6, label="training, with Dropout")
    axis.plot(held_losses.keys(), held_losses.values(), "o-", markersize=3, color="tab:blue", label="held-out modules")
    axis.axhline(np.log2(VOCABULARY), color="black", linewidth=0.8, linestyle=":", label="all tokens alike")
    axis.set(xlabel="step", ylabel="bits per token", title="loss", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# ---- The whole run. ----


def run(out, steps):
    """Train, draw, compare writing with the cache and without, and write."""
    out.mkdir(parents=True, exist_ok=True)
    text, held_text = load()
    pairs = learn_pairs(text)
    tokens, held_tokens = encode(text, pairs), encode(held_text, pairs)
    print(f"{len(text)} bytes to learn from, {len(tokens)} tokens; {len(held_text)} bytes held out")
    model, losses, held_losses = train(tokens, held_tokens, steps)
    draw_losses(losses, held_losses, out / "learning_curve.png")

    prompt = encode("Return a ", pairs)
    _, (fast, slow) = check_cache(model, prompt, count=250)
    print(f"250 tokens with the cache in {fast:.2f} s, the same 250 without it in {slow:.2f} s")
    print("\n" + decode(write(model, prompt, count=250, temperature=0.6), pairs) + "\n")

    held_bits = held_losses[steps] * len(held_tokens) / len(held_text)
    print(f"held-out loss {held_bits:.2f} bits per byte; see learning_curve.png in {out}/")
    if held_bits > 2.6:
        sys.exit("the held-out loss is above the 2.6 bits per byte that this model reaches")


def main():
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's own documentation.")
    parser.add_argument("--out", type=pathlib.Path, default="gpt_output", help="folder for the picture")
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    run(arguments.out, arguments.steps)


if __name__ == "__main__":
    main()
