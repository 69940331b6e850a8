"""The functions on graphs, under the name that flax.nnx has for them; and those that tell what a value is in a graph.

A :class:`GraphDef` has a row for each object: ``NodeDef`` and ``VariableDef`` are the types of these rows, ``NodeRef``
is what stands for an object in the rows of others.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Generic, TypeVar

import jax.tree_util as jtu

from ..core import filters
from ..core.contexts import *  # noqa: F403
from ..core.data import is_array as is_array
from ..core.data import is_node as is_graph_node
from ..core.errors import format_path
from ..core.filters import PathParts as PathParts
from ..core.graphdef import GraphDef as GraphDef
from ..core.graphstate import GraphState as GraphState
from ..core.iteration import *  # noqa: F403
from ..core.iteration import find_duplicates, recursive_map
from ..core.module import iter_module_children as iter_module_children
from ..core.objects import Node as Node
from ..core.ops import *  # noqa: F403
from ..core.pop import pop as pop
from ..core.rows import NodeRow as NodeDef
from ..core.rows import Ref as NodeRef  # noqa: F401
from ..core.rows import VariableRow as VariableDef
from ..core.state import FlatState as FlatState
from ..core.state import FlatState as GraphFlatState  # noqa: F401
from ..core.state import State as State
from ..core.state import map_state as map_state
from ..core.switches import Switch
from ..core.traversals import Key as Key
from ..core.traversals import path_key as path_key
from ..core.variables import Variable as Variable
from ..transforms.partials import cached_partial as cached_partial

A = TypeVar("A")

TreeNodeDef = NodeDef | VariableDef  # what flax.nnx has for a tree as a whole; here a tree has rows, too


@jtu.register_static
@dataclasses.dataclass(frozen=True)
class Static(Generic[A]):
    """A pytree without leaves around a value that has ``==`` and a hash; ``jax.jit`` compiles once for each value.

    >>> from nnxlib.graphlib import Static
    >>> jax.jit(lambda x, power: x**power.value)(3.0, Static(2)).item(), jax.tree.leaves(Static(2))
    (9.0, [])
    """

    value: A


def is_node_leaf(x: Any, /) -> bool:
    """Whether ``x`` is data: a Variable, or an array.

    >>> nnx.graphlib.is_node_leaf(nnx.Param(1)), nnx.graphlib.is_node_leaf(jnp.ones(2)), nnx.graphlib.is_node_leaf(1)
    (True, True, False)
    """
    return isinstance(x, Variable) or is_array(x)


def is_pytree_node(x: Any, /) -> bool:
    """Whether ``x`` has children for JAX and is not an object of the graph: a list, a dict, a State.

    >>> nnx.graphlib.is_pytree_node([1, 2]), nnx.graphlib.is_pytree_node(nnx.List([1, 2]))
    (True, False)
    """
    return not is_graph_node(x) and not jtu.all_leaves([x])


def is_node(x: Any, /) -> bool:
    """Whether ``x`` may have something in it: an object of the graph that is no Variable, or a pytree.

    >>> nnx.graphlib.is_node(nnx.Rngs(0)), nnx.graphlib.is_node([1, 2]), nnx.graphlib.is_node(nnx.Param(1))
    (True, True, False)
    """
    return is_pytree_node(x) or (is_graph_node(x) and not isinstance(x, Variable))


def is_node_type(x: type, /) -> bool:
    """Whether values of the class ``x`` are nodes: objects of the graph, States, and the pytrees that Python has.

    >>> nnx.graphlib.is_node_type(nnx.Linear), nnx.graphlib.is_node_type(nnx.Param), nnx.graphlib.is_node_type(list)
    (True, False, True)
    """
    return x in (list, tuple, dict, State, type(None)) or issubclass(x, Node)


def jax_to_nnx_path(jax_path: tuple, /) -> PathParts:
    """Turn a key path of JAX into a path of plain keys.

    >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({'a': [7]})
    >>> nnx.graphlib.jax_to_nnx_path(path)
    ('a', 0)
    """
    return tuple([path_key(entry) for entry in jax_path])


class set_graph_mode(Switch):
    """Whether calls that do not say otherwise are in graph mode; where it is not set, see ``flax.config``.

    >>> from nnxlib.compat import flax as nnx
    >>> with nnx.set_graph_mode(False):
    ...   nnx.set_graph_mode.current_value()
    False
    """

    _flag = "nnx_graph_mode"


class set_graph_updates(Switch):
    """Whether transforms that do not say otherwise carry changes of structure; asked when a transform is made.

    >>> from nnxlib.compat import flax as nnx
    >>> with nnx.set_graph_updates(False):
    ...   attach = nnx.jit(lambda model: model.update(seen=jnp.ones(())))
    >>> model = nnx.Dict()
    >>> attach(model)
    >>> len(model)
    0
    """

    _flag = "nnx_graph_updates"


def with_vars(
    node: Any,
    /,
    *,
    hijax: bool | None = None,
    ref: bool | None = None,
    mutable: bool | None = None,
    only: filters.Filter = ...,
    allow_duplicates: bool = False,
) -> Any:
    """Return a copy of ``node`` in which the Variables that the filter takes have these settings.

    Variables that have them already, and those that the filter does not take, are not copied. ``mutable`` has no
    effect: a Variable can always be written.

    >>> from nnxlib.compat import flax as nnx
    >>> nnx.with_vars(nnx.Dict(w=nnx.Param(1.0)), ref=True)['w'].ref
    True

    Raises:
      ValueError: for a Variable with two paths that would be copied, unless ``allow_duplicates``.
    """
    asked = {kind: x for kind, x in {"hijax": hijax, "ref": ref}.items() if x is not None}
    predicate = filters.to_predicate(only)

    def is_taken(path: tuple, x: Any) -> bool:
        return isinstance(x, Variable) and predicate(path, x)

    def changed(path: tuple, x: Any) -> Any:
        now = {kind: bool(x.get_metadata(kind, False)) for kind in asked} if is_taken(path, x) else asked
        return x if now == asked else x.copy(**asked)

    if isinstance(node, State):
        return map_state(changed, node)
    for paths in () if allow_duplicates else find_duplicates(node, only=is_taken):
        raise ValueError(
            f"Found duplicate at paths {', '.join([format_path(path) for path in paths])}: a copy would be another "
            "Variable. Pass allow_duplicates=True to make one copy for all of them."
        )
    return recursive_map(changed, node)


vars_as = with_vars


def __getattr__(name: str) -> Any:  # in flax 0.12.5 the functions of its later `compat` were here
    compat = importlib.import_module("..compat", __package__)
    if name in compat.IN_GRAPH_MODE:
        return getattr(compat, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
