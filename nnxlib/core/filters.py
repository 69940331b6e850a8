"""Filters: how to select leaves of a model.

A *predicate* is a function ``(path, value) -> bool``; ``path`` is the tuple of keys that leads to the value, such as
``('layers', 0, 'kernel')``. A *filter* is a predicate, or a shorthand for one:

    Param                 values of this type, and Variables of it        OfType(Param)
    'head'                Variables with ``tag='head'``                   WithTag('head')
    ... or True           everything                                      Everything()
    None or False         nothing                                         Nothing()
    [a, b] or (a, b)      whatever one of them takes                      Any(a, b)

Filter objects form a Boolean algebra: ``a | b``, ``a & b``, ``~a`` and ``a - b`` (the same as ``a & ~b``) are filters
again, with a shorthand allowed on one side. They are kept in one form: negation stands only before a single predicate,
and ``Any`` and ``All`` are flat, without repeated, neutral or absorbing parts. So the laws that need no expansion are
plain equalities: ``~(a | b) == ~a & ~b``, ``~~a == a``, ``a | b == b | a``. The two sides of a distributive law select
the same, but are not equal. Filters compare and hash by value, and their repr reads as the expression that makes them.
Combinations are often named constants, so they can be given a ``__doc__``.
"""

from __future__ import annotations

import builtins
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Sequence

from .errors import FilterOrderError, InvalidFilterError, Path, accepts
from .identity import Identified
from .tracing import UserLine
from .traversals import Key, sorted_by_path
from .variable_names import type_of_name
from .variables import Variable

PathParts = Path  # as flax.nnx calls it
Predicate = Callable[[Path, typing.Any], bool]
FilterLiteral = type | str | Predicate | bool | types.EllipsisType | None
Filter = FilterLiteral | tuple["Filter", ...] | list["Filter"]


def to_predicate(filter: Filter, /) -> FilterObject:
    """Spell a filter out as a filter object, which is a predicate.

    >>> import nnxlib as nnx
    >>> nnx.filterlib.to_predicate([nnx.Param, 'head'])
    Any(OfType(Param), WithTag('head'))

    Raises:
      InvalidFilterError: for anything that is not a filter.
    """
    match filter:
        case FilterObject():
            return filter
        case type():
            return OfType(filter)
        case str():
            return WithTag(filter)
        case bool() | types.EllipsisType() | None:
            return Everything() if filter else Nothing()
        case list() | tuple():
            return Any(*filter)
        case types.UnionType():  # Param | BatchStat
            return Any(*filter.__args__)
        case _ if callable(filter) and not isinstance(filter, Identified):  # a Module or Variable is not a filter
            return Where(filter)
    raise InvalidFilterError(
        f"Not a filter: {reprlib.repr(filter)} of type {type(filter).__name__}. A filter is a type (nnx.Param), a tag "
        "('head'), a function (path, value) -> bool, ... or True (everything), None or False (nothing), or a list or "
        "tuple of filters (any of them)."
    )


def shown(filter: Filter, /) -> str:
    """A filter as a user writes it.

    >>> import nnxlib as nnx
    >>> [shown(filter) for filter in (nnx.Param, ..., (nnx.Param, 'head'))]
    ['Param', '...', "(Param, 'head')"]
    """
    if isinstance(filter, tuple | list):
        return f"({', '.join(map(shown, filter))})"
    return filter.__name__ if isinstance(filter, type) else "..." if filter is ... else repr(filter)


def filters_to_predicates(filters: Sequence[Filter], /) -> tuple[FilterObject, ...]:
    """Spell out a sequence of filters, of which the first that matches counts.

    Raises:
      FilterOrderError: if ``...`` or ``True`` comes before a filter that would then never be asked.
      InvalidFilterError: for anything that is not a filter.
    """
    total = [filter is ... or filter is True for filter in filters]
    if True in total and not all(total[total.index(True) :]):
        index = total.index(True)
        raise FilterOrderError(
            "`...` or `True` can only be used as the last filters, because they take everything, but "
            f"`{shown(filters[index])}` is filter {index + 1} of {len(filters)}. Move it to the end, or remove the "
            "filters behind it."
        )
    return tuple([to_predicate(filter) for filter in filters])


def group_by_filters(
    items: Iterable[tuple[Path, typing.Any]], filters: Sequence[Filter], /
) -> tuple[list[tuple[Path, typing.Any]], ...]:
    """Sort ``(path, value)`` pairs into a list for each filter, by the first that matches, and a last one for the rest.

    >>> import nnxlib as nnx
    >>> nnx.filterlib.group_by_filters({('a',): 1, ('b',): 'x', ('c',): 2.0}.items(), [int, nnx.PathContains('b')])
    ([(('a',), 1)], [(('b',), 'x')], [(('c',), 2.0)])
    """
    first_to_take = first_of(filters_to_predicates(filters))
    groups: tuple[list, ...] = tuple([[] for _ in range(len(filters) + 1)])
    for item in items:
        groups[first_to_take(*item)].append(item)
    return groups


def first_of(predicates: Sequence[FilterObject]) -> Callable[[Path, typing.Any], int]:
    """A function that gives the index of the first predicate to take a value; if none does, how many there are.

    Where the class of a Variable decides, the predicates are asked once for the class.
    """
    of_class: dict[type, int] = {}

    def first(path: Path, x: typing.Any) -> int:
        found = of_class.get(type(x))
        if found is None:
            found = next((k for k, predicate in enumerate(predicates) if predicate(path, x)), len(predicates))
            if isinstance(x, Variable) and all(predicate.by_class for predicate in predicates[: found + 1]):
                of_class[type(x)] = found
        return found

    return first


def looks_at_values(filter: Filter) -> bool:
    """Tell whether a filter may look at more of a value than its type and metadata.

    False for filter objects and shorthands, true for functions, unless they have an attribute
    ``looks_at_values = False``: a promise that the answer follows from the path, the type and the metadata.
    """
    return to_predicate(filter).looks_at_values


def warn_of_node_classes(filters: Sequence[Filter]) -> None:
    """Warn of a filter that is a class of nodes: no leaf is an instance of it."""
    for filter in filters:
        if isinstance(filter, type) and issubclass(filter, Identified) and not issubclass(filter, Variable):
            UserLine().warn(_OF_NODES.format(name=filter.__name__))


_OF_NODES = """\
{name} selects nothing: filters see Variables and arrays, not the Modules that hold them. Take the State of that \
Module, nnx.state(model.layer), or select by path: nnx.PathContains('name')."""


def warn_of_names(
    filters: Sequence[Filter], groups: Sequence[typing.Sized], items: Iterable[tuple[Path, typing.Any]]
) -> None:
    """Warn of text that has taken none of these items, but is a key of their paths, or a collection: it is meant so."""
    unused = [x for x, group in zip(filters, groups, strict=True) if isinstance(x, str) and not group]
    keys = {key for path, _ in items for key in path} if unused else ()
    for name in unused:
        kind = type_of_name(name)
        if name in keys:
            meant = f"there is such a key in paths. To select by path, write nnx.PathContains({name!r})."
        elif kind is not None:
            meant = f"a collection of that name is a type of Variable. To select by type, write {kind.__name__}."
        else:
            continue
        UserLine().warn(f"{name!r} selects nothing: text is a tag, which no Variable has here, but {meant}")


class FilterObject:
    """Base class of the filter objects: predicates with operators, equal if they are of one class with equal values."""

    __slots__ = ()
    looks_at_values: bool = False
    by_class: bool = False  # whether it takes all Variables of a class or none: nothing but the class counts

    def __call__(self, path: Path, x: typing.Any) -> bool:
        raise NotImplementedError

    def __invert__(self) -> FilterObject:
        return Not._of(self)

    def __or__(self, other: Filter) -> FilterObject:
        return Any(self, other)

    def __ror__(self, other: Filter) -> FilterObject:
        return Any(other, self)

    def __and__(self, other: Filter) -> FilterObject:
        return All(self, other)

    def __rand__(self, other: Filter) -> FilterObject:
        return All(other, self)

    def __sub__(self, other: Filter) -> FilterObject:
        return All(self, Not(other))

    def __rsub__(self, other: Filter) -> FilterObject:
        return All(other, Not(self))

    def _values(self) -> tuple:
        return tuple([getattr(self, name) for name in self.__slots__])

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values() == typing.cast(FilterObject, other)._values()

    def __hash__(self) -> int:
        return hash((type(self), self._values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._values()))})"


class Everything(FilterObject):
    """Takes everything; written ``...`` or ``True``."""

    __slots__ = ()
    by_class = True

    def __call__(self, path: Path, x: typing.Any) -> bool:
        return True

    def __invert__(self) -> FilterObject:
        return Nothing()


class Nothing(FilterObject):
    """Takes nothing; written ``None`` or ``False``."""

    __slots__ = ()
    by_class = True

    def __call__(self, path: Path, x: typing.Any) -> bool:
        return False

    def __invert__(self) -> FilterObject:
        return Everything()


class OfType(FilterObject):
    """Takes instances of a type, and values whose attribute ``type`` is this type or a subclass.

    >>> import nnxlib as nnx
    >>> nnx.OfType(nnx.Variable)(('kernel',), nnx.Param(1.0))
    True
    """

    __slots__ = ("type",)

    def __init__(self, type: builtins.type):
        if not isinstance(type, builtins.type):
            raise InvalidFilterError(f"OfType takes a class such as nnx.Param, got {type!r}.")
        self.type = type

    @property
    def looks_at_values(self) -> bool:
        """False, except for a class that decides itself what its instances are, as ``jax.Array`` does."""
        return type(self.type).__instancecheck__ is not type.__instancecheck__

    def __call__(self, path: Path, x: typing.Any) -> bool:
        if isinstance(x, self.type):
            return True
        kind = getattr(x, "type", None)
        return isinstance(kind, builtins.type) and issubclass(kind, self.type)

    @property
    def by_class(self) -> bool:
        return not self.looks_at_values

    def __repr__(self) -> str:
        return f"OfType({self.type.__qualname__})"


class HasTag(typing.Protocol):
    """Something that :class:`nnxlib.WithTag` can select."""

    tag: str


class WithTag(FilterObject):
    """Takes values whose ``tag`` is the given one.

    >>> import nnxlib as nnx
    >>> nnx.WithTag('head')(('kernel',), nnx.Param(1.0, tag='head'))
    True
    """

    __slots__ = ("tag",)

    def __init__(self, tag: str):
        if not isinstance(tag, str):
            raise InvalidFilterError(f"A tag is a string, got {tag!r} of type {type(tag).__name__}.")
        self.tag = tag

    def __call__(self, path: Path, x: typing.Any) -> bool:
        if hasattr(type(x), "get_metadata"):  # asking a Variable for an attribute would look at its value
            return x.get_metadata("tag", getattr(type(x), "tag", None)) == self.tag
        return isinstance(tag := getattr(x, "tag", None), str) and tag == self.tag


class PathContains(FilterObject):
    """Takes values with ``key`` in their path; with ``exact=False``, also as a part of a key.

    >>> import nnxlib as nnx
    >>> nnx.PathContains('norm', exact=False)(('layers', 0, 'batch_norm', 'scale'), None)
    True
    """

    __slots__ = ("exact", "key")

    def __init__(self, key: Key, exact: bool = True):
        self.key, self.exact = key, exact

    def __call__(self, path: Path, x: typing.Any) -> bool:
        if self.exact:
            return self.key in path
        return any(str(self.key) in str(part) for part in path)

    def __repr__(self) -> str:
        return f"PathContains({self.key!r}, exact={self.exact})"


class Where(FilterObject):
    """Takes the values for which a function ``(path, value) -> bool`` is true; written as that function."""

    __slots__ = ("function",)

    def __init__(self, function: Predicate):
        self.function = function

    @property
    def looks_at_values(self) -> bool:
        return getattr(self.function, "looks_at_values", True)

    def __call__(self, path: Path, x: typing.Any) -> bool:
        try:
            return self.function(path, x)
        except TypeError:
            if not accepts(self.function, path, x):
                name = getattr(self.function, "__name__", repr(self.function))
                raise InvalidFilterError(f"A filter function takes (path, value), which {name} does not.") from None
            raise

    def __hash__(self) -> int:  # the function may have none, such as an instance of a dataclass
        return hash((Where, type(self.function)))

    def __repr__(self) -> str:
        return f"Where({getattr(self.function, '__qualname__', None) or repr(self.function)})"


class PathIn(FilterObject):
    """Takes the values at the given paths.

    >>> import nnxlib as nnx
    >>> nnx.filterlib.PathIn(('layers', 0, 'kernel'), ('scale',))(('scale',), None)
    True
    """

    __slots__ = ("paths",)

    def __init__(self, *paths: Path):
        for path in paths:
            if not isinstance(path, tuple):
                raise InvalidFilterError(f"A path is a tuple such as ('layers', 0, 'kernel'), got {path!r}.")
        self.paths = frozenset(paths)

    def __call__(self, path: Path, x: typing.Any) -> bool:
        return path in self.paths

    def __repr__(self) -> str:
        return f"PathIn({', '.join(map(repr, sorted_by_path(self.paths)))})"


class Not(FilterObject):
    """Takes what the filter does not take.

    >>> import nnxlib as nnx
    >>> nnx.Not(nnx.Any(nnx.Param, 'head'))
    All(Not(OfType(Param)), Not(WithTag('head')))
    """

    predicate: FilterObject

    def __new__(cls, filter: Filter, /) -> typing.Any:
        return ~to_predicate(filter)

    @classmethod
    def _of(cls, predicate: FilterObject) -> Not:
        self = object.__new__(cls)
        self.predicate = predicate
        return self

    @property
    def looks_at_values(self) -> bool:
        return self.predicate.looks_at_values

    @property
    def by_class(self) -> bool:
        return self.predicate.by_class

    def __call__(self, path: Path, x: typing.Any) -> bool:
        return not self.predicate(path, x)

    def __invert__(self) -> FilterObject:
        return self.predicate

    def _values(self) -> tuple:
        return (self.predicate,)

    def __reduce__(self) -> tuple:
        return Not, (self.predicate,)


class _Combination(FilterObject):
    """Several predicates, flat and each once; equal to the same ones in another order."""

    predicates: tuple[FilterObject, ...]
    neutral: FilterObject  # changes nothing in a combination; the combination of no filters
    absorbing: FilterObject  # any combination with it is equal to it

    def __new__(cls, *filters: Filter) -> typing.Any:
        parts: list[FilterObject] = []
        for predicate in map(to_predicate, filters):
            for part in predicate.predicates if isinstance(predicate, cls) else (predicate,):
                if part == cls.absorbing or ~part in parts:
                    return cls.absorbing
                if part != cls.neutral and part not in parts:
                    parts.append(part)
        if len(parts) < 2:
            return parts[0] if parts else cls.neutral
        self = object.__new__(cls)
        self.predicates = tuple(parts)
        return self

    @property
    def looks_at_values(self) -> bool:
        return any(predicate.looks_at_values for predicate in self.predicates)

    @property
    def by_class(self) -> bool:
        return all(predicate.by_class for predicate in self.predicates)

    def _values(self) -> tuple:
        return (frozenset(self.predicates),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.predicates))})"

    def __reduce__(self) -> tuple:
        return type(self), self.predicates


class Any(_Combination):
    """Takes what at least one of the filters takes; ``Any()`` is ``Nothing()``.

    >>> import nnxlib as nnx
    >>> nnx.OfType(nnx.Param) | nnx.BatchStat
    Any(OfType(Param), OfType(BatchStat))
    """

    neutral, absorbing = Nothing(), Everything()

    def __call__(self, path: Path, x: typing.Any) -> bool:
        return any(predicate(path, x) for predicate in self.predicates)

    def __invert__(self) -> FilterObject:
        return All(*[~predicate for predicate in self.predicates])


class All(_Combination):
    """Takes what each of the filters takes; ``All()`` is ``Everything()``.

    >>> import nnxlib as nnx
    >>> nnx.OfType(nnx.Param) - nnx.PathContains('head')
    All(OfType(Param), Not(PathContains('head', exact=True)))
    """

    neutral, absorbing = Everything(), Nothing()

    def __call__(self, path: Path, x: typing.Any) -> bool:
        return all(predicate(path, x) for predicate in self.predicates)

    def __invert__(self) -> FilterObject:
        return Any(*[~predicate for predicate in self.predicates])
