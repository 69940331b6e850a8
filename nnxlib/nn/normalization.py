"""The normalising layers, under the name that flax.nnx has for their module."""

from .initializers import Initializer as Initializer
from .norm import Axes as Axes
from .norm import BatchNorm as BatchNorm
from .norm import GroupNorm as GroupNorm
from .norm import InstanceNorm as InstanceNorm
from .norm import LayerNorm as LayerNorm
from .norm import RMSNorm as RMSNorm
from .reparametrised import SpectralNorm as SpectralNorm
from .reparametrised import WeightNorm as WeightNorm
