"""The other transformations, under the name that flax.nnx has for their module."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from ..core.objects import Node
from .abstract import eval_shape as eval_shape
from .branch import cond as cond
from .branch import switch as switch
from .checkify import checkify as checkify
from .general import make_jaxpr as make_jaxpr


def _resolve_bound_callable(f: Callable) -> tuple[Callable, Any, bool]:
    """Take a bound method of a Module apart: the function, the Module, and whether it is one.

    It is private in flax.nnx, too, where published code needs it, since transforms do not take bound methods there.
    """
    is_bound = isinstance(f, MethodType) and isinstance(f.__self__, Node)
    return (f.__func__, f.__self__, True) if is_bound else (f, None, False)
