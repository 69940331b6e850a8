"""The names that flax.nnx has in ``bridge.wrappers``: aliases, no logic."""

from .functional import Functional as Functional
from .functional import functional as functional
from .to_linen import ToLinen as ToLinen
from .to_linen import current_linen_module as current_linen_module
from .to_linen import linen_rngs_dict as linen_rngs_dict
from .to_linen import to_linen as to_linen
from .to_linen import to_linen_class as to_linen_class
from .to_nnx import ToNNX as ToNNX
from .to_nnx import lazy_init as lazy_init
