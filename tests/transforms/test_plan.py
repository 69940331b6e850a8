"""A compiled function is given what its trace read, and gives back what it changed: no more."""

import dataclasses
import functools
import gc
import logging
import tracemalloc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.graph import pack
from nnxlib.transforms.lift import Arguments


class Net(nnx.Module):
    def __init__(self, n=6):
        self.layers = [nnx.Param(jnp.full(2, float(i))) for i in range(n)]
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))


def plan_of(jitted):
    (plan,) = jitted._plans.values()
    return plan


def inputs_of(jitted):
    """The paths of what the compiled function is given."""
    plan = plan_of(jitted)
    paths = plan.crossing.layout.leaf_paths
    return {".".join(map(str, paths[k][2:])) for k in plan.compiled.inputs}


def outputs_of(jitted, *args):
    """The leaves that the compiled function returns."""
    plan = plan_of(jitted)
    packed = pack(Arguments(args, {}))
    return jax.tree.leaves(plan.compiled.jitted(*plan.compiled.inputs_of(packed.leaves)))


class Counted:
    """A function that counts how often Python runs it."""

    def __init__(self, function):
        self.function, self.runs = function, 0

    def __call__(self, *args):
        self.runs += 1
        return self.function(*args)


def write(variable, value):
    variable.value = value


READS = {
    "nothing": (lambda m: jnp.ones(2), set()),
    "one": (lambda m: m.layers[2] * 2, {"layers.2"}),
    "its shape": (lambda m: jnp.ones(m.layers[2].shape), {"layers.2"}),
    "its dtype": (lambda m: jnp.ones(2, m.layers[2].dtype), {"layers.2"}),
    "its repr": (lambda m: jnp.full(2, 0 * len(repr(m.layers[2]))), {"layers.2"}),
    "changes one": (lambda m: write(m.count, m.count + 1), {"count"}),
    "writes one": (lambda m: write(m.layers[0], jnp.zeros(2)), set()),
    "writes one by another": (lambda m: write(m.layers[0], m.layers[1].value), {"layers.1"}),
    "writes, then reads": (lambda m: (write(m.layers[0], jnp.zeros(2)), m.layers[0] + 1)[1], set()),
    "as a raw value": (lambda m: m.layers[3].raw_value, {"layers.3"}),
    "by an item": (lambda m: m.layers[3][0], {"layers.3"}),
    "a part as a pytree": (lambda m: jax.tree.map(jnp.sum, m.layers[4]).value, {"layers.4"}),
    "by state": (lambda m: nnx.state(m)["count"].value, {*(f"layers.{i}" for i in range(6)), "count"}),
    "by split": (lambda m: nnx.merge(*nnx.split(m.layers)) and None, {f"layers.{i}" for i in range(6)}),
    "by another transform": (lambda m: nnx.remat(lambda v: v * 2)(m.layers[5]), {"layers.5"}),
    "by a gradient": (lambda m: nnx.grad(lambda v: v.sum())(m.layers[5]).value, {"layers.5"}),
    "by a copy": (lambda m: nnx.clone(m.layers[1]).value, {"layers.1"}),
    "into the output": (lambda m: m.layers[1], set()),
    "new metadata": (lambda m: m.layers[1].set_metadata(a=1), {"layers.1"}),
}


@pytest.mark.parametrize(("function", "expected"), READS.values(), ids=READS.keys())
def test_what_is_read_is_passed(function, expected):
    """However it is read; and calls give what the eager function gives, with each Variable changed from outside."""
    counted = Counted(function)
    f, m, eager = nnx.jit(counted), Net(), Net()
    for i in range(4):
        for model in (m, eager):
            model.layers[i].value = jnp.full(2, 10.0 * i)
        expected_out, out = function(eager), f(m)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(m), nnx.state(eager)))
        if isinstance(out, nnx.Variable):
            assert out is m.layers[1]
        elif out is not None:
            assert (jnp.asarray(out) == jnp.asarray(expected_out)).all()
        if i == 0:
            assert inputs_of(f) == expected
            assert counted.runs == 1 or "metadata" in m.layers[1].get_metadata()


@pytest.mark.parametrize("catch", [True, False], ids=["goes on", "raises another error"])
@pytest.mark.parametrize("place", ["argument", "closure", "nested"])
def test_a_function_that_catches_every_error_still_reads_what_it_needs(place, catch):
    """The end of a trace that was given too little is no error of the function's own."""
    net = Net()

    def f(x, net):
        total = net.layers[0].sum()
        if len(x) > 1:
            try:
                total += net.layers[1].sum()
            except BaseException:
                if not catch:
                    raise ValueError from None
                total += 1000
        return total

    inner = nnx.jit(f)
    jitted = nnx.jit({"argument": f, "closure": lambda x, _: f(x, net), "nested": lambda x, net: inner(x, net)}[place])
    for n in (1, 1, 2, 1, 3):
        assert jitted(jnp.ones(n), net) == f(jnp.ones(n), net)


def test_a_read_only_call_returns_nothing_else():
    """A large layer that is only read is not copied: its arrays are no outputs."""
    layer = nnx.Linear(300, 300, rngs=nnx.Rngs(0))
    f = nnx.jit(lambda layer, x: layer(x))
    f(layer, jnp.ones((1, 300)))
    before = layer.kernel.value
    assert len(outputs_of(f, layer, jnp.ones((1, 300)))) == 1
    f(layer, jnp.ones((1, 300)))
    assert layer.kernel.value is before


def test_what_is_not_read_may_be_anything():
    """Another shape, an abstract or a deleted array, no array at all: without a new trace, and untouched."""
    counted = Counted(lambda m: m.layers[0] * 2)
    f, m = nnx.jit(counted), Net()
    f(m)
    deleted = jnp.ones(3)
    deleted.delete()
    for value in (jnp.ones((3, 3)), jax.ShapeDtypeStruct((2,), jnp.float32), deleted, "text", None):
        m.layers[1].value = value
        for _ in range(3):
            assert f(m).tolist() == [0.0, 0.0]
        assert m.layers[1].raw_value is value
    assert counted.runs == 1


def test_another_shape_may_read_more():
    """A trace that asks for what was not passed is made again with it, also where a call goes the short way."""

    def function(m, x):
        return x + sum(v.value.sum() for v in m.layers[: x.shape[0]])

    counted = Counted(function)
    f, m = nnx.jit(counted), Net()
    for n in (1, 1, 1, 3, 3, 1, 2, 5, 5, 3, 1):
        m.layers[0].value += 1
        assert (f(m, jnp.ones(n)) == function(m, jnp.ones(n))).all()
    assert inputs_of(f) == {"", *(f"layers.{i}" for i in range(5))}


def test_a_trace_that_reads_less_keeps_what_others_read():
    counted = Counted(lambda m, x: x.sum() + (m.layers[0].sum() if x.shape[0] > 1 else m.count.value))
    f, m = nnx.jit(counted), Net()
    results = [float(f(m, jnp.ones(n))) for n in (2, 1, 2, 1, 1, 2, 2)]
    assert counted.runs <= 5  # and not at each call that follows one of another shape
    assert results == [2.0, 1.0, 2.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("n", [1, 8])
def test_a_pytree_in_a_variable_is_passed_whole_or_not(n):
    m = Net()
    m.trees = [nnx.Variable({"a": jnp.ones(2), "b": [jnp.ones(i + 1)]}) for i in range(n)]
    f = nnx.jit(lambda m: m.trees[-1]["b"][0] * m.count)
    for k in range(4):
        m.count.value = jnp.array(k)
        m.trees[-1].value = {"a": jnp.ones(2), "b": [jnp.full(n, 2.0)]}
        assert f(m).tolist() == [2.0 * k] * n
    assert inputs_of(f) == {"count", f"trees.{n - 1}"}


def test_donation_is_of_what_changes():
    """What is not changed keeps its buffer, whether it is read or not; what is, gives it up."""
    f, m = nnx.jit(lambda m: write(m.count, m.count + m.layers[0][0].astype(int)), donate_argnums=0), Net()
    for k in range(4):
        count, read, unread = m.count.value, m.layers[0].value, m.layers[1].value
        f(m)
        assert count.is_deleted()
        assert m.layers[0].value is read
        assert m.layers[1].value is unread
        assert not read.is_deleted() | unread.is_deleted()
        assert m.count == 0, k
    assert len(outputs_of(f, m)) == 1


def test_donation_is_of_what_has_other_metadata_too():
    f, m = nnx.jit(lambda m: m.layers[1].set_metadata(note=1), donate_argnums=0), Net()
    before = m.layers[1].value
    f(m)
    assert before.is_deleted()
    assert m.layers[1].tolist() == [1.0, 1.0]


def test_what_is_donated_comes_back_where_other_shapes_do_not_change_it():
    def f(m, x):
        if x.shape == (2,):
            m.count += 1
        return m.count + x.sum()

    m, eager, jitted = Net(), Net(), nnx.jit(f, donate_argnums=0)
    for x in [jnp.ones(2), jnp.ones(3)] * 2:
        assert jitted(m, x) == f(eager, x)
        assert m.count == eager.count


def test_what_is_passed_unused_is_not_donated():
    """With `keep_unused` JAX would free what a trace for other shapes does not even ask for."""

    def f(m, x):
        if x.shape == (2,):
            m.count += 1
        return x.sum()

    m, jitted = Net(), nnx.jit(f, donate_argnums=0, keep_unused=True)
    for x in [jnp.ones(2), jnp.ones(3)] * 2:
        jitted(m, x)
    assert m.count == 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    """A pytree that refuses a number."""

    x: Any
    refused: ClassVar[int] = -1

    def __post_init__(self):
        if not isinstance(self.x, jax.core.Tracer) and self.x == Checked.refused:
            raise ValueError("refused")


@pytest.mark.parametrize("calls", [0, 1, 4])
@pytest.mark.parametrize("attaches", [False, True])
def test_an_output_that_is_refused_does_not_lose_what_was_donated(calls, attaches):
    """Nor the new values: what went in is gone, so the objects are as they are after the step."""

    def step(m):
        write(m.count, m.count + 1)
        if attaches:
            m.note = "seen"
        return Checked(m.count.value)

    m, f = Net(), nnx.jit(step, donate_argnums=0)
    m.count.value = jnp.array(0)
    Checked.refused = -1
    for _ in range(calls):
        f(m)
    Checked.refused = calls + 1
    with pytest.raises(ValueError, match="refused"):
        f(m)
    assert m.count.value == calls + 1
    assert f(m).x == calls + 2


def test_stages_donate_what_calls_do():
    m = Net()
    lowered = nnx.jit(lambda m: write(m.count, m.count + m.layers[0][0].astype(int)), donate_argnums=0).lower(m)
    assert lowered.as_text().count("tf.aliasing_output") == 1
    count, read = m.count.value, m.layers[0].value
    lowered.compile()(m)
    assert count.is_deleted()
    assert m.layers[0].value is read


def test_a_failure_leaves_what_is_passed():
    """A trace for another shape that fails changes nothing, and the next call is right."""
    f, m = nnx.jit(lambda m, x: (write(m.count, m.count + 1), x @ m.layers[0])[1]), Net()
    f(m, jnp.ones(2))
    with pytest.raises(TypeError):
        f(m, jnp.ones(3))
    f(m, jnp.ones(2))
    assert m.count == 2


@pytest.mark.parametrize(
    "transform",
    [
        nnx.jit,
        nnx.grad,
        nnx.value_and_grad,
        nnx.remat,
        nnx.jacrev,
        nnx.hessian,
        lambda f: functools.partial(nnx.vjp, f),
    ],
)
def test_a_call_with_shapes_in_place_of_values_says_so_by_path(transform):
    """JAX's error speaks of another argument, or of a tracer that was made of a shape."""
    model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(Exception, match=r"JAX type|ShapeDtypeStruct") as caught:
        transform(lambda model, x: model(x).sum())(model, jnp.ones((1, 2)))
    if "Argument 'ShapeDtypeStruct" in str(caught.value) and not isinstance(caught.value, TypeError):
        return  # before JAX 0.9, which says so itself
    notes = "\n".join(caught.value.__notes__)
    assert "shapes without values" in notes
    assert "args[0].kernel: float32[2, 3]" in notes


def test_user_code_runs_once():
    """Not once to find out what it reads, and again to compile."""
    counted = Counted(lambda m, x: m.layers[0] * x)
    f = nnx.jit(counted)
    for m in (Net(), Net()):
        for _ in range(3):
            f(m, jnp.ones(2))
    assert counted.runs == 1


def test_a_step_with_donation_is_traced_as_fast_as_one_without():
    """What is donated is known after a trace; so the trace becomes one call in the program, and is not made again."""

    class Deep(nnx.Module):
        def __init__(self, *, rngs):
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(20)])
            self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return self.dropout(self.norm(x))

    def lowered(**options):
        def step(model, optimizer, x):
            loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, grads)
            return loss

        return nnx.jit(step, **options).lower(model, optimizer, jnp.ones((2, 3)))

    model = Deep(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    plain, donated = ([], [])
    for _ in range(3):  # what collections free calls functions, too
        plain.append(count_calls(lowered))
        donated.append(count_calls(functools.partial(lowered, donate_argnums=(0, 1))))
    assert min(donated) < 1.25 * min(plain)  # 1.15; binding each equation again would make it 1.37


@pytest.mark.parametrize("options", [{"compiler_options": {"xla_cpu_enable_fast_math": False}}, {"inline": True}])
def test_donation_with_other_options(options):
    def double(m, x):
        for layer in m.layers:
            layer *= 2
        m.count += 1
        return x + 1

    m, step = Net(2), nnx.jit(double, donate_argnums=(0, 1), **options)
    kept = [layer.get_value() for layer in m.layers]
    x = step(m, step(m, jnp.zeros(2)))
    np.testing.assert_array_equal(m.layers[1], [4, 4])
    np.testing.assert_array_equal(x, [2, 2])
    assert all(value.is_deleted() for value in kept)
    assert step._cache_size() == 1


class Slotted(nnx.Module):
    """Has to be walked at each call: nobody notices a change of the slot."""

    __slots__ = ("slot",)

    def __init__(self):
        self.slot, self.unread = jnp.ones(2), nnx.Param(jnp.ones(2))


@pytest.mark.parametrize("kind", [Net, Slotted])
def test_another_call_and_another_model_compile_nothing(kind, caplog):
    f, x = nnx.jit(lambda m, x: x * (m.slot if hasattr(m, "slot") else m.layers[0])), jnp.ones(2)
    models = kind(), kind()
    f(models[0], x)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        for m in (*models, *models):
            f(m, x)
    assert [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()] == []


def test_memory_of_a_training_step_is_that_of_raw_jax():
    """Arguments, outputs and temporaries of the compiled step, as XLA counts them, with donation."""

    class Mlp(nnx.Module):
        def __init__(self, *, rngs):
            self.layers = [nnx.Linear(32, 32, rngs=rngs) for _ in range(3)]

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    def loss(model, x):
        return (model(x) ** 2).mean()

    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    tx, x = optax.adam(1e-3), jnp.ones((4, 32))
    model = Mlp(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = [(layer.kernel.value, layer.bias.value) for layer in model.layers]

    def raw(params, moments, x):
        def loss(params):
            y = x
            for kernel, bias in params:
                y = jnp.tanh(y @ kernel + bias)
            return (y**2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = tx.update(grads, moments)
        return value, optax.apply_updates(params, updates), moments

    def memory(stage):
        found = stage.compile().memory_analysis()
        return found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes, (
            found.temp_size_in_bytes
        )

    ours = memory(nnx.jit(step, donate_argnums=(0, 1)).lower(model, optimizer, x))
    theirs = memory(jax.jit(raw, donate_argnums=(0, 1)).lower(params, tx.init(params), x))
    assert ours[0] <= theirs[0] + 64  # the optimizer's count of steps
    assert ours[1] <= 1.05 * theirs[1]


def test_many_calls_keep_nothing():
    """Memory that Python holds does not grow with the number of calls, in any way of calling."""
    m = Net()
    step = nnx.jit(lambda m, x: write(m.count, m.count + 1))
    keyword, inside = nnx.jit(lambda *, m: m.layers[0].sum()), nnx.jit(lambda tree: tree["m"].layers[0].sum())
    closure = nnx.jit(lambda: m.layers[0].sum())

    def work(times):
        for k in range(times):
            step(m, 1.0)
            keyword(m=m)
            inside({"m": m})
            closure()
            if k % 10 == 0:
                m.flag = k % 20 == 0

    work(200)
    gc.collect()
    tracemalloc.start()
    try:
        work(200)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        work(2000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000


def test_a_step_makes_few_objects_for_the_collector():
    """At most one young collection for each step, whatever the size of the model."""
    m = nnx.List([nnx.Param(jnp.ones(1)) for _ in range(300)])

    def update(m):
        for v in m:
            v += 1

    f = nnx.jit(update)
    for _ in range(20):
        f(m)
    gc.collect()
    before = sum(generation["collections"] for generation in gc.get_stats())
    for _ in range(30):
        f(m)
    assert sum(generation["collections"] for generation in gc.get_stats()) - before <= 30


def test_shapes_that_take_turns():
    """Each trace writes other Variables, and each call those of its own trace."""

    def function(m, x):
        write(m.layers[x.shape[0]], x)
        return x.sum()

    f, m = nnx.jit(function), Net()
    for k in range(12):
        n = k % 3 + 1
        f(m, jnp.full(n, float(k)))
        assert m.layers[n].value.tolist() == [float(k)] * n
    assert m.layers[4].value.tolist() == [4.0, 4.0]


def test_a_variable_that_holds_no_array():
    """The message names the Variable, and where such a value belongs."""
    model = nnx.Dict(mode=nnx.Variable("train"), w=nnx.Param(jnp.ones(2)))
    with pytest.raises(TypeError, match=r"The Variable args.0..mode holds a str .'train'.*attribute of its own"):
        nnx.jit(lambda model: model["w"] * 2)(model)


@pytest.mark.parametrize(
    "call",
    [
        lambda f, model: nnx.jit(f)(model),
        lambda f, model: nnx.eval_shape(f, model),
        lambda f, model: nnx.jit(f).eval_shape(model),
        lambda f, model: nnx.remat(f)(model),
        lambda f, model: nnx.vjp(f, model),
        lambda f, model: nnx.cond(True, f, f, model),
    ],
)
def test_an_integer_that_is_too_large(call):
    """JAX's OverflowError names no path, or not that of the user."""
    model = nnx.Dict(n=nnx.Variable(2**33), w=nnx.Param(jnp.ones(2)))
    with pytest.raises(TypeError, match=r"The Variable args.0..n holds a int .8589934592.*32 bits, or 64 with"):
        call(lambda model: model["w"] * 2, model)
    with jax.enable_x64(True):
        call(lambda model: model["w"] * 2, model)


def test_an_integer_that_is_too_large_as_a_result():
    """The message names the Variable that was set to it."""
    with pytest.raises(TypeError, match=r"args.0..w is set to a int .8589934592"):
        nnx.jit(lambda model: model["w"].set_value(2**33))(nnx.Dict(w=nnx.Param(jnp.ones(2))))
