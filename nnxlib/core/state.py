"""State: the leaves of a model, as a nested mapping or as a flat sequence.

A :class:`State` maps ``str`` and ``int`` keys to levels, which are further mappings, and to leaves: Variables, or
whatever a function has put in their place. Making a State from a mapping, or assigning a mapping to a key, copies the
levels, not the leaves. Inside, the levels are plain nested dicts, so JAX flattens all but the first in C++. Indexing
gives a State that is a view of a level, so writes go through. A State that was split off a model makes its levels, and
the Variables in them, when it is first looked into.

A :class:`FlatState` is a sequence of the pairs ``(path, leaf)``, sorted by path. Functions that select or combine
leaves loop over such pairs, so Python's recursion limit does not limit the depth of a State. Empty levels have no pair:
they survive ``jax.tree.map``, copies and pickling, but nothing else.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, MutableMapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any, TypeVar, overload

import jax
import numpy as np

from . import errors
from .differences import leaf_differences, refuse
from .errors import Path, describe_nested, did_you_mean, format_path, listed
from .filters import Filter, PathIn, filters_to_predicates, group_by_filters
from .generics import K, V
from .registration import register_pytree
from .reprs import LARGE, Group, Leaf, entry_text, expand_object, is_large, levels_text, read, write
from .stamps import States
from .traversals import (
    empty_node,
    flatten_mapping,
    flattened,
    insert,
    nested,
    sortable,
    sorted_by_path,
    sorted_keys,
    with_ints,
)
from .variables import Variable, plain_value

S = TypeVar("S", bound="State")

_NOT_A_STATE = "Expected a State or another nested mapping, got {type}. Of a model: nnx.state(model)."
_NOT_LEVELS = "A State is made of a mapping, or of (key, value) pairs, but got {given}. Of a model: nnx.state(model)."

Pairs = Iterable[tuple[Path, Any]]
Flat = Mapping[Path, Any] | Pairs


class State(MutableMapping[K, V]):
    """A nested mapping with attribute access, and a JAX pytree.

    >>> import nnxlib as nnx
    >>> state = nnx.State({'layers': {0: {'kernel': nnx.Param(1.0)}}, 'step': 3})
    >>> state.layers[0].kernel is state['layers'][0]['kernel']
    True
    >>> state.layers[0].bias = nnx.Param(0.0)
    >>> state.filter(nnx.Param).flat_state().paths
    (('layers', 0, 'bias'), ('layers', 0, 'kernel'))

    A key that is also the name of a method, such as ``'split'``, is reached by ``state['split']`` only.
    """

    __slots__ = ("__weakref__", "_mapping", "_source")
    _mapping: dict[K, Any]
    _source: Any  # takes the place of the mapping until the State is first looked into: its ``nest`` makes the mapping

    def __init__(self, mapping: Mapping[K, Any] | Iterable[tuple[K, Any]], /, *, _copy: bool = True):
        del _copy  # a keyword of flax.nnx that published code passes; the levels are copied either way
        try:
            levels = mapping if isinstance(mapping, Mapping) else dict(mapping)
        except (TypeError, ValueError):
            raise errors.ArgumentError(_NOT_LEVELS.format(given=describe_nested(mapping))) from None
        _set_mapping(self, _copy_levels(levels))

    @classmethod
    def _view(cls: type[S], mapping: dict) -> S:
        """Wrap levels as they are, without a copy."""
        self = object.__new__(cls)
        _set_mapping(self, mapping)
        return self

    @classmethod
    def _later(cls: type[S], source: Any) -> S:
        """Make a State whose levels are made when they are first asked for."""
        self = object.__new__(cls)
        _set_source(self, source)
        return self

    def _make_levels(self) -> dict[K, Any]:
        with _making:
            if self._source is not None:  # else another thread was first
                _set_mapping(self, self._source.nest())
                _set_source(self, None)
        return self._mapping

    @property
    def raw_mapping(self) -> dict[K, Any]:
        """The levels themselves, as nested dicts, for reading only."""
        return self._mapping

    @property
    def __dict__(self) -> Any:  # type: ignore[override]  # vars() accepts any mapping
        """The levels under the name that they have in flax.nnx, since published code walks through ``vars(state)``."""
        return MappingProxyType({"_mapping": self._mapping})

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _register(cls)

    # --- a mapping, by key and by attribute ---

    def __getitem__(self, key: K) -> Any:
        try:
            value = self._mapping[key]
        except KeyError as error:
            error.add_note(f"{self._no_key(key)}.{did_you_mean([key], self._mapping)}")
            raise
        return self._view(value) if type(value) is dict else value

    def __setitem__(self, key: K, value: Any) -> None:
        insert(self._mapping, key, _copy_levels(value) if isinstance(value, Mapping) else value)
        States.wrote(self._mapping)

    def __delitem__(self, key: K) -> None:
        del self._mapping[key]
        States.wrote(self._mapping)

    def __contains__(self, key: object) -> bool:
        return key in self._mapping

    def get(self, key: K, default: Any = None) -> Any:
        """What is at a key, or the default if there is nothing."""
        return self[key] if key in self._mapping else default  # not by an error, whose hint takes 20 us

    def __iter__(self) -> Iterator[K]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __getattr__(self, name: str) -> Any:
        if name == "_mapping":
            return self._make_levels()
        if name in State.__slots__ or name not in self._mapping:
            raise self._no_attribute(name)
        return self[name]  # type: ignore[index]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):  # typing and other libraries mark objects with such attributes
            raise AttributeError(f"State takes no attribute {name!r}; to set a key write state[{name!r}] = ...")
        self[name] = value  # type: ignore[index]

    def __delattr__(self, name: str) -> None:
        if name not in self._mapping:
            raise self._no_attribute(name)
        del self[name]  # type: ignore[arg-type]

    def _no_attribute(self, name: str) -> AttributeError:
        said = self._no_key(name) if name not in State.__slots__ else f"State has no key {name!r}"
        return AttributeError(said, name=name, obj=self)

    def _no_key(self, key: Any) -> str:
        keys = ", ".join(map(repr, itertools.islice(self._mapping, 8)))
        path = "; a path is looked up in state.flat_state()" if isinstance(key, tuple) else ""
        return f"State has no key {key!r}; its keys begin with: {keys or 'none'}{path}"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(key for key in self._mapping if isinstance(key, str))]

    # --- by path and by filter ---

    def flat_state(self) -> FlatState[V]:
        """Return the leaves as a :class:`FlatState`."""
        return to_flat_state(self)

    @classmethod
    def from_flat_path(cls: type[S], flat_state: Flat, /) -> S:
        """Make a State from a mapping, or pairs, of path and leaf."""
        return from_flat_state(flat_state, cls=cls)

    def split(self, first: Filter, /, *filters: Filter) -> Any:
        """See :func:`split_state`."""
        return split_state(self, first, *filters)

    def filter(self, first: Filter, /, *filters: Filter) -> Any:
        """See :func:`filter_state`."""
        return filter_state(self, first, *filters)

    @classmethod
    def merge(cls: type[S], state: Mapping[K, V], /, *states: Mapping[K, V]) -> S:
        """See :func:`merge_state`."""
        return merge_state(state, *states, cls=cls)

    def map(self, f: Callable[[tuple, V], Any]) -> State[K, Any]:
        """See :func:`map_state`."""
        return map_state(f, self)

    def to_pure_dict(self, extract_fn: Callable[[Any], Any] | None = None) -> dict[Any, Any]:
        """See :func:`to_pure_dict`."""
        return to_pure_dict(self, extract_fn)

    def replace_by_pure_dict(
        self, pure_dict: Mapping[Any, Any], replace_fn: Callable[[Any, Any], Any] | None = None
    ) -> None:
        """See :func:`replace_by_pure_dict`."""
        replace_by_pure_dict(self, pure_dict, replace_fn)

    def __or__(self, other: Mapping[K, V]) -> State[K, V]:
        return merge_state(self, other) if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Mapping[K, V]) -> State[K, V]:
        return merge_state(other, self) if isinstance(other, Mapping) else NotImplemented

    def __sub__(self, other: Mapping[K, V]) -> State[K, V]:
        return diff(self, other) if isinstance(other, Mapping) else NotImplemented

    # --- comparing, copying, looking ---

    def __eq__(self, other: object) -> bool:
        """Same paths, same types and metadata of Variables, same values; ``other`` may be any nested mapping."""
        if not isinstance(other, Mapping):
            return NotImplemented
        levels = [(_as_level(self), _as_level(other))]
        for mine, others in levels:  # more are appended
            if mine.keys() != others.keys():
                return False
            for key, a in mine.items():
                b = others[key]
                if _is_level(a) and _is_level(b):
                    levels.append((_as_level(a), _as_level(b)))
                elif not _same(a, b):
                    return False
        return True

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self: S) -> S:
        return self._view(_copy_levels(self))

    def __reduce__(self) -> tuple:
        return type(self).from_flat_path, (flatten_mapping(self._mapping, keep_empty_nodes=True),)

    def __repr__(self) -> str:
        if is_large(self._mapping):
            return write(self, _expand_level)
        return f"{type(self).__name__}({levels_text(self._mapping)})"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from .treescope_repr import render_level  # only when first displayed: importing Treescope takes long

        return render_level(self._mapping, read(self, _expand_level), path, subtree_renderer)


_set_mapping = State._mapping.__set__  # type: ignore[attr-defined]
_set_source = State._source.__set__
_making = threading.RLock()  # held while the levels of a State are made, which several threads may look into


class _Pair(tuple[Path, Any]):
    """A path and its leaf, as iterating a FlatState gives them.

    They have no hash: code that makes a set of a FlatState expects it to hold the paths, and would find none of them.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        raise errors.ArgumentError(
            "Iterating a FlatState gives pairs of a path and a leaf, which have no hash: for its paths write "
            "set(flat.paths), for a dict with them as keys dict(flat)."
        )


class FlatState(Sequence[tuple[Path, V]]):
    """The leaves of a State as a sequence of ``(path, leaf)``, and a JAX pytree; a leaf can be looked up, and
    replaced, by its path.

    Args:
      items: pairs, or a mapping, of path and leaf.
      sort: whether to sort by path; False if the items are sorted already.

    >>> import nnxlib as nnx
    >>> nnx.FlatState([(('b', 'x'), 1), (('a',), 2)], sort=True)
    FlatState([
      (('a',), 2),
      (('b', 'x'), 1),
    ])
    >>> flat = nnx.FlatState({('a',): 2, ('b', 'x'): 1})
    >>> flat[0], flat['b', 'x'], ('a',) in flat, list(flat.keys())
    ((('a',), 2), 1, True, [('a',), ('b', 'x')])
    """

    __slots__ = ("__weakref__", "_keys", "_positions", "_values")
    _keys: tuple[Path, ...]  # code for flax.nnx reads these two
    _values: list[V]
    _positions: dict[Path, int] | None  # the position of each path; made when first asked for

    def __init__(self, items: Flat, /, *, sort: bool = True):
        pairs = list(_as_pairs(items))
        if sort:
            pairs = sorted_by_path(pairs, operator.itemgetter(0))
        self._keys, self._values = tuple([path for path, _ in pairs]), [leaf for _, leaf in pairs]
        self._positions = None

    @classmethod
    def from_sorted_keys_values(cls, keys: tuple[Path, ...], values: Iterable[V], /) -> FlatState[V]:
        """Make a FlatState of paths that are sorted already, and a leaf for each."""
        self = object.__new__(cls)
        self._keys, self._values, self._positions = tuple(keys), list(values), None
        if len(self._keys) != len(self._values):
            raise errors.UsageError(f"A FlatState of {len(self._keys)} paths was given {len(self._values)} leaves.")
        return self

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths, in order."""
        return self._keys

    @property
    def leaves(self) -> list[V]:
        """The leaves, in the order of their paths."""
        return self._values

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return FlatState.from_sorted_keys_values(self._keys[index], self._values[index])
        if isinstance(index, tuple):
            return self._values[self._by_path()[index]]
        return self._keys[index], self._values[index]

    def __setitem__(self, path: Path, leaf: V) -> None:
        self._values[self._by_path()[path]] = leaf

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[tuple[Path, V]]:
        return map(_Pair, zip(self._keys, self._values))

    def __contains__(self, item: object) -> bool:
        match item:
            case (tuple(path), leaf):
                return path in self._keys and _same(self[path], leaf)
        return item in self._keys

    def _by_path(self) -> dict[Path, int]:
        if self._positions is None:
            self._positions = {path: k for k, path in enumerate(self._keys)}
        return self._positions

    def keys(self) -> KeysView[Path]:
        """The paths, as from a dict."""
        return self._by_path().keys()

    def values(self) -> list[V]:
        """The leaves, in the order of their paths."""
        return list(self._values)

    def items(self) -> Iterator[tuple[Path, V]]:
        """The pairs of path and leaf."""
        return iter(self)

    def get(self, path: Path, default: Any = None) -> Any:
        """The leaf at a path; ``default`` where there is none."""
        return self[path] if path in self._by_path() else default

    def to_nested_state(self) -> State[Any, V]:
        """Return the same leaves as a :class:`State`."""
        return from_flat_state(self)

    def split(self, first: Filter, /, *filters: Filter) -> Any:
        """See :func:`split_state`."""
        return one_or_all(map(_flat, grouped(self, (first, *filters), exhaustive=True)))

    def filter(self, first: Filter, /, *filters: Filter) -> Any:
        """See :func:`filter_state`."""
        return one_or_all(map(_flat, grouped(self, (first, *filters), exhaustive=False)))

    @classmethod
    def merge(cls, flat_state: Flat, /, *flat_states: Flat) -> FlatState:
        """Return the leaves of all, sorted by path; if several have a leaf at a path, that of the last."""
        return cls(dict(itertools.chain.from_iterable(map(_as_pairs, (flat_state, *flat_states)))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlatState):
            return NotImplemented
        return self._keys == other._keys and all(map(_same, self._values, other._values))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lines = [f"{entry_text(f'  ({path!r}, ', repr(leaf))})," for path, leaf in itertools.islice(self, LARGE)]
        more = [f"  ... and {len(self) - LARGE} more"] if len(self) > LARGE else []
        return "\n".join(["FlatState([", *lines, *more, "])"]) if lines else "FlatState([])"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from treescope import repr_lib

        return repr_lib.render_list_wrapper(
            object_type=type(self),
            wrapped_sequence=list(map(tuple, self)),
            path=path,
            subtree_renderer=subtree_renderer,
        )


# --- nested and flat ----------------------------------------------------------------------------------------------


def to_flat_state(state: Mapping[Any, Any]) -> FlatState[Any]:
    """Return the leaves of a State (or of any nested mapping) with their paths, sorted by path.

    >>> import nnxlib as nnx
    >>> nnx.to_flat_state(nnx.State({'b': {'x': 1}, 'a': 2})).paths
    (('a',), ('b', 'x'))
    """
    return _flat(_pairs(state))


def from_flat_state(flat_state: Flat, *, cls: type = State) -> Any:
    """Make a State, or another mapping class, from a FlatState, a mapping or pairs of path and leaf.

    >>> import nnxlib as nnx
    >>> nnx.from_flat_state({('a', 0): 1, ('a', 1): 2})
    State({'a': {0: 1, 1: 2}})

    Raises:
      PathError: when a path is empty, is text, or is the beginning of another.
    """
    mapping = nested(_as_pairs(flat_state))
    return cls._view(mapping) if issubclass(cls, State) else cls(mapping)


def state_of_items(items: list[tuple[Path, Any]]) -> Any:
    """A State of pairs of path and leaf; a Variable or array that was split by itself is its own State."""
    if len(items) == 1 and items[0][0] == ():
        return items[0][1]
    return State._view(nested(items))


def to_pure_dict(state: Mapping[Any, Any], extract_fn: Callable[[Any], Any] | None = None) -> dict[Any, Any]:
    """Return nested dicts with ``extract_fn(leaf)`` in place of each leaf.

    The default is the raw value of a Variable, without hooks, so that :func:`replace_by_pure_dict` restores the same.

    >>> import nnxlib as nnx
    >>> nnx.to_pure_dict(nnx.State({'a': {'b': nnx.Param(1.0)}}))
    {'a': {'b': 1.0}}
    """
    extract = extract_fn or plain_value
    return nested((path, extract(leaf)) for path, leaf in _pairs(state))


def replace_by_pure_dict(
    state: MutableMapping[Any, Any], pure_dict: Mapping[Any, Any], replace_fn: Callable[[Any, Any], Any] | None = None
) -> None:
    """Replace leaves of ``state`` by those of ``pure_dict``; its keys may be the string forms of int keys.

    Args:
      state: written in place; a Variable is replaced by a new one of the same type and metadata.
      pure_dict: nested values, for all or some of the leaves. The value of a Variable may be ``{'value': ...}``.
      replace_fn: ``(leaf, value) -> leaf``, to make the new leaf in another way.

    >>> import nnxlib as nnx
    >>> state = nnx.State({'layers': {0: {'scale': nnx.Param(1.0)}}})
    >>> nnx.replace_by_pure_dict(state, {'layers': {'0': {'scale': 2.0}}})
    >>> state.layers[0].scale
    Param(2.0)

    Raises:
      StateMismatchError: for paths that the State does not have; it is left as it was.
    """
    leaves = dict(_pairs(state))
    by_name = {tuple(map(str, path)): path for path in leaves}

    def find(path: Path) -> Path | None:
        written = tuple(map(str, path))
        if path in leaves or written in by_name:
            return path if path in leaves else by_name[written]
        held = by_name.get(written[:-1]) if written[-1:] == ("value",) else None
        return held if isinstance(leaves.get(held or ()), Variable) else None

    def children(path: Path, node: Any) -> Any:
        """The items of a level; None for a leaf, also for a mapping that replaces one held by a leaf."""
        held = plain_value(leaves.get(find(path) or ()))
        is_level = isinstance(node, Mapping) and (is_boxed(node, held) or not isinstance(held, Mapping))
        return node.items() if is_level else None

    found = [(path, find(path), value) for path, value in flattened(pure_dict, children) if value is not empty_node]
    if unknown := {path: value for path, target, value in found if target is None}:
        remedy = listed("Remove or rename these. The State has leaves at:", list(map(format_path, leaves)))
        refuse(leaf_differences({}, unknown), "The dict does not fit the State; nothing was replaced.", remedy)
    replace = replace_fn or _replace_value
    new = [(target, replace(leaves[target], value)) for _, target, value in found if target is not None]
    for path, leaf in new:
        reduce(operator.getitem, path[:-1], state)[path[-1]] = leaf


def restore_int_paths(pure_dict: Mapping[Any, Any]) -> dict[Any, Any]:
    """Turn keys that are ints written as strings, as some file formats store them, back into ints.

    >>> import nnxlib as nnx
    >>> nnx.restore_int_paths({'layers': {'0': 1.0, '10': 2.0}, '01': 3.0})
    {'layers': {0: 1.0, 10: 2.0}, '01': 3.0}
    """
    flat = flatten_mapping(pure_dict, keep_empty_nodes=True)
    return nested((with_ints(path), leaf) for path, leaf in flat.items())


# --- selecting and combining --------------------------------------------------------------------------------------


@overload
def split_state(state: Mapping[Any, Any], first: Filter, /) -> State: ...
@overload
def split_state(state: Mapping[Any, Any], first: Filter, second: Filter, /, *filters: Filter) -> tuple[State, ...]: ...
def split_state(state: Mapping[Any, Any], first: Filter, /, *filters: Filter) -> Any:
    """Split the leaves among the filters; each goes to the first that takes it.

    Returns one State for each filter: by itself if there is one filter, else a tuple.

    >>> import nnxlib as nnx
    >>> state = nnx.State({'scale': nnx.Param(1.0), 'mean': nnx.BatchStat(0.0)})
    >>> params, rest = nnx.split_state(state, nnx.Param, ...)
    >>> list(params), list(rest)
    (['scale'], ['mean'])

    Raises:
      NonExhaustiveFiltersError: if leaves are left over.
    """
    return one_or_all(map(from_flat_state, grouped(_pairs(state), (first, *filters), exhaustive=True)))


@overload
def filter_state(state: Mapping[Any, Any], first: Filter, /) -> State: ...
@overload
def filter_state(state: Mapping[Any, Any], first: Filter, second: Filter, /, *filters: Filter) -> tuple[State, ...]: ...
def filter_state(state: Mapping[Any, Any], first: Filter, /, *filters: Filter) -> Any:
    """Select leaves: like :func:`split_state`, but leaves that no filter takes are left out.

    >>> import nnxlib as nnx
    >>> state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> list(nnx.filter_state(state, nnx.PathContains('bias')))
    ['bias']
    """
    return one_or_all(map(from_flat_state, grouped(_pairs(state), (first, *filters), exhaustive=False)))


def merge_state(state: Mapping[Any, Any], /, *states: Mapping[Any, Any], cls: type = State) -> Any:
    """Return a State with the leaves of all; if several have a leaf at a path, with that of the last.

    >>> import nnxlib as nnx
    >>> nnx.merge_state({'a': {'x': 1, 'y': 2}}, {'a': {'y': 3}, 'b': 4})
    State({'a': {'x': 1, 'y': 3}, 'b': 4})

    Raises:
      PathError: when a leaf of one is at the path of a level of another.
    """
    return from_flat_state(dict(itertools.chain.from_iterable(map(_pairs, (state, *states)))), cls=cls)


def diff(state: Mapping[Any, Any], other: Mapping[Any, Any]) -> State:
    """Return the leaves of ``state`` whose paths ``other`` does not have; written ``state - other``.

    >>> import nnxlib as nnx
    >>> nnx.State({'a': 1, 'b': 2}) - {'b': 3}
    State({'a': 1})
    """
    others = {path for path, _ in _pairs(other)}
    return from_flat_state((path, leaf) for path, leaf in _pairs(state) if path not in others)


def map_state(f: Callable[[tuple, Any], Any], state: Mapping[Any, Any]) -> State:
    """Return a State with ``f(path, leaf)`` in place of each leaf.

    >>> import nnxlib as nnx
    >>> nnx.map_state(lambda path, x: f'{path[-1]}={x}', nnx.State({'a': {'b': 1}}))
    State({'a': {'b': 'b=1'}})
    """
    return from_flat_state((path, f(path, leaf)) for path, leaf in _pairs(state))


def create_path_filters(state: Mapping[Any, Any]) -> dict[PathIn, Any]:
    """Turn a State of hashable values into a mapping from filters to values, one for each distinct value.

    >>> from nnxlib.core.state import State, create_path_filters
    >>> create_path_filters(State({'a': {'x': 0, 'y': None}, 'b': 0}))
    {PathIn(('a', 'x'), ('b',)): 0, PathIn(('a', 'y')): None}
    """
    paths: dict[Any, list[Path]] = {}
    for path, leaf in _pairs(state):
        paths.setdefault(plain_value(leaf), []).append(path)
    return {PathIn(*those): value for value, those in paths.items()}


# --- helpers --------------------------------------------------------------------------------------------------------


def _is_level(node: Any) -> bool:
    # Nearly all are dicts or Variables; to ask whether something is a Mapping takes as long as all the rest.
    return type(node) is dict or (not isinstance(node, Variable) and isinstance(node, Mapping))


def _as_level(mapping: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A mapping itself; of a State its levels, whose items are not views."""
    return mapping._mapping if isinstance(mapping, State) else mapping


def _copy_levels(mapping: Mapping[Any, Any]) -> dict:
    levels = [root := sortable(_as_level(mapping))]
    for level in levels:  # more are appended
        for key, node in level.items():
            if _is_level(node):
                level[key] = below = sortable(_as_level(node))
                levels.append(below)
    return root


def _pairs(state: Mapping[Any, Any]) -> list[tuple[Path, Any]]:
    """List the leaves with their paths, sorted by path."""
    if not isinstance(state, Mapping):
        raise errors.NotAStateError(_NOT_A_STATE.format(type=type(state).__name__))
    top = _as_level(state)
    pairs: list[tuple[Path, Any]] = []
    stack: list[tuple[Path, Mapping[Any, Any], Iterator[Any]]] = [((), top, iter(sorted_keys(top)))]
    while stack:
        path, level, keys = stack[-1]
        for key in keys:
            node = level[key]
            if type(node) is dict or (not isinstance(node, Variable) and isinstance(node, Mapping)):  # _is_level(node)
                stack.append(((*path, key), node, iter(sorted_keys(node))))
                break
            pairs.append(((*path, key), node))
        else:
            stack.pop()
    return pairs


def _as_pairs(flat: Flat) -> Pairs:
    if isinstance(flat, FlatState):
        return zip(flat.paths, flat.leaves)
    return flat.items() if isinstance(flat, Mapping) else flat  # type: ignore[return-value]  # a Mapping of these


def _flat(pairs: Pairs) -> FlatState[Any]:
    """A FlatState of pairs that are sorted by path."""
    return FlatState(pairs, sort=False)


def one_or_all(found: Iterable[Any]) -> Any:
    """What was found for each filter, as a tuple; by itself if there is one filter, or none."""
    several = tuple(found)
    return several[0] if len(several) == 1 else several


def grouped(pairs: Pairs, filters: Sequence[Filter], *, exhaustive: bool) -> list[list[tuple[Path, Any]]]:
    """The pairs of path and leaf that each filter is the first to take.

    Raises:
      NonExhaustiveFiltersError: if leaves are left over, and the filters are to be exhaustive.
    """
    *groups, rest = group_by_filters(pairs, filters)
    if rest and exhaustive:
        asked = ", ".join(map(repr, filters_to_predicates(filters)))
        head = f"Non-exhaustive filters, got a non-empty remainder: none of {asked} takes these leaves:"
        remedy = "Add `...` as the last filter to get them too, or use `filter` to leave them out."
        lines = [f"{format_path(path)}: {type(leaf).__name__}" for path, leaf in rest]
        raise errors.NonExhaustiveFiltersError(listed(head, lines, remedy))
    return groups


def is_boxed(given: Any, held: Any = None) -> bool:
    """Whether a mapping stands for its only item, ``value``, as a checkpoint stores what is in a Variable.

    It does not if the Variable itself holds a mapping with just that key.
    """

    def has_only_value(x: Any) -> bool:
        return isinstance(x, Mapping) and x.keys() == {"value"}

    return has_only_value(given) and not has_only_value(held)


def is_without_leaves(value: Any) -> bool:
    """Whether a value is a pytree without leaves, for which a checkpoint has None."""
    return value is not None and not jax.tree.leaves(value)


def _replace_value(leaf: Any, value: Any) -> Any:
    if value is None and is_without_leaves(plain_value(leaf)):
        return leaf
    return leaf.replace(value) if isinstance(leaf, Variable) else value


def _same(a: Any, b: Any) -> bool:
    """Whether two leaves are equal: as arrays, and for Variables also in type and metadata."""
    if a is b:
        return True
    (xs, structure), (ys, other) = jax.tree.flatten(a), jax.tree.flatten(b)
    return structure == other and all(np.shape(x) == np.shape(y) and bool(np.all(x == y)) for x, y in zip(xs, ys))


def _expand_level(value: Any) -> Leaf | Group:
    if isinstance(value, Mapping):
        is_state = isinstance(value, State)
        opening, closing = (f"{type(value).__name__}({{", "})") if is_state else ("{", "}")
        items = (value._mapping if is_state else value).items()  # levels as they are, not as views
        return Group(opening, [(f"{key!r}: ", key, x) for key, x in items], closing)
    return expand_object(value)


# --- as pytrees -----------------------------------------------------------------------------------------------------


def _flatten(state: State) -> tuple[list[Any], tuple]:
    mapping = state._mapping
    keys = sorted(mapping)
    return [mapping[key] for key in keys], tuple(keys)


def flatten_with_keys(state: State) -> tuple[list[tuple[Any, Any]], tuple]:
    children, keys = _flatten(state)
    return [(jax.tree_util.DictKey(key), child) for key, child in zip(keys, children)], keys


def _register(cls: type[State]) -> None:
    def unflatten(keys: tuple, children: Iterable[Any]) -> State:
        return cls._view(dict(zip(keys, children)))

    register_pytree(cls, flatten_with_keys, unflatten, _flatten)


_register(State)
register_pytree(
    FlatState,
    lambda flat: ([(jax.tree_util.DictKey(path), leaf) for path, leaf in flat], flat.paths),
    FlatState.from_sorted_keys_values,
    lambda flat: (flat.leaves, flat.paths),
)
register_pytree(
    _Pair,  # like any tuple
    lambda pair: ([(jax.tree_util.SequenceKey(k), x) for k, x in enumerate(pair)], None),
    lambda _, children: tuple(children),
)
