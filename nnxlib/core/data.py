"""Data and static values: which attributes of an object are traced, and how a user declares it otherwise.

Arrays, Variables and nodes are *data*, and so is a pytree that holds any; everything else is *static*, a part of the
program. An annotation ``x: nnx.Data[...]``, or ``nnx.data(x)`` / ``nnx.static(x)`` at assignment or in the class,
overrides that for one attribute: its *mark*. The marks of a class are found once; those of an object are in its
``_nnx_marks``.

The questions about a value, from what is known at a glance to what takes a look into it:

    is_node            a node or a Variable, which have an identity in the graph
    is_array           what JAX can trace: an array, a tracer, a Ref, an abstract array
    is_plain           no data for certain: a number, text, a function
    is_data_leaf       data, and no pytree: a node, an array, an instance of a registered type
    is_data_part       that, or a method bound to a node
    is_data            data as an attribute: that, or a pytree with some in it, which ``has_data`` lists
    holds_nodes        a pytree with a node in it
    is_without_order   a dict that JAX cannot flatten
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, overload

import jax
import numpy as np

from . import errors
from .annotations import annotations_of
from .identity import Identified
from .missing import MISSING

A = TypeVar("A")
T = TypeVar("T", bound=type)

DECLARED = "nnxlib_data"  # in the metadata of a dataclass field: whether it was declared data
_VALUE = "nnxlib_value"

Data = Annotated[A, DECLARED, True]
Static = Annotated[A, DECLARED, False]

_DATA_TYPES: set[type] = set()


@overload
def data(value: A, /, **kwargs: Any) -> A: ...
@overload
def data(**kwargs: Any) -> Any: ...
def data(value: Any = MISSING, /, **kwargs: Any) -> Any:
    """Declare an attribute, or a field in the body of a class, to be data, whatever its value is.

    >>> import nnxlib as nnx
    >>> class Counter(nnx.Module):
    ...   def __init__(self):
    ...     self.steps = nnx.data(0)
    >>> nnx.state(Counter())
    State({'steps': 0})

    A plain list or dict of arrays, or of pytrees of arrays, stays plain, so that ``jax.tree.map`` takes it together
    with another one. ``**kwargs`` are those of :func:`dataclasses.field`.
    """
    return _field(True, value, kwargs)


@overload
def static(value: A, /, **kwargs: Any) -> A: ...
@overload
def static(**kwargs: Any) -> Any: ...
def static(value: Any = MISSING, /, **kwargs: Any) -> Any:
    """Declare an attribute, or a field in the body of a class, to be static, whatever its value is; see :func:`data`.

    >>> import nnxlib as nnx
    >>> class Table(nnx.Module):
    ...   def __init__(self):
    ...     self.sizes = nnx.static((1, 2))
    >>> Table().sizes
    (1, 2)
    """
    return _field(False, value, kwargs)


def _field(mark: bool, value: Any, kwargs: dict[str, Any]) -> Any:
    metadata = {**(kwargs.pop("metadata", None) or {}), DECLARED: mark, _VALUE: value}
    if value is not MISSING:
        kwargs.setdefault("default", value)
    return dataclasses.field(metadata=metadata, **kwargs)


def register_data_type(type_: T, /) -> T:
    """Declare that instances of a class are data wherever they occur; can be used as a decorator.

    If JAX flattens the class, its instances are pytrees like others; if not, they are leaves.

    >>> import nnxlib as nnx
    >>> @nnx.register_data_type
    ... class Handle:
    ...   pass
    >>> nnx.is_data(Handle())
    True
    """
    _DATA_TYPES.add(type_)
    return type_


def is_plain(value: Any) -> bool:
    """Whether a value holds no data, as is known at a glance: a number, text, a function, a class, a tuple of these."""
    kinds = {*map(type, value)} if type(value) is tuple else {type(value)}
    return kinds <= _PLAIN and kinds.isdisjoint(_DATA_TYPES)


def is_array(value: Any) -> bool:
    """Whether ``value`` is something JAX can trace: a JAX or NumPy array, a tracer, a Ref, or an abstract array."""
    if isinstance(value, _ARRAYS):
        return True
    return isinstance(value, np.ndarray) and value.dtype.kind not in "OSUMm"


_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, jax.Ref)


# Whether a value is a node or a Variable, which have an identity in the graph. Not wrapped in a Python function, since
# JAX calls it for each part of a pytree.
is_node: Callable[[Any], bool] = Identified.__instancecheck__


def holds_nodes(tree: Any) -> bool:
    """Whether there is a node or Variable in a pytree."""
    return any(map(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def is_data(value: Any, /) -> bool:
    """Whether an attribute with this value is data: an array, Variable, node or registered type, or a pytree with one.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.is_data(jnp.zeros(2)), nnx.is_data((nnx.Param(1), 2)), nnx.is_data([1, 2]), nnx.is_data('relu')
    (True, True, False, False)
    """
    kind = type(value)
    return kind in _DATA_TYPES or is_data_leaf(value) or (kind not in _PLAIN and any(map(is_data_part, _leaves(value))))


_PLAIN = {int, float, bool, str, bytes, type(None), type, types.FunctionType, complex}


# Types of containers in which no nodes are found, and of functions that may wrap one; nnx.jit adds its own.
_ITERATORS = map, filter, types.GeneratorType
_MADE = types.FunctionType, functools.partial
HIDING: set[type] = {set, frozenset, collections.deque, type(jax.jit(is_plain)), *_MADE, *_ITERATORS}


def warn_of_hidden(holder: Any, name: str, value: Any, marks: Mapping[Any, Any] | None) -> None:
    """Warn of nodes and Variables where nnxlib does not search for them: nothing else would tell.

    That is in a container, or in what a transform or ``functools.partial`` has made of a Module, or of its method. The
    ``marks`` of the holder say what was declared. Also of an expression such as ``(Layer() for _ in sizes)``, whatever
    it gives: a tuple is meant, and it would give its items once. (A generator function is meant as one, to give data,
    for example.)

    There is no warning for other objects that are not pytrees, such as a trainer: these may well refer to a Module.
    """
    if callable(value):
        text, hidden = _MADE_OF, _wrapped(value)
        # A step that is compiled for the Module itself is called by that one.
        found = [] if hidden is holder and type(value) not in _MADE else [hidden]
    elif isinstance(value, _ITERATORS):
        text, is_meant = _ONCE, isinstance(value, types.GeneratorType) and value.gi_code.co_name != "<genexpr>"
        found = [] if is_meant else [holder]  # that is, whatever it gives
    else:
        text, found = _HELD, list(value)
    kinds = [type(item).__name__ for item in found if is_node(item)]
    if kinds and explicit_mark(holder, name, marks) is None:
        where = {"owner": type(holder).__name__, "name": name, "kind": type(value).__name__}
        warnings.warn(text.format(found=kinds[0], **where), stacklevel=3)


def _wrapped(f: Any) -> Any:
    """What a function was made of: a Module, also if it was made of its method; or another function, or None."""
    while type(f) in HIDING:
        f = f.func if isinstance(f, functools.partial) else getattr(f, "__wrapped__", None)
    return f.__self__ if is_bound_method(f) else f


_HELD = """\
{owner}.{name} is a {kind}, in which nnxlib does not find the {found}: it is not trained, copied and saved with this \
{owner}. Use a list, a tuple or a dict; or, if that is meant, nnx.static({kind}(...))."""

_ONCE = """\
{owner}.{name} is a {kind}, which gives its items once, and nnxlib does not find what they are. Write tuple(...) or \
[...] around it; or, if that is meant, nnx.static(...)."""

_MADE_OF = """\
{owner}.{name} was made of a {found} or its method, by a transform or functools.partial, and nnxlib does not find the \
{found} in it. Copies of this {owner}, such as nnx.grad, nnx.clone and nnx.merge make, call the original there, so \
gradients are zero. Keep the {found} in an attribute, and transform it where it is called, as in \
nnx.remat(self.layer)(x) or self.layer(x, mask=mask); or, if that is meant, write nnx.static(...)."""


def is_data_part(value: Any) -> bool:
    """Whether a leaf of a pytree makes it data; a method bound to a node does, since it holds the node."""
    return is_data_leaf(value) or is_bound_method(value)


def is_bound_method(value: Any) -> bool:
    return type(value) is types.MethodType and is_node(value.__self__)


def is_data_leaf(value: Any) -> bool:
    return is_node(value) or is_array(value) or (type(value) in _DATA_TYPES and jax.tree_util.all_leaves([value]))


def _leaves(value: Any) -> list[Any]:
    """The leaves and nodes in a value, if it is a node those in it; also in dicts that JAX cannot flatten."""
    try:
        return jax.tree.leaves(value, is_leaf=lambda x: is_node(x) and x is not value)
    except (TypeError, ValueError):
        parts = jax.tree.leaves(value, is_leaf=lambda x: (is_node(x) and x is not value) or is_without_order(x))
        inner = [_leaves([*x.values()]) if is_without_order(x) else [x] for x in parts]
        return [leaf for leaves in inner for leaf in leaves]


def is_without_order(value: Any) -> bool:
    """Whether this is a dict that JAX cannot flatten, since its keys cannot be sorted."""
    if type(value) not in (dict, collections.defaultdict):  # JAX does not sort those of an OrderedDict
        return False
    try:
        sorted(value)
    except TypeError:
        return True
    return False


def has_data(value: Any, /) -> list[Any]:
    """Return the data found in ``value``: its arrays, Variables and nodes.

    >>> import nnxlib as nnx
    >>> nnx.has_data([nnx.Param(1.0), 'a', (nnx.Dict(), 2)])
    [Param(1.0), {}]
    """
    return [leaf for leaf in _leaves(value) if is_data_leaf(leaf)]


def check_pytree(pytree: Any) -> None:
    """Check that each explicitly static attribute of a Pytree holds no data.

    >>> import nnxlib as nnx
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.check_pytree(layer)
    >>> vars(layer)['kernel'] = nnx.static(layer.kernel)
    >>> nnx.check_pytree(layer)
    Traceback (most recent call last):
        ...
    nnxlib.core.errors.StaticValueError: ...

    Raises:
      StaticValueError: naming the attribute.
    """
    for name, value in pytree._nnx_children():
        if explicit_mark(pytree, name) is False and is_data(value):
            raise errors.StaticValueError(
                f"Attribute {name!r} of {type(pytree).__name__} is declared static but holds data: "
                f"{', '.join(map(errors.describe, has_data(value)))}. Remove the declaration."
            )


def explicit_mark(node: Any, name: Any, marks: Mapping[Any, Any] | None = None) -> bool | None:
    """Whether an attribute was declared data (True), static (False), or neither (None), by the marks of its node."""
    if marks is None:
        marks = node._nnx_marks
    if marks is not None and name in marks:
        return marks[name]
    return class_marks(type(node)).get(name)


def class_marks(cls: type) -> dict[str, bool]:
    """What the annotations and fields of a class declare, by attribute; computed once per class."""
    marks = cls.__dict__.get("_nnx_class_marks")
    if marks is None:
        marks = {}
        for base in reversed(cls.__mro__):
            found = {name: _annotated(annotation) for name, annotation in annotations_of(base).items()}
            attributes = {**vars(base), **vars(base).get("__dataclass_fields__", {})}
            found |= {name: mark_of(value) for name, value in attributes.items() if declares(value)}
            marks |= {name: mark for name, mark in found.items() if mark is not None}
        type.__setattr__(cls, "_nnx_class_marks", marks)
    return marks


def _annotated(annotation: Any) -> bool | None:
    text = annotation.__forward_arg__ if isinstance(annotation, typing.ForwardRef) else annotation
    if isinstance(text, str):
        match = re.match(r"(?:\w+\.)*(Data|Static)\[", text)
        return match.group(1) == "Data" if match else None
    metadata: Any = getattr(annotation, "__metadata__", ())
    if typing.get_origin(annotation) is Annotated and metadata[:1] == (DECLARED,):
        return metadata[1]
    return None


def declares(value: Any) -> bool:
    """Whether this is what ``nnx.data(...)`` or ``nnx.static(...)`` returned."""
    return type(value) is dataclasses.Field and DECLARED in value.metadata


def mark_of(value: Any) -> bool | None:
    """Whether a value was declared data (True), static (False), or not declared (None)."""
    return value.metadata[DECLARED] if declares(value) else None


def undeclared(value: Any) -> Any:
    """What ``nnx.data`` or ``nnx.static`` wrapped; any other value as it is."""
    return value.metadata[_VALUE] if declares(value) else value
