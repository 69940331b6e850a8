"""Random streams, under the name that flax.nnx has for them."""

from ..core.rngs import *  # noqa: F403
from ..core.streams import *  # noqa: F403
from ..core.variables import RngCount as RngCount
from ..core.variables import RngKey as RngKey
from ..core.variables import RngState as RngState
