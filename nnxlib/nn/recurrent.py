"""Recurrent networks: cells, the loop RNN over a sequence, and Bidirectional.

A *cell* is one step, ``(carry, x) -> (carry, y)``; its carry is what it remembers. ``initialize_carry`` makes the carry
to begin with, and ``num_feature_axes`` says how many of the last axes of the input are features.
:class:`RNN` scans a cell over the time axis of ``[*batch, time, *features]``, or of ``[time, *batch, *features]`` with
``time_major``. The four cells below are defined for vectors; any Module that has these three will do.

Sequences of different lengths are padded at the end. ``seq_lengths`` then says where each one ends: the carry that an
RNN returns is the one at that place, and a reversed sequence begins there. The outputs beyond it are meaningless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..core.errors import ArgumentError, EmptySelectionError, TraceContextError, UsageError, describe
from ..core.filters import Filter, to_predicate
from ..core.formulas import add, multiply, step
from ..core.iteration import iter_objects
from ..core.module import Module
from ..core.reseeding import split_rngs
from ..core.rngs import Rngs, RngStream
from ..core.tracing import varying_as
from ..transforms.prefixes import StateAxes
from ..transforms.scan import Carry as Scanned
from ..transforms.scan import scan
from . import initializers
from .activations import sigmoid, tanh
from .dtypes import Array, Dtype, at_least_float32, broadcast_together, input_error, promote_dtype
from .initializers import Initializer
from .linear import Linear, kernel_shape
from .settings import NO_METADATA, Metadata, default_bias_init, default_kernel_init, frozen

A = TypeVar("A")
Carry = Any
Output = Any  # a name of flax.nnx for the signatures of users' cells
Shape = tuple[int, ...]


def modified_orthogonal(key: Array, shape: Shape, dtype: Dtype = jnp.float32) -> Array:
    """Draw an orthogonal matrix in JAX's default dtype, since those of low precision have no QR decomposition.

    >>> import jax, jax.numpy as jnp
    >>> from nnxlib.nn.recurrent import modified_orthogonal
    >>> q = modified_orthogonal(jax.random.key(0), (3, 3), jnp.bfloat16)
    >>> q.dtype, jnp.abs(q.T @ q - jnp.eye(3)).max() < 0.02
    (dtype(bfloat16), Array(True, dtype=bool))
    """
    return _orthogonal(key, shape).astype(dtype)


_orthogonal = initializers.orthogonal()


def _orthogonal_in_dtype(key: Array, shape: Shape, dtype: Dtype) -> Array:
    """The same numbers, unless JAX has float64: drawn in the dtype of the kernel, or in float32 if that is lower."""
    return _orthogonal(key, shape, at_least_float32(jnp.dtype(dtype))).astype(dtype)


class RNNCellBase(Module):
    """Base class of cells. A subclass defines :meth:`initialize_carry`, :meth:`__call__` and ``num_feature_axes``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> class Sum(nnx.RNNCellBase):
    ...   num_feature_axes = 1
    ...   def initialize_carry(self, input_shape, rngs=None, carry_init=None):
    ...     return jnp.zeros(input_shape)
    ...   def __call__(self, carry, inputs):
    ...     return carry + inputs, carry + inputs
    >>> nnx.RNN(Sum())(jnp.ones((1, 3, 1))).ravel()
    Array([1., 2., 3.], dtype=float32)
    """

    def initialize_carry(
        self, input_shape: Shape, rngs: Rngs | RngStream | None = None, carry_init: Initializer | None = None
    ) -> Carry:
        """Return the carry to begin with, for inputs of shape ``input_shape = (*batch, *features)``."""
        raise NotImplementedError(_UNDEFINED.format(type(self).__name__, "initialize_carry(input_shape, rngs=None)"))

    def __call__(self, carry: Carry, inputs: Array) -> tuple[Carry, Array]:
        """Make one step: return the next carry and the output."""
        raise NotImplementedError(_UNDEFINED.format(type(self).__name__, "__call__(carry, inputs)"))

    @property
    def num_feature_axes(self) -> int:
        """How many of the last axes of an input are features; those before are batch axes."""
        raise NotImplementedError(_UNDEFINED.format(type(self).__name__, "num_feature_axes"))


_UNDEFINED = "{0} is an RNNCellBase without {1}; define it in the class."


class _VectorCell(RNNCellBase):
    """What the cells below have in common: one feature axis, and a carry of one or several vectors of one size."""

    in_features: int
    hidden_features: int
    dtype: Dtype | None
    param_dtype: Dtype
    carry_init: Initializer | None
    promote_dtype: Callable[..., Any]
    rngs: RngStream | None

    _maps = "dense_i", "dense_h"  # one of the linear maps of an input, and one of those of a vector

    def _nnx_sizes(self) -> str:
        return f"{self.in_features}->{self.hidden_features}"

    def _sizes(self) -> list[int]:
        """The sizes of an input and of a vector of the carry: those that kernels have now, if these are ours."""
        shapes = [kernel_shape(getattr(self, name, None)) for name in self._maps]
        declared = self.in_features, self.hidden_features
        return [size if shape is None else shape[-2] for shape, size in zip(shapes, declared, strict=True)]

    @property
    def num_feature_axes(self) -> int:
        """One: an input is ``[*batch, in_features]``."""
        return 1

    def initialize_carry(
        self, input_shape: Shape, rngs: Rngs | RngStream | None = None, carry_init: Initializer | None = None
    ) -> Any:
        """Return ``h`` of shape ``[*batch, hidden_features]`` for inputs of shape ``(*batch, in_features)``.

        Args:
          input_shape: shape of the input of one step.
          rngs: the stream ``carry`` gives one key for each vector; also for zeros, which need none, so that the keys
            drawn later are those of flax.nnx.
          carry_init: initializer to use instead of the cell's own.

        Raises:
          ValueError: if there is an initializer, and no stream to draw from.
        """
        return self._initial_vectors(1, input_shape, rngs, carry_init)[0]

    def _initial_vectors(
        self, count: int, input_shape: Shape, rngs: Rngs | RngStream | None, carry_init: Initializer | None
    ) -> tuple[Array, ...]:
        if not isinstance(input_shape, Sequence | np.ndarray):
            raise ArgumentError(
                f"initialize_carry takes the shape of an input, (*batch, {self.in_features}), but got "
                f"{describe(input_shape)}. Of an array pass array.shape."
            )
        shape = (*input_shape[:-1], self._sizes()[1])
        init = self.carry_init if carry_init is None else carry_init
        stream = rngs.carry if isinstance(rngs, Rngs) else rngs
        if init is None:
            if stream is not None:
                _use_up(stream, count)
            return (initializers.zeros(None, shape, self.param_dtype),) * count
        stream = self.rngs if stream is None else stream
        if stream is None:
            raise UsageError(
                f"RNGs must be provided to initialize the cell carry of {type(self).__name__} {self._nnx_sizes()} with "
                "its carry_init. Pass rngs=nnx.Rngs(0) to the call or to RNN, or keep_rngs=True to the cell."
            )
        return tuple([init(stream(), shape, self.param_dtype) for _ in range(count)])

    def _linear_maps(self, *kernels: tuple[Initializer, Metadata], **options: Any) -> list[Callable[..., Linear]]:
        """Functions that make linear maps of an input, and of a carry, given the initializer and metadata of each."""
        options |= {"dtype": self.dtype, "param_dtype": self.param_dtype, "promote_dtype": self.promote_dtype}
        sizes = zip((self.in_features, self.hidden_features), kernels, strict=True)
        partial = functools.partial
        return [partial(Linear, n, kernel_init=init, kernel_metadata=x, **options) for n, (init, x) in sizes]

    def _check(self, inputs: Array, *vectors: Array) -> None:
        """Check an input, and the vectors of a carry, whose batch axes may also be 1 or missing."""
        n_in, n_hidden = self._sizes()
        expected = (*inputs.shape[:-1], n_hidden)
        if inputs.shape[-1:] != (n_in,):
            raise input_error(self, f"inputs of shape [..., {n_in}]", inputs)
        for h in vectors:
            if not hasattr(h, "shape"):
                raise input_error(self, f"a carry of arrays {list(expected)}", h)
            if h.shape != expected and (h.shape[-1:] != expected[-1:] or not broadcast_together(h.shape, expected)):
                raise input_error(self, f"a carry of {list(expected)} with inputs of {list(inputs.shape)}", h)


def _of_the_batch(inputs: Array, time_axis: int, batch: Shape, carry: Any) -> Any:
    """A carry with the type that it has after a step: in a mesh, its batch is sharded like that of the inputs.

    A loop refuses a carry of another type; part of the type is a sharding, and whether an array varies over devices.
    """
    sharding = jax.typeof(inputs).sharding if isinstance(inputs, jax.Array) else None
    if sharding is None or sharding.mesh.empty:
        return carry
    spec = [*sharding.spec[:time_axis], *sharding.spec[time_axis + 1 :]][: len(batch)]

    def move(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.shape[: len(batch)] != batch:
            return x
        if any(spec):
            x = jax.sharding.reshard(x, PartitionSpec(*spec, *[None] * (x.ndim - len(batch))))
        return varying_as(x, inputs)

    return jax.tree.map(move, carry)


def _use_up(stream: RngStream, count: int) -> None:
    """Draw keys that nothing needs, so that later ones are those of flax.nnx; not where the stream is read-only."""
    with suppress(TraceContextError):
        for _ in range(count):
            stream()


# What cells compute besides their linear maps: steps, as in core/formulas.py.
@step("parts")
def _chunks(x: Array, parts: int) -> list[Array]:
    return jnp.split(x, parts, axis=-1)


@step()
def _two_products(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, Array]:
    return a * b, c * d


@step()
def _weighted(gate: Array, a: Array, b: Array) -> tuple[Array, Array]:
    return (1.0 - gate) * a, gate * b


class SimpleCell(_VectorCell):
    """The recurrent cell of Elman: ``h' = activation_fn(x @ W_i + b + h @ W_h)``; the output is ``h'``.

    Elman, "Finding structure in time", Cognitive Science 14 (1990).

    Args:
      in_features: size of an input.
      hidden_features: size of the carry and of the output.
      dtype: what the linear maps compute in (``None``: inferred from input and parameters).
      param_dtype: what parameters, and a fresh carry, are stored in.
      carry_init: initializer of the carry; ``None``: zeros.
      residual: whether ``h`` itself is added inside of the activation.
      activation_fn: the nonlinearity.
      kernel_init, recurrent_kernel_init, bias_init: initializers.
      promote_dtype: what brings inputs and parameters to one dtype.
      keep_rngs: whether to keep a fork of the stream ``carry``, for a ``carry_init`` that draws.
      rngs: the stream ``params`` gives one key for each kernel and bias.
      kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of the Params.

    Attributes: ``dense_i`` with the kernel ``[in_features, hidden_features]`` and the bias, ``dense_h`` with the
    kernel ``[hidden_features, hidden_features]``. The carry is ``h`` of shape ``[*batch, hidden_features]``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> cell = nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0))
    >>> h, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> h.shape, y is h
    ((2, 4), True)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: Dtype | None = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        residual: bool = False,
        activation_fn: Callable[..., Any] = tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = _orthogonal_in_dtype,
        bias_init: Initializer = default_bias_init,
        promote_dtype: Callable[..., Any] = promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.carry_init = carry_init
        self.residual = residual
        self.activation_fn = activation_fn
        self.promote_dtype = promote_dtype
        self.rngs = rngs.carry.fork() if keep_rngs else None
        kernels = (kernel_init, kernel_metadata), (recurrent_kernel_init, recurrent_kernel_metadata)
        of_input, of_carry = self._linear_maps(*kernels, bias_init=bias_init, bias_metadata=bias_metadata, rngs=rngs)
        self.dense_h = of_carry(hidden_features, use_bias=False)
        self.dense_i = of_input(hidden_features)

    def __call__(self, carry: Array, inputs: Array) -> tuple[Array, Array]:
        """Make one step with ``carry`` of shape ``[*batch, hidden_features]``, ``inputs`` ``[*batch, in_features]``.

        Raises:
          LayerInputError: if the shape of the input or of the carry does not fit.
        """
        self._check(inputs, carry)
        h = add(self.dense_i(inputs), self.dense_h(carry))
        h = self.activation_fn(add(h, carry) if self.residual else h)
        return h, h


class _GatedCell(_VectorCell):
    """A cell with gates. A subclass makes its linear maps in ``_make_maps``, from an input and from a carry."""

    _recurrent_init: Initializer = staticmethod(_orthogonal_in_dtype)

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = sigmoid,
        activation_fn: Callable[..., Any] = tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer | None = None,
        bias_init: Initializer = default_bias_init,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: Callable[..., Any] = promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.carry_init = carry_init
        self.promote_dtype = promote_dtype
        self.rngs = rngs.carry.fork() if keep_rngs else None
        recurrent_init = self._recurrent_init if recurrent_kernel_init is None else recurrent_kernel_init
        kernels = (kernel_init, kernel_metadata), (recurrent_init, recurrent_kernel_metadata)
        of_input, of_carry = self._linear_maps(*kernels, bias_init=bias_init, bias_metadata=bias_metadata, rngs=rngs)
        self._make_maps(of_input, of_carry)

    def _make_maps(self, of_input: Callable[..., Linear], of_carry: Callable[..., Linear]) -> None:
        """Make the linear maps; ``of_input(out_features, use_bias=...)`` is one of an input."""
        raise NotImplementedError


class _LongShortTermCell(_GatedCell):
    """A cell with the carry ``(c, h)``."""

    def initialize_carry(
        self, input_shape: Shape, rngs: Rngs | RngStream | None = None, carry_init: Initializer | None = None
    ) -> tuple[Array, Array]:
        """Return ``(c, h)``; see :meth:`SimpleCell.initialize_carry`."""
        c, h = self._initial_vectors(2, input_shape, rngs, carry_init)
        return c, h

    def _checked_pair(self, carry: tuple[Array, Array], inputs: Array) -> tuple[Array, Array]:
        if not (isinstance(carry, tuple | list) and len(carry) == 2):  # an array of two rows could be unpacked, too
            raise input_error(self, "a carry (c, h)", carry)
        c, h = carry
        self._check(inputs, c, h)
        return c, h

    def _remember(self, c: Array, i: Array, f: Array, g: Array, o: Array) -> tuple[tuple[Array, Array], Array]:
        """Keep part of ``c``, add to it, and show part of it; the arguments are what enters the gates."""
        gate, activation = self.gate_fn, self.activation_fn
        c = add(*_two_products(gate(f), c, gate(i), activation(g)))
        h = multiply(gate(o), activation(c))
        return (c, h), h


class LSTMCell(_LongShortTermCell):
    """Long short-term memory, with a kernel for each gate.

    Hochreiter & Schmidhuber, "Long short-term memory", Neural Computation 9 (1997), with the forget gate of Gers,
    Schmidhuber & Cummins (2000)::

        i = gate_fn(x @ W_ii + h @ W_hi + b_hi)         input gate
        f = gate_fn(x @ W_if + h @ W_hf + b_hf)         forget gate
        g = activation_fn(x @ W_ig + h @ W_hg + b_hg)   what is to be stored
        o = gate_fn(x @ W_io + h @ W_ho + b_ho)         output gate
        c' = f * c + i * g
        h' = o * activation_fn(c')

    Args:
      in_features: size of an input.
      hidden_features: size of ``c``, of ``h`` and of the output ``h'``.
      gate_fn, activation_fn: the nonlinearities.
      kernel_init, recurrent_kernel_init, bias_init: initializers, of each gate by itself.
      dtype: what the linear maps compute in (default: inferred from input and parameters).

    The other arguments are those of :class:`SimpleCell`.

    Attributes: the Linear maps ``ii, if_, ig, io`` of the input, without bias, and ``hi, hf, hg, ho`` of ``h``, with
    bias. The carry is ``(c, h)``, each of shape ``[*batch, hidden_features]``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> cell = nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0))
    >>> (c, h), y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> c.shape, h.shape, y is h
    ((2, 4), (2, 4), True)
    """

    _recurrent_init = staticmethod(modified_orthogonal)  # unlike the others in flax.nnx, too
    _maps = "ii", "hi"

    def _make_maps(self, of_input: Callable[..., Linear], of_carry: Callable[..., Linear]) -> None:
        features = self.hidden_features
        self.ii, self.if_, self.ig, self.io = [of_input(features, use_bias=False) for _ in range(4)]
        self.hi, self.hf, self.hg, self.ho = [of_carry(features) for _ in range(4)]

    def __call__(self, carry: tuple[Array, Array], inputs: Array) -> tuple[tuple[Array, Array], Array]:
        """Make one step with ``carry = (c, h)`` and ``inputs`` of shape ``[*batch, in_features]``.

        Raises:
          LayerInputError: if the shape of the input or of the carry does not fit.
        """
        c, h = self._checked_pair(carry, inputs)
        i = add(self.ii(inputs), self.hi(h))
        f = add(self.if_(inputs), self.hf(h))
        g = add(self.ig(inputs), self.hg(h))
        o = add(self.io(inputs), self.ho(h))
        return self._remember(c, i, f, g, o)


class OptimizedLSTMCell(_LongShortTermCell):
    """Long short-term memory with the kernels of all gates in one: the formulas of :class:`LSTMCell`, two products.

    The arguments are those of :class:`LSTMCell`; the initializers make the kernels of all gates at once.

    Attributes: ``dense_i`` with the kernel ``[in_features, 4 * hidden_features]``, ``dense_h`` with the kernel
    ``[hidden_features, 4 * hidden_features]`` and the bias; the gates in the order i, f, g, o.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> cell = nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
    >>> (c, h), y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> c.shape, cell.dense_i.kernel.shape
    ((2, 4), (3, 16))
    """

    def _make_maps(self, of_input: Callable[..., Linear], of_carry: Callable[..., Linear]) -> None:
        self.dense_i = of_input(4 * self.hidden_features, use_bias=False)
        self.dense_h = of_carry(4 * self.hidden_features)

    def __call__(self, carry: tuple[Array, Array], inputs: Array) -> tuple[tuple[Array, Array], Array]:
        """Make one step; see :meth:`LSTMCell.__call__`."""
        c, h = self._checked_pair(carry, inputs)
        return self._remember(c, *_chunks(add(self.dense_i(inputs), self.dense_h(h)), 4))


class GRUCell(_GatedCell):
    """A gated recurrent unit.

    Cho et al., "Learning phrase representations using RNN encoder-decoder", https://arxiv.org/abs/1406.1078, with the
    reset gate after the product::

        r = gate_fn(x @ W_ir + b_ir + h @ W_hr)               reset gate
        z = gate_fn(x @ W_iz + b_iz + h @ W_hz)               update gate
        n = activation_fn(x @ W_in + b_in + r * (h @ W_hn))   candidate
        h' = (1 - z) * n + z * h

    The arguments are those of :class:`OptimizedLSTMCell`.

    Attributes: ``dense_i`` with the kernel ``[in_features, 3 * hidden_features]`` and the bias, ``dense_h`` with the
    kernel ``[hidden_features, 3 * hidden_features]``; in the order r, z, n. The carry is ``h``, and so is the output.
    Linen and PyTorch add a bias to ``h @ W_hn``. To have it, put a ``Linear`` with a bias in the place of ``dense_h``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    >>> h, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> h.shape, cell.dense_h.kernel.shape
    ((2, 4), (4, 12))
    """

    def _make_maps(self, of_input: Callable[..., Linear], of_carry: Callable[..., Linear]) -> None:
        self.dense_i = of_input(3 * self.hidden_features)
        self.dense_h = of_carry(3 * self.hidden_features, use_bias=False)

    def __call__(self, carry: Array, inputs: Array) -> tuple[Array, Array]:
        """Make one step; see :meth:`SimpleCell.__call__`."""
        self._check(inputs, carry)
        gate = self.gate_fn
        (i_r, i_z, i_n), (h_r, h_z, h_n) = _chunks(self.dense_i(inputs), 3), _chunks(self.dense_h(carry), 3)
        n = self.activation_fn(add(i_n, multiply(gate(add(i_r, h_r)), h_n)))
        h = add(*_weighted(gate(add(i_z, h_z)), n, carry))
        return h, h


# --- over a sequence --------------------------------------------------------------------------------------------------


class RNNBase(Protocol):
    """What :class:`Bidirectional` takes: a Module that is called as an :class:`RNN` is."""

    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: Carry | None = None,
        rngs: Rngs | RngStream | None = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any: ...


def _kept_stream(rngs: Rngs | RngStream | bool) -> RngStream | None:
    """A fork of the stream ``carry``; ``True`` stands for one with the seed 0, ``False`` for none."""
    if isinstance(rngs, bool):
        return RngStream(0, tag="carry") if rngs else None
    if isinstance(rngs, Rngs | RngStream):
        return (rngs.carry if isinstance(rngs, Rngs) else rngs).fork()
    raise UsageError(f"rngs must be an Rngs, an RngStream, True or False, but got {type(rngs).__name__}.")


def _draws_carry(rnn: Any) -> bool:
    """Whether the first carry may be random; if it is zeros, an RNN does not write to its own stream."""
    cell: Any = getattr(rnn, "cell", None)
    of_zeros = (_VectorCell.initialize_carry, _LongShortTermCell.initialize_carry)
    initialize = getattr(cell, "initialize_carry", None)  # it may be an attribute of this very cell
    return getattr(initialize, "__func__", None) not in of_zeros or cell.carry_init is not None


def _draws(rnn: Any) -> bool:
    """Whether what runs in a Bidirectional may draw: one with a call of its own may, whatever its carry is."""
    return type(rnn).__call__ is not RNN.__call__ or _draws_carry(rnn)


class RNN(Module):
    """A cell, applied along the time axis of its input.

    Args:
      cell: a Module such as :class:`LSTMCell`, with what :class:`RNNCellBase` has.
      time_major: whether the time axis is the first of the input, and not the one after the batch axes.
      return_carry: whether to return ``(carry, outputs)``, and not the outputs only.
      reverse: whether to go from the end of each sequence to its beginning.
      keep_order: whether the outputs of a reversed run are put in the order of the inputs.
      unroll: how many steps to put into one iteration of the compiled loop.
      state_axes: what happens to the Variables of the cell, as in :func:`nnxlib.scan`; by default all are carried from
        step to step: ``nnx.StateAxes({...: nnx.Carry})``.
      broadcast_rngs: filter of the random streams in the cell that give each step the same keys: with ``'dropout'``,
        the dropout mask of a sequence is the same at each time (Gal & Ghahramani, https://arxiv.org/abs/1512.05287).
      rngs: where a cell that draws its initial carry draws it from; the RNN keeps a fork of the stream ``carry``.
        ``True`` is a stream with the seed 0, ``False`` none.

    The carry keeps its initial dtype.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> rnn = nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)))
    >>> rnn(jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    >>> (c, h), y = rnn(jnp.ones((2, 5, 3)), seq_lengths=jnp.array([2, 5]), return_carry=True)
    >>> bool((h[0] == y[0, 1]).all())
    True

    Raises:
      TypeError: if ``cell`` is a class.
      ValueError: if ``rngs`` is something else.
    """

    def __init__(
        self,
        cell: RNNCellBase,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int | bool = 1,
        state_axes: Mapping[Filter, Any] | None = None,
        broadcast_rngs: Filter | None = None,
        rngs: Rngs | RngStream | bool = True,
    ):
        if isinstance(cell, type):
            raise ArgumentError(f"RNN takes a cell, got the class {cell.__name__}; make one of it first.")
        self.cell = cell
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.unroll = unroll
        axes: Mapping[Filter, Any] = {...: Scanned} if state_axes is None else state_axes
        self.state_axes = axes if isinstance(axes, StateAxes) else StateAxes(axes)
        self.broadcast_rngs = frozen(broadcast_rngs)
        self.rngs = _kept_stream(rngs)

    def _nnx_sizes(self) -> str:
        sizes = getattr(type(self.cell), "_nnx_sizes", None)
        name = type(self.cell).__name__
        return f"of {name}" if sizes is None else f"of {name} {sizes(self.cell)}"

    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: Carry | None = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Rngs | RngStream | None = None,
    ) -> Any:
        """Run the cell over sequences.

        Args:
          inputs: the sequences, ``[*batch, time, *features]``, or ``[time, *batch, *features]`` with ``time_major``.
          initial_carry: the carry to begin with; by default what the cell initializes.
          seq_lengths: integers of shape ``[*batch]``: the length of each sequence, without its padding. A sequence of
            length 0 returns the carry it began with; one that is said to be longer than the inputs ends with them.
          return_carry: overrides the attribute.
          time_major: overrides the attribute.
          reverse: overrides the attribute.
          keep_order: overrides the attribute.
          rngs: where to draw the initial carry from, instead of the RNN's own stream: a stream, or an Rngs, of whose
            stream ``carry`` a fork is used.

        Returns:
          The outputs, with the time axis where it is in the inputs; or ``(carry, outputs)``.

        Raises:
          LayerInputError: if an axis is missing, or ``seq_lengths`` or the features do not fit.
          BodyError: if the cell returns a carry of another shape or structure than it got.
          EmptySelectionError: if ``broadcast_rngs`` takes none of the cell's streams.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        n_batch = self._count_batch_axes(inputs, time_major)
        time_axis = 0 if time_major else n_batch
        step_shape = inputs.shape[:time_axis] + inputs.shape[time_axis + 1 :]
        batch = step_shape[:n_batch]
        if initial_carry is None:
            own = self.rngs if _draws_carry(self) else None
            stream = own if rngs is None else rngs.carry.fork() if isinstance(rngs, Rngs) else rngs
            initial_carry = self.cell.initialize_carry(step_shape, stream)
            initial_carry = _of_the_batch(inputs, time_axis, batch, initial_carry)
        if seq_lengths is not None:
            seq_lengths = jnp.asarray(seq_lengths)
            if seq_lengths.ndim > n_batch or not broadcast_together(seq_lengths.shape, batch):
                raise input_error(self, f"seq_lengths of shape {list(batch)} with these inputs", seq_lengths)
            seq_lengths = seq_lengths if seq_lengths.shape == batch else jnp.broadcast_to(seq_lengths, batch)
            if reverse:
                inputs = flip_sequences(inputs, seq_lengths, n_batch, time_major)
        ends = seq_lengths if return_carry else None
        times = None if ends is None else np.arange(1, inputs.shape[time_axis] + 1, dtype=np.int32)
        run = _loop(self.state_axes, time_axis, self.unroll, reverse and seq_lengths is None, self.broadcast_rngs)
        with self._broadcasting():
            carried = (initial_carry, None if ends is None else initial_carry)
            (carry, at_end), outputs = run(self.cell, carried, inputs, times, ends)
        if reverse and keep_order == (seq_lengths is not None):  # else they are in the order that is asked for
            outputs = flip_sequences(outputs, seq_lengths, n_batch, time_major)
        return (carry if ends is None else at_end, outputs) if return_carry else outputs

    def _count_batch_axes(self, inputs: Array, time_major: bool) -> int:
        try:
            n_batch = inputs.ndim - self.cell.num_feature_axes - 1
        except AttributeError as error:
            if error.obj is not self.cell or error.name != "num_feature_axes":
                raise
            kind = type(self.cell).__name__
            raise ArgumentError(
                f"RNN takes a cell such as nnx.LSTMCell, got {kind}, without num_feature_axes."
            ) from None
        if n_batch < 0:
            axes = "[time, *batch, *features]" if time_major else "[*batch, time, *features]"
            raise input_error(self, f"inputs of shape {axes}", inputs)
        return n_batch

    def _broadcasting(self) -> AbstractContextManager:
        """A block in which the cell has one fresh key for all steps in the streams of ``broadcast_rngs``."""
        only = self.broadcast_rngs
        if only is None:
            return nullcontext()
        backups = split_rngs(self.cell, splits=1, only=only, squeeze=True)
        if not backups:
            raise EmptySelectionError(
                f"broadcast_rngs={only!r} takes no random stream of the {type(self.cell).__name__}. Give the tag of a "
                "stream, such as 'dropout', nnx.RngStream for all, or None."
            )
        return backups


@functools.lru_cache(maxsize=256, typed=True)  # unroll=True is not unroll=1
def _loop(state_axes: StateAxes, time_axis: int, unroll: int | bool, reverse: bool, only: Filter | None) -> Callable:
    """The scan of a cell; cached, since a scan keeps its compiled programs."""
    return scan(
        _step if only is None else _repeating(only),
        in_axes=(state_axes, Scanned, time_axis, 0, None),
        out_axes=(Scanned, time_axis),
        unroll=unroll,
        reverse=reverse,
    )


def _step(cell: Any, carried: tuple[Carry, Carry], x: Array, time: Any, ends: Any) -> tuple[tuple[Carry, Carry], Array]:
    """One step. If the lengths ``ends`` of the sequences are given, a second carry keeps the state at each end."""
    carry, at_end = carried
    new, y = cell(carry, x)
    if jax.tree.structure(new) == jax.tree.structure(carry):  # else scan says what is wrong
        new = jax.tree.map(lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), new, carry)
        if ends is not None:
            at_end = jax.tree.map(functools.partial(_where, time <= ends), new, at_end)
    return (new, at_end), y


def _where(of_batch: Array, a: Array, b: Array) -> Array:
    """``a`` for the sequences for which ``of_batch`` is true, ``b`` for the others."""
    if a.shape[: of_batch.ndim] != of_batch.shape:
        raise UsageError(
            f"With seq_lengths of shape {list(of_batch.shape)} every part of a carry must begin with these batch axes, "
            f"but one has the shape {list(a.shape)}: there is not one value for each sequence. Use return_carry=False."
        )
    return jnp.where(jnp.reshape(of_batch, of_batch.shape + (1,) * (a.ndim - of_batch.ndim)), a, b)


def _repeating(only: Filter) -> Callable:
    """A step that puts the random streams that a filter takes back to where they were, so that all steps draw alike."""
    takes = to_predicate(only)

    def repeating(cell: Any, *args: Any) -> Any:
        counts = [x.count for path, x in iter_objects(cell) if isinstance(x, RngStream) and takes(path, x)]
        before = [count.get_raw_value() for count in counts]
        out = _step(cell, *args)
        for count, value in zip(counts, before, strict=True):
            count.set_raw_value(value)
        return out

    return repeating


def flip_sequences(inputs: Array, seq_lengths: Array | None, num_batch_dims: int, time_major: bool) -> Array:
    """Reverse each sequence up to its length; what lies beyond it is reversed, too, and stays beyond it.

    Args:
      inputs: array of shape ``[*batch, time, ...]``, or ``[time, *batch, ...]`` with ``time_major``.
      seq_lengths: integers of shape ``[*batch]``; ``None``: all of the time axis.
      num_batch_dims: number of batch axes.
      time_major: whether the time axis is the first.

    >>> import jax.numpy as jnp
    >>> from nnxlib.nn.recurrent import flip_sequences
    >>> flip_sequences(jnp.array([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]]), jnp.array([3, 2]), 1, False)
    Array([[3, 2, 1, 0, 0],
           [5, 4, 0, 0, 0]], dtype=int32)
    """
    time_axis = 0 if time_major else num_batch_dims
    if seq_lengths is None:
        return jnp.flip(inputs, time_axis)
    times = inputs.shape[time_axis]
    lengths = jnp.expand_dims(jnp.clip(jnp.asarray(seq_lengths, jnp.int32), 0, times), time_axis)  # a uint8 would wrap
    order = jnp.expand_dims(jnp.arange(times), tuple(a for a in range(num_batch_dims + 1) if a != time_axis))
    source = jnp.mod(lengths - 1 - order, max(times, 1))
    source = jnp.reshape(source, source.shape + (1,) * (inputs.ndim - source.ndim))
    return jnp.take_along_axis(inputs, source, time_axis)


def _concatenate(a: Array, b: Array) -> Array:
    return jnp.concatenate([a, b], axis=-1)


class Bidirectional(Module):
    """Two RNNs over one input, one from each end; their outputs are merged, in the order of the input.

    Schuster & Paliwal, "Bidirectional recurrent neural networks", IEEE Transactions on Signal Processing 45 (1997).

    Args:
      forward_rnn, backward_rnn: the RNNs; their own settings of order, time axis and carry are overridden.
      merge_fn: combines the two outputs; by default along the last axis.
      time_major: as in :class:`RNN`.
      return_carry: whether to return ``((forward carry, backward carry), outputs)``, and not the outputs only.
      rngs: where to draw initial carries from, as in :class:`RNN`; with ``False`` each RNN draws from its own stream.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> rngs = nnx.Rngs(0)
    >>> rnn = nnx.Bidirectional(nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs)), nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs)))
    >>> rnn(jnp.ones((2, 5, 3))).shape
    (2, 5, 8)

    Raises:
      TypeError: for cells that are not in an RNN.
      ValueError: if ``rngs`` is something else.
    """

    def __init__(
        self,
        forward_rnn: RNNBase,
        backward_rnn: RNNBase,
        *,
        merge_fn: Callable[[Array, Array], Array] = _concatenate,
        time_major: bool = False,
        return_carry: bool = False,
        rngs: Rngs | RngStream | bool = True,
    ):
        for rnn in (forward_rnn, backward_rnn):
            if isinstance(rnn, RNNCellBase):
                raise ArgumentError(f"Bidirectional takes RNNs, got a {type(rnn).__name__}; wrap it: nnx.RNN(cell).")
        self.forward_rnn = forward_rnn
        self.backward_rnn = backward_rnn
        self.merge_fn = merge_fn
        self.time_major = time_major
        self.return_carry = return_carry
        self.rngs = _kept_stream(rngs)

    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: tuple[Carry, Carry] | None = None,
        rngs: Rngs | RngStream | None = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Run both RNNs; see :meth:`RNN.__call__`.

        ``reverse`` and ``keep_order`` are there for callers of any RNN and change nothing: both directions are run.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        forward, backward = (None, None) if initial_carry is None else initial_carry
        settings: dict[str, Any] = {"seq_lengths": seq_lengths, "time_major": time_major, "return_carry": True}
        own = self.rngs if _draws(self.forward_rnn) or _draws(self.backward_rnn) else None
        settings["rngs"] = own if rngs is None else rngs.carry if isinstance(rngs, Rngs) else rngs
        forward, y = self.forward_rnn(inputs, initial_carry=forward, reverse=False, **settings)
        backward, z = self.backward_rnn(inputs, initial_carry=backward, reverse=True, keep_order=True, **settings)
        merged = self.merge_fn(y, z)
        return ((forward, backward), merged) if return_carry else merged
