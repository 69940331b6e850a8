"""Variables, under the name that flax.nnx has for them; and the kinds of Variables that it lets one choose.

Of these, ``ref=True`` is a setting of any Variable here. ``hijax=True`` is kept as metadata and has no other effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.metadata import VariableMetadata as VariableMetadata
from ..core.metadata import with_metadata as with_metadata
from ..core.metadata import with_partitioning as with_partitioning
from ..core.variable_names import TYPE_OF_NAME as VariableTypeCache  # noqa: F401
from ..core.variable_names import register_variable_name as register_variable_name
from ..core.variable_names import variable_name_from_type as variable_name_from_type
from ..core.variable_names import variable_type_from_name as variable_type_from_name
from ..core.variables import *  # noqa: F403
from ..core.variables import DEFAULTS, Variable
from ..sharding import use_eager_sharding as use_eager_sharding
from ..sharding import using_eager_sharding as using_eager_sharding

_KINDS = {"hijax": False, "ref": False}


class var_defaults(Mapping):
    """What Variables that do not say otherwise are asked to be; ``hijax`` is kept as metadata and has no effect.

    With arguments, it is set: for good when called, within a ``with`` block, or within each call of the function that
    it decorates.

    >>> with nnx.variablelib.var_defaults(ref=True):
    ...   variable = nnx.Variable(1)
    >>> variable.ref, nnx.variablelib.var_defaults()
    (True, var_defaults(hijax=False, ref=False))
    """

    hijax = property(lambda self: self["hijax"])
    ref = property(lambda self: self["ref"])

    def __init__(self, *, hijax: bool | None = None, ref: bool | None = None):
        self._asked = {kind: x for kind, x in {"hijax": hijax, "ref": ref}.items() if x is not None}
        self._before = dict(DEFAULTS)
        DEFAULTS.update(self._asked)
        self._now = {**_KINDS, **DEFAULTS}

    def __enter__(self) -> var_defaults:
        return self

    def __exit__(self, *exc: object) -> None:
        DEFAULTS.clear()
        DEFAULTS.update(self._before)

    def __call__(self, function: Callable) -> Callable:
        self.__exit__()

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with var_defaults(**self._asked):
                return function(*args, **kwargs)

        return wrapper

    def __getitem__(self, kind: str) -> bool:
        return self._now[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now)

    def __len__(self) -> int:
        return len(self._now)

    def __repr__(self) -> str:
        return f"var_defaults(hijax={self.hijax}, ref={self.ref})"


VarDefaults = var_defaults  # flax.nnx has a function and a class


class _Asked(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, Variable) and bool(x.get_metadata("hijax", False))


class HijaxVariable(metaclass=_Asked):
    """Any Variable that was asked to be one."""
