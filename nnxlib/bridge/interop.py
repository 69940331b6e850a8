"""The names that flax.nnx has in ``bridge.interop``: aliases, no logic."""

from .module import linen_in_bridge_mdl as linen_in_bridge_mdl
from .module import nnx_in_bridge_mdl as nnx_in_bridge_mdl
