"""Switches: settings that hold from now on, within a ``with`` block, or within each call of a decorated function.

A kind of switch is a class, and an instance is the setting of it. ``Kind(value)`` sets it at once; what was set before
is restored at the end of the block, or by the decorator, which sets it again for each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)


class Switch:
    """A kind of switch, which says where its value is kept."""

    def __init__(self, value: bool, /):
        self._set, self._before = bool(value), self.current_value()
        self._put(self._set)

    @classmethod
    def current_value(cls) -> bool:
        """Return what is set in this thread."""
        raise NotImplementedError

    @classmethod
    def _put(cls, value: bool) -> None:
        """Set it, in this thread."""
        raise NotImplementedError

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._put(self._before)

    def __call__(self, function: F, /) -> F:
        self._put(self._before)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with type(self)(self._set):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]
