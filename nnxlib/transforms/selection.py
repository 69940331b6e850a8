"""Arguments chosen by their number or name: ``static_argnums`` and ``donate_argnums`` of :func:`~nnxlib.jit`."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..core.annotations import parameters_of
from ..core.containers import List
from ..core.errors import ArgumentError, PrefixError, did_you_mean
from ..core.objects import Pytree
from ..core.static import StaticArgument
from ..core.variables import Variable


def as_static(x: Any, argument: int | str) -> StaticArgument:
    """An argument as part of the program; if a partial bound it, it may be that already."""
    path = ("args", argument) if isinstance(argument, int) else ("kwargs", argument)
    return x if type(x) is StaticArgument else StaticArgument(x, path)


def holders_in(args: Iterable[Any]) -> list[Any]:
    """The static arguments that are compared by identity, and so may hold other objects at a later call.

    Others are compared by what they hold, so they would be other arguments then.
    """
    found = []
    for x in args:  # a comprehension would be one more call, before Python 3.12
        if type(x) is StaticArgument and type(x.value).__hash__ in _BY_IDENTITY and _holds_others(x.value):
            found.append(x.value)
    return found


_BY_IDENTITY = {object.__hash__, Pytree.__hash__, List.__hash__, Variable.__hash__}


def _holds_others(x: Any) -> bool:
    if type(x) is types.FunctionType:
        return bool(x.__closure__ or x.__defaults__ or x.__kwdefaults__)
    return not isinstance(x, type | functools.partial)


def numbers_of(argnums: int | Iterable[int] | None, option: str) -> tuple[int, ...]:
    """The numbers of arguments that a user has chosen, one of them or several.

    Raises:
      ArgumentError: for what is not a number.
    """
    given = argnums if isinstance(argnums, Iterable) else () if argnums is None else (argnums,)
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise ArgumentError(f"{option} takes numbers of arguments, such as 0 or (0, 1), not {argnums!r}.") from None


def names_of(argnames: str | Iterable[str] | None, option: str) -> tuple[str, ...]:
    """The names of arguments that a user has chosen, one of them or several.

    Raises:
      ArgumentError: for what is not a name.
    """
    is_single = isinstance(argnames, str) or not isinstance(argnames, Iterable)
    names: tuple = () if argnames is None else (argnames,) if is_single else tuple(argnames)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"{option} takes names of arguments, such as 'n' or ('n', 'size'), not {argnames!r}.")
    return names


class Selection:
    """Arguments chosen by number or name; by the signature of the function, a number implies a name and vice versa.

    As in JAX, it does not if the user gives both numbers and names; what is not given is None. The numbers count from
    the first argument that is not bound, after ``shift`` bound ones; negative ones count from the last. The ``option``
    is the beginning of what the user calls the choice, "static" or "donate".

    Raises:
      ArgumentError: for what is not a number, or not a name.
      PrefixError: for a number or a name that the function does not have.
    """

    def __init__(self, function: Callable, shift: int, argnums: Any, argnames: Any, option: str):
        numbers, names = numbers_of(argnums, f"{option}_argnums"), names_of(argnames, f"{option}_argnames")
        self._option = option
        self._chosen: set[int | str] = {*names}
        self._from_end: set[int] = set()  # of a function with *args: relative to the number of arguments in a call
        self._among: dict[int, frozenset[int]] = {}  # what `among` has found
        parameters = parameters_of(function)
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        open_ended = not parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters)
        for number in numbers:
            if not open_ended and not -len(positional) <= number < len(positional) - shift:
                count = len(positional) - shift
                raise PrefixError(
                    f"{option}_argnums has {number}, but {function.__name__} takes {count} positional arguments."
                )
            if number < 0 and open_ended:
                self._from_end.add(number)
            else:
                self._chosen.add(number + shift if number >= 0 else len(positional) + number)
        known = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
        takes_any = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
        if (unknown := set(names) - known) and not takes_any:
            raise PrefixError(
                f"{option}_argnames has {sorted(unknown)}, but {function.__name__} takes {sorted(known)}."
                f"{did_you_mean(unknown, known)}"
            )
        for i, p in enumerate(positional if argnums is None or argnames is None else ()):
            if i in self._chosen and p.kind is p.POSITIONAL_OR_KEYWORD:
                self._chosen.add(p.name)
            elif p.name in self._chosen:
                self._chosen.add(i)

    def has(self, argument: int | str, count: int = 0) -> bool:
        """Whether an argument was chosen, given by its name, or by its number out of ``count``."""
        return argument in self._chosen or (isinstance(argument, int) and argument - count in self._from_end)

    def among(self, count: int) -> Collection[int]:
        """The numbers of the chosen ones out of ``count`` arguments."""
        found = self._among.get(count)
        if found is None:
            found = self._among[count] = frozenset([i for i in range(count) if self.has(i, count)])
        return found

    def check_apart(self, other: Selection) -> None:
        """Check that no argument is in both.

        Raises:
          PrefixError: if one is.
        """
        if both := (self._chosen & other._chosen) | (self._from_end & other._from_end):
            raise PrefixError(_IN_BOTH.format(both=sorted(both, key=str), one=self._option, other=other._option))

    def __bool__(self) -> bool:
        return bool(self._chosen or self._from_end)


_IN_BOTH = """\
{both} are in {one}_argnums or {one}_argnames, and in those of {other}. What is static is a part of the program, and \
has no array that could be donated."""
