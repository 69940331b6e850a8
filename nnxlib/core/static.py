"""Static values: what is part of the program and not of the data; compared by value.

Two models share a compiled function if their static values are equal, so equality must mean "JAX would trace the same
program". Python's ``==`` is too coarse for that (``1 == True == 1.0``, ``0.0 == -0.0``) and too fine (two lambdas from
the same line differ, a list has no hash). So a value is *frozen*: mapped to a hashable *key* with the right equality,
by exact types, containers item by item, functions without closures by their code and the globals that it names.

A :class:`Const` is a value with its key. If anything in the value can be changed in place, the Const holds a copy, so
that it always agrees with its key. It gives each trace another copy, and the value itself is compared with it at each
call. Only what is compared item by item is copied; the hashable parts (functions, meshes, Modules) are the very same.
"""

from __future__ import annotations

import array
import copy
import copyreg
import dataclasses
import functools
import operator
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import jax
import numpy as np

from .closures import call_unwatched
from .errors import StaticValueError, describe, place_of
from .identity import Identified
from .tracing import Tracer, bits_of, ensure_stack, is_key, is_readable

# The types of values that are their own key and refer to nothing else.
ATOMS = frozenset({int, str, bytes, bool, type(None), type, type(...), np.dtype})


class Identity:
    """Compares by the identity of an object; keeps it alive, so that its id is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value


class Const:
    """A static value and its key; equal to another one if JAX would trace the same program for both."""

    __slots__ = ("__weakref__", "_by_items", "_hash", "_remake", "copied_from", "key", "uncopied", "value")

    def __init__(
        self,
        value: Any,
        key: Hashable,
        uncopied: tuple[Any, ...] | None = None,
        remake: Callable | None = None,
        by_items: Sequence[Any] = (),
    ):
        self.value, self.key, self._hash = value, key, hash(key)
        self.copied_from = key  # the key of what the value is a copy of: a class may leave out attributes of a copy
        self.uncopied = uncopied  # of a mutable value: what its copies have in common; None of an immutable one
        self._by_items = by_items  # what in it is not copied by deepcopy
        self._remake = remake  # how to make the same Const from the value, when unpickled

    @property
    def mutable(self) -> bool:
        """Whether anything in the value can be changed in place."""
        return self.uncopied is not None

    @classmethod
    def of(cls, value: Any, path: tuple = ()) -> Const:
        """Freeze ``value``; ``path`` is where it was found, for messages.

        >>> from nnxlib.core.static import Const
        >>> Const.of([1, {'a': 2}]) == Const.of([1, {'a': 2}]), Const.of(1) == Const.of(True)
        (True, False)

        Raises:
          StaticValueError: for arrays, and for objects that have no hash and hold more than attributes.
        """
        kind = type(value)
        if kind in ATOMS:
            return cls(value, (kind, value))
        if kind is tuple and ATOMS.issuperset(map(type, value)):
            return cls(value, (kind, tuple(zip(map(type, value), value))))
        freezer = _Freezer(path)
        return freezer.const(value, _Freezer.freeze, cls.of)

    @classmethod
    def of_items(cls, items: Mapping[Any, Any], path: tuple = ()) -> Const:
        """Freeze a mapping that is never edited itself, metadata; its values may be mutable, or arrays."""
        freezer = _MetadataFreezer(path)
        return freezer.const(items, _Freezer.named_items, cls.of_items)

    def fresh(self) -> Any:
        """Return the value; of a mutable one, a copy."""
        if self.uncopied is None:
            return self.value
        # A List or Dict in it is not captured.
        return call_unwatched(_copy, self.value, self.uncopied, self._by_items)[0]

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Const and self._hash == other._hash and self.key == other.key)

    def __reduce__(self):
        return self._remake or Const.of, (self.value,)

    def __repr__(self) -> str:
        return repr(self.value)


class StaticArgument:
    """Marks an argument that is part of the program (``static_argnums``), whatever it is; packed as a Const."""

    __slots__ = ("path", "value")

    def __init__(self, value: Any, path: tuple = ()):
        self.value, self.path = value, path

    def frozen(self) -> Const:
        return Const.of(self.value, self.path)


def holds_same(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
    """Whether two mappings have the same keys in the same order, and the very same values."""
    return a is b or (tuple(a) == tuple(b) and all(map(operator.is_, a.values(), b.values())))


def same_items(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
    """Whether two mappings, such as metadata, are equal as static values; ``==`` would fail for arrays in them."""
    return holds_same(a, b) or Const.of_items(a) == Const.of_items(b)


# --- freezing -------------------------------------------------------------------------------------------------------


# The mutable Consts, by the hash of their key. The key itself may refer to a model that refers to the Const.
_MUTABLE: weakref.WeakValueDictionary[int, Const] = weakref.WeakValueDictionary()


class _Freezer:
    """One walk over a static value, which also notes whether anything in it is mutable, and what its copies need."""

    def __init__(self, path: tuple):
        self.path, self.mutable = path, False
        self.uncopied: list[Any] = []  # hashable, and so the very same in all copies
        self.by_items: list[Any] = []  # what deepcopy would fail to copy, or copy slowly, see `_copy`
        self.within: type | None = None  # the class of the innermost enclosing object that JAX does not look into

    def const(self, value: Any, freeze: Callable[[Any, Any], Hashable], remake: Callable) -> Const:
        try:
            key = freeze(self, value)
        except RecursionError:
            ensure_stack(100)  # else the value is not to blame
            raise StaticValueError(f"The static value at {place_of(self.path)} contains itself.") from None
        if not self.mutable:
            return Const(value, key, None, remake)
        const = _MUTABLE.get(hash(key))
        if const is None or key not in (const.key, const.copied_from) or type(const.value) is not type(value):
            uncopied = tuple(self.uncopied)
            copied, by_items = _copy(value, uncopied, self.by_items)
            key_of_copy = freeze(type(self)(self.path), copied)
            const = Const(copied, key_of_copy, uncopied, remake, by_items)
            const.copied_from = key
            _MUTABLE[hash(key)] = _MUTABLE[hash(key_of_copy)] = const
        return const

    def freeze(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in ATOMS:
            return kind, value
        rule = RULES.get(kind)
        if rule is not None:
            if kind in _COPIED_BY_C and _is_flat(value):
                self.by_items.append(value)
            return kind, rule(self, value)
        if isinstance(value, type):  # of another metaclass, such as jnp.float32
            return kind, value
        if isinstance(value, jax.Array):
            return kind, self.jax_array(value)
        if isinstance(value, np.generic):
            return kind, (value.dtype, value.tobytes())
        if isinstance(value, tuple):
            return kind, self.items(value)
        for base in MUTABLE_CONTAINERS:
            if isinstance(value, base):
                if base is list and not hasattr(kind, "__deepcopy__"):
                    self.by_items.append(value)
                return kind, (RULES[base](self, value), self.mapping(dict_of(value) or {}))
        if isinstance(value, dict):
            if not issubclass(kind, Identified):  # attributes are not compared; what has a hash is not copied
                self.uncopied += filter(has_hash, (dict_of(value) or {}).values())
            made_of = self.freeze(value.default_factory) if isinstance(value, defaultdict) else None
            if not hasattr(kind, "__deepcopy__"):
                self.by_items.append(value)
                value = dict(value)  # which has a method `items`, not the item of that name
            return kind, (made_of, self.mapping(value))
        if isinstance(value, Mapping) and kind.__hash__ is None:
            return kind, self.mapping(value)
        if isinstance(value, Sequence) and kind.__hash__ is None:  # not by attributes: it may refer to its parent
            return kind, self.mutable_items(value)
        if issubclass(kind, Identified):  # a node or Variable that is opaque to nnxlib; its class may be set
            return self.identity(value)
        if not has_hash(value):
            return kind, self.attributes(value)
        if isinstance(value, MutableMapping | MutableSequence) and _is_hashed_by_content(value):
            self.mutable = True  # compared by what it holds now; the repr tells -1 from -2, whose hashes are the same
            return kind, (hash(value), repr(value) if kind.__repr__ is not object.__repr__ else None)
        return kind, self.hashable(value)

    def items(self, values: Any) -> tuple[Hashable, ...]:
        return tuple([(type(v), v) if type(v) in ATOMS else self.freeze(v) for v in values])

    def mutable_items(self, values: Any) -> Hashable:
        self.mutable = True
        return self.items(values)

    def queue(self, value: deque) -> Hashable:
        before, self.within = self.within, type(value)
        found = value.maxlen, self.mutable_items(value)
        self.within = before
        return found

    def named_items(self, values: Mapping) -> Hashable:
        return tuple([(name, self.freeze(value)) for name, value in values.items()])

    def mapping(self, values: Mapping) -> Hashable:
        self.mutable = True
        return tuple(zip(self.items(values), self.items(values.values()), strict=False))

    def view(self, values: Mapping) -> Hashable:
        self.by_items.append(values)
        return self.mapping(values)

    def set(self, values: Any) -> Hashable:
        self.mutable = self.mutable or not isinstance(values, frozenset)
        return frozenset(self.items(values))

    def array(self, value: np.ndarray) -> Hashable:
        self.mutable = True
        data = np.asarray(value)  # of a masked array, what is behind the mask, too
        return data.shape, data.dtype, self.items(data.ravel().tolist()) if data.dtype.hasobject else data.tobytes()

    def jax_array(self, value: jax.Array) -> Hashable:
        """An array that was not declared static, but is in an object that JAX does not look into, is immutable."""
        if self.within is not None and isinstance(value, Tracer):
            raise StaticValueError(
                f"The array {describe(value)} in the {self.within.__name__} at {place_of(self.path)} is computed while "
                "tracing, but JAX does not look into such an object, so it is part of the program. Keep arrays in a "
                "list, a tuple, a dict, or an object whose class is registered with JAX "
                "(jax.tree_util.register_dataclass)."
            )
        if self.within is not None:
            return self.identity(value)
        raise StaticValueError(
            f"The array {describe(value)} at {place_of(self.path)} is declared static, but a static value must be "
            "known while compiling. Remove nnx.static / nnx.Static / static_argnums (which counts `self`), or pass a "
            "NumPy array."
        )

    def function(self, value: types.FunctionType) -> Hashable:
        if value.__closure__ or value.__dict__:  # which can be rebound, and hold anything
            return self.identity(value)
        own = value.__code__, Identity(value.__globals__), _named_by(value)
        if not (value.__defaults__ or value.__kwdefaults__):
            return own
        before, self.mutable = self.mutable, False
        defaults = self.content(value, (*(value.__defaults__ or ()), ..., *(value.__kwdefaults__ or {}).items()))
        if self.mutable:  # a function is not copied
            return self.identity(value), defaults
        self.mutable = before
        return own, defaults

    def partial(self, value: functools.partial) -> Hashable:
        return self.content(value, (value.func, value.args, tuple(value.keywords.items())))

    def content(self, value: Any, parts: tuple[Any, ...]) -> Hashable:
        """A function or partial by its parts, or by identity if these cannot be compared (if one is an array)."""
        inner = type(self)(self.path)
        try:
            key = inner.items(parts)
        except StaticValueError:
            return self.identity(value)
        self.mutable = self.mutable or inner.mutable
        self.uncopied += inner.uncopied
        self.by_items += inner.by_items
        return key

    def identity(self, value: Any) -> Hashable:
        self.uncopied.append(value)
        return Identity(value)

    def hashable(self, value: Any) -> Hashable:
        options = getattr(type(value), "__dataclass_params__", None)
        if options is None:
            self.uncopied.append(value)
            return value
        if not options.frozen and (options.eq or options.unsafe_hash):  # equal by fields, which can be set
            return self.attributes(value)
        inner = type(self)(self.path)
        try:  # for its own ==, 1 is True and 0.0 is -0.0
            key = inner.items([getattr(value, f.name) for f in dataclasses.fields(value) if f.compare])
        except (StaticValueError, AttributeError):
            key = None
        if inner.mutable and options.eq:  # in a field that is left out of the hash
            return self.attributes(value)
        self.mutable = self.mutable or inner.mutable or not options.frozen
        self.uncopied.append(value)
        return value, key

    def attributes(self, value: Any) -> Hashable:
        """An object without a hash, such as a mutable dataclass or a namespace: compared attribute by attribute.

        Arrays among them are compared by identity. So is what a dataclass has besides its fields, if it is an array or
        holds one.
        """
        self.mutable = True
        if _keeps_more_than_attributes(type(value)):
            raise StaticValueError(
                f"The static value at {place_of(self.path)} of type {type(value).__name__} has no hash, and "
                "attributes do not show all that it holds. Give its class __eq__ and __hash__, or mark the attribute "
                "with nnx.data(...) if it holds arrays."
            )
        held = state_of(value)
        own = getattr(type(value), "__dataclass_fields__", held)
        before, self.within = self.within, type(value)
        found = [
            (name, self.freeze(x) if name in own else self.content(x, (x,)))
            for name, x in held.items()
            if not isinstance(getattr(type(value), name, None), functools.cached_property)  # follows from the others
        ]
        self.within = before
        return tuple(found)


class _MetadataFreezer(_Freezer):
    """Of metadata, which are static without having been declared so: arrays among them, such as bounds, have a key."""

    def jax_array(self, value: jax.Array) -> Hashable:
        if isinstance(value, Tracer):
            raise StaticValueError(
                f"{place_of(self.path)} holds {describe(value)}, which is computed while tracing, but metadata are "
                "part of the program. Make a NumPy array of it, or keep it in an attribute of a Module."
            )
        if not is_readable(value):
            return self.identity(value)
        self.uncopied.append(value)  # a copy made in a trace would be a tracer
        data = bits_of(value) if is_key(value) else value
        return value.aval, value.sharding, np.asarray(data).tobytes()  # the trace knows the first two, too


MUTABLE_CONTAINERS = list, set, deque, bytearray, np.ndarray  # those of a subclass: by items and attributes


RULES: dict[type, Callable[[_Freezer, Any], Hashable]] = {
    float: lambda self, value: value.hex(),  # which tells 0.0 from -0.0, and nan equals itself
    complex: lambda self, value: (value.real.hex(), value.imag.hex()),
    slice: lambda self, value: self.items((value.start, value.stop, value.step)),
    range: lambda self, value: (value.start, value.stop, value.step),  # for Python, (0, 3, 2) and (0, 4, 2) are equal
    tuple: _Freezer.items,
    list: _Freezer.mutable_items,
    deque: _Freezer.queue,
    dict: _Freezer.mapping,
    types.MappingProxyType: _Freezer.view,
    set: _Freezer.set,
    frozenset: _Freezer.set,
    bytearray: lambda self, value: self.mutable_items(bytes(value)),
    array.array: lambda self, value: (value.typecode, self.mutable_items(value.tobytes())),
    np.ndarray: _Freezer.array,
    np.void: _Freezer.array,  # a row of a structured array, and a view of it
    np.record: _Freezer.array,
    types.FunctionType: _Freezer.function,
    functools.partial: _Freezer.partial,
    jax.tree_util.Partial: _Freezer.partial,
}


def _named_by(function: types.FunctionType) -> tuple[Identity, ...]:
    """What the globals that a function names were when it was first frozen: its trace has them as constants.

    A cell of a notebook that is run again defines the same function, but perhaps other numbers or functions.
    """
    found = _named.get(function)
    if found is None:
        namespace = function.__globals__
        values = [namespace[name] for name in sorted(_names_in(function.__code__)) if name in namespace]
        found = _named.setdefault(function, tuple(map(_weak_identity, values)))
    return found


_named: weakref.WeakKeyDictionary[types.FunctionType, tuple[Identity, ...]] = weakref.WeakKeyDictionary()


def _names_in(code: types.CodeType) -> set[str]:
    inner = [_names_in(const) for const in code.co_consts if type(const) is types.CodeType]
    return set(code.co_names).union(*inner)


def _weak_identity(value: Any) -> Identity:
    """As :class:`Identity`, but keeps nothing alive of which there are weak references."""
    try:
        return Identity(weakref.ref(value))  # the same reference for the same object
    except TypeError:
        return Identity(value)


def _is_hashed_by_content(value: Any) -> bool:
    """Whether the hash of a value is its own, and not made of the identity of the object."""
    return hash(value) not in (id(value), object.__hash__(value))


# --- copying --------------------------------------------------------------------------------------------------------


_COPIED_BY_C = frozenset({list, set, deque, dict})


def _is_flat(x: Any) -> bool:
    """Whether a built-in container holds nothing that can be changed, so that its own method copies all of it."""
    return _FLAT.issuperset(map(type, x)) and (type(x) is not dict or _FLAT.issuperset(map(type, x.values())))


_FLAT = ATOMS | {float, complex}


def _copy(value: Any, uncopied: Sequence[Any], by_items: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A deep copy of a value, with what is ``uncopied`` in it; and the copies of the containers ``by_items`` in it.

    These containers are copied here. ``copy.deepcopy`` fails for views of dicts (``MappingProxyType``), and for some
    subclasses of dict and list, whose methods it calls; and for a flat container it calls six functions per item.
    """
    begun = list(map(_begun, by_items))
    copies = [new for new, _ in begun]
    memo = {id(x): x for x in uncopied} | dict(zip(map(id, by_items), copies, strict=True))
    copied = functools.partial(copy.deepcopy, memo=memo)
    for old, (new, items) in zip(by_items, begun, strict=True):
        if items is new:
            _copy_attributes(old, new, copied)
        if isinstance(items, list):
            list.extend(items, map(copied, old))
        elif items is not None:
            put: Any = OrderedDict.__setitem__ if isinstance(items, OrderedDict) else dict.__setitem__
            for key, item in dict(old).items():
                put(items, copied(key), copied(item))
    return copied(value), copies


def _begun(x: Any) -> tuple[Any, list | dict | None]:
    """The beginning of a copy: an empty view, dict or list of the same type, and the container to put the items in.

    A flat container is copied at once; then the second result is None.
    """
    if type(x) in _COPIED_BY_C:
        return x.copy(), None
    if type(x) is types.MappingProxyType:
        return types.MappingProxyType(items := {}), items
    base: Any = list if isinstance(x, list) else dict
    new = base.__new__(type(x))
    return new, new


def _copy_attributes(old: Any, new: Any, copied: Callable[[Any], Any]) -> None:
    if isinstance(old, dict) and _is_its_own_dict(old):
        object.__setattr__(new, "__dict__", new)
        return
    attributes = state_of(old)
    if isinstance(old, defaultdict):
        attributes["default_factory"] = old.default_factory
    for name, x in attributes.items():
        object.__setattr__(new, name, copied(x))


def _is_its_own_dict(value: dict) -> bool:
    return type(value).__dictoffset__ != 0 and vars(value) is value


# --- what an object holds -------------------------------------------------------------------------------------------


def has_hash(value: Any) -> bool:
    try:
        hash(value)
    except (TypeError, ValueError):  # the latter of a memoryview that can be written
        return False
    return True


def dict_of(x: Any) -> Any:
    """The ``__dict__`` of an object, whatever its class makes of that, or None."""
    try:
        return x.__dict__
    except Exception:  # of a weak proxy, or a class's own __getattr__, such as the KeyError of a look-up in a dict
        return None


def state_of(x: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots too."""
    state: Any = object.__getstate__(x)  # what is in its __dict__; if it has slots, both in a tuple
    attributes, slots = state if type(state) is tuple else (state, None)
    return {**(attributes or {}), **(slots or {})}


def _keeps_more_than_attributes(kind: type) -> bool:
    """Whether the objects of a class hold anything that :func:`state_of` does not find, as an int or an exception does.

    By their size, as Python decides whether it can pickle an object by its attributes.
    """
    slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]  # as object.__getstate__ finds them
    known = len(slots) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > object.__basicsize__ + known * tuple.__itemsize__
