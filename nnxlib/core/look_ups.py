"""Look-ups: the steps by which a function reaches what it refers to.

A function refers to its closure, its defaults and its globals, and these hold other values in turn. A :class:`LookUp`
is one step: a *holder*, a *key*, and the *kind* of look-up. It can be made at any time, and finds what is there then.
How they form chains is in chains.py, what the chains are for in docs/how_it_works.md ("Closures").

:func:`look_ups_in` yields the look-ups in any object. Those in globals depend on what a function, or other code, names:
:func:`globals_of`, :func:`globals_in`.
"""

from __future__ import annotations

import abc
import builtins
import contextvars
import dis
import functools
import inspect
import itertools
import operator
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from .annotations import NamedTuple
from .graphdef import GraphDef
from .identity import Identified
from .static import ATOMS, dict_of


class Jitted:
    """Base class of what ``nnx.jit`` returns, whose ``__wrapped__`` is the function; see :func:`is_jitted`."""

    __wrapped__: Callable
    eval_shape: Callable[..., Any]


def is_jitted(x: Any) -> bool:
    """Whether ``nnx.jit`` or ``jax.jit`` has made this; then it does what the wrapped function does."""
    return isinstance(x, Jitted) or type(x).__module__.startswith("jaxlib.")


class LookUp(NamedTuple):
    """How a value is looked up: ``kind``, one of the functions below, gets it from ``holder`` by ``key``."""

    kind: Callable[[Any, Any], Any]
    holder: Any
    key: Any = None

    def find(self) -> Any:
        """Look the value up now; may raise an error of user code, such as that of a property."""
        return self.kind(self.holder, self.key)

    def found(self) -> Any:
        """The result of :meth:`find`; None if it fails."""
        try:
            return self.find()
        except Exception:
            return None

    @property
    def address(self) -> Hashable:
        """A key for what is looked up, whatever the holder: the same attribute of two objects has the same address."""
        if self.kind in WITHIN:
            return self.holder.address, self.key
        if self.kind is in_class:
            return self.kind, weak_key(self.holder), self.key
        if self.kind is not entry:
            return self.kind, self.key
        module = self.holder.get("__name__") if type(self.holder) is dict else None  # if these are its globals
        return self.kind, module if type(module) is str else None, weak_key(self.key)

    def refers_to(self, functions: Collection[Any]) -> bool:
        """Whether it keeps one of these functions alive, or the attributes of one."""
        if self.kind in WITHIN:
            return self.holder.refers_to(functions)
        return any(x is f or x is f.__dict__ for f in functions for x in (self.holder, self.key))


# --- the kinds of look-ups ------------------------------------------------------------------------------------------


def attribute(x: Any, name: str) -> Any:
    return getattr(x, name, None)


def entry(mapping: Any, key: Any) -> Any:
    """What a mapping has, such as the globals of a function; they may be set later."""
    return mapping.get(key)


def own(attributes: dict[str, Any], name: str) -> Any:
    """An attribute of an object, in the dict of its attributes."""
    return attributes.get(name)


def item(sequence: Any, index: int) -> Any:
    return sequence[index] if index < len(sequence) else None


def member(collection: Any, number: int) -> Any:
    """A member of a set, or a key of a dict, by its number."""
    return next(itertools.islice(collection, number, None), None)


def in_closure(cell: types.CellType, name: str) -> Any:
    return cell.cell_contents


def in_class(cls: type, name: str) -> Any:
    """What a class itself has under a name: a property, say, instead of its value."""
    return vars(cls).get(name)


def inside(module: LookUp, name: str) -> Any:
    """What a module or class has under a name, if the module or class is found by another look-up."""
    return getattr(module.find(), "__dict__", {}).get(name)


def in_tuple(found: LookUp, index: int) -> Any:
    """A member of a tuple that is found by another look-up; to refer to the tuple would keep alive what is in it."""
    return found.find()[index]


def in_context(variable: contextvars.ContextVar, key: None) -> Any:
    return variable.get()


def referent(reference: weakref.ref, key: None) -> Any:
    return reference()


def behind(proxy: Any, key: None) -> Any:
    """What a weak proxy stands for."""
    return proxy.__init__.__self__


def default(signature: inspect.Signature, name: str) -> Any:
    return signature.parameters[name].default


def has_length(container: Any, length: int) -> bool:
    """Whether a container has this length: a condition, not a value."""
    return len(container) == length


def itself(x: Any, key: None) -> Any:
    """The function with which all chains begin."""
    return x


BY_NAME = attribute, entry, own, in_class, inside  # kinds whose key is, as a rule, a name in code
WITHIN = inside, in_tuple  # kinds whose holder is another look-up


def weak_key(key: Any) -> Any:
    """A weak reference to a key, equal to another if the keys are; the key itself, if it allows none, as text."""
    try:
        return weakref.ref(key)
    except TypeError:
        return key


# --- what there is to look up in an object --------------------------------------------------------------------------

PROGRAMS = "_nnx_programs"  # an attribute of a function, see transforms/program.py
# The methods that the syntax of Python calls, so without being named; not those that make, compare, copy or print.
BY_SYNTAX = frozenset([f"__{name}__" for name in (
    "call getattr getattribute getitem contains iter next len bool enter exit get missing "
    "aenter aexit aiter anext await "
    "add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow "
    "lshift rlshift rshift rrshift or ror and rand xor rxor neg pos invert abs round reversed int float complex index"
).split()])  # fmt: skip
OF_CLASS = "__class_getitem__", "__new__"  # those for a class itself: the latter may return a single object
# The types of most attributes of classes; to look at these more closely would take a tenth of the time of a search.
_METHODS = {
    types.FunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType,
    type(vars(abc.ABC)["_abc_impl"]),
}  # fmt: skip


def look_ups_in(x: Any, names: Collection[str]) -> Iterator[LookUp]:
    """The look-ups in ``x``; none in arrays, text, or nodes, which are searched elsewhere.

    Of the methods and properties of a class only those with these names are looked up.
    """
    if type(x) in weakref.ProxyTypes:
        yield LookUp(behind, x)
    elif isinstance(x, types.FunctionType):
        if _is_setting(x):
            return
        defaults = [name for name in ("__defaults__", "__kwdefaults__") if getattr(x, name) is not None]
        found = [*closure_of(x), *_attributes(x, *defaults), *in_dict_of(x)]
        yield from [y for y in found if not _is_setting(y.found())] if is_of_library(x.__globals__) else found
    elif isinstance(x, types.MethodType):
        yield from _attributes(x, "__self__", "__func__")
    elif type(x) is types.BuiltinMethodType:  # of a container, such as `models.get`; or a function of a module in C
        yield from () if isinstance(x.__self__, types.ModuleType) else _attributes(x, "__self__")
    elif isinstance(x, functools.partial):
        yield from _attributes(x, "func", "args", "keywords")
        yield from in_dict_of(x)
    elif isinstance(x, staticmethod | classmethod):
        yield from _attributes(x, "__func__")
    elif isinstance(x, _CLOSED):
        return
    elif isinstance(x, _CONTAINERS):
        yield from _in_container(x)
        kind = type(x)
        if kind.__module__ != "builtins" and not is_of_library(vars(kind)):  # it may have attributes, and methods
            yield from _in_plain_object(x, names)
    elif isinstance(x, weakref.ref):
        yield LookUp(referent, x)
    elif isinstance(x, inspect.Signature):  # no further: its classes lead to hundreds of constants of Python
        yield from (LookUp(default, x, k) for k, p in x.parameters.items() if p.default is not p.empty)
    elif isinstance(x, contextvars.ContextVar):
        yield LookUp(in_context, x)
    elif isinstance(x, threading.local):  # each thread has attributes of its own
        yield from _attributes(x, *x.__dict__)
    elif is_jitted(x):  # and what users have attached; all else in it is nnxlib's or JAX's own
        attached = [name for name in getattr(x, "__dict__", ()) if not name.startswith("_")]
        yield from _attributes(x, "__wrapped__", *attached)
    else:
        yield from _in_plain_object(x, names)


def held_by(x: Any) -> list[Any]:
    """The values that a function (without its globals), bound method, partial or container refers to now."""
    return [look_up.found() for look_up in look_ups_in(x, ())]


def _attributes(x: Any, *names: str) -> list[LookUp]:
    return [LookUp(attribute, x, name) for name in names]


def in_dict_of(x: Any) -> list[LookUp]:
    """The look-ups of the attributes in the dict of an object or function."""
    attributes = dict_of(x)
    return [LookUp(own, attributes, k) for k in list(attributes) if k != PROGRAMS] if type(attributes) is dict else []


# Nothing is looked up in these: nodes and Variables are searched elsewhere, and the others lead nowhere.
_PLACES = jax.sharding.Mesh, jax.sharding.AbstractMesh, jax.sharding.PartitionSpec, jax.sharding.NamedSharding
_CLOSED = Identified, GraphDef, *_PLACES, jax.Array, np.ndarray, types.ModuleType, str, float, type(None)
# The methods of these lead nowhere.
_WITHOUT_METHODS = (
    *_CLOSED, weakref.ref, contextvars.ContextVar, types.FunctionType, types.MethodType, functools.partial,
    staticmethod, classmethod,
)  # fmt: skip
_CONTAINERS = list, tuple, deque, dict, types.MappingProxyType, set, frozenset
HOLDERS = types.FunctionType, types.MethodType, functools.partial, *_CONTAINERS  # the types for :func:`held_by`


def _in_container(x: Any) -> Iterator[LookUp]:
    if isinstance(x, tuple):
        yield from (LookUp(item, x, k) for k, held in enumerate(x) if not _is_setting(held))
    elif isinstance(x, list | deque):
        yield from (LookUp(item, x, k) for k in range(len(x)))
    elif isinstance(x, dict | types.MappingProxyType):
        keys = list(x)  # a copy: garbage collection may remove some from a weak dict
        yield from (LookUp(entry, x, key) for key in keys)
        yield from _members(x, keys)
    else:
        yield from _members(x, list(x))


def _members(x: Any, members: list[Any]) -> Iterator[LookUp]:
    """The look-ups of what may lead to Modules among the members of a set, or the keys of a dict."""
    for k, held in enumerate(members):
        if not _is_simple(held):
            yield LookUp(member, x, k)


def _is_simple(x: Any) -> bool:
    return all(map(_is_simple, x)) if type(x) is tuple else type(x) in _SIMPLE


_SIMPLE = ATOMS | {float, complex}
_SETTINGS = (_SIMPLE - {type}) | {*_PLACES}  # a class of the user may hold Modules


def _is_setting(x: Any) -> bool:
    """Whether this leads nowhere, so that only another value in its place could: in a library, or in a tuple, none."""
    kind = type(x)
    if issubclass(kind, tuple):
        held = {id(y): y for y in x}.values()  # each once: a tuple may hold another many times
        return (kind is tuple or is_of_library(vars(kind))) and all(map(_is_setting, held))
    if kind is functools.partial:
        return all(map(_is_setting, (x.func, *x.args, *x.keywords.values())))
    if kind is types.FunctionType:  # that a library has by its name, so what it refers to is of the library, too
        if not (is_of_library(x.__globals__) and is_of_library({"__name__": x.__module__})):
            return False
        return getattr(sys.modules.get(x.__module__), "__dict__", {}).get(x.__name__) is x
    return kind in _SETTINGS or (issubclass(kind, type) and is_of_library(vars(x)))


def _in_plain_object(x: Any, names: Collection[str]) -> Iterator[LookUp]:
    """The look-ups of the attributes of an object or a class, and of those that it has from its classes."""
    yield from in_dict_of(x)
    seen = set[str]()
    classes = _classes_of(x)
    if isinstance(x, type):  # the slots of a library's class may hold anything, but what it has itself leads nowhere
        classes = [cls for cls in classes if not is_of_library(vars(cls))]
    for cls in classes:
        for name, held in vars(cls).copy().items():
            if type(held) not in _METHODS and _is_read_from(x, name, held) and name != "__dict__":
                # `super()` finds what a subclass hides.
                yield LookUp(in_class, cls, name) if name in seen else LookUp(attribute, x, name)
                seen.add(name)
    yield from methods_in(x, {*names, *(OF_CLASS if isinstance(x, type) else ("__call__",))})


def methods_in(x: Any, names: Collection[str]) -> Iterator[LookUp]:
    """The look-ups of the methods, properties and the like with these names in the classes of an object, or a class."""
    for cls in () if isinstance(x, _WITHOUT_METHODS) or is_jitted(x) else _classes_of(x):
        named = vars(cls).keys() & names
        if named and _is_written_by_user(cls):
            for name in sorted(named):  # the same order in all processes
                held = vars(cls)[name]
                makes_classes = name == "__new__" and issubclass(cls, type)
                is_method = type(held) in _METHODS or not _is_read_from(x, name, held)
                if name != "__dict__" and is_method and not makes_classes:
                    yield LookUp(in_class, cls, name)


def is_plain_object(x: Any) -> bool:
    """Whether this is a plain object: of a class written in Python, with attributes, in which look-ups are made."""
    others = *_WITHOUT_METHODS, *_CONTAINERS, type
    has_slots = any(vars(cls).get("__slots__") for cls in type(x).__mro__)
    return not issubclass(type(x), others) and not is_jitted(x) and (has_slots or type(dict_of(x)) is dict)


def has_unnamed_methods(cls: type) -> bool:
    """Whether a class written in Python has methods that the syntax of Python calls."""
    if issubclass(cls, _WITHOUT_METHODS):
        return False
    return any(not BY_SYNTAX.isdisjoint(vars(base)) and _is_written_by_user(base) for base in cls.__mro__)


def _is_written_by_user(cls: type) -> bool:
    """Whether a class is written in Python, and not of a library: the methods of others lead nowhere."""
    return "__module__" in vars(cls) and not is_of_library(vars(cls))


def _classes_of(x: Any) -> tuple[type, ...]:
    """The classes of an object; of a class also those that it inherits from."""
    classes = type(x).__mro__
    return (*x.__mro__, *classes[:-2]) if isinstance(x, type) else classes  # the last two are type and object


def _is_read_from(x: Any, name: str, held: Any) -> bool:
    """Whether ``x.name`` is what its class holds under this name, or is in a slot; not for methods."""
    is_value = name[:2] != "__" and not hasattr(type(held), "__get__")
    return is_value or (isinstance(held, types.MemberDescriptorType) and not isinstance(x, type))


# --- what there is to look up for a function ------------------------------------------------------------------------

# No Modules are in their globals. (The signatures of transformed functions lead to the last two.)
_LIBRARIES = "jax", "jaxlib", "numpy", __name__.partition(".")[0], "inspect", "enum"
_BUILTINS = frozenset(vars(builtins))
# The instructions that read globals, and by how many bits their argument is shifted; LOAD_NAME is in class bodies.
_READS = {"LOAD_GLOBAL": 1, "LOAD_NAME": 0, "LOAD_FROM_DICT_OR_GLOBALS": 0}
_READS_GLOBAL = {dis.opmap[name]: shift for name, shift in _READS.items() if name in dis.opmap}
_IMPORT_NAME, _OF_IMPORT = dis.opmap["IMPORT_NAME"], 2 if sys.version_info >= (3, 15) else 0  # it may be lazy there


def is_of_library(namespace: Mapping[str, Any]) -> bool:
    """Whether a function with these globals, or a class or module with these attributes, is from a library."""
    return str(namespace.get("__module__", namespace.get("__name__"))).partition(".")[0] in _LIBRARIES


def closure_of(function: types.FunctionType) -> list[LookUp]:
    """The look-ups in the closure of a function."""
    pairs = zip(function.__closure__ or (), function.__code__.co_freevars, strict=True)
    return [LookUp(in_closure, cell, name) for cell, name in pairs]


def globals_of(function: types.FunctionType) -> Iterator[LookUp]:
    """The look-ups of the globals that a function reads, and in the modules and classes to which it refers."""
    return globals_in(function.__code__, function.__globals__, closure_of(function))


def globals_in(code: types.CodeType, namespace: dict[str, Any], others: Iterable[LookUp] = ()) -> Iterator[LookUp]:
    """The look-ups of the globals that some code reads, even if they are not there yet, and of the modules it imports.

    Where one of these, or of the ``others``, finds a module or class, also of what the code names in it.
    """
    read, imported = _loaded_in(code)
    names = names_in(code)
    look_ups = [LookUp(entry, namespace, name) for name in sorted(read - (_BUILTINS - namespace.keys()))]
    look_ups += [LookUp(entry, sys.modules, name) for name in sorted(imported)]
    yield from look_ups
    yield from _in_namespaces([*look_ups, *others], names)


def globals_by_text(names: Collection[str], namespace: dict[str, Any]) -> Iterator[LookUp]:
    """The look-ups of globals and modules with these names, which code may reach by text: ``globals()["model"]``.

    Also of the ``__getattr__`` of these modules, which is called for what a module lacks.
    """
    look_ups = [LookUp(entry, x, name) for x in (namespace, sys.modules) for name in sorted(x.keys() & names)]
    yield from look_ups
    yield from _in_namespaces(look_ups, {*names, "__getattr__"})


def _in_namespaces(stack: list[LookUp], names: Collection[str]) -> Iterator[LookUp]:
    """The look-ups of these names in the modules and classes that look-ups find, and in what is found there."""
    seen = set[int]()
    while stack:
        look_up = stack.pop()
        x = look_up.found()
        if issubclass(type(x), types.ModuleType | type) and not is_of_library(vars(x)) and id(x) not in seen:
            seen.add(id(x))
            further = [LookUp(inside, look_up, name) for name in sorted(names & vars(x).keys())]
            yield from further
            stack += further


def objects_in_globals(function: types.FunctionType) -> list[LookUp]:
    """The look-ups of those globals that a function reads and that are Modules, Variables or None now."""
    code, namespace, kinds = function.__code__, function.__globals__, (Identified, type(None))
    named = [name for name in names_in(code) & namespace.keys() if issubclass(type(namespace[name]), kinds)]
    read = _loaded_in(code)[0].intersection(named) if named else ()
    return [LookUp(entry, namespace, name) for name in sorted(read)]


@functools.lru_cache(maxsize=1000)
def _loaded_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the globals that some code, with the functions in it, reads; and of the modules that it imports."""
    read, imported, argument = set[str](), set[str](), 0
    for operation, byte in zip(code.co_code[::2], code.co_code[1::2], strict=True):  # dis takes many calls for each
        argument = argument << 8 | byte
        if operation == dis.EXTENDED_ARG:
            continue
        if operation in _READS_GLOBAL:
            read.add(code.co_names[argument >> _READS_GLOBAL[operation]])
        elif operation == _IMPORT_NAME:
            imported.add(code.co_names[argument >> _OF_IMPORT])
        argument = 0
    inner = [_loaded_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(read).union(*[x for x, _ in inner]), frozenset(imported).union(*[x for _, x in inner])


@functools.lru_cache(maxsize=1000)
def names_in(code: types.CodeType) -> frozenset[str]:
    """All names in some code, with the functions in it: globals, attributes, imports, and text for ``getattr``."""
    inner = [names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    texts = [name for const in code.co_consts for name in names_by_text(const)]
    return frozenset(code.co_names).union(texts, *inner)


def names_by_text(x: Any) -> list[str]:
    """The names in a text, or a tuple of texts, which code may give to ``getattr``; in an ``operator.attrgetter``."""
    if type(x) in _GETTERS:
        getter, args = x.__reduce__()  # a class, or a partial of one
        x = (*getattr(getter, "args", ()), *args)
    texts = [y for y in (x if type(x) is tuple else (x,)) if issubclass(type(y), str) and len(y) < _LONG]
    return [name for text in texts for name in text.split(".") if name.isidentifier()]


_LONG = 1000  # characters: text to train on, say, is no name
_GETTERS = operator.attrgetter, operator.methodcaller, operator.itemgetter
