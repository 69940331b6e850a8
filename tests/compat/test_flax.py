"""The namespace that takes flax.nnx's switches."""

import ast
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlib
from nnxlib.compat import flax as nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def loss(model, x):
    return model(x).sum()


X = jnp.ones((2, 2))


def test_the_names_are_those_of_nnxlib():
    classes = {name: x for name, x in vars(nnxlib).items() if isinstance(x, type)}
    switched = {name for name, x in classes.items() if getattr(nnx, name) is not x}
    assert switched == {"Optimizer", "ModelAndOptimizer", "EMA"}
    assert all(issubclass(getattr(nnx, name), classes[name]) for name in switched)
    assert {name for name in dir(nnxlib) if not name.startswith("_")} <= set(dir(nnx))
    functions = {name for name, x in vars(nnxlib).items() if isinstance(x, types.FunctionType)} | {*nnxlib._LATER}
    modules = {name for name in functions if isinstance(getattr(nnx, name), types.ModuleType)}
    assert not modules  # of the files beside this one, which may not have the name of a function
    with pytest.raises(AttributeError, match="no_such_name"):
        nnx.no_such_name


def test_a_state_holds_the_very_variables():
    """Of the model; and a model that is merged holds those of the State, unless it is to have copies."""
    model = Net(nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    assert params["linear"]["kernel"] is nnx.state(model)["linear"]["kernel"] is model.linear.kernel
    assert nnx.variables(model, nnx.Param, ...)[0]["linear"]["kernel"] is model.linear.kernel
    merged = nnx.merge(graphdef, params, rest)
    assert merged.linear.kernel is model.linear.kernel
    assert merged.linear is not model.linear
    assert nnx.merge(graphdef, params, rest, copy=True).linear.kernel is not model.linear.kernel
    assert nnx.state(model.linear.kernel) is model.linear.kernel
    graphdef, kernel = nnx.split(model.linear.kernel)
    assert nnx.merge(graphdef, kernel) is kernel is model.linear.kernel
    cycle = nnx.Dict(a=nnx.Param(1))
    cycle.itself = cycle
    merged = nnx.merge(*nnx.split(cycle))
    assert merged.itself is merged is not cycle
    assert merged.a is cycle.a

    def halve(state):
        jax.tree.map(lambda x: x.set_value(x / 2), state, is_leaf=lambda x: isinstance(x, nnx.Variable))

    before = model.linear.kernel.value
    halve(params)
    nnx.jit(lambda model, state: halve(state))(model, params)
    assert jnp.array_equal(model.linear.kernel.value, before / 4)


def test_call_changes_the_model():
    """Its State has the Variables of the model: statistics and random draws of one call are there in the next."""
    model = nnx.Sequential(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    x = jnp.ones((4, 2))
    graphdef, state = nnx.split(model)
    first, (_, after) = nnx.call((graphdef, state))(x + jnp.arange(8.0).reshape(4, 2))
    assert model.layers[0].mean.sum() > 0
    assert after["layers"][0]["mean"] is state["layers"][0]["mean"] is model.layers[0].mean
    nnx.call((graphdef, state)).layers[1](x)
    assert model.layers[1].rngs.count == 2


def test_merge_takes_other_shapes():
    """As in flax.nnx: published code computes kernels for a call, and merges them where the model has larger ones."""
    graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    state["kernel"] = nnx.Param(jnp.ones((4, 3), jnp.int32))
    merged = nnx.merge(graphdef, state)
    assert (merged.kernel.shape, merged.kernel.dtype) == ((4, 3), jnp.int32)
    assert merged.kernel is state["kernel"]
    with pytest.raises(ValueError, match="kernel: expected shape"):
        nnx.merge(graphdef, state, strict=True)
    with pytest.raises(ValueError, match="bias: missing"):
        nnx.merge(graphdef, nnx.filter_state(state, nnx.PathContains("kernel")))


def test_update_attaches_variables_that_a_call_has_made():
    """As in a raw scan over a stack of layers, each of which keeps its loss in a Variable of a type of its own."""

    class Loss(nnx.Variable):
        pass

    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(3))

        def __call__(self, x):
            self.loss = Loss(x * self.w)
            return x + 1

    def body(x, params):
        layer = nnx.merge(graphdef, params)
        return layer(x), nnx.state(layer, Loss)

    layers = Layer()
    graphdef, params = nnx.split(layers)
    losses = jax.lax.scan(body, jnp.ones(()), params)[1]
    nnx.update(layers, losses)
    assert layers.loss.tolist() == [1, 2, 3]
    assert nnx.pop(layers, Loss)["loss"].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="loss: unexpected Loss"):
        nnxlib.update(layers, losses)
    with pytest.raises(ValueError, match="b: unexpected"):  # an array is none
        nnx.update(layers, {"b": jnp.ones(3)})
    assert set(vars(layers)) == {"w"}


def test_whatever_a_model_is_taken_apart_into_holds_the_very_variables():
    """The States that know their structure, and those with paths; what is made of them holds them, too."""
    model = Net(nnx.Rngs(0))
    params, rest = nnx.unpack(model, nnx.Param, ...)
    assert params["linear"]["kernel"] is nnx.graphlib.unpack(model)["linear"]["kernel"] is model.linear.kernel
    merged = nnx.merge(params, rest)
    assert merged.linear.kernel is model.linear.kernel
    assert merged.norm.mean is model.norm.mean
    assert nnx.merge(params, rest, copy=True).linear.kernel is not model.linear.kernel
    assert nnx.merge(nnx.unpack(model.linear.kernel)) is model.linear.kernel

    @nnx.jit
    def count(params, rest):
        nnx.merge(params, rest)(X)

    before = model.norm.mean.value
    count(params, rest)
    assert not jnp.array_equal(model.norm.mean.value, before)

    graphdef, flat = nnx.flatten(model)
    assert flat["linear", "kernel"] is nnx.compat.flatten(model)[1]["linear", "kernel"] is model.linear.kernel
    assert nnx.unflatten(graphdef, flat).linear.kernel is model.linear.kernel
    assert nnx.merge(graphdef, flat).linear.kernel is model.linear.kernel
    graphdef, flat = nnx.flatten(model.linear.kernel)
    assert nnx.unflatten(graphdef, flat) is model.linear.kernel
    graphdef, leaves = nnx.flatten(model, with_paths=False)
    assert nnx.unflatten(graphdef, leaves).linear.kernel is not model.linear.kernel


def test_merge_makes_keys_of_raw_data():
    """As code for checkpoints without random keys has in their place; all other Variables are those of the State."""
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    state["rngs"]["key"] = jax.tree.map(jax.random.key_data, state.filter(nnx.RngKey))["rngs"]["key"]
    merged = nnx.merge(graphdef, state)
    assert merged.rngs.key.value == layer.rngs.key.value
    assert merged.rngs.count is layer.rngs.count
    assert state["rngs"]["key"].dtype == jnp.uint32
    assert merged(X).shape == X.shape


def test_merge_makes_variables_of_the_running_trace():
    """Those of a State from outside could not be written to."""
    graphdef, state = nnx.split(nnx.Dict(n=nnx.Variable(jnp.array(1.0))))

    @jax.jit
    def count(x):
        merged = nnx.merge(graphdef, state)
        merged.n[...] += x
        return merged.n.value

    assert count(1.0) == 2.0
    assert state["n"].value == 1.0


def test_switches_are_taken_everywhere():
    model = Net(nnx.Rngs(0))
    graphdef, state = nnx.split(model, graph=True)
    assert nnx.jit(lambda m, x: m(x), graph=False)(nnx.merge(graphdef, state), X).shape == (2, 3)
    assert nnx.jit(graph=True, graph_updates=False)(lambda m, x: m(x))(model, X).shape == (2, 3)
    assert nnx.state(model, nnx.Param, graph=False).linear.kernel.shape == (2, 3)
    assert nnx.clone(model, graph=False).linear.kernel.shape == (2, 3)
    assert dict(nnx.iter_graph(model, graph=False))


def test_gradients_have_the_shape_of_the_mode():
    """A State in graph mode; in tree mode a Module, which an Optimizer takes as well."""
    model = Net(nnx.Rngs(0))
    assert isinstance(nnx.grad(loss)(model, X), nnx.State)
    for options in ({"graph": False}, {"graph_updates": False}):
        grads = nnx.grad(loss, **options)(model, X)
        assert isinstance(grads, Net)
        expected = nnxlib.grad(loss)(nnxlib.clone(model), X)
        assert jax.tree.map(jnp.shape, nnx.state(grads, nnx.Param)) == jax.tree.map(jnp.shape, expected)
        value, grads = nnx.value_and_grad(loss, **options)(model, X)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        before = model.linear.bias.value
        optimizer.update(model, nnx.state(grads, nnx.Param))
        assert jnp.allclose(model.linear.bias.value, before - 0.1 * grads.linear.bias.value)
    (with_aux, aux) = nnx.grad(lambda m, x: (loss(m, x), 7), has_aux=True, graph=False)(model, X)
    assert (type(with_aux), aux) == (Net, 7)


def test_the_mode_can_be_set_for_all_calls():
    model = Net(nnx.Rngs(0))
    assert nnx.set_graph_mode.current_value()
    with nnx.set_graph_mode(False):
        assert isinstance(nnx.grad(loss)(model, X), Net)
    assert isinstance(nnx.grad(loss)(model, X), nnx.State)
    with nnx.set_graph_updates(False), nnx.var_defaults(ref=False):
        assert isinstance(nnx.grad()(loss)(model, X), Net)
    assert nnx.with_vars(model, ref=True).linear.kernel.ref


def test_the_transforms_of_nnx_compat_are_in_graph_mode():
    """Whatever mode is set for all calls."""
    with nnx.set_graph_mode(False):
        assert isinstance(nnxlib.compat.grad(loss)(Net(nnx.Rngs(0)), X), nnx.State)
        layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        assert nnxlib.compat.jit(lambda m: m.kernel)(layer) is layer.kernel


def test_functions_with_the_names_of_built_in_ones_are_no_hindrance():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert not nnx.map(lambda path, x: 0.0 * x, layer).kernel.any()
    assert nnx.switch(1, (lambda m: m.kernel.sum(), lambda m: m.bias.sum()), layer, graph=False) == 0.0


class Counter(nnx.Module):
    def __init__(self):
        self.count, self.rngs, self.array = nnx.BatchStat(jnp.array(0)), nnx.Rngs(dropout=0), jnp.ones(3)

    def __call__(self, carry, x):
        self.count[...] += 1
        return carry + x, (self.count[...], jax.random.key_data(self.rngs.dropout()), self.array)


WHOLE = {
    "None": None,
    "by filter": nnx.StateAxes({nnx.Param: 0, ...: None}),
    "by function": nnx.prefix(Counter(), lambda path, x: None),
    "in a mapping": {"m": None, "x": 0},
}


@pytest.mark.parametrize(
    ("way", "graph_updates"), [*((way, True) for way in WHOLE), *((way, False) for way in WHOLE if way != "by filter")]
)
def test_a_scan_carries_what_it_passes_whole(way, graph_updates):
    """But for random streams, which it then carries in tree mode only; and what does not change is not carried."""
    in_dict = isinstance(WHOLE[way], dict)
    options = {"in_axes": (nnx.Carry, WHOLE[way] if in_dict else [WHOLE[way], 0]), "graph_updates": graph_updates}
    found = []

    @nnx.scan(**options)
    def loop(carry, both):
        m, x = both.values() if isinstance(both, dict) else both
        found.append(m)
        return m(carry, x)

    m = Counter()
    for calls in (1, 2):
        carry, (counts, keys, arrays) = loop(0.0, {"m": m, "x": jnp.ones(4)} if in_dict else [m, jnp.ones(4)])
        assert (carry, m.count.value, arrays.shape) == (4, 4 * calls, (4, 3))
        assert counts.tolist() == [4 * calls - 3, 4 * calls - 2, 4 * calls - 1, 4 * calls]
        assert len({tuple(key.tolist()) for key in keys}) == (1 if graph_updates else 4)
        assert m.rngs.dropout.count.value == (calls if graph_updates else 4 * calls)
    assert len(found) == 1


def test_a_scan_that_is_made_at_each_call_is_traced_once():
    traced = []

    def body(m, carry, x):
        traced.append(m)
        return m(carry, x)

    m = Counter()
    for _ in range(3):
        nnx.scan(body, in_axes=(nnx.StateAxes({...: None}), nnx.Carry, 0))(m, 0.0, jnp.ones(2))
    assert (len(traced), m.count.value) == (1, 6)
    assert "StateAxes({...: 0})" in repr(_refused(lambda: nnx.scan(body, in_axes=(nnx.StateAxes({...: 0}), 0, 0))))


def _refused(call):
    with pytest.raises(nnx.errors.PrefixError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("options", [{"graph": False}, {"graph_updates": False}])
def test_streams_are_exchanged_in_a_copy_in_tree_mode(options):
    """The nodes are new, the Variables the same; what the original has given to the copy it does not give again."""
    m = Net(nnx.Rngs(params=0, dropout=1))
    rngs = m.dropout.rngs
    count, key = int(rngs.count.value), rngs.key.value
    for exchange, settings, shape in (
        (nnx.split_rngs, {"splits": 5, "only": "dropout"}, (5,)),
        (nnx.split_rngs, {"splits": 1, "squeeze": True}, ()),
        (nnx.fork_rngs, {}, ()),
    ):
        lanes = exchange(m, **settings, **options)
        assert type(lanes) is Net
        assert lanes.linear.kernel is m.linear.kernel
        assert lanes.dropout.rngs.key.shape == shape
        assert lanes.dropout.rngs.count.value.sum() == 0
        count += 1
        assert (rngs.count.value, rngs.key.value) == (count, key)
    with nnx.split_rngs(m, splits=5, only="dropout"):
        assert rngs.key.shape == (5,)
    shared = nnx.Dict(a=rngs, b=rngs)
    if "graph" in options:
        with pytest.raises(ValueError, match="RngStream found at paths a, b: a tree does not support shared"):
            nnx.split_rngs(shared, splits=2, **options)
    else:
        lanes = nnx.split_rngs(shared, splits=2, **options)
        assert lanes.a is lanes.b


@pytest.mark.parametrize(
    "function",
    [
        *(nnx.split, nnx.state, nnx.graphdef, nnx.clone, nnx.graphlib.flatten, nnx.unpack, nnx.view, nnx.as_abstract),
        lambda x, **graph: list(nnx.iter_graph(x, **graph)),
        lambda x, **graph: list(nnx.iter_children(x, **graph)),
        lambda x, **graph: nnx.recursive_map(lambda path, x: x, x, **graph),
    ],
)
def test_a_tree_has_no_variable_twice(function):
    """In tree mode a shared Variable, a cycle, and what is no pytree are refused with their paths."""
    variable, cycle = nnx.Param(jnp.ones(1)), nnx.Dict()
    holder, empty = nnx.Dict(a=variable), nnx.Dict()
    cycle.inner = [cycle]
    ref = jax.new_ref(jnp.ones(1))
    opaque = type("Opaque", (nnx.Module,), {}, pytree=False)()
    for tree, message in [
        ([variable, {"a": variable}], r"Param found at paths \[0\], \[1\]\.a"),
        ([holder, (holder,)], r"Dict found at paths \[0\], \[1\]\[0\]"),
        ([ref, (ref,)], r"Ref found at paths \[0\], \[1\]\[0\]"),
        (cycle, r"Dict found at paths <root>, inner\[0\]"),
        ([opaque], r"Opaque was made with pytree=False.*Found at path \[0\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            function(tree, graph=False)
        with nnx.set_graph_mode(False), pytest.raises(ValueError, match=message):
            function(tree)
        function(tree)
    for tree in (nnx.Linear(1, 1, rngs=nnx.Rngs(0)), [empty, empty, nnx.Param(1.0)]):
        function(tree, graph=False)


def test_an_optimizer_and_an_average_take_the_switch():
    tx, model, shared = optax.sgd(0.1), Net(nnx.Rngs(0)), nnx.Param(jnp.ones(2))
    for graph in (True, False, None):
        optimizer, average = nnx.Optimizer(model, tx, wrt=nnx.Param, graph=graph), nnx.EMA(model, 0.5, graph=graph)
        optimizer.update(model, nnx.state(model, nnx.Param))
        average.update(model)
        assert optimizer.step.value == 1
    for make in (lambda: nnx.Optimizer([shared] * 2, tx, graph=False), lambda: nnx.EMA([shared] * 2, 0.5, graph=False)):
        with pytest.raises(ValueError, match="shared references"):
            make()
    both = nnx.optimizer.ModelAndOptimizer(model, tx)
    both.update(nnx.state(both.model, nnx.Param))
    assert isinstance(both, nnx.Optimizer)
    assert isinstance(nnx.clone(both), nnxlib.ModelAndOptimizer)


def test_functions_of_modules_take_the_switches():
    """`nnx.graphlib.split(x, graph=True)`: as the names of the package itself, which they are."""
    assert nnx.graphlib.split is nnx.split
    assert nnx.graphlib.set_graph_mode is nnx.set_graph_mode
    assert nnx.graphlib.with_vars is nnx.with_vars
    assert isinstance(nnx.graphlib.split(nnx.Param(1), graph=False)[1], nnx.Param)
    assert nnx.statelib.State is nnx.State
    assert nnx.compat.split is nnx.split
    assert {"split", "NodeDef"} <= set(dir(nnx.graphlib))
    assert isinstance(nnx.nn.linear, type(nnx.nn))
    assert nnx.nn.linear.Linear is nnx.Linear


def test_what_variables_are_asked_to_be():
    """`var_defaults` sets it, for a block or a function, and tells it; a Variable may say otherwise."""
    assert dict(nnx.var_defaults()) == {"hijax": False, "ref": False}
    with nnx.var_defaults(ref=True) as now:
        assert (now.ref, nnx.var_defaults().hijax, len(now)) == (True, False, 2)
        v, other = nnx.Param(1), nnx.Param(1, ref=False)
        with nnx.var_defaults(hijax=True):
            assert repr(nnx.var_defaults()) == "var_defaults(hijax=True, ref=True)"
            both = nnx.Param(1)
    assert (v.ref, other.ref, both.hijax, nnx.Param(1).ref, nnx.Param(1).hijax) == (True, False, True, False, False)
    assert [isinstance(x, nnx.variablelib.HijaxVariable) for x in (v, both)] == [False, True]
    assert nnx.var_defaults(ref=True)(lambda: nnx.Param(1).ref)()
    assert not nnx.var_defaults().ref
    with nnx.var_defaults(ref=False):
        nnx.var_defaults(ref=True)
        assert nnx.Param(1).ref
    assert not nnx.Param(1).ref
    assert isinstance(nnx.var_defaults(), nnx.variablelib.VarDefaults)


def test_variables_are_copied_to_what_they_are_asked_to_be():
    """Those that the filter takes and that are otherwise; the rest are the same ones, in new nodes."""
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    made = nnx.with_vars(model, ref=True, only=nnx.Param)
    assert (made.scale.ref, made.mean is model.mean, made is model, model.scale.ref) == (True, True, False, False)
    assert nnx.with_vars(made, ref=True, only=nnx.Param).scale is made.scale
    state = nnx.with_vars(nnx.state(made), ref=False)
    assert (state.scale.ref, type(state), made.scale.ref) == (False, nnx.State, True)
    assert nnx.with_vars(nnx.Param(1), hijax=True).hijax
    shared = nnx.Param(1)
    with pytest.raises(ValueError, match=r"Found duplicate at paths \[0\], \[1\]"):
        nnx.with_vars([shared, shared], ref=True)
    a, b = nnx.with_vars([shared, shared], ref=True, allow_duplicates=True)
    assert a is b is not shared
    with pytest.raises(TypeError, match="is_mutable"):
        nnx.with_vars(shared, is_mutable=False)


def test_training_in_refs():
    """A step under plain jax.jit that refers to model and optimizer does what one that is passed them does."""

    def trained(ref):
        with nnx.var_defaults(ref=ref):
            model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        def step(model, optimizer, x):
            graphdef, params = nnx.split(model)
            loss = lambda params: (nnx.merge(graphdef, params)(x) ** 2).mean()
            optimizer.update(model, jax.grad(loss)(nnx.with_vars(params, ref=False)))

        run = jax.jit(lambda x: step(model, optimizer, x)) if ref else nnx.jit(step)
        for _ in range(3):
            run(X) if ref else run(model, optimizer, X)
        return model, optimizer

    (model, optimizer), (expected, _) = trained(True), trained(False)
    assert jnp.allclose(model.kernel, expected.kernel)
    assert (optimizer.step.value, optimizer.opt_state[0].mu.kernel.ref, expected.kernel.ref) == (3, True, False)


def test_the_stub_declares_what_is_other_than_in_nnxlib():
    """So that type checkers and editors know each name; they take the other ones from nnxlib."""
    path = Path(nnx.__file__)
    declared, own = _defined(path.with_suffix(".pyi")), _defined(path)
    assert (own - {"M"}) | {*nnx.trees.TRANSFORMS} <= declared
    for name in declared:
        assert getattr(nnx, name) is not getattr(nnxlib, name, None)


def _defined(path):
    """The public names that a file defines itself."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return {name for name in names if not name.startswith("_")}


def test_a_switch_decorates_a_function():
    """It is set while the function runs, and nowhere else."""

    @nnx.set_graph_mode(False)
    def mode():
        return nnx.set_graph_mode.current_value()

    assert mode.__name__ == "mode"
    assert nnx.set_graph_mode.current_value()
    assert not mode()
    assert nnx.set_graph_mode.current_value()


@pytest.mark.parametrize("switch", [nnx.set_graph_mode, nnx.set_graph_updates, nnx.use_eager_sharding])
def test_switches_are_read_and_set_alike(switch):
    """For a block, for calls of a function, and from now on; each thread has its own, True at first."""
    with switch(False):
        assert not switch.current_value()
        with switch(True):
            assert switch.current_value()
        with ThreadPoolExecutor() as pool:
            assert pool.submit(switch.current_value).result()
        assert not switch.current_value()
    read = switch(False)(switch.current_value)
    assert switch.current_value()
    assert (read(), switch.current_value()) == (False, True)
    switch(False)
    assert not switch.current_value()
    switch(True)
    assert switch.current_value()


@pytest.fixture
def flags(monkeypatch):
    """Sets flags of ``flax.config``, whichever version of flax there is."""
    config = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "flax.configurations", types.SimpleNamespace(config=config))
    return lambda **values: config.__dict__.update(values)


@pytest.mark.parametrize(
    ("switch", "flag"),
    [
        (nnx.set_graph_mode, "nnx_graph_mode"),
        (nnx.set_graph_updates, "nnx_graph_updates"),
        (nnx.use_eager_sharding, "flax_always_shard_variable"),
    ],
)
def test_flags_of_flax_hold_where_no_switch_is_set(switch, flag, flags):
    def read():
        values = [switch.current_value()]
        with switch(True):
            values += [switch.current_value()]
        return [*values, switch.current_value()]

    with ThreadPoolExecutor() as pool:  # one thread that has set nothing
        assert pool.submit(read).result() == [True, True, True]
        flags(**{flag: False})
        assert pool.submit(read).result() == [False, True, False]
        flags(**{flag: True})
        assert pool.submit(read).result() == [True, True, True]


def test_a_flag_of_flax_says_whether_outside_of_a_capture_is_recorded(flags):
    class Recording(nnx.Module):
        def __call__(self, x, capture_noop=None):
            self.sow(nnx.Intermediate, "seen", x, capture_noop=capture_noop)
            return self.perturb("gradient", x, capture_noop=capture_noop)

    flags(nnx_sow_capture_noop=True)
    model = Recording()
    model(jnp.ones(2))
    assert not vars(model)
    assert set(nnx.capture(model, nnx.Intermediate)(jnp.ones(2))[1]) == {"seen"}
    model(jnp.ones(2), capture_noop=False)
    assert set(vars(model)) == {"seen", "gradient"}


def test_transforms_in_tree_mode_take_their_function_by_name_or_later():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    grads = nnx.grad(f=lambda model: model(X).sum(), graph=False)(model)
    y, pull = nnx.vjp(lambda model: model(X), graph=False)(model)
    (pulled,) = pull(jnp.ones_like(y))
    assert type(grads) is type(pulled) is nnx.Linear
    assert (grads.kernel.value == pulled.kernel.value).all()
    _, tangent = nnx.jvp(lambda model: model(X), graph=False)((model,), (jax.tree.map(jnp.ones_like, model),))
    assert (tangent == 3).all()
