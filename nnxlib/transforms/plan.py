"""Plans: the compiled function for one structure of arguments, given no more than its trace asked for.

JAX charges a call for each array that is passed, also when it is not used. So a :class:`Plan` traces the function once
on all leaves, sees which of them were read (``core/inputs.py``), and compiles a function of these alone: the price of a
call follows what the function touches, not how large the model is.

Calls with other shapes are traced with the same inputs. A trace that asks for a further one is given up
(:class:`~nnxlib.core.inputs.AbsentInput`), and the function is compiled anew with more inputs; there can be only a few
of these, for inputs are only ever added. Traces below another trace, where passing an array costs nothing, and stages
(``lower``) take all leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from ..core.captures import lending
from ..core.errors import ArgumentError, describe, format_path, listed
from ..core.graph import Layout, Packed
from ..core.inputs import AbsentInput
from ..core.tracing import at_top_level, jaxpr_as_fun
from .lift import Crossing, Outcome
from .prefixes import split_lanes

Groups = Sequence[Sequence[Any]]


class Compiled:
    """A jitted function of some of the leaves, in as many groups as there are lanes."""

    __slots__ = ("__weakref__", "count", "inputs", "jitted", "lane_of")

    def __init__(self, jitted: Any, inputs: Sequence[int], lane_of: Sequence[int], count: int):
        self.jitted, self.inputs = jitted, inputs
        self.lane_of = [lane_of[k] for k in inputs] if lane_of else ()
        self.count = count

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], ...]:
        """The groups of leaves that it takes, of all leaves."""
        return split_lanes([leaves[k] for k in self.inputs], self.lane_of, self.count)


class Plan:
    """A function, compiled for one layout and its lanes.

    ``everything`` takes all leaves; ``compiled`` those that were ever read, once that is known.
    """

    def __init__(self, crossing: Crossing, function: Callable, options: dict[str, Any]):
        self.crossing, self._function, self._options = crossing, function, options
        self.everything = self._compiled(range(len(crossing.layout.leaf_paths)))
        self.compiled: Compiled | None = None

    def _compiled(self, inputs: Sequence[int], traced: Callable[..., Any] | None = None) -> Compiled:
        jitted = jax.jit(self.crossing.pure(self._function, inputs, traced), **self._options)
        return Compiled(jitted, inputs, self.crossing.lane_of, len(self.crossing.lanes))

    def call_lending(self, packed: Packed) -> tuple[Groups, Outcome]:
        """:meth:`call` on what was packed; a trace may borrow the objects that the function captures.

        Raises:
          ArgumentError: for a leaf that JAX cannot trace.
        """
        with lending(self.crossing.lender, lambda: packed.objects):
            try:
                return self.call(packed.leaves)
            except TypeError as error:
                check_traceable(packed.layout, packed.leaves)
                _note_abstract(error, packed.layout, packed.leaves)
                raise

    def call(self, leaves: Sequence[Any]) -> tuple[Groups, Outcome]:
        """Call the compiled function on all leaves; returns those that changed, by lane, and how."""
        if not at_top_level() or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.everything.jitted(*self.everything.split(leaves))
        compiled = self.compiled
        while True:
            if compiled is None:
                compiled = self.compiled = self._compile(leaves)
            try:
                return compiled.jitted(*compiled.split(leaves))
            except AbsentInput:
                compiled = None

    def _compile(self, leaves: Sequence[Any]) -> Compiled:
        """A function of what a trace on these leaves reads, and of what others have read before."""
        everything = self.everything
        groups = everything.split(leaves)
        traced = everything.jitted.trace(*groups)
        outcome = traced.out_info[1]
        read = set(outcome.read)
        if self.compiled is not None:
            read.update(self.compiled.inputs)
        if len(read) == len(leaves):
            return everything
        inputs = sorted(read)
        compiled = self._compiled(inputs, _again(traced, everything, groups, inputs))
        compiled.jitted.trace(*compiled.split(leaves))  # before another thread can see it: uses up what was traced
        return compiled


def _again(traced: Any, everything: Compiled, groups: Groups, inputs: Sequence[int]) -> Callable[..., Any]:
    """What was traced on all leaves, as a function of the groups of some of them: user code is not run again."""
    flat, k = [None] * len(jtu.tree_leaves(groups)), 0
    lane_of = everything.lane_of or [0] * len(everything.inputs)
    places: list[tuple[int, int]] = [(0, 0)] * len(everything.inputs)  # of each leaf in ``flat``: start and end
    for lane in range(everything.count):
        for position, leaf in zip([p for p, n in enumerate(lane_of) if n == lane], groups[lane], strict=True):
            end = k + len(jtu.tree_leaves(leaf))
            places[position], k = (k, end), end
    evaluate, structure = jaxpr_as_fun(traced.jaxpr), jtu.tree_structure(traced.out_info)
    by_lane = [[p for p in inputs if lane_of[p] == lane] for lane in range(everything.count)]

    def again(*groups: Sequence[Any]) -> Any:
        values = list(flat)
        for positions, group in zip(by_lane, groups, strict=True):
            for position, leaf in zip(positions, group, strict=True):
                values[slice(*places[position])] = jtu.tree_leaves(leaf)
        return structure.unflatten(evaluate(*values))

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
