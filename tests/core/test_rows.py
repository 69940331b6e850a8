"""Rows and specs, the data of the table."""

import pickle

from nnxlib.core.rows import LEAF, SAME


def test_marks_in_a_table_print_and_pickle():
    """The marks in a table have readable reprs and keep their identity through pickle."""
    assert (repr(LEAF), repr(SAME), pickle.loads(pickle.dumps((LEAF, SAME)))) == ("*", "same", (LEAF, SAME))
    assert pickle.loads(pickle.dumps(LEAF)) is LEAF
