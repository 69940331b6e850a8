"""Module paths that flax.nnx users import: aliases, with what little is of use only under that path.

``from nnxlib import graphlib`` and ``from nnxlib.variablelib import Param`` work as they do there; each name
here stands for the files of ours that have its contents. ``nnx.compat.jit`` and the others that flax.nnx has in its own
``compat``, which choose graph mode, are those of :mod:`nnxlib.compat.flax`.
"""

import functools
import importlib
import sys
from typing import Any

from ..core import traversals
from ..transforms import extract
from . import (
    filterlib,
    graphlib,
    helpers,
    ids,
    module,
    proxy_caller,
    pytreelib,
    reprlib,
    rnglib,
    spmd,
    statelib,
    summary,
    tracers,
    variablelib,
    visualization,
)

ALIASES = {
    "extract": extract,
    "filterlib": filterlib,
    "graph": graphlib,
    "graphlib": graphlib,
    "helpers": helpers,
    "ids": ids,
    "module": module,
    "object": pytreelib,
    "proxy_caller": proxy_caller,
    "pytreelib": pytreelib,
    "reprlib": reprlib,
    "rnglib": rnglib,
    "spmd": spmd,
    "statelib": statelib,
    "summary": summary,
    "tracers": tracers,
    "traversals": traversals,
    "variablelib": variablelib,
    "visualization": visualization,
}

for _name, _module in ALIASES.items():
    sys.modules.setdefault(f"nnxlib.{_name}", _module)

_IN_GRAPH_MODE = frozenset(
    "backup_keys cached_partial checkify clone cond custom_vjp eval_shape flatten fori_loop fork_rngs "
    "get_abstract_model grad graphdef iter_children iter_graph iter_modules jit jvp pmap recursive_map remat reseed "
    "scan shard_map split split_rngs state switch value_and_grad view view_info vjp vmap while_loop".split()
)


def __getattr__(name: str) -> Any:
    if name not in _IN_GRAPH_MODE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    flax = importlib.import_module(".flax", __name__)  # which lies above all
    found = getattr(rnglib if name == "backup_keys" else flax, name)
    return functools.partial(found, graph=True, graph_updates=True) if name in flax.functional.TRANSFORMS else found


def __dir__() -> list[str]:
    return sorted({*globals(), *_IN_GRAPH_MODE})
