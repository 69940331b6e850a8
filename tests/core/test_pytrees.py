"""Modules, Lists and Dicts under raw JAX: ordinary pytrees, in which sharing and cycles survive."""

import collections
import copy
import dataclasses
import gc
import operator
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlib as nnx
from nnxlib.core import pytrees
from nnxlib.core.tables import table_of

is_variable = lambda x: isinstance(x, nnx.Variable)


class Layer(nnx.Module):
    def __init__(self, n=2):
        self.w = nnx.Param(jnp.ones(n), layer="x")
        self.n = n

    def __call__(self, x):
        return x * self.w


class Net(nnx.Module):
    def __init__(self):
        self.zeta = Layer()
        self.layers = [Layer(), None, {"a": Layer(), "sizes": [1, 2]}]
        self.scale = jnp.full((), 2.0)
        self.pair = (nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(1)))
        self.config = {"sizes": [1, 2]}
        self.act = nnx.relu

    def __call__(self, x):
        return self.act(self.zeta(x) + self.layers[0](x) * self.scale)


class Tied(nnx.Module):
    def __init__(self):
        self.encode = Layer()
        self.decode = self.encode
        self.bias = nnx.Param(jnp.zeros(2))

    def __call__(self, x):
        return self.decode(self.encode(x)) + self.bias


def keys(tree, **kwargs):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree, **kwargs)[0]]


# --- flattening ---


def test_leaves_and_keys():
    """One leaf for each Variable and array, in the order of paths, under keys that one could type."""
    m = Net()
    assert keys(m) == [
        ".layers[0].w.value",
        ".layers[2].a.w.value",
        ".pair[0].value",
        ".pair[1].value",
        ".scale",
        ".zeta.w.value",
    ]
    assert jax.tree.leaves(m)[-1] is m.zeta.w.value


def test_keys_and_paths_agree():
    """The leaves of a Module under JAX are those of its State, in the same order."""
    m = Net()
    assert all(a is b for a, b in zip(jax.tree.leaves(m), jax.tree.leaves(nnx.state(m)), strict=True))


@pytest.mark.parametrize(
    "make", [Net, Tied, nnx.List, nnx.Dict, lambda: nnx.List([1, "a"]), lambda: nnx.Dict({1: jnp.ones(1), "b": None})]
)
def test_unflatten_is_the_inverse(make):
    """Flatten and unflatten give an equal graph of new objects with the very same values."""
    m = make()
    leaves, treedef = jax.tree.flatten(m)
    back = treedef.unflatten(leaves)
    assert nnx.graphdef(back) == nnx.graphdef(m)
    assert back is not m
    assert jax.tree.structure(back) == treedef
    assert all(a is b for a, b in zip(jax.tree.leaves(back), leaves, strict=True))


def test_tree_map_keeps_everything_but_the_values():
    """jax.tree.map gives a Module with metadata, static values and order of attributes; the original stays."""
    m = Net()
    doubled = jax.tree.map(lambda x: x * 2, m)
    assert (type(doubled), doubled.zeta.w.layer, doubled.zeta.n, list(vars(doubled))) == (Net, "x", 2, list(vars(m)))
    assert (doubled.zeta.w.value.tolist(), doubled.scale.item(), m.zeta.w.value.tolist()) == ([2, 2], 4, [1, 1])
    assert jax.tree.map(lambda x, y: x + y, m, doubled).scale.item() == 6


def test_static_containers_of_a_copy_are_its_own():
    """Editing a static list of a mapped Module leaves the original alone."""
    m = Net()
    jax.tree.map(lambda x: x, m).config["sizes"].append(3)
    assert m.config == {"sizes": [1, 2]}


def test_is_leaf_on_variables_and_modules():
    """`is_leaf` may stop at Variables or at submodules."""
    m = Net()
    found = jax.tree.leaves(m, is_leaf=is_variable)
    assert [is_variable(x) for x in found] == [True, True, True, True, False, True]
    assert found[-1] is m.zeta.w
    assert keys(m, is_leaf=lambda x: isinstance(x, Layer)) == [
        ".layers[0]",
        ".layers[2].a",
        ".pair[0].value",
        ".pair[1].value",
        ".scale",
        ".zeta",
    ]
    replaced = jax.tree.map(lambda v: v.replace(0.0) if is_variable(v) else v, m, is_leaf=is_variable)
    assert (replaced.zeta.w.value, type(replaced.pair[0])) == (0.0, nnx.Param)


def test_tree_map_with_path():
    """Paths are seen by the function."""
    named = jax.tree_util.tree_map_with_path(lambda path, x: jax.tree_util.keystr(path), Net())
    assert (named.zeta.w.value, named.scale) == (".zeta.w.value", ".scale")


def test_treedefs_compare_structure():
    """Equal for Modules made alike; different after any static change, also one inside a static dict."""
    structure = jax.tree.structure
    assert structure(Net()) == structure(Net())
    assert hash(structure(Net())) == hash(structure(Net()))
    for change in (
        lambda m: setattr(m, "act", nnx.silu),
        lambda m: setattr(m.zeta, "n", 3),
        lambda m: m.config["sizes"].append(3),
        lambda m: m.layers.append(None),
        lambda m: m.zeta.w.set_metadata(layer="y"),
        lambda m: setattr(m, "scale", nnx.Param(1.0)),
        lambda m: setattr(m.zeta, "n", nnx.data(2)),
    ):
        m = Net()
        change(m)
        assert structure(m) != structure(Net())


def test_a_treedef_does_not_follow_later_changes():
    """A treedef is a value: editing the live model, static lists included, does not edit it."""
    m = Net()
    leaves, treedef = jax.tree.flatten(m)
    m.config["sizes"].append(3)
    m.layers.append(Layer())
    m.zeta.n = 7
    assert treedef == jax.tree.structure(Net())
    assert treedef.unflatten(leaves).config == {"sizes": [1, 2]}
    assert treedef != jax.tree.structure(m)


def _in_another_thread(f):
    thread = threading.Thread(target=f)
    thread.start()
    thread.join()


@pytest.mark.parametrize("is_told", [True, False])
def test_a_change_by_another_thread_while_a_shape_is_found(is_told, monkeypatch):
    """What the node holds then is not taken for the shape of all nodes that were like it."""

    class New(Layer):
        """A class whose shapes are not known."""

    m, shape_of = New(), pytrees._shape_of

    def interrupted(node):
        monkeypatch.undo()
        write = setattr if is_told else object.__setattr__  # the note of the change comes after it
        _in_another_thread(lambda: write(m, "n", 7))
        return shape_of(node)

    monkeypatch.setattr(pytrees, "_shape_of", interrupted)
    jax.tree.leaves(m)
    m.n = 7
    for node in (New(), m, New()):
        assert jax.tree.map(lambda x: x, node).n == node.n


# --- raw transforms ---


def test_raw_jit():
    """Modules are arguments and results of jax.jit; an equal structure is not traced again."""
    traces = []

    @jax.jit
    def f(m, x):
        traces.append(1)
        m.zeta.w += 1
        return m, m(x)

    for _ in range(2):
        m = Net()
        new, y = f(m, jnp.ones(2))
        assert (y.tolist(), new.zeta.w.value.tolist(), m.zeta.w.value.tolist()) == ([4, 4], [2, 2], [1, 1])
    assert len(traces) == 1
    new.zeta.w.value = jnp.zeros(2)
    assert new.zeta.w.value.tolist() == [0, 0]


def test_raw_grad_is_shaped_like_the_module():
    """jax.grad gives a Module of gradients, which jax.tree.map and optax take."""
    m = Net()
    loss = lambda m, x: (m(x) ** 2).sum()
    grads = jax.grad(loss)(m, jnp.ones(2))
    assert (type(grads), grads.zeta.w.value.tolist(), grads.scale.item()) == (Net, [6, 6], 12)
    tx = optax.sgd(0.1)
    updates, _ = tx.update(grads, tx.init(m))
    assert loss(optax.apply_updates(m, updates), jnp.ones(2)) < loss(m, jnp.ones(2))


def test_tied_weights_stay_tied():
    """A shared Module has one gradient, the sum over its uses, and stays shared in results."""
    m = Tied()
    x = jnp.full(2, 3.0)
    assert keys(m) == [".bias.value", ".decode.w.value"]
    assert keys(nnx.List([m])) == ["[0].bias.value", "[0].decode.w.value"]
    grads = jax.grad(lambda m: m(x).sum())(m)
    assert grads.encode is grads.decode
    assert grads.encode.w.value.tolist() == [6, 6]
    assert [g.tolist() for g in jax.tree.leaves(nnx.grad(lambda m: m(x).sum())(m))] == [
        g.tolist() for g in jax.tree.leaves(grads)
    ]
    new = jax.jit(lambda m: jax.tree.map(lambda x: x + 1, m))(m)
    assert new.encode is new.decode
    assert new.encode.w.value.tolist() == [2, 2]


def test_tied_variables_and_arrays():
    """One Variable in two places; is_leaf still finds it, once."""
    w = nnx.Param(jnp.ones(2))
    m = nnx.Dict(a=[w, jnp.ones(1)], b=w)
    found = jax.tree.leaves(m, is_leaf=is_variable)
    assert (found[0] is w, len(found)) == (True, 2)
    new = jax.tree.map(lambda x: x * 2, m)
    assert (new.a[0] is new.b, new.b.value.tolist(), new.a[1].tolist()) == (True, [2, 2], [2])


def test_cycles_end():
    """A Module that refers to itself flattens, maps and jits."""
    m = Layer()
    m.itself, m.child = m, nnx.Dict(parent=m)
    new = jax.jit(lambda m: jax.tree.map(lambda x: x * 2, m))(m)
    assert (new.itself is new, new.child.parent is new, new.w.value.tolist()) == (True, True, [2, 2])


def test_cycles_of_lists_without_data_end():
    """The search for data among their items does."""
    a, b = nnx.List([1]), nnx.List([2])
    a.append(b)
    b.append(a)
    m = nnx.Dict(a=a)
    assert jax.tree.leaves(m) == []
    a.append(nnx.Param(jnp.float32(3)))
    assert jax.tree.leaves(m) == [3]


def test_sharing_that_appears_and_goes():
    """Whether a graph is a tree is known anew after each change, from whichever Module one starts."""
    m = nnx.Dict(a=Layer(), b=[Layer()])
    count = lambda: len(jax.tree.leaves(m))
    assert count() == 2
    m.b[0] = m.a
    assert (count(), len(jax.tree.leaves(m.b))) == (1, 1)
    m.b[0] = Layer()
    assert count() == 2
    m.b[0].w = m.a.w
    assert (count(), len(jax.tree.leaves(m.a))) == (1, 1)
    m.b.append(m.b)
    assert (count(), len(jax.tree.leaves(m.b))) == (1, 1)


def test_an_rngs_in_raw_jit():
    """Random streams are pytrees too: keys drawn inside, and the count comes out with the result."""
    f = jax.jit(lambda rngs: (jax.random.uniform(rngs.params()), rngs))
    x, rngs = f(nnx.Rngs(0))
    y, rngs = f(rngs)
    assert (x != y, rngs.params.count.value.item()) == (True, 2)


def test_lists_of_caches_and_models_together():
    """A model with a list of cache Modules goes in and out of raw jit."""
    caches = [nnx.Dict(k=nnx.Cache(jnp.zeros(2))) for _ in range(2)]

    @jax.jit
    def decode(m, caches, x):
        for cache in caches:
            cache.k.value = cache.k + m.zeta(x)
        return caches

    caches = decode(Net(), caches, jnp.ones(2))
    assert [c.k.value.tolist() for c in decode(Net(), caches, jnp.ones(2))] == [[2, 2], [2, 2]]


def test_other_raw_transforms():
    """vmap over a stacked Module, scan with a Module as carry, remat, eval_shape, checkpointed grad."""
    stacked = jax.vmap(lambda k: Layer())(jnp.arange(3))
    assert stacked.w.shape == (3, 2)
    assert jax.vmap(lambda m, x: m(x), (0, None))(stacked, jnp.ones(2)).shape == (3, 2)

    def body(m, x):
        m.w += x
        return m, m.w.sum()

    final, ys = jax.lax.scan(body, Layer(), jnp.ones(3))
    assert (final.w.value.tolist(), ys.tolist()) == ([4, 4], [4, 6, 8])
    assert jax.lax.scan(lambda x, m: (m(x), None), jnp.ones(2), stacked)[0].tolist() == [1, 1]
    assert jax.eval_shape(lambda m: m, Layer()).w.value == jax.ShapeDtypeStruct((2,), jnp.float32)
    assert jax.grad(jax.checkpoint(lambda m: (m(1.0) ** 2).sum()))(Layer()).w.value.tolist() == [2, 2]
    assert jax.lax.cond(True, lambda m: m.w.value, lambda m: -m.w.value, Layer()).tolist() == [1, 1]


def test_a_module_of_axes_is_a_prefix_for_raw_vmap():
    """With one axis for each array, inside the Variables or in place of them, or None."""
    models, x = nnx.vmap(lambda rngs: nnx.Linear(2, 3, rngs=rngs))(nnx.Rngs(0).split(4)), jnp.ones((4, 2))
    expected = nnx.vmap(lambda model, x: model(x))(models, x)
    is_variable = lambda x: isinstance(x, nnx.Variable)
    for axes in (jax.tree.map(lambda _: 0, models), jax.tree.map(lambda _: 0, models, is_leaf=is_variable)):
        got = jax.vmap(lambda model, x: model(x), in_axes=(axes, 0))(models, x)
        assert jnp.array_equal(got, expected)
    models.bias.value = jnp.ones(3)
    axes = jax.tree.map_with_path(lambda path, _: None if "bias" in str(path) else 0, models)
    got = jax.vmap(lambda model, x: model(x), in_axes=(axes, 0))(models, x)
    assert jnp.allclose(got, expected + 1)


def test_lists_of_modules_and_registered_dataclasses():
    """Modules inside ordinary containers and registered dataclasses are arguments and results."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        model: Layer
        step: jax.Array

    def step(state, extra):
        state.model.w += len(extra)
        return State(state.model, state.step + 1), extra[::-1]

    a, b = Layer(), Layer(3)
    state, (first, _) = jax.jit(step)(State(Layer(), jnp.zeros(())), [a, b])
    assert (state.model.w.value.tolist(), state.step.item(), first.n) == ([3, 3], 1, 3)


def test_a_variable_holding_a_pytree():
    """Its value is flattened by JAX like any pytree."""
    m = nnx.Dict(a=nnx.Param({"x": jnp.ones(2), "y": jnp.zeros(1)}))
    assert keys(m) == [".a.value['x']", ".a.value['y']"]


def test_static_and_mixed_lists():
    """A list of plain numbers is one static value of a Module; by itself it flattens as a list does."""
    m = nnx.Dict(sizes=[1, 2], mixed=[jnp.ones(1), 3])
    assert len(jax.tree.leaves(m)) == 1
    assert jax.tree.leaves(nnx.List([1, 2])) == [1, 2]
    assert jax.tree.map(lambda x: x * 2, m).mixed[1] == 3


def test_numpy_arrays_and_declared_data_are_leaves():
    """np.ndarray attributes and numbers declared data are traced."""
    m = nnx.Dict(a=np.ones(2))
    m2 = Layer()
    m2.steps = nnx.data(3)
    assert jax.jit(lambda m: m.a * 2)(m).tolist() == [2, 2]
    assert jax.tree.leaves(m2)[0] == 3
    assert jax.tree.map(lambda x: x, m2).steps == 3


def test_none_leaves_may_stand_in():
    """Unflattening with None or other objects in place of arrays works, as JAX itself does."""
    m = Net()
    leaves, treedef = jax.tree.flatten(m)
    assert treedef.unflatten([None] * len(leaves)).zeta.w.value is None
    tied = jax.tree.map(lambda x: None, Tied())
    assert tied.encode.w.value is None
    assert jax.tree.map(lambda x: x, m, is_leaf=lambda x: x is None).layers[1] is None


def test_reading_from_many_places_leaves_no_trace_behind():
    """Flattening under a trace does not change the live objects."""
    model = Net()
    before = {id(x): x for x in jax.tree.leaves(model)}
    jax.jit(lambda x: sum(leaf.sum() for leaf in jax.tree.leaves(model)) + x)(1.0)
    assert {id(x): x for x in jax.tree.leaves(model)}.keys() == before.keys()


def test_deep_and_tied_chains():
    """1,000 levels flatten and unflatten without a recursion error, tied at the end or not."""

    def chain(tied):
        node = Layer()
        end = node.w
        for _ in range(1000):
            node = nnx.Dict(next=node)
        if tied:
            node.w = end
        return node

    for tied in (False, True):
        m = chain(tied)
        leaves, treedef = jax.tree.flatten(m)
        assert len(leaves) == 1
        assert nnx.graphdef(treedef.unflatten(leaves)) == nnx.graphdef(m)
        assert jax.jit(lambda m: jax.tree.leaves(m)[0] * 2)(m).tolist() == [2, 2]


def test_copies_of_treedefs():
    """A treedef of a Module may be deep-copied."""
    treedef = jax.tree.structure(Net())
    assert copy.deepcopy(treedef) == treedef


# --- exported programs ---


class Exported(nnx.Module):
    """Tied weights, an activation that is a jitted function, and a static setting."""

    def __init__(self):
        self.first = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.second, self.act, self.scale = self.first, jax.nn.relu, 2.0

    def __call__(self, x):
        return self.scale * self.act(self.second(self.first(x)))


EXPORTED = {
    "Module": lambda m: (lambda m, x: m(x), (m,)),
    "State": lambda m: (lambda state, x: nnx.merge(nnx.graphdef(m), state)(x), (nnx.state(m),)),
    "GraphDef": lambda m: (lambda graphdef, state, x: nnx.merge(graphdef, state)(x), nnx.split(m)),
    "GraphState": lambda m: (lambda whole, x: nnx.merge(whole)(x), (nnx.unpack(m),)),
    "FlatState": lambda m: (
        lambda flat, x: nnx.merge(nnx.graphdef(m), nnx.from_flat_state(flat))(x),
        (nnx.to_flat_state(nnx.state(m)),),
    ),
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_a_program_is_exported_and_read_back(kind):
    """jax.export of a function of each kind of pytree, also as bytes."""
    m, x = Exported(), jnp.ones((1, 2))
    f, args = EXPORTED[kind](m)
    exported = jax.export.export(jax.jit(f))(*args, x)
    assert jnp.array_equal(exported.call(*args, x), m(x))
    read = jax.export.deserialize(exported.serialize())
    assert jnp.array_equal(read.call(*args, x), m(x))


def test_a_class_defined_twice_can_still_be_exported_in_memory():
    """As in a notebook; as bytes, only the first of that name."""

    def define():
        class Again(nnx.Module):
            def __init__(self):
                self.w = nnx.Param(jnp.ones(2))

        return Again

    define()
    m = define()()
    exported = jax.export.export(jax.jit(lambda m: m.w * 2.0))(m)
    assert jnp.array_equal(exported.call(m), 2 * jnp.ones(2))
    with pytest.raises(ValueError, match="unregistered type"):
        exported.serialize()


def test_levels_are_looked_at_again_when_something_changes():
    """What is noted on a node about how it flattens ends with the next structural change, of it or of what it holds."""

    @dataclasses.dataclass
    class Options:  # can be changed unseen
        rate: float = 0.1

    class Block(nnx.Module):
        def __init__(self):
            self.w, self.sizes, self.options, self.flag = nnx.Param(jnp.zeros(2)), [1, 2], Options(), True

    class Net(nnx.Module):
        def __init__(self):
            self.block, self.b = Block(), nnx.Param(jnp.ones(2))

    def leaves(x):
        return len(jax.tree.leaves(x))

    net = Net()
    assert (leaves(net), leaves(net.block)) == (2, 1)
    before = [jax.tree.structure(net), jax.tree.structure(net.block)]
    net.block.sizes.append(jnp.ones(3))  # a list of static values is now one with data
    assert (leaves(net), leaves(net.block)) == (3, 2)
    net.block.sizes.pop()
    assert [jax.tree.structure(net), jax.tree.structure(net.block)] == before
    net.block.flag = False
    assert jax.tree.structure(net) != before[0]
    net.block.flag = True
    assert jax.tree.structure(net) == before[0]
    net.block.options.rate = 0.2
    assert jax.tree.structure(net.block) != before[1]
    assert jax.tree.structure(net) != before[0]
    del net.block.options
    net.block.w.value = jnp.ones(2)
    np.testing.assert_array_equal(jax.tree.leaves(net)[1], jnp.ones(2))
    net.block.extra = net.b  # no tree any more
    assert leaves(net) == 2


def test_what_jax_unflattened_flattens_without_being_walked(monkeypatch):
    """A loop over plain ``jax.jit`` has another model at each step; to walk each took ten times as long."""
    m = Net()
    step = jax.jit(lambda m: jax.tree.map(lambda x: x + 1, m))
    made, structure = step(m), jax.tree.structure(m)
    monkeypatch.setattr(pytrees, "table_of", None)
    for n in (3, 4, 5):
        made = step(made)
        assert jax.tree.structure(made) == structure
        assert [x.max() for x in jax.tree.leaves(made)] == [n, n, n, n, n + 1, n]
    assert step._cache_size() == 1


CHANGES = {
    "nothing": lambda m: None,
    "a static value": lambda m: setattr(m.zeta, "n", 3),
    "a static list": lambda m: m.config["sizes"].append(3),
    "a new attribute": lambda m: setattr(m.zeta, "b", jnp.ones(1)),
    "a new item": lambda m: m.layers.append(Layer()),
    "an item that is gone": lambda m: m.layers[2].pop("a"),
    "a shared Variable": lambda m: setattr(m.zeta, "w", m.layers[0].w),
    "a shared Module": lambda m: setattr(m, "other", m.zeta),
    "a cycle": lambda m: setattr(m.zeta, "parent", m),
    "the class": lambda m: setattr(m.zeta, "__class__", Tied),
    "a declaration": lambda m: setattr(m.zeta, "n", nnx.data(2)),
    "metadata": lambda m: m.zeta.w.set_metadata(layer="y"),
}


@pytest.mark.parametrize("flattened", [False, True], ids=["at once", "flattened before"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_what_jax_unflattened_is_seen(change, flattened):
    m = jax.tree.map(lambda x: x, Net())
    if flattened:
        jax.tree.leaves(m)
    CHANGES[change](m)
    fresh = copy.deepcopy(m)
    for x, y in ((m.zeta, fresh.zeta), (m.layers, fresh.layers), (m, fresh)):
        assert keys(x) == keys(y)
        assert jax.tree.structure(x) == jax.tree.structure(y)


def test_a_module_in_a_pytree_in_what_jax_unflattened_is_watched():
    """Its Variable becomes one that is elsewhere, too: a change of the inner Module alone."""
    m = jax.tree.map(lambda x: x, nnx.Dict(w=nnx.Param(1.0), box=collections.OrderedDict(part=Layer())))
    assert keys(m) == [".box['part'].w.value", ".w.value"]
    m.box["part"].w = m.w
    assert len(jax.tree.leaves(m)) == 1


@dataclasses.dataclass
class Moments:
    """A pytree of another library, which can change unseen."""

    mean: nnx.Variable


jax.tree_util.register_dataclass(Moments, ["mean"], [])


def an_optimizer():
    return nnx.ModelAndOptimizer(Layer(), optax.adam(0.1), wrt=nnx.Param)


def test_an_optimizer_that_jax_unflattened_flattens_without_being_walked(monkeypatch):
    """What Optax has made is a tuple of States: to walk it at each step took nine times as many function calls."""
    o = an_optimizer()
    step = jax.jit(lambda o: jax.tree.map(lambda x: x + 1, o))
    made, structure = step(o), jax.tree.structure(o)
    monkeypatch.setattr(pytrees, "table_of", None)
    for _ in range(3):
        made = step(made)
        assert jax.tree.structure(made) == structure
    assert (step._cache_size(), made.step.value) == (1, 4)


@pytest.mark.parametrize("is_leaf", [None, lambda x: not jax.tree.leaves(x)], ids=["leaves", "and what is empty"])
def test_anything_in_the_place_of_the_arrays_of_an_optimizer_leaves_it_a_tree(is_leaf):
    """Orbax maps an object that it saves to the names of its leaves, of which an empty tuple of Optax is one."""
    o = an_optimizer()
    names = jax.tree_util.tree_map_with_path(lambda path, _: tuple(map(str, path)), o, is_leaf=is_leaf)
    for _ in range(2):
        same = jax.tree.map(lambda x, name: x, o, names, is_leaf=is_leaf)
        assert jax.tree.structure(same) == jax.tree.structure(o)


OPTIMIZER_CHANGES = {
    "nothing": lambda o: None,
    "a value": lambda o: setattr(o.opt_state[0].mu["w"], "value", jnp.zeros(2)),
    "a new item": lambda o: operator.setitem(o.opt_state[0].mu, "b", nnx.Param(jnp.ones(1))),
    "an item that is gone": lambda o: operator.delitem(o.opt_state[0].mu, "w"),
    "an item shared in the State": lambda o: operator.setitem(o.opt_state[0].mu, "w", o.opt_state[0].nu["w"]),
    "an item shared with the model": lambda o: operator.setitem(o.opt_state[0].mu, "w", o.model.w),
    "a Variable of another pytree": lambda o: setattr(o.moments, "mean", o.model.w),
    "the model in a State": lambda o: operator.setitem(o.opt_state[0].mu, "w", o.model),
    "an item of a list in a dict": lambda o: operator.setitem(o.opt_state[-1]["a"], 0, o.model.w),
}


@pytest.mark.parametrize("flattened", [False, True], ids=["at once", "flattened before"])
@pytest.mark.parametrize("change", OPTIMIZER_CHANGES)
def test_what_changes_in_an_optimizer_that_jax_unflattened_is_seen(change, flattened):
    o = an_optimizer()
    if "another" in change:
        o.moments = nnx.data(Moments(nnx.Param(jnp.ones(1))))
    o.opt_state = (*o.opt_state, {"a": [nnx.Param(jnp.ones(1))]})
    o = jax.tree.map(lambda x: x, o)
    if flattened:
        jax.tree.leaves(o)
    OPTIMIZER_CHANGES[change](o)
    fresh = copy.deepcopy(o)
    assert keys(o) == keys(fresh)
    assert jax.tree.structure(o) == jax.tree.structure(fresh)


def test_settings_in_slots_of_what_jax_unflattened_are_compared():
    class Slotted(nnx.Module):
        __slots__ = ("sizes",)

        def __init__(self):
            self.w, self.b, self.sizes = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2)), nnx.static({1, 2})

    m = jax.tree.map(lambda x: x, Slotted())
    before = jax.tree.structure(m)
    m.sizes.add(3)
    assert (jax.tree.structure(m) != before, jax.tree.structure(Slotted()) == before) == (True, True)


def test_objects_that_jax_puts_in_several_places_are_shared():
    """`jax.tree.map` with ``is_leaf`` may put one Variable, or one Module, in the place of several."""
    p, layer = nnx.Param(jnp.ones(2)), Layer()
    tied = jax.tree.map(lambda x: p if is_variable(x) else x, Net(), is_leaf=is_variable)
    assert (tied.zeta.w is p, tied.pair[0] is p, len(jax.tree.leaves(tied))) == (True, True, 2)
    is_layer = lambda x: isinstance(x, Layer)
    tied = jax.tree.map(lambda x: layer if is_layer(x) else x, Net(), is_leaf=is_layer)
    assert len(jax.tree.leaves(tied)) == len(jax.tree.leaves(Net())) - 2


@pytest.mark.parametrize("put", [lambda: nnx.Param(jnp.ones(2)), Layer], ids=["a Variable", "a Module"])
def test_objects_that_jax_puts_in_several_places_of_the_state_of_an_optimizer_are_shared(put):
    x = put()
    tied = jax.tree.map(lambda _: x, an_optimizer(), is_leaf=is_variable)
    assert (tied.opt_state[0].mu["w"] is x, len(jax.tree.leaves(tied))) == (True, 1)


def test_what_is_shared_at_each_of_many_levels_is_visited_once():
    pair = nnx.Dict(a=nnx.Param(jnp.ones(1)), b=nnx.Param(jnp.ones(1)))
    tree = pair
    for _ in range(40):
        tree = jax.tree.map(lambda x, below=tree: below, pair, is_leaf=is_variable)
    assert len(jax.tree.leaves(tree)) == 2


@pytest.mark.parametrize("way", [jax.tree.leaves, lambda m: jax.tree.leaves(jax.tree.map(lambda x: x, m))])
def test_static_values_are_freed_with_the_last_model_that_has_them(way):
    class Setting:
        pass

    net = Net()
    net.setting = Setting()
    reference = weakref.ref(net.setting)
    gc.disable()
    try:
        way(net)
        del net
        assert reference() is None
    finally:
        gc.enable()


def test_what_stands_in_for_an_array_is_a_leaf():
    """So a Module of axes, of shapes or of names, made by `jax.tree.map`, matches the Module of arrays."""

    @nnx.dataclass
    class Point(nnx.Pytree):
        x: jax.Array
        y: jax.Array
        unit: str = "m"

    points = Point(jnp.ones((3, 2)), jnp.ones((3, 2)))
    axes = jax.tree.map(lambda x: 0, points)
    assert jax.vmap(lambda p: p.x.sum(), in_axes=(axes,))(points).tolist() == [2, 2, 2]
    assert jax.tree.map(lambda axis, x: x.shape[axis], axes, points).y == 3
    assert jax.tree.leaves(jax.tree.map(lambda x: x.shape, points)) == [3, 2, 3, 2]
    assert jax.tree.structure(jax.tree.map(lambda x: "name", points)) == jax.tree.structure(points)
    named = jax.tree.map(lambda x: None, points)
    assert (named.x, jax.tree.leaves(named)) == (None, [])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Both:
    """A pytree that nnxlib does not know, whose fields can be set unseen."""

    left: object = 1
    right: object = None


UNSEEN = {
    "a setting becomes data": lambda m, both: setattr(both, "right", jnp.ones(1)),
    "data becomes a setting": lambda m, both: setattr(both, "left", 3),
    "sharing inside": lambda m, both: setattr(both, "right", both.left),
    "sharing with another layer": lambda m, both: setattr(both, "right", m.other.w),
    "a Module": lambda m, both: setattr(both, "right", Layer()),
}


@pytest.mark.parametrize("change", UNSEEN)
@pytest.mark.parametrize("held", [Both(), Both(2, 3), "data"], ids=["settings", "other settings", "data"])
@pytest.mark.parametrize("put", [lambda x: x, lambda x: [x], lambda x: (x, 1)], ids=["bare", "in a list", "in a tuple"])
def test_what_changes_unseen_is_seen_when_flattened(change, held, put):
    """Whether a graph is a tree, and what in it is data, is as of now, from the root and from what is below."""
    both = Both(nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(2))) if held == "data" else copy.copy(held)
    m = nnx.Dict(part=nnx.Dict(inner=nnx.Dict(both=put(both), n=1)), other=Layer())
    parts = [m.part.inner, m.part, m]
    for x in (m, *parts):
        jax.tree.leaves(x)
    UNSEEN[change](m, both)
    for x in (*parts, *parts[::-1]):
        fresh = copy.deepcopy(x)
        assert keys(x) == keys(fresh)
        assert jax.tree.structure(x) == jax.tree.structure(fresh)


@pytest.mark.parametrize("inside", [False, True], ids=["attribute", "item of a list in a list"])
def test_a_static_value_that_changed_is_in_the_treedef(inside):
    """Also when a table was patched after the change, and though only one node has changed."""
    m = nnx.Dict(layer=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), sizes=[1, [2]])
    seen = set()
    for n in (1, 2, 3, 1):
        if inside:
            m.sizes[1][0] = n
        else:
            m.layer.in_features = n
        table_of(m)
        leaves, treedef = jax.tree.flatten(m)
        made = treedef.unflatten(leaves)
        assert (made.sizes[1][0] if inside else made.layer.in_features) == n
        seen.add(treedef)
    assert len(seen) == 3


def test_a_treedef_shows_static_values():
    """So that an error of JAX about two models, which prints both treedefs, tells them apart."""
    assert "Dropout(axis_name=None, broadcast_dims=(), deterministic=False, rate=0.1" in repr(
        jax.tree.structure(nnx.Dict(layer=nnx.Dropout(0.1)))
    )


def test_keys_and_treedefs_of_shared_graphs_are_compared_and_hashed():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    layer.tied = layer.kernel
    for _ in range(2):
        (bias, _), (kernel, _) = jax.tree_util.tree_flatten_with_path(layer)[0]
        assert {bias: 1, kernel: 2}[kernel] == 2
        assert bias != kernel
        assert (bias[0].name, kernel[0].name) == ("bias", "kernel")
    shared, tree = jax.tree.structure(layer), jax.tree.structure(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    assert {shared: 1, tree: 2}[jax.tree.structure(nnx.clone(layer))] == 1
    assert "Linear with shared parts" in repr(shared)


def test_a_model_with_tied_weights_is_saved_and_restored_as_a_whole(tmp_path):
    """The keys of its leaves have names, which Orbax needs; the weights are written once, and stay tied."""
    ocp = pytest.importorskip("orbax.checkpoint")

    def make(seed):
        net = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(seed)), nnx.Linear(2, 2, rngs=nnx.Rngs(seed + 1)))
        net.layers[1].kernel = net.layers[0].kernel
        return net

    net = make(0)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", net)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "1", nnx.eval_shape(make, 5))
    assert restored.layers[1].kernel is restored.layers[0].kernel
    assert (restored.layers[0].kernel == net.layers[0].kernel).all()


class Plain:
    """Has a `__dict__` of its own, so nnxlib is not told of what is written there."""


class Unwatched(Plain, nnx.Module):
    def __init__(self):
        self.n = 1
        self.part = nnx.List([nnx.Param(jnp.ones(1))])


def test_an_object_that_can_change_unnoticed_is_flattened_anew():
    model = nnx.Dict(inner=Unwatched())
    scaled, jitted = (jit(lambda model: model["inner"].n * model["inner"].part[0]) for jit in (jax.jit, nnx.jit))
    for n in (1, 2, 3, 4, 5, 6):
        model["inner"].__dict__["n"] = n
        assert scaled(model) == jitted(model) == n


@pytest.mark.parametrize("place", [lambda x: x, lambda x: (x,)], ids=["attribute", "in a tuple"])
def test_an_object_that_can_change_unnoticed_is_flattened_anew_with_what_holds_it(place):
    """Its Variable becomes one that is elsewhere, too."""
    inner = Unwatched()
    model = nnx.Dict(w=nnx.Param(1.0), held=place(inner))
    assert len(jax.tree.leaves(model)) == 2
    inner.__dict__["part"] = model.w
    assert len(jax.tree.leaves(model)) == 1


def test_a_dict_of_settings_has_the_keys_of_a_dict():
    """Code that maps over settings asks a key for its ``key``; those of a Dict with data are names, as in flax.nnx."""
    m = nnx.Module()
    m.sizes = {"a": 1, "b": [2, 3]}
    m.layers = {"a": nnx.Param(jnp.ones(1))}

    def paths(tree):
        return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]

    assert paths(m.sizes) == paths({"a": 1, "b": [2, 3]})
    assert paths(copy.deepcopy(m).sizes) == paths(m.sizes)
    assert paths(jax.tree.map(lambda x: x + 1, m.sizes)) == paths(m.sizes)
    assert paths(m.layers) == [".a.value"]


@pytest.mark.parametrize("place", [lambda v: v, lambda v: nnx.Dict(v=v), lambda v: nnx.state(nnx.Dict(v=v))])
def test_metadata_that_are_edited_in_place_are_part_of_a_program_as_they_are(place):
    """Plain JAX traces again; an edit in a trace, or of what jax.tree.map has made, stays there."""
    variable = nnx.Param(jnp.array(2.0), tags=[1.0])
    tree = place(variable)
    if isinstance(tree, nnx.State):
        variable = tree["v"]

    def scaled(tree, tag):
        (v,) = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
        v.tags.append(tag)
        return v.value * sum(v.tags)

    jitted = jax.jit(scaled, static_argnums=1)
    for expected in (2.0, 4.0):
        assert jitted(tree, 0.0) == expected
        variable.tags.append(1.0)
    assert variable.tags == [1.0, 1.0, 1.0]
    scaled(jax.tree.map(lambda x: x, tree), 5.0)
    assert variable.tags == [1.0, 1.0, 1.0]
    assert jax.tree.structure(tree) == jax.tree.structure(jax.tree.map(lambda x: x, tree))


def test_metadata_that_are_computed_in_a_trace_are_no_hindrance_there():
    @jax.jit
    def shifted(x):
        v = jax.tree.map(lambda y: y + 1, nnx.Param(x, scale=x * 2))
        return v.value * v.scale

    assert shifted(1.0) == 4.0


def test_a_class_may_ask_to_be_a_pytree():
    """As code for flax up to 0.10 does, where a Module was none otherwise."""

    class Scale(nnx.Module, experimental_pytree=True):
        def __init__(self):
            self.factor = nnx.Param(2.0)

    assert jax.tree.leaves(jax.tree.map(lambda x: x + 1, Scale())) == [3.0]
