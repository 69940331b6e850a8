"""Nodes as JAX pytrees, so that a Module can be an argument of plain ``jax.jit``, ``jax.grad``, ``jax.tree.map``.

There are two ways to flatten a node. If nothing below it is shared, it flattens as a tree: one level of the pytree for
each node, with the names of attributes and the indices of items as keys, and static values in the treedef. If its graph
has sharing or cycles (or is very deep, or mixes arrays and static values in a tuple), it flattens at once into its
table: the children are the Variables and arrays, each once, with their whole path as key. So tied weights stay tied
under ``jax.grad``, and cycles do no harm.

The layout of the outermost node decides. How each node below it flattens is then cached on the node (``_nnx_tree``, a
:class:`Level`) until its structure changes. So flattening a model takes time linear in its size, and only looks at the
children of each node. Static values that can be changed in place are compared each time: one may have become data. A
node with a part that can change unnoticed, such as a mutable dataclass of arrays, is walked each time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.tree_util as jtu

from .closures import Watch, notice
from .containers import Dict, List, holds_data
from .data import explicit_mark, is_data, is_node
from .foreign import Foreign
from .graph import build
from .layout import Layout
from .objects import PYTREE_REGISTRARS, Pytree, attributes_of, new_node
from .registration import register_pytree
from .reprs import static_repr
from .rows import NodeRow, Ref, Tree
from .stamps import Stamp
from .static import Const
from .tables import have_changed, table_of
from .traversals import sorted_keys
from .variables import Variable
from .walk import flatten_once

_set = object.__setattr__


class PathKey:
    """The key of a leaf of a shared graph: its whole path in one entry."""

    __slots__ = ("path",)

    def __init__(self, path: tuple):
        self.path = path

    def __str__(self) -> str:
        return "".join(f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in self.path)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PathKey) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)


class NodeShape:
    """The static half of a node that flattens as a tree: its class, its static values, the names of its children."""

    __slots__ = ("_contents", "_key", "children", "kind", "marks", "names", "statics")

    def __init__(self, kind: type, names: tuple, statics: dict[Any, Const], children: tuple, marks: dict | None):
        self.kind, self.names, self.statics, self.children, self.marks = kind, names, statics, children, marks
        self._key: Any = None
        self._contents: tuple[dict[Any, Any], list[Any]] | None = None

    @property
    def contents(self) -> tuple[dict[Any, Any], list[Any]]:
        """The static values by name, with None for each child; and the names of those that a node has a copy of."""
        if self._contents is None:
            values = {name: value.value for name, value in self.statics.items()}
            mutable = [name for name, value in self.statics.items() if value.mutable]
            self._contents = {name: values.get(name) for name in self.names}, mutable
        return self._contents

    @property
    def key(self) -> Any:  # only needed when JAX compares or hashes a treedef
        if self._key is None:
            marks = Const.of_items(self.marks or {})
            self._key = self.kind, self.names, tuple(self.statics.items()), self.children, marks
        return self._key

    def unflatten(self, children: Iterable[Any]) -> Any:
        contents, mutable = self._contents or self.contents
        items = contents.copy()
        for name, child in zip(self.children, children):
            items[name] = child
        for name in mutable:
            items[name] = self.statics[name].fresh()
        node = new_node(self.kind, self.marks)
        node._nnx_fill_new(items)
        return node

    def __eq__(self, other: object) -> bool:
        return type(other) is NodeShape and (self is other or self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        statics = ", ".join(f"{name}={static_repr(value.value)}" for name, value in self.statics.items())
        return f"{self.kind.__name__}({statics})"


class GraphShape:
    """The static half of a node that flattens into its table: its layout."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout):
        self.layout = layout

    def unflatten(self, children: Iterable[Any]) -> Any:
        variables, children = self.layout.variables, list(children)
        n = len(variables)
        return build(self.layout, [None] * n + children[n:], dict(zip(variables, children, strict=False)))[0]

    def __eq__(self, other: object) -> bool:
        return type(other) is GraphShape and self.layout is other.layout

    def __hash__(self) -> int:
        return hash(self.layout)

    def __repr__(self) -> str:
        root = self.layout.rows[0]
        return f"{root.type.__name__} with shared parts"


class Level:
    """How a node flattens as a tree: its shape, the keys of its children, and how to take these out of the node."""

    __slots__ = ("edition", "keys", "mutable", "open", "shape", "stamp", "take", "valid")

    def __init__(self, node: Any, stamp: Stamp, mutable: Mutable):
        self.stamp, self.edition = stamp, stamp.edition  # of the table that showed that the graph is a tree
        self.mutable = mutable  # the static values below that can be changed in place, and what they were
        self.valid = self.edition if not mutable else None  # equal to ``stamp.valid`` if nothing else is to be compared
        held = node._nnx_contents()
        is_list = issubclass(type(node), list)
        is_plain_list = is_list and len(held) == len(node)
        only_static = isinstance(node, List | Dict) and not holds_data(node)  # then it flattens like a list or dict
        names = tuple(held) if is_plain_list else sorted_keys(held)
        items = () if not only_static else range(len(node)) if is_list else held
        marks = {name: explicit_mark(node, name) for name in names}
        is_child = {
            name: (name in items and marks[name] is None) or _is_child(held[name], marks[name]) for name in names
        }
        chosen = tuple([name for name, chosen in is_child.items() if chosen])
        statics = {name: Const.of(held[name], (name,)) for name, chosen in is_child.items() if not chosen}
        self.shape = NodeShape(type(node), tuple(held), statics, chosen, node._nnx_marks)
        self.keys = [_key(node, name) for name in chosen]
        self.open, self.take = _takers(node, chosen)

    def holds(self) -> bool:
        """Whether nothing has changed since this was made."""
        changed = self.mutable and have_changed(self.mutable)
        return not changed and self.stamp.valid == self.edition


def _takers(node: Any, names: tuple) -> tuple[Callable[[Any], Any], Callable[[Any], Iterable[Any]]]:
    """A function from a node to its contents, and one from these to the named children; both in C for most nodes."""
    if isinstance(node, list) and names == tuple(range(len(node))):
        return list.copy, iter
    one_by_one = lambda held: [held[name] for name in names]
    if isinstance(node, Pytree) and attributes_of(node).keys() >= set(names):
        return attributes_of, operator.itemgetter(*names) if len(names) > 1 else one_by_one
    return lambda node: node._nnx_contents(), one_by_one


def _level(node: Any) -> Level | None:
    """How a node flattens as a tree; None if the graph below it is not one."""
    level = node._nnx_tree
    if level is not None and level.holds():
        return level
    table = table_of(node)
    if not table.layout.is_tree:
        return None
    objects, rows = table.objects_with(node), table.layout.rows
    below: list[Mutable | None] = [()] * len(rows)
    for i in range(len(rows) - 1, -1, -1):  # what a node holds has a higher number
        x, row = objects[i], rows[i]
        if type(row) is NodeRow:
            below[i] = mutable = _mutable_below(x, row, below)
            level = Level(x, table.stamp, mutable or ())
            _set(x, "_nnx_tree", None if mutable is None else level)
    return level


Mutable = Sequence[tuple[Any, Const]]  # static values that can be changed in place, and what they were


def _mutable_below(node: Any, row: NodeRow, below: Sequence[Mutable | None]) -> Mutable | None:
    """The static values in and below a node that can be changed in place; None if more can change unnoticed.

    ``below`` are those of the objects that it holds, by row.
    """
    if not node._nnx_guarded or row.marks.mutable:
        return None
    found: dict[int, tuple[Any, Const]] = {}
    fields = list(row.fields)
    for name, spec in fields:  # which becomes longer
        inner: Mutable | None = ()
        if type(spec) is Ref:
            inner = below[spec.index]
        elif type(spec) is Const and spec.mutable:
            inner = ((node._nnx_contents()[name], spec),)
        elif type(spec) is Tree:
            value = node._nnx_contents()[name]
            fields += [(name, child) for child in spec.children]
            inner = () if Foreign().add(value, flatten_once(value)[1]) else None
        if inner is None:
            return None
        found |= {id(value): (value, const) for value, const in inner}
    return tuple(found.values())


def _flatten(node: Any) -> tuple[Iterable[Any], NodeShape | GraphShape]:
    if Watch.count:
        notice(node, node._nnx_trace)
    level = node._nnx_tree
    if level is None or level.stamp.valid != level.valid:
        level = _level(node)
        if level is None:
            keyed, shape = _flatten_shared(node)
            return [child for _, child in keyed], shape
    return level.take(level.open(node)), level.shape


def _flatten_with_keys(node: Any) -> tuple[Iterable[tuple[Any, Any]], NodeShape | GraphShape]:
    if Watch.count:
        notice(node, node._nnx_trace)
    level = node._nnx_tree
    if level is None or level.stamp.valid != level.valid:
        level = _level(node)
        if level is None:
            return _flatten_shared(node)
    return zip(level.keys, level.take(level.open(node))), level.shape  # strict=True would take 0.1 us


def _flatten_shared(node: Any) -> tuple[list[tuple[Any, Any]], GraphShape]:
    table = table_of(node)
    layout = table.layout
    variables = [x for x in table.objects_with(node) if isinstance(x, Variable)]
    leaves = [*variables, *table.leaves()[len(variables) :]]
    return [(PathKey(p), x) for p, x in zip(layout.leaf_paths, leaves, strict=True)], GraphShape(layout)


def _is_child(value: Any, mark: bool | None) -> bool:
    """Whether an attribute or item of a node is data for JAX to flatten."""
    if isinstance(value, List | Dict):
        return bool(mark) or holds_data(value)
    return is_data(value) if mark is None or is_node(value) else mark


def _key(node: Any, name: Any) -> Any:
    if isinstance(name, str):
        return jtu.GetAttrKey(name)
    return jtu.SequenceKey(name) if isinstance(node, list) else jtu.DictKey(name)


def _register(cls: type) -> None:
    register_pytree(cls, _flatten_with_keys, lambda shape, children: shape.unflatten(children), _flatten)


PYTREE_REGISTRARS.append(_register)
for _cls in (Pytree, List, Dict):
    _register(_cls)
