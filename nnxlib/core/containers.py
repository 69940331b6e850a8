"""List and Dict: a ``list`` and a ``dict`` that are nodes of the graph.

They behave like the built-in types. In addition they note every change, refuse a change under another trace, and turn
plain lists and dicts that are put into them into List and Dict. A plain list or dict that is assigned to an attribute
of a Module becomes one, unless it is declared data and holds arrays alone: then it stays a pytree. The attributes of a
Dict are its items. So are those of a List that are named by digits, as in flax.nnx; it may have other attributes, too.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Self, SupportsIndex, overload

from .adopting import CONTAINERS, adopt, fill_adopted
from .data import data, declares, explicit_mark, is_data, mark_of, static, undeclared
from .finding import reachable
from .generics import A
from .identity import change
from .missing import MISSING
from .objects import (
    SLOTS,
    AttributeView,
    HasAttributes,
    HasDict,
    Node,
    attributes_of,
    check_writable,
    has_ref,
    in_one_step,
    new_node,
    refill,
)
from .reprs import node_repr


def _tracking(name: str, method: Any, adopted: slice) -> Any:
    """A method of the built-in type that also checks the trace, adopts the values it is given, and notes the change.

    ``adopted`` says which of its positional arguments are values (or, for ``extend``, an iterable of values).
    """

    def wrapper(self: Any, *args: Any) -> Any:
        given = args[adopted]
        check_writable(self, f"change the items ({name})", name == "__setitem__" and _is_kept(self, *args))
        values = [adopt(undeclared(x)) for x in given]
        before, after = args[: adopted.start], args[adopted.start + len(values) :]
        marks = item_marks(self) if self._nnx_marks or any(map(_declares, given, values)) else None
        if marks is None:
            return change(self, method, self, *before, *values, *after)
        # The method does with the declarations what it is about to do with the items.
        declared = [_mark_for(name, before, x, value, marks) for x, value in zip(given, values, strict=True)]
        method(marks, *before, *declared, *after)
        write = method, self, *before, *values, *after
        return change(self, in_one_step, write, (object.__setattr__, self, "_nnx_marks", _with_items(self, marks)))

    wrapper.__name__, wrapper.__doc__ = name, method.__doc__
    return wrapper


def _is_kept(container: Any, key: Any, value: Any) -> bool:
    """Whether a Variable with a jax.Ref is set where it is: as by ``counts[0] += 1``."""
    base: Any = list if isinstance(container, list) else dict
    return has_ref(value) and (base is list or key in container) and base.__getitem__(container, key) is value


def _track(kind: type, base: type, names: Iterable[str], adopted: slice = slice(0, 0)) -> None:
    """Give a class such methods in place of these of the built-in type."""
    for name in names:
        setattr(kind, name, _tracking(name, getattr(base, name), adopted))


def item_marks(container: Any) -> Any:
    """A plain list or dict with the declaration of each item: True for data, False for static, None for neither."""
    marks = container._nnx_marks or {}
    if isinstance(container, list):
        return [marks.get(k) for k in range(len(container))]
    return {key: marks.get(key) for key in container}


def _with_items(container: Any, marks: Any) -> dict[Any, Any] | None:
    """The marks of a container, with these for its items."""
    before = container._nnx_marks or {}
    other = str if isinstance(container, list) else tuple  # the type of the keys of marks that are not about items
    kept = {key: mark for key, mark in before.items() if type(key) is other}
    found = dict(enumerate(marks)) if isinstance(container, list) else marks
    kept |= {key: mark for key, mark in found.items() if mark is not None}
    return kept or None


def _declares(given: Any, value: Any) -> bool:
    """Whether what is given is declared data or static, or its items are."""
    return declares(given) or (isinstance(value, Node) and bool(value._nnx_marks))


def _mark_for(name: str, place: tuple, given: Any, value: Any, marks: Any) -> Any:
    """The declaration of a value that a method puts in, or of the value it replaces; of each, if there are several."""
    if name == "extend" or (place and isinstance(place[0], slice)):
        return item_marks(value)
    if name != "__setitem__" or declares(given):
        return mark_of(given)
    return marks.get(*place) if isinstance(marks, dict) else marks[place[0]]


def _declared_again(value: Any, mark: bool | None) -> Any:
    return value if mark is None else (data if mark else static)(value)


def declared_items(items: Iterable[Any]) -> list[Any]:
    """The items in a plain list; those of a List that were declared data or static are declared so again."""
    if not isinstance(items, List) or not items._nnx_marks:
        return list(items)
    return list(map(_declared_again, items, item_marks(items)))


# The methods that a List and a Dict share with a Module: those that concern all Modules below. They are defined with
# Module, and looked up last, so that an item or attribute of the same name comes first.
MODULE_METHODS: dict[str, Callable[..., Any]] = {}


class _Container:
    """What a List and a Dict have in common; as a base it precedes the built-in type, whose methods it calls."""

    __slots__ = ()

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Self:
        return new_node(cls)

    def __repr__(self) -> str:
        # If it holds more than settings, it is a part of a model, and is written like one.
        is_part = any(not isinstance(x, List | Dict) for _, x in reachable(self, set()))
        return node_repr(self) if is_part else super().__repr__()

    __hash__ = object.__hash__  # a node is hashed by identity


def _fill(container: Any, items: dict[Any, Any]) -> None:
    """Fill a container, which is new, unless its ``__init__`` is called again."""
    check_writable(container, "replace the items")
    change(container, fill_adopted, container, items)


def _index(items: List, name: str | int) -> int | None:
    """The index that a name of digits stands for, as in flax.nnx; None for other names, and beyond the end.

    Code that follows a path through ``vars()`` asks for the index itself, which was the name up to flax 0.12.3.
    """
    return int(name) if str(name).isdecimal() and int(name) < list.__len__(items) else None


class IndexView(AttributeView):
    """What ``vars()`` of a List returns: the items, under names of digits, and then the attributes."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        index = _index(self._node, name)
        return super().__getitem__(name) if index is None else list.__getitem__(self._node, index)

    def __setitem__(self, name: str, value: Any) -> None:
        List.__setattr__(self._node, name, value)

    def __iter__(self) -> Iterator[str]:
        return chain(map(str, range(list.__len__(self._node))), super().__iter__())

    def __len__(self) -> int:
        return list.__len__(self._node) + super().__len__()


class ListSlots(list[A], HasDict):  # type: ignore[misc]  # a slot for __dict__ alone changes no layout
    __slots__ = SLOTS


class List(_Container, ListSlots[A], list[A], HasAttributes):  # type: ignore[misc]
    """A list of Modules, Variables, arrays or static values, whose changes are noticed; it may have attributes too.

    For code that goes over ``vars()`` of whatever is in a model, the items are attributes that are named by digits.

    >>> import nnxlib as nnx
    >>> layers = nnx.List([nnx.Param(1.0)])
    >>> layers.append(nnx.Param(2.0))
    >>> nnx.to_pure_dict(nnx.state(layers)), vars(layers)['1']
    ({0: 1.0, 1: 2.0}, Param(2.0))
    """

    __slots__ = ()
    _nnx_slots = ListSlots
    _nnx_view = IndexView
    __dict__ = vars(HasAttributes)["__dict__"]  # else Python gives a subclass of list with attributes one of its own

    def __init__(self, it: Iterable[A] | None = None, /):
        if it is not None:
            _fill(self, dict(enumerate(declared_items(it))))

    def __getattr__(self, name: str) -> Any:
        if (index := _index(self, name)) is not None:
            return list.__getitem__(self, index)
        if name in MODULE_METHODS:
            return types.MethodType(MODULE_METHODS[name], self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        if (index := _index(self, name)) is None:
            super().__setattr__(name, value)
        else:
            List.__setitem__(self, index, value)

    def _nnx_children(self) -> Iterator[tuple[Any, Any]]:
        return chain(enumerate(list.__iter__(self)), attributes_of(self).items())

    def _nnx_fill(self, items: dict[Any, Any]) -> None:
        attributes = {key: value for key, value in items.items() if type(key) is str}
        own = attributes_of(self)
        values = [value for key, value in items.items() if key not in attributes]
        in_one_step((list.__setitem__, self, slice(None), values), (own.clear,), (own.update, attributes))

    def append(self, value: A) -> None:
        _append(self, value)

    def insert(self, index: SupportsIndex, value: A) -> None:
        _insert(self, index, value)

    def extend(self, values: Iterable[A]) -> None:
        _extend(self, declared_items(values))

    def __iadd__(self, values: Iterable[A], /) -> Any:
        self.extend(values)
        return self

    def pop(self, index: SupportsIndex = -1) -> A:
        return _pop(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        _set_item(self, index, declared_items(value) if isinstance(index, slice) else value)

    def remove(self, value: A) -> None:
        del self[self.index(value)]

    def sort(self, *, key: Callable[[A], Any] | None = None, reverse: bool = False) -> None:
        items = declared_items(self)
        items.sort(key=lambda x: key(undeclared(x)) if key else undeclared(x), reverse=reverse)
        self[:] = items

    def copy(self) -> List[A]:
        return List(self)

    @overload
    def __getitem__(self, index: slice) -> List[A]: ...
    @overload
    def __getitem__(self, index: SupportsIndex) -> A: ...
    def __getitem__(self, index: Any) -> Any:
        return List(declared_items(self)[index]) if isinstance(index, slice) else list.__getitem__(self, index)

    def __getstate__(self) -> Any:
        return dict(attributes_of(self)), self._nnx_marks

    def __setstate__(self, state: Any) -> None:
        attributes, marks = state
        refill(self, {**self._nnx_contents(), **attributes}, marks)


_set_item = _tracking("__setitem__", list.__setitem__, slice(1, 2))
_append = _tracking("append", list.append, slice(0, 1))
_insert = _tracking("insert", list.insert, slice(1, 2))
_extend = _tracking("extend", list.extend, slice(0, 1))
_pop = _tracking("pop", list.pop, slice(0, 0))
_track(List, list, ("clear", "reverse", "__delitem__", "__imul__"))


class ItemView(AttributeView):
    """What ``vars()`` of a Dict returns: a view of the items, whatever a subclass makes of ``in`` and ``[]``."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        return dict.__getitem__(self._node, name)

    def __setitem__(self, name: str, value: Any) -> None:
        Dict.__setitem__(self._node, name, value)

    def __delitem__(self, name: str) -> None:
        Dict.__delitem__(self._node, name)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self._node)

    def __len__(self) -> int:
        return dict.__len__(self._node)


class DictSlots(dict[str, A], HasDict):  # type: ignore[misc]
    __slots__ = SLOTS


class Dict(_Container, DictSlots[A], dict[str, A], Node):  # type: ignore[misc]
    """A dict of Modules, Variables, arrays or static values, whose changes are noticed; items are attributes too.

    >>> import nnxlib as nnx
    >>> heads = nnx.Dict(policy=nnx.Param(1.0))
    >>> heads.value_head = nnx.Param(2.0)
    >>> sorted(heads), heads.policy.value
    (['policy', 'value_head'], 1.0)
    """

    __slots__ = ()
    _nnx_slots = DictSlots
    _nnx_view = ItemView
    __dict__ = property(vars(HasAttributes)["__dict__"].fget)  # type: ignore[assignment]  # items are set by their names

    def __init__(self, items: Mapping[str, A] | Iterable[tuple[str, A]] = (), /, **kwargs: A):
        _fill(self, dict(items, **kwargs))

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *[key for key in self if isinstance(key, str)]})

    def _nnx_children(self) -> Iterator[tuple[Any, Any]]:
        return iter(dict.items(self))

    def _nnx_fill(self, items: dict[Any, Any]) -> None:
        in_one_step((dict.clear, self), (dict.update, self, items))

    # A dict takes these defaults by position only; the Dict of flax.nnx by name, too.

    def get(self, key: str, default: Any = None) -> Any:
        return dict.get(self, key, default)

    def pop(self, key: str, default: Any = MISSING) -> Any:
        return _dict_pop(self, key) if default is MISSING else _dict_pop(self, key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        return _set_default(self, key, default)

    def update(self, /, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __or__(self, other: Any) -> Any:
        return type(self)({**self, **other})

    def copy(self) -> Dict[A]:
        return type(self)({key: _declared_again(self[key], mark) for key, mark in item_marks(self).items()})

    # Attributes do not go through the methods for items: a subclass may define these by ``getattr`` and ``setattr``.

    def __getattr__(self, name: str) -> Any:
        if dict.__contains__(self, name):
            return dict.__getitem__(self, name)
        if name in MODULE_METHODS:
            return types.MethodType(MODULE_METHODS[name], self)
        raise AttributeError(f"{type(self).__name__} has no attribute or key {name!r}; keys: {[*dict.keys(self)]}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "__class__":
            Dict.__setitem__(self, name, value)
            return
        check_writable(self, "set the class")
        change(self, object.__setattr__, self, name, value)

    def __delattr__(self, name: str) -> None:
        if not dict.__contains__(self, name):
            raise AttributeError(f"{type(self).__name__} has no key {name!r}; keys: {[*dict.keys(self)]}")
        Dict.__delitem__(self, name)

    def __getstate__(self) -> Any:
        return self._nnx_marks

    def __setstate__(self, state: Any) -> None:
        change(self, object.__setattr__, self, "_nnx_marks", state)


_set_default = _tracking("setdefault", dict.setdefault, slice(1, 2))
_dict_pop = _tracking("pop", dict.pop, slice(0, 0))
_track(Dict, dict, ("__setitem__",), slice(1, 2))
_track(Dict, dict, ("__delitem__", "popitem", "clear"))

CONTAINERS[list], CONTAINERS[dict] = List, Dict


def holds_data(container: List | Dict) -> bool:
    """Whether there is any data in a List or Dict, at any depth."""
    left, seen = [container], {id(container)}
    while left:
        node = left.pop()
        for name, value in node._nnx_children():
            if isinstance(value, List | Dict):
                if id(value) not in seen:  # it may contain itself
                    seen.add(id(value))
                    left.append(value)
            elif is_data(value) if (mark := explicit_mark(node, name)) is None else mark:
                return True
    return False
