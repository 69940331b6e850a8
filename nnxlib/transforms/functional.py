"""``functional``: a Module class as pure functions, ``init`` and ``apply``, with its variables outside.

Variables are a dict, as Linen has them: ``{'params': {'out': {'kernel': array}}}``. The name of a collection is that of
a type of Variables, by the registry of names; the path of an array in it is that of the Variable in the Module. Arrays
that are attributes themselves are the collection ``arrays``. Random streams are in none: each call brings keys.

``init`` runs the constructor. The rest works on the *skeleton*, the Module that the constructor makes under
``eval_shape``, where it computes nothing. ``bind`` puts the given arrays into a copy of the skeleton, and gives each
random stream the key that belongs to its path, which does not depend on what else there is. ``apply`` binds, calls, and
looks at what has changed: what is in a ``mutable`` collection goes out, Intermediates of others are dropped, and any
other change is an error. Then the Module is *closed*, so that nobody reads in it what was to go out.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic

import jax
import jax.numpy as jnp

from ..core import errors
from ..core.annotations import signature_of
from ..core.data import is_array, is_node
from ..core.errors import Path, describe, format_path, listed
from ..core.filters import All as AllOf
from ..core.filters import Any as AnyOf
from ..core.filters import Filter, FilterObject, Not, Where, WithTag, to_predicate
from ..core.generics import M
from ..core.graphdef import GraphDef
from ..core.iteration import iter_graph, iter_objects
from ..core.making import make_variable
from ..core.objects import Node
from ..core.ops import clone, merge, split, state, update
from ..core.rngs import Rngs, RngStream, as_key
from ..core.state import State, from_flat_state, to_flat_state
from ..core.tracing import inputs_needed, jaxpr_as_fun
from ..core.traversals import flatten_mapping, unflatten_mapping, with_ints
from ..core.variable_names import variable_name_from_type, variable_type_from_name
from ..core.variables import Intermediate, RngState, Variable, plain_value
from .abstract import eval_shape

Variables = dict[str, Any]
Method = str | Callable[..., Any] | None
Mutable = Filter | set[str] | frozenset[str]
Iterate = Callable[[Any], Iterable[tuple[Path, Any]]]  # yields all that is in a graph, a shared object once

ARRAYS = "arrays"  # the collection of arrays that are attributes themselves


def functional(module_type: Callable[..., M], /, *args: Any, **kwargs: Any) -> Functional[M]:
    """Return the pure functions of ``module_type(*args, **kwargs, rngs=rngs)``.

    Args:
      module_type: a Module class, or a function that returns a Module.
      *args: the arguments of the constructor, without ``rngs``.
      **kwargs: the same.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> model = nnx.functional(nnx.BatchNorm, 3)
    >>> variables = model.init(jax.random.key(0))
    >>> jax.tree.map(jnp.shape, variables)
    {'batch_stats': {'mean': (3,), 'var': (3,)}, 'params': {'bias': (3,), 'scale': (3,)}}
    >>> y, updates = model.apply(variables, jnp.ones((8, 3)), mutable='batch_stats')
    >>> y.shape, list(updates)
    ((8, 3), ['batch_stats'])

    Raises:
      ArgumentError: if ``module_type`` is a Module, or ``rngs`` are given here.
    """
    return Functional(module_type, args, kwargs)


class Functional(Generic[M]):
    """What :func:`functional` returns. All methods are pure: they can be jitted, vmapped and differentiated."""

    def __init__(self, module_type: Callable[..., M], args: tuple[Any, ...], kwargs: dict[str, Any]):
        if is_node(module_type) or not callable(module_type):
            raise errors.ArgumentError(
                f"functional takes a class and its arguments, and makes the Module, got {describe(module_type)}. A "
                "Module that there is becomes arrays by `graphdef, state = nnx.split(module)`."
            )
        if "rngs" in kwargs:
            raise errors.ArgumentError("functional takes no rngs: give them to init, and to apply or bind for Dropout.")
        self.module_type, self.args, self.kwargs = module_type, args, kwargs
        self._skeletons: dict[frozenset[str], tuple[GraphDef[M], dict[Path, Any]]] = {}

    def init(self, rngs: Any = None, /, *args: Any, method: Method = None, **kwargs: Any) -> Variables:
        """Make the Module and return its variables.

        Args:
          rngs: an :class:`Rngs`, or what one is made from: a key, a seed, or a dict of these by the names of streams.
            A stream that is not among them falls back to ``default``, then to ``params``.
          *args: if there are any, the Module is also called with them. Variables that the call makes are returned as
            well, except Intermediates; what it changes is not.
          method: what is called, see :meth:`apply`.
          **kwargs: keyword arguments of that call.

        Returns:
          Nested dicts of arrays: collection, then path.

        Raises:
          InvalidRngError: for something that no random stream can be made from.
        """
        module = self._construct(_rngs_of(rngs))
        made = _values(module)
        if args or kwargs or method:
            _call(module, method, args, kwargs)
            later = _values(module, but=Intermediate)
            made = {**later, **made}
        return unflatten_mapping(made)

    def lazy_init(self, rngs: Any = None, /, *args: Any, method: Method = None, **kwargs: Any) -> Variables:
        """Do what :meth:`init` does, without running the call: arguments may be ``jax.ShapeDtypeStruct``.

        >>> import nnxlib as nnx, jax
        >>> variables = nnx.functional(nnx.Linear, 4, 3).lazy_init(0, jax.ShapeDtypeStruct((10**9, 4), 'float32'))
        >>> variables['params']['kernel'].shape
        (4, 3)

        Raises:
          LazyInitError: if the value of a variable depends on an argument of which only the shape is known.
        """
        leaves, structure = jax.tree.flatten((args, kwargs))
        specs = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)}
        streams, counts = split(_rngs_of(rngs))

        def make(given: Sequence[Any]) -> tuple[Variables, Any]:
            known, own = dict(zip(specs, given, strict=True)), merge(streams, counts)
            all_args, all_kwargs = jax.tree.unflatten(structure, [known.get(i, x) for i, x in enumerate(leaves)])
            return self.init(own, *all_args, method=method, **all_kwargs), state(own)

        traced, shapes = jax.make_jaxpr(make, return_shape=True)([*specs.values()])
        paths = [*flatten_mapping(shapes[0])]
        if any(inputs_needed(traced, range(len(paths)))):
            dependent = [_said(*path) for n, path in enumerate(paths) if any(inputs_needed(traced, [n]))]
            raise errors.LazyInitError(listed(_DEPENDENT, dependent, "Call init, with arrays."))
        zeros = lambda: [jnp.zeros(x.shape, x.dtype) for x in specs.values()]  # which XLA does not make
        made = jax.jit(lambda: jaxpr_as_fun(traced)(*zeros()))()
        variables, after = jax.tree.unflatten(jax.tree.structure(shapes), made)
        if isinstance(rngs, Rngs):
            update(rngs, after)
        return variables

    def apply(
        self,
        variables: Mapping[str, Any],
        /,
        *args: Any,
        rngs: Any = None,
        mutable: Mutable = False,
        method: Method = None,
        **kwargs: Any,
    ) -> Any:
        """Call the Module that has these variables.

        Args:
          variables: all that :meth:`init` returned, with whatever values of the same shapes. Collections that the
            constructor does not make, such as the ``cache`` that a former call returned, are attached.
          *args: arguments of the call. What it does to them, and to attributes that are not arrays, is ignored.
          rngs: keys for what the call draws (Dropout), given as for :meth:`init`. An :class:`Rngs` is drawn from once
            for each stream; the same key, or seed, gives the same numbers again.
          mutable: what the call may change: True for all, a collection's name, a filter, or several of these. A name
            may be in a filter: ``nnx.Not('params')`` is all but the parameters.
          method: the name of a method, or a function of the Module and the arguments; default: the Module is called.
          **kwargs: keyword arguments of the call.

        Returns:
          The output; or, unless ``mutable`` is False, the output and the variables of the mutable collections.

        Raises:
          InvalidVariablesError: if the variables are not a dict of collections.
          NestedCollectionError: for ``{'params': {'params': ...}}``.
          PathError: if there is a variable of one path in two collections.
          MissingCollectionError, MissingVariableError, VariableShapeError: if they lack something, or a shape differs.
          StateMismatchError: if they hold something for which the Module has no place.
          InvalidRngError: for something that no random stream can be made from.
          MissingStreamError: if the call draws from a stream that ``rngs`` has no key for.
          ImmutableCollectionError: if the call changes, or makes, a Variable that is not mutable.
        """
        is_mutable = _of_collections(to_predicate([*mutable] if isinstance(mutable, set | frozenset) else mutable))
        module = self.bind(variables, rngs=rngs)
        before = {id(x): (x, plain_value(x)) for x in leaves_of(module).values()}
        out = _call(module, method, args, kwargs)
        updates: dict[Path, Any] = {}
        refused: dict[str, str] = {}  # what is said of a Variable -> its collection
        for path, x in leaves_of(module).items():
            collection, value = collection_of(x), plain_value(x)
            if is_mutable(path, x):
                updates[(collection, *path)] = value
            elif not isinstance(x, Intermediate) and (id(x) not in before or before[id(x)][1] is not value):
                done = "changed" if id(x) in before else "made"
                refused[f"{_said(collection, *path)} {describe(value)} was {done}"] = collection
        if refused:
            remedy = _MUTABLE.format(collections=sorted({*refused.values()}))
            raise errors.ImmutableCollectionError(listed(_REFUSED.format(mutable=mutable), [*refused], remedy))
        _close(module, out)
        return out if mutable is False else (out, unflatten_mapping(updates))

    def bind(self, variables: Mapping[str, Any], /, *, rngs: Any = None) -> M:
        """Return the Module that has these variables, to work with as with any other; :meth:`unbind` is the way back.

        Takes and raises what :meth:`apply` does.

        >>> import nnxlib as nnx, jax.numpy as jnp
        >>> model = nnx.functional(nnx.Linear, 4, 3)
        >>> linear = model.bind(model.init(0))
        >>> linear.bias[...] = jnp.ones(3)
        >>> model.unbind(linear)['params']['bias'].tolist()
        [1.0, 1.0, 1.0]
        """
        keys = _keys_of(rngs)
        graphdef, skeleton = self._skeleton(frozenset(keys))
        given = _by_path(variables, skeleton)
        _check(skeleton, given, variables)
        leaves = {path: x if isinstance(x, RngState) else _filled(x, given[path][1]) for path, x in skeleton.items()}
        module = merge(graphdef, from_flat_state(leaves))
        unplaced = []
        for path, (collection, value) in given.items():
            if path not in leaves and not _attach(module, path, collection, value):
                unplaced.append(f"{_said(collection, *path)} {describe(value)}")
        if unplaced:
            raise errors.StateMismatchError(listed("The Module has no place for these variables:", unplaced, _COMPLETE))
        for path, stream in list(iter_objects(module)):
            if isinstance(stream, RngStream):
                _seed(stream, path, keys.get(stream.tag, keys.get("default", keys.get("params"))))
        return module

    def unbind(self, module: M, /) -> Variables:
        """Return the variables of a Module, as nested dicts of arrays."""
        return unflatten_mapping(_values(module))

    def _construct(self, rngs: Rngs) -> M:
        given: dict[str, Any] = {"rngs": rngs} if _takes_rngs(self.module_type) else {}
        args, kwargs = clone((self.args, self.kwargs), arrays=False)  # Modules among them stay as they are
        return self.module_type(*args, **kwargs, **given)

    def _skeleton(self, streams: frozenset[str]) -> tuple[GraphDef[M], dict[Path, Any]]:
        """The structure of the Module, and its leaves as shapes, made with random streams of these names."""
        if streams not in self._skeletons:
            rngs = Rngs({"default": 0, **dict.fromkeys(streams, 0)})
            graphdef, shapes = split(eval_shape(lambda: self._construct(rngs.fork())))
            self._skeletons[streams] = graphdef, dict(to_flat_state(shapes))
        return self._skeletons[streams]


# --- random streams -------------------------------------------------------------------------------------------------


def _rngs_of(rngs: Any) -> Rngs:
    made = rngs if isinstance(rngs, Rngs) else Rngs(rngs)
    if "params" in made and "default" not in made:
        return Rngs({**dict(made.items()), "default": made.params})
    return made


def _keys_of(rngs: Any) -> dict[str, jax.Array]:
    if isinstance(rngs, Rngs):
        return {name: stream() for name, stream in rngs.items()}
    named = rngs if isinstance(rngs, Mapping) else {} if rngs is None else {"default": rngs}
    return {name: as_key(key) for name, key in named.items()}


def _seed(stream: RngStream, path: Path, key: jax.Array | None) -> None:
    """Start a stream of the skeleton with the key for its path; if there is no key, a draw is an error."""
    shape = stream.key.shape
    if key is None:
        stream.key.set_metadata(on_get_value=_NoKey(format_path(path), stream.tag))
        root = jax.random.key(0)
    else:
        root = RngStream(key, tag=stream.tag).fold_in(*[x if isinstance(x, int) else str(x) for x in path]).key.value
    stream.key.set_raw_value(jax.random.split(root, shape) if shape else root)
    stream.count.set_raw_value(jnp.zeros(shape, jnp.uint32))


@dataclasses.dataclass(frozen=True)
class _NoKey:
    path: str
    tag: str

    def __call__(self, variable: Variable, value: Any) -> Any:
        name = "dropout" if self.tag == "default" else self.tag
        raise errors.MissingStreamError(
            f"The call draws from the random stream {self.path}, but got no key for it: pass rngs={{{name!r}: key}}, "
            "or rngs=key for all streams, or have it compute without (deterministic=True)."
        )


# --- variables ------------------------------------------------------------------------------------------------------


def collection_of(x: Any) -> str:
    """The name of the collection of a Variable or an array."""
    return variable_name_from_type(type(x), allow_register=True) if isinstance(x, Variable) else ARRAYS


def _said(collection: Any, *path: Any) -> str:
    return f"{collection}: {format_path(path)}"


def leaves_of(module: Any, iterate: Iterate = iter_graph) -> dict[Path, Any]:
    """The Variables and arrays of a Module by path, without random streams; a shared one at its first path."""
    return {path: x for path, x in iterate(module) if _is_leaf(x)}


def _is_leaf(x: Any) -> bool:
    return not isinstance(x, RngState) if isinstance(x, Variable) else is_array(x)


def _values(module: Any, but: type | tuple = ()) -> dict[Path, Any]:
    leaves = leaves_of(module)
    return {(collection_of(x), *path): plain_value(x) for path, x in leaves.items() if not isinstance(x, but)}


def _by_path(variables: Any, skeleton: Mapping[Path, Any]) -> dict[Path, tuple[str, Any]]:
    """The given values by path, each with the collection that it is in."""
    if not isinstance(variables, Mapping) or isinstance(variables, State):
        raise errors.InvalidVariablesError(
            f"Variables are a dict of collections, {{'params': {{...}}}}, as init returns them, got "
            f"{type(variables).__name__}. Those of a Module are model.unbind(module)."
        )
    for collection in variables:
        _check_collection(collection, variables[collection], skeleton)
    found: dict[Path, tuple[str, Any]] = {}
    twice = []
    for collection, tree in variables.items():
        for written, x in flatten_mapping(tree).items():
            path = as_made(written, skeleton)
            if path in found:
                twice.append(f"{format_path(path)} is in {found[path][0]!r} and in {collection!r}")
            found[path] = collection, plain_value(x)
    if twice:
        raise errors.PathError(listed("A Module has one variable at a path, but two are given:", twice, _ONE))
    return found


def _check_collection(name: Any, tree: Any, skeleton: Mapping[Path, Any]) -> None:
    names = {path[0] for path in skeleton}
    if name in names and name not in {collection_of(x) for x in skeleton.values()}:
        raise errors.InvalidVariablesError(
            f"Variables are a dict of collections, but {name!r} is an attribute of the Module. Was that "
            f"variables['params']? Pass {{'params': {{{name!r}: ...}}}}."
        )
    if not isinstance(tree, Mapping):
        raise errors.InvalidVariablesError(
            f"The collection {name!r} is a dict of variables by name, got {describe(tree)}."
        )
    if name in tree and name not in names:
        raise errors.NestedCollectionError(
            f"The collection {name!r} holds {name!r} once more. Was {{{name!r}: variables}} meant to be variables?"
        )
    if name != ARRAYS:
        variable_type_from_name(name)


def as_made(path: Path, made: Mapping[Path, Any]) -> Path:
    """The path, with ints in place of strings, which checkpoints have, if it is a path of what was made that way."""
    return ints if path not in made and (ints := with_ints(path)) in made else path


def _check(skeleton: Mapping[Path, Any], given: Mapping[Path, tuple[str, Any]], variables: Mapping[str, Any]) -> None:
    """Raise if a leaf of the skeleton has no value, or one of another collection or shape."""
    absent, missing, elsewhere, shapes = [], [], [], []
    for path, x in skeleton.items():
        if isinstance(x, RngState):
            continue
        collection, expected = collection_of(x), plain_value(x)
        said = _said(collection, *path)
        if path not in given:
            lacking = missing if collection in variables else absent
            lacking.append(f"{said} {describe(expected)}")
        elif given[path][0] != collection:
            elsewhere.append(f"{said} is in {given[path][0]}")
        elif jnp.shape(given[path][1]) != expected.shape:
            shapes.append(f"{said} expected {describe(expected)}, got {describe(given[path][1])}")
    if absent:
        have = ", ".join(map(repr, variables)) or "none"
        raise errors.MissingCollectionError(listed(f"Collections are missing; given are {have}:", absent, _COMPLETE))
    if missing:
        raise errors.MissingVariableError(listed("Variables are missing:", missing, _COMPLETE))
    if elsewhere:
        raise errors.StateMismatchError(listed("Variables are in another collection:", elsewhere, _COMPLETE))
    if shapes:
        raise errors.VariableShapeError(listed("Variables have another shape than the Module's:", shapes, _SHAPES))


def _filled(x: Any, value: Any) -> Any:
    return x.replace(value) if isinstance(x, Variable) else value


def _attach(module: Any, path: Path, collection: str, value: Any) -> bool:
    """Make a Variable at a path, if the place is empty; returns whether it is."""
    holder: Any = module
    for key in path[:-1]:
        holder = holder._nnx_contents().get(key) if isinstance(holder, Node) else None
    is_free = isinstance(holder, Node) and holder._nnx_contents().get(path[-1]) is None
    if not is_free or isinstance(holder, list) or collection == ARRAYS:
        return False
    variable = make_variable(variable_type_from_name(collection), value)
    if isinstance(holder, dict):
        holder[path[-1]] = variable
    else:
        setattr(holder, str(path[-1]), variable)
    return True


# --- calls ----------------------------------------------------------------------------------------------------------


def _call(module: Any, method: Method, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    if callable(method):
        return method(module, *args, **kwargs)
    return getattr(module, method or "__call__")(*args, **kwargs)


def _of_collections(filter: FilterObject) -> FilterObject:
    """The filter, in which a tag is the name of a collection."""
    match filter:
        case WithTag(tag=name):
            if name != ARRAYS:
                variable_type_from_name(name)
            return Where(lambda path, x: collection_of(x) == name)
        case Not(predicate=inner):
            return Not(_of_collections(inner))
        case AllOf() | AnyOf():
            return type(filter)(*map(_of_collections, filter.predicates))
    return filter


def _close(module: Any, out: Any) -> None:
    """Refuse any later use of the Variables of a Module that are not in ``out``."""
    returned = {id(x) for _, x in iter_graph(out)}
    for x in leaves_of(module).values():
        if isinstance(x, Variable) and id(x) not in returned:
            x.set_metadata(on_get_value=_is_closed, on_set_value=_is_closed)


def _is_closed(variable: Variable, value: Any) -> Any:
    raise errors.ClosedModuleError(
        "This Module was made for a call of `apply`, which has ended. Return what is needed from the call, or use "
        "`module = model.bind(variables)` for a Module that stays."
    )


def _takes_rngs(module_type: Callable) -> bool:
    if getattr(module_type, "__init__", None) is object.__init__:  # whose signature has arguments of every kind
        return False
    try:
        parameters: Iterable[inspect.Parameter] = signature_of(module_type).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(x.name == "rngs" or x.kind is x.VAR_KEYWORD for x in parameters)


_COMPLETE = "Pass all that `init` has returned."
_ONE = "Remove or rename one of them."
_SHAPES = "These are variables of a Module with other arguments."
_REFUSED = "The call has changed variables that it may not change (mutable={mutable!r}):"
_MUTABLE = "Pass mutable={collections}, and take the new values: y, updates = model.apply(...)."
_DEPENDENT = "These variables depend on an argument of which lazy_init knows the shape only:"
