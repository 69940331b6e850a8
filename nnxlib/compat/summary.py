"""Tables of Modules, under the name that flax.nnx has for them."""

from ..inspection.tabulate import tabulate as tabulate
