"""Escapes: tracers and fresh objects that would leave a trace inside of static values.

Arrays, Variables and nodes come out of a trace by way of the table, if nnxlib can find them. A static value comes out
as it is, and may refer to a tracer or to a fresh object where it cannot be replaced: in the closure of a function, in a
partial, in the attributes of an object. A live object would then hold it, so a transform refuses such values.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

from .errors import TraceContextError, describe, place_of
from .graph import After
from .inputs import peek
from .objects import Node
from .rows import NodeRow
from .static import ATOMS, Const
from .tracing import in_current_trace
from .variables import Variable

_MOST = 10_000  # objects to visit for one value: it may refer to half of a program


def check_contained(after: After, borrowed: Iterable[Any]) -> None:
    """Check that no static value refers to a tracer of the running trace, or to an object that was made in it.

    Args:
      after: the table at the end of the trace.
      borrowed: live objects that running traces have borrowed, so they may hold tracers.

    Raises:
      TraceContextError: naming the path of the value.
    """
    seen = {id(x): x for x in borrowed}  # not looked into, since they are restored
    inside = {id(x) for x in after.walk.objects} - seen.keys()
    for i, row in enumerate(after.rows):
        for name, spec in row.fields if isinstance(row, NodeRow) else (("metadata", row.metadata),):
            if type(spec) is Const and type(spec.value) not in ATOMS and id(spec.value) not in seen:
                found = _find(spec.value, lambda x: in_current_trace(x) or id(x) in inside, seen)
                if found is not None:
                    where = place_of((*after.walk.paths[i], name))
                    raise TraceContextError(_ESCAPES.format(where=where, value=spec.value, what=describe(found)))


_ESCAPES = """\
The static value at {where} ({value!r:.80}) refers to a value of the JAX transformation that is running ({what}), \
which ends with it. Nothing has been written.
Write a function that uses `self` as a method of the class; keep arrays in attributes of a Module, or bind them with \
jax.tree_util.Partial. An optimizer keeps a hyperparameter in its state: make it of a number, by \
optax.inject_hyperparams(optax.adam)(learning_rate=0.1), and set opt_state.hyperparams['learning_rate'].value."""


def _find(value: Any, escapes: Callable[[Any], bool], seen: dict[int, Any]) -> Any:
    """The first object reached from ``value`` for which ``escapes`` is true; None if there is none."""
    stack, most = [value], len(seen) + _MOST
    while stack and len(seen) < most:
        value = stack.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            if escapes(value):
                return value
            stack.extend(_parts(value))
    return None


@functools.singledispatch
def _parts(value: Any) -> Iterable[Any]:
    """What a value refers to."""
    attributes = getattr(value, "__dict__", None)
    return list(attributes.values()) if type(attributes) is dict else ()


@_parts.register(type)
@_parts.register(types.ModuleType)
def _(value: Any) -> Iterable[Any]:
    return ()


@_parts.register
def _(value: types.FunctionType) -> Iterable[Any]:
    found = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    for cell in value.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return found


@_parts.register
def _(value: types.MethodType) -> Iterable[Any]:
    return value.__self__, value.__func__


@_parts.register
def _(value: functools.partial) -> Iterable[Any]:
    return value.func, *value.args, *value.keywords.values()


@_parts.register(list)
@_parts.register(tuple)
@_parts.register(set)
@_parts.register(frozenset)
def _(value: Iterable[Any]) -> Iterable[Any]:
    return list(value)


@_parts.register
def _(value: dict) -> Iterable[Any]:
    return list(value.values())


@_parts.register
def _(value: Node) -> Iterable[Any]:
    return [child for _, child in value._nnx_children()]


@_parts.register
def _(value: Variable) -> Iterable[Any]:
    return peek(value._cell), *value._metadata.values()
