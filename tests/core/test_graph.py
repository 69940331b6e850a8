"""The graph as a table: pack, build, diff, commit."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.core.graph import Delta, build, check_commit, commit, diff, pack
from nnxlib.core.rows import LEAF, SAME, NodeRow, Ref, VariableRow
from nnxlib.core.static import Const
from nnxlib.core.walk import Walk

from .tied import Embed, Net


def run(f, m):
    """Call f on fresh objects and commit what it did to the live ones, as a transform does."""
    packed = pack(m)
    tree, objects = build(packed.layout, packed.leaves)
    after = diff(packed.layout, packed.leaves, objects, f(tree))
    return commit(packed.layout, after.delta, after.leaves, packed.objects), after.delta


# --- pack ---


def test_the_table_of_the_docstring():
    """One row for each node and Variable, numbered depth first in the order of paths; edges are row numbers."""
    m = Net()
    layout, leaves, objects = pack(m)
    assert layout.rows == (
        NodeRow(
            Net,
            ("embed", "scale", "tied", "table"),
            (("embed", Ref(1)), ("scale", Const.of(0.5)), ("table", LEAF), ("tied", Ref(1))),
            Const.of_items({}),
        ),
        NodeRow(Embed, ("kernel",), (("kernel", Ref(2)),), Const.of_items({})),
        VariableRow(nnx.Param, Const.of_items({})),
    )
    assert (layout.root, layout.variables) == (Ref(0), (2,))
    assert leaves[0] is m.embed.kernel.value
    assert leaves[1] is m.table
    assert objects == [m, m.embed, m.embed.kernel]
    assert (layout.paths, layout.leaf_paths) == (
        ((), ("embed",), ("embed", "kernel")),
        (("embed", "kernel"), ("table",)),
    )


# --- build ---


def test_build_makes_fresh_objects():
    """Same structure, order of attributes and values; all objects new; static values that may be edited are copies."""
    m = Net()
    m.config = nnx.static((bytearray(b"a"),))
    packed = pack(m)
    made, objects = build(packed.layout, packed.leaves)
    assert (list(vars(made)), made.tied is made.embed, made.table is m.table) == (list(vars(m)), True, True)
    assert not {id(x) for x in objects} & {id(x) for x in packed.objects}
    made.config[0].append(1)
    assert (m.config[0], build(packed.layout, packed.leaves)[0].config[0]) == (b"a", b"a")


def test_build_around_given_objects():
    """Rows that are given are used as they are."""
    m = Net()
    packed = pack(m)
    v = nnx.Param(5.0)
    made, _ = build(packed.layout, packed.leaves, {2: v})
    assert made.embed.kernel is v


# --- diff ---


def test_the_delta_of_the_docstring():
    """Values by identity, rows that are new or have other fields, the output; and the leaves that go with them."""
    m = Net()
    del m.table
    packed = pack(m)
    fresh, objects = build(packed.layout, packed.leaves)
    x = jnp.zeros(2)
    fresh.embed.kernel.value, fresh.new = x, Embed()
    after = diff(packed.layout, packed.leaves, objects, fresh.new)
    none = Const.of_items({})
    names = "embed", "scale", "tied", "new"
    assert after.delta == Delta(
        (2,),
        (
            (0, NodeRow(Net, names, (("embed", SAME), ("new", Ref(3)), ("scale", SAME), ("tied", SAME)), none)),
            (3, NodeRow(Embed, ("kernel",), (("kernel", Ref(4)),), none)),
            (4, VariableRow(nnx.Param, none)),
        ),
        Ref(3),
    )
    assert after.owners == [(2, 0), (4, 0)]
    assert all(map(operator.is_, after.leaves, [x, fresh.new.kernel.value]))


def test_no_change_is_an_empty_delta():
    """Reading, and writing back the very same value, is nothing."""

    def f(m):
        m.embed.kernel.value = m.embed.kernel.value
        m.table, m.tied = m.table, m.tied
        m.scale = 0.5

    _, delta = run(f, Net())
    assert (delta.values, delta.rows) == ((), ())


def test_a_value_is_changed_by_identity():
    """Another object counts as changed, also when it is equal."""
    _, delta = run(lambda m: setattr(m.embed.kernel, "value", jnp.ones(2)), Net())
    assert (delta.values, delta.rows) == ((2,), ())


def test_only_changed_fields_are_in_a_row():
    """The others are marked SAME, and their arrays are not returned."""
    m = Net()
    m.other = jnp.ones(100)
    packed = pack(m)
    fresh, objects = build(packed.layout, packed.leaves)
    fresh.table = jnp.ones(3)
    after = diff(packed.layout, packed.leaves, objects, None)
    ((number, row),) = after.delta.rows
    assert (number, {name for name, spec in row.fields if spec is not SAME}) == (0, {"table"})
    assert (len(after.leaves), after.owners) == (1, [(0, 1)])


def test_rows_are_never_reassigned():
    """Old objects keep their numbers, new ones get higher, whatever moves where."""

    def f(m):
        m.new, m.tied = Embed(), None
        m.embed, m.new.old = m.new, m.embed
        return m.new.old, m.new

    m = Net()
    embed = m.embed
    (old, new), delta = run(f, m)
    assert [i for i, _ in delta.rows] == [0, 3, 4]
    assert (old is embed, new is m.embed, m.new.old is embed, m.tied) == (True, True, True, None)


class Pair(nnx.Module):
    """Holds nothing that can change in place but Variables, so what was built of it can be compared by identity."""

    def __init__(self):
        self.first, self.second = Embed(), Embed()
        self.rate, self.act = 0.1, jnp.tanh
        self.parts = nnx.List([nnx.Param(1.0, note="a"), nnx.Dict(x=nnx.Param(2.0))])


class Mixed(Pair):
    """A Pair with more, which has to be looked into."""

    def __init__(self):
        super().__init__()
        self.second.config = (bytearray(b"a"),)
        self.table, self.pytree = jnp.ones(2), (nnx.Param(3.0), 1)


def _reorder(m):
    rate = m.rate
    del m.rate
    m.rate = rate


EDITS = {
    "nothing": lambda m: None,
    "read": lambda m: m.first.kernel.value,
    "value": lambda m: setattr(m.first.kernel, "value", jnp.zeros(2)),
    "equal attribute": lambda m: setattr(m, "rate", float("0.1")),
    "attribute": lambda m: setattr(m, "rate", 0.2),
    "attribute past setattr": lambda m: object.__setattr__(m, "act", jnp.sin),
    "attribute by vars": lambda m: vars(m).update(rate=0.3),
    "new attribute": lambda m: setattr(m.second, "note", "b"),
    "array": lambda m: setattr(m, "rate", jnp.ones(1)),
    "deleted": lambda m: delattr(m, "act"),
    "order": _reorder,
    "class": lambda m: setattr(m.second, "__class__", Net),
    "marked": lambda m: setattr(m, "rate", nnx.static(0.1)),
    "exchanged": lambda m: setattr(m, "first", m.second),
    "new node": lambda m: setattr(m, "first", Embed()),
    "Variable": lambda m: setattr(m.first, "kernel", nnx.Param(m.first.kernel.value)),
    "type of a Variable": lambda m: setattr(m.first.kernel, "__class__", nnx.BatchStat),
    "metadata": lambda m: m.parts[0].set_metadata(note="c"),
    "appended": lambda m: m.parts.append(nnx.Param(3.0)),
    "reversed": lambda m: m.parts.reverse(),
    "key": lambda m: m.parts[1].update(y=1),
    "returned": lambda m: (m.second, {"first": m.first}, m.first.kernel.value),
    "returned anew": lambda m: nnx.List([m.first, Embed()]),
}


IN_PLACE = {
    "static value": lambda m: m.second.config[0].extend(b"b"),
    "array of a node": lambda m: setattr(m, "table", jnp.zeros(2)),
    "Variable in a pytree": lambda m: setattr(m.pytree[0], "value", 4.0),
    "pytree": lambda m: setattr(m, "pytree", (m.pytree[0], 2)),
}


CASES = {f"{make.__name__}, {name}": (make, edit) for make in (Pair, Mixed) for name, edit in EDITS.items()}
CASES |= {f"Mixed, {name}": (Mixed, edit) for name, edit in IN_PLACE.items()}


@pytest.mark.parametrize(("make", "edit"), CASES.values(), ids=CASES)
def test_a_glance_at_what_was_built_misses_nothing(make, edit, monkeypatch):
    """Where objects hold what they were given they are not described again; the result is that of describing them."""
    quick = run(edit, make())[1]
    monkeypatch.setattr("nnxlib.core.blueprint.Blueprint.as_built", lambda *args: set())
    assert quick == run(edit, make())[1]


@pytest.mark.parametrize(
    ("make", "edit", "rows"),
    [
        (Pair, EDITS["value"], []),
        (Pair, EDITS["attribute"], [0]),
        (Pair, EDITS["metadata"], [4]),
        (Mixed, EDITS["value"], [0, 8]),
    ],
    ids=["value", "attribute", "metadata", "arrays and mutable values beside it"],
)
def test_what_is_as_it_was_built_is_not_described_again(make, edit, rows, monkeypatch):
    """That would take most of the time that a trace takes of ours."""
    revisited, revisit = [], Walk.revisit
    monkeypatch.setattr(Walk, "revisit", lambda self, i, path: (revisited.append(i), revisit(self, i, path))[1])
    run(edit, make())
    assert revisited == rows


def test_forced_leaves_count_as_changed():
    """Variables that are donated come back also when unchanged; arrays of nodes are not donated."""
    packed = pack(Net())
    _, objects = build(packed.layout, packed.leaves)
    after = diff(packed.layout, packed.leaves, objects, None, forced=(0, 1))
    assert (after.delta.values, after.delta.rows, len(after.leaves)) == ((2,), (), 1)


def test_the_leaves_of_a_delta_are_in_the_order_of_a_layout():
    """Values of Variables come first, those of new ones among them; then arrays in changed fields; then the output."""
    m = Net()
    m.other, m.pair = jnp.ones(1), (jnp.ones(1), jnp.ones(2))
    packed = pack(m)
    fresh, objects = build(packed.layout, packed.leaves)
    fresh.embed.kernel.value, fresh.pair, fresh.new = jnp.zeros(2), (jnp.ones(3), fresh.pair[1]), nnx.Param(1.0)
    after = diff(packed.layout, packed.leaves, objects, (fresh, jnp.ones(4), jnp.ones(5)))
    changed = [("embed", "kernel"), ("new",), ("pair", 0), ("pair", 1)]
    assert after.leaf_paths == (*changed, ("<output>", 1), ("<output>", 2))
    assert after.owners == after.delta.owners(after.rows) == [(2, 0), (3, 0), (0, 1), (0, 2), (-1, 0), (-1, 1)]
    assert [after.walk.cells[i].value for i in (2, 3)] == after.leaves[:2]
    assert after.leaves[2:4] == [*fresh.pair]


def test_deltas_compare_and_hash_by_value():
    """They are static data in the output of a JAX function."""
    deltas = [run(lambda m: setattr(m, "scale", 2.0), Net())[1] for _ in range(2)]
    assert deltas[0] == deltas[1]
    assert len(set(deltas)) == 1
    assert deltas[0] != run(lambda m: setattr(m, "scale", 3.0), Net())[1]


# --- commit ---

PROGRAMS = {
    "value": lambda m: setattr(m.embed.kernel, "value", jnp.full(2, 5.0)),
    "array": lambda m: setattr(m, "table", jnp.ones(7)),
    "static": lambda m: setattr(m, "scale", "x"),
    "attach": lambda m: setattr(m, "more", [Embed(), {"a": nnx.Param(1.0)}]),
    "detach": lambda m: delattr(m, "tied"),
    "swap": lambda m: setattr(m, "embed", Embed()),
    "share": lambda m: setattr(m, "third", m.embed.kernel),
    "cycle": lambda m: setattr(m.embed, "parent", m),
    "class": lambda m: setattr(m.embed, "__class__", Net),
    "Variable class": lambda m: setattr(m.embed.kernel, "__class__", nnx.Cache),
    "metadata": lambda m: m.embed.kernel.set_metadata(a=[1]),
    "order": lambda m: (delattr(m, "embed"), setattr(m, "embed", m.tied)),
    "tuple": lambda m: setattr(m, "pair", (m.table, nnx.Param(2.0), {"k": m.embed})),
    "mode": lambda m: m.eval(),
    "declared": lambda m: setattr(m, "scale", nnx.data(3)),
    "move": lambda m: (setattr(m, "kernel", m.embed.kernel), delattr(m.embed, "kernel")),
    "pytree value": lambda m: setattr(m.embed.kernel, "value", {"a": jnp.ones(1), "b": (jnp.zeros(2),)}),
    "None": lambda m: setattr(m, "embed", None),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_commit_does_to_live_objects_what_was_done_to_fresh_ones(program):
    """The graph afterwards is that of a direct run, and objects that stay are the very same."""
    live, direct = Net(), Net()
    live.deterministic = direct.deterministic = False
    old, old_direct = pack(live).objects, pack(direct).objects
    run(program, live)
    program(direct)
    a, b = pack(live), pack(direct)
    assert a.layout is b.layout
    assert all(map(np.array_equal, jax.tree.leaves(a.leaves), jax.tree.leaves(b.leaves)))
    assert a.objects[0] is live
    place = lambda x, objects: [k for k, y in enumerate(objects) if x is y]
    assert [place(x, old) for x in a.objects] == [place(y, old_direct) for y in b.objects]
    assert list(vars(live)) == list(vars(direct))


def test_untouched_fields_keep_the_very_objects():
    """Committing one field leaves the others what they are, by identity."""
    m = Net()
    m.config, m.name = [1, 2], object()
    before = dict(vars(m))
    run(lambda m: setattr(m, "scale", 2.0), m)
    after = dict(vars(m))
    assert [name for name in before if before[name] is not after[name]] == ["scale"]


def test_outputs_refer_to_live_objects():
    """What a function returns of its inputs is the caller's object, wherever it stands in the output."""
    m = Net()
    out, _ = run(lambda m: {"a": [m.embed, (m, 3)], "k": m.embed.kernel}, m)
    assert (out["a"][0] is m.embed, out["a"][1][0] is m, out["k"] is m.embed.kernel) == (True, True, True)


def test_commit_checks_before_the_first_write():
    """A Delta that touches an object of another trace is refused as a whole, naming path and attribute."""
    model = Net()
    before = dict(vars(model)), model.embed.kernel.value

    @jax.jit
    def f(x):
        inside = nnx.Dict(v=nnx.Param(x), model=model)
        packed = pack(inside)
        fresh, objects = build(packed.layout, packed.leaves)
        fresh.v.value, fresh.model.embed.kernel.value, fresh.model.scale = x + 1, x, 7
        after = diff(packed.layout, packed.leaves, objects, None)
        with pytest.raises(
            nnx.TraceContextError, match=r"the new value of the Param at model\.embed\.kernel, which is "
        ):
            commit(packed.layout, after.delta, after.leaves, packed.objects)
        with pytest.raises(nnx.TraceContextError, match=r"attribute 'scale' of the Net at model\b"):
            check_commit(packed.layout, Delta((), after.delta.rows, after.delta.root), packed.objects)
        assert inside.v.value is x
        return x

    f(1.0)
    assert (dict(vars(model)), model.embed.kernel.value) == before


def test_commit_calls_user_code_before_the_first_write():
    """Metadata that can be edited are copied by the __deepcopy__ of their class, which may fail."""

    class Fails:
        __hash__ = None

        def __deepcopy__(self, memo):
            made = Fails()
            if fail:
                raise MemoryError
            return made

    fail = False
    model = Net()
    packed = pack(model)
    fresh, objects = build(packed.layout, packed.leaves)
    fresh.embed.kernel.value, fresh.scale = jnp.ones(2), 7
    fresh.embed.kernel.set_metadata(note=Fails())
    after = diff(packed.layout, packed.leaves, objects, None)
    before = dict(vars(model)), model.embed.kernel.value, model.embed.kernel.get_metadata()
    fail = True
    with pytest.raises(MemoryError):
        commit(packed.layout, after.delta, after.leaves, packed.objects)
    assert (dict(vars(model)), model.embed.kernel.value, model.embed.kernel.get_metadata()) == before


def test_large_tables():
    """10,000 nodes in a chain and 10,000 Variables side by side pack, build and compare without recursion."""
    node = None
    for _ in range(10_000):
        node = nnx.Dict(next=node)
    wide = nnx.List([nnx.Param(1.0) for _ in range(10_000)])
    for m in (node, wide):
        packed = pack(m)
        _, objects = build(packed.layout, packed.leaves)
        after = diff(packed.layout, packed.leaves, objects, None)
        assert (len(packed.objects) >= 10_000, after.delta.values, after.delta.rows) == (True, (), ())
    while node is not None:  # a chain this long is taken apart by hand: Python frees it recursively
        node = node.pop("next")
