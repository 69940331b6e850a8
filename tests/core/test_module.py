"""Module: training and evaluation, recording, submodules, views."""

import copy
import warnings

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx
from nnxlib.core.errors import UsageError


class Drop(nnx.Module):
    """Something with a mode: as a Dropout has."""

    def __init__(self, deterministic=False, rate=0.5):
        self.deterministic = deterministic
        self.rate = rate

    def set_view(self, deterministic: bool | None = None, rate: float | None = None):
        """Settings of a view."""
        if deterministic is not None:
            self.deterministic = deterministic
        if rate is not None:
            self.rate = rate


class Norm(nnx.Module):
    def __init__(self, use_running_average=False):
        self.mean = nnx.BatchStat(jnp.zeros(2))
        self.use_running_average = use_running_average

    def set_view(self, use_running_average: bool | None = None, **kwargs):
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def __call__(self, x):
        return x - self.mean if self.use_running_average else x


class Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.drop = Drop()
        self.blocks = [nnx.Dict(norm=Norm()), Norm(use_running_average=True)]


def modes(m):
    return m.drop.deterministic, m.blocks[0].norm.use_running_average, m.blocks[1].use_running_average


# --- training and evaluation ---


def test_eval_and_train_switch_every_module_below():
    """eval makes all deterministic; train gives each the user's own setting back."""
    m = Net()
    m.eval()
    assert modes(m) == (True, True, True)
    m.train()
    assert modes(m) == (False, False, True)


def test_a_frozen_module_stays_frozen():
    """A BatchNorm that the user froze, before or between switches, is not thawed by train()."""
    m = Net()
    m.train()
    assert m.blocks[1].use_running_average is True
    m.blocks[0].norm.use_running_average = True
    m.eval()
    m.train()
    assert modes(m) == (False, True, True)


def test_a_mode_that_a_class_sets_itself_is_switched():
    """Nobody asked for it, if no constructor takes it. A subclass that passes it to its base has asked."""

    class Policy(nnx.Module):
        def __init__(self):
            self.deterministic = True  # which train and eval switch
            self.use_running_average = True

    class Frozen(Norm):
        def __init__(self):
            super().__init__(use_running_average=True)

    policy, frozen = Policy(), Frozen()
    model = nnx.List([policy, frozen])
    modes = []
    for switch in (model.train, model.eval, model.train):
        switch()
        modes.append((policy.deterministic, policy.use_running_average, frozen.use_running_average))
    assert modes == [(False, False, True), (True, True, True), (False, False, True)]


def test_dropout_that_train_leaves_off_is_warned_of():
    """In flax.nnx it would be on. Frozen statistics, some dropout off, and a mode that is given are no mistakes."""
    made = lambda: nnx.Sequential(Drop(deterministic=True), Norm(use_running_average=True))
    remedy = r"train\(\), all dropout in Sequential is still off: .*set_attributes\(deterministic=False\)"
    with pytest.warns(UserWarning, match=remedy) as caught:
        made().train()
    assert [warning.filename for warning in caught] == [__file__]
    made().train(deterministic=True)
    nnx.List([Norm(use_running_average=True)]).train()
    nnx.Linear(2, 3, rngs=nnx.Rngs(0)).train()
    nnx.Sequential(made(), Drop(deterministic=False)).train()


def test_a_setting_made_during_evaluation_is_the_users_own():
    """What the user sets after eval() is no longer undone by train()."""
    m = Net()
    m.eval()
    m.drop.deterministic = False
    m.blocks[0].norm.use_running_average = True
    m.train()
    assert modes(m) == (False, True, True)


def test_such_a_setting_is_seen_by_a_compiled_function_also_if_it_is_no_other_value():
    """What was compiled for a model whose old setting is to be restored is not run for one without."""
    train = nnx.jit(lambda m: m.train())
    m = Net()
    m.eval()
    train(m)
    assert modes(m) == (False, False, True)
    m.eval()
    nnx.state(m)  # by which its structure is known
    m.drop.deterministic = m.drop.deterministic
    with pytest.warns(UserWarning, match="is still off"):
        train(m)
    assert modes(m) == (True, False, True)


def test_eval_twice_remembers_the_first():
    """eval(); eval(); train() restores what was there before the first."""
    m = Net()
    m.drop.deterministic = None
    m.eval()
    m.eval()
    m.train()
    assert m.drop.deterministic is False


def test_a_mode_that_was_never_set():
    """None means: as the call says; train() makes it False and eval() True."""
    m = Drop(deterministic=None)
    m.train()
    assert m.deterministic is False
    m = Drop(deterministic=None)
    m.eval()
    assert m.deterministic is True


class Propagates(nnx.Module):
    """A Module whose mode is a property, which sets that of another object as well."""

    def __init__(self, deterministic=False):
        self.own, self.calls = deterministic, 0

    @property
    def deterministic(self):
        return self.own

    @deterministic.setter
    def deterministic(self, value):
        self.own, self.calls = value, self.calls + 1


class OfClass(nnx.Module):
    deterministic = False
    use_running_average: bool | None = None
    rate = 0.5


class Slotted(nnx.Module):
    __slots__ = ("deterministic",)


class ReadOnly(nnx.Module):
    def __init__(self):
        self.drop = Drop(deterministic=False)

    @property
    def deterministic(self):
        return self.drop.deterministic

    def use_running_average(self):
        return False


def test_a_mode_that_is_a_default_of_the_class_is_switched():
    """As in flax.nnx, which asks ``hasattr``. It stayed in training, and nothing said so."""
    m, other = OfClass(), OfClass()
    m.eval()
    assert (m.deterministic, m.use_running_average, other.deterministic) == (True, True, False)
    m.train()
    assert (m.deterministic, m.use_running_average, OfClass.use_running_average) == (False, False, None)
    m.set_attributes(rate=0.1)
    assert (m.rate, OfClass.rate, nnx.with_attributes(m, rate=0.2).rate) == (0.1, 0.5, 0.2)


@pytest.mark.parametrize("copier", [lambda m: m, copy.deepcopy, nnx.clone, lambda m: nnx.merge(*nnx.split(m))])
@pytest.mark.parametrize("own", [False, True])
def test_a_mode_that_is_a_property_is_switched_by_its_setter(own, copier):
    model = nnx.List([Propagates(own), Drop(deterministic=False)])
    model.eval()
    model = copier(model)
    assert model[0].own is True
    model.train()
    assert (model[0].own, model[0].calls) == (own, 0 if own else 2)
    nnx.jit(lambda model: model.eval())(model)
    assert model[0].own is True
    model.set_attributes(Propagates, deterministic=own)
    assert model[0].own is own


def test_methods_and_properties_without_a_setter_are_no_settings():
    """Nor is a slot that holds nothing."""
    m = nnx.List([ReadOnly(), Slotted()])
    m.eval()
    assert (m[0].deterministic, m[0].use_running_average()) == (True, False)
    assert not hasattr(m[1], "deterministic")
    m.train()
    assert m[0].deterministic is False
    with pytest.raises(ValueError, match=r"deterministic.*no Module in Slotted has them"):
        Slotted().set_attributes(deterministic=True)


def test_train_and_eval_set_further_attributes():
    """Keyword arguments are set on all Modules that have them; unknown ones are ignored, as in flax, with a warning."""
    m = Net()
    with pytest.warns(UserWarning, match="'unknown'"):
        m.eval(rate=0.1, unknown=1)
    assert (m.drop.rate, m.drop.deterministic, hasattr(m, "unknown")) == (0.1, True, False)
    m.train(deterministic=True)
    assert m.drop.deterministic is True


@pytest.mark.parametrize("copier", [copy.deepcopy, nnx.clone, lambda m: nnx.merge(*nnx.split(m))])
def test_the_users_own_setting_survives_copies(copier):
    """A copy of a model in evaluation goes back to training as the original would."""
    m = Net()
    m.eval()
    c = copier(m)
    c.train()
    assert (modes(c), modes(m)) == ((False, False, True), (True, True, True))


def test_switching_back_finds_the_compiled_function():
    """Structure is compared by value: train, eval, train traces twice, not three times."""
    traces = []

    @nnx.jit
    def f(m):
        traces.append(1)
        return m.w.sum()

    m = Net()
    f(m)
    m.eval()
    f(m)
    m.train()
    f(m)
    m.eval()
    f(m)
    assert len(traces) == 2


def test_eval_inside_jit_comes_out():
    """Mode is an attribute like any other: switched inside a jitted function, it is switched outside."""
    m = Net()
    nnx.jit(lambda m: m.eval())(m)
    assert modes(m) == (True, True, True)
    nnx.jit(lambda m: m.train())(m)
    assert modes(m) == (False, False, True)


def test_eval_of_a_closed_over_model_is_refused():
    """Under a raw transform the switch is a write."""
    m = Net()
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda x: (m.eval(), x)[1])(1.0)
    assert modes(m) == (False, False, True)


# --- attributes ---


def test_set_attributes_where_they_exist():
    """Each Module that has the attribute gets it; filters choose Modules by type or path."""
    m = nnx.List([Drop(), Drop(), Norm()])
    model = nnx.Sequential(*m)
    model.set_attributes(rate=0.1)
    assert [x.rate for x in model.layers[:2]] == [0.1, 0.1]
    model.set_attributes(nnx.PathContains(0), rate=0.9, graph=True)
    assert [x.rate for x in model.layers[:2]] == [0.9, 0.1]
    model.set_attributes(Norm, use_running_average=True)
    assert model.layers[2].use_running_average is True
    assert not hasattr(model.layers[2], "rate")


def test_set_attributes_that_exist_nowhere():
    """A misspelt attribute is named, and nothing is set; raise_if_not_found=False lets it pass, and sets the others."""
    m = Net()
    before = m.drop.rate
    with pytest.raises(ValueError, match=r"attributes: \['rte'\]; no Module in Net has them\."):
        m.set_attributes(rate=0.2, rte=0.1)
    assert m.drop.rate == before != 0.2
    m.set_attributes(rte=0.1, rate=0.2, raise_if_not_found=False)
    assert m.drop.rate == 0.2
    with pytest.raises(ValueError, match=r"\['rate'\]; no Module in Net that the filters take has"):
        m.set_attributes(nnx.Linear, rate=0.1)


@pytest.mark.parametrize(
    "write",
    [
        lambda m, name: m.set_attributes(nnx.BatchNorm, **{name: True}),
        lambda m, name: nnx.with_attributes(m, only=nnx.BatchNorm, **{name: True}),
        lambda m, name: nnx.view(m, only=nnx.BatchNorm, **{name: True}),
    ],
    ids=["set_attributes", "with_attributes", "view"],
)
def test_a_setting_that_only_other_modules_have(write):
    """The error does not say that no Module has it, and does not ask whether just this name was meant."""
    m = nnx.Sequential(nnx.Dropout(0.5), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"[Nn]o Module .*that the filters take has") as refused:
        write(m, "deterministic")
    assert "Did you mean" not in str(refused.value)
    with pytest.raises(ValueError, match=r"Did you mean 'use_running_average'\?"):
        write(m, "use_running_averag")


# --- recording ---


def test_sow_appends_to_a_tuple():
    """By default a Variable of the type collects what is recorded, and pop takes it out."""
    m = Net()
    assert m.sow(nnx.Intermediate, "h", 1.0)
    assert m.sow(nnx.Intermediate, "h", 2.0)
    assert (type(m.h), m.h.value) == (nnx.Intermediate, (1.0, 2.0))
    assert nnx.pop(m, nnx.Intermediate).h.value == (1.0, 2.0)
    assert not hasattr(m, "h")


def test_sow_with_a_reduction_and_a_named_collection():
    """reduce_fn and init_fn make sums; a collection may be given by name, and is made if it is new."""
    m = Net()
    for x in (1, 2, 3):
        m.sow("test_sums", "total", x, reduce_fn=lambda a, b: a + b, init_fn=lambda: 0)
    assert (m.total.value, m.total.type) == (6, nnx.variable_type_from_name("test_sums"))


def test_sow_under_a_name_that_is_taken():
    """An attribute of another kind is not overwritten; the message names both."""
    m = Net()
    for name, kind, expected in [("w", "Param", "of type Intermediate"), ("drop", "Drop", "a Variable")]:
        with pytest.raises(ValueError, match=rf"{name!r} of \w+ to be {expected}, got {kind}"):
            m.sow(nnx.Intermediate, name, 1.0)


def test_sow_appends_to_no_array():
    """An array in the place of the tuple would come apart into its items."""
    m = Net()
    m.h = nnx.Intermediate(jnp.arange(2.0))
    with pytest.raises(TypeError, match=r"appends to a tuple, but the Variable of that name holds float32\[2\]"):
        m.sow(nnx.Intermediate, "h", jnp.ones(2))
    assert m.sow(nnx.Intermediate, "h", 1.0, reduce_fn=jnp.add)
    assert m.h.value.tolist() == [1, 2]


def test_sow_inside_jit_comes_out():
    """What is recorded in a jitted call is on the live Module afterwards."""
    m = Net()

    def f(m, x):
        m.sow(nnx.Intermediate, "h", x * 2)
        return x

    nnx.jit(f)(m, jnp.ones(2))
    assert m.h.value[0].tolist() == [2, 2]


def test_perturb_gives_the_gradient_of_an_intermediate():
    """The gradient of the Perturbation is that of the value it was added to."""
    m = Net()

    def loss(m, x):
        h = m.perturb("p", x * m.w)
        return (h**2).sum()

    x = jnp.array([1.0, 2.0])
    assert (loss(m, x).item(), type(m.p), m.p.value.tolist()) == (5, nnx.Perturbation, [0, 0])
    grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Perturbation))(m, x)
    assert grads.p.value.tolist() == [2, 4]


@pytest.mark.parametrize("value", [jnp.ones((5, 2)), jnp.ones((1, 2)), jnp.ones(2), {"a": jnp.ones((3, 2))}])
def test_a_perturbation_of_another_shape_is_refused(value):
    """The sum would have another shape than the value, or fail in jnp.add; one that broadcasts to the value may."""
    m = nnx.Module()
    m.perturb("p", jnp.ones((3, 2)))
    with pytest.raises(UsageError, match=r"'p' of Module was made for float32\[3, 2\], but the value is .*nnx.pop"):
        m.perturb("p", value)
    m.p = nnx.Perturbation(jnp.zeros((1, 2)))
    assert m.perturb("p", jnp.ones((5, 2))).shape == (5, 2)


# --- submodules ---


def test_iterating_over_modules():
    """Methods and functions agree: children before parents, each shared one once, containers included."""
    m = Net()
    m.again = m.drop
    paths = [path for path, _ in m.iter_modules()]
    assert paths == [("again",), ("blocks", 0, "norm"), ("blocks", 0), ("blocks", 1), ("blocks",), ()]
    assert [(p, x) for p, x in nnx.iter_modules(m)] == list(m.iter_modules())
    assert [key for key, _ in m.iter_children()] == ["again", "blocks", "drop", "w"]
    assert [key for key, _ in nnx.iter_module_children(m)] == ["again", "blocks", "drop"]
    assert dict(nnx.iter_module_children(m))["drop"] is m.drop


# --- views ---


def test_view_shares_variables_and_leaves_the_original():
    """A view is made of new Modules around the same Variables, with settings made by set_view."""
    m = Net()
    v = nnx.view(m, deterministic=True, use_running_average=True)
    assert (modes(v), modes(m)) == ((True, True, True), (False, False, True))
    assert v.w is m.w
    assert v.blocks[0].norm.mean is m.blocks[0].norm.mean
    assert v.blocks is not m.blocks
    v.w.value = jnp.zeros(2)
    assert m.w.value.tolist() == [0, 0]


def test_view_with_a_filter_and_unknown_settings():
    """`only` chooses Modules; a setting that no Module takes is named."""
    m = nnx.List([Drop(), Drop()])
    v = nnx.view(m, only=nnx.PathContains(1), deterministic=True)
    assert [x.deterministic for x in v] == [False, True]
    with pytest.raises(ValueError, match=r"nnx.view: \['deterministc'\]"):
        nnx.view(m, deterministc=True)
    assert nnx.view(m, deterministc=True, raise_if_not_found=False)[0].deterministic is False


def test_view_says_that_a_setting_is_an_attribute():
    """A class without set_view has its mode in an attribute; the message names it, and what sets it."""
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    layer.deterministic = False
    with pytest.raises(ValueError, match=r" layers\[1\]\.deterministic is an attribute, .*with_attributes"):
        nnx.view(nnx.Sequential(nnx.relu, layer), deterministic=True)


def test_view_keeps_sharing():
    """A Module under two names is one Module in the view."""
    m = Net()
    m.again = m.drop
    v = nnx.view(m, deterministic=True)
    assert v.again is v.drop


def test_view_passes_over_random_streams():
    """An Rngs has a stream under every name, but no setting; nothing is drawn from it."""
    m = nnx.Dict(drop=Drop(), rngs=nnx.Rngs(0))
    v = nnx.view(m, deterministic=True)
    assert (v["drop"].deterministic, v["rngs"].default.count.value) == (True, 0)
    assert nnx.view_info(m) == nnx.view_info(m["drop"])


def test_view_info_lists_the_settings():
    """Each class that has set_view, with its parameters."""
    assert nnx.view_info(Net()).splitlines() == [
        "Drop:",
        "  deterministic: bool | None = None",
        "  rate: float | None = None",
        "Norm:",
        "  use_running_average: bool | None = None",
    ]
    assert "Drop" not in nnx.view_info(Net(), only=Norm)


def test_view_info_tells_what_is_written_of_the_settings():
    """The section `Args:` of the docstring of set_view, and the whole name of a class in a function."""

    class Cached(nnx.Module):
        def set_view(self, length: int | None = None, keep: bool = True, **more) -> None:
            """Make a cache.

            Args:
              length: how many tokens it holds,
                in all.
              keep: whether the old one stays.

            Returns:
              nothing: at all.
            """

    assert nnx.view_info(nnx.List([Cached(), Cached()])).splitlines() == [
        f"{Cached.__qualname__}:",
        "  length: int | None = None",
        "    how many tokens it holds,",
        "    in all.",
        "  keep: bool = True",
        "    whether the old one stays.",
    ]


def test_with_attributes_shares_variables():
    """Like view, by plain attributes."""
    m = Net()
    v = nnx.with_attributes(m, rate=0.1)
    assert (v.drop.rate, m.drop.rate, v.w is m.w) == (0.1, 0.5, True)
    assert nnx.with_attributes(m, only=Norm, rate=0.1, raise_if_not_found=False).drop.rate == 0.5
    with pytest.raises(ValueError, match=r"\['rte'\]"):
        nnx.with_attributes(m, rte=0.1)


def test_set_metadata_on_chosen_variables():
    """nnx.set_metadata sets metadata on each Variable that the filter takes."""
    m = Net()
    nnx.set_metadata(m, layer="x")
    nnx.set_metadata(m, only=nnx.BatchStat, kind="stat")
    assert (m.w.layer, m.blocks[1].mean.kind, m.w.has_metadata("kind")) == ("x", "stat", False)


def test_set_metadata_that_is_refused_sets_none():
    """Neither before a Variable of another trace, nor before one that the filter fails at."""
    outer = nnx.Param(1.0)

    def refused(x):
        own = nnx.Param(x)
        with pytest.raises(nnx.TraceContextError):
            nnx.set_metadata([own, outer], layer="x")
        assert not own.has_metadata("layer")
        return x

    jax.jit(refused)(1.0)
    fails = {("a",): True}
    model = nnx.Dict(a=nnx.Param(1.0), b=nnx.Param(2.0))
    with pytest.raises(KeyError):
        nnx.set_metadata(model, only=lambda path, x: fails[path], layer="x")
    assert not model.a.has_metadata("layer")


# --- empty ---


def test_an_empty_module():
    """A Module without attributes goes through everything."""

    class Empty(nnx.Module):
        pass

    m = Empty()
    graphdef, state = nnx.split(m)
    assert (type(nnx.merge(graphdef, state)), len(state), jax.tree.leaves(m)) == (Empty, 0, [])
    m.train()
    m.eval()
    nnx.update(m, state)
    assert nnx.jit(lambda m: m)(m) is m
    assert (list(nnx.iter_graph(m)), nnx.pop(m, ...), nnx.find_duplicates(m)) == ([((), m)], nnx.State({}), [])
    assert (type(copy.deepcopy(m)), repr(m), list(m.iter_modules())) == (Empty, "Empty()", [((), m)])


def test_first_from_takes_what_is_not_none():
    """False and 0 are settings, too; an array is only compared with None."""
    assert nnx.module.first_from(None, False, True, error_msg="unset") is False
    assert nnx.module.first_from(jnp.zeros(2), None, error_msg="unset").shape == (2,)
    with pytest.raises(ValueError, match=r"^deterministic is not set$"):
        nnx.module.first_from(None, None, error_msg="deterministic is not set")


def test_settings_are_no_modules():
    """A list or dict of settings is not among the Modules, as a plain one is not; one that holds data is."""

    class Block(nnx.Module):
        def __init__(self):
            self.sizes, self.names = [1, [2, {"depth": 3}]], {"rate": 0.5, "more": {"a": [1]}}
            self.layers, self.heads = [nnx.Dropout(0.5)], nnx.Dict(a=nnx.Dropout(0.5), rate=0.5)

    m = Block()
    expected = [("heads", "a"), ("heads",), ("layers", 0), ("layers",), ()]
    assert [path for path, _ in m.iter_modules()] == expected
    assert [name for name, _ in nnx.iter_module_children(m)] == ["heads", "layers"]
    modules = [name for name, x in vars(m).items() if isinstance(x, nnx.Module)]  # as code for flax.nnx asks
    assert modules == ["layers", "heads"]
    assert not any(isinstance(x, nnx.Sequential | nnx.Rngs) for x in vars(m).values())
    m.layers.rate = 0.5
    m.set_attributes(rate=0.0)
    assert (m.layers.rate, m.layers[0].rate, m.heads.rate, m.heads.a.rate, m.names["rate"]) == (0, 0, 0, 0, 0.5)


def test_settings_that_contain_themselves_are_no_modules():
    """The search for data in a list ends."""
    sizes = nnx.List([1])
    sizes.append(sizes)
    m = nnx.Dict(sizes=sizes, head=nnx.Dropout(0.5))
    assert [path for path, _ in nnx.iter_modules(m)] == [("head",), ()]
    assert [name for name, _ in nnx.iter_module_children(m)] == ["head"]


def test_lists_and_dicts_switch_the_modes_of_what_is_in_them():
    """As Modules do; an item or attribute of such a name comes first, and anything else is missing as before."""
    rngs = nnx.Rngs(0)
    layers = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.Dict(norm=nnx.BatchNorm(2, rngs=rngs))])
    layers.eval()
    assert layers[0].deterministic
    assert layers[1].norm.use_running_average
    layers[1].train()
    assert layers[0].deterministic
    assert not layers[1].norm.use_running_average
    layers.set_attributes(nnx.OfType(nnx.Dropout), rate=0.1)
    assert layers[0].rate == 0.1
    assert [path for path, _ in layers.iter_children()] == [0, 1]
    assert (1, "norm") in dict(layers.iter_modules())
    assert nnx.Dict(train=1).train == 1
    assert nnx.Dict(train=1)["train"] == 1
    layers.train = 3
    assert layers.train == 3
    with pytest.raises(AttributeError, match="'List' object has no attribute 'evaluate'"):
        _ = layers.evaluate
    with pytest.raises(AttributeError, match="no attribute or key 'evaluate'"):
        _ = nnx.Dict().evaluate


@pytest.mark.parametrize("set_mode", [nnx.Module.train, nnx.Module.eval])
def test_an_attribute_that_no_module_has_is_a_warning_in_train_and_eval(set_mode):
    """``train(mode=False)`` of PyTorch would train, and say nothing."""
    model = nnx.Sequential(nnx.Dropout(0.5), nnx.Dropout(0.2))
    with pytest.warns(
        UserWarning, match=r"No Module in Sequential has the attributes \['mode'\], .* model.eval\(\)"
    ) as w:
        set_mode(model, mode=False, rate=0.1)
    assert w[0].filename == __file__
    assert [layer.rate for layer in model.layers] == [0.1, 0.1]
    with pytest.warns(UserWarning, match="Did you mean 'deterministic'"):
        set_mode(model, deterministc=True)
    with warnings.catch_warnings(action="error"):
        set_mode(model, use_running_average=True)  # a model without running statistics
