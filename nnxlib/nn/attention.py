"""Attention: dot products of queries and keys weigh values; many heads, and a cache to decode.

Shapes are written with these names: ``q_length`` queries look at ``kv_length`` keys, in ``heads`` heads of ``depth``
features. With *grouped queries* there are fewer heads of keys, ``kv_heads``, and each serves ``heads / kv_heads`` heads
of queries, consecutive ones. Leading axes are batch axes, of any number.

Three pure functions hold the arithmetic: scores of queries and keys, the softmax of what is not masked, and the
weighted sum of values. Scores and softmax are computed in float32 at least, whatever the inputs are. The functions are
made of compiled steps of a few operations: so an eager call is fast, and rounds as it would operation by operation
(core/formulas.py).

A *mask* is true (or not zero) where a query may look at a key. A query that may look at nothing gets the mean of all
values: finite, and with finite gradients; such rows are padding, whose output is to be ignored. Masks are made in
masks.py, and rotary positions are those of rotary.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.annotations import parameters_of
from ..core.errors import ArgumentError, UsageError, describe
from ..core.formulas import as_array, as_one, broadcasts, formula, product, step
from ..core.module import Module
from ..core.rngs import Rngs, RngStream
from ..core.tracing import Tracer
from ..core.variables import Cache, Intermediate
from . import initializers
from .dtypes import Array, Dtype, at_least_float32, convert, input_error, promote_dtype
from .initializers import Initializer
from .linear import LinearGeneral, kernel_shape
from .masks import combine_masks as combine_masks
from .masks import make_attention_mask as make_attention_mask
from .masks import make_causal_mask as make_causal_mask
from .norm import LayerNorm
from .rotary import RoPE as RoPE
from .settings import (
    NO_METADATA,
    NO_MODE,
    Metadata,
    aligned,
    as_tuple,
    check_sizes,
    default_kernel_init,
    frozen,
    given,
    next_key,
)

_NOTHING_TO_DROP_WITH = """\
`deterministic` is False, but MultiHeadAttention has no stream to draw from. Pass `rngs` to the call:
attention(x, rngs=rngs), or let the layer keep a stream: nnx.MultiHeadAttention(..., keep_rngs=True, rngs=rngs)."""

_NO_CACHE = """\
Autoregressive cache not initialized: before the first call with decode=True write
attention.init_cache((*batch, max_length, features)), or nnx.view(model, decode=True, batch_size=8, max_length=64)."""

_UNSAID_DECODE = """\
No `decode` argument was provided to MultiHeadAttention, which has a cache. Pass decode=True to continue the cached
sequence, or decode=False to leave the cache alone; to the call, to the constructor, or by model.set_attributes(...)."""


# --- the arithmetic ---------------------------------------------------------------------------------------------------


@product("precision")
def _scores(query: Array, key: Array, precision: Any) -> Array:
    """``query . key / sqrt(depth)`` for each head: ``[..., heads, q_length, kv_length]``.

    Grouped queries are an axis of their own while they are multiplied with the one key that serves them.
    """
    *batch, q_length, heads, depth = query.shape
    kv_heads = key.shape[-2]
    if kv_heads != heads:
        query = jnp.reshape(query, (*batch, q_length, kv_heads, heads // kv_heads, depth))
    paired = (*range(len(batch)), len(batch) + 1)
    dimensions = (((query.ndim - 1,), (key.ndim - 1,)), (paired, paired))
    wide = at_least_float32(query.dtype)
    scores = lax.dot_general(query, key, dimensions, precision=precision, preferred_element_type=wide)
    if kv_heads != heads:  # [..., kv_heads, q_length, group, kv_length]
        scores = jnp.reshape(jnp.swapaxes(scores, -3, -2), (*batch, heads, q_length, key.shape[-3]))
    return scores * np.asarray(1 / math.sqrt(depth), scores.dtype)


@step()
def _biased(scores: Array, bias: Array) -> Array:
    return scores + aligned(bias, scores.ndim).astype(scores.dtype)


@product("is_causal", "dtype")
def _softmax(scores: Array, mask: Array | None, is_causal: bool, dtype: Any) -> Array:
    """The weights in ``dtype``; where a query may look at nothing, all scores are equal, and so are the weights."""
    allowed = None if mask is None else aligned(mask, scores.ndim).astype(bool)
    if is_causal:
        causal = aligned(jnp.tri(*scores.shape[-2:], dtype=bool), scores.ndim)
        allowed = causal if allowed is None else allowed & causal
    if allowed is not None:
        scores = jnp.where(allowed, scores, jnp.finfo(scores.dtype).min)
    return jax.nn.softmax(scores, axis=-1).astype(dtype)


@step("broadcast", "dtype")
def _dropped(weights: Array, rng: Array, keep: Any, broadcast: bool, dtype: Any) -> Array:
    """The weights after dropout: zero, or divided by the probability ``keep`` of not being dropped."""
    shape = (1,) * (weights.ndim - 2) + weights.shape[-2:] if broadcast else weights.shape
    kept = as_one(jax.random.bernoulli, rng, keep, shape).astype(weights.dtype)
    return (weights * (kept / keep)).astype(dtype)


@formula("is_causal", "broadcast_dropout", "precision")
def _weights(
    query: Array,
    key: Array,
    bias: Array | None,
    mask: Array | None,
    dropout_rng: Array | None,
    keep: Any,
    *,
    is_causal: bool,
    broadcast_dropout: bool,
    precision: Any,
) -> tuple[Array, Array]:
    """The weights before and after dropout; those before are in the dtype of the scores if there is dropout."""
    scores = _scores(query, key, precision)
    if bias is not None:
        scores = _biased(scores, bias)
    weights = _softmax(scores, mask, is_causal, query.dtype if dropout_rng is None else scores.dtype)
    if dropout_rng is None:
        return weights, weights
    return weights, _dropped(weights, dropout_rng, keep, broadcast_dropout, query.dtype)


@product("precision")
def _weighted_sum(weights: Array, value: Array, precision: Any) -> Array:
    """Sum the values with their weights: ``[..., q_length, heads, depth]``."""
    *batch, heads, q_length, kv_length = weights.shape
    kv_heads, depth = value.shape[-2:]
    if kv_heads != heads:
        weights = jnp.reshape(weights, (*batch, kv_heads, heads // kv_heads, q_length, kv_length))
    n = len(batch)
    paired = ((*range(n), n), (*range(n), n + 1))
    out = lax.dot_general(weights, value, (((weights.ndim - 1,), (n,)), paired), precision=precision)
    if kv_heads != heads:
        out = jnp.reshape(out, (*batch, heads, q_length, depth))
    return jnp.swapaxes(out, -3, -2)


# --- the functions ----------------------------------------------------------------------------------------------------


def dot_product_attention_weights(
    query: Array,
    key: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: Any = None,
    module: Module | None = None,
    promote_dtype: Callable[..., Any] = promote_dtype,
    is_causal: bool = False,
) -> Array:
    """Return how much each query looks at each key: ``softmax(query @ key.T / sqrt(depth) + bias)`` over the keys.

    Arguments as in :func:`nnxlib.dot_product_attention`, without the values.

    Returns:
      Weights ``[..., heads, q_length, kv_length]`` that sum to 1 over the keys (before dropout).

    >>> import jax.numpy as jnp
    >>> from nnxlib.nn.attention import dot_product_attention_weights
    >>> x = jnp.zeros((4, 1, 4))
    >>> dot_product_attention_weights(x[:2], x, mask=jnp.array([1, 0, 0, 1]))
    Array([[[0.5, 0. , 0. , 0.5],
            [0.5, 0. , 0. , 0.5]]], dtype=float32)

    Raises:
      ValueError: as :func:`nnxlib.dot_product_attention`.
    """
    query, key = promote_dtype((query, key), dtype=dtype)
    _check_shapes(query, key, key)
    bias, mask = _fitting("bias", bias, query, key), _fitting("mask", mask, query, key)
    keep = None
    if deterministic or dropout_rate == 0:
        dropout_rng = None
    else:
        _check_rate(dropout_rate)
        if dropout_rng is None:
            raise UsageError(
                f"dropout_rng is required for attention with dropout_rate={dropout_rate}: pass "
                "dropout_rng=rngs.dropout(), or deterministic=True, to drop nothing."
            )
        keep = 1.0 - dropout_rate
    before_dropout, weights = _weights(
        query,
        key,
        bias,
        mask,
        dropout_rng,
        keep,
        is_causal=is_causal,
        broadcast_dropout=broadcast_dropout,
        precision=frozen(precision),
    )
    if module is not None:
        module.sow(Intermediate, "attention_weights", convert(before_dropout, query.dtype))
    return weights


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: Any = None,
    module: Module | None = None,
    promote_dtype: Callable[..., Any] = promote_dtype,
    is_causal: bool = False,
) -> Array:
    """Return for each query the mean of the values, weighted by how well their keys fit the query.

    Vaswani et al., "Attention is all you need", https://arxiv.org/abs/1706.03762; grouped queries: Ainslie et al.,
    "GQA", https://arxiv.org/abs/2305.13245.

    Args:
      query: ``[..., q_length, heads, depth]``.
      key: ``[..., kv_length, kv_heads, depth]``, where ``kv_heads`` divides ``heads``.
      value: ``[..., kv_length, kv_heads, v_depth]``.
      bias: added to the scores; broadcasts to ``[..., heads, q_length, kv_length]``.
      mask: true or not zero where a query may look at a key; broadcasts as ``bias``. A query that may look at nothing
        gets the mean of all values.
      broadcast_dropout: whether all heads and examples drop the same weights.
      dropout_rng: the key to drop with.
      dropout_rate: probability of a weight to become zero, at least 0 and below 1.
      deterministic: whether to drop nothing.
      dtype: what to compute in (default: inferred from query, key and value); scores and softmax are float32 at least.
      precision: as in :func:`jax.lax.dot_general`.
      module: a Module that records the weights, before dropout:
        ``module.sow(nnx.Intermediate, 'attention_weights', weights)``.
      promote_dtype: what brings ``(query, key, value)`` to one dtype.
      is_causal: whether query ``i`` may only look at keys up to ``i``, in addition to the mask.

    Returns:
      ``[..., q_length, heads, v_depth]``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> values = jnp.arange(3.).reshape(3, 1, 1)
    >>> nnx.dot_product_attention(jnp.zeros((3, 1, 2)), jnp.zeros((3, 1, 2)), values, is_causal=True).ravel()
    Array([0. , 0.5, 1. ], dtype=float32)

    Raises:
      ValueError: if the shapes do not fit each other, the rate is not in [0, 1), or there is no key to drop with.
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    _check_shapes(query, key, value)
    weights = dot_product_attention_weights(
        query,
        key,
        bias,
        mask,
        broadcast_dropout,
        dropout_rng,
        dropout_rate,
        deterministic,
        query.dtype,
        precision,
        module,
        is_causal=is_causal,
    )
    return _weighted_sum(weights, value, frozen(precision))


def dot_product_attention_with_rope(
    query: Array,
    key: Array,
    value: Array,
    *,
    rope: Callable[..., Array],
    input_positions: Array | None = None,
    **kwargs: Any,
) -> Array:
    """Rotate queries and keys by their positions (see :class:`RoPE`), then :func:`dot_product_attention`.

    For ``MultiHeadAttention(attention_fn=functools.partial(nnx.dot_product_attention_with_rope, rope=rope))``. While
    decoding, the layer passes on the positions of the queries in its cache.

    Args:
      query: ``[..., q_length, heads, depth]``.
      key: ``[..., kv_length, kv_heads, depth]``.
      value: ``[..., kv_length, kv_heads, v_depth]``.
      rope: the rotation, a :class:`RoPE` or another function of an array ``[..., heads, length, depth]`` and of
        positions ``[..., 1, length]`` or None.
      input_positions: positions of the queries, ``[..., q_length]``, and of the keys if there are as many of them;
        by default, and for other numbers of keys, they are counted from 0.
      **kwargs: passed on.

    Returns:
      ``[..., q_length, heads, v_depth]``.

    >>> import functools, jax, nnxlib as nnx
    >>> fn = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=fn, rngs=nnx.Rngs(0))
    >>> layer(jax.numpy.ones((1, 3, 8)), is_causal=True).shape
    (1, 3, 8)

    Raises:
      ValueError: as :func:`dot_product_attention` and :class:`RoPE`.
    """
    same = np.shape(query)[-3:-2] == np.shape(key)[-3:-2]
    return dot_product_attention(
        _rotated(rope, query, input_positions),
        _rotated(rope, key, input_positions if same else None),
        value,
        **kwargs,
    )


def _rotated(rope: Callable[..., Array], x: Array, positions: Array | None) -> Array:
    """Rotate ``x`` of shape ``[..., length, heads, depth]``; a RoPE needs no transposes for that."""
    if isinstance(rope, RoPE) and type(rope).__call__ is RoPE.__call__:
        return rope._turn(x, positions, axis=-3)
    positions = None if positions is None else as_array(positions)[..., None, :]
    return jnp.swapaxes(rope(jnp.swapaxes(x, -3, -2), positions), -3, -2)


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    q, k, v = query.shape, key.shape, value.shape
    if len(q) < 3 or not len(q) == len(k) == len(v):
        problem = "all need the same rank, 3 or more: [..., length, heads, depth]"
    elif not q[:-3] == k[:-3] == v[:-3]:
        problem = "the batch dims, all before the last three, must match"
    elif q[-1] != k[-1]:
        problem = f"query and key depths must match, but are {q[-1]} and {k[-1]}"
    elif k[:-1] != v[:-1]:
        problem = "key and value lengths must match, and their numbers of heads"
    elif k[-2] == 0 or q[-2] % k[-2]:
        problem = f"the {q[-2]} heads of the query must be a multiple of the {k[-2]} heads of key and value"
    else:
        return
    raise UsageError(
        f"Attention got query {describe(query)}, key {describe(key)} and value {describe(value)}: {problem}."
    )


def _fitting(name: str, x: Any, query: Array, key: Array) -> Array | None:
    """A bias or a mask as an array, checked to broadcast to the weights."""
    if x is None:
        return None
    x, weights = as_array(x), _shape_of_weights(query, key)
    if not broadcasts(x.shape, weights):
        raise UsageError(
            f"The {name} of attention must broadcast to [..., heads, q_length, kv_length], here {list(weights)}, "
            f"but got {describe(x)}."
        )
    return x


def _shape_of_weights(query: Array, key: Array) -> tuple[int, ...]:
    """``[..., heads, q_length, kv_length]``."""
    return (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])


def _check_rate(rate: Any) -> None:
    if isinstance(rate, int | float | np.number) and not 0 <= rate < 1:
        raise UsageError(f"dropout_rate must be in the range [0, 1), but got {rate}.")


# --- the layer --------------------------------------------------------------------------------------------------------


class MultiHeadAttention(Module):
    """Attention between two sequences, or within one, in several heads.

    Queries, keys and values are linear maps of the inputs, :func:`dot_product_attention` lets each head look, and a
    linear map of all heads is the output. Vaswani et al., https://arxiv.org/abs/1706.03762.

    *Decoding.* With ``decode=True`` the layer continues a sequence: keys and values of what it has seen are kept in a
    cache that :meth:`init_cache` makes. A call may bring one token or many (a prompt, or a part of one); within them,
    each looks at itself and those before it. The outputs are those of one call on the whole sequence with
    ``is_causal=True``. A call that does not fit in what is left of the cache raises; where that cannot be known, as
    under ``jit``, its output and the outputs of all later calls are NaN, until ``init_cache``.

    Args:
      num_heads: number of heads of queries.
      in_features: size of the last axis of ``inputs_q``.
      qkv_features: number of features of all heads together (default: ``in_features``).
      out_features: size of the last axis of the output (default: ``in_features``).
      num_kv_heads: number of heads of keys and values, a divisor of ``num_heads`` (default: as many).
      in_kv_features: size of the last axis of ``inputs_k`` and ``inputs_v`` (default: ``in_features``).
      dtype: what to compute in (default: inferred from inputs and parameters).
      param_dtype: what parameters are stored in.
      broadcast_dropout: whether all heads and examples drop the same weights.
      dropout_rate: probability of an attention weight to become zero while training, at least 0 and below 1.
      deterministic: whether to drop nothing; ``None``: each call says. ``model.eval()`` sets it and ``model.train()``
        undoes that.
      precision: as in :func:`jax.lax.dot_general`.
      kernel_init, bias_init: initializers of the maps to queries, keys and values.
      out_kernel_init, out_bias_init: initializers of the map to the output (default: the same).
      use_bias: whether the linear maps add a bias.
      attention_fn: called as :func:`dot_product_attention`.
      decode: whether to decode; ``None``: each call says, and a layer without a cache does not.
      normalize_qk: whether queries and keys go through a :class:`LayerNorm` without bias; Dehghani et al., "Scaling
        vision transformers to 22 billion parameters", https://arxiv.org/abs/2302.05442.
      qkv_promote_dtype, out_promote_dtype, ln_promote_dtype: what brings operands to one dtype, in the maps to queries,
        keys and values, in that to the output, and in the LayerNorms.
      qkv_dot_general, out_dot_general, qkv_dot_general_cls, out_dot_general_cls: as in :class:`LinearGeneral`.
      rngs: the stream ``params`` gives two keys for each map; ``dropout`` is forked for dropout.
      keep_rngs: whether to keep that fork; if not, each call that drops needs ``rngs``.
      kernel_metadata, bias_metadata: metadata of the Params of the maps.
      out_kernel_metadata, out_bias_metadata: of those of the map to the output; if empty, that of the other maps.
      query_ln_scale_metadata, key_ln_scale_metadata: of those of the LayerNorms.

    Attributes: ``query``, ``key``, ``value``, ``out``, of class :class:`LinearGeneral`; ``query_ln`` and ``key_ln`` or
    ``None``; ``cached_key`` and ``cached_value``, Caches of shape ``[..., max_length, kv_heads, depth]``, and
    ``cache_index``, the number of tokens in them, or ``None``.

    >>> import nnxlib as nnx, jax, jax.numpy as jnp
    >>> layer = nnx.MultiHeadAttention(num_heads=2, in_features=4, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (1, 5, 4))
    >>> whole = layer(x, is_causal=True)
    >>> layer.init_cache(x.shape)
    >>> parts = [layer(part, decode=True) for part in (x[:, :3], x[:, 3:4], x[:, 4:])]
    >>> bool(jnp.allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-6))
    True

    Raises:
      ValueError: if ``num_heads`` does not divide ``qkv_features``, ``num_kv_heads`` does not divide ``num_heads``, or
        the rate is not in [0, 1).
    """

    cached_key: Cache[Array] | None = None  # of the class, for a layer whose Caches have been popped
    cached_value: Cache[Array] | None = None
    cache_index: Cache[Array] | None = None
    rngs: RngStream | None

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = initializers.zeros,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., Array] = dot_product_attention,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: Callable[..., Any] = promote_dtype,
        out_promote_dtype: Callable[..., Any] = promote_dtype,
        ln_promote_dtype: Callable[..., Any] = promote_dtype,
        qkv_dot_general: Callable[..., Array] | None = None,
        out_dot_general: Callable[..., Array] | None = None,
        qkv_dot_general_cls: Any = None,
        out_dot_general_cls: Any = None,
        rngs: Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Metadata = NO_METADATA,
        out_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
        out_bias_metadata: Metadata = NO_METADATA,
        query_ln_scale_metadata: Metadata = NO_METADATA,
        key_ln_scale_metadata: Metadata = NO_METADATA,
    ):
        self.num_heads = num_heads
        self.in_features = in_features
        self.qkv_features = in_features if qkv_features is None else qkv_features
        self.out_features = in_features if out_features is None else out_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.broadcast_dropout = broadcast_dropout
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.precision = frozen(precision)
        self.use_bias = use_bias
        self.attention_fn = attention_fn
        self.decode = decode
        self.normalize_qk = normalize_qk
        self.qkv_promote_dtype = qkv_promote_dtype
        self.out_promote_dtype = out_promote_dtype
        self.ln_promote_dtype = ln_promote_dtype
        self.qkv_dot_general = qkv_dot_general
        self.out_dot_general = out_dot_general
        self.qkv_dot_general_cls = qkv_dot_general_cls
        self.out_dot_general_cls = out_dot_general_cls
        check_sizes(num_heads=num_heads, num_kv_heads=self.num_kv_heads, qkv_features=self.qkv_features)
        if num_heads < 1 or self.num_kv_heads < 1:
            raise UsageError(f"num_heads and num_kv_heads have to be positive, got {num_heads}, {self.num_kv_heads}.")
        if self.qkv_features % num_heads:
            raise UsageError(
                f"Memory dimension ({self.qkv_features}) must be divisible by 'num_heads' heads ({num_heads}): choose "
                "another qkv_features or num_heads."
            )
        if num_heads % self.num_kv_heads:
            raise UsageError(f"num_heads ({num_heads}) must be divisible by num_kv_heads ({self.num_kv_heads}).")
        _check_rate(dropout_rate)
        self.head_dim = self.qkv_features // num_heads

        linear = functools.partial(
            LinearGeneral, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs
        )
        projection = functools.partial(
            linear,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=qkv_promote_dtype,
            dot_general=qkv_dot_general,
            dot_general_cls=qkv_dot_general_cls,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        norm = functools.partial(
            LayerNorm, use_bias=False, dtype=dtype, param_dtype=param_dtype, promote_dtype=ln_promote_dtype, rngs=rngs
        )
        self.query = projection(in_features, (num_heads, self.head_dim))
        self.key = projection(self.in_kv_features, (self.num_kv_heads, self.head_dim))
        self.value = projection(self.in_kv_features, (self.num_kv_heads, self.head_dim))
        self.query_ln = norm(self.head_dim, scale_metadata=query_ln_scale_metadata) if normalize_qk else None
        self.key_ln = norm(self.head_dim, scale_metadata=key_ln_scale_metadata) if normalize_qk else None
        self.out = linear(
            (num_heads, self.head_dim),
            self.out_features,
            axis=(-2, -1),
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
            bias_init=bias_init if out_bias_init is None else out_bias_init,
            promote_dtype=out_promote_dtype,
            dot_general=out_dot_general,
            dot_general_cls=out_dot_general_cls,
            kernel_metadata=out_kernel_metadata or kernel_metadata,
            bias_metadata=out_bias_metadata or bias_metadata,
        )
        self.rngs = rngs["dropout"].fork() if keep_rngs and dropout_rate > 0 else None
        self.cached_key = self.cached_value = self.cache_index = None

    def _nnx_sizes(self) -> str:
        heads = f"{self.num_heads} heads of {self.head_dim}"
        if self.num_kv_heads != self.num_heads:
            heads += f", {self.num_kv_heads} of keys"
        features = f"{self.in_features}"
        if self.in_kv_features != self.in_features:
            features += f" and {self.in_kv_features}"
        return f"{features}->{self.out_features}, {heads}"

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | None = None,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | Array | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Array | None = None,
    ) -> Array:
        """Attend from ``inputs_q`` to ``inputs_k`` and ``inputs_v``.

        Args:
          inputs_q: ``[..., q_length, in_features]``.
          inputs_k: ``[..., kv_length, in_kv_features]``; ``inputs_q`` by default.
          inputs_v: ``[..., kv_length, in_kv_features]``; ``inputs_k`` by default.
          mask: true or not zero where a query may look at a key; broadcasts to ``[..., heads, q_length, kv_length]``.
            While decoding ``kv_length`` is the length of the cache, and the mask is combined with what it holds.
          deterministic: overrides the attribute.
          decode: overrides the attribute.
          rngs: Rngs, stream or key to drop with instead of the layer's own stream.
          sow_weights: whether to record the weights, before dropout, as the Intermediate ``attention_weights``.
          is_causal: whether each position looks only at itself and those before it; while decoding always so.
          out_sharding: sharding of the output.
          qkv_sharding: sharding of queries, keys and values.
          input_positions: ``[..., q_length]``, passed on to ``attention_fn`` if given. While decoding, one that has a
            parameter of this name gets the positions of the queries in the cache by default.

        Returns:
          ``[..., q_length, out_features]``.

        Raises:
          LayerInputError: if an input does not fit the layer, another input, or the cache.
          ValueError: if ``inputs_v`` is given without ``inputs_k``, if it is not said whether to drop or to decode, or
            if there is no stream to draw from, or no cache to continue, or one of other heads.
        """
        inputs_k, inputs_v = self._inputs_of_keys_and_values(inputs_q, inputs_k, inputs_v)
        decode = self._decodes(decode)
        deterministic, dropout_rng = self._dropout(deterministic, rngs)

        # By name, and only if given: any Module may take the place of a projection.
        qkv_settings = given(out_sharding=qkv_sharding)
        query = self.query(inputs_q, **qkv_settings)
        key = self.key(inputs_k, **qkv_settings)
        value = self.value(inputs_v, **qkv_settings)
        query = query if self.query_ln is None else self.query_ln(query)
        key = key if self.key_ln is None else self.key_ln(key)
        cache = None
        if decode:
            query, key, value, index, mask, positions = self._extend_cache(inputs_q, query, key, value, mask)
            cache, is_causal = (key, value, index), False  # the mask says what is past
            if input_positions is None and _takes_positions(self.attention_fn):
                input_positions = positions
        elif mask is not None:
            self._check_mask(mask, query, key)
        attended = self.attention_fn(
            query,
            key,
            value,
            mask=mask,
            dropout_rng=dropout_rng,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=deterministic,
            dtype=self.dtype,
            precision=self.precision,
            module=self if sow_weights else None,
            is_causal=is_causal,
            **given(input_positions=input_positions),
        )
        out = self.out(attended, **given(out_sharding=out_sharding))
        if cache is not None:  # written last: a call that fails leaves the cache as it was
            for variable, new in zip((self.cached_key, self.cached_value, self.cache_index), cache):
                variable.set_value(new)  # type: ignore[union-attr]  # without a cache, extending it has raised
        return out

    def _inputs_of_keys_and_values(self, inputs_q: Array, inputs_k: Any, inputs_v: Any) -> tuple[Array, Array]:
        """The inputs of keys and values, as given or by default; checked to fit the layer and each other."""
        if inputs_k is None:
            if inputs_v is not None:
                raise UsageError(
                    "`inputs_k` cannot be None if `inputs_v` is not None: to use one input for keys and values pass it "
                    "as `inputs_k` and leave out `inputs_v`."
                )
            inputs_k = inputs_q
        inputs_v = inputs_k if inputs_v is None else inputs_v
        q, k, v = np.shape(inputs_q), np.shape(inputs_k), np.shape(inputs_v)
        if len(q) < 2:
            raise input_error(self, f"inputs_q of shape [..., length, {self.in_features}]", inputs_q)
        if k[:-2] != q[:-2] or len(k) != len(q):
            batch = ", ".join(map(str, q[:-2]))
            takes = f"inputs_k of shape [{batch + ', ' if batch else ''}length, {self.in_kv_features}]"
            raise input_error(self, f"{takes}, since inputs_q is {describe(inputs_q)}", inputs_k)
        if v[:-1] != k[:-1]:
            takes = f"inputs_v of shape {[*k[:-1], self.in_kv_features]}, since inputs_k is {describe(inputs_k)}"
            raise input_error(self, takes, inputs_v)
        return inputs_k, inputs_v

    def _check_mask(self, mask: Any, query: Array, key: Array) -> None:
        weights = _shape_of_weights(query, key)
        if not broadcasts(np.shape(mask), weights):
            raise input_error(
                self, f"a mask that broadcasts to [..., heads, q_length, kv_length] (here {[*weights]})", mask
            )

    def _decodes(self, decode: bool | None) -> bool:
        decode = self.decode if decode is None else decode
        if decode is None and self.cached_key is not None:
            raise UsageError(_UNSAID_DECODE)
        return bool(decode)

    def _dropout(self, deterministic: bool | None, rngs: Rngs | RngStream | Array | None) -> tuple[bool, Array | None]:
        """Whether to drop nothing, and else the key to drop with."""
        if self.dropout_rate == 0:
            return True, None
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise UsageError(NO_MODE.format("deterministic", "MultiHeadAttention"))
        if deterministic:
            return True, None
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise UsageError(_NOTHING_TO_DROP_WITH)
        return False, next_key(rngs, "dropout")

    def _extend_cache(self, inputs_q: Array, query: Array, key: Array, value: Array, mask: Any) -> tuple[Array, ...]:
        """Add new tokens to what is in the cache, which is not written yet.

        Returns the query; keys, values and index of the extended cache; the mask of what each query may look at in it;
        and the positions of the queries.
        """
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise UsageError(_NO_CACHE)
        keys, values, index = self.cached_key.get_value(), self.cached_value.get_value(), self.cache_index.get_value()
        length, new = keys.shape[-3], query.shape[-3]
        if key.shape[:-2] != query.shape[:-2] or key.shape[:-3] != keys.shape[:-3]:
            batch = "".join(f"{size}, " for size in keys.shape[:-3])
            takes = f"queries, keys and values of one shape [{batch}length, {self.in_features}] while decoding"
            raise input_error(self, f"{takes} (its cache is {describe(keys)})", inputs_q)
        if (key.shape[-2:], value.shape[-2:]) != (keys.shape[-2:], values.shape[-2:]):
            raise UsageError(
                f"The caches of MultiHeadAttention {self._nnx_sizes()} are {describe(keys)} and {describe(values)}, "
                f"but its keys and values are now {describe(key)} and {describe(value)}: make others with init_cache."
            )
        seen = 0 if isinstance(index, Tracer) else int(index)
        if seen + new > length:
            takes = f"up to {length} tokens in its cache, of which {seen} are used"
            raise input_error(self, f"{takes} (make a longer one, or start again, with init_cache)", inputs_q)
        if mask is not None:
            self._check_mask(mask, query, keys)
            mask = as_array(mask)
        return _extended(query, keys, values, index, key, value, mask)

    def init_cache(self, input_shape: Sequence[int], dtype: Dtype = jnp.float32) -> None:
        """Make an empty cache to decode with, or empty the present one.

        Args:
          input_shape: ``(*batch, max_length, features)``, the shape of the inputs of a call on whole sequences.
          dtype: what keys and values are stored in.

        >>> import nnxlib as nnx
        >>> layer = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
        >>> layer.init_cache((3, 5, 4))
        >>> layer.cached_key.shape, int(layer.cache_index)
        ((3, 5, 2, 2), 0)

        Raises:
          TypeError: if it is not a shape.
          ValueError: if the shape has fewer than two axes.
        """
        if not isinstance(input_shape, Sequence | np.ndarray):
            raise ArgumentError(
                f"init_cache takes a shape (*batch, max_length, features), but got {describe(input_shape)}. Of an "
                "array pass array.shape."
            )
        if len(input_shape) < 2:
            raise UsageError(f"init_cache takes a shape (*batch, max_length, features), but got {tuple(input_shape)}.")

        def cache(projection: Any) -> Cache[Array]:
            shape = kernel_shape(projection)  # the kernel may have been replaced by one of fewer heads
            heads = (self.num_kv_heads, self.head_dim) if shape is None else shape[-2:]
            return Cache(initializers.zeros(None, (*input_shape[:-1], *heads), dtype))

        self.cached_key, self.cached_value = cache(self.key), cache(self.value)
        self.cache_index = Cache(initializers.zeros(None, (), jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Set what :func:`nnxlib.view` may set on this layer; ``batch_size`` and ``max_length`` make a new cache.

        Raises:
          ValueError: if only one of ``batch_size`` and ``max_length`` is given.
        """
        if (batch_size is None) != (max_length is None):
            raise UsageError(
                "The cache of MultiHeadAttention needs both `batch_size` and `max_length`, but got "
                f"{batch_size} and {max_length}."
            )
        if batch_size is not None and max_length is not None:  # first, since it may refuse the sizes
            dtype = self.param_dtype if self.dtype is None else self.dtype
            self.init_cache((*as_tuple(batch_size), max_length, self.in_features), dtype)
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode


@step()
def _extended(
    query: Array, keys: Array, values: Array, index: Array, key: Array, value: Array, mask: Array | None
) -> tuple[Array, ...]:
    """Write keys and values into the cache from ``index`` on; each query may look at what is there and before it.

    The query becomes NaN where the cache overflows: ``dynamic_update_slice`` moves what does not fit, silently.
    """
    length, new = keys.shape[-3], key.shape[-3]
    start = [index if axis == keys.ndim - 3 else jnp.zeros_like(index) for axis in range(keys.ndim)]
    keys = lax.dynamic_update_slice(keys, key.astype(keys.dtype), start)
    values = lax.dynamic_update_slice(values, value.astype(values.dtype), start)
    positions = index + jnp.arange(new, dtype=index.dtype)
    past = jnp.arange(length, dtype=index.dtype)[None, :] <= positions[:, None]
    past = jnp.broadcast_to(aligned(past, keys.ndim), (*keys.shape[:-3], 1, new, length))
    if mask is not None:
        past = past & aligned(mask, keys.ndim).astype(bool)
    query = jnp.where(index + new <= length, query, jnp.asarray(np.nan, query.dtype))
    return query, keys, values, index + new, past.astype(jnp.float32), positions


def _takes_positions(attention_fn: Any) -> bool:
    """Whether a function or a callable object, or what a partial or wrapper calls, has a parameter for positions."""
    return any(parameter.name == "input_positions" for parameter in parameters_of(attention_fn))
