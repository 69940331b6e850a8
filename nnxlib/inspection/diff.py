"""``diff``: what differs between two models, States or GraphDefs.

Structure is compared as the engine sees it (``core/graphdef.py``), leaves by path: type, metadata, shape, dtype,
and the values of those that are concrete. The result is a value: false if there is no difference, a sequence of
:class:`Difference`, and a table when it is shown.
"""

from __future__ import annotations

import functools
import html
import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.data import is_node
from ..core.differences import Difference, array_differences, aval_of, leaf_differences
from ..core.errors import ArgumentError, Path, describe, format_path
from ..core.graph import Packed, by_path, pack
from ..core.graphdef import GraphDef, structural_differences
from ..core.graphstate import GraphState
from ..core.objects import Node
from ..core.reprs import static_repr
from ..core.state import FlatState, State
from ..core.static import same_items
from ..core.tracing import Tracer, bits_of, is_key
from ..core.traversals import flatten_mapping, sorted_by_path
from ..core.variables import Variable
from .entries import Entries, values_of
from .grid import MOST_ROWS, draw_table
from .svg import Picture


class Diff(Entries[Difference]):
    """What :func:`diff` returns: the differences in the order of the paths; false if there are none.

    Each has a ``path``, a ``kind``, and how it was ``before`` and is ``after``, as text. The kinds are those of
    structure (``added``, ``removed``, ``type``, ``static``, ``sharing``, ``declaration``, ``order``), ``metadata``,
    ``shape``, ``dtype`` and ``value``.

    >>> import nnxlib as nnx
    >>> found = nnx.diff(nnx.Dict(rate=0.1), nnx.Dict(rate=0.2))
    >>> [(x.path, x.kind) for x in found]
    [(('rate',), 'static')]
    """

    def _rows(self) -> list[tuple[str, ...]]:
        return [(format_path(x.path), x.kind, _line(x.before), _line(x.after)) for x in self]

    def __repr__(self) -> str:
        if not self:
            return "no differences"
        return self._text([_HEADER, *self._rows()[:MOST_ROWS]])

    def _nnx_picture(self) -> Picture:
        rows = [_HEADER, *self._rows()[:MOST_ROWS]] if self else [("no differences",)]
        colours = {i: _COLOURS.get(x.kind, "type") for i, x in enumerate(self[:MOST_ROWS], 1)}
        kinds = {(i, j): ("name", colour, "dim", "")[j] for i, colour in colours.items() for j in range(4)}
        more = f"… and {len(self) - MOST_ROWS} more" if len(self) > MOST_ROWS else ""
        return draw_table("differences", rows, kinds, footer=more)

    def _repr_html_(self) -> str:
        if not self:
            return "<p>no differences</p>"

        def row(tag: str, cells: Sequence[str]) -> str:
            return f"<tr>{''.join(f'<{tag} {_STYLE}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        body = "".join(row("td", cells) for cells in self._rows())
        return f"<table><thead>{row('th', _HEADER)}</thead><tbody>{body}</tbody></table>"


_HEADER = ("path", "kind", "before", "after")
_STYLE = 'style="text-align:left;padding:2px 10px;font-family:monospace"'
_LONGEST = 60
_COLOURS = {"added": "good", "removed": "bad"}


def _line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def diff(a: Any, b: Any, /, *, rtol: float = 0.0, atol: float = 0.0) -> Diff:
    """Return what differs between two models, States or GraphDefs, of which neither has to be concrete.

    Models and pytrees of Modules are compared in structure and leaves, two States in leaves, and whatever is compared
    with a GraphDef in structure and shapes. A model compared with a State is taken as its State.

    Args:
      a: what was before: a Module, State, FlatState, GraphDef, GraphState, or pytree of Modules and arrays.
      b: what is after.
      rtol: values may differ by so much, relative to ``b``, and
      atol: by so much more. NaNs in the same place are equal. Arrays that are traced, abstract or deleted have no
        values to compare. Of an array whose parts are in several processes, each compares those that it has.

    Returns:
      A :class:`Diff`, which is false if there is no difference; a sequence of entries ``(path, kind, before, after)``;
      and a table, as text and, in a notebook, in HTML.

    >>> import nnxlib as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> other = nnx.clone(model)
    >>> bool(nnx.diff(model, other))
    False
    >>> other.bias[1] = 0.5
    >>> other.kernel.value = jnp.ones((3, 3))
    >>> print(nnx.diff(model, other))
    path    kind   before      after
    bias    value  float32[3]  1 of 3 differ, by 0.5 at [1] at most
    kernel  shape  (2, 3)      (3, 3)

    Raises:
      ArgumentError: if there is nothing in ``a`` or ``b`` that could be compared.
    """
    compare = functools.partial(_compare_values, rtol=rtol, atol=atol)
    if isinstance(a, GraphDef) or isinstance(b, GraphDef):
        a, b = _graphdef(a), _graphdef(b)
        layout, other = a.layout, b.layout
        leaves, others = ([_NO_ARRAY if y is None else jax.ShapeDtypeStruct(*y) for y in x.avals] for x in (a, b))
    elif _is_state(a) or _is_state(b):
        before, after = _leaves(a), _leaves(b)
        return _sorted(_metadata_differences(before, after), leaf_differences(before, after, compare))
    else:
        (layout, leaves, _), (other, others, _) = _packed(a), _packed(b)
    before = dict(zip(layout.leaf_paths, leaves, strict=True))
    after = dict(zip(other.leaf_paths, others, strict=True))
    found = leaf_differences(_common(before, after), _common(after, before), compare)
    return _sorted(structural_differences(layout, other), found)


_NO_ARRAY = type("no array", (), {"__doc__": "What a GraphDef has instead, in a table."})()


# --- what is compared -----------------------------------------------------------------------------------------------


def _is_state(x: Any) -> bool:
    if isinstance(x, State | FlatState | GraphState):
        return True
    if not isinstance(x, Mapping):
        return False
    return not any(isinstance(y, Node) for y in jax.tree.leaves(x, is_leaf=is_node))


def _packed(x: Any) -> Packed:
    packed = pack(x)
    if not packed.layout.rows and not any(map(aval_of, packed.leaves)):
        raise ArgumentError(
            "nnx.diff compares Modules, States and GraphDefs, and there is nothing of the kind in a "
            f"{type(x).__name__}."
        )
    return packed


def _graphdef(x: Any) -> GraphDef:
    if isinstance(x, GraphDef):
        return x
    if isinstance(x, GraphState):
        return x._graphdef
    if isinstance(x, State | FlatState):
        raise ArgumentError("nnx.diff compares a GraphDef with another one, or with a model; a State has no structure.")
    packed = _packed(x)
    return GraphDef(packed.layout, list(map(aval_of, packed.leaves)))


def _leaves(x: Any) -> dict[Path, Any]:
    """The leaves of a State, or of what can be compared with one, by path."""
    if isinstance(x, GraphState):
        x = x._state
    if isinstance(x, FlatState):
        return dict(x)
    return flatten_mapping(x) if _is_state(x) else dict(by_path(_packed(x)))


def _common(these: dict[Path, Any], those: Collection[Path]) -> dict[Path, Any]:
    return {path: x for path, x in these.items() if path in those}


def _sorted(*groups: Iterable[Difference]) -> Diff:
    return Diff(sorted_by_path(itertools.chain(*groups), operator.attrgetter("path")))


# --- comparing ------------------------------------------------------------------------------------------------------


def _metadata_differences(before: dict[Path, Any], after: dict[Path, Any]) -> Iterator[Difference]:
    for path, x in before.items():
        y = after.get(path)
        if isinstance(x, Variable) and isinstance(y, Variable) and not same_items(x._metadata, y._metadata):
            p, q = x._metadata, y._metadata
            names = [n for n in {**p, **q} if n not in p or n not in q or not same_items({n: p[n]}, {n: q[n]})]
            yield Difference(path, "metadata", _items(p, names), _items(q, names))


def _items(metadata: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={static_repr(metadata[name])}" for name in names if name in metadata) or "nothing"


def _compare_values(path: Path, x: Any, y: Any, *, rtol: float, atol: float) -> Iterator[Difference]:
    yield from array_differences(path, x, y)
    change = _change(x, y, rtol, atol)
    if change is not None:
        yield Difference(path, "value", _short(x), change)


def _short(x: Any) -> str:
    """An array by its type, a number by itself, too."""
    if aval_of(x) is None:
        return repr(x)
    is_number = not x.shape and not jnp.issubdtype(x.dtype, jax.dtypes.extended) and values_of(x) is not None
    return f"{describe(x)} {x}" if is_number else describe(x)


def _change(x: Any, y: Any, rtol: float, atol: float) -> str | None:
    """How two values differ; None if they do not, or cannot be compared."""
    if x is y:
        return None
    if is_key(x) or is_key(y):
        (p, has_p), (q, has_q) = _at_hand(_key_data(x)), _at_hand(_key_data(y))
        is_other = p is not None and q is not None and (p.shape != q.shape or ((p != q) & has_p & has_q).any())
        return "another key" if is_other else None
    (p, has_p), (q, has_q) = _at_hand(x), _at_hand(y)
    if p is None or q is None or p.shape != q.shape:
        return None
    if any(v.dtype.kind in "OSU" or v.dtype.names for v in (p, q)):  # objects, text, records: not numbers
        return None if _equal(x, y) else repr(y)
    at_hand = has_p & has_q
    distance = np.where(at_hand, _distances(p, q, rtol, atol), 0.0)
    is_apart = distance > 0
    if not is_apart.any():
        return None
    if not p.ndim:
        return _short(y)
    worst = np.unravel_index(np.argmax(distance), distance.shape)
    where = ", ".join(map(str, map(int, worst)))
    here = "" if at_hand.all() else " in this process"
    count = f"{int(is_apart.sum()):,} of {int(at_hand.sum()):,}{here} differ"
    if not np.isfinite(distance[worst]):
        return f"{count}, {_wide(p)[worst]:.3g} and {_wide(q)[worst]:.3g} at [{where}]"
    return f"{count}, by {distance[worst]:.3g} at [{where}] at most"


def _distances(p: np.ndarray, q: np.ndarray, rtol: float, atol: float) -> np.ndarray:
    """How far the elements of two arrays are apart: 0 for those that are close, infinite if only one is NaN."""
    with np.errstate(all="ignore"):
        if p.dtype == q.dtype and p.dtype.kind in "iu":  # in their own type: no float tells large integers apart
            distance = np.where(p > q, p - q, q - p).view(f"u{p.itemsize}").astype(np.float64)
        else:
            p, q = _wide(p), _wide(q)
            distance = np.abs(p - q)
        near = np.isfinite(distance) & (distance <= atol + rtol * np.abs(_wide(q)))  # no number is near infinity
        close = (p == q) | near | (np.isnan(p) & np.isnan(q))
        return np.where(close, 0.0, np.where(np.isnan(distance), np.inf, distance))


def _key_data(x: Any) -> jax.Array | None:
    return bits_of(x) if is_key(x) and _is_concrete(x) else None


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_deleted()


def _at_hand(x: Any) -> tuple[np.ndarray | None, np.ndarray]:
    """The values of an array, and which of them this process has; if others have parts of it, only its own parts."""
    values = values_of(x)
    if values is not None or not _is_concrete(x):
        return values, np.ones(() if values is None else values.shape, bool)
    values, known = np.zeros(x.shape, x.dtype), np.zeros(x.shape, bool)
    for shard in x.addressable_shards:
        values[shard.index], known[shard.index] = shard.data, True
    return values, known


def _wide(x: np.ndarray) -> np.ndarray:
    """In a type that holds the differences of all others (JAX's small floats are not numbers to NumPy)."""
    return x.astype(np.complex128 if np.issubdtype(x.dtype, np.complexfloating) else np.float64)


def _equal(x: Any, y: Any) -> bool:
    try:
        return bool(np.all(x == y))
    except Exception:  # somebody else's == must not hide the rest
        return False
