"""Nested mappings as flat ones, and back.

A *level* is a mapping from keys (``str`` or ``int``) to leaves and further levels; a *path* is the tuple of keys that
leads to a leaf. Both directions are loops, not recursions: a mapping may be thousands of levels deep.

Keys of one level have one order everywhere, ints before strings (:func:`sort_key`). JAX sorts the keys of a dict by
``<``, which Python does not define between ``int`` and ``str``; :func:`insert` therefore stores the ints of a mixed
level as :class:`IntKey`, an int in every other respect. No other level pays for this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax

from .errors import ArgumentError, Path, PathError, format_path

Key = str | int
A = TypeVar("A")


@jax.tree_util.register_static
class _EmptyNode:
    """What a flat mapping has at the path of an empty level; a pytree without leaves."""

    def __repr__(self) -> str:
        return "empty_node"

    def __reduce__(self) -> str:  # there is one, and it is compared by identity
        return "empty_node"


empty_node = _EmptyNode()


class IntKey(int):
    """An int that sorts before every string.

    >>> sorted(['b', IntKey(10), 'a', IntKey(2)])
    [2, 10, 'a', 'b']
    """

    __slots__ = ()

    def __lt__(self, other: Any) -> bool:
        return isinstance(other, str) or int.__lt__(self, other)

    def __gt__(self, other: Any) -> bool:
        return not isinstance(other, str) and int.__gt__(self, other)


def sort_key(key: Any) -> tuple[str, Any]:
    """Order keys by type, then by value, so that mixed ones can be sorted.

    >>> sorted(['b', 10, 'a', 2], key=sort_key)
    [2, 10, 'a', 'b']
    """
    return ("int" if isinstance(key, int) else type(key).__name__), key


def sorted_by_path(items: Iterable[A], path_of: Callable[[Any], Path] = tuple) -> list[A]:
    """Sort what has a path, key by key, as :func:`sorted_keys` sorts the keys of a level.

    >>> sorted_by_path([('b', 'x'), ('b', 2), ('a',), ('b', 10)])
    [('a',), ('b', 2), ('b', 10), ('b', 'x')]
    """
    items = list(items)
    try:
        return sorted(items, key=path_of)
    except TypeError:  # a level has keys of several types
        return sorted(items, key=lambda item: [sort_key(key) for key in path_of(item)])


def path_key(entry: Any) -> Any:
    """The plain key of an entry of a JAX key path."""
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return entry


def with_ints(path: Path) -> Path:
    """A path with ints for keys that are ints written as strings, which some checkpoints have.

    >>> with_ints(('layers', '0', '01'))
    ('layers', 0, '01')
    """
    return tuple([int(key) if isinstance(key, str) and _is_int(key) else key for key in path])


def _is_int(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and str(int(text)) == text


def sorted_keys(level: Iterable[Any]) -> tuple:
    """The keys of a level in their order, also when their types are mixed.

    Raises:
      PathError: if keys of one type have no order.
    """
    try:
        return tuple(sorted(level))
    except TypeError:
        pass
    try:
        return tuple(sorted(level, key=sort_key))
    except TypeError:
        raise PathError(_NO_ORDER.format(keys=", ".join(map(repr, level)))) from None


_NO_ORDER = """\
The keys {keys} of a dict have no order (`<`), which the paths of a State need. Use strings, numbers or tuples; \
an enum can be both: enum.StrEnum, enum.IntEnum."""


def insert(level: dict, key: Any, value: Any) -> None:
    """Set ``level[key] = value`` and keep the keys of the level sortable by ``<``."""
    first = next(iter(level), key)
    if type(first) is not type(key):
        if type(key) is int:
            key = IntKey(key)
        elif type(first) is int:
            items = [(IntKey(k) if type(k) is int else k, v) for k, v in level.items()]
            level.clear()
            level.update(items)
    level[key] = value


def sortable(level: Mapping[Any, Any]) -> dict:
    """A copy of a level whose keys can be sorted by ``<``."""
    if len(set(map(type, level))) <= 1:
        return dict(level)
    copy: dict = {}
    for key, value in level.items():
        insert(copy, key, value)
    return copy


def flattened(
    root: Any, children: Callable[[Path, Any], Collection[tuple[Any, Any]] | None]
) -> Iterator[tuple[Path, Any]]:
    """Yield ``(path, leaf)``, depth first; an empty level below the root is the leaf :data:`empty_node`.

    ``children(path, node)`` returns the ``(key, child)`` pairs of a level, and None for a leaf.
    """
    stack = [((), root)]
    while stack:
        path, node = stack.pop()
        pairs = children(path, node)
        if pairs is None:
            yield path, node
        elif pairs:
            stack += [((*path, key), child) for key, child in pairs][::-1]
        elif path:
            yield path, empty_node


def nested(items: Iterable[tuple[Path, Any]]) -> dict:
    """Make nested dicts out of ``(path, leaf)`` pairs; a leaf that is :data:`empty_node` becomes an empty level.

    Raises:
      PathError: for a path that is empty, is text, or is a leaf and also the beginning of another path.
    """
    root: dict = {}
    held: dict[int, Any] = {}  # the dicts that are leaves, by id: all others are levels
    parent, level, kind = None, root, None  # kind: the type of the first key of the level; most levels have one type
    for path, leaf in items:
        if not path:
            raise PathError("The path () is empty: a leaf needs a key, such as ('kernel',).")
        above = path if leaf is empty_node else path[:-1]
        if above != parent:  # sorted paths seldom change their level
            if type(above) is not tuple:
                if isinstance(path, str) and len(path) > 1:  # it would be taken for a path of its letters
                    keys = tuple(re.split("[./]", path))
                    raise PathError(f"A path is a tuple of keys, not text: write {(path,)} or {keys}.")
                above = tuple(above)
            parent, level = above, root  # text never equals it
            for n, key in enumerate(above, 1):
                below = level.get(key)
                if type(below) is not dict or (held and id(below) in held):
                    if key in level:
                        raise _clash(path[:n])
                    below = {}
                    insert(level, key, below)
                level = below
            kind = type(next(iter(level), path[-1]))
        if leaf is empty_node:
            continue
        key = path[-1]
        if type(leaf) is dict:
            held[id(leaf)] = leaf
        if type(key) is kind and key not in level:
            level[key] = leaf
        elif type(below := level.get(key)) is dict and id(below) not in held:
            raise _clash(path)
        else:
            insert(level, key, leaf)
            kind = type(next(iter(level)))
    return root


def _clash(path: Path) -> PathError:
    return PathError(f"{format_path(path)} is given a value, but also values below it. Remove one, or rename it.")


def flatten_to_sequence(
    xs: Mapping[Any, Any], /, *, is_leaf: Callable[[Path, Any], bool] | None = None
) -> list[tuple[Path, Any]]:
    """List the ``(path, leaf)`` pairs of a nested mapping; empty levels vanish.

    >>> from nnxlib import traversals
    >>> traversals.flatten_to_sequence({'a': {'b': 1, 'c': {}}, 'd': 2})
    [(('a', 'b'), 1), (('d',), 2)]
    """
    return [pair for pair in _flatten(xs, is_leaf) if pair[1] is not empty_node]


def flatten_mapping(
    xs: Mapping[Any, Any],
    /,
    *,
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Path, Any], bool] | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """Flatten a nested mapping to a dict from path to leaf.

    Args:
      xs: the nested mapping; lists and everything else that is not a mapping are leaves.
      keep_empty_nodes: keep an empty level below the top, as ``empty_node``.
      is_leaf: ``(path, mapping) -> bool``, true for a level that is to stay whole.
      sep: join the keys with this instead of making tuples. (A key that contains it becomes a level when unflattened.)

    >>> from nnxlib import traversals
    >>> traversals.flatten_mapping({'a': {'b': 1, 'c': {}}, 'd': 2})
    {('a', 'b'): 1, ('d',): 2}
    >>> traversals.flatten_mapping({'a': {'b': 1, 'c': {}}, 'd': 2}, sep='/', keep_empty_nodes=True)
    {'a/b': 1, 'a/c': empty_node, 'd': 2}

    Raises:
      PathError: if ``sep`` gives two leaves the same name.
    """
    pairs = [pair for pair in _flatten(xs, is_leaf) if keep_empty_nodes or pair[1] is not empty_node]
    if sep is None:
        return dict(pairs)
    paths: dict[str, Path] = {}
    for path, _ in pairs:
        other = paths.setdefault(sep.join(map(str, path)), path)
        if other is not path:
            raise PathError(f"With sep={sep!r}, {other} and {path} have the same name. Choose another separator.")
    return dict(zip(paths, [leaf for _, leaf in pairs], strict=True))


def _flatten(xs: Mapping[Any, Any], is_leaf: Callable[[Path, Any], bool] | None) -> Iterator[tuple[Path, Any]]:
    if not isinstance(xs, Mapping):
        raise ArgumentError(f"Expected a mapping such as {{'layer': {{'kernel': ...}}}}, got {type(xs).__name__}.")

    def children(path: Path, node: Any) -> Collection[tuple[Any, Any]] | None:
        if not isinstance(node, Mapping) or (is_leaf is not None and is_leaf(path, node)):
            return None
        return node.items()

    return flattened(xs, children)


def unflatten_mapping(xs: Any, /, *, sep: str | None = None) -> dict[Any, Any]:
    """Nest a mapping (or pairs) from path to leaf: the inverse of ``flatten_mapping``.

    >>> from nnxlib import traversals
    >>> traversals.unflatten_mapping({('a', 'b'): 1, ('d',): 2})
    {'a': {'b': 1}, 'd': 2}
    >>> traversals.unflatten_mapping({'a/b': 1, 'd': 2}, sep='/')
    {'a': {'b': 1}, 'd': 2}

    Raises:
      PathError: when one path is the beginning of another, or is text and there is no ``sep``.
    """
    items = xs.items() if isinstance(xs, Mapping) else xs
    return nested(items if sep is None else [(tuple(path.split(sep)), leaf) for path, leaf in items])
