"""Variables: boxes that behave like the array they hold, with metadata, hooks, names and a trace they belong to."""

import abc
import copy
import gc
import importlib
import operator
import pickle
import re
import threading
import weakref

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.errors import ArgumentError
from nnxlib.core.tables import table_of


class Scaled(nnx.Variable):
    """Hooks as methods of the class: stored as halves, read as wholes."""

    def on_create_value(self, value):
        return value / 2

    def on_set_value(self, value):
        return value / 2

    def on_get_value(self, value):
        return value * 2


class Net(nnx.Module):
    def __init__(self):
        self.layers = [nnx.Dict(w=nnx.Param(jnp.zeros(2)))]


# --- attributes ---


def test_array_attributes():
    """Attributes and methods of the value are reached through the Variable."""
    v = nnx.Param(jnp.arange(6.0).reshape(2, 3))
    assert (v.shape, v.dtype, v.ndim, v.size, v.T.shape) == ((2, 3), jnp.float32, 2, 6, (3, 2))
    assert v.sum().item() == 15
    assert v.astype(jnp.int32).dtype == jnp.int32
    assert v.at[0, 0].set(9)[0, 0].item() == 9
    assert v.mean(axis=0).tolist() == [1.5, 2.5, 3.5]
    assert v.reshape(-1).shape == (6,)


def test_unknown_attribute_names_both_places_that_were_searched():
    """The message says that neither metadata nor the value has the attribute."""
    with pytest.raises(AttributeError, match=r"Param has no metadata 'nonsense', and its value \(float32\[2\]\)"):
        nnx.Param(jnp.zeros(2)).nonsense


def test_an_attribute_error_of_a_hook_or_property_is_raised_as_it_is():
    """Python then asks `__getattr__`, which would say that the Variable has no `value`."""

    class Scaled(nnx.Param):
        @property
        def double(self):
            return 2 * self.factor

    def hook(variable, value):
        return value.nonsense

    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        nnx.Param(jnp.zeros(2), on_get_value=hook).value
    with pytest.raises(AttributeError, match="Scaled has no metadata 'factor'"):
        Scaled(jnp.zeros(2)).double
    assert Scaled(jnp.zeros(2), factor=2).double == 4


def test_a_traced_value_has_no_sharding():
    """Where flax.nnx once had the names of the axes; the message says where they are."""
    named, bare = nnx.Param(jnp.zeros((2, 3)), sharding=("a", "b")), nnx.Param(jnp.zeros((2, 3)))
    with pytest.raises(AttributeError, match="the names of its axes are `sharding_names`"):
        nnx.vmap(lambda v: v.sharding)(named)
    with pytest.raises(AttributeError, match="has no such attribute") as info:
        nnx.vmap(lambda v: v.sharding)(bare)
    assert "sharding_names" not in str(info.value)


# --- identity ---


def test_hash_is_identity():
    """Two Variables with equal values are two keys; writing does not change the hash."""
    a, b = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))
    table = {a: 1, b: 2}
    a[...] = 3
    assert (table[a], table[b], len({a, b})) == (1, 2, 2)


# --- the value ---


def test_the_three_ways_to_read_give_the_same_object():
    """`.value`, `[...]`, `get_value()`, `raw_value` and `get_raw_value()` are the object that was stored."""
    value = jnp.ones(2)
    v = nnx.Param(value)
    assert all(x is value for x in (v.value, v[...], v.get_value(), v.raw_value, v.get_raw_value()))
    assert v.get_value(index=0).item() == 1


def test_the_ways_to_write():
    """`.value =`, `set_value`, `set_raw_value` and `raw_value =` store the very object; a Variable is unwrapped."""
    v = nnx.Param(jnp.zeros(2))
    for write in (
        lambda x: setattr(v, "value", x),
        v.set_value,
        v.set_raw_value,
        lambda x: setattr(v, "raw_value", x),
        lambda x: v.set_value(nnx.BatchStat(x)),
        lambda x: setattr(v, "value", nnx.BatchStat(x)),
    ):
        new = jnp.ones(2)
        write(new)
        assert v.value is new
    v.set_value(5.0, index=1)
    assert v.value.tolist() == [1, 5]


def test_set_raw_value_unwraps_a_variable():
    """No Variable ever ends up inside of another one."""
    v, new = nnx.Param(jnp.zeros(2)), jnp.ones(2)
    v.set_raw_value(nnx.BatchStat(new))
    assert v.value is new


@pytest.mark.parametrize("value", [None, 3, "text", (1, [2]), {"a": np.ones(2)}, jax.ShapeDtypeStruct((2,), "float32")])
def test_holds_any_value(value):
    """A Variable stores any pytree as it is, and its repr shows it."""
    v = nnx.Variable(value)
    assert v.value is value
    assert repr(v).startswith("Variable(")


def test_a_variable_made_from_a_variable_takes_its_value():
    """`Param(Variable(x))` holds x."""
    value = jnp.ones(2)
    assert nnx.Param(nnx.Variable(value)).value is value


def test_generic_alias():
    """`Param[Array]` is an annotation and makes a Param when called."""
    assert type(nnx.Param[jax.Array](jnp.ones(1))) is nnx.Param


# --- metadata ---


def test_metadata_is_read_as_attributes_and_by_name():
    """Keyword arguments of the constructor are metadata."""
    v = nnx.Param(jnp.zeros(1), sharding=(None, "model"), weight_loader=len)
    assert (v.weight_loader, v.get_metadata("weight_loader")) == (len, len)
    assert v.get_metadata() == {"out_sharding": (None, "model"), "weight_loader": len}
    assert (v.get_metadata("other", 5), v.has_metadata("out_sharding"), v.has_metadata("other")) == (5, True, False)


@pytest.mark.parametrize("keyword", ["sharding", "sharding_names", "out_sharding"])
def test_names_of_axes_have_one_place(keyword):
    """Whatever keyword they came by; `v.sharding` is that of the array."""
    v = nnx.Param(jnp.zeros((2, 3)), **{keyword: ("a", None)})
    assert v.get_metadata() == {"out_sharding": ("a", None)}
    assert v.sharding_names == v.out_sharding == ("a", None)
    assert isinstance(v.sharding, jax.sharding.Sharding)
    v.set_metadata(**{keyword: (None, "b")})
    assert v.sharding_names == (None, "b")
    v.set_metadata({keyword: ("c", None)})
    assert (v.get_metadata(keyword), v.has_metadata(keyword)) == (("c", None), True)
    for made in v.replace(**{keyword: ("d",)}), nnx.Param.from_metadata(v.value, {keyword: ("d",)}):
        assert made.get_metadata() == {"out_sharding": ("d",)}
    v.del_metadata(keyword)
    assert (v.get_metadata(), v.has_metadata(keyword)) == ({}, False)
    assert nnx.Param(jnp.zeros(2)).sharding_names is None


def test_axes_come_and_go_with_their_names():
    """Names that do not fit the number of axes are left alone."""
    v = nnx.Param(jnp.zeros((2, 3)), sharding=("a",))  # as in a PartitionSpec, the rest is None
    v.add_axis(-1, "b")
    assert v.sharding_names == ("a", None, "b")
    v.add_axis(0, "c")
    assert v.sharding_names == ("a", None, "b"), "they are of the stacked value already"
    v.remove_axis(1)
    assert v.sharding_names == ("a", "b")
    v.remove_axis(1)
    assert v.sharding_names == ("a", "b")
    v.set_metadata(sharding=jax.P("a", "b"))
    v.add_axis(0)
    assert v.sharding_names == jax.P(None, "a", "b")
    with pytest.raises(KeyError, match="other"):
        v.get_metadata("other")


def test_metadata_comes_before_attributes_of_the_value():
    """Metadata named like an array attribute hides it."""
    assert nnx.Param(jnp.zeros(1), mean="text").mean == "text"


def test_metadata_is_written_by_name_by_keyword_or_as_a_whole():
    """set_metadata takes the three forms; del_metadata and del remove an entry."""
    v = nnx.Param(0.0, a=1)
    v.set_metadata("b", 2)
    v.set_metadata(c=3)
    assert v.get_metadata() == {"a": 1, "b": 2, "c": 3}
    v.del_metadata("a")
    del v.b
    assert v.get_metadata() == {"c": 3}
    v.set_metadata({"d": 4})
    assert v.get_metadata() == {"d": 4}


def test_get_metadata_is_a_copy():
    """Editing what get_metadata returned changes nothing."""
    v = nnx.Param(0.0, a=1)
    v.get_metadata()["a"] = 2
    assert v.a == 1


def test_how_the_value_is_kept_can_be_left_out_of_the_metadata():
    """So that a Variable of another value is made with the rest."""
    v = nnx.Param(jnp.ones(2), tag="a", eager_sharding=False, hijax=False, ref=True)
    assert v.get_metadata(exclude_required=True) == {"tag": "a"}
    assert v.get_metadata(exclude_required=False) == v.get_metadata() != {"tag": "a"}
    assert nnx.Param(jnp.ones(2), tag="b").get_metadata(exclude_required=True) == {"tag": "b"}


def test_metadata_under_the_name_that_pipelines_read_can_be_edited():
    """Code that takes a State apart into lists makes each Variable again from its class and these."""
    variable = nnx.Param(jnp.ones(2), out_sharding=("data",), layer="first")
    again = type(variable)(variable.value, **dict(variable._var_metadata))
    assert again.get_metadata() == variable.get_metadata() == variable._var_metadata
    assert repr(variable._var_metadata) == repr(variable.get_metadata())
    read = nnx.jit(lambda variable: jnp.asarray(len(variable.get_metadata())))
    assert read(variable) == 2
    for x in (variable, nnx.Param(1.0)):  # the second has none, and shares nothing with others that have none
        x._var_metadata["layer"] = x._var_metadata["sharding"] = "second"
        assert x.layer == x.out_sharding == "second"
    assert nnx.Param(1.0).get_metadata() == {}
    del variable._var_metadata["sharding"]
    assert read(variable) == len(variable._var_metadata) == 1  # a jitted function has noticed it
    variable._var_metadata = {"layer": "third"}
    assert variable.get_metadata() == {"layer": "third"}


def test_metadata_that_may_be_missing_is_cheap_to_ask_for():
    """Keras asks for hooks at each read and write of a variable: no error is made, whose hint compares all names."""
    metadata = nnx.Param(1.0, **{f"entry_{i}": i for i in range(100)})._var_metadata
    assert "sharding" not in metadata
    assert metadata.get("on_get_value") is None
    assert count_calls(lambda: ("on_get_value" in metadata, metadata.get("on_set_value"))) < 30
    with pytest.raises(KeyError, match="on_get_value"):
        metadata["on_get_value"]


def test_metadata_is_edited_under_another_trace_unless_it_is_traced():
    """Libraries that keep settings of a Variable there write them while shapes are inferred."""
    variable = nnx.Param(1.0)
    jax.eval_shape(lambda: variable._var_metadata.update(layer="first"))
    assert variable.layer == "first"
    with pytest.raises(nnx.TraceContextError):
        jax.eval_shape(lambda x: variable._var_metadata.update(layer=x), 1.0)
    assert variable.layer == "first"


def test_missing_metadata_cannot_be_deleted():
    """del_metadata of an unknown name raises, naming it."""
    v = nnx.Param(0.0)
    with pytest.raises(KeyError, match="a"):
        v.del_metadata("a")
    with pytest.raises(AttributeError, match="a"):
        del v.a


def test_attributes_cannot_be_set():
    """A typo such as `v.valu = x` is an error that tells how to set metadata and the value."""
    v = nnx.Param(0.0)
    with pytest.raises(AttributeError, match=r"set_metadata\(valu=\.\.\.\).*variable\.value = "):
        v.valu = 1.0
    assert (v.value, v.get_metadata()) == (0.0, {})


@pytest.mark.parametrize("name", ["sharding", "sharding_names"])
def test_what_is_only_read_says_how_it_is_set(name):
    """As code for flax up to 0.11 sets them, or adds to them: they are read like attributes."""
    with pytest.raises(AttributeError, match=rf"set_metadata\({name}=\.\.\.\)"):
        setattr(nnx.Param(jnp.zeros(2), sharding_names=("a",)), name, ("b",))


def test_metadata_changes_are_structural_and_values_are_not():
    """Only set_metadata ends the cached layouts that describe the Variable."""
    v = nnx.Param(jnp.zeros(2))
    stamp = table_of(v).stamp
    v[...] = 1.0
    v.value = jnp.ones(3)
    assert stamp.valid
    v.set_metadata(a=1)
    assert not stamp.valid


def test_class_can_be_changed():
    """`v.__class__ = Other` turns a Variable into another type, in place, and is seen by a jitted function."""
    m = nnx.Dict(w=nnx.Param(jnp.ones(1)))
    count = nnx.jit(lambda m: len(nnx.state(m, nnx.Param)))
    assert count(m) == 1
    m.w.__class__ = nnx.BatchStat
    assert (type(m.w), count(m)) == (nnx.BatchStat, 0)


def test_type():
    """`v.type` is the class of the Variable, as filters see it."""
    assert nnx.BatchStat(0.0).type is nnx.BatchStat


# --- hooks ---


def test_hooks_given_as_metadata_run_in_order():
    """A hook is a function or a sequence of them; each gets the Variable and what the one before returned."""
    seen = []

    def add(v, x):
        seen.append(v)
        return x + 1

    v = nnx.Param(1.0, on_create_value=add, on_set_value=[add, lambda v, x: x * 10], on_get_value=(add,))
    assert (v.raw_value, v.value) == (2, 3)
    v.value = 1.0
    assert (v.raw_value, v.value, seen[0] is v) == (20, 21, True)


def test_hooks_of_a_subclass():
    """Hooks that a class defines as methods run at every way to read and write."""
    v = Scaled(jnp.array([2.0]))
    assert (v.raw_value.item(), v.value.item(), v[0].item(), v.item(), (v + 0).item()) == (1, 2, 2, 2, 2)
    assert (float(Scaled(2.0)), next(iter(v)).item()) == (2, 2)
    v.value = jnp.array([8.0])
    assert v.raw_value.item() == 4
    v[0] = 6.0
    assert (v.raw_value.item(), v.value.item()) == (3, 6)
    v += 1
    assert v.value.item() == 7


def test_hooks_see_what_is_assigned():
    """`v[i] = x` gives x to the hook, not the whole array, and leaves the other entries alone."""
    v = nnx.Param(jnp.zeros(3), on_set_value=lambda v, x: x * 2)
    v[...] = 1.0
    v[0] = 5.0
    assert v.value.tolist() == [10, 2, 2]


def test_raw_access_skips_hooks():
    """get_raw_value, set_raw_value, copy and replace do not run hooks."""
    v = Scaled(jnp.array([2.0]))
    v.set_raw_value(jnp.array([5.0]))
    assert (v.get_raw_value().item(), v.copy().raw_value.item(), v.replace(7.0).raw_value) == (5, 5, 7)


def test_transforms_do_not_run_hooks():
    """split, merge, state, update and jit carry raw values: on_set_value runs at assignment only."""
    calls = []
    v = nnx.Param(jnp.ones(1), on_set_value=lambda v, x: calls.append(x) or x)
    m = nnx.Dict(v=v)
    graphdef, state = nnx.split(m)
    nnx.update(nnx.merge(graphdef, state), state)
    nnx.jit(lambda m: m.v.sum())(m)
    assert calls == []
    v.value = jnp.zeros(1)
    assert len(calls) == 1


def test_a_hook_that_raises_leaves_the_value():
    """on_set_value runs before the write."""

    def refuse(v, x):
        raise RuntimeError("no")

    v = nnx.Param(1.0, on_set_value=refuse)
    with pytest.raises(RuntimeError, match="no"):
        v.value = 2.0
    assert v.value == 1.0


def test_axis_hooks():
    """add_axis and remove_axis tell the hooks, given as metadata or as methods."""
    seen = []

    class Named(nnx.Variable):
        def on_add_axis(self, index, name):
            seen.append(("class add", index, name))

    Named(0.0).add_axis(1, "layers")
    v = nnx.Param(0.0, on_add_axis=lambda v, i, n: seen.append(("add", i, n)), on_remove_axis=[
        lambda v, i, n: seen.append(("remove", i, n))])  # fmt: skip
    v.add_axis(0, "x")
    v.remove_axis(2, "y")
    assert seen == [("class add", 1, "layers"), ("add", 0, "x"), ("remove", 2, "y")]


def test_a_subclass_may_override_get_value_and_set_value():
    """Every way to read and write goes through them: `.value`, items, operators, conversions."""

    class Scaled(nnx.Variable):
        def get_value(self, **kwargs):
            return super().get_value(**kwargs) * 2

        def set_value(self, value, **kwargs):
            super().set_value(value / 2, **kwargs)

    class Shifted(Scaled):
        def get_value(self, **kwargs):
            return super().get_value(**kwargs) + 1

    v = Scaled(jnp.array([4.0, 2.0]))
    assert [x.tolist() for x in (v.value, v[...], v + 0, jnp.asarray(v), v.raw_value)] == [[8, 4]] * 4 + [[4, 2]]
    assert (v[0].item(), v.sum().item(), v.shape) == (8, 12, (2,))
    v.value = jnp.array([8.0, 8.0])
    v[0] = 2.0
    assert v.raw_value.tolist() == [1, 4]
    v += 2.0
    assert v.raw_value.tolist() == [2, 5]
    assert Shifted(jnp.ones(1)).value.tolist() == [3]


# --- traces ---


def write_value(v):
    v.value = jnp.ones(2)


WRITES = {
    "value": write_value,
    "item": lambda v: v.set_value(1.0, index=0),
    "raw value": lambda v: v.set_raw_value(jnp.ones(2)),
    "in place": lambda v: operator.iadd(v, 1),
    "metadata": lambda v: v.set_metadata(a=1),
    "delete metadata": lambda v: v.del_metadata("kept"),
    "class": lambda v: setattr(v, "__class__", nnx.BatchStat),
    "copy_from": lambda v: v.copy_from(nnx.Param(jnp.ones(2))),
    "update_from_state": lambda v: v.update_from_state(nnx.Param(jnp.ones(2))),
}


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.grad, jax.vmap, jax.make_jaxpr, jax.eval_shape], ids=lambda t: t.__name__
)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_from_another_trace_is_refused_and_changes_nothing(write, transform):
    """Each way to write raises TraceContextError under a raw JAX transform, with the path of the Variable."""
    model = Net()
    w = model.layers[0].w
    w.set_metadata(kept=1)
    before = w.value

    def f(x):
        write(w)
        return x.sum()

    x = jnp.ones(2)
    with pytest.raises(nnx.TraceContextError, match=r"Param \(float32\[2\]\) at model\.layers\[0\]\.w"):
        transform(f, x) if transform is jax.eval_shape else transform(f)(x)
    assert (w.value is before, w.get_metadata(), type(w), model.layers[0].w is w) == (
        True,
        {"kept": 1},
        nnx.Param,
        True,
    )


def test_the_refusal_says_what_to_do():
    """The message shows the wrong and the right call."""
    v = nnx.Param(jnp.zeros(()))
    with pytest.raises(
        nnx.TraceContextError, match=r"(?s)Pass the object.*nnx\.jit\(lambda model, x: model\(x\)\)\(model, x\)"
    ):
        jax.jit(lambda x: v.set_value(x))(1.0)


RAW = {
    "jax.lax.scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.ones(2)),
    "jax.lax.map": lambda f: jax.lax.map(f, jnp.ones(2)),
    "jax.lax.fori_loop": lambda f: jax.lax.fori_loop(0, 2, lambda i, x: f(x), 1.0),
    "jax.lax.while_loop": lambda f: jax.lax.while_loop(lambda x: x < 1, f, 1.0),
    "jax.lax.cond": lambda f: jax.lax.cond(True, f, lambda x: x, 1.0),
    "jax.lax.switch": lambda f: jax.lax.switch(jnp.array(1), [lambda x: x, f], 1.0),
    "jax.checkpoint": lambda f: jax.checkpoint(f)(1.0),
    "jax.grad": lambda f: jax.grad(f)(1.0),
    "jax.vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "jax.shard_map": lambda f: jax.shard_map(f, mesh=jax.make_mesh((1,), ("x",)), in_specs=P(), out_specs=P())(1.0),
}


@pytest.mark.parametrize("inside", [lambda f: f(), lambda f: nnx.jit(f)()], ids=["eager", "nnx.jit"])
@pytest.mark.parametrize("name", RAW)
def test_the_refusal_names_the_counterpart_of_a_raw_transform(name, inside):
    """Under `jax.lax.scan` it says nnx.scan, and so on, also where an nnxlib transform is around that."""
    v = nnx.Param(jnp.zeros(()))
    instead = {"jax.checkpoint": "nnx.remat", "jax.lax.map": "nnx.scan"}.get(name, f"nnx.{name.rpartition('.')[2]}")
    shown = "jax.lax.scan" if name == "jax.lax.map" else name
    text = re.escape(f"Use {instead} in place of {shown}, and pass it the object that holds this Param as an argument")
    with pytest.raises(nnx.TraceContextError, match=text + ": changes of arguments are carried out"):
        inside(lambda: RAW[name](lambda x: (v.set_value(v + x), x)[1]))


@pytest.mark.parametrize("name", ["eval_shape", "make_jaxpr"])
def test_the_refusal_where_nothing_is_computed(name):
    """The counterpart of nnxlib allows the write, and then discards it."""
    v = nnx.Param(jnp.zeros(()))
    run = {"eval_shape": lambda f: jax.eval_shape(f, 1.0), "make_jaxpr": lambda f: jax.make_jaxpr(f)(1.0)}[name]
    text = rf"Use nnx\.{name} in place of jax\.{name}.*: changes of arguments are discarded, for nothing is computed"
    with pytest.raises(nnx.TraceContextError, match=text):
        run(lambda x: v.set_value(v + x))


def test_the_refusal_under_a_transform_that_a_package_calls(tmp_path, monkeypatch):
    """The user cannot use another transform there; the values have to go through the package."""
    package = tmp_path / "site-packages" / "some_solver"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import jax\n\ndef solve(f):\n    return jax.lax.map(f, jax.numpy.ones(2))\n")
    monkeypatch.syspath_prepend(package.parent)
    v, solver = nnx.Param(jnp.zeros(())), importlib.import_module("some_solver")
    with pytest.raises(nnx.TraceContextError, match=r"under jax\.lax\.scan, called through some_solver,.* nnx\.split"):
        solver.solve(lambda x: (v.set_value(v + x), x)[1])


LIFTED = {
    "grad": lambda f: nnx.grad(f)(1.0),
    "vmap": lambda f: nnx.vmap(f)(jnp.ones(2)),
    "scan": lambda f: nnx.scan(lambda c, x: (c, f(x)))(0.0, jnp.ones(2)),
    "cond": lambda f: nnx.cond(True, f, lambda x: x, 1.0),
    "while_loop": lambda f: nnx.while_loop(lambda x: x < 1, f, 1.0),
    "remat": lambda f: nnx.remat(f)(1.0),
}


@pytest.mark.parametrize("inside", [lambda f: f(), lambda f: nnx.jit(f)()], ids=["eager", "nnx.jit"])
@pytest.mark.parametrize("lifted", LIFTED.values(), ids=LIFTED)
def test_the_refusal_in_an_nnxlib_transform_asks_for_a_further_argument(lifted, inside):
    """Where the transform is nnxlib's already, it does not say to use that of nnxlib."""
    v = nnx.Param(jnp.zeros(()))
    with pytest.raises(nnx.TraceContextError, match=r"(?s)Param as a further.*nnx\.grad\(loss\)") as error:
        inside(lambda: lifted(lambda x: (v.set_value(v + x), x)[1]))
    assert "jax.jit" not in str(error.value)


def test_trace_context_error_is_a_value_error():
    """Existing `except ValueError` keeps working."""
    assert issubclass(nnx.TraceContextError, ValueError)


def test_reading_under_any_raw_transform_is_legal():
    """A closed-over Variable is read in jit, grad, vmap, scan, cond, and stays concrete."""
    v = nnx.Param(jnp.array(2.0))
    f = lambda x: x * v
    assert jax.jit(f)(3.0).item() == 6
    assert jax.grad(f)(3.0).item() == 2
    assert jax.vmap(f)(jnp.arange(2.0)).tolist() == [0, 2]
    assert jax.lax.scan(lambda c, x: (c + v, x), 0.0, jnp.arange(3.0))[0].item() == 6
    assert jax.lax.cond(True, f, lambda x: x, 1.0).item() == 2
    assert not isinstance(v.value, jax.core.Tracer)


def test_an_inner_trace_may_not_write_to_a_variable_of_the_outer_one():
    """A Variable made under jit belongs to that trace, not to a grad inside it."""

    @jax.jit
    def outer(x):
        v = nnx.Param(x)
        v.value = x + 1
        with pytest.raises(nnx.TraceContextError):
            jax.grad(lambda y: (v.set_value(y), y)[1])(x)
        return v[...]

    assert outer(1.0).item() == 2


def test_a_variable_made_in_a_trace_does_not_keep_the_trace_alive():
    """A Variable that escaped refuses writes at top level, and holds no reference to the trace but its value."""
    escaped = []
    jax.jit(lambda x: escaped.append(nnx.Param(x)) or x)(1.0)
    with pytest.raises(nnx.TraceContextError):
        escaped[0].value = 1.0


def test_threads_read_and_write_their_own_and_shared_variables():
    """At top level every thread is in the same (no) trace; a trace in one thread does not concern another."""
    shared, errors = nnx.Param(jnp.zeros(())), []
    tracing, written = threading.Event(), threading.Event()

    def writer():
        tracing.wait(10)
        try:
            shared.value = jnp.ones(())
        except Exception as error:
            errors.append(error)
        written.set()

    thread = threading.Thread(target=writer)
    thread.start()

    def f(x):
        tracing.set()
        assert written.wait(10)
        return x

    jax.jit(f)(1.0)
    thread.join()
    assert (errors, shared.value.item()) == ([], 1)


# --- copies ---


def test_copy_and_replace():
    """copy and replace make a new Variable of the same class with the same value object and metadata."""
    v = nnx.Param(jnp.ones(2), a=1)
    c = v.copy()
    assert (type(c), c is not v, c.value is v.value, c.a) == (nnx.Param, True, True, 1)
    r = v.replace(jnp.zeros(2), a=2, b=3)
    assert (r.value.tolist(), r.get_metadata(), v.get_metadata()) == ([0, 0], {"a": 2, "b": 3}, {"a": 1})
    assert v.replace(nnx.BatchStat(5.0)).value == 5.0


def test_copies_do_not_share_later_changes():
    """Writing to a copy, or changing its metadata, leaves the original alone."""
    v = nnx.Param(jnp.ones(2), a=1)
    for c in (v.copy(), copy.copy(v), copy.deepcopy(v)):
        c[...] = 5.0
        c.set_metadata(a=2)
    assert (v.value.tolist(), v.a) == ([1, 1], 1)


@pytest.mark.parametrize("metadata", [{}, {"ref": False}])
def test_a_copy_has_lists_and_dicts_of_its_own(metadata):
    v, other = nnx.Variable({"sizes": [1]}, **metadata), nnx.Variable(None)
    other.copy_from(v)
    copies = [v.copy(), v.replace(v.value), copy.copy(v), nnx.Variable(None).copy(v, **metadata), other]
    v.value["sizes"].append(2)
    assert [c.value for c in copies] == [{"sizes": [1]}] * 5


def test_a_variable_that_is_made_again():
    """That is a write like any other: hooks run once, a jitted function sees it and what is written later."""
    created = []
    m = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
    read = nnx.jit(lambda m: m.w.sum())
    assert [read(m), read(m)] == [0, 0]
    m.w.__init__(jnp.ones(2), on_create_value=lambda v, value: created.append(v) or value)
    assert (read(m), len(created)) == (2, 1)
    m.w.value = jnp.full(2, 2.0)
    assert read(m) == 4


def test_copy_from_and_update_from_state():
    """They take over value and metadata; copy_from refuses another class, both what is no Variable."""
    v, other = nnx.Param(0.0, a=1), nnx.Param(1.0, b=2)
    v.copy_from(other)
    assert (v.value, v.get_metadata()) == (1.0, {"b": 2})
    with pytest.raises(ValueError, match="Cannot copy a BatchStat into a Param"):
        v.copy_from(nnx.BatchStat(3.0))
    with pytest.raises(TypeError, match=r"takes a Variable, but got float32\[2\].*variable.value = "):
        v.update_from_state(jnp.ones(2))

    class Incomparable(Exception):
        __hash__ = None

    with pytest.raises(TypeError, match="of type Incomparable has no hash"):
        v.copy_from(nnx.Param(3.0, b=Incomparable()))
    assert (v.value, v.get_metadata()) == (1.0, {"b": 2}), "nothing was written"
    v.update_from_state(nnx.Param(4.0))
    assert (v.value, v.get_metadata()) == (4.0, {})


def test_from_metadata_skips_hooks():
    """from_metadata rebuilds a Variable from raw value and metadata."""
    v = nnx.Param.from_metadata(1.0, {"a": 1, "on_create_value": lambda v, x: x + 1})
    assert (type(v), v.raw_value, v.a) == (nnx.Param, 1.0, 1)


@pytest.mark.parametrize(
    "copier",
    [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v)), lambda v: cloudpickle.loads(cloudpickle.dumps(v))],
)
def test_deep_copies_and_pickles(copier):
    """Value, class and metadata survive, and the copy is writable at top level."""
    v = nnx.BatchStat({"a": jnp.ones(2), "b": [np.zeros(1)]}, names=["x"])
    c = copier(v)
    assert (type(c), c.names, c.value["a"].tolist(), c.value["b"][0] is not v.value["b"][0]) == (
        nnx.BatchStat,
        ["x"],
        [1, 1],
        True,
    )
    c.value = 3.0
    assert copier(Scaled(jnp.array(2.0))).value.item() == 2.0


class SlottedVariable(nnx.Param):
    __slots__ = ("extra",)


class OfSlotted(SlottedVariable):
    """Without slots of its own."""


class Mixin:
    """A plain class, whose instances have a dict."""


class Mixed(Mixin, nnx.Param):
    pass


class MixedLast(nnx.Param, Mixin):
    pass


class Abstract(nnx.Param, abc.ABC):
    pass


class Counting(type):
    """A metaclass that counts the calls of its classes."""

    made = 0

    def __call__(cls, *args, **kwargs):
        Counting.made += 1
        return super().__call__(*args, **kwargs)


class WithMetaclass(nnx.Param, metaclass=Counting):
    pass


class WithNew(nnx.Param):
    def __new__(cls, *args, **kwargs):
        assert args, "called without a value"
        return super().__new__(cls)


class Guarded(nnx.Param):
    """What it sets and gets is looked at; nothing that the library does may go through these."""

    def __setattr__(self, name, value):
        assert name == "value"
        super().__setattr__(name, value)

    def __getattribute__(self, name):
        assert name != "forbidden"
        return super().__getattribute__(name)


class Disguised(nnx.Param):
    """Says that it is of another class, as a mock does."""

    @property
    def __class__(self):
        return Mixin


UNUSUAL = [SlottedVariable, OfSlotted, Mixed, MixedLast, Abstract, WithMetaclass, WithNew, Guarded, Disguised]


@pytest.mark.parametrize("kind", UNUSUAL, ids=lambda kind: kind.__name__)
def test_unusual_subclasses(kind):
    """However the class was made, what makes Variables of it makes them of this very class, and without calling it."""
    v = kind(jnp.arange(2.0), tag="x")
    m = nnx.Dict(v=v)
    made_by_calls = Counting.made

    def write(m):
        m.v.value = m.v.value + 1

    for transform in (nnx.jit, nnx.remat, nnx.jit):
        transform(write)(m)
    assert (m.v is v, v.value.tolist()) == (True, [3.0, 4.0])
    copies = {
        "merge": nnx.merge(*nnx.split(m)).v,
        "clone": nnx.clone(m).v,
        "tree.map of a Module": jax.tree.map(lambda x: x, m).v,
        "tree.map": jax.tree.map(lambda x: x, v),
        "raw jit": jax.jit(lambda m: m)(m).v,
        "returned by jit": nnx.jit(lambda m: nnx.clone(m))(m).v,
        "vmap": nnx.vmap(lambda m: nnx.clone(m))(m).v,
        "copy": copy.copy(v),
        "deepcopy": copy.deepcopy(m).v,
        "copy method": v.copy(),
        "from_metadata": kind.from_metadata(v.value, {"tag": "x"}),
    }
    if kind is not Disguised:  # pickle asks for `__class__`
        copies["pickle"] = pickle.loads(pickle.dumps(m)).v
    for name, made in copies.items():
        assert (type(made), made.value.tolist(), made.tag) == (kind, [3.0, 4.0], "x"), name
        made.value = jnp.zeros(2)
    assert v.value.tolist() == [3.0, 4.0]
    references = list(map(weakref.ref, copies.values()))
    del copies, made
    assert not any(reference() for reference in references), "each is freed at once"
    assert Counting.made == made_by_calls


def test_deepcopy_of_metadata_is_deep():
    """Mutable metadata of a deep copy is its own."""
    v = nnx.Param(0.0, names=["x"])
    copy.deepcopy(v).names.append("y")
    assert v.names == ["x"]


def test_a_deep_copy_of_a_value_that_refers_to_the_variable_ends():
    """A Variable whose value holds itself is copied once."""
    v = nnx.Variable([])
    v.value.append(v)
    c = copy.deepcopy(v)
    assert c.value[0] is c


# --- as a JAX pytree ---


def test_pytree_has_one_child_under_the_key_value():
    """Flattening gives the value with key `.value`; unflattening the same class and metadata."""
    v = nnx.Param(jnp.ones(2), a=1)
    [(path, leaf)], treedef = jax.tree_util.tree_flatten_with_path(v)
    assert (jax.tree_util.keystr(path), leaf is v.value) == (".value", True)
    back = treedef.unflatten([leaf])
    assert (type(back), back.value is leaf, back.a) == (nnx.Param, True, 1)


def test_tree_map_keeps_class_and_metadata_and_skips_hooks():
    """jax.tree.map over Variables maps raw values."""
    doubled = jax.tree.map(lambda x: x * 2, [Scaled(jnp.array(2.0)), nnx.Param(jnp.array(3.0), a=1)])
    assert (doubled[0].raw_value.item(), doubled[1].value.item(), doubled[1].a) == (2, 6, 1)


def test_treedefs_compare_class_and_metadata_by_value():
    """Same metadata by value, lists included: equal treedefs with equal hashes. Else unequal."""
    structure = lambda *args, **kwargs: jax.tree.structure(nnx.Param(*args, **kwargs))
    assert structure(1.0, a=[1, {"b": 2}]) == structure(2.0, a=[1, {"b": 2}])
    assert hash(structure(1.0, a=[1])) == hash(structure(2.0, a=[1]))
    assert structure(1.0, a=[1]) != structure(1.0, a=[2])
    assert structure(1.0) != structure(1.0, a=[2])
    assert jax.tree.structure(nnx.Param(1.0)) != jax.tree.structure(nnx.BatchStat(1.0))


def test_raw_jax_transforms_take_variables():
    """jit, grad and vmap of JAX take and return Variables; equal metadata does not trace again."""
    traces = []

    @jax.jit
    def f(v):
        traces.append(1)
        return v.replace(v * 2)

    assert f(nnx.Param(jnp.ones(2), a=[1])).value.tolist() == [2, 2]
    assert f(nnx.Param(jnp.ones(2), a=[1])).a == [1]
    assert len(traces) == 1
    assert jax.grad(lambda v: (v**2).sum())(nnx.Param(jnp.ones(2))).value.tolist() == [2, 2]
    assert jax.vmap(lambda v: v.value + 1)(nnx.Param(jnp.ones(2))).tolist() == [2, 2]


def test_is_leaf_on_variables():
    """`is_leaf=lambda x: isinstance(x, Variable)` stops at them."""
    v = nnx.Param(1.0)
    assert jax.tree.leaves({"a": v}, is_leaf=lambda x: isinstance(x, nnx.Variable)) == [v]


# --- display and memory ---


def test_repr_is_short_and_says_type_size_and_metadata():
    """Small arrays are written out, large ones as dtype and shape; tracers and strange values do not break it."""
    assert repr(nnx.Param(jnp.zeros((100, 3)), sharding=("a",))) == "Param(float32[100, 3], out_sharding=('a',))"
    assert repr(nnx.Param(jnp.ones(2))) == "Param(Array([1., 1.], dtype=float32))"
    assert repr(nnx.Variable({"a": 1})) == "Variable({'a': 1})"
    shown = []
    jax.jit(lambda x: shown.append(repr(nnx.Param(x))) or x)(jnp.ones(2))
    assert shown == ["Param(float32[2])"]


def test_dir_lists_metadata_and_attributes_of_the_value():
    """Completion in a notebook shows `shape` and the metadata."""
    names = dir(nnx.Param(jnp.ones(1), layer=1))
    assert {"shape", "layer", "value", "set_value"} <= set(names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # treescope touches deprecated names of NumPy and JAX
def test_treescope_shows_value_and_metadata():
    """The rich display renders without error and names the class and metadata."""
    import treescope

    text = treescope.render_to_text(nnx.Param(jnp.ones(2), layer="first"))
    assert "Param" in text
    assert "first" in text


def test_a_dropped_variable_is_freed_at_once():
    """A Variable is in no reference cycle."""
    gc.disable()
    try:
        v = nnx.Param(jnp.ones(1), a=1)
        nnx.jit(lambda v: v + 1)(v)
        ref = weakref.ref(v)
        del v
        assert ref() is None
    finally:
        gc.enable()


def test_a_variable_whose_buffer_was_donated_is_written():
    """`repr` never raises; it says what was there."""
    v = nnx.Param(jnp.ones(2))
    v.value.delete()
    assert repr(v) == "Param(float32[2], deleted)"


def test_the_older_name_of_what_a_state_holds():
    """Every Variable is a `VariableState`. It is made with its type, which filters and JAX see."""
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    assert all(isinstance(x, nnx.VariableState) for _, x in nnx.state(model).flat_state())
    assert issubclass(nnx.Param, nnx.VariableState)
    assert not isinstance(1.0, nnx.VariableState)
    for older in (nnx.VariableState(nnx.Param, 1.0), nnx.VariableState(type=nnx.Param, value=1.0)):
        assert type(older) is nnx.Param
        assert nnx.OfType(nnx.Param)((), older)
        assert jax.tree.structure(older) == jax.tree.structure(nnx.Param(0.0))
    assert nnx.VariableState(nnx.BatchStat, 1.0, tag="a").tag == "a"
    assert type(nnx.VariableState(1.0)) is nnx.Variable
    with pytest.raises(TypeError, match="takes the type of a Variable, then its value"):
        nnx.VariableState(int, 1.0)


# --- kept in a jax.Ref ---


def kept_in_a_ref(**metadata):
    v = nnx.Param(jnp.arange(3.0), ref=True, **metadata)
    return v, v.get_raw_value()


def test_a_ref_is_read_and_written_in_place():
    """The value is an array as ever; every write goes into the one Ref, in its shape and dtype."""
    v, ref = kept_in_a_ref(layer="first")
    assert (v.ref, isinstance(ref, jax.Ref), type(v[...]), v.shape) == (True, True, type(jnp.ones(1)), (3,))
    v[0] = 5
    v += 1
    assert (ref[...].tolist(), v.value.tolist(), (v * 2)[1].item(), v.layer) == ([6, 2, 3], [6, 2, 3], 4, "first")
    v.value = jnp.zeros(3)
    v[...] = 7
    assert (ref[...].tolist(), v.get_raw_value() is ref) == ([7, 7, 7], True)
    v.set_raw_value(jnp.ones(3))
    assert ref[...].tolist() == [1, 1, 1]
    v.copy_from(nnx.Param(jnp.full(3, 2.0), ref=True, layer="first"))
    assert (ref[...].tolist(), v.get_raw_value() is ref) == ([2, 2, 2], True)
    assert (nnx.Param(1).ref, nnx.Param(1, ref=False).ref, nnx.Param(1, ref=False).get_raw_value()) == (False, False, 1)


@pytest.mark.parametrize("transform", [jax.jit, nnx.jit, lambda f: nnx.jit(jax.jit(f))], ids=["jax", "nnx", "both"])
def test_an_operator_in_place_on_an_attribute_with_a_ref_comes_out_of_a_closure(transform):
    """Python then sets the attribute to the very object that it holds, which is no change; any other one is refused."""

    class Counter(nnx.Module):
        def __init__(self):
            self.calls, self.plain = nnx.Variable(jnp.array(0), ref=True), nnx.Variable(jnp.array(0))
            self.other = nnx.Variable(jnp.array(5), ref=True)

        def count(self, x):
            self.calls += 1
            return x + self.calls

    counter = Counter()
    calls, run = counter.calls, transform(lambda x: counter.count(x))
    assert [run(1).item(), run(1).item(), calls[...].item()] == [2, 3, 2]
    assert counter.calls is calls
    for name, value in {"plain": counter.plain, "calls": counter.other, "new": calls}.items():
        with pytest.raises(nnx.errors.TraceContextError, match=name):
            jax.jit(lambda name=name, value=value: setattr(counter, name, value))()
    assert (counter.calls is calls, hasattr(counter, "new")) == (True, False)


@pytest.mark.parametrize(("made", "key", "absent"), [(nnx.List, 0, 2), (nnx.Dict, "first", "new")])
def test_an_operator_in_place_on_an_item_with_a_ref_comes_out_of_a_closure(made, key, absent):
    first, second = nnx.Variable(jnp.array(0), ref=True), nnx.Variable(jnp.array(5), ref=True)
    items = made([first, second] if made is nnx.List else {"first": first, "second": second})

    @jax.jit
    def count():
        items[key] += 1

    count()
    count()
    assert (first[...].item(), items[key] is first) == (2, True)
    with pytest.raises(nnx.errors.TraceContextError, match="items"):
        jax.jit(lambda: operator.setitem(items, key, second))()
    with pytest.raises((nnx.errors.TraceContextError, IndexError)):
        jax.jit(lambda: operator.setitem(items, absent, first))()
    assert (items[key] is first, len(items)) == (True, 2)


def test_a_ref_that_was_given_as_the_value_is_replaced():
    """Without ``ref=True`` a Ref is a value like any other; and with ``ref=False`` a value may have another shape."""
    ref = jax.new_ref(jnp.zeros(3))
    v = nnx.Variable(ref, layer="first")
    v.value = new = jnp.ones(2)
    assert (v.value is new, ref[...].tolist()) == (True, [0, 0, 0])
    v.set_raw_value(ref)
    v.set_raw_value(new)
    assert (v.value is new, ref[...].tolist()) == (True, [0, 0, 0])
    v = nnx.Variable(jnp.zeros(3), ref=False)
    v.value = new
    assert v.value is new


def test_a_copy_has_a_ref_of_its_own():
    """Or an array, as the metadata of the copy say."""
    v, ref = kept_in_a_ref()
    pickled = pickle.loads(pickle.dumps(v))
    for made in (v.copy(), nnx.Param(jnp.arange(3.0)).copy(ref=True), copy.deepcopy(v), pickled, nnx.clone(v)):
        assert isinstance(made.get_raw_value(), jax.Ref)
        assert made.get_raw_value() is not ref
        made[...] = 0
        assert (v.tolist(), made.tolist()) == ([0, 1, 2], [0, 0, 0])
    out = v.copy(ref=False)
    v[...] = 9
    assert (out.ref, isinstance(out.get_raw_value(), jax.Array), out.tolist()) == (False, True, [0, 1, 2])


def test_where_the_value_is_kept_does_not_change_with_the_metadata():
    """What replaces all metadata leaves ``ref`` alone; to set it is an error, and changes nothing."""
    v, ref = kept_in_a_ref(layer="first")
    plain = nnx.Param(jnp.zeros(3), layer="last")
    v.set_metadata({"layer": "second"})
    assert (v.get_raw_value() is ref, v.tolist(), v.layer) == (True, [0, 1, 2], "second")
    plain.copy_from(v)
    assert (plain.ref, plain.tolist(), plain.layer, plain.get_raw_value() is ref) == (False, [0, 1, 2], "second", False)
    v.copy_from(nnx.Param(jnp.ones(3), layer="third"))
    assert (v.get_raw_value() is ref, v.tolist(), v.layer) == (True, [1, 1, 1], "third")
    for variable in (v, plain):
        before = variable.get_metadata()
        with pytest.raises(ValueError, match=rf"Param\(value, ref={not variable.ref}\) or variable.copy"):
            variable.set_metadata(ref=not variable.ref, layer="fourth")
        assert variable.get_metadata() == before


def test_hooks_of_a_ref_see_arrays():
    """On reading and on writing."""
    hooks = {"on_get_value": lambda v, x: x + 1, "on_set_value": lambda v, x: x * 2}
    v, ref = kept_in_a_ref(**hooks)
    v[...] = jnp.ones(3)
    assert (ref[...].tolist(), v.value.tolist()) == ([2, 2, 2], [3, 3, 3])


def test_jax_carries_writes_to_a_ref_out_of_its_own_transformations():
    """As an argument and in a closure, of jit, grad, scan, and of transforms of ours."""
    v, ref = kept_in_a_ref()

    def add(v, x):
        v[...] += x
        return jnp.sum(x**2)

    jax.jit(add)(v, 1.0)
    assert v.tolist() == [1, 2, 3]
    jax.jit(lambda x: add(v, x))(1.0)
    assert jax.grad(lambda x: x**2 + add(v, jax.lax.stop_gradient(x)))(3.0) == 6
    assert v.tolist() == [5, 6, 7]
    jax.lax.scan(lambda carry, x: (carry, add(v, x)), None, jnp.ones(3))
    assert v.tolist() == [8, 9, 10]
    nnx.jit(add)(v, 1.0)
    nnx.jit(lambda x: add(v, x))(1.0)
    nnx.grad(lambda x, v: x + add(v, 1.0))(2.0, v)
    nnx.scan(lambda carry, x: (carry, add(v, x)))(0.0, jnp.ones(2))
    assert (v.tolist(), v.get_raw_value() is ref) == ([13, 14, 15], True)
    nnx.vmap(add)(v, jnp.arange(3.0))
    assert v.tolist() == [13, 15, 17]


@pytest.mark.parametrize(
    ("transform", "remedy"), [(nnx.grad, "stop_gradient"), (lambda f: nnx.vmap(f, in_axes=(None, 0)), "in_axes")]
)
def test_a_value_that_a_ref_cannot_take_is_refused_with_its_path(transform, remedy):
    """JAX asks to make an argument of the Ref, which it is; where it is written is noted, and what to do."""

    def mean(stats, x):
        stats.seen[...] = stats.weight * x
        return (stats.weight * x).sum()

    stats = nnx.Dict(weight=nnx.Param(jnp.ones(3)), seen=nnx.BatchStat(jnp.zeros(3), ref=True))
    with pytest.raises(Exception, match="array reference") as error:
        transform(mean)(stats, jnp.ones((3, 3)) if remedy == "in_axes" else jnp.ones(3))
    assert any(remedy in note and "BatchStat (float32[3]) at stats.seen" in note for note in error.value.__notes__)
    stopped = lambda stats, x: setattr(stats, "seen", jax.lax.stop_gradient(stats.weight * x)) or stats.weight.sum()
    nnx.grad(stopped)(stats, jnp.full(3, 2.0))
    assert stats.seen.tolist() == [2.0, 2.0, 2.0]


def test_a_variable_with_a_ref_comes_out_of_a_transform():
    """JAX returns no Ref: it is read on the way out, and there is a new one outside."""
    made = nnx.jit(lambda x: nnx.Dict(a=nnx.Param(x, ref=True)))(jnp.ones(2))
    made.a[...] += 1
    assert (made.a.ref, isinstance(made.a.get_raw_value(), jax.Ref), made.a.tolist()) == (True, True, [2, 2])
    assert nnx.eval_shape(lambda: nnx.Param(jnp.ones(2), ref=True)).shape == (2,)


def test_a_missing_attribute_ends_with_the_suggestion_of_python():
    """Python adds its own to what an AttributeError says, which therefore has no full stop."""
    for ask in (lambda: nnx.Param(jnp.ones(2)).valeu, lambda: nnx.State({"value": nnx.Param(1)}).valeu):
        with pytest.raises(AttributeError) as caught:
            ask()
        assert (caught.value.name, str(caught.value)[-1] == ".") == ("valeu", False)


def test_wrong_metadata_and_hooks_are_errors_that_say_what_is_asked_for():
    v = nnx.Param(jnp.ones(2), sharding=("a",), eager_sharding=False)
    with pytest.raises(KeyError) as caught:
        v.get_metadata("eager_shardng")
    (note,) = caught.value.__notes__
    assert note.startswith("This Param has no metadata 'eager_shardng'; it has: 'out_sharding', 'eager_sharding'.")
    assert note.endswith("Did you mean 'eager_sharding'?")
    assert v.get_metadata("other", None) is None
    with pytest.raises(ArgumentError, match=r"set_metadata takes set_metadata\(name=value\) or a dict, not 3"):
        v.set_metadata(3)
    with pytest.raises(ArgumentError, match=r"or a dict, not 'a', 2, 'b'\."):
        v.set_metadata("a", 2, "b")
    hooked = nnx.Variable(jnp.ones(2), on_set_value=3)
    before = hooked.value
    with pytest.raises(ArgumentError, match=r"A hook, such as on_set_value, is a function .*, but got 3"):
        hooked.value = jnp.zeros(2)
    assert hooked.value is before


def test_a_value_that_is_no_function_cannot_be_called():
    with pytest.raises(ArgumentError, match=r"This Param cannot be called: its value is float32\[2\]"):
        nnx.Param(jnp.ones(2))()
    assert nnx.Variable(lambda x: x + 1)(1) == 2


def test_what_the_library_keeps_on_a_variable_is_no_attribute_of_the_users():
    """Also of one that is an argument by itself, again and again."""
    v = nnx.Param(jnp.ones(2), tag="x")
    double = nnx.jit(lambda v: 2 * v)
    for _ in range(3):
        double(v)
        assert (vars(v), v.get_metadata()) == ({}, {"tag": "x"})


def test_a_variable_passed_to_a_pallas_kernel_is_loaded_by_ellipsis():
    from jax.experimental import pallas as pl

    def kernel(w_ref, o_ref):
        o_ref[...] = w_ref[...] * 2

    double = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((2,), jnp.float32), interpret=True)
    assert double(nnx.Param(jnp.ones(2))).tolist() == [2.0, 2.0]
