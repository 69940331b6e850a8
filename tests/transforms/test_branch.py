"""nnx.cond and nnx.switch: one branch's changes come out, whatever the others would have changed."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from nnxlib.transforms.body_checks import BodyError
from tests.properties.compare import Snapshot, assert_no_tracer

from .models import RAW, Layer, Norm, Pair, X, counted


def call(m, x):
    return m(x)


def skip(m, x):
    return x


class Chooser(nnx.Module):
    def __init__(self):
        self.layer, self.norm = Layer(), Norm()

    def use_layer(self, x):
        return self.layer(x)

    def use_norm(self, x):
        return self.norm(x)


WAYS = {
    "functions": lambda m, i: nnx.cond(i, lambda m, x: m.layer(x), lambda m, x: m.norm(x), m, X),
    "unbound methods": lambda m, i: nnx.cond(i, Chooser.use_layer, Chooser.use_norm, m, X),
    "bound methods": lambda m, i: nnx.cond(i, m.use_layer, m.use_norm, X),
    "Modules": lambda m, i: nnx.cond(i, m.layer, m.norm, X),
    "partials": lambda m, i: nnx.cond(i, functools.partial(call, m.layer, X), functools.partial(call, x=X, m=m.norm)),
    "switch": lambda m, i: nnx.switch(1 - jnp.asarray(i, int), [m.use_layer, m.use_norm], X),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_use_runs_one_branch_and_keeps_its_changes(way, taken, jit):
    m, plain = Chooser(), Chooser()
    f = nnx.jit(WAYS[way]) if jit else WAYS[way]
    out = f(m, jnp.array(taken))
    np.testing.assert_allclose(out, plain.use_layer(X) if taken else plain.use_norm(X), rtol=1e-6)
    assert m.layer.calls.value == taken
    assert m.norm.count.value == (not taken)
    np.testing.assert_allclose(m.norm.mean.value, plain.norm.mean.value)


def test_an_index_out_of_range_is_clamped_and_a_variable_may_choose():
    branches = [lambda x, k=k: x * k for k in range(3)]
    assert nnx.switch(7, branches, jnp.array(1)) == 2
    assert nnx.switch(-7, branches, jnp.array(1)) == 0
    assert nnx.switch(nnx.Variable(jnp.array(1)), branches, jnp.array(1)) == 1
    assert nnx.cond(nnx.Variable(jnp.array(False)), lambda: 1, lambda: 2) == 2
    assert nnx.switch(0, [lambda x: x + 1], jnp.array(1)) == 2


def test_the_operations_are_those_of_jax():
    def primitives(function):
        return [e.primitive.name for e in jax.make_jaxpr(function)(True, 1.0).eqns]

    assert primitives(lambda p, x: nnx.cond(p, jnp.sin, jnp.cos, x)) == primitives(
        lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x)
    )


def test_a_number_is_taken_as_a_truth_value_as_in_jax():
    for pred in (0, 1, 2, 0.0, 0.5, np.bool_(True)):
        assert nnx.cond(pred, lambda: 1, lambda: 2) == jax.lax.cond(pred, lambda: 1, lambda: 2)


def test_a_model_its_optimizer_and_another_model_may_change_in_one_branch():
    """Gradient steps that are skipped: the operands of published training loops."""
    optax = pytest.importorskip("optax")
    model, ema = Layer(), Layer(0.0)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def update(model, optimizer, ema, x):
        grads = nnx.grad(lambda m: m(x).sum())(model)
        optimizer.update(model, grads)
        ema.w.value = 0.9 * ema.w + 0.1 * model.w

    def leave(model, optimizer, ema, x):
        pass

    before = model.w.value
    nnx.cond(False, update, leave, model, optimizer, ema, X)
    np.testing.assert_array_equal(model.w.value, before)
    assert optimizer.step.value == 0
    assert model.calls.value == 0
    nnx.cond(True, update, leave, model, optimizer, ema, X)
    expected = before - 0.1 * jnp.cos(before * X) * X
    np.testing.assert_allclose(model.w.value, expected, rtol=1e-6)
    np.testing.assert_allclose(ema.w.value, 0.1 * expected, rtol=1e-6)
    assert optimizer.step.value == 1
    assert model.calls.value == 1


def test_only_what_some_branch_changed_is_written_back():
    m = Pair()
    before = m.a.w.value, m.a.calls.value
    nnx.cond(True, lambda m, x: m.b(x), lambda m, x: x, m, X)
    assert m.a.w.value is before[0]
    assert m.a.calls.value is before[1]
    assert m.b.calls.value == 1


def same_change(m, x):
    m.new = nnx.Cache(x)
    del m.tied
    m.a, m.b = m.b, m.a
    return m.a


def same_change_twice(m, x):
    out = same_change(m, 2 * x)
    m.a(x)
    return out


@pytest.mark.parametrize("taken", [True, False])
def test_a_structure_change_that_all_branches_make_comes_out(taken):
    m = Pair()
    a, b = m.a, m.b
    assert nnx.cond(taken, same_change, same_change_twice, m, X) is b
    assert m.a is b
    assert m.b is a
    assert m.me is m
    assert not hasattr(m, "tied")
    np.testing.assert_array_equal(m.new.value, X if taken else 2 * X)
    assert b.calls.value == (not taken)


def sow(m, x):
    m.sow(nnx.Intermediate, "seen", x)


@pytest.mark.parametrize(
    "change", [same_change, sow, lambda m, x: setattr(m, "flag", 1), lambda m, x: delattr(m, "tied")]
)
def test_a_structure_change_that_one_branch_makes_is_refused_and_changes_nothing(change):
    m = Pair()
    before = Snapshot(m)
    with pytest.raises(BodyError, match=r"Branch 0 and branch 1(.|\n)*structure"):
        nnx.cond(True, lambda m, x: (change(m, x), None)[1], lambda m, x: None, m, X)
    before.assert_unchanged()


def test_the_refused_attribute_is_named_by_path():
    with pytest.raises(BodyError, match=r"branch 1: args\[0\]\.a\.w: the Param .* became nothing"):
        nnx.cond(True, lambda m: delattr(m.a, "w"), lambda m: None, Pair())


def test_only_the_changes_that_differ_are_named():
    def attach(m):
        m.new = nnx.Cache(X)

    def attach_and_set(m):
        attach(m)
        m.flag = True

    m = Pair()
    with pytest.raises(BodyError, match=r"structures:\n  branch 1: args\[0\]\.flag: nothing became True \(bool\)\nLet"):
        nnx.cond(True, attach_and_set, attach, m)
    with pytest.raises(BodyError, match=r"structures:\n  what they attach is not alike\nLet"):
        nnx.cond(True, lambda m: setattr(m, "new", nnx.Cache(X, tag="other")), attach, m)


def test_an_array_attribute_that_no_branch_changes_stays_the_same_object():
    m = Pair()
    m.array, m.other = jnp.zeros(3), jnp.zeros(3)
    before = m.other
    nnx.cond(True, lambda m: setattr(m, "array", m.array + 1), lambda m: None, m)
    np.testing.assert_array_equal(m.array, [1, 1, 1])
    assert m.other is before


def test_an_array_attribute_may_change_in_one_branch_while_both_attach_the_same():
    def attach(m):
        m.new = nnx.Cache(jnp.zeros(2))

    def attach_and_add(m):
        attach(m)
        m.array = m.array + 1

    m = Pair()
    m.array = jnp.zeros(3)
    nnx.cond(True, attach_and_add, attach, m)
    np.testing.assert_array_equal(m.array, [1, 1, 1])
    nnx.cond(False, attach_and_add, attach, m)
    np.testing.assert_array_equal(m.array, [1, 1, 1])


def test_new_modules_come_out_of_either_branch():
    for taken, value in ((True, 1.0), (False, 2.0)):
        out = nnx.cond(taken, lambda: Layer(1.0), lambda: Layer(2.0))
        np.testing.assert_array_equal(out.w.value, jnp.full(3, value))


@pytest.mark.parametrize("taken", [True, False])
def test_a_state_is_a_value_that_one_branch_passes_on_and_the_other_makes_anew(taken):
    state = nnx.state(Layer(), nnx.Param)
    out = nnx.cond(taken, lambda s: jax.tree.map(lambda x: x + 1, s), lambda s: s, state)
    np.testing.assert_array_equal(out["w"].value, jnp.full(3, 3.0 if taken else 2.0))
    np.testing.assert_array_equal(state["w"].value, jnp.full(3, 2.0))


def test_operands_come_back_as_themselves_and_stay_shared():
    def f(m, v):
        assert m.tied is v
        assert m.me is m
        v.value = v + 1
        return m, v

    m = Pair()
    out, v = nnx.cond(True, f, lambda m, v: (m, v), m, m.a.w)
    assert out is m
    assert v is m.a.w
    np.testing.assert_array_equal(v.value, [2, 2, 2])


OUTPUTS = {
    "structure": (lambda m, x: (x, x), lambda m, x: x, "Branch 0 and branch 1 .*return different structures"),
    "structure of the other": (lambda m, x: x, lambda m, x: (x, x), "return different structures"),
    "objects": (lambda m, x: m.a, lambda m, x: m.b, "return different structures"),
    "None": (lambda m, x: None, lambda m, x: x, "return different structures"),
    "shape": (lambda m, x: x, lambda m, x: x[:2], r"<output>: float32\[2\] in branch 0, float32\[3\] in branch 1"),
    "dtype": (lambda m, x: {"k": x}, lambda m, x: {"k": x > 0}, r"bool\[3\] in branch 0, float32\[3\] in branch 1"),
    "Variable": (
        lambda m, x: setattr(m.a.w, "value", x[:2]),
        lambda m, x: None,
        r"and true_fun\) end with different types:\n  args\[0\]\.a\.w: float32\[3\] in branch 0, float32\[2\] in",
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_branches_that_do_not_fit_together_are_errors_and_change_nothing(case):
    true_fun, false_fun, message = OUTPUTS[case]
    m = Pair()
    before = Snapshot(m)
    with pytest.raises(BodyError, match=message):
        nnx.cond(True, true_fun, false_fun, m, X)
    before.assert_unchanged()


def test_no_branches_and_choices_that_are_no_scalar_are_errors():
    with pytest.raises(ValueError, match="at least one branch"):
        nnx.switch(0, [])
    with pytest.raises(errors.ArgumentError, match=r"nnx.switch takes a list of functions, .* but got function"):
        nnx.switch(0, skip, Layer(), X)
    with pytest.raises(errors.ArgumentError, match=r"The predicate of nnx.cond must be a scalar, got bool\[2\]"):
        nnx.cond(jnp.array([True, False]), skip, skip, Layer(), X)
    with pytest.raises(errors.ArgumentError, match=r"The index of nnx.switch must be an integer, got float32\[\]"):
        nnx.switch(1.5, [skip, skip], Layer(), X)
    for choice in ("no", None):  # `bool("no")` is True
        with pytest.raises(errors.ArgumentError, match=r"The predicate of nnx.cond must be a scalar, got (str|None)"):
            nnx.cond(choice, skip, skip, Layer(), X)
        with pytest.raises(errors.ArgumentError, match=r"The index of nnx.switch must be a scalar, got (str|None)"):
            nnx.switch(choice, [skip, skip], Layer(), X)


def test_a_predicate_that_is_no_real_number_is_refused():
    """A cast to bool looks at the real part alone: 1j chose the branch for false; and a key cannot be cast."""
    for predicate in (1j, jnp.array(1j), jax.random.key(0)):
        with pytest.raises(errors.ArgumentError, match=r"a boolean or a real number, got (complex|key)"):
            nnx.cond(predicate, lambda x: x, lambda x: -x, 1.0)


def test_weak_types_stay_as_in_jax():
    """The sum of a bfloat16 and a Python number chosen by cond is a bfloat16, also if a branch returns an array."""
    number = nnx.cond(True, lambda: 1.0, lambda: 2.0)
    assert (jnp.ones((), jnp.bfloat16) + number).dtype == jnp.bfloat16
    for branches in [(lambda x: x, lambda x: 2.0), (lambda x: 2.0, lambda x: x)]:
        ours, theirs = (cond(True, *branches, jnp.float32(1)) for cond in (nnx.cond, jax.lax.cond))
        assert ours.weak_type == theirs.weak_type


def test_eager_calls_trace_as_often_as_jax_does():
    ours, theirs = (counted(call), counted(skip)), (counted(jnp.sin), counted(jnp.cos))
    m = Layer()
    for i in range(4):
        nnx.cond(i % 2, *ours, m, X)
        jax.lax.cond(i % 2, *theirs, X)
    assert [f.count for f in ours] == [f.count for f in theirs] == [1, 1]
    for i in range(3):
        nnx.switch(i % 2, ours, m, X)
    assert [f.count for f in ours] == [2, 2]  # the branches in another order
    assert m.calls.value == 2 + 2


def test_a_function_that_is_several_branches_is_traced_once():
    """Bound to different objects it is another one."""
    f, m = counted(lambda m, x: m(x)), Pair()
    for index in (0, 2):
        np.testing.assert_allclose(nnx.switch(index, [f, call, f], m.a, X), Layer(1.0)(X), rtol=1e-6)
    assert (f.count, m.a.calls.value) == (1, 2)
    nnx.switch(1, [functools.partial(f, m.a), functools.partial(f, m.b)], X)
    assert (f.count, m.b.calls.value) == (3, 1)


def test_fresh_lambdas_beside_a_lasting_branch_are_not_kept():
    def lasting(x):
        return x

    def use(k):  # Python up to 3.12 keeps copies of the locals of a frame that was looked into
        fresh = eval(f"lambda x: x + {k}")
        assert nnx.cond(False, fresh, lasting, 1.0) == 1
        return weakref.ref(fresh)

    references = [use(k) for k in range(6)]
    gc.collect()
    assert not any(reference() for reference in references)


def test_a_captured_model_is_never_stale():
    m = Layer(1.0)

    def double(x):
        return 2 * m.w * x

    def other(x):
        return m.read(x) if m.calls.value.ndim else m.w * x

    first = [nnx.cond(taken, double, other, X) for taken in (True, False)]
    m.w.value = 3 * m.w.value
    second = [nnx.cond(taken, double, other, X) for taken in (True, False)]
    np.testing.assert_allclose(second, 3 * np.array(first))


def test_a_captured_mode_is_never_stale():
    m = Norm()
    m.training = False

    def f(x):
        return m(x) if not m.training else x

    kept = nnx.cond(True, f, lambda x: x, X)
    m.training = True
    np.testing.assert_array_equal(nnx.cond(True, f, lambda x: x, X), X)
    assert not np.array_equal(kept, X)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("taken", [True, False])
def test_a_failing_branch_changes_nothing(error, taken):
    def f(m, x):
        m(x)
        m.new = nnx.Param(x)
        raise error

    m = Pair()
    before = Snapshot(m)
    with pytest.raises(error):
        nnx.cond(taken, f, call, m, X)
    before.assert_unchanged()


@pytest.mark.parametrize("raw", RAW)
def test_a_read_only_forward_under_raw_jax_leaves_the_live_model_as_it_was(raw):
    m = Chooser()
    before = Snapshot(m)
    RAW[raw](lambda x: nnx.cond(x.sum() > 0, lambda m, x: m.layer.read(x), lambda m, x: x, m, x))
    before.assert_unchanged()


def test_a_write_under_raw_jax_is_refused_by_path():
    m = Chooser()
    before = Snapshot(m)
    with pytest.raises(errors.TraceContextError, match=r"which is m\.layer\.calls"):
        jax.jit(lambda x: nnx.cond(x.sum() > 0, lambda m, x: m.layer(x), lambda m, x: x, m, x))(X)
    before.assert_unchanged()


def test_an_attribute_that_all_branches_set_under_raw_jax_is_refused_by_name():
    m = Pair()
    before = Snapshot(m)
    with pytest.raises(errors.TraceContextError, match=r"Cannot write attribute 'new' of the Pair at args\[0\], which"):
        jax.jit(lambda x: nnx.cond(x.sum() > 0, *[lambda m: setattr(m, "new", nnx.Cache(X))] * 2, m))(X)
    before.assert_unchanged()


@pytest.mark.parametrize("taken", [True, False])
def test_gradients_equal_those_of_the_plain_branch(taken):
    def loss(m, x, taken):
        return nnx.cond(taken, lambda m, x: m(x).sum(), lambda m, x: (m.w**2).sum(), m, x)

    grads = nnx.grad(loss)(Layer(), X, jnp.array(taken))
    expected = nnx.grad(lambda m, x: m(x).sum() if taken else (m.w**2).sum())(Layer(), X)
    np.testing.assert_allclose(grads.w.value, expected.w.value, rtol=1e-6)


def test_under_vmap_each_member_takes_its_own_branch():
    many = nnx.vmap(Layer)(jnp.array([1.0, 2.0]))
    out = nnx.vmap(lambda m, p, x: nnx.cond(p, call, skip, m, x), in_axes=(0, 0, None))(
        many, jnp.array([True, False]), X
    )
    np.testing.assert_allclose(out, jnp.stack([jnp.sin(X), X]), rtol=1e-6)
    np.testing.assert_array_equal(many.calls.value, [1, 0])


def test_no_tracer_leaks():
    m = Chooser()
    with jax.checking_leaks():
        nnx.jit(lambda m, p: nnx.cond(p, m.use_layer, m.use_norm, X))(m, jnp.array(True))
        nnx.cond(False, m.use_layer, m.use_norm, X)
    assert_no_tracer(m)
    assert m.layer.calls.value == 1
    assert m.norm.count.value == 1


def test_keys_and_pytrees_may_be_operands_and_values():
    key = nnx.cond(True, lambda k: jax.random.fold_in(k, 1), lambda k: k, jax.random.key(0))
    assert key == jax.random.fold_in(jax.random.key(0), 1)
    v = nnx.Variable({"a": X, "b": jnp.array(0)})
    nnx.cond(True, lambda v: setattr(v, "value", {"a": v.value["a"] + 1, "b": v.value["b"]}), lambda v: None, v)
    np.testing.assert_array_equal(v.value["a"], X + 1)


def test_branches_that_differ_are_named_by_the_path_in_the_output_or_in_the_operands():
    with pytest.raises(BodyError, match=r"<output>\.a: nothing in branch 0, array in branch 1"):
        nnx.cond(True, lambda x: {"a": x}, lambda x: None, jnp.ones(2))
    with pytest.raises(BodyError, match=r"args\[0\]\.a: float32\[2\] in branch 0, float32\[3\] in branch 1"):
        nnx.cond(True, lambda d: d.update(a=jnp.ones(3)), lambda d: None, nnx.Dict(a=jnp.ones(2)))
