"""Nesting: leaves in nested dicts, by way of a JAX treedef, which nests and flattens them in C++.

``split``, ``merge`` and ``update`` convert between the leaves of a layout, a list, and the levels of a State, nested
dicts whose keys are sorted. A layout keeps a :class:`Nesting` of all its leaves, and one of each group that filters
have selected.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from .traversals import nested


class Nesting:
    """The places of some leaves of a layout in nested dicts.

    Args:
      paths: of all leaves of the layout, in its order.
      positions: of the chosen leaves; all by default.

    Attributes:
      paths: of the chosen leaves, sorted as in a State.
      positions: of the chosen leaves, ascending.
    """

    paths: tuple[tuple[Any, ...], ...]
    positions: list[int]

    def __init__(self, paths: Sequence[tuple], positions: Iterable[int] | None = None):
        chosen = range(len(paths)) if positions is None else positions
        sorted_positions: list[int]
        sorted_positions, self._treedef = jax.tree.flatten(nested((paths[k], k) for k in chosen))
        self.paths, self.positions = tuple([paths[k] for k in sorted_positions]), sorted(sorted_positions)
        place = {position: k for k, position in enumerate(self.positions)}
        order = [place[position] for position in sorted_positions]
        self._order = None if order == list(range(len(order))) else order
        self._inverse = sorted(range(len(order)), key=order.__getitem__)

    def within(self, count: int) -> list[int]:
        """The ``positions`` that are less than ``count``."""
        return self.positions[: bisect.bisect_left(self.positions, count)]

    def sort(self, leaves: list[Any]) -> list[Any]:
        """The leaves in the order of ``paths``, given in that of ``positions``."""
        return leaves if self._order is None else [leaves[k] for k in self._order]

    def nest(self, leaves: list[Any]) -> dict:
        """Nested dicts of the leaves, given in the order of ``positions``."""
        return self._treedef.unflatten(self.sort(leaves))

    def flatten(self, levels: Any) -> list[Any] | None:
        """The inverse of :meth:`nest`; None if the dicts have other keys."""
        try:
            found = self._treedef.flatten_up_to(levels)
        except ValueError:
            return None
        return found if self._order is None else [found[k] for k in self._inverse]
