"""Signatures and annotations, also where an annotation names what is not there.

From Python 3.14 on, an annotation is evaluated only when it is asked for, so it may name a class that is defined
further below, or that is imported for type checkers only. Such a name is a NameError by default; here it is a
ForwardRef.

``NamedTuple`` is that of ``typing``, but leaves annotations as they are written. ``typing`` compiles each of them,
which for the forty such classes of nnxlib takes a twentieth of the time to import it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import namedtuple
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

signature_of: Callable[[Any], inspect.Signature] = inspect.signature
annotations_of: Callable[[Any], dict[str, Any]] = inspect.get_annotations
signature_as_text = signature_of  # with annotations as they are written; earlier, with those that are strings

if sys.version_info >= (3, 14):
    from annotationlib import Format

    signature_of = functools.partial(inspect.signature, annotation_format=Format.FORWARDREF)
    annotations_of = functools.partial(inspect.get_annotations, format=Format.FORWARDREF)
    signature_as_text = functools.partial(inspect.signature, annotation_format=Format.STRING)


def parameters_of(f: Callable) -> list[inspect.Parameter]:
    """The parameters of a function; none if it has no signature, like some built-in functions."""
    try:
        return list(signature_of(f).parameters.values())
    except (TypeError, ValueError):
        return []


def stand_for(wrapper: Any, f: Callable) -> None:
    """Give an object that is called in place of a function its name, docstring, annotations and public attributes.

    It does not get the attributes of a callable Module.
    """
    functools.update_wrapper(wrapper, f, updated=())
    if isinstance(f, FunctionType):
        public = {name: x for name, x in vars(f).items() if name[0] != "_" and not hasattr(type(wrapper), name)}
        vars(wrapper).update(public)
    if sys.version_info >= (3, 14):  # only `__annotate__` is copied, and an object would show those of its class
        wrapper.__annotations__ = annotations_of(f)


if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:

    class _TupleMaker(type):
        """Makes each class but the first, :class:`NamedTuple`, a tuple with named fields."""

        def __new__(cls, name: str, bases: tuple, body: dict[str, Any]):
            if not bases:
                return super().__new__(cls, name, bases, body)
            fields = body["__annotations__"]
            defaults = [body.pop(field) for field in fields if field in body]
            made = namedtuple(name, fields, defaults=defaults, module=body["__module__"])
            for key, value in body.items():
                setattr(made, key, value)
            return made

    class NamedTuple(metaclass=_TupleMaker):
        """The base of a class whose annotated attributes are the fields of a tuple."""
