"""Layouts: the static half of a packed pytree.

A :class:`Layout` is the rows of the objects in a pytree (rows.py), and its *root*, the spec of the pytree itself. The
other half of the table is a list of *leaves*: the values of the Variables in the order of their rows, then the arrays
that nodes hold directly, row by row, then the leaves of the pytree itself. The *position* of a leaf is its place in
this list, and its *owner* the row that holds it, with the number that it has among the leaves of that row.

Layouts are *interned*: equal ones are the same object. So the structures of two models are compared by ``is``, a layout
is a good key for a cache, and whatever follows from it (paths, owners, how to build its objects) is computed once.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar, cast

from .blueprint import Blueprint
from .nesting import Nesting
from .rows import (
    LEAF,
    ROOT,
    BoundMethod,
    NodeRow,
    Owner,
    Ref,
    Row,
    Spec,
    Tree,
    VariableRow,
    count_leaves,
    parts,
    renumbered,
    statics_in,
)
from .static import Const

A = TypeVar("A")

_interning = threading.RLock()  # `setdefault` of a WeakValueDictionary is several steps; and `==` may be the user's

KEPT = 64  # how many entries a cache keeps whose keys may belong to functions or objects that are gone


def keep(cache: dict[Any, A], key: Hashable, value: A) -> A:
    """Put a value into a cache, which is emptied first if it is full; returns the value."""
    if len(cache) >= KEPT:
        cache.clear()
    cache[key] = value
    return value


class _Key:
    """The rows and root of a layout, hashed once: a tuple would hash a thousand rows again at each look-up.

    Once the layout is interned, they are found through it, weakly: what they hold, such as a function in an attribute,
    may refer to the model and so to the layout, which no collector could free if the key held them.
    """

    __slots__ = ("_hash", "parts")

    def __init__(self, rows: tuple[Row, ...], root: Spec):
        parts = rows, root
        self._hash = hash(parts)
        self.parts: Callable[[], tuple | None] = lambda: parts

    def keep_in(self, layout: Layout) -> None:
        """From now on refer to a layout that has these rows and this root."""
        reference = weakref.ref(layout)
        self.parts = lambda: (found.rows, found.root) if (found := reference()) is not None else None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return type(other) is _Key and (parts := self.parts()) is not None and parts == other.parts()


class Layout:
    """The static half of a packed pytree. Interned: equal layouts are the same object, so they compare by ``is``."""

    __slots__ = ("__dict__", "__weakref__", "avals", "root", "rows", "variables")  # the dict: what is cached

    rows: tuple[Row, ...]
    root: Spec  # of the pytree
    variables: tuple[int, ...]  # the rows of the Variables
    avals: Any  # of the leaves of the last model with this layout that was split; shared by its GraphDefs
    held: tuple[Any, ...] | None  # the Modules and Variables in its static values; set by `held_in`, when first needed
    shapes: dict[int, Any]  # by row, the NodeShape with which JAX flattens a node of a tree; filled by pytrees.py
    _variants: weakref.WeakValueDictionary[tuple[tuple[int, Row], ...], Layout]  # what `with_rows` has made
    _around: weakref.WeakValueDictionary[tuple, Layout]  # what `around` has made
    _parts: dict[int, tuple[Layout, list[int]]]  # what `part` has made
    kept: dict[Layout, None]  # those of `_around` that are kept alive, so that the next call need not make them anew
    _grouped: dict[Hashable, list[Nesting]]  # what `grouped` has made, by filters

    _interned: weakref.WeakValueDictionary = weakref.WeakValueDictionary()

    def __new__(cls, rows: tuple[Row, ...], root: Spec):
        key = _Key(rows, root)
        self = cls._interned.get(key)
        if self is None:
            self = object.__new__(cls)
            self.rows, self.root, self.avals, self.held = rows, root, None, None
            self.variables = tuple([i for i, row in enumerate(rows) if type(row) is VariableRow])
            self.shapes, self._parts, self.kept, self._grouped = {}, {}, {}, {}
            self._around, self._variants = weakref.WeakValueDictionary(), weakref.WeakValueDictionary()
            with _interning:
                made, self = self, cls._interned.setdefault(key, self)
                if self is made:
                    key.keep_in(self)
        return self

    def __reduce__(self):
        return Layout, (self.rows, self.root)

    def __repr__(self) -> str:  # in a treedef, see pytrees.py
        return f"{self.rows[0].type.__name__} with shared parts" if self.rows else "no objects"

    # --- paths, positions and owners ---

    @property
    def paths(self) -> tuple[tuple, ...]:
        """The first path to each row."""
        return self._all_paths[0]

    @property
    def leaf_paths(self) -> tuple[tuple, ...]:
        """The path of each leaf, in the order of the leaves."""
        return self._all_paths[1]

    @functools.cached_property
    def _all_paths(self) -> tuple[tuple, tuple]:
        """The first path to each row, and the path of each leaf, found depth first in the order of the fields."""
        paths: list[Any] = [None] * len(self.rows)
        of_row: list[list] = [[] for _ in range(len(self.rows) + 1)]  # of ROOT: in the last entry
        stack: list[tuple[tuple, Spec, int]] = [((), self.root, ROOT)]
        while stack:
            path, spec, holder = stack.pop()
            if spec is LEAF:
                of_row[holder].append(path)
            elif type(spec) is Tree:
                stack += [(below, child, holder) for below, child in reversed(spec.at(path))]
            elif type(spec) is Ref and paths[spec.index] is None:
                paths[spec.index], row = path, self.rows[spec.index]
                if type(row) is NodeRow:
                    stack += [(below, child, spec.index) for below, child in reversed(row.at(path))]
        leaf_paths = [paths[i] for i in self.variables] + [path for found in of_row for path in found]
        return tuple(paths), tuple(leaf_paths)

    @functools.cached_property
    def positions(self) -> dict[tuple, int]:
        """The position of each leaf, by its path."""
        return {path: k for k, path in enumerate(self.leaf_paths)}

    def position_at(self, path: tuple) -> int | None:
        """The position of the leaf at any path, also one that goes through a shared object by another path than the
        first; None if there is no leaf.
        """
        if not self.shared:
            return self.positions.get(path)
        # Where the path has led so far: to what, the first path to that, and the keys that are left, as text.
        item, first, rest = self.root, (), tuple(map(str, path))

        def leads_on(part: tuple[tuple, Spec]) -> bool:
            return type(part[1]) is not Const and rest[: len(part[0])] == tuple(map(str, part[0]))

        while found := next(filter(leads_on, parts(item)), None):
            below, spec = found
            first, rest = (*first, *below), rest[len(below) :]
            if type(spec) is Ref:
                first, item = self.paths[spec.index], self.rows[spec.index]
            if spec is LEAF or type(item) is VariableRow:
                return self.positions[first] if rest in ((), ("value",)) else None
        return None

    @functools.cached_property
    def owners(self) -> tuple[Owner, ...]:
        """The owner of each leaf. (A node that can no longer be reached, as in a table after a call, owns none.)"""
        nodes = [(i, row) for i, row in enumerate(self.rows) if type(row) is NodeRow and self.paths[i] is not None]
        counts = [(i, sum(count_leaves(spec) for _, spec in row.fields)) for i, row in nodes]
        counts.append((ROOT, count_leaves(self.root)))
        return *[(i, 0) for i in self.variables], *[(i, k) for i, count in counts for k in range(count)]

    @functools.cached_property
    def owner_positions(self) -> dict[Owner, int]:
        """The position of each leaf, by its owner."""
        return {owner: k for k, owner in enumerate(self.owners)}

    @functools.cached_property
    def in_refs(self) -> frozenset[int]:
        """The positions of the Variables that keep their value in a :class:`jax.Ref`."""
        count = len(self.variables)
        return frozenset(k for k in range(count) if self.variable_row(k).metadata.value.get("ref"))

    def variable_row(self, position: int) -> VariableRow:
        """The row of the Variable whose value is the leaf at a position."""
        return cast(VariableRow, self.rows[self.variables[position]])

    @functools.cached_property
    def statics(self) -> list[tuple[int, Any, Const]]:
        """The static values in the objects that may refer to other objects, each once: (row, field, value)."""
        return list({id(const.value): (i, name, const) for i, name, const in statics_in(self.rows)[::-1]}.values())

    # --- how to make objects, and other layouts ---

    @functools.cached_property
    def blueprint(self) -> Blueprint:
        """The plan by which objects of this layout are built."""
        return Blueprint(self.rows, self.variables)

    @functools.cached_property
    def is_tree(self) -> bool:
        """Whether JAX can flatten the objects level by level: none is shared, there is no cycle, nothing is too deep,
        and the pytrees in them hold nothing but data.
        """
        return (
            not self.shared
            and all(self._holds_data_only(spec) for spec in self._specs if type(spec) is Tree)
            and max(map(len, self.paths), default=0) < _DEEPEST_TREE
        )

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """The rows that are referred to more than once."""
        trees = [spec for spec in self._specs if type(spec) is Tree]
        specs = self._specs + [child for tree in trees for child in tree.children]
        counts = collections.Counter([spec.index for spec in specs if type(spec) is Ref])
        return frozenset(i for i, count in counts.items() if count > 1)

    @property
    def _specs(self) -> list[Spec]:
        return [self.root, *(spec for row in self.rows if type(row) is NodeRow for _, spec in row.fields)]

    def _holds_data_only(self, tree: Tree) -> bool:
        """Whether there is no static value in a pytree, nor a List or Dict, which may hold some."""
        return type(tree.treedef) is not BoundMethod and all(
            child is LEAF or (type(child) is Ref and not issubclass(self.rows[child.index].type, list | dict))
            for child in tree.children
        )

    def with_rows(self, rows: tuple[tuple[int, Row], ...]) -> Layout:
        """The layout with some rows replaced, given as (number, row); cached."""
        found = self._variants.get(rows)
        if found is None:
            replaced = dict(rows)
            found = Layout(tuple([replaced.get(i, row) for i, row in enumerate(self.rows)]), self.root)
            self._variants[rows] = found
        return found

    def around(self, root: Spec, *others: Layout) -> Layout:
        """The layout of a pytree that holds the objects of this layout, followed by those of the ``others``.

        For example, that of arguments around a model and an optimizer. The layouts must have no object in common. The
        result is cached weakly. To keep it alive, the caller also puts it into ``kept``; but not if a function in it
        refers to a model, which would be kept alive with it.
        """
        key = (root, *others)
        found = self._around.get(key)
        if found is None:
            rows = [*self.rows]
            for other in others:
                number = len(rows).__add__
                rows += [renumbered(row, number) for row in other.rows]
            found = self._around[key] = Layout(tuple(rows), root)
        return found

    def part(self, row: int) -> tuple[Layout, list[int]]:
        """The layout of one of the objects by itself; and the rows that its objects have here, in order. Cached."""
        found = self._parts.get(row)
        if found is None:
            numbers: dict[int, int] = {}  # of the rows here, in order: their numbers there
            stack: list[Spec] = [Ref(row)]
            while stack:
                spec = stack.pop()
                if type(spec) is Tree:
                    stack += reversed(spec.children)
                elif type(spec) is Ref and spec.index not in numbers:
                    numbers[spec.index], below = len(numbers), self.rows[spec.index]
                    stack += [spec for _, spec in reversed(below.fields)] if type(below) is NodeRow else ()
            rows = tuple([renumbered(self.rows[i], numbers.__getitem__) for i in numbers])
            found = self._parts[row] = Layout(rows, Ref(0)), [*numbers]
        return found

    # --- the leaves in nested dicts, those of States ---

    @functools.cached_property
    def nesting(self) -> Nesting | None:
        """The places of all leaves in nested dicts; None if JAX cannot flatten these."""
        if max(map(len, self.leaf_paths), default=0) >= _DEEPEST_TREE:
            return None
        try:
            return Nesting(self.leaf_paths)
        except ValueError:  # a leaf by itself has no key, or JAX cannot sort the keys
            return None

    def grouped(self, filters: Hashable, groups: Callable[[], Iterable[Sequence[tuple]]]) -> list[Nesting]:
        """The places of the leaves of each group in nested dicts; ``groups()`` gives their paths. Cached by filters."""
        found = self._grouped.get(filters)
        if found is None:
            found = [Nesting(self.leaf_paths, [self.positions[path] for path in paths]) for paths in groups()]
            keep(self._grouped, filters, found)
        return found

    def leaves_in(self, levels: Any) -> dict[int, Any] | None:
        """The leaves in nested dicts, by position; None unless the dicts have the keys of all leaves, or of a group
        that :meth:`grouped` has made.
        """
        for nesting in (self.nesting, *itertools.chain(*self._grouped.values())):
            if nesting is not None and (leaves := nesting.flatten(levels)) is not None:
                return dict(zip(nesting.positions, leaves, strict=True))
        return None


_DEEPEST_TREE = 100  # JAX flattens recursively, and Python allows about 1,000 nested calls
