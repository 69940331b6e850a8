"""Tests of `NamedTuple` in core/annotations.py, which does what that of `typing` does."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from nnxlib.core.annotations import NamedTuple

if TYPE_CHECKING:
    from elsewhere import Unknown


class Point(NamedTuple):
    """A point."""

    x: int
    y: Unknown = 2

    def total(self) -> Any:
        return self.x + self.y

    @property
    def twice(self) -> Any:
        return 2 * self.total()


def test_it_is_a_tuple_with_names_defaults_and_methods():
    """Fields by position and by name, defaults, methods, equality, hash and repr, as of `typing.NamedTuple`."""
    point = Point(1)
    assert isinstance(point, tuple)
    assert point == (1, 2) == Point(y=2, x=1)
    assert hash(point) == hash((1, 2))
    assert (point.x, point.y, point.total(), point.twice) == (1, 2, 3, 6)
    assert point._replace(x=5) == (5, 2)
    assert (Point._fields, Point._field_defaults) == (("x", "y"), {"y": 2})
    assert (repr(point), Point.__doc__) == ("Point(x=1, y=2)", "A point.")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        point.x = 3  # type: ignore[misc]


def test_it_is_pickled_and_copied_by_its_name():
    """A pickle refers to the class by its module and name; copies are equal."""
    assert (Point.__module__, Point.__qualname__) == (__name__, "Point")
    for again in (pickle.loads(pickle.dumps(Point(1))), copy.deepcopy(Point(1)), copy.copy(Point(1))):
        assert (type(again), again) == (Point, (1, 2))


def test_annotations_stay_as_they_are_written():
    """Nobody evaluates them, so they may name what is imported for type checkers only."""
    assert Point.__annotations__ == {"x": "int", "y": "Unknown"}
