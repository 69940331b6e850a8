"""Names for JAX's own messages: of the user's function, and of its leaves by their paths.

What JAX is given is a pure function of lists of leaves. An error of JAX about a traced value names the function that
was traced and the arguments that the value depends on, and asks Python for both, by ``__wrapped__`` and
``__signature__``. So a pure function points to the user's, and its parameters are named by the paths of its leaves:

    The error occurred while tracing the function train_step at train.py:12 for jit. This concrete value was not
    available in Python because it depends on the value of the argument args[1].
"""

from __future__ import annotations

import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import format_path
from .callables import name_of
from .labels import split_lanes

_GROUPS = [inspect.Parameter("groups", inspect.Parameter.VAR_POSITIONAL)]


class _Name(str):
    """The name of a parameter. Python accepts identifiers only, and a path is not one."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        return True


class _OfLanes(inspect.Signature):
    """The signature of a function of one list of leaves per lane, which binds the leaves to their paths.

    The names are made only when a trace asks for them.
    """

    def __init__(self, paths: Sequence[tuple], lane_of: Sequence[int]):
        super().__init__(_GROUPS)
        self._paths, self._lane_of = paths, lane_of

    def bind(self, *groups: Any) -> inspect.BoundArguments:
        names = split_lanes([format_path(path) for path in self._paths], self._lane_of, len(groups))
        pairs = [zip(*lane, strict=True) for lane in zip(names, groups, strict=True)]
        return inspect.BoundArguments(self, OrderedDict(itertools.chain(*pairs)))


def named(
    pure: Callable, f: Callable, paths: Sequence[tuple] | None = None, lane_of: Sequence[int] | None = None
) -> Callable:
    """Let JAX speak of a pure function as if it were ``f``; returns the function.

    It takes leaves with these ``paths``, if they are known: each as an argument, or with ``lane_of`` a list per lane.
    """
    made: Any = pure
    made.__name__ = made.__qualname__ = name_of(f)
    made.__wrapped__ = f
    if paths is None:
        made.__signature__ = inspect.Signature(_GROUPS)
    elif lane_of is None:
        names = [_Name(format_path(path)) for path in paths]
        one_each = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
        made.__signature__ = inspect.Signature(one_each)
    else:
        made.__signature__ = _OfLanes(paths, lane_of)
    return pure
