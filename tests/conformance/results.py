"""The same script under flax.nnx and under nnxlib: what a user can see of its result, and a comparison of that."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import flax.nnx
import jax
import numpy as np

import nnxlib

FLAX_OWN = {"eager_sharding", "hijax", "ref"}  # metadata that flax.nnx gives to every Variable
# Of numbers that two programs have computed. What is only moved about, or computed by the same operations, is equal.
ROUNDING = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 4e-3, "complex64": 2e-5}


def facts(lib: Any, x: Any) -> Any:
    """What a user can see of a value, in built-in types and arrays: of objects their State and their static values."""
    if isinstance(x, lib.Variable):
        metadata = {k: facts(lib, v) for k, v in sorted(x.get_metadata().items()) if k not in FLAX_OWN}
        return [type(x).__name__, facts(lib, x.get_raw_value()), metadata]
    if isinstance(x, lib.State):
        return ["State", *((key, facts(lib, x[key])) for key in sorted(x, key=_order))]
    if isinstance(x, lib.FlatState):
        return [("FlatState", path, facts(lib, leaf)) for path, leaf in x]
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
    if x is lib.traversals.empty_node:
        return "empty"
    return getattr(x, "__name__", "a callable") if callable(x) else x


def _order(key: Any) -> tuple[bool, Any]:
    return isinstance(key, str), key


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


def assert_alike(ours: Any, theirs: Any, where: str, tolerance: Mapping[str, float]) -> None:
    """Fail unless two values, as :func:`facts` gives them, are the same, but for these tolerances by dtype.

    An error of ours is to be of the class of theirs, or of a subclass.
    """
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        kinds = {kind.__name__ for kind in type(ours).__mro__} - {"object"}
        assert type(theirs).__name__ in kinds, f"{where}: {ours!r} | {theirs!r}"
    elif isinstance(ours, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        wide = np.complex128 if np.iscomplexobj(ours) else np.float64
        scale = np.abs(theirs[np.isfinite(theirs)].astype(wide)).max(initial=1.0)
        relative = tolerance.get(str(ours.dtype), 0)
        np.testing.assert_allclose(ours.astype(wide), theirs.astype(wide), relative, relative * scale, err_msg=where)
    elif isinstance(ours, list) and isinstance(theirs, list):
        assert len(ours) == len(theirs), f"{where}: {ours} | {theirs}"
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(a, b, f"{where}[{k}]", tolerance)
    elif isinstance(ours, tuple) and isinstance(theirs, tuple):
        assert_alike(list(ours), list(theirs), where, tolerance)
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            assert_alike(ours[key], theirs[key], f"{where}[{key!r}]", tolerance)
    else:
        assert type(ours) is type(theirs), f"{where}: {ours!r} | {theirs!r}"
        assert ours == theirs, where


def outcome(lib: Any, script: Callable[[Any], Any]) -> Any:
    """What can be seen of the result of a script, or the error that it raises."""
    try:
        return facts(lib, script(lib))
    except (AssertionError, NameError):  # of the script itself
        raise
    except Exception as error:
        return error


def same(script: Callable[[Any], Any], tolerance: Mapping[str, float] = MappingProxyType({})) -> Any:
    """Run a script under both libraries: the results, or the classes of the errors, must be the same; returns ours."""
    ours = outcome(nnxlib, script)
    assert_alike(ours, outcome(flax.nnx, script), "result", tolerance)
    return ours


def scales_are_learned() -> bool:
    """Whether flax.nnx has Params for the scales of WeightNorm; 0.12.8 has arrays, which no gradient reaches."""
    lib = flax.nnx
    (scale,) = lib.WeightNorm(lib.Linear(3, 4, rngs=lib.Rngs(1)), rngs=lib.Rngs(0)).scales.values()
    return isinstance(scale, lib.Param)
