"""Static values: equal exactly when JAX would trace the same program, and never changed behind anybody's back."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlib as nnx

from .compare import same_static
from .strategies import OPAQUE, STATIC, Block, Config, Frozen, examples


def holding(value: Any, **others: Any) -> Any:
    m = Block()
    m.a, m.w = value, nnx.Param(jnp.ones(2))
    for name, other in others.items():
        setattr(m, name, other)
    return m


def traces(*models: Any) -> int:
    """How often a function is traced that is called with each of the models, in turn and again."""
    seen: list[int] = []

    @nnx.jit
    def f(m: Any) -> Any:
        seen.append(1)
        return m.w + 1

    for m in (*models, *models):
        f(m)
    return len(seen)


index = st.integers(0, len(STATIC) - 1)


@examples(80)
@given(index, index)
def test_equal_values_share_a_trace_and_others_do_not(i: int, j: int) -> None:
    """Two models are one program exactly when their static values are of equal type and value."""
    a, b = STATIC[i](), STATIC[j]()
    expected = 1 if same_static(a, b) else 2
    assert traces(holding(a), holding(b)) == expected
    assert len({nnx.graphdef(holding(a)), nnx.graphdef(holding(b))}) == expected


PAIRS = {
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "zeros": (0.0, -0.0),
    "complex zeros": (complex(0.0, 1), complex(-0.0, 1)),
    "numpy zeros": (np.float64(0.0), np.float64(-0.0)),
    "numpy types": (np.float32(1), np.float64(1)),
    "in a tuple": ((1, 2), (1, 2.0)),
    "in a frozen dataclass": (Frozen(1), Frozen(True)),
    "zeros in a frozen dataclass": (Frozen(0.0), Frozen(-0.0)),
    "in a namespace": (types.SimpleNamespace(x=1), types.SimpleNamespace(x=True)),
    "slices": (slice(0, 1), slice(0, 1, 1)),
    "lengths of a deque": (collections.deque([1], 1), collections.deque([1], 2)),
    "order of a dict": (types.SimpleNamespace(d={1: 2, 3: 4}), types.SimpleNamespace(d={3: 4, 1: 2})),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_that_python_takes_for_equal(name: str) -> None:
    """A difference that a program can see makes another program, even where `==` sees none."""
    a, b = PAIRS[name]
    assert traces(holding(a), holding(b)) == 2


MAKERS: dict[str, Callable[[], Any]] = {
    "nan": lambda: float("nan"),
    "numpy nan": lambda: np.float64("nan"),
    "lambda": lambda: lambda x: x + 1,
    "partial": lambda: functools.partial(jnp.clip, min=0),
    "JAX partial": lambda: jax.tree_util.Partial(jnp.clip, min=0),
    "slice": lambda: slice(0, 1),
    "deque": lambda: collections.deque([1, 2]),
    "mapping proxy": lambda: types.MappingProxyType({"a": [1]}),
    "with a lock": lambda: types.SimpleNamespace(lock=LOCK, items=[1]),
}
LOCK = threading.Lock()


@pytest.mark.parametrize("name", MAKERS)
def test_values_that_python_takes_for_different(name: str) -> None:
    """Two equal values that are not one object are one program, also when they cannot be copied or hashed."""
    make = MAKERS[name]
    assert traces(holding(make()), holding(make())) == 1


# --- values that change in place ------------------------------------------------------------------------------------


def rate(m: Any) -> Any:
    return m.a.rate * m.w.value[0]


def test_an_edited_value_is_not_seen_by_another_model() -> None:
    """A model whose value is edited, and one whose equal value is not: each is computed, and left, with its own."""
    edited, other = holding(Config(1.0)), holding(Config(1.0))
    nnx.jit(rate)(edited)
    edited.a.rate = 2.0
    assert nnx.jit(rate)(edited) == 2
    assert nnx.jit(rate)(other) == 1
    assert (edited.a.rate, other.a.rate) == (2, 1)
    assert nnx.merge(*nnx.split(other)).a.rate == 1


def test_an_edited_metadata_value_is_not_seen_by_another_model() -> None:
    """The same for a list in the metadata of a Variable."""
    first, second = nnx.Param(jnp.ones(2), sizes=[1]), nnx.Param(jnp.ones(2), sizes=[1])
    f = nnx.jit(lambda v: v * v.sizes[0])
    f(holding(None, v=first).v)
    first.sizes[0] = 5
    assert nnx.jit(lambda m: m.v * m.v.sizes[0])(holding(None, v=second))[0] == 1
    assert nnx.jit(lambda m: m.v * m.v.sizes[0])(holding(None, v=first))[0] == 5


def test_a_graphdef_is_not_edited_with_the_model() -> None:
    """A GraphDef taken before an edit makes the model as it was then, and stays unequal to that of the edited one."""
    m = holding(Config(1.0))
    graphdef, state = nnx.split(m)
    m.a.rate = 2.0
    m.a.sizes.append(3)
    assert graphdef != nnx.graphdef(m)
    assert nnx.merge(graphdef, state).a == Config(1.0)
    assert nnx.merge(graphdef, state).a is not nnx.merge(graphdef, state).a


def test_reading_a_value_keeps_it() -> None:
    """A call that only reads leaves the very value in place, with the very objects in it, and is traced once."""
    inner = Block()
    spaces = types.SimpleNamespace(x=OPAQUE, y=[1]), types.SimpleNamespace(module=inner)
    for value in (*spaces, Config(OPAQUE), {OPAQUE}):
        m = holding(value)
        kept = m.a
        assert traces(m) == 1
        assert m.a is kept


def test_a_set_value_is_kept_by_identity() -> None:
    """An opaque object that is moved to another attribute inside a jitted function is still that object."""
    m = holding(OPAQUE)

    @nnx.jit
    def f(m: Any) -> None:
        m.b = m.a
        m.c = types.SimpleNamespace(x=m.a)

    f(m)
    assert m.b is m.c.x is OPAQUE


# --- metadata -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numpy", [np, jnp], ids=["NumPy", "JAX"])
def test_arrays_in_metadata(numpy: Any) -> None:
    """Metadata that holds an array goes through split, merge, update, clone, jit, grad, tree.map and pickle."""

    def make() -> Any:
        return holding(None, v=nnx.Param(jnp.ones(2), table=numpy.arange(3), rate=float("nan")))

    m, other = make(), make()
    nnx.update(m, nnx.state(other))
    m.v.copy_from(other.v)
    assert nnx.merge(*nnx.split(m)).v.table.tolist() == nnx.clone(m).v.table.tolist() == [0, 1, 2]
    assert traces(m, other) == 1
    assert nnx.grad(lambda m: (m.v * m.v.table[1]).sum())(m)["v"].get_value().tolist() == [1, 1]
    assert jax.tree.map(jnp.add, nnx.state(m), nnx.state(other))["v"].table.tolist() == [0, 1, 2]
    assert pickle.loads(pickle.dumps(m)).v.table.tolist() == [0, 1, 2]


def test_a_new_array_in_metadata_is_seen() -> None:
    """A function that reads a bound is traced again for another one, and not for an equal one."""
    m = holding(None, v=nnx.Param(jnp.ones(2), bound=jnp.zeros(())))
    count = 0

    @nnx.jit
    def bounded(m: Any) -> Any:
        nonlocal count
        count += 1
        return m.v + m.v.bound

    for bound in 0.0, 0.0, 2.0:
        m.v.set_metadata(bound=jnp.asarray(bound))
        assert bounded(m).tolist() == [1 + bound] * 2
    assert count == 2


def test_graphdefs_are_equal_after_pickling() -> None:
    """A GraphDef from a file, or another process, is equal to the one made here, with metadata, modes and values."""
    m = holding(Config(), v=nnx.Param(jnp.ones(2), sharding=("x", None), sizes=[1]), counted=nnx.data(1))
    m.deterministic = False
    m.eval()
    graphdef = nnx.graphdef(m)
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef == copy.deepcopy(graphdef)


# --- modes ----------------------------------------------------------------------------------------------------------


def test_modes_of_one_model_do_not_reach_another() -> None:
    """Setting by hand what `eval` had set, in one model, leaves the memory of `eval` in an equal model alone."""
    a, b = holding(None, deterministic=False), holding(None, deterministic=False)
    a.eval()
    b.eval()
    nnx.jit(lambda m: 1)(a)
    a.deterministic = False
    nnx.jit(lambda m: 2)(b)
    b.train()
    assert b.deterministic is False


def test_choosing_the_mode_that_is_on_already() -> None:
    """Setting `deterministic` to what it is makes it the user's own, also for a model that a call has seen."""
    m = nnx.Dropout(0.5, deterministic=False)
    m.eval()
    f = nnx.jit(lambda m: 1)
    f(m)
    m.deterministic = True
    f(m)
    with pytest.warns(UserWarning, match="is still off"):
        m.train()
    assert m.deterministic is True


# --- modules with a == of their own ---------------------------------------------------------------------------------


@nnx.dataclass
class Scale(nnx.Module):
    factor: Any
    inner: Any = None

    def __call__(self, x: Any) -> Any:
        return self.factor * (x if self.inner is None else self.inner(x))


def test_a_dataclass_that_calls_another() -> None:
    """A Module whose `==` compares arrays calls another one of its class, in every transform."""
    m = Scale(nnx.Param(jnp.ones(2)), Scale(nnx.Param(jnp.ones(2))))
    assert nnx.jit(lambda m, x: m(x))(m, jnp.ones(2)).tolist() == [1, 1]
    assert nnx.grad(lambda m, x: m(x).sum())(m, jnp.ones(2)).factor.value.tolist() == [1, 1]


def test_an_error_is_found_its_path_past_lists_that_contain_themselves() -> None:
    """The search for a path, for a message, ends also where a local list holds itself."""
    around: list[Any] = []
    around.append(around)

    def write() -> None:
        loop: dict[str, Any] = {}
        loop["loop"] = loop
        jax.jit(lambda x: held["v"].set_value(x))(1.0)

    held = types.MappingProxyType({"v": nnx.Param(1.0)})
    with pytest.raises(nnx.TraceContextError):
        write()


def test_lists_declared_as_data_report_their_changes() -> None:
    """`nnx.data([...])` makes a List, whose later changes a jitted function sees."""
    m = holding(None, items=nnx.data([nnx.Param(jnp.ones(2))]))
    f = nnx.jit(lambda m: sum(v.sum() for v in m.items))
    f(m)
    m.items.append(nnx.Param(jnp.ones(2)))
    assert f(m) == 4


@dataclasses.dataclass
class Schedule:
    """A callable static value."""

    rate: float

    def __call__(self, x: Any) -> Any:
        return x * self.rate


def test_callable_values() -> None:
    """A callable dataclass is compared by its fields, and edited ones are seen at the next call."""
    m = holding(Schedule(2.0))
    f = nnx.jit(lambda m: m.a(m.w[0]))
    assert f(m) == 2
    m.a.rate = 3.0
    assert f(m) == 3
