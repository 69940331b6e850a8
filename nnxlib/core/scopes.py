"""Name scopes: the operations of a call carry the path of its Module, in jaxprs, HLO and profiles."""

from __future__ import annotations

from typing import Any

from .call_paths import Listener
from .switches import Switch


class use_name_scopes(Switch):
    """Set whether operations carry the path of the Module that makes them; also for a block, or as a decorator.

    The names appear in jaxprs, in lowered and compiled programs, and so in profiles. They are given while a transform
    of nnxlib traces, and change neither results nor the need to compile: a function keeps the names it was traced with.

    Args:
      value: whether operations of this thread do; initially True.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> model, x = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), jnp.ones((1, 2))
    >>> lowered = lambda: nnx.jit(lambda model, x: model(x)).lower(model, x).as_text(debug_info=True)
    >>> 'Sequential/layers/0' in lowered()
    True
    >>> with nnx.use_name_scopes(False):
    ...   'Sequential/layers/0' in lowered()
    False
    """


def scope_of_call(listener: Listener, module: Any, name: str) -> str:
    """The text that a call of a method adds to the name scope around it."""
    stack = listener.stack
    if stack and stack[-1][0] is module:  # super().__call__, or another method of the same Module: the same path
        return ""
    path, outer = listener.path_of(module), listener.current()
    below = path if outer is None or path[: len(outer)] != outer else path[len(outer) :]
    scope = "/".join(map(str, below)) or ("" if path == outer else type(module).__name__)
    return scope if name == "__call__" else f"{scope}.{name}"
