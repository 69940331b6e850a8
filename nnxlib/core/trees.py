"""How Treescope shows nodes: foldable trees with a colour for each class, sizes, and paths to copy.

An object that occurs again is followed by the path where it is shown first. Of a long run of equal layers the first few
are shown, for a page with thousands helps nobody.

This module is imported when something is first displayed, for importing Treescope takes longer than importing nnxlib.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from treescope import formatting_util, rendering_parts

from .errors import format_path
from .reprs import forms_of, is_graph_node, shared_paths, sizes_text, static_repr

LONGEST_RUN = 16  # equal neighbours in a list that are all shown
SHOWN_OF_RUN = 4  # of a longer one


class _Page:
    """What is being shown: the first path of each object that occurs again, and the objects reached so far."""

    def __init__(self, root: Any):
        self.first = {key: format_path(path) for key, path in shared_paths(root).items()}
        self.reached = {id(root)}


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
    name, items = type(node).__name__, list(node._nnx_children())
    if isinstance(node, list):
        opening, closing, children = f"{name}([", "])", _items_of_list(items, path, subtree_renderer)
    elif isinstance(node, dict):
        opening, closing = f"{name}({{", "})"
        children = [
            _entry((subtree_renderer(k), ": "), x, path, f"[{static_repr(k)}]", subtree_renderer) for k, x in items
        ]
    else:
        opening, closing = f"{name}(", ")"
        children = [_entry((f"{k}=",), x, path, f".{k}", subtree_renderer) for k, x in items]
    if not children:
        return rendering_parts.build_one_line_tree_node(opening + closing, path)
    sizes = sizes_text(node)
    return rendering_parts.build_foldable_tree_node_from_children(
        prefix=opening,
        children=children,
        suffix=closing,
        comma_separated=True,
        force_trailing_comma=False,
        path=path,
        background_color=None if isinstance(node, list | dict) else _color(type(node)),
        first_line_annotation=_comment(sizes) if sizes else None,
    )


def _entry(label: tuple, value: Any, path: str | None, key: str, subtree_renderer: Any) -> Any:
    """An attribute or item; after an object that was shown before, the path where that was."""
    page = _page.get()
    again = is_graph_node(value) and id(value) in page.first and id(value) in page.reached
    page.reached.add(id(value))
    shown = subtree_renderer(value, path=None if path is None else path + key)
    comments = [_comment(f"the same object as {page.first[id(value)]}")] if again else []
    return rendering_parts.siblings_with_annotations(*label, shown, extra_annotations=comments)


def _comment(text: str) -> Any:
    return rendering_parts.comment_color(rendering_parts.text(f" # {text}"))


def _color(kind: type) -> str:
    return formatting_util.color_from_string(kind.__qualname__)


def _items_of_list(items: list[tuple[Any, Any]], path: str | None, subtree_renderer: Any) -> list[Any]:
    forms = forms_of([value for _, value in items])
    children, start = [], 0
    while start < len(items):
        end = start
        while end < len(items) and forms[end] == forms[start]:
            end += 1
        shown = end if end - start <= LONGEST_RUN else start + SHOWN_OF_RUN
        children += [_entry((), items[i][1], path, f"[{i}]", subtree_renderer) for i in range(start, shown)]
        if shown < end:
            more = f"... {end - shown} more like these, to [{end - 1}]"
            children.append(rendering_parts.comment_color(rendering_parts.text(more)))
        start = end
    return children
