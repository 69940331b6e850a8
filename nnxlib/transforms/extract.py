"""Trees of arrays from trees of Modules, and back: for users who write their own transforms on top of plain JAX.

:func:`to_tree` replaces each Module and Variable of a pytree by a :class:`NodeStates` (a GraphDef and States, a JAX
pytree); :func:`from_tree` is the inverse. All Modules of one tree are split in one context (core/contexts.py), so what
they share stays shared. With the tag of an update, changes are carried back to the original objects;
:func:`split_inputs` and :func:`merge_inputs` do that for the arguments of a function.

The transforms of nnxlib do not use this. :func:`nnxlib.lift` makes a transform from a JAX one in a line.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax.tree_util as jtu

from ..core.contexts import MergeContext, SplitContext, merge_context, split_context, update_context
from ..core.data import is_node
from ..core.errors import UsageError
from ..core.graphdef import GraphDef
from ..core.missing import MISSING
from ..core.rows import Ref, Tree, children
from ..core.walk import Walk
from .labels import Labelling
from .prefixes import TreeState as TreeState
from .prefixes import broadcast_prefix

KeyPath = tuple[Hashable, ...]


@functools.partial(jtu.register_dataclass, data_fields=["_graphdef", "states"], meta_fields=["metadata"])
@dataclasses.dataclass(frozen=True, eq=False)
class NodeStates:
    """What replaces an object in a tree: its GraphDef, its States, and static metadata.

    As a pytree its children are the GraphDef, which is static, and the States; ``metadata`` must be comparable and
    hashable. Without a GraphDef it can be a prefix of one with a GraphDef.

    >>> import nnxlib as nnx
    >>> node = nnx.NodeStates.from_split(*nnx.split(nnx.Param(1.0)), metadata='axis 0')
    >>> node.state, node.metadata
    (Param(1.0), 'axis 0')
    """

    _graphdef: GraphDef[Any] | None
    states: tuple[Any, ...]
    metadata: Any = None

    @classmethod
    def from_split(
        cls, graphdef: GraphDef[Any] | None, state: Any, /, *states: Any, metadata: Any = None
    ) -> NodeStates:
        """Make one from what a split has returned."""
        return cls(graphdef, (state, *states), metadata)

    @classmethod
    def from_states(cls, state: Any, *states: Any) -> NodeStates:
        """Make one of States alone."""
        return cls(None, (state, *states))

    @classmethod
    def from_prefixes(cls, prefixes: Iterable[Any], /, *, metadata: Any = None) -> NodeStates:
        """Make one that is a prefix of others, with an entry for each of their States: for ``in_axes``, say."""
        return cls(None, tuple(prefixes), metadata)

    @property
    def graphdef(self) -> GraphDef[Any]:
        """The GraphDef.

        Raises:
          ValueError: if there is none.
        """
        if self._graphdef is None:
            raise UsageError("No graphdef available: this NodeStates was made from States or prefixes alone.")
        return self._graphdef

    @property
    def state(self) -> Any:
        """The State, if there is exactly one.

        Raises:
          ValueError: if there are several.
        """
        if len(self.states) != 1:
            raise UsageError(f"Expected exactly one State, got {len(self.states)}; use `states`.")
        return self.states[0]

    def replace(self, **updates: Any) -> NodeStates:
        """Return a copy with other ``states`` or ``metadata``."""
        return dataclasses.replace(self, **updates)


def default_split_fn(ctx: SplitContext, path: KeyPath, prefix: Any, leaf: Any) -> NodeStates:
    """Split an object into its GraphDef and one State."""
    return NodeStates.from_split(*ctx.split(leaf))


def merge_tree_node(ctx: MergeContext, path: KeyPath, prefix: Any, leaf: Any) -> Any:
    """Merge a :class:`nnxlib.NodeStates`.

    Raises:
      ValueError: for anything else.
    """
    if not isinstance(leaf, NodeStates):
        raise UsageError(
            f"Expected a NodeStates at {jtu.keystr(path) or '<root>'}, got a {type(leaf).__name__}. Leave out "
            "map_non_graph_nodes=True, or pass a merge_fn that takes it."
        )
    return ctx.merge(leaf.graphdef, *leaf.states)


def is_tree_node(x: Any) -> bool:
    """Whether this stands for an object in a tree."""
    return isinstance(x, NodeStates)


def clear_non_graph_nodes(tree: Any) -> Any:
    """Return a pytree with None for everything that is neither a Module, another node, nor a Variable."""
    return jtu.tree_map(lambda x: x if is_node(x) else None, tree, is_leaf=is_node)


def to_tree(
    tree: Any,
    /,
    *,
    prefix: Any = MISSING,
    split_fn: Callable[[SplitContext, KeyPath, Any, Any], Any] = default_split_fn,
    map_non_graph_nodes: bool = False,
    ctxtag: Hashable | None = None,
    check_aliasing: bool = True,
) -> Any:
    """Replace each Module and Variable of a pytree by its GraphDef and States.

    Args:
      tree: any pytree.
      prefix: a pytree prefix of ``tree``, such as ``in_axes``.
      split_fn: ``split_fn(ctx, path, prefix, node)`` returns what is to stand for a node; it gets the JAX key path of
        the node and the entry of ``prefix`` for it, and may use ``ctx.split(node, *filters)``.
      map_non_graph_nodes: whether ``split_fn`` is called for the other leaves too.
      ctxtag: the tag of an open :func:`nnxlib.update_context`.
      check_aliasing: whether to check that a shared object has the same prefix wherever it occurs.

    >>> import nnxlib as nnx, jax
    >>> param = nnx.Param(1.0)
    >>> tree = nnx.to_tree((param, [param, 2.0]))
    >>> jax.tree.leaves(tree)
    [1.0, 2.0]
    >>> a, (b, two) = nnx.from_tree(tree)
    >>> a is b, a is param
    (True, False)

    Raises:
      AliasingError: for a shared object with two prefixes; names both paths.
      PrefixError: if ``prefix`` does not fit.
    """
    keyed, structure = jtu.tree_flatten_with_path(tree, is_leaf=is_node)
    prefixes = broadcast_prefix(prefix, tree, "prefix")
    if prefix is not MISSING and check_aliasing:
        check_consistent_aliasing(tree, prefixes)
    with split_context(ctxtag) as ctx:
        leaves = [
            split_fn(ctx, path, label, leaf) if map_non_graph_nodes or is_node(leaf) else leaf
            for (path, leaf), label in zip(keyed, prefixes, strict=True)
        ]
    return structure.unflatten(leaves)


def from_tree(
    tree: Any,
    /,
    *,
    prefix: Any = MISSING,
    merge_fn: Callable[[MergeContext, KeyPath, Any, Any], Any] = merge_tree_node,
    is_node_leaf: Callable[[Any], bool] = is_tree_node,
    is_leaf: Callable[[Any], bool] = is_tree_node,
    map_non_graph_nodes: bool = False,
    is_inner: bool | None = None,
    ctxtag: Hashable | None = None,
) -> Any:
    """Replace each :class:`NodeStates` of a tree by the object that it stands for: the inverse of :func:`to_tree`.

    Args:
      tree: what :func:`to_tree` returned, or a JAX transformation of it.
      prefix: a pytree prefix of ``tree``, such as ``out_axes``.
      merge_fn: ``merge_fn(ctx, path, prefix, leaf)`` returns the object; it may use ``ctx.merge(graphdef, *states)``.
      is_node_leaf: which leaves ``merge_fn`` is called for.
      is_leaf: what is a leaf of ``tree``.
      map_non_graph_nodes: whether ``merge_fn`` is called for the other leaves too.
      is_inner: with ``ctxtag``: whether this is inside of the transformation.
      ctxtag: the tag of an open :func:`nnxlib.update_context`.

    >>> import nnxlib as nnx, jax
    >>> tree = nnx.to_tree({'a': nnx.Param(1.0)})
    >>> nnx.from_tree(jax.tree.map(lambda x: 2 * x, tree))
    {'a': Param(2.0)}

    Raises:
      PrefixError: if ``prefix`` does not fit.
    """
    keyed, structure = jtu.tree_flatten_with_path(tree, is_leaf=is_leaf)
    prefixes = [MISSING] * len(keyed)
    if prefix is not MISSING:
        prefixes = broadcast_prefix(prefix, structure.unflatten(range(len(keyed))), "prefix")
    with merge_context(ctxtag, is_inner) as ctx:
        leaves = [
            merge_fn(ctx, path, label, leaf) if map_non_graph_nodes or is_node_leaf(leaf) else leaf
            for (path, leaf), label in zip(keyed, prefixes, strict=True)
        ]
    return structure.unflatten(leaves)


def split_inputs(f: Callable = MISSING, *, ctxtag: Hashable = "split_merge_inputs") -> Callable:
    """Let a function that was transformed by plain JAX take Modules; what it changes is written to them.

    The function inside must be wrapped by :func:`merge_inputs`, which returns ``(arguments, output)``. Options of the
    transformation for outputs, such as ``out_axes``, must be given for such a pair.

    Args:
      f: the transformed function, or one that takes functions and their arguments, such as ``jax.lax.cond``.
      ctxtag: the same tag as for :func:`merge_inputs`.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> @nnx.split_inputs
    ... @jax.jit
    ... @nnx.merge_inputs
    ... def forget(layer, x):
    ...   y = layer(x)
    ...   layer.kernel *= 0
    ...   return y
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> forget(layer, jnp.ones((1, 2))).shape, layer.kernel.sum().item()
    ((1, 3), 0.0)
    """
    if f is MISSING:
        return functools.partial(split_inputs, ctxtag=ctxtag)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any) -> Any:
        with update_context(ctxtag):
            returned = f(*to_tree(args, ctxtag=ctxtag))
            return from_tree(returned, ctxtag=ctxtag, is_inner=False)[1]

    return wrapped


def merge_inputs(f: Callable = MISSING, *, ctxtag: Hashable = "split_merge_inputs") -> Callable:
    """Let a function of Modules take what :func:`split_inputs` passes; it returns ``(arguments, output)`` in that form.

    Arguments that are not objects come back as None. There is an example at :func:`split_inputs`.
    """
    if f is MISSING:
        return functools.partial(merge_inputs, ctxtag=ctxtag)

    @functools.wraps(f, updated=())
    def wrapped(*args: Any) -> Any:
        merged = from_tree(args, ctxtag=ctxtag, is_inner=True)
        out = f(*merged)
        return to_tree((clear_non_graph_nodes(merged), out), ctxtag=ctxtag)

    return wrapped


def check_consistent_aliasing(tree: Any, prefixes: Sequence[Any]) -> None:
    """Check that each object of a tree has one prefix, given the prefix of each node and leaf of the tree.

    Raises:
      AliasingError: naming both paths and both prefixes.
    """
    walk = Walk()
    root = walk.run(tree)
    labelling = Labelling(walk.all_rows(), walk.values_of)
    for (path, spec), prefix in zip(children(root), prefixes, strict=True):
        if isinstance(spec, Ref):
            labelling.visit(Tree(None, (path,), (spec,)), [prefix], (), len(path))
