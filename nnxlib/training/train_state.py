"""TrainState: a model and its optimizer as one immutable pytree, for code in the functional style.

Everything is a value: ``apply_gradients`` returns a new TrainState. It works under plain ``jax.jit``, ``jax.grad`` and
``jax.lax.scan``. For code in the stateful style there is :class:`~nnxlib.training.optimizer.Optimizer`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from ..core.differences import leaf_differences, refuse
from ..core.generics import M
from ..core.graphdef import GraphDef
from ..core.ops import call
from .optimizer import added, shapes
from .stored import check_transformation, leaves_by_path

T = TypeVar("T", bound="TrainState")

_STATIC: Any = {"static": True, "pytree_node": False}  # as jax.tree_util.register_dataclass and flax.struct call it


@dataclasses.dataclass(frozen=True)
class TrainState(Generic[M]):
    """A GraphDef with its parameters, an optimizer and its state, and a count of steps.

    A subclass may declare more fields, which are part of the pytree, or static by
    ``dataclasses.field(metadata={'static': True})``; it becomes a frozen dataclass and a pytree without a decorator.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp, optax
    >>> graphdef, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> train_state = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))
    >>> @jax.jit
    ... def train_step(train_state, x):
    ...   def loss(params):
    ...     y, _ = train_state.apply(params)(x)
    ...     return y.sum()
    ...   return train_state.apply_gradients(jax.grad(loss)(train_state.params))
    >>> train_step(train_state, jnp.ones((1, 2))).params.bias.value.tolist()
    [-0.10000000149011612, -0.10000000149011612, -0.10000000149011612]
    """

    graphdef: GraphDef[M]
    params: Any
    opt_state: Any
    step: jax.Array
    tx: Any = dataclasses.field(metadata=_STATIC)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _register(dataclasses.dataclass(frozen=True)(cls))

    @classmethod
    def create(cls: type[T], graphdef: GraphDef[M], *, params: Any, tx: Any, step: int = 0, **kwargs: Any) -> T:
        """Make a TrainState with a new state of ``tx``; ``kwargs`` are the fields that a subclass has declared.

        Raises:
          ArgumentError: if ``tx`` is not a transformation.
        """
        check_transformation(tx, f"{cls.__name__}.create(graphdef, params=params, tx=tx)")
        return cls(graphdef=graphdef, params=params, opt_state=tx.init(params), step=jnp.asarray(step), tx=tx, **kwargs)

    def apply(self, state: Any, *states: Any) -> Any:
        """Call the model, or a method of it, on the given States: ``train_state.apply(params).encode(x)``.

        Args:
          state: a State, or the name of the field that has one: ``train_state.apply('params', 'batch_stats')(x)``.
          *states: more of these.

        Returns:
          A proxy; calling it gives the output and the pair of GraphDef and new State.
        """
        given = [getattr(self, x) if isinstance(x, str) else x for x in (state, *states)]
        return call((self.graphdef, given))

    def apply_gradients(self: T, grads: Any, **kwargs: Any) -> T:
        """Return the TrainState after one step of the optimizer; ``kwargs`` are further fields to replace.

        All gradients may have an axis of examples in front, for a ``tx`` that reduces it.

        Raises:
          StateMismatchError: if the gradients have other paths or shapes than the parameters.
        """
        try:
            updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
            params = added(self.params, updates)
        except (TypeError, ValueError):
            _check_gradients(grads, self.params)
            raise
        expected, given = shapes(self.params), shapes(grads)
        axis = given[0][:1] if given else ()  # in front of all, if they are of many examples, which `tx` has reduced
        if shapes(params) != expected or given not in (expected, [(*axis, *shape) for shape in expected]):
            _check_gradients(grads, self.params)  # gradients of other shapes have been broadcast
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    def replace(self: T, **changes: Any) -> T:
        """Return a copy with other fields."""
        return dataclasses.replace(self, **changes)


def _check_gradients(grads: Any, params: Any) -> None:
    found = leaf_differences(leaves_by_path(params), leaves_by_path(grads))
    refuse([x for x in found if x.kind != "dtype"], _DO_NOT_FIT, _DIFFERENTIATE)


_DO_NOT_FIT = "The gradients do not fit the params of this TrainState."
_DIFFERENTIATE = "Pass what jax.grad returns for train_state.params."


def _register(cls: type) -> None:
    static = {field.name for field in dataclasses.fields(cls) if _is_static(field)}
    data = [field.name for field in dataclasses.fields(cls) if field.name not in static]
    jax.tree_util.register_dataclass(cls, data, sorted(static))


def _is_static(field: dataclasses.Field) -> bool:
    return bool(field.metadata.get("static")) or not field.metadata.get("pytree_node", True)


_register(TrainState)
