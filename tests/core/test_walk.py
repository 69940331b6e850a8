"""The walk: what becomes a row, a leaf, a pytree with data or a static value."""

import weakref

import jax.numpy as jnp

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
