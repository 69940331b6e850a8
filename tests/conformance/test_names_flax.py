"""The module paths of flax.nnx: what is public there is here under the same path, and what it does is the same."""

import importlib
import inspect
import pkgutil
import types

import jax
import jax.numpy as jnp
import pytest

import nnxlib

pytest.importorskip("flax.nnx", reason="flax is not installed (it is not, where it would change the version of JAX)")

import flax.nnx

from tests.compat.test_names import kinds, written
from tests.conformance.results import same

MODULES = (
    "bridge bridge.interop bridge.variables bridge.wrappers compat filterlib helpers nn.activations nn.attention "
    "nn.dtypes nn.initializers nn.linear nn.lora nn.normalization nn.recurrent nn.stochastic reprlib rnglib spmd "
    "statelib tracers training.ema training.metrics training.optimizer traversals"
).split()

# Of no use here, or of flax.nnx's own machinery.
LEFT_OUT = {
    "helpers": "ModuleDefApply",
    "reprlib": "COLOR Color NO_COLOR ReprContext colorized supports_color",  # reprs are plain text
    "statelib": "NestedStateRepr",
}


MACHINERY = {"flax.nnx.deprecations", "flax.nnx.ids"}


def test_modules_are_here():
    """Each module path there can be imported here."""
    for module in pkgutil.walk_packages(flax.nnx.__path__, "flax.nnx."):
        if module.name not in MACHINERY:
            assert importlib.import_module(module.name.replace("flax.nnx", "nnxlib"))


@pytest.mark.parametrize("name", MODULES)
def test_public_names_of_a_module_are_here(name):
    """Functions, classes and values that the module there defines itself."""
    there = importlib.import_module(f"flax.nnx.{name}")
    here = importlib.import_module(f"nnxlib.{name}")
    defined = {
        key
        for key, value in vars(there).items()
        if not key.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value) or isinstance(value, int | str | tuple))
        and (getattr(value, "__module__", there.__name__) == there.__name__)
        and not isinstance(value, types.ModuleType)
    }
    assert {key for key in defined if not hasattr(here, key)} <= set(LEFT_OUT.get(name, "").split())


@pytest.mark.parametrize("name", ["transforms.autodiff.AxisName", "nn.recurrent.Carry", "nn.recurrent.Output"])
def test_names_of_types_for_annotations(name):
    """Wrappers and cells of users import these for their signatures."""
    module, attribute = name.rsplit(".", 1)
    for root in ("nnxlib", "flax.nnx"):
        assert hasattr(importlib.import_module(f"{root}.{module}"), attribute)


def test_names_of_the_graph_mode_namespace():
    """What flax.nnx has in its `compat`."""
    names = {key for key in vars(flax.nnx.compat) if not key.startswith("_")} - {"functools"}
    assert names <= {key for key in dir(nnxlib.compat) if hasattr(nnxlib.compat, key)}


def test_what_a_value_is_in_a_graph():
    assert kinds(nnxlib) == kinds(flax.nnx)


def test_reprs_are_the_same():
    assert written(importlib.import_module("nnxlib.reprlib")) == written(importlib.import_module("flax.nnx.reprlib"))


def test_key_paths_and_backups_are_the_same():
    keys = (jax.tree_util.DictKey("a"), jax.tree_util.GetAttrKey("b"), jax.tree_util.SequenceKey(1))

    def script(nnx):
        rngs = nnx.Rngs(0, a=1)
        backups = nnx.rnglib.backup_keys(rngs)
        rngs.a()
        nnx.reseed(rngs, a=5)
        rngs.a()
        nnx.restore_rngs(backups)
        return nnx.graphlib.jax_to_nnx_path(keys), jax.random.key_data(rngs.a()).tolist()

    assert script(nnxlib) == script(flax.nnx)


def test_keyword_arguments_are_found_alike():
    functions = [
        lambda a: 0,
        lambda *, a: 0,
        lambda b, a=2: 0,
        lambda **a: 0,
        lambda *a: 0,
        lambda b: 0,
        lambda a, /: 0,
    ]
    here, there = ([nnx.helpers.has_keyword_arg(f, "a") for f in functions] for nnx in (nnxlib, flax.nnx))
    assert here == there


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("use_mean", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_what_published_normalising_layers_import(dtype, use_mean, masked):
    """Functions with private names, which are nevertheless imported."""
    key = jax.random.key(0)
    x, mask = jax.random.normal(key, (3, 4, 5)), jax.random.bernoulli(key, 0.7, (3, 4, 1)) if masked else None

    def script(nnx):
        functions = nnx.nn.normalization
        axes = functions._canonicalize_axes(3, (-2, 0, 1))
        mean, var = functions._compute_stats(x, axes, dtype, None, None, use_mean, mask=mask)
        y = functions._normalize(x, mean, var, jnp.arange(5.0), jnp.ones(5), axes, -1, dtype, 1e-5)
        return axes, mean, var, y

    same(script, {"float32": 1e-5, "bfloat16": 1e-2})
