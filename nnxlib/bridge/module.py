"""Module and compact: Modules that make their parameters where they use them, run by ``init`` and ``apply``.

An instance is a description. ``init`` and ``apply`` run a copy of it that is *bound*: the copy has a :class:`Scope`,
which says what random streams there are and what the run may do, and holds its variables as attributes, as any Module
does. Variables may be given before the part that they belong to exists. They wait under its name, and the part takes
them over when it is attached.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

import flax.linen
import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from flax.core.scope import in_filter

from ..core import errors
from ..core import module as core
from ..core.annotations import signature_of
from ..core.data import is_node
from ..core.differences import leaf_differences, refuse
from ..core.errors import Path
from ..core.iteration import iter_graph
from ..core.making import make_variable
from ..core.missing import MISSING
from ..core.objects import Pytree, attributes_of
from ..core.objects import dataclass as nnx_dataclass
from ..core.ops import clone
from ..core.rngs import Rngs, RngStream
from ..core.traversals import flatten_mapping, sort_key, unflatten_mapping
from ..core.variables import Param, Variable
from ..transforms.functional import collection_of, leaves_of
from .to_linen import values_of
from .to_nnx import ToNNX, put
from .variables import from_collections, to_linen_var, to_nnx_var, unboxed

F = TypeVar("F", bound=Callable)


class AttrPriority(enum.IntEnum):
    """Which attribute gives a part its name, if several hold it: the first by priority, then by name.

    >>> sorted(nnx.bridge.AttrPriority)[0].name
    'HIGH'
    """

    HIGH = 0
    INIT_PARENT = 20
    DEFAULT = 50
    LOW = 100


class Scope(Pytree):
    """What the parts of one run share: its random streams, whether it initialises, and what it may change."""

    def __init__(self, rngs: Rngs, initializing: bool, mutable: Any):
        self.rngs, self.initializing, self.mutable = rngs, initializing, mutable


@dataclasses.dataclass
class ModuleStackEntry:
    """A Module that is run, or whose ``setup`` or compact method is.

    ``method`` is the compact method, ``names`` are those of the parts made so far, which ``type_counter`` counts.
    ``to_fill`` are the Params, by id, that a constructor has made there for the given variables to fill, each with the
    value that is to be replaced.
    """

    module: Module
    in_compact: bool
    in_setup: bool = False
    method: str = "setup"
    names: set[str] = dataclasses.field(default_factory=set)
    type_counter: Counter = dataclasses.field(default_factory=Counter)
    to_fill: dict[int, tuple[Param, Any]] = dataclasses.field(default_factory=dict)


_stack: ContextVar[tuple[ModuleStackEntry | None, ...]] = ContextVar("bridge_modules", default=(None,))


class ModuleContext:
    """Which Modules are running."""

    @property
    def module_stack(self) -> tuple[ModuleStackEntry | None, ...]:
        """An entry for each, the innermost last. The first is None: no Module."""
        return _stack.get()


MODULE_CONTEXT = ModuleContext()


def current_context() -> ModuleStackEntry | None:
    """Return the entry of :func:`nnxlib.bridge.current_module`, None if there is none."""
    return _stack.get()[-1]


def current_module() -> Module | None:
    """Return the Module whose ``setup`` or compact method is running, else the one that is run, else None.

    >>> nnx.bridge.current_module() is None
    True
    """
    entry = current_context()
    return None if entry is None else entry.module


@contextmanager
def _running(entry: ModuleStackEntry) -> Iterator[None]:
    token = _stack.set((*_stack.get(), entry))
    try:
        yield
    finally:
        _stack.reset(token)
    _check_filled(entry)


def _check_filled(entry: ModuleStackEntry) -> None:
    """Raise if no variable was given for a Param that is to be filled, or one of another shape."""
    if entry.to_fill:
        params = {path: x for path, x in leaves_of(entry.module, _by_priority).items() if id(x) in entry.to_fill}
        made = {path: entry.to_fill[id(x)][1] for path, x in params.items()}
        given = {path: x.get_raw_value() for path, x in params.items() if x.get_raw_value() is not made[path]}
        misfits = [x for x in leaf_differences(made, given) if x.kind != "dtype"]
        refuse(misfits, f"The variables do not fit the parts of a {type(entry.module).__name__}:", _COMPLETE)


def compact(f: F) -> F:
    """Let a method of a :class:`nnxlib.bridge.Module` make parameters and parts where it uses them.

    If it is called again, its parts have the variables of those of the first call. One that it calls counts as a part
    of it.

    >>> class Scale(nnx.bridge.Module):
    ...   @nnx.bridge.compact
    ...   def __call__(self, x):
    ...     return x * self.param('scale', nnx.initializers.ones, x.shape[-1:])
    >>> Scale().init(0, jnp.zeros((2, 3)))
    {'params': {'scale': Array([1., 1., 1.], dtype=float32)}}
    """

    @functools.wraps(f)
    def method(self: Module, *args: Any, **kwargs: Any) -> Any:
        running = [x for x in _stack.get() if x is not None and x.module is self and x.in_compact]
        with _running(running[-1] if running else ModuleStackEntry(self, in_compact=True, method=f.__qualname__)):
            return f(self, *args, **kwargs)

    return method  # type: ignore[return-value]


class Module(core.Module):
    """A Module like those of Linen: a dataclass that makes its parameters in compact methods or in ``setup``.

    >>> class Dense(nnx.bridge.Module):
    ...   features: int
    ...   @nnx.bridge.compact
    ...   def __call__(self, x):
    ...     w = self.param('w', nnx.initializers.lecun_normal(), (x.shape[-1], self.features))
    ...     return x @ w
    >>> class MLP(nnx.bridge.Module):
    ...   @nnx.bridge.compact
    ...   def __call__(self, x):
    ...     x = nnx.relu(Dense(4)(x))
    ...     return Dense(2)(x)
    >>> variables = MLP().init(0, jnp.ones((1, 3)))
    >>> jax.tree.map(jnp.shape, variables)
    {'params': {'Dense_0': {'w': (3, 4)}, 'Dense_1': {'w': (4, 2)}}}
    >>> MLP().apply(variables, jnp.ones((5, 3))).shape
    (5, 2)
    """

    scope: Any = None
    _own_init = False
    _attr_priorities = MappingProxyType({})  # by the name of the attribute
    _made_by = MappingProxyType({})  # the method that has made a part, by the name of the part

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls._own_init = cls._own_init or "__init__" in vars(cls)
        if not cls._own_init:
            nnx_dataclass(cls, eq=False)
        cls.__init__ = _attaching(cls.__init__)

    def __setattr__(self, name: str, value: Any) -> None:
        waiting = attributes_of(self).get(name)
        if self.scope is not None and isinstance(value, Variable):
            for other in [key for key, x in attributes_of(self).items() if x is value and key != name]:
                raise errors.UsageError(
                    f"The variable {other!r} is assigned to self.{name}. Give it one name: self.{other} = ..."
                )
        super().__setattr__(name, value)
        if self.scope is not None and name != "scope":
            _take_over(attributes_of(self)[name], waiting, self.scope)

    def set_attr_priority(self, name: str, value: AttrPriority | int) -> None:
        """Set the priority with which an attribute gives a part its name, if other attributes hold it, too.

        >>> class Tied(nnx.bridge.Module):
        ...   def setup(self):
        ...     self.embed = self.decode = nnx.bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Embed(2, 3, rngs=rngs))
        ...     self.set_attr_priority('embed', nnx.bridge.AttrPriority.HIGH)
        ...   def __call__(self, x):
        ...     return self.decode.attend(self.embed(x))
        >>> list(Tied().init(0, jnp.array([0]))['params'])
        ['embed']
        """
        self._attr_priorities = {**self._attr_priorities, name: int(value)}

    # --- in a run ---

    def param(self, name: str, init_fn: Callable[..., Any], *init_args: Any, unbox: bool = True, **kwargs: Any) -> Any:
        """Return the Param of this name; if there is none, ``init_fn(key, *init_args)`` makes it.

        A Param keeps the metadata that comes with its value: ``unbox`` has no effect.

        Raises:
          StateMismatchError: if the Param has another shape than ``init_fn`` gives, or the given variables lack it.
          PathError: if the Module has something else under this name.
          ValueError: if there is none, and the Module is not run.
        """
        found = attributes_of(self).get(name)
        if isinstance(found, Variable) and self.scope is not None:
            declared = jax.eval_shape(
                lambda: to_nnx_var("params", init_fn(jax.random.key(0), *init_args, **kwargs)).get_raw_value()
            )
            shapes, given = (
                [jnp.shape(x) for x in jax.tree.leaves(value)] for value in (declared, found.get_raw_value())
            )
            if shapes != given:
                raise errors.StateMismatchError(
                    f"The parameter {name!r} of a {type(self).__name__} is declared with the shape "
                    f"{', '.join(map(str, shapes))}, but the variables have {', '.join(map(str, given))}."
                )
        return self._variable("params", name, lambda: init_fn(self.make_rng("params"), *init_args, **kwargs))

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., Any] | None = None,
        *init_args: Any,
        unbox: bool = True,
        **kw: Any,
    ) -> Any:
        """Return the Variable of this name; if there is none, ``init_fn(*init_args)`` makes it for this collection.

        ``unbox`` has no effect, as in :meth:`param`.

        Raises:
          PathError: if the Module has something else under this name.
          ValueError: if there is none, and the Module is not run.
        """
        return self._variable(col, name, lambda: None if init_fn is None else init_fn(*init_args, **kw))

    def _variable(self, col: str, name: str, make: Callable[[], Any]) -> Variable:
        found = attributes_of(self).get(name)
        if isinstance(found, Variable) and collection_of(found) == col:
            return found
        if self.scope is None:
            raise errors.UsageError(_NOT_RUNNING.format(kind=type(self).__name__, what=f"make {name!r}"))
        _check_vacant(self, name)
        scope = self.scope
        if col == "params" and not scope.initializing and not in_filter(scope.mutable, col):
            raise errors.StateMismatchError(
                f"The variables lack the parameter {name!r} of a {type(self).__name__}. Pass all that `init` returned."
            )
        variable = to_nnx_var(col, make())
        setattr(self, name, variable)
        return variable

    def make_rng(self, name: str = "default") -> Any:
        """Return a key from a random stream of the run.

        Raises:
          ValueError: if the Module is not run.
        """
        if self.scope is None:
            raise errors.UsageError(_NOT_RUNNING.format(kind=type(self).__name__, what="draw a key"))
        return self.scope.rngs[name]()

    def is_initializing(self) -> bool:
        """Whether this is a run of ``init``."""
        return self.scope is not None and self.scope.initializing

    @property
    def variables(self) -> FrozenDict:
        """The variables of this Module and its parts, by collection."""
        return FrozenDict(_collections(self))

    # --- runs ---

    def init(self, rngs: Any = None, *args: Any, method: Callable[..., Any] | str = "__call__", **kwargs: Any) -> Any:
        """Return the variables that a call makes, by collection.

        Args:
          rngs: an :class:`nnxlib.Rngs`; a mapping from names to keys; a key or seed, for all names.
          *args: what the method takes.
          method: the method to call, by name or as a function of the class.
          **kwargs: what the method takes by keyword.
        """
        return self.init_with_output(rngs, *args, method=method, **kwargs)[1]

    def init_with_output(
        self,
        rngs: Any = None,
        *args: Any,
        method: Callable[..., Any] | str = "__call__",
        mutable: Any = True,
        **kw: Any,
    ) -> Any:
        """Return what the call returns, and all variables that it makes, as :meth:`init`; ``mutable`` has no effect."""
        return self._run({}, Scope(_rngs(rngs), True, True), method, args, kw)

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Any = None,
        method: Callable[..., Any] | str = "__call__",
        mutable: Any = False,
        **kwargs: Any,
    ) -> Any:
        """Call a method with these variables; return its result, and if any are ``mutable``, those after the call.

        Args:
          variables: by collection, as :meth:`init` returns them.
          *args: what the method takes.
          rngs: as in :meth:`init`.
          method: the method to call, by name or as a function of the class.
          mutable: the collections to return: True, a name, several, or a Linen filter.
          **kwargs: what the method takes by keyword.

        Raises:
          StateMismatchError: if a parameter is missing, or has another shape.
        """
        out, after = self._run(variables, Scope(_rngs(rngs), False, mutable), method, args, kwargs)
        return out if mutable is False else (out, {col: x for col, x in after.items() if in_filter(mutable, col)})

    def _run(self, variables: Mapping, scope: Scope, method: Any, args: tuple, kwargs: Mapping) -> tuple[Any, dict]:
        module = clone(self, arrays=False)
        _fill(module, {path: make_variable(*unboxed(*found)) for path, found in from_collections(variables).items()})
        _take_over(module, None, scope)
        function = getattr(type(module), method) if isinstance(method, str) else getattr(method, "__func__", method)
        with _running(ModuleStackEntry(module, in_compact=False)):
            return function(module, *args, **kwargs), _collections(module)


def nnx_in_bridge_mdl(factory: Callable[[Rngs], core.Module], name: str | None = None) -> core.Module:
    """Make a Module a part of the Module that is running.

    Args:
      factory: makes the Module from random streams.
      name: its name, in a compact method; in ``setup`` it is that of the attribute.

    >>> class Model(nnx.bridge.Module):
    ...   @nnx.bridge.compact
    ...   def __call__(self, x):
    ...     return nnx.bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 2, rngs=rngs), name='out')(x)
    >>> Model().init(0, jnp.ones((1, 3)))['params']['out']['kernel'].shape
    (3, 2)

    Raises:
      ValueError: if no ``setup`` or compact method is running.
    """
    entry = _entry("nnx_in_bridge_mdl")
    scope: Any = entry.module.scope
    spare = {} if scope.initializing else {"default": RngStream(0, tag="default")}  # for what will be overwritten
    part = factory(Rngs({**spare, **dict(scope.rngs.items())}))
    if not scope.initializing and not in_filter(scope.mutable, "params"):
        params = [x for x in leaves_of(part).values() if isinstance(x, Param)]
        entry.to_fill.update((id(x), (x, x.get_raw_value())) for x in params)
    if entry.in_compact:
        _attach(entry, part, name, type(part))
    return part


def linen_in_bridge_mdl(linen_module: flax.linen.Module, name: str | None = None) -> core.Module:
    """Make a Linen module a part of the Module that is running; ``name`` and errors as in ``nnx_in_bridge_mdl``.

    >>> from flax import linen as nn
    >>> class Model(nnx.bridge.Module):
    ...   @nnx.bridge.compact
    ...   def __call__(self, x):
    ...     return nnx.bridge.linen_in_bridge_mdl(nn.Dense(2), name='out')(x)
    >>> Model().init(0, jnp.ones((1, 3)))['params']['out']['kernel'].shape
    (3, 2)
    """
    entry = _entry("linen_in_bridge_mdl")
    scope: Any = entry.module.scope
    part = ToNNX(linen_module, rngs=scope.rngs)
    part.to_nnx__scope = scope
    if entry.in_compact:
        _attach(entry, part, name, type(linen_module))
    return part


def _entry(function: str) -> ModuleStackEntry:
    entry = current_context()
    if entry is None or not (entry.in_compact or entry.in_setup):
        raise errors.UsageError(f"{function} is called in `setup` or a compact method of a bridge.Module.")
    return entry


def _attaching(init: Callable) -> Callable:
    """A constructor that attaches the object to the Module that is running, unless with ``parent=None``.

    In a compact method every part is attached, elsewhere one that is given a name.
    """
    has_name = "name" in signature_of(init).parameters

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, name: str | None = None, parent: None = MISSING, **kwargs: Any) -> None:
        if parent is not MISSING and parent is not None:
            raise errors.UsageError(
                f"parent is None, for a part that is not to be attached, or left out; got a {type(parent).__name__}."
            )
        init(self, *args, **kwargs, **({"name": name} if has_name and name is not None else {}))
        entry = current_context()
        wanted = entry is not None and (entry.in_compact or name is not None)
        if wanted and parent is MISSING and type(self).__init__ is __init__:
            _attach(entry, self, name, type(self))

    return __init__


def _attach(entry: Any, part: Any, name: str | None, kind: type) -> None:
    if name is None:
        name = f"{kind.__name__}_{entry.type_counter[kind]}"
        entry.type_counter[kind] += 1
    module, before = entry.module, attributes_of(entry.module).get(name)
    if isinstance(before, core.Module) and name not in entry.names and module._made_by.get(name) == entry.method:
        setattr(module, name, unflatten_mapping(leaves_of(before, _by_priority)))  # they wait for this part now
    else:
        _check_vacant(module, name)
    entry.names.add(name)
    module._made_by = {**module._made_by, name: entry.method}
    module.set_attr_priority(name, AttrPriority.INIT_PARENT)
    setattr(module, name, part)


def _check_vacant(module: Module, name: str) -> None:
    """Raise if a Module has something under a name, other than variables that wait for what is to get it."""
    found = attributes_of(module).get(name)
    if found is not None and not (isinstance(found, dict) and leaves_of(found)):
        raise errors.PathError(
            f"The name {name!r} is in use in a {type(module).__name__}, for a {type(found).__name__}. Give one of the "
            "two another name; to use a part twice, make it once and call it twice."
        )


def has_setup(x: Any) -> bool:
    """Whether a Module makes its parts in a ``setup``."""
    return hasattr(x, "setup")


def _take_over(value: Any, waiting: Any, scope: Scope) -> None:
    """Bind the parts in a value that has been attached, and give them the variables that waited for them."""
    parts = [part for _, part in core.iter_modules(value)] if isinstance(value, core.Module | dict | list) else []
    if isinstance(waiting, dict) and parts:
        _fill(value, {path: v for path, v in flatten_mapping(waiting).items() if isinstance(v, Variable)})
    for part in parts:
        if isinstance(part, Module) and part.scope is None:
            part.scope = scope
            if has_setup(part):
                with _running(ModuleStackEntry(part, in_compact=False, in_setup=True)):
                    part.setup()  # type: ignore[attr-defined]


def _fill(node: Any, given: Mapping[Path, Variable]) -> None:
    """Give variables to a node: their values to those that it has, and itself the others."""
    made = leaves_of(node)
    for path, variable in given.items():
        if path in made:
            made[path].set_raw_value(variable.get_raw_value())
            made[path].set_metadata(**variable.get_metadata())
        else:
            if isinstance(node, Module) and not is_node(attributes_of(node).get(path[0])):
                _check_vacant(node, path[0])
            put(node, path, variable)


def _collections(module: Module) -> dict[str, Any]:
    return unflatten_mapping(values_of(module, to_linen_var, _by_priority))


def _by_priority(x: Any, path: Path = (), seen: set[int] | None = None) -> Iterator[tuple[Path, Any]]:
    """What :func:`iter_graph` yields, but for the nodes, with the attributes of each Module in their order."""
    seen = set() if seen is None else seen
    if not is_node(x) or isinstance(x, Variable):
        found = [(below, leaf) for below, leaf in iter_graph(x) if id(leaf) not in seen]
        seen.update(id(leaf) for _, leaf in found if is_node(leaf))
        yield from (((*path, *below), leaf) for below, leaf in found)
    elif id(x) not in seen:
        seen.add(id(x))
        priorities = x._attr_priorities if isinstance(x, Module) else {}
        order = lambda item: (priorities.get(item[0], AttrPriority.DEFAULT), sort_key(item[0]))
        for key, child in sorted(x._nnx_children(), key=order):
            yield from _by_priority(child, (*path, key), seen)


def _rngs(rngs: Any) -> Rngs:
    if isinstance(rngs, Mapping):  # by themselves, so that equal seeds give equal streams, as in Linen
        rngs = {name: RngStream(key, tag=name) for name, key in rngs.items()}
    return Rngs(rngs)


_COMPLETE = "Pass all that `init` has returned."

_NOT_RUNNING = """\
A {kind} can {what} only in its `setup` or in a method marked @compact, and only when it is run: \
`variables = model.init(rngs, x)`, `model.apply(variables, x)`."""
