"""Rows: the entries of the table that describes an object graph.

There is one *row* for each Variable and each node (Module, List, Dict). It says everything that is static about the
object: its class, and what is in each of its *fields* (the attributes of a Module, the items of a List or Dict). The
content of a field is a *spec*, one of four:

- ``LEAF``: an array, which is in the list of leaves, the other half of the table (graph.py);
- ``Ref(i)``: the object of row ``i``. So sharing and cycles need no special case;
- a :class:`~nnxlib.core.static.Const`: a static value, which is part of the program;
- a :class:`Tree`: a pytree, such as a tuple of arrays, whose children have specs in turn.

Rows and specs are plain data, compared by value: two models with equal rows have the same structure.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, final

from .annotations import NamedTuple
from .static import ATOMS, Const


class _Symbol:
    """A spec that is just a name. There is one object for each, also after pickling."""

    __slots__ = ("_name", "_shown")

    def __init__(self, name: str, shown: str):
        self._name, self._shown = name, shown

    def __repr__(self) -> str:
        return self._shown

    def __reduce__(self) -> str:
        return self._name


LEAF = _Symbol("LEAF", "*")  # the next array in the list of leaves
SAME = _Symbol("SAME", "same")  # in a row of a Delta (graph.py): the live node keeps the content of this field


@final
class Ref(NamedTuple):
    """The spec of an object: the number of its row."""

    index: int


class Tree(NamedTuple):
    """The spec of a pytree that holds data."""

    treedef: Any
    paths: tuple[tuple, ...]  # of the children, within the pytree
    children: tuple[Any, ...]  # specs

    def __eq__(self, other: object) -> bool:
        if type(other) is not Tree or not same_treedef(self.treedef, other.treedef):
            return False
        return self.paths == other.paths and self.children == other.children

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def at(self, path: tuple) -> list[tuple[tuple, Spec]]:
        """(path, spec) of each child, given the path of the pytree."""
        return [((*path, *suffix), child) for suffix, child in zip(self.paths, self.children, strict=True)]


def same_treedef(a: Any, b: Any) -> bool:
    """Whether two treedefs are equal, even if they have metadata that does not compare to a bool, such as arrays.

    JAX leaves the metadata of users' classes out of the hash of a treedef, so a dict compares treedefs that differ.
    """
    try:
        return a == b
    except Exception:  # whatever the __eq__ of the metadata raises
        below = a.children(), b.children()
        same = same_node(a.node_data(), b.node_data()) and len(below[0]) == len(below[1])
        return same and all(map(same_treedef, *below))


def same_node(a: tuple[type, Any] | None, b: tuple[type, Any] | None) -> bool:
    """Whether two nodes of treedefs are equal, given their classes and metadata; None stands for a leaf."""
    if a is None or b is None or a[0] is not b[0]:
        return a is b
    try:
        return a[1] is b[1] or Const.of(a[1]) == Const.of(b[1])
    except Exception:  # one that is not a static value is equal to itself only
        return False


class BoundMethod(NamedTuple):
    """The treedef of a method bound to a node, as in ``self.apply = self.block.forward``; JAX has none for it."""

    function: Callable

    def unflatten(self, children: Sequence[Any]) -> Any:
        return types.MethodType(self.function, *children)


Spec = _Symbol | Ref | Const | Tree


@final
class VariableRow(NamedTuple):
    """The row of a Variable: all that is static about it. Its value is a leaf."""

    type: type
    metadata: Const


@final
class NodeRow(NamedTuple):
    """The row of a node: all that is static about it."""

    type: type
    names: tuple  # of the fields, in the order of insertion, which users can see
    fields: tuple[tuple[Any, Spec], ...]  # (name, spec) in the order of visiting, which is that of paths and leaves
    marks: Const  # which fields were declared data or static, see objects.py

    @property
    def head(self) -> tuple:
        """All but the contents of the fields."""
        return self.type, self.names, self.marks

    def at(self, path: tuple) -> list[tuple[tuple, Spec]]:
        """(path, spec) of each field, given the path of the node."""
        return [((*path, name), spec) for name, spec in self.fields]


Row = VariableRow | NodeRow


def renumbered(x: Any, number: Callable[[int], int]) -> Any:
    """A row or a spec, for a table in which the row ``i`` has the number ``number(i)``."""
    if type(x) is Ref:
        return Ref(number(x.index))
    if type(x) is Tree:
        return x._replace(children=tuple([renumbered(child, number) for child in x.children]))
    if type(x) is NodeRow:
        return x._replace(fields=tuple([(name, renumbered(spec, number)) for name, spec in x.fields]))
    return x


Owner = tuple[int, int]  # of a leaf: the row that holds it, or ROOT; and which leaf of that row it is
ROOT = -1  # in place of the number of a row: the pytree around the objects, which holds leaves of its own


def value_of(spec: Spec, objects: Sequence[Any] | Mapping[int, Any], leaves: Iterator[Any]) -> Any:
    """The value of a spec, given the objects by row, and the leaves that have not been used yet."""
    if spec is LEAF:
        return next(leaves)
    if type(spec) is Ref:
        return objects[spec.index]
    if type(spec) is Const:
        return spec.fresh()
    tree = cast(Tree, spec)
    return tree.treedef.unflatten(
        [objects[x.index] if type(x) is Ref else value_of(x, objects, leaves) for x in tree.children]
    )


def count_leaves(spec: Spec) -> int:
    """The number of leaves in a spec itself, without those of the objects that it refers to."""
    if type(spec) is Tree:
        return sum(map(count_leaves, spec.children))
    return int(spec is LEAF)


def children(spec: Spec) -> list[tuple[tuple, Spec]]:
    """(path, spec) of each child of a pytree; of another spec, that spec itself."""
    return spec.at(()) if type(spec) is Tree else [((), spec)]


def parts(item: NodeRow | Spec, path: tuple = ()) -> list[tuple[tuple, Spec]]:
    """(path, spec) of what is in a node or a pytree, and in pytrees within; of another spec, that spec itself."""
    if type(item) is not NodeRow and type(item) is not Tree:
        return [(path, cast(Spec, item))]
    return [part for below, child in item.at(path) for part in parts(child, below)]


def own_leaf_paths(item: NodeRow | Spec, path: tuple = ()) -> list[tuple]:
    """The paths of the leaves that a node or a spec has itself; not those of the objects that it refers to."""
    return [below for below, spec in parts(item, path) if spec is LEAF]


def leaves_by_field(row: NodeRow) -> list[range]:
    """For each field, which of the leaves of the node are in it."""
    found, stop = [], 0
    for _, spec in row.fields:
        start, stop = stop, stop + count_leaves(spec)
        found.append(range(start, stop))
    return found


def touched_rows(rows: Sequence[Row], touched: Iterable[Owner]) -> dict[int, NodeRow]:
    """The rows of the nodes that hold touched leaves, with ``SAME`` in fields that hold none of these."""
    found = {}
    for i, group in itertools.groupby(sorted(touched), key=operator.itemgetter(0)):
        row, chosen = rows[i], {k for _, k in group}
        if type(row) is NodeRow:
            pairs = zip(row.fields, leaves_by_field(row), strict=True)
            fields = [(name, SAME if chosen.isdisjoint(own) else spec) for (name, spec), own in pairs]
            found[i] = row._replace(fields=tuple(fields))
    return found


def only_arrays_change(old: Row, new: Row) -> bool:
    """Whether ``new``, a row of a Delta, only puts other arrays into an object that had the row ``old``."""
    if type(old) is not NodeRow or type(new) is not NodeRow or old.head != new.head:
        return False
    before = dict(old.fields)
    return all(spec is SAME or spec == before[name] for name, spec in new.fields)


def statics_in(rows: Sequence[Row]) -> list[tuple[int, Any, Const]]:
    """(row, field, value) of each static value that may refer to other objects."""
    return [
        (i, name, spec)
        for i, row in enumerate(rows)
        for name, spec in (row.fields if type(row) is NodeRow else (("metadata", cast(VariableRow, row).metadata),))
        if type(spec) is Const and type(spec.value) not in ATOMS
    ]
