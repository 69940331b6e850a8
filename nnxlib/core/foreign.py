"""Foreign containers: dicts, lists and States in an attribute that is a pytree, which do not report their changes.

The state of an optimizer is such a pytree. It has to stay what the transformation has made, to the very types, since
JAX compares these: a List is no list to ``jax.tree.map(f, [1], nnx.List([2]))``. So a table that describes foreign
containers notes what each of them holds, to compare later. For dicts and lists its stamp does so whenever it is asked
whether it is valid, which takes half a microsecond for one of five items. States are large, and hardly ever written.
They are compared only after *any* State was written: these report to :data:`STATES`, which has stamps like an object.

Other mutable pytrees, such as a dataclass that is not frozen, cannot be compared without flattening them. A graph that
holds one is walked at each call.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .stamps import STATES, Stamp, attach
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
        self.levels: list[Items] = []  # of States
        self.others: list[Items] = []

    def __bool__(self) -> bool:
        return bool(self.levels or self.others)

    def add(self, tree: Any, children: Sequence[Any]) -> bool:
        """Add the containers of a pytree; False if it can get other children than these without a change of them."""
        found, stack = set(), [(tree, self.others)]
        while stack:
            x, items = stack.pop()
            if isinstance(x, State):
                stack.append((x.raw_mapping, self.levels))
            elif type(x) in _DICTS:
                values = list(x.values())
                items.append(Items(x, list(x), list(map(id, values)), values))
                stack += [(value, items if type(value) is dict else self.others) for value in values]
            elif type(x) is list:
                items.append(Items(x, None, list(map(id, x)), x.copy()))
                stack += [(value, self.others) for value in x]
            elif isinstance(x, tuple):
                stack += [(value, self.others) for value in x]
            elif x is not None:
                found.add(id(x))
        return found == set(map(id, children))

    def watch(self, stamp: Stamp) -> None:
        """Let a change invalidate a stamp."""
        if self.others:
            stamp.add_check(lambda: _are_unchanged(self.others))
        if self.levels:
            attach(stamp, STATES)

    def states_unchanged(self) -> bool:
        """Whether the States hold what they held."""
        return _are_unchanged(self.levels)


_DICTS = (dict, OrderedDict, defaultdict)


def _are_unchanged(held: Iterable[Items]) -> bool:
    for container, keys, ids, _ in held:
        values = container if keys is None else container.values()
        if [*map(id, values)] != ids or (keys is not None and [*container] != keys):
            return False
    return True
