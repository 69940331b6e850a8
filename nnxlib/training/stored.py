"""Pytrees of Variables: what an optimizer and an EMA have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from ..core.differences import leaf_differences, refuse
from ..core.errors import ArgumentError, Path, describe
from ..core.formulas import copied
from ..core.graph import even_if_interrupted
from ..core.missing import MISSING
from ..core.objects import Node
from ..core.ops import state
from ..core.state import FlatState, from_flat_state
from ..core.tracing import Tracer
from ..core.traversals import path_key
from ..core.variables import Variable, plain_value


def check_transformation(tx: Any, call: str) -> None:
    """Check that ``tx`` is a transformation of gradients; the message tells to write ``call``.

    Raises:
      ArgumentError: if it is something else, such as the function that makes one.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ArgumentError(
            "tx has to be a transformation with `init` and `update`, such as optax.adam(1e-3), got "
            f"{describe(tx) if isinstance(tx, Node) else repr(tx)}. Write {call}."
        )


def is_variable(value: Any) -> bool:
    return isinstance(value, Variable)


def flat(tree: Any) -> tuple[list[Any], Any]:
    """The Variables and other leaves of a pytree, and its structure around them."""
    return jax.tree.flatten(tree, is_leaf=is_variable)


def leaves_by_path(tree: Any) -> dict[Path, Any]:
    """The leaves of a pytree, with the plain values of Variables."""
    found = jtu.tree_flatten_with_path(tree, is_leaf=is_variable)[0]
    return {tuple(map(path_key, keys)): plain_value(leaf) for keys, leaf in found}


def set_values(variables: Iterable[Variable], values: Iterable[Any]) -> None:
    """Replace the raw values of Variables that belong together: of all of them, if it is interrupted, or of none."""
    pairs = list(zip(variables, values, strict=True))

    def write() -> None:
        for variable, value in pairs:
            variable.set_raw_value(value)

    even_if_interrupted(write)


def without_aliases(values: Sequence[Any], others: Sequence[Any] = ()) -> list[Any]:
    """Copy each array that is among ``others`` or occurs twice: buffers in two places could not be donated."""
    seen = set(map(id, jax.tree.leaves(others)))

    def own(x: Any) -> Any:
        if id(x) in seen and isinstance(x, jax.Array) and not isinstance(x, Tracer):
            return copied(x)
        seen.add(id(x))
        return x

    return [jax.tree.map(own, value) for value in values]


def matched(
    given: Any, expected: Mapping[Path, Any], ignored: Callable[[], Collection[Path]], head: str, remedy: str
) -> dict[Path, Any]:
    """The plain values in ``given`` at the paths of ``expected``; those at the paths ``ignored()`` may be there too.

    Args:
      given: a State, FlatState, a Module, or any pytree with its items at these paths.
      expected: the leaves that the values are for, by path.
      ignored: gives the paths of leaves that may be there and are left out; only called if some are not expected.
      head: the first line of the message: what does not fit what.
      remedy: the last line: what to do instead.

    Raises:
      StateMismatchError: for missing and unexpected paths and for wrong shapes.
    """
    given = (
        from_flat_state(given) if isinstance(given, FlatState) else state(given) if isinstance(given, Node) else given
    )
    there = {path: _at(given, path) for path in expected}
    found = {path: plain_value(value) for path, value in there.items() if value is not MISSING}
    others = {}
    for keys, leaf in jtu.tree_flatten_with_path(given, is_leaf=is_variable)[0]:
        path = tuple(map(path_key, keys))
        if path not in expected and not _is_within(path, expected):
            others[path] = leaf
    if others:
        left_out = ignored()
        others = {path: plain_value(leaf) for path, leaf in others.items() if not _is_within(path, left_out)}
    differences = leaf_differences(expected, found | others)
    refuse([x for x in differences if x.kind != "dtype"], head, remedy)
    return found


def _is_within(path: Path, others: Collection[Path]) -> bool:
    return any(path[:n] in others for n in range(len(path) + 1))


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return MISSING
    return tree
