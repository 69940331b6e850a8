"""Making Variables without hooks: one, many at once, and from the leaves of a JAX pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax

from .cells import Cell, TracedCell, cell_of, new_cell
from .closures import Watch, notice
from .identity import Identified, with_slots_of
from .metadata import NO_METADATA, Metadata
from .registration import register_pytree
from .stamps import Stamps
from .static import Const
from .tracing import current_trace

V = TypeVar("V", bound="VariableSlots")


class VariableSlots(Identified):
    """The slots of a Variable, without its ``__setattr__``, which checks every write.

    CPython sets an attribute of such a class ten times as fast as through the descriptor of a slot. So Variables are
    made as objects of this class; their slots are set, and then their ``__class__``.
    """

    __slots__ = ("__dict__", "__weakref__", "_cell", "_metadata", "_nnx_stamps")

    _cell: Cell
    _metadata: Metadata


def make_variable(kind: type[V], value: Any, metadata: Metadata = NO_METADATA) -> V:
    """Make a Variable of the running trace, without hooks; ``metadata`` is shared, not copied."""
    self: Any = VariableSlots()
    self._cell, self._nnx_stamps, self._metadata = cell_of(value, current_trace()), (), metadata
    try:
        self.__class__ = kind
        return self
    except TypeError:  # a class with slots of its own, which no other object can take on
        return with_slots_of(self, object.__new__(kind))


def make_variables(
    kinds: Sequence[type[VariableSlots]],
    values: Sequence[Any],
    metadata: Iterable[Any],
    cell: Callable[[Any], Cell] = new_cell,
    stamps: Stamps = (),
) -> list[Any]:
    """Make many Variables: as by :func:`make_variable`, but written out, in two thirds of the time.

    ``cell`` makes their cells; ``stamps`` are attached to each. Further values are left alone.
    """
    is_plain = cell is new_cell and current_trace() is None
    made: list[Any] = [VariableSlots() for _ in kinds]
    for k, (self, kind, value, own) in enumerate(zip(made, kinds, values, metadata, strict=False)):
        if is_plain:
            self._cell = plain = Cell()
            plain.value = value
        else:
            self._cell = cell(value)
        self._nnx_stamps, self._metadata = stamps, own
        try:
            self.__class__ = kind
        except TypeError:
            made[k] = with_slots_of(self, object.__new__(kind))
    return made


# --- as JAX pytrees ---------------------------------------------------------------------------------------------------

VARIABLE_TYPES: set[type] = set()  # all classes of Variables

_VALUE_KEY = jax.tree_util.GetAttrKey("value")


def _flatten(v: VariableSlots) -> tuple[tuple[Any], Metadata | Const]:
    if Watch.all:
        notice(v)
    metadata = v._metadata
    try:
        _ = metadata._key  # written out in both functions: a call would make each a tenth slower
    except AttributeError:
        return (v._cell.value,), metadata.static_half()
    return (v._cell.value,), metadata


def _flatten_with_keys(v: VariableSlots) -> tuple[tuple[tuple[Any, Any]], Metadata | Const]:
    if Watch.all:
        notice(v)
    metadata = v._metadata
    try:
        _ = metadata._key
    except AttributeError:
        return ((_VALUE_KEY, v._cell.value),), metadata.static_half()
    return ((_VALUE_KEY, v._cell.value),), metadata


def register_variable(kind: type[VariableSlots]) -> None:
    """Register a class of Variables as a pytree node."""

    def unflatten(metadata: Any, children: Iterable[Any]) -> VariableSlots:
        # As by `make_variable`, but written out, in five sixths of the time.
        self, trace = VariableSlots(), current_trace()
        self._cell = cell = Cell() if trace is None else TracedCell(None, trace)
        (cell.value,) = children
        self._nnx_stamps, self._metadata = (), metadata if type(metadata) is Metadata else metadata.fresh()
        try:
            self.__class__ = kind
            return self
        except TypeError:
            return with_slots_of(self, object.__new__(kind))

    register_pytree(kind, _flatten_with_keys, unflatten, _flatten)
    VARIABLE_TYPES.add(kind)
