"""Switches: settings that hold from now on, within a ``with`` block, or within each call of a decorated function.

Each switch is a subclass of :class:`Switch`, and ``use_something(value)`` sets it at once. As a context manager, it
restores the earlier setting at the end of the block. As a decorator, it restores the earlier setting at once, and sets
the value again during each call of the function. A switch that was never set has the value of its flag in
``flax.config``, which code written for flax.nnx may set instead.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable)


def flag(name: str, otherwise: bool) -> bool:
    """A flag of ``flax.config``; the value ``otherwise`` if flax was not imported, so that nobody can have set it."""
    module = sys.modules.get("flax.configurations")  # not imported
    return getattr(getattr(module, "config", None), name, otherwise)


class Switch:
    """Base class of the switches, which have a value for each thread: True until it is set."""

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
