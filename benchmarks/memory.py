"""What the gradient of a stack of layers keeps: a loop, with remat, and with nested remat (remat_scan).

Nothing is run or timed. The number is the compiler's own: the temporary memory of the compiled gradient, in multiples
of one activation of the stack. It belongs to a version of XLA and to a platform, not to a machine.
"""

import math

import jax
import jax.numpy as jnp

import nnxlib as nnx

from . import timing

DEPTHS = (16, 64, 256)
BATCH, WIDTH = 1024, 16
Remat = bool | tuple[int, ...]


class Block(nnx.Module):
    """A residual layer; its inner activation is as large as its output."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x))


def ways(depth: int) -> dict[str, Remat]:
    """The ways to compute the gradient, by name."""
    root = math.isqrt(depth)
    return {"loop": False, "remat": True, "remat_scan": (root, depth // root)}


def activations_kept(depth: int, remat: Remat) -> float:
    """The temporary memory of the gradient of a stack, in activations.

    >>> activations_kept(16, (4, 4)) < activations_kept(16, True) < activations_kept(16, False)
    True
    """
    graphdef, params = nnx.split(nnx.Stack(Block, depth, remat=remat, rngs=nnx.Rngs(0)))

    def loss(params: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(x).sum()

    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    analysis = jax.jit(jax.grad(loss)).lower(params, x).compile().memory_analysis()
    assert analysis is not None, "this platform does not say how much memory a program needs"
    return analysis.temp_size_in_bytes / (BATCH * WIDTH * 4)


def table(depths: tuple[int, ...] = DEPTHS) -> timing.Table:
    """Measure each depth, in each way."""
    made = timing.Table("Activations kept by a gradient, by depth", [str(n) for n in depths], list(ways(1)))
    for depth in depths:
        made.add(str(depth), {name: f"{activations_kept(depth, remat):.0f}" for name, remat in ways(depth).items()})
    return made


if __name__ == "__main__":
    print(table().terminal())
