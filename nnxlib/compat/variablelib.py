"""Variables, under the name that flax.nnx has for them; and the kinds of Variables that it lets one choose.

Of these, ``ref=True`` is a setting of any Variable here. ``hijax=True`` is kept as metadata and has no other effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..core.variables import *  # noqa: F403
from ..core.variables import DEFAULTS, Variable
from ..sharding import use_eager_sharding as use_eager_sharding
from ..sharding import using_eager_sharding as using_eager_sharding

_KINDS = {"hijax": False, "ref": False}


class VarDefaults(Mapping):
    """What Variables that do not say otherwise are asked to be."""

    hijax = property(lambda self: self["hijax"])
    ref = property(lambda self: self["ref"])

    def __init__(self, **asked: bool):
        self._asked = {**_KINDS, **asked}

    def __getitem__(self, kind: str) -> bool:
        return self._asked[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._asked)

    def __len__(self) -> int:
        return len(self._asked)

    def __repr__(self) -> str:
        return f"VarDefaults(hijax={self.hijax}, ref={self.ref})"


def var_defaults(
    *, hijax: bool | None = None, ref: bool | None = None
) -> VarDefaults | AbstractContextManager[VarDefaults]:
    """Return what Variables are asked to be; with arguments, set it in a ``with`` block or a decorated function.

    >>> with nnx.variablelib.var_defaults(ref=True):
    ...   variable = nnx.Variable(1)
    >>> variable.ref, nnx.variablelib.var_defaults()
    (True, VarDefaults(hijax=False, ref=False))
    """
    asked = {kind: x for kind, x in {"hijax": hijax, "ref": ref}.items() if x is not None}
    return _asking(asked) if asked else VarDefaults(**DEFAULTS)


@contextmanager
def _asking(asked: dict[str, bool]) -> Iterator[VarDefaults]:
    before = dict(DEFAULTS)
    DEFAULTS.update(asked)
    try:
        yield VarDefaults(**DEFAULTS)
    finally:
        DEFAULTS.clear()
        DEFAULTS.update(before)


class _Asked(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, Variable) and bool(x.get_metadata("hijax", False))


class HijaxVariable(metaclass=_Asked):
    """Any Variable that was asked to be one."""
