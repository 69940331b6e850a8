"""List and Dict: a list and a dict whose changes are seen, that refuse foreign traces, and adopt what is put in."""

import copy
import dataclasses
import enum
import json
import operator
import pickle
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx


def param(x=0.0):
    return nnx.Param(jnp.asarray(x))


def structure(node):
    return nnx.graphdef(node)


# --- List: behaves as list does ---

LIST_METHODS = {
    "append": lambda x: x.append(9),
    "append a list": lambda x: x.append([1, {"a": 2}]),
    "extend": lambda x: x.extend(i for i in (7, 8)),
    "insert": lambda x: x.insert(1, 9),
    "insert at the end": lambda x: x.insert(-1, [9]),
    "pop": lambda x: x.pop(),
    "pop first": lambda x: x.pop(0),
    "remove": lambda x: x.remove(2),
    "clear": lambda x: x.clear(),
    "reverse": lambda x: x.reverse(),
    "sort": lambda x: x.sort(key=lambda i: -i, reverse=False),
    "set item": lambda x: operator.setitem(x, 0, 9),
    "set last": lambda x: operator.setitem(x, -1, [9]),
    "set slice": lambda x: operator.setitem(x, slice(0, 2), [7, [8], 9]),
    "set extended slice": lambda x: operator.setitem(x, slice(0, None, 2), iter([7, 8])),
    "delete item": lambda x: operator.delitem(x, 1),
    "delete slice": lambda x: operator.delitem(x, slice(1, None)),
    "+=": lambda x: operator.iadd(x, (4, 5)) is x,
    "*=": lambda x: operator.imul(x, 2) is x,
}


@pytest.mark.parametrize("method", LIST_METHODS.values(), ids=LIST_METHODS.keys())
def test_list_methods_do_what_those_of_list_do_and_are_seen(method):
    """Result and contents are those of a plain list; a jitted function sees the change."""
    plain, ours = [3, 1, 2], nnx.List([3, 1, 2])
    before = structure(ours)
    total = nnx.jit(lambda x: jnp.asarray(len(x)))
    assert total(ours).item() == 3
    assert method(ours) == method(plain)
    assert (list(ours), type(ours)) == (plain, nnx.List)
    assert structure(ours) != before
    assert total(ours).item() == len(plain)


def test_every_mutating_method_of_list_is_covered():
    """No way to change a list goes unnoticed: the methods of list that List does not override are read-only."""
    read_only = (
        "index count __contains__ __len__ __iter__ __reversed__ __add__ __mul__ __rmul__ __lt__ __le__ __gt__ __ge__ "
        "__sizeof__ __class_getitem__ __getattribute__ __doc__ __new__ __init__ __repr__ copy __getitem__ __hash__ "
        "__eq__ __ne__"
    )
    assert {name for name in vars(list) if getattr(nnx.List, name) is getattr(list, name)} <= set(read_only.split())


def test_every_mutating_method_of_dict_is_covered():
    """The same for dict."""
    read_only = (
        "get keys items values __contains__ __len__ __iter__ __reversed__ __ror__ __lt__ __le__ __gt__ __ge__ "
        "__sizeof__ __class_getitem__ __getattribute__ __doc__ __new__ __init__ __repr__ copy __getitem__ __hash__ "
        "fromkeys __eq__ __ne__"
    )
    assert {name for name in vars(dict) if getattr(nnx.Dict, name) == getattr(dict, name)} <= set(read_only.split())


def test_reading_a_list():
    """Indexing, slices, iteration, membership, arithmetic and comparison are those of list."""
    x = nnx.List([1, 2, 3])
    assert (x[0], x[-1], x[1:], type(x[1:]), len(x), 2 in x, x.index(3), x.count(1)) == (
        1,
        3,
        [2, 3],
        nnx.List,
        3,
        True,
        2,
        1,
    )
    assert (x + [4], [0] + x, x * 2, list(reversed(x)), x == [1, 2, 3], x != [1], x < [2]) == (
        [1, 2, 3, 4],
        [0, 1, 2, 3],
        [1, 2, 3, 1, 2, 3],
        [3, 2, 1],
        True,
        True,
        True,
    )
    assert (isinstance(x, list), bool(nnx.List()), nnx.List() == []) == (True, False, True)
    a, *rest = x
    assert (a, rest) == (1, [2, 3])


def test_lists_are_sequences_to_jax_numpy_and_json():
    """jnp, np and json take a List where they take a list."""
    x = nnx.List([1, 2])
    assert jnp.zeros(x).shape == (1, 2)
    assert np.array(x).tolist() == [1, 2]
    assert jnp.array(x).tolist() == [1, 2]
    assert jnp.stack(nnx.List([jnp.ones(2), jnp.zeros(2)])).shape == (2, 2)
    assert json.dumps(nnx.Dict(a=x)) == '{"a": [1, 2]}'


def test_a_list_is_hashed_by_identity():
    """A node may be a key, though it compares as a list."""
    a, b = nnx.List([1]), nnx.List([1])
    assert a == b
    assert len({id(a): 1, id(b): 2}) == len({a: 1}) + 1


# --- Dict: behaves as dict does ---

DICT_METHODS = {
    "set item": lambda x: operator.setitem(x, "c", [1]),
    "replace item": lambda x: operator.setitem(x, "a", 9),
    "delete item": lambda x: operator.delitem(x, "a"),
    "pop": lambda x: x.pop("a"),
    "pop default": lambda x: (x.pop("zzz", 5), x.pop("b")),
    "popitem": lambda x: x.popitem(),
    "clear": lambda x: x.clear(),
    "setdefault": lambda x: x.setdefault("c", [1]),
    "update": lambda x: x.update({"a": 7}, d=[8]),
    "update with pairs": lambda x: x.update([("e", 1)]),
    "|=": lambda x: operator.ior(x, {"f": 1}) is x,
    "int key": lambda x: operator.setitem(x, 3, 1),
}


@pytest.mark.parametrize("method", DICT_METHODS.values(), ids=DICT_METHODS.keys())
def test_dict_methods_do_what_those_of_dict_do_and_are_seen(method):
    """Result, contents and order are those of a plain dict; a jitted function sees the change."""
    plain, ours = {"a": 1, "b": 2}, nnx.Dict(a=1, b=2)
    before = structure(ours)
    assert method(ours) == method(plain)
    assert list(ours.items()) == list(plain.items())
    assert structure(ours) != before
    assert nnx.jit(lambda x: len(x))(ours).item() == len(plain)


def test_setdefault_of_a_present_key_and_without_default():
    """setdefault returns the adopted List that is stored, so that changes to it are seen."""
    x = nnx.Dict()
    x.setdefault("a", []).append(param())
    assert x.setdefault("a", []) is x["a"]
    assert (len(x["a"]), x.setdefault("b")) == (1, None)


def test_reading_a_dict():
    """Lookup, views, merging, comparison and order are those of dict; items are attributes too."""
    x = nnx.Dict({"b": 1, "a": 2}, c=3)
    assert (x["a"], x.b, x.get("z"), x.get("z", 0), list(x), "a" in x, len(x)) == (
        2,
        1,
        None,
        0,
        ["b", "a", "c"],
        True,
        3,
    )
    assert (x | {"d": 4}, type(x | {}), {"d": 4, "a": 0} | x) == (
        {"b": 1, "a": 2, "c": 3, "d": 4},
        nnx.Dict,
        {"d": 4, "a": 2, "b": 1, "c": 3},
    )
    assert (x == {"a": 2, "b": 1, "c": 3}, x != {}, isinstance(x, dict), {**x}) == (True, True, True, dict(x))
    assert list(reversed(x)) == ["c", "a", "b"]


def test_attributes_of_a_dict_are_its_items():
    """Setting and deleting attributes does so with items; a missing one lists the keys."""
    x = nnx.Dict(a=1)
    x.layers = [param()]
    assert type(x["layers"]) is nnx.List
    assert {"a", "layers", "update"} <= {*dir(x)}
    del x.a
    with pytest.raises(AttributeError, match=r"no attribute or key 'a'; keys: \['layers'\]"):
        x.a
    with pytest.raises(AttributeError, match="'b'"):
        del x.b
    assert not hasattr(x, "a")
    nnx.jit(lambda x: x.pop("layers"))(x)
    assert dict(x) == {}


def test_mixed_int_and_str_keys():
    """Keys of several types have paths, States, and a stable order; they go through jit and back."""
    x = nnx.Dict({10: param(1), "a": param(2), 2: param(3), "1": param(4)})
    assert list(nnx.state(x)) == [2, 10, "1", "a"]
    assert [path for path, _ in nnx.iter_graph(x)][:-1] == [(2,), (10,), ("1",), ("a",)]

    def double(x):
        for v in x.values():
            v *= 2

    nnx.jit(double)(x)
    assert [v.value.item() for v in x.values()] == [2, 4, 6, 8]
    assert list(nnx.merge(*nnx.split(x))) == [10, "a", 2, "1"]


def test_a_list_takes_values_by_name():
    """As flax.nnx does; a built-in list does not."""
    x = nnx.List([1])
    x.append(value=3)
    x.insert(value=2, index=1)
    assert x == [1, 2, 3]


def test_insertion_order_survives():
    """Order is part of what a user can see: it comes back from merge, jit, copies, and differs in the GraphDef."""
    a, b = nnx.Dict(x=param(), y=param()), nnx.Dict(y=param(), x=param())
    assert structure(a) != structure(b)
    for made in (nnx.merge(*nnx.split(b)), copy.deepcopy(b), nnx.clone(b), nnx.jit(lambda b: nnx.clone(b))(b)):
        assert list(made) == ["y", "x"]


# --- adopting ---


def test_plain_containers_are_adopted_by_every_way_in():
    """Whatever way a plain list or dict comes in, at any depth, it becomes List or Dict."""
    x = nnx.List([[1], ({"a": [2]},)])
    x.append([1])
    x.insert(0, {"a": 1})
    x.extend([[1]])
    x += [[1]]
    x[0:1] = [[1], [2]]
    x[1] = {"b": [1]}
    d = nnx.Dict({"a": [1]}, b={"c": []})
    d["d"], d.e = [1], [2]
    d.update(f=[1])
    d |= {"g": [1]}
    d.setdefault("h", [1])

    def plain(node, path=()):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            if type(value) in (list, dict):
                yield (*path, key)
            if isinstance(value, list | dict | tuple):
                yield from plain(value, (*path, key))

    assert list(plain(x)) == []
    assert list(plain(d)) == []


def test_a_container_that_is_a_node_already_is_kept():
    """Assigning a List keeps that very List, so two attributes may share one."""
    shared = nnx.List([param()])
    m = nnx.Dict(a=shared, b=shared)
    assert m.a is m.b is shared
    assert len(jax.tree.leaves(nnx.state(m))) == 1


def test_a_list_that_contains_itself():
    """A cycle in a plain list becomes a cycle of Lists."""
    x = [1]
    x.append(x)
    m = nnx.Dict(x=x)
    assert m.x[1] is m.x
    assert nnx.merge(*nnx.split(m)).x[1][1][0] == 1


@pytest.mark.parametrize("make", [lambda x: nnx.List([x]), lambda x: nnx.Dict(a=x)])
def test_explicit_declarations_are_unwrapped_in_containers(make):
    """`nnx.List([nnx.data(x)])` and `nnx.Dict(a=nnx.static(x))` hold the value itself."""
    array = jnp.ones(2)
    (value,) = (x for _, x in make(nnx.data(array))._nnx_children())
    assert value is array
    (value,) = (x for _, x in make(nnx.static("a"))._nnx_children())
    assert value == "a"


def declared_list():
    return nnx.List([nnx.data(1), 2, nnx.static(3), nnx.data(4)])


def test_items_are_declared_data_or_static():
    """`nnx.List([nnx.data(1)])`: a number that is traced, through split and merge, transforms and JAX."""
    x = declared_list()
    assert (list(x), jax.tree.leaves(x), nnx.to_pure_dict(nnx.state(x))) == ([1, 2, 3, 4], [1, 4], {0: 1, 3: 4})
    assert list(nnx.merge(*nnx.split(x))) == list(jax.tree.map(lambda n: n, x)) == [1, 2, 3, 4]
    assert nnx.jit(lambda x: x[0] + x[1])(x) == 3
    assert jax.tree.leaves(nnx.List([nnx.static(1), nnx.static(2)])) == []
    m = nnx.Dict(x=[nnx.data(1), {"a": nnx.data(2), "b": 3}])
    assert nnx.to_pure_dict(nnx.state(m)) == {"x": {0: 1, 1: {"a": 2}}}
    assert nnx.jit(lambda x: x.append(nnx.data(5)))(x) is None
    assert jax.tree.leaves(x) == [1, 4, 5]


@pytest.mark.parametrize(
    ("change", "leaves"),
    {
        "append": (lambda x: x.append(nnx.data(9)), [1, 4, 9]),
        "append a list": (lambda x: x.append([5]), [1, 4]),
        "extend": (lambda x: x.extend([8, nnx.data(9)]), [1, 4, 9]),
        "extend by a List": (lambda x: x.extend(declared_list()), [1, 4, 1, 4]),
        "insert": (lambda x: x.insert(0, 9), [1, 4]),
        "insert data": (lambda x: x.insert(1, nnx.data(9)), [1, 9, 4]),
        "pop": (lambda x: x.pop(0), [4]),
        "delete": (lambda x: x.__delitem__(slice(0, 2)), [4]),
        "remove": (lambda x: x.remove(1), [4]),
        "set": (lambda x: x.__setitem__(0, 7), [7, 4]),
        "set at the end": (lambda x: x.__setitem__(-1, 7), [1, 7]),
        "set data": (lambda x: x.__setitem__(1, nnx.data(7)), [1, 7, 4]),
        "set static": (lambda x: x.__setitem__(0, nnx.static(7)), [4]),
        "set a slice": (lambda x: x.__setitem__(slice(0, 1), [7, nnx.data(8)]), [8, 4]),
        "set a slice by an iterator": (lambda x: x.__setitem__(slice(0, 1), iter([7, nnx.data(8)])), [8, 4]),
        "reverse": (lambda x: x.reverse(), [4, 1]),
        "sort": (lambda x: x.sort(key=lambda n: -n), [4, 1]),
        "repeat": (lambda x: x.__imul__(2), [1, 4, 1, 4]),
        "clear": (lambda x: (x.clear(), x.append(nnx.data(1)), x.append(2)), [1]),
        "clear and extend": (lambda x: (x.clear(), x.extend([2, nnx.data(1)])), [1]),
        "clear and set a slice": (lambda x: (x.clear(), x.__setitem__(slice(0, 0), [2, nnx.data(1)])), [1]),
    }.values(),
)
def test_what_is_declared_goes_with_the_item(change, leaves):
    """Items move, and are data or static at their new place; what is put in place of one is as that was."""
    x = declared_list()
    change(x)
    assert jax.tree.leaves(x) == leaves
    assert jax.tree.leaves(nnx.List(x)) == jax.tree.leaves(x[:]) == jax.tree.leaves(x.copy()) == leaves


def test_a_declaration_of_one_item_is_of_no_other():
    """An array beside a number that was declared is data in every copy; attributes of a List stay what they were."""
    items = [nnx.data(1), jnp.float32(2), "a"]
    x, d = nnx.List(items), nnx.Dict(zip("abc", items, strict=True))
    pickled = [pickle.loads(pickle.dumps(node)) for node in (x, d)]
    for copied in (nnx.List(x), x[:], x.copy(), d.copy(), *pickled, *map(copy.copy, (x, d)), *map(nnx.clone, (x, d))):
        assert jax.tree.leaves(copied) == [1, 2]
    x.steps = nnx.data(3)
    x.append(nnx.data(4))
    x[0] = nnx.static(5)
    assert nnx.to_pure_dict(nnx.state(x)) == {1: 2, 3: 4, "steps": 3}


def test_what_is_declared_of_the_items_of_a_dict():
    """It holds for what is set later, and ends with the item."""
    d = nnx.Dict(a=nnx.data(1), b=2)
    d["a"] = 5
    d.update(c=nnx.data(3))
    assert (jax.tree.leaves(d), jax.tree.leaves(d.copy()), d.setdefault("b", nnx.data(7))) == ([5, 3], [5, 3], 2)
    assert jax.tree.leaves(d) == [5, 3]
    del d["a"]
    d["a"] = 6
    assert jax.tree.leaves(d) == [3]


def test_a_declaration_against_the_value_of_an_item_of_a_tuple_is_refused():
    """A tuple has no place for it; the error says what to do instead."""
    m = nnx.Dict()
    for put in (lambda: nnx.List([(nnx.data(0),)]), lambda: setattr(m, "x", [1, (nnx.data(0),)])):
        with pytest.raises(TypeError, match=r"nnx.data\(0\) is put into a tuple.*nnx.Variable"):
            put()
    assert dict(m) == {}
    assert nnx.List([(nnx.static("a"),)])[0] == ("a",)


# --- in a graph ---


def test_lists_of_lists_change_over_time():
    """Layers appended, removed and moved at any depth are seen by one jitted function, in and out."""
    m = nnx.Dict(grid=[[param(1), param(2)], [param(3)]])
    total = nnx.jit(lambda m: sum(v.value for row in m.grid for v in row))
    assert total(m).item() == 6
    m.grid[1].append(param(4))
    m.grid.append([param(5)])
    assert total(m).item() == 15
    m.grid[0].pop()
    moved = m.grid.pop(0)
    m.grid[-1] += moved
    assert total(m).item() == 13

    def inside(m):
        m.grid[0].reverse()
        m.grid.append([m.grid[0].pop(), param(10)])

    kept = m.grid[0]
    first, last = kept
    nnx.jit(inside)(m)
    assert (m.grid[0] is kept, next(iter(kept)) is last, m.grid[-1][0] is first, total(m).item()) == (
        True,
        True,
        True,
        23,
    )


def test_a_list_holds_anything():
    """Variables, arrays, Modules, None, numbers, functions and nested containers side by side."""
    x = nnx.List([param(), jnp.ones(2), nnx.Dict(a=param()), None, 3, jnp.tanh, ("a", jnp.ones(1)), {"b": [None]}])
    graphdef, state = nnx.split(x)
    back = nnx.merge(graphdef, state)
    assert nnx.graphdef(back) == graphdef
    assert [path for path, _ in state.flat_state()] == [(0,), (1,), (2, "a"), (6, 1)]
    assert back[3:6] == [None, 3, jnp.tanh]


def test_list_paths_are_in_numerical_order():
    """Item 10 comes after item 2, in states, iteration and leaves."""
    x = nnx.List([param(i) for i in range(12)])
    assert list(nnx.state(x)) == list(range(12))
    assert [leaf.item() for leaf in jax.tree.leaves(x)] == list(range(12))
    assert [key for key, _ in nnx.iter_children(x)] == list(range(12))


# --- traces ---


@pytest.mark.parametrize("method", [*LIST_METHODS.values()], ids=LIST_METHODS.keys())
def test_a_list_refuses_changes_from_another_trace(method):
    """Each method raises under a raw transform, naming the path, and the list stays as it is."""
    model = nnx.Dict(sub=nnx.Dict(x=[3, 1, 2]))
    with pytest.raises(nnx.TraceContextError, match=r"change the items \(\w+\) of List at model\.sub\.x"):
        jax.jit(lambda _: method(model.sub.x))(1.0)
    assert model.sub.x == [3, 1, 2]


@pytest.mark.parametrize("method", [*DICT_METHODS.values()], ids=DICT_METHODS.keys())
def test_a_dict_refuses_changes_from_another_trace(method):
    """The same for Dict."""
    model = nnx.List([nnx.Dict(a=1, b=2)])
    with pytest.raises(nnx.TraceContextError, match=r"change the items \(\w+\) of Dict at model\[0\]"):
        jax.jit(lambda _: method(model[0]))(1.0)
    assert list(model[0].items()) == [("a", 1), ("b", 2)]


def test_a_change_that_raises_changes_nothing():
    """pop of an empty List, a missing key, a slice of the wrong size: the error of the built-in type."""
    x, d = nnx.List(), nnx.Dict(a=1)
    for bad, error in [
        (x.pop, IndexError),
        (lambda: x.remove(1), ValueError),
        (lambda: operator.setitem(x, slice(0, 2, 2), [1, 2]), ValueError),
        (lambda: d.pop("b"), KeyError),
        (lambda: operator.delitem(d, "b"), KeyError),
    ]:
        with pytest.raises(error):
            bad()
    assert (list(x), dict(d)) == ([], {"a": 1})


def test_a_sort_that_raises_halfway_is_seen():
    """Whatever order list.sort leaves behind is the one that a jitted function sees."""

    class Odd(int):
        def __lt__(self, other):
            if other == 1:
                raise RuntimeError("no")
            return int(self) < int(other)

    x = nnx.List([Odd(3), Odd(2), Odd(1), Odd(0)])
    weigh = nnx.jit(lambda x: sum(i * 10**k for k, i in enumerate(x)))
    assert weigh(x).item() == 123
    with pytest.raises(RuntimeError):
        x.sort()
    assert weigh(x).item() == sum(i * 10**k for k, i in enumerate(x))


# --- copies ---


@pytest.mark.parametrize(
    "copier",
    [
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: cloudpickle.loads(cloudpickle.dumps(x)),
        nnx.clone,
    ],
    ids=["deepcopy", "pickle", "cloudpickle", "clone"],
)
def test_deep_copies(copier):
    """Contents, nesting, sharing and cycles survive; the copy is apart."""
    shared = param(1)
    x = nnx.List([nnx.Dict(a=shared), shared, [1, 2]])
    x.append(x)
    y = copier(x)
    assert (type(y), type(y[0]), type(y[2]), y[0].a is y[1], y[3] is y) == (nnx.List, nnx.Dict, nnx.List, True, True)
    y[1].value = jnp.zeros(())
    y[2].append(3)
    assert (x[1].value.item(), x[2], structure(y) == structure(x)) == (1, [1, 2], False)


def test_shallow_copies():
    """copy.copy and .copy() make another List or Dict with the same items."""
    x, d = nnx.List([param()]), nnx.Dict(a=param())
    for made in (copy.copy(x), x.copy(), x[:]):
        assert (type(made), made is not x, made[0] is x[0]) == (nnx.List, True, True)
    for made in (copy.copy(d), d.copy()):
        assert (type(made), made is not d, made["a"] is d["a"]) == (nnx.Dict, True, True)


def test_subclasses():
    """A subclass of List or Dict keeps its class and methods through merge, jit and copies."""

    class Stack(nnx.List):
        def __call__(self, x):
            for layer in self:
                x = x * layer
            return x

    m = nnx.Dict(stack=Stack([param(2), param(3)]))
    assert nnx.jit(lambda m, x: m.stack(x))(m, 1.0).item() == 6
    assert type(nnx.merge(*nnx.split(m)).stack) is Stack
    assert type(copy.deepcopy(m).stack) is Stack


class Named(nnx.List):
    def __init__(self, items, name):
        super().__init__(items)
        self.name, self.scale = name, param(2)


def test_a_list_may_have_attributes():
    """They are data or static as those of a Module, come after the items, and stay through every copy and transform."""
    m = Named([param(3)], ("a", 0))
    assert nnx.to_pure_dict(nnx.state(m)) == {0: 3, "scale": 2}
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(m)] == [
        "[0].value",
        ".scale.value",
    ]
    for copied in (nnx.clone(m), copy.deepcopy(m), copy.copy(m), pickle.loads(pickle.dumps(m))):
        assert (type(copied), copied.name, copied.scale.value, len(copied)) == (Named, ("a", 0), 2, 1)
    assert (type(m[:1]), type(m.copy()), len(m[:1])) == (nnx.List, nnx.List, 1)

    @nnx.jit
    def step(m):
        m.scale[...] += m[0]
        m.steps = nnx.data(1)
        return len(m.name)

    assert (step(m).item(), m.scale.value.item(), m.steps.item()) == (2, 5, 1)
    m.name = ()
    nnx.jit(lambda m: delattr(m, "steps"))(m)
    assert not hasattr(m, "steps")
    assert (step(m).item(), m.scale.value.item()) == (0, 8)
    with pytest.raises(nnx.TraceContextError, match=r"Cannot mutate 'Named' .* to set attribute 'name' of Named"):
        jax.eval_shape(lambda: setattr(m, "name", "b"))


def test_lists_of_settings_with_other_attributes_are_other_settings():
    """A List without data is static for raw JAX, and its attributes are part of what is compared."""
    m = nnx.Dict(sizes=nnx.List([1, 2]), x=jnp.ones(1))
    scaled = jax.jit(lambda m: m.x * getattr(m.sizes, "factor", 0))
    assert scaled(m).item() == 0
    vars(m.sizes)["factor"] = 3
    assert scaled(m).item() == 3


def test_class_can_be_changed():
    """`x.__class__ = Subclass` is a change of structure that a jitted function sees, and no item."""

    class Stack(nnx.List):
        __slots__ = ()
        height = 5

    class Table(nnx.Dict):
        __slots__ = ()
        height = 6

    height = nnx.jit(lambda x: getattr(x, "height", 0))
    for node, kind, expected in [(nnx.List([1]), Stack, 5), (nnx.Dict(a=1), Table, 6)]:
        assert height(node).item() == 0
        node.__class__ = kind
        assert (type(node), len(node), height(node).item()) == (kind, 1, expected)
        with pytest.raises(nnx.TraceContextError, match=rf"set (the class|attribute '__class__') of {kind.__name__}"):
            jax.eval_shape(lambda node=node: setattr(node, "__class__", nnx.Module))
        assert type(node) is kind


def test_subscripted_in_annotations():
    """`nnx.List[Layer]` and `nnx.Dict[Layer]` are annotations, and make containers when called."""

    @nnx.dataclass
    class Holder(nnx.Module):
        layers: nnx.List[nnx.Param]
        heads: nnx.Dict[nnx.Param]

    m = Holder(nnx.List[nnx.Param]([param()]), {"a": param()})
    assert (type(m.layers), type(m.heads), len(jax.tree.leaves(m))) == (nnx.List, nnx.Dict, 2)


def test_repr_is_that_of_the_built_in_type():
    """Settings held in a List or Dict print as they would in a plain list or dict."""
    assert (repr(nnx.List([1, "a"])), str(nnx.Dict(a=[1, None]))) == ("[1, 'a']", "{'a': [1, None]}")


def test_keys_without_an_order_are_refused_by_name():
    color = enum.Enum("Color", "RED BLUE")
    heads = nnx.Dict({color.RED: nnx.Param(1.0), color.BLUE: nnx.Param(2.0)})
    assert heads[color.RED] == 1.0
    assert "RED" in repr(heads)
    with pytest.raises(nnx.errors.PathError, match=r"RED.*have no order.*enum\.StrEnum"):
        nnx.state(heads)


def test_an_enum_of_strings_is_a_key():
    color = enum.StrEnum("Color", "RED BLUE")
    heads = nnx.Dict({color.RED: nnx.Param(1.0), color.BLUE: nnx.Param(2.0)})
    assert nnx.jit(lambda heads: heads[color.BLUE] * 2)(heads) == 4.0


# --- declared as data -----------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Observation:
    """What an environment of a user returns."""

    image: Any
    vectors: Any


ARRAYS = {
    "dict": lambda x: {"a": x, "b": 2 * x},
    "list": lambda x: [x, 2 * x],
    "nested": lambda x: {"a": [x, (x, {"c": x}), None], "b": 3 * x},
    "dataclass": lambda x: {"a": Observation(x, {"sizes": x}), "b": [Observation(x, 2 * x)]},
}


class Holder(nnx.Module):
    """A Module for one attribute."""


def held(value):
    m = Holder()
    m.items = nnx.data(value)
    return m


def kinds(tree):
    return jax.tree.structure(tree), [type(x) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", ARRAYS)
def test_a_declared_list_or_dict_of_arrays_stays_a_pytree(name):
    """So `jax.tree.map` takes it together with a batch, everywhere; it is no node."""
    made, x = ARRAYS[name], jnp.arange(3.0)
    batch = made(x)
    add = lambda m, batch: setattr(m, "items", jax.tree.map(jnp.add, m.items, batch))
    m = held(made(x))
    assert kinds(m.items) == kinds(batch)
    assert list(nnx.iter_children(m)) == []
    add(m, batch)
    nnx.jit(add)(m, batch)
    m, _ = nnx.scan(lambda m, x: (m, add(m, x)), in_axes=(nnx.Carry, 0))(m, jax.tree.map(lambda x: x[None], batch))
    nnx.cond(jnp.array(True), add, lambda m, batch: None, m, batch)
    nnx.fori_loop(0, 2, lambda i, m: (add(m, batch), m)[1], m)
    m = nnx.clone(nnx.merge(*nnx.split(m)))
    assert kinds(m.items) == kinds(batch)
    for found, expected in zip(jax.tree.leaves(m.items), jax.tree.leaves(batch), strict=True):
        assert (found == 7 * expected).all()


@pytest.mark.parametrize("name", ["dict", "list"])
def test_changes_of_a_declared_list_or_dict_of_arrays_are_seen(name):
    """Of items and of the whole; inside a jitted function they are carried out, also by a closure."""
    x, key = jnp.arange(3.0), "a" if name == "dict" else 0
    m = held(ARRAYS[name](x))
    total = nnx.jit(lambda m: sum(x.sum() for x in jax.tree.leaves(m.items)))
    assert [total(m).item() for _ in range(3)] == [9.0] * 3
    m.items[key] = 10 * x
    assert total(m) == 36.0
    m.items.update(z=x) if name == "dict" else m.items.append(x)
    assert total(m) == 39.0

    @nnx.jit
    def double():
        m.items[key] = 2 * m.items[key]

    double(), double()
    assert total(m) == 129.0
    nnx.update(m, jax.tree.map(jnp.zeros_like, nnx.state(m)))
    assert total(m) == 0.0
    m.items = ARRAYS[name](x)  # the declaration holds for what is assigned later
    assert type(m.items) is (dict if name == "dict" else list)
    assert total(m) == 9.0
    with pytest.raises(ZeroDivisionError):
        nnx.jit(lambda m: (m.items.clear(), 1 / 0))(m)
    assert total(m) == 9.0


OTHERS = {
    "empty": dict,
    "a Module": lambda: [nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones(2)],
    "a Variable": lambda: {"a": param(), "b": jnp.ones(2)},
    "a setting": lambda: {"a": jnp.ones(2), "b": 3},
    "a setting in a dataclass": lambda: {"a": Observation(jnp.ones(2), 3)},
    "a State": lambda: {"a": nnx.State({"kernel": param()})},
    "a Module in a dataclass": lambda: {"a": Observation(jnp.ones(2), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))},
    "the same list twice": lambda: [[jnp.ones(2)]] * 2,
    "mixed keys": lambda: {"a": jnp.ones(2), 1: jnp.ones(2)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_declared_lists_and_dicts_become_nodes(name):
    """If they hold, or may come to hold, objects or settings."""
    assert isinstance(held(OTHERS[name]()).items, nnx.List | nnx.Dict)


def test_a_declared_list_that_contains_itself():
    x = [jnp.ones(2)]
    x.append(x)
    m = held(x)
    assert m.items[1] is m.items


def test_names_of_digits_are_the_items_of_a_list():
    """Code that replaces layers by `vars` and `setattr` of whatever `iter_modules` yields replaces those in Lists."""

    class Doubled(nnx.Module):
        def __init__(self, layer):
            self.layer = layer

        def __call__(self, x):
            return 2 * self.layer(x)

    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    model.layers.scale = param(3)
    before = jax.jit(lambda m, x: m(x))(model, jnp.ones((1, 2)))
    assert getattr(model.layers, "1") is model.layers[1]
    assert not hasattr(model.layers, "2")
    assert vars(model.layers) == {"0": model.layers[0], "1": model.layers[1], "scale": model.layers.scale}
    for _, module in list(nnx.iter_modules(model)):
        for name, child in vars(module).items():
            if isinstance(child, nnx.Linear):
                setattr(module, name, Doubled(child))
    assert [type(layer) for layer in model.layers] == [Doubled, Doubled]
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, jnp.ones((1, 2))), 4 * before, rtol=1e-6)
    vars(model.layers)["0"] = nnx.identity
    assert model.layers[0] is nnx.identity
    assert [key for key, _ in model.layers._nnx_children()] == [0, 1, "scale"]

    class Table(nnx.List):  # attributes do not go through the methods for items
        def __getitem__(self, index):
            return getattr(self, str(index))

        def __setitem__(self, index, value):
            setattr(self, str(index), value)

    table = Table([1, 2])
    table[1] = 5
    assert (table[0], table[1], list(table)) == (1, 5, [1, 5])
    table.__dict__ = {"1": 7, "name": "a"}
    assert (list(table), table.name) == ([1, 7], "a")


def test_items_that_a_subclass_of_dict_reads_as_attributes():
    """A subclass may define the methods for items by attributes, since attributes do not go through these methods."""

    class Table(nnx.Dict):
        def __contains__(self, key):
            return hasattr(self, str(key))

        def __getitem__(self, key):
            return getattr(self, str(key))

        def __setitem__(self, key, value):
            setattr(self, str(key), value)

        def __delitem__(self, key):
            delattr(self, str(key))

    table = Table()
    table[3], table.head, table["gone"] = jnp.zeros(1), param(1), 5
    del table["gone"]
    assert [key in table for key in (3, "head", "gone")] == [True, True, False]
    with pytest.raises(AttributeError, match="no attribute or key 'gone'"):
        table["gone"]
    with pytest.raises(AttributeError, match="no key 'gone'"):
        del table["gone"]

    @nnx.jit
    def write(table):
        table["head"].value += 1
        table[4] = jnp.ones(3)

    write(table)
    assert table["head"].value == 2
    assert table["4"].shape == (3,)


def test_vars_in_a_subclass_of_dict():
    """A subclass may say what is in it by what its attributes are."""

    class Table(nnx.Dict):
        def __contains__(self, key):
            return key in vars(self) and not key.startswith("_")

        def __getitem__(self, key):
            return vars(self)[key.lower()]

    table = Table({"head": nnx.Param(1.0), "_hidden": 2})
    table.tail = 3
    assert [key in table for key in ("head", "tail", "_hidden", "other")] == [True, True, False, False]
    assert table["HEAD"] is table.head
    vars(table)["tail"] = 4
    assert table.tail == 4
    assert {**vars(table)} == vars(table).copy() == {"head": table.head, "_hidden": 2, "tail": 4}
    del vars(table)["tail"]
    for again in (
        nnx.clone(table),
        nnx.merge(*nnx.split(table)),
        copy.deepcopy(table),
        nnx.jit(lambda t: t)(table),
    ):
        assert type(again) is Table
        assert sorted(vars(again)) == ["_hidden", "head"]
    calls = []

    @nnx.jit
    def count(table):
        calls.append(len(vars(table)))
        return len(vars(table))

    assert count(table) == count(table) == 2
    vars(table)["more"] = 5  # noticed, as any change of a Dict
    assert count(table) == 3
    assert len(calls) == 2


def test_vars_of_a_dict_are_its_items():
    """Code that looks at `vars` of whatever `iter_modules` yields comes upon Dicts, too."""
    d = nnx.Dict(head=nnx.Param(1.0), size=3)
    assert vars(d) == {"head": d.head, "size": 3}
    vars(d)["size"] = 4
    assert d.size == 4
    assert "size" in dir(d)
    assert 0 not in dir(nnx.Dict({0: 1, "a": 2}))
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    model.heads = {"a": nnx.Linear(2, 2, rngs=nnx.Rngs(1))}
    assert [name for _, m in nnx.iter_modules(model) for name in vars(m) if name == "a"] == ["a"]
    assert pickle.loads(pickle.dumps(d)).size == copy.deepcopy(d).size == copy.copy(d).size == 4


def test_a_list_and_a_dict_are_hashed_by_identity():
    for make in (nnx.List, nnx.Dict):
        first, second = make(), make()
        assert {first: 1, second: 2}[first] == 1


def test_the_names_in_a_list_are_its_items_and_attributes():
    layers = nnx.List([1, 2])
    layers.rate = 0.5
    assert list(vars(layers)) == ["0", "1", "rate"]
    assert {"a": 1} | vars(layers) == {"a": 1, "0": 1, "1": 2, "rate": 0.5}


def test_a_path_is_followed_through_vars():
    """Its indices are found there as they are; what is not there is no error of ours."""
    model = nnx.Dict(layers=[1, 2])
    value = model
    for key in ("layers", 1):
        value = vars(value)[key]
    assert value == 2
    assert [key in vars(model.layers) for key in (0, 2, -1, None, True)] == [True, False, False, False, False]
    vars(model.layers)[0] = 3
    assert list(model.layers) == [3, 2]
    assert vars(model.layers).get(2) is None
    with pytest.raises(KeyError):
        vars(model.layers)[2]


def test_methods_take_their_arguments_by_name():
    """As those of flax.nnx, though not those of list and dict; each notes the change, and the trace, as ever."""
    layers, heads = nnx.List([nnx.Param(float(k)) for k in range(3)]), nnx.Dict(a=nnx.Param(1.0))
    graphdef = nnx.graphdef((layers, heads))
    layers.extend(values=[nnx.Param(3.0)])
    layers.remove(value=layers[1])
    assert (layers.pop(index=0).value, layers.pop().value, len(layers)) == (0.0, 3.0, 1)
    assert (heads.get("b", default=2), heads.pop("b", default=3), heads.get("b")) == (2, 3, None)
    assert (heads.setdefault("b", default=4), heads.setdefault(key="c"), heads.pop(key="b")) == (4, None, 4)
    assert list(heads) == ["a", "c"]
    assert nnx.graphdef((layers, heads)) != graphdef
    with pytest.raises(KeyError, match="b"):
        heads.pop("b")
