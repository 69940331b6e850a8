"""nnx.jit: ways to call it, options of jax.jit, what goes in and comes out, caches, errors, memory."""

import collections
import copy
import dataclasses
import functools
import gc
import inspect
import pathlib
import pickle
import random
import signal
import time
import weakref
from typing import Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core import errors
from tests.properties.compare import assert_same, objects_in

from .jitted import Layer, Net, X, values
from .models import counted

ONE_DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def check(jitted, model, x=X):
    """`jitted(x)` (the model is bound to it, or it is a partial of one that takes both) does what `model(x)` does."""
    eager = copy.deepcopy(model)
    for _ in range(3):
        np.testing.assert_array_equal(jitted(x), eager(x))
        assert_same(model, eager)
    model.layers[0].w.value = eager.layers[0].w.value = jnp.full(2, 9.0)
    np.testing.assert_array_equal(jitted(x), eager(x))
    assert_same(model, eager)


# --- ways to call it ------------------------------------------------------------------------------------------------

FORMS = {
    "function": lambda m: functools.partial(nnx.jit(lambda m, x: m(x)), m),
    "with parentheses": lambda m: functools.partial(nnx.jit()(lambda m, x: m(x)), m),
    "with options": lambda m: functools.partial(nnx.jit(keep_unused=True)(lambda m, x: m(x)), m),
    "keyword": lambda m: lambda x: nnx.jit(lambda m, x: m(x))(x=x, m=m),
    "callable Module": nnx.jit,
    "unbound method": lambda m: functools.partial(nnx.jit(Net.__call__), m),
    "bound method": lambda m: nnx.jit(m.__call__),
    "partial with a Module": lambda m: nnx.jit(functools.partial(lambda m, x: m(x), m)),
    "partial with a keyword Module": lambda m: nnx.jit(functools.partial(lambda x, m: m(x), m=m)),
    "partial of a partial": lambda m: nnx.jit(
        functools.partial(functools.partial(lambda f, m, x: f(m, x), Net.__call__), m)
    ),
    "partial of a bound method": lambda m: nnx.jit(functools.partial(m.__call__)),
    "partial of a callable Module": lambda m: nnx.jit(functools.partial(m)),
    "partial with a list of Modules": lambda m: nnx.jit(functools.partial(lambda ms, x: ms[0](x), [m])),
    "jit of a jitted function": lambda m: functools.partial(nnx.jit(nnx.jit(lambda m, x: m(x))), m),
    "jitted inside": lambda m: lambda x: nnx.jit(lambda m, x: nnx.jit(lambda m, x: m(x))(m, x))(m, x),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_call_it(form):
    """Each way of wrapping gives the eager result, leaves the eager state, and sees weights set afterwards."""
    model = Net()
    check(FORMS[form](model), model)


def test_decorated_methods():
    """A decorated method is one: on the instance, on the class, inherited, overridden, through super(), on __call__."""

    class Base(Net):
        @nnx.jit
        def step(self, x):
            return self.layers[0](x)

        @nnx.jit(static_argnames="times")
        def repeat(self, x, times=2):
            return self.layers[0].scaled(x, times=times)

        @nnx.jit
        def __call__(self, x):
            return super().__call__(x)

    class Derived(Base):
        @nnx.jit
        def step(self, x):
            return 3 * super().step(x)

    model, derived = Base(), Derived()
    assert model.step(X).tolist() == Base.step(model, X).tolist() == [1, 1]
    assert derived.step(X).tolist() == [3, 3]
    derived.layers[0].w.value = jnp.full(2, 2.0)
    assert derived.step(X).tolist() == [6, 6]
    assert derived.repeat(X, times=3).tolist() == [8, 8]
    assert (int(model.layers[0].calls), int(derived.layers[0].calls)) == (2, 5)
    model = Derived()
    check(model, model)
    assert Base.step.__name__ == "step"


def test_jit_of_a_jitted_callable_module():
    """jit of jit of a callable Module is jit of the Module."""
    model = Net()
    check(nnx.jit(nnx.jit(model)), model)


def test_static_and_class_methods():
    """jit under staticmethod and classmethod."""

    class Maker(Net):
        @staticmethod
        @nnx.jit
        def double(m, x):
            return 2 * m(x)

        @classmethod
        def make(cls):
            return nnx.jit(cls)()

    assert Maker.double(Layer(), X).tolist() == [2, 2]
    assert type(Maker.make()) is Maker


def test_constructors():
    """A class, a lambda that constructs, and a partial of a class are compiled, and make Modules of the outer world."""
    for make in (
        nnx.jit(Net),
        nnx.jit(lambda: Net(2)),
        nnx.jit(functools.partial(Net, 2)),
        nnx.jit(functools.partial(Net, depth=2)),
        functools.partial(nnx.jit(Net, static_argnums=0), 2),
        functools.partial(nnx.jit(Net, static_argnames="depth"), depth=2),
    ):
        made = make()
        assert_same(made, Net())
        made.layers[0].w += 1
        made.extra = 1
        assert_same(make(), Net())
    linear = nnx.jit(lambda rngs: nnx.Linear(2, 3, rngs=rngs))(rngs := nnx.Rngs(0))
    np.testing.assert_allclose(linear.kernel, nnx.Linear(2, 3, rngs=nnx.Rngs(0)).kernel, rtol=1e-6)
    assert int(rngs.params.count) == 2


def test_partials_with_other_values():
    """Arrays bound by a partial are inputs, everything else is static; either can be overridden by a keyword."""

    def f(static, array, x, *, flag=False, by=1.0):
        assert type(static) is str
        assert isinstance(array, jax.core.Tracer)
        return array * x * (by if flag else 0.0)

    jitted = nnx.jit(functools.partial(f, "s", jnp.full(2, 3.0), flag=True, by=2.0))
    assert jitted(X).tolist() == [6, 6]
    assert jitted(X, by=5.0).tolist() == [15, 15]


def test_partials_of_functions_with_static_arguments():
    """A bound value may be one of the static arguments, whether it is bound by position or by keyword."""

    def f(scale, x, *, flag):
        return x * scale if flag else x

    jitted = nnx.jit(functools.partial(f, 3, flag=True), static_argnames=("scale", "flag"))
    assert jitted(X).tolist() == [3, 3]
    assert jitted(X, flag=False).tolist() == [1, 1]


def test_builtins_and_functions_without_a_signature():
    """Functions whose signature Python does not know, and functions of NumPy-like libraries, are compiled."""
    assert nnx.jit(jnp.sum)(X).item() == 2
    assert nnx.jit(jax.nn.relu)(-X).tolist() == [0, 0]
    assert nnx.jit(lambda *xs, **named: xs[1] + named["a"])(1, 2, a=3).item() == 5


def test_looks_like_what_it_wraps():
    """Name, docstring, signature; the attributes of a callable Module do not become those of the jitted function."""

    @nnx.jit
    def f(m, x, /, y=1, *, z=2):
        """Doc."""

    assert (f.__name__, f.__doc__, f.__module__) == ("f", "Doc.", __name__)
    assert str(inspect.signature(f)) == "(m, x, /, y=1, *, z=2)"
    assert repr(f).startswith("nnx.jit(")
    model = Net()
    model.lower = model.jitted = 1
    jitted = nnx.jit(model)
    assert callable(jitted.lower)
    assert not hasattr(jitted, "jitted")


@pytest.mark.parametrize("transform", [nnx.jit, nnx.vmap, nnx.remat, nnx.custom_vjp, nnx.custom_jvp])
def test_annotations_are_those_of_the_function(transform):
    """As with `functools.wraps`; the objects that some transforms return have no others."""

    def f(x: int, y: float = 1.0) -> bool:
        return True

    expected = {"x": int, "y": float, "return": bool}
    assert transform(f).__annotations__ == inspect.get_annotations(transform(f)) == expected
    assert get_type_hints(transform(f)) == expected


def test_a_module_that_cannot_be_called():
    """jit of a Module without __call__ says so at once."""
    with pytest.raises(errors.ArgumentError, match=r"List cannot be called.*__call__"):
        nnx.jit(nnx.List([]))


# --- what goes in and comes out -------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Training:
    model: Net
    step: jax.Array
    name: str = dataclasses.field(default="run", metadata={"static": True})


class Several(NamedTuple):
    model: Net
    others: dict


INSIDE = {
    "tuple": lambda m: (m, jnp.ones(1)),
    "list": lambda m: [m],
    "dict": lambda m: {"m": m, "x": jnp.ones(1)},
    "named tuple": lambda m: Several(m, {"k": (None, m.layers[0])}),
    "registered dataclass": lambda m: Training(m, jnp.zeros(())),
    "deep": lambda m: [({"a": [m]}, None)],
    "nnx.List": lambda m: nnx.List([m, 1]),
    "nnx.Dict": lambda m: nnx.Dict(m=m),
    "bound method": lambda m: m.__call__,
    "the same Module twice": lambda m: (m, m),
    "a Module and its part": lambda m: (m, m.layers[1]),
    "a part and then the whole": lambda m: (m.layers[1], m),
    "a Variable and its Module": lambda m: (m.layers[0].w, m),
    "two that share": lambda m: (m, nnx.List([m.layers[0]])),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_modules_inside_pytrees(inside):
    """Modules in arguments and outputs of any shape are the caller's own objects, shared as they were, and written."""
    model, eager = Net(), Net()

    def step(tree, x):
        layer = next(m for m in jax.tree.leaves(tree, is_leaf=is_object) if is_object(m))
        layer = getattr(layer, "__self__", layer)
        for _, variable in nnx.iter_graph(layer):
            if isinstance(variable, nnx.Param):
                variable += x[0]
        return tree, x

    def is_object(m):
        return isinstance(m, nnx.Pytree | nnx.List | nnx.Dict | nnx.Variable) or inspect.ismethod(m)

    tree, other, jitted = INSIDE[inside](model), INSIDE[inside](eager), nnx.jit(step)
    for _ in range(3):
        out, _ = jitted(tree, X)
        expected, _ = step(other, X)
        assert_same((out, model), (expected, eager))
        assert all(a is b for a, b in zip(objects_in(out), objects_in(tree), strict=True))


def test_a_static_field_of_a_dataclass_argument():
    """Static fields of registered dataclasses are part of the program."""
    f = counted(lambda t: t.model.scale if t.name == "run" else 0.0)
    jitted = nnx.jit(f)
    for name, expected in (("run", 2.0), ("other", 0.0), ("run", 2.0)):
        assert jitted(Training(Net(), jnp.zeros(()), name)).item() == expected
    assert f.count == 2


def test_variables_as_arguments():
    """Variables are written in place; by keyword, twice, and together with the Module that holds them."""
    layer, free = Layer(), nnx.Param(jnp.zeros(2))

    @nnx.jit
    def f(v, *, w, both, layer):
        v += 1
        w *= 2
        layer.w -= 1
        return v, both[0]

    for _ in range(2):
        out, other = f(free, w=layer.w, both=(free, layer.w), layer=layer)
        assert out is other is free
    assert (free.value.tolist(), layer.w.value.tolist()) == ([2, 2], [1, 1])


def test_a_value_that_is_a_pytree_is_not_printed():
    """The text of a large one, or of deleted arrays, would have to be read from the device."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(repr=False)
    class Field:
        data: Any

        def __repr__(self):
            raise AssertionError

    m = nnx.Dict(field=nnx.Variable(Field(jnp.arange(3.0))))
    double = nnx.jit(lambda m: jax.tree.map(lambda x: 2 * x, m.field.get_value()))
    assert double(m).data.tolist() == [0, 2, 4]


def test_states_and_graphdefs_as_arguments():
    """A State, a GraphDef and what `split` returns go in as ordinary pytrees, as with raw jax.jit."""
    model = Net()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def f(graphdef, params, rest, x):
        m = nnx.merge(graphdef, params, rest)
        return m(x), nnx.state(m)

    expected, eager_state = f(graphdef, params, rest, X)
    for transform in (nnx.jit, jax.jit):
        out, state = transform(f)(graphdef, params, rest, X)
        np.testing.assert_array_equal(out, expected)
        assert isinstance(state, nnx.State)
        jax.tree.map(np.testing.assert_array_equal, state, eager_state)
    assert int(params["layers"][0]["w"][0]) == 1

    @nnx.jit
    def in_place(params):
        params["layers"][0]["w"] *= 5

    in_place(params)
    assert params["layers"][0]["w"].value.tolist() == [5, 5]


def test_other_leaves():
    """NumPy arrays, Python numbers, None, typed keys, nested in kwargs, go in and come out as with jax.jit."""
    f = lambda *args, **kwargs: (args, kwargs)
    args, kwargs = (np.ones(2), 1, 2.5, True, None, jax.random.key(0)), {"b": {"x": [1.0, None]}, "a": ()}
    out, expected = nnx.jit(f)(*args, **kwargs), jax.jit(f)(*args, **kwargs)
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert (x.aval, bool((x == y).all())) == (y.aval, True)


def test_outputs_are_the_objects_that_went_in():
    """Arguments, their parts and Variables come back as the very objects; new Modules as new ones, shared alike."""
    model = Net()

    @nnx.jit
    def f(m):
        new = Layer()
        return {"m": m, "part": m.layers[1], "v": m.layers[0].w, "new": (new, new, [new.w]), "same": m.layers}

    for _ in range(2):
        out = f(model)
        assert (out["m"], out["part"], out["v"], out["same"]) == (
            model,
            model.layers[1],
            model.layers[0].w,
            model.layers,
        )
        assert out["m"] is model
        assert out["part"] is model.layers[1]
        assert out["v"] is model.layers[0].w
        new, again, (w,) = out["new"]
        assert new is again
        assert new.w is w


MUTATIONS = {
    "attach": lambda a, b: setattr(a, "extra", Layer(5.0)),
    "attach an array": lambda a, b: setattr(a, "extra", 2 * a.layers[0].w),
    "attach a static value": lambda a, b: setattr(a, "extra", ("x", 1)),
    "delete": lambda a, b: delattr(a, "scale"),
    "delete a Module": lambda a, b: a.layers.pop(0) and None,
    "swap": lambda a, b: a.set_attributes(layers=nnx.List([a.layers[1], a.layers[0]])),
    "share": lambda a, b: setattr(b, "layers", a.layers),
    "move": lambda a, b: b.layers.append(a.layers.pop()),
    "exchange": lambda a, b: (setattr(a, "other", b), setattr(b, "other", a))[0],
    "unshare": lambda a, b: setattr(a.layers[0], "w", nnx.Param(a.layers[0].w + 1)),
    "class": lambda a, b: setattr(a.layers[0], "__class__", Net),
    "Variable class": lambda a, b: setattr(a.layers[0].w, "__class__", nnx.BatchStat),
    "metadata": lambda a, b: a.layers[0].w.set_metadata(tag="x"),
    "values of both": lambda a, b: [setattr(m.layers[0].w, "value", m.layers[1].w * 2) for m in (a, b)] and None,
    "order of attributes": lambda a, b: setattr(a, "layers", vars(a).pop("layers")),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_structural_changes_come_out(mutation):
    """What a jitted function does to two arguments, twice, is what the eager function does, by value and identity."""
    mutate = MUTATIONS[mutation]
    pairs = (Net(), Net()), (Net(), Net())
    parts = objects_in(pairs[0])[2:]
    jitted = nnx.jit(mutate)
    for _ in range(2):
        try:
            expected = mutate(*pairs[1])
        except (AttributeError, IndexError):
            break
        out = jitted(*pairs[0])
        assert_same((pairs[0], out), (pairs[1], expected))
    assert any(x is y for y in objects_in(pairs[0]) for x in parts)


def test_state_takes_what_its_filters_select():
    """A jitted function is not given the other Variables: their arrays may even be gone."""
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    @nnx.jit
    def parameters(norm):
        return nnx.state(norm, nnx.Param)

    for leaf in (norm.mean, norm.var):
        leaf.value.delete()
    assert list(parameters(norm)) == ["bias", "scale"]
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        nnx.jit(lambda norm: nnx.state(norm))(norm)


def test_unchanged_values_are_not_touched():
    """A Variable that the function only reads keeps the very array; one that it writes gets another."""
    model = Net()
    before = [v.value for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
    nnx.jit(lambda m, x: m.layers[0].w * x)(model, X)
    assert all(v is w for v, w in zip(before, values(model), strict=True))
    nnx.jit(lambda m, x: m.layers[0](x))(model, X)
    changed = [i for i, (v, w) in enumerate(zip(before, values(model), strict=True)) if v is not w]
    assert len(changed) == 1


def test_hooks_do_not_run_when_values_cross():
    """on_get_value and on_set_value run where the user reads and writes, as in eager code, and not once more."""
    log = []
    v = nnx.Param(
        1.0, on_set_value=lambda v, x: log.append("set") or x, on_get_value=lambda v, x: log.append("get") or x
    )

    @nnx.jit
    def f(v):
        v.value = v.value + 1

    f(v)
    assert log == ["get", "set"]
    f(v)
    assert (log, v.raw_value.item()) == (["get", "set"], 3.0)


# --- caching --------------------------------------------------------------------------------------------------------


def test_equal_structures_share_a_program():
    """Another model, a clone, a deep copy, a pickled one, a merged one: no retrace."""
    f = counted(lambda m, x: m(x))
    jitted, model = nnx.jit(f), Net()
    jitted(model, X)
    for other in (
        model,
        Net(),
        nnx.clone(model),
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        nnx.merge(*nnx.split(model)),
        jax.tree.map(lambda x: x, model),
    ):
        for _ in range(3):
            jitted(other, X)
    assert f.count == 1


def test_another_structure_is_another_program():
    """Depth, shape, dtype, static values and sharing each trace once."""
    f = counted(lambda m, x: m(x))
    jitted = nnx.jit(f)
    tied = Net()
    tied.layers[1] = tied.layers[0]
    models = [Net(), Net(3), tied]
    for _ in range(2):
        for m in models:
            jitted(m, X)
        jitted(models[0], jnp.ones((3, 2)))
        jitted(models[0], jnp.ones(2, jnp.int32))
    assert f.count == 5


def test_toggling_a_static_attribute():
    """A flag that is toggled traces once, toggled back not at all, also eval() and train()."""
    f = counted(lambda m, x: m(x))
    jitted, model = nnx.jit(f), nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    for _ in range(3):
        model.train()
        jitted(model, jnp.ones((4, 2)))
        model.eval()
        jitted(model, jnp.ones((4, 2)))
    model.layers[0].rate = 0.25
    jitted(model, jnp.ones((4, 2)))
    model.layers[0].rate = 0.5
    jitted(model, jnp.ones((4, 2)))
    assert f.count == 3


def test_attributes_attached_and_removed_again():
    """A model that is back to the structure it had finds the program it had."""
    f = counted(lambda m, x: m(x))
    jitted, model = nnx.jit(f), Net()
    for _ in range(3):
        jitted(model, X)
        model.extra = Layer()
        jitted(model, X)
        del model.extra
    assert f.count == 2


@pytest.mark.parametrize("seed", range(4))
def test_several_objects_in_any_company(seed):
    """Which objects come together, in which places, shared or not, changed or not: each call is as if it was eager."""

    def step(a, b, x):
        a.layers[0].w.value = (a.layers[0].w + x * b.layers[1].w) % 7  # whole numbers: no rounding
        b.layers[0].calls += 1
        return a(x).sum() * (2 if b.loud else 1)

    def make():
        nets = [Net() for _ in range(3)]
        for net in nets:
            net.loud = False
        return nets

    def share(nets, i, j):
        nets[i].layers[1].w = nets[j].layers[0].w

    def toggle(nets, i, j):
        nets[i].loud = not nets[i].loud

    def assign(nets, i, j):
        nets[i].layers[1].w.value = (nets[j].layers[0].w + 1) % 7

    def exchange(nets, i, j):
        nets[i].layers[0] = Layer(3.0)

    rng = random.Random(seed)
    jitted, nets, eager = nnx.jit(step), make(), make()
    for k in range(60):
        i, j = rng.choice([(0, 1)] * 8 + [(0, 2), (1, 0), (2, 2), (2, 1)])
        assert jitted(nets[i], nets[j], k * X) == step(eager[i], eager[j], k * X)
        assert_same(nets, eager)
        if rng.random() < 0.3:
            act = rng.choice([share, toggle, assign, exchange])
            act(nets, i, j)
            act(eager, i, j)


class Pair(NamedTuple):
    first: Any
    second: Any


class Reversed(NamedTuple):
    """A named tuple that JAX takes apart in another order."""

    first: Any
    second: Any


jax.tree_util.register_pytree_node(Reversed, lambda x: (x[::-1], None), lambda _, children: Reversed(*children[::-1]))


def test_containers_among_the_arguments():
    """Of any kind and order, call after call, with objects in them or not."""

    def step(given):
        m, x, y = jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, nnx.Module))
        return m(X) * 2 + x - 3 * y

    model = Net()
    kinds = [tuple, list, lambda x: {"a": x[0], "b": x[1]}, lambda x: {"b": x[1], "a": x[0]}, lambda x: Pair(*x)]
    kinds += [lambda x: Reversed(*x[::-1]), lambda x: collections.OrderedDict(a=x[0], b=(None, [x[1]]))]
    for chosen in (*[[kind] for kind in kinds], kinds):
        jitted = nnx.jit(step)
        for k in range(4):
            for kind in chosen:
                given = kind(((model, X * k), jnp.full(2, 5.0)))
                np.testing.assert_array_equal(jitted(given), step(given))


def test_an_object_does_not_keep_those_it_is_passed_with(unchecked):
    jitted, model, others = nnx.jit(lambda a, b: a.layers[0].w * b.layers[0].w), Net(), [Net(), Net()]
    for other in others:
        for _ in range(5):
            jitted(model, other)
            jitted(other, model)
    gone = [weakref.ref(x) for x in (others[1], others[1].layers[0].w, model.layers[0].w)]
    del others[1], other
    assert [ref() is None for ref in gone] == [True, True, False]
    del model
    assert gone[2]() is None


def test_keyword_order_and_sharing_between_arguments():
    """The order of keywords makes no difference; which arguments are shared does, once."""
    f = counted(lambda a, b: a(X) + b(X))
    jitted, m, n = nnx.jit(f), Net(), Net()
    jitted(a=m, b=n)
    jitted(b=m, a=n)
    assert f.count == 1
    for _ in range(2):
        jitted(a=m, b=m)
        jitted(a=n, b=n)
        jitted(b=n, a=m)
    assert f.count == 2


def test_different_changes_by_one_program_for_each_trace():
    """What changes may differ from trace to trace of one function: each cache hit hands out the right one."""

    def f(m, x):
        if x.ndim:
            m.layers[0].w += 1
        elif x.dtype == jnp.int32:
            m.seen = x
        return m.layers[0].w.sum()

    jitted, model, eager = nnx.jit(f), Net(), Net()
    for x in (X, jnp.float32(1), jnp.int32(1), X, jnp.float32(1), X):
        assert jitted(model, x) == f(eager, x)
        assert_same(model, eager)


def test_the_size_of_the_cache():
    """Code that logs recompilations asks for it as for that of a function of JAX; bound arguments do not hide it."""
    jitted = nnx.jit(lambda m, x: m.x * x)
    bound = functools.partial(nnx.cached_partial(jitted, nnx.Dict(x=nnx.Param(2.0))))
    assert bound.func.jitted_fn._cache_size() == 0
    for x in (1.0, 2.0, jnp.ones(2)):
        bound(x)
    assert bound.func.jitted_fn._cache_size() == 2
    jitted.clear_cache()
    assert jitted.jitted_fn._cache_size() == 0


def test_clear_cache():
    """After clear_cache the function is traced again, and right."""
    f = counted(lambda m, x: m(x))
    jitted, model = nnx.jit(f), Net()
    first = jitted(model, X)
    jitted.clear_cache()
    np.testing.assert_array_equal(jitted(model, X), first)
    assert f.count == 2


def test_calls_per_hot_call_do_not_grow_with_the_model(unchecked):
    """Python and C calls of a jitted call: as many for 1,000 Variables as for 200, reading or writing all of them."""

    def update(m):
        for v in m:
            v += 1

    found = {}
    for size in (200, 1000):
        model = nnx.List([nnx.Param(np.ones(1, np.float32)) for _ in range(size)])
        step, look = nnx.jit(update), nnx.jit(lambda m: m[0].sum())
        for _ in range(5):  # past the checks at 1, 2, 4
            step(model)
            look(model)
        found[size] = count_calls(functools.partial(step, model)), count_calls(functools.partial(look, model))
    assert found[200] == found[1000]
    assert max(found[200]) < 15


def test_methods_cost_as_many_calls_as_functions(unchecked):
    """A jitted method, and one that is bound: what our wrapper of a method keeps is not looked at in each call."""

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(1))

        def step(self):
            return self.w.sum()

    model, found = Model(), []
    for call in (nnx.jit(lambda m: m.w.sum()), nnx.jit(Model.step), nnx.jit(model.step)):
        args = () if len(found) > 1 else (model,)
        for _ in range(20):  # past the checks at 1, 2, 4, 8, 16
            call(*args)
        found.append(count_calls(functools.partial(call, *args)))
    function, *methods = found
    assert methods == [function, function + 1]  # an argument that is bound is added


@pytest.mark.parametrize(
    "options", [{}, {"donate_argnums": (0, 1)}, {"donate_argnums": 0}], ids=["plain", "donated", "donated in part"]
)
def test_calls_of_a_training_step(options, unchecked):
    """With a model, an optimizer and a batch, too; the same number at any size."""

    def step(model, moments, x, rate):
        for v, moment in zip(model, moments, strict=True):
            moment += x
            v -= rate * moment
        return x.sum()

    found = []
    for size in (10, 500):
        model, moments = (nnx.List([nnx.Param(jnp.ones(1)) for _ in range(size)]) for _ in range(2))
        jitted = nnx.jit(step, **options)
        x = jnp.ones(1)
        for _ in range(20):  # past the checks at 1, 2, 4, 8, 16
            jitted(model, moments, x, 0.1)
        found.append(count_calls(functools.partial(jitted, model, moments, jnp.ones(1), 0.1)))
    assert found[0] == found[1] < 20


def test_static_arguments_have_no_sharding():
    """As for `jax.jit`, `in_shardings` counts the other arguments."""
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), jax.P())

    def scaled(x, by, negative):
        return -x * by if negative else x * by

    f = nnx.jit(scaled, in_shardings=(sharding, None), static_argnums=2)
    assert (float(f(2.0, 3.0, True)), float(f(2.0, 3.0, False))) == (-6.0, 6.0)
    f = nnx.jit(scaled, in_shardings=(sharding, None, None), static_argnums=2)
    with pytest.raises(errors.PrefixError, match=r"3 entries, but .* with 2 positional arguments that are not static"):
        f(2.0, 3.0, True)


def test_calls_with_shardings_of_the_arguments(unchecked):
    """That each Variable is where the function takes it is looked up in two calls for each, and not at all for None."""
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), jax.P())
    for own, most in ((sharding, 3), (None, 1)):
        found = []
        for size in (10, 110):
            model = nnx.List([nnx.Param(jnp.ones(1)) for _ in range(size)])
            total = nnx.jit(lambda model, x: model[0] + x, in_shardings=(own, None))
            for _ in range(20):  # past the checks at 1, 2, 4, 8, 16
                total(model, 1.0)
            found.append(count_calls(functools.partial(total, model, 1.0)))
        assert found[1] - found[0] <= most * 100


def test_calls_with_a_static_argument(unchecked):
    """It is hashed and compared, and no more."""
    model, scale = nnx.List([nnx.Param(jnp.ones(1))]), nnx.jit(lambda model, n: model[0] * n, static_argnums=1)
    for _ in range(20):  # past the checks at 1, 2, 4, 8, 16
        scale(model, 2)
    assert count_calls(functools.partial(scale, model, 2)) < 25


def test_calls_for_gradients_that_are_returned(unchecked):
    """The Variables of a State that comes back are made all at once: two or three calls for each, not ten."""
    found = []
    for size in (10, 110):
        model = nnx.List([nnx.Param(jnp.ones(1)) for _ in range(size)])
        grads = nnx.jit(nnx.grad(lambda model: sum(v.sum() ** 2 for v in model)))
        for _ in range(20):  # past the checks at 1, 2, 4, 8, 16
            grads(model)
        found.append(count_calls(functools.partial(grads, model)))
    assert found[1] - found[0] < 4 * 100


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the interrupt may meet the collector
@pytest.mark.parametrize("form", ["alone", "with an array", "walked"])
def test_an_interrupted_step_keeps_what_it_was_given(form):
    """Ctrl-C arrives when the compiled function has returned: what was donated to it is replaced by what came out."""

    def step(m, x=1.0):
        for v in m.values:
            v += x

    model = Net()
    model.values = nnx.List([nnx.Param(jnp.zeros(4)) for _ in range(50)])
    if form == "walked":  # at each call, for metadata that may have been edited in place
        model.listed = nnx.Param(jnp.ones(1), names=["a"])
    args = (model, jnp.ones(4)) if form == "with an array" else (model,)
    jitted, stopped, choose = nnx.jit(step, donate_argnums=0), 0, random.Random(0)

    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        took = []
        for _ in range(20):
            start = time.perf_counter()
            jitted(*args)
            took.append(time.perf_counter() - start)
        while stopped < 50:
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, min(took) * choose.random()))
                try:
                    jitted(*args)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                stopped += 1
            assert len({float(v[0]) for v in model.values}) == 1  # reading a deleted array raises
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "options", [{"donate_argnums": 0}, {"donate_argnums": (0,)}, {"donate_argnums": -2}, {"donate_argnames": "m"}]
)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_donation(options, by_keyword):
    """Every Variable and array of a donated Module is usable afterwards: written ones, read ones, untouched ones."""

    class Holder(Net):
        def __init__(self):
            super().__init__()
            self.array, self.unused, self.listed = jnp.ones(2), nnx.Cache(jnp.ones(3)), [jnp.ones(1)]

    model, eager = Holder(), Holder()
    first = model.layers[0].w.value

    def step(m, x):
        m.layers[0].w += x
        m.array = m.array * 2
        return m.layers[1].w.sum()

    jitted = nnx.jit(step, **options)
    for _ in range(3):
        assert (jitted(m=model, x=X) if by_keyword else jitted(model, X)) == step(eager, X)
        assert_same(model, eager)
    assert first.is_deleted()
    assert not X.is_deleted()


def test_donation_of_what_the_function_ignores():
    """A function that does nothing with a donated Module leaves it usable."""
    model, eager = Net(), Net()
    jitted = nnx.jit(lambda m: None, donate_argnums=0)
    for _ in range(3):
        assert jitted(model) is None
        assert_same(model, eager)


def test_donation_beside_modules_that_are_not():
    """Only what is donated is taken; optimizer-like second arguments, attached and exchanged parts stay right."""
    a, b = Net(), Net()
    kept = b.layers[0].w.value
    eager = Net(), Net()

    def f(a, b):
        a.layers.append(b.layers[0])
        a.extra = Layer(3.0)
        b.layers[1].w += a.layers[0].w
        return a.extra

    out = nnx.jit(f, donate_argnums=0)(a, b)
    expected = f(*eager)
    assert_same(((a, b), out), (eager, expected))
    assert not kept.is_deleted()
    out = nnx.jit(lambda a, b: None, donate_argnums=(0,))(nnx.clone(a), nnx.clone(b))


def test_a_donated_array_keeps_its_buffer():
    """Also beside a loss of the same shape: JAX gives a donated buffer to the first output that it fits."""
    model = nnx.List([nnx.Param(jnp.full(4, i)) for i in range(5)])

    @nnx.jit(donate_argnums=0)
    def step(model):
        loss = sum(param[...] for param in model)
        for param in model:
            param[...] = 1 - param[...]
        return loss

    step(model)
    before = [param[...].unsafe_buffer_pointer() for param in model]
    step(model)
    assert [param[...].unsafe_buffer_pointer() for param in model] == before


def test_donation_of_plain_arrays():
    """An array that is donated is gone, as with jax.jit; its Variable-free neighbours are not."""
    a, b = jnp.ones(2), jnp.ones(2)
    assert nnx.jit(lambda a, b: a + b, donate_argnums=0)(a, b).tolist() == [2, 2]
    assert a.is_deleted()
    assert not b.is_deleted()


def test_donation_of_a_shared_object():
    """A Variable that is donated by one argument and kept by another is refused, naming both paths; nothing is lost."""
    model = Net()
    with pytest.raises(
        errors.AliasingError,
        match=r"are one Cache: args\[0\]\.layers\[0\]\.calls: .*, donated, but args\[1\]\[0\]\.calls: .*, not donated",
    ):
        nnx.jit(lambda a, b: None, donate_argnums=0)(model, nnx.List([model.layers[0]]))
    assert_same(model, Net())
    assert model(X).tolist() == [4, 4]


@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {"in_shardings": (ONE_DEVICE, None)}, {}])
def test_a_trainer_that_its_own_step_refers_to(options):
    """A function that gets the model of the trainer whose method it calls: the model is treated as the argument is."""

    class Trainer(nnx.Module):
        def __init__(self):
            self.policy, self.teacher = Layer(2.0), Layer(3.0)
            self.step = nnx.jit(lambda policy, x: self.train(policy, x), **options)

        def train(self, policy, x):
            policy.w *= 2
            return self.policy(x) + self.teacher(x)

    trainer = Trainer()
    policy, teacher = trainer.policy.w.value, trainer.teacher.w.value
    assert [trainer.step(trainer.policy, X).tolist() for _ in range(3)] == [[7, 7], [11, 11], [19, 19]]
    assert trainer.policy.calls == trainer.teacher.calls == 3
    assert policy.is_deleted() == ("donate_argnums" in options)
    assert not teacher.is_deleted()
    assert trainer.step(Layer(5.0), X).tolist() == [19, 19]


def test_donation_and_clone():
    """A clone owns its buffers: it outlives the donation of its original."""
    model = Net()
    clone = nnx.clone(model)
    nnx.jit(lambda m: m.layers[0](X), donate_argnums=0)(model)
    assert_same(clone, Net())


def test_donation_and_failures():
    """A failing trace, and a buffer that JAX cannot donate twice, take nothing away."""
    model = Net()
    jitted = nnx.jit(lambda m, x: m(x), donate_argnums=0)
    with pytest.raises(TypeError, match="shapes"):
        jitted(model, jnp.ones(3))
    assert_same(model, Net())
    model.layers[1].w.value = model.layers[0].w.value
    assert jitted(model, X).tolist() == [2, 2]  # only read, and so not donated

    @functools.partial(nnx.jit, donate_argnums=0)
    def double(m):
        for layer in m.layers:
            layer.w *= 2

    with pytest.raises(Exception, match="donate the same buffer twice"):
        double(model)
    assert model(X).tolist() == [2, 2]


def test_donation_of_one_structure_and_not_of_another():
    """A step that changes one model and only reads another, by turns: just the first is donated."""

    class Counter(nnx.Module):
        def __init__(self, counts):
            self.counts, self.calls = counts, nnx.Variable(jnp.zeros(()))

    @functools.partial(nnx.jit, donate_argnums=0)
    def step(m):
        if m.counts:
            m.calls += 1
        return m.calls * 2

    counting, reading = Counter(True), Counter(False)
    for _ in range(4):
        for model in (counting, reading):
            for _ in range(20):
                step(model)
    assert (counting.calls.value, reading.calls.value) == (80, 0)


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=["plain", "donated"])
def test_donation_and_an_iterator_that_ends(options):
    """A StopIteration of the user's function comes through as it is, also from a trace for other shapes."""
    model, values = nnx.List([nnx.Param(jnp.zeros(()))]), iter([1.0, 2.0])

    @functools.partial(nnx.jit, **options)
    def step(m, x):
        m[0] += next(values) * x.sum()

    for size in (1, 1, 1, 2):
        step(model, jnp.ones(size))
    for size in (3, 4):
        for given in (model, nnx.clone(model)):  # the compiled function is found in two ways
            with pytest.raises(StopIteration):
                step(given, jnp.ones(size))
    assert model[0].value == 3 * 1 + 2 * 2


def test_donation_under_a_trace():
    """Inside another jit donation means nothing, as in JAX."""
    inner = nnx.jit(lambda m: m.layers[0](X), donate_argnums=0)
    model = Net()
    assert nnx.jit(lambda m: inner(m) + inner(m))(model).tolist() == [2, 2]
    assert int(model.layers[0].calls) == 2


def other_options():
    """Options of the installed jax.jit that only say how to compile, with a value."""
    known = inspect.signature(jax.jit).parameters
    cases = {
        "keep_unused": True,
        "inline": True,
        "compiler_options": {"xla_embed_ir_in_executable": True},
        "device": jax.devices()[0],
        "backend": "cpu",
    }
    return [(name, value) for name, value in cases.items() if name in known]


@pytest.mark.filterwarnings("ignore:.*(backend|device).*:DeprecationWarning")
@pytest.mark.parametrize(("name", "value"), other_options(), ids=lambda x: str(x))
def test_other_options_of_jax_jit(name, value):
    """Every other option that the installed jax.jit takes is handed on."""
    model = Net()
    check(functools.partial(nnx.jit(lambda m, x: m(x), **{name: value}), model), model)


def test_every_option_of_jax_jit_is_known():
    """No option of the installed jax.jit is without a test (abstracted_axes is an experiment of older releases)."""
    tested = {name for name, _ in other_options()}
    sharded = {"in_shardings", "out_shardings"}
    own = {"fun", "static_argnums", "static_argnames", "donate_argnums", "donate_argnames"}
    assert set(inspect.signature(jax.jit).parameters) - {"abstracted_axes"} == tested | sharded | own


def test_an_option_that_jax_jit_does_not_have():
    """A misspelt option is refused as jax.jit does."""
    with pytest.raises(TypeError, match="static_argnum"):
        nnx.jit(lambda m: m, static_argnum=1)(Net())


def test_shardings_on_eight_devices(run_on_eight_devices):
    """The tests in eight_devices.py, in a process of their own that has eight."""
    run_on_eight_devices(pathlib.Path(__file__).with_name("eight_devices.py"))


def test_eval_shape_of_a_jitted_function():
    """`.eval_shape` gives abstract outputs, of static arguments and Modules too."""
    jitted = nnx.jit(lambda m, x, n: (m(x), m, [x] * n), static_argnums=2)
    out, made, listed = jitted.eval_shape(Net(), X, 3)
    assert (out, len(listed)) == (jax.ShapeDtypeStruct((2,), jnp.float32), 3)
    assert made.layers[0].w.value == jax.ShapeDtypeStruct((2,), jnp.float32)


# --- under raw JAX --------------------------------------------------------------------------------------------------

RAW = {
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((3, 2))),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.ones((3, 2))),
    "map": lambda f: jax.lax.map(f, jnp.ones((3, 2))),
    "cond": lambda f: jax.lax.cond(True, f, lambda x: x, X),
    "while_loop": lambda f: jax.lax.while_loop(lambda x: x.sum() < 9, f, X),
    "eval_shape": lambda f: jax.eval_shape(f, X),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(X),
    "checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum())(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "linearize": lambda f: jax.linearize(f, X)[0],
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f))(jnp.ones((1, 2))),
    "nnx.jit around": lambda f: nnx.jit(f)(X),
    "nnx.grad around": lambda f: nnx.grad(lambda x: f(x).sum())(X),
}


@pytest.mark.parametrize("raw", RAW)
def test_reading_a_live_model_under_raw_jax(raw):
    """A live model that is only read may be passed to a jitted function under any transform, and stays concrete."""
    model, read = Net(), nnx.jit(lambda m, x: x * m.layers[0].w * m.scale)
    before = values(model)
    out = RAW[raw](lambda x: read(model, x))
    expected = RAW[raw](lambda x: x * model.layers[0].w.value * model.scale)
    if raw == "eval_shape":
        assert out == expected
    elif raw != "make_jaxpr":
        jax.tree.map(np.testing.assert_array_equal, out, expected)
    assert_same(model, Net())
    assert all(v is w for v, w in zip(before, values(model), strict=True))


@pytest.mark.parametrize("raw", [raw for raw in RAW if raw != "nnx.jit around"])
@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda m, x: m.layers[1](x), r"layers\[1\]\.calls"),
        (lambda m, x: setattr(m, "extra", x), "extra"),
        (lambda m, x: setattr(m.layers[0], "flag", True), "flag"),
        (lambda m, x: m.layers.append(Layer()), "layers"),
    ],
    ids=["value", "array", "static", "list"],
)
def test_writing_a_live_model_under_raw_jax(raw, write, what):
    """A write raises TraceContextError, which names the path, and nothing is written, what came before it neither."""
    model = Net()
    before = values(model)
    with pytest.raises(errors.TraceContextError, match=f"(?s){what}.*nnx.jit"):
        RAW[raw](lambda x: nnx.jit(lambda m, x: (write(m, x), x)[1])(model, x))
    with pytest.raises(errors.TraceContextError, match=r"layers\[0\]\.w"):
        RAW[raw](lambda x: nnx.jit(lambda m, x: (setattr(m.layers[0].w, "value", x), write(m, x), x)[2])(model, x))
    assert_same(model, Net())
    assert all(v is w for v, w in zip(before, values(model), strict=True))


def test_a_model_passed_through_raw_jax():
    """A Module that is itself an argument of a raw transform is a local copy: writes go to that, and end with it."""
    model, step = Net(), nnx.jit(lambda m, x: m(x))
    assert jax.jit(lambda m, x: (step(m, x), m.layers[0].calls.value))(model, X)[1].item() == 1
    assert jax.vmap(step, in_axes=(None, 0))(model, jnp.ones((3, 2))).shape == (3, 2)
    assert jax.grad(lambda m: step(m, X).sum(), allow_int=True)(model).layers[0].w.value.tolist() == [4, 4]
    assert_same(model, Net())


def test_settings_of_jax():
    """jax.disable_jit, jax.checking_leaks, jax.debug_nans: the same results; no tracer is left behind."""
    for context in (jax.disable_jit(), jax.checking_leaks(), jax.debug_nans(True), jax.enable_checks(True)):
        model = Net()
        with context:
            check(nnx.jit(model), model)


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}])
def test_checks_of_jax_with_leaves_that_are_not_read(options):
    """With jax_enable_checks JAX looks at all values with which a jaxpr is evaluated, also those that no one reads."""

    def count(model):
        model.layers[0].calls += 1

    model = Net()
    with jax.enable_checks(True):
        step = nnx.jit(count, **options)
        step(model), step(model)
    assert model.layers[0].calls == 2


def test_without_jit_the_function_sees_values():
    """As a debugger wants it: with jax.disable_jit Python may branch on them."""
    double = nnx.jit(lambda m, x: m.scale * x if x.sum() > 0 else x)
    with jax.disable_jit():
        assert double(nnx.Dict(scale=nnx.Param(2.0)), X).tolist() == (2 * X).tolist()


# --- errors ---------------------------------------------------------------------------------------------------------


class Interrupt(Exception):
    pass


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
def test_a_failing_function_changes_nothing(warm):
    """An exception after any number of changes leaves identities, values and attributes."""

    def f(m, x):
        if x.ndim == 1:
            return x
        m.layers[0].w.value = x
        m.layers.append(Layer())
        del m.scale
        m.extra = x
        m.layers[0].__class__ = Net
        m.layers[1].w.set_metadata(a=1)
        raise Interrupt

    model, jitted = Net(), nnx.jit(f)
    before, objects = values(model), [x for _, x in nnx.iter_graph(model)]
    if warm:
        jitted(model, X)
    with pytest.raises(Interrupt):
        jitted(model, jnp.ones((2, 2)))
    assert_same(model, Net())
    assert all(v is w for v, w in zip(before, values(model), strict=True))
    assert all(v is w for v, (_, w) in zip(objects, nnx.iter_graph(model), strict=True))
    assert jitted(model, X).tolist() == [1, 1]


def test_a_failure_at_run_time_changes_nothing():
    """An exception raised by the compiled program (a callback) leaves the model as it was, and usable."""

    def fail(x):
        raise Interrupt

    def f(m, x):
        m.layers[0].w.value = jax.pure_callback(fail, x, x)
        m.extra = 1

    model = Net()
    before = values(model)
    with pytest.raises(Exception, match=r"Interrupt|callback"):
        jax.block_until_ready(nnx.jit(f)(model, X))
        jax.block_until_ready(model.layers[0].w.value)
    if not hasattr(model, "extra"):  # the CPU may run the program after the call has returned
        assert all(v is w for v, w in zip(before, values(model), strict=True))


def test_an_output_that_cannot_be_made_changes_nothing():
    """A pytree class whose unflatten fails outside of the trace: the model has not been written."""

    @jax.tree_util.register_pytree_node_class
    class Fragile:
        def __init__(self, x):
            self.x = x

        def tree_flatten(self):
            return (self.x,), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            if isinstance(children[0], jax.Array) and not isinstance(children[0], jax.core.Tracer):
                raise Interrupt
            return cls(*children)

    model = Net()
    for structural in (False, True):

        def f(m, structural=structural):
            m.layers[0].w += 1
            if structural:
                m.extra = 1
            return Fragile(m.layers[0].w.value)

        jitted = nnx.jit(f)
        for _ in range(2):
            with pytest.raises(Interrupt):
                jitted(model)
            assert_same(model, Net())


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
def test_untraceable_arguments(warm):
    """A string, or any object, among the arguments: the error names the argument and what to write instead."""
    model, jitted = Net(), nnx.jit(lambda m, x, **kwargs: x)
    if warm:
        jitted(model, 1.0)
        jitted(model, 1.0, mode=1.0)
        jitted(model, [1.0])
    with pytest.raises(errors.ArgumentError, match=r"args\[1\] is a str \('train'\).*static_argnums"):
        jitted(model, "train")
    with pytest.raises(errors.ArgumentError, match=r"kwargs\['mode'\] is a str|kwargs\.mode is a str"):
        jitted(model, 1.0, mode="train")
    with pytest.raises(errors.ArgumentError, match=r"args\[1\]\[0\] is a object"):
        jitted(model, [object()])
    assert jitted(model, 1.0).item() == 1


def test_outputs_that_cannot_be_returned():
    """A string in the output, and in a Variable, is refused with its path, and nothing is changed."""
    model = Net()
    with pytest.raises(TypeError, match=r"<output>.name is set to a str"):
        nnx.jit(lambda m: {"name": "x", "m": m(X)})(model)
    assert_same(model, Net())
    with pytest.raises(TypeError, match=r"(?s)layers\[0\]\.w.*str"):
        nnx.jit(lambda m: setattr(m.layers[0].w, "value", "x"))(model)
    assert_same(model, Net())


@pytest.mark.parametrize("what", ["set", "used", "returned"])
def test_a_tracer_of_an_earlier_call(what):
    """JAX says what is wrong, also where the function does not read all that it is given; and nothing is changed."""
    kept = []
    model = Net()
    nnx.jit(lambda m: kept.append(m.layers[0].w.value))(model)

    def use(m):
        if what == "set":
            m.layers[0].w.value = kept[0]
        elif what == "used":
            m.layers[0].w.value = jnp.zeros(2) + kept[0]
        return kept[0] if what == "returned" else None

    jitted = nnx.jit(use)
    for _ in range(2):
        with pytest.raises(jax.errors.UnexpectedTracerError):
            jitted(model)
        assert_same(model, Net())


def test_shape_errors_name_the_layer():
    """An error in a layer carries notes: path, class and input of each call on the way."""
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Sequential(nnx.Linear(2, 4, rngs=nnx.Rngs(0))))
    for call in (nnx.jit(lambda m, x: m(x)), nnx.jit(lambda m, x: nnx.grad(lambda m: m(x).sum())(m))):
        with pytest.raises(Exception, match="shape") as caught:
            call(model, jnp.ones((5, 2)))
        notes = [note for note in caught.value.__notes__ if note.startswith("in ")]
        assert notes[0].startswith("in layers[1].layers[0] (Linear 2->4), input float32[5, 3]")
        assert notes[1].startswith("in layers[1] (Sequential), input float32[5, 3]")
        assert len(notes) == 3


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"donate_argnums": 0}, {"static_argnums": 2}], ids=["plain", "donated", "static"]
)
def test_a_dropped_model_is_freed_at_once(options):
    """The compiled function keeps nothing of a model that it was called with; no collector is needed."""
    jitted = nnx.jit(lambda m, x, n=1: m(x), **options)
    model = Net()
    for _ in range(5):
        jitted(model, X, 2)
    watched = [weakref.ref(x) for x in (model, model.layers, model.layers[0], model.layers[0].w)]
    array = weakref.ref(model.layers[0].w.value)
    del model
    assert [ref() for ref in watched] == [None] * 4
    assert array() is None


def test_a_dropped_model_whose_flags_were_toggled_is_freed():
    """What is remembered of the flags that it has had does not keep its parts."""
    jitted, model = nnx.jit(lambda m, x: m(x)), Net()
    for k in range(6):
        model.layers[0].flag = bool(k % 2)
        jitted(model, X)
    watched = [weakref.ref(x) for x in (model, model.layers, model.layers[0], model.layers[0].w)]
    del model
    assert [ref() for ref in watched] == [None] * 4


def test_a_dropped_model_that_failed_is_freed():
    """Neither a failing call, nor lowering, nor a structural change keeps a model alive."""

    def f(m, x):
        m.extra = x
        if x.ndim == 2:
            raise Interrupt

    jitted, model = nnx.jit(f), Net()
    with pytest.raises(Interrupt):
        jitted(model, jnp.ones((1, 2)))
    gc.collect()  # JAX 0.8 leaves the frames of a call that failed in a cycle
    for times in (1, 2):
        jitted.lower(model, X)
        jitted.eval_shape(model, X)
        for _ in range(times):
            jitted(model, X)
        ref, model = weakref.ref(model), Net()
        assert ref() is None


@pytest.mark.parametrize("first", [1, 2, 3], ids="vector matrix cube".split())
@pytest.mark.parametrize("extra", [False, True], ids=["one object", "two objects"])
def test_what_each_trace_does_is_told_apart(first, extra):
    """By the shape of an argument a function reads, changes and returns other things, as often as it likes in turns."""

    def step(m, x, other=None):
        if x.ndim == 1:
            return m.layers[0](x)
        if x.ndim == 2:
            m.layers[1].calls += 1
            m.layers[0].calls += 10
            return x.sum(), {"scale": 2.0 * m.layers[1].w}
        if other is not None:
            other.layers[0].w *= 2
        return None

    jitted, eager, model, copied = nnx.jit(step), step, Net(), Net()
    others = (Net(), Net()) if extra else (None, None)
    order = [first, *[(first + k) % 3 + 1 for k in range(6)]]
    for ndim in order * 3:
        x = jnp.ones((2,) * ndim)
        given, expected = ((y,) if extra else () for y in others)
        assert_same(jitted(model, x, *given), eager(copied, x, *expected))
        assert_same(model, copied)
        assert_same(*others)


def test_a_dropped_function_is_freed():
    """A jitted function takes its programs and what it closes over along."""

    def make():
        layer = Layer()
        return nnx.jit(lambda m, x: m(x) * layer.w), layer

    jitted, layer = make()
    model = Net()
    jitted(model, X)
    jitted(model, X)
    refs = [weakref.ref(jitted), weakref.ref(layer)]
    del jitted, layer
    assert [ref() for ref in refs] == [None, None]

    def total(m):
        return m.layers[0].w.sum()

    jitted, ref = nnx.jit(total), weakref.ref(total)
    del total
    for _ in range(5):  # the model remembers how it was called
        jitted(model)
    del jitted
    assert ref() is None
    jitted = nnx.jit(model)
    jitted(X)
    ref = weakref.ref(model)
    del jitted, model
    assert ref() is None


def test_a_number_that_is_to_be_part_of_the_program():
    """Where a traced bool or integer is needed as one, a note says which argument it is, and how it is not traced."""
    mode = lambda x, train, scale=1: x * scale if train else x
    repeat = lambda x, step, times: [x * step for _ in range(times)]
    for call, note in (
        (lambda: nnx.jit(mode)(X, True), "args[1] is True, "),
        (lambda: nnx.jit(mode)(X, train=False, scale=2), "kwargs.train is False, "),
        (lambda: nnx.remat(mode)(X, True), "args[1] is True, "),
        (lambda: nnx.eval_shape(mode, X, True), "args[1] is True, "),
        (lambda: nnx.cond(True, mode, mode, X, True), "args[1] is True, "),
        (lambda: nnx.jit(repeat)(X, 3, 2), "args[2] is 2, "),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        (found,) = [n for n in caught.value.__notes__ if "which JAX traces" in n]
        assert found.startswith(note)
        assert "static_argnums" in found


def test_a_dataclass_that_jax_does_not_know_is_to_be_registered():
    @dataclasses.dataclass
    class Batch:
        x: jax.Array

    with pytest.raises(nnx.errors.ArgumentError, match=r"args\[0\] is a Batch .*register_dataclass"):
        nnx.jit(lambda batch: batch.x)(Batch(jnp.ones(2)))
    with pytest.raises(nnx.errors.ArgumentError) as caught:
        nnx.jit(lambda name: 0)("name")
    assert "register_dataclass" not in str(caught.value)
