"""The functions on graphs: split, merge, state, update, clone, and mapping over a graph."""

import concurrent.futures
import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.errors import NonExhaustiveFiltersError, StateMismatchError

from . import tied
from .models import Layer, Net, paths, same, snapshot

PATHS = [
    ("first", "mean"),
    ("first", "w"),
    ("layers", 0, "mean"),
    ("layers", 0, "w"),
    ("layers", 1, "mean"),
    ("layers", 1, "w"),
    ("pair", 0),
    ("pair", 1),
    ("scale",),
]


# --- split and merge ---


def test_split_and_merge_are_inverse():
    """Merging what split returned gives an equal model made of new objects."""
    m = Net()
    graphdef, state = nnx.split(m)
    back = nnx.merge(graphdef, state)
    assert (type(back), back.name, paths(state), nnx.graphdef(back) == graphdef) == (Net, "net", PATHS, True)
    assert nnx.state(back) == state
    assert not {id(x) for _, x, _ in snapshot(m) if isinstance(x, nnx.Variable | nnx.Module)} & {
        id(x) for _, x, _ in snapshot(back)
    }


LOOKS = {
    "by key": lambda state: state["w"],
    "as a pytree": lambda state: jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))[-1],
    "flat": lambda state: dict(state.flat_state())["w",],
    "a copy": lambda state: copy.copy(state)["w"],
    "a deep copy": lambda state: copy.deepcopy(state)["w"],
    "a pickle": lambda state: pickle.loads(pickle.dumps(state))["w"],
    "merged": lambda state: (state | {})["w"],
    "in jit": lambda state: nnx.State({"w": nnx.Param(nnx.jit(lambda state: state["w"] + 0.0)(state))})["w"],
}


class Bag(nnx.Module):
    def __init__(self):
        self.array, self.tree = jnp.ones(2), nnx.Variable({"a": [1.0]})
        self.w = nnx.Param(jnp.ones(3), tag="x")


def test_arrays_are_selected_by_the_type_that_they_have_now():
    """Which arrays a filter takes does not follow from the structure: one of NumPy may take the place of one of JAX."""
    model = Bag()
    for array, kind, other in ((jnp.ones(2), jax.Array, np.ndarray), (np.ones(2), np.ndarray, jax.Array)) * 2:
        model.array = array
        arrays, params, rest = nnx.state(model, kind, nnx.Param, ...)
        assert arrays["array"] is array
        assert (list(params), list(rest)) == (["w"], ["tree"])
        assert nnx.state(model, other) == nnx.State({})
        assert nnx.state(model, (nnx.Param, kind)).to_pure_dict().keys() == {"array", "w"}


def test_a_filter_costs_the_same_whatever_the_size_of_a_model_with_arrays(unchecked):
    """Which leaves it takes is found once."""
    counts = []
    for size in (10, 300):
        model = Bag()
        model.layers = nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(0)) for _ in range(size)])
        select = lambda: nnx.split(model, nnx.Param, ...)  # noqa: B023
        select()
        counts.append(min(count_calls(select) for _ in range(4)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("filters", [(), (nnx.Param, ...)], ids=["whole", "in parts"])
def test_a_state_is_of_the_moment_of_the_split(look, filters):
    """Whenever, and however, it is first looked into."""
    model = Bag()
    graphdef, *states = nnx.split(model, *filters)
    model.w.value = jnp.zeros(3)
    model.w.set_metadata(tag="y")
    model.tree["a"].append(2.0)
    merged = nnx.merge(graphdef, *states)
    merged.w += 1
    merged.tree["a"].append(3.0)
    assert look(states[0]).tolist() == [1, 1, 1]
    assert states[0]["w"] is states[0]["w"] is not merged.w
    assert states[0]["w"].tag == merged.w.tag == "x"
    assert nnx.merge(graphdef, *states).tree.value == {"a": [1.0]}
    states[0]["w"].value = jnp.full(3, 7.0)
    assert nnx.merge(graphdef, *states).w.tolist() == [7, 7, 7]


def test_a_state_belongs_to_the_trace_of_the_split():
    """Wherever it is first looked into; from there a Variable of it can be read, and not be written."""
    state = nnx.state(Bag())

    def write(x):
        state["w"].value = x
        return x

    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(write)(jnp.ones(3))
    write(jnp.zeros(3))
    assert state["w"].tolist() == [0, 0, 0]


def test_threads_that_look_into_a_state_see_the_same_variables():
    state = nnx.state(nnx.List([nnx.Param(jnp.ones(1)) for _ in range(200)]))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: id(state[7]), range(64)))
    assert len(set(found)) == 1


def test_split_by_filters():
    """One State for each filter; the first that fits takes the leaf; the States may be merged in any order."""
    m = Net()
    graphdef, params, stats, rest = nnx.split(m, nnx.Param, nnx.BatchStat, ...)
    assert (len(paths(params)), len(paths(stats)), paths(rest)) == (4, 3, [("pair", 1), ("scale",)])
    assert nnx.state(nnx.merge(graphdef, rest, params, stats)) == nnx.state(m)
    graphdef, empty, all_ = nnx.split(m, nnx.Cache, ...)
    assert (len(empty), paths(all_)) == (0, PATHS)
    assert nnx.state(nnx.merge(graphdef, empty, all_)) == nnx.state(m)


def test_split_that_leaves_something_out():
    """A leaf that no filter takes is an error that names its path."""
    with pytest.raises(NonExhaustiveFiltersError, match=r"(?s)first\.mean.*scale"):
        nnx.split(Net(), nnx.Param)


def test_a_state_is_a_snapshot():
    """Writing to the model does not change a State, and writing to a State does not change the model."""
    m = Net()
    for state in (nnx.state(m), nnx.split(m)[1], nnx.flatten(m)[1].to_nested_state()):
        m.first.w.value = jnp.full(2, 5.0)
        m.scale = jnp.zeros(())
        assert state.first.w.value.tolist() != [5, 5]
        state.first.w.value = jnp.zeros(2)
        state.first.mean.set_metadata(a=1)
        assert (m.first.w.value.tolist(), m.first.mean.get_metadata()) == ([5, 5], {})
        m.first.w.value = jnp.ones(2)


def test_variables_are_those_of_the_node():
    """A program that keeps them, as a sampler beside a trainer does, has the present weights."""
    m = Net()
    params, rest = nnx.variables(m, nnx.Param, ...)
    assert params.first.w is m.first.w
    assert rest.first.mean is nnx.variables(m).first.mean is m.first.mean
    assert nnx.variables(m.first.w) is m.first.w
    read = jax.jit(lambda leaves: leaves[0] * 1)
    kept = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    nnx.jit(lambda m: m.first.w.set_value(m.first.w * 0 + 7))(m)
    assert read([x for x in kept if x is m.first.w]).tolist() == [7, 7]
    params.first.w.value = jnp.full(2, 5.0)
    assert m.first.w.value.tolist() == [5, 5]
    assert nnx.merge(nnx.graphdef(m), nnx.variables(m)).first.w is not m.first.w
    assert nnx.state(m) == nnx.variables(m)


def test_merge_makes_new_variables_each_time():
    """Two models merged from one State are apart from each other and from the State."""
    graphdef, state = nnx.split(Net())
    a, b = nnx.merge(graphdef, state), nnx.merge(graphdef, state, copy=True)
    a.first.w += 1
    assert (b.first.w.value.tolist(), state.first.w.value.tolist()) == ([1, 1], [1, 1])


def test_merge_inside_any_raw_transform():
    """A model merged in a trace belongs to it: statistics may be updated, and come out through split."""
    graphdef, state = nnx.split(Layer())

    def forward(state, x):
        m = nnx.merge(graphdef, state)
        y = m(x)
        return y.sum(), nnx.state(m)

    x = jnp.ones(2)
    y, new = jax.jit(forward)(state, x)
    assert (y.item(), new.mean.value.tolist()) == (2, [1, 1])
    assert jax.grad(forward, has_aux=True)(state, x)[0].w.value.tolist() == [1, 1]
    assert jax.vmap(forward, (None, 0))(state, jnp.ones((4, 2)))[0].shape == (4,)
    stacked = jax.vmap(lambda state, x: forward(state, x)[1], (0, None))(
        jax.tree.map(lambda x: jnp.stack([x] * 3), state), x
    )
    assert stacked.mean.shape == (3, 2)
    assert jax.eval_shape(forward, state, x)[0].shape == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx.Param(jnp.ones(2)),
        lambda: [Layer(), {"a": jnp.ones(2), "b": nnx.Param(1.0)}],
        lambda: (Layer(), 3, None),
        lambda: jnp.ones(2),
        lambda: {"x": nnx.List()},
        lambda: nnx.Dict({1: nnx.Param(1.0), "1": nnx.Param(2.0)}),
    ],
    ids=["Variable", "list", "tuple", "array", "empty", "int and str keys"],
)
def test_split_and_merge_of_any_pytree(make):
    """Variables, arrays and pytrees of Modules split and merge as Modules do."""
    tree = make()
    graphdef, state = nnx.split(tree)
    back = nnx.merge(graphdef, state)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert nnx.graphdef(back) == graphdef
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(tree)))


def test_merge_takes_states_in_every_form():
    """State, FlatState, nested dict, several of them, bare values, int keys as strings."""
    m = Net()
    graphdef, state = nnx.split(m)
    pure = nnx.to_pure_dict(state)
    as_strings = {**pure, "layers": {str(k): v for k, v in pure["layers"].items()}}
    for given in (
        [state],
        [state.flat_state()],
        [pure],
        [as_strings],
        [list(nnx.split_state(state, nnx.Param, ...))],
        nnx.split_state(state, nnx.Param, ...),
        [jax.tree.leaves(state)],
        [jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))],
    ):
        back = nnx.merge(graphdef, *given)
        assert nnx.state(back) == state


def test_merge_takes_leaves_in_the_order_of_a_state():
    """Also where that is not the order in which the object is walked, and of a Variable by itself."""
    m = nnx.Dict({"b": nnx.Param(1.0), "a": jnp.zeros(2), "c": nnx.List([nnx.Param(float(i)) for i in range(11)])})
    graphdef, state = nnx.split(m)
    leaves = jax.tree.leaves(state)
    assert nnx.state(nnx.merge(graphdef, leaves)) == state
    assert nnx.merge(*nnx.split(m.b)[:1], [2.0]).value == 2.0
    with pytest.raises(StateMismatchError, match=r"Expected 13 leaves, .* got 12"):
        nnx.merge(graphdef, leaves[:-1])
    with pytest.raises(StateMismatchError, match=r"Expected a State, .* as state number 0, got float32\[2\]"):
        nnx.merge(graphdef, leaves, state)
    assert nnx.state(nnx.unflatten(*nnx.flatten(m, with_paths=False))) == state
    assert nnx.flatten(m)[1] == state.flat_state()


def test_a_variable_that_holds_a_dict_goes_through_pure_dicts():
    """A value that is a mapping is not mistaken for a level of paths."""
    m = nnx.Dict(a=nnx.Param({"x": jnp.ones(1), "y": jnp.zeros(1)}))
    graphdef, state = nnx.split(m)
    pure = nnx.to_pure_dict(state)
    assert nnx.merge(graphdef, pure).a.value["x"].tolist() == [1]
    pure["a"] = {"x": jnp.full(1, 5.0), "y": jnp.zeros(1)}
    nnx.update(m, pure)
    assert m.a.value["x"].tolist() == [5]


def test_merge_takes_over_metadata():
    """Metadata of a Variable in the State wins over that of the GraphDef."""
    graphdef, state = nnx.split(nnx.Dict(a=nnx.Param(1.0, layer=1)))
    state.a.set_metadata(layer=2)
    assert nnx.merge(graphdef, state).a.layer == 2


def test_merge_casts_nothing_and_accepts_another_precision():
    """A model restored in bfloat16 has bfloat16 values; its GraphDef is equal."""
    graphdef, state = nnx.split(Net())
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    back = nnx.merge(graphdef, half)
    assert (back.first.w.dtype, nnx.graphdef(back) == graphdef) == (jnp.bfloat16, True)


def test_split_and_merge_refuse_other_things():
    """Swapped arguments and GraphDefs in place of Modules get an error that says what is expected."""
    graphdef, state = nnx.split(Net())
    with pytest.raises(TypeError, match=r"takes a GraphDef first, got State; write merge\(graphdef, state\)"):
        nnx.merge(state, graphdef)
    with pytest.raises(TypeError, match="Expected a Module or a pytree of Modules, got a GraphDef"):
        nnx.state(graphdef)


def test_a_state_is_a_pytree_of_variables():
    """It can be filtered, split, cloned and updated as other pytrees are, and what comes out is a snapshot."""
    model = Net()
    state = nnx.state(model)
    copy = nnx.state(state)
    assert type(copy) is nnx.State
    assert copy == state
    assert copy.first.w is not state.first.w
    assert nnx.state(state, nnx.PathContains("first")) == nnx.State({"first": state["first"]})
    graphdef, first, rest = nnx.split(state, nnx.PathContains("first"), ...)
    assert nnx.merge(graphdef, first, rest) == state == nnx.clone(state)
    nnx.update(copy, jax.tree.map(jnp.zeros_like, first))
    assert not copy.first.w.any()
    assert model.first.w.any()


# --- merge and update with a wrong state ---


def without(state, *path):
    state = copy.copy(state)
    return nnx.from_flat_state([(p, x) for p, x in state.flat_state() if p != path])


def with_leaf(state, leaf, *path):
    return nnx.from_flat_state([*((p, x) for p, x in state.flat_state() if p != path), (path, leaf)])


W = ("first", "w")
WRONG = {  # a State made from a right one, and what the message says about it
    "unexpected": (
        lambda s: with_leaf(s, nnx.Param(jnp.ones(4)), "first", "b"),
        r"first\.b: unexpected Param \(float32\[4\]\)",
    ),
    "shape": (
        lambda s: with_leaf(s, nnx.Param(jnp.ones((2, 5))), "layers", 1, "w"),
        r"layers\[1\]\.w: expected shape \(3,\), got \(2, 5\)",
    ),
    "rank": (lambda s: with_leaf(s, nnx.Param(jnp.ones(())), *W), r"first\.w: expected shape \(2,\), got \(\)"),
    "kind of dtype": (
        lambda s: with_leaf(s, nnx.Param(jnp.ones(2, jnp.int32)), *W),
        r"first\.w: expected dtype float32, got int32",
    ),
    "random key": (
        lambda s: with_leaf(s, nnx.Param(jax.random.split(jax.random.key(0))), *W),
        r"first\.w: expected dtype float32, got key",
    ),
    "Variable type": (
        lambda s: with_leaf(s, nnx.BatchStat(jnp.ones(2)), *W),
        r"first\.w: expected Param, got BatchStat",
    ),
    "None as a value": (lambda s: with_leaf(s, nnx.Param(None), *W), r"first\.w: expected float32\[2\], got None"),
    "None as a leaf": (lambda s: with_leaf(s, None, *W), r"first\.w: expected float32\[2\], got None"),
    "array shape": (lambda s: with_leaf(s, jnp.ones(7), "scale"), r"scale: expected shape \(\), got \(7,\)"),
    "another model": (lambda s: nnx.state(nnx.Dict(other=nnx.Param(1.0))), r"other: unexpected Param \(float\)"),
    "None": (lambda s: None, r"Expected a State.*got None"),
    "a Module": (lambda s: Net(), r"Expected a State.*got Net"),
    "a GraphDef": (lambda s: nnx.graphdef(Net()), r"Expected a State.*got GraphDef"),
}


@pytest.mark.parametrize("case", [case for case in WRONG if case != "Variable type"])
def test_merge_with_a_wrong_state(case):
    """The error names the path and both sides, and the State is left as it is."""
    (make, message), (graphdef, state) = WRONG[case], nnx.split(Net())
    wrong = make(state)
    with pytest.raises(StateMismatchError, match=message):
        nnx.merge(graphdef, wrong)
    assert issubclass(StateMismatchError, ValueError)


BY_ANOTHER_PATH = {  # of the kernel that `tied.Net` has at `embed` and `tied`, and 1.0 as its value
    "a State": lambda x: nnx.State({"tied": {"kernel": nnx.Param(x)}}),
    "a FlatState": lambda x: nnx.from_flat_state([(("tied", "kernel"), x)]).flat_state(),
    "a dict": lambda x: {"tied": {"kernel": x}},
    "as stored in a checkpoint": lambda x: {"tied": {"kernel": {"value": x}}},
    "by both paths": lambda x: {"embed": {"kernel": x}, "tied": {"kernel": jnp.array(x)}},
    "by both paths, in two States": lambda x: [{"tied": {"kernel": x}}, {"embed": {"kernel": x}}],
    "by both paths, traced": None,
}


@pytest.mark.parametrize("given", BY_ANOTHER_PATH.values(), ids=BY_ANOTHER_PATH.keys())
def test_a_shared_variable_may_come_by_any_of_its_paths(given):
    """As in a checkpoint that names tied weights twice, or only as the other layer has them."""
    model, new = tied.Net(), jnp.full(2, 7.0)
    graphdef, state = nnx.split(model)
    if given is None:
        nnx.jit(lambda m, x: nnx.update(m, {"embed": {"kernel": x}, "tied": {"kernel": x}}))(model, new)
    else:
        other = given(new + 1)
        nnx.jit(lambda m: nnx.update(m, other))(model)
        assert (model.embed.kernel == new + 1).all()
        nnx.update(model, given(new))
        merged = nnx.merge(graphdef, nnx.state(model), given(new))
        assert merged.embed is merged.tied
        assert (merged.embed.kernel == new).all()
    assert (model.embed.kernel == new).all()
    assert model.tied is model.embed
    assert (state.embed.kernel == 1).all()


def test_two_values_for_one_shared_variable_are_refused():
    """The message names both paths, and nothing is written; if that is not strict, the first path counts."""
    model, two = tied.Net(), {"embed": {"kernel": jnp.zeros(2)}, "tied": {"kernel": jnp.full(2, 3.0)}}
    message = r"tied\.kernel: unexpected float32\[2\](.|\n)*tied\.kernel is shared: it is embed\.kernel, for which"
    graphdef, state = nnx.split(model)
    with pytest.raises(StateMismatchError, match=message):
        nnx.update(model, two)
    with pytest.raises(StateMismatchError, match=message):
        nnx.merge(graphdef, state, two)
    with pytest.raises(StateMismatchError, match=message):
        jax.jit(lambda x, y: nnx.merge(graphdef, state, {"tied": {"kernel": y}, "embed": {"kernel": x}}))(
            *[jnp.ones(2)] * 2
        )
    assert (model.embed.kernel == 1).all()
    nnx.update(model, two, strict=False)
    assert (model.embed.kernel == 0).all()


class Frozen(nnx.Variable):
    """What was a parameter."""


@pytest.mark.parametrize("form", [lambda x: x, nnx.jit], ids=["eager", "jit"])
def test_merge_makes_variables_of_the_types_that_the_state_has(form):
    """So parameters can be frozen, and thawed, in a copy; sharing and metadata stay."""
    model = nnx.Dict(a=nnx.Linear(2, 3, kernel_metadata={"note": "k"}, rngs=nnx.Rngs(0)), s=nnx.Param(jnp.ones(())))
    model.tied = model.a

    def retyped(model, kind, to):
        graphdef, state = nnx.split(model)
        change = lambda path, x: to(x.value, **x.get_metadata()) if type(x) is kind and "kernel" in path else x
        return nnx.merge(graphdef, nnx.map_state(change, state))

    frozen = form(lambda model: retyped(model, nnx.Param, Frozen))(model)
    assert type(frozen.a.kernel) is Frozen
    assert frozen.a.kernel.get_metadata() == {"note": "k"}
    assert frozen.tied is frozen.a
    assert list(nnx.state(frozen, nnx.Param).flat_state().paths) == [("a", "bias"), ("s",)]
    grads = nnx.grad(lambda model: model.tied(jnp.ones(2)).sum())(frozen)
    assert list(grads.flat_state().paths) == [("a", "bias"), ("s",)]
    assert type(model.a.kernel) is nnx.Param
    thawed = retyped(frozen, Frozen, nnx.Param)
    assert nnx.graphdef(thawed) == nnx.graphdef(model)
    assert (thawed.a.kernel == model.a.kernel).all()
    with pytest.raises(StateMismatchError, match=r"a\.kernel: expected shape \(2, 3\), got \(5,\)"):
        nnx.merge(nnx.graphdef(model), nnx.map_state(lambda path, x: Frozen(jnp.ones(5)), nnx.state(model)))


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG.keys())
def test_update_with_a_wrong_state(make, message):
    """The same for update; nothing in the model has changed, also what did fit."""
    m = Net()
    wrong = make(jax.tree.map(lambda x: x + 1, nnx.state(m)))
    before = snapshot(m)
    with pytest.raises(StateMismatchError, match=message):
        nnx.update(m, wrong)
    assert same(snapshot(m), before)


@pytest.mark.parametrize(
    "state",
    [
        lambda: nnx.state(nnx.Dict(c=nnx.Param(jnp.zeros(2)), d=nnx.Param(jnp.ones(2)))),
        lambda: nnx.state(nnx.Dict(a=nnx.Param(jnp.zeros(2)), b={"b": nnx.Param(jnp.ones(2))})),
    ],
    ids=["names", "levels"],
)
@pytest.mark.parametrize("looked_into", [False, True], ids=["as split", "looked into"])
def test_merge_with_the_state_of_another_model_of_the_same_shapes(state, looked_into):
    """Leaves go by path, not by their order."""
    graphdef, state = nnx.graphdef(nnx.Dict(a=nnx.Param(jnp.zeros(2)), b=nnx.Param(jnp.ones(2)))), state()
    if looked_into:
        assert len(state) == 2
    with pytest.raises(StateMismatchError, match="nothing was made"):
        nnx.merge(graphdef, state)


def test_models_of_one_structure_and_of_different_shapes():
    """Each GraphDef knows the shapes of its own model."""
    split = [nnx.split(nnx.Dict(w=nnx.Param(jnp.zeros(n)))) for n in (2, 3)]
    (two, of_two), (three, of_three) = split
    assert [nnx.merge(graphdef, jax.tree.map(jnp.copy, state)).w.shape for graphdef, state in split] == [(2,), (3,)]
    for graphdef, state in ((two, of_three), (three, of_two)):
        with pytest.raises(StateMismatchError, match="w: expected shape"):
            nnx.merge(graphdef, state)


def test_merge_with_missing_leaves():
    """Missing paths are listed with what was expected there, beside the unexpected ones."""
    graphdef, state = nnx.split(Net())
    wrong = with_leaf(without(state, "first", "w"), nnx.Param(1.0), "first", "weight")
    with pytest.raises(
        StateMismatchError, match=r"first\.w: missing, expected Param \(float32\[2\]\)\n  first\.weight: unexpected"
    ):
        nnx.merge(graphdef, wrong)
    with pytest.raises(StateMismatchError, match=r"scale: missing, expected float32\[\]"):
        nnx.merge(graphdef, without(state, "scale"))
    with pytest.raises(StateMismatchError, match=r"(?s)first\.mean: missing.*scale: missing"):
        nnx.merge(graphdef, {})
    with pytest.raises(StateMismatchError, match="b: missing, expected BatchStat"):
        nnx.merge(*nnx.split(nnx.Dict(a=nnx.Param(1.0), b=nnx.BatchStat(2.0)), nnx.Param, ...)[:2])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'state'"):
        nnx.merge(graphdef)


@pytest.mark.parametrize("leaf", [nnx.Param(jnp.ones(2)), jnp.ones(2)], ids=["Variable", "array"])
def test_a_leaf_by_itself(leaf):
    """It is its own State: of the filter that takes it; the other States are empty."""
    graphdef, none, found, rest = nnx.split(leaf, nnx.BatchStat, (nnx.Param, jax.Array), ...)
    assert (type(found), none, rest) == (type(leaf), {}, {})
    made = nnx.merge(graphdef, none, found, rest)
    assert (type(made), made.tolist()) == (type(leaf), [1, 1])
    assert nnx.merge(*nnx.flatten(leaf)).tolist() == [1, 1]
    assert (nnx.state(leaf, nnx.BatchStat), nnx.state(leaf, ...).tolist()) == ({}, [1, 1])
    with pytest.raises(ValueError, match="<root>"):
        nnx.split(leaf, nnx.BatchStat)


def test_a_stack_with_several_axes():
    """A State for each point of a grid, and one point of it; other axes in each leaf are a mistake, with a remedy."""
    graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    grid = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.broadcast_to(x, (4, 5, *x.shape)), state))
    assert grid.bias.shape == (4, 5, 3)
    assert nnx.merge(nnx.graphdef(grid), jax.tree.map(lambda x: x[3, 2], nnx.state(grid))).bias.shape == (3,)
    with pytest.raises(StateMismatchError, match=r"got \(5, 4, 2, 3\)\nPass strict=False to take these as they are\.$"):
        nnx.merge(graphdef, jax.tree.map(lambda x: jnp.broadcast_to(x, (x.ndim + 3, 4, *x.shape)), state))


def test_merge_that_is_not_strict():
    """Values of any shape and dtype are taken as they are; the paths still have to fit."""
    graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    mask = nnx.merge(graphdef, jax.tree.map(lambda x: x.ravel() > 0, state), strict=False)
    assert (mask.kernel.shape, mask.kernel.dtype) == ((6,), bool)
    other = nnx.merge(graphdef, with_leaf(state, nnx.BatchStat(1.0), "bias"), strict=False)
    assert (type(other.bias), other.bias[...]) == (nnx.BatchStat, 1.0)
    with pytest.raises(StateMismatchError, match=r"bias: missing, expected Param \(float32\[3\]\)\nPass every State"):
        nnx.merge(graphdef, without(state, "bias"), strict=False)


def test_long_lists_of_problems_are_cut():
    """Twenty are shown, the others counted."""
    graphdef = nnx.graphdef(nnx.List([nnx.Param(float(i)) for i in range(50)]))
    with pytest.raises(StateMismatchError, match=r"(?s)\[19\]: missing.*\.\.\. and 30 more"):
        nnx.merge(graphdef, nnx.State({}))


# --- update ---


def test_update_writes_in_place():
    """Variables keep their identity and get the very values; arrays and arrays in tuples are replaced."""
    m, other = Net(), Net()
    state = jax.tree.map(lambda x: x + 5, nnx.state(other))
    before = snapshot(m)
    nnx.update(m, state)
    assert [(p, x) for p, x, _ in snapshot(m) if isinstance(x, nnx.Variable | nnx.Module)] == [
        (p, x) for p, x, _ in before if isinstance(x, nnx.Variable | nnx.Module)
    ]
    assert nnx.state(m) == state
    assert m.first.w.value is state.first.w.value
    assert (m.scale.item(), m.pair[1].tolist(), m.pair[0].value.tolist()) == (6, [6], [5])


@pytest.mark.parametrize(
    "form", [lambda state: state, lambda state: state.flat_state(), dict], ids=["nested", "flat", "dict"]
)
def test_update_takes_copies_of_lists_and_dicts(form):
    """A value that is edited in place afterwards is that of one Variable."""
    model, state = Bag(), nnx.state(Bag())
    nnx.update(model, form(state))
    state["tree"].value["a"].append(2.0)
    assert model.tree.value == {"a": [1.0]}


def test_update_with_a_part_of_the_state():
    """Leaves that the State does not have stay; several States may be given."""
    m = Net()
    kept = m.layers[0].w.value
    params, stats = nnx.split_state(jax.tree.map(lambda x: x + 1, nnx.state(m, nnx.Variable)), nnx.Param, ...)
    nnx.update(m, without(params, "layers", 0, "w"), stats)
    assert m.layers[0].w.value is kept
    assert (m.first.w.value.tolist(), m.first.mean.value.tolist()) == ([2, 2], [1, 1])


def test_update_takes_every_form_and_string_keys():
    """FlatState, nested dicts, bare values, and int keys that a file format turned into strings."""
    m = Net()
    nnx.update(m, {"layers": {"1": {"w": jnp.full(3, 2.0)}}}, nnx.state(m, nnx.BatchStat).flat_state())
    nnx.update(m, [nnx.State({"layers": {0: {"w": nnx.Param(jnp.full(2, 3.0))}}})])
    assert (m.layers[1].w.value.tolist(), m.layers[0].w.value.tolist()) == ([2, 2, 2], [3, 3])
    both = nnx.Dict({0: nnx.Param(1.0), "0": nnx.Param(2.0)})
    nnx.update(both, {0: 3.0, "0": 4.0})
    assert (both[0].value, both["0"].value) == (3.0, 4.0)


@pytest.mark.parametrize("axis", [0, -1])
def test_a_stack_of_models_and_one_of_a_stack(axis):
    """An axis that all leaves have more, or less, is a stack; one that some have is a mistake."""
    graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    stacked = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.stack([x, x + 1], axis), state))
    forward = nnx.vmap(lambda model, x: model(x), in_axes=(axis, None))
    one = nnx.merge(nnx.graphdef(stacked), jax.tree.map(lambda x: jnp.take(x, 1, axis), nnx.state(stacked)))
    np.testing.assert_allclose(forward(stacked, jnp.ones((1, 2)))[1], one(jnp.ones((1, 2))), rtol=1e-6)
    state["bias"].value = jnp.stack([state["bias"].value] * 2)
    with pytest.raises(StateMismatchError, match=r"bias: expected shape \(3,\), got \(2, 3\)"):
        nnx.merge(graphdef, state)


def test_update_of_one_type_by_a_stack():
    """If all of them are there; those of another type stay as they are."""
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 2), nnx.state(norm, nnx.Param))
    with pytest.raises(StateMismatchError, match=r"bias: expected shape \(3,\), got \(2, 3\)"):
        nnx.update(norm, {"bias": stacked.bias})
    nnx.update(norm, stacked)
    assert (norm.scale.shape, norm.bias.shape, norm.mean.shape) == ((2, 3), (2, 3), (3,))
    nnx.update(norm, jax.tree.map(lambda x: x[0], stacked), nnx.state(norm, nnx.BatchStat))
    assert (norm.scale.shape, norm.mean.shape) == ((3,), (3,))
    stacked.bias.value = jnp.zeros((4, 3))
    with pytest.raises(StateMismatchError, match=r"scale: expected shape \(3,\), got \(2, 3\)"):
        nnx.update(norm, stacked)


def test_values_one_level_below_their_variables():
    """A checkpoint restored without a target has them there, as ``jax.tree_util`` writes the path of a Variable."""
    net, other = Net(), nnx.map(lambda _, x: x + 1, Net())
    written = {
        "layers": {"1": {"w": {"value": other.layers[1].w.value}}},
        "first": {"w": {"value": other.first.w.value}},
    }
    nnx.update(net, written)
    assert net.layers[1].w.value is other.layers[1].w.value
    assert net.first.w.value is other.first.w.value
    state = nnx.state(Net())
    state.replace_by_pure_dict(written)
    assert state.layers[1].w.value is other.layers[1].w.value
    written = {"w": {"value": jnp.zeros(2)}, "mean": {"value": jnp.ones(2)}}
    assert nnx.merge(nnx.graphdef(net.first), written).mean.value is written["mean"]["value"]


def test_a_part_of_a_value_that_is_a_mapping_is_not_its_value():
    """The key ``value`` in it is one of its own."""
    model = nnx.Dict(v=nnx.Variable({"value": 1.0, "other": 2.0}))
    with pytest.raises(StateMismatchError, match=r"v\.value: unexpected"):
        nnx.update(model, nnx.FlatState({("v", "value"): 5.0}))
    nnx.update(model, {"v": {"value": 3.0, "other": 4.0}})
    assert model.v.value == {"value": 3.0, "other": 4.0}


@pytest.mark.parametrize("x", [3, 2.5, True, [1.0, 2.0], {"a": 1.0, "b": 2.0}, {"value": 1.0}], ids=repr)
def test_values_that_are_no_arrays_one_level_below_their_variables(x):
    """Numbers, lists and dicts are restored as arrays are; a dict with just that key is not mistaken for a level."""
    listed = nnx.List([nnx.Variable(jax.tree.map(lambda y: 0 * y, x)), nnx.Param(jnp.ones(2)), nnx.Variable({"b": 0})])
    nnx.update(listed, {"0": {"value": x}, "1": {"value": jnp.zeros(2)}, "2": {"value": {"b": 1}}})
    assert (listed[0].value, listed[1].value.tolist(), listed[2].value) == (x, [0, 0], {"b": 1})
    make = lambda x: nnx.Dict(v=nnx.Variable(x), w=nnx.Param(jnp.ones(2)))
    restored = {"v": {"value": x}, "w": {"value": jnp.zeros(2)}}
    model = make(jax.tree.map(lambda y: 0 * y, x))
    nnx.update(model, restored)
    assert (model["v"].value, model["w"].value.tolist()) == (x, [0, 0])
    assert nnx.merge(nnx.graphdef(model), restored)["v"].value == x
    model = make(jax.tree.map(lambda y: 0 * y, x))
    nnx.update(model, {"v": {"value": x}} if x != {"value": 1.0} else {"v": x})
    assert model["v"].value == x
    nnx.update(model, {"v": x})
    assert model["v"].value == x
    state = nnx.state(make(jax.tree.map(lambda y: 0 * y, x)))
    state.replace_by_pure_dict({"v": {"value": x}} if x != {"value": 1.0} else {"v": x})
    assert state["v"].value == x


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"value": x}], ids=["bare", "below"])
def test_what_has_no_leaves_is_none_in_a_checkpoint(wrap):
    """It stays what it is, as the masked moments of an optimizer; in place of an array, None is an error."""
    node = nnx.Dict(masked=nnx.Param(()), w=nnx.Param(jnp.zeros(2)))
    restored = {"masked": wrap(None), "w": wrap(jnp.ones(2))}
    nnx.update(node, restored)
    assert (node.masked.value, node.w.value.tolist()) == ((), [1, 1])
    state = nnx.state(node)
    state.replace_by_pure_dict(restored)
    assert state.masked.value == ()
    nnx.update(node, state)
    assert node.masked.value == ()
    with pytest.raises(StateMismatchError, match=r"w.*None"):
        nnx.update(node, {"w": wrap(None)})


def test_a_value_without_leaves_may_get_some():
    """As an empty tuple of settings that is filled later."""
    model = nnx.Dict(v=nnx.Variable(()))
    nnx.update(model, {"v": nnx.Variable((1.0,))})
    assert model.v.value == (1.0,)


def test_a_level_in_place_of_an_array_is_an_error():
    layer = Layer()
    with pytest.raises(StateMismatchError, match=r"w\.kernel: unexpected int"):
        nnx.update(layer, {"w": {"kernel": 1}})


def test_update_not_strict():
    """strict=False writes what fits, and skips the rest."""
    m = Net()
    state = nnx.State({"first": {"w": nnx.Param(jnp.zeros(2)), "nonsense": 1, "mean": nnx.BatchStat(jnp.zeros(9))}})
    nnx.update(m, state, strict=False)
    assert (m.first.w.value.tolist(), m.first.mean.shape, hasattr(m.first, "nonsense")) == ([0, 0], (2,), False)


class Recorder(nnx.Module):
    """Records what it computes, by sow and in an attribute that was None."""

    def __init__(self):
        self.w, self.largest = nnx.Param(jnp.ones(2)), None

    def __call__(self, x):
        y = x * self.w
        self.sow(nnx.Intermediate, "sown", y)
        self.largest = nnx.Intermediate(y.max(), unit="V")
        return y


PURE = {
    "eager": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "scan": lambda f, x: jax.lax.scan(lambda carry, x: (carry, f(x)), 0.0, x)[1],
}


@pytest.mark.parametrize("way", PURE)
def test_update_attaches_what_a_call_has_recorded(way):
    """A pure function merges, calls and splits; what it has recorded gets to the live model with the rest."""
    model = nnx.Dict(layers=nnx.List([Recorder(), Recorder()]))
    graphdef, state = nnx.split(model)

    def apply(x):
        copied = nnx.merge(graphdef, state)
        y = copied.layers[1](copied.layers[0](x))
        return y, nnx.state(copied, nnx.Intermediate)

    y, recorded = PURE[way](apply, jnp.arange(6.0).reshape(3, 2))
    layer = model.layers[1]
    nnx.update(model, recorded)
    assert model.layers[1] is layer
    assert jnp.array_equal(layer.sown[0], y)
    assert (type(layer.largest), layer.largest.unit) == (nnx.Intermediate, "V")
    assert layer.sown is not recorded.layers[1].sown
    nnx.update(model, recorded)  # now it has them
    assert len(nnx.pop(model, nnx.Intermediate).flat_state()) == 4
    assert not hasattr(layer, "sown")


NOT_RECORDED = {
    "a parameter": lambda: {"layer": {"b": nnx.Param(jnp.ones(2))}},
    "a bare value": lambda: {"layer": {"b": jnp.ones(2)}},
    "of a layer that is not there": lambda: {"other": {"sown": nnx.Intermediate(1.0)}},
    "in place of a layer": lambda: {"layer": nnx.Intermediate(1.0)},
    "in place of a setting": lambda: {"n": nnx.Intermediate(1.0)},
    "as an item of a list": lambda: {"items": {0: nnx.Intermediate(1.0)}},
    "beside something that does not fit": lambda: {
        "layer": {"sown": nnx.Intermediate(1.0), "w": nnx.Param(jnp.ones(9))}
    },
}


@pytest.mark.parametrize("case", NOT_RECORDED)
def test_update_attaches_nothing_else(case):
    """What is not recorded, has no place, or would replace something, is refused, and nothing is written."""
    model = nnx.Dict(layer=Layer(), n=2, items=nnx.List())
    before = snapshot(model)
    with pytest.raises(StateMismatchError):
        nnx.update(model, nnx.State(NOT_RECORDED[case]()))
    assert same(snapshot(model), before)


def test_update_attaches_nothing_across_traces():
    """A live model under raw JAX is a constant; the check comes before the first write."""
    model, state = Layer(), nnx.State({"sown": nnx.Intermediate(1.0)})
    before = snapshot(model)
    with pytest.raises(nnx.TraceContextError, match="attach 'sown'"):
        jax.jit(lambda: nnx.update(model, state))()
    assert same(snapshot(model), before)


def test_update_takes_metadata_of_variables_only():
    """A Variable brings its metadata, a bare value leaves it."""
    m = nnx.Dict(a=nnx.Param(1.0, layer=1), b=nnx.Param(1.0, layer=1))
    nnx.update(m, {"a": nnx.Param(2.0, layer=2), "b": 2.0})
    assert (m.a.layer, m.b.layer) == (2, 1)


def test_update_restores_into_an_abstract_model():
    """A model made by eval_shape takes concrete arrays, and refuses those of another shape."""
    abstract = nnx.eval_shape(Net)
    nnx.update(abstract, nnx.state(Net()))
    assert isinstance(abstract.first.w.value, jax.Array)
    assert isinstance(abstract.scale, jax.Array)
    assert abstract.run(jnp.ones(2)).tolist() == [1, 1]
    with pytest.raises(StateMismatchError, match=r"first\.w: expected shape \(2,\)"):
        nnx.update(nnx.eval_shape(Net), {"first": {"w": jnp.ones(3)}})


@pytest.mark.parametrize(
    "state",
    [{"first": {"w": 1}}, {"scale": 1}, {"pair": {1: 1}}, {"first": {"w": 1}, "scale": 1}],
    ids=["Variable", "array", "array in a tuple", "both"],
)
def test_update_of_a_closed_over_model_is_refused(state):
    """Under a raw transform update raises, naming the place, and writes nothing."""
    model = Net()
    before = snapshot(model)

    def f(x):
        nnx.update(model, jax.tree.map(lambda _: x, state))
        return x

    with pytest.raises(nnx.TraceContextError, match=r"model\b"):
        jax.jit(f)(jnp.ones(2))
    assert same(snapshot(model), before)


def test_update_inside_vmap_sees_one_example():
    """A traced value is a view, so its shape is not compared with that of the GraphDef."""
    graphdef, state = nnx.split(jax.tree.map(lambda x: jnp.stack([x] * 3), Layer()))

    def one(state):
        m = nnx.merge(graphdef, state)
        nnx.update(m, jax.tree.map(lambda x: x * 2, nnx.state(m, nnx.Param)))
        return nnx.state(m)

    assert jax.vmap(one)(state).w.value.tolist() == [[2, 2]] * 3

    def reset(state):
        m = nnx.merge(graphdef, state)
        nnx.update(m, {"w": jnp.zeros(5)})
        return m.w.value

    assert jax.vmap(reset)(state).shape == (3, 5)


def test_update_is_seen_by_a_jitted_function():
    """Values, and metadata, which is structure."""
    m = nnx.Dict(a=nnx.Param(jnp.ones(()), layer=1), arr=jnp.ones(()))
    f = nnx.jit(lambda m: m.a.value * m.a.layer * m.arr)
    assert f(m).item() == 1
    nnx.update(m, {"a": nnx.Param(jnp.array(2.0), layer=3), "arr": jnp.array(10.0)})
    assert f(m).item() == 60


def test_update_with_what_a_filter_took():
    """Values and metadata of a part are written, the rest is not touched; what does not fit is refused as a whole."""
    m = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Cache(jnp.ones(3)), c={"d": nnx.Param(jnp.ones(()))})
    part, kept = nnx.state(m, nnx.Param), m.b.value
    new = jax.tree.map(jnp.zeros_like, part)
    new.a.set_metadata(x=1)
    nnx.update(m, new)
    assert (m.a.value.tolist(), m.c.d.value.tolist(), m.a.x, m.b.value is kept) == ([0, 0], 0, 1, True)
    assert m.a.value is new.a.value
    assert not m.c.d.has_metadata("x")
    nnx.update(m, part, {"b": jnp.zeros(3)})
    assert (m.a.value.tolist(), m.b.value.tolist(), m.a.has_metadata("x")) == ([1, 1], [0, 0, 0], False)
    new.c.d.value = jnp.ones(5)
    with pytest.raises(StateMismatchError, match=r"c\.d"):
        nnx.update(m, new)
    assert m.a.value.tolist() == [1, 1]


def test_update_of_plain_lists_and_dicts():
    """Their own items are set, numbers too; those of a tuple cannot be, and then nothing is written."""
    tree = {"a": [1, jnp.ones(2), {"b": 3}], "c": nnx.Param(jnp.zeros(())), "d": (5,), "e": "x"}
    inner = tree["a"]
    nnx.update(tree, {"a": {0: 2, 1: jnp.zeros(2), 2: {"b": 4}}, "c": jnp.ones(()), "e": "y"})
    assert (inner[0], inner[1].tolist(), inner[2], tree["c"].item(), tree["e"]) == (2, [0, 0], {"b": 4}, 1, "y")
    with pytest.raises(ValueError, match=r"Cannot set d\[0\]: it is no item of a list or dict"):
        nnx.update(tree, {"a": {0: 7}, "c": jnp.zeros(()), "d": {0: 6}})
    with pytest.raises(ValueError, match="writes into a Module, or a list or dict of these, but got class Linear"):
        nnx.update(nnx.Linear, {"kernel": jnp.ones(2)})
    assert (inner[0], tree["c"].item(), tree["d"]) == (2, 1, (5,))


# --- filters ---


def test_what_filters_take_is_remembered_only_where_it_cannot_change():
    """A class is asked once for a structure; a function, and a class that looks at its instances, at each call."""

    class Judge(type):
        def __instancecheck__(cls, x):
            return x.raw_value > 1

    filters = [nnx.Param, lambda path, x: x.raw_value > 1, Judge("Large", (), {})]
    m = nnx.Dict(a=nnx.Param(1.0), b=nnx.Param(2.0))
    for _ in range(2):
        assert [list(nnx.state(m, f)) for f in filters] == [["a", "b"], ["b"], ["b"]]
    m.a.value, m.b.value = 2.0, 1.0
    assert [list(nnx.state(m, f)) for f in filters] == [["a", "b"], ["a"], ["a"]]
    m.b = nnx.Cache(2.0)
    assert [list(nnx.state(m, f)) for f in filters] == [["a"], ["a", "b"], ["a", "b"]]


def test_what_filters_take_is_remembered_with_what_is_left_over():
    """`state` leaves out what `split` refuses, in any order of the two."""
    m = nnx.Dict(a=nnx.Param(1.0), b=nnx.Cache(2.0))
    for _ in range(2):
        assert list(nnx.state(m, nnx.Param)) == ["a"]
        with pytest.raises(NonExhaustiveFiltersError, match="b: Cache"):
            nnx.split(m, nnx.Param)
        assert [list(s) for s in nnx.split(m, nnx.Param, nnx.BatchStat, ...)[1:]] == [["a"], [], ["b"]]


def test_what_filters_take_of_plain_arrays_goes_by_what_they_are_now():
    """The class of an array that is an attribute is no part of the structure."""
    m = nnx.Dict(a=jnp.ones(2), b=nnx.Param(1.0))
    assert list(nnx.state(m, np.ndarray)) == []
    nnx.update(m, {"a": np.ones(2)})
    assert list(nnx.state(m, np.ndarray)) == ["a"]


def test_refs_are_data():
    """A jax.Ref in a Variable or as an attribute is a leaf; split, merge and update keep it, a clone has its own."""
    m = nnx.Dict(a=nnx.Param(jnp.ones(2), ref=True), b=jax.new_ref(jnp.zeros(2)), c=nnx.Param(jnp.ones(2)))
    state = nnx.state(m)
    assert (nnx.is_data(m.b), state.b is m.b, state.a.get_raw_value() is m.a.get_raw_value()) == (True, True, True)
    made, cloned = nnx.merge(*nnx.split(m)), nnx.clone(m)

    @nnx.jit
    def add(m):
        m.a[...] += 1
        m.b[...] += 1
        m.c[...] += 1

    add(made)
    assert [x.tolist() for x in (m.a[...], m.b[...], m.c[...])] == [[2, 2], [1, 1], [1, 1]]
    assert [x.tolist() for x in (cloned.a[...], cloned.b[...])] == [[1, 1], [0, 0]]
    nnx.update(m, {"a": jnp.full(2, 5.0), "c": jnp.full(2, 6.0)})
    assert (made.a.tolist(), m.c.tolist(), nnx.to_pure_dict(state)["a"].tolist()) == ([5, 5], [6, 6], [5, 5])
    nnx.update(m, nnx.state(cloned, nnx.Param))
    assert made.a.tolist() == [1, 1]
    assert nnx.pure(nnx.state(m)).a.tolist() == [1, 1]
    assert [x.path for x in nnx.diff(m, cloned)] == [("b",)]


# --- clone ---


def test_clone_owns_its_buffers():
    """Donating the original leaves the clone alone; sharing, cycles and static values are those of the original."""
    m = Net()
    m.tied, m.itself = m.first, m
    target = nnx.clone(m)
    assert (target.itself is target, target.tied is target.first, nnx.graphdef(target) == nnx.graphdef(m)) == (
        True,
    ) * 3
    donate = jax.jit(lambda leaves: [x + 1 for x in leaves], donate_argnums=0)
    donate([x.value for _, x in nnx.iter_graph(m) if isinstance(x, nnx.Variable)])
    assert m.first.w.value.is_deleted()
    assert (target.first.w.value.tolist(), target.scale.item()) == ([1, 1], 1)


@pytest.mark.parametrize("copier", [copy.deepcopy, nnx.clone])
def test_an_array_is_copied_by_one_dispatch(copier):
    """Each further array takes few calls, while ``x.copy()`` alone takes a hundred."""
    models = [nnx.List([nnx.Param(jnp.ones(n % 3 + 1)) for n in range(size)]) for size in (20, 60)]
    copier(models[0])  # compiles
    few, many = [count_calls(lambda model=model: copier(model)) for model in models]
    assert (many - few) / 40 < 60


def test_deepcopy_of_arrays():
    """Buffers are its own; one array in two places is one array in the copy, whatever it is an array of."""
    x, key = jnp.ones(3), jax.random.key(0)
    model = nnx.Dict(a=nnx.Param(x), b=nnx.Param([x, 1]), c=nnx.RngKey(key), x=x, key=key)
    made = copy.deepcopy(model)
    assert made.a.value is made.b.value[0] is made.x
    assert made.c.value is made.key
    assert made.x.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    x.delete()
    assert (made.a.value.tolist(), made.c.value) == ([1, 1, 1], key)


def test_clone_of_numpy_arrays_and_keys():
    """NumPy arrays are copied, random keys stay usable."""
    m = nnx.Dict(a=np.zeros(2), k=nnx.RngKey(jax.random.key(0)))
    c = nnx.clone(m)
    m.a[0] = 5
    assert c.a.tolist() == [0, 0]
    assert jax.random.uniform(c.k.value).item() == jax.random.uniform(m.k.value).item()


def test_clone_of_other_values():
    """What is neither an array nor a container of some is the same in the copy."""
    model = nnx.Dict(name=nnx.Variable("a"), f=nnx.Variable(jnp.tanh))
    copied = nnx.clone(model)
    assert (copied.name.value, copied.f.value) == ("a", jnp.tanh)
    assert copied.name is not model.name


def test_clone_around_the_same_variables_or_buffers():
    """variables=False shares the Variables, arrays=False only their buffers; nodes are new."""
    m = Net()
    shared = nnx.clone(m, variables=False)
    assert (shared.first.w is m.first.w, shared.pair[0] is m.pair[0], shared.layers is m.layers) == (True, True, False)
    cheap = nnx.clone(m, arrays=False)
    assert (cheap.first.w is m.first.w, cheap.first.w.value is m.first.w.value) == (False, True)


def test_clone_inside_a_trace():
    """A closed-over model is cloned in a trace, and the clone may be written there."""
    model = Net()

    @jax.jit
    def f(x):
        m = nnx.clone(model)
        m.first.w.value = x
        return m.run(x)

    assert f(jnp.full(2, 3.0)).tolist() == [9, 9]
    assert model.first.w.value.tolist() == [1, 1]


def test_clone_of_streams_inside_a_trace():
    """Keys are cloned under any trace, and the clone counts for itself."""
    rngs = nnx.Rngs(0)
    draw = lambda: jax.random.key_data(nnx.clone(rngs).params())
    for found in (jax.jit(draw)(), jax.vmap(lambda _: draw())(jnp.arange(2))[1], draw()):
        assert found.tolist() == jax.random.key_data(nnx.Rngs(0).params()).tolist()
    assert nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.clone(rngs))).kernel.shape == (2, 3)
    assert rngs.params.count.value == 0


# --- mapping ---


def test_map():
    """A copy with f(path, leaf) for each leaf; sharing stays, the original too; a bare result becomes the value."""
    m = Net()
    m.tied = m.first
    seen = []

    def f(path, x):
        seen.append(path)
        return x.replace(x * 2) if isinstance(x, nnx.Param) else x + 1

    doubled = nnx.map(f, m)
    assert sorted(map(str, seen)) == sorted(map(str, PATHS))
    assert (type(doubled.first.mean), doubled.first.mean.value.tolist(), doubled.first.w.value.tolist()) == (
        nnx.BatchStat,
        [1, 1],
        [2, 2],
    )
    assert (doubled.tied is doubled.first, doubled.scale.item(), m.first.w.value.tolist()) == (True, 2, [1, 1])


def test_map_writes_what_the_function_writes():
    """It gets the Variables of the original; one that it returns as it is has a copy in the result."""
    m = Net()

    def double(path, x):
        if isinstance(x, nnx.Param):
            x.value *= 2
        return x

    copied = nnx.map(double, m)
    assert (m.first.w.value.tolist(), copied.first.w.value.tolist()) == ([2, 2], [2, 2])
    assert copied.first.w is not m.first.w
    before = m.first.w.value
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(lambda: nnx.map(double, m))()
    assert m.first.w.value is before


def test_update_within_a_foreign_gradient():
    """A note says how to compute with parameters that are arguments; the model is as it was."""
    m = Net()
    before = m.first.w.value

    def loss(params):
        nnx.update(m, params)
        return m.first.w.value.sum()

    with pytest.raises(nnx.TraceContextError, match=r"first\.w") as info:
        jax.grad(loss)(nnx.state(m, nnx.Param))
    assert "nnx.merge(graphdef, params, rest)" in "".join(info.value.__notes__)
    assert m.first.w.value is before


def test_map_without_variables():
    """What f returns takes the place of the Variable itself."""
    made = nnx.map(lambda path, x: path[-1], nnx.Dict(a=nnx.Param(1.0), b=[nnx.Param(2.0)]), recreate_variables=False)
    assert made == {"a": "a", "b": [0]}


def test_map_over_a_state():
    """A State is mapped like the node it came from."""
    state = nnx.state(Net())
    assert nnx.map(lambda path, x: x * 2, state) == jax.tree.map(lambda x: x * 2, state)


def test_recursive_map():
    """Leaves first, then the node that holds them; an object is mapped once, and sharing stays."""
    m = Net()
    m.tied = m.first
    calls = []

    def f(path, x):
        calls.append(path)
        if isinstance(x, Layer):
            x.seen = path
        return x.replace(x * 3) if isinstance(x, nnx.Param) else x

    made = nnx.recursive_map(f, m)
    assert (made is m, made.tied is made.first, made.first.seen, hasattr(m.first, "seen")) == (
        False,
        True,
        ("first",),
        False,
    )
    assert (made.first.w.value.tolist(), made.pair[0].value.tolist(), m.first.w.value.tolist()) == ([3, 3], [0], [1, 1])
    assert calls.index(("first", "w")) < calls.index(("first",)) < calls.index(())
    assert len(calls) == len(set(calls))


def test_recursive_map_replaces_modules():
    """Surgery: each Layer becomes something else, in lists, tuples and pytrees."""
    swap = lambda path, x: nnx.Dict(at=str(path)) if isinstance(x, Layer) else x
    assert nnx.recursive_map(swap, Net()).layers[1].at == "('layers', 1)"
    assert [x.at for x in nnx.recursive_map(swap, [Layer(), Layer()])] == ["(0,)", "(1,)"]


def test_pure():
    """Variables become their values, in States, Modules and pytrees."""
    m = Net()
    assert nnx.pure(nnx.state(m)) == nnx.to_pure_dict(nnx.state(m))
    assert nnx.pure(m).first.w is m.first.w.value
    assert nnx.as_pure([nnx.Param(1.0), 2]) == [1.0, 2]


def test_variables_is_state():
    """As in flax.nnx, it is another name: with the arrays that are plain attributes."""
    assert paths(nnx.variables(Net())) == PATHS
    params, stats = nnx.variables(Net(), nnx.Param, nnx.BatchStat)
    assert (len(paths(params)), len(paths(stats))) == (4, 3)


# --- flat and packaged forms ---


def test_flatten_and_unflatten():
    """A GraphDef with a FlatState, or with a list of values."""
    m = Net()
    graphdef, flat = nnx.flatten(m)
    assert (list(flat.paths), nnx.state(nnx.unflatten(graphdef, flat)) == nnx.state(m)) == (PATHS, True)
    graphdef, leaves = nnx.flatten(m, with_paths=False)
    assert not any(isinstance(x, nnx.Variable) for x in leaves)
    assert nnx.state(nnx.unflatten(graphdef, leaves)) == nnx.state(m)
    assert nnx.state(nnx.unflatten(graphdef, nnx.state(m))) == nnx.state(m)
    with pytest.raises(ValueError, match=rf"Expected {len(PATHS)} leaves, .* got {len(PATHS) - 1}"):
        nnx.unflatten(graphdef, leaves[1:])


def test_unflatten_takes_raw_values_that_are_containers():
    """In a list for `merge` a dict is a State; of `unflatten` it can only be a value."""
    m = nnx.Dict(a=nnx.Variable({"x": jnp.ones(1)}), b=nnx.Variable((1.0, 2.0)))
    new = nnx.unflatten(*nnx.flatten(m, with_paths=False))
    assert new.b.get_value() == (1.0, 2.0)
    assert new.a.get_value()["x"] == 1


def test_unpack():
    """A GraphState is a pytree and a mapping; merge takes it alone, or with others."""
    m = Net()
    packed = nnx.unpack(m)
    assert isinstance(packed, nnx.GraphState)
    doubled = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s))(packed)
    assert nnx.merge(doubled).first.w.value.tolist() == [2, 2]
    assert (list(packed), packed["scale"].item(), len(packed)) == (["first", "layers", "pair", "scale"], 1, 4)
    packed["scale"] = jnp.zeros(())
    assert nnx.merge(packed).scale.item() == 0
    assert repr(packed).startswith("GraphState(GraphDef(")
    params, rest = nnx.unpack(m, nnx.Param, ...)
    assert nnx.state(nnx.merge(params, *nnx.split(m, nnx.Param, ...)[2:])) == nnx.state(m)
    assert len(nnx.to_flat_state(rest)) == 5
    with pytest.raises(StateMismatchError, match="GraphDef must be the same"):
        nnx.merge(packed, nnx.unpack(nnx.Dict(a=nnx.Param(1.0))))


def test_a_graph_state_reads_like_its_state():
    """Keys are attributes, and leaves have the paths that they have in the State; copies and pickles too."""
    m = Net()
    packed, state = nnx.unpack(m), nnx.state(m)
    assert packed.first == state.first
    packed.first.w = nnx.Param(jnp.zeros(2))
    packed.scale = jnp.zeros(())
    assert nnx.merge(packed).first.w.tolist() == [0, 0]
    keyed = jax.tree_util.tree_flatten_with_path
    assert [key for key, _ in keyed(packed)[0]] == [key for key, _ in keyed(state)[0]]
    with pytest.raises(AttributeError, match="nothing"):
        packed.nothing
    for made in (copy.copy(packed), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert (made._graphdef, made._state) == (packed._graphdef, packed._state)
    alone = nnx.unpack(nnx.Param(1.0))
    assert nnx.merge(jax.tree.map(lambda x: x + 1, alone)).value == 2


def test_gradients_of_graph_states():
    """They are GraphStates, which an optimizer takes."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    params, rest = nnx.unpack(model, nnx.Param, ...)
    grads = nnx.grad(lambda params, rest: nnx.merge(params, rest)(jnp.ones((1, 2))).sum())(params, rest)
    assert isinstance(grads, nnx.GraphState)
    optimizer.update(model, grads)
    assert model.bias.item() == -0.5


def test_call():
    """A method of a split model is called by attribute and item, and gives output and new (graphdef, state)."""
    pair = nnx.split(Net())
    y, (graphdef, state) = nnx.call(pair).run(jnp.ones(2))
    assert (y.tolist(), state.first.mean.value.tolist(), pair[1].first.mean.value.tolist()) == ([1, 1], [1, 1], [0, 0])
    y, (graphdef, state) = graphdef.apply(state).layers[0](jnp.ones(2))
    assert (y.tolist(), state.layers[0].mean.value.tolist()) == ([1, 1], [1, 1])
    y, _ = nnx.call(nnx.split(Layer()))(jnp.ones(2))
    assert y.tolist() == [1, 1]


# --- what published code leans on ---


def test_tags_select_variables():
    """Any metadata `tag=` is a filter, alone and in combinations."""
    m = nnx.Dict(a=nnx.Param(1.0, tag="slow"), b=nnx.Param(2.0), c=nnx.BatchStat(3.0, tag="slow"))
    assert list(nnx.state(m, "slow")) == ["a", "c"]
    assert list(nnx.state(m, nnx.All(nnx.Param, nnx.Not(nnx.WithTag("slow"))))) == ["b"]


def test_metadata_survives_every_crossing():
    """Extra metadata by keyword is on the Variable after split, merge, clone, jit, tree.map and replace."""
    loader = lambda x: x
    m = nnx.Dict(w=nnx.Param(jnp.ones(2), sharding=("model", None), weight_loader=loader))
    made = [
        nnx.merge(*nnx.split(m)),
        nnx.clone(m),
        nnx.jit(lambda m: nnx.clone(m))(m),
        jax.jit(lambda m: m)(m),
        jax.tree.map(lambda x: x + 1, m),
        nnx.map(lambda path, v: v + 1, m),
        nnx.state(m),
    ]
    for x in made:
        assert (x["w"].sharding_names, x["w"].weight_loader is loader) == (("model", None), True)


def test_states_of_lists_by_attribute_and_item():
    """`state.layers[0].w`, as code for flax writes it."""
    state = nnx.state(Net())
    assert state.layers[0].w.value.tolist() == state["layers"][0]["w"].value.tolist() == [1, 1]


def test_a_split_model_is_an_argument_of_raw_jit():
    """(graphdef, state, x) are ordinary arguments, none of them static; an equal GraphDef does not trace again."""
    traces = []

    @jax.jit
    def step(graphdef, state, x):
        traces.append(1)
        m = nnx.merge(graphdef, state)
        return m(x), nnx.state(m)

    for _ in range(3):
        graphdef, state = nnx.split(Layer())
        y, state = step(graphdef, state, jnp.ones(2))
    assert (y.tolist(), state.mean.value.tolist(), len(traces)) == ([1, 1], [1, 1], 1)


def test_states_with_is_leaf_on_variables():
    """`jax.tree.map(f, state, is_leaf=lambda x: isinstance(x, nnx.Variable))` sees Variables."""
    state = nnx.state(Net(), nnx.Variable)
    is_variable = lambda x: isinstance(x, nnx.Variable)
    kinds = jax.tree.map(lambda v: type(v).__name__, state, is_leaf=is_variable)
    assert (kinds.first.w, kinds.first.mean) == ("Param", "BatchStat")


def test_an_annotated_model_needs_no_mesh():
    """Sharding metadata is kept and nothing is sharded, in eager code, jit and split."""
    m = nnx.Dict(w=nnx.Param(jnp.ones((2, 2)), sharding=("data", "model")))
    assert nnx.jit(lambda m: m.w.sum())(m).item() == 4
    assert nnx.merge(*nnx.split(m)).w.sharding_names == ("data", "model")


# --- large graphs ---

LEVELS, WIDTH = 1000, 10_000


class Link(nnx.Module):
    def __init__(self, next):
        self.w, self.next = nnx.Param(np.ones((), np.float32)), next


def chain():
    node = None
    for _ in range(LEVELS):
        node = Link(node)
    return node


def nested_lists():
    node = nnx.List([nnx.Param(np.ones((), np.float32))])
    for _ in range(LEVELS - 1):
        node = nnx.List([node, nnx.Param(np.ones((), np.float32))])
    return node


def wide():
    return nnx.List([nnx.Param(np.ones((), np.float32)) for _ in range(WIDTH)])


@pytest.fixture(params=[chain, nested_lists, wide], ids=lambda f: f.__name__, scope="module")
def large(request):
    return request.param(), WIDTH if request.param is wide else LEVELS


def test_large_graphs_split_and_merge(large):
    """1,000 levels or 10,000 Variables: no recursion error, every leaf there and back."""
    m, n = large
    graphdef, params, rest = nnx.split(m, nnx.Param, ...)
    assert (len(nnx.to_flat_state(params)), len(rest)) == (n, 0)
    back = nnx.merge(graphdef, params, rest)
    assert nnx.graphdef(back) is graphdef or nnx.graphdef(back) == graphdef
    assert len(nnx.to_flat_state(nnx.state(back, nnx.Param))) == n


def test_large_graphs_update_pop_and_clone(large):
    """update, clone, deepcopy, map and pop on the same."""
    m, n = large
    zeros = nnx.map_state(lambda path, v: v.replace(np.zeros((), np.float32)), nnx.state(m))
    for made in (nnx.clone(m), copy.deepcopy(m), nnx.map(lambda path, v: v, m)):
        nnx.update(made, zeros)
        assert sum(float(v.value) for _, v in nnx.to_flat_state(nnx.state(made))) == 0
    assert sum(float(v.value) for _, v in nnx.to_flat_state(nnx.state(m))) == n
    assert len(nnx.to_flat_state(nnx.pop(made, nnx.Param))) == n
    assert len(nnx.to_flat_state(nnx.state(made))) == 0


def test_large_graphs_are_walked(large):
    """iter_graph, iter_modules, recursive_map, find_duplicates, repr and locating for a message."""
    m, n = large
    assert sum(isinstance(x, nnx.Variable) for _, x in nnx.iter_graph(m)) == n
    assert len(list(nnx.iter_modules(m))) in (1, n)
    assert nnx.find_duplicates(m) == []
    made = nnx.recursive_map(lambda path, x: x.replace(5.0) if isinstance(x, nnx.Param) else x, m)
    assert {v.value for _, v in nnx.to_flat_state(nnx.state(made))} == {5.0}
    deepest = next(x for _, x in nnx.iter_graph(m) if isinstance(x, nnx.Variable))
    with pytest.raises(nnx.TraceContextError, match=r"Param .* at "):
        jax.jit(lambda x: deepest.set_value(x))(1.0)


def test_large_graphs_as_graphdefs(large):
    """Hash, equality, repr, pickle."""
    m, n = large
    graphdef = nnx.graphdef(m)
    assert hash(graphdef) == hash(nnx.graphdef(nnx.clone(m)))
    assert 0 < repr(graphdef).count("Param") <= min(n, 300)
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef


def test_large_graphs_cross_into_jit(large):
    """A jitted function finds and writes the deepest Variable, at each of several calls."""
    m, n = large
    m = nnx.clone(m)

    def deepest(m):
        return next(v for _, v in nnx.iter_graph(m) if isinstance(v, nnx.Variable))

    def step(m):
        deepest(m).value = deepest(m) + 1

    nnx.jit(step)(m)
    nnx.jit(step)(m)
    assert deepest(m).value.item() == 3


def test_large_wide_state_operations(large):
    """filter, split, map, pickle and the pytree of the State of a large graph."""
    m, n = large
    state = nnx.state(m)
    assert len(nnx.to_flat_state(pickle.loads(pickle.dumps(state)))) == n
    assert len(nnx.to_flat_state(nnx.filter_state(state, nnx.Param))) == n


def test_wide_graph_as_a_raw_pytree():
    """10,000 Variables flatten and unflatten under raw JAX."""
    m = wide()
    leaves, treedef = jax.tree.flatten(m)
    assert len(leaves) == WIDTH
    assert nnx.graphdef(treedef.unflatten(leaves)) == nnx.graphdef(m)


def test_a_state_has_lists_in_metadata_of_its_own():
    """With a filter or without: editing the list of a model does not reach into a State that was taken before."""
    m = nnx.Dict(w=nnx.Param(jnp.ones(2), tags=["a"]), b=nnx.BatchStat(jnp.ones(2)))
    states = [nnx.state(m), nnx.split(m)[1], nnx.state(m, nnx.Param), nnx.split(m, nnx.Param, ...)[1]]
    for state in states:
        assert state["w"].tags == ["a"]
        assert state["w"].tags is not m.w.tags


@pytest.mark.parametrize("given", ["all", "one"])
def test_a_leaf_of_no_type(given):
    """A leaf of the class Variable itself fits any type."""
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    for path in state.flat_state().paths if given == "all" else [("mean",)]:
        state[path[0]] = nnx.Variable(jnp.full(2, 5.0))
    built = nnx.merge(graphdef, state)
    nnx.update(model, state)
    for node in (built, model):
        assert type(node.mean) is nnx.BatchStat
        assert type(node.scale) is nnx.Param
        assert node.mean[0] == 5.0
    with pytest.raises(StateMismatchError, match=r"expected shape \(2,\), got \(3,\)"):
        nnx.update(model, {"mean": nnx.Variable(jnp.ones(3))})


def test_a_class_of_variables_that_is_defined_again():
    """As in a notebook's cell that runs twice: a State of the old class fits a model of the new one."""

    def run_cell(value):
        class Memory(nnx.Variable):
            pass

        return nnx.Dict(memory=Memory(jnp.full(2, value)), w=nnx.Param(jnp.ones(2)))

    old, new = run_cell(1.0), run_cell(0.0)
    kind = type(new.memory)
    assert type(old.memory) is not kind
    nnx.update(new, nnx.state(old))
    assert type(new.memory) is kind
    assert (new.memory == 1).all()
    nnx.update(new, {"memory": nnx.state(old).memory})
    with pytest.raises(StateMismatchError, match="memory: expected Memory, got BatchStat"):
        nnx.update(new, {"memory": nnx.BatchStat(jnp.ones(2))})
    assert not nnx.diff(nnx.state(old), nnx.state(new))


def test_an_object_of_a_users_pytree_class_may_take_the_place_of_an_array():
    """Such as an array with named axes; also one with a shape and no dtype, which several arrays make up."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Named:
        data: Any
        dtype: Any = dataclasses.field(default=None, metadata={"static": True})
        shape = ()

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    state.bias.value = Named(state.bias.value)
    named = nnx.merge(graphdef, state)
    np.testing.assert_array_equal(named.bias.value.data, jnp.zeros(3))
    nnx.update(model, state)
    nnx.update(model, jax.tree.map(lambda x: x + 1, nnx.state(model)))
    np.testing.assert_array_equal(model.bias.value.data, jnp.ones(3))
    retyped = {"kernel": state.kernel, "bias": nnx.BatchStat(Named(jnp.zeros(3)))}
    assert type(nnx.merge(graphdef, retyped).bias) is nnx.BatchStat
    with pytest.raises(StateMismatchError, match="bias"):
        nnx.update(model, retyped)


@pytest.mark.parametrize("number", [np.float32(5), np.float64(5), 5.0, 5, nnx.Variable(5.0)])
@pytest.mark.parametrize("by", ["update", "merge"])
def test_a_number_in_place_of_an_array_in_an_attribute_is_an_array(number, by):
    """It would be static there. Arithmetic on a NumPy array without axes gives NumPy's numbers."""
    model = nnx.Dict(mask=np.array(1.0, np.float32), masks=nnx.List([jnp.array(1.0)]), steps=nnx.data(0))
    read = nnx.jit(lambda m: m.mask + m.masks[0] + m.steps)
    assert [read(model) for _ in range(3)] == [2, 2, 2]
    graphdef, state = nnx.split(model)
    state["mask"] = state["masks"][0] = number
    state["steps"] = 7
    if by == "merge":
        model = nnx.merge(graphdef, state)
    else:
        nnx.update(model, state)
    assert isinstance(model.mask, jax.Array)
    assert isinstance(model.masks[0], jax.Array)
    assert model.steps == 7
    assert type(model.steps) is int
    assert [read(model) for _ in range(5)] == [17] * 5
    assert nnx.graphdef(model) == graphdef


def test_an_object_of_a_users_pytree_class_may_take_the_place_of_an_array_in_an_attribute():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Named:
        data: Any
        shape = ()
        dtype = jnp.dtype("float32")

    model = nnx.Dict(mask=jnp.float32(1))
    read = nnx.jit(lambda m: getattr(m.mask, "data", m.mask))
    assert [read(model) for _ in range(3)] == [1, 1, 1]
    graphdef, state = nnx.split(model)
    state["mask"] = Named(jnp.float32(2))
    nnx.update(model, state)
    merged = nnx.merge(graphdef, state)
    assert [read(x) for _ in range(5) for x in (model, merged)] == [2] * 10


def test_the_state_of_a_list_with_attributes():
    """Its keys are numbers and names, which JAX cannot sort as the keys of one dict."""
    layers = nnx.List([nnx.Param(1.0)])
    layers.scale = nnx.Param(2.0)
    graphdef, state = nnx.split(layers)
    assert list(state) == [0, "scale"]
    made = nnx.merge(graphdef, jax.tree.map(lambda x: 2 * x, state))
    assert (made[0].value, made.scale.value, len(made)) == (2.0, 4.0, 1)
    nnx.update(layers, nnx.state(made))
    assert layers.scale.value == 4.0


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_raw_data_of_a_random_key_give_that_key(impl):
    """A checkpoint cannot hold a random key, only its data: ``update`` and ``merge`` take these."""

    def dropout(seed):
        return nnx.Dropout(0.5, rngs=nnx.Rngs(jax.random.key(seed, impl=impl)))

    def raw(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    layer, x = dropout(1), jnp.ones(20)
    graphdef, state = nnx.split(layer)
    state = jax.tree.map(raw, state)
    checkpoint = jax.tree.map(np.asarray, nnx.to_pure_dict(state))
    expected = layer(x)
    for given in (state, checkpoint):
        updated, merged = dropout(2), nnx.merge(graphdef, given)
        nnx.update(updated, given)
        traced = jax.jit(lambda given: nnx.merge(graphdef, given)(x))(given)
        for y in (updated(x), merged(x), traced):
            np.testing.assert_array_equal(y, expected)
        assert type(updated.rngs.key) is nnx.RngKey
        assert updated.rngs.key.dtype == layer.rngs.key.dtype
    with pytest.raises(StateMismatchError, match=r"rngs.key: expected dtype key<\w+>, got uint32"):
        nnx.update(layer, {"rngs": {"key": jnp.zeros(3, jnp.uint32)}})


def test_raw_data_of_stacked_random_keys():
    """They may have an axis more, as the leaves of several models together may."""
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(1), 3)
    nnx.update(layer, {"rngs": {"key": jax.random.key_data(keys), "count": jnp.zeros(3, jnp.uint32)}})
    assert (layer.rngs.key.get_value() == keys).all()


class Two(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.shared, self.head = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.scale * self.head(self.shared(x))


HEAD = nnx.All(nnx.Param, nnx.PathContains("head"))


def test_merge_takes_stacks_of_some_parameters():
    """Those of a filter, as vmap maps them: two heads on one trunk."""
    models = [Two(0), Two(1)]
    heads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[nnx.state(model).filter(HEAD) for model in models])
    shared = nnx.state(models[0]).filter(nnx.Not(HEAD))
    both = nnx.merge(nnx.graphdef(models[0]), nnx.State.merge(shared, heads))
    axes, x = nnx.StateAxes({HEAD: 0, ...: None}), jnp.ones(3)
    y = nnx.vmap(lambda model: model(x), in_axes=(axes,))(both)
    np.testing.assert_allclose(y[0], models[0](x), rtol=1e-6)
    models[1].shared, models[1].scale = models[0].shared, models[0].scale
    np.testing.assert_allclose(y[1], models[1](x), rtol=1e-6)


def test_merge_takes_stacks_of_samples():
    """Of parameters of different shapes, scalars among them that have got an axis of length 1."""
    graphdef, state, rest = nnx.split(Two(0), lambda path, x: path[-1] in ("scale", "bias"), ...)
    samples = jax.tree.map(lambda x: jnp.stack([jnp.atleast_1d(x)] * 4), state)
    assert nnx.merge(graphdef, samples, rest).scale.shape == (4, 1)


def test_merge_takes_stacks_of_one_parameter_of_a_type_and_all_of_another():
    """Samples of the free parameters, of which one type has many and the other has one."""

    class Constrained(nnx.Param):
        pass

    fixed, free = (nnx.Param(jnp.array(x)) for x in (1.0, 2.0))
    parameters = {"fixed": fixed, "free": free, "a": Constrained(jnp.array(3.0)), "b": Constrained(jnp.array(4.0))}
    graphdef, rest, state = nnx.split(parameters, lambda path, x: path[0] == "fixed", ...)
    samples = jax.tree.map(lambda x: jnp.stack([jnp.atleast_1d(x)] * 4), state)
    merged = nnx.merge(graphdef, samples, rest)
    assert {name: x.shape for name, x in merged.items()} == {"fixed": (), "free": (4, 1), "a": (4, 1), "b": (4, 1)}


@pytest.mark.parametrize(
    "shapes", [{"bias": (4, 2)}, {"bias": (1, 2), "kernel": (1, 3, 2)}, {"bias": (4, 2), "kernel": (4, 2, 3)}]
)
def test_merge_refuses_shapes_that_are_no_stacks(shapes):
    """One leaf that differs is a mistake, as are axes of length 1 and axes in another order."""
    graphdef, state = nnx.split(Two(0))
    for name, shape in shapes.items():
        state["head"][name].value = jnp.zeros(shape)
    with pytest.raises(StateMismatchError, match=r"head\.bias: expected shape"):
        nnx.merge(graphdef, state)


def test_update_says_how_a_wrong_path_is_to_be_written():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    model = nnx.Dict(first=layer, more=[layer])
    with pytest.raises(StateMismatchError, match=r"weight: unexpected.*\n.* It has: bias, kernel\.$"):
        nnx.update(layer, {"weight": jnp.ones((3, 2))})
    with pytest.raises(StateMismatchError, match="Did you mean 'kernel'"):
        nnx.update(layer, {"kernl": jnp.ones((2, 3))})
    with pytest.raises(StateMismatchError, match="Did you mean 'first'"):
        nnx.update(model, {"frst": {"kernel": jnp.ones((2, 3))}})
    with pytest.raises(StateMismatchError, match=r"first has: bias, kernel\.$"):
        nnx.update(model, {"first": jnp.ones(3)})
    with pytest.raises(StateMismatchError, match=r"bias\.w: unexpected.*\nPass strict=False to skip these\.$"):
        nnx.update(layer, {"bias": {"w": 1.0}})
    for key, sep in ("first.kernel", "."), ("first/kernel", "/"):
        given = {key: jnp.zeros((2, 3))}
        with pytest.raises(StateMismatchError, match=rf"unflatten_mapping\(state, sep='{sep}'\) nests them"):
            nnx.update(model, given)
        nnx.update(model, nnx.traversals.unflatten_mapping(given, sep=sep))
    assert (layer.kernel == 0).all()
