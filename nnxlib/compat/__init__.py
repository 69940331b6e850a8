"""Module paths that flax.nnx users import: aliases, and the few things that are of use only under such a path.

``from nnxlib import graphlib`` and ``from nnxlib.variablelib import Param`` work as they do there; each name
here stands for the files of ours that have its contents. ``nnx.compat.jit`` and the others that flax.nnx has in its own
``compat``, which choose graph mode, are those of :mod:`nnxlib.compat.flax`.
"""

import functools
import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

_HERE = (
    "filterlib graphlib helpers ids module proxy_caller pytreelib reprlib rnglib spmd statelib summary tracers "
    "variablelib visualization"
).split()
ALIASES = {  # nnxlib.NAME: the module that it is
    **{name: f"{__name__}.{name}" for name in _HERE},
    "extract": "nnxlib.transforms.extract",
    "graph": "nnxlib.compat.graphlib",
    "metrics": "nnxlib.training.metrics",
    "object": "nnxlib.compat.pytreelib",
    "traversals": "nnxlib.core.traversals",
    "wrappers": "nnxlib.bridge.wrappers",
}


class _Finder:  # not from importlib.abc, which takes a twentieth of the time to import nnxlib
    """Imports ``nnxlib.NAME`` as the module that it is an alias of.

    Where nnxlib stands for flax.nnx, ``flax.nnx.nn.linear`` is ``nnxlib.nn.linear``. Python itself would run the file
    once more under the other name, and with it all of nnxlib: its Modules would not be ours.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        found = _meant(fullname)
        return ModuleSpec(fullname, cast(Any, self)) if found and importlib.util.find_spec(found) else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Have Python make a new module."""

    def exec_module(self, module: ModuleType) -> None:
        alias = module.__name__
        sys.modules[alias] = importlib.import_module(_meant(alias))


def _meant(fullname: str) -> str:
    """The name of the module that is to be imported in place of this one, or nothing."""
    if fullname.startswith("flax.nnx."):
        stands_in = getattr(sys.modules.get("flax.nnx"), "__name__", "") in ("nnxlib", f"{__name__}.flax")
        return fullname.replace("flax.nnx", "nnxlib", 1) if stands_in else ""
    package, _, name = fullname.rpartition(".")
    return ALIASES.get(name, "") if package == "nnxlib" else ""


sys.meta_path.insert(0, _Finder())

IN_GRAPH_MODE = frozenset(  # what has the switches set
    "backup_keys cached_partial checkify clone cond custom_vjp eval_shape flatten fori_loop fork_rngs "
    "get_abstract_model grad graphdef iter_children iter_graph iter_modules jit jvp pmap recursive_map remat reseed "
    "scan shard_map split split_rngs state switch value_and_grad view view_info vjp vmap while_loop".split()
)


def __getattr__(name: str) -> Any:
    if name in _HERE:
        return importlib.import_module(f".{name}", __name__)
    if name not in IN_GRAPH_MODE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "backup_keys":
        return __getattr__("rnglib").backup_keys
    flax = importlib.import_module(".flax", __name__)  # only now: it imports all of nnxlib
    found = getattr(flax, name)
    return functools.partial(found, graph=True, graph_updates=True) if name in flax.trees.TRANSFORMS else found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HERE, *IN_GRAPH_MODE})
