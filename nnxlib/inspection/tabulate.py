"""``tabulate``: what a model does with an input, as a table: text in a terminal, HTML in a notebook.

The model is traced once, on shapes (:func:`nnxlib.eval_shape`), while a listener follows the calls of its Modules. Each
call gives a :class:`CallInfo`, a row. A Variable is counted at its first path and in the first row of each Module above
it, so whatever is shared or called again adds nothing to a total.

FLOPs are XLA's own estimate for the lowered program of a call, in which the body of a scan counts as often as it runs.
A Module inside ``vmap`` or ``scan`` sees a slice of each of its Variables; how many there are is told by the size of
what is stored, and its row stands for all of them.
"""

from __future__ import annotations

import html
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ..core.call_paths import Listener
from ..core.calls import call_listening, runs
from ..core.data import is_node
from ..core.errors import ArgumentError, UsageError
from ..core.graph import pack
from ..core.iteration import iter_objects
from ..core.objects import Node
from ..core.ops import state
from ..core.reprs import Size
from ..core.rngs import Rngs, RngStream
from ..core.state import to_flat_state
from ..core.tracing import boundary, jaxpr_as_fun
from ..core.variables import RngState, Variable
from ..transforms.abstract import eval_shape
from ..transforms.lift import Arguments, cross
from .grid import draw_table
from .svg import Picture

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass
class CallInfo:
    """One call of a Module: a row of the table.

    Attributes:
      path: of the Module, below the one that is tabulated.
      type: its class.
      method: the name of the method.
      args: with ``jax.ShapeDtypeStruct`` in place of arrays.
      kwargs: the same.
      outputs: the same.
      flops: an estimate of all that the call stands for. None if it was not asked for, or if the call failed.
      vjp_flops: the same, of the forward and the backward pass.
      call_order: how many calls began before.
      stacked: how many layers, or runs of one, the call stands for: more than 1 inside ``vmap`` or ``scan``.
    """

    path: tuple[Any, ...]
    type: type
    method: str
    args: tuple
    kwargs: dict[str, Any]
    outputs: Any = None
    flops: int | None = None
    vjp_flops: int | None = None
    call_order: int = 0
    stacked: int = 1

    @property
    def inputs_repr(self) -> str:
        """The inputs as they are shown, one a line."""
        if len(self.args) == 1 and not self.kwargs:
            return _lines(self.args[0])
        named = [f"{name}: {_short(x)}" for name, x in self.kwargs.items()]
        return "\n".join([*(f"- {_short(x)}" for x in self.args), *named])


def filter_rng_streams(row: CallInfo) -> bool:
    """Whether a row is no random stream: the default ``row_filter``.

    >>> import nnxlib as nnx
    >>> from nnxlib.inspection.tabulate import CallInfo, filter_rng_streams
    >>> filter_rng_streams(CallInfo((), nnx.Linear, '__call__', (), {}))
    True
    """
    return not issubclass(row.type, Rngs | RngStream)


@boundary
def tabulate(
    obj: Any,
    *input_args: Any,
    depth: int | None = None,
    method: str = "__call__",
    row_filter: Callable[[CallInfo], bool] = filter_rng_streams,
    columns: Sequence[str] | None = None,
    table_kwargs: Mapping[str, Any] = NO_OPTIONS,
    column_kwargs: Mapping[str, Any] = NO_OPTIONS,
    console_kwargs: Mapping[str, Any] = NO_OPTIONS,
    compute_flops: bool = False,
    compute_vjp_flops: bool = False,
    **input_kwargs: Any,
) -> Table:
    """Return a table of the calls of Modules in ``obj.method(*input_args, **input_kwargs)``.

    Nothing is computed and nothing changes. There is a row for each call, in order, with path, type, inputs, outputs,
    and a column for each type of Variable: those of the Module itself by name, with their metadata, and how many
    elements and bytes it holds with all below it. The name of a method other than ``__call__`` ends the path. Variables
    that an earlier row of the same Module has shown, or that belong to another Module first, are left out. The last row
    has the totals. Layers that ``vmap`` or ``scan`` run over stacked Variables, and a layer that they run again and
    again, such as the cell of an RNN, are one row, marked ``×n``, with the inputs and outputs of one run, and the
    Variables and FLOPs of all.

    The table is a string, wrapped to the width of the terminal; a notebook shows it as HTML.

    Args:
      obj: a Module, concrete or abstract.
      *input_args: arrays, ``jax.ShapeDtypeStruct``, or pytrees of these; Python numbers and strings stay what they are.
      depth: longest path to show; 0 is ``obj`` alone.
      method: what to call.
      row_filter: which rows to show; by default all but random streams.
      columns: which columns to show, in this order: ``path``, ``type``, ``inputs``, ``outputs``, ``flops``,
        ``vjp_flops`` and names of Variable types; all by default.
      table_kwargs: ``title`` is used; other options of ``rich`` have no effect.
      column_kwargs: has no effect.
      console_kwargs: ``width`` is used, in characters: cells are wrapped to fit, to no less than six. The default is
        that of the terminal.
      compute_flops: add a column of estimated floating point operations; lowers each call again.
      compute_vjp_flops: the same for the forward and the backward pass, with gradients of all floats.
      **input_kwargs: keyword arguments.

    >>> import nnxlib as nnx
    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    >>> columns = 'path', 'outputs', 'Param'
    >>> print(nnx.tabulate(model, jnp.ones((1, 2)), columns=columns, console_kwargs={'width': 80}), end='')
                  Sequential Summary
    ┏━━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━┓
    ┃ path     ┃ outputs      ┃ Param                ┃
    ┡━━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━┩
    │          │ float32[1,3] │ 9 (36 B)             │
    ├──────────┼──────────────┼──────────────────────┤
    │ layers/0 │ float32[1,3] │ bias: float32[3]     │
    │          │              │ kernel: float32[2,3] │
    │          │              │                      │
    │          │              │ 9 (36 B)             │
    ├──────────┼──────────────┼──────────────────────┤
    │          │ Total        │ 9 (36 B)             │
    └──────────┴──────────────┴──────────────────────┘
              Total Parameters: 9 (36 B)

    Raises:
      TypeError: if ``obj`` is not a Module, or has no such method.
      ValueError: for a column that the table does not have.
      Exception: what the method itself raises.
    """
    estimated = [name for name, wanted in zip(_ESTIMATES, (compute_flops, compute_vjp_flops)) if wanted]
    try:
        rows = _calls(obj, method, input_args, input_kwargs, estimated)
    except TypeError as error:
        if not input_args and not input_kwargs and is_node(obj):
            error.add_note("Pass example inputs: nnx.tabulate(model, x).")
        raise
    shown = [row for row in rows if (depth is None or len(row.path) <= depth) and row_filter(row)]
    variables = _Variables(obj)
    fixed = ["path", "type", "inputs", "outputs", *estimated]
    names = [*fixed, *variables.kinds]
    chosen = names if columns is None else list(columns)
    if not set(chosen) <= set(names):
        raise UsageError(f"tabulate has no columns {sorted(set(chosen) - set(names))}; this table has {names}.")
    if not chosen:
        raise UsageError(f"A table needs a column, but `columns` is empty; this table has {names}.")
    cells = [{**_cells(row), **variables.cells(row.path)} for row in shown]
    total: dict[str, str] = {kind: str(variables.size((), kind)) for kind in variables.kinds}
    if rows and rows[0].path == ():  # the call of ``obj`` itself, which is that of all in it
        total |= {name: text for name, text in _cells(rows[0]).items() if name in _ESTIMATES}
    label = next((name for name in reversed(fixed) if name in chosen and name not in total), None)
    footer = {**total, label: "Total"} if label is not None else total
    table = [[row.get(name, "") for name in chosen] for row in [dict(zip(names, names)), *cells, footer]]
    width = console_kwargs.get("width") or shutil.get_terminal_size((0, 0)).columns
    title = table_kwargs.get("title") or f"{type(obj).__name__} Summary"
    footer_text = f"Total Parameters: {variables.size(())}"
    return Table(_draw(table, title, footer_text, width), table, title, footer_text)


class Table(str):
    """A table as text; notebooks show it as HTML, and ``nnx.draw`` makes a picture of it.

    >>> from nnxlib.inspection.tabulate import Table
    >>> table = Table('a | b', [['a', 'b'], ['', '']], 'Title', 'Footer')
    >>> print(table, 'Title</caption>' in table.html)
    a | b True
    """

    __slots__ = ("_content",)
    _content: tuple[list[list[str]], str, str]

    def __new__(cls, text: str, cells: list[list[str]], title: str, footer: str) -> Table:
        self = super().__new__(cls, text)
        self._content = cells, title, footer
        return self

    def __getnewargs__(self) -> tuple[str, list[list[str]], str, str]:
        return str(self), *self._content

    @property
    def html(self) -> str:
        """The table in HTML."""
        return _html(*self._content)

    def _repr_html_(self) -> str:
        return self.html

    def _nnx_picture(self) -> Picture:
        (names, *rows), title, footer = self._content
        bold = {(len(rows), j): "type" for j in range(len(names))}
        paths = {(i, names.index("path")): "name" for i in range(1, len(rows)) if "path" in names}
        right = [j for j, name in enumerate(names) if name in _ESTIMATES]
        return draw_table(title, [names, *rows], paths | bold, right=right, title=title, footer=footer)


# --- the rows -------------------------------------------------------------------------------------------------------


def _calls(obj: Any, method: str, args: tuple, kwargs: dict, estimated: Sequence[str]) -> list[CallInfo]:
    """Trace a method, and return the calls in it, with these estimates."""
    if not is_node(obj):
        given = f"the class {obj.__name__}" if isinstance(obj, type) else f"a {type(obj).__name__}"
        raise ArgumentError(f"tabulate takes a Module, made or abstract, and then its inputs; got {given}.")
    if not callable(getattr(obj, method, None)):
        raise ArgumentError(
            f"tabulate calls a method, and {type(obj).__name__} has no {method!r}; choose one by method=."
        )
    call, traced = _with_static(
        lambda obj, *args, **kwargs: getattr(obj, method)(*args, **kwargs), (obj, *args), kwargs
    )
    packed = pack(Arguments((traced,), {}))
    paths = [p[3:] if p[:3] == ("args", 0, 0) else ("<input>", *p[2:]) for p in packed.layout.paths]
    follower = _Follower(estimated, {p: x.get_raw_value() for p, x in _variables_in(obj)})
    call_listening(Listener(packed.objects, paths, follower.on_call), eval_shape, call, traced)
    for row, name, program in follower.programs:
        setattr(row, name, row.stacked * program())
    return follower.rows


def _with_static(f: Callable, args: tuple, kwargs: dict) -> tuple[Callable, dict[int, Any]]:
    """``f`` as a function of the arrays and Modules in its arguments alone, and these."""
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    traced = {i: x for i, x in enumerate(leaves) if is_node(x) or hasattr(x, "shape")}
    fixed = {i: x for i, x in enumerate(leaves) if i not in traced}

    def call(traced: dict[int, Any]) -> Any:
        given = {**fixed, **traced}
        args, kwargs = treedef.unflatten([given[i] for i in range(len(given))])
        return f(*args, **kwargs)

    return call, traced


class _Follower:
    """Makes a row of each call."""

    def __init__(self, estimated: Sequence[str], stored: Mapping[tuple, Any]):
        self.rows: list[CallInfo] = []
        self.programs: list[tuple[CallInfo, str, Callable[[], int]]] = []  # of each estimate, if the call returned
        self.stacked: list[int] = [1]  # of the calls that are running
        self.estimated, self.stored = estimated, stored

    def on_call(self, module: Any, path: tuple, name: str, args: tuple, kwargs: dict) -> Callable[[Any], None]:
        depth = len(self.stacked)
        row = CallInfo(path, type(module), name, *_shapes((args, kwargs)), call_order=len(self.rows))
        row.stacked = max(self.count_layers(module, path), runs())
        self.rows.append(row)
        self.stacked.append(row.stacked)
        call, traced = _with_static(getattr(type(module), name), (module, *args), kwargs)
        packed = pack(Arguments((traced,), {})) if self.estimated else None

        def finish(out: Any) -> None:
            del self.stacked[depth:]  # also calls that failed, where the caller went on
            row.outputs = _shapes(out)
            if packed is not None:
                for estimate in self.estimated:
                    run = _ESTIMATES[estimate](call, packed.layout)
                    self.programs.append((row, estimate, call_listening(None, _program, run, packed.leaves)))

        return finish

    def count_layers(self, module: Any, path: tuple) -> int:
        """How many slices like those of ``module`` its stored Variables have; without Variables, as its caller."""
        known = False
        for below, variable in _variables_in(module):
            stored: Any = self.stored.get((*path, *below))
            here: Any = variable.get_raw_value()
            if getattr(here, "size", 0) and getattr(stored, "ndim", 0) > here.ndim:
                return stored.size // here.size
            known = known or (stored is not None and not isinstance(variable, RngState))
        return 1 if known else self.stacked[-1]


def _variables_in(node: Any) -> Iterator[tuple[tuple, Variable]]:
    return ((path, x) for path, x in iter_objects(node) if isinstance(x, Variable))


def _shapes(tree: Any) -> Any:
    """A pytree with shapes in place of arrays, and of the Modules in it their classes."""
    if isinstance(tree, dict):  # JAX would sort the keys
        return {key: _shapes(x) for key, x in tree.items()}
    if isinstance(tree, list):
        return [_shapes(x) for x in tree]
    if isinstance(tree, Node):
        return type(tree)
    if isinstance(tree, Variable):
        return _shapes(tree.get_raw_value())
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return jax.ShapeDtypeStruct(tree.shape, tree.dtype)
    if type(tree) is tuple:
        return tuple(map(_shapes, tree))
    is_leaf = jax.tree_util.all_leaves([tree])
    return tree if is_leaf else jax.tree.map(_shapes, tree, is_leaf=lambda x: x is not tree)


# --- estimates ------------------------------------------------------------------------------------------------------


def _forward(f: Callable, layout: Any) -> Callable:
    return lambda leaves: _arrays(cross(f, layout, leaves, part=lambda out: None)[0])


def _forward_and_backward(f: Callable, layout: Any) -> Callable:
    """A function of the leaves to the outputs and the gradients of all floats, for cotangents of one."""

    def run(leaves: list[Any]) -> Any:
        chosen = {i: x for i, x in enumerate(leaves) if _is_float(x)}

        def outputs(chosen: dict[int, Any]) -> list[Any]:
            given = [chosen.get(i, x) for i, x in enumerate(leaves)]
            return list(filter(_is_float, _forward(f, layout)(given)))

        out, pull = jax.vjp(outputs, chosen)
        return out, pull([jnp.ones_like(y) for y in out])

    return run


_ESTIMATES = {"flops": _forward, "vjp_flops": _forward_and_backward}  # by the column


def _arrays(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _program(f: Callable, leaves: Sequence[Any]) -> Callable[[], int]:
    """What estimates ``f``, once the trace around has ended; arrays that ``f`` refers to are inputs like the leaves."""
    closed = jax.make_jaxpr(f)(list(leaves))
    consts, inputs = _shapes((list(closed.consts), jax.tree.leaves(list(leaves))))
    return lambda: int(_cost(closed.jaxpr, type(closed), consts, inputs))


def _cost(jaxpr: Any, close: type, consts: Sequence[Any], inputs: Sequence[Any]) -> float:
    """XLA's estimate, with the bodies of scans counted as often as they run."""

    def run(consts: Sequence[Any], inputs: Sequence[Any]) -> Any:
        return jaxpr_as_fun(close(jaxpr, consts))(*inputs)

    found: Any = jax.jit(run).lower(list(consts), list(inputs)).cost_analysis()
    estimate = (found[0] if isinstance(found, list) else found or {}).get("flops", 0.0)
    return estimate + sum(_repetitions(jaxpr))


def _repetitions(jaxpr: Any) -> list[float]:
    """For each scan, what its repetitions add to an estimate that counts its body as often as the program holds it."""
    found = []
    for eqn in jaxpr.eqns:
        for body in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if not hasattr(body, "eqns"):
                continue
            inner = getattr(body, "jaxpr", body)
            if eqn.primitive.name == "scan":
                total = _cost(inner, type(body), _avals(inner.constvars), _avals(inner.invars))
                length, unroll = eqn.params["length"], eqn.params["unroll"]
                copies = length if unroll >= length else unroll + length % unroll
                found.append(length * total - copies * (total - sum(_repetitions(inner))))
            else:
                found += _repetitions(inner)
    return found


def _avals(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


# --- the Variables --------------------------------------------------------------------------------------------------


class _Variables:
    """The Variables of a model by path; each Module shows them once."""

    def __init__(self, obj: Any):
        self.leaves = list(to_flat_state(state(obj)))
        self.kinds = sorted({_kind(x) for _, x in self.leaves})
        self.shown: set[tuple] = set()

    def size(self, path: tuple, kind: str | None = None) -> Size:
        """How much there is at and below a path, of one kind or of all."""
        below = [x for p, x in self.leaves if p[: len(path)] == path and kind in (None, _kind(x))]
        arrays = [x for leaf in below for x in _arrays(_shapes(leaf))]
        return Size(sum(x.size for x in arrays), sum(x.size * x.dtype.itemsize for x in arrays))

    def cells(self, path: tuple) -> dict[str, str]:
        if path in self.shown:
            return {}
        self.shown.add(path)
        own = [(p[-1], x) for p, x in self.leaves if p[:-1] == path and not isinstance(x, RngState)]
        cells = {}
        for kind in self.kinds:
            listed = [line for name, x in own if _kind(x) == kind for line in _described(name, x)]
            size = self.size(path, kind)
            cells[kind] = "\n".join([*listed, "", str(size)] if listed else [str(size)]) if size[0] else ""
        return cells


def _described(name: Any, x: Any) -> list[str]:
    """The name of a Variable with its shape, and its metadata."""
    metadata = x.get_metadata() if isinstance(x, Variable) else {}
    return [f"{name}: {_short(_shapes(x))}", *(f"  {key}: {_short(value)}" for key, value in metadata.items())]


def _kind(x: Any) -> str:
    return "RngState" if isinstance(x, RngState) else type(x).__name__ if isinstance(x, Variable) else "Array"


# --- the text -------------------------------------------------------------------------------------------------------


def _cells(row: CallInfo) -> dict[str, str]:
    path = "/".join(map(str, row.path))
    return {
        "path": path if row.method == "__call__" else f"{path}/{row.method}".removeprefix("/"),
        "type": row.type.__name__ if row.stacked == 1 else f"{row.type.__name__} ×{row.stacked}",
        "inputs": row.inputs_repr,
        "outputs": _lines(row.outputs),
        "flops": f"{row.flops:,}" if row.flops is not None else "",
        "vjp_flops": f"{row.vjp_flops:,}" if row.vjp_flops is not None else "",
    }


def _lines(value: Any) -> str:
    """A value with an item a line, if it has items."""
    if isinstance(value, dict) and value:
        return "\n".join(f"{key}: {_short(x)}" for key, x in value.items())
    if isinstance(value, list | tuple) and value:
        return "\n".join(f"- {_short(x)}" for x in value)
    return _short(value)


def _short(value: Any) -> str:
    """A value in one line."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(x)}" for key, x in value.items()) + "}"
    if isinstance(value, list | tuple):
        items = ", ".join(map(_short, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 40 else type(value).__name__


def _draw(table: list[list[str]], title: str, footer: str, width: int) -> str:
    """Draw a table with a header, wrapped to ``width`` characters if that is not 0."""
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*table)]
    frame = 3 * len(widths) + 1
    while width and sum(widths) + frame > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    header, *rows = [_wrapped(row, widths) for row in table]
    body = _rule("├┼┤", "─", widths).join(_row(row, "│") for row in rows)
    return "".join(
        [
            title.center(sum(widths) + frame).rstrip() + "\n",
            *(_rule("┏┳┓", "━", widths), _row(header, "┃"), _rule("┡╇┩", "━", widths)),
            *(body, _rule("└┴┘", "─", widths), "\n"),
            footer.center(sum(widths) + frame).rstrip() + "\n",
        ]
    )


_NARROWEST = 6


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> list[list[str]]:
    """The lines of each cell, padded to its width and the height of the row."""
    cells = [
        [part for line in cell.split("\n") for part in (textwrap.wrap(line, w) or [""])] for cell, w in zip(row, widths)
    ]
    height = max(map(len, cells))
    return [[line.ljust(w) for line in [*cell, *[""] * (height - len(cell))]] for cell, w in zip(cells, widths)]


def _row(cells: Sequence[Sequence[str]], bar: str) -> str:
    return "".join(f"{bar} {f' {bar} '.join(lines)} {bar}\n" for lines in zip(*cells))


def _rule(corners: str, line: str, widths: Sequence[int]) -> str:
    left, middle, right = corners
    return left + middle.join(line * (w + 2) for w in widths) + right + "\n"


# --- the HTML -------------------------------------------------------------------------------------------------------

# Styles stand in the elements, since some viewers of notebooks drop style sheets; greys are translucent and the colour
# of text is inherited, so the table fits a light page and a dark one.
_LINE = "border:1px solid rgba(128,128,128,0.4);"
_CELL = f"{_LINE}padding:4px 10px;text-align:left;vertical-align:top;white-space:pre-wrap;"
_HEAD = f"{_CELL}font-weight:bold;background:rgba(128,128,128,0.2);"
_NUMBERS = "text-align:right;font-variant-numeric:tabular-nums;"
_TABLE = "border-collapse:collapse;font-family:monospace;font-size:0.9em;color:inherit;"
_TITLE = "font-weight:bold;padding:4px;text-align:center;"


def _html(table: list[list[str]], title: str, footer: str) -> str:
    names, *rows, totals = table
    head = _html_row("th", names, [_HEAD] * len(names))
    styles = [_CELL + _NUMBERS * (name in _ESTIMATES) for name in names]
    body = "".join(_html_row("td", row, styles) for row in rows)
    foot = _html_row("td", totals, [style + "font-weight:bold;" for style in styles])
    return (
        f'<div style="overflow-x:auto"><table style="{_TABLE}">'
        f'<caption style="{_TITLE}">{html.escape(title)}</caption>'
        f"<thead>{head}</thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"
        f'<div style="font-family:monospace;{_TITLE}text-align:left;">{html.escape(footer)}</div></div>'
    )


def _html_row(tag: str, cells: Sequence[str], styles: Sequence[str]) -> str:
    shown = [f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell, style in zip(cells, styles)]
    return f"<tr>{''.join(shown)}</tr>"
