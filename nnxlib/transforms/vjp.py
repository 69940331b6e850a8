"""``vjp``, ``jvp`` and ``linearize``: products with the Jacobian of a function of Modules.

The tangents and gradients of a Module are a State by path. All its leaves of floating or complex type are
differentiated, not only the ``Param`` Variables, as by ``grad``: there is no loss here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..core.errors import OUTPUT, ArgumentError, describe
from ..core.graph import Packed, commit, pack
from ..core.missing import MISSING, is_missing
from ..core.packing import pack_live
from ..core.recordings import give_on, with_carrier
from ..core.tracing import boundary
from .callables import resolve
from .grad import split_aux
from .leaf_checks import check_traceable, note_abstract, type_of
from .lift import Arguments, Outcome, cross
from .prefixes import PrefixMapping
from .tangents import INEXACT, Argnums, Tangents, by_argument, choices, differentiated, is_inexact


class Derivation:
    """A function with its packed arguments, as a function of those leaves that are differentiated.

    With ``has_aux`` it returns a pair, of which only the first is differentiated.
    """

    def __init__(self, f: Callable, primals: Sequence[Any], has_aux: bool, kwargs: Mapping[str, Any] | None = None):
        self.function, bound, bound_kwargs = resolve(f)
        self.has_aux, self.shift, self.args = has_aux, len(bound), (*bound, *primals)
        self.arguments = with_carrier(Arguments(self.args, {**bound_kwargs, **(kwargs or {})}))
        self.packed: Packed = pack_live(self.arguments)

    def choose(self, argnums: Argnums | None, default: PrefixMapping = INEXACT) -> tuple[int, ...]:
        """Fix what is differentiated, all by default; returns the positions of the chosen arguments."""
        count = len(self.args) - self.shift
        filters = by_argument(range(count) if argnums is None else choices(argnums), count, self.shift)
        layout, leaves = self.packed.layout, self.packed.leaves
        taken = [
            x if path[0] == "args" and path[1] in filters else None
            for path, x in zip(layout.leaf_paths, leaves, strict=True)
        ]
        check_traceable(layout, taken)  # other arguments may be anything, as in a closure
        self.tangents = differentiated(self.packed, self.args, filters, default)
        return tuple(filters)

    @property
    def leaves(self) -> list[Any]:
        """The leaves that are differentiated."""
        return self.tangents.take(self.packed.leaves)

    def pure(self, leaves: list[Any]) -> tuple[list[Any], tuple[list[Any], Outcome, Tangents]]:
        """From leaves to those leaves of the output that have a tangent; and, as aux, to all that comes back."""
        all_leaves = self.tangents.put(self.packed.leaves, leaves)
        try:
            (primal, _), after = cross(self._run, self.packed.layout, all_leaves, part=operator.itemgetter(1))
        except TypeError as error:
            note_abstract(error, self.packed.layout, self.packed.leaves)
            raise
        found = Tangents.of_leaves(primal.layout, primal.leaves)
        return found.take(primal.leaves), (after.leaves, Outcome(after.delta), found)

    def _run(self, /, *args: Any, **kwargs: Any) -> tuple[Packed, Any]:
        out = self.function(*args, **kwargs)
        return pack({OUTPUT: split_aux(out)[0] if self.has_aux else out}), out

    def finish(self, leaves: list[Any], outcome: Outcome) -> tuple[Any, tuple]:
        """Write the changes; returns the output, and a tuple with the aux value if there is one."""
        out = commit(self.packed.layout, outcome.delta, leaves, self.packed.objects)
        give_on(self.arguments)
        return (out[0], (out[1],)) if self.has_aux else (out, ())


@boundary
def vjp(
    f: Callable = MISSING,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: Sequence[Any] = (),
    argnums: Argnums | None = None,
) -> Any:
    """Compute ``f(*primals)`` and a function that pulls back gradients of its output; ``jax.vjp`` with state.

    Args:
      f: a function, method, callable Module or partial. Without primals, a function that takes them is returned.
      *primals: its arguments. Changes that ``f`` makes to them appear on the objects that were passed in.
      has_aux: whether ``f`` returns a pair, of which only the first is differentiated.
      reduce_axes: as in ``jax.vjp``.
      argnums: which arguments to differentiate, also with filters: ``DiffState(argnum, filter)``. All by default.

    Returns:
      ``(output, pull_back)``, and the aux value with ``has_aux``. ``pull_back`` takes a gradient like the output, and
      returns a tuple of gradients like the arguments, each with a State in place of a Module.

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
    if is_missing(f):
        return functools.partial(vjp, **options)
    if not primals:
        return functools.wraps(f, updated=())(lambda *primals: vjp(f, *primals, **options))
    call = Derivation(f, primals, has_aux)
    numbers = call.choose(argnums)
    values, pull, rest = jax.vjp(call.pure, call.leaves, has_aux=True, reduce_axes=reduce_axes)
    leaves, outcome, outputs = rest
    out, aux = call.finish(leaves, outcome)
    tangents, shapes = call.tangents, dict(zip(outputs.positions, map(type_of, values), strict=True))
    floating = Tangents(outputs.layout, tuple([k for k, type_ in shapes.items() if is_inexact(type_)]))

    def pull_back(pull: Callable, gradient: Any) -> tuple:  # refers to no array
        found = floating.unfold({OUTPUT: gradient}, shapes, "gradient", outputs.layout.positions.keys())
        (grads,) = pull(outputs.filled(found, shapes))
        return tuple(tangents.fold_arguments(tangents.as_variables(grads), numbers))

    return (out, jax.tree_util.Partial(pull_back, pull), *aux)  # a pytree, which can be a residual or leave a jit


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
def linearize(f: Callable, *primals: Any, has_aux: bool = False, argnums: Argnums | None = None) -> Any:
    """Compute ``f(*primals)`` and a function that maps tangents forward, many times; ``jax.linearize`` with state.

    Args:
      f: a function, method, callable Module or partial.
      *primals: its arguments. Changes that ``f`` makes to them appear on the objects that were passed in, once.
      has_aux: whether ``f`` returns a pair, of which only the first is differentiated.
      argnums: as in :func:`vjp`.

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
    _, push, (leaves, outcome, outputs) = jax.linearize(call.pure, call.leaves, has_aux=True)
    out, aux = call.finish(leaves, outcome)
    inputs, shapes = call.tangents, tuple(map(type_of, call.packed.leaves))

    def push_forward(push: Callable, *tangents: Any) -> Any:  # refers to no array
        _check_count(numbers, tangents)
        found = inputs.unfold(inputs.arguments(numbers, tangents), shapes, "tangent")
        along = push(inputs.filled(found, shapes))
        return outputs.fold(outputs.as_variables(along))[OUTPUT]

    return (out, jax.tree_util.Partial(push_forward, push), *aux)
