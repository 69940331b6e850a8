"""What can be passed by name to a function, class or method of flax.nnx can be passed by that name here.

Layers are compared in more detail (test_layer_signatures_flax.py).
"""

import inspect

import pytest

import nnxlib as nnx

flax = pytest.importorskip("flax.nnx")

SWITCHES = {"graph", "graph_updates"}  # there is one mode
MACHINERY = {  # arguments by which parts of flax.nnx call each other
    "GraphDef": {"nodes", "attributes", "num_leaves"},
    "MergeContext": {"ctxtag", "index_ref", "is_inner"},
    "SplitContext": {"ctxtag", "ref_index", "is_inner"},
    "UpdateContext": {
        "outer_ref_outer_index", "outer_index_inner_ref", "outer_index_outer_ref", "inner_ref_outer_index",
        "static_cache",
    },
    "StateAxes.map_prefix": {"variable"},
    "StateSharding.map_prefix": {"variable"},
    "Variable.get_metadata": {"exclude_required"},
    "flatten": {"ref_index", "ref_outer_index"},
    "merge": {"recreate_variables"},
    "unflatten": {"index_ref", "outer_index_outer_ref", "copy_variables", "recreate_variables"},
}  # fmt: skip

OTHER_DEFAULTS = {("clone", "arrays")}  # a clone owns its buffers


def by_name(function):
    """The parameters that can be passed by name, and whether any other name can; None if it does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p for p in parameters if p.kind in kinds}, any(p.kind is p.VAR_KEYWORD for p in parameters)


def functions():
    """(name, here, there) of each public function, constructor and method of a class."""
    for name, there in sorted(vars(flax).items()):
        here = getattr(nnx, name, None)
        if name.startswith("_") or here is None or not callable(there):
            continue
        if not inspect.isclass(there):
            yield name, here, there
            continue
        yield name, here.__init__, there.__init__
        for method, function in sorted(vars(there).items()):
            if inspect.isfunction(function) and not method.startswith("_") and hasattr(here, method):
                yield f"{name}.{method}", getattr(here, method), function


def test_arguments_have_the_same_names_and_defaults():
    wrong = []
    compared = 0
    for name, here, there in functions():
        mine, yours = by_name(here), by_name(there)
        if mine is None or yours is None:
            continue
        compared += 1
        for parameter, expected in yours[0].items():
            if parameter == "self" or parameter.startswith("_") or parameter in SWITCHES | MACHINERY.get(name, set()):
                continue
            if parameter not in mine[0]:
                if not mine[1]:
                    wrong.append(f"{name} does not take {parameter} by name")
                continue
            default, found = expected.default, mine[0][parameter].default
            is_plain = isinstance(default, bool | int | float | str | type(None))
            if is_plain and found != default and (name, parameter) not in OTHER_DEFAULTS:
                wrong.append(f"{name}: {parameter} is {default!r} there, {found!r} here")
    assert not wrong
    assert compared > 150


@pytest.mark.parametrize("switch", sorted(SWITCHES))
def test_each_function_says_that_there_is_one_mode(switch):
    """A switch of flax.nnx is refused with what to write instead, also where options are passed on to JAX."""
    silent = []
    compared = 0
    for name, there in sorted(vars(flax).items()):
        parameters = by_name(there)[0] if inspect.isfunction(there) and by_name(there) else {}
        if name.startswith("_") or switch not in parameters or not hasattr(nnx, name):
            continue
        compared += 1
        needed = sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
        with pytest.raises(Exception, match=f"'{switch}'") as error:
            made = getattr(nnx, name)(*[lambda *args: None] * max(needed, 1), **{switch: True})
            made(1.0)  # some transforms refuse it when the function is called
        if not any("nnxlib has one mode" in note for note in getattr(error.value, "__notes__", ())):
            silent.append(name)
    assert not silent
    assert compared > 15
