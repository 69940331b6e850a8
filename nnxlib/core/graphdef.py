"""GraphDef: the static half of a model, as a value that can be compared, hashed, printed, pickled and diffed.

It wraps an interned :class:`~nnxlib.core.layout.Layout`. It also has the avals (shapes and dtypes) that the leaves had
when the model was split. These do not count when GraphDefs are compared (a model cast to bfloat16 has an equal one);
they only serve to refuse a State that does not fit.
"""

from __future__ import annotations

import itertools
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from os.path import basename
from typing import Any, Generic

import jax
import numpy as np

from .differences import Aval, Difference, as_change, aval_of
from .errors import format_path
from .generics import A
from .graph import build
from .layout import Layout
from .registration import exportable
from .reprs import Group, Leaf, node_group, read, static_repr, write
from .rows import LEAF, BoundMethod, NodeRow, Ref, Row, Spec, Tree, VariableRow, same_node, same_treedef
from .static import Const
from .tracing import at_top_level


@exportable
@jax.tree_util.register_static
class GraphDef(Generic[A]):
    """The structure of an object graph: classes, static values, sharing, and the metadata of Variables.

    >>> import nnxlib as nnx, jax
    >>> layer = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
    >>> graphdef, state = nnx.split(layer)
    >>> graphdef == nnx.graphdef(nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(1)))
    True
    """

    __slots__ = ("__weakref__", "avals", "layout")

    layout: Layout
    avals: list[Aval]  # the (shape, dtype) of each leaf when the model was split, None if it had none

    def __init__(self, layout: Layout, avals: list[Aval]):
        self.layout, self.avals = layout, avals

    @property
    def type(self) -> type:
        """The class of the object, or of the pytree around objects, that this describes."""
        spec = self.layout.root
        return self.layout.rows[spec.index].type if isinstance(spec, Ref) else type(self.unflatten(self.avals))

    @property
    def nodes(self) -> tuple[Row, ...]:
        """A row for each node and Variable, in the order in which they are first met."""
        return self.layout.rows

    @property
    def num_leaves(self) -> int:
        """The number of Variables, and of arrays that are not in one."""
        return len(self.layout.leaf_paths)

    def unflatten(self, leaves: Sequence[Any]) -> A:
        """Make the object anew from its leaves, in the order of ``layout.leaf_paths``."""
        return build(self.layout, leaves)[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphDef) and self.layout is other.layout

    def __hash__(self) -> int:
        return hash(self.layout)

    def __reduce__(self) -> tuple:
        return GraphDef, (self.layout, self.avals)

    def __repr__(self) -> str:
        return f"GraphDef(\n{textwrap.indent(render(self.layout), '  ')}\n)"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from .treescope_repr import render_outline  # only when first displayed: importing Treescope takes long

        return render_outline("GraphDef(", [read(self.layout.root, _expander(self.layout))], ")")


def avals_of(values: Sequence[Any]) -> list[Aval]:
    """:func:`aval_of` of each value."""
    try:
        return list(map(_shape_and_dtype, values))  # four times as fast, if all are arrays
    except AttributeError:
        return list(map(aval_of, values))


class Avals(list[Aval]):
    """The avals of leaves, with a fast test whether other leaves have the same.

    JAX has one type object for each shape and dtype, by which its arrays are compared. Other leaves are compared by
    shape and dtype; so are typed keys, for which JAX makes a new type object each time, which is slow.
    """

    __slots__ = ("_by_type", "_others", "_types")

    def __init__(self, leaves: Sequence[Any]):
        super().__init__(avals_of(leaves))
        self._by_type = [
            aval is not None and isinstance(aval[1], np.dtype) and isinstance(x, jax.Array)
            for x, aval in zip(leaves, self, strict=True)
        ]
        self._others = [k for k, by_type in enumerate(self._by_type) if not by_type]
        self._types = list(map(_type_of, self._with_types(leaves)))

    def _with_types(self, leaves: Sequence[Any]) -> Iterable[Any]:
        return itertools.compress(leaves, self._by_type) if self._others else leaves

    def fit(self, leaves: Sequence[Any]) -> bool:
        """Whether these leaves certainly have the same avals; if not, they may still be equal."""
        if len(leaves) != len(self) or any(aval_of(leaves[k]) != self[k] for k in self._others):
            return False
        try:
            return all(map(operator.is_, map(_type_of, self._with_types(leaves)), self._types))
        except AttributeError:
            return False

    def __reduce__(self) -> tuple:
        return list, (list(self),)


def graphdef_of(layout: Layout, leaves: list[Any]) -> GraphDef:
    """A GraphDef; at top level with the avals of the leaves (in a trace they may be those of one example or shard)."""
    if not at_top_level():
        return GraphDef(layout, [None] * len(leaves))
    avals = layout.avals
    if avals is None or not avals.fit(leaves):
        avals = layout.avals = Avals(leaves)
    return GraphDef(layout, avals)


_type_of = operator.attrgetter("aval")
_shape_and_dtype = operator.attrgetter("shape", "dtype")


def render(layout: Layout) -> str:
    """The text for a layout: the object that it describes, without values."""
    return write(layout.root, _expander(layout))


def _expander(layout: Layout) -> Callable[[Spec], Leaf | Group]:
    def expand(spec: Spec) -> Leaf | Group:
        if isinstance(spec, Tree):
            items = spec.at(())
            children = [(f"{format_path(keys)}: ", keys[0] if len(keys) == 1 else keys, x) for keys, x in items]
            return Group(f"{_head(spec)}(", children, ")")
        if not isinstance(spec, Ref):
            return Leaf(_head(spec), "Array" if spec is LEAF else None)
        row = layout.rows[spec.index]
        if isinstance(row, VariableRow):
            return Leaf(_head(row), row.type.__name__, identity=spec.index)
        fields = dict(row.fields)
        return node_group(row.type, [(name, fields[name]) for name in row.names], spec.index)

    return expand


def _head(item: VariableRow | Spec) -> str:
    if isinstance(item, VariableRow):
        metadata = ", ".join(f"{k}={static_repr(v)}" for k, v in item.metadata.value.items())
        return f"{item.type.__name__}({metadata})"
    if isinstance(item, Tree):
        return f"pytree {_tree_text(item.treedef)}"
    return "array" if item is LEAF else static_repr(item.value) if isinstance(item, Const) else repr(item)


def _tree_text(treedef: Any) -> str:
    """Write a treedef by the classes in it: ``(ScaleByAdamState, EmptyState)``, ``{'a': *, 'b': (*, *)}``."""
    if isinstance(treedef, BoundMethod):
        return f"method {treedef.function.__name__}"
    data = treedef.node_data()
    if data is None:
        return "*"
    kind, keys = data
    children = list(map(_tree_text, treedef.children()))
    if kind is dict:
        return f"{{{', '.join(f'{key!r}: {x}' for key, x in zip(keys, children, strict=True))}}}"
    if kind in (tuple, list):
        return f"[{', '.join(children)}]" if kind is list else f"({', '.join(children)})"
    return "None" if kind is type(None) else kind.__name__


def differences_listed(a: Layout, b: Layout) -> list[str]:
    """A line for each place where two layouts differ, for a message."""
    return list(map(as_change, structural_differences(a, b)))


def structural_differences(a: Layout, b: Layout) -> Iterator[Difference]:
    """Yield each place where two layouts differ, parents first.

    The kinds: ``added``, ``removed``, ``type`` (another class, or a value of another nature), ``static``, ``metadata``,
    ``sharing`` (one object became two, or two one), ``declaration`` (data or static) and ``order`` of attributes.
    """
    seen: set[tuple[int, int]] = set()
    stack: list[tuple[tuple, Any, Any]] = [((), a.root, b.root)]
    while stack:
        path, x, y = stack.pop()
        if x is None or y is None:
            kind = "added" if x is None else "removed"
            yield Difference(path, kind, describe_spec(x, a), describe_spec(y, b))
            continue
        if isinstance(x, Ref) and isinstance(y, Ref):
            if (x.index, y.index) in seen:
                continue
            if a.paths[x.index] != b.paths[y.index]:  # they are shared with objects at other paths
                yield Difference(path, "sharing", describe_spec(x, a), describe_spec(y, b))
                continue
            seen.add((x.index, y.index))
            p, q = a.rows[x.index], b.rows[y.index]
            yield from _row_differences(path, p, q)
            if isinstance(p, NodeRow) and isinstance(q, NodeRow) and p.type is q.type:
                f, g = dict(p.fields), dict(q.fields)
                stack.extend(((*path, name), f.get(name), g.get(name)) for name in reversed({**f, **g}))
        elif isinstance(x, Tree) and isinstance(y, Tree) and _may_be_compared(x, y):
            c, d = (dict(zip(tree.paths, tree.children, strict=True)) for tree in (x, y))
            stack.extend(((*path, *key), c.get(key), d.get(key)) for key in reversed({**c, **d}))
        elif isinstance(x, Tree) and isinstance(y, Tree):
            for keys, before, after in differing_pytrees(x.treedef, y.treedef, x.paths):
                yield Difference((*path, *keys), "type", before, after)
        elif x != y:
            kind = "static" if isinstance(x, Const) and isinstance(y, Const) else "type"
            before, after = describe_spec(x, a), describe_spec(y, b)
            yield Difference(path, kind, before, after if after != before else _another(y))


def _may_be_compared(x: Tree, y: Tree) -> bool:
    """Whether two pytrees are compared by their children: they have one structure, or one lacks some of the other's."""
    before, after = set(x.paths), set(y.paths)
    lacks_some = before != after and (not before or not after or not before.isdisjoint(after))
    return lacks_some or same_treedef(x.treedef, y.treedef)


def differing_pytrees(a: Any, b: Any, paths: Sequence[tuple], depth: int = 0) -> Iterator[tuple[tuple, str, str]]:
    """Yield the path, and both texts, of each of the innermost pytrees in which two treedefs differ.

    The leaves of the first have these ``paths``, whose first ``depth`` keys lead to it.
    """
    children = ([], []) if BoundMethod in (type(a), type(b)) else (a.children(), b.children())
    starts = [0, *itertools.accumulate(child.num_leaves for child in children[0])]
    ranges = zip(*children, starts, starts[1:], strict=False)
    below = [(c, d, paths[i:k]) for c, d, i, k in ranges if not same_treedef(c, d)]
    have_paths = below and all(more and c.node_data() and d.node_data() for c, d, more in below)
    if have_paths and len(children[0]) == len(children[1]) and same_node(a.node_data(), b.node_data()):
        for c, d, more in below:
            yield from differing_pytrees(c, d, more, depth + 1)
    else:
        before, after = f"pytree {_tree_text(a)}", f"pytree {_tree_text(b)}"
        yield paths[0][:depth] if paths else (), before, after if after != before else "another structure"


def _row_differences(path: tuple, p: Row, q: Row) -> Iterator[Difference]:
    """The differences of two objects, apart from what is in their fields."""
    if p.type is not q.type:
        before, after = p.type.__name__, q.type.__name__
        yield Difference(path, "type", before, after if after != before else f"{ANOTHER} class {after}")
    elif isinstance(p, VariableRow) and isinstance(q, VariableRow):
        if p.metadata != q.metadata:
            yield Difference(path, "metadata", _head(p), _head(q))
    elif isinstance(p, NodeRow) and isinstance(q, NodeRow):
        if p.marks != q.marks:
            yield Difference(path, "declaration", f"declarations {p.marks}", f"declarations {q.marks}")
        if p.names != q.names and set(p.names) == set(q.names):
            before, after = f"attributes in the order {list(p.names)}", f"in the order {list(q.names)}"
            yield Difference(path, "order", before, after)


def describe_spec(spec: Spec | None, layout: Layout) -> str:
    """Write a spec, for a message: of an object its class and first path; None stands for nothing."""
    if spec is None:
        return "nothing"
    if isinstance(spec, Ref):
        row, first = layout.rows[spec.index], format_path(layout.paths[spec.index])
        return f"{row.type.__name__} ({first})"
    if isinstance(spec, Const):
        where = type(spec.value).__name__
        if callable(spec.value):
            name, code = getattr(spec.value, "__qualname__", "<"), getattr(spec.value, "__code__", None)
            if "<" not in name:
                return name
            where = where if code is None else f"{basename(code.co_filename)}:{code.co_firstlineno}"
        return f"{static_repr(spec.value)} ({where})"
    return _head(spec)


def _another(spec: Spec) -> str:
    """The text for a value that differs from another one with the same text."""
    return f"{ANOTHER} {type(spec.value).__name__ if isinstance(spec, Const) else 'structure'}"


ANOTHER = "another"  # how that text begins
