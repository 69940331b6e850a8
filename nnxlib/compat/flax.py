"""``from nnxlib.compat import flax as nnx``: the namespace of nnxlib, for code that passes flax.nnx's switches.

flax.nnx has a *graph mode* and a *tree mode*, chosen by ``graph=`` and ``graph_updates=`` in each call, or for all
calls by ``set_graph_mode`` and ``set_graph_updates``. nnxlib has one mode, which can do what either can. So the
switches are accepted, and only change what a caller can see. In tree mode, and without graph updates:

- gradients have a Module in place of each Module, also those that the rules of ``custom_vjp`` take and return;
- only the values and metadata of Variables come out of a transform, no other change of its arguments;
- random streams are split and forked in a copy;
- what cannot work there is refused: prefixes by filter, and a Variable with two paths in the arguments or the output.

In both modes a ``scan`` may change what it passes whole, and a State is not a snapshot: it holds the Variables of the
model itself, and ``merge`` puts the Variables of a State into the new model.

All other names are nnxlib's own, looked up when they are first used. Where the constructor of a class takes a switch,
its name here is that of a subclass.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import nnxlib

from ..core.annotations import signature_of
from ..core.missing import MISSING
from ..core.tracing import boundary
from . import aliases, trees
from .graphlib import set_graph_mode as set_graph_mode
from .graphlib import set_graph_updates as set_graph_updates
from .graphlib import vars_as as vars_as
from .graphlib import with_vars as with_vars
from .variablelib import var_defaults as var_defaults

if TYPE_CHECKING:
    from typing import Any  # at run time it is the filter of that name

M = TypeVar("M")
_SWITCHES = ("graph_updates", "copy_variables")


def _of_trees(graph: bool | None) -> bool:
    return not (set_graph_mode.current_value() if graph is None else graph)


def _in_tree_mode(graph: bool | None, graph_updates: bool | None) -> bool:
    updates = set_graph_updates.current_value() if graph_updates is None else graph_updates
    return _of_trees(graph) or not updates


def _without_switches(function: Callable) -> Callable:
    checked = trees.OF_GRAPHS.get(function.__name__)

    @boundary
    @functools.wraps(function)
    def wrapper(*args: Any, graph: bool | None = None, **kwargs: Any) -> Any:
        for name in _SWITCHES:
            kwargs.pop(name, None)
        if checked is not None and len(args) > checked and _of_trees(graph):
            trees.check_tree(args[checked])
        return function(*args, **kwargs)

    return wrapper


state, split, merge = map(_without_switches, (aliases.state, aliases.split, aliases.merge))
variables, update = state, _without_switches(aliases.update)
unpack, flatten, unflatten = map(_without_switches, (aliases.unpack, aliases.flatten, aliases.unflatten))
call = _without_switches(aliases.call)


class Optimizer(nnxlib.Optimizer[M]):
    __doc__ = nnxlib.Optimizer.__doc__

    def __init__(self, model: M, tx: Any, *, wrt: nnxlib.filterlib.Filter = nnxlib.Param, graph: bool | None = None):
        if _of_trees(graph):
            trees.check_tree(model)
        super().__init__(model, tx, wrt=wrt)


class ModelAndOptimizer(nnxlib.ModelAndOptimizer[M], Optimizer[M]):  # so that it is an Optimizer of this namespace
    __doc__ = nnxlib.ModelAndOptimizer.__doc__


class EMA(nnxlib.EMA):
    __doc__ = nnxlib.EMA.__doc__

    def __init__(self, params: Any, decay: float, *, only: nnxlib.filterlib.Filter = ..., graph: bool | None = None):
        if _of_trees(graph):
            trees.check_tree(params)
        super().__init__(params, decay, only=only)


def _transform(transform: Callable) -> Callable:
    """A transform that takes the switches."""
    first = next(iter(signature_of(transform).parameters))

    @functools.wraps(transform)
    def switched(*args: Any, graph: bool | None = None, graph_updates: bool | None = None, **options: Any) -> Any:
        if first in options:
            args = (options.pop(first), *args)
        if not args:
            return functools.partial(switched, graph=graph, graph_updates=graph_updates, **options)
        if not _in_tree_mode(graph, graph_updates):
            return transform(*args, **options)
        return trees.call(transform.__name__, _of_trees(graph), args, options)

    return switched


scan = _transform(trees.carrying_scan(nnxlib.RngState))
custom_vjp = _transform(trees.custom_vjp)


def _in_a_copy(replace: Callable) -> Callable:
    """``replace(node)``, which exchanges streams of a node in place; in tree mode in a copy, which is returned."""

    @functools.wraps(replace)
    def wrapper(
        node: Any = MISSING, /, *, graph: bool | None = None, graph_updates: bool | None = None, **options: Any
    ) -> Any:
        if node is MISSING or not _in_tree_mode(graph, graph_updates):
            return replace(node, **options)
        if _of_trees(graph):
            trees.check_tree(node)
        backups = replace(node, **options)
        new = {id(x): x.copy() for backup in backups for x in (backup.stream.key, backup.stream.count)}
        copied = nnxlib.clone(node, variables=False)
        for _, x in nnxlib.iter_graph(copied):
            if isinstance(x, nnxlib.RngStream) and id(x.count) in new:
                x.key, x.count = new[id(x.key)], new[id(x.count)]
        nnxlib.restore_rngs(backups)
        return copied

    return wrapper


split_rngs, fork_rngs = _in_a_copy(nnxlib.split_rngs), _in_a_copy(nnxlib.fork_rngs)


def _with_switches(value: Any) -> Any:
    """A function of nnxlib that takes the switches, or a module whose functions do; other values as they are."""
    if inspect.isfunction(value):
        return _without_switches(value)
    return _Namespace(value) if inspect.ismodule(value) else value


class _Namespace(types.ModuleType):
    """One of the modules of nnxlib; what nnxlib itself has under the same name is that of this module here."""

    def __init__(self, module: types.ModuleType):
        super().__init__(module.__name__, module.__doc__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        here = sys.modules[__name__]
        if value is getattr(nnxlib, name, MISSING):
            value = getattr(here, name)
        elif value is not getattr(here, name, MISSING):
            value = _with_switches(value)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return dir(self._module)


@functools.cache  # not in globals(), where `map` of nnxlib would take the place of Python's
def __getattr__(name: str) -> Any:
    value = getattr(nnxlib, name)
    return _transform(value) if name in trees.TRANSFORMS else _with_switches(value)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(nnxlib)})
