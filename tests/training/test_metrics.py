import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.training.metrics import Accuracy, Average, Metric, MetricState, Statistics, Welford

# Shapes that occur again, so that few programs are compiled.
SHAPES = st.sampled_from([(), (3,), (2, 3), (4, 1, 3)])
NUMBERS = st.floats(-100, 100, width=32)


@st.composite
def masked_values(draw):
    """Values, and a mask that can be broadcast against them."""
    shape = draw(SHAPES)
    kept = draw(st.integers(0, len(shape)))
    mask_shape = tuple(1 if draw(st.booleans()) else n for n in shape[kept:])
    values = draw(npst.arrays(np.float32, shape, elements=NUMBERS))
    return values, draw(npst.arrays(np.bool_, mask_shape))


def chosen(values, mask):
    return np.broadcast_to(values, np.broadcast_shapes(values.shape, mask.shape))[
        np.broadcast_to(mask, np.broadcast_shapes(values.shape, mask.shape))
    ]


def state_of(metric):
    return {path: (type(v), v.shape, str(v.dtype), float(v.value)) for path, v in nnx.to_flat_state(nnx.state(metric))}


# --- Average --------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.lists(masked_values(), max_size=3))
def test_an_average_with_masks_is_the_mean_of_what_they_choose(batches):
    """For every shape of values and every mask that broadcasts to it; nan when nothing counts."""
    metric = Average()
    for values, mask in batches:
        metric.update(values=values, mask=mask)
    all_values = np.concatenate([np.zeros(0), *(chosen(*batch) for batch in batches)]).astype(np.float64)
    assert metric.count.value == all_values.size
    expected = all_values.mean() if all_values.size else np.nan
    np.testing.assert_allclose(metric.compute(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 1), (3,), (1, 3), (2, 3), ()])
def test_a_broadcast_mask_counts_every_value_that_it_chooses(shape):
    """A mask for rows, for columns, for one batch of several: the count is that of values, not of mask entries."""
    metric = Average()
    metric.update(values=jnp.arange(6.0).reshape(2, 3), mask=jnp.ones(shape, bool))
    assert (metric.total.value, metric.count.value) == (15, 6)


def test_a_mask_may_be_wider_than_the_values():
    """Values are broadcast too; a number counts once for each chosen entry."""
    metric = Average()
    metric.update(values=2.0, mask=jnp.array([True, False, True]))
    assert (metric.total.value, metric.count.value) == (4, 2)


def test_what_a_mask_leaves_out_has_no_influence():
    """Not even nan and inf."""
    for metric in Average(), Welford():
        metric.update(values=jnp.array([1.0, jnp.nan, 3.0, jnp.inf]), mask=jnp.array([1, 0, 1, 0]))
        assert metric.count.value == 2
        mean = metric.compute() if isinstance(metric, Average) else metric.compute().mean
        assert mean == 2


def test_sums_are_in_float32():
    """Sums of float16, bfloat16 and int32 values that would overflow or lose digits do not."""
    for values in jnp.full(4, 60000, jnp.float16), jnp.full(4, 2**30, jnp.int32), jnp.ones(1025, jnp.bfloat16):
        metric = Average()
        metric.update(values=values)
        assert metric.total.value == float(np.float32(values[0])) * values.size
        assert metric.total.dtype == jnp.float32


def test_the_state_of_an_average():
    """A float32 total and an int32 count, and nothing else."""
    assert state_of(Average()) == {
        ("count",): (MetricState, (), "int32", 0.0),
        ("total",): (MetricState, (), "float32", 0.0),
    }


def test_values_and_masks_in_python():
    """Numbers, lists and bools are taken as arrays."""
    metric = Average("loss")
    metric.update(loss=3)
    metric.update(loss=[1.0, 2.0], mask=[False, True], other="ignored")
    metric.update(loss=7.0, mask=False)
    assert (metric.total.value, metric.count.value) == (5, 2)


def test_a_missing_argument_is_named():
    """With those that were passed."""
    message = r"expects the keyword argument .loss., got \[.values.\]. This metric was made as Average\(.loss.\)"
    with pytest.raises(TypeError, match=message):
        Average("loss").update(values=1.0)


@pytest.mark.parametrize("metric", [Average(), Welford()], ids=["Average", "Welford"])
def test_a_mask_that_does_not_fit(metric):
    """Both shapes are named, and nothing is counted."""
    with pytest.raises(ValueError, match=r"mask of shape \(2,\) cannot be broadcast against values of shape \(2, 3\)"):
        metric.update(values=jnp.ones((2, 3)), mask=jnp.ones(2, bool))
    assert metric.count.value == 0


# --- Accuracy -------------------------------------------------------------------------------------------------------


def test_accuracy_of_classes_with_a_mask():
    """The fraction of chosen labels that are the largest logit's index."""
    logits = jax.random.normal(jax.random.key(0), (4, 5, 3))
    labels = jax.random.randint(jax.random.key(1), (4, 5), 0, 3)
    right = np.argmax(logits, -1) == labels
    for mask in np.ones(5, bool), np.arange(5) > 1, np.arange(4)[:, None] > 2, np.asarray(labels) > 0:
        metric = Accuracy()
        metric.update(logits=logits, labels=labels, mask=mask)
        np.testing.assert_allclose(metric.compute(), chosen(np.asarray(right), mask).mean(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32"])
def test_labels_of_every_integer_type(dtype):
    """As data sets have them."""
    metric = Accuracy()
    metric.update(logits=jnp.eye(3), labels=jnp.array([0, 1, 0], dtype))
    np.testing.assert_allclose(metric.compute(), 2 / 3, rtol=1e-6)


def test_a_threshold_decides_yes_or_no():
    """At the threshold it is yes; labels are bools, or integers that are positive for yes, as in {0, 1} and {-1, 1}."""
    for labels in jnp.array([1, 1, 0]), jnp.array([True, True, False]), jnp.array([1, 2, -1], jnp.int8):
        metric = Accuracy(threshold=0.5)
        metric.update(logits=jnp.array([0.5, 0.4, 0.6]), labels=labels)
        np.testing.assert_allclose(metric.compute(), 1 / 3, rtol=1e-6)
        metric.update(logits=0.7, labels=labels[0])
        np.testing.assert_allclose(metric.compute(), 1 / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("threshold", "logits", "labels", "message"),
    [
        (None, (4, 5), (4, 5), r"without its last axis; got logits of shape \(4, 5\) and labels of shape"),
        (None, (4, 5), (1,), "without its last axis"),
        (None, (), (), "without its last axis"),
        (None, (4,), (4,), r"with one logit for yes, write nnx.metrics.Accuracy\(threshold=0.0\)"),
        (None, (4, 1), (4,), r"single class .*; got logits of shape \(4, 1\).*threshold=0.0"),
        (0.5, (4, 1), (4,), r"For binary classification, labels need .*; got logits of shape \(4, 1\)"),
    ],
)
def test_labels_of_another_shape(threshold, logits, labels, message):
    """Both shapes are named; nothing is broadcast."""
    with pytest.raises(ValueError, match=message):
        Accuracy(threshold).update(logits=jnp.ones(logits), labels=jnp.zeros(labels, int))


def test_labels_that_are_no_integers():
    """Floats are refused, and bools where there are classes."""
    for dtype in "float32", "bool":
        with pytest.raises(ValueError, match=f"labels have to be integers, got {dtype}"):
            Accuracy().update(logits=jnp.ones((2, 3)), labels=jnp.zeros(2, dtype))


def test_a_threshold_is_a_float():
    """An int, which would be a mistake for a number of classes, is refused."""
    with pytest.raises(TypeError, match="threshold has to be a float or None, got 10"):
        Accuracy(threshold=10)


# --- Welford --------------------------------------------------------------------------------------------------------


def test_complex_values_are_refused_since_their_imaginary_part_would_be_lost():
    metric = Welford()
    metric.update(values=jnp.array([1.0, 3.0]))
    with pytest.raises(ValueError, match="real values, not complex64"):
        metric.update(values=jnp.array([1 + 1j, 2]))
    assert metric.compute().mean == 2


@settings(max_examples=20)
@given(st.lists(masked_values(), max_size=3))
def test_welford_is_mean_and_deviation_of_what_the_masks_choose(batches):
    """In one pass, batch by batch, also with batches of which nothing counts."""
    metric = Welford()
    for values, mask in batches:
        metric.update(values=values, mask=mask)
    values = np.concatenate([np.zeros(0), *(chosen(*batch) for batch in batches)]).astype(np.float64)
    found = metric.compute()
    assert metric.count.value == values.size
    if values.size == 0:
        assert found.mean == 0
        assert np.isnan(found.standard_deviation)
        assert np.isnan(found.standard_error_of_mean)
    else:
        np.testing.assert_allclose(found.mean, values.mean(), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(found.standard_deviation, values.std(), rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(found.standard_error_of_mean, values.std() / values.size**0.5, rtol=1e-4, atol=1e-3)


def test_welford_does_not_lose_a_small_deviation_beside_a_large_mean():
    """Where a difference of sums of squares has no digit left."""
    values = 10_000 + np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32)
    metric = Welford()
    for batch in values:
        metric.update(values=batch)
    np.testing.assert_allclose(metric.compute().standard_deviation, values.astype(np.float64).std(), rtol=1e-3)


def test_statistics_are_a_pytree():
    """Of three leaves; ``replace`` makes a copy."""
    statistics = jax.tree.map(lambda x: x + 1, Statistics(1, 2, 3))
    assert statistics == Statistics(2, 3, 4)
    assert statistics.replace(mean=0) == Statistics(0, 3, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        statistics.mean = 0


# --- all of them ----------------------------------------------------------------------------------------------------


def several():
    return nnx.MultiMetric(accuracy=Accuracy(), loss=Average(), spread=nnx.MultiMetric(loss=Welford()))


BATCH = {"logits": jnp.eye(3), "labels": jnp.array([0, 1, 0]), "values": jnp.arange(3.0)}


def test_a_jitted_update_is_the_eager_one():
    """For each metric, with a mask; it compiles once."""
    eager, jitted, traces = several(), several(), []

    @nnx.jit
    def step(metrics, batch):
        traces.append(1)
        metrics.update(**batch)

    for mask in jnp.array([1, 1, 0]), jnp.array([0, 0, 0]), jnp.array([0, 1, 1]):
        eager.update(**BATCH, mask=mask)
        step(jitted, {**BATCH, "mask": mask})
    assert len(traces) == 1
    for ours, theirs in zip(jax.tree.leaves(jitted.compute()), jax.tree.leaves(eager.compute())):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_reset_metric_is_a_new_one():
    """The same state, types and dtypes."""
    metrics = several()
    metrics.update(**BATCH)
    assert metrics.reset() is None
    assert state_of(metrics) == state_of(several())


def test_metrics_of_an_ensemble():
    """Under nnx.vmap each member has its own; across an axis, sums and counts add up."""
    metrics = nnx.vmap(lambda _: several())(jnp.arange(2))
    logits = jnp.stack([jnp.eye(3), 1 - jnp.eye(3)])
    nnx.vmap(lambda metrics, logits: metrics.update(**{**BATCH, "logits": logits}))(metrics, logits)
    np.testing.assert_allclose(metrics.compute()["accuracy"], [2 / 3, 1 / 3], rtol=1e-6)
    graphdef, sums = nnx.split(metrics)
    total = nnx.merge(nnx.graphdef(several()), jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), sums))
    assert nnx.graphdef(total) == graphdef
    np.testing.assert_allclose(total.accuracy.compute(), 1 / 2)


def test_metrics_in_a_scan():
    """Carried through a scan over batches, reset on the way, they are those of a loop."""

    def update(metrics, values):
        metrics.update(**{**BATCH, "values": values})
        so_far = metrics.compute()["loss"]
        nnx.cond(values[0] == 1.0, lambda m: m.reset(), lambda m: None, metrics)
        return metrics, so_far

    batches = jnp.arange(12.0).reshape(4, 3).at[1, 0].set(1.0)
    metrics, looped = several(), several()
    _, means = nnx.scan(update, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(metrics, batches)
    np.testing.assert_allclose(means, [update(looped, batch)[1] for batch in batches], rtol=1e-6)
    assert int(metrics.loss.count.value) == 6
    np.testing.assert_allclose(metrics.loss.compute(), 8.5)


def test_a_metric_splits_and_merges():
    """``split`` is that of nnx."""
    metrics = several()
    metrics.update(**BATCH)
    graphdef, losses, rest = metrics.split(nnx.PathContains("loss"), ...)
    assert losses.flat_state().paths[0] == ("loss", "count")
    assert state_of(nnx.merge(graphdef, losses, rest)) == state_of(metrics)


def test_a_multi_metric_gives_a_result_for_each_name():
    """In the order in which they were given; each is an attribute."""
    metrics = several()
    metrics.update(**BATCH)
    found = metrics.compute()
    assert list(found) == ["accuracy", "loss", "spread"]
    assert found["loss"] == metrics.loss.compute() == 1
    assert found["spread"]["loss"].mean == 1


def test_a_mask_for_one_metric_of_several():
    """The others see all values, and are called without a mask: one of the user need not know what that is."""

    class Batches(Metric):
        def __init__(self):
            self.count = MetricState(0)

        def update(self, values):
            self.count.value += 1

        def compute(self):
            return self.count.value

    mask = jnp.array([False, True, True])
    metrics = nnx.MultiMetric(loss=Average(), batches=Batches())
    for masks in {"loss": mask}, {"loss": mask, "batches": None}, {"loss": None}, {}, None:
        metrics.update(values=jnp.arange(3.0), mask=masks)
    assert metrics.loss.count.value == 2 + 2 + 3 + 3 + 3
    assert metrics.loss.total.value == 15
    assert metrics.compute()["batches"] == 5

    nested = nnx.MultiMetric(all=Average(), inner=nnx.MultiMetric(some=Average(), rest=Average()))
    nested.update(values=jnp.arange(3.0), mask={"inner": {"some": mask}})
    assert nested.compute() == {"all": 1.0, "inner": {"some": 1.5, "rest": 1.0}}
    with pytest.raises(ValueError, match=r"masks for \['los'\], but the metrics are \['all', 'inner'\]"):
        nested.update(values=jnp.arange(3.0), mask={"los": mask})


def test_a_missing_argument_of_several_is_named_with_its_metric():
    """A note on the error says which metric missed it."""
    with pytest.raises(TypeError) as caught:
        nnx.MultiMetric(loss=Average(), accuracy=Accuracy()).update(values=1.0)
    assert caught.value.__notes__[-1] == "in the metric 'accuracy' of a MultiMetric"


@pytest.mark.parametrize(
    "inner", [lambda m: m, lambda m: nnx.MultiMetric(all=m, loss=Average())], ids=["flat", "nested"]
)
def test_an_update_that_fails_changes_no_metric(inner):
    metrics = inner(nnx.MultiMetric(loss=Average(), accuracy=Accuracy()))
    metrics.update(values=2.0, logits=jnp.ones((2, 3)), labels=jnp.zeros(2, int))
    before = jax.tree.leaves(nnx.state(metrics))
    with pytest.raises(ValueError, match="labels need the shape of logits without its last axis"):
        metrics.update(values=1.0, logits=jnp.ones((2, 3)), labels=jnp.zeros(5, int))
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments"):
        metrics.update(values=1.0)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(nnx.state(metrics)), before)


def test_an_update_that_fails_changes_no_metric_that_is_kept_in_a_ref():
    metrics = nnx.MultiMetric(loss=Average(), accuracy=Accuracy())
    for name in ("total", "count"):
        kept = nnx.metrics.MetricState(getattr(metrics.loss, name).value, ref=True)
        setattr(metrics.loss, name, kept)
    metrics.update(values=2.0, logits=jnp.ones((2, 3)), labels=jnp.zeros(2, int))
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments"):
        metrics.update(values=1.0)
    assert metrics.loss.compute() == 2.0


class Own(Metric):
    """A metric of a user, with state of every kind."""

    def __init__(self, error=None):
        self.array, self.seen, self.batches, self.error = jnp.zeros(()), [], 0, error

    def update(self, **_):
        if self.error is not None:
            raise self.error
        self.array, self.batches, self.last = self.array + 1, self.batches + 1, MetricState(jnp.ones(()))
        self.seen.append(jnp.ones(()))


def test_an_update_that_fails_changes_no_metric_of_a_user():
    """Nor arrays, items and attributes outside of Variables; and an error that takes no notes comes out as it is."""

    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        reason: str = "none"

    metrics = nnx.MultiMetric(own=Own(), loss=Average(), failing=Own(Frozen()))
    held = dict(vars(metrics.own))
    with pytest.raises(Frozen):
        metrics.update(values=1.0)
    assert dict(vars(metrics.own)) == held
    assert metrics.own.seen == []
    assert metrics.loss.count == 0
    metrics.failing.error = None
    metrics.update(values=1.0)
    assert (metrics.own.batches, metrics.own.array, len(metrics.own.seen), metrics.loss.count) == (1, 1, 1, 1)


def test_a_reset_that_fails_changes_no_metric():
    """The last one has no method of its own for it."""
    metrics = nnx.MultiMetric(loss=Average(), own=Own())
    metrics.update(values=1.0)
    with pytest.raises(NotImplementedError, match="Own has to define `reset`") as caught:
        metrics.reset()
    assert "in the metric 'own' of a MultiMetric" in caught.value.__notes__
    assert metrics.loss.count == 1


def test_what_is_no_metric_is_refused():
    """By its name."""
    with pytest.raises(TypeError, match="'loss' is not a metric"):
        nnx.MultiMetric(loss=0.5)


@pytest.mark.parametrize("name", ["update", "_metric_names"])
def test_a_metric_cannot_have_the_name_of_what_is_there(name):
    """It would take the place of the method, or of the list of metrics."""
    with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
        nnx.MultiMetric(**{name: Average()})


def test_a_metric_of_the_user_says_what_it_lacks():
    """Each of the four methods."""

    class Incomplete(Metric):
        def __init__(self):
            self.value = MetricState(0)

    for method in "reset", "update", "compute":
        with pytest.raises(NotImplementedError, match=f"Incomplete has to define `{method}`"):
            getattr(Incomplete(), method)()
    with pytest.raises(NotImplementedError, match="has to define `__init__`"):
        Metric()


def test_metrics_under_strict_promotion():
    """Counts of integers and sums of floats meet where the dtypes are said."""
    values, mask = jnp.array([1.0, 5.0, 100.0]), jnp.array([True, True, False])
    with jax.numpy_dtype_promotion("strict"):
        average, welford, accuracy = Average(), Welford(), Accuracy()
        average.update(values=values, mask=mask)
        welford.update(values=values, mask=mask)
        welford.update(values=values[:2])
        accuracy.update(logits=jnp.eye(2), labels=jnp.array([0, 0]))
        assert average.compute() == 3.0
        assert welford.compute().standard_deviation == 2.0
        assert accuracy.compute() == 0.5


def test_a_class_in_a_multi_metric_is_refused():
    with pytest.raises(TypeError, match=r"'loss' is a class; make a metric of it: loss=nnx.metrics.Average\(...\)"):
        nnx.MultiMetric(loss=nnx.metrics.Average)


def test_one_hot_labels_are_told_what_to_pass():
    with pytest.raises(ValueError, match=r"Of one-hot labels pass labels.argmax\(-1\)"):
        nnx.metrics.Accuracy().update(logits=jnp.eye(3), labels=jnp.eye(3))


@pytest.mark.parametrize(("wrong", "shown"), [(None, "None"), ("0.5", "str"), ([None], r"\[None\]")])
def test_what_is_no_number_is_refused(wrong, shown):
    for metric in nnx.metrics.Average("loss"), nnx.metrics.Welford("loss"):
        before = nnx.state(metric)
        with pytest.raises(TypeError, match=f"A metric takes arrays and numbers, but got {shown}"):
            metric.update(loss=wrong)
        assert jax.tree.all(jax.tree.map(lambda a, b: a is b, before, nnx.state(metric)))


# --- cost -----------------------------------------------------------------------------------------------------------

UPDATES = {
    "average": (Average, {"values": jnp.array([1.0, 2.5, -0.3])}),
    "masked average": (Average, {"values": jnp.array([1.0, 2.5, -0.3]), "mask": jnp.array([True, False, True])}),
    "accuracy": (Accuracy, {"logits": jnp.array([[0.1, 0.9], [0.3, 0.2]]), "labels": jnp.array([1, 1])}),
    "binary": (lambda: Accuracy(0.5), {"logits": jnp.array([0.1, 0.9]), "labels": jnp.array([1, 1])}),
    "welford": (Welford, {"values": jnp.array([1.0, 2.5, -0.3])}),
    "masked welford": (Welford, {"values": jnp.array([1.0, 2.5, -0.3]), "mask": jnp.array([True, False, True])}),
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_eager_update_is_a_few_compiled_steps(name):
    """They round as their operations do one by one, and what took 130 to 860 calls takes few."""
    make, batch = UPDATES[name]
    compiled, one_by_one = make(), make()
    for _ in range(3):
        compiled.update(**batch)
        with jax.disable_jit():
            one_by_one.update(**batch)
    assert state_of(compiled) == state_of(one_by_one)
    if "mask" not in batch:  # which is broadcast by jax.numpy
        assert count_calls(lambda: compiled.update(**batch)) < 60


def test_metrics_are_made_by_compiled_steps():
    """Each scalar is one dispatch, not the fifty calls of jax.numpy.zeros."""
    make = lambda: (Average(), Welford())
    make()
    assert count_calls(make) < 150
