"""The fast path of a jitted call: what earlier calls have left behind is used where it fits, and nowhere else."""

import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib import errors
from nnxlib.core.layout import KEPT
from nnxlib.core.tables import table_of


def net(value=1.0):
    return nnx.List([nnx.Param(jnp.full(2, value)), nnx.Param(jnp.ones(2))])


def value_of(x):
    return x[0].value.sum() if isinstance(x, nnx.List) else x


def test_objects_and_plain_leaves_change_places(unchecked):
    """Calls of one signature, with objects in any places, and one object in two."""

    def f(*args):
        for k, x in enumerate(args):
            if isinstance(x, nnx.List):
                x[1] += k + 1
        return sum((k + 1) * value_of(x) for k, x in enumerate(args))

    a, b = net(2.0), net(3.0)
    jitted, calls = nnx.jit(f), [*itertools.product([a, b, jnp.float32(5.0)], repeat=2)]
    for args in calls * 4:
        before = [x[1].value for x in (a, b)]
        expected = f(*args), [x[1].value for x in (a, b)]
        for x, value in zip((a, b), before, strict=True):
            x[1].value = value
        assert jitted(*args) == expected[0]
        assert jax.tree.all(jax.tree.map(jnp.array_equal, [x[1].value for x in (a, b)], expected[1]))


@pytest.mark.parametrize("positions", [*itertools.permutations(range(3))], ids=str)
def test_an_array_comes_where_an_object_was(unchecked, positions):
    """With a first object that had the other object beside it, in calls before those of another first object."""

    def f(*args):
        first, second, x = (args[k] for k in positions)
        return first[0] + (second[0] * 10 if isinstance(second, nnx.List) else second) * x

    a, b, other, array = net(), net(), net(), jnp.ones(2)
    calls = [(a, other), (b, array), (a, array), (b, other), (a, other), (b, array)]
    jitted = nnx.jit(f)
    for first, second in [call for call in calls for _ in range(4)]:
        args = [x for _, x in sorted(zip(positions, (first, second, 1.0), strict=True), key=lambda pair: pair[0])]
        assert jitted(*args).tolist() == f(*args).tolist()


@jax.tree_util.register_pytree_node_class
class Scaled:
    """A pytree around a model, which has all attributes of the model as its own."""

    def __init__(self, model, scale):
        self.model, self.scale = model, scale

    def __getattr__(self, name):
        return getattr(self.model, name)

    def tree_flatten(self):
        return (self.model,), self.scale

    @classmethod
    def tree_unflatten(cls, scale, children):
        return cls(*children, scale)


@pytest.mark.parametrize("position", [0, 1])
def test_an_object_that_hands_on_attributes_comes_where_an_object_was(unchecked, position):
    """It is not taken for the object that it hands them on to."""

    def f(*args):
        x = args[position]
        return 10 * x.scale * x.model[0].sum() if isinstance(x, Scaled) else x[0].sum()

    jitted, other, model = nnx.jit(f), net(), net(3.0)
    for x, expected in ((model, 6.0), (Scaled(model, 2.0), 120.0), (model, 6.0)):
        for _ in range(4):
            assert jitted(*([x] if position == 0 else [other, x])) == expected


def test_a_model_behind_a_weak_proxy(unchecked):
    """Whether it has come by itself before or not; what comes back is the model."""

    def step(model):
        model[1] += 1.0
        return model, model[0].sum()

    jitted, model = nnx.jit(step), net()
    for x in [weakref.proxy(model)] * 3 + [model] * 3 + [weakref.proxy(model)] * 3:
        out, total = jitted(x)
        assert out is model
        assert total == 2.0
    assert model[1].value.tolist() == [10.0, 10.0]


def test_what_several_models_cost_that_take_turns(unchecked):
    """With one optimizer or one set of streams for all: as much as one model."""
    step, rngs = nnx.jit(lambda m, rngs: m[0] * rngs.uniform()), nnx.Rngs(0)
    models = [net() for _ in range(4)]
    counts = []
    for chosen in (models[:1] * 4, models):
        for _ in range(9):
            [step(m, rngs) for m in chosen]
        counts.append(min(count_calls(lambda: [step(m, rngs) for m in chosen]) for _ in range(4)))  # noqa: B023
    assert counts[0] == counts[1] < 40


def test_a_model_keeps_no_function_alive(unchecked):
    """A model that was called often knows nothing that keeps the function, or what that refers to."""
    model, seen = net(), []
    jitted = nnx.jit(lambda m, x: m[0] * x)
    for _ in range(5):
        jitted(model, 2.0)
    assert table_of(model).shortcuts
    seen.append(weakref.ref(jitted))
    del jitted
    gc.collect()
    assert seen[0]() is None


def test_what_a_model_remembers_of_its_calls_is_bounded(unchecked):
    """It is called by ever new functions, together with ever new objects, which are gone afterwards."""
    model = net()
    total = nnx.jit(lambda a, b: a[0].sum() + b[0].sum())
    for k in range(2 * KEPT):
        own = nnx.jit(lambda m: m[0].sum())
        for _ in range(2):
            assert own(model) == 2.0
        assert total(model, net(k)) == 2.0 + 2 * k
    assert len(table_of(model).shortcuts) <= KEPT
    assert len(table_of(model).sharing) <= KEPT


def test_a_change_of_any_argument_is_seen(unchecked):
    """Of two objects that a function was called with often, either one changes between the calls."""
    first, second = net(1.0), net(2.0)
    both = nnx.jit(lambda a, b: a[0].sum() * len(a) + 10 * b[0].sum() * len(b))
    for k in range(60):
        if k % 5 == 0:
            second.append(k) if k % 2 else second.pop()
        if k % 7 == 0:
            first.append(k) if k % 2 else first.pop()
        assert both(first, second) == 2 * len(first) + 40 * len(second)


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_a_value_that_cannot_be_traced_is_named(calls, unchecked):
    """At the first call, by a cache entry, and by a shortcut."""
    model, jitted = net(), nnx.jit(lambda m: m[0].sum())
    for _ in range(calls):
        jitted(model)
    model[0].value = "text"
    with pytest.raises(errors.ArgumentError, match=r"The Variable args\[0\]\[0\] holds a str"):
        jitted(model)
    model[0].value = jnp.full(2, 4.0)
    assert jitted(model) == 8.0


def test_what_a_trace_for_other_shapes_reads_besides(unchecked):
    """A shortcut for one shape does not serve another, for which the function reads more."""
    model = net(3.0)
    jitted = nnx.jit(lambda m, x: m[0].sum() + (m[1].sum() if x.ndim else 0.0))
    for x, expected in ((jnp.float32(0), 6.0), (jnp.ones(1), 8.0)) * 3:
        for _ in range(3):
            assert jitted(model, x) == expected


def test_a_function_that_reads_more_is_not_traced_at_each_call(unchecked):
    """After many calls that read less, the shortcut of which knows too little."""
    model, traces = net(3.0), []

    def f(m, x):
        traces.append(x.ndim)
        return m[0].sum() + (m[1].sum() if x.ndim else 0.0)

    jitted = nnx.jit(f)
    for _ in range(100):
        jitted(model, jnp.float32(0))
    jitted(model, jnp.ones(1)), jitted(model, jnp.float32(0))
    before = len(traces)
    for x in (jnp.ones(1), jnp.float32(0)) * 4:
        jitted(model, x)
    assert len(traces) == before


def test_a_value_that_cannot_be_traced_is_named_in_a_trace():
    """There each call is packed, and finds the function that was compiled for values that can be traced."""
    model, jitted = net(), nnx.jit(lambda m: m[0].sum())
    add = jax.jit(lambda x: jitted(model) + x)
    add(1.0)
    model[0].value = "text"
    with pytest.raises(errors.ArgumentError, match=r"The Variable args\[0\]\[0\] holds a str"):
        add(1)


def test_a_static_array_is_one_error():
    """And not one while another is handled."""
    f = nnx.jit(lambda x, y: x, static_argnums=1)
    for _ in range(2):
        with pytest.raises(errors.StaticValueError, match=r"float32\[2\] at args\[1\]") as caught:
            f(jnp.ones(2), jnp.ones(2))
        assert caught.value.__context__ is None


def test_an_error_of_the_user_is_one_error(unchecked):
    """Also where it comes from a call that a shortcut does not serve, since a number is an array now."""

    @nnx.jit
    def of_numbers(model, x):
        if x.ndim:
            raise ValueError("not a number")
        return model[0].sum() * x

    model = net()
    for _ in range(3):
        of_numbers(model, 1.0)
    with pytest.raises(ValueError, match="not a number") as caught:
        of_numbers(model, jnp.ones(2))
    assert caught.value.__context__ is None


class Buffered(nnx.Module):
    """Two Variables, an array in an attribute, and two in a list."""

    def __init__(self, value=1.0):
        self.kernel, self.seen = nnx.Param(jnp.full(2, value)), nnx.BatchStat(jnp.zeros(2))
        self.scale = jnp.full(2, 10 * value)
        self.table = nnx.List([jnp.full(2, 100 * value), jnp.ones(2)])

    def total(self):
        return (self.kernel.value * self.scale + self.table[0] * self.table[1]).sum()


def use_buffers(*args):
    total = sum((k + 1) * (x.total() if isinstance(x, Buffered) else value_of(x)) for k, x in enumerate(args))
    for x in args:
        if isinstance(x, Buffered):
            x.seen.value = x.seen.value + total
    return total


BUFFER_EDITS = {
    "nothing": lambda x: None,
    "array replaced": lambda x: setattr(x, "scale", x.scale + 1),
    "through vars": lambda x: vars(x).update(scale=x.scale - 1),
    "of another dtype": lambda x: setattr(x, "scale", jnp.ones(2, jnp.int32)),
    "of another shape": lambda x: setattr(x, "scale", jnp.sum(x.scale)),
    "by NumPy's": lambda x: setattr(x, "scale", np.full(2, 7.0, np.float32)),
    "by a number": lambda x: setattr(x, "scale", 3.0),
    "by a Variable's value": lambda x: setattr(x, "scale", x.kernel.value),
    "item of a list": lambda x: x.table.__setitem__(0, x.table[0] + 1),
    "list": lambda x: setattr(x, "table", nnx.List([jnp.full(2, 5.0), jnp.full(2, 6.0)])),
    "value of a Variable": lambda x: setattr(x.kernel, "value", x.kernel.value + 1),
}


@pytest.mark.parametrize("donated", [False, True])
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(sorted(BUFFER_EDITS)), st.booleans()), max_size=12))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arrays_in_attributes_are_read_anew_at_each_call(unchecked, donated, steps):
    """With one object, with two in both orders, and beside one without arrays; what is not the same is compared."""
    jitted = nnx.jit(use_buffers, donate_argnums=(0, 1) if donated else ())
    pairs = [[Buffered(), Buffered(2.0), net(3.0)] for _ in range(2)]
    ours, plain = pairs
    for first, edit, alone in [(0, "nothing", True), *steps, (1, "nothing", False)]:
        for edited, *_ in pairs:
            BUFFER_EDITS[edit](edited)
        chosen = [(x,) if alone else ((x, y), (y, x, 2.0), (n, x))[first] for x, y, n in pairs]
        for _ in range(2):
            assert jnp.array_equal(jitted(*chosen[0]), use_buffers(*chosen[1]))
        for mine, theirs in zip(ours[:2], plain[:2], strict=True):
            assert jax.tree.all(jax.tree.map(jnp.array_equal, nnx.state(mine), nnx.state(theirs)))


def test_a_model_with_an_array_has_a_shortcut(unchecked):
    """It takes no more calls than one without."""
    model = Buffered()
    jitted = nnx.jit(lambda m, x: m.kernel * m.scale * x)
    for _ in range(3):
        jitted(model, 2.0)
    (part,) = table_of(model).shortcuts.values()
    assert len(part.arrays) == 3
    assert all(container is not model for container, _ in part.arrays)
    gone = weakref.ref(model)
    del model, part
    assert gone() is None


def test_an_array_that_was_deleted_with_its_attribute(unchecked):
    model = Buffered()
    jitted = nnx.jit(lambda m: m.kernel * getattr(m, "scale", 1.0))
    for _ in range(3):
        assert jitted(model).tolist() == [10.0, 10.0]
    del model.scale
    assert jitted(model).tolist() == [1.0, 1.0]


# --- Variables that are arguments by themselves ---------------------------------------------------------------------


class Other(nnx.Param):
    """Another type of Variable."""


def step(args):
    """What depends on the types, the metadata, the sharing and the order of all Variables, and writes to each."""
    for k, x in enumerate(args):
        for v in x if isinstance(x, nnx.List | tuple) else (x,):
            if isinstance(v, nnx.Variable):
                metadata = v.get_metadata()
                v.value = v * 2 + k + isinstance(v, Other) + metadata.get("more", 0) + len(metadata.get("names", ()))


KINDS = [
    lambda x: nnx.Param(x),
    lambda x: Other(x),
    lambda x: nnx.Param(x, more=5),
    lambda x: nnx.Param(x, names=["a", "b"]),  # which can be edited in place
]


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_variables_in_any_places_are_what_they_are_now(unchecked, data):
    """New ones at each call, or the same, also twice, and in a Module as well: as in eager code."""
    jitted = nnx.jit(step)
    count = data.draw(st.integers(3, 6))
    pool = [data.draw(st.sampled_from(KINDS))(jnp.float32(k)) for k in range(count)]
    for _ in range(5):
        if data.draw(st.integers(0, 3)) == 0:
            pool = [type(v)(v.value, **v.get_metadata()) for v in pool]
        elif data.draw(st.booleans()):
            pool[0].set_metadata(more=data.draw(st.integers(0, 2)))
        numbers = data.draw(st.lists(st.integers(-1, count), min_size=3, max_size=8))
        nodes = nnx.List([pool[0], nnx.Param(jnp.float32(9.0))]), nnx.List([pool[1], pool[0]])
        args = [jnp.float32(1.0) if n < 0 else pool[n] if n < count else nodes[len(numbers) % 2] for n in numbers]
        everything = [*pool, *nodes[0], *nodes[1]]
        before = [v.value for v in everything]
        step(args)
        expected = [float(v.value) for v in everything]
        for v, value in zip(everything, before, strict=True):
            v.value = value
        jitted(args)
        assert [float(v.value) for v in everything] == expected
        assert all(isinstance(v.value, jax.Array) for v in everything)


def test_names_edited_in_the_metadata_of_one_variable_of_many(unchecked):
    names = ["a"]
    variables = [nnx.Param(1.0, names=names), nnx.Param(1.0), Other(1.0)]
    jitted = nnx.jit(lambda vs: sum(len(v.get_metadata().get("names", ())) for v in vs))
    for k in range(1, 5):
        assert jitted(variables) == k
        names.append("b")


def gradients(size):
    return nnx.state([nnx.Param(jnp.ones(2), **({"layer": k} if k % 3 == 0 else {})) for k in range(size)])


def test_a_function_of_new_states_is_compiled_once(unchecked):
    """A step that is given the gradients of another, and one that returns the State that it is given next."""
    traces, model = [], nnx.List([nnx.Param(jnp.ones(2))])

    @nnx.jit
    def apply(model, gradients):
        traces.append(1)
        for g in jax.tree.leaves(gradients):
            model[0] += g

    @nnx.jit
    def double(state):
        traces.append(1)
        return jax.tree.map(lambda x: 2 * x, state)

    state = gradients(5)
    for k in range(4):
        apply(model, gradients(5))
        state = double(state)
        assert model[0].value.tolist() == [1.0 + 5 * (k + 1)] * 2
        assert jax.tree.leaves(state)[3].tolist() == [2.0 ** (k + 1)] * 2
        if k == 0:
            traces.clear()
    assert not traces
    assert not table_of(model).shortcuts


class Made(nnx.Module):
    """Has what a new object can have: Variables, one of them twice, an array, a list that can be edited, a part."""

    def __init__(self, x, part=None):
        self.kernel = nnx.Param(x, names=["a"])
        self.again, self.array, self.sizes, self.part = self.kernel, x + 1, [1, 2], part


MAKERS = {
    "gradients": lambda m, x: nnx.grad(lambda m: (m[0] * m[1] * x).sum())(m),
    "state": lambda m, x: (nnx.state(m), x),
    "module": lambda m, x: Made(m[0] * x),
    "variable": lambda m, x: {"v": nnx.Param(x), "x": x},
    "twice": lambda m, x: (made := Made(x), [made, made.kernel]),
    "copy": lambda m, x: nnx.clone(m),
    "ref": lambda m, x: nnx.Variable(m[0] * x, ref=True),
    "empty": lambda m, x: (nnx.List([]), nnx.State({}), x),
    "a live part": lambda m, x: Made(x, part=m[0]),
    "a live part besides": lambda m, x: (Made(x), m[0]),
    "attached": lambda m, x: m.append(nnx.Param(x)),
}


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_new_objects_in_an_output(unchecked, make, changes, donated):
    """They are new ones at each call, equal to those of an eager call, and share what those share."""

    def step(m, x):
        out = make(m, x)
        if changes:
            m[1] += x
        return out

    jitted, model = nnx.jit(step, donate_argnums=0 if donated else None), net(2.0)
    for k in range(6):
        x, twin = jnp.arange(2.0) + k, nnx.clone(model)
        expected, out = step(twin, x), jitted(model, x)
        same = nnx.split((expected, twin))[0] == nnx.split((out, model))[0]
        assert same, (nnx.split((expected, twin))[0], nnx.split((out, model))[0])
        for a, b in zip(*map(jax.tree.leaves, [(expected, twin), (out, model)]), strict=True):
            np.testing.assert_array_equal(a[...], b[...])  # perhaps of a Ref
        for _, node in nnx.iter_graph(out):  # none of it may be in the next output
            if isinstance(node, Made):
                node.sizes.append(3)
                node.kernel.value, node.array = jnp.zeros(3), None


def test_new_objects_in_an_output_cost_no_calls(unchecked):
    """A step returns gradients, a State or a model of any size by as many calls."""
    for make in (MAKERS["gradients"], MAKERS["copy"], lambda m, x: nnx.state(m)):
        counts = []
        for size in (2, 60):
            model = nnx.List([nnx.Param(jnp.ones(2)) for _ in range(size)])
            step = nnx.jit(lambda m, x: (make(m, x), x))  # noqa: B023
            for _ in range(9):
                step(model, 2.0)
            assert table_of(model).shortcuts
            counts.append(count_calls(lambda: step(model, 2.0)))  # noqa: B023
        assert counts[0] == counts[1] < 40


def test_a_class_that_refuses_what_is_in_an_output(unchecked):
    """It is an error of the call, which writes nothing then; donated values, which are gone, are written."""
    refuses = []

    @jax.tree_util.register_pytree_node_class
    class Box:
        def __init__(self, x):
            self.x = x

        def tree_flatten(self):
            return (self.x,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            if refuses:
                raise RuntimeError("refused")
            return cls(*children)

    def step(m, x):
        m[1] += x
        return Box(nnx.Param(x))

    for donated in (None, 0):
        model, jitted = net(), nnx.jit(step, donate_argnums=donated)
        for _ in range(5):
            jitted(model, 1.0)
        refuses.append(1)
        with pytest.raises(RuntimeError, match="refused"):
            jitted(model, 1.0)
        refuses.clear()
        assert model[1].value.tolist() == [6.0 if donated is None else 7.0] * 2
        assert jitted(model, 1.0).x.value == 1


def test_a_state_that_is_new_at_each_call_costs_a_few_calls_per_variable(unchecked):
    """Each Variable had a table of its own once, which took some seventy."""
    counts = []
    for size in (20, 120):
        read = nnx.jit(lambda state: sum(x.sum() for x in jax.tree.leaves(state)))
        *earlier, new = [nnx.state([nnx.Param(jnp.ones(2)) for _ in range(size)]) for _ in range(6)]
        for state in earlier:
            read(state)
        new[0]  # a State makes its Variables when it is first looked into
        counts.append(count_calls(lambda: read(new)))  # noqa: B023
    assert counts[1] - counts[0] <= 2 * 100


def test_a_state_that_comes_again_has_a_shortcut(unchecked):
    """Its Variables are given tables; new ones in their place have none."""
    read = nnx.jit(lambda vs: sum(v[0] for v in vs))
    variables = [nnx.Param(jnp.ones(2)) for _ in range(3)]
    for _ in range(6):
        assert read(variables) == 3
    assert all(v._nnx_table.shortcuts for v in variables)
    new = [nnx.Param(jnp.zeros(2)) for _ in range(3)]
    assert read(new) == 0
    assert not any(v._nnx_table for v in new)
    assert read([*variables[:2], new[0]]) == 2


def test_a_call_without_objects_costs_a_few_functions(unchecked):
    """Also in containers, by keyword and with static arguments."""
    x = jnp.ones(2)
    for jitted, call in (
        (nnx.jit(lambda x: 2 * x), lambda f: f(x)),
        (nnx.jit(lambda xs, *, y: {"sum": xs["a"] + y}), lambda f: f({"a": x, "b": (x, x)}, y=2.0)),
        (nnx.jit(lambda x: (x, [x])), lambda f: f(x)),
    ):
        for _ in range(3):
            call(jitted)
        assert count_calls(lambda: call(jitted)) <= 15  # noqa: B023


def test_calls_with_and_without_objects_take_turns(unchecked):
    """Of one signature; also with an output, or new objects, that depend on the shape."""

    def f(x):
        if isinstance(x, nnx.List):
            x[0] += 1
            return x[0].value
        if x.ndim == 0:
            return {"scalar": x}
        return nnx.Param(x) if x.shape == (3,) else (x, x + 1)

    jitted, model = nnx.jit(f), net()
    given = [jnp.float32(1), jnp.ones(2), model, jnp.ones(3), np.ones(2, np.float32), np.float32(2)]
    for x in [*given, *given[::-1], *given * 3]:
        out = jitted(x)
        if x is model:
            assert (out == x[0].value).all()
        elif np.ndim(x) == 0:
            assert out == {"scalar": x}
        elif x.shape == (3,):
            assert isinstance(out, nnx.Param)
        else:
            assert (np.array(out) == [x, x + 1]).all()
    assert model[0][0] == 1 + 5
    with pytest.raises(nnx.errors.ArgumentError, match="text"):
        jitted("text")
    assert jitted(jnp.zeros(())) == {"scalar": 0}


def test_a_returned_model_is_the_one_that_was_passed(unchecked):
    """Or a part of it, also if another part has taken its place, or another model comes."""
    jitted = nnx.jit(lambda m, other, x: ({"model": m, "part": m[0]}, other, m[0][0] * x, m[1].value))
    model, other = nnx.List([net(1.0), nnx.Param(jnp.ones(2))]), net()
    for k in range(12):
        if k % 4 == 2:
            model[0] = net(float(k))
        if k % 6 == 5:
            model, other = nnx.clone(model), net()
        out, second, product, _ = jitted(model, other, 2.0)
        assert out["model"] is model
        assert out["part"] is model[0]
        assert second is other
        assert product.tolist() == [2 * float(model[0][0][0])] * 2
    assert table_of(model).shortcuts


def test_what_a_returned_model_costs_does_not_depend_on_its_size(unchecked):
    counts = []
    for size in (5, 100):
        model = nnx.List([net() for _ in range(size)])
        step = nnx.jit(lambda m: (m, m[0][0].sum()))
        for _ in range(9):
            step(model)
        counts.append(count_calls(lambda: step(model)))  # noqa: B023
    assert counts[0] == counts[1] < 20


def test_a_returned_model_is_freed(unchecked):
    model, step = net(), nnx.jit(lambda m: (m, m[0].sum()))
    for _ in range(5):
        step(model)
    gone = weakref.ref(model)
    del model
    assert gone() is None


@pytest.mark.parametrize("values", [(True, False), (2, 3)], ids=["bool", "int"])
def test_what_a_captured_constant_costs_does_not_depend_on_the_size_of_its_model(unchecked, values):
    """Nor does a call after it has changed, to a value that was met before."""
    counts = []
    for size in (5, 100):
        model = nnx.Dict(times=nnx.Variable(values[0]), layers=nnx.List([net() for _ in range(size)]))
        step = nnx.jit(lambda x: sum(x for _ in range(model.times.value)))  # noqa: B023
        for _ in range(4):
            for model.times.value in values:
                assert step(2.0) == 2 * model.times.value
        model.times.value = values[0]
        counts.append(count_calls(lambda: step(2.0)))  # noqa: B023
    assert counts[0] == counts[1]
