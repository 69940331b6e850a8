"""``custom_vjp`` and ``custom_jvp``: functions of Modules that come with their own derivative.

In rules, gradients and tangents have a State by path in place of each Module, see :mod:`.tangents`. The changes that a
function makes to its arguments are part of its result. So a rule gets two kinds of gradients: of the arguments, as the
function leaves them, and of its output. The two are one table.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..core.annotations import parameters_of, signature_of, stand_for
from ..core.data import holds_nodes, is_data
from ..core.errors import OUTPUT, ArgumentError, describe, format_path
from ..core.filters import Nothing, to_predicate
from ..core.graph import After, Delta, Packed, build, pack
from ..core.layout import Layout
from ..core.missing import MISSING, is_missing
from ..core.packing import pack_live
from ..core.pickling import global_name
from ..core.rows import ROOT, NodeRow, Tree, children, count_leaves, own_leaf_paths
from ..core.static import StaticArgument
from ..core.tracing import boundary
from .callables import as_bound, as_pair, check_options, resolve
from .leaf_checks import check_returned, check_traceable, type_of
from .lift import Arguments, Outcome, cross, finish, part_of
from .naming import named
from .selection import Selection
from .tangents import (
    INEXACT,
    Argnums,
    DiffState,
    Tangents,
    by_argument,
    choices,
    differentiated,
    is_float0,
    is_inexact,
    own_leaves,
    zeros_like,
)


@boundary
def custom_vjp(
    fun: Callable = MISSING, nondiff_argnums: Argnums = (), nondiff_argnames: str | Iterable[str] = ()
) -> Any:
    """Give a function its own rule for gradients; ``jax.custom_vjp`` with state.

    The rule is set with ``defvjp(forward, backward)``. It is for the arguments: nothing else that ``fun`` refers to can
    be differentiated.

    - ``forward`` takes the arguments of ``fun`` and returns ``(output, residuals)``. It makes the same changes to its
      arguments as ``fun``, most simply by calling it. There may be Modules in the residuals.
    - ``backward`` takes the residuals and ``(gradients of the arguments, gradient of the output)``: those of the
      arguments as ``fun`` leaves them, a State of all floating leaves for each Module and None for others. It returns a
      tuple with a gradient for each argument: a State for each Module, in which what is left out is zero. Arguments
      that are not differentiated are passed to ``backward`` first, and get no gradient from it. A gradient may be of
      another floating type than the value, as in JAX; then JAX refuses to add it to others, as in a loop.

    Args:
      fun: a function or method; may be left out, to be used as a decorator. The arguments are positional to the rule.
      nondiff_argnums: numbers of arguments that are not differentiated; ``DiffState(argnum, filter)`` for an argument
        of which only the leaves that the filter takes are, none for ``False``. The derivative with respect to others
        is zero. Such an argument keeps its place in what the rule takes and returns.
      nondiff_argnames: names of further arguments that are not differentiated.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> @nnx.custom_vjp
    ... def loss(layer, x):
    ...   return layer(x).sum()
    >>> def forward(layer, x):
    ...   y, pull_back = nnx.vjp(lambda layer: layer(x).sum(), layer)
    ...   return y, pull_back(1.0)
    >>> def backward(residuals, gradients):
    ...   _, out_gradient = gradients
    ...   return jax.tree.map(lambda g: out_gradient * jnp.sign(g), residuals[0]), None
    >>> loss.defvjp(forward, backward)
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.grad(loss)(layer, jnp.array([[5.0, -7.0]])).kernel.value.tolist()
    [[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]

    Raises:
      ArgumentError: if what a rule returns does not fit; names the path.
    """
    if is_missing(fun):
        return functools.partial(custom_vjp, nondiff_argnums=nondiff_argnums, nondiff_argnames=nondiff_argnames)
    return CustomVjp(fun, nondiff_argnums, nondiff_argnames)


@boundary
def custom_jvp(
    fun: Callable = MISSING, nondiff_argnums: Argnums = (), nondiff_argnames: str | Iterable[str] = ()
) -> Any:
    """Give a function its own rule for tangents; ``jax.custom_jvp`` with state.

    The rule is set with ``defjvp(rule)``. It takes ``(arguments, tangents)``, two tuples, with a State by path for each
    Module among the tangents, makes the same changes to the arguments as ``fun``, and returns ``(output, tangent of the
    output)``. What is changed in the arguments has the tangent zero. Arguments that are not differentiated are passed
    first. ``defjvps(rule_0, rule_1, ...)`` takes a rule for each argument instead: ``rule_i(tangent, output,
    *arguments)`` gives its part of the tangent of the output; None for none.

    Args:
      fun: as in :func:`custom_vjp`.
      nondiff_argnums: as in :func:`custom_vjp`.
      nondiff_argnames: as in :func:`custom_vjp`.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> @nnx.custom_jvp
    ... def loss(layer, x):
    ...   return layer(x).sum()
    >>> @loss.defjvp
    ... def rule(primals, tangents):
    ...   return loss(*primals), 10.0 * tangents[0].bias.sum()
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.grad(loss)(layer, jnp.ones((1, 2))).bias.value.tolist()
    [10.0, 10.0, 10.0]
    """
    if is_missing(fun):
        return functools.partial(custom_jvp, nondiff_argnums=nondiff_argnums, nondiff_argnames=nondiff_argnames)
    return CustomJvp(fun, nondiff_argnums, nondiff_argnames)


class _Custom:
    """A function with a derivative of its own."""

    def __init__(self, fun: Callable, nondiff_argnums: Argnums = (), nondiff_argnames: str | Iterable[str] = ()):
        opaque = isinstance(fun, functools.partial) and not holds_nodes((fun.args, fun.keywords))
        self._function, self._bound, self._kwargs = (fun, (), {}) if opaque else resolve(fun)
        stand_for(self, fun)
        by_name = Selection(self._function, 0, None, nondiff_argnames, "nondiff")
        self._chosen = [*choices(nondiff_argnums), *by_name.among(len(parameters_of(self._function)))]

    @boundary
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function; under differentiation, its rule."""
        return self._call(self._positional(args, kwargs))

    def _call(self, args: tuple) -> Any:
        """Call the function on all of its arguments, the bound ones among them."""
        call, packed = _prepare(self._function, args, self._chosen)
        try:
            leaves, outcome, _ = self._transformed(call)(*packed.leaves)
        except jax.errors.UnexpectedTracerError as error:
            error.add_note(_CLOSED_OVER)
            raise
        return finish(packed, ((leaves,), outcome))

    def _positional(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """All arguments by position, as rules get them, with the defaults of those that were left out.

        What a partial has bound is constant, and no argument of the rule; so it is called by position, as in JAX.
        """
        f = _of_positions if isinstance(self._function, functools.partial) else self._function
        bound = signature_of(f).bind(*self._bound, *args, **{**self._kwargs, **kwargs})
        bound.apply_defaults()
        if given := sorted(bound.kwargs.keys() & {*self._kwargs, *kwargs}):
            raise ArgumentError(
                f"{self!r} takes no keyword-only arguments, but was given {given}. Its rules get all arguments by "
                "position: leave out the * (or **) where it is defined."
            )
        return bound.args

    def _transformed(self, call: _Call) -> Callable:
        """The pure function of a call, with its rule, as JAX differentiates it."""
        raise NotImplementedError

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __copy__(self) -> _Custom:  # as for a function
        return self

    def __deepcopy__(self, memo: Any) -> _Custom:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return global_name(self, sys._getframe(1)) or super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self._function, '__qualname__', self._function)})"


def _of_positions(*args: Any) -> None: ...


class CustomVjp(_Custom):
    """A function with its own rule for gradients; what :func:`custom_vjp` returns."""

    _of_all = False  # whether the gradients of the arguments have leaves that are not floating, too
    _rules: dict[str, tuple[tuple[Callable, ...], dict[str, bool]]]  # by the method that sets them, as in JAX

    def defvjp(
        self,
        fwd: Callable,
        bwd: Callable,
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
        **options: bool,
    ) -> None:
        """Set the rule.

        With ``symbolic_zeros``, as in JAX, ``fwd`` gets each array as a ``CustomVJPPrimal`` (``value``, ``perturbed``),
        and ``bwd`` a ``SymbolicZero`` for a gradient that is zero. Modules have arrays in any case, and gradients of
        Modules zeros. ``optimize_remat`` is the flag of JAX for functions under ``remat``; further ``options`` are
        those of the installed ``jax.custom_vjp``, such as ``generic_batching``.
        """
        options = {"symbolic_zeros": symbolic_zeros, "optimize_remat": optimize_remat, **options}
        self._set("defvjp", (fwd, bwd), options)

    def defvjp_with_logs(self, fwd: Callable, bwd: Callable, **options: bool) -> None:
        """Set a rule that also logs: ``bwd`` returns ``(gradients, logs)``, with a dict of pytrees or None.

        The logs are what ``pull_back.with_logs(gradient)`` of :func:`vjp` returns besides the gradients. With JAX 0.12
        or newer; ``options`` as for :meth:`defvjp`.
        """
        self._set("defvjp_with_logs", (fwd, bwd), options)

    def defvjp_with_accums(self, fwd: Callable, bwd: Callable, **options: bool) -> None:
        """Set a rule that adds its gradients up: ``bwd`` also takes an accumulator for each argument, at the end.

        That of a Module is a State of accumulators, in place of the values that are differentiated:
        ``layers.kernel.value.accum(gradient)``. ``bwd`` returns None, or logs as for :meth:`defvjp_with_logs`.
        """
        self._set("defvjp_with_accums", (fwd, bwd), options)

    def defremat(self, fwd: Callable, rem: Callable, bwd: Callable, **options: bool) -> None:
        """Set the rules for use under ``remat``; as in JAX, which needs the flags ``jax_custom_vjp3``, ``jax_remat3``.

        ``fwd`` and ``bwd`` are as for :meth:`defvjp`. In between, on the backward pass, ``rem(residuals, *arguments)``
        returns ``(output, residuals)`` for ``bwd``, and makes the same changes to the arguments as ``fwd``.
        """
        self._set("defremat", (fwd, rem, bwd), options)

    def defremat_with_logs(self, fwd: Callable, rem: Callable, bwd: Callable, **options: bool) -> None:
        """The same, with a ``bwd`` that also logs; see :meth:`defvjp_with_logs`."""
        self._set("defremat_with_logs", (fwd, rem, bwd), options)

    def _set(self, method: str, rules: tuple[Callable, ...], options: dict[str, bool]) -> None:
        check_options(options, getattr(jax.custom_vjp, method))
        for_remat = "remat" in method  # there is one rule for use under remat, and one for all else
        kept = {name: x for name, x in getattr(self, "_rules", {}).items() if ("remat" in name) != for_remat}
        self._rules = {**kept, method: (rules, options)}

    def _transformed(self, call: _Call) -> Callable:
        if not hasattr(self, "_rules"):
            raise ArgumentError(f"{self!r} has no rule yet; set it with .defvjp(forward, backward).")
        custom = jax.custom_vjp(call.named(call.pure, self._function))
        for method, ((forward, *recompute, backward), options) in self._rules.items():
            symbolic = bool(options.get("symbolic_zeros"))
            fwd = call.named(functools.partial(self._forward, call, forward, symbolic), forward)
            rem = [named(functools.partial(self._recompute, call, f), f) for f in recompute]
            bwd = named(functools.partial(self._backward, call, backward, method), backward)
            getattr(custom, method)(fwd, *rem, bwd, **options)
        return custom

    @staticmethod
    def _forward(call: _Call, rule: Callable, symbolic: bool, leaves: list[Any], saved: Sequence[Any] = ()) -> Any:
        """What a rule computes in the forward pass: the output, and residuals. It is given what was ``saved``."""

        def run(*args: Any) -> Any:
            out, residuals = as_pair(rule(*saved, *args), _FORWARD)
            nondiff, _ = as_bound([args[i] for i in call.nondiff], {})
            table = pack({"nondiff": nondiff, "residuals": residuals})
            check_traceable(table.layout, table.leaves)
            return table, out

        leaves = call.shown(leaves) if symbolic else leaves
        (packed, _), after = cross(run, call.layout, leaves, part=operator.itemgetter(1))
        return call.outputs(after), (packed.leaves, Tangents(packed.layout, ()))

    @classmethod
    def _recompute(cls, call: _Call, rule: Callable, saved: tuple, *leaves: Any) -> Any:
        """What a rule computes in between, given the residuals of the forward pass."""
        _, residuals = build(saved[1].layout, saved[0])[0].values()
        return cls._forward(call, rule, False, [*leaves], [residuals])

    def _backward(self, call: _Call, rule: Callable, method: str, saved: tuple, gradients: tuple, *accums: Any) -> Any:
        """What a rule computes in the backward pass: the gradients, and logs."""
        leaves, table = saved
        nondiff, residuals = build(table.layout, leaves)[0].values()
        values = _without_symbols(gradients[2], gradients[0])
        of_arguments, of_output, paths = call.gradients(values, gradients[2], self._of_all)
        if accums:
            targets = call.tangents.as_variables(call.tangents.take(accums))
            accums = tuple(call.tangents.fold_arguments(targets, call.diff))
        try:
            found = rule(*nondiff, residuals, (of_arguments, of_output), *accums)
        except (TypeError, AttributeError, ValueError) as error:
            error.add_note(_GIVEN if self._of_all else f"{_GIVEN} {_FLOATING}")
            raise
        if accums:
            return found
        found, *logs = as_pair(found, _LOGGED) if method.endswith("_with_logs") else (found,)
        of_leaves = tuple(call.unfold(found, paths))
        return (of_leaves, *logs) if logs else of_leaves


class CustomJvp(_Custom):
    """A function with its own rule for tangents; what :func:`custom_jvp` returns."""

    _rule: Callable | None = None
    _symbolic_zeros = False

    def defjvp(self, jvp: Callable, symbolic_zeros: bool = False) -> Callable:
        """Set the rule; returns it, so that this can be used as a decorator. As to zeros, see :class:`CustomVjp`."""
        self._rule, self._symbolic_zeros = jvp, symbolic_zeros
        return jvp

    def defjvps(self, *jvps: Callable | None) -> None:
        """Set a rule for each argument, whose tangents of the output are summed; None for an argument without one."""
        if self._chosen:
            raise ArgumentError("defjvps gives a rule to each argument; with nondiff_argnums, use defjvp.")

        def rule(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
            out = self._call(primals)
            pairs = zip(jvps, tangents, strict=True)
            parts = [jvp(tangent, out, *primals) for jvp, tangent in pairs if jvp is not None]
            return out, functools.reduce(functools.partial(jax.tree.map, jnp.add), parts) if parts else None

        self._rule = rule

    def _transformed(self, call: _Call) -> Callable:
        rule = self._rule
        if rule is None:
            raise ArgumentError(f"{self!r} has no rule yet; set it with .defjvp(rule).")
        custom = jax.custom_jvp(call.named(call.pure, self._function))

        def jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
            integers = [k for k in own_leaves(call.layout) if not is_inexact(primals[k])]
            shown = Tangents(call.layout, (*call.tangents.positions, *integers))
            values = _without_symbols(shown, shown.take(tangents))
            along = tuple(shown.fold_arguments(shown.as_variables(values), call.diff))

            def run(*args: Any) -> Any:
                nondiff, diff = [args[i] for i in call.nondiff], tuple([args[i] for i in call.diff])
                return as_pair(rule(*nondiff, diff, along), _RULE)

            (_, tangent), after = cross(run, call.layout, primals, part=operator.itemgetter(0))
            out = leaves, outcome, changed = call.outputs(after)
            shapes = dict(zip(changed.positions, leaves, strict=True))
            found = changed.unfold((MISSING, tangent), shapes, "tangent")
            dots = [found[k] if k in found else zeros_like(leaf) for k, leaf in zip(changed.positions, leaves)]
            return out, (dots, outcome, changed)

        custom.defjvp(named(jvp, rule), self._symbolic_zeros)
        return custom


def _without_symbols(tangents: Tangents, values: Sequence[Any]) -> list[Any]:
    """The values of some tangents; those in objects that are JAX's ``SymbolicZero`` as arrays."""
    own = own_leaves(tangents.layout)
    pairs = zip(tangents.positions, values, strict=True)
    return [x if k in own else jax.tree.map(_as_zeros, x) for k, x in pairs]


def _as_zeros(x: Any) -> Any:
    return zeros_like(x.aval) if type(x) is jax.custom_derivatives.SymbolicZero else x


def _prepare(function: Callable, args: tuple, chosen: Sequence[int | DiffState]) -> tuple[_Call, Packed]:
    """Pack the arguments of a call, and find what is differentiated, given ``nondiff_argnums``."""
    filters = by_argument(chosen, len(args), option="nondiff_argnums")
    nondiff = sorted(i for i, filter_ in filters.items() if filter_ is MISSING)
    args = tuple([StaticArgument(x) if i in nondiff and not is_data(x) else x for i, x in enumerate(args)])
    packed = pack_live(Arguments(args, {}))
    check_traceable(packed.layout, packed.leaves)
    diff = {i: filters.get(i, MISSING) for i in range(len(args)) if i not in nondiff}
    taken = {i: f for i, f in diff.items() if f is MISSING or not isinstance(to_predicate(f), Nothing)}
    positions = differentiated(packed, args, taken, INEXACT).positions
    tangents = Tangents(packed.layout, tuple([k for k in positions if is_inexact(packed.leaves[k])]))
    shapes = tuple(map(type_of, packed.leaves))
    return _Call(function, tangents, tuple(diff), tuple(nondiff), shapes), packed


class _Call:
    """What the rules need to know about one call. JAX keeps it, so it refers to no object and no array.

    ``tangents`` are the leaves of the arguments that are differentiated, ``shapes`` those of all leaves; ``diff`` the
    numbers of the arguments that are differentiated, ``nondiff`` of the others.
    """

    def __init__(
        self, function: Callable, tangents: Tangents, diff: tuple[int, ...], nondiff: tuple[int, ...], shapes: tuple
    ):
        self.function, self.tangents, self.layout = function, tangents, tangents.layout
        self.diff, self.nondiff, self._shapes = diff, nondiff, shapes
        self._delta: Delta | None = None

    def named(self, pure: Callable, f: Callable) -> Callable:
        """``pure``, a function of a list of leaves, as one of leaves, of which JAX speaks as of ``f``."""
        return named(lambda *leaves: pure([*leaves]), f, self.layout.leaf_paths)

    def shown(self, leaves: Sequence[Any]) -> list[Any]:
        """What a forward rule with ``symbolic_zeros`` sees: plain values in objects, and in nondiff_argnums."""
        own, paths = own_leaves(self.layout), self.layout.leaf_paths
        plain = jax.custom_derivatives.custom_vjp_primal_tree_values
        return [x if k in own and paths[k][1] in self.diff else plain(x) for k, x in enumerate(leaves)]

    def pure(self, leaves: list[Any]) -> tuple[list[Any], Outcome, Tangents]:
        """The function as JAX calls it, on leaves."""
        _, after = cross(self.function, self.layout, leaves)
        check_returned(after)
        return self.outputs(after)

    def outputs(self, after: After) -> tuple[list[Any], Outcome, Tangents]:
        """What the function, or a rule, returns to JAX: the leaves that come back, and their positions after the call.

        These are positions in the table of the arguments, as the function leaves them, and of the output; -1 for a leaf
        of an object that cannot be reached any more.

        Raises:
          ArgumentError: if a rule changes its arguments in another way than the function.
        """
        if self._delta is None:
            self._delta = after.delta
        if self._delta != after.delta:
            raise ArgumentError(_OTHER_CHANGES.format(paths=self._describe(self._delta, after.delta)))
        root = Tree(_PAIR, ((), (OUTPUT,)), (self.layout.root, after.delta.root))
        table, of_arguments = Layout(tuple(after.rows), root), count_leaves(self.layout.root)
        owners = [(i, of_arguments + k if i == ROOT else k) for i, k in after.owners]
        positions = tuple([table.owner_positions.get(owner, -1) for owner in owners])
        return after.leaves, Outcome(after.delta), Tangents(table, positions)

    def _describe(self, a: Delta, b: Delta) -> str:
        """Describe where two Deltas differ, for a message."""
        changed = {*a.values, *(i for i, _ in a.rows)} ^ {*b.values, *(i for i, _ in b.rows)}
        paths = [format_path(self.layout.paths[i]) for i in sorted(changed) if i < len(self.layout.rows)]
        return ", ".join(paths) or ("the structure of the output" if a.root != b.root else "the structure of a Module")

    def gradients(
        self, gradients: Sequence[Any], changed: Tangents, of_all: bool
    ) -> tuple[tuple, Any, Collection[tuple]]:
        """The gradients of the arguments as the function left them, that of the output, and the paths of all leaves.

        A Variable that the function has not changed does not come back, so its gradient here is zero. Only with
        ``of_all`` there are gradients of leaves that are not floating, as JAX has them (float0).
        """
        paths, own = changed.layout.leaf_paths, own_leaves(changed.layout)
        found = {
            k: gradient
            for k, gradient in zip(changed.positions, gradients, strict=True)
            if k >= 0 and paths[k] is not None and (of_all or k in own or not is_float0(gradient))
        }
        before, after = _places(self.layout), _places(changed.layout)
        for place in [x for x in before if x in after]:
            shape = self._shapes[before[place]]
            if after[place] not in changed.positions and (of_all or is_inexact(shape)):
                found[after[place]] = zeros_like(shape)
        table = Tangents(changed.layout, tuple(found))
        (_, arguments), output = children(changed.layout.root)
        parts = [*((("args", i), part_of(arguments, (0, i))) for i in self.diff), output]
        *of_arguments, of_output = table.fold_parts(table.as_variables(list(found.values())), parts)
        return tuple(of_arguments), of_output, changed.layout.positions.keys()

    def unfold(self, returned: Any, ignored: Collection[tuple]) -> list[Any]:
        """A gradient for each leaf, None for zero."""
        if not isinstance(returned, tuple | list) or len(returned) != len(self.diff):
            found = f"{len(returned)} values" if isinstance(returned, tuple | list) else describe(returned)
            raise ArgumentError(_WRONG_COUNT.format(count=len(self.diff), found=found))
        given = self.tangents.arguments(self.diff, returned)
        try:
            found = self.tangents.unfold(given, self._shapes, "gradient", ignored, of_any_float=True)
        except ArgumentError as error:
            error.add_note(_GIVEN)
            raise
        return [found.get(k) for k in range(len(self._shapes))]


def _places(layout: Layout) -> dict[tuple, int]:
    """The position of each leaf that can be reached and is in an object, by the row and the path within the object."""
    places = {i: own_leaf_paths(row) if isinstance(row, NodeRow) else [()] for i, row in enumerate(layout.rows)}
    reached = [(i, k, position) for (i, k), position in layout.owner_positions.items() if i != ROOT]
    return {(i, places[i][k]): position for i, k, position in reached if layout.leaf_paths[position] is not None}


_PAIR = jtu.tree_structure((0, 0))  # the arguments, the output

_CLOSED_OVER = """\
If the function, or its rule, refers to a Module or an array that is differentiated, pass it as an argument: a rule is \
for the arguments alone."""

_FORWARD = "The forward rule must return a pair (output, residuals)"

_LOGGED = "A backward rule that logs must return a pair (gradients, logs)"

_RULE = "The rule must return a pair (output, tangent)"

_OTHER_CHANGES = """\
A rule must change its arguments as the function does, but they differ in {paths}. Let the rule call the function \
itself, or use the same methods."""

_GIVEN = """\
The backward rule of nnx.custom_vjp is called as backward(residuals, (input_updates_g, output_g)): the gradients of \
the arguments, as the function leaves them, and that of what it returns."""

_FLOATING = """\
The State of a Module has only floating leaves there; nnxlib.compat.flax gives those of integers, too."""

_WRONG_COUNT = """\
The backward rule must return a tuple with a gradient, or None, for each of the {count} arguments that are \
differentiated, but it returned {found}."""
