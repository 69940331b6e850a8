"""Matching: which of the leaves that States bring belongs to which position of a layout.

``merge`` and ``update`` take States in many forms: as ``split`` returned them, changed by a transformation, restored
from a checkpoint as nested dicts, or several of them, each with a part of the leaves. Those that are nested like the
layout, or like a known group of it, are matched in a few C calls (:func:`leaves_by_position`), all others path by path
(:func:`matched`). Then fitting.py checks whether each leaf fits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .differences import Aval
from .errors import Path, StateMismatchError, describe
from .layout import Layout
from .state import FlatState, State, is_boxed
from .tracing import Tracer
from .traversals import empty_node, flattened, sorted_by_path
from .variables import Variable, stored_value


def flat_state_of(layout: Layout, leaves: list[Any]) -> FlatState[Any]:
    """All leaves of a layout, in the order of their paths, as a FlatState.

    Raises:
      StateMismatchError: if the number of leaves is another.
    """
    expected = tuple(sorted_by_path(layout.leaf_paths))
    if len(leaves) != len(expected):
        raise StateMismatchError(
            f"Expected {len(expected)} leaves, those of all States in their order, got {len(leaves)}; nothing was made."
            " Pass jax.tree.leaves(state) of the whole state, or the State itself."
        )
    return FlatState.from_sorted_keys_values(expected, leaves)


def listed_by_path(layout: Layout, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """The States; in place of a list of leaves, a FlatState with their paths.

    Raises:
      StateMismatchError: if the number of leaves is another.
    """
    leaves = states[0] if len(states) == 1 else None
    if type(leaves) is not list or any(isinstance(x, Mapping | FlatState | list | tuple) for x in leaves):
        return states
    return (flat_state_of(layout, leaves),)


def overlaid(states: list[dict]) -> dict:
    """Nested dicts with the leaves of all; where several have a leaf at the same path, that of the last."""
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


def leaves_by_position(layout: Layout, states: tuple[Any, ...]) -> dict[int, Any] | None:
    """The leaves of States by position; None unless each State is nested like the layout or a known group of it."""
    new: dict[int, Any] = {}
    for state in states:
        found = layout.leaves_in(state.raw_mapping) if isinstance(state, State) else None
        if found is None or dict in [type(x) for x in found.values()]:  # a level where there is a leaf
            return None
        new |= found
    return new


def matched(layout: Layout, states: tuple[Any, ...], avals: Sequence[Aval]) -> tuple[dict[int, Any], dict[Path, Any]]:
    """The leaves of States by position; and the unexpected ones by path.

    A leaf that has several paths in the layout may come by any of them, and by several if its value is the same.
    """
    flat, position = _flat_leaves(states, dict(zip(layout.leaf_paths, avals, strict=True))), layout.positions
    found = {position[path]: leaf for path, leaf in flat.items() if path in position}
    unexpected = {path: leaf for path, leaf in flat.items() if path not in position}
    for path, leaf in list(unexpected.items()):
        k = layout.position_at(path)
        if k is not None and _agree(found.setdefault(k, leaf), leaf):
            del unexpected[path]
    return found, unexpected


def _agree(*leaves: Any) -> bool:
    """Whether two leaves are known to have the same value."""
    a, b = map(stored_value, leaves)
    if a is b or not all(isinstance(x, jax.Array | np.ndarray) and not isinstance(x, Tracer) for x in (a, b)):
        return a is b
    with jax.ensure_compile_time_eval():  # in a trace, too
        return bool(jnp.array_equal(a, b))


def _flat_leaves(states: tuple[Any, ...], known: Mapping[Path, Aval]) -> dict[Path, Any]:
    """Path -> leaf of several States, for an object whose leaves have the paths and avals ``known``.

    Two variants of known paths, as in checkpoints, are understood: ``'0'`` for ``0``, and a final key ``'value'``,
    which is what JAX calls the value of a Variable. (Not below a value that is a mapping itself. But one without
    leaves, such as what optax has in place of a masked moment, is stored as None.) If one array has the final key, all
    values have it, even those that are no arrays.
    """
    by_string: dict[Path, Path] | None = None
    flat: dict[Path, Any] = {}
    are_boxed = False
    plain = {tuple([str(k) for k in path]) for path, aval in known.items() if aval is None}
    for number, state in enumerate(states):
        for path, leaf in _items(state, number, known, plain):
            if path not in known:
                if by_string is None:
                    by_string = {tuple([str(k) for k in p]): p for p in known}
                written = tuple([str(k) for k in path])
                held = by_string.get(written[:-1]) if written[-1:] == ("value",) else None
                if written in by_string:
                    path = by_string[written]
                elif held is not None and (known[held] or leaf is None):
                    path, are_boxed = held, True
            flat[path] = leaf
    if are_boxed:
        flat = {path: x["value"] if is_boxed(x) and known.get(path, ()) is None else x for path, x in flat.items()}
    return flat


def _items(state: Any, number: int, known: Collection[Path], plain: set[tuple[str, ...]]) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) of each leaf of a State; at a ``plain`` path, where there was no array, a mapping is a leaf."""
    if isinstance(state, State) and not state:
        return
    if isinstance(state, FlatState):
        yield from state
    elif isinstance(state, Variable) or () in known:
        yield (), state
    elif isinstance(state, Mapping):

        def children(path: Path, value: Any) -> Any:
            is_level = isinstance(value, Mapping) and not (plain and tuple([str(k) for k in path]) in plain)
            return value.items() if is_level else None

        found = flattened(state.raw_mapping if isinstance(state, State) else state, children)
        yield from (pair for pair in found if pair[1] is not empty_node)
    elif isinstance(state, list | tuple):
        for item in state:
            yield from _items(item, number, known, plain)
    else:
        raise StateMismatchError(
            f"Expected a State, a FlatState or a nested dict as state number {number}, got {describe(state)}; nothing "
            "was changed. Pass what nnx.split or nnx.state returned."
        )
