"""Layers: Modules with parameters, and the functions they are made of.

A layer holds its parameters as Variables and its settings as plain attributes of the constructor's names. Its
arithmetic is a few pure functions (see ``core/programs.py``); what follows from the settings alone is worked out in
Python before. ``_nnx_sizes()`` is a layer's declared sizes in words, for error messages and tables.
"""

from . import activations as activations
from . import attention as attention
from . import conv as conv
from . import dtypes as dtypes
from . import initializers as initializers
from . import linear as linear
from . import lora as lora
from . import norm as norm
from . import normalization as normalization
from . import pooling as pooling
from . import recurrent as recurrent
from . import reparametrised as reparametrised
from . import stack as stack
from . import stochastic as stochastic
