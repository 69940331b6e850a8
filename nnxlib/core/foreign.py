"""Foreign containers: the dicts, lists and States in an attribute that is a pytree, and how changes of them are found.

The state of an optimizer is such a pytree. It has to keep the very types that the transformation has made, since JAX
compares them: to ``jax.tree.map(f, [1], nnx.List([2]))`` a List is not a list. So a table that describes foreign dicts
and lists notes what each of them holds, and whenever it is to be used again, this is compared. States are large, and
report their writes: each write looks among the levels that stamps know
(:class:`~nnxlib.core.stamps.States`).

Other mutable pytrees, such as a dataclass that is not frozen, cannot be compared without flattening them; and those
that hold arrays have to be flattened anyway, to read these. Both are :class:`Flattened` at each call, and compared.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax.tree_util as jtu

from .annotations import NamedTuple
from .data import is_node
from .rows import LEAF, Ref, Tree
from .stamps import Stamp, States
from .state import State
from .static import Const


class Held(NamedTuple):
    """The items that a container held."""

    container: Any
    keys: list[Any] | None  # None for a list
    ids: list[int]  # of the values; comparing these takes half the time of comparing the values by identity
    values: list[Any]  # so that no id is reused


class Flattened:
    """A pytree in a field of a node, which is flattened whenever its arrays are asked for, or whether it has changed.

    It is looked up anew each time, by its ``key`` in the attributes or items of the node, the ``container``: a jitted
    function that sets an array in it puts another pytree in its place. ``index`` has the row of each object, by its id.
    """

    __slots__ = ("_arrays", "_container", "_index", "_is_leaf", "_key", "_others", "_treedef", "_types")

    def __init__(self, container: Any, key: Any, spec: Tree, index: Mapping[int, int]):
        self._container, self._key, self._treedef, self._index = container, key, spec.treedef, index
        self._arrays = [k for k, child in enumerate(spec.children) if child is LEAF]
        self._others = [(k, child) for k, child in enumerate(spec.children) if child is not LEAF]
        has_nodes = any(isinstance(child, Ref) for _, child in self._others)
        self._is_leaf = is_node if has_nodes else None  # if there are none, a new one would give another treedef
        self._types = list(map(type, self._flatten()[0]))  # an array in place of another one is not a change

    def _flatten(self) -> tuple[list[Any], Any]:
        return jtu.default_registry.flatten(self._container[self._key], self._is_leaf)

    def arrays(self) -> list[Any]:
        """The arrays in the pytree."""
        leaves, _ = self._flatten()
        return [leaves[k] for k in self._arrays] if self._others else leaves

    def is_unchanged(self) -> bool:
        """Whether the spec of the pytree is still the same."""
        try:
            leaves, treedef = self._flatten()
            if [*map(type, leaves)] != self._types or treedef != self._treedef:
                return False
            return not self._others or all(self._is_same(leaves[k], child) for k, child in self._others)
        except Exception:  # deleted, or it cannot be flattened or compared any more: the walk will say why, and where
            return False

    def _is_same(self, x: Any, spec: Ref | Const) -> bool:
        if isinstance(spec, Ref):
            return self._index.get(id(x)) == spec.index
        return x is spec.value or Const.of(x) == spec


class Foreign:
    """The foreign containers that a walk has met, and what they held."""

    __slots__ = ("flattened", "items", "levels")

    def __init__(self) -> None:
        self.flattened: list[Flattened] = []
        self.levels: dict[int, dict] = {}  # of States, by id
        self.items: list[Held] = []  # of dicts and lists

    def __bool__(self) -> bool:
        return bool(self.levels or self.items or self.flattened)

    def add(self, tree: Any, children: Sequence[Any]) -> bool:
        """Add the containers of a pytree; False if it can get other children without a change of any of these."""
        if type(tree) is types.MethodType:  # it stays bound to its node
            return True
        found, stack = set(), [tree]
        while stack:
            x = stack.pop()
            if isinstance(x, State):
                stack += self._items_of_levels(x.raw_mapping)
            elif type(x) in _DICTS:
                values = list(x.values())
                self.items.append(Held(x, list(x), list(map(id, values)), values))
                stack += values
            elif type(x) is list:
                self.items.append(Held(x, None, list(map(id, x)), x.copy()))
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

    def watch(self, stamp: Stamp) -> list[Foreign]:
        """Let a write to a State invalidate a stamp; returns what has to be compared: this itself, if anything."""
        if self.levels:
            States.attach(stamp, self.levels)
        return [self] if self.items or self.flattened else []

    def is_unchanged(self) -> bool:
        """Whether all containers but States hold what they held."""
        for tree in self.flattened:
            if not tree.is_unchanged():
                return False
        for container, keys, ids, _ in self.items:
            values = container if keys is None else container.values()
            if [*map(id, values)] != ids or (keys is not None and [*container] != keys):
                return False
        return True


_DICTS = (dict, OrderedDict, defaultdict)
