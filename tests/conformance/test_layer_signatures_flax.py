"""Every layer of flax.nnx is here, under the same paths, and takes what it takes there.

Constructors, `__call__` and the other public methods are compared parameter by parameter: name, kind, position, and
default. A layer may take more.
"""

import importlib
import inspect

import jax
import pytest

import nnxlib as nnx

flax = pytest.importorskip("flax.nnx")

LAYERS = """BatchNorm Bidirectional Conv ConvTranspose Dropout Einsum Embed GroupNorm GRUCell InstanceNorm LayerNorm
Linear LinearGeneral LSTMCell OptimizedLSTMCell PReLU RMSNorm RNN RNNCellBase SimpleCell SpectralNorm
WeightNorm""".split()
ELSEWHERE = {"flax.nnx.nn.attention", "flax.nnx.nn.lora"}  # tests/conformance has files of their own for these


def is_library_value(value):
    """Functions and objects of a library, which each side has its own of."""
    return callable(value) or not isinstance(value, int | float | str | bool | tuple | type(None))


def compare(name, ours, theirs):
    mine, yours = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    if "args" in yours and "kwargs" in yours and len(yours) <= 3:  # the signature of nothing in particular
        return
    missing = yours.keys() - mine.keys()
    assert not missing, f"{name} does not take {sorted(missing)}"
    positional = lambda parameters: [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional(mine)[: len(positional(yours))] == positional(yours), name
    for parameter, theirs_p in yours.items():
        if theirs_p.kind is theirs_p.KEYWORD_ONLY:
            assert mine[parameter].kind in (theirs_p.KEYWORD_ONLY, theirs_p.POSITIONAL_OR_KEYWORD), (name, parameter)
        required = theirs_p.default is inspect.Parameter.empty
        assert required or mine[parameter].default is not inspect.Parameter.empty, (name, parameter)
        if not required and not is_library_value(theirs_p.default):
            assert mine[parameter].default == theirs_p.default, (name, parameter)


@pytest.mark.parametrize("name", LAYERS)
def test_signatures(name):
    ours, theirs = getattr(nnx, name), getattr(flax, name)
    compare(name, ours.__init__, theirs.__init__)
    settings = inspect.signature(theirs.__init__).parameters
    for method, function in vars(theirs).items():
        named = method == "__call__" or not (method.startswith("_") or method in settings)
        if inspect.isfunction(function) and named:
            compare(f"{name}.{method}", getattr(ours, method), function)


def test_no_layer_is_left_out():
    """Every Module class that flax.nnx exports from its layers is in the list above."""
    theirs = {
        name
        for name, value in vars(flax).items()
        if inspect.isclass(value) and issubclass(value, flax.Module) and value.__module__.startswith("flax.nnx.nn.")
    }
    rest = {name for name in theirs if getattr(flax, name).__module__ in ELSEWHERE}
    assert theirs - rest <= set(LAYERS)


def made(lib):
    """A layer of each kind."""
    rngs, cell, rnn = lib.Rngs(0), lib.GRUCell, lib.RNN
    layers = [getattr(lib, name)(4, rngs=rngs) for name in "BatchNorm LayerNorm RMSNorm InstanceNorm".split()]
    layers += [getattr(lib, name)(3, 4, rngs=rngs) for name in "Linear LinearGeneral Embed SimpleCell".split()]
    layers += [getattr(lib, name)(3, 4, rngs=rngs) for name in "LSTMCell OptimizedLSTMCell GRUCell".split()]
    layers += [getattr(lib, name)(3, 4, (3,), rngs=rngs) for name in ("Conv", "ConvTranspose")]
    layers += [getattr(lib, name)(lib.Linear(3, 4, rngs=rngs), rngs=rngs) for name in ("SpectralNorm", "WeightNorm")]
    layers += [lib.GroupNorm(4, 2, rngs=rngs), lib.Einsum("ab,bc->ac", (3, 4), (4,), rngs=rngs), lib.PReLU()]
    layers += [lib.Dropout(0.5, rngs=rngs), rnn(cell(3, 4, rngs=rngs))]
    layers += [lib.Bidirectional(rnn(cell(3, 4, rngs=rngs)), rnn(cell(3, 4, rngs=rngs)))]
    layers += [lib.LoRA(3, 2, 4, rngs=rngs), lib.LoRALinear(3, 4, lora_rank=2, rngs=rngs)]
    return [*layers, lib.MultiHeadAttention(2, 4, rngs=rngs)]


def test_attributes():
    """Published code reads the settings of a layer, so each is there under its name."""
    for ours, theirs in zip(made(nnx), made(flax), strict=True):
        missing = [name for name in vars(theirs) if not name.startswith("_") and not hasattr(ours, name)]
        assert not missing, type(ours)


MODULES = "activations dtypes initializers linear normalization recurrent stochastic".split()


@pytest.mark.parametrize("module", MODULES)
def test_module_paths(module):
    """Functions, classes and initializers that a module of flax.nnx.nn defines can be imported from ours."""
    ours, theirs = (importlib.import_module(f"{lib}.nn.{module}") for lib in ("nnxlib", "flax.nnx"))
    homes = (theirs.__name__, "jax") if module in ("activations", "initializers") else (theirs.__name__,)
    public = {
        name
        for name, value in vars(theirs).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "").startswith(homes)
    }
    public |= {name for name in vars(theirs) if name.startswith("default_")}
    assert {name for name in public - {"Array"} if not hasattr(ours, name)} == set()


def test_default_initializers_draw_the_same():
    for name, shape in {"default_kernel_init": (3, 4), "default_embed_init": (3, 4), "default_bias_init": (3,)}.items():
        ours, theirs = (getattr(lib.nn.linear, name)(jax.random.key(0), shape) for lib in (nnx, flax))
        assert (ours == theirs).all()
