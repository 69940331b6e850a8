"""Name scopes: of which calls, in every stage of a program, and switched off."""

import re
import threading

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from tests.core.called import Block, Layer, Net, plain, scopes

X = jnp.ones((1, 2))


@pytest.fixture(autouse=True)
def own_programs():
    """The cache of compiled programs would hand out one with the names of another."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


def test_scopes_are_paths():
    """Each operation is under the class of the outermost Module and the path of the innermost."""
    found = scopes(lambda m, x: m(x), Net(), X)
    assert sorted(found["sin"]) == ["Net/block/heads/a", "Net/block/layers/0", "Net/block/layers/1"]


def test_scopes_in_compiled_programs():
    """They arrive in the HLO that profilers show."""
    text = nnx.jit(lambda m, x: m(x)).lower(Net(), X).compile().as_text()
    assert "Net/block/layers/1/sin" in text


def test_methods_add_their_name():
    """A method other than __call__ is named; private ones are part of their caller."""

    class WithMethods(Layer):
        def run(self, x):
            return self.helper(self._private(x))

    assert scopes(lambda m, x: m.helper(x), Layer(), X)["cos"] == ["Layer.helper"]
    found = scopes(lambda m, x: m.run(x), WithMethods(), X)
    assert (found["cos"], found["tan"]) == (["WithMethods.run"], ["WithMethods.run"])
    assert scopes(lambda m, x: m.layers[1].helper(x), Block(), X)["cos"] == ["layers/1.helper"]


def test_super_and_recursion():
    """super() and a Module that calls itself add no level; a parent called by its child is named by its path."""

    class Derived(Layer):
        def __call__(self, x):
            return super().__call__(jnp.cos(x))

    found = scopes(lambda m, x: m.heads(x), nnx.Dict(heads=Derived()), X)
    assert (found["cos"], found["sin"]) == (["heads"], ["heads"])


class Attention(nnx.Module):
    def __init__(self, key):
        self.query = nnx.Linear(2, 2, rngs=nnx.Rngs(key))

    def __call__(self, x):
        return jnp.sin(self.query(x))


class Decoder(nnx.Module):
    def __init__(self):
        self.layers = [Attention(0), Attention(1)]
        self.stack = nnx.vmap(Attention)(jnp.arange(3, dtype=jnp.uint32))

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: layer(x))(layer, x)
        x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.stack, x)


NAMES = {"layers/0/query", "layers/1/query", "stack/query"}


def name_stacks(jaxpr, outer=""):
    """The name stack of each equation, also within loops and calls."""
    for eqn in jaxpr.eqns:
        stack = f"{outer}/{eqn.source_info.name_stack}"
        yield stack, eqn.primitive.name
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from name_stacks(getattr(value, "jaxpr", value), stack)


def test_names_in_every_stage():
    """Jaxpr, lowered and compiled: the stored path, of lifted layers too."""
    model = {"model": Decoder()}
    jitted = nnx.jit(lambda d, x: d["model"](x))
    stacks = {plain(stack) for stack, name in name_stacks(jitted.trace(model, X).jaxpr.jaxpr) if name == "dot_general"}
    assert {f"model/{name}" for name in NAMES} == stacks
    lowered = jitted.lower(model, X)
    text = lowered.as_text(debug_info=True)
    compiled = lowered.compile().as_text()
    for name in ("layers/0", "layers/1", "stack"):
        assert f"{name}/query" in text  # JAX 0.8 puts a loop into a function with names of its own
        assert re.search(rf'op_name="[^"]*model[^"]*/{name}/query', compiled)


def test_under_raw_jax_what_runs_under_a_transform_is_named():
    """JAX does not tell Modules that it traces them; a transform within does."""
    loss = lambda m, x: m(x).sum()
    names = lambda f: [plain(stack) for stack, name in name_stacks(jax.make_jaxpr(f)(Net(), X).jaxpr) if name == "sin"]
    assert not any("layers" in name for name in names(loss))
    assert {"Net/block/layers/0", "Net/block/layers/1"} <= set(names(lambda m, x: nnx.remat(loss)(m, x)))


def test_names_can_be_switched_off():
    """Nothing is named then; what was traced is not traced again, and computes the same."""
    traces = []

    def f(model, x):
        traces.append(1)
        return model(x)

    model, jitted = Decoder(), nnx.jit(f)
    with nnx.use_name_scopes(False):
        assert not {p for p in scopes(Decoder(), X)["sin"] if "layers" in plain(p)}
        text = nnx.jit(lambda m, x: m(x)).lower(model, X).as_text(debug_info=True)
        assert "/query" not in text
        assert "args[0].layers[0].query.kernel" in text, "inputs are named by JAX, which calls them what it is told"
        y = jitted(model, X)
    assert (jitted(model, X) == y).all()
    with nnx.use_name_scopes(True):
        assert (jitted(model, X) == y).all()
    assert len(traces) == 1
    assert (nnx.jit(lambda m, x: m(x))(model, X) == y).all()
    with pytest.raises(ZeroDivisionError), nnx.use_name_scopes(False):
        raise ZeroDivisionError
    assert "layers" in nnx.jit(lambda m, x: m(x)).lower(model, X).as_text(debug_info=True)


def test_a_function_is_decorated_as_by_other_switches():
    """It is set within each call of the function only."""

    @nnx.use_name_scopes(False)
    def shown():
        return nnx.use_name_scopes.current_value()

    assert (nnx.use_name_scopes.current_value(), shown(), nnx.use_name_scopes.current_value()) == (True, False, True)


def test_names_are_per_thread():
    """As the other switches."""
    seen = []
    with nnx.use_name_scopes(False):
        thread = threading.Thread(target=lambda: seen.append(nnx.use_name_scopes.current_value()))
        thread.start()
        thread.join()
    assert seen == [True]
