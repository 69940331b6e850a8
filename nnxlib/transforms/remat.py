"""``remat``: recompute in the backward pass instead of keeping intermediate values.

It is ``jax.checkpoint`` of a program that is kept on the function (program.py): so of equal layers, one is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ..core.errors import ArgumentError
from ..core.formulas import as_array
from ..core.missing import MISSING
from ..core.packing import pack_live
from ..core.recordings import give_on, with_carrier
from ..core.static import StaticArgument
from ..core.tracing import boundary
from .callables import resolve, static_arguments
from .classes import lifts_classes
from .labels import label_arguments
from .lift import Arguments, Crossing
from .prefixes import call_entries, check_labels
from .program import Program, program_of, run_program, weakly


@lifts_classes("__call__")
def remat(
    f: Callable = MISSING,
    *,
    prevent_cse: bool | Sequence[Any] = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    policy: Callable[..., bool] | None = None,
) -> Callable:
    """Return ``f`` with its intermediate values recomputed when it is differentiated; ``jax.checkpoint`` with state.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      prevent_cse: whether to keep the compiler from undoing it; not needed inside a scan. If JAX takes it, a pytree
        prefix of the positional arguments says for which of them.
      static_argnums: numbers of arguments that are part of the program. An array among them is an argument like any
        other, as ``jax.checkpoint`` takes it.
      static_argnames: the same, by name.
      policy: which values to keep all the same, of ``jax.checkpoint_policies``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> loss = nnx.remat(lambda layer, x: jnp.sin(layer(x)).sum())
    >>> nnx.grad(loss)(layer, jnp.ones((1, 2))).kernel.shape
    (2, 3)

    Raises:
      ArgumentError: for a policy that is not a function, and static numbers that are not numbers.
      PrefixError: for a ``prevent_cse`` that does not fit the arguments, and static ones that ``f`` does not have.
    """
    check_policy(policy)
    check_labels(prevent_cse, "prevent_cse", lambda label: isinstance(label, bool), "it takes booleans")
    function, bound, bound_kwargs = resolve(f)
    function = weakly(function)

    @boundary
    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        arguments = with_carrier(Arguments((*bound, *map(_unless_array, args)), {**bound_kwargs, **kwargs}))
        packed = pack_live(arguments)
        layout = packed.layout
        cse = prevent_cse
        if not isinstance(cse, bool):
            entries = call_entries(cse, arguments, len(bound), "prevent_cse", True)
            cse = tuple(label_arguments(packed, entries)[1])

        def program(leaves: list[Any]) -> Any:
            pure = Crossing(layout).purify(function)  # a new one, for JAX would not trace the same one again
            of_leaves: Any = cse if isinstance(cse, bool) else ([*cse],)
            (returned,), outcome = jax.checkpoint(pure, prevent_cse=of_leaves, policy=policy)(leaves)
            return returned, outcome

        key, make = ("remat", cse, policy), lambda: Program(program, compiled=False)
        made = program_of((function,), layout, key, make)
        # Called eagerly, jax.checkpoint hands out constants as literals of its own, which have no method `at`.
        out = run_program(lambda leaves: jax.tree.map(as_array, made(leaves)), packed)
        give_on(arguments)
        return out

    return static_arguments(wrapped, static_argnums, static_argnames)


def _unless_array(argument: Any) -> Any:
    """An argument; if it is an array that was declared static, the array."""
    static = type(argument) is StaticArgument and isinstance(argument.value, jax.Array)
    return argument.value if static else argument


def check_policy(policy: Any) -> None:
    """Refuse what is not a policy, where it is given: JAX would call it in the middle of a derivative."""
    if policy is not None and not callable(policy):
        raise ArgumentError(f"A policy is a function, as in jax.checkpoint_policies, but got {policy!r}.")


checkpoint = remat
