"""The other transformations, under the name that flax.nnx has for their module."""

from .abstract import eval_shape as eval_shape
from .branch import cond as cond
from .branch import switch as switch
from .checkify import checkify as checkify
from .general import make_jaxpr as make_jaxpr
