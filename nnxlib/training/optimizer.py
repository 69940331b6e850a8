"""Optimizers: an optax transformation, its state in Variables, and the step that writes a model.

The state of an :class:`Optimizer` is the pytree that ``tx.init`` made, of the very same types, so that it fits whatever
works on such states (``optax.tree_map_params``). Its leaves are Variables: an :class:`OptVariable` at each place where
there is a value per parameter (with the metadata of the parameter, so that its sharding and the names of its axes
follow, where the value has its shape) and an :class:`OptArray` for everything else. If moments are to be sharded in
another way than their parameter, its metadata ``optimizer_sharding`` names their axes. Below ``opt_state`` the path of
a moment is the path of its parameter::

    optimizer.opt_state[0].mu['layers'][0]['kernel']
    optimizer.opt_state.hyperparams['learning_rate'].value = 1e-4
    optimizer.opt_state = optax.tree.set(optimizer.opt_state, learning_rate=1e-4)

``tx.init`` sees the State of the Variables; ``tx.update`` sees plain values at the same paths, as does whatever is
called from it. A mask or label function that is called in both, as by ``optax.masked`` and ``optax.multi_transform``,
can only go by path and shape; to go by type or metadata, make the labels beforehand:
``nnx.map_state(lambda path, v: type(v).__name__, nnx.state(model, nnx.Param))``. Labels that ``jax.tree.map`` makes of
a State are Variables; a ``tx`` with such labels cannot work on plain values, and is given Variables instead.

An update computes everything, checks everything that can fail, and then writes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Generic

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, tree_map_with_path

from ..core.data import Static, is_node
from ..core.errors import (
    ArgumentError,
    EmptySelectionError,
    StateMismatchError,
    describe,
    describe_nested,
    format_path,
    listed,
)
from ..core.filters import Filter, shown
from ..core.formulas import as_array
from ..core.generics import A, M
from ..core.graph import even_if_interrupted
from ..core.identity import change
from ..core.lost_changes import watch_update
from ..core.missing import MISSING
from ..core.objects import Node, Pytree, attributes_of
from ..core.ops import state, update
from ..core.placement import placed
from ..core.state import State, map_state, to_flat_state
from ..core.tracing import Tracer, boundary, resharded
from ..core.values import as_stored
from ..core.variables import Param, Variable, plain_value
from .stored import check_transformation, flat, is_variable, matched, set_values, without_aliases


class OptState(Variable[A]):
    """State of an optimizer.

    >>> import nnxlib as nnx, optax
    >>> optimizer = nnx.Optimizer(nnx.Dict(w=nnx.Param(1.0)), optax.adam(0.1), wrt=nnx.Param)
    >>> adam = optimizer.opt_state[0]
    >>> type(adam.count).__name__, type(adam.mu['w']).__name__
    ('OptArray', 'OptVariable')
    """


class OptArray(OptState[A]):
    """State of an optimizer that belongs to no single parameter, such as a count or a learning rate."""


class OptVariable(OptState[A]):
    """State of an optimizer for one parameter, such as a moment; with the metadata of the parameter."""


def to_opt_state(tree: Any) -> Any:
    """Put a pytree into Variables: Variables become an OptVariable, other leaves an OptArray.

    >>> import nnxlib as nnx
    >>> nnx.optimizer.to_opt_state((3, nnx.Param(1.0, layer='first')))
    (OptArray(3), OptVariable(1.0, layer='first'))
    """
    return jax.tree.map(_boxed, tree, is_leaf=is_variable)


_VALUE_HOOKS = ("on_get_value", "on_set_value", "on_create_value")


def _boxed(leaf: Any) -> OptState:
    if isinstance(leaf, OptState):
        return leaf
    if isinstance(leaf, Variable):  # hooks on axes hold for a moment too, those on values are about the parameter
        metadata = {name: x for name, x in leaf.get_metadata().items() if name not in _VALUE_HOOKS}
        if "optimizer_sharding" in metadata:
            metadata["out_sharding"] = metadata.pop("optimizer_sharding")
        return OptVariable.from_metadata(as_stored(leaf.get_raw_value(), metadata), metadata)
    return OptArray(leaf)


class Optimizer(Pytree, Generic[M]):
    """An optax transformation with its state, for the Variables of a model that a filter takes.

    Args:
      model: the Module to train, or a pytree of Modules; it is not kept.
      tx: the transformation, for example ``optax.adam(1e-3)``.
      wrt: which Variables to train, as a filter. The same filter serves :func:`nnxlib.grad`, as
        ``nnx.DiffState(0, filter)``; gradients of more Variables than these are accepted.

    Attributes:
      step: how many updates were made, a uint32 in an :class:`OptState`.
      tx: as given.
      wrt: as given.

    >>> import nnxlib as nnx, jax.numpy as jnp, optax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> only_bias = nnx.PathContains('bias')
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.5, momentum=0.9), wrt=only_bias)
    >>> @nnx.jit
    ... def train_step(model, optimizer, x):
    ...   loss = lambda model: model(x).sum()
    ...   grads = nnx.grad(loss, argnums=nnx.DiffState(0, only_bias))(model)
    ...   optimizer.update(model, grads)
    >>> train_step(model, optimizer, jnp.ones((1, 2)))
    >>> model.bias.value.tolist(), optimizer.step.item()
    ([-0.5, -0.5, -0.5], 1)

    Raises:
      EmptySelectionError: if ``wrt`` selects nothing in the model; names the types of Variable that it has.
      TypeError: if ``tx`` is not a transformation.
    """

    tx: Static[Any]
    wrt: Static[Filter]
    step: OptState[jax.Array]

    def __init__(self, model: M, tx: Any, *, wrt: Filter = Param):
        check_transformation(tx, "nnx.Optimizer(model, tx, wrt=nnx.Param)")
        _check_model(model)
        params = _trained(model, wrt)
        try:
            opt_state = to_opt_state(tx.init(params))
        except (TypeError, ValueError) as error:
            error.add_note(_LABELS)
            raise
        kept, trained = flat(opt_state)[0], flat(params)[0]
        _place(kept, trained)
        set_values(kept, without_aliases([plain_value(x) for x in kept], [plain_value(x) for x in trained]))
        self.step = OptState(jnp.zeros((), jnp.uint32))
        self.tx = tx
        self.wrt = tuple(wrt) if isinstance(wrt, list) else wrt
        self.opt_state = opt_state

    @property
    def opt_state(self) -> Any:
        """The state of ``tx``, the pytree that ``tx.init`` made, with Variables for leaves; so is what is assigned."""
        return attributes_of(self)["opt_state"]

    @opt_state.setter
    def opt_state(self, tree: Any) -> None:
        state = to_opt_state(tree)
        change(self, attributes_of(self).__setitem__, "opt_state", state)  # even if it is the same: this copies dicts

    if not TYPE_CHECKING:  # for which any attribute would exist then

        def __getattr__(self, name: str) -> Any:
            if name == "model":
                raise AttributeError(_NO_MODEL, name=name, obj=self)
            return super().__getattribute__(name)  # which raises Python's own error

    @boundary
    def update(self, model: Any = MISSING, grads: Any = MISSING, **extra: Any) -> Any:
        """Change the parameters of ``model`` and the state of the optimizer by one step.

        Args:
          model: the model that the optimizer was made for, or one with parameters at the same paths.
          grads: a gradient for each trained Variable, as a State (what :func:`nnxlib.grad` returns), a nested dict of
            values, or a Module that holds them. Gradients of Variables that are not trained are left out. All of them
            may have an axis of examples in front, for a ``tx`` that reduces it, such as ``optax.contrib.dpsgd``.
          **extra: further arguments of ``tx.update``, such as ``value``, ``grad`` and ``value_fn`` for L-BFGS.

        Returns:
          The State of what was added to the parameters, as plain values.

        Raises:
          StateMismatchError: for missing, unexpected and wrongly shaped gradients, naming the paths; and if the state
            is not one for these parameters, as after a layer was replaced.
          TraceContextError: if the model or the optimizer belong to another trace. Nothing has been written then.
        """
        if model is MISSING or grads is MISSING:
            raise ArgumentError(
                "Optimizer.update takes the model and the gradients: optimizer.update(model, grads). With "
                "nnx.ModelAndOptimizer, which keeps the model, it is optimizer.update(grads)."
            )
        if isinstance(model, State) and isinstance(grads, Node):
            raise ArgumentError(
                "Optimizer.update takes the model first: optimizer.update(model, grads), but got a State and then the "
                f"model, {type(grads).__name__}."
            )
        _check_model(model)
        trained = _trained(model, self.wrt)
        gradients, misfit = self._gradients(grads, trained, model)
        extra = {name: gradients if x is grads else x for name, x in extra.items()}
        try:
            return self._step(model, trained, gradients, extra, _without_variables)
        except (TypeError, ValueError) as error:
            try:
                self._check_state(trained, model)
            except StateMismatchError as of_state:
                raise of_state from None
            except Exception:  # of tx.init on shapes
                pass
            if misfit is not None:
                raise misfit from None
            with suppress(Exception):
                boxed = functools.partial(_as_variables, trained)
                return self._step(model, trained, boxed(gradients), extra, boxed)
            lacks = "required keyword-only argument" in str(error)
            if isinstance(error, TypeError) and (lacks or any(map(callable, extra.values()))):
                error.add_note(_EXTRA)
            raise

    def _step(
        self, model: Any, trained: State, gradients: State, extra: dict[str, Any], seen: Callable[..., Any]
    ) -> Any:
        """The update; ``tx`` is given ``seen(tree)`` of parameters, state and ``extra``, where Modules stay Modules."""
        params, structure = flat(trained)
        values = [plain_value(x) for x in params]
        kept, kept_structure = self._kept()
        old = [plain_value(x) for x in kept]
        extra = {name: x if x is gradients else seen(x, is_node) for name, x in extra.items()}
        updates, new_state = self.tx.update(gradients, seen(kept_structure.unflatten(kept)), seen(trained), **extra)
        changes = [plain_value(x) for x in structure.flatten_up_to(updates)]
        moved = [added(*pair) for pair in zip(values, changes)]
        if shapes(moved) != shapes(values):
            items = zip(to_flat_state(trained).paths, values, moved, strict=True)
            grown = [(path, old, new) for path, old, new in items if shapes(old) != shapes(new)]
            lines = [f"{format_path(path)}: expected {describe(old)}, got {describe(new)}" for path, old, new in grown]
            raise StateMismatchError(listed(_OTHER_SHAPES, lines, _RETURN_ONE_EACH))
        new_kept = without_aliases(_like(kept_structure, new_state), moved)
        if shapes(new_kept) != shapes(old):  # a moment of size 1, which does not fit, has been broadcast
            self._check_state(trained, model)
        for variable in (self.step, *kept):
            variable.check_writable()
        apart = [_place_of(_boxed(x)) for x in params if _is_apart(x)]
        if apart:  # otherwise moments are where their parameter is, and both stay there
            back = [_where(old, new) if _is_apart(x) else new for x, old, new in zip(params, values, moved)]
            moved = _placed_if(params, back, _is_apart)
            new_kept = _placed_if(kept, new_kept, lambda moment: _place_of(moment) in apart)
        new, count = structure.unflatten(map(_with_value, params, moved)), plain_value(self.step) + 1
        # What has no arrays, in place of a masked moment, is no output of a step: JAX would make it anew in Python.
        stored = [(x, value) for x, was, value in zip(kept, old, new_kept) if jax.tree.leaves((was, value))]

        def write() -> None:
            update(model, new)
            for variable, value in stored:
                variable.set_raw_value(value)
            self.step.set_raw_value(count)

        even_if_interrupted(write)
        watch_update(model, moved, [self.step, *kept])
        return structure.unflatten(changes)

    def _check_state(self, params: State, model: Any) -> None:
        """Raise StateMismatchError if the state is not one for these parameters."""
        made = to_opt_state(jax.eval_shape(self.tx.init, params))
        expected = dict(to_flat_state(state({"opt_state": made})))
        kept = state({"opt_state": self.opt_state})
        remedy, ends = _MAKE_A_NEW_ONE, [path for path, _ in to_flat_state(kept)]
        for path, x in to_flat_state(state(model)):
            if not is_variable(x) and any(end[-len(path) :] == path for end in ends):
                remedy = _PLAIN.format(path=format_path(path))
        matched(kept, expected, tuple, _CHANGED, remedy)

    def _gradients(self, grads: Any, params: State, model: Any) -> tuple[State, StateMismatchError | None]:
        """The gradients of the trained Variables, as a State of plain values, and an error or None.

        The error is for gradients of many examples: it is raised unless ``tx`` reduces these.
        """

        def paths_of_model() -> frozenset[tuple[Any, ...]]:
            return frozenset(to_flat_state(state(model)).paths)

        head = f"The gradients do not fit what this optimizer trains (wrt={shown(self.wrt)}); nothing was changed."
        expected, misfit = dict(to_flat_state(params)), None
        try:
            found = matched(grads, expected, paths_of_model, head, _DIFFERENTIATE)
        except StateMismatchError as error:
            if (mistake := _not_unpacked(grads)) is not None:
                raise mistake from None
            misfit = error
            try:
                found = matched(grads, _of_examples(expected, grads), paths_of_model, head, _DIFFERENTIATE)
            except StateMismatchError:
                raise misfit from None
        return map_state(lambda path, _: found[path], params), misfit

    def _kept(self) -> tuple[list[OptState], Any]:
        """The Variables of ``opt_state``, and the structure of the pytree around them."""
        kept, structure = flat(self.opt_state)
        if not all(isinstance(x, OptState) for x in kept):  # an item was set by hand
            self.opt_state = structure.unflatten(kept)
            kept = flat(self.opt_state)[0]
        return kept, structure


class ModelAndOptimizer(Optimizer[M]):
    """An :class:`Optimizer` that keeps its model, so that ``update`` takes the gradients only.

    >>> import nnxlib as nnx, jax.numpy as jnp, optax
    >>> optimizer = nnx.ModelAndOptimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), optax.adam(1e-3))
    >>> grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(optimizer.model)
    >>> updates = optimizer.update(grads)
    >>> optimizer.step.item()
    1
    """

    model: M

    def __init__(self, model: M, tx: Any, *, wrt: Filter = Param):
        super().__init__(model, tx, wrt=wrt)
        self.model = model

    @boundary
    def update(self, grads: Any, **extra: Any) -> Any:  # type: ignore[override]  # flax.nnx has this signature
        """Change the model and the state of the optimizer by one step; as :meth:`Optimizer.update`."""
        return super().update(self.model, grads, **extra)


_LABELS = """\
If labels or a mask were given: the transformation works on a State of what it trains, and labels for it are a State, \
too, or a function of it. Make them by nnx.map_state(lambda path, variable: ..., nnx.state(model, wrt)), or put a dict \
that you have into one: nnx.State(labels)."""

_NO_MODEL = """\
An Optimizer has no model: it is passed the one to change, as in optimizer.update(model, grads). The optimizer that \
keeps its model is nnx.ModelAndOptimizer."""

_EXTRA = """\
If the transformation takes more than gradients, as those with a line search do, pass it by name: \
optimizer.update(model, grads, value=loss, grad=grads, value_fn=loss_of). Its functions are called with a State of the \
parameters: loss_of = lambda params: loss_fn(nnx.merge(graphdef, params, rest)), where graphdef, params, rest = \
nnx.split(model, nnx.Param, ...)."""

_CHANGED = "The state of this optimizer does not fit the parameters of the model; nothing was changed."
_MAKE_A_NEW_ONE = """\
If the model was given other parameters after the optimizer was made, make a new one: nnx.Optimizer(model, tx, \
wrt=...)."""
_PLAIN = """\
{path} is a plain array now, which is not trained: assign to its value, `model.{path}.value = ...`, or set it to an \
nnx.Param."""
_DIFFERENTIATE = """\
Pass what nnx.grad returns for this model; what is trained is differentiated by argnums=nnx.DiffState(0, wrt)."""

_OTHER_SHAPES = "tx.update returned updates that change the shapes of parameters; nothing was changed."
_RETURN_ONE_EACH = "A transformation returns for each parameter an update of its shape (reduced over examples)."


# --- helpers --------------------------------------------------------------------------------------------------------


def _check_model(model: Any) -> None:
    if isinstance(model, type):
        raise ArgumentError(f"An optimizer trains a model, got the class {model.__name__}; make one of it first.")
    if isinstance(model, Variable):
        raise ArgumentError(
            f"An optimizer trains a Module or a pytree of Modules, got a {type(model).__name__} by itself; put it into "
            "one: nnx.Dict(weight=variable)."
        )


def _place(kept: list[OptState], params: list[Any]) -> None:
    """Give values of the shape of a parameter its sharding; values of other shapes lose the names of axes."""
    trained = [x for x in params if is_variable(x)]
    like = [(_boxed(x).sharding_names, _shape(x), "optimizer_sharding" in x.get_metadata()) for x in trained]
    for variable in kept:
        value, names, shape = variable.get_raw_value(), variable.sharding_names, _shape(variable)
        if names is None:
            continue
        if (names, shape, True) in like or ((names, shape, False) in like and isinstance(value, Tracer)):
            variable.set_raw_value(placed(value, variable.get_metadata(), OptVariable))
        elif (names, shape, False) not in like:  # an eager `zeros_like` has the sharding of the parameter already
            variable.del_metadata("out_sharding")


def _is_apart(param: Any) -> bool:
    """Whether the moments of a parameter are to be in other shards than the parameter."""
    return is_variable(param) and "optimizer_sharding" in param.get_metadata()


def _place_of(variable: Variable) -> tuple[Any, tuple[int, ...] | None]:
    return variable.sharding_names, _shape(variable)


def _where(old: Any, new: Any) -> Any:
    """The new value of a parameter where the old one is, as far as a trace knows: over explicit axes.

    Not if it was made without the mesh: on its one device, JAX would refuse it together with the moments.
    """
    if isinstance(old, Tracer) and isinstance(new, Tracer):
        was, now = jax.typeof(old).sharding, jax.typeof(new).sharding
        return resharded(new, was) if was.mesh == now.mesh and was != now else new
    if type(old) is type(new) and isinstance(old, jax.Array):
        return jax.device_put(new, old.sharding) if old.sharding.device_set == new.sharding.device_set else new
    return new


def _placed_if(variables: list[Any], values: list[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """New values of Variables; the chosen ones are placed as their names say, since XLA would place all alike."""
    return [placed(v, x.get_metadata(), type(x)) if chosen(x) else v for x, v in zip(variables, values)]


def _shape(variable: Variable) -> tuple[int, ...] | None:
    return getattr(variable.get_raw_value(), "shape", None)


def _out_of_ref(variable: Variable) -> Variable:
    """A Variable with the value as JAX takes it, and metadata that say where it is kept."""
    return type(variable).from_metadata(plain_value(variable), variable.get_metadata())


def _not_unpacked(grads: Any) -> StateMismatchError | None:
    """The error for what was passed in place of the gradients, if it shows what was meant."""
    if isinstance(grads, tuple) and len(grads) == 2 and isinstance(grads[1], State):
        return StateMismatchError(
            f"Optimizer.update takes gradients, but got a tuple {describe_nested(grads)}, as of nnx.value_and_grad. "
            "Unpack it: loss, grads = nnx.value_and_grad(loss_fn)(model)."
        )
    if callable(grads) and not isinstance(grads, Node | Variable):
        return StateMismatchError(
            f"Optimizer.update takes gradients, but got the function {getattr(grads, '__name__', grads)}. Call it: "
            "grads = nnx.grad(loss_fn)(model)."
        )
    return None


def _trained(model: Any, wrt: Filter) -> State:
    params = state(model, wrt)
    if params:
        in_refs = any(is_variable(x) and x.ref for _, x in to_flat_state(params))
        return params.map(lambda path, x: _out_of_ref(x) if is_variable(x) else x) if in_refs else params
    kinds = Counter(type(x).__name__ for _, x in to_flat_state(state(model)) if is_variable(x))
    found = ", ".join(f"{name} ({count})" for name, count in sorted(kinds.items()))
    if shown(wrt) in kinds:
        hint = f"Its {shown(wrt)} is of an earlier definition of this class: make the model anew."
    elif found:
        hint = f"It has: {found}. Pass a filter that selects some of these: a type such as nnx.Param, or "
        hint += "nnx.PathContains('name')."
    else:
        hint = "It has no Variable at all: parameters are attributes such as nnx.Param(array), on it or on its layers."
    raise EmptySelectionError(
        f"wrt={shown(wrt)} selects nothing in this {type(model).__name__}, so there is nothing to train. {hint}"
    )


def added(params: Any, updates: Any) -> Any:
    """Return ``params + updates`` in the dtypes of ``params``, leaf by leaf."""
    return jax.tree.map(_added, params, updates)


def _added(param: Any, update: Any) -> Any:
    moved, dtype = as_array(param + update), as_array(param).dtype
    return moved if moved.dtype == dtype and not moved.weak_type else moved.astype(dtype)


def _of_examples(leaves: dict[Any, Any], grads: Any) -> dict[Any, Any]:
    """The shapes of leaves with an axis of examples in front, of the length that it has in the gradients."""
    size = next((jnp.shape(x)[:1] for x in jax.tree.leaves(grads)), ())

    def with_axis(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*size, *jnp.shape(x)), jnp.result_type(x))

    return {path: jax.tree.map(with_axis, plain_value(leaf)) for path, leaf in leaves.items()}


def shapes(tree: Any) -> list[tuple[int, ...]]:
    """The shapes of the leaves of a pytree, in order."""
    return [jnp.shape(x) for x in jax.tree.leaves(tree)]


def _with_value(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if is_variable(leaf) else value


def _as_variables(params: State, tree: Any, is_leaf: Callable[[Any], bool] = is_variable) -> Any:
    """A pytree with its values in copies of the Variables of ``params``, found by path below whatever holds them."""
    by_path = dict(to_flat_state(params))

    def boxed(keys: tuple[Any, ...], value: Any) -> Any:
        levels = tuple(key.key for key in takewhile(lambda key: isinstance(key, DictKey), reversed(keys)))[::-1]
        paths = (levels[n:] for n in range(len(levels)))
        variable = next((by_path[path] for path in paths if path in by_path), None)
        return plain_value(value) if variable is None else _with_value(variable, plain_value(value))

    return tree_map_with_path(boxed, tree, is_leaf=is_leaf)


def _without_variables(value: Any, is_leaf: Callable[[Any], bool] = is_variable) -> Any:
    """A pytree with plain values for Variables."""
    return jax.tree.map(plain_value, value, is_leaf=is_leaf)


def _like(structure: Any, new_state: Any) -> list[Any]:
    try:
        return [plain_value(x) for x in structure.flatten_up_to(new_state)]
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise StateMismatchError(
            f"tx.update returned a state of another structure than the one it was given; nothing was changed. {reason}"
        ) from None
