"""``capture``: run a function of a Module and take out what it recorded, leaving the Module as it was.

It is the engine with no transformation in the middle: the function runs on fresh objects, the recorded Variables are
popped from those, and the other changes are committed. So it works wherever the Module can be read, also under raw
``jax.grad``, and a Module is never left with recordings by a call that fails.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..core.calls import inside, listening
from ..core.filters import Filter, to_predicate
from ..core.graph import build, commit, diff, pack
from ..core.module import Module, record, recorded_in
from ..core.objects import Node
from ..core.ops import iter_graph, pop, update
from ..core.state import State, from_flat_state
from ..core.tracing import boundary
from ..core.variables import Variable
from .lift import Arguments, resolve

_OUTPUT = "()"


def capture(
    fn: Callable | type[Variable] | None = None,
    *var_types: type[Variable],
    init: State | None = None,
    method_outputs: type[Variable] | None = None,
    only: Filter = ...,
) -> Callable:
    """Return a function that returns the output, and a State of what was recorded for each type of Variable.

    Args:
      fn: a callable Module, a bound method, or a function whose first Module argument is meant.
      *var_types: the types of Variables to record, such as ``nnx.Intermediate`` for what is sown, and
        ``nnx.Perturbation``; each recording is in the State of the first type that takes it. With types only, a
        decorator is returned.
      init: a State to start from, such as perturbations to be differentiated.
      method_outputs: a type of Variable in which to record what each method of each Module returns, under the name of
        the method; has a State of its own, the last, if it is not among ``var_types``.
      only: of which Modules, by type or path: ``nnx.Linear``, ``nnx.PathContains('encoder')``, or any other filter.

    What is recorded has the structure of the calls that are made, so a jitted function is traced once. Under ``vmap``
    and ``scan`` it is stacked: with the axis of the Module, and on axis 0 if the Module is passed whole or carried
    (a :class:`Perturbation` needs an axis). Functions that are jitted elsewhere run as a part of the call.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> class Net(nnx.Module):
    ...   def __call__(self, x):
    ...     self.sow(nnx.Intermediate, 'hidden', 2 * x)
    ...     return x
    >>> y, recorded = nnx.capture(Net(), nnx.Intermediate)(jnp.ones(2))
    >>> recorded.hidden.value[0].tolist()
    [2.0, 2.0]
    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(3, 1, rngs=nnx.Rngs(1)))
    >>> y, outputs = nnx.capture(model, method_outputs=nnx.Intermediate, only=nnx.Linear)(jnp.ones(2))
    >>> [(path, x.value[0].shape) for path, x in outputs.flat_state()]
    [(('layers', 0, '__call__'), (3,)), (('layers', 2, '__call__'), (1,))]

    Raises:
      TypeError: if no type of Variable is given, or no argument is a Module.
    """
    if fn is None or (inspect.isclass(fn) and issubclass(fn, Variable)):
        types = var_types if fn is None else (fn, *var_types)
        return lambda fn: capture(fn, *types, init=init, method_outputs=method_outputs, only=only)
    kinds = tuple(dict.fromkeys((*var_types, *((method_outputs,) if method_outputs is not None else ()))))
    if not kinds:
        raise TypeError("nnx.capture needs a type of Variable to take out: nnx.capture(model, nnx.Intermediate).")
    function, bound, bound_kwargs = resolve(fn)

    @boundary
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        packed = pack(Arguments((*bound, *args), {**bound_kwargs, **kwargs}))
        (inner_args, inner_kwargs, _), objects = build(packed.layout, packed.leaves)
        module = next((x for x in (*inner_args, *inner_kwargs.values()) if isinstance(x, Module)), None)
        if module is None:
            raise TypeError("nnx.capture needs a Module among the arguments; none was passed.")
        earlier = _take_out(module, kinds)
        attached = [] if init is None else _attach(module, init)
        listener = inside(packed.layout, objects, [path[2:] for path in packed.layout.paths])
        listener.captured = kinds
        if method_outputs is not None:
            listener.on_call = _recorder(method_outputs, to_predicate(only), listener.path_of(module))
        with listening(listener):
            out = function(*inner_args, **inner_kwargs)
        recorded = _pop_recorded(module, kinds)
        for owner, name in attached:
            if name in recorded_in(owner):  # of a type that was not asked for
                delattr(owner, name)
        _put_back(earlier)
        after = diff(packed.layout, packed.leaves, objects, out)
        out = commit(packed.layout, after.delta, after.leaves, packed.objects)
        return out, *map(_renamed, recorded)

    return functools.update_wrapper(wrapped, fn, updated=())


def _recorder(kind: type[Variable], chosen: Callable[[tuple, Any], bool], root: tuple) -> Callable:
    """What records the outputs of the chosen Modules; their paths are told from that of the ``root`` down."""

    def on_call(module: Any, path: tuple, name: str, args: tuple, kwargs: dict) -> Callable[[Any], object] | None:
        if not chosen(path[len(root) :] if path[: len(root)] == root else path, module):
            return None
        # Under the bare name of the method the recording would hide the method itself from the next call.
        return lambda out: module.sow(kind, name + _OUTPUT, out)

    return on_call


def _renamed(recorded: Any) -> State:
    flat = [((*path[:-1], path[-1].removesuffix(_OUTPUT)), leaf) for path, leaf in recorded.flat_state()]
    return from_flat_state(flat)


def _pop_recorded(module: Module, kinds: tuple[type[Variable], ...]) -> tuple[State, ...]:
    """Remove what was recorded in Variables of these very types, and return it, grouped by the first type that fits."""
    paths = {(*path, name) for path, x in iter_graph(module) if isinstance(x, Node) for name in recorded_in(x)}

    def of(kind: type[Variable]) -> Filter:
        return lambda path, x: path in paths and type(x) in kinds and isinstance(x, kind)

    states = pop(module, *map(of, kinds))
    return states if len(kinds) > 1 else (states,)


def _take_out(module: Module, kinds: tuple[type[Variable], ...]) -> list[tuple[Node, dict, dict | None]]:
    """Remove what was recorded before; returns what the nodes that had any held, and their marks."""
    held = []
    for _, x in list(iter_graph(module)):
        items = dict(x._nnx_children()) if isinstance(x, Node) else {}
        kept = {name: v for name, v in items.items() if not (type(v) in kinds and name in recorded_in(x))}
        if len(kept) < len(items):
            held.append((x, items, x._nnx_marks))
            x._nnx_fill(kept)
    return held


def _put_back(held: list[tuple[Node, dict, dict | None]]) -> None:
    for x, before, marks in held:
        now = dict(x._nnx_children())
        x._nnx_fill({name: now.get(name, value) for name, value in before.items()} | now)
        object.__setattr__(x, "_nnx_marks", {**(marks or {}), **(x._nnx_marks or {})})


def _attach(module: Module, state: Any) -> list[tuple[Module, str]]:
    """Write a State into a Module, with attributes for the Variables that it does not have; returns those."""
    attached = []
    present = {path for path, _ in iter_graph(module)}
    for path, variable in state.flat_state():
        if path in present:
            update(module, State({}) | _nested(path, variable))
        else:
            owner: Any = module
            for key in path[:-1]:
                owner = getattr(owner, key) if isinstance(key, str) and not isinstance(owner, dict) else owner[key]
            record(owner, path[-1], variable.copy())
            attached.append((owner, path[-1]))
    return attached


def _nested(path: tuple, leaf: Any) -> dict:
    for key in reversed(path):
        leaf = {key: leaf}
    return leaf
