"""nnx.shard_map; run by test_shard.py in a process that has eight CPU devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import nnxlib as nnx
from nnxlib.core import errors

AUTO = jax.sharding.AxisType.Auto
MESH = jax.make_mesh((8,), ("d",), axis_types=(AUTO,))
GRID = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AUTO, AUTO))
X = jnp.arange(32.0).reshape(16, 2)
SPEC = nnx.StateSharding({nnx.Param: P("d"), ...: None})


class Net(nnx.Module):
    """A weight that is sharded along its first axis; the others are replicated."""

    def __init__(self):
        self.w = nnx.Param(jnp.arange(32.0).reshape(16, 2))
        self.total = nnx.BatchStat(jnp.zeros(()))
        self.calls = nnx.Variable(jnp.array(0))
        self.array = jnp.array(2.0)

    def __call__(self, x):
        self.calls += 1
        self.total.value = jax.lax.psum(x.sum(), "d")
        return self.w * x * self.array


DATA = P("d")


def sharded(f, in_specs=(SPEC, DATA), out_specs=DATA, mesh=MESH, **options):
    return nnx.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def apply(m, x):
    return m(x)


def test_state_goes_in_and_comes_out():
    """Each device sees its part of each leaf; what changes has the sharding of its lane; identity is kept."""
    m, shapes = Net(), []

    def f(m, x):
        shapes.append((m.w.shape, x.shape))
        y = m(x)
        m.w.value = m.w + 1
        return y, m

    y, out = sharded(f, out_specs=(P("d"), SPEC))(m, X)
    assert out is m
    assert shapes[0] == ((2, 2), (2, 2))
    np.testing.assert_array_equal(y, X * X * 2)
    np.testing.assert_array_equal(m.w.value, X + 1)
    assert m.calls == 1
    assert m.total == X.sum()
    assert m.w.value.sharding.spec == P("d")
    assert y.sharding.spec == P("d")


def test_what_is_only_read_stays_where_it_was_moved():
    """Each Variable is left where its spec says, unless the specs speak of some axes of the mesh only."""
    m = Net()
    sharded(lambda m, x: m.w * x)(m, X)
    assert [x.value.sharding for x in (m.w, m.total, m.calls)] == [
        jax.sharding.NamedSharding(MESH, spec) for spec in (P("d"), P(), P())
    ]
    w = m.w.value
    sharded(lambda m, x: m.w * x)(m, X)
    assert m.w.value is w
    m.w.value = w = jax.device_put(X, jax.sharding.NamedSharding(GRID, P("b")))
    total = sharded(lambda w: jax.lax.psum(w.sum(), "a"), in_specs=P("a"), out_specs=P(), mesh=GRID, axis_names={"a"})
    assert total(m.w) == X.sum()
    assert m.w.value is w
    every = sharded(
        lambda w: jax.lax.psum(w.sum(), "a"), in_specs=P("a"), out_specs=P(), mesh=GRID, axis_names={"a", "b"}
    )
    assert every(m.w) == X.sum()
    assert m.w.value.sharding == jax.sharding.NamedSharding(GRID, P("a"))


FORMS = {
    "call": lambda m: sharded(apply)(m, X),
    "decorator": lambda m: nnx.shard_map(mesh=MESH, in_specs=(SPEC, P("d")), out_specs=P("d"))(apply)(m, X),
    "list of specs": lambda m: sharded(apply, in_specs=[SPEC, P("d")])(m, X),
    "jit": lambda m: nnx.jit(sharded(apply))(m, X),
    "nested": lambda m: sharded(lambda t: t[0](t[1]["x"]), in_specs=((SPEC, P("d")),))((m, {"x": X})),
    "mesh of the context": lambda m: in_context(m),
}


def in_context(m):
    with jax.set_mesh(MESH):
        return sharded(apply, mesh=None)(m, X)


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    """The result is that of the whole arrays."""
    m = Net()
    np.testing.assert_array_equal(FORMS[form](m), X * X * 2)
    assert m.calls == 1


BOUND = {
    "Module": lambda m: sharded(m, in_specs=P("d")),
    "bound method": lambda m: sharded(m.__call__, in_specs=P("d")),
    "partial": lambda m: sharded(functools.partial(apply, m), in_specs=P("d")),
}


@pytest.mark.parametrize("form", BOUND)
def test_what_is_bound_is_replicated(form):
    """A Module that is bound is seen whole by each device, and its state comes out."""
    m = Net()
    m.w.value = jnp.ones(2)
    np.testing.assert_array_equal(BOUND[form](m)(X), X * 2)
    assert m.calls == 1
    assert m.total == X.sum()


def test_arguments_passed_by_name():
    """One that has a position has the spec of that position; another is replicated."""
    m = Net()
    np.testing.assert_array_equal(sharded(apply)(m, x=X), X * X * 2)
    scaled = sharded(lambda x, *, m: x * m.array + m.w.sum() * 0, in_specs=P("d"))
    np.testing.assert_array_equal(scaled(X, m=m), X * 2)
    assert m.calls == 1


def test_a_mesh_without_devices():
    """The arrays say on which devices they are; one that does not is left where it is."""
    m = nnx.Dict(w=nnx.Param(jnp.array(2.0)))
    x = jax.device_put(X, jax.sharding.NamedSharding(MESH, P("d")))
    before = m["w"].value
    y = sharded(lambda m, x: m["w"] * x, in_specs=(P(), P("d")), mesh=MESH.abstract_mesh)(m, x)
    np.testing.assert_array_equal(y, 2 * X)
    assert m["w"].value is before


def test_structure():
    """What is attached inherits the spec of what holds it; new Modules come out by the prefix of the output."""

    def f(m, x):
        m.hidden = nnx.Param(x)
        new = Net()
        new.w.value = x
        return new

    m = Net()
    new = sharded(f, out_specs=SPEC)(m, X)
    np.testing.assert_array_equal(m.hidden.value, X)
    np.testing.assert_array_equal(new.w.value, X)
    assert new.calls.shape == ()


def test_two_axes_and_some_by_hand():
    """Specs with several axes; of two mesh axes one may be left to the compiler."""
    m = nnx.Dict(w=nnx.Param(X.reshape(2, 4, 4)))
    f = lambda m: jax.lax.psum(m["w"].value, "a")
    full = sharded(f, in_specs=P("a", "b"), out_specs=P(None, "b"), mesh=GRID)(m)
    part = nnx.jit(sharded(f, in_specs=P("a"), out_specs=P(), mesh=GRID, axis_names={"a"}))(m)
    np.testing.assert_array_equal(full, m["w"].value.sum(0, keepdims=True))
    np.testing.assert_array_equal(part, full)


def test_gradients():
    """Inside and outside of grad."""
    m = Net()
    grads = nnx.grad(lambda m: sharded(apply)(m, X).sum())(m)
    np.testing.assert_array_equal(grads.w.value, 2 * X)
    inner = sharded(lambda m, x: nnx.grad(lambda m: (m.w * x).sum())(m).w.value)
    np.testing.assert_array_equal(inner(m, X), X)
    assert m.calls == 1


class Recorder(nnx.Module):
    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return x


def recorded(branch):
    return lambda m, x: jax.tree.leaves(nnx.capture(branch, nnx.Intermediate)(Recorder(), x)[1])[0]


def unchanged_gradients(m, x):
    """A rule returns the gradients that it is given, those of what has not changed among them, which are zero."""
    f = nnx.custom_vjp(lambda m, x: m.w * x)
    f.defvjp(lambda m, x: (m.w * x, None), lambda residuals, gradients: (gradients[0][0], gradients[1]))
    return nnx.grad(lambda m: f(m, x).sum())(m).w.value


ZEROS = {
    "linearize": lambda m, x: nnx.linearize(lambda m, x: m.w * x, m, x)[1](None, x),
    "vjp": lambda m, x: nnx.vjp(lambda m, x: {"a": m.w * x, "b": x}, m, x)[1]({"a": None, "b": x})[0].w.value,
    "custom_vjp": unchanged_gradients,
    "cond": recorded(lambda m, x: nnx.cond(False, lambda m, x: m(x), lambda m, x: x, m, x)),
    "fori_loop": recorded(lambda m, x: nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (m, x))[1]),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_have_the_type_of_what_they_stand_for(name):
    """They differ between the devices of a shard_map, or have a sharding that is part of their type."""
    f = ZEROS[name]
    expected = f(Net(), X)
    np.testing.assert_array_equal(sharded(f)(Net(), X), expected)
    m = Net()
    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        m.w.value = jax.device_put(m.w.value, P("d"))
        found = nnx.jit(f)(m, jax.device_put(X, P("d")))
    np.testing.assert_array_equal(found, expected)
    assert jax.typeof(found).sharding.spec[0] == "d"


def test_messages():
    """A spec that does not fit names the leaf, as does a replicated value that varies; nothing is changed."""
    m = Net()
    with pytest.raises(ValueError, match=r"args\[0\]\.array|args\[0\]\.calls|args\[0\]\.total"):
        sharded(apply, in_specs=P("d"))(m, X)

    def varies(m, x):
        m.total.value = x.sum()

    with pytest.raises(ValueError, match=r"(?s)args\[0\]\.total.* replicated.*jax.lax.pmean.*nnx.StateSharding"):
        sharded(varies)(m, X)
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"(?s)args\[0\]\.mean.* replicated.*axis_name=\.\.\. of a BatchNorm.*model.eval"
    ):
        sharded(lambda norm, x: norm(x), in_specs=(P(), P("d")))(norm, X)
    norm.eval()
    sharded(lambda norm, x: norm(x), in_specs=(P(), P("d")))(norm, X)
    with pytest.raises(errors.PrefixError, match="in_specs"):
        sharded(apply, in_specs=(SPEC, P("d"), P()))(m, X)
    for wrong, said in ("d", "has 'd'; shard_map takes a"), (m, "has a Net in it"), (0, "has 0; shard_map takes a"):
        with pytest.raises(errors.PrefixError, match=f"in_specs.* {said}"):
            sharded(apply, in_specs=(wrong, P("d")))
    with pytest.raises(errors.PrefixError, match=r"out_specs has a dict of filters in it. Write nnx.StateSharding"):
        sharded(apply, out_specs={nnx.Param: P("d"), ...: P()})
    with pytest.raises(errors.PrefixError, match="No filter matched"):
        sharded(apply, in_specs=(nnx.StateSharding({nnx.Param: P("d")}), P("d")))(m, X)
    with pytest.raises(errors.AliasingError, match=r"args\[0\].*args\[1\]"):
        sharded(lambda a, b: a(X), in_specs=(SPEC, P()))(m, m)
    assert m.calls == 0
    assert m.total == 0


@pytest.mark.parametrize("held", [None, (jnp.ones(8), jnp.ones(8)), {"x": [jnp.ones(8)]}])
def test_messages_about_a_module_with_a_pytree_in_a_variable(held):
    """The leaf that is wrong is named, wherever it stands beside the pytree."""
    m = nnx.Dict(first=nnx.Variable(held), w=nnx.Param(jnp.ones(8)), z=nnx.BatchStat(jnp.zeros(())))
    specs = nnx.StateSharding({nnx.BatchStat: P(), ...: P("d")})

    def varies(m):
        m["z"].value = m["w"].sum()

    def lacks_an_axis(m):
        m["w"].value = m["w"].sum()

    for f, said in (varies, r"args\[0\]\.z.* replicated"), (lacks_an_axis, r"args\[0\]\.w.*rank 0"):
        with pytest.raises(ValueError, match=f"(?s){said}"):
            sharded(f, in_specs=specs, out_specs=P())(m)


def test_failing_and_across_traces():
    """A function that raises changes nothing; under raw JAX a write is refused, a read is not."""
    m = Net()

    def fails(m, x):
        m(x)
        m.debris = x
        raise RuntimeError

    with pytest.raises(RuntimeError):
        sharded(fails)(m, X)
    with pytest.raises(errors.TraceContextError, match="calls"):
        jax.jit(lambda x: sharded(apply)(m, x))(X)
    assert m.calls == 0
    assert not hasattr(m, "debris")
    np.testing.assert_array_equal(jax.jit(lambda x: sharded(lambda m, x: m.w * x)(m, x))(X), X * X)


ROWS = jax.random.normal(jax.random.key(0), (8, 5, 4))
CELL = nnx.GRUCell(4, 3, rngs=nnx.Rngs(0))


def states(cell, h, x):
    """The states of a cell; the second axis is time."""
    run = nnx.scan(lambda cell, h, x: cell(h, x), in_axes=(None, nnx.Carry, 1), out_axes=(nnx.Carry, 1))
    return run(cell, h, x)[1]


def test_a_loop_over_what_differs_between_devices():
    """In the body, too, a slice is known to differ, so that it may meet weights that do not."""
    h = jnp.zeros((8, 3))
    run = nnx.shard_map(states, mesh=MESH, in_specs=(P(), P("d"), P("d")), out_specs=P("d"))
    np.testing.assert_allclose(run(CELL, h, ROWS), states(CELL, h, ROWS), atol=1e-6)


def test_a_loop_over_what_differs_along_one_axis_where_the_other_is_automatic():
    """A slice differs between devices as the array does."""
    run = nnx.shard_map(states, mesh=GRID, in_specs=(P(), P("a"), P("a")), out_specs=P("a"), axis_names={"a"})
    cell, h = nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)), jnp.zeros((8, 3))
    np.testing.assert_allclose(nnx.jit(run)(cell, h, ROWS), states(cell, h, ROWS), atol=1e-6)


def test_a_loop_over_an_array_whose_type_has_a_sharding():
    """A slice has the sharding of the array, without the axis that is gone."""
    seen = []

    def body(w, x):
        seen.append(jax.typeof(x).sharding.spec)
        return x @ w[...]

    scaled = lambda w, x: nnx.scan(body, in_axes=(None, 1), out_axes=1)(w, x)
    w = nnx.Param(jnp.ones((4, 2)))
    expected = scaled(w, ROWS)
    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        found = nnx.jit(scaled)(w, jax.device_put(ROWS, P("d")))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.sharding.spec[0] == "d"
    assert seen[-1] == P("d", None)


def test_a_loop_over_an_axis_that_is_sharded_explicitly():
    """The error names the array, its type and the axis; of automatic axes it is none."""
    layers = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 8))
    forward = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    out = forward(ROWS, layers)
    for kind in jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto:
        with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(kind,))):
            nnx.update(layers, jax.device_put(nnx.state(layers), P("d")))
            if kind is jax.sharding.AxisType.Auto:
                np.testing.assert_allclose(forward(ROWS, layers), out, atol=1e-6)
            else:
                with pytest.raises(nnx.errors.PlacementError, match=r"kernel: axis 0 of float32\[8@d,4,4\]"):
                    forward(ROWS, layers)


def moved(model, x):
    """Assigns what is sharded in another way."""
    model.kernel.value = jax.sharding.reshard(model.kernel.value, P("d"))


def differing(model, x):
    """Assigns what differs between devices, in a ``shard_map``."""
    model.kernel.value = model.kernel.value + x.sum()


CONTROL_FLOW = {
    "cond": lambda f: lambda model, x: nnx.cond(x.sum() > 0, f, lambda model, x: None, model, x),
    "switch": lambda f: lambda model, x: nnx.switch(1, [lambda model, x: None, f], model, x),
    "while_loop": lambda f: (
        lambda model, x: nnx.while_loop(
            lambda carry: carry[2] < 3,
            lambda carry: f(*carry[:2]) or (*carry[:2], carry[2] + 1),
            (model, x, jnp.array(0)),
        )
    ),
    "fori_loop": lambda f: lambda model, x: nnx.fori_loop(0, 3, lambda i, carry: f(*carry) or carry, (model, x)),
    "scan": lambda f: (
        lambda model, x: nnx.scan(lambda carry: f(*carry) or carry, in_axes=nnx.Carry, out_axes=nnx.Carry, length=3)(
            (model, x)
        )
    ),
}


@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_a_branch_or_loop_that_moves_what_it_changes(name):
    """The error names the Variable, and how it is sharded before and after, or the axes over which it varies."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    run = CONTROL_FLOW[name]
    with jax.set_mesh(mesh):
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        nnx.update(model, jax.device_put(nnx.state(model), P()))
        for call in run(moved), nnx.jit(run(moved)):
            with pytest.raises(errors.BodyError, match=r"kernel: float32\[8, 8\] .* over .*'d'.*\n.*reshard"):
                call(model, jnp.ones(8))
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    mapped = nnx.shard_map(run(differing), mesh=MESH, in_specs=(P(), P("d")), out_specs=P())
    with pytest.raises(errors.BodyError, match=r"kernel: float32\[8, 8\] .* that varies over 'd' \(jax.lax.pcast\)"):
        mapped(model, jnp.ones(8))


CELLS = {
    "lstm": lambda: nnx.LSTMCell(4, 3, rngs=nnx.Rngs(0)),
    "optimized": lambda: nnx.OptimizedLSTMCell(4, 3, rngs=nnx.Rngs(0)),
    "gru": lambda: nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)),
    "simple": lambda: nnx.SimpleCell(4, 3, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_recurrent_layer_starts_where_its_inputs_are(cell):
    """The carry that it makes itself is of the type that it has after a step."""
    net = nnx.RNN(CELLS[cell]())
    lengths = jnp.arange(8) % 6
    expected = net(ROWS, seq_lengths=lengths)
    call = lambda net, x, lengths: net(x, seq_lengths=lengths)
    run = nnx.shard_map(call, mesh=MESH, in_specs=(P(), P("d"), P("d")), out_specs=P("d"))
    np.testing.assert_allclose(run(net, ROWS, lengths), expected, atol=1e-6)
    net = nnx.RNN(CELLS[cell]())  # the first one has been moved to the devices of a mesh of another kind
    time_major = nnx.RNN(net.cell, time_major=True)
    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        np.testing.assert_allclose(nnx.jit(call)(net, jax.device_put(ROWS, P("d")), lengths), expected, atol=1e-6)
        swapped = jax.device_put(ROWS.swapaxes(0, 1), P(None, "d"))
        found = nnx.jit(lambda net, x: net(x))(time_major, swapped)
        assert found.sharding.spec[1] == "d"
    np.testing.assert_allclose(found.swapaxes(0, 1), net(ROWS), atol=1e-6)


@pytest.mark.parametrize("kind", [nnx.BatchNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm])
def test_a_norm_whose_features_are_sharded(kind):
    """Each device normalises its features with its part of the parameters, and LayerNorm over all of them."""
    layer, x = kind(16, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (3, 5, 16))
    layer.scale.value = jnp.arange(1.0, 17.0)
    expected, last = layer(x), P(None, None, "d")
    if kind in (nnx.LayerNorm, nnx.RMSNorm):
        layer.axis_name = "d"
    y = sharded(apply, in_specs=(P("d"), last), out_specs=last)(layer, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_pmap_over_some_of_the_devices():
    """Which ones is part of the program, and there may be no more slices than these."""
    devices, double = jax.devices(), lambda x: 2 * x
    for some in (devices[:2], devices[2:4], None):
        out = nnx.pmap(double, devices=some)(jnp.arange(2.0))
        np.testing.assert_array_equal(out, [0, 2])
        assert out.sharding.device_set == set(some or devices[:2])
    with pytest.raises(errors.PrefixError, match=r"a device for each of the 4 slices .* there are 2\."):
        nnx.pmap(double, devices=devices[:2])(jnp.arange(4.0))


def test_a_spec_that_is_not_the_sharding_over_explicit_axes():
    """JAX gives only a shape; the message adds which arrays they are. (Earlier versions of JAX move them.)"""
    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        model, x = Net(), jax.device_put(X, P("d"))
        model.w.value = jax.device_put(X, P("d"))
        call = nnx.shard_map(lambda model, x: x, in_specs=(P(), P("d")), out_specs=P("d"))
        try:
            assert call(model, x).tolist() == X.tolist()
        except ValueError as error:
            found = re.search(r"\n  (args.*)\n(.*)", str(error))
            assert found is not None
            assert found[1] == "args[0].w: P('d', None), but its spec is P()"
            assert "StateSharding" in found[2]


@pytest.mark.parametrize("form", ["argument", "bound", "named"])
def test_specs_that_are_left_out_are_those_of_the_arrays(form):
    """Of axes of the type Explicit, as in JAX; for each leaf of a Module, too."""
    explicit = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(explicit, P(*spec)))
    x, shapes = place(X, "a"), []

    class Model(Net):
        def __call__(self, x):
            shapes.append((self.w.shape, x.shape))
            self.w.value += 1
            self.calls += 1
            return x @ self.w.T

    with jax.set_mesh(explicit):
        m = Model()
        m.w.value = place(m.w.value, "b")
        apply = {"argument": lambda m, x: m(x), "bound": lambda x: m(x), "named": lambda x, *, m: m(x)}[form]
        mapped = nnx.shard_map(m if form == "bound" else apply, out_specs=P("a", "b"))
        y = {"argument": lambda: mapped(m, x), "bound": lambda: mapped(x), "named": lambda: mapped(x, m=m)}[form]()
        np.testing.assert_array_equal(y, X @ (np.asarray(X) + 1).T)
        assert shapes[0] == ((4, 2), (8, 2))
        assert jax.typeof(m.w.value).sharding.spec == P("b", None)
        assert m.calls == 1
        rows = nnx.shard_map(lambda x: jax.lax.psum(x, "a"), axis_names={"a"}, out_specs=P())(m.w.value)
        assert jax.typeof(rows).sharding.spec == P("b", None)
        square = place(X[:8].reshape(4, 4), "a", "b")
        inner = lambda x: nnx.shard_map(lambda x: 2 * x, out_specs=P(None, "b"))(x)
        outer = nnx.shard_map(inner, axis_names={"a"}, out_specs=P("a"))
        np.testing.assert_array_equal(outer(square), 2 * square)
    with pytest.raises(errors.PrefixError, match="needs in_specs over 'd': only over axes of the type Explicit"):
        nnx.shard_map(lambda x: x, mesh=MESH, out_specs=DATA)(X)


def test_vmap_over_arrays_that_are_sharded_differently_over_explicit_axes():
    """JAX names no array; the message says which ones do not go with one that is sharded along the mapped axis."""
    layers = nnx.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 16))
    one, forward = nnx.Linear(2, 2, rngs=nnx.Rngs(1)), lambda one, layer, x: layer(one(x))
    expected = nnx.vmap(forward, in_axes=(None, 0, 0))(one, layers, X)
    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        call, x = nnx.vmap(forward, in_axes=(None, 0, 0)), jax.device_put(X, P("d"))
        with pytest.raises(errors.PlacementError, match=r"over 'd', in args\[2\]: float32\[16@d,2\]") as info:
            call(one, layers, x)
        assert "args[1].kernel: float32[16,2,2], at axis 0\n" in str(info.value)
        assert "args[0]" not in str(info.value)
        assert "jax.sharding.reshard" in str(info.value)
        with pytest.raises(errors.PlacementError, match=r"args\[1\].kernel: float32\[16,2,2\], at axis 0\n"):
            nnx.jit(call)(one, layers, x)
        nnx.update(layers, jax.sharding.reshard(nnx.state(layers), P("d")))
        np.testing.assert_allclose(call(one, layers, x), expected, rtol=1e-5, atol=1e-5)
        try:  # earlier versions of JAX allow it
            nnx.vmap(lambda row, whole: row + whole.sum(), in_axes=(0, None))(x, jax.device_put(jnp.ones(8), P("d")))
        except ValueError as error:
            found = re.findall(r"\n  (args.*)", str(error))
            assert found == ["args[1]: float32[8@d], passed whole"]
        with pytest.raises(ValueError, match="unrelated"):  # whatever else the function raises
            nnx.vmap(lambda layers, x: int("unrelated"))(layers, x)


SPREAD = {"BatchNorm": 0, "LayerNorm": -1, "RMSNorm": -1, "GroupNorm": 1, "InstanceNorm": 1}  # along which axis


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", SPREAD)
def test_groups_of_shards_take_statistics_of_their_own(name, fast, masked):
    """With `axis_index_groups` each pair of devices normalises what it holds together; on one nothing may count."""
    axis, settings = SPREAD[name], {"use_fast_variance": fast, "use_scale": False, "rngs": nnx.Rngs(0)}
    settings |= {"RMSNorm": {}, "GroupNorm": {"num_groups": 2, "use_bias": False}}.get(name, {"use_bias": False})
    make = functools.partial(getattr(nnx, name), 4, **settings)
    x = jnp.asarray(np.random.default_rng(0).normal(1.0, 2.0, (4, 2, 3, 4)), jnp.float32)
    mask = jnp.ones(x.shape, bool).at[1].set(False).at[2, :, 0].set(False) if masked else None
    spread = make(axis_name="shards", axis_index_groups=[[0, 1], [2, 3]])
    y = jax.pmap(lambda x, mask: nnx.clone(spread)(x, mask=mask), axis_name="shards", devices=jax.devices()[:4])(
        x, mask
    )
    for pair in ([0, 1], [2, 3]):
        together = None if mask is None else jnp.concatenate(mask[jnp.array(pair)], axis)
        expected = make()(jnp.concatenate(x[jnp.array(pair)], axis), mask=together)
        np.testing.assert_allclose(jnp.concatenate(y[jnp.array(pair)], axis), expected, atol=1e-5)
