"""The type of ``graphdef.apply(state)``, under the name that flax.nnx has for it."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

A = TypeVar("A", covariant=True)


class ApplyCaller(Protocol[A]):
    """Reaches a method by attributes and items; calling it returns the output, and what became of the object, an ``A``.

    >>> from nnxlib.proxy_caller import ApplyCaller
    >>> def caller(graphdef: nnx.GraphDef, state: nnx.State) -> ApplyCaller[tuple[nnx.GraphDef, nnx.State]]:
    ...   return graphdef.apply(state)
    >>> y, (graphdef, state) = caller(*nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))(jnp.ones((1, 2)))
    >>> y.shape
    (1, 3)
    """

    def __getattr__(self, name: str) -> ApplyCaller[A]: ...

    def __getitem__(self, key: Any) -> ApplyCaller[A]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, A]: ...
