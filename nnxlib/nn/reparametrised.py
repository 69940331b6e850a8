"""Layers whose weights are normalised at each call: SpectralNorm and WeightNorm.

Both wrap a Module and call it with other weights than it holds. The call is a crossing, as in any transform (see
``transforms/lift.py``) with no JAX transformation in the middle: it runs on a copy of the wrapper's objects, in which
the weights are replaced, and all other changes are committed to the live objects. So the Params are read and never
written, whatever happens in the call, and gradients reach them through the normalisation. As the live objects are not
touched in the meantime, calls in several threads do not disturb one another.

A weight that is used in several places is one Variable, and is normalised once, under its first path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import all_leaves

from ..core.calls import call_listening, listened, listener_for, note_paths
from ..core.containers import Dict
from ..core.data import is_bound_method, is_node
from ..core.errors import ArgumentError, EmptySelectionError, Path, UsageError, describe, format_path
from ..core.escapes import without_escapes
from ..core.filters import Filter, PathContains, to_predicate
from ..core.formulas import step
from ..core.graph import Delta, build, commit, diff
from ..core.iteration import iter_objects
from ..core.live_table import LiveTable
from ..core.module import Module
from ..core.packing import pack_live
from ..core.rngs import Rngs
from ..core.rows import LEAF
from ..core.stamps import Stamp
from ..core.tables import table_of
from ..core.tracing import at_top_level
from ..core.variables import BatchStat, Param
from ..core.walk import ObjectList
from ..transforms.lift import Arguments, cross
from . import initializers
from .dtypes import Array, Dtype, at_least_float32, convert, promote_dtype
from .initializers import Initializer
from .norm import squared
from .settings import as_tuple, frozen, key_of


class _Reparametrised(Module):
    """A wrapper that calls a Module with other weights than it holds."""

    layer_instance: Module

    def _call_with(self, weights_of: Callable[[Any], list[tuple[Param, Array]]], args: tuple, kwargs: dict) -> Any:
        """Call the layer with the weights that ``weights_of`` gives for the Params of a copy of this wrapper."""

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # self is the copy
            weights = weights_of(self)
            own = [param.get_raw_value() for param, _ in weights]
            for param, value in weights:
                param.set_raw_value(value)
            out = self.layer_instance(*args, **kwargs)
            for (param, _), value in zip(weights, own, strict=True):
                param.set_raw_value(value)  # so that it counts as unchanged
            return out

        if at_top_level() and not listened() and not _holds_objects((args, kwargs)):
            table = table_of(self)
            leaves = table.leaves()
            if table.reliable and table.layout.blueprint.reliable and all_leaves(leaves):
                return _call_eagerly(call, self, table, leaves, args, kwargs)
        packed = pack_live(Arguments((self, *args), kwargs))
        _, after = cross(call, packed.layout, packed.leaves)
        return commit(packed.layout, after.delta, after.leaves, packed.objects)


def _call_eagerly(call: Callable, wrapper: Module, table: LiveTable, leaves: list, args: tuple, kwargs: dict) -> Any:
    """The crossing where nobody follows the call, the wrapper has arrays in Variables only, and no argument is a node.

    Such a wrapper need not be walked, since it has a table. Afterwards the copies are walked only if the structure of
    one of them has changed, or the output may hold one; else only values of Variables can have changed.
    """
    layout, live = table.layout, ObjectList(table.objects_with(wrapper))
    note_paths(layout, live)
    stamp = Stamp()
    objects = build(layout, leaves, stamp=stamp)[1]  # no local variable: an error would name the copy by it
    out = call_listening(listener_for(layout, objects, depth=0), call, objects[0], *args, **kwargs)
    if not stamp.valid or _holds_objects(out):
        after = without_escapes(diff(layout, leaves, objects, out), layout, ())
        return commit(layout, after.delta, after.leaves, live)
    values = [objects[i].get_raw_value() for i in layout.variables]
    changed = [k for k, value in enumerate(values) if value is not leaves[k]]
    delta = Delta(tuple([layout.variables[k] for k in changed]), (), LEAF)
    return commit(layout, delta, [*(values[k] for k in changed), out], live)


def _holds_objects(tree: Any) -> bool:
    """Whether there is a node or Variable in a pytree, or a method bound to a node."""
    return any(is_node(x) or is_bound_method(x) for x in jax.tree.leaves(tree, is_leaf=is_node))


def _params(module: Module) -> list[tuple[Path, Param]]:
    if isinstance(module, type):
        raise ArgumentError(f"What is normalised is a layer, but got the class {module.__name__}; make one of it.")
    return [(path, x) for path, x in iter_objects(module) if isinstance(x, Param)]


def _describe_params(module: Module) -> str:
    return ", ".join(f"{format_path(path)} ({describe(x.get_raw_value())})" for path, x in _params(module)) or "none"


def _has_changed(wrapper: Any, path: Path, weight: Array) -> UsageError:
    name = f"{type(wrapper.layer_instance).__name__}.{format_path(path)}"
    return UsageError(
        f"{type(wrapper).__name__}: {name} is {describe(weight)}, and had another shape when it was wrapped. Wrap the "
        "layer again."
    )


def _is_new(wrapper: Any, path: Path, what: str) -> UsageError:
    return UsageError(
        f"{type(wrapper).__name__} has no {what} for {format_path(path)}: {type(wrapper.layer_instance).__name__} did "
        "not have this Param when it was wrapped. Wrap the layer again."
    )


@step("n_steps", "eager")
def _spectral(weight: Array, u: Array, n_steps: int, epsilon: Any, eager: bool) -> tuple[Array, Array, Array]:
    """The weight divided by its largest singular value ``sigma``; and ``u`` and ``sigma``, for the next call."""
    wide = weight.astype(at_least_float32(weight.dtype))
    matrix = lax.collapse(wide, 0, wide.ndim - 1)
    u = v = u.astype(wide.dtype)
    for _ in range(n_steps):
        v = _unit(u @ matrix.T, None, epsilon, eager)
        u = _unit(v @ matrix, None, epsilon, eager)
    u, v = lax.stop_gradient((u, v))
    sigma = (v @ matrix @ u.T)[0, 0]
    return wide / jnp.where(sigma == 0, 1, sigma), u, lax.stop_gradient(sigma)


def _unit(x: Array, axes: tuple[int, ...] | None, epsilon: Any, eager: bool) -> Array:
    """The array with norm 1 over the axes; eagerly, rounded as one operation at a time would."""
    apart = lax.optimization_barrier if eager else lambda x: x
    return apart(x * apart(lax.rsqrt(apart(jnp.sum(apart(squared(x)), axes, keepdims=True) + epsilon))))


class SpectralNorm(_Reparametrised):
    """A layer whose weights are divided by their largest singular value, so that each is a map of Lipschitz constant 1.

    The singular value ``sigma`` is found by power iteration: from ``u``, which is kept from call to call,
    ``v = u W^T / |u W^T|`` and ``u = v W / |v W|``, and then ``sigma = v W u^T``. A weight of more than two axes counts
    as a matrix with the last one as its columns. Miyato et al., "Spectral normalization for generative adversarial
    networks", https://arxiv.org/abs/1802.05957.

    The layer's own Params stay as they are: what is normalised exists for the call only.

    Args:
      layer_instance: the layer; all its Params of two axes or more are normalised.
      n_steps: number of power iterations at each call.
      epsilon: added to the squared norms of ``u`` and ``v``.
      dtype: dtype of the normalised weights (default: that of each weight).
      param_dtype: what ``u`` and ``sigma`` are stored in.
      error_on_non_matrix: whether a weight of more than two axes is an error.
      update_stats: whether a call stores ``u`` and ``sigma``. ``model.eval()`` turns that off, ``model.train()`` on.
      rngs: the stream ``params`` gives one key for the ``u`` of each weight.

    Attributes: ``layer_instance``; ``batch_stats``, which holds for the weight at ``path`` the BatchStats
    ``(*path, 'u')`` of shape ``[1, features]`` and ``(*path, 'sigma')``; ``use_running_average``, which is
    ``not update_stats``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.SpectralNorm(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), n_steps=10, rngs=nnx.Rngs(1))
    >>> kernel = layer.layer_instance.kernel.value
    >>> y = layer(jnp.eye(3))
    >>> float(jnp.linalg.norm(y, 2).round(3)), layer.layer_instance.kernel.value is kernel
    (1.0, True)

    Raises:
      ValueError: if a weight has more than two axes and ``error_on_non_matrix`` is set, or is not of a floating dtype.
      EmptySelectionError: if the layer has no Param of two axes or more.
    """

    def __init__(
        self,
        layer_instance: Module,
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        error_on_non_matrix: bool = False,
        update_stats: bool = True,
        rngs: Rngs,
    ):
        if n_steps < 1:
            raise UsageError(f"SpectralNorm needs one power iteration at least, but n_steps is {n_steps}.")
        self.layer_instance = layer_instance
        self.n_steps = n_steps
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.error_on_non_matrix = error_on_non_matrix
        self.use_running_average = not update_stats
        stats: dict[Any, BatchStat] = {}
        for path, param in _params(layer_instance):
            if param.ndim >= 2:
                self._check(path, param)
                u = initializers.normal()(key_of(rngs), (1, param.shape[-1]), param_dtype)
                stats[*path, "u"] = BatchStat(u)
                stats[*path, "sigma"] = BatchStat(initializers.ones(None, (), param_dtype))
        if not stats:
            raise EmptySelectionError(
                f"SpectralNorm finds nothing to normalise in {type(layer_instance).__name__}: it takes Params of two "
                f"axes or more, and there are: {_describe_params(layer_instance)}."
            )
        self.batch_stats: dict[Any, BatchStat] = Dict(stats)

    def _check(self, path: Path, param: Param) -> None:
        where = f"{type(self.layer_instance).__name__}.{format_path(path)}"
        if self.error_on_non_matrix and param.ndim > 2:
            raise UsageError(
                f"SpectralNorm: {where} is {param.ndim}D but error_on_non_matrix is True. Without it, such a weight "
                "counts as a matrix with the last axis as its columns."
            )
        if not jnp.issubdtype(param.dtype, jnp.floating):
            raise UsageError(f"SpectralNorm normalises real weights, but {where} is {describe(param.get_raw_value())}.")

    def __call__(self, x: Any, update_stats: bool | None = None, **kwargs: Any) -> Any:
        """Call the layer on ``x`` with normalised weights.

        Args:
          x: passed on.
          update_stats: whether to store ``u`` and ``sigma``; overrides the attribute.
          **kwargs: passed on.

        Raises:
          ValueError: if the layer has got a weight that it did not have when it was wrapped.
        """
        update = not self.use_running_average if update_stats is None else update_stats
        return self._call_with(lambda copy: copy._normalised(update), (x,), kwargs)

    def _normalised(self, update_stats: bool) -> list[tuple[Param, Array]]:
        found = []
        for path, param in _params(self.layer_instance):
            if (*path, "u") in self.batch_stats:
                kept_u, kept_sigma = self.batch_stats[*path, "u"], self.batch_stats[*path, "sigma"]
                weight = param.get_raw_value()
                if kept_u.shape[-1] != weight.shape[-1]:
                    raise _has_changed(self, path, weight)
                wide, u, sigma = _spectral(weight, kept_u.get_value(), self.n_steps, self.epsilon, at_top_level())
                found.append((param, convert(wide, jnp.dtype(weight.dtype if self.dtype is None else self.dtype))))
                if update_stats:
                    kept_u.set_value(convert(u, kept_u.dtype))
                    kept_sigma.set_value(convert(sigma, kept_sigma.dtype))
            elif param.ndim >= 2:
                raise _is_new(self, path, "singular value")
        return found


@step("axes", "eager")
def _unit_over(weight: Array, axes: tuple[int, ...], epsilon: Any, eager: bool) -> Array:
    """The weight with norm 1 over the axes, in float32 at least."""
    return _unit(weight.astype(at_least_float32(weight.dtype)), axes, epsilon, eager)


@step("shape", "dtype")
def _scaled(weight: Array, scale: Array | None, shape: tuple[int, ...], dtype: Any) -> Array:
    return (weight if scale is None else weight * jnp.reshape(scale, shape)).astype(dtype)


class WeightNorm(_Reparametrised):
    """A layer whose weights are given by a direction and a length: ``scale * W / |W|``, for each feature.

    Salimans & Kingma, "Weight normalization", https://arxiv.org/abs/1602.07868. The layer's own Params give the
    direction and stay as they are: what is normalised exists for the call only.

    Args:
      layer_instance: the layer.
      feature_axes: the axes of a weight along which each index has its own length; ``None``: one length for the whole
        weight.
      use_scale: whether lengths are learned; else they are 1.
      scale_init: initializer of the scales.
      epsilon: added to the squared norm.
      dtype: dtype of the normalised weights (default: inferred from weight and scale).
      param_dtype: what the scales are stored in.
      variable_filter: which of the layer's Params are normalised.
      promote_dtype: what brings ``(weight, scale)`` to one dtype.
      rngs: the stream ``params`` gives one key for each scale; none for the default initializer.

    Attributes: ``layer_instance``, and ``scales``, which holds a Param for each weight under its path, of the sizes of
    ``feature_axes``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> layer = nnx.WeightNorm(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    >>> kernel = layer.layer_instance.kernel.value
    >>> y = layer(jnp.eye(3))
    >>> jnp.linalg.norm(y, axis=0).round(3), layer.layer_instance.kernel.value is kernel
    (Array([1., 1., 1., 1.], dtype=float32), True)

    Raises:
      ValueError: if a weight does not have the feature axes.
      EmptySelectionError: if the filter takes none of the layer's Params.
    """

    def __init__(
        self,
        layer_instance: Module,
        *,
        feature_axes: int | Sequence[int] | None = -1,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        variable_filter: Filter = PathContains("kernel"),  # noqa: B008  # a frozen record
        promote_dtype: Callable[..., Any] = promote_dtype,
        rngs: Rngs,
    ):
        self.layer_instance = layer_instance
        self.feature_axes = frozen(feature_axes)
        self.use_scale = use_scale
        self.scale_init = scale_init
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.variable_filter = frozen(variable_filter)
        self.promote_dtype = promote_dtype
        takes = to_predicate(self.variable_filter)
        chosen = [(path, param) for path, param in _params(layer_instance) if takes(path, param)]
        if not chosen:
            raise EmptySelectionError(
                f"WeightNorm finds nothing to normalise in {type(layer_instance).__name__}: variable_filter "
                f"{variable_filter!r} takes none of its Params, which are: {_describe_params(layer_instance)}."
            )
        scales: dict[Any, Param] = {}
        for path, param in chosen:
            shape = [param.shape[axis] for axis in self._feature_axes(path, param.ndim)]
            if use_scale:
                # Ones need no key, and drawing one would change the weights of the layers that are made next.
                key: Any = None if scale_init is initializers.ones else key_of(rngs)
                scales[path] = Param(scale_init(key, tuple(shape), param_dtype))
        self.scales: dict[Any, Param] = Dict(scales)

    def _feature_axes(self, path: Path, ndim: int) -> tuple[int, ...]:
        axes = () if self.feature_axes is None else as_tuple(self.feature_axes)
        if not all(-ndim <= axis < ndim for axis in axes):
            raise UsageError(
                f"WeightNorm: {type(self.layer_instance).__name__}.{format_path(path)} has {ndim} axes, and so not all "
                f"of feature_axes={self.feature_axes}. Give others, or leave it out with variable_filter."
            )
        return tuple(sorted({axis % ndim for axis in axes}))  # the order in which a weight has them

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the layer on ``x``, and whatever else is given, with normalised weights.

        Raises:
          ValueError: if the layer has got a weight that it did not have when it was wrapped.
        """
        return self._call_with(lambda copy: copy._normalised(), (x, *args), kwargs)

    def _normalised(self) -> list[tuple[Param, Array]]:
        found, takes = [], to_predicate(self.variable_filter)
        for path, param in _params(self.layer_instance):
            if takes(path, param):
                weight = param.get_raw_value()
                axes = self._feature_axes(path, weight.ndim)
                others = tuple([a for a in range(weight.ndim) if a not in axes])
                unit = _unit_over(weight, others, self.epsilon, at_top_level())
                weight, scale = self.promote_dtype((weight, self._scale(path)), dtype=self.dtype)
                if scale is not None and scale.shape != tuple([weight.shape[axis] for axis in axes]):
                    raise _has_changed(self, path, weight)
                shape = tuple([size if axis in axes else 1 for axis, size in enumerate(weight.shape)])
                found.append((param, _scaled(unit, scale, shape, weight.dtype)))
        return found

    def _scale(self, path: Path) -> Array | None:
        if not self.use_scale:
            return None
        if path not in self.scales:
            raise _is_new(self, path, "scale")
        return self.scales[path].get_value()
