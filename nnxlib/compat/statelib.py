"""State, under the name that flax.nnx has for it."""

from ..core.filters import PathParts as PathParts
from ..core.state import *  # noqa: F403
