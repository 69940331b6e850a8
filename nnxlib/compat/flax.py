"""``from nnxlib.compat import flax as nnx``: the namespace of nnxlib, for code that passes flax.nnx's switches.

flax.nnx has a *graph mode* and a *tree mode*, chosen by ``graph=`` and ``graph_updates=`` in each call, or for all of
them by ``set_graph_mode`` and ``set_graph_updates``. nnxlib has one mode, which can do what either can. So the switches
are taken and have no effect, but for what a caller can see: in tree mode the gradient of a Module is a Module.

Everything else is nnxlib's own; a name is looked up there when it is first asked for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

import nnxlib

from ..core.variables import MISSING

_SWITCHES = ("graph", "graph_updates", "recreate_variables", "copy_variables")


class _Mode:
    """A switch for all calls: set for good when called, within a ``with`` block, or within each call of the function
    that it decorates; ``current()`` asks for it.
    """

    value = True

    def __init__(self, value: bool, /):
        self._set = value
        self._before, type(self).value = type(self).value, value

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        type(self).value = self._before

    def __call__(self, function: Callable) -> Callable:
        type(self).value = self._before

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with type(self)(self._set):
                return function(*args, **kwargs)

        return wrapper

    @classmethod
    def current(cls) -> bool:
        return cls.value


class set_graph_mode(_Mode):
    """Whether calls that do not say otherwise are in graph mode."""


class set_graph_updates(_Mode):
    """Whether calls that do not say otherwise carry changes of structure."""


@contextmanager
def var_defaults(*, hijax: bool | None = None, ref: bool | None = None) -> Iterator[None]:
    """Nothing to choose: a Variable is of one kind."""
    yield


def vars_as(node: Any, /, **switches: Any) -> Any:
    """Return ``node`` as it is: a Variable is of one kind."""
    return node


with_vars = vars_as


def _in_tree_mode(graph: bool | None, graph_updates: bool | None) -> bool:
    graph = set_graph_mode.value if graph is None else graph
    updates = set_graph_updates.value if graph_updates is None else graph_updates
    return not (graph and updates)


def _without_switches(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for name in _SWITCHES:
            kwargs.pop(name, None)
        return function(*args, **kwargs)

    return wrapper


def _inexact(path: tuple, x: Any) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(x))


def value_and_grad(
    f: Any = MISSING,
    *,
    argnums: int | nnxlib.DiffState | Sequence[int | nnxlib.DiffState] = 0,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **options: Any,
) -> Callable:
    """:func:`nnxlib.value_and_grad`; in tree mode with a Module for each Module, all its floating leaves derived."""
    if f is MISSING:
        return lambda f: value_and_grad(f, argnums=argnums, graph=graph, graph_updates=graph_updates, **options)
    if not _in_tree_mode(graph, graph_updates):
        return nnxlib.value_and_grad(f, argnums=argnums, **options)
    single = isinstance(argnums, int | nnxlib.DiffState)
    chosen = [argnums] if single else list(argnums)  # type: ignore[arg-type]

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        whole = [n if isinstance(n, int) and isinstance(args[n], nnxlib.Pytree) else None for n in chosen]
        numbers = tuple(c if n is None else nnxlib.DiffState(n, _inexact) for c, n in zip(chosen, whole, strict=True))
        value, grads = nnxlib.value_and_grad(f, argnums=numbers, **options)(*args, **kwargs)
        shaped = tuple(g if n is None else _as_module(args[n], g) for n, g in zip(whole, grads, strict=True))
        return value, shaped[0] if single else shaped

    return wrapped


def grad(f: Any = MISSING, **options: Any) -> Callable:
    """:func:`nnxlib.grad`; as :func:`value_and_grad`."""
    if f is MISSING:
        return lambda f: grad(f, **options)
    with_value = value_and_grad(f, **options)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if options.get("has_aux") else grads

    return wrapped


def _as_module(module: Any, grads: Any) -> Any:
    """A Module like ``module`` with the gradients for values, and zeros where there are none."""
    found = dict(nnxlib.to_flat_state(grads))
    zeros = lambda x: jax.tree.map(jnp.zeros_like, x.get_raw_value() if isinstance(x, nnxlib.Variable) else x)
    return nnxlib.map(lambda path, x: found[path] if path in found else zeros(x), module)


def __getattr__(name: str) -> Any:
    value = getattr(nnxlib, name)
    if inspect.isfunction(value):
        value = _without_switches(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(nnxlib)})
