"""``map_variables``: run a function on transformed weights (masked, tied, normalised, quantised).

The Variables that a filter takes hold what is *stored*; the function sees what ``trans_in`` makes of it. The crossing
is that of every transform, with nothing in between: the function runs on fresh objects, and only those ever hold
transformed values. So the live model has its stored values before, afterwards, and when the function raises.

What the function leaves in a mapped Variable, also in one that it has made, is a transformed value; ``trans_out`` makes
a stored one of it. Without ``trans_out`` the mapped Variables are read-only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..core.differences import ANY_VALUE, leaf_differences, refuse
from ..core.errors import OUTPUT, ArgumentError, EmptySelectionError, ReadOnlyError, format_path
from ..core.filters import Filter, Predicate, to_predicate
from ..core.graph import After, Packed, check_commit, commit
from ..core.missing import MISSING
from ..core.packing import pack_live
from ..core.state import from_flat_state, to_flat_state
from ..core.variables import Param, Variable, plain_value
from .callables import resolve
from .classes import lifts_classes
from .lift import Arguments, cross

Trans = Callable[[Any], Any]


@lifts_classes("__call__")
def map_variables(
    f: Callable = MISSING, filter: Filter = Param, trans_in: Trans = MISSING, trans_out: Trans | None = None
) -> Callable:
    """Return ``f`` run on transformed values of the Variables that a filter takes.

    Args:
      f: a function, method, callable Module or partial; may be left out, to be used as a decorator.
      filter: which Variables of the arguments are mapped; it sees paths from each argument down.
      trans_in: takes the State of the mapped Variables of one argument as they are stored, and returns one with the
        same paths and the values that ``f`` is to see, of any shape and dtype. Called for each argument that has some.
      trans_out: takes the State of those mapped Variables that ``f`` has changed, or attached to the argument, and
        returns the values to be stored, for these and for other mapped Variables of the argument if need be. Without
        it a change is an error.

    Returns:
      A function of the same arguments. Gradients with respect to the stored values flow through ``trans_in``; all else
      that ``f`` changes is changed as by a plain call.

    A strictly lower triangular kernel, so that no output depends on an input at its own or a later place:

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> layer = nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0))
    >>> causal = nnx.map_variables(layer, nnx.Param, lambda params: jax.tree.map(lambda w: jnp.triu(w, 1), params))
    >>> jax.jacobian(causal)(jnp.ones(3))[0].tolist()
    [0.0, 0.0, 0.0]

    Raises:
      EmptySelectionError: if the filter selects no Variable of the arguments.
      ReadOnlyError: if ``f`` changes a mapped Variable and there is no ``trans_out``; names the path. As for all
        errors, nothing has been changed then.
      StateMismatchError: if ``trans_in`` or ``trans_out`` returns other paths than it may; names them.
    """
    if not callable(trans_in):
        raise ArgumentError(
            "map_variables needs trans_in, a function of a State: nnx.map_variables(f, filter, trans_in)."
        )
    function, bound, bound_kwargs = resolve(f)
    predicate = to_predicate(filter)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        packed = pack_live(Arguments((*bound, *args), {**bound_kwargs, **kwargs}))
        layout = packed.layout
        stored = dict(zip(layout.variables, packed.leaves, strict=False))
        seen = dict(stored)
        for rows in _by_argument(predicate, layout.variables, layout.paths, packed.objects):
            seen |= _called(trans_in, "trans_in", layout.paths, rows, {i: packed.objects[i] for i in rows})
        leaves = [*seen.values(), *packed.leaves[len(seen) :]]
        _, after = cross(function, layout, leaves)
        return _commit(packed, predicate, trans_out, stored, seen, after)

    return wrapped


Rows = dict[int, tuple]  # the mapped Variables of one argument: row -> path below the argument


def _by_argument(
    predicate: Predicate, rows: Sequence[int], paths: Mapping[int, tuple] | Sequence[tuple], objects: Sequence[Any]
) -> list[Rows]:
    """The mapped Variables among ``rows``, in groups of which a State can be made: of one argument, at paths apart.

    After the call there may be two at one path of an argument: one that it had, and a new one in its place, or below a
    Module in the place of its Module. The new ones, whose rows are higher, are a group of their own.
    """
    found: dict[tuple, Rows] = {}
    places, above = set[tuple](), set[tuple]()
    for i in rows:
        argument, path = paths[i][:2], paths[i][2:]
        if argument[0] != OUTPUT and predicate(path, objects[i]):
            nodes = [paths[i][:k] for k in range(len(paths[i]))]
            is_second = paths[i] in places | above or not places.isdisjoint(nodes)
            places.add(paths[i])
            above.update(nodes)
            found.setdefault((argument, is_second), {})[i] = path
    return list(found.values())


def _called(trans: Trans, name: str, paths: Any, rows: Rows, variables: Mapping[int, Variable]) -> dict[int, Any]:
    """Call ``trans`` on the State of some mapped Variables of an argument; returns the values that it gives, by row."""
    items = [(rows[i], _copy(x)) for i, x in variables.items()]
    alone = len(items) == 1 and items[0][0] == ()  # the argument is itself a Variable
    given = trans(items[0][1] if alone else from_flat_state(items))
    returned = {(): given} if alone else dict(to_flat_state(given))
    argument = paths[next(iter(rows))][:2]
    values = {(*argument, *path): plain_value(x) for path, x in returned.items()}
    expected = {paths[i]: variables.get(i, ANY_VALUE) for i in rows if i in variables or paths[i] in values}
    found = [x for x in leaf_differences(expected, values) if x.kind in ("removed", "added")]
    refuse(found, _OTHER_PATHS.format(name=name), _AS_TREE_MAP)
    return {i: values[paths[i]] for i in rows if paths[i] in values}


def _copy(variable: Variable) -> Variable:
    """A copy of a Variable that holds its value itself, also if that is kept in a :class:`jax.Ref`."""
    copied = variable.copy()
    copied._raw_value = plain_value(copied)
    return copied


def _commit(
    packed: Packed,
    predicate: Predicate,
    trans_out: Trans | None,
    stored: Mapping[int, Any],
    seen: Mapping[int, Any],
    after: After,
) -> Any:
    """Commit what a function did, with stored values in place of those that it left in mapped Variables."""
    delta, paths, objects = after.delta, after.walk.paths, after.walk.objects
    mapped = _by_argument(predicate, sorted(after.walk.cells), paths, objects)
    if not mapped:
        raise EmptySelectionError("map_variables maps nothing: its filter selects no Variable of the arguments.")
    leaves = dict(zip(after.owners, after.leaves, strict=True))
    values = {i: leaf for (i, _), leaf in leaves.items() if i in after.walk.cells}
    for rows in mapped:
        values |= {i: stored[i] for i in rows if i in values and i in seen and values[i] is seen[i]}  # other metadata
        changed = {i: objects[i] for i in rows if i in values and (i not in seen or values[i] is not stored[i])}
        if changed and trans_out is None:
            names = ", ".join(format_path(paths[i]) for i in sorted(changed))
            raise ReadOnlyError(_READ_ONLY.format(paths=names))
        if changed and trans_out is not None:
            values |= _called(trans_out, "trans_out", paths, rows, changed)
    leaves |= {(i, 0): value for i, value in values.items()}
    only_values = values.keys() - dict(delta.rows).keys()
    in_refs = [i for i in only_values if isinstance(stored[i], jax.Ref)]  # what these Variables hold stays that Ref
    delta = delta._replace(values=tuple(sorted(only_values.difference(in_refs))))
    check_commit(packed.layout, delta, packed.objects)  # before the first write
    for i in in_refs:
        stored[i][...] = values[i]
    return commit(packed.layout, delta, [leaves[owner] for owner in delta.owners(after.rows)], packed.objects)


_OTHER_PATHS = "{name} has to return a value for each Variable that it is given, and no other; nothing was changed."
_AS_TREE_MAP = "Return a State with the paths of the one that is given, as jax.tree.map does."

_READ_ONLY = """\
The function changes {paths}, which holds a transformed value: map_variables has no trans_out that could make a value \
to be stored of it. Nothing has been written.
Pass trans_out, or leave the Variable out of the filter."""
