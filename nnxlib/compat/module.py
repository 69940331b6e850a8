"""Module, under the name that flax.nnx has for it."""

from ..core.module import *  # noqa: F403
from ..transforms.capture import capture as capture
