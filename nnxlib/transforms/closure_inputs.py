"""What a jitted function captures: the objects that it refers to without having been passed them.

They are found while the function is traced (core/closures.py), and are inputs and outputs from then on. At the next
call the function may refer to other ones, if a closure or a global has been set anew. So each step on the ways to them
(core/references.py) is made again, and what it finds is compared with what it found before.

If all objects are found anew, these may be as many as before, with the same structure, but found at other places. A
compiled function takes them in a certain order: first the Module under one name, then the one under another. So the
places at which they were found are part of its key.

A captured Variable that holds a bool or text is no input. Such a value says what to do (``if first.value:``, the labels
of a mask), and cannot be traced. It is a *constant*: part of the key, and seen as it is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from ..core.closures import CapturedObjects, RunningCode, Watch, is_lent_elsewhere, note_running
from ..core.conditions import Conditions
from ..core.errors import TraceContextError
from ..core.finding import reachable
from ..core.graph import Packed
from ..core.layout import KEPT, Layout
from ..core.look_ups import LookUp, referent
from ..core.objects import Node
from ..core.references import Found, Way, held_by_functions, search, used_unnoticed
from ..core.rows import NodeRow, Ref, Tree
from ..core.straight import Step, straight_line
from ..core.tracing import current_trace
from ..core.variables import Variable

# The objects that a function captures at a call; and an object that stands for the places where they were found: the
# very same one whenever each was found at the same places.
Captured = tuple[tuple[Any, ...], object]

NOTHING: Captured = (), None


class _Known:
    """What is looked up at each call."""

    __slots__ = ("conditions", "places", "steps", "straight")

    def __init__(self, steps: list[Step], conditions: Conditions | None, places: object):
        self.steps = steps
        self.conditions = conditions  # what must hold at other places
        self.places = places  # what stands for the places, see `Captured`
        self.straight: Callable[[], Any] | None = None  # code for all of it, made once all was as before

    def roots(self) -> tuple[Any, ...]:
        """What the function captures.

        Raises:
          _Changed: if not all is as it was.
          Exception: what a look-up has raised.
        """
        found = []
        for look_up, before, is_root in self.steps:
            x = look_up.find()
            if x is None or x is not before():
                raise _Changed(is_exchanged=issubclass(type(before()), Node | Variable))
            if is_root:
                found.append(x)
        if self.conditions is not None and not self.conditions.hold():
            raise _Changed(is_exchanged=False)
        if self.straight is None:
            self.straight = straight_line(self.steps, self.conditions)
        return tuple(found)


class _Changed(Exception):
    """Raised if something is not as it was: ``is_exchanged``, if a Module or Variable is no longer at its place."""

    def __init__(self, is_exchanged: bool):
        self.is_exchanged = is_exchanged


EMPTY = _Known([], None, None)

_CONSTANT = frozenset((bool, str))  # the types of values that are constants


class _WithConstants:
    """Stands for the places of captured objects together with the constants, which are these ``values``."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Any, ...]):
        self.values = values


class Captures:
    """The objects that a function captures, as found while it was traced; see core/closures.py.

    Args:
      function: the user's function.
      given: its static arguments; it captures what they refer to as if they were in its closure.
    """

    def __init__(self, function: Callable, given: Sequence[Any] = ()):
        self._function, self._given = function, given
        self._roots: list[weakref.ref] = []
        self._running: dict[int, RunningCode] = {}  # when they were noticed
        self._adding = threading.Lock()
        self._places: dict[Hashable, object] = {}  # what stands for the places, see `Captured`
        self._places_met = 0  # how often they were new ones
        self._constants: list[weakref.ref] = []  # the Variables that hold constants
        self.known: _Known | None = None  # what is looked up at each call; None if that is not known yet

    def add(self, outside: CapturedObjects, before: Sequence[Any]) -> None:
        """Add objects that a trace has captured besides those that it was given ``before``."""
        roots = outside.roots
        if not _others(roots, before):
            raise TraceContextError(_CAPTURED.format(names=", ".join(type(root).__name__ for root in roots)))
        with self._adding:
            if _others(roots, self.now()[0]):  # if not, another thread has added them
                self._running |= outside.running
                found = self._search([*roots, *[reference() for reference in self._roots]])
                self._add(roots, found)
                self.known = self._to_look_up(found)

    def _search(self, sought: Sequence[Any] = ()) -> Found:
        return search(self._function, sought, self._running.values(), self._given)

    def _add(self, roots: Sequence[Any], found: Found) -> None:
        present = {id(reference()) for reference in self._roots}
        holders = _with_holders(roots, _objects_on(found.ways))
        new = [x for x in holders if id(x) not in present] or [x for x in roots if id(x) not in present]
        self._roots = [*self._roots, *map(weakref.ref, new)]

    def _start_anew(self) -> _Known:
        """Start anew, with nothing captured but the Modules that the function may use without a trace noticing it."""
        self._roots, self._running, self._constants = [], {}, []
        found = self._search()
        used = [x for x in used_unnoticed(self._function, found) if x._nnx_is_captured]
        here = [x for x in used if x._nnx_trace is current_trace() or is_lent_elsewhere(x._nnx_trace)]
        if here:
            self._add(here, found)
        known = self._to_look_up(found)
        if len(here) < len(used):  # another trace may take those that this one cannot; no program serves both
            self.known, self._places_met = None, self._places_met + 1
            return _Known(known.steps, known.conditions, object())
        self.known = known
        return known

    def _to_look_up(self, found: Found) -> _Known:
        """What to look up: each step on the ways to the roots, and to the places where Modules may come."""
        ways_to: dict[int, list[Way]] = {}
        for way in found.ways:
            ways_to.setdefault(id(way.value), []).append(way)
        references = self._roots  # one list: another thread may set a new one
        roots = [id(reference()) for reference in references]
        to_roots = [ways_to.get(root, []) for root in roots]
        given = set(roots)
        others = [way for way in found.objects() if id(way.value) not in given]
        known = set[int]()
        conditions = Conditions(found, others, known)
        steps: list[Step] = []
        for reference, to_root in zip(references, to_roots, strict=True):
            directly = LookUp(referent, reference), reference
            last, *further = [step for way in to_root for step in way.steps(known)] or [directly]
            steps += [(*last, True), *[(*step, False) for step in further]]
        places = self._what_stands_for(to_roots, others)
        return _Known(steps, conditions or None, places) if steps or conditions else EMPTY

    def _what_stands_for(self, to_roots: list[list[Way]], others: list[Way]) -> object:
        """What stands for the places of each root, and of other objects; None if there are no objects.

        It is a new object, equal to no other, if a place is unknown or a key has no hash.
        """
        if not to_roots and not others:
            return None
        widths, new = dict[int, int](), object()
        try:
            places = tuple([frozenset([way.places(widths) for way in ways]) for ways in to_roots])
            of_others = frozenset([(way.places(widths), type(way.value)) for way in others])
            found = self._places.setdefault((places, of_others), new) if all(places) else new
        except Exception:  # of user code, such as a comparison of two keys
            found = new
        self._places_met += found is new
        return found

    def have_many_places(self) -> bool:
        """Whether there have been so many places that programs for them should be dropped; if so, counts anew."""
        if self._places_met <= KEPT:
            return False
        self._places, self._places_met = {}, 0
        return True

    def capture_sharing(self, captured: Sequence[Any]) -> None:
        """Before a trace that borrows these objects, capture others to which the function refers and that share parts.

        The trace would not notice them, as the parts belong to it. (They may be such parts.) But at a later call there
        may be an object in the place of one that shares nothing.

        Raises:
          CapturedObjects: if there are any.
        """
        seen = set[int]()
        parts = {id(part) for x in captured for _, part in reachable(x, seen)}
        given = set(map(id, captured))
        others = [x for x in _objects_on(self._search(captured).ways) if id(x) not in given]
        found = [x for x in others if any(id(part) in parts for _, part in reachable(x, set()))]
        if found:
            raise CapturedObjects(found)

    def capture_held(self, packed: Packed) -> None:
        """Before a trace, capture the objects that functions in static values of its arguments hold.

        Such a function, ``attention_fn=partial(attend, rope=RoPE())`` say, is there to be called. So the trace would
        notice them and be made twice, or not notice them, if it only reads their settings.

        Raises:
          CapturedObjects: if there are any.
        """
        given = set(map(id, packed.objects))
        held = held_by_functions([const.value for _, _, const in packed.layout.statics])
        others = [x for x in held if x._nnx_is_captured and id(x) not in given]
        found = [x for x in others if x._nnx_trace is current_trace()]
        if found:
            raise CapturedObjects(found)

    def now(self) -> Captured:
        """What the function captures, as far as that is known; found again, if it now refers to other objects."""
        known = self.known
        if known is None:
            return self._captured(self._start_anew())
        try:
            found = known.straight is not None and known.straight()
        except Exception:  # of a look-up, which is made once more below
            found = False
        if found is False:
            try:
                found = known.roots()
            except Exception as error:
                return self._found_again(known, isinstance(error, _Changed) and error.is_exchanged)
        if self._running and Watch.count:
            note_running(self._running)
        return found, self._with_constants(known.places) if self._constants else known.places

    def _with_constants(self, places: object) -> object:
        """What stands for these places and the present constants; a new object if one of these is no constant now."""
        variables = [reference() for reference in self._constants]
        values = tuple([None if x is None else x._cell.value for x in variables])
        if not _CONSTANT.issuperset(map(type, values)):
            return object()
        new = _WithConstants(values)
        found = self._places.setdefault((places, values), new)
        self._places_met += found is new
        return found

    def has_other_constants(self, packed: Packed, places: object) -> bool:
        """Whether what was packed has other constants than :meth:`now` assumed; if so, they are known from now on."""
        found = constants_in(packed.layout, packed.leaves)
        if not found and not self._constants:
            return False
        variables = [packed.objects[packed.layout.variables[k]] for k in found]
        known = [reference() for reference in self._constants]
        if list(map(id, variables)) == list(map(id, known)) and (*found.values(),) == getattr(places, "values", None):
            return False
        self._constants = list(map(weakref.ref, variables))
        return True

    def _found_again(self, before: _Known, is_exchanged: bool) -> Captured:
        """What the function captures after something changed: perhaps only the ways, as when a dict has grown."""
        if not is_exchanged and not any(reference() is None for reference in self._roots):
            known = self._to_look_up(self._search())
            if known.places is before.places:
                self.known = known
                return self._captured(known)
        return self._captured(self._start_anew())

    def _captured(self, known: _Known) -> Captured:
        """What the function captures, when this was just found out; nothing if some of it is gone already."""
        roots = tuple([reference() for reference in self._roots])
        places = self._with_constants(known.places) if self._constants else known.places
        return (roots, places) if all(root is not None for root in roots) else NOTHING


def constants_in(layout: Layout, leaves: Sequence[Any]) -> dict[int, Any]:
    """The constants among the leaves of packed :class:`Arguments`, by position."""
    positions = [k for k in range(len(layout.variables)) if type(leaves[k]) in _CONSTANT]
    return {k: leaves[k] for k in positions if layout.leaf_paths[k][0] == "captured"}


def _others(roots: Sequence[Any], before: Sequence[Any]) -> set[int]:
    return {id(root) for root in roots} - {id(root) for root in before}


def _objects_on(ways: Iterable[Way]) -> list[Any]:
    """The objects to which some ways lead, and that can be captured, each once."""
    objects = {id(way.value): way.value for way in ways if issubclass(type(way.value), Node | Variable)}
    return [x for x in objects.values() if x._nnx_is_captured]


def _with_holders(roots: Sequence[Any], named: Sequence[Any]) -> list[Any]:
    """The roots; in place of a root that objects hold which the function names, these: it may be replaced in them."""
    holders: dict[int, list[Any]] = {}
    for x in named:
        for _, part in reachable(x, set()):
            holders.setdefault(id(part), []).append(x)  # it holds itself
    return list({id(x): x for root in roots for x in holders.get(id(root), [root])}.values())


def captured_rows(layout: Layout) -> list[int]:
    """The rows of the captured objects in packed :class:`Arguments`, and of those below them."""
    root = layout.root
    assert isinstance(root, Tree)
    stack: list[Any] = [child for path, child in root.at(()) if path[0] == "captured"]
    found: dict[int, None] = {}
    while stack:
        spec = stack.pop()
        if isinstance(spec, Tree):
            stack.extend(spec.children)
        elif isinstance(spec, Ref) and spec.index not in found:
            found[spec.index] = None
            row = layout.rows[spec.index]
            if isinstance(row, NodeRow):
                stack.extend(child for _, child in row.fields)
    return sorted(found)


_CAPTURED = """\
The function uses objects ({names}) that belong to another trace, in a way that nnx.jit cannot follow. Pass them as \
arguments."""
