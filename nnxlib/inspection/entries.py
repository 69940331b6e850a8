"""What the results of ``diff`` and ``statistics`` have in common: entries in order, written as a table; and the values
of arrays, which both look at.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Self, TypeVar, overload

import jax
import numpy as np

from ..core.differences import aval_of
from ..core.tracing import Tracer, is_readable
from .grid import MOST_ROWS

E = TypeVar("E")


class Entries(Sequence[E]):
    """A sequence that is compared by value, and whose slices are of its class."""

    def __init__(self, entries: Sequence[E]):
        self._entries = tuple(entries)

    @overload
    def __getitem__(self, index: int) -> E: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Any:
        return type(self)(self._entries[index]) if isinstance(index, slice) else self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._entries == other._entries

    def __hash__(self) -> int:
        return hash(self._entries)

    def _text(self, rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
        """A header and the rows of the first entries, with the columns ``right`` flush right."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = [
            [x.rjust(w) if j in right else x.ljust(w) for j, (x, w) in enumerate(zip(row, widths))] for row in rows
        ]
        more = [f"... and {len(self) - MOST_ROWS} more"] if len(self) > MOST_ROWS else []
        return "\n".join(["  ".join(row).rstrip() for row in padded] + more)


def values_of(value: Any) -> np.ndarray | None:
    """The values of an array or a number as a NumPy array; None if they are not available."""
    if isinstance(value, Tracer | jax.ShapeDtypeStruct) or (aval_of(value) is None and not np.isscalar(value)):
        return None
    value = value[...] if isinstance(value, jax.Ref) else value
    is_empty = getattr(value, "dtype", None) == jax.dtypes.float0  # a gradient of integers
    return np.asarray(value) if not is_empty and (not isinstance(value, jax.Array) or is_readable(value)) else None
