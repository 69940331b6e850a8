"""The walk that describes objects: it visits them depth first, and writes a row for each.

``pack`` walks a pytree of arguments; ``diff`` walks the fresh objects of a trace again, and the output of the function;
a live table walks its root. A :class:`Walk` numbers the objects in the order of the first visit. Objects that have
numbers already are given to it as ``known``: it refers to them by these numbers, and visits one only when it is told to
(:meth:`Walk.revisit`). Whether something is an object, a leaf, a pytree with data or a static value is decided in one
place, :meth:`Walk._visit`.

A walk whose result will be cached attaches a *stamp* to each object (stamps.py), and notes what can change without the
stamp: static values that can be changed in place, containers in pytrees, and whether there is anything else (then it is
not ``reliable``).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax.tree_util as jtu

from .cells import Cell
from .closures import contents_and_marks, is_lent_elsewhere
from .data import (
    class_marks,
    explicit_mark,
    has_data,
    is_bound_method,
    is_data_leaf,
    is_data_part,
    is_node,
    is_plain,
    is_without_order,
)
from .editable import Editable
from .errors import PathError, place_of
from .foreign import Foreign
from .layout import Layout
from .metadata import NO_METADATA
from .rows import LEAF, ROOT, BoundMethod, NodeRow, Ref, Row, Spec, Tree, VariableRow
from .stamps import Stamp, with_stamp
from .static import ATOMS, Const, StaticArgument
from .traversals import path_key, sorted_keys
from .variables import Variable


class _Frame:
    """A node or a pytree whose children are being visited.

    Attributes:
      items: the children that are yet to be visited, as (path below this, child, mark). A mark says whether the child
        was declared data or static, see :func:`explicit_mark`.
      row: the one that holds the leaves found here; ROOT for those of the pytree around the objects.
      path: of the node or pytree.
      finish: makes the spec of the node or pytree from those of its children, when all have been visited.
      specs: of the children visited so far.
    """

    __slots__ = ("finish", "items", "path", "row", "specs")

    def __init__(self, items: Iterator, row: int, path: tuple, finish: Callable[[list[Any]], Any]):
        self.items, self.row, self.path, self.finish = items, row, path, finish
        self.specs: list[Any] = []


class ObjectList(list):
    """The objects of a packed table, by row: a list that can be referred to weakly (calls.py does)."""

    __slots__ = ("__weakref__",)


class Walk:
    """Visits objects depth first, with a stack of its own, so that a graph may be of any depth.

    Args:
      known: objects that have rows already, in their order; they are visited by :meth:`revisit` only.
      stamp: attached to each object before it is looked into, see stamps.py.
      index: the row of each known object, by its id; computed if not given.
    """

    def __init__(self, known: Iterable[Any] = (), stamp: Stamp | None = None, index: dict[int, int] | None = None):
        self.stamp = None if stamp is None else weakref.ref(stamp)
        self.reliable = True  # whether the stamp and `mutable` reveal every later change of what was visited
        self.mutable: dict[int, Editable] = {}  # static values that can be changed in place, by id
        self.foreign = Foreign()  # the containers in pytrees, where a stamp is attached
        self.unwatched: set[tuple[int, Any]] = set()  # (row, name) of fields with pytrees that may change unnoticed
        self.objects: list[Any] = ObjectList(known)
        self.index = {id(x): i for i, x in enumerate(self.objects)} if index is None else index
        self.rows: dict[int, Row] = {}
        self.constants: dict[int, Const] = {}  # by id, of values that are static wherever they occur, often many times
        self.plain_rows: dict[type, VariableRow] = {}  # of Variables without metadata, which are many and all alike
        self.paths: dict[int, tuple] = {}  # the first path to each row
        self.cells: dict[int, Cell] = {}  # of each Variable, by row
        self.arrays: dict[int, list] = {}  # the leaves that each node, or the pytree (ROOT), holds directly, by row

    def run(self, tree: Any, path: tuple = ()) -> Spec:
        """Visit a pytree and everything below it, and return its spec."""
        self.arrays.setdefault(ROOT, [])
        around = _Frame(iter(()), ROOT, path, tuple)
        return self._drain(self._visit(tree, True, around, ()))

    def revisit(self, number: int, path: tuple) -> None:
        """Describe a known object as it is now; objects in it that are not known are visited, too."""
        self._drain(self._enter(number, path))

    def all_rows(self) -> tuple[Row, ...]:
        """The rows of all objects, in order."""
        return tuple([self.rows[i] for i in range(len(self.objects))])

    def take_rows(self, layout: Layout, rows: Iterable[int]) -> None:
        """Take the rows of known objects from the layout, without a visit; the nodes among them hold no arrays."""
        for i in rows:
            self.rows[i], self.paths[i] = layout.rows[i], layout.paths[i]
            if type(layout.rows[i]) is VariableRow:
                self.cells[i] = self.objects[i]._cell
            else:
                self.arrays[i] = []

    def leaves(self) -> list[Any]:
        """The leaves, in the order that ``build`` takes them."""
        numbers = range(len(self.objects))
        found = [self.cells[i].value for i in numbers if i in self.cells]
        for i in (*numbers, ROOT):
            found += self.arrays.get(i, ())
        return found

    def values_of(self, row: int) -> Sequence[Any]:
        """The values of a row that filters are asked about: the Variable itself, or the arrays that the node holds."""
        return (self.objects[row],) if row in self.cells else self.arrays[row]

    def _drain(self, found: Spec | _Frame) -> Spec:
        """Visit everything below a frame, and return its spec."""
        stack = [found] if type(found) is _Frame else []
        while stack:
            frame = stack[-1]
            for suffix, value, mark in frame.items:
                # A value that is static in one place, such as None or a function, is so in all, unless it is marked.
                child = None if mark is True else self.constants.get(id(value))
                if child is None:
                    child = self._visit(value, mark, frame, suffix)
                    if type(child) is _Frame:
                        stack.append(child)
                        break
                frame.specs.append(child)
            else:
                stack.pop()
                found = frame.finish(frame.specs)
                if stack:
                    stack[-1].specs.append(found)
        return cast(Spec, found)

    def _visit(self, value: Any, mark: bool | None, frame: _Frame, suffix: tuple) -> Spec | _Frame:
        """The spec of a child of ``frame``; or a frame, which makes it, if there is more to visit below the child."""
        if is_node(value):
            if type(value) in weakref.ProxyTypes:
                value = value._nnx_changed.__self__  # the object that it stands for
            number = self.index.get(id(value))
            if number is not None:
                return Ref(number)
            number = self.index[id(value)] = len(self.objects)
            self.objects.append(value)
            return self._enter(number, (*frame.path, *suffix))
        if type(value) in ATOMS and mark is not True:
            constant = self.constants[id(value)] = Const(value, (type(value), value))
            return constant
        if type(value) is StaticArgument:
            return value.frozen()
        if mark is False or (mark is None and (isinstance(value, _STATIC_TYPES) or is_plain(value))):
            return self._constant(value, mark, (*frame.path, *suffix))
        if is_data_leaf(value):
            self.arrays[frame.row].append(value)
            return LEAF
        return self._tree(value, mark, frame, suffix)

    def _constant(self, value: Any, mark: bool | None, path: tuple) -> Const:
        constant = Const.of(value, path)
        if constant.mutable:
            self.mutable[id(value)] = Editable(value, constant)
        elif mark is None or isinstance(value, _STATIC_TYPES):  # it is not static because of its mark alone
            self.constants[id(value)] = constant
        return constant

    def _tree(self, value: Any, mark: bool | None, frame: _Frame, suffix: tuple) -> Spec | _Frame:
        """A pytree becomes a Tree if it holds data or is marked as data, and a Const otherwise.

        In an attribute that is marked as data only arrays are leaves. In the pytree of arguments everything is a leaf.
        """
        path = (*frame.path, *suffix)
        if jtu.all_leaves([value]) and not is_bound_method(value):  # not a pytree
            if mark is not True:
                return self._constant(value, mark, path)
            self.arrays[frame.row].append(value)
            return LEAF
        keys, children, treedef = flatten_once(value, path, frame.row == ROOT)
        if mark is None and not any(map(is_data_part, children)):
            return self._constant(value, mark, path)

        def finish(specs: list[Any]) -> Tree:
            # What can change unnoticed is flattened at each call (foreign.py); a pytree within it makes all be walked.
            if self.stamp is not None and (LEAF in specs or not self.foreign.add(value, children)):
                self.unwatched.add((frame.row, suffix[0]))
                self.reliable = self.reliable and Tree not in map(type, specs)
            return Tree(treedef, keys, tuple(specs))

        mark = mark if frame.row == ROOT else None
        items = ((key, child, mark) for key, child in zip(keys, children, strict=True))
        return _Frame(items, frame.row, path, finish)

    def _enter(self, number: int, path: tuple) -> Ref | _Frame:
        """Write the row of a Variable, and return its spec; for a node, return the frame that will do so."""
        value = self.objects[number]
        self.paths[number] = path
        if self.stamp is not None:
            object.__setattr__(value, "_nnx_stamps", with_stamp(value._nnx_stamps, self.stamp))
        if isinstance(value, Variable):
            self.rows[number] = self.variable_row(value, path)
            self.cells[number] = value._cell
            return Ref(number)
        self.arrays[number] = []
        held, marks = contents_and_marks(value)
        has_lent = value._nnx_trace is not None and is_lent_elsewhere(value._nnx_trace)  # its arrays are elsewhere
        marks = Const.of_items(marks, path) if marks else _NO_ITEMS
        self.reliable = self.reliable and value._nnx_guarded and not marks.mutable and not has_lent
        declares = value._nnx_is_pytree and (marks is not _NO_ITEMS or class_marks(type(value)))
        names = tuple(held)
        order = names if isinstance(value, list) and len(names) == len(value) else sorted_keys(names)

        def finish(specs: list[Any]) -> Ref:
            self.rows[number] = NodeRow(type(value), names, tuple(zip(order, specs, strict=True)), marks)
            return Ref(number)

        items = (((name,), held[name], explicit_mark(value, name) if declares else None) for name in order)
        return _Frame(items, number, path, finish)

    def variable_row(self, variable: Variable, path: tuple) -> VariableRow:
        """The row of a Variable as it is now."""
        kind = type(variable)
        if variable._metadata:
            metadata = variable._metadata.const((*path, "metadata"))
            self.reliable = self.reliable and not metadata.mutable
            return VariableRow(kind, metadata)
        row = self.plain_rows.get(kind)
        if row is None:
            row = self.plain_rows[kind] = VariableRow(kind, _NO_ITEMS)
        return row


def flatten_once(value: Any, path: tuple = (), is_argument: bool = False) -> tuple[tuple[tuple, ...], list[Any], Any]:
    """The paths of the leaves and nodes in a pytree, these themselves, and its treedef or :class:`BoundMethod`.

    A pytree with a dict whose keys cannot be sorted is a leaf, if it holds no data and is no argument.

    Raises:
      PathError: naming such a dict, in the pytree at ``path``.
    """
    if is_bound_method(value):
        return ((),), [value.__self__], BoundMethod(value.__func__)
    try:
        keyed, treedef = jtu.tree_flatten_with_path(value, is_leaf=is_node)
    except (TypeError, ValueError):
        parts, _ = jtu.tree_flatten_with_path(value, is_leaf=lambda x: is_node(x) or is_without_order(x))
        places = [(keys, x) for keys, x in parts if is_without_order(x)]
        if not places:
            raise
        if is_argument or has_data(value):
            keys, found = places[0]
            where = place_of((*path, *map(path_key, keys)))
            raise PathError(_WITHOUT_ORDER.format(where=where, keys=[*found])) from None
        return ((),), [value], _LEAF_TREEDEF
    return tuple([tuple(map(path_key, keys)) for keys, _ in keyed]), [child for _, child in keyed], treedef


_LEAF_TREEDEF = jtu.tree_structure(0)

_WITHOUT_ORDER = """\
JAX cannot flatten the dict at {where}, since its keys {keys!r:.80} cannot be sorted. Use keys of one type, or \
nnx.Dict(...) in its place."""

_STATIC_TYPES = (type, types.FunctionType)  # of values that are static wherever nothing else is declared

_NO_ITEMS = Const.of_items(NO_METADATA, ())  # its value is NO_METADATA itself, so that ``is`` tells that it is empty
