"""Differences: what does not fit is found and said alike, whichever operation is given it, and nothing is written."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core.differences import (
    ANY_VALUE,
    Difference,
    array_differences,
    as_change,
    as_misfit,
    leaf_differences,
    misfits,
    refuse,
)
from nnxlib.core.errors import PrefixError, StateMismatchError
from tests.properties.compare import Snapshot


class Net(nnx.Module):
    def __init__(self, value=1.0):
        self.a = nnx.Dict(b=nnx.BatchStat(jnp.full(3, value)), w=nnx.Param(jnp.full((2, 3), value)))
        self.layers = [nnx.Dict(w=nnx.Param(jnp.full(2, value)))]
        self.scale, self.n = jnp.float32(value), 3


def spoilt(*without, **changes):
    """The State of a Net, flat: without some paths, and with other leaves at paths written as ``a__w``."""
    found = {path: leaf for path, leaf in nnx.state(Net(2.0)).flat_state() if path not in without}
    return found | {tuple(name.split("__")): leaf for name, leaf in changes.items()}


A, B, W = ("a",), ("a", "b"), ("a", "w")
# Leaves by path, and what merge and update say of them; merge wants all leaves, and takes the types of Variables.
WRONG = {
    "missing": (spoilt(W), ["a.w: missing, expected Param (float32[2, 3])"], []),
    "unexpected": (spoilt(a__c=nnx.Param(jnp.ones(4))), ["a.c: unexpected Param (float32[4])"]),
    "shape": (spoilt(a__w=nnx.Param(jnp.ones((3, 3)))), ["a.w: expected shape (2, 3), got (3, 3)"]),
    "kind of dtype": (spoilt(a__b=nnx.BatchStat(jnp.ones(3, int))), ["a.b: expected dtype float32, got int32"]),
    "shape, and a dtype that fits": (
        spoilt(a__w=nnx.Param(jnp.ones(7, jnp.bfloat16))),
        ["a.w: expected shape (2, 3), got (7,)"],
    ),
    "type of a Variable": (spoilt(a__b=nnx.Param(jnp.ones(3))), [], ["a.b: expected BatchStat, got Param"]),
    "a static value for an array": (spoilt(scale="big"), ["scale: expected float32[], got str"]),
    "a static value in a Variable": (spoilt(a__w=nnx.Param("w")), ["a.w: expected float32[2, 3], got str"]),
    "a list for an array": (spoilt(a__b=[1.0, 2.0, 3.0]), ["a.b: expected float32[3], got list"]),
    "a number for an array with axes": (spoilt(a__b=0), ["a.b: expected float32[3], got int"]),
    "None for an array": (spoilt(a__w=None), ["a.w: expected float32[2, 3], got None"]),
    "an array for a static value": (spoilt(n=jnp.ones(())), ["n: unexpected float32[]"]),
    "a dict for an array": (
        spoilt(W, a__w__kernel=jnp.ones(1)),
        ["a.w: missing, expected Param (float32[2, 3])", "a.w.kernel: unexpected float32[1]"],
        ["a.w.kernel: unexpected float32[1]"],
    ),
    "an array for a dict": (
        spoilt(B, W, a=jnp.ones(1)),
        [
            "a: unexpected float32[1]",
            "a.b: missing, expected BatchStat (float32[3])",
            "a.w: missing, expected Param (float32[2, 3])",
        ],
        ["a: unexpected float32[1]"],
    ),
    "several": (
        spoilt(B, a__w=nnx.BatchStat(jnp.ones(1, bool)), n=1, scale=None),
        [
            "a.b: missing, expected BatchStat (float32[3])",
            "a.w: expected shape (2, 3), got (1,)",
            "a.w: expected dtype float32, got bool",
            "n: unexpected int",
            "scale: expected float32[], got None",
        ],
        [
            "a.w: expected Param, got BatchStat",
            "a.w: expected shape (2, 3), got (1,)",
            "a.w: expected dtype float32, got bool",
            "n: unexpected int",
            "scale: expected float32[], got None",
        ],
    ),
}
FORMS = {
    "State": nnx.from_flat_state,
    "dict": lambda flat: nnx.from_flat_state(flat, cls=dict),
    "FlatState": nnx.FlatState,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", WRONG)
def test_merge_and_update_say_the_same_and_write_nothing(case, form):
    """The whole message: what does not fit, each line with its path, and the remedy; in the words of nnx.diff."""
    flat, of_all, of_a_part = (*WRONG[case], WRONG[case][1])[:3]
    model, given = Net(), FORMS[form](flat)
    before = Snapshot(model)
    if of_all:
        with pytest.raises(StateMismatchError) as merged:
            nnx.merge(nnx.graphdef(model), given)
        head, *lines, remedy = str(merged.value).splitlines()
        assert (head, lines) == ("The State does not fit the GraphDef; nothing was made.", [f"  {x}" for x in of_all])
        by_path = any("missing" in line or "unexpected" in line for line in lines)
        assert remedy.startswith("Pass every State that nnx.split returned" if by_path else "Pass strict=False to take")
    if of_a_part:
        with pytest.raises(StateMismatchError) as updated:
            nnx.update(model, given)
        *said, remedy = str(updated.value).splitlines()
        assert said == ["The State does not fit the object; nothing was written.", *(f"  {x}" for x in of_a_part)]
        assert re.fullmatch(r"Pass strict=False to skip these\.( \S+ has: .*\.)?", remedy)
    before.assert_unchanged()
    if form == "dict":
        assert set(of_all) <= set(map(as_misfit, nnx.diff(nnx.state(model), given)))


def test_update_that_is_not_strict_skips_what_it_would_have_listed():
    """And writes the rest; a level in place of a leaf, and all that is wrong at one path, too."""
    for case, (flat, *_) in WRONG.items():
        model = Net()
        nnx.update(model, nnx.from_flat_state(flat), strict=False)
        after = nnx.state(model)
        assert after.flat_state().paths == nnx.state(Net()).flat_state().paths, case
        assert after.layers[0].w.value.tolist() == [2, 2], case
        assert model.a.w.shape == (2, 3), case


def test_lists_are_bounded():
    """Of thousands of misfits twenty are shown, and the remedy, whichever operation found them."""
    model, wrong = (nnx.List([nnx.Param(jnp.ones(n)) for _ in range(60)]) for n in (2, 3))
    state, other = nnx.state(wrong), {"x": nnx.to_pure_dict(nnx.state(wrong))}
    for operation, *args in (
        (nnx.update, model, state),
        (nnx.merge, nnx.graphdef(model), nnx.map_state(lambda path, x: x[: path[0]], state)),
        (nnx.EMA(model, 0.5).update, state),
        (nnx.replace_by_pure_dict, nnx.state(model), other),
    ):
        with pytest.raises(StateMismatchError, match=r"\n  \.\.\. and \d\d more\n[A-Z].*") as found:
            operation(*args)
        assert str(found.value).count("\n  ") in (21, 42)  # the last one also lists what there is


# --- restoring from what has no Variables ---------------------------------------------------------------------------

RESTORED = {  # a pure dict, and what is said of it
    "unexpected": ({"a": {"c": jnp.ones(4)}}, ["a.c: unexpected float32[4]"]),
    "an array for a static value": ({"n": jnp.ones(())}, ["n: unexpected float32[]"]),
    "a dict for an array": ({"a": {"w": {"kernel": 1.0}}}, ["a.w.kernel: unexpected float"]),
    "an array for a dict": ({"a": jnp.ones(1)}, ["a: unexpected float32[1]"]),
    "several": ({"a": {"b": jnp.zeros(3), "c": None}, "m": "x"}, ["a.c: unexpected None", "m: unexpected str"]),
}


@pytest.mark.parametrize("case", RESTORED)
def test_a_pure_dict_that_does_not_fit(case):
    """It may replace leaves, not bring new ones; what the State has is listed."""
    pure, lines = RESTORED[case]
    state = nnx.state(Net())
    with pytest.raises(StateMismatchError) as found:
        nnx.replace_by_pure_dict(state, pure)
    assert str(found.value).splitlines() == [
        "The dict does not fit the State; nothing was replaced.",
        *(f"  {line}" for line in lines),
        "Remove or rename these. The State has leaves at:",
        *("  a.b", "  a.w", "  layers[0].w", "  scale"),
    ]
    assert state == nnx.state(Net())


AVERAGED = {  # a State, and what is said of it; averages are of any type of Variable, and of any dtype
    "missing": (spoilt(("scale",), W), ["a.w: missing, expected Param (float32[2, 3])"]),
    "unexpected": (spoilt(("scale",), a__c=nnx.Param(jnp.ones(4))), ["a.c: unexpected float32[4]"]),
    "shape": (
        spoilt(("scale",), a__w=nnx.BatchStat(jnp.ones(3)), a__b=nnx.Param(jnp.ones(3, int))),
        ["a.w: expected shape (2, 3), got (3,)"],
    ),
    "a static value for an array": (spoilt(("scale",), a__w=nnx.Param("w")), ["a.w: expected float32[2, 3], got str"]),
}


@pytest.mark.parametrize("case", AVERAGED)
def test_averages_of_what_does_not_fit(case):
    """What the optimizer and the EMA take by path is compared in the same way; nothing is averaged."""
    flat, lines = AVERAGED[case]
    ema = nnx.EMA(Net(), 0.5, only=nnx.Variable)
    before = Snapshot(ema)
    with pytest.raises(StateMismatchError) as found:
        ema.update(nnx.from_flat_state(flat))
    assert str(found.value).splitlines()[1:] == [
        *(f"  {line}" for line in lines),
        "Pass the model that the averages are of, or make new ones: nnx.EMA(model, decay).",
    ]
    before.assert_unchanged()


def test_averages_of_pytrees():
    """A Variable may hold one: another structure is named, before anything is averaged."""
    ema = nnx.EMA(nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param({"x": jnp.ones(2)})), 0.5)
    before = Snapshot(ema)
    for other, message in (
        ({"y": jnp.ones(2)}, r"b: expected PyTreeDef\(\{'x': \*\}\), got PyTreeDef\(\{'y': \*\}\)"),
        ({"x": jnp.ones(3)}, r"b\.x: expected shape \(2,\), got \(3,\)"),
        (jnp.ones(2), r"b: expected dict, got float32\[2\]"),
    ):
        with pytest.raises(StateMismatchError, match=message):
            ema.update(nnx.State({"a": nnx.Param(jnp.zeros(2)), "b": nnx.Param(other)}))
        before.assert_unchanged()


# --- what is no misfit ----------------------------------------------------------------------------------------------


def test_what_fits():
    """Another precision, a number for an array without axes, anything where no array was, a Variable for an array."""
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)), n=nnx.Param(jnp.int32(1)), empty=nnx.Param(None), scale=jnp.ones(2))
    given = nnx.State(
        {"w": np.ones(2, "float16"), "n": 2, "empty": nnx.Param({"x": 1}), "scale": nnx.Param(jnp.ones(2))}
    )
    nnx.update(model, given)
    for made in (model, nnx.merge(nnx.graphdef(model), given)):
        assert (made.w.dtype, made.n.value, made.empty.value) == (jnp.float16, 2, {"x": 1})
        assert nnx.graphdef(made) == nnx.graphdef(model)
        assert made.scale is given.scale.value


def test_a_state_without_arrays_makes_a_model_without():
    """What a function makes of every leaf is no mistake: shardings, labels, what JAX passes to see a structure."""
    graphdef, state = nnx.split(Net())
    assert nnx.merge(graphdef, jax.tree.map(lambda x: "label", state)).a.w.value == "label"
    with pytest.raises(StateMismatchError, match=r"a\.w: missing, expected Param \(float32"):
        nnx.merge(graphdef, nnx.map_state(lambda path, x: None, state).filter(lambda path, x: path != W))


# --- the parts ------------------------------------------------------------------------------------------------------


def test_one_record_two_ways_to_say_it():
    """As a change and as a misfit; the root has a name of its own where one is given."""
    said = {
        Difference(A, "removed", "Param (float)", "nothing"): "a: missing, expected Param (float)",
        Difference(A, "added", "nothing", "Param (float)"): "a: unexpected Param (float)",
        Difference(A, "type", "Param", "Cache"): "a: expected Param, got Cache",
        Difference(A, "metadata", "tag=1", "tag=2"): "a: expected metadata tag=1, got tag=2",
        Difference((), "shape", "(2,)", "()"): "<root>: expected shape (2,), got ()",
    }
    for found, text in said.items():
        assert as_misfit(found) == text
        root = "all" if found.path == () else "a"
        assert as_change(found, "all") == f"{root}: {found.before} became {found.after}"
    with pytest.raises(PrefixError, match=r"^head\n  a: missing, expected Param \(float\)\nremedy$"):
        refuse(list(said)[:1], "head", "remedy", PrefixError)
    refuse([], "head", "remedy")


def test_the_comparison_is_a_parameter():
    """By default a number is an array without axes; everything fits what is not known; in the order of the paths."""
    before = {("b", 10): jnp.ones(()), ("b", 2): ANY_VALUE, ("a",): nnx.Param(1.0), ("c",): "text"}
    after = {("b", 10): 1, ("b", 2): {"x": [1]}, ("a",): nnx.Param(jnp.ones(())), ("A",): 1, ("c",): "other text"}
    assert leaf_differences(before, after) == [Difference(("A",), "added", "nothing", "int")]
    assert leaf_differences(before, after, array_differences)[1:] == [
        Difference(("a",), "type", "float", "float32[]"),
        Difference(("b", 10), "type", "float32[]", "int"),
    ]
    assert misfits((), jnp.ones(3), 1) == [Difference((), "type", "float32[3]", "int")]
