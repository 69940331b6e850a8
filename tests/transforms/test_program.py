"""Programs: what is kept with a function for its next call, eager or in a trace, and what is not."""

import contextlib
import functools
import gc
import threading
import weakref

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nnxlib as nnx

from .models import Layer

X = jnp.float32(1)
model = Layer()
model.flag = 2.0


def flagged(x):
    return x * model.flag  # asks for nothing but a plain attribute


def same(x):
    return x


def flagged_by_name(x, named=model):
    return x * named.flag


def closing_over(other):
    return lambda x: x * other.flag


FUNCTIONS = {"global": flagged, "default": flagged_by_name, "closure": closing_over(model)}
FUNCTIONS |= {f"jitted, {name}": nnx.jit(f) for name, f in FUNCTIONS.items()}
EAGER = {
    "cond": lambda f: nnx.cond(True, f, flagged_by_name, X),
    "other branch": lambda f: nnx.cond(False, same, f, X),
    "switch": lambda f: nnx.switch(0, [f, same], X),
    "scan": lambda f: nnx.scan(f, in_axes=nnx.Carry, out_axes=nnx.Carry, length=1)(X),
    "while_loop": lambda f: nnx.while_loop(lambda x: x < 1.5, f, X),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", EAGER)
def test_a_flag_of_a_module_that_a_function_names_is_seen_at_each_call(name, function):
    """Though nothing of the Module is noticed while the function is traced."""
    for model.flag in (2.0, 3.0, 2.0):
        assert EAGER[name](FUNCTIONS[function]) == model.flag


PLACES: dict = {"m": None, "settings": model}
LATER = None


def with_held(x):
    return x * 2 if PLACES["m"] is None else x * PLACES["m"].flag


def with_global(x):
    return x * 2 if LATER is None else x * LATER.flag


def with_settings(x):
    return x * PLACES["settings"].flag


LOOKING = [with_held, with_global, with_settings]


@pytest.mark.parametrize("function", [*LOOKING, *map(nnx.jit, LOOKING)], ids=lambda f: type(f).__name__ + f.__name__)
@pytest.mark.parametrize("name", EAGER)
def test_a_module_that_comes_to_where_a_function_looks_is_seen(name, function):
    """As is one that it finds in a dict, and of which it only reads a flag."""
    other = Layer()

    def put(m):
        PLACES.update(m=m, settings=m or model)
        globals()["LATER"] = m

    for m, flag in (None, 2.0), (other, 3.0), (other, 4.0), (None, 2.0):
        put(m)
        (m or model).flag = flag
        assert EAGER[name](function) == (m or model).flag
    put(None)


class Scaling(nnx.Module):
    def __init__(self, scale):
        self.scale = nnx.Param(jnp.float32(scale))

    def __call__(self, x):
        return x * self.scale


def with_called(x):
    return x * 2 if PLACES["m"] is None else PLACES["m"](x)


@pytest.mark.parametrize("name", EAGER)
def test_a_module_that_a_function_calls_where_there_was_none_is_seen(name):
    """Though of this Module the function reads nothing by itself."""
    for scale in (None, 3.0, 4.0, None):
        PLACES["m"] = scale and Scaling(scale)
        assert EAGER[name](with_called) == (scale or 2.0)


class Calling(nnx.Module):
    """Calls a function, to which nothing but the attribute leads."""

    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


def call(m, x):
    return m(x)


CALLING = {
    "remat": nnx.remat(call),
    "scan": lambda m, x: nnx.scan(call, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=1)(m, x),
    "kept scan": nnx.scan(call, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=1),
    "cond": lambda m, x: nnx.cond(True, call, lambda m, x: x, m, x),
    "while_loop": lambda m, x: nnx.while_loop(lambda c: c[1] < 1.5, lambda c: (c[0], call(*c)), (m, x))[1],
    "fori_loop": lambda m, x: nnx.fori_loop(0, 1, lambda i, c: (c[0], call(*c)), (m, x))[1],
    "pmap": lambda m, x: nnx.pmap(call, in_axes=(None, 0))(m, x[None])[0],
}


@pytest.mark.parametrize("wrap", [same, nnx.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", CALLING)
def test_a_flag_of_a_module_that_a_function_in_an_attribute_holds_is_seen(name, wrap):
    """Though the trace does not notice that it is read, and the function in the attribute is the same one."""
    other, f = Layer(), wrap(CALLING[name])
    calling = Calling(functools.partial(flagged_by_name, named=other))
    for other.flag in (2.0, 3.0, 2.0):
        assert f(calling, X) == other.flag


def test_a_function_that_names_no_module_is_traced_once():
    """However often it is called."""
    traces = []

    def f(x):
        traces.append(1)
        return x + 1

    for _ in range(3):
        assert nnx.cond(True, f, same, X) == 2
    assert len(traces) == 1


def below_one(x):
    return x < 1.5


ALONE = {name: EAGER[name] for name in ("switch", "scan")} | {
    "cond": lambda f: nnx.cond(False, same, f, X),
    "while_loop": lambda f: nnx.while_loop(below_one, f, X),
    "fori_loop": lambda f: nnx.fori_loop(0, 1, f, X),
}
WRAPS = {"plain": same, "nnx.jit": nnx.jit, "jax.jit": jax.jit, "donated": functools.partial(nnx.jit, donate_argnums=0)}


@contextlib.contextmanager
def compilations():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        yield compiled
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", ALONE)
def test_a_function_is_compiled_once_also_if_it_is_jitted(name, wrap):
    """And what is kept for it keeps it no longer alive."""
    f = WRAPS[wrap](lambda *args: args[-1] + 1)
    assert ALONE[name](f) == 2  # compiles what is around it, too
    with compilations() as compiled:
        for _ in range(3):
            assert ALONE[name](f) == 2
    assert not compiled
    reference = weakref.ref(f)
    del f
    gc.collect()
    assert reference() is None


OF_JAX = {"custom_jvp": jax.nn.relu, "ufunc": functools.partial(jnp.add, 0.5)}


@pytest.mark.parametrize("kind", OF_JAX)
@pytest.mark.parametrize("name", ["cond", "switch", "scan"])
def test_a_function_of_jax_is_compiled_once_whatever_its_type(name, kind):
    """As by `jax.lax`."""
    ALONE[name](OF_JAX[kind])
    with compilations() as compiled:
        for _ in range(3):
            ALONE[name](OF_JAX[kind])
    assert not compiled


class Trainer:
    """A plain object, the method of which is the body of a loop, and which can be called itself."""

    def __init__(self):
        self.scale, self.options, self.offset = 2.0, {"power": 1}, jnp.float32(0)
        self.held = None

    def step(self, x):
        y = x * self.scale ** self.options["power"] + self.offset
        return y if self.held is None else y * self.held.flag

    __call__ = step


@pytest.mark.parametrize("of", [lambda t: t.step, lambda t: t, lambda t: functools.partial(t.step)])
def test_a_kept_loop_over_a_method_is_compiled_once_for_the_attributes_of_its_object(of):
    """Of a plain object, which may have others at a later call. It keeps no Module alive."""
    trainer = Trainer()
    loop = nnx.scan(of(trainer), in_axes=nnx.Carry, out_axes=nnx.Carry, length=1)
    with compilations() as compiled:
        found = [loop(X) for _ in range(3)]
    assert len(compiled) == 1
    assert found == [2, 2, 2]
    trainer.scale = 3.0
    assert loop(X) == 3
    trainer.options["power"] = 2
    assert loop(X) == 9
    trainer.offset = jnp.float32(1)
    assert loop(X) == 10
    trainer.held = held = Layer()
    for held.flag in (2.0, 3.0):
        assert loop(X) == 10 * held.flag
    reference, trainer.held = weakref.ref(held), None
    assert loop(X) == 10
    del held
    gc.collect()
    assert reference() is None


class SlottedTrainer:
    __slots__ = ("scale",)

    def step(self, x):
        return x * self.scale


def test_the_attributes_of_an_object_may_be_in_slots():
    trainer = SlottedTrainer()
    loop = nnx.scan(trainer.step, in_axes=nnx.Carry, out_axes=nnx.Carry, length=1)
    for trainer.scale in (2.0, 3.0):
        assert loop(X) == trainer.scale


class Level(int):
    """Has no hash, since it has an equality of its own, and holds more than attributes."""

    def __eq__(self, other):
        return int(self) == int(other)


def test_attributes_that_cannot_be_compared_are_seen_at_each_call():
    trainer = Trainer()
    loop = nnx.scan(trainer.step, in_axes=nnx.Carry, out_axes=nnx.Carry, length=1)
    for trainer.scale in (Level(2), Level(3)):
        assert loop(X) == trainer.scale


def test_what_a_loop_captures_is_kept_alive_by_nothing_that_is_kept_for_it():
    """The Module is in the attributes of a plain object, to which the function refers no more."""
    trainer = Trainer()
    trainer.held = Layer()
    trainer.held.flag = 2.0
    loop = nnx.scan(lambda x: trainer.step(x), in_axes=nnx.Carry, out_axes=nnx.Carry, length=1)
    for _ in range(2):
        assert loop(X) == 4
    reference, trainer = weakref.ref(trainer.held), None
    gc.collect()
    assert reference() is None


def test_an_eager_loop_is_one_program_with_what_is_around_it():
    """Such as the moves of the axes along which it goes."""
    loop = nnx.scan(lambda c, x: (c + 1, 2 * x), in_axes=(nnx.Carry, 1), out_axes=(nnx.Carry, 1))
    x = jnp.ones((2, 3))
    with compilations() as compiled:
        loop(X, x)
    assert len(compiled) == 1


TABLE = jnp.arange(1000.0)  # 4,000 bytes
LOOK_UPS = {
    "cond": lambda f: nnx.cond(True, f, f, 3),
    "switch": lambda f: nnx.switch(1, [lambda i: 0.0, f], 3),
    "scan": lambda f: nnx.scan(lambda c, i: c + f(i), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(0.0, jnp.arange(3)),
    "while_loop": lambda f: nnx.while_loop(lambda c: c < 3, lambda c: c + f(1), 0.0),
    "fori_loop": lambda f: nnx.fori_loop(0, 3, lambda i, c: c + f(i), 0.0),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_an_array_to_which_a_function_refers_is_no_constant_of_what_is_compiled(name):
    """As in jax.lax: XLA would copy it, and take a second for each 60 MB."""
    settings = jax.config.jax_captured_constants_warn_bytes
    jax.config.update("jax_captured_constants_warn_bytes", 1000)  # JAX warns, which is an error here
    try:
        with pytest.raises(UserWarning, match="constants were captured"):
            jax.jit(lambda i: TABLE[i])(3)
        assert LOOK_UPS[name](lambda i: TABLE[i]) == 3
    finally:
        jax.config.update("jax_captured_constants_warn_bytes", settings)


def test_a_kept_loop_takes_other_arrays_for_inputs_of_another_type():
    """The function chooses its array by the shape of its input."""
    tables = {n: jnp.arange(n) + 10.0 * n for n in (2, 3)}
    loop = nnx.scan(lambda c, x: (c + tables[len(x)], x), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    for n in (2, 3, 2, 3):
        total, _ = loop(jnp.zeros(n), jnp.ones((2, n)))
        np.testing.assert_array_equal(total, 2 * tables[n])


# --- inside of a trace ----------------------------------------------------------------------------------------------

TRACES = []


class Block(nnx.Module):
    """Reads a weight, counts its calls, draws a key, and has a setting."""

    def __init__(self, seed, flag=2.0):
        self.weight = nnx.Param(jnp.float32(1 + seed))
        self.calls = nnx.Variable(jnp.int32(0))
        self.rngs = nnx.Rngs(seed)
        self.flag = flag


def step(block, x):
    TRACES.append(1)
    block.calls += 1
    return x * block.weight * block.flag + jax.random.uniform(block.rngs())


def other(block, x):
    return x


def on_carry(carry):
    return carry[0], step(*carry)


def on_index(_, carry):
    return on_carry(carry)


def on_count(carry):
    return *on_carry(carry[:2]), carry[2] + 1


def is_first(carry):
    return carry[2] < 1


INSIDE = {
    "remat": lambda block, x: nnx.remat(step)(block, x),
    "scan": lambda block, x: nnx.scan(on_carry, in_axes=nnx.Carry, out_axes=nnx.Carry, length=1)((block, x))[1],
    "cond": lambda block, x: nnx.cond(x > -1, step, other, block, x),
    "switch": lambda block, x: nnx.switch(jnp.int32(x > -1), [other, step], block, x),
    "while_loop": lambda block, x: nnx.while_loop(is_first, on_count, (block, x, 0))[1],
    "fori_loop": lambda block, x: nnx.fori_loop(0, 1, on_index, (block, x))[1],
}


def blocks(*flags):
    return [Block(seed, flag) for seed, flag in enumerate(flags)]


@pytest.fixture
def traces():
    jax.clear_caches()
    TRACES.clear()
    return TRACES


def through(call, layers, x):
    for block in layers:
        x = call(block, x)
    return x


@pytest.mark.parametrize("name", INSIDE)
def test_equal_layers_in_a_trace_are_traced_once_and_each_is_computed_and_changed(name, traces):
    """With the keys of each."""
    plain, model = blocks(2.0, 2.0, 2.0), blocks(2.0, 2.0, 2.0)
    expected = through(step, plain, X)
    traces.clear()
    for calls in (1, 2):
        y = nnx.jit(lambda model, x: through(INSIDE[name], model, x))(model, X)
        assert len(traces) == 1
        if calls == 1:
            np.testing.assert_allclose(y, expected, rtol=1e-6)
        assert [int(block.calls.value) for block in model] == [calls] * 3
        assert [int(block.rngs.default.count.value) for block in model] == [calls] * 3


@pytest.mark.parametrize("name", sorted(INSIDE.keys() - {"while_loop"}))  # which has none
def test_gradients_of_equal_layers_in_a_trace(name):
    """Are those of the plain calls."""
    loss = lambda call: lambda model: through(call, model, X)
    wrt = nnx.DiffState(0, nnx.Param)
    expected = nnx.grad(loss(step), argnums=wrt)(blocks(2.0, 2.0, 2.0))
    got = nnx.jit(nnx.grad(loss(INSIDE[name]), argnums=wrt))(blocks(2.0, 2.0, 2.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)


def changed(layers, change):
    change(layers[1])
    return layers


CHANGES = {
    "setting": lambda block: setattr(block, "flag", 3.0),
    "new attribute": lambda block: setattr(block, "extra", 1.0),
    "type of a Variable": lambda block: setattr(block, "weight", nnx.BatchStat(block.weight.value)),
    "metadata": lambda block: block.weight.set_metadata(frozen=True),
    "dtype": lambda block: setattr(block.weight, "value", jnp.bfloat16(2)),
    "shape": lambda block: setattr(block.weight, "value", jnp.full((1,), 2.0)),
    "weak type": lambda block: setattr(block.weight, "value", jnp.asarray(2.0)),
    "sharing": lambda block: setattr(block, "also", block.weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_differs_is_traced_by_itself(change, traces):
    """And computes what it computes eagerly."""
    make = lambda: changed(blocks(2.0, 2.0, 2.0), CHANGES[change])
    expected = through(step, make(), X)
    traces.clear()
    y = nnx.jit(lambda model, x: through(INSIDE["remat"], model, x))(make(), X)
    np.testing.assert_allclose(y, expected, rtol=1e-2 if change == "dtype" else 1e-6)
    assert len(traces) == (3 if change == "shape" else 2)  # the output of another shape is the input of the next


def test_a_setting_of_jax_that_differs_between_two_calls_is_seen():
    """As it is by jax.jit."""

    def product(a, b):
        return a @ b

    def both(a):
        call = nnx.remat(product)
        one = call(a, a)
        with jax.default_matmul_precision("float32"):
            return one, call(a, a)

    text = str(jax.make_jaxpr(both)(jnp.ones((2, 2))))
    assert text.count("dot_general") == 2
    assert text.count("precision=(Precision.HIGHEST") == 1


@contextlib.contextmanager
def product_replaced(by):
    """As quantisers do: the code of JAX's product is another while a model runs."""
    code, names = lax.dot_general.__code__, lax.dot_general.__globals__
    names["replaced_product"] = lambda *args, **kwargs: by
    try:
        lax.dot_general.__code__ = (lambda *args, **kwargs: replaced_product(*args, **kwargs)).__code__  # noqa: F821
        yield
    finally:
        lax.dot_general.__code__ = code
        del names["replaced_product"]


@contextlib.contextmanager
def sine_replaced(by):
    """As exporters do: a function of jax.numpy is another while a model is traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jnp, "sin", lambda x: by)
        yield


REPLACED = {
    "eager, quantiser": (False, product_replaced, 1 + np.sin(2)),
    "traced, quantiser": (True, product_replaced, 1 + np.sin(2)),
    "traced, exporter": (True, sine_replaced, 1 + 2),
}


@pytest.mark.parametrize("replaced", REPLACED)
@pytest.mark.parametrize("name", [*ALONE, "remat"])
def test_what_is_traced_while_functions_of_jax_are_replaced_is_for_that_call_only(name, replaced):
    """What was kept before has not the functions in their place, and what were kept then would have them ever after."""

    def f(*args):
        return 1 + jnp.sin(lax.dot_general(args[-1], args[-1], (((), ()), ((), ()))))

    call = ALONE.get(name, lambda f: nnx.remat(f)(X))
    traced, replace, expected = REPLACED[replaced]
    run = lambda: jax.jit(lambda: call(f))() if traced else call(f)
    assert np.isclose(run(), 1 + np.sin(1))
    with replace(by=jnp.float32(2)):
        assert np.isclose(run(), expected)
    assert np.isclose(run(), 1 + np.sin(1))


HELD = threading.local()


def reads_what_is_held(block, x):
    return x * block.weight + HELD.value


@pytest.mark.parametrize("name", ["remat", "cond"])
def test_an_array_of_the_trace_that_a_function_finds_elsewhere_is_seen_at_each_call(name):
    """Such as one that the model has left in a plain object: neither the first nor one of an earlier trace is kept."""
    calls = {
        "remat": lambda block, x: nnx.remat(reads_what_is_held)(block, x),
        "cond": lambda block, x: nnx.cond(x > -1, reads_what_is_held, other, block, x),
    }

    def forward(model, x):
        for k, block in enumerate(model):
            HELD.value = x + k
            x = calls[name](block, x)
        return x

    expected = X
    for k, block in enumerate(blocks(2.0, 2.0, 2.0)):
        expected = expected * block.weight + (expected + k)
    for _ in range(2):
        assert nnx.jit(lambda model, x: forward(model, x))(blocks(2.0, 2.0, 2.0), X) == expected
        assert jax.jit(lambda x: forward(blocks(2.0, 2.0, 2.0), x))(X) == expected
    if name == "remat":  # the others are compiled in eager code, with what they find for a constant, as in JAX
        assert forward(blocks(2.0, 2.0, 2.0), X) == expected
    del HELD.value  # a tracer, which other tests might find


class Owner(nnx.Module):
    """Keeps a function that closes over its own layer."""

    def __init__(self):
        self.block = Block(0)
        self.call = lambda x: x * self.block.weight * self.block.flag


def test_a_function_that_closes_over_a_module_of_the_trace_is_traced_at_each_call():
    """It may have changed."""

    def forward(owner, x):
        remat = nnx.remat(owner.call)
        x = remat(x)
        owner.block.flag = 5.0
        return remat(x)

    assert jax.jit(lambda x: forward(Owner(), x))(X) == 10
    assert forward(Owner(), X) == 10


def test_remat_is_traced_once_and_not_compiled_in_eager_code(traces):
    """So its gradient is not traced again either."""
    call, block = nnx.remat(step), Block(0)
    for _ in range(3):
        call(block, X)
        nnx.grad(call, argnums=1)(block, X)
    assert len(traces) == 1


@pytest.mark.parametrize("transform", [nnx.remat, nnx.scan(in_axes=(None, 0), out_axes=0)], ids=["remat", "scan"])
def test_a_transformed_function_of_a_notebook_is_pickled(transform):
    """By cloudpickle, which takes what it cannot import by its contents, a class with its methods, too."""
    f = transform(lambda layer, x: layer.w * x)
    layer, x = Layer(), jnp.arange(3.0)
    for _ in range(2):
        twin = cloudpickle.loads(cloudpickle.dumps(f))
        gc.collect()
        assert twin.__wrapped__ is not f.__wrapped__
        for _ in range(2):
            np.testing.assert_array_equal(twin(layer, x), f(layer, x))
