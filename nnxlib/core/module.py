"""Module: the base class of layers and models; and views of a Module with other settings.

A Module is a Pytree that behaves like a layer: it switches between training and evaluation, records intermediate
values, and lists its submodules.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from .annotations import parameters_of, signature_as_text
from .calls import current_collector, is_observed, observed, recorded_types, recorder_for
from .containers import MODULE_METHODS, Dict, List, holds_data
from .errors import ArgumentError, Path, UsageError, describe, describe_nested, did_you_mean, format_path
from .filters import Filter, to_predicate
from .formulas import broadcasts
from .iteration import iter_children, iter_objects
from .missing import MISSING
from .objects import HasAttributes, Node, Pytree, set_marked
from .ops import clone
from .recordings import attribute_for, record, recorded_in, recorded_name
from .switches import flag
from .tracing import boundary
from .variable_names import variable_type_from_name
from .variables import Perturbation, Variable

A = TypeVar("A")

M = TypeVar("M", bound="Module")

# The attributes that are True in evaluation, and the arguments of constructors that choose them.
_MODES = {"deterministic": ("deterministic",), "use_running_average": ("use_running_average", "update_stats")}


def _append(old: tuple, new: Any) -> tuple:
    if not isinstance(old, tuple | list):  # an array would be taken apart
        raise ArgumentError(
            f"sow appends to a tuple, but the Variable of that name holds {describe(old)}. Record under another name, "
            "or pass reduce_fn and init_fn."
        )
    return *old, new


def _keeps_shapes(value: Any, added: Any) -> bool:
    """Whether a sum of two pytrees of arrays has the shapes of the first."""
    (xs, structure), (ys, other) = jax.tree.flatten(value), jax.tree.flatten(added)
    return structure == other and all(broadcasts(jnp.shape(y), jnp.shape(x)) for x, y in zip(xs, ys))


if TYPE_CHECKING:
    _ProtocolMeta = ABCMeta
else:
    _ProtocolMeta = type(Protocol)


class ModuleMeta(_ProtocolMeta):
    """The metaclass of Modules.

    It cannot be ``type``, since libraries derive a metaclass from ``type(nnx.Module)`` and that of another base class.
    It derives from the metaclasses of :class:`abc.ABC` and Protocol, so that a Module may have these as bases.
    """

    # Not the checks of Protocol's metaclass, which first ask whether the class is a protocol, which a Module never is.
    __subclasscheck__ = ABCMeta.__subclasscheck__

    def __instancecheck__(cls, x: Any) -> bool:
        """A List or Dict with data in it counts as a Module; one without is like a plain list or dict."""
        if ABCMeta.__instancecheck__(cls, x):
            return True
        return cls is Module and isinstance(x, List | Dict) and holds_data(x)

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        # Not the `__new__` of the metaclass of Protocol, which takes a class with the base Generic for a protocol.
        return super(_ProtocolMeta, mcs).__new__(mcs, name, bases, namespace, **kwargs)


# The last class of each name. IPython's `%autoreload` gives the methods of the previous one the code of those of the
# next, and fails if that has more free variables: so a method that it has edited alone has to be a wrapper again.
_latest: dict[tuple[str, str], weakref.ref[type]] = {}


def _observe(cls: type, take: Callable[[Any], bool] = inspect.isfunction) -> None:
    """Wrap those functions of a class that are ``__call__`` or a public method."""
    for name, method in list(vars(cls).items()):
        if take(method) and (name == "__call__" or not name.startswith("_")):
            setattr(cls, name, observed(method, name))


class Module(Pytree, metaclass=ModuleMeta):
    """Base class of neural network layers and models.

    Attributes hold parameters (Variables), submodules, arrays, lists and dicts of these, and static values.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> class Block(nnx.Module):
    ...   def __init__(self, features, *, rngs):
    ...     self.linears = [nnx.Linear(features, features, rngs=rngs) for _ in range(2)]
    ...     self.dropout = nnx.Dropout(0.1, rngs=rngs)
    ...   def __call__(self, x):
    ...     for linear in self.linears:
    ...       x = self.dropout(nnx.relu(linear(x)))
    ...     return x
    >>> block = Block(4, rngs=nnx.Rngs(0))
    >>> block.eval()
    >>> block(jnp.ones((1, 4))).shape
    (1, 4)
    """

    __slots__ = ()

    if TYPE_CHECKING:  # so that what is annotated as a Module may be called
        __call__: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _observe(cls)
        name = cls.__module__, cls.__qualname__
        if (last := _latest.get(name)) and (previous := last()):
            _observe(previous, lambda x: inspect.isfunction(x) and not is_observed(x))
        _latest[name] = weakref.ref(cls)

    # --- training and evaluation ---

    def train(self, **attributes: Any) -> None:
        """Switch to training: ``deterministic`` and ``use_running_average`` get back the user's own setting.

        An attribute that :meth:`eval` has overridden gets the value it had before. One that the user has set (such as
        ``use_running_average=True`` on a BatchNorm that is to stay frozen) keeps its value; if that leaves all dropout
        of the model off, there is a warning. One that was never set (``None``) becomes False, and so does one of a
        Module whose class takes no such argument: there True is only the mode. ``**attributes`` are set on all Modules
        that have them; if none has, there is a warning.

        >>> import nnxlib as nnx
        >>> frozen = nnx.BatchNorm(2, use_running_average=True, rngs=nnx.Rngs(0))
        >>> model = nnx.Sequential(frozen, nnx.Dropout(0.5))
        >>> model.train()
        >>> frozen.use_running_average, model[1].deterministic
        (True, False)
        """
        found = list(_with_mode(self))
        for module, name in found:
            remembered = (module._nnx_marks or {}).get((name,), MISSING)
            own = getattr(module, name) if remembered is MISSING else remembered
            mode = False if own is None or (own is True and not _takes(type(module), name)) else own
            if remembered is not MISSING or mode is not own:
                setattr(module, name, mode)
        _set_with_mode(self, attributes)
        if "deterministic" not in attributes:
            _warn_of_evaluation(self, found)

    def eval(self, **attributes: Any) -> None:
        """Switch to evaluation: ``deterministic`` and ``use_running_average`` become True; :meth:`train` undoes it."""
        for module, name in _with_mode(self):
            own = getattr(module, name)
            if own is not True:
                set_marked(module, name, True, (name,), own)
        _set_with_mode(self, attributes)

    def set_attributes(
        self, *filters: Filter, raise_if_not_found: bool = True, graph: bool | None = None, **attributes: Any
    ) -> None:
        """Set attributes on this Module and those below it, where they exist.

        Args:
          *filters: which Modules to change: those that one of these takes; by default all.
          raise_if_not_found: whether it is an error if no Module has an attribute.
          graph: accepted for compatibility: there is one mode.
          **attributes: the values by name.

        >>> import nnxlib as nnx
        >>> model = nnx.Sequential(nnx.Dropout(0.5), nnx.Dropout(0.2))
        >>> model.set_attributes(rate=0.0)
        >>> [layer.rate for layer in model.layers]
        [0.0, 0.0]

        Raises:
          ValueError: naming the attributes that no Module has, unless ``raise_if_not_found`` is False; none is set.
        """
        _set_where_found(self, filters or (...,), attributes, raise_if_not_found)

    # --- recording ---

    def sow(
        self,
        variable_type: type[Variable] | str,
        name: str,
        value: Any,
        reduce_fn: Callable[[Any, Any], Any] = _append,
        init_fn: Callable[[], Any] = tuple,
        capture_noop: bool | None = None,
    ) -> bool:
        """Record a value under ``name``, in a Variable of ``variable_type``: by default, append it to a tuple.

        Take recordings out with ``nnx.pop(model, nnx.Intermediate)``, or run the model under ``nnx.capture``. Within a
        ``capture`` only values of its types are recorded.

        Args:
          variable_type: the type of the Variable, or its registered name.
          name: the attribute that holds the Variable.
          value: an array or any pytree.
          reduce_fn: ``(old, value) -> new``.
          init_fn: makes the first ``old``.
          capture_noop: with True, nothing is recorded outside of a ``capture``; None stands for
            ``nnx_sow_capture_noop`` in ``flax.config``, False by default.

        Returns:
          Whether the value was recorded.

        Raises:
          ValueError: when the attribute exists and is something else.
          TypeError: when there is a value to which nothing can be appended.
        """
        kind = _variable_type(variable_type)
        if not _records(kind, capture_noop):
            return False
        node = recorder_for(self)
        name = attribute_for(node, name)
        found = _recorded(node, name, kind)
        if found is None:
            record(node, name, kind(reduce_fn(init_fn(), value)), appends=reduce_fn is _append and init_fn is tuple)
        else:
            found.set_value(reduce_fn(found.get_value(), value))
        return True

    def perturb(
        self,
        name: str,
        value: Any,
        variable_type: type[Variable] | str = Perturbation,
        capture_noop: bool | None = None,
    ) -> Any:
        """Add a Variable of zeros to ``value``: its gradient is the gradient of ``value``.

        Args:
          name: the attribute that holds the Variable, which is made if it does not exist yet; but not within a
            ``capture`` of other types, where ``value`` is returned as it is.
          value: an array, or a pytree of arrays.
          variable_type: the type of the Variable, or its registered name.
          capture_noop: with True, no Variable is made outside of a ``capture``; None as in :meth:`sow`.

        Returns:
          The sum.

        Raises:
          ValueError: when the attribute exists and is something else, or was made for other shapes.
        """
        kind, node = _variable_type(variable_type), recorder_for(self)
        name = attribute_for(node, name)
        found = _recorded(node, name, kind)
        if found is None and not _records(kind, capture_noop):
            return value
        if found is None:
            found = kind(jax.tree.map(jnp.zeros_like, value))
            record(node, name, found)
        zeros = found.get_value()
        if not _keeps_shapes(value, zeros):
            raise UsageError(
                f"The {kind.__name__} {name!r} of {type(self).__name__} was made for {describe_nested(zeros)}, but the "
                f"value is {describe_nested(value)}. Take it out, and it is made anew: nnx.pop(model, {kind.__name__})."
            )
        return jax.tree.map(jnp.add, value, zeros)

    @property
    def __captures__(self) -> tuple[Variable, ...]:
        """Within an ``nnx.capture`` what is recorded here so far: for each type a Variable of a dict, by name."""
        if current_collector() is None:
            raise AttributeError(f"{type(self).__name__} has no attribute '__captures__' outside of nnx.capture")
        node = recorder_for(self)
        found = [(recorded_name(name), node._nnx_contents()[name]) for name in recorded_in(node)]
        kinds = dict.fromkeys((*recorded_types(), *[type(x) for _, x in found]))
        return tuple([kind({name: x.get_raw_value() for name, x in found if type(x) is kind}) for kind in kinds])

    # --- submodules ---

    def iter_modules(self) -> Iterator[tuple[Path, Any]]:
        """Yield (path, module) for this Module and all below it, children before parents."""
        return iter_modules(self)

    def iter_children(self) -> Iterator[tuple[Any, Any]]:
        """Yield (key, child) for the Modules and Variables directly in this one."""
        return iter_children(self)


for _method in (Module.train, Module.eval, Module.set_attributes, Module.iter_modules, Module.iter_children):
    MODULE_METHODS[_method.__name__] = _method


def _with_mode(root: Any) -> Iterator[tuple[Any, str]]:
    for _, x in list(iter_objects(root)):
        if isinstance(x, HasAttributes) and isinstance(x, Module):
            yield from ((x, name) for name in _MODES if _can_set(x, name))


def _can_set(module: Any, name: str) -> bool:
    """Whether a Module has an attribute that is no method: its own, a default of its class, or a property to set."""
    if name in module._nnx_contents():
        return True
    kind = type(module)
    if not hasattr(kind, name) or not isinstance(module, HasAttributes):
        return False
    found = inspect.getattr_static(kind, name)
    if hasattr(type(found), "__set__"):
        return getattr(found, "fset", found) is not None and hasattr(module, name)
    return not hasattr(type(found), "__get__")


@functools.lru_cache(maxsize=256)
def _takes(module_type: type, mode: str) -> bool:
    """Whether a constructor of this class, or of a base class, has an argument that chooses a mode.

    If none has, the class itself has set the attribute, as a mode that ``train`` and ``eval`` are to switch.
    """
    constructors = [vars(base)["__init__"] for base in module_type.__mro__ if "__init__" in vars(base)]
    return any(p.name in _MODES[mode] for constructor in constructors for p in parameters_of(constructor))


def _set_with_mode(root: Any, attributes: dict[str, Any]) -> None:
    """Set the attributes that were given to ``train`` or ``eval``, with a warning of those that no Module has.

    Nothing else would tell that ``model.train(mode=False)`` trains. But a model without dropout may well have no
    ``deterministic``.
    """
    missing = _set_where_found(root, (...,), attributes, False).difference(_MODES) if attributes else ()
    if missing:
        warnings.warn(
            f"No Module in {type(root).__name__} has the attributes {sorted(missing)}, so they were not set; the mode "
            f"itself is set by model.train() and model.eval().{_near([x for _, x in iter_modules(root)], missing)}",
            stacklevel=3,
        )


def _warn_of_evaluation(root: Any, found: list[tuple[Any, str]]) -> None:
    """Warn if ``train`` has left each layer with a ``deterministic`` in evaluation: in flax.nnx they would now train.

    One that is to drop nothing has a rate of 0. (Statistics, however, are often frozen, those of a whole model, too.)
    """
    modes = [module.deterministic for module, name in found if name == "deterministic"]
    if modes and all(mode is True for mode in modes):
        warnings.warn(
            f"After train(), all dropout in {type(root).__name__} is still off: its layers were given "
            "deterministic=True, which train() takes for a setting of your own. To turn it on, leave that out where "
            "they are made, or write set_attributes(deterministic=False).",
            stacklevel=3,
        )


def _near(modules: Iterable[Any], missing: Iterable[str]) -> str:
    known = {name for module in modules for name, _ in module._nnx_children()}
    return did_you_mean(missing, known)


def _variable_type(name_or_type: type[Variable] | str) -> type[Variable]:
    if isinstance(name_or_type, str):
        return variable_type_from_name(name_or_type, allow_register=True)
    return name_or_type


def _recorded(node: Any, name: str, kind: type[Variable]) -> Variable | None:
    """The recording under a name, if there is one."""
    found = node._nnx_contents().get(name)
    if found is not None and type(found) is not kind:
        expected = f"of type {kind.__name__}" if isinstance(found, Variable) else "a Variable"
        raise UsageError(
            f"Expected the attribute {name!r} of {type(node).__name__} to be {expected}, got "
            f"{type(found).__name__}; choose another name to record under."
        )
    return found


def _records(kind: type[Variable], only_in_capture: bool | None) -> bool:
    """Whether to record Variables of this very type, given those that the enclosing ``nnx.capture`` takes out."""
    collector = current_collector()
    if collector is None:
        return not (flag("nnx_sow_capture_noop", False) if only_in_capture is None else only_in_capture)
    return kind in collector.types


def _set_where_found(
    node: Any, filters: tuple[Filter, ...], attributes: dict[str, Any], raise_if_not_found: bool
) -> set[str]:
    """Set the attributes where they exist; returns those that exist nowhere.

    Raises:
      UsageError: if there are such, unless ``raise_if_not_found`` is False; then nothing has been set.
    """
    predicates = [to_predicate(f) for f in filters]
    found = ((path, x) for path, x in iter_objects(node) if isinstance(x, (Pytree, Module)))  # Module: for Lists
    modules = [x for path, x in found if any(p(path, x) for p in predicates)]
    places = [(module, name) for module in modules for name in attributes if _can_set(module, name)]
    missing = attributes.keys() - {name for _, name in places}
    if missing and raise_if_not_found:
        raise UsageError(
            f"Could not find at least one instance of the following attributes: {sorted(missing)}; no Module in "
            f"{type(node).__name__}{_taken_by(*filters)} has them. Pass raise_if_not_found=False to set those that "
            f"exist.{_near(modules, missing)}"
        )
    for module, name in places:
        setattr(module, name, attributes[name])
    return missing


def _taken_by(*filters: Filter) -> str:
    """For a message: that not all Modules are meant."""
    return "" if filters == (...,) else " that the filters take"


@boundary
def iter_modules(module: Any, /) -> Iterator[tuple[Path, Any]]:
    """Yield (path, module) for each Module in a graph, children before parents.

    A List or Dict with data in it counts as a Module; one without is like a plain list or dict.

    >>> import nnxlib as nnx
    >>> [path for path, _ in nnx.iter_modules(nnx.Sequential(nnx.Dropout(0.5)))]
    [('layers', 0), ('layers',), ()]
    """
    return ((path, x) for path, x in iter_objects(module) if isinstance(x, Node) and isinstance(x, Module))


@boundary
def iter_module_children(node: Any, /) -> Iterator[tuple[Any, Any]]:
    """Yield (key, child) for the Modules that are attributes or items of ``node``.

    >>> import nnxlib as nnx
    >>> model = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)])
    >>> [(key, type(child).__name__) for key, child in nnx.iter_module_children(model)]
    [(0, 'Linear'), (1, 'Dropout')]
    """
    return ((key, x) for key, x in iter_children(node) if isinstance(x, Module))


def first_from(*args: A | None, error_msg: str) -> A:
    """Return the first argument that is not None, for settings given in the call or else on the layer.

    >>> import nnxlib as nnx
    >>> at_call, of_layer = None, False
    >>> nnx.module.first_from(at_call, of_layer, error_msg='Say whether this is training.')
    False

    Raises:
      ValueError: with ``error_msg``, if all are None.
    """
    for arg in args:
        if arg is not None:
            return arg
    raise UsageError(error_msg)


# --- views ----------------------------------------------------------------------------------------------------------


@boundary
def with_attributes(node: A, /, *, only: Filter = ..., raise_if_not_found: bool = True, **attributes: Any) -> A:
    """Return new nodes around the *same* Variables, with attributes set where they exist.

    Args:
      node: a Module, or a pytree of Modules.
      only: filter of the nodes whose attributes are set.
      raise_if_not_found: whether it is an error if no node has an attribute.
      **attributes: the values by name.

    >>> import nnxlib as nnx
    >>> dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    >>> nnx.with_attributes(dropout, rate=0.1).rate, dropout.rate
    (0.1, 0.5)

    Raises:
      ValueError: naming the attributes that no node has, unless ``raise_if_not_found`` is False.
    """
    made = clone(node, variables=False)
    _set_where_found(made, (only,), attributes, raise_if_not_found)
    return made


@boundary
def view(node: A, /, *, only: Filter = ..., raise_if_not_found: bool = True, **settings: Any) -> A:
    """Return new nodes around the *same* Variables, with settings made through each Module's ``set_view``.

    A class of your own takes a setting if it has a method of this name with that argument; attributes alone are set by
    :func:`with_attributes`.

    Args:
      node: a Module, or a pytree of Modules.
      only: filter of the Modules to set.
      raise_if_not_found: whether it is an error if no Module takes a setting.
      **settings: passed to the ``set_view`` of each Module that takes them; :func:`view_info` lists them.

    >>> import nnxlib as nnx
    >>> model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    >>> nnx.view(model, deterministic=True)[0].deterministic, model[0].deterministic
    (True, False)
    >>> class Decoder(nnx.Module):
    ...   decode = False
    ...   def set_view(self, decode: bool | None = None):
    ...     if decode is not None:
    ...       self.decode = decode
    >>> nnx.view(Decoder(), decode=True).decode
    True

    Raises:
      ValueError: naming the settings that no Module takes, unless ``raise_if_not_found`` is False.
    """
    made = clone(node, variables=False)
    accepted: dict[type, Any] = {}  # the names of the settings that each class takes
    for module in _with_view(made, only):
        kind = type(module)
        names = accepted[kind] = accepted.get(kind) or _view_parameters(kind).keys()
        module.set_view(**{name: value for name, value in settings.items() if name in names})
    known = {name for names in accepted.values() for name in names}
    missing = settings.keys() - known
    if raise_if_not_found and missing:
        places = [(*path, name) for path, x in iter_modules(node) for name in missing if _can_set(x, name)]
        attribute = f" {format_path(places[0])} is an attribute, which nnx.with_attributes sets." if places else ""
        raise UsageError(
            f"Unused keys found in nnx.view: {sorted(missing)}; no Module{_taken_by(only)} has such settings. "
            f"nnx.view_info(model) lists them.{did_you_mean(missing, known)}{attribute}"
        )
    return made


@boundary
def view_info(node: Any, /, *, only: Filter = ...) -> str:
    """Describe the settings that ``nnx.view`` can make on the Modules of ``node`` that ``only`` takes, class by class.

    >>> import nnxlib as nnx
    >>> print(nnx.view_info(nnx.Dropout(0.5)))
    Dropout:
      deterministic: bool | None = None
    """
    found = {type(module).__qualname__: type(module) for module in _with_view(node, only)}
    return "\n".join(f"{name}:\n{_settings_text(cls)}" for name, cls in sorted(found.items()))


def _with_view(node: Any, only: Filter) -> list[Any]:
    """The nodes that a filter takes whose class has a ``set_view``; an Rngs itself answers to every name, this too."""
    predicate = to_predicate(only)
    nodes = [(path, x) for path, x in iter_objects(node) if isinstance(x, Node) and hasattr(type(x), "set_view")]
    return [x for path, x in nodes if predicate(path, x)]


def _settings_text(cls: type) -> str:
    """The settings of a class, each with what the docstring of ``set_view`` says of it under ``Args:``."""
    described, lines = _described_arguments(inspect.getdoc(cls.set_view) or ""), []  # type: ignore[attr-defined]
    for name, parameter in _view_parameters(cls).items():
        kind = parameter.annotation
        kind = kind if isinstance(kind, str) else inspect.formatannotation(kind)
        lines += [f"{name}: {kind} = {parameter.default}", *(f"  {line}" for line in described.get(name, ()))]
    return "\n".join(f"  {line}" for line in lines)


def _described_arguments(docstring: str) -> dict[str, list[str]]:
    """The lines about each argument in the section ``Args:`` of a docstring."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    text = inspect.cleandoc(section.group(1)) if section else ""
    _, *found = re.split(r"^(\w+):", text, flags=re.MULTILINE)  # a name, the text about it, the next name ...
    lines = [[line.strip() for line in about.splitlines() if line.strip()] for about in found[1::2]]
    return dict(zip(found[::2], lines, strict=True))


def _view_parameters(cls: Any) -> dict[str, inspect.Parameter]:
    parameters = signature_as_text(cls.set_view).parameters
    return {name: p for name, p in parameters.items() if name != "self" and p.kind is not p.VAR_KEYWORD}
