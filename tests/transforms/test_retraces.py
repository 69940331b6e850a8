"""explain() and RetraceWarning: why a jitted function is traced again."""

import pathlib
import re
import warnings

import jax.numpy as jnp
import optax
import pytest

import nnxlib as nnx
from nnxlib.core.errors import RetraceWarning


class Net(nnx.Module):
    def __init__(self):
        self.inner = nnx.List([nnx.Param(jnp.ones(2), tag="a"), nnx.Param(jnp.ones(2))])
        self.flag = True

    def __call__(self, x):
        return x * self.inner[0]


def step():
    return nnx.jit(lambda m, x: m(x))


def test_before_and_after_the_first_trace():
    f, m = step(), Net()
    assert "has not been traced yet" in f.explain()
    f(m, jnp.ones(2))
    assert f.explain().endswith("has been called once and traced once, in call 1.")
    for _ in range(2):
        f(m, jnp.ones(2))
    assert f.explain().endswith("has been called 3 times and traced once, in call 1.")


CHANGES = {
    "static": (lambda m: setattr(m, "flag", False), r"args\[0\]\.flag: True \(bool\) became False \(bool\)"),
    "new attribute": (lambda m: setattr(m, "new", "n"), r"args\[0\]\.new: nothing became 'n' \(str\)"),
    "metadata": (lambda m: m.inner[0].set_metadata(tag="b"), r"args\[0\]\.inner\[0\]: Param.*'a'.* became Param.*'b'"),
    "type": (lambda m: m.inner.__setitem__(0, nnx.Cache(jnp.ones(2))), r"inner\[0\]: Param became Cache"),
    "sharing": (lambda m: m.inner.__setitem__(1, m.inner[0]), r"inner\[1\].* became Param \(args\[0\]\.inner\[0\]\)"),
    "dtype": (
        lambda m: m.inner[0].set_value(jnp.ones(2, jnp.bfloat16)),
        r"inner\[0\]: float32\[2\] became bfloat16\[2\]",
    ),
    "shape": (lambda m: m.inner[0].set_value(jnp.ones(1)), r"inner\[0\]: float32\[2\] became float32\[1\]"),
    "weak type": (
        lambda m: m.inner[0].set_value(jnp.asarray(1.0)),
        r"inner\[0\]: float32\[2\] became float32\[\] \(weakly",
    ),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES.keys())
def test_a_retrace_is_explained(change, said):
    f, m = step(), Net()
    f(m, jnp.ones(2))
    change(m)
    f(m, jnp.ones(2))
    assert "called 2 times and traced 2 times" in f.explain()
    assert re.search(said, f.explain())


def test_other_arguments_are_named():
    f, m = step(), Net()
    f(m, jnp.ones(2))
    f(m, x=jnp.ones(2))
    assert "the arguments: args[0], args[1] became args[0], kwargs.x" in f.explain()
    g = nnx.jit(lambda *args: len(args))
    g()
    g(1.0)
    assert "the arguments: none became args[0]" in g.explain()


@pytest.mark.parametrize(
    ("a", "b", "lines"),
    [
        ({"b": [1.0, None]}, {"b": (1.0, None)}, ["args[0].b: pytree [*, None] became pytree (*, None)"]),
        ([[1.0], 1.0, {0: 2.0}], [(1.0,), 1.0, [2.0]], ["[0]: pytree [*] became", "[2]: pytree {0: *} became"]),
        ([1.0, None], [1.0], ["args[0]: pytree [*, None] became pytree [*]"]),
        ({"b": [], "c": 1.0}, {"b": (), "c": 1.0}, ["args[0]: pytree {'b': [], 'c': *} became"]),
    ],
)
def test_another_container_is_named(a, b, lines):
    """Where nothing in it is at another path."""
    f = nnx.jit(lambda x: None)
    f(a), f(b)
    found = f.explain().splitlines()[1:]
    assert len(found) == len(lines)
    assert all(map(str.__contains__, found, lines))


def test_the_nearest_trace_is_compared_with():
    """Of several earlier traces, the one with the fewest differences."""
    f, m = step(), Net()
    f(m, jnp.ones(2))
    m.flag = False
    f(m, jnp.ones(2))
    m.flag = True
    f(m, jnp.ones((3, 2)))
    assert f.explain().splitlines()[1:] == ["  args[1]: float32[2] became float32[3,2]"]


def test_what_the_trace_did_not_read_is_no_reason():
    """A Variable that is not read may take another shape without a trace."""
    f, m = step(), Net()
    f(m, jnp.ones(2))
    m.inner[1].value = jnp.ones(5)
    f(m, jnp.ones(2))
    assert "traced once" in f.explain()


@pytest.mark.parametrize("cause", ["static", "shape"])
def test_a_trace_at_each_call_is_warned_of(cause):
    """Once, with the place of the call, the attribute or argument, and the remedy."""
    f, m = step(), Net()

    def call(n):
        if cause == "static":
            m.flag = n
        f(m, jnp.ones((n if cause == "shape" else 1, 2)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(7):
            call(n)
    said = (
        r"args\[0\]\.flag: 7 \(int\) became 8"
        if cause == "static"
        else r"args\[1\]: float32\[7,2\] became float32\[8,2\]"
    )
    remedy = (
        "Keep what changes .* in an array or a Variable, .*" if cause == "static" else "Give inputs a common shape.*"
    )
    call(7)
    with pytest.warns(RetraceWarning, match=rf"each of its last 8 calls.*\n.*{said}.*\n{remedy}$") as caught:
        call(8)
    assert pathlib.Path(caught[0].filename).name == "test_retraces.py"


@pytest.mark.parametrize("values", ["abcdefghi", range(9)], ids=["text", "int"])
def test_a_captured_value_that_changes_at_each_call_is_warned_of(values):
    setting = nnx.Variable(values[0])
    f = nnx.jit(lambda x: x if setting.get_value() in values[5:] else -x)
    for value in values[:8]:
        setting.value = value
        f(1.0)
    setting.value = values[8]
    with pytest.warns(RetraceWarning, match=rf"captured\[0\]: {values[7]!r} became .*\nA bool, .* in place of `if`\.$"):
        f(1.0)


def test_an_object_that_is_made_anew_for_each_call_is_warned_of():
    """Two optax transformations are never equal; another change has its own remedy."""
    model, step = Net(), nnx.jit(lambda model, optimizer: optimizer.update(model, nnx.pure(nnx.state(model))))
    for n in range(8):
        model.flag = n
        step(model, nnx.Optimizer(model, optax.sgd(0.1)))
    made = r"args\[1\]\.tx: .* became another GradientTransformation.*\nWhat only looks the same, .* make it once, .*"
    model.flag = 8
    with pytest.warns(RetraceWarning, match=rf"{made} Keep what changes .*$"):
        step(model, nnx.Optimizer(model, optax.sgd(0.1)))
    for _ in range(7):
        step(model, nnx.Optimizer(model, optax.sgd(0.1)))
    with pytest.warns(RetraceWarning, match=rf"{made} use it in each call\.$"):
        step(model, nnx.Optimizer(model, optax.sgd(0.1)))


@pytest.mark.parametrize("how", ["sow", "list", "dict"])
def test_a_record_that_grows_at_each_call_is_warned_of(how):
    """Each time it is another item; the remedy is not to pad inputs."""

    class Recording(nnx.Module):
        def __init__(self):
            self.seen = {} if how == "dict" else []

        def __call__(self, x):
            if how == "sow":
                self.sow(nnx.Intermediate, "record", x)
            elif how == "list":
                self.seen.append(x)
            else:
                self.seen[f"x{len(self.seen)}"] = x
            return x

    f, m = step(), Recording()
    said = {
        "sow": "record: 8 arrays became 9 arrays",
        "list": r"seen\[7\]: nothing became array",
        "dict": "seen.x7: nothing became array",
    }
    for _ in range(9 if how == "sow" else 8):  # at its first call, sow makes an attribute
        f(m, jnp.ones(2))
    with pytest.warns(RetraceWarning, match=rf"{said[how]}\nWhat grows .*nnx.pop.* a fixed size\.$"):
        f(m, jnp.ones(2))


def test_other_traces_are_not_warned_of():
    """A flag that is toggled, shapes that come back, calls in between without a trace."""
    f, m = step(), Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(20):
            m.flag = bool(n % 2)
            f(m, jnp.ones((n % 3 + 1, 2)))
        for n in range(20):
            m.flag = n
            f(m, jnp.ones(2))
            f(m, jnp.ones(2))
