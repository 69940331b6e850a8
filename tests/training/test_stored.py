import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.errors import StateMismatchError
from nnxlib.training.stored import matched, without_aliases


def test_buffers_in_two_places_are_copied():
    """Arrays that are among the others or come twice are copied, once for each further place."""
    shared, own = jnp.ones(2), jnp.ones(3)
    first, second, third = without_aliases([shared, (own, own), 3], [shared])
    assert first is not shared
    assert second[0] is own
    assert second[1] is not own
    assert third == 3


def test_only_the_first_twenty_problems_are_listed():
    """And how many more there are."""
    expected = {("layers", i): nnx.Param(jnp.ones(2)) for i in range(25)}
    with pytest.raises(StateMismatchError, match=r"layers\[19\]: missing, .*\n  ... and 5 more\nPass another.$"):
        matched({}, expected, tuple, "This does not fit.", "Pass another.")
