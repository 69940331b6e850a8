"""The module paths that flax.nnx users import, and what the names under them do."""

import copy
import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib import graphlib, ids, reprlib, rnglib, tracers

# Module -> what it has; a name with "=" stands for the object of that name in nnxlib.
NAMES = {
    "extract": "=NodeStates =to_tree =from_tree",
    "graphlib": (
        "=GraphDef =GraphState =State =Variable =split =merge NodeDef NodeRef VariableDef GraphFlatState Key PathParts "
        "Static is_graph_node is_node is_node_leaf is_node_type is_pytree_node jax_to_nnx_path set_graph_mode "
        "set_graph_updates vars_as with_vars"
    ),
    "helpers": "=Dict =List =Sequential =TrainState has_keyword_arg",
    "ids": "UUID uuid",
    "module": "=Module =Sequential =capture ModuleMeta",
    "nn.normalization": "=BatchNorm =LayerNorm =Initializer Axes",
    "object": "=Object =Pytree =Data =Static",
    "proxy_caller": "ApplyCaller",
    "reprlib": "Attr Object Representable MappingReprMixin SequenceReprMixin PrettyMapping PrettySequence get_repr",
    "rnglib": "=Rngs =RngStream =fork_rngs =split_rngs =restore_rngs =reseed backup_keys",
    "summary": "=tabulate",
    "tracers": "TraceState current_jax_trace",
    "transforms.autodiff": "=DiffState =custom_vjp =grad =jvp =remat =value_and_grad =vjp",
    "transforms.compilation": (
        "=StateSharding =jit =jit_partial =shard_map JitWrapped JitFn Stage Traced Lowered Compiled"
    ),
    "transforms.iteration": "=Carry =StateAxes =fori_loop =pmap =scan =transform_metadata =vmap =while_loop",
    "transforms.transforms": "=checkify =cond =eval_shape =make_jaxpr =switch",
    "traversals": "flatten_mapping unflatten_mapping",
    "variablelib": (
        "=Variable =Param =VariableState =use_eager_sharding =using_eager_sharding =with_metadata "
        "=register_variable_name =variable_name_from_type =variable_type_from_name"
    ),
    "visualization": "=display",
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_are_there(module):
    """Each path is there as an import and as an attribute, and has the objects themselves."""
    found = importlib.import_module(f"nnxlib.{module}")
    value = nnx
    for part in module.split("."):
        value = getattr(value, part)
    assert value is found
    for name in NAMES[module].split():
        same = name.startswith("=")
        assert getattr(found, name.lstrip("=")) is getattr(nnx, name[1:]) if same else hasattr(found, name)


def test_graph_mode_has_a_namespace():
    """`nnx.compat.jit` and the like are the functions themselves, and take switches."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    graphdef, state = nnx.compat.split(model, graph=True)
    assert nnx.compat.jit(lambda m, x: m(x))(nnx.merge(graphdef, state), jnp.ones((1, 2))).shape == (1, 3)
    assert nnx.compat.backup_keys is rnglib.backup_keys
    assert {"vmap", "flax"} <= set(dir(nnx.compat))
    for namespace in (nnx.compat, nnx.graph):
        with pytest.raises(AttributeError, match=f"{namespace.__name__}.*no_such_name"):
            namespace.no_such_name


def test_graph_had_the_names_of_compat():
    """In flax 0.12.5 its functions that choose graph mode were in `nnx.graph`."""
    grads = nnx.graph.grad(lambda m: m(jnp.ones((1, 2))).sum())(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert isinstance(grads, nnx.State)
    assert nnx.graph.iter_modules is nnx.compat.iter_modules


def test_rows_of_a_graphdef_have_types():
    """A node, a Variable, and what stands for one in the rows of others."""
    layout = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0))).layout
    assert {type(row) for row in layout.rows} == {graphlib.NodeDef, graphlib.VariableDef}
    assert isinstance(layout.root, graphlib.NodeRef)


VALUES = {
    "module": lambda nnx: nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
    "rngs": lambda nnx: nnx.Rngs(0),
    "nnx.List": lambda nnx: nnx.List([1]),
    "Variable": lambda nnx: nnx.Param(1.0),
    "State": lambda nnx: nnx.state(nnx.Rngs(0)),
    "list": lambda nnx: [1],
    "tuple": lambda nnx: (),
    "dict": lambda nnx: {"a": 1},
    "None": lambda nnx: None,
    "jax": lambda nnx: jnp.ones(1),
    "numpy": lambda nnx: np.ones(1),
    "class": lambda nnx: nnx.Linear,
    "float": lambda nnx: 1.0,
}


def kinds(nnx):
    """For each predicate, the values that it takes."""
    predicates = "is_node is_graph_node is_node_leaf is_pytree_node".split()
    found = {
        name: [key for key, make in VALUES.items() if getattr(nnx.graphlib, name)(make(nnx))] for name in predicates
    }
    found["is_node_type"] = [key for key, make in VALUES.items() if nnx.graphlib.is_node_type(type(make(nnx)))]
    return found


def test_what_a_value_is_in_a_graph():
    """Objects, data, and pytrees around them."""
    assert kinds(nnx) == {
        "is_node": ["module", "rngs", "nnx.List", "State", "list", "tuple", "dict", "None"],
        "is_graph_node": ["module", "rngs", "nnx.List", "Variable"],
        "is_node_leaf": ["Variable", "jax", "numpy"],
        "is_pytree_node": ["State", "list", "tuple", "dict", "None"],
        "is_node_type": ["module", "rngs", "nnx.List", "State", "list", "tuple", "dict", "None"],
    }


def test_a_static_value_is_part_of_the_program():
    """It has no leaves and compares by its value."""
    static = graphlib.Static((1, 2))
    assert jax.tree.leaves(static) == []
    assert jax.tree.map(lambda x: x, static) == static == graphlib.Static((1, 2)) != graphlib.Static((1, 3))
    assert str(static) == "Static(value=(1, 2))"
    with pytest.raises(dataclasses.FrozenInstanceError):
        static.value = 1
    assert jax.eval_shape(lambda x, static: jnp.zeros(static.value), 1.0, static).shape == (1, 2)


def test_a_trace_state_is_that_of_one_trace():
    """Valid and equal where the same trace runs."""
    outside = tracers.TraceState()
    assert outside.is_valid()
    assert outside == tracers.TraceState()
    assert hash(outside) == hash(tracers.TraceState())
    assert outside.jax_trace is tracers.current_jax_trace()

    def traced(x):
        inside = tracers.TraceState()
        assert inside.is_valid()
        assert inside == tracers.TraceState() != outside
        assert not outside.is_valid()
        return x, inside

    kept = []
    jax.eval_shape(lambda x: kept.append(traced(x)[1]) or x, 1.0)
    assert not kept[0].is_valid()
    assert "TraceState(jax_trace=" in repr(kept[0])


def test_keys_are_put_back_and_counts_go_on():
    """A backup has the keys alone, so no key comes twice."""
    rngs = nnx.Rngs(0, a=1)
    backups = rnglib.backup_keys(rngs)
    nnx.reseed(rngs, a=5)
    rngs.a()
    nnx.restore_rngs(backups)
    assert rngs.a.count.get_value() == 1
    assert rngs.a.key.get_value() == nnx.Rngs(a=1).a.key.get_value()
    with rnglib.backup_keys(rngs):
        nnx.reseed(rngs, default=7)
    assert rngs.default.key.get_value() == nnx.Rngs(0).default.key.get_value()


# --- reprs ------------------------------------------------------------------------------------------------------------


def written(reprlib):
    """The reprs of some classes, by this module."""

    class Item(reprlib.Representable):
        def __init__(self, *parts):
            self.parts = parts

        def __nnx_repr__(self):
            yield from self.parts

    class Table(reprlib.MappingReprMixin, dict):
        pass

    head, attr = reprlib.Object, reprlib.Attr
    inner = Item(head("Inner"), attr("x", 1.5), attr("y", None))
    return [
        repr(x)
        for x in (
            Item(head(Item)),
            Item(head("Outer"), attr("a", inner), attr("b", [1, inner]), attr("c", {"k": inner})),
            Item(head("Name", start="{", end="}", kv_sep=": ", indent="    "), attr("a", 1), attr("b", inner)),
            Item(head("Name"), attr("a", "raw", use_raw_value=True), attr("b", "q", start="<", end=">")),
            Item(head("Name", empty_repr="...")),
            Item(head("Name", comment=" # note"), attr("a", 1)),
            Item(head("Name", same_line=True), attr("a", int), attr("b", inner)),
            Item(head("Name"), attr("a", "two\nlines"), attr("b", np.ones((2, 2)))),
            Table(),
            Table({"a": 1, 2: inner}),
            reprlib.PrettyMapping({"a": 1, 2: inner}),
            reprlib.PrettySequence([1, "a", inner]),
            reprlib.PrettySequence([]),
        )
    ]


def test_reprs_are_written_line_by_line():
    """Nested ones with their indent."""
    assert written(reprlib)[1:3] == [
        "Outer(\n  a=Inner(\n    x=1.5,\n    y=None\n  ),\n  b=[1, Inner(\n    x=1.5,\n    y=None\n  )],\n"
        "  c={'k': Inner(\n    x=1.5,\n    y=None\n  )}\n)",
        "Name{\n    a: 1,\n    b: Inner(\n      x=1.5,\n      y=None\n    )\n}",
    ]


def test_a_repr_is_of_an_object_and_its_attributes():
    """The default has all attributes; what is yielded is checked."""

    class Plain(reprlib.Representable):
        def __init__(self):
            self.a = 1

    assert repr(Plain()) == "Plain(\n  a=1\n)"
    Plain.__nnx_repr__ = lambda self: iter(())
    with pytest.raises(TypeError, match="of Plain must yield an Object first, but yields None"):
        repr(Plain())
    Plain.__nnx_repr__ = lambda self: iter((reprlib.Object("x"), 1))
    with pytest.raises(TypeError, match="of Plain must yield Attrs after the Object, but yields 1"):
        repr(Plain())
    with pytest.raises(TypeError, match="get_repr takes a Representable, but got int: 1"):
        reprlib.get_repr(1)


def test_a_copy_of_an_id_is_another_one():
    made = ids.uuid()
    assert len({made, copy.copy(made), copy.deepcopy(made)}) == 3
    assert repr(ids.UUID(7)) == "UUID(7)"
