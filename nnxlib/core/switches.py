"""Switches: settings that hold from now on, within a ``with`` block, or within each call of a decorated function.

A kind of switch is a class, and an instance is the setting of it. ``Kind(value)`` sets it at once; what was set before
is restored at the end of the block, or by the decorator, which sets it again for each call. Where nothing is set, it is
as a flag of ``flax.config`` says, which code that was written for flax.nnx may set instead.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable)


def flag(name: str, otherwise: bool) -> bool:
    """A flag of ``flax.config``; or else a value, as if flax is not in use, so that nobody has set it."""
    module = sys.modules.get("flax.configurations")  # not imported
    return getattr(getattr(module, "config", None), name, otherwise)


class Switch:
    """A kind of switch, which says where its value is kept; it is True until it is set."""

    _flag: ClassVar[str]  # the one in ``flax.config``

    def __init__(self, value: bool, /):
        self._set, self._before = bool(value), self._get()
        self._put(self._set)

    @classmethod
    def current_value(cls) -> bool:
        """Return what is set in this thread."""
        value = cls._get()
        return flag(cls._flag, True) if value is None else value

    @classmethod
    def _get(cls) -> bool | None:
        """What has been set in this thread; None if nothing has."""
        raise NotImplementedError

    @classmethod
    def _put(cls, value: bool | None) -> None:
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
