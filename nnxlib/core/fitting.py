"""Fitting: whether the leaves of given States fit a layout, for ``merge`` and ``update``.

matching.py says which leaf belongs to which position of the layout. It fits there if it has the same shape, the same
kind of dtype, and for ``update`` the same type of Variable; or if a transformation has added axes to it, or taken some
away (stacking.py). The *aval* of a leaf is its shape and dtype.

Leaves of the same types and avals as those at the split are recognised in a few C calls (:func:`_values_that_fit`).
Others are compared one by one (:func:`_misfitting`), which yields a message for each leaf that does not fit.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from .annotations import NamedTuple
from .closures import notice_all
from .differences import ANY_VALUE, Aval, Difference, aval_of, leaf_differences, misfits, path_hint, refuse
from .errors import Path, format_path
from .graph import Packed, by_path
from .graphdef import Avals, GraphDef, avals_of, graphdef_of
from .layout import Layout
from .making import make_variable
from .matching import leaves_by_position, listed_by_path, matched, overlaid
from .rngs import implementation_of
from .rows import NodeRow
from .stacking import avals_of_whole_kinds, avals_once_mapped
from .state import State, is_boxed, is_without_leaves
from .static import Const, same_items
from .tracing import Tracer, at_top_level
from .values import all_unshared, unshared
from .variables import Variable, stored_value

# The values of leaves; and by position, the type and metadata of Variables where these differ from the layout's.
Values = tuple[list[Any], dict[int, tuple[type, Any]]]


# --- merging and writing ----------------------------------------------------------------------------------------------


def values_to_merge(graphdef: GraphDef, states: tuple[Any, ...], strict: bool) -> Values:
    """The values in States for all leaves of a structure, and the types and metadata of Variables where these differ.

    Raises:
      StateMismatchError: if they do not fit.
    """
    layout, states = graphdef.layout, listed_by_path(graphdef.layout, states)
    if layout.nesting is not None and all(isinstance(state, State) for state in states):
        levels = states[0].raw_mapping if len(states) == 1 else overlaid([state.raw_mapping for state in states])
        given = layout.nesting.flatten(levels)
        fitting = None if given is None else _values_that_fit(graphdef, given)
        if fitting is not None:
            return fitting
    return _values_compared(graphdef, *matched(layout, states, graphdef.avals), strict)


class ToWrite(NamedTuple):
    """The leaves in States that are to be written to an object."""

    values: dict[int, Any]  # by position
    metadata: dict[int, Any]  # by position, where it differs from that of the Variable
    new: list[tuple[int, Any, Variable]]  # (row of the node, name there, Variable) of each new Variable


def values_to_write(packed: Packed, states: tuple[Any, ...], strict: bool, attached: type[Variable]) -> ToWrite:
    """Find what States would write to a packed object; new Variables are taken if they are of the type ``attached``.

    Raises:
      StateMismatchError: if ``strict`` and there are leaves that do not fit; if not, these are skipped.
    """
    layout, leaves, _ = packed
    given = leaves_by_position(layout, states)
    if given is not None and at_top_level():
        live = enumerate(by_path(packed))
        fitting = _values_that_fit(graphdef_of(layout, leaves), [given.get(k, x) for k, (_, x) in live])
        if fitting is not None:
            metadata = {k: found for k, (_, found) in fitting[1].items()}
            return ToWrite({k: fitting[0][k] for k in given}, metadata, [])
    unexpected: dict[Path, Any] = {}
    if not given:
        by_position, unexpected = matched(layout, states, avals_of(leaves))
        given = {k: x["value"] if is_boxed(x, leaves[k]) else x for k, x in by_position.items()}
    made = _new_variables(layout, unexpected, attached)
    new: dict[Any, Any] = {k: x for k, x in given.items() if x is not None or not is_without_leaves(leaves[k])}
    avals = dict(zip(new, avals_of([leaves[k] for k in new]), strict=True))
    before = {k: None if isinstance(leaves[k], Tracer) else aval for k, aval in avals.items()}
    new = _with_keys(avals, new)
    stacked = avals_of_whole_kinds(_kinds(layout), before, avals_of(raw_values(new.values())))
    found = _misfitting(layout, stacked, new, unexpected)
    if strict and found:
        head = "The State does not fit the object; nothing was written."
        hint = _hint_of_paths(layout, found)
        refuse(found, head, f"Pass strict=False to skip these.{hint}{_boxes_hint(new)}")
    for x in found:
        new.pop(layout.positions.get(x.path), None)
    n, held = len(layout.variables), zip(new, raw_values(new.values()), strict=True)
    variables = [(k, x) for k, x in new.items() if k < n and isinstance(x, Variable)]
    return ToWrite({k: unshared(x) if k < n else x for k, x in held}, _other_metadata(layout, variables), made)


def _new_variables(
    layout: Layout, unexpected: dict[Path, Any], kind: type[Variable]
) -> list[tuple[int, Any, Variable]]:
    """Take, out of the unexpected leaves, the Variables of a type that nodes can have as new attributes."""
    paths = [path for path, x in unexpected.items() if isinstance(x, kind) and path]
    rows = {path: i for i, path in enumerate(layout.paths) if type(layout.rows[i]) is NodeRow} if paths else {}
    found, nothing = [], Const.of(None)
    for path in paths:
        i, name = rows.get(path[:-1]), path[-1]
        fields = {} if i is None else dict(cast(NodeRow, layout.rows[i]).fields)
        if i is not None and isinstance(name, str) and fields.get(name, nothing) == nothing:
            x = unexpected.pop(path)
            (value,) = raw_values([x])
            found.append((i, name, make_variable(type(x), unshared(value), x._metadata)))
    return found


# --- the values of leaves ---------------------------------------------------------------------------------------------


def raw_values(leaves: Collection[Any]) -> list[Any]:
    """The leaves, with values in place of Variables."""
    notice_all(x for x in leaves if isinstance(x, Variable))
    return [x._cell.value if isinstance(x, Variable) else x for x in leaves]


def as_held(values: Sequence[Any], avals: Sequence[Aval]) -> list[Any]:
    """Values for nodes to hold: a number in place of an array becomes one, since a number in an attribute is static."""
    return [
        jnp.asarray(x) if isinstance(x, int | float | complex | np.generic) and aval is not None else x
        for x, aval in zip(values, avals, strict=True)
    ]


def have_avals(values: list[Any], avals: list[Aval]) -> bool:
    """Whether values have these shapes and dtypes; None among them fits any."""
    if isinstance(avals, Avals) and avals.fit(values):
        return True
    return all(a is None or a == b for a, b in zip(avals, avals_of(values), strict=True))


def _values_that_fit(graphdef: GraphDef, leaves: list[Any]) -> Values | None:
    """The values of leaves, if the types and avals are those at the split; None if they must be compared singly."""
    layout, n = graphdef.layout, len(graphdef.layout.variables)
    variables = leaves[:n]
    if [type(x) for x in variables] != layout.blueprint.variable_types:
        return None
    notice_all(variables)
    values = all_unshared([x._cell.value for x in variables]) + raw_values(leaves[n:])
    if not have_avals(values, graphdef.avals):
        return None
    return values, {k: (type(leaves[k]), x) for k, x in _other_metadata(layout, enumerate(variables)).items()}


def _values_compared(graphdef: GraphDef, new: dict[int, Any], unexpected: dict[Path, Any], strict: bool) -> Values:
    """The values of leaves, compared one by one with those at the split; a Variable may be of another type.

    Raises:
      StateMismatchError: naming the paths, and what was expected there.
    """
    layout, n = graphdef.layout, len(graphdef.layout.variables)
    new = _with_keys(dict(enumerate(graphdef.avals)), new)
    leaves: list[Any] = [new.get(k) for k in range(len(graphdef.avals))]
    values = raw_values(leaves)
    avals = avals_once_mapped(_kinds(layout), graphdef.avals, values)
    types = dict(enumerate(layout.blueprint.variable_types))
    types |= {k: type(x) for k in types if isinstance(x := leaves[k], Variable) and type(x) is not Variable}
    found = _misfitting(layout, dict(enumerate(avals)), new, unexpected, types)
    by_path = [x for x in found if x.kind in ("removed", "added")]
    remedy = _ALL_OF_THEM if by_path else "Pass strict=False to take these as they are."
    hint = _hint_of_shared(layout, found) + _boxes_hint(new) if found else ""
    refuse(found if strict else by_path, "The State does not fit the GraphDef; nothing was made.", remedy + hint)
    changed = {*_other_metadata(layout, [(k, x) for k, x in enumerate(leaves[:n]) if isinstance(x, Variable)])}
    changed |= {k for k, was in enumerate(layout.blueprint.variable_types) if types[k] is not was}
    return all_unshared(values), {k: (types[k], leaves[k]._metadata) for k in changed}


_ALL_OF_THEM = """\
Pass every State that nnx.split returned, from a model of the same structure; nnx.update writes a part of one into a \
model."""


def _other_metadata(layout: Layout, variables: Iterable[tuple[int, Variable]]) -> dict[int, Any]:
    """By position, the metadata of Variables, given with their positions, where it differs from the layout's."""
    same = layout.blueprint.metadata
    return {
        k: x._metadata
        for k, x in variables
        if x._metadata is not same[k].value and not same_items(x._metadata, same[k].value)
    }


def _with_keys(avals: Mapping[int, Aval], new: dict[int, Any]) -> dict[int, Any]:
    """Leaves by position; raw data, which a checkpoint has in place of random keys, is made into keys."""
    dtypes = {k: aval[1] for k in new if (aval := avals.get(k)) and aval[1] is not None}
    keys = {k: dtype for k, dtype in dtypes.items() if _kind(dtype) is jax.dtypes.prng_key}
    return {**new, **{k: _as_key(new[k], dtype) for k, dtype in keys.items()}}


def _as_key(leaf: Any, dtype: Any) -> Any:
    (data, implementation), (value,) = _data_of_key(dtype), raw_values([leaf])
    aval = aval_of(value)
    if aval is None or aval[1] != data.dtype or aval[0][-1:] != data.shape:
        return leaf
    key = jax.random.wrap_key_data(value, impl=implementation)
    return make_variable(type(leaf), key, leaf._metadata) if isinstance(leaf, Variable) else key


@functools.cache
def _data_of_key(dtype: Any) -> tuple[jax.ShapeDtypeStruct, Any]:
    """The shape and dtype of the raw data of one key of a dtype, and the implementation of the key."""
    key = jax.ShapeDtypeStruct((), dtype)
    return jax.eval_shape(jax.random.key_data, key), implementation_of(key)


# --- what does not fit ------------------------------------------------------------------------------------------------


def _misfitting(
    layout: Layout,
    avals: Mapping[int, Aval],
    new: Mapping[int, Any],
    unexpected: dict[Path, Any],
    types: Mapping[int, type] | None = None,
) -> list[Difference]:
    """The differences between leaves and what they must be for :func:`merge` and :func:`update`.

    They must have the types of the layout, or those in ``types``. A leaf of the class Variable itself counts as being
    of any type. Nearly all leaves fit, which the avals alone show most often.
    """
    kinds = [(types or {}).get(k, kind) for k, kind in enumerate(_kinds(layout))]
    now = dict(zip(new, avals_of(raw_values(new.values())), strict=True))
    compared = [
        k
        for k, was in avals.items()
        if k not in new
        or (now[k] != was and not _fits(now[k], was))
        or (isinstance(new[k], Variable) and type(new[k]) not in (kinds[k], Variable))
    ]
    expected = {layout.leaf_paths[k]: _leaf(kinds[k], avals[k]) for k in compared}
    given = {layout.leaf_paths[k]: x._nnx_value if type(x := new[k]) is Variable else x for k in compared if k in new}
    return leaf_differences(expected, given | unexpected, _compare)


def _kinds(layout: Layout) -> list[type | None]:
    """The type of each leaf that is a Variable, None for a bare array."""
    return [*layout.blueprint.variable_types, *[None] * (len(layout.leaf_paths) - len(layout.variables))]


def _leaf(kind: type | None, aval: Aval) -> Any:
    """A leaf as it was at the split: a Variable, or a bare value, with this aval."""
    value = ANY_VALUE if aval is None or aval[1] is None else jax.ShapeDtypeStruct(*aval)
    return value if kind is None else make_variable(kind, value)


def _fits(new: Aval, old: Aval) -> bool:
    """Whether the avals alone show that :func:`_compare` would find no difference."""
    return old is None or old[1] is None or (new is not None and new[0] == old[0] and _kind(new[1]) is _kind(old[1]))


def _compare(path: Path, expected: Any, given: Any) -> list[Difference]:
    """The differences of two leaves; none if the given one is traced, or cast within a kind (float32 to bfloat16).

    In place of an array there may be an object of a user's pytree class, such as an array with named axes.
    """
    found = [] if isinstance(given, Tracer) else misfits(path, expected, given)
    if found and _is_of_users_pytree(value := stored_value(given)) and not _is_box_of_linen(value):
        return [x for x in found if isinstance(given, Variable) and type(given) is not type(expected)]
    return [x for x in found if x.kind != "dtype" or _kind(expected.dtype) is not _kind(given.dtype)]


def _is_of_users_pytree(x: Any) -> bool:
    return not isinstance(x, list | tuple | dict | State | None) and not jax.tree_util.all_leaves([x])


def _is_box_of_linen(x: Any) -> bool:
    """Whether this is a ``Partitioned``, or another box in which Linen keeps a value with its metadata."""
    return callable(getattr(type(x), "replace_boxed", None))


def _hint_of_paths(layout: Layout, found: list[Difference]) -> str:
    """What may have been meant by the paths that a layout does not have."""
    unknown = [x.path for x in found if x.kind == "added" and x.path]
    return _hint_of_shared(layout, found) or path_hint(unknown, layout.leaf_paths)


def _hint_of_shared(layout: Layout, found: list[Difference]) -> str:
    """That a leaf is given twice, by two paths, with values that are not known to be equal."""
    for path in [x.path for x in found if x.kind == "added"]:
        if (k := layout.position_at(path)) is not None:
            first = format_path(layout.leaf_paths[k])
            return f" {format_path(path)} is shared: it is {first}, for which there is a value, too; give one of them."
    return ""


def _boxes_hint(new: Mapping[int, Any]) -> str:
    boxes = {type(x).__name__ for x in raw_values(new.values()) if _is_box_of_linen(x)}
    return f" flax.linen.meta.unbox takes the values out of {' and '.join(sorted(boxes))}." if boxes else ""


@functools.cache
def _kind(dtype: Any) -> Any:
    """The kind of a dtype, whatever its width: a leaf may be cast from float32 to bfloat16, but not to int32."""
    kinds = (jax.dtypes.prng_key, jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), None)
