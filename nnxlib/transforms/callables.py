"""Callables: what a user may pass as a function to a transform, and how its arguments are given.

A bound method, a callable Module or a partial refers to objects, which have to be packed like any argument. So each
transform first takes such a callable apart, by :func:`resolve`. A wrapper of it has its name and signature, but none of
its attributes (``functools.wraps(f, updated=())``), since these are those of a Module.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu

from ..core.annotations import signature_of
from ..core.data import is_data, is_data_part, is_node
from ..core.errors import AliasingError, ArgumentError, describe, describe_nested
from ..core.missing import MISSING
from ..core.objects import Node
from ..core.registration import register_pytree
from ..core.rows import LEAF, Tree, value_of
from ..core.static import StaticArgument
from ..core.traversals import path_key
from .selection import Selection, as_static


def name_of(f: Callable) -> str:
    """The name of a function; of a callable object, that of its class."""
    return getattr(f, "__name__", type(f).__name__)


def check_options(options: Mapping[str, Any], transform: Callable) -> None:
    """Refuse options that JAX's transform does not take, before a function is called."""
    unknown = options and options.keys() - signature_of(transform).parameters.keys()
    if unknown:
        raise TypeError(f"{name_of(transform)}() got an unexpected keyword argument '{min(unknown)}'")


def resolve(f: Any) -> tuple[Callable, tuple, dict[str, Any]]:
    """Unwrap partials, bound methods of Modules and callable Modules: ``(function, arguments, keyword arguments)``.

    What was bound becomes an argument, so changes to Modules in it are written back; see :func:`as_bound`. A partial
    that leaves places between its arguments is a function that closes over them.

    Raises:
      ArgumentError: for what cannot be called.
    """
    args: tuple = ()
    kwargs: dict[str, Any] = {}
    while True:
        if isinstance(f, functools.partial) and not any(x is _PLACE for x in f.args):
            args, kwargs, f = (*f.args, *args), {**f.keywords, **kwargs}, f.func
        elif isinstance(f, types.MethodType) and isinstance(f.__self__, Node):
            args, f = (f.__self__, *args), f.__func__
        elif isinstance(f, Node):
            if not callable(f):
                raise ArgumentError(f"A {type(f).__name__} cannot be called; give its class a method __call__.")
            args, f = (f, *args), type(f).__call__
        else:
            break
    if not callable(f):
        raise ArgumentError(
            f"A transform takes a function, but got {describe(f)}. Pass the function itself, not what it returns: "
            "nnx.grad(f)(x), not nnx.grad(f(x))."
        )
    return f, *as_bound(args, kwargs)


_PLACE = getattr(functools, "Placeholder", MISSING)  # from Python 3.14 on


def as_bound(args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments of which only the data is traced: all else is part of the program, as it is in a closure."""
    return tuple(map(_bound, args)), {name: _bound(x) for name, x in kwargs.items()}


def _bound(x: Any) -> Any:
    if not is_data(x):
        return StaticArgument(x)
    return x if is_node(x) or all(map(is_data_part, jtu.tree_leaves(x, is_leaf=is_node))) else _PartlyStatic(x)


class _PartlyStatic:
    """A pytree that holds data and other leaves. It flattens to the data; unflattened, it is the pytree itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


def _flatten(x: _PartlyStatic) -> tuple[list[tuple[Any, Any]], Tree]:
    """The parts of one level that hold data, by their keys; the other parts are in the Tree."""
    keyed, treedef = jtu.tree_flatten_with_path(x.value, is_leaf=lambda part: part is not x.value)
    parts = [(keys[0], _bound(part)) for keys, part in keyed]
    specs = tuple([part.frozen() if type(part) is StaticArgument else LEAF for _, part in parts])
    data = [(key, part) for (key, part), spec in zip(parts, specs, strict=True) if spec is LEAF]
    return data, Tree(treedef, tuple([(path_key(key),) for key, _ in parts]), specs)


register_pytree(_PartlyStatic, _flatten, lambda tree, parts: value_of(tree, (), iter(parts)))


def or_closed_over(transform: Callable[[Callable], Callable], f: Callable) -> Callable:
    """``transform(f)``, where what is bound to ``f`` may also share objects with an argument that is treated otherwise.

    Then it is closed over. For ``nnx.grad(self.loss)(self.model)``: the model is differentiated, and ``self``, with the
    same model in it, is constant.
    """
    transformed = transform(f)
    _, bound, named = resolve(f)
    is_static = all(isinstance(x, StaticArgument) for x in (*bound, *named.values()))
    if is_static or not isinstance(transformed, types.FunctionType):
        return transformed

    @functools.wraps(f, updated=())
    def closure(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    @functools.wraps(transformed)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return transformed(*args, **kwargs)
        except AliasingError:
            return transform(closure)(*args, **kwargs)

    return call


def by_position(f: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call of ``f``, with keyword arguments moved to their position if they have one.

    For options that are given by position, such as ``argnums``. Nothing is moved if ``f`` has no signature, like some
    built-in functions.
    """
    if not kwargs:
        return args, kwargs
    try:
        signature = signature_of(f)
    except ValueError:
        return args, kwargs
    bound = signature.bind(*args, **kwargs)
    parameters = signature.parameters
    if any(n in parameters and parameters[n].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for n in bound.kwargs):
        bound.apply_defaults()  # an argument in front of a named one was left out
    return bound.args, {name: value for name, value in bound.kwargs.items() if name in kwargs}


def as_pair(returned: Any, said: str) -> tuple[Any, Any]:
    """The pair that a function has returned; if it has returned none, an ArgumentError begins with ``said``."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ArgumentError(f"{said}, but it returned {describe_nested(returned)}.")
    return returned[0], returned[1]


def explained(
    pure: Callable, transform: Callable[[Callable], Callable], explain: Callable[[Sequence[Any]], None]
) -> Callable:
    """``transform(pure)``; where JAX raises a ValueError, ``explain(args)`` may raise an error that says more.

    It is not asked about errors of ``pure`` itself.
    """
    raised: list[BaseException] = []

    @functools.wraps(pure, updated=())
    def remembering(*args: Any) -> Any:
        try:
            return pure(*args)
        except BaseException as error:
            raised.append(error)
            raise

    transformed = transform(remembering)

    def run(*args: Any) -> Any:
        try:
            return transformed(*args)
        except ValueError as error:
            if id(error) not in map(id, raised):
                explain(args)
            raise
        finally:
            raised.clear()  # an error holds the frames of a trace

    return run


def static_arguments(call: Callable, argnums: int | Sequence[int], argnames: str | Iterable[str] = ()) -> Callable:
    """``call`` with the arguments of these numbers or names as part of the program, given by position or by name.

    One that is left out, since it has a default, is part of the program anyway.

    Raises:
      ArgumentError: for what is not a number, or not a name.
      PrefixError: for a number or a name that the function does not have.
    """
    numbers, names = Selection(call, 0, argnums, None, "static"), Selection(call, 0, None, argnames, "static")

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_position(call, args, kwargs)
        chosen = {*numbers.among(len(args)), *names.among(len(args))}
        kwargs = {k: as_static(x, k) if names.has(k) else x for k, x in kwargs.items()}
        return call(*(as_static(x, n) if n in chosen else x for n, x in enumerate(args)), **kwargs)

    return wrapped if numbers or names else call
