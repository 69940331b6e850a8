"""Containers and Sequential, under the name that flax.nnx has for them."""

from collections.abc import Callable
from typing import Any

from ..core.annotations import signature_of
from ..core.containers import Dict as Dict
from ..core.containers import List as List
from ..nn.sequential import Sequential as Sequential
from ..training.train_state import TrainState as TrainState


def has_keyword_arg(func: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name that can be passed by keyword.

    >>> nnx.helpers.has_keyword_arg(nnx.Linear, 'rngs'), nnx.helpers.has_keyword_arg(nnx.relu, 'rngs')
    (True, False)
    """
    found = signature_of(func).parameters.get(name)
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)
