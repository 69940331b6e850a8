"""``draw``: a picture of an object graph, as SVG; of tables and exceptions, see ``grid.py``.

Each Module is a *box* with a *row* for each of its Variables, coloured by type, and its settings below in grey. Boxes
stand in columns by depth, the children of a box beside it from top to bottom, so no two overlap. What is in a list or
dict belongs to the Module that holds it. Equal neighbours in a list are one box, drawn as a stack with ``×n``. An
object that occurs again is a row with a dashed arrow to where it is drawn, so sharing shows, and cycles end.

The boxes are made of the parts of ``core/reprs.py``. A graph of more than :data:`MOST_BOXES` boxes is drawn as deep as
it fits; a box whose insides are left out says how much that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..core.errors import ArgumentError, UsageError, format_path
from ..core.reprs import DEEPEST, WIDEST, Part, expand_object, in_one_line, is_made, read
from .grid import draw_error
from .svg import (
    CHARACTER,
    CHIP,
    LINE,
    MARGIN,
    PAD,
    Picture,
    class_of_type,
    columns_of,
    line_of_text,
    page,
    text_element,
    xml_text,
)

MOST_BOXES = 150
_LONGEST = 46  # characters of a row; the rest shows as a tooltip
_MOST_SETTINGS = 6  # lines
_SAYS_NOTHING = {"None", "()", "List([])", "Dict({})"}

_GAP, _COLUMN = 14, 64  # pixels between boxes
_BESIDE_EDGES = 6  # lines and arrows arrive at a box beside each other


def draw(x: Any, /, *, depth: int | None = None, settings: bool = True) -> Picture:
    """Draw an object graph: Modules as boxes, their Variables with shapes, settings, and what is shared.

    Nothing is computed: abstract Modules (of ``nnx.eval_shape``) and traced ones are drawn as well. Settings that say
    nothing are left out: None, what is empty, a function under its own name. Colours follow the page, light or dark.

    What ``nnx.tabulate``, ``nnx.diff`` and ``nnx.statistics`` return is drawn as a table, and an exception as Python
    prints it, with the notes of the Modules that it has left.

    Args:
      x: a Module, Pytree, List or Dict, a table, or an exception.
      depth: how many levels of Modules to draw below ``x``; by default as many as fit.
      settings: whether to write attributes that are not data, in grey.

    Returns:
      A :class:`~nnxlib.inspection.svg.Picture`, which a notebook shows, with ``save(path)`` and the text ``svg``.

    >>> import nnxlib as nnx
    >>> class Tied(nnx.Module):
    ...   def __init__(self, rngs):
    ...     self.encoder = nnx.Linear(4, 4, rngs=rngs)
    ...     self.decoder = self.encoder
    >>> 'decoder = encoder' in nnx.draw(Tied(nnx.Rngs(0))).svg
    True

    Raises:
      TypeError: if ``x`` is none of these.
      ValueError: if ``depth`` is negative.
    """
    if isinstance(x, BaseException):
        return draw_error(x)
    if hasattr(type(x), "_nnx_picture"):
        return x._nnx_picture()
    if not is_made(x):
        raise ArgumentError(
            f"nnx.draw draws Modules and other nodes, the tables of nnxlib, and exceptions; got a {type(x).__name__}."
        )
    if depth is not None and depth < 0:
        raise UsageError(f"nnx.draw(depth={depth}): depth is a number of levels, 0 for the object alone.")
    part = read(x, expand_object)
    root = _box([part], "", DEEPEST if depth is None else min(depth, DEEPEST), settings)
    if depth is None and root.boxes > MOST_BOXES:
        fitting = (_box([part], "", limit, settings) for limit in range(DEEPEST, -1, -1))
        root = next(x for x in fitting if x.boxes <= MOST_BOXES or not x.children)
    bottom = _place(root, MARGIN, _column_positions(root), 0)
    return _picture(root, bottom)


# --- boxes ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Row:
    name: str
    text: str
    kind: str | None  # what colours it; None for a reference to a node
    parts: list[Part]  # what it stands for
    target: Part | None = None
    y: float = 0.0

    @property
    def label(self) -> str:
        count = f" ×{len(self.parts)}" if len(self.parts) > 1 else ""
        return f"{self.name} = {self.text}{count}" if self.target is not None else f"{self.name} {self.text}{count}"


@dataclass(slots=True, eq=False)
class _Box:
    name: str
    type: str
    parts: list[Part]  # what it stands for
    size: str
    rows: list[_Row] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    children: list[_Box] = field(default_factory=list)
    left_out: int = 0
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0

    @property
    def boxes(self) -> int:
        return 1 + sum(x.boxes for x in self.children)

    @property
    def count(self) -> int:
        return len(self.parts)

    @property
    def title(self) -> str:
        return f"{self.name} {self.type}".strip()

    @property
    def lines(self) -> list[str]:
        """The lines of text below the title that are no rows."""
        inside = [f"… {self.left_out} more inside"] if self.left_out else []
        return [*self.settings, *inside]

    @property
    def height(self) -> float:
        return 2 * PAD + LINE * (1 + bool(self.size) + len(self.rows) + len(self.lines))


def _box(parts: list[Part], name: str, depth: int, with_settings: bool) -> _Box:
    part = parts[0]
    sizes = "  ".join(f"{kind} {size}" for kind, size in part.sizes.items() if size.elements)
    box = _Box(_cut(name), _cut(part.opening.rstrip("([{")), parts, sizes)
    box.size += " each" if sizes and len(parts) > 1 else ""
    settings: list[str] = []
    for keys, run in _contents(part, ()):
        first = run[0]
        name = _name(keys, run)
        if first.is_static:
            if first.opening not in _SAYS_NOTHING and first.opening != keys[-1]:
                settings.append(f"{name}={first.opening}")
        elif first.closing is None:
            target, text = first.target, first.opening
            box.rows.append(_Row(name, format_path(target.path) if target else text, first.kind, run, target))
        elif first.is_setting:
            settings.append(f"{name}={first.opening}{in_one_line(first, _LONGEST) or '…'}{first.closing}")
        elif _is_random(first):
            box.rows.append(_Row(name, first.opening.rstrip("([{"), "RngState", run))
        elif depth == 0:
            box.left_out += sum(1 + x.below for x in run)
        else:
            box.children.append(_box(run, name, depth - 1, with_settings))
    box.settings = _filled(settings) if with_settings else []
    texts = [box.title + " " * 6 * (box.count > 1), box.size, *(_cut(row.label) + "  " for row in box.rows), *box.lines]
    box.width = 2 * PAD + CHARACTER * max(map(columns_of, texts))
    return box


def _contents(part: Part, keys: tuple) -> Iterator[tuple[tuple, list[Part]]]:
    """What a box holds, lists and dicts opened, with its keys from the box on; equal neighbours in a list are a run."""

    def sort(child: Part) -> Any:
        return child.form if isinstance(child.key, int) and not child.is_static else id(child)

    for i, (_, run) in enumerate(groupby(part.children, sort)):
        parts = list(run)
        path = (*keys, parts[0].key)
        if i == WIDEST:
            yield path, [Part("", "…", None, f"… and {len(part.children) - part.children.index(parts[0])} more")]
            return
        if parts[0].is_container and not parts[0].is_setting and len(path) < DEEPEST:
            for x in parts:
                yield from _contents(x, (*keys, x.key))
        else:
            yield path, parts


def _name(keys: tuple, run: list[Part]) -> str:
    if len(run) == 1:
        return format_path(keys)
    return f"{format_path(keys[:-1]) if keys[:-1] else ''}[{run[0].key}…{run[-1].key}]"


def _is_random(part: Part) -> bool:
    """Whether a part is a random stream, or an object of nothing but streams."""
    return _is_stream(part) or (part.closing is not None and all(map(_is_stream, part.children)))


def _is_stream(part: Part) -> bool:
    data = [x for x in part.children if not x.is_static]
    return bool(data) and all(x.kind == "RngState" for x in data)


def _filled(items: list[str]) -> list[str]:
    lines = [""]
    for item in map(_cut, items):
        joined = f"{lines[-1]}, {item}".removeprefix(", ")
        if lines[-1] and columns_of(joined) > _LONGEST:
            lines.append(item)
        else:
            lines[-1] = joined
    if len(lines) > _MOST_SETTINGS:
        lines[_MOST_SETTINGS - 1 :] = ["…"]
    return [line for line in lines if line]


def _cut(text: str) -> str:
    return text if columns_of(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# --- places ---------------------------------------------------------------------------------------------------------


def _column_positions(root: _Box) -> list[float]:
    """The left edge of each column."""
    positions, level = [float(MARGIN)], [root]
    while level:
        positions.append(positions[-1] + max(box.width for box in level) + _COLUMN)
        level = [child for box in level for child in box.children]
    return positions


def _place(box: _Box, top: float, columns: list[float], depth: int) -> float:
    """Put a box and its children below ``top``; returns where they end."""
    box.x, box.y = columns[depth], top
    first_row = top + PAD + LINE * (1 + bool(box.size))
    for i, row in enumerate(box.rows):
        row.y = first_row + LINE * i
    bottom = top
    for child in box.children:
        bottom = _place(child, bottom, columns, depth + 1) + _GAP
    shadow = 8 if box.count > 1 else 0
    return max(bottom - _GAP, top + box.height + shadow)


# --- SVG ------------------------------------------------------------------------------------------------------------


def _picture(root: _Box, bottom: float) -> Picture:
    boxes = list(_all(root))
    rows = [row for box in boxes for row in box.rows]
    kinds = sorted({row.kind for row in rows if row.kind and row.kind != "reference"})
    arrows = list(_arrows(boxes))
    legend = [*kinds, *(["the same object"] if arrows else [])]
    width = max(box.x + box.width + (8 if box.count > 1 else 0) for box in boxes) + MARGIN + 40 * bool(arrows)
    legend_width = sum(CHIP + CHARACTER * (len(x) + 2) + 20 for x in legend)
    height = bottom + MARGIN + (LINE + _GAP if legend else 0)
    elements = [
        *(_edge(box, child) for box in boxes for child in box.children),
        *arrows,  # below the boxes, so that text stays readable
        *(line for box in boxes for line in _box_lines(box)),
        *_legend(legend, bottom + _GAP),
    ]
    return page(root.type, max(width, 2 * MARGIN + legend_width), height, kinds, elements)


def _all(box: _Box) -> Iterator[_Box]:
    yield box
    for child in box.children:
        yield from _all(child)


def _edge(box: _Box, child: _Box) -> str:
    x, y = box.x + box.width, box.y + PAD + LINE / 2
    middle = child.x - _COLUMN / 2
    return f'<path class="edge" d="M{x:.0f} {y:.0f}H{middle:.0f}V{child.y + PAD + LINE / 2:.0f}H{child.x:.0f}"/>'


def _box_lines(box: _Box) -> Iterator[str]:
    for offset in (8, 4) if box.count > 1 else ():
        yield _rect(box, offset)
    yield _rect(box, 0)
    x, y = box.x + PAD, box.y + PAD + 12
    name = f'<tspan class="name">{xml_text(box.name)}</tspan> ' if box.name else ""
    yield text_element(x, y, f'{name}<tspan class="type">{xml_text(box.type)}</tspan>')
    if box.count > 1:
        right = box.x + box.width - PAD
        yield line_of_text(right, y, f"×{box.count}", "type", "end")
    if box.size:
        y += LINE
        yield line_of_text(x, y, box.size, "dim")
    for row in box.rows:
        y += LINE
        whole = f"<title>{xml_text(row.label)}</title>" if _cut(row.label) != row.label else ""
        if row.target is None and row.kind:
            yield f'<rect class="{class_of_type(row.kind)}" x="{x:.0f}" y="{y - 9:.0f}" width="9" height="9" rx="2"/>'
        yield text_element(x + CHIP, y, xml_text(_cut(row.label)) + whole)
    for line in box.lines:
        y += LINE
        yield line_of_text(x, y, line, "dim")


def _rect(box: _Box, offset: int) -> str:
    x, y = box.x + offset, box.y + offset
    return f'<rect class="box" x="{x:.0f}" y="{y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}" rx="5"/>'


def _arrows(boxes: list[_Box]) -> Iterator[str]:
    """From each row that is an object drawn elsewhere to where that is; to the nearest box around it if it is not."""
    places: dict[int, tuple[_Box, float]] = {}
    drawn_as: dict[int, Part] = {}  # what is in the layers of a stack that are not drawn -> the same in the one that is
    for box in boxes:
        rows = [(row.parts, row.y) for row in box.rows if row.target is None]
        for parts, y in [(box.parts, box.y + PAD + _BESIDE_EDGES), *rows]:
            places[id(parts[0])] = box, y + LINE / 2
            stack = [(x, parts[0]) for x in parts[1:]]
            while stack:
                part, drawn = stack.pop()
                drawn_as[id(part)] = drawn
                stack.extend(zip(part.children, drawn.children))
    for box in boxes:
        for row in box.rows:
            target = row.target
            while target is not None and id(target) not in places:
                target = drawn_as.get(id(target), target.parent)
            if target is not None:
                yield from _arrow(box, row.y + LINE / 2, *places[id(target)])


def _arrow(box: _Box, y: float, target: _Box, to_y: float) -> Iterator[str]:
    """Between the sides that face each other, or at the right of two boxes in one column."""
    if target.x == box.x:
        x, to_x, sign = box.x + box.width, target.x + target.width, 1
        before = after = max(x, to_x) + 18 + min(abs(y - to_y) / 12, 30)
    else:
        sign = -1 if target.x > box.x else 1
        x, to_x = (box.x + box.width, target.x) if sign < 0 else (box.x, target.x + target.width)
        bend = sign * min(abs(x - to_x) / 2, _COLUMN)
        before, after = x - bend, to_x + bend
    end = to_x + 7 * sign
    yield f'<path class="same" d="M{x:.0f} {y:.0f}C{before:.0f} {y:.0f} {after:.0f} {to_y:.0f} {end:.0f} {to_y:.0f}"/>'
    yield f'<path class="head" d="M{to_x:.0f} {to_y:.0f}l{8 * sign} -4v8z"/>'


def _legend(names: list[str], y: float) -> Iterator[str]:
    x = float(MARGIN)
    for name in names:
        if name == "the same object":
            yield f'<path class="same" d="M{x:.0f} {y + 8:.0f}h{CHIP + 10}"/>'
            x += CHIP + 14
        else:
            yield f'<rect class="{class_of_type(name)}" x="{x:.0f}" y="{y + 3:.0f}" width="9" height="9" rx="2"/>'
            x += CHIP
        yield line_of_text(x, y + 12, name, "dim")
        x += CHARACTER * (len(name) + 2)
