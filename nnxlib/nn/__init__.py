"""Layers: Modules with parameters, and the functions they are made of.

A layer holds its parameters as Variables and its settings as plain attributes of the constructor's names. Its
arithmetic is a few pure functions (see ``core/formulas.py``); what follows from the settings alone is worked out in
Python beforehand. ``_nnx_sizes()`` gives a layer's declared sizes in words, for error messages and tables.
"""

import importlib
from typing import Any

from . import activations as activations
from . import dtypes as dtypes
from . import initializers as initializers
from . import linear as linear
from . import stochastic as stochastic

# Imported when first asked for, since many programs do not use them.
_LATER = (
    *("attention", "conv", "lora", "masks", "norm", "normalization"),
    *("pooling", "recurrent", "reparametrised", "rotary", "stack"),
)


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
