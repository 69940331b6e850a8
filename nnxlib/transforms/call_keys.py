"""Keys of calls: what tells the calls of a jitted function apart, found without a walk through the model.

``jax.jit`` finds a compiled function by the *signature* of a call: which arguments there are, what containers are
around the leaves, and the types of the leaves. With objects among the leaves it also depends on their structure, but
each object keeps a table (core/tables.py), and so its interned layout. So the key is the signature, without types,
these layouts, and what the objects share. A :class:`KnownCall` has it, and what was found on the way.

Variables that are arguments by themselves, as in a State of gradients, are often new at each call. They get a table
only when they come again; until then a :class:`~nnxlib.core.packing.VariableGroup` describes them.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from ..core.annotations import NamedTuple
from ..core.data import is_node
from ..core.live_table import LiveTable
from ..core.making import VARIABLE_TYPES
from ..core.packing import Sharing, Tables, VariableGroup, sharing_of
from ..core.static import StaticArgument
from ..core.tables import table_of
from ..core.variables import Variable

LEAF_TYPES: set[type] = {int, float, complex, bool, np.ndarray}  # more are added when they are first met


class KnownCall(NamedTuple):
    """All that was found out about a call to look up its compiled function."""

    key: tuple[Hashable, tuple[Any, ...], Any]  # the signature, the layouts of objects, what they share
    signature: Hashable
    sharing: tuple[Sharing, ...]  # empty if they share nothing
    leaves: Sequence[Any]  # objects are leaves, too
    roots: Sequence[Any]  # the objects that have tables; None in place of a group
    tables: Tables  # of these
    plain: list[Any]  # the leaves that are no objects
    first: Variable | None  # of the Variables in groups

    @property
    def live_tables(self) -> list[LiveTable]:
        """The tables that objects keep."""
        return [table for table in self.tables if type(table) is LiveTable]

    def holds(self) -> bool:
        """Whether the tables are still what the key says; not if another thread has described a change since."""
        layouts = [layout for layout in self.key[1] if layout is not None]
        return layouts == [x.layout for x in self.live_tables] and self.sharing == sharing_of(self.roots, self.tables)


# Two ways to flatten arguments: the first only knows tuples, lists and dicts, and takes half the time of the second,
# which knows all pytrees except nodes and Variables.
flatten_containers = type(jtu.default_registry)(
    enable_none=True, enable_tuple=True, enable_namedtuple=True, enable_list=True, enable_dict=True
).flatten
flatten_pytrees = functools.partial(jtu.tree_flatten, is_leaf=is_node)


def unfolded(leaves: Sequence[Any], key: Hashable, flatten: Callable, has_static: bool) -> tuple[list[Any], Hashable]:
    """The leaves of arguments in containers, and the signature with the containers and the static arguments."""
    found, treedef = flatten(leaves)
    if not has_static:
        return found, (key, treedef)
    static = [x.frozen() for x in found if type(x) is StaticArgument]
    return [x for x in found if type(x) is not StaticArgument], (key, treedef, *static)


def known_call(leaves: Sequence[Any], signature: Hashable, grouping: bool = True) -> KnownCall | None:
    """Describe a call with these leaves; None if an object has to be walked, or if a leaf is a container.

    Variables that are leaves are grouped, if the first of them has no table; not if ``grouping`` is False.
    """
    layouts: list[Any] = []
    roots: list[Any] = []
    tables: list[LiveTable | VariableGroup] = []
    plain: list[Any] = []
    group: VariableGroup | None = None
    first: Variable | None = None
    for x in leaves:
        kind = type(x)
        if kind in LEAF_TYPES:
            layouts.append(None)
            plain.append(x)
            continue
        if grouping and kind in VARIABLE_TYPES:
            if first is None:
                grouping = x._nnx_table is None
                first = x if grouping else None
            if grouping:
                metadata = x._metadata.const() if x._metadata else None
                if metadata is not None and metadata.mutable:
                    return None
                if group is None:
                    group = VariableGroup()
                    roots.append(None)
                    tables.append(group)
                layouts.append(kind if metadata is None else (kind, metadata))
                group.objects.append(x)
                continue
        if is_node(x):
            if kind in weakref.ProxyTypes:
                return None
            table = table_of(x)
            if table.snapshot is not None:  # it is walked at each call
                return None
            layouts.append(table.layout)
            roots.append(x)
            tables.append(table)
            group = None
        elif _is_leaf(x):
            layouts.append(None)
            plain.append(x)
        else:
            return None
    if first is not None:
        for described in tables:
            if type(described) is VariableGroup:
                described.cells = [x._cell for x in described.objects]
    sharing = () if first is None and len(tables) < 2 else sharing_of(roots, tables)
    return KnownCall((signature, tuple(layouts), sharing), signature, sharing, leaves, roots, tables, plain, first)


def _is_leaf(x: Any) -> bool:
    if isinstance(x, jax.Array | np.generic):
        LEAF_TYPES.add(type(x))
        return True
    return jtu.all_leaves([x]) and not isinstance(x, types.MethodType)  # a method may be bound to a Module
