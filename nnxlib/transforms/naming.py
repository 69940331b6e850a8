"""What JAX calls the functions that it is given, in its own messages: the user's, with the paths of their leaves.

What crosses into JAX is a pure function of rows of leaves. An error of JAX about a traced value names the function that
was traced and the arguments that the value depends on, and asks Python for both, by ``__wrapped__`` and
``__signature__``. So a pure function points to the user's, and its parameters are named by the paths of its leaves:

    The error occurred while tracing the function train_step at train.py:12 for jit. This concrete value was not
    available in Python because it depends on the value of the argument args[1].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ..core.errors import format_path
from .callables import name_of

_GROUPS = inspect.signature(lambda *groups: None)


class _Name(str):
    """The name of a parameter; Python takes identifiers only, and a path is none."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        return True


def named(pure: Callable, f: Callable, paths: Iterable[tuple] | None = None) -> Callable:
    """Give a pure function what JAX says of ``f``, and return it.

    Args:
      pure: takes leaves, or groups of leaves.
      f: the user's function.
      paths: of the leaves, if ``pure`` takes each as an argument of its own.
    """
    made: Any = pure
    made.__name__ = made.__qualname__ = name_of(f)
    made.__wrapped__ = f
    made.__signature__ = _GROUPS if paths is None else _signature(paths)
    return pure


def _signature(paths: Iterable[tuple]) -> inspect.Signature:
    names = [_Name(format_path(path)) for path in paths]
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names])
