"""States with the live Variables of the model, as in flax.nnx.

In flax.nnx the States that ``state``, ``split``, ``unpack`` and ``flatten`` return hold the Variables of the model
itself, and ``merge`` and ``call`` put the Variables of a State into the new model. Code may write to a State and expect
the model to change; to avoid that, it passes ``copy=True``. In nnxlib a State is a snapshot, unless ``variables`` has
made it; here none is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ..core import ops
from ..core.calls import note_copies
from ..core.filters import Filter
from ..core.graph import build, pack
from ..core.graphstate import GraphState
from ..core.lost_changes import watch_draws
from ..core.state import FlatState, one_or_all, to_flat_state
from ..core.tracing import boundary, current_trace, is_key
from ..core.variables import Variable


def state(node: Any, *filters: Filter) -> Any:
    """:func:`nnxlib.state` with the Variables of ``node`` itself."""
    return ops.variables(node, *filters)


def split(node: Any, *filters: Filter) -> tuple[Any, ...]:
    """:func:`nnxlib.split` with the Variables of ``node`` itself."""
    return ops.graphdef(node), *ops.live_states(node, filters, exhaustive=True)


def unpack(node: Any, *filters: Filter) -> Any:
    """:func:`nnxlib.unpack` with the Variables of ``node`` itself."""
    graphdef, *states = split(node, *filters)
    return one_or_all([GraphState(graphdef, state) for state in states])


def flatten(node: Any, *, with_paths: bool = True) -> tuple[Any, Any]:
    """:func:`nnxlib.flatten` with the Variables of ``node`` itself, if it returns paths."""
    if not with_paths:
        return ops.flatten(node, with_paths=False)
    graphdef, state = split(node)
    return graphdef, FlatState(_flat(state), sort=True)


def unflatten(graphdef: Any, state: Any, /) -> Any:
    """:func:`nnxlib.unflatten` with the Variables of the State itself."""
    return ops.unflatten(graphdef, state) if isinstance(state, list) else merge(graphdef, state)


def merge(graphdef: Any, /, *states: Any, copy: bool = False, strict: bool = False) -> Any:
    """:func:`nnxlib.merge` with the Variables of the States themselves; with ``copy``, with new ones.

    Arrays may have another shape or dtype than in the GraphDef: kernels that are computed for each call, say.
    Variables of another trace are not put into a Module of the running one, since they could not be written there; nor
    is the raw data of a random key, in place of which the Module has a Variable with the key.
    """
    made, trace = ops.merge(graphdef, *states, strict=strict), current_trace()
    if isinstance(graphdef, GraphState):
        states = graphdef, *states
    leaves = itertools.chain(*map(_flat, () if copy else states))
    given = {path: x for path, x in leaves if isinstance(x, Variable) and x._nnx_trace is trace}
    if not given:
        return made
    layout, values, objects = pack(made)
    found = ((k, given[path]) for path, k in layout.positions.items() if path in given)
    rows = {layout.variables[k]: x for k, x in found if not is_key(values[k]) or is_key(x.get_raw_value())}
    made, copies = build(layout, values, rows)
    note_copies(objects, copies)
    if trace is not None:
        watch_draws(made)  # the streams that are copies after all
    return made


class _CallProxy(ops.CallProxy):
    __slots__ = ()
    _split = staticmethod(split)


@boundary
def call(graphdef_state: tuple[Any, Any], /) -> Any:
    """:func:`nnxlib.call` with the Variables of the State itself, which the call changes."""
    return _CallProxy(lambda: merge(*graphdef_state))


@boundary
def update(node: Any, state: Any, /, *states: Any, strict: bool = True) -> None:
    """:func:`nnxlib.update`, which attaches new Variables of any type.

    A call may make one, for a loss, say, in each layer of a stack that is called in a raw scan.
    """
    ops.write_states(node, (state, *states), strict, Variable)


def _flat(state: Any) -> list[tuple[tuple, Any]]:
    state = state._state if isinstance(state, GraphState) else state
    if isinstance(state, FlatState):
        return list(state)
    return list(to_flat_state(state)) if isinstance(state, Mapping) else [((), state)]
