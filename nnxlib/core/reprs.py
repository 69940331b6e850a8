"""How object graphs are written: nested, with sizes, in a limited number of lines, and without ever raising.

A graph is first read into a tree of *parts*, each with how much it holds; an object that occurs again is a reference to
its first path. A function that is passed reads a value into its opening, children and closing, so that Modules, States
and GraphDefs are written alike. Then lines are made of the parts:

- attributes that are not data share lines, and those that equal the default of an argument of that name are left out;
- arrays are written as dtype and shape, so nothing is read from a device;
- equal neighbours, such as the layers of a transformer, are written once, with how many more there are;
- where that is still more than :data:`MOST_LINES`, the deepest levels are folded, with how much each fold holds.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import all_leaves, tree_flatten_with_path, tree_leaves

from .annotations import NamedTuple, parameters_of
from .data import is_node
from .errors import describe, format_path
from .missing import MISSING
from .traversals import path_key
from .variables import RngState, Variable

MOST_LINES = 300  # of one repr; beyond, deep levels are folded
DEEPEST = 24  # levels that are written out
WIDEST = 64  # different children of one part that are written out
WIDTH = 100  # columns
_COMMENT = 64  # the column beyond which comments are not aligned


# --- sizes ----------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """How much arrays hold."""

    elements: int
    bytes: int

    def __str__(self) -> str:
        size, unit = float(self.bytes), 0
        while size >= 1000 and unit < 5:
            size, unit = size / 1000, unit + 1
        text = f"{self.bytes} B" if unit == 0 else f"{size:.1f} {'KMGTP'[unit - 1]}B"
        return f"{self.elements:,} ({text})"

    def plus(self, other: Size) -> Size:
        return Size(self.elements + other.elements, self.bytes + other.bytes)


def size_of(array: Any) -> Size:
    """The size of an array by its shape and dtype; none where they are not known, as in symbolic shapes.

    >>> print(size_of(np.zeros((2, 3), 'float32')))
    6 (24 B)
    """
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None or not all(isinstance(n, int) for n in shape):
        return Size(0, 0)
    elements = math.prod(shape)
    return Size(elements, elements * getattr(dtype, "itemsize", 0))


# --- parts ----------------------------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """A value that is written in one piece.

    ``kind`` is what its size counts as, None for what is not data; ``identity`` is the id of an object, or None.
    """

    text: str
    kind: str | None = None
    size: Size = Size(0, 0)
    identity: int | None = None


class Group(NamedTuple):
    """A value that is written as an opening, children (label, key, value) and a closing."""

    opening: str
    children: Sequence[tuple[str, Any, Any]]
    closing: str
    identity: int | None = None


class Part:
    """One value of a graph, as it is written at one place, and the parts in it; see :func:`read`."""

    def __init__(self, label: str, key: Any, parent: Part | None, opening: str):
        self.label, self.key, self.parent, self.opening = label, key, parent, opening
        self.closing: str | None = None  # None for what is written in one piece
        self.children: list[Part] = []
        self.kind: str | None = None
        self.sizes: dict[str, Size] = {}
        self.identity: int | None = None
        self.target: Part | None = None  # of a reference: where the object is written
        self.below = 0  # how many parts there are in it
        self.is_setting = True  # whether there is no data in it, and no object other than lists and dicts
        self.form = 0  # equal for parts that are written alike, apart from their labels

    @property
    def is_container(self) -> bool:
        """Whether this is a list, dict or tuple."""
        return self.closing in ("])", "})", "]", "}") or self.opening == "("

    @property
    def path(self) -> tuple:
        part, keys = self, []
        while part.parent is not None:
            keys.append(part.key)
            part = part.parent
        return tuple(reversed(keys))

    @property
    def is_static(self) -> bool:
        return self.closing is None and self.kind is None


def read(root: Any, expand: Callable[[Any], Leaf | Group]) -> Part:
    """Read a graph into parts; without recursion, so that a chain of 10,000 objects can be read, too."""
    first: dict[int, Part] = {}
    forms: dict[tuple, int] = {}
    top = Part("", None, None, "")
    finished: list[Part] = []
    stack: list[tuple[Part, Any]] = [(top, root)]
    while stack:
        part, value = stack.pop()
        try:
            found = expand(value)
        except Exception as error:  # somebody else's class must not hide the rest of the model
            found = Leaf(f"<{type(value).__name__}, which raises {type(error).__name__}>")
        seen = first.setdefault(found.identity, part) if found.identity is not None else part
        finished.append(part)
        part.identity = found.identity
        if seen is not part:
            part.target = seen
            part.opening, part.kind = f"<{seen.opening.partition('(')[0]} at {format_path(seen.path)}>", "reference"
        elif isinstance(found, Leaf):
            part.opening, part.kind = found.text, found.kind
            if found.kind is not None:
                part.sizes[found.kind] = found.size
        elif not found.children:
            part.opening = found.opening + found.closing
        else:
            part.opening, part.closing = found.opening, found.closing
            part.children = [Part(label, key, part, "") for label, key, _ in found.children]
            stack.extend(zip(reversed(part.children), (value for *_, value in reversed(found.children))))
    for part in reversed(finished):  # children before parents
        form = (part.opening, part.closing, *((x.label, x.form) for x in part.children))
        part.form = forms.setdefault(form, len(forms))
        contents = part.is_container and all(x.is_setting for x in part.children)
        part.is_setting = part.kind is None if part.closing is None else contents
        part.below = len(part.children) + sum(x.below for x in part.children)
        for child in part.children:
            for kind, size in child.sizes.items():
                part.sizes[kind] = part.sizes.get(kind, Size(0, 0)).plus(size)
    return top


def parts_below(part: Part) -> Iterator[Part]:
    """A part and all that is in it."""
    stack = [part]
    while stack:
        part = stack.pop()
        yield part
        stack.extend(part.children)


def sizes_text(sizes: dict[str, Size]) -> str:
    """Write how much there is, by type of Variable."""
    return ", ".join(f"{kind}: {size}" for kind, size in sizes.items() if size.elements)


# --- lines ----------------------------------------------------------------------------------------------------------

_Line = tuple[str, str]  # the text, and the comment after it


def write(root: Any, expand: Callable[[Any], Leaf | Group]) -> str:
    """Write a graph, which ``expand`` reads, as deep as it fits into :data:`MOST_LINES`, at least to one level."""
    part = read(root, expand)
    lines: list[_Line] = []
    for limit in range(1, DEEPEST + 1):
        more = list(islice(_lines(part, 0, limit), MOST_LINES))
        if lines and (len(more) >= MOST_LINES or more == lines):
            break
        lines = more
    (last, comment) = lines[-1]
    lines[-1] = last.removesuffix(","), comment
    column = max([len(text) for text, comment in lines if comment and len(text) <= _COMMENT], default=0)
    return "\n".join(f"{text:<{column}}  # {comment}" if comment else text for text, comment in lines)


def _lines(part: Part, level: int, limit: int) -> Iterator[_Line]:
    indent = "  " * level
    opening = f"{indent}{part.label}{part.opening}"
    comment = sizes_text(part.sizes)
    if part.closing is None:
        yield f"{opening},", comment.partition(": ")[2]
    elif _is_plain(part) and (short := in_one_line(part, WIDTH - len(opening))):
        yield f"{opening}{short}{part.closing},", comment.partition(": ")[2]
    elif level >= limit:
        yield f"{opening}...{part.closing},", ", ".join(filter(None, [f"{part.below} folded", comment]))
    else:
        yield opening, comment
        yield from _children(part, level + 1, limit)
        yield f"{indent}{part.closing},", ""


def _is_plain(part: Part) -> bool:
    """Whether a part holds settings alone; or also arrays, unless it is an object that has them as attributes."""
    arrays = ("Array",) if part.identity is None else ()
    return all(x.closing is None and (x.kind is None or x.kind in arrays) for x in part.children)


def in_one_line(part: Part, width: int) -> str | None:
    """What is between the opening and the closing of a part, None if it is too long."""
    if len(part.children) > WIDEST:
        return None
    text = ", ".join(f"{x.label}{x.opening}" for x in part.children)
    return text if len(text) + 2 <= width and "\n" not in text else None


def _children(part: Part, level: int, limit: int) -> Iterator[_Line]:
    """The lines of the children: static neighbours share lines, equal ones are written once, too many are counted."""
    indent, written = "  " * level, 0
    positional = isinstance(part.children[0].key, int)

    def sort(x: Part) -> Any:
        return "static" if x.is_static else x.form if positional else id(x)

    for kind, run in groupby(part.children, sort):
        parts = list(run)
        if written >= WIDEST:
            yield f"{indent}... and {len(part.children) - part.children.index(parts[0])} more", ""
            return
        if kind == "static":
            shown = parts[:WIDEST]
            yield from _filled([f"{x.label}{x.opening}," for x in shown], indent)
            if len(parts) > WIDEST:
                yield f"{indent}... and {len(parts) - WIDEST} more", ""
            written += len(shown)
            continue
        shown = parts if len(parts) < 3 else parts[:1]
        for x in shown:
            yield from _lines(x, level, limit)
        if len(shown) < len(parts):
            yield f"{indent}... {len(parts) - 1} more like this one, to [{parts[-1].key}]", ""
        written += len(shown)


def _filled(items: Sequence[str], indent: str) -> Iterator[_Line]:
    line = ""
    for item in items:
        if line and len(indent) + len(line) + len(item) >= WIDTH:
            yield indent + line, ""
            line = ""
        line = f"{line} {item}" if line else item
    yield indent + line, ""


# --- nested mappings --------------------------------------------------------------------------------------------------


def entry_text(label: str, text: str) -> str:
    """The repr of a value behind a label; its further lines stand below the first."""
    return label + text.replace("\n", "\n" + " " * len(label))


def levels_text(level: Mapping[Any, Any], width: int = 90, columns: int = WIDTH - 1) -> str:
    """Write nested mappings: a level on one line where that fits into the width, else one line for each key.

    ``columns`` are those of the lines, to the right of where the text will stand. It is recursive, so for mappings that
    are not :func:`large <is_large>`.
    """
    columns -= len("  ")
    texts = []
    for key, value in level.items():
        label = f"{key!r}: "
        is_level = isinstance(value, Mapping)
        text = levels_text(value, columns - len(label), columns) if is_level else repr(value)
        texts.append(label + text if is_level else entry_text(label, text))
    line = f"{{{', '.join(texts)}}}"
    if len(line) <= width and "\n" not in line:
        return line
    return "\n".join(["{", *(entry_text("  ", text) + "," for text in texts), "}"])


LARGE = 200  # leaves of a State; beyond, what is alike or deep is folded


def is_large(mapping: Mapping[Any, Any]) -> bool:
    """Whether nested mappings have so many keys that they are to be written by :func:`write`, which folds them."""
    count, stack = 0, [mapping]
    while stack and count <= LARGE:
        level = stack.pop()
        count += len(level)
        stack.extend(x for x in level.values() if isinstance(x, Mapping))
    return count > LARGE


# --- objects --------------------------------------------------------------------------------------------------------


def node_repr(node: Any) -> str:
    """Write a node with everything below it; an object that occurs again is written as its first path."""
    return write(node, expand_object)


def expand_object(value: Any) -> Leaf | Group:
    """Read a node, a Variable, or a value of an attribute."""
    if type(value) in _SIMPLE:
        return Leaf(_cut(repr(value)))
    if isinstance(value, Variable):
        if isinstance(value, RngState):
            return Leaf(variable_text(value), "RngState", identity=id(value))
        return Leaf(variable_text(value), type(value).__name__, _total(value._nnx_value), id(value))
    name = type(value).__name__
    if is_node(value):
        if not is_made(value):
            return Leaf(f"{name}(<not initialised>)")
        defaults = _defaults(type(value))
        items = [(key, x) for key, x in value._nnx_children() if not _is_default(x, defaults.get(key, MISSING))]
        return node_group(type(value), items, id(value))
    if _is_array(value):
        return Leaf(array_text(value), "Array", size_of(value))
    return _tree_group(value) if _holds_data(value) else Leaf(static_repr(value))


_SIMPLE = {bool, float, int, str, type(None)}  # most attributes


def _defaults(kind: type) -> Mapping[str, Any]:
    """The defaults of the arguments of a constructor, by name."""
    return {x.name: x.default for x in parameters_of(kind.__init__) if x.default is not x.empty}


def _is_default(value: Any, default: Any) -> bool:
    """Whether an attribute is an argument that was left out, so that it says nothing about this object."""
    if type(value) in _SIMPLE:
        return type(value) is type(default) and value == default
    return value is default and not (is_node(value) or _is_array(value) or _holds_data(value))


def _holds_data(value: Any) -> bool:
    """Whether a value is a pytree, such as the state of an optimizer, with arrays or objects in it."""
    leaves = [] if all_leaves([value]) else tree_leaves(value, is_leaf=is_node)
    return any(is_node(x) or _is_array(x) for x in leaves)


def _tree_group(tree: Any) -> Group:
    """A pytree as a group, with the keys of a mapping, or the names of its fields if its class has some."""
    kind = type(tree)
    if isinstance(tree, Mapping):
        opening, closing = ("{", "}") if kind is dict else (f"{kind.__name__}({{", "})")
        return Group(opening, [(f"{static_repr(key)}: ", key, x) for key, x in tree.items()], closing)
    keyed, _ = tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    items = [(path_key(key), x) for (key,), x in keyed]
    opening, closing = {tuple: ("(", ")"), list: ("[", "]")}.get(kind, (f"{kind.__name__}(", ")"))
    return Group(opening, [("" if isinstance(key, int) else f"{key}=", key, x) for key, x in items], closing)


def is_made(value: Any) -> bool:
    """Whether a value is a node, not a Variable, whose ``__new__`` has run."""
    return is_node(value) and hasattr(value, "_nnx_stamps") and not isinstance(value, Variable)


def node_group(kind: type, items: Iterable[tuple[Any, Any]], identity: int) -> Group:
    """A node as a group: of a list without labels, of a dict with its keys, of other classes with attributes."""
    name = kind.__name__
    if issubclass(kind, list):
        return Group(f"{name}([", [("", key, x) for key, x in items], "])", identity)
    if issubclass(kind, dict):
        return Group(f"{name}({{", [(f"{static_repr(key)}: ", key, x) for key, x in items], "})", identity)
    return Group(f"{name}(", [(f"{key}=", key, x) for key, x in items], ")", identity)


def variable_text(variable: Variable) -> str:
    """Write a Variable in one line, without reading its value from the device; never raises."""
    metadata = "".join(f", {k}={static_repr(v)}" for k, v in variable._metadata.items())
    return f"{type(variable).__name__}({static_repr(variable._nnx_value)}{metadata})"


def array_text(array: Any) -> str:
    """Write an array as dtype and shape, and how it is sharded if it is."""
    try:
        sharding = getattr(array, "sharding", None)
    except Exception:  # a tracer has none
        sharding = None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    return f"{describe(array)} over {spec}" if any(axis is not None for axis in spec) else describe(array)


def _is_array(value: Any) -> bool:
    if isinstance(value, np.generic):  # a number, such as a size that NumPy computed: static, and worth reading
        return False
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


def _total(value: Any) -> Size:
    """The size of the arrays in a value; a Variable may hold any pytree."""
    return functools.reduce(Size.plus, map(size_of, tree_leaves(value)), Size(0, 0))


def static_repr(value: Any) -> str:
    """Write a value in one line: functions and classes by name, arrays by dtype and shape; never raises.

    >>> static_repr((len, int, [np.zeros(3)], {'a': np.dtype('int8')}))
    "(len, int, [float64[3]], {'a': int8})"
    """
    return _short(value, 0)


def _short(value: Any, depth: int) -> str:
    try:
        return _cut(_text(value, depth))
    except Exception as error:  # somebody else's repr must not hide the model
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


def _text(value: Any, depth: int) -> str:
    kind = type(value)
    if kind in (tuple, list, dict) and depth > 8:
        return "..."
    if kind in (tuple, list):
        items = ", ".join(_short(x, depth + 1) for x in value[:WIDEST])
        items += f", ... and {len(value) - WIDEST} more" if len(value) > WIDEST else ""
        return f"[{items}]" if kind is list else f"({items}{',' if len(value) == 1 else ''})"
    if kind is dict:
        items = [f"{_short(k, depth + 1)}: {_short(x, depth + 1)}" for k, x in islice(value.items(), WIDEST)]
        return "{" + ", ".join([*items, *(["..."] if len(value) > WIDEST else [])]) + "}"
    if isinstance(value, Variable):
        return variable_text(value)
    if _is_array(value):
        return array_text(value)
    if isinstance(value, np.dtype):
        return str(value)
    name = getattr(value, "__name__", None)
    if callable(value) and isinstance(name, str):
        return name
    return re.sub(_ADDRESS, "", re.sub(_FUNCTION, r"\1", repr(value)))


_FUNCTION = r"<function (?:[^ ]*\.)?([^ .]+) at 0x[0-9a-f]+>"
_ADDRESS = r" at 0x[0-9a-f]+(?=>)"


def _cut(text: str) -> str:
    text = " ".join(text.split("\n")) if "\n" in text else text
    return text if len(text) <= 200 else text[:200] + "..."
