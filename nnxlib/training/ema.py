"""EMA: the exponential moving average of the Variables of a model.

The averages are Variables of the same types and metadata at the same paths, below ``params``. ``apply_to`` puts them
into a model without a copy: new nodes, around the averages and around the model's own other Variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..core.data import Static
from ..core.errors import ArgumentError, EmptySelectionError, UsageError, describe, format_path
from ..core.filters import Filter, shown
from ..core.graph import build
from ..core.objects import Node, Pytree
from ..core.ops import state
from ..core.packing import pack_live
from ..core.state import State, filter_state, from_flat_state, to_flat_state
from ..core.tracing import boundary
from ..core.variables import Variable, plain_value
from ..nn.dtypes import at_least_float32
from .stored import matched, set_values, without_aliases

A = TypeVar("A")


class EMA(Pytree):
    """The exponential moving average of the Variables of a model, kept in Variables.

    Each update sets ``average = decay * average + (1 - decay) * value``, computed in float32 or wider and kept in the
    dtype of the average. What is not floating or complex (counts, random keys) takes the newest value.

    Args:
      params: a Module, or the State of one; the averages begin as copies of its values.
      decay: between 0 and 1; 0.999 averages over about the last 1,000 updates.
      only: which Variables are averaged, as a filter.

    Attributes: ``params``, a State of the averages at the paths of the model; ``decay`` and ``filter`` as given.

    >>> import nnxlib as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.ones)
    >>> ema = nnx.EMA(model, decay=0.75, only=nnx.Param)
    >>> model.kernel[...] = 2.0
    >>> ema.update(model)
    >>> smooth = ema.apply_to(model)
    >>> smooth.kernel[0].tolist(), smooth.kernel is ema.params.kernel
    ([1.25, 1.25, 1.25], True)

    Raises:
      UsageError: if ``decay`` is a number outside of 0 to 1.
      EmptySelectionError: if ``only`` selects nothing.
      TypeError: if ``only`` takes an array that is not in a Variable; names the path.
    """

    filter: Static[Filter]
    decay: Any
    params: Any

    def __init__(self, params: Any, decay: float, *, only: Filter = ...):
        if isinstance(decay, int | float) and not 0 <= decay <= 1:
            raise UsageError(f"The decay of an EMA is between 0 and 1, but got {decay}.")
        if isinstance(decay, str):
            raise ArgumentError(f"The decay of an EMA is a number between 0 and 1, but got {decay!r}.")
        if isinstance(decay, Node):
            raise ArgumentError(f"EMA takes the model first: nnx.EMA(model, decay), but got decay={describe(decay)}.")
        self.decay = decay
        self.filter = tuple(only) if isinstance(only, list) else only
        selected = _selected(params, only)
        if not selected:
            raise EmptySelectionError(f"only={shown(only)} selects nothing in this {type(params).__name__} to average.")
        self.params = selected.map(lambda path, variable: _copied(variable))

    @boundary
    def update(self, updates: Any) -> None:
        """Move the averages towards the present values.

        Args:
          updates: the model, or a State with the same paths.

        Raises:
          StateMismatchError: for missing, unexpected and wrongly shaped values, naming the paths.
          TraceContextError: if the EMA belongs to another trace.
        """
        averages = dict(to_flat_state(self.params))
        head = f"The values do not fit what this EMA averages (only={shown(self.filter)}); nothing was changed."
        found = matched(_selected(updates, self.filter), averages, tuple, head, _OF_THE_SAME_MODEL)
        for average in averages.values():
            average.check_writable()
        set_values(
            averages.values(),
            [jax.tree.map(self._mean, plain_value(average), found[path]) for path, average in averages.items()],
        )

    def _mean(self, average: Any, value: Any) -> Any:
        dtype = jnp.result_type(average)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return value
        wide = at_least_float32(dtype)
        mean = self.decay * jnp.asarray(average, wide) + (1 - self.decay) * jnp.asarray(value, wide)
        return mean.astype(dtype)

    @boundary
    def apply_to(self, model: A) -> A:
        """Return a model with the averages in place of the Variables that they average.

        The nodes are new; the averages are the very Variables of this EMA, so later updates show; all other Variables
        are those of ``model``.

        Raises:
          StateMismatchError: if the model has no Variable at the path of an average, or one of another shape.
        """
        layout, leaves, objects = pack_live(model)
        live = {layout.paths[i]: objects[i] for i in layout.variables}
        averages = dict(to_flat_state(self.params))
        head = f"This {type(model).__name__} does not fit the EMA."
        matched(from_flat_state(live), averages, live.keys, head, _OF_THE_SAME_MODEL)
        given = {i: averages.get(layout.paths[i], objects[i]) for i in layout.variables}
        return build(layout, leaves, given)[0]


_OF_THE_SAME_MODEL = "Pass the model that the averages are of, or make new ones: nnx.EMA(model, decay)."


def _selected(params: Any, only: Filter) -> State:
    found = (
        filter_state(params, only)
        if isinstance(params, Mapping) and not isinstance(params, Node)
        else state(params, only)
    )
    for path, leaf in to_flat_state(found):
        if not isinstance(leaf, Variable):
            raise ArgumentError(
                f"An EMA averages Variables, but {format_path(path)} is {describe(leaf)} outside of a Variable. Select "
                "what it is to average: EMA(model, decay, only=nnx.Param)."
            )
    return found


def _copied(variable: Variable) -> Variable:
    value = variable.get_raw_value()
    return variable.replace(without_aliases([value], [value])[0])
