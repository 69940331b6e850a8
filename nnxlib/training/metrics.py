"""Metrics: running statistics of a stream of batches, in a few scalar Variables.

A metric is updated with keyword arguments, of which it takes those it needs, so that several can share one call (see
:class:`MultiMetric`). Its state is :class:`MetricState`, float32 sums and int32 counts, so it goes through ``nnx.jit``
beside the model.

A *mask* says which values count. It is broadcast against the values; what it leaves out has no influence, not even when
it is nan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import ArgumentError, UsageError, describe_nested
from ..core.finding import reachable
from ..core.formulas import as_array, full, step
from ..core.generics import A
from ..core.objects import Node, Pytree, refill
from ..core.ops import split
from ..core.tracing import boundary
from ..core.variables import Variable, plain_value
from .stored import set_values


class MetricState(Variable[A]):
    """The state of a metric."""


class Metric(Pytree):
    """Base class of metrics: a subclass has ``__init__``, ``reset``, ``update`` and ``compute``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> class Largest(nnx.Metric):
    ...   def __init__(self):
    ...     self.value = nnx.metrics.MetricState(jnp.array(-jnp.inf))
    ...   def reset(self):
    ...     self.value.value = jnp.array(-jnp.inf)
    ...   def update(self, *, values, **_):
    ...     self.value.value = jnp.maximum(self.value, values.max())
    ...   def compute(self):
    ...     return self.value.value
    >>> metrics = nnx.MultiMetric(largest=Largest(), average=nnx.metrics.Average())
    >>> metrics.update(values=jnp.array([1.0, 4.0, 1.0]))
    >>> {name: value.item() for name, value in metrics.compute().items()}
    {'largest': 4.0, 'average': 2.0}
    """

    def __init__(self):
        raise NotImplementedError(f"{type(self).__name__} has to define `__init__`, without calling that of Metric.")

    def reset(self) -> None:
        """Forget all values."""
        raise NotImplementedError(f"{type(self).__name__} has to define `reset`.")

    @boundary
    def update(self, **kwargs: Any) -> None:
        """Take in a batch."""
        raise NotImplementedError(f"{type(self).__name__} has to define `update`.")

    def compute(self) -> Any:
        """Return the statistic of all values since the last reset."""
        raise NotImplementedError(f"{type(self).__name__} has to define `compute`.")

    def split(self, *filters: Any) -> tuple[Any, ...]:
        """Split into GraphDef and States; as :func:`nnxlib.split`."""
        return split(self, *filters)


class Average(Metric):
    """The mean of all values; nan before the first value.

    Args:
      argname: the keyword under which ``update`` takes the values.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> loss = nnx.metrics.Average('loss')
    >>> loss.update(loss=jnp.array([1.0, 2.0, 6.0]), mask=jnp.array([True, True, False]))
    >>> loss.update(loss=3.0)
    >>> loss.compute().item()
    2.0
    """

    def __init__(self, argname: str = "values"):
        self.argname = argname
        self.total = MetricState(full(0, (), np.float32))
        self.count = MetricState(full(0, (), np.int32))

    def reset(self) -> None:
        """Forget all values."""
        _zero(self.total, self.count)

    @boundary
    def update(self, mask: jax.Array | None = None, **kwargs: Any) -> None:
        """Take in values.

        Args:
          mask: which values count: true or not zero where they do; broadcasts against them.
          **kwargs: the values, a number or an array of any shape, under the name ``argname``; others are ignored.

        Raises:
          TypeError: if the argument that this metric takes is missing.
          ValueError: if mask and values cannot be broadcast.
        """
        values, counted = _masked(_argument(self, kwargs), mask)
        set_values((self.total, self.count), _with_batch(self.total.value, self.count.value, values, counted))

    def compute(self) -> jax.Array:
        """Return the mean, a float32 scalar."""
        return _mean(self.total.value, self.count.value)


class Accuracy(Average):
    """The fraction of right predictions; nan before the first prediction.

    Args:
      threshold: None for several classes: the largest of ``logits[..., classes]`` is the prediction for
        ``labels[...]``. A float for binary classification: the prediction is 1 where ``logits[...]`` is at least that.
      *args: passed to :class:`Average`, and without effect.
      **kwargs: see ``args``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> accuracy = nnx.metrics.Accuracy()
    >>> accuracy.update(logits=jnp.array([[0.1, 2.0], [3.0, 0.4]]), labels=jnp.array([1, 1]))
    >>> accuracy.compute().item()
    0.5

    Raises:
      TypeError: if the threshold is not a float.
    """

    def __init__(self, threshold: float | None = None, *args: Any, **kwargs: Any):
        if not (threshold is None or isinstance(threshold, float)):
            raise ArgumentError(f"threshold has to be a float or None, got {threshold!r}.")
        self.threshold = threshold
        super().__init__(*args, **kwargs)

    @boundary
    def update(  # type: ignore[override]  # flax.nnx has this signature
        self, *, logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None, **_: Any
    ) -> None:
        """Take in predictions.

        Args:
          logits: ``[..., classes]``, or ``[...]`` with a threshold.
          labels: integers ``[...]``; with a threshold those above 0 stand for yes, and bools are taken too.
          mask: which predictions count: true or not zero where they do; broadcasts against ``labels``.
          **_: ignored.

        Raises:
          ValueError: if ``labels`` is not of integers (or bools, with a threshold), or not of the shape that goes with
            ``logits``; without a threshold, if there is a single class.
        """
        logits, labels = as_array(logits), as_array(labels)
        threshold = self.threshold
        binary = threshold is not None
        if labels.shape != (logits.shape if binary else logits.shape[:-1]) or (not binary and logits.ndim == 0):
            kind = (
                "binary classification, labels need the shape of logits"
                if binary
                else "multi-class classification, labels need the shape of logits without its last axis"
            )
            found = f"got logits of shape {logits.shape} and labels of shape {labels.shape}"
            alike = not binary and labels.shape == logits.shape
            raise UsageError(f"For {kind}; {found}.{_ONE_LOGIT_OR_ONE_HOT if alike else ''}")
        if not binary and logits.shape[-1] == 1:
            raise UsageError(f"A single class leaves no choice; got logits of shape {logits.shape}.{_ONE_LOGIT}")
        if not (jnp.issubdtype(labels.dtype, jnp.integer) or (labels.dtype == bool and binary)):
            raise UsageError(f"labels have to be integers, got {labels.dtype}.")
        right = _is_right_class(logits, labels) if threshold is None else _is_right_side(logits, labels, threshold)
        super().update(mask=mask, **{self.argname: right})

    def compute(self) -> jax.Array:
        """Return the fraction, a float32 scalar between 0 and 1."""
        return super().compute()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """What ``Welford`` computes: three float32 scalars."""

    mean: jax.Array
    standard_error_of_mean: jax.Array
    standard_deviation: jax.Array

    def replace(self, **changes: Any) -> Statistics:
        """Return a copy with other values."""
        return dataclasses.replace(self, **changes)


class Welford(Metric):
    """Mean and standard deviation of all values, in one pass that does not lose precision.

    Welford, "Note on a method for calculating corrected sums of squares and products", Technometrics 4 (1962); a batch
    at a time after Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
    (1979). The deviation is that of the values themselves (divided by n).

    Args:
      argname: the keyword under which ``update`` takes the values.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> metric = nnx.metrics.Welford()
    >>> metric.update(values=jnp.array([1.0, 5.0]))
    >>> metric.update(values=jnp.array([1.0, 5.0, 100.0]), mask=jnp.array([1, 1, 0]))
    >>> metric.compute().mean.item(), metric.compute().standard_deviation.item()
    (3.0, 2.0)
    """

    def __init__(self, argname: str = "values"):
        self.argname = argname
        self.count = MetricState(full(0, (), np.int32))
        self.mean = MetricState(full(0, (), np.float32))
        self.m2 = MetricState(full(0, (), np.float32))

    def reset(self) -> None:
        """Forget all values."""
        _zero(self.count, self.mean, self.m2)

    @boundary
    def update(self, mask: jax.Array | None = None, **kwargs: Any) -> None:
        """Take in values, which must be real; as :meth:`Average.update`."""
        values, counted = _masked(_argument(self, kwargs), mask)
        if jnp.iscomplexobj(values):
            raise UsageError(
                f"Welford takes real values, not {values.dtype}. Update one metric with x.real and one with x.imag."
            )
        old, new = self.count.value, values.size if counted is None else _number(counted)
        mean, deviations = _deviations(values, counted, new)
        total, delta, share = _share(old, new, self.mean.value, mean)
        squares, moved = _moved(deviations, delta, share, old)
        sums = _summed(self.m2.value, self.mean.value, squares, counted, *moved)
        set_values((self.m2, self.mean, self.count), (*sums, total))

    def compute(self) -> Statistics:
        """Return mean, standard error of the mean, and standard deviation; the last two are nan before any value."""
        count = _float(self.count.value)
        deviation = jnp.sqrt(self.m2.value / count)
        return Statistics(self.mean.value, deviation / jnp.sqrt(count), deviation)


class MultiMetric(Metric):
    """Several metrics that are updated in one call; each is an attribute.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average())
    >>> metrics.update(logits=jnp.array([[0.1, 2.0]]), labels=jnp.array([1]), values=0.5)
    >>> {name: value.item() for name, value in metrics.compute().items()}
    {'accuracy': 1.0, 'loss': 0.5}

    Raises:
      TypeError: for a value that is not a metric.
      ValueError: for a name that a method or another attribute has.
    """

    _metric_names: tuple[str, ...] = ()

    def __init__(self, **metrics: Any):
        for name, metric in metrics.items():
            if hasattr(type(self), name):
                raise UsageError(f"A metric cannot be called {name!r}: MultiMetric.{name} is something else.")
            if isinstance(metric, type):
                raise ArgumentError(
                    f"{name!r} is a class; make a metric of it: {name}=nnx.metrics.{metric.__name__}(...)."
                )
            if not all(callable(getattr(metric, method, None)) for method in ("reset", "update", "compute")):
                raise ArgumentError(
                    f"{name!r} is not a metric, which has `reset`, `update` and `compute`; got {type(metric).__name__}."
                )
        self._metric_names = tuple(metrics)
        for name, metric in metrics.items():
            setattr(self, name, metric)

    @boundary
    def reset(self) -> None:
        """Reset each metric; if one of them fails, each stays as it was."""
        self._all_or_none(lambda name: getattr(self, name).reset())

    @boundary
    def update(self, **updates: Any) -> None:
        """Update each metric with all the arguments; if one of them fails, each stays as it was.

        A ``mask`` is for all metrics, or a dict of masks for some of them: ``mask={"accuracy": ...}``. A metric that
        has none is called without the argument.

        Raises:
          TypeError: if a metric misses an argument; a note names the metric.
          ValueError: for a mask of a metric that is not there.
        """
        mask = updates.pop("mask", None)
        masks = mask if isinstance(mask, Mapping) else dict.fromkeys(self._metric_names, mask)
        if unknown := [name for name in masks if name not in self._metric_names]:
            raise UsageError(f"There are masks for {unknown}, but the metrics are {list(self._metric_names)}.")

        def update(name: str) -> None:
            getattr(self, name).update(**updates, **({} if masks.get(name) is None else {"mask": masks[name]}))

        self._all_or_none(update)

    def _all_or_none(self, change: Callable[[str], None]) -> None:
        """Change each metric, given its name; if one change fails, none is made, and a note names the metric."""
        objects = [x for _, x in reachable(self, set())]
        nodes = [(x, x._nnx_contents(), x._nnx_marks) for x in objects if isinstance(x, Node)]
        variables = [x for x in objects if isinstance(x, Variable)]
        values = [plain_value(variable) for variable in variables]
        for name in self._metric_names:
            try:
                change(name)
            except BaseException as error:
                for node, held, marks in nodes:
                    refill(node, held, marks)
                set_values(variables, values)
                with suppress(Exception):  # an error that takes no notes, such as a frozen dataclass
                    error.add_note(f"in the metric {name!r} of a {type(self).__name__}")
                raise

    def compute(self) -> dict[str, Any]:
        """Return the statistics by name."""
        return {name: getattr(self, name).compute() for name in self._metric_names}


# --- helpers --------------------------------------------------------------------------------------------------------


def _zero(*variables: MetricState) -> None:
    set_values(variables, [jnp.zeros_like(variable.value) for variable in variables])


_ONE_LOGIT = """ \
For binary classification, with one logit for yes, write nnx.metrics.Accuracy(threshold=0.0), or 0.5 for \
probabilities, and pass logits of the shape of labels."""

_ONE_LOGIT_OR_ONE_HOT = _ONE_LOGIT + " Of one-hot labels pass labels.argmax(-1)."


def _argument(metric: Any, kwargs: dict[str, Any]) -> Any:
    if metric.argname not in kwargs:
        kind = type(metric).__name__
        raise ArgumentError(
            f"{kind}.update expects the keyword argument {metric.argname!r}, got {sorted(kwargs)}. This metric was "
            f"made as {kind}({metric.argname!r})."
        )
    return kwargs[metric.argname]


def _masked(values: Any, mask: Any) -> tuple[jax.Array, jax.Array | None]:
    """The values, and which of them count; both of the same shape."""
    try:
        values = as_array(values)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"A metric takes arrays and numbers, but got {describe_nested(values)}.") from error
    if mask is None:
        return values, None
    try:
        values, counted = jnp.broadcast_arrays(values, jnp.asarray(mask).astype(bool))
    except ValueError:
        raise UsageError(
            f"The mask of shape {jnp.shape(mask)} cannot be broadcast against values of shape {values.shape}."
        ) from None
    return values, counted


# The arithmetic, made of compiled steps (core/formulas.py), each of which is one dispatch in eager code.


@step()
def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
    return total / _float(count)


@step()
def _with_batch(
    total: jax.Array, count: jax.Array, values: jax.Array, counted: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    return total + _sum(values, counted), count + (values.size if counted is None else _number(counted))


@step()
def _is_right_class(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1) == labels


@step()
def _is_right_side(logits: jax.Array, labels: jax.Array, threshold: Any) -> jax.Array:
    return (logits >= threshold) == (labels > 0)


@step()
def _number(counted: jax.Array) -> jax.Array:
    return jnp.sum(counted, dtype=jnp.int32)


@step()
def _deviations(values: jax.Array, counted: jax.Array | None, new: Any) -> tuple[jax.Array, jax.Array]:
    """The mean of the values of a batch of which `new` count, and how far each is from it."""
    mean = _sum(values, counted) / jnp.maximum(_float(new), 1.0)  # no NaN for a batch of which nothing counts
    return mean, values.astype(jnp.float32) - mean


@step()
def _share(old: Any, new: Any, old_mean: jax.Array, mean: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """How many values there are with the batch; how far its mean is from the old mean; and its share of all values."""
    total = old + new
    return total, mean - old_mean, _float(new) / jnp.maximum(_float(total), 1.0)


@step()
def _moved(
    deviations: jax.Array, delta: jax.Array, share: jax.Array, old: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The squared deviations of a batch, and what the distance of its mean adds to their sum, and to the mean."""
    return jnp.square(deviations), (delta * delta * _float(old) * share, delta * share)


@step()
def _summed(
    m2: jax.Array, mean: jax.Array, squares: jax.Array, counted: jax.Array | None, of_distance: Any, to_mean: Any
) -> tuple[jax.Array, jax.Array]:
    return m2 + (_sum(squares, counted) + of_distance), mean + to_mean


def _sum(values: jax.Array, counted: jax.Array | None) -> jax.Array:
    return jnp.sum(values, dtype=jnp.float32, where=counted)


def _float(count: Any) -> jax.Array:
    return jnp.asarray(count, jnp.float32)
