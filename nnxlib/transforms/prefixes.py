"""Prefixes: how a transform is told what to do with each leaf of its arguments and of its output.

A *prefix* is a pytree prefix of the arguments, as in JAX. At its leaves are *entries*. An entry is a *label* (an axis,
a sharding, "differentiate") for all leaves below; or, for a Module, a :class:`PrefixMapping`, which gives each leaf of
the Module a label by filter. The leaves with one label form a *lane*: they cross the JAX transformation together, in
one list.

This file computes the label of each leaf of a packed pytree. An object that can be reached by two paths must get the
same labels by both, leaf by leaf.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np

from ..core.errors import AliasingError, PrefixError, describe_nested, format_path
from ..core.filters import Filter, PathIn, filters_to_predicates
from ..core.graph import After, pack
from ..core.layout import Layout
from ..core.objects import is_node
from ..core.rows import LEAF, ROOT, NodeRow, Ref, Row, Spec, Tree, VariableRow
from ..core.state import State, from_flat_state, map_state, to_flat_state
from ..core.static import Const
from ..core.traversals import path_key
from ..core.variables import RngState, Variable, raw_value

Label = Hashable


class PrefixMapping(Mapping):
    """Labels by filter: the first filter that takes a leaf gives its label.

    Args:
      mapping: filters to labels, as a mapping or as pairs; or a State with a label at each path, such as that of
        :func:`nnxlib.get_named_sharding`.

    Raises:
      FilterOrderError: if ``...`` or ``True`` comes before a filter that would then never be asked.
      PrefixError: when used, if no filter takes a leaf; names its path.
    """

    def __init__(self, mapping: Mapping[Filter, Label] | Sequence[tuple[Filter, Label]] | State, /):
        if isinstance(mapping, State):
            mapping = [(PathIn(path), raw_value(label)) for path, label in to_flat_state(mapping)]
        items = mapping.items() if isinstance(mapping, Mapping) else mapping
        self._items = tuple([(key, label) for key, label in items])
        predicates = filters_to_predicates([key for key, _ in self._items])
        self._predicates = tuple([(p, label) for p, (_, label) in zip(predicates, self._items, strict=True)])

    @property
    def filters(self) -> tuple[Filter, ...]:
        return tuple([key for key, _ in self._items])

    @property
    def labels(self) -> tuple[Label, ...]:
        return tuple([label for _, label in self._items])

    def map_prefix(self, path: tuple, leaf: Any) -> Label:
        """The label of a leaf."""
        for predicate, label in self._predicates:
            if predicate(path, leaf):
                return label
        raise PrefixError(
            f"No filter matched {format_path(path)} ({type(leaf).__name__}) in {self!r}; add `...: label` as the last "
            "entry to cover the rest."
        )

    def relabelled(self, function: Callable[[Label], Label]) -> PrefixMapping:
        """The same with ``function(label)`` in place of each label."""
        return type(self)([(key, function(label)) for key, label in self._items])

    def __getitem__(self, key: Filter) -> Label:
        return dict(self._items)[key]  # type: ignore[index]

    def __iter__(self) -> Iterator[Filter]:
        return iter(self.filters)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._predicates == other._predicates  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self._predicates))

    def __repr__(self) -> str:
        entries = ", ".join(f"{key!r}: {label!r}" for key, label in self._items)
        return f"{type(self).__name__}({{{entries}}})"


class StateSharding(PrefixMapping):
    """Shardings by filter, for ``in_shardings`` and ``out_shardings`` of :func:`nnxlib.jit`.

    >>> import nnxlib as nnx, jax
    >>> nnx.StateSharding({nnx.Param: jax.P('data'), ...: None}).shardings[1] is None
    True
    """

    @property
    def shardings(self) -> tuple[Label, ...]:
        return self.labels


def broadcast_prefix(prefix: Any, tree: Any, name: str) -> list[Any]:
    """The entry of ``prefix`` for each node and leaf of ``tree``.

    Raises:
      PrefixError: if ``prefix`` is not a prefix of ``tree``; ``name`` is what the user calls it.
    """
    entries: list[Any] = []

    def expand(entry: Any, subtree: Any) -> None:
        entries.extend(same_entries(entry, subtree))

    try:
        jtu.tree_map(expand, prefix, tree, is_leaf=lambda x: x is None or isinstance(x, PrefixMapping) or is_node(x))
    except ValueError as error:
        both = isinstance(prefix, tuple | list) and isinstance(tree, tuple | list) and len(prefix) != len(tree)
        problem = str(error).removesuffix(".")
        if both:
            problem = f"it has {len(prefix)} entries for {len(tree)} values"
        elif isinstance(prefix, tuple | list):
            problem = f"it has {len(prefix)} entries for one value, {describe_nested(tree)}"
        raise PrefixError(
            f"{name}={prefix!r} does not fit the values it describes: {problem}. Give one label for all, or the same "
            "tuples, lists and dicts as the values, down to some level."
        ) from None
    return entries


def same_entries(entry: Any, tree: Any) -> list[Any]:
    """``entry`` for each node and leaf of ``tree``."""
    return [entry] * jtu.tree_structure(tree, is_leaf=is_node).num_leaves


class StateAxes(PrefixMapping):
    """Axes by filter, for ``in_axes`` and ``out_axes`` of ``vmap`` and ``scan``: an int, None, or ``nnx.Carry``.

    >>> import nnxlib as nnx
    >>> nnx.StateAxes({nnx.Param: 0, ...: None}).axes
    (0, None)
    """

    @property
    def axes(self) -> tuple[Label, ...]:
        return self.labels


class TreeState(PrefixMapping):
    """What :func:`prefix` returns for a Module: the label of a leaf is given by a function of its path and value.

    ``state`` is a State with the label of each leaf; its keys are also attributes.
    """

    def __init__(self, function: Callable[[tuple, Any], Label], state: State):
        super().__init__({})
        self._function, self.state = function, state

    @property
    def labels(self) -> tuple[Label, ...]:
        return tuple(dict.fromkeys(label for _, label in to_flat_state(self.state)))

    def __getattr__(self, name: str) -> Any:
        if name == "state":  # of a TreeState that is being copied, and has no attributes yet
            raise AttributeError(name)
        return getattr(self.state, name)

    def __repr__(self) -> str:
        return f"TreeState({self.state!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeState) and self._function == other._function

    def __hash__(self) -> int:
        return hash(self._function)

    def map_prefix(self, path: tuple, leaf: Any) -> Label:
        return self._function(path, leaf)

    def relabelled(self, function: Callable[[Label], Label]) -> PrefixMapping:
        state = map_state(lambda path, label: function(label), self.state)
        return TreeState(lambda path, leaf: function(self._function(path, leaf)), state)


def prefix(node: Any, filter_map: Mapping[Filter, Label] | Callable[[tuple, Any], Label], /) -> Any:
    """Return a prefix for ``node``, such as its ``in_axes``: a label for each of its leaves.

    Args:
      node: a Module, or a pytree with Modules.
      filter_map: a mapping from filters to labels, of which the first that fits counts; or a function of the path of a
        leaf, from the argument down, and the leaf.

    Returns:
      ``node`` with a label in place of each leaf, and labels by path, like a State, in place of each Module.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> d = {'a': nnx.Param(jnp.array(2)), 'b': nnx.BatchStat(jnp.arange(3))}
    >>> axes = nnx.prefix(d, lambda path, x: 0 if 'b' in path else None)
    >>> nnx.vmap(lambda d: d['a'] * d['b'], in_axes=(axes,))(d)
    Array([0, 2, 4], dtype=int32)

    Raises:
      PrefixError: if no filter takes a leaf.
    """
    resolve = PrefixMapping(filter_map).map_prefix if isinstance(filter_map, Mapping) else filter_map

    def label(keys: tuple, x: Any) -> Any:
        start = tuple([path_key(key) for key in keys])
        if not is_node(x):
            return resolve(start, x)
        layout, leaves, objects = pack(x)
        values = [objects[i] for i in layout.variables] + leaves[len(layout.variables) :]
        found = [resolve((*start, *path), value) for path, value in zip(layout.leaf_paths, values, strict=True)]
        if layout.leaf_paths == ((),):
            return found[0]
        return TreeState(resolve, from_flat_state(list(zip(layout.leaf_paths, found, strict=True))))

    return jtu.tree_map_with_path(label, node, is_leaf=is_node)


def labels_in(prefix: Any) -> list[Label]:
    """Every label that a prefix may give to a leaf."""
    found = jtu.tree_leaves(prefix, is_leaf=_is_whole)
    return [label for x in found for label in (x.labels if isinstance(x, PrefixMapping) else (x,))]


def _is_whole(x: Any) -> bool:
    return x is None or isinstance(x, PrefixMapping) or is_node(x)


def check_axes(axes: Any, name: str, what: str, *others: Label) -> None:
    """Check that each label of a prefix is an axis, None, or one of ``others``.

    Raises:
      PrefixError: naming the label that is none of these.
    """
    refuse_nodes(axes, name)
    for axis in labels_in(axes):
        if not (axis is None or isinstance(axis, int) or any(axis is label for label in others)):
            takes = ", ".join(["an int", "None", *map(repr, others)])
            raise PrefixError(f"{name}={axes!r} has {axis!r}; {what} takes {takes} or nnx.StateAxes of these.")


def prefix_key(prefix: Any) -> tuple:
    """A prefix in a form that can be compared and hashed."""
    leaves, structure = jtu.tree_flatten(prefix, is_leaf=lambda x: x is None or isinstance(x, PrefixMapping))
    return tuple(leaves), structure


def refuse_nodes(prefix: Any, name: str) -> None:
    """Check that there is no Module or Variable in a prefix, which the user calls ``name``.

    Raises:
      PrefixError: if there is one.
    """
    for x in jtu.tree_leaves(prefix, is_leaf=is_node):
        if is_node(x):
            kind = "Variables" if isinstance(x, Variable) else "Graph nodes"
            raise PrefixError(
                f"{name} has a {type(x).__name__} in it. {kind} are not allowed as prefixes: give one label for all of "
                "an object, or one for each filter (nnx.StateAxes, nnx.prefix)."
            )


class Labels:
    """The labels of the leaves of a table.

    Args:
      rows: of the table.
      values: what filters see of each row: the Variable itself, or the arrays that a node holds.

    Attributes:
      of_row: the labels of the leaves of each row.
    """

    def __init__(self, rows: Sequence[Row], values: Callable[[int], Sequence[Any]]):
        self.rows, self.values = rows, values
        self.of_row: dict[int, list[Label]] = {}
        self._reached: dict[int, tuple[tuple, Any, int]] = {}  # row -> its first path, the entry and the depth there
        self.returning = False  # whether the call is over; then a label may give way to the one that an object has

    def visit(self, root: Spec, entries: Sequence[Any], plain: Sequence[Any], depth: int = 0) -> list[Label]:
        """Label everything below a pytree whose children have these entries.

        Returns the labels of ``plain``, the leaves of the pytree itself. Mappings see paths without the first ``depth``
        keys.
        """
        own: list[Label] = []
        children = zip(root.paths, root.children, strict=True) if isinstance(root, Tree) else [((), root)]
        for (path, spec), entry in zip(children, entries, strict=True):
            self._descend([(spec, path, own, plain)], entry, depth)
        return own

    def may_have(self, row: int) -> list[Label]:
        """The labels that leaves of the object in this row may have, whatever it comes to hold."""
        return labels_in(self._reached[row][1])

    def of_variables(self, layout: Layout) -> list[Label]:
        """The labels of the Variables of the visited layout, in order."""
        return [self.of_row[i][0] for i in layout.variables]

    def revisit(self, count: int, rows: Sequence[Row], values: Callable[[int], Sequence[Any]]) -> None:
        """Visit the first ``count`` rows as they are after a call; a new object gets its labels from its holder."""
        before, self.rows, self.values = self.rows, rows, values
        for i in range(count):
            row = rows[i]
            if row is before[i] and not values(i):  # it refers to the same objects as before, and has no leaves
                continue
            if isinstance(row, NodeRow) and i in self._reached:
                path, entry, depth = self._reached[i]
                self.of_row[i] = []
                fields = [(spec, (*path, name), self.of_row[i], values(i)) for name, spec in reversed(row.fields)]
                self._descend(fields, entry, depth)

    def _descend(self, stack: list[tuple[Spec, tuple, list[Label], Sequence[Any]]], entry: Any, depth: int) -> None:
        """Label everything below the specs on the stack: (spec, path, labels of its row so far, values of its row)."""
        while stack:
            spec, path, labels, values = stack.pop()
            if spec is LEAF:
                labels.append(_resolve(entry, path[depth:], values[len(labels)]))
            elif isinstance(spec, Tree):
                stack.extend(
                    (child, (*path, *key), labels, values)
                    for key, child in zip(reversed(spec.paths), reversed(spec.children), strict=True)
                )
            elif isinstance(spec, Ref):
                i, row = spec.index, self.rows[spec.index]
                if i in self._reached:
                    self._check_alias(i, path, entry, depth)
                    continue
                self._reached[i] = path, entry, depth
                if isinstance(row, VariableRow):
                    self.of_row[i] = [_resolve(entry, path[depth:], self.values(i)[0])]
                else:
                    self.of_row[i] = []
                    stack.extend(
                        (child, (*path, name), self.of_row[i], self.values(i))
                        for name, child in reversed(row.fields)
                        if type(child) is not Const
                    )

    def _check_alias(self, i: int, path: tuple, entry: Any, depth: int) -> None:
        """Check that a shared object gets the same labels by this path as by its first, leaf by leaf."""
        stack, seen = [(i, path)], set()
        while stack:
            i, path = stack.pop()
            if i not in self._reached or i in seen:
                continue
            seen.add(i)
            first, first_entry, _ = self._reached[i]
            if entry == first_entry and not isinstance(entry, PrefixMapping):
                continue
            row = self.rows[i]
            parts = list(_parts(row.fields)) if isinstance(row, NodeRow) else [((), LEAF)]
            stack.extend((spec.index, (*path, *key)) for key, spec in parts if isinstance(spec, Ref))
            leaves = [key for key, spec in parts if spec is LEAF]
            for key, value, old in zip(leaves, self.values(i), self.of_row[i], strict=False):  # in a cycle not yet all
                new = _resolve(entry, (*path, *key)[depth:], value)
                if new != old and not (self.returning and _yields(new, old)):
                    raise AliasingError(
                        f"Inconsistent aliasing detected: a {row.type.__name__} is shared, and its two paths ask for "
                        f"different treatment: {format_path((*first, *key))}: {old!r}, but "
                        f"{format_path((*path, *key))}: {new!r}. Give both the same prefix."
                    )


def _parts(fields: Sequence[tuple[Any, Spec]]) -> Iterator[tuple[tuple, Spec]]:
    """The leaves and objects that a node holds directly, with their paths below it."""
    stack: list[tuple[tuple, Spec]] = [((name,), spec) for name, spec in reversed(fields)]
    while stack:
        path, spec = stack.pop()
        if isinstance(spec, Tree):
            inside = zip(reversed(spec.paths), reversed(spec.children), strict=True)
            stack.extend(((*path, *key), child) for key, child in inside)
        elif spec is LEAF or isinstance(spec, Ref):
            yield path, spec


def _yields(new: Label, old: Label) -> bool:
    """Whether a label gives way to the one that an object already has."""
    yields_to = getattr(new, "yields_to", None)
    return yields_to is not None and yields_to(old)


def _resolve(entry: Any, path: tuple, leaf: Any) -> Label:
    return entry.map_prefix(path, leaf) if isinstance(entry, PrefixMapping) else entry


def labels_after(before: Labels, layout: Layout, after: After, out_entries: Sequence[Any]) -> list[Label]:
    """The labels of the leaves that come back from a call, given the labels of the arguments."""
    labels = copy.copy(before)
    labels.returning = True
    labels.of_row, labels._reached = dict(before.of_row), dict(before._reached)
    labels.revisit(len(layout.rows), after.rows, after.values_of)
    own = labels.visit(after.root, out_entries, after.output_leaves)
    return [own[k] if i == ROOT else labels.of_row[i][k] for i, k in after.owners]


def lane_numbers(labels: Sequence[Label], lanes: Sequence[Label]) -> tuple[int, ...]:
    """The position in ``lanes`` of each label."""
    position = {label: i for i, label in enumerate(lanes)}
    return tuple([position[label] for label in labels])


def split_lanes(leaves: Sequence[Any], lane_of: Sequence[int], count: int) -> tuple[list[Any], ...]:
    """One list of leaves per lane."""
    if count == 1:
        return (list(leaves),)
    groups: tuple[list[Any], ...] = tuple([[] for _ in range(count)])
    for leaf, lane in zip(leaves, lane_of, strict=True):
        groups[lane].append(leaf)
    return groups


def join_lanes(groups: Sequence[Sequence[Any]], lane_of: Sequence[int]) -> Sequence[Any]:
    """The inverse of :func:`split_lanes`."""
    if len(groups) == 1:
        return groups[0]
    sources = [iter(group) for group in groups]
    return [next(sources[lane]) for lane in lane_of]


def label_arguments(
    layout: Layout, leaves: Sequence[Any], objects: Sequence[Any], entries: Sequence[Any], depth: int = 2
) -> tuple[Labels, list[Label]]:
    """The labels of packed ``Arguments``, by row and in the order of the leaves.

    Mappings see paths without the first ``depth`` keys (``args[0]``).
    """
    values: dict[int, list[Any]] = {i: [objects[i]] for i in layout.variables}
    for (i, _), leaf in zip(layout.owners[len(values) :], leaves[len(values) :], strict=True):
        values.setdefault(i, []).append(leaf)
    labels = Labels(layout.rows, lambda i: values.get(i, ()))
    own = labels.visit(layout.root, entries, values.get(ROOT, ()), depth)
    labels.values = _no_values  # a compiled function keeps the labels, and must not keep the model that it first saw
    return labels, [own[k] if i == ROOT else labels.of_row[i][k] for i, k in layout.owners]


def _no_values(row: int) -> Sequence[Any]:
    raise AssertionError("Labels of arguments were asked for values after the call; `revisit` gives new ones.")


def mapped_size(
    layout: Layout, leaves: Sequence[Any], labels: Sequence[Any], given: Mapping[int, str], what: str
) -> int | None:
    """The common size of all mapped axes, which have numbers for labels; None if there are none.

    ``given`` are sizes that the user has given, with the names of the options.

    Raises:
      PrefixError: if there are several sizes, or an array does not have the axis; names the paths.
    """
    sizes = dict(given)
    for path, leaf, axis in zip(layout.leaf_paths, leaves, labels, strict=True):
        for x in jtu.tree_leaves(leaf) if isinstance(axis, int) else ():
            shape = np.shape(x)
            if not -len(shape) <= axis < len(shape):
                head = f"{format_path(path)} has shape {shape}, so there is no axis {axis} for {what} in it."
                raise PrefixError(f"{head}\n{_STREAMS}" if _is_of_stream(layout, path) else head)
            sizes.setdefault(shape[axis], format_path(path))
    if len(sizes) > 1:
        found = ", ".join(f"{size} ({where})" for size, where in sizes.items())
        raise PrefixError(f"{what} got axes of different sizes: {found}. {_WHOLE}")
    return next(iter(sizes), None)


def _is_of_stream(layout: Layout, path: tuple) -> bool:
    """Whether the leaf at a path is the state of a random stream."""
    types = [layout.rows[i].type for i in layout.variables]
    return any(issubclass(kind, RngState) and at == path for at, kind in zip(layout.leaf_paths, types, strict=False))


_WHOLE = "in_axes says which axis of each argument it is; None is for one that is passed whole: in_axes=(0, None)."

_STREAMS = """\
It belongs to a random stream. Split the stream, which gives each slice keys of its own: @nnx.split_rngs(splits=5) \
above the transform, or rngs.split(5) for its argument; None is the axis of a stream that is passed whole."""
