import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.nn.dtypes import LayerInputError


def dropped(y):
    return np.asarray(y) == 0


def make(rate=0.5, seed=0, **kwargs):
    return nnx.Dropout(rate, rngs=nnx.Rngs(seed), **kwargs)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_dropout_keeps_the_expectation(rate):
    """About `rate` of the elements become 0, the others are divided by 1 - rate."""
    x = jnp.ones((100, 100))
    y = make(rate)(x)
    assert abs(dropped(y).mean() - rate) < 0.02
    np.testing.assert_allclose(y[~dropped(y)], 1 / (1 - rate), rtol=1e-6)


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 1.0), (0, 1.0), (1.0, 0.0), (1, 0.0)])
def test_extreme_rates_draw_nothing(rate, expected):
    """Rates 0 and 1 leave all or nothing, and take no key."""
    layer = make(rate)
    assert (layer(jnp.ones(5)) == expected).all()
    assert int(layer.rngs.count.value) == 0


def test_every_call_and_every_layer_drops_others():
    """Masks differ from call to call and between layers made from one Rngs; the same seed repeats them."""
    x, rngs = jnp.ones(64), nnx.Rngs(0)
    first, second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    masks = [tuple(dropped(layer(x))) for layer in (first, first, second, second)]
    assert len(set(masks)) == 4
    assert tuple(dropped(make()(x))) == masks[0]


def test_the_layer_keeps_a_fork_of_its_stream():
    """It takes one key of the stream `dropout`, or of `rng_collection`, and draws from no one else's afterwards."""
    rngs = nnx.Rngs(0, dropout=1, noise=2)
    layer = nnx.Dropout(0.5, rngs=rngs)
    noise = nnx.Dropout(0.5, rng_collection="noise", rngs=rngs)
    layer(jnp.ones(3))
    assert (layer.rngs.tag, noise.rngs.tag) == ("dropout", "noise")
    assert [int(rngs[name].count.value) for name in ("dropout", "noise", "default")] == [1, 1, 0]


def test_a_subclass_may_set_the_attributes_itself():
    """A constructor of its own sets those of flax.nnx's Dropout; the stream may be an Rngs."""

    class Dropout(nnx.Dropout):
        def __init__(self, rate, rngs):
            self.rate, self.broadcast_dims, self.deterministic = rate, (), False
            self.rng_collection, self.rngs = "dropout", rngs.fork()

    np.testing.assert_array_equal(Dropout(0.5, nnx.Rngs(0))(jnp.ones(64)), make()(jnp.ones(64)))


def test_broadcast_dims_share_one_fate():
    """Along them all elements are kept or dropped together."""
    mask = dropped(make(broadcast_dims=(0, -1))(jnp.ones((4, 50, 3))))
    assert (mask == mask[:1, :, :1]).all()
    assert 0 < mask.mean() < 1


def test_train_and_eval_switch_the_mode_and_leave_the_users_choice_alone():
    """`deterministic=True` of the user stays through train()."""
    model = nnx.Sequential(make(), make(deterministic=True), make(deterministic=None))
    modes = lambda: [layer.deterministic for layer in model.layers]
    model.train()
    assert modes() == [False, True, False]
    model.eval()
    assert modes() == [True, True, True]
    x = jnp.ones(5)
    assert model(x) is x
    model.train()
    assert modes()[:2] == [False, True]
    assert nnx.view(model, deterministic=True)(x) is x


def test_the_call_overrides_mode_and_stream():
    """`deterministic` and `rngs` of the call count for that call; keys and streams are taken too."""
    layer, x = make(), jnp.ones(64)
    assert layer(x, deterministic=True) is x
    key = nnx.Rngs(7)()
    expected = dropped(layer(x, rngs=key))
    for rngs in (nnx.Rngs(7), nnx.RngStream(7, tag="any"), nnx.Rngs(0, dropout=7)):
        np.testing.assert_array_equal(dropped(layer(x, rngs=rngs)), expected)
    assert int(layer.rngs.count.value) == 0
    assert dropped(nnx.Dropout(0.5)(x, rngs=nnx.Rngs(0))).any()


def test_the_same_masks_under_jit():
    """A jitted layer drops what the eager one drops, call after call, and its stream advances."""
    eager, jitted, x = make(), make(), jnp.ones((8, 8))
    run = nnx.jit(lambda layer, x: layer(x))
    for _ in range(3):
        np.testing.assert_array_equal(dropped(run(jitted, x)), dropped(eager(x)))
    assert int(jitted.rngs.count.value) == 3


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("call", [lambda layer, x: layer(x), nnx.jit(lambda layer, x: layer(x))], ids=["eager", "jit"])
def test_a_stream_on_a_mesh_and_inputs_that_are_not(call, kind):
    """As a model has it whose state was put on a mesh, and whose input comes as it is."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(kind,))
    layer, x = make(), jnp.ones(64)
    expected = make()(x)
    nnx.update(layer, jax.device_put(nnx.state(layer), jax.NamedSharding(mesh, jax.P())))
    np.testing.assert_array_equal(call(layer, x), expected)


def test_members_of_an_ensemble_and_rows_when_asked_drop_others():
    """A split stream gives each member its mask; along an unsplit axis rows agree unless `axis_name` is given."""
    x = jnp.ones((4, 64))

    def masks(layer, in_axes):
        graphdef, state = nnx.split(layer)
        run = lambda state, x: nnx.merge(graphdef, state)(x)
        return {tuple(row) for row in dropped(jax.vmap(run, in_axes=(in_axes, 0), axis_name="row")(state, x))}

    assert len(masks(make(), None)) == 1
    assert len(masks(make(axis_name="row"), None)) == 4
    ensemble = make()
    ensemble.rngs = ensemble.rngs.split(4)
    assert len(masks(ensemble, 0)) == 4


AXIS_NAME = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0), axis_name="row")


@pytest.mark.parametrize("members", [
    nnx.split_rngs(splits=4)(nnx.vmap(lambda layer, x: layer(x))),
    nnx.split_rngs(splits=4)(nnx.vmap(lambda layer, x: layer(x), in_axes=(nnx.StateAxes({nnx.RngState: 0}), 0))),
    nnx.with_rngs(split=4)(nnx.vmap(lambda layer, x: layer(x))),
    AXIS_NAME,
], ids=["split_rngs", "StateAxes", "with_rngs", "axis_name"])  # fmt: skip
def test_members_drop_others_at_every_call(members):
    """One layer, its stream split for the call, or its key folded with the row: all masks of two calls differ."""
    layer = make(axis_name="row") if members is AXIS_NAME else make()
    masks = np.concatenate([dropped(members(layer, jnp.ones((4, 64)))) for _ in range(2)])
    assert len(np.unique(masks, axis=0)) == 8
    assert (layer.rngs.key.shape, int(layer.rngs.count.value)) == ((), 2)


def test_an_ensemble_of_dropouts_has_a_stream_for_each_member():
    """Made by a vmapped constructor over a split Rngs; without the split, members are alike."""
    construct = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
    run = nnx.vmap(lambda layer, x: layer(x))
    for rngs, masks in ((nnx.Rngs(0).split(3), 3), (nnx.Rngs(0).broadcast(3), 1)):
        assert len(np.unique(dropped(run(construct(rngs), jnp.ones((3, 64)))), axis=0)) == masks


def test_low_precision_inputs_keep_their_dtype():
    """The mask and the scaling do not promote."""
    assert make()(jnp.ones(4, jnp.bfloat16)).dtype == jnp.bfloat16


def test_an_rngs_in_place_of_the_rate():
    """`nnx.Dropout(rngs)` would fail at the first call only."""
    with pytest.raises(TypeError, match=r"takes its rate first, but got Rngs: nnx\.Dropout\(0\.5, rngs=rngs\)"):
        nnx.Dropout(nnx.Rngs(0))


def test_what_cannot_work_is_refused():
    """Rates that are no probabilities, integer inputs, no mode, no stream: each error says what to write."""
    for rate in (-0.1, 1.5, 2):
        with pytest.raises(ValueError, match=f"from 0 to 1, but got {rate}"):
            nnx.Dropout(rate)
    with pytest.raises(LayerInputError, match=r"Dropout 0.5 takes inputs of a floating dtype.*int32\[3\]"):
        make()(jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match=r"(?s)No `deterministic` argument.*model.eval\(\)"):
        make(deterministic=None)(jnp.ones(3))
    with pytest.raises(ValueError, match="no `rngs` argument"):
        nnx.Dropout(0.5)(jnp.ones(3))
    with pytest.raises(KeyError, match=r"'dropout'.*'params'"):
        nnx.Dropout(0.5, rngs=nnx.Rngs(params=0))
    with pytest.raises(TypeError, match="rngs must be a Rngs, RngStream or None"):
        nnx.Dropout(0.5, rngs=0)


def test_a_rate_of_numpy_is_checked_too():
    """As a float is: a rate of 1.5 dropped all, one of -1 halved all."""
    for rate in (np.float32(1.5), np.float32(-1), np.int32(2)):
        with pytest.raises(ValueError, match="from 0 to 1"):
            nnx.Dropout(rate, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=r"in the range \[0, 1\)"):
            nnx.MultiHeadAttention(2, 4, dropout_rate=rate, rngs=nnx.Rngs(0))


def test_axes_and_keys_that_are_not_there_are_refused():
    with pytest.raises(LayerInputError, match=r"broadcast_dims=\(5,\), but got float32\[2, 3\]"):
        nnx.Dropout(0.5, broadcast_dims=(5,), rngs=nnx.Rngs(0))(jnp.ones((2, 3)))
    with pytest.raises(TypeError, match=r"an Rngs, a stream or a key, but got int: nnx.Rngs\(seed\)"):
        nnx.Dropout(0.5)(jnp.ones((2, 3)), rngs=0)
    assert nnx.Dropout(0.5, broadcast_dims=(-1,))(jnp.ones((2, 3)), rngs=jax.random.key(0)).shape == (2, 3)


def test_a_rate_that_is_text_is_refused():
    with pytest.raises(TypeError, match="The rate of Dropout is a number from 0 to 1, but got 'a'"):
        nnx.Dropout("a", rngs=nnx.Rngs(0))
