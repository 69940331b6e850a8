"""Adopting: a plain list or dict becomes a List or Dict when it is put into a node, so that a later change is noticed.

Also inside of tuples, and of other lists and dicts. Only a list or dict that is declared data, and made of arrays
alone, stays plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from . import errors
from .data import declares, is_array, is_data, is_node, mark_of, undeclared

CONTAINERS: dict[type, Callable[[], Any]] = {}  # list -> List, dict -> Dict; filled by containers.py


def adopt(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Turn plain lists and dicts, also inside tuples, into List and Dict, whose changes are noticed."""
    kind = type(value)
    if kind is tuple:
        items = tuple([adopt(x, memo) for x in value])
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if kind in CONTAINERS:
        memo = {} if memo is None else memo
        if id(value) not in memo:
            memo[id(value)] = made = CONTAINERS[kind]()
            fill_adopted(made, dict(enumerate(value)) if kind is list else value, memo)
        return memo[id(value)]
    if declares(value):
        mark, declared = mark_of(value), undeclared(value)
        if mark is not is_data(declared):
            raise errors.ArgumentError(
                f"nnx.{'data' if mark else 'static'}({declared!r}) is put into a tuple, whose items are data or static "
                "by their values. Make it a Variable (nnx.Variable(...)) or an array to have it traced, or an "
                "attribute of a Module or an item of a list to declare it."
            )
        return adopt(declared, memo)
    return value


def holds_only_arrays(value: Any) -> bool:
    """Whether ``value`` is made of built-in containers, arrays and other pytrees of arrays, with at least one array.

    Such a list or dict stays plain if it is declared data: it is meant for ``jax.tree.map`` together with a batch or a
    State, and JAX compares types. But not if it holds the same list twice, which would come apart in a copy.
    """
    seen: dict[int, Any] = {}  # by id; keeps alive what the class of a pytree makes when it is flattened

    def is_leaf(x: Any) -> bool:
        if id(x) in seen:
            raise ValueError
        if type(x) in CONTAINERS:
            seen[id(x)] = x
        return is_node(x)

    try:
        leaves = jax.tree.leaves(value, is_leaf=is_leaf)
    except (TypeError, ValueError):  # JAX cannot sort the keys of a dict; or a list is there twice, even in itself
        return False
    return bool(leaves) and all(map(is_array, leaves))


def fill_adopted(node: Any, items: Mapping[Any, Any], memo: dict[int, Any] | None = None) -> None:
    """Fill a List or Dict with adopted items, and note which of them were declared data or static."""
    marks = {k: mark_of(x) for k, x in items.items() if declares(x)}
    node._nnx_fill({k: adopt(undeclared(x), memo) for k, x in items.items()})
    object.__setattr__(node, "_nnx_marks", marks or None)
