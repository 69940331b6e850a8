"""Binding Modules to a function once, for a training loop that passes the same ones at every step.

Both functions make a plain partial. A jitted function keeps what it knows about a Module on the Module itself
(core/tables.py), so binding saves no work. It is shorter to write, and code written for flax.nnx uses it.

Bound Modules are seen as they are at each call: their structure may change, inside of the function and outside.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..core.annotations import signature_of
from ..core.tracing import boundary
from .jit import jit


@boundary
def cached_partial(f: Callable, *cached_args: Any) -> functools.partial:
    """Bind the first arguments of a function, as ``functools.partial`` does.

    Args:
      f: usually a function from :func:`nnxlib.jit`, but any will do.
      *cached_args: Modules and anything else that is the same at every call.

    >>> import nnxlib as nnx
    >>> @nnx.jit
    ... def step(layer, by):
    ...   layer.kernel *= by
    ...   return layer.kernel.value.sum()
    >>> layer = nnx.Linear(2, 3, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    >>> double = nnx.cached_partial(step, layer)
    >>> double(2.0).item(), double(2.0).item()
    (12.0, 24.0)
    """
    return functools.partial(f, *cached_args)


class JitPartial(functools.partial):
    """A jitted function with its first arguments; what :func:`jit_partial` returns."""

    @property
    def __wrapped__(self) -> Callable:
        return self.func.__wrapped__

    @property
    def __signature__(self) -> inspect.Signature:
        return signature_of(functools.partial(self.func, *self.args, **self.keywords))

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Trace and lower for these further arguments; what is compiled takes further arguments, too."""
        return self.func._stage("lower", (*self.args, *args), kwargs, len(self.args))

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """Trace for these further arguments."""
        return self.func._stage("trace", (*self.args, *args), kwargs, len(self.args))

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the output for these further arguments with abstract arrays; changes nothing."""
        return self.func.eval_shape(*self.args, *args, **kwargs)

    def clear_cache(self) -> None:
        """Forget every compiled function."""
        self.func.clear_cache()


@boundary
def jit_partial(fun: Callable, *partial_args: Any, **options: Any) -> JitPartial:
    """Compile a function and bind its first arguments.

    Args:
      fun: a function, as in :func:`nnxlib.jit`.
      *partial_args: Modules and anything else that is the same at every call.
      **options: those of :func:`nnxlib.jit`. Numbers of arguments (``static_argnums``, ``donate_argnums``) and the
        entries of ``in_shardings`` count from the first argument of ``fun``, a bound one.

    Returns:
      A function of the remaining arguments, with ``lower``, ``trace``, ``eval_shape`` and ``clear_cache``.

    >>> import nnxlib as nnx
    >>> layer = nnx.Linear(2, 3, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    >>> def scaled(layer, by, verbose):
    ...   return layer.kernel.value.sum() * by
    >>> nnx.jit_partial(scaled, layer, static_argnums=2)(2.0, False).item()
    12.0
    """
    return JitPartial(jit(fun, **options), *partial_args)
