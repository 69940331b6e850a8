"""The random streams inside a model: split, fork or reseed all that a filter takes, in place, and put them back.

A transform over an axis wants a stream per lane; afterwards the model should have its one stream again, further along.
:func:`split_rngs` and :func:`fork_rngs` change the streams of a node in place and return what they were, as
:class:`SplitBackups`: a context manager that puts it back. Both are decorators, too. As in ``rngs.py``, every split and
fork consumes a key of the stream, and putting back keeps the count that was reached, so no key comes twice.

Everything is checked before the first stream is changed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .errors import format_path
from .filters import Filter, filters_to_predicates, to_predicate
from .ops import iter_graph
from .rngs import RngStream, RngValue, Shape, as_key
from .variables import MISSING

Path = tuple[Any, ...]
Policy = Literal["scalars_only", "match_shape"] | Callable[[Path, jax.Array, tuple[int, ...]], jax.Array]


class StreamBackup(NamedTuple):
    """A stream, and the key and count that it gets back."""

    stream: RngStream
    key: jax.Array
    count: jax.Array


class SplitBackups(list[StreamBackup]):
    """What :func:`split_rngs` and :func:`fork_rngs` replaced; leaving it as a ``with`` block puts it back."""

    def __enter__(self) -> SplitBackups:
        return self

    def __exit__(self, *_: object) -> None:
        restore_rngs(self)


def restore_rngs(backups: Iterable[StreamBackup], /) -> None:
    """Put the keys and counts of streams back; the counts are those reached when they were split or forked."""
    for stream, key, count in backups:
        stream.key.set_value(key)
        stream.count.set_value(count)


def _streams(node: Any, only: Filter = ...) -> list[tuple[Path, RngStream]]:
    """The streams of a node that the filter takes, one for each count: some share it under two names."""
    predicate = to_predicate(only)
    found: dict[int, tuple[Path, RngStream]] = {}
    for path, x in iter_graph(node):
        if isinstance(x, RngStream) and predicate(path, x):
            found.setdefault(id(x.count), (path, x))
    return list(found.values())


def _replace(targets: list[tuple[Path, RngStream, Callable[[RngStream], RngStream]]]) -> SplitBackups:
    """Replace key and count of each stream by those of the stream that a function makes from it."""
    for path, stream, _ in targets:
        if stream.key.ndim:
            raise ValueError(
                f"The RngStream at {format_path(path)} is split into lanes of shape {stream.key.shape} already. Put it "
                "back first (leave the `with nnx.split_rngs(...)` block, or call nnx.restore_rngs), or split by a "
                "shape: splits=(4, 2)."
            )
    backups = SplitBackups()
    for _, stream, make in targets:
        key = stream.key.get_value()
        made = make(stream)
        backups.append(StreamBackup(stream, key, stream.count.get_value()))
        stream.key.set_value(made.key.get_value())
        stream.count.set_value(made.count.get_value())
    return backups


def _while_called(prepare: Callable[[Any], SplitBackups]) -> Callable[[Callable], Callable]:
    """A decorator that prepares the streams in the arguments and puts them back after the call."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with prepare((args, kwargs)):
                return function(*args, **kwargs)

        return wrapper

    return decorate


def split_rngs(node: Any = MISSING, /, *, splits: Shape, only: Filter = ..., squeeze: bool = False) -> Any:
    """Split the streams of a node into lanes, in place; or decorate a function to do so to its arguments.

    Args:
      node: any object that holds streams; without it the result is a decorator.
      splits: number of lanes, or their shape.
      only: filter of the streams; the others are left as they are.
      squeeze: with ``splits=1``, leave out the axis of length 1.

    Returns:
      SplitBackups, a context manager that puts the streams back; or a decorator that does so after the call.

    >>> import nnxlib as nnx
    >>> rngs = nnx.Rngs(params=0, dropout=1)
    >>> with nnx.split_rngs(rngs, splits=5, only='params'):
    ...   rngs.params.key.shape, rngs.dropout.key.shape
    ((5,), ())
    >>> rngs.params.key.shape, rngs.params.count.value
    ((), Array(1, dtype=uint32))

    Raises:
      ValueError: if a stream is split already, or ``squeeze`` is set with other splits.
    """
    if node is MISSING:
        return _while_called(lambda args: split_rngs(args, splits=splits, only=only, squeeze=squeeze))
    if squeeze and splits != 1:
        raise ValueError(f"squeeze=True is only supported for splits=1, but got splits={splits}.")

    def make(stream: RngStream) -> RngStream:
        lanes = stream.split(splits)
        return RngStream(lanes.key.get_value()[0], tag=stream.tag) if squeeze else lanes

    return _replace([(path, stream, make) for path, stream in _streams(node, only)])


def fork_rngs(node: Any = MISSING, /, *, split: Shape | Mapping[Filter, Shape | None] | None = None) -> Any:
    """Fork the streams of a node in place; or decorate a function to do so to its arguments.

    Args:
      node: any object that holds streams; without it the result is a decorator.
      split: into how many lanes, as an int or a shape, streams are split rather than forked; or a mapping from filters
        to these or ``None`` (only fork), where the first match counts and streams without a match are left alone.

    Returns:
      SplitBackups, a context manager that puts the streams back; or a decorator that does so after the call.

    >>> import nnxlib as nnx
    >>> rngs = nnx.Rngs(params=0, dropout=1)
    >>> with nnx.fork_rngs(rngs, split={'params': 5, 'dropout': None}):
    ...   rngs.params.key.shape, rngs.dropout.count.value
    ((5,), Array(0, dtype=uint32))

    Raises:
      ValueError: if a stream is split already.
    """
    if node is MISSING:
        return _while_called(lambda args: fork_rngs(args, split=split))
    rules = split if isinstance(split, Mapping) else {...: split}
    predicates = filters_to_predicates(tuple(rules))
    targets = []
    for path, stream in _streams(node, list(rules)):
        shape = next(shape for takes, shape in zip(predicates, rules.values()) if takes(path, stream))
        targets.append((path, stream, functools.partial(RngStream.fork, split=shape)))
    return _replace(targets)


def reseed(node: Any, /, *, policy: Policy = "scalars_only", **stream_keys: RngValue) -> None:
    """Start the streams of a node anew from given seeds or keys.

    All streams with the tag ``name`` get keys drawn from the seed given as ``name=seed``, one after the other in the
    order of their paths, so that the Dropouts of a model differ as before.

    Args:
      node: any object that holds streams.
      policy: what to do with streams that are split into lanes: ``'scalars_only'`` refuses them, ``'match_shape'``
        splits the new key into as many; or a function ``(path, key, shape) -> key`` that makes the key of every stream.
      **stream_keys: seed or key by the tag of the streams.

    >>> import nnxlib as nnx
    >>> model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0)))
    >>> nnx.reseed(model, dropout=42)
    >>> model[0].rngs() == nnx.RngStream(42, tag='dropout').fork()()
    Array(True, dtype=bool)

    Raises:
      ValueError: if no stream has one of the tags, naming those there are; if a value is not a key; or if a stream is
        split and the policy does not allow for it. Nothing is changed then.
    """
    chosen = _streams(node, lambda path, stream: stream.tag in stream_keys)
    if missing := stream_keys.keys() - {stream.tag for _, stream in chosen}:
        tags = Counter(stream.tag for _, stream in _streams(node))
        known = ", ".join(f"{tag!r} ({n})" for tag, n in sorted(tags.items())) or "none"
        raise ValueError(
            f"No RngStream of this object has the tag {min(missing)!r}, so there is nothing to reseed; the tags are: "
            f"{known}. A stream that was looked up in an Rngs without one of that name has the tag 'default'."
        )
    sources = {name: RngStream(as_key(key), tag=name) for name, key in stream_keys.items()}
    roots = [sources[stream.tag].fork().key.get_value() for _, stream in chosen]
    keys = [_new_key(path, root, stream.key.shape, policy) for (path, stream), root in zip(chosen, roots)]
    for (_, stream), key in zip(chosen, keys):
        stream.key.set_value(key)
        stream.count.set_value(jnp.zeros(key.shape, jnp.uint32))


def _new_key(path: Path, key: jax.Array, shape: tuple[int, ...], policy: Policy) -> jax.Array:
    if callable(policy):
        return policy(path, key, shape)
    if not shape:
        return key
    if policy == "match_shape":
        return jax.random.split(key, shape)
    raise ValueError(
        f"Cannot reseed the stream at {format_path(path)}: it is split into lanes of shape {shape}. If each lane is to "
        "have a key of its own pass policy='match_shape', else a function (path, key, shape) -> key."
    )
