"""Variables as arrays: operators, indices, and the functions of JAX and NumPy, on either side."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx

ARITHMETIC = "add sub mul truediv floordiv mod pow".split()
INTEGER = "and_ or_ xor lshift rshift".split()
COMPARISONS = "lt le eq ne gt ge".split()
OTHERS = {
    "Python number": lambda x: x.item(0),
    "NumPy array": np.asarray,
    "NumPy scalar": lambda x: np.asarray(x)[0],
    "JAX array": jnp.asarray,
    "Variable": lambda x: nnx.BatchStat(jnp.asarray(x)),
}


def assert_same_array(a, b):
    assert isinstance(a, jax.Array)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


OPERANDS = [(name, kind) for name in [*ARITHMETIC, *INTEGER, *COMPARISONS, "divmod"] for kind in OTHERS]
OPERANDS += [("matmul", kind) for kind in ("NumPy array", "JAX array", "Variable")]


@pytest.mark.parametrize(("name", "kind"), OPERANDS)
def test_operators_with_anything_on_either_side(name, kind):
    """`v op x` and `x op v` are what JAX computes for the value of `v`, with the same type of result."""
    op = divmod if name == "divmod" else getattr(operator, name)
    dtype = jnp.int32 if name in INTEGER else jnp.float32
    value, x = jnp.array([3, 5, 2], dtype), OTHERS[kind](np.array([2, 1, 3], dtype))
    plain = x.value if isinstance(x, nnx.Variable) else x
    for got, expected in [(op(nnx.Param(value), x), op(value, plain)), (op(x, nnx.Param(value)), op(plain, value))]:
        for a, b in zip(got, expected) if name == "divmod" else [(got, expected)]:
            assert_same_array(a, b)


@pytest.mark.parametrize("name", [*ARITHMETIC, *INTEGER, "matmul"])
def test_in_place_operators_write_into_the_variable(name):
    """`v op= x` keeps the Variable and gives it the new value."""
    op, plain = getattr(operator, f"i{name.rstrip('_')}"), getattr(operator, name)
    value = jnp.array([3, 5], jnp.int32 if name in INTEGER else jnp.float32)
    v = nnx.Param(value)
    assert op(v, nnx.Param(value)) is v
    np.testing.assert_array_equal(v.value, plain(value, value))


def test_in_place_operator_on_an_attribute_keeps_the_variable():
    """`module.w += 1` leaves the same Variable in the attribute."""
    m = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    w = m.w
    m.w += 1
    assert m.w is w
    assert w.value.tolist() == [2, 2]


def test_numpy_array_in_place_takes_a_variable():
    """`ndarray += variable` gives the sum (a JAX array, as `ndarray += jax_array` does)."""
    x = np.ones(2, np.float32)
    x += nnx.Param(jnp.ones(2))
    assert_same_array(x, jnp.full(2, 2.0))


@pytest.mark.parametrize("op", [operator.neg, operator.pos, abs, operator.invert, round])
def test_unary_operators(op):
    """`-v`, `+v`, `abs(v)`, `~v` and `round(v)` are those of the value."""
    value = jnp.array([-3, 5], jnp.int32)
    assert_same_array(op(nnx.Param(value)), op(value))


def test_conversions_to_python_numbers():
    """bool, int, float, complex, index, round and the functions of math read the value."""
    v = nnx.Param(jnp.array(2.75))
    assert (bool(v), int(v), float(v), complex(v)) == (True, 2, 2.75, 2.75 + 0j)
    assert round(v, 1).item() == v.__round__(ndigits=1).item() == round(v.value, 1).item()
    assert (round(v).dtype, round(v).item()) == (jnp.float32, 3.0)  # no integer, whose derivative would be 0
    assert (math.floor(v), math.sqrt(nnx.Param(jnp.array(4.0)))) == (2, 2.0)
    assert (math.trunc(nnx.Param(-2.75)), math.trunc(nnx.Param(np.float64(2.75)))) == (-2, 2)
    assert [10, 20, 30][nnx.Param(jnp.array(1))] == 20
    assert not nnx.Param(jnp.array(0.0))


def test_an_array_with_axes_is_true_if_it_has_a_length():
    """So `if layer.bias:` asks whether there is one; a Variable of a scalar is what the scalar is, also in a trace."""
    assert [bool(nnx.Param(x)) for x in (jnp.zeros(1), jnp.zeros((2, 3)), jnp.zeros((0, 2)), [], jnp.float32(0))] == [
        True,
        True,
        False,
        False,
        False,
    ]

    @nnx.jit
    def asked(layer):
        return 1 if layer.bias else 0

    assert asked(nnx.Linear(2, 1, rngs=nnx.Rngs(0))) == 1
    assert asked(nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))) == 0


def test_len_iteration_and_membership():
    """len, iter, unpacking and `in` see the value."""
    v = nnx.Param(jnp.array([1.0, 2.0]))
    a, b = v
    assert (len(v), [x.item() for x in v], a.item(), b.item(), 2.0 in v, 3.0 in v) == (2, [1, 2], 1, 2, True, False)
    with pytest.raises(TypeError):
        len(nnx.Param(jnp.array(1.0)))


def test_format():
    """A format specification is applied to the value; without one the Variable is written as itself."""
    v = nnx.Param(jnp.array(1.5))
    assert f"{v:.3f}" == "1.500"
    assert f"{v}" == repr(v) == str(v)


def test_indexing():
    """`v[i]`, slices, new axes and boolean masks index the value; `v[...]` is the value itself."""
    value = jnp.arange(6.0).reshape(2, 3)
    v = nnx.Param(value)
    assert v[...] is value
    assert v[1, 2].item() == 5
    assert v[:, None].shape == (2, 1, 3)
    assert v[jnp.array([True, False])].shape == (1, 3)
    assert v[nnx.Param(jnp.array(1))].tolist() == [3, 4, 5]


def test_item_assignment():
    """`v[i] = x`, `v[i] += x` and `v[i] = variable` replace the value by one with that entry changed."""
    old = jnp.zeros(3)
    v = nnx.Param(old)
    v[0] = 1
    v[1] += 2
    v[2] = nnx.Param(jnp.array(5.0))
    assert (v.value.tolist(), old.tolist()) == ([1, 2, 5], [0, 0, 0])


def test_assignment_to_all_of_it_stores_an_array_that_fits():
    """`v[...] = array` of the same shape and dtype stores that very array: no copy is made."""
    v, new = nnx.Param(jnp.zeros(3)), jnp.ones(3)
    v[...] = new
    assert v.value is new


@pytest.mark.parametrize(
    "item", [2, 2.0, [2, 2, 2], np.full(3, 2.0), np.float64(2), jnp.full(1, 2), jnp.full(3, 2.0), jnp.asarray(2.0)]
)
def test_assignment_to_all_of_it_keeps_shape_and_dtype(item):
    """`v[...] = x` broadcasts and casts as NumPy does, also for a tracer; the value stays strongly typed."""
    v = nnx.Param(jnp.zeros(3, jnp.bfloat16))

    def assign(v):
        v[...] = item

    for call in (assign, nnx.jit(assign)):
        v.value = jnp.zeros(3, jnp.bfloat16)
        call(v)
        assert (v.value.tolist(), v.dtype, v.shape, v.value.weak_type) == ([2, 2, 2], jnp.bfloat16, (3,), False)


def test_assignment_of_another_shape_is_refused():
    """`v[...] = x` with an x that does not broadcast raises, and `v.value = x` replaces."""
    v = nnx.Param(jnp.zeros(3))
    with pytest.raises(ValueError, match="broadcast"):
        v[...] = jnp.ones((2, 3))
    assert v.value.tolist() == [0, 0, 0]
    v.value = jnp.ones((2, 3))
    assert v.shape == (2, 3)


def test_assignment_to_all_of_a_value_that_is_no_array():
    """A number, None or an abstract array is replaced; a NumPy array is copied and filled."""
    for value in (1.0, None, jax.ShapeDtypeStruct((2,), "float32")):
        v = nnx.Variable(value)
        v[...] = 5.0
        assert v.value == 5.0
    array = np.zeros(2)
    v = nnx.Variable(array)
    v[...] = 1.0
    assert (v.value.tolist(), type(v.value), array.tolist()) == ([1, 1], np.ndarray, [0, 0])


def test_items_of_other_containers():
    """Values that are dicts or lists take item assignment too, on a copy: what was passed in stays as it is."""
    table = {"a": 1}
    v = nnx.Variable(table)
    v["b"] = 2
    assert (v.value, table, v["b"], "b" in v, list(v)) == ({"a": 1, "b": 2}, {"a": 1}, 2, True, ["a", "b"])


def test_delete_item_replaces_the_value():
    """`del v[key]` leaves the object that was passed in as it is, like `v[key] = x`."""
    table = {"a": 1, "b": 2}
    v = nnx.Variable(table)
    del v["a"]
    assert (v.value, table) == ({"b": 2}, {"a": 1, "b": 2})


def test_call_calls_the_value():
    """A Variable that holds a function can be called."""
    assert nnx.Variable(lambda x, y: x + y)(1, y=2) == 3


@pytest.mark.parametrize(
    "function",
    [
        jnp.sin,
        lambda v: jnp.dot(v, v),
        lambda v: jnp.where(v > 0, v, 0),
        lambda v: jnp.concatenate([v, v]),
        lambda v: jnp.stack([v, jnp.ones(3)]),
        lambda v: jnp.zeros(3).at[:].set(v),
        lambda v: jnp.ones(3)[jnp.asarray(v, jnp.int32)],
        lambda v: jnp.einsum("i,i->", v, v),
        jnp.asarray,
        jnp.zeros_like,
        jax.nn.softplus,
        jax.nn.softmax,
        lambda v: jax.device_put(v)[...],
    ],
)
def test_functions_of_jax_numpy_take_variables(function):
    """jnp and jax.nn functions give for a Variable what they give for its value."""
    value = jnp.array([0.5, -1.0, 2.0])
    assert_same_array(function(nnx.Param(value)), function(value))


@pytest.mark.parametrize(
    "function",
    [
        lambda v: jax.lax.cond(True, lambda v: v * 2, lambda v: v * 3, v),
        lambda v: jax.lax.switch(1, [lambda v: v * 2, lambda v: v * 3], v),
        lambda v: jax.lax.map(lambda x: x * 2, v),
        lambda v: jax.lax.scan(lambda c, x: (c + x, c * x), 0.0, v)[1],
        lambda v: jax.lax.fori_loop(0, 2, lambda i, x: x * 2, v[...]),
        lambda v: jax.lax.stop_gradient(v)[...],
        lambda v: jax.lax.top_k(jnp.asarray(v), 2)[0],
    ],
)
def test_functions_of_jax_lax_take_variables_as_pytrees(function):
    """Where jax.lax takes a pytree, a Variable is one: the body gets a Variable."""
    value = jnp.array([0.5, -1.0, 2.0])
    assert_same_array(function(nnx.Param(value)), function(value))


def test_primitives_of_jax_lax_say_how_to_convert():
    """JAX converts no object in a call of a bare primitive; its error, which tells to convert, is what comes out."""
    v = nnx.Param(jnp.ones(2))
    assert jax.lax.sin(v[...]).tolist() == jnp.sin(v).tolist()
    with pytest.raises((TypeError, ValueError), match="__jax_array__"):
        jax.lax.sin(v)


def test_functions_of_numpy_take_variables():
    """np.asarray gives the value, and NumPy's functions work on it."""
    v = nnx.Param(jnp.array([1.0, 2.0]))
    assert np.asarray(v).tolist() == [1, 2]
    assert np.asarray(v, dtype=np.int32).dtype == np.int32
    assert np.array(v, copy=True).flags.writeable
    assert np.sum(v) == 3
    np.testing.assert_allclose(v, [1, 2])


def test_the_array_api_standard():
    """A Variable names the namespace of its functions, and other libraries take its buffer, as those of its value."""
    v = nnx.Param(jnp.array([1.0, 2.0]))
    namespace = v.__array_namespace__()
    assert namespace is v[...].__array_namespace__()
    assert namespace.exp(v).tolist() == jnp.exp(v[...]).tolist()
    assert np.from_dlpack(v).tolist() == [1, 2]
    assert jax.dlpack.from_dlpack(v).tolist() == [1, 2]
    with pytest.raises(AttributeError):
        nnx.Param([1, 2]).__array_namespace__()


def test_operators_inside_a_trace():
    """A Variable made inside a jitted function holds a tracer and still acts as an array."""

    @jax.jit
    def f(x):
        v = nnx.Param(x)
        v += 1
        v[0] = 7
        return jnp.sum(v * v) + len(v)

    assert f(jnp.ones(2)).item() == 49 + 4 + 2
