"""Drawn programs: the same choices under flax.nnx and under nnxlib, and all that can be seen of each step.

A program is a function of a library, of a source of choices and of `note`; it is run under both libraries, with equal
sources. `note(what, f)` calls `f` and keeps what came of it: the value as plain data, or the exception.
"""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nnxlib

from .results import ROUNDING, assert_alike, facts

Note = Callable[[str, Callable[[], Any]], Any]
Program = Callable[[Any, random.Random, Note], None]


def assert_same(program: Program, seed: str, other: Any, ours: Any = nnxlib) -> None:
    """Run the program with the choices of this seed under both libraries; what they note must be the same."""
    mine, yours = (_noted(program, lib, seed) for lib in (ours, other))
    assert [what for what, _ in mine] == [what for what, _ in yours]
    for (what, a), (_, b) in zip(mine, yours, strict=True):
        assert_alike(a, b, what, ROUNDING)


def _noted(program: Program, lib: Any, seed: str) -> list[tuple[str, Any]]:
    noted: list[tuple[str, Any]] = []

    def note(what: str, f: Callable[[], Any]) -> Any:
        try:
            value = f()
        except Exception as error:
            noted.append((what, error))
            return None
        noted.append((what, facts(lib, value)))
        return value

    program(lib, random.Random(seed), note)
    return noted


def some(draw: random.Random, chance: float, **options: list) -> dict[str, Any]:
    """Keyword arguments: each option is drawn with this chance, and one of its values."""
    return {name: draw.choice(values) for name, values in options.items() if draw.random() < chance}


def array(draw: random.Random, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    values = np.random.default_rng(draw.randrange(1 << 30)).normal(0.5, 1.5, shape)
    return jnp.asarray(np.abs(3 * values) if np.issubdtype(dtype, np.integer) else values, dtype)
