"""Transforms of classes: a Module class some of whose methods run under a transform.

``nnx.remat(Block)`` and ``nnx.vmap(Block, methods=["encode", "decode"], in_axes=(0, None))`` are subclasses of
``Block`` in which each named ``method`` is replaced by ``transform(method, **options)``, and nothing else. The
transform sees a method as the function that it is, with ``self`` for argument 0. That is all there is to know about
what is mapped, carried, differentiated or made static: the first entry of ``in_axes`` is for the Module,
``nnx.StateAxes`` there says it by kind of Variable, and ``argnums=0`` is the gradient with respect to the Module.

``__init__`` is a method like any other. Unless it is named, it runs as usual. If it is, ``self`` holds nothing yet, and
what it makes gets the axis of ``self``. So a class whose instances hold stacked parameters is one that names both::

    Ensemble = nnx.vmap(Block, methods={"__init__": {"in_axes": 0}, "__call__": {"in_axes": (0, None)}})
    ensemble = Ensemble(64, rngs=nnx.Rngs(0).split(5))       # the numbers, strings, ... among the arguments are static

Without ``methods`` a class is what it is to JAX, a function that makes an instance: ``nnx.vmap(Block)(keys)``,
``nnx.jit(Block)(rngs)``. Only transforms that would be of no use there (``remat``, ``map_variables``, ``named_call``)
lift ``__call__`` by default.

A lifted class is made once per class, methods and options, and is pickled by these. So instances are picklable if those
of the class are, and equal calls give the same class, and with it the same compiled functions.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, cast

import jax.tree_util as jtu

from ..core.annotations import signature_of, stand_for
from ..core.data import is_data
from ..core.errors import ArgumentError, StaticValueError
from ..core.missing import MISSING, is_missing
from ..core.objects import Pytree, new_node
from ..core.static import Const, StaticArgument
from ..core.tracing import boundary
from .callables import or_closed_over
from .signatures import Methods, O, Transform


def lifts_classes(*default: str) -> Callable[[Callable[Concatenate[Any, O], Any]], Transform[O]]:
    """Let a transform of functions be a decorator with options, and take classes.

    Without a function it returns a decorator. For classes it has a further keyword argument ``methods``.
    ``methods`` is the name of a method or several, or a mapping from names to options of the transform that are only
    for this method. ``default`` are the methods where it is not given; if there are none, a class is a function.
    """
    return functools.partial(_lifting_classes, default)


def _lifting_classes(default: tuple[str, ...], transform: Callable[Concatenate[Any, O], Any]) -> Transform[O]:
    parameters = signature_of(transform).parameters
    name, plain = next(iter(parameters)), cast(Callable[..., Any], transform)
    by_position = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())

    @boundary
    @functools.wraps(transform)
    def wrapper(*args: Any, methods: Methods | None = None, **options: Any) -> Any:
        if len(args) > by_position or any(map(is_data, args[1:])):
            options_of = [p.name for p in parameters.values() if p.name not in (name, "options") and p.name[0] != "_"]
            call = f"nnx.{transform.__name__}({name})"
            raise ArgumentError(_CALLED.format(made=call, options=", ".join(options_of)))
        f = args[0] if args else options.pop(name, MISSING)
        given = {**dict(zip(list(parameters)[1:], args[1:], strict=False)), **options}
        if is_missing(f):  # to be used as a decorator
            return functools.partial(wrapper, methods=methods, **given)
        target: Any = f
        while isinstance(target, functools.partial):
            target = target.func
        is_class = isinstance(target, type) and issubclass(target, Pytree)
        if methods is not None and not is_class:
            raise ArgumentError(f"methods={methods!r} is for a class of Modules, but got {f!r}.")
        chosen = default if methods is None else methods
        if not (is_class and chosen):
            made: Any = or_closed_over(lambda f: plain(f, *args[1:], **options), f)
            if not isinstance(made, types.FunctionType):
                return made
            made = boundary(made)
            stand_for(made, f)
            return made
        return _rebound(f, lifted_class(wrapper, target, _options_by_method(chosen, given)))

    wrapper._nnx_transform = transform  # type: ignore[attr-defined]
    methods_parameter = inspect.Parameter("methods", inspect.Parameter.KEYWORD_ONLY, default=None)
    wrapper.__signature__ = _with_parameter(transform, methods_parameter)  # type: ignore[attr-defined]
    wrapper.__doc__ = _with_methods(transform.__doc__)
    return cast(Transform[O], wrapper)


_CALLED = """\
{made} returns a function, which takes the arguments: write {made}(*args). Its options, by name: {options}."""


def _with_methods(doc: str | None) -> str | None:
    """A docstring with ``methods`` as the last of the arguments."""
    head, args, rest = inspect.cleandoc(doc or "").partition("\nArgs:\n")
    described, gap, tail = rest.partition("\n\n")
    return f"{head}{args}{described}\n{_METHODS}{gap}{tail}" if args else doc


_METHODS = """\
  methods: for a Module class in place of a function: which of its methods the transform is for, a name or several, or a
    mapping from names to options of this transform. What comes out is a subclass."""


def _with_parameter(f: Callable, parameter: inspect.Parameter) -> inspect.Signature:
    signature = signature_of(f)
    own = list(signature.parameters.values())
    place = len(own) - (bool(own) and own[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*own[:place], parameter, *own[place:]])


def _options_by_method(methods: Any, given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if isinstance(methods, Mapping):
        return {name: {**given, **own} for name, own in methods.items()}
    return {name: dict(given) for name in ((methods,) if isinstance(methods, str) else methods)}


def _rebound(f: Any, cls: type) -> Any:
    """``cls``, with what the partials around a class have bound."""
    if not isinstance(f, functools.partial):
        return cls
    return functools.partial(_rebound(f.func, cls), *f.args, **f.keywords)


def lifted_class(transform: Any, cls: type, options: dict[str, dict[str, Any]]) -> type:
    """The subclass of ``cls`` with methods under a transform, by name, each with its options.

    Raises:
      ArgumentError: if a name is not that of a method.
    """
    try:
        key = transform, Const.of(options)
    except StaticValueError:  # options that cannot be compared: another class at each call
        return _make_class(transform, cls, options)
    made = cls.__dict__.get("_nnx_lifted")
    if made is None:
        made = {}
        type.__setattr__(cls, "_nnx_lifted", made)
    if key not in made:
        made[key] = _make_class(transform, cls, options)
    return made[key]


def _make_class(transform: Any, cls: type, options: dict[str, dict[str, Any]]) -> type:
    body: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    for name, own in options.items():
        lifted = transform._nnx_transform(_method(cls, name), **own)
        body[name] = _constructor(lifted) if name == "__init__" else lifted
    prefix = "".join(part.capitalize() for part in transform.__name__.split("_"))
    body["__qualname__"] = prefix + cls.__name__
    body["_nnx_recipe"] = transform, cls, options
    keywords = {"metaclass": _metaclass(type(cls)), "pytree": not jtu.all_leaves([new_node(cls)])}
    return types.new_class(prefix + cls.__name__, (cls,), keywords, lambda namespace: namespace.update(body))


def _method(cls: type, name: str) -> Callable:
    found = inspect.getattr_static(cls, name, None)
    if not callable(found) or isinstance(found, type | staticmethod | classmethod):
        raise ArgumentError(f"{cls.__name__} has no method {name!r} that could be lifted.")
    return found


def _constructor(lifted: Callable) -> Callable:
    """``__init__`` under a transform: those of its arguments that are no data are part of the program."""

    @functools.wraps(lifted)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        named = {name: x if is_data(x) else StaticArgument(x) for name, x in kwargs.items()}
        lifted(self, *(x if is_data(x) else StaticArgument(x) for x in args), **named)

    return __init__


# --- pickling: by how the class was made ------------------------------------------------------------------------------


@functools.cache
def _metaclass(base: type) -> type:
    """A metaclass of lifted classes: pickle looks it up in the copyreg table before it looks for a class by name."""
    made = type(base.__name__, (base,), {})
    copyreg.pickle(made, _reduced)  # type: ignore[arg-type]
    return made


def _reduced(cls: Any) -> tuple[Callable, tuple]:
    recipe = cls.__dict__.get("_nnx_recipe")
    if recipe is None:  # a class of the user derived from a lifted one
        return _named, (cls.__module__, cls.__qualname__)
    base = recipe[1]
    if _named(base.__module__, base.__qualname__) is cls:  # a decorated class: the name is that of the lifted one
        return _named, (base.__module__, base.__qualname__)
    return lifted_class, recipe


def _named(module: str, qualname: str) -> Any:
    try:
        return operator.attrgetter(qualname)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
