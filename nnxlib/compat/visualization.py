"""Modules in a notebook, under the name that flax.nnx has for it."""

from ..inspection.display import display as display
