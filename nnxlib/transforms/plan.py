"""Plans: the compiled function for one structure of arguments, given no more than its trace asked for.

JAX charges a call for each array that is passed, also when it is not used. So a :class:`Plan` traces the function once
on all leaves, sees which of them were read (``core/inputs.py``), and compiles a function of these alone: the price of a
call follows what the function touches, not how large the model is.

Calls with other shapes are traced with the same inputs. A trace that asks for a further one is given up
(:class:`~nnxlib.core.inputs.AbsentInput`), and the function is compiled anew with more inputs; there can be only a few
of these, for inputs are only ever added. Traces below another trace, where passing an array costs nothing, and stages
(``lower``) take all leaves.

A compiled function takes each leaf as an argument of its own, and returns the leaves that come back and after them the
:class:`~nnxlib.transforms.lift.Outcome`: JAX takes apart and puts together such flat lists faster than any other form,
and each argument can be donated, or have a sharding, of its own. What is returned has shardings by lane, so there it
returns a list for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.tree_util as jtu

from ..core.captures import lending
from ..core.errors import ArgumentError, describe, format_path, listed
from ..core.graph import Layout, Packed, commit
from ..core.inputs import ABSENT, AbsentInput
from ..core.tracing import at_top_level, jaxpr_as_fun
from .lift import Crossing, Outcome, name_of
from .prefixes import join_lanes


class Compiled:
    """A jitted function of some of the leaves."""

    __slots__ = ("__weakref__", "inputs", "jitted")

    def __init__(self, jitted: Any, inputs: Sequence[int]):
        self.jitted, self.inputs = jitted, inputs

    def of(self, leaves: Sequence[Any]) -> list[Any]:
        """Those that it takes, of all leaves."""
        return [leaves[k] for k in self.inputs]


class Plan:
    """A function, compiled for one layout and its lanes.

    ``everything`` takes all leaves; ``compiled`` those that were ever read, once that is known.

    Args:
      options: those of ``jax.jit`` for the function of any inputs.
      donated: the positions of the leaves whose buffers may be reused.
      in_shardings: those of all leaves; None if none are given.
    """

    def __init__(
        self,
        crossing: Crossing,
        function: Callable,
        options: dict[str, Any],
        donated: Collection[int] = (),
        in_shardings: Sequence[Any] | None = None,
    ):
        self.crossing, self._function, self._options = crossing, function, options
        self._donated, self._in_shardings = donated, in_shardings
        self.in_groups = crossing.labels is not None  # whether what is returned is in lists, by lane
        self.everything = self._compiled(range(len(crossing.layout.leaf_paths)))
        self.compiled: Compiled | None = None

    def _compiled(self, inputs: Sequence[int], traced: Callable[..., Any] | None = None) -> Compiled:
        options = dict(self._options)
        if self._in_shardings is not None:
            options["in_shardings"] = tuple([self._in_shardings[k] for k in inputs])
        if donated := tuple([i for i, k in enumerate(inputs) if k in self._donated]):
            options["donate_argnums"] = donated
        return Compiled(jax.jit(_step(self.crossing, self._function, inputs, traced), **options), inputs)

    def opened(self, returned: Sequence[Any]) -> Sequence[Any]:
        """What a compiled function returned, without groups: leaves, and after them the outcome."""
        if not self.in_groups:
            return returned
        *groups, outcome = returned
        return [*join_lanes(groups, outcome.lane_of), outcome]

    def finish(self, packed: Packed, returned: Sequence[Any]) -> Any:
        """Commit what a compiled function returned to the objects that were packed; returns the user's output."""
        *leaves, outcome = self.opened(returned)
        return commit(packed.layout, outcome.delta, leaves, packed.objects)

    def call(self, packed: Packed) -> Any:
        """Call the function on what was packed, of which a trace may borrow the objects that the function captures.

        Raises:
          ArgumentError: for a leaf that JAX cannot trace.
        """
        with lending(self.crossing.lender, lambda: packed.objects):
            try:
                returned = self._call(packed.leaves)
            except TypeError as error:
                check_traceable(packed.layout, packed.leaves)
                _note_abstract(error, packed.layout, packed.leaves)
                raise
        return self.finish(packed, returned)

    def _call(self, leaves: Sequence[Any]) -> Sequence[Any]:
        if not at_top_level() or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.everything.jitted(*leaves)
        compiled = self.compiled
        while True:
            if compiled is None:
                compiled = self.compiled = self._compile(leaves)
            try:
                return compiled.jitted(*compiled.of(leaves))
            except AbsentInput:
                compiled = None

    def _compile(self, leaves: Sequence[Any]) -> Compiled:
        """A function of what a trace on these leaves reads, and of what others have read before."""
        everything = self.everything
        traced = everything.jitted.trace(*leaves)
        outcome: Outcome = traced.out_info[-1]
        read = set(outcome.read)
        if self.compiled is not None:
            read.update(self.compiled.inputs)
        if len(read) == len(leaves):
            return everything
        inputs = sorted(read)
        compiled = self._compiled(inputs, _again(traced, leaves, inputs))
        compiled.jitted.trace(*compiled.of(leaves))  # before another thread can see it: uses up what was traced
        return compiled


def _step(
    crossing: Crossing, function: Callable, inputs: Sequence[int], traced: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The function of some of the leaves; it must not ask for others. ``traced`` is what its first trace is to give."""
    count = len(crossing.layout.leaf_paths)

    def step(*values: Any) -> tuple:
        nonlocal traced
        if traced is not None:
            (again, traced) = (traced, None)
            return again(*values)
        leaves = [ABSENT] * count
        for position, value in zip(inputs, values, strict=True):
            leaves[position] = value
        groups, outcome = crossing.run(function, leaves)
        return *(groups[0] if crossing.labels is None else groups), outcome

    step.__name__ = name_of(function)
    return step


def _again(traced: Any, leaves: Sequence[Any], inputs: Sequence[int]) -> Callable[..., Any]:
    """What was traced on all leaves, as a function of some of them: user code is not run again."""
    starts = [0, *accumulate([len(jtu.tree_leaves(leaf)) for leaf in leaves])]  # a leaf may be a pytree
    evaluate, structure = jaxpr_as_fun(traced.jaxpr), jtu.tree_structure(traced.out_info)

    def again(*values: Any) -> Any:
        flat: list[Any] = [None] * starts[-1]
        for position, value in zip(inputs, values, strict=True):
            flat[starts[position] : starts[position + 1]] = jtu.tree_leaves(value)
        return structure.unflatten(evaluate(*flat))

    return again


def check_traceable(layout: Layout, leaves: Sequence[Any]) -> None:
    """Check that JAX can trace each leaf of the arguments themselves.

    Raises:
      ArgumentError: naming the argument, and what to do.
    """
    for path, leaf in zip(reversed(layout.leaf_paths), reversed(leaves), strict=True):
        try:
            jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else None
        except TypeError:
            if jtu.all_leaves([leaf]):
                name, kind = format_path(path), type(leaf).__name__
                raise ArgumentError(_UNTRACEABLE.format(name=name, kind=kind, value=leaf)) from None


def _note_abstract(error: TypeError, layout: Layout, leaves: Sequence[Any]) -> None:
    """Say which leaves are shapes without values."""
    abstract = [
        f"{format_path(path)}: {describe(leaf)}"
        for path, leaf in zip(layout.leaf_paths, leaves, strict=True)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if abstract:
        error.add_note(listed(_ABSTRACT, abstract))


_ABSTRACT = """\
These were given as shapes without values, as nnx.eval_shape makes them, so that the function can be lowered but not \
called. Give them values by nnx.update(model, state), or ask for shapes only by nnx.eval_shape(function, model, ...):"""

_UNTRACEABLE = """\
{name} is a {kind} ({value!r:.80}), which JAX cannot trace. If it is part of the program, declare it static: \
static_argnums=... or static_argnames=...; or bind it beforehand with functools.partial or a closure."""
