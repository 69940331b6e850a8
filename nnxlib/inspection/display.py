"""``display``: show objects in full in a notebook, by Treescope, and as text elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from ..core.data import holds_nodes
from ..core.reprs import node_repr
from .svg import DARK_PAGES, LIGHT_PAGES


def display(*args: Any) -> None:
    """Show each argument: as an interactive tree in a notebook, else by printing it.

    In a notebook each level folds and unfolds, arrays are drawn (a click shows how they are sharded), each Module tells
    how much it holds, an object that occurs again is marked, and a button beside each part copies its path. Colours
    follow the theme of the notebook, light or dark.

    Args:
      *args: Modules, States, arrays, or anything else. An object that cannot be shown is said to be one; nothing is
        raised.

    >>> import nnxlib as nnx
    >>> nnx.display(nnx.Param(1.0), 'text')
    Param(1.0)
    text
    """
    show = _show_tree if _in_notebook() else _show_text
    for x in args:
        try:
            show(x)
        except Exception:  # of Treescope, or of a method of somebody else's class
            _show_text(x)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


# Treescope draws in black on white. On a dark page its colours are inverted, with their hues kept; its background is
# that of the page.
_INVERTED = "treescope-container{filter:invert(1) hue-rotate(180deg)}"
_STYLE = f"""\
<style>
treescope-container::part(treescope_root){{background-color:transparent}}
body:is({",".join(DARK_PAGES)}) {_INVERTED}
@media (prefers-color-scheme:dark){{
body:not({",".join(LIGHT_PAGES)}) {_INVERTED}
}}
</style>"""


def _show_tree(x: Any) -> None:
    import treescope  # only when first displayed: the import takes longer than that of nnxlib
    from IPython.display import display as show  # type: ignore[import-not-found]  # there is one, in a notebook

    show({"text/html": _STYLE}, raw=True)
    try:
        treescope.display(x, ignore_exceptions=True, autovisualize=True)
    except AttributeError:  # Treescope 0.1.9 cannot draw arrays of JAX 0.8 and later
        treescope.display(x, ignore_exceptions=True, autovisualize=False)


def _show_text(x: Any) -> None:
    try:
        text = node_repr(x) if type(x) in (list, tuple, dict) and holds_nodes(x) else str(x)
    except Exception as error:
        text = f"<{type(x).__name__}, which cannot be shown: {type(error).__name__}>"
    print(text)
