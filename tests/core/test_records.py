"""Records: the layout kept on a live object, and how it is known to be out of date."""

import copy
import gc
import pickle
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core.errors import StaleLayoutError
from nnxlib.core.graph import pack
from nnxlib.core.records import layout_of, record_of


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.n = 1


class Net(nnx.Module):
    def __init__(self):
        self.layers = [Layer(), Layer()]
        self.scale = jnp.ones(())
        self.act = jnp.tanh


def test_a_record_describes_what_pack_finds():
    """Layout, leaves and objects are those of a walk."""
    m = Net()
    m.tied = m.layers[0]
    record, packed = record_of(m), pack(m)
    assert record.layout is packed.layout
    assert all(a is b for a, b in zip(record.leaves(), packed.leaves, strict=True))
    assert all(a is b for a, b in zip(record.rows(m), packed.objects, strict=True))


def test_values_need_no_new_record():
    """Writing Variables and arrays keeps the record, whose leaves are the new values."""
    m = Net()
    record = record_of(m)
    m.layers[0].w.value, m.scale = jnp.zeros(5), jnp.zeros(3)
    assert record_of(m) is record
    assert [x.shape for x in record.leaves()] == [(5,), (2,), (3,)]


STRUCTURAL = {
    "static value": lambda m: setattr(m.layers[1], "n", 2),
    "new attribute": lambda m: setattr(m, "x", None),
    "deleted attribute": lambda m: delattr(m, "act"),
    "list": lambda m: m.layers.append(1),
    "swap": lambda m: m.layers.reverse(),
    "replaced Variable": lambda m: setattr(m.layers[0], "w", nnx.Param(1.0)),
    "replaced Module": lambda m: setattr(m, "layers", [Layer(), Layer()]),
    "metadata": lambda m: m.layers[0].w.set_metadata(a=1),
    "class": lambda m: setattr(m.layers[0], "__class__", Net),
    "Variable class": lambda m: setattr(m.layers[0].w, "__class__", nnx.Cache),
    "array to NumPy": lambda m: setattr(m, "scale", np.ones(1)),
    "vars": lambda m: vars(m.layers[0]).update(n=5),
    "pop": lambda m: nnx.pop(m.layers[0], nnx.Param),
}


@pytest.mark.parametrize("change", STRUCTURAL.values(), ids=STRUCTURAL.keys())
def test_each_structural_change_makes_a_new_record(change):
    """Wherever in the graph it happens, the next record describes the object as it then is."""
    m = Net()
    record_of(m)
    record_of(m.layers)  # records of parts do not hide changes from the whole
    change(m)
    record, packed = record_of(m), pack(m)
    assert record.layout is packed.layout
    assert all(a is b for a, b in zip(record.rows(m), packed.objects, strict=True))


def test_a_change_elsewhere_keeps_the_record():
    """Another model's structure may change: the versions of this one are still the same."""
    m, other = Net(), Net()
    record = record_of(m)
    record_of(other)
    other.layers.append(Layer())
    assert record_of(m) is record


def test_a_flag_toggled_back_finds_the_same_layout():
    """Layouts are interned, so the compiled functions of a state of the model are found again."""
    m = Net()
    first = layout_of(m)
    m.act = jnp.sin
    assert layout_of(m) is not first
    m.act = jnp.tanh
    assert layout_of(m) is first
    assert layout_of(Net()) is first


def test_a_part_that_leaves_no_longer_counts():
    """A Module that was taken out may change without making the record of the whole stale."""
    m = Net()
    out = m.layers.pop()
    record = record_of(m)
    out.n = 7
    assert record_of(m) is record


MUTABLE = {
    "tuple of arrays": lambda m: setattr(m, "x", (jnp.ones(1), 1)),
    "foreign dict": lambda m: setattr(m, "x", nnx.static(({"a": 1},))),
    "object": lambda m: setattr(m, "x", bytearray(b"a")),
}


@pytest.mark.parametrize("add", MUTABLE.values(), ids=MUTABLE.keys())
def test_what_can_change_unseen_is_walked_each_time(add):
    """Mutable static values and arrays in tuples are compared at every call."""
    m = Net()
    add(m)
    assert record_of(m) is not record_of(m)


def test_an_edit_of_a_mutable_static_value_is_seen():
    """The layout follows what is in it."""
    m = Net()
    m.x = bytearray(b"a")
    first = layout_of(m)
    m.x.append(1)
    assert layout_of(m) is not first


def test_writes_around_every_check_are_found_out():
    """object.__setattr__ on a live model is noticed at uses 2, 4, 8..., and raises rather than use the old."""
    m = Net()
    f = nnx.jit(lambda m: m.layers[0].n)
    f(m)
    object.__setattr__(m.layers[0], "n", 5)
    with pytest.raises(StaleLayoutError, match="structure of this Net was changed behind"):
        for _ in range(20):
            f(m)
    assert f(m).item() == 5


def test_copies_have_no_record():
    """A deep copy, a shallow copy and a pickle start without one."""
    m = Net()
    record_of(m)
    for made in (copy.deepcopy(m), copy.copy(m), pickle.loads(pickle.dumps(nnx.Dict(a=Layer())))):
        assert made._nnx_record is None


def test_a_shallow_copy_is_told_of_changes_in_shared_parts():
    """Two roots over the same parts both see a change."""
    m = Net()
    c = copy.copy(m)
    record_of(m), record_of(c)
    m.layers[0].n = 9
    for x in (m, c):
        assert record_of(x).layout is pack(x).layout


def test_a_record_does_not_keep_its_root():
    """A dropped model is freed at once."""
    m = Net()
    record_of(m)
    ref = weakref.ref(m)
    gc.disable()
    try:
        del m
        assert ref() is None
    finally:
        gc.enable()


def test_variables_by_themselves():
    """A Variable has a layout too, made anew at each call."""
    v = nnx.Param(jnp.ones(2), a=1)
    assert layout_of(v) is layout_of(nnx.Param(jnp.zeros(3), a=1))
    assert record_of(v).leaves()[0] is v.value
