"""nnx.vmap and nnx.pmap: an axis for each kind of leaf; state comes out with the axis it went in with."""

import collections
import functools
import inspect
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from tests.properties.compare import Snapshot, assert_freed, assert_no_tracer

from .models import RAW, Layer, Norm, Pair, X, stacked

XS = jnp.stack([X, 2 * X])
PER_EXAMPLE = nnx.StateAxes({nnx.BatchStat: 0, ...: None})


class Decorated(Layer):
    @nnx.vmap(in_axes=(None, 0))
    def rows(self, x):
        return self.read(x)

    @nnx.vmap
    def members(self, x):
        return self.read(x)

    @nnx.vmap(in_axes=(None, 0))
    def __call__(self, x):
        return self.read(x)


def read(model, x):
    return model.read(x)


WAYS = {
    "function": lambda m: nnx.vmap(read, in_axes=(None, 0))(m, XS),
    "options first": lambda m: nnx.vmap(in_axes=(None, 0))(read)(m, XS),
    "list of axes": lambda m: nnx.vmap(read, in_axes=[None, 0])(m, XS),
    "unbound method": lambda m: nnx.vmap(Layer.read, in_axes=(None, 0))(m, XS),
    "bound method": lambda m: nnx.vmap(m.read)(XS),
    "bound method with axes": lambda m: nnx.vmap(m.read, in_axes=(0,))(XS),
    "Module": lambda m: nnx.vmap(m)(XS[None])[0],
    "partial": lambda m: nnx.vmap(functools.partial(read, m))(XS),
    "partial by keyword": lambda m: nnx.vmap(functools.partial(read, model=m))(x=XS),
    "keyword": lambda m: nnx.vmap(read, in_axes=(None,))(m, x=XS),
    "StateAxes": lambda m: nnx.vmap(read, in_axes=(nnx.StateAxes({...: None}), 0))(m, XS),
    "decorated method": lambda m: m.rows(XS),
    "decorated __call__": lambda m: m(XS),
    "closure": lambda m: nnx.vmap(lambda x: m.read(x))(XS),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_use_maps_the_array_and_passes_the_model_whole(way):
    m = Decorated()
    np.testing.assert_allclose(WAYS[way](m), jnp.stack([m.read(x) for x in XS]), rtol=1e-6)


def test_without_parentheses_all_positional_arguments_are_mapped():
    many = nnx.vmap(lambda value: Decorated(value))(jnp.array([1.0, 2.0]))
    expected = jnp.stack([Layer(1.0).read(X), Layer(2.0).read(2 * X)])
    np.testing.assert_allclose(many.members(XS), expected, rtol=1e-6)


def test_a_keyword_given_at_the_call_is_mapped_and_one_bound_before_is_not():
    scaled = functools.partial(lambda x, by: x * by, by=10.0)
    np.testing.assert_array_equal(nnx.vmap(scaled)(jnp.arange(2.0)), [0, 10])
    np.testing.assert_array_equal(nnx.vmap(scaled)(jnp.arange(2.0), by=jnp.array([3.0, 4.0])), [0, 4])


def test_an_argument_passed_by_name_takes_the_axis_of_its_position():
    model, expected = Layer(), jnp.stack([Layer().read(X), Layer().read(2 * X)])
    read = nnx.vmap(lambda m, x, by=1.0: by * m.read(x), in_axes=(None, 1, None))
    np.testing.assert_allclose(read(by=3.0, x=XS.T, m=model), 3 * expected, rtol=1e-6)
    np.testing.assert_allclose(read(model, x=XS.T, by=3.0), 3 * expected, rtol=1e-6)


def test_a_constructor_mapped_over_keys_gives_each_member_its_own_weights():
    keys = jax.random.split(jax.random.key(1), 5)
    many = nnx.vmap(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key)))(keys)
    assert isinstance(many, nnx.Linear)
    assert many.kernel.shape == (5, 2, 3)
    np.testing.assert_array_equal(many.kernel[3], nnx.Linear(2, 3, rngs=nnx.Rngs(keys[3])).kernel.value)
    same = nnx.vmap(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), axis_size=4)()
    assert same.kernel.shape == (4, 2, 3)


def test_out_axes_place_the_new_axis_also_by_filter():
    keys = jax.random.split(jax.random.key(1), 5)
    axes = nnx.StateAxes({nnx.PathContains("kernel"): 1, ...: 0})
    many = nnx.vmap(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key)), out_axes=axes)(keys)
    assert many.kernel.shape == (2, 5, 3)
    assert many.bias.shape == (5, 3)
    assert nnx.vmap(lambda x: x, out_axes=1)(jnp.ones((2, 3))).shape == (3, 2)
    assert nnx.vmap(lambda x: x, in_axes=-1, out_axes=-1)(jnp.ones((2, 3))).shape == (2, 3)


def test_statistics_with_an_axis_are_kept_for_each_example():
    m = nnx.vmap(lambda _: Norm())(jnp.zeros(2))
    m.scale.value = m.scale.value[0]
    nnx.vmap(lambda m, x: m(x), in_axes=(PER_EXAMPLE, 0))(m, XS)
    np.testing.assert_allclose(m.mean.value, XS / 2)
    np.testing.assert_array_equal(m.count.value, [1, 1])


def test_a_value_that_does_not_depend_on_the_axis_may_change_in_what_is_passed_whole():
    m = Layer()
    nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, XS)
    assert m.calls.value == 1


def test_a_mapped_value_in_what_is_passed_whole_is_an_error_that_names_it_and_changes_nothing():
    m = Pair()
    m.norm = Norm()
    before = Snapshot(m)
    with pytest.raises(errors.PrefixError, match=r"depends on the mapped axis:\n  args\[0\]\.norm\.mean\nGive them"):
        nnx.vmap(lambda m, x: m.norm(x), in_axes=(None, 0))(m, XS)
    before.assert_unchanged()


def test_a_mapped_output_without_an_axis_is_an_error():
    with pytest.raises(errors.PrefixError, match=r"depends on the mapped axis:\n  <output>"):
        nnx.vmap(lambda x: x, out_axes=None)(XS)


def test_a_mean_over_the_named_axis_may_be_stored_in_what_is_passed_whole():
    def f(m, x):
        m.mean.value = jax.lax.pmean(x, "batch")
        return x - m.mean

    m = Norm()
    out = nnx.vmap(f, in_axes=(None, 0), axis_name="batch")(m, XS)
    np.testing.assert_allclose(m.mean.value, XS.mean(0))
    np.testing.assert_allclose(out.sum(0), jnp.zeros(3), atol=1e-6)


def test_spmd_axis_name_reaches_jax():
    """A constraint of a slice gets the mesh axis that the mapped axis is on."""
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    slices = jax.sharding.NamedSharding(mesh, jax.P(None))

    def f(m, x):
        return jax.lax.with_sharding_constraint(m.mean + x, slices)

    def mapped(xs, **options):
        return nnx.vmap(f, in_axes=(None, 0), **options)(Norm(), xs)

    named = str(jax.make_jaxpr(lambda xs: mapped(xs, spmd_axis_name="batch"))(XS))
    is_sharded = r"spec=\w+\('batch'"
    assert re.search(is_sharded, named)
    assert not re.search(is_sharded, str(jax.make_jaxpr(mapped)(XS)))


def test_structure_changes_come_out_with_the_axis_of_what_holds_them():
    """A new Variable is stacked where its Module is mapped; deletions and swaps have happened to the live objects."""

    def f(m, x):
        m.new = nnx.Cache(x)
        del m.tied
        m.a, m.b = m.b, m.a
        return m.a

    m = nnx.vmap(lambda _: Pair())(jnp.zeros(2))
    a, b = m.a, m.b
    assert nnx.vmap(f)(m, XS) is b
    assert m.a is b
    assert m.b is a
    assert m.me is m
    assert not hasattr(m, "tied")
    np.testing.assert_array_equal(m.new.value, XS)


def test_sown_values_are_stacked():
    class Sower(Layer):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return self.read(x)

    m = Sower()
    nnx.vmap(lambda m, x: m(x), in_axes=(nnx.StateAxes({nnx.Intermediate: 0, ...: None}), 0))(m, XS)
    np.testing.assert_array_equal(m.seen.value[0], XS)


def test_captured_values_are_stacked_at_the_front_whatever_the_other_axes():
    """What slices sow has an axis of its own, also if no argument or output has that one."""

    class Sower(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return x

    over_columns = nnx.vmap(lambda m, x: m(x), in_axes=(None, 1), out_axes=1)
    out, recorded = nnx.capture(over_columns, nnx.Intermediate)(Sower(), XS)
    np.testing.assert_array_equal(out, XS)
    np.testing.assert_array_equal(recorded.seen.value[0], XS.T)


def test_shared_objects_stay_shared_and_inputs_come_back_as_themselves():
    def f(m, v, x):
        assert v is m.a.w
        assert m.tied is v
        assert m.me is m
        v.value = v.value + x
        return m, v

    m = nnx.vmap(lambda _: Pair())(jnp.zeros(2))
    out, v = nnx.vmap(f)(m, m.a.w, XS)
    assert out is m
    assert v is m.a.w
    assert m.tied is v
    np.testing.assert_array_equal(v.value, 1 + XS)


def test_a_shared_object_with_two_axes_is_an_error_that_names_both_paths():
    m = Layer()
    with pytest.raises(errors.AliasingError, match=r"args\[0\]\.w: 0, but args\[1\]: None"):
        nnx.vmap(lambda m, v: v * 1, in_axes=(nnx.StateAxes({nnx.Param: 0, ...: None}), None))(m, m.w)


WRONG = {
    "too many axes": (
        lambda: nnx.vmap(read, in_axes=(None, 0, 0))(Layer(), XS),
        "in_axes=.* has 3 entries, but the function was called with 2",
    ),
    "not an axis": (lambda: nnx.vmap(read, in_axes=("0", 0)), "vmap takes an int, None or nnx.StateAxes"),
    "Carry": (lambda: nnx.vmap(read, in_axes=(nnx.Carry, 0)), "vmap takes an int, None or nnx.StateAxes"),
    "Carry in StateAxes": (lambda: nnx.vmap(read, in_axes=(nnx.StateAxes({...: nnx.Carry}), 0)), "vmap takes an int"),
    "not an axis for the output": (lambda: nnx.vmap(read, out_axes="x"), "out_axes='x' has 'x'; vmap takes an int"),
    "no filter takes a leaf": (
        lambda: nnx.vmap(read, in_axes=(nnx.StateAxes({nnx.Param: 0}), 0))(Layer(), XS),
        r"No filter matched calls \(Cache\) in .*; add `\.\.\.: label`",
    ),
    "no such axis": (
        lambda: nnx.vmap(read, in_axes=(nnx.StateAxes({nnx.Param: 1, ...: None}), 0))(Layer(), XS),
        r"args\[0\]\.w has shape \(3,\), so there is no axis 1 for vmap",
    ),
    "sizes differ": (
        lambda: nnx.vmap(read, in_axes=(nnx.StateAxes({nnx.Param: 0, ...: None}), 0))(Layer(), XS),
        r"vmap got axes of different sizes: 3 \(args\[0\]\.w\), 2 \(args\[1\]\)",
    ),
    "other axis_size": (
        lambda: nnx.vmap(jnp.sin, axis_size=5)(XS),
        r"different sizes: 5 \(axis_size\), 2 \(args\[0\]\)",
    ),
    "a number": (lambda: nnx.vmap(jnp.sin)(1.0), r"args\[0\] has shape \(\), so there is no axis 0 .*\nNone is for"),
    "a statistic": (
        lambda: nnx.vmap(lambda d: d.n + 1)(nnx.Dict(n=nnx.BatchStat(jnp.array(0)))),
        r"args\[0\]\.n has shape \(\), so there is no axis 0 .*\nNone is for",
    ),
    "a stream that is not split": (
        lambda: nnx.vmap(lambda rngs: nnx.Linear(2, 3, rngs=rngs), axis_size=7)(nnx.Rngs(0)),
        r"args\[0\]\.default\.count has shape \(\), so there is no axis 0 .*\n.*@nnx.split_rngs\(splits=7\)",
    ),
    "a stream before what gives the size": (
        lambda: nnx.vmap(lambda rngs, x: x * rngs.normal())(nnx.Rngs(0), XS),
        r"args\[0\]\.default\.count has shape .*\n.*@nnx.split_rngs\(splits=2\) .*, or rngs.split\(2\)",
    ),
    "a stream that split_rngs left out": (
        lambda: nnx.split_rngs(splits=2, only="dropout")(nnx.vmap(lambda layer, x: layer(x)))(
            nnx.Dropout(0.5, rngs=nnx.Rngs(0)), XS
        ),
        r"args\[0\]\.rngs\.count has shape .*\n.* random stream 'default'\. Split the stream",
    ),
    "no axis in the output": (
        lambda: nnx.vmap(lambda x: Layer(), out_axes=nnx.StateAxes({nnx.Param: 3, ...: None}))(XS),
        r"The axis in out_axes does not exist:\n  <output>\.w: it has 2 axes, so there is no axis 3",
    ),
    "out_axes of another structure": (
        lambda: nnx.vmap(lambda x: (x, x), out_axes=(0, 0, 0))(XS),
        r"out_axes=\(0, 0, 0\) has 3 entries, but there are 2 values",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_axes_are_errors_that_say_what_and_where(case):
    call, message = WRONG[case]
    with pytest.raises(errors.PrefixError, match=message):
        call()


def test_what_is_no_array_cannot_be_mapped():
    """The error names it; passed whole it may be anything."""
    say = lambda x, by: x * len(by["text"])
    with pytest.raises(errors.ArgumentError, match=r"args\[1\]\.text is a str \('abc'\).* vmap .*None in in_axes"):
        nnx.vmap(say)(XS, {"text": "abc"})
    np.testing.assert_array_equal(nnx.vmap(say, in_axes=(0, None))(XS, {"text": "abc"}), XS * 3)
    with pytest.raises(errors.ArgumentError, match=r"(?s)args\[0\] is a deque .* scan .*None in in_axes"):
        nnx.scan(lambda x: x, in_axes=0, out_axes=0)(collections.deque([1, XS]))


def test_a_filter_may_take_nothing():
    """It may be for what the function attaches, or for a kind of layer that this model does not have."""
    axes = nnx.StateAxes({nnx.BatchStat: 0, nnx.Intermediate: 0, ...: None})
    m = Layer()

    def f(m, x):
        m.seen = nnx.Intermediate(x)
        return m.read(x)

    np.testing.assert_array_equal(nnx.vmap(f, in_axes=(axes, 0))(m, XS), jax.vmap(m.read)(XS))
    np.testing.assert_array_equal(m.seen.value, XS)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_function_changes_nothing(error):
    def f(m, x):
        m(x)
        m.new = nnx.Param(x)
        raise error

    m = Pair()
    before = Snapshot(m)
    with pytest.raises(error):
        nnx.vmap(f, in_axes=(None, 0))(m, XS)
    before.assert_unchanged()


@pytest.mark.parametrize("raw", RAW)
def test_a_stack_mapped_in_a_forward_under_raw_jax_stays_concrete(raw):
    stack = stacked()
    before = Snapshot(stack)
    RAW[raw](lambda x: nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack, x).sum(0))
    before.assert_unchanged()


def test_no_tracer_leaks():
    m = nnx.vmap(lambda _: Norm())(jnp.zeros(2))
    with jax.checking_leaks():
        nnx.jit(nnx.vmap(lambda m, x: m(x)))(m, XS)
    assert_no_tracer(m)
    np.testing.assert_array_equal(m.count.value, [1, 1])


def test_vmap_of_vmap_of_grad_equals_plain_loops():
    def loss(m, x):
        return m(x).sum()

    per_example = nnx.vmap(lambda m, x: nnx.grad(loss)(m, x).w.value, in_axes=(None, 0))
    many = nnx.vmap(Layer)(jnp.array([1.0, 2.0]))
    grads = nnx.vmap(per_example, in_axes=(0, None))(many, XS)
    expected = [[nnx.grad(loss)(Layer(value), x).w.value for x in XS] for value in (1.0, 2.0)]
    np.testing.assert_allclose(grads, np.array(expected), rtol=1e-6)
    np.testing.assert_array_equal(many.calls.value, [1, 1])


def test_random_streams_are_split_by_stacking_or_shared_by_passing_whole():
    split = nnx.Rngs(0).split(3)
    draw = nnx.vmap(lambda rngs: jax.random.normal(rngs()))
    first, second = draw(split), draw(split)
    assert len({*map(float, first), *map(float, second)}) == 6
    whole = nnx.Rngs(0)
    same = nnx.vmap(lambda rngs, x: jax.random.normal(rngs()) + x, in_axes=(None, 0))(whole, jnp.zeros(3))
    assert len({*map(float, same)}) == 1
    assert whole.default.count.value == 1


@pytest.mark.parametrize("transform", [nnx.pmap, nnx.vmap])
def test_a_mapped_function_goes_with_the_model_that_it_closes_over(transform):
    def use():
        model = Layer()
        transform(lambda x: x * model.w)(X[None])
        return weakref.ref(model)

    try:
        assert_freed(use)
    except NotImplementedError:
        pytest.skip("this JAX has no pmap")


def test_pmap_maps_over_devices_with_state():
    many = nnx.vmap(lambda value: Layer(value))(jnp.ones(1))
    try:
        out = nnx.pmap(lambda m, x: m(x), axis_name="device")(many, X[None])
    except NotImplementedError:
        pytest.skip("this JAX has no pmap")
    np.testing.assert_allclose(out[0], jnp.sin(X), rtol=1e-6)
    np.testing.assert_array_equal(many.calls.value, [1])
    with pytest.raises(errors.PrefixError, match=r"pmap takes an int, None or nnx\.StateAxes"):
        nnx.pmap(read, in_axes=nnx.Carry)


def test_pmap_where_nothing_is_passed_whole():
    """The axes are those of the leaves also when a filter of StateAxes takes none of them."""
    axes = nnx.StateAxes({(nnx.Param, nnx.RngState): 0, ...: None})
    make = nnx.pmap(lambda rngs: nnx.Linear(2, 3, rngs=rngs), in_axes=(axes,), out_axes=axes)
    layer = nnx.split_rngs(splits=1)(make)(nnx.Rngs(0))
    assert (layer.kernel.shape, layer.bias.shape) == ((1, 2, 3), (1, 3))


def test_pmap_takes_static_arguments():
    """`static_broadcasted_argnums` are part of the program; `donate_argnums` deletes nothing."""
    m = nnx.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 1))
    f = nnx.pmap(
        lambda m, mode, x: m(x) if mode == "on" else x,
        in_axes=(0, None, None),
        static_broadcasted_argnums=1,
        donate_argnums=0,
    )
    x = jnp.ones((1, 2))
    assert jnp.allclose(f(m, "on", x)[0], x @ m.kernel[0])
    assert jnp.array_equal(f(m, "off", x)[0], x)


def on_one_device(value=1.0):
    return nnx.vmap(lambda value: Layer(value))(jnp.full(1, value))


def test_pmap_is_traced_once_for_each_structure():
    """And shape, as by jax.pmap; a second model of the structure finds the program, also in another pmap."""
    traces = []

    def call(m, x, scale=1.0):
        traces.append(x.shape)
        return m(x) * scale

    f, m, other = nnx.pmap(call), on_one_device(), on_one_device(2.0)
    for count in range(1, 5):
        np.testing.assert_allclose(f(m, X[None])[0], jnp.sin(X), rtol=1e-6)
        np.testing.assert_array_equal(m.calls.value, [count])
        assert len(traces) <= 2  # JAX traces once more for arrays that the first call has placed on the devices
    traces.clear()
    np.testing.assert_allclose(f(other, X[None])[0], jnp.sin(2 * X), rtol=1e-6)
    nnx.pmap(call)(m, X[None])
    assert not traces
    for other_call in (
        lambda: f(m, X[None, :1]),
        lambda: f(m, X[None], scale=jnp.ones(1)),
        lambda: nnx.pmap(call, in_axes=(0, None))(m, X),
        lambda: (setattr(m, "flag", True), f(m, X[None])),
    ):
        other_call()
        other_call()
        assert 1 <= len(traces) <= 2
        traces.clear()
        other_call()
        assert not traces


def test_pmap_of_a_function_that_refers_to_a_model_sees_it_as_it_is():
    m = Layer(1.0)
    f = nnx.pmap(lambda x: m.w * x)
    for value in (1.0, 2.0):
        m.w.value = jnp.asarray(value)
        assert f(jnp.ones(1)) == value
    holder = {"model": m}
    g = nnx.pmap(lambda x: holder["model"].w * x)
    for value in (1.0, 2.0):
        m.w.value = jnp.asarray(value)
        assert g(jnp.ones(1)) == value


def test_pmap_fails_and_goes_on():
    """An error changes nothing, and does not spoil the next call."""

    def call(m, x, fail):
        m.calls.value += 1
        if fail:
            raise ValueError("now")
        return x

    m = on_one_device()
    f = nnx.pmap(call, in_axes=(0, 0, None), static_broadcasted_argnums=2)
    for fail in (True, False, True, False):
        if fail:
            with pytest.raises(ValueError, match="now"):
                f(m, jnp.ones(1), fail)
        else:
            f(m, jnp.ones(1), fail)
    np.testing.assert_array_equal(m.calls.value, [2])


def test_an_error_of_the_function_itself_runs_it_once():
    """Only when JAX complains is the function looked at again, to find out about what."""
    calls = []

    def fail(m):
        calls.append(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        nnx.vmap(fail)(nnx.Dict(w=nnx.Param(jnp.ones(3))))
    assert len(calls) == 1


def test_what_is_passed_whole_is_named_attribute_by_attribute():
    """Also arrays that are attributes, items of lists and of pytrees; and parts of the output."""

    class Recorder(nnx.Module):
        def __init__(self):
            self.last, self.log = None, []

        def __call__(self, x):
            self.last = x
            self.log.append((x, x))
            return {"y": x}

    with pytest.raises(errors.PrefixError) as caught:
        nnx.vmap(Recorder.__call__, in_axes=(None, 0), out_axes=None)(Recorder(), jnp.ones(3))
    for path in ("args[0].last", "args[0].log[0][1]", "<output>.y"):
        assert f"\n  {path}\n" in str(caught.value)


def test_what_pmap_cannot_trace_is_named_by_its_path():
    """Other than vmap, which hands an argument that is no array on, pmap traces all of them."""
    layer, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 4, 2))
    mapped = nnx.pmap(lambda m, x, mode: m(x), in_axes=(None, 0, None), devices=jax.devices()[:1])
    with pytest.raises(nnx.errors.ArgumentError, match=r"args\[2\] is a str \('train'\), which JAX cannot trace"):
        mapped(layer, x, "train")
    assert nnx.vmap(lambda m, x, mode: m(x), in_axes=(None, 0, None))(layer, x, "train").shape == (1, 4, 3)


def test_pmap_refuses_negative_axes():
    """JAX returns arrays of another shape for them, in silence, or fails."""
    for axes in {"in_axes": -1}, {"in_axes": (None, nnx.StateAxes({...: -1}))}, {"out_axes": (0, -2)}:
        with pytest.raises(errors.PrefixError, match=r"pmap takes no negative axes, but got in_axes=.*-"):
            nnx.pmap(lambda x: x, **axes)


def test_more_slices_than_devices_are_refused():
    n = jax.device_count() + 1
    with pytest.raises(
        errors.PrefixError, match=rf"pmap needs a device for each of the {n} slices .* there are {n - 1}\. nnx\.vmap"
    ):
        nnx.pmap(lambda layer, x: layer(x), in_axes=(None, 0))(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((n, 2)))


def test_pmap_of_nothing_that_is_mapped_is_the_error_of_jax():
    for x, axes in ((X, None), (jnp.zeros(0), 0)):
        found = []
        for pmap in nnx.pmap, jax.pmap:
            with pytest.raises((ValueError, ZeroDivisionError)) as caught:  # the latter before JAX 0.9
                pmap(lambda x: x, in_axes=axes)(x)
            found.append((caught.type, re.sub("0x[0-9a-f]+", "", str(caught.value))))
        assert found[0] == found[1]


def test_a_function_that_fails_shows_its_own_error_whatever_out_axes_says():
    with pytest.raises(TypeError, match="dot_general requires"):
        nnx.vmap(lambda x: jnp.ones((2, 3)) @ jnp.ones((2, 3)), out_axes=5)(XS)


@pytest.mark.skipif("sum_match" not in inspect.signature(jax.vmap).parameters, reason="JAX has no sum_match")
def test_sums_over_the_axis():
    """Output with the axis None is summed if it depends on the axis, as in JAX; a change of an argument is not."""
    f = lambda w, x: (w * x, 3.0 * w)
    expected = jax.vmap(f, (None, 0), None, sum_match=True)(2.0, X)
    out = nnx.vmap(lambda v, x: f(v, x), in_axes=(None, 0), out_axes=None, sum_match=True)(nnx.Param(2.0), X)
    assert jax.tree.map(jnp.array_equal, out, expected) == (True, True)

    def count(v, x, by):
        v += by(x)
        return x

    v = nnx.Variable(jnp.array(1.0))
    total = nnx.vmap(count, in_axes=(None, 0, None), out_axes=None, sum_match=True)
    assert jnp.array_equal(total(v, X, lambda x: 1.0), X.sum(0))
    assert v == 2
    with pytest.raises(errors.PrefixError, match=r"mapped axis:\n  args\[0\]\nGive them an axis"):
        total(v, X, jnp.sum)
    assert v == 2
    with pytest.raises(errors.PrefixError, match=r"mapped axis:\n  args\[0\]\n"):  # though an argument is a function
        nnx.vmap(count, in_axes=(None, 0, None))(v, X, jnp.sum)
    with pytest.raises(ValueError, match="mine"):
        total(v, X, functools.partial(_fail, ValueError("mine")))


def _fail(error, x):
    raise error


@pytest.mark.skipif("sum_match" in inspect.signature(jax.vmap).parameters, reason="JAX has sum_match")
def test_sums_need_a_newer_jax():
    with pytest.raises(TypeError, match="unexpected keyword argument 'sum_match'"):
        nnx.vmap(lambda x: x, sum_match=True)
