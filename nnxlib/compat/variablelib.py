"""Variables, under the name that flax.nnx has for them."""

from ..core.variables import *  # noqa: F403
