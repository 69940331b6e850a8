"""The random streams inside a model: split, fork or reseed those that a filter takes, in place, and restore them.

A transform over an axis needs a stream per slice; afterwards the model should have its one stream again, further along.
:func:`split_rngs` and :func:`fork_rngs` change the streams of a node in place and return :class:`SplitBackups`, a
context manager that restores them. :func:`with_rngs` does not change the node, but returns a copy with other streams
around the same Variables. All three are decorators, too. As in ``rngs.py``, every split and fork consumes a key of the
stream, and a restored stream keeps the count that was reached, so no key comes twice.

Everything is checked before the first stream is changed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp

from .annotations import NamedTuple
from .data import is_node
from .errors import Path, UsageError, format_path
from .filters import Everything, Filter, filters_to_predicates, to_predicate
from .iteration import iter_objects
from .missing import MISSING
from .ops import clone
from .rngs import RngStream, RngValue, Shape, as_key, as_lanes, implementation_of, shapes_by_filter
from .tracing import UserLine, boundary

F = TypeVar("F", bound=Callable[..., Any])
Policy = Literal["scalars_only", "match_shape"] | Callable[[Path, jax.Array, tuple[int, ...]], jax.Array]


class StreamBackup(NamedTuple):
    """A stream, and the key and count that it gets back; if ``count`` is None, the stream keeps its own."""

    stream: RngStream
    key: jax.Array
    count: jax.Array | None


class SplitBackups(list[StreamBackup]):
    """What :func:`nnxlib.split_rngs` and :func:`nnxlib.fork_rngs` replaced; as a ``with`` block it puts that back."""

    def __enter__(self) -> SplitBackups:
        return self

    def __exit__(self, *_: object) -> None:
        restore_rngs(self)


def restore_rngs(backups: Iterable[StreamBackup], /) -> None:
    """Put the keys and counts of streams back; a count is the one reached when the stream was split or forked.

    >>> import nnxlib as nnx
    >>> rngs = nnx.Rngs(0)
    >>> backups = nnx.split_rngs(rngs, splits=3)
    >>> split = rngs.default.key.shape
    >>> nnx.restore_rngs(backups)
    >>> split, rngs.default.key.shape
    ((3,), ())
    """
    backups = list(backups)
    for stream, _, _ in backups:
        _check_writable(stream)
    for stream, key, count in backups:
        stream.key.set_value(key)
        if count is not None:
            stream.count.set_value(count)


def backup_keys(node: Any, /) -> SplitBackups:
    """Return the keys of all streams of a node, for :func:`nnxlib.restore_rngs`; the streams go on counting.

    >>> import nnxlib as nnx
    >>> from nnxlib.rnglib import backup_keys
    >>> rngs = nnx.Rngs(0)
    >>> backups = backup_keys(rngs)
    >>> nnx.reseed(rngs, default=1)
    >>> nnx.restore_rngs(backups)
    >>> bool(rngs.default.key.value == jax.random.key(0))
    True
    """
    return SplitBackups([StreamBackup(stream, stream.key.get_value(), None) for _, stream in _streams(node)])


def _streams(node: Any, only: Filter = ...) -> list[tuple[Path, RngStream]]:
    """The streams of a node that the filter takes, one for each count: two names may share one."""
    predicate = to_predicate(only)
    found: dict[int, tuple[Path, RngStream]] = {}
    for path, x in iter_objects(node):
        if isinstance(x, RngStream) and predicate(path, x):
            found.setdefault(id(x.count), (path, x))
    return list(found.values())


def _replace(targets: list[tuple[Path, RngStream, Callable[[RngStream], RngStream]]]) -> SplitBackups:
    """Replace key and count of each stream by those of the stream that a function makes from it."""
    for path, stream, _ in targets:
        _check_whole(path, stream)
        _check_writable(stream)
    made = [make(stream) for _, stream, make in targets]  # which may fail, for a key without a value
    backups = SplitBackups([StreamBackup(x, x.key.get_value(), x.count.get_value()) for _, x, _ in targets])
    for (_, stream, _), new in zip(targets, made, strict=True):
        stream.key.set_value(new.key.get_value())
        stream.count.set_value(new.count.get_value())
    return backups


def _check_writable(stream: RngStream) -> None:
    stream.key.check_writable()
    stream.count.check_writable()


def _check_whole(path: Path, stream: RngStream) -> None:
    if stream.key.ndim:
        raise UsageError(
            f"The RngStream at {format_path(path)} is split into lanes of shape {stream.key.shape} already. In a "
            "stack of layers, each has keys of its own, and needs no other split. Else put it back first (leave the "
            "`with nnx.split_rngs(...)` block, or call nnx.restore_rngs), or split by a shape: splits=(4, 2)."
        )


class _Call(NamedTuple):
    """The arguments of a call; so the path of a stream reads ``args[0].dropout.rngs``."""

    args: tuple
    kwargs: dict[str, Any]


def _is_for_calls(node: Any) -> bool:
    """Whether there is no node, or a function in its place: then the streams of the arguments of a call are meant."""
    return node is MISSING or (callable(node) and not is_node(node) and jax.tree_util.all_leaves([node]))


def _decorated(node: Any, call: Callable[[Callable, tuple, dict[str, Any]], Any]) -> Callable:
    """The function decorated, or a decorator: each call is ``call(function, args, kwargs)``."""

    def decorate(function: Callable) -> Callable:
        return functools.wraps(function)(lambda *args, **kwargs: call(function, args, kwargs))

    return decorate if node is MISSING else decorate(node)


def _while_called(node: Any, prepare: Callable[[Any], SplitBackups]) -> Callable:
    """The function decorated, or a decorator, to prepare the streams in the arguments and put them back afterwards."""

    def call(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        with prepare(_Call(args, kwargs)):
            return function(*args, **kwargs)

    return _decorated(node, call)


@overload
def split_rngs(*, splits: Shape, only: Filter = ..., squeeze: bool = False) -> Callable[[F], F]: ...
@overload
def split_rngs(node: Any, /, *, splits: Shape, only: Filter = ..., squeeze: bool = False) -> Any: ...
@boundary
def split_rngs(node: Any = MISSING, /, *, splits: Shape, only: Filter = ..., squeeze: bool = False) -> Any:
    """Split the streams of a node into lanes, in place; or decorate a function to do so to its arguments.

    Args:
      node: any object that holds streams; or a function to decorate; without either the result is a decorator.
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
    if _is_for_calls(node):
        return _while_called(node, lambda args: split_rngs(args, splits=splits, only=only, squeeze=squeeze))
    if squeeze and splits != 1:
        raise UsageError(f"squeeze=True is only supported for splits=1, but got splits={splits}.")

    def make(stream: RngStream) -> RngStream:
        lanes = stream.split(splits)
        return RngStream(lanes.key.get_value()[0], tag=stream.tag) if squeeze else lanes

    return _replace([(path, stream, make) for path, stream in _streams(node, only)])


@overload
def fork_rngs(*, split: Shape | Mapping[Filter, Shape | None] | None = None) -> Callable[[F], F]: ...
@overload
def fork_rngs(node: Any, /, *, split: Shape | Mapping[Filter, Shape | None] | None = None) -> Any: ...
@boundary
def fork_rngs(node: Any = MISSING, /, *, split: Shape | Mapping[Filter, Shape | None] | None = None) -> Any:
    """Fork the streams of a node in place; or decorate a function to do so to its arguments.

    Args:
      node: any object that holds streams; or a function to decorate; without either the result is a decorator.
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
    if _is_for_calls(node):
        return _while_called(node, lambda args: fork_rngs(args, split=split))
    shape_for, streams = shapes_by_filter(split), _streams(node, list(split) if isinstance(split, Mapping) else ...)
    return _replace([(path, x, functools.partial(RngStream.fork, split=shape_for(path, x))) for path, x in streams])


@boundary
def with_rngs(
    node: Any = MISSING,
    /,
    *,
    split: Shape | Mapping[Filter, Shape] | None = None,
    fork: Filter | Sequence[Filter] = None,
    broadcast: Shape | Mapping[Filter, Shape] | None = None,
    only: Filter = True,
) -> Any:
    """Return a copy of a node with other streams in it; or decorate a function to get such copies of its arguments.

    The copy has nodes of its own around the *same* Variables, so what is written to a Param in it is written to the
    original. Each stream that is replaced uses up one key of the original; nothing has to be put back.

    Args:
      node: a Module, an Rngs, or a pytree of these; or a function to decorate; without either the result is a
        decorator.
      split: into how many lanes streams are split, as an int or a shape; or a mapping from filters to these.
      fork: filter of the streams that are forked; ``...`` for those that are neither split nor broadcast.
      broadcast: as ``split``, for lanes that draw alike.
      only: filter of the streams that may be replaced; all others, and those that no rule takes, are shared with the
        original.

    >>> import nnxlib as nnx
    >>> rngs = nnx.Rngs(params=0, dropout=1)
    >>> lanes = nnx.with_rngs(rngs, split={'params': 4}, fork='dropout')
    >>> lanes.params.key.shape, lanes.dropout.key.shape, rngs.params.key.shape, rngs.params.count.value
    ((4,), (), (), Array(1, dtype=uint32))

    As a decorator it hands the lanes of a Module's streams to a transform:

    >>> @nnx.with_rngs(split=4)
    ... @nnx.vmap
    ... def make(rngs):
    ...   return nnx.Linear(2, 3, rngs=rngs)
    >>> make(rngs).kernel.shape
    (4, 2, 3)

    Raises:
      ValueError: if a stream that is to be replaced is split already, or two rules other than ``...`` take it; no key
        has been used up then.
    """
    if _is_for_calls(node):

        def call(function: Callable, *given: Any) -> Any:
            args, kwargs = with_rngs(given, split=split, fork=fork, broadcast=broadcast, only=only)
            return function(*args, **kwargs)

        return _decorated(node, call)
    forks = fork if isinstance(fork, Sequence) and not isinstance(fork, str) else (fork,)
    rules = {
        "split": _rules(split, RngStream.split),
        "broadcast": _rules(broadcast, RngStream.broadcast),
        "fork": [(takes, RngStream.fork) for takes in filters_to_predicates(forks)],
    }
    chosen, copied = to_predicate(only), clone(node, variables=False)
    streams = [(path, x) for path, x in iter_objects(copied) if isinstance(x, RngStream)]
    makers: dict[int, Callable[[], RngStream]] = {}  # by count: two names may share one
    for path, stream in streams:
        make = _rule_for(path, stream, rules) if chosen(path, stream) else None
        if make is not None:
            _check_whole(path, stream)
            _check_writable(stream)
            makers.setdefault(id(stream.count), functools.partial(make, stream))
    made = {count: make() for count, make in makers.items()}
    for _, stream in streams:
        if id(stream.count) in made:
            new = made[id(stream.count)]
            stream.key, stream.count = new.key, new.count
    return copied


_Rules = list[tuple[Callable, Callable]]


def _rules(shapes: Any, act: Callable[..., RngStream]) -> _Rules:
    given = shapes if isinstance(shapes, Mapping) else {} if shapes is None else {...: shapes}
    pairs = zip(filters_to_predicates(tuple(given)), given.values(), strict=True)
    return [(takes, functools.partial(act, k=as_lanes(shape))) for takes, shape in pairs]


def _rule_for(path: Path, stream: RngStream, rules: Mapping[str, _Rules]) -> Callable | None:
    """What the first rule that takes a stream does with it, or None; two that take it other than by `...` clash."""
    found = {name: next((rule for rule in given if rule[0](path, stream)), None) for name, given in rules.items()}
    matches = {name: rule for name, rule in found.items() if rule is not None}
    explicit = [f"{name} ({rule[0]!r})" for name, rule in matches.items() if rule[0] != Everything()]
    if len(explicit) > 1:
        raise UsageError(
            f"The RngStream at {format_path(path)} is taken by multiple rules: {' and '.join(explicit)}. Let one of "
            "the filters leave it out; only `...` gives way to the others."
        )
    return next((make for _, make in matches.values()), None)


@boundary
def reseed(node: Any, /, *, policy: Policy = "scalars_only", **stream_keys: RngValue | RngStream) -> None:
    """Start the streams of a node anew from given seeds, keys or streams.

    All streams with the tag ``name`` get keys drawn from the seed given as ``name=seed``, one after the other in the
    order of their paths, so that the Dropouts of a model differ as before. A seed, or a raw key, gives each stream a
    key of the implementation that it has (such as ``'rbg'``); a typed key brings its own.

    Args:
      node: any object that holds streams; those of an abstract model (:func:`nnxlib.eval_shape`) get keys, too.
      policy: what to do with streams that are split into lanes: ``'scalars_only'`` refuses them, ``'match_shape'``
        splits the new key alike; or a function ``(path, key, shape) -> key`` that makes the key (or seed, or raw key)
        of every stream.
      **stream_keys: seed or key by the tag of the streams; or a stream to draw their keys from.

    >>> import nnxlib as nnx
    >>> model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0)))
    >>> nnx.reseed(model, dropout=42)
    >>> model[0].rngs() == nnx.RngStream(42, tag='dropout').fork()()
    Array(True, dtype=bool)

    A tag that no stream has is a warning, which names those there are.

    Raises:
      ValueError: if a value is not a key (for a tag that no stream has: if it is a bool), or is a raw key of another
        implementation than the stream's; or if a stream is split, and the policy refuses that. Nothing is changed then.
    """
    chosen = _streams(node, lambda path, stream: stream.tag in stream_keys)
    if missing := stream_keys.keys() - {stream.tag for _, stream in chosen}:
        tags = Counter(stream.tag for _, stream in _streams(node))
        known = ", ".join(f"{tag!r} ({n})" for tag, n in sorted(tags.items())) or "none"
        tag = min(missing, key=lambda tag: (not isinstance(stream_keys[tag], bool), tag))
        text = (
            f"No RngStream of this object has the tag {tag!r}, so nothing is reseeded with it; the tags are: {known}. "
            "A stream that was looked up in an Rngs without one of that name has the tag 'default'."
        )
        if isinstance(stream_keys[tag], bool):  # it is no seed, but an option of another function, say
            raise UsageError(text)
        UserLine().warn(text)
    for path, stream in chosen:  # before a stream among `stream_keys` is drawn from
        _check_writable(stream)
        if stream.key.ndim and not callable(policy) and policy != "match_shape":
            raise UsageError(_SPLIT.format(path=format_path(path), shape=stream.key.shape))
    kinds = [(stream.tag, implementation_of(stream.key.get_value())) for _, stream in chosen]
    sources = {
        (tag, impl): x if isinstance(x := stream_keys[tag], RngStream) else RngStream(as_key(x, impl), tag=tag)
        for tag, impl in dict.fromkeys(kinds)
    }
    roots = [sources[kind].fork().key.get_value() for kind in kinds]
    keys = [
        as_key(_new_key(path, root, stream.key.shape, policy), impl)
        for (path, stream), root, (_, impl) in zip(chosen, roots, kinds)
    ]
    for (_, stream), key in zip(chosen, keys):
        stream.key.set_value(key)
        stream.count.set_value(jnp.zeros(key.shape, jnp.uint32))


def _new_key(path: Path, key: jax.Array, shape: tuple[int, ...], policy: Policy) -> jax.Array:
    if callable(policy):
        return policy(path, key, shape)
    return jax.random.split(key, shape) if shape else key


_SPLIT = """\
Cannot reseed the stream at {path}: it is split into lanes of shape {shape}. If each lane is to have a key of its own \
pass policy='match_shape', else a function (path, key, shape) -> key."""
