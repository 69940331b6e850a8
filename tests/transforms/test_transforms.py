"""The module paths under which flax.nnx has its transforms."""

import importlib

import pytest

import nnxlib as nnx

NAMES = {
    "autodiff": "DiffState custom_vjp grad jvp remat value_and_grad vjp",
    "compilation": "StateSharding jit jit_partial shard_map",
    "iteration": "Carry StateAxes fori_loop pmap scan transform_metadata vmap while_loop",
    "transforms": "checkify cond eval_shape make_jaxpr switch",
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_are_those_of_the_package(module):
    """Each path is there as an import and as an attribute, and has the public transforms themselves."""
    found = importlib.import_module(f"nnxlib.transforms.{module}")
    assert getattr(nnx.transforms, module) is found
    for name in NAMES[module].split():
        assert getattr(found, name) is getattr(nnx, name)
