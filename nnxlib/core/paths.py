"""Where something is: the path of the Module that is running, and of any node below another.

Both are paths as ``nnx.state`` has them: the first one, in the order of the walk, whatever transforms the call went
through. How the path of a call is found is explained in ``calls.py``.
"""

from __future__ import annotations

from typing import Any

from .calls import current_listener
from .data import is_node
from .errors import ArgumentError, Path, PathError
from .graph import pack
from .tracing import boundary


def current_path() -> Path | None:
    """Return the path of the Module whose method is running; None if there is none.

    It starts at the outermost Module that is running, or at the argument of the transform, if no Module has called it.
    So it is the path under which ``nnx.state`` of that root has the Module's Variables: under every transform, in
    eager code, at each call of a Module that is called several times, and for a shared Module, which has its first
    path. A Module that is not part of another has its caller's path and the name of its class.

    In a jitted function it runs when the function is traced, as all Python code does: a function that is not traced
    again does not ask again.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> class Noisy(nnx.Module):
    ...   def __call__(self, x):
    ...     print(nnx.current_path())
    ...     return x
    >>> model = nnx.Sequential(Noisy(), Noisy())
    >>> y = nnx.jit(model)(jnp.ones(2))
    ('layers', 0)
    ('layers', 1)
    """
    listener = current_listener()
    return None if listener is None else listener.current()


@boundary
def path_of(root: Any, node: Any) -> Path:
    """Return the first path of a node below ``root``, the one by which ``nnx.state(root)`` knows it.

    Args:
      root: a Module, or a pytree of Modules.
      node: a Module, List, Dict or Variable; the very object, not an equal one.

    >>> import nnxlib as nnx
    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> nnx.path_of(model, model.layers[0].kernel)
    ('layers', 0, 'kernel')

    Raises:
      ArgumentError: if ``node`` is something that has no identity in a graph, such as an array.
      PathError: if it is not there.
    """
    if not is_node(node):
        raise ArgumentError(
            f"nnx.path_of looks for a Module, List, Dict or Variable; a {type(node).__name__} is known by its value "
            "alone, and may be in many places. Ask for the Module that holds it."
        )
    layout, _, objects = pack(root)
    found = next((path for path, x in zip(layout.paths, objects, strict=True) if x is node), None)
    if found is None:
        raise PathError(
            f"This {type(node).__name__} is not part of the {type(root).__name__}. A Module is found by identity: a "
            "clone, and what nnx.merge or nnx.state returns, are other objects."
        )
    return found
