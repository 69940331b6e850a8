"""The transformations that repeat, under the name that flax.nnx has for their module."""

from .loops import fori_loop as fori_loop
from .loops import while_loop as while_loop
from .metadata import transform_metadata as transform_metadata
from .prefixes import StateAxes as StateAxes
from .scan import Carry as Carry
from .scan import scan as scan
from .vmap import pmap as pmap
from .vmap import vmap as vmap
