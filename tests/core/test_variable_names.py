"""The names of Variable types, which Linen calls collections."""

import pytest

import nnxlib as nnx
from nnxlib.core.errors import VariableNameError


def test_registered_names_of_the_built_in_types():
    """Collections are called as in Linen."""
    names = {nnx.Param: "params", nnx.BatchStat: "batch_stats", nnx.Cache: "cache", nnx.Intermediate: "intermediates",
             nnx.Perturbation: "perturbations"}  # fmt: skip
    for kind, name in names.items():
        assert nnx.variable_name_from_type(kind) == name
        assert nnx.variable_type_from_name(name) is kind


def test_registering_a_name():
    """As a function or a decorator; a taken name needs overwrite=True, and unknown ones name the known."""

    @nnx.register_variable_name("test_memory")
    class Memory(nnx.Variable):
        pass

    class Other(nnx.Variable):
        pass

    assert nnx.variable_type_from_name("test_memory") is Memory
    assert nnx.register_variable_name("test_memory", Memory) is Memory
    with pytest.raises(VariableNameError, match="'test_memory' belongs to Memory; pass overwrite=True"):
        nnx.register_variable_name("test_memory", Other)
    assert nnx.register_variable_name("test_memory", Other, overwrite=True) is Other
    assert nnx.variable_type_from_name("test_memory") is Other
    with pytest.raises(ValueError, match=r"(?s)'test_nothing'; known names: .*'params'"):
        nnx.variable_type_from_name("test_nothing")


def test_a_class_that_is_defined_again_takes_over_its_name():
    """As in a notebook's cell that runs twice."""

    def run_cell():
        @nnx.register_variable_name("test_twice")
        class Twice(nnx.Variable):
            pass

        return Twice

    run_cell()
    assert run_cell() is nnx.variable_type_from_name("test_twice")


def test_the_names_that_are_taken_can_be_read():
    """Libraries ask the registry before they register types of their own (jax2onnx: those of random streams)."""
    assert "test_counts" not in nnx.variablelib.VariableTypeCache
    nnx.register_variable_name("test_counts", type("TestCounts", (nnx.Variable,), {}))
    assert nnx.variablelib.VariableTypeCache["test_counts"] is nnx.variable_type_from_name("test_counts")


def test_names_made_on_demand():
    """allow_register makes a class for a name, and a name for a class."""
    kind = nnx.variable_type_from_name("test_made", base=nnx.Cache, allow_register=True)
    assert (kind.__name__, issubclass(kind, nnx.Cache), nnx.variable_type_from_name("test_made") is kind) == (
        "test_made",
        True,
        True,
    )

    class TestFastWeights(nnx.Param):
        pass

    with pytest.raises(VariableNameError, match="TestFastWeights has no registered name"):
        nnx.variable_name_from_type(TestFastWeights)
    assert nnx.variable_name_from_type(TestFastWeights, allow_register=True) == "TestFastWeights"
