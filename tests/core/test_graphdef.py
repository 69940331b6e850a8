"""GraphDef: the structure of a model as a value."""

import copy
import gc
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core.graphdef import Avals, structural_differences


class Layer(nnx.Module):
    def __init__(self, n=2, act=nnx.relu):
        self.w = nnx.Param(jnp.ones(n), sharding=(None, "model"))
        self.act, self.n = act, n


class Net(nnx.Module):
    def __init__(self):
        self.first = Layer()
        self.layers = [Layer(), None]
        self.scale = jnp.ones(3)
        self.config = {"sizes": [1, 2]}
        self.pair = (nnx.Param(1.0), "x")


def difference(a, b):
    found = structural_differences(nnx.graphdef(a).layout, nnx.graphdef(b).layout)
    return [(x.path, x.before, x.after) for x in found]


# --- equality ---


def test_equal_structures_are_equal():
    """Models made alike have equal GraphDefs with equal hashes, whatever their values, shapes and dtypes."""
    a, b = Net(), Net()
    b.first.w.value = jnp.zeros((5, 5), jnp.bfloat16)
    assert nnx.graphdef(a) == nnx.graphdef(b)
    assert len({nnx.graphdef(a), nnx.graphdef(b)}) == 1
    assert nnx.graphdef(a) == nnx.split(a)[0] == nnx.split(b, nnx.Param, ...)[0] == nnx.flatten(b)[0]


CHANGES = {
    "static value": lambda m: setattr(m.first, "n", 3),
    "type of a static value": lambda m: setattr(m.first, "n", 2.0),
    "int to bool": lambda m: setattr(m.first, "n", True),
    "inside a static dict": lambda m: m.config["sizes"].append(3),
    "function": lambda m: setattr(m.first, "act", nnx.silu),
    "class": lambda m: setattr(m.first, "__class__", Net),
    "Variable type": lambda m: setattr(m.first.w, "__class__", nnx.BatchStat),
    "metadata": lambda m: m.first.w.set_metadata(sharding=None),
    "new attribute": lambda m: setattr(m.first, "b", None),
    "deleted attribute": lambda m: delattr(m, "scale"),
    "order of attributes": lambda m: (delattr(m, "first"), setattr(m, "first", Layer())),
    "array to number": lambda m: setattr(m, "scale", 1.0),
    "longer list": lambda m: m.layers.append(1),
    "swapped items": lambda m: m.layers.reverse(),
    "sharing": lambda m: m.layers.__setitem__(0, m.first),
    "sharing of a Variable": lambda m: setattr(m.layers[0], "w", m.first.w),
    "cycle": lambda m: setattr(m.first, "n", m),
    "tuple": lambda m: setattr(m, "pair", (nnx.Param(1.0), "x", "y")),
    "static in a tuple": lambda m: setattr(m, "pair", (nnx.Param(1.0), "y")),
    "declared data": lambda m: setattr(m.first, "n", nnx.data(2)),
    "mode": lambda m: (setattr(m, "deterministic", False), m.eval()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_each_change_of_structure_makes_another_graphdef_and_is_told(change):
    """No two unequal GraphDefs have an empty difference, and each entry shows two different sides."""
    a, b = Net(), Net()
    change(b)
    assert nnx.graphdef(a) != nnx.graphdef(b)
    for found in (difference(a, b), difference(b, a)):
        assert found
        assert all(x != y for _, x, y in found)
    assert difference(a, Net()) == difference(b, copy.deepcopy(b)) == []


def test_differences_name_path_and_both_sides():
    """One entry for each place that differs."""
    a, b = Net(), Net()
    b.first.n, b.layers[0].w = 3, nnx.BatchStat(1.0)
    b.extra = nnx.Param(1.0)
    b.again = b.first
    assert difference(a, b) == [
        (("first",), "Layer (first)", "Layer (again)"),
        (("layers", 0, "w"), "Param", "BatchStat"),
        (("again",), "nothing", "Layer (again)"),
        (("extra",), "nothing", "Param (extra)"),
    ]
    b = Net()
    b.first.n = 3
    assert difference(a, b) == [(("first", "n"), "2 (int)", "3 (int)")]


def test_sharing_with_different_objects_is_a_difference():
    """The third of three equal objects is the first in one model and the second in the other."""
    a, b = nnx.Dict(x=Layer(), y=Layer()), nnx.Dict(x=Layer(), y=Layer())
    a.z, b.z = a.x, b.y
    assert nnx.graphdef(a) != nnx.graphdef(b)
    assert difference(a, b) == [(("z",), "Layer (x)", "Layer (y)")]


def test_the_same_mode_reached_in_two_ways():
    """What train() will restore is structure: set by the user, or by eval()."""
    a, b = Net(), Net()
    a.deterministic, b.deterministic = True, False
    b.eval()
    assert nnx.graphdef(a) != nnx.graphdef(b)
    assert len(difference(a, b)) == 1


def test_equality_does_not_keep_models_alive():
    """Structures are interned weakly: without GraphDefs, nothing of a structure stays."""
    import weakref

    class Once(nnx.Module):
        pass

    m = Once()
    m.tag = object()
    ref = weakref.ref(nnx.graphdef(m).layout)
    m.x = 1  # the table of the old structure goes
    nnx.graphdef(m)
    gc.collect()
    assert ref() is None


# --- use ---


def test_a_graphdef_is_a_leafless_pytree():
    """It may be an argument and a result of raw jax.jit, equal ones do not trace again."""
    traces = []

    @jax.jit
    def f(graphdef, state):
        traces.append(1)
        m = nnx.merge(graphdef, state)
        m.first.w += 1
        return nnx.split(m)

    assert jax.tree.leaves(nnx.graphdef(Net())) == []
    for _ in range(2):
        graphdef, state = f(*nnx.split(Net()))
    assert (len(traces), graphdef == nnx.graphdef(Net())) == (1, True)
    assert nnx.merge(graphdef, state).first.w.value.tolist() == [2, 2]


def test_type_and_number_of_leaves():
    """graphdef.type is the class it describes."""
    graphdef = nnx.graphdef(Net())
    assert (graphdef.type, graphdef.num_leaves, nnx.graphdef(nnx.Param(1.0)).type) == (Net, 4, nnx.Param)
    assert [nnx.graphdef(tree).type for tree in ([Net()], {"a": Net()}, (Net(), 1.0))] == [list, dict, tuple]


def test_unflatten_from_leaves():
    """Leaves in the order of the layout make the object."""
    graphdef, state = nnx.split(Net())
    leaves = [dict(state.flat_state())[path] for path in graphdef.layout.leaf_paths]
    made = graphdef.unflatten([x.value if isinstance(x, nnx.Variable) else x for x in leaves])
    assert nnx.state(made) == state


@pytest.mark.parametrize(
    "copier",
    [
        copy.copy,
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: cloudpickle.loads(cloudpickle.dumps(x)),
    ],
)
def test_copies_and_pickles_are_equal(copier):
    """Cycles and sharing included; merge from a copy still checks shapes."""
    m = Net()
    m.itself, m.again = m, m.first
    graphdef, state = nnx.split(m)
    made = copier(graphdef)
    assert (made == graphdef, hash(made) == hash(graphdef)) == (True, True)
    assert nnx.merge(made, state).itself.again is not m.first
    with pytest.raises(ValueError, match=r"scale: expected shape \(3,\)"):
        nnx.merge(made, nnx.map_state(lambda path, x: jnp.ones(7) if path == ("scale",) else x, state))


# --- repr ---


def test_repr():
    """Written as the object without values: attributes in order, second references by path, metadata short."""
    m = Net()
    m.again = m.first
    m.layers[0].w = m.first.w
    m.dtype, m.array = jnp.float32, nnx.static(np.arange(2))
    assert (
        repr(nnx.graphdef(m))
        == """GraphDef(
  Net(
    first=Layer(
      w=Param(out_sharding=(None, 'model')),
      act=relu, n=2,
    ),
    layers=List([
      Layer(
        w=<Param at first.w>,
        act=relu, n=2,
      ),
      None,
    ]),
    scale=array,
    config=Dict({
      'sizes': List([1, 2]),
    }),
    pair=pytree (*, *)(
      [0]: Param(),
      [1]: 'x',
    ),
    again=<Layer at first>,
    dtype=float32, array=int64[2],
  )
)"""
    )


def test_typed_keys_are_compared_by_shape_and_dtype(monkeypatch):
    """Asking a key for its aval takes 20 us, and gives another object each time."""
    leaves = [jnp.ones(2), jax.random.key(0), jax.random.split(jax.random.key(1))]
    others = jax.random.split(jax.random.key(1, impl="rbg"))
    asked = []
    monkeypatch.setattr(type(others), "aval", property(lambda key: asked.append(key)))
    avals = Avals(leaves)
    assert avals.fit([x.copy() for x in leaves[:1]] + leaves[1:])
    assert not avals.fit([leaves[0], leaves[2], leaves[1]])
    assert not avals.fit([leaves[0], leaves[1], others])
    assert not avals.fit([leaves[0], jnp.ones(()), leaves[2]])
    assert not avals.fit(leaves[:2])
    assert not asked
    assert not avals.fit([leaves[1], leaves[1], leaves[2]])


def test_the_rows_of_a_graphdef():
    """One for each node and Variable."""
    graphdef = nnx.graphdef(nnx.Dict(a=nnx.Param(1.0), b=nnx.List([2])))
    assert [row.type for row in graphdef.nodes] == [nnx.Dict, nnx.Param, nnx.List]
