"""Layers that draw random numbers when called: Dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.errors import ArgumentError, UsageError
from ..core.formulas import as_one, formula, step
from ..core.module import Module
from ..core.rngs import Rngs, RngStream
from .dtypes import Array, input_error
from .settings import NO_MODE, next_key


class Dropout(Module):
    """Set random elements to zero while training, and scale the others up so that the expectation stays.

    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 15 (2014).

    Args:
      rate: probability of an element to become zero, from 0 to 1.
      broadcast_dims: axes along which all elements are dropped or kept together.
      deterministic: whether to pass the input through; ``None``: each call says. ``model.eval()`` sets it and
        ``model.train()`` undoes that.
      rng_collection: name of the stream in ``rngs``.
      rngs: an Rngs or a stream. The layer keeps a fork of it, so it draws from no one else's stream.
      axis_name: name of a mapped axis (``vmap``, ``pmap``, ``shard_map``) along which masks are to differ although the
        layer is not split along it. Without it all rows of a mapped batch get the same mask.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 6)))
    Array([[2., 0., 2., 0., 2., 2.]], dtype=float32)
    >>> layer.eval()
    >>> layer(jnp.ones((1, 6)))
    Array([[1., 1., 1., 1., 1., 1.]], dtype=float32)

    Raises:
      ValueError: if ``rate`` is not between 0 and 1.
      KeyError: if ``rngs`` has neither the stream nor a default.
      TypeError: if ``rngs`` is not an Rngs or a stream.
    """

    rngs: RngStream | None
    axis_name: str | None = None  # for a subclass with a constructor of its own

    def __init__(
        self,
        rate: float,
        *,
        broadcast_dims: Sequence[int] = (),
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        rngs: Rngs | RngStream | None = None,
        axis_name: str | None = None,
    ):
        if isinstance(rate, int | float | np.number) and not 0 <= rate <= 1:
            raise UsageError(f"The rate of Dropout is a probability, from 0 to 1, but got {rate}.")
        if isinstance(rate, str):
            raise ArgumentError(f"The rate of Dropout is a number from 0 to 1, but got {rate!r}.")
        if isinstance(rate, Rngs | RngStream):
            kind = type(rate).__name__
            raise ArgumentError(f"Dropout takes its rate first, but got {kind}: nnx.Dropout(0.5, rngs=rngs).")
        if isinstance(rngs, Rngs):
            rngs = rngs[rng_collection]
        elif rngs is not None and not isinstance(rngs, RngStream):
            raise ArgumentError(f"rngs must be a Rngs, RngStream or None, but got {type(rngs)}.")
        self.rate = rate
        self.broadcast_dims = tuple(broadcast_dims)
        self.deterministic = deterministic
        self.rng_collection = rng_collection
        self.rngs = None if rngs is None else rngs.fork()
        self.axis_name = axis_name

    def _nnx_sizes(self) -> str:
        return str(self.rate)

    def __call__(
        self, inputs: Array, *, deterministic: bool | None = None, rngs: Rngs | RngStream | Array | None = None
    ) -> Array:
        """Return ``inputs`` with elements dropped, or as they are if deterministic.

        Args:
          inputs: floating array of any shape.
          deterministic: overrides the attribute.
          rngs: Rngs, stream or key to use instead of the layer's own stream.

        Raises:
          LayerInputError: if the input is of an integer dtype.
          ValueError: if neither the call nor the attribute says whether to drop, or there is no stream to draw from.
        """
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise UsageError(NO_MODE.format("deterministic", "Dropout"))
        rate = self.rate
        if deterministic or rate == 0:
            return inputs
        if rate == 1:
            return jnp.zeros_like(inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.inexact):
            raise input_error(self, "inputs of a floating dtype", inputs)
        if self.broadcast_dims and not all(-inputs.ndim <= axis < inputs.ndim for axis in self.broadcast_dims):
            raise input_error(self, f"inputs with the axes broadcast_dims={self.broadcast_dims}", inputs)
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise UsageError(
                "`deterministic` is False, but no `rngs` argument was provided to Dropout as either a __call__ "
                "argument or class attribute. Write nnx.Dropout(rate, rngs=rngs) or dropout(x, rngs=rngs)."
            )
        key = next_key(rngs, self.rng_collection)
        if self.axis_name is not None:
            key = jax.random.fold_in(key, lax.axis_index(self.axis_name))
        return _drop(key, inputs, 1.0 - rate, self.broadcast_dims)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set what :func:`nnxlib.view` may set on this layer."""
        if deterministic is not None:
            self.deterministic = deterministic


@step("shape", "broadcast_dims")
def _mask(key: Array, keep: Any, shape: tuple[int, ...], broadcast_dims: tuple[int, ...]) -> Array:
    drawn = list(shape)
    for axis in broadcast_dims:
        drawn[axis] = 1
    return jnp.broadcast_to(as_one(jax.random.bernoulli, key, p=keep, shape=drawn), shape)


@step()
def _divide(x: Array, by: Any) -> Array:
    return x / by


@step()
def _select(mask: Array, x: Array) -> Array:
    wanted = jax.typeof(x).sharding
    if jax.typeof(mask).sharding != wanted and not wanted.mesh.empty:  # where axes are sharded explicitly
        mask = jax.sharding.reshard(mask, wanted)
    return lax.select(mask, x, jnp.zeros_like(x))


@formula("broadcast_dims")
def _drop(key: Array, x: Array, keep: Any, broadcast_dims: tuple[int, ...]) -> Array:
    return _select(_mask(key, keep, x.shape, broadcast_dims), _divide(x, keep))
