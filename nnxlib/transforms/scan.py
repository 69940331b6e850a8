"""``scan``: a loop over an axis, with Modules that are stacked, carried, or passed whole.

Each leaf of the arguments has one of three labels:

- An *axis*: iteration ``i`` sees slice ``i``, and the values that it leaves there are stacked again. So the structure
  may change, too: a layer that has its kernel replaced in each iteration comes out with a stack of the new ones.
- ``Carry``: each iteration sees the value that the one before it has left.
- ``None``: every iteration sees the whole value, and may not change it. The exception is a random stream, which gives
  each iteration the same keys, and after the loop gives none of these again.

One argument as a whole may be labelled ``Carry``; the ``Carry`` in ``out_axes`` is its place in the output.

A hook, ``data_transform``, may give the body other values of the Variables that the loop hands to it, such as slices
with a sharding; and nothing else: a Variable that the body leaves alone is not written because the hook has touched it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import export

from ..core.annotations import NamedTuple
from ..core.calls import repeated
from ..core.differences import leaf_differences, refuse
from ..core.errors import BodyError, PlacementError, PrefixError, describe_nested, listed, place_of
from ..core.graph import After, Packed, variable_of
from ..core.layout import Layout
from ..core.missing import MISSING
from ..core.packing import pack_live
from ..core.recordings import give_on, recorded_anew, with_carrier
from ..core.rows import ROOT, Tree, children
from ..core.state import State, from_flat_state, to_flat_state
from ..core.tracing import slice_type
from ..core.variables import RngCount, Variable
from . import body_checks
from .axes import NO_AXIS_NAMES, AxisName, axis_name_in, place_stacks, stack_axes, strip_axes
from .body import Body, as_unroll, own_states, trace_body
from .callables import by_position, resolve
from .classes import lifts_classes
from .labels import Labels, label_arguments, labels_after, mapped_size
from .lift import Arguments, Outcome, part_of
from .naming import named
from .prefixes import call_entries, check_axes, labels_in, output_entries, prefix_key
from .program import Program, as_function, program_of, run_program, settings_of, weakly

DataTransform = Callable[[Any, State], Any]


class _NamedLabel(type):
    def __repr__(cls) -> str:
        return f"nnx.{cls.__name__}"


class Carry(metaclass=_NamedLabel):
    """The label of what one iteration passes to the next: the class itself; :func:`scan` has an example."""


@lifts_classes()
def scan(
    f: Callable = MISSING,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: Any = (Carry, 0),
    out_axes: Any = (Carry, 0),
    transform_metadata: Mapping[str, Any] = NO_AXIS_NAMES,
    data_transform: DataTransform | None = None,
) -> Callable:
    """Loop a function over an axis of its arguments; ``jax.lax.scan`` with state.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      length: the number of iterations, needed if nothing has an axis.
      reverse: whether to go from the last slice to the first.
      unroll: how many iterations to put into one step of the compiled loop.
      _split_transpose: as in ``jax.lax.scan``.
      in_axes: for each positional argument ``nnx.Carry`` (for one at most), an axis, None, or for a Module
        :class:`StateAxes` of these. Keyword arguments that have no position are passed whole.
      out_axes: the same for the output, without None; has ``nnx.Carry`` if ``in_axes`` has.
      transform_metadata: ``{nnx.PARTITION_NAME: name}``: the name of this axis for Variables that have names for their
        axes. A further entry is the name of the axis in that metadata; ``optimizer_sharding`` needs none to follow.
      data_transform: ``data_transform(label, state)`` is called inside the body for each label (an axis, None or
        ``nnx.Carry``) with the State of the Variables that have it, as the body is to see them: slices, for an axis.
        It returns them with other values, say with ``jax.lax.with_sharding_constraint``. Paths begin with the number
        or name of the argument.

    Returns:
      A function of the same arguments. The objects that were passed in are changed. A stacked Module gets the stacked
      values, a carried one those of the last iteration. If the body returns a new object in place of a carried one,
      such as a State of sums, or sets it as an attribute, then a new one comes out, too.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> stack = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    >>> forward = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    >>> forward(jnp.ones((2, 4)), stack).shape
    (2, 4)

    Raises:
      PrefixError: if ``in_axes`` or ``out_axes`` does not fit, or sizes differ, or what is passed whole (None) is
        changed, other than by drawing from a random stream.
      BodyError: if what is carried changes its shape or dtype, or if the structure of anything changes that has no
        axis; names the path.
      PlacementError: if an axis to loop over is sharded along a mesh axis of the type ``Explicit``; names the path.
    """
    unroll = as_unroll(unroll)
    loop = functools.partial(jax.lax.scan, reverse=reverse, unroll=unroll, _split_transpose=_split_transpose)
    return looped(f, loop, length, in_axes, out_axes, transform_metadata, data_transform)


def looped(
    f: Callable,
    loop: functools.partial[tuple[list[Any], list[Any]]],
    length: int | None,
    in_axes: Any,
    out_axes: Any,
    transform_metadata: Mapping[str, Any],
    data_transform: DataTransform | None,
) -> Callable:
    """``f`` as the body of ``loop(step, init, xs, length=...)``: ``jax.lax.scan`` or its like, with options bound."""
    inner, bound, bound_kwargs = resolve(f)
    kept = as_function(inner)  # `wrapped` refers to it, and so keeps it alive; programs refer to it weakly
    function = weakly(kept)
    name = axis_name_in(transform_metadata)
    only_carry = in_axes is Carry
    in_axes = (Carry,) if only_carry else in_axes
    place, out_place = _places_of_carry(in_axes, out_axes)
    carried = None if place is None else len(bound) + place[0]

    def step(*args: Any, **kwargs: Any) -> Any:
        try:
            out = function(*args, **kwargs)
        except TypeError as error:
            if str(error).lower() == "'list' object is not callable":
                error.add_note(_OF_LAYERS)
            raise
        if out_place and type(out) in (tuple, list):
            return type(out)([x if k == out_place[0] else own_states(x) for k, x in enumerate(out)])
        return out if out_place == () else own_states(out)

    of_call = functools.partial(
        _Scan, named(step, function), loop, out_axes, carried, out_place, axis_name=name, data_transform=data_transform
    )

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_position(f, args, kwargs)
        if only_carry and len(args) != 1:
            raise PrefixError(f"When in_axes=Carry, the function must take exactly one argument; it got {len(args)}.")
        arguments = with_carrier(Arguments((*bound, *args), {**bound_kwargs, **kwargs}))
        entries = call_entries(in_axes, arguments, len(bound), "in_axes", None)
        with recorded_anew(arguments):
            packed = pack_live(arguments)
            layout = packed.layout
            labels, leaf_labels = label_arguments(packed, entries)
            size = _length(packed, leaf_labels, length)
            settings = (name, data_transform, *prefix_key(in_axes), *prefix_key(out_axes))
            options = (*loop.keywords.values(), type(loop.keywords["unroll"]))  # unroll=True is not unroll=1
            key = (loop.func, *options, tuple(leaf_labels), size, *settings, settings_of(inner))
            made = of_call(layout=layout, labels=labels, leaf_labels=leaf_labels, size=size)
            out = run_program(program_of((weakly(kept),), layout, key, lambda: Program(made.program)), packed)
        give_on(arguments)
        return out

    return wrapped


_OF_LAYERS = """\
scan goes along an axis of arrays, not along a list: each iteration gets the whole list. Layers of one kind are called \
one after the other by nnx.Stack.from_layers(layers)(x)."""


class _Scan(NamedTuple):
    """A loop over arguments of one layout, with labels; its program takes their leaves."""

    function: Callable  # the body
    loop: Callable
    out_axes: Any
    carried: int | None  # the number of the argument that is carried as a whole
    out_place: tuple[int, ...] | None  # where the carry is in the output
    axis_name: AxisName
    data_transform: DataTransform | None
    layout: Layout
    labels: Labels
    leaf_labels: list[Any]  # of each leaf, in order
    size: int  # how many iterations

    def program(self, leaves: list[Any]) -> Any:
        """Trace the body on slices, check what it does, and loop over it."""
        layout, leaf_labels = self.layout, self.leaf_labels
        _refuse_explicit(layout, leaves, leaf_labels)
        slices = [_slice_type(x, axis) for x, axis in zip(leaves, leaf_labels, strict=True)]
        inner = strip_axes(layout, slices, leaf_labels, self.axis_name)
        enter = None if self.data_transform is None else transformed_data(self.data_transform, inner, leaf_labels)
        body = trace_body(repeated(self.function, self.size), inner, slices, self._stacked, enter)
        replaced = self._replaced(body)
        self._check_changes(body, replaced)
        sources, types = self._recurring(body, replaced)
        strong = body_checks.retyped(leaves, sources, types)
        if strong is not None:  # a weakly typed number that is carried needs another type from the start
            return self.program(strong)
        given, paths = [leaves[k] for k in sources], [layout.leaf_paths[k] for k in sources]
        body_checks.check_types(given, types, paths, "body of scan")
        return self._run(body, leaves, sources)

    def _stacked(self, after: After, out: Any) -> tuple[After, Sequence[Any]]:
        """The result of the body as it is once slices are stacked; and the labels of the leaves that come back."""
        _check_values(out, self.out_axes)
        found = labels_after(self.labels, after, output_entries(self.out_axes, out, "out_axes"))
        return stack_axes(after, found, self.layout, self.axis_name)

    def _replaced(self, body: Body) -> dict[int, int]:
        """The :func:`successors` of the objects that a body was given.

        Raises:
          BodyError: if the carry comes out with another structure.
        """
        layout, given, returned = self.layout, _NO_CARRY, _NO_CARRY
        if self.carried is not None and self.out_place is not None:
            given = part_of(layout.root, (0, self.carried))
            returned = part_of(body.delta.root, self.out_place)
        kept = [spec for path, spec in children(layout.root) if not _is_below(path, ("args", self.carried))]
        pairs = [*zip(kept, kept, strict=True), (given, returned)]
        replaced = body_checks.successors(layout, body, pairs, self._is_stacked)
        if replaced is None:
            first = tuple([path[1:] for path in returned.paths if path[:1] == (0,)])
            if self.out_place == () and given.paths and given != returned and first == given.paths:
                raise BodyError(_CARRY_ALONE)
            body_checks.check_same_output(layout, given, returned, _OTHER_CARRY, body_checks.RETURN_ALIKE, "carry")
        replaced = replaced or {}
        body_checks.refuse_written(layout, body, replaced, "body of scan")
        return replaced

    def _check_changes(self, body: Body, replaced: Mapping[int, int]) -> None:
        """Refuse changes that a loop cannot make in each iteration, and values that have no place to go.

        What has an axis is another object in each iteration, so its structure may change. What is carried or passed
        whole is the same object in all of them, and the body is traced only once, on its structure before the loop.
        """
        layout = self.layout
        changes = body_checks.structural_changes(layout, body, replaced)
        refused = [x for x in changes if not x.added and not self._is_stacked(x.row)]
        body_checks.refuse_structural(refused, "body of scan")
        kept = {*range(ROOT, len(layout.rows)), *replaced}.difference(change.row for change in changes)
        problems, whole = [], []
        for owner, label, path, type_ in zip(body.owners, body.labels, body.leaf_paths, body.types, strict=True):
            what = place_of(path)
            if label is Carry and owner[0] == ROOT and not _is_below(path[1:], self.out_place):
                problems.append(f"{what}: a value of its own in each iteration, but Carry needs one to start from")
            elif label is Carry and owner[0] not in kept:
                problems.append(f"{what}: attached inside, but Carry needs a value to start from")
            elif not (_is_axis(label) or label is Carry or self._is_count(owner[0])):
                is_variable = owner[0] in layout.variables
                whole.append(layout.rows[owner[0]].type.__name__ if is_variable else f"nnx.PathContains({path[-1]!r})")
                problems.append(f"{what}: every iteration would leave a value, and None keeps none of them")
            elif isinstance(label, int):
                axes = 1 + min((x.ndim for x in jtu.tree_leaves(type_)), default=abs(label))
                if not -axes <= label < axes:
                    problems.append(f"{what}: stacked it has {axes} axes, so there is no axis {label}")
        if problems:
            head = "The body of scan changes values in a way that their axes do not allow:"
            carried = ", ".join(f"{which}: nnx.Carry" for which in dict.fromkeys(whole))
            raise PrefixError(listed(head, problems, _PLACES.format(carried=carried) if whole else _ATTACH))

    def _recurring(self, body: Body, replaced: Mapping[int, int]) -> tuple[list[int], list[Any]]:
        """For each leaf that goes to the next iteration, its position among the leaves of the arguments, and its type.

        Of the argument that is carried as a whole, the arrays that are in no object are returned.
        """
        handed_on, positions, paths = _handed_on(body), self.layout.owner_positions, self.layout.leaf_paths
        first_plain = positions.get((ROOT, 0), len(paths))
        plain = iter([k for k in range(first_plain, len(paths)) if _is_below(paths[k], ("args", self.carried))])
        owners = [body.owners[k] for k in handed_on]
        sources = [next(plain) if i == ROOT else positions[replaced.get(i, i), k] for i, k in owners]
        return sources, [body.types[k] for k in handed_on]

    def _is_stacked(self, row: int) -> bool:
        """Whether all that an object holds has an axis, so that each iteration sees another object."""
        return all(map(_is_axis, self.labels.may_have(row)))

    def _is_count(self, row: int) -> bool:
        """Whether a row is the count of a random stream that the body was given."""
        return row in self.layout.variables and issubclass(self.layout.rows[row].type, RngCount)

    def _run(self, body: Body, leaves: list[Any], sources: list[int]) -> tuple[list[Any], Outcome]:
        """The loop; ``sources`` are the positions of the leaves that it carries."""
        handed_on = _handed_on(body)
        stacked = [k for k in range(len(body.owners)) if _is_axis(body.labels[k])]
        sliced = [k for k, axis in enumerate(self.leaf_labels) if _is_axis(axis)]

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            now = list(leaves)
            for k, source, x in zip(handed_on, sources, carry, strict=True):
                if body.labels[k] is Carry:
                    now[source] = x
            for k, x in zip(sliced, xs, strict=True):
                now[k] = x
            results = body.run(now)
            # A stream that is passed whole starts at the same count in each iteration; it must end at the highest one.
            after = [
                results[k] if body.labels[k] is Carry else jnp.maximum(x, results[k])
                for k, x in zip(handed_on, carry, strict=True)
            ]
            return after, [results[k] for k in stacked]

        xs = [jax.tree.map(lambda x, a=self.leaf_labels[k]: _moved(x, a, 0), leaves[k]) for k in sliced]
        length = None if export.is_symbolic_dim(self.size) else self.size  # JAX wants a number
        last, ys = self.loop(step, [leaves[k] for k in sources], xs, length=length)
        found = dict(zip(handed_on, last, strict=True))
        for k, y in zip(stacked, ys, strict=True):
            found[k] = jax.tree.map(lambda x, a=body.labels[k]: _moved(x, 0, a), y)
        returned = [found[k] for k in range(len(body.owners))]
        placed = place_stacks(body.delta, returned, len(self.layout.rows), self.axis_name)
        return list(placed), Outcome(body.delta)


def _moved(x: Any, source: int, destination: int) -> Any:
    if source == destination:  # no operation, which would be blamed for NaNs
        return x
    return jnp.moveaxis(x, source, destination)


_PLACES = "Give it an axis (0 stacks the values), or carry it: nnx.StateAxes({{{carried}, ...: None}})."
_ATTACH = "Attach the Variable before the loop, or give it an axis that the stacked values have."


def _is_below(path: tuple, place: tuple | None) -> bool:
    """Whether a path leads to what is at a place, or in it; None is no place."""
    return place is not None and path[: len(place)] == place


def _handed_on(body: Body) -> list[int]:
    """Which leaves that come back go to the next iteration: carried ones, and the counts of streams passed whole."""
    return [k for k, label in enumerate(body.labels) if not _is_axis(label)]


def _places_of_carry(in_axes: Any, out_axes: Any) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Check the two prefixes, and find where ``Carry`` stands in each."""
    check_axes(in_axes, "in_axes", "scan", Carry)
    check_axes(out_axes, "out_axes", "scan", Carry)
    places = _place_of_carry(in_axes, "in_axes"), _place_of_carry(out_axes, "out_axes")
    if (places[0] is None) != (places[1] is None):
        raise PrefixError(
            "If one of in_axes or out_axes has Carry, the other must also have Carry; given were "
            f"in_axes={in_axes!r} and out_axes={out_axes!r}. If no argument is carried, write out_axes=0, which is "
            "(nnx.Carry, 0) by default; Carry in nnx.StateAxes, for a part of a Module, does not count."
        )
    for entry in jtu.tree_leaves(out_axes, is_leaf=lambda x: x is None):
        if None in labels_in(entry):
            raise PrefixError(
                f"Cannot broadcast output state. Got {entry!r} in out_axes={out_axes!r}, but every iteration returns "
                "a value of its own. Give it an axis (0 stacks the values), or carry it."
            )
    return places


def _place_of_carry(axes: Any, name: str) -> tuple[int, ...] | None:
    """The place of ``Carry`` in a prefix: () for all of it, (i,) for entry i, None if it has none."""
    if axes is Carry:
        return ()
    entries = list(axes) if isinstance(axes, tuple | list) else []
    places = [i for i, axis in enumerate(entries) if axis is Carry]
    leaves = jtu.tree_leaves(axes)
    if len(places) > 1:
        raise PrefixError(f"Found multiple Carry definitions in {name}={axes!r}. Put what is carried into one tuple.")
    if len(places) != sum(x is Carry for x in leaves):
        raise PrefixError(
            f"{name}={axes!r} may have nnx.Carry for one whole argument; inside of a Module use nnx.StateAxes."
        )
    return (places[0],) if places else None


def _check_values(out: Any, out_axes: Any) -> None:
    """Check that a body returns as many values as ``out_axes`` describes.

    Raises:
      PrefixError: if not.
    """
    if isinstance(out_axes, tuple | list) and not (isinstance(out, tuple | list) and len(out) == len(out_axes)):
        raise PrefixError(
            f"The function of scan must return {len(out_axes)} values, for out_axes={out_axes!r}, but it returned "
            f"{describe_nested(out)}. Return (carry, y), where y may be None; or, for the carry alone, pass "
            "out_axes=nnx.Carry."
        )


_NO_CARRY = Tree(jtu.tree_structure(()), (), ())


_OTHER_CARRY = "The carry of scan must come out with the structure, and the objects, that went in:"
_CARRY_ALONE = """\
The body of scan returned a tuple that begins with the carry. With out_axes=nnx.Carry it must return the carry alone; \
for (carry, y), pass out_axes=(nnx.Carry, 0)."""


def _is_axis(label: Any) -> bool:
    return isinstance(label, int)


def _refuse_explicit(layout: Layout, leaves: Sequence[Any], labels: Sequence[Any]) -> None:
    """Refuse to loop over an axis whose sharding is part of an array's type, which JAX cannot do."""
    sharded = [
        f"{place_of(path)}: axis {label} of {type_.str_short(short_dtypes=False)}"
        for leaf, label, path in zip(leaves, labels, layout.leaf_paths, strict=True)
        if _is_axis(label)
        for type_ in map(jax.typeof, jtu.tree_leaves(leaf))
        if type_.sharding.spec[label] is not None
    ]
    if sharded:
        raise PlacementError(listed("scan cannot loop over an axis that is sharded explicitly:", sharded, _RESHARD))


_RESHARD = """\
Give these another sharding first, jax.sharding.reshard(x, jax.P(None, ...)), or make the axis of the mesh automatic: \
jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto, ...))."""


def _slice_type(leaf: Any, label: Any) -> Any:
    if not _is_axis(label):
        return leaf
    return jax.tree.map(lambda x: slice_type(x, label), leaf)


def _length(packed: Packed, labels: Sequence[Any], length: int | None) -> int:
    given: Any = length  # it may be an array
    if length is not None and not export.is_symbolic_dim(length):
        given = int(length)
    size = mapped_size(packed, labels, "scan", "length", given)
    if size is None:
        raise PrefixError("scan does not know how often to run: nothing has an axis. Pass length=...")
    return size


# --- data_transform ---------------------------------------------------------------------------------------------------


def transformed_data(
    hook: DataTransform, layout: Layout, labels: Sequence[Any]
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that passes the values of Variables, among all leaves, through the hook, label by label.

    Raises (when called):
      PrefixError: if the hook loses or adds a path, or changes a shape or dtype.
    """
    groups: dict[Any, list[int]] = {}
    for k in range(len(layout.variables)):
        groups.setdefault(labels[k], []).append(k)
    paths = [layout.paths[i][1:] for i in layout.variables]

    def enter(leaves: Sequence[Any]) -> list[Any]:
        found = list(leaves)
        for label, positions in groups.items():
            given = {paths[k]: leaves[k] for k in positions}
            items = [(paths[k], variable_of(layout.variable_row(k), leaves[k])) for k in positions]
            returned = dict(to_flat_state(hook(label, from_flat_state(items))))
            values = {p: x.get_raw_value() if isinstance(x, Variable) else x for p, x in returned.items()}
            refuse(leaf_differences(given, values), _OTHER_TYPES, _AS_TREE_MAP, PrefixError)
            for k in positions:
                found[k] = values[paths[k]]
        return found

    return enter


_OTHER_TYPES = "What data_transform returns does not fit what it is given; nothing was changed."
_AS_TREE_MAP = "Return a State with the same paths, shapes and dtypes, as jax.tree.map does."
