import copy
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from benchmarks.timing import count_calls
from nnxlib.core.errors import EmptySelectionError, StateMismatchError
from nnxlib.core.tables import table_of
from nnxlib.core.walk import Walk

optax = pytest.importorskip("optax")

X = jnp.arange(6.0).reshape(3, 2)


class Layer(nnx.Module):
    def __init__(self, seed=0):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(seed), (2, 4)), layer="dense")
        self.bias = nnx.Param(jnp.zeros(4))
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls.value += 1
        return x @ self.kernel + self.bias


class Adapter(nnx.Param):
    """A parameter of another type."""


class Net(nnx.Module):
    def __init__(self):
        self.layers = [Layer(0), Layer(1)]
        self.tied = self.layers[0].kernel
        self.adapter = Adapter(jnp.ones(4))

    def __call__(self, x):
        return (self.layers[0](x) + self.layers[1](x)) * self.adapter


def loss(model):
    return jnp.mean(model(X) ** 2)


def gradients(model):
    return nnx.grad(loss)(model)


def values(node):
    return {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(node))}


def parameters(model):
    return {path: value for path, value in values(model).items() if path[-1] != "calls"}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[path], b[path]) for path in a)


def constant(state, change=lambda grads, state, params: (grads, state)):
    """A transformation with the given state."""
    return optax.GradientTransformation(lambda params: state, change)


@nnx.jit
def train_step(model, optimizer):
    optimizer.update(model, gradients(model))


# --- the state ------------------------------------------------------------------------------------------------------


def test_the_state_of_a_parameter_has_its_path_and_metadata():
    """Moments are OptVariables below the path of their parameter, with its metadata; counts are OptArrays."""
    optimizer = nnx.Optimizer(Net(), optax.adam(0.1))
    moment = optimizer.opt_state[0].mu["layers"][0]["kernel"]
    assert (type(moment), moment.layer, moment.shape) == (nnx.OptVariable, "dense", (2, 4))
    assert type(optimizer.opt_state[0].count) is nnx.OptArray
    found = dict(nnx.to_flat_state(nnx.state(optimizer, nnx.optimizer.OptState)))
    assert type(found["step",]) is nnx.OptState
    assert ("opt_state", 0, "nu", "layers", 0, "kernel") in found
    assert ("opt_state", 0, "nu", "tied") not in found


def test_hooks_on_values_stay_with_the_parameter():
    """A moment takes over hooks on axes, and none on values."""
    on_get, on_add = (lambda v, value: value * 0), (lambda v, index, name: None)
    model = nnx.Dict(w=nnx.Param(jnp.ones(2), on_get_value=on_get, on_add_axis=on_add))
    moment = nnx.Optimizer(model, optax.adam(0.1)).opt_state[0].mu.w
    assert moment.get_metadata() == {"on_add_axis": on_add}


def test_any_pytree_can_be_a_state():
    """Named tuples, dicts, lists, States, None and foreign pytrees come to the transformation as it made them."""
    made = {
        "d": [jnp.ones(2), (jnp.zeros(()), None)], "s": nnx.State({"a": jnp.ones(1)}),
        "x": jax.tree_util.Partial(max, jnp.ones(3)), "e": optax.EmptyState(), "n": 2,
    }  # fmt: skip
    seen = []
    model = Net()
    optimizer = nnx.Optimizer(model, constant(made, lambda g, s, p: (seen.append(jax.tree.structure(s)), (g, s))[1]))
    optimizer.update(model, gradients(model))
    train_step(model, optimizer)
    assert seen == [jax.tree.structure(made)] * 2
    assert type(optimizer.opt_state["d"][0]) is nnx.OptArray


def test_the_layout_of_an_optimizer_is_kept():
    """Nothing in it can change unseen, so that a jitted call does not walk it again."""
    for tx in optax.adam(0.1), optax.inject_hyperparams(optax.adam)(0.1), optax.named_chain(("a", optax.adam(0.1))):
        optimizer = nnx.Optimizer(Net(), tx, wrt=[Adapter, nnx.PathContains("kernel")])
        assert table_of(optimizer).reliable


def test_training_compiles_once():
    """A second step finds the program of the first."""
    traces = []

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        optimizer.update(model, gradients(model))

    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(0.1))
    for _ in range(5):
        step(model, optimizer)
    assert len(traces) == 1
    assert optimizer.step.value == 5
    assert optimizer.step.dtype == jnp.uint32


def test_a_hyperparameter_can_be_set():
    """By its value, or by assignment in its place."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    train_step(model, optimizer)
    optimizer.opt_state.hyperparams["learning_rate"].value = jnp.asarray(0.0)
    before = parameters(model)
    train_step(model, optimizer)
    assert same(parameters(model), before)
    optimizer.opt_state.hyperparams["learning_rate"] = jnp.asarray(0.5)
    train_step(model, optimizer)
    assert not same(parameters(model), before)
    assert type(optimizer.opt_state.hyperparams["learning_rate"]) is nnx.OptArray


def test_a_state_set_by_hand_is_put_into_variables():
    """What ``tx.init`` returns can be assigned; the next update has it in Variables."""
    model, reference = Net(), Net()
    optimizer, other = nnx.Optimizer(model, optax.adam(0.1)), nnx.Optimizer(reference, optax.adam(0.1))
    optimizer.update(model, gradients(Net()))
    optimizer.opt_state = optimizer.tx.init(nnx.state(model, nnx.Param))
    nnx.update(model, nnx.state(reference))
    for optimizer_, model_ in (optimizer, model), (other, reference):
        optimizer_.update(model_, gradients(model_))
    assert same(values(model), values(reference))
    assert type(optimizer.opt_state[0].mu.adapter) is nnx.OptVariable


def test_an_optimizer_can_be_copied():
    """clone, deepcopy, and split and merge give optimizers that go on alike, with Variables of their own."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(0.1))
    optimizer.update(model, gradients(model))
    copies = [nnx.clone(optimizer), copy.deepcopy(optimizer), nnx.merge(*nnx.split(optimizer))]
    expected = nnx.clone(model)
    optimizer.update(expected, gradients(expected))
    for copied in copies:
        went_on = nnx.clone(model)
        copied.update(went_on, gradients(went_on))
        assert same(values(went_on), values(expected))


# --- what is trained ------------------------------------------------------------------------------------------------


def test_one_filter_serves_grad_and_optimizer():
    """With DiffState and wrt of one filter, what it takes is trained and nothing else."""
    only = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("bias")))
    model = Net()
    before = values(model)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=only)
    optimizer.update(model, nnx.grad(loss, argnums=nnx.DiffState(0, only))(model))
    changed = {path for path, value in values(model).items() if not np.array_equal(value, before[path])}
    calls = {("layers", i, "calls") for i in range(2)}
    assert changed == {("adapter",), ("layers", 0, "kernel"), ("layers", 1, "kernel")} | calls


def test_a_list_of_filters_is_any_of_them():
    """In the optimizer as in what is differentiated."""
    model, only = Net(), [nnx.PathContains("bias"), nnx.PathContains("adapter")]
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=only)
    before = values(model)
    grads = nnx.grad(loss, argnums=nnx.DiffState(0, only))(model)
    nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads) and None)(model, optimizer, grads)
    changed = {path[-1] for path, value in values(model).items() if not np.array_equal(value, before[path])}
    assert changed == {"adapter", "bias", "calls"}


def test_gradients_of_more_than_is_trained_are_left_out():
    """With wrt=Adapter, gradients of all Params are welcome; also as ``grad`` among the further arguments."""
    seen = []

    def change(grads, state, params, grad, value):
        seen.append((grads, grad, value))
        return grads, state

    model = Net()
    optimizer = nnx.Optimizer(model, optax.GradientTransformationExtraArgs(lambda params: (), change), wrt=Adapter)
    grads = gradients(model)
    updates = optimizer.update(model, grads, grad=grads, value=nnx.Param(3.0))
    assert list(updates) == ["adapter"]
    grads, grad, value = seen[0]
    assert grads is grad
    assert value == 3.0


@pytest.mark.parametrize("wrt", [nnx.Cache, nnx.PathContains("nowhere"), lambda path, v: False])
def test_a_filter_that_selects_nothing_is_an_error(wrt):
    """The message names the filter and the types of Variable that there are."""
    with pytest.raises(EmptySelectionError, match=r"nothing in this Net.*Adapter \(1\), BatchStat \(2\), Param \(4\)"):
        nnx.Optimizer(Net(), optax.adam(0.1), wrt=wrt)


def test_a_filter_of_a_class_that_has_been_defined_again_is_an_error():
    """As in a notebook: the model has Variables of the class that an earlier run of the cell defined."""
    old, new = (type("Adapter", (nnx.Param,), {"__slots__": ()}) for _ in range(2))
    with pytest.raises(EmptySelectionError, match="Its Adapter is of an earlier definition of this class"):
        nnx.Optimizer(nnx.Dict(w=old(jnp.ones(2))), optax.adam(0.1), wrt=new)


def test_the_error_of_a_transformation_is_its_own():
    """Whatever `init` or another `update` would raise, which the optimizer tries to find the reason."""

    def update(grads, state, params):
        raise TypeError("own") if isinstance(params["adapter"], jax.Array) else KeyError("of the second try")

    def init(params):
        assert not isinstance(jax.tree.leaves(params)[0], jax.core.Tracer)

    model = Net()
    optimizer = nnx.Optimizer(model, optax.GradientTransformation(init, update))
    with pytest.raises(TypeError, match="own"):
        optimizer.update(model, gradients(model))


def test_a_model_without_variables_is_an_error():
    """The message says that there is no Variable at all."""
    with pytest.raises(EmptySelectionError, match="no Variable at all"):
        nnx.Optimizer(nnx.Dict(), optax.adam(0.1))


def test_what_is_no_transformation_is_an_error():
    """Such as a function that was not called."""
    with pytest.raises(TypeError, match=r"tx has to be a transformation.*such as optax.adam\(1e-3\)"):
        nnx.Optimizer(Net(), optax.adam)
    with pytest.raises(TypeError, match="a transformation with `init` and `update`"):
        nnx.Optimizer(Net(), types.SimpleNamespace(init=optax.adam(1e-3).init))


def test_a_bare_variable_or_a_class_is_an_error():
    """The message says what to write."""
    with pytest.raises(TypeError, match=r"got a Param by itself.*nnx.Dict"):
        nnx.Optimizer(nnx.Param(jnp.ones(2)), optax.adam(0.1))
    with pytest.raises(TypeError, match="trains a model, got the class Net; make one of it"):
        nnx.Optimizer(Net, optax.adam(0.1))


@pytest.mark.parametrize("form", ["tuple", "dict", "state"])
def test_a_pytree_of_modules_is_trained(form):
    """Several Modules in a tuple or dict, and the Variables of a State, as a Module with them would be."""
    a, b, reference = Layer(0), Layer(1), nnx.List([Layer(0), Layer(1)])
    model = {"tuple": (a, b), "dict": {"a": a, "b": b}, "state": nnx.State({"a": a.kernel, "b": b.kernel})}[form]
    names = [0, 1] if form == "tuple" else ["a", "b"]

    def total(first, second):
        return jnp.sum((X @ first.kernel) ** 2) + jnp.sum((X @ second.kernel) ** 3)

    grads = nnx.grad(lambda pair: total(*pair))(reference)
    ours = {name: grads[i] if form != "state" else grads[i].kernel for i, name in enumerate(names)}
    optimizer = nnx.Optimizer(model, optax.adam(0.1))
    optimizer.update(model, tuple(ours.values()) if form == "tuple" else ours)
    nnx.Optimizer(reference, optax.adam(0.1)).update(reference, grads)
    for layer, expected in zip((a, b), reference):
        np.testing.assert_array_equal(layer.kernel.value, expected.kernel.value)


@pytest.mark.parametrize("wrap", [
    nnx.to_pure_dict, nnx.to_flat_state, nnx.pure, lambda state: nnx.merge_state(state, cls=dict),
])  # fmt: skip
def test_gradients_in_any_form(wrap):
    """A State, its values, nested dicts, or a FlatState."""
    model, expected = Net(), Net()
    grads = gradients(model)
    nnx.Optimizer(model, optax.sgd(0.1)).update(model, wrap(grads))
    nnx.Optimizer(expected, optax.sgd(0.1)).update(expected, grads)
    assert same(parameters(model), parameters(expected))


def test_gradients_in_a_module():
    """What plain ``jax.grad`` gives for a Module, also with tied weights."""
    model, expected = Net(), Net()
    nnx.Optimizer(expected, optax.sgd(0.1)).update(expected, gradients(Net()))
    grads = jax.grad(lambda model: jnp.mean(nnx.clone(model)(X) ** 2))(Net())
    nnx.Optimizer(model, optax.sgd(0.1)).update(model, grads)
    assert same(values(model), values(expected))


def test_values_and_arrays_of_any_kind():
    """Variables that hold pytrees, and arrays outside of Variables, are trained; dtypes stay."""

    class Odd(nnx.Module):
        def __init__(self):
            self.pair = nnx.Param({"a": jnp.ones(2, jnp.bfloat16), "b": (jnp.ones(3),)})
            self.array = jnp.ones(4)

    model = Odd()
    grads = nnx.grad(lambda m: m.pair["a"].sum() + m.array.sum(), argnums=nnx.DiffState(0, ...))(model)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5, momentum=0.5), wrt=...)
    optimizer.update(model, grads)
    assert model.pair["a"].dtype == jnp.bfloat16
    assert model.pair["a"].tolist() == [0.5, 0.5]
    assert model.pair["b"][0].tolist() == [1, 1, 1]
    assert model.array.tolist() == [0.5] * 4


# --- gradients that do not fit --------------------------------------------------------------------------------------


def missing(grads):
    return grads.filter(nnx.Not(nnx.PathContains("bias")))


def unexpected(grads):
    return nnx.merge_state(grads, {"head": {"bias": jnp.ones(2)}})


def wrong_shape(grads):
    return nnx.merge_state(grads, {"adapter": jnp.ones((3, 4))})


def test_a_parameter_that_holds_the_state_of_another_model():
    class Shifted(nnx.Module):  # the base is fixed; what is added to all of its parameters is one Param
        def __init__(self, base):
            self.base, params = nnx.split(base)
            self.shift = nnx.Param(jax.tree.map(jnp.ones_like, params))

        def __call__(self, x):
            return nnx.merge(self.base, self.shift.get_value())(x)

    model, alone = Shifted(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    nnx.update(alone, model.shift.get_value())
    for trained in (model, alone):
        optimizer = nnx.Optimizer(trained, optax.adam(0.1), wrt=nnx.Param)
        for step in (optimizer.update, nnx.jit(optimizer.update)) * 2:
            step(trained, nnx.grad(lambda model: jnp.sum(model(X) ** 2))(trained))
    assert type(model.shift.get_value()["kernel"]) is nnx.Param
    np.testing.assert_allclose(model.shift.get_value()["kernel"], alone.kernel, rtol=1e-6)
    np.testing.assert_allclose(model.shift.get_value()["bias"], alone.bias, rtol=1e-6)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (missing, r"wrt=Param\); nothing was changed.\n  layers\[0\].bias: missing, .*float32\[4\]\)\n  layers\[1\]"),
        (unexpected, r"head.bias: unexpected float32\[2\]"),
        (wrong_shape, r"adapter: expected shape \(4,\), got \(3, 4\)\nPass what nnx\.grad returns"),
        (lambda grads: None, r"adapter: missing"),
    ],
)  # fmt: skip
def test_gradients_that_do_not_fit(spoil, message):
    """Missing, unexpected and wrongly shaped gradients are named, and nothing is changed."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(0.1))
    grads, before = gradients(model), values((model, optimizer))
    with pytest.raises(StateMismatchError, match=message):
        optimizer.update(model, spoil(grads))
    assert same(values((model, optimizer)), before)


def test_gradients_without_the_model():
    """The signature of long ago is explained."""
    optimizer = nnx.Optimizer(Net(), optax.adam(0.1))
    for call in (lambda: optimizer.update(gradients(Net())), lambda: optimizer.update(grads=gradients(Net()))):
        with pytest.raises(TypeError, match=r"nnx\.ModelAndOptimizer"):
            call()
    with pytest.raises(AttributeError, match=r"passed the one to change.* nnx\.ModelAndOptimizer"):
        optimizer.model
    with pytest.raises(AttributeError, match=r"'Optimizer' object has no attribute 'models'"):
        optimizer.models


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda f, m: nnx.value_and_grad(f)(m), r"got a tuple \(float32\[\], State\).* Unpack it: loss, grads = "),
        (lambda f, m: nnx.grad(f), r"got the function sum_of\. Call it: grads = nnx\.grad\(loss_fn\)\(model\)"),
        (lambda f, m: nnx.grad(f, argnums=(0,))(m), r"\[0\]\.bias: unexpected float32\[3\]"),
        (lambda f, m: m.bias, r"<root>: unexpected float32\[3\]"),
    ],
)
def test_what_is_not_yet_a_gradient(given, message):
    """A loss with gradients, a function that would compute them, a tuple of one, a Variable by itself."""

    def sum_of(model):
        return model(jnp.ones((1, 2))).sum()

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(StateMismatchError, match=message):
        nnx.Optimizer(model, optax.sgd(0.1)).update(model, given(sum_of, model))


def test_a_parameter_that_became_an_array():
    """The message names the attribute, and is not preceded by the error of optax."""
    model = nnx.Dict(layer=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.adam(0.1))
    model.layer.kernel = jnp.ones((2, 3))
    grads = nnx.grad(lambda model: model.layer(jnp.ones((1, 2))).sum())(model)
    with pytest.raises(
        StateMismatchError, match=r"layer\.kernel is a plain array now, .*model\.layer\.kernel\.v"
    ) as error:
        optimizer.update(model, grads)
    assert error.value.__suppress_context__


def test_the_note_on_line_searches_is_for_these():
    """It is added where an argument is missing, and not where something else is wrong."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    with pytest.raises(TypeError, match="missing 3 required keyword-only") as error:
        nnx.Optimizer(model, optax.lbfgs()).update(model, grads)
    assert "value_fn=loss_of" in error.value.__notes__[0]
    with pytest.raises(TypeError) as error:
        nnx.Optimizer(model, optax.sgd("0.1")).update(model, grads)
    assert not any("value_fn" in note for note in getattr(error.value, "__notes__", ()))


def test_a_transformation_whose_updates_have_other_shapes():
    """It is refused with the paths, and nothing is changed."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    widen = lambda u: jnp.stack([u, u]) if u.ndim == 1 else u
    tx = optax.stateless(lambda updates, params: jax.tree.map(widen, updates))
    optimizer, before = nnx.Optimizer(model, tx), nnx.state(model)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    match = r"bias: expected float32\[3\], got float32\[2, 3\]\n.*of its shape"
    with pytest.raises(StateMismatchError, match=match):
        optimizer.update(model, grads)
    assert nnx.state(model) == before
    assert optimizer.step.value == 0


def test_a_transformation_that_changes_the_structure_of_its_state():
    """It is refused before anything is written."""
    model = Net()
    optimizer = nnx.Optimizer(model, constant({"n": None}, lambda g, s, p: (g, {"n": jnp.ones(3)})))
    grads, before = gradients(model), values((model, optimizer))
    with pytest.raises(StateMismatchError, match="state of another structure"):
        optimizer.update(model, grads)
    assert same(values((model, optimizer)), before)


@pytest.mark.parametrize("closed_over", ["both", "model", "optimizer"])
def test_a_refused_update_writes_nothing(closed_over):
    """Closed over by a foreign trace, the model or the optimizer refuse, and neither is changed."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(0.1))
    grads = gradients(model)
    before = values((model, optimizer))

    def update(x):
        inside = nnx.clone(model), nnx.clone(optimizer)
        held = jax.tree.leaves(inside)
        optimizer_ = optimizer if closed_over in ("both", "optimizer") else inside[1]
        with pytest.raises(nnx.TraceContextError):
            optimizer_.update(model if closed_over in ("both", "model") else inside[0], grads)
        assert all(a is b for a, b in zip(jax.tree.leaves(inside), held, strict=True))
        return x

    jax.jit(update)(1.0)
    assert same(values((model, optimizer)), before)


# --- transforms -----------------------------------------------------------------------------------------------------


def trained(step, tx=None, steps=3):
    model = Net()
    optimizer = nnx.Optimizer(model, tx or optax.adam(0.1))
    for _ in range(steps):
        step(model, optimizer)
    return values((model, optimizer))


def slow_weights(params):
    """A state that holds the parameters themselves, twice."""
    return {"slow": params, "slower": params}


ALIASING = optax.GradientTransformation(
    slow_weights, lambda g, s, p: (jax.tree.map(lambda x: -0.1 * x, g), {"slow": p, "slower": s["slow"]})
)


@pytest.mark.parametrize("tx", [optax.adam(0.1), ALIASING], ids=["adam", "aliasing"])
def test_donation(tx):
    """Model and optimizer can be donated, also when their values were the same buffers."""
    donating = nnx.jit(lambda m, o: o.update(m, gradients(m)) and None, donate_argnums=(0, 1))
    found, expected = trained(donating, tx), trained(lambda m, o: o.update(m, gradients(m)), tx)
    for path in expected:
        np.testing.assert_allclose(found[path], expected[path], rtol=1e-5, atol=1e-6)

    model = Net()
    optimizer = nnx.Optimizer(model, tx)
    for _ in range(2):  # eager updates between the donations
        donating(model, optimizer)
        optimizer.update(model, gradients(model))
    assert optimizer.step.value == 4


def test_eval_shape_makes_an_optimizer_without_computing():
    """Under nnx.eval_shape the Variables have shapes, and an update changes no live object."""
    abstract = nnx.eval_shape(lambda: nnx.Optimizer(Net(), optax.adam(0.1)))
    assert abstract.opt_state[0].mu.adapter.value == jax.ShapeDtypeStruct((4,), jnp.float32)
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(0.1))
    before = values((model, optimizer))
    updates = nnx.eval_shape(lambda m, o: o.update(m, gradients(m)), model, optimizer)
    assert updates["adapter"].shape == (4,)
    assert same(values((model, optimizer)), before)


def test_an_optimizer_is_a_pytree_of_plain_jax():
    """Through ``jax.jit`` it comes back with the same structure and the next state."""

    @jax.jit
    def step(model, optimizer):
        optimizer.update(model, gradients(model))
        return model, optimizer

    model = Net()
    start = model, nnx.Optimizer(model, optax.adam(0.1))
    model, optimizer = step(*step(*start))
    assert (start[1].step.value, optimizer.step.value) == (0, 2)
    expected = trained(train_step, steps=2)
    for path, value in values((model, optimizer)).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-6)


def test_an_ensemble_made_and_trained_under_vmap():
    """A vmapped constructor makes one optimizer of stacked states; each member trains as it would alone."""

    @nnx.vmap
    def make(key):
        model = nnx.Dict(w=nnx.Param(jax.random.normal(key, (2,))))
        return model, nnx.Optimizer(model, optax.adam(0.1))

    @nnx.vmap
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m.w**4))(model))

    keys = jax.random.split(jax.random.key(0), 3)
    model, optimizer = make(keys)
    for _ in range(3):
        step(model, optimizer)
    assert optimizer.step.value.tolist() == [3, 3, 3]
    for i, key in enumerate(keys):
        alone = nnx.Dict(w=nnx.Param(jax.random.normal(key, (2,))))
        alone_optimizer = nnx.Optimizer(alone, optax.adam(0.1))
        for _ in range(3):
            alone_optimizer.update(alone, nnx.grad(lambda m: jnp.sum(m.w**4))(alone))
        np.testing.assert_allclose(model.w[i], alone.w.value, rtol=1e-5)


def test_training_in_a_scan():
    """A whole epoch in one nnx.scan, with model and optimizer carried."""

    @nnx.scan(in_axes=(nnx.StateAxes({...: nnx.Carry}), 0), out_axes=0)
    def epoch(both, x):
        model, optimizer = both
        value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x[None]) ** 2))(model)
        optimizer.update(model, grads)
        return value

    model, reference = Net(), Net()
    optimizer, other = nnx.Optimizer(model, optax.adam(0.01)), nnx.Optimizer(reference, optax.adam(0.01))
    epoch((model, optimizer), X)
    for x in X:
        other.update(reference, nnx.grad(lambda m, x=x: jnp.mean(m(x[None]) ** 2))(reference))
    assert optimizer.step.value == 3
    for path, value in values(model).items():
        np.testing.assert_allclose(value, values(reference)[path], rtol=1e-5)


# --- ModelAndOptimizer ----------------------------------------------------------------------------------------------


def test_model_and_optimizer_keeps_its_model():
    """It trains the very model it was given, and goes through jit as one object."""
    model, expected = Net(), trained(train_step, steps=2)
    optimizer = nnx.ModelAndOptimizer(model, optax.adam(0.1))
    step = nnx.jit(lambda optimizer: optimizer.update(gradients(optimizer.model)) and None)
    for _ in range(2):
        step(optimizer)
    assert optimizer.model is model
    for path, value in values((model, None)).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-6)


def test_gradients_and_model_in_the_wrong_order():
    """The gradients would be taken for a model, and trained."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
    with pytest.raises(TypeError, match=r"update\(model, grads\), but got a State and then the model, Linear"):
        optimizer.update(grads, model)
    assert optimizer.step[...] == 0


def test_swapped_arguments_are_refused_in_a_line():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"got Linear. Write nnx.Optimizer\(model, tx, wrt=nnx.Param\)") as caught:
        nnx.Optimizer(optax.sgd(0.1), model)
    assert len(str(caught.value)) < 200


def test_optimizers_with_a_learning_rate_each():
    """A sweep: the rate is made of a number, and is then a value in the state of the optimizer."""

    def start(rate):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        optimizer.opt_state.hyperparams["learning_rate"].value = rate
        return model, optimizer

    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model))

    models, optimizers = nnx.vmap(start)(jnp.array([0.0, 0.1, 1.0]))
    nnx.jit(nnx.vmap(step))(models, optimizers)
    assert jnp.allclose(models.bias[:, 0], jnp.array([0.0, -0.1, -1.0]))


def test_optimizers_made_of_traced_learning_rates():
    """The rate is in the state; the function that has put it there ends with the trace, and the other one goes on."""

    def start(rate):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.inject_hyperparams(optax.sgd)(learning_rate=rate), wrt=nnx.Param)

    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model))

    models, optimizers = nnx.vmap(start)(jnp.array([0.0, 0.1, 1.0]))
    nnx.jit(nnx.vmap(step))(models, optimizers)
    assert jnp.allclose(models.bias[:, 0], jnp.array([0.0, -0.1, -1.0]))
    assert isinstance(optimizers.tx, optax.GradientTransformation)
    with pytest.raises(nnx.errors.TraceContextError, match=r"init_fn at <output>\[1\].tx refers to"):
        optimizers.tx.init(nnx.state(models, nnx.Param))


def test_a_learning_rate_that_ends_with_its_trace_is_told_where_to_keep_it():
    """If it is a part of the program, the first update says so."""

    def start(rate):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)

    model, optimizer = nnx.jit(start)(0.1)
    grads = nnx.state(model, nnx.Param)
    with pytest.raises(nnx.errors.TraceContextError, match=r"at <output>\[1\].tx .*(\n.*)*optax.inject_hyperparams"):
        optimizer.update(model, grads)
    assert optimizer.step[...] == 0


def test_an_eager_update_calls_less_than_optax_does_for_dicts(unchecked):
    """To add the updates takes fewer functions than :func:`optax.apply_updates`, which makes up for the rest."""
    model = nnx.List([Layer() for _ in range(20)])
    tx, params = optax.sgd(0.1), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer, grads, opt_state = nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.state(model, nnx.Param), tx.init(params)

    def by_hand():
        return optax.apply_updates(params, tx.update(params, opt_state, params)[0])

    for _ in range(3):
        optimizer.update(model, grads), by_hand()
    assert count_calls(lambda: optimizer.update(model, grads)) < count_calls(by_hand)


def test_an_update_in_a_trace_walks_nothing(monkeypatch, unchecked):
    """The trace has just built the model and the optimizer, and a table of them is not compared with them so soon."""
    entered, enter = [], Walk._enter
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer, grads):
        with monkeypatch.context() as within:
            within.setattr(Walk, "_enter", lambda self, *place: (entered.append(place), enter(self, *place))[1])
            optimizer.update(model, grads)

    step(model, optimizer, grads)
    assert not entered


def test_what_masked_moments_cost_does_not_depend_on_their_number(unchecked):
    counts = []
    for size in (3, 30):
        model = nnx.Sequential(*[nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(size)])
        bias = functools.partial(jax.tree.map, lambda p: p.ndim == 1)
        optimizer = nnx.Optimizer(model, optax.masked(optax.adam(0.1), bias), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            optimizer.update(model, nnx.grad(lambda model: model(jnp.ones(2)).sum())(model))

        call = functools.partial(step, model, optimizer)
        for _ in range(3):
            call()
        counts.append(min(count_calls(call) for _ in range(3)))
        assert optimizer.opt_state.inner_state[0].mu["layers"][1]["kernel"].value == optax.MaskedNode()
    assert counts[0] == counts[1] < 40
