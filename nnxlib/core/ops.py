"""Operations on graphs: split, merge, state, update, clone, map.

Here a *node* is anything that can be packed: a Module, a List or Dict, a Variable, or any pytree of these. A leaf is
identified by its path, the first one in the order of the walk. A State never shares Variables with the live model: it
holds new ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeVar, overload

import jax
import numpy as np

from . import fitting
from .blueprint import fresh_values
from .buffers import note_buffers
from .calls import note_copies, note_split, split_into
from .cells import cell_of, new_cell
from .closures import Watch, notice
from .data import is_data_leaf
from .differences import aval_of
from .errors import ArgumentError, Path, StateMismatchError, TraceContextError, UsageError, describe, format_path
from .filters import Filter, filters_to_predicates, warn_of_names, warn_of_node_classes
from .formulas import copied
from .graph import Delta, Packed, build, by_path, commit, even_if_interrupted
from .graphdef import GraphDef, graphdef_of
from .graphstate import GraphState
from .iteration import holder_of
from .layout import Layout
from .lost_changes import watch_draws
from .making import make_variable, make_variables
from .matching import flat_state_of
from .nesting import Nesting
from .objects import Node, check_writable, set_child
from .packing import pack_live
from .rows import Row, VariableRow, count_leaves, touched_rows
from .state import FlatState, State, grouped, one_or_all, state_of_items
from .static import Const
from .tables import build_described, table_of
from .tracing import Tracer, at_top_level, boundary, current_trace
from .values import all_unshared
from .variables import Intermediate, RngKey, Variable, plain_value, stored_value

A = TypeVar("A")

PureState = tuple[GraphDef[A], State]
Items = list[tuple[Path, Any]]  # pairs of path and leaf

# --- split and merge ------------------------------------------------------------------------------------------------


def _packed(node: Any) -> Packed:
    """A node, packed from its table where it has one."""
    layout, leaves, objects = _to_be_read(node)
    return Packed(layout, leaves(), objects)


def _to_be_read(node: Any) -> tuple[Layout, Callable[[], list[Any]], list[Any]]:
    """As :func:`_packed`, but with a function that reads the leaves."""
    if isinstance(node, Node):
        notice(node)
        table = table_of(node)
        return table.layout, table.leaves, table.objects_with(node)
    if isinstance(node, GraphDef):
        raise ArgumentError(f"Expected a Module or a pytree of Modules, got a {type(node).__name__}.")
    layout, leaves, objects = pack_live(node)
    return layout, lambda: leaves, objects


class _Snapshot:
    """The values of leaves at one moment; a State makes Variables of them when it is first looked into.

    They are all leaves of the layout, or those of a ``group``; in the order of the layout, so Variables come first.
    """

    __slots__ = ("group", "layout", "trace", "values")

    def __init__(self, layout: Layout, leaves: list[Any], group: Nesting | None = None):
        self.layout, self.group, self.trace = layout, group, current_trace()
        self.values = all_unshared(leaves)

    def leaves(self) -> list[Any]:
        """The leaves, with new Variables around values."""
        kinds, metadata = self.layout.blueprint.variable_types, self.layout.blueprint.metadata
        if self.group is not None:
            chosen = self.group.within(len(kinds))
            kinds, metadata = [kinds[k] for k in chosen], [metadata[k] for k in chosen]
        cell = new_cell if self.trace is current_trace() else functools.partial(cell_of, trace=self.trace)
        made = make_variables(kinds, self.values, fresh_values(metadata), cell)
        return made + self.values[len(made) :]

    def nest(self) -> dict:
        """The levels of the State."""
        nesting = self.group or self.layout.nesting
        assert nesting is not None
        return nesting.nest(self.leaves())


def copies_of(layout: Layout, leaves: list[Any]) -> list[Any]:
    """The leaves, with new Variables around values."""
    return _Snapshot(layout, leaves).leaves()


def _states(
    layout: Layout, leaves: Callable[[], list[Any]], objects: list[Any], filters: Sequence[Filter], *, exhaustive: bool
) -> tuple[Any, ...]:
    """Copies of the leaves as a State, or one for each filter; the State of a single leaf is the leaf itself.

    Where filters leave out some Variables, these are not read: so a jitted function need not take them.
    """
    nesting, predicates = layout.nesting, filters_to_predicates(filters)

    # Without a nesting this is a leaf by itself, a very deep graph, or one with keys that JAX cannot sort.
    if nesting is None or any(x.looks_at_values for x in predicates):
        flat = FlatState(zip(layout.leaf_paths, copies_of(layout, leaves()), strict=True))
        return tuple([state_of_items(group) for group in divided(flat, filters, exhaustive)])
    if not filters:
        return (State._later(_Snapshot(layout, leaves())),)

    # The groups follow from the layout, and from the types of the arrays, which it does not know.
    variables = [objects[i] for i in layout.variables]
    arrays = leaves()[len(variables) :] if len(variables) < len(layout.leaf_paths) else []

    def paths_of_groups() -> list[list[Path]]:
        flat = FlatState.from_sorted_keys_values(nesting.paths, nesting.sort(variables + arrays))
        return [[path for path, _ in group] for group in divided(flat, filters, exhaustive)]

    found = []
    for group in layout.grouped((predicates, exhaustive, *[type(x) for x in arrays]), paths_of_groups):
        chosen = group.within(len(variables))
        values = [variables[k]._cell.value for k in chosen]
        values += [arrays[k - len(variables)] for k in group.positions[len(chosen) :]]
        found.append(State._later(_Snapshot(layout, values, group)))
    return tuple(found)


def divided(flat: FlatState, filters: Sequence[Filter], exhaustive: bool) -> list[Items]:
    """The leaves for each filter, with their paths; without any, all leaves."""
    if not filters:
        return [list(flat)]
    warn_of_node_classes(filters)
    groups = grouped(flat, filters, exhaustive=exhaustive)
    warn_of_names(filters, groups, flat)
    return groups


def live_states(node: Any, filters: Sequence[Filter], *, exhaustive: bool) -> tuple[Any, ...]:
    """The leaves of a node as a State, or one for each filter, with its very Variables."""
    flat = FlatState(by_path(_packed(node)))
    return tuple([state_of_items(group) for group in divided(flat, filters, exhaustive)])


@overload
def split(node: A, /) -> tuple[GraphDef[A], State]: ...
@overload
def split(node: A, filter: Filter, /) -> tuple[GraphDef[A], State]: ...
@overload
def split(node: A, a: Filter, b: Filter, /) -> tuple[GraphDef[A], State, State]: ...
@overload
def split(node: A, a: Filter, b: Filter, c: Filter, /) -> tuple[GraphDef[A], State, State, State]: ...
@overload
def split(node: A, /, *filters: Filter) -> tuple[GraphDef[A], *tuple[State, ...]]: ...
@boundary
def split(node: Any, *filters: Filter) -> Any:
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
      NonExhaustiveFiltersError: if there are leaves that no filter takes; names their paths.
    """
    layout, leaves, objects = _packed(node)
    graphdef = graphdef_of(layout, leaves)
    note_split(graphdef, objects)
    return graphdef, *_states(layout, lambda: leaves, objects, filters, exhaustive=True)


@boundary
def merge(graphdef: GraphDef[A] | GraphState, /, *states: Any, copy: bool = False, strict: bool = True) -> A:
    """Make a new object from a GraphDef and the States it was split into; the inverse of :func:`split`.

    Args:
      graphdef: the structure; or a :class:`GraphState`, which needs no states.
      *states: States, FlatStates or nested dicts, which together have a leaf for each path. Int keys may be strings. A
        leaf is a Variable, its bare value, or ``{'value': array}``, as in checkpoints. Its path may be any that leads
        to it. In place of all States, a single list of leaves in the order of a State, as ``jax.tree.leaves(state)``.
      copy: accepted for compatibility: the object always has its own Variables.
      strict: with False, values of another shape or kind of dtype are accepted instead of refused.

    >>> import nnxlib as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.merge(*nnx.split(model)).kernel.shape
    (2, 3)

    The Variables of the new object have the types of those in the States, so parameters can be frozen by making them
    Variables of a type that is not trained.

    States of several models may be stacked, and merged to one model whose arrays have one axis more. Conversely, one of
    the models that ``vmap`` has made can be taken out: ``nnx.merge(graphdef, jax.tree.map(lambda x: x[0], state))``. So
    all leaves of a type may have more axes than at the split, or fewer; and several leaves may have a further first
    axis, if no shape differs otherwise. If no leaf is an array, the values may be anything. Traced values are not
    compared: they may belong to one example or shard.

    Raises:
      TypeError: without a State.
      StateMismatchError: for GraphStates of different structures, missing and unexpected paths, a list of another
        length, and a shape or kind of dtype that differs from the one at the split in any other way.
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
    # A State that was not looked into since the split has the values themselves; others are matched leaf by leaf.
    values, changed = _values_as_split(graphdef, states) or fitting.values_to_merge(graphdef, states, strict)
    held = slice(len(layout.variables), len(layout.leaf_paths) - count_leaves(layout.root))
    values[held] = fitting.as_held(values[held], graphdef.avals[held])
    if not changed:
        made = build_described(layout, values)
    else:
        others = {layout.variables[k]: make_variable(kind, values[k], more) for k, (kind, more) in changed.items()}
        made = build(layout, values, others)[0]
    if not at_top_level() and RngKey in layout.blueprint.variable_types:
        watch_draws(made)
    originals = split_into(graphdef)
    if originals is not None:
        note_copies(originals, _packed(made)[2])
    return made


def _of_graphdef(graphdef: GraphDef, state: Any) -> Any:
    """The State in a GraphState, which must be one of this structure; anything else as it is."""
    if type(state) is not GraphState:
        return state
    if state._graphdef != graphdef:
        raise StateMismatchError(
            "The GraphDef must be the same in all GraphStates that are merged; nothing was made. nnx.diff of two "
            "GraphDefs tells where they differ."
        )
    return state._state


def _values_as_split(graphdef: GraphDef, states: tuple[Any, ...]) -> fitting.Values | None:
    """The values in a State that was split off with this GraphDef, and has not been looked into; else None."""
    source = getattr(states[0], "_source", None) if len(states) == 1 and isinstance(states[0], State) else None
    if not isinstance(source, _Snapshot) or source.group is not None or source.layout is not graphdef.layout:
        return None
    if Watch.all and source.trace is not current_trace():  # the Variables of a captured State are to be noticed
        return None
    if not fitting.have_avals(source.values, graphdef.avals):
        return None
    return all_unshared(source.values), {}


# --- state, update --------------------------------------------------------------------------------------------------


@overload
def state(node: Any, /) -> State: ...
@overload
def state(node: Any, filter: Filter, /) -> State: ...
@overload
def state(node: Any, a: Filter, b: Filter, /) -> tuple[State, State]: ...
@overload
def state(node: Any, /, *filters: Filter) -> tuple[State, ...]: ...
@boundary
def state(node: Any, *filters: Filter) -> Any:
    """Return the State of a node; with filters, a State for each.

    Args:
      node: a Module, or a pytree of Modules and arrays.
      *filters: groups of leaves, by type, tag or path. A leaf belongs to the first that fits, or to none.

    Returns:
      A State of new Variables with the present values; a tuple of States for several filters.

    >>> import nnxlib as nnx
    >>> list(nnx.state(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.BatchStat))
    ['mean', 'var']
    """
    return one_or_all(_states(*_to_be_read(node), filters, exhaustive=False))


@boundary
def variables(node: Any, *filters: Filter) -> Any:
    """Return the State of a node, or one for each filter, as :func:`state` does, but with the node's own Variables.

    Writes to these Variables are seen in the node, and the other way around.

    >>> import nnxlib as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.variables(model)['bias'] is model.bias
    True
    """
    return one_or_all(live_states(node, filters, exhaustive=False))


@boundary
def graphdef(node: A, /) -> GraphDef[A]:
    """Return the structure of a node, as :func:`split` does.

    >>> import nnxlib as nnx
    >>> nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0))) == nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
    True
    """
    return split(node)[0]


@boundary
def update(node: Any, state: Any, /, *states: Any, strict: bool = True) -> None:
    """Write the leaves of States into a live node, by path.

    A Variable that the node does not have is refused, unless it is an :class:`Intermediate`, which a call has recorded
    in a copy of the node (by :meth:`Module.sow`, say): that is attached.

    Args:
      node: a Module, or a pytree of Modules.
      state: a State, FlatState or nested dict, of all or some of the leaves. Int keys may be strings. A leaf is a
        Variable, whose metadata is taken too, a bare value, or ``{'value': array}``, as in checkpoints. Its path may
        be any that leads to it. All Variables of a type together may have more axes than the node's, or fewer: from a
        stack of models, or one model of it.
      *states: more of these.
      strict: with False, leaves that do not fit are skipped instead of refused.

    >>> import nnxlib as nnx
    >>> model, other = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    >>> nnx.update(model, nnx.state(other, nnx.Param))
    >>> bool((model.kernel == other.kernel).all())
    True

    Raises:
      StateMismatchError: for paths that the node does not have, and leaves of another type, shape or kind of dtype;
        nothing has been written then.
      TraceContextError: under another trace than the one that made the node; nothing has been written then.
    """
    write_states(node, (state, *states), strict, Intermediate)


def write_states(node: Any, states: tuple[Any, ...], strict: bool, attached: type[Variable]) -> None:
    """What :func:`update` does; Variables of type ``attached`` that the node does not have are attached."""
    layout, leaves, objects = packed = _packed(node)
    values, metadata, new = fitting.values_to_write(packed, states, strict, attached)
    for i, name, _ in new:
        check_writable(objects[i], f"attach {name!r}")
    # Most leaves are committed. Those of a pytree around the objects are set in the container that holds them, and
    # those that are kept in a jax.Ref are written there, which is possible under any trace.
    own = range(len(leaves) - count_leaves(layout.root), len(leaves))
    items = [(*_settable(node, layout.leaf_paths[k]), values.pop(k)) for k in own if k in values]
    in_refs = {k: values.pop(k) for k in layout.in_refs & values.keys() - metadata.keys()}

    def write() -> None:
        _write(packed, values, metadata)
        for k, value in in_refs.items():
            objects[layout.variables[k]].set_raw_value(value)
        for holder, key, value in items:
            holder[key] = value
        for i, name, variable in new:
            set_child(objects[i], name, variable)

    try:
        even_if_interrupted(write)
    except TraceContextError as error:
        error.add_note(_MERGE)
        raise


_MERGE = """\
If the values are arguments of this function, as under jax.grad, make a model of them in it: \
nnx.merge(graphdef, params, rest), where graphdef, params, rest = nnx.split(model, nnx.Param, ...) comes before it."""


def _settable(tree: Any, path: Path) -> tuple[Any, Any]:
    """The container that holds a leaf of a pytree, and its key there.

    Raises:
      ValueError: if its items cannot be set.
    """
    if not path:
        raise UsageError(f"nnx.update writes into a Module, or a list or dict of these, but got {describe(tree)}.")
    holder = holder_of(tree, path)
    if not isinstance(holder, MutableMapping | list):
        raise UsageError(
            f"Cannot set {format_path(path)}: it is no item of a list or dict, whose items can be set. Keep what "
            "changes in a Variable, an attribute, a list or a dict."
        )
    return holder, path[-1]


def _write(packed: Packed, new: dict[int, Any], metadata: dict[int, Any]) -> None:
    """Write values and metadata, by position, to the live objects, as a commit."""
    layout, leaves, objects = packed
    n, variables = len(layout.variables), layout.variables
    rows: dict[int, Row] = {
        variables[k]: VariableRow(type(objects[variables[k]]), found.const()) for k, found in metadata.items()
    }
    rows |= touched_rows(layout.rows, {layout.owners[k] for k in new if k >= n})
    delta = Delta((), tuple(sorted(rows.items())), Const.of(None))
    in_rows = [layout.owner_positions[owner] for owner in delta.owners(layout.rows)]
    plain = [k for k in new if k < n and k not in metadata]
    delta = delta._replace(values=tuple([variables[k] for k in plain]))
    values = fitting.raw_values([new.get(k, leaves[k]) for k in in_rows])
    values = fitting.as_held(values, [aval_of(leaves[k]) if k >= n else None for k in in_rows])
    commit(layout, delta, [new[k] for k in plain] + values, objects)
    for k, value in zip(in_rows, values, strict=True):
        if k >= n and not is_data_leaf(value):  # such as an array with named axes, which the row does not describe
            objects[layout.owners[k][0]]._nnx_changed()


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
        made, copies = build(layout, leaves, {i: objects[i] for i in layout.variables})
        note_copies(objects, copies)
        return made
    try:
        return build_described(layout, jax.tree.map(_copy_array, leaves) if arrays else leaves)
    except (RuntimeError, ValueError) as error:
        note_buffers(error, lambda: Packed(layout, leaves, objects))
        raise


def _copy_array(x: Any) -> Any:
    """An array with a buffer of its own; what else Variables hold is not copied."""
    if isinstance(x, jax.Ref):
        return jax.new_ref(x[...])
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        return copied(x)
    return x.copy() if isinstance(x, np.ndarray) else x


# --- mapping --------------------------------------------------------------------------------------------------------


@boundary
def map(f: Callable[[Path, Any], Any], node: A, /, *, recreate_variables: bool = True) -> A:
    """Return a copy of a node with ``f(path, leaf)`` in place of each leaf; leaves are Variables and arrays.

    For a Variable ``f`` returns a new Variable, or the value of one; without ``recreate_variables``, what it returns
    takes the place of the Variable, whatever it is. ``f`` gets the Variables of ``node`` itself, so a write to one of
    them is not undone. If ``f`` returns that very Variable, the copy has a new one.

    >>> import nnxlib as nnx
    >>> nnx.map(lambda path, v: v * 2, nnx.Dict(a=nnx.Param(1.0))).a
    Param(2.0)
    """
    packed = _packed(node)
    result = _result if recreate_variables else lambda leaf, new: new
    new = [result(leaf, f(path, leaf)) for path, leaf in by_path(packed)]
    return build(packed.layout, new, dict(zip(packed.layout.variables, new, strict=False)))[0]


def _result(leaf: Any, new: Any) -> Any:
    """What takes the place of a leaf for which ``f`` has returned ``new``."""
    if isinstance(leaf, Variable):
        return leaf.copy() if new is leaf else new if isinstance(new, Variable) else leaf.replace(new)
    return new


@boundary
def pure(tree: Any) -> Any:
    """Return a pytree with each Variable replaced by its value.

    >>> import nnxlib as nnx
    >>> nnx.pure(nnx.State({'a': nnx.Param(1.0)}))
    State({'a': 1.0})
    """
    return jax.tree.map(plain_value, tree, is_leaf=lambda x: isinstance(x, Variable))


as_pure = pure


# --- flat and packaged forms ----------------------------------------------------------------------------------------


@boundary
def flatten(node: A, /, *, with_paths: bool = True) -> tuple[GraphDef[A], Any]:
    """Split into a GraphDef and a FlatState (with ``with_paths=False``, the list of the values in its leaves).

    >>> import nnxlib as nnx
    >>> graphdef, flat = nnx.flatten(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> flat.paths
    (('bias',), ('kernel',))
    """
    layout, leaves, _ = _packed(node)
    flat = FlatState(zip(layout.leaf_paths, copies_of(layout, leaves), strict=True), sort=True)
    return graphdef_of(layout, leaves), flat if with_paths else [stored_value(leaf) for leaf in flat.leaves]


@boundary
def unflatten(graphdef: GraphDef[A], state: Any, /) -> A:
    """Merge a GraphDef with a State, a FlatState, or the list of values that :func:`flatten` returned.

    >>> import nnxlib as nnx
    >>> graphdef, values = nnx.flatten(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), with_paths=False)
    >>> nnx.unflatten(graphdef, values).kernel.shape
    (2, 3)
    """
    return merge(graphdef, flat_state_of(graphdef.layout, state) if isinstance(state, list) else state)


@boundary
def unpack(node: Any, *filters: Filter) -> Any:
    """Return a :class:`GraphState`, or one for each filter; ``nnx.merge`` takes these without a GraphDef.

    >>> import nnxlib as nnx
    >>> packed = nnx.unpack(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> nnx.merge(packed).kernel.shape
    (2, 3)
    """
    graphdef, *states = split(node, *filters)
    return one_or_all([GraphState(graphdef, state) for state in states])


class CallProxy:
    """Leads to a method by attributes and items; calling it returns ``(output, (graphdef, state))``."""

    __slots__ = ("_find", "_make")
    _split: Callable = staticmethod(split)

    def __init__(self, make: Callable[[], Any], find: Callable[[Any], Any] = lambda node: node):
        self._make, self._find = make, find  # makes the object; finds the method in it

    def __getattr__(self, name: str) -> CallProxy:
        return type(self)(self._make, lambda node: getattr(self._find(node), name))

    def __getitem__(self, key: Any) -> CallProxy:
        return type(self)(self._make, lambda node: self._find(node)[key])

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, tuple[GraphDef, Any]]:
        node = self._make()
        out = self._find(node)(*args, **kwargs)
        graphdef, state = self._split(node)
        return out, (graphdef, state)


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
