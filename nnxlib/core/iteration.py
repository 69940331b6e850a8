"""Iterating over the graph below a node: what is where, for users who want to look at, count or map its parts.

These functions see the objects as they are now, and describe nothing: no rows, no table.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import jax.tree_util as jtu

from .closures import notice
from .containers import Dict, List, holds_data
from .data import is_array, is_bound_method, is_node
from .errors import Path
from .filters import Filter, to_predicate
from .objects import Node, new_node
from .tracing import boundary
from .traversals import sorted_keys
from .variables import Variable
from .walk import flatten_once


def children_of(value: Any, without: Container[type] = ()) -> list[tuple[Path, Any]]:
    """What is directly below a value, by path: the attributes or items of a node, the leaves and nodes of a pytree.

    Instances of the classes ``without`` are left out.
    """
    if isinstance(value, Node):
        notice(value)
        held = value._nnx_contents()
        is_plain_list = isinstance(value, list) and len(held) == len(value)
        names = [name for name in held if type(held[name]) not in without] if without else held
        return [((name,), held[name]) for name in (names if is_plain_list else sorted_keys(names))]
    if is_node(value) or (jtu.all_leaves([value]) and not is_bound_method(value)):
        return []
    if type(value) in (tuple, list) and jtu.all_leaves(value):
        return [((i,), x) for i, x in enumerate(value) if type(x) not in without]
    keys, leaves, _ = flatten_once(value)
    if keys == ((),) and leaves[0] is value:  # a static dict, which JAX cannot flatten
        return []
    return [(key, x) for key, x in zip(keys, leaves, strict=True) if type(x) not in without]


@boundary
def iter_graph(node: Any, /) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) for everything in a graph, children before parents; objects once, at their first path.

    >>> import nnxlib as nnx
    >>> [path for path, x in nnx.iter_graph(nnx.Linear(1, 1, rngs=nnx.Rngs(0))) if isinstance(x, nnx.Variable)]
    [('bias',), ('kernel',)]
    """
    return _visit(node, leaves=True)


def iter_objects(node: Any) -> Iterator[tuple[Path, Any]]:
    """Yield what :func:`iter_graph` does, but only nodes and Variables."""
    return _visit(node, leaves=False)


def _visit(node: Any, leaves: bool) -> Iterator[tuple[Path, Any]]:
    seen: dict[int, Any] = {}  # by id; keeps the objects alive, so that no id is reused
    plain = {type(None)}  # classes whose instances are always leaves
    left_out = () if leaves else plain
    stack: list[tuple[Iterator[tuple[Path, Any]], Path, Any]] = [(iter([((), node)]), (), None)]
    while stack:
        remaining, above, parent = stack[-1]
        for key, value in remaining:
            if type(value) not in plain:
                is_leaf = isinstance(value, Variable)
                if is_node(value):
                    if id(value) in seen:
                        continue
                    seen[id(value)] = value
                elif jtu.all_leaves([value]) and type(value) is not types.MethodType:
                    plain.add(type(value))
                    is_leaf = True
                if not is_leaf and (children := children_of(value, left_out)):
                    stack.append((iter(children), above + key, value))
                    break
            if leaves or is_node(value):
                yield above + key, value
        else:
            stack.pop()
            if stack and (leaves or is_node(parent)):
                yield above, parent


def places(node: Any) -> Iterator[tuple[Path, Any, Any]]:
    """Yield each place of a node, Variable or array in a graph: its path, the value, what holds it; parents first."""
    seen, plain = set[int](), {type(None)}  # plain: classes whose instances are always leaves
    stack: list[tuple[Path, Any, Any]] = [((), node, None)]
    while stack:
        path, value, holder = stack.pop()
        if isinstance(value, Variable):
            yield path, value, holder
            continue
        if isinstance(value, Node):
            yield path, value, holder
            if id(value) in seen:
                continue
            seen.add(id(value))
        elif type(value) not in (tuple, list, dict):  # for these, it would take long to ask whether one is an array
            if is_array(value):
                yield path, value, holder
                continue
            if jtu.all_leaves([value]) and type(value) is not types.MethodType:
                plain.add(type(value))
        below = children_of(value, plain)
        stack += [(path + key, x, value if len(key) == 1 else holder_of(value, key)) for key, x in reversed(below)]


@boundary
def iter_children(node: Any, /) -> Iterator[tuple[Any, Any]]:
    """Yield (key, child) for the nodes and Variables that are attributes or items of ``node``.

    Lists and dicts without any data, such as settings, are left out.

    >>> import nnxlib as nnx
    >>> [(key, type(child).__name__) for key, child in nnx.iter_children(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))]
    [('bias', 'Param'), ('kernel', 'Param')]
    """
    return (
        (key[0] if len(key) == 1 else key, child)
        for key, child in children_of(node)
        if is_node(child) and (not isinstance(child, List | Dict) or holds_data(child))
    )


@boundary
def find_duplicates(node: Any, /, *, only: Filter = ...) -> list[list[Path]]:
    """Return the paths of each Variable or node that is reached by more than one path, first path first.

    ``only`` is a filter of these objects, which sees the first path of each.

    >>> import nnxlib as nnx
    >>> shared = nnx.Param(1.0)
    >>> nnx.find_duplicates(nnx.Dict(a=shared, b=shared))
    [[('a',), ('b',)]]
    """
    predicate, found = to_predicate(only), dict[int, tuple[Any, list[Path]]]()  # by id, the objects and their paths
    for path, value, _ in places(node):
        if is_node(value):
            found.setdefault(id(value), (value, []))[1].append(path)
    return [paths for value, paths in found.values() if len(paths) > 1 and predicate(paths[0], value)]


def holder_of(tree: Any, path: Path) -> Any:
    """The container that the last key of a path belongs to."""
    for key in path[:-1]:
        is_item = isinstance(tree, Mapping | list) or (isinstance(tree, tuple) and isinstance(key, int))
        tree = tree[key] if is_item else getattr(tree, str(key), None)
    return tree


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
    for path, value in iter_objects(node):
        if isinstance(value, Variable):
            copies[id(value)] = f(path, value)
        else:
            copied = new_node(type(value), value._nnx_marks)
            copied._nnx_fill({k: _mapped(f, (*path, k), child, copies) for k, child in value._nnx_children()})
            copies[id(value)] = f(path, copied)
    return _mapped(f, (), node, copies)


def _mapped(f: Callable, path: Path, value: Any, copies: dict[int, Any]) -> Any:
    if is_node(value):
        return copies.get(id(value), value)
    children = children_of(value)
    if not children:
        return f(path, value)
    _, _, treedef = flatten_once(value)
    return f(path, treedef.unflatten([_mapped(f, (*path, *key), child, copies) for key, child in children]))


@boundary
def set_metadata(node: Any, /, *, only: Filter = Variable, **metadata: Any) -> None:
    """Set metadata on each Variable of a node that the filter ``only`` takes.

    >>> import nnxlib as nnx
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.set_metadata(layer, only=nnx.PathContains('kernel'), frozen=True)
    >>> layer.kernel.frozen, layer.bias.has_metadata('frozen')
    (True, False)

    Raises:
      TraceContextError: if one of them belongs to another trace; nothing has been set then.
    """
    predicate = to_predicate(only)
    chosen = [x for path, x in iter_objects(node) if isinstance(x, Variable) and predicate(path, x)]
    for variable in chosen:
        variable.check_writable()
    for variable in chosen:
        variable.set_metadata(**metadata)
