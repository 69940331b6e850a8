"""Type variables of generic classes: without arguments, these are classes of ``Any``.

So ``state: nnx.State`` means ``State[Any, Any]``, and ``weight: nnx.Param`` means ``Param[Any]``; else a strict type
checker would take the arguments that were left out as unknown.
"""

import sys
from typing import Any

if sys.version_info >= (3, 13):
    from typing import TypeVar
else:
    from typing_extensions import TypeVar

A = TypeVar("A", default=Any)
K = TypeVar("K", default=Any)
M = TypeVar("M", default=Any)
V = TypeVar("V", default=Any)
