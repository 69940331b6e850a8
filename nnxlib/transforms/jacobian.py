"""``jacfwd``, ``jacrev`` and ``hessian``: whole Jacobians of functions of Modules.

A Jacobian is a tree within a tree, as in JAX: like the output, with something like the arguments in place of each leaf,
and a State by path in place of each Module. Its leaves are plain arrays of shape ``(*output, *argument)``, not
Variables, whose metadata, such as the names of axes, would not fit them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..core.errors import OUTPUT, ArgumentError, place_of
from ..core.missing import MISSING
from ..core.rows import LEAF, children
from .callables import by_position
from .classes import lifts_classes
from .signatures import as_operator
from .tangents import PARAMS, Argnums, Derivation, Tangents, check_differentiable, choices, is_inexact, is_single


@as_operator
@lifts_classes()
def jacfwd(f: Callable = MISSING, argnums: Argnums = 0, has_aux: bool = False, holomorphic: bool = False) -> Callable:
    """Return the Jacobian of ``f``, computed column by column; ``jax.jacfwd`` with state. Best for few inputs.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      argnums: the arguments to differentiate, as in :func:`grad`: a number stands for the ``Param`` Variables of a
        Module, ``DiffState(argnum, filter)`` for the leaves that the filter takes.
      has_aux: whether ``f`` returns a pair, of which only the first is differentiated.
      holomorphic: whether ``f`` is promised to be holomorphic.

    Returns:
      A function that returns the Jacobian, or ``(Jacobian, aux)``. It is like the output of ``f``, with a State in
      place of each leaf where a Module was differentiated. Other changes that ``f`` makes to its arguments appear on
      the objects that were passed in.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.jacfwd(lambda layer, x: layer(x))(layer, jnp.ones((1, 2))).kernel.shape
    (1, 3, 2, 3)

    Raises:
      ArgumentError: if an argument or an output is not of floating or complex type; names its path.
    """
    return _jacobian(jax.jacfwd, f, argnums, has_aux, holomorphic=holomorphic)


@as_operator
@lifts_classes()
def jacrev(
    f: Callable = MISSING,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable:
    """Return the Jacobian of ``f``, computed row by row; ``jax.jacrev`` with state. Best for few outputs.

    Args:
      f: as in :func:`jacfwd`.
      argnums: as in :func:`jacfwd`.
      has_aux: as in :func:`jacfwd`.
      holomorphic: as in :func:`jacfwd`.
      allow_int: whether leaves of integer type may be differentiated; their Jacobians are zero.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.jacrev(lambda layer, x: layer(x), argnums=1)(layer, jnp.ones((1, 2))).shape
    (1, 3, 1, 2)
    """
    return _jacobian(jax.jacrev, f, argnums, has_aux, holomorphic=holomorphic, allow_int=allow_int)


jacobian = jacrev


@as_operator
@lifts_classes()
def hessian(f: Callable = MISSING, argnums: Argnums = 0, has_aux: bool = False, holomorphic: bool = False) -> Callable:
    """Return the matrix of second derivatives of ``f``; ``jax.hessian`` with state.

    Args:
      f: as in :func:`jacfwd`.
      argnums: as in :func:`jacfwd`.
      has_aux: as in :func:`jacfwd`.
      holomorphic: as in :func:`jacfwd`.

    Returns:
      A function that returns the Hessian; of a Module, a State with a State in place of each leaf.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> second = nnx.hessian(lambda layer, x: (layer(x) ** 2).sum())(layer, jnp.ones((1, 2)))
    >>> second.kernel.bias.shape, second.bias.bias.tolist()
    ((2, 1, 1), [[2.0]])
    """
    options: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "holomorphic": holomorphic}
    return jacfwd(jacrev(f, **options), **options)


def _jacobian(transform: Callable, f: Callable, argnums: Argnums, has_aux: bool, **options: bool) -> Callable:
    single, chosen = is_single(argnums), choices(argnums)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_position(f, args, kwargs)
        call = Derivation(f, args, has_aux, kwargs)
        numbers = call.choose(chosen, PARAMS)
        check_differentiable(call.packed, call.tangents, options["holomorphic"], options.get("allow_int"))

        def pure(leaves: list[Any]) -> Any:
            out, rest = call.pure(leaves)
            _check_outputs(rest[2], out)
            return out, rest

        rows, (leaves, outcome, outputs) = transform(pure, has_aux=True, **options)(call.leaves)
        blocks = [call.tangents.fold_arguments(row, numbers) for row in rows]
        columns = [block[0] if single else tuple(block) for block in blocks]
        jacobian = outputs.fold(columns)[OUTPUT]
        _, aux = call.finish(leaves, outcome)  # last, after everything that may fail
        return (jacobian, *aux) if has_aux else jacobian

    return wrapped


def _check_outputs(outputs: Tangents, leaves: Sequence[Any]) -> None:
    """Check that the arrays and Variables that are returned, Modules apart, can be differentiated."""
    layout = outputs.layout
    own = {path for path, child in children(layout.root) if child is LEAF}
    own |= {layout.paths[i] for i in layout.variables if len(layout.paths[i]) == 1}
    pairs = zip(outputs.positions, leaves, strict=True)
    for path in own - {layout.leaf_paths[k] for k, leaf in pairs if is_inexact(leaf)}:
        raise ArgumentError(_NOT_DIFFERENTIABLE.format(path=place_of(path)))


_NOT_DIFFERENTIABLE = """\
Cannot differentiate {path}: it is not of floating or complex type. Return it beside the rest, with has_aux=True."""
