"""Training: optimizers, moving averages, metrics and a functional train state, around any optax-like transformation.

A *transformation* is an object with ``init(params)`` and ``update(grads, state, params)``, as optax makes them. It
works on States of values; what is kept between steps lives in Variables, at the paths of the parameters. Nothing here
imports optax.
"""

import importlib
from typing import Any

from . import optimizer as optimizer


def __getattr__(name: str) -> Any:
    if name in ("ema", "metrics", "train_state"):  # imported when first asked for, since not all programs use them
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
