"""Tangents: which leaves are differentiated, and in which form users see gradients and tangents.

Internally a function of a list of leaves is differentiated, and its tangents are a list. Users see a pytree like the
arguments or the output, with a State by path in place of each node. :class:`Tangents` converts between the two;
:func:`by_argument` and :func:`differentiated` find the leaves, given ``argnums``. All derivatives but those with rules
of the user (custom.py) begin with a :class:`Derivation`: a call of which the arguments are packed, and the leaves
chosen.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..core.annotations import NamedTuple
from ..core.data import is_node
from ..core.errors import OUTPUT, ArgumentError, PrefixError, counted, describe, format_path, place_of
from ..core.escapes import warn_of_escapes
from ..core.filters import Filter, shown
from ..core.graph import Packed, commit, pack, variable_of
from ..core.layout import Layout
from ..core.missing import MISSING
from ..core.objects import Node
from ..core.packing import pack_live
from ..core.recordings import give_on, with_carrier
from ..core.rows import LEAF, NodeRow, Ref, Spec, Tree, children, count_leaves, same_node
from ..core.state import State, from_flat_state, to_flat_state
from ..core.tracing import zeros_of
from ..core.variables import Param, stored_value
from .callables import as_pair, check_options, resolve
from .labels import label_arguments
from .leaf_checks import check_traceable, is_traceable, note_abstract, type_of
from .lift import Arguments, Outcome, cross, part_of
from .prefixes import PrefixMapping, call_entries, check_labels

_DIFFERENTIATED, _REST = "differentiated", "rest"  # labels


class DiffState(NamedTuple):
    """Which leaves of an argument to differentiate: ``DiffState(argnum, filter)``, for ``argnums``.

    The filter sees paths from the argument down, as it does in :func:`nnxlib.state`.

    >>> import nnxlib as nnx
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> only_bias = nnx.DiffState(0, nnx.PathContains('bias'))
    >>> list(nnx.grad(lambda m: m.bias.sum(), argnums=only_bias)(layer))
    ['bias']
    """

    argnum: int
    filter: Filter


Argnums = int | DiffState | Sequence[int | DiffState]


# --- which leaves ---------------------------------------------------------------------------------------------------


def is_single(argnums: Argnums) -> bool:
    """Whether a user has chosen one argument, rather than a sequence of them."""
    return isinstance(argnums, int | np.integer | DiffState)


def choices(argnums: Argnums) -> list[int | DiffState]:
    """The arguments that a user has chosen, one of them or several."""
    several = isinstance(argnums, Iterable) and not is_single(argnums)
    return list(argnums) if several else [argnums]  # type: ignore[list-item,arg-type]


def by_argument(
    chosen: Sequence[int | DiffState], count: int, shift: int = 0, option: str = "argnums"
) -> dict[int, Filter]:
    """Argument number -> its filter, MISSING for the default; in the order in which they were chosen.

    Args:
      chosen: numbers of arguments, or these with filters.
      count: how many arguments the user has passed.
      shift: how many arguments stand before them.
      option: what the user calls ``chosen``.

    Raises:
      ArgumentError: for what is not a number.
      PrefixError: for an argument that was not passed, or is named twice.
    """
    filters: dict[int, Filter] = {}
    for choice in chosen:
        number, filter_ = (choice.argnum, choice.filter) if isinstance(choice, DiffState) else (choice, MISSING)
        if not isinstance(number, int | np.integer):
            raise ArgumentError(f"{option} takes numbers of arguments, or DiffState(number, filter), not {number!r}.")
        if not -count <= number < count:
            raise PrefixError(
                f"{option} has {number}, but the function was called with {counted(count, 'positional argument')}. "
                "Arguments are numbered from 0."
            )
        position = number % count + shift
        if position in filters:
            raise PrefixError(f"{option} has argument {number} twice; join the filters: DiffState({number}, (a, b)).")
        filters[position] = filter_
    return filters


PARAMS = PrefixMapping({Param: _DIFFERENTIATED, ...: _REST})
INEXACT = PrefixMapping([(lambda path, leaf: is_inexact(leaf), _DIFFERENTIATED), (..., _REST)])


def differentiated(packed: Packed, args: tuple, filters: Mapping[int, Filter], default: PrefixMapping) -> Tangents:
    """The leaves of packed ``Arguments`` that are differentiated.

    Without a filter, those of a Module are chosen by ``default``; of other arguments, all leaves are differentiated.

    Raises:
      PrefixError: if a filter selects no leaf.
    """
    entries: list[Any] = []
    for i, arg in enumerate(args):
        for x in jtu.tree_leaves(arg, is_leaf=is_node):
            entries.append(_entry(x, filters[i], default) if i in filters else _REST)
    entries += [_REST] * (len(children(packed.layout.root)) - len(entries))
    _, labels = label_arguments(packed, entries)
    tangents = Tangents(packed.layout, tuple([k for k, label in enumerate(labels) if label == _DIFFERENTIATED]))
    taken = {path[1] for path in tangents.take(packed.layout.leaf_paths)}
    for i, filter_ in filters.items():
        if filter_ is not MISSING and i not in taken:
            raise PrefixError(
                f"DiffState({i}, {shown(filter_)}) selects no leaf of argument {i}, so there is nothing to "
                "differentiate."
            )
    return tangents


def _entry(x: Any, filter_: Filter, default: PrefixMapping) -> Any:
    """The entry (prefixes.py) of a node or leaf in an argument that is differentiated."""
    if filter_ is MISSING:
        return default if isinstance(x, Node) else _DIFFERENTIATED
    return PrefixMapping([(filter_, _DIFFERENTIATED), (..., _REST)])


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf, or a Variable, holds a value of floating or complex type."""
    dtypes = map(_dtype, jtu.tree_leaves(stored_value(leaf)))
    return any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes if dtype is not None)


def _dtype(leaf: Any) -> Any:
    """The dtype that an array or a number has for JAX, None for anything else, such as an array of strings."""
    if not isinstance(leaf, int | float | complex | np.ndarray | np.generic):
        return getattr(leaf, "dtype", None)
    try:
        return jnp.result_type(leaf)
    except TypeError:
        return None


def check_not_refs(packed: Packed, tangents: Tangents) -> None:
    """Check that nothing that is to get a gradient is a ``jax.Ref``; JAX accumulates that of one into another.

    Raises:
      ArgumentError: naming its path.
    """
    leaves = zip(tangents.take(packed.layout.leaf_paths), tangents.take(packed.leaves), strict=True)
    for path in [path for path, leaf in leaves if isinstance(leaf, jax.Ref)]:
        raise ArgumentError(
            f"Cannot differentiate {format_path(path)}: its value is in a jax.Ref, which has no gradient. Make the "
            "Variable without ref=True, pass an array (ref[...]), or choose other leaves with "
            "argnums=nnx.DiffState(argnum, filter)."
        )


def check_differentiable(packed: Packed, tangents: Tangents, holomorphic: bool, allow_int: bool | None) -> None:
    """Check that what is to be differentiated is of floating type, or of complex type if ``holomorphic``.

    The user may allow integers; ``allow_int`` is None if the transform has no such option.

    Raises:
      ArgumentError: if not; names its path.
    """
    check_not_refs(packed, tangents)
    kind = jnp.complexfloating if holomorphic else jnp.inexact
    needed = ", and holomorphic=True is for complex numbers" if holomorphic else ""
    advice = "" if holomorphic or allow_int is None else ", or pass allow_int=True"
    leaves = zip(tangents.take(packed.layout.leaf_paths), tangents.take(packed.leaves), strict=True)
    for path, leaf in [(path, x) for path, value in leaves for x in jtu.tree_leaves(value)]:
        dtype = _dtype(leaf)
        if dtype is not None and not allow_int and not jnp.issubdtype(dtype, kind):
            raise ArgumentError(
                f"Cannot differentiate {format_path(path)}: its dtype is {dtype}{needed}. Choose the "
                f"leaves with argnums=nnx.DiffState(argnum, filter){advice}."
            )
        if dtype is None and not is_traceable(leaf):
            raise ArgumentError(
                f"Cannot differentiate {format_path(path)}: it is a {type(leaf).__name__} ({leaf!r:.80}), not an "
                "array. Choose other arguments with argnums, or leaves with argnums=nnx.DiffState(argnum, filter)."
            )


# --- their tangents -------------------------------------------------------------------------------------------------


Leaves = Sequence[Any] | Mapping[int, Any]  # by position


@jtu.register_static
class Tangents(NamedTuple):
    """The leaves of a packed pytree that have a tangent, as positions in its layout. Static."""

    layout: Layout
    positions: tuple[int, ...]

    @classmethod
    def of_leaves(cls, layout: Layout, leaves: Sequence[Any]) -> Tangents:
        """Make one for all leaves of floating or complex type, and all arrays that are in no object.

        As in JAX, tangents of integers are of type float0.
        """
        chosen = [k for k, leaf in enumerate(leaves) if is_inexact(leaf)]
        others = [k for k in own_leaves(layout) if not is_inexact(leaves[k]) and _dtype(leaves[k])]
        return cls(layout, (*chosen, *others))

    def take(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that have a tangent, or the tangents in a list that has something for each leaf."""
        return [leaves[k] for k in self.positions]

    def put(self, leaves: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The inverse: all leaves, with these values for those that have a tangent."""
        found = list(leaves)
        for k, value in zip(self.positions, values, strict=True):
            found[k] = value
        return found

    def fold(self, values: Sequence[Any]) -> Any:
        """The pytree with the values in it, and a State in place of each node.

        A leaf without a tangent is None, or an empty State if it is an object.
        """
        (folded,) = self.fold_parts(values, [((), self.layout.root)])
        return folded

    def fold_arguments(self, values: Sequence[Any], numbers: Iterable[int]) -> list[Any]:
        """As :meth:`fold`, for those of packed ``Arguments`` with the given numbers.

        As in JAX, the others are not made: their classes may refuse a None in place of an array.
        """
        return self.fold_parts(values, [(("args", i), part_of(self.layout.root, (0, i))) for i in numbers])

    def fold_parts(self, values: Sequence[Any], parts: Sequence[tuple[tuple, Spec]]) -> list[Any]:
        """As :meth:`fold`, for parts of the pytree, each given by its path and spec."""
        paths = self.layout.leaf_paths
        nested = from_flat_state([(paths[k], value) for k, value in zip(self.positions, values, strict=True)])
        return [_fold(self.layout, spec, _below(nested, path)) for path, spec in parts]

    def as_variables(self, values: Sequence[Any]) -> list[Any]:
        """The values, each in a Variable if it belongs to one in the pytree, of the same type."""
        n, pairs = len(self.layout.variables), zip(self.positions, values, strict=True)
        return [variable_of(self.layout.variable_row(k), x) if k < n else x for k, x in pairs]

    def arguments(self, numbers: Sequence[int], values: Sequence[Any]) -> Any:
        """``Arguments`` for :meth:`unfold`, in which only those with the given numbers have values."""
        given, none = dict(zip(numbers, values, strict=True)), cast(Any, None)  # which may stand for any part
        count = len(part_of(self.layout.root, (0,)).treedef.children())
        return Arguments(tuple([given.get(i) for i in range(count)]), none, none)

    def unfold(
        self, tree: Any, leaves: Leaves, name: str, ignored: Collection[tuple] = (), of_any_float: bool = False
    ) -> dict[int, Any]:
        """The inverse of :meth:`fold`: the values that the tree gives, by position.

        Args:
          tree: like the pytree, with a State (or Module, or nested dict) in place of each node. None stands for no
            values, and a State may leave some out.
          leaves: the leaves of the packed pytree, whose shapes and types the values must have.
          name: what the user calls the values.
          ignored: paths at which the tree may have something that does not belong.
          of_any_float: whether values may be of another floating type.

        Raises:
          ArgumentError: if the tree is not like the pytree, or has a value where none belongs or of another shape or
            type; names the path.
        """
        found = {}
        for path, value in _unfold(self.layout, self.layout.root, (), tree, name):
            k = self.layout.positions.get(path)
            if k is not None and k in self.positions:
                found[k] = _like(leaves[k], value, f"The {name} of {place_of(path)}", of_any_float)
            elif path not in ignored and not is_float0(value):
                raise ArgumentError(_NO_TANGENT.format(name=name, path=place_of(path), why=self._why(k, leaves)))
        return found

    def _why(self, position: int | None, leaves: Leaves) -> str:
        """Why there is no tangent at a position, None for a path that is not that of a leaf."""
        if position is None:
            known = ", ".join(place_of(self.layout.leaf_paths[k]) for k in self.positions[:5])
            more = ", ..." if len(self.positions) > 5 else ""
            return f"there is no such leaf (a shared one has one path, its first). These have one: {known}{more}."
        return f"that leaf ({describe(leaves[position])}) is not differentiated. Leave it out of the State."

    def filled(self, found: Mapping[int, Any], leaves: Leaves) -> list[Any]:
        """A value for each position: zeros for those that are not in ``found``."""
        return [found[k] if k in found else zeros_like(leaves[k]) for k in self.positions]


_NO_TANGENT = "A {name} was given for {path}, but {why}"


def own_leaves(layout: Layout) -> range:
    """The positions of the leaves that are in no object: they are the last ones."""
    count = len(layout.leaf_paths)
    return range(count - count_leaves(layout.root), count)


def _below(nested: Any, path: tuple) -> Any:
    """What a nested State has at a path, or None."""
    for key in path:
        nested = nested.get(key) if isinstance(nested, Mapping) else None
    return nested


def _fold(layout: Layout, spec: Spec, value: Any) -> Any:
    """The pytree for ``spec``; ``value`` is what the nested State has at its path, or None."""
    if isinstance(spec, Tree):
        return _unflatten(spec.treedef, [_fold(layout, child, _below(value, path)) for path, child in spec.at(())])
    return State({}) if isinstance(spec, Ref) and value is None else value


def _unflatten(treedef: Any, leaves: list[Any]) -> Any:
    """As ``treedef.unflatten(leaves)``, but an object that would hold only None is None: its class may refuse that."""
    if not any(x is None for x in leaves):
        return treedef.unflatten(leaves)
    node, below = treedef.node_data(), treedef.children()
    if node is None:
        return leaves[0]
    if node[0] not in _BUILT_IN and not hasattr(node[0], "_fields"):
        return None if all(x is None for x in leaves) else treedef.unflatten(leaves)
    rest = iter(leaves)
    parts = [_unflatten(child, list(itertools.islice(rest, child.num_leaves))) for child in below]
    level = treedef.from_node_data_and_children(jtu.default_registry, node, [_LEAF] * len(below))
    return level.unflatten(parts)


_LEAF = jtu.tree_structure(0)

_BUILT_IN = {tuple, list, dict, OrderedDict, defaultdict}  # pytrees of JAX, besides named tuples


def _unfold(layout: Layout, spec: Spec, path: tuple, tree: Any, name: str) -> Iterator[tuple[tuple, Any]]:
    """The inverse of :func:`_fold`: pairs of path and value."""
    if tree is MISSING or tree is None or (isinstance(tree, State) and not tree):
        return
    if isinstance(spec, Tree):
        try:
            parts = _flatten_up_to(spec.treedef, tree)
        except ValueError as error:
            where = f" of {place_of(path)}" if path else ""
            raise ArgumentError(
                f"The {name}{where} must be a pytree like the value that it belongs to, with a State in place of each "
                f"Module: {error}"
            ) from None
        for key, child, part in zip(spec.paths, spec.children, parts, strict=True):
            yield from _unfold(layout, child, (*path, *key), part, name)
    elif isinstance(spec, Ref) and isinstance(layout.rows[spec.index], NodeRow):
        yield from ((path + below, stored_value(value)) for below, value in _entries(tree, path, name))
    elif spec is LEAF or isinstance(spec, Ref):
        yield path, stored_value(tree)


def _flatten_up_to(treedef: Any, tree: Any) -> list[Any]:
    """As ``treedef.flatten_up_to(tree)``, but None may stand for any part of the tree, as for JAX's own rules."""
    if tree is None:
        return [None] * treedef.num_leaves
    if treedef.node_data() is None:  # a leaf
        return [tree]
    below, level = jtu.tree_flatten(tree, is_leaf=lambda x: x is not tree)
    if not same_node(level.node_data(), treedef.node_data()):
        return treedef.flatten_up_to(tree)  # which raises
    return [x for child, part in zip(treedef.children(), below, strict=True) for x in _flatten_up_to(child, part)]


def _entries(tree: Any, path: tuple, name: str) -> Iterator[tuple[tuple, Any]]:
    """(path, value) of what the user gives for the node at ``path``."""
    if isinstance(tree, Node):
        packed = pack(tree)
        return zip(packed.layout.leaf_paths, packed.leaves, strict=True)
    if isinstance(tree, Mapping):
        return iter(to_flat_state(State(tree) if not isinstance(tree, State) else tree))
    raise ArgumentError(
        f"The {name} of the Module at {place_of(path)} must be a State by path (nnx.State), not {describe(tree)}."
    )


def is_float0(value: Any) -> bool:
    """Whether a tangent is of the type that JAX gives to tangents of integers: there is none."""
    return getattr(value, "dtype", None) == jax.dtypes.float0


def _like(leaf: Any, value: Any, what: str, of_any_float: bool) -> Any:
    """``value`` as an array like ``leaf``; pytrees are left to JAX."""
    if not jtu.all_leaves([leaf]) or is_float0(value):
        return value
    dtype = _dtype(leaf)
    if isinstance(value, int | float | complex):
        as_weak = type_of(leaf).weak_type and jnp.result_type(value) == dtype
        is_too_wide = isinstance(value, complex) and not jnp.issubdtype(dtype, jnp.complexfloating)
        value = jnp.asarray(value, None if as_weak or is_too_wide else dtype)
    elif isinstance(value, np.ndarray | np.generic):
        value = jnp.asarray(value)
    given = getattr(value, "dtype", None)
    floats = of_any_float and all(x is not None and jnp.issubdtype(x, jnp.floating) for x in (given, dtype))
    if getattr(value, "shape", None) != jnp.shape(leaf) or not (floats or given == dtype):
        expected = describe(type_of(leaf))
        raise ArgumentError(f"{what} must be {expected}, like the value itself, but is {describe(value)}.")
    return value


def zeros_like(leaf: Any) -> Any:
    """A zero tangent of a leaf, or of its type."""

    def zeros(type_: Any) -> Any:
        return zeros_of(type_) if is_inexact(type_) else np.zeros(type_.shape, jax.dtypes.float0)

    return jax.tree.map(zeros, type_of(leaf))


# --- the function of these leaves -----------------------------------------------------------------------------------


class Derivation:
    """A function with its packed arguments, as a function of those leaves that are differentiated.

    With ``has_aux`` it returns a pair, of which only the first is differentiated.
    """

    def __init__(self, f: Callable, primals: Sequence[Any], has_aux: bool, kwargs: Mapping[str, Any] | None = None):
        self.function, bound, bound_kwargs = resolve(f)
        self.has_aux, self.shift, self.args = has_aux, len(bound), (*bound, *primals)
        self.arguments = with_carrier(Arguments(self.args, {**bound_kwargs, **(kwargs or {})}))
        self.packed: Packed = pack_live(self.arguments)

    def flags(self, prefix: Any, name: str) -> tuple[tuple[bool, ...]]:
        """For each leaf that is differentiated, what a prefix of the arguments has for it, True or False.

        In tuples, which all versions of JAX take for a prefix of the list of leaves (0.11 takes nothing else).
        """
        check_labels(prefix, name, lambda x: isinstance(x, bool), "it takes True, False or nnx.StateAxes of these")
        entries = call_entries(prefix, self.arguments, self.shift, name, True)
        return (tuple([x is not False for x in self.tangents.take(label_arguments(self.packed, entries)[1])]),)

    def options(self, jax_transform: Callable, **prefixes: Any) -> dict[str, Any]:
        """Those options of a transform of JAX that say something of each leaf, from what the user has given."""
        given = {name: prefix for name, prefix in prefixes.items() if prefix is not None and prefix is not True}
        check_options(given, jax_transform)
        return {name: self.flags(prefix, name) for name, prefix in given.items()}

    def choose(self, argnums: Argnums | None, default: PrefixMapping = INEXACT) -> tuple[int, ...]:
        """Fix what is differentiated, all by default; returns the positions of the chosen arguments."""
        count = len(self.args) - self.shift
        filters = by_argument(range(count) if argnums is None else choices(argnums), count, self.shift)
        self.tangents = differentiated(self.packed, self.args, filters, default)
        if default is INEXACT:  # else `check_differentiable` says more
            pairs = zip(self.packed.layout.leaf_paths, self.packed.leaves, strict=True)
            chosen = [x if path[0] == "args" and path[1] in filters else None for path, x in pairs]
            check_traceable(self.packed.layout, chosen)  # other arguments may be anything, as in a closure
        return tuple(filters)

    @property
    def leaves(self) -> list[Any]:
        """The leaves that are differentiated."""
        return self.tangents.take(self.packed.leaves)

    def pure(self, leaves: list[Any]) -> tuple[list[Any], tuple[list[Any], Outcome, Tangents]]:
        """From leaves to those leaves of the output that have a tangent; and, as aux, to all that comes back."""
        all_leaves = self.tangents.put(self.packed.leaves, leaves)
        try:
            (primal, _), after = cross(self._run, self.packed.layout, all_leaves, part=operator.itemgetter(1))
        except TypeError as error:
            note_abstract(error, self.packed.layout, self.packed.leaves)
            raise
        warn_of_escapes(after)
        found = Tangents.of_leaves(primal.layout, primal.leaves)
        return found.take(primal.leaves), (after.leaves, Outcome(after.delta), found)

    def _run(self, /, *args: Any, **kwargs: Any) -> tuple[Packed, Any]:
        out = self.function(*args, **kwargs)
        return pack({OUTPUT: self.split(out)[0]}), out

    def split(self, out: Any) -> tuple[Any, Any]:
        """What is differentiated of an output, and the aux value; None if there is none."""
        return (
            as_pair(out, "With has_aux=True the function must return a pair (loss, aux)")
            if self.has_aux
            else (out, None)
        )

    def commit(self, leaves: list[Any], outcome: Outcome) -> Any:
        """Write the changes, after everything that may fail; returns what came back beside them."""
        out = commit(self.packed.layout, outcome.delta, leaves, self.packed.objects)
        give_on(self.arguments)
        return out

    def finish(self, leaves: list[Any], outcome: Outcome) -> tuple[Any, tuple]:
        """Write the changes; returns the output, and a tuple with the aux value if there is one."""
        out = self.commit(leaves, outcome)
        return (out[0], (out[1],)) if self.has_aux else (out, ())
