"""Contexts, trees of States, partials: the same script under flax.nnx and nnxlib gives the same results."""

import jax
import jax.numpy as jnp
import pytest

import nnxlib

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")

import flax.nnx

from .results import same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # flax warns of its own deprecated names

SCRIPTS = []


def script(f):
    SCRIPTS.append(f)
    return f


def pair_class(nnx):
    class Pair(nnx.Module):
        def __init__(self, a, b):
            self.a = a if isinstance(a, nnx.Variable) else nnx.Param(jnp.asarray(a))
            self.b = b if isinstance(b, nnx.Variable) else nnx.BatchStat(jnp.asarray(b))

    return Pair


@script
def what_two_splits_share_is_in_the_first_state(nnx, Pair):
    shared = nnx.Param(jnp.array(3.0))
    with nnx.split_context() as ctx:
        def_a, *states_a = ctx.split(Pair(1.0, shared), nnx.BatchStat, ...)
        def_b, state_b = ctx.split(Pair(shared, 2.0))
        def_c, state_c = ctx.split(shared)
    with nnx.merge_context() as ctx:
        a, b, c = ctx.merge(def_a, *states_a), ctx.merge(def_b, state_b), ctx.merge(def_c, state_c)
    return states_a, state_b, state_c, a, b, a.b is b.a, c is b.a, c is shared


@script
def flatten_and_unflatten(nnx, Pair):
    shared = nnx.Param(jnp.array(3.0))
    with nnx.split_context() as ctx:
        def_a, flat_a = ctx.flatten(Pair(1.0, shared))
        def_b, values_b = ctx.flatten(Pair(shared, 2.0), with_paths=False)
        def_c, *flats_c = ctx.flatten(Pair(5.0, 6.0), nnx.Param, ...)
    with nnx.merge_context() as ctx:
        a, b, c = ctx.unflatten(def_a, flat_a), ctx.unflatten(def_b, values_b), ctx.unflatten(def_c, *flats_c)
    return flat_a, values_b, flats_c, a, b, c, a.b is b.a


@script
def the_second_state_without_the_first(nnx, Pair):
    shared = nnx.Param(jnp.array(3.0))
    with nnx.split_context() as ctx:
        ctx.split(shared)
        graphdef, state = ctx.split(Pair(shared, 2.0))
    try:
        with nnx.merge_context() as ctx:
            ctx.merge(graphdef, state)
    except Exception:
        return "refused"


def update(nnx, transform, change, *objects):
    """The whole protocol around a JAX transformation."""

    def inside(graphdef, state):
        with nnx.merge_context("test", inner=True) as ctx:
            copies = ctx.merge(graphdef, state)
        out = change(*copies)
        with nnx.split_context("test") as ctx:
            return ctx.split((*copies, out))

    with nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            graphdef, state = ctx.split(objects)
        graphdef, state = transform(inside)(graphdef, state)
        with nnx.merge_context("test", inner=False) as ctx:
            return ctx.merge(graphdef, state)


def restructure(a, b):
    a.a[...] += 10.0
    a.a, a.b = a.b, a.a
    b.c, b.number, b.new = a.b, 5, type(a)(7.0, 8.0)
    del b.a
    return b.new


@script
def structure_values_and_identity_through_jit(nnx, Pair):
    a, b = Pair(1.0, 2.0), Pair(3.0, 4.0)
    variables = a.a, a.b, b.b
    same_a, same_b, new = update(nnx, jax.jit, restructure, a, b)
    kept = same_a is a, same_b is b, new is b.new, a.b is variables[0], a.a is variables[1], b.b is variables[2]
    return a, b, b.c is a.b, kept


@script
def another_object_through_the_compiled_function(nnx, Pair):
    seen, traces = [], []

    def step(x):
        traces.append(1)
        x.a[...] += 1.0
        x.a, x.b, x.new = x.b, x.a, Pair(x.a[...], 0.0)

    def inside(graphdef, state):
        with nnx.merge_context("test", inner=True) as ctx:
            x = ctx.merge(graphdef, state)
        step(x)
        with nnx.split_context("test") as ctx:
            return ctx.split(x)

    compiled = jax.jit(inside)
    for extra in range(3):
        x, others = Pair(float(extra), 2.0), [Pair(0.0, 0.0) for _ in range(extra)]
        variables = x.a, x.b
        with nnx.update_context("test"):
            with nnx.split_context("test") as ctx:
                graphdef, state = ctx.split(x)
                for other in others:
                    ctx.split(other)
            graphdef, state = compiled(graphdef, state)
            with nnx.merge_context("test", inner=False) as ctx:
                same = ctx.merge(graphdef, state)
        seen.append((x, same is x, x.a is variables[1], x.b is variables[0], others, x.new in others))
    return seen, len(traces)


@script
def through_grad(nnx, Pair):
    def loss(state, graphdef):
        with nnx.merge_context("test", inner=True) as ctx:
            x = ctx.merge(graphdef, state)
        x.steps = 3
        out = x.a[...] * x.b[...] ** 2
        x.b[...] += 1.0
        with nnx.split_context("test") as ctx:
            return out, ctx.split(x)

    x = Pair(2.0, 3.0)
    with nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            graphdef, state = ctx.split(x)
        grads, (graphdef, state) = jax.grad(loss, has_aux=True)(state, graphdef)
        with nnx.merge_context("test", inner=False) as ctx:
            same = ctx.merge(graphdef, state)
    return grads, x, same is x


@script
def through_both_branches_of_cond(nnx, Pair):
    x = Pair(2.0, 3.0)

    def branch(by):
        def inside(graphdef, state):
            with nnx.merge_context("test", inner=True) as ctx:
                x = ctx.merge(graphdef, state)
            x.a[...] *= by
            with nnx.split_context("test") as ctx:
                return ctx.split(x)

        return inside

    with nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            graphdef, state = ctx.split(x)
        graphdef, state = jax.lax.cond(False, branch(10.0), branch(100.0), graphdef, state)
        with nnx.merge_context("test", inner=False) as ctx:
            same = ctx.merge(graphdef, state)
    return x, same is x


@script
def through_scan(nnx, Pair):
    x = Pair(2.0, 3.0)

    def body(carry, by):
        graphdef, state = carry
        with nnx.merge_context("test", inner=True) as ctx:
            x = ctx.merge(graphdef0, state)
        x.a[...] += by
        with nnx.split_context("test") as ctx:
            graphdef, state = ctx.split(x)
        return (None, state), graphdef

    with nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            graphdef0, state = ctx.split(x)
        (_, state), graphdef = jax.lax.scan(body, (None, state), jnp.arange(4.0))
        with nnx.merge_context("test", inner=False) as ctx:
            same = ctx.merge(graphdef, state)
    return x, same is x


@script
def only_what_is_returned_is_written(nnx, Pair):
    a, b = Pair(1.0, 2.0), Pair(3.0, 4.0)
    with nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            split = ctx.split((a, b))
        with nnx.merge_context("test", inner=True) as ctx:
            x, y = ctx.merge(*split)
        x.mark, y.mark = 1, 2
        with nnx.split_context("test") as ctx:
            graphdef, state = ctx.split(y)
        state = jax.tree.map(lambda v: v * 10, state)
        with nnx.merge_context("test", inner=False) as ctx:
            same = ctx.merge(graphdef, state)
    return a, b, same is b, hasattr(a, "mark")


@script
def several_objects_one_by_one(nnx, Pair):
    shared = nnx.Param(jnp.array(3.0))
    a, b = Pair(1.0, shared), Pair(shared, 2.0)
    with nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            splits = [ctx.split(a), ctx.split(b)]

        @jax.jit
        def inside(splits):
            with nnx.merge_context("test", inner=True) as ctx:
                a, b = [ctx.merge(*split) for split in splits]
            a.b[...] += 1.0
            b.new = a.new = nnx.Param(a.b[...] * 2)
            with nnx.split_context("test") as ctx:
                return [ctx.split(b), ctx.split(a)]

        splits = inside(splits)
        with nnx.merge_context("test", inner=False) as ctx:
            out = [ctx.merge(*split) for split in splits]
    return a, b, a.b is shared, b.a is shared, a.new is b.new, [out[0] is b, out[1] is a]


@script
def a_cycle(nnx, Pair):
    m = nnx.Module()

    def change(m):
        m.a, m.me = 1, m

    (same, _) = update(nnx, jax.jit, change, m)
    return same is m, m.me is m, m.a


@script
def a_missing_leaf_changes_nothing(nnx, Pair):
    x = Pair(2.0, 3.0)
    try:
        with nnx.update_context("test"):
            with nnx.split_context("test") as ctx:
                split = ctx.split(x)
            with nnx.merge_context("test", inner=True) as ctx:
                y = ctx.merge(*split)
            y.mark = 1
            y.b[...] = jnp.array(4.0)
            with nnx.split_context("test") as ctx:
                graphdef, state = ctx.split(y)
            del state["a"]
            with nnx.merge_context("test", inner=False) as ctx:
                ctx.merge(graphdef, state)
    except ValueError:
        return x


for tagged in ("split_context", "merge_context", "current_update_context"):

    def without_an_update(nnx, Pair, name=tagged):
        with getattr(nnx, name)("test"):
            pass

    without_an_update.__name__ = f"{tagged}_without_an_update"
    script(without_an_update)


@script
def merging_without_a_side(nnx, Pair):
    with nnx.update_context("test"), nnx.merge_context("test"):
        pass


@script
def updates_of_one_tag_nest(nnx, Pair):
    with nnx.update_context("test") as outer:
        with nnx.update_context("test") as inner:
            found = nnx.current_update_context("test") is inner
        return found, nnx.current_update_context("test") is outer


@script
def a_plain_split_in_a_merge_context(nnx, Pair):
    x = Pair(2.0, 3.0)
    with nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            ctx.split(x)
        with nnx.merge_context("test", inner=False) as ctx:
            y = ctx.merge(*nnx.split(x))
    return y, y is x


# --- trees ---


@script
def to_tree_and_back(nnx, Pair):
    shared = nnx.Param(jnp.array(3.0))
    a, b = Pair(1.0, shared), Pair(shared, 2.0)
    tree = nnx.to_tree((a, {"b": b, "again": a}, 4.0, None, [shared], "text"))
    back = nnx.from_tree(tree)
    same = back[0] is a, back[1]["again"] is back[0], back[0].b is back[1]["b"].a, back[4][0] is back[0].b
    return back, same, tree[0].state, tree[1]["b"].states, tree[1]["again"].state


@script
def every_leaf_of_a_tree(nnx, Pair):
    tree = nnx.to_tree((Pair(1.0, 2.0), 3.0, "text"), map_non_graph_nodes=True)
    kinds = [type(x).__name__ for x in tree]
    return kinds, tree[1].states, nnx.from_tree(tree, map_non_graph_nodes=True)


@script
def from_tree_of_something_else(nnx, Pair):
    return nnx.from_tree((1.0,), map_non_graph_nodes=True)


@script
def functions_get_paths_and_prefixes(nnx, Pair):
    seen = []

    def split_fn(ctx, path, prefix, leaf):
        seen.append((jax.tree_util.keystr(path), prefix, type(leaf).__name__))
        return nnx.extract.NodeStates.from_split(*ctx.split(leaf, nnx.Param, ...), metadata=prefix)

    def merge_fn(ctx, path, prefix, leaf):
        seen.append((jax.tree_util.keystr(path), prefix, leaf.metadata))
        return ctx.merge(leaf.graphdef, *leaf.states)

    tree = nnx.to_tree((Pair(1.0, 2.0), 3.0, {"k": Pair(4.0, 5.0)}), prefix=(None, 1, 2), split_fn=split_fn)
    return nnx.from_tree(tree, prefix=(7, 8, 9), merge_fn=merge_fn), tree[0].states, seen


@script
def leaves_of_ones_own(nnx, Pair):
    return nnx.from_tree(
        ({"x": 1.0}, 2.0),
        is_leaf=lambda x: isinstance(x, dict),
        is_node_leaf=lambda x: isinstance(x, dict),
        merge_fn=lambda ctx, path, prefix, leaf: ["merged", leaf],
    )


PREFIXES = {
    "the same": lambda nnx: (0, 0),
    "different": lambda nnx: (0, 1),
    "None": lambda nnx: (0, None),
    "a mapping and what it says": lambda nnx: (nnx.StateAxes({nnx.Param: 0, ...: 0}), 0),
    "two mappings": lambda nnx: (nnx.StateAxes({nnx.Param: 0, ...: 1}), nnx.StateAxes({nnx.Param: 1, ...: 0})),
    "a mapping that takes too little": lambda nnx: (nnx.StateAxes({nnx.BatchStat: 0}), 0),
    "too short": lambda nnx: (0,),
}
for name, prefix in PREFIXES.items():
    for check in (True, False):

        def shared_under_prefixes(nnx, Pair, prefix=prefix, check=check):
            shared = nnx.Param(jnp.array(3.0))
            tree = nnx.to_tree((Pair(1.0, shared), Pair(shared, 2.0)), prefix=prefix(nnx), check_aliasing=check)
            return [x.states for x in tree]

        shared_under_prefixes.__name__ = f"prefixes of a shared object: {name}, check={check}"
        script(shared_under_prefixes)


@script
def node_states(nnx, Pair):
    NodeStates = nnx.extract.NodeStates
    graphdef, state = nnx.split(Pair(1.0, 2.0))
    full = NodeStates.from_split(graphdef, state, metadata="m")
    alone, prefixes = NodeStates.from_states(state), NodeStates.from_prefixes([0, 1], metadata="m")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(prefixes)]
    refused = []
    for get in (lambda: alone.graphdef, lambda: prefixes.state):
        try:
            get()
        except ValueError:
            refused.append(True)
    replaced = full.replace(states=(1, 2), metadata="n")
    return (
        [full.graphdef == graphdef, full.state, full.metadata, alone.states, prefixes.states, prefixes.metadata],
        [jax.tree.leaves(x) for x in (full, alone, prefixes)],
        [paths, refused, replaced.states, replaced.metadata, replaced.graphdef == graphdef],
    )


@script
def a_vmap_of_ones_own(nnx, Pair):
    """The transform that flax's documentation of this machinery has in mind: update context, trees, prefixes."""
    NodeStates = nnx.extract.NodeStates

    def split_fn(ctx, path, prefix, leaf):
        filters = prefix.filters if isinstance(prefix, nnx.StateAxes) else ()
        return NodeStates.from_split(*ctx.split(leaf, *filters), metadata="axes")

    def axes_of(prefix):
        labels = list(prefix.values()) if isinstance(prefix, dict) else [prefix]
        return NodeStates.from_prefixes(labels, metadata="axes")

    axes = {nnx.Param: 0, ...: None}

    def vmapped(f, model, x):
        with nnx.update_context("vmap"):

            def inside(model, x):
                model, x = nnx.from_tree((model, x), ctxtag="vmap", is_inner=True)
                out = f(model, x)
                return nnx.to_tree((model, out), prefix=(nnx.StateAxes(axes), 0), split_fn=split_fn, ctxtag="vmap")

            tree = nnx.to_tree((model, x), prefix=(nnx.StateAxes(axes), 0), split_fn=split_fn, ctxtag="vmap")
            out = jax.vmap(inside, in_axes=(axes_of(axes), 0), out_axes=(axes_of(axes), 0))(*tree)
            return nnx.from_tree(out, ctxtag="vmap", is_inner=False)

    def f(model, x):
        model.a[...] *= x
        model.b[...] += 1.0
        model.called = True
        return model.a[...] + model.b[...]

    model = Pair(jnp.arange(3.0), 10.0)
    variables = model.a, model.b
    same, out = vmapped(f, model, jnp.full(3, 2.0))
    return model, same is model, out, model.a is variables[0], model.b is variables[1]


# --- partials ---


@script
def cached_partial(nnx, Pair):
    @nnx.jit
    def step(x, by, scale=1.0):
        x.a[...] += by * scale
        return x.a * x.b

    x = Pair(1.0, 2.0)
    a = x.a
    call = nnx.cached_partial(step, x)
    outs = [call(1.0), call(1.0, scale=3.0)]
    x.b[...] = jnp.array(10.0)  # a value that is set outside
    return outs, call(0.0), x, x.a is a


@script
def cached_partial_with_several_and_again(nnx, Pair):
    @nnx.jit
    def step(x, y, z):
        x.b[...] += 1.0
        y.a[...] += 10.0
        z.b[...] += 100.0

    shared = nnx.Param(jnp.array(3.0))
    x, y = Pair(1.0, shared), Pair(shared, 2.0)
    nnx.cached_partial(step, x, y)(y)
    return x, y, x.b is y.a


@script
def cached_partial_of_data_and_static_arguments(nnx, Pair):
    step = nnx.jit(lambda x, y, by, flag: (x.a * y, by if flag else 0), static_argnums=3)
    call = nnx.cached_partial(step, Pair(2.0, 1.0), jnp.array(3.0))
    return call(4.0, True), call(4.0, False)


@script
def cached_partial_of_grad(nnx, Pair):
    return nnx.cached_partial(nnx.grad(lambda x, by: x.a[...] * by), Pair(2.0, 1.0))(3.0)


@pytest.mark.parametrize("f", SCRIPTS, ids=lambda f: f.__name__)
def test_contexts_trees_and_partials_do_what_flax_does(f):
    """The script gives the same under both, or raises an error of the same built-in class."""
    same(lambda nnx: f(nnx, pair_class(nnx)))


def jit_partial_script(nnx, **flags):
    Pair = pair_class(nnx)

    def step(x, y, by):
        x.a[...] += by * y.b[...]
        return x.a * 1.0

    x, y = Pair(1.0, 2.0), Pair(3.0, 4.0)
    call = nnx.jit_partial(step, x, y, **flags)
    outs = [call(1.0)]
    y.b[...] = y.b[...] + 1.0
    outs.append(call(1.0))
    chosen = nnx.jit_partial(lambda x, by, flag: x.a * by if flag else by, x, static_argnums=2, **flags)
    return [*outs, chosen(3.0, True), chosen(3.0, False)], x, y


def test_jit_partial_does_what_flax_does():
    """Values are carried back, and present values are seen; with one bound argument the options count as there."""
    if not hasattr(flax.nnx, "jit_partial"):
        pytest.skip("this flax has no jit_partial")
    flags = {nnxlib: {}, flax.nnx: {"graph_updates": False}}  # it has no other mode there
    same(lambda nnx: jit_partial_script(nnx, **flags[nnx]))
