"""Random programs: sequences of small edits to an object graph, that run alike eagerly and inside a transformation.

A program is a tuple of steps `(name, i, j, k)`. A step picks the objects that it edits by number among those that can
be reached, in the order of the first visit, so on two equal graphs it does the same. Arithmetic is exact (small
integers in float32), so compiled and eager results are equal to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp

import nnxlib as nnx

from .compare import is_array, is_object, items, objects_in
from .strategies import NAMES, STATIC, VARIABLES, Block, Branch, Config, Declared, Moded, Pair, Slotted, put

Step = tuple[str, int, int, int]


class Scene:
    """The arguments of a program, what it returns, and what it holds in local variables meanwhile."""

    def __init__(self, args: tuple[Any, ...]):
        self.args, self.outputs, self.locals = args, [], []

    def pick(self, number: int, kind: Any, where: Callable[[Any], bool] = lambda x: True) -> Any:
        """The object with that number among those of a kind for which `where` is true; None if there are none."""
        found = [x for x in objects_in(self.args, self.outputs, self.locals) if isinstance(x, kind) and where(x)]
        return found[number % len(found)] if found else None

    def variable(self, number: int, where: Callable[[Any], bool] = lambda v: True) -> Any:
        return self.pick(number, nnx.Variable, where)

    def node(self, number: int, where: Callable[[Any], bool] = lambda x: True) -> Any:
        return self.pick(number, (nnx.Pytree, nnx.List, nnx.Dict), where)

    def object(self, number: int) -> Any:
        return self.pick(number, (nnx.Pytree, nnx.List, nnx.Dict, nnx.Variable))


STEPS: dict[str, Callable[[Scene, int, int, int], Any]] = {}


def step(f: Callable[[Scene, int, int, int], Any]) -> Callable[[Scene, int, int, int], Any]:
    STEPS[f.__name__] = f
    return f


def programs(longest: int = 8, names: tuple[str, ...] | None = None) -> st.SearchStrategy[tuple[Step, ...]]:
    index = st.integers(0, 7)
    return st.lists(
        st.tuples(st.sampled_from(names or tuple(STEPS)), index, index, index), min_size=longest // 2, max_size=longest
    ).map(tuple)


def run(program: tuple[Step, ...], args: tuple[Any, ...], interrupt: Callable[[int], None] | None = None) -> Any:
    """Run a program on the arguments, in place; returns what it returns. `interrupt(n)` is called before step n."""
    scene = Scene(args)
    for number, (name, i, j, k) in enumerate(program):
        if interrupt is not None:
            interrupt(number)
        STEPS[name](scene, i, j, k)
    if interrupt is not None:
        interrupt(len(program))
    return tuple(scene.outputs)


# --- values ---------------------------------------------------------------------------------------------------------


def is_number(x: Any) -> bool:
    if not is_array(x):
        return isinstance(x, int | float) and not isinstance(x, bool)
    return bool(jnp.issubdtype(x.dtype, jnp.number))


def total(value: Any) -> Any:
    """The sum of all numbers in a value, a float32 scalar."""
    leaves = [x for x in jax.tree.leaves(value) if is_number(x)]
    return sum([jnp.sum(jnp.asarray(x, jnp.float32)) for x in leaves], jnp.float32(0))


def shifted(value: Any, by: int) -> Any:
    """The value with `by` added to each number in it, and keys folded."""

    def shift(x: Any) -> Any:
        if is_number(x):
            return x + by
        return jax.random.fold_in(x, by) if is_array(x) else x

    return jax.tree.map(shift, value)


# --- steps on Variables ---------------------------------------------------------------------------------------------


@step
def shift_value(scene: Scene, i: int, j: int, k: int) -> None:
    if (v := scene.variable(i)) is not None:
        v.value = shifted(v.value, k)


@step
def set_value_from_another(scene: Scene, i: int, j: int, k: int) -> None:
    if (v := scene.variable(i)) is not None:
        v.set_value(total(scene.variable(j).value) + k)


@step
def set_item(scene: Scene, i: int, j: int, k: int) -> None:
    if (v := scene.variable(i, lambda v: is_array(v.value) and v.value.shape == (2,))) is not None:
        v[k % 2] = k


@step
def set_all_in_place(scene: Scene, i: int, j: int, k: int) -> None:
    if (v := scene.variable(i, lambda v: is_number(v.value))) is not None:
        v[...] = shifted(v.value, k)


@step
def add_in_place(scene: Scene, i: int, j: int, k: int) -> None:
    if (v := scene.variable(i, lambda v: is_number(v.value))) is not None:
        v += k


@step
def set_pytree(scene: Scene, i: int, j: int, k: int) -> None:
    if (v := scene.variable(i, lambda v: not isinstance(v, nnx.Param))) is not None:
        v.value = {"new": (total(v.value), None), "old": [k * 1.0]}


@step
def edit_pytree(scene: Scene, i: int, j: int, k: int) -> None:
    if (v := scene.variable(i, lambda v: isinstance(v.get_raw_value(), dict))) is not None:
        v.get_raw_value()["z"] = jnp.float32(k)


@step
def set_metadata(scene: Scene, i: int, j: int, k: int) -> None:
    if (v := scene.variable(i)) is not None:
        v.set_metadata(tag=("frozen", "trained", None, float("nan"), [k])[k % 5])


@step
def delete_metadata(scene: Scene, i: int, j: int, k: int) -> None:
    if (v := scene.variable(i, lambda v: v.has_metadata("tag"))) is not None:
        v.del_metadata("tag")


@step
def change_variable_class(scene: Scene, i: int, j: int, k: int) -> None:
    if (v := scene.variable(i, lambda v: type(v) in (nnx.BatchStat, nnx.Cache))) is not None:
        v.__class__ = nnx.Cache if type(v) is nnx.BatchStat else nnx.BatchStat


# --- steps on attributes and items ----------------------------------------------------------------------------------


def fixed_names(node: Any) -> tuple[str, ...]:
    """Attributes that a program leaves where they are: those with a declaration, a mode, or a slot."""
    return ("steps", "counted", "shape", "fixed", "deterministic", "slot") if isinstance(node, nnx.Pytree) else ()


def places(node: Any) -> list[Any]:
    return [key for key, _ in items(node) or () if key not in fixed_names(node)]


def held(node: Any) -> list[Any]:
    return [get(node, key) for key in places(node)]


def holds_config(node: Any) -> bool:
    return any(isinstance(x, Config) for x in held(node))


def get(node: Any, key: Any) -> Any:
    return getattr(node, key) if isinstance(node, nnx.Pytree) else node[key]


def assign(node: Any, key: Any, value: Any) -> None:
    if isinstance(node, nnx.Pytree):
        setattr(node, key, value)
    else:
        node[key] = value


def remove(node: Any, key: Any) -> None:
    if isinstance(node, nnx.Pytree):
        delattr(node, key)
    else:
        del node[key]


@step
def attach_variable(scene: Scene, i: int, j: int, k: int) -> None:
    kind = (*VARIABLES[:5], VARIABLES[7])[j % 6]
    put(scene.node(i), k, kind(jnp.float32(k), **({"tag": "new"} if k % 2 else {})))


@step
def attach_module(scene: Scene, i: int, j: int, k: int) -> None:
    child = Block()
    child.a, child.b = nnx.Param(total(scene.variable(j)) + k), scene.object(j)
    put(scene.node(i), k, child)


@step
def attach_array(scene: Scene, i: int, j: int, k: int) -> None:
    put(scene.node(i), k, jnp.arange(2, dtype=jnp.float32) + total(scene.variable(j)))


@step
def attach_list(scene: Scene, i: int, j: int, k: int) -> None:
    put(scene.node(i), k, [nnx.Cache(jnp.float32(k)), {"x": jnp.float32(j), 1: k}, None])


@step
def attach_tuple(scene: Scene, i: int, j: int, k: int) -> None:
    put(scene.node(i), k, (scene.object(j), [k], (jnp.float32(k), "static")))


@step
def attach_pair(scene: Scene, i: int, j: int, k: int) -> None:
    put(scene.node(i), k, Pair(scene.object(j), jnp.float32(k)))


@step
def attach_static(scene: Scene, i: int, j: int, k: int) -> None:
    put(scene.node(i), k, STATIC[(8 * j + k) % len(STATIC)]())


@step
def attach_method(scene: Scene, i: int, j: int, k: int) -> None:
    if owner := scene.pick(j, Block):
        put(scene.node(i), k, owner.double)


@step
def attach_none_then_array(scene: Scene, i: int, j: int, k: int) -> None:
    node = scene.pick(i, nnx.Pytree)
    node.d = total(scene.variable(j)) if getattr(node, "d", 0) is None else None


@step
def shift_attribute(scene: Scene, i: int, j: int, k: int) -> None:
    if (node := scene.node(i, lambda x: any(map(is_array, held(x))))) is not None:
        shift_arrays(node, k)


def shift_arrays(node: Any, by: int) -> None:
    for key in places(node):
        if is_array(get(node, key)) and is_number(get(node, key)):
            assign(node, key, get(node, key) + by)


@step
def through_vars(scene: Scene, i: int, j: int, k: int) -> None:
    vars(scene.pick(i, nnx.Pytree))[NAMES[k % 4]] = total(scene.variable(j))


@step
def count(scene: Scene, i: int, j: int, k: int) -> None:
    if node := scene.pick(i, (Declared, Slotted)):
        for name in ("steps", "counted", "slot"):
            if hasattr(node, name):
                setattr(node, name, getattr(node, name) + k)


@step
def delete(scene: Scene, i: int, j: int, k: int) -> None:
    node = scene.node(i)
    if keys := places(node):
        remove(node, keys[k % len(keys)])


@step
def share(scene: Scene, i: int, j: int, k: int) -> None:
    put(scene.node(i), k, scene.object(j))


@step
def move(scene: Scene, i: int, j: int, k: int) -> None:
    source, target = scene.node(i), scene.node(j)
    if keys := places(source):
        value = get(source, keys[k % len(keys)])
        remove(source, keys[k % len(keys)])
        put(target, k, value)


@step
def swap(scene: Scene, i: int, j: int, k: int) -> None:
    a, b = scene.node(i), scene.node(j)
    if (keys := places(a)) and (others := places(b)):
        key, other = keys[k % len(keys)], others[k % len(others)]
        x, y = get(a, key), get(b, other)
        assign(a, key, y)
        assign(b, other, x)


@step
def exchange(scene: Scene, i: int, j: int, k: int) -> None:
    """Another object of the same structure takes the place of one."""
    node = scene.node(i, lambda x: any(map(is_object, held(x))))
    if node is not None:
        keys = [key for key in places(node) if is_object(get(node, key))]
        made = nnx.clone(get(node, keys[k % len(keys)]))
        for x in objects_in((made,)):
            if isinstance(x, nnx.Variable):
                x.value = shifted(x.value, j)
            else:
                shift_arrays(x, j)
        assign(node, keys[k % len(keys)], made)


@step
def detach_and_change(scene: Scene, i: int, j: int, k: int) -> None:
    node = scene.node(i)
    for key in places(node):
        child = get(node, key)
        if is_object(child):
            scene.locals.append(child)
            remove(node, key)
            break


@step
def change_class(scene: Scene, i: int, j: int, k: int) -> None:
    node = scene.pick(i, Block)
    node.__class__ = Branch if type(node) is Block else Block


@step
def change_mode(scene: Scene, i: int, j: int, k: int) -> None:
    if node := scene.pick(i, Moded):
        (node.eval, node.train, lambda: setattr(node, "deterministic", bool(j % 2)))[k % 3]()


@step
def edit_static(scene: Scene, i: int, j: int, k: int) -> None:
    node = scene.node(i, holds_config)
    for key in places(node):
        value = get(node, key)
        if isinstance(value, Config):
            value.rate += k
            value.sizes.append(k)


@step
def replace_static(scene: Scene, i: int, j: int, k: int) -> None:
    node = scene.node(i, holds_config)
    for key in places(node):
        if isinstance(get(node, key), Config):
            assign(node, key, dataclasses.replace(get(node, key), rate=float(k)))


# --- steps on lists and dicts ---------------------------------------------------------------------------------------

LIST_EDITS: list[Callable[[Any, Any], Any]] = [
    lambda xs, x: xs.append(x),
    lambda xs, x: xs.insert(0, x),
    lambda xs, x: xs.pop() if xs else None,
    lambda xs, x: xs.reverse(),
    lambda xs, x: xs.extend([x, [x]]),
    lambda xs, x: xs.__setitem__(slice(0, 1), [x, None]),
    lambda xs, x: xs.__delitem__(slice(None, None, 2)),
    lambda xs, x: xs.__imul__(2) if len(xs) < 4 and all(map(is_object, xs)) else xs.clear(),
]

DICT_EDITS: list[Callable[[Any, Any], Any]] = [
    lambda d, x: d.update({3: x, "c": [x]}),
    lambda d, x: d.setdefault("a", x),
    lambda d, x: d.pop(next(iter(d))) if d else None,
    lambda d, x: d.popitem() if d else None,
    lambda d, x: d.__setitem__("z", {"in": x}),
    lambda d, x: d.__ior__({10: x}),
    lambda d, x: d.clear(),
    lambda d, x: d.__setitem__("last", d.pop(next(iter(d)))) if d else None,
]


def _new(scene: Scene, j: int) -> Any:
    return (
        scene.object(j),
        jnp.float32(j) + total(scene.variable(j)),
        nnx.Param(total(scene.variable(j))),
        "static",
    )[j % 4]


@step
def edit_list(scene: Scene, i: int, j: int, k: int) -> None:
    if (xs := scene.pick(i, nnx.List)) is not None:
        LIST_EDITS[k](xs, _new(scene, j))


@step
def edit_dict(scene: Scene, i: int, j: int, k: int) -> None:
    if (d := scene.pick(i, nnx.Dict)) is not None:
        DICT_EDITS[k](d, _new(scene, j))


# --- steps that return something ------------------------------------------------------------------------------------


@step
def give_object(scene: Scene, i: int, j: int, k: int) -> None:
    scene.outputs.append(scene.object(i))


@step
def give_several(scene: Scene, i: int, j: int, k: int) -> None:
    scene.outputs.append({"object": scene.object(i), "rest": (total(scene.variable(j)), None, [scene.object(k)])})


@step
def give_new(scene: Scene, i: int, j: int, k: int) -> None:
    made = Branch()
    made.a, made.b, made.c = scene.object(i), nnx.Param(jnp.float32(k)), jnp.float32(j)
    scene.outputs.append(made)


@step
def give_value(scene: Scene, i: int, j: int, k: int) -> None:
    if (v := scene.variable(i)) is not None:
        scene.outputs.append(total(v.value))
