"""Random streams, under the name that flax.nnx has for them."""

from ..core.reseeding import *  # noqa: F403
from ..core.rngs import *  # noqa: F403
from ..core.variables import RngCount as RngCount
from ..core.variables import RngKey as RngKey
from ..core.variables import RngState as RngState
