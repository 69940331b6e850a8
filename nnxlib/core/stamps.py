"""Stamps: how a cached layout learns that the objects it describes have changed.

Whoever walks a graph to describe it makes one :class:`Stamp`, and attaches it to each node and Variable *before*
looking into it. A structural change of any of these objects invalidates the stamp. So a single test, ``stamp.valid``,
tells whether the description still holds, however large the graph is and whatever else the program changes. Writing the
value of a Variable invalidates nothing: values are no part of a layout.

Objects refer to stamps weakly, so stamps of dropped descriptions do not pile up. An object that changes loses its
stamps, so each stamp is told of an object once.

Not everything that is described reports its changes. What does not is compared each time (editable.py, foreign.py). A
State, which is no object of the graph, reports to the stamps that know it (:class:`States`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any


class Stamp:
    """Whether the objects seen in one walk are unchanged since the walk began, and which have changed."""

    __slots__ = ("__weakref__", "changed", "edition", "levels", "valid")

    levels: dict[int, dict]  # of the States that were seen, by id; only if there are some

    def __init__(self) -> None:
        self.edition = 1  # of the description: one more each time that it is brought up to date
        self.valid = self.edition  # or False; a number, so that what was noted of an earlier edition is told apart
        self.changed: list[Callable[[], Any]] = []  # weak references to the objects whose structure has changed

    def renew(self) -> None:
        """Be valid again, for a description that was brought up to date."""
        self.edition += 1
        self.valid = self.edition

    def __del__(self) -> None:
        """Become invalid, in case a finalizer resurrects the objects: their references to this are already cleared."""
        self.changed, self.valid = [gone], False


def gone() -> None:
    """Noted in place of a reference to a changed object, if there is none: then the description is made anew."""


Stamps = tuple[weakref.ref[Stamp], ...]

stamping = threading.RLock()  # held while stamps are attached: walks of two threads must not lose each other's stamps


def with_stamp(stamps: Stamps, stamp: weakref.ref[Stamp]) -> Stamps:
    """The stamps of an object with one more, without those that are gone."""
    return (*[s for s in stamps if s is not stamp and s() is not None], stamp)


def invalidate(stamps: Iterable[weakref.ref[Stamp]], x: Any) -> None:
    """Note in its stamps that the object ``x`` has changed."""
    changed = weakref.ref(x)
    for reference in stamps:
        stamp = reference()
        if stamp is not None:
            stamp.changed.append(changed)  # before `valid`: a thread that patches the description looks at both
            stamp.valid = False


class States:
    """The stamps of all States.

    A State has none itself, since it must be as cheap as a dict, and has many views. So a write looks for stamps that
    know the level, a dict, that it changes.
    """

    stamps: Stamps = ()

    @classmethod
    def attach(cls, stamp: Stamp, levels: dict[int, dict]) -> None:
        """Let a write to one of these levels, given by id, invalidate a stamp."""
        stamp.levels = levels
        with stamping:
            cls.stamps = with_stamp(cls.stamps, weakref.ref(stamp))

    @classmethod
    def wrote(cls, level: dict) -> None:
        """Note that a level has other items now."""
        for reference in cls.stamps:
            stamp = reference()
            if stamp is not None and id(level) in stamp.levels:
                stamp.changed.append(gone)
                stamp.valid = False
