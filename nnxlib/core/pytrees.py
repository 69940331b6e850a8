"""Nodes as JAX pytrees, so that a Module can be an argument of plain ``jax.jit``, ``jax.grad``, ``jax.tree.map``.

There are two ways to flatten a node. If nothing below it is shared, it flattens as a tree: one level of the pytree for
each node, with the names of attributes and the indices of items as keys, and static values in the treedef. If its graph
has sharing or cycles (or is very deep, or mixes arrays and static values in a tuple), it flattens at once into its
table: the children are the Variables and arrays, each once, with their whole path as key, and the layout is the static
half. So tied weights stay tied under ``jax.grad``, and cycles do no harm.

The layout of the outermost node decides. The *shape* of each node in a tree, which JAX keeps in the treedef, is then
cached on the node (``_nnx_tree``, a :class:`KnownShape`) until its structure changes. So flattening a model takes time
linear in its size, and only looks at the children of each node. Static values that can be changed in place are compared
each time: one may have become data. A node with a part that can change unnoticed, such as a mutable dataclass of
arrays, is walked each time.

A node that JAX has made by unflattening keeps its shape until it changes: what were its children flatten as children,
whatever ``jax.tree.map`` has put in their place, and nothing is walked.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.tree_util as jtu

from .closures import Watch, notice
from .containers import Dict, List, holds_data
from .data import explicit_mark, is_data, is_node
from .editable import Compared, Editable, have_changed
from .foreign import Foreign
from .graph import build
from .identity import Identified
from .layout import Layout
from .metadata import NO_METADATA
from .objects import PYTREE_REGISTRARS, Node, Pytree, attributes_of, new_node
from .registration import register_pytree
from .reprs import static_repr
from .rows import NodeRow, Ref, Tree
from .stamps import Stamp, stamping, with_stamp
from .static import Const
from .tables import table_of
from .traversals import sorted_keys
from .variables import Variable
from .walk import flatten_once

_set = object.__setattr__


class PathKey(jtu.GetAttrKey):
    """The key of a leaf of a shared graph: its whole path in one entry, as a name for code that wants one (Orbax)."""

    __slots__ = ("path",)

    def __init__(self, path: tuple):
        super().__init__(".".join(map(str, path)))
        self.path = path

    def __str__(self) -> str:
        return "".join(f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in self.path)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PathKey) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)


Mutable = Sequence[Compared]

_NEVER_VALID = Stamp()
_NEVER_VALID.valid = False


class NodeShape:
    """The static half of a node that flattens as a tree: its class, its static values, the names of its children.

    From these follow the keys of the children, how to take the children out of a node, ``take(open(node))``, and the
    contents of a node with given children, ``fill(*children)``.

    A node that JAX has unflattened keeps its NodeShape in place of a :class:`KnownShape`. The stamp of a NodeShape is
    never valid, so :func:`_known_if_unflattened` is asked first when the node is flattened again.
    """

    __slots__ = (
        "_key", "children", "fill", "keys", "kind", "like", "marks", "mutable", "names", "open", "statics", "take"
    )  # fmt: skip
    stamp, valid = _NEVER_VALID, True

    def __init__(
        self, kind: type, names: tuple, statics: dict[Any, Const], children: tuple, marks: dict | None, like: type
    ):
        self.kind, self.names, self.statics, self.children, self.marks = kind, names, statics, children, marks
        self.like = like  # the class whose keys the children have: dict for a Dict without data
        self.mutable = [name for name, value in statics.items() if value.mutable]  # each node has a copy of these
        self.keys = [_key(like, name) for name in children]
        self.open, self.take = _takers(kind, names, children)
        self.fill = _filler(names, {name: const.value for name, const in statics.items()}, children)
        self._key: Any = None

    def __reduce__(self):
        return NodeShape, (self.kind, self.names, self.statics, self.children, self.marks, self.like)

    @property
    def key(self) -> Any:  # only needed when JAX compares or hashes a treedef
        if self._key is None:
            marks = Const.of_items(self.marks or {})
            self._key = self.kind, self.names, tuple(self.statics.items()), self.children, marks
        return self._key

    def is_of(self, row: NodeRow) -> bool:
        """Whether a row describes the same node, as far as it is static."""
        marks, statics = Const.of_items(self.marks or NO_METADATA), dict(row.fields)
        return (self.kind, self.names, marks) == row.head and all(statics[k] == x for k, x in self.statics.items())

    def __eq__(self, other: object) -> bool:
        return type(other) is NodeShape and (self is other or self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        statics = ", ".join(f"{name}={static_repr(value.value)}" for name, value in self.statics.items())
        return f"{self.kind.__name__}({statics})"


class KnownShape:
    """The shape of a node in a tree. It holds while a stamp is valid and some static values are equal."""

    __slots__ = ("edition", "mutable", "shape", "stamp", "valid")

    def __init__(self, shape: NodeShape, stamp: Stamp, mutable: Mutable):
        self.shape = shape
        self.stamp, self.edition = stamp, stamp.edition  # of the table, or the walk, that showed the graph to be a tree
        self.mutable = mutable  # the static values, and pytrees of other libraries, below that can be changed in place
        self.valid = self.edition if not mutable else None  # equals ``stamp.valid`` if nothing else is to be compared

    def holds(self) -> bool:
        """Whether nothing has changed since this was made."""
        changed = self.mutable and have_changed(self.mutable)
        return not changed and self.stamp.valid == self.edition


def _shape_of(node: Any) -> NodeShape:
    """The shape of a node, found by looking at all that it holds."""
    held = node._nnx_contents()
    is_list = isinstance(node, list)
    only_static = isinstance(node, List | Dict) and not holds_data(node)  # then it flattens like a list or dict
    names = tuple(held) if is_list and len(held) == len(node) else sorted_keys(held)
    items = () if not only_static else range(len(node)) if is_list else held
    marks = {name: explicit_mark(node, name) for name in names}
    is_child = {name: (name in items and marks[name] is None) or _is_child(held[name], marks[name]) for name in names}
    children = tuple([name for name, chosen in is_child.items() if chosen])
    statics = {name: Const.of(held[name], (name,)) for name, chosen in is_child.items() if not chosen}
    like = dict if only_static and not is_list else type(node)
    return NodeShape(type(node), tuple(held), statics, children, node._nnx_marks, like)


def _takers(kind: type, names: tuple, children: tuple) -> tuple[Callable[[Any], Any], Callable[[Any], Iterable[Any]]]:
    """A function from a node to its contents, and one from these to the children; both in C for most nodes."""
    if issubclass(kind, list) and children == tuple(range(len(names))):
        return list.copy, iter
    one_by_one = lambda held: [held[name] for name in children]
    if issubclass(kind, Pytree) and not kind._nnx_slot_names:
        return attributes_of, operator.itemgetter(*children) if len(children) > 1 else one_by_one
    return lambda node: node._nnx_contents(), one_by_one


_UNROLLED = 128  # up to this many names straight-line code makes the contents, in half of the time


def _filler(names: tuple, statics: dict[Any, Any], children: tuple) -> Callable[..., dict[Any, Any]]:
    """A function from the children of a node to its contents, in which the static values are always the same."""
    if len(names) <= _UNROLLED and {*map(type, names)} <= {str}:
        return _new_filler(names, children)(statics)
    contents = {name: statics.get(name) for name in names}

    def fill(*given: Any) -> dict[Any, Any]:
        items = contents.copy()
        for name, child in zip(children, given, strict=True):  # `update` takes four times as long for pairs
            items[name] = child
        return items

    return fill


@functools.lru_cache(maxsize=1000)
def _new_filler(names: tuple[str, ...], children: tuple[str, ...]) -> Callable[[dict], Callable[..., dict]]:
    """``lambda s: lambda c0, c1: {"kernel": c0, "rate": s["rate"], "bias": c1}``."""
    given = {name: f"c{k}" for k, name in enumerate(children)}
    items = ", ".join([f"{name!r}: {given.get(name) or f's[{name!r}]'}" for name in names])
    return eval(f"lambda s: lambda {', '.join(given.values())}: {{{items}}}")


def _known_shape(node: Any) -> KnownShape | None:
    """The shape of a node; None if the graph below it is not a tree."""
    known = node._nnx_tree
    if type(known) is NodeShape:
        known = _known_if_unflattened(node)
    elif known is not None and not known.holds():
        known = None
    if known is not None:
        return known
    table = table_of(node)
    layout = table.layout
    if not layout.is_tree:
        return None
    objects, rows, shapes = table.objects_with(node), layout.rows, layout.shapes
    below: list[Mutable | None] = [()] * len(rows)
    for i in range(len(rows) - 1, -1, -1):  # what a node holds has a higher number
        x, row = objects[i], rows[i]
        if type(row) is NodeRow:
            below[i] = mutable = _mutable_below(x, row, below)
            shape = shapes.get(i)
            if shape is None:
                shape = _shape_of(x)
                if shape.is_of(row):  # else another thread has just changed the node
                    shapes[i] = shape
            known = KnownShape(shape, table.stamp, mutable or ())
            _set(x, "_nnx_tree", None if mutable is None else known)
    return known


def _known_if_unflattened(root: Any) -> KnownShape | None:
    """The shape of a node that JAX has unflattened, if it and all nodes below still have those that they came from.

    Then nothing has to be described. A program that passes a Module to ``jax.jit``, and goes on with the one that this
    returns, has another Module at every call.
    """
    stamp = Stamp()
    with stamping:
        found = _unflattened_below(root, weakref.ref(stamp))
    if found is None:
        return None
    nodes, parents, shapes, mutable, seen, others = found
    foreign = Foreign()
    if not jtu.all_leaves(others):
        inner = _variables_in(others, foreign)
        if inner is None or len(seen.union(map(id, inner))) < len(seen) + len(inner):
            return None
    if any(mutable):
        for k in range(len(nodes) - 1, 0, -1):  # what a node holds has a higher number
            mutable[parents[k]] = [*mutable[parents[k]], *mutable[k]]
        if have_changed(mutable[0]):
            return None
    if pytrees := foreign.watch(stamp):
        mutable = [[*own, *pytrees] for own in mutable]
    known = list(map(KnownShape, shapes, itertools.repeat(stamp), mutable))
    for node, shape in zip(nodes, known, strict=True):
        _set(node, "_nnx_tree", shape)
    return known[0]


def _variables_in(trees: Iterable[Any], foreign: Foreign) -> list[Identified] | None:
    """The Variables in pytrees of other libraries, whose containers are added to ``foreign``.

    None if a pytree holds a node, or can change otherwise than by its containers.
    """
    found = list[Identified]()
    for tree in trees:
        leaves = jtu.tree_leaves(tree, is_leaf=lambda x: isinstance(x, Identified))
        if not (len(leaves) == 1 and leaves[0] is tree) and not foreign.add(tree, leaves):
            return None
        found += [x for x in leaves if isinstance(x, Identified)]
    return None if any(isinstance(x, Node) for x in found) else found


def _unflattened_below(
    root: Any, stamp: weakref.ref[Stamp]
) -> tuple[list[Any], list[int], list[NodeShape], list[Mutable], set[int], list[Any]] | None:
    """Attach the stamp to the nodes from ``root`` down, and list them: (nodes, parents, shapes, mutable, seen, others).

    ``parents`` has for each the number of the node that holds it, ``mutable`` its static values that can be changed in
    place, ``seen`` the ids of all nodes and Variables; ``others`` is what they hold besides. None if one of these is
    there twice, or a node has lost the shape that it came from.
    """
    stamps = (stamp,)
    nodes, parents, seen, others = [root], [0], {id(root)}, list[Any]()
    shapes: list[NodeShape] = []
    mutable: list[Mutable] = []
    for k, node in enumerate(nodes):  # more are appended
        shape = node._nnx_tree
        if type(shape) is not NodeShape or not node._nnx_guarded:
            return None
        _set(node, "_nnx_stamps", with_stamp(node._nnx_stamps, stamp) if node._nnx_stamps else stamps)
        contents = shape.open(node)
        children = [*shape.take(contents)]
        for child in children:  # more are appended
            if isinstance(child, Identified):
                if id(child) in seen:
                    return None
                seen.add(id(child))
                if isinstance(child, Node):
                    nodes.append(child)
                    parents.append(k)
            elif isinstance(child, tuple):
                children += child
            elif child is not None:
                others.append(child)
        shapes.append(shape)
        mutable.append([Editable(contents[name], shape.statics[name]) for name in shape.mutable])
    return nodes, parents, shapes, mutable, seen, others


def _mutable_below(node: Any, row: NodeRow, below: Sequence[Mutable | None]) -> Mutable | None:
    """The static values in and below a node that can be changed in place; None if more can change unnoticed.

    ``below`` has them for the objects that the node holds, by row.
    """
    if not node._nnx_guarded or row.marks.mutable:
        return None
    found: dict[int, Compared] = {}
    fields = list(row.fields)
    for name, spec in fields:  # more are appended
        inner: Mutable | None = ()
        if type(spec) is Ref:
            inner = below[spec.index]
        elif type(spec) is Const and spec.mutable:
            inner = (Editable(node._nnx_contents()[name], spec),)
        elif type(spec) is Tree:
            value = node._nnx_contents()[name]
            fields += [(name, child) for child in spec.children]
            foreign = Foreign()
            is_known = foreign.add(value, flatten_once(value)[1])
            inner = None if not is_known else (foreign,) if foreign.items else ()
        if inner is None:
            return None
        found |= {id(getattr(x, "value", x)): x for x in inner}
    return tuple(found.values())


def _flatten(node: Any) -> tuple[Iterable[Any], NodeShape | Layout]:
    if Watch.all:
        notice(node)
    known = node._nnx_tree
    if known is None or known.stamp.valid != known.valid:
        known = _known_shape(node)
        if known is None:
            return _flatten_shared(node)
    shape = known.shape
    return shape.take(shape.open(node)), shape


def _flatten_with_keys(node: Any) -> tuple[Iterable[tuple[Any, Any]], NodeShape | Layout]:
    if Watch.all:
        notice(node)
    known = node._nnx_tree
    if known is None or known.stamp.valid != known.valid:
        known = _known_shape(node)
        if known is None:
            children, layout = _flatten_shared(node)
            return zip(map(PathKey, layout.leaf_paths), children, strict=True), layout
    shape = known.shape
    return zip(shape.keys, shape.take(shape.open(node))), shape  # strict=True would take longer


def _flatten_shared(node: Any) -> tuple[list[Any], Layout]:
    table = table_of(node)
    variables = [x for x in table.objects_with(node) if isinstance(x, Variable)]
    return [*variables, *table.leaves()[len(variables) :]], table.layout


def _unflatten(shape: NodeShape | Layout, children: Iterable[Any]) -> Any:
    if isinstance(shape, Layout):
        leaves, n = list(children), len(shape.variables)
        return build(shape, [None] * n + leaves[n:], dict(zip(shape.variables, leaves, strict=False)))[0]
    items = shape.fill(*children)
    for name in shape.mutable:
        items[name] = shape.statics[name].fresh()
    node = new_node(shape.kind, shape.marks, shape)
    node._nnx_fill_new(node, items)
    return node


def _is_child(value: Any, mark: bool | None) -> bool:
    """Whether an attribute or item of a node is data for JAX to flatten."""
    if isinstance(value, List | Dict):
        return bool(mark) or holds_data(value)
    return is_data(value) if mark is None or is_node(value) else mark


def _key(kind: type, name: Any) -> Any:
    if isinstance(name, str) and kind is not dict:
        return jtu.GetAttrKey(name)
    return jtu.SequenceKey(name) if issubclass(kind, list) else jtu.DictKey(name)


def _register(cls: type) -> None:
    register_pytree(cls, _flatten_with_keys, _unflatten, _flatten)


PYTREE_REGISTRARS.append(_register)
for _cls in (Pytree, List, Dict):
    _register(_cls)
