"""Stamps: how a cached layout learns that the objects it describes have changed.

Whoever walks a graph to describe it makes one :class:`Stamp`, and attaches it to each node and Variable *before*
looking into it. A structural change of any of these objects invalidates the stamp. So a single test, ``stamp.valid``,
tells whether the description still holds, however large the graph is and whatever else the program changes. Writing the
value of a Variable invalidates nothing: values are no part of a layout.

Objects refer to stamps weakly, so stamps of dropped descriptions do not pile up. An object that changes loses its
stamps, so each stamp is told of an object once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any


class Stamp:
    """Whether the objects seen in one walk are unchanged since the walk began, and which have changed."""

    __slots__ = ("__weakref__", "changed", "mended", "valid")

    def __init__(self) -> None:
        self.valid = True
        self.mended = 0  # how often it became valid again, because the description was brought up to date
        self.changed: list[weakref.ref[Any]] = []  # the objects whose structure has changed


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
            stamp.changed.append(changed)  # atomic: another thread that mends the description takes the list away
            stamp.valid = False
