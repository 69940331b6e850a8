"""Foreign containers: the dicts, lists and States in an attribute that is a pytree, and how changes of them are found.

The state of an optimizer is such a pytree. It has to stay what the transformation has made, to the very types, since
JAX compares these: a List is no list to ``jax.tree.map(f, [1], nnx.List([2]))``. So a table that describes foreign
dicts and lists notes what each of them holds, and its stamp compares whenever it is asked whether it is valid, which
takes half a microsecond for one of five items. States are large, and report their writes: each write looks among the
levels that stamps know (:class:`~nnxlib.core.stamps.States`).

Other mutable pytrees, such as a dataclass that is not frozen, cannot be compared without flattening them. A graph that
holds one is walked at each call.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .stamps import Stamp, States
from .state import State


class Items(NamedTuple):
    """What a container holds."""

    container: Any
    keys: list[Any] | None  # None of a list
    ids: list[int]  # of the values; comparing these takes half the time of comparing the values by identity
    values: list[Any]  # so that no id is reused


class Foreign:
    """The foreign containers that a walk has met, and what they held."""

    __slots__ = ("levels", "others")

    def __init__(self) -> None:
        self.levels: dict[int, dict] = {}  # of States, by id
        self.others: list[Items] = []

    def __bool__(self) -> bool:
        return bool(self.levels or self.others)

    def add(self, tree: Any, children: Sequence[Any]) -> bool:
        """Add the containers of a pytree; False if it can get other children than these without a change of them."""
        if type(tree) is types.MethodType:  # bound to a node, for good
            return True
        found, stack = set(), [tree]
        while stack:
            x = stack.pop()
            if isinstance(x, State):
                stack += self._items_of_levels(x.raw_mapping)
            elif type(x) in _DICTS:
                values = list(x.values())
                self.others.append(Items(x, list(x), list(map(id, values)), values))
                stack += values
            elif type(x) is list:
                self.others.append(Items(x, None, list(map(id, x)), x.copy()))
                stack += x
            elif isinstance(x, tuple):
                stack += x
            elif x is not None:
                found.add(id(x))
        return found == set(map(id, children))

    def _items_of_levels(self, top: dict) -> list[Any]:
        found, stack = [], [top]
        while stack:
            level = stack.pop()
            self.levels[id(level)] = level
            for x in level.values():
                (stack if type(x) is dict else found).append(x)
        return found

    def watch(self, stamp: Stamp) -> None:
        """Let a change invalidate a stamp."""
        if self.others:
            stamp.add_check(lambda: _are_unchanged(self.others))
        if self.levels:
            States.attach(stamp, self.levels)


_DICTS = (dict, OrderedDict, defaultdict)


def _are_unchanged(held: Iterable[Items]) -> bool:
    for container, keys, ids, _ in held:
        values = container if keys is None else container.values()
        if [*map(id, values)] != ids or (keys is not None and [*container] != keys):
            return False
    return True
