"""The one way in which a stateful function crosses a JAX transformation.

Every transform of nnxlib is::

    packed = pack(Arguments(args, kwargs))                           # live objects -> a table and its leaves
    groups, outcome = jax_transform(pure)(*groups)                   # ``pure`` is made by ``purify``
    return commit(packed.layout, outcome.delta, leaves, packed.objects)   # the only write to live objects

``pure`` takes and returns lists of leaves, one list for each lane. It builds fresh objects from the table, calls the
user's function on them, and packs them again: what has changed comes back as leaves, and *how* it has changed as a
static :class:`Outcome` in the output pytree, so that JAX itself hands out the right one for each trace and each cache
hit. User code only ever sees the fresh objects, so whatever happens in it, live objects are as they were until
``commit``, and no tracer can reach them.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax

from ..core.calls import inside, listening, recorded_types, repeated
from ..core.closures import all_borrowed, borrowable, borrowed, watching
from ..core.errors import ArgumentError, OutputError, format_path
from ..core.escapes import check_contained
from ..core.graph import (
    After,
    Delta,
    Layout,
    NodeRow,
    Packed,
    Ref,
    StaticArgument,
    Tree,
    build,
    commit,
    diff,
    has_refs,
)
from ..core.inputs import AbsentInput, Input, is_read
from ..core.objects import Node, is_data
from ..core.recordings import recorded_anew
from ..core.records import pack_call
from ..core.tracing import boundary
from ..core.traversals import path_key
from ..core.variables import MISSING, Cell, new_cell
from .axes import stack_axes, stack_recorded, strip_axes
from .prefixes import (
    Labels,
    broadcast_prefix,
    join_lanes,
    label_arguments,
    labels_after,
    labels_in,
    lane_numbers,
    split_lanes,
)


class Arguments(NamedTuple):
    """The pytree that is packed for a call; so a path in a message reads ``args[0].layers[1].kernel``."""

    args: tuple
    kwargs: dict[str, Any]
    captured: tuple = ()  # objects that the function refers to, see core/closures.py


@jax.tree_util.register_static
class Outcome:
    """What one trace of a function did: its Delta, and the lane of each leaf that it returns. Static."""

    __slots__ = ("_hash", "delta", "lane_of", "paths", "read", "returns_objects")

    def __init__(self, delta: Delta, lane_of: tuple[int, ...], paths: tuple[tuple, ...] = (), read: Sequence[int] = ()):
        self.delta, self.lane_of = delta, lane_of
        self.paths = paths  # of the leaves, for messages
        self.read = read  # the leaves it was given and asked for, if that was looked at
        self.returns_objects = has_refs(delta.root)
        self._hash: int | None = None

    def names(self, lane: int) -> list[str]:
        """The paths of the leaves of one lane, in order."""
        return [place_of(path) for path, found in zip(self.paths, self.lane_of, strict=True) if found == lane]

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


def cross(
    f: Callable,
    layout: Layout,
    leaves: Sequence[Any],
    forced: Collection[int] = (),
    take: Callable | None = None,
    loan: Mapping[int, Any] = MappingProxyType({}),
    cell: Callable[[Any], Cell] = new_cell,
) -> tuple[Any, After]:
    """Call ``f`` on fresh objects made from a table, and compare them afterwards.

    ``take(out) -> (direct, rest)`` splits what ``f`` returns: ``direct`` is returned as it is, ``rest`` packed. Objects
    in ``loan``, by row, are live ones that ``f`` refers to: they are used in place of fresh ones. ``cell`` makes the
    cells of the Variables.
    """
    leaves = jax.tree.map(lambda x: x, list(leaves))  # f may edit the dicts in Variables, but not the caller's
    pytrees = {i: jax.tree.flatten(x) for i, x in enumerate(leaves) if not jax.tree_util.all_leaves([x])}
    with borrowed(list(loan.values())):
        for i, leaf in zip(layout.variables, leaves, strict=False):
            if i in loan:
                object.__setattr__(loan[i], "_cell", cell(leaf))
        (args, kwargs, _), objects = build(layout, leaves, loan, cell)
        with listening(inside(layout, objects)):
            out = f(*args, **kwargs)
        direct, rest = (None, out) if take is None else take(out)
        edited = [i for i, before in pytrees.items() if not _same_pytree(before, jax.tree.flatten(leaves[i]))]
        after = diff(layout, leaves, objects, rest, {*forced, *edited})
        check_contained(after, all_borrowed())
        return direct, after


def _same_pytree(a: tuple[list[Any], Any], b: tuple[list[Any], Any]) -> bool:
    return a[1] == b[1] and all(map(operator.is_, a[0], b[0]))


class Lender(Protocol):
    """A jitted function, for its traces."""

    def note(self, layout: Layout, leaves: Sequence[Any]) -> None:
        """Take note of a trace that succeeded, and of the leaves that it was given."""
        ...


class Crossing:
    """A layout with its lanes: how leaves go in, and how those of the result come out.

    Args:
      layout: of the packed :class:`Arguments`.
      lanes: every label that there is, inputs and outputs.
      lane_of: the lane of each leaf of the layout; unused with a single lane.
      labels: those of the arguments, from which objects attached inside inherit; None with a single lane.
      out_prefix: the prefix of the output.
      lender: who lends it the objects that the function captures (a jitted function, see core/closures.py). Then it
        looks out for those, and for the leaves that the function reads.
      axis_name: where labels are axes: the name of the axis in the metadata of Variables, see axes.py.
      stacks: whether each slice leaves a value, to be stacked.
    """

    def __init__(
        self,
        layout: Layout,
        lanes: tuple = (None,),
        lane_of: tuple[int, ...] = (),
        labels: Labels | None = None,
        out_prefix: Any = None,
        lender: Lender | None = None,
        axis_name: Any = MISSING,
        stacks: bool = False,
    ):
        self.lender, self.axis_name, self.stacks = lender, axis_name, stacks
        self.watch = lender is not None
        self.lent = rows_below(layout, "captured") if self.watch else []
        self.layout, self.lanes, self.lane_of = layout, lanes, lane_of
        self.labels, self.out_prefix = labels, out_prefix

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], ...]:
        return split_lanes(leaves, self.lane_of, len(self.lanes))

    def pure(self, f: Callable) -> Callable:
        """``f`` as a pure function from groups of leaves to (groups of leaves, Outcome)."""

        def pure(*groups: Sequence[Any]) -> tuple[tuple[list[Any], ...], Outcome]:
            return self.run(f, join_lanes(groups, self.lane_of))

        # Not functools.wraps: JAX would report our groups under the names of the user's arguments.
        pure.__name__ = name_of(f)
        return pure

    def run(
        self, f: Callable, leaves: Sequence[Any], forced: Collection[int] = ()
    ) -> tuple[tuple[list[Any], ...], Outcome]:
        """Call ``f`` on fresh objects made of the leaves; returns the leaves that come back, by lane, and how.

        Those of Variables at the positions ``forced`` also come back when they were read and have not changed.
        """
        layout = self.layout
        if self.axis_name is not MISSING and self.labels is not None:
            layout = strip_axes(layout, leaves, self.labels.of_variables(layout), self.axis_name)
        cell = Input if self.watch else new_cell
        with watching() if self.watch else nullcontext():
            out, after = cross(f, layout, leaves, forced, lambda out: (out, out), self._loan(), cell)
        check_returned(after, out)
        if self.lender is not None:
            self.lender.note(self.layout, leaves)
        if self.labels is None:
            return (list(after.leaves),), Outcome(after.delta, (), after.paths, self._read(after))
        labels = labels_after(self.labels, layout, after, broadcast_prefix(self.out_prefix, out, "out prefix"))
        if self.stacks:
            labels = stack_recorded(labels, layout, after)
        delta = after.delta if self.axis_name is MISSING else stack_axes(after, labels, self.axis_name)
        lanes_after = lane_numbers(labels, self.lanes)
        outcome = Outcome(delta, lanes_after, after.paths, self._read(after))
        return split_lanes(after.leaves, lanes_after, len(self.lanes)), outcome

    def _loan(self) -> dict[int, Any]:
        """The objects, by row, that a trace may borrow.

        Raises:
          AbsentInput: if nobody lends them now: a call that did not expect to be traced.
        """
        objects = borrowable(self.lender) if self.lent else ()
        if self.lent and not objects:
            raise AbsentInput
        return {i: objects[i] for i in self.lent}

    def _read(self, after: After) -> list[int]:
        """The positions of the leaves that were read, if that is watched; those in no Variable always are."""
        if not self.watch:
            return []
        variables, cells = self.layout.variables, after.walk.cells
        read = [k for k, i in enumerate(variables) if is_read(cells[i])]
        return read + [*range(len(variables), len(self.layout.leaf_paths))]


def name_of(f: Callable) -> str:
    """The name of a function; of a callable object, that of its class."""
    return getattr(f, "__name__", type(f).__name__)


def rows_below(layout: Layout, entry: str) -> list[int]:
    """The rows that can be reached from one entry of the packed :class:`Arguments`."""
    root = layout.root
    assert isinstance(root, Tree)
    stack: list[Any] = [child for path, child in zip(root.paths, root.children, strict=True) if path[0] == entry]
    found: dict[int, None] = {}
    while stack:
        spec = stack.pop()
        if isinstance(spec, Tree):
            stack.extend(spec.children)
        elif isinstance(spec, Ref) and spec.index not in found:
            found[spec.index] = None
            row = layout.rows[spec.index]
            if isinstance(row, NodeRow):
                stack.extend(child for _, child in row.fields)
    return sorted(found)


def place_of(path: tuple) -> str:
    """Write the path of a leaf that comes back: in the arguments, or in ``<output>``."""
    return format_path(path[1:], "<output>") if path[:1] == ("<output>",) else format_path(path)


def check_returned(after: After, out: Any) -> None:
    """Check that each leaf that is to come back from a trace is something JAX can return.

    Raises:
      OutputError: naming the path, in the arguments or in the output.
    """
    for (row, _), path, leaf in zip(after.owners, after.paths, after.leaves, strict=True):
        try:
            jax.tree.map(jax.typeof, leaf)
        except TypeError:
            if row < 0:
                keyed = jax.tree_util.tree_leaves_with_path(out)
                path = next((("<output>", *map(path_key, keys)) for keys, x in keyed if x is leaf), path)
            raise OutputError(
                f"{place_of(path)} is set to a {type(leaf).__name__} ({leaf!r:.80}), which cannot come out of a "
                "compiled function. Return arrays, and keep other values in static attributes or outside."
            ) from None


def _call_method(node: Node) -> Callable:
    if not callable(node):
        raise ArgumentError(f"A {type(node).__name__} cannot be called; give its class a method __call__.")
    return type(node).__call__


def resolve(f: Any) -> tuple[Callable, tuple, dict[str, Any]]:
    """Unwrap partials, bound methods of Modules and callable Modules: ``(function, arguments, keyword arguments)``.

    What was bound is passed like any argument, so Modules in it are seen and written; other values are static.
    """
    args: tuple = ()
    kwargs: dict[str, Any] = {}
    while True:
        if isinstance(f, functools.partial):
            args, kwargs, f = (*f.args, *args), {**f.keywords, **kwargs}, f.func
        elif isinstance(f, types.MethodType) and isinstance(f.__self__, Node):
            args, f = (f.__self__, *args), f.__func__
        elif isinstance(f, Node):
            args, f = (f, *args), _call_method(f)
        else:
            break
    bound = tuple([x if is_data(x) else StaticArgument(x) for x in args])
    return f, bound, {name: x if is_data(x) else StaticArgument(x) for name, x in kwargs.items()}


def by_position(f: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Put the keyword arguments of a call of ``f`` that have a position there; the others stay.

    For options that are said by position, such as ``argnums``. A callable without a signature, as some built-in ones
    are, has no names for its positions, so there all stay.
    """
    if not kwargs:
        return args, kwargs
    try:
        signature = inspect.signature(f)
    except ValueError:
        return args, kwargs
    bound = signature.bind(*args, **kwargs)
    parameters = signature.parameters
    if any(n in parameters and parameters[n].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for n in bound.kwargs):
        bound.apply_defaults()  # an argument before a named one was left out
    return bound.args, {name: value for name, value in bound.kwargs.items() if name in kwargs}


class Observed:
    """A pure function that remembers what it raised itself, to tell it from what JAX says about it."""

    def __init__(self, pure: Callable):
        self.pure, self.raised = pure, []
        self.__name__ = getattr(pure, "__name__", "pure")

    def __call__(self, *args: Any) -> Any:
        try:
            return self.pure(*args)
        except BaseException as error:
            self.raised.append(error)
            raise

    def has_raised(self, error: BaseException) -> bool:
        return any(error is x for x in self.raised)


def static_arguments(call: Callable, argnums: int | Sequence[int]) -> Callable:
    """``call`` with the arguments of these numbers as part of the program, also where they are given by name.

    Raises:
      ArgumentError: when called with fewer arguments.
    """
    static = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_position(call, args, kwargs)
        if any(not -len(args) <= n < len(args) for n in static):
            raise ArgumentError(f"static_argnums={static} does not fit a call with {len(args)} positional arguments.")
        chosen = {n % len(args) for n in static}
        return call(*(StaticArgument(x, (n,)) if n in chosen else x for n, x in enumerate(args)), **kwargs)

    return wrapped if static else call


def lift(jax_transform: Callable, *, result: Callable = lambda raw, finish: finish(raw)) -> Callable:
    """Make any transformation of functions of arrays take functions of Modules.

    Args:
      jax_transform: takes a function of a pytree of arrays, returns one with the same arguments.
      result: ``result(raw, finish)`` makes the value to be returned from what the transformed function returned, in
        case that is more than the output of the function; ``finish(output)`` writes the changes to the Modules and
        returns the user's output.

    Returns:
      A transform: it takes a function (method, callable Module, partial), and returns one whose changes to its
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
            packed = pack_call(Arguments((*bound, *args), {**bound_kwargs, **kwargs}))
            raw = jax_transform(Crossing(packed.layout).pure(function))(packed.leaves)
            return result(raw, functools.partial(finish, packed))

        return wrapped

    return transform


def finish(packed: Packed, output: tuple[Sequence[Sequence[Any]], Outcome]) -> Any:
    """Commit what a pure function returned to the objects that were packed for it; returns the user's output."""
    groups, outcome = output
    return commit(packed.layout, outcome.delta, join_lanes(groups, outcome.lane_of), packed.objects)


def lift_lanes(
    over: Callable,
    function: Callable,
    arguments: Arguments,
    contexts: Sequence[Any],
    out: Any,
    check: Callable[[Packed, Sequence[Any]], int | None] = lambda packed, labels: None,
    axis_name: Any = MISSING,
) -> Any:
    """Cross with a lane for each label: ``over(pure, lanes)`` is the function of one list of leaves per lane.

    ``contexts`` are the labels, or mappings to labels, of each node and leaf of the arguments; ``out`` is the prefix of
    the output. ``check(packed, labels)`` may raise if the leaves do not fit their labels, and says for how many runs
    one trace stands, if that is known.
    """
    with recorded_anew(arguments):
        packed = pack_call(arguments)
        labels, in_order = label_arguments(packed.layout, packed.leaves, packed.objects, contexts)
        function = repeated(function, check(packed, in_order))
        stacks = axis_name is not MISSING
        recorded = [0] if stacks and recorded_types() else []
        lanes = tuple(dict.fromkeys([*in_order, *labels_in(list(contexts)), *labels_in(out), *recorded]))
        crossing = Crossing(
            packed.layout, lanes, lane_numbers(in_order, lanes), labels, out, axis_name=axis_name, stacks=stacks
        )
        return finish(packed, over(crossing.pure(function), lanes)(*crossing.split(packed.leaves)))
