"""``grad`` and ``value_and_grad``: differentiate a function of Modules with respect to chosen leaves.

JAX differentiates a function of the chosen leaves (tangents.py), to which the others are constants. What the function
did to its arguments is its aux. The gradients, a list, become a State for each Module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..core.escapes import warn_of_escapes
from ..core.missing import MISSING
from ..core.operators import unwrapped
from ..core.tracing import with_room
from .callables import by_position
from .checkify import note_nan
from .classes import lifts_classes
from .leaf_checks import note_abstract
from .lift import Outcome, cross
from .naming import named
from .prefixes import refuse_nodes
from .signatures import as_operator, as_value_and_grad
from .tangents import PARAMS, Argnums, Derivation, check_differentiable, choices, is_single


@as_operator
@lifts_classes()
def grad(
    f: Callable = MISSING,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
) -> Callable:
    """Return the gradient of ``f``; see :func:`value_and_grad`. With ``has_aux`` it returns ``(gradients, aux)``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> grads = nnx.grad(lambda layer, x: layer(x).sum())(layer, jnp.ones((1, 2)))
    >>> grads.bias.value.tolist()
    [1.0, 1.0, 1.0]
    """
    options: dict[str, Any] = {"holomorphic": holomorphic, "allow_int": allow_int, "reduce_axes": reduce_axes}
    return without_value(value_and_grad(f, argnums=argnums, has_aux=has_aux, **options), f, has_aux)


@as_value_and_grad
@lifts_classes()
def value_and_grad(
    f: Callable = MISSING,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
) -> Callable:
    """Return a function that computes ``f`` and its gradient; ``jax.value_and_grad`` with state.

    Args:
      f: a function, method, callable Module or partial; returns a scalar, or ``(scalar, aux)`` with ``has_aux``.
      argnums: the positions of the arguments to differentiate, also if they are passed by name. Of a Module, the
        ``Param`` Variables are differentiated; of any other argument, all leaves; with ``DiffState(argnum, filter)``,
        the leaves that the filter takes.
      has_aux: whether ``f`` returns a pair, of which only the first is differentiated.
      holomorphic: whether ``f`` is promised to be holomorphic.
      allow_int: whether leaves of integer type may be differentiated; their gradients are of type ``float0``.
      reduce_axes: as in ``jax.value_and_grad``.

    Returns:
      A function that returns ``(value, gradients)``. In place of a Module the gradients have a State, with the
      Variables that were differentiated. ``gradients`` is a tuple if ``argnums`` is a sequence. Other changes that
      ``f`` makes to its arguments (running statistics, random counts) appear on the objects that were passed in.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.ones)
    >>> loss, grads = nnx.value_and_grad(lambda layer, x: layer(x).sum())(layer, jnp.ones((1, 2)))
    >>> loss.item(), grads.kernel.shape
    (2.0, (2, 1))

    Raises:
      PrefixError: if ``argnums`` names an argument that was not passed, or a filter selects no leaf of it.
      ArgumentError: if a leaf to be differentiated is not of floating or complex type; names its path.
    """
    options: dict[str, Any] = {"holomorphic": holomorphic, "allow_int": allow_int, "reduce_axes": reduce_axes}
    refuse_nodes(argnums, "argnums")
    chosen = choices(argnums)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_position(f, args, kwargs)
        call = Derivation(f, args, has_aux, kwargs)
        numbers = call.choose(chosen, PARAMS)
        function, layout, tangents = call.function, call.packed.layout, call.tangents
        check_differentiable(call.packed, tangents, holomorphic, allow_int)

        def differentiate(leaves: list[Any]) -> tuple[Any, Any]:
            def pure(inputs: list[Any]) -> tuple[Any, tuple[list[Any], Outcome]]:
                all_leaves = tangents.put(leaves, inputs)
                out, after = cross(function, layout, all_leaves, part=lambda out: call.split(out)[1])
                warn_of_escapes(after)
                return unwrapped(call.split(out)[0]), (after.leaves, Outcome(after.delta))

            pure = named(pure, function, tangents.take(layout.leaf_paths), ())
            return with_room(jax.value_and_grad(pure, has_aux=True, **options), tangents.take(leaves))

        try:
            (value, changes), grads = differentiate(call.packed.leaves)
        except FloatingPointError as error:
            note_nan(error, differentiate, call.packed.leaves)
            raise
        except Exception as error:  # of JAX, before 0.9 not always a TypeError
            if "scalar-output" in str(error) and "Output was (" in str(error):
                error.add_note("If the function returns (loss, aux), pass has_aux=True.")
            note_abstract(error, layout, call.packed.leaves)
            raise
        found = tangents.fold_arguments(tangents.as_variables(grads), numbers)
        result = found[0] if is_single(argnums) else tuple(found)
        aux = call.commit(*changes)
        return ((value, aux) if has_aux else value), result

    return wrapped


def without_value(differentiate: Callable, f: Callable, has_aux: bool) -> Callable:
    """The gradient of ``f`` alone, given what returns the value, too."""

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, grads = differentiate(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped
