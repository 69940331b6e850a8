"""The transformations that differentiate, under the name that flax.nnx has for their module."""

from collections.abc import Hashable

from .custom import custom_vjp as custom_vjp
from .grad import grad as grad
from .grad import value_and_grad as value_and_grad
from .remat import remat as remat
from .tangents import DiffState as DiffState
from .vjp import PullBack as PullBack
from .vjp import jvp as jvp
from .vjp import vjp as vjp

AxisName = Hashable  # as users' wrappers have it in their signatures
