"""A Module class as a pair of pure functions, ``init`` and ``apply``, as in Linen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic

from ..core.errors import UsageError
from ..core.generics import M
from ..core.graphdef import GraphDef
from ..core.ops import call, split
from ..core.rngs import Rngs
from ..core.state import State


@dataclasses.dataclass
class Functional(Generic[M]):
    """A Module class with the arguments of its constructor; ``graphdef`` is known once ``init`` has run."""

    module_type: Callable[..., M]
    graphdef: GraphDef[M] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def init(self, *, rngs: Rngs | None = None) -> State:
        """Make the Module, with ``rngs`` if they are given, and return its State."""
        given = {} if rngs is None else {"rngs": rngs}
        self.graphdef, state = split(self.module_type(*self.args, **{**self.kwargs, **given}))
        return state

    def apply(self, *states: Any) -> Any:
        """Return what calls the Module that has these States, as :meth:`nnxlib.GraphDef.apply` does.

        Raises:
          ValueError: before :meth:`init`.
        """
        if self.graphdef is None:
            raise UsageError("This Functional has no structure yet. Call `state = functional.init(rngs=...)` first.")
        return call((self.graphdef, *states))


def functional(cls: Callable[..., M]) -> Callable[..., Functional[M]]:
    """Return a constructor of :class:`nnxlib.bridge.Functional` that takes the arguments of ``cls``.

    >>> linear = nnx.bridge.functional(nnx.Linear)(2, 3)
    >>> state = linear.init(rngs=nnx.Rngs(0))
    >>> y, (graphdef, state) = linear.apply(state)(jnp.ones((1, 2)))
    >>> y.shape
    (1, 3)
    """
    return lambda *args, **kwargs: Functional(cls, None, args, kwargs)
