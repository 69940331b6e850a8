"""Tables of Modules, under the name that flax.nnx has for them."""

from ..tabulate import tabulate as tabulate
