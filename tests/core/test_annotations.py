"""Annotations of Python 3.14, which are evaluated when they are asked for, may name what is not there.

The classes and functions are made in the tests, since earlier versions cannot make them.
"""

import dataclasses
import sys
from typing import TYPE_CHECKING, ClassVar, get_type_hints

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.errors import InvalidFilterError

if TYPE_CHECKING:
    from elsewhere import Unknown

pytestmark = pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated when they are written")


def make_net() -> type:
    class Net(nnx.Module):
        child: Unknown
        size: jnp.Unknown

        def __init__(self, size: Unknown, *, rngs: Unknown | None = None):
            self.child, self.size = nnx.Linear(size, size, rngs=rngs or nnx.Rngs(0)), size

        def __call__(self, x: Unknown, scale: Unknown = 1.0) -> Unknown:
            return scale * self.child(x)

        def set_view(self, scale: list[Unknown] | None = None, size: Unknown = 1) -> Unknown:
            pass

    return Net


def test_a_class_whose_annotations_name_what_is_not_there():
    """Its objects are taken apart, transformed and shown like others."""
    net, x = make_net()(2), jnp.ones(2)
    assert {path for path, _ in nnx.state(net).flat_state()} == {("child", "kernel"), ("child", "bias")}
    assert jnp.array_equal(nnx.jit(lambda net: net(x))(net), net(x))
    assert repr(net).startswith("Net(")
    assert nnx.view_info(net).splitlines()[1:] == ["  scale: list[Unknown] | None = None", "  size: Unknown = 1"]


def test_data_and_static_of_what_is_not_there():
    """The declaration holds, also inside another annotation and behind a name of a module that does not have it."""

    class Holder(nnx.Pytree):
        a: nnx.Data[Unknown]
        b: nnx.Data[jnp.Unknown]
        c: nnx.Data[Unknown.of[int]]
        d: nnx.Static[Unknown]
        e: nnx.Static["Unknown"]
        f: nnx.Data["list[Unknown]"]
        g: Unknown

        def __init__(self):
            self.a = self.b = self.c = self.d = self.e = self.f = self.g = 1

    assert {path[0] for path, _ in nnx.state(Holder()).flat_state()} == set("abcf")


@pytest.mark.parametrize("dataclass", [nnx.dataclass, dataclasses.dataclass])
def test_dataclasses(dataclass):
    """A field may also name its own class."""

    @dataclass
    class Node(nnx.Module):
        value: nnx.Data[Unknown]
        label: nnx.Static[Unknown]
        child: Node | None = None  # noqa: F821
        kind: ClassVar[Unknown] = "node"

    node = Node(1, "a", Node(2, "b"))
    assert dict(nnx.state(node).flat_state()) == {("value",): 1, ("child", "value"): 2}


def test_a_name_that_is_there_later():
    """A declaration behind a name of the module that is set when the first object is made."""
    names = {"nnx": nnx}
    exec("class A(nnx.Pytree):\n  x: Mark\n  def __init__(self):\n    self.x = 1", names)
    names["Mark"] = nnx.Data[int]
    assert jax.tree.leaves(names["A"]()) == [1]


def test_transforms_of_functions():
    """Their options may name arguments, and arguments may be given by name."""

    def loss(net: Unknown, x: Unknown, scale: Unknown = 1, *, power: Unknown = 1) -> Unknown:
        return (scale * net(x) ** power).sum()

    net, x = make_net()(2), jnp.ones(2)
    expected = loss(net, x, 2)
    assert nnx.jit(loss, static_argnames="scale")(net, x, scale=2) == expected
    assert nnx.jit(loss, static_argnums=2)(net, x, 2) == expected
    assert nnx.jit_partial(loss, net)(x, scale=2) == expected
    assert nnx.value_and_grad(loss, argnums=1)(net, x=x, scale=2.0)[0] == expected
    assert nnx.vmap(loss, in_axes=(None, 0))(net, x=x[None]).shape == (1,)
    assert nnx.remat(loss, static_argnums=2)(net, x, 2) == expected
    assert nnx.jit(net.__call__)(x, scale=2.0).sum() == expected
    assert nnx.Sequential(net, net)(x, scale=2.0).shape == (2,)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        nnx.jit(loss)(net)


def test_a_custom_derivative():
    """Its arguments may be given by name, and its rule is asked how many it takes."""

    @nnx.custom_vjp
    def double(x: Unknown, by: Unknown = 2.0) -> Unknown:
        return x * by

    double.defvjp(lambda x, by: (x * by, by), lambda by, g: (10 * by * g[1], 0.0))
    assert nnx.grad(lambda x: double(x=x))(1.0) == 20.0


def test_a_transformed_class():
    """A class is lifted, and its constructor evaluated for shapes, as without annotations."""
    net = nnx.eval_shape(lambda: make_net()(2))
    assert net.child.kernel.shape == (2, 2)
    remat = nnx.remat(make_net(), methods="__call__")
    assert remat(2)(jnp.ones(2)).shape == (2,)
    assert nnx.jit(make_net(), static_argnums=0)(2).child.kernel.shape == (2, 2)


def test_messages_about_functions():
    """What says how a function is to be called takes its parameters from the signature."""

    def predicate(path: Unknown) -> Unknown:
        return True

    with pytest.raises(InvalidFilterError, match="which predicate does not"):
        nnx.state(make_net()(2), predicate)


def test_what_annotations_name_is_not_followed():
    """A Module in a class that an annotation names is none that a step uses: another one there does not matter."""
    traces, names = [], {"nnx": nnx}
    exec("class Settings: pass\nclass Net(nnx.Module):\n  layer: Settings.layer\n  def __call__(self): pass", names)
    settings, net = names["Settings"], names["Net"]()
    settings.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(net):
        traces.append(net)

    step(net)
    settings.layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    step(net)
    assert len(traces) == 1


def test_the_annotations_of_a_jitted_function():
    """What is not there when it is made is found later by those who ask for types."""
    names = {"nnx": nnx}
    exec("@nnx.jit\ndef f(x: Later): pass", names)
    names["Later"] = int
    assert get_type_hints(names["f"]) == {"x": int}
