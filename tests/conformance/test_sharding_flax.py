"""Sharding and tables: the same scripts under flax.nnx and nnxlib give the same specs, shardings and cells."""

import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import nnxlib

pytest.importorskip("flax", reason="flax is not installed (it is not, where it would change the version of JAX)")

import flax.linen
import flax.nnx

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # flax warns of its own deprecated names

MESH = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = jnp.ones((4, 4))


def same(script):
    """Run a script under both libraries and compare what it returns."""
    ours, theirs = script(nnxlib), script(flax.nnx)
    assert ours == theirs
    return ours


def values(nnx, tree):
    """The specs or shardings in a tree, by path."""
    flat = {path: x.get_value() if isinstance(x, nnx.Variable) else x for path, x in nnx.to_flat_state(tree)}
    return {path: x.spec if hasattr(x, "spec") else x for path, x in flat.items()}


def linear(nnx, *names):
    init = nnx.with_partitioning(nnx.initializers.ones, names)
    return nnx.Linear(4, 4, kernel_init=init, rngs=nnx.Rngs(0))


NAMES = {
    "axes": ("data", "model"),
    "none": (None, "model"),
    "tuple": (("data", "model"), None),
    "logical": ("embed", "mlp"),
    "mixed": ("embed", "model"),
    "short": ("embed",),
    "spec": PartitionSpec("mlp", None),
}
RULES = {
    "no rules": (),
    "all": (("embed", "data"), ("mlp", "model")),
    "some": (("mlp", None),),
    "several axes": (("embed", ("data", "model")), ("mlp", None)),
}


@pytest.mark.parametrize("names", NAMES)
def test_partition_specs(names):
    """Names with and without rules, where no two names ask for one mesh axis."""

    def script(nnx, rules):
        with nnx.use_eager_sharding(False), nnx.logical_axis_rules(rules):
            state = nnx.State(
                {"a": nnx.Param(X, out_sharding=NAMES[names]), "b": nnx.BatchStat(X), "c": nnx.Param(1.0)}
            )
            return values(nnx, nnx.get_partition_spec(state))

    for rules in RULES.values():
        if (names, rules) != ("mixed", RULES["several axes"]):
            same(lambda nnx, rules=rules: script(nnx, rules))


def test_named_shardings():
    """The shardings of a model by a mesh."""

    def script(nnx):
        with nnx.use_eager_sharding(False):
            return values(nnx, nnx.get_named_sharding(nnx.state(linear(nnx, "data", "model")), MESH))

    assert same(script)[("kernel",)] == PartitionSpec("data", "model")


def test_eager_sharding():
    """Under a mesh that knows the names, with rules, with a mesh of its own, and switched off."""

    def script(nnx):
        def spec(*names, **metadata):
            return getattr(
                nnx.Param(jnp.ones((4, 4)), out_sharding=names, **metadata).get_value().sharding, "spec", None
            )

        found = [spec("data", "model", mesh=MESH)]
        with jax.set_mesh(MESH):
            found += [spec("data", "model"), spec("data"), spec(), linear(nnx, None, "model").kernel[...].sharding.spec]
            found += [spec("data", eager_sharding=False)]
            with nnx.logical_axis_rules((("embed", "model"),)):
                found += [spec("embed", "data")]
            with nnx.use_eager_sharding(False):
                found += [spec("data", "model"), nnx.using_eager_sharding()]
        return [*found, nnx.using_eager_sharding()]

    assert same(script)[1] == PartitionSpec("data", "model")


def test_rules_of_linen():
    """Code that uses Linen as well sets the rules by its function; rules of nnx.logical_axis_rules come before."""

    def script(nnx):
        def spec():
            param = nnx.Param(jnp.ones((4, 4)), out_sharding=("embed", "mlp"))
            found = [
                param.get_value().sharding.spec,
                *values(nnx, nnx.get_partition_spec(nnx.State({"a": param}))).values(),
            ]
            return [*found, *values(nnx, nnx.get_named_sharding(nnx.State({"a": param}), MESH)).values()]

        with jax.set_mesh(MESH), flax.linen.logical_axis_rules((("embed", "data"), ("mlp", "model"))):
            found = spec()
            with nnx.logical_axis_rules((("embed", "model"), ("mlp", "data"))):
                return found, spec()

    found, within = same(script)
    assert found == [PartitionSpec("data", "model")] * 3
    assert within == [PartitionSpec("model", "data")] * 3


def test_abstract_models():
    """eval_shape under a mesh, as_abstract afterwards, get_abstract_model."""

    def specs(nnx, tree):
        flat = nnx.to_flat_state(nnx.state(tree) if isinstance(tree, nnx.Module) else tree)
        return {path: getattr(x.get_value().sharding, "spec", None) for path, x in flat}

    def script(nnx):
        with jax.set_mesh(MESH):
            eager = nnx.eval_shape(lambda: linear(nnx, "data", "model"))
            with nnx.use_eager_sharding(False):
                late = nnx.as_abstract(nnx.eval_shape(lambda: linear(nnx, "data", None)))
        with nnx.use_eager_sharding(False):
            _, state = nnx.get_abstract_model(lambda: linear(nnx, "data", "model"), MESH)
        found = [specs(nnx, tree) for tree in (eager, late, state)]
        return [found[0][("kernel",)], found[1][("kernel",)], found[2]]

    assert same(script)[2][("bias",)] == PartitionSpec()


def test_the_published_pattern():
    """A model that is made under jit with constraints; that it is sharded takes several devices to see."""

    def script(nnx):
        @nnx.jit
        def create():
            model = linear(nnx, "data", "model")
            state = nnx.state(model)
            sharded = jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state))
            nnx.update(model, sharded)
            return model

        with nnx.use_eager_sharding(False), MESH:
            return create().kernel.get_value().tolist()

    same(script)


def test_signatures():
    """Every parameter of flax's functions is one of ours, in its place, but for the mode switches."""
    names = [
        *("get_partition_spec", "get_named_sharding", "logical_axis_rules", "use_eager_sharding", "get_abstract_model"),
        *("as_abstract", "abstract_with_sharding", "with_partitioning", "using_eager_sharding", "tabulate", "display"),
    ]
    for name in names:
        ours, theirs = (
            [(p.name, p.kind) for p in inspect.signature(getattr(nnx, name)).parameters.values() if p.name != "graph"]
            for nnx in (nnxlib, flax.nnx)
        )
        assert [p for p in ours if p != ("columns", inspect.Parameter.KEYWORD_ONLY)] == theirs, name


# --- tables ---------------------------------------------------------------------------------------------------------


def table(nnx, *args, **kwargs):
    """The cells of a table by row, without the rules between them."""
    text = nnx.tabulate(*args, console_kwargs={"width": 250, "force_terminal": False}, **kwargs)
    rows, row = [], []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).split("\n"):
        if line.startswith(("│", "┃")):
            row.append([cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]])
        elif row:
            rows.append([" ".join(filter(None, cell)).replace(",", "") for cell in zip(*row)])
            row = []
    return rows


def block(nnx):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, scale=1.0):
            return self.dropout(self.norm(self.linear(x))) * scale

        def encode(self, x):
            return {"a": self.linear(x)}

    return Block(nnx.Rngs(0))


@pytest.fixture
def restored():
    """Afterwards the layers of flax have the methods of before: its tabulate leaves them with wrapped ones."""
    before = {kind: dict(vars(kind)) for kind in (flax.nnx.Linear, flax.nnx.BatchNorm, flax.nnx.Dropout)}
    yield
    for kind, methods in before.items():
        for name in vars(kind).keys() - methods.keys():
            delattr(kind, name)
        for name, method in methods.items():
            if vars(kind)[name] is not method:
                setattr(kind, name, method)


def test_tables(restored):
    """The same rows, columns, cells, sizes and totals."""
    rows = same(lambda nnx: table(nnx, block(nnx), X, scale=2.0))
    assert [row[0] for row in rows] == ["path", "", "linear", "norm", "dropout", ""]
    same(lambda nnx: table(nnx, block(nnx), X, depth=0))
    same(lambda nnx: table(nnx, block(nnx), X, method="encode"))
    same(lambda nnx: table(nnx, block(nnx), X, row_filter=lambda row: row.type is nnx.Linear))


def test_rows_of_methods(restored):
    """A method that is no __call__ ends the path, also one of its own that a Module calls."""

    def nested(nnx):
        class Net(nnx.Module):
            def __init__(self):
                self.block = block(nnx)

            def __call__(self, x):
                return self.head(self.block.encode(x)["a"])

            def head(self, x):
                return x * 2

        return Net()

    rows = same(lambda nnx: [row[:4] for row in table(nnx, nested(nnx), X)])
    assert [row[0] for row in rows] == ["path", "", "block/encode", "block/linear", "head", ""]


def test_axes_under_other_names():
    """Metadata that names the axes gets the name that transform_metadata has for it, and loses it again."""

    def script(nnx):
        axes = {nnx.PARTITION_NAME: "layers", "logical": "depth", "absent": "depth"}
        options = {"in_axes": 0, "out_axes": 0, "transform_metadata": axes}
        names = {"out_sharding": ("a", "b"), "eager_sharding": False, "logical": ("c", "d"), "note": "text"}
        made = nnx.vmap(lambda _: nnx.Param(jnp.ones((2, 3)), **names), **options)(jnp.arange(4))
        seen = [(made.out_sharding, made.logical, made.note)]
        nnx.vmap(lambda v: seen.append((v.out_sharding, v.logical)), **options)(made)
        return seen

    same(script)


def test_moments_in_other_shards():
    """The names of their axes are metadata of the parameter."""
    optax = pytest.importorskip("optax")

    def script(nnx):
        with jax.set_mesh(MESH):
            names = {"out_sharding": ("data", None), "optimizer_sharding": (None, "model")}
            model = nnx.Linear(4, 4, kernel_metadata=names, rngs=nnx.Rngs(0))
            moment = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param).opt_state[0].mu["kernel"]
            found = [(v.get_metadata().get("optimizer_sharding"), v[...].sharding.spec) for v in (model.kernel, moment)]
            return [*found, moment.out_sharding]

    same(script)


def test_estimates(restored):
    """The same numbers of operations; the last row is ours alone, and has their totals."""
    estimates = {"compute_flops": True, "compute_vjp_flops": True}
    same(lambda nnx: table(nnx, nnx.Linear(4, 2, rngs=nnx.Rngs(0)), X, **estimates)[:-1])
    ours, theirs = ([row[4] for row in table(nnx, block(nnx), X, compute_flops=True)] for nnx in (nnxlib, flax.nnx))
    assert ours[2:-1] == theirs[2:-1]
