"""Pickles and copies of jitted functions with a name.

Models hold functions such as ``jax.nn.relu`` as activations. Python pickles a function as its name, and a copy of it is
the function itself. Not so for JAX's jitted functions, and those with custom derivatives: pickling them fails, and
``copy.deepcopy`` makes another function, so the copy of a model would have another structure than the model. Once this
module is imported, they are pickled and copied like functions, if they are found under their name; others are treated
as before. So are those of ``__main__`` by cloudpickle, which sends them whole, since another process has another
``__main__``.
"""

from __future__ import annotations

import copyreg
import operator
import sys
import types
from typing import Any

import jax


def global_name(function: Any, pickler: types.FrameType) -> str | None:
    """The name under which a pickler, which runs in this frame, finds a function; None if it has to take it apart."""
    try:
        name, module = function.__qualname__, function.__module__
        takes_apart = "cloudpickle" in pickler.f_globals.get("__name__", "")  # some packages contain a copy of it
        if module == "__main__" and takes_apart:
            return None
        return name if operator.attrgetter(name)(sys.modules[module]) is function else None
    except (AttributeError, KeyError):  # a local function, or one without a name
        return None


def _by_name(function: Any) -> Any:
    # pickle and copy take a string for the name of a global
    return global_name(function, sys._getframe(1)) or function.__reduce_ex__(4)


# The types of functions that deepcopy would copy like objects: a copy is not equal to its original, and traced anew.
FUNCTION_TYPES = (type(jax.jit(_by_name)), jax.custom_jvp, jax.custom_vjp)

for _kind in FUNCTION_TYPES:
    copyreg.pickle(_kind, _by_name)  # type: ignore[arg-type]
