"""ToNNX: a Linen module as a Module, which holds the variables that Linen hands out.

The data: the Linen module (``to_nnx__module``, static), random streams (``to_nnx__rngs``), and beside them an attribute
for each variable or submodule of Linen, under its Linen name: ``model.Dense_0['kernel']`` is a Param.

A call gathers these into collections, runs Linen's ``apply``, and writes what came back into the same Variables.
Within :func:`lazy_init` it runs Linen's ``init`` instead, which makes them. What raises on the way has used up
keys, and written nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import flax.errors
import flax.linen
import jax

from ..core import errors
from ..core.containers import Dict
from ..core.errors import Path
from ..core.module import Module, iter_modules
from ..core.objects import attributes_of, check_writable, set_child
from ..core.rngs import Rngs
from ..core.static import same_items
from ..core.traversals import unflatten_mapping
from ..core.variables import Variable
from .variables import from_collections, linen_vars_to_nnx_attrs, nearest_collection, to_linen_var, to_nnx_var, unboxed

_OWN = ("to_nnx__module", "to_nnx__rngs", "to_nnx__initializing", "to_nnx__scope")


class _Linen:
    """A Linen module as a static value: compared as Linen compares it, and never copied, for it is never edited."""

    __slots__ = ("module",)

    def __init__(self, module: flax.linen.Module):
        self.module = module

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Linen) or self.module is other.module:
            return isinstance(other, _Linen)
        try:
            return bool(self.module == other.module)
        except ValueError:  # arrays among its fields
            return False

    def __hash__(self) -> int:
        return hash(type(self.module))  # its fields may be lists and dicts, which have no hash

    def __deepcopy__(self, memo: dict) -> _Linen:
        return self

    def __reduce__(self) -> tuple:
        return _Linen, (self.module,)

    def __repr__(self) -> str:
        return " ".join(repr(self.module).replace("# attributes", "").split())


class ToNNX(Module):
    """A Linen module as a Module; ``lazy_init`` makes its variables.

    Args:
      module: the Linen module.
      rngs: the random streams that Linen draws from, of which each ToNNX forks its own; or a key, for ``params``.

    >>> from flax import linen as nn
    >>> model = nnx.bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 3)))
    >>> model.kernel.shape, model(jnp.ones((2, 3))).shape
    ((3, 4), (2, 4))

    Collections become types: ``params`` is :class:`nnxlib.Param`, ``batch_stats`` :class:`nnxlib.BatchStat`, a name
    that is not registered a new type. A call changes those that it declares ``mutable``, as Linen's ``apply`` does:

    >>> norm = nnx.bridge.ToNNX(nn.BatchNorm(use_running_average=False), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((2, 3)))
    >>> _ = norm(jnp.ones((2, 3)), mutable=['batch_stats'])
    >>> type(norm.mean).__name__, [round(mean, 3) for mean in norm.mean.tolist()]
    ('BatchStat', [0.01, 0.01, 0.01])

    Other methods are called by name: ``model.encode(x)`` is ``model(x, method='encode')``.

    Raises:
      TypeError: if ``module`` is not a Linen module.
    """

    def __init__(self, module: flax.linen.Module, rngs: Rngs | jax.Array | None = None):
        if not isinstance(module, flax.linen.Module):
            shown = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
            raise errors.ArgumentError(
                f"ToNNX takes a Linen module, such as ToNNX(nn.Dense(4), rngs=rngs), but got {shown}."
            )
        self.to_nnx__module = _Linen(module)
        self.to_nnx__rngs = rngs.fork() if isinstance(rngs, Rngs) else _streams(rngs)

    def lazy_init(self, *args: Any, **kwargs: Any) -> ToNNX:
        """Make the variables by a call with these arguments; see :func:`lazy_init`."""
        return lazy_init(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Not properties: a variable of Linen may have these names.
        own = attributes_of(self)
        if "to_nnx__module" in own:
            if name in ("module", "rngs"):
                return own["to_nnx__module"].module if name == "module" else own["to_nnx__rngs"]
            method = _method(own["to_nnx__module"].module, name)
            if method is not None:
                return functools.partial(types.MethodType(type(self).__call__, self), method=method)
        raise AttributeError(
            f"ToNNX of a {_name_of(self)} has no attribute {name!r}. Linen's variables become attributes once "
            "lazy_init has made them."
        )

    def __call__(
        self,
        *args: Any,
        rngs: Rngs | jax.Array | None = None,
        method: Callable[..., Any] | str | None = None,
        mutable: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call the Linen module.

        Args:
          *args: what Linen's method takes.
          rngs: random streams, or a key for ``params``, for this call; else one key is drawn from each stream of ours.
          method: another method than ``__call__``, by name or as a function of the Linen class.
          mutable: the collections that the call may change: True, a name, several, or a Linen filter; none by default.
          **kwargs: what Linen's method takes by keyword.

        Raises:
          StateMismatchError: if variables are missing that :func:`lazy_init` makes.
          PathError: if Linen has one path in two collections.
          TraceContextError: if the call is to change Variables from inside a trace that they were not passed to.
        """
        module = attributes_of(self)["to_nnx__module"].module
        keys, refused = {}, None
        try:
            keys = _keys(attributes_of(self)["to_nnx__rngs"] if rngs is None else rngs)
        except errors.TraceContextError as error:  # a call that draws nothing may go on: it only reads
            refused = error
        scope = attributes_of(self).get("to_nnx__scope")  # of a part of a bridge.Module
        first = scope is not None and scope.initializing and not any(variables_of(self))
        try:
            if first or "to_nnx__initializing" in attributes_of(self):
                out, made = module.init_with_output(keys, *args, method=method, **kwargs)
                self._replace(made)
                return out
            if mutable is None:
                mutable = False if scope is None else scope.mutable
            old = dict(variables_of(self))
            collections = unflatten_mapping(
                {(nearest_collection(type(v)), *path): to_linen_var(v) for path, v in old.items()}
            )
            result = module.apply(collections, *args, rngs=keys, method=method, mutable=mutable, **kwargs)
        except (flax.errors.ScopeCollectionNotFound, flax.errors.ScopeParamNotFoundError) as error:
            error.add_note(_MISSING.format(linen=_name_of(self)))
            raise
        except flax.errors.ModifyScopeVariableError as error:
            error.add_note("Name the collection in the call, as of Linen's apply: model(x, mutable=['batch_stats']).")
            raise
        except flax.errors.InvalidRngError as error:
            if refused is not None:
                raise refused from None
            error.add_note(f"The ToNNX has {', '.join(keys) or 'no'} keys: ToNNX(module, rngs=nnx.Rngs(0, dropout=1)).")
            raise
        if mutable is False:
            return result
        out, updates = result
        self._write(old, updates)
        return out

    def _replace(self, collections: Mapping[str, Any]) -> None:
        """Take the variables of these collections as attributes."""
        attributes = linen_vars_to_nnx_attrs(collections)
        for name in attributes.keys() & {*_OWN}:
            raise errors.PathError(f"The Linen module has a variable {name!r}, a name that ToNNX needs. Rename it.")
        for name, value in attributes.items():
            setattr(self, name, value)

    def _write(self, old: Mapping[Path, Variable], collections: Mapping[str, Any]) -> None:
        """Write these collections into the Variables there are; make those that there are not."""
        found = from_collections(collections)
        kept = {path: v for path, v in old.items() if path in found and nearest_collection(type(v)) == found[path][0]}
        made = {path: to_nnx_var(col, x) for path, (col, x) in found.items() if path not in kept}
        for variable in kept.values():
            variable.check_writable()
        if made:
            check_writable(self, f"attach {errors.format_path(next(iter(made)))}")
        for path, variable in kept.items():
            overwrite(variable, *found[path])
        for path, variable in made.items():
            put(self, path, variable)


def lazy_init(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a Module, or a method of one, so that each ``ToNNX`` that the call reaches makes its variables.

    >>> from flax import linen as nn
    >>> class Model(nnx.Module):
    ...   def __init__(self, rngs):
    ...     self.inner = nnx.bridge.ToNNX(nn.Dense(4), rngs=rngs)
    ...   def __call__(self, x):
    ...     return nnx.relu(self.inner(x))
    >>> model = nnx.bridge.lazy_init(Model(nnx.Rngs(0)), jnp.ones((1, 3)))
    >>> model.inner.kernel.shape
    (3, 4)

    Returns:
      ``fn``.

    Raises:
      ValueError: if ``fn`` is neither a Module nor a method of one.
    """
    root = fn.func if isinstance(fn, functools.partial) else fn
    root = getattr(root, "__self__", root)
    if not isinstance(root, Module):
        raise errors.UsageError(
            "lazy_init takes a Module or a method of one, whose ToNNX parts it can find: lazy_init(model, x) or "
            f"lazy_init(model.encode, x). It got {fn!r}."
        )
    with initializing(all_in(root).values()):
        fn(*args, **kwargs)
    return fn


def all_in(root: Any) -> dict[Path, ToNNX]:
    """Each ToNNX of a graph, by its path."""
    return {path: module for path, module in iter_modules(root) if isinstance(module, ToNNX)}


@contextmanager
def initializing(modules: Collection[ToNNX]) -> Iterator[None]:
    """Within the block, these make their variables when they are called."""
    try:
        for module in modules:
            module.to_nnx__initializing = True  # part of the structure, so that what is compiled tells it apart
        yield
    finally:
        for module in modules:
            if "to_nnx__initializing" in attributes_of(module):
                del module.to_nnx__initializing


_MISSING = """\
The Linen module {linen} lacks variables that this call needs. They are made by a call with an example of the inputs:

    model = nnx.bridge.lazy_init(model, x)    # or ToNNX(module, rngs=rngs).lazy_init(x)"""


def overwrite(variable: Variable, col: str, x: Any) -> None:
    """Give a Variable the value, and what there is of metadata, that Linen has for it in a collection."""
    _, value, metadata = unboxed(col, x)
    metadata = {**variable.get_metadata(), **metadata}
    if value is not variable.get_raw_value():
        variable.set_raw_value(value)
    if not same_items(metadata, variable.get_metadata()):
        variable.set_metadata(metadata)


def put(node: Any, path: Path, value: Any) -> None:
    """Attach a value below a node, in Dicts where there is nothing yet."""
    key, *below = path
    found = node._nnx_contents().get(key)
    if below and isinstance(found, Module | dict | list):
        put(found, tuple(below), value)
    else:
        set_child(node, key, unflatten_mapping({tuple(below): value}) if below else value)


def variables_of(node: Any, path: Path = ()) -> Iterator[tuple[Path, Variable]]:
    """The Variables of Linen in a ToNNX, with their paths, a shared one with each."""
    for key, x in node._nnx_children():
        if isinstance(x, Variable):
            yield (*path, key), x
        elif isinstance(x, Dict):
            yield from variables_of(x, (*path, key))


def _streams(rngs: Any) -> Rngs | None:
    if rngs is None or isinstance(rngs, Rngs):
        return rngs
    return Rngs(rngs) if isinstance(rngs, Mapping) else Rngs(params=rngs)


def _keys(rngs: Any) -> dict[str, jax.Array]:
    """A key from each stream; ``params``, to which Linen falls back, is what ``default`` is here. A key is itself."""
    if isinstance(rngs, jax.Array):
        return {"params": rngs}
    streams = _streams(rngs)
    keys = {} if streams is None else {name: stream() for name, stream in streams.items()}
    if "default" in keys and "params" not in keys:
        keys["params"] = keys.pop("default")
    return keys


def _method(module: flax.linen.Module, name: str) -> Callable[..., Any] | None:
    """The method of a Linen class that has this name; its fields are none, whatever they hold."""
    found = getattr(type(module), name, None)
    is_field = name in {field.name for field in dataclasses.fields(module)}
    return found if callable(found) and not is_field and not name.startswith("__") else None


def _name_of(model: ToNNX) -> str:
    return type(attributes_of(model)["to_nnx__module"].module).__name__ if attributes_of(model) else "Linen module"
