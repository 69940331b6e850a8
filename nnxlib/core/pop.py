"""``pop``: take leaves out of a live object.

The other operations go by the table of an object (ops.py). This one looks at the places themselves, since what is taken
out has to be deleted, by ``delattr`` or ``del``, from every place where it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, overload

from .errors import Path, UsageError, format_path
from .filters import Filter, first_of, to_predicate, warn_of_names, warn_of_node_classes
from .iteration import places
from .making import make_variables
from .objects import Node, check_writable, delete_child
from .state import State, one_or_all, state_of_items
from .tracing import boundary, current_trace
from .values import all_unshared
from .variables import Variable


@overload
def pop(node: Any, filter: Filter, /) -> State: ...
@overload
def pop(node: Any, /, *filters: Filter) -> tuple[State, ...]: ...
@boundary
def pop(node: Any, *filters: Filter) -> Any:
    """Remove the leaves that the filters take from a node, and return them as a State, or one for each filter.

    Leaves are Variables, and arrays that are attributes or items of a node, a list or a dict. One that several filters
    take is in the State of the first.

    >>> import nnxlib as nnx
    >>> norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    >>> list(nnx.pop(norm, nnx.BatchStat)), hasattr(norm, 'mean')
    (['mean', 'var'], False)

    Raises:
      ValueError: without a filter, or when a leaf to be removed is part of a tuple or another pytree.
    """
    if not filters:
        raise UsageError("nnx.pop needs at least one filter: nnx.pop(model, nnx.Intermediate).")
    taken, to_delete = _taken(node, filters)
    states = [state_of_items(_with_copies(group)) for group in taken]
    trace = current_trace()
    for holder, key in to_delete:
        if isinstance(holder, Node) and holder._nnx_trace is not trace:
            check_writable(holder, f"delete attribute {key!r}")
    for holder, key in reversed(to_delete):  # items of a list from the last to the first
        delete_child(holder, key)
    return one_or_all(states)


def _taken(node: Any, filters: Sequence[Filter]) -> tuple[list[list[tuple[Path, Any]]], list[tuple[Any, Any]]]:
    """The leaves that each filter takes, with their first paths; and all places, (holder, key), where these are.

    Raises:
      UsageError: for a leaf in a tuple or another pytree.
    """
    warn_of_node_classes(filters)
    first_to_take = first_of([to_predicate(f) for f in filters])
    *taken, left = groups = [[] for _ in (*filters, None)]
    chosen: dict[Any, list[tuple[Path, Any]]] = {}  # the group of each leaf, by its identity
    found, removable = [], set()
    for path, x, holder in places(node):
        if isinstance(x, Node):
            continue
        identity = _identity(path, x)
        group = chosen.get(identity)
        if group is None:
            group = chosen[identity] = groups[first_to_take(path, x)]
            group.append((path, x))
        if group is not left and isinstance(holder, Node | dict | list | State):
            found.append((holder, path[-1]))
            removable.add(identity)
    warn_of_names(filters, taken, itertools.chain(*groups))
    for path, x in itertools.chain(*taken):
        if _identity(path, x) not in removable:
            raise UsageError(
                f"Cannot pop {format_path(path)}: it is inside a tuple or another pytree, which cannot lose an item. "
                "Keep it in an attribute, a list or a dict."
            )
    return taken, found


def _identity(path: Path, x: Any) -> Any:
    """What tells a leaf from others: a Variable is the same one at each of its paths, an array is not."""
    return id(x) if isinstance(x, Variable) else path


def _with_copies(items: list[tuple[Path, Any]]) -> list[tuple[Path, Any]]:
    """The pairs of path and leaf, with copies of the Variables."""
    variables = [x for _, x in items if isinstance(x, Variable)]
    values = all_unshared([x._cell.value for x in variables])
    copies = iter(make_variables([type(x) for x in variables], values, [x._metadata for x in variables]))
    return [(path, next(copies) if isinstance(x, Variable) else x) for path, x in items]
