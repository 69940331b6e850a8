"""Recordings: the Variables that ``sow`` and ``perturb`` make, as attributes that can be told from the user's own.

A mark of the node says that an attribute is a recording, and whether values are appended to it, as ``sow`` does by
default. Within a ``capture``, what is appended is never an input of a transform: its body records anew, with the axes
of the body, and that follows what was recorded before (:func:`recorded_anew`). So a Module may be called outside of a
loop and in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .calls import recorded_types
from .errors import reachable
from .objects import Node, check_writable, structure_changed
from .tracing import current_trace
from .variables import Variable

_RECORDED = "recorded"  # the mark of an attribute has the key (name, _RECORDED), and says whether values are appended


def record(node: Any, name: str, variable: Variable, appends: bool = False) -> None:
    """Set an attribute as sow and perturb do."""
    check_writable(node, f"record {name!r} in an attribute")
    setattr(node, name, variable)
    node._nnx_mark((name, _RECORDED), appends)


def attribute_for(node: Any, name: str) -> str:
    """The attribute to record under a name: within a capture another one, where this would hide a method of the class.

    Raises:
      ValueError: if it would hide a method, outside of a capture.
    """
    inherited = inspect.getattr_static(type(node), name, None)
    if not (inspect.isroutine(inherited) or isinstance(inherited, property)):
        return name
    if recorded_types() is None:
        raise ValueError(
            f"Expected the attribute {name!r} of {type(node).__name__} to be a Variable, got a "
            f"{type(inherited).__name__} of the class; choose another name to record under."
        )
    return name + _ASIDE


def recorded_name(attribute: str) -> str:
    """The name that was recorded under: the inverse of :func:`attribute_for`."""
    return attribute.removesuffix(_ASIDE)


_ASIDE = "()"  # no attribute of a class can be called so


def recorded_in(node: Node) -> list[str]:
    """The attributes of a node that sow or perturb has made."""
    return [name for name, _ in node._nnx_children() if is_recorded(node._nnx_marks, name)]


def is_recorded(marks: Any, name: Any) -> bool:
    """Whether the marks of a node say that this attribute is a recording."""
    return (name, _RECORDED) in (marks or {})


def appends(marks: Any, name: Any) -> bool:
    """Whether they say that values are appended to it."""
    return bool((marks or {}).get((name, _RECORDED)))


class Aside(NamedTuple):
    """A node whose recordings were taken out, and what it held."""

    node: Node
    items: dict[Any, Any]
    marks: dict[Any, Any]


def take_out(root: Any, chosen: Callable[[Node, str, Variable], bool]) -> list[Aside]:
    """Remove the chosen recordings from all nodes below ``root`` that belong to the running trace."""
    found, trace = [], current_trace()
    for _, x in reachable(root, set()):
        if isinstance(x, Node) and x._nnx_trace is trace:
            items = x._nnx_contents()
            gone = {name for name in recorded_in(x) if chosen(x, name, items[name])}
            if gone:
                marks = x._nnx_marks or {}
                found.append(Aside(x, items, marks))
                marked = {(name, _RECORDED) for name in gone}
                _refill(
                    x,
                    {name: value for name, value in items.items() if name not in gone},
                    {key: mark for key, mark in marks.items() if key not in marked},
                )
    return found


def put_back(aside: list[Aside]) -> None:
    """Put recordings back; what has been appended meanwhile follows what was there."""
    for node, before, marks in aside:
        now = node._nnx_contents()
        for name in now.keys() & before.keys():
            if now[name] is not before[name] and appends(node._nnx_marks, name):
                now[name].set_raw_value((*before[name].get_raw_value(), *now[name].get_raw_value()))
        items = {name: now.get(name, value) for name, value in before.items()} | now
        _refill(node, items, {**marks, **(node._nnx_marks or {})})


def fill_up(node: Node, name: str, kind: type[Variable], values: Any, appends: bool) -> None:
    """Make ``name`` the last recording of a node, with ``values`` where it lacks some of them."""
    found = node._nnx_contents().get(name)
    if found is not None:
        had: Any = found.get_raw_value()
        values = (*had, *values[len(had) :]) if appends else had
        delattr(node, name)
    record(node, name, kind(values), appends)


def _refill(node: Node, items: dict[Any, Any], marks: dict[Any, Any]) -> None:
    node._nnx_fill(items)
    object.__setattr__(node, "_nnx_marks", marks or None)
    structure_changed(node)


@contextmanager
def recorded_anew(root: Any) -> Iterator[None]:
    """Within a capture, let the block record anew what is appended below ``root``, to follow what was there before."""
    kinds = recorded_types() or ()
    aside = take_out(root, lambda x, name, v: type(v) in kinds and appends(x._nnx_marks, name)) if kinds else []
    try:
        yield
    finally:
        put_back(aside)
