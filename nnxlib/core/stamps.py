"""Stamps: how a cached layout learns that what it describes has changed.

Whoever walks a graph to describe it makes a :class:`Stamp`, and leaves it with every node and Variable *before* looking
into them. A structural change of any of these ends the stamp: a single test of ``stamp.valid`` then tells whether a
description still holds, however large the graph is, and whatever else the program changes. Values that are written end
nothing; they are no part of a layout.

Objects hold stamps weakly, so that those of descriptions that are gone do not pile up. What has changed holds none, so
that a stamp learns of each object once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any


class Stamp:
    """Whether what was seen in a walk is unchanged since the walk began, and what has changed in it."""

    __slots__ = ("__weakref__", "changed", "mended", "valid")

    def __init__(self) -> None:
        self.valid = True
        self.mended = 0  # how often it was made valid again, because a description was mended
        self.changed: list[weakref.ref[Any]] = []  # the objects whose structure has changed


Stamps = tuple[weakref.ref[Stamp], ...]

stamping = threading.RLock()  # held while stamps are left: two walks over one object must not lose each other's


def with_stamp(held: Stamps, stamp: weakref.ref[Stamp]) -> Stamps:
    """The stamps of an object and a further one, without those that are gone."""
    return (*[s for s in held if s is not stamp and s() is not None], stamp)


def end_stamps(held: Iterable[weakref.ref[Stamp]], x: Any) -> None:
    """Note that the object ``x``, with these stamps, has changed."""
    changed = weakref.ref(x)
    for reference in held:
        stamp = reference()
        if stamp is not None:
            stamp.changed.append(changed)  # in one step: another thread that mends a description takes the list away
            stamp.valid = False
