"""Errors of ``checkify`` that say which layer they come from.

JAX's checks know the equation that they are about, and an equation the name scope that it was traced in: the path of
the Module (core/calls.py). The error value that comes out keeps only the traceback of the equation. So the function is
traced first, each equation gets a traceback that says the scope (``named_equations``), and when the error comes out the
exceptions in it are exchanged for such that say it too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.experimental import checkify

from ..core.tracing import jaxpr_as_fun, named_equations, scope_of


def checked(pure: Callable, errors: Any) -> Callable:
    """``jax.experimental.checkify.checkify`` of a function of leaves, with errors that name the scope."""

    def run(leaves: Sequence[Any]) -> tuple[Any, Any]:
        closed, shapes = jax.make_jaxpr(pure, return_shape=True)(leaves)
        closed = named_equations(closed, _name_check)
        error, out = checkify.checkify(jaxpr_as_fun(closed), errors)(*jtu.tree_leaves(leaves))
        return _with_exceptions(error, _located), jtu.tree_unflatten(jtu.tree_structure(shapes), out)

    return run


def _name_check(params: dict[str, Any], traceback: Any) -> dict[str, Any]:
    """The user's own checks carry their exception from where they were traced, as the structure of an error."""
    if "err_tree" not in params:
        return params

    def name(exception: Any) -> Any:
        if scope_of(exception.traceback_info) is None:  # not a check in a function that was checked by itself
            exception.traceback_info = traceback
        return exception

    tree = params["err_tree"]
    error = _with_exceptions(jtu.tree_unflatten(tree, range(tree.num_leaves)), name)
    return {**params, "err_tree": jtu.tree_structure(error)}


def _with_exceptions(error: Any, change: Callable[[Any], Any]) -> Any:
    """An error value with other exceptions: it holds their structures, by number."""
    found = {k: jtu.tree_unflatten(tree, range(tree.num_leaves)) for k, tree in error._metadata.items()}
    return dataclasses.replace(error, _metadata={k: jtu.tree_structure(change(x)) for k, x in found.items()})


def _located(exception: Any) -> Any:
    scope = scope_of(exception.traceback_info)
    if not scope or isinstance(exception, _Located):
        return exception
    children, data = exception.tree_flatten()
    return _located_kind(type(exception)).tree_unflatten((data, scope), children)


class _Located:
    """An exception of ``checkify`` that knows the layer."""

    scope: str


@functools.cache
def _located_kind(kind: Any) -> Any:
    def tree_flatten(self: Any) -> tuple[Any, tuple]:
        children, data = kind.tree_flatten(self)
        return children, (data, self.scope)

    def tree_unflatten(cls: Any, data: tuple, children: Any) -> Any:
        self = kind.tree_unflatten.__func__(cls, data[0], children)
        self.scope = data[1]
        return self

    body = {
        "__module__": kind.__module__,
        "__str__": lambda self: f"{kind.__str__(self)} In {self.scope}",
        "tree_flatten": tree_flatten,
        "tree_unflatten": classmethod(tree_unflatten),
    }
    return type(kind.__name__, (kind, _Located), body)
