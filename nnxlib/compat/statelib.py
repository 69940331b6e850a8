"""State, under the name that flax.nnx has for it."""

from ..core.state import *  # noqa: F403
