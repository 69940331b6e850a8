"""The property tests run with the check switch on: every cached layout is compared with what it stands for."""

from collections.abc import Iterator

import pytest

from nnxlib.core import live_table


@pytest.fixture(scope="module", autouse=True)
def check_always() -> Iterator[None]:
    """As under NNXLIB_CHECK=1: a layout that is out of date raises instead of computing a stale result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_table, "CHECK_ALWAYS", True)
        yield
