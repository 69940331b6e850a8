"""What of an object is data and what is static, and how users declare it."""

import collections
import copy
import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core.data import is_plain
from nnxlib.core.errors import StaticValueError


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))


def state_paths(node):
    return [path for path, _ in nnx.state(node).flat_state()]


def structures(*nodes):
    return {nnx.graphdef(node) for node in nodes}


DATA = {
    "JAX array": lambda: jnp.ones(1),
    "NumPy array": lambda: np.ones(1),
    "random key": lambda: jax.random.key(0),
    "Ref": lambda: jax.new_ref(jnp.ones(1)),
    "abstract array": lambda: jax.ShapeDtypeStruct((1,), jnp.float32),
    "Variable": lambda: nnx.Param(1.0),
    "Module": lambda: Layer(),
    "List": lambda: nnx.List(),
    "Dict": lambda: nnx.Dict(),
    "State": lambda: nnx.state(Layer()),
    "tuple of arrays": lambda: (jnp.ones(1), 2),
    "list of Variables": lambda: [nnx.Param(1.0)],
    "dict of Modules": lambda: {"a": {"b": Layer()}},
}
STATIC = {
    "int": lambda: 1,
    "bool": lambda: True,
    "float": lambda: 1.0,
    "str": lambda: "relu",
    "None": lambda: None,
    "function": lambda: jnp.tanh,
    "lambda": lambda: lambda x: x,
    "partial": lambda: functools.partial(jax.nn.gelu, approximate=False),
    "class": lambda: Layer,
    "dtype": lambda: jnp.float32,
    "NumPy scalar": lambda: np.float32(1),
    "array of strings": lambda: np.array(["a"]),
    "list of numbers": lambda: [1, [2]],
    "dict of strings": lambda: {"a": "b"},
    "GraphDef": lambda: nnx.graphdef(Layer()),
}


@pytest.mark.parametrize("kind", DATA)
def test_values_that_are_data(kind):
    """By value: arrays, Variables, nodes, and pytrees that hold any of them are leaves or branches of the State."""
    value = DATA[kind]()
    assert nnx.is_data(value)
    m = Layer()
    m.x = value
    m.y = DATA[kind]()
    assert structures(m) == structures(copy.deepcopy(m))


@pytest.mark.parametrize("kind", STATIC)
def test_values_that_are_static(kind):
    """By value: anything else is part of the program: not in the State, in the GraphDef, and compared by value."""
    assert not nnx.is_data(STATIC[kind]())
    a, b, c = Layer(), Layer(), Layer()
    a.x, b.x, c.x = STATIC[kind](), STATIC[kind](), "something else"
    assert state_paths(a) == [("w",)]
    assert nnx.graphdef(a) != nnx.graphdef(c)
    if kind not in ("lambda", "partial"):
        assert nnx.graphdef(a) == nnx.graphdef(b)
    assert nnx.jit(lambda m: m.w.sum())(a).item() == 2


def test_has_data_lists_the_data_in_a_value():
    """has_data finds arrays, Variables and nodes in a pytree."""
    x, v, m = jnp.ones(1), nnx.Param(1.0), Layer()
    assert all(a is b for a, b in zip(nnx.has_data({"a": (x, 1), "b": [v, m]}), [x, v, m], strict=True))
    assert nnx.has_data((1, "a", None)) == []


def test_registered_types_are_data():
    """register_data_type makes instances of a class leaves, whatever they are; it works as a decorator."""

    @nnx.register_data_type
    class Handle:
        pass

    m = nnx.Dict(h=Handle())
    assert nnx.is_data(m.h)
    assert state_paths(m) == [("h",)]
    assert nnx.merge(*nnx.split(m)).h is m.h


def test_values_of_a_registered_type_that_is_a_pytree_are_seen_part_by_part():
    """What they hold has paths of its own, is trained, and is updated; without data of JAX they are data still."""

    @nnx.register_data_type
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Quantised:
        values: nnx.Param
        scale: object

    m = nnx.Dict(kernel=Quantised(nnx.Param(jnp.ones(2)), 2.0))
    assert nnx.is_data(m.kernel)
    assert nnx.is_data(Quantised(1, 2))  # type: ignore[arg-type]
    assert state_paths(m) == [("kernel", "values")]
    assert nnx.grad(lambda m: m.kernel.values.sum())(m)["kernel"]["values"].value.tolist() == [1, 1]
    nnx.update(m, {"kernel": {"values": jnp.zeros(2)}})
    assert (m.kernel.values.value.tolist(), nnx.clone(m).kernel.scale) == ([0, 0], 2)


def test_explicit_data_and_static():
    """nnx.data and nnx.static at assignment overrule the value, and hold for later assignments of the attribute."""

    class Counter(nnx.Module):
        def __init__(self):
            self.steps = nnx.data(0)
            self.table = nnx.static([1, 2])

    m = Counter()
    assert (m.steps, m.table, state_paths(m)) == (0, [1, 2], [("steps",)])
    m.steps = 5
    assert nnx.state(m).steps == 5
    assert jax.tree.leaves(m) == [5]


def test_a_value_that_is_there_may_be_declared_later():
    """The declaration alone is a change of structure, which a compiled function sees."""
    m, program = nnx.Module(), nnx.jit(lambda m: isinstance(m.steps, jax.core.Tracer))
    m.steps = 2
    assert not program(m)
    m.steps = nnx.data(m.steps)
    assert program(m)
    assert state_paths(m) == [("steps",)]
    m.steps = nnx.static(m.steps)
    assert not program(m)
    assert state_paths(m) == []


def test_annotations_declare_data_and_static():
    """`x: nnx.Data[...]` and `nnx.Static[...]` in the class do the same."""

    class Annotated(nnx.Module):
        steps: nnx.Data[int]
        name: nnx.Static[str]
        plain: int

        def __init__(self):
            self.steps, self.name, self.plain = 1, "a", 2

    assert state_paths(Annotated()) == [("steps",)]


def test_fields_declare_data_and_static_in_any_class():
    """`nnx.data(...)` and `nnx.static(...)` in the body of a class do the same, dataclass or not."""

    class Fitted(nnx.Module):
        scale: float | None = nnx.data(None)
        name = nnx.static("")

        def __init__(self):
            self.scale, self.name = None, "a"

    class Refitted(Fitted):
        name = nnx.data("")

    traces = []
    double = nnx.jit(lambda model: traces.append(model) or model.scale * 2)
    m = Fitted()
    for scale in 1.0, 2.0:
        m.scale = scale  # an input of the program, as it is in flax.nnx; it was traced for each number
        assert double(m) == 2 * scale
    assert len(traces) == 1
    assert state_paths(m) == [("scale",)]
    m = Refitted()
    m.name = 3
    assert state_paths(m) == [("name",)]  # a subclass decides anew


def test_annotations_that_are_strings():
    """As under `from __future__ import annotations`: Data and Static are recognised behind any name of the module."""

    class Annotated(nnx.Module):
        steps: "nnx.Data[int]"
        count: "Data[dict[str, list[int]]]"  # noqa: F821
        name: "nnx.Static[str]"
        other: "Dataset[int]"  # noqa: F821

        def __init__(self):
            self.steps, self.count, self.name, self.other = 1, 3, "a", 2

    assert state_paths(Annotated()) == [("count",), ("steps",)]


def test_annotations_under_the_future_import():
    """The same through a real module with `from __future__ import annotations`."""
    source = (
        "from __future__ import annotations\nimport nnxlib as nnx\nfrom nnxlib import Data\n"
        "class A(nnx.Module):\n  a: nnx.Data[int]\n  b: Data[int]\n  c: nnx.Static[int]\n"
        "  def __init__(self): self.a, self.b, self.c = 1, 2, 3\n"
        "@nnx.dataclass\nclass B(nnx.Module):\n  a: nnx.Data[int] = 1\n  b: nnx.Static[int] = 2\n"
    )
    namespace = {"__name__": "test_module"}
    exec(source, namespace)
    assert state_paths(namespace["A"]()) == [("a",), ("b",)]
    assert state_paths(namespace["B"]()) == [("a",)]


def test_annotations_are_inherited_and_overridden():
    """A subclass has the declarations of its bases, and may change them."""

    class Base(nnx.Module):
        a: nnx.Data[int]
        b: nnx.Data[int]

    class Derived(Base):
        b: nnx.Static[int]

        def __init__(self):
            self.a, self.b = 1, 2

    assert state_paths(Derived()) == [("a",)]


def test_check_pytree_finds_data_declared_static():
    """check_pytree names the attribute and what it holds."""
    m = Layer()
    m.table = nnx.static((jnp.ones(2),))
    with pytest.raises(StaticValueError, match=r"'table' of Layer is declared static but holds data: float32\[2\]"):
        nnx.check_pytree(m)
    nnx.check_pytree(Layer())
    m.table = nnx.static((1, 2))
    nnx.check_pytree(m)


def test_has_data_of_a_node_is_what_it_holds():
    """A Module by itself is taken apart; one inside of something else is one of its data."""
    m = Layer()
    assert [id(x) for x in nnx.has_data(m)] == [id(m.w)]
    assert [id(x) for x in nnx.has_data([m])] == [id(m)]
    assert nnx.has_data(nnx.List([1])) == []


def test_fields_of_dataclasses():
    """Without a value they are required; one that many objects would share is refused, as in any dataclass."""

    @nnx.dataclass
    class Table(nnx.Module):
        steps: int = nnx.data(metadata={"unit": "s"})
        size: int = nnx.static(2)

    assert dataclasses.fields(Table)[0].metadata["unit"] == "s"
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'steps'"):
        Table()
    assert state_paths(Table(1)) == [("steps",)]
    for make in (lambda: nnx.data(jnp.ones(2)), lambda: nnx.static([1])):
        with pytest.raises(ValueError, match=r"mutable default .* use default_factory"):
            nnx.dataclass(type("Shared", (nnx.Module,), {"__annotations__": {"x": object}, "x": make()}))


def test_a_static_array_is_refused_with_its_path():
    """An array that is declared static is an error as soon as the structure is asked for."""
    m = nnx.Dict(layers=[Layer(), Layer()])
    m.layers[1].table = nnx.static(jnp.ones(2))
    with pytest.raises(StaticValueError, match=r"float32\[2\] at layers\[1\]\.table"):
        nnx.graphdef(m)


def test_an_array_declared_static_in_an_output_is_named_by_its_path_there():
    class Table(nnx.Module):
        def __init__(self):
            self.rows = nnx.static(jnp.ones(2))

    with pytest.raises(StaticValueError, match=r"float32\[2\] at <output>\.rows is declared static"):
        nnx.jit(Table)()


def test_static_values_are_compared_by_value():
    """Two models with equal unhashable settings share their compiled function; a changed one is traced again."""
    traces = []

    @nnx.jit
    def f(m):
        traces.append(1)
        return m.w.sum() * len(m.config["sizes"])

    models = [Layer(), Layer()]
    for m in models:
        m.config = {"sizes": [1, 2], "name": "a"}
        assert f(m).item() == 4
    assert len(traces) == 1
    models[0].config["sizes"].append(3)
    assert (f(models[0]).item(), f(models[1]).item(), len(traces)) == (6, 4, 2)


UNSEEN = {"a set": lambda x: {x}, "a frozenset": lambda x: frozenset({x}), "a deque": lambda x: collections.deque([x])}


@pytest.mark.parametrize("hold", UNSEEN)
@pytest.mark.parametrize("make", [lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), lambda: nnx.Param(1)])
def test_a_module_where_it_is_not_found_is_a_warning(hold, make):
    """It would stay as it was drawn: not trained, not saved, and nothing would say so."""
    held = make()
    kind = type(held).__name__
    m = nnx.Module()
    with pytest.warns(
        UserWarning, match=rf"Module\.held is a \w+, in which nnxlib does not find the {kind}: it is not"
    ) as w:
        m.held = UNSEEN[hold](held)
    assert w[0].filename == __file__
    assert not nnx.state(m)
    m.held = nnx.static(UNSEEN[hold](held))
    m.sizes = {1, 2}
    m.found = [held]
    assert nnx.state(m)


def test_an_expression_that_gives_its_items_once_is_a_warning():
    """Layers in round brackets are no tuple: the first call would use them up. A generator function may be meant."""

    def batches():
        yield 1

    for held in ((nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2)), map(nnx.List, [(1,)]), filter(None, [1])):
        m, kind = nnx.Module(), type(held).__name__
        with pytest.warns(UserWarning, match=rf"Module\.held is a {kind}, which gives its items once") as w:
            m.held = held
        assert w[0].filename == __file__
        assert list(held), "they are still there"
        m.held = nnx.static(held)
    m.batches, m.numbers = batches(), iter([1, 2])
    with pytest.warns(UserWarning, match=r"Module\.steps\[0\] is a map"):
        m.steps = [map(str, [1])]


@pytest.mark.parametrize(
    "transform",
    [
        *(nnx.remat, nnx.vmap, nnx.grad, nnx.jit, jax.jit, jax.checkpoint, lambda f: nnx.jit(nnx.remat(f))),
        *(functools.partial, lambda f: functools.partial(f.__call__), lambda f: nnx.jit(functools.partial(f))),
    ],
)
def test_what_a_transform_has_made_of_a_module_is_a_warning(transform):
    """Copies of the holder would call the original: no gradients, and no parameters if the layer itself is replaced."""
    m = nnx.Module()
    m.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    made = transform(m.layer)
    said = r"was made of a Linear or its method, by a transform or functools\.partial, and nnxlib does not find the"
    with pytest.warns(UserWarning, match=rf"Module\.layer {said}") as found:
        m.layer = made
    assert found[0].filename == __file__
    for hold, name in ((lambda x: [x], r"\[0\]"), (lambda x: {"a": x}, r"\['a'\]"), (lambda x: (1, x), r"\[1\]")):
        m = nnx.Module()
        with pytest.warns(UserWarning, match=rf"Module\.layers{name} {said}"):
            m.layers = hold(made)
        m.layers = nnx.static(hold(made))
        m.layers = hold(made)  # still declared static
    m.layer = nnx.static(made)


def test_functions_that_are_no_warning():
    """Those that wrap no Module; methods, which are bound to the copy; and what is compiled for the Module itself."""

    class Model(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.method = self.layer.__call__
            self.forward, self.jitted = nnx.jit(self.loss), jax.jit(self.loss)
            self.made = [nnx.remat(jnp.sin), nnx.jit(lambda x: x), jax.nn.relu, nnx.jit(Model.loss)]
            self.partials = [functools.partial(f) for f in (jnp.sum, nnx.Linear, Model.loss)]

        def loss(self, x):
            return self.method(x).sum()

    model = Model()
    for block in (nnx.remat(model.loss), functools.partial(model.loss)):
        with pytest.warns(UserWarning, match=r"Model\.block was made of a Model or its method"):
            model.block = block
        assert jnp.any(nnx.grad(lambda model: model.loss(jnp.ones(2)))(model).layer.kernel)
        assert not jnp.any(nnx.grad(lambda model: model.block(jnp.ones(2)))(model).layer.kernel)


def test_what_is_plain_at_a_glance():
    """Numbers, text and tuples of these; not arrays, nor what is registered as data, nor what may hold any."""

    class Handle(str):
        pass

    for value in (1, 2.0, True, None, "x", b"y", 1j, (), (1, 2.0, None), int, jnp.tanh.__wrapped__):
        assert is_plain(value)
    for value in (np.ones(1), np.float32(1), [1], {}, ((1,),), (np.ones(1),), (nnx.Param(1),), object(), Handle("x")):
        assert not is_plain(value)


def test_a_registered_number_is_data_also_in_a_tuple():
    """Such as a Python number that a library wants to be traced."""
    code = (
        "import nnxlib as nnx\n"
        "nnx.register_data_type(float)\n"
        "m = nnx.Dict(a=1.0, b=(2.0, 3), c=4)\n"
        "print(nnx.state(m).to_pure_dict())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "{'a': 1.0, 'b': {0: 2.0}}\n"
