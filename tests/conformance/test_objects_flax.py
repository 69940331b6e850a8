"""Variables, Modules and containers: the same script under flax.nnx and nnxlib gives the same results."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")


from .results import same

# flax warns of its own deprecated names, that hooks are deprecated, and of casts in `v[...] = x`.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def ran(script):
    """The two agree, and on more than an error."""
    assert not isinstance(same(script), Exception)


# --- Variables ---


@pytest.mark.parametrize("write", [False, True])
def test_overridden_access(write):
    """A class may override how its value is read or written, and pass on the defaults of flax."""
    missing = pytest.importorskip("flax.typing").MISSING

    def script(nnx):
        class Squared(nnx.Param):
            if write:

                def set_value(self, value, *, index=missing):
                    super().set_value(value**2, index=index)

            else:

                def get_value(self, *, index=missing):
                    return super().get_value(index=index) ** 2

        v = Squared(jnp.arange(1.0, 4.0))
        v.value = v.value + 1
        v[0] = v[1]
        return v.value, v[...], v[1], nnx.grad(lambda v: v[...].sum())(v), nnx.jit(lambda v: v * 2)(v)

    ran(script)


def test_wrappers_pass_on_that_there_is_no_function():
    """`nnx.grad` and its like are decorators then."""
    missing = pytest.importorskip("flax.typing").MISSING

    def script(nnx):
        def grad(f=missing, **options):
            return nnx.grad(f, **options)

        return grad(argnums=1)(lambda x, y: x * y**2)(2.0, 3.0), grad(jnp.sin)(0.0)

    ran(script)


BINARY = "add sub mul truediv floordiv mod pow eq".split()  # flax has no other comparisons
OTHERS = {"number": 2.0, "array": jnp.array([1.0, 2.0, 4.0]), "NumPy": np.array([1, 2, 4], np.float32)}


@pytest.mark.parametrize("kind", [*OTHERS, "Variable"])
@pytest.mark.parametrize("name", BINARY)
def test_operators(name, kind):
    """Every operator with numbers, arrays and Variables on either side."""
    op = getattr(operator, name)

    def script(nnx):
        v, x = nnx.Param(jnp.array([3.0, 2.0, 1.0])), OTHERS.get(kind, nnx.BatchStat(jnp.array([1.0, 2.0, 4.0])))
        return op(v, x), op(x, v)

    ran(script)


VARIABLES = {
    "unary": lambda nnx: [op(nnx.Param(jnp.array([-1.5, 2.0]))) for op in (operator.neg, operator.pos, abs)],
    "matmul": lambda nnx: nnx.Param(jnp.ones((2, 3))) @ nnx.Param(jnp.ones((3, 1))),
    "conversions": lambda nnx: [f(nnx.Param(jnp.array(2.0))) for f in (float, int, complex, np.asarray, jnp.asarray)],
    "length and iteration": lambda nnx: (len(nnx.Param(jnp.ones((3, 2)))), list(nnx.Param(jnp.arange(3)))),
    "membership": lambda nnx: (2 in nnx.Param(jnp.arange(3)), 5 in nnx.Param(jnp.arange(3))),
    "item": lambda nnx: (nnx.Param(jnp.arange(6).reshape(2, 3))[1, ::2], nnx.Param(jnp.arange(3))[:, None]),
    "item out of reach": lambda nnx: nnx.Param({"a": 1})["b"],
    "attributes": lambda nnx: (
        lambda v: (v.shape, v.dtype.name, v.T.shape, v.at[0].set(7), v.sum(), v.astype(int), v.ndim)
    )(nnx.Param(jnp.ones((2, 3)))),
    "missing attribute": lambda nnx: nnx.Param(jnp.ones(1)).nonsense,
    "functions": lambda nnx: [f(nnx.Param(jnp.array([0.5, 1.0]))) for f in (jnp.sin, jnp.sum, jax.nn.softplus, np.sum)],
    "metadata": lambda nnx: (lambda v: (v.a, v.get_metadata("a"), v.get_metadata("b", 5), v.has_metadata("b")))(
        nnx.Param(1.0, a=1)
    ),
    "missing metadata": lambda nnx: nnx.Param(1.0).get_metadata("a"),
    "replace": lambda nnx: (lambda v: (v, v.a, v.b))(nnx.Param(1.0, a=1).replace(2.0, b=2)),
    "copy": lambda nnx: (lambda v: (v.copy() is v, v.copy(), v.copy().a))(nnx.Param(jnp.ones(2), a=1)),
    "type": lambda nnx: nnx.BatchStat(1.0).type,
    "raw value": lambda nnx: (lambda v: (v.set_raw_value(3.0), v.get_raw_value(), v.raw_value))(nnx.Param(1.0)),
    "get index": lambda nnx: nnx.Param(jnp.arange(3)).get_value(index=1),
    "copy_from another type": lambda nnx: nnx.Param(1.0).copy_from(nnx.BatchStat(2.0)),
    "set an attribute": lambda nnx: setattr(nnx.Param(1.0), "foo", 1),
    "delete missing metadata": lambda nnx: nnx.Param(1.0).del_metadata("a"),
    "leaves": lambda nnx: jax.tree.leaves(nnx.Param(jnp.ones(2))),
    "key path": lambda nnx: [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(nnx.Param(1.0))],
    "tree.map": lambda nnx: jax.tree.map(lambda x: x * 2, [nnx.Param(1.0, a=1), nnx.BatchStat(2.0)]),
    "deepcopy": lambda nnx: copy.deepcopy(nnx.Param({"x": [1.0]}, a=1)),
    "pickle": lambda nnx: pickle.loads(pickle.dumps(nnx.Param(np.ones(2)))),
    "any pytree": lambda nnx: nnx.Variable({"x": jnp.ones(1), "y": (1, None)}),
    "names": lambda nnx: [
        nnx.variable_name_from_type(x) for x in (nnx.Param, nnx.BatchStat, nnx.Cache, nnx.Intermediate)
    ],
    "types": lambda nnx: [nnx.variable_type_from_name(x) for x in ("params", "batch_stats", "cache", "perturbations")],
    "unknown name": lambda nnx: nnx.variable_type_from_name("nonsense"),
    "unknown type": lambda nnx: nnx.variable_name_from_type(type("Unnamed", (nnx.Variable,), {})),
    "name on demand": lambda nnx: nnx.variable_type_from_name("conformance_name", allow_register=True).__mro__[1],
    "boxed metadata": lambda nnx: (lambda v: (v, v.a))(nnx.Param(nnx.with_metadata(lambda: 2.0, a=1)())),
}


@pytest.mark.parametrize("script", VARIABLES.values(), ids=VARIABLES.keys())
def test_variables(script):
    """Values, metadata, copies, names."""
    same(script)


def write(name):
    """A script that writes to a Variable, and reads it."""

    def script(nnx):
        v = nnx.Param(jnp.zeros(3), a=1)
        WRITES[name](v)
        return v, v.get_metadata("a", None), v.get_metadata("b", None)

    return script


WRITES = {
    "value": lambda v: setattr(v, "value", jnp.ones(2)),
    "item": lambda v: operator.setitem(v, 1, 5.0),
    "slice": lambda v: operator.setitem(v, slice(1, None), 5.0),
    "all": lambda v: operator.setitem(v, ..., jnp.arange(3.0)),
    "all from a number": lambda v: operator.setitem(v, ..., 2),
    "all from an int array": lambda v: operator.setitem(v, ..., jnp.arange(3)),
    "all from one": lambda v: operator.setitem(v, ..., jnp.ones(1)),
    "all from NumPy": lambda v: operator.setitem(v, ..., np.ones(3)),
    "all from a list": lambda v: operator.setitem(v, ..., [1, 2, 3]),
    "all from another shape": lambda v: operator.setitem(v, ..., jnp.ones((2, 3))),
    "set_value": lambda v: v.set_value(jnp.ones(4)),
    "set_value by index": lambda v: v.set_value(5.0, index=0),
    "set_metadata": lambda v: v.set_metadata(b=2),
    "set_metadata by name": lambda v: v.set_metadata("b", 2),
    "replace metadata": lambda v: v.set_metadata({"b": 3}),
    "del_metadata": lambda v: v.del_metadata("a"),
    "update_from_state": lambda v: v.update_from_state(v.replace(jnp.ones(1), b=7)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(name):
    """Each way to write leaves the same value, shape, dtype and metadata."""
    same(write(name))


def test_hooks():
    """Hooks as metadata and as methods run at the same reads and writes, on the same values."""

    def script(nnx):
        class Halved(nnx.Variable):
            def on_create_value(self, value):
                return value / 2

            def on_set_value(self, value):
                return value / 2

            def on_get_value(self, value):
                return value * 2

        a = Halved(jnp.array([2.0, 4.0]))
        b = nnx.Param(jnp.zeros(2), on_set_value=lambda v, x: x * 10, on_get_value=lambda v, x: x + 1)
        found = [a.raw_value, a.value, a[0], a + 0]
        a.value, b.value = jnp.array([8.0, 2.0]), jnp.ones(2)
        found += [a.raw_value, b.raw_value, b.value]
        a[0], b[0] = 6.0, 5.0
        found += [a.raw_value, b.raw_value]
        a[...], b[...] = 1.0, jnp.full(2, 3.0, jnp.float32)
        return [*found, a.raw_value, b.raw_value, a.replace(7.0).raw_value]

    ran(script)


def test_overridden_get_value_and_set_value():
    """What flax recommends in place of hooks: methods of a subclass, at every read and write."""

    def script(nnx):
        class Scaled(nnx.Variable):
            def get_value(self, **kwargs):
                return super().get_value(**kwargs) * 2

            def set_value(self, value, **kwargs):
                super().set_value(value / 2, **kwargs)

        v = Scaled(jnp.array([4.0, 2.0]))
        found = [v.raw_value, v.value, v[...], v[0], v + 0, jnp.sin(v), v.shape]
        v.value = jnp.array([8.0, 8.0])
        v[0] = 2.0
        return [*found, v.raw_value, list(v), v @ v]

    ran(script)


def test_axis_hooks():
    """add_axis and remove_axis tell the hooks the same."""

    def script(nnx):
        seen = []
        hook = lambda name: lambda v, *args: seen.append((name, *args))
        v = nnx.Param(jnp.ones(1), on_add_axis=hook("add"), on_remove_axis=hook("remove"))
        v.add_axis(0, "layers")
        v.remove_axis(1, None)
        return seen

    ran(script)


# --- data and static ---

VALUES = {
    "array": lambda nnx: jnp.ones(1),
    "NumPy array": lambda nnx: np.ones(1),
    "key": lambda nnx: jax.random.key(0),
    "Variable": lambda nnx: nnx.Param(1.0),
    "Rngs": lambda nnx: nnx.Rngs(0),
    "List": lambda nnx: nnx.List([]),
    "Dict": lambda nnx: nnx.Dict(),
    "int": lambda nnx: 1,
    "float": lambda nnx: 1.0,
    "text": lambda nnx: "a",
    "None": lambda nnx: None,
    "NumPy scalar": lambda nnx: np.float32(1),
    "list of ints": lambda nnx: [1],
    "function": lambda nnx: jnp.sin,
    "class": lambda nnx: nnx.Module,
    "GraphDef": lambda nnx: nnx.graphdef(nnx.Dict()),
}


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES.keys())
def test_is_data(make):
    """What counts as data by its value; how many leaves an attribute of that value has."""

    def script(nnx):
        class Holder(nnx.Module):
            def __init__(self):
                self.x = make(nnx)

        return nnx.is_data(make(nnx)), len(jax.tree.leaves(nnx.state(Holder()))), len(jax.tree.leaves(Holder()))

    ran(script)


def test_declarations():
    """nnx.data and nnx.static at assignment, by annotation, as dataclass fields."""

    def script(nnx):
        class A(nnx.Module):
            c: nnx.Data[int]
            d: nnx.Static[int]
            e: "nnx.Data[int]"

            def __init__(self):
                self.a, self.b, self.c, self.d, self.e = nnx.data(1), nnx.static(2), 3, 4, 5

        @nnx.dataclass
        class B(nnx.Module):
            w: nnx.Param
            a: nnx.Data[int] = 1
            b: int = nnx.data(default=2)
            c: int = nnx.static(default=3)
            d: int = 4

        m = A()
        m.a = 10
        b = B(nnx.Param(1.0), b=7)
        return nnx.state(m), nnx.state(b), (b.a, b.b, b.c, b.d), jax.tree.leaves(m), jax.tree.leaves(b)

    ran(script)


# --- Modules and containers ---


def net(nnx):
    class Block(nnx.Module):
        def __init__(self, n):
            self.w = nnx.Param(jnp.full((n,), 2.0))
            self.stat = nnx.BatchStat(jnp.zeros(()))
            self.n = n

        def __call__(self, x):
            self.stat.value = self.stat + x.sum()
            self.sow(nnx.Intermediate, "h", x)
            return self.perturb("p", x * self.w)

    class Net(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([Block(2), Block(2)])
            self.heads = nnx.Dict(a=Block(2))
            self.tied = self.blocks[0]
            self.drop = nnx.Dropout(0.5)
            self.norm = nnx.BatchNorm(2, use_running_average=None, rngs=nnx.Rngs(0))
            self.act = jnp.tanh

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return self.act(self.heads.a(x))

    return Net()


MODULES = {
    "forward": lambda nnx: (lambda m: (m(jnp.ones(2)), m.blocks[0].stat, m.blocks[1].h, m.heads.a.p))(net(nnx)),
    "train and eval": lambda nnx: (
        lambda m: [
            (f(m) if f else None, m.drop.deterministic, m.norm.use_running_average)
            for f in (None, lambda m: m.eval(), lambda m: m.train(), lambda m: m.train(rate=0.1))
        ]
    )(net(nnx)),
    "set_attributes": lambda nnx: (lambda m: (m.set_attributes(nnx.Dropout, rate=0.1), m.drop.rate))(net(nnx)),
    "set_attributes missing": lambda nnx: net(nnx).set_attributes(nonsense=1),
    "set_attributes not strict": lambda nnx: net(nnx).set_attributes(nonsense=1, raise_if_not_found=False),
    "iter_modules": lambda nnx: [(p, type(x).__name__) for p, x in nnx.iter_modules(net(nnx))],
    "iter_modules method": lambda nnx: [p for p, _ in net(nnx).iter_modules()],
    "iter_children": lambda nnx: [(k, type(x).__name__) for k, x in nnx.iter_children(net(nnx))],
    "iter_children method": lambda nnx: [k for k, _ in net(nnx).iter_children()],
    "iter_module_children": lambda nnx: [k for k, _ in nnx.iter_module_children(net(nnx))],
    "sow over a Param": lambda nnx: net(nnx).blocks[0].sow(nnx.Intermediate, "w", 1.0),
    "sow with a reduction": lambda nnx: (
        lambda m: (
            [m.sow("conformance_sum", "s", i, reduce_fn=lambda a, b: a + b, init_fn=lambda: 0) for i in (1, 2)],
            m.s,
        )
    )(net(nnx)),
    "view": lambda nnx: (lambda m, v: (v.drop.deterministic, m.drop.deterministic, v.tied is v.blocks[0]))(
        *(lambda m: (m, nnx.view(m, deterministic=True)))(net(nnx))
    ),
    "view missing": lambda nnx: nnx.view(net(nnx), nonsense=True),
    "with_attributes": lambda nnx: (lambda m, v: (v.drop.rate, m.drop.rate, v.blocks[0].w is m.blocks[0].w))(
        *(lambda m: (m, nnx.with_attributes(m, rate=0.1)))(net(nnx))
    ),
    "with_attributes missing": lambda nnx: nnx.with_attributes(net(nnx), nonsense=1),
    "Sequential": lambda nnx: nnx.Sequential(lambda x: (x, x), lambda a, b: {"a": a, "b": b}, lambda a, b: a + b)(3),
    "Sequential empty": lambda nnx: nnx.Sequential()(3),
    "Sequential wrong": lambda nnx: nnx.Sequential(3)(1.0),
    "missing attribute": lambda nnx: net(nnx).nonsense,
    "deepcopy": lambda nnx: (lambda m: (m.tied is m.blocks[0], nnx.state(m)))(copy.deepcopy(net(nnx))),
    "hash and equality": lambda nnx: (lambda a, b: (a == b, a == a, len({a, b})))(net(nnx), net(nnx)),
    "List": lambda nnx: (
        lambda x: (x.append(3), x.insert(0, 9), x.pop(), x.pop(0), len(x), list(x), list(x[1:]), 2 in x)
    )(nnx.List([1, 2, 4])),
    "List items": lambda nnx: (
        lambda x: (operator.setitem(x, 0, 5), operator.delitem(x, 1), list(x), list(reversed(x)))
    )(nnx.List([1, 2, 3])),
    "List index out of range": lambda nnx: nnx.List([1])[3],
    "List extend": lambda nnx: (lambda x: (x.extend([4, 5]), list(x)))(nnx.List([1])),
    "Dict": lambda nnx: (
        lambda x: (x["a"], x.a, x.get("z"), sorted(x), len(x), "a" in x, x.pop("b"), sorted(x.items()))
    )(nnx.Dict(a=1, b=2)),
    "Dict writes": lambda nnx: (
        lambda x: (operator.setitem(x, "c", 3), x.update(d=4), operator.delitem(x, "a"), sorted(x))
    )(nnx.Dict({"a": 1})),
    "Dict missing": lambda nnx: nnx.Dict()["a"],
    "Dict missing attribute": lambda nnx: nnx.Dict().a,
    "states of containers": lambda nnx: nnx.state(
        nnx.List([nnx.Param(1.0), nnx.Dict(b=nnx.BatchStat(2.0)), nnx.List([3])])
    ),
    "items declared data": lambda nnx: nnx.state(nnx.List([nnx.data(jnp.ones(1)), nnx.data(nnx.Param(1.0))])),
    "pytree declared data": lambda nnx: (lambda x: (nnx.state(x), nnx.jit(lambda x: x["a"][3] + x["a"][0])(x)))(
        nnx.Dict(a=nnx.data((1, "b", jnp.sin, jnp.ones(1))))
    ),
    "key paths": lambda nnx: [
        jax.tree_util.keystr(p)
        for p, _ in jax.tree_util.tree_leaves_with_path(
            nnx.Dict(l=nnx.List([nnx.Param(1.0)]), d=nnx.Dict(a=jnp.ones(1)))
        )
    ],
    "is_leaf": lambda nnx: jax.tree.leaves(net(nnx).blocks, is_leaf=lambda x: isinstance(x, nnx.Variable)),
    "raw grad": lambda nnx: nnx.state(
        jax.grad(lambda m, x: (m.w * x).sum())(net(nnx).blocks[1], jnp.arange(2.0)), nnx.Param
    ),
    "raw jit": lambda nnx: nnx.state(jax.jit(lambda m: jax.tree.map(lambda x: x + 1, m))(net(nnx).blocks[1])),
}


@pytest.mark.parametrize("script", MODULES.values(), ids=MODULES.keys())
def test_modules(script):
    """Modes, recording, submodules, views, containers, raw JAX."""
    same(script)


def test_none_and_numbers_may_change():
    """An attribute that was None becomes a number and a text, in both."""

    def script(nnx):
        m = net(nnx)
        m.x = None
        m.x = 3
        m.x = "a"
        return m.x, hasattr(m, "y"), nnx.state(m.heads)

    ran(script)


DECLARED = {
    "a dict": lambda x: {"a": x, "b": 2 * x},
    "a list": lambda x: [x, 2 * x],
    "a dict of lists": lambda x: {"a": [x, x], "b": [x]},
}

USES = {
    "map": lambda nnx, m, batch: jax.tree.map(jnp.add, m.buffer, batch),
    "map the other way": lambda nnx, m, batch: jax.tree.map(jnp.add, batch, m.buffer),
    "raw jit": lambda nnx, m, batch: jax.jit(lambda m, b: jax.tree.map(jnp.add, m.buffer, b))(m, batch),
    "jit": lambda nnx, m, batch: nnx.jit(added)(m, batch),
    "scan": lambda nnx, m, batch: nnx.scan(lambda m, i: (added(m, batch), i), in_axes=(nnx.Carry, 0))(m, jnp.arange(3)),
    "cond": lambda nnx, m, batch: nnx.cond(jnp.array(True), added, lambda m, b: m, m, batch),
    "fori_loop": lambda nnx, m, batch: nnx.fori_loop(0, 3, lambda i, m: added(m, batch), m),
    "state": lambda nnx, m, batch: [path for path, _ in nnx.to_flat_state(nnx.state(m))],
    "split and merge": lambda nnx, m, batch: nnx.merge(*nnx.split(m)).buffer,
    "update": lambda nnx, m, batch: nnx.update(m, jax.tree.map(lambda x: 3 * x, nnx.state(m))),
    "clone": lambda nnx, m, batch: nnx.clone(m).buffer,
    "key paths": lambda nnx, m, batch: [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(m)],
}


def added(m, batch):
    m.buffer = jax.tree.map(jnp.add, m.buffer, batch)
    return m


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_list_or_dict_of_arrays(name, use):
    """It is a pytree like a batch, before and after, and has the type of one."""

    def script(nnx):
        class Held(nnx.Module):
            def __init__(self):
                self.buffer = nnx.data(DECLARED[name](jnp.arange(2.0)))

        m = Held()
        out = USES[use](nnx, m, DECLARED[name](jnp.ones(2)))
        return out, m.buffer, str(jax.tree.structure(m.buffer))

    ran(script)
