"""nnx.while_loop and nnx.fori_loop: what changes is carried, what does not is not, and structure stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from nnxlib.transforms.body_checks import BodyError
from tests.properties.compare import Snapshot, assert_no_tracer

from .models import RAW, REPLACING, Layer, Norm, Pair, Parts, X, counted


def advance(value):
    m, x = value
    return m, m(x)


def advance_by_index(i, value):
    return advance(value)


def below(limit):
    return lambda value: value[0].calls < limit


LOOPS = {
    "fori": lambda m: nnx.fori_loop(0, 3, advance_by_index, (m, X)),
    "fori with array bounds": lambda m: nnx.fori_loop(jnp.array(0), np.int32(3), advance_by_index, (m, X)),
    "fori unrolled": lambda m: nnx.fori_loop(0, 3, advance_by_index, (m, X), unroll=3),
    "while": lambda m: nnx.while_loop(below(3), advance, (m, X)),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_equals_the_plain_loop_and_keeps_the_state(loop, jit):
    m, plain = Layer(), Layer()
    out, x = (nnx.jit(LOOPS[loop]) if jit else LOOPS[loop])(m)
    expected = X
    for _ in range(3):
        expected = plain(expected)
    assert out is m
    assert m.calls.value == 3
    np.testing.assert_allclose(x, expected, rtol=1e-6)


class Runner(nnx.Module):
    def __init__(self):
        self.layer, self.limit = Layer(), nnx.Variable(jnp.array(3))

    def body(self, x):
        return self.layer(x)

    def indexed(self, i, x):
        return self.layer(x) + 0 * i

    def go_on(self, x):
        return self.layer.calls < self.limit

    def __call__(self, x):
        return self.layer(x)


WAYS = {
    "bound methods": lambda r: nnx.while_loop(r.go_on, r.body, X),
    "Module": lambda r: nnx.while_loop(r.go_on, r, X),
    "partial": lambda r: nnx.while_loop(r.go_on, functools.partial(Runner.body, r), X),
    "fori with a bound method": lambda r: nnx.fori_loop(0, 3, r.indexed, X),
    "fori with a partial": lambda r: nnx.fori_loop(0, 3, functools.partial(Runner.indexed, r), X),
}


@pytest.mark.parametrize("way", WAYS)
def test_bound_methods_modules_and_partials_keep_their_state(way):
    r, plain = Runner(), Layer()
    np.testing.assert_allclose(WAYS[way](r), plain(plain(plain(X))), rtol=1e-6)
    assert r.layer.calls.value == 3


def test_no_iteration_leaves_everything_and_the_index_counts_from_lower():
    m = Layer()
    before = m.w.value
    out, x = nnx.fori_loop(3, 3, advance_by_index, (m, X))
    np.testing.assert_array_equal(x, X)
    assert out is m
    assert m.calls.value == 0
    assert m.w.value is before
    assert nnx.fori_loop(2, 6, lambda i, s: s + i, 0) == 2 + 3 + 4 + 5
    assert nnx.fori_loop(-2, jnp.array(1), lambda i, s: s * 10 - i, jnp.array(0)) == 210


def test_bounds_may_be_of_any_integer_type():
    assert nnx.fori_loop(jnp.int8(0), jnp.int8(3), lambda i, x: x + i, jnp.int8(0)) == 3
    assert nnx.fori_loop(0, jnp.int16(3), lambda i, x: x + i, 0) == 3
    assert nnx.fori_loop(np.uint8(1), 4, lambda i, x: x + i, jnp.int32(0)) == 6
    assert jax.jit(lambda n: nnx.fori_loop(0, n, lambda i, x: x + i, 0))(jnp.int16(3)) == 3


@pytest.mark.parametrize(
    "bounds",
    [(np.uint8(0), np.int32(300)), (jnp.uint8(250), 300), (-3, jnp.uint8(3)), (jnp.uint8(3), -3), (jnp.int8(0), 4)],
    ids=str,
)
@pytest.mark.parametrize("how", ["eager", "in jit", "traced"])
def test_an_index_reaches_an_upper_bound_of_another_type(bounds, how):
    """The index had the type of the lower bound: it began anew at its limits, and the sum was wrong, in silence."""
    loop = lambda lower, upper: nnx.fori_loop(lower, upper, lambda i, x: x + i, jnp.zeros((), jnp.int32))
    run = {"eager": loop, "in jit": lambda *bounds: jax.jit(lambda: loop(*bounds))(), "traced": jax.jit(loop)}[how]
    assert run(*bounds) == sum(range(*map(int, bounds)))


@pytest.mark.parametrize("last", [4, 300])
def test_the_index_from_a_traced_bound_has_its_type_if_a_known_upper_bound_fits(last):
    found = []
    loop = lambda lower: nnx.fori_loop(lower, last, lambda i, x: (found.append(i.dtype), x + 1)[1], 0)
    assert jax.jit(loop)(jnp.int8(0)) == last
    assert set(found) == {jnp.dtype(jnp.int8 if last == 4 else jnp.int32)}


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "in jit"])
def test_the_index_between_known_bounds_is_like_a_number_of_python(how):
    """Weakly typed, as in JAX: it yields to what it meets, and does not wrap around where a bound is unsigned."""
    bounds, start = (np.uint8(0), jnp.uint8(3)), jnp.int8(0)
    for loop in nnx.fori_loop, jax.lax.fori_loop:
        assert how(lambda loop=loop: loop(*bounds, lambda i, x: x + (i - 2), start))() == -3
        assert how(lambda loop=loop: loop(*bounds, lambda i, x: x + i, 0))().weak_type


def test_known_bounds_of_which_one_is_too_large_for_the_index_are_an_error_as_in_jax():
    """The upper one would become negative, and no iteration run."""
    for loop, upper in ((nnx.fori_loop, np.uint32(2**32 - 1)), (jax.lax.fori_loop, 2**32 - 1)):
        with pytest.raises(OverflowError):
            loop(0, upper, lambda i, x: x + 1, 0)


def test_a_bool_is_no_bound():
    """As in JAX, also where the bounds are known to a trace: the index was a bool there."""
    for loop in (nnx.fori_loop, jax.lax.fori_loop):
        with pytest.raises(TypeError, match="must have equal types"):
            jax.jit(lambda loop=loop: loop(True, 3, lambda i, x: x + i, jnp.int32(0)))()


@pytest.mark.parametrize("start", [0, 0.0, jnp.asarray(0.0)], ids=["int", "float", "weak array"])
def test_a_sum_in_low_precision_starts_from_a_number(start):
    """As in jax.lax: a weakly typed start takes the dtype that comes out of an iteration."""
    xs = jnp.ones(3, jnp.bfloat16)
    total = nnx.Variable(start)

    def add(total, x):
        total.value += x
        return total

    found = [
        nnx.fori_loop(0, 3, lambda i, x: x + xs[i], start),
        nnx.while_loop(lambda x: x < 3, lambda x: x + xs[0], start),
        nnx.scan(lambda x, row: x + row, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(start, xs),
        nnx.scan(add, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(total, xs).value,
    ]
    assert found == [3, 3, 3, 3]
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("bounds", [(0, 2.5), (jnp.array(True), 2)])
def test_bounds_of_other_kinds_are_refused_as_in_jax(bounds):
    """A float or a bool beside an int."""
    for fori_loop in (nnx.fori_loop, jax.lax.fori_loop):
        with pytest.raises(TypeError, match="must have equal types"):
            fori_loop(*bounds, lambda i, x: x + i, jnp.array(0.0))


def test_only_what_changes_is_carried():
    """A parameter that is only read is a constant of the loop, and no copy of it comes out."""
    m = Layer()
    before = m.w.value
    jaxpr = jax.make_jaxpr(lambda x: nnx.fori_loop(0, jnp.array(3), lambda i, c: c * m.w, x))(X)
    assert sum(aval.shape == (3,) for aval in jaxpr.jaxpr.eqns[-1].params["body_jaxpr"].out_avals) == 1
    nnx.fori_loop(0, 3, advance_by_index, (m, X))
    assert m.w.value is before


@pytest.mark.parametrize("known", [True, False])
def test_a_fori_loop_carries_its_index_once(known):
    """As many values as the loop of JAX, which carries the index itself."""

    def carried(loop):
        run = lambda n, x: loop(0, 3 if known else n, lambda i, c: c + i, x)
        return [len(eqn.outvars) for eqn in jax.make_jaxpr(run)(3, X).eqns]

    assert carried(nnx.fori_loop) == carried(jax.lax.fori_loop)


def test_shared_and_cyclic_objects_keep_their_identity():
    def body(i, value):
        m, v = value
        assert m.tied is v
        assert m.me is m
        v.value = v + 1
        return m, v

    m = Pair()
    out, v = nnx.fori_loop(0, 3, body, (m, m.a.w))
    assert out is m
    assert v is m.a.w
    assert m.tied is v
    np.testing.assert_array_equal(v.value, [4, 4, 4])


def attach(m):
    m.new = nnx.Cache(X)


def delete(m):
    del m.tied


def swap(m):
    m.a, m.b = m.b, m.a


def retype(m):
    m.a.__class__ = Norm


def count(m):
    m.flag += 1


def fill(m):
    m.later = X


def grow(m):
    m.a.w.value = jnp.ones(4)


def cast(m):
    m.a.w.value = m.a.w.value.astype(jnp.bfloat16)


def reorder(m):
    m.a = vars(m).pop("a")


def declare(m):
    m.array = nnx.data(m.array)


def split(m):
    m.array = (m.array, m.array)


def join(m):
    m.arrays = nnx.Param(X)


def rename(m):
    m.tree.value = {"b": X}


REFUSED = {
    reorder: r"args\[0\]: the order of its attributes",
    declare: r"args\[0\]: .* what was declared about them",
    split: r"args\[0\]\.array: array became pytree",
    join: r"args\[0\]\.arrays: pytree .* became a new object",
    rename: r"args\[0\]\.tree: \{'a': float32\[3\]\} became \{'b': float32\[3\]\}",
    attach: r"args\[0\]\.new: nothing became a new object",
    delete: r"args\[0\]\.tied: the Param args\[0\]\.a\.w became nothing",
    swap: r"args\[0\]\.a: the Layer args\[0\]\.a became the Layer args\[0\]\.b",
    retype: r"args\[0\]\.a: its type",
    count: r"args\[0\]\.flag: 0 \(int\) became 1 \(int\)",
    fill: r"args\[0\]\.later: None \(NoneType\) became",
    grow: r"args\[0\]\.a\.w: float32\[3\] became float32\[4\]",
    cast: r"args\[0\]\.a\.w: float32\[3\] became bfloat16\[3\]",
}


@pytest.mark.parametrize("loop", ["fori", "while"])
@pytest.mark.parametrize("change", REFUSED, ids=lambda f: f.__name__)
def test_changes_of_structure_or_type_are_refused_by_path(change, loop):
    def body(m):
        change(m)
        return m

    m = Pair()
    m.flag, m.later, m.array, m.arrays, m.tree = 0, None, X, (X, X), nnx.Variable({"a": X})
    before = Snapshot(m)
    with pytest.raises(BodyError, match=f"body of {loop}_(.|\n)*{REFUSED[change]}"):
        if loop == "fori":
            nnx.fori_loop(0, 3, lambda i, m: body(m), m)
        else:
            nnx.while_loop(lambda m: m.flag < 3, body, m)
    before.assert_unchanged()


class Sublayer(Layer):
    pass


OUTPUTS = {
    "another structure": lambda value: (value, value),
    "a list for a tuple": list,
    "swapped": lambda value: value[::-1],
    "an object of another class": lambda value: (value[0], Pair(), X),
    "an object of a subclass": lambda value: (value[0], Sublayer(), X),
    "a Variable for a Module": lambda value: (value[0], nnx.Param(X), X),
    "other metadata": lambda value: (value[0], nnx.map(lambda _, v: v.replace(v.value, a=1), value[1]), X),
    "one object for two": lambda value: (value[0], value[0], X),
    "a copy of one that is still used": lambda value: (nnx.clone(value[0]), value[0], X),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_a_body_that_returns_another_structure_is_an_error_that_shows_both(case):
    init = (Layer(), Layer(), X)
    before = Snapshot(init)
    with pytest.raises(BodyError, match=r"must return a value like the one it is given:(.|\n)*became"):
        nnx.while_loop(lambda value: False, OUTPUTS[case], init)
    with pytest.raises(BodyError, match=r"must return a value like the one it is given:(.|\n)*became"):
        nnx.fori_loop(0, 3, lambda i, value: OUTPUTS[case](value), init)
    before.assert_unchanged()


def test_another_container_in_the_output_is_named():
    with pytest.raises(BodyError, match=r"args\[0\]\.x: pytree \[\*, None\] became pytree \(\*, None\)"):
        nnx.fori_loop(0, 3, lambda i, value: {"x": tuple(value["x"]), "y": value["y"]}, {"x": [X, None], "y": X})


def frozen(m):
    other = nnx.clone(m)
    other.training = False
    return other


@pytest.mark.parametrize(
    ("part", "other"), [(nnx.Param(X), lambda v: Layer()), (Norm(), frozen)], ids=["kind", "setting"]
)
def test_an_object_of_another_kind_or_setting_in_place_of_one_is_an_error_by_path(part, other):
    def body(i, m):
        m["part"] = other(m["part"])
        return m

    with pytest.raises(BodyError, match=r"args\[0\]\.part: the \w+ args\[0\]\.part became a new object"):
        nnx.fori_loop(0, 3, body, nnx.Dict(part=part))


def test_entries_that_are_missing_or_new_are_named():
    with pytest.raises(
        BodyError, match=r"args\[0\]\.b: the Layer args\[0\]\.b became nothing\n.*\.c: nothing became array"
    ):
        nnx.fori_loop(0, 3, lambda i, value: {"a": value["a"], "c": X}, {"a": X, "b": Layer()})


def doubled(tree):
    return jax.tree.map(lambda x: 2 * x, tree)


NEW = {
    "a State": lambda: nnx.state(Pair(), nnx.Param),
    "a Variable": lambda: nnx.Param(X),
    "a Module with sharing and a cycle": Pair,
    "a GraphDef with its State": lambda: nnx.split(Layer()),
}


@pytest.mark.parametrize("steps", [3, 0])
@pytest.mark.parametrize("case", NEW)
def test_new_objects_may_take_the_places_of_those_that_went_in(case, steps):
    init = NEW[case]()
    before, expected = Snapshot(init), init
    for _ in range(steps):
        expected = doubled(expected)
    for out in (
        nnx.fori_loop(0, steps, lambda i, value: doubled(value), init),
        nnx.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, doubled(c[1])), (0, init))[1],
    ):
        jax.tree.map(np.testing.assert_array_equal, out, expected)
        before.assert_unchanged()
        assert not isinstance(out, Pair) or (out is not init and out.me is out and out.tied is out.a.w)


@pytest.mark.parametrize("steps", [3, 0])
@pytest.mark.parametrize("loop", ["fori", "while"])
@pytest.mark.parametrize("change", REPLACING, ids=lambda f: f.__name__)
def test_an_attribute_may_be_replaced_by_an_object_of_the_same_structure(change, loop, steps):
    def body(m):
        change(m)
        return m

    def run(m):
        if loop == "fori":
            return nnx.fori_loop(0, steps, lambda i, m: body(m), m)
        return nnx.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, body(c[1])), (0, m))[1]

    m, jitted, plain = Parts(), Parts(), Parts()
    for _ in range(steps):
        change(plain)
    assert run(m) is m
    nnx.jit(run)(jitted)
    assert nnx.graphdef(m) == nnx.graphdef(jitted) == nnx.graphdef(Parts())
    for found in (m, jitted):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), nnx.state(found), nnx.state(plain))


def test_an_object_that_is_replaced_in_one_of_two_places_is_an_error_by_path():
    def body(i, m):
        m.tied = nnx.Param(m.tied * 2)
        return m

    m = Pair()
    before = Snapshot(m)
    with pytest.raises(BodyError, match=r"args\[0\]\.tied: the Param args\[0\]\.a\.w became a new object"):
        nnx.fori_loop(0, 3, body, m)
    before.assert_unchanged()


def test_what_is_refused_is_named_without_the_objects_that_may_be_replaced():
    def body(i, m):
        m.total = nnx.Variable(m.total + 1)
        m.flag = True
        return m

    m = Parts()
    m.flag = False
    with pytest.raises(
        BodyError, match=r"args\[0\]\.flag: False \(bool\) became True \(bool\)\nSet attributes"
    ) as error:
        nnx.fori_loop(0, 3, body, m)
    assert "total" not in str(error.value)


def test_an_object_that_is_replaced_in_all_its_places_stays_shared():
    def body(i, m):
        m.a.w = m.tied = nnx.Param(m.tied * 2)
        return m

    m = Pair()
    assert nnx.fori_loop(0, 3, body, m) is m
    assert m.tied is m.a.w
    np.testing.assert_array_equal(m.tied, jnp.full(3, 8.0))


def test_two_objects_that_become_one_are_an_error_by_path():
    def body(i, m):
        m.a = m.b = Layer()
        return m

    with pytest.raises(BodyError, match=r"\.a: the Layer args\[0\]\.a became a new object"):
        nnx.fori_loop(0, 3, body, nnx.Dict(a=Layer(), b=Layer()))


def test_an_object_of_another_shape_in_place_of_one_is_an_error_by_path():
    def body(i, m):
        m.total = nnx.Variable(jnp.ones(4))
        return m

    with pytest.raises(BodyError, match=r"args\[0\]\.total: float32\[3\] became float32\[4\]"):
        nnx.fori_loop(0, 3, body, Parts())


def test_a_loop_that_replaces_an_object_is_differentiated():
    def loss(m):
        def body(i, m):
            m.layer = nnx.merge(*nnx.split(m.layer))
            m.total = nnx.Variable(m.layer.read(m.total))
            return m

        return nnx.fori_loop(0, 3, body, m).total.sum()

    def unrolled(w):
        x = jnp.ones(3)
        for _ in range(3):
            x = jnp.sin(w * x)
        return x.sum()

    m = Parts()
    m.total.value = jnp.ones(3)
    grads = nnx.grad(loss)(m)
    np.testing.assert_allclose(grads.layer.w, jax.grad(unrolled)(jnp.ones(3)), rtol=1e-6)


def test_an_object_that_is_changed_and_replaced_is_an_error_by_path():
    def body(i, m):
        m(X)
        return nnx.clone(m)

    with pytest.raises(BodyError, match=r"fori_loop changes args\[0\]\.calls, and puts another object in its place"):
        nnx.fori_loop(0, 3, body, Layer())


def test_a_new_object_of_another_structure_is_told_what_has_to_be_alike():
    class Sum(nnx.Module):
        def __init__(self, total, kind):
            self.total, self.kind = nnx.Variable(total), kind

    alike = r"a new object(.|\n)*the same attributes, set in the same order, and the same static values"
    with pytest.raises(BodyError, match=alike):
        nnx.while_loop(lambda s: s.total < 3, lambda s: Sum(s.total + 1, "b"), Sum(jnp.zeros(()), "a"))


def test_a_method_that_is_the_body_may_not_replace_its_own_module():
    class Doubling(Layer):
        def body(self, i, m):
            return nnx.clone(m)

    m = Doubling()
    with pytest.raises(BodyError, match=r"the Doubling args\[0\] became a new object"):
        nnx.fori_loop(0, 3, m.body, m)


def test_a_condition_that_changes_something_is_an_error_by_path():
    def test(value):
        return value[0](value[1]).sum() < 0

    m = Layer()
    before = Snapshot(m)
    with pytest.raises(BodyError, match=r"cond_fun of while_loop may not change anything, .* args\[0\]\[0\]\.calls"):
        nnx.while_loop(test, advance, (m, X))
    before.assert_unchanged()


CONDITIONS = {
    "an array attribute": (lambda m: setattr(m, "array", m.array + 1), r"args\[0\]\.array\."),
    "a setting": (lambda m: setattr(m, "flag", True), r"args\[0\]\.flag\."),
    "a new array attribute": (lambda m: setattr(m, "later", X), r"args\[0\]\.later\."),
    "all of these": (
        lambda m: (m(X), setattr(m, "array", m.array + 1), delattr(m, "flag")),
        r"args\[0\]\.calls, args\[0\]\.array, args\[0\]\.flag\.",
    ),
}


@pytest.mark.parametrize("case", CONDITIONS)
def test_attributes_that_a_condition_changes_are_named(case):
    change, paths = CONDITIONS[case]
    m = Layer()
    m.array, m.flag = X, False
    before = Snapshot(m)
    with pytest.raises(BodyError, match=f"may not change anything, but it changes {paths} Make"):
        nnx.while_loop(lambda m: (change(m), m.calls < 3)[1], lambda m: m, m)
    before.assert_unchanged()


def test_a_condition_that_is_no_scalar_is_an_error():
    said = r"cond_fun of while_loop must return a boolean scalar, but it returned "
    for test, found in (lambda x: x > 0, r"bool\[3\]"), (lambda x: x.sum(), "float32"), (lambda x: (), "no array"):
        with pytest.raises(BodyError, match=said + found):
            nnx.while_loop(test, lambda x: x - 1, X)


def test_a_condition_may_be_a_variable():
    """As it may be what an ``if`` tests."""
    layer = Layer()
    layer.on = nnx.Variable(jnp.array(True))

    def stop(layer):
        layer.on.value = ~layer.on
        return layer

    assert not nnx.while_loop(lambda layer: layer.on, stop, layer).on


@pytest.mark.parametrize("way", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("is_captured", [False, True], ids=["carried", "captured"])
def test_a_condition_sees_what_the_body_writes_to_a_ref(is_captured, way):
    """JAX's own loop raises an error in eager code, and in a jitted function never looks at the Ref again."""
    count = nnx.Variable(jnp.array(0), ref=True)

    def body(value):
        held, turns = value
        (count if is_captured else held)[...] += 1
        return held, turns + 1

    def is_on(value):
        held, turns = value
        return ((count if is_captured else held)[...] < 3) & (turns < 10)

    @way
    def run(held):
        return nnx.while_loop(is_on, body, (held, 0))[1]

    assert run(nnx.Dict() if is_captured else count) == count[...] == 3
    assert run(nnx.Dict() if is_captured else count) == 0


def test_a_condition_that_prints_is_asked_once_for_each_iteration_and_at_the_end(capfd):
    def is_on(v):
        jax.debug.print("{}", v[...], ordered=True)
        return v[...] < 3

    v = nnx.Variable(jnp.array(0))
    nnx.while_loop(is_on, lambda v: v.set_value(v[...] + 1) or v, v)
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["0", "1", "2", "3"]


def test_bounds_that_are_no_scalars_are_errors():
    for bounds, said in (
        ((0, X), r"upper .* float32\[3\]"),
        ((None, 2), "lower .* None"),
        ((0, Layer()), "upper .* Layer"),
    ):
        with pytest.raises(errors.ArgumentError, match=f"The {said}"):
            nnx.fori_loop(*bounds, lambda i, x: x, X)


def test_a_python_number_takes_the_type_that_comes_out_as_in_jax():
    assert nnx.fori_loop(0, 3, lambda i, x: x + 1.5, 0) == jax.lax.fori_loop(0, 3, lambda i, x: x + 1.5, 0)
    ours = nnx.while_loop(lambda x: x < 5, lambda x: x + 1.5, 0)
    theirs = jax.lax.while_loop(lambda x: x < 5, lambda x: x + 1.5, 0)
    assert (ours, ours.dtype) == (theirs, theirs.dtype)
    with pytest.raises(BodyError, match=r"args\[0\]: int32\[\] became float32\[\]"):
        nnx.fori_loop(0, 3, lambda i, x: x + 1.5, jnp.int32(0))


def test_keys_and_pytrees_are_carried():
    key = nnx.fori_loop(0, 3, lambda i, k: jax.random.fold_in(k, i), jax.random.key(0))
    assert key == jax.lax.fori_loop(0, 3, lambda i, k: jax.random.fold_in(k, i), jax.random.key(0))
    v = nnx.Variable({"a": X, "b": (jnp.array(0),)})

    def body(i, v):
        v.value = {"a": v.value["a"] + 1, "b": (v.value["b"][0] + i,)}
        return v

    assert nnx.fori_loop(0, 3, body, v) is v
    np.testing.assert_array_equal(v.value["a"], X + 3)
    assert v.value["b"][0] == 3
    nnx.while_loop(lambda v: v.value["b"][0] < 5, lambda v: body(1, v), v)
    np.testing.assert_array_equal(v.value["a"], X + 5)
    nnx.scan(lambda v, x: (body(1, v), x))(v, X)
    assert v.value["b"][0] == 5 + len(X)
    rngs, plain = nnx.Rngs(0), nnx.Rngs(0)
    total = nnx.fori_loop(0, 3, lambda i, c: (c[0], c[1] + jax.random.normal(c[0]())), (rngs, 0.0))[1]
    np.testing.assert_allclose(total, sum(jax.random.normal(plain()) for _ in range(3)), rtol=1e-5)
    assert jnp.array_equal(rngs(), plain())


def test_eager_calls_trace_as_often_as_jax_does():
    ours = counted(advance_by_index), counted(below(3)), counted(advance)
    theirs = counted(lambda i, x: x + 1), counted(lambda x: x.sum() < 30), counted(lambda x: x + 1)
    for _ in range(3):
        m = Layer()
        nnx.fori_loop(0, 3, ours[0], (m, X))
        jax.lax.fori_loop(0, 3, theirs[0], X)
        m.calls.value = jnp.zeros((), jnp.int32)
        nnx.while_loop(ours[1], ours[2], (m, X))
        jax.lax.while_loop(theirs[1], theirs[2], X)
    assert [f.count for f in ours] == [f.count for f in theirs] == [1, 1, 1]


def test_other_bounds_do_not_trace_again_as_in_jax():
    ours, theirs = counted(lambda i, x: x + 1), counted(lambda i, x: x + 1)
    for upper in (2, 3, 4):
        nnx.fori_loop(0, upper, ours, X)
        jax.lax.fori_loop(0, upper, theirs, X)
    assert ours.count == theirs.count == 1


def test_a_captured_model_is_never_stale():
    m = Layer(1.0)

    def body(i, x):
        return x + m.w

    def test(x):
        return x.sum() < m.w.sum() * 10

    def step(x):
        return x + 1

    np.testing.assert_array_equal(nnx.fori_loop(0, 3, body, X), X + 3)
    first = nnx.while_loop(test, step, X)
    m.w.value = 3 * m.w.value
    np.testing.assert_array_equal(nnx.fori_loop(0, 3, body, X), X + 9)
    assert nnx.while_loop(test, step, X).sum() > first.sum()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("loop", ["fori", "while body", "while condition"])
def test_a_failing_body_changes_nothing(error, loop):
    def fail(value):
        m, x = value
        m(x)
        m.new = nnx.Param(x)
        raise error

    m = Pair()
    before = Snapshot(m)
    with pytest.raises(error):
        if loop == "fori":
            nnx.fori_loop(0, 3, lambda i, value: fail(value), (m, X))
        elif loop == "while body":
            nnx.while_loop(lambda value: True, fail, (m, X))
        else:
            nnx.while_loop(fail, advance, (m, X))
    before.assert_unchanged()


@pytest.mark.parametrize("raw", [name for name in RAW if name != "grad"])
def test_read_only_loops_under_raw_jax_leave_the_live_model_as_it_was(raw):
    m = Layer()
    before = Snapshot(m)
    RAW[raw](lambda x: nnx.fori_loop(0, 3, lambda i, c: (c[0], c[0].read(c[1])), (m, x))[1])
    before.assert_unchanged()
    if raw != "checkpoint":  # JAX cannot differentiate while_loop in reverse
        RAW[raw](lambda x: nnx.while_loop(lambda c: c[1].sum() > 9, lambda c: (c[0], c[0].read(c[1])), (m, x))[1])
    before.assert_unchanged()


def test_a_write_under_raw_jax_is_refused_by_path():
    m = Layer()
    before = Snapshot(m)
    with pytest.raises(errors.TraceContextError, match=r"which is m\.calls"):
        jax.jit(lambda x: nnx.fori_loop(0, 3, advance_by_index, (m, x))[1])(X)
    before.assert_unchanged()


@pytest.mark.parametrize("upper", [3, np.int64(3), jnp.array(3)], ids=["int", "numpy", "array"])
def test_reverse_gradients_with_known_bounds_equal_the_plain_loop(upper):
    def by_fori(m, x):
        return nnx.fori_loop(0, upper, advance_by_index, (m, x))[1].sum()

    def by_loop(m, x):
        for _ in range(3):
            x = m(x)
        return x.sum()

    m = Layer(0.7)
    found, wrt_x = nnx.grad(by_fori, argnums=(0, 1))(m, X)
    expected = nnx.grad(by_loop, argnums=(0, 1))(Layer(0.7), X)
    np.testing.assert_allclose(found.w.value, expected[0].w.value, rtol=1e-6)
    np.testing.assert_allclose(wrt_x, expected[1], rtol=1e-6)
    assert m.calls.value == 3


def test_forward_gradients_go_through_while_loop():
    m = Layer(0.7)
    f = lambda x: nnx.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[0] * 1.5 + m.w, c[1] + 1), (x, 0))[0]

    def plain(x):
        while x.sum() < 9:
            x = x * 1.5 + m.w
        return x

    tangents = jax.jvp(f, (X,), (X,))
    np.testing.assert_allclose(tangents, jax.jvp(plain, (X,), (X,)), rtol=1e-6)


def test_loops_nest_in_each_other_and_in_every_transform():
    """A counter inside fori inside while inside remat inside grad inside jit, and no tracer leaks."""

    def inner(value):
        m, x = value
        return nnx.fori_loop(0, 2, advance_by_index, (m, x))

    def loss(m, x):
        m, x = nnx.fori_loop(0, 2, lambda i, value: nnx.remat(inner)(value), (m, x))
        nnx.while_loop(lambda value: value[0].calls < 7, lambda value: (value[0], value[0](value[1])), (m, X))
        return x.sum()

    m, plain = Layer(0.7), Layer(0.7)
    with jax.checking_leaks():
        grads = nnx.jit(nnx.grad(loss))(m, X)
    expected = nnx.grad(lambda m, x: m(m(m(m(x)))).sum())(plain, X)
    np.testing.assert_allclose(grads.w.value, expected.w.value, rtol=1e-5)
    assert m.calls.value == 7
    assert_no_tracer(m)


def test_under_vmap_each_member_runs_as_long_as_it_needs():
    many = nnx.vmap(Layer)(jnp.array([1.0, 2.0]))
    many.calls.value = jnp.array([0, 2])
    nnx.vmap(lambda m, x: nnx.while_loop(below(3), advance, (m, x))[1], in_axes=(0, None))(many, X)
    np.testing.assert_array_equal(many.calls.value, [3, 3])


def test_a_body_that_returns_nothing():
    for call in (
        lambda m: nnx.while_loop(lambda m: True, lambda m: None, m),
        lambda m: nnx.fori_loop(0, 2, lambda i, m: None, m),
    ):
        with pytest.raises(TypeError, match=r"_loop returned nothing\. Return the value that it was given"):
            call(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
