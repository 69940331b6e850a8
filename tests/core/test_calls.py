"""The calls of Modules while a transform traces: name scopes by path, notes on errors, outputs of methods."""

import functools
import inspect
import pickle
import re
import threading
import types

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core import calls

X = jnp.ones((1, 2))


@pytest.fixture(autouse=True)
def own_programs():
    """The cache of compiled programs would hand out one with the names of another."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return jnp.sin(self.w * x)

    def helper(self, x):
        return jnp.cos(x)

    def _private(self, x):
        return jnp.tan(x)


class Block(nnx.Module):
    def __init__(self):
        self.layers = [Layer(), Layer()]
        self.heads = {"a": Layer()}

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x)


class Net(nnx.Module):
    def __init__(self):
        self.block = Block()

    def __call__(self, x):
        return self.block(x)


def scopes(f, *args, **kwargs):
    """The name scope of each primitive that a jitted function traces, in order: {'sin': [scope, ...]}."""
    text = nnx.jit(f).lower(*args, **kwargs).compile().as_text()
    names = re.findall(r'op_name="(jit\(.*?)"', text)
    found = {}
    for name in names:
        *scope, primitive = name.split("/")
        scope = "/".join(part for part in scope if not re.fullmatch(r"jit\(.*\)|checkpoint|rematted_computation", part))
        if scope not in found.setdefault(primitive, []):
            found[primitive].append(scope)
    return found


# --- name scopes ----------------------------------------------------------------------------------------------------


def test_scopes_are_paths():
    """Each operation is under the class of the outermost Module and the path of the innermost."""
    found = scopes(lambda m, x: m(x), Net(), X)
    assert sorted(found["sin"]) == ["Net/block/heads/a", "Net/block/layers/0", "Net/block/layers/1"]


def test_scopes_in_compiled_programs():
    """They arrive in the HLO that profilers show."""
    text = nnx.jit(lambda m, x: m(x)).lower(Net(), X).compile().as_text()
    assert "Net/block/layers/1/sin" in text


def test_paths_start_at_the_argument():
    """Modules in containers of the arguments, by keyword and bound ones have the path from there."""
    for f, args, kwargs, expected in (
        (lambda t, x: t["m"][0](x), ({"m": [Layer()]}, X), {}, "m/0"),
        (lambda x, *, m: m(x), (X,), {"m": Layer()}, "Layer"),
        (Layer(), (X,), {}, "Layer"),
        (Net().block.layers[0], (X,), {}, "Layer"),
        (lambda ms, x: ms[1](x), (nnx.List([1, Layer()]), X), {}, "1"),
    ):
        assert scopes(f, *args, **kwargs)["sin"] == [expected]


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


def test_a_shared_module_has_its_first_path():
    """Wherever it is called from, a shared Module is called by its first path."""
    net = Net()
    net.tied, net.first = net.block.layers[1], Layer()
    net.a_first = net.first

    def f(m, x):
        return m.tied(m.first(m.block.layers[1](x)))

    assert scopes(f, net, X)["sin"] == ["block/layers/1", "a_first"]
    assert scopes(lambda a, b, x: b["k"](x), net, {"k": net.first}, X)["sin"] == ["a_first"]


def test_modules_made_inside():
    """A Module that is made in the trace is known by the attribute it is set to, and by its class before."""

    class Lazy(nnx.Module):
        def __call__(self, x):
            self.made = Layer()
            return self.made(x) + Layer()(2 * x)

    assert scopes(lambda m, x: m.lazy(x), nnx.Dict(lazy=Lazy()), X)["sin"] == ["lazy/made", "lazy/Layer"]


class Rebuilding(nnx.Module):
    """Calls its parts as new Modules, made of their states, as code does that scans over layers by itself."""

    def __init__(self, part):
        self.part = part

    def __call__(self, x):
        return nnx.merge(*nnx.split(self.part))(x)


def test_modules_rebuilt_within_modules_rebuilt_inside():
    """Each that is part of nothing known is named below its caller, however deep."""
    found = scopes(lambda x: Rebuilding(Rebuilding(Rebuilding(Layer())))(x), X)
    assert found["sin"] == ["Rebuilding/Rebuilding/Rebuilding/Layer"]


def test_a_module_called_twice():
    """The same path at each call."""
    assert scopes(lambda m, x: m.block(m.block(x)), Net(), X)["sin"] == [
        "block/layers/0", "block/layers/1", "block/heads/a"
    ]  # fmt: skip


INSIDE = {
    "grad": lambda f, m, x: nnx.grad(lambda m, x: f(m, x).sum(), argnums=1)(m, x),
    "jit": lambda f, m, x: nnx.jit(f)(m, x),
    "remat": lambda f, m, x: nnx.remat(f)(m, x),
    "cond": lambda f, m, x: nnx.cond(True, f, f, m, x),
    "vmap": lambda f, m, x: nnx.vmap(f, in_axes=(None, 0))(m, x),
    "fori_loop": lambda f, m, x: nnx.fori_loop(0, 2, lambda i, c: (c[0], f(*c)), (m, x))[1],
    "scan": lambda f, m, x: nnx.scan(lambda x, m: f(m, x), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2)(
        x, m
    ),
    "while_loop": lambda f, m, x: nnx.while_loop(lambda c: c[1].sum() < 0, lambda c: (c[0], f(*c)), (m, x))[1],
    "switch": lambda f, m, x: nnx.switch(1, [f, f], m, x),
    "vjp": lambda f, m, x: nnx.vjp(f, m, x)[0],
    "jvp": lambda f, m, x: nnx.jvp(lambda x: f(m, x), (x,), (x,))[1],
    "linearize": lambda f, m, x: nnx.linearize(lambda x: f(m, x), x)[1](x),
    "jacrev": lambda f, m, x: nnx.jacrev(lambda x: f(m, x).sum())(x),
    "jacfwd": lambda f, m, x: nnx.jacfwd(lambda x: f(m, x).sum())(x),
    "checkify": lambda f, m, x: nnx.checkify(f)(m, x)[1],
    "lift": lambda f, m, x: nnx.lift(jax.checkpoint)(f)(m, x),
    "map_variables": lambda f, m, x: nnx.map_variables(f, nnx.Param, lambda state: state)(m, x),
    "shard_map": lambda f, m, x: nnx.shard_map(
        f, mesh=jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), in_specs=jax.P(), out_specs=jax.P()
    )(m, x),
    "capture": lambda f, m, x: nnx.capture(f, nnx.Intermediate)(m, x)[0],
    "grad in jit in remat": lambda f, m, x: nnx.remat(
        lambda m, x: nnx.jit(lambda m, x: nnx.grad(lambda m, x: f(m, x).sum(), argnums=1)(m, x))(m, x)
    )(m, x),
}


_ADDED = {"cond", "while", "body", "closed_call", "eval_jaxpr", "branch_0_fun", "branch_1_fun"}


def plain(scope):
    """A scope without what JAX adds for its transforms."""
    scope = re.sub(r"(?:transpose|jvp|vmap|rematted_computation|checkpoint)\(([^()]*)\)", r"\1", scope)
    scope = re.sub(r"(?:transpose|jvp|vmap)\(([^()]*)\)", r"\1", scope)
    return "/".join(p for p in scope.split("/") if p and p not in _ADDED)


@pytest.mark.parametrize("inside", INSIDE)
def test_paths_inside_transforms(inside):
    """Inside any transform, called by a Module on itself, a part, a part of a part: the path in the whole model."""

    class Outer(nnx.Module):
        def __init__(self, choose):
            self.net, self.choose = Net(), choose

        def __call__(self, x):
            return INSIDE[inside](lambda m, x: m(x), self.choose(self), x)

    for choose, expected in (
        (lambda m: m.net, {"model/net/block/layers/0", "model/net/block/layers/1", "model/net/block/heads/a"}),
        (lambda m: m.net.block.layers[1], {"model/net/block/layers/1"}),
    ):
        found = scopes(lambda d, x: d["model"](x), {"model": Outer(choose)}, X)
        assert {plain(s) for s in (*found.get("sin", ()), *found.get("cos", ()))} == expected


def test_paths_inside_a_transform_of_a_method():
    """A Module that transforms one of its own methods adds no level."""

    class Own(Layer):
        def __call__(self, x):
            return nnx.remat(Layer.__call__)(self, x)

    assert {plain(s) for s in scopes(lambda d, x: d["own"](x), {"own": Own()}, X)["sin"]} == {"own"}


# --- notes ----------------------------------------------------------------------------------------------------------


def notes(call):
    with pytest.raises(Exception) as caught:  # which error it is, is not the point
        call()
    return [note for note in caught.value.__notes__ if note.startswith("in ")]


def test_notes_name_path_class_and_input():
    """One note per call that the error leaves, from the inside out."""

    class Failing(Layer):
        def __call__(self, x, y=None, *, z=1):
            raise ValueError("no")

    net = Net()
    net.block.layers[1] = Failing()
    assert notes(lambda: nnx.jit(lambda m, x: m(x))(net, X)) == [
        "in block.layers[1] (Failing, w float32[2]), input float32[1, 2]",
        "in block (Block), input float32[1, 2]",
        "in <root> (Net), input float32[1, 2]",
    ]
    found = notes(lambda: nnx.jit(lambda m, x: m.layers[1](x, None))(net.block, X))
    assert found == ["in layers[1] (Failing, w float32[2]), input float32[1, 2], None"]


def test_notes_of_methods_and_super():
    """A method is named; an error that goes through super() has one note for it."""

    class Failing(Layer):
        def __call__(self, x):
            return super().__call__(x) + jnp.ones(7)

        def run(self, x):
            return self(x)

    assert notes(lambda: nnx.jit(lambda m, x: m.run(x))(Failing(), X)) == [
        "in <root> (Failing, w float32[2]), input float32[1, 2]",
        "in <root>.run (Failing, w float32[2]), input float32[1, 2]",
    ]


@pytest.mark.parametrize("inside", [name for name in INSIDE if name != "grad in jit in remat"])
def test_notes_inside_transforms(inside):
    """The path in the whole model, once for each call."""

    class Outer(nnx.Module):
        def __init__(self):
            self.net = Net()

        def __call__(self, x):
            return INSIDE[inside](lambda m, x: m(x), self.net.block, x)

    outer = Outer()
    outer.net.block.layers[1].w.value = jnp.ones(3)
    found = [note.rpartition("[")[0] for note in notes(lambda: nnx.jit(lambda m, x: m(x))(outer, X))]
    assert found == [
        "in net.block.layers[1] (Layer, w float32[3]), input float32",
        "in net.block (Block), input float32",
        "in <root> (Outer), input float32",
    ]


def test_notes_in_eager_code():
    """The same notes as under a transform: the running calls are found on the stack of Python."""

    class Failing(Layer):
        def __call__(self, x):
            return super().__call__(x) + jnp.ones(7)

    net = Net()
    net.block.layers[1] = Failing()
    expected = [
        "in block.layers[1] (Failing, w float32[2]), input float32[1, 2]",
        "in block (Block), input float32[1, 2]",
        "in <root> (Net), input float32[1, 2]",
    ]
    assert notes(lambda: net(X)) == expected
    assert notes(lambda: jax.eval_shape(net, X)) == expected, "also under raw JAX"


def test_notes_of_many_levels_take_one_walk(monkeypatch):
    """A chain of Modules is searched for paths once, however many levels the error leaves; also when raised again."""

    class Chain(nnx.Module):
        def __init__(self, below):
            self.below = below

        def __call__(self, x):
            if self.below is None:
                raise ZeroDivisionError
            try:
                return self.below(x)
            except ValueError:
                return x

    model = Chain(None)
    for _ in range(20):
        model = Chain(model)
    walks = []
    walk = calls._Paths._walk
    monkeypatch.setattr(calls._Paths, "_walk", lambda self: (walks.append(1), walk(self)))
    with pytest.raises(ZeroDivisionError) as found:
        model(X)
    expected = [f"in {'.'.join(['below'] * i) or '<root>'} (Chain), input float32[1, 2]" for i in range(20, -1, -1)]
    assert (found.value.__notes__, len(walks)) == (expected, 1)
    assert not vars(found.value).keys() - {"__notes__"}

    class Again(nnx.Module):
        def __call__(self, error):
            raise error

    class Keeps(nnx.Module):
        def __init__(self):
            self.inner = Again()

        def __call__(self, error):
            try:
                self.inner(error)
            except KeyError as caught:
                self.caught = nnx.static(caught)

    error, keeps = KeyError("k"), Keeps()
    keeps(error)
    with pytest.raises(KeyError):
        nnx.List([Again()])[0](error)
    assert [note[:20] for note in error.__notes__] == ["in inner (Again), in", "in <root> (Again), i"]


def test_notes_say_the_sizes_of_a_layer():
    """Features in and out of the library's layers; up to four of the Variables of another Module."""
    rngs = nnx.Rngs(0)
    for layer, x, text in (
        (nnx.Linear(4, 2, rngs=rngs), jnp.ones((1, 3)), "<root> (Linear 4->2), input float32[1, 3]"),
        (nnx.LinearGeneral((2, 3), (4,), axis=(-2, -1), rngs=rngs), X, "(LinearGeneral (2, 3)->(4,)), input"),
        (
            nnx.Conv(3, 8, (3, 3), rngs=rngs),
            jnp.ones((1, 5, 5, 2)),
            "(Conv 3->8 kernel (3, 3)), input float32[1, 5, 5, 2]",
        ),
        (nnx.Embed(10, 4, rngs=rngs), jnp.ones(2), "(Embed 10x4), input float32[2]"),
        (nnx.BatchNorm(5, rngs=rngs), X, "(BatchNorm 5), input float32[1, 2]"),
    ):
        assert text in notes(lambda layer=layer, x=x: layer(x))[0]


# --- the wrapper ----------------------------------------------------------------------------------------------------


def test_notes_say_what_containers_hold():
    """Batches are dicts, and cells carry tuples: their shapes are told as well."""

    class Loss(nnx.Module):
        def __call__(self, batch, carry, *rest, weights=None):
            raise ValueError("no")

    with pytest.raises(ValueError) as caught:
        Loss()({"x": X, "more": [X, "a"]}, (X, None), list(range(9)), weights={})
    assert caught.value.__notes__ == [
        "in <root> (Loss), input {'x': float32[1, 2], 'more': [float32[1, 2], str]}, (float32[1, 2], None), "
        "[int, int, int, int, int, int, int, int, ... and 1 more], weights={}"
    ]


def test_notes_show_numbers():
    """They are mostly settings, such as a mode."""

    class Loss(nnx.Module):
        def __call__(self, x, scale, train):
            raise ValueError("no")

    assert notes(lambda: Loss()(X, 0.5, train=True)) == ["in <root> (Loss), input float32[1, 2], 0.5, train=True"]


def test_a_note_says_that_jax_lax_takes_no_variables():
    """Once, although the error leaves two Modules."""

    class Raw(Layer):
        def __call__(self, x):
            return jax.lax.add(self.w, x)

    net = nnx.Sequential(Raw())
    with pytest.raises(Exception, match="__jax_array__") as caught:
        net(X[0])
    assert [note for note in caught.value.__notes__ if "pass variable.value" in note] == caught.value.__notes__[1:2]


def test_notes_say_that_a_layer_has_no_values():
    layer = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError) as caught:
        layer(jnp.ones((1, 2)))
    assert any("shapes without values (kernel, bias)" in note for note in caught.value.__notes__)


def test_notes_say_where_a_layer_takes_the_sharding_of_its_output():
    """JAX asks for it where it is ambiguous, in words about its own functions."""
    with jax.set_mesh(jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        rows = nnx.with_partitioning(nnx.initializers.normal(), ("d", None))
        table, ids = nnx.Embed(4, 2, embedding_init=rows, rngs=nnx.Rngs(0)), jnp.array([0, 1])
        with pytest.raises(Exception, match="out_sharding") as caught:
            table(ids)
        assert any("layer(x, out_sharding=jax.P(...))" in note for note in caught.value.__notes__)
        assert table(ids, out_sharding=jax.P()).shape == (2, 2)


def test_notes_never_take_the_place_of_the_error():
    class Incomplete(nnx.Linear):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((2, 3)))

    with pytest.raises(AttributeError, match="'bias'") as info:
        Incomplete()(X)
    assert any("Incomplete, kernel float32[2, 3]" in note for note in info.value.__notes__)


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

    listener = calls.Listener([model[0], model[1]], [(0,), (1,)], on_call)
    with calls.listening(listener):
        model[1].helper(model[0](X))
        nnx.remat(lambda m, x: m(x))(model[1], X)
    assert seen == [("Derived", (0,), "__call__"), ("Layer", (1,), "helper"), ("Layer", (1,), "__call__")]


# --- names: in every stage of a program, and switched off ------------------------------------------------------------


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


def test_names_are_per_thread():
    """As the other switches."""
    seen = []
    with nnx.use_name_scopes(False):
        thread = threading.Thread(target=lambda: seen.append(calls._names.shown))
        thread.start()
        thread.join()
    assert seen == [True]
