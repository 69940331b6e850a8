"""Prefixes: how a transform is told what to do with each leaf of its arguments and of its output.

A *prefix* is a pytree prefix of the arguments, as in JAX. At its leaves are *entries*. An entry is a *label* (an axis,
a sharding, "differentiate") for all leaves below; or, for a Module, a :class:`PrefixMapping`, which gives each leaf of
the Module a label by filter. Filters see paths from where the mapping stands: what leads to it is in the prefix, too.
The leaves with one label form a *lane*: they cross the JAX transformation together, in one list.

Which label each leaf gets is found in labels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.tree_util as jtu

from ..core.data import is_node
from ..core.errors import ArgumentError, PrefixError, counted, describe_nested, format_path
from ..core.filters import Filter, FilterObject, PathIn, filters_to_predicates, shown
from ..core.graph import by_path, pack
from ..core.state import State, from_flat_state, map_state, to_flat_state
from ..core.tracing import boundary
from ..core.traversals import path_key
from ..core.variables import Variable, plain_value

Label = Hashable

# --- entries for Modules ----------------------------------------------------------------------------------------------


class PrefixMapping(Mapping):
    """Labels by filter: the first filter that takes a leaf gives its label. Paths begin where the mapping stands.

    Args:
      mapping: filters to labels, as a mapping or as pairs; or a State with a label at each path, such as that of
        :func:`nnxlib.get_named_sharding`.

    Raises:
      ArgumentError: if it is neither a mapping nor pairs.
      FilterOrderError: if ``...`` or ``True`` comes before a filter that would then never be asked.
      PrefixError: when used, if no filter takes a leaf; names its path.
    """

    def __init__(self, mapping: Mapping[Filter, Label] | Sequence[tuple[Filter, Label]] | State, /):
        if isinstance(mapping, State):
            mapping = [(PathIn(path), plain_value(label)) for path, label in to_flat_state(mapping)]
        items = mapping.items() if isinstance(mapping, Mapping) else mapping
        try:
            self._items = tuple([(key, label) for key, label in items])
        except (TypeError, ValueError):
            name = type(self).__name__
            raise ArgumentError(
                f"{name} takes a dict of filters and labels, such as {name}({{nnx.Param: 0, ...: None}}), or pairs of "
                f"these, but got {describe_nested(mapping)}."
            ) from None
        predicates = filters_to_predicates([key for key, _ in self._items])
        self._predicates = tuple([(p, label) for p, (_, label) in zip(predicates, self._items, strict=True)])
        self._key: Hashable = self._predicates  # what two mappings of one type are compared by

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
        """The mapping with ``function(label)`` in place of each label."""
        return type(self)([(key, function(label)) for key, label in self._items])

    def __getitem__(self, key: Filter) -> Label:
        return dict(self._items)[key]  # type: ignore[index]

    def __iter__(self) -> Iterator[Filter]:
        return iter(self.filters)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key == other._key  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self._key))

    def __repr__(self) -> str:
        entries = ", ".join(f"{shown(key)}: {label!r}" for key, label in self._items)
        return f"{type(self).__name__}({{{entries}}})"


class StateAxes(PrefixMapping):
    """Axes by filter, for ``in_axes`` and ``out_axes`` of ``vmap`` and ``scan``: an int, None, or ``nnx.Carry``.

    >>> import nnxlib as nnx
    >>> nnx.StateAxes({nnx.Param: 0, ...: None}).axes
    (0, None)
    """

    @property
    def axes(self) -> tuple[Label, ...]:
        return self.labels


class StateSharding(PrefixMapping):
    """Shardings by filter, for ``in_shardings`` and ``out_shardings`` of :func:`nnxlib.jit`.

    >>> import nnxlib as nnx, jax
    >>> nnx.StateSharding({nnx.Param: jax.P('data'), ...: None}).shardings[1] is None
    True
    """

    @property
    def shardings(self) -> tuple[Label, ...]:
        return self.labels


class TreeState(PrefixMapping):
    """What :func:`prefix` returns for a Module: the label of a leaf is given by a function of its path and value.

    ``state`` is a State with the label of each leaf; its keys are also attributes. ``start`` leads to the Module in the
    pytree that the prefix was made for: the function sees paths in that pytree.
    """

    def __init__(
        self,
        function: Callable[[tuple, Any], Label],
        state: State,
        start: tuple,
        filters: Iterable[Filter],
        asked: Hashable,
    ):
        super().__init__([(x, None) for x in filters])  # what the function asks; itself, if it may look at values
        self._function, self.state, self._start = function, state, start
        self._key = asked, start  # two methods of equal mappings are not equal, but the mappings are

    @property
    def labels(self) -> tuple[Label, ...]:
        return tuple(dict.fromkeys(label for _, label in to_flat_state(self.state)))

    def __getattr__(self, name: str) -> Any:
        if name == "state":  # of a TreeState that is being copied, and has no attributes yet
            raise AttributeError(name)
        return getattr(self.state, name)

    def __repr__(self) -> str:
        return f"TreeState({self.state!r})"

    def map_prefix(self, path: tuple, leaf: Any) -> Label:
        return self._function((*self._start, *path), leaf)

    def relabelled(self, function: Callable[[Label], Label]) -> PrefixMapping:
        state = map_state(lambda path, label: function(label), self.state)
        asked = lambda path, leaf: function(self._function(path, leaf))
        return TreeState(asked, state, self._start, self.filters, asked)


class _Below(PrefixMapping):
    """A mapping that stands ``depth`` keys down in a prefix, and sees paths only from there on."""

    def __init__(self, mapping: PrefixMapping, depth: int):
        super().__init__({})
        self._mapping, self._depth = self._key = mapping, depth

    @property
    def labels(self) -> tuple[Label, ...]:
        return self._mapping.labels

    def map_prefix(self, path: tuple, leaf: Any) -> Label:
        return self._mapping.map_prefix(path[self._depth :], leaf)

    def relabelled(self, function: Callable[[Label], Label]) -> PrefixMapping:
        return _Below(self._mapping.relabelled(function), self._depth)

    def __repr__(self) -> str:
        return repr(self._mapping)


@boundary
def prefix(node: Any, filter_map: Mapping[Filter, Label] | Callable[[tuple, Any], Label], /) -> Any:
    """Return a prefix for ``node``, such as its ``in_axes``: a label for each of its leaves.

    Args:
      node: a Module, or a pytree with Modules.
      filter_map: a mapping from filters to labels, of which the first that fits counts; or a function of the path of a
        leaf, from ``node`` down, and the leaf.

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
    asked: Any = filter_map
    if isinstance(asked, Mapping) and not isinstance(asked, PrefixMapping):
        asked = PrefixMapping(asked)
    is_mapping = isinstance(asked, PrefixMapping)
    resolve, filters = (asked.map_prefix, asked) if is_mapping else (asked, (asked,))

    def label(keys: tuple, x: Any) -> Any:
        start = tuple([path_key(key) for key in keys])
        found = {path: resolve((*start, *path), value) for path, value in by_path(pack(x))}
        if [*found] == [()]:
            return found[()]
        return TreeState(resolve, from_flat_state(found.items()), start, filters, asked)

    return jtu.tree_map_with_path(label, node, is_leaf=is_node)


# --- reading a prefix -------------------------------------------------------------------------------------------------


def broadcast_prefix(prefix: Any, tree: Any, name: str) -> list[Any]:
    """The entry of ``prefix`` for each node and leaf of ``tree``.

    Raises:
      PrefixError: if ``prefix`` is not a prefix of ``tree``; ``name`` is what the user calls it, and begins with "in"
        for that of the arguments.
    """
    entries: list[Any] = []

    def expand(entry: Any, subtree: Any) -> None:
        entries.extend(same_entries(entry, subtree))

    try:
        jtu.tree_map(expand, prefix, tree, is_leaf=_is_none)
    except ValueError as error:
        is_count, several = isinstance(prefix, tuple | list), isinstance(tree, tuple | list)
        if is_count and not (several and len(prefix) == len(tree)):
            problem = f"has {counted(len(prefix), 'entry', 'entries')}, but {_described(name, tree, several)}. "
        else:
            misfit = _first_misfit(prefix, tree)
            why = str(error).removesuffix(".") if misfit is None else _at(name, *misfit)
            problem = f"does not fit the values it describes: {why}. "
        raise PrefixError(f"{name}={prefix!r} {problem}{_LIKE_THE_VALUES}") from None
    return entries


def _first_misfit(prefix: Any, tree: Any, path: tuple = ()) -> tuple[tuple, Any, Any] | None:
    """The first place where a prefix differs from the values: path, entry and value. (JAX would name an entry None.)"""
    (entries, kind), (values, other) = (
        jtu.tree_flatten_with_path(x, lambda y, x=x: y is not x) for x in (prefix, tree)
    )
    if prefix is None or jtu.treedef_is_leaf(kind):
        return None
    if kind != other:
        return path, prefix, tree
    below = ((*path, *map(path_key, keys)) for keys, _ in entries)
    found = (_first_misfit(x, y, at) for (_, x), (_, y), at in zip(entries, values, below, strict=True))
    return next((x for x in found if x is not None), None)


def _at(name: str, path: tuple, entry: Any, value: Any) -> str:
    said = f"{format_path(path, name)} is {entry!r}, but the value there is {describe_nested(value)}"
    is_own = type(entry) is type(value) and not isinstance(entry, tuple | list | dict)
    return f"{said} with other static parts, which its class gives to JAX beside the children" if is_own else said


def argument_entries(prefix: Any, args: tuple, name: str) -> list[Any]:
    """:func:`broadcast_prefix` for positional arguments; as in JAX, the prefix may be a list in place of a tuple."""
    return broadcast_prefix(_placed(tuple(prefix) if isinstance(prefix, list) else prefix, left_out=1), args, name)


def call_entries(
    prefix: Any, arguments: Any, bound: int, name: str, others: Any, by_name: Mapping[str, Any] = MappingProxyType({})
) -> list[Any]:
    """The entry of each node and leaf of the ``Arguments`` of a call, of which the prefix does not describe all.

    The first ``bound`` ones, and keyword arguments that are not in ``by_name``, have the entry ``others``. What is in a
    Carrier (recordings.py) has an axis.
    """
    args, kwargs, captured = arguments
    entries = same_entries(others, args[:bound]) + argument_entries(prefix, args[bound:], name)
    for key in sorted(kwargs):
        entries += same_entries(by_name.get(key, others), kwargs[key])
    return entries + same_entries(0, captured)


def output_entries(prefix: Any, out: Any, name: str) -> list[Any]:
    """:func:`broadcast_prefix` for what a function returns."""
    return broadcast_prefix(_placed(prefix, left_out=0), out, name)


def _placed(prefix: Any, left_out: int) -> Any:
    """The prefix with mappings that know where they stand, given paths that lack their first ``left_out`` keys."""

    def at(keys: tuple, entry: Any) -> Any:
        depth = len(keys) - left_out
        return _Below(entry, depth) if depth > 0 and isinstance(entry, PrefixMapping) else entry

    return jtu.tree_map_with_path(at, prefix, is_leaf=_is_none)


_LIKE_THE_VALUES = "Give one label for all, or the same tuples, lists and dicts as the values, down to some level."


def _described(name: str, tree: Any, several: bool) -> str:
    if name.startswith("in"):
        called = f"the function was called with {counted(len(tree), 'positional argument')}"
        return f"{called} that {'is' if len(tree) == 1 else 'are'} not static" if name == "in_shardings" else called
    return f"there are {len(tree)} values" if several else f"there is one value, {describe_nested(tree)}"


def same_entries(entry: Any, tree: Any) -> list[Any]:
    """``entry`` for each node and leaf of ``tree``."""
    return [entry] * jtu.tree_structure(tree, is_leaf=is_node).num_leaves


def labels_in(prefix: Any) -> list[Label]:
    """Every label that a prefix may give to a leaf."""
    found = jtu.tree_leaves(prefix, is_leaf=_is_none)
    return [label for x in found for label in (x.labels if isinstance(x, PrefixMapping) else (x,))]


def _is_none(x: Any) -> bool:
    """Whether this is None, which is a leaf of a prefix, though not for JAX."""
    return x is None


def check_axes(axes: Any, name: str, what: str, *others: Label) -> None:
    """Check that each label of a prefix is an axis, None, or one of ``others``.

    Raises:
      PrefixError: naming the label that is none of these.
    """
    takes = ", ".join(["an int", "None", *map(repr, others)])
    is_axis = lambda x: isinstance(x, int) or any(x is label for label in others)
    check_labels(axes, name, is_axis, f"{what} takes {takes} or nnx.StateAxes of these")


def check_labels(prefix: Any, name: str, is_label: Callable[[Label], bool], takes: str) -> None:
    """Check that each label of a prefix is None or one for which ``is_label`` is true; ``takes`` says which these are.

    Raises:
      PrefixError: naming the label that is not.
    """
    refuse_nodes(prefix, name)
    for label in labels_in(prefix):
        if label is not None and not is_label(label):
            raise PrefixError(f"{name}={prefix!r} has {label!r}; {takes}.")


def prefix_key(prefix: Any) -> tuple:
    """A prefix in a form that can be compared and hashed."""
    leaves, structure = jtu.tree_flatten(prefix)
    return tuple(leaves), structure


def refuse_nodes(prefix: Any, name: str) -> None:
    """Check that there is no Module, Variable or dict of filters in a prefix, which the user calls ``name``.

    Raises:
      PrefixError: if there is one.
    """
    mapping = "StateSharding" if name.endswith(("shardings", "specs")) else "StateAxes"
    for x in jtu.tree_leaves(prefix, is_leaf=lambda x: is_node(x) or _has_filters(x)):
        if _has_filters(x):
            entries = ", ".join(f"{shown(key)}: {label!r}" for key, label in x.items())
            raise PrefixError(f"{name} has a dict of filters in it. Write nnx.{mapping}({{{entries}}}).")
        if is_node(x):
            kind = "Variables" if isinstance(x, Variable) else "Graph nodes"
            raise PrefixError(
                f"{name} has a {type(x).__name__} in it. {kind} are not allowed as prefixes: give one label for all of "
                f"an object, one for each filter (nnx.{mapping}({{...: label}}), nnx.prefix), or a State with a label "
                f"at each path: nnx.{mapping}(state)."
            )


def _has_filters(x: Any) -> bool:
    """Whether this is a dict with filters for keys; JAX could not sort several of them."""
    return type(x) is dict and any(key is ... or isinstance(key, type | FilterObject) for key in x)
