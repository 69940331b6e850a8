"""Filters, under the name that flax.nnx has for them."""

from ..core.filters import *  # noqa: F403
