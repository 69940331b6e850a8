"""Shardings under nnx.jit; run by test_jit.py in a process that has eight CPU devices."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnxlib as nnx
from nnxlib.core import errors

MESH = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))
ROWS, COLUMNS, BOTH, WHOLE = (
    NamedSharding(MESH, PartitionSpec(*axes)) for axes in (("data",), (None, "model"), ("data", "model"), ())
)
X = jnp.arange(32.0).reshape(4, 8)


class Net(nnx.Module):
    def __init__(self):
        self.kernel, self.bias = nnx.Param(jnp.ones((8, 8))), nnx.Param(jnp.ones(8))
        self.mean = nnx.BatchStat(jnp.zeros((4, 8)))

    def __call__(self, x):
        self.mean += x
        return x @ self.kernel + self.bias


BY_FILTER = nnx.StateSharding({nnx.PathContains("kernel"): COLUMNS, nnx.BatchStat: ROWS, ...: WHOLE})


def sharded():
    model = Net()
    model.kernel.value = jax.device_put(model.kernel.value, COLUMNS)
    model.mean.value = jax.device_put(model.mean.value, ROWS)
    model.bias.value = jax.device_put(model.bias.value, WHOLE)
    return model


def is_like(x, sharding):
    return x.sharding.is_equivalent_to(sharding, x.ndim)


def check(jitted, *args):
    """Call twice; the numbers are those of the eager call."""
    model, eager = sharded(), Net()
    for _ in range(2):
        np.testing.assert_array_equal(jitted(model, X, *args), eager(X))
        np.testing.assert_array_equal(model.mean.value, eager.mean.value)
    return model, jitted(model, X, *args)


def test_eight_devices():
    """The process has them."""
    assert jax.device_count() == 8


def test_shardings_of_the_inputs():
    """A StateSharding for a Module, a plain sharding for an array; what changes keeps its sharding."""
    model, _ = check(nnx.jit(lambda m, x: m(x), in_shardings=(BY_FILTER, WHOLE)))
    assert is_like(model.mean.value, ROWS)
    assert is_like(model.kernel.value, COLUMNS)


def test_what_is_computed_from_the_inputs_is_where_they_are():
    """Arrays and Variables come to the function with the sharding that was asked for."""
    model = Net()
    out = nnx.jit(lambda m, x: (m.kernel + 1, x + 1), in_shardings=(BY_FILTER, ROWS))(model, X)
    assert is_like(out[0], COLUMNS)
    assert is_like(out[1], ROWS)


def test_uncommitted_inputs_are_placed():
    """A model that is on one device is placed as asked; what it writes comes back with that sharding."""
    model = Net()
    nnx.jit(lambda m, x: m(x), in_shardings=(BY_FILTER, ROWS))(model, X)
    assert is_like(model.mean.value, ROWS)


def placements(model):
    return {path[-1]: variable.value.sharding for path, variable in nnx.state(model).flat_state()}


ASKED = {"kernel": COLUMNS, "mean": ROWS, "bias": WHOLE}


def test_what_is_only_read_stays_where_it_was_moved():
    """So it is moved once: the next call takes the very arrays. What is not read is moved with it."""
    read = nnx.jit(lambda m: m.kernel.sum(), in_shardings=(BY_FILTER,))
    first, second = Net(), Net()
    for model in (first, second):  # the second by the short way
        assert read(model) == 64.0
        assert placements(model) == ASKED
        arrays = jax.tree.leaves(nnx.state(model))
        read(model)
        assert all(x is y for x, y in zip(arrays, jax.tree.leaves(nnx.state(model)), strict=True))
    second.kernel.value = jnp.zeros((8, 8))
    assert read(second) == 0.0
    assert placements(second) == ASKED
    np.testing.assert_array_equal(first.kernel.value, np.ones((8, 8)))


def test_a_spec_is_of_the_mesh_around():
    """A PartitionSpec in in_shardings moves Variables of any kind of value, under ``jax.set_mesh``."""
    model = Net()
    model.extra = nnx.Variable({"a": jnp.ones(8), "b": 2})
    with jax.set_mesh(MESH):
        nnx.jit(lambda m: None, in_shardings=(PartitionSpec(),))(model)
    assert model.extra.value["a"].sharding == WHOLE
    assert model.extra.value["b"] == 2
    assert set(placements(nnx.List([model.kernel, model.bias])).values()) == {WHOLE}


def test_what_is_elsewhere_is_moved_once_to_a_spec():
    """From other axes of the mesh, and from another mesh; the next call takes the very arrays."""
    model = nnx.Dict(own=nnx.Param(jnp.ones(8)), other=nnx.Param(jnp.ones(8)), mesh=nnx.Param(jnp.ones(8)))
    model.other.value = jax.device_put(model.other.value, NamedSharding(MESH, PartitionSpec("model")))
    line = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
    model.mesh.value = jax.device_put(model.mesh.value, NamedSharding(line, PartitionSpec("data")))
    read = nnx.jit(lambda m: m.own.sum(), in_shardings=(PartitionSpec("data"),))
    with jax.set_mesh(MESH):
        read(model)
        arrays = jax.tree.leaves(nnx.state(model))
        assert {x.sharding for x in arrays} == {ROWS}
        read(model)
    assert all(x is y for x, y in zip(arrays, jax.tree.leaves(nnx.state(model)), strict=True))


def test_what_was_placed_otherwise_is_named():
    """JAX does not move it, and gives only its shape."""
    model = sharded()
    model.bias.value = jnp.ones(8)
    with pytest.raises(ValueError, match="does not match the sharding on the respective arg") as error:
        nnx.jit(lambda m: m.kernel.sum(), in_shardings=(nnx.StateSharding({nnx.Param: ROWS, ...: WHOLE}),))(model)
    (note,) = [note for note in error.value.__notes__ if "have that sharding" in note]
    assert "args[0].kernel" in note
    assert "bias" not in note


@pytest.mark.filterwarnings("ignore:`with mesh:DeprecationWarning")  # deprecated, and in much published code
def test_a_call_that_fails_or_has_no_shardings_moves_nothing():
    model = Net()
    arrays = jax.tree.leaves(nnx.state(model))
    with pytest.raises(ZeroDivisionError):
        nnx.jit(lambda m: 1 // 0, in_shardings=(BY_FILTER,))(model)
    nnx.jit(lambda m: m.kernel.sum(), in_shardings=(None,))(model)
    with MESH:
        nnx.jit(lambda m: m.kernel.sum(), in_shardings=(None,))(model)
    nnx.jit(lambda m: m.kernel.sum(), out_shardings=WHOLE)(model)
    assert all(x is y for x, y in zip(arrays, jax.tree.leaves(nnx.state(model)), strict=True))
    jax.jit(lambda x: nnx.jit(lambda m: m.kernel.sum() + x, in_shardings=(BY_FILTER,))(model))(1.0)
    assert all(x is y for x, y in zip(arrays, jax.tree.leaves(nnx.state(model)), strict=True))


def test_one_sharding_for_all():
    """A single sharding stands for every leaf of an argument, or of all arguments."""
    model = Net()
    nnx.jit(lambda m, x: m(x), in_shardings=WHOLE)(model, X)
    assert is_like(model.mean.value, WHOLE)
    assert len(model.mean.value.sharding.device_set) == 8


def test_none_leaves_it_to_the_input():
    """None in a prefix takes the input as it comes."""
    model, _ = check(nnx.jit(lambda m, x: m(x), in_shardings=(None, ROWS)))
    assert is_like(model.mean.value, ROWS)


def test_shardings_of_the_outputs():
    """out_shardings place arrays and the Variables of Modules that are made inside."""
    model, out = check(nnx.jit(lambda m, x: m(x), out_shardings=BOTH))
    assert is_like(out, BOTH)
    made, total, one = nnx.jit(lambda: (Net(), X.sum(), 1.0), out_shardings=(BY_FILTER, WHOLE, WHOLE))()
    assert is_like(made.kernel.value, COLUMNS)
    assert is_like(made.mean.value, ROWS)
    assert is_like(made.bias.value, WHOLE)
    assert total.item() == X.sum()
    assert is_like(one, WHOLE)


@pytest.mark.parametrize("rows", [ROWS, PartitionSpec("data")], ids=["sharding", "spec"])
def test_a_sharding_that_does_not_fit_what_comes_back(rows):
    """The error lists the paths of all such arrays, as a step makes, changes and returns them."""

    class Head(nnx.Module):
        def __init__(self):
            self.kernel, self.bias, self.count = (nnx.Param(jnp.ones(shape)) for shape in ((8, 3), 3, ()))

    def shrink(model):
        model.mean.value = model.mean[:3]
        return {"heads": [Head()], "x": X}

    by_type = nnx.StateSharding({nnx.BatchStat: rows, ...: None})
    jitted = nnx.jit(shrink, in_shardings=(by_type,), out_shardings=rows)
    with jax.set_mesh(MESH) if rows is not ROWS else nullcontext():
        for call in (jitted, jitted.lower):
            model = Net()
            with pytest.raises(errors.PlacementError) as error:
                call(model)
            lines = str(error.value).split("\n")
            named = [line.split(",")[0].strip() for line in lines if line.startswith("  ")]
            assert named == [
                "args[0].mean: float32[3",
                "<output>.heads[0].bias: float32[3]",
                "<output>.heads[0].count: float32[]",
            ]
            assert model.mean.shape == (4, 8)


def test_inputs_and_outputs():
    """Both together, and the same Module returned: it keeps what it went in with."""
    jitted = nnx.jit(lambda m, x: (m, m(x)), in_shardings=(BY_FILTER, ROWS), out_shardings=(BY_FILTER, BOTH))
    model = sharded()
    for _ in range(2):
        out, y = jitted(model, X)
        assert out is model
        assert is_like(y, BOTH)
        assert is_like(model.mean.value, ROWS)


def test_a_module_that_is_returned_needs_no_sharding_of_its_own():
    """With None in out_shardings a returned argument keeps its shardings."""
    model = sharded()
    out, _ = nnx.jit(lambda m, x: (m, m(x)), in_shardings=(BY_FILTER, ROWS), out_shardings=None)(model, X)
    assert out is model
    assert is_like(model.mean.value, ROWS)


def test_objects_attached_inside_inherit():
    """A Variable that is made inside gets its sharding from the filters of what it is attached to."""

    def f(m):
        m.kernel = nnx.Param(m.kernel * 2)
        m.extra = nnx.BatchStat(jnp.ones((4, 8)))

    model = sharded()
    nnx.jit(f, in_shardings=(BY_FILTER,))(model)
    assert is_like(model.kernel.value, COLUMNS)
    assert is_like(model.extra.value, ROWS)


def test_with_donation_static_arguments_and_bound_methods():
    """Shardings together with the other options; a static argument has no sharding of its own."""
    jitted = nnx.jit(
        lambda m, x, n: n * m(x), in_shardings=(BY_FILTER, ROWS), static_argnums=2, donate_argnums=0
    )  # fmt: skip
    model, out = check(jitted, 1)
    assert is_like(model.mean.value, ROWS)
    bound = sharded()
    nnx.jit(bound, in_shardings=(ROWS,), out_shardings=BOTH)(X)
    assert is_like(bound.mean.value, ROWS)


def test_lowered_and_compiled():
    """The stages take the same shardings."""
    model = sharded()
    compiled = nnx.jit(lambda m, x: m(x), in_shardings=(BY_FILTER, ROWS), out_shardings=BOTH).lower(model, X).compile()
    assert is_like(compiled(model, jax.device_put(X, ROWS)), BOTH)
    assert is_like(model.mean.value, ROWS)


def test_partition_specs_in_a_mesh():
    """PartitionSpecs are understood within a mesh, in a StateSharding too."""
    spec = nnx.StateSharding({nnx.BatchStat: PartitionSpec("data"), ...: PartitionSpec()})
    model = Net()
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        nnx.jit(lambda m, x: m(x), in_shardings=(spec, PartitionSpec("data")))(model, X)
    assert model.mean.value.sharding.spec == PartitionSpec("data")


def test_a_prefix_by_function():
    """What nnx.prefix makes, of filters or of a function, for arguments and for what is returned."""
    by_path = nnx.prefix(Net(), lambda path, leaf: ROWS if "mean" in path else WHOLE)
    by_filter = nnx.prefix(Net(), {nnx.BatchStat: ROWS, ...: WHOLE})
    for prefix in (by_path, by_filter):
        model = Net()
        nnx.jit(lambda m, x: m(x), in_shardings=(prefix, None))(model, X)
        assert is_like(model.mean.value, ROWS)
        made = nnx.jit(Net, out_shardings=prefix)()
        assert is_like(made.mean.value, ROWS)
        assert is_like(made.bias.value, WHOLE)


def test_a_prefix_that_does_not_fit():
    """Wrong lengths and filters that leave something out are errors that name it; nothing is changed."""
    model = Net()
    with pytest.raises(errors.PrefixError, match=r"in_shardings.* has 1 entry, but the function was called with 2"):
        nnx.jit(lambda m, x: m(x), in_shardings=(BY_FILTER,))(model, X)
    with pytest.raises(errors.PrefixError, match=r"No filter matched mean \(BatchStat\)"):
        nnx.jit(lambda m, x: m(x), in_shardings=(nnx.StateSharding({nnx.Param: WHOLE}), None))(model, X)
    with pytest.raises(errors.PrefixError, match="out"):
        nnx.jit(lambda m, x: m(x), out_shardings=(WHOLE, WHOLE))(model, X)
    assert model.mean.value.sum() == 0


def test_a_shared_variable_with_two_shardings():
    """One object under two arguments with different shardings is refused, naming both paths."""
    model = Net()
    with pytest.raises(errors.AliasingError, match=r"args\[0\]\.kernel: NamedSharding.*args\[1\]\.kernel"):
        nnx.jit(lambda a, b: a(X), in_shardings=(BY_FILTER, WHOLE))(model, model)
    assert nnx.jit(lambda a, b: a(X), in_shardings=(BY_FILTER, BY_FILTER))(model, model).shape == (4, 8)
    with pytest.raises(errors.AliasingError, match=r"args\[0\]\.bias: NamedSharding.*args\[1\]\.bias: no sharding"):
        nnx.jit(lambda a, b: a(X), in_shardings=(BY_FILTER, None))(model, model)
    with pytest.raises(errors.AliasingError, match=r"args\[0\]\.kernel: NamedSharding.*'model'.*spec=P\w*\(\)"):
        nnx.jit(lambda m: m, in_shardings=(BY_FILTER,), out_shardings=WHOLE)(model)


def test_filters_that_look_at_values():
    """A filter that looks at shapes is asked again at each call."""
    by_rank = nnx.StateSharding({(lambda path, x: x.ndim == 2): ROWS, ...: WHOLE})
    model, jitted = Net(), nnx.jit(lambda m: m.bias.set_value(m.bias + 1), in_shardings=(by_rank,))
    jitted(model)
    assert is_like(model.bias.value, WHOLE)
    model.bias.value = jnp.ones((8, 8))
    jitted(model)
    assert is_like(model.bias.value, ROWS)


def test_arrays_that_a_checkpoint_has_put_on_one_device():
    """What a step only reads stays on one device; put there by a checkpoint, it is named, and so is the remedy."""
    model, reads = Net(), nnx.jit(lambda m, x: m(x))
    rows = jax.device_put(jnp.ones((8, 8)), ROWS)
    model.mean.set_value(jnp.zeros((8, 8)))
    reads(model, rows)
    assert is_like(model.mean.get_value(), ROWS)
    assert not model.kernel.get_value().committed
    model.kernel.set_value(jax.device_put(model.kernel.get_value(), jax.devices()[0]))
    with pytest.raises(ValueError, match="incompatible devices") as error:
        reads(model, rows)
    note = "\n".join(error.value.__notes__)
    assert "args[0].kernel: 1 of 8 devices" in note
    assert "bias" not in note
    assert "mean" not in note
    assert "nnx.update(model, jax.device_put(nnx.state(model), jax.NamedSharding(mesh, jax.P())))" in note
    nnx.update(model, jax.device_put(nnx.state(model), jax.NamedSharding(MESH, jax.P())))
    np.testing.assert_allclose(reads(model, rows), 9.0)
