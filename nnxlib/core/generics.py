"""Type variables of generic classes: without arguments, these are classes of ``Any``.

So ``state: nnx.State`` means ``State[Any, Any]``, and ``weight: nnx.Param`` means ``Param[Any]``; else a strict type
checker would take the arguments that were left out as unknown. Nothing of that is of use when a program runs, so
``typing_extensions``, which has such variables before Python 3.13, is not imported then.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    A = TypeVar("A", default=Any)
    K = TypeVar("K", default=Any)
    M = TypeVar("M", default=Any)
    V = TypeVar("V", default=Any)
else:
    from typing import TypeVar

    A, K, M, V = map(TypeVar, "AKMV")
