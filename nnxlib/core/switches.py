"""Switches: settings that hold from now on, within a ``with`` block, or within each call of a decorated function.

A kind of switch is a class, and an instance is the setting of it. ``Kind(value)`` sets it at once; what was set before
is restored at the end of the block, or by the decorator, which sets it again for each call. Where nothing is set, it is
as a flag of ``flax.config`` says, which code that was written for flax.nnx may set instead.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable)


def flag(name: str, otherwise: bool) -> bool:
    """A flag of ``flax.config``; or else a value, as if flax is not in use, so that nobody has set it."""
    module = sys.modules.get("flax.configurations")  # not imported
    return getattr(getattr(module, "config", None), name, otherwise)


class Switch:
    """A kind of switch, with a value for each thread; it is True until it is set."""

    _flag: ClassVar[str | None] = None  # the one in ``flax.config``, if there is one
    _values: ClassVar[threading.local] = threading.local()

    def __init__(self, value: bool, /):
        self._set, self._before = bool(value), self._get()
        self._put(self._set)

    @classmethod
    def current_value(cls) -> bool:
        """Return what is set in this thread."""
        value = cls._get()
        if value is None:
            return cls._flag is None or flag(cls._flag, True)
        return value

    @classmethod
    def _get(cls) -> bool | None:
        """What has been set in this thread; None if nothing has."""
        return getattr(cls._values, cls.__name__, None)

    @classmethod
    def _put(cls, value: bool | None) -> None:
        """Set it, in this thread."""
        setattr(cls._values, cls.__name__, value)

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
