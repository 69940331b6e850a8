"""JAX's transformations for functions of Modules, all on one engine (:mod:`nnxlib.transforms.lift`)."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("autodiff", "compilation", "iteration", "transforms"):  # flax's names: when asked for
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
