"""MISSING: what stands for an argument that is not given, or a value that is not there, where None may be one."""

import sys
from typing import Any

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>", "__slots__": ()})()


def is_missing(argument: Any) -> bool:
    """Whether an argument is not given, or is flax's own MISSING, which wrappers of functions of flax.nnx pass on."""
    return argument is MISSING or argument is getattr(sys.modules.get("flax.typing"), "MISSING", MISSING)
