"""``capture``: run a function of a Module and take out what it has recorded.

It is a crossing without a JAX transformation: the function runs on fresh objects, the recorded Variables are removed
from these, and the other changes are committed. So it works wherever the Module can be read, also under raw
``jax.grad``, and a call that fails leaves no recordings in the Module.
"""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

from ..core.call_paths import Collector, Listener
from ..core.calls import call_recording, current_listener
from ..core.closures import Loans
from ..core.errors import ArgumentError, EmptySelectionError, PathError, describe, format_path, listed
from ..core.filters import Filter, to_predicate
from ..core.finding import reachable
from ..core.graph import commit
from ..core.iteration import iter_graph, iter_objects
from ..core.module import Module
from ..core.objects import Node
from ..core.packing import pack_live
from ..core.pop import pop
from ..core.recordings import Removed, attribute_for, bring_back, put_back, record, recorded_in, recorded_name, take_out
from ..core.references import search
from ..core.state import State, from_flat_state
from ..core.tracing import boundary
from ..core.variables import Variable
from .callables import resolve
from .closure_inputs import captured_rows
from .lift import Arguments, cross


def capture(
    fn: Callable | type[Variable] | None = None,
    *var_types: type[Variable],
    init: State | None = None,
    method_outputs: type[Variable] | None = None,
    only: Filter = ...,
) -> Callable:
    """Return a function that returns the output, and a State of what was recorded for each type of Variable.

    Args:
      fn: a callable Module, a bound method, or a function. The first Module among its arguments is captured; if there
        is none, the Module that it refers to: ``nnx.jit(model)``, ``nnx.remat(model.encode)``, ``lambda x: model(x)``.
      *var_types: the types of Variables to record, such as ``nnx.Intermediate`` for ``sow``, and ``nnx.Perturbation``;
        each recording is in the State of the first type that takes it. With types only, a decorator is returned.
      init: a State to start from, such as perturbations to be differentiated. Without a type nothing is recorded, and
        only the output is returned.
      method_outputs: a type of Variable in which to record what each method of each Module returns, under the name of
        the method. If it is not among ``var_types``, these recordings are in a further State, the last.
      only: the Modules whose outputs are recorded, by type or path: ``nnx.Linear``, ``nnx.PathContains('encoder')``, or
        any other filter.

    One Module is captured, with the copies of it that the function makes by ``nnx.view``, or by ``nnx.split`` and
    ``nnx.merge``; but not what copies record in a branch, a ``while_loop`` or a ``shard_map``. What others record is
    dropped. If that is all that was recorded, there is a warning.

    The States have the structure of the calls that are made, so a jitted function is traced once. Under ``vmap`` and
    ``scan`` recordings are stacked: along the axis of the Module, or along axis 0 if the Module is passed whole or
    carried (a :class:`Perturbation` needs an axis). From a ``while_loop`` or ``fori_loop`` come the recordings of the
    last iteration, from ``cond`` and ``switch`` those of each branch; what was not run is zeros. Functions that are
    jitted elsewhere run as a part of the call.

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
      ArgumentError: if neither a type of Variable nor ``init`` is given, or something else in place of a type; or if it
        is not clear which Module is meant.
      EmptySelectionError: if ``only`` takes none of the Modules that are called.
      PathError: if ``init`` has a Variable where the Module has nothing to hold it.
    """
    if fn is None or (inspect.isclass(fn) and issubclass(fn, Variable)):
        types = var_types if fn is None else (fn, *var_types)
        return lambda fn: capture(fn, *types, init=init, method_outputs=method_outputs, only=only)
    given = (*var_types, *((method_outputs,) if method_outputs is not None else ()))
    if not given and init is None:
        raise ArgumentError("nnx.capture needs a type of Variable to take out: nnx.capture(model, nnx.Intermediate).")
    for kind in given:
        if not (inspect.isclass(kind) and issubclass(kind, Variable)):
            raise ArgumentError(
                f"nnx.capture takes types of Variable, such as nnx.Intermediate, but got {describe(kind)}. What it "
                "returns takes the inputs: nnx.capture(model, nnx.Intermediate)(x)."
            )
    kinds = tuple(dict.fromkeys(given))
    function, bound, bound_kwargs = resolve(fn)

    @boundary
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        arguments = Arguments((*bound, *args), {**bound_kwargs, **kwargs})
        if _first_module(arguments) is None:
            arguments = arguments._replace(captured=(_referred(function),))
        packed = pack_live(arguments)
        collector = Collector(kinds)
        loan = {i: packed.objects[i] for i in captured_rows(packed.layout)}

        def run(*args: Any, **kwargs: Any) -> tuple[Any, Sequence[State]]:
            inner, listener = Arguments(args, kwargs, arguments.captured), cast(Listener, current_listener())
            live = zip(packed.objects, listener.objects, strict=True)
            collector.built.update((id(x), fresh) for x, fresh in live if fresh is not x)
            module = _first_module(inner)
            recorder = None if method_outputs is None else _Recorder(method_outputs, only, listener.path_of(module))
            return call_recording(listener, collector, recorder, _run_within, function, inner, listener, recorder, init)

        with Loans.lock if loan else nullcontext():  # waits until no other thread borrows
            (_, recorded), after = cross(run, packed.layout, packed.leaves, part=operator.itemgetter(0), loan=loan)
        out = commit(packed.layout, after.delta, after.leaves, packed.objects)
        if kinds and collector.count and not any(recorded):
            module = type(_first_module(arguments)).__name__
            warnings.warn(_DROPPED.format(module=module), UserWarning, stacklevel=3)
        return (out, *map(_renamed, recorded)) if kinds else out

    return functools.update_wrapper(wrapped, fn, updated=())


def _run_within(
    function: Callable, inner: Arguments, listener: Listener, recorder: _Recorder | None, init: State | None
) -> tuple[Any, Sequence[State]]:
    """Call a function within the crossing of a capture; returns its output, and what was recorded, which is taken out.

    What was recorded before is put aside for the call, and with ``init`` this is there instead.
    """
    module, collector = _first_module(inner), cast(Collector, listener.collector)
    is_asked = lambda node, name, variable: type(variable) in collector.types
    earlier = take_out(inner, is_asked)
    with recorder or nullcontext():
        attached, replaced = ([], []) if init is None else _attach(module, init)
        collector.count = 0  # what is in `init` has not been recorded now
        out = function(*inner.args, **inner.kwargs)
        bring_back(listener)
        recorded = _pop_recorded(module, collector.types) if collector.types else ()
    take_out(inner, is_asked)  # of other Modules than this one
    for node, name in attached:
        if name in recorded_in(node):  # of a type that was not asked for
            delattr(node, name)
    put_back(earlier + replaced)
    return out, recorded


_DROPPED = """\
nnx.capture has found nothing in the {module}: all that was recorded is in other Modules, and is dropped. Such are \
copies that nnx.merge makes of what was split before the capture; or in a branch, a while loop, a shard_map or a \
transform of raw JAX. Split within it, use the transforms of nnx, and pass the Module itself to branches and loops; \
or, to record for each example, capture within the vmap: nnx.vmap(nnx.capture(model, nnx.Intermediate))(batch)."""


def _first_module(arguments: Arguments) -> Any:
    everything = *arguments.args, *arguments.kwargs.values(), *arguments.captured
    return next((x for x in everything if isinstance(x, Module)), None)


def _referred(function: Callable) -> Module:
    """The Module that a function captures: ``nnx.jit(model)``, or a closure."""
    roots, covered = list[Module](), set[int]()
    for chain in search(function).chains:
        if issubclass(type(chain.value), Module) and id(chain.value) not in covered:
            below = {id(part) for _, part in reachable(chain.value, set())}
            roots = [*(root for root in roots if id(root) not in below), chain.value]
            covered |= below
    if len(roots) != 1:
        names = ", ".join(type(root).__name__ for root in roots)
        raise ArgumentError(_WHICH.format(said=f"refers to several ({names})" if roots else "refers to none"))
    return roots[0]


_WHICH = """\
nnx.capture needs a Module among the arguments; none was passed, and the function {said}. Pass the one to \
be looked into: nnx.capture(lambda model, x: ..., nnx.Intermediate)(model, x)."""


class _Recorder:
    """Records the outputs of the Modules that ``only`` takes, which sees their paths from ``root`` down."""

    def __init__(self, kind: type[Variable], only: Filter, root: tuple):
        self.kind, self.only, self.root = kind, only, root
        self.chosen = to_predicate(only)
        self.recorded: list[Module] = []
        self.passed: dict[str, None] = {}  # those that were not chosen, in the order of their calls

    def __call__(self, module: Any, path: tuple, name: str, args: tuple, kwargs: dict) -> Callable | None:
        path = path[len(self.root) :] if path[: len(self.root)] == self.root else path
        if not self.chosen(path, module):
            self.passed[f"{format_path(path)} ({type(module).__name__})"] = None
            return None
        self.recorded.append(module)
        return lambda out: module.sow(self.kind, name, out)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Remove recordings from Modules outside of the captured one; raise an error if nothing was recorded."""
        take_out(self.recorded, lambda node, name, variable: name != recorded_name(name))
        if error is None and self.passed and not self.recorded:
            raise EmptySelectionError(listed(_NONE.format(only=self.only), list(self.passed)))


_NONE = "nnx.capture(only={only!r}) takes none of the Modules that were called:"


def _renamed(recorded: Any) -> State:
    flat = [((*path[:-1], recorded_name(path[-1])), leaf) for path, leaf in recorded.flat_state()]
    return from_flat_state(flat)


def _pop_recorded(module: Module, kinds: tuple[type[Variable], ...]) -> tuple[State, ...]:
    """Remove and return the recordings of exactly these types, each in the State of the first type that takes it."""
    paths = {(*path, name) for path, x in iter_objects(module) if isinstance(x, Node) for name in recorded_in(x)}

    def of(kind: type[Variable]) -> Filter:
        return lambda path, x: path in paths and type(x) in kinds and isinstance(x, kind)

    states: Any = pop(module, *map(of, kinds))
    return states if len(kinds) > 1 else (states,)


def _attach(module: Module, state: Any) -> tuple[list[tuple[Node, str]], list[Removed]]:
    """Record the Variables of a State in a Module; returns the attributes, and what was taken out to make room."""
    attached: list[tuple[Node, str]] = []
    present = dict(iter_graph(module))
    for path, variable in state.flat_state():
        if path[:-1] not in present:
            raise PathError(
                f"nnx.capture(init=...) has a {type(variable).__name__} at {format_path(path)}, and "
                f"{type(module).__name__} has no {format_path(path[:-1])}. Take the State from a capture of this "
                "model."
            )
        node: Any = present[path[:-1]]
        attached.append((node, attribute_for(node, path[-1])))
    places = {(id(node), name) for node, name in attached}
    replaced = take_out(module, lambda node, name, variable: (id(node), name) in places)
    for (node, name), (_, variable) in zip(attached, state.flat_state(), strict=True):
        record(node, name, variable.copy())
    return attached, replaced
