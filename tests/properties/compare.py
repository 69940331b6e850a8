"""Looking at object graphs from outside: compare two, remember one, search one for tracers, see that one is freed.

None of this uses the library's own walk, layouts or keys, which are under test; only what a user can see of an object.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

import nnxlib as nnx


def is_object(value: Any) -> bool:
    """Whether `value` has an identity in the graph."""
    return isinstance(value, nnx.Pytree | nnx.List | nnx.Dict | nnx.Variable)


def is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) and getattr(value, "dtype", None) is not None


def items(value: Any) -> list[tuple[Any, Any]] | None:
    """What a node or container holds, in the order that a user sees; None if it is neither."""
    if isinstance(value, nnx.Pytree):
        slots = [(name, getattr(value, name)) for name in ("slot",) if hasattr(value, name)]
        return [*vars(value).items(), *slots]
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def objects_in(*roots: Any) -> list[Any]:
    """Every node and Variable below, in the order of the first visit."""
    found: dict[int, Any] = {}
    stack = list(reversed(roots))
    while stack:
        value = stack.pop()
        if is_object(value):
            if id(value) in found:
                continue
            found[id(value)] = value
        if not isinstance(value, nnx.Variable):
            stack.extend(child for _, child in reversed(items(value) or ()))
    return list(found.values())


# --- comparing ------------------------------------------------------------------------------------------------------


def assert_same(a: Any, b: Any) -> None:
    """Fail unless two pytrees of objects are equal by structure, pattern of identity, and value."""
    found = list(differences(a, b))
    assert not found, "\n".join(found)


def differences(a: Any, b: Any) -> Iterator[str]:
    """Yield a line for each place where two pytrees of objects differ.

    Arrays are compared by value; where an array may stand (in a Variable, in declared data) a Python number is equal to
    an array of that value, which is what becomes of it in a compiled function.
    """
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    stack: list[tuple[str, Any, Any, bool]] = [("", a, b, False)]
    while stack:
        path, x, y, leaf = stack.pop()
        if is_object(x) or is_object(y):
            if there.get(id(x), id(y)) != id(y) or back.get(id(y), id(x)) != id(x):
                yield f"{path}: shared with something in one, with something else in the other"
                continue
            if id(x) in there:
                continue
            there[id(x)], back[id(y)] = id(y), id(x)
        if type(x) is not type(y) and not (leaf and _numbers(x, y)) and not (is_array(x) and is_array(y)):
            yield f"{path}: {type(x).__name__} and {type(y).__name__}"
        elif isinstance(x, nnx.Variable):
            stack.append((f"{path}.value", x.get_raw_value(), y.get_raw_value(), True))
            stack.append((f"{path}.metadata", x.get_metadata(), y.get_metadata(), False))
        elif is_array(x) or is_array(y):
            if not _same_array(x, y):
                yield f"{path}: {x!r} and {y!r}"
        elif items(x) is not None and (is_object(x) or leaf or not (_is_static(x) and _is_static(y))):
            left, right = items(x) or [], items(y) or []
            if list(map(_key, left)) != list(map(_key, right)):
                yield f"{path}: holds {[k for k, _ in left]} and {[k for k, _ in right]}"
                continue
            if getattr(x, "_nnx_marks", None) != getattr(y, "_nnx_marks", None):
                yield f"{path}: marked {x._nnx_marks} and {y._nnx_marks}"
            if isinstance(x, types.MethodType) and x.__func__ is not y.__func__:
                yield f"{path}: {x!r} and {y!r}"
            for (key, child), (_, other) in zip(left, right, strict=True):
                stack.append((f"{path}.{key}", child, other, leaf or is_declared(x, key)))
        elif not (leaf and x == y) and not same_static(x, y):
            yield f"{path}: {x!r} and {y!r}"


def is_declared(node: Any, name: Any) -> bool:
    """Whether an attribute was declared to be data."""
    return name in ("steps", "counted") and isinstance(node, nnx.Pytree)


def _key(item: tuple[Any, Any]) -> tuple[type, Any]:
    return type(item[0]), item[0]


def _is_static(value: Any) -> bool:
    """Whether nothing in a container or dataclass has a place in the graph or is an array."""
    if is_object(value) or is_array(value):
        return False
    return all(_is_static(child) for _, child in items(value) or ())


def _numbers(x: Any, y: Any) -> bool:
    return all(isinstance(v, int | float) or is_array(v) for v in (x, y))


def is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _same_array(x: Any, y: Any) -> bool:
    if is_key(x) or is_key(y):
        return is_key(x) and is_key(y) and x.dtype == y.dtype and _same_array(*map(jax.random.key_data, (x, y)))
    x, y = np.asarray(x), np.asarray(y)
    return x.shape == y.shape and x.dtype.kind == y.dtype.kind and x.tobytes() == y.astype(x.dtype).tobytes()


def same_static(x: Any, y: Any) -> bool:
    """Whether two static values are of one type and equal, with nan equal to itself and -0.0 other than 0.0."""
    if type(x) is not type(y):
        return False
    if isinstance(x, types.FunctionType):
        cells = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (x, y)]
        return x.__code__ == y.__code__ and x.__defaults__ == y.__defaults__ and same_static(*cells)
    if isinstance(x, functools.partial):
        return same_static((x.func, x.args, x.keywords), (y.func, y.args, y.keywords))
    if isinstance(x, types.SimpleNamespace):
        return same_static(vars(x), vars(y))
    if isinstance(x, float | complex | np.generic | np.ndarray):
        return repr(x) == repr(y)
    held = items(x)
    if held is None:
        return x == y
    other = items(y) or []
    return list(map(_key, held)) == list(map(_key, other)) and all(
        same_static(a, b) for (_, a), (_, b) in zip(held, other, strict=True)
    )


# --- remembering ----------------------------------------------------------------------------------------------------


class Snapshot:
    """What every object below some roots is and holds, by identity."""

    def __init__(self, *roots: Any):
        self.seen = [(x, _contents(x)) for x in objects_in(*roots)]

    def changes(self) -> list[str]:
        """A line for each object that is not exactly as it was."""
        return [
            f"{type(x).__name__}: {before} became {now}"
            for x, before in self.seen
            if not _identical(before, now := _contents(x))
        ]

    def assert_unchanged(self) -> None:
        found = self.changes()
        assert not found, "\n".join(found)
        for x, _ in self.seen:
            assert_no_tracer(x)


def _contents(x: Any) -> list[Any]:
    """The objects that make up `x`, to be compared by `is`; static values that can be edited also as text."""
    if isinstance(x, nnx.Variable):
        value = x.get_raw_value()
        metadata = [part for pair in x.get_metadata().items() for part in pair]
        return [type(x), value, *_inside(value), *metadata, repr(metadata)]
    held = items(x) or []
    inside = [part for _, child in held if not is_object(child) for part in _inside(child)]
    marks = x._nnx_marks or {}
    return [type(x), *(part for pair in held for part in pair), *inside, *marks, *marks.values()]


def _inside(value: Any) -> list[Any]:
    """What is inside a container that is no node, down to arrays and objects."""
    if is_object(value) or is_array(value):
        return [value]
    held = items(value)
    return [value, repr(value)] if held is None else [part for key, x in held for part in (key, *_inside(x))]


def _identical(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        a is b or (isinstance(a, str | int | float) and type(a) is type(b) and repr(a) == repr(b))
        for a, b in zip(before, now, strict=True)
    )


# --- searching ------------------------------------------------------------------------------------------------------


def assert_no_tracer(*roots: Any) -> None:
    """Fail if a tracer can be reached: through attributes, containers, metadata, closures, defaults, hidden slots."""
    for path, value in _reachable(roots):
        assert not isinstance(value, jax.core.Tracer), f"tracer {value} at {path}"


_ATOMS = (str, bytes, int, float, complex, type, types.ModuleType, types.CodeType, np.ndarray, np.dtype, type(None))


def _reachable(roots: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    keep: dict[int, Any] = {}
    stack = [(f"[{i}]", root) for i, root in enumerate(roots)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, _ATOMS) or id(value) in keep:
            continue
        keep[id(value)] = value
        yield path, value
        if not isinstance(value, jax.Array):
            stack.extend((f"{path}.{key}", child) for key, child in _parts(value))


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield key, child
            yield f"key {key!r}", key
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # an empty cell
                continue
        yield from (("defaults", value.__defaults__), ("kwdefaults", value.__kwdefaults__))
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("func", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, Mapping) and not isinstance(value, types.BuiltinFunctionType):
        yield from dict(attributes).items()


def assert_freed(use: Callable[[], weakref.ref], *, cyclic: bool = False) -> None:
    """Fail if the object to which `use` returns a reference outlives the call; if it is `cyclic`, the collector too."""
    gc.disable()
    try:
        for _ in range(2):
            reference = use()
            if cyclic:
                gc.collect()
            assert reference() is None
    finally:
        gc.enable()
