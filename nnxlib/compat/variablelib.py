"""Variables, under the name that flax.nnx has for them."""

from ..core.variables import *  # noqa: F403
from ..sharding import use_eager_sharding as use_eager_sharding
from ..sharding import using_eager_sharding as using_eager_sharding
