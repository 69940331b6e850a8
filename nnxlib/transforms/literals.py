"""Literals: values of captured Variables that are part of the key of a compiled function, not inputs of it.

A captured Variable may hold a bool, or something that JAX cannot trace. Such a value says what to do (``if
first.value:``, the labels of a mask, the shardings of a State), so the trace sees it as it is. Integers are inputs,
since they may be counters, until a trace fails because it needs the value of one; then they are literals, too.

If another Variable takes the place of one that holds a literal, no structure changes. So a :class:`LiteralToken` also
says which Variables hold the literals, and the dispatch compares these when it has no shortcut (replacing a Variable
ends all shortcuts).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..core.annotations import NamedTuple
from ..core.layout import Layout
from .leaf_checks import is_integer, is_literal


class Literals(NamedTuple):
    """The Variables that hold literals, and their positions among the leaves."""

    positions: tuple[int, ...]
    variables: Sequence[weakref.ref]

    def now(self) -> list[Any]:
        """The present values of the Variables; None for one that is no literal any more."""
        values = [getattr(getattr(reference(), "_cell", None), "value", None) for reference in self.variables]
        return [value if is_literal(value) or is_integer(value) else None for value in values]

    def are(self, others: Literals) -> bool:
        """Whether both are the same; ``==`` would compare Variables by value. (Each has only one weak reference.)"""
        return self.positions == others.positions and all(map(operator.is_, self.variables, others.variables))


class LiteralToken(tuple):
    """(a token of addresses alone, the positions of the literals, their values, the types of these).

    Which Variables hold the ``literals`` is not compared.
    """

    literals: Literals

    @classmethod
    def of(cls, token: object, literals: Literals, values: Iterable[Any]) -> LiteralToken:
        values = tuple(values)
        self = cls((token, literals.positions, values, tuple(map(type, values))))
        self.literals = literals
        return self

    @property
    def of_addresses(self) -> object:
        return self[0]


def literals_in(layout: Layout, leaves: Sequence[Any], integers: bool = False) -> dict[int, Any]:
    """The literals among the leaves of packed :class:`Arguments`, by position; with or without integers."""
    captured = [k for k in range(len(layout.variables)) if layout.leaf_paths[k][0] == "captured"]
    return {k: leaves[k] for k in captured if is_literal(leaves[k]) or (integers and is_integer(leaves[k]))}


def literals_of(token: Any) -> dict[int, Any]:
    """The literals in a token, by position."""
    return dict(zip(*token[1:3], strict=True)) if isinstance(token, LiteralToken) else {}
