"""Drawn programs: the same choices under flax.nnx and under nnxlib, and all that can be seen of each step.

A program is a function of a library, of a source of choices and of `note`; it is run under both libraries, with equal
sources. `note(what, f)` calls `f` and keeps what came of it: the value as plain data, or the exception.
"""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nnxlib

FLAX_OWN = {"eager_sharding", "hijax", "ref"}  # metadata that flax.nnx gives to every Variable
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 4e-3, "complex64": 2e-5}

Note = Callable[[str, Callable[[], Any]], Any]
Program = Callable[[Any, random.Random, Note], None]


def assert_same(program: Program, seed: str, other: Any, ours: Any = nnxlib) -> None:
    """Run the program with the choices of this seed under both libraries; what they note must be the same."""
    mine, yours = (_noted(program, lib, seed) for lib in (ours, other))
    assert [what for what, _ in mine] == [what for what, _ in yours]
    for (what, a), (_, b) in zip(mine, yours, strict=True):
        _assert_alike(a, b, what)


def _noted(program: Program, lib: Any, seed: str) -> list[tuple[str, Any]]:
    noted: list[tuple[str, Any]] = []

    def note(what: str, f: Callable[[], Any]) -> Any:
        try:
            value = f()
        except Exception as error:
            noted.append((what, error))
            return None
        noted.append((what, facts(lib, value)))
        return value

    program(lib, random.Random(seed), note)
    return noted


def facts(lib: Any, x: Any) -> Any:
    """What a user can see of a value, in built-in types and arrays: of objects their State and their static values."""
    if isinstance(x, lib.Variable):
        metadata = {k: facts(lib, v) for k, v in sorted(x.get_metadata().items()) if k not in FLAX_OWN}
        return [type(x).__name__, facts(lib, x.get_raw_value()), metadata]
    if isinstance(x, lib.State):
        return [("State", path, facts(lib, leaf)) for path, leaf in sorted(lib.to_flat_state(x), key=_order)]
    if isinstance(x, lib.Pytree | lib.List | lib.Dict):
        return [type(x).__name__, facts(lib, lib.state(x)), structure(lib, x)]
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return [str(jax.random.key_impl(x)), np.asarray(jax.random.key_data(x))]
    if isinstance(x, jax.ShapeDtypeStruct):
        return ["aval", x.shape, str(x.dtype), x.weak_type]
    if isinstance(x, list | tuple):
        return [type(x).__name__, *(facts(lib, item) for item in x)]
    if isinstance(x, dict):
        return {key: facts(lib, value) for key, value in x.items()}
    if isinstance(x, jax.Array):
        return [x.weak_type, np.asarray(x)]
    return getattr(x, "__name__", "a callable") if callable(x) else x


def _order(item: tuple) -> list[tuple[bool, Any]]:
    return [(isinstance(key, str), key) for key in item[0]]


def structure(lib: Any, root: Any) -> list[tuple]:
    """The nodes and Variables below an object, which of them are the same, and the plain settings among attributes.

    Lists and dicts of settings are left out: flax.nnx has other classes for them.
    """
    found: list[tuple] = []
    seen: dict[int, int] = {}

    def visit(path: tuple, x: Any) -> None:
        is_node = isinstance(x, lib.Pytree) or (isinstance(x, lib.List | lib.Dict) and bool(lib.state(x)))
        if not is_node and not isinstance(x, lib.Variable):
            if x is None or isinstance(x, bool | int | float | str):
                found.append((path, x))
            return
        found.append((path, type(x).__name__, seen.setdefault(id(x), len(seen))))
        if is_node and found[-1][2] == len(seen) - 1:
            named = x if isinstance(x, lib.Dict) else vars(x)
            for key, child in enumerate(x) if isinstance(x, lib.List) else sorted(named.items()):
                if key != "axis_name" and not str(key).startswith("_"):  # flax.nnx has no axis_name in Dropout
                    visit((*path, key), child)

    visit((), root)
    return found


def _assert_alike(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        kinds = {kind.__name__ for kind in type(ours).__mro__} - {"object"}
        assert type(theirs).__name__ in kinds, f"{where}: {ours!r} | {theirs!r}"
    elif isinstance(ours, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        tolerance = TOLERANCE.get(str(ours.dtype), 0)
        wide = np.complex128 if np.iscomplexobj(ours) else np.float64
        scale = max(1.0, np.nanmax(np.abs(theirs.astype(wide)), initial=0.0, where=np.isfinite(theirs)))
        np.testing.assert_allclose(ours.astype(wide), theirs.astype(wide), tolerance, tolerance * scale, err_msg=where)
    elif isinstance(ours, list) and isinstance(theirs, list):
        assert len(ours) == len(theirs), f"{where}: {ours} | {theirs}"
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            _assert_alike(a, b, f"{where}[{k}]")
    elif isinstance(ours, tuple) and isinstance(theirs, tuple):
        _assert_alike(list(ours), list(theirs), where)
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            _assert_alike(ours[key], theirs[key], f"{where}[{key!r}]")
    else:
        assert type(ours) is type(theirs), f"{where}: {ours!r} | {theirs!r}"
        assert ours == theirs, where


def some(draw: random.Random, chance: float, **options: list) -> dict[str, Any]:
    """Keyword arguments: each option is drawn with this chance, and one of its values."""
    return {name: draw.choice(values) for name, values in options.items() if draw.random() < chance}


def array(draw: random.Random, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    values = np.random.default_rng(draw.randrange(1 << 30)).normal(0.5, 1.5, shape)
    return jnp.asarray(np.abs(3 * values) if np.issubdtype(dtype, np.integer) else values, dtype)
