"""The metadata of Variables: what initializers attach to a value, and how they are compared."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.metadata import HOOKS, Metadata


def test_with_metadata_attaches_to_the_variable_made_from_an_initializer():
    """The boxed value carries metadata and hooks. As in flax.nnx, its metadata win over those that the constructor is
    given, such as the `kernel_metadata` of a layer; hooks that the constructor is given win over its own."""
    hook, other = lambda v, x: x, lambda v, x: x
    init = nnx.with_metadata(lambda key, shape: jnp.zeros(shape), sharding=("a",), layer=1, on_set_value=hook)
    v = nnx.Param(init(None, (2,)), layer=2, sharding_names=("b",), rate=3)
    assert (v.shape, v.sharding_names, v.layer, v.get_metadata("on_set_value")) == ((2,), ("a",), 1, (hook,))
    assert (v.rate, nnx.Param(init(None, (2,)), on_set_value=other).get_metadata("on_set_value")) == (3, other)


def test_hooks_may_be_given_by_position():
    """In the order of flax.nnx, to `with_metadata` and `VariableMetadata`: set, get, create, add and remove an axis."""
    hooks = [lambda v, x, k=k: x + k for k in range(3)] + [lambda v, index, name: None] * 2
    given = dict(zip(["on_set_value", "on_get_value", "on_create_value", "on_add_axis", "on_remove_axis"], hooks))
    v = nnx.Param(nnx.with_metadata(lambda: 1.0, *hooks, layer="first")())
    w = nnx.Param(nnx.VariableMetadata(1.0, *hooks, {"layer": "first"}))
    for variable in (v, w):
        assert variable.get_metadata() == {**{name: (hook,) for name, hook in given.items()}, "layer": "first"}
        assert (variable.get_raw_value(), variable.value) == (3.0, 4.0)


@pytest.mark.parametrize(
    "layer", [lambda **given: nnx.Linear(2, 3, **given), lambda **given: nnx.LinearGeneral(2, 3, **given)]
)
def test_an_initializer_may_be_wrapped_several_times(layer):
    """The Variable has the metadata and hooks of all; of the outer one, where two have the same name."""
    twice, plus_one = lambda v, x: 2 * x, lambda v, x: x + 1
    init = nnx.with_metadata(nnx.initializers.ones, decay=False, group=1, on_get_value=plus_one, on_set_value=plus_one)
    init = nnx.with_metadata(nnx.with_partitioning(init, (None, "model")), group=2, on_get_value=twice)
    kernel = layer(kernel_init=init, rngs=nnx.Rngs(0)).kernel
    assert (kernel.decay, kernel.group, kernel.sharding_names) == (False, 2, (None, "model"))
    assert (kernel.get_metadata("on_set_value"), kernel.value.tolist()) == ((plus_one,), [[2.0] * 3] * 2)


def test_variable_metadata_refuses_unknown_hooks():
    """VariableMetadata(value, metadata=..., hooks) names a hook that does not exist."""
    box = nnx.VariableMetadata(1.0, metadata={"a": 1}, on_get_value=lambda v, x: x + 1)
    assert (nnx.Param(box).value, nnx.Param(box).a) == (2.0, 1)
    with pytest.raises(TypeError, match="on_nothing"):
        nnx.VariableMetadata(1.0, on_nothing=len)
    assert len(HOOKS) == 5


def test_a_mesh_is_metadata_of_an_initializer():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"), mesh=mesh)
    assert nnx.Param(init(jax.random.key(0), (2, 3))).value.sharding.spec == jax.P(None, "model")


def test_what_an_initializer_returns_with_metadata_is_written():
    assert repr(nnx.VariableMetadata(1, metadata={"tag": "a"})) == "VariableMetadata(1, {'tag': 'a'})"


def _changed_in_jit(v):
    nnx.jit(lambda v: v.set_metadata(note=["z"], axes=("a",)))(v)
    return v


def _attached_in_jit(v):
    holder = nnx.Dict(v=v)
    nnx.jit(lambda holder: holder.update(new=v.copy(holder["v"] + 1, more=1)))(holder)
    return holder["new"]


def _updated(v):
    new = nnx.Param(jnp.ones(2))
    nnx.update(new, v)
    return new


WAYS = {
    "made": lambda v: v,
    "hooks of the class": lambda v: type("Hooked", (nnx.Param,), {"on_get_value": lambda v, x: x})(1.0),
    "set": lambda v: (v.set_metadata("tag", 1), v)[1],
    "set whole": lambda v: (v.set_metadata({"tag": 1}), v)[1],
    "deleted": lambda v: (v.del_metadata("axes"), v)[1],
    "an axis named": lambda v: (v.add_axis(0, "layers"), v)[1],
    "copied with more": lambda v: v.copy(more=1),
    "copied from": lambda v: (w := nnx.Param(1.0), w.copy_from(v))[0],
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda v: pickle.loads(pickle.dumps(v)),
    "clone": nnx.clone,
    "merge": lambda v: nnx.merge(*nnx.split(v)),
    "jax.tree.map": lambda v: jax.tree.map(jnp.ones_like, v),
    "jax.jit": lambda v: jax.jit(lambda v: v)(v),
    "from_metadata": lambda v: nnx.Param.from_metadata(1.0, {"axes": ("a",)}),
    "update": _updated,
    "changed in nnx.jit": _changed_in_jit,
    "attached in nnx.jit": _attached_in_jit,
    "vmap": lambda v: nnx.vmap(lambda v, x: v.copy(x), in_axes=(None, 0))(v, jnp.ones((3, 2))),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("note", ["x", ["x"]], ids=["fixed", "mutable"])
def test_metadata_has_its_class_however_a_variable_comes_about(way, note):
    """It is also the static half of a pytree, so a plain dict in its place would not hash."""
    v = way(nnx.Param(jnp.ones(2), note=note, axes=("a",)))
    assert type(v._metadata) is Metadata
    treedef = jax.tree.structure(v)
    assert hash(treedef) == hash(jax.tree.structure(copy.deepcopy(v)))
    assert treedef == jax.tree.structure(copy.deepcopy(v))
    assert treedef != jax.tree.structure(v.copy(other=1))


def test_equal_metadata():
    """As JAX would trace the same program: by type, and arrays by value; what is edited in place is seen."""
    a, b = (Metadata(x=1, bound=np.ones(2), names=["a"]) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != Metadata(a, x=True)
    assert a != dict(a)
    b["names"].append("b")
    assert a != b
    a["names"].append("b")
    assert a == b
    assert a.const() == b.const()


def test_annotated_variables_take_jax_no_more_calls_than_others():
    """The metadata of those that a jitted function returned are compared by identity, in C++."""
    counts = []
    for metadata in ({}, {"out_sharding": (None,), "tags": frozenset({"decay"})}):
        state = nnx.state(nnx.List([nnx.Param(jnp.ones(2), **metadata) for _ in range(20)]))
        step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state))
        state = step(step(state))
        counts.append(min(count_calls(lambda: step(state)) for _ in range(3)))  # noqa: B023
    assert counts[0] == counts[1]


def test_metadata_are_frozen_once():
    """Unless an entry can be changed in place: then each time."""
    fixed, mutable = Metadata(names=(("a", "b"), "c")), Metadata(names=[("a", "b"), "c"])
    first = {id(x): count_calls(x.const) for x in (fixed, mutable)}
    assert count_calls(fixed.const) < first[id(fixed)] / 3
    assert count_calls(mutable.const) > first[id(mutable)] / 3
