"""Nodes: the mutable Python objects of the graph.

A *node* is an object whose attributes or items nnxlib tracks: a :class:`Pytree` (and so every Module), and the
containers :class:`~nnxlib.core.containers.List` and :class:`~nnxlib.core.containers.Dict`. Each node has hidden slots:

- ``_nnx_trace``: the trace under which it was made; a write under another trace raises ``TraceContextError``.
- ``_nnx_stamps``: the stamps of the cached layouts that describe the node; a structural change invalidates them.
- ``_nnx_table``: the table of the graph below this node, if it was packed as a root (tables.py).
- ``_nnx_tree``: how the node flattens for raw JAX, if the graph below it is a tree (pytrees.py).
- ``_nnx_marks``: notes about attributes: under ``name``, whether it was declared ``nnx.data`` or ``nnx.static``; under
  ``(name,)``, the user's own setting that ``eval()`` has overridden; under ``(name, "recorded")``, that ``sow`` or
  ``perturb`` made it. The dict is replaced and never edited, since layouts refer to it.

An attribute is data or static by its value, or because it was declared so (data.py). A plain list or dict becomes a
List or Dict on assignment (adopting.py).
"""

from __future__ import annotations

import abc
import copy
import copyreg
import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain, starmap
from typing import Any, Self, TypeVar, dataclass_transform, overload

import jax

from . import errors
from .adopting import adopt, holds_only_arrays
from .closures import contents_and_marks, is_captured, is_lent_elsewhere, notice, wait_for_loans
from .data import (
    DECLARED,
    HIDING,
    data,
    declares,
    explicit_mark,
    is_data,
    mark_of,
    static,
    undeclared,
    warn_of_hidden,
)
from .finding import how_to_pass, locate
from .identity import Identified, change, with_slots_of
from .missing import MISSING
from .pickling import FUNCTION_TYPES
from .reprs import node_repr
from .stamps import Stamps
from .trace_state import PytreeState
from .tracing import Tracer, TraceRef, boundary, current_trace, is_own
from .values import deep_copy

SLOTS = ("_nnx_trace", "_nnx_stamps", "_nnx_table", "_nnx_marks", "_nnx_tree")

PYTREE_REGISTRARS: list[Callable[[type], None]] = []  # called with each new class of nodes; filled by pytrees.py

Class = TypeVar("Class", bound=type)

_REDUCING = "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"  # by which a class may say how it is copied

_set = object.__setattr__


class HasDict:
    """Owns the real ``__dict__``, so that a subclass can offer a checked view under that name, and pass it on."""

    __slots__ = ("__dict__", "__weakref__")


class PytreeSlots(HasDict):
    """The slots of a Pytree, without its ``__setattr__``, which checks every write; see :func:`new_node`."""

    __slots__ = SLOTS


class Node(Identified):
    """Base class of Pytree, List and Dict; each of them has its own slots, ``SLOTS``."""

    __slots__ = ()

    _nnx_saved = SLOTS
    _nnx_marks: dict[Any, Any] | None
    _nnx_trace: Any
    _nnx_tree: Any
    _nnx_guarded: bool = True  # False for a class whose instances can be changed unnoticed
    _nnx_slots: type  # a base class that has all slots, and does not check writes
    # False for a class with pytree=False: declarations have no effect there, and lists and dicts stay, as in flax.nnx.
    _nnx_is_pytree: bool = True
    # Whether a jitted function that uses the node captures it. False for a class with a `_check_valid_context` of its
    # own: of such a node only the Variables are captured.
    _nnx_is_captured: bool = True

    def __init_subclass__(cls, *, pytree: bool = True, experimental_pytree: bool = True, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls._nnx_is_pytree = pytree  # `experimental_pytree=True` of flax.nnx up to 0.10 asks for what is the default
        cls._nnx_is_captured = cls._check_valid_context is Node._check_valid_context
        for register in PYTREE_REGISTRARS if pytree else ():
            register(cls)

    @staticmethod
    def _nnx_fill_new(node: Any, items: dict[Any, Any]) -> None:
        """Give an empty node its contents; it may keep the dict. For most classes it is a C function."""
        node._nnx_fill(items)

    # --- the trace that it belongs to ---

    def _nnx_give(self, trace: TraceRef) -> None:
        _set(self, "_nnx_trace", trace)

    def _check_valid_context(self, error_msg: Callable[[], str]) -> None:
        """Refuse a write under another trace than this node's: raise :class:`TraceContextError`.

        A class may override it to allow writes that leave no traced value behind. What its own ``__setattr__`` writes
        by ``object.__setattr__`` is not checked, then. A jitted function that refers to a Module of such a class
        captures only the Variables that it reads.
        """
        raise errors.TraceContextError(error_msg())

    def _nnx_changed(self) -> None:  # an array in place of another array is no change
        if self._nnx_stamps:
            Identified._nnx_changed(self)
        if self._nnx_tree is not None:
            _set(self, "_nnx_tree", None)

    def _nnx_join(self, trace: Any) -> None:
        _set(self, "_nnx_trace", trace)
        super()._nnx_join(trace)
        _set(self, "_nnx_tree", None)

    def __repr__(self) -> str:
        return node_repr(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from .treescope_repr import render_node  # only when first displayed: importing Treescope takes long

        return render_node(self, path, subtree_renderer)

    def __copy__(self) -> Any:
        notice(self)
        held, marks = contents_and_marks(self)
        made = new_node(type(self), marks)
        made._nnx_fill_new(made, held)
        return made

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Any:
        memo = {} if memo is None else memo
        # Not recursive, so a graph may be of any depth: first empty nodes for all, then their contents.
        notice(self)
        originals: list[Node] = []
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            if id(node) in memo or type(node).__deepcopy__ is not Node.__deepcopy__:
                continue
            held, marks = contents_and_marks(node)
            memo[id(node)] = new_node(type(node), marks)
            originals.append(node)
            stack.extend(_nodes_in(held.values()))
        for node in originals:
            node._nnx_copy_into(memo[id(node)], memo)
        return memo[id(self)]

    def _nnx_copy_into(self, shell: Any, memo: dict[int, Any]) -> None:
        """Fill an empty node with deep copies of what this node holds."""
        held, _ = contents_and_marks(self)
        memo |= {id(value): value for value in held.values() if isinstance(value, FUNCTION_TYPES)}
        copied = {}
        for key, value in held.items():
            try:
                copied[key] = deep_copy(value, memo)
            except TypeError as error:  # a file, say, or a lock
                error.add_note(f"in {key!r} of a {type(self).__name__}")
                raise
        shell._nnx_fill(copied)


def _nodes_in(values: Any) -> Iterator[Node]:
    for value in values:
        if isinstance(value, Node):
            yield value
        elif type(value) is tuple:  # a plain list or dict that is an attribute holds no nodes
            yield from _nodes_in(value)


def new_node(kind: Any, marks: dict[Any, Any] | None = None, tree: Any = None, stamps: Stamps = ()) -> Any:
    """Make an empty node of a class and of the running trace, without calling its ``__init__``.

    ``tree`` is the value of ``_nnx_tree``; the ``stamps`` are attached.
    """
    # CPython sets an attribute ten times as fast if the class has no `__setattr__`. So the slots come before the class.
    slots = kind._nnx_slots
    self = slots()
    self._nnx_trace, self._nnx_stamps, self._nnx_tree = current_trace(), stamps, tree
    self._nnx_table, self._nnx_marks = None, dict(marks) if marks else None
    try:
        self.__class__ = kind
        return self
    except TypeError:  # a class with slots of its own
        return with_slots_of(self, slots.__new__(kind))


def in_one_step(*calls: tuple) -> Any:
    """Call functions written in C, given as (function, *arguments), without handling an interrupt in between.

    Returns what the first one returned.
    """
    found, *_ = starmap(operator.call, calls)
    return found


def check_writable(node: Any, what: str, is_kept: bool = False) -> None:
    """Raise :class:`TraceContextError` unless ``node`` belongs to the running trace, or the write changes nothing."""
    try:
        foreign = node._nnx_trace is not current_trace()
    except AttributeError:  # the `__new__` of a base class that comes after Pytree is still running
        with_slots_of(new_node(Pytree), node)
        return
    if foreign:
        if current_trace() is None and is_lent_elsewhere(node._nnx_trace):
            wait_for_loans()
            if node._nnx_trace is None:
                return
        if node._nnx_is_captured:
            notice(node)
        if not is_kept:
            node._check_valid_context(functools.partial(_refusal, node, what))


def _refusal(node: Any, what: str) -> str:
    kind, path = type(node).__name__, locate(node, skip=5)
    where = f"{kind} at {path}" if path else f"a {kind}"
    return _CROSS_TRACE.format(kind=kind, what=what, where=where, remedy=how_to_pass(f"this {kind}"))


_CROSS_TRACE = """\
Cannot mutate '{kind}' from different trace level: to {what} of {where} inside a JAX transformation that the object \
was not passed to would let a traced value outlive its trace.
{remedy}

Or make the object inside the function."""


def refill(node: Any, items: dict[Any, Any], marks: dict[Any, Any] | None) -> None:
    """Replace the whole contents and the marks of a node, without checks."""

    def write() -> None:
        node._nnx_fill(items)
        _set(node, "_nnx_marks", marks or None)

    change(node, write)


# --- Pytree ---------------------------------------------------------------------------------------------------------


attributes_of: Any = vars(HasDict)["__dict__"].__get__  # (node) -> its attributes
_set_attributes: Any = vars(HasDict)["__dict__"].__set__  # (node, its attributes)


class AttributeView(MutableMapping):
    """What ``vars(module)`` returns: a view of the attributes that writes by ``setattr``, so writes are noticed."""

    __slots__ = ("_node",)

    def __init__(self, node: Any):
        self._node = node

    def __getitem__(self, name: str) -> Any:
        return attributes_of(self._node)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        node = self._node
        if _is_computed(node, name):
            check_writable(node, f"set attribute {name!r}")
            marks = {**(node._nnx_marks or {}), name: mark_of(value)} if declares(value) else node._nnx_marks
            write = attributes_of(node).__setitem__, name, adopt(undeclared(value))
            change(node, in_one_step, write, (_set, node, "_nnx_marks", marks))
        else:
            HasAttributes.__setattr__(node, name, value)

    def __delitem__(self, name: str) -> None:
        node = self._node
        if name not in attributes_of(node):
            raise KeyError(name)
        if _is_computed(node, name):
            check_writable(node, f"delete attribute {name!r}")
            change(node, attributes_of(node).__delitem__, name)
        else:
            HasAttributes.__delattr__(node, name)

    def __iter__(self) -> Iterator[str]:
        return iter(attributes_of(self._node))

    def __len__(self) -> int:
        return len(attributes_of(self._node))

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __or__(self, other: Any) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Any) -> dict[str, Any]:
        return {**other, **self}

    def __repr__(self) -> str:
        return repr(dict(self))


def _is_computed(node: Any, name: str) -> bool:
    """Whether a property, or another descriptor, of a user's class has this name: to set it would call that again."""
    found = class_attribute(type(node), name)
    if found is class_attribute(Pytree, name) or isinstance(found, types.MemberDescriptorType):
        return False
    return hasattr(type(found), "__set__")


def class_attribute(cls: type, name: str) -> Any:
    """An attribute of a class or its bases, not bound to any instance; None if there is none of that name."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _reporting(method: Callable, name: str) -> Callable:
    """A user's ``__setattr__`` or ``__delattr__``, with a check before it, and a note of the change after it.

    Under another trace it may still set what is not traced, if it does so without calling ours.
    """

    def wrapper(self: Any, attribute: str, *value: Any) -> None:
        if not _is_harmless(self, value):
            check_writable(self, f"{'set' if value else 'delete'} attribute {attribute!r}")
        change(self, method, self, attribute, *value)

    wrapper.__name__, wrapper.__qualname__ = name, method.__qualname__
    return wrapper


def _is_harmless(node: Any, value: tuple[Any, ...]) -> bool:
    """Whether an untraced value is about to be set in a node of another trace that no jitted function captures.

    Or any value, if the class has its own ``_check_valid_context``: it is asked when the value comes to our method.
    """
    trace = current_trace()
    if not value or getattr(node, "_nnx_trace", trace) is trace or is_lent_elsewhere(node._nnx_trace):
        return False
    if not node._nnx_is_captured:
        return True
    notice(node)
    if is_captured(node):
        return False
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, Identified))
    return not any(isinstance(x, Tracer) or getattr(x, "_nnx_trace", None) is trace for x in leaves)


class HasAttributes(Node, HasDict):
    """A node that checks writes to its attributes, and notes them: the base class of Pytree and List."""

    __slots__ = ()
    _nnx_view = AttributeView  # what `vars()` of an instance returns

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in ("__setattr__", "__delattr__"):
            if name in vars(cls):
                setattr(cls, name, _reporting(vars(cls)[name], name))
        # A plain class in front of Module or List among the bases has its own `__dict__`, which hides the checked one.
        cls._nnx_guarded = class_attribute(cls, "__dict__") is vars(HasAttributes)["__dict__"]
        cls.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # which makes it a class for `abc`
        abc.update_abstractmethods(cls)

    # What flax.nnx calls so: published code sets the first, which changes nothing, and looks names up in the second.
    _pytree__state = property(lambda self: PytreeState(owner=self), lambda self, state: None)

    @property
    def _pytree__nodes(self) -> dict[str, bool]:
        """Whether each attribute is data."""
        marks = [(name, value, explicit_mark(self, name)) for name, value in attributes_of(self).items()]
        return {name: is_data(value) if mark is None else mark for name, value, mark in marks}

    @property
    def __dict__(self) -> Any:  # type: ignore[override]  # vars() accepts any mapping
        notice(self)
        return self._nnx_view(self)

    @__dict__.setter
    def __dict__(self, attributes: Mapping[str, Any]) -> None:  # as a user's __setstate__ may do
        view, new = AttributeView(self), dict(attributes)
        for name in view.keys() - new.keys():
            del view[name]
        self._nnx_view(self).update(new)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            foreign = self._nnx_trace is not current_trace()
        except AttributeError:  # `__new__` has not run yet
            foreign = True
        if foreign:
            check_writable(self, f"set attribute {name!r}", _is_kept(self, name, value))
        marks = self._nnx_marks
        if type(value) is dataclasses.Field and DECLARED in value.metadata:
            marks = {**(marks or {}), name: value.metadata[DECLARED]}
            value = undeclared(value)
        kind = type(value)
        if (kind is list or kind is dict or kind is tuple) and not _has_setter(self, name):
            held: Any = value
            for key, item in held.items() if kind is dict else enumerate(held):
                if type(item) in HIDING and explicit_mark(self, name, marks) is None:
                    warn_of_hidden(self, f"{name}[{key!r}]", item, marks)
            stays = not self._nnx_is_pytree or (explicit_mark(self, name, marks) and holds_only_arrays(value))
            value = value if stays else adopt(value)
        elif kind in HIDING:
            warn_of_hidden(self, name, value, marks)
        old = attributes_of(self).get(name, MISSING)
        if marks is not None and (marks is not self._nnx_marks or (name,) in marks):
            kept = {key: mark for key, mark in marks.items() if key != (name,)}  # train() need not restore what it was
            change(self, in_one_step, (_set, self, name, value), (_set, self, "_nnx_marks", kept or None))
        elif old is value or (isinstance(value, jax.Array) and isinstance(old, jax.Array)):
            _set(self, name, value)
        else:
            change(self, _set, self, name, value)

    def __delattr__(self, name: str) -> None:
        if self._nnx_trace is not current_trace():
            check_writable(self, f"delete attribute {name!r}")
        if self._nnx_marks:  # the attribute's marks go with it
            kept = {key: mark for key, mark in self._nnx_marks.items() if key != name and key[:1] != (name,)}
            change(self, in_one_step, (object.__delattr__, self, name), (_set, self, "_nnx_marks", kept or None))
        else:
            change(self, object.__delattr__, self, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *attributes_of(self)})

    def _nnx_save(self) -> tuple:
        return *super()._nnx_save(), attributes_of(self)

    def _nnx_join(self, trace: Any) -> None:
        super()._nnx_join(trace)
        _set_attributes(self, attributes_of(self).copy())  # tables refer to the dict itself, which is saved

    def _nnx_restore(self, state: tuple) -> None:
        *saved, attributes = state
        _set_attributes(self, attributes)
        super()._nnx_restore(tuple(saved))


def _is_kept(node: Any, name: str, value: Any) -> bool:
    """Whether a Variable with a jax.Ref is set where it is: as by ``node.count += 1``."""
    return has_ref(value) and attributes_of(node).get(name) is value


def has_ref(x: Any) -> bool:
    """Whether this is a Variable with a jax.Ref, which any trace may write."""
    return isinstance(getattr(x, "_nnx_value", None), jax.Ref)


def _has_setter(node: Any, name: str) -> bool:
    """Whether to set this attribute of a node calls a property, which is given the value as it is."""
    return name == "__dict__" or type(getattr(type(node), name, None)) is property


def set_marked(node: Any, name: str, value: Any, key: Any, mark: Any) -> None:
    """Set an attribute, and a mark that comes with it."""

    def note() -> None:
        change(node, _set, node, "_nnx_marks", {**(node._nnx_marks or {}), key: mark})

    try:
        setattr(node, name, value)
        note()
    except BaseException:  # an interrupt may come in between
        if attributes_of(node).get(name) is value:
            note()
        raise


def set_child(holder: Any, key: Any, value: Any) -> None:
    """Set an attribute or an item of a node, list or dict: what stands at ``key`` in a path."""
    if _is_attribute(holder, key):
        setattr(holder, key, value)
    else:
        holder[key] = value


def delete_child(holder: Any, key: Any) -> None:
    """Delete an attribute or an item, as :func:`set_child` sets one."""
    if _is_attribute(holder, key):
        delattr(holder, key)
    else:
        del holder[key]


def _is_attribute(holder: Any, key: Any) -> bool:
    return isinstance(holder, HasAttributes) and isinstance(key, str)  # a List has both attributes and items


def _complete(cls: type) -> None:
    """Do what was left out when a class was made, if a user's ``__init_subclass__`` does not call ``super()``'s."""
    for base in reversed(cls.__mro__):
        if issubclass(base, Pytree) and "_nnx_slot_names" not in vars(base):
            own = next(c for c in base.__mro__ if is_own(c.__module__) and "__init_subclass__" in vars(c))
            vars(own)["__init_subclass__"].__func__(base)


class Pytree(HasAttributes, PytreeSlots):
    """Base class of the objects of the graph: mutable, with attributes that transforms trace; also a JAX pytree.

    A class with ``pytree=False`` (``class Config(nnx.Pytree, pytree=False)``) works in nnxlib's transforms, but raw JAX
    does not flatten it, and ``nnx.data`` and ``nnx.static`` have no effect: an attribute's value says what it is.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> class Point(nnx.Pytree):
    ...   def __init__(self, x):
    ...     self.x, self.name = jnp.asarray(x), 'p'
    >>> nnx.jit(lambda p: p.x * 2)(Point(1.5)).item()
    3.0
    """

    __slots__ = ()

    _nnx_slots = PytreeSlots
    _nnx_fill_new = staticmethod(_set_attributes)
    _nnx_slot_names: tuple[str, ...] = ()  # the attributes that a user's class declares in ``__slots__``

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Self:
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise errors.ArgumentError(
                f"{cls.__name__}() takes no arguments: it has no __init__. Is a @nnx.dataclass missing?"
            )
        if "_nnx_slot_names" not in vars(cls):
            _complete(cls)
        new = super().__new__
        if new is not object.__new__:  # that of a user's base class that comes after Pytree
            self = new(cls, *args, **kwargs)
            if not hasattr(self, "_nnx_trace"):  # it has set no attributes
                with_slots_of(new_node(Pytree), self)
            return self
        is_abstract = cls.__flags__ & inspect.TPFLAGS_IS_ABSTRACT  # Python refuses such a class
        self: Any = new(cls) if is_abstract else new_node(cls)
        _set_attributes(self, {})  # reads are faster from a dict that shares no keys with those of other objects
        return self

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls._nnx_slot_names = _slot_names(cls)
        if cls._nnx_slot_names:
            cls._nnx_fill_new = staticmethod(Node._nnx_fill_new)
        if cls.__copy__ is Node.__copy__ and any(getattr(cls, name) is not getattr(Pytree, name) for name in _REDUCING):
            cls.__copy__ = None  # type: ignore[assignment]  # copy.copy then does what these methods say
        if "__init__" in vars(cls) and is_own(cls.__module__):
            cls.__init__ = boundary(cls.__init__)  # type: ignore[method-assign]

    def _nnx_children(self) -> Iterator[tuple[Any, Any]]:
        items = attributes_of(self).items()
        return chain(items, self._nnx_slot_items()) if self._nnx_slot_names else iter(items)

    def _nnx_contents(self) -> dict[Any, Any]:
        return dict(self._nnx_children()) if self._nnx_slot_names else attributes_of(self).copy()

    def _nnx_slot_items(self) -> Iterator[tuple[str, Any]]:
        for name in self._nnx_slot_names:
            value = getattr(self, name, MISSING)
            if value is not MISSING:
                yield name, value

    def _nnx_fill(self, items: dict[str, Any]) -> None:
        attributes, in_slots = attributes_of(self), self._nnx_slot_names
        in_dict = {name: value for name, value in items.items() if name not in in_slots} if in_slots else items
        given = [(_set, self, name, items[name]) for name in in_slots if name in items]
        gone = [name for name in in_slots if name not in items and getattr(self, name, MISSING) is not MISSING]
        without = [(object.__delattr__, self, name) for name in gone]
        in_one_step((attributes.clear,), (attributes.update, in_dict), *given, *without)

    def _nnx_copy_into(self, shell: Any, memo: dict[int, Any]) -> None:
        if type(self).__getstate__ is Pytree.__getstate__:
            super()._nnx_copy_into(shell, memo)
        else:
            shell.__setstate__(copy.deepcopy(self.__getstate__(), memo))

    def __getstate__(self) -> Any:
        notice(self)
        return contents_and_marks(self)

    def __setstate__(self, state: Any) -> None:
        items, marks = state if type(state) is tuple else (state, None)  # a subclass may have its own __getstate__
        refill(self, items, dict(marks) if marks else None)


Object = Pytree


def _slot_names(cls: Any) -> tuple[str, ...]:
    """The attributes in slots of a user's class, by the names that they have outside of it (``_Net__hidden``)."""
    if "__slotnames__" in vars(cls):  # kept for the class from which `dataclass(slots=True)` has made this one
        del cls.__slotnames__
    names = copyreg._slotnames(cls)  # type: ignore[attr-defined]  # as object.__getstate__ finds them
    return tuple([name for name in names if name not in SLOTS])


@overload
def dataclass(cls: Class, /, **options: Any) -> Class: ...
@overload
def dataclass(**options: Any) -> Callable[[Class], Class]: ...
@dataclass_transform(field_specifiers=(dataclasses.field, data, static))
def dataclass(cls: Any = None, /, **options: Any) -> Any:
    """Make a dataclass of a Pytree or Module, with the options of :func:`dataclasses.dataclass`, hashed by identity.

    As in any dataclass, ``==`` compares fields, which is an error for arrays; with ``eq=False`` it is by identity.

    >>> import nnxlib as nnx
    >>> @nnx.dataclass
    ... class Scale(nnx.Module):
    ...   factor: nnx.Param
    ...   name: str = 'scale'
    >>> Scale(nnx.Param(2.0)).name
    'scale'
    """
    if cls is None:
        return lambda cls: dataclass(cls, **options)
    made = dataclasses.dataclass(**{"repr": False, **options})(cls)
    if made.__hash__ is None:
        made.__hash__ = Pytree.__hash__
    return made
