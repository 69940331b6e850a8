"""Leaves go into nested dicts, and come out of them, in the order that a layout has."""

import pytest

from nnxlib.core.nesting import Nesting

PATHS = (("b", "y"), ("b", "x"), ("a",), ("layers", 1), ("layers", 0))


def test_all_leaves():
    """Sorted they are in the order of a State; nested and flattened again, in that of the layout."""
    nesting, leaves = Nesting(PATHS), list("vwxyz")
    assert nesting.paths == (("a",), ("b", "x"), ("b", "y"), ("layers", 0), ("layers", 1))
    assert nesting.positions == [0, 1, 2, 3, 4]
    nested = nesting.nest(leaves)
    assert nesting.sort(leaves) == list("xwvzy")
    assert nested == {"a": "x", "b": {"x": "w", "y": "v"}, "layers": {0: "z", 1: "y"}}
    assert nesting.flatten(nested) == leaves


def test_some_leaves():
    """Of a group, the leaves are given and found in the order of their positions, too."""
    nesting, leaves = Nesting(PATHS, [4, 0, 1]), list("vwz")
    assert nesting.paths == (("b", "x"), ("b", "y"), ("layers", 0))
    assert nesting.positions == [0, 1, 4]
    assert [nesting.within(count) for count in (0, 1, 4, 5)] == [[], [0], [0, 1], [0, 1, 4]]
    nested = nesting.nest(leaves)
    assert nesting.sort(leaves) == list("wvz")
    assert nested == {"b": {"x": "w", "y": "v"}, "layers": {0: "z"}}
    assert nesting.flatten(nested) == leaves


@pytest.mark.parametrize("levels", [{}, {"a": 1}, {"a": {"x": 1}, "c": 2}, 3])
def test_other_keys_do_not_fit(levels):
    """Levels with other keys are not flattened."""
    assert Nesting((("a", "x"), ("b",))).flatten(levels) is None
