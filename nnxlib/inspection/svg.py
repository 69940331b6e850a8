"""Pictures: SVG of text in a fixed-width font, with colours that follow the page, light or dark.

Whatever is drawn is a list of elements, whose classes are the names in the rules below. A page of SVG has the rules for
the classes that occur in it, so each picture is a file of its own, with no other file or script to go with it.
"""

from __future__ import annotations

import os
import re
import unicodedata
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

# In pixels, for a fixed-width font of 12 pixels.
CHARACTER, LINE, PAD, MARGIN, CHIP = 7.3, 17, 9, 16, 14


class Picture:
    """A picture that a notebook shows; its text is that of an SVG file.

    >>> import nnxlib as nnx
    >>> picture = nnx.draw(nnx.Dict(scale=nnx.Param(1.0)))
    >>> picture
    <Picture of Dict, 181 × 115>
    >>> picture.svg.startswith('<svg')
    True
    """

    def __init__(self, svg: str, name: str, width: int, height: int):
        self.svg, self.name, self.width, self.height = svg, name, width, height

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file, such as ``model.svg``."""
        Path(path).write_text(self.svg + "\n", encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self.svg}</div>'

    def __repr__(self) -> str:
        return f"<Picture of {self.name}, {self.width} × {self.height}>"


def page(name: str, width: float, height: float, kinds: Sequence[str], elements: Sequence[str]) -> Picture:
    """Return elements as a picture; ``kinds`` are the types of Variables that have a colour in it."""
    width, height = round(width), round(height)
    body = "\n".join([f'<rect class="page" width="{width}" height="{height}" rx="6"/>', *elements])
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="nnx-picture" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<title>{xml_text(name)}</title>",
        f"<style>\n{_style(kinds, body)}\n</style>",
    ]
    return Picture("\n".join([*head, body, "</svg>"]), name, width, height)


# --- text -----------------------------------------------------------------------------------------------------------


def columns_of(text: str) -> int:
    """How many columns a text is wide in a fixed-width font.

    >>> columns_of('abc'), columns_of('層')
    (3, 2)
    """
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def xml_text(text: str) -> str:
    """Text as XML may hold it.

    >>> xml_text('a < b')
    'a &lt; b'
    """
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))


def line_of_text(x: float, y: float, text: str, kind: str, anchor: str = "") -> str:
    """A line of text, whose class is ``kind``; ``anchor`` says which end of it is at ``x``.

    >>> line_of_text(8, 16, 'Linear', 'type')
    '<text class="type" x="8" y="16">Linear</text>'
    """
    return text_element(x, y, xml_text(text), kind, anchor)


def text_element(x: float, y: float, xml: str, kind: str = "", anchor: str = "") -> str:
    """The same of text that is XML already, with spans in it.

    >>> text_element(8, 16, 'a <tspan class="name">path</tspan>')
    '<text x="8" y="16">a <tspan class="name">path</tspan></text>'
    """
    kind, anchor = f' class="{kind}"' if kind else "", f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{kind} x="{x:.0f}" y="{y:.0f}"{anchor}>{xml}</text>'


# --- colours --------------------------------------------------------------------------------------------------------

# (light, dark) for each type of Variable; others get one of the last by their name.
_COLOURS = {
    "Param": ("#1f6feb", "#58a6ff"),
    "BatchStat": ("#1a7f37", "#3fb950"),
    "RngState": ("#8c959f", "#8b949e"),
    "Cache": ("#bc4c00", "#f0883e"),
    "Intermediate": ("#8250df", "#bc8cff"),
    "Array": ("#57606a", "#b1bac4"),
}
_MORE_COLOURS = [("#bf3989", "#f778ba"), ("#9a6700", "#d29922"), ("#0e7490", "#39c5cf"), ("#cf222e", "#ff7b72")]

_FONT = 'font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace'
_LIGHT = {
    ".page": "fill:#fff",
    ".box": "fill:#f6f8fa;stroke:#8c959f",
    "text": "fill:#1f2328;white-space:pre",
    ".type": "font-weight:bold",
    ".dim": "fill:#57606a",
    ".name": "fill:#0550ae",
    ".bad": "fill:#cf222e;font-weight:bold",
    ".good": "fill:#1a7f37",
    ".rule": "stroke:#d0d7de;shape-rendering:crispEdges",
    ".edge": "fill:none;stroke:#8c959f;shape-rendering:crispEdges",
    ".same": "fill:none;stroke:#cf222e;stroke-dasharray:5 3",
    ".head": "fill:#cf222e",
}
_DARK = {
    ".page": "fill:#0d1117",
    ".box": "fill:#161b22;stroke:#6e7681",
    "text": "fill:#e6edf3",
    ".dim": "fill:#9aa4ae",
    ".name": "fill:#79c0ff",
    ".bad": "fill:#ff7b72",
    ".good": "fill:#3fb950",
    ".rule": "stroke:#30363d",
    ".edge": "stroke:#6e7681",
    ".same": "stroke:#ff7b72",
    ".head": "fill:#ff7b72",
}
# JupyterLab and Visual Studio Code have a theme of their own, which may differ from that of the system.
LIGHT_PAGES = "[data-jp-theme-light=true]", "[data-vscode-theme-kind=vscode-light]"
DARK_PAGES = "[data-jp-theme-light=false]", "[data-vscode-theme-kind=vscode-dark]"


def class_of_type(kind: str) -> str:
    """The class of what is coloured as a type of Variable is.

    >>> class_of_type('Param')
    'type-Param'
    """
    return "type-" + re.sub(r"\W", "-", kind, flags=re.ASCII)


def _colours(kind: str) -> tuple[str, str]:
    return _COLOURS.get(kind) or _MORE_COLOURS[zlib.crc32(kind.encode()) % len(_MORE_COLOURS)]


def _style(kinds: Sequence[str], body: str) -> str:
    def used(rules: dict[str, str], shade: int) -> dict[str, str]:
        needed = {x: rule for x, rule in rules.items() if not x.startswith(".") or f'class="{x[1:]}"' in body}
        return needed | {f".{class_of_type(kind)}": f"fill:{_colours(kind)[shade]}" for kind in kinds}

    light, dark = used(_LIGHT, 0), used(_DARK, 1)
    rules = [f".nnx-picture {{{_FONT}}}", *(f".nnx-picture {x}{{{rule}}}" for x, rule in light.items())]
    on_dark_pages = [
        f"{','.join(f'{page} .nnx-picture {x}' for page in DARK_PAGES)}{{{rule}}}" for x, rule in dark.items()
    ]
    elsewhere = ",".join(f"{page} *" for page in LIGHT_PAGES)
    on_dark_systems = [f".nnx-picture:not({elsewhere}) {x}{{{rule}}}" for x, rule in dark.items()]
    return "\n".join([*rules, "@media (prefers-color-scheme:dark){", *on_dark_systems, "}", *on_dark_pages])
