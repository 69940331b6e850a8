"""`nnx.functional` beside Linen's `init` and `apply`: the same variables, outputs, updates, refusals of one model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx

nn = pytest.importorskip("flax.linen")

X = jax.random.normal(jax.random.key(3), (6, 4))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(5, name="inner")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        self.sow("intermediates", "hidden", x)
        x = nn.Dropout(0.5, deterministic=not train, name="dropout")(x)
        return nn.Dense(2, name="out")(x)


class Ours(nnx.Module):
    def __init__(self, *, rngs):
        self.inner = nnx.Linear(4, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x, train=False):
        x = self.norm(self.inner(x), use_running_average=not train)
        self.sow(nnx.Intermediate, "hidden", x)
        return self.out(self.dropout(x, deterministic=not train))


MODELS = {"linen": Linen(), "ours": nnx.functional(Ours)}
VARIABLES = MODELS["linen"].init(jax.random.key(0), X)


def outcome(model, variables, *args, **kwargs):
    """What `apply` returns, or the error that it raises."""
    try:
        return model.apply(variables, *args, **kwargs)
    except Exception as error:
        return error


def test_init_makes_the_same_tree():
    """The same collections, paths, shapes and dtypes, whether or not the call is run."""
    theirs, (ours, lazy) = VARIABLES, (MODELS["ours"].init(0, X), MODELS["ours"].lazy_init(0, X))
    assert jax.tree.map(jnp.shape, theirs) == jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, lazy)
    assert jax.tree.map(lambda x: x.dtype, theirs) == jax.tree.map(lambda x: x.dtype, ours)


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        (VARIABLES, {}),
        (VARIABLES, {"mutable": []}),
        (VARIABLES, {"mutable": ["intermediates"]}),
        (VARIABLES, {"mutable": "batch_stats"}),
        (VARIABLES, {"mutable": True}),
        (VARIABLES, {"train": True}),
        (VARIABLES, {"train": True, "mutable": ["batch_stats"]}),
        (VARIABLES, {"train": True, "mutable": ["params"], "rngs": {"dropout": jax.random.key(1)}}),
        (VARIABLES, {"rngs": {"dropout": "a key"}}),
        ({"params": VARIABLES["params"]}, {}),
        ({"params": VARIABLES}, {}),
        ({**VARIABLES, "params": {"inner": VARIABLES["params"]["inner"]}}, {}),
        ([VARIABLES], {}),
        (None, {}),
    ],
    ids=range(14),
)
def test_apply_returns_or_refuses_the_same(variables, options):
    theirs, ours = (outcome(model, variables, X, **options) for model in MODELS.values())
    if isinstance(theirs, Exception):
        assert isinstance(ours, nnx.errors.NnxError)
    else:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), theirs, ours)


def test_training_updates_the_same_statistics():
    """Dropout draws other keys, so the outputs differ; what BatchNorm remembers does not."""
    options = {"train": True, "mutable": ["batch_stats"], "rngs": {"dropout": jax.random.key(1)}}
    (_, theirs), (_, ours) = (model.apply(VARIABLES, X, **options) for model in MODELS.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), theirs, ours)


def test_bind():
    for model in MODELS.values():
        bound = model.bind(VARIABLES)
        np.testing.assert_allclose(bound(X), MODELS["linen"].apply(VARIABLES, X), rtol=1e-5, atol=1e-6)
