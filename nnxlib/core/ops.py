"""Operations on graphs: split, merge, state, update, clone, pop, and functions to inspect and map a graph.

A *node* is here anything that can be packed: a Module, a List or Dict, a Variable, or any pytree of these. A leaf is
identified by its path, the first one in the order of the walk. A State never shares Variables with the live model: it
holds new ones.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from . import errors
from .blueprint import fresh
from .closures import Watch, notice
from .differences import ANY_VALUE, Aval, Difference, leaf_differences, misfits, refuse
from .errors import ArgumentError, UsageError, describe, format_path
from .filters import Filter, filters_to_predicates, first_of, to_predicate
from .graph import Delta, build, commit, pack
from .graphdef import Avals, GraphDef, avals_of
from .layout import Layout
from .nesting import Nesting
from .objects import HasAttributes, Node, check_writable, is_array, is_bound_method, is_data_leaf, is_node, new_node
from .pickling import exportable
from .rows import SAME, NodeRow, Row, VariableRow, count_leaves
from .state import FlatState, State, flatten_with_keys, from_flat_state, is_without_leaves
from .static import Const, same_items
from .tables import build_described, table_of
from .tracing import Tracer, at_top_level, boundary, current_trace
from .traversals import sorted_keys
from .variables import Variable, all_unshared, make_variable, make_variables, raw_value, unshared
from .walk import flatten_once

A = TypeVar("A")
Path = tuple[Any, ...]

PureState = tuple[GraphDef[A], State]

# --- split and merge ------------------------------------------------------------------------------------------------


def _packed(node: Any) -> tuple[Any, list[Any], list[Any]]:
    """(layout, leaves, objects) of a node, from its table where it has one."""
    if isinstance(node, Node):
        if Watch.count:
            notice(node, node._nnx_trace)
        table = table_of(node)
        return table.layout, table.leaves(node), table.objects_with(node)
    if isinstance(node, GraphDef):
        raise ArgumentError(f"Expected a Module or a pytree of Modules, got a {type(node).__name__}.")
    return pack(node)


class _Snapshot:
    """The values of some leaves at one moment; a State makes Variables of them when it is first looked into.

    Args:
      layout: of the leaves.
      leaves: all leaves of the layout; or those of the group, in its order, which must all be values of Variables.
      group: some of the leaves.
    """

    __slots__ = ("_trace", "group", "layout", "values")

    def __init__(self, layout: Layout, leaves: list[Any], group: Nesting | None = None):
        count = len(leaves) if group is not None else len(layout.variables)
        self.layout, self.group, self.values, self._trace = layout, group, _unshared(leaves, count), current_trace()

    def leaves(self) -> list[Any]:
        kinds, metadata = self.layout.blueprint.variable_types, self.layout.blueprint.metadata
        if self.group is not None:
            kinds, metadata = self.group.sort(kinds), self.group.sort(metadata)
        made = make_variables(kinds, self.values, fresh(metadata), trace=self._trace)
        return made + self.values[len(made) :]

    def nest(self) -> dict:
        leaves, nesting = self.leaves(), self.layout.nesting
        assert nesting is not None
        return nesting.nest(nesting.sort(leaves)) if self.group is None else self.group.nest(leaves)


def _copied(variables: list[Variable]) -> list[Any]:
    values = all_unshared([x._cell.value for x in variables])
    return make_variables([type(x) for x in variables], values, [x._metadata for x in variables])


def _unshared(values: list[Any], count: int) -> list[Any]:
    """Leaves of which the first ``count``, the values of Variables, have copies of the dicts and lists in them."""
    return all_unshared(values) if len(values) == count else all_unshared(values[:count]) + values[count:]


def _copies(layout: Layout, leaves: list[Any]) -> list[Any]:
    """The leaves, with new Variables around values."""
    return _Snapshot(layout, leaves).leaves()


def _graphdef(layout: Layout, leaves: list[Any]) -> GraphDef:
    """A GraphDef; at top level with the avals of the leaves (in a trace they may be those of one example or shard)."""
    if not at_top_level():
        return GraphDef(layout, [None] * len(leaves))
    avals = layout.avals
    if avals is None or not avals.fit(leaves):
        avals = layout.avals = Avals(leaves)
    return GraphDef(layout, avals)


def _states(
    layout: Layout, leaves: list[Any], objects: list[Any], filters: Sequence[Filter], *, exhaustive: bool
) -> tuple[Any, ...]:
    """Copies of the leaves as a State, or one for each filter; the State of a single leaf is the leaf itself."""
    nesting, predicates = layout.nesting, filters_to_predicates(filters)

    def divided(flat: FlatState) -> tuple[FlatState, ...]:
        return _as_tuple(flat.split(*filters) if exhaustive else flat.filter(*filters), filters)

    if nesting is None:
        flat = FlatState(zip(layout.leaf_paths, _copies(layout, leaves), strict=True))
        return tuple([_to_state(list(group)) for group in (divided(flat) if filters else (flat,))])
    variables = [objects[i] for i in layout.variables]
    if not filters:
        return (State._later(_Snapshot(layout, leaves)),)

    def groups_of(leaves: list[Any]) -> tuple[FlatState, ...]:
        return divided(FlatState.from_sorted_keys_values(nesting.paths, nesting.sort(leaves)))

    if len(variables) < len(leaves) or any(x.looks_at_values for x in predicates):
        return tuple([from_flat_state(group) for group in groups_of(_copies(layout, leaves))])
    groups = layout.grouped((predicates, exhaustive), lambda: [group.paths for group in groups_of(variables)])
    return tuple([State._later(_Snapshot(layout, group.sort(leaves), group)) for group in groups])


def _as_tuple(groups: Any, filters: Sequence[Filter]) -> tuple[Any, ...]:
    """What ``State.split`` returns, as a tuple also for a single filter."""
    return groups if len(filters) > 1 else (groups,)


def _to_state(items: list[tuple[Path, Any]]) -> Any:
    if len(items) == 1 and items[0][0] == ():  # a Variable or an array by itself
        return items[0][1]
    return from_flat_state(items)


@boundary
def split(node: Any, *filters: Filter) -> tuple[Any, ...]:
    """Split a node into its structure and its State, or into one State for each filter.

    Args:
      node: a Module, or a pytree of Modules and arrays.
      *filters: groups of leaves, by type, tag or path. A leaf belongs to the first that fits; ``...``, as the last one,
        takes the rest.

    Returns:
      ``(graphdef, state, *states)``. The States hold new Variables with the present values.

    >>> import nnxlib as nnx
    >>> graphdef, params, rest = nnx.split(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Param, ...)
    >>> list(params), list(rest)
    (['bias', 'scale'], ['mean', 'var'])

    Raises:
      NonExhaustiveFiltersError: when no filter takes some leaf; names the paths.
    """
    layout, leaves, objects = _packed(node)
    graphdef = _graphdef(layout, leaves)
    return graphdef, *_states(layout, leaves, objects, filters, exhaustive=True)


@boundary
def merge(graphdef: GraphDef[A] | GraphState, /, *states: Any, copy: bool = False, strict: bool = True) -> A:
    """Make a new object from a GraphDef and the States it was split into; the inverse of :func:`split`.

    Args:
      graphdef: the structure; or a :class:`GraphState`, which needs no states.
      *states: States, FlatStates or nested dicts, which together have a leaf for each path. Int keys may be strings. A
        leaf is a Variable, its bare value, or ``{'value': array}``, as in checkpoints. In place of all States, a single
        list of leaves in the order of a State, such as ``jax.tree.leaves(state)``.
      copy: accepted for compatibility: the object always has its own Variables.
      strict: with False, values of another type, shape or kind of dtype are accepted instead of refused.

    >>> import nnxlib as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.merge(*nnx.split(model)).kernel.shape
    (2, 3)

    States of several models may be stacked, and merged to one model whose arrays have an axis more. Conversely, one of
    the models that ``vmap`` has made can be taken out: ``nnx.merge(graphdef, jax.tree.map(lambda x: x[0], state))``.

    Raises:
      TypeError: without a State.
      StateMismatchError: for GraphStates of different structures, missing and unexpected paths, a list of another
        length, and a type, shape or kind of dtype that differs from that at the split. Additional or missing axes are
        accepted if all leaves of a type have them alike, and values other than arrays if no leaf is an array. (Traced
        values are not compared: they may be those of one example or shard.)
    """
    if isinstance(graphdef, GraphState):
        graphdef, states = graphdef._graphdef, (graphdef, *states)
    if not isinstance(graphdef, GraphDef):
        raise ArgumentError(
            f"nnx.merge takes a GraphDef first, got {type(graphdef).__name__}; write merge(graphdef, state)."
        )
    if not states:
        raise TypeError("merge() missing 1 required positional argument: 'state'")
    states = tuple([_of_graphdef(graphdef, state) for state in states])
    layout = graphdef.layout
    # Three ways, from the fastest to the most general: a State that was not looked into since the split; leaves that
    # are known to fit by their types and avals; and any others, which are compared one by one.
    fitting = _values_as_split(graphdef, states)
    if fitting is None:
        states = _by_path(layout, states)
        given = _in_order(layout, states)
        fitting = None if given is None else _values_that_fit(graphdef, given)
    values, metadata = fitting or _values_looked_at(graphdef, *_placed(layout, states, graphdef.avals), strict)
    if not metadata:
        return build_described(layout, values)
    tree, objects = build(layout, values)
    for position, found in metadata.items():
        object.__setattr__(objects[layout.variables[position]], "_metadata", found)
    return tree


def _of_graphdef(graphdef: GraphDef, state: Any) -> Any:
    if type(state) is not GraphState:
        return state
    if state._graphdef != graphdef:
        raise errors.StateMismatchError(
            "The GraphDef must be the same in all GraphStates that are merged; nothing was made. nnx.diff of two "
            "GraphDefs tells where they differ."
        )
    return state._state


_Values = tuple[list[Any], dict[int, Any]]  # of the leaves; and by position, metadata that differs from the layout's


def _values_as_split(graphdef: GraphDef, states: tuple[Any, ...]) -> _Values | None:
    """The values in a State that was split off with this GraphDef, and has not been looked into; else None."""
    source = getattr(states[0], "_source", None) if len(states) == 1 and isinstance(states[0], State) else None
    if not isinstance(source, _Snapshot) or source.group is not None or source.layout is not graphdef.layout:
        return None
    if not _have_avals(source.values, graphdef.avals):
        return None
    return _unshared(source.values, len(source.layout.variables)), {}


def _by_path(layout: Layout, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """The States; in place of a list of leaves, a FlatState with their paths.

    Raises:
      StateMismatchError: if the list has another number of leaves.
    """
    leaves = states[0] if len(states) == 1 else None
    if type(leaves) is not list or not leaves or any(isinstance(x, Mapping | FlatState | list | tuple) for x in leaves):
        return states
    expected = FlatState(zip(layout.leaf_paths, layout.leaf_paths, strict=True)).paths
    if len(leaves) != len(expected):
        raise errors.StateMismatchError(
            f"Expected {len(expected)} leaves, those of all States in their order, got {len(leaves)}; nothing was made."
            " Pass jax.tree.leaves(state) of the whole state, or the State itself."
        )
    return (FlatState.from_sorted_keys_values(expected, leaves),) if expected != ((),) else (leaves[0],)


def _in_order(layout: Layout, states: tuple[Any, ...]) -> list[Any] | None:
    """The leaves of States in the order of the layout; None if together they have other paths."""
    if layout.nesting is None or not states or not all(isinstance(state, State) for state in states):
        return None
    levels = states[0].raw_mapping if len(states) == 1 else _overlaid([state.raw_mapping for state in states])
    return layout.nesting.flatten(levels)


def _overlaid(states: list[dict]) -> dict:
    """Nested dicts with the leaves of all; if several have the same path, that of the last."""
    root: dict = {}
    stack = [(root, state) for state in reversed(states)]
    while stack:
        level, given = stack.pop()
        for key, value in given.items():
            if type(value) is dict:
                below = level.get(key)
                if type(below) is not dict:
                    below = level[key] = {}
                stack.append((below, value))
            else:
                level[key] = value
    return root


def _values_that_fit(graphdef: GraphDef, leaves: list[Any]) -> _Values | None:
    """The values of leaves, if their types and avals are those at the split; None if they need a closer look."""
    layout, n = graphdef.layout, len(graphdef.layout.variables)
    variables = leaves[:n]
    if [type(x) for x in variables] != layout.blueprint.variable_types:
        return None
    values = all_unshared([x._cell.value for x in variables]) + _plain(leaves[n:])
    if not _have_avals(values, graphdef.avals):
        return None
    metadata = [x._metadata for x in variables]
    same = [const.value for const in layout.blueprint.metadata]
    changed = [k for k in range(n) if metadata[k] is not same[k] and not same_items(metadata[k], same[k])]
    return values, {k: metadata[k] for k in changed}


def _plain(leaves: Iterable[Any]) -> list[Any]:
    return [x._cell.value if isinstance(x, Variable) else x for x in leaves]


def _have_avals(values: list[Any], avals: list[Aval]) -> bool:
    if isinstance(avals, Avals) and avals.fit(values):
        return True
    return all(a is None or a == b for a, b in zip(avals, avals_of(values), strict=True))


def _values_looked_at(graphdef: GraphDef, new: dict[int, Any], unexpected: dict[Path, Any], strict: bool) -> _Values:
    """The values of leaves, which are compared one by one with those at the split.

    Raises:
      StateMismatchError: naming the paths, and what was expected there.
    """
    layout, n = graphdef.layout, len(graphdef.layout.variables)
    leaves: list[Any] = [new.get(k) for k in range(len(graphdef.avals))]
    values = _plain(leaves)
    avals = _remapped(_kinds(layout), graphdef.avals, values)
    found = _misfits(layout, dict(enumerate(avals)), new, unexpected)
    by_path = [x for x in found if x.kind in ("removed", "added")]
    remedy = _ALL_OF_THEM if by_path else "Pass strict=False to take these as they are."
    refuse(found if strict else by_path, "The State does not fit the GraphDef; nothing was made.", remedy)
    same = [const.value for const in layout.blueprint.metadata]
    changed = [k for k in range(n) if isinstance(x := leaves[k], Variable) and not same_items(x._metadata, same[k])]
    return _unshared(values, n), {k: leaves[k]._metadata for k in changed}


_ALL_OF_THEM = """\
Pass every State that nnx.split returned, of a model built alike; nnx.update writes a part of one into a model."""


def _remapped(kinds: Sequence[Any], before: Sequence[Aval], values: Sequence[Any]) -> list[Aval]:
    """The avals that leaves must have if a function may have been mapped over them.

    It may have stacked all of a kind; or none of its results may be an array.
    """
    after = avals_of(values)
    if all(new is None and x is not None for x, old, new in zip(values, before, after, strict=True) if old is not None):
        return [None] * len(before)
    return _stacked(kinds, before, after)


def _stacked(kinds: Sequence[Any], before: Sequence[Aval], after: Sequence[Aval]) -> list[Aval]:
    """The avals that leaves must have if all leaves of a kind may have got, or lost, the same axes."""
    changes: dict[Any, set] = {}
    for kind, old, new in zip(kinds, before, after, strict=True):
        if old is not None and new is not None:
            change = _stacking(old[0], new[0])
            changes[kind] = changes.get(kind, change) & change
    stacked = {kind for kind, found in changes.items() if found}
    return [
        (new[0], old[1]) if old and new and kind in stacked else old
        for kind, old, new in zip(kinds, before, after, strict=True)
    ]


def _stacking(old: tuple[int, ...], new: tuple[int, ...]) -> set[tuple[bool, int, tuple[int, ...]]]:
    """The ways in which adjacent axes were added to, or taken from, a shape: (whether taken, where, their sizes)."""
    long, short = (old, new) if len(old) > len(new) else (new, old)
    n = len(long) - len(short)
    places = [k for k in range(len(short) + 1) if n and long[:k] + long[k + n :] == short]
    return {(long is old, k - end, long[k : k + n]) for k in places for end in (0, len(long))}


def _flat_leaves(states: tuple[Any, ...], known: Mapping[Path, Aval]) -> dict[Path, Any]:
    """Path -> leaf of several States, for an object whose leaves have the paths and avals ``known``.

    Two variants of known paths, as in checkpoints, are understood: ``'0'`` for ``0``, and a further key ``'value'``,
    which is what JAX calls the value of a Variable. (Not below a value that is a mapping itself; but one without
    leaves, such as what optax has in place of a masked moment, is stored as None.)
    """
    by_string: dict[Path, Path] | None = None
    flat: dict[Path, Any] = {}
    for number, state in enumerate(states):
        for path, leaf in _items(state, number, known):
            if path not in known:
                if by_string is None:
                    by_string = {tuple([str(k) for k in p]): p for p in known}
                written = tuple([str(k) for k in path])
                held = by_string.get(written[:-1]) if written[-1:] == ("value",) else None
                is_value = held is not None and (known[held] or leaf is None)
                path = by_string.get(written, (held if is_value else None) or path)
            flat[path] = leaf
    return flat


def _items(state: Any, number: int, known: Mapping[Path, Aval]) -> Iterator[tuple[Path, Any]]:
    """The leaves of a State; a mapping at the known path of a leaf is its value, unless it was an array."""
    if isinstance(state, State) and not state:
        return
    if isinstance(state, FlatState):
        yield from state
    elif isinstance(state, Variable) or () in known:
        yield (), state
    elif isinstance(state, Mapping):
        stack: list[tuple[Path, Any]] = [((), state.raw_mapping if isinstance(state, State) else state)]
        while stack:
            path, value = stack.pop()
            if isinstance(value, Mapping) and known.get(path, value) is not None:
                stack.extend(((*path, key), child) for key, child in reversed(list(value.items())))
            else:
                yield path, value
    elif isinstance(state, list | tuple):
        for item in state:
            yield from _items(item, number, known)
    else:
        raise errors.StateMismatchError(
            f"Expected a State, a FlatState or a nested dict as state number {number}, got {describe(state)}; nothing "
            "was changed. Pass what nnx.split or nnx.state returned."
        )


def _is_none(leaf: Any) -> bool:
    """Whether a leaf is None, or that as the value of a Variable."""
    return leaf is None or (type(leaf) is dict and leaf.keys() == {"value"} and leaf["value"] is None)


def _placed(layout: Layout, states: tuple[Any, ...], avals: Sequence[Aval]) -> tuple[dict[int, Any], dict[Path, Any]]:
    """The leaves of States by position; and by path those that are unexpected."""
    flat, position = _flat_leaves(states, dict(zip(layout.leaf_paths, avals, strict=True))), layout.positions
    unexpected = {path: leaf for path, leaf in flat.items() if path not in position}
    return {position[path]: leaf for path, leaf in flat.items() if path in position}, unexpected


def _misfits(
    layout: Layout, avals: Mapping[int, Aval], new: Mapping[int, Any], unexpected: dict[Path, Any]
) -> list[Difference]:
    """The differences between leaves and what they must be, by position, as :func:`merge` and :func:`update` see them.

    Nearly all leaves certainly fit; these are left out first, which is fast. A leaf of the class Variable itself, which
    older code makes by ``VariableState(type=Param, value=x)``, is of any type.
    """
    kinds = _kinds(layout)
    now = dict(zip(new, avals_of(_plain(new.values())), strict=True))
    compared = [
        k
        for k, was in avals.items()
        if k not in new
        or (now[k] != was and not _fits(now[k], was))
        or (isinstance(new[k], Variable) and type(new[k]) not in (kinds[k], Variable))
    ]
    expected = {layout.leaf_paths[k]: _leaf(kinds[k], avals[k]) for k in compared}
    given = {layout.leaf_paths[k]: x._value if type(x := new[k]) is Variable else x for k in compared if k in new}
    return leaf_differences(expected, given | unexpected, _compare)


def _kinds(layout: Layout) -> list[type | None]:
    """The type of each leaf that is a Variable, None for a bare array."""
    return [*layout.blueprint.variable_types, *[None] * (len(layout.leaf_paths) - len(layout.variables))]


def _leaf(kind: type | None, aval: Aval) -> Any:
    """A leaf as it was at the split: a Variable, or a bare value, with this aval."""
    value = ANY_VALUE if aval is None else jax.ShapeDtypeStruct(*aval)
    return value if kind is None else make_variable(kind, value, {})


def _fits(new: Aval, old: Aval) -> bool:
    """Whether avals alone tell that :func:`_compare` finds no difference."""
    return old is None or (new is not None and new[0] == old[0] and _kind(new[1]) is _kind(old[1]))


def _compare(path: Path, expected: Any, given: Any) -> list[Difference]:
    """The differences of two leaves; none if one is traced, or was cast within a kind (float32 to bfloat16)."""
    found = [] if isinstance(given, Tracer) else misfits(path, expected, given)
    return [x for x in found if x.kind != "dtype" or _kind(expected.dtype) is not _kind(given.dtype)]


@functools.cache
def _kind(dtype: Any) -> Any:
    for kind in (jax.dtypes.prng_key, jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(dtype, kind):
            return kind
    return type(dtype)


# --- state, update, pop ---------------------------------------------------------------------------------------------


@boundary
def state(node: Any, *filters: Filter) -> Any:
    """Return the State of a node, or for each filter that of the leaves it takes.

    >>> import nnxlib as nnx
    >>> list(nnx.state(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.BatchStat))
    ['mean', 'var']
    """
    layout, leaves, objects = _packed(node)
    found, *more = _states(layout, leaves, objects, filters, exhaustive=False)
    return (found, *more) if more else found


variables = state  # the name of older code


@boundary
def graphdef(node: A, /) -> GraphDef[A]:
    """Return the structure of a node, as :func:`split` does.

    >>> import nnxlib as nnx
    >>> nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0))) == nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
    True
    """
    layout, leaves, _ = _packed(node)
    return _graphdef(layout, leaves)


@boundary
def update(node: Any, state: Any, /, *states: Any, strict: bool = True) -> None:
    """Write the leaves of States into a live node, by path.

    Args:
      node: a Module, or a pytree of Modules.
      state: a State, FlatState or nested dict, of all or some of the leaves. Int keys may be strings. A leaf is a
        Variable, whose metadata is taken over too, a bare value, or ``{'value': array}``, as in checkpoints.
      *states: more of these.
      strict: with False, leaves that do not fit are skipped instead of refused. All Variables of a type together may
        have additional axes, or lack some: those of a stack of models, or of one model of a stack.

    >>> import nnxlib as nnx
    >>> model, other = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    >>> nnx.update(model, nnx.state(other, nnx.Param))
    >>> bool((model.kernel == other.kernel).all())
    True

    Raises:
      StateMismatchError: for paths that the node does not have, and leaves of another type, shape or kind of dtype;
        nothing has been written then.
      TraceContextError: under another trace than the node was made under; nothing has been written then.
    """
    layout, leaves, objects = _packed(node)
    states = (state, *states)
    given = _by_position(layout, states)
    fitting = None
    if given is not None and at_top_level():
        live = enumerate([*[objects[i] for i in layout.variables], *leaves[len(layout.variables) :]])
        fitting = _values_that_fit(_graphdef(layout, leaves), [given.get(k, x) for k, x in live])
    if given is not None and fitting is not None:
        values, metadata = {k: fitting[0][k] for k in given}, fitting[1]
    else:
        new, unexpected = (given, {}) if given else _placed(layout, states, avals_of(leaves))
        new = {k: x for k, x in new.items() if not (_is_none(x) and is_without_leaves(leaves[k]))}
        present = [leaves[k] for k in new]
        avals = zip(new, present, avals_of(present), strict=True)
        before = {k: None if isinstance(x, Tracer) else aval for k, x, aval in avals}
        found = _misfits(layout, _stacked_where_all_are_given(layout, before, new), new, unexpected)
        if strict:
            refuse(found, "The State does not fit the object; nothing was written.", "Pass strict=False to skip these.")
        for x in found:
            new.pop(layout.positions.get(x.path), None)
        values, metadata = _contents(layout, new)
    own = range(len(leaves) - (0 if isinstance(node, Node) else count_leaves(layout.root)), len(leaves))
    items = [(*_settable(node, layout.leaf_paths[k]), values.pop(k)) for k in own if k in values]
    in_refs = {k: values.pop(k) for k in layout.in_refs & values.keys() - metadata.keys()}
    _write(layout, leaves, objects, values, metadata)
    for k, value in in_refs.items():
        objects[layout.variables[k]].set_raw_value(value)
    for holder, key, value in items:
        holder[key] = value


def _settable(tree: Any, path: Path) -> tuple[Any, Any]:
    """The container that holds a leaf of a pytree, and its key there.

    Raises:
      ValueError: if its items cannot be set.
    """
    holder = _holder(tree, path) if path else None
    if not isinstance(holder, MutableMapping | list):
        raise UsageError(
            f"Cannot set {format_path(path)}: it is no item of a list or dict, whose items can be set. Keep what "
            "changes in a Variable, an attribute, a list or a dict."
        )
    return holder, path[-1]


def _holder(tree: Any, path: Path) -> Any:
    """The container that the last key of a path belongs to."""
    for key in path[:-1]:
        is_item = isinstance(tree, Mapping | list) or (isinstance(tree, tuple) and isinstance(key, int))
        tree = tree[key] if is_item else getattr(tree, str(key), None)
    return tree


def _stacked_where_all_are_given(layout: Layout, before: dict[int, Aval], new: Mapping[int, Any]) -> Mapping[int, Aval]:
    """:func:`_stacked` for those kinds of which every leaf is given."""
    kinds = _kinds(layout)
    missing = {kind for k, kind in enumerate(kinds) if k not in new}
    stacked = _stacked([kinds[k] for k in new], [*before.values()], avals_of(_plain(new.values())))
    return {k: old if kinds[k] in missing else aval for (k, old), aval in zip(before.items(), stacked, strict=True)}


def _by_position(layout: Layout, states: tuple[Any, ...]) -> dict[int, Any] | None:
    """The leaves of States by position, if each is nested like all leaves of the layout or a known group; else None."""
    new: dict[int, Any] = {}
    for state in states:
        found = layout.leaves_in(state.raw_mapping) if isinstance(state, State) else None
        if found is None or dict in [type(x) for x in found.values()]:  # a level where there is a leaf
            return None
        new |= found
    return new


def _contents(layout: Layout, new: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """By position, the values of leaves; and the metadata of Variables, if it differs from the layout's."""
    same, n = layout.blueprint.metadata, len(layout.variables)
    held = zip(new, _plain(new.values()), strict=True)
    boxed = {k: x._metadata for k, x in new.items() if k < n and isinstance(x, Variable)}
    others = {k: metadata for k, metadata in boxed.items() if not same_items(metadata, same[k].value)}
    return {k: unshared(x) if k < n else x for k, x in held}, others


def _write(
    layout: Layout, leaves: list[Any], objects: list[Any], new: dict[int, Any], metadata: dict[int, Any]
) -> None:
    """Write values and metadata, by position, to the live objects, as a commit."""
    n, variables = len(layout.variables), layout.variables
    rows: dict[int, Row] = {
        variables[k]: VariableRow(type(objects[variables[k]]), Const.of_items(found)) for k, found in metadata.items()
    }
    arrays: list[Any] = []
    if max(new, default=-1) >= n:
        positions = iter(range(n, len(leaves)))
        for i, row in enumerate(layout.rows):
            if isinstance(row, NodeRow):
                fields = []
                for name, spec in row.fields:
                    held = [next(positions) for _ in range(count_leaves(spec))]
                    touched = not new.keys().isdisjoint(held)
                    fields.append((name, spec if touched else SAME))
                    arrays += _plain([new.get(k, leaves[k]) for k in held if touched])
                if any(spec is not SAME for _, spec in fields):
                    rows[i] = row._replace(fields=tuple(fields))
    plain = [k for k in new if k < n and k not in metadata]
    delta = Delta(tuple([variables[k] for k in plain]), tuple(sorted(rows.items())), Const.of(None))
    commit(layout, delta, [*[new[k] for k in plain], *[new[k] for k in sorted(metadata)], *arrays], objects)


def _delete(holder: Any, key: Any) -> None:
    if isinstance(holder, HasAttributes) and isinstance(key, str):
        delattr(holder, key)
    else:
        operator.delitem(holder, key)  # type: ignore[arg-type]  # a list, dict, List or Dict


@boundary
def pop(node: Any, *filters: Filter) -> Any:
    """Remove the leaves that the filters take from a node and return them as a State, one for each filter.

    Leaves are Variables, and arrays that are attributes or items of a node, a list or a dict.

    >>> import nnxlib as nnx
    >>> norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    >>> list(nnx.pop(norm, nnx.BatchStat)), hasattr(norm, 'mean')
    (['mean', 'var'], False)

    Raises:
      ValueError: without a filter, or when a leaf to be removed is part of a tuple or another pytree.
    """
    if not filters:
        raise UsageError("nnx.pop needs at least one filter: nnx.pop(model, nnx.Intermediate).")
    first_to_take = first_of([to_predicate(f) for f in filters])
    *taken, _ = groups = [[] for _ in (*filters, None)]
    chosen: dict[Any, list[tuple[Path, Any]]] = {}  # the group of each Variable by id, of each array by path
    places = []
    for path, x, holder in _places(node):
        if isinstance(x, Variable):
            identity: Any = id(x)
        elif isinstance(x, Node):
            if Watch.count:
                notice(x, x._nnx_trace)
            continue
        else:
            identity = path
        group = chosen.get(identity)
        if group is None:
            group = chosen[identity] = groups[first_to_take(path, x)]
            group.append((path, x))
        if group is not groups[-1] and isinstance(holder, Node | dict | list):
            places.append((holder, path[-1], identity))
    removed = {identity for _, _, identity in places}
    for path, x in (item for group in taken for item in group):
        if (id(x) if isinstance(x, Variable) else path) not in removed:
            raise UsageError(
                f"Cannot pop {format_path(path)}: it is inside a tuple or another pytree, which cannot lose an item. "
                "Keep it in an attribute, a list or a dict."
            )
    states = [_to_state(list(zip([path for path, _ in group], _snapshot([x for _, x in group])))) for group in taken]
    trace = current_trace()
    for holder, name, _ in places:
        if isinstance(holder, Node) and holder._nnx_trace is not trace:
            check_writable(holder, f"delete attribute {name!r}")
    for holder, name, _ in reversed(places):  # items of a list from the last to the first
        _delete(holder, name)
    return tuple(states) if len(states) > 1 else states[0]


def _snapshot(leaves: list[Any]) -> list[Any]:
    """The leaves, with copies of the Variables."""
    copies = iter(_copied([x for x in leaves if isinstance(x, Variable)]))
    return [next(copies) if isinstance(x, Variable) else x for x in leaves]


@boundary
def clone(node: A, variables: bool = True, *, arrays: bool = True) -> A:
    """Return a deep copy of a node: same structure, Variables and buffers of its own.

    Args:
      node: a Module, or a pytree of Modules.
      variables: with False, the copy shares the Variables (and so their values) with the original.
      arrays: with False, the new Variables share their immutable buffers with the original; then donating one of the
        two to a jitted function deletes the buffers of both.

    >>> import nnxlib as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> target = nnx.clone(model)
    >>> model.kernel[...] = 0.0
    >>> bool((target.kernel == 0).all())
    False
    """
    layout, leaves, objects = _packed(node)
    if not variables:
        return build(layout, leaves, {i: objects[i] for i in layout.variables})[0]
    return build_described(layout, jax.tree.map(_copy_array, leaves) if arrays else leaves)


def _copy_array(x: Any) -> Any:
    if isinstance(x, jax.Ref):
        return jax.new_ref(x[...])
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        return x.copy() if at_top_level() else jnp.copy(x)  # under a trace a key has no method that copies it
    return x.copy() if isinstance(x, np.ndarray) else x


# --- looking --------------------------------------------------------------------------------------------------------


def _children(value: Any) -> list[tuple[Path, Any]]:
    """What is directly below a value, by path: the attributes or items of a node, the leaves and nodes of a pytree."""
    if isinstance(value, Node):
        held = value._nnx_contents()
        is_plain_list = isinstance(value, list) and len(held) == len(value)
        return [((name,), held[name]) for name in (held if is_plain_list else sorted_keys(held))]
    if isinstance(value, State) or (jtu.all_leaves([value]) and not is_bound_method(value)) or is_data_leaf(value):
        return []
    keys, leaves, _ = flatten_once(value)
    return list(zip(keys, leaves, strict=True))


def iter_graph(node: Any, /) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) for everything in a graph, children before parents; objects once, at their first path.

    >>> import nnxlib as nnx
    >>> [path for path, x in nnx.iter_graph(nnx.Linear(1, 1, rngs=nnx.Rngs(0))) if isinstance(x, nnx.Variable)]
    [('bias',), ('kernel',)]
    """
    seen: dict[int, Any] = {}  # by id; keeps the objects alive, so that no id is reused
    plain = {type(None)}  # classes whose instances are always leaves
    stack: list[tuple[Iterator[tuple[Path, Any]], Path, Any]] = [(iter([((), node)]), (), None)]
    while stack:
        remaining, above, parent = stack[-1]
        for key, value in remaining:
            if type(value) not in plain:
                if is_node(value):
                    if id(value) in seen:
                        continue
                    seen[id(value)] = value
                elif jtu.all_leaves([value]) and type(value) is not types.MethodType:
                    plain.add(type(value))
                if not isinstance(value, Variable) and (children := _children(value)):
                    stack.append((iter(children), above + key, value))
                    break
            yield above + key, value
        else:
            stack.pop()
            if stack:
                yield above, parent


def _places(node: Any) -> Iterator[tuple[Path, Any, Any]]:
    """Yield each place of a node, Variable or array in a graph: its path, the value, what holds it; parents first."""
    seen, plain = set(), {type(None)}  # plain: as in iter_graph
    stack: list[tuple[Path, Any, Any]] = [((), node, None)]
    while stack:
        path, value, _ = place = stack.pop()
        if isinstance(value, Variable):
            yield place
            continue
        if isinstance(value, Node):
            yield place
            if id(value) in seen:
                continue
            seen.add(id(value))
        elif is_array(value):
            yield place
            continue
        elif jtu.all_leaves([value]) and type(value) is not types.MethodType:
            plain.add(type(value))
        stack += [
            (path + key, x, value if len(key) == 1 else _holder(value, key))
            for key, x in reversed(_children(value))
            if type(x) not in plain
        ]


def iter_children(node: Any, /) -> Iterator[tuple[Any, Any]]:
    """Yield (key, child) for the nodes and Variables that are attributes or items of ``node``.

    >>> import nnxlib as nnx
    >>> [(key, type(child).__name__) for key, child in nnx.iter_children(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))]
    [('bias', 'Param'), ('kernel', 'Param')]
    """
    return ((key[0] if len(key) == 1 else key, child) for key, child in _children(node) if is_node(child))


@boundary
def find_duplicates(node: Any, /, *, only: Filter = ...) -> list[list[Path]]:
    """Return the paths of each Variable or node that is reached by more than one path, first path first.

    >>> import nnxlib as nnx
    >>> shared = nnx.Param(1.0)
    >>> nnx.find_duplicates(nnx.Dict(a=shared, b=shared))
    [[('a',), ('b',)]]
    """
    predicate, places = to_predicate(only), list(_places(node))  # a list keeps the objects alive: no id is reused
    paths: dict[int, list[Path]] = {}
    for path, value, _ in places:
        if not is_node(value):
            continue
        if id(value) in paths or predicate(path, value):
            paths.setdefault(id(value), []).append(path)
        else:
            paths[id(value)] = []
    return [found for found in paths.values() if len(found) > 1]


# --- mapping --------------------------------------------------------------------------------------------------------


@boundary
def map(f: Callable[[Path, Any], Any], node: A, /, *, recreate_variables: bool = True) -> A:  # the name of the field
    """Return a copy of a node with ``f(path, leaf)`` for each leaf; leaves are Variables and arrays.

    For a Variable ``f`` returns a new Variable, or the value of one; without ``recreate_variables``, what it returns
    takes the place of the Variable, whatever it is. ``f`` gets the Variables of ``node`` itself, so a write to one of
    them is not undone. If ``f`` returns that very Variable, the copy has a new one.

    >>> import nnxlib as nnx
    >>> nnx.map(lambda path, v: v * 2, nnx.Dict(a=nnx.Param(1.0))).a
    Param(2.0)
    """
    layout, leaves, objects = pack(node) if isinstance(node, State) else _packed(node)
    own = [*[objects[i] for i in layout.variables], *leaves[len(layout.variables) :]]
    result = _result if recreate_variables else lambda leaf, new: new
    new = [result(leaf, f(path, leaf)) for path, leaf in zip(layout.leaf_paths, own, strict=True)]
    return build(layout, new, dict(zip(layout.variables, new, strict=False)))[0]


def _result(leaf: Any, new: Any) -> Any:
    if isinstance(leaf, Variable):
        return leaf.copy() if new is leaf else new if isinstance(new, Variable) else leaf.replace(new)
    return new


@boundary
def recursive_map(f: Callable[[Path, Any], Any], node: Any, /) -> Any:
    """Return a copy of a graph in which each leaf, and then each node, is replaced by ``f(path, x)``.

    Children come before their parents. An object with several paths is mapped once, at its first path.

    >>> import nnxlib as nnx
    >>> node = nnx.Dict(a=nnx.Param(2.0))
    >>> nnx.recursive_map(lambda path, x: x.copy(x / 2) if isinstance(x, nnx.Param) else x, node).a
    Param(1.0)
    """
    copies: dict[int, Any] = {}
    for path, value in iter_graph(node):
        if isinstance(value, Variable):
            copies[id(value)] = f(path, value)
        elif isinstance(value, Node):
            copied = new_node(type(value), value._nnx_marks)
            copied._nnx_fill({k: _mapped(f, (*path, k), child, copies) for k, child in value._nnx_children()})
            copies[id(value)] = f(path, copied)
    return _mapped(f, (), node, copies)


def _mapped(f: Callable, path: Path, value: Any, copies: dict[int, Any]) -> Any:
    if is_node(value):
        return copies.get(id(value), value)
    children = _children(value)
    if not children:
        return f(path, value)
    _, _, treedef = flatten_once(value)
    return f(path, treedef.unflatten([_mapped(f, (*path, *key), child, copies) for key, child in children]))


@boundary
def pure(tree: Any) -> Any:
    """Return a pytree with each Variable replaced by its value.

    >>> import nnxlib as nnx
    >>> nnx.pure(nnx.State({'a': nnx.Param(1.0)}))
    State({'a': 1.0})
    """
    return jax.tree.map(raw_value, tree, is_leaf=lambda x: isinstance(x, Variable))


as_pure = pure


# --- flat and packaged forms ----------------------------------------------------------------------------------------


@boundary
def flatten(node: A, /, *, with_paths: bool = True) -> tuple[GraphDef[A], Any]:
    """Split into a GraphDef and a FlatState (with ``with_paths=False``, the list of its leaves).

    >>> import nnxlib as nnx
    >>> graphdef, flat = nnx.flatten(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> flat.paths
    (('bias',), ('kernel',))
    """
    layout, leaves, _ = _packed(node)
    flat = FlatState(zip(layout.leaf_paths, _copies(layout, leaves), strict=True), sort=True)
    return _graphdef(layout, leaves), flat if with_paths else flat.leaves


@boundary
def unflatten(graphdef: GraphDef[A], state: Any, /) -> A:
    """Merge a GraphDef with a State, a FlatState, or the list of leaves that :func:`flatten` returned.

    >>> import nnxlib as nnx
    >>> graphdef, leaves = nnx.flatten(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), with_paths=False)
    >>> nnx.unflatten(graphdef, leaves).kernel.shape
    (2, 3)
    """
    if isinstance(state, list):
        order = FlatState([(path, None) for path in graphdef.layout.leaf_paths], sort=True).paths
        state = FlatState.from_sorted_keys_values(order, state)
    return merge(graphdef, state)


class GraphState(MutableMapping, Generic[A]):
    """A GraphDef together with its State, as one pytree; reads and writes like the State."""

    __slots__ = ("_graphdef", "_state")

    def __init__(self, _graphdef: GraphDef[A], _state: State):
        object.__setattr__(self, "_graphdef", _graphdef)
        object.__setattr__(self, "_state", _state)

    def __getitem__(self, key: Any) -> Any:
        return self._state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[key]

    def __getattr__(self, name: str) -> Any:
        if name in GraphState.__slots__:  # of one that is being unpickled
            raise AttributeError(name)
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._state, name, value)

    def __reduce__(self) -> tuple:
        return GraphState, (self._graphdef, self._state)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return f"GraphState({self._graphdef!r}, {self._state!r})"


def _flatten_graph_state(x: GraphState) -> tuple[Sequence[tuple[Any, Any]], tuple[GraphDef, Any]]:
    """The children of the State, so that leaves have the same paths as in a State."""
    if isinstance(x._state, State):
        children, keys = flatten_with_keys(x._state)
        return children, (x._graphdef, keys)
    return ((jtu.GetAttrKey("_state"), x._state),), (x._graphdef, None)


def _unflatten_graph_state(static: tuple[GraphDef, Any], children: Iterable[Any]) -> GraphState:
    graphdef, keys = static
    return GraphState(graphdef, *children if keys is None else (State._view(dict(zip(keys, children))),))


jtu.register_pytree_with_keys(GraphState, _flatten_graph_state, _unflatten_graph_state)
exportable(GraphState)


@boundary
def unpack(node: Any, *filters: Filter) -> Any:
    """Return a :class:`GraphState`, or one for each filter; ``nnx.merge`` takes it alone.

    >>> import nnxlib as nnx
    >>> packed = nnx.unpack(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> nnx.merge(packed).kernel.shape
    (2, 3)
    """
    graphdef, *states = split(node, *filters)
    found: Sequence[Any] = [GraphState(graphdef, state) for state in states]
    return tuple(found) if len(found) > 1 else found[0]


class CallProxy:
    """Leads to a method by attributes and items; a call of it returns ``(output, (graphdef, state))``."""

    __slots__ = ("_make", "_path")

    def __init__(self, make: Callable[[], Any], path: tuple[tuple[bool, Any], ...] = ()):
        self._make, self._path = make, path

    def __getattr__(self, name: str) -> CallProxy:
        return CallProxy(self._make, (*self._path, (False, name)))

    def __getitem__(self, key: Any) -> CallProxy:
        return CallProxy(self._make, (*self._path, (True, key)))

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[GraphDef, Any]]:
        node = self._make()
        method = node
        for is_item, key in self._path:
            method = method[key] if is_item else getattr(method, key)
        out = method(*args, **kwargs)
        return out, split(node)


@boundary
def call(graphdef_state: tuple[GraphDef[A], Any], /) -> Any:
    """Call a method of a split object: ``nnx.call((graphdef, state)).method(x)``.

    Returns what the method returned and the new ``(graphdef, state)``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> pair = nnx.split(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    >>> y, (graphdef, state) = nnx.call(pair)(jnp.ones((4, 2)))
    >>> state['mean'].value.tolist()
    [0.009999999776482582, 0.009999999776482582]
    """
    return CallProxy(lambda: merge(*graphdef_state))


def _apply(self: GraphDef, state: Any, *states: Any) -> Any:
    """Call a method of the object that this GraphDef and the States make; see :func:`call`."""
    return CallProxy(lambda: merge(self, state, *states))


GraphDef.apply = _apply  # type: ignore[attr-defined]  # merge is defined here, above GraphDef


@boundary
def set_metadata(node: Any, /, *, only: Filter = Variable, **metadata: Any) -> None:
    """Set metadata on each Variable of a node that the filter takes.

    >>> import nnxlib as nnx
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.set_metadata(layer, only=nnx.PathContains('kernel'), frozen=True)
    >>> layer.kernel.frozen, layer.bias.has_metadata('frozen')
    (True, False)
    """
    predicate = to_predicate(only)
    for path, x in iter_graph(node):
        if isinstance(x, Variable) and predicate(path, x):
            x.set_metadata(**metadata)
