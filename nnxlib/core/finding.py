"""Finding objects without a table: everything below an object, and the path by which running code reaches one.

The search knows of nodes and Variables only what they have in common (identity.py), so that their files can use it for
messages. When a write is refused, the frames also tell which transform to use instead.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, MappingProxyType, MethodType
from typing import Any

import jax

from .errors import PathError, format_path
from .identity import Identified
from .tracing import NOTHING_RUNS, enclosing_transform, is_users
from .traversals import path_key, sorted_keys


def locate(target: Any, skip: int = 1) -> str | None:
    """Find the path by which the running code reaches ``target``, for an error message.

    The objects in the local variables of the calling frames, the user's first, outermost first, are searched along
    their ``_nnx_children()``; names that begin with an underscore, as those of a notebook's outputs do, come last, and
    then the user's containers. Only ever called when an error is about to be raised: it costs a walk of those objects.
    """
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(skip))][::-1]
    own = [frame for frame in frames if is_users(frame.f_code.co_filename)]
    others = [frame for frame in frames if not is_users(frame.f_code.co_filename)]
    nodes = [(name, value) for name, value in _variables_of(own + others) if issubclass(type(value), Identified)]
    containers = [(name, value) for name, value in _variables_of(own) if type(value) in (list, tuple, dict)]
    seen: set[int] = set()
    for name, value in (*nodes, *containers):
        for path, node in reachable(value, seen):
            if node is target and (path or name != "self"):
                return format_path(path, type(value).__name__ if name == "self" else name)
    return None


def _variables_of(frames: Iterable[FrameType]) -> list[tuple[str, Any]]:
    """The local variables of these frames, by name."""
    found = [item for frame in frames for item in list(frame.f_locals.items()) if item[0].isidentifier()]
    return sorted(found, key=lambda item: item[0].startswith("_"))


def how_to_pass(what: str) -> str:
    """How the transform that is running could carry out a change of an object, for an error message."""
    transform, packages = enclosing_transform()
    if packages and transform not in (None, "jax"):
        return _IN_A_PACKAGE.format(what=what, raw=transform, packages=" and ".join(packages))
    if transform == "nnx":
        return _FURTHER_ARGUMENT.format(what=what)
    if transform in (None, "jax"):
        return _IN_PLACE_OF_JIT.format(what=what)
    name = transform.rpartition(".")[2]
    lifted = "nnx.remat" if name == "checkpoint" else f"nnx.{name}"
    fate = "discarded, for nothing is computed" if transform in NOTHING_RUNS else "carried out"
    return _IN_PLACE_OF.format(what=what, raw=transform, lifted=lifted, fate=fate)


_FURTHER_ARGUMENT = """\
Pass {what} as a further argument: only nnx.jit carries out changes of what its function closes over.

    nnx.grad(lambda model: loss(model, other))(model)    # changes `other`, which is closed over: refused
    nnx.grad(loss)(model, other)                         # allowed; the gradient is that of the first argument alone"""

_IN_PLACE_OF = """\
Use {lifted} in place of {raw}, and pass it {what} as an argument: changes of arguments are {fate}."""

_IN_A_PACKAGE = """\
It runs under {raw}, called through {packages}, which carries out no changes of objects. What is to change has to be \
passed on as values: nnx.split {what} beforehand, and return the new State."""

_IN_PLACE_OF_JIT = """\
Pass {what} as an argument of the transformed function and use the nnxlib transform, which carries changes out:

    jax.jit(lambda x: model(x))(x)            # writes to a closed-over model: refused
    nnx.jit(lambda model, x: model(x))(model, x)    # the change is part of the result"""


def reachable(
    root: Any, seen: set[int], known: Mapping[int, tuple] = MappingProxyType({})
) -> Iterator[tuple[tuple, Any]]:
    """Everything below ``root`` with its first path, in the order of the paths of a State.

    ``known`` gives paths to some objects by their ids, for example to ``root`` if it is not at ``()``.
    """
    stack: list[tuple[tuple, Any]] = [((), root)]
    while stack:
        path, value = stack.pop()
        if id(value) in seen:
            continue
        if issubclass(type(value), Identified):
            path = known.get(id(value), path)
            seen.add(id(value))
            yield path, value
            items = [((key,), child) for key, child in value._nnx_children()]
            below = items if isinstance(value, list) else _in_order(items)
        elif type(value) in (list, tuple, dict):
            seen.add(id(value))  # a local list may contain itself
            keyed = list(value.items() if type(value) is dict else enumerate(value))
            below = [((key,), child) for key, child in keyed]
        elif type(value) is MethodType:
            below = [((), value.__self__)]
        else:
            below = _in_pytree(value)
        stack.extend(((*path, *keys), child) for keys, child in reversed(below))


def _in_order(items: list[tuple[tuple, Any]]) -> list[tuple[tuple, Any]]:
    """The children of a node in the order of paths; unsorted if the keys have no order."""
    children = {keys[0]: (keys, child) for keys, child in items}
    try:
        return [children[key] for key in sorted_keys(children)]
    except PathError:
        return items


def _in_pytree(value: Any) -> list[tuple[tuple, Any]]:
    """The nodes and Variables in a pytree of another kind."""
    if jax.tree_util.all_leaves([value]):
        return []
    keyed, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: issubclass(type(x), Identified))
    return [(tuple(map(path_key, keys)), x) for keys, x in keyed if issubclass(type(x), Identified)]
