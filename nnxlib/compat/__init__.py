"""Module paths that flax.nnx users import: thin aliases, no logic.

``from nnxlib import graphlib`` and ``from nnxlib.variablelib import Param`` work as they do there; each name
here stands for the files of ours that have its contents.
"""

import sys

from . import filterlib, graphlib, helpers, module, pytreelib, rnglib, spmd, statelib, variablelib

ALIASES = {
    "filterlib": filterlib,
    "graph": graphlib,
    "graphlib": graphlib,
    "helpers": helpers,
    "module": module,
    "object": pytreelib,
    "pytreelib": pytreelib,
    "rnglib": rnglib,
    "spmd": spmd,
    "statelib": statelib,
    "variablelib": variablelib,
}

for _name, _module in ALIASES.items():
    sys.modules.setdefault(f"nnxlib.{_name}", _module)
