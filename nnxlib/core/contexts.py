"""Contexts: splits and merges that belong together.

``nnx.split`` and ``nnx.merge`` take one graph, and make new objects. A context is for code that does more by hand:

- Several graphs share objects. They are split one by one, and merged with this sharing.
- A function under a JAX transformation changes objects, and the live objects are to change likewise (an *update*).

For both, each object gets a number. A *split context* numbers the objects of all graphs that are split in it. An object
that two of them share has its leaves in the State of the first only. What a split gives is a :class:`LinkedGraphDef`:
the layout of the graph, with the number of each of its rows. A *merge context* keeps the object for each number::

    a, b share row 2             ctx.split(a) -> numbers 0 1 2      leaves of 1, 2
                                 ctx.split(b) -> numbers 3 4 2      leaves of 4

An update is the crossing of transforms/lift.py in four steps::

                 (2) merge, inner=True  ->  change the objects  ->  (3) split                 inside
    (1) split  --------------------------------------------------------------- (4) merge, inner=False

An *update context*, found by its tag, remembers the objects of (1) by number. (2) makes objects with the same numbers,
and a number is never given to another object. So (3) tells which object of (1) each one stands for, and (4) writes to
that. Objects that are new in (3) have negative numbers; (4) makes them outside.

Nothing about live objects is in a GraphDef or State, so a compiled inner function can be called with others of the same
structure.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import jax

from .differences import Aval
from .errors import Path, StateMismatchError, UsageError, format_path
from .filters import Filter
from .generics import A
from .graph import Delta, Packed, changed_row, check_commit, commit, pack
from .graphdef import GraphDef, graphdef_of
from .layout import Layout
from .ops import copies_of, divided, merge
from .rows import NodeRow, Ref, Row, VariableRow
from .state import FlatState, state_of_items
from .tracing import TraceRef, at_top_level, current_trace
from .traversals import sorted_by_path
from .variables import stored_value
from .walk import Walk


@jax.tree_util.register_static
class LinkedGraphDef(GraphDef[A]):
    """A GraphDef whose objects have numbers in a context."""

    __slots__ = ("elsewhere", "numbers")

    numbers: tuple[int, ...]  # for each row the number of its object
    elsewhere: frozenset[int]  # rows whose leaves are in the State of an earlier split of the same context

    def __init__(self, layout: Layout, avals: list[Aval], numbers: Sequence[int], elsewhere: Collection[int]):
        super().__init__(layout, avals)
        self.numbers, self.elsewhere = tuple(numbers), frozenset(elsewhere)

    @property
    def nodes(self) -> tuple[Any, ...]:
        """The rows, with the number of the object in place of each that was split before."""
        rows = enumerate(self.layout.rows)
        return tuple([Ref(self.numbers[i]) if i in self.elsewhere else row for i, row in rows])

    @property
    def own_paths(self) -> list[Path]:
        """The paths of the leaves that its State has."""
        owned = zip(self.layout.leaf_paths, self.layout.owners, strict=True)
        return [path for path, (row, _) in owned if row not in self.elsewhere]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinkedGraphDef) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple:
        return self.layout, self.numbers, self.elsewhere

    def __reduce__(self) -> tuple:
        return LinkedGraphDef, (self.layout, self.avals, self.numbers, self.elsewhere)


# --- the two halves -------------------------------------------------------------------------------------------------


class SplitContext:
    """Yielded by :func:`split_context`. ``objects`` have numbers already; each new one gets the next of ``new``."""

    def __init__(self, objects: Mapping[int, Any], new: Iterator[int]):
        self._objects = dict(objects)
        self._numbers = {id(x): number for number, x in objects.items()}
        self._new = new
        self._done: set[int] = set()  # the numbers of objects whose leaves are in an earlier State

    def split(self, node: Any, *filters: Filter) -> tuple[Any, ...]:
        """Split a node like :func:`nnxlib.split`, without the leaves of objects that were split here before."""
        graphdef, groups = self._groups(node, filters)
        return graphdef, *map(state_of_items, groups)

    def flatten(self, node: Any, *filters: Filter, with_paths: bool = True) -> tuple[Any, ...]:
        """Split a node into a GraphDef and FlatStates; with ``with_paths=False``, into a GraphDef and a list of values.

        Raises:
          ValueError: for filters together with ``with_paths=False``.
        """
        if filters and not with_paths:
            raise UsageError("A list without paths cannot be filtered; leave out the filters or with_paths=False.")
        graphdef, groups = self._groups(node, filters)
        if not with_paths:
            return graphdef, [stored_value(leaf) for _, leaf in groups[0]]
        return graphdef, *(FlatState(group, sort=False) for group in groups)

    def _groups(self, node: Any, filters: Sequence[Filter]) -> tuple[LinkedGraphDef, list[list[tuple[Path, Any]]]]:
        """The GraphDef, and for each filter the (path, leaf) pairs, with new Variables; without any, all pairs."""
        layout, leaves, objects = pack(node)
        numbers = [self._number(x) for x in objects]
        elsewhere = {row for row, number in enumerate(numbers) if number in self._done}
        found = zip(layout.leaf_paths, copies_of(layout, leaves), layout.owners, strict=True)
        graphdef = LinkedGraphDef(layout, graphdef_of(layout, leaves).avals, numbers, elsewhere)
        flat = FlatState((path, leaf) for path, leaf, (row, _) in found if row not in elsewhere)
        groups = divided(flat, filters, exhaustive=True)
        self._done.update(numbers)  # a split that is refused has put its leaves nowhere
        return graphdef, groups

    def _number(self, x: Any) -> int:
        """The number of an object in this context; a new one gets the next."""
        if id(x) not in self._numbers:
            number = self._numbers[id(x)] = next(self._new)
            self._objects[number] = x
        return self._numbers[id(x)]


class MergeContext:
    """Yielded by :func:`merge_context`; it writes to these ``objects``, by number, instead of making new ones."""

    def __init__(self, objects: Mapping[int, Any]):
        self._objects = dict(objects)

    def merge(self, graphdef: GraphDef[A], state: Any, /, *states: Any) -> A:
        """Merge what a split context has split, like :func:`nnxlib.merge`.

        At the end of an update (``inner=False``) the result is the object that was split, with its changes. One call
        writes all of them or none. A GraphDef that comes from :func:`nnxlib.split` gives new objects.

        Raises:
          StateMismatchError: if the States do not fit, or leaves are in another State, which must be merged first.
          TraceContextError: if an object that has changed belongs to another trace.
        """
        if not isinstance(graphdef, LinkedGraphDef):
            return merge(graphdef, state, *states)
        layout, elsewhere = graphdef.layout, graphdef.elsewhere
        known: list[Any] = [self._objects.get(number) for number in graphdef.numbers]
        for row in sorted(elsewhere):
            if known[row] is None:
                kind, path = layout.rows[row].type.__name__, format_path(layout.paths[row])
                raise StateMismatchError(_BEFORE.format(kind=kind, path=path))
        if isinstance(layout.root, Ref) and layout.root.index in elsewhere:
            return known[layout.root.index]
        placeholders = [
            (path, aval and jax.ShapeDtypeStruct(*aval))
            for path, aval, (row, _) in zip(layout.leaf_paths, graphdef.avals, layout.owners, strict=True)
            if row in elsewhere
        ]
        if placeholders:
            states = *states, FlatState(placeholders, sort=False)
        made = merge(GraphDef(layout, graphdef.avals), state, *states)
        packed = pack(made)
        if not all(x is None for x in known):
            objects = [new if x is None else x for new, x in zip(packed.objects, known, strict=True)]
            made = _write(packed, objects, elsewhere)
            packed = packed._replace(objects=objects)
        self._objects.update(zip(graphdef.numbers, packed.objects, strict=True))
        return made

    def unflatten(self, graphdef: GraphDef[A], flat_state: Any, /, *flat_states: Any) -> A:
        """Merge FlatStates, or the list of values that ``flatten(..., with_paths=False)`` has returned."""
        if isinstance(flat_state, list) and isinstance(graphdef, LinkedGraphDef):
            order = tuple(sorted_by_path(graphdef.own_paths))
            flat_state = FlatState.from_sorted_keys_values(order, flat_state)
        return self.merge(graphdef, flat_state, *flat_states)


_BEFORE = """\
The leaves of the {kind} at {path} are in the State of an object that was split before in the same context. Merge that \
object first, in the same `with nnx.merge_context(...)` block."""


def _write(packed: Packed, objects: Sequence[Any], unchanged: Collection[int]) -> Any:
    """Commit what a packed table says to ``objects``, given by row, except for ``unchanged`` rows.

    Returns the packed pytree, with these objects in it.
    """
    layout = packed.layout
    own: list[list[Any]] = [[] for _ in range(len(layout.rows) + 1)]  # the leaves by row; those of ROOT come last
    for (row, _), leaf in zip(layout.owners, packed.leaves, strict=True):
        own[row].append(leaf)
    now = Walk(objects)
    for i, path in enumerate(layout.paths):
        now.revisit(i, path)
    values: list[int] = []
    rows: dict[int, Row] = {}
    for i, row in enumerate(layout.rows):
        present = now.rows[i]
        if i in unchanged:
            continue
        if isinstance(row, VariableRow):
            if row != present:
                rows[i] = row
            elif own[i][0] is not now.cells[i].value:
                values.append(i)
        elif changed := changed_row(cast(NodeRow, present), iter(now.arrays[i]), row, iter(own[i])):
            rows[i] = changed
    delta = Delta(tuple(values), tuple(sorted(rows.items())), layout.root)
    check_commit(layout, delta, objects)  # for its message: in the layout below, not every row has a path
    leaves = [packed.leaves[layout.owner_positions[owner]] for owner in delta.owners(layout.rows)]
    return commit(Layout(now.all_rows(), layout.root), delta, leaves, objects)


# --- contexts by tag ------------------------------------------------------------------------------------------------


class UpdateContext:
    """The objects of an update, by number: of step 1 (``outer``), and of step 2 (``inner``), until step 3."""

    __slots__ = ("inner", "inner_trace", "outer", "outer_trace", "tag")

    def __init__(self, tag: Hashable):
        self.tag = tag
        self.outer: dict[int, Any] | None = None
        self.inner: dict[int, Any] | None = None
        self.outer_trace: TraceRef = None
        self.inner_trace: TraceRef = None

    def __repr__(self) -> str:
        return f"UpdateContext({self.tag!r})"


class _Thread(threading.local):
    def __init__(self):
        self.active: list[UpdateContext] = []


_thread = _Thread()


@contextmanager
def update_context(tag: Hashable) -> Iterator[UpdateContext]:
    """Open an update: within the block, or the decorated function, splits and merges with this tag belong together.

    An update carries every change that a function makes (values, attributes, structure) back to the live objects,
    through any JAX transformation: split outside, merge with ``inner=True`` inside, split again inside, merge with
    ``inner=False`` outside. :func:`nnxlib.lift` does all of this.

    >>> import nnxlib as nnx, jax
    >>> @jax.jit
    ... def inside(graphdef, state):
    ...   with nnx.merge_context('example', inner=True) as ctx:
    ...     model = ctx.merge(graphdef, state)
    ...   model.kernel *= 2
    ...   model.calls = 1
    ...   with nnx.split_context('example') as ctx:
    ...     return ctx.split(model)
    >>> @nnx.update_context('example')
    ... def outside(model):
    ...   with nnx.split_context('example') as ctx:
    ...     graphdef, state = ctx.split(model)
    ...   graphdef, state = inside(graphdef, state)
    ...   with nnx.merge_context('example', inner=False) as ctx:
    ...     return ctx.merge(graphdef, state)
    >>> model = nnx.Linear(1, 1, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    >>> outside(model) is model, model.kernel.value.item(), model.calls
    (True, 2.0, 1)
    """
    context = UpdateContext(tag)
    _thread.active.append(context)
    try:
        yield context
    finally:
        _thread.active.remove(context)
        context.outer = context.inner = None


def current_update_context(tag: Hashable) -> UpdateContext:
    """Return the innermost open update with this tag.

    >>> import nnxlib as nnx
    >>> with nnx.update_context('example'):
    ...   nnx.current_update_context('example')
    UpdateContext('example')

    Raises:
      ValueError: if there is none.
    """
    for context in reversed(_thread.active):
        if context.tag == tag:
            return context
    raise UsageError(
        f"No update context found for tag {tag!r}. Wrap the code in `with nnx.update_context({tag!r}):`, or leave out "
        "the tag, to split and merge without carrying changes back."
    )


@contextmanager
def split_context(ctxtag: Hashable | None = None) -> Iterator[SplitContext]:
    """Split several objects that may share parts: ``ctx.split(node, *filters)`` for each of them.

    With the tag of an update, this is its first step; inside of the transformation, its third.

    >>> import nnxlib as nnx
    >>> shared = nnx.Param(1.0)
    >>> a, b = nnx.Dict(x=shared, y=nnx.Param(2.0)), nnx.Dict(z=shared)
    >>> with nnx.split_context() as ctx:
    ...   (def_a, state_a), (def_b, state_b) = ctx.split(a), ctx.split(b)
    >>> list(state_a), list(state_b)
    (['x', 'y'], [])
    >>> with nnx.merge_context() as ctx:
    ...   a, b = ctx.merge(def_a, state_a), ctx.merge(def_b, state_b)
    >>> a.x is b.z
    True

    Raises:
      ValueError: for a tag without an open update, and for a second split inside of the transformation.
    """
    if ctxtag is None:
        yield SplitContext({}, itertools.count())
        return
    update = current_update_context(ctxtag)
    if update.inner is not None and update.inner_trace is current_trace():
        inner, update.inner = update.inner, None  # not kept after this: it holds tracers
        yield SplitContext(inner, itertools.count(min([0, *inner]) - 1, -1))
        return
    if update.outer is not None and not at_top_level() and update.outer_trace is not current_trace():
        raise UsageError(_SPLIT_TWICE.format(tag=ctxtag))
    context = SplitContext({}, itertools.count())
    yield context
    update.outer, update.outer_trace = context._objects, current_trace()


_SPLIT_TWICE = """\
Inside of the transformation, the update {tag!r} has nothing to split: a split there ends what the merge before it has \
begun. Merge with `with nnx.merge_context({tag!r}, inner=True)` first, and split everything in a single block of \
`with nnx.split_context({tag!r})`."""


@contextmanager
def merge_context(ctxtag: Hashable | None = None, inner: bool | None = None) -> Iterator[MergeContext]:
    """Merge what was split in a :func:`split_context`, with its sharing: ``ctx.merge(graphdef, *states)`` for each.

    There are examples at :func:`split_context`, and with a tag at :func:`update_context`.

    Args:
      ctxtag: the tag of an update; None to make new objects.
      inner: of an update: True inside of the transformation (step 2), to make the objects that its function works on;
        False outside (step 4), to write what it did into the objects that were split.

    Raises:
      ValueError: for a tag without an open update, or without ``inner``.
    """
    if ctxtag is None:
        yield MergeContext({})
        return
    if inner is None:
        raise UsageError(
            f"Say on which side of the transformation this merge is: merge_context({ctxtag!r}, inner=True) inside, "
            "inner=False outside."
        )
    update = current_update_context(ctxtag)
    if inner:
        context = MergeContext({})
        yield context
        update.inner, update.inner_trace = context._objects, current_trace()
    else:
        yield MergeContext(update.outer or {})
        update.outer = None
