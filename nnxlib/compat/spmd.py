"""Sharding, under the name that flax.nnx has for it."""

from ..sharding import *  # noqa: F403
