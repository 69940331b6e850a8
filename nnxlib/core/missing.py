"""MISSING: what stands for an argument that is not given, or a value that is not there, where None may be one."""

from typing import Any

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>", "__slots__": ()})()
