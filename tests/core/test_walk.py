"""The walk: what becomes a row, a leaf, a pytree with data or a static value."""

import collections
import weakref

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.graph import build, pack
from nnxlib.core.rows import Ref, Tree
from nnxlib.core.static import Const, StaticArgument
from nnxlib.core.walk import flatten_once


class Embed(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(2))


def test_sharing_across_arguments():
    """Rows are numbered over the whole pytree, so an object in two arguments is one row."""
    m = Embed()
    packed = pack((m, [m.kernel, m]))
    assert (len(packed.objects), packed.layout.leaf_paths) == (2, ((0, "kernel"),))
    (a, (v, b)), _ = build(packed.layout, packed.leaves)
    assert (a is b, a.kernel is v) == (True, True)


def test_a_weak_proxy_is_the_object_that_it_stands_for():
    """A child may refer to its parent weakly: the two are one object inside a transform and in a copy."""
    parent = nnx.Dict(child=Embed(), scale=2.0)
    parent.child.parent = weakref.proxy(parent)
    assert pack(parent).objects == [parent, parent.child, parent.child.kernel]

    def rescale(m, x):
        m.child.parent.scale = x
        return m.child.parent is m

    assert nnx.jit(rescale, static_argnums=1)(parent, 3.0)
    assert parent.scale == 3.0
    assert type(parent.child.parent) in weakref.ProxyTypes
    copy = nnx.clone(parent)
    assert copy.child.parent is copy
    reference = weakref.ref(parent)
    del parent
    assert reference() is None


def test_what_pytrees_become():
    """An attribute that is a pytree of data is a Tree, one without data a constant; arguments are always data."""
    fields = dict(pack(nnx.Dict(a=(nnx.Param(1.0), "x"), b=(1, "x"))).layout.rows[0].fields)
    assert isinstance(fields["a"], Tree)
    assert (fields["a"].children, fields["b"]) == ((Ref(1), Const.of("x")), Const.of((1, "x")))
    array = jnp.ones(2)
    marked = nnx.Dict(a=nnx.data((jnp.sin, 1, "x", array)))  # the attribute is data: not a number or function in it
    assert pack(marked).leaves == [array]
    assert nnx.jit(lambda m: m.a[1] + m.a[3])(marked).tolist() == [2, 2]
    assert pack((1, 2.0)).leaves == [1, 2.0]
    assert pack((StaticArgument("x"), 2.0)).leaves == [2.0]


def test_flatten_once_stops_at_nodes():
    """Keys, children and how to put them together; a method keeps its Module."""
    m = Embed()
    keys, children, treedef = flatten_once({"b": m, "a": [1, nnx.Param(2.0)]})
    assert (keys, children[0], children[2] is m) == ((("a", 0), ("a", 1), ("b",)), 1, True)
    assert treedef.unflatten(children)["b"] is m
    keys, children, method = flatten_once(m.__repr__)
    assert (keys, children[0] is m, method.unflatten([m])()) == (((),), True, repr(m))


class Configured(nnx.Module):
    def __init__(self, config):
        self.config = config
        self.kernel = nnx.Param(jnp.ones(2))


MIXED = {1: 2, "x": 3}  # JAX cannot sort these keys


@pytest.mark.parametrize("config", [
    MIXED, {"a": MIXED}, (MIXED,), collections.OrderedDict(a=MIXED), collections.defaultdict(int, MIXED),
    collections.OrderedDict(a={"b": (MIXED,)}),
])  # fmt: skip
def test_settings_in_a_dict_whose_keys_cannot_be_sorted(config):
    m = Configured(config)
    assert (list(nnx.state(m)), nnx.clone(m).config) == (["kernel"], config)
    assert nnx.jit(lambda m: m.kernel.sum())(m) == 2.0


def test_data_in_a_dict_whose_keys_cannot_be_sorted_is_found():
    assert not nnx.is_data(MIXED)
    assert nnx.is_data({**MIXED, 2: (jnp.ones(1),)})
    assert len(nnx.has_data([{**MIXED, 2: {"y": jnp.ones(1), 0: nnx.Param(1.0)}}])) == 2


@pytest.mark.parametrize("config", [{"a": {1: jnp.ones(1), "x": 3}}, {"b": jnp.ones(1), "a": {1: 2, "x": 3}}])
def test_data_beside_or_in_a_dict_whose_keys_cannot_be_sorted_is_refused_by_path(config):
    m = Configured(collections.OrderedDict(config))
    with pytest.raises(nnx.errors.PathError, match=r"config\.a.*\[1, 'x'\] cannot be sorted.*nnx\.Dict"):
        nnx.split(m)


@pytest.mark.parametrize("wrong", [MIXED, {1: jnp.ones(1), "x": 3}], ids=["numbers", "an array"])
def test_an_argument_with_a_dict_whose_keys_cannot_be_sorted_is_refused_by_path(wrong):
    """Everything in an argument is data; a call after others says the same as the first one."""
    f = nnx.jit(lambda x: jax.tree.leaves(x))
    where = r"args\[0\]\.a\[0\], since its keys \[1, .x.\] cannot be sorted"
    for _ in range(2):
        with pytest.raises(nnx.errors.PathError, match=where):
            f({"a": (wrong,)})
        f({"a": (jnp.ones(2),)})
    for transform in (nnx.remat, lambda f: lambda x: nnx.eval_shape(f, x), lambda f: lambda x: nnx.cond(True, f, f, x)):
        with pytest.raises(nnx.errors.PathError, match=where):
            transform(lambda x: 1)({"a": (wrong,)})
    with pytest.raises(nnx.errors.PathError, match=r"at <root>, .*cannot be sorted"):
        nnx.split(wrong)
    with pytest.raises(nnx.errors.PathError, match=r"at <output>\[0\], .*cannot be sorted"):
        nnx.jit(lambda x: (wrong,))(jnp.ones(2))
    assert f({"a": (nnx.Dict(wrong),)})[0] == jnp.asarray(wrong[1])
