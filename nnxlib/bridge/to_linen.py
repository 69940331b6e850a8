"""ToLinen: a Module as a Linen module, which hands its Variables to Linen.

A Linen module is a description: each call of ``init`` or ``apply`` makes the Module anew, with keys that Linen draws
for this place in the model. ``init`` hands out the Variables as the constructor made them. ``apply`` puts the given
variables in their place, calls, and hands out those of the collections that are ``mutable``. Random streams are never
stored: they begin with the keys of the call.

Under ``jax.jit`` what the constructor computes, and the given variables replace, is not executed.
"""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen
from flax.core import FrozenDict, meta

from ..core import errors
from ..core.data import holds_nodes
from ..core.errors import Path
from ..core.iteration import iter_graph, iter_objects
from ..core.making import make_variable
from ..core.objects import Node
from ..core.ops import clone, update
from ..core.rngs import Rngs, RngStream
from ..core.traversals import unflatten_mapping
from ..core.variables import Param, RngKey, Variable, plain_value
from ..transforms.functional import ARRAYS, Iterate, as_made, collection_of, leaves_of
from .to_nnx import all_in, initializing, overwrite, put, variables_of
from .variables import from_collections, to_linen_var, unboxed


class ToLinen(flax.linen.Module):
    """A Module as a Linen module, at the top or within others, and under Linen's transforms.

    Args:
      nnx_class: the class, or a function that returns a Module; it is called with ``args``, ``kwargs`` and ``rngs``.
      args, kwargs: the arguments of the constructor.
      skip_rng: whether the constructor takes no ``rngs``.
      metadata_fn: turns a Variable into what Linen keeps of it; None keeps the bare value.

    >>> model = nnx.bridge.ToLinen(nnx.Linear, args=(3, 4))
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> jax.tree.map(jnp.shape, variables)
    {'params': {'bias': (4,), 'kernel': (3, 4)}}
    >>> model.apply(variables, jnp.ones((2, 3))).shape
    (2, 4)

    Random streams are those of ``rngs``. At ``init``, another one gets keys derived from those for ``params``, as in
    Linen; at ``apply``, it draws the same keys each time, with a warning.

    Raises:
      StateMismatchError: if the variables lack a Param of the Module, or have one of another shape.
    """

    nnx_class: Callable[..., Any]
    args: Sequence = ()
    kwargs: Mapping[str, Any] = FrozenDict({})
    skip_rng: bool = False
    metadata_fn: Callable[[Variable], Any] | None = to_linen_var

    def __post_init__(self) -> None:
        self.args, self.kwargs = tuple(self.args), FrozenDict(self.kwargs)  # which have a hash, as Linen modules do
        super().__post_init__()

    @flax.linen.compact
    def __call__(self, *args: Any, nnx_method: Callable[..., Any] | str | None = None, **kwargs: Any) -> Any:
        """Call the Module, or its method ``nnx_method``: a name, or a function of the Module and the arguments."""
        module = self._made()
        self._load(module)
        method = nnx_method if callable(nnx_method) else getattr(type(module), nnx_method or "__call__")
        method = getattr(method, "__func__", method)
        if not self.is_initializing():
            _warn_of_draws(module)
            out = method(module, *args, **kwargs)
            self._hand_out(values_of(module, self.metadata_fn))
            return out
        lazy = {path: inner for path, inner in all_in(module).items() if not any(variables_of(inner))}
        values = values_of(module, self.metadata_fn)
        with initializing(lazy.values()):
            out = method(module, *args, **kwargs)
        made = values_of(module, self.metadata_fn)
        values |= {key: x for key, x in made.items() if any(key[1 : len(path) + 1] == path for path in lazy)}
        self._hand_out(values)
        return out

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            method = None if name.startswith("_") else getattr(self.__dict__.get("nnx_class"), name, None)
            if not callable(method):
                raise

        # A method, so that Linen's `apply(variables, x, method='encode')` finds the function below it.
        def call(self: ToLinen, *args: Any, **kwargs: Any) -> Any:
            return self(*args, nnx_method=method, **kwargs)

        return types.MethodType(call, self)

    def _made(self) -> Any:
        """The Module as its constructor makes it."""
        if isinstance(self.nnx_class, Node):
            raise errors.ArgumentError(_INSTANCE.format(name=type(self.nnx_class).__name__))
        arguments: Any = (self.args, _thawed(self.kwargs))
        if holds_nodes(arguments):
            arguments = clone(arguments, arrays=False)  # Modules that the user holds keep their values
        rngs = {} if self.skip_rng else {"rngs": self._rngs()}
        return self.nnx_class(*arguments[0], **{**arguments[1], **rngs})

    def _rngs(self) -> Rngs:
        """A stream for each that Linen has, and one that answers for all others."""
        keys = {} if self.scope is None else linen_rngs_dict(self)
        streams = {name: RngStream(key, tag=name) for name, key in keys.items()}
        if "default" not in streams and not self.is_initializing():
            # The constructor is to run, and what it draws is replaced; what the call draws is found by the tag.
            rngs = Rngs({**streams, "default": RngStream(0, tag="default")})
            rngs.default.tag = _NOT_GIVEN
            return rngs
        if "default" not in streams and "params" in streams:
            streams["default"] = streams["params"].fold_in("default")
        return Rngs(streams)

    def _load(self, module: Any) -> None:
        """Put the variables that Linen holds for this place into the Module."""
        made = leaves_of(module)
        found = {as_made(path, made): item for path, item in from_collections(self.variables).items()}
        problems = [*self._missing(made, found), *_misfits(made, found)]
        if problems:
            place = "/" + "/".join(self.path)
            raise errors.StateMismatchError(errors.listed(_DO_NOT_FIT.format(place=place), problems, _COMPLETE))
        arrays = {path: x for path, (col, x) in found.items() if col == ARRAYS and path in made}
        update(module, unflatten_mapping(arrays))
        for path, (col, x) in found.items():
            if path not in made:
                put(module, path, make_variable(*unboxed(col, x)))
            elif path not in arrays:
                overwrite(made[path], col, x)

    def _missing(self, made: Mapping[Path, Any], found: Mapping[Path, Any]) -> Iterator[str]:
        """What Linen lacks: of the Params anything, of other collections what is missing in them."""
        given = self.variables
        for path, x in made.items():
            col = collection_of(x)
            needed = isinstance(x, Param) or given.get(col)
            if path not in found and needed and not self.is_mutable_collection(col):
                yield f"{col}: {errors.format_path(path)} is missing, {errors.describe(plain_value(x))}"

    def _hand_out(self, values: Mapping[Path, Any]) -> None:
        """Give values to Linen, where it lets them change."""
        for col, tree in unflatten_mapping(values).items():
            for name, value in tree.items() if self.is_mutable_collection(col) else ():
                self.put_variable(col, name, value)


_INSTANCE = """\
ToLinen makes the Module itself, each time with other keys, but it got an instance of {name}. Give it the class and \
its arguments: to_linen({name}, ...)."""

_DO_NOT_FIT = "The variables at {place} do not fit the Module:"
_COMPLETE = "Pass all that `init` has returned, `model.apply(variables, ...)`, or make their collection mutable."


def current_linen_module() -> flax.linen.Module | None:
    """Return the Linen module whose method is running, None if there is none.

    >>> nnx.bridge.wrappers.current_linen_module() is None
    True
    """
    return flax.linen.module._context.module_stack[-1]


def linen_rngs_dict(linen_module: flax.linen.Module, add_default: bool = False) -> dict[str, Any]:
    """Draw a key from each random stream that a running Linen module has.

    Args:
      linen_module: the module, such as :func:`current_linen_module`.
      add_default: whether to add the seed 0 under ``default``, for :class:`nnxlib.Rngs`.

    >>> from flax import linen as nn
    >>> class Names(nn.Module):
    ...   def __call__(self):
    ...     return sorted(nnx.bridge.wrappers.linen_rngs_dict(self, add_default=True))
    >>> Names().apply({}, rngs={'dropout': jax.random.key(0)})
    ['default', 'dropout']

    Raises:
      ValueError: if the module is not running.
    """
    if linen_module.scope is None:
        raise errors.UsageError(
            f"linen_rngs_dict draws from the streams of a run, but this {type(linen_module).__name__} is not running. "
            "Call it in a method of the module."
        )
    keys = {name: linen_module.make_rng(name) for name in linen_module.scope.rngs}
    return {"default": 0, **keys} if add_default else keys


def _thawed(tree: Any) -> Any:
    """A FrozenDict as a dict, at each level: as it was given."""
    return {key: _thawed(x) for key, x in tree.items()} if isinstance(tree, FrozenDict) else tree


def to_linen(
    nnx_class: Callable[..., Any],
    *args: Any,
    metadata_fn: Callable[[Variable], Any] | None = to_linen_var,
    name: str | None = None,
    skip_rng: bool = False,
    abstract_init: bool = True,
    **kwargs: Any,
) -> ToLinen:
    """Return the Module that ``nnx_class(*args, **kwargs, rngs=rngs)`` makes as a Linen module, a ``ToLinen``.

    ``name`` is its name within another Linen module. ``abstract_init`` has no effect: under ``jax.jit``, what is
    computed and then replaced costs nothing.

    >>> from flax import linen as nn
    >>> class Model(nn.Module):
    ...   @nn.compact
    ...   def __call__(self, x):
    ...     return nn.Dense(2)(nnx.bridge.to_linen(nnx.Linear, 3, 4, name='inner')(x))
    >>> variables = Model().init(jax.random.key(0), jnp.ones((1, 3)))
    >>> variables['params']['inner']['kernel'].shape
    (3, 4)
    """
    return ToLinen(nnx_class, args, FrozenDict(kwargs), skip_rng=skip_rng, metadata_fn=metadata_fn, name=name)


def to_linen_class(
    base_nnx_class: type,
    base_metadata_fn: Callable[[Variable], Any] | None = to_linen_var,
    base_skip_rng: bool = False,
    **partial_kwargs: Any,
) -> type[ToLinen]:
    """Return a class of Linen modules that takes the arguments of a Module class; some may be given here.

    So do its subclasses, and what ``nn.remat``, ``nn.scan`` and ``nn.vmap`` make of it.

    >>> Dense = nnx.bridge.to_linen_class(nnx.Linear, use_bias=False)
    >>> Dense(3, out_features=4, name='inner').init(jax.random.key(0), jnp.ones((1, 3)))['params']['kernel'].shape
    (3, 4)
    """
    defaults = {"nnx_class": base_nnx_class, "skip_rng": base_skip_rng, "metadata_fn": base_metadata_fn}

    class ToLinenPartial(ToLinen):
        def __init_subclass__(cls, **options: Any):
            super().__init_subclass__(**options)
            take_arguments(cls)

    def take_arguments(cls: type[ToLinen]) -> None:
        """Replace the constructor that Linen, which makes a dataclass of each class, has just made for this one."""
        init, fields = cls.__init__, {field.name for field in dataclasses.fields(cls)}

        def __init__(self: Any, *args: Any, **given: Any) -> None:
            settings = {**defaults, "args": args, **{name: given.pop(name) for name in fields & given.keys()}}
            settings["kwargs"] = FrozenDict({**partial_kwargs, **settings.get("kwargs", {}), **given})
            init(self, **settings)

        cls.__init__ = __init__  # type: ignore[method-assign]

    take_arguments(ToLinenPartial)
    ToLinenPartial.__qualname__ = "ToLinenPartial"
    return ToLinenPartial


_NOT_GIVEN = "default (no key was given)"


def _warn_of_draws(module: Any) -> None:
    """Let the streams of a Module that no key was given for say so when they are drawn from."""

    def warn(key: RngKey, value: Any) -> Any:
        warnings.warn(_SAME_KEYS, stacklevel=2)
        return value

    for _, stream in list(iter_objects(module)):
        if isinstance(stream, RngStream) and stream.tag == _NOT_GIVEN:
            stream.key = RngKey(stream.key.get_raw_value(), on_get_value=warn)


_SAME_KEYS = """\
A Module within a Linen model draws from a random stream that `apply` was given no key for: the same keys at each \
call. Pass one, model.apply(variables, x, rngs={'dropout': key}), or make the Module deterministic."""


def values_of(
    module: Any, metadata_fn: Callable[[Variable], Any] | None, iterate: Iterate = iter_graph
) -> dict[Path, Any]:
    """What Linen is to keep of a Module, by collection and path."""
    boxed = metadata_fn or Variable.get_raw_value
    leaves = leaves_of(module, iterate)
    return {(collection_of(x), *path): boxed(x) if isinstance(x, Variable) else x for path, x in leaves.items()}


def _misfits(made: Mapping[Path, Any], found: Mapping[Path, tuple[str, Any]]) -> Iterator[str]:
    for path, (col, x) in found.items():
        if path not in made:
            continue
        own, old, new = collection_of(made[path]), plain_value(made[path]), meta.unbox(x)
        if own != col:
            yield f"{col}: {errors.format_path(path)} is in the Module of the collection {own}"
        elif isinstance(made[path], Param) and getattr(old, "shape", ()) != getattr(new, "shape", ()):
            yield f"{col}: {errors.format_path(path)}: expected {errors.describe(old)}, got {errors.describe(new)}"
