"""Text in pictures: tables, and tracebacks as a terminal shows them."""

from __future__ import annotations

import re
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate

from .svg import CHARACTER, LINE, MARGIN, PAD, Picture, columns_of, line_of_text, page, text_element, xml_text

MOST_ROWS = 200  # of a table that is shown; a notebook scrolls
_GAP = 2 * PAD  # between columns
_WIDEST = 112  # columns of a terminal


class Grid:
    """Where the cells of a table stand; of a cell, each line of its text.

    Args:
      rows: the cells, with the header first.
      right: the indices of the columns that are aligned at the right, as numbers are.
      top: where the table begins.
    """

    def __init__(self, rows: Sequence[Sequence[str]], right: Sequence[int] = (), top: float = MARGIN):
        self.rows = [[cell.split("\n") for cell in row] for row in rows]
        self.right = right
        widths = [CHARACTER * max(columns_of(line) for cell in column for line in cell) for column in zip(*self.rows)]
        self.edges = list(accumulate((width + _GAP for width in widths), initial=float(MARGIN)))
        heights = [LINE * max(map(len, row)) + PAD for row in self.rows]
        self.tops = list(accumulate(heights, initial=top))
        self.width, self.bottom = self.edges[-1] - _GAP + MARGIN, self.tops[-1]

    def elements(self, kinds: Mapping[tuple[int, int], str], width: float) -> Iterator[str]:
        """The lines, and rules between the rows; ``kinds`` are classes of cells, by row and column."""
        for i, row in enumerate(self.rows):
            if i:
                y = self.tops[i]
                yield f'<path class="rule" d="M{MARGIN} {y:.0f}H{width - MARGIN:.0f}"/>'
            for j, cell in enumerate(row):
                x = self.edges[j + 1] - _GAP if j in self.right else self.edges[j]
                for k, line in enumerate(cell):
                    kind = kinds.get((i, j), "type" if i == 0 else "")
                    y = self.tops[i] + PAD / 2 + LINE * k + 12
                    if line:
                        yield line_of_text(x, y, line, kind, "end" if j in self.right else "")


def draw_table(
    name: str,
    rows: Sequence[Sequence[str]],
    kinds: Mapping[tuple[int, int], str],
    *,
    right: Sequence[int] = (),
    title: str = "",
    footer: str = "",
) -> Picture:
    """Return a picture of a table, whose first row is the header, with a line above and one below.

    >>> draw_table('a table', [['path', 'kind'], ['bias', 'value']], {(1, 0): 'name'})
    <Picture of a table, 116 × 84>
    """
    grid = Grid(rows, right, MARGIN + (LINE + PAD / 2) * bool(title))
    width = max(grid.width, *(2 * MARGIN + CHARACTER * columns_of(text) for text in (title, footer)))
    below = [line_of_text(MARGIN, grid.bottom + PAD / 2 + 12, footer, "dim")] if footer else []
    above = [line_of_text(MARGIN, MARGIN + 12, title, "type")] if title else []
    height = grid.bottom + (LINE + PAD / 2) * bool(footer) + MARGIN
    return page(name, width, height, [], [*above, *grid.elements(kinds, width), *below])


def draw_error(error: BaseException) -> Picture:
    """Return a picture of an exception as Python prints it, but for the marks below the source.

    What was raised is bold, the notes of the Modules that it has left begin with their paths, and what is of less
    interest is grey.

    >>> draw_error(ValueError('no'))
    <Picture of ValueError, 134 × 49>
    """
    text = "".join(traceback.format_exception(error))
    lines = [line for line in text.splitlines() if not _MARKS.fullmatch(line)]
    raised = list(_chain(error))
    names = {traceback.format_exception_only(x)[0].partition(":")[0].strip() for x in raised}
    notes = {line for x in raised for note in getattr(x, "__notes__", ()) for line in str(note).splitlines()}
    shown = [part for line in lines for part in _terminal(line, names, notes)]
    elements = [text_element(MARGIN, MARGIN + 12 + LINE * i, x, kind) for i, (kind, x, _) in enumerate(shown)]
    width = 2 * MARGIN + CHARACTER * max(columns_of(text) for *_, text in shown)
    return page(type(error).__name__, width, 2 * MARGIN + LINE * len(shown), [], elements)


_MARKS = re.compile(r"\s*[~^]+\s*")  # they differ between versions of Python
_NOTE = re.compile(r"in (\S+) \(")
_FRAMES = "Traceback (most recent call last):", '  File "'


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that led to it."""
    found: list[BaseException | None] = [error]
    seen = set[int]()
    while found:
        x = found.pop()
        if x is not None and id(x) not in seen:
            seen.add(id(x))
            found += [x.__cause__, x.__context__]
            yield x


def _terminal(line: str, names: Set[str], notes: Set[str]) -> Iterator[tuple[str, str, str]]:
    """The lines that a line is wrapped to: the class, the text as XML with what stands out, and the text."""
    note, start = _NOTE.match(line) if line in notes else None, line.partition(":")[0]
    is_grey = note is None and (line in notes or line.startswith(_FRAMES))
    key, kind = (note[1], "name") if note is not None else (start, "bad") if start in names else ("", "")
    indent = line[: len(line) - len(line.lstrip())]
    for part in textwrap.wrap(line, _WIDEST, subsequent_indent=indent, break_on_hyphens=False) or [""]:
        before, found, after = part.partition(key) if key else (part, "", "")
        marked = f'<tspan class="{kind}">{xml_text(found)}</tspan>' if found else ""
        yield "dim" if is_grey else "", xml_text(before) + marked + xml_text(after), part
        key = ""
