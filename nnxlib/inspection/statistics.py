"""``statistics``: how the arrays in a model or State are distributed: mean, spread, range, zeros and NaNs, by path.

In what ``nnx.capture`` takes out, in gradients or in parameters, it shows the layer that is dead, that explodes, or
that makes the first NaN. The result is a value: a sequence of :class:`ValueStatistics`, a table as text, and in a
notebook a picture with a histogram for each array.

A histogram is kept as counts over bins of equal ratio, :data:`_BINS` to a factor of two, whatever the range: so it can
be made before the axis is known on which it will be drawn. Zeros are counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.differences import aval_of
from ..core.errors import ArgumentError, describe, format_path
from ..core.graph import pack
from ..core.reprs import size_of
from ..core.state import FlatState
from ..core.traversals import path_key
from ..core.variables import RngState
from .entries import Entries, values_of
from .grid import MOST_ROWS, Grid
from .svg import LINE, MARGIN, PAD, Picture, class_of_type, line_of_text, page

_BINS = 16
_CHUNK = 1 << 22  # elements that are looked at together, so that little is held beside the array


@dataclass(frozen=True)
class ValueStatistics:
    """How the elements of one array are distributed.

    Attributes:
      path: of the array; of a pytree in a Variable, such as the tuple of what several calls recorded, with the keys
        in it, unless there is only one.
      type: of the Variable; ``Array`` for an array that is in none.
      array: its dtype and shape.
      size: how many elements there are.
      mean: that of the finite ones; of complex numbers, of their magnitudes. None where there are none, or no values at
        hand.
      std: their standard deviation.
      min: the least of them.
      max: the largest of them.
      zeros: how many there are.
      nans: how many there are.
      infs: how many there are.
      bins: how many of the other elements there are by sign and bin, from ``2 ** (bin / 16)`` to the next.
    """

    path: tuple[Any, ...]
    type: str
    array: str
    size: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    bins: Mapping[tuple[int, int], int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_finite(self) -> bool:
        """Whether there is neither a NaN nor an infinity."""
        return not self.nans and not self.infs


class Statistics(Entries[ValueStatistics]):
    """What :func:`statistics` returns: an entry for each array, in the order of the paths.

    >>> import nnxlib as nnx
    >>> found = nnx.statistics({'a': jnp.zeros(2), 'b': jnp.ones(3)})
    >>> [x.size for x in found], found[0].zeros
    ([2, 3], 2)
    """

    def __repr__(self) -> str:
        return self._text(_rows(self[:MOST_ROWS], _COLUMNS), _RIGHT)

    def _nnx_picture(self) -> Picture:
        return _draw(self)

    def _repr_svg_(self) -> str:
        return _draw(self)._repr_svg_()

    def _repr_html_(self) -> str:
        return _draw(self)._repr_html_()


def statistics(tree: Any, /) -> Statistics:
    """Return how the arrays in a model, a State or another pytree are distributed.

    A notebook shows it as a picture, with a histogram for each array, all on one axis; ``nnx.draw`` makes a file of it.
    Zeros are counted, and left out of the histograms. Random streams, the gradients of integers, and NumPy's arrays of
    text or objects have no entry.
    Arrays that are traced, abstract or deleted, or have parts in other processes only, have one without numbers.

    Args:
      tree: a Module, a State of ``nnx.state``, ``nnx.grad`` or ``nnx.capture``, or any pytree of these and arrays. A
        stack of layers has one entry; of a State with the layers of its stacks apart,
        ``jax.tree.map(list, state)``, each layer has one.

    Returns:
      A :class:`Statistics`, which is a sequence of :class:`ValueStatistics`, and a table when it is printed.

    >>> import nnxlib as nnx
    >>> linear = nnx.Linear(2, 3, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    >>> print(nnx.statistics(linear))
    path    array          mean  std  min  max  zeros
    bias    float32[3]        0    0    0    0   100%
    kernel  float32[2, 3]     1    0    1    1
    >>> linear.kernel[0, 0] = jnp.nan
    >>> [x.path for x in nnx.statistics(linear) if not x.is_finite]
    [('kernel',)]

    Raises:
      ArgumentError: if there is no array in ``tree``.
    """
    found = [_entry(*leaf) for leaf in _arrays_in(tree)]
    if not found:
        raise ArgumentError(f"nnx.statistics is of arrays, and there are none in a {type(tree).__name__}.")
    return Statistics(found)


def _arrays_in(tree: Any) -> Iterator[tuple[tuple, str, Any]]:
    """Path, type of Variable, and array."""
    packed = pack(tree.to_nested_state() if isinstance(tree, FlatState) else tree)
    variables = [packed.objects[i] for i in packed.layout.variables]
    kinds = [type(x) for x in variables] + [None] * (len(packed.leaves) - len(variables))
    for path, kind, value in zip(packed.layout.leaf_paths, kinds, packed.leaves, strict=True):
        if kind is not None and issubclass(kind, RngState):
            continue
        keyed, _ = jax.tree_util.tree_flatten_with_path(value)
        below = [tuple(map(path_key, keys)) for keys, _ in keyed]
        common = next(
            (i for i, level in enumerate(zip(*below)) if len(set(level)) > 1), min(map(len, below), default=0)
        )
        for keys, (_, x) in zip(below, keyed, strict=True):
            if _is_numeric(x):
                yield (*path, *keys[common:]), kind.__name__ if kind else "Array", x


def _is_numeric(x: Any) -> bool:
    aval = aval_of(x)
    return aval is not None and any(jnp.issubdtype(aval[1], kind) for kind in (np.number, np.bool_))


def _entry(path: tuple, kind: str, array: Any) -> ValueStatistics:
    values = values_of(array)
    if values is None:
        return ValueStatistics(path, kind, describe(array), size_of(array).elements)
    with np.errstate(all="ignore"):  # of sums that overflow
        return _measured(path, kind, describe(array), values)


def _measured(path: tuple, kind: str, array: str, values: np.ndarray) -> ValueStatistics:
    zeros = nans = infs = number = 0
    total, low, high = 0.0, np.inf, -np.inf
    bins = Counter[tuple[int, int]]()
    for chunk in _chunks(values):
        finite = chunk[np.isfinite(chunk)]
        nans += int(np.isnan(chunk).sum())
        infs += int(np.isinf(chunk).sum())
        zeros += int((finite == 0).sum())
        number += finite.size
        total += float(finite.sum())
        low, high = min(low, finite.min(initial=np.inf)), max(high, finite.max(initial=-np.inf))
        bins.update(_binned(finite))
    found = ValueStatistics(path, kind, array, values.size, zeros=zeros, nans=nans, infs=infs, bins=dict(bins))
    if not number:
        return found
    mean = total / number
    squares = sum(float(((x[np.isfinite(x)] - mean) ** 2).sum()) for x in _chunks(values))
    return replace(found, mean=mean, std=(squares / number) ** 0.5, min=float(low), max=float(high))


def _chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        yield (np.abs(chunk) if np.iscomplexobj(chunk) else chunk).astype(np.float64)


def _binned(values: np.ndarray) -> dict[tuple[int, int], int]:
    """How many values there are by sign and bin; bin ``i`` begins at ``2 ** (i / _BINS)``."""
    found = {}
    for sign in (-1, 1):
        magnitudes = sign * values
        places = np.floor(_BINS * np.log2(magnitudes[magnitudes > 0])).astype(int)
        first = places.min(initial=0)
        counts = np.bincount(places - first)
        found |= {(sign, int(first + i)): int(counts[i]) for i in counts.nonzero()[0]}
    return found


# --- the table ------------------------------------------------------------------------------------------------------

_COLUMNS = "path", "array", "mean", "std", "min", "max", "zeros", "not finite"
_DRAWN = "path", "array", "mean", "std", "zeros", "not finite"
_RIGHT = range(2, 8)


def _rows(entries: Sequence[ValueStatistics], names: Sequence[str]) -> list[tuple[str, ...]]:
    """The header and the cells of a table, without columns in which nothing stands."""
    cells = list(map(_cells, entries))
    shown = [name for name in names if any(x[name] for x in cells)]
    return [tuple(shown), *(tuple(x[name] for name in shown) for x in cells)]


def _cells(x: ValueStatistics) -> dict[str, str]:
    numbers = {name: _number(getattr(x, name)) for name in ("mean", "std", "min", "max")}
    broken = ", ".join(f"{n:,} {name}" for name, n in (("NaN", x.nans), ("inf", x.infs)) if n)
    return {"path": format_path(x.path), "array": x.array, **numbers, "zeros": _share(x), "not finite": broken}


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.3g}"


def _share(x: ValueStatistics) -> str:
    """In full per cent, of which 100 is all."""
    return f"{max(100 * x.zeros // x.size, 1)}%" if x.zeros else ""


# --- the picture ----------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _STEP = 264, 20, 3  # of a histogram, and of a bar in it
_APART = 40  # pixels between the numbers of the axis


class _Axis:
    """Linear about zero, as far as most arrays spread, and logarithmic beyond: ``asinh``."""

    def __init__(self, entries: Sequence[ValueStatistics], left: float):
        measured: list[Any] = [(x.mean, x.std, x.min, x.max) for x in entries if x.bins]
        ends = [end for *_, low, high in measured for end in (low, high)]
        self.spread = np.median([min(np.hypot(mean, std), max(-low, high)) for mean, std, low, high in measured])
        low, high = self.bend(min(0.0, *ends)), self.bend(max(0.0, *ends))
        self.left, self.low, self.slope = left, low, _WIDTH / (high - low)
        self.ends = min(0.0, *ends), max(0.0, *ends)

    def bend(self, x: Any) -> Any:
        return np.arcsinh(x / self.spread / 2)  # by twice the spread: a normal distribution still has one peak

    def __call__(self, x: Any) -> Any:
        """The pixel of a value."""
        return self.left + (self.bend(x) - self.low) * self.slope

    def numbers(self) -> list[float]:
        """Zero, and round numbers beside it as far as there is room, the outer ones first."""
        top = int(np.floor(np.log10(max(map(abs, self.ends)))))
        powers = [10.0**i for i in range(top, top - 8, -1)]
        shown = [0.0]
        for x in [*powers, *(5 * x for x in powers), *(2 * x for x in powers)]:
            for y in (-x, x):
                fits = all(abs(self(y) - self(z)) >= _APART for z in shown)
                if self.ends[0] <= y <= self.ends[1] and fits:
                    shown.append(y)
        return sorted(shown)


def _draw(entries: Statistics) -> Picture:
    shown = entries[:MOST_ROWS]
    rows = _rows(shown, _DRAWN)
    grid = Grid(rows, [j for j, name in enumerate(rows[0]) if name in _COLUMNS[2:]])
    kinds = {(i, j): _class(rows[0][j], shown[i - 1]) for i in range(1, len(rows)) for j in range(len(rows[0]))}
    width, height, drawn = grid.width, grid.bottom + MARGIN, []
    if any(x.bins for x in shown):
        axis, bottom = _Axis(shown, grid.width), grid.bottom
        width, height = width + _WIDTH + MARGIN, height + LINE
        zero, top = axis(0.0), grid.tops[1]
        drawn = [
            line_of_text(axis.left, grid.tops[0] + PAD / 2 + 12, "values other than zero", "type"),
            f'<path class="rule" d="M{zero:.0f} {top:.0f}V{bottom + PAD / 2:.0f}"/>',
            *(_histogram(x, axis, y - 3) for x, y in zip(shown, grid.tops[2:]) if x.bins),
            *(line_of_text(axis(x), bottom + PAD / 2 + 14, f"{x:g}", "dim", "middle") for x in axis.numbers()),
        ]
    if len(shown) < len(entries):
        more = f"… and {len(entries) - len(shown)} more"
        drawn.append(line_of_text(MARGIN, grid.bottom + PAD / 2 + 14, more, "dim"))
        height = max(height, grid.bottom + LINE + MARGIN)
    types = sorted({x.type for x in shown if x.bins})
    return page("statistics", width, height, types, [*grid.elements(kinds, width), *drawn])


def _class(column: str, x: ValueStatistics) -> str:
    if column == "zeros":
        return "type" if x.zeros == x.size else ""
    return {"path": "name" if x.is_finite else "bad", "array": "dim", "not finite": "bad"}.get(column, "")


def _histogram(x: ValueStatistics, axis: _Axis, bottom: float) -> str:
    """Bars without gaps; in each, the share of the bins that lies there."""
    bins = sorted((sign * 2.0 ** (i / _BINS), sign * 2.0 ** ((i + 1) / _BINS), n) for (sign, i), n in x.bins.items())
    places = axis(np.sort([ends for *ends, _ in bins], axis=1).ravel())
    below = np.repeat(np.cumsum([0, *(n for *_, n in bins)]), 2)[1:-1]
    steps = axis.left + _STEP * np.arange(_WIDTH // _STEP + 1)
    counts = np.diff(np.interp(steps, places, below)[1:-1], prepend=0, append=below[-1])
    heights = np.where(counts > 0.01, np.maximum(np.round(_HEIGHT * counts / counts.max()), 1), 0).astype(int)
    path, last = f"M{axis.left:.0f} {bottom:.0f}", 0
    for i in np.flatnonzero(np.diff(heights, prepend=0, append=0)):
        height = heights[i] if i < len(heights) else 0
        path += f"H{steps[i]:.0f}v{last - height}"
        last = height
    return f'<path class="{class_of_type(x.type)}" d="{path}z"/>'
