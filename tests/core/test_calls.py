"""The wrapper around the methods of Modules, and who listens."""

import dis
import functools
import inspect
import pickle
import threading
import types

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core import calls
from nnxlib.core.call_paths import Listener
from tests.core.called import Layer, Net

X = jnp.ones((1, 2))


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit, nnx.grad])
def test_a_method_can_be_lent_to_another_object(transform):
    class Stub:
        w = 2.0
        __call__ = Layer.__call__

    class Broken(nnx.Module):
        def find(self, x):
            raise KeyError("mine")

    def lent(x):
        return Layer.__call__(types.SimpleNamespace(w=2.0), x) + Stub()(x)

    plain = jax.grad(lent) if transform is nnx.grad else lent
    assert transform(lent)(1.0) == plain(1.0)
    with pytest.raises(KeyError, match="mine"):
        transform(lambda x: Broken.find(types.SimpleNamespace(), x))(1.0)


def test_methods_look_as_written():
    """Signature, name and docstring of a method are the user's; another callable stays as it is."""

    class Documented(nnx.Module):
        attribute = functools.partial(max, 1)

        def __call__(self, x, *, y=2):
            """Doc."""

        @property
        def size(self):
            return 3

        @staticmethod
        def static(x):
            return x

        @classmethod
        def make(cls):
            return cls()

    assert str(inspect.signature(Documented.__call__)) == "(self, x, *, y=2)"
    assert (Documented.__call__.__doc__, Documented.__call__.__name__) == ("Doc.", "__call__")
    assert (Documented().size, Documented.static(1), type(Documented.make())) == (3, 1, Documented)
    assert Documented.attribute(0) == 1


def test_a_wrapper_names_no_parameter():
    """A method without its object fails as in Python; beartype, given a class, checks what its methods are given."""
    assert str(inspect.signature(Layer.__call__, follow_wrapped=False)).startswith("(*args, **kwargs)")
    with pytest.raises(TypeError, match=r"Layer.__call__\(\) missing 2 required positional arguments: 'self' and 'x'"):
        Layer.__call__()

    class Plain(nnx.Module):
        def twice(self, x: int, *, add: int = 0) -> float:
            return 2.0 * x + add

    assert Plain.twice(self=Plain(), x=1) == nnx.jit(lambda m: Plain.twice(self=m, x=1))(Plain()) == 2.0

    beartype = pytest.importorskip("beartype")
    checked = beartype.beartype(Plain)()
    assert checked.twice(1, add=2) == nnx.jit(lambda m: m.twice(1))(checked) + 2 == 4.0
    for wrong in (lambda: checked.twice("a"), lambda: checked.twice(1, add="a")):
        with pytest.raises(beartype.roar.BeartypeCallHintParamViolation):
            wrong()


def test_a_profiler_may_append_to_the_code_of_a_wrapper():
    """line_profiler tells functions of the same code apart by padding; calls are noticed nonetheless."""

    class Inner(nnx.Module):
        def __call__(self):
            return nnx.current_path()

    method = vars(Inner)["__call__"]
    method.__code__ = method.__code__.replace(co_code=method.__code__.co_code + bytes([dis.opmap["NOP"], 0]))
    outer = nnx.Sequential(Inner())
    assert outer() == ("layers", 0)
    assert calls.is_observed(method)


def test_nothing_listens_after_a_call():
    """After a transform, and after one that failed, calls are plain again; other threads never hear of it."""
    nnx.jit(lambda m, x: m(x))(Net(), X)
    assert calls._active.listener is None
    with pytest.raises(TypeError):
        nnx.jit(lambda m, x: m(x))(Net(), jnp.ones(3))
    assert calls._active.listener is None
    elsewhere = []

    def look(m, x):
        thread = threading.Thread(target=lambda: elsewhere.append(calls._active.listener))
        thread.start()
        thread.join()
        return m(x)

    nnx.jit(look)(Net(), X)
    assert elsewhere == [None]


def test_modules_are_pickled_with_their_class_by_reference():
    """The wrapper does not stand in the way of pickle."""
    assert pickle.loads(pickle.dumps(Net().block.layers[0].__call__)).__func__ is Layer.__call__


def test_outputs_of_methods_are_handed_on():
    """What a listener's on_call returns sees each output once, also through super() and transforms inside."""
    seen = []

    class Derived(Layer):
        def __call__(self, x):
            return super().__call__(x)

    model = nnx.List([Derived(), Layer()])

    def on_call(m, path, name, args, kwargs):
        return lambda out: seen.append((type(m).__name__, path, name))

    listener = Listener([model[0], model[1]], [(0,), (1,)], on_call)

    def run():
        model[1].helper(model[0](X))
        nnx.remat(lambda m, x: m(x))(model[1], X)

    calls.call_listening(listener, run)
    assert seen == [("Derived", (0,), "__call__"), ("Layer", (1,), "helper"), ("Layer", (1,), "__call__")]


def test_an_eager_transform_looks_through_the_frames_once():
    """It looks for running Modules there; in a notebook, or a test, there are dozens of frames."""
    f, x = nnx.remat(jnp.sin), jnp.ones(2)

    def count_at(depth):
        return count_calls(lambda: f(x)) if depth == 0 else count_at(depth - 1)

    count_at(0)
    assert count_at(50) - count_at(0) < 70
