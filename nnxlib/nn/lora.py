"""Low-rank adaptation: train a small change of a layer, and leave the layer as it is.

A layer whose kernel, as a matrix, is ``W`` of shape ``[in, out]`` becomes one with ``W + A B``, where ``A`` is
``[in, rank]`` and ``B`` is ``[rank, out]``. ``B`` starts as zero, so nothing changes at first, and only ``A`` and ``B``
are trained: they are of a type of their own, :class:`LoRAParam`. Hu et al., "LoRA: low-rank adaptation of large
language models", https://arxiv.org/abs/2106.09685.

- :class:`LoRA` is the product by itself, or around any function; :class:`LoRALinear` and :class:`LoRALinearGeneral` are
  layers that have one beside their kernel.
- :func:`add_lora` turns layers of a model into these, in place. A layer stays the same object, wherever it is shared,
  and its kernel keeps its path, so checkpoints of the base model still fit.
- :func:`merge_lora` adds the products to the kernels and turns the layers back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ..core.errors import EmptySelectionError, Path, UsageError, describe, format_path
from ..core.filters import Filter, to_predicate
from ..core.formulas import add, step
from ..core.generics import A
from ..core.iteration import iter_children, iter_objects
from ..core.module import Module
from ..core.objects import Node, set_child
from ..core.rngs import Rngs
from ..core.tracing import boundary
from ..core.variables import Param, Variable
from . import initializers
from .dtypes import Array, Dtype, at_least_float32, input_error, misfit, promote_dtype
from .initializers import Initializer
from .linear import Linear, LinearGeneral
from .settings import NO_METADATA, Metadata, as_tuple, drawn, given

default_a_initializer = initializers.he_uniform()
default_b_initializer = initializers.zeros


class LoRAParam(Param[A]):
    """A parameter of a low-rank adaptation.

    The filter that trains them alone, for gradients and optimizer:

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    >>> grads = nnx.grad(lambda layer: layer(jnp.ones(3)).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))(layer)
    >>> [path for path, _ in nnx.to_flat_state(grads)]
    [('lora', 'lora_a'), ('lora', 'lora_b')]
    """


@step()
def _product(x: Array, a: Array, b: Array) -> Array:
    return x @ a @ b


class LoRA(Module):
    """A product of low rank, ``x @ A @ B``, added to the output of a base if there is one.

    Args:
      in_features: size of the last axis of the input.
      lora_rank: number of columns of ``A`` and rows of ``B``.
      out_features: size of the last axis of the output.
      base_module: a Module or function, called on the input in the dtype of the computation; its output is added.
      dtype: what to compute in (default: inferred from input and parameters).
      param_dtype: what parameters are stored in.
      a_initializer, b_initializer: initializers; ``B`` is zeros by default, so that the base's output is unchanged.
      lora_param_type: type of the parameters.
      promote_dtype: what brings ``(inputs, lora_a, lora_b)`` to one dtype.
      rngs: the stream ``params`` gives one key for each parameter.
      a_metadata, b_metadata: metadata of the parameters.

    Attributes: ``lora_a`` of shape ``[in_features, lora_rank]``, ``lora_b`` of shape ``[lora_rank, out_features]``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> layer = nnx.LoRA(3, 2, 4, base_module=base, rngs=nnx.Rngs(1))
    >>> x = jnp.ones((16, 3))
    >>> bool((layer(x) == base(x)).all()), layer.lora_a.shape
    (True, (3, 2))
    """

    lora_a: Variable[Array]
    lora_b: Variable[Array]

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: Callable[..., Array] | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = default_b_initializer,
        lora_param_type: type[Variable] = LoRAParam,
        promote_dtype: Callable[..., Any] = promote_dtype,
        rngs: Rngs,
        a_metadata: Metadata = NO_METADATA,
        b_metadata: Metadata = NO_METADATA,
    ):
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.lora_param_type = lora_param_type
        self.base_module = base_module
        self.promote_dtype = promote_dtype
        a = drawn(a_initializer, rngs, (in_features, lora_rank), param_dtype)
        b = drawn(b_initializer, rngs, (lora_rank, out_features), param_dtype)
        self.lora_a = lora_param_type(a, **a_metadata)
        self.lora_b = lora_param_type(b, **b_metadata)

    def _nnx_sizes(self) -> str:
        return f"{self.in_features}->{self.lora_a.shape[-1]}->{self.out_features}"

    def __call__(self, x: Array, **kwargs: Any) -> Array:
        """Map ``x`` of shape ``[..., in_features]`` to ``[..., out_features]``; ``**kwargs`` go to the base.

        Raises:
          LayerInputError: if the last axis of the input does not fit.
          ValueError: if the base cannot be called, or its output is of another shape.
        """
        inputs, a, b = self.promote_dtype((x, self.lora_a.get_value(), self.lora_b.get_value()), dtype=self.dtype)
        if inputs.shape[-1:] != a.shape[:-1]:
            unlike = misfit("lora_a", a, self.in_features, a.shape[-1])
            raise input_error(self, f"inputs of shape [..., {a.shape[-2]}]{unlike}", x)
        out = _product(inputs, a, b)
        if self.base_module is None:
            return out
        if not callable(self.base_module) or isinstance(self.base_module, type):
            raise UsageError(f"`self.base_module` must be a layer or function, but is a {describe(self.base_module)}.")
        base = self.base_module(inputs, **kwargs)
        if base.shape != out.shape:
            raise UsageError(
                f"LoRA {self._nnx_sizes()} adds {describe(out)} to the output of its base, which is {describe(base)}: "
                "give it the base's sizes."
            )
        return add(out, base)


class LoRALinear(Linear):
    """A :class:`Linear` with a :class:`LoRA` beside its kernel: ``y = x @ kernel + bias + x @ A @ B``.

    Args:
      in_features: size of the last axis of the input.
      out_features: size of the last axis of the output.
      lora_rank, lora_param_dtype, lora_param_type, lora_promote_dtype: of the :class:`LoRA`.
      lora_dtype: what the :class:`LoRA` computes in (default: ``dtype``, as the Linear).
      a_initializer, b_initializer, a_metadata, b_metadata: of the :class:`LoRA`.
      rngs: the stream ``params`` gives keys for kernel and bias, then for ``A`` and ``B``.
      **kwargs: of the :class:`Linear`.

    Attributes: those of the Linear, and ``lora``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((16, 3))).shape, layer.kernel.shape, layer.lora.lora_a.shape
    ((16, 4), (3, 4), (3, 2))
    """

    lora: LoRA

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        lora_rank: int,
        lora_dtype: Dtype | None = None,
        lora_param_dtype: Dtype = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = default_b_initializer,
        lora_param_type: type[Variable] = LoRAParam,
        lora_promote_dtype: Callable[..., Any] = promote_dtype,
        rngs: Rngs,
        a_metadata: Metadata = NO_METADATA,
        b_metadata: Metadata = NO_METADATA,
        **kwargs: Any,
    ):
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        self.lora = LoRA(
            in_features,
            lora_rank,
            out_features,
            dtype=self.dtype if lora_dtype is None else lora_dtype,
            param_dtype=lora_param_dtype,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
            lora_param_type=lora_param_type,
            promote_dtype=lora_promote_dtype,
            rngs=rngs,
            a_metadata=a_metadata,
            b_metadata=b_metadata,
        )

    def __call__(self, x: Array, out_sharding: Any = None) -> Array:
        """Map ``x`` of shape ``[..., in_features]`` to ``[..., out_features]``.

        Raises:
          LayerInputError: if the last axis of the input does not fit the kernel.
        """
        return add(super().__call__(x, **given(out_sharding=out_sharding)), self.lora(x))


class LoRALinearGeneral(LinearGeneral):
    """A :class:`LinearGeneral` with a :class:`LoRA` beside its kernel; :func:`add_lora` makes them.

    The LoRA is one for the kernel as a matrix, ``[prod(in_features), prod(out_features)]``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> attention = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    >>> nnx.add_lora(attention, 3, filter=nnx.PathContains('out'), rngs=nnx.Rngs(1))
    [('out',)]
    >>> attention.out.kernel.shape, attention.out.lora.lora_a.shape, attention.out.lora.lora_b.shape
    ((2, 4, 8), (8, 3), (3, 8))
    """

    lora: LoRA

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Contract the axes ``axis`` of ``inputs``; the result is ``[..., *out_features]``.

        Raises:
          LayerInputError: if an axis of the input does not fit the kernel, or is missing.
        """
        y = super().__call__(inputs, **given(out_sharding=out_sharding))
        return add(y, self._lora_output(inputs))

    def _lora_output(self, inputs: Any) -> Array:
        x = jnp.asarray(inputs)
        axes = sorted([axis % x.ndim for axis in self.axis])
        x = jnp.moveaxis(x, axes, range(-len(axes), 0))
        batch = x.shape[: x.ndim - len(axes)]
        return jnp.reshape(self.lora(jnp.reshape(x, (*batch, -1))), (*batch, *self.kernel.shape[len(axes) :]))


# --- a whole model ----------------------------------------------------------------------------------------------------

_ADAPTED: dict[type, type] = {Linear: LoRALinear, LinearGeneral: LoRALinearGeneral}
_PLAIN = {adapted: plain for plain, adapted in _ADAPTED.items()}
_MERGEABLE = (LoRA, *_PLAIN)


@boundary
def add_lora(
    model: Any,
    rank: int,
    *,
    filter: Filter = Linear,
    rngs: Rngs,
    dtype: Dtype | None = None,
    param_dtype: Dtype | None = None,
    a_initializer: Initializer = default_a_initializer,
    b_initializer: Initializer = default_b_initializer,
    lora_param_type: type[Variable] = LoRAParam,
) -> list[Path]:
    """Give layers of a model a :class:`LoRA` each, in place; the outputs of the model stay the same.

    A Linear becomes a :class:`LoRALinear`, a LinearGeneral a :class:`LoRALinearGeneral`. Layers keep their identity, so
    that a shared one is adapted once, and their parameters keep their paths.

    Args:
      model: a Module, or anything that holds Modules.
      rank: rank of the adaptations.
      filter: which of the Linear and LinearGeneral layers to adapt: a type, ``nnx.PathContains('query')``, ``...`` for
        all, or any other filter.
      rngs: the stream ``params`` gives two keys for each layer, in the order of the paths.
      dtype: what the adaptations compute in (default: as the layer).
      param_dtype: what they are stored in (default: as the layer).
      a_initializer: of ``A``.
      b_initializer: of ``B``; with the default, zeros, outputs stay the same.
      lora_param_type: type of the parameters.

    Returns:
      The paths of the layers that were adapted.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> model = nnx.Sequential(nnx.Linear(2, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 1, rngs=nnx.Rngs(1)))
    >>> nnx.add_lora(model, 4, rngs=nnx.Rngs(2))
    [('layers', 0), ('layers', 2)]
    >>> len(nnx.state(model, nnx.LoRAParam).flat_state())
    4

    Raises:
      EmptySelectionError: if the filter selects no layer.
      ValueError: if it takes a layer that has a LoRA, is of a subclass of the two, has batch axes, or is
        a stack of layers. Nothing is changed then.
    """
    takes = to_predicate(filter)
    layers = [(path, x) for path, x in iter_objects(model) if isinstance(x, Linear | LinearGeneral)]
    chosen = [(path, x) for path, x in layers if takes(path, x)]
    if not chosen:
        known = ", ".join(f"{format_path(path)} ({type(x).__name__})" for path, x in layers) or "none"
        raise EmptySelectionError(
            f"filter={takes!r} selects no layer that can have a LoRA; Linear and LinearGeneral layers "
            f"of this {type(model).__name__}: {known}."
        )
    for path, layer in chosen:
        if problem := _not_adaptable(layer):
            raise UsageError(f"Cannot add a LoRA to {format_path(path)} ({type(layer).__name__}): {problem}")
    made = [
        LoRA(
            math.prod(layer.kernel.shape[: len(as_tuple(layer.in_features))]),
            rank,
            math.prod(layer.kernel.shape[len(as_tuple(layer.in_features)) :]),
            dtype=layer.dtype if dtype is None else dtype,
            param_dtype=layer.param_dtype if param_dtype is None else param_dtype,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
            lora_param_type=lora_param_type,
            rngs=rngs,
        )
        for _, layer in chosen
    ]
    for (_, layer), lora in zip(chosen, made):
        layer.__class__ = _ADAPTED[type(layer)]
        layer.lora = lora
    return [path for path, _ in chosen]


def _not_adaptable(layer: Any) -> str | None:
    if isinstance(layer, tuple(_PLAIN)):
        return "it has one; merge it first with nnx.merge_lora(model), or leave the layer out of the filter."
    if type(layer) not in _ADAPTED:
        return "its class may compute something else; put nnx.LoRA(..., base_module=layer) in its place."
    if isinstance(layer, LinearGeneral) and layer.batch_axis:
        return "it has batch axes, along which there is more than one kernel; leave it out of the filter."
    if layer.kernel.ndim > len(as_tuple(layer.in_features)) + len(as_tuple(layer.out_features)):
        return _STACKED.format(kernel=describe(layer.kernel.value))
    return None


_STACKED = """\
its kernel is {kernel}, so it is a stack of layers. Adapt what is in the stack:

    @nnx.vmap
    def adapt(layers, key):
        nnx.add_lora(layers, rank, rngs=nnx.Rngs(key))
    adapt(model.layers, jax.random.split(jax.random.key(0), n))"""


@boundary
def merge_lora(model: Any, *, filter: Filter = ...) -> list[Path]:
    """Add each LoRA to the kernel of its layer, and turn the layers back; the outputs stay the same up to rounding.

    A LoRALinear becomes a Linear, a LoRALinearGeneral a LinearGeneral: the same objects with a new kernel. A
    :class:`LoRA` around a Linear is replaced by that Linear in all that hold it. One without a base stays. Instances of
    subclasses are merged too, into the same plain classes. The sum is made in float32 at least, and stored in the dtype
    of the kernel.

    Args:
      model: a Module, or anything that holds Modules.
      filter: which of the layers with a LoRA to merge.

    Returns:
      The paths of the layers that were merged.

    >>> import nnxlib as nnx
    >>> layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    >>> nnx.merge_lora(layer), type(layer).__name__
    ([()], 'Linear')

    Raises:
      ValueError: if a LoRA is around something other than a Linear of its sizes, if others use that Linear, or the
        kernel, without it, if nothing holds it in which it could be replaced, or if the class of a layer, or of its
        LoRA, has a forward of its own. Nothing is changed then.
    """
    takes = to_predicate(filter)
    nodes = list(iter_objects(model))
    chosen = [(path, x) for path, x in nodes if isinstance(x, _MERGEABLE) and takes(path, x)]
    beside = [(path, x) for path, x in chosen if not isinstance(x, LoRA)]
    around = [(path, x) for path, x in chosen if isinstance(x, LoRA) and x.base_module is not None]
    holders: dict[int, list[tuple[Any, Any]]] = {}
    for _, node in nodes:
        if isinstance(node, Node):
            for key, child in iter_children(node):
                holders.setdefault(id(child), []).append((node, key))
    for path, layer in beside + around:
        if problem := _not_mergeable(layer, holders):
            raise UsageError(f"Cannot merge the LoRA at {format_path(path)}: {problem}")
    pairs = [(layer, layer.lora) for _, layer in beside] + [(wrapper.base_module, wrapper) for _, wrapper in around]
    kernels = [_with_lora(layer, lora) for layer, lora in pairs]  # all of them, since this may fail
    for (layer, _), kernel in zip(pairs, kernels):
        layer.kernel.set_value(kernel)
    for _, layer in beside:
        layer.__class__ = _PLAIN[_library_class(layer)]
        del layer.lora
    for _, wrapper in around:
        for node, key in holders[id(wrapper)]:
            set_child(node, key, wrapper.base_module)
    return [path for path, _ in beside + around]


def _library_class(layer: Any) -> type:
    return next(cls for cls in _MERGEABLE if isinstance(layer, cls))


def _not_mergeable(layer: Any, holders: dict[int, list[tuple[Any, Any]]]) -> str | None:
    cls, base = _library_class(layer), layer
    for x, plain in [(layer, cls)] if cls is LoRA else [(layer, cls), (layer.lora, LoRA)]:
        if type(x).__call__ is not plain.__call__:
            return (
                f"{type(x).__name__} has a __call__ of its own, and may compute something else than {plain.__name__}; "
                "leave it out of the filter."
            )
    if isinstance(layer, LoRA):
        base = layer.base_module
        if type(base) is not Linear:
            return f"it is around a {type(base).__name__}, and only the kernel of a Linear can take it up."
        a, b = layer.lora_a.shape, layer.lora_b.shape
        if base.kernel.shape != (*a[:-1], b[-1]):
            return f"it has the sizes {a[-2]}->{a[-1]}->{b[-1]}, but the kernel of its Linear {describe(base.kernel)}."
        if len(holders[id(base)]) > 1:
            return "others use its Linear without it, and would change; leave it out of the filter."
        held = holders.get(id(layer), [])
        if not held or any(isinstance(key, tuple) for _, key in held):
            return "it is the model itself, or in a tuple, where it cannot be replaced; hold it in a Module or List."
    if len(holders[id(base.kernel)]) > 1:
        return "others use its kernel without it, and would change; leave it out of the filter."
    return None


@step()
def _merged(kernel: Array, a: Array, b: Array) -> Array:
    wide = at_least_float32(kernel.dtype)
    change = jnp.reshape(a.astype(wide) @ b.astype(wide), kernel.shape)
    return (kernel.astype(wide) + change).astype(kernel.dtype)


def _with_lora(layer: Any, lora: LoRA) -> Array:
    return _merged(layer.kernel.get_value(), lora.lora_a.get_value(), lora.lora_b.get_value())
