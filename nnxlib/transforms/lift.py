"""Lifting: how a function of objects goes through a JAX transformation, whichever that is. This is its *crossing*.

Every transform of nnxlib has three steps::

    packed = pack(Arguments(args, kwargs))                                # live objects -> a table and its leaves
    leaves, outcome = jax_transform(purify(f))(packed.leaves)             # a pure function of leaves
    return commit(packed.layout, outcome.delta, leaves, packed.objects)   # the only write to live objects

The pure function (:meth:`Crossing.purify`) builds fresh objects from the table, calls the user's function on them, and
packs them again. The new values come back as leaves. *What* has changed comes back as an :class:`Outcome`, which is
static data in the output pytree, so JAX itself returns the right one for each trace and each cache hit. User code only
ever sees the fresh objects. So whatever it does, live objects stay as they were until ``commit``, and no tracer can
reach them.

(The code calls ``pack_live`` of core/packing.py, which returns the same as ``pack``, from the live tables of the
arguments where these are valid.)

Some transformations do not treat all leaves alike: ``vmap`` maps some of them and not others. Then each leaf has a
*label* (for ``vmap`` its axis), which users give by prefixes (prefixes.py). The leaves with the same label form a
*lane* (labels.py), and the pure function takes and returns one list of leaves per lane.

``jit`` also finds out, while it traces, which leaves the function reads, and which objects it captures
(plan.py).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.tree_util import all_leaves, register_static, tree_structure

from ..core.annotations import NamedTuple
from ..core.calls import call_listening, listener_for
from ..core.cells import Cell, new_cell
from ..core.closures import all_borrowed, call_borrowing
from ..core.errors import place_of
from ..core.escapes import without_escapes
from ..core.graph import After, Delta, Packed, build, commit, diff
from ..core.inputs import lend
from ..core.layout import Layout
from ..core.packing import pack_live
from ..core.recordings import bring_back, carrier_in, give_on, with_carrier
from ..core.rows import BoundMethod, Spec, Tree
from ..core.tracing import boundary
from .callables import resolve
from .labels import Labels, join_lanes, labels_after, lane_numbers, split_lanes
from .leaf_checks import check_returned, explain_untraced
from .naming import named
from .prefixes import output_entries


class Arguments(NamedTuple):
    """The pytree that is packed for a call. Its fields begin the paths in messages: ``args[0].layers[1].kernel``."""

    args: tuple
    kwargs: dict[str, Any]
    captured: tuple = ()  # objects that the function captures (core/closures.py); last a Carrier (recordings.py)


def part_of(root: Spec, place: tuple[int, ...]) -> Tree:
    """A part of a packed pytree, by the numbers of children: ``(0, i)`` is argument ``i`` of :class:`Arguments`."""
    if not isinstance(root, Tree) or type(root.treedef) is BoundMethod:
        return Tree(tree_structure(0), ((),), (root,))
    treedef, (start, stop) = root.treedef, (0, len(root.paths))
    for k in place:
        below = treedef.children()
        start += sum(x.num_leaves for x in below[:k])
        treedef, stop = below[k], start + below[k].num_leaves
    return Tree(treedef, tuple([path[len(place) :] for path in root.paths[start:stop]]), root.children[start:stop])


@register_static
class Outcome:
    """What a function did in one trace: its Delta, and the lane of each leaf that comes back. Static."""

    __slots__ = ("_hash", "delta", "lane_of", "leaf_paths", "read")

    def __init__(
        self, delta: Delta, lane_of: tuple[int, ...] = (), leaf_paths: tuple[tuple, ...] = (), read: Sequence[int] = ()
    ):
        self.delta = delta
        self.lane_of = lane_of  # of each leaf that comes back; empty if there is only one lane
        self.leaf_paths = leaf_paths  # of the leaves that come back, for messages
        self.read = read  # the positions of the leaves that it read, if that was noted
        self._hash: int | None = None

    def names(self, lane: int) -> list[str]:
        """The paths of the leaves of one lane, in order."""
        return [place_of(path) for path, found in zip(self.leaf_paths, self.lane_of, strict=True) if found == lane]

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.delta, self.lane_of))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Outcome) and self.delta == other.delta and self.lane_of == other.lane_of
        )

    def __repr__(self) -> str:
        return f"Outcome({len(self.delta.values)} values and {len(self.delta.rows)} objects changed)"


Returned = tuple[tuple[Sequence[Any], ...], Outcome]  # by a pure function: one list of leaves per lane, and what it did


def cross(
    f: Callable,
    layout: Layout,
    leaves: Sequence[Any],
    forced: Collection[int] = (),
    part: Callable[[Any], Any] = lambda out: out,
    loan: Mapping[int, Any] = MappingProxyType({}),
    cell: Callable[[Any], Cell] = new_cell,
) -> tuple[Any, After]:
    """Call ``f`` on fresh objects built from a table; returns its output, and the table of the objects afterwards.

    Args:
      f: the user's function.
      layout: of packed :class:`Arguments`.
      leaves: of the same.
      forced: the positions of leaves that count as changed if they are read.
      part: takes the part to be packed out of the output of ``f``; all of it by default.
      loan: by row, the live objects that ``f`` captures, which are used in place of fresh ones (core/closures.py).
      cell: makes the cells of the Variables; those of ``nnx.jit`` note whether they are read (core/inputs.py).

    Raises:
      TraceContextError: if a tracer, or an object of the trace, would leave the trace inside of a static value.
    """
    leaves, edited = own_pytrees(leaves)
    lent = [(loan[i], leaf) for i, leaf in zip(layout.variables, leaves, strict=False) if i in loan]

    def run() -> tuple[Any, After]:
        for variable, leaf in lent:
            lend(variable, leaf)  # the live Variable holds the tracer, in this trace alone
        (args, kwargs, captured), objects = build(layout, leaves, loan, cell)
        listener = listener_for(layout, objects)  # knows the paths of Modules that are called (core/calls.py)
        listener.carrier = carrier_in(captured)
        out = call_listening(listener, f, *args, **kwargs)
        if listener.copies:
            bring_back(listener)
        after = diff(layout, leaves, objects, part(out), {*forced, *edited()})
        return out, without_escapes(after, layout, all_borrowed())

    return call_borrowing(list(loan.values()), run)  # afterwards these objects are as they were


def own_pytrees(leaves: Sequence[Any]) -> tuple[Sequence[Any], Callable[[], list[int]]]:
    """The leaves, with copies of those that a function may edit: pytrees, such as a dict in a Variable.

    Also returns a function, to be called later, that gives the positions of those that were edited.
    """
    if all_leaves(leaves):  # as they nearly always are
        return leaves, list
    own = jax.tree.map(lambda x: x, list(leaves))
    before = {k: jax.tree.flatten(x) for k, x in enumerate(own) if not all_leaves([x])}

    def is_edited(k: int) -> bool:
        (old, structure), (new, structure_now) = before[k], jax.tree.flatten(own[k])
        return structure != structure_now or any(map(operator.is_not, old, new))

    return own, lambda: list(filter(is_edited, before))


class Crossing:
    """A layout with its lanes: how leaves go into a pure function, and how the changed ones come out.

    Args:
      layout: of packed :class:`Arguments`.
      lanes: the label of each lane, of leaves that go in or come out.
      lane_of: the number of the lane of each leaf in the layout; unused if there is only one.
      labels: of the arguments; objects attached to these inherit their labels. None if there is only one lane.
      out_prefix: the prefix of the output.
    """

    out_option = "out_shardings or out_specs"  # what the user calls the prefix of the output

    def __init__(
        self,
        layout: Layout,
        lanes: tuple = (None,),
        lane_of: tuple[int, ...] = (),
        labels: Labels | None = None,
        out_prefix: Any = None,
    ):
        self.layout, self.lanes, self.lane_of = layout, lanes, lane_of
        self.labels, self.out_prefix = labels, out_prefix

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], ...]:
        """One list of leaves per lane."""
        return split_lanes(leaves, self.lane_of, len(self.lanes))

    def purify(self, f: Callable) -> Callable:
        """``f`` as a pure function, which takes one list of leaves per lane, and returns such lists and an Outcome."""

        def pure(*groups: Sequence[Any]) -> Returned:
            return self.run(f, join_lanes(groups, self.lane_of))

        return named(pure, f, self.layout.leaf_paths, self.lane_of)

    def run(self, f: Callable, leaves: Sequence[Any], forced: Collection[int] = ()) -> Returned:
        """Call ``f`` on fresh objects built from all leaves of the layout; returns one list per lane, and the Outcome.

        The values of Variables at the positions ``forced`` come back even if they were only read.

        Raises:
          OutputError: for a value to come back that JAX cannot return; names its path.
        """
        out, after = self._cross(f, leaves, forced)
        check_returned(after)
        lane_of: tuple[int, ...] = ()
        if self.labels is not None:
            after, found = self._labelled(self.labels, after, out)
            lane_of = lane_numbers(found, self.lanes)
        outcome = Outcome(after.delta, lane_of, after.leaf_paths, self._read(after))
        return split_lanes(after.leaves, lane_of, len(self.lanes)), outcome

    # Steps of `run`, of which `nnx.jit` (plan.py) and `nnx.vmap` override some.

    def _cross(self, f: Callable, leaves: Sequence[Any], forced: Collection[int]) -> tuple[Any, After]:
        return cross(f, self.layout, leaves, forced)

    def _labelled(self, labels: Labels, after: After, out: Any) -> tuple[After, Sequence[Any]]:
        """What comes back from the function, and the label of each of its leaves."""
        return after, labels_after(labels, after, output_entries(self.out_prefix, out, self.out_option))

    def _read(self, after: After) -> Sequence[int]:
        """The positions of the leaves that were read, if that is known."""
        return ()


def lift(jax_transform: Callable, *, result: Callable = lambda raw, finish: finish(raw)) -> Callable:
    """Make any transformation of functions of arrays take functions of Modules.

    Args:
      jax_transform: takes a function of a pytree of arrays, and returns one with the same arguments.
      result: for a transformed function that returns more than the output of the original one: ``result(raw, finish)``
        makes the value to be returned from what it returned. ``finish(output)`` writes the changes to the Modules and
        returns the user's output.

    Returns:
      A transform. It takes a function, method, callable Module or partial, and returns a function whose changes to its
      arguments appear on the objects that were passed in.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> checkpointed = nnx.lift(jax.checkpoint)
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> checkpointed(lambda layer, x: layer(x))(layer, jnp.ones((1, 2))).shape
    (1, 3)
    """

    def transform(f: Callable) -> Callable:
        function, bound, bound_kwargs = resolve(f)

        @boundary
        @functools.wraps(f, updated=())
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            arguments = with_carrier(Arguments((*bound, *args), {**bound_kwargs, **kwargs}))
            packed = pack_live(arguments)
            raw = jax_transform(Crossing(packed.layout).purify(function))(packed.leaves)
            out = result(raw, functools.partial(finish, packed))
            give_on(arguments)
            return out

        return wrapped

    return transform


def finish(packed: Packed, output: Returned) -> Any:
    """Commit what a pure function returned to the objects that were packed for it; returns the user's output."""
    groups, outcome = output
    return commit(packed.layout, outcome.delta, join_lanes(groups, outcome.lane_of), packed.objects)


def tracing_all(run: Callable, crossing: Crossing) -> Callable:
    """``run``, with errors that name the path of a leaf that JAX cannot trace."""

    def traced(*groups: Sequence[Any]) -> Any:
        try:
            return run(*groups)
        except (TypeError, OverflowError) as error:
            explain_untraced(error, crossing.layout, join_lanes(groups, crossing.lane_of))
            raise

    return traced
