"""Compiled conditions: the conditions of a jitted function (conditions.py) as one generated Python function.

Each call makes all the look-ups (look_ups.py) again, and compares what they find with what was there before. One by one
this takes 0.35 us for one look-up and 0.5 us for three; as one expression it takes 0.05 and 0.12 us::

    r0() is encoder is not None and type(RATE) is t1 and type(c2) is t3

This function has the globals of the user's function, and the same cells in its closure. So the interpreter itself
caches where each value is found.

If anything is not as it was before, the function returns None, or raises an error, such as that of a look-up.
"""

from __future__ import annotations

import functools
import keyword
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ReferenceType

from .chains import Reference, Step
from .fingerprints import TupleFingerprint
from .look_ups import (
    LookUp,
    attribute,
    entry,
    has_length,
    in_class,
    in_closure,
    in_context,
    in_tuple,
    inside,
    item,
    own,
    referent,
)


def compile_conditions(
    steps: Sequence[Step], ends: Sequence[Any], members: Sequence[Any]
) -> Callable[[], tuple[Any, ...] | None]:
    """A function that returns the roots among the steps if everything holds; else it returns None or raises an error.

    The arguments are those of :class:`~nnxlib.core.conditions.Conditions`.
    """
    code = _Code(_most_common_namespace([look_up for look_up, *_ in (*steps, *ends)]))
    code.terms += [code.finds_same(*step) for step in steps]
    kind_of, each = code.held(type), code.held(map)
    for end in ends:
        found, before = code.found_by(end.look_up), end.fingerprint.cell_contents
        if type(before) is TupleFingerprint:
            same = code.has_fingerprint(found, before)
        else:
            now = f"{kind_of}({found})" if isinstance(before, type) else found
            same = f"{now} is {code.name(end.fingerprint)}"
        code.terms.append(f"({same} or {code.held(end.accepts)}({found}))")
    for x in members:
        held = code.held(x)
        keys = f" and [*{held}.keyed] == {held}.keys" if x.is_mapping else ""
        code.terms.append(f"([*{each}({kind_of}, {held}.held)] == {held}.types{keys} or {held}.are_as_before())")
    return code.function()


_PREFIX = "_nnx_"  # of the names of what is in the closure of the code
_SOURCES = {in_class: "{}.__dict__[{!r}]", item: "{}[{!r}]", in_context: "{}.get()", referent: "{}()"}


class _Code:
    """The code of a function without arguments: ``terms``, to be joined by ``and``, and the cells in its closure."""

    def __init__(self, namespace: dict[str, Any]):
        self.namespace, self.terms = namespace, list[str]()
        self._cells, self._roots = dict[str, types.CellType](), list[str]()

    def name(self, cell: types.CellType) -> str:
        """A new name for the contents of a cell."""
        name = f"{_PREFIX}{len(self._cells)}"
        self._cells[name] = cell
        return name

    def held(self, value: Any) -> str:
        """A new name for a value."""
        return self.name(types.CellType(value))

    def finds_same(self, look_up: LookUp, before: Reference, is_root: bool) -> str:
        """An expression for whether a look-up finds the same as before."""
        if look_up.kind is has_length:
            return f"{self.held(len)}({self.held(look_up.holder)}) == {look_up.key}"
        found = self.found_by(look_up)
        if is_root:
            self._roots.append(f"{_PREFIX}root_{len(self._roots)}")
            found = f"({self._roots[-1]} := {found})"
        same = f"{self.held(before)}()" if isinstance(before, ReferenceType) else self.held(before())
        return f"{same} is {found} is not None"

    def has_fingerprint(self, found: str, before: Any) -> str:
        """An expression for whether a tuple, or a member of one, has this fingerprint.

        It is False for a frozenset, which has no order; then :meth:`End.accepts` decides.
        """
        if type(before) is TupleFingerprint:
            if issubclass(before.kind, frozenset):
                return "False"
            terms = [self.has_fingerprint(found, before.kind), f"{self.held(len)}({found}) == {len(before.members)}"]
            terms += [self.has_fingerprint(f"{found}[{k}]", member) for k, member in enumerate(before.members)]
            return f"({' and '.join(terms)})"
        if isinstance(before, type):
            return f"{self.held(type)}({found}) is {self.held(before)}"
        same = f"{self.held(before)}()" if isinstance(before, ReferenceType) else self.held(before)
        return f"{same} is {found} is not None"

    def found_by(self, look_up: LookUp) -> str:
        """An expression for what a look-up finds; it may raise an error if that is nothing."""
        kind, holder, key = look_up
        if kind is in_closure:
            return self.name(holder)
        if kind is inside:
            return f"{self.found_by(holder)}.__dict__[{key!r}]"
        if kind is in_tuple:
            return f"{self.found_by(holder)}[{key}]"
        if kind in _SOURCES:
            return _SOURCES[kind].format(self.held(holder), key)
        if kind is attribute and _is_plain(key) and hasattr(holder, key):  # not if it is in a slot that is not set
            return f"{self.held(holder)}.{key}"
        if _is_in_dict(look_up):
            return key if holder is self.namespace and _is_plain(key) else f"{self.held(holder)}[{self.held(key)}]"
        return f"{self.held(kind)}({self.held(holder)}, {self.held(key)})"

    def function(self) -> Callable[[], tuple[Any, ...] | None]:
        """The function."""
        roots = f"({', '.join(self._roots)},)" if self._roots else "()"
        holds = " and ".join(self.terms) or "True"
        code = _compiled(f"lambda {', '.join(self._cells)}: lambda: {roots} if {holds} else None")
        closure = tuple([self._cells[name] for name in code.co_freevars])
        return types.FunctionType(code, self.namespace, "conditions", None, closure)


@functools.lru_cache(maxsize=1000)
def _compiled(source: str) -> types.CodeType:
    """The code of the function that the function in ``source`` makes."""
    return next(x for x in eval(source).__code__.co_consts if isinstance(x, types.CodeType))


def _is_plain(name: Any) -> bool:
    """Whether a name can be written in the code as it is."""
    is_name = type(name) is str and name.isidentifier() and name.isascii()
    return is_name and not keyword.iskeyword(name) and not name.startswith(_PREFIX)


def _is_in_dict(look_up: LookUp) -> bool:
    """Whether something is found in a dict now."""
    return look_up.kind in (entry, own) and type(look_up.holder) is dict and look_up.key in look_up.holder


def _most_common_namespace(look_ups: Iterable[LookUp]) -> dict[str, Any]:
    """The globals that are read most often; an empty namespace if there are none."""
    read = [look_up.holder for look_up in look_ups if _is_in_dict(look_up) and "__name__" in look_up.holder]
    counts = Counter(map(id, read))
    return max(read, key=lambda mapping: counts[id(mapping)], default={})
