"""Transforms as flax.nnx has them in tree mode, and without graph updates.

The values and metadata of Variables come out of such a transform, and no other change of what it was passed. Gradients
have a Module for each Module. What nothing but graph updates could carry is refused: prefixes by filter, and a Variable
that comes out by two ways; in tree mode also one that goes in by two ways, and what other functions refuse there, too
(:func:`check_tree`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

import nnxlib

from ..core.annotations import signature_of
from ..core.calls import followed
from ..core.data import holds_nodes, is_node
from ..core.errors import AliasingError, format_path
from ..core.missing import MISSING
from ..core.objects import Node
from ..core.static import same_items
from ..transforms.custom import CustomVjp
from ..transforms.grad import without_value
from ..transforms.prefixes import PrefixMapping
from ..transforms.tangents import Argnums, is_inexact


def call(name: str, as_tree: bool, args: tuple, options: dict[str, Any]) -> Any:
    """Call the transform with this name without graph updates; with ``as_tree`` in tree mode."""
    as_tree = as_tree or name in _OF_TREES
    _refuse_filters(name, options)
    if as_tree:
        _refuse_shared(name, {"args": args})
    if name not in _OF_LOOPS:
        args = tuple([_without_updates(x, name, as_tree) for x in args])
    return TRANSFORMS[name](*args, **options)


_OF_TREES = ("custom_vjp", "eval_shape", "make_jaxpr")  # without graph updates, also with graph=True
_OF_LOOPS = ("scan", "while_loop", "fori_loop")  # whose bodies return what they are given
_BY_FILTER = (nnxlib.StateAxes, nnxlib.StateSharding, nnxlib.DiffState)


def _refuse_filters(transform: str, options: dict[str, Any]) -> None:
    for name, option in options.items():
        for x in jax.tree.leaves(option, is_leaf=lambda x: isinstance(x, _BY_FILTER)):
            if isinstance(x, _BY_FILTER):
                raise ValueError(
                    f"`{name}` cannot contain `{type(x).__name__}` objects in a {transform} without graph updates. Use "
                    "nnx.prefix or nnx.split, or pass graph=True and graph_updates=True."
                )


def _refuse_shared(
    transform: str, places: dict[str, Any], is_refused: Callable[[nnxlib.Variable, list], bool] = lambda *_: True
) -> None:
    """Refuse Variables with several paths, those for which ``is_refused(variable, first keys of its paths)``."""
    for paths in nnxlib.find_duplicates(places):
        for below, x in nnxlib.iter_graph(dict(nnxlib.iter_graph(places))[paths[0]]):
            if isinstance(x, nnxlib.Variable) and is_refused(x, [path[0] for path in paths]):
                found = ", ".join([format_path((*path, *below)) for path in paths])
                raise AliasingError(
                    f"Duplicate {type(x).__name__} found at paths {found}. Without graph updates, {transform} does "
                    "not support Variable aliasing; pass graph=True and graph_updates=True."
                )


def _without_updates(f: Any, transform: str, as_tree: bool) -> Any:
    """A function, partial or list of these that runs on a copy of its arguments, and writes back what Variables hold.

    Any other object is returned as it is.
    """
    if isinstance(f, list | tuple) and f and all(inspect.isfunction(x) or type(x) is functools.partial for x in f):
        return [_without_updates(x, transform, as_tree) for x in f]
    if type(f) is functools.partial:  # not one of JAX, which is a pytree
        return functools.partial(_without_updates(f.func, transform, as_tree), *f.args, **f.keywords)
    if not inspect.isfunction(f):
        return f
    made = vars(f).setdefault("_without_updates", {})  # the same each time: programs are cached on the function
    if (transform, as_tree) in made:
        return made[transform, as_tree]

    @functools.wraps(f, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if followed():  # sow attaches attributes
            return f(*args, **kwargs)
        outside = {"args": args, "kwargs": kwargs}
        if as_tree:
            _refuse_shared(transform, outside)
        inside = nnxlib.clone(outside, arrays=False)
        pairs = list(zip(_variables(outside), _variables(inside), strict=True))
        passed = {id(copy) for _, copy in pairs}

        def is_refused(x: nnxlib.Variable, places: list) -> bool:
            """What was passed may not come out as well; a new one may, since what it is attached to stays as it was."""
            return "out" in places and (id(x) in passed or (as_tree and places.count("out") > 1))

        out = f(*inside["args"], **inside["kwargs"])
        _refuse_shared(transform, {**inside, "out": out}, is_refused)
        for variable, copy in pairs:
            if copy.get_raw_value() is not variable.get_raw_value():
                variable.set_raw_value(copy.get_raw_value())
            if not same_items(copy.get_metadata(), variable.get_metadata()):
                variable.set_metadata(copy.get_metadata())
        return out

    made[transform, as_tree] = wrapper
    return wrapper


def _variables(tree: Any) -> list[nnxlib.Variable]:
    return [x for _, x in nnxlib.iter_graph(tree) if isinstance(x, nnxlib.Variable)]


# --- what tree mode refuses -----------------------------------------------------------------------------------------


OF_GRAPHS = {  # the functions that take a graph, and the number of that argument
    **dict.fromkeys("as_abstract clone flatten graphdef iter_children iter_graph iter_modules reseed".split(), 0),
    **dict.fromkeys("split state unpack view view_info with_attributes".split(), 0),
    **dict.fromkeys(["map", "recursive_map"], 1),
}


def check_tree(node: Any) -> None:
    """Check that a pytree has each Variable once, no cycle, and no Module that JAX does not flatten.

    Raises:
      AliasingError: naming the paths of what is shared.
      ValueError: naming the path of what is not a pytree.
    """
    found = dict(nnxlib.iter_graph(node))
    variables = [path for path, x in found.items() if isinstance(x, nnxlib.Variable)]
    for first, *more in nnxlib.find_duplicates(node):
        if any(path[: len(first)] == first for path in (*variables, *more)):
            paths = ", ".join(map(format_path, (first, *more)))
            raise AliasingError(
                f"{type(found[first]).__name__} found at paths {paths}: a tree does not support shared references or "
                "cycles. Pass graph=True."
            )
    paths_of_refs: dict[int, tuple] = {}
    for path, x in found.items():
        if isinstance(x, jax.Ref) and paths_of_refs.setdefault(id(x), path) is not path:
            paths = ", ".join(map(format_path, (paths_of_refs[id(x)], path)))
            raise AliasingError(f"A jax.Ref found at paths {paths}: a tree has each Ref once.")
        if isinstance(x, Node) and jtu.all_leaves([x]):
            raise ValueError(
                f"{type(x).__name__} was made with pytree=False, so no tree can hold it. Found at path "
                f"{format_path(path)}; pass graph=True."
            )


# --- loops ----------------------------------------------------------------------------------------------------------


class _Carried(PrefixMapping):
    """A prefix of ``scan`` in which Variables that would be passed whole are carried, except those of some types.

    Only what changes is carried, so this makes a difference only where None would be refused.
    """

    def __init__(self, prefix: Any, kept: tuple[type, ...]):
        super().__init__({})
        self._prefix, self._kept = self._key = prefix, kept

    @property
    def labels(self) -> tuple:
        return *(self._prefix.labels if isinstance(self._prefix, PrefixMapping) else ()), nnxlib.Carry, None

    def map_prefix(self, path: tuple, leaf: Any) -> Any:
        label = self._prefix.map_prefix(path, leaf) if isinstance(self._prefix, PrefixMapping) else self._prefix
        carried = label is None and isinstance(leaf, nnxlib.Variable) and not isinstance(leaf, self._kept)
        return nnxlib.Carry if carried else label

    def __repr__(self) -> str:
        return repr(self._prefix)


def carrying_scan(*kept: type) -> Callable:
    """:func:`nnxlib.scan` with Variables carried that would be passed whole, except those of some types."""

    @functools.wraps(nnxlib.scan)
    def scan(f: Callable, *, in_axes: Any = (nnxlib.Carry, 0), **options: Any) -> Callable:
        is_whole = lambda x: x is None or isinstance(x, PrefixMapping) or is_node(x)
        carried = lambda x: _Carried(x, kept) if x is None or isinstance(x, PrefixMapping) else x
        return nnxlib.scan(f, in_axes=jax.tree.map(carried, in_axes, is_leaf=is_whole), **options)

    return scan


# --- gradients like what they belong to -----------------------------------------------------------------------------


def _shaped(like: Any, gradients: Any) -> Any:
    """Gradients with a Module in place of each State, and zeros for leaves that have none."""
    found = dict(nnxlib.to_flat_state(nnxlib.state((gradients,))))
    zeros = lambda x: jax.tree.map(jnp.zeros_like, x.get_raw_value() if isinstance(x, nnxlib.Variable) else x)
    return nnxlib.map(lambda path, x: found[path] if path in found else zeros(x), (like,))[0]


def _value_and_grad(f: Callable, *, argnums: int | Sequence[int] = 0, **options: Any) -> Callable:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    floating = lambda path, leaf: is_inexact(leaf)

    def chosen(n: int, x: Any) -> int | nnxlib.DiffState:
        """All floating leaves of a Module, not only its Params; a filter that selects none would be refused."""
        return nnxlib.DiffState(n, floating) if holds_nodes(x) and nnxlib.state((x,), floating) else n

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        like = tuple([args[n] for n in numbers])
        differentiate = nnxlib.value_and_grad(f, argnums=tuple(map(chosen, numbers, like)), **options)
        value, grads = differentiate(*args, **kwargs)
        grads = _shaped(like, grads)
        return value, grads[0] if isinstance(argnums, int) else grads

    return wrapped


def _grad(f: Callable, *, has_aux: bool = False, **options: Any) -> Callable:
    return without_value(_value_and_grad(f, has_aux=has_aux, **options), f, has_aux)


def _vjp(f: Callable, *primals: Any, **options: Any) -> Any:
    if not primals:
        return functools.wraps(f, updated=())(functools.partial(_vjp, f, **options))
    out, pull, *aux = nnxlib.vjp(f, *primals, **options)
    return out, jax.tree_util.Partial(_pull_back, primals, pull), *aux


def _pull_back(primals: tuple, pull: Callable, gradient: Any) -> Any:
    return _shaped(primals, pull(gradient))


def _jvp(f: Callable, primals: Any = MISSING, tangents: Any = MISSING, **options: Any) -> Any:
    if primals is MISSING:
        return functools.wraps(f, updated=())(functools.partial(_jvp, f, **options))
    out, tangent, *aux = nnxlib.jvp(f, primals, tangents, **options)
    return out, _shaped(out, tangent), *aux


class _CustomVjpOfAll(CustomVjp):
    """One whose rule gets gradients of all leaves of the arguments, those that are not floating among them."""

    _of_all = True


def custom_vjp(fun: Callable, *, nondiff_argnums: Argnums = ()) -> CustomVjp:
    """:func:`nnxlib.custom_vjp` with gradients like what ``jax.vjp`` of a function that returns the State takes."""
    return _CustomVjpOfAll(fun, nondiff_argnums)


class _CustomVjp(CustomVjp):
    """One whose rule gets the gradient of the output; and the gradients of what has changed, if it takes them."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        _refuse_shared("custom_vjp", {"args": args, "kwargs": kwargs})
        return super().__call__(*args, **kwargs)

    def defvjp(self, fwd: Callable, bwd: Callable, symbolic_zeros: bool = False) -> None:
        takes_changed = len(signature_of(bwd).parameters) > len(self._chosen) + 2

        def forward(*args: Any) -> Any:
            before = {id(x): x.get_raw_value() for x in _variables(args)}
            out, residuals = fwd(*args)
            differentiated = tuple([x for i, x in enumerate(args) if i not in self._chosen])
            changed = nnxlib.recursive_map(lambda path, x: None if _is_same(x, before) else x, differentiated)
            return out, (residuals, out, changed)

        def backward(*given: Any) -> Any:
            *nondiff, (residuals, out, changed), (of_arguments, of_output) = given
            gradients = (_shaped(out, of_output),)
            if takes_changed:
                gradients += (_shaped(changed, of_arguments),)
            return bwd(*nondiff, residuals, *gradients)

        super().defvjp(forward, backward, symbolic_zeros)


def _is_same(x: Any, values: dict[int, Any]) -> bool:
    return isinstance(x, nnxlib.Variable) and x.get_raw_value() is values.get(id(x), MISSING)


_SAME = "checkify checkpoint cond eval_shape fori_loop jit jit_partial make_jaxpr pmap remat shard_map switch vmap"
TRANSFORMS = {
    **{name: getattr(nnxlib, name) for name in [*_SAME.split(), "while_loop"]},
    "custom_vjp": _CustomVjp,
    "grad": _grad,
    "jvp": _jvp,
    "scan": carrying_scan(),
    "value_and_grad": _value_and_grad,
    "vjp": _vjp,
}
