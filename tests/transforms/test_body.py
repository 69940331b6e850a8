"""The traced bodies of control flow: what is read off them, and when their programs are made again."""

import functools
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import errors
from nnxlib.core.graph import commit, pack
from nnxlib.transforms.body import structural_rows, trace_body
from nnxlib.transforms.body_checks import BodyError, check_types, retyped, structural_changes
from nnxlib.transforms.leaf_checks import type_of
from nnxlib.transforms.lift import Arguments
from nnxlib.transforms.program import Program, program_of, weakly
from tests.properties.compare import assert_freed

from .models import Layer, Pair, X, counted

NOTHING = pack(Arguments((), {})).layout


def traced(f, *args):
    packed = pack(Arguments(args, {}))
    return packed, trace_body(f, packed.layout, packed.leaves)


def test_a_body_runs_the_user_s_function_once():
    f = counted(lambda m, x: m(x))
    packed, body = traced(f, Layer(), X)
    for _ in range(3):
        out = body.run(packed.leaves)
    assert f.count == 1
    np.testing.assert_allclose(out[-1], jnp.sin(2 * X), rtol=1e-6)


def test_a_body_tells_whose_leaves_it_returns_with_paths_and_types():
    _, body = traced(lambda m, x: m(x), Layer(), X)
    assert body.owners == ((1, 0), (-1, 0))  # row 0 is the Layer, row 1 its first attribute by name
    assert body.leaf_paths == (("args", 0, "calls"), ("<output>",))
    assert [(t.shape, t.dtype) for t in body.types] == [((), jnp.int32), ((3,), jnp.float32)]


def test_a_body_can_be_traced_on_shapes_and_leaves_live_objects_alone():
    m = Layer()
    packed = pack(Arguments((m, X), {}))
    value = m.calls.value
    body = trace_body(lambda m, x: m(x), packed.layout, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in packed.leaves])
    assert body.types[-1].shape == (3,)
    assert m.calls.value is value


def test_positions_count_leaves_in_the_order_of_the_layout():
    m = Pair()
    m.array = X
    packed = pack(Arguments((m, X), {}))
    for owner, k in packed.layout.owner_positions.items():
        row, _ = owner
        expected = packed.objects[row].value if k < len(packed.layout.variables) else X
        assert packed.leaves[k] is expected


def test_the_delta_of_a_body_writes_what_it_touched_and_nothing_else():
    m = Pair()
    m.array = X
    packed, body = traced(lambda m: setattr(m, "array", m.array + 1), m)
    weights = m.a.w.value
    commit(packed.layout, body.delta, body.run(packed.leaves), packed.objects)
    np.testing.assert_array_equal(m.array, X + 1)
    assert m.a.w.value is weights


def change_value(m):
    m.w.value = m.w + 1


def change_array(m):
    m.array = m.array + 1


def attach(m):
    m.new = nnx.Param(X)


def delete(m):
    del m.calls


def change_metadata(m):
    m.w.set_metadata(frozen=True)


CHANGES = {
    change_value: [],
    change_array: [],
    attach: [(("args", 0, "new"), True)],
    delete: [(("args", 0, "calls"), False)],
    change_metadata: [(("args", 0, "w"), False)],
}


@pytest.mark.parametrize("f", CHANGES, ids=lambda f: f.__name__)
def test_changes_of_structure_are_told_from_changes_of_value(f):
    m = Layer()
    m.array = X
    packed, body = traced(f, m)
    assert [(change.path, change.added) for change in structural_changes(packed.layout, body)] == CHANGES[f]
    assert bool(structural_rows(packed.layout, body)) == bool(CHANGES[f])


def test_types_are_compared_without_weakness_and_errors_name_paths():
    values, types = [1.0, X], [jax.ShapeDtypeStruct((), jnp.float32), type_of(X)]
    check_types(values, types, [("a",), ("b",)], "body")
    with pytest.raises(BodyError, match=r"The body must keep(.|\n)*b: float32\[3\] became float32\[\]"):
        check_types(values, types[:1] * 2, [("a",), ("b",)], "body")
    check_types([jax.random.key(0)], [type_of(jax.random.key(1))], [("k",)], "body")
    check_types([{"a": 1.0}], [{"a": types[0]}], [("d",)], "body")
    with pytest.raises(BodyError, match=r"d: \{'a': float32\[\]\} became \{'b'"):
        check_types([{"a": 1.0}], [{"b": types[0]}], [("d",)], "body")


def test_what_jax_cannot_return_is_an_error_by_path():
    def set_name(layer):
        layer.w.value = "name"

    m = Layer()
    before = m.w.value
    for run in (
        lambda: nnx.cond(True, set_name, set_name, m),
        lambda: nnx.fori_loop(0, 2, lambda i, m: set_name(m), m),
        lambda: nnx.scan(lambda m, x: (set_name(m), m)[1], in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(m, X),
    ):
        with pytest.raises(errors.OutputError, match=r"args\[0\]\.w is set to a str \('name'\)"):
            run()
        assert m.w.value is before
    with pytest.raises(errors.OutputError, match=r"<output>\['a'\] is set to a str|<output>\.a is set to a str"):
        nnx.switch(0, [lambda m: {"a": "b"}], m)


def test_only_weakly_typed_numbers_are_retyped():
    integer, real = jnp.int32(0), jax.ShapeDtypeStruct((), jnp.float32)
    assert retyped([0, integer], [0, 1], [type_of(integer)] * 2) is None
    assert retyped([integer], [0], [real]) is None
    assert retyped([0.0], [0], [real]) is None
    found = retyped([X, 0], [1], [real])
    assert found is not None
    assert found[0] is X
    assert found[1].dtype == jnp.float32
    half = jax.ShapeDtypeStruct((), jnp.bfloat16)
    for weak in (0, 0.0, jnp.asarray(0.0), jnp.full((), 0.0)):  # a weak float32 yields to bfloat16
        assert retyped([weak], [0], [half])[0].dtype == jnp.bfloat16
    assert retyped([jnp.float32(0)], [0], [half]) is None
    assert retyped([0.0], [0], [integer]) is None


def test_a_program_is_kept_with_its_function_by_key_and_goes_with_it():
    def use():
        def function(x):
            return x

        weak = weakly(function)
        made = counted(lambda: Program(lambda leaves: weak(leaves)))
        first = program_of((weakly(function),), NOTHING, ("key",), made)
        assert program_of((weakly(function),), NOTHING, ("key",), made) is first
        assert program_of((weakly(function),), NOTHING, ("other",), made) is not first
        assert made.count == 2
        return weakref.ref(function)

    assert_freed(use)


@pytest.mark.parametrize("place", [0, 1])
def test_a_program_goes_with_any_of_its_functions(place):
    """One branch may be defined once, and another one, with a model in its closure, at each call."""
    gc.disable()
    try:
        for _ in range(3):
            model = Layer()
            branches = [lambda x, model=model: x * model.w, branch_defined_once]
            nnx.switch(0, [branches[place], branches[1 - place]], X)
            reference = weakref.ref(model)
            del model, branches
            assert reference() is None
        assert vars(branch_defined_once).get("_nnx_programs", {}) == {}
    finally:
        gc.enable()


def branch_defined_once(x):
    return x


def test_programs_do_not_follow_a_function_into_its_wrapper():
    def function(x):
        return x

    first = program_of((weakly(function),), NOTHING, ("key",), lambda: Program(function))
    wrapper = functools.wraps(function)(lambda x: x)
    assert program_of((weakly(wrapper),), NOTHING, ("key",), lambda: Program(wrapper)) is not first


def test_the_number_of_programs_is_bounded():
    def function(x):
        return x

    program = Program(function)
    for key in range(1000):
        program_of((weakly(function),), NOTHING, (key,), lambda: program)
    assert len(vars(function)["_nnx_programs"]) < 100


def test_a_callable_that_is_no_plain_function_is_made_into_a_program_each_time():
    """Its attributes may change, and it need not be hashable."""

    class Scale:
        __hash__ = None
        by = 2

        def __call__(self, x):
            return x * self.by

    scale = Scale()
    assert nnx.cond(True, scale, lambda x: x, 1.0) == 2
    scale.by = 5
    assert nnx.cond(True, scale, lambda x: x, 1.0) == 5
    assert nnx.cond(False, lambda x: x, scale, 1.0) == 5


def test_programs_are_not_pickled():
    def function(x):
        return x

    program_of((weakly(function),), NOTHING, ("key",), lambda: Program(function))
    assert pickle.loads(pickle.dumps(vars(function)))["_nnx_programs"] == {}


def test_a_program_is_compiled_for_top_level_calls_and_inlined_inside_a_trace():
    """From the one trace that both share."""
    f = counted(lambda leaves: [leaves[0] + 1])
    program = Program(f)
    for _ in range(3):
        assert program([jnp.array(1)])[0] == 2
    jaxpr = jax.make_jaxpr(lambda x: program([x]))(jnp.array(1))
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["add"]
    assert f.count == 1


def test_a_program_is_prepared_for_being_traced_once(monkeypatch):
    """To ask JAX for another jitted function at each call took half of the time of `nnx.remat` in a trace."""
    make_jaxpr, program = jax.make_jaxpr, Program(lambda leaves: [leaves[0] + 1], compiled=False)
    for name in ("jit", "make_jaxpr"):
        monkeypatch.setattr(jax, name, None)
    jaxpr = make_jaxpr(lambda x: program(program([x])))(1.0)
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["add", "add"]


def test_a_program_that_captures_an_array_of_the_trace_around_it_is_run_once_for_it():
    """JAX gives the array to the traced program as one more input, whose value only another trace tells."""

    def function(x, by):
        multiply = counted(lambda leaves: [leaves[0] * by])
        program = Program(multiply, compiled=False)
        x = program([x])[0]
        assert multiply.count == 1
        return program([x])[0] + program([x])[0]

    jaxpr = jax.make_jaxpr(function)(1.0, 2.0)
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["mul", "mul", "mul", "add"]
    assert jax.jit(function)(3.0, 2.0) == 24


def test_a_program_that_uses_a_live_object_is_made_again_at_each_call():
    v = nnx.Variable(jnp.array(1))
    program = Program(lambda leaves: [leaves[0] + v.value])
    assert program([jnp.array(1)])[0] == 2
    v.value = jnp.array(5)
    assert program([jnp.array(1)])[0] == 6
    assert program.captures


def test_without_jit_control_flow_still_works():
    m = Layer()
    with jax.disable_jit():
        nnx.fori_loop(0, 2, lambda i, m: (m(X), m)[1], m)
        nnx.cond(True, lambda m: m(X), lambda m: X, m)
        nnx.scan(lambda m, x: m(x), in_axes=(nnx.StateAxes({...: nnx.Carry}), 0), out_axes=0)(m, jnp.stack([X, X]))
    assert m.calls.value == 5


def test_without_jit_bodies_see_values():
    """As a debugger wants it: after the trace that finds out what a body does, each iteration runs on values."""
    seen = []

    def step(x, *_):
        if not isinstance(x, jax.core.Tracer):
            seen.append(float(x))
        return x + 1

    def stacked(carry, x):
        return step(carry), x

    with jax.disable_jit():
        nnx.fori_loop(0, 2, lambda i, x: step(x), jnp.array(0.0))
        nnx.while_loop(lambda x: step(x) < 12, step, jnp.array(10.0))
        nnx.cond(True, step, lambda x: x, jnp.array(20.0))
        nnx.scan(stacked, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(jnp.array(30.0), jnp.arange(2))
    assert seen == [0, 1, 10, 10, 11, 20, 30, 31]


@pytest.mark.parametrize("loop", ["fori_loop", "while_loop", "scan"])
def test_without_jit_an_iteration_may_leave_what_another_changes(loop):
    """A body returns all that its trace has changed: here, what either branch does."""

    def even(m, i):
        m["even"].value += 1
        m["array"] = m["array"] * 2

    def odd(m, i):
        m["odd"].value += i

    def body(i, m):
        nnx.cond(i % 2 == 0, even, odd, m, i)
        return m

    loops = {
        "fori_loop": lambda m: nnx.fori_loop(0, 4, body, m),
        "while_loop": lambda m: nnx.while_loop(lambda c: c[1] < 4, lambda c: (body(c[1], c[0]), c[1] + 1), (m, 0)),
        "scan": lambda m: nnx.scan(lambda m, i: body(i, m), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            m, jnp.arange(4)
        ),
    }
    m = nnx.Dict(even=nnx.Variable(jnp.array(0)), odd=nnx.Variable(jnp.array(0)), array=jnp.array(1.0))
    with jax.disable_jit():
        loops[loop](m)
    assert (m["even"].value, m["odd"].value, m["array"]) == (2, 4, 4)


def test_without_jit_a_body_that_fails_changes_nothing():
    m = nnx.Dict(count=nnx.Variable(jnp.array(0)))

    def body(i, m):
        m.count.value += 1
        if not isinstance(m.count.value, jax.core.Tracer) and m.count.value > 1:
            raise ValueError("too many")
        return m

    with jax.disable_jit(), pytest.raises(ValueError, match="too many"):
        nnx.fori_loop(0, 3, body, m)
    assert m.count.value == 0
