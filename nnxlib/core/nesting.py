"""Nesting: leaves in nested dicts, by way of a JAX treedef, which nests and flattens them in C++.

``split``, ``merge`` and ``update`` convert between the leaves of a layout, a list, and the levels of a State, nested
dicts whose keys are sorted. A layout keeps a :class:`Nesting` of all its leaves, and one of each group that filters
have selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .traversals import nested


class Nesting:
    """Where some leaves of a layout stand in nested dicts.

    Args:
      paths: of all leaves of the layout, in its order.
      positions: of the chosen leaves; all by default.

    Attributes:
      paths: of the chosen leaves, sorted as in a State.
      positions: of the chosen leaves, ascending.
    """

    paths: tuple[tuple[Any, ...], ...]
    positions: list[int]

    def __init__(self, paths: Sequence[tuple], positions: Sequence[int] | None = None):
        chosen = range(len(paths)) if positions is None else positions
        order: list[int]
        order, self._treedef = jax.tree.flatten(nested((paths[k], k) for k in chosen))
        self.paths, self.positions = tuple([paths[k] for k in order]), sorted(order)
        self._order = None if order == list(range(len(paths))) else order
        self._inverse = sorted(range(len(order)), key=order.__getitem__)

    def sort(self, leaves: list[Any]) -> list[Any]:
        """The chosen leaves in the order of ``paths``, given all leaves in the order of the layout."""
        return leaves if self._order is None else [leaves[k] for k in self._order]

    def nest(self, leaves: list[Any]) -> dict:
        """Nested dicts of the chosen leaves, given in the order of ``paths``."""
        return self._treedef.unflatten(leaves)

    def flatten(self, levels: Any) -> list[Any] | None:
        """The leaves of nested dicts, in the order of ``positions``; None if the dicts have other keys."""
        try:
            found = self._treedef.flatten_up_to(levels)
        except ValueError:
            return None
        return found if self._order is None else [found[k] for k in self._inverse]
