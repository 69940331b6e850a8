"""Objects of the graph, under the name that flax.nnx has for them."""

from ..core.containers import *  # noqa: F403
from ..core.data import *  # noqa: F403
from ..core.objects import *  # noqa: F403
