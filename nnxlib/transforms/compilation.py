"""The transformations that compile, under the name that flax.nnx has for their module."""

from .jit import jit as jit
from .partials import jit_partial as jit_partial
from .prefixes import StateSharding as StateSharding
from .shard import shard_map as shard_map
