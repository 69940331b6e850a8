"""``vjp``, ``jvp`` and ``linearize``: products with the Jacobian of a function of Modules.

The tangents and gradients of a Module are a State by path. All its leaves of floating or complex type are
differentiated, not only the ``Param`` Variables, as by ``grad``: there is no loss here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..core.errors import OUTPUT, ArgumentError, describe
from ..core.missing import MISSING, is_missing
from ..core.tracing import boundary
from .jit import jit
from .leaf_checks import type_of
from .tangents import Argnums, Derivation, Tangents, check_not_refs, is_inexact, is_single


@boundary
def vjp(
    f: Callable = MISSING,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: Sequence[Any] = (),
    argnums: Argnums | None = None,
    saveable_args: Any = True,
    in_nzs: Any = None,
) -> Any:
    """Compute ``f(*primals)`` and a function that pulls back gradients of its output; ``jax.vjp`` with state.

    Args:
      f: a function, method, callable Module or partial. Without primals, a function that takes them is returned.
      *primals: its arguments. Changes that ``f`` makes to them appear on the objects that were passed in.
      has_aux: whether ``f`` returns a pair, of which only the first is differentiated.
      reduce_axes: as in ``jax.vjp``.
      argnums: which arguments to differentiate, also with filters: ``DiffState(argnum, filter)``. All by default.
      saveable_args: what ``pull_back`` may keep: True or False for each argument, ``StateAxes({filter: bool})`` for a
        Module; of what is differentiated, as the rest is a constant. As in JAX, in 0.12 or newer.
      in_nzs: what has a tangent other than zero, in the same form. The gradient of the rest is zero.

    Returns:
      ``(output, pull_back)``, and the aux value with ``has_aux``. ``pull_back`` takes a gradient like the output, and
      returns a tuple of gradients like the arguments, each with a State in place of a Module. See
      :class:`nnxlib.transforms.autodiff.PullBack`.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> y, pull_back = nnx.vjp(lambda layer, x: layer(x), layer, jnp.ones((1, 2)))
    >>> grads, x_gradient = pull_back(jnp.ones((1, 3)))
    >>> grads.bias.value.tolist(), x_gradient.shape
    ([1.0, 1.0, 1.0], (1, 2))

    Raises:
      ArgumentError: by ``pull_back``, if what it is given is not like the output; names the path.
    """
    options: dict[str, Any] = {"has_aux": has_aux, "reduce_axes": reduce_axes, "argnums": argnums}
    options |= {"saveable_args": saveable_args, "in_nzs": in_nzs}
    if is_missing(f):
        return functools.partial(vjp, **options)
    if not primals:
        return functools.wraps(f, updated=())(lambda *primals: vjp(f, *primals, **options))
    call = Derivation(f, primals, has_aux)
    numbers = call.choose(argnums)
    check_not_refs(call.packed, call.tangents)
    given = call.options(jax.vjp, saveable_args=saveable_args, in_nzs=in_nzs)
    values, pull, rest = jax.vjp(call.pure, call.leaves, has_aux=True, reduce_axes=reduce_axes, **given)
    leaves, outcome, outputs = rest
    out, aux = call.finish(leaves, outcome)
    sides = (call.tangents, call.leaves), (outputs, values)
    types = [dict(zip(side.positions, map(type_of, xs), strict=True)) for side, xs in sides]
    return (out, PullBack(pull, _Sides(call.tangents, numbers, outputs, *types)), *aux)


@dataclasses.dataclass(frozen=True, eq=False)
class _Sides:
    """What a pull-back takes and returns; refers to no array."""

    inputs: Tangents
    numbers: tuple[int, ...]  # of the arguments
    outputs: Tangents
    input_types: Mapping[int, Any]
    output_types: Mapping[int, Any]


@jax.tree_util.register_pytree_node_class
class PullBack:
    """The function that :func:`nnxlib.vjp` returns, ``pull_back(gradient)``: a pytree, a residual or output of a jit.

    With JAX 0.12 it has more of what that of ``jax.vjp`` has: ``with_logs``, ``out_nzs`` and ``args_res``.
    """

    def __init__(self, pull: Any, sides: _Sides):
        self._pull, self._sides = pull, sides

    def __call__(self, gradient: Any) -> Any:
        """The gradients of the arguments, a tuple; with :attr:`with_logs` a pair of these and a dict."""
        outputs, types = self._sides.outputs, self._sides.output_types
        floating = Tangents(outputs.layout, tuple([k for k, type_ in types.items() if is_inexact(type_)]))
        found = floating.unfold({OUTPUT: gradient}, types, "gradient", outputs.layout.positions.keys())
        pulled = self._pull(outputs.filled(found, types))
        ((grads,), *logs) = pulled if getattr(self._pull, "want_logs", False) else (pulled,)
        folded = self._folded(grads)
        return (folded, *logs) if logs else folded

    def _folded(self, values: Sequence[Any]) -> tuple:
        inputs = self._sides.inputs
        return tuple(inputs.fold_arguments(inputs.as_variables(values), self._sides.numbers))

    @property
    def with_logs(self) -> PullBack:
        """The same function, returning ``(gradients, logs)``: the dict that rules of ``defvjp_with_logs`` return."""
        return PullBack(self._pull.with_logs, self._sides)

    @property
    def out_nzs(self) -> Any:
        """Whether each value may have a tangent other than zero, given ``in_nzs``; a pytree like the output."""
        outputs = self._sides.outputs
        return outputs.fold(outputs.as_variables(self._pull.out_nzs))[OUTPUT]

    @property
    def args_res(self) -> tuple:
        """The arguments as they were kept; JAX's ``NotNeeded()`` or ``NotSaveable()`` stands for what was not.

        Set this to the arguments to put back what ``saveable_args`` left out; Modules or States, before the call.
        """
        return self._folded(self._pull.args_res[0])

    @args_res.setter
    def args_res(self, values: Sequence[Any]) -> None:
        inputs, numbers, types = self._sides.inputs, self._sides.numbers, self._sides.input_types
        if len(values) != len(numbers):
            raise ArgumentError(f"There must be one value for each argument: {len(values)} for {len(numbers)}.")
        kept = dict(zip(inputs.positions, self._pull.args_res[0], strict=True))
        found = inputs.unfold(inputs.arguments(numbers, values), types, "argument", inputs.layout.positions.keys())
        self._pull = self._pull.replace(args_res=[[*(kept | found).values()]])

    def tree_flatten(self) -> tuple[tuple, Any]:
        return (self._pull,), self._sides

    @classmethod
    def tree_unflatten(cls, sides: _Sides, children: tuple[Any]) -> PullBack:
        return cls(children[0], sides)


def fwd_and_bwd(f: Callable, argnums: Argnums, has_aux: bool = False, jitted: bool = True) -> tuple[Callable, Callable]:
    """Return the forward and the backward pass of ``f`` as two functions, each compiled once; ``jax.fwd_and_bwd``.

    Args:
      f: a function, method, callable Module or partial.
      argnums: which arguments to differentiate, as in :func:`vjp`.
      has_aux: whether ``f`` returns a pair, of which only the first is differentiated.
      jitted: whether both are compiled, by ``nnx.jit``.

    Returns:
      ``(forward, backward)``. ``forward(*args, **kwargs)`` returns what :func:`vjp` returns: the output, residuals, and
      the aux value with ``has_aux``; changes that ``f`` makes to its arguments appear on the objects that were passed
      in. ``backward(residuals, gradient)`` returns a tuple of gradients, or one if ``argnums`` is not a sequence.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> forward, backward = nnx.fwd_and_bwd(lambda layer, x: layer(x), argnums=0)
    >>> y, residuals = forward(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2)))
    >>> backward(residuals, jnp.ones((1, 3))).bias.value.tolist()
    [1.0, 1.0, 1.0]
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return vjp(functools.partial(f, **kwargs) if kwargs else f, *args, has_aux=has_aux, argnums=argnums)

    def backward(residuals: PullBack, gradient: Any) -> Any:
        grads = residuals(gradient)
        return grads[0] if is_single(argnums) else grads

    return (jit(forward), jit(backward)) if jitted else (forward, backward)


@boundary
def jvp(
    f: Callable = MISSING, primals: Sequence[Any] = MISSING, tangents: Sequence[Any] = MISSING, has_aux: bool = False
) -> Any:
    """Compute ``f(*primals)`` and how it changes along tangents; ``jax.jvp`` with state.

    Args:
      f: a function, method, callable Module or partial. Without primals, a function that takes them is returned.
      primals: its arguments. Changes that ``f`` makes to them appear on the objects that were passed in.
      tangents: one for each argument, with a State (or Module) in place of a Module; a Variable that a State leaves
        out stays where it is.
      has_aux: whether ``f`` returns a pair, of which only the first is differentiated.

    Returns:
      ``(output, tangent of the output)``, and the aux value with ``has_aux``.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> layer, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    >>> along = jax.tree.map(jnp.ones_like, nnx.state(layer, nnx.PathContains('bias')))
    >>> y, tangent = nnx.jvp(lambda layer, x: layer(x), (layer, x), (along, 0 * x))
    >>> tangent.tolist()
    [[1.0, 1.0, 1.0]]

    Raises:
      ArgumentError: if a tangent is not like the value that it belongs to; names the path.
    """
    if is_missing(f):
        return functools.partial(jvp, has_aux=has_aux)
    if primals is MISSING and tangents is MISSING:
        return functools.wraps(f, updated=())(lambda primals, tangents: jvp(f, primals, tangents, has_aux))
    for name, given in ("primals", primals), ("tangents", tangents):
        if not isinstance(given, tuple | list):
            raise ArgumentError(
                f"nnx.jvp takes a tuple of arguments and one of tangents: nnx.jvp(f, (x,), (tangent,)); {name} is "
                f"{describe(given)}."
            )
    call = Derivation(f, primals, has_aux)
    _check_count(primals, tangents)
    numbers = call.choose(None)
    found = call.tangents.unfold(call.tangents.arguments(numbers, tangents), call.packed.leaves, "tangent")
    call.tangents = Tangents(call.packed.layout, tuple(found))
    given = [*found.values()]
    _, along, (leaves, outcome, outputs) = jax.jvp(call.pure, (call.leaves,), (given,), has_aux=True)
    tangent = outputs.fold(outputs.as_variables(along))[OUTPUT]
    out, aux = call.finish(leaves, outcome)  # last, after everything that may fail
    return (out, tangent, *aux)


def _check_count(primals: Sequence[Any], tangents: Sequence[Any]) -> None:
    if len(primals) != len(tangents):
        raise ArgumentError(f"There must be one tangent for each argument: {len(tangents)} for {len(primals)}.")


@boundary
def linearize(
    f: Callable, *primals: Any, has_aux: bool = False, argnums: Argnums | None = None, in_nzs: Any = None
) -> Any:
    """Compute ``f(*primals)`` and a function that maps tangents forward, many times; ``jax.linearize`` with state.

    Args:
      f: a function, method, callable Module or partial.
      *primals: its arguments. Changes that ``f`` makes to them appear on the objects that were passed in, once.
      has_aux: whether ``f`` returns a pair, of which only the first is differentiated.
      argnums: as in :func:`vjp`.
      in_nzs: as in :func:`vjp`. The tangents of the rest are ignored, and ``push_forward.out_nzs`` says which values of
        the output may have one.

    Returns:
      ``(output, push_forward)``, and the aux value with ``has_aux``. ``push_forward`` takes tangents as :func:`jvp`
      does, and returns the tangent of the output.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> y, push_forward = nnx.linearize(lambda layer: layer(jnp.ones((1, 2))), layer)
    >>> push_forward(jax.tree.map(jnp.ones_like, nnx.state(layer))).tolist()
    [[3.0, 3.0, 3.0]]
    """
    call = Derivation(f, primals, has_aux)
    numbers = call.choose(argnums)
    given = call.options(jax.linearize, in_nzs=in_nzs)
    _, push, (leaves, outcome, outputs) = jax.linearize(call.pure, call.leaves, has_aux=True, **given)
    out, aux = call.finish(leaves, outcome)
    inputs, shapes = call.tangents, tuple(map(type_of, call.packed.leaves))

    def push_forward(push: Callable, *tangents: Any) -> Any:  # refers to no array
        _check_count(numbers, tangents)
        found = inputs.unfold(inputs.arguments(numbers, tangents), shapes, "tangent")
        along = push(inputs.filled(found, shapes))
        return outputs.fold(outputs.as_variables(along))[OUTPUT]

    forward: Any = jax.tree_util.Partial(push_forward, push)
    if given:
        forward.out_nzs = outputs.fold(outputs.as_variables(push.out_nzs))[OUTPUT]
    return (out, forward, *aux)
