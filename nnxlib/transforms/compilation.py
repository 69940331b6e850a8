"""The transformations that compile, under the name that flax.nnx has for their module."""

from .jit import JitWrapped as JitFn  # noqa: F401
from .jit import JitWrapped as JitWrapped
from .jit import jit as jit
from .partials import jit_partial as jit_partial
from .prefixes import StateSharding as StateSharding
from .shard import shard_map as shard_map
from .stages import Stage as Compiled  # noqa: F401
from .stages import Stage as Lowered  # noqa: F401
from .stages import Stage as Stage
from .stages import Stage as Traced  # noqa: F401
