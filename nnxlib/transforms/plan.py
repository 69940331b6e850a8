"""Plans: the compiled function for one structure of arguments, which takes only the leaves that its trace has read.

Each array that is passed to a compiled function costs time, even if it is not used. So a :class:`Plan` traces the
function once on all leaves, finds out which of them were read (``core/inputs.py``), and compiles a function of these
alone. The cost of a call follows what the function touches, not the size of the model.

Calls with other shapes are traced with the same inputs. If such a trace reads another leaf, it is abandoned
(:class:`~nnxlib.core.closures.AbsentInput`), and the function is compiled again with more inputs. Inputs are only ever
added, so this happens a few times at most. Traces inside another trace, where passing an array costs nothing, and
stages (``lower``) take all leaves.

Of donated arguments, the Variables that change and the plain arrays are donated. A Variable that is only read keeps its
buffer, since a donated one would have to come back as an output. (If a later trace only reads it, it does.)

A compiled function takes each leaf as a separate argument, and returns the leaves that come back in one tuple. JAX is
fastest with such flat sequences, and each argument can be donated, and have a sharding, by itself. The
:class:`~nnxlib.transforms.lift.Outcome` is left out if it equals that of the first trace, which it nearly always does.
If not, or with shardings, which belong to lanes, the function returns a :class:`WithOutcome` instead of a plain tuple.

The trace itself is a :class:`JitCrossing`. It *borrows* the objects that the function captures (core/closures.py), and
is abandoned if it turns out to capture others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, starmap
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..core.annotations import NamedTuple
from ..core.cells import Cell
from ..core.closures import AbsentInput, borrowable, call_lending, call_watched
from ..core.errors import PlacementError, describe, listed
from ..core.graph import After, Packed
from ..core.inputs import ABSENT, Input, is_read
from ..core.layout import Layout
from ..core.placement import settle
from ..core.rows import count_leaves
from ..core.static import Const
from ..core.tracing import at_top_level, current_mesh, jaxpr_as_fun
from .closure_inputs import captured_rows
from .leaf_checks import explain_untraced
from .lift import Crossing, Outcome, Returned, cross, finish
from .naming import named
from .retraces import Traces

R = TypeVar("R")


# --- one trace ------------------------------------------------------------------------------------------------------


class JitCrossing(Crossing):
    """A :class:`Crossing` whose traces are watched, and noted in ``traces``; it takes ``lanes`` as any other does.

    The ``literals`` (literals.py), given by position, stand for leaves that are not passed to :meth:`run`.
    """

    def __init__(self, layout: Layout, traces: Traces, literals: Mapping[int, Any], *lanes: Any):
        super().__init__(layout, *lanes)
        self.traces, self.literals, self._captured = traces, literals, captured_rows(layout)

    def run(self, f: Callable, leaves: Sequence[Any], forced: Collection[int] = ()) -> Returned:
        """As in any :class:`Crossing`.

        Raises:
          CapturedObjects: if the function captures objects that it is not lent.
          AbsentInput: if it reads a leaf that it was not given; or if nothing is lent, because no trace was expected.
          PlacementError: if a sharding does not fit what comes back.
        """
        leaves = [self.literals.get(k, leaf) for k, leaf in enumerate(leaves)] if self.literals else leaves
        found = super().run(f, leaves, forced)
        self.traces.note(self.layout, leaves, self.literals)
        if self.labels is not None:
            _check_shardings([label.sharding for label in self.lanes], *found)
        return found

    def _cross(self, f: Callable, leaves: Sequence[Any], forced: Collection[int]) -> tuple[Any, After]:
        return call_watched(lambda: cross(f, self.layout, leaves, forced, loan=self._loan(), cell=Input))

    def _loan(self) -> dict[int, Any]:
        """The captured objects, by row, for a trace to borrow."""
        objects = borrowable(self.traces) if self._captured else ()
        if self._captured and not objects:
            raise AbsentInput
        return {i: objects[i] for i in self._captured}

    def _read(self, after: After) -> list[int]:
        """The positions of the leaves that were read; leaves outside of Variables always count."""
        variables, cells = self.layout.variables, after.walk.cells
        read = [k for k, i in enumerate(variables) if k not in self.literals and is_read(cells[i])]
        return read + [*range(len(variables), len(self.layout.leaf_paths))]


def _check_shardings(shardings: Sequence[Any], groups: Sequence[Sequence[Any]], outcome: Outcome) -> None:
    """Refuse shardings that do not fit the leaves of their lanes; JAX would only say where in a list these are."""
    mesh, unfit = current_mesh(), []
    for lane, (given, leaves) in enumerate(zip(shardings, groups, strict=True)):
        sharding = jax.NamedSharding(mesh, given) if mesh and isinstance(given, jax.P) else given
        if not isinstance(sharding, jax.sharding.Sharding):
            continue
        for name, leaf in zip(outcome.names(lane), leaves, strict=True):
            try:
                for x in jax.tree.leaves(leaf):
                    sharding.shard_shape(jnp.shape(x))
            except (ValueError, IndexError):  # the latter if it has too few axes
                unfit.append(f"{name}: {describe(leaf)}, but the sharding is {sharding}")
    if unfit:
        raise PlacementError(listed(_UNFIT, unfit, _SHARD))


_UNFIT = "These cannot come out of the jitted function with the sharding that in_shardings or out_shardings gives them:"

_SHARD = """\
The size of an axis has to be a multiple of the number of its shards. Give them a sharding of their own; in a Module, \
by nnx.StateSharding, such as {filter: sharding, ...: None}."""


# --- what is compiled -------------------------------------------------------------------------------------------------


class WithOutcome(NamedTuple):
    """The result of a compiled function if the leaves alone do not say what has changed."""

    groups: tuple[Sequence[Any], ...]  # of leaves, one for each lane
    outcome: Outcome


class Stopped(Exception):
    """Stands for a StopIteration of the user's function, which ``starmap`` would take for its own end."""

    def __init__(self, error: StopIteration):
        self.error = error


class Compiled:
    """A jitted function of some of the leaves: those at the positions ``inputs``, of which some are ``donated``.

    A trace that reads other leaves is abandoned. If the user's function has been traced already, ``replay`` stands for
    it in the first trace.
    """

    __slots__ = ("__weakref__", "_outcomes", "donates", "inputs", "jitted")

    def __init__(
        self,
        crossing: JitCrossing,
        function: Callable,
        inputs: Sequence[int],
        donated: frozenset[int],
        options: dict[str, Any],
        replay: Callable[..., Returned] | None,
    ):
        paths = crossing.layout.leaf_paths
        outcomes: list[Outcome] = []
        donates = not donated.isdisjoint(inputs)

        def trace(*values: Any) -> Returned:
            leaves = [ABSENT] * len(paths)
            for position, value in zip(inputs, values, strict=True):
                leaves[position] = value
            return crossing.run(function, leaves, donated)

        def step(*values: Any) -> tuple[Any, ...]:
            nonlocal replay
            run, replay = replay or trace, None
            try:
                groups, outcome = run(*values)
            except StopIteration as error:
                if donates:
                    raise Stopped(error) from None
                raise
            if not outcomes:
                outcomes.append(outcome)
            usual = outcomes[0]  # perhaps of another thread that traced at the same time
            if crossing.labels is None and outcome == usual and outcome.read == usual.read:
                return tuple(groups[0])
            return WithOutcome(groups, outcome)

        self._outcomes, self.inputs, self.donates = outcomes, inputs, donates
        self.jitted = jax.jit(named(step, function, [paths[k] for k in inputs]), **options)

    def inputs_of(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs, out of all leaves."""
        return [leaves[k] for k in self.inputs]

    def call(self, inputs: Sequence[Any], finish: Callable[[Any], R]) -> R:
        """``finish(jitted(*inputs))``, where ``finish`` writes what was returned to the objects.

        If inputs are donated, ``finish`` is also called, perhaps for a second time, when an interrupt such as Ctrl-C
        arrives just after the function has returned, or when the class of an output refuses it. The arrays that went in
        are gone, so without those that came out the objects would have none.
        """
        if not self.donates:
            return finish(self.jitted(*inputs))
        returned = None
        try:
            (returned,) = starmap(self.jitted, (inputs,))  # Python handles no interrupt between a step and `=`
            return finish(returned)
        except Stopped as stopped:
            raise stopped.error from None
        except BaseException:
            if returned is not None:
                with contextlib.suppress(Exception):  # it may be the one that is raised
                    finish(self.without_output(returned))
            raise

    def without_output(self, returned: tuple[Any, ...]) -> WithOutcome:
        """The result of the jitted function, without the user's output."""
        groups, outcome = self.unpacked(returned)
        return WithOutcome(groups, Outcome(outcome.delta._replace(root=Const.of(None)), outcome.lane_of))

    def unpacked(self, returned: tuple[Any, ...]) -> Returned:
        """The result of the jitted function: leaves by lane, and the Outcome, always the same object for one trace."""
        return returned if type(returned) is WithOutcome else ((returned,), self._outcomes[0])


class Plan:
    """A function that is compiled for one layout and its lanes, with these ``options`` of ``jax.jit``.

    ``whole`` takes all leaves and donates none. ``compiled`` takes only those ever read, and donates what it can of
    those at the positions ``donated``; None until it is known. ``_staged``, for ``lower`` and ``trace``, takes all
    leaves and donates likewise. ``in_shardings`` has one for each leaf.
    """

    def __init__(
        self,
        crossing: JitCrossing,
        function: Callable,
        options: dict[str, Any],
        donated: frozenset[int],
        in_shardings: Sequence[Any] | None = None,
    ):
        self.crossing, self._function, self._options = crossing, function, options
        self._donated, self._in_shardings = donated, in_shardings
        self._all = [k for k in range(len(crossing.layout.leaf_paths)) if k not in crossing.literals]
        self.whole = self._jitted(self._all)
        self.compiled: Compiled | None = None
        self._staged: Compiled | None = None

    def _jitted(
        self,
        inputs: Sequence[int],
        donated: frozenset[int] = frozenset(),
        replay: Callable[..., Returned] | None = None,
    ) -> Compiled:
        options = dict(self._options)
        if self._in_shardings is not None:
            options["in_shardings"] = tuple([self._in_shardings[k] for k in inputs])
        options["donate_argnums"] = tuple([i for i, k in enumerate(inputs) if k in donated])
        return Compiled(self.crossing, self._function, inputs, donated, options, replay)

    def _specialised(self, leaves: Sequence[Any], inputs: Sequence[int] | None = None) -> tuple[Compiled, Any]:
        """Trace on all leaves, and compile for these inputs; by default, for those that any trace has read so far.

        Returns what was compiled, and JAX's stage of its trace.
        """
        all_leaves = self.whole.inputs_of(leaves)
        traced = self.whole.jitted.trace(*all_leaves)
        if len(traced.jaxpr.in_avals) > len(jtu.tree_leaves(all_leaves)):
            return self.whole, traced  # it uses a tracer of an earlier trace: JAX raises an error in the call
        _, outcome = self.whole.unpacked(traced.out_info)
        donated = self._donated.intersection(self._donatable(outcome))
        if inputs is None:
            inputs = sorted({*outcome.read, *(self.compiled.inputs if self.compiled else ())})
        if len(inputs) == len(all_leaves) and not donated:
            return self.whole, traced
        compiled = self._jitted(inputs, donated, self._replay(traced, leaves, inputs, outcome))
        # This trace uses up `replay`, before another thread can see `compiled`.
        return compiled, compiled.jitted.trace(*compiled.inputs_of(leaves))

    def _replay(
        self, traced: Any, leaves: Sequence[Any], inputs: Sequence[int], outcome: Outcome
    ) -> Callable[..., Returned]:
        """The trace on all leaves as a function of some of them, so that user code does not run a second time."""
        whole = self.whole
        if len(inputs) == len(self._all) and not self._options:
            # A jitted call within another: JAX has its trace, and does not go through its equations again, so donation
            # takes no longer to trace. (Options would be refused, or apply twice.)
            return lambda *values: (whole.unpacked(whole.jitted(*values))[0], outcome)
        sizes = [0 if k in self.crossing.literals else len(jtu.tree_leaves(leaf)) for k, leaf in enumerate(leaves)]
        starts = [0, *accumulate(sizes)]  # a leaf may be a pytree
        evaluate, structure = jaxpr_as_fun(traced.jaxpr), jtu.tree_structure(whole.unpacked(traced.out_info)[0])
        unread = jtu.tree_leaves(whole.inputs_of(leaves))  # no equation uses these, but jax_enable_checks does

        def evaluated(*values: Any) -> Returned:
            flat = list(unread)
            for position, value in zip(inputs, values, strict=True):
                flat[starts[position] : starts[position + 1]] = jtu.tree_leaves(value)
            return structure.unflatten(evaluate(*flat)), outcome

        return evaluated

    def _donatable(self, outcome: Outcome) -> list[int]:
        """The leaves that are not needed after the call: values of Variables that change, and plain leaves.

        With ``keep_unused`` no Variables: a trace for other shapes that does not read them would free their values and
        return nothing in their place.
        """
        layout, delta = self.crossing.layout, outcome.delta
        count = len(layout.leaf_paths)
        changed = set() if self._options.get("keep_unused") else {*delta.values, *[i for i, _ in delta.rows]}
        return [k for k, i in enumerate(layout.variables) if i in changed] + [
            *range(count - count_leaves(layout.root), count)
        ]

    def staged(self, leaves: Sequence[Any]) -> tuple[Compiled, Any]:
        """The function of all leaves, and JAX's stage of its trace, for ``lower`` and ``trace``."""
        if self._staged is None:
            self._staged, traced = self._specialised(leaves, self._all)
            return self._staged, traced
        compiled = self._staged
        return compiled, compiled.jitted.trace(*compiled.inputs_of(leaves))

    def finish(self, packed: Packed, compiled: Compiled, returned: tuple[Any, ...]) -> Any:
        """Commit what a compiled function returned to the packed objects; returns the user's output."""
        out = finish(packed, compiled.unpacked(returned))
        if self.has_shardings and at_top_level():
            self.settle([packed.objects[i]._cell for i in packed.layout.variables])
        return out

    @property
    def has_shardings(self) -> bool:
        """Whether the arguments have shardings, to which their Variables are to be moved."""
        return self._in_shardings is not None

    def settle(self, cells: Sequence[Cell]) -> None:
        """Move the Variables to where the function takes them, so that the next call need not."""
        assert self._in_shardings is not None
        settle(cells, self._in_shardings[: len(cells)])

    def call(self, packed: Packed) -> Any:
        """Call the function on packed arguments; a trace may borrow the captured objects among them.

        Raises:
          ArgumentError: for a leaf that JAX cannot trace.
        """
        try:
            return call_lending(self.crossing.traces, packed.objects, self._call, packed)
        except (TypeError, OverflowError) as error:
            explain_untraced(error, packed.layout, packed.leaves)
            raise

    def _call(self, packed: Packed) -> Any:
        as_one_trace = not at_top_level() or jax.config.jax_disable_jit  # type: ignore[attr-defined]
        compiled = self.whole if as_one_trace else self.compiled
        while True:
            if compiled is None:
                compiled, _ = self._specialised(packed.leaves)
                self.compiled = compiled
            try:
                return compiled.call(
                    compiled.inputs_of(packed.leaves), functools.partial(self.finish, packed, compiled)
                )
            except AbsentInput:
                if as_one_trace:
                    raise
                compiled = None
            except jax.errors.UnexpectedTracerError as error:
                if captured_rows(self.crossing.layout):
                    error.add_note(_KEPT_TRACE)
                raise


_KEPT_TRACE = """\
The function refers to a Module or Variable that it was not passed. JAX keeps the traces of a function that is given \
to jax.checkpoint, jax.lax.cond, jax.lax.switch or jax.jit, with the values that this had then. So do not give them a \
Module, or a function that lives longer than the call: use nnx.remat, nnx.cond, nnx.switch or nnx.jit, or wrap it in \
a new function, lambda x: module(x)."""
