"""Filters, states and traversals: the same operations under flax.nnx and nnxlib give the same results."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")


from .results import same

# flax warns of its own deprecated names, and its tag lookup reads `.value`.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def model(nnx):
    return nnx.State(
        {
            "scale": nnx.Param(jnp.ones(3)),
            "norm": {"mean": nnx.BatchStat(jnp.zeros(3), tag="stats"), "bias": nnx.Param(2.0)},
            "layers": {i: {"kernel": nnx.Param(jnp.full((2, 2), float(i)))} for i in (0, 10, 2)},
        }
    )


PATHS = [(), ("scale",), ("layers", 0, "kernel"), ("layers", 11), ("1", "kernel_2")]
FILTERS = {
    "type": lambda nnx: nnx.Param,
    "base type": lambda nnx: nnx.Variable,
    "array type": lambda nnx: jax.Array,
    "tag": lambda nnx: "stats",
    "everything": lambda nnx: ...,
    "True": lambda nnx: True,
    "False": lambda nnx: False,
    "None": lambda nnx: None,
    "list": lambda nnx: [nnx.BatchStat, "stats"],
    "empty tuple": lambda nnx: (),
    "function": lambda nnx: lambda path, x: len(path) == 1,
    "OfType": lambda nnx: nnx.OfType(nnx.BatchStat),
    "WithTag": lambda nnx: nnx.WithTag("stats"),
    "Any": lambda nnx: nnx.Any(nnx.BatchStat, nnx.PathContains(0)),
    "Any of nothing": lambda nnx: nnx.Any(),
    "All": lambda nnx: nnx.All(nnx.Param, nnx.PathContains("kernel")),
    "All of nothing": lambda nnx: nnx.All(),
    "Not": lambda nnx: nnx.Not(nnx.Param),
    "Not Not": lambda nnx: nnx.Not(nnx.Not(nnx.Param)),
    "De Morgan": lambda nnx: nnx.Not(nnx.Any(nnx.BatchStat, nnx.PathContains(0))),
    "Everything": lambda nnx: nnx.Everything(),
    "Nothing": lambda nnx: nnx.Nothing(),
    "PathContains": lambda nnx: nnx.PathContains("kernel"),
    "PathContains int": lambda nnx: nnx.PathContains(0),
    "PathContains text of int": lambda nnx: nnx.PathContains("0"),
    "PathContains part": lambda nnx: nnx.PathContains("ker", exact=False),
    "PathContains part of int": lambda nnx: nnx.PathContains("1", exact=False),
    "PathContains int as part": lambda nnx: nnx.PathContains(1, exact=False),
    "PathIn": lambda nnx: nnx.filterlib.PathIn(("scale",), ("layers", 0, "kernel")),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_take_the_same(name):
    """Each filter, on each combination of paths and values."""

    def script(nnx):
        predicate = nnx.filterlib.to_predicate(FILTERS[name](nnx))
        values = [nnx.Param(1.0), nnx.BatchStat(1.0, tag="stats"), nnx.Param(2.0, tag="x"), jnp.ones(2), nnx.Param, 1]
        return [bool(predicate(path, value)) for path in PATHS for value in values]

    same(script)


@pytest.mark.parametrize("name", FILTERS)
def test_states_split_the_same(name):
    """Splitting and filtering by each filter, alone and with others."""
    f = FILTERS[name]
    same(lambda nnx: model(nnx).split(f(nnx), ...))
    same(lambda nnx: model(nnx).split(f(nnx)))
    same(lambda nnx: model(nnx).filter(f(nnx)))
    same(lambda nnx: model(nnx).filter(f(nnx), nnx.Param, nnx.Cache))
    same(lambda nnx: model(nnx).flat_state().split(f(nnx), ...))
    same(lambda nnx: nnx.filter_state(model(nnx), nnx.BatchStat, f(nnx)))


SCRIPTS = {
    "equal filters": lambda nnx: nnx.Any(nnx.Param, "a") == nnx.Any(nnx.Param, "a"),
    "`...` first": lambda nnx: nnx.filterlib.filters_to_predicates([..., nnx.Param]),
    "`...` twice": lambda nnx: len(nnx.filterlib.filters_to_predicates([nnx.Param, True, ...])),
    "set as a filter": lambda nnx: nnx.filterlib.to_predicate({nnx.Param}),
    "no filter": lambda nnx: model(nnx).split(),
    "attribute": lambda nnx: [model(nnx).norm.mean, model(nnx).layers[10].kernel, model(nnx)["norm"]["bias"]],
    "missing key": lambda nnx: model(nnx)["zz"],
    "missing attribute": lambda nnx: model(nnx).zz,
    "delete a missing key": lambda nnx: model(nnx).__delitem__("zz"),
    "mapping": lambda nnx: [list(model(nnx)), list(model(nnx).layers), len(model(nnx)), "norm" in model(nnx)],
    "values": lambda nnx: [list(model(nnx).items()), list(model(nnx).values())],
    "empty": lambda nnx: [bool(nnx.State({})), nnx.State({"a": {}}), nnx.State({"a": {}}).flat_state()],
    "pairs": lambda nnx: nnx.State([("a", 1), ("b", {"c": 2})]),
    "get and pop": lambda nnx: [model(nnx).get("zz", 5), model(nnx).pop("scale")],
    "equality": lambda nnx: [nnx.State({"a": {"b": 1}}) == x for x in ({"a": {"b": 1}}, nnx.State({"a": {"b": 2}}), 3)],
    "hash": lambda nnx: hash(nnx.State({})),
    "method names": lambda nnx: [nnx.State({"split": 1})["split"], callable(nnx.State({"split": 1}).split)],
    "raw mapping": lambda nnx: [type(model(nnx).raw_mapping), type(model(nnx).raw_mapping["norm"])],
    "flat state": lambda nnx: nnx.to_flat_state(model(nnx)),
    "flat parts": lambda nnx: [model(nnx).flat_state().paths, model(nnx).flat_state().leaves],
    "flat item": lambda nnx: [model(nnx).flat_state()[1], model(nnx).flat_state()[1:3], len(model(nnx).flat_state())],
    "flat sorted": lambda nnx: nnx.FlatState([(("b", 10), 1), (("b", 2), 2), (("a",), 3)], sort=True),
    "flat unsorted": lambda nnx: nnx.FlatState([(("b",), 1), (("a",), 2)], sort=False),
    "flat merge": lambda nnx: nnx.FlatState.merge([(("z",), 1)], model(nnx).flat_state()),
    "flat nested": lambda nnx: model(nnx).flat_state().to_nested_state(),
    "flat from sorted": lambda nnx: nnx.FlatState.from_sorted_keys_values((("a",), ("b",)), [1, 2]),
    "flat non-exhaustive": lambda nnx: model(nnx).flat_state().split(nnx.Param),
    "from flat": lambda nnx: nnx.from_flat_state({("a", "b"): 1, ("c",): 2}),
    "from flat pairs": lambda nnx: nnx.State.from_flat_path([(("a", "b"), 1), (("c",), 2)]),
    "from flat to dict": lambda nnx: nnx.from_flat_state({("a", "b"): 1}, cls=dict),
    "round trip": lambda nnx: nnx.from_flat_state(nnx.to_flat_state(model(nnx))),
    "merge": lambda nnx: nnx.State.merge(nnx.State({"a": {"x": 1, "y": 2}}), nnx.State({"a": {"y": 3}, "b": 4})),
    "merge parts": lambda nnx: nnx.merge_state(*model(nnx).split(nnx.Param, ...)),
    "merge one": lambda nnx: nnx.State.merge(nnx.State({"a": 1})),
    "or": lambda nnx: nnx.State({"a": 1, "b": {"c": 1}}) | nnx.State({"b": {"c": 2}}),
    "or dict": lambda nnx: nnx.State({"a": 1}) | {"b": 2},
    "minus": lambda nnx: nnx.State({"a": 1, "b": {"c": 1, "d": 2}}) - nnx.State({"b": {"c": 8}}),
    "diff": lambda nnx: nnx.statelib.diff(nnx.State({"a": 1, "b": 3}), nnx.State({"a": 2, "c": 3})),
    "map": lambda nnx: model(nnx).map(lambda path, v: (path, v)),
    "map_state": lambda nnx: nnx.map_state(lambda path, v: type(v), model(nnx)),
    "pure dict": lambda nnx: nnx.to_pure_dict(model(nnx)),
    "pure dict of": lambda nnx: model(nnx).to_pure_dict(lambda v: type(v)),
    "pure dict of empty": lambda nnx: nnx.to_pure_dict(nnx.State({"a": {}})),
    "restore ints": lambda nnx: nnx.restore_int_paths({"a": {"0": 1, "-1": 3, "x": 4, 5: 6}}),
    "restore unknown": lambda nnx: nnx.replace_by_pure_dict(model(nnx), {"zz": 1, "norm": {"bias": 2}}),
    "restore level by leaf": lambda nnx: nnx.replace_by_pure_dict(model(nnx), {"norm": 1}),
    "restore leaf by level": lambda nnx: nnx.replace_by_pure_dict(model(nnx), {"scale": {"x": 1}}),
    "tree map": lambda nnx: jax.tree.map(lambda x: x + 1, model(nnx)),
    "tree map Variables": lambda nnx: jax.tree.map(type, model(nnx), is_leaf=lambda x: isinstance(x, nnx.Variable)),
    "key paths": lambda nnx: [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(model(nnx))],
    "unflatten": lambda nnx: jax.tree.structure(nnx.State({"b": 1, "a": {"c": 2}})).unflatten([None, "x"]),
    "flatten mapping": lambda nnx: nnx.traversals.flatten_mapping({"b": {"c": 1, "d": {}}, "a": 2}),
    "flatten State": lambda nnx: nnx.traversals.flatten_mapping(model(nnx), sep=None),
    "keep empty nodes": lambda nnx: nnx.traversals.flatten_mapping({"b": {"c": 1, "d": {}}}, keep_empty_nodes=True),
    "separator": lambda nnx: nnx.traversals.flatten_mapping({"b": {"c": 1, "d": {}}, "a": 2}, sep="/"),
    "is_leaf": lambda nnx: nnx.traversals.flatten_mapping({"b": {"c": 1}, "a": 2}, is_leaf=lambda p, x: "c" in x),
    "to sequence": lambda nnx: nnx.traversals.flatten_to_sequence({"b": {"c": 1, "d": {}}, "a": 2}),
    "unflatten mapping": lambda nnx: nnx.traversals.unflatten_mapping({("a", "b"): 1, ("c",): 2}),
    "unflatten empty": lambda nnx: nnx.traversals.unflatten_mapping({("a",): nnx.traversals.empty_node}),
    "unflatten separator": lambda nnx: nnx.traversals.unflatten_mapping({"a/b": 1, "c": 2}, sep="/"),
    "unflatten pairs": lambda nnx: nnx.traversals.unflatten_mapping([(("a",), 1)]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_agree(name):
    """The script gives the same result, or an error of the same built-in class."""
    same(SCRIPTS[name])


def test_writes_agree():
    """Keys and attributes set, replaced and deleted at several levels, and restored from pure dicts."""

    def script(nnx):
        s = model(nnx)
        s.norm.bias = 1
        s["norm"]["new"] = 2
        s.extra = {"x": nnx.State({"y": 3})}
        del s["layers"][10]
        view = s.layers
        view[2]["bias"] = 4
        before = s.scale
        s.replace_by_pure_dict({"scale": 5.0, "layers": {"0": {"kernel": 6.0}}})
        s.replace_by_pure_dict({"norm": {"new": 7}}, lambda leaf, value: (leaf, value))
        return s, before, type(s.extra.x), s.scale is before

    same(script)


def test_path_filters_agree():
    """`create_path_filters` groups the same paths under the same values."""

    def script(nnx):
        s = nnx.State({"a": nnx.Param(0), "b": {"c": nnx.Param(None), "d": nnx.Param(0)}})
        made = nnx.statelib.create_path_filters(s)
        paths = [("a",), ("b", "c"), ("b", "d"), ("b",)]
        return [(value, [path for path in paths if f(path, None)]) for f, value in made.items()]

    same(script)
