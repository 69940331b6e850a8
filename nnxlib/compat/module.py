"""Module and Sequential, under the name that flax.nnx has for them."""

from ..core.module import *  # noqa: F403
from ..nn.sequential import Sequential as Sequential
from ..transforms.capture import capture as capture
