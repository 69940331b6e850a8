"""JAX's transformations for functions of Modules, all on one engine (:mod:`nnxlib.transforms.lift`)."""

from . import autodiff as autodiff
from . import compilation as compilation
from . import iteration as iteration
from . import transforms as transforms
