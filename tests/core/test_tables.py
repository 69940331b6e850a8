"""Tables: the layout kept on a live object, and how it is known to be out of date."""

import copy
import gc
import pickle
import threading
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core import tables
from nnxlib.core.errors import StaleLayoutError, StaticValueError
from nnxlib.core.graph import pack
from nnxlib.core.objects import attributes_of
from nnxlib.core.packing import pack_live
from nnxlib.core.tables import table_of
from nnxlib.core.walk import Walk

from .nets import Layer, Net, Slotted, layout_of, param


def test_a_record_describes_what_pack_finds():
    """Layout, leaves and objects are those of a walk."""
    m = Net()
    m.tied = m.layers[0]
    table, packed = table_of(m), pack(m)
    assert table.layout is packed.layout
    assert all(a is b for a, b in zip(table.leaves(), packed.leaves, strict=True))
    assert all(a is b for a, b in zip(table.objects_with(m), packed.objects, strict=True))


def test_values_need_no_new_record():
    """Writing Variables and arrays keeps the table, whose leaves are the new values."""
    m = Net()
    table = table_of(m)
    m.layers[0].w.value, m.scale = jnp.zeros(5), jnp.zeros(3)
    assert table_of(m) is table
    assert [x.shape for x in table.leaves()] == [(5,), (2,), (3,)]


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
    """Wherever in the graph it happens, the next table describes the object as it then is."""
    m = Net()
    table_of(m)
    table_of(m.layers)  # tables of parts do not hide changes from the whole
    change(m)
    table, packed = table_of(m), pack(m)
    assert table.layout is packed.layout
    assert all(a is b for a, b in zip(table.objects_with(m), packed.objects, strict=True))


def test_a_change_elsewhere_keeps_the_record():
    """Another model's structure may change, and nothing is looked at again."""
    m, other = Net(), Net()
    table = table_of(m)
    table_of(other)
    other.layers.append(Layer())
    assert table_of(m) is table


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
    """A Module that was taken out may change without making the table of the whole stale."""
    m = Net()
    out = m.layers.pop()
    table = table_of(m)
    out.n = 7
    assert table_of(m) is table


class Plain:
    """A class of another library."""


class Mixed(Plain, nnx.Module):
    """`vars` of it is Python's own dict."""

    def __init__(self):
        self.n = 1


def test_what_can_change_unseen_is_walked_each_time():
    """An array in a slot is in no place that a table could read it from."""
    m = Net()
    m.x = Slotted()
    assert table_of(m) is not table_of(m)
    assert table_of(m).leaves()[-1] is m.x.pair[0]


MUTABLE = {
    "bytearray": (bytearray(b"a"), lambda x: x.append(1)),
    "object": (nnx.static(types.SimpleNamespace(a=1)), lambda x: setattr(x, "a", 2)),
    "an array in an object": (nnx.static(types.SimpleNamespace(a=1)), lambda x: setattr(x, "a", np.ones(2))),
    "a JAX array in an object": (types.SimpleNamespace(a=1), lambda x: setattr(x, "a", jnp.ones(2))),
    "NumPy array": (nnx.static(np.ones(2)), lambda x: x.fill(0)),
}


@pytest.mark.parametrize(("value", "edit"), MUTABLE.values(), ids=MUTABLE.keys())
def test_an_edit_of_a_mutable_static_value_is_seen(value, edit):
    """The table is kept as long as the value equals its copy, and the layout follows what is in it."""
    m = Net()
    m.x = m.layers[0].x = value
    table = table_of(m)
    assert table_of(m) is table
    assert len(table.compared) == 1  # compared once, though two Modules refer to it
    edit(m.x)
    assert layout_of(m) is not table.layout


@pytest.mark.parametrize("copied", [nnx.clone, lambda m: nnx.merge(*nnx.split(m))], ids=["clone", "merge"])
def test_copies_are_described_without_a_walk_only_if_every_change_is_seen(copied):
    """Not if they have slots or a `__dict__` of another class, or values that can be edited, in metadata, too."""
    made = copied(nnx.Dict(a=nnx.Dict(x=nnx.static(np.ones(2)))))
    first = layout_of(made)
    made.a.x.fill(0)
    assert layout_of(made) is not first
    original = nnx.Dict(w=nnx.Param(1.0, settings=types.SimpleNamespace(a=1)))
    made, other = copied(original), copied(original)
    first = layout_of(made)
    made.w.settings.a = 2
    assert layout_of(made) is not first
    assert layout_of(other) is first
    graphdef, state = nnx.split(original)
    made, other = (nnx.merge(graphdef, state) for _ in range(2))
    made.w.settings.a = 2
    assert state.w.settings.a == other.w.settings.a == 1
    made = copied(nnx.Dict(a=Mixed()))
    first = layout_of(made)
    vars(made.a)["n"] = 2
    assert layout_of(made) is not first
    made = copied(nnx.Dict(a=Slotted()))
    made.a.pair = (jnp.zeros(1), 1)
    assert table_of(made).leaves()[0] is made.a.pair[0]
    made.a.pair = (jnp.zeros(2), 2)
    assert table_of(made).leaves()[0] is made.a.pair[0]


@pytest.mark.parametrize("change", [lambda m: setattr(m[0], "n", 5), lambda m: setattr(m[0], "w", param())])
def test_a_copy_that_has_changed_since_is_not_walked(change, monkeypatch, unchecked):
    copied = nnx.clone(nnx.List([Layer(), Layer()]))
    change(copied)
    monkeypatch.setattr(tables, "_make", None)
    assert layout_of(copied) is pack(copied).layout


def test_a_static_value_that_can_no_longer_be_compared_is_refused_with_its_path():
    """An object without hash and attributes put into a static one later."""
    m = Net()
    m.x = nnx.static(types.SimpleNamespace(a=1))
    table_of(m)
    m.x.a = type("Bare", (Exception,), {"__hash__": None})()
    with pytest.raises(StaticValueError, match="at x of type Bare has no hash"):
        table_of(m)


def test_an_object_holds_only_stamps_that_are_in_use():
    """Tables come and go with their roots; what they leave with a part that lives on is cleaned up by the next."""
    part = Layer()
    for _ in range(10):
        table_of(nnx.List([part]))
    assert len(part._nnx_stamps) <= 2
    assert len(part.w._nnx_stamps) <= 2


def test_writes_around_every_check_are_found_out():
    """object.__setattr__ on a live model is noticed at uses 2, 4, 8..., and raises rather than use the old."""
    m = Net()
    f = nnx.jit(lambda m: m.layers[0].n)
    f(m)
    object.__setattr__(m.layers[0], "n", 5)
    with pytest.raises(
        StaleLayoutError, match=r"of this Net was changed behind(.|\n)*  layers\[0\]\.n: \d \(int\) became 5"
    ):
        for _ in range(20):
            f(m)
    assert f(m).item() == 5


def test_what_raw_jax_flattens_is_noticed_with_it():
    """Once a write around every check has been found out, plain jax.jit sees it, too; it went on with the old value."""
    m = Net()
    f, g = (jit(lambda m: m.layers[0].n) for jit in (nnx.jit, jax.jit))
    f(m), g(m)
    object.__setattr__(m.layers[0], "n", 5)
    with pytest.raises(StaleLayoutError):
        [f(m) for _ in range(20)]
    assert g(m) == 5


def test_a_cache_that_is_added_around_every_check_is_a_warning():
    """As in solvers that keep what they compute by object.__setattr__, which flax.nnx lets pass."""

    class Cache:
        pass

    for added, leaves in (Cache(), 1), (jnp.ones(1), 2):
        m = nnx.List([Layer()])
        f = nnx.jit(lambda m: m[0].w + len(vars(m[0])))
        before = f(m)
        assert len(jax.tree.leaves(m)) == 1
        object.__setattr__(m[0], "_cache", added)
        with pytest.warns(UserWarning, match=r"\[0\]\._cache: nothing became (.|\n)*`setattr`"):
            [f(m) for _ in range(8)]
        np.testing.assert_array_equal(f(m), before + 1)
        assert len(jax.tree.leaves(m)) == leaves
        assert vars(nnx.clone(m)[0])["_cache"] is not None


def test_copies_have_no_record():
    """A deep copy, a shallow copy and a pickle start without one."""
    m = Net()
    table_of(m)
    for made in (copy.deepcopy(m), copy.copy(m), pickle.loads(pickle.dumps(nnx.Dict(a=Layer())))):
        assert made._nnx_table is None


def test_a_shallow_copy_is_told_of_changes_in_shared_parts():
    """Two roots over the same parts both see a change."""
    m = Net()
    c = copy.copy(m)
    table_of(m), table_of(c)
    m.layers[0].n = 9
    for x in (m, c):
        assert table_of(x).layout is pack(x).layout


ROOTS = {
    "Module": Net,
    "List of arrays": lambda: nnx.List([jnp.ones(1), Layer()]),
    "Variable": lambda: nnx.Param(jnp.ones(1)),
    "merged": lambda: nnx.merge(*nnx.split(nnx.List([Layer()]))),
}


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("root", ROOTS)
def test_a_record_does_not_keep_its_root(root, calls):
    """A dropped model is freed at once."""
    m, read = ROOTS[root](), nnx.jit(lambda m: jnp.ones(1))
    for _ in range(calls):
        read(m)
    ref = weakref.ref(m)
    gc.disable()
    try:
        del m
        assert ref() is None
    finally:
        gc.enable()


def test_variables_by_themselves():
    """A Variable has a layout and a table too."""
    v = nnx.Param(jnp.ones(2), a=1)
    assert layout_of(v) is layout_of(nnx.Param(jnp.zeros(3), a=1))
    assert table_of(v).leaves()[0] is v.value


def _in_another_thread(f):
    thread = threading.Thread(target=f)
    thread.start()
    return thread


def _change(m):
    m.layers[0].n = 5


def _change_and_describe(m):
    _change(m)
    table_of(m)


def _change_slowly(m):
    attributes_of(m.layers[0])["n"] = 5
    time.sleep(0.01)  # between the write and the note of it
    m.layers[0]._nnx_changed()


@pytest.mark.parametrize("change", [_change, _change_and_describe, _change_slowly])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_change_by_another_thread_during_a_check_is_no_error(when, change, monkeypatch, unchecked):
    """What is written by `setattr` meanwhile was not changed behind the library's back."""
    m, threads = Net(), []
    table_of(m).until_check = 1

    def interrupted(root):
        monkeypatch.undo()
        packed = pack(root) if when == "after" else None
        threads.append(_in_another_thread(lambda: change(m)))
        if change is _change_slowly:
            while m.layers[0].n != 5:
                pass
        else:
            threads[0].join()
        return packed or pack(root)

    monkeypatch.setattr(tables, "pack", interrupted)
    table_of(m)
    threads[0].join()
    assert layout_of(m) is pack(m).layout


@pytest.mark.parametrize("left", [0, -1])
def test_a_check_that_two_threads_have_counted_past(left, unchecked):
    """A count that is not 1 when it is looked at, since two threads counted at once, does not put the check off."""
    m, jitted = Layer(), nnx.jit(lambda m: m.w * m.n)
    jitted(m)
    jitted(m)
    table_of(m).until_check = left
    attributes_of(m)["n"] = 2
    with pytest.raises(StaleLayoutError):
        jitted(m)
    table_of(m).until_check = left
    attributes_of(m)["n"] = 3
    with pytest.raises(StaleLayoutError):
        table_of(m)


# --- objects that a trace has built ---


class OtherLayer(Layer):
    pass


def _with_class(layer):
    layer.__class__ = OtherLayer


IN_A_TRACE = {
    "static value": lambda layer: setattr(layer, "n", 2),
    "class": _with_class,
    "declared": lambda layer: setattr(layer, "n", nnx.data(1)),
    "metadata": lambda layer: layer.w.set_metadata(tag=1),
    "type of a Variable": lambda layer: setattr(layer.w, "__class__", nnx.BatchStat),
    "another Variable": lambda layer: setattr(layer, "w", nnx.Param(layer.w + 1)),
    "attached": lambda layer: setattr(layer, "new", Layer()),
    "array": lambda layer: setattr(layer, "n", jnp.ones(2)),
    "unnoticed": lambda layer: vars(layer.mixed).update(n=2),
    "mutable": lambda layer: layer.config.append(1),
    "deleted": lambda layer: delattr(layer, "n"),
}


@pytest.mark.parametrize("change", IN_A_TRACE.values(), ids=IN_A_TRACE)
@pytest.mark.parametrize("known", [True, False], ids=["known before", "not known"])
def test_a_change_in_a_trace_is_seen(change, known, unchecked):
    """Of an object that the trace has built, also if it was described before, and of a part of it."""

    def is_seen(part):
        return pack_live((part, 1.0)).layout is pack((part, 1.0)).layout and table_of(part).layout is pack(part).layout

    @nnx.jit
    def f(m):
        layer = m.layers[1]
        for _ in range(2 if known else 0):
            for part in (m, layer):
                assert is_seen(part)
        change(layer)
        for _ in range(3):
            for part in (layer, m, m.layers[0]):
                assert is_seen(part)

    m = Net()
    del m.scale
    if change is IN_A_TRACE["unnoticed"]:
        m.layers[1].mixed = Mixed()
    if change is IN_A_TRACE["mutable"]:
        m.layers[1].config = nnx.static([0])
    f(m)


def test_what_a_trace_has_built_is_not_walked(monkeypatch, unchecked):
    """Layers that are given to a transform within it, and the model to others, are described by the layout of all."""
    entered = []
    enter = Walk._enter
    monkeypatch.setattr(Walk, "_enter", lambda self, *args: (entered.append(args), enter(self, *args))[1])

    @nnx.jit
    def step(m, x):
        def loss(m):
            for layer in m:
                x_ = nnx.remat(lambda layer, x: x * layer.w)(layer, x)
            return x_.sum()

        grads = nnx.grad(loss)(m)
        nnx.update(m, jax.tree.map(lambda p, g: p - g, nnx.state(m, nnx.Param), grads))

    m = nnx.List([Layer() for _ in range(20)])
    step.lower(m, jnp.ones(2))
    assert len(entered) == len(pack(m).objects)


def test_a_model_that_a_destructor_hands_out_again_has_a_new_table():
    """Before the collector calls it, it clears all weak references to garbage, those of the model to its stamp too."""
    pool = []

    class Trainer:
        def __init__(self, model):
            self.model, self.itself = model, self

        def __del__(self):
            pool.append(self.model)

    scaled = nnx.jit(lambda m, x: x * m.scale * m.layer.w.sum())
    model = nnx.Dict(scale=1.0, layer=Layer())
    before, *_ = [scaled(model, 2.0) for _ in range(3)]
    Trainer(model)
    del model
    gc.collect()
    (model,) = pool
    model.scale = 3.0
    assert scaled(model, 2.0) == 3 * before
    assert nnx.clone(model).scale == 3.0
    model.layer.w.value *= 2
    del model.layer.w
    model.layer.w = param(2)
    assert table_of(model).layout is pack(model).layout
