"""Pytrees of Variables as attributes: the state of an optimizer, the averages of an EMA.

Such a pytree has mutable levels, dicts and States. As an attribute it is kept with nodes in their place, which report
their changes: a graph that holds foreign mutable containers would have to be walked again at every call of a jitted
function. ``store`` exchanges the containers, ``restore`` gives back the types that a transformation works on:

    dict          <->  Dict
    OrderedDict   <->  OrderedLevel
    list          <->  List
    State         <->  StateDict, with a StateDict for each level of the State
    others        <->  as they are, with their items exchanged: tuples, named tuples, any registered pytree

The paths of the Variables are the same in both forms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from ..core.containers import Dict, List
from ..core.differences import leaf_differences, refuse
from ..core.filters import Filter
from ..core.objects import Node
from ..core.ops import pure, state
from ..core.state import FlatState, State, from_flat_state, to_flat_state
from ..core.tracing import Tracer
from ..core.traversals import path_key
from ..core.variables import Variable
from ..core.variables import raw_value as plain

Path = tuple[Any, ...]


class StateDict(Dict):
    """A level of a State, as a node; items are attributes too."""

    _nnx_name_key = jtu.DictKey  # as in a State

    def _nnx_pure(self) -> State:
        return from_flat_state([(path, pure(leaf)) for path, leaf in to_flat_state(self)])


class OrderedLevel(Dict):
    """An OrderedDict, as a node."""

    _nnx_name_key = jtu.DictKey

    def _nnx_pure(self) -> OrderedDict:
        return OrderedDict([(key, pure(value)) for key, value in self.items()])


_DICTS = {dict: Dict, Dict: Dict, OrderedDict: OrderedLevel, OrderedLevel: OrderedLevel}


def store(tree: Any, box: Callable[[Any], Variable]) -> Any:
    """Exchange the containers of a pytree for nodes, and its Variables and leaves for ``box(leaf)``.

    What is stored already stays as it is, except for its leaves.
    """
    match tree:
        case Variable():
            return box(tree)
        case State() | StateDict():
            return _as_levels((path, store(leaf, box)) for path, leaf in to_flat_state(tree))
        case dict() if type(tree) in _DICTS:
            return _DICTS[type(tree)]({key: store(value, box) for key, value in tree.items()})
        case list() if type(tree) in (list, List):
            return List([store(value, box) for value in tree])
    items, structure = _items(tree)
    return box(tree) if _is_leaf(items, tree) else structure.unflatten([store(item, box) for item in items])


def restore(tree: Any) -> Any:
    """Exchange nodes for the containers that they were made of; Variables stay."""
    match tree:
        case Variable():
            return tree
        case StateDict():
            return from_flat_state([(path, restore(leaf)) for path, leaf in to_flat_state(tree)])
        case Dict():
            made = OrderedDict if isinstance(tree, OrderedLevel) else dict
            return made([(key, restore(value)) for key, value in tree.items()])
        case List():
            return [restore(value) for value in tree]
    items, structure = _items(tree)
    return tree if _is_leaf(items, tree) else structure.unflatten([restore(item) for item in items])


def is_variable(value: Any) -> bool:
    return isinstance(value, Variable)


def shown(filter: Filter) -> str:
    """A filter as a user writes it."""
    return filter.__name__ if isinstance(filter, type) else "..." if filter is ... else repr(filter)


def flat(tree: Any) -> tuple[list[Any], Any]:
    """The Variables and other leaves of a pytree, and its structure around them."""
    return jax.tree.flatten(tree, is_leaf=is_variable)


def set_values(variables: Iterable[Variable], values: Iterable[Any]) -> None:
    """Replace the raw values of Variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.set_raw_value(value)


def without_aliases(values: Sequence[Any], others: Sequence[Any] = ()) -> list[Any]:
    """Copy each array that is among ``others`` or occurs twice: buffers in two places could not be donated."""
    seen = set(map(id, jax.tree.leaves(others)))

    def own(x: Any) -> Any:
        if id(x) in seen and isinstance(x, jax.Array) and not isinstance(x, Tracer):
            return x.copy()
        seen.add(id(x))
        return x

    return [jax.tree.map(own, value) for value in values]


def matched(
    given: Any, expected: Mapping[Path, Any], ignored: Collection[Path], head: str, remedy: str
) -> dict[Path, Any]:
    """The plain values in ``given`` at the paths of ``expected``; those at the paths ``ignored`` may be there too.

    Args:
      given: a State, FlatState, a Module, or any pytree with its items at these paths.
      expected: the leaves that the values are for, by path.
      ignored: paths of leaves that are not wanted.
      head: the first line of the message: what does not fit what.
      remedy: the last.

    Raises:
      StateMismatchError: for missing and unexpected paths and for wrong shapes.
    """
    given = (
        from_flat_state(given) if isinstance(given, FlatState) else state(given) if isinstance(given, Node) else given
    )
    there = {path: _at(given, path) for path in expected}
    found = {path: plain(value) for path, value in there.items() if value is not _NOTHING}
    others = {}
    for keys, leaf in jtu.tree_flatten_with_path(given, is_leaf=is_variable)[0]:
        path = tuple(map(path_key, keys))
        if not any(path[:n] in expected or path[:n] in ignored for n in range(len(path) + 1)):
            others[path] = plain(leaf)
    differences = leaf_differences(expected, found | others)
    refuse([x for x in differences if x.kind != "dtype"], head, remedy)
    return found


_NOTHING = object()


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return _NOTHING
    return tree


def _items(tree: Any) -> tuple[list[Any], Any]:
    """What stands directly below a pytree."""
    return jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)


def _is_leaf(items: list[Any], tree: Any) -> bool:
    return len(items) == 1 and items[0] is tree


def _as_levels(pairs: Iterable[tuple[Path, Any]]) -> StateDict:
    root = StateDict()
    for path, leaf in pairs:
        level = root
        for key in path[:-1]:
            if key not in level:
                level[key] = StateDict()
            level = level[key]
        level[path[-1]] = leaf
    return root
