"""Recordings: the Variables that ``sow`` and ``perturb`` make, in attributes that are marked as recordings.

The mark also says whether further values are appended, as ``sow`` does by default. Within an ``nnx.capture``, a
recording to which values are appended is never an input of a transform: the body of the transform starts a new one,
with the axes of the body, and its values are appended to the earlier ones afterwards (:func:`recorded_anew`). So a
Module may be called both outside and inside of a loop. What is recorded in each slice, in a Module that is passed
whole, gets an axis (``stack_axes`` in transforms/axes.py). A recording does not count as a change of structure,
which a branch or a loop would refuse (``is_taken_out`` in body_checks.py); each branch then returns what any of them
records (branch.py).

Copies of nodes, which ``nnx.view`` and ``nnx.merge`` make within a capture, record for the originals: what they hold is
moved there when the function that made them ends (:func:`bring_back`). If that is the body of a transform, and the
original lies outside of it, a :class:`Carrier` takes the recordings out (not from the branches of a ``cond``, the loops
of ``while_loop`` and ``fori_loop``, and ``shard_map``).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .annotations import NamedTuple
from .call_paths import Listener
from .calls import current_collector, current_listener, recorded_types, recorder_for
from .errors import UsageError
from .finding import reachable
from .objects import Node, Pytree, check_writable, class_attribute, refill, set_marked
from .tracing import current_trace
from .variables import Variable

_RECORDED = "recorded"  # the mark of an attribute has the key (name, _RECORDED), and says whether values are appended


def record(node: Any, name: str, variable: Variable, appends: bool = False) -> None:
    """Set an attribute, and mark it as a recording; an enclosing capture counts it."""
    if (collector := current_collector()) is not None:
        collector.count += 1
    check_writable(node, f"record {name!r} in an attribute")
    set_marked(node, name, variable, (name, _RECORDED), appends)


def attribute_for(node: Any, name: str) -> str:
    """The attribute for a recording with this name; within a capture, one with a suffix if that name is taken.

    Raises:
      ValueError: if the name is that of a method or property, outside of a capture.
    """
    inherited = class_attribute(type(node), name)
    inherits = inspect.isroutine(inherited) or isinstance(inherited, property)
    if current_collector() is not None:
        taken = inherits or (name in node._nnx_contents() and not is_recorded(node._nnx_marks, name))
        return name + _SUFFIX if taken else name
    if inherits:
        raise UsageError(
            f"Expected the attribute {name!r} of {type(node).__name__} to be a Variable, got a "
            f"{type(inherited).__name__} of the class; choose another name to record under."
        )
    return name


def recorded_name(attribute: str) -> str:
    """The name of the recording in an attribute: the inverse of :func:`attribute_for`."""
    return attribute.removesuffix(_SUFFIX)


_SUFFIX = "()"  # no name in Python ends like this


def recorded_in(node: Node) -> list[str]:
    """The attributes of a node that are recordings."""
    return [name for name, _ in node._nnx_children() if is_recorded(node._nnx_marks, name)]


def is_recorded(marks: Any, name: Any) -> bool:
    """Whether an attribute is a recording, given the marks of its node."""
    return (name, _RECORDED) in (marks or {})


def is_appended_to(marks: Any, name: Any) -> bool:
    """Whether values are appended to a recording, given the marks of its node."""
    return bool((marks or {}).get((name, _RECORDED)))


class Removed(NamedTuple):
    """A node from which recordings were removed, and what it held before."""

    node: Node
    items: dict[Any, Any]
    marks: dict[Any, Any]


def take_out(root: Any, chosen: Callable[[Node, str, Variable], bool]) -> list[Removed]:
    """Remove the chosen recordings from the nodes below ``root`` that belong to the running trace."""
    found, trace = [], current_trace()
    for _, x in reachable(root, set()):
        if isinstance(x, Node) and x._nnx_trace is trace:
            items = x._nnx_contents()
            gone = {name for name in recorded_in(x) if chosen(x, name, items[name])}
            if gone:
                marks = x._nnx_marks or {}
                found.append(Removed(x, items, marks))
                marked = {(name, _RECORDED) for name in gone}
                kept = {name: value for name, value in items.items() if name not in gone}
                refill(x, kept, {key: mark for key, mark in marks.items() if key not in marked})
    return found


def put_back(removed: list[Removed]) -> None:
    """Put recordings back; values recorded in the meantime are appended to the earlier ones."""
    for node, before, marks in removed:
        now = node._nnx_contents()
        for name in now.keys() & before.keys():
            if now[name] is not before[name] and is_appended_to(node._nnx_marks, name):
                now[name].set_raw_value((*before[name].get_raw_value(), *now[name].get_raw_value()))
        items = {name: now.get(name, value) for name, value in before.items()} | now
        refill(node, items, {**marks, **(node._nnx_marks or {})})


class Carrier(Pytree):
    """An additional argument of a transform within a capture: it takes out what copies of outer nodes have recorded.

    In the body such a recording becomes an attribute of the carrier. So it comes back as that of any argument does;
    from each slice with axis 0, which is the label of the carrier.
    """


def bring_back(listener: Listener) -> None:
    """Within a capture, move the recordings of copies of nodes to the originals, or to the carrier of the transform."""
    original_of = {id(copy): original for copy, original in listener.copies}
    for node, original in listener.copies:
        while id(original) in original_of:  # a copy of a copy
            original = original_of[id(original)]
        if isinstance(node, Node) and node._nnx_trace is current_trace():
            for name in recorded_in(node):
                variable, appends = node._nnx_contents()[name], is_appended_to(node._nnx_marks, name)
                if type(variable) in recorded_types():
                    delattr(node, name)
                    _give(listener, original, name, variable, appends)
    listener.copies.clear()


def _give(listener: Listener, original: Node, name: str, variable: Variable, appends: bool) -> None:
    """Record what a copy has recorded in its original; in the carrier, if the original is not of the running trace."""
    original = recorder_for(original)
    if original._nnx_trace is not current_trace():
        if listener.carrier is None or listener.collector is None:
            return
        original, name = listener.carrier, f"{name}@{listener.collector.number_of(original)}"
    held = original._nnx_contents().get(name)
    if held is None:
        record(original, name, variable, appends)
    elif appends and held is not variable:
        had, values = held.get_raw_value(), variable.get_raw_value()
        follow = len(had) > len(values) or any(map(operator.is_not, had, values))
        held.set_raw_value((*had, *values) if follow else values)


def with_carrier(arguments: Any) -> Any:
    """The arguments of a transform; within a capture with a :class:`Carrier`, for :func:`give_on` at its end."""
    if current_collector() is None:
        return arguments
    return arguments._replace(captured=(*arguments.captured, Carrier()))


def carrier_in(captured: tuple) -> Carrier | None:
    """The Carrier among what :func:`with_carrier` has returned, if there is one; it is the last."""
    return captured[-1] if captured and type(captured[-1]) is Carrier else None


def give_on(arguments: Any) -> None:
    """Give what the body of a transform has recorded in its carrier to the originals, or to the next carrier."""
    carrier = carrier_in(arguments.captured)
    if carrier is None or (listener := current_listener()) is None or listener.collector is None:
        return
    for attribute in recorded_in(carrier):
        name, _, number = attribute.rpartition("@")
        variable, appends = carrier._nnx_contents()[attribute], is_appended_to(carrier._nnx_marks, attribute)
        _give(listener, listener.collector.numbered[int(number)], name, variable, appends)


def fill_up(node: Node, name: str, kind: type[Variable], values: Any, appends: bool) -> None:
    """Make ``name`` the last recording of a node, extended by those of the ``values`` that it does not have yet."""
    found = node._nnx_contents().get(name)
    if found is not None:
        had: Any = found.get_raw_value()
        values = (*had, *values[len(had) :]) if appends else had
        delattr(node, name)
    record(node, name, kind(values), appends)


@contextmanager
def recorded_anew(root: Any) -> Iterator[None]:
    """Within a capture, start new recordings below ``root`` in the block; after it, append them to the earlier ones."""
    kinds = recorded_types()
    chosen = lambda node, name, variable: type(variable) in kinds and is_appended_to(node._nnx_marks, name)
    removed = take_out(root, chosen) if kinds else []
    try:
        yield
    finally:
        put_back(removed)
