"""Labels and lanes: which leaf of a packed pytree is treated how, given the prefixes that say so (prefixes.py).

An object has one row, hence one label for each of its leaves. If two paths in one argument lead to it, the first path
decides, as it does in the State. If paths in two arguments do, both must give it the same labels, leaf by leaf; if not,
an error names both paths. Nobody gives labels to what a function captures: an object that it shares with an argument
has the labels of the argument. The leaves with one label form a lane.

A function may attach new objects to its arguments, and return objects. So there are two visits: one before the call,
for the labels of the arguments (:func:`label_arguments`), and one after it, for those of the leaves that come back
(:func:`labels_after`). There, what was attached inherits the entry of its holder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np

from ..core.annotations import NamedTuple
from ..core.errors import OUTPUT, AliasingError, ArgumentError, PrefixError, format_path
from ..core.graph import After, Packed
from ..core.layout import Layout
from ..core.rows import LEAF, ROOT, NodeRow, Owner, Ref, Row, Spec, Tree, VariableRow, children, own_leaf_paths, parts
from ..core.static import Const
from ..core.variables import RngState
from .leaf_checks import is_traceable
from .prefixes import Label, PrefixMapping, labels_in


class Labels(NamedTuple):
    """The labels of the leaves of a table. It refers to no object and no array."""

    rows: Sequence[Row]  # of the table
    of_row: dict[int, list[Label]]  # row -> the labels of its leaves
    reached: dict[int, tuple[tuple, _Visit]]  # row -> its first path, and the visit that went along it

    def may_have(self, row: int) -> list[Label]:
        """The labels that leaves of the object in this row may have, whatever it comes to hold."""
        return labels_in(self.reached[row][1].entry)

    def of_leaves(self, owners: Sequence[Owner], own: Sequence[Label]) -> list[Label]:
        """The labels of leaves with these owners, given the ``own`` ones of the pytree around the objects."""
        return [own[k] if i == ROOT else self.of_row[i][k] for i, k in owners]


class Labelling:
    """A visit that finds the labels of a table, row by row.

    ``values`` gives what filters see of each row: the Variable itself, or the arrays that a node holds. After a call
    the labels ``before`` it are kept: only nodes that have changed are visited again. A new object gets its labels from
    its holder, and an array that takes the place of another one its label.
    """

    def __init__(self, rows: Sequence[Row], values: Callable[[int], Sequence[Any]], before: Labels | None = None):
        self.rows, self.values = rows, values
        self._returning = before is not None  # then a label gives way to the one that an object already has
        self._compared: set[tuple[_Visit, int]] = set()  # rows that a further visit has reached, too
        of_row, reached = ({}, {}) if before is None else (dict(before.of_row), dict(before.reached))
        self.labels = Labels(rows, of_row, reached)
        if before is not None:
            self._visit_changed(before.rows)

    def _visit_changed(self, before: Sequence[Row]) -> None:
        """Label the nodes anew whose rows were others before the call; arrays at the same places keep their labels."""
        for i, (old, row) in enumerate(zip(before, self.rows, strict=False)):
            if row is old or not (isinstance(row, NodeRow) and isinstance(old, NodeRow)):
                continue
            known = dict(zip(own_leaf_paths(old), self.labels.of_row[i], strict=True))
            path, visit = self.labels.reached[i]
            found = self.labels.of_row[i] = []
            self._descend([(spec, below, found, self.values(i)) for below, spec in reversed(row.at(path))], visit)
            found[:] = [known.get(place, label) for place, label in zip(own_leaf_paths(row), found, strict=True)]

    def visit(self, root: Spec, entries: Sequence[Any], plain: Sequence[Any], depth: int = 0) -> list[Label]:
        """Label everything below a pytree whose children have these entries.

        Returns the labels of ``plain``, the leaves of the pytree itself. Filters see paths without their first
        ``depth`` keys, which lead to an argument.
        """
        own: list[Label] = []
        for (path, spec), entry in zip(children(root), entries, strict=True):
            self._descend([(spec, path, own, plain)], _Visit(entry, depth))
        return own

    def _descend(self, stack: list[tuple[Spec, tuple, list[Label], Sequence[Any]]], visit: _Visit) -> None:
        """Label everything below the specs on the stack: (spec, path, labels of its row so far, values of its row)."""
        while stack:
            spec, path, labels, values = stack.pop()
            if spec is LEAF:
                labels.append(visit.label(path, values[len(labels)]))
            elif isinstance(spec, Tree):
                stack += [(child, below, labels, values) for below, child in reversed(spec.at(path))]
            elif isinstance(spec, Ref):
                i, row = spec.index, self.rows[spec.index]
                if i in self.labels.reached:
                    self._check_alias(i, path, visit)
                    continue
                self.labels.reached[i] = path, visit
                found = self.labels.of_row[i] = []
                if isinstance(row, VariableRow):
                    found.append(visit.label(path, self.values(i)[0]))
                else:
                    stack.extend(
                        (child, (*path, name), found, self.values(i))
                        for name, child in reversed(row.fields)
                        if type(child) is not Const
                    )

    def _check_alias(self, i: int, path: tuple, visit: _Visit) -> None:
        """Check that an object shared between two arguments gets the same labels from both, leaf by leaf."""
        gives_way = self._returning or path[0] == "captured"
        stack = [(i, path)]
        while stack:
            i, path = stack.pop()
            if i not in self.labels.reached or (visit, i) in self._compared:
                continue
            self._compared.add((visit, i))
            first, other = self.labels.reached[i]
            if visit is other or (visit.entry == other.entry and not isinstance(visit.entry, PrefixMapping)):
                continue
            row = self.rows[i]
            held = parts(row if isinstance(row, NodeRow) else LEAF)
            stack.extend((spec.index, (*path, *key)) for key, spec in reversed(held) if isinstance(spec, Ref))
            leaves, known = [key for key, spec in held if spec is LEAF], self.labels.of_row[i]
            for key, value, old in zip(leaves, self.values(i), known, strict=False):  # in a cycle not yet all are known
                new = visit.label((*path, *key), value)
                # A label may give way to the one that an object has: "any sharding" to a given one, say.
                if new != old and not (gives_way and getattr(new, "yields_to", lambda old: False)(old)):
                    raise AliasingError(
                        "Inconsistent aliasing detected. The following nodes have different prefixes, though they are "
                        f"one {row.type.__name__}: {other.place((*first, *key))}: {old}, but "
                        f"{visit.place((*path, *key))}: {new}. Give both the same prefix, or make one a copy "
                        "(nnx.clone)."
                    )


class _Visit:
    """A visit to an argument or output, with one entry; filters do not see the first ``depth`` keys of a path."""

    __slots__ = ("depth", "entry")

    def __init__(self, entry: Any, depth: int):
        self.entry, self.depth = entry, depth

    def label(self, path: tuple, leaf: Any) -> Label:
        entry = self.entry
        return entry.map_prefix(path[self.depth :], leaf) if isinstance(entry, PrefixMapping) else entry

    def place(self, path: tuple) -> str:
        """A path for messages."""
        return format_path(path, "" if self.depth else OUTPUT)  # of a path in the output, filters see all keys


def label_arguments(packed: Packed, entries: Sequence[Any]) -> tuple[Labels, list[Any]]:
    """The labels of packed ``Arguments``, by row and in the order of the leaves.

    Mappings see paths without the first two keys, which lead to the argument (``args[0]``).

    Raises:
      AliasingError: for a shared object that two arguments give different labels; names both paths.
      PrefixError: for a leaf that no filter of a mapping takes; names its path.
    """
    layout, leaves, objects = packed
    values: dict[int, list[Any]] = {i: [objects[i]] for i in layout.variables}
    for (i, _), leaf in zip(layout.owners[len(values) :], leaves[len(values) :], strict=True):
        values.setdefault(i, []).append(leaf)
    labelling = Labelling(layout.rows, lambda i: values.get(i, ()))
    own = labelling.visit(layout.root, entries, values.get(ROOT, ()), depth=2)
    return labelling.labels, labelling.labels.of_leaves(layout.owners, own)


def labels_after(before: Labels, after: After, out_entries: Sequence[Any]) -> list[Label]:
    """The labels of the leaves that come back from a call, given the labels of the arguments.

    Raises:
      AliasingError, PrefixError: as :func:`label_arguments`.
    """
    labelling = Labelling(after.rows, after.walk.values_of, before)
    own = labelling.visit(after.delta.root, out_entries, after.walk.values_of(ROOT))
    return labelling.labels.of_leaves(after.owners, own)


def lanes_of(leaf_labels: Sequence[Label], *prefixes: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The lanes, one for each label that a leaf has or that the prefixes may give; and which lane each leaf is in."""
    lanes = tuple(dict.fromkeys([*leaf_labels, *labels_in(prefixes)]))
    return lanes, lane_numbers(leaf_labels, lanes)


def lane_numbers(labels: Sequence[Label], lanes: Sequence[Label]) -> tuple[int, ...]:
    """The position of each label in ``lanes``."""
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
    if not lane_of or len(groups) == 1:
        return groups[0]
    sources = [iter(group) for group in groups]
    return [next(sources[lane]) for lane in lane_of]


def mapped_size(packed: Packed, labels: Sequence[Any], what: str, option: str, given: int | None) -> int | None:
    """The common size of all mapped axes, those whose labels are numbers; None if there are none.

    The user of the transform ``what`` may have ``given`` the size by an ``option``.

    Raises:
      PrefixError: if there are several sizes, or an array does not have the axis; names the paths.
      ArgumentError: if there is no array where there is to be one; names its path.
    """
    sizes = {} if given is None else {given: option}
    lacking: list[tuple[tuple, tuple[int, ...], int]] = []
    for path, leaf, axis in zip(packed.layout.leaf_paths, packed.leaves, labels, strict=True):
        for x in jtu.tree_leaves(leaf) if isinstance(axis, int) else ():
            if not is_traceable(x):
                where, kind = format_path(path), type(x).__name__
                raise ArgumentError(_NO_ARRAY.format(where=where, kind=kind, value=x, what=what))
            shape = np.shape(x)
            if -len(shape) <= axis < len(shape):
                sizes.setdefault(shape[axis], format_path(path))
            else:
                lacking.append((path, shape, axis))
    if lacking:
        path, shape, axis = lacking[0]
        head = f"{format_path(path)} has shape {shape}, so there is no axis {axis} for {what} in it."
        raise PrefixError(head + (_on_stream(packed.layout, path, next(iter(sizes), "n")) or _STACK))
    if len(sizes) > 1:
        found = ", ".join(f"{size} ({where})" for size, where in sizes.items())
        raise PrefixError(f"{what} got axes of different sizes: {found}. {_WHOLE}")
    return next(iter(sizes), None)


def _on_stream(layout: Layout, path: tuple, size: Any) -> str:
    """What to do about the leaf at a path, if it is the state of a random stream; else nothing."""
    position = layout.positions[path]
    row = layout.variable_row(position) if position < len(layout.variables) else None
    if row is None or not issubclass(row.type, RngState):
        return ""
    return _STREAM.format(tag=row.metadata.value.get("tag"), size=size)


_NO_ARRAY = """\
{where} is a {kind} ({value!r:.80}), not an array, so {what} cannot map over it. Bind it beforehand with \
functools.partial; for nnx.vmap it may also be passed whole, with None in in_axes."""

_WHOLE = """\
in_axes says which axis of each argument it is; None is for one that is passed whole: (None, 0) for f(model, xs)."""

_STACK = """
None is for what is passed whole; what is to differ between the slices is stacked beforehand, such as a cache for each \
row of a batch: nnx.update(model, jax.tree.map(lambda x: jnp.stack([x] * size), nnx.state(model, nnx.Cache)))."""

_STREAM = """
It belongs to the random stream {tag!r}. Split the stream, which gives each slice keys of its own: \
@nnx.split_rngs(splits={size}) above the transform, or rngs.split({size}) for its argument; None is the axis of a \
stream that is passed whole."""
