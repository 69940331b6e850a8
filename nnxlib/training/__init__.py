"""Training: optimizers, moving averages, metrics and a functional train state, around any optax-like transformation.

A *transformation* is an object with ``init(params)`` and ``update(grads, state, params)``, as optax makes them. It
works on States of values; what is kept between steps lives in Variables, at the paths of the parameters. Nothing here
imports optax.
"""

from . import ema as ema
from . import metrics as metrics
from . import optimizer as optimizer
