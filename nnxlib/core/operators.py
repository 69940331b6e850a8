"""What makes a Variable behave like the array it holds: operators, indices, and the protocols of NumPy and JAX.

Each acts on the value as the user reads it, through the hooks. The result is an array, not a Variable. Only in-place
operators (``v += 1``) and assignments to items write to the Variable; they do so through its hooks, too.
"""

from __future__ import annotations

import copy as copy_lib
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import jax
import numpy as np
from jax import Ref

from . import errors
from .generics import A
from .tracing import Tracer

V = TypeVar("V", bound="ArrayOperators")


def unwrapped(x: Any) -> Any:
    """The value of a Variable, through its hooks; anything else as it is."""
    return x.get_value() if isinstance(x, ArrayOperators) else x


class ArrayOperators(Generic[A]):
    """The base class of Variable that makes it an array wherever one is expected."""

    __slots__ = ()
    __array_priority__ = 200  # ndarray + Variable asks the Variable

    def __jax_array__(self) -> Any:
        return self.get_value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.get_value(), dtype=dtype) if not copy else np.array(self.get_value(), dtype=dtype)

    def __array_namespace__(self, **kwargs: Any) -> Any:  # of the Python array API standard, like the next two
        return self.get_value().__array_namespace__(**kwargs)  # type: ignore[union-attr]

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.get_value().__dlpack__(**kwargs)  # type: ignore[union-attr]

    def __dlpack_device__(self) -> tuple:
        return self.get_value().__dlpack_device__()  # type: ignore[union-attr]

    if TYPE_CHECKING:  # what `_add_operators` adds, and what a Variable has, for type checkers

        def get_value(self) -> A: ...

        def set_value(self, value: Any, *, index: Any = ...) -> None: ...

        def set_raw_value(self, value: Any) -> None: ...

        _nnx_value: Any

        def _binary(self, other: Any) -> A: ...

        def _in_place(self: V, other: Any) -> V: ...

        def _unary(self) -> A: ...

        __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _binary
        __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _binary
        __lshift__ = __rshift__ = __and__ = __xor__ = __or__ = __lt__ = __le__ = __gt__ = __ge__ = _binary
        __rlshift__ = __rrshift__ = __rand__ = __rxor__ = __ror__ = _binary
        __iadd__ = __isub__ = __imul__ = __imatmul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _in_place
        __ilshift__ = __irshift__ = __iand__ = __ixor__ = __ior__ = _in_place
        __neg__ = __pos__ = __abs__ = __invert__ = _unary

        def __eq__(self, other: Any) -> Any: ...

        def __ne__(self, other: Any) -> Any: ...

        def __divmod__(self, other: Any) -> tuple[A, A]: ...

        def __rdivmod__(self, other: Any) -> tuple[A, A]: ...

        def __int__(self) -> int: ...

        def __index__(self) -> int: ...

        def __float__(self) -> float: ...

        def __complex__(self) -> complex: ...

        def __round__(self, ndigits: int = ...) -> Any: ...

        def __trunc__(self) -> int: ...

    @overload
    def __getitem__(self: ArrayOperators[jax.Array], key: Any) -> jax.Array: ...
    @overload
    def __getitem__(self, key: Any) -> Any: ...
    def __getitem__(self, key: Any) -> Any:
        value: Any = self.get_value()
        if key is ... and not (type(value) is Ref or (isinstance(value, Tracer) and isinstance(value, Ref))):
            return value  # to ask whether an array is a Ref would take 0.4 us, and all of this takes 0.17
        return value[unwrapped(key)]

    def __setitem__(self, key: Any, item: Any) -> None:
        self.set_value(item, index=key)

    def __delitem__(self, key: Any) -> None:
        value: Any = copy_lib.copy(self._nnx_value)
        del value[key]
        self.set_raw_value(value)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        value: Any = self.get_value()
        if not callable(value):
            name, found = type(self).__name__, errors.describe(value)
            raise errors.ArgumentError(f"This {name} cannot be called: its value is {found}.")
        return value(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.get_value())  # type: ignore[arg-type]

    def __iter__(self):
        return iter(self.get_value())  # type: ignore[call-overload]

    def __contains__(self, item: Any) -> bool:
        return item in self.get_value()  # type: ignore[operator]

    def __bool__(self) -> bool:
        # As in flax.nnx, an array with axes is true if it has a length, so `if self.bias:` asks whether there is one.
        value: Any = self.get_value()
        return len(value) > 0 if getattr(value, "ndim", 0) else bool(value)

    def __format__(self, spec: str) -> str:
        return format(self.get_value(), spec) if spec else repr(self)


def _add_operators() -> None:
    """Add every operator of an array: ``v + x``, ``x + v``, ``v += x``, ``v < x``, ``-v``, ``int(v)``."""
    binary = "add sub mul matmul truediv floordiv mod pow lshift rshift and_ xor or_".split()

    def forward(op: Callable) -> Callable:
        return lambda self, other: op(self.get_value(), unwrapped(other))

    def reflected(op: Callable) -> Callable:
        return lambda self, other: op(unwrapped(other), self.get_value())

    def in_place(op: Callable) -> Callable:
        def method(self: Any, other: Any) -> Any:
            self.set_value(op(self.get_value(), unwrapped(other)))
            return self

        return method

    def unary(op: Callable) -> Callable:
        return lambda self, *args: op(self.get_value(), *args)

    methods: dict[str, Callable] = {}
    for name in binary:
        op, stem = getattr(operator, name), name.rstrip("_")
        methods |= {f"__{stem}__": forward(op), f"__r{stem}__": reflected(op), f"__i{stem}__": in_place(op)}
    methods |= {"__divmod__": forward(divmod), "__rdivmod__": reflected(divmod)}
    methods |= {f"__{name}__": forward(getattr(operator, name)) for name in "lt le eq ne gt ge".split()}
    methods |= {f"__{name}__": unary(getattr(operator, name)) for name in "neg pos abs invert index".split()}
    methods |= {f"__{op.__name__}__": unary(op) for op in (int, float, complex, math.trunc)}
    methods["__round__"] = lambda self, ndigits=0: round(self.get_value(), ndigits)  # floats stay floats
    for name, method in methods.items():
        method.__name__, method.__qualname__ = name, f"Variable.{name}"
        setattr(ArrayOperators, name, method)


_add_operators()
