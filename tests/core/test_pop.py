"""pop: from all places, of the first path, all or nothing."""

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx

from .models import Net, paths, same, snapshot


def test_pop_removes_what_filters_take():
    """One State for each filter; a Variable that sits in two places is removed from both."""
    m = Net()
    m.again = m.first.mean
    stats, params = nnx.pop(m, nnx.BatchStat, nnx.PathContains("layers"))
    assert paths(stats) == [("again",), ("layers", 0, "mean"), ("layers", 1, "mean")]
    assert paths(params) == [("layers", 0, "w"), ("layers", 1, "w")]
    assert (list(vars(m.first)), hasattr(m, "again"), list(vars(m.layers[0]))) == (["w"], False, [])
    assert nnx.pop(m, nnx.BatchStat) == {}


def test_pop_from_lists_and_dicts():
    """Items of a list are removed together, the others move up."""
    m = nnx.Dict(
        x=[nnx.Param(0.0), nnx.Intermediate(1.0), nnx.Param(2.0), nnx.Intermediate(3.0)], y={"a": nnx.Intermediate(4.0)}
    )
    popped = nnx.pop(m, nnx.Intermediate)
    assert nnx.to_pure_dict(popped) == {"x": {1: 1.0, 3: 3.0}, "y": {"a": 4.0}}
    assert ([v.value for v in m.x], dict(m.y)) == ([0.0, 2.0], {})
    assert nnx.jit(lambda m: len(m.x))(m) == 2


def test_pop_of_arrays_and_from_plain_containers():
    """Arrays that are attributes or items go too; plain lists and dicts lose items as those of a Module do."""
    m = Net()
    assert (paths(nnx.pop(m, nnx.PathContains("scale"))), hasattr(m, "scale")) == ([("scale",)], False)
    tree = {"a": [{"b": nnx.Param(1.0)}, jnp.ones(2), 3], "m": nnx.Dict(x=nnx.Param(2.0), n=4)}
    taken, arrays = nnx.pop(tree, nnx.Param, lambda path, x: x.shape == (2,))
    assert nnx.to_pure_dict(taken) == {"a": {0: {"b": 1.0}}, "m": {"x": 2.0}}
    assert nnx.to_pure_dict(arrays)["a"][1].tolist() == [1, 1]
    assert (tree["a"], dict(tree["m"])) == ([{}, 3], {"n": 4})
    with pytest.raises(ValueError, match=r"Cannot pop \[1\]: it is inside a tuple"):
        nnx.pop((1, jnp.ones(2)), ...)


def test_pop_that_cannot_be_done_changes_nothing():
    """Without a filter, and for a Variable inside a tuple: an error, and everything stays."""
    m = Net()
    before = snapshot(m)
    with pytest.raises(ValueError, match="at least one filter"):
        nnx.pop(m)
    with pytest.raises(ValueError, match=r"Cannot pop pair\[0\]: it is inside a tuple"):
        nnx.pop(m, nnx.Param)
    assert same(snapshot(m), before)


def test_pop_from_a_closed_over_model_is_refused_and_changes_nothing():
    """Also when a part of the graph was made inside of the trace."""
    model = Net()
    before = snapshot(model)

    @jax.jit
    def f(x):
        inner = nnx.Dict(a=nnx.BatchStat(x), b=model)
        with pytest.raises(nnx.TraceContextError):
            nnx.pop(inner, nnx.BatchStat)
        return len(inner)

    assert f(1.0).item() == 2
    assert same(snapshot(model), before)


def test_pop_from_several_of_which_one_is_closed_over_changes_none():
    """What belongs to the trace is as it was, too."""
    model = Net()

    def inside(x):
        own = nnx.clone(model)
        with pytest.raises(nnx.TraceContextError):
            nnx.pop({"a": model, "b": own}, nnx.BatchStat)
        assert hasattr(own.first, "mean")
        return x

    jax.jit(inside)(1.0)
    assert hasattr(model.first, "mean")


def test_pop_in_a_jitted_function_that_refers_to_the_model():
    """Also if there was nothing to take when it was compiled."""
    holder = [nnx.Dict(x=nnx.Param(1.0))]
    take = nnx.jit(lambda: nnx.pop(holder[0], nnx.Intermediate))
    assert take() == {}
    holder[0].y = nnx.Intermediate(2.0)
    assert take()["y"].value == 2.0
    assert list(holder[0]) == ["x"]


def test_pop_returns_variables_of_its_own():
    """Who still has one of those that were taken out has it for himself."""
    model = Net()
    mean = model.first.mean
    popped = nnx.pop(model, nnx.BatchStat)
    popped.first.mean.value = jnp.full(2, 7.0)
    assert mean.value.tolist() != [7, 7]


def test_pop_from_a_state_that_a_module_holds():
    """As from its dicts: `state`, `pop` and `iter_graph` see the same Variables."""
    holder = nnx.Dict(ema=nnx.state(Net()), n=1)
    stats = nnx.state(holder, nnx.BatchStat)
    assert same(nnx.pop(holder, nnx.BatchStat), stats)
    assert nnx.state(holder, nnx.BatchStat) == {}
    assert paths(nnx.state(holder, nnx.Param)) == [("ema", *path) for path in paths(nnx.state(Net(), nnx.Param))]
