"""Stack: equal layers one after the other, stored as one layer with a leading axis, and applied by one loop.

A Python loop over ``N`` layers compiles ``N`` copies of a layer; the compiled loop of a Stack has one. The Variables of
layer ``i`` are the slices ``[i]`` of the Variables of ``stack.layers``, a Module of the class of the layers.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..core.data import is_data
from ..core.differences import leaf_differences, refuse
from ..core.errors import ArgumentError, BodyError, describe, format_path, listed
from ..core.graph import build, pack
from ..core.graphdef import structural_differences
from ..core.iteration import iter_objects
from ..core.layout import Layout
from ..core.module import Module
from ..core.objects import Node, new_node
from ..core.ops import clone, update
from ..core.ops import state as state_of
from ..core.placement import placed_stack
from ..core.rngs import Rngs, RngStream
from ..core.state import from_flat_state, to_flat_state
from ..core.values import as_stored
from ..core.variables import Variable, plain_value
from ..transforms.axes import PARTITION_NAME, AxisName, strip_axes
from ..transforms.prefixes import StateAxes
from ..transforms.remat_scan import check_lengths, is_length, remat_scan
from ..transforms.scan import Carry, scan
from ..transforms.vmap import vmap

S = TypeVar("S", bound="Stack")


class Stack(Module):
    """A stack of layers of one kind, each with parameters of its own, applied by a compiled loop.

    Args:
      make_layer: makes one layer, ``make_layer(rngs=rngs)``; without ``rngs``, ``make_layer()``.
      depth: the number of layers.
      rngs: random streams; each layer gets its own keys.
      remat: whether to compute what is inside a layer again in the backward pass, instead of keeping it. As a sequence
        of lengths whose product is ``depth``, such as ``(10, 10)``: nested, in memory that grows with the square root
        of the depth, see :func:`nnxlib.remat_scan`.
      policy: with ``remat``, which values to keep nevertheless: one of ``jax.checkpoint_policies``.
      unroll: how many layers to put into one step of the compiled loop; True for all.
      has_aux: whether a layer returns a pair ``(x, aux)``; then the stack does, with each ``aux`` stacked.
      partition: the name of the axis of the layers, in Variables that name their axes.

    Call it as you would call a layer: what a layer returns is the first argument of the next; all other arguments go
    to each layer as they are (arrays, Modules, and Python values, which stay Python values). State inside the layers
    (dropout, batch statistics, ``sow``), and in Modules among the arguments, changes as it would in a Python loop.
    What the layers are to share is passed to the call, too: a Variable in them becomes one for each.

    ``stack[3]`` is a layer, ``stack[2:5]`` a Stack, both with copies of the values; ``stack[3] = layer`` writes the
    values of a layer into the stack. ``for layer in stack`` goes over the layers.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> class Block(nnx.Module):
    ...   def __init__(self, features, *, rngs):
    ...     self.linear = nnx.Linear(features, features, rngs=rngs)
    ...   def __call__(self, x):
    ...     return x + nnx.relu(self.linear(x))
    >>> stack = nnx.Stack(lambda rngs: Block(4, rngs=rngs), 6, remat=True, rngs=nnx.Rngs(0))
    >>> stack.layers.linear.kernel.shape, stack(jnp.ones((1, 4))).shape
    ((6, 4, 4), (1, 4))
    >>> len(stack[2:5]), type(stack[3]).__name__, stack[3].linear.kernel.shape
    (3, 'Block', (4, 4))

    Raises:
      ArgumentError: if ``depth`` is not a positive number, or does not fit the lengths of ``remat``; or if
        ``make_layer`` does not return a Module that can be called.
      BodyError: when called, if a layer returns another shape, dtype or structure than it takes.
    """

    def __init__(
        self,
        make_layer: Callable[..., Any],
        depth: int,
        *,
        rngs: Rngs | RngStream | None = None,
        remat: bool | Sequence[int] = False,
        policy: Callable[..., bool] | None = None,
        unroll: int | bool = 1,
        has_aux: bool = False,
        partition: str | None = None,
    ):
        if not is_length(depth):
            raise ArgumentError(f"The depth of a Stack is the number of its layers, at least 1, but got {depth!r}.")
        if isinstance(make_layer, Module):
            raise ArgumentError(
                f"A Stack is given what makes its layers, but got a {type(make_layer).__name__}. Write "
                "nnx.Stack(lambda rngs: Layer(..., rngs=rngs), depth, rngs=rngs), or, of layers that exist, "
                "nnx.Stack.from_layers(layers)."
            )
        self._set_up(int(depth), remat, policy, unroll, has_aux, partition)
        if rngs is None:
            self.layers = _checked(vmap(lambda: make_layer(), **self._options())())
        else:
            self.layers = _checked(vmap(lambda rngs: make_layer(rngs=rngs), **self._options())(rngs.fork(split=depth)))

    @classmethod
    def from_layers(
        cls: type[S],
        layers: Sequence[Any],
        *,
        remat: bool | Sequence[int] = False,
        policy: Callable[..., bool] | None = None,
        unroll: int | bool = 1,
        has_aux: bool = False,
        partition: str | None = None,
    ) -> S:
        """Make a Stack of existing layers, with copies of their values; options as for the class.

        >>> import nnxlib as nnx
        >>> rngs = nnx.Rngs(0)
        >>> nnx.Stack.from_layers([nnx.Linear(2, 2, rngs=rngs) for _ in range(3)]).layers.kernel.shape
        (3, 2, 2)

        Raises:
          ArgumentError: if there are none, or they differ in structure or shape; says in what.
        """
        if not layers:
            raise ArgumentError("A Stack needs at least one layer.")
        packed = [pack(layer) for layer in layers]
        layout, first, _ = packed[0]
        for i, (other, leaves, _) in enumerate(packed):
            if other is not layout:
                found = list(structural_differences(layout, other))
            else:
                a, b = (dict(zip(layout.leaf_paths, values, strict=True)) for values in (first, leaves))
                found = leaf_differences(a, b)
            if found:
                head = f"The layers of a Stack have one structure and equal shapes, but layers 0 and {i} differ:"
                lines = [f"{format_path(x.path)}: {x.before} and {x.after}" for x in found]
                raise ArgumentError(listed(head, lines, "Make them all alike, or keep them in a list."))
        columns = zip(*(leaves for _, leaves, _ in packed), strict=True)
        stacked = [jax.tree.map(lambda *xs: jnp.stack([as_stored(x, {}) for x in xs]), *column) for column in columns]
        self = new_node(cls)
        self._set_up(len(layers), remat, policy, unroll, has_aux, partition)
        self.layers = _checked(vmap(lambda leaves: build(layout, leaves)[0], **self._options())(stacked))
        for _, x in iter_objects(self.layers):
            if isinstance(x, Variable):
                x.set_raw_value(placed_stack(plain_value(x), x.get_metadata(), type(x)))
        return self

    def _set_up(self, depth: int, remat: Any, policy: Any, unroll: Any, has_aux: bool, partition: str | None) -> None:
        if not isinstance(remat, bool):
            remat = check_lengths(remat)
            if math.prod(remat) != depth:
                raise ArgumentError(f"remat={remat} is for {math.prod(remat)} layers, but the Stack has {depth}.")
        self.depth, self.remat, self.policy, self.unroll = depth, remat, policy, unroll
        self.has_aux, self.partition = has_aux, partition

    def _metadata(self) -> Mapping[str, Any]:
        return {PARTITION_NAME: self.partition}

    def _options(self) -> dict[str, Any]:
        """Those of the ``vmap`` that makes the layers."""
        return {"axis_size": self.depth, "transform_metadata": self._metadata()}

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the layers, the first one to ``x``.

        Args:
          x: what a layer takes and returns: an array, or any pytree of arrays.
          *args: passed to each layer.
          **kwargs: passed to each layer.

        Returns:
          What the last layer returns; with ``has_aux``, a pair of that and the stacked ``aux`` of all layers.
        """
        positional, named = _parted(dict(enumerate(args))), _parted(kwargs)
        step = functools.partial(_step, static_args=positional[1], static_kwargs=named[1])
        options: dict[str, Any] = {
            "in_axes": (Carry, _AS_IN_A_LOOP, _LAYERS),
            "out_axes": (Carry, 0) if self.has_aux else Carry,
            "unroll": self.unroll,
            "transform_metadata": self._metadata(),
        }
        if self.remat:
            lengths = (self.depth,) if self.remat is True else self.remat
            forward = remat_scan(step, lengths=lengths, policy=self.policy, **options)
        else:
            forward = scan(step, length=self.depth, **options)
        try:
            return forward(x, (positional[0], named[0]), self)
        except BodyError as error:
            error.add_note("The layers of a Stack follow each other: each returns what the next one takes.")
            raise

    def __len__(self) -> int:
        return self.depth

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.depth))

    def __getitem__(self, index: int | slice) -> Any:
        layout, leaves, _ = pack(self.layers)
        if not isinstance(index, slice):
            i = self._position(index)
            leaves = [jax.tree.map(lambda x: x[i], leaf) for leaf in leaves]
            return _built(strip_axes(layout, leaves, [0] * len(leaves), AxisName(self.partition)), leaves)
        made = clone(self, variables=False)
        made.layers = _built(layout, [jax.tree.map(lambda x: x[index], leaf) for leaf in leaves])
        made.depth = len(range(self.depth)[index])
        made.remat = bool(self.remat) and made.depth > 0  # its lengths were for all layers
        return made

    def __setitem__(self, index: int, layer: Any) -> None:
        i = self._position(index)
        stacked, given = ({p: plain_value(x) for p, x in to_flat_state(state_of(m))} for m in (self.layers, layer))
        expected = {path: jax.tree.map(lambda x: x[i], value) for path, value in stacked.items()}
        refuse(leaf_differences(expected, given), "Not a layer of this Stack; nothing was written.", _FROM_LAYERS)
        values = {p: jax.tree.map(lambda x, y: x.at[i].set(y), value, given[p]) for p, value in stacked.items()}
        update(self.layers, from_flat_state(values))

    def _position(self, index: Any) -> int:
        i = operator.index(index)
        if not -self.depth <= i < self.depth:
            raise IndexError(f"There is no layer {i} in a Stack of {self.depth}.")
        return i % self.depth


_FROM_LAYERS = "Pass a layer built like those of the Stack; nnx.Stack.from_layers makes a Stack of others."
_LAYERS = StateAxes([(lambda path, leaf: path[0] == "layers", 0), (..., None)])  # of a whole Stack, for the paths
# A change of a Variable in the other arguments reaches the next layer; what does not change is passed whole.
_AS_IN_A_LOOP = StateAxes({Variable: Carry, ...: None})


def _built(layout: Layout, leaves: list[Any]) -> Any:
    """Layers of their own, made of these arrays; a Variable with ``ref=True`` keeps its own in a new ``jax.Ref``."""
    layers, objects = build(layout, leaves)
    for x in objects:
        if isinstance(x, Variable) and x.has_metadata("ref"):
            x.set_raw_value(as_stored(x.get_raw_value(), x.get_metadata()))
    return layers


def _checked(layers: Any) -> Any:
    if not (isinstance(layers, Node) and callable(layers)):
        raise ArgumentError(f"The layers of a Stack are Modules that can be called, not {describe(layers)}.")
    return layers


def _parted(values: dict[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The values that JAX is to trace, and those that are to stay as they are."""
    data = {key: value for key, value in values.items() if is_data(value)}
    return data, {key: value for key, value in values.items() if key not in data}


def _step(x: Any, data: tuple[dict, dict], stack: Stack, *, static_args: dict, static_kwargs: dict) -> Any:
    args, kwargs = data
    args = {**static_args, **args}
    return stack.layers(x, *(args[i] for i in range(len(args))), **static_kwargs, **kwargs)
