"""Numbers that no two things share, under the name that flax.nnx has for them."""

from __future__ import annotations

import itertools

_numbers = itertools.count(1)


class UUID:
    """An identity: unequal to any other one, its own copies included.

    >>> import copy
    >>> a = nnx.ids.uuid()
    >>> a == a, a == nnx.ids.uuid(), a == copy.copy(a)
    (True, False, False)
    """

    __slots__ = ("id",)

    def __init__(self, rawid: int | None = None):
        self.id = next(_numbers) if rawid is None else rawid

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UUID) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __copy__(self) -> UUID:
        return UUID()

    def __deepcopy__(self, memo: object) -> UUID:
        return UUID()

    def __repr__(self) -> str:
        return f"UUID({self.id})"


uuid = UUID
