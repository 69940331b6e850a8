"""The object graph as a flat table: pack, build, diff, commit.

``pack`` turns a pytree of arguments into a table with one *row* for each Variable and each node (Module, List, Dict)
found in it. Rows are numbered in the order of the first visit, depth first. Edges are row numbers, so sharing and
cycles need no special case::

    model = Net(); model.tied = model.embed          row 0  Net    embed -> 1, scale = 0.5, tied -> 1
                                                     row 1  Embed  kernel -> 2
                                                     row 2  Param

The static half of the table is a :class:`Layout`. The other half is a list of *leaves*: the values of the Variables in
row order, then the arrays held directly by nodes, then the leaves of the pytree itself. ``build`` makes fresh objects
from the two.

After a function has run on those objects, ``diff`` packs them again **without renumbering**: an object that existed
before keeps its row, new objects get higher numbers. So "row < n" means "an object that the caller owns". The
difference between the two tables, a :class:`Delta`, says everything that happened: which Variables hold another value
(by identity), which rows are new or have other fields, and where objects are in the output of the function.

``commit`` replays a Delta on the *live* objects, those of the caller. It is the only place where a transform writes to
live objects, and it checks everything that can fail before the first write.

The content of a field in a row is a *spec*: ``LEAF`` (the next leaf), ``Ref(i)`` (the object of row i), a ``Const`` (a
static value) or a ``Tree`` (a pytree whose children are specs).
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import jax.tree_util as jtu

from . import errors
from .calls import ObjectList, entering
from .closures import Watch, is_lent_elsewhere, notice, wait_for_loans
from .foreign import Foreign
from .inputs import is_read, peek
from .nesting import Nesting
from .objects import (
    Node,
    Pytree,
    class_marks,
    explicit_mark,
    fill_all,
    is_bound_method,
    is_data_leaf,
    is_data_part,
    is_node,
    new_node,
    new_nodes,
    slot_owner,
    structure_changed,
)
from .stamps import Stamp, with_stamp
from .static import ATOMS, Const
from .tracing import current_trace
from .traversals import path_key, sorted_keys
from .variables import NO_METADATA, Cell, Variable, as_stored, make_variable, make_variables, new_cell, write_cells

# --- the table ------------------------------------------------------------------------------------------------------


class _Leaf:
    """The spec of a leaf: the next one in the list."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "*"

    def __reduce__(self) -> str:
        return "LEAF"


LEAF = _Leaf()


class _Same:
    """In a row of a Delta: the field has not changed, so the live node keeps what it holds there."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "same"

    def __reduce__(self) -> str:
        return "SAME"


SAME = _Same()


@final
class Ref(NamedTuple):
    """The spec of an object: the number of its row."""

    index: int


class Tree(NamedTuple):
    """The spec of a pytree that holds data."""

    treedef: Any
    paths: tuple[tuple, ...]  # of the children, within the pytree
    children: tuple[Any, ...]  # specs


class BoundMethod(NamedTuple):
    """In place of a treedef: a method that is bound to its only child, a node."""

    function: Callable

    def unflatten(self, children: Sequence[Any]) -> Any:
        return types.MethodType(self.function, *children)


Spec = _Leaf | _Same | Ref | Const | Tree


@final
class VariableRow(NamedTuple):
    """What is static about a Variable."""

    type: type
    metadata: Const


@final
class NodeRow(NamedTuple):
    """What is static about a node: its fields are its attributes, or the items of a List or Dict."""

    type: type
    names: tuple  # of the fields, in the order of insertion, which users can see
    fields: tuple[tuple[Any, Spec], ...]  # (name, spec) in the order of visiting, which is that of paths and leaves
    marks: Const  # what was declared about fields, see objects.py


Row = VariableRow | NodeRow

Owner = tuple[int, int]  # of a leaf: the row that holds it, -1 for the pytree itself, and which leaf of that row it is

KEPT = 64  # how many entries a cache keeps whose keys may belong to functions or objects that are gone


class _Key:
    """Rows and root, hashed once: a tuple would hash a thousand rows again at each look-up."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, *parts: Any):
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return type(other) is _Key and self._parts == other._parts


class Layout:
    """The static half of a packed pytree. Interned: equal layouts are the same object, so they compare by ``is``."""

    __slots__ = ("__dict__", "__weakref__", "avals", "key", "root", "rows", "variables")

    rows: tuple[Row, ...]
    root: Spec  # of the pytree
    variables: tuple[int, ...]  # the rows of the Variables
    avals: Any  # of the leaves of the last model with this layout that was split; shared by its GraphDefs

    _interned: weakref.WeakValueDictionary = weakref.WeakValueDictionary()

    def __new__(cls, rows: tuple[Row, ...], root: Spec):
        key = _Key(rows, root)
        self = cls._interned.get(key)
        if self is None:
            self = object.__new__(cls)
            self.key, self.rows, self.root, self.avals = key, rows, root, None
            self.variables = tuple([i for i, row in enumerate(rows) if type(row) is VariableRow])
            self = cls._interned.setdefault(key, self)
        return self

    def __reduce__(self):
        return Layout, (self.rows, self.root)

    @functools.cached_property
    def blueprint(self) -> Blueprint:
        """How to build objects of this layout."""
        return Blueprint(self)

    @functools.cached_property
    def is_tree(self) -> bool:
        """Whether JAX can flatten it level by level: nothing is shared or cyclic, it is not too deep, and the pytrees
        in it hold nothing but data.
        """
        specs = [self.root, *(spec for row in self.rows if type(row) is NodeRow for _, spec in row.fields)]
        trees = [spec for spec in specs if type(spec) is Tree]
        references = specs + [child for tree in trees for child in tree.children]
        return (
            sum(type(spec) is Ref for spec in references) == len(self.rows)
            and all(map(self._holds_data_only, trees))
            and max(map(len, self.paths), default=0) < _DEEPEST_TREE
        )

    def _holds_data_only(self, tree: Tree) -> bool:
        """Whether there is no static value in a pytree, nor a List or Dict, which may hold some."""
        return type(tree.treedef) is not BoundMethod and all(
            child is LEAF or (type(child) is Ref and not issubclass(self.rows[child.index].type, list | dict))
            for child in tree.children
        )

    @functools.cached_property
    def variants(self) -> weakref.WeakValueDictionary[tuple[tuple[int, Row], ...], Layout]:
        """The layouts that :meth:`with_rows` has made."""
        return weakref.WeakValueDictionary()

    def with_rows(self, rows: tuple[tuple[int, Row], ...]) -> Layout:
        """The layout with some rows replaced, given as (number, row); cached."""
        found = self.variants.get(rows)
        if found is None:
            replaced = dict(rows)
            found = Layout(tuple([replaced.get(i, row) for i, row in enumerate(self.rows)]), self.root)
            self.variants[rows] = found
        return found

    def within(self, root: Spec) -> Layout:
        """The layout of a pytree around the object that this is the layout of; cached."""
        found = self._around.get(root)
        if found is None:
            if len(self._around) >= KEPT:
                self._around.clear()
            found = self._around[root] = Layout(self.rows, root)
        return found

    @functools.cached_property
    def _around(self) -> dict[Spec, Layout]:
        return {}

    @property
    def paths(self) -> tuple[tuple, ...]:
        """The first path to each row."""
        return self._found[0]

    @property
    def leaf_paths(self) -> tuple[tuple, ...]:
        """The path of each leaf, in the order of the leaves."""
        return self._found[1]

    @functools.cached_property
    def positions(self) -> dict[tuple, int]:
        """The position of each leaf, by its path."""
        return {path: k for k, path in enumerate(self.leaf_paths)}

    @functools.cached_property
    def owners(self) -> tuple[Owner, ...]:
        """The owner of each leaf."""
        nodes = [(i, row.fields) for i, row in enumerate(self.rows) if type(row) is NodeRow]
        counts = [(i, sum(count_leaves(spec) for _, spec in fields)) for i, fields in nodes]
        counts.append((-1, count_leaves(self.root)))
        return *[(i, 0) for i in self.variables], *[(i, k) for i, count in counts for k in range(count)]

    @functools.cached_property
    def owner_positions(self) -> dict[Owner, int]:
        """The position of each leaf, by its owner."""
        return {owner: k for k, owner in enumerate(self.owners)}

    @functools.cached_property
    def nesting(self) -> Nesting | None:
        """How the leaves stand in nested dicts; None if JAX cannot flatten these."""
        lengths = set(map(len, self.leaf_paths))
        if 0 in lengths or max(lengths, default=0) >= _DEEPEST_TREE:
            return None
        try:
            return Nesting(self.leaf_paths)
        except ValueError:  # JAX cannot sort the keys
            return None

    def grouped(self, filters: Hashable, groups: Callable[[], Iterable[Sequence[tuple]]]) -> list[Nesting]:
        """How the leaves of each group stand in nested dicts; ``groups`` gives their paths. Cached by the filters."""
        found = self._grouped.get(filters)
        if found is None:
            found = [Nesting(self.leaf_paths, [self.positions[path] for path in paths]) for paths in groups()]
            if len(self._grouped) >= KEPT:
                self._grouped.clear()
            self._grouped[filters] = found
        return found

    def by_position(self, levels: Any) -> dict[int, Any] | None:
        """The leaves of nested dicts by position, if the dicts are nested like all leaves or like a known group."""
        for nesting in (self.nesting, *itertools.chain(*self._grouped.values())):
            if nesting is not None and (leaves := nesting.flatten(levels)) is not None:
                return dict(zip(nesting.positions, leaves, strict=True))
        return None

    @functools.cached_property
    def in_refs(self) -> frozenset[int]:
        """The positions of the Variables that keep their value in a :class:`jax.Ref`."""
        metadata = [cast(VariableRow, self.rows[i]).metadata.value for i in self.variables]
        return frozenset(k for k, found in enumerate(metadata) if found.get("ref"))

    @functools.cached_property
    def _grouped(self) -> dict[Hashable, list[Nesting]]:
        return {}

    @functools.cached_property
    def _found(self) -> tuple[tuple, tuple]:
        return _find_paths(self)


_DEEPEST_TREE = 100  # JAX flattens recursively, and Python allows about 1,000 nested calls


def _find_paths(layout: Layout) -> tuple[tuple, tuple]:
    paths: list[Any] = [None] * len(layout.rows)
    of_row: list[list] = [[] for _ in range(len(layout.rows) + 1)]  # the last entry: leaves of the pytree itself
    stack: list[tuple[Spec, tuple, int]] = [(layout.root, (), -1)]
    while stack:
        spec, path, owner = stack.pop()
        if spec is LEAF:
            of_row[owner].append(path)
        elif type(spec) is Tree:
            stack.extend(
                (child, (*path, *suffix), owner)
                for suffix, child in zip(reversed(spec.paths), reversed(spec.children), strict=True)
            )
        elif type(spec) is Ref and paths[spec.index] is None:
            paths[spec.index], row = path, layout.rows[spec.index]
            if type(row) is NodeRow:
                stack.extend((child, (*path, name), spec.index) for name, child in reversed(row.fields))
    leaf_paths = [paths[i] for i in layout.variables] + [path for paths_ in of_row for path in paths_]
    return tuple(paths), tuple(leaf_paths)


# --- pack -----------------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """What :func:`pack` returns."""

    layout: Layout
    leaves: list[Any]
    objects: list[Any]  # by row


def pack(tree: Any) -> Packed:
    """Number the objects in a pytree, describe each by a row, and collect the leaves."""
    walk = Walk()
    root = walk.run(tree)
    if Watch.count:
        for x in walk.objects:
            notice(x, trace_of(x))
    layout = Layout(tuple([walk.rows[i] for i in range(len(walk.objects))]), root)
    entering(layout, walk.objects)
    return Packed(layout, walk.leaves(range(len(layout.rows))), walk.objects)


class _Frame:
    """A node or a pytree whose children are being visited; ``build(specs)`` is called when all of them have a spec.

    ``items`` are (key path, child, mark), where marks are those of :func:`explicit_mark`, and all children of the
    whole pytree are marked as data. ``owner`` is the row that holds the leaves in it, -1 for the whole pytree.
    """

    __slots__ = ("build", "items", "owner", "path", "specs")

    def __init__(self, items: Iterator, owner: int, path: tuple, build: Callable):
        self.items, self.owner, self.path, self.build = items, owner, path, build
        self.specs: list[Any] = []


class Walk:
    """Visits objects depth first, with a stack of its own, so that a graph may be of any depth.

    Args:
      known: objects that have rows already. When one is met it is not visited, only by :meth:`revisit`.
      stamp: attached to each object before it is looked into, see stamps.py.
      index: the row of each known object, by its id; computed if not given.
    """

    def __init__(self, known: Iterable[Any] = (), stamp: Stamp | None = None, index: dict[int, int] | None = None):
        self.stamp = None if stamp is None else weakref.ref(stamp)
        self.reliable = True  # whether the stamp and `mutable` reveal every later change of what was visited
        self.mutable: dict[int, tuple[Any, Const]] = {}  # static values that can be changed in place, by id
        self.foreign = Foreign()  # the containers in pytrees, where a stamp is attached
        self.objects: list[Any] = ObjectList(known)
        self.index = {id(x): i for i, x in enumerate(self.objects)} if index is None else index
        self.rows: dict[int, Row] = {}
        self.constants: dict[int, Const] = {}  # by id, of values that are static wherever they occur, often many times
        self.plain_rows: dict[type, VariableRow] = {}  # of Variables without metadata, which are many and all alike
        self.paths: dict[int, tuple] = {}  # the first path to each row
        self.cells: dict[int, Cell] = {}  # of each Variable, by row
        self.arrays: dict[int, list] = {}  # the leaves that each node holds directly, by row; -1 for the whole pytree

    def run(self, tree: Any, path: tuple = ()) -> Spec:
        """Visit a pytree and everything below it, and return its spec."""
        top = _Frame(iter(()), -1, path, lambda specs: None)
        self.arrays.setdefault(-1, [])
        self._drain(self._spec(tree, True, top, ()))
        return top.specs[0]

    def revisit(self, number: int, path: tuple) -> None:
        """Describe a known object as it is now; objects in it that are not known are visited, too."""
        self._drain(self._enter(number, path))

    def keep(self, layout: Layout) -> None:
        """In place of :meth:`revisit`, if the known objects are as the layout says, and the nodes hold no arrays."""
        self.rows, self.paths = dict(enumerate(layout.rows)), dict(enumerate(layout.paths))
        self.cells = {i: self.objects[i]._cell for i in layout.variables}
        self.arrays = {i: [] for i in self.rows.keys() - self.cells.keys()}

    def leaves(self, numbers: Iterable[int]) -> list[Any]:
        """The leaves of the given rows, then those of the pytree, in the order that ``build`` takes them."""
        numbers = list(numbers)
        found = [self.cells[i].value for i in numbers if i in self.cells]
        for i in (*numbers, -1):
            found += self.arrays.get(i, ())
        return found

    def _drain(self, frame: _Frame | None) -> None:
        """Visit everything below a frame."""
        stack = [] if frame is None else [frame]
        while stack:
            frame = stack[-1]
            for suffix, value, mark in frame.items:
                if mark is not True and (constant := self.constants.get(id(value))) is not None:
                    frame.specs.append(constant)
                    continue
                child = self._spec(value, mark, frame, suffix)
                if child is not None:
                    stack.append(child)
                    break
            else:
                stack.pop()
                frame.build(frame.specs)

    def _spec(self, value: Any, mark: bool | None, frame: _Frame, suffix: tuple) -> _Frame | None:
        """Append the spec of ``value`` to ``frame.specs``; return a frame if there is more to visit below it."""
        if is_node(value):
            number = self.index.get(id(value))
            if number is not None:
                frame.specs.append(Ref(number))
                return None
            number = self.index[id(value)] = len(self.objects)
            self.objects.append(value)
            frame.specs.append(Ref(number))
            return self._enter(number, (*frame.path, *suffix))
        if type(value) in ATOMS and mark is not True:
            constant = self.constants[id(value)] = Const(value, (type(value), value))
            frame.specs.append(constant)
            return None
        if type(value) is StaticArgument:
            frame.specs.append(value.frozen())
            return None
        if mark is False or (mark is None and isinstance(value, _NO_DATA)):
            self._constant(value, mark, frame, suffix)
            return None
        if is_data_leaf(value):
            frame.specs.append(LEAF)
            self.arrays[frame.owner].append(value)
            return None
        return self._tree(value, mark, frame, suffix)

    def _constant(self, value: Any, mark: bool | None, frame: _Frame, suffix: tuple) -> None:
        constant = Const.of(value, (*frame.path, *suffix))
        frame.specs.append(constant)
        if constant.mutable:
            self.mutable[id(value)] = value, constant
        elif mark is None or isinstance(value, _NO_DATA):  # it is not static because of its mark alone
            self.constants[id(value)] = constant

    def _tree(self, value: Any, mark: bool | None, frame: _Frame, suffix: tuple) -> _Frame | None:
        """A pytree becomes a Tree if it holds data or is marked as data, and a Const otherwise.

        In an attribute that is marked as data only arrays are leaves. In the pytree of arguments everything is a leaf.
        """
        if jtu.all_leaves([value]) and not is_bound_method(value):  # not a pytree
            if mark is True:
                frame.specs.append(LEAF)
                self.arrays[frame.owner].append(value)
            else:
                self._constant(value, mark, frame, suffix)
            return None
        keys, children, treedef = flatten_once(value)
        if mark is None and not any(map(is_data_part, children)):
            self._constant(value, mark, frame, suffix)
            return None
        place = len(frame.specs)
        frame.specs.append(None)

        def build(specs: list[Any]) -> None:
            frame.specs[place] = Tree(treedef, keys, tuple(specs))
            if self.stamp is not None:
                self.reliable = self.reliable and comparable(value, children, self.foreign) and LEAF not in specs

        mark = mark if frame.owner == -1 else None
        items = ((key, child, mark) for key, child in zip(keys, children, strict=True))
        return _Frame(items, frame.owner, (*frame.path, *suffix), build)

    def _enter(self, number: int, path: tuple) -> _Frame | None:
        """Write the row of a Variable; of a node, return the frame that will write it."""
        value = self.objects[number]
        self.paths[number] = path
        if isinstance(value, Variable):
            if self.stamp is not None:
                object.__setattr__(value, "_stamps", with_stamp(value._stamps, self.stamp))
            self.rows[number] = self._variable_row(value, path)
            self.cells[number] = value._cell
            return None
        if self.stamp is not None:
            object.__setattr__(value, "_nnx_stamps", with_stamp(value._nnx_stamps, self.stamp))
        self.reliable = self.reliable and value._nnx_guarded
        self.arrays[number] = []
        held, marks = value._nnx_contents(), _frozen_items(value._nnx_marks, path)
        self.reliable = self.reliable and not marks.mutable
        names = tuple(held)
        order = names if isinstance(value, list) and len(names) == len(value) else sorted_keys(names)

        def build(specs: list[Any]) -> None:
            self.rows[number] = NodeRow(type(value), names, tuple(zip(order, specs, strict=True)), marks)

        if marks is not _NO_ITEMS or class_marks(type(value)):
            items = (((name,), held[name], explicit_mark(value, name)) for name in order)
        else:
            items = (((name,), held[name], None) for name in order)
        return _Frame(items, number, path, build)

    def _variable_row(self, variable: Variable, path: tuple) -> VariableRow:
        kind = type(variable)
        if variable._metadata:
            metadata = Const.of_items(variable._metadata, (*path, "metadata"))
            self.reliable = self.reliable and not metadata.mutable
            return VariableRow(kind, metadata)
        row = self.plain_rows.get(kind)
        if row is None:
            row = self.plain_rows[kind] = VariableRow(kind, _NO_ITEMS)
        return row


def flatten_once(value: Any) -> tuple[tuple[tuple, ...], list[Any], Any]:
    """The paths of the leaves and nodes in a pytree, these themselves, and its treedef or :class:`BoundMethod`."""
    if is_bound_method(value):
        return ((),), [value.__self__], BoundMethod(value.__func__)
    keyed, treedef = jtu.tree_flatten_with_path(value, is_leaf=is_node)
    return tuple([tuple(map(path_key, keys)) for keys, _ in keyed]), [child for _, child in keyed], treedef


def comparable(value: Any, children: list[Any], foreign: Foreign) -> bool:
    """Whether a pytree can get other children in its containers only, which are added to ``foreign``; or never."""
    return type(value) is types.MethodType or foreign.add(value, children)


_NO_DATA = (type, types.FunctionType)


def _frozen_items(items: dict[Any, Any] | None, path: tuple) -> Const:
    return Const.of_items(items, path) if items else _NO_ITEMS


_NO_ITEMS = Const.of_items(NO_METADATA, ())  # its value is NO_METADATA itself, so that ``is`` tells that it is empty


class StaticArgument:
    """Marks an argument that is part of the program (``static_argnums``); it becomes a Const."""

    __slots__ = ("path", "value")

    def __init__(self, value: Any, path: tuple = ()):
        self.value, self.path = value, path

    def frozen(self) -> Const:
        return Const.of(self.value, self.path)


# --- build ----------------------------------------------------------------------------------------------------------


def build(
    layout: Layout,
    leaves: Sequence[Any],
    given: Mapping[int, Any] | None = None,
    cell: Callable[[Any], Cell] = new_cell,
    stamp: Stamp | None = None,
) -> tuple[Any, list[Any]]:
    """Make fresh objects from a table, as of the running trace; returns the pytree, and the objects by row.

    Args:
      layout: the static half of the table.
      leaves: the other half.
      given: objects to be used in place of fresh ones, by row; a node among them is filled anew.
      cell: makes the cells of the Variables.
      stamp: attached to the fresh objects: a change of their structure invalidates it.
    """
    blueprint = layout.blueprint
    stamps = () if stamp is None else (weakref.ref(stamp),)
    made = make_variables(blueprint.variable_types, leaves, fresh(blueprint.metadata), cell, stamps)
    for owner, kinds in blueprint.node_types.items():
        made += new_nodes(owner, kinds, stamps)
    for i, marks in blueprint.marks:
        object.__setattr__(made[i], "_nnx_marks", dict(marks))
    objects = [made[i] for i in blueprint.order]
    del made  # saves memory: it is as long as the model
    for i, x in (given or {}).items():
        objects[i] = x
        if isinstance(x, Node):
            x._nnx_fill({})
    pool = objects  # extended for now, and cut back below: a copy would be as long as the model
    pool += [*leaves[len(layout.variables) :], *fresh(blueprint.constants)]
    pool += [value_of(tree, objects, iter(leaves[start:stop])) for tree, start, stop in blueprint.trees]
    for rows, names, positions in blueprint.attributes:
        fill_all(map(objects.__getitem__, rows), names, map(pool.__getitem__, positions))
    for i, positions in blueprint.lists:
        list.extend(objects[i], map(pool.__getitem__, positions))
    for i, names, positions in blueprint.others:
        objects[i]._nnx_fill(dict(zip(names, [pool[k] for k in positions], strict=True)))
    del pool[len(layout.rows) :]
    return value_of(layout.root, objects, iter(leaves[blueprint.held :])), objects


class Blueprint:
    """How to make the objects of a layout with few Python calls.

    The values of all fields are taken from one list, the *pool*: the objects by row, the arrays held directly by nodes,
    the constants, the pytrees.

    Attributes:
      attributes: for nodes whose attributes have the same names: their rows, the names, and the places in the pool of
        the values, those of the first node, then of the second, and so on.
      lists: for Lists without attributes: the row, and the places of the items.
      others: for each other node: the row, the names of the fields, and the places of their values.
      contents: for each node its row, the names and the places, to see later whether it holds something else.
      only_variables: whether nothing in the objects can change in place but the values of Variables.
      reliable: whether, besides, a stamp attached to the fresh objects reveals every change of their structure.
    """

    def __init__(self, layout: Layout):
        rows: Any = layout.rows
        numbers = [i for i, row in enumerate(rows) if type(row) is NodeRow]
        self.variable_types: list[type] = [rows[i].type for i in layout.variables]
        by_owner: dict[type, list[int]] = {}
        for i in numbers:
            by_owner.setdefault(slot_owner(rows[i].type), []).append(i)
        self.node_types = {owner: [rows[i].type for i in found] for owner, found in by_owner.items()}
        made = {i: k for k, i in enumerate((*layout.variables, *itertools.chain(*by_owner.values())))}
        self.order = [made[i] for i in range(len(rows))]
        self.metadata: list[Const] = [rows[i].metadata for i in layout.variables]
        self.marks = [(made[i], rows[i].marks.value) for i in numbers if rows[i].marks.value]
        self.held = len(layout.variables)  # the number of leaves in objects, as opposed to the pytree itself
        self.constants: list[Const] = []  # an immutable value once, a mutable one for each use
        self.trees: list[tuple[Tree, int, int]] = []  # with the range of their leaves
        self._constants: dict[int, int] = {}  # id of an immutable value -> its place in `constants`
        sources = [{name: self._source(spec) for name, spec in rows[i].fields} for i in numbers]
        mutable = any(const.mutable for const in (*self.constants, *self.metadata))
        self.only_variables = not (mutable or self.trees or self.held > len(layout.variables))
        self.reliable = self.only_variables and all(
            rows[i].type._nnx_guarded and not rows[i].marks.mutable for i in numbers
        )
        count = len(rows) - len(layout.variables)  # leaf k is at count + k: the values of Variables are not in the pool
        starts = {Ref: 0, _Leaf: count, Const: count + len(layout.leaf_paths)}
        starts[Tree] = starts[Const] + len(self.constants)
        groups: dict[tuple, tuple[list[int], list[int]]] = {}
        self.lists: list[tuple[int, list[int]]] = []
        self.others: list[tuple[int, tuple, list[int]]] = []
        self.contents: list[tuple[int, tuple, list[int]]] = []
        for i, fields in zip(numbers, sources, strict=True):
            kind, names = rows[i].type, rows[i].names
            positions = [starts[source] + k for source, k in (fields[name] for name in names)]
            self.contents.append((i, names, positions))
            if names and issubclass(kind, Pytree) and not kind._nnx_slot_names:
                found, theirs = groups.setdefault(names, ([], []))
                found.append(i)
                theirs += positions
            elif issubclass(kind, list) and names == tuple(range(len(names))):
                self.lists.append((i, positions))
            else:
                self.others.append((i, names, positions))
        self.attributes = [(found, names, positions) for names, (found, positions) in groups.items()]

    def _source(self, spec: Spec) -> tuple[type, int]:
        """The kind of a spec, and the number of its object, leaf, constant or pytree."""
        if type(spec) is Ref:
            return Ref, spec.index
        if type(spec) is Const:
            number = None if spec.mutable else self._constants.get(id(spec.value))
            if number is None:
                number = self._constants[id(spec.value)] = len(self.constants)
                self.constants.append(spec)
            return Const, number
        start = self.held
        self.held += count_leaves(spec)
        if spec is LEAF:
            return _Leaf, start
        self.trees.append((cast(Tree, spec), start, self.held))
        return Tree, len(self.trees) - 1


def fresh(constants: list[Const]) -> list[Any]:
    """The values of constants; those that can change in place are copies."""
    return [const.value if const.parts is None else const.fresh() for const in constants]


def _is_as_built(layout: Layout, leaves: Sequence[Any], objects: Sequence[Any]) -> bool:
    """Whether objects made by ``build`` still hold, except for values of Variables, the very things they were given.

    This is faster than describing them again. False also if there is anything that could have changed in place.
    """
    blueprint, rows = layout.blueprint, layout.rows
    if not blueprint.only_variables or list(map(type, objects)) != [row.type for row in rows]:
        return False
    pool = [*objects, *leaves[len(layout.variables) :], *fresh(blueprint.constants)]
    for i, names, positions in blueprint.contents:
        held, marks = objects[i]._nnx_contents(), objects[i]._nnx_marks or NO_METADATA
        if tuple(held) != names or not all(map(operator.is_, held.values(), map(pool.__getitem__, positions))):
            return False
        if not _holds_same(marks, cast(NodeRow, rows[i]).marks.value):
            return False
    metadata = (const.value for const in blueprint.metadata)
    return all(_holds_same(objects[i]._metadata, was) for i, was in zip(layout.variables, metadata, strict=True))


def _holds_same(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
    return a is b or (tuple(a) == tuple(b) and all(map(operator.is_, a.values(), b.values())))


def _shell(row: Row) -> Any:
    """An empty object for a row."""
    if type(row) is VariableRow:
        return make_variable(row.type, None, row.metadata.fresh())
    return new_node(row.type, row.marks.value)


def value_of(spec: Spec, objects: Sequence[Any], leaves: Iterator[Any]) -> Any:
    """The value of a spec, given the objects by row, and the leaves that have not been used yet."""
    if spec is LEAF:
        return next(leaves)
    if type(spec) is Ref:
        return objects[spec.index]
    if type(spec) is Const:
        return spec.fresh()
    tree = cast(Tree, spec)
    return tree.treedef.unflatten([value_of(child, objects, leaves) for child in tree.children])


# --- diff -----------------------------------------------------------------------------------------------------------


class Delta(NamedTuple):
    """What a function did to the objects of a layout, and what it returned. Static."""

    values: tuple[int, ...]  # the rows of Variables that got another value
    rows: tuple[tuple[int, Row], ...]  # new rows, and rows that have changed otherwise
    root: Spec  # of the output


class After(NamedTuple):
    """The table after a call, and the difference to the table before."""

    rows: list[Row]  # of every object, old and new
    root: Spec  # of the output
    delta: Delta
    leaves: list[Any]  # of the Delta, in the order in which ``commit`` takes them
    owners: list[Owner]  # of each of these leaves, -1 for the output
    walk: Walk

    def values_of(self, row: int) -> Sequence[Any]:
        """What filters see of a row: the Variable itself, or the arrays that the node holds."""
        return (self.walk.objects[row],) if row in self.walk.cells else self.walk.arrays[row]

    @property
    def paths(self) -> tuple[tuple, ...]:
        """The path of each leaf of the Delta; that of a leaf of the output begins with ``<output>``."""
        below: dict[int, list[tuple]] = {}  # of the leaves that nodes, and the output, hold themselves

        def path_of(row: int, k: int) -> tuple:
            if row in self.walk.cells:
                return self.walk.paths[row]
            if row < 0 and row not in below:
                below[row] = [("<output>", *suffix) for suffix in _leaf_paths(self.root)]
            elif row not in below:
                fields = self.rows[row].fields  # type: ignore[union-attr]  # a node
                held = [(name, *suffix) for name, spec in fields for suffix in _leaf_paths(spec)]
                below[row] = [(*self.walk.paths[row], *suffix) for suffix in held]
            return below[row][k]

        return tuple([path_of(*owner) for owner in self.owners])

    @property
    def own(self) -> list[Any]:
        """The leaves of the output itself."""
        return self.walk.arrays[-1]


def diff(
    layout: Layout, before: Sequence[Any], objects: Sequence[Any], out: Any, forced: Collection[int] = ()
) -> After:
    """Compare ``objects``, built from ``layout`` and the leaves ``before``, with what they are now.

    ``out`` is what the function returned. A leaf counts as changed if another object is now in its place. The value of
    a Variable also does if its position is in ``forced`` and it was read.
    """
    walk = Walk(objects)
    restructured = not _is_as_built(layout, before, objects)
    if restructured:
        for i, path in enumerate(layout.paths):
            walk.revisit(i, path)
    else:
        walk.keep(layout)
    root = walk.run(out, ("<output>",))
    if Watch.count:  # the function may have returned or attached objects from outside of the trace
        for x in walk.objects[len(objects) :]:
            notice(x, trace_of(x))
    n, positions = len(layout.rows), iter(range(len(before)))
    values, rows, returned = [], {}, {}  # returned: which of the arrays that a node holds are leaves of the Delta
    for i, position in zip(layout.variables, positions, strict=False):
        if walk.rows[i] != layout.rows[i]:
            rows[i] = walk.rows[i]
        elif peek(walk.cells[i]) is not before[position] or (position in forced and is_read(walk.cells[i])):
            values.append(i)
    for i, row in enumerate(layout.rows) if restructured else ():
        if type(row) is NodeRow:
            changed = _changed_fields(row, walk.rows[i], before, positions, walk.arrays[i])
            if changed is not None:
                rows[i], returned[i] = changed
    rows |= {i: walk.rows[i] for i in range(n, len(walk.objects))}
    numbers = [*values, *sorted(rows)]
    owners = [(i, 0) for i in numbers if i in walk.cells]
    owners += [(i, k) for i in (*numbers, -1) for k in returned.get(i, range(len(walk.arrays.get(i, ()))))]
    leaves = [_leaving(walk.cells[i].value, walk.rows[i]) if i in walk.cells else walk.arrays[i][k] for i, k in owners]
    delta = Delta(tuple(values), tuple(sorted(rows.items())), root)
    return After([walk.rows[i] for i in range(len(walk.objects))], root, delta, leaves, owners, walk)


def _leaving(value: Any, row: Row) -> Any:
    """The value of a Variable in a form that JAX can return: not a Ref, but what is in it."""
    return as_stored(value, NO_METADATA) if "ref" in cast(VariableRow, row).metadata.value else value


def _changed_fields(
    old: NodeRow, new: Row, before: Sequence[Any], positions: Iterator[int], arrays: list
) -> tuple[NodeRow, list[int]] | None:
    """The new row of a node with ``SAME`` in unchanged fields, and which of its arrays the others hold; None if no
    field has changed. The next ``positions`` are those of the arrays that the node held before.
    """
    assert isinstance(new, NodeRow)
    was = {name: (spec, [next(positions) for _ in range(count_leaves(spec))]) for name, spec in old.fields}
    fields, held, used = [], [], 0
    for name, spec in new.fields:
        now = range(used, used + count_leaves(spec))
        used = now.stop
        old_spec, old_positions = was.get(name, (None, ()))
        if spec == old_spec and all(arrays[k] is before[p] for k, p in zip(now, old_positions, strict=True)):
            fields.append((name, SAME))
        else:
            fields.append((name, spec))
            held += now
    if new[:2] == old[:2] and new.marks == old.marks and all(spec is SAME for _, spec in fields):
        return None
    return NodeRow(new.type, new.names, tuple(fields), new.marks), held


def has_refs(spec: Spec) -> bool:
    return type(spec) is Ref or (type(spec) is Tree and any(map(has_refs, spec.children)))


def _leaf_paths(spec: Spec) -> list[tuple]:
    """The paths of the leaves that a spec has itself."""
    if type(spec) is Tree:
        pairs = zip(spec.paths, spec.children, strict=True)
        return [(*path, *suffix) for path, child in pairs for suffix in _leaf_paths(child)]
    return [()] if spec is LEAF else []


def count_leaves(spec: Spec) -> int:
    if type(spec) is Tree:
        return sum(map(count_leaves, spec.children))
    return int(spec is LEAF)


# --- commit ---------------------------------------------------------------------------------------------------------


def commit(layout: Layout, delta: Delta, leaves: Sequence[Any], live: Sequence[Any]) -> Any:
    """Write a Delta to the live objects, and return the output of the function.

    ``leaves`` are those of ``delta.values``, then of ``delta.rows`` (Variables first), then of the output.

    Raises:
      TraceContextError: if a live object that is to change belongs to another trace; then nothing has been written.
    """
    check_commit(layout, delta, live)
    n = len(layout.rows)
    remaining = iter(leaves)
    objects = [*live, *(_shell(row) for i, row in delta.rows if i >= n)]
    targets = [objects[i] for i in delta.values]
    values = list(itertools.islice(remaining, len(targets)))
    restructured = []
    for i, row in delta.rows:
        if type(row) is VariableRow:
            targets.append(objects[i])
            value, metadata = next(remaining), row.metadata.value
            values.append(as_stored(value, metadata) if "ref" in metadata else value)
    for i, row in delta.rows:
        if type(row) is NodeRow:
            restructured.append((i, row, _contents(objects[i], row, objects, remaining)))
        elif i < n:
            restructured.append((i, row, None))
    out = value_of(delta.root, objects, remaining)
    cells = [target._cell for target in targets]

    def write() -> None:
        write_cells(cells, values)
        for i, row, contents in restructured:
            if contents is None:
                _restructure_variable(objects[i], row)
            else:
                _restructure_node(objects[i], layout.rows[i] if i < n else None, row, contents)

    try:
        write()  # which cannot fail
    except BaseException:  # but may be interrupted
        write()
        raise
    return out


def check_commit(layout: Layout, delta: Delta, live: Sequence[Any]) -> None:
    """Raise :class:`TraceContextError` if a live object that ``delta`` changes belongs to another trace."""
    trace, n = current_trace(), len(layout.rows)
    for i in delta.values:
        if live[i]._cell.trace is not trace:
            raise _refusal(layout, live[i], i, "the new value")
    for i, row in delta.rows:
        if i < n and trace is None and is_lent_elsewhere(trace_of(live[i])):
            wait_for_loans()
        if i < n and trace_of(live[i]) is not trace:
            raise _refusal(layout, live[i], i, _what_changed(row))


def trace_of(x: Any) -> Any:
    """The trace under which a node or Variable was made."""
    return x._cell.trace if isinstance(x, Variable) else x._nnx_trace


def _refusal(layout: Layout, node: Any, row: int, what: str) -> errors.TraceContextError:
    reached = errors.locate(node, skip=4)
    where = errors.format_path(layout.paths[row]) + (f", which is {reached}" if reached else "")
    return errors.TraceContextError(_REFUSED.format(what=what, kind=type(node).__name__, where=where))


_REFUSED = """\
Cannot write {what} of the {kind} at {where}: the object was made outside of the JAX transformation that is running, \
so a traced value would outlive its trace. Nothing has been written.
Pass the outer object as an argument through an nnxlib transform all the way (nnx.jit instead of jax.jit), or make the \
call read-only (for example `model.eval()`)."""


def _what_changed(row: Row) -> str:
    if type(row) is VariableRow:
        return "the metadata"
    names = [name for name, spec in row.fields if spec is not SAME]
    return f"attribute {', '.join(map(repr, names))}" if names else "the attributes"


def _contents(node: Any, row: NodeRow, objects: Sequence[Any], leaves: Iterator[Any]) -> dict[Any, Any]:
    """The new contents of a live node; an unchanged field keeps the very object that it holds."""
    held = node._nnx_contents()
    values = {name: held[name] if spec is SAME else value_of(spec, objects, leaves) for name, spec in row.fields}
    return {name: values[name] for name in row.names}


def _restructure_node(node: Any, before: Row | None, row: NodeRow, contents: dict[Any, Any]) -> None:
    if type(node) is not row.type:
        object.__setattr__(node, "__class__", row.type)
    node._nnx_fill(contents)
    if not _same_structure(before, row):
        object.__setattr__(node, "_nnx_marks", dict(row.marks.value) or None)
        structure_changed(node)


def _same_structure(before: Row | None, row: NodeRow) -> bool:
    """Whether a node with the row ``before`` gets nothing new but arrays where it held arrays."""
    if not isinstance(before, NodeRow) or row._replace(fields=before.fields) != before:
        return False
    specs = dict(before.fields)
    return all(spec is SAME or spec == specs[name] for name, spec in row.fields)


def _restructure_variable(variable: Variable, row: VariableRow) -> None:
    if type(variable) is not row.type:
        object.__setattr__(variable, "__class__", row.type)
    object.__setattr__(variable, "_metadata", row.metadata.fresh())
    variable._structure_changed()
