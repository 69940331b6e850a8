"""Reprs that a class writes by itself: ``__nnx_repr__`` yields an :class:`Object`, then an :class:`Attr` for each line.

It is for classes of the user. How Modules, States and GraphDefs are written is :mod:`nnxlib.core.reprs`; they are plain
text, so there are no colours to choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Object:
    """The first and the last line: the type, the brackets, and what stands between a name and its value.

    ``empty_repr`` stands between the brackets of what has no attributes, ``comment`` behind the opening one;
    ``same_line`` writes the attributes in one line.
    """

    type: str | type
    start: str = "("
    end: str = ")"
    kv_sep: str = "="
    indent: str = "  "
    empty_repr: str = ""
    comment: str = ""
    same_line: bool = False


@dataclass(frozen=True)
class Attr:
    """A name and a value. ``use_raw_value`` takes a string without quotes; ``use_raw_key`` has no effect."""

    key: str
    value: Any
    start: str = ""
    end: str = ""
    use_raw_value: bool = False
    use_raw_key: bool = False


class Representable:
    """A class whose repr is what its ``__nnx_repr__`` yields; by default, its attributes.

    >>> from nnxlib import reprlib
    >>> class Interval(reprlib.Representable):
    ...   def __nnx_repr__(self):
    ...     yield reprlib.Object(type(self))
    ...     yield reprlib.Attr('low', 0)
    ...     yield reprlib.Attr('unit', 'm')
    >>> Interval()
    Interval(
      low=0,
      unit='m'
    )
    """

    def __nnx_repr__(self) -> Iterator[Object | Attr]:
        yield Object(type(self))
        for name, value in vars(self).items():
            yield Attr(name, value)

    def __repr__(self) -> str:
        return get_repr(self)


def get_repr(obj: Representable) -> str:
    """Write what ``__nnx_repr__`` yields.

    >>> from nnxlib import reprlib
    >>> print(reprlib.get_repr(reprlib.PrettySequence([1, 'a'])))
    PrettySequence([
      1,
      'a'
    ])

    Raises:
      TypeError: if ``obj`` is no :class:`Representable`, or yields something else than one Object and then Attrs.
    """
    if not isinstance(obj, Representable):
        raise TypeError(f"get_repr takes a Representable, but got {type(obj).__name__}: {obj!r}.")
    head, *attributes = [*obj.__nnx_repr__()] or [None]
    if not isinstance(head, Object):
        raise TypeError(_YIELDS.format(name=type(obj).__name__, what="an Object first", got=head))
    lines = []
    for attribute in attributes:
        if not isinstance(attribute, Attr):
            raise TypeError(_YIELDS.format(name=type(obj).__name__, what="Attrs after the Object", got=attribute))
        line = f"{attribute.start}{attribute.key}{head.kv_sep}{_value(attribute)}{attribute.end}"
        lines.append(line.replace("\n", f"\n{head.indent}"))
    opening = f"{_text(head.type) if isinstance(head.type, type) else head.type}{head.start}"
    if not lines:
        return f"{opening}{head.empty_repr}{head.end}"
    if head.same_line:
        return f"{opening}{', '.join(lines)}{head.end}"
    body = ",\n".join(f"{head.indent}{line}" for line in lines)
    return f"{opening}{head.comment}\n{body}\n{head.end}"


_YIELDS = "The __nnx_repr__ of {name} must yield {what}, but yields {got!r}."


def _value(attribute: Attr) -> str:
    raw = attribute.use_raw_value and isinstance(attribute.value, str)
    return attribute.value if raw else _text(attribute.value)


def _text(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


class MappingReprMixin(Representable):
    """Writes a class that has ``items()`` as ``Name({key: value})``.

    >>> from nnxlib import reprlib
    >>> class Table(reprlib.MappingReprMixin, dict): pass
    >>> Table(a=1)
    Table({
      'a': 1
    })
    """

    def __nnx_repr__(self) -> Iterator[Object | Attr]:
        yield Object(type(self), start="({", end="})", kv_sep=": ")
        for key, value in self.items():  # type: ignore[attr-defined]
            yield Attr(repr(key), value, use_raw_key=True)


class SequenceReprMixin(Representable):
    """Writes a class that can be iterated over as ``Name([value])``.

    >>> from nnxlib import reprlib
    >>> class Row(reprlib.SequenceReprMixin, list): pass
    >>> Row([1, 2])
    Row([
      1,
      2
    ])
    """

    def __nnx_repr__(self) -> Iterator[Object | Attr]:
        yield Object(type(self), start="([", end="])", kv_sep="")
        for value in self:  # type: ignore[attr-defined]
            yield Attr("", value)


@dataclass(repr=False)
class PrettyMapping(MappingReprMixin):
    """A mapping that is written line by line.

    >>> from nnxlib import reprlib
    >>> reprlib.PrettyMapping({'a': 1})
    PrettyMapping({
      'a': 1
    })
    """

    mapping: Mapping[Any, Any]

    def items(self) -> Any:
        return self.mapping.items()


@dataclass(repr=False)
class PrettySequence(SequenceReprMixin):
    """A sequence that is written line by line.

    >>> from nnxlib import reprlib
    >>> reprlib.PrettySequence([])
    PrettySequence([])
    """

    sequence: Sequence[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sequence)
