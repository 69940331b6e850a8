"""What is no layer: each function of flax.nnx with each of its keywords, and the methods of its values, beside nnxlib.

A group yields calls, which run under both libraries: the results are the same, or both raise an error. A function of
flax.nnx that no call uses is an error, and so is a keyword that none gives, unless another file compares it.
"""

import functools
import inspect
import operator
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify as checks

import nnxlib

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")

from flax import nnx as flax

from .results import ROUNDING, assert_alike, facts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

Calls = Iterator[Callable[[], Any]]
X = jnp.asarray(np.random.default_rng(0).normal(0, 3, (2, 6, 5, 4)), jnp.float32)
A, S, KEY = jnp.array([1.0, 2.0, 3.0]), jnp.arange(6.0).reshape(3, 2) + 1, jax.random.key(0)
GROUPS: dict[str, Callable[[Any], Calls]] = {}


def group(calls: Callable[[Any], Calls]) -> Callable[[Any], Calls]:
    GROUPS[calls.__name__] = calls
    return calls


def then(x: Any, change: Callable[[Any], Any]) -> Any:
    """What a change returns, and what it leaves behind."""
    return change(x), x


def writing(l: Any) -> Any:
    """A Module with Params, a Variable that each call writes, and a Dropout."""

    class Part(l.Module):
        def __init__(self):
            self.w, self.b = l.Param(jnp.array([1.0, 2.0]), tag="t"), l.Param(jnp.array([0.5, 0.5]))
            self.calls, self.drop = l.BatchStat(jnp.array(0.0)), l.Dropout(0.5, rngs=l.Rngs(0, dropout=1))

        def __call__(self, x):
            self.calls[...] = self.calls[...] + 1
            return x * self.w[...] + self.b[...]

        def loss(self, x):
            return (self(x) ** 2).sum()

    return Part()


def tree(l: Any) -> Any:
    class Tree(l.Module):
        def __init__(self):
            self.part, self.cache, self.array = writing(l), l.Cache(jnp.zeros(2)), jnp.ones(3)
            self.layers = l.List([l.Linear(2, 2, rngs=l.Rngs(1)), l.Dict(x=l.Param(jnp.ones(1), tag="t"))])
            self.shared = self.part.w

    return Tree()


def stacked(l: Any) -> Any:
    part = l.vmap(lambda k: writing(l))(jnp.arange(3))
    part.w.set_value(part.w[...] * jnp.arange(1.0, 4.0)[:, None])
    return part


@group
def initializers(l: Any) -> Calls:
    given: dict[str, list[Any]] = {"normal": [(), {"stddev": 0.3}], "uniform": [(), {"scale": A[1]}], "ones_init": [()]}
    for name in ("glorot_normal", "he_uniform", "kaiming_normal", "lecun_uniform", "xavier_uniform"):
        given[name] = [(0, 1), {"in_axis": (0, 1), "out_axis": -1}, {"batch_axis": 0, "dtype": jnp.complex64}]
    spread = [(s, mode, kind) for s in (2.0, 0) for mode in ("fan_avg", "fan_geo_avg", "x") for kind in ("normal", "x")]
    given["variance_scaling"] = [*spread, {"scale": 1.0, "mode": "fan_in", "distribution": "uniform", "batch_axis": 0}]
    given["constant"] = [(3,), (1 + 2j,), (jnp.arange(4.0),), {"value": 2.5, "dtype": jnp.int32}]
    for name in ("orthogonal", "delta_orthogonal"):
        given[name] = [(), (2.0, 0), {"scale": 0.5, "column_axis": -2, "dtype": jnp.bfloat16}]
    given["truncated_normal"] = [{"stddev": 2.0, "lower": -1.0, "upper": 0.5}, (1.0, jnp.bfloat16, -0.5, 1.0)]
    for name, rows in given.items():
        for row in rows:
            make = functools.partial(getattr(l.initializers, name), *([] if isinstance(row, dict) else row))
            init = functools.partial(make, **row) if isinstance(row, dict) else make
            yield from (lambda f=init, s=s: f()(KEY, s) for s in [(2, 3, 4), (), (1, 3)])
            yield lambda f=init: f()(KEY, (3, 4, 4), jnp.bfloat16)
            yield lambda f=init: then(l.Rngs(3), lambda rngs: f()(rngs.params(), (3, 4, 4)))


@group
def activations(l: Any) -> Calls:
    flat, where = X[0, :, :4, 0], {"where": jnp.arange(4) > 1}
    plain = "hard_sigmoid hard_silu hard_swish hard_tanh identity log_sigmoid relu relu6 selu sigmoid silu soft_sign"
    keywords: dict[str, list] = {name: [] for name in plain.split()}
    keywords |= {"celu": [{"alpha": 0.5}], "elu": [{"alpha": 2.0}], "gelu": [{"approximate": False}], "tanh": []}
    keywords |= {"glu": [{"axis": 0}], "leaky_relu": [{"negative_slope": 0.5}], "log_softmax": [{"axis": 0}, where]}
    keywords |= {"softmax": [{"axis": 0}, where], "logsumexp": [{"axis": 0, "keepdims": True}, {"b": -2.0}, where]}
    keywords |= {"one_hot": [{"num_classes": 3}, {"num_classes": 4, "dtype": jnp.int8, "axis": 0}], "softplus": []}
    keywords |= {"standardize": [{"axis": (0, 1), "epsilon": 0.5}, {"mean": 0.0, "variance": 4.0}, where], "swish": []}
    yield lambda: l.logsumexp(flat, b=-2.0, return_sign=True)
    for name, rows in keywords.items():
        f = getattr(l, name)
        for x in (flat, jnp.arange(-2, 2), jnp.array([jnp.nan, -jnp.inf, -0.0, 1], jnp.bfloat16)):
            yield from (functools.partial(f, x, **row) for row in [{}, *rows])
        yield lambda f=f: jax.grad(lambda y: f(y).sum())(jnp.array([-1.0, 0.0, 0.5, 2.0]))


@group
def pools(l: Any) -> Calls:
    draw = random.Random(0)
    paddings = ["VALID", "SAME", "SAME_LOWER", "bogus", ((1, 1), (0, 2)), [(0, 0), (1, 0)], ((1,), (2,))]
    for _ in range(80):
        inputs = draw.choice([X, X[0]]).astype(draw.choice([jnp.float32, jnp.float32, jnp.int32, jnp.int8]))
        name = draw.choice(["avg_pool", "max_pool", "min_pool"])
        row = {"strides": draw.choice([None, (1, 2), (3, 3)]), "padding": draw.choice(paddings)}
        if name == "avg_pool" and draw.random() < 0.6:
            row["count_include_pad"] = draw.choice([True, False])
        f, window, by_name = getattr(l, name), draw.choice([(2, 2), (2, 1), (3, 2), (9, 9)]), draw.random() < 0.7
        yield functools.partial(f, inputs, window, *([] if by_name else row.values()), **(row if by_name else {}))
    for init, f in ((0.0, jax.lax.add), (-jnp.inf, jax.lax.max), (1.0, jax.lax.mul)):
        yield functools.partial(l.pool, X, init, f, (2, 2), strides=(2, 1), padding="SAME")
    yield lambda: l.pool(inputs=X, init=0.0, reduce_fn=jax.lax.add, window_shape=(2, 2), strides=None, padding="VALID")


@group
def variables(l: Any) -> Calls:
    v, c = functools.partial(l.Param, A, role=1), jnp.ones(2)
    for op in [getattr(operator, name) for name in "add sub mul truediv floordiv mod pow matmul and_ or_ eq".split()]:
        for x in (A, 2.5, jnp.array([1, 2, 3]), np.arange(3), l.Cache(A), "x", None):
            yield from (lambda op=op, x=x: op(v(), x), lambda op=op, x=x: op(x, v()))
    for op in (round, abs, operator.neg, len, list, int, lambda x: round(x, 1), lambda x: x.__round__(ndigits=1)):
        yield from (functools.partial(op, v()), functools.partial(op, l.Param(2.5)))
    for key in (..., 0, -1, slice(0, 2), None, jnp.array([True, False, True]), 10, "a"):
        yield lambda key=key: v()[key]
        yield from (lambda k=key, x=x: then(v(), lambda p: p.__setitem__(k, x)) for x in (7, A, "x"))
    yield lambda: [v().get_value(index=0), v().at[0].set(5.0), v().T, v().shape, v().sum(), v().type is l.Param]
    yield lambda: then(v(), lambda p: p.set_value(7.0, index=slice(1, 3)))
    yield lambda: [v().copy(), v().copy(jnp.ones(2), role=2), v().copy(value=5), v().replace(), v().replace(5, new=3)]
    yield lambda: [
        then(v(), lambda p: p.copy_from(l.Param(c, x=3))),
        then(v(), lambda p: p.update_from_state(l.Param(c))),
    ]
    yield lambda: v().copy_from(l.Cache(A))
    yield lambda: [v().get_metadata("role"), v().get_metadata("x", 5), v().get_metadata(name="x", default=None)]
    yield from (lambda: v().get_metadata("x"), lambda: v().nope, lambda: then(v(), lambda p: setattr(p, "role", 5)))
    yield lambda: then(v(), lambda p: [p.set_metadata("a", 1), p.set_metadata(b=2), p.del_metadata("a")])
    yield lambda: then(v(), lambda p: [p.set_metadata({"b": 1}), p.has_metadata("b"), p.has_metadata("x"), p.role])
    init, plus, times = jax.nn.initializers.ones, lambda v, x: x + 1, lambda v, x: x * 3
    boxed = lambda: l.with_metadata(init, role=1, sharding=("y",), on_get_value=plus)(KEY, (2,))
    for given in ({}, {"role": 2, "sharding": ("x",)}, {"on_get_value": times}):
        yield lambda k=given: then(l.Param(boxed(), eager_sharding=False, **k), lambda p: p[...])
    hooks = {"on_get_value": plus, "on_set_value": times, "on_create_value": plus}
    yield lambda: then(v(**hooks), lambda p: [p[...], p.set_value(A), p.get_raw_value(), p.__setitem__(0, 9.0)])
    moved = lambda v, index, name: v.set_metadata("moved", (index, name))
    whole = functools.partial(l.with_metadata, init, on_set_value=plus, on_create_value=times, on_add_axis=moved)
    named = {"transform_metadata": {l.PARTITION_NAME: "n"}}
    yield lambda: l.vmap(lambda k: l.Param(whole(on_remove_axis=moved)(k, (2,))), **named)(jax.random.split(KEY, 3))
    for k in ({}, {"only": l.PathContains("bias")}):
        yield lambda k=k: then(l.Linear(2, 3, rngs=l.Rngs(0)), lambda m: l.set_metadata(m, role=3, **k))
    kind = lambda name: type(name, (l.Param,), {})
    yield lambda: [l.variable_name_from_type(t) for t in (l.Param, l.Cache, l.BatchStat, l.RngKey, l.LoRAParam)]
    yield from (lambda: l.variable_name_from_type(kind("One")), lambda: l.variable_type_from_name("two"))
    yield lambda: l.register_variable_name("n_1", kind("A"), overwrite=True)
    yield lambda: l.register_variable_name("n_2")(kind("B"))
    yield lambda: l.variable_type_from_name("another", base=l.Cache, allow_register=True).__mro__[1].__name__
    yield lambda: l.variable_name_from_type(kind("Another"), allow_register=True)


@group
def states(l: Any) -> Calls:
    s, State = lambda: l.state(tree(l)), l.State
    for key in ("part", "layers", "zz", ("part", "w")):
        yield lambda k=key: [s()[k], k in s()]
        yield lambda k=key: [s().get(k, 5), then(s(), lambda x: x.pop(k, 7))]
        yield lambda k=key: then(s(), lambda x: x.__setitem__(k, l.Param(1.0)))
    yield lambda: then(s(), lambda x: [x.update({"z": 1}, q=2), x.setdefault("z", 4), x.part.b, list(x.layers)])
    yield lambda: s().nope
    one, two = State({"a": {"x": 1}}), State({"a": {"x": 1, "y": 2}})
    yield lambda: [one | State({"a": {"y": 2}}), two - one, l.statelib.diff(two, one)]
    yield lambda: [s().flat_state(), l.to_flat_state(s()), l.from_flat_state({("a", "b"): 1})]
    yield lambda: [State.from_flat_path({("a", "b"): 1, ("c",): 2}), l.from_flat_state([(("a",), 1)], cls=dict)]
    yield lambda: l.FlatState([(("b",), 1), (("a",), 2)], sort=False)
    yield lambda: [s().to_pure_dict(), l.to_pure_dict(s(), extract_fn=type), l.restore_int_paths({"0": {"x": 2}})]
    pure = {"cache": jnp.ones(2), "layers": {"0": {"bias": jnp.ones(2)}}}
    for k in ({}, {"replace_fn": lambda x, v: x.replace(0)}):
        yield lambda k=k: then(s(), lambda x: l.replace_by_pure_dict(x, pure, **k))
    yield lambda: [s().map(lambda p, v: len(p)), l.map_state(lambda p, v: len(p), s())]
    yield lambda: [l.merge_state(*l.state(tree(l), l.Param, ...)), type(l.merge_state(one, cls=dict)).__name__]
    filters = [l.Param, "t", ..., None, lambda path, x: "b" in path, (l.Param, l.Cache), (), 3, {}, b"t"]
    filters += [l.PathContains("w"), l.PathContains("sh", exact=False), l.Not(l.Param), l.OfType(l.BatchStat)]
    filters += [l.Any(l.Cache, "t"), l.All(l.Param, l.PathContains("w")), l.Everything(), l.Nothing(), l.WithTag("t")]
    for f in filters:
        yield lambda f=f: [s().filter(f), l.filter_state(s(), f, l.Param), l.to_flat_state(s()).filter(f)]
        yield lambda f=f: [s().split(f, ...), l.split_state(s(), f, ...), l.state(tree(l), f)]
        yield lambda f=f: [l.split(tree(l), f, ...)[1:], l.variables(tree(l), f)]
        yield lambda f=f: l.split(tree(l), f)[1:]
    yield from (lambda f=f: then(tree(l), lambda m: l.pop(m, *f)) for f in ([l.BatchStat], [l.Cache, l.BatchStat], []))


@group
def graphs(l: Any) -> Calls:
    t = lambda: tree(l)
    yield lambda: [l.clone(t()), l.clone(t(), variables=True, arrays=True), l.merge(*l.split(t()), copy=True)]
    yield lambda: then(t(), lambda m: [isinstance(l.view_info(m, only=l.Dropout), str), l.check_pytree(m)])
    yield lambda: [[(p, type(x).__name__) for p, x in l.iter_module_children(t())], l.merge(l.unpack(t()))]
    yield lambda: [l.flatten(t())[1], (flat := l.flatten(t(), with_paths=False))[1], l.unflatten(*flat)]
    yield lambda: [l.graphdef(t()) == l.split(t())[0], l.call(l.split(writing(l)))(S)[0]]
    yield lambda: then(t(), lambda m: l.update(m, {"cache": jnp.ones(2), "layers": {0: {"bias": jnp.ones(2)}}}))
    yield lambda: [path for path, x in l.iter_graph(t()) if isinstance(x, l.Variable)]
    yield lambda: [[(k, type(x).__name__) for k, x in f(t())] for f in (l.iter_modules, l.iter_children)]
    yield lambda: [l.find_duplicates(t()), l.find_duplicates(t(), only=l.Cache), l.find_duplicates([t()] * 2)]
    yield lambda: [l.map(lambda p, x: len(p), l.state(t())), l.recursive_map(lambda p, x: x, t())]
    yield lambda: [l.is_data(x) for x in (A, l.Param(1.0), 3, None, l.Rngs(0))] + [l.has_data([A]), l.has_data([1])]
    yield lambda: [l.pure(l.state(t())), l.as_pure(l.state(t()))]
    for k in ({}, {"only": l.Dropout}, {"raise_if_not_found": False, "nope": 3}, {"nope": 3}):
        yield lambda k=k: l.view(t(), deterministic=True, **k)
        yield lambda k=k: l.with_attributes(t(), deterministic=True, **k)
    yield lambda: then(t(), lambda m: m.set_attributes(l.Dropout, raise_if_not_found=False, deterministic=True, nope=3))
    pair = lambda: l.List([l.Param(1.0), l.Param(2.0)])
    yield lambda: then(pair(), lambda x: [x.extend(values=[l.Param(3.0)]), x.pop(index=0), x.remove(value=x[0])])
    heads = lambda: l.Dict(a=l.Param(1.0), b=l.Param(2.0))
    yield lambda: then(heads(), lambda x: [x.pop("z", default=1), x.get("z", default=2), x.pop(key="b")])
    yield lambda: then(heads(), lambda x: x.setdefault("z", default=l.Param(3.0)))


@group
def streams(l: Any) -> Calls:
    r, raw = lambda: l.Rngs(0, params=1, dropout=2), jax.random.PRNGKey(4)
    made = [r, lambda: l.Rngs(params=jax.random.key(2, impl="rbg")), lambda: l.Rngs({"params": 3}, dropout=2), l.Rngs]
    for make in [*made, lambda: l.Rngs(raw), lambda: l.Rngs(1.5), lambda: l.Rngs(None)]:
        yield lambda f=make: then(f(), lambda r: [r.params(), r["dropout"](), r.params.normal((2,)), list(r)])
        yield lambda f=make: then(f(), lambda r: [r.split(2), r.split({"params": 2, ...: 3})])
        yield lambda f=make: then(f(), lambda r: [r.fork(), r.fork(split={"params": 2})])
    splits = [{"splits": 2}, {"splits": (2, 3), "only": "params"}, {"splits": 1, "squeeze": True}, {"splits": 1.5}]
    for k in splits:
        yield lambda k=k: then(r(), lambda x: [l.split_rngs(x, **k)][1:])
        yield lambda k=k: then(r(), lambda x: l.restore_rngs(l.split_rngs(x, **k)))
    for split in (None, 2, {"params": 2}, {"params": (2, 3)}):
        yield lambda k=split: then(r(), lambda x: [l.fork_rngs(x, split=k)][1:])
    yield lambda: then(r(), lambda x: [x.params(), l.reseed(x, params=5)])
    yield lambda: then(r(), lambda x: l.reseed(x, policy="match_shape", dropout=jax.random.key(3)))


@group
def metrics(l: Any) -> Calls:
    logits, labels, each, step = X[0, :, 0], jnp.array([0, 1, 2, 3, 1, 0]), l.metrics, lambda m, x: m.update(values=x)
    for f, x in [(f, x) for f in (each.Average, each.Welford) for x in (A, 2, jnp.array([True, False]), np.arange(3))]:
        yield lambda f=f, x=x: then(f("loss"), lambda m: [m.update(loss=x, other=1), m.update(loss=x)])
        yield lambda f=f, x=x: then(f(), lambda m: [m.update(values=x), m.reset(), l.jit(step)(m, x)])
        yield lambda f=f, x=x: f("loss").update(values=x)
    for k in (None, jnp.array([1, 0, 1]), jnp.array([True, True, False])):
        yield lambda k=k: then(each.Average(), lambda m: [m.update(values=A, mask=k), m.compute()])
    cases = [(None, logits, labels), (0.5, logits[:, 0], labels % 2), (1, logits, labels), (None, logits, labels * 1.0)]
    for t, some, y in [*cases, (None, logits[:, 0], labels), (None, logits, labels[:4])]:
        accuracy = functools.partial(each.Accuracy, threshold=t)
        yield lambda f=accuracy, k={"logits": some, "labels": y}: then(f(), lambda m: [m.update(**k), m.compute()])
    both, given = lambda: l.MultiMetric(a=each.Accuracy(), b=each.Average("loss")), {"logits": logits, "labels": labels}
    yield lambda: then(both(), lambda m: [m.update(loss=A, **given), m.compute(), m.reset()])
    yield lambda: both().update(**given)


@group
def transforms(l: Any) -> Calls:
    make, add, c, sharding = lambda: writing(l), lambda c, x: (c + x, c * x), jnp.zeros(2), X.sharding
    on = lambda run: lambda: then(make(), run)
    loss, call, size = lambda m, x: m.loss(x), lambda m, x: m(x), lambda m, x, k: m(x) * len(k)
    rows = [{}, {"donate_argnums": 0}, {"donate_argnames": "m"}, {"keep_unused": True}, {"inline": True}]
    rows += [{"in_shardings": (l.StateSharding({...: sharding}), None)}, {"in_shardings": (None,)}]
    rows += [{"out_shardings": sharding}]
    yield from (on(lambda m, k=k: l.jit(call, **k)(m, S)) for k in rows)
    yield on(lambda m: [l.jit(size, static_argnums=2)(m, S, "ab"), l.jit(size, static_argnames=("k",))(m, S, k="a")])
    for f in (l.grad, l.value_and_grad):
        for n in (0, 1, -1, (0, 1), 5, l.DiffState(0, l.BatchStat), (l.DiffState(0, l.PathContains("b")), 1)):
            yield on(lambda m, f=f, n=n: f(loss, argnums=n)(m, S))
        yield on(lambda m, f=f: f(lambda m, x: (m.loss(x), x), has_aux=True, reduce_axes=())(m, S))
        for h, at in ((True, A), (True, A + 1j), (False, A + 1j)):
            yield lambda f=f, h=h, at=at: f(lambda z: (z**2).sum(), holomorphic=h)(at)
        for k in ({}, {"allow_int": True}):
            yield lambda f=f, k=k: jax.tree.map(jnp.shape, f(lambda i: (i * 1.5).sum(), **k)(jnp.arange(3)))
    named = {"transform_metadata": {l.PARTITION_NAME: "n"}}
    name = lambda k: l.Param(c, sharding=("a",), eager_sharding=False)
    rows = [{}, {"in_axes": (0, 0), "out_axes": 1}, {"axis_name": "i", "axis_size": 3}, {"axis_size": 4}]
    for k in [*rows, {"out_axes": None}, {"spmd_axis_name": "q"}]:
        yield lambda k=k: then(stacked(l), lambda m: l.vmap(call, **k)(m, S))
    for axes in ({l.Param: 0, ...: 0}, {l.Param: 0}):
        yield lambda axes=axes: l.vmap(call, in_axes=(l.StateAxes(axes), None))(stacked(l), S[0])
    yield lambda: [l.vmap(name, **named)(A), l.scan(lambda c, k: (c, name(k)), **named)(A, A)[1]]
    moved = functools.partial(l.transform_metadata, lambda v: v, in_axes=0, out_axes=1)
    yield lambda: moved(partition="q")(l.Param(S, sharding=("q", "b"), eager_sharding=False))
    rows = [{}, {"axis_name": "i", "in_axes": 0, "out_axes": 1}, {"devices": jax.devices()[:1]}, {"donate_argnums": 0}]
    yield from (lambda k=k: l.pmap(lambda x: x * 2, **k)(S[:1] + 0) for k in [*rows, {"axis_size": 1, **named}])
    yield lambda: l.pmap(lambda x, k: x * k, static_broadcasted_argnums=1)(S[:1], 3)
    rows = [{}, {"reverse": True}, {"unroll": 2}, {"length": 3}, {"length": 4}, {"_split_transpose": True}]
    rows += [{"in_axes": (l.Carry, 1)}, {"out_axes": (l.Carry, -1)}, {"out_axes": (l.Carry, None)}]
    yield from (lambda k=k: l.scan(add, **k)(c, S.T if "in_axes" in k else S) for k in rows)
    yield lambda: then(stacked(l), lambda m: l.scan(call, in_axes=(0, l.Carry), out_axes=l.Carry)(m, S[0]))
    yield on(lambda m: l.scan(lambda m, x: (m, m(x)))(m, S)[1])
    yield on(lambda m: l.while_loop(lambda v: v[0].calls[...] < 3, lambda v: (v[0], v[0](v[1])), (m, S))[1])
    for u in (None, 2, True):
        yield on(lambda m, u=u: l.fori_loop(0, 4, lambda i, v: (v[0], v[0](v[1]) + i), (m, S), unroll=u)[1])
    for p in (True, False, jnp.array(False), 1, jnp.array(2), 1.0, None, jnp.array([True])):
        yield on(lambda m, p=p: l.cond(p, call, lambda m, x: x, m, S))
    yield from (on(lambda m, i=i: l.switch(i, [call, lambda m, x: x], m, S)) for i in (0, 5, -1, jnp.array(1), 1.0))
    for k in ({}, {"prevent_cse": False}, {"policy": jax.checkpoint_policies.everything_saveable}):
        yield on(lambda m, k=k: l.grad(l.remat(loss, **k))(m, S))
    yield on(lambda m: l.remat(size, static_argnums=2)(m, S, "ab"))
    checked = lambda m, x: (checks.check(x.sum() > 100, "small"), m(x) / 0)[1]
    for k in ({}, {"errors": checks.float_checks}):
        yield on(lambda m, k=k: (l.checkify(checked, **k)(m, S)[0].get() or "")[:5])
    mesh, P = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P
    over = functools.partial(l.shard_map, call, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    yield from (on(lambda m, k=k: over(**k)(m, S)) for k in ({}, {"axis_names": {"d"}}, {"check_vma": False}))
    yield on(lambda m: [l.eval_shape(call, m, x=S), l.eval_shape(make), l.cached_partial(l.jit(call), m)(S)])

    def ruled(**given):
        f = l.custom_vjp(lambda k, x: x * k, **given)
        f.defvjp(lambda k, x: (f(k, x), x), (lambda k, r, g: (g * k,)) if given else lambda r, g: (g[1:], g * 7.0))
        return l.grad(lambda x: f(3.0, x).sum())(S)

    yield from (ruled, lambda: ruled(nondiff_argnums=(0,)))


# Of its own machinery and modes; JAX refuses `backend` and `device` in its jit.
KEYWORDS = set("graph graph_updates recreate_variables ref_index ref_outer_index backend device out_sharding".split())
# Compared in other files, or only there in another mode, or about its own kinds of Variables.
FUNCTIONS = set(
    """get_partition_spec get_named_sharding get_abstract_model as_abstract abstract_with_sharding unflatten tabulate
    logical_axis_rules using_eager_sharding with_partitioning to_tree from_tree data static register_data_type display
    dot_product_attention_with_rope prefix split_context merge_context update_context current_update_context capture
    dot_product_attention make_attention_mask make_causal_mask combine_masks make_jaxpr with_rngs vars_as with_vars
    dataclass vjp jvp jit_partial var_defaults""".split()
)


class LackedError(Exception):
    """This flax does not have it."""


USED: dict[str, set[str]] = {}  # function of flax.nnx -> the arguments that it was given


class Spy:
    """A namespace of flax.nnx that notes which arguments its functions are given."""

    def __init__(self, namespace: Any):
        self._namespace = namespace

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._namespace, name):
            raise LackedError(name)
        found = getattr(self._namespace, name)
        if isinstance(found, types.ModuleType):
            return Spy(found)
        return functools.partial(noting, name, found) if inspect.isfunction(found) else found


def noting(name: str, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    parameters = inspect.signature(function).parameters
    if kwargs.keys() - parameters.keys() and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise LackedError(name)
    USED.setdefault(name, set()).update(inspect.signature(function).bind_partial(*args, **kwargs).arguments)
    return function(*args, **kwargs)


def outcomes(lib: Any, name: str) -> list[Any]:
    found = []
    for call in GROUPS[name](lib):
        try:
            found.append(facts(lib, call()))
        except NameError:  # of the call itself
            raise
        except Exception as error:
            found.append(error)
    return found


@functools.cache
def of_flax(name: str) -> list[Any]:
    return outcomes(Spy(flax), name)


@pytest.mark.parametrize("name", GROUPS)
def test_same_results(name):
    ours, theirs = outcomes(nnxlib, name), of_flax(name)
    assert sum(isinstance(x, Exception) for x in theirs) < len(theirs) / 2
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(b, LackedError) and not (isinstance(a, Exception) and isinstance(b, Exception)):
            assert_alike(a, b, f"{name}, call {number}", ROUNDING)


def test_no_function_and_no_keyword_is_left_out():
    for name in GROUPS:
        of_flax(name)
    left_out: set[Any] = set()
    for name, function in vars(flax).items():
        if inspect.isfunction(function) and not name.startswith("_") and name not in FUNCTIONS:
            parameters = inspect.signature(function).parameters.values()
            optional = {p.name for p in parameters if p.default is not p.empty} - KEYWORDS
            left_out |= {(name, keyword) for keyword in optional - USED.get(name, set())} | ({name} - USED.keys())
    assert not left_out
