"""Escapes: tracers and fresh objects that would leave a trace inside of static values.

Arrays, Variables and nodes come out of a trace through the table, if nnxlib can find them. A static value comes out as
it is, and may refer to a tracer or a fresh object where this cannot be replaced: in the closure of a function, in a
partial, in the attributes of an object. A live object would then hold it, so a transform refuses such values.

One case is allowed, so that models whose layers keep their initializers can be made in a trace. A function in a new
object is often called only while the object is made: an initializer whose scale was computed, say. What comes out is
not the function, which would keep the trace alive, but an :class:`Ended`, which raises an error if it is called. The
same goes for a Module in a configuration that the object keeps, if the Module is also an attribute. In tuples, lists,
dicts and dataclasses each function is treated by itself: the ``init`` of an optax transformation refers to the
hyperparameters that it has put into the state, and its ``update`` does not.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable
from typing import Any, cast

import jax
from jax.tree_util import tree_leaves

from .errors import TraceContextError, describe, place_of
from .graph import After
from .inputs import peek
from .layout import Layout
from .look_ups import HOLDERS, held_by
from .objects import Node
from .rows import NodeRow, statics_in
from .static import Const, dict_of
from .tracing import UserLine, in_current_trace
from .variables import Variable

_MOST = 10_000  # objects to visit for one value, which may refer to half of a program


class Ended:
    """Stands for a function that refers to a trace that has ended, or for a Module of such a trace.

    Calls raise :class:`TraceContextError`, and reading attributes an AttributeError with the same text.
    """

    __slots__ = ("message",)

    def __init__(self, message: str):
        self.message = message

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        raise TraceContextError(self.message)

    def __getattr__(self, name: str) -> Any:
        dunder = name.startswith("__") and name.endswith("__")
        raise AttributeError(name if dunder or name in Ended.__slots__ else self.message)

    def __repr__(self) -> str:
        return "<ended>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ended) and self.message == other.message

    def __hash__(self) -> int:
        return hash(self.message)


def without_escapes(after: After, layout: Layout, borrowed: Iterable[Any]) -> After:
    """The table at the end of a trace, without static values that refer to its tracers or to objects made in it.

    The rows of the ``layout`` are those of the caller's objects; new objects follow. What running traces have
    ``borrowed`` may hold tracers.

    Raises:
      TraceContextError: for a value that cannot be replaced, by its path: one of an old object, or one that refers to
        the trace otherwise than through functions and Modules in it.
    """
    clean = {id(x): x for x in borrowed}  # by id, what need not be searched; borrowed objects will be restored
    inside = {id(x) for x in after.walk.objects} - clean.keys()
    find = lambda value: _find(value, lambda x: in_current_trace(x) or id(x) in inside, clean)
    old = len(layout.rows)
    ended: dict[int, dict[Any, Const]] = {}  # by row and name, what comes out in place of a function
    for i, name, spec in statics_in(after.rows):
        if id(spec.value) in clean:  # such as an initializer or function that all layers have
            continue
        found = find(spec.value)
        if found is not None:
            where = place_of((*after.walk.paths[i], name))
            value = spec.value
            if i >= old and isinstance(after.rows[i], NodeRow):
                value = _ended(value, where, find, {})
            if find(value) is not None:
                raise TraceContextError(_ESCAPES.format(where=where, value=spec.value, what=describe(found)) + _INSTEAD)
            ended.setdefault(i, {})[name] = Const.of(value)
    return _with_statics(after, ended) if ended else after


def warn_of_escapes(after: After) -> None:
    """Warn of what comes out of a derivative as it is, since JAX cannot trace it, and holds tracers of that."""
    for k, leaf in enumerate(after.leaves):
        for x in tree_leaves(leaf):  # of a pytree in a Variable
            found = None if isinstance(x, jax.Array) else _find(x, in_current_trace, {})
            if found is not None:
                where, kind = place_of(after.leaf_paths[k]), type(x).__name__
                UserLine().warn(_OPAQUE.format(where=where, kind=kind, what=describe(found)))


def _with_statics(after: After, replaced: dict[int, dict[Any, Const]]) -> After:
    """The table with other static values in fields of new nodes, given by row and name."""
    rows = list(after.rows)
    for i, names in replaced.items():
        row = cast(NodeRow, rows[i])
        rows[i] = row._replace(fields=tuple([(name, names.get(name, spec)) for name, spec in row.fields]))
    changed = tuple([(i, rows[i] if i in replaced else row) for i, row in after.delta.rows])
    return after._replace(rows=rows, delta=after.delta._replace(rows=changed))


_ESCAPES = """\
The static value at {where} ({value!r:.80}) refers to a value of the JAX transformation that is running ({what}), \
which ends with it. Nothing has been written."""
_OPAQUE = """\
{where} is set to a {kind}, which refers to a value of the derivative that is taken ({what}). JAX does not look into \
such an object, and the value cannot be used afterwards (UnexpectedTracerError). Register the class (a dataclass: by \
jax.tree_util.register_dataclass), or make it an nnx.Pytree (@nnx.dataclass); or return arrays, in a tuple or a dict."""
_ENDED = """\
{name} at {where} refers to a value of the JAX transformation in which it was made ({what}). That has ended, so it \
cannot be called any more."""
_ELSEWHERE = """
Use the same Module where it is an attribute, or an item of a list that is one."""
_INSTEAD = """
Write a function that uses `self` as a method of the class; keep arrays in attributes of a Module, or bind them with \
jax.tree_util.Partial. The state of an optimizer keeps a hyperparameter, if its transformation is made by \
optax.inject_hyperparams(optax.adam)(learning_rate=rate)."""


def _ended(value: Any, where: str, find: Callable[[Any], Any], made: dict[int, Any]) -> Any:
    """``value`` with an :class:`Ended` in place of each function in which ``find`` finds something.

    Also in place of each Module that ``find`` finds: it comes out of the trace at another place. ``where`` is the path
    of the static value; ``made`` has the copies of lists, dicts and dataclasses so far, by the ids of the originals.
    """
    found = find(value)
    if found is None:
        return value
    is_node = isinstance(value, Node)
    if found is value if is_node else callable(value):
        remedy = _ELSEWHERE if found is value else _INSTEAD
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return Ended(_ENDED.format(where=where, name=name, what=describe(found)) + remedy)
    if isinstance(value, tuple):
        return getattr(value, "_make", tuple)([_ended(x, where, find, made) for x in value])  # of a named one
    if id(value) in made:
        return made[id(value)]
    if type(value) in (list, dict):
        new = made[id(value)] = copy.copy(value)
        for key in range(len(value)) if type(value) is list else value:
            new[key] = _ended(value[key], where, find, made)
        return new
    if dataclasses.is_dataclass(value) and type(dict_of(value)) is dict:
        new = made[id(value)] = copy.copy(value)
        for name, x in vars(value).items():
            object.__setattr__(new, name, _ended(x, where, find, made))  # it may be frozen
        return new
    return value


def _find(value: Any, escapes: Callable[[Any], bool], clean: dict[int, Any]) -> Any:
    """The first object reached from ``value`` for which ``escapes`` is true; None if there is none.

    If there is none, what was visited is noted in ``clean``, and is not searched again.
    """
    seen: dict[int, Any] = {}
    stack, most = [value], len(clean) + _MOST
    while stack and len(clean) + len(seen) < most:
        value = stack.pop()
        if id(value) not in seen and id(value) not in clean:
            seen[id(value)] = value
            if escapes(value):
                return value
            stack.extend(_parts(value))
    clean |= seen
    return None


def _parts(value: Any) -> Iterable[Any]:
    """The values that a value refers to."""
    if isinstance(value, Node):
        return [child for _, child in value._nnx_children()]
    if isinstance(value, Variable):
        return peek(value._cell), *value._metadata.values()
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)  # at once: these are most of what there is
    if isinstance(value, HOLDERS):
        return held_by(value)
    attributes = None if isinstance(value, types.ModuleType) else dict_of(value)
    return list(attributes.values()) if type(attributes) is dict else ()
