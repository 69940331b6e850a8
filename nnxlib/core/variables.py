"""Variables: typed, mutable boxes around a value, the leaves of the object graph.

A Variable holds one *value* (an array, or any pytree; nnxlib never looks inside) and *metadata* (static: part of the
program, replaced and never edited in place). It remembers the trace under which it was made. Its class tells what the
value is for (``Param``, ``BatchStat``, ``Cache``...), and filters select by it.

Contract:

- A Variable behaves like the array it holds wherever an array is expected. It is hashed by identity.
- It may be read everywhere. It may be written only under the trace that made it; any other write raises
  :class:`~nnxlib.core.errors.TraceContextError`, which names the path, and has no effect.
- Hooks run at the user's own reads and writes, never when a transform moves values in and out.
- As a JAX pytree a Variable has one child, its value, under the key ``value``.
"""

from __future__ import annotations

import copy as copy_lib
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from . import errors
from .cells import cell_of, new_cell
from .closures import Watch, notice
from .finding import how_to_pass, locate
from .generics import A
from .identity import change
from .making import VariableSlots, make_variable, register_variable
from .metadata import (
    HOOKS,
    KEYS_OF_AXIS_NAMES,
    NO_METADATA,
    Metadata,
    MetadataView,
    VariableMetadata,
    as_hooks,
    canonical,
    canonical_name,
    name_axis,
    unname_axis,
)
from .missing import MISSING, is_missing
from .operators import ArrayOperators, unwrapped
from .placement import placed
from .stamps import Stamps
from .static import same_items
from .tracing import Tracer, TraceRef, current_trace
from .values import as_stored, deep_copy, unshared, with_item

V = TypeVar("V", bound="Variable")

DEFAULTS: dict[str, Any] = {}  # metadata that every new Variable gets unless it is given


class Variable(ArrayOperators[A], VariableSlots):
    """A mutable box with a value of type ``A`` and static metadata.

    Args:
      value: an array or any pytree; or a :class:`VariableMetadata`, whose metadata is merged in and, where ``metadata``
        has the same names, replaces it; for hooks it is the other way round.
      **metadata: static values, readable as attributes; ``on_get_value(variable, value)``, ``on_set_value``,
        ``on_create_value``, ``on_add_axis(variable, index, name)`` and ``on_remove_axis`` are hooks (a function or a
        sequence of them), which a subclass may also define as methods. With ``ref=True`` the array is kept in a
        :class:`jax.Ref`, and every write goes there: JAX carries such writes out of its own transformations.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> v = nnx.Param(jnp.zeros(3), layer='first')
    >>> v[0] = 2.0
    >>> v += 1
    >>> v.layer, v.sum().item(), v.value.shape
    ('first', 5.0, (3,))

    Raises:
      TraceContextError: when written under another trace than the one that made it.
    """

    __slots__ = ()
    _nnx_is_captured: bool = True  # see Node in objects.py
    _nnx_saved = ("_cell", "_metadata", "_nnx_stamps")

    def __init__(self, value: A | VariableMetadata[A], **metadata: Any):
        if hasattr(self, "_cell"):  # `__init__` is called again: a write like any other
            made: Any = object.__new__(type(self))
            Variable.__init__(made, value, **metadata)
            self.copy_from(made)
            return
        if isinstance(value, VariableMetadata):
            metadata = value.all_metadata(metadata)
            value = value.raw_value
        class_hooks = type(self)._class_hooks
        if class_hooks:
            metadata = {**class_hooks, **metadata}
        if DEFAULTS:
            metadata = {**DEFAULTS, **metadata}
        if not KEYS_OF_AXIS_NAMES.isdisjoint(metadata):
            metadata = canonical(metadata)
        cell = new_cell(None)
        _set_cell_slot(self, cell)
        _set_stamps_slot(self, ())
        _set_metadata_slot(self, Metadata(metadata) if metadata else NO_METADATA)
        if "on_create_value" in metadata:
            for hook in as_hooks(metadata["on_create_value"]):
                value = hook(self, value)
        if isinstance(value, Variable):
            value = value.get_raw_value()
        value = placed(value, metadata, type(self)) if "out_sharding" in metadata else value
        cell.value = as_stored(value, metadata) if "ref" in metadata else value

    _class_hooks: Mapping[str, Callable] = {}

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        hooks = {name: getattr(cls, name) for name in HOOKS if callable(getattr(cls, name, None))}
        cls._class_hooks = hooks
        if vars(cls).keys() & {"get_value", "set_value"} and "value" not in vars(cls):
            cls.value = property(cls.get_value, cls.set_value, doc=Variable.value.__doc__)
        register_variable(cls)

    # --- the value ---

    def get_value(self, *, index: Any = MISSING) -> A:
        """Return the value, through the ``on_get_value`` hooks; with ``index``, ``value[index]``."""
        if Watch.all:
            notice(self)
        value: Any = self._cell.value
        metadata = self._metadata
        if metadata:
            if "ref" in metadata and isinstance(value, jax.Ref):
                value = value[...]
            if "on_get_value" in metadata:
                for hook in as_hooks(metadata["on_get_value"]):
                    value = hook(self, value)
        return value if index is MISSING or is_missing(index) else value[index]  # a call less where it counts

    def set_value(self, value: A | Variable[A], *, index: Any = MISSING) -> None:
        """Replace the value, through the ``on_set_value`` hooks; with ``index``, only ``value[index]``.

        With an index the array keeps its shape and dtype, as in NumPy, and its sharding; the hooks see only what is
        assigned.

        Raises:
          TraceContextError: under another trace than the one that made this Variable.
        """
        self.check_writable()
        new: Any = unwrapped(value)
        cell, metadata = self._cell, self._metadata
        if metadata:
            if "on_set_value" in metadata:
                for hook in as_hooks(metadata["on_set_value"]):
                    new = hook(self, new)
            if "ref" in metadata and isinstance(cell.value, jax.Ref):
                self._store(with_item(cell.value[...], ... if is_missing(index) else index, new))
                return
        cell.value = new if index is MISSING or is_missing(index) else with_item(cell.value, index, new)

    if TYPE_CHECKING:  # a write takes all that `set_value` takes

        @property
        def value(self) -> A: ...

        @value.setter
        def value(self, value: Any) -> None: ...

        shape: tuple[int, ...]
        dtype: np.dtype
        ndim: int
        size: int
        T: A
    else:
        value = property(get_value, set_value, doc="The value; reading and writing run the hooks.")

    def get_raw_value(self) -> A:
        """Return the value as stored, without hooks."""
        if Watch.all:
            notice(self)
        return self._cell.value

    def set_raw_value(self, value: A, *, _unsafe_bypass_check: bool = False) -> None:
        """Replace the value without hooks.

        Raises:
          TraceContextError: under another trace than the one that made this Variable.
        """
        if not _unsafe_bypass_check or isinstance(value, Tracer):  # the keyword is of flax.nnx, see `_raw_value`
            self.check_writable()
        self._store(value.get_raw_value() if isinstance(value, Variable) else value)

    def _store(self, value: Any) -> None:
        """Write a value without checks; into the jax.Ref, if the present one is kept in one."""
        cell: Any = self._cell
        if "ref" in self._metadata and isinstance(cell.value, jax.Ref):
            try:
                cell.value[...] = as_stored(value, NO_METADATA)
            except Exception as error:  # of JAX, of no narrower class
                if "array reference" in str(error):
                    error.add_note(_DEPENDS.format(where=self._where()))
                raise
        else:
            cell.value = value

    raw_value = property(get_raw_value, doc="The value as stored, without hooks.")

    def _put(self, value: A) -> None:
        if isinstance(value, Tracer):
            self.check_writable()
        self._cell.value = value

    # The name that flax.nnx uses inside. Published code sets it under any trace, which works unless a value is traced.
    _raw_value = property(get_raw_value, _put)
    _can_update = property(lambda self: self.ref or self._trace_state.is_valid())

    def check_writable(self) -> None:
        """Raise :class:`TraceContextError` unless this Variable belongs to the running trace, or has a jax.Ref."""
        if self._cell.trace is not current_trace():
            notice(self)
            if self.ref and isinstance(self._cell.value, jax.Ref):
                return
            remedy = how_to_pass(f"the object that holds this {type(self).__name__}")
            raise errors.TraceContextError(_CROSS_TRACE.format(where=self._where(), remedy=remedy))

    # The value as stored, without hooks or checks, for the library itself.
    _nnx_value = property(operator.attrgetter("_cell.value"))
    _nnx_trace = property(operator.attrgetter("_cell.trace"))  # the trace under which it was made, as for a node
    # The table of a Variable that was packed as a root. That is rare, so there is no slot for it.
    _nnx_table = property(
        lambda self: getattr(self._nnx_stamps, "table", None),
        lambda self, table: _set(
            self, "_nnx_stamps", tuple(self._nnx_stamps) if table is None else _StampsOfRoot(self._nnx_stamps, table)
        ),
    )

    def _nnx_give(self, trace: TraceRef) -> None:
        change(self, _set, self, "_cell", cell_of(self._cell.value, trace))

    def _where(self) -> str:
        path = locate(self, skip=3)
        name = f"{type(self).__name__} ({errors.describe(self._nnx_value)})"
        return f"{name} at {path}" if path else name

    # --- metadata ---

    @property
    def ref(self) -> bool:
        """Whether the value is kept in a :class:`jax.Ref`."""
        return bool(self._metadata.get("ref"))

    @property
    def hijax(self) -> bool:
        """Whether ``hijax=True`` was given, a setting of flax.nnx that has no effect here."""
        return bool(self._metadata.get("hijax"))

    @property
    def type(self) -> type[Variable[A]]:
        """The class of this Variable."""
        return type(self)

    var_type = type

    def get_metadata(
        self, name: str | None = None, default: Any = MISSING, *, exclude_required: bool | None = None
    ) -> Any:
        """Return a copy of all metadata; with ``name``, that entry, or else ``default``.

        With ``exclude_required`` all but how the value is kept: ``ref``, ``hijax`` and ``eager_sharding``.

        Raises:
          KeyError: if there is no entry ``name``, and no default.
        """
        if Watch.all:
            notice(self)
        if name is None:
            found = dict(self._metadata)
            for key in ("ref", "hijax", "eager_sharding") if exclude_required else ():
                found.pop(key, None)
            return found
        key = canonical_name(name)
        if key in self._metadata:
            return self._metadata[key]
        if default is MISSING:
            error = KeyError(name)
            known = ", ".join(map(repr, self._metadata)) or "none"
            hint = errors.did_you_mean([key], self._metadata)
            error.add_note(f"This {type(self).__name__} has no metadata {name!r}; it has: {known}.{hint}")
            raise error
        return default

    def set_metadata(self, *args: Any, **metadata: Any) -> None:
        """Set metadata: ``set_metadata(name, value)``, or by keyword. A single mapping replaces all metadata.

        Raises:
          TraceContextError: under another trace than the one that made this Variable.
          TypeError: for a single argument that is not a mapping, or more than two.
          ValueError: for another ``ref``.
        """
        if len(args) == 2:
            metadata = {args[0]: args[1], **metadata}
        replace = len(args) == 1
        if len(args) > 2 or (replace and not isinstance(args[0], Mapping)):
            given = ", ".join(f"{x!r:.80}" for x in args)
            raise errors.ArgumentError(f"set_metadata takes set_metadata(name=value) or a dict, not {given}.")
        new = canonical({**(args[0] if replace else self._metadata), **metadata})
        if "ref" in new and bool(new["ref"]) != self.ref:
            raise errors.UsageError(_PLACE_IS_FIXED.format(kind=type(self).__name__, ref=bool(new["ref"])))
        self.check_writable()
        self._replace_metadata(new)

    # The name that flax.nnx uses inside.
    _var_metadata = property(lambda self: MetadataView(self), lambda self, metadata: self.set_metadata({**metadata}))

    def has_metadata(self, name: str) -> bool:
        """Whether there is metadata of this name."""
        notice(self)
        return canonical_name(name) in self._metadata

    def del_metadata(self, name: str) -> None:
        """Remove the metadata of this name.

        Raises:
          KeyError: if there is none.
          TraceContextError: under another trace than the one that made this Variable.
        """
        key = canonical_name(name)
        if key not in self._metadata:
            raise KeyError(name)
        self.check_writable()
        self._replace_metadata({k: v for k, v in self._metadata.items() if k != key})

    def _replace_metadata(self, metadata: dict[str, Any]) -> None:
        if self.ref or "ref" in metadata:  # which tells where the value is kept, and that stays
            metadata = {**metadata, "ref": self.ref}
        change(self, _set, self, "_metadata", Metadata(metadata) if metadata else NO_METADATA)

    @property
    def sharding_names(self) -> Any:
        """The names of the axes, as given by ``sharding=`` or ``out_sharding=``; None if there are none."""
        return self._metadata.get("out_sharding")

    def add_axis(self, axis_index: int, axis_name: str | None = None) -> None:
        """Name the new axis along which a transform is about to stack the value; then run the ``on_add_axis`` hooks.

        If there already is a name for each axis of the stacked value, the names stay as they are.
        """
        name_axis(self, "out_sharding", axis_index, axis_name)
        for hook in as_hooks(self._metadata.get("on_add_axis", ())):
            hook(self, axis_index, axis_name)

    def remove_axis(self, axis_index: int, axis_name: str | None = None) -> None:
        """Drop the name of the axis along which a transform took this slice; then run the ``on_remove_axis`` hooks.

        If there is no name for that axis, the names stay as they are.
        """
        unname_axis(self, "out_sharding", axis_index)
        for hook in as_hooks(self._metadata.get("on_remove_axis", ())):
            hook(self, axis_index, axis_name)

    # --- copies ---

    def copy(self: V, value: Any = MISSING, **metadata: Any) -> V:
        """Return a new Variable of the same class, with the value and metadata replaced where given."""
        raw = self if value is MISSING else value
        if isinstance(raw, Variable):
            raw = raw.get_raw_value()
        metadata = Metadata(canonical({**self._metadata, **metadata})) if metadata else self._metadata
        raw = unshared(raw)
        return make_variable(type(self), as_stored(raw, metadata) if "ref" in metadata else raw, metadata)

    replace = copy
    to_state = copy

    def copy_from(self, other: Variable[A]) -> None:
        """Take over the value and metadata of another Variable of the same class."""
        if type(other) is not type(self):
            raise errors.UsageError(
                f"Cannot copy a {type(other).__name__} into a {type(self).__name__}: the types differ."
            )
        self.update_from_state(other)

    def update_from_state(self, variable_state: Variable[A]) -> None:
        """Take over the value and metadata of ``variable_state``, without hooks; ``ref`` stays as it is."""
        if not isinstance(variable_state, Variable):
            raise errors.ArgumentError(
                f"update_from_state takes a Variable, but got {errors.describe(variable_state)}. To set the value "
                "alone, write variable.value = ..."
            )
        self.check_writable()
        same = same_items(variable_state._metadata, self._metadata)  # before the first write: user code may raise
        self._store(unshared(plain_value(variable_state)))
        if not same:
            self._replace_metadata(dict(variable_state._metadata))

    @classmethod
    def from_metadata(cls: type[V], value: Any, attributes: Mapping[str, Any]) -> V:
        """Make a Variable from a raw value and its metadata, without hooks."""
        return make_variable(cls, value, Metadata(canonical(attributes)))

    def __copy__(self: V) -> V:
        return self.copy()

    def __deepcopy__(self: V, memo: dict) -> V:
        new = make_variable(type(self), None)
        memo[id(self)] = new
        new._cell.value = deep_copy(self.get_raw_value(), memo)
        if self._metadata:
            with jax.ensure_compile_time_eval():  # in a trace, the copies of arrays in it would be tracers otherwise
                _set(new, "_metadata", copy_lib.deepcopy(self._metadata, memo))
        return new

    def __reduce__(self) -> tuple:
        return make_variable, (type(self), None), (plain_value(self), dict(self._metadata))

    def __setstate__(self, state: tuple) -> None:
        value, metadata = state
        self._cell.value = as_stored(value, metadata) if "ref" in metadata else value
        change(self, _set, self, "_metadata", Metadata(metadata) if metadata else NO_METADATA)

    # --- attributes: metadata first, then those of the value ---

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in VariableSlots.__slots__:  # no dunders of the value; a slot may be unset yet
            raise AttributeError(name)
        metadata = self._metadata
        if name in metadata:
            if Watch.all:
                notice(self)
            return metadata[name]
        try:
            return getattr(self.get_value(), name)
        except AttributeError:
            if hasattr(type(self), name):  # what it calls has raised the error, such as a hook of `value`
                return object.__getattribute__(self, name)
            names = "; the names of its axes are `sharding_names`" if name == "sharding" and self.sharding_names else ""
            raise AttributeError(
                f"{type(self).__name__} has no metadata {name!r}, and its value ({errors.describe(self._nnx_value)}) "
                f"has no such attribute{names}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "value":
            self.set_value(value)
        elif name == "raw_value":
            self.set_raw_value(value)
        elif name == "__class__":
            self.check_writable()
            change(self, _set, self, name, value)
        elif getattr(getattr(type(self), name, None), "fset", None):  # a property that can be set
            _set(self, name, value)
        else:
            raise AttributeError(
                f"Cannot set attribute {name!r} of a {type(self).__name__}. To set metadata write "
                f"`variable.set_metadata({name}=...)`; to set the value write `variable.value = ...`"
            )

    def __delattr__(self, name: str) -> None:
        if name not in self._metadata:
            raise AttributeError(f"{type(self).__name__} has no metadata {name!r} to delete")
        self.del_metadata(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._metadata, *dir(self._nnx_value)})

    __hash__ = object.__hash__  # type: ignore[assignment]  # by identity; the operators include `==`

    def __repr__(self) -> str:
        """Write it with its size: ``Param(float32[2, 3], out_sharding=(None, 'model'))``; never raises."""
        value = self._nnx_value
        shown = errors.describe(value) if hasattr(value, "shape") else repr(value)
        if isinstance(value, jax.Array | np.ndarray) and not isinstance(value, Tracer) and value.size <= 16:
            shown = f"{shown}, deleted" if getattr(value, "is_deleted", bool)() else repr(value)
        metadata = "".join(f", {k}={v!r}" for k, v in self._metadata.items())
        return f"{type(self).__name__}({shown}{metadata})"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        import treescope.repr_lib

        return treescope.repr_lib.render_object_constructor(
            object_type=type(self),
            attributes={"value": self._nnx_value, **self._metadata},
            path=path,
            subtree_renderer=subtree_renderer,
        )


class _StampsOfRoot(tuple):
    """The stamps of a Variable that is the root of a table, and that table."""

    table: Any

    def __new__(cls, stamps: Stamps, table: Any):
        self = super().__new__(cls, stamps)
        self.table = table
        return self


_set = object.__setattr__
_set_cell_slot = VariableSlots._cell.__set__  # type: ignore[attr-defined]
_set_stamps_slot = VariableSlots._nnx_stamps.__set__  # type: ignore[attr-defined]
_set_metadata_slot = VariableSlots._metadata.__set__  # type: ignore[attr-defined]


def stored_value(x: Any) -> Any:
    """The value of a Variable as stored, for the library itself; anything else as it is."""
    return x._nnx_value if isinstance(x, Variable) else x


def plain_value(x: Any) -> Any:
    """The value of a Variable without hooks, read from its jax.Ref if it has one; anything else as it is."""
    if not isinstance(x, Variable):
        return x
    value = x.get_raw_value()
    return as_stored(value, NO_METADATA) if "ref" in x._metadata else value


_PLACE_IS_FIXED = """\
Whether a Variable keeps its value in a jax.Ref is decided when it is made; for one that does otherwise write \
{kind}(value, ref={ref}) or variable.copy(ref={ref})."""

_DEPENDS = """\
That is the jax.Ref of {where}. In a derivative, write jax.lax.stop_gradient(value) to it. In a vmap, give it an axis \
(in_axes), or reduce the value first."""

_CROSS_TRACE = """\
Cannot write to {where} from inside a JAX transformation that it was not passed to: the new value would outlive its \
trace.
{remedy}

Or make the computation read-only (for example `model.eval()`), or split it: `nnx.merge` inside makes a fresh object."""

# --- the types ------------------------------------------------------------------------------------------------------

register_variable(Variable)

if TYPE_CHECKING:
    VariableState = Variable
else:

    class _OlderName(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return (_of_type if len(args) > 1 or "type" in kwargs else Variable)(*args, **kwargs)

        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, Variable)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, Variable)

    def _of_type(type: type[V], value: Any, **metadata: Any) -> V:
        if not issubclass(type, Variable):
            raise errors.ArgumentError(f"VariableState takes the type of a Variable, then its value, not {type}.")
        made = object.__new__(type)
        Variable.__init__(made, value, **metadata)
        return made

    class VariableState(Variable[A], metaclass=_OlderName):
        """An older name of what a State holds: every Variable is one.

        ``VariableState(Param, value, **metadata)`` makes a Variable of the given type, ``VariableState(value)`` one of
        the type Variable.
        """


class Param(Variable[A]):
    """A learnable parameter."""


class BatchStat(Variable[A]):
    """A running statistic, such as the mean of a BatchNorm."""


class Cache(Variable[A]):
    """State kept between calls of a decoder, such as the keys and values of attention."""


class Intermediate(Variable[A]):
    """A value recorded by :meth:`Module.sow`."""


class Perturbation(Intermediate[A]):
    """A zero added to an intermediate value, whose gradient is the gradient of that value."""


class RngState(Variable[A]):
    """State of a random stream."""


class RngCount(RngState[A]):
    """How many keys a random stream has given out."""


class RngKey(RngState[A]):
    """The key of a random stream."""
