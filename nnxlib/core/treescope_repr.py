"""How Treescope shows nodes: foldable trees with a colour for each class, sizes, and paths to copy.

An object that occurs again is followed by the path where it is shown first. Of a long run of equal layers the first few
are shown: a page with thousands helps nobody.

This module is imported when something is first displayed: importing Treescope takes longer than importing nnxlib.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from itertools import groupby
from typing import Any

from treescope import formatting_util, rendering_parts

from .data import is_node
from .errors import format_path
from .reprs import Part, expand_object, node_group, parts_below, read, sizes_text, static_repr

LONGEST_RUN = 16  # equal neighbours in a list that are all shown
SHOWN_OF_RUN = 4  # of a longer one


class _Page:
    """What is being shown: its objects, the first path of each that occurs again, and those reached so far, by id."""

    def __init__(self, root: Any):
        parts = [part for part in parts_below(read(root, expand_object)) if part.identity is not None]
        self.parts = {part.identity: part for part in parts if part.target is None}
        self.first = {part.identity: format_path(part.target.path) for part in parts if part.target is not None}
        self.reached = {id(root)}

    def form(self, value: Any) -> int:
        """A number that is the same for objects that are written alike."""
        return self.parts[id(value)].form if is_node(value) and id(value) in self.parts else -1 - id(value)

    def sizes(self, node: Any) -> str:
        return sizes_text(self.parts[id(node)].sizes) if id(node) in self.parts else ""


_page: ContextVar[_Page] = ContextVar("page")


def render_node(node: Any, path: str | None, subtree_renderer: Any) -> Any:
    """Render a node; ``subtree_renderer(value, path=...)`` renders what is in it."""
    if _page.get(None) is not None:
        return _render(node, path, subtree_renderer)
    token = _page.set(_Page(node))
    try:
        return _render(node, path, subtree_renderer)
    finally:
        _page.reset(token)


def _render(node: Any, path: str | None, subtree_renderer: Any) -> Any:
    items, page = list(node._nnx_children()), _page.get()
    group = node_group(type(node), items, id(node))

    def entry(label: tuple, value: Any, key: str) -> Any:
        """An attribute or item; after an object that was shown before, the path where that was."""
        again = is_node(value) and id(value) in page.first and id(value) in page.reached
        page.reached.add(id(value))
        shown = subtree_renderer(value, path=None if path is None else path + key)
        comments = [_comment(f" # the same object as {page.first[id(value)]}")] if again else []
        return rendering_parts.siblings_with_annotations(*label, shown, extra_annotations=comments)

    if isinstance(node, list):
        forms = [page.form(x) for _, x in items]
        children = _some(forms, lambda i: entry((), items[i][1], f"[{i}]"), [key for key, _ in items])
    elif isinstance(node, dict):
        children = [entry((subtree_renderer(k), ": "), x, f"[{static_repr(k)}]") for k, x in items]
    else:
        children = [entry((label,), x, f".{k}") for label, k, x in group.children]
    color = None if isinstance(node, list | dict) else formatting_util.color_from_string(type(node).__qualname__)
    return _tree(group.opening, children, group.closing, path, page.sizes(node), color)


def _tree(
    opening: str, children: list[Any], closing: str, path: str | None, sizes: str = "", color: str | None = None
) -> Any:
    """A tree that can be folded; a line if there is nothing in it."""
    if not children:
        return rendering_parts.build_one_line_tree_node(opening + closing, path)
    return rendering_parts.build_foldable_tree_node_from_children(
        prefix=opening,
        children=children,
        suffix=closing,
        comma_separated=True,
        path=path,
        background_color=color,
        first_line_annotation=_comment(f" # {sizes}") if sizes else None,
    )


def _comment(text: str) -> Any:
    return rendering_parts.comment_color(rendering_parts.text(text))


def _some(forms: Sequence[int], render: Callable[[int], Any], keys: Sequence[Any]) -> list[Any]:
    """What is rendered for each index; of a long run of equal forms the first few, and how many more there are."""
    children = []
    for _, run in groupby(range(len(forms)), forms.__getitem__):
        alike = list(run)
        shown = alike if len(alike) <= LONGEST_RUN else alike[:SHOWN_OF_RUN]
        children += map(render, shown)
        if len(shown) < len(alike):
            children.append(_comment(f"... {len(alike) - len(shown)} more like these, to [{keys[alike[-1]]}]"))
    return children


def _some_parts(parts: Sequence[Part], render: Callable[[int], Any]) -> list[Any]:
    """As :func:`_some`, for parts; only those with a number as key may be left out."""
    forms = [x.form if isinstance(x.key, int) else -1 - i for i, x in enumerate(parts)]
    return _some(forms, render, [x.key for x in parts])


def render_level(level: Mapping[Any, Any], part: Part, path: str | None, subtree_renderer: Any) -> Any:
    """Render a level of a State, given what :func:`~nnxlib.core.reprs.read` says of it."""
    items = list(level.items())

    def render(i: int) -> Any:
        (key, value), child = items[i], part.children[i]
        below = None if path is None else f"{path}[{key!r}]"
        is_level = isinstance(value, Mapping)
        shown = render_level(value, child, below, subtree_renderer) if is_level else subtree_renderer(value, path=below)
        return rendering_parts.siblings_with_annotations(subtree_renderer(key), ": ", shown)

    return _tree(part.opening, _some_parts(part.children, render), part.closing or "", path, sizes_text(part.sizes))


def render_outline(opening: str, parts: Sequence[Part], closing: str) -> Any:
    """Render parts as they are, for what is not an object graph itself."""

    def render(i: int) -> Any:
        part = parts[i]
        if part.closing is None:
            return rendering_parts.text(part.label + part.opening)
        below = render_outline(part.opening, part.children, part.closing)
        return rendering_parts.siblings_with_annotations(part.label, below)

    return _tree(opening, _some_parts(parts, render), closing, None)
