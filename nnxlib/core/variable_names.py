"""Names of Variable types: the collections of Linen, such as ``batch_stats``, each of which is a type here.

A name belongs to one type, and a type has one name. The registry is the whole program's.
"""

from __future__ import annotations

import functools
from typing import Any

from .errors import VariableNameError
from .missing import MISSING
from .variables import BatchStat, Cache, Intermediate, Param, Perturbation, Variable

TYPE_OF_NAME: dict[str, type[Variable]] = {}
_NAME_OF_TYPE: dict[type[Variable], str] = {}


def register_variable_name(name: str, typ: Any = MISSING, *, overwrite: bool = False) -> Any:
    """Register the collection name of a Variable class, as Linen calls it; usable as a decorator.

    >>> import nnxlib as nnx
    >>> @nnx.register_variable_name('memory')
    ... class Memory(nnx.Variable): ...
    >>> nnx.variable_type_from_name('memory') is Memory
    True

    A class that is defined again, as in a notebook's cell that runs twice, takes over the name.

    Raises:
      VariableNameError: if the name belongs to another class and ``overwrite`` is not set.
    """
    if typ is MISSING:
        return functools.partial(register_variable_name, name, overwrite=overwrite)
    owner: type = TYPE_OF_NAME.get(name) or typ
    if not overwrite and not is_defined_again(owner, typ):
        raise VariableNameError(
            f"The name {name!r} belongs to {owner.__name__}; pass overwrite=True to give it to {typ.__name__}."
        )
    TYPE_OF_NAME[name], _NAME_OF_TYPE[typ] = typ, name
    return typ


def variable_type_from_name(name: str, /, *, base: type[Variable] = Variable, allow_register: bool = False) -> Any:
    """Return the Variable class of a collection name; with ``allow_register``, make a subclass of ``base`` for it.

    >>> import nnxlib as nnx
    >>> nnx.variable_type_from_name('batch_stats').__name__
    'BatchStat'

    Raises:
      VariableNameError: if no class has the name.
    """
    if name not in TYPE_OF_NAME:
        if not allow_register:
            raise VariableNameError(
                f"No Variable type is registered under {name!r}; known names: {sorted(TYPE_OF_NAME)}. Use "
                "nnx.register_variable_name, or allow_register=True."
            )
        register_variable_name(name, type(name, (base,), {"__slots__": ()}))
    return TYPE_OF_NAME[name]


def type_of_name(name: str) -> type[Variable] | None:
    """The Variable class of a collection name, or None."""
    return TYPE_OF_NAME.get(name)


def variable_name_from_type(typ: type[Variable], /, *, allow_register: bool = False) -> str:
    """Return the collection name of a Variable class; with ``allow_register``, make one from the class name.

    >>> import nnxlib as nnx
    >>> nnx.variable_name_from_type(nnx.BatchStat)
    'batch_stats'

    Raises:
      VariableNameError: if the class has no name.
    """
    if typ not in _NAME_OF_TYPE:
        if not allow_register:
            raise VariableNameError(
                f"{typ.__name__} has no registered name; use nnx.register_variable_name, or allow_register=True."
            )
        register_variable_name(typ.__name__, typ)
    return _NAME_OF_TYPE[typ]


def is_defined_again(kind: type, other: type) -> bool:
    """Whether one class is the other, defined again: those of a notebook's cell are, each time that it runs."""
    return kind is other or (kind.__module__, kind.__qualname__) == (other.__module__, other.__qualname__)


for _name, _type in {
    "params": Param,
    "batch_stats": BatchStat,
    "cache": Cache,
    "intermediates": Intermediate,
    "perturbations": Perturbation,
}.items():
    register_variable_name(_name, _type)
