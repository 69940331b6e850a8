"""GraphState: a GraphDef together with its State, as one pytree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Generic

import jax.tree_util as jtu

from .generics import A
from .graphdef import GraphDef
from .registration import register_pytree
from .state import State, flatten_with_keys


class GraphState(MutableMapping, Generic[A]):
    """A GraphDef together with its State, as one pytree; reads and writes like the State.

    >>> import nnxlib as nnx, jax
    >>> pair = nnx.GraphState(*nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    >>> doubled = jax.tree.map(lambda x: 2 * x, pair)
    >>> bool((doubled.kernel.value == 2 * pair.kernel.value).all())
    True
    """

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


register_pytree(GraphState, _flatten_graph_state, _unflatten_graph_state)
