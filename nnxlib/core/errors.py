"""The errors that nnxlib raises.

Each says what is wrong, where (the path, or both paths if two clash), and what to write instead. All derive from
:class:`NnxError` and from the built-in class that fits, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any

from .annotations import signature_of

Path = tuple[Any, ...]  # the keys that lead to an object or a leaf: names of attributes, indices and keys of items


class NnxError(Exception):
    """Base class of the errors of nnxlib."""


class TraceContextError(NnxError, ValueError):
    """A write to an object from inside a JAX trace that the object does not belong to."""


class StaticValueError(NnxError, TypeError, ValueError):
    """A static attribute, argument or metadata value that cannot be compared by value."""


class StaleLayoutError(NnxError, RuntimeError):
    """The structure of an object was changed in a way that its cached layout could not notice."""


class ArgumentError(NnxError, TypeError, ValueError):
    """An argument of another kind than the one that is asked for; of a transform, one that JAX cannot trace."""


class NotAStateError(ArgumentError, AttributeError):
    """An object where a State, or another nested mapping, is expected: a Module, say."""


class UsageError(NnxError, ValueError):
    """A call or a setting that cannot be meant: sizes that do not fit each other, a mode that was never said."""


class InvalidRngError(UsageError):
    """Something that no random stream can be made from."""


class MissingStreamError(NnxError, AttributeError, KeyError):
    """A random stream that an Rngs does not have."""

    __str__ = Exception.__str__  # that of a KeyError quotes the message


class OutputError(NnxError, TypeError):
    """A value that a transformed function returns, or stores in an object, and that JAX cannot trace."""


class IntegerRangeError(ArgumentError, OutputError, OverflowError):
    """An integer of Python that is too large for the integers of JAX, as an argument or as what comes back."""


class RetraceWarning(UserWarning):
    """A jitted function is traced and compiled anew at each call."""


class BodyError(NnxError, TypeError, ValueError):
    """The body of a loop or a branch that changes something it may not change."""


class ReadOnlyError(NnxError, ValueError):
    """A change of a Variable that holds a transformed value, with no ``trans_out`` to store it."""


class LayerInputError(NnxError, TypeError, ValueError):
    """An input whose shape or dtype a layer cannot take."""


class StateMismatchError(NnxError, ValueError):
    """A State that does not fit the object it is merged or written into; nothing has been changed."""


class InvalidVariablesError(NnxError, TypeError):
    """Variables of a functional Module that are not a dict of collections."""


class NestedCollectionError(NnxError, ValueError):
    """A collection of variables within one of the same name."""


class MissingCollectionError(StateMismatchError):
    """Variables of a functional Module without a collection that it needs."""


class MissingVariableError(StateMismatchError):
    """A collection of variables without one that the Module needs."""


class VariableShapeError(StateMismatchError):
    """A variable of another shape than the Module's."""


class ImmutableCollectionError(NnxError, ValueError):
    """A change of variables that are not ``mutable``."""


class ClosedModuleError(NnxError, ValueError):
    """A use of the Module that ``apply`` has made for a call, after that call."""


class LazyInitError(NnxError, ValueError):
    """A variable whose value depends on an argument of which only the shape is known."""


class AliasingError(NnxError, ValueError):
    """One shared object reached by two paths that ask for different treatment."""


class PrefixError(NnxError, ValueError, TypeError):
    """A prefix (``in_shardings``, ``argnums``, ``StateAxes``, ...) that does not fit the arguments it describes."""


class InvalidFilterError(NnxError, TypeError):
    """Something that is not a filter where a filter is expected."""


class EmptySelectionError(NnxError, ValueError):
    """A filter that selects nothing where something is needed."""


class FilterOrderError(InvalidFilterError, ValueError):
    """A filter that takes everything, followed by others that would never be asked."""


class NonExhaustiveFiltersError(NnxError, ValueError):
    """Leaves that none of the filters of a split takes."""


class PathError(NnxError, ValueError):
    """A path that is not there, is empty, is both a leaf and the beginning of another path, or leads to two values."""


class PlacementError(NnxError, ValueError):
    """Names of axes or a sharding that do not fit, or a loop or vmap over an axis whose sharding is part of a type."""


class VariableNameError(NnxError, ValueError):
    """A name or type of Variables that is not registered, or is registered otherwise."""


def format_path(path: Iterable[Any], root: str = "") -> str:
    """Write a path the way one would type it.

    >>> format_path(('layers', 0, 'kernel'), 'model')
    'model.layers[0].kernel'
    """
    parts = [f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path]
    text = root + "".join(parts)
    return (text if root else text.removeprefix(".")) or "<root>"


OUTPUT = "<output>"  # the first key of a path in the output of a function, as opposed to its arguments


def place_of(path: Path) -> str:
    """Write the path of a leaf that comes back from a function: in the arguments, or in the output."""
    return format_path(path[1:], OUTPUT) if path[:1] == (OUTPUT,) else format_path(path)


def describe(value: Any) -> str:
    """Write an array as ``float32[2, 3]``, a class by its name, anything else as its type.

    >>> import numpy as np
    >>> describe(np.zeros((2, 3), 'float32')), describe('abc'), describe(str)
    ('float32[2, 3]', 'str', 'class str')
    """
    if isinstance(value, type):
        return f"class {value.__name__}"
    if isinstance(value, dict):  # it may have any attributes
        return type(value).__name__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{dtype}[{', '.join(map(str, shape))}]"
    return "None" if value is None else type(value).__name__


def describe_nested(value: Any, depth: int = 3) -> str:
    """Like :func:`describe`, but with the first few items of tuples, lists and dicts, for the outer levels.

    >>> import numpy as np
    >>> describe_nested({'x': (np.zeros(2, 'float32'), None), 'name': 'abc'})
    "{'x': (float32[2], None), 'name': str}"
    """
    kind = type(value)
    if kind not in (tuple, list, dict) or not depth:
        return describe(value)
    items = [describe_nested(x, depth - 1) for x in islice(value.values() if kind is dict else value, _ITEMS)]
    if kind is dict:
        items = [f"{key!r}: {item}" for key, item in zip(value, items)]
    items += [f"... and {len(value) - _ITEMS} more"] if len(value) > _ITEMS else []
    opening, closing = {tuple: "()", list: "[]", dict: "{}"}[kind]
    return f"{opening}{', '.join(items)}{closing}"


_ITEMS = 8


def did_you_mean(names: Iterable[Any], known: Iterable[Any]) -> str:
    """A question after a message, if one of the names is nearly a known one.

    >>> did_you_mean(['kernl'], ['bias', 'kernel']), did_you_mean([0], ['bias'])
    (" Did you mean 'kernel'?", '')
    """
    import difflib  # only for an error

    choices = [name for name in known if isinstance(name, str)]
    for name in names:
        if isinstance(name, str) and (near := difflib.get_close_matches(name, choices, n=1)):
            return f" Did you mean {near[0]!r}?"
    return ""


def accepts(function: Callable, *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called with these arguments, for the message of a call that has failed.

    >>> accepts(lambda path, value: True, 1, 2), accepts(lambda path: True, 1, 2)
    (True, False)
    """
    try:
        signature_of(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a built-in without a signature
        pass
    return True


def note_switches(error: Exception, options: Collection[str]) -> None:
    """Add a note to the error of a call with these options that refuses a switch of flax.nnx: what to write instead."""
    refused = [name for name in _SWITCHES if name in options and f"'{name}'" in str(error)]
    if refused and isinstance(error, TypeError | UsageError) and _ONE_MODE not in getattr(error, "__notes__", ()):
        error.add_note(_ONE_MODE)


def note_signature(error: Exception, function: Callable) -> None:
    """Add a note to the error by which Python refuses a call that does not fit the signature: what the function takes.

    >>> def scale(x, *, factor, offset=0): ...
    >>> try:
    ...   scale(1, bias=2)
    ... except TypeError as error:
    ...   note_signature(error, scale)
    ...   error.__notes__
    ['it takes x, factor=...; optional: offset']
    """
    if not (isinstance(error, TypeError) and str(error).startswith(f"{function.__qualname__}() ")):
        return
    parameters = signature_of(function).parameters.values()
    shown = [p for p in parameters if not (p.name == "self" or p.name.startswith("_"))]
    marks = {"KEYWORD_ONLY": "{}=...", "VAR_POSITIONAL": "*{}", "VAR_KEYWORD": "**{}"}
    needed = [marks.get(p.kind.name, "{}").format(p.name) for p in shown if p.default is p.empty]
    optional = [p.name for p in shown if p.default is not p.empty]
    more = f"{'; ' if needed else ''}optional: {', '.join(optional)}" if optional else ""
    note = f"it takes {', '.join(needed)}{more}" if shown else "it takes no arguments"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


_SWITCHES = ("graph", "graph_updates", "copy_variables")
_ONE_MODE = """\
nnxlib has one mode, which does what each mode of flax.nnx does: leave graph=... and graph_updates=... out; or write \
`from nnxlib.compat import flax as nnx`, whose functions accept these switches."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things.

    >>> counted(1, 'argument'), counted(2, 'argument'), counted(0, 'entry', 'entries')
    ('1 argument', '2 arguments', '0 entries')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(head: str, problems: Sequence[str], tail: str = "") -> str:
    """A message with a line for each problem; if there are very many, only for the first.

    >>> print(listed('These differ:', ['a', 'b'], 'Use one of them.'))
    These differ:
      a
      b
    Use one of them.
    """
    more = [f"... and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
    return "\n".join([head, *(f"  {problem}" for problem in (*problems[:_MOST], *more)), *([tail] if tail else [])])


_MOST = 20
