"""How nodes are written: nested, one attribute a line, short values, never raising."""

from __future__ import annotations

from typing import Any

from .errors import describe, format_path

_DEEPEST = 24  # levels that are written out; below, a node is folded
_LONGEST = 64  # children of one node that are written out


def node_repr(node: Any) -> str:
    """Write a node with everything below it; an object that occurs again is written as its first path."""
    return _write(node, (), {}, 0)


def _write(value: Any, path: tuple, seen: dict[int, tuple], depth: int) -> str:
    if not hasattr(type(value), "_nnx_children"):
        return _write_value(value, path, seen, depth)
    if id(value) in seen:
        return f"<{type(value).__name__} at {format_path(seen[id(value)])}>"
    seen[id(value)] = path
    if not hasattr(value, "_nnx_held"):  # a Variable, or a node whose __new__ never ran
        return repr(value) if hasattr(value, "_metadata") else f"{type(value).__name__}(<not initialised>)"
    opening, closing = _BRACKETS.get(_base(value), ("", ""))
    children: list[tuple[Any, Any]] = list(value._nnx_children())
    if depth >= _DEEPEST and children:
        return f"{type(value).__name__}({opening}...{closing})"
    indent = "  " * (depth + 1)
    lines = [
        f"{indent}{_label(value, key)}{_write(child, (*path, key), seen, depth + 1)},"
        for key, child in children[:_LONGEST]
    ]
    if len(children) > _LONGEST:
        lines.append(f"{indent}... and {len(children) - _LONGEST} more")
    if not lines:
        return f"{type(value).__name__}({opening}{closing})"
    return "\n".join([f"{type(value).__name__}({opening}", *lines, f"{'  ' * depth}{closing})"])


_BRACKETS = {list: ("[", "]"), dict: ("{", "}")}


def _base(node: Any) -> type:
    return list if isinstance(node, list) else dict if isinstance(node, dict) else object


def _label(node: Any, key: Any) -> str:
    return "" if isinstance(node, list) else f"{key!r}: " if isinstance(node, dict) else f"{key}="


def static_repr(value: Any) -> str:
    """Write a static value in one line: functions and classes by name; never raises."""
    return _write_value(value, (), {}, 0)


def _write_value(value: Any, path: tuple, seen: dict[int, tuple], depth: int) -> str:
    if type(value) is tuple:
        items = [_write(x, (*path, i), seen, depth) for i, x in enumerate(value)]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return describe(value)
    name = getattr(value, "__name__", None)
    if callable(value) and isinstance(name, str):
        return name
    try:
        text = repr(value)
    except Exception as error:  # somebody else's repr must not hide the model
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= 200 else text[:200] + "..."
