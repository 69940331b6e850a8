"""nnx.scan: stacked, carried and whole Modules; equal to the plain Python loop; errors that name paths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from nnxlib.transforms.body_checks import BodyError
from tests.properties.compare import Snapshot, assert_no_tracer

from .models import RAW, REPLACING, Layer, Norm, Pair, Parts, X, counted, stacked

XS = jnp.stack([X, 2 * X, 3 * X])
CARRIED = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None})
ALL_CARRIED = nnx.StateAxes({...: nnx.Carry})


def step(carry, m, x):
    carry = carry + m(x)
    return carry, carry.sum()


class Decorated(Layer):
    @nnx.scan(in_axes=(ALL_CARRIED, nnx.Carry, 0))
    def total(self, carry, x):
        carry = carry + self.one(x)
        return carry, carry.sum()

    @nnx.scan(in_axes=(ALL_CARRIED, nnx.Carry, 0))
    def __call__(self, carry, x):
        carry = carry + self.one(x)
        return carry, carry.sum()

    def one(self, x):
        return Layer.__call__(self, x)


AXES = (nnx.Carry, ALL_CARRIED, 0)
WAYS = {
    "function": lambda m: nnx.scan(step, in_axes=AXES)(jnp.zeros(3), m, XS),
    "options first": lambda m: nnx.scan(in_axes=AXES)(step)(jnp.zeros(3), m, XS),
    "list of axes": lambda m: nnx.scan(step, in_axes=list(AXES))(jnp.zeros(3), m, XS),
    "keywords": lambda m: nnx.scan(step, in_axes=AXES)(jnp.zeros(3), x=XS, m=m),
}


def plain_loop(m):
    carry, ys = jnp.zeros(3), []
    for x in XS:
        carry, y = step(carry, m, x)
        ys.append(y)
    return carry, jnp.stack(ys)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_use_equals_the_plain_loop(way):
    m, plain = Layer(), Layer()
    carry, ys = WAYS[way](m)
    expected = plain_loop(plain)
    np.testing.assert_allclose(carry, expected[0], rtol=1e-6)
    np.testing.assert_allclose(ys, expected[1], rtol=1e-6)
    assert m.calls.value == 3


def test_methods_and_call_can_be_decorated():
    m, expected = Decorated(), plain_loop(Layer())
    np.testing.assert_allclose(m.total(jnp.zeros(3), XS)[1], expected[1], rtol=1e-6)
    assert m.calls.value == 3
    np.testing.assert_allclose(m(jnp.zeros(3), XS)[0], expected[0], rtol=1e-6)


def test_bound_methods_modules_and_partials_are_passed_whole():
    """What was bound is seen by every iteration, so it may be read, and a change is an error that names it."""
    m, expected = Layer(), jnp.stack([Layer().read(x) for x in XS])
    options = {"in_axes": (0,), "out_axes": 0}
    np.testing.assert_allclose(nnx.scan(m.read, **options)(XS), expected, rtol=1e-6)
    np.testing.assert_allclose(nnx.scan(functools.partial(Layer.read, m), **options)(XS), expected, rtol=1e-6)
    np.testing.assert_allclose(nnx.scan(functools.partial(Layer.read, x=X), **options)(stacked_layers()).shape, (2, 3))
    with pytest.raises(errors.PrefixError, match=r"args\[0\]\.calls: every iteration would leave a value"):
        nnx.scan(m, **options)(XS)


def stacked_layers():
    return nnx.vmap(Layer)(jnp.array([1.0, 2.0]))


def test_a_carry_comes_after_what_is_bound():
    total, before = nnx.scan(functools.partial(lambda m, carry, x: (carry + m.read(x), carry), Layer()))(X, XS)
    plain = np.cumsum([X, *(Layer().read(x) for x in XS)], axis=0)
    np.testing.assert_allclose(total, plain[-1], rtol=1e-6)
    np.testing.assert_allclose(before, plain[:-1], rtol=1e-6)


def test_the_carry_may_be_any_argument_and_any_output():
    """Also among arrays alone, which are told apart by their places."""
    seen, last = nnx.scan(lambda x, y, c: (c, c + x * y), in_axes=(0, 0, nnx.Carry), out_axes=(0, nnx.Carry))(XS, XS, X)
    expected = np.cumsum([X, *XS**2], axis=0)
    np.testing.assert_allclose(last, expected[-1], rtol=1e-6)
    np.testing.assert_allclose(seen, expected[:-1], rtol=1e-6)


def test_without_parentheses_the_first_argument_is_carried_and_the_second_mapped():
    @nnx.scan
    def add(carry, x):
        return carry + x, carry

    total, before = add(jnp.zeros(3), XS)
    np.testing.assert_array_equal(total, XS.sum(0))
    np.testing.assert_array_equal(before, jnp.cumsum(XS, 0) - XS)


def test_keyword_only_arguments_are_passed_whole():
    def f(carry, x, scale=1.0, *, by=1.0):
        return carry + scale * by * x, None

    np.testing.assert_array_equal(nnx.scan(f)(jnp.zeros(3), XS, by=2.0)[0], 2 * XS.sum(0))
    g = nnx.scan(f, in_axes=(nnx.Carry, 0, None))
    np.testing.assert_array_equal(g(jnp.zeros(3), XS, scale=jnp.array(3.0), by=2.0)[0], 6 * XS.sum(0))
    np.testing.assert_array_equal(g(jnp.zeros(3), scale=jnp.array(3.0), x=XS)[0], 3 * XS.sum(0))


def test_a_default_before_a_named_argument_is_filled_in():
    f = nnx.scan(lambda carry, x, a=1.0, b=1.0: (carry + a * b * x, None), in_axes=(nnx.Carry, 0, None, None))
    np.testing.assert_array_equal(f(jnp.zeros(3), XS, b=jnp.array(5.0))[0], 5 * XS.sum(0))


def test_a_stack_of_layers_equals_the_loop_over_them():
    stack = stacked()
    out = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(stack, X)
    expected = X
    for kernel, bias in zip(stack.kernel.value, stack.bias.value, strict=True):
        expected = expected @ kernel + bias
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_the_model_first_carry_whole_and_mapped_arguments():
    """in_axes=(0, Carry, None, 0), the order of published language models."""
    stack = stacked(3)
    f = nnx.scan(lambda layer, x, mask, y: (layer(x) * mask + y, y), in_axes=(0, nnx.Carry, None, 0))
    out, ys = f(stack, X, jnp.array([1.0, 0.0, 1.0]), XS)
    expected = X
    for i in range(3):
        expected = (expected @ stack.kernel[i] + stack.bias[i]) * jnp.array([1.0, 0.0, 1.0]) + XS[i]
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    np.testing.assert_array_equal(ys, XS)


def test_axes_of_inputs_and_outputs_may_be_any():
    xs = jnp.arange(24.0).reshape(2, 3, 4)
    out = nnx.scan(lambda x: x + 1, in_axes=(1,), out_axes=1)(xs)
    np.testing.assert_array_equal(out, xs + 1)
    assert nnx.scan(lambda x: x, in_axes=(-1,), out_axes=0)(xs).shape == (4, 2, 3)
    assert nnx.scan(lambda x: (x, {"a": x}), in_axes=0, out_axes=(0, {"a": -1}))(xs)[1]["a"].shape == (3, 4, 2)
    assert nnx.scan(lambda x: x, in_axes=0, out_axes=-3)(xs).shape == (2, 3, 4)  # -3 is the first of three


def test_unroll_true_is_another_program_than_unroll_1():
    """They are equal for Python; the second loop ran as the first one, in as many steps."""

    def body(carry, x):
        return carry + x, None

    def step(i, x):
        return x + i

    loops = {
        "scan": lambda unroll: nnx.scan(body, unroll=unroll)(0.0, jnp.arange(4.0)),
        "fori_loop": lambda unroll: nnx.fori_loop(0, 4, step, 0.0, unroll=unroll),
        "remat_scan": lambda unroll: nnx.remat_scan(body, lengths=(4,), unroll=unroll, out_axes=(nnx.Carry, 0))(
            0.0, jnp.arange(4.0)
        ),
    }
    for loop in loops.values():
        for unroll, steps in ((1, 1), (True, 4), (False, 1), (2, 2)):
            (equation,) = jax.make_jaxpr(lambda loop=loop, unroll=unroll: loop(unroll))().eqns[-1:]
            assert (equation.primitive.name, equation.params["unroll"]) == ("scan", steps)


@pytest.mark.parametrize(
    "run",
    [
        lambda unroll: nnx.scan(lambda c, x: (c + x, None), unroll=unroll)(0.0, jnp.arange(3.0))[0],
        lambda unroll: nnx.remat_scan(lambda c, x: c + x, lengths=(3,), unroll=unroll)(0.0, jnp.arange(3.0)),
        lambda unroll: nnx.fori_loop(0, 3, lambda i, c: c + i, 0.0, unroll=unroll),
    ],
    ids=["scan", "remat_scan", "fori_loop"],
)
def test_unroll_may_be_an_array_whose_value_is_known(run):
    """As in JAX, which also says what is wrong if it is not known."""
    assert [run(kind(2)) for kind in (int, np.int64, jnp.int32)] == 3 * [3.0]
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(run)(2)


def test_reverse_unroll_and_length_reach_jax():
    carry, seen = nnx.scan(lambda c, x: (x, c), reverse=True)(jnp.zeros(3), XS)
    np.testing.assert_array_equal(carry, XS[0])
    np.testing.assert_array_equal(seen[-1], jnp.zeros(3))
    count = nnx.scan(lambda c: c + 1, length=5, in_axes=nnx.Carry, out_axes=nnx.Carry)
    assert count(jnp.array(0)) == 5
    assert nnx.scan(lambda c: c + 1, length=jnp.array(5), in_axes=nnx.Carry, out_axes=nnx.Carry)(jnp.array(0)) == 5
    text = str(jax.make_jaxpr(lambda xs: nnx.scan(lambda c, x: (c + x, x), unroll=3)(X, xs))(XS))
    assert "unroll=3" in text


@pytest.mark.parametrize("split", [False, True])
def test_split_transpose_reaches_jax(split):
    """In JAX 0.8 it splits the backward loop in two; it changes no gradient."""
    body = lambda c, x: (jnp.tanh(c * x), c)
    ours = lambda xs: nnx.scan(body, _split_transpose=split)(X, xs)[0].sum()
    theirs = lambda xs: jax.lax.scan(body, X, xs, _split_transpose=split)[0].sum()
    np.testing.assert_allclose(jax.grad(ours)(XS), jax.grad(theirs)(XS), rtol=1e-6)
    count = lambda f: str(jax.make_jaxpr(jax.grad(f))(XS)).count("scan[")
    assert count(ours) == count(theirs)


def test_one_function_in_several_loops():
    """Each has a program of its own, though the arguments are the same; so have other models and lengths."""

    def f(c, x):
        return c + x, c

    def g(m):
        m.count += 1
        return m.count * getattr(m, "by", 1)

    for _ in range(2):
        for options in {}, {"reverse": True}:
            ours, theirs = nnx.scan(f, **options)(X, XS), jax.lax.scan(f, X, XS, **options)
            np.testing.assert_array_equal(ours[1], theirs[1])
        assert nnx.scan(f, out_axes=(nnx.Carry, -1))(X, XS[:2])[1].shape == (3, 2)
        assert nnx.scan(f)(X, XS[:2])[1].shape == (2, 3)
        for length, by in [(2, 1), (3, 1), (3, 5)]:
            m = nnx.Dict(count=nnx.Param(jnp.array(0)), by=by)
            seen = nnx.scan(g, in_axes=(ALL_CARRIED,), out_axes=0, length=length)(m)
            assert seen.tolist() == [by * (k + 1) for k in range(length)]


def test_one_function_with_several_hooks_and_names():
    """What the loop does with the same function and axes depends on them, too."""

    def f(m, x):
        m.new = nnx.Param(m.w * x, sharding=("in",))
        return m.new.sum()

    hooks = {by: lambda label, state, by=by: jax.tree.map(lambda x: by * x, state) for by in (1, 2)}
    for by, name in [(1, "a"), (2, "a"), (2, "b")]:
        m = nnx.Dict(w=nnx.Param(jnp.ones(3)))
        options = {"transform_metadata": {nnx.PARTITION_NAME: name}, "data_transform": hooks[by]}
        loop = nnx.scan(f, in_axes=(0, 0), out_axes=0, **options)
        np.testing.assert_array_equal(loop(m, XS), by * XS.sum(1))
        assert m["new"].sharding_names == (name, "in")


def test_one_function_with_a_filter_that_looks_at_shapes():
    """Models of one structure may be carried and stacked by it in other ways."""
    axes = nnx.StateAxes({(lambda path, x: x.ndim == 2): 0, ...: None})

    def f(m, x):
        return m["w"] * x

    for w in (jnp.ones(3), 2 * XS, jnp.ones(3)):
        m = nnx.Dict(w=nnx.Param(w))
        np.testing.assert_array_equal(nnx.scan(f, in_axes=(axes, 0), out_axes=0)(m, XS), w * XS)


def test_scan_without_a_carry_is_a_map():
    m = Norm()
    m.training = False
    out = nnx.scan(lambda m, x: m(x), in_axes=(None, 0), out_axes=0)(m, XS)
    np.testing.assert_allclose(out, jnp.stack([m(x) for x in XS]), rtol=1e-6)


def test_statistics_in_a_stack_are_kept_for_each_layer_and_carried_ones_go_through_all():
    stack = nnx.vmap(lambda _: Norm())(jnp.zeros(3))
    nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, stack)
    np.testing.assert_array_equal(stack.count.value, [1, 1, 1])
    assert len(np.unique(stack.mean.value[:, 0])) == 3
    one = Norm()
    nnx.scan(lambda m, x: m(x), in_axes=(CARRIED, 0), out_axes=0)(one, XS)
    assert one.count.value == 3


class Seen(nnx.Variable):
    """A kind of Variable that only this file knows."""


def test_what_is_passed_whole_and_changed_is_to_be_carried_by_the_types_that_it_has():
    """What the error says can be copied."""

    def body(m, x):
        m.seen.value, m.norm.mean.value = m.seen + x, m.norm.mean + x
        return x

    m = nnx.Dict(seen=Seen(0.0), norm=nnx.Dict(mean=nnx.BatchStat(0.0)), w=nnx.Param(1.0))
    with pytest.raises(errors.PrefixError, match=r"StateAxes\(\{BatchStat: nnx.Carry, Seen: nnx.Carry, ...: None\}\)"):
        nnx.scan(body, in_axes=(None, 0), out_axes=0)(m, jnp.arange(3.0))
    axes = nnx.StateAxes({nnx.BatchStat: nnx.Carry, Seen: nnx.Carry, ...: None})
    nnx.scan(body, in_axes=(axes, 0), out_axes=0)(m, jnp.arange(3.0))
    assert m.seen.value == m.norm.mean.value == 3


def test_an_array_that_is_no_variable_is_to_be_carried_by_its_name():
    def body(m, x):
        m.total, m.both["last"] = m.total + x, (x,)
        return x

    m = nnx.Dict(total=jnp.zeros(()), both=nnx.data({"last": (jnp.zeros(()),)}))
    advice = r"StateAxes\(\{nnx.PathContains\('total'\): nnx.Carry, nnx.PathContains\(0\): nnx.Carry, ...: None\}\)"
    with pytest.raises(errors.PrefixError, match=advice):
        nnx.scan(body, in_axes=(None, 0), out_axes=0)(m, jnp.arange(3.0))
    axes = nnx.StateAxes({nnx.PathContains("total"): nnx.Carry, nnx.PathContains(0): nnx.Carry, ...: None})
    nnx.scan(body, in_axes=(axes, 0), out_axes=0)(m, jnp.arange(3.0))
    assert m.total == 3
    assert m.both["last"] == (2,)


def test_a_change_in_what_is_passed_whole_is_an_error_that_names_it_and_changes_nothing():
    m = Norm()
    before = Snapshot(m)
    with pytest.raises(
        errors.PrefixError, match=r"args\[0\]\.mean: every iteration would leave a value(.|\n)*StateAxes"
    ):
        nnx.scan(lambda m, x: m(x), in_axes=(None, 0), out_axes=0)(m, XS)
    before.assert_unchanged()


def test_only_what_changed_is_written_back():
    m = Pair()
    before = m.a.w.value
    nnx.scan(lambda m, x: m.b(x), in_axes=(ALL_CARRIED, 0), out_axes=0)(m, XS)
    assert m.a.w.value is before
    assert m.b.calls.value == 3
    assert m.a.calls.value == 0


class Sower(nnx.Module):
    def __init__(self, shape=()):
        self.w = nnx.Param(jnp.ones((*shape, 3)))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return self.w * x


def test_sown_values_are_stacked_also_a_second_time():
    m = Sower()
    f = nnx.scan(lambda m, x: m(x), in_axes=(nnx.StateAxes({nnx.Intermediate: 0, ...: nnx.Carry}), 0), out_axes=0)
    f(m, XS)
    np.testing.assert_array_equal(m.seen.value[0], XS)
    f(m, 2 * XS)
    np.testing.assert_array_equal(m.seen.value[1], 2 * XS)
    nnx.pop(m, nnx.Intermediate)
    f(m, XS)
    assert len(m.seen.value) == 1


def test_the_same_function_with_other_filters_is_another_program():
    """Filters that differ only in what they say about Variables yet to come must not share a compiled loop."""

    def f(m, x):
        return m(x)

    shapes = []
    for axis in (0, 1):
        m = Sower((3,))
        axes = nnx.StateAxes({nnx.Intermediate: axis, ...: 0})
        nnx.scan(f, in_axes=(axes, 0), out_axes=0)(m, jnp.ones((3, 2, 3)))
        shapes.append(m.seen.value[0].shape)
    assert shapes == [(3, 2, 3), (2, 3, 3)]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (ALL_CARRIED, r"attached inside, but Carry needs a value(.|\n)*Attach the Variable before the loop"),
        (None, r"every iteration would leave a value(.|\n)*Give it an axis"),
    ],
)
def test_sowing_where_there_is_no_axis_is_an_error_that_says_what_to_do(axes, message):
    with pytest.raises(errors.PrefixError, match=r"args\[0\]\.seen: " + message):
        nnx.scan(lambda m, x: m(x), in_axes=(axes, 0), out_axes=0)(Sower(), XS)


def test_new_modules_come_out_stacked():
    out = nnx.scan(lambda x: Layer(x), in_axes=0, out_axes=0)(jnp.array([1.0, 2.0]))
    assert isinstance(out, Layer)
    np.testing.assert_array_equal(out.w.value, [[1, 1, 1], [2, 2, 2]])


def swap(m, x):
    m.a, m.b = m.b, m.a


def delete(m, x):
    del m.tied


def retype(m, x):
    m.a.__class__ = Norm


def count(m, x):
    m.flag = m.flag + 1


def reorder(m, x):
    m.a = vars(m).pop("a")


def replace(m, x):
    m.a.w = nnx.Param(x)


REFUSED = {
    swap: r"args\[0\]\.a: the Layer args\[0\]\.a became the Layer args\[0\]\.b",
    delete: r"args\[0\]\.tied: the Param args\[0\]\.a\.w became nothing",
    retype: r"args\[0\]\.a: its type",
    count: r"args\[0\]\.flag: 0 \(int\) became 1 \(int\)",
    reorder: r"args\[0\]: the order of its attributes",
    replace: r"args\[0\]\.a\.w: the Param args\[0\]\.a\.w became a new object",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda f: f.__name__)
def test_what_cannot_happen_once_for_each_iteration_is_refused_by_path(change):
    """The body is traced once, so a swap or a counter in a plain attribute would happen once, and not three times."""
    m = Pair()
    m.flag = 0
    before = Snapshot(m)
    with pytest.raises(
        BodyError, match="body of scan may change values, but not the structure(.|\n)*" + REFUSED[change]
    ):
        nnx.scan(change, in_axes=(nnx.StateAxes({...: None}), 0), out_axes=0)(m, XS)
    before.assert_unchanged()


def halve(m, x):
    m.w = nnx.BatchStat(m.w / 2)


def to_tree(m, x):
    m.w = {"scale": nnx.Param(x), "sign": nnx.Param(jnp.sign(m.w.value))}


def to_layer(m, x):
    m.w = Two(x)


def attach_and_delete(m, x):
    m.x, m.seen = nnx.Cache(x), True
    del m.w


def exchange(m, x):
    m.w, m.b = m.b, m.w


def tie(m, x):
    m.b = m.w


def mark(m, x):
    m.w.set_metadata(frozen=True)


class Two(nnx.Module):
    def __init__(self, x):
        self.w, self.b = nnx.Param(x * jnp.ones(3)), nnx.Param(-x * jnp.ones((2, 3)))


def flat(m):
    """The attributes of a module and their arrays, by path."""
    static = {name: x for name, x in vars(m).items() if isinstance(x, bool)}
    return {p: (type(v), v.get_metadata(), v.value) for p, v in nnx.to_flat_state(nnx.state(m))}, static


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("change", [halve, to_tree, to_layer, attach_and_delete, exchange, tie, mark])
def test_what_has_an_axis_may_change_its_structure_as_each_iteration_has_its_own(change, axis, reverse):
    make = nnx.vmap(Two, out_axes=axis)

    def f(carry, m, x):
        change(m, x)
        return carry + 1, x.sum()

    m, singles = make(jnp.arange(1.0, 4.0)), [Two(x) for x in (1.0, 2.0, 3.0)]
    count, sums = nnx.scan(f, in_axes=(nnx.Carry, axis, 0), reverse=reverse)(0, m, XS)
    for single, x in zip(singles, XS, strict=True):
        change(single, x)
    assert count == 3
    np.testing.assert_array_equal(sums, XS.sum(1))
    found, static = flat(m)
    expected = [flat(single)[0] for single in singles]
    assert static == flat(singles[0])[1]
    assert found.keys() == expected[0].keys()
    for path, (kind, metadata, value) in found.items():
        assert (kind, metadata) == expected[0][path][:2]
        np.testing.assert_array_equal(value, jnp.stack([x[path][2] for x in expected], axis))
    assert (m.b is getattr(m, "w", None)) == (change is tie)
    assert_no_tracer(m)


def test_a_second_scan_sees_the_structure_that_the_first_one_left():
    m = nnx.vmap(Two)(jnp.arange(1.0, 4.0))

    def f(m, x):
        if isinstance(m.w, nnx.Param):
            halve(m, x)
        return m.w * x

    loop = nnx.scan(f, in_axes=(0, 0), out_axes=0)
    first = loop(m, XS)
    assert isinstance(m.w, nnx.BatchStat)
    np.testing.assert_array_equal(loop(m, XS), first)


def test_what_has_an_axis_in_part_only_keeps_its_structure():
    m = nnx.vmap(Two)(jnp.arange(1.0, 4.0))
    m.b = nnx.BatchStat(jnp.ones(3))
    with pytest.raises(BodyError, match=r"args\[0\]\.w: the Param args\[0\]\.w became a new object"):
        nnx.scan(halve, in_axes=(nnx.StateAxes({nnx.Param: 0, ...: nnx.Carry}), 0), out_axes=0)(m, XS)


REPLACED_IN = {
    "the carry": lambda f, m: nnx.scan(lambda m, x: (f(m), (m, x))[1], length=3)(m, None),
    "the carry alone": lambda f, m: nnx.scan(lambda m: (f(m), m)[1], in_axes=nnx.Carry, out_axes=nnx.Carry, length=3)(
        m
    ),
    "carried Variables": lambda f, m: nnx.scan(
        lambda m, x: (f(m), x)[1], in_axes=(nnx.StateAxes({...: nnx.Carry}), 0), out_axes=0
    )(m, XS),
    "carried Variables beside a carry": lambda f, m: nnx.scan(
        lambda carry, m, x: (f(m), (carry, x))[1], in_axes=(nnx.Carry, nnx.StateAxes({...: nnx.Carry}), 0)
    )(0.0, m, XS),
}


@pytest.mark.parametrize("way", REPLACED_IN)
@pytest.mark.parametrize("change", REPLACING, ids=lambda f: f.__name__)
def test_an_attribute_of_what_is_carried_may_be_replaced_by_an_object_of_the_same_structure(change, way):
    m, plain = Parts(), Parts()
    for _ in range(3):
        change(plain)
    REPLACED_IN[way](change, m)
    assert nnx.graphdef(m) == nnx.graphdef(Parts())
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), nnx.state(m), nnx.state(plain))


def test_an_object_may_be_replaced_beside_values_that_are_stacked():
    def body(m, x):
        m.total = nnx.Variable(m.total + x)
        m.seen = nnx.Intermediate(x)

    m = Parts()
    nnx.scan(body, in_axes=(nnx.StateAxes({nnx.Intermediate: 0, ...: nnx.Carry}), 0), out_axes=0)(m, XS)
    np.testing.assert_array_equal(m.total, XS.sum(0))
    np.testing.assert_array_equal(m.seen, XS)


def test_a_replaced_object_that_was_changed_before_is_an_error_by_path():
    def body(m, x):
        m.total.value += x
        m.total = nnx.Variable(m.total + 1)
        return m, x

    with pytest.raises(BodyError, match=r"body of scan changes args\[0\]\.total, and "):
        nnx.scan(body)(Parts(), XS)


def test_the_carry_may_hold_modules_which_keep_their_identity():
    def f(carry, x):
        m, total = carry
        return (m, total + m(x)), None

    m = Pair()
    (out, total), _ = nnx.scan(f)((m, jnp.zeros(3)), XS)
    assert out is m
    assert m.me is m
    assert m.tied is m.a.w
    assert m.a.calls.value == 3
    plain = Pair()
    np.testing.assert_allclose(total, sum(plain(x) for x in XS), rtol=1e-6)


def test_the_carry_may_be_a_bound_method():
    def grow(method):
        method.__self__.w.value *= 2
        return method

    layer = nnx.Dict(w=nnx.Param(jnp.array(1.0)))
    grown = nnx.scan(grow, in_axes=nnx.Carry, out_axes=nnx.Carry, length=3)(layer.set_attributes)
    assert grown == layer.set_attributes
    assert layer.w == 8


def test_an_array_with_carry_by_filter_is_not_the_carry():
    """It cannot be changed in place, so each iteration sees it as it was."""
    axes = (nnx.StateAxes({...: nnx.Carry}), nnx.Carry, 0)
    add = nnx.scan(lambda a, b, x: a + b + x, in_axes=axes, out_axes=nnx.Carry)
    assert add(100.0, 0.0, jnp.arange(3.0)) == 303


def test_an_object_that_is_carried_and_stacked():
    """It cannot be both; a copy can be stacked."""

    def step(layer, x, keep):
        layer.w.value = layer.w + x
        return layer, keep(layer)

    def run(keep):
        return nnx.scan(functools.partial(step, keep=keep))(nnx.Dict(w=nnx.Param(jnp.zeros(2))), jnp.ones((3, 2)))

    with pytest.raises(errors.AliasingError, match=r"args\[0\]\.w: .*Carry, but <output>\[1\]\.w: 0\..*nnx\.clone"):
        run(lambda layer: layer)
    assert run(nnx.clone)[1].w.tolist() == [[1, 1], [2, 2], [3, 3]]


def test_a_shared_variable_may_be_in_two_arguments_if_both_say_the_same():
    m = Pair()
    f = nnx.scan(lambda m, v, x: (v * x).sum() + (m.tied * x).sum(), in_axes=(ALL_CARRIED, ALL_CARRIED, 0), out_axes=0)
    np.testing.assert_allclose(f(m, m.a.w, XS), 2 * XS.sum(1), rtol=1e-6)
    with pytest.raises(errors.AliasingError, match=r"args\[0\]\.a\.w: .*Carry.*, but args\[1\]: None"):
        nnx.scan(lambda m, v, x: x, in_axes=(ALL_CARRIED, None, 0), out_axes=0)(m, m.a.w, XS)


def swapped_carry(c, x):
    return (c[1], c[0]), x


def other_carry(c, x):
    return c[0], x


def test_a_carry_that_comes_out_differently_is_an_error_with_both_sides():
    a, b = Layer(), Layer()
    swapped = r"come out with the structure(.|\n)*carry\[0\]: the Layer args\[0\]\[0\] became the Layer args\[0\]\[1\]"
    with pytest.raises(BodyError, match=swapped):
        nnx.scan(swapped_carry)((a, b), XS)
    with pytest.raises(BodyError, match=r"carry\[1\]: the Layer args\[0\]\[1\] became nothing"):
        nnx.scan(other_carry)((a, b), XS)
    with pytest.raises(BodyError, match=r"carry: the Layer args\[0\] became array"):
        nnx.scan(lambda layer, x: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(a, XS)
    with pytest.raises(BodyError, match=r"come out with the structure(.|\n)*carry\[1\]: nothing became array"):
        nnx.scan(lambda c, x: ((c, x), x))(X, XS)
    with pytest.raises(BodyError, match=r"come out with the structure(.|\n)*carry: nothing became array"):
        nnx.scan(lambda c, x: x, out_axes=nnx.Carry)(None, XS)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Count:
    n: int


@pytest.mark.parametrize(
    ("init", "body", "said"),
    [
        ({"x": [X]}, lambda c: {"x": tuple(c["x"])}, r"carry\.x: pytree \[\*\] became pytree \(\*\)"),
        (
            {"x": None, "y": X},
            lambda c: {"y": c["y"]},
            r"carry: pytree \{'x': None, 'y': \*\} became pytree \{'y'",
        ),
        ((Count(0), X), lambda c: (Count(c[0].n + 1), c[1]), r"carry: pytree \(Count, \*\) became another structure"),
        (None, lambda c: (), r"carry: pytree None became pytree \(\)"),
    ],
)
def test_a_carry_that_comes_out_as_another_pytree_is_an_error(init, body, said):
    """As in JAX: the body is traced once, so a count in the structure would stay at its first value."""
    with pytest.raises(BodyError, match="come out with the structure(.|\n)*" + said):
        nnx.scan(lambda c, x: (body(c), x))(init, XS)
    with pytest.raises(TypeError, match="same pytree structure"):
        jax.lax.scan(lambda c, x: (body(c), x), init, XS)
    with pytest.raises(BodyError, match="come out with the structure(.|\n)*" + said):
        nnx.scan(body, in_axes=nnx.Carry, out_axes=nnx.Carry, length=3)(init)


def test_a_state_of_sums_may_be_carried():
    """Each iteration makes a new State; the one that went in stays as it is."""
    zeros = jax.tree.map(jnp.zeros_like, nnx.state(Layer(), nnx.Param))

    def add(carry, x):
        m, total = carry
        gradients = nnx.grad(lambda m: m(x).sum(), argnums=nnx.DiffState(0, nnx.Param))(m)
        return (m, jax.tree.map(jnp.add, total, gradients)), total

    m = Layer()
    (out, total), seen = nnx.scan(add)((m, zeros), XS)
    plain = Layer()
    expected = [nnx.grad(lambda m, x: m.read(x).sum())(plain, x)["w"].value for x in XS]
    assert out is m
    assert m.calls.value == len(XS)
    np.testing.assert_allclose(total["w"].value, sum(expected), rtol=1e-6)
    np.testing.assert_allclose(seen["w"].value, np.cumsum([np.zeros(3), *expected[:-1]], axis=0), rtol=1e-6)
    np.testing.assert_array_equal(zeros["w"].value, np.zeros(3))


STATES = {
    "the first of two": lambda f, s: nnx.scan(lambda s, x: (f(s, x), x))(s, XS)[0],
    "in a list": lambda f, s: nnx.scan(lambda s, x: [f(s, x), x], out_axes=[nnx.Carry, 0])(s, XS)[0],
    "alone": lambda f, s: nnx.scan(f, out_axes=nnx.Carry)(s, XS),
}


@pytest.mark.parametrize("way", STATES)
def test_a_carried_state_may_be_written(way):
    """It is the same one in each iteration, as a Module is."""

    def add(state, x):
        state["w"].value += x
        return state

    state = nnx.state(Layer())
    expected = state["w"] + XS.sum(0)
    np.testing.assert_array_equal(STATES[way](add, state)["w"], expected)


RETURNED = {
    "twice": lambda s: nnx.scan(lambda s, x: (s, s), in_axes=(0, 0), out_axes=(0, 0))(jax.tree.map(tripled, s), XS)[1],
    "beside a carry": lambda s: nnx.scan(lambda c, s, x: (c, s), in_axes=(nnx.Carry, None, 0))(0.0, s, XS)[1],
    "without a carry": lambda s: nnx.scan(lambda s, x: s, in_axes=(None, 0), out_axes=0)(s, XS),
    "that is carried": lambda s: nnx.scan(lambda s, x: (s, s))(s, XS)[1],
}


def tripled(x):
    return jnp.stack([x] * 3)


@pytest.mark.parametrize("way", RETURNED)
def test_a_state_that_came_in_may_be_returned(way):
    """It is a value, so what comes out is a stack of it."""
    state = nnx.state(Layer())
    out = RETURNED[way](state)
    np.testing.assert_array_equal(out["w"], tripled(state["w"].value))
    assert state["w"].shape == (3,)


def grow(m, x):
    m.w.value = jnp.ones(4)


def cast(m, x):
    m.w.value = m.w.value.astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [(grow, r"args\[0\]\.w: float32\[3\] became float32\[4\]"), (cast, r"w: float32\[3\] became bfloat16\[3\]")],
)
def test_a_carried_variable_that_changes_its_type_is_an_error_by_path(change, message):
    with pytest.raises(BodyError, match=r"body of scan must keep the types(.|\n)*" + message):
        nnx.scan(change, in_axes=(ALL_CARRIED, 0), out_axes=0)(Layer(), XS)


def test_a_python_number_as_carry_takes_the_type_that_comes_out_as_in_jax():
    out, ys = nnx.scan(lambda c, x: (c + x, c))(0, jnp.array([0.5, 1.0]))
    expected = jax.lax.scan(lambda c, x: (c + x, c), 0, jnp.array([0.5, 1.0]))
    assert (out, ys.dtype) == (expected[0], expected[1].dtype)


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.int8])
def test_a_slice_of_weakly_typed_numbers_is_weakly_typed_as_in_jax(kind):
    """So it yields to the type of what it is added to; in a Variable, too."""
    rates = jnp.broadcast_to(2 if kind is jnp.int8 else 0.5, 3)
    expected, _ = jax.lax.scan(lambda total, rate: (total + rate, None), kind(1), rates)
    total, seen = nnx.scan(lambda total, rate: (total + rate, rate))(kind(1), rates)
    assert total == expected
    assert total.dtype == kind
    assert seen.weak_type
    held = nnx.Variable(rates)
    total, _ = nnx.scan(lambda total, rate: (total + rate.value, None))(kind(1), held)
    assert total == expected
    assert total.dtype == kind
    assert held.value is rates


def test_random_keys_can_be_carried_and_streams_never_repeat():
    key, xs = nnx.scan(lambda k: (jax.random.split(k)[0], jax.random.normal(k)), length=4, in_axes=(nnx.Carry,))(
        jax.random.key(0)
    )
    assert jnp.unique(xs).size == 4
    assert jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    rngs = nnx.Rngs(0)
    draw = nnx.scan(lambda r: jax.random.normal(r()), length=3, in_axes=(ALL_CARRIED,), out_axes=0)
    values = [*map(float, draw(rngs)), *map(float, draw(rngs))]
    plain = nnx.Rngs(0)
    np.testing.assert_allclose(values, [float(jax.random.normal(plain())) for _ in range(6)], rtol=1e-6)


def test_a_stream_that_is_passed_whole_gives_each_iteration_the_same_keys_and_none_of_them_again():
    """How many keys an iteration draws may depend on it; the stream goes on behind the last one that any has drawn."""

    def draw(rngs, n):
        keys = [rngs.dropout() for _ in range(2)]
        nnx.cond(n > 0, lambda rngs: rngs.dropout(), lambda rngs: rngs.params.key.value, rngs)
        return jnp.stack([jax.random.key_data(key) for key in keys])

    rngs = nnx.Rngs(params=0, dropout=1)
    first = rngs.dropout.key.value
    keys = nnx.scan(draw, in_axes=(None, 0), out_axes=0)(rngs, jnp.array([0, 1, 0]))
    expected = [jax.random.key_data(jax.random.fold_in(first, n)) for n in range(2)]
    np.testing.assert_array_equal(keys, [expected] * 3)
    assert (rngs.dropout.count.value, rngs.params.count.value) == (3, 0)
    axes = nnx.StateAxes({"dropout": None, ...: nnx.Carry})
    nnx.scan(draw, in_axes=(axes, 0), out_axes=0, reverse=True)(rngs, jnp.array([1, 0]))
    assert rngs.dropout.count.value == 6


def test_a_recurrent_dropout_has_one_mask_for_a_sequence():
    class Cell(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    @nnx.scan(in_axes=(nnx.StateAxes({"dropout": None, ...: nnx.Carry}), 0), out_axes=0)
    def masks(cell, x):
        return cell.dropout(jnp.ones_like(cell.linear(x))) > 0

    cell = Cell(nnx.Rngs(0, dropout=1))
    first, second = masks(cell, jnp.ones((4, 32, 3))), masks(cell, jnp.ones((4, 32, 3)))
    assert (first == first[0]).all()
    assert (second == second[0]).all()
    assert (first != second).any()


def with_axes(in_axes, out_axes=0, args=None, **options):
    return lambda: nnx.scan(lambda *a: a[-1], in_axes=in_axes, out_axes=out_axes, **options)(*(args or (Layer(), XS)))


WRONG = {
    "two carries": (with_axes((nnx.Carry, nnx.Carry)), r"multiple Carry definitions in in_axes="),
    "two carries out": (with_axes((nnx.Carry, 0), (nnx.Carry, nnx.Carry)), r"multiple Carry definitions in out_axes="),
    "Carry inside an argument": (with_axes(((nnx.Carry, 0), 0)), r"may have nnx\.Carry for one whole argument"),
    "Carry in": (
        with_axes((nnx.Carry, 0)),
        r"has Carry, the other must also have Carry; given were in_axes=.* and out_axes=0\.",
    ),
    "Carry out": (with_axes((None, 0), (nnx.Carry, 0)), "If one of in_axes or out_axes has Carry"),
    "Carry in StateAxes": (
        with_axes((nnx.StateAxes({...: nnx.Carry}), 0), (nnx.Carry, 0)),
        r"If no argument is carried, write out_axes=0.*; Carry in nnx\.StateAxes.* does not count\.",
    ),
    "not a label": (
        with_axes(("carry", 0)),
        "in_axes=.* has 'carry'; scan takes an int, None, nnx.Carry or",
    ),
    "not a label by filter": (with_axes((nnx.StateAxes({...: "x"}), 0)), "has 'x'; scan takes an int"),
    "too many axes": (
        with_axes((None, 0, 0)),
        "in_axes=.* has 3 entries, but the function was called with 2 positional arguments",
    ),
    "carry alone": (
        lambda: nnx.scan(lambda c, x: c, in_axes=nnx.Carry, out_axes=nnx.Carry, length=2)(XS, XS),
        "When in_axes=Carry, the function must take exactly one argument; it got 2",
    ),
    "nothing to go over": (
        lambda: nnx.scan(lambda c, x: (c, x))(XS),
        r"in_axes=\(nnx\.Carry, 0\) has 2 entries, but the function was called with 1 positional argument\.",
    ),
    "out_axes of another structure": (with_axes((None, 0), (0, 0)), r"must return 2 values, for out_axes=\(0, 0\)"),
    "out_axes of another structure below": (
        with_axes((None, 0), {"y": 0}),
        r"out_axes=\{'y': 0\} does not fit the values",
    ),
    "no filter takes a leaf": (
        with_axes((nnx.StateAxes({nnx.Param: None}), 0)),
        r"No filter matched calls \(Cache\)",
    ),
    "no such axis": (
        with_axes((nnx.StateAxes({nnx.Param: 1, ...: None}), 0)),
        r"args\[0\]\.w has shape \(3,\), so .* 1",
    ),
    "no such axis in the output": (with_axes((None, 0), 2), r"<output>: stacked it has 2 axes, so there is no axis 2"),
    "no such axis from the end": (with_axes((None, 0), -3), r"<output>: stacked it has 2 axes, so there is no axis -3"),
    "sizes differ": (
        with_axes((nnx.StateAxes({nnx.Param: 0, ...: None}), 0), args=(Layer(), XS[:2])),
        r"scan got axes of different sizes: 3 \(args\[0\]\.w\), 2 \(args\[1\]\)",
    ),
    "other length": (with_axes((None, 0), length=5), r"different sizes: 5 \(length\), 3 \(args\[1\]\)"),
    "no length": (with_axes((None, None)), r"does not know how often to run: nothing has an axis\. Pass length="),
    "an output without an axis": (with_axes((None, 0), None), r"Got None in out_axes=None, but every iteration"),
    "an output without an axis by filter": (
        with_axes((None, 0), nnx.StateAxes({nnx.Param: 0, ...: None})),
        r"Got StateAxes.* in out_axes=StateAxes.*, but every",
    ),
    "a carried output by filter": (
        with_axes((nnx.StateAxes({...: nnx.Carry}), 0), nnx.StateAxes({...: nnx.Carry})),
        r"<output>: a value of its own in each iteration, but Carry needs one to start from",
    ),
    "a name for an axis of the output": (with_axes((None, 0), "x"), r"out_axes='x' has 'x'; scan takes an int, None"),
    "a Module for axes": (with_axes((nnx.Dict(a=0), 0)), r"has a Dict in it\. Graph nodes are not allowed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_axes_are_errors_that_say_what_and_where(case):
    call, message = WRONG[case]
    with pytest.raises(errors.PrefixError, match=message):
        call()


@pytest.mark.parametrize("carry", [0.0, (0.0, {"a": 1.0}), Layer()], ids=["array", "pytree", "Module"])
def test_a_pair_for_a_carry_alone(carry):
    """Said as such, whatever the carry is."""
    with pytest.raises(
        errors.BodyError, match=r"returned a tuple that begins with the carry\. .*out_axes=\(nnx\.Carry, 0\)\."
    ):
        nnx.scan(lambda c, x: (c, x), out_axes=nnx.Carry)(carry, XS)


def test_eager_calls_trace_as_often_as_jax_does():
    """Once for a function, whether the scan is made once or at each call."""
    f, g = counted(step), counted(lambda c, x: (c + x, c))
    m = Layer()
    for _ in range(3):
        nnx.scan(f, in_axes=AXES)(jnp.zeros(3), m, XS)
        jax.lax.scan(g, jnp.zeros(3), XS)
    assert (f.count, g.count) == (1, 1)
    assert m.calls.value == 9


def test_a_wrapper_made_with_functools_wraps_is_another_function():
    def f(c, x):
        return c + x, None

    assert nnx.scan(f)(jnp.array(0.0), jnp.ones(3))[0] == 3

    @functools.wraps(f)
    def doubled(c, x):
        return 2 * f(c, x)[0], None

    assert nnx.scan(doubled)(jnp.array(0.0), jnp.ones(3))[0] == 14


def test_a_captured_model_is_never_stale():
    m = Layer(1.0)

    def f(carry, x):
        return carry + (m.w * x).sum(), m.calls.value

    run = nnx.scan(f)
    first = run(jnp.array(0.0), XS)
    m.w.value, m.calls.value = 3 * m.w.value, jnp.array(7)
    second = run(jnp.array(0.0), XS)
    np.testing.assert_allclose(second[0], 3 * first[0], rtol=1e-6)
    np.testing.assert_array_equal(second[1], [7, 7, 7])


def test_a_write_to_a_captured_model_is_refused_and_nothing_is_written():
    m = Layer()
    before = Snapshot(m)
    with pytest.raises(errors.TraceContextError, match="Cache"):
        nnx.scan(lambda x: m(x), in_axes=0, out_axes=0)(XS)
    before.assert_unchanged()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_body_changes_nothing(error):
    def f(m, x):
        m(x)
        m.new = nnx.Param(x)
        raise error

    m = Pair()
    before = Snapshot(m)
    with pytest.raises(error):
        nnx.scan(f, in_axes=(ALL_CARRIED, 0), out_axes=0)(m, XS)
    before.assert_unchanged()


class Backbone(nnx.Module):
    """A stack run by scan, each layer with statistics and recomputed."""

    def __init__(self, training):
        self.blocks = nnx.vmap(lambda _: Norm())(jnp.zeros(3))
        self.blocks.training = training

    def __call__(self, x):
        forward = nnx.remat(lambda x, block: block(x))
        return nnx.scan(forward, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


@pytest.mark.parametrize("raw", RAW)
def test_a_read_only_forward_under_raw_jax_leaves_the_live_model_as_it_was(raw):
    m = Backbone(training=False)
    before = Snapshot(m)
    RAW[raw](m)
    before.assert_unchanged()


def test_a_forward_with_statistics_under_raw_jax_names_the_variable_and_writes_nothing():
    m = Backbone(training=True)
    before = Snapshot(m)
    with pytest.raises(errors.TraceContextError, match=r"m\.blocks\.(mean|count)"):
        jax.eval_shape(m, X)
    before.assert_unchanged()
    assert nnx.eval_shape(lambda m, x: m(x), m, X).shape == (3,)
    before.assert_unchanged()


def test_gradients_equal_those_of_the_plain_loop():
    stack = stacked()

    def by_scan(stack, x):
        return nnx.scan(lambda x, m: jnp.tanh(m(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, stack).sum()

    def by_loop(kernels, biases, x):
        for kernel, bias in zip(kernels, biases, strict=True):
            x = jnp.tanh(x @ kernel + bias)
        return x.sum()

    found, wrt_x = nnx.grad(by_scan, argnums=(0, 1))(stack, X)
    expected = jax.grad(by_loop, argnums=(0, 1, 2))(stack.kernel.value, stack.bias.value, X)
    for a, b in zip((found.kernel.value, found.bias.value, wrt_x), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_nested_scans_with_a_counter_in_both():
    def inner(m, x):
        return m(x)

    def outer(m, xs):
        return nnx.scan(inner, in_axes=(ALL_CARRIED, 0), out_axes=0)(m, xs)

    m = Layer()
    out = nnx.jit(nnx.scan(outer, in_axes=(ALL_CARRIED, 0), out_axes=0))(m, jnp.stack([XS, XS]))
    assert out.shape == (2, 3, 3)
    assert m.calls.value == 6


def test_a_counter_inside_grad_inside_remat_inside_scan_inside_jit_without_leaks():
    def loss(m, x):
        return m(x).sum()

    @nnx.jit
    def train(m, opt_count, xs):
        def one(m, count, x):
            grads = nnx.remat(nnx.grad(loss))(m, x)
            m.scale.value = m.scale.value - 0.1 * grads.scale.value
            return count + 1

        axes = nnx.StateAxes({...: nnx.Carry})
        return nnx.scan(one, in_axes=(axes, nnx.Carry, 0), out_axes=nnx.Carry)(m, opt_count, xs)

    m, plain = Norm(), Norm()
    with jax.checking_leaks():
        assert train(m, jnp.array(0), XS) == 3
    for x in XS:
        plain.scale.value = plain.scale.value - 0.1 * nnx.grad(loss)(plain, x).scale.value
    np.testing.assert_allclose(m.scale.value, plain.scale.value, rtol=1e-5)
    assert m.count.value == 3
    assert_no_tracer(m)


def test_an_empty_stack_runs_no_iteration():
    carry, ys = nnx.scan(lambda c, x: (c + 1, x))(jnp.zeros(3), XS[:0])
    np.testing.assert_array_equal(carry, jnp.zeros(3))
    assert ys.shape == (0, 3)


def test_an_empty_stack_over_a_mesh_of_explicit_axes():
    """Whose axes are part of the type of a slice."""
    with jax.set_mesh(jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        rows = jax.device_put(jnp.zeros((0, 4)), jax.P(None, "d"))
        total, doubled = nnx.scan(lambda total, row: (total + row, 2 * row))(rows.sum(0), rows)
    assert not total.any()
    assert doubled.shape == (0, 4)


def test_variables_that_hold_pytrees_are_sliced_and_stacked():
    v = nnx.Variable({"a": jnp.zeros((3, 2)), "b": (jnp.arange(3),)})

    def f(v, x):
        v.value = {"a": v.value["a"] + x.sum(), "b": (v.value["b"][0] + 1,)}

    nnx.scan(f, in_axes=(0, 0), out_axes=0)(v, XS)
    np.testing.assert_array_equal(v.value["a"][:, 0], XS.sum(1))
    np.testing.assert_array_equal(v.value["b"][0], [1, 2, 3])


def test_variables_that_hold_nothing_are_stacked_as_nothing():
    """An empty pytree has no array that could lack the axis."""
    out = nnx.scan(lambda x: nnx.Variable({"a": (), "b": None}), in_axes=0, out_axes=1)(XS)
    assert out.value == {"a": (), "b": None}


@pytest.mark.parametrize("body", [lambda c, x: c, lambda c, x: (c, x, x)])
def test_a_body_that_returns_another_number_of_values_is_told_what_to_return(body):
    with pytest.raises(errors.PrefixError, match=r"must return 2 values, .*Return \(carry, y\), where y may be None"):
        nnx.scan(body)(jnp.zeros(2), jnp.ones((3, 2)))


@pytest.mark.parametrize("kind", [list, nnx.List])
def test_a_list_of_layers_that_is_called_as_one_layer(kind):
    """In a loop over layers these are meant to be the slices; the note says how to write that."""
    layers = kind([nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(3)])
    with pytest.raises(TypeError, match="not callable") as caught:
        nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(jnp.ones(2), layers)
    assert "nnx.Stack.from_layers(layers)(x)" in "".join(caught.value.__notes__)


def test_a_change_of_what_is_passed_whole():
    """The remedy is an axis or the carry; what is attached or has too few axes has another one."""
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with pytest.raises(errors.PrefixError, match=r"(?s)axes do not allow:\n  args\[0\]\.mean: .*\.\.\.: None\}\)\."):
        nnx.scan(lambda norm, x: norm(x), in_axes=(None, 0), out_axes=0)(norm, XS[:, None])


def test_a_slice_whose_variable_is_written_and_then_replaced():
    """Each iteration has a slice of its own, so nothing is lost: the former Variable keeps what was written to it."""
    layers = nnx.Dict(w=nnx.Param(jnp.arange(3.0)))
    former = layers["w"]

    def body(carry, layer):
        layer["w"].value = layer["w"] + 1
        layer["w"] = nnx.Param(layer["w"] * 10)
        return carry

    nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(0.0, layers)
    assert layers["w"] is not former
    assert (former.tolist(), layers["w"].tolist()) == ([1, 2, 3], [10, 20, 30])
