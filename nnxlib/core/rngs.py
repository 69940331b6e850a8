"""Random streams: keys on demand, and never the same key twice.

A :class:`RngStream` is a *root key* and a *count*. Each draw folds the count into the root key and adds one to the
count. An :class:`Rngs` is a set of named streams; a name it does not have falls back to the stream ``default``.

Why no key comes twice. Think of all keys below a root as a tree: ``child(key, n) = jax.random.fold_in(key, n)``. The
places in it are used up in one order and for one purpose only:

- A stream with root ``K`` and count ``c`` consumes the child ``child(K, c)``, then counts on. This is the only way to
  take a child below ``2**32 - 1``, so each child is consumed once: it is handed to the caller (a draw), or becomes
  the root of one new stream (``fork``, ``copy``), or is cut into the roots of ``k`` new streams (``split``), or is
  the common root of ``k`` lanes that draw alike because that was asked for (``broadcast``).
- A key that was handed out is never a root, and a root is never handed out. So two keys handed out stand at two
  places of the tree, and neither lies below the other.
- ``fold_in(*names)`` starts below ``child(K, 2**32 - 1)``, a child that no draw reaches, and goes down by four words
  of the SHA-256 digest of the names, in an encoding that tells ``("ab", "c")`` from ``("a", "bc")`` and ``1`` from
  ``"1"``. It consumes nothing: the same names give the same stream, whatever was drawn before. That is its purpose,
  and the one case in which asking again gives the same keys again.
- Streams that ``split`` or ``broadcast`` pass through, and streams handed to ``Rngs(...)``, are not copied: the new
  Rngs and the old one hold the same stream and advance the same count.
- Streams of one Rngs that were given the same seed, as in ``Rngs(params=0, dropout=0)``, would be the same tree. One
  keeps it: ``params``, so that parameters are those of flax.nnx, or else ``default`` or the first. The root of each
  further one is folded with its name.

Different children of one key are different keys, with certainty (threefry is a bijection for a fixed key); keys at
places with different parents coincide with the probability of a hash collision, about ``n**2 / 2**65`` for ``n`` keys.
The implementation ``unsafe_rbg`` breaks this: its ``fold_in`` is an exclusive or, so that the order of the steps from
the root does not matter. For it alone the root of a new stream is therefore mixed once more, by ``jax.random.split``.

A stream is not locked: give each thread a fork of its own. ``copy.deepcopy``, ``nnx.clone``, ``nnx.split`` and pickling
take a snapshot of a stream as with any state, and the snapshot continues with the keys that the original continues
with.

The numbers are those of flax.nnx for draws, ``fork``, ``split`` and ``broadcast`` from the same seed.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from .errors import ArgumentError, InvalidRngError, MissingStreamError, Path, UsageError, describe
from .filters import Filter, filters_to_predicates, first_of
from .formulas import full, step
from .objects import Pytree, attributes_of, new_node
from .tracing import Tracer, bits_of
from .variables import RngCount, RngKey, RngState, Variable

P = ParamSpec("P")
R = TypeVar("R")
Shape = int | tuple[int, ...]
RngValue = int | jax.Array

_RESERVED = 0xFFFFFFFF  # the child that no draw reaches; named streams live below it


# --- keys -------------------------------------------------------------------------------------------------------------


@step()
def _draw(key: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The next key of a stream, and the count after it."""
    return jax.random.fold_in(key, count), count + np.uint32(1)


def _as_root(key: jax.Array) -> jax.Array:
    """A consumed key as the root of a new stream; mixed once more for ``unsafe_rbg``, see the top of this file."""
    return jax.random.split(key, 1)[0] if jax.random.key_impl(key) == "unsafe_rbg" else key


@step()
def _descend(key: jax.Array, words: jax.Array | np.ndarray) -> jax.Array:
    """Fold the words into the key one after the other; each key of an array of keys by itself."""

    def one(key: jax.Array) -> jax.Array:
        return _as_root(functools.reduce(jax.random.fold_in, words, key))

    for _ in range(key.ndim):
        one = jax.vmap(one)
    return one(key)


def _digest(purpose: bytes, static: tuple[str | int, ...]) -> np.ndarray:
    """The reserved child, then 128 bits of SHA-256 over the values, each with its type and length in front."""
    hashed = hashlib.sha256(purpose)
    for value in static:
        if isinstance(value, str):
            kind, text = b"s", value.encode()
        elif isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tracer):
            raise ArgumentError(
                f"fold_in takes strings and ints that are known while tracing, but got {describe(value)}. To fold in a "
                "traced number, use jax.random.fold_in on a key: nnx.Rngs(jax.random.fold_in(rngs(), step))."
            )
        else:
            kind, text = b"i", str(operator.index(value)).encode()
        hashed.update(kind + len(text).to_bytes(8, "big") + text)
    words = np.frombuffer(hashed.digest()[:16], ">u4").astype(np.uint32)
    return np.concatenate([np.array([_RESERVED], np.uint32), words])


def as_key(value: Any, impl: Any = None) -> jax.Array:
    """Make a typed PRNG key from a seed, a typed key or a raw ``uint32`` key; arrays of keys are kept as they are.

    Seeds and raw keys become keys of the implementation ``impl`` (default: JAX's).

    >>> import jax
    >>> as_key(0) == jax.random.key(0), as_key(jax.random.PRNGKey(0)) == jax.random.key(0)
    (Array(True, dtype=bool), Array(True, dtype=bool))

    Raises:
      InvalidRngError: if the value is none of these, or a raw key of another implementation.
    """
    if isinstance(value, Variable):
        value = value.get_value()
    is_array = _is_array(value)
    if is_array and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    if is_array and value.ndim > 0 and value.dtype == jnp.uint32:
        return _typed(value, impl)
    if jnp.issubdtype(value.dtype, jnp.integer) and value.ndim == 0 if is_array else type(value) is int:
        return _seeded(value, impl)
    shown = repr(value) if isinstance(value, bool | float | str | None) else describe(value)
    raise InvalidRngError(
        f"Invalid rng value: {shown}. A stream is made from a seed (nnx.Rngs(0)), a key (jax.random.key(0)), a raw "
        "uint32 key (jax.random.PRNGKey(0)), or another RngStream."
    )


def implementation_of(key: Any) -> Any:
    """The implementation of a key, or of the shape of one, such as ``'threefry2x32'``."""
    if not isinstance(key, jax.ShapeDtypeStruct):
        return jax.random.key_impl(key)
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def _typed(raw: Any, impl: Any) -> jax.Array:
    try:
        return jax.random.wrap_key_data(raw, impl=impl)
    except TypeError:
        whose = "JAX's default implementation" if impl is None else "the stream's implementation"
        raise InvalidRngError(
            f"A raw key of shape {raw.shape} is none of {whose}, "
            f"{jax.random.key_impl(jax.random.key(0, impl=impl))!r}. Say what it is: "
            "jax.random.wrap_key_data(key, impl='rbg')."
        ) from None


def _seeded(seed: Any, impl: Any) -> jax.Array:
    try:
        return jax.random.key(seed, impl=impl)
    except OverflowError:
        raise InvalidRngError(f"A seed is a number of 64 bits at most, but got {seed}.") from None


def as_lanes(k: Any) -> tuple[int, ...]:
    """The shape of the lanes that ``k`` gives, an int or a sequence of ints."""
    try:
        shape = tuple([operator.index(size) for size in (k if isinstance(k, Sequence) else (k,))])
    except TypeError:
        shape = (-1,)
    if min(shape, default=0) < 0:
        raise UsageError(f"The lanes of a stream are given by their number or shape, such as 5 or (2, 3); got {k!r}.")
    return shape


# --- samplers ---------------------------------------------------------------------------------------------------------


def _sampler(sample: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    @functools.wraps(sample)
    def method(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return sample(self(), *args, **kwargs)

    method.__doc__ = (
        f"Call :func:`jax.random.{sample.__name__}` with a fresh key; the arguments are those after the key."
    )
    return method


class KeylessInitializer:
    """An initializer that draws its key from a stream: ``rngs.lecun_normal()((3, 4))``."""

    __slots__ = ("draw", "initializer")

    def __init__(self, draw: Callable[[], jax.Array], initializer: Callable[..., jax.Array]):
        self.draw, self.initializer = draw, initializer

    def __call__(self, shape: tuple[int, ...], dtype: Any = None, **kwargs: Any) -> jax.Array:
        """Draw an array of ``shape`` and ``dtype`` (default: JAX's default float)."""
        args = (shape,) if dtype is None else (shape, dtype)
        return self.initializer(self.draw(), *args, **kwargs)


def _initializer(make: Callable[P, Any]) -> Callable[Concatenate[Any, P], KeylessInitializer]:
    @functools.wraps(make)
    def method(self: Any, *args: P.args, **kwargs: P.kwargs) -> KeylessInitializer:
        return KeylessInitializer(self, make(*args, **kwargs))

    method.__doc__ = f"Return :func:`jax.nn.initializers.{make.__name__}` as a function of (shape, dtype) only."
    return method


class _Samplers:
    """Every sampler of jax.random and every initializer that has no sampler's name, each with a fresh key."""

    __slots__ = ()

    ball = _sampler(jax.random.ball)
    bernoulli = _sampler(jax.random.bernoulli)
    beta = _sampler(jax.random.beta)
    binomial = _sampler(jax.random.binomial)
    bits = _sampler(jax.random.bits)
    categorical = _sampler(jax.random.categorical)
    cauchy = _sampler(jax.random.cauchy)
    chisquare = _sampler(jax.random.chisquare)
    choice = _sampler(jax.random.choice)
    dirichlet = _sampler(jax.random.dirichlet)
    double_sided_maxwell = _sampler(jax.random.double_sided_maxwell)
    exponential = _sampler(jax.random.exponential)
    f = _sampler(jax.random.f)
    gamma = _sampler(jax.random.gamma)
    generalized_normal = _sampler(jax.random.generalized_normal)
    geometric = _sampler(jax.random.geometric)
    gumbel = _sampler(jax.random.gumbel)
    laplace = _sampler(jax.random.laplace)
    loggamma = _sampler(jax.random.loggamma)
    logistic = _sampler(jax.random.logistic)
    lognormal = _sampler(jax.random.lognormal)
    maxwell = _sampler(jax.random.maxwell)
    multinomial = _sampler(jax.random.multinomial)
    multivariate_normal = _sampler(jax.random.multivariate_normal)
    normal = _sampler(jax.random.normal)
    orthogonal = _sampler(jax.random.orthogonal)
    pareto = _sampler(jax.random.pareto)
    permutation = _sampler(jax.random.permutation)
    poisson = _sampler(jax.random.poisson)
    rademacher = _sampler(jax.random.rademacher)
    randint = _sampler(jax.random.randint)
    rayleigh = _sampler(jax.random.rayleigh)
    t = _sampler(jax.random.t)
    triangular = _sampler(jax.random.triangular)
    truncated_normal = _sampler(jax.random.truncated_normal)
    uniform = _sampler(jax.random.uniform)
    wald = _sampler(jax.random.wald)
    weibull_min = _sampler(jax.random.weibull_min)

    delta_orthogonal = _initializer(initializers.delta_orthogonal)
    glorot_normal = _initializer(initializers.glorot_normal)
    glorot_uniform = _initializer(initializers.glorot_uniform)
    he_normal = _initializer(initializers.he_normal)
    he_uniform = _initializer(initializers.he_uniform)
    kaiming_normal = _initializer(initializers.kaiming_normal)
    kaiming_uniform = _initializer(initializers.kaiming_uniform)
    lecun_normal = _initializer(initializers.lecun_normal)
    lecun_uniform = _initializer(initializers.lecun_uniform)
    variance_scaling = _initializer(initializers.variance_scaling)
    xavier_normal = _initializer(initializers.xavier_normal)
    xavier_uniform = _initializer(initializers.xavier_uniform)


# --- streams ----------------------------------------------------------------------------------------------------------


class RngStream(_Samplers, Pytree):
    """One stream of keys: a root ``key``, how many keys it has given out (``count``, uint32), and its name (``tag``).

    Args:
      key: a seed, a typed or raw key, or an array of keys (then the stream is split, see :meth:`split`).
      tag: the name of the stream, which filters select by: ``nnx.state(model, 'dropout')``.

    >>> import nnxlib as nnx, jax
    >>> stream = nnx.RngStream(0, tag='noise')
    >>> stream() == jax.random.fold_in(jax.random.key(0), 0), stream.count.value
    (Array(True, dtype=bool), Array(1, dtype=uint32))
    >>> stream.normal((2, 3)).shape
    (2, 3)
    """

    key: RngKey[jax.Array]
    count: RngCount[jax.Array]

    @property
    def type(self) -> type:
        """The type by which filters take a stream and its Variables, as in ``split_rngs(..., only=nnx.RngState)``."""
        return RngState

    def __init__(self, key: RngValue, *, tag: str):
        root = as_key(key)
        self.tag = tag
        self.key = RngKey(root, tag=tag)
        self.count = RngCount(full(0, root.shape, np.uint32), tag=tag)

    def __call__(self) -> jax.Array:
        """Return the next key.

        Raises:
          ValueError: if the stream is split into lanes; draw from it inside ``nnx.vmap``. Or if it has no key, only its
            shape.
          TraceContextError: inside a JAX transformation that the stream was not passed to.
        """
        key = self.key.get_value()
        if key.ndim:
            raise UsageError(_SPLIT.format(tag=self.tag, shape=key.shape))
        try:
            drawn, count = _draw(key, self.count.get_value())
        except TypeError:
            if isinstance(key, jax.ShapeDtypeStruct):
                raise UsageError(_NO_KEY.format(tag=self.tag)) from None
            raise
        self.count.set_value(count)
        return drawn

    def split(self, k: Shape) -> RngStream:
        """Return a stream of ``k`` lanes (an int or a shape), each with its own root, for ``nnx.vmap`` over axis 0.

        >>> import nnxlib as nnx
        >>> nnx.RngStream(0, tag='params').split(5).key.shape
        (5,)

        Raises:
          ValueError: if ``k`` is neither a number nor a shape, or the stream is split already.
        """
        shape = as_lanes(k)
        return RngStream(jax.random.split(self(), shape), tag=self.tag)

    def fork(self, *, split: Shape | None = None) -> RngStream:
        """Return a new stream whose root is the next key of this one; with ``split``, the same as :meth:`split`."""
        return RngStream(_as_root(self()), tag=self.tag) if split is None else self.split(split)

    def copy(self) -> RngStream:
        """Return an independent stream: a :meth:`fork`, since a literal copy would repeat the keys."""
        return self.fork()

    def broadcast(self, k: Shape) -> RngStream:
        """Return a stream of ``k`` lanes (an int or a shape) that all draw the same keys, none of them drawn before."""
        shape = as_lanes(k)
        return RngStream(jnp.broadcast_to(_as_root(self()), shape), tag=self.tag)

    def fold_in(self, *static: str | int) -> RngStream:
        """Return the stream that belongs to these names, independent of what was drawn before.

        The same names give the same stream each time; different names, or the same ones in another order or grouping,
        give unrelated streams. Nothing is consumed.

        >>> import nnxlib as nnx
        >>> a, b = nnx.RngStream(0, tag='params'), nnx.RngStream(0, tag='params')
        >>> _ = b()
        >>> a.fold_in('encoder', 3)() == b.fold_in('encoder', 3)()
        Array(True, dtype=bool)

        Raises:
          TypeError: for anything but strings and ints, or for no name at all.
        """
        if not static:
            raise ArgumentError("fold_in needs at least one name, a string or an int: rngs.fold_in('encoder', 3).")
        return RngStream(_descend(self.key.get_value(), _digest(b"fold_in", static)), tag=self.tag)


_NO_KEY = """\
The RngStream {tag!r} has no key, only the shape of one, as nnx.eval_shape makes it. Give it one, by \
nnx.reseed(model, {tag}=0) or nnx.update(model, state), or ask for shapes only: nnx.eval_shape(function, model, ...)."""

_SPLIT = """\
The RngStream {tag!r} is split into lanes of shape {shape}, so it has no single next key.
Draw from it where each lane is by itself:

    @nnx.vmap
    def make(rngs):
        return Model(rngs=rngs)
    make(rngs.split(5))"""


def _renamed(stream: RngStream, tag: str) -> RngStream:
    """A stream under another name that shares root and count with ``stream``, so that they never draw the same key."""
    if stream.tag == tag:
        return stream
    view = new_node(RngStream)
    view.tag, view.key, view.count = tag, stream.key, stream.count
    return view


class Rngs(_Samplers, Pytree):
    """A set of named random streams, made from seeds or keys.

    Args:
      default: seed, key or stream of the stream ``default``, which answers for every name that has no stream of its
        own; or a mapping from names to these; or another Rngs, whose streams are then shared.
      **rngs: seed, key or stream by name.

    >>> import nnxlib as nnx
    >>> rngs = nnx.Rngs(0, params=1)
    >>> rngs.params() == nnx.Rngs(params=1).params()
    Array(True, dtype=bool)
    >>> rngs.dropout is rngs.default, list(rngs), 'params' in rngs
    (True, ['params', 'default'], True)
    >>> rngs.normal((2, 3)).shape, rngs.params.uniform((4,)).shape, rngs.lecun_normal()((3, 4)).shape
    ((2, 3), (4,), (3, 4))

    Streams that were given the same seed are told apart by their names:

    >>> rngs = nnx.Rngs(params=0, dropout=0)
    >>> rngs.params() == rngs.dropout()
    Array(False, dtype=bool)

    Raises:
      ValueError: for a value that is neither seed nor key nor stream, and for a name that starts with an underscore.
      AttributeError, KeyError: by ``rngs.name`` and ``rngs['name']`` if there is neither such a stream nor ``default``.
    """

    def __init__(
        self,
        default: RngValue | RngStream | Mapping[str, RngValue | RngStream] | Rngs | None = None,
        **rngs: RngValue | RngStream,
    ):
        if isinstance(default, Rngs):
            rngs = {**default._streams(), **rngs}
        elif isinstance(default, Mapping):
            rngs = {**default, **rngs}
        elif default is not None:
            rngs["default"] = default
        for name in rngs:
            if not isinstance(name, str) or name.startswith("_"):
                raise UsageError(f"A stream needs a name that does not start with an underscore, but got {name!r}.")
        for name, stream in _make_streams(rngs).items():
            setattr(self, name, stream)

    def _streams(self) -> dict[str, RngStream]:
        return {name: value for name, value in attributes_of(self).items() if isinstance(value, RngStream)}

    def __getattr__(self, name: str) -> RngStream:
        default = None if name.startswith("_") else attributes_of(self).get("default")
        if default is None:
            raise MissingStreamError(self._missing(name))
        return default

    def __getitem__(self, name: str) -> RngStream:
        return getattr(self, name)

    def _missing(self, name: str) -> str:
        names = ", ".join(map(repr, self._streams())) or "none"
        if name == "default":
            return f"No RngStream named 'default' found in Rngs; the streams are: {names}. Write nnx.Rngs(seed)"
        return (
            f"No RngStream named {name!r} found in Rngs, and no 'default' to fall back to; the streams are: {names}. "
            f"Write nnx.Rngs({name}=seed), or give a default: nnx.Rngs(seed)"
        )

    def __call__(self) -> jax.Array:
        """Return the next key of the stream ``default``."""
        return self.default()

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams())

    def __len__(self) -> int:
        return len(self._streams())

    def __contains__(self, name: Any) -> bool:
        return name in self._streams()

    def items(self) -> Iterator[tuple[str, RngStream]]:
        """Iterate over the pairs of name and stream."""
        return iter(self._streams().items())

    def split(self, k: Shape | Mapping[Filter, Shape | None]) -> Rngs:
        """Return an Rngs whose streams are split into ``k`` lanes, for ``nnx.vmap`` over the leading axes.

        Args:
          k: an int or a shape, for all streams; or a mapping from filters to these, where the first match counts.
            Streams with ``None`` or without a match are passed through: both Rngs hold the same stream.

        >>> import nnxlib as nnx
        >>> rngs = nnx.Rngs(params=0, dropout=1)
        >>> lanes = rngs.split({'params': 5})
        >>> lanes.params.key.shape, lanes.dropout is rngs.dropout
        ((5,), True)
        """
        return _map_streams(self, k, RngStream.split, passed=lambda stream: stream)

    def broadcast(self, k: Shape | Mapping[Filter, Shape | None] | None) -> Rngs:
        """Return an Rngs whose streams have ``k`` lanes that draw alike; ``k`` as in :meth:`split`."""
        return _map_streams(self, k, RngStream.broadcast, passed=lambda stream: stream)

    def fork(self, /, *, split: Shape | Mapping[Filter, Shape | None] | None = None) -> Rngs:
        """Return an independent Rngs: each stream forked, or split into lanes where ``split`` says so.

        ``split`` is an int, a shape or a mapping from filters to these, as in :meth:`split`.

        >>> import nnxlib as nnx
        >>> rngs = nnx.Rngs(0)
        >>> child = rngs.fork()
        >>> child() == rngs()
        Array(False, dtype=bool)
        """
        return _map_streams(self, split, RngStream.split, passed=RngStream.fork)

    def copy(self) -> Rngs:
        """Return an independent Rngs with the same names: :meth:`fork`, since a literal copy would repeat the keys."""
        return self.fork()

    def fold_in(self, *static: str | int) -> Rngs:
        """Return the streams that belong to these names, whatever was drawn before; see :meth:`RngStream.fold_in`.

        >>> import nnxlib as nnx
        >>> rngs = nnx.Rngs(0)
        >>> first = rngs.fold_in('decoder', 1).params()
        >>> _ = rngs.params()
        >>> first == rngs.fold_in('decoder', 1).params()
        Array(True, dtype=bool)
        """
        return Rngs({name: stream.fold_in(*static) for name, stream in self._streams().items()})


def _make_streams(values: Mapping[str, RngValue | RngStream]) -> dict[str, RngStream]:
    """Make one stream per name; roots of equal seeds are told apart by name."""
    given = {name: value for name, value in values.items() if isinstance(value, RngStream)}
    roots = {name: as_key(value) for name, value in values.items() if name not in given}
    taken: set[Hashable] = set()
    all_small = all(_is_small(values[name]) for name in roots)
    first = [name for name in ("params", "default") if name in roots]
    for name in (*first, *(name for name in roots if name not in first)) if len(roots) > 1 else ():
        root = roots[name]
        seed = _fingerprint(values[name], root, all_small)
        if seed in taken:
            roots[name] = _descend(root, _digest(b"stream", (name,)))
        taken.add(seed)
    return {name: _renamed(given[name], name) if name in given else RngStream(roots[name], tag=name) for name in values}


def _is_small(seed: Any) -> bool:
    """Whether this is a small number: no two of these make the same key."""
    return type(seed) is int and 0 <= seed < 1 << 31


def _fingerprint(value: Any, root: jax.Array, all_small: bool) -> Hashable:
    """What tells seeds apart: the key's bits; where they are traced, the tracer itself.

    Small numbers are told apart by themselves, since the bits would have to be fetched from the device.
    """
    if all_small:
        return value
    if isinstance(root, Tracer):  # of a seed that may be known nevertheless
        with jax.ensure_compile_time_eval():
            root = as_key(value)
        if isinstance(root, Tracer):
            return id(value)
    return str(root.dtype), root.shape, np.asarray(bits_of(root)).tobytes()


def _map_streams(
    rngs: Rngs, k: Any, operation: Callable[[RngStream, Shape], RngStream], passed: Callable[[RngStream], RngStream]
) -> Rngs:
    """Apply ``operation`` to the streams that ``k`` gives a shape, and ``passed`` to the others."""
    shape_for, streams = shapes_by_filter(k), {}
    for name, stream in rngs.items():
        shape = shape_for((name,), stream)
        streams[name] = passed(stream) if shape is None else operation(stream, shape)
    return Rngs(streams)


def shapes_by_filter(k: Any) -> Callable[[Path, RngStream], Shape | None]:
    """A function that gives the shape for a stream: ``k``, or by filters that of the first match, None without one."""
    rules = k if isinstance(k, Mapping) else {...: k}
    first = first_of(filters_to_predicates(tuple(rules)))
    shapes = *(None if shape is None else as_lanes(shape) for shape in rules.values()), None
    return lambda path, stream: shapes[first(path, stream)]
