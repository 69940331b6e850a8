"""The types of the transforms, for type checkers and editors.

A transform is used in four ways: ``vmap(f, in_axes=0)``, ``@vmap(in_axes=0)``, ``vmap(Class, methods="encode")`` and
``@vmap(methods="encode")`` (classes.py). So its type is a protocol with an overload for each; what differs is what it
makes of a function. Most transforms return one with the same arguments and results (:class:`Transform`). The others are
declared to be something else by a decorator, which does nothing when it runs.

``O`` are the options of a transform, all its parameters after the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

if TYPE_CHECKING:
    from .jit import JitWrapped

P = ParamSpec("P")
O = ParamSpec("O")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)
Methods = str | Sequence[str] | Mapping[str, Mapping[str, Any]]


class Transform(Protocol[O]):
    """A transform whose functions have the arguments and results of those that they are made of."""

    __name__: str

    @overload
    def __call__(self, cls: Class, /, *, methods: Methods, **options: Any) -> Class: ...
    @overload
    def __call__(self, *, methods: Methods, **options: Any) -> Callable[[Class], Class]: ...
    @overload
    def __call__(self, f: F, /, *args: O.args, **options: O.kwargs) -> F: ...
    @overload
    def __call__(self, *args: O.args, **options: O.kwargs) -> Callable[[F], F]: ...


class Operator(Protocol[O]):
    """A transform whose functions have the same arguments, and other results: ``grad``, ``make_jaxpr``."""

    __name__: str

    @overload
    def __call__(self, cls: Class, /, *, methods: Methods, **options: Any) -> Class: ...
    @overload
    def __call__(self, *, methods: Methods, **options: Any) -> Callable[[Class], Class]: ...
    @overload
    def __call__(self, f: Callable[P, Any], /, *args: O.args, **options: O.kwargs) -> Callable[P, Any]: ...
    @overload
    def __call__(self, *args: O.args, **options: O.kwargs) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


class ValueAndGrad(Protocol[O]):
    """``value_and_grad``: its functions return the result, and a State or a tuple of several."""

    __name__: str

    @overload
    def __call__(self, cls: Class, /, *, methods: Methods, **options: Any) -> Class: ...
    @overload
    def __call__(self, *, methods: Methods, **options: Any) -> Callable[[Class], Class]: ...
    @overload
    def __call__(self, f: Callable[P, R], /, *args: O.args, **options: O.kwargs) -> Callable[P, tuple[R, Any]]: ...
    @overload
    def __call__(
        self, *args: O.args, **options: O.kwargs
    ) -> Callable[[Callable[P, R]], Callable[P, tuple[R, Any]]]: ...


class Jit(Protocol[O]):
    """``jit``: its functions have methods of their own."""

    __name__: str

    @overload
    def __call__(self, cls: Class, /, *, methods: Methods, **options: Any) -> Class: ...
    @overload
    def __call__(self, *, methods: Methods, **options: Any) -> Callable[[Class], Class]: ...
    @overload
    def __call__(self, fun: Callable[P, R], /, *args: O.args, **options: O.kwargs) -> JitWrapped[P, R]: ...
    @overload
    def __call__(self, *args: O.args, **options: O.kwargs) -> Callable[[Callable[P, R]], JitWrapped[P, R]]: ...


def as_operator(transform: Transform[O]) -> Operator[O]:
    return cast(Operator[O], transform)


def as_value_and_grad(transform: Transform[O]) -> ValueAndGrad[O]:
    return cast(ValueAndGrad[O], transform)


def as_jit(transform: Transform[O]) -> Jit[O]:
    return cast(Jit[O], transform)
