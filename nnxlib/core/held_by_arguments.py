"""What the arguments of a function hold besides data: Modules that it may use without a trace noticing it.

A trace notices that a Variable is read or a Module is called, but not that a setting is read (docs/how_it_works.md,
"Closures"). So the Modules to which the arguments lead are found before the trace. They are in four places:

- in a function that is an attribute, such as ``attention_fn=partial(attend, rope=RoPE())``;
- in the class of an object;
- in a plain object that is an attribute, such as a configuration, or to which such a function leads (its method, say);
- in what such a function, or a method of the class, refers to, such as a global with settings.

Static arguments count as attributes.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .identity import Identified
from .layout import Layout
from .look_ups import HOLDERS, held_by, is_jitted, is_of_library, is_plain_object
from .references import search
from .rows import NodeRow, parts
from .state import State
from .static import Const


def held_in(layout: Layout) -> tuple[Any, ...]:
    """The Modules and Variables held by functions, partials, bound methods and containers in static values.

    (A mask for optax, say, is a State of Variables.) Not those that the functions read from globals, nor Lists and
    Dicts of which each trace gets a copy.
    """
    if layout.held is None:
        layout.held = tuple([x for x in _reached(_statics(layout)) if issubclass(type(x), Identified)])
    return layout.held


def _statics(layout: Layout) -> list[Any]:
    """The static values of objects, and static arguments; of one that each trace copies, what the copies share."""
    arguments = [spec for _, spec in parts(layout.root) if type(spec) is Const]
    constants = *[const for *_, const in layout.statics], *arguments
    return [x for const in constants for x in ((const.value,) if const.uncopied is None else const.uncopied)]


def _reached(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values, and all that functions, partials, bound methods and containers among them hold, each once."""
    stack, seen = [*values], set[int]()
    while stack:
        x = stack.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        yield x
        if issubclass(type(x), State):
            stack.append(x.raw_mapping)
        elif isinstance(x, HOLDERS) and not issubclass(type(x), Identified):
            stack += held_by(x)


def statics_and_classes(*layouts: Layout) -> list[Any]:
    """The static values of objects, and their classes: besides their data, these may hold other objects."""
    statics = [x for layout in layouts for x in _statics(layout)]
    classes = {row.type: None for layout in layouts for row in layout.rows if isinstance(row, NodeRow)}
    return [*statics, *[cls for cls in classes if not is_of_library(vars(cls))]]


def used_by_arguments(functions: Sequence[Callable], layout: Layout) -> tuple[list[Any], list[types.FunctionType]]:
    """The other objects to which the arguments of functions lead, and their functions and methods that refer to some.

    They are in the classes, in plain objects, and in what the functions in attributes and the methods refer to.
    """
    statics = _statics(layout)
    reached, in_classes = [*_reached(statics)], _in_classes(layout)
    methods = _functions_in([*reached, *in_classes])
    by_methods = _used_by_methods(methods)
    found = [x for x in in_classes if issubclass(type(x), Identified)]
    if any(map(_is_own_object, reached)):  # these lead to others, by attributes that the functions or methods name
        holders = [x for x in statics if any(map(_is_own_object, _reached([x])))]
        found += search(functions[0], given=(*functions[1:], *methods, *holders)).used_unnoticed()
    return [*found, *[x for used in by_methods.values() for x in used]], [*by_methods]


def _is_own_object(x: Any) -> bool:
    """Whether this is a plain object of a user's class."""
    return is_plain_object(x) and not is_of_library(vars(type(x)))


def _used_by_methods(methods: list[types.FunctionType]) -> dict[types.FunctionType, list[Any]]:
    """Those of the methods that may use Modules unnoticed by a trace, with these Modules."""
    by_file: dict[int, list[types.FunctionType]] = {}  # so that the globals of each file are searched once
    for method in methods:
        by_file.setdefault(id(method.__globals__), []).append(method)
    some = [methods for methods in by_file.values() if search(methods[0], given=methods[1:]).used_unnoticed()]
    return {method: used for methods in some for method in methods if (used := search(method).used_unnoticed())}


def _functions_in(found: Sequence[Any]) -> list[types.FunctionType]:
    """The functions among these, also in properties, and as static and class methods; not those of libraries."""
    functions = list[types.FunctionType]()
    for x in found:
        held: Any = x.__func__ if isinstance(x, staticmethod | classmethod) else x
        methods: tuple[Any, ...] = (held.fget, held.fset) if isinstance(held, property) else (held,)
        unwrapped = [inspect.unwrap(f) for f in methods if isinstance(f, types.FunctionType) or is_jitted(f)]
        functions += [f for f in unwrapped if isinstance(f, types.FunctionType) and not is_of_library(f.__globals__)]
    return functions


def _in_classes(layout: Layout) -> list[Any]:
    """The attributes of the classes of objects and of their base classes, except those of libraries."""
    classes = {cls: None for row in layout.rows if isinstance(row, NodeRow) for cls in row.type.__mro__}
    own = [vars(cls).copy() for cls in classes if not is_of_library(vars(cls))]
    return [x for held in own for name, x in held.items() if name != "__annotate_func__"]  # which only names types
